"""Stored hardware counters belong to the right launch and are deleted with their run."""

from __future__ import annotations

import gzip
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from profharness.attention.config import parse_config
from profharness.run import Cell, Problem, Protocol, Run, TraceFile, write_run
from profharness.store import ingest_path, open_store, query, to_frame
from profharness.traces import open_trace
from profharness.traces.ncu_csv import NcuLaunch, NcuReport, write_csv

Folder = Callable[..., Path]
DATA = Path(__file__).parents[1] / "data"
TIME = "gpu__time_duration.sum"
BYTES = "dram__bytes.sum"
UNITS = {TIME: "ns", BYTES: "byte"}
GRID = {"launch__grid_dim_x": 8.0, "launch__grid_dim_y": 1.0, "launch__grid_dim_z": 1.0}
PROBLEM = Problem("ncu", "no_permission", "not allowed", "run as root", "ERR_NVGPUCTRPERM", ("c2",))


def launch(kernel: str, cell: str | None, ns: float | None, bytes_: float | None) -> NcuLaunch:
    values = {TIME: ns, BYTES: bytes_} | GRID
    ranges = (("profharness", f"profharness:{cell}"),) if cell else ()
    known = {name: value for name, value in values.items() if value is not None}
    return NcuLaunch(kernel, known, {}, start_end=ranges)


LAUNCHES = [
    launch("warm", "warmup", 1, 1),
    launch("flash", "c1", 100, 10),
    launch("copy", "c1", 7, None),
    launch("flash", "c1", 300, 30),
    launch("stray", None, 5, 5),
    launch("flash", "c1", 110, 50),
    launch("math", "c2", 900, 90),
    launch("unknown", "c9", 3, 3),
]


@pytest.fixture(scope="module")
def ncu_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ncu") / "h200.ncu-rep"
    path.write_bytes(gzip.decompress((DATA / "ncu_h200.ncu-rep.gz").read_bytes()))
    return path


@pytest.fixture
def ncu_folder(tmp_path: Path) -> Folder:
    """Return a function that makes a run folder with one ncu trace, with launches outside of cells."""

    def make(launches: list[NcuLaunch], run: str = "20261121-ncu") -> Path:
        folder = tmp_path / run
        folder.mkdir()
        write_csv(NcuReport(launches, UNITS), folder / "ncu.csv")
        config = parse_config("2,8,512,64,fp16")
        cells = tuple(Cell(name, config, "flash", status="ok") for name in ("c1", "c2"))
        write_run(
            folder,
            Run(
                run,
                "2026-11-21T10:00:00+00:00",
                ("ncu",),
                Protocol(),
                cells,
                {},
                (TraceFile("ncu", "ncu.csv", ("c1", "c2")),),
                problems=(PROBLEM,),
            ),
        )
        return folder

    return make


def test_metrics_belong_to_kept_launches(tmp_path: Path, ncu_folder: Folder) -> None:
    store = tmp_path / "p.db"
    (result,) = ingest_path(store, ncu_folder(LAUNCHES))
    assert result.launches == 5 and "range of the unknown cell c9" in result.warnings[0]
    with open_store(store) as opened:
        rows = {(row.cell, row.kernel): row for row in opened.kernels()}
        assert set(rows) == {("c1", "flash"), ("c1", "copy"), ("c2", "math")}
        flash = rows["c1", "flash"]
        assert flash.metrics[TIME] == (110.0, "ns") and flash.metrics[BYTES] == (30.0, "byte")
        assert (flash.duration_ns, flash.launches, flash.profiler) == (110, 3, "ncu")
        assert rows["c2", "math"].metrics[BYTES] == (90.0, "byte")
        assert BYTES not in rows["c1", "copy"].metrics
        (math,) = opened.kernels(cells=["c2"], by_op=True)
        assert math.metrics == rows["c2", "math"].metrics
        frame = to_frame(opened.kernels())
        assert frame[BYTES].dropna().tolist() == [30.0, 90.0]
        view = query(opened, "SELECT * FROM kernel_metrics WHERE metric = ?", [BYTES])
        assert view["value"].tolist() == [10.0, 30.0, 50.0, 90.0]
        assert view["kernel"].tolist() == ["flash"] * 3 + ["math"]
        assert view["cell"].tolist() == ["c1"] * 3 + ["c2"]
        assert set(view["unit"]) == {"byte"} and set(view["backend"]) == {"flash"}
        assert set(view["config"]) == {"b2-h8-s512-d64-fp16"}
        assert view["grid_x"].tolist() == [8] * 4 and view["block_x"].isna().all()


