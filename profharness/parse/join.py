"""Joins: kernel to launch by correlation, launch to its op stack and ranges by time; everything
in bounded pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from profharness.parse import intervals as sweep
from profharness.parse.columns import Block, Ints, Spool, Tables
from profharness.trace import CELL_RANGE_PREFIX, Range

CHUNK_ROWS = 65536  # GPU rows joined at once
SLICE_ROWS = 262144  # ops (by start) in one time slice


@dataclass(slots=True)
class Source:
    """Merged tables, the spools by owner, and for each owner the arrays that map its string ids
    to merged ones.
    """

    tables: Tables
    spools: list[Spool]
    maps: list[dict[str, Ints]]

    def gpu(self, block: Block) -> Ints:
        """Rows (chrome_columns.GPU_ROW) with merged ids."""
        return self._mapped(block, {2: "kernels", 3: "configs"})

    def launches(self, block: Block) -> Ints:
        """Rows (chrome_columns.LAUNCH_ROW) with merged ids."""
        return self._mapped(block, {1: "apis", 2: "threads"})

    def ops(self, block: Block) -> Ints:
        """Rows (chrome_columns.OP_ROW) with merged ids."""
        return self._mapped(block, {2: "threads", 3: "names"})

    def _mapped(self, block: Block, columns: dict[int, str]) -> Ints:
        rows = self.spools[block.owner].read(block)
        if block.owner:
            rows = rows.copy()
            for column, table in columns.items():
                rows[column] = self.maps[block.owner][table][rows[column]]
        return rows


def merge(tables: list[Tables], spools: list[Spool]) -> Source:
    """One set of tables out of one per process; blocks come into file order."""
    merged = tables[0]
    maps: list[dict[str, Ints]] = [{}]
    for owner, other in enumerate(tables[1:], start=1):
        mine: dict[str, Ints] = {}
        for name in ("threads", "kernels", "configs", "apis", "names"):
            into, values = getattr(merged, name), getattr(other, name)
            ids = [into.setdefault(value, len(into)) for value in values]
            mine[name] = np.array(ids, np.int64)
        maps.append(mine)
        merged.ranges += [(n, s, d, int(mine["threads"][t])) for n, s, d, t in other.ranges]
        for name in ("gpu", "launches", "ops"):
            getattr(merged, name).extend(
                Block(b.order, b.offset, b.columns, b.rows, b.low, b.high, owner)
                for b in getattr(other, name)
            )
        merged.events += other.events
        merged.skipped += other.skipped
    for name in ("gpu", "launches", "ops"):
        getattr(merged, name).sort(key=lambda block: block.order)
    return Source(merged, spools, maps)


@dataclass(slots=True)
class Linked:
    """A chunk of GPU rows and what they were joined with; -1 where there is nothing."""

    gpu: Ints
    api: Ints
    thread: Ints
    launch: Ints


def linked_chunks(source: Source, *, rows: int = CHUNK_ROWS) -> Iterator[Linked]:
    """GPU rows in file order, each with its launching call; of calls that share a correlation
    the first in the file wins.
    """
    for blocks in _groups(source.tables.gpu, rows):
        gpu = np.concatenate([source.gpu(block) for block in blocks], axis=1)
        correlation = gpu[6]
        linked = Linked(gpu, *(np.full(len(correlation), -1, np.int64) for _ in range(3)))
        open_rows = np.flatnonzero(correlation >= 0)
        low, high = min(b.low for b in blocks), max(b.high for b in blocks)
        overlapping = [b for b in source.tables.launches if b.low <= high and b.high >= low]
        for group in _groups(overlapping, 4 * rows):
            if not len(open_rows):
                break
            calls = np.concatenate([source.launches(block) for block in group], axis=1)
            order = np.argsort(calls[0], kind="stable")
            keys = calls[0][order]
            at = np.searchsorted(keys, correlation[open_rows])
            hit = at < len(keys)
            hit[hit] = keys[at[hit]] == correlation[open_rows[hit]]
            found, target = order[at[hit]], open_rows[hit]
            linked.api[target], linked.thread[target] = calls[1][found], calls[2][found]
            linked.launch[target] = calls[3][found]
            open_rows = open_rows[~hit]
        yield linked


def _groups(blocks: list[Block], rows: int) -> Iterator[list[Block]]:
    """Consecutive blocks of about `rows` rows together."""
    group: list[Block] = []
    count = 0
    for block in blocks:
        if group and count + block.rows > rows:
            yield group
            group, count = [], 0
        group.append(block)
        count += block.rows
    if group:
        yield group


@dataclass(slots=True)
class OpSlice:
    """Every op that overlaps one time slice."""

    intervals: sweep.Intervals
    names: Ints
    durations: Ints
    paths: Ints  # stack id of each op, -1 until somebody asks


class Stacks:
    """Folded op stacks of launches, looked up slice by slice."""

    def __init__(self, source: Source, *, rows: int = SLICE_ROWS) -> None:
        self._source = source
        self.paths: dict[tuple[int, int], int] = {}
        self.borders = _borders(source.tables.ops, rows)
        self._cache: dict[int, OpSlice] = {}

    def lookup(self, thread: Ints, t: Ints) -> Ints:
        """Ids of the stacks open on each thread at each time, -1 for none."""
        result = np.full(len(t), -1, np.int64)
        if not self._source.tables.ops:
            return result
        number = np.searchsorted(self.borders, t, side="right")
        number[thread < 0] = -1
        for one in np.unique(number[number >= 0]):
            mine = np.flatnonzero(number == one)
            ops = self.slice(int(one))
            at = sweep.innermost(ops.intervals, thread[mine], t[mine])
            result[mine] = self.stack_ids(ops, at, t[mine])
        return result

    def stack_ids(self, ops: OpSlice, at: Ints, t: Ints) -> Ints:
        """Stack ids for op indices `at` as seen at times t (-1 stays -1)."""
        result = np.full(len(at), -1, np.int64)
        has = np.flatnonzero(at >= 0)
        nested = ops.intervals.nested[at[has]]
        self._name_paths(ops, at[has[nested]])
        result[has[nested]] = ops.paths[at[has[nested]]]
        for row in has[~nested]:
            path = -1
            for index in ops.intervals.chain(int(at[row]), int(t[row])):
                path = self._intern(path, int(ops.names[index]))
            result[row] = path
        return result

    def _name_paths(self, ops: OpSlice, at: Ints) -> None:
        """Fill in ops.paths for the ops `at` and all their ancestors."""
        wanted = _closure(ops.intervals.parent, at, ops.paths)
        if not len(wanted):
            return
        parents, names = ops.intervals.parent[wanted].tolist(), ops.names[wanted].tolist()
        paths, known, intern = ops.paths, {-1: -1}, self.paths
        for index, parent, name in zip(wanted.tolist(), parents, names, strict=True):
            above = known.get(parent)
            key = (int(paths[parent]) if above is None else above, name)
            known[index] = intern.setdefault(key, len(intern))
        paths[wanted] = [known[index] for index in wanted.tolist()]

    def _intern(self, above: int, name: int) -> int:
        return self.paths.setdefault((above, name), len(self.paths))

    def slice(self, number: int) -> OpSlice:
        """The ops that overlap time slice `number`."""
        if number not in self._cache:
            while len(self._cache) > 1:
                self._cache.pop(next(iter(self._cache)))
            self._cache[number] = self._load(number)
        return self._cache[number]

    def _load(self, number: int) -> OpSlice:
        low = self.borders[number - 1] if number > 0 else -(1 << 62)
        high = self.borders[number] if number < len(self.borders) else 1 << 62
        parts = []
        for block in self._source.tables.ops:
            if block.low < high and block.high >= low:
                rows = self._source.ops(block)
                inside = (rows[0] < high) & (np.maximum(rows[1], rows[0] + 1) > low)
                parts.append(rows[:, inside])
        rows = np.concatenate(parts, axis=1) if parts else np.empty((4, 0), np.int64)
        intervals = sweep.build(rows[2], rows[0], rows[1])
        durations = (rows[1] - rows[0])[intervals.rows]
        none = np.full(len(durations), -1, np.int64)
        return OpSlice(intervals, rows[3][intervals.rows], durations, none)

    def folded(self) -> list[str]:
        """The stacks as text, outermost first, by id."""
        names = [name.replace(";", ",") for name in self._source.tables.names]
        texts: list[str] = []
        for above, name in self.paths:
            texts.append(names[name] if above < 0 else f"{texts[above]};{names[name]}")
        return texts


def _closure(parent: Ints, start: Ints, paths: Ints) -> Ints:
    """`start` and all ancestors that have no path yet, ascending, so that parents come first."""
    marked = np.zeros(len(parent), np.bool_)
    level = start
    while len(level):
        level = level[(paths[level] < 0) & ~marked[level]]
        marked[level] = True
        level = parent[level]
        level = level[level >= 0]
    return np.flatnonzero(marked)


def _borders(blocks: list[Block], rows: int) -> Ints:
    """Times that cut the ops into slices of about `rows` starts; blocks count at the time their
    first op starts.
    """
    borders = []
    count = 0
    for block in sorted(blocks, key=lambda block: block.low):
        if count and count + block.rows > rows:
            borders.append(block.low)
            count = 0
        count += block.rows
    return np.unique(np.array(borders, np.int64))


class Ranges:
    """User ranges with parents, and which of them a launch lies in."""

    def __init__(self, tables: Tables, threads: list[tuple[int, int]], base: int) -> None:
        order = sorted(tables.ranges, key=lambda r: (r[1], -r[2], threads[r[3]], r[0]))
        self.names = [row[0] for row in order]
        start = np.array([row[1] for row in order], np.int64)
        end = start + np.array([row[2] for row in order], np.int64)
        thread = np.array([row[3] for row in order], np.int64)
        self._process = _process_ids(threads)
        self._all = sweep.build(thread, start, end)
        cell = np.array([name.startswith(CELL_RANGE_PREFIX) for name in self.names], np.bool_)
        self._cells = np.flatnonzero(cell)
        mine = self._cells
        self._own = sweep.build(thread[mine], start[mine], end[mine])
        processes = self._process[thread[mine]] if len(mine) else thread[mine]
        self._any = sweep.build(processes, start[mine], end[mine])
        back = self._all
        parents = [-1] * len(order)
        for at, row in enumerate(back.rows.tolist()):
            parents[row] = _enclosing_parent(back, at)
        self.rows = [
            Range(n, s + base, d, *threads[t], None if p < 0 else p)
            for (n, s, d, t), p in zip(order, parents, strict=True)
        ]

    def lookup(self, thread: Ints, t: Ints) -> tuple[Ints, Ints]:
        """(range, cell_range) of launches on a thread at a time, as LaunchBatch documents them."""
        known = thread >= 0
        inner, cell = np.full(len(t), -1, np.int64), np.full(len(t), -1, np.int64)
        if not self.rows or not known.any():
            return inner, cell
        mine = np.flatnonzero(known)
        inner[mine] = _rows(self._all, sweep.innermost(self._all, thread[mine], t[mine]))
        if len(self._cells):
            own = _rows(self._own, sweep.innermost(self._own, thread[mine], t[mine]))
            processes = self._process[thread[mine]]
            other = _rows(self._any, sweep.innermost(self._any, processes, t[mine]))
            found = np.where(own >= 0, own, other)
            cell[mine] = np.where(found >= 0, self._cells[found], -1)
        return np.where(inner >= 0, inner, cell), cell


def _rows(intervals: sweep.Intervals, at: Ints) -> Ints:
    if not len(intervals.rows):
        return np.full(len(at), -1, np.int64)
    return np.where(at >= 0, intervals.rows[at], -1)


def _enclosing_parent(intervals: sweep.Intervals, at: int) -> int:
    """Row of the nearest interval that encloses all of this one, -1 for none."""
    above = int(intervals.parent[at])
    while above >= 0 and intervals.stop[above] < intervals.stop[at]:
        above = int(intervals.parent[above])
    return int(intervals.rows[above]) if above >= 0 else -1


def _process_ids(threads: list[tuple[int, int]]) -> Ints:
    ids: dict[int, int] = {}
    return np.array([ids.setdefault(pid, len(ids)) for pid, _ in threads], np.int64)
