"""Insert a parsed trace: ranges, launches in column blocks, groups and hardware counters."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from profharness.rows import axes
from profharness.stats import Series
from profharness.store.groups import Grouped, Grouping
from profharness.store.insert_calls import CallLaunches
from profharness.store.tables import (
    GROUP_KEYS,
    ROWS_PER_STATEMENT,
    config_ids,
    insert_row,
    insert_rows,
    insert_statement,
    row_id,
)
from profharness.trace import (
    CELL_RANGE_PREFIX,
    NONE,
    HardwareMetrics,
    LaunchBatch,
    LaunchConfig,
    Range,
    Trace,
    range_cell,
)
from profharness.traces.columns import distinct
from profharness.traces.kernel_names import parse_kernel_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

SDPA_OP = re.compile(r"aten::_scaled_dot_product_\w*attention\w*")
BLOCK = 8192
PIECE = 32768  # maximum number of launches that are looked up and grouped at once
MAX_COUNTS_SHOWN = 20
_UNCHANGED = (
    "device", "stream", "correlation", "graph_node", "pid", "tid", "launch_ns", "start_ns",
    "duration_ns", "bytes",
)  # fmt: skip
_LAUNCH_COLUMNS = (
    "trace_id", "cell_id", "iteration", "kernel_id", "launch_config_id", "op_path_id", "range_id",
    "api_id", *_UNCHANGED,
)  # fmt: skip
_NEVER_NULL = {
    "trace_id", "by_op", "kernel_id", "launch_config_id", "device", "launches", "start_ns",
    "first_ns",
}  # fmt: skip


def placed_samples(
    values: Sequence[int], turns: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int | None, int | None]]:
    """Yield the samples, each with its process and turn. Both are None if they are unknown."""
    complete = Series.of(values, turns).turns
    places: list[tuple[int | None, int | None]]
    places = [turn[:2] for turn in complete for _ in range(turn.samples)]
    for value, (process, turn) in zip(values, places or [(None, None)] * len(values), strict=True):
        yield value, process, turn


def sdpa_op(path: str) -> str | None:
    """Return the innermost op in a path of ops that implements SDPA, or None if no op does.

    The composite op scaled_dot_product_attention does not count.
    """
    return next((op for op in reversed(path.split(";")) if SDPA_OP.fullmatch(op)), None)


def _kernel_id(connection: sqlite3.Connection, name: str, kind: str) -> int:
    key = {"name": name, "kind": kind}
    return row_id(connection, "kernels", key, lambda: asdict(parse_kernel_name(name, kind)) | key)


def _launch_config_id(connection: sqlite3.Connection, config: LaunchConfig) -> int:
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    shape = axes("grid", values.pop("grid")) | axes("block", values.pop("block"))
    return row_id(connection, "launch_configs", shape | values)


def _op_path_id(connection: sqlite3.Connection, path: str) -> int:
    return row_id(connection, "op_paths", {"path": path}, lambda: {"sdpa_op": sdpa_op(path)})


def _name_ids(connection: sqlite3.Connection, table: str, names: Sequence[str]) -> list[int]:
    ids = {name: row_id(connection, table, {"name": name}) for name in dict.fromkeys(names)}
    return [ids[name] for name in names]


@dataclass(frozen=True, slots=True)
class CellTrace:
    """The launches per profiled call of a cell in one trace, and the op that implements SDPA."""

    cell: str
    launches_per_call: tuple[int, ...]
    sdpa_op: str | None

    def warning(self) -> str | None:
        """Return a warning if the profiled calls launched different numbers of kernels."""
        counts = self.launches_per_call
        if len(set(counts)) < 2:
            return None
        shown = ",".join(str(count) for count in counts[:MAX_COUNTS_SHOWN])
        tail = ",…" if len(counts) > MAX_COUNTS_SHOWN else ""
        return f"kernel count differs between calls: {shown}{tail}"


@dataclass(slots=True)
class Inserted:
    """The result of inserting a trace: the number of launches stored and dropped, and its cells."""

    launches: int = 0
    dropped: int = 0
    cells: tuple[CellTrace, ...] = ()
    unknown_cells: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Calls:
    """The profiled calls of one cell."""

    ordinal_of_range: dict[int, int]
    """ordinal of the call of each range, by the index of the range"""
    count: int
    start_ns: int


@dataclass(frozen=True, slots=True)
class _Ids:
    """Arrays of row ids that are indexed by the indices of a trace.

    The last element is NONE. It is selected by the index -1, which means that there is no value.
    """

    kernel: Column
    launch_config: Column
    op_path: Column
    api: Column
    range: Column
    range_name: Column
    cell: Column
    iteration: Column
    origin: Column
    """start of the first call of the cell that each range belongs to; 0 for other ranges"""


def insert_trace(
    connection: sqlite3.Connection,
    trace_id: int,
    trace: Trace,
    batches: Iterable[LaunchBatch],
    cells: dict[str, int] | None,
    progress: Callable[[int], None] | None = None,
) -> Inserted:
    """Insert the contents of a trace that has a row in `traces`, in the caller's transaction.

    `cells` maps the names of a run's cells to row ids. Launches outside of these cells are not
    stored, but counted. `cells` is None for a foreign trace. Then all launches are stored.
    """
    calls = _cell_calls(trace.ranges, cells or {})
    ids = _row_ids(connection, trace_id, trace, calls, cells or {})
    # ids are assigned here, so that the launches of a trace have consecutive ids
    first_id = _next_launch_id(connection)
    result = Inserted()
    kept: list[Column] = []
    per_call = {(cells or {})[cell]: np.zeros(call.count, np.int64) for cell, call in calls.items()}
    grouping = Grouping()
    # the calls of a cell were stored together with the cell
    calls_of = CallLaunches(trace) if cells is None else None
    for batch in chain.from_iterable(map(_pieces, batches)):
        _check_batch(batch)
        keep = slice(None) if cells is None else ids.cell[batch.cell_range] != NONE
        columns = _launch_columns(trace_id, batch, ids, keep)
        if trace.metrics is not None:
            kept.append(np.arange(len(batch.kernel))[keep] + result.launches + result.dropped)
        stored = len(columns["trace_id"])
        if calls_of:
            calls_of.add(batch, ids.kernel[batch.kernel], ids.launch_config[batch.launch_config])
        result.dropped += len(batch.kernel) - stored
        result.launches += stored
        if stored:
            _insert_launches(connection, columns, first_id, result.launches - stored)
            keys = [columns[name] for name in GROUP_KEYS]
            grouping.add(keys, columns["duration_ns"], columns["first_ns"])
            _count_calls(per_call, columns["cell_id"], columns["iteration"])
        if progress:
            progress(len(batch.kernel))
    if calls_of:
        configs = config_ids(connection, (call.config for call in trace.calls if call.config))
        calls_of.insert(connection, trace_id, configs)
    grouped = grouping.finish() if result.launches else None
    if grouped:
        _insert_groups(connection, trace_id, grouped, foreign=cells is None)
    if trace.metrics is not None:
        _insert_metrics(connection, first_id, trace.metrics, kept)
    connection.execute(
        "UPDATE traces SET launches = ?, dropped = ?, first_launch_id = ?, last_launch_id = ? "
        "WHERE id = ?",
        (result.launches, result.dropped, first_id, first_id + result.launches - 1, trace_id),
    )
    if cells is not None:
        seen = {range_cell(item.name) for item in trace.ranges} - {None}
        result.unknown_cells = tuple(sorted(str(cell) for cell in seen if cell not in cells))
        result.cells = _insert_cell_traces(connection, trace_id, calls, cells, per_call, grouped)
    return result


def _check_batch(batch: LaunchBatch) -> None:
    """Raise ValueError for a negative device or duration, which would make groups wrong."""
    for name in ("device", "duration_ns"):
        least = int(getattr(batch, name).min(initial=0))
        if least < NONE:
            raise ValueError(f"a launch with {name} {least}")


def _pieces(batch: LaunchBatch) -> Iterator[LaunchBatch]:
    """Yield views of a batch with at most PIECE launches each."""
    for begin in range(0, len(batch.kernel), PIECE):
        rows = slice(begin, begin + PIECE)
        yield LaunchBatch(*(getattr(batch, item.name)[rows] for item in fields(LaunchBatch)))


def _count_calls(per_call: dict[int, Column], cell: Column, iteration: Column) -> None:
    """Add the launches of a piece to the counts of each cell's calls."""
    if per_call:
        for seen in distinct(cell):
            counts = per_call[seen]
            counts += np.bincount(iteration[cell == seen], minlength=len(counts))


