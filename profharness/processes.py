"""Child processes: how they start, are waited for and end, and interrupts meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.02
STEP_S = 0.1  # of a wait that interrupts may end
END_GRACE_S = 2.0


class _Hold:
    """The handler inside of a held block. While handlers are being changed, and where an exception
    of that moment left it installed, it does what the handler before it does. passes: `let_through`
    may end the block.
    """

    def __init__(self, *, passes: bool) -> None:
        self.passes = passes
        self.caught: list[int] = []
        self.holds = self.done = False
        handlers = {number: _unwrapped(number) for number in SIGNALS}
        self.before = {number: handler for number, handler in handlers.items() if callable(handler)}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.holds:
            self.caught.append(number)
        else:
            self.before[signal.Signals(number)](number, frame)


def _unwrapped(number: signal.Signals) -> Any:
    """The handler of a signal, without the holds that are over."""
    handler = signal.getsignal(number)
    while isinstance(handler, _Hold) and handler.done:
        handler = handler.before[number]
    return handler


@contextlib.contextmanager
def held(*, passes: bool = False) -> Iterator[None]:
    """Signals that would end the block wait until it is done, and are then raised again.

    Only the main thread can be interrupted; in another this does nothing. Handlers of Python alone
    are held: a signal without one ends the process, as before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hold = _Hold(passes=passes)
    try:
        for number in hold.before:
            signal.signal(number, hold)
        hold.holds = True
        yield
    finally:
        hold.holds, hold.done = False, True
        for number, handler in hold.before.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(hold.caught):
            signal.raise_signal(late)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Signals that would end the block come where it calls `let_through`, and at its end. Anywhere
    else they would break off what another thread waits for, such as an import that holds its lock.
    """
    if _holds():
        yield
        return
    with held(passes=True):
        yield


def let_through() -> None:
    """Raise the signals that a deferred block has put off; nothing inside of a held one."""
    for hold in _holds() if threading.current_thread() is threading.main_thread() else ():
        while hold.passes and hold.caught:
            number = hold.caught[0]
            hold.caught = [each for each in hold.caught if each != number]
            hold.before[signal.Signals(number)](number, None)


def _holds() -> list[_Hold]:
    """The hold that signals go to now, if any."""
    handlers = (_unwrapped(number) for number in SIGNALS)
    return [handler for handler in handlers if isinstance(handler, _Hold)][:1]


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended. An exception inside of Popen.poll(), which a signal raises, can
    leave its lock taken: no wait() would return any more.
    """
    with held():
        return process.poll() is not None


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for the end of a process that long; whether it came. Interrupts come through."""
    deadline = time.monotonic() + seconds
    while not has_ended(process):
        let_through()
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def find_workers(folder: Path) -> list[int]:
    """The workers of a run folder (their last argument), also those that a dead tool has left."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (path / "cmdline").read_bytes().split(b"\0")[:-1]
        except OSError:
            continue
        if (
            arguments
            and arguments[0] == os.fsencode(sys.executable)
            and arguments[-1] == os.fsencode(folder)
        ):
            pids.append(int(path.name))
    return pids


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_group(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process and its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def start_group(
    argv: Sequence[str], log: Path, environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """A child that leads a process group and a session of its own; both its streams are appended to
    log, unless the options of Popen say otherwise. Raises OSError when it does not start.
    """
    with log.open("ab") as file:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            env=environment,
            start_new_session=True,
            **{"stderr": file, **options},
        )


def run_group(
    argv: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    **options: Any,
) -> int | None:
    """The exit code of a child of `start_group`, None when it was ended for taking too long. Nothing
    of its group is left afterwards, whatever interrupts the wait.
    """
    process: subprocess.Popen[bytes] | None = None
    try:
        with held():  # an interrupt inside of Popen() would leave a child that nobody knows
            process = start_group(argv, log, environment, **options)
        return _waited(process, timeout_s)
    finally:
        if process is not None:
            _end_group(process)


def _waited(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code of a process; None when it goes on for longer. Interrupts come through."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(max(0.0, min(STEP_S, deadline - time.monotonic())))
        let_through()
        if time.monotonic() > deadline:
            return None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        kill_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_GRACE_S)
    finally:
        kill_group(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_GRACE_S)


def run_briefly(
    argv: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """A short child and what it wrote; None when it does not start or takes longer than timeout_s."""
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def child_environment() -> dict[str, str]:
    """This process's environment with profharness importable, last on the user's path."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{root}" if path else root}


def start_python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """A child of this Python that runs `code`, with pipes to its stdin and stdout."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(),
        **options,
    )
