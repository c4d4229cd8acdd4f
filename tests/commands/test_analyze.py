"""Analyses of real H200 runs with figures checked by hand, rules on synthetic launches and counters,
and findings about many cells.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import profharness
from profharness.attention.config import parse_config
from profharness.commands._answers import merged_text
from profharness.commands.analyze.answer import analyze_answer
from profharness.commands.analyze.cells import analyze_all, analyze_cell
from profharness.commands.analyze.figures import (
    DERIVED,
    MEASURED,
    SEVERITIES,
    CellAnalysis,
    Remedy,
    RunMachine,
)
from profharness.commands.analyze.remedies import bottleneck
from profharness.commands.analyze.rules import (
    THRESHOLDS,
    WARP_STATE_WORDS,
    helpers,
    score_traffic,
)
from profharness.commands.analyze.several import (
    LITTLE_MEMORY,
    changed_problems,
    choices,
    common_findings,
    common_remedies,
    drops,
    missing_scenarios,
    sweep,
    where,
)
from profharness.commands.analyze.tables import analyze_document, cell_notes
from profharness.devices import Device, Peaks, data_sheet
from profharness.program.counters import read_counters
from profharness.recording.profilers import ncu
from profharness.render.document import Heading, Note
from profharness.render.terminal import render_table
from profharness.rows import DRAM_READ, DRAM_WRITE, CellRow, KernelRow
from profharness.store import ingest_path

TRACES = Path(__file__).parents[2] / "traces"
H200 = Device(
    0, "NVIDIA H200", 9, 0, 132, 150109880320, 1024, 2048, 65536, 65536, 49152, 232448, 233472, 32
)
SQUARE = "b2-h8-s512-d64-fp16"
DECODE = "b1-h32-kv8-sq1-skv4096-d128-bf16"
ODD = "b2-h8-s512-d100-fp16"
BACKWARD = "b2-h8-s1024-d64-fp16-causal-bwd"
MACHINE = RunMachine(H200, data_sheet("NVIDIA H200"), 62914560)
Cells = dict[tuple[str, str], CellAnalysis]
MANY_SMS = replace(MACHINE, device=replace(H200, num_sms=10007))  # never a persistent grid


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """Return every cell of the run with three profilers, by config and backend."""
    path = tmp_path_factory.mktemp("analysis") / "s.db"
    ingest_path(path, TRACES / "h200-torch-nsys-ncu")
    found = profharness.analyze(store=path).attrs["analyses"]
    return {(each.config.label, each.backend): each for each in found}


def evidence(each: CellAnalysis, code: str) -> dict[str, float | str]:
    finding = each.finding(code)
    assert finding is not None, f"{code} is not among {[f.code for f in each.findings]}"
    return {item.name: item.value for item in finding.evidence}


def test_waves_and_splits_of_flash(h200: Cells) -> None:
    flash = h200[SQUARE, "flash"]
    one = evidence(flash, "one_wave")
    assert (one["blocks"], one["SMs"]) == (256, 132)
    assert one["waves"] == pytest.approx(256 / (2 * 132), abs=1e-3)  # 0.97; two blocks per SM
    combine = evidence(flash, "split_overhead")
    assert combine["share"] == pytest.approx(5.10 / 12.75, abs=0.01)
    # Without the split, the main kernel would have fewer blocks and take longer.
    split = flash.finding("split_overhead")
    assert split is not None and split.factor is None
    assert not any("split_overhead" in remedy.findings for remedy in flash.remedies)
    assert flash.bottleneck == "latency"
    # grid (8, 2, 16): 8 query tiles and 2 splits for each of 16 heads
    assert evidence(flash, "kv_reread")["blocks per K/V head"] == 8


def test_dram_bytes_of_decode_are_the_compulsory_ones(h200: Cells) -> None:
    flash = h200[DECODE, "flash"]
    assert flash.figures.compulsory_bytes == 16793600  # K and V, 8 heads x 4096 x 128 x 2 B each
    found = evidence(flash, "dram_traffic")
    assert 1.0 < float(found["DRAM bytes"]) / 16793600 < 1.05
    main = next(kernel for kernel in flash.kernels if kernel.role == "attention")
    assert main.dram_read_bytes == 16845312
    assert flash.figures.intensity == pytest.approx(4.0, abs=0.01)
    assert flash.finding("memory_bound") is not None
    assert flash.finding("compute_bound") is None
    assert flash.bottleneck == "combine"  # 9.3 of 17.0 µs
    assert evidence(flash, "split_overhead")["share"] == pytest.approx(9.3 / 17.0, abs=0.005)
    assert flash.finding("kv_reread") is None  # every block reads its own part


def test_measured_gains_precede_bounds(h200: Cells) -> None:
    flash = h200["b2-h8-s1024-d64-fp16-causal-bwd", "flash"]
    first, second, *_ = flash.remedies
    assert first.measured and not second.measured
    assert first.factor is not None and second.factor is not None and first.factor < second.factor
    gain = f"{first.factor:.3g}"
    for full in (False, True):
        notes = [note.text for note in cell_notes(flash, full=full)]
        (measured,) = [at for at, text in enumerate(notes) if f"Measured {gain} times" in text]
        bounds = [at for at, text in enumerate(notes) if "At most" in text]
        assert bounds and measured < min(bounds)


def test_a_faster_backend_replaces_the_advice_to_use_a_fused_one(h200: Cells) -> None:
    texts = [remedy.text for remedy in h200[SQUARE, "math"].remedies]
    assert any(text.startswith("Use cudnn") for text in texts)
    assert not any(text.startswith("Use a fused backend") for text in texts)


def test_rates_of_cudnn_by_hand(h200: Cells) -> None:
    cudnn = h200[SQUARE, "cudnn"]
    figures = cudnn.figures
    assert figures.basis == "kernel"
    assert figures.flops == 4 * 2 * 8 * 512 * 512 * 64
    assert figures.duration_ns is not None
    assert figures.flops_per_s == pytest.approx(figures.flops / figures.duration_ns * 1e9)
    assert figures.flops_share == pytest.approx(figures.flops / 8.224e-6 / 989.5e12, rel=1e-3)
    assert figures.ridge == pytest.approx(989.5e12 / 4.8e12)
    assert cudnn.bottleneck == "few blocks"
    blocks = evidence(cudnn, "few_blocks")
    assert (blocks["blocks"], blocks["SMs"]) == (64, 132)
    named = cudnn.finding("bottleneck")
    assert named.grade == DERIVED
    assert named.evidence


def test_math_pays_for_its_score_matrices(h200: Cells) -> None:
    math_cell = h200[SQUARE, "math"]
    found = evidence(math_cell, "score_traffic")
    assert found["score matrix"] == 16 * 512 * 512 * 4
    assert float(found["DRAM bytes"]) > 20 * 4194304
    assert math_cell.bottleneck == "unfused ops" and math_cell.finding("input_copies") is None
    assert evidence(math_cell, "fp32_products")["fp32 rate"] == 67
    assert math_cell.finding("faster_backend") is not None
    best = math_cell.remedies[0]
    assert best.findings == ("faster_backend",)
    assert "CUDNN_ATTENTION" in best.text
    times = [h200[SQUARE, name].figures.graph_ns for name in ("math", "cudnn")]
    assert best.factor == pytest.approx(times[0] / times[1])
    softmax = next(phase for phase in math_cell.phases if phase.name == "softmax")
    assert softmax.bytes == 2 * 16 * 512 * 512 * 4


def test_math_of_a_decode_step_pays_for_copies_of_its_inputs(h200: Cells) -> None:
    """K and V are repeated for four heads each and cast to fp32. A score matrix has half a
    megabyte.
    """
    each = h200[DECODE, "math"]
    assert each.bottleneck == "input copies" and each.phases[0].name == "repeat K and V"
    assert 0.7 < each.figures.dram_bytes / sum(phase.bytes for phase in each.phases) < 1.2
    copies, scores = each.finding("input_copies"), each.finding("score_traffic")
    assert (copies.severity, copies.grade) == ("major", DERIVED)
    assert "(repeat K and V and casts)" in copies.sentence
    found = evidence(each, "input_copies")
    assert found["score matrix"] == 32 * 4096 * 4 and found["bytes of copies"] > 250e6
    assert scores.severity == "minor"


def test_padding_and_launching_are_found(h200: Cells) -> None:
    copies = h200[ODD, "flash"].finding("copies")
    assert "head_dim 100" in copies.sentence
    assert 0.3 < float(evidence(h200[ODD, "flash"], "copies")["share"]) < 0.4
    gap = evidence(h200[BACKWARD, "cudnn"], "launch_gap")
    assert h200[BACKWARD, "cudnn"].bottleneck == "launch"
    assert float(gap["event time"]) > 2 * float(gap["graph time"])
    # the cold cache, not launching, is most of the difference between decode's event time and its
    # kernels
    assert h200[DECODE, "cudnn"].bottleneck != "launch"
    assert h200[ODD, "cudnn"].status == "refused"
    assert h200[ODD, "cudnn"].findings == ()


def test_every_finding_has_evidence_and_every_remedy_a_finding(h200: Cells) -> None:
    assert len(h200) == 24
    for each in h200.values():
        codes = {finding.code for finding in each.findings}
        for finding in each.findings:
            assert finding.evidence, finding
            assert finding.severity in SEVERITIES
            assert finding.grade in (MEASURED, DERIVED)
            assert finding.sentence.endswith(".")
        for remedy in each.remedies:
            assert remedy.findings
            assert set(remedy.findings) <= codes
        factors = [remedy.factor for remedy in each.remedies if not remedy.measured]
        known = [factor for factor in factors if factor is not None]
        assert known == sorted(known, reverse=True)
        assert factors == [*known, *([None] * (len(factors) - len(known)))]
        assert (each.bottleneck is None) == (each.finding("bottleneck") is None)


def cell(config: str = SQUARE, backend: str = "mine", **samples: tuple[int, ...]) -> CellRow:
    return CellRow(
        "r", "c0", config, backend, "ok", None, None, None, 5, (), (), samples, None, {}, None
    )


def kernel(
    grid: tuple[int, int, int],
    time_ns: int = 10_000,
    shared: int = 49152,
    block: tuple[int, int, int] = (128, 1, 1),
    registers: int = 128,
) -> KernelRow:
    """Return a kernel of an unknown family with one launch per call and five profiled calls."""
    return KernelRow(
        *("r", SQUARE, "mine", "c0", "torch", "ok", None),
        *("my_attention", "my_attention", "kernel", "other"),
        *(grid, block, registers, None, None, shared, 5, 1.0),
        *(time_ns, 5 * time_ns, time_ns, time_ns, 1.0, 0, None, None, 0.25, "registers", 0),
    )


@given(st.integers(1, 5000), st.sampled_from((32, 64, 128, 255)))
def test_waves_tail_and_idle_sms_follow_from_the_grid(blocks: int, registers: int) -> None:
    found = analyze_cell(cell(), [kernel((blocks, 1, 1), registers=registers)], MACHINE)
    (main,) = found.kernels
    assert main.waves is not None
    assert main.blocks_per_sm is not None
    assert main.waves == pytest.approx(blocks / (132 * main.blocks_per_sm))
    assert (found.finding("few_blocks") is not None) == (blocks < 132)
    tail = found.finding("tail")
    if tail is not None:
        idle = 1 - main.waves / math.ceil(main.waves)
        assert main.waves > 1
        assert idle >= 0.1
        assert tail.factor == pytest.approx(math.ceil(main.waves) / main.waves)


def test_one_query_a_block_is_the_bottleneck_of_the_study() -> None:
    """Grid batch x heads x queries, 256 threads, 384 B of shared memory: K and V read per query."""
    config = "b1-h4-s64-d8192-fp32"
    rows = [kernel((256, 1, 1), 183_000, 384, (256, 1, 1), 40)]
    found = analyze_cell(cell(config), rows, MACHINE)
    reread = evidence(found, "kv_reread")
    assert reread["blocks per K/V head"] == 64
    assert reread["K and V traffic"] == 64 * 2 * 4 * 64 * 8192 * 4
    assert reread["its rate"] == pytest.approx(64 * 2 * 4 * 64 * 8192 * 4 / 183_000, abs=0.1)
    assert found.finding("unused_shared") is not None
    assert found.bottleneck == "K and V traffic"
    assert any("more query rows" in remedy.text for remedy in found.remedies)
    places = evidence(found, "working_set")
    assert places["K and V of one head"] == 2 * 64 * 8192 * 4
    # 8 blocks of 384 B and 1 KiB of the driver's take 16 KiB of the unified L1
    assert places["the part of an SM's L1 that is not used as shared memory"] == (256 - 16) * 1024


def test_a_launch_gap_allows_for_the_flushed_l2() -> None:
    """16.8 MB at 4.8 TB/s take 3.5 µs, which explains a call of 16.1 µs with kernels of 9.1 µs."""
    decode = cell(DECODE, event=(16_100, 16_100))
    found = analyze_cell(decode, [kernel((256, 1, 1), 9_100)], MACHINE)
    gap = evidence(found, "launch_gap")
    assert gap["refilling the L2"] == pytest.approx(16793600 / 4.8e12 * 1e6, abs=1e-3)
    assert found.bottleneck != "launch"
    fast = replace(MACHINE, peaks=replace(MACHINE.peaks or Peaks("", "", None), source="measured"))
    slow = analyze_cell(cell(DECODE, event=(40_000,)), [kernel((256, 1, 1), 9_100)], fast)
    assert slow.bottleneck == "launch"
    launch = slow.finding("launch_gap")
    assert launch.factor == pytest.approx(40_000 / (9_100 + 16793600 / 4.8e3), rel=1e-3)


@given(
    seq_q=st.integers(1, 96),
    seq_kv=st.integers(1, 96),
    tile=st.sampled_from((1, 8, 16)),
    causal=st.booleans(),
)
@example(seq_q=512, seq_kv=4096, tile=64, causal=True)  # 8 blocks per head: 2.36 MB
def test_k_and_v_traffic_is_what_the_blocks_read(
    seq_q: int, seq_kv: int, tile: int, causal: bool
) -> None:
    """Compare with the rows that each block's queries attend to, counted one by one."""
    heads = 4
    text = f"1,{heads},{seq_q},64,fp16,seq_kv={seq_kv}{',causal' if causal else ''}"
    tiles = [range(first, min(first + tile, seq_q)) for first in range(0, seq_q, tile)]
    rows = 0
    for queries in tiles:
        seen = {key for key in range(seq_kv) if not causal or key <= max(queries)}
        rows += len(seen)
    config = parse_config(text).label
    found = analyze_cell(cell(config), [kernel((len(tiles), heads, 1))], MANY_SMS)
    if len(tiles) < 2:
        assert found.finding("kv_reread") is None
        return
    moved = float(evidence(found, "kv_reread")["K and V traffic"])
    last = len(tiles[-1]) == tile  # else the grid does not show where the tiles end
    assert moved == pytest.approx(heads * rows * 2 * 64 * 2, rel=1e-6 if last else 0.5)


