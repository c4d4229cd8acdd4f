"""One parsed trace into rows: ranges, launches in column blocks, and the groups derived from
them.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from profharness.config import Config
from profharness.kernel_names import parse_kernel_name
from profharness.store.groups import Grouped, Grouping, Groups, busiest
from profharness.trace import (
    CELL_RANGE_PREFIX,
    NONE,
    LaunchBatch,
    LaunchConfig,
    Range,
    Trace,
    range_cell,
)

SDPA_OP = re.compile(r"aten::_scaled_dot_product_\w*attention\w*")


_LAUNCH_CONFIG_COLUMNS = (
    "grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "registers_per_thread",
    "static_shared_bytes", "dynamic_shared_bytes", "shared_bytes",
)  # fmt: skip
_CONFIG_COLUMNS = tuple(field.name for field in fields(Config))
_KERNEL_COLUMNS = (
    "short", "family", "backend", "arch", "dtype", "head_dim", "tile_m", "tile_n", "stages",
    "warps", "direction", "causal", "dropout",
)  # fmt: skip


def sdpa_op(path: str) -> str | None:
    """The innermost SDPA implementation op of a folded op path; the composite op that dispatches to
    it does not count.
    """
    for op in reversed(path.split(";")):
        if SDPA_OP.fullmatch(op):
            return op
    return None


def kernels(connection: sqlite3.Connection, names: list[str], kinds: list[str]) -> list[int]:
    """Ids of kernels by canonical name and kind, in the order given."""
    return [_kernel(connection, name, kind) for name, kind in zip(names, kinds, strict=True)]


def _kernel(connection: sqlite3.Connection, name: str, kind: str) -> int:
    found = connection.execute(
        "SELECT id FROM kernels WHERE name = ? AND kind = ?", (name, kind)
    ).fetchone()
    if found:
        return int(found[0])
    parsed = parse_kernel_name(name, kind)
    values = {column: getattr(parsed, column) for column in _KERNEL_COLUMNS}
    return _insert(connection, "kernels", {"name": name, "kind": kind} | values)


def launch_configs(connection: sqlite3.Connection, configs: Iterable[LaunchConfig]) -> list[int]:
    """Ids of launch configurations, in the order given."""
    ids = []
    for config in configs:
        values = (
            *(config.grid or (None,) * 3),
            *(config.block or (None,) * 3),
            config.registers_per_thread,
            config.static_shared_bytes,
            config.dynamic_shared_bytes,
            config.shared_bytes,
        )
        row = dict(zip(_LAUNCH_CONFIG_COLUMNS, values, strict=True))
        ids.append(_same_row(connection, "launch_configs", row))
    return ids


def configs(connection: sqlite3.Connection, asked: Iterable[Config]) -> dict[Config, int]:
    """Ids of attention configs."""
    ids = {}
    for config in set(asked):
        row = {name: getattr(config, name) for name in _CONFIG_COLUMNS}
        ids[config] = _same_row(connection, "configs", {"label": config.label} | row)
    return ids


def op_paths(connection: sqlite3.Connection, paths: Iterable[str]) -> list[int]:
    """Ids of folded op paths, in the order given."""
    ids = []
    for path in paths:
        found = connection.execute("SELECT id FROM op_paths WHERE path = ?", (path,)).fetchone()
        row: dict[str, object] = {"path": path, "sdpa_op": sdpa_op(path)}
        ids.append(int(found[0]) if found else _insert(connection, "op_paths", row))
    return ids


def names(connection: sqlite3.Connection, table: str, values: Iterable[str]) -> list[int]:
    """Ids of names in a table of id and name (`apis`, `range_names`), in the order given."""
    known: dict[str, int] = {}
    ids = []
    for value in values:
        if value not in known:
            known[value] = _same_row(connection, table, {"name": value})
        ids.append(known[value])
    return ids


def _same_row(connection: sqlite3.Connection, table: str, row: dict[str, object]) -> int:
    """The id of the row with exactly these values, NULLs included, inserted if there is none."""
    where = " AND ".join(f"{column} IS ?" for column in row)
    found = connection.execute(
        f"SELECT id FROM {table} WHERE {where}", tuple(row.values())
    ).fetchone()
    return int(found[0]) if found else _insert(connection, table, row)


def _insert(connection: sqlite3.Connection, table: str, row: dict[str, object]) -> int:
    marks = ", ".join("?" * len(row))
    cursor = connection.execute(
        f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values())
    )
    return int(cursor.lastrowid or 0)


if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]


BLOCK = 8192
PIECE = 32768  # launches looked up and grouped at once
ROWS_PER_STATEMENT = 64
MAX_COUNTS_SHOWN = 20


_COLUMNS = (
    "trace_id", "cell_id", "iteration", "kernel_id", "launch_config_id", "op_path_id", "range_id",
    "api_id", "device", "stream", "correlation", "graph_node", "pid", "tid", "launch_ns",
    "start_ns", "duration_ns", "bytes",
)  # fmt: skip
_REQUIRED = {"trace_id", "kernel_id", "launch_config_id", "device", "start_ns", "duration_ns"}
_GROUP_COLUMNS = (
    "trace_id, by_op, cell_id, range_name_id, kernel_id, launch_config_id, op_path_id, device, "
    "launches, total_ns, median_ns, min_ns, max_ns, first_ns"
)


@dataclass(frozen=True, slots=True)
class CellTrace:
    """What one trace says about one cell: its profiled calls, the launches of each, and the SDPA op
    seen.
    """

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
    """What came of one trace: launches stored and dropped, and what it says about each cell.

    kept has, block by block, the places in the trace of the launches stored; only for a trace with
    metrics.
    """

    launches: int = 0
    dropped: int = 0
    kept: list[Column] = field(default_factory=list)
    cells: list[CellTrace] = field(default_factory=list)
    unknown_cells: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Lookups:
    """From a trace's indices to row ids; the last element of each stands for NONE, so that index -1
    finds it.
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
    """of each range's cell (or of the whole trace): when its first call began"""


