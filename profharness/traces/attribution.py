"""Find the API call, the ranges and the ops that each kernel belongs to.

Kernels are joined to the API calls that launched them by their correlation id. The API calls are
joined to the ranges and ops around them by time. To bound the memory, the joins process a limited
number of rows at once and write the batches of launches to a temporary file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from profharness.trace import CELL_RANGE_PREFIX, NONE, LaunchBatch, ProgramStep, Range
from profharness.traces.attention_calls import AttentionCalls, find_calls
from profharness.traces.columns import (
    Arrows,
    Block,
    GpuRows,
    Ints,
    LaunchRows,
    OpRows,
    RangeColumns,
    Spool,
    Tables,
    distinct,
    hashed,
)
from profharness.traces.intervals import AutogradNodes, Intervals, nothing

CHUNK_ROWS = 65536  # number of GPU rows that are joined at once
SLICE_ROWS = 262144  # approximate number of ops that start in a time slice
# Repeated ops are reported only if they are more than this fraction of all ops. Short ops that start
# in the same microsecond look repeated, too.
REPEATED_OPS = 0.05
MAX_DEPTH = 100  # maximum number of ops in a stack; PyTorch nests only a few dozen ops


@dataclass(slots=True)
class Source:
    """The tables that were read from a file, and the spool that contains their rows."""

    tables: Tables
    spool: Spool

    def gpu(self, blocks: list[Block]) -> GpuRows:
        """Return the kernels, memcpys and memsets in these blocks."""
        return GpuRows(*np.concatenate([self.spool.read(block) for block in blocks], axis=1))

    def launches(self, blocks: list[Block]) -> LaunchRows:
        """Return the API calls in these blocks."""
        parts = [self.spool.read(block) for block in blocks]
        return LaunchRows(*np.concatenate(parts, axis=1))

    def ops(self, blocks: list[Block], low: int, high: int) -> OpRows:
        """Return the ops in these blocks that overlap the time interval [low, high)."""
        parts = [np.empty((len(OpRows._fields), 0), np.int64)]
        for block in blocks:
            part = self.spool.read(block)
            if block.low < low or block.high >= high:
                rows = OpRows(*part)
                inside = (rows.start < high) & (np.maximum(rows.end, rows.start + 1) > low)
                part = part[:, inside]
            parts.append(part)
        return OpRows(*np.concatenate(parts, axis=1))


def flows(arrows: Arrows) -> tuple[Ints, list[str]]:
    """Return a row of Flow for each arrow that has both a start and an end, and warnings.

    The rows are sorted by start. A warning counts the arrows that have only a start or only an end.
    """
    key, begins, thread, t = arrows.columns()
    sides = []
    for rows in (np.flatnonzero(begins), np.flatnonzero(begins == 0)):
        # if an arrow has several starts or several ends, the last one counts
        keys, last = np.unique(key[rows][::-1], return_index=True)
        sides.append((keys, rows[len(rows) - 1 - last]))
    (keys, starts), (others, ends) = sides
    both, at, to = np.intersect1d(keys, others, assume_unique=True, return_indices=True)
    starts, ends = starts[at], ends[to]
    order = np.lexsort((both, t[starts]))
    made = np.stack([thread[starts], t[starts], thread[ends], t[ends]], axis=1)
    lone = len(keys) + len(others) - 2 * len(both)
    text = (
        f"{lone:,} arrows from forward to backward have one end alone: their backward is not told"
    )
    return made[order], [text] if lone else []


def contexts(
    tables: Tables, flows: Ints, threads: list[tuple[int, int]], base: int
) -> tuple[Ranges, AttentionCalls, tuple[ProgramStep, ...]]:
    """Return the ranges, attention calls and steps that may contain launches.

    `flows` contains rows of Flow. `threads` contains the (pid, tid) of each thread index. `base` is
    the number of nanoseconds to add to every time of the Trace.
    """
    ranges = Ranges(tables.ranges, threads, base)
    evaluations = AutogradNodes.build(tables.evaluations)
    if len(flows):
        ranges.follow(evaluations.intervals, flows)
    ops = (tables.details, evaluations, tables.modules)
    calls, steps = find_calls(*ops, flows, ranges.rows, threads, base)
    return ranges, calls, steps


class _RangeIndex:
    """An index that finds ranges by group and time. A group is a thread or a process.

    `rows` are the numbers of the ranges in the index.
    """

    def __init__(self, rows: Ints, group: Ints, start: Ints, stop: Ints) -> None:
        self.intervals = Intervals.build(group[rows], start[rows], stop[rows])
        self.rows = np.append(rows[self.intervals.rows], NONE)  # so that index -1 gives NONE

    def lookup(self, group: Ints, t: Ints) -> Ints:
        """Return the number of the innermost range at each (group, t), or NONE."""
        if len(self.rows) == 1:
            return nothing(len(t))
        return self.rows[self.intervals.innermost(group, t)]


class _Open:
    """Counts the threads of a process that have an open range at a given time.

    A stretch is a time interval in which a thread always has an open range. The count is the number
    of stretches that have begun minus the number of stretches that have ended.
    """

    def __init__(self, ranges: Intervals, pids: Ints) -> None:
        self._of = {}
        # The ranges at whose start no earlier range of the thread is open
        first = np.flatnonzero(ranges.parent == NONE)
        process, start = pids[ranges.thread[first]], ranges.start[first]
        stop = np.maximum.reduceat(ranges.stop, first) if len(first) else start
        for number in distinct(process):
            mine = process == number
            self._of[number] = np.sort(start[mine]), np.sort(stop[mine])

    def count(self, process: Ints, t: Ints) -> Ints:
        """Return the number of threads that have an open range at each time."""
        result = np.zeros(len(t), np.int64)
        for number, (starts, stops) in self._of.items():
            mine = np.flatnonzero(process == number)
            begun = np.searchsorted(starts, t[mine], side="right")
            result[mine] = begun - np.searchsorted(stops, t[mine], side="right")
        return result


class _Forward:
    """Finds the forward op of a backward op through the arrows that autograd records.

    `flows` contains the arrows as rows of Flow.
    """

    def __init__(self, evaluations: Intervals, flows: Ints) -> None:
        self._nodes, count = evaluations, len(evaluations.start) + 1
        arrows = flows.T
        at = self._nodes.innermost(arrows[2], arrows[3])
        self._thread, self._t = nothing(count), nothing(count)
        self._thread[at[at >= 0]], self._t[at[at >= 0]] = arrows[:2, at >= 0]

    def lookup(self, thread: Ints, t: Ints) -> tuple[Ints, Ints]:
        """Return the thread and start time of the forward op for each (thread, t), or -1 if there is
        no forward op.
        """
        at = self._nodes.innermost(thread, t)
        return self._thread[at], self._t[at]


class Ranges:
    """The user ranges of a trace, sorted by start and descending length, with a lookup by time.

    `threads` contains the (pid, tid) of each thread index. `base` is the number of nanoseconds to
    add to every time of the Trace.
    """

    def __init__(self, columns: RangeColumns, threads: list[tuple[int, int]], base: int) -> None:
        start, duration, thread = (
            np.array(column, np.int64)
            for column in (columns.start, columns.duration, columns.thread)
        )
        pids, tids = np.array([*threads, (NONE, NONE)], np.int64).T
        ranks = {name: rank for rank, name in enumerate(sorted(set(columns.names)))}
        names = np.array([ranks[name] for name in columns.names], np.int64)
        # this order does not depend on the number of processes that read the file
        order = np.lexsort((names, tids[thread], pids[thread], -duration, start))
        start, duration, thread = start[order], duration[order], thread[order]
        text = [columns.names[row] for row in order.tolist()]
        cells = np.flatnonzero([name.startswith(CELL_RANGE_PREFIX) for name in text])
        wide = np.flatnonzero(np.array(columns.wide, np.bool_)[order])
        process, stop = pids[thread], start + duration
        self.pids, self.tids = pids, tids  # indexed by thread; index -1 gives NONE
        self._all = _RangeIndex(np.arange(len(text)), thread, start, stop)
        self._own_cells = _RangeIndex(cells, thread, start, stop)
        self._any_cells = _RangeIndex(cells, process, start, stop)
        self._wide = _RangeIndex(wide, process, start, stop)
        self._any = _RangeIndex(np.arange(len(text)), process, start, stop)
        parents = nothing(len(text))
        parents[self._all.rows[:-1]] = self._all.rows[self._all.intervals.enclosing()]
        self._open = _Open(self._all.intervals, pids)
        self._forward: _Forward | None = None
        rows = (start + base, duration, process, tids[thread], parents)
        self.rows = [
            Range(name, s, d, pid, tid, None if parent == NONE else parent)
            for name, s, d, pid, tid, parent in zip(text, *(c.tolist() for c in rows), strict=True)
        ]

    def lookup(self, thread: Ints, t: Ints) -> tuple[Ints, Ints]:
        """Return the range and the cell_range of API calls that start at (thread, t).

        LaunchBatch documents both columns. If an API call lies outside all ranges of its thread and
        outside all cells, the first of these ranges that exists is used:

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
        own, mine = self._own_cells.lookup(thread, t), self._all.lookup(thread, t)
        cell[launched] = np.where(own >= 0, own, self._any_cells.lookup(process, t))
        mine = np.where(mine >= 0, mine, cell[launched])
        mine = np.where(mine >= 0, mine, self._wide.lookup(process, t))
        left = np.flatnonzero(mine < 0)
        if len(left):
            only = self._open.count(process[left], t[left]) == 1
            mine[left] = np.where(only, self._any.lookup(process[left], t[left]), NONE)
        left = np.flatnonzero(mine < 0)
        if len(left) and self._forward is not None:
            mine[left] = self._all.lookup(*self._forward.lookup(thread[left], t[left]))
        inner[launched] = mine
        return inner, cell

    def follow(self, evaluations: Intervals, flows: Ints) -> None:
        """Let `lookup` use the range of the forward op for backward ops that lie outside all ranges.

        `evaluations` are the ops in which autograd evaluates its nodes. `flows` contains rows of
        Flow.
        """
        self._forward = _Forward(evaluations, flows)