@pytest.mark.parametrize("graph", [(9_600,), ()])
def test_a_launch_gap_is_what_an_eager_call_waits_for_the_cpu(graph: tuple[int, ...]) -> None:
    """A cold call does not include the host, whatever its time."""
    samples = {"eager": (24_000,), "host": (23_500,), "cold": (30_000,), "graph": graph}
    found = analyze_cell(cell(DECODE, **samples), [kernel((256, 1, 1), 9_100)], MACHINE)
    gap = evidence(found, "launch_gap")
    busy = 9_600 if graph else 9_100
    assert gap["graph time" if graph else "kernel time"] == busy / 1e3
    assert (gap["eager time"], gap["host time"]) == (24, 23.5)
    launch = found.finding("launch_gap")
    assert launch.factor == pytest.approx(24_000 / busy)
    assert found.bottleneck == "launch"
    hidden = cell(DECODE, **(samples | {"eager": (9_700,)}))
    assert analyze_cell(hidden, [kernel((256, 1, 1), 9_100)], MACHINE).finding("launch_gap") is None


def test_a_memset_is_no_copy_of_inputs(h200: Cells) -> None:
    """Bug: analyze advised another layout of the inputs for the memset of cuDNN's backward pass."""
    memsets = [
        (key, kernel)
        for key, each in h200.items()
        for kernel in each.kernels
        if "memset" in kernel.kernel.lower()
    ]
    assert memsets
    for key, kernel in memsets:
        # A memset of half the kernel time would be a finding if it counted as a copy.
        larger = replace(kernel, share=0.5)
        cell = replace(h200[key], kernels=(larger, *h200[key].kernels))
        assert not any("Memset" in found.sentence for found in helpers(cell, cell.figures))