def insert_trace(
    connection: sqlite3.Connection,
    trace_id: int,
    trace: Trace,
    batches: Iterable[LaunchBatch],
    cells: dict[str, int] | None,
    progress: Callable[[int], None] | None = None,
) -> Inserted:
    """Insert a trace's ranges, launches and groups inside the caller's transaction.

    cells maps a run's cell ids to row ids; launches outside of them are dropped and counted. None
    (a foreign trace) keeps all.
    """
    calls = _cell_calls(trace.ranges, cells or {})
    look = _lookups(connection, trace_id, trace, calls, cells or {})
    statement = _launch_statement(1), _launch_statement(ROWS_PER_STATEMENT)
    result = Inserted()
    per_call = {(cells or {})[cell]: np.zeros(call.count, np.int64) for cell, call in calls.items()}
    grouped = None
    with Grouping() as grouping:
        for batch in chain.from_iterable(map(_pieces, batches)):
            keep = slice(None) if cells is None else _in_cells(batch, look)
            if trace.metrics is not None:
                places = np.arange(len(batch.kernel)) + result.launches + result.dropped
                result.kept.append(places[keep])
            rows, keys = _batch_columns(trace_id, batch, look, keep)
            result.dropped += len(batch.kernel) - len(rows)
            result.launches += len(rows)
            _insert_rows(connection, statement, rows)
            *columns, duration, start, iteration = keys
            if len(rows):
                grouping.add(columns, duration, start)
            _count_calls(per_call, columns[0], iteration)
            if progress:
                progress(len(batch.kernel))
        if result.launches:
            grouped = grouping.finish()
            _insert_groups(connection, trace_id, grouped, foreign=cells is None)
    if cells is not None:
        seen = {range_cell(item.name) for item in trace.ranges} - {None}
        result.unknown_cells = tuple(sorted(str(cell) for cell in seen if cell not in cells))
        result.cells = _cell_traces(connection, trace_id, calls, cells, per_call, grouped)
    return result


def _pieces(batch: LaunchBatch) -> Iterator[LaunchBatch]:
    """The batch in views of at most PIECE launches."""
    for begin in range(0, len(batch.kernel), PIECE):
        rows = slice(begin, begin + PIECE)
        yield LaunchBatch(*(getattr(batch, item.name)[rows] for item in fields(LaunchBatch)))


