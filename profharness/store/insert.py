"""One parsed trace into rows: ranges, launches in column blocks, groups, and hardware counters."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from profharness.config import Config
from profharness.kernel_names import parse_kernel_name
from profharness.parse.columns import distinct
from profharness.rows import axes
from profharness.stats import Series
from profharness.store.groups import Grouped, Grouping
from profharness.store.schema import Shard, insert_row
from profharness.store.traced_calls import CallLaunches
from profharness.trace import (
    CELL_RANGE_PREFIX,
    NONE,
    LaunchBatch,
    LaunchConfig,
    Metrics,
    Range,
    Trace,
    range_cell,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

SDPA_OP = re.compile(r"aten::_scaled_dot_product_\w*attention\w*")
BLOCK = 8192
PIECE = 32768  # launches looked up and grouped at once
ROWS_PER_STATEMENT = 64  # one statement for many rows takes half the time of one for each
MAX_COUNTS_SHOWN = 20
_UNCHANGED = (
    "device", "stream", "correlation", "graph_node", "pid", "tid", "launch_ns", "start_ns",
    "duration_ns", "bytes",
)  # fmt: skip
_LAUNCH_COLUMNS = (
    "trace_id", "cell_id", "iteration", "kernel_id", "launch_config_id", "op_path_id", "range_id",
    "api_id", *_UNCHANGED,
)  # fmt: skip
_GROUP_KEYS = (
    "cell_id", "range_name_id", "kernel_id", "launch_config_id", "device", "op_path_id"
)  # fmt: skip
_NEVER_NULL = {
    "trace_id", "by_op", "kernel_id", "launch_config_id", "device", "launches", "start_ns",
    "first_ns",
}  # fmt: skip


def placed_samples(
    values: Sequence[int], turns: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int | None, int | None]]:
    """The samples, each with its process and turn; None for both where they are not known."""
    complete = Series.of(values, turns).turns
    places: list[tuple[int | None, int | None]]
    places = [turn[:2] for turn in complete for _ in range(turn.samples)]
    for value, (process, turn) in zip(values, places or [(None, None)] * len(values), strict=True):
        yield value, process, turn


def to_json(value: object) -> str:
    """Canonical JSON: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def row_id(
    connection: sqlite3.Connection,
    table: str,
    key: Mapping[str, object],
    more: Callable[[], Mapping[str, object]] = dict,
) -> int:
    """The id of the row with this key, NULLs included; inserted, with more, if there is none."""
    where, values = " AND ".join(f"{column} IS ?" for column in key), tuple(key.values())
    existing = connection.execute(f"SELECT id FROM {table} WHERE {where}", values).fetchone()
    if existing:
        return int(existing[0])
    told = connection.id_of(table, where, values) if isinstance(connection, Shard) else {}
    return insert_row(connection, table, {**told, **key, **more()})


def config_ids(connection: sqlite3.Connection, configs: Iterable[Config]) -> dict[Config, int]:
    """Ids of attention configs."""
    ids = {}
    # a set's order, and with it the ids, would differ from run to run of the program
    for config in dict.fromkeys(configs):
        row = {
            name: to_json(value) if isinstance(value, tuple) else value
            for name, value in asdict(config).items()
        }
        ids[config] = row_id(connection, "configs", {"label": config.label, **row})
    return ids


def sdpa_op(path: str) -> str | None:
    """The innermost SDPA implementation op of a folded path; the composite op does not count."""
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
    """What one trace says about one cell: the launches of each profiled call, and the SDPA op."""

    cell: str
    launches_per_call: tuple[int, ...]
    sdpa_op: str | None

    def warning(self) -> str | None:
        """A warning if the profiled calls did not all launch as many kernels."""
        counts = self.launches_per_call
        if len(set(counts)) < 2:
            return None
        shown = ",".join(str(count) for count in counts[:MAX_COUNTS_SHOWN])
        tail = ",…" if len(counts) > MAX_COUNTS_SHOWN else ""
        return f"kernel count differs between calls: {shown}{tail}"


