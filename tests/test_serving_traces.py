"""Traces of a small engine with FlashInfer, recorded on an H100 by scripts/record_serving.py."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from written_benches import bench_run

from profharness.cli import cli
from profharness.commands.diff import diff_document
from profharness.commands.diff.compare import Diff, diff_cells, find_sides
from profharness.commands.layers.answer import layers_answer
from profharness.commands.layers.by_gpu import find_layers_by_gpu, runs_answer
from profharness.commands.report import report_document
from profharness.errors import NotFoundError
from profharness.jobs.into_store import BenchOptions, time_layers
from profharness.program.layer_map import LayerMap, find_layers
from profharness.render.document import Note
from profharness.render.renderers import RENDERERS
from profharness.scrub.copies import audit
from profharness.store import ingest_path, open_store

SERVING = Path(__file__).resolve().parents[1] / "traces" / "serving"
LAYERS = 6
PREFILL_US, DECODE_US = 50.1, 34.4  # median of a layer's attention, measured with CUDA events


def layers_of(source: Path, folder: Path) -> LayerMap:
    (result,) = ingest_path(folder / "store.db", source)
    assert result.warnings == ()
    with open_store(folder / "store.db") as store:
        return find_layers(store, result.run)


def test_eager_steps_have_phases_and_every_layer_its_attention(tmp_path: Path) -> None:
    layers = layers_of(SERVING / "eager.json.gz", tmp_path)
    decode, prefill = layers.phases
    assert (prefill.phase, prefill.steps, prefill.requests, prefill.new_tokens) == (
        *("prefill", 1, 4),
        100 + 300 + 450 + 600,
    )
    assert (decode.phase, decode.steps, decode.requests, decode.new_tokens) == ("decode", 5, 4, 4)
    assert [(row.step_phase, row.steps) for row in layers.rows] == [("decode", 5), ("prefill", 1)]
    for row in layers.rows:
        assert (row.ran, row.calls, len(row.names)) == ("flashinfer", LAYERS, LAYERS)
        assert row.module == "Model_0.DecoderLayer_{0-5}.RadixAttention_{0-5}"
    # the events include the gaps between the kernels of a call, and on a CPU-bound step its launches
    assert 0.8 * PREFILL_US < prefill.attention_ns / LAYERS / 1e3 < PREFILL_US
    assert decode.attention_ns / LAYERS / 1e3 < DECODE_US
    assert prefill.tokens_per_s == pytest.approx(1450 / prefill.step_ns * 1e9)


def test_replays_have_the_modules_of_the_capture_beside_them(tmp_path: Path) -> None:
    layers = layers_of(SERVING / "graph", tmp_path)
    (row,) = layers.rows
    assert (row.mode, row.ran, row.calls, len(row.names)) == ("graph", "flashinfer", LAYERS, LAYERS)
    (decode,) = layers.phases
    assert (decode.phase, decode.steps, decode.new_tokens) == ("decode", 5, 4)
    assert not any("record the capture" in text for text in layers.caveats)
    with_ops = [gap.op_path for gap in layers.gaps if gap.op_path]
    assert any("aten::linear" in path for path in with_ops)


def test_a_report_has_the_phases(tmp_path: Path) -> None:
    (result,) = ingest_path(tmp_path / "store.db", SERVING / "eager.json.gz")
    with open_store(tmp_path / "store.db") as store:
        page = RENDERERS["md"](report_document(store, [result.run]))
    section = page.split("## Phases (% busy")[1].split("## ")[0]
    rows = [line.split(" | ")[:2] for line in section.splitlines() if line.startswith("| ")]
    assert rows == [["| phase", "steps"], ["| :---", "---:"], ["| decode", "5"], ["| prefill", "1"]]


def test_a_scrubbed_trace_keeps_the_annotations_of_steps() -> None:
    assert not list(audit(SERVING))


BENCH, RUN = SERVING.parent / "serving_bench", "20261126-183153-3540"
LENGTHS = {
    "prefill": ((100, 100), (300, 300), (450, 450), (600, 600)),
    "decode": ((1, 101), (1, 301), (1, 451), (1, 601)),
}
POINTS = {
    "decode": (("b4-h32-kv8-sq1-skv364-d128-bf16-page=16", LAYERS),),
    "prefill": (("b4-h32-kv8-s362-d128-bf16-causal-page=16", LAYERS),),
}


def test_an_op_gives_shapes_so_that_work_and_configs_are_known(tmp_path: Path) -> None:
    layers = layers_of(SERVING / "shapes.json.gz", tmp_path)
    assert {phase.phase: phase.points for phase in layers.phases} == POINTS
    for phase in layers.phases:
        pairs = LENGTHS[phase.phase]
        # every query attends to the keys up to its own position
        scores = sum(k - (q - 1 - at) for q, k in pairs for at in range(q))
        assert phase.flops == LAYERS * 2 * 32 * (128 + 128) * scores
        rows = sum(q for q, _ in pairs) * 32 + sum(k for _, k in pairs) * 8
        assert phase.bytes == LAYERS * rows * (128 + 128) * 2
        assert 0 < (phase.roofline_share or 0) < 1


def test_a_bench_tells_the_fastest_backend_of_each_phase_in_tokens_per_second(
    tmp_path: Path,
) -> None:
    layers = layers_of(SERVING / "shapes.json.gz", tmp_path)
    ingest_path(tmp_path / "store.db", BENCH)
    options = BenchOptions(run=RUN)
    timed = time_layers(layers, options, tmp_path / "store.db")
    assert [phase.fastest for phase in timed.phases] == ["flashinfer-fa2", "flashinfer-fa3"]
    for phase in timed.phases:
        assert phase.saves_ns == pytest.approx(phase.attention_ns - (phase.fastest_ns or 0))
        assert phase.saves_ns is not None and phase.saves_ns > 0
        tokens = (phase.tokens_per_s or 0) * phase.mean_ns
        assert phase.fastest_tokens_per_s == pytest.approx(
            tokens / (phase.mean_ns - phase.saves_ns)
        )
        # The mean saving shortens the median step by the same share as the mean step.
        share = 1 - phase.saves_ns / phase.mean_ns
        assert phase.fastest_median_step_tokens_per_s == pytest.approx(
            (phase.median_step_tokens_per_s or 0) / share
        )
    told = layers_answer(timed)
    assert told[2].startswith("In decode steps, flashinfer-fa2 would save at most ")
    assert told[3].startswith("In prefill steps, flashinfer-fa3 would save at most ")
    assert all(text.endswith(" tokens/s).") for text in told[2:4])


def test_a_slower_bench_saves_nothing(tmp_path: Path) -> None:
    layers = layers_of(SERVING / "shapes.json.gz", tmp_path)
    ((label, _),) = POINTS["decode"]
    environment = {"device_type": "cuda", "gpu": layers.gpu, "torch": "2.11.0", "capability": "9.0"}
    run = bench_run(
        tmp_path / "store.db", "slow", {(label, "flashinfer-fa2"): 900_000}, environment,
        measurement="kernel",
    )  # fmt: skip
    timed = time_layers(layers, BenchOptions(run=run), tmp_path / "store.db")
    decode, prefill = timed.phases
    assert prefill.fastest is None
    assert (decode.fastest, decode.saves_ns) == ("flashinfer-fa2", 0)
    assert decode.fastest_tokens_per_s == pytest.approx(decode.tokens_per_s)
    told = "In decode steps, flashinfer-fa2 is not faster than the backend that ran."
    assert told in layers_answer(timed)


def test_a_bench_of_another_gpu_is_refused(tmp_path: Path) -> None:
    layers = layers_of(SERVING / "shapes.json.gz", tmp_path)
    ((label, _),) = POINTS["decode"]
    environment = {"device_type": "cuda", "gpu": "NVIDIA H200", "torch": "2.11.0"}
    times = {(label, "flashinfer-fa2"): 900_000}
    run = bench_run(tmp_path / "store.db", "other", times, environment, measurement="kernel")
    with pytest.raises(NotFoundError, match="was timed on NVIDIA H200"):
        time_layers(layers, BenchOptions(run=run), tmp_path / "store.db")


def test_the_configs_of_phases_are_printed_for_a_bench(tmp_path: Path) -> None:
    words = ["layers", str(SERVING / "shapes.json.gz"), "--savings", "--list-configs"]
    result = CliRunner().invoke(cli, [*words, "--store", str(tmp_path / "store.db")])
    assert result.stdout.split() == [label for ((label, _),) in POINTS.values()]


def test_a_diff_of_engines_names_the_versions_in_their_logs(tmp_path: Path) -> None:
    store, runs = str(tmp_path / "store.db"), []
    sides = (("eager", "0.20.0", "3.4.0"), ("shapes", "0.25.0", "3.6.0"))
    for name, version, triton in sides:
        log = tmp_path / f"{name}.log"
        log.write_text(
            f"INFO vLLM API server version {version}\n[pip3] triton=={triton}\n"
            "INFO [cuda.py:367] Using AttentionBackendEnum.FLASHINFER backend.\n"
        )
        words = ["ingest", str(SERVING / f"{name}.json.gz"), "--with", str(log), "--store", store]
        assert CliRunner().invoke(cli, words).exit_code == 0
        runs.append(f"{name}.json.gz")
    told = CliRunner().invoke(cli, ["diff", *runs, "--store", store]).stdout
    assert told.startswith(
        "The median decode step takes 1.89 ms → 1.78 ms, and the attention forward pass"
    )
    assert "The environments differ in engine_version (0.20.0 → 0.25.0)" in " ".join(told.split())
    table = told.split("environment ")[1].splitlines()
    keys = [line.split()[:3] for line in table[1:] if line.strip()]
    assert ["engine_version", "0.20.0", "0.25.0"] in keys
    assert ["triton", "3.4.0", "3.6.0"] in keys


def test_analyze_tells_the_limit_of_each_phase(tmp_path: Path) -> None:
    words = ["analyze", str(SERVING / "shapes.json.gz"), "--format", "json"]
    result = CliRunner().invoke(cli, [*words, "--store", str(tmp_path / "store.db")])
    rows = {row["config"]: row for row in json.loads(result.stdout)["rows"]}
    assert set(rows) == {label for ((label, _),) in POINTS.values()}
    (decode,) = (row for label, row in rows.items() if "sq1" in label)
    assert decode["bottleneck"] == "latency"
    assert any("SMs are idle" in json.dumps(finding) for finding in decode["findings"])
    # Bug: the rates were those of the mean lengths, 93.6 TFLOP/s where `layers` shows 118.
    (prefill,) = (row for label, row in rows.items() if "s362" in label)
    phases = {row["phase"]: row for row in the_phases(tmp_path)}
    for key in ("flops_per_s", "bytes_per_s"):
        assert prefill[key] == pytest.approx(phases["prefill"][key], rel=0.01)
    shown = CliRunner().invoke(cli, [*words[:2], "--store", str(tmp_path / "store.db")])
    assert "The rates are calculated from the exact lengths." in " ".join(shown.stdout.split())
    assert "mean lengths" not in shown.stderr


def the_phases(folder: Path) -> list[dict[str, Any]]:
    words = ["layers", str(SERVING / "shapes.json.gz"), "--format", "json"]
    result = CliRunner().invoke(cli, [*words, "--store", str(folder / "store.db")])
    found: list[dict[str, Any]] = json.loads(result.stdout)["phases"]
    return found


def test_layers_names_the_configs_to_bench(tmp_path: Path) -> None:
    """Bug: the hint named an unrelated config, although the configs of the phases were known."""
    words = ["layers", str(SERVING / "shapes.json.gz"), "--store", str(tmp_path / "store.db")]
    shown = " ".join(CliRunner().invoke(cli, words).stdout.split())
    labels = [label for ((label, _),) in POINTS.values()]
    assert (
        f"at their mean lengths, use: profharness bench {' '.join(labels)} --backend flashinfer-fa2,"
    ) in shown
    assert "2,8,512,64" not in shown
    refused = CliRunner().invoke(cli, [*words, "--list-configs"])
    assert "layers shapes.json.gz --savings --list-configs" in str(refused.exception)
    other = ["layers", str(SERVING / "graph"), "--store", str(tmp_path / "store.db")]
    assert "profharness bench" not in CliRunner().invoke(cli, other).stdout


EAGER, GRAPH, SHAPES = (SERVING / name for name in ("eager.json.gz", "graph", "shapes.json.gz"))
SIZES = "sizes are not recorded on {} side, so layers are paired by module and order"


def diff_of(folder: Path, *sources: Path) -> Diff:
    runs = [ingest_path(folder / "store.db", source)[0].run for source in sources]
    with open_store(folder / "store.db") as store:
        return diff_cells(*find_sides(store, *runs))


@pytest.mark.parametrize(
    ("sides", "verdict", "where", "alone"),
    [
        ((EAGER, GRAPH), "slower", "either", ("removed", "the candidate has no prefill steps")),
        ((GRAPH, SHAPES), "faster", "one", ("added", "the baseline has no prefill steps")),
    ],
)
def test_decoding_is_compared_with_decoding(
    tmp_path: Path, sides: tuple[Path, Path], verdict: str, where: str, alone: tuple[str, str]
) -> None:
    """Bug: the module was once `removed` and once `added`, because a side does not know the sizes."""
    found = diff_of(tmp_path, *sides)
    rows = {row.phase: row for row in found.layers}
    assert len(rows) == len(found.layers) == 2
    decode = rows["decode"]
    assert (decode.verdict, decode.speed) == ("changed", verdict)
    assert [side.calls for side in decode.sides if side] == [LAYERS, LAYERS]
    assert SIZES.format(where) in decode.reasons
    assert (rows["prefill"].verdict, rows["prefill"].reasons[0]) == alone
    answer = " ".join(diff_document(found).answer)
    names = found.names
    assert answer.startswith("The median decode step takes ")
    comparison = (
        f"times as long as {names[0]}" if verdict == "slower" else f"times as fast as {names[0]}"
    )
    assert (
        f", and {names[1]} {'takes' if verdict == 'slower' else 'is'} " in answer
        and f"{comparison} in the attention for" in answer
    )
    graph = next(name for name in names if name == "graph")
    assert f"; only {graph} replays CUDA graphs. Only " in answer
    assert answer.endswith("has prefill steps.")


def test_phases_are_rows_with_one_caveat_about_sizes(tmp_path: Path) -> None:
    found = diff_of(tmp_path, EAGER, SHAPES)
    assert [(row.phase, row.verdict) for row in found.layers] == [
        ("decode", "same"),
        ("prefill", "same"),
    ]
    page = RENDERERS["table"](diff_document(found))
    phases = re.findall(
        r"^(?:(?:baseline|candidate) +|DecoderLayer\S+) +(decode|prefill)", page, re.MULTILINE
    )
    assert phases == ["decode", "decode", "prefill", "prefill", "decode", "prefill"]
    document = diff_document(found)
    notes = [block for block in document.blocks if isinstance(block, Note)]
    sizes, environment = (note for note in notes if note.level != "hint")
    assert sizes == Note(SIZES.format("one"))
    assert environment.text.startswith("The environments cannot be compared")
    assert [text.split(", and ")[0] for text in document.answer[:2]] == [
        "The median decode step takes 1.89 ms → 1.78 ms",
        "The median prefill step takes 5.29 ms → 5.30 ms",
    ]


def test_known_sizes_that_differ_are_not_paired(tmp_path: Path) -> None:
    text = gzip.decompress(SHAPES.read_bytes()).decode()
    other = json.loads(text)
    for event in other["traceEvents"]:
        sizes = event.get("args", {}).get("Input Dims")
        if sizes and [4, 32, 128] in sizes:
            event["args"]["Input Dims"] = [
                [5, 32, 128] if at == [4, 32, 128] else at for at in sizes
            ]
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    rows = diff_of(tmp_path, SHAPES, path).layers
    assert [(row.phase, row.verdict) for row in rows] == [
        ("decode", "removed"),
        ("decode", "added"),
        ("prefill", "same"),
    ]
    assert rows[0].reasons == ("the candidate has no matching layer with the same size",)


def test_layers_compares_runs_of_an_engine_by_phase(tmp_path: Path) -> None:
    """Bug: the mean of prefilling and decoding was compared with decoding, so that the graph was
    faster in total and slower in each layer.
    """
    runs = [ingest_path(tmp_path / "store.db", each)[0].run for each in (EAGER, GRAPH)]
    with open_store(tmp_path / "store.db") as store:
        (text,) = runs_answer(find_layers_by_gpu(store, runs))
    assert text == (
        "graph takes 1.15 times as long as eager.json.gz in attention (66.4 µs → 76.6 µs per decode "
        "step)."
    )
