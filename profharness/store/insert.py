"""Insert a parsed trace with its ranges, launches, groups, hardware counters and attention calls.

Columns of `launches` and `calls` have the same names as attributes of `LaunchBatch` and
`AttentionCall`.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from profharness.errors import counted
from profharness.rows import axes
from profharness.store.groups import Grouping
from profharness.store.tables import (
    GROUP_KEYS,
    ROWS_PER_STATEMENT,
    columns_of,
    config_ids,
    fields_of,
    insert_row,
    insert_rows,
    insert_statement,
    row_id,
    to_json,
)
from profharness.trace import (
    CELL_RANGE_PREFIX,
    NONE,
    AttentionCall,
    HardwareMetrics,
    LaunchBatch,
    LaunchConfig,
    Range,
    Trace,
    range_cell,
)
from profharness.traces.kernel_names import parse_kernel_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from profharness.traces.observed import Journals

    Column = NDArray[np.int64]

Calls = dict[str, dict[int, int]]
"""Maps each cell to a dict from the index of a range to the number of the profiled call."""

SDPA_OP = re.compile(r"aten::_scaled_dot_product_\w*attention\w*")
BLOCK = 8192
PIECE = 32768  # maximum number of launches that are looked up and grouped at once
_INDICES = ("kernel", "launch_config", "op_path", "api")  # columns that are replaced by row ids
_UNCHANGED = tuple(
    item.name
    for item in fields(LaunchBatch)
    if item.name not in (*_INDICES, "range", "cell_range", "call_span")
)
KERNEL_COLUMNS = (
    "call_id", "direction", "kernel_id", "launch_config_id", "launches", "total_ns", "first_ns",
)  # fmt: skip


def sdpa_op(path: str) -> str | None:
    """Return the innermost op of an op path that implements SDPA, or None if there is no such op.

    Ignore the composite op scaled_dot_product_attention, because this op calls one of the others.
    """
    return next((op for op in reversed(path.split(";")) if SDPA_OP.fullmatch(op)), None)


@dataclass(slots=True)
class Inserted:
    """The result of inserting a trace, with the numbers of stored and dropped launches."""

    launches: int = 0
    dropped: int = 0
    cells: dict[str, tuple[list[int], str | None]] = field(default_factory=dict)
    """For each cell, the number of launches in each profiled call, and the SDPA op."""
    unknown_cells: tuple[str, ...] = ()


def insert_trace(
    connection: sqlite3.Connection,
    trace_id: int,
    trace: Trace,
    batches: Iterable[LaunchBatch],
    cells: dict[str, int] | None,
    progress: Callable[[int], None] | None = None,
) -> Inserted:
    """Insert the contents of a trace that has a row in `traces`, in the caller's transaction.

    `cells` maps the names of a run's cells to row ids. Launches outside of these cells are counted
    but not stored. For a foreign trace, `cells` is None, and all launches are stored.
    """
    calls = _cell_calls(trace.ranges, cells or {})
    ids = _row_ids(connection, trace_id, trace, calls, cells or {})
    # ids are assigned here, so that the launches of a trace have consecutive ids
    query = "SELECT coalesce(max(last_launch_id), 0) + 1 FROM traces"
    (first_id,) = connection.execute(query).fetchone()
    result = Inserted()
    kept: list[Column] = []
    grouping = Grouping(GROUP_KEYS)
    names = [name for name in columns_of(connection, "launches") if name != "id"]
    # attention calls are stored only if there are no cells
    calls_of = CallLaunches(trace) if cells is None else None
    for batch in chain.from_iterable(map(_pieces, batches)):
        keep = slice(None) if cells is None else ids["cell"][batch.cell_range] != NONE
        columns = _launch_columns(trace_id, batch, ids, keep)
        if trace.metrics is not None:
            kept.append(np.arange(len(batch.kernel))[keep] + result.launches + result.dropped)
        stored = len(columns["trace_id"])
        if calls_of:
            configs = ids["launch_config"][batch.launch_config]
            calls_of.add(batch, ids["kernel"][batch.kernel], configs)
        if stored:
            values = {name: columns[name] for name in names}
            if not result.launches:  # SQLite numbers the following rows itself
                values["id"] = np.arange(first_id, first_id + stored)
            _insert_columns(connection, "launches", values)
            keys = [columns[name] for name in GROUP_KEYS]
            grouping.add(keys, columns["duration_ns"], columns["first_ns"])
        result.dropped += len(batch.kernel) - stored
        result.launches += stored
        if progress:
            progress(len(batch.kernel))
    if calls_of:
        calls_of.insert(connection, trace_id)
    if result.launches:
        _insert_groups(connection, trace_id, grouping, foreign=cells is None)
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
        for cell, call in calls.items():
            start_ns = trace.ranges[next(iter(call))].start_ns
            row = {"trace_id": trace_id, "cell_id": cells[cell], "start_ns": start_ns}
            result.cells[cell] = _insert_trace_cell(connection, row, max(call.values()) + 1)
    return result


def _insert_trace_cell(
    connection: sqlite3.Connection, row: Mapping[str, int], calls: int
) -> tuple[list[int], str | None]:
    """Insert a row of `trace_cells`. Return the number of launches in each call, and the SDPA op.

    Prefer forward ops to backward ops. If there are several forward ops, return the op with the most
    launches.
    """
    launches = [0] * calls
    for iteration, number in connection.execute(
        "SELECT iteration, count(*) FROM launches WHERE cell_id = :cell_id AND trace_id = :trace_id "
        "GROUP BY iteration",
        row,
    ):
        launches[iteration] = number
    insert_row(connection, "trace_cells", {**row, "calls": calls, "launches": sum(launches)})
    op = connection.execute(
        "SELECT o.sdpa_op FROM launch_groups g JOIN op_paths o ON o.id = g.op_path_id "
        "WHERE g.trace_id = :trace_id AND g.by_op = 1 AND g.cell_id = :cell_id "
        "AND o.sdpa_op IS NOT NULL GROUP BY o.sdpa_op "
        "ORDER BY o.sdpa_op LIKE '%backward', sum(g.launches) DESC, o.sdpa_op LIMIT 1",
        row,
    ).fetchone()
    return launches, op[0] if op else None


def _pieces(batch: LaunchBatch) -> Iterator[LaunchBatch]:
    """Yield views of a batch with at most PIECE launches each.

    Raise ValueError for a device or duration below NONE, because such values would be grouped
    wrongly.
    """
    for name in ("device", "duration_ns"):
        least = int(getattr(batch, name).min(initial=0))
        if least < NONE:
            raise ValueError(f"a launch with {name} {least}")
    for begin in range(0, len(batch.kernel), PIECE):
        rows = slice(begin, begin + PIECE)
        yield LaunchBatch(*(getattr(batch, item.name)[rows] for item in fields(LaunchBatch)))


def _cell_calls(ranges: Sequence[Range], cells: Mapping[str, int]) -> Calls:
    """Return the profiled calls of each cell, sorted by start time.

    Overlapping ranges of a cell belong to the same call. A call may have a push/pop range and a
    start/end range.
    """
    # if ranges have the same start, the outer range comes first
    in_order = sorted(
        (item.start_ns, -item.duration_ns, index)
        for index, item in enumerate(ranges)
        if item.name.startswith(CELL_RANGE_PREFIX) and range_cell(item.name) in cells
    )
    calls: Calls = {}
    ends: dict[str, int] = {}
    for start, minus_duration, index in in_order:
        cell = str(range_cell(ranges[index].name))
        call = calls.setdefault(cell, {})
        last = next(reversed(call.values()), -1)
        is_new = not call or start >= ends[cell]
        call[index] = last + 1 if is_new else last
        ends[cell] = max(start if is_new else ends[cell], start - minus_duration)
    return calls


def _row_ids(
    connection: sqlite3.Connection,
    trace_id: int,
    trace: Trace,
    calls: Calls,
    cells: Mapping[str, int],
) -> dict[str, Column]:
    """Insert rows of small tables, and return arrays that map indices in the trace to row ids.

    The last element of each array is NONE, because the index -1 means that there is no value.
    `origin` contains for each range the start of the first call in the cell, or 0 outside of cells.
    """
    cell = np.full(len(trace.ranges) + 1, NONE, np.int64)
    iteration, origin = cell.copy(), np.zeros(len(trace.ranges) + 1, np.int64)
    for name, call in calls.items():
        start = trace.ranges[next(iter(call))].start_ns
        for index, ordinal in call.items():
            cell[index], iteration[index], origin[index] = cells[name], ordinal, start

    def lookup(ids: Iterable[int]) -> Column:
        return np.array([*ids, NONE], np.int64)

    def name_ids(table: str, names: Iterable[str]) -> Column:
        id_of = cache(lambda name: row_id(connection, table, {"name": name}))
        return lookup(map(id_of, names))

    def kernel_id(name: str, kind: str) -> int:
        key = {"name": name, "kind": kind}
        return row_id(
            connection, "kernels", key, lambda: asdict(parse_kernel_name(name, kind)) | key
        )

    def launch_config_id(config: LaunchConfig) -> int:
        values = asdict(config)
        shape = axes("grid", values.pop("grid")) | axes("block", values.pop("block"))
        return row_id(connection, "launch_configs", shape | values)

    def op_path_id(path: str) -> int:
        return row_id(connection, "op_paths", {"path": path}, lambda: {"sdpa_op": sdpa_op(path)})

    range_names = name_ids("range_names", (item.name for item in trace.ranges))
    ranges = _insert_ranges(connection, trace_id, trace.ranges, range_names, cell, iteration)
    return {
        "kernel": lookup(map(kernel_id, trace.kernels, trace.kernel_kinds)),
        "launch_config": lookup(map(launch_config_id, trace.launch_configs)),
        "op_path": lookup(map(op_path_id, trace.op_paths)),
        "api": name_ids("apis", trace.apis),
        "range": lookup(ranges),
        "range_name": range_names,
        "cell": cell,
        "iteration": iteration,
        "origin": origin,
    }


def _insert_ranges(
    connection: sqlite3.Connection,
    trace_id: int,
    ranges: Sequence[Range],
    names: Column,
    cell: Column,
    iteration: Column,
) -> range:
    """Insert all ranges and return their ids."""
    (base,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM ranges").fetchone()
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
            zip(ranges, names.tolist(), cell.tolist(), iteration.tolist(), strict=False)
        )
    )  # fmt: skip
    insert_rows(connection, "ranges", columns, rows)
    return range(base, base + len(ranges))


def _launch_columns(
    trace_id: int, batch: LaunchBatch, ids: Mapping[str, Column], keep: NDArray[np.bool_] | slice
) -> dict[str, Column]:
    """Return the columns of `launches` for the launches to keep.

    Add the columns `range_name_id` and `first_ns`, which are used for grouping.
    """
    cell_range = batch.cell_range[keep]
    inner = batch.range[keep]
    inner = np.where(inner == NONE, cell_range, inner)
    columns = {
        "trace_id": np.full(len(inner), trace_id, np.int64),
        "cell_id": ids["cell"][cell_range],
        "iteration": ids["iteration"][cell_range],
        "range_id": ids["range"][inner],
        "range_name_id": ids["range_name"][inner],
        **{name: getattr(batch, name)[keep] for name in _UNCHANGED},
    }
    for name in _INDICES:
        columns[f"{name}_id"] = ids[name][getattr(batch, name)[keep]]
    columns["first_ns"] = columns["start_ns"] - ids["origin"][cell_range]
    return columns


def _insert_columns(
    connection: sqlite3.Connection, table: str, columns: Mapping[str, Column]
) -> None:
    """Insert rows given as columns of equal length. Replace NONE with NULL in nullable columns.

    Write a column with equal values as a literal. The first column is always a parameter, because
    each row needs at least one parameter.
    """
    never_null = columns_of(connection, table)
    marks = {}
    for position, (name, column) in enumerate(columns.items()):
        low, high = int(column.min()), int(column.max())
        nullable = not never_null[name]
        marks[name] = f"nullif(?, {NONE})" if nullable and low <= NONE <= high else "?"
        if low == high and position:
            marks[name] = "NULL" if nullable and low == NONE else str(low)
    varying = [columns[name] for name, mark in marks.items() if "?" in mark]
    rows = np.stack(varying, axis=1)
    many = insert_statement(table, marks, ROWS_PER_STATEMENT)
    whole = len(rows) - len(rows) % ROWS_PER_STATEMENT
    for begin in range(0, whole, BLOCK):
        block = rows[begin : min(begin + BLOCK, whole)]
        connection.executemany(many, block.reshape(-1, ROWS_PER_STATEMENT * len(varying)).tolist())
    connection.executemany(insert_statement(table, marks), rows[whole:].tolist())


def _insert_groups(
    connection: sqlite3.Connection, trace_id: int, grouping: Grouping, *, foreign: bool
) -> None:
    """Insert coarse groups of launches without op paths, and fine groups with op paths."""
    grouped = grouping.finish()
    # In cells, times are already relative to the first call.
    origin = int(grouped[1]["first_ns"].min()) if foreign else 0
    for by_op, groups in enumerate(grouped):
        order = np.lexsort((groups["first_ns"], groups["cell_id"]))
        columns = {name: column[order] for name, column in groups.items()}
        # if a launch has no duration, the statistics of its group are unknown
        unknown = columns["min_ns"] == NONE
        for name in ("total_ns", "median_ns", "min_ns", "max_ns"):
            columns[name] = np.where(unknown, NONE, columns[name])
        columns["first_ns"] -= origin
        columns["trace_id"] = np.full_like(order, trace_id)
        columns["by_op"] = np.full_like(order, by_op)
        _insert_columns(connection, "launch_groups", columns)


def _insert_metrics(
    connection: sqlite3.Connection, first_id: int, metrics: HardwareMetrics, kept: Iterable[Column]
) -> None:
    """Insert the metrics of launches with consecutive ids from `first_id`.

    `kept` contains blocks of positions in the trace, one position per launch, in the order of ids.
    Insert no row for NaN, which means that the launch has no value for the metric.
    """
    # rows are inserted in the order of the primary key, because the table is WITHOUT ROWID
    order = sorted(range(len(metrics.names)), key=metrics.names.__getitem__)
    values = metrics.values[:, order]
    heads = [(metrics.names[index], metrics.units[index]) for index in order]
    rows = (
        (launch_id, *head, value)
        for launch_id, position in enumerate(chain.from_iterable(kept), first_id)
        for head, value in zip(heads, values[position].tolist(), strict=True)
        if value == value  # not NaN
    )
    insert_rows(connection, "metrics", ("launch_id", "name", "unit", "value"), rows)


class CallLaunches:
    """The sums of the launches of each attention call in a foreign trace.

    Launches are added in batches.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._directions = sorted({span.direction for span in trace.call_spans})
        spans = [(span.call, self._directions.index(span.direction)) for span in trace.call_spans]
        self._spans = np.array(spans, np.int64).reshape(-1, 2).T
        self._blocks: list[Column] = []

    def add(self, batch: LaunchBatch, kernel: Column, launch_config: Column) -> None:
        """Add a batch. `kernel` and `launch_config` are row ids."""
        mine = np.flatnonzero(batch.call_span >= 0)
        if len(mine):
            spans = self._spans[:, batch.call_span[mine]]
            figures = (np.ones_like(mine), batch.duration_ns[mine], batch.start_ns[mine])
            rows = np.stack([*spans, kernel[mine], launch_config[mine], *figures])
            self._blocks.append(_sum_by_key(rows))

    def insert(self, connection: sqlite3.Connection, trace_id: int) -> None:
        """Insert the steps, the calls and their kernels in the caller's transaction."""
        steps, calls = self._trace.steps, self._trace.calls
        for ordinal, step in enumerate(steps):
            row = {"trace_id": trace_id, "ordinal": ordinal, **asdict(step)}
            insert_row(connection, "steps", row)
        (first,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM calls").fetchone()
        configs = config_ids(connection, (call.config for call in calls))
        json_of = cache(to_json)
        # columns of `calls` whose values need no conversion
        shared = {item.name for item in fields(AttentionCall)} - {"modules", "tensors"}
        names = tuple(shared & columns_of(connection, "calls").keys())
        values_of = attrgetter(*names)
        insert_rows(
            connection,
            "calls",
            ("id", "trace_id", "ordinal", "config_id", "modules", "tensors", *names),
            (
                (
                    first + ordinal,
                    trace_id,
                    ordinal,
                    configs[call.config],
                    json_of(call.modules),
                    json_of(call.tensors),
                    *values_of(call),
                )
                for ordinal, call in enumerate(calls)
            ),
        )
        if self._blocks:
            call, direction, *rest = _sum_by_key(np.concatenate(self._blocks, axis=1))
            names_of = map(self._directions.__getitem__, direction.tolist())
            columns = ((first + call).tolist(), names_of, *(column.tolist() for column in rest))
            insert_rows(connection, "call_kernels", KERNEL_COLUMNS, zip(*columns, strict=True))


def _sum_by_key(rows: Column) -> Column:
    """Sum the launches that have equal keys. The first four columns of `rows` are the key.

    Return the call, direction, kernel and launch configuration of each key, with the number of
    launches, their total time and the earliest start. The result is sorted by key.
    """
    rows = rows[:, np.lexsort(rows[3::-1])]
    is_new = (rows[:4, 1:] != rows[:4, :-1]).any(axis=0)
    begins = np.flatnonzero(np.r_[True, is_new])
    sums = np.add.reduceat(rows[4:6], begins, axis=1)
    first = np.minimum.reduceat(rows[6], begins)
    return np.concatenate([rows[:4, begins], sums, first[None]])


def insert_journals(
    connection: sqlite3.Connection,
    run_id: int,
    journals: Journals,
    calls: Sequence[AttentionCall],
) -> list[str]:
    """Insert the calls that the observer recorded, and link calls in traces to observed calls.

    If a call in a trace lacks values, copy them from the observed call. Return the warnings.
    """
    from profharness.traces.observed import completed, match_calls

    observed, warnings = journals
    if not observed:
        return warnings
    configs = config_ids(connection, (item.call.config for item in observed))
    ids = []
    for item in observed:
        row = fields_of(connection, "templates", item.call, item)
        row |= {"run_id": run_id, "config_id": configs[item.call.config], "calls": item.count}
        ids.append(insert_row(connection, "templates", row))
    stored = connection.execute(
        "SELECT c.id FROM calls c JOIN traces t ON t.id = c.trace_id WHERE t.run_id = ? "
        "ORDER BY t.id, c.ordinal",
        (run_id,),
    ).fetchall()
    rows, lost = [], 0
    matches = match_calls(calls, observed)
    for index, call, (call_id,) in zip(matches, calls, stored, strict=True):
        whole = call if index is None else completed(call, observed[index])
        config = configs[whole.config] if call.config is None else None
        template = None if index is None else ids[index]
        rows.append((template, whole.kind, whole.compiled, config, whole.reason, call_id))
        lost += index is None and call.path is not None
    connection.executemany(
        "UPDATE calls SET template_id = ?, kind = ?, compiled = ?, "
        "config_id = coalesce(?, config_id), reason = ? WHERE id = ?",
        rows,
    )
    text = f"{counted(lost, 'call')} in the traces did not match a single observed kind of call"
    return [*warnings, *([text] if lost else [])]
