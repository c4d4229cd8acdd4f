"""Captures under fake nsys and ncu, which run the real worker, or a quick one if only the tool
matters.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from changed_workers import changed_worker, run_changed, statuses
from fake_tools import Behaviour, Scenario, install, invocations
from kill_lanes import stand_in
from nsys_make import Maker, unpacked
from waiting import HANG, PATIENCE_S

from profharness.attention.config import expand_configs
from profharness.errors import CaptureError, UsageError
from profharness.jobs.into_store import capture_into_store, resume_into_store
from profharness.recording.capture import capture, resume
from profharness.recording.profilers import PROFILERS
from profharness.recording.profilers.base import ToolError
from profharness.recording.supervise import LOG_FILE, RunRecord
from profharness.run import (
    CaptureOptions,
    Cell,
    JournalEntry,
    Protocol,
    Run,
    TraceFile,
    read_run,
    write_run,
)
from profharness.store import ingest_path, open_store

QUICK = Protocol(iterations=2, warmup=0, samples=5, timeout_s=PATIENCE_S, device="cpu")
CONFIGS = expand_configs("1,2,{16,32},16")
NO_IMPORTER = Behaviour(
    stderr="Importer error status: The importer binary and its dependencies were not found.\n",
    report="none",
)


@pytest.fixture
def export(tmp_path: Path) -> str:
    """Write the export of the fake nsys: two calls of c0001 with one launch each."""
    maker = Maker()
    maker.gpu()
    for call in (1000, 9000):
        maker.nvtx("profharness:c0001", call, call + 5000)
        maker.launch(call + 100)
    return str(maker.write(tmp_path / "prepared.sqlite"))


def run_under(out: Path, *profilers: str, python: Path | None = None) -> tuple[Path, Run]:
    options = CaptureOptions(profilers, out, QUICK, python=str(python) if python else None)
    folder = capture(CONFIGS, ["math"], options)
    return folder, read_run(folder)


def test_capture_under_nsys(tmp_path: Path, tools: Path, export: str) -> None:
    log = install(tools, Scenario(export=Behaviour(report_file=export)))
    folder, run = run_under(tmp_path / "runs", "nsys")
    assert [(cell.status, cell.samples) for cell in run.cells] == [("ok", {}), ("ok", {})]
    assert [(item.path, item.cells) for item in run.traces] == [
        ("nsys-1.sqlite", ("c0001", "c0002"))
    ]
    assert not run.problems
    assert sorted(path.name for path in folder.iterdir()) == [
        "nsys-1.nsys-rep",
        "nsys-1.sqlite",
        "run.json",
    ]
    profile = next(argv for argv in invocations(log) if argv[1] == "profile")
    worker = [sys.executable, "-P", "-m", "profharness.recording.worker", str(folder)]
    assert profile[-6:] == [f"--output={folder / 'nsys-1.nsys-rep'}", *worker]


def test_three_profilers_cover_the_cells_that_run(tmp_path: Path, tools: Path, export: str) -> None:
    log = install(tools, Scenario(export=Behaviour(report_file=export)))
    options = CaptureOptions(("torch", "nsys", "ncu"), tmp_path / "runs", QUICK)
    folder = capture(CONFIGS, ["math", "cudnn"], options)
    run = read_run(folder)
    assert run.profilers == ("torch", "nsys", "ncu")
    assert [cell.status for cell in run.cells] == ["ok", "refused"] * 2
    assert all(len(cell.samples["wall"]) == 5 for cell in run.cells[::2])
    assert [item.path for item in run.traces] == [
        *("c0001.torch.json.gz", "c0003.torch.json.gz", "nsys-1.sqlite", "ncu-1.ncu-rep")
    ]
    assert run.traces[2].cells == run.traces[3].cells == ("c0001", "c0003")
    argv = next(argv for argv in invocations(log) if argv[0].endswith("ncu") and "-o" in argv)
    assert argv[-5:] == [sys.executable, "-P", "-m", "profharness.recording.worker", str(folder)]
    assert argv[argv.index("--clock-control") + 1] == "none"
    assert argv[argv.index("-o") + 1] == str(folder / "ncu-1.ncu-rep")


def test_failing_tool_is_a_problem_that_resume_fixes(
    tmp_path: Path, tools: Path, export: str
) -> None:
    install(tools, Scenario(nsys=NO_IMPORTER))
    folder, run = run_under(tmp_path / "runs", "torch", "nsys", python=stand_in(tmp_path))
    assert [cell.status for cell in run.cells] == ["ok", "ok"]
    assert [item.profiler for item in run.traces] == ["torch", "torch"]
    (problem,) = run.problems
    assert problem.profiler == "nsys"
    assert problem.code == "importer_missing"
    assert problem.remedy
    install(tools, Scenario(export=Behaviour(report_file=export)))
    resumed = resume(folder).run
    assert not resumed.problems
    assert resumed.traces[-1].path == "nsys-1.sqlite"
    assert resumed.traces[-1].cells == ("c0001", "c0002")
    assert resumed.cells == run.cells


def test_export_without_kernels_is_a_problem(tmp_path: Path, tools: Path) -> None:
    empty = str(Maker().write(tmp_path / "empty.sqlite"))
    install(tools, Scenario(export=Behaviour(report_file=empty)))
    _, run = run_under(tmp_path / "runs", "nsys", python=stand_in(tmp_path))
    assert [problem.code for problem in run.problems] == ["no_cuda_events"]


def test_ncu_without_permission_is_reported_with_a_remedy(tmp_path: Path, tools: Path) -> None:
    text = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n"
    ncu = Behaviour(stdout=text + "==WARNING== No kernels were profiled.\n", report="none")
    install(tools, Scenario(ncu=replace(ncu, returncode=1)))
    _, run = run_under(tmp_path / "runs", "ncu", python=stand_in(tmp_path))
    (problem,) = run.problems
    assert problem.code == "counters_forbidden"
    assert "NVreg_RestrictProfilingToAdminUsers" in problem.remedy


@pytest.mark.usefixtures("tools")
def test_missing_tool_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"nsys.*tool_missing"):
        run_under(tmp_path / "runs", "torch", "nsys")
    assert not (tmp_path / "runs").exists()


def capture_argv(folder: Path, profilers: str) -> list[str]:
    return [
        *(sys.executable, "-m", "profharness", "capture", "--config", "1,2,16,16"),
        *("--backend", "math", "--profiler", profilers, "--device", "cpu"),
        *("--out", str(folder / "runs"), "--store", str(folder / "s.db")),
    ]


def test_command_keeps_other_results_and_exits_1(tmp_path: Path, tools: Path) -> None:
    install(tools, Scenario(nsys=NO_IMPORTER))
    done = subprocess.run(
        capture_argv(tmp_path, "torch,nsys"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "1 cell ran" in done.stdout
    assert "[importer_missing]" in done.stderr
    assert "remedy:" in done.stderr
    assert "Traceback" not in done.stderr


def damaged(tmp_path: Path, profiler: str, damage: str) -> Scenario:
    """Return tools, one of which leaves a report that is garbage or truncated."""
    name = "nsys_h200.sqlite.gz" if profiler == "nsys" else "ncu_h200.ncu-rep.gz"
    path = unpacked(name, tmp_path)
    data = path.read_bytes()
    garbage = b"SQLite format 3\0" + bytes(84) if profiler == "nsys" else b"garbage"
    path.write_bytes(garbage if damage == "garbage" else data[: len(data) // 2])
    behaviour = Behaviour(report_file=str(path))
    return Scenario(export=behaviour) if profiler == "nsys" else Scenario(ncu=behaviour)


@pytest.mark.parametrize("profiler", ["nsys", "ncu"])
def test_damaged_report_is_a_problem_and_the_rest_is_stored(
    tmp_path: Path, tools: Path, export: str, profiler: str
) -> None:
    install(tools, damaged(tmp_path, profiler, "garbage"))
    python = str(stand_in(tmp_path))
    options = CaptureOptions(("torch", profiler), tmp_path / "runs", QUICK, python=python)
    captured = capture_into_store(CONFIGS[:1], ["math"], tmp_path / "s.db", options)
    assert [(result.status, result.warnings) for result in captured.ingested] == [("new", ())]
    folder = captured.folder
    install(tools, damaged(tmp_path, profiler, "cut off"))
    for each in (captured, resume_into_store(folder, tmp_path / "s.db")):
        (problem,) = each.run.problems
        assert (problem.profiler, problem.code) == (profiler, "report_damaged")
        assert problem.remedy
        assert [item.profiler for item in each.run.traces] == ["torch"]
        with open_store(tmp_path / "s.db") as store:
            assert {row.profiler for row in store.kernels()} == {"torch"}
    ncu = unpacked("ncu_h200.ncu-rep.gz", tmp_path)
    whole = Scenario(ncu=Behaviour(report_file=str(ncu)), export=Behaviour(report_file=export))
    install(tools, whole)
    resumed = resume(folder).run
    assert not resumed.problems
    assert [item.profiler for item in resumed.traces] == ["torch", profiler]


def test_old_run_with_a_damaged_report_is_ingested(tmp_path: Path, tools: Path) -> None:
    """Folders of older versions list the damaged report as a trace."""
    install(tools, Scenario())
    folder, run = run_under(tmp_path / "runs", "torch", python=stand_in(tmp_path))
    (folder / "ncu-1.ncu-rep").write_bytes(b"garbage")
    cells = tuple(cell.cell for cell in run.cells)
    traces = (*run.traces, TraceFile("ncu", "ncu-1.ncu-rep", cells))
    write_run(folder, replace(run, profilers=("torch", "ncu"), traces=traces))
    with pytest.raises(UsageError, match="is finished"):
        resume_into_store(folder, tmp_path / "s.db")
    (result,) = ingest_path(tmp_path / "s.db", folder)
    assert result.launches > 0
    assert [text for text in result.warnings if "ncu-1.ncu-rep" in text]


def test_killed_tool_explains_why_its_cells_did_not_run(tmp_path: Path, tools: Path) -> None:
    install(tools, Scenario(nsys=Behaviour(kill_self=True)))
    done = subprocess.run(
        capture_argv(tmp_path, "nsys"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("pending:")]
    assert "math: did not run: nsys: nsys was killed" in line
    assert "[killed]" in line
    folder = next((tmp_path / "runs").iterdir())
    (cell,) = read_run(folder).cells
    assert "SIGKILL" in str(cell.message)
    empty = Maker()
    empty.gpu()
    install(tools, Scenario(export=Behaviour(report_file=str(empty.write(tmp_path / "e.sqlite")))))
    (cell,) = resume(folder).run.cells
    assert (cell.status, cell.message) == ("ok", None)


def test_each_failed_status_has_its_own_remedy(tmp_path: Path) -> None:
    cells = [Cell(f"c000{n}", CONFIGS[0], "math", "ok") for n in range(4)]
    run = Run("r", "", ("torch", "nsys"), QUICK, tuple(cells))
    record = RunRecord(tmp_path, run)
    record.begin_pass(PROFILERS["nsys"])
    for cell, status in zip(cells, ("crashed", "error", "oom", "timeout"), strict=True):
        record.add_entry(JournalEntry("end", cell=cell.cell, result=replace(cell, status=status)))
    remedies = {problem.code: problem.remedy for problem in record.problems}
    assert len(set(remedies.values())) == 4
    assert [code for code, remedy in remedies.items() if "--timeout" in remedy] == ["cell_timeout"]
    assert "memory" in remedies["cell_oom"]


CRASHING = changed_worker(
    "if bench.plan.wrapped: os._exit(3)\n"
    "sys.stderr.write('words of the first pass\\n'); sys.stderr.flush()"
)


def test_quoted_output_is_that_of_the_process_that_died(tmp_path: Path, tools: Path) -> None:
    install(tools, Scenario())
    folder = tmp_path / "run"
    (first, _), (second, _) = (
        run_changed(folder, CONFIGS[:1], QUICK, CRASHING, profiler)
        for profiler in ("events", "nsys")
    )
    assert "words of the first pass" in (folder / LOG_FILE).read_text()
    assert first["c0001"].message is None
    message = str(second["c0001"].message)
    assert "exit code 3" in message and "first pass" not in message


HANGING = changed_worker(f"if job.config.seq_len_q == 16: {HANG}")


def workers(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line, state = (path / "cmdline").read_bytes(), (path / "stat").read_text().split()[2]
        except OSError:
            continue
        if str(folder).encode() in line and state != "Z":
            found.append(int(path.name))
    return found


@pytest.mark.usefixtures("hanging")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hanging_cell_leaves_a_report_and_no_process(
    tmp_path: Path, tools: Path, export: str
) -> None:
    install(tools, Scenario(export=Behaviour(report_file=export)))
    results, outcomes = run_changed(tmp_path / "run", CONFIGS, QUICK, HANGING, "nsys")
    assert statuses(results) == {"c0001": "timeout", "c0002": "ok"}
    traces = [trace.path for trace, _ in outcomes if trace]
    assert traces == ["nsys-1.sqlite", "nsys-2.sqlite"]
    assert not workers(tmp_path)


@pytest.mark.usefixtures("hanging")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tool_that_ignores_all_signals_leaves_no_process(tmp_path: Path, tools: Path) -> None:
    install(tools, Scenario(nsys=Behaviour(hang=True, ignore_signals=True, report="none")))
    results, outcomes = run_changed(
        tmp_path / "run", CONFIGS, QUICK, HANGING, "nsys", grace_s=(0.5, 0.5, 0.5)
    )
    assert statuses(results) == {"c0001": "timeout", "c0002": "ok"}
    assert all(problem and not trace for trace, problem in outcomes)
    assert not workers(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_tool_leaves_no_worker(tmp_path: Path, tools: Path) -> None:
    install(tools, Scenario(nsys=Behaviour(kill_self=True)))
    with pytest.raises(CaptureError, match="SIGKILL"):
        run_changed(tmp_path / "run", CONFIGS, QUICK, HANGING, "nsys")
    assert not workers(tmp_path)