def _cell_calls(ranges: Sequence[Range], cells: dict[str, int]) -> dict[str, _Calls]:
    """Return the profiled calls of each cell.

    Ranges of a cell that overlap belong to the same call, which may have a push/pop range and a
    start/end range.
    """
    by_cell: dict[str, list[int]] = {}
    for index, item in enumerate(ranges):
        if item.name.startswith(CELL_RANGE_PREFIX):
            cell = range_cell(item.name)
            if cell in cells:
                by_cell.setdefault(str(cell), []).append(index)
    return {cell: _calls(ranges, indices) for cell, indices in by_cell.items()}


def _calls(ranges: Sequence[Range], indices: list[int]) -> _Calls:
    # if ranges have the same start, the outer range comes first
    ordered = sorted(
        indices, key=lambda index: (ranges[index].start_ns, -ranges[index].duration_ns)
    )
    ordinals: dict[int, int] = {}
    ordinal, end = -1, None
    for index in ordered:
        start = ranges[index].start_ns
        if end is None or start >= end:
            ordinal, end = ordinal + 1, start
        end = max(end, start + ranges[index].duration_ns)
        ordinals[index] = ordinal
    return _Calls(ordinals, ordinal + 1, ranges[ordered[0]].start_ns)


def _row_ids(
    connection: sqlite3.Connection,
    trace_id: int,
    trace: Trace,
    calls: dict[str, _Calls],
    cells: dict[str, int],
) -> _Ids:
    cell = np.full(len(trace.ranges) + 1, NONE, np.int64)
    iteration, origin = cell.copy(), np.zeros(len(trace.ranges) + 1, np.int64)
    for name, call in calls.items():
        for index, ordinal in call.ordinal_of_range.items():
            cell[index], iteration[index], origin[index] = cells[name], ordinal, call.start_ns
    range_names = _name_ids(connection, "range_names", [item.name for item in trace.ranges])
    ranges = _insert_ranges(connection, trace_id, trace.ranges, range_names, cell, iteration)
    kernels = zip(trace.kernels, trace.kernel_kinds, strict=True)

    def lookup(ids: Iterable[int]) -> Column:
        return np.array([*ids, NONE], np.int64)

    return _Ids(
        kernel=lookup(_kernel_id(connection, name, kind) for name, kind in kernels),
        launch_config=lookup(
            _launch_config_id(connection, launch_config) for launch_config in trace.launch_configs
        ),
        op_path=lookup(_op_path_id(connection, path) for path in trace.op_paths),
        api=lookup(_name_ids(connection, "apis", trace.apis)),
        range=lookup(ranges),
        range_name=lookup(range_names),
        cell=cell,
        iteration=iteration,
        origin=origin,
    )