@dataclass(slots=True)
class Inserted:
    """What came of one trace: launches stored and dropped, and what it says about each cell."""

    launches: int = 0
    dropped: int = 0
    cells: tuple[CellTrace, ...] = ()
    unknown_cells: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Calls:
    """The profiled calls of one cell: each of its ranges belongs to the call of that ordinal."""

    ordinal_of_range: dict[int, int]
    count: int
    start_ns: int


@dataclass(frozen=True, slots=True)
class _Ids:
    """From a trace's indices to row ids. The last element is NONE, so that index -1 finds it."""

    kernel: Column
    launch_config: Column
    op_path: Column
    api: Column
    range: Column
    range_name: Column
    cell: Column
    iteration: Column
    origin: Column
    """of each range's cell (or of the whole trace): when its first call began"""


def insert_trace(
    connection: sqlite3.Connection,
    trace_id: int,
    trace: Trace,
    batches: Iterable[LaunchBatch],
    cells: dict[str, int] | None,
    progress: Callable[[int], None] | None = None,
) -> Inserted:
    """Insert what hangs on a row of `traces` inside the caller's transaction.

    cells maps a run's cell ids to row ids; launches outside of them are dropped and counted. None
    (a foreign trace) keeps all.
    """
    calls = _cell_calls(trace.ranges, cells or {})
    ids = _row_ids(connection, trace_id, trace, calls, cells or {})
    # ids are assigned here, so that a trace's launches have consecutive ids
    first_id = _next_launch_id(connection)
    result = Inserted()
    kept: list[Column] = []
    per_call = {(cells or {})[cell]: np.zeros(call.count, np.int64) for cell, call in calls.items()}
    grouping = Grouping()
    calls_of = CallLaunches(trace) if cells is None else None  # the calls of a cell are the cell
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
            keys = [columns[name] for name in _GROUP_KEYS]
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
    """Raise ValueError for what would go to a wrong group or add up wrongly."""
    for name in ("device", "duration_ns"):
        least = int(getattr(batch, name).min(initial=0))
        if least < NONE:
            raise ValueError(f"a launch with {name} {least}")


def _pieces(batch: LaunchBatch) -> Iterator[LaunchBatch]:
    """The batch in views of at most PIECE launches."""
    for begin in range(0, len(batch.kernel), PIECE):
        rows = slice(begin, begin + PIECE)
        yield LaunchBatch(*(getattr(batch, item.name)[rows] for item in fields(LaunchBatch)))


def _count_calls(per_call: dict[int, Column], cell: Column, iteration: Column) -> None:
    """Add a piece's launches to each cell's calls."""
    if per_call:
        for seen in distinct(cell):
            counts = per_call[seen]
            counts += np.bincount(iteration[cell == seen], minlength=len(counts))


def _cell_calls(ranges: Sequence[Range], cells: dict[str, int]) -> dict[str, _Calls]:
    """Calls by cell. Ranges of a cell that overlap (push/pop and start/end) are one call."""
    by_cell: dict[str, list[int]] = {}
    for index, item in enumerate(ranges):
        if item.name.startswith(CELL_RANGE_PREFIX):
            cell = range_cell(item.name)
            if cell in cells:
                by_cell.setdefault(str(cell), []).append(index)
    return {cell: _calls(ranges, indices) for cell, indices in by_cell.items()}


def _calls(ranges: Sequence[Range], indices: list[int]) -> _Calls:
    # of ranges that begin together the outer one comes first
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
    """Insert all ranges; the ids they got."""
    base = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM ranges").fetchone()[0]
    connection.executemany(
        "INSERT INTO ranges (id, trace_id, name_id, cell_id, iteration, parent_id, start_ns, "
        "duration_ns, pid, tid) VALUES (?, ?, ?, nullif(?, -1), nullif(?, -1), ?, ?, ?, ?, ?)",
        (
            (
                base + index, trace_id, name, in_cell, call,
                None if item.parent is None else base + item.parent,
                item.start_ns, item.duration_ns, item.pid, item.tid,
            )
            for index, (item, name, in_cell, call) in enumerate(
                zip(ranges, names, cell.tolist(), iteration.tolist(), strict=False)
            )
        ),
    )  # fmt: skip
    return range(base, base + len(ranges))


