"""The store: SQLite in, rows out. Names are loaded on first use, so that reading never imports
numpy, pandas or a parser.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profharness.store.frames import query, to_frame
    from profharness.store.ingest import IngestResult, ingest_path
    from profharness.store.queries import LaunchRow, RangeRow, Store, open_store


__all__ = [
    "IngestResult",
    "LaunchRow",
    "RangeRow",
    "Store",
    "ingest_path",
    "open_store",
    "query",
    "to_frame",
]


_MODULES = {
    "IngestResult": "ingest",
    "ingest_path": "ingest",
    "LaunchRow": "queries",
    "RangeRow": "queries",
    "Store": "queries",
    "open_store": "queries",
    "query": "frames",
    "to_frame": "frames",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
