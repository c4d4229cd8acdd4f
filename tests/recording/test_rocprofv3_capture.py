"""Captures under a stand-in for rocprofv3, which runs the real worker and writes a database in the form
of real ones.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from pathlib import Path

import pytest
from fake_tools import Behaviour, Scenario, install, invocations
from kill_lanes import stand_in
from rocm_make import MARKER, NAME, Rocpd
from waiting import PATIENCE_S

from profharness.attention.config import expand_configs
from profharness.errors import TraceFormatError
from profharness.jobs.into_store import capture_into_store
from profharness.recording.capture import capture
from profharness.recording.profilers import find_tool, installed
from profharness.recording.profilers.base import ToolError, count_rows
from profharness.recording.profilers.rocprofv3 import DISPATCHES
from profharness.run import CaptureOptions, Protocol, Run, read_run
from profharness.store import open_store

QUICK = Protocol(iterations=2, warmup=0, samples=5, timeout_s=PATIENCE_S, device="cpu")
CONFIGS = expand_configs("1,2,{16,32},16")


@pytest.fixture
def database(tmp_path: Path) -> str:
    """Write the database of the stand-in: two calls of c0001 and c0002 with one dispatch each."""
    made = Rocpd()
    for number, cell in enumerate(("c0001", "c0001", "c0002", "c0002"), 1):
        start = 10_000 * number
        made.region(
            MARKER, 12, start, start + 5000, 0, message=f"profharness:{cell}"
        )  # roctxRangeStartA
        made.launch(number, start + 1000)
    return str(made.write(tmp_path / "prepared.db"))


def run_under(out: Path, *, python: Path | None = None) -> tuple[Path, Run]:
    options = CaptureOptions(("rocprofv3",), out, QUICK, python=str(python) if python else None)
    folder = capture(CONFIGS, ["math"], options)
    return folder, read_run(folder)


def test_kernels_of_cells_reach_the_store(tmp_path: Path, tools: Path, database: str) -> None:
    log = install(tools, Scenario(rocprofv3=Behaviour(report_file=database)))
    options = CaptureOptions(("rocprofv3",), tmp_path / "runs", QUICK)
    store = tmp_path / "s.db"
    result = capture_into_store(CONFIGS, ["math"], store, options)
    folder = Path(result.folder)
    run = read_run(folder)
    assert [cell.status for cell in run.cells] == ["ok", "ok"]
    assert [(item.profiler, item.path, item.cells) for item in run.traces] == [
        ("rocprofv3", "rocprofv3-1.db", ("c0001", "c0002"))
    ]
    assert not run.problems
    argv = next(argv for argv in invocations(log) if "--" in argv)
    at = argv.index("--")
    assert argv[at + 1 :] == [
        sys.executable,
        "-P",
        "-m",
        "profharness.recording.worker",
        str(folder),
    ]
    assert {"--kernel-trace", "--marker-trace", "rocpd"} <= set(argv[:at])
    with open_store(store) as opened:
        rows = opened.kernels(run.run)
    assert [(row.kernel, row.config, row.profiler) for row in rows] == [
        (NAME, f"b1-h2-s{length}-d16-fp32", "rocprofv3") for length in (16, 32)
    ]
    # The grid is in blocks: 512 x 128 x 3 threads in workgroups of 256 x 2.
    assert {(row.grid, row.block) for row in rows} == {((2, 64, 3), (256, 2, 1))}
    assert {row.accum_registers_per_thread for row in rows} == {64}


def test_the_database_of_the_worker_is_taken(tmp_path: Path, tools: Path, database: str) -> None:
    """The processes that the worker starts write databases too."""
    other = Rocpd(pid=99)
    target = tmp_path / "other.db"
    other.write(target)
    # A shell around the tool writes the other database beside that of the worker.
    install(tools, Scenario(rocprofv3=Behaviour(report_file=database)))
    real = tools / "rocprofv3"
    real.rename(tools / "rocprofv3.real")
    text = (
        (tools / "rocprofv3.real")
        .read_text()
        .replace("NAME = Path(sys.argv[0]).name", 'NAME = "rocprofv3"')
    )
    (tools / "rocprofv3.real").write_text(text)
    real.write_text(
        "#!/bin/sh\n"
        'folder=; previous=\nfor word in "$@"; do\n'
        '  if [ "$previous" = --output-directory ]; then folder=$word; fi\n  previous=$word\ndone\n'
        f'if [ -n "$folder" ]; then cp {target} "$folder/1_results.db"; fi\n'
        f'exec {tools}/rocprofv3.real "$@"\n'
    )
    real.chmod(0o755)
    folder, run = run_under(tmp_path / "runs", python=stand_in(tmp_path))
    assert not run.problems
    assert count_rows(folder / "rocprofv3-1.db", DISPATCHES, "") == 4


@pytest.mark.parametrize(
    ("behaviour", "code", "text"),
    [
        (
            Behaviour(
                stderr="usage: rocprofv3\nrocprofv3: error: argument -f/--output-format: invalid choice: 'rocpd'\n",
                report="none", run_target=False, returncode=2,
            ),
            "unknown_option",
            "invalid choice: 'rocpd'",
        ),
        (
            Behaviour(stderr="Fatal error: No application provided\n", report="none", returncode=1),
            "tool_crashed",
            "No application provided",
        ),
        (
            Behaviour(
                stderr="Unable to open /dev/kfd read-write: Permission denied\n", report="none",
                returncode=1,
            ),
            "gpu_unavailable",
            "Permission denied",
        ),
        (Behaviour(report="none"), "report_missing", "without writing rocprofv3-1.db"),
        (Behaviour(report="empty"), "report_damaged", "not an SQLite file"),
    ],
)  # fmt: skip
def test_a_failure_is_a_problem_with_a_remedy(
    tmp_path: Path, tools: Path, behaviour: Behaviour, code: str, text: str
) -> None:
    install(tools, Scenario(rocprofv3=behaviour))
    _, run = run_under(tmp_path / "runs", python=stand_in(tmp_path))
    (problem,) = run.problems
    assert (problem.profiler, problem.code) == ("rocprofv3", code)
    assert text in problem.message and problem.remedy
    assert run.traces == ()


def test_a_database_without_kernels_is_a_problem(tmp_path: Path, tools: Path) -> None:
    empty = str(Rocpd().write(tmp_path / "empty.db"))
    install(tools, Scenario(rocprofv3=Behaviour(report_file=empty)))
    _, run = run_under(tmp_path / "runs", python=stand_in(tmp_path))
    assert [problem.code for problem in run.problems] == ["no_kernels"]


@pytest.mark.usefixtures("tools")
def test_a_missing_tool_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ToolError, match=r"rocprofv3 was not found .* AMD's installers; install ROCm"
    ):
        run_under(tmp_path / "runs")


def test_the_tool_and_its_version_are_found(tmp_path: Path, tools: Path) -> None:
    install(tools, Scenario())
    tool = find_tool("rocprofv3")
    assert tool is not None
    assert (tool.version, tool.on_path) == ("1.0.0", True)
    for version in ("6.4.1", "7.0.2"):
        path = tmp_path / f"root/opt/rocm-{version}/bin/rocprofv3"
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    assert "rocm-7.0.2" in str(installed("rocprofv3", tmp_path / "root")[0])


def test_rows_are_counted_in_all_tables_of_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        for name in ("a_1", "a_2", "b"):
            db.execute(f'CREATE TABLE "{name}" (x)')
            db.execute(f'INSERT INTO "{name}" VALUES (1)')
    assert count_rows(path, "a_*", "x") == 2
    assert count_rows(path, "c*", "x") == 0
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(TraceFormatError, match="cut off"):
        count_rows(path, "a_*", "x")