def _count_calls(per_call: dict[int, Column], cell: Column, iteration: Column) -> None:
    """Add a piece's launches to each cell's calls."""
    if per_call:
        for seen in np.unique(cell).tolist():
            counts = per_call[seen]
            counts += np.bincount(iteration[cell == seen], minlength=len(counts))


@dataclass(frozen=True, slots=True)
class _Calls:
    """The profiled calls of one cell: the ordinal of the call that each of its ranges belongs
    to.
    """

    ordinal_of_range: dict[int, int]
    count: int
    start_ns: int


def _cell_calls(ranges: Sequence[Range], cells: dict[str, int]) -> dict[str, _Calls]:
    """Calls by cell. Ranges of one cell that overlap (push/pop and start/end of one call) are the
    same call.
    """
    by_cell: dict[str, list[int]] = {}
    for index, item in enumerate(ranges):
        if item.name.startswith(CELL_RANGE_PREFIX):
            cell = range_cell(item.name)
            if cell in cells:
                by_cell.setdefault(str(cell), []).append(index)
    return {cell: _calls(ranges, indices) for cell, indices in by_cell.items()}


def _calls(ranges: Sequence[Range], indices: list[int]) -> _Calls:
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


def _lookups(
    connection: sqlite3.Connection,
    trace_id: int,
    trace: Trace,
    calls: dict[str, _Calls],
    cells: dict[str, int],
) -> _Lookups:
    range_names = names(connection, "range_names", (item.name for item in trace.ranges))
    cell = np.full(len(trace.ranges) + 1, NONE, np.int64)
    iteration, origin = cell.copy(), np.zeros(len(trace.ranges) + 1, np.int64)
    for name, call in calls.items():
        for index, ordinal in call.ordinal_of_range.items():
            cell[index], iteration[index], origin[index] = cells[name], ordinal, call.start_ns
    return _Lookups(
        kernel=_lookup(kernels(connection, trace.kernels, trace.kernel_kinds)),
        launch_config=_lookup(launch_configs(connection, trace.launch_configs)),
        op_path=_lookup(op_paths(connection, trace.op_paths)),
        api=_lookup(names(connection, "apis", trace.apis)),
        range=_lookup(_insert_ranges(connection, trace_id, trace, range_names, cell, iteration)),
        range_name=_lookup(range_names),
        cell=cell,
        iteration=iteration,
        origin=origin,
    )


def _lookup(ids: Sequence[int]) -> Column:
    return np.array([*ids, NONE], np.int64)


def _insert_ranges(
    connection: sqlite3.Connection,
    trace_id: int,
    trace: Trace,
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
                zip(trace.ranges, names, cell.tolist(), iteration.tolist(), strict=False)
            )
        ),
    )  # fmt: skip
    return range(base, base + len(trace.ranges))


def _in_cells(batch: LaunchBatch, look: _Lookups) -> NDArray[np.bool_]:
    inside: NDArray[np.bool_] = look.cell[batch.cell_range] != NONE
    return inside


def _batch_columns(
    trace_id: int, batch: LaunchBatch, look: _Lookups, keep: NDArray[np.bool_] | slice
) -> tuple[Column, tuple[Column, ...]]:
    """The kept launches of a batch as a matrix of rows, and the columns that grouping needs."""
    cell_range = batch.cell_range[keep]
    inner = batch.range[keep]
    inner = np.where(inner == NONE, cell_range, inner)
    cell = look.cell[cell_range]
    columns = (
        np.full(len(inner), trace_id, np.int64),
        cell,
        look.iteration[cell_range],
        look.kernel[batch.kernel[keep]],
        look.launch_config[batch.launch_config[keep]],
        look.op_path[batch.op_path[keep]],
        look.range[inner],
        look.api[batch.api[keep]],
        *(
            getattr(batch, name)[keep]
            for name in ("device", "stream", "correlation", "graph_node", "pid", "tid")
        ),
        batch.launch_ns[keep],
        batch.start_ns[keep],
        batch.duration_ns[keep],
        batch.bytes[keep],
    )
    keys = (
        cell, look.range_name[inner], columns[3], columns[4], columns[8], columns[5],
        columns[16], columns[15] - look.origin[cell_range], columns[2],
    )  # fmt: skip
    return np.stack(columns, axis=1), keys