def test_copies_that_ncu_does_not_see_count_as_busy() -> None:
    """Kernels of 8 µs with cold caches and a fill of 2 µs leave no gap in a call of 12 µs."""
    main, fill = kernel((256, 1, 1), 7_000), kernel((1, 1, 1), 2_000)
    fill = replace(fill, kernel="Memset", kernel_short="Memset", kernel_kind="memset")
    fill = replace(fill, grid=None, block=None, registers_per_thread=None, shared_bytes=None)
    cold = replace(main, profiler="ncu", duration_ns=8_000)
    no_peaks = RunMachine(H200)
    found = analyze_cell(cell(event=(12_000,)), [main, fill, cold], no_peaks)
    assert found.finding("launch_gap") is None
    late = analyze_cell(cell(event=(20_000,)), [main, fill, cold], no_peaks)
    gap = evidence(late, "launch_gap")
    assert (gap["cold kernel time"], gap["copies and fills"]) == (8, 2)
    launch = late.finding("launch_gap")
    assert "at least 50" in launch.sentence
    assert launch.factor == pytest.approx(2)


@pytest.mark.parametrize(("per_step", "hit"), [(0.5, True), (1.2, False)])
def test_the_l2_is_named_only_where_dram_saw_less(h200: Cells, per_step: float, hit: bool) -> None:
    each = h200[SQUARE, "math"]
    assert each.figures is not None
    steps = sum(phase.bytes for phase in each.phases)
    (found,) = score_traffic(each, replace(each.figures, dram_bytes=per_step * steps))
    assert "ncu counted" in found.sentence
    assert ("hit the L2" in found.sentence) == hit


