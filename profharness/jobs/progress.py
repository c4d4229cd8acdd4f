"""Progress display for the Python interface, and formatting of durations."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from profharness.errors import one_line

if TYPE_CHECKING:
    from profharness.recording.supervise import Progress, Step

WIDEST = 100  # maximum number of characters in a line


def duration(seconds: float) -> str:
    """Format seconds as `40 s`, `12 min` or `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def shown(wanted: bool | None) -> Iterator[Progress | None]:
    """Yield a progress callback that keeps one line up to date, or None if no line is displayed.

    The line is written to stdout in a notebook, and to stderr otherwise. If `wanted` is None, the
    line is displayed only in notebooks and on terminals.
    """
    notebook = hasattr(sys.modules.get("IPython"), "get_ipython") and hasattr(
        sys.modules["IPython"].get_ipython(), "kernel"
    )
    stream = sys.stdout if notebook else sys.stderr
    if not (wanted if wanted is not None else notebook or stream.isatty()):
        yield None
        return
    width = 0

    def show(step: Step) -> None:
        nonlocal width
        where = f"[{step.done}/{step.total}] {step.cell.config} {step.cell.backend}: {step.stage}"
        line = one_line(step.notice or where)[:WIDEST]
        stream.write(f"\r{line.ljust(width)}")
        stream.flush()
        width = len(line)

    try:
        yield show
    finally:
        if width:
            stream.write("\n")
