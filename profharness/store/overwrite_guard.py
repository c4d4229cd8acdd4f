"""Compare a run folder with the stored run.

A damaged or smaller folder never replaces a complete run, and a copy of the folder changes nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from profharness.errors import TraceFormatError
from profharness.run import RUN_FILE, Run

SHOWN = 5
PENDING = "pending"


@dataclass(frozen=True, slots=True)
class RunContents:
    """The measurements, launches and observed calls of a run."""

    cells: Mapping[str, int]
    """number of samples and checks of each cell that has a result"""
    traces: Mapping[str, int | None]
    """number of launches of each raw trace by its path; None before it is parsed"""
    observed: int = 0
    """number of calls counted by `observe`"""

    def lacks(self, other: RunContents) -> list[str]:
        """Describe what `other` contains and this one does not."""
        texts = [
            (f"{counted} measurements" if counted else "the result") + f" of cell {cell}"
            for cell, number in other.cells.items()
            if (counted := number - self.cells.get(cell, 0)) > 0 or cell not in self.cells
        ]
        for path, launches in other.traces.items():
            missing = (launches or 0) - (self.traces.get(path, 0) or 0)
            if missing > 0:
                texts.append(f"{missing:,} launches of {path}")
        if other.observed > self.observed:
            texts.append(f"{other.observed - self.observed:,} observed calls")
        return texts


def recorded(run: Run) -> RunContents:
    """Return the contents that a run's record lists, without parsing its traces."""
    cells = {
        cell.cell: sum(map(len, cell.samples.values())) + len(cell.checks)
        for cell in run.cells
        if cell.status != PENDING
    }
    return RunContents(cells, dict.fromkeys((trace.path for trace in run.traces), None))


def stored(connection: sqlite3.Connection, run: str) -> RunContents | None:
    """Return the contents of a stored run; None if there is no such run."""
    row = connection.execute("SELECT id FROM runs WHERE run = ?", (run,)).fetchone()
    if row is None:
        return None
    cells = connection.execute(
        "SELECT cell, (SELECT count(*) FROM samples s WHERE s.cell_id = c.id) "
        "+ (SELECT count(*) FROM verifications v WHERE v.cell_id = c.id) "
        f"FROM cells c WHERE run_id = ? AND status <> '{PENDING}'",
        row,
    )
    traces = connection.execute("SELECT path, launches FROM traces WHERE run_id = ?", row)
    (observed,) = connection.execute(
        "SELECT coalesce(sum(calls), 0) FROM templates WHERE run_id = ?", row
    ).fetchone()
    return RunContents(dict(cells.fetchall()), dict(traces.fetchall()), observed)


def kept_elsewhere(connection: sqlite3.Connection, folder: Path, run: Run) -> Path | None:
    """Return the folder that the run was ingested from if `folder` is a copy of it, else None."""
    row = connection.execute("SELECT path FROM runs WHERE run = ?", (run.run,)).fetchone()
    if row is None:
        return None
    source = Path(row[0])
    # if the source was deleted, the copy replaces it
    if not (source / RUN_FILE).is_file() or source.resolve() == folder.resolve():
        return None
    here, there = recorded(run), stored(connection, run.run)
    same = (
        there is not None
        and here.cells == there.cells
        # by path alone, because the number of launches is unknown before parsing
        and here.traces.keys() == there.traces.keys()
    )
    return source if same else None


def require(
    connection: sqlite3.Connection,
    path: Path,
    run: str,
    before: RunContents | None,
    lost: Sequence[str],
) -> None:
    """Raise TraceFormatError if the stored run now contains less than it did before.

    `lost` contains the reasons why traces of it could not be read.
    """
    after = stored(connection, run)
    missing = after.lacks(before) if before and after else []
    if not missing:
        return
    reason = f" ({lost[0]})" if lost else ""
    raise TraceFormatError(
        path,
        f"holds less of run {run} than the store, which keeps what it has: missing are "
        f"{listed(missing)}{reason}; `profharness runs --delete {run}` lets this one in",
    )


def listed(texts: list[str]) -> str:
    """Join the first SHOWN texts and append the number of the others."""
    more = len(texts) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f" and {more} more" if more > 0 else "")