def _insert_ranges(
    connection: sqlite3.Connection,
    trace_id: int,
    ranges: Sequence[Range],
    names: list[int],
    cell: Column,
    iteration: Column,
) -> range:
    """Insert all ranges and return their ids."""
    base = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM ranges").fetchone()[0]
    columns = (
        "id", "trace_id", "name_id", "cell_id", "iteration", "parent_id", "start_ns", "duration_ns",
        "pid", "tid",
    )  # fmt: skip
    rows = (
        (
            base + index, trace_id, name, *((None, None) if in_cell == NONE else (in_cell, call)),
            None if item.parent is None else base + item.parent,
            item.start_ns, item.duration_ns, item.pid, item.tid,
        )
        for index, (item, name, in_cell, call) in enumerate(
            zip(ranges, names, cell.tolist(), iteration.tolist(), strict=False)
        )
    )  # fmt: skip
    insert_rows(connection, "ranges", columns, rows)
    return range(base, base + len(ranges))


def _launch_columns(
    trace_id: int, batch: LaunchBatch, ids: _Ids, keep: NDArray[np.bool_] | slice
) -> dict[str, Column]:
    """Return the columns of `launches` for the launches to keep, and two more columns for grouping."""
    cell_range = batch.cell_range[keep]
    inner = batch.range[keep]
    inner = np.where(inner == NONE, cell_range, inner)
    columns = {
        "trace_id": np.full(len(inner), trace_id, np.int64),
        "cell_id": ids.cell[cell_range],
        "iteration": ids.iteration[cell_range],
        "kernel_id": ids.kernel[batch.kernel[keep]],
        "launch_config_id": ids.launch_config[batch.launch_config[keep]],
        "op_path_id": ids.op_path[batch.op_path[keep]],
        "range_id": ids.range[inner],
        "range_name_id": ids.range_name[inner],
        "api_id": ids.api[batch.api[keep]],
        **{name: getattr(batch, name)[keep] for name in _UNCHANGED},
    }
    columns["first_ns"] = columns["start_ns"] - ids.origin[cell_range]
    return columns


