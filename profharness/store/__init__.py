"""The store: SQLite in, rows out. What ingests is loaded on first use, so that reading imports
neither numpy nor a parser.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from profharness.rows import LaunchRow, RangeRow
from profharness.store.queries import Store, open_store
from profharness.store.selection import (
    ALL_RUNS,
    KERNELS_ELSE_CELLS,
    LATEST,
    Need,
    Selection,
)

if TYPE_CHECKING:
    from profharness.store.frames import frame, query, to_frame
    from profharness.store.ingest import IngestResult, ingest_path

__all__ = [
    "ALL_RUNS",
    "KERNELS_ELSE_CELLS",
    "LATEST",
    "IngestResult",
    "LaunchRow",
    "Need",
    "RangeRow",
    "Selection",
    "Store",
    "frame",
    "ingest_path",
    "open_store",
    "query",
    "to_frame",
]

_FRAMES = ("frame", "query", "to_frame")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "frames" if name in _FRAMES else "ingest"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
