"""Captures on a real GPU under the real nsys and ncu."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from changed_workers import changed_worker, run_changed, statuses

from profharness.attention.config import expand_configs
from profharness.commands.kernels.tables import join_kernels
from profharness.jobs.into_store import capture_into_store, default_backends
from profharness.processes import find_workers
from profharness.recording.profilers import find_tool
from profharness.run import CaptureOptions, Protocol
from profharness.store import ingest_path, open_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nsys,
    pytest.mark.ncu,
    pytest.mark.skipif(default_backends() == default_backends("cpu"), reason="no NVIDIA GPU"),
    pytest.mark.skipif(not (find_tool("nsys") and find_tool("ncu")), reason="no nsys or ncu"),
]

QUICK = Protocol(iterations=3, warmup=1, samples=5)
CONFIGS = expand_configs("2,8,512,64") + expand_configs("2,8,1024,64,causal,bwd")


def test_three_witnesses_of_the_same_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.zeros(
        1, device="cuda"
    )  # the context of a program that calls profharness must not count as another process
    # one GPU, so that one report has all cells
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    )
    options = CaptureOptions(("torch", "nsys", "ncu"), tmp_path / "runs", QUICK)
    store = tmp_path / "store.db"
    captured = capture_into_store(CONFIGS, default_backends("cuda"), store, options)
    assert not captured.run.problems
    assert not [warning for result in captured.ingested for warning in result.warnings]
    with open_store(store) as opened:
        joined = join_kernels(opened.kernels("latest"))
    assert {name for each in joined for name in each.rows} == {"torch", "nsys", "ncu"}
    wrong = [
        (each.first.kernel_short, one.text)
        for each in joined
        for one in each.disagreements
        if one.code != "time"
    ]
    assert not wrong
    for each in joined:
        if "ncu" in each.rows:
            assert each.rows["ncu"].metrics["dram__bytes_read.sum"][0] >= 0
    (report,) = captured.folder.glob("*.nsys-rep")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(report, alone)
    (result,) = ingest_path(store, alone / report.name)
    with open_store(store) as opened:
        torch_launches = sum(r.launches for r in opened.kernels("latest", profilers=["torch"]))
    assert result.launches > torch_launches


def test_an_additional_section_and_metric(tmp_path: Path) -> None:
    protocol = replace(QUICK, metrics=("sm__inst_executed.sum",), sections=("SpeedOfLight",))
    options = CaptureOptions(("ncu",), tmp_path / "runs", protocol)
    capture_into_store(CONFIGS[:1], ["flash"], tmp_path / "s.db", options)
    with open_store(tmp_path / "s.db") as opened:
        rows = opened.kernels("latest")
    assert rows
    for row in rows:
        assert row.metrics["sm__inst_executed.sum"][0] > 0
        assert "sm__throughput.avg.pct_of_peak_sustained_elapsed" in row.metrics


def test_an_unknown_metric_is_reported(tmp_path: Path) -> None:
    protocol = replace(QUICK, metrics=("no__such_metric.sum",))
    options = CaptureOptions(("ncu",), tmp_path / "runs", protocol)
    captured = capture_into_store(CONFIGS[:1], ["flash"], tmp_path / "s.db", options)
    (told,) = [text for result in captured.ingested for text in result.warnings]
    assert "no__such_metric.sum" in told


HANGING = changed_worker(
    'if job.cell == "c0002":\n    run_cell(job, bench, stage)\n    time.sleep(3600)'
)


@pytest.mark.parametrize("name", ["nsys", "ncu"])
def test_a_hanging_cell_costs_itself_and_leaves_no_process(tmp_path: Path, name: str) -> None:
    protocol = replace(QUICK, timeout_s=20)
    results, outcomes = run_changed(tmp_path, CONFIGS[:1] * 3, protocol, HANGING, name, "flash")
    assert statuses(results) == {"c0001": "ok", "c0002": "timeout", "c0003": "ok"}
    assert [trace.cells for trace, _ in outcomes if trace] == [("c0001",), ("c0003",)], outcomes
    assert not find_workers(tmp_path)
    left = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in _read(path)
    ]
    assert not left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
