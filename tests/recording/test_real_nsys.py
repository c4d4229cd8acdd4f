"""Captures under the real nsys, if installed. Without a GPU it sees no CUDA work."""

from __future__ import annotations

from pathlib import Path

import pytest
from changed_workers import changed_worker, run_changed, statuses
from waiting import HANG, PATIENCE_S

from profharness.attention.config import expand_configs
from profharness.processes import find_workers
from profharness.recording.capture import capture
from profharness.recording.profilers import (
    find_tool,
    require_tool,
)
from profharness.recording.profilers.base import ToolError
from profharness.recording.profilers.nsys import export_report
from profharness.run import CaptureOptions, Protocol, Run, read_run
from profharness.traces import open_trace

pytestmark = [
    pytest.mark.nsys,
    pytest.mark.skipif(find_tool("nsys") is None, reason="Nsight Systems is not installed"),
]

QUICK = Protocol(iterations=2, warmup=0, samples=5, timeout_s=PATIENCE_S, device="cpu")
CONFIGS = expand_configs("1,2,{16,32},16")
HANGING = changed_worker(f"if job.config.seq_len_q == 16: {HANG}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Capture once under torch and nsys on the CPU."""
    options = CaptureOptions(("torch", "nsys"), tmp_path_factory.mktemp("runs"), QUICK)
    folder = capture(CONFIGS, ["math"], options)
    return folder, read_run(folder)


def test_run_on_the_cpu_has_a_report_and_the_problem_no_cuda_events(run: tuple[Path, Run]) -> None:
    folder, record = run
    assert [cell.status for cell in record.cells] == ["ok", "ok"]
    assert [problem.code for problem in record.problems] == ["no_cuda_events"]
    assert {path.suffix for path in folder.glob("nsys-1.*")} == {".nsys-rep", ".sqlite"}


@pytest.mark.parametrize("name", ["nsys-1.sqlite", "nsys-1.nsys-rep"])
def test_report_and_export_can_be_ingested(
    run: tuple[Path, Run], tmp_path: Path, name: str
) -> None:
    alone = tmp_path / name
    alone.write_bytes((run[0] / name).read_bytes())
    trace = open_trace(alone)
    assert trace.profiler == "nsys"
    assert trace.num_launches == 0
    assert trace.warnings
    trace.close()


def test_garbage_is_refused_as_a_report(tmp_path: Path) -> None:
    (tmp_path / "a.nsys-rep").write_bytes(b"no report at all" * 100)
    with pytest.raises(ToolError) as caught:
        export_report(tmp_path / "a.nsys-rep", tmp_path / "a.sqlite", require_tool("nsys").path)
    assert caught.value.problem.remedy
    assert [path.name for path in tmp_path.iterdir()] == ["a.nsys-rep"]


@pytest.mark.usefixtures("hanging")
def test_hanging_cell_leaves_no_process(tmp_path: Path) -> None:
    results, _ = run_changed(tmp_path, CONFIGS, QUICK, HANGING, "nsys")
    assert statuses(results) == {"c0001": "timeout", "c0002": "ok"}
    assert not find_workers(tmp_path)
    assert len(list(tmp_path.glob("*.nsys-rep"))) == 2