def test_a_figure_above_its_ceiling_is_explained() -> None:
    small = Peaks("a GPU", "measured", 1e11, {"fp16": 1e15}, 50 << 20, 132)
    fits = analyze_cell(cell(), [kernel((512, 1, 1))], replace(MACHINE, peaks=small))
    assert fits.figures.bandwidth_share == pytest.approx(4194304 / 10e-6 / 1e11)
    above = fits.finding("bandwidth_above_peak")
    assert "fit in the L2" in above.sentence
    assert fits.bottleneck != "memory"
    tiny = replace(MACHINE, peaks=small, l2_bytes=1 << 20)
    other = analyze_cell(cell(), [kernel((512, 1, 1))], tiny).finding("bandwidth_above_peak")
    assert "peak is too low" in other.sentence
    slow = replace(MACHINE, peaks=replace(small, flops_per_s={"fp16": 1e12}))
    assert analyze_cell(cell(), [kernel((512, 1, 1))], slow).finding("rate_above_peak") is not None


@pytest.mark.parametrize(
    ("bandwidth", "rate", "word"), [(5e11, 1e15, "memory"), (1e13, 1.2e14, "compute")]
)
def test_what_runs_near_a_peak_is_bound_by_it(bandwidth: float, rate: float, word: str) -> None:
    peaks = Peaks("a GPU", "measured", bandwidth, {"fp16": rate}, 1 << 20, 132)
    found = analyze_cell(cell(), [kernel((512, 1, 1))], replace(MACHINE, peaks=peaks))
    assert found.bottleneck == word
    named = found.finding("bottleneck")
    assert named.grade == MEASURED


def test_without_peaks_device_or_kernels_nothing_is_made_up() -> None:
    bare = analyze_cell(cell(wall=(5_000, 6_000, 7_000)), [], RunMachine())
    assert (bare.figures.basis, bare.figures.duration_ns) == ("wall", 6_000)
    assert bare.figures.flops_share is None
    assert bare.figures.kernels_ns is None
    assert bare.bottleneck is None
    nothing = analyze_cell(cell(), [], RunMachine())
    assert nothing.figures.flops_per_s is None
    assert nothing.findings == ()


def test_a_wrong_backend_is_never_the_faster_one() -> None:
    cells = [
        cell(backend=name, event=(time,) * 6)
        for name, time in (("math", 90_000), ("mine", 1_000), ("flash", 20_000))
    ]

    def best(wrong: set[tuple[str, str]]) -> object:
        return evidence(analyze_all(cells, [], MACHINE, wrong)[0], "faster_backend")[
            "fastest backend"
        ]

    assert best(set()) == "mine"
    assert best({(SQUARE, "mine")}) == "flash"


UNUSABLE = (1_000_000,) * 4 + (9_000_000,) * 3


def test_unusable_times_give_no_remedy_and_no_ranking() -> None:
    """Bug: `analyze` advised `math` and its gain, although `bench` could not use the times."""
    calm = (4_000,) * 6
    slow, fast = cell(backend="flash", wall=(90_000,) * 6), cell(backend="math", wall=calm)
    busy = cell(backend="efficient", wall=UNUSABLE)
    few = cell(backend="cudnn", wall=(10, *UNUSABLE))
    assert analyze_all([busy, fast], [], MACHINE)[0].remedies == ()
    assert analyze_all([slow, few], [], MACHINE)[0].remedies == ()
    (advice,) = analyze_all([slow, few, fast], [], MACHINE)[0].remedies
    assert advice.text.startswith("Use math")
    analyses = analyze_all([busy, few, slow, fast], [], MACHINE)
    first, unusable, *_ = analyze_answer(analyses)
    assert "math, the fastest backend" in first
    assert unusable == (
        "The machine was busy, so the times of efficient and cudnn cannot be used. "
        "Capture again when nothing else is running."
    )
    assert {name for each in choices(analyses) for name in each.best} == {"math"}
    # A single usable time is not a ranking, and without any there is no other statement.
    alone, *_ = analyze_answer(analyze_all([busy, few, fast], [], MACHINE))
    assert "fastest" not in alone
    assert len(analyze_answer(analyze_all([busy, few], [], MACHINE))) == 1
    # The warning of `kernels` replaces the cause and the advice.
    waited = replace(MACHINE, busy="the machine was busy: why; capture again")
    first, *others = analyze_answer(analyze_all([busy, slow, fast], [], waited))
    assert "math, the fastest backend" in first
    assert others[:2] == [
        "The machine was busy: why; capture again.",
        "The times of efficient cannot be used.",
    ]


def test_a_busy_machine_gives_no_measured_gain() -> None:
    """Bug: `analyze` warned of a busy machine, and advised `math` with a measured gain."""
    slow = replace(cell(backend="flash", wall=(90_000,) * 6), cell="c1")
    fast = cell(backend="math", wall=(4_000,) * 6)
    ops = [
        replace(kernel((1, 1, 1)), cell=each.cell, kernel_kind="op", backend=each.backend)
        for each in (slow, fast)
    ]

    def gains(*rows: KernelRow) -> list[Remedy]:
        found = analyze_all([slow, fast], rows, MACHINE)
        assert not found[0].finding("faster_backend") or found[0].remedies
        return [remedy for each in found for remedy in each.remedies if remedy.measured]

    assert [remedy.factor for remedy in gains(*ops)] == [22.5]
    for at, op in enumerate(ops):  # the times of either cell
        scattered = replace(op, total_ns=4 * (op.total_ns or 0))
        assert gains(*ops[:at], scattered, *ops[at + 1 :]) == []


def test_the_gain_of_a_faster_backend_is_the_ratio_in_diff(h200: Cells) -> None:
    """Bug: of one pair, `analyze` gave 1.55, `diff` 1.37 and `bench` 1.47 times."""
    gains = 0
    for (label, _), each in h200.items():
        for remedy in (remedy for remedy in each.remedies if remedy.measured):
            name = evidence(each, "faster_backend")["fastest backend"]
            other = h200[label, str(name)]
            assert each.figures.basis == other.figures.basis == "kernel"  # for the rates
            assert remedy.basis == "graph"
            ratio = each.figures.graph_ns / other.figures.graph_ns
            assert remedy.factor == pytest.approx(ratio)
            gains += 1
    assert gains


