"""What the worker uses of nvtx, for a Python that does not have it: nothing is told, so that nsys and
ncu need the real one.
"""

from __future__ import annotations

import contextlib
from typing import Any


def annotate(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    """A block without a range."""
    return contextlib.nullcontext()


def start_range(*_: Any, **__: Any) -> None:
    """No range."""


def end_range(_: None) -> None:
    """Nothing to end."""
