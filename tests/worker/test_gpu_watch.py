"""Other users of a GPU and changing power caps, with a simulated NVML in real processes."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from profharness.attention.config import parse_config
from profharness.files import open_lock_file
from profharness.recording.supervise import RunRecord, Step
from profharness.recording.worker import gpu_watch
from profharness.recording.worker.gpu_watch import is_shared
from profharness.run import GPU, Cell, JournalEntry, Problem, Protocol, Run, read_run

# The part of NVML that the watch uses. Its values come from a file. A null means "not supported".
NVML = """
import json, os
from types import SimpleNamespace
NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
def state(key):
    with open(os.environ["NVML_STATE"]) as file:
        value = json.load(file)[key]
    if value is None:
        raise RuntimeError("Not Supported")
    return value
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetComputeRunningProcesses(handle):
    pids = state("pids")[handle]
    return [SimpleNamespace(pid=os.getpid() if pid == "self" else pid) for pid in pids]
def nvmlDeviceGetEnforcedPowerLimit(handle): return state("power")
def nvmlDeviceGetMaxClockInfo(handle, kind): return state("clocks")[kind - 1]
def nvmlDeviceGetApplicationsClock(handle, kind): return state("application")
def nvmlDeviceGetCurrentClocksThrottleReasons(handle): return state("reasons")
class NotFound(Exception):
    value = 6
def nvmlDeviceGetProcessUtilization(handle, since):
    keys = ("pid", "smUtil", "timeStamp")
    samples = [SimpleNamespace(**dict(zip(keys, sample))) for sample in state("samples")]
    newer = [sample for sample in samples if sample.timeStamp > since]
    for sample in newer:
        sample.pid = os.getpid() if sample.pid == "self" else sample.pid
    if not newer:
        raise NotFound
    return newer
def nvmlDeviceGetUtilizationRates(handle): return SimpleNamespace(gpu=state("gpu"))
"""
# Opens the watch, starts it at the first line of stdin, and prints its findings at each further line.
WATCHER = """
import os, sys
from pathlib import Path
from profharness.recording.worker.gpu_watch import open_watch
watch = open_watch()
print("opened", flush=True)
for number, line in enumerate(sys.stdin):
    if number == 0:
        print(watch.begin("GPU-1", os.getppid(), Path(sys.argv[1])), flush=True)
    else:
        print([[each.code, each.message] for each in watch.problems(at_once=True)], flush=True)
