"""Interrupts while something must not be left half-done."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.02


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Signals that would end the block wait until it is done, and are then raised again.

    Only the main thread can be interrupted; in another this does nothing. Handlers of Python alone
    are held: a signal without one ends the process, as before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    holds = False
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = {number: handler for number, handler in before.items() if callable(handler)}

    def note(number: int, frame: FrameType | None) -> None:
        if holds:
            caught.append(number)
        else:  # came while handlers are being changed, which what it raises then leaves half-done
            handled[signal.Signals(number)](number, frame)

    for number in handled:
        signal.signal(number, note)
    holds = True
    try:
        yield
    finally:
        holds = False
        for number, handler in handled.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(caught):
            signal.raise_signal(late)


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
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
