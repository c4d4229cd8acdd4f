"""Find the API call, the ranges and the ops that each kernel belongs to.

A kernel is joined by its correlation ID to the API call that launched the kernel. The API call is
joined by time to the ranges and ops around the call. To bound the memory, the joins process a
limited number of rows at once and write the batches of launches to a temporary file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from profharness.trace import CELL_RANGE_PREFIX, NONE, LaunchBatch, LaunchConfig, Range, Trace
from profharness.traces.attention_calls import find_calls
from profharness.traces.columns import (
    Block,
    GpuRows,
    Ints,
    LaunchRows,
    OpRows,
    Spool,
    Tables,
    distinct,
    nothing,
)
from profharness.traces.intervals import AutogradNodes, Intervals
from profharness.traces.steps import gpu_work

CHUNK_ROWS = 65536  # number of GPU rows that are joined at once
SLICE_ROWS = 262144  # approximate number of ops that start in a time slice
MAX_DEPTH = 100  # maximum number of ops in a stack; PyTorch nests only a few dozen ops
FAR = 1 << 62  # later than every time in a trace

Lookup = Callable[[Ints, Ints], Ints]
Chunk = tuple[GpuRows, LaunchRows, Ints]
"""Launches, their API calls, and the ids of their op stacks. Unknown values are -1."""


class Attribution:
    """Finds the ranges, attention calls and op stacks of launches, and builds a Trace from them.

    Each row of `flows` is an arrow from a forward op to its backward op. The row contains a thread
    and a time at which the forward op runs, and a thread and a time at which the backward op runs.
    The rows are sorted by the first time. `threads` contains the (pid, tid) of each thread index.
    `base` is added to every time of the Trace.
    """

    def __init__(
        self,
        tables: Tables,
        flows: Ints,
        threads: list[tuple[int, int]],
        base: int,
        *,
        slice_rows: int = SLICE_ROWS,
    ) -> None:
        self._tables, self.base = tables, base
        evaluations = AutogradNodes(tables.evaluations)
        self.ranges = Ranges(tables, threads, base, evaluations.intervals, flows)
        self.calls, self.steps = find_calls(
            *(tables.details, evaluations, tables.modules, flows),
            *(self.ranges.rows, threads, base, lambda: gpu_work(tables)),
        )
        self.stacks = Stacks(tables, slice_rows)

    def make_trace(
        self,
        stack: ExitStack,
        chunks: Iterable[Chunk],
        kernels: Sequence[tuple[str, str]],
        configs: Sequence[LaunchConfig],
        **facts: Any,
    ) -> Trace:
        """Return a Trace whose launches are in a temporary file until `stack` is closed.

        `kernels` contains the (kind, name) of each kernel id. `facts` contains other fields of the
        Trace.
        """
        spool, blocks, count = Spool(stack), list[Block](), 0
        kernel_ids, config_ids, path_ids, api_ids = (Renumber() for _ in range(4))
        for gpu, launched, paths in chunks:
            thread, launch = launched.thread, launched.start
            inner, cell = self.ranges.lookup(thread, launch)
            batch = LaunchBatch(
                kernel=kernel_ids(gpu.kernel),
                launch_config=config_ids(gpu.config),
                op_path=path_ids(paths),
                range=inner,
                cell_range=cell,
                api=api_ids(launched.api),
                device=gpu.device,
                stream=gpu.stream,
                correlation=gpu.correlation,
                graph_node=gpu.node,
                pid=self.ranges.pids[thread],
                tid=self.ranges.tids[thread],
                launch_ns=np.where(thread >= 0, launch + self.base, NONE),
                start_ns=gpu.start + self.base,
                duration_ns=gpu.duration,
                bytes=gpu.bytes,
                call_span=self.calls.lookup(thread, launch, count),
            )
            blocks.append(spool.write([getattr(batch, column.name) for column in fields(batch)]))
            count += len(thread)
        folded, apis = self.stacks.folded(), list(self._tables.apis)
        return Trace(
            kernels=[kernels[row][1] for row in kernel_ids.order],
            kernel_kinds=[kernels[row][0] for row in kernel_ids.order],
            launch_configs=[configs[row] for row in config_ids.order],
            op_paths=[folded[row] for row in path_ids.order],
            apis=[apis[row] for row in api_ids.order],
            ranges=self.ranges.rows,
            num_launches=count,
            skipped=self._tables.skipped,
            batches=lambda: (LaunchBatch(*spool.read(block)) for block in blocks),
            calls=self.calls.calls,
            call_spans=self.calls.spans,
            steps=self.steps,
            **facts,
        )

    def op_chunks(self) -> Iterator[Chunk]:
        """Yield chunks of ops instead of launches. The ops in a chunk are sorted by end.

        The duration of an op excludes the time of its child ops.
        """
        waiting: dict[tuple[int, ...], int] = {}
        for number, border in enumerate([*self.stacks.borders.tolist(), FAR]):
            ops = self.stacks.slice(number)
            done, own, waiting = _own_times(ops, border, waiting)
            self.stacks.repeated += ops.repeated(done)
            if not len(done):
                continue
            thread, start = ops.intervals.thread[done], ops.intervals.start[done]
            pids, tids = self.ranges.pids[thread], self.ranges.tids[thread]
            # these keys do not depend on the order in which threads and names got their ids
            order = np.lexsort((tids, pids, start, ops.intervals.stop[done]))
            done, thread, start = done[order], thread[order], start[order]
            none = nothing(len(done))
            gpu = GpuRows(start, own[order], ops.names[done], np.zeros_like(none), *[none] * 5)
            launched = LaunchRows(none, none, thread, start)
            yield gpu, launched, self.stacks.stack_ids(ops, done, start)


class Ranges:
    """The user ranges of a trace, sorted by start and descending length, with a lookup by time."""

    def __init__(
        self,
        tables: Tables,
        threads: list[tuple[int, int]],
        base: int,
        evaluations: Intervals,
        flows: Ints,
    ) -> None:
        start, duration, thread, wide = np.array(tables.ranges, np.int64).reshape(-1, 4).T
        # indexed by thread; index -1 gives NONE
        self.pids, self.tids = np.array([*threads, (NONE, NONE)], np.int64).T
        ranks = {name: rank for rank, name in enumerate(sorted(set(tables.range_names)))}
        names = np.array([ranks[name] for name in tables.range_names], np.int64)
        # sort by all columns, so that the result does not depend on the order of the file
        order = np.lexsort((names, self.tids[thread], self.pids[thread], -duration, start))
        start, duration, thread = start[order], duration[order], thread[order]
        text = [tables.range_names[row] for row in order.tolist()]
        process, stop, every = self.pids[thread], start + duration, np.arange(len(text))
        own = Intervals(thread, start, stop)
        numbers = np.append(own.rows, NONE)
        parents = nothing(len(text))
        parents[own.rows] = numbers[own.enclosing()]
        cells = np.flatnonzero([name.startswith(CELL_RANGE_PREFIX) for name in text])
        self._own = _lookup(every, thread, start, stop)
        self._any = _lookup(every, process, start, stop)
        self._wide = _lookup(np.flatnonzero(wide[order]), process, start, stop)
        self._own_cells = _lookup(cells, thread, start, stop)
        self._any_cells = _lookup(cells, process, start, stop)
        self._open_threads = _open_threads(own, self.pids)
        self._forward = _forward(evaluations, flows) if len(flows) else None
        rows = (start + base, duration, process, self.tids[thread], parents)
        self.rows = [
            Range(name, s, d, pid, tid, None if parent == NONE else parent)
            for name, s, d, pid, tid, parent in zip(text, *(c.tolist() for c in rows), strict=True)
        ]

    def lookup(self, thread: Ints, t: Ints) -> tuple[Ints, Ints]:
        """Return the columns `range` and `cell_range` of LaunchBatch for API calls at (thread, t).

        If a call lies outside all ranges of its thread and outside all cells, its range is the
        first existing range of this list:

        1. the innermost start/end range of the process
        2. the innermost open range of the process, if only one thread has open ranges
        3. the range of the forward op, if the call belongs to a backward op
        """
        inner, cell = nothing(len(t)), nothing(len(t))
        launched = np.flatnonzero(thread >= 0)
        if not self.rows or not len(launched):
            return inner, cell
        thread, t = thread[launched], t[launched]
        process = self.pids[thread]
        own, mine = self._own_cells(thread, t), self._own(thread, t)
        cell[launched] = np.where(own >= 0, own, self._any_cells(process, t))
        mine = np.where(mine >= 0, mine, cell[launched])
        mine = np.where(mine >= 0, mine, self._wide(process, t))
        left = np.flatnonzero(mine < 0)
        if len(left):
            only = self._open_threads(process[left], t[left]) == 1
            mine[left] = np.where(only, self._any(process[left], t[left]), NONE)
        left = np.flatnonzero(mine < 0)
        if len(left) and self._forward is not None:
            mine[left] = self._own(*self._forward(thread[left], t[left]))
        inner[launched] = mine
        return inner, cell


def _lookup(rows: Ints, group: Ints, start: Ints, stop: Ints) -> Lookup:
    """Return a function that finds the innermost range at each (group, t).

    The function searches only the given rows. `group` is the thread or process of each range.
    """
    intervals = Intervals(group[rows], start[rows], stop[rows])
    numbers = np.append(rows[intervals.rows], NONE)  # so that index -1 gives NONE
    return lambda group, t: numbers[intervals.innermost(group, t)]


def _open_threads(ranges: Intervals, pids: Ints) -> Lookup:
    """Return a function that counts the threads with an open range at each (process, t)."""
    # A stretch is a time interval in which a thread always has an open range. It starts with a
    # range at whose start no earlier range of the thread is open.
    first = np.flatnonzero(ranges.parent == NONE)
    owner, start = pids[ranges.thread[first]], ranges.start[first]
    stop = np.maximum.reduceat(ranges.stop, first) if len(first) else start
    stretches = {
        number: (np.sort(start[owner == number]), np.sort(stop[owner == number]))
        for number in distinct(owner)
    }

    def count(process: Ints, t: Ints) -> Ints:
        result = np.zeros(len(t), np.int64)
        for number, (starts, stops) in stretches.items():
            mine = np.flatnonzero(process == number)
            begun = np.searchsorted(starts, t[mine], side="right")
            result[mine] = begun - np.searchsorted(stops, t[mine], side="right")
        return result

    return count


def _forward(evaluations: Intervals, flows: Ints) -> Callable[[Ints, Ints], tuple[Ints, Ints]]:
    """Return a function that maps (thread, t) in a backward op to (thread, t) in its forward op."""
    arrows = flows.T
    at = evaluations.innermost(arrows[2], arrows[3])
    origins = np.full((2, len(evaluations.start) + 1), NONE, np.int64)
    origins[:, at[at >= 0]] = arrows[:2, at >= 0]

    def lookup(thread: Ints, t: Ints) -> tuple[Ints, Ints]:
        found, start = origins[:, evaluations.innermost(thread, t)]
        return found, start

    return lookup


def linked_chunks(
    tables: Tables, counts: Counter[str], rows: int = CHUNK_ROWS
) -> Iterator[tuple[GpuRows, LaunchRows]]:
    """Yield chunks of GPU rows in file order, with the API call that launched each row.

    If several API calls have the same correlation ID, the first call is used, and the rows are
    counted as `ambiguous`.
    """
    for blocks in _groups(tables.gpu, rows):
        gpu = GpuRows(*tables.read(blocks))
        launched = np.full((len(LaunchRows._fields), len(gpu.start)), NONE, np.int64)
        left = np.flatnonzero(gpu.correlation >= 0)
        low, high = min(b.low for b in blocks), max(b.high for b in blocks)
        overlapping = [b for b in tables.launches if b.low <= high and b.high >= low]
        for group in _groups(overlapping, 4 * rows):
            if not len(left):
                break
            calls = tables.read(group)
            order = np.argsort(calls[0], kind="stable")
            keys, sought = calls[0][order], gpu.correlation[left]
            at = np.searchsorted(keys, sought)
            hit = at < len(keys)
            hit[hit] = keys[at[hit]] == sought[hit]
            at = at[hit]
            following = np.minimum(at + 1, len(keys) - 1)
            twice = (keys[following] == keys[at]) & (following > at)
            counts["ambiguous"] += int(np.count_nonzero(twice))
            launched[:, left[hit]] = calls[:, order[at]]
            left = left[~hit]
        yield gpu, LaunchRows(*launched)


def _groups(blocks: Sequence[Block], rows: int) -> Iterator[list[Block]]:
    """Yield groups of consecutive blocks. A group has up to `rows` rows, or is a single block."""
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
    """All ops that overlap a time slice."""

    intervals: Intervals
    names: Ints
    durations: Ints
    paths: Ints  # id of the stack of each op, or -1 if the stack has not been computed yet

    def repeated(self, rows: Ints) -> int:
        """Count the ops whose thread, times and name equal those of the previous op."""
        before, rows = rows[rows > 0] - 1, rows[rows > 0]
        columns = (self.intervals.thread, self.intervals.start, self.durations, self.names)
        alike = [column[rows] == column[before] for column in columns]
        return int(np.count_nonzero(np.logical_and.reduce(alike) & (self.durations[rows] > 0)))


class StackIds(dict[tuple[int, ...], int]):
    """Assigns ids to stacks of ops.

    A key consists of the id of the enclosing stack or -1, followed by the ids of the names of the
    ops inside this stack, outermost first. If a stack is deeper than MAX_DEPTH, only its outermost
    ops and its innermost op are kept. `deep` counts such stacks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, ...]] = []
        self.deep = 0
        self._depths: list[int] = []

    def __missing__(self, key: tuple[int, ...]) -> int:
        above, *names = key
        depth = len(names) + (self._depths[above] if above >= 0 else 0)
        if depth > MAX_DEPTH and above >= 0:
            self.deep += 1
            number = self[self.rows[above][0], *names]
        else:
            number = len(self.rows)
            self.rows.append(key)
            self._depths.append(depth)
        self[key] = number
        return number


