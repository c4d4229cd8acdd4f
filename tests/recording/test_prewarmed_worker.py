"""A worker that loads torch while the command plans the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from profharness.processes import PrewarmedWorker, has_ended, prewarmed_worker, wait_for
from profharness.recording.supervise import worker_environment
from profharness.run import Protocol

PATIENCE_S = 120
FAST = Protocol(device="cpu", timeout_s=PATIENCE_S)


def test_prewarmed_worker_becomes_the_first_worker(tmp_path: Path) -> None:
    ahead = PrewarmedWorker.start()
    environment = worker_environment(tmp_path, FAST, prewarmed=ahead)
    assert environment["device_type"] == "cpu"
    assert (ahead.used, ahead.group.returncode) == (True, 0)
    assert ahead.group.logs == (tmp_path / "worker.log",)


def test_prewarmed_worker_with_another_environment_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = PrewarmedWorker.start()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert worker_environment(tmp_path, FAST, prewarmed=ahead)["env"]["NVIDIA_TF32_OVERRIDE"] == "0"
    assert (ahead.used, ahead.group.returncode) == (False, -signal.SIGKILL)


def test_ended_prewarmed_worker_is_replaced(tmp_path: Path) -> None:
    ahead = PrewarmedWorker.start()
    os.killpg(ahead.group.pid, signal.SIGKILL)
    assert wait_for(ahead.group, PATIENCE_S)
    assert worker_environment(tmp_path, FAST, prewarmed=ahead)["device_type"] == "cpu"


def test_prewarmed_worker_ends_without_its_parent() -> None:
    ahead = PrewarmedWorker.start()
    ahead.line.close()
    assert wait_for(ahead.group, PATIENCE_S)
    assert has_ended(ahead.group)


def test_torch_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
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
    assert not list((tmp_path / "runs").iterdir())  # there is nothing to resume


def test_unused_worker_is_ended_with_the_block() -> None:
    with prewarmed_worker() as worker:
        assert worker is not None and not has_ended(worker.group)
    assert has_ended(worker.group)


def test_no_worker_is_started_unless_wanted() -> None:
    with prewarmed_worker(wanted=False) as worker:
        assert worker is None