def _next_launch_id(connection: sqlite3.Connection) -> int:
    query = "SELECT coalesce(max(last_launch_id), 0) + 1 FROM traces"
    return int(connection.execute(query).fetchone()[0])


def _insert_launches(
    connection: sqlite3.Connection,
    columns: Mapping[str, Column],
    first_id: int,
    done: int,
) -> None:
    """Insert launches of a trace after the `done` launches that are already inserted.

    `first_id` is the id of the first launch of the trace.
    """
    values = {name: columns[name] for name in _LAUNCH_COLUMNS}
    if not done:  # SQLite numbers the following rows itself
        values["id"] = np.arange(first_id, first_id + len(values["trace_id"]))
    _insert_columns(connection, "launches", values)


def _insert_columns(
    connection: sqlite3.Connection, table: str, columns: Mapping[str, Column]
) -> None:
    """Insert rows given as columns of equal length. NONE becomes NULL in nullable columns."""
    first = next(iter(columns))  # never a constant, because each row needs at least one parameter
    marks = {
        name: _mark(column, nullable=name not in _NEVER_NULL, fixed=name != first)
        for name, column in columns.items()
    }
    varying = [columns[name] for name, mark in marks.items() if "?" in mark]
    rows = np.stack(varying, axis=1)
    many = insert_statement(table, marks, ROWS_PER_STATEMENT)
    whole = len(rows) - len(rows) % ROWS_PER_STATEMENT
    for begin in range(0, whole, BLOCK):
        block = rows[begin : min(begin + BLOCK, whole)]
        connection.executemany(many, block.reshape(-1, ROWS_PER_STATEMENT * len(varying)).tolist())
    connection.executemany(insert_statement(table, marks), rows[whole:].tolist())


def _mark(column: Column, *, nullable: bool, fixed: bool) -> str:
    """Return the SQL expression for the values of a column.

    This is a parameter, or a literal if `fixed` is True and all rows have the same value.
    """
    low, high = int(column.min()), int(column.max())
    if low == high and fixed:
        return "NULL" if nullable and low == NONE else str(low)
    return f"nullif(?, {NONE})" if nullable and low <= NONE <= high else "?"


