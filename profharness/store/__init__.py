"""The SQLite store of runs and traces.

The functions that ingest traces are imported on first use. Therefore, commands that only read the
store import neither numpy nor a parser.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from profharness.store.queries import Store, open_store
from profharness.store.selection import ALL_RUNS, KERNELS_ELSE_CELLS, LATEST, Need, Selection

if TYPE_CHECKING:
    from profharness.store.frames import frame, query, to_frame
    from profharness.store.ingest import IngestResult, ingest_path, require_stored

__all__ = [
    "ALL_RUNS",
    "KERNELS_ELSE_CELLS",
    "LATEST",
    "IngestResult",
    "Need",
    "Selection",
    "Store",
    "frame",
    "ingest_path",
    "open_store",
    "query",
    "require_stored",
    "to_frame",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "frames" if name in ("frame", "query", "to_frame") else "ingest"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