def test_the_fastest_of_a_config_is_auto_only_if_no_other_cell_is_as_fast() -> None:
    """Bug: on a CPU without usable times of flash, the headline was about `math`."""
    slow, fast = (90_000,) * 6, (30_000,) * 6
    auto, math = cell(backend="auto", wall=fast), cell(backend="math", wall=slow)
    first, *_ = analyze_answer(analyze_all([auto, math], [], MACHINE))
    assert "auto" in first and "math" not in first and "30.0 µs per call" in first
    flash = cell(backend="flash", wall=(31_000,) * 6)
    first, *_ = analyze_answer(analyze_all([auto, flash, math], [], MACHINE))
    assert "flash, the fastest backend of" in first
    assert "by wall-clock times (31.0 µs per call)" in first


def test_input_copies_are_the_bottleneck_only_if_they_take_time(h200: Cells) -> None:
    each = h200[DECODE, "math"]
    fast = [
        replace(kernel, share=0.01) if kernel.role in ("copy", "cast") else kernel
        for kernel in each.kernels
    ]
    codes = {finding.code: finding for finding in each.findings}
    named = bottleneck(replace(each, kernels=tuple(fast)), each.figures, codes)
    assert named is None or named[0] != "input copies"


def test_a_cpu_has_ops(h200: Cells) -> None:
    """Bug: `97.7 % of the kernel time` on a CPU, whose traces contain ops."""
    on_gpu = h200[SQUARE, "math"]
    ops = tuple(replace(each, blocks=None) for each in on_gpu.kernels)
    on_cpu = replace(on_gpu, kernels=ops)
    for analysis, word in ((on_gpu, "kernel"), (on_cpu, "op")):
        (finding,) = score_traffic(analysis, on_gpu.figures)
        assert f"the unfused {word}s move" in finding.sentence
        assert f"% of the {word} time is" in finding.sentence


def advised(mine: CellRow, *others: CellRow) -> bool:
    return analyze_all([mine, *others], [], MACHINE)[0].finding("faster_backend") is not None


def test_what_ran_is_never_advised() -> None:
    """The samples of flash and of `auto`, which chose flash, differ only by the order of the cells."""
    slow, fast = (99_000,) * 6, (80_000,) * 6
    auto = replace(cell(backend="auto", event=slow), choice="flash", sdpa_op=None)
    assert not advised(auto, cell(backend="flash", event=fast))
    assert not advised(auto, cell(backend="flash", event=fast), cell(backend="math", event=slow))
    assert advised(auto, cell(backend="math", event=fast))
    by_op = replace(auto, choice=None, sdpa_op="aten::_scaled_dot_product_flash_attention_for_cpu")
    assert not advised(by_op, cell(backend="flash", event=fast))


def test_samples_that_overlap_are_no_advice() -> None:
    mine = cell(backend="math", event=(70_000, 71_000, 100_000, 100_000, 110_000, 72_000))
    rival = cell(backend="flash", event=(60_000, 75_000, 76_000, 77_000, 120_000, 130_000))
    assert not advised(mine, rival)
    assert not advised(cell(backend="math", event=(9_000,)), cell(backend="flash", event=(10,)))


def test_sweeps_are_cells_that_differ_in_one_number() -> None:
    labels = ["b1-h4-s64-d2048-fp32", "b1-h4-s64-d512-fp32", "b1-h4-s128-d512-fp32"]
    labels.append("b1-h8-s64-d512-bf16")
    found = sweep([analyze_cell(cell(label), [kernel((256, 1, 1))], MACHINE) for label in labels])
    got = {name: [each.config.label for each in group] for name, group in found}
    assert got == {
        "head_dim": ["b1-h4-s64-d512-fp32", "b1-h4-s64-d2048-fp32"],
        "seq_len_kv": ["b1-h4-s64-d512-fp32", "b1-h4-s128-d512-fp32"],
    }


def written_out(dtype: str, *, casts: bool = False) -> list[KernelRow]:
    """Return the launches of attention written out on 16-bit inputs, with products in a dtype."""
    product = {"bf16": "nvjet_tst_128x64_64x8_1x2_h_bz_TNT", "fp32": "ampere_sgemm_128x64_tn"}[
        dtype
    ]
    cast = "void at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)"
    softmax = (
        "void softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 9, false, false, 32>()"
    )
    launches = [(product, "gemm", "aten::matmul;aten::bmm"), (softmax, "softmax", "aten::softmax")]
    launches += [(product, "gemm", "aten::matmul;aten::bmm")]
    if casts:
        launches.insert(0, (cast, "copy", "aten::to;aten::_to_copy;aten::copy_"))
    return [
        replace(
            kernel((512, 1, 1)), kernel=name, kernel_short=name, family=family, op_path=path,
            first_ns=place,
        )
        for place, (name, family, path) in enumerate(launches)
    ]  # fmt: skip


def test_naive_in_16_bit_has_neither_casts_nor_products_in_fp32() -> None:
    each = analyze_cell(cell("b2-h8-s512-d64-bf16", "naive"), written_out("bf16"), MACHINE)
    assert [phase.name for phase in each.phases] == ["QK^T", "softmax", "PV"]
    assert evidence(each, "score_traffic")["score matrix"] == 16 * 512 * 512 * 2
    assert each.finding("fp32_products") is None
    assert not any("allow_fp16" in remedy.text for remedy in each.remedies)


def test_products_in_fp32_of_a_backend_that_casts_are_its_own_to_mend() -> None:
    each = analyze_cell(
        cell("b2-h8-s512-d64-bf16", "mine"), written_out("fp32", casts=True), MACHINE
    )
    assert each.phases[0].name == "casts"
    assert evidence(each, "score_traffic")["score matrix"] == 16 * 512 * 512 * 4
    assert each.finding("fp32_products") is not None
    (remedy,) = [each for each in each.remedies if each.findings == ("fp32_products",)]
    assert remedy.text.startswith("Pass the operands of the matrix products as bf16")


