"""Refuse runs and traces that must not be stored.

Tables cannot contain integers of more than 64 bits, names that are not valid Unicode, or two cells
of a run with the same name. A damaged or smaller run folder never replaces a complete run, and a
copy of a folder changes nothing.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path

import msgspec

from profharness.errors import TraceFormatError, join_few
from profharness.run import RUN_FILE, Run
from profharness.trace import LaunchConfig, Trace

MAX_INT = (1 << 63) - 1  # the largest integer of SQLite
SHOWN = 5
PENDING = "pending"


def check_record(path: Path, run: Run) -> None:
    """Raise TraceFormatError if a run record contains values that tables cannot contain."""
    (name, count), *_ = Counter(cell.cell for cell in run.cells).most_common(1) or [("", 0)]
    if count > 1:
        raise TraceFormatError(path, f"{count} cells are called {name!r}", expected="unique names")
    for cell in run.cells:
        # tuning is stored as text
        if _largest(msgspec.to_builtins(replace(cell, tuning=None))) > MAX_INT:
            raise TraceFormatError(
                path, f"a number of cell {cell.cell!r} is too large", expected="64 bits at most"
            )


def _largest(value: object) -> int:
    """Return the largest absolute value of all integers in nested data, or 0 if it has no integers."""
    if isinstance(value, dict):
        return max(map(_largest, value.values()), default=0)
    if isinstance(value, list | tuple):
        if set(map(type, value)) == {int}:  # a fast path for thousands of samples
            largest: int = max(max(value), -min(value))
            return largest
        return max(map(_largest, value), default=0)
    return abs(value) if isinstance(value, int) else 0


def check_tables(path: Path, trace: Trace) -> None:
    """Raise TraceFormatError if a trace has numbers or names that tables cannot contain."""
    numbers = chain(
        chain.from_iterable(asdict(device).values() for device in trace.devices),
        (number for launch in trace.launch_configs for number in _flat(launch)),
        (number for r in trace.ranges for number in (r.start_ns, r.duration_ns, r.pid, r.tid)),
    )
    largest = max((abs(number) for number in numbers if isinstance(number, int)), default=0)
    if largest > MAX_INT:
        raise TraceFormatError(
            path, f"a number of {largest.bit_length()} bits", expected="64 bits at most"
        )
    names = chain(
        *(trace.kernels, trace.op_paths, trace.apis, (item.name for item in trace.ranges)),
        (device.name for device in trace.devices),
    )
    try:
        # SQLite cannot store a str with a lone surrogate
        "".join(names).encode()
    except (UnicodeEncodeError, TypeError) as error:
        raise TraceFormatError(path, f"holds a name that is no text: {error}") from None


def _flat(config: LaunchConfig) -> Iterator[int | None]:
    for value in (getattr(config, item.name) for item in fields(config)):
        yield from value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True, slots=True)
class RunContents:
    """The measurements, launches and observed calls of a run."""

    cells: Mapping[str, int]
    """number of samples and checks of each cell that has a result"""
    traces: Mapping[str, int | None]
    """number of launches of each raw trace, by its path; None if the trace is not parsed yet"""
    observed: int = 0
    """number of calls counted by `observe`"""

    def lacks(self, other: RunContents) -> list[str]:
        """Describe the measurements, launches and calls that `other` contains and this run lacks."""
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


def stored_contents(connection: sqlite3.Connection, run: str) -> RunContents | None:
    """Return the contents of a stored run, or None if the store does not contain the run."""
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
    """Return the folder that a run was ingested from if `folder` is a copy of that folder.

    Return None if it is not a copy.
    """
    row = connection.execute("SELECT path FROM runs WHERE run = ?", (run.run,)).fetchone()
    if row is None:
        return None
    source = Path(row[0])
    # if the source was deleted, the copy replaces it
    if not (source / RUN_FILE).is_file() or source.resolve() == folder.resolve():
        return None
    here, there = recorded(run), stored_contents(connection, run.run)
    same = (
        there is not None
        and here.cells == there.cells
        # only the paths are compared, because the number of launches is unknown before parsing
        and here.traces.keys() == there.traces.keys()
    )
    return source if same else None


def require_no_less(
    connection: sqlite3.Connection,
    path: Path,
    run: str,
    before: RunContents | None,
    lost: Sequence[str],
) -> None:
    """Raise TraceFormatError if the stored run now contains less than it did before.

    `lost` contains the reasons why traces of the run could not be read.
    """
    after = stored_contents(connection, run)
    missing = after.lacks(before) if before and after else []
    if not missing:
        return
    reason = f" ({lost[0]})" if lost else ""
    raise TraceFormatError(
        path,
        f"holds less of run {run} than the store, which keeps what it has: missing are "
        f"{join_few(missing, SHOWN)}{reason}; `profharness runs --delete {run}` lets this one in",
    )
