"""Counters of all presets on a real H200 (ncu 2025.3.1), their values and findings."""

from __future__ import annotations

import tarfile
from dataclasses import fields, replace
from pathlib import Path

import pytest

from profharness.commands.analyze.cells import analyze_stored
from profharness.commands.analyze.figures import CellAnalysis, KernelFigures
from profharness.commands.analyze.tables import analyze_document, traffic_points
from profharness.devices import MEASURED, Peaks, l1_bytes
from profharness.program.counters import Counters
from profharness.recording.profilers.ncu_metrics import PRESETS, TENSOR_PIPE_OF_ADA
from profharness.render.document import Chart, Heading, Note
from profharness.store import Selection, ingest_path, open_store

ARCHIVE = Path(__file__).parents[2] / "traces" / "counters.tar.xz"
LIMITS = [
    f"launch__occupancy_limit_{what}" for what in ("blocks", "registers", "shared_mem", "warps")
]
SQUARE, DECODE = "b2-h8-s512-d64-fp16", "b1-h32-kv8-sq1-skv4096-d128-bf16"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counters")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    path = folder / "s.db"
    for name in ("presets", "head_dim"):
        (result,) = ingest_path(path, folder / "counters" / name)
        assert not result.warnings
    return path


@pytest.fixture(scope="module")
def cells(store: Path) -> dict[tuple[str, str], CellAnalysis]:
    with open_store(store) as opened:
        runs = [row.run for row in opened.runs()]
    return {
        (analysis.config.label, analysis.backend): analysis
        for run in runs
        for analysis in analyze_stored(store, Selection(run=run), "data-sheet")
    }


def counted(analysis: CellAnalysis, part: str) -> KernelFigures:
    (kernel,) = [each for each in analysis.kernels if part in each.kernel]
    return kernel


def test_every_preset_metric_is_in_the_report_and_every_figure_is_read(
    store: Path, cells: dict[tuple[str, str], CellAnalysis]
) -> None:
    with open_store(store) as opened:
        (row,) = [
            row
            for row in opened.kernels("latest")
            if row.profiler == "ncu" and row.backend == "tiled" and "d2048" in (row.config or "")
        ]
    asked = {name for names in PRESETS.values() for name in names} - {TENSOR_PIPE_OF_ADA}
    assert asked <= row.metrics.keys()
    flash = counted(cells[SQUARE, "flash"], "flash_fwd_splitkv_kernel")
    assert all(getattr(flash.counters, item.name) is not None for item in fields(Counters))


def test_figures_of_fused_kernels_are_those_that_ncu_wrote(
    cells: dict[tuple[str, str], CellAnalysis],
) -> None:
    flash = counted(cells[SQUARE, "flash"], "flash_fwd_splitkv_kernel")
    assert flash.counters.tensor_pipe == pytest.approx(0.178, abs=1e-3)
    assert flash.counters.l2_hit_rate == pytest.approx(0.670, abs=1e-3)
    assert flash.counters.load_sectors == pytest.approx(16)
    assert flash.shared_share == pytest.approx(72 / 228)
    assert flash.dram_bytes_per_s == pytest.approx(363.9e9, rel=1e-3)
    cudnn = counted(cells[SQUARE, "cudnn"], "cudnn_sdpa")
    assert cudnn.counters.load_sectors is None  # it loads by TMA
    assert next(iter(cudnn.counters.warp_states)) == "barrier"


def test_math_runs_fp32_products_beside_the_tensor_cores(
    cells: dict[tuple[str, str], CellAnalysis],
) -> None:
    finding = cells[SQUARE, "math"].finding("no_tensor_cores")
    assert finding is not None and finding.severity == "major"
    assert finding.sentence.startswith("sm80_xmma_gemm_f32")


def test_a_combine_kernel_of_few_blocks_waits_for_memory(
    cells: dict[tuple[str, str], CellAnalysis],
) -> None:
    finding = cells[DECODE, "flash"].finding("stalls")
    assert finding is not None
    assert "flash_fwd_splitkv_combine<128,m4,split32> spend 82.8 %" in finding.sentence
    assert "issue in 3.4 % of the cycles" in finding.sentence