def seen_by_ncu(row: KernelRow, **counted: float) -> list[KernelRow]:
    """Return the row under torch and under ncu, with these counters."""
    names = {"l1": "l1tex__t_bytes.sum", "l2": "lts__t_bytes.sum"}
    metrics = {names[key]: (value, "byte") for key, value in counted.items()}
    return [row, replace(row, profiler="ncu", metrics=metrics)]


def test_one_query_a_block_has_an_intensity_below_1_and_ncu_counts_its_repeats() -> None:
    """64 queries read 64 rows of K and V of 8192 floats each: 2 FLOPs a float of K or V."""
    config = "b1-h4-s64-d8192-fp32"
    row = kernel((64, 4, 1), 1_000_000, 384, (256, 1, 1), 40)
    moved = 64 * 2 * 4 * 64 * 8192 * 4  # 1.07 GB, 32 times the 33.6 MB of Q, K, V and output
    found = analyze_cell(cell(config), seen_by_ncu(row, l1=1.02 * moved, l2=0.4 * moved), MACHINE)
    assert evidence(found, "kv_reread")["intensity of it"] == 0.5
    counted = evidence(found, "cache_traffic")
    assert counted["L1 bytes"] == round(1.02 * moved)
    assert counted["L2 bytes"] == round(0.4 * moved)
    assert counted["intensity of it"] == pytest.approx(0.5 / 1.02, abs=1e-3)
    finding = found.finding("cache_traffic")
    assert (finding.severity, finding.grade) == ("major", MEASURED)
    assert "32.6 times the compulsory 32.0 MiB" in finding.sentence
    (remedy,) = [each for each in found.remedies if "more query rows" in each.text]
    assert remedy.findings == ("kv_reread", "cache_traffic", "unused_shared")
    assert found.bottleneck == "K and V traffic"
    few = analyze_cell(cell("b1-h1-s16-d8192-fp32"), [kernel((16, 1, 1))], MACHINE)
    assert few.bottleneck == "few blocks"
    assert few.finding("kv_reread") is not None


@given(st.floats(0.01, 1.5))
def test_what_ncu_did_not_count_is_not_said_to_be_read(part: float) -> None:
    """Blocks that divide head_dim have the same grid as blocks that read all of it."""
    row = kernel((64, 4, 1), shared=384)
    moved = 64 * 2 * 4 * 64 * 8192 * 4
    rows = seen_by_ncu(row, l2=part * moved)
    found = analyze_cell(cell("b1-h4-s64-d8192-fp32"), rows, MACHINE)
    said = [found.finding(code) is not None for code in ("kv_reread", "unused_shared")]
    assert said == [part >= 0.5] * 2
    assert found.finding("cache_traffic") is not None


@pytest.mark.parametrize(
    ("family", "counters", "supposed"),
    [("other", {}, True), ("efficient", {}, False), ("other", {"l1": 2e9}, False)],
)
def test_without_counters_an_unknown_kernel_is_only_supposed_to_read_again(
    family: str, counters: dict[str, float], supposed: bool
) -> None:
    row = replace(kernel((64, 4, 1)), family=family)
    rows = seen_by_ncu(row, **counters) if counters else [row]
    found = analyze_cell(cell("b1-h4-s64-d8192-fp32"), rows, MACHINE)
    assert ("count the traffic with" in found.finding("kv_reread").sentence) == supposed
    assert (found.finding("cache_traffic") is not None) == bool(counters)


CODES = (
    *("tensor_pipe", "no_tensor_cores", "uncoalesced", "narrow_access", "bank_conflicts"),
    *("hit_rates", "stalls"),
)


def counted(config: str = SQUARE, backend: str = "mine", **metrics: float) -> CellAnalysis:
    """Return the analysis of a cell whose only kernel has these counters."""
    row = kernel((128, 1, 1))
    named = {name: (value, "") for name, value in metrics.items()}
    rows = [row, replace(row, profiler="ncu", metrics=named)]
    return analyze_cell(cell(config, backend), rows, MACHINE)


def test_products_without_tensor_cores_are_told_and_what_runs_instead() -> None:
    none = {ncu.TENSOR_PIPE: 0.0, ncu.TENSOR_INSTRUCTIONS: 0.0, ncu.FMA_PIPE: 41.0}
    finding = counted(**none).finding("no_tensor_cores")
    assert finding.severity == "major" and finding.grade == MEASURED
    assert "the FMA pipe is busy in 41.0 %" in finding.sentence
    plain = counted("b2-h8-s512-d64-fp32", **none).finding("no_tensor_cores")
    assert plain.severity == "note" and "without TF32" in plain.sentence
    assert plain.sentence.startswith("my_attention multiplies without tensor cores: their pipe")
    low = counted(**{ncu.TENSOR_PIPE: 23.5, ncu.TENSOR_INSTRUCTIONS: 1e6})
    assert low.finding("no_tensor_cores") is None
    pipe = low.finding("tensor_pipe")
    assert "23.5 % of the cycles" in pipe.sentence
    assert counted(**{ncu.TENSOR_PIPE: 75.0}).finding("tensor_pipe") is None


def test_on_ada_the_second_name_of_the_tensor_pipe_counts() -> None:
    metrics = {ncu.TENSOR_PIPE: (3.0, "%"), ncu.TENSOR_PIPE_OF_ADA: (50.0, "%")}
    assert read_counters(metrics).tensor_pipe == 0.5


