"""A worker that loads torch before it is known what it has to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from profharness.cli import main
from profharness.processes import Forerunner, forerunners, has_ended, wait_for
from profharness.run import Protocol, read_run
from profharness.runner.supervise import worker_environment

PATIENCE_S = 120
FAST = Protocol(device="cpu", timeout_s=PATIENCE_S)


def waiting() -> Forerunner:
    forerunners.append(Forerunner.start())
    return forerunners[0]


def test_the_first_worker_is_the_one_that_waits(tmp_path: Path) -> None:
    ahead = waiting()
    environment = worker_environment(tmp_path, FAST)
    assert environment["device_type"] == "cpu"
    assert (forerunners, ahead.group.returncode) == ([], 0)
    assert ahead.group.logs == (tmp_path / "worker.log",)


def test_one_of_another_environment_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = waiting()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert worker_environment(tmp_path, FAST)["env"]["NVIDIA_TF32_OVERRIDE"] == "0"
    assert (forerunners, ahead.group.returncode) == ([], -signal.SIGKILL)


def test_one_that_has_ended_is_replaced(tmp_path: Path) -> None:
    ahead = waiting()
    os.killpg(ahead.group.pid, signal.SIGKILL)
    assert wait_for(ahead.group, PATIENCE_S)
    assert worker_environment(tmp_path, FAST)["device_type"] == "cpu"


def test_without_a_parent_it_ends() -> None:
    ahead = Forerunner.start()
    ahead.line.close()
    assert wait_for(ahead.group, PATIENCE_S)
    assert has_ended(ahead.group)


def test_a_torch_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libfoo.so is missing')\n")
    argv = [sys.executable, "-P", "-m", "profharness", "capture", "--config", "1,1,8,8"]
    argv += ["--device", "cpu", "--out", str(tmp_path / "runs"), "--store", str(tmp_path / "s.db")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "libfoo.so is missing" in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_run(folder).cells[0].status == "pending"


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("capture", True),
        ("capture --config 2,8,512,64 --backend flash", True),
        ("capture --help", False),
        ("capture --python=old/bin/python", False),
        ("capture --resume latest", False),
        ("capture --profiler nsys", False),
        ("kernels", False),
        ("", False),
    ],
)
def test_only_a_capture_in_this_python_starts_one(line: str, *, starts: bool) -> None:
    assert main._starts_worker(line.split()) is starts
