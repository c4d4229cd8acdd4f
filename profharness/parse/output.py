"""The Trace's own tables and columns, written in file order; ids count by first use, so that
they never depend on how it was read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profharness.parse.columns import Block, Ints, Spool
from profharness.parse.join import Linked, OpSlice, Ranges, Source, Stacks, linked_chunks
from profharness.trace import LaunchConfig

NO_CONFIG = (None, None, None, None)


class Renumber:
    """Ids in order of first use."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self._to = np.full(0, -1, np.int64)

    def __call__(self, ids: Ints) -> Ints:
        """The new ids; -1 stays -1."""
        high = int(ids.max(initial=-1)) + 1
        if high > len(self._to):
            more = np.full(max(high, 2 * len(self._to)) - len(self._to), -1, np.int64)
            self._to = np.concatenate([self._to, more])
        values, first = np.unique(ids, return_index=True)
        for value in values[np.argsort(first)].tolist():
            if value >= 0 and self._to[value] < 0:
                self._to[value] = len(self.order)
                self.order.append(value)
        return np.where(ids >= 0, self._to[ids], -1) if len(self._to) else ids


class Output:
    """Collects result blocks in `spool`; after `write` the lists are those of a Trace."""

    def __init__(
        self, source: Source, threads: list[tuple[int, int]], base: int, spool: Spool
    ) -> None:
        self._source = source
        self._spool = spool
        self._base = base
        self._pids = np.array([pid for pid, _ in threads], np.int64)
        self._tids = np.array([tid for _, tid in threads], np.int64)
        self._ranges = Ranges(source.tables, threads, base)
        self._use = {name: Renumber() for name in ("kernel", "config", "path", "api")}
        self.blocks: list[Block] = []
        self.ranges = self._ranges.rows
        self.kernels: list[str] = []
        self.kinds: list[str] = []
        self.configs: list[LaunchConfig] = []
        self.op_paths: list[str] = []
        self.apis: list[str] = []

    def write(self, chunk_rows: int, slice_rows: int) -> None:
        """Join and write everything: device rows if there are any, else ops."""
        stacks = Stacks(self._source, rows=slice_rows)
        if self._source.tables.gpu:
            for chunk in linked_chunks(self._source, rows=chunk_rows):
                self._device_rows(chunk, stacks)
            kernels = list(self._source.tables.kernels)
            configs = list(self._source.tables.configs)
        else:
            self._op_rows(stacks)
            kernels = [("op", name) for name in self._source.tables.names]
            configs = [NO_CONFIG]
        folded, apis = stacks.folded(), list(self._source.tables.apis)
        self.kernels = [kernels[i][1] for i in self._use["kernel"].order]
        self.kinds = [kernels[i][0] for i in self._use["kernel"].order]
        self.configs = [
            LaunchConfig(grid, block, registers, shared_bytes=shared)
            for grid, block, registers, shared in (configs[i] for i in self._use["config"].order)
        ]
        self.op_paths = [folded[i] for i in self._use["path"].order]
        self.apis = [apis[i] for i in self._use["api"].order]

    def _device_rows(self, chunk: Linked, stacks: Stacks) -> None:
        start, dur, kernel, config, device, stream, correlation, node, size = chunk.gpu
        path = stacks.lookup(chunk.thread, chunk.launch)
        self._emit(
            kernel, config, path, chunk.api, device, stream, correlation, node,
            chunk.thread, chunk.launch, start, dur, size,
        )  # fmt: skip

    def _op_rows(self, stacks: Stacks) -> None:
        """Ops with the time that is their own, in order of their end; one that goes on into the
        next slice waits for it.
        """
        waiting: dict[tuple[int, ...], int] = {}
        for number in range(len(stacks.borders) + 1):
            ops = stacks.slice(number)
            last = number == len(stacks.borders)
            done, own, waiting = _finished(
                ops, None if last else int(stacks.borders[number]), waiting
            )
            if not len(done):
                continue
            intervals = ops.intervals
            keys = (intervals.thread[done], ops.names[done], intervals.start[done])
            order = np.lexsort((*self._stable(keys), intervals.stop[done]))
            done, own = done[order], own[order]
            start = intervals.start[done]
            path = stacks.stack_ids(ops, done, start)
            none = np.full(len(done), -1, np.int64)
            self._emit(
                ops.names[done], np.zeros_like(none), path, none, none, none, none, none,
                intervals.thread[done], start, start, own, none,
            )  # fmt: skip

    def _stable(self, keys: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints, Ints]:
        """Sort keys that do not depend on interning order: thread by its numbers, then start."""
        thread, _, start = keys
        return self._tids[thread], self._pids[thread], start

    def _emit(
        self, kernel: Ints, config: Ints, path: Ints, api: Ints, device: Ints, stream: Ints,
        correlation: Ints, node: Ints, thread: Ints, launch: Ints, start: Ints, dur: Ints,
        size: Ints,
    ) -> None:  # fmt: skip
        inner, cell = self._ranges.lookup(thread, launch)
        known = thread >= 0
        lost = np.full(len(thread), -1, np.int64)
        use, base = self._use, self._base
        columns = [
            use["kernel"](kernel), use["config"](config), use["path"](path), inner, cell,
            use["api"](api), device, stream, correlation, node,
            np.where(known, self._pids[thread], -1) if len(self._pids) else lost,
            np.where(known, self._tids[thread], -1) if len(self._tids) else lost,
            np.where(known, launch + base, -1), start + base, dur, size,
        ]  # fmt: skip
        offset = self._spool.write(columns)
        order = (0, len(self.blocks))
        self.blocks.append(Block(order, offset, len(columns), len(start), 0, 0))