"""
QUIET = {
    "pids": [[], []],
    "power": 700_000,
    "clocks": [1980, 2619],
    "application": None,
    "reasons": 0x4,  # the usual power cap is no slowdown
    "samples": None,  # pid, SM utilization in percent, time stamp
    "gpu": None,
}


class Watcher:
    """A process that watches GPU-1. Its NVML returns the values of the last `says`."""

    def __init__(self, folder: Path, name: str, **changes: Any) -> None:
        self.state = folder / f"{name}.json"
        self.says(**changes)
        (folder / "pynvml.py").write_text(NVML)
        self.process = subprocess.Popen(
            [sys.executable, "-c", WATCHER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(folder), "NVML_STATE": str(self.state)},
        )
        assert self._line() == "opened"

    def says(self, **changes: Any) -> None:
        self.state.write_text(json.dumps(QUIET | changes))

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._line()


@contextmanager
def watcher(folder: Path, name: str = "a", **changes: Any) -> Iterator[Watcher]:
    made = Watcher(folder, name, **changes)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def test_an_exclusive_gpu_has_no_warning(tmp_path: Path) -> None:
    with watcher(tmp_path) as mine:
        mine.says(pids=[[7], ["self", 4242]])  # 4242: this process's id outside of its container
        assert mine.ask() == "True"
        assert mine.ask() == "[]"


def test_another_process_is_reported_once(tmp_path: Path) -> None:
    with watcher(tmp_path) as mine:
        assert mine.ask() == "True"
        mine.says(pids=[[7], ["self", 111]])
        assert "another process (PID 111 according to the driver)" in mine.ask()
        assert mine.ask() == "[]"


def test_an_earlier_process_is_reported(tmp_path: Path) -> None:
    with watcher(tmp_path, pids=[[], [222]]) as mine:
        mine.says(pids=[[], [222, "self"]])
        assert mine.ask() == "True"
        assert "another process (PID 222" in mine.ask()


@pytest.mark.parametrize("samples", [None, [], [["self", 90, 5]]])
def test_a_process_that_waits_for_this_one_is_not_reported(tmp_path: Path, samples: Any) -> None:
    """For example, a program that has used torch.cuda and then calls profharness."""
    waiting = [os.getpid(), os.getppid()]
    with watcher(tmp_path, pids=[[], waiting]) as mine:
        mine.says(pids=[[], [*waiting, "self"]], samples=samples, gpu=50)
        assert mine.ask() == "True"
        assert mine.ask() == "[]"


@pytest.mark.parametrize(
    ("samples", "gpu", "told"),
    [
        ([["self", 90, 5]], 90, False),  # 111 only has a context
        ([["self", 90, 5], [111, 0, 5]], 90, False),
        ([["self", 90, 5], [111, 50, 3]], 90, False),  # before the watch started
        ([["self", 90, 5], [111, 1, 5]], 90, True),
        ([[111, 1, 5]], 1, True),
        ([], 0, False),
        ([], 40, True),  # the driver does not report the process
        ([[645400, 90, 5]], 90, True),  # nor whose number that is
        (None, None, True),
    ],
)
def test_another_process_is_reported_if_it_computes(
    tmp_path: Path, samples: Any, gpu: int | None, told: bool
) -> None:
    with watcher(tmp_path, pids=[[], [111]]) as mine:
        pids = [[], [111, "self"]]
        mine.says(pids=pids, samples=[[111, 50, 3]])
        assert mine.ask() == "True"
        mine.says(pids=pids, samples=samples, gpu=gpu)
        assert ("another process (PID 111" in mine.ask()) is told


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"power": 500_000}, "the GPU's power limit changed from 700 W to 500 W"),
        ({"clocks": [1200, 2619]}, "the GPU's highest SM clock changed from 1980 MHz to 1200"),
        ({"reasons": 0x44}, "the GPU's throttling due to heat or power changed from off to on"),
    ],
)
def test_a_changing_cap_is_reported(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    with watcher(tmp_path) as mine:
        mine.ask()
        assert mine.ask() == "[]"
        mine.says(**change)
        answer = mine.ask()
        assert "gpu_capped" in answer
        assert text in answer
        assert mine.ask() == "[]"


def test_two_measuring_processes_on_one_gpu_are_both_warned_until_one_dies(tmp_path: Path) -> None:
    with watcher(tmp_path, "a") as first:
        assert first.ask() == "True"
        assert first.ask() == "[]"
        with watcher(tmp_path, "b") as second:
            assert second.ask() == "True"
            assert "another profharness process is measuring on this GPU" in second.ask()
            assert "another profharness process is measuring on this GPU" in first.ask()
        with watcher(tmp_path, "c") as third:
            first.process.kill()
            first.process.wait()
            third.ask()
            assert third.ask() == "[]"


def test_a_lock_that_cannot_be_created_has_no_warning(tmp_path: Path) -> None:
    assert is_shared(open_lock_file(tmp_path / "none" / "lock")) is False
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    assert is_shared(open_lock_file(tmp_path / "lock")) is False
    assert not (tmp_path / "elsewhere").exists()


def test_a_driver_without_answers_causes_no_error(tmp_path: Path) -> None:
    with watcher(tmp_path) as mine:
        mine.says(**dict.fromkeys(QUIET))
        assert mine.ask() == "True"
        assert mine.ask() == "[]"


def test_a_disturbance_gives_one_lasting_warning_and_fails_no_cell(tmp_path: Path) -> None:
    cells = (Cell("c0001", parse_config("1,1,8,8,fp32"), "math"),)
    run = Run("r", "2026-01-01T00:00:00+00:00", ("torch",), Protocol(), cells)
    steps: list[Step] = []
    record = RunRecord(tmp_path, run, steps.append)
    problem = Problem(GPU, "gpu_shared", "somebody is here", "wait")
    for _ in range(2):
        record.add_entry(JournalEntry("problem", problem=problem))
    record.explain_pending()
    assert [step.notice for step in steps] == ["warning: somebody is here; wait [gpu_shared]"]
    kept = read_run(tmp_path)
    assert kept.problems == (problem,)
    assert kept.cells[0].message is None
    assert RunRecord(tmp_path, kept).problems == [problem]  # a disturbed cell remains disturbed


def test_without_a_driver_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """No watch, no context and no error. torch finds out itself."""

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setattr(gpu_watch, "open_watch", lambda: None)
    assert gpu_watch.open_context() is False
    assert gpu_watch.CudaWarmup().watch() is None
    # the recorded environment is the user's
    assert gpu_watch.MODULE_LOADING not in os.environ


def test_a_torch_without_cuda_gets_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []
    monkeypatch.setattr(gpu_watch, "open_watch", lambda: None)
    monkeypatch.setattr(gpu_watch, "open_context", lambda: opened.append(True))
    for has in (False, True):
        monkeypatch.setattr(gpu_watch, "torch_has_cuda", lambda has=has: has)
        gpu_watch.CudaWarmup().watch()
    assert opened == [True]
