"""The stored runs as a Document."""

from __future__ import annotations

from collections.abc import Sequence

from profharness.rows import RunRow
from profharness.views.document import Column, Document, Table, record

SCHEMA = "profharness.runs/1"
FIELDS = (
    *("run", "created", "source", "device", "torch", "profilers"),
    *("cells", "failed_cells", "launches", "path"),
)
COLUMNS = (
    Column("run", "run"),
    Column("created", "created"),
    Column("device", "device", shrink=True),
    Column("torch", "torch", shrink=True),
    Column("profilers", "profilers", "names"),
    Column("cells", "cells", "count", right=True),
    Column("failed_cells", "failed", "count", right=True),
    Column("launches", "launches", "count", right=True),
)


def runs_document(rows: Sequence[RunRow]) -> Document:
    """The answer of `profharness runs`, in the given order."""
    blocks = (Table.of(COLUMNS, rows),) if rows else ()
    records = tuple(record(row, FIELDS) for row in rows)
    return Document(SCHEMA, "Runs", blocks, FIELDS, records)