def _finished(
    ops: OpSlice, border: int | None, waiting: dict[tuple[int, ...], int]
) -> tuple[Ints, Ints, dict[tuple[int, ...], int]]:
    """Ops that end in this slice and have time of their own, that time in ns (duration less what
    their children cover), and for those that go on what their children have covered so far.

    A child counts in the slice in which it starts; ops without a child always count.
    """
    intervals, carried = ops.intervals, _carried(ops, waiting)
    covered = np.zeros(len(intervals.start), np.int64)
    child = np.flatnonzero((intervals.parent >= 0) & ~carried)
    parent = intervals.parent[child]
    stop = np.minimum(_stop(ops)[child], intervals.stop[parent])
    np.add.at(covered, parent, np.maximum(stop - intervals.start[child], 1))
    for index in np.flatnonzero(carried).tolist():
        covered[index] += waiting.get(_key(ops, index), 0)
    own = np.maximum(_stop(ops) - intervals.start - covered, 0)
    kept = (covered == 0) | (own > 0)
    if border is None:
        done = np.flatnonzero(kept)
        return done, own[done], {}
    on = intervals.stop > border
    goes_on = {_key(ops, i): int(covered[i]) for i in np.flatnonzero(on).tolist()}
    done = np.flatnonzero(kept & ~on)
    return done, own[done], goes_on


def _stop(ops: OpSlice) -> Ints:
    """Where each op ends; the intervals themselves give an op of no duration one nanosecond."""
    stop: Ints = ops.intervals.stop - (ops.durations == 0)
    return stop


def _carried(ops: OpSlice, waiting: dict[tuple[int, ...], int]) -> NDArray[np.bool_]:
    if not waiting:
        return np.zeros(len(ops.names), np.bool_)
    latest = max(key[1] for key in waiting)
    return ops.intervals.start <= latest


def _key(ops: OpSlice, index: int) -> tuple[int, ...]:
    intervals = ops.intervals
    return (
        int(intervals.thread[index]),
        int(intervals.start[index]),
        int(intervals.stop[index]),
        int(ops.names[index]),
    )
