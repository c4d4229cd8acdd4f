"""`observe --profiler nsys`: the window opens and closes with the calls that nsys waits for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from fake_tools import Behaviour, Scenario, environments, install, invocations
from programs import observe, run_unobserved, write

EXPORT = Path(__file__).parents[2] / "traces" / "h200-torch-nsys-ncu" / "nsys-1.sqlite"
# replaces the calls of a GPU's driver, which this machine lacks
CALLS = """
import contextlib, types

@contextlib.contextmanager
def ops(record_shapes):
    print("ops", record_shapes)
    yield
    print("no ops")

torch.autograd.profiler.emit_nvtx = ops
torch.cuda.profiler.start = lambda: print("start")
torch.cuda.profiler.stop = lambda: print("stop")
torch.cuda.nvtx._nvtx = types.SimpleNamespace(rangePushA=print, rangePop=lambda: print("pop"))
train(5)
"""
OPTIONS = ("--profiler", "nsys", "--steps", "2", "--warmup", "1")
CALLED = [
    "profharness-attention:layers.0.attn",
    "pop",
    "profharness-attention:layers.1.attn",
    "pop",
]


def test_the_steps_of_the_window_are_between_its_calls(tmp_path: Path) -> None:
    log = install(tmp_path / "bin", Scenario(export=Behaviour(report_file=str(EXPORT))))
    program = write(tmp_path, CALLS)
    tool = tmp_path / "bin" / "nsys"
    environment = {"PROFHARNESS_NSYS": str(tool), "TMPDIR": None, "LC_ALL": None}
    seen = observe(tmp_path, program, options=OPTIONS, environment=environment)
    assert seen.code == 0, seen.stderr
    steps = [line for n in range(2) for line in (f"ProfilerStep#{n}", *CALLED, "pop")]
    assert seen.stdout.splitlines() == ["start", "ops True", *steps, "stop", "no ops"]
    assert [trace["profiler"] for trace in seen.record["traces"]] == ["nsys"]
    argv = next(argv for argv in invocations(log) if argv[1] == "profile")
    assert seen.folder is not None
    report = seen.folder.relative_to(tmp_path) / "nsys-1.nsys-rep"
    assert argv[2:4] == ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    assert argv[-8:-2] == [f"--output={report}", "env", "-u", "TMPDIR", "-u", "LC_ALL"]
    assert argv[-2:] == [sys.executable, str(program)]


@pytest.mark.parametrize("own", [{"TMPDIR": "/my place", "LC_ALL": "C.UTF-8"}, {}])
def test_the_program_keeps_its_own_nsys_options(own: dict[str, str], tmp_path: Path) -> None:
    log = install(tmp_path / "bin", Scenario(export=Behaviour(report_file=str(EXPORT))))
    names = ["TMPDIR", "LC_ALL"]
    body = f"import os\nprint({{n: os.environ[n] for n in {names} if n in os.environ}})\n{CALLS}"
    tool = {"PROFHARNESS_NSYS": str(tmp_path / "bin" / "nsys")}
    unset = dict.fromkeys(names)
    seen = observe(
        tmp_path, write(tmp_path, body), options=OPTIONS, environment={**unset, **own, **tool}
    )
    assert seen.stdout.splitlines()[0] == str(own), seen.stderr
    told = next(
        environment
        for argv, environment in zip(invocations(log), environments(log), strict=True)
        if argv[1] == "profile"
    )
    assert "profharness-nsys-" in told["TMPDIR"] and told["LC_ALL"] == "C"
    assert not Path(told["TMPDIR"]).exists()


def test_a_missing_program_is_reported_as_without_nsys(tmp_path: Path) -> None:
    install(tmp_path / "bin", Scenario())
    command = ("-m", "profharness", "observe", "--profiler", "nsys", "--", "./no")
    tool = str(tmp_path / "bin" / "nsys")
    done = run_unobserved(*command, folder=tmp_path, PROFHARNESS_NSYS=tool)
    assert done.returncode == 1
    assert done.stderr == "error: ./no: cannot be started: No such file or directory\n"


def test_a_missing_nsys_is_reported_before_the_program_starts(tmp_path: Path) -> None:
    program = write(tmp_path, "open('started', 'w').close()")
    missing = {"PROFHARNESS_NSYS": os.fspath(tmp_path / "nsys")}
    seen = observe(tmp_path, program, options=OPTIONS, environment=missing)
    assert seen.code == 1
    assert "which is not an executable file" in seen.stderr
    assert not (tmp_path / "started").exists()
    assert seen.folder is None