def _launch_statement(rows: int) -> str:
    marks = ", ".join("?" if name in _REQUIRED else "nullif(?, -1)" for name in _COLUMNS)
    values = ", ".join([f"({marks})"] * rows)
    return f"INSERT INTO launches ({', '.join(_COLUMNS)}) VALUES {values}"


def _insert_rows(connection: sqlite3.Connection, statements: tuple[str, str], rows: Column) -> None:
    single, many = statements
    whole = len(rows) - len(rows) % ROWS_PER_STATEMENT
    for begin in range(0, whole, BLOCK):
        block = rows[begin : min(begin + BLOCK, whole)]
        connection.executemany(many, block.reshape(-1, ROWS_PER_STATEMENT * len(_COLUMNS)).tolist())
    connection.executemany(single, rows[whole:].tolist())


def _insert_groups(
    connection: sqlite3.Connection, trace_id: int, grouped: Grouped, *, foreign: bool
) -> None:
    """Insert groups twice: with op paths taken together (each showing its busiest one) and
    apart. A foreign trace's first_ns counts from its first launch.
    """
    fine, coarse, op = grouped.fine, grouped.coarse, grouped.keys[:, -1]
    origin = int(fine.first.min()) if foreign else 0
    shown = op[busiest(grouped.coarse_of, fine, coarse)]
    for by_op, groups, paths in ((0, coarse, shown), (1, fine, op)):
        connection.executemany(
            f"INSERT INTO launch_groups ({_GROUP_COLUMNS}) VALUES (?, ?, nullif(?, -1), "
            "nullif(?, -1), ?, ?, nullif(?, -1), ?, ?, ?, ?, ?, ?, ?)",
            _group_rows(trace_id, by_op, groups, grouped.keys[groups.index], paths, origin),
        )


def _group_rows(
    trace_id: int, by_op: int, groups: Groups, keys: Column, paths: Column, origin: int
) -> list[list[int]]:
    cell, range_name, kernel, launch_config, device, _ = keys.T
    constant = np.ones(len(groups.index), np.int64)
    # One launch without a time (NONE) leaves its whole group without one.
    total, median, maximum = (
        np.where(groups.minimum == NONE, NONE, values)
        for values in (groups.total, groups.median, groups.maximum)
    )
    rows = np.stack(
        (
            constant * trace_id, constant * by_op, cell, range_name, kernel, launch_config, paths,
            device, groups.count, total, median, groups.minimum, maximum,
            groups.first - origin,
        ),
        axis=1,
    )  # fmt: skip
    ordered: list[list[int]] = rows[np.lexsort((groups.first, cell))].tolist()
    return ordered


def _cell_traces(
    connection: sqlite3.Connection,
    trace_id: int,
    calls: dict[str, _Calls],
    cells: dict[str, int],
    launches: dict[int, Column],
    grouped: Grouped | None,
) -> list[CellTrace]:
    found: dict[int, list[tuple[int, int]]] = {}
    if grouped:
        keys = grouped.keys
        members = zip(
            keys[:, 0].tolist(), keys[:, -1].tolist(), grouped.fine.count.tolist(), strict=True
        )
        for owner, op, count in members:
            found.setdefault(owner, []).append((op, count))
    ops = dict(connection.execute("SELECT id, sdpa_op FROM op_paths WHERE sdpa_op IS NOT NULL"))
    answers = []
    for cell, call in calls.items():
        per_call = launches[cells[cell]].tolist()
        seen: Counter[str] = Counter()
        for op, count in found.get(cells[cell], ()):
            if op in ops:
                seen[ops[op]] += count
        answers.append(CellTrace(cell, tuple(per_call), _main_op(seen)))
        connection.execute(
            "INSERT INTO trace_cells (trace_id, cell_id, calls, start_ns, launches) "
            "VALUES (?, ?, ?, ?, ?)",
            (trace_id, cells[cell], call.count, call.start_ns, sum(per_call)),
        )
    return answers


def _main_op(seen: Counter[str]) -> str | None:
    """The forward op with the most launches; a backward op only where no forward one was seen."""
    if not seen:
        return None
    return min(seen, key=lambda op: (op.endswith("_backward"), -seen[op], op))


def to_json(value: object) -> str:
    """Canonical JSON: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
