"""Show the answer of `runs`, and the warnings of runs in all answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from profharness.columns import columns_of, pick
from profharness.render.document import Block, Document, Note, Table, record
from profharness.rows import RunRow

RUN = columns_of(RunRow)
RUN_FIELDS = (
    *("run", "created", "source", "device", "torch", "profilers"),
    *("cells", "failed_cells", "launches", "path", "kind", "warnings"),
    *("rank", "world_size", "host_key", "gpu_key"),
)
RUN_COLUMNS = pick(
    RunRow,
    *("run", "rank", "kind", "created", "device", "torch", "profilers", "cells"),
    *("failed_cells", "launches"),
)


def runs_document(rows: Sequence[RunRow]) -> Document:
    """Return the document of `runs`, in the given order."""
    notes = warning_notes({row.run: row.warnings for row in rows if row.warnings})
    ranked = any(row.rank is not None for row in rows)
    columns = [column for column in RUN_COLUMNS if ranked or column.key != "rank"]
    blocks: tuple[Block, ...] = (Table.of(columns, rows), *notes) if rows else ()
    records = tuple(record(row, RUN_FIELDS) for row in rows)
    return Document("profharness.runs/1", "Runs", blocks, RUN_FIELDS, records)


def with_warnings(document: Document, warnings: Mapping[str, Sequence[str]]) -> Document:
    """Add the warnings of runs to a document: a note per run, and all texts in JSON."""
    blocks = (*document.blocks, *warning_notes(warnings))
    texts_of_runs = [
        {"run": run, "text": text} for run, texts in warnings.items() for text in texts
    ]
    return replace(document, blocks=blocks, extra={**document.extra, "warnings": texts_of_runs})


def warning_notes(warnings: Mapping[str, Sequence[str]]) -> list[Note]:
    """Return one note per run: the number of its warnings, the first one, and where to see the
    others.
    """
    notes = []
    for run, texts in warnings.items():
        count = f"{len(texts)} warnings, the first: " if len(texts) > 1 else ""
        more = "; all of them: profharness runs --format json" if len(texts) > 1 else ""
        notes.append(Note(f"{count}{texts[0]}{more}", run, "warning"))
    return notes
