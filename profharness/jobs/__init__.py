"""Jobs that record runs with worker processes and ingest them.

The functions that record are imported on first use, so that ingesting files imports no runner.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profharness.jobs.into_store import (
        EVERYDAY,
        PROFILED_CALLS,
        SILENT,
        Captured,
        Listener,
        ObserveResult,
        Verified,
        bench,
        bench_into_store,
        capture_into_store,
        capture_missing,
        capture_with_each,
        default_backends,
        device_type,
        every_backend,
        everyday_configs,
        find_run_folder,
        find_source,
        observe_into_store,
        require_store,
        resume_into_store,
        time_layers,
        verify_into_store,
    )

__all__ = [
    "EVERYDAY",
    "PROFILED_CALLS",
    "SILENT",
    "Captured",
    "Listener",
    "ObserveResult",
    "Verified",
    "bench",
    "bench_into_store",
    "capture_into_store",
    "capture_missing",
    "capture_with_each",
    "default_backends",
    "device_type",
    "every_backend",
    "everyday_configs",
    "find_run_folder",
    "find_source",
    "observe_into_store",
    "require_store",
    "resume_into_store",
    "time_layers",
    "verify_into_store",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.into_store"), name)