@dataclass(slots=True)
class LinkedLaunches:
    """A chunk of GPU rows, with the API, the thread and the start of the call that launched each
    row. -1 means that the call is unknown.
    """

    gpu: GpuRows
    api: Ints
    thread: Ints
    launch: Ints


class TraceWarnings:
    """Counts the missing and contradictory data in a trace, for the warnings about them."""

    def __init__(self) -> None:
        self.unmatched = 0  # number of launches whose API call is not in the trace
        self.ambiguous = 0  # number of launches whose correlation id several API calls have
        self.repeated_ops = 0
        self._launches: list[Ints] = []  # arrays that contain a hash of each launch

    def add(self, rows: GpuRows) -> None:
        """Add launches. `texts` will search all added launches for repetitions."""
        self._launches.append(hashed(rows))

    def texts(self, launches: int, stacks: Stacks) -> list[str]:
        """Return one warning for each kind of problem that was found. Each warning has a count."""
        seen = np.sort(np.concatenate([nothing(0), *self._launches]))
        repeated = int(np.count_nonzero(seen[1:] == seen[:-1]))
        many_ops = self.repeated_ops if self.repeated_ops > launches * REPEATED_OPS else 0
        doubts = {
            "have no call with their correlation: thread, range and op are unknown": self.unmatched,
            "have several calls with their correlation: the first counts": self.ambiguous,
            "stand in the file twice and count twice": repeated + many_ops,
        }
        texts = [f"{count:,} launches {what}" for what, count in doubts.items() if count]
        if stacks.paths.deep:
            texts.append(f"stacks of more than {MAX_DEPTH} ops are told in part")
        return texts