def test_unmeasured_time_is_null_everywhere(tmp_path: Path, ncu_folder: Folder) -> None:
    """A launch without a duration makes the times of its group and the shares of its cell unknown."""
    store = tmp_path / "p.db"
    launches = [
        launch("flash", "c1", None, 10),
        launch("flash", "c1", 300, 10),
        launch("copy", "c1", 7, 1),
        launch("math", "c2", 900, 1),
    ]
    ingest_path(store, ncu_folder(launches))
    with open_store(store) as opened:
        rows = {row.kernel: row for row in opened.kernels()}
        flash = rows["flash"]
        times = (flash.duration_ns, flash.total_ns, flash.min_ns, flash.max_ns, flash.share)
        assert times == (None,) * 5
        assert (rows["copy"].duration_ns, rows["copy"].share) == (7, None)
        assert (rows["math"].duration_ns, rows["math"].share) == (900, 1.0)
        assert [row.duration_ns for row in opened.launches()] == [None, 300, 7, 900]
        summary = query(opened, "SELECT * FROM kernel_summary WHERE kernel = 'flash'")
        for name in ("duration_ns", "total_ns", "min_ns", "max_ns"):
            assert summary[name].isna().all(), name


def test_deleting_a_run_deletes_only_its_metrics(tmp_path: Path, ncu_folder: Folder) -> None:
    store = tmp_path / "p.db"
    ingest_path(store, ncu_folder(LAUNCHES, "run-a"))
    ingest_path(store, ncu_folder(LAUNCHES[:3], "run-b"))
    with open_store(store, write=True) as opened:
        before = query(opened, "SELECT * FROM kernel_metrics WHERE run = 'run-b'")
        opened.delete_run("run-a")
        left = query(opened, "SELECT * FROM kernel_metrics")
        assert left.equals(before) and len(left)
        count = opened.connection.execute("SELECT count(*) FROM metrics").fetchone()[0]
        assert count == len(left)
        opened.delete_run("run-b")
        assert opened.connection.execute("SELECT count(*) FROM metrics").fetchone()[0] == 0


def test_problems_are_kept(tmp_path: Path, ncu_folder: Folder, kineto: Path) -> None:
    store = tmp_path / "p.db"
    ingest_path(store, ncu_folder(LAUNCHES))
    (foreign,) = ingest_path(store, kineto)
    with open_store(store) as opened:
        assert opened.problems("20261121-ncu") == (PROBLEM,)
        assert opened.problems(foreign.run) == ()
        assert all(row.metrics == {} for row in opened.kernels(foreign.run))


def test_real_report_is_a_foreign_trace(tmp_path: Path, ncu_report: Path) -> None:
    """The median over a group's launches equals that of the parsed trace."""
    store = tmp_path / "p.db"
    (result,) = ingest_path(store, ncu_report)
    assert result.launches == 82
    trace = open_trace(ncu_report)
    assert trace.metrics is not None
    (batch,) = trace.batches()
    names = trace.metrics.names
    with open_store(store) as opened:
        rows = opened.kernels()
        assert sum(row.launches for row in rows) == 82
        for row in rows:
            config = [
                index
                for index, one in enumerate(trace.launch_configs)
                if (one.grid, one.block, one.registers_per_thread, one.shared_bytes)
                == (row.grid, row.block, row.registers_per_thread, row.shared_bytes)
            ]
            ranges = [index for index, one in enumerate(trace.ranges) if one.name == row.range]
            kernel = trace.kernels.index(row.kernel)
            mine = (
                (batch.kernel == kernel)
                & np.isin(batch.launch_config, config)
                & np.isin(batch.range, ranges)
            )
            assert mine.sum() == row.launches
            told = {name: pair[0] for name, pair in row.metrics.items()}
            for index, name in enumerate(names):
                values = trace.metrics.values[mine, index]
                assert told[name] == statistics.median(values.tolist()), name
            assert row.metrics["dram__bytes_read.sum"][1] == "byte"