def _launch_columns(
    trace_id: int, batch: LaunchBatch, ids: _Ids, keep: NDArray[np.bool_] | slice
) -> dict[str, Column]:
    """The kept launches of a batch by column of `launches`, and two more columns for grouping."""
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
    """Insert launches after the `done` first ones of a trace whose first launch has `first_id`."""
    values = {name: columns[name] for name in _LAUNCH_COLUMNS}
    if not done:  # SQLite continues from there
        values["id"] = np.arange(first_id, first_id + len(values["trace_id"]))
    _insert_columns(connection, "launches", values)


def _insert_columns(
    connection: sqlite3.Connection, table: str, columns: Mapping[str, Column]
) -> None:
    """Insert rows given as columns of equal length; NONE becomes NULL where there can be one."""
    first = next(iter(columns))  # always has a mark: a row of none could not be repeated
    marks = {
        name: _mark(column, nullable=name not in _NEVER_NULL, fixed=name != first)
        for name, column in columns.items()
    }
    told = [columns[name] for name, mark in marks.items() if "?" in mark]
    rows = np.stack(told, axis=1)
    row = f"({', '.join(marks.values())})"
    insert = f"INSERT INTO {table} ({', '.join(columns)}) VALUES "
    single, many = insert + row, insert + ", ".join([row] * ROWS_PER_STATEMENT)
    whole = len(rows) - len(rows) % ROWS_PER_STATEMENT
    for begin in range(0, whole, BLOCK):
        block = rows[begin : min(begin + BLOCK, whole)]
        connection.executemany(many, block.reshape(-1, ROWS_PER_STATEMENT * len(told)).tolist())
    connection.executemany(single, rows[whole:].tolist())


def _mark(column: Column, *, nullable: bool, fixed: bool) -> str:
    """What stands for a column in a statement: a mark for the value of each row, or, where it may be
    fixed, the one value of all.
    """
    low, high = int(column.min()), int(column.max())
    if low == high and fixed:
        return "NULL" if nullable and low == NONE else str(low)
    return f"nullif(?, {NONE})" if nullable and low <= NONE <= high else "?"


def _insert_groups(
    connection: sqlite3.Connection, trace_id: int, grouped: Grouped, *, foreign: bool
) -> None:
    """Insert groups twice: op paths taken together (each shows its busiest one), and apart."""
    op_paths = grouped.keys[:, -1]
    origin = int(grouped.fine.first.min()) if foreign else 0  # a foreign trace has no calls
    for by_op, groups, paths in (
        (0, grouped.coarse, op_paths[grouped.busiest()]),
        (1, grouped.fine, op_paths),
    ):
        keys = dict(zip(_GROUP_KEYS, grouped.keys[groups.index].T, strict=True))
        times = {
            "total_ns": groups.total,
            "median_ns": groups.median,
            "min_ns": groups.minimum,
            "max_ns": groups.maximum,
        }
        # One launch without a time leaves its group without one.
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
    """The forward op with the most launches; a backward op only where no forward one was seen."""
    # the name settles a tie, so that two ingests agree
    return min(seen, key=lambda op: (op.endswith("_backward"), -seen[op], op), default=None)


def _insert_metrics(
    connection: sqlite3.Connection, first_id: int, metrics: Metrics, kept: Iterable[Column]
) -> None:
    """Insert the metrics of the launches stored with the ids from first_id on.

    kept: blocks of their places in the trace, in the order of ids. A value that is NaN has no row.
    """
    # rising by the primary key, which WITHOUT ROWID keeps the table in
    order = sorted(range(len(metrics.names)), key=metrics.names.__getitem__)
    values = metrics.values[:, order]
    heads = [(metrics.names[index], metrics.units[index]) for index in order]
    rows = (
        (launch_id, *head, value)
        for launch_id, place in enumerate(chain.from_iterable(kept), first_id)
        for head, value in zip(heads, values[place].tolist(), strict=True)
        if value == value  # not NaN
    )
    insert = "INSERT INTO metrics (launch_id, name, unit, value) VALUES "
    while block := list(islice(rows, ROWS_PER_STATEMENT)):
        marks = ", ".join(["(?, ?, ?, ?)"] * len(block))
        connection.execute(insert + marks, list(chain.from_iterable(block)))