def linked_chunks(
    source: Source, doubts: TraceWarnings | None = None, *, rows: int = CHUNK_ROWS
) -> Iterator[LinkedLaunches]:
    """Yield chunks of GPU rows in file order, together with the API calls that launched them.

    If several API calls have the same correlation id, the first one is used. `doubts` counts the
    launches that have no API call, the launches that have several, and repeated launches.
    """
    for blocks in _groups(source.tables.gpu, rows):
        gpu = source.gpu(blocks)
        count = len(gpu.correlation)
        linked = LinkedLaunches(gpu, nothing(count), nothing(count), nothing(count))
        open_rows = np.flatnonzero(gpu.correlation >= 0)
        low, high = min(b.low for b in blocks), max(b.high for b in blocks)
        overlapping = [b for b in source.tables.launches if b.low <= high and b.high >= low]
        for group in _groups(overlapping, 4 * rows):
            if not len(open_rows):
                break
            calls = source.launches(group)
            order = np.argsort(calls.correlation, kind="stable")
            keys, sought = calls.correlation[order], gpu.correlation[open_rows]
            at = np.searchsorted(keys, sought)
            hit = at < len(keys)
            hit[hit] = keys[at[hit]] == sought[hit]
            call, target = order[at[hit]], open_rows[hit]
            if doubts is not None:
                following = np.minimum(at[hit] + 1, len(keys) - 1)
                twice = (keys[following] == keys[at[hit]]) & (following > at[hit])
                doubts.ambiguous += int(np.count_nonzero(twice))
            linked.api[target] = calls.api[call]
            linked.thread[target] = calls.thread[call]
            linked.launch[target] = calls.start[call]
            open_rows = open_rows[~hit]
        if doubts is not None:
            doubts.unmatched += int(np.count_nonzero(linked.thread < 0))
            doubts.add(gpu)
        yield linked