@pytest.mark.parametrize(
    ("metrics", "code", "severity", "text"),
    [
        ({}, None, "", ""),
        ({ncu.LOAD_SECTORS: 32.0, ncu.LOAD_REQUESTS: 100}, "uncoalesced", "major", "32.0 sectors"),
        ({ncu.LOAD_SECTORS: 16.0, ncu.LOAD_REQUESTS: 100}, None, "", ""),
        ({ncu.LOAD_SECTORS: 4.0, ncu.LOAD_REQUESTS: 100}, None, "", ""),
        ({ncu.LOAD_SECTORS: 2.0, ncu.LOAD_REQUESTS: 100}, "narrow_access", "note", "2.0 sectors"),
        ({ncu.BANK_CONFLICTS: 5, ncu.SHARED_WAVEFRONTS: 100}, None, "", ""),
        ({ncu.BANK_CONFLICTS: 20, ncu.SHARED_WAVEFRONTS: 100}, "bank_conflicts", "minor", "20.0 %"),
        ({ncu.BANK_CONFLICTS: 60, ncu.SHARED_WAVEFRONTS: 100}, "bank_conflicts", "major", "60.0 %"),
        (
            {ncu.L1_HIT_RATE: 12.5, ncu.L2_HIT_RATE: 40.0},
            *("hit_rates", "note", "L1 12.5 % and L2 40.0 %"),
        ),
    ],
)
def test_a_counter_beyond_its_threshold_makes_a_finding(
    metrics: dict[str, float], code: str | None, severity: str, text: str
) -> None:
    analysis = counted(**metrics)
    assert [name for name in CODES if analysis.finding(name)] == ([code] if code else [])
    if code:
        finding = analysis.finding(code)
        assert finding.severity == severity and text in finding.sentence


def test_a_kernel_without_such_requests_has_no_sectors() -> None:
    counters = read_counters(
        {
            ncu.LOAD_SECTORS: (0.0, ""),
            ncu.LOAD_REQUESTS: (0.0, ""),
            ncu.STORE_SECTORS: (math.nan, ""),
            ncu.STORE_REQUESTS: (5.0, ""),
        }
    )
    assert (counters.load_sectors, counters.store_sectors) == (None, None)


def test_active_threads_of_a_warp_have_a_column() -> None:
    """The value is that of flash_fwd_splitkv_combine on an H200."""
    assert ncu.ACTIVE_THREADS in ncu.metric_names(["stalls"])
    analysis = counted(**{ncu.ACTIVE_THREADS: 31.331962155491563})
    assert analysis.kernels[0].counters.active_threads == pytest.approx(31.33, abs=0.01)
    text = render_table(analyze_document([analysis], full=True), width=200)
    assert re.search(r"threads/warp.*\n.*31\.3", text)


def test_dram_bytes_are_told_over_the_time_that_ncu_saw() -> None:
    analysis = counted(**{DRAM_READ: 5e7, DRAM_WRITE: 5e6})
    assert analysis.kernels[0].dram_bytes_per_s == pytest.approx(5.5e7 / 10_000 * 1e9)


@pytest.mark.parametrize(("backend", "helped"), [("mine", True), ("math", False)])
def test_only_the_author_of_a_kernel_can_fix_its_bank_conflicts(backend: str, helped: bool) -> None:
    metrics = {ncu.BANK_CONFLICTS: 60.0, ncu.SHARED_WAVEFRONTS: 100.0}
    analysis = counted(SQUARE, backend, **metrics)
    assert any("swizzle" in remedy.text for remedy in analysis.remedies) == helped


def test_the_state_that_most_warps_wait_in_is_named_with_what_helps() -> None:
    states = {ncu.warp_state("long_scoreboard"): 5.0, ncu.warp_state("wait"): 2.0}
    states |= {ncu.warp_state("selected"): 1.0, ncu.warp_state("barrier"): 2.0}
    finding = counted(**states, **{ncu.ISSUE_ACTIVE: 25.0}).finding("stalls")
    assert "50.0 % of their time waiting for data from global or local memory" in finding.sentence
    assert "issue an instruction in 25.0 % of the cycles" in finding.sentence
    assert counted(**states, **{ncu.ISSUE_ACTIVE: 90.0}).finding("stalls") is None
    even = {ncu.warp_state(name): 1.0 for name in ncu.WARP_STATES}
    assert counted(**even, **{ncu.ISSUE_ACTIVE: 25.0}).finding("stalls") is None


def test_every_state_but_the_one_that_issues_has_words() -> None:
    assert {*WARP_STATE_WORDS} == {*ncu.WARP_STATES} - {"selected"}
    assert all(source for _, source in THRESHOLDS.values())


TRAINING = "b2-h8-s512-d64-fp16-causal-bwd"


def cells(**graphs: dict[str, int]) -> list[CellAnalysis]:
    """Return the analyses of configs (by name) with the median graph time of each backend."""
    configs = {"square": SQUARE, "decode": DECODE, "training": TRAINING}
    rows = [
        replace(
            cell(configs[name], backend, graph=(time_ns,) * 30),
            cell=f"{name}-{backend}",
            peak_memory_bytes=(1 + place) << 20,
        )
        for name, times in graphs.items()
        for place, (backend, time_ns) in enumerate(times.items())
    ]
    return analyze_all(rows, [], MACHINE)


def test_numbers_in_names_are_no_figures() -> None:
    one = "flash_kernel<64,64x256,w4> takes 10.0 µs of 1,024 B in fp16, 25.0 % (2 waves)."
    other = "flash_kernel<64,64x256,w4> takes 9.5 µs of 16,384 B in fp16, 25.0 % (3 waves)."
    assert merged_text([one, other]) == (
        "flash_kernel<64,64x256,w4> takes 9.5 to 10.0 µs of 1,024 to 16,384 B in fp16, 25.0 % "
        "(2 to 3 waves)."
    )


def test_a_comma_after_a_number_is_no_part_of_it() -> None:
    assert merged_text(["a 5, b 1,234.5", "a 6, b 2"]) == "a 5 to 6, b 2 to 1,234.5"


@given(st.lists(st.floats(0, 1e9).map(lambda value: f"{value:,.1f}"), min_size=1))
def test_a_merged_figure_spans_all_of_them(numbers: list[str]) -> None:
    text = merged_text([f"It takes {number} µs." for number in numbers])
    values = [float(number.replace(",", "")) for number in numbers]
    ends = [float(part.replace(",", "")) for part in text[9:-4].split(" to ")]
    assert (ends[0], ends[-1]) == (min(values), max(values))


def few_blocks(config: str, backend: str, blocks: int) -> CellAnalysis:
    row = replace(cell(config, backend), cell=f"{config}-{backend}")
    return analyze_cell(row, [kernel((blocks, 1, 1))], MACHINE)


