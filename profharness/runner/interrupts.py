"""Interrupts while something must not be left half-done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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

    def note(number: int, _: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = {number: handler for number, handler in before.items() if callable(handler)}
    for number in handled:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(caught):
            signal.raise_signal(late)