def test_traffic_stands_beside_compulsory_bytes_and_tma_is_not_taken_for_no_traffic(
    cells: dict[tuple[str, str], CellAnalysis],
) -> None:
    levels = {
        backend: [point["level"] for point in traffic_points(cells[SQUARE, backend])]
        for backend in ("flash", "cudnn", "naive")
    }
    assert levels["flash"] == ["compulsory", "DRAM", "L2", "L1"]
    assert levels["cudnn"] == levels["naive"] == ["compulsory", "DRAM", "L2"]
    past = {cell for cell, each in cells.items() if each.figures and each.figures.past_l1}
    # cudnn's kernel for decoding does not use TMA
    assert past == {(SQUARE, "cudnn"), (SQUARE, "naive"), (DECODE, "naive")}
    math = {point["level"]: point for point in traffic_points(cells[SQUARE, "math"])}
    assert math["DRAM"]["ratio"] == pytest.approx(25.0, abs=0.1)
    assert math["L2"]["ratio"] > math["DRAM"]["ratio"] > 1
    document = analyze_document([*cells.values()])
    notes = [block for block in document.blocks if isinstance(block, Note)]
    (products,) = [note for note in notes if "past the L1" in note.text and "128x8" in note.text]
    assert products.label == "naive" and "nvjet_sm90" in products.text
    charts = {block.title: block for block in document.blocks if isinstance(block, Chart)}
    rows = charts["Roofline on measured traffic"].rows
    assert len(rows) == sum(len(traffic_points(analysis)) for analysis in cells.values())
    assert {row["backend"] for row in rows} == {
        f"{level} bytes" for level in ("compulsory", "DRAM", "L2", "L1")
    }
    assert f"flash {SQUARE}" in {row["label"] for row in rows}


def test_what_shared_memory_leaves_of_the_l1_is_never_less_than_ncu_saw(store: Path) -> None:
    """ncu reports the carve-out that the driver chose, which may be larger than the blocks need."""
    with open_store(store) as opened:
        seen = [
            (device, row)
            for run in opened.runs()
            for device in opened.devices(run.run)
            for row in opened.kernels(run.run)
            if row.profiler == "ncu" and row.occupancy and row.shared_bytes is not None
        ]
    assert len(seen) > 40
    exact = 0
    for device, row in seen:
        fits = int(min(value for name, (value, _) in row.metrics.items() if name in LIMITS))
        left = l1_bytes(device, fits, row.shared_bytes or 0)
        carve_out = row.metrics["launch__shared_mem_config_size"][0]
        assert left is not None and left >= 256 * 1024 - carve_out
        exact += left == 256 * 1024 - carve_out
    assert exact >= 10


def test_k_and_v_as_large_as_the_whole_unified_l1_do_not_fit_in_it(
    cells: dict[tuple[str, str], CellAnalysis],
) -> None:
    analysis = cells["b1-h4-s64-d512-fp32", "single_query"]
    assert analysis.figures is not None and analysis.figures.kv_head_bytes == 256 * 1024
    assert analysis.kv_places == ("L2 (61,440 KiB)",)


def test_one_table_tells_the_device(cells: dict[tuple[str, str], CellAnalysis]) -> None:
    machine = cells[SQUARE, "flash"].machine
    facts = {fact.name: (fact.value, fact.unit, fact.source) for fact in machine.facts()}
    assert facts["SMs"][0] == 132 and facts["L2"][:2] == (60, "MiB")
    assert facts["SM clock"][:2] == (1980, "MHz")
    assert facts["shared memory of a block at most"][:2] == (227, "KiB")
    assert facts["bandwidth"] == (4800, "GB/s", "data sheet")
    measured = Peaks("NVIDIA H200", MEASURED, 4.2e12, {"fp16": 700e12})
    both = [fact for fact in replace(machine, peaks=measured).facts() if fact.name == "bandwidth"]
    assert [(fact.value, fact.source) for fact in both] == [
        (4800, "data sheet"),
        (4200, "measured"),
    ]
    document = analyze_document([cells[SQUARE, "flash"]])
    heading = [block for block in document.blocks if isinstance(block, Heading)][-1]
    assert (heading.text, heading.detail) == ("Device", "NVIDIA H200")
    (record,) = document.extra["devices"]
    assert record["facts"][1] == {
        "name": "SMs",
        "value": 132,
        "unit": "",
        "source": "as the trace tells it",
    }
