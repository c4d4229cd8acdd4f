"""`profharness runs`: list stored runs, or delete some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from profharness.columns import pick
from profharness.commands._command import command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._output import hint
from profharness.commands._types import Names, Store, store_path
from profharness.render.document import Block, Document, Note, Table, record
from profharness.rows import RunRow
from profharness.store import open_store, to_frame

if TYPE_CHECKING:
    import pandas as pd

RUN_FIELDS = (
    *("run", "created", "source", "device", "torch", "profilers"),
    *("cells", "failed_cells", "launches", "path", "kind", "warnings"),
    *("rank", "world_size", "host_key", "gpu_key", "name"),
)
RUN_COLUMNS = pick(
    RunRow,
    *("name", "rank", "kind", "created", "device", "torch", "profilers", "cells"),
    *("failed_cells", "launches"),
)
Deleted = Annotated[
    Names,
    Option(
        ("--delete",),
        multiple=True,
        metavar="RUN",
        help="Delete a run. Repeatable.",
        click={"is_eager": True},  # parsed before -o, because `check_file` reads it
    ),
]


def _to_frame(rows: Sequence[RunRow]) -> pd.DataFrame:
    return to_frame(rows, RunRow)


@command(
    "runs",
    frame=_to_frame,
    tool="Use it first, to find out what is stored.",
)
def runs(*, deleted: Deleted = (), store: Store = None) -> list[RunRow]:
    """List stored runs, newest first.

    --delete removes a run from the store. Its run folder and traces stay, and `ingest` restores it.

    \b
    Example:
      profharness runs --format json
    """
    path = store_path(store)
    names = (deleted,) if isinstance(deleted, str) else tuple(deleted)
    with open_store(path, write=bool(names)) as opened:
        # Look up all runs before deleting any, so that `latest~1` keeps its meaning.
        for run in dict.fromkeys([opened.resolve(name) for name in names]):
            name = opened.run_name(run)
            opened.delete_run(run)
            hint(f"deleted {name}")
        rows = opened.runs()
    if not rows and not names:
        hint(f"{path} holds no runs; `profharness capture` or `profharness ingest FILE` makes one")
    return rows


@document(runs)
def show(rows: Sequence[RunRow], *, deleted: Deleted = ()) -> Document | None:
    """Return a document with one row per run, or None if --delete was given."""
    if deleted:
        return None
    notes = warning_notes({row.name: row.warnings for row in rows if row.warnings})
    ranked = any(row.rank is not None for row in rows)
    columns = [column for column in RUN_COLUMNS if ranked or column.key != "rank"]
    blocks: tuple[Block, ...] = (Table.of(columns, rows), *notes) if rows else ()
    records = tuple(record(row, RUN_FIELDS) for row in rows)
    return Document("profharness.runs/1", "Runs", blocks, RUN_FIELDS, records)


def with_warnings(document: Document, warnings: Mapping[str, Sequence[str]]) -> Document:
    """Add warnings about runs to a document, as one note per run. JSON contains all warnings."""
    blocks = (*document.blocks, *warning_notes(warnings))
    listed = [{"run": run, "text": text} for run, texts in warnings.items() for text in texts]
    return replace(document, blocks=blocks, extra={**document.extra, "warnings": listed})


def warning_notes(warnings: Mapping[str, Sequence[str]]) -> list[Note]:
    """Return one note per run, with the first warning and the number of warnings."""
    notes = []
    for run, texts in warnings.items():
        several = len(texts) > 1
        count = f"{len(texts)} warnings, the first: " if several else ""
        more = "; all of them: profharness runs --format json" if several else ""
        notes.append(Note(f"{count}{texts[0]}{more}", run, "warning"))
    return notes


DECLARATION = declaration_of(runs)