def _groups(blocks: list[Block], rows: int) -> Iterator[list[Block]]:
    """Yield groups of consecutive blocks. A group has at most `rows` rows, or is a single block."""
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

    A key consists of the id of the enclosing stack, or -1, and the names of the ops below it,
    outermost first. A stack that is deeper than MAX_DEPTH keeps its outermost ops and its innermost
    op. `deep` counts the stacks that are incomplete because of this limit.
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
    """Finds the op stacks of launches. It loads the ops of one time slice after another."""

    def __init__(self, source: Source, *, rows: int = SLICE_ROWS) -> None:
        self._source = source
        self.paths = StackIds()
        self.borders = _borders(source.tables.ops, rows)
        self._cache: dict[int, OpSlice] = {}

    def lookup(self, thread: Ints, t: Ints) -> Ints:
        """Return the id of the stack that is open at each (thread, t), or -1 if no op is open."""
        result = nothing(len(t))
        if not self._source.tables.ops:
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
        """Return the ids of the stacks that end with the ops `at` at the times `t`.

        An index of -1 in `at` gives -1.
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
        left, count = np.flatnonzero(marked), len(self._source.tables.names)
        while len(left):  # each pass assigns ids to the ops whose parent already has an id
            above = np.where(parents[left] >= 0, paths[parents[left]], NONE)
            ready = (parents[left] < 0) | (above >= 0)
            rows, left = left[ready], left[~ready]
            pairs = (above[ready] + 1) * count + ops.names[rows]
            each, place = np.unique(pairs, return_inverse=True)
            keys = ((pair // count - 1, pair % count) for pair in each.tolist())
            paths[rows] = np.array([self.paths[key] for key in keys], np.int64)[place]

    def slice(self, number: int) -> OpSlice:
        """Return the ops that overlap time slice `number`."""
        if number not in self._cache:
            while len(self._cache) > 1:
                self._cache.pop(next(iter(self._cache)))
            self._cache[number] = self._load(number)
        return self._cache[number]

    def _load(self, number: int) -> OpSlice:
        low = self.borders[number - 1] if number > 0 else -(1 << 62)
        high = self.borders[number] if number < len(self.borders) else 1 << 62
        blocks = [b for b in self._source.tables.ops if b.low < high and b.high >= low]
        ops = self._source.ops(blocks, low, high)
        intervals = Intervals.build(ops.thread, ops.start, ops.end)
        durations = (ops.end - ops.start)[intervals.rows]
        return OpSlice(intervals, ops.name[intervals.rows], durations, nothing(len(durations)))

    def folded(self) -> list[str]:
        """Return the stacks as folded text, in the order of their ids. The outermost op is first."""
        names = [name.replace(";", ",") for name in self._source.tables.names]
        texts: list[str] = []
        for above, *below in self.paths.rows:
            own = ";".join(names[name] for name in below)
            texts.append(own if above < 0 else f"{texts[above]};{own}")
        return texts


def _borders(blocks: list[Block], rows: int) -> Ints:
    """Return the times at which to divide the ops into slices, so that about `rows` ops start in
    each slice.

    All ops of a block are counted at the start of its first op.
    """
    borders = []
    count = 0
    for block in sorted(blocks, key=lambda block: block.low):
        if count and count + block.rows > rows:
            borders.append(block.low)
            count = 0
        count += block.rows
    return np.array(sorted(set(borders)), np.int64)


def op_chunks(
    stacks: Stacks, ranges: Ranges, doubts: TraceWarnings
) -> Iterator[tuple[LinkedLaunches, Ints]]:
    """Yield chunks of ops whose duration is their own time, together with the ids of their stacks.

    The ops of a chunk are sorted by end. An op that continues in the next time slice is part of the
    chunk of that slice.
    """
    waiting: dict[tuple[int, ...], int] = {}
    for number, border in enumerate([*stacks.borders.tolist(), None]):
        ops = stacks.slice(number)
        done, own, waiting = _own_times(ops, border, waiting)
        doubts.repeated_ops += ops.repeated(done)
        if not len(done):
            continue
        thread, start = ops.intervals.thread[done], ops.intervals.start[done]
        # these keys do not depend on the order in which threads and names got their ids
        keys = (ranges.tids[thread], ranges.pids[thread], start, ops.intervals.stop[done])
        order = np.lexsort(keys)
        done, thread, start = done[order], thread[order], start[order]
        none = nothing(len(done))
        rows = GpuRows(
            start, own[order], ops.names[done], np.zeros_like(none), none, none, none, none, none
        )
        yield LinkedLaunches(rows, none, thread, start), stacks.stack_ids(ops, done, start)


def _own_times(
    ops: OpSlice, border: int | None, waiting: dict[tuple[int, ...], int]
) -> tuple[Ints, Ints, dict[tuple[int, ...], int]]:
    """Compute the own times of the ops that end in a time slice.

    The own time of an op is its duration minus the time that its children cover. Return the indices
    of the ops, their own times in ns, and, for each op that continues in the next slice, the time
    that its children cover so far. The next call receives that time as `waiting`.

    The time of a child is subtracted in the slice in which the child starts. Ops without own time
    are left out, unless they have no children.
    """
    intervals = ops.intervals
    columns = (intervals.thread, intervals.start, intervals.stop, ops.names)

    def key(row: int) -> tuple[int, ...]:
        return tuple(int(column[row]) for column in columns)

    stop = intervals.stop - (ops.durations == 0)  # an interval lasts at least 1 ns
    latest = max((start for _, start, *_ in waiting), default=-(1 << 62))
    carried = intervals.start <= latest
    covered = np.zeros(len(stop), np.int64)
    child = np.flatnonzero((intervals.parent >= 0) & ~carried)
    parent = intervals.parent[child]
    inside = np.minimum(stop[child], intervals.stop[parent]) - intervals.start[child]
    np.add.at(covered, parent, np.maximum(inside, 1))
    for row in np.flatnonzero(carried).tolist():
        covered[row] += waiting.get(key(row), 0)
    own = np.maximum(stop - intervals.start - covered, 0)
    goes_on = intervals.stop > (1 << 62 if border is None else border)
    done = np.flatnonzero(((covered == 0) | (own > 0)) & ~goes_on)
    rows = np.flatnonzero(goes_on).tolist()
    return done, own[done], {key(row): int(covered[row]) for row in rows}


class Renumber:
    """Assigns new ids in order of first use."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self._to = nothing(1)  # the last element is never assigned, so that index -1 is NONE

    def __call__(self, ids: Ints) -> Ints:
        """Return the new id of each old id. An id of -1 stays -1."""
        high = int(ids.max(initial=-1)) + 2
        if high > len(self._to):
            self._to = np.append(self._to, nothing(max(high, 2 * len(self._to)) - len(self._to)))
        values, first = np.unique(ids[(ids >= 0) & (self._to[ids] < 0)], return_index=True)
        for value in values[np.argsort(first)].tolist():
            self._to[value] = len(self.order)
            self.order.append(value)
        return self._to[ids]


