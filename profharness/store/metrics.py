"""Hardware counters of launches: into the store, and back as medians of groups of launches."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from profharness.trace import Metrics


ROWS_PER_STATEMENT = 64


Group = tuple[object, ...]
Values = dict[str, tuple[float, str]]


def insert_metrics(
    connection: sqlite3.Connection,
    first_id: int,
    metrics: Metrics,
    kept: Iterable[NDArray[np.int64]],
) -> None:
    """Insert the metrics of the launches stored with the ids from first_id on.

    kept: blocks of their places in the trace, in the order of ids. A value that is NaN has no row.
    """
    order = sorted(range(len(metrics.names)), key=metrics.names.__getitem__)
    heads = [(metrics.names[index], metrics.units[index]) for index in order]
    rows = _rows(first_id, metrics.values[:, order], heads, kept)
    whole, single = _statement(ROWS_PER_STATEMENT), _statement(1)
    while block := list(islice(rows, ROWS_PER_STATEMENT)):
        if len(block) == ROWS_PER_STATEMENT:
            connection.execute(whole, list(chain.from_iterable(block)))
        else:
            connection.executemany(single, block)


def _statement(rows: int) -> str:
    marks = ", ".join(["(?, ?, ?, ?)"] * rows)
    return f"INSERT INTO metrics (launch_id, name, unit, value) VALUES {marks}"


def _rows(
    first_id: int,
    values: NDArray[np.float64],
    heads: Sequence[tuple[str, str]],
    kept: Iterable[NDArray[np.int64]],
) -> Iterator[tuple[int, str, str, float]]:
    launch_id = first_id
    for block in kept:
        for place in block.tolist():
            for (name, unit), value in zip(heads, values[place].tolist(), strict=True):
                if value == value:  # not NaN
                    yield launch_id, name, unit, value
            launch_id += 1


def group_metrics(
    connection: sqlite3.Connection, rows: Sequence[dict[str, Any]], *, by_op: bool
) -> list[Values]:
    """For each row of `launch_groups` (with its ids) the median of every metric over its launches,
    with the unit; empty where there is none. Traces without metrics cost one lookup each.
    """
    found: dict[Group, Values] = {}
    for trace_id in dict.fromkeys(row["trace_id"] for row in rows):
        span = connection.execute(
            "SELECT first_launch_id, last_launch_id FROM traces WHERE id = ? AND EXISTS (SELECT 1 "
            "FROM metrics WHERE launch_id BETWEEN first_launch_id AND last_launch_id)",
            (trace_id,),
        ).fetchone()
        if span:
            wanted = {_group(row, by_op) for row in rows if row["trace_id"] == trace_id}
            found |= _medians(connection, span, trace_id, wanted, by_op)
    return [found.get(_group(row, by_op), {}) for row in rows] if found else [{} for _ in rows]


def _group(row: dict[str, Any], by_op: bool) -> Group:
    names = ("trace_id", "cell_id", "range_name_id", "kernel_id", "launch_config_id", "device")
    return (*(row[name] for name in names), row["op_path_id"] if by_op else None)


def _medians(
    connection: sqlite3.Connection,
    span: tuple[int, int],
    trace_id: int,
    wanted: set[Group],
    by_op: bool,
) -> dict[Group, Values]:
    op = "l.op_path_id" if by_op else "NULL"
    launches = connection.execute(
        f"SELECT l.id, l.trace_id, l.cell_id, g.name_id, l.kernel_id, l.launch_config_id, "
        f"l.device, {op} FROM launches l LEFT JOIN ranges g ON g.id = l.range_id "
        "WHERE l.id BETWEEN ? AND ? AND l.trace_id = ?",
        (*span, trace_id),
    )
    group_of = {row[0]: row[1:] for row in launches if row[1:] in wanted}
    if not group_of:
        return {}
    from statistics import median  # slow to import, and most runs have no metrics

    lists: dict[Group, dict[str, list[float]]] = {group: {} for group in group_of.values()}
    units: dict[str, str] = {}
    last, mine = None, None
    for launch, name, unit, value in connection.execute(
        "SELECT launch_id, name, unit, value FROM metrics WHERE launch_id BETWEEN ? AND ? "
        "AND value IS NOT NULL ORDER BY launch_id",
        (min(group_of), max(group_of)),
    ):
        if launch != last:
            last, mine = launch, lists.get(group_of.get(launch, ()))
        if mine is not None:
            mine.setdefault(name, []).append(value)
            units[name] = unit or ""
    return {
        group: {name: (median(numbers), units[name]) for name, numbers in mine.items()}
        for group, mine in lists.items()
    }
