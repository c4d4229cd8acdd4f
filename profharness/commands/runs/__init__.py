"""`profharness runs`: list stored runs, or delete some."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from profharness.commands._command import command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._output import hint
from profharness.commands._types import Names, Store, store_path
from profharness.commands.runs.tables import runs_document
from profharness.render.document import Document
from profharness.rows import RunRow
from profharness.store import open_store, to_frame

if TYPE_CHECKING:
    import pandas as pd

Deleted = Annotated[
    Names,
    Option(
        ("--delete",),
        multiple=True,
        metavar="RUN",
        help="Delete a run. Repeatable.",
        click={"is_eager": True},  # known before -o is checked
    ),
]


@dataclass(frozen=True)
class StoredRuns:
    """The runs of a store, newest first. After a deletion, the remaining ones."""

    rows: tuple[RunRow, ...]
    store: Path
    deleted: tuple[str, ...] = ()


def _to_frame(runs: StoredRuns) -> pd.DataFrame:
    return to_frame(runs.rows, RunRow)


@command(
    "runs",
    frame=_to_frame,
    tool="Use it first, to find out what is stored.",
)
def runs(*, deleted: Deleted = (), store: Store = None) -> StoredRuns:
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
            opened.delete_run(run)
            hint(f"deleted {run}")
        return StoredRuns(tuple(opened.runs()), path, names)


@document(runs)
def show(found: StoredRuns) -> Document | None:
    """Return the list, or None after a deletion."""
    if found.deleted:
        return None
    if not found.rows:
        hint(
            f"{found.store} holds no runs; `profharness capture` or `profharness ingest FILE` makes one"
        )
    return runs_document(found.rows)


DECLARATION = declaration_of(runs)