class Output:
    """Writes joined launches to a temporary file. The APIs get new ids in the order of first use."""

    def __init__(
        self, ranges: Ranges, base: int, spool: Spool, calls: AttentionCalls | None = None
    ) -> None:
        self.rows = 0  # number of launches written so far
        self.apis = Renumber()
        self._calls = calls if calls and calls.spans else None
        self._ranges = ranges
        self._base = base
        self._spool = spool
        self._blocks: list[Block] = []

    def batches(self) -> Callable[[], Iterator[LaunchBatch]]:
        """Return a function that yields the batches in the order in which they were written.

        The function does not keep this object alive.
        """
        spool, blocks = self._spool, self._blocks
        return lambda: (LaunchBatch(*spool.read(block)) for block in blocks)

    def write(
        self, linked: LinkedLaunches, kernel: Ints, launch_config: Ints, op_path: Ints
    ) -> None:
        """Append a batch of launches to the file.

        `kernel`, `launch_config` and `op_path` are indices into the lists of the Trace.
        """
        rows, thread = linked.gpu, linked.thread
        inner, cell = self._ranges.lookup(thread, linked.launch)
        batch = LaunchBatch(
            kernel=kernel,
            launch_config=launch_config,
            op_path=op_path,
            range=inner,
            cell_range=cell,
            api=self.apis(linked.api),
            device=rows.device,
            stream=rows.stream,
            correlation=rows.correlation,
            graph_node=rows.node,
            pid=self._ranges.pids[thread],
            tid=self._ranges.tids[thread],
            launch_ns=np.where(thread >= 0, linked.launch + self._base, NONE),
            start_ns=rows.start + self._base,
            duration_ns=rows.duration,
            bytes=rows.bytes,
            call_span=self._calls.lookup(thread, linked.launch, self.rows)
            if self._calls
            else nothing(len(thread)),
        )
        columns = [getattr(batch, column.name) for column in fields(batch)]
        offset = self._spool.write(columns)
        self._blocks.append(Block(offset, len(columns), len(kernel), 0, 0))
        self.rows += len(kernel)
