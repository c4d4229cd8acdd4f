"""Wait for events instead of fixed times, so that a busy machine does not change the result of a test."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 600.0  # limit for events that take a second on an idle machine
LEAP_S = 1e6
KILL_BIT = 1 << signal.SIGKILL - 1
MARK = "PROFHARNESS_TEST_HANGS"
# Code of a process that never answers again; see the fixture `hanging`.
HANG = f'open(os.environ["{MARK}"], "w").write(str(os.getpid())); time.sleep(86400)'


def until(happened: Callable[[], Any], process: subprocess.Popen[Any] | None = None) -> None:
    """Wait for an event. Fail if the process that should cause it ends first."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return whether a process is running. Zombies are not."""
    folder = Path(f"/proc/{pid}")
    try:
        status, command = (folder / "status").read_text(), (folder / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    pending = re.findall(r"(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", status)
    return bool(command) and not any(int(bits, 16) & KILL_BIT for bits in pending)


def written_pid(path: Path) -> int | None:
    """Return the process id in a file, or None if there is none yet."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text else None


class Clock:
    """`time` with a monotonic() that jumps ahead on every call while the process whose id is in the
    mark lives. Only a hanging process exceeds its limit, however long others take.
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
    """Start the time limits of subprocess only after `started` returns something true."""
    for name in ("wait", "communicate"):
        monkeypatch.setattr(
            subprocess.Popen, name, _later(getattr(subprocess.Popen, name), started)
        )


def _later(real: Callable[..., Any], started: Callable[[], Any]) -> Callable[..., Any]:
    def wait(process: subprocess.Popen[Any], *arguments: Any, **named: Any) -> Any:
        until(started)
        return real(process, *arguments, **named)

    return wait
