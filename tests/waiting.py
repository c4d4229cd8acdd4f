"""Waiting for events instead of moments, so that a busy machine changes no test's answer."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 600.0  # before a test gives up on what comes in a second where nothing else runs
LEAP_S = 1e6
KILL_BIT = 1 << signal.SIGKILL - 1
MARK = "PROFHARNESS_TEST_HANGS"
# What a process runs that is never to answer again; see the fixture `hanging`.
HANG = f'open(os.environ["{MARK}"], "w").write(str(os.getpid())); time.sleep(86400)'


def until(happened: Callable[[], Any], process: subprocess.Popen[Any] | None = None) -> None:
    """Wait until something has happened; fails when the process that is to do it ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs: it has neither ended, waited for or not, nor been killed."""
    folder = Path(f"/proc/{pid}")
    try:
        status, command = (folder / "status").read_text(), (folder / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    pending = re.findall(r"(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", status)
    return bool(command) and not any(int(bits, 16) & KILL_BIT for bits in pending)


def written_pid(path: Path) -> int | None:
    """The process id in a file, None while there is none."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text else None


class Clock:
    """`time`, except that monotonic() leaps ahead with every call while the process whose id stands
    in the mark lives: only what hangs meets its limit, however long the others take.
    """

    def __init__(self, mark: Path) -> None:
        self._mark = mark
        self._ahead_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        pid = written_pid(self._mark)
        if pid is not None and alive(pid):
            self._ahead_s += LEAP_S
        return time.monotonic() + self._ahead_s


def start_limits_with(monkeypatch: Any, started: Callable[[], Any]) -> None:
    """Let the time limits of subprocess begin once something has started."""
    for name in ("wait", "communicate"):
        monkeypatch.setattr(
            subprocess.Popen, name, _later(getattr(subprocess.Popen, name), started)
        )


def _later(real: Callable[..., Any], started: Callable[[], Any]) -> Callable[..., Any]:
    def wait(process: subprocess.Popen[Any], *arguments: Any, **named: Any) -> Any:
        until(started)
        return real(process, *arguments, **named)

    return wait
