"""Provide the part of nvtx that the worker uses, for a Python in which nvtx is not installed.

These functions record no ranges. nsys and ncu need the real package.
"""

from __future__ import annotations

import contextlib
from typing import Any


def annotate(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context that opens no range."""
    return contextlib.nullcontext()


def start_range(*_: Any, **__: Any) -> None:
    """Start no range."""


def end_range(_: None) -> None:
    """Do nothing, because no range was started."""
