"""Find out which attention kernels ran, why, what they cost, and what changed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Maps each function of the Python interface to its module in `profharness.commands`.
_FUNCTIONS = {
    "analyze": "analyze",
    "bench": "bench",
    "capture": "capture",
    "cells": "_python",
    "diff": "diff",
    "explain": "explain",
    "explain_kernel": "explain_kernel",
    "export": "export",
    "ingest": "ingest",
    "kernels": "kernels",
    "launches": "_python",
    "layers": "layers",
    "list_backends": "backends",
    "observe": "_python",
    "predict": "predict",
    "query": "_python",
    "ranks": "ranks",
    "report": "report",
    "repro": "repro",
    "resume": "capture",
    "run_doctor": "doctor",
    "runs": "runs",
    "scrub_run": "scrub",
    "verify": "verify",
}
__all__ = [*_FUNCTIONS, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a function of the Python interface on first use.

    Therefore, `import profharness` loads neither torch nor pandas.
    """
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"profharness.commands.{_FUNCTIONS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_FUNCTIONS])
