"""Counters of all presets on a real H200 (ncu 2025.3.1): they read back, and the findings hold."""

from __future__ import annotations

import tarfile
from dataclasses import fields
from pathlib import Path

import pytest

from profharness.answers.analyze.answer import analyze_stored
from profharness.answers.analyze.counters import Counters
from profharness.answers.analyze.figures import CellAnalysis, KernelFigures
from profharness.profilers.ncu_metrics import PRESETS, TENSOR_PIPE_OF_ADA
from profharness.store import Selection, ingest_path, open_store
from profharness.views.analyze import analyze_document, traffic_points
from profharness.views.document import Chart

ARCHIVE = Path(__file__).parents[2] / "traces" / "counters.tar.xz"
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
        for backend in ("flash", "cudnn")
    }
    assert levels["flash"] == ["compulsory", "DRAM", "L2", "L1"]
    assert levels["cudnn"] == ["compulsory", "DRAM", "L2"]
    math = {point["level"]: point for point in traffic_points(cells[SQUARE, "math"])}
    assert math["DRAM"]["ratio"] == pytest.approx(25.0, abs=0.1)
    assert math["L2"]["ratio"] > math["DRAM"]["ratio"] > 1
    document = analyze_document([*cells.values()])
    charts = {block.title: block for block in document.blocks if isinstance(block, Chart)}
    rows = charts["Roofline on measured traffic"].rows
    assert len(rows) == sum(len(traffic_points(analysis)) for analysis in cells.values())
    assert {row["backend"] for row in rows} >= {"flash, compulsory bytes", "flash, L2 bytes"}
