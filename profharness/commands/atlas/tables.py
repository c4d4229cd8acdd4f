"""Show the answer of `atlas list`."""

from __future__ import annotations

from collections.abc import Sequence

from profharness.atlas.catalog import FIELDS, Entry, entry_record
from profharness.columns import Column
from profharness.render.document import Document, Note, Table

SCHEMA = "profharness.atlas/1"
COLUMNS = (
    Column("name", "name"),
    Column("origin", "from"),
    Column("gpu", "GPU"),
    Column("torch", "torch"),
    Column("cuda", "CUDA"),
    Column("cudnn", "cuDNN"),
    Column("driver", "driver"),
    Column("cells", "cells", "count"),
)


def atlas_document(entries: Sequence[Entry]) -> Document:
    """Return the document of `atlas list`: one row per atlas."""
    records = tuple(map(entry_record, entries))
    table = Table.of(COLUMNS, records)
    note = Note("none; `profharness atlas add FILE` takes one")
    return Document(SCHEMA, "Atlases", (table if records else note,), FIELDS, records)
