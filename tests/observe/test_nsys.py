"""`observe --profiler nsys`: the window opens and closes by the calls that nsys waits for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fake_tools import Behaviour, Scenario, install, invocations
from programs import observe, write

EXPORT = Path(__file__).parents[2] / "traces" / "h200-torch-nsys-ncu" / "nsys-1.sqlite"
# in place of the calls of a GPU's driver, which here is none
CALLS = """
import types
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


def test_the_steps_of_the_window_lie_between_its_calls(tmp_path: Path) -> None:
    log = install(tmp_path / "bin", Scenario(export=Behaviour(report_file=str(EXPORT))))
    program = write(tmp_path, CALLS)
    tool = tmp_path / "bin" / "nsys"
    seen = observe(tmp_path, program, options=OPTIONS, environment={"PROFHARNESS_NSYS": str(tool)})
    assert seen.code == 0, seen.stderr
    steps = [line for n in range(2) for line in (f"ProfilerStep#{n}", *CALLED, "pop")]
    assert seen.stdout.splitlines() == ["start", *steps, "stop"]
    assert [trace["profiler"] for trace in seen.record["traces"]] == ["nsys"]
    argv = next(argv for argv in invocations(log) if argv[1] == "profile")
    assert seen.folder is not None
    report = seen.folder.relative_to(tmp_path) / "nsys-1.nsys-rep"
    assert argv == [
        str(tool),
        "profile",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=node",
        "--wait=primary",
        "--force-overwrite=true",
        f"--output={report}",
        sys.executable,
        str(program),
    ]


def test_a_missing_nsys_is_told_before_the_program_starts(tmp_path: Path) -> None:
    program = write(tmp_path, "open('started', 'w').close()")
    missing = {"PROFHARNESS_NSYS": os.fspath(tmp_path / "nsys")}
    seen = observe(tmp_path, program, options=OPTIONS, environment=missing)
    assert seen.code == 1
    assert "which is not an executable file" in seen.stderr
    assert not (tmp_path / "started").exists()
    assert seen.folder is None