def _insert_groups(
    connection: sqlite3.Connection, trace_id: int, grouped: Grouped, *, foreign: bool
) -> None:
    """Insert the groups of launches with and without the op path as part of the key.

    Rows without the op path in their key contain the op path of most of their launches.
    """
    op_paths = grouped.keys[:, -1]
    origin = (
        int(grouped.fine.first.min()) if foreign else 0
    )  # in a run, times are already relative to the first call of the cell
    for by_op, groups, paths in (
        (0, grouped.coarse, op_paths[grouped.busiest()]),
        (1, grouped.fine, op_paths),
    ):
        keys = dict(zip(GROUP_KEYS, grouped.keys[groups.index].T, strict=True))
        times = {
            "total_ns": groups.total,
            "median_ns": groups.median,
            "min_ns": groups.minimum,
            "max_ns": groups.maximum,
        }
        # if a launch has no duration, the statistics of its group are unknown
        columns = {
            name: np.where(groups.minimum == NONE, NONE, values) for name, values in times.items()
        }
        columns |= keys | {"launches": groups.count, "op_path_id": paths}
        columns["trace_id"] = np.full_like(paths, trace_id)
        columns["by_op"] = np.full_like(paths, by_op)
        columns["first_ns"] = groups.first - origin
        order = np.lexsort((groups.first, columns["cell_id"]))
        ordered = {name: column[order] for name, column in columns.items()}
        _insert_columns(connection, "launch_groups", ordered)


def _insert_cell_traces(
    connection: sqlite3.Connection,
    trace_id: int,
    calls: dict[str, _Calls],
    cells: dict[str, int],
    launches: dict[int, Column],
    grouped: Grouped | None,
) -> tuple[CellTrace, ...]:
    ops = dict(connection.execute("SELECT id, sdpa_op FROM op_paths WHERE sdpa_op IS NOT NULL"))
    launches_of_op: dict[int, Counter[str]] = {}
    if grouped:
        groups = zip(grouped.keys.tolist(), grouped.fine.count.tolist(), strict=True)
        for (cell_id, *_, op_path), count in groups:
            if op_path in ops:
                launches_of_op.setdefault(cell_id, Counter())[ops[op_path]] += count
    traces = []
    for cell, call in calls.items():
        per_call = launches[cells[cell]].tolist()
        main_op = _main_op(launches_of_op.get(cells[cell], Counter()))
        traces.append(CellTrace(cell, tuple(per_call), main_op))
        row = {
            "trace_id": trace_id,
            "cell_id": cells[cell],
            "calls": call.count,
            "start_ns": call.start_ns,
            "launches": sum(per_call),
        }
        insert_row(connection, "trace_cells", row)
    return tuple(traces)


def _main_op(seen: Counter[str]) -> str | None:
    """Return the forward op with the most launches, or a backward op if there is no forward op."""
    # ties are resolved by name, so that the result is deterministic
    return min(seen, key=lambda op: (op.endswith("_backward"), -seen[op], op), default=None)


def _insert_metrics(
    connection: sqlite3.Connection, first_id: int, metrics: HardwareMetrics, kept: Iterable[Column]
) -> None:
    """Insert the metrics of launches with consecutive ids from `first_id`.

    `kept` contains blocks of positions in the trace, one position per launch, in the order of ids.
    No row is inserted for NaN, which means that the launch has no value for the metric.
    """
    # rows are inserted in the order of the primary key, because the table is WITHOUT ROWID
    order = sorted(range(len(metrics.names)), key=metrics.names.__getitem__)
    values = metrics.values[:, order]
    heads = [(metrics.names[index], metrics.units[index]) for index in order]
    rows = (
        (launch_id, *head, value)
        for launch_id, place in enumerate(chain.from_iterable(kept), first_id)
        for head, value in zip(heads, values[place].tolist(), strict=True)
        if value == value  # not NaN
    )
    insert_rows(connection, "metrics", ("launch_id", "name", "unit", "value"), rows)
