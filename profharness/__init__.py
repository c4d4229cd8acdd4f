"""Which attention kernels ran, why those, what did they cost, and what changed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_API = "profharness.api"
# function of the Python interface -> the module that declares it
_FUNCTIONS = {
    **dict.fromkeys(("capture", "cells", "ingest", "launches", "observe"), _API),
    **dict.fromkeys(("query", "resume", "scrub_run"), _API),
    "analyze": "profharness.commands.analyze",
    "bench": "profharness.commands.bench",
    "diff": "profharness.commands.diff",
    "explain": "profharness.commands.explain",
    "explain_kernel": "profharness.commands.explain_kernel",
    "export": "profharness.commands.export",
    "kernels": "profharness.commands.kernels",
    "layers": "profharness.commands.layers",
    "list_backends": "profharness.commands.backends",
    "predict": "profharness.commands.predict",
    "ranks": "profharness.commands.ranks",
    "report": "profharness.commands.report",
    "repro": "profharness.commands.repro",
    "run_doctor": "profharness.commands.doctor",
    "runs": "profharness.commands.runs",
    "verify": "profharness.commands.verify",
}
__all__ = [*_FUNCTIONS, "__version__"]


def __getattr__(name: str) -> Any:
    """The functions of the Python interface, imported at first use: importing the package loads
    neither torch nor pandas.
    """
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FUNCTIONS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_FUNCTIONS])