def test_like_findings_are_reported_once_with_where_they_hold() -> None:
    labels = ["b1-h1-s64-d64-fp16", "b1-h2-s64-d64-fp16", "b1-h4-s64-d64-fp16"]
    analyses = [few_blocks(label, name, 16) for label in labels for name in ("mine", "other")]
    analyses.append(few_blocks(labels[0], "third", 132 * 2))
    pairs = [(each, item) for each in analyses for item in each.findings]
    (members,) = [own for each, own in common_findings(pairs) if each.code == "few_blocks"]
    assert where(members) == "mine and other on 3 configs each"
    remedies = common_remedies([(each, item) for each in analyses for item in each.remedies])
    assert {where(members) for members in remedies} == {"mine and other on 3 configs each"}
    for full, times in ((False, 0), (True, len(labels))):
        blocks = [
            block
            for block in analyze_document(analyses, full=full).blocks
            if isinstance(block, Heading | Note)
        ]
        assert ("Shared by several configs" in [block.text for block in blocks]) == (not full)
        assert len([block for block in blocks if "SMs are idle" in block.text]) == times
        # one line explains the bottleneck of all these cells
        legend = [block for block in blocks if "too few thread blocks" in block.text]
        assert len(legend) == (0 if full else 1)


def test_only_kernels_that_do_not_split_the_keys_are_advised_to() -> None:
    """Bug: a combine kernel of less than 5 % of the time did not count as a split of the keys."""
    short = "b1-h4-sq1-skv512-d64-fp16"
    split = "Split the work over the keys, as flash's split-KV does for short queries, or batch"
    texts = {
        name: [remedy.text for remedy in few_blocks(short, name, 4).remedies]
        for name in ("mine", "cudnn", "auto")
    }
    assert texts["mine"][0].startswith(split)
    assert not any("keys" in text for name in ("cudnn", "auto") for text in texts[name])
    combine = replace(kernel((1, 1, 1), 1_000), kernel="flash_fwd_splitkv_combine_kernel")
    combine = replace(combine, family="flash_combine", kernel_short=combine.kernel)
    analysis = analyze_cell(cell(short, "mine"), [kernel((4, 1, 1), 100_000), combine], MACHINE)
    (remedy,) = [each for each in analysis.remedies if "few_blocks" in each.findings]
    assert remedy.text == "Batch more sequences into one call (the keys are already split)."


def test_a_finding_of_one_config_stays_at_its_cell() -> None:
    analyses = [few_blocks(SQUARE, name, 16) for name in ("mine", "other")]
    pairs = [(each, item) for each in analyses for item in each.findings]
    assert pairs and not list(common_findings(pairs))


def test_idle_warps_beside_missing_blocks_have_one_remedy() -> None:
    row = kernel((16, 1, 1))
    metrics = {"sm__warps_active.avg.pct_of_peak_sustained_active": (2.0, "%")}
    analysis = analyze_cell(cell(), [row, replace(row, profiler="ncu", metrics=metrics)], MACHINE)
    assert analysis.finding("idle_warps") and analysis.finding("few_blocks")
    assert not [each for each in analysis.remedies if each.findings == ("idle_warps",)]
    assert [each for each in analysis.remedies if each.findings == ("few_blocks",)]


def test_the_best_backend_for_each_scenario_with_its_figures() -> None:
    analyses = cells(
        square={"flash": 10_000, "cudnn": 10_100, "math": 50_000},
        training={"flash": 84_000, "cudnn": 55_000, "auto": 55_000},
    )
    made = {(each.scenario, each.config.label): each for each in choices(analyses)}
    prefill = made["prefill", SQUARE]
    assert prefill.best == ("flash", "cudnn") and prefill.runner_up == "math"
    assert prefill.factor == pytest.approx(5)
    training = made["training", TRAINING]
    assert (training.best, training.value, training.runner_up) == (("cudnn",), 55_000, "flash")
    assert made[LITTLE_MEMORY, SQUARE].best == ("flash",)
    assert missing_scenarios(analyses) == {"decode": "1,32,1,128,bf16,kv_heads=8,seq_kv=4096"}
    decode = replace(analyses[0], config=parse_config(missing_scenarios(analyses)["decode"]))
    assert "decode" not in missing_scenarios([decode])


def test_wrong_results_are_never_the_best() -> None:
    analyses = cells(decode={"flash": 10_000, "cudnn": 20_000, "math": 30_000})
    wrong = [replace(each, wrong=each.backend == "flash") for each in analyses]
    assert [each.best for each in choices(wrong)] == [("cudnn",), ("cudnn",)]
    assert choices(cells(decode={"flash": 10_000})) == []


def sized(label: str, time_ns: int) -> CellAnalysis:
    row = replace(cell(label), cell=label)
    return analyze_cell(row, [kernel((264, 1, 1), time_ns)], MACHINE)


def test_drops_of_a_sweep_are_told_where_they_are() -> None:
    labels = [f"b1-h4-s64-d{dim}-fp32" for dim in (512, 1024, 2048)]
    analyses = [sized(*each) for each in zip(labels, (10_000, 21_000, 130_000), strict=True)]
    ((name, group),) = sweep(analyses)
    assert list(drops(name, group)) == [(1024, 2048, pytest.approx(130 / 42))]
    notes = [each.text for each in analyze_document(analyses).blocks if isinstance(each, Note)]
    fall = "mine: TFLOP/s fall by a factor of 3.1 from head_dim 1024 to 2048 (sweep from"
    assert f"{fall} b1-h4-s64-d512-fp32)." in notes
    assert not list(changed_problems(analyses))


def test_configs_that_change_more_than_head_dim_are_no_sweep() -> None:
    """The published sweep: heads x queries x keys shrink as head_dim grows."""
    labels = ["b1-h4-s64-d512-fp32", "b1-h4-s64-d2048-fp32", "b1-h2-s32-d4096-fp32"]
    labels.append("b1-h1-s16-d8192-fp32")
    ((_, scores),) = changed_problems([sized(label, 10_000) for label in labels])
    assert scores == {512: 16384, 2048: 16384, 4096: 2048, 8192: 256}
    document = analyze_document([sized(label, 10_000) for label in labels])
    (note,) = [
        each
        for each in document.blocks
        if isinstance(each, Note) and "head_dim alone does not" in each.text
    ]
    assert "16,384, 16,384, 2,048, 256" in note.text
