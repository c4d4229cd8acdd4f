"""Sweeps of a bench along one axis: leaders, crossovers, drops, dtypes and memory, compared with
figures computed by hand.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from written_samples import answer, cell, steady

from profharness.attention.config import parse_config
from profharness.commands.bench.tables import bench_document
from profharness.measurements.axes import AXES, LENGTH, Sweep, families
from profharness.measurements.evaluation import BenchResult, evaluate_bench
from profharness.render.document import Chart
from profharness.render.renderers import RENDERERS
from profharness.store import ingest_path, open_store

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
        cell("8,4,512,64,fp16", "flash", {"graph": steady(140_000)}),
        cell("2,4,512,64,bf16", "flash", {"graph": steady(40_200)}),
        cell("2,4,512,64,bf16", "math", {"graph": steady(270_000)}),
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


def test_what_overtakes_and_what_drops_along_the_length(swept: BenchResult) -> None:
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
    assert "(it took math instead of flash)" in drops["auto"].text
    assert length.statement.startswith("efficient overtakes flash between 512 and 1,024; the best")
    assert "math does 3.3x less work a second at 1,024 than at 512" in length.statement


def test_a_lead_that_samples_do_not_show_is_no_crossover(tmp_path: Path) -> None:
    cells = [
        cell(f"2,4,{length},64,fp16", backend, {"graph": steady(ns)})
        for length, backend, ns in (
            *((256, "flash", 50_000), (256, "efficient", 50_100)),
            *((512, "flash", 100_100), (512, "efficient", 100_000)),
        )
    ]
    (sweep,) = answer(tmp_path, cells).sweeps
    assert sweep.events == ()
    assert sweep.statement.startswith(
        "the lowest median is that of flash at 256, efficient at 512;"
    )


def test_a_leader_without_a_figure_ends(tmp_path: Path) -> None:
    cells = [
        cell(f"2,4,512,{dim},fp16", backend, {"graph": steady(ns)})
        for dim, backend, ns in (
            *((128, "flash", 50_000), (256, "flash", 90_000), (128, "math", 90_000)),
            *((256, "math", 200_000), (512, "math", 400_000)),
        )
    ]
    refused = replace(cells[0], status="refused", samples={}, config=cells[-1].config)
    (sweep,) = answer(tmp_path, [*cells, refused]).sweeps
    assert sweep.axis == "head_dim"
    assert [(event.kind, event.after) for event in sweep.events] == [("end", 512)]
    told = "flash has no figure at 512, where math is fastest; the best rate goes from"
    assert sweep.statement.startswith(told)
    (chart,) = [
        block
        for block in bench_document(answer_again(tmp_path)).blocks
        if isinstance(block, Chart) and block.title.startswith("Latency over head_dim")
    ]
    assert [mark.text for mark in chart.marks] == ["flash ends"]


def answer_again(folder: Path) -> BenchResult:
    with open_store(folder / "store.db") as store:
        return evaluate_bench(store)


def test_memory_grows_by_an_order_with_its_doubt(swept: BenchResult, tmp_path: Path) -> None:
    growth = {each.backend: each for each in of(swept, "seq_len").growth}
    assert growth.keys() == {"flash", "math"}
    assert growth["flash"].order == pytest.approx(1)
    assert growth["flash"].text == "flash S^1.00, 0.25 to 2 MiB"
    assert 1.7 < growth["math"].order < 2
    two = [
        replace(cell(f"1,1,{n},64,fp16", "math", {"graph": steady(n)}), peak_memory_bytes=n * n)
        for n in (1024, 2048)
    ]
    (sweep,) = answer(tmp_path, two).sweeps
    assert sweep.growth[0].text == "math S^2.00 by two points alone, 1 to 4 MiB"


def test_a_dtype_is_held_against_another(swept: BenchResult) -> None:
    (pair,) = swept.dtypes
    assert (pair.dtype, pair.other) == ("bf16", "fp16")
    assert pair.counts == {"same": 1, "slower": 1, "unknown": 1}
    assert pair.statement == (
        "bf16 against fp16, of 3 pairs of cells: as fast (within 3%) in 1, slower in 1 (1.50x, "
        "math on b2-h4-s512-d64), not told apart in 1"
    )


def test_statements_and_charts_of_each_axis_are_shown(swept: BenchResult) -> None:
    document = bench_document(swept)
    text = " ".join(RENDERERS["table"](document).split())
    assert "Along each axis" in text
    assert "sequence length, b2-h4-d64-fp16 efficient overtakes flash" in text
    assert "batch, h4-s512-d64-fp16" in text
    charts = {block.title: block for block in document.blocks if isinstance(block, Chart)}
    latency = charts["Latency over sequence length, b2-h4-d64-fp16 (graph)"]
    assert [mark.text for mark in latency.marks] == ["efficient overtakes flash"]
    rates = charts["TFLOP/s over sequence length, b2-h4-d64-fp16 (graph)"]
    assert [(mark.x, mark.text) for mark in rates.marks] == [
        (1024, "auto 15.0x slower than at 512"),
        (1024, "math 3.3x slower than at 512"),
    ]
    assert "Latency over batch, h4-s512-d64-fp16 (graph)" in charts
    memory = charts["Peak memory over sequence length, b2-h4-d64-fp16 (PyTorch's allocator)"]
    assert {row["backend"] for row in memory.rows} == {"flash", "math"}
    assert charts["Latency by dtype (graph)"].kind == "dumbbell"
    assert document.extra["axes"][0]["axis"] == "batch"
    assert document.extra["dtypes"][0]["counts"]["same"] == 1


def test_a_real_run_without_a_sweep_says_nothing(tmp_path: Path) -> None:
    ingest_path(
        tmp_path / "s.db", Path(__file__).resolve().parents[2] / "traces" / "h200-torch2.11"
    )
    with open_store(tmp_path / "s.db") as store:
        found = evaluate_bench(store)
    assert LENGTH.key not in {sweep.axis for sweep in found.sweeps}
    for sweep in found.sweeps:
        assert sweep.statement


def test_auto_leads_where_what_it_took_was_not_timed_itself(tmp_path: Path) -> None:
    cells = [
        cell(f"2,4,{length},64,fp16", backend, {"graph": steady(ns)}, choice=took)
        for length, backend, ns, took in (
            *((256, "auto", 20_000, "cudnn"), (512, "auto", 40_000, "flash")),
            *((256, "flash", 30_000, None), (512, "flash", 40_100, None)),
            *((256, "math", 90_000, None), (512, "math", 180_000, None)),
        )
    ]
    (sweep,) = answer(tmp_path, cells).sweeps
    assert sweep.statement.startswith("the lowest median is that of auto at 256, flash at 512; ")
    rate = 2 * 2 * 4 * 256**2 * 128 / 20_000e-9 / 1e12
    assert f"the best rate goes from {rate:,.4g} TFLOP/s at 256" in sweep.statement


def test_a_drop_that_samples_do_not_show_is_not_told(tmp_path: Path) -> None:
    times = {256: [20_000, 21_000, 400_000], 512: [70_000, 650_000, 700_000]}
    cells = [
        cell(f"2,4,{length},64,fp16", "math", {"graph": samples * 2})
        for length, samples in times.items()
    ]
    (sweep,) = answer(tmp_path, cells).sweeps
    assert sweep.events == () and "Drops" not in sweep.statement
