"""Rows, doubts, regret and conclusions of benches with samples written by hand, through a real
store, compared with figures computed by hand.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from written_samples import L4, STUDY, STUDY_BYTES, STUDY_FLOPS, answer, cell, row_of, steady, timed

from profharness.attention.config import Config, expand_configs, parse_config
from profharness.commands.bench.tables import FIELDS, bench_document, benches_by_gpu_document
from profharness.errors import NotFoundError, UsageError
from profharness.measurements.evaluation import (
    BenchResult,
    bench_configs,
    evaluate_bench,
    parse_baseline,
)
from profharness.measurements.measurements import (
    AXES,
    BenchRow,
    Sweep,
    clock_doubts,
    families,
    with_regret,
    with_speedup,
)
from profharness.render.document import Chart, Note, Table
from profharness.render.renderers import RENDERERS, render_json
from profharness.render.terminal import render_table
from profharness.rows import COLD, CPU_WAIT, NAIVE_COMPILED, REPLACEMENTS, SHARED_CORES, Refusal
from profharness.store import ingest_path, open_store, query


def test_figures_equal_those_computed_by_hand(tmp_path: Path) -> None:
    found = answer(tmp_path, timed(STUDY, auto=80_000))
    row = row_of(found, "auto")
    assert (row.median_ns, row.samples, row.measurement) == (80_000, 40, "event")
    assert row.flops_per_s == pytest.approx(STUDY_FLOPS / 80e-6)
    assert row.bytes_per_s == pytest.approx(STUDY_BYTES / 80e-6)
    assert row.efficiency == pytest.approx(STUDY_BYTES / 300e9 / 80e-6)  # 55.9 us at 300 GB/s
    assert row.against == "300 GB/s (data sheet)"
    assert row.low_ns is not None and row.high_ns is not None
    assert row.low_ns <= 80_000 <= row.high_ns
    assert row.doubts == ()


def test_a_compute_bound_config_is_compared_with_the_matrix_rate(tmp_path: Path) -> None:
    found = answer(tmp_path, timed("1,8,4096,128,fp16", auto=1_000_000))
    row = row_of(found, "auto")
    flops = 4 * 8 * 4096 * 4096 * 128
    assert row.against is not None and "TFLOP/s fp16 (data sheet)" in row.against
    assert row.efficiency == pytest.approx(
        flops / 1e-3 / (float(row.against.split()[0]) * 1e12), rel=1e-3
    )


def test_times_with_host_time_are_doubtful_if_lanes_share_cores(tmp_path: Path) -> None:
    times = {"eager": steady(80_000), "graph": steady(80_000)}
    shared = replace(cell(STUDY, "auto", times), warnings=(SHARED_CORES,))
    rows = answer(tmp_path, [shared, cell(STUDY, "math", times)]).rows
    doubted = {(row.backend, row.measurement): row.doubts for row in rows if row.doubts}
    assert doubted == {("auto", "eager"): (SHARED_CORES,)}


def test_the_median_is_named_if_there_are_other_measurements(tmp_path: Path) -> None:
    """Bug: `median µs/call` stood beside `median graph µs/call`."""
    times = {"cold": steady(80_000), "graph": steady(70_000)}
    for name in ("both", "one"):
        (tmp_path / name).mkdir()
    both = RENDERERS["md"](bench_document(answer(tmp_path / "both", [cell(STUDY, "auto", times)])))
    assert "| median cold µs/call |" in both and "| median graph µs/call |" in both
    alone = timed(STUDY, "cold", auto=80_000)
    one = RENDERERS["md"](bench_document(answer(tmp_path / "one", alone)))
    assert "| median µs/call |" in one


@pytest.mark.parametrize(("share", "busy"), [(0.02, False), (0.43, True)])
def test_times_with_host_time_are_doubtful_if_the_cpu_is_busy(
    tmp_path: Path, share: float, busy: bool
) -> None:
    times = {"eager": steady(80_000), "graph": steady(80_000)}
    rows = answer(tmp_path, [cell(STUDY, "auto", times, clocks={CPU_WAIT: share})]).rows
    text = "the worker waited for a CPU for 43 % of the time, because the machine was busy"
    assert {row.measurement: row.doubts for row in rows} == {
        "eager": (text,) if busy else (),
        "graph": (),
    }


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_interval_wider_than_its_median_is_shown_as_busy(tmp_path: Path, place: int) -> None:
    """One of three processes had a CPU of its own only some of the time."""
    samples = [steady(16_000_000 if number == place else 80_000, 12) for number in range(3)]
    turns = {"wall": [(process, turn, 4) for process in range(3) for turn in range(3)]}
    cells = [
        cell(STUDY, "auto", {"wall": list(chain(*samples))}, turns=turns),
        cell(STUDY, "math", {"wall": steady(90_000, 36)}, turns=turns),
    ]
    found = answer(tmp_path, cells)
    row = row_of(found, "auto")
    assert row.half is not None and row.half > 1
    assert row.doubts[-1].startswith("the half-width of the 95 % interval exceeds the median")
    for text in (
        RENDERERS["table"](bench_document(found, full=True), width=250),
        RENDERERS["md"](bench_document(found, full=True)),
    ):
        lines = [line.replace("|", " ").split() for line in text.splitlines()]
        assert any(line.count("busy") == 2 for line in lines), text  # ±% and ±% processes
        assert f"{100 * row.half:.1f}" not in text
        assert "the machine was too busy" in text
    (record, _) = json.loads(RENDERERS["json"](bench_document(found)))["rows"]
    assert record["high_ns"] > 2 * record["median_ns"]


@pytest.mark.parametrize(
    ("measurement", "reason"),
    [("graph", "so this is not the rate of the memory"), ("event", "the output may stay in it")],
)
def test_a_rate_above_that_of_the_memory_is_explained_by_l2(
    tmp_path: Path, measurement: str, reason: str
) -> None:
    found = answer(tmp_path, [cell(STUDY, "auto", {measurement: steady(40_000)})])
    row = row_of(found, "auto")
    (doubt,) = row.doubts
    assert doubt.startswith("the rate is 140 % of the memory bandwidth of 300 GB/s (data sheet)")
    assert "working set of 16.0 MiB fits in the L2 of 48.0 MiB" in doubt
    assert reason in doubt
    text = RENDERERS["table"](bench_document(found), width=160)
    assert "139.8!" in text and "[1]" in text
    assert not [line for line in found.conclusions if line.startswith("most work")]


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        # 64 MiB, of which 48 MiB can stay in L2: at best 4 times the memory's 223.7 us
        (60_000, "part of the working set of 64.0 MiB can stay in the L2 of 48.0 MiB"),
        (50_000, "is much larger than the L2 of 48.0 MiB, so the L2 does not explain the rate"),
    ],
)
def test_a_working_set_beyond_l2_explains_only_its_part(
    tmp_path: Path, nanoseconds: int, text: str
) -> None:
    cells = [cell("32,8,512,64,fp16", "auto", {"graph": steady(nanoseconds)})]
    assert any(text in doubt for doubt in row_of(answer(tmp_path, cells), "auto").doubts)


def test_no_peaks_no_efficiency(tmp_path: Path) -> None:
    machine = {"device_type": "cpu", "cpu": "some CPU", "torch": "2.8.0"}
    found = answer(tmp_path, timed(STUDY, "wall", auto=10_000), machine)
    row = row_of(found, "auto")
    assert (row.efficiency, row.against, row.doubts) == (None, None, ())


@pytest.mark.parametrize(
    ("clocks", "text"),
    [
        ({"sm_mhz_min": 1700, "sm_mhz_max": 1980}, "varied (lowest 1700 MHz, highest 1980 MHz)"),
        ({"throttle_reasons": 0x4}, "power limit"),
        ({"throttle_reasons": 0x20}, "its temperature (software"),
        ({"throttle_reasons": 0x48}, "a hardware slowdown and its temperature (hardware"),
    ],
)
def test_clocks_make_a_cell_doubtful(tmp_path: Path, clocks: dict[str, Any], text: str) -> None:
    found = answer(tmp_path, [cell(STUDY, "auto", {"event": steady(80_000)}, clocks=clocks)])
    (doubt,) = row_of(found, "auto").doubts
    assert text in doubt
    assert text in RENDERERS["md"](bench_document(found)).replace("\\", "")


def test_warnings_that_differ_only_in_numbers_are_one_note(tmp_path: Path) -> None:
    """Bug: each pair of clocks had a note of its own."""
    cells = [
        cell(
            f"1,1,{length},64,fp16",
            "auto",
            {"event": steady(80_000)},
            clocks={"sm_mhz_min": low, "sm_mhz_max": 1980},
        )
        for length, low in ((128, 1700), (256, 1800))
    ]
    notes = [
        block for block in bench_document(answer(tmp_path, cells)).blocks if isinstance(block, Note)
    ]
    assert [(note.label, note.text) for note in notes if "clock" in note.text] == [
        ("[1] 2 figures", "the SM clock varied (lowest 1700 to 1800 MHz, highest 1980 MHz)")
    ]


def test_steady_clocks_and_an_idle_gpu_are_no_doubt() -> None:
    assert clock_doubts({"sm_mhz_min": 1900, "sm_mhz_max": 1980, "throttle_reasons": 0x1}) == ()
    assert clock_doubts({}) == ()


def test_two_modes_a_wide_interval_and_few_samples_are_doubts(tmp_path: Path) -> None:
    two = [80_000] * 15 + [120_000] * 15
    found = answer(
        tmp_path,
        [
            cell(STUDY, "auto", {"event": two}),
            cell(STUDY, "math", {"event": [80_000, 81_000, 82_000]}),
        ],
    )
    assert any("two modes" in text for text in row_of(found, "auto").doubts)
    assert any("requested: ±1.0 %" in text for text in row_of(found, "auto").doubts)
    assert row_of(found, "math").doubts == ("only 3 samples",)


def test_speed_up_against_naive_else_math(tmp_path: Path) -> None:
    cells = [
        *timed("1,1,16,64,fp16", auto=369_000, naive=84_000, math=127_000),
        *timed("2,1,16,64,fp16", auto=100_000, math=200_000),
    ]
    found = answer(tmp_path, cells)
    first = row_of(found, "auto", "1,1,16,64,fp16")
    assert (first.baseline, first.speedup) == ("naive", pytest.approx(84 / 369))
    assert first.regret == pytest.approx(369 / 84 - 1)
    second = row_of(found, "auto", "2,1,16,64,fp16")
    assert (second.baseline, second.speedup) == ("math", pytest.approx(2.0))
    assert any("auto takes 4.39 times as long as naive on " in text for text in found.conclusions)


def test_speed_up_against_a_baseline_config_of_the_same_dtype(tmp_path: Path) -> None:
    cells = [
        *timed("32,8,512,64,fp16", auto=320_000, math=2_868_000),
        *timed("32,8,128,64,fp16", auto=64_000),
        *timed("32,8,512,64,bf16", auto=300_000),
        *timed("32,8,128,64,bf16", auto=60_000),
    ]
    (baseline,) = expand_configs("32,8,512,64")
    found = answer(tmp_path, cells, baseline=baseline)
    rows = {
        (row.config.split("-")[-1], row.config.split("-")[2], row.backend): row
        for row in found.rows
    }
    assert rows["fp16", "s128", "auto"].speedup == pytest.approx(5.0)
    assert rows["bf16", "s128", "auto"].speedup == pytest.approx(5.0)
    assert rows["fp16", "s512", "math"].speedup == pytest.approx(320 / 2868)
    assert rows["fp16", "s512", "auto"].baseline == "b32-h8-s512-d64-fp16 auto"
    assert any("ratios of latencies" in text for text in found.conclusions)


def test_speed_up_against_a_backend_on_each_config(tmp_path: Path) -> None:
    cells = [
        *timed("1,1,16,64,fp16", "graph", auto=100_000, flash=50_000, math=400_000),
        *timed("2,1,16,64,fp16", "graph", auto=100_000, math=50_000),
        *timed("4,1,16,64,fp16", "graph", math=50_000),
    ]
    cells = [replace(each, choice="flash") for each in cells]
    found = answer(tmp_path, cells, baseline="auto")
    rows = {(row.config[:2], row.backend): row for row in found.rows}
    assert {row.baseline for row in found.rows} == {"auto", None}
    assert [rows["b1", name].speedup for name in ("auto", "flash", "math")] == [1.0, 2.0, 0.25]
    assert rows["b2", "math"].speedup == 2.0
    assert (rows["b4", "math"].speedup, rows["b4", "math"].baseline) == (None, None)
    (math,) = [text for text in found.conclusions if ", math is" in text]
    assert math.startswith(
        "compared with auto on 2 configs, math is faster on 1 (2.00 times as fast, b2-h1-"
    )
    assert "slower on 1 (4.00 times as long, b1-h1-" in math
    (flash,) = [text for text in found.conclusions if ", flash is" in text]
    assert flash.endswith("flash is the same backend on 1")
    document = bench_document(found)
    assert "speed-up relative to auto" in " ".join(RENDERERS["table"](document).split())
    assert "sequences/s" in RENDERERS["table"](document)


def test_a_baseline_backend_is_added_to_the_selected_ones(tmp_path: Path) -> None:
    cells = timed(STUDY, "graph", auto=50_000, flash=50_000, math=50_000)
    found = answer(tmp_path, cells, baseline="auto", backends=["math"])
    assert [row.backend for row in found.rows] == ["auto", "math"]
    with (
        open_store(tmp_path / "store.db") as store,
        pytest.raises(NotFoundError, match="no cell for backend cudnn"),
    ):
        evaluate_bench(store, baseline="cudnn")


@pytest.mark.parametrize(
    ("text", "kind"),
    [("1,2,64,16", Config), ("b1-h2-s64-d16-fp32", Config), ("auto", str), ("math+flash", str)],
)
def test_a_baseline_is_a_config_or_a_backend(text: str, kind: type) -> None:
    assert isinstance(parse_baseline(text), kind)
    assert parse_baseline("math+flash") == "flash+math"
    with pytest.raises(UsageError, match="unknown backend"):
        parse_baseline("nonsense")


def test_a_baseline_that_was_not_timed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no cell for config b1-h1-s8-d8"):
        answer(tmp_path, timed(STUDY, auto=1000), baseline=parse_config("1,1,8,8"))


def test_a_wide_interval_is_marked_once_under_the_table(tmp_path: Path) -> None:
    wide = [80_000 + 800 * step for step in range(-10, 11)]
    cells = [cell(STUDY, name, {"event": wide}) for name in ("auto", "flash", "math")]
    text = RENDERERS["table"](bench_document(answer(tmp_path, cells)), width=160)
    # One sentence instead of a mark in most lines.
    assert "[~]" not in text
    assert "The intervals of 3 of 3 figures are wider than ±1.0 %" in text
    assert "wider than ±1.0 %" in text and "[1]" not in text


def test_codes_of_winners_run() -> None:
    import torch

    from profharness.measurements.evaluation import selecting

    row = BenchRow("r", "b1-h2-s8-d8-fp32-causal", "math", "ok", None)
    q, k, v = torch.randn(3, 1, 2, 8, 8)
    names: dict[str, Any] = {"q": q, "k": k, "v": v}
    exec(selecting(row), names)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(names["out"], expected, atol=1e-5)


def test_bench_shows_wrong_backends_but_does_not_rank_them() -> None:
    right = BenchRow("r", "b1-h1-s8-d8-fp16", "math", "ok", None, "event", 9, 100.0)
    wrong = replace(right, backend="mine.py", median_ns=10.0, verified=False)
    rows = with_regret(with_speedup([right, wrong]), {})
    assert (rows[0].regret, rows[0].speedup) == (0, 1)
    assert (rows[1].regret, rows[1].speedup, rows[1].median_ns) == (None, None, 10.0)


def test_failed_cells_are_rows_with_the_reason(tmp_path: Path) -> None:
    refused = cell(
        STUDY, "flash", {}, status="refused", message="head_dim",
        refusals=(Refusal("head_dim", "up to 256"), Refusal("dtype", "half only")),
    )  # fmt: skip
    broken = cell(STUDY, "mine.py", {}, status="error", message="undefined symbol: _ZN8flash")
    found = answer(tmp_path, [cell(STUDY, "auto", {"event": steady(80_000)}), refused, broken])
    assert [(row.backend, row.status) for row in found.rows] == [
        ("auto", "ok"), ("flash", "refused"), ("mine.py", "error"),
    ]  # fmt: skip
    short = RENDERERS["md"](bench_document(found))
    assert "- **mine.py**: error: undefined symbol: \\_ZN8flash" in short
    assert (
        "- **flash**: refused: " in short and "up to 256" not in short and "half only" not in short
    )
    assert "up to 256; half only" in RENDERERS["md"](bench_document(found, full=True))
    full = RENDERERS["md"](bench_document(found, explain=True))
    assert "up to 256 \\[head_dim\\]" in full and "half only \\[dtype\\]" in full


def test_explain_adds_the_refusals_by_rule(tmp_path: Path) -> None:
    refused = cell(
        "1,1,16,8192,fp32", "flash", {}, status="refused", message="head_dim",
        refusals=(Refusal("head_dim", "up to 256"),),
    )  # fmt: skip
    environment = L4 | {"capability": "8.9", "cudnn": 91002}
    found = answer(tmp_path, [refused], environment)
    full = RENDERERS["md"](bench_document(found, explain=True))
    assert full.count("head_dim\\]") == 1
    assert "{Half, BFloat16}" in full and "[dtype, by rule" in full.replace("\\", "")


def test_records_have_the_rows_keys_and_raw_adds_samples(tmp_path: Path) -> None:
    found = answer(
        tmp_path, [cell(STUDY, "auto", {"event": steady(80_000), "graph": steady(70_000)})]
    )
    assert tuple(each.name for each in fields(BenchRow)) == FIELDS
    told = json.loads(RENDERERS["json"](bench_document(found, raw=True)))
    assert told["schema"] == "profharness.bench/1"
    assert [row["measurement"] for row in told["rows"]] == ["graph", "event"]
    assert told["rows"][0]["samples_ns"] == steady(70_000)
    assert told["peaks"]["source"] == "data sheet"
    assert "samples_ns" not in json.loads(RENDERERS["json"](bench_document(found)))["rows"][0]


def test_the_first_requested_measurement_ranks(tmp_path: Path) -> None:
    cells = [cell(STUDY, "auto", {"event": steady(80_000), "graph": steady(70_000)})]
    assert answer(tmp_path, cells, rank_by=("graph", "event")).ranking == "graph"


def test_a_host_bound_call_has_the_time_of_the_host(tmp_path: Path) -> None:
    samples = {"cold": steady(9_000), "eager": steady(20_000), "host": steady(19_000)}
    found = answer(tmp_path, [cell(STUDY, "auto", samples)])
    assert found.ranking == "cold"
    assert {row.measurement: row.host_ns for row in found.rows} == {"cold": None, "eager": 19_000}
    assert "19.0" in RENDERERS["table"](bench_document(found))
    with open_store(tmp_path / "store.db") as store:
        (told,) = query(store, "SELECT * FROM cell_summary").to_dict("records")
    assert told["event_median_ns"] == told["cold_median_ns"] == 9_000  # the successor of event_
    assert (told["eager_median_ns"], told["host_median_ns"]) == (20_000, 19_000)


def test_configs_times_dtypes_with_the_baseline_first() -> None:
    configs = expand_configs("1,1,{8,16},8") + expand_configs("1,1,8,8,fp32")
    found = bench_configs(configs, ("fp16", "bf16"), parse_config("2,1,8,8"))
    assert [config.label for config in found] == [
        *("b2-h1-s8-d8-fp16", "b2-h1-s8-d8-bf16", "b1-h1-s8-d8-fp16", "b1-h1-s8-d8-bf16"),
        *("b1-h1-s16-d8-fp16", "b1-h1-s16-d8-bf16", "b1-h1-s8-d8-fp32"),
    ]
    with pytest.raises(UsageError, match="unknown dtype 'fp8'"):
        bench_configs(configs, ("fp8",))


def test_an_unknown_convention_is_refused(tmp_path: Path) -> None:
    answer(tmp_path, timed(STUDY, auto=80_000))
    with (
        open_store(tmp_path / "store.db") as store,
        pytest.raises(UsageError, match="exact, flash-attention"),
    ):
        evaluate_bench(store, convention="marketing")


def test_kernel_times_of_a_captured_h200_run_add_up(tmp_path: Path) -> None:
    """The stored launches of a real run, summed once more by SQL."""
    traces = Path(__file__).resolve().parents[2] / "traces" / "h200-torch2.11"
    ingest_path(tmp_path / "store.db", traces)
    with open_store(tmp_path / "store.db") as store:
        rows = {
            (row.config, row.backend, row.measurement): row for row in evaluate_bench(store).rows
        }
        totals = store.connection.execute(
            "SELECT config, backend, sum(total_ns), max(iterations) FROM ("
            "  SELECT s.config, s.backend, s.total_ns, c.iterations FROM kernel_summary s"
            "  JOIN cell_summary c USING (run, cell)) GROUP BY config, backend"
        ).fetchall()
    assert len(totals) > 10
    for config, backend, total_ns, iterations in totals:
        row = rows[config, backend, "kernel"]
        assert row.samples == iterations
        assert row.mean_ns == pytest.approx(total_ns / iterations)
    flash = rows["b2-h8-s512-d64-fp16", "flash", "graph"]
    assert flash.median_ns == pytest.approx(13_410, rel=0.001)  # as in docs/measuring.md


@pytest.mark.parametrize(("counted", "said"), [(1, True), (0, False)])
def test_a_bench_without_a_trace_reports_replacements_of_torch_compile(
    counted: int, said: bool, tmp_path: Path
) -> None:
    samples = {"graph": steady(80_000)}
    compiled = cell(STUDY, NAIVE_COMPILED, samples, tuning={REPLACEMENTS: counted})
    found = answer(tmp_path, [compiled, cell(STUDY, "naive", samples)])
    text = RENDERERS["md"](bench_document(found))
    assert ("torch.compile replaced the attention with scaled" in text.replace("\\", "")) == said


def on(folder: Path, gpu: str, **times: int) -> BenchResult:
    folder.mkdir()
    found = answer(folder, timed(STUDY, COLD, **times), {**L4, "gpu": gpu})
    return replace(found, run=f"run-{gpu}")


def test_each_gpu_is_a_column_and_other_fastest_backends_are_reported(tmp_path: Path) -> None:
    old = on(tmp_path / "a", "H100", flash=80_000, cudnn=60_000, math=900_000)
    new = on(tmp_path / "b", "H200", flash=40_000, cudnn=50_000)
    document = benches_by_gpu_document([old, new])
    text = render_table(document, width=160)
    table = text[text.index("GPUs compared") :].splitlines()
    header, *rows = table[1:]
    for title in ("H100 median µs", "H200 median µs", "H200 speed-up"):
        assert title in header
    by_backend = {("flash", "cudnn", "math")[at]: row.split() for at, row in enumerate(rows[:3])}
    assert by_backend["flash"][-3:] == ["80.0", "40.0", "2.00x"]
    assert by_backend["cudnn"][-3:] == ["60.0", "50.0", "1.20x"]
    assert by_backend["math"][-3:] == ["900", "-", "-"]
    label = "b32-h8-s128-d64-fp16"
    assert document.answer[-1] == (
        "The fastest backend on H200 differs from the fastest on H100 for 1 of 1 configs: "
        f"{label} (cudnn → flash)."
    )
    assert len(document.records) == 5
    assert [each["device"] for each in document.extra["classes"]] == ["H100", "H200"]
    # Bug: two boards with one short name had columns with equal titles.
    boards = [
        replace(each, environment={**each.environment, "gpu": f"NVIDIA A100-{board}"})
        for each, board in ((old, "SXM4-40GB"), (new, "PCIE-40GB"))
    ]
    titles = [
        column.title
        for block in benches_by_gpu_document(boards).blocks
        if isinstance(block, Table)
        for column in block.columns
    ]
    assert {f"NVIDIA A100-{name}-40GB median µs/call" for name in ("SXM4", "PCIE")} <= {*titles}
    assert '"classes"' in render_json(document)


def test_one_class_is_its_answer_alone(tmp_path: Path) -> None:
    only = on(tmp_path / "a", "H100", flash=80_000)
    assert benches_by_gpu_document([only]) == bench_document(only)


MIB = 1 << 20
# length: ns of flash, efficient and math, and auto's choice; flash is overtaken after 512
TIMES = {
    256: (20_000, 30_000, 90_000, "flash"),
    512: (40_000, 50_000, 180_000, "flash"),
    1024: (200_000, 100_000, 2_400_000, "math"),
    2048: (800_000, 400_000, 9_000_000, "math"),
}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    cells = []
    for length, (flash, efficient, math, took) in TIMES.items():
        text = f"2,4,{length},64,fp16"
        auto = flash if took == "flash" else math
        for backend, ns, size in (
            ("auto", auto, 0),
            ("flash", flash, length * 1024),
            ("efficient", efficient, 0),
            ("math", math, length * 1024 + 8 * length**2),
        ):
            made = cell(text, backend, {"graph": steady(ns)}, choice=took)
            cells.append(replace(made, peak_memory_bytes=size or None))
    cells += [
        *timed("8,4,512,64,fp16", "graph", flash=140_000),
        *timed("2,4,512,64,bf16", "graph", flash=40_200, math=270_000),
        cell("2,4,512,64,bf16", "efficient", {"graph": [50_000, 52_000]}),
    ]
    return answer(tmp_path_factory.mktemp("swept"), cells)


def of(found: BenchResult, axis: str) -> Sweep:
    (sweep,) = [sweep for sweep in found.sweeps if sweep.axis == axis]
    return sweep


def test_configs_are_alike_but_for_one_axis() -> None:
    texts = (
        *("2,4,256,64,fp16", "2,4,512,64,fp16", "8,4,512,64,fp16", "2,4,512,64,bf16"),
        *("2,8,512,64,fp16", "2,8,512,128,fp16", "2,8,1,64,fp16,seq_kv=512"),
        *("2,8,1,64,fp16,seq_kv=256", "2,8,1,64,fp16,seq_kv=256,kv_heads=2"),
    )
    labels = [parse_config(text).label for text in texts]
    groups = {axis.key: families(labels, axis) for axis in AXES}
    assert {name: list(group) for name, group in groups["seq_len"].items()} == {
        "b2-h4-d64-fp16": [256, 512],
        "b2-h8-sq1-d64-fp16": [256, 512],
    }
    assert {name: list(group) for name, group in groups["batch"].items()} == {
        "h4-s512-d64-fp16": [2, 8]
    }
    assert {name: list(group) for name, group in groups["heads"].items()} == {
        "b2-s512-d64-fp16": [4, 8]
    }
    assert {name: list(group) for name, group in groups["head_dim"].items()} == {
        "b2-h8-s512-fp16": [64, 128]
    }


def test_sweeps_find_crossovers_and_drops_along_the_length(swept: BenchResult) -> None:
    length = of(swept, "seq_len")
    assert (length.name, length.values) == ("b2-h4-d64-fp16", tuple(TIMES))
    (crossing,) = [event for event in length.events if event.kind == "crossover"]
    assert (crossing.before, crossing.after) == (512, 1024)
    assert (crossing.backend, crossing.other) == ("efficient", "flash")
    drops = {event.backend: event for event in length.events if event.kind == "drop"}
    # four times the work in 60, 13.3 times the time
    assert drops["auto"].factor == pytest.approx(2_400 / 40 / 4)
    assert drops["math"].factor == pytest.approx(2_400 / 180 / 4)
    assert "flash" not in drops  # 1.25x less
    assert "(it ran math instead of flash)" in drops["auto"].text
    assert length.statement.startswith("efficient overtakes flash between 512 and 1,024; the best")
    assert "math takes 3.33 times as long per FLOP at 1,024 as at 512" in length.statement


def test_a_lead_that_samples_do_not_show_is_no_crossover(tmp_path: Path) -> None:
    cells = [
        *timed("2,4,256,64,fp16", "graph", flash=50_000, efficient=50_100),
        *timed("2,4,512,64,fp16", "graph", flash=100_100, efficient=100_000),
    ]
    (sweep,) = answer(tmp_path, cells).sweeps
    assert sweep.events == ()
    assert sweep.statement.startswith(
        "the lowest median belongs to flash at 256, efficient at 512;"
    )


def test_the_backend_that_auto_ran_does_not_overtake_auto(tmp_path: Path) -> None:
    """Bug: `flash overtakes auto between 64 and 100`, where auto ran flash at 100."""
    cells = [
        cell("2,8,512,64,fp16", "auto", {"graph": steady(50_000)}, choice="cudnn"),
        *timed("2,8,512,64,fp16", "graph", flash=60_000, cudnn=50_000),
        cell("2,8,512,100,fp16", "auto", {"graph": steady(95_000)}, choice="flash"),
        *timed("2,8,512,100,fp16", "graph", flash=90_000),
    ]
    (sweep,) = answer(tmp_path, cells).sweeps
    assert sweep.events == ()
    assert sweep.statement.startswith("the lowest median belongs to cudnn at 64, flash at 100;")


def test_a_leader_without_a_figure_ends(tmp_path: Path) -> None:
    cells = [
        *timed("2,4,512,128,fp16", "graph", flash=50_000, math=90_000),
        *timed("2,4,512,256,fp16", "graph", flash=90_000, math=200_000),
        *timed("2,4,512,512,fp16", "graph", math=400_000),
    ]
    refused = replace(cells[0], status="refused", samples={}, config=cells[-1].config)
    (sweep,) = answer(tmp_path, [*cells, refused]).sweeps
    assert sweep.axis == "head_dim"
    assert [(event.kind, event.after) for event in sweep.events] == [("end", 512)]
    told = "flash has no time at 512, where math is fastest; the best rate changes from"
    assert sweep.statement.startswith(told)
    (chart,) = [
        block
        for block in bench_document(answer_again(tmp_path)).blocks
        if isinstance(block, Chart) and block.title.startswith("Time per call over head_dim")
    ]
    assert [text for _, text in chart.marks] == ["flash ends"]


def answer_again(folder: Path) -> BenchResult:
    with open_store(folder / "store.db") as store:
        return evaluate_bench(store)


def test_memory_grows_by_an_order_with_its_doubt(swept: BenchResult, tmp_path: Path) -> None:
    growth = {each.backend: each for each in of(swept, "seq_len").growth}
    assert growth.keys() == {"flash", "math"}
    assert growth["flash"].order == pytest.approx(1)
    assert growth["flash"].text == "flash needs 0.25 to 2 MiB (growing as S^1.00)"
    assert 1.7 < growth["math"].order < 2
    two = [
        replace(cell(f"1,1,{n},64,fp16", "math", {"graph": steady(n)}), peak_memory_bytes=n * n)
        for n in (1024, 2048)
    ]
    (sweep,) = answer(tmp_path, two).sweeps
    assert sweep.growth[0].text == "math needs 1 to 4 MiB (growing as S^2.00, from only two points)"


def test_dtypes_are_compared(swept: BenchResult) -> None:
    (pair,) = swept.dtypes
    assert (pair.dtype, pair.other) == ("bf16", "fp16")
    assert pair.counts == {"same": 1, "slower": 1, "unknown": 1}
    assert pair.statement == (
        "compared with fp16 in 3 pairs of cells, bf16 is as fast (within 3 %) in 1, slower in 1 "
        "(1.50 times as long, "
        "math on b2-h4-s512-d64), not significantly different in 1"
    )


def test_statements_and_charts_of_each_axis_are_shown(swept: BenchResult) -> None:
    document = bench_document(swept)
    text = " ".join(RENDERERS["table"](document).split())
    assert "Along each axis" in text
    assert "sequence length b2-h4-d64-fp16: efficient overtakes flash" in text
    assert "batch h4-s512-d64-fp16: " in text
    charts = {block.title: block for block in document.blocks if isinstance(block, Chart)}
    latency = charts["Time per call over sequence length, b2-h4-d64-fp16 (graph)"]
    assert [text for _, text in latency.marks] == ["efficient overtakes flash"]
    rates = charts["TFLOP/s over sequence length, b2-h4-d64-fp16 (graph)"]
    assert list(rates.marks) == [
        (1024, "auto 15.0x per FLOP vs 512"),
        (1024, "math 3.33x per FLOP vs 512"),
    ]
    assert "Time per call over batch, h4-s512-d64-fp16 (graph)" in charts
    memory = charts["Peak memory over sequence length, b2-h4-d64-fp16 (PyTorch's allocator)"]
    assert {row["backend"] for row in memory.rows} == {"flash", "math"}
    assert charts["Time per call by dtype (graph)"].kind == "dumbbell"
    assert document.extra["axes"][0]["axis"] == "batch"
    assert document.extra["dtypes"][0]["counts"]["same"] == 1


def test_auto_leads_if_its_choice_was_not_timed(tmp_path: Path) -> None:
    cells = [
        cell(f"2,4,{length},64,fp16", backend, {"graph": steady(ns)}, choice=took)
        for length, backend, ns, took in (
            *((256, "auto", 20_000, "cudnn"), (512, "auto", 40_000, "flash")),
            *((256, "flash", 30_000, None), (512, "flash", 40_100, None)),
            *((256, "math", 90_000, None), (512, "math", 180_000, None)),
        )
    ]
    (sweep,) = answer(tmp_path, cells).sweeps
    assert sweep.statement.startswith("the lowest median belongs to cudnn at 256, flash at 512; ")
    rate = 2 * 2 * 4 * 256**2 * 128 / 20_000e-9 / 1e12
    assert f"the best rate changes from {rate:,.3g} TFLOP/s at 256" in sweep.statement


def test_a_drop_that_samples_do_not_show_is_not_reported(tmp_path: Path) -> None:
    times = {256: [20_000, 21_000, 400_000], 512: [70_000, 650_000, 700_000]}
    cells = [
        cell(f"2,4,{length},64,fp16", "math", {"graph": samples * 2})
        for length, samples in times.items()
    ]
    assert not answer(tmp_path, cells).sweeps  # the machine was too busy for both figures


def test_a_second_way_to_run_cudnn_is_not_the_fastest_backend(tmp_path: Path) -> None:
    """Bug: the answer named cudnn, but `vs fastest` was relative to all-disabled."""
    times = {"auto": 10_000, "cudnn": 9_000, "all-disabled": 8_900}
    found = answer(tmp_path, timed("1,1,512,64,fp16", **times))
    assert [winner.backend for winner in found.winners] == ["cudnn"]
    assert row_of(found, "cudnn").regret == 0
    assert row_of(found, "all-disabled").regret is None
