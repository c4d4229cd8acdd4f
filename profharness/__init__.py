"""Which attention kernels ran, why those, what did they cost, and what changed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_API = (
    *("analyze", "bench", "capture", "cells", "diff", "explain", "explain_kernel", "export"),
    *(
        "ingest",
        "kernels",
        "launches",
        "list_backends",
        "observe",
        "predict",
        "query",
        "ranks",
        "report",
        "repro",
        "resume",
        "run_doctor",
        "runs",
        "scrub_run",
    ),
    "verify",
)
__all__ = [*_API, "__version__"]


def __getattr__(name: str) -> Any:
    """The functions of the Python interface, imported at first use: importing the package loads
    neither torch nor pandas.
    """
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("profharness.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