class Stacks:
    """Finds the op stacks of launches. The ops are loaded one time slice at a time, to bound the
    memory.
    """

    def __init__(self, tables: Tables, rows: int) -> None:
        self._tables = tables
        self.paths = StackIds()
        self.repeated = 0  # number of ops that are copies of the previous op
        self.borders = _borders(tables.ops, rows)
        self._cache: dict[int, OpSlice] = {}

    def lookup(self, thread: Ints, t: Ints) -> Ints:
        """Return the id of the stack that is open at each (thread, t), or -1 if no op is open."""
        result = nothing(len(t))
        if not self._tables.ops:
            return result
        slices = np.searchsorted(self.borders, t, side="right")
        slices[thread < 0] = -1
        for number in distinct(slices[slices >= 0]):
            mine = np.flatnonzero(slices == number)
            ops = self.slice(number)
            at = ops.intervals.innermost(thread[mine], t[mine])
            result[mine] = self.stack_ids(ops, at, t[mine])
        return result

    def stack_ids(self, ops: OpSlice, at: Ints, t: Ints) -> Ints:
        """Return the ids of the stacks.

        The innermost op of each stack is the op `at` at the time `t`.

        If an element of `at` is -1, the id of the stack is -1.
        """
        result = nothing(len(at))
        has = np.flatnonzero(at >= 0)
        nested = ops.intervals.nested[at[has]]
        self._name_paths(ops, at[has[nested]])
        result[has[nested]] = ops.paths[at[has[nested]]]
        odd = has[~nested]
        chains = ops.intervals.chains(at[odd], t[odd], MAX_DEPTH + 1)
        self.paths.deep += int(np.count_nonzero(chains[:, MAX_DEPTH] >= 0))
        for row, chain in zip(odd.tolist(), chains[:, :MAX_DEPTH], strict=True):
            inner_first = ops.names[chain[chain >= 0]].tolist()
            result[row] = self.paths[-1, *reversed(inner_first)]
        return result

    def _name_paths(self, ops: OpSlice, at: Ints) -> None:
        """Set `ops.paths` for the ops `at` and all their ancestors."""
        parents, paths = ops.intervals.parent, ops.paths
        marked = np.zeros(len(parents), np.bool_)
        level = at
        while len(level):
            level = level[(paths[level] < 0) & ~marked[level]]
            marked[level] = True
            level = parents[level]
            level = level[level >= 0]
        left, count = np.flatnonzero(marked), len(self._tables.names)
        while len(left):  # each pass assigns ids to the ops whose parent already has an id
            above = np.where(parents[left] >= 0, paths[parents[left]], NONE)
            ready = (parents[left] < 0) | (above >= 0)
            rows, left = left[ready], left[~ready]
            pairs = (above[ready] + 1) * count + ops.names[rows]
            each, place = np.unique(pairs, return_inverse=True)
            keys = ((pair // count - 1, pair % count) for pair in each.tolist())
            paths[rows] = np.array([self.paths[key] for key in keys], np.int64)[place]

    def slice(self, number: int) -> OpSlice:
        if number not in self._cache:
            while len(self._cache) > 1:
                self._cache.pop(next(iter(self._cache)))
            self._cache[number] = self._load(number)
        return self._cache[number]

    def _load(self, number: int) -> OpSlice:
        low = self.borders[number - 1] if number > 0 else -FAR
        high = self.borders[number] if number < len(self.borders) else FAR
        parts = [np.empty((len(OpRows._fields), 0), np.int64)]
        for block in self._tables.ops:
            if block.low < high and block.high >= low:
                part = self._tables.spool.read(block)
                if block.low < low or block.high >= high:
                    start, end = part[:2]
                    part = part[:, (start < high) & (np.maximum(end, start + 1) > low)]
                parts.append(part)
        ops = OpRows(*np.concatenate(parts, axis=1))
        intervals = Intervals(ops.thread, ops.start, ops.end)
        durations = (ops.end - ops.start)[intervals.rows]
        return OpSlice(intervals, ops.name[intervals.rows], durations, nothing(len(durations)))

    def names(self, ids: Ints) -> Iterator[tuple[str, ...]]:
        """Yield the names of the ops in each stack, outermost first. Stack -1 has no ops."""
        texts = list(self._tables.names)
        known: dict[int, tuple[str, ...]] = {NONE: ()}
        for number in distinct(ids[ids >= 0]):
            chain, at = list[int](), number
            while at >= 0:
                at, *below = self.paths.rows[at]
                chain[:0] = below
            known[number] = tuple(texts[name] for name in chain)
        yield from map(known.__getitem__, ids.tolist())

    def number(self, names: Iterable[str]) -> int:
        """Return the id of the stack of these ops, or -1 if there are none."""
        ids = [self._tables.names[name] for name in names]
        return self.paths[-1, *ids] if ids else NONE

    def folded(self) -> list[str]:
        """Return the stacks in the order of their ids as text such as `outer op;inner op`."""
        names = [name.replace(";", ",") for name in self._tables.names]
        texts: list[str] = []
        for above, *below in self.paths.rows:
            own = ";".join(names[name] for name in below)
            texts.append(own if above < 0 else f"{texts[above]};{own}")
        return texts


def _borders(blocks: list[Block], rows: int) -> Ints:
    """Return the borders of the time slices. About `rows` ops start in each slice."""
    borders = set()
    count = 0
    for block in sorted(blocks, key=lambda block: block.low):
        if count and count + block.rows > rows:
            borders.add(block.low)
            count = 0
        count += block.rows
    return np.array(sorted(borders), np.int64)


def _own_times(
    ops: OpSlice, border: int, waiting: dict[tuple[int, ...], int]
) -> tuple[Ints, Ints, dict[tuple[int, ...], int]]:
    """Return the ops that end in a time slice, their own times in ns, and a new `waiting`.

    The own time of an op is its duration minus the time that its children cover. For each op that
    continues in the next slice, `waiting` contains the time that its children have covered so far.
    The time of a child is subtracted in the slice in which the child starts. Ops that have children
    and no own time are left out.
    """
    intervals = ops.intervals
    columns = (intervals.thread, intervals.start, intervals.stop, ops.names)

    def key(row: int) -> tuple[int, ...]:
        return tuple(int(column[row]) for column in columns)

    stop = intervals.stop - (ops.durations == 0)  # intervals last at least 1 ns
    latest = max((start for _, start, *_ in waiting), default=-FAR)
    carried = intervals.start <= latest
    covered = np.zeros(len(stop), np.int64)
    child = np.flatnonzero((intervals.parent >= 0) & ~carried)
    parent = intervals.parent[child]
    inside = np.minimum(stop[child], intervals.stop[parent]) - intervals.start[child]
    np.add.at(covered, parent, np.maximum(inside, 1))
    for row in np.flatnonzero(carried).tolist():
        covered[row] += waiting.get(key(row), 0)
    own = np.maximum(stop - intervals.start - covered, 0)
    goes_on = intervals.stop > border
    done = np.flatnonzero(((covered == 0) | (own > 0)) & ~goes_on)
    rows = np.flatnonzero(goes_on).tolist()
    return done, own[done], {key(row): int(covered[row]) for row in rows}


class Renumber:
    """Assigns new ids in order of first use. An id of -1 stays -1."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self._to = nothing(1)  # the last element is always NONE, so index -1 gives NONE

    def __call__(self, ids: Ints) -> Ints:
        high = int(ids.max(initial=-1)) + 2
        if high > len(self._to):
            self._to = np.append(self._to, nothing(max(high, 2 * len(self._to)) - len(self._to)))
        values, first = np.unique(ids[(ids >= 0) & (self._to[ids] < 0)], return_index=True)
        for value in values[np.argsort(first)].tolist():
            self._to[value] = len(self.order)
            self.order.append(value)
        return self._to[ids]
