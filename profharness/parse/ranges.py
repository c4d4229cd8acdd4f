"""NVTX ranges with parents, and which of them a launch call lies in."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from profharness.parse import intervals as sweep
from profharness.parse.columns import Ints
from profharness.trace import CELL_RANGE_PREFIX, Range


@dataclass(slots=True)
class RangeColumns:
    """Ranges as they come: start and duration in ns, thread as an index, wide 1 for a start/end
    range, which NVTX means to hold for the whole process.
    """

    names: list[str] = field(default_factory=list)
    start: array[int] = field(default_factory=lambda: array("q"))
    duration: array[int] = field(default_factory=lambda: array("q"))
    thread: array[int] = field(default_factory=lambda: array("q"))
    wide: array[int] = field(default_factory=lambda: array("b"))

    def add(self, name: str, start: int, duration: int, thread: int, wide: bool) -> None:
        """One more range."""
        self.names.append(name)
        self.start.append(start)
        self.duration.append(duration)
        self.thread.append(thread)
        self.wide.append(wide)


@dataclass(frozen=True, slots=True)
class _Some:
    """Intervals of some ranges; rows says which range each stands for."""

    intervals: sweep.Intervals
    rows: Ints

    def lookup(self, group: Ints, t: Ints) -> Ints:
        """For each (group, t) the innermost range, -1 for none."""
        if not len(self.rows):
            return np.full(len(t), -1, np.int64)
        at = sweep.innermost(self.intervals, group, t)
        return np.where(at >= 0, self.rows[at], -1)


class NsysRanges:
    """Ranges ordered by start, longest first. threads: (pid, tid) by thread index; base: ns to add
    to every time of the Trace.
    """

    def __init__(self, told: RangeColumns, threads: list[tuple[int, int]], base: int) -> None:
        start, duration, thread = (
            np.frombuffer(column, np.int64) if len(column) else np.empty(0, np.int64)
            for column in (told.start, told.duration, told.thread)
        )
        order = np.lexsort((thread, -duration, start))
        start, duration, thread = start[order], duration[order], thread[order]
        names = [told.names[row] for row in order.tolist()]
        wide = np.array(told.wide, np.bool_)[order]
        cells = np.fromiter((n.startswith(CELL_RANGE_PREFIX) for n in names), np.bool_, len(names))
        processes = _process_ids(threads)
        self._process = processes
        everything = np.arange(len(names), dtype=np.int64)
        stop = start + duration

        def some(rows: Ints, group: Ints) -> _Some:
            intervals = sweep.build(group[rows], start[rows], stop[rows])
            return _Some(intervals, rows[intervals.rows])

        process = processes[thread] if len(thread) else thread
        self._all = some(everything, thread)
        self._own_cells = some(np.flatnonzero(cells), thread)
        self._any_cells = some(np.flatnonzero(cells), process)
        self._wide = some(np.flatnonzero(wide), process)
        self.rows = self._ranges(names, start, duration, thread, threads, base)

    def _ranges(
        self,
        names: list[str],
        start: Ints,
        duration: Ints,
        thread: Ints,
        threads: list[tuple[int, int]],
        base: int,
    ) -> list[Range]:
        above = _enclosing(self._all.intervals)
        parents = np.full(len(names), -1, np.int64)
        rows = self._all.rows
        parents[rows] = np.where(above >= 0, rows[above], -1) if len(rows) else above
        columns = (start + base, duration, thread, parents)
        told = zip(names, *(column.tolist() for column in columns), strict=True)
        return [
            Range(n, s, d, threads[t][0], threads[t][1], None if p < 0 else p)
            for n, s, d, t, p in told
        ]

    def lookup(self, thread: Ints, t: Ints) -> tuple[Ints, Ints]:
        """(range, cell_range) of calls on a thread at a time, as LaunchBatch documents them; where
        neither thread nor cell has a range, the process's innermost start/end range is the range.
        """
        inner, cell = np.full(len(t), -1, np.int64), np.full(len(t), -1, np.int64)
        known = np.flatnonzero(thread >= 0)
        if not self.rows or not len(known):
            return inner, cell
        thread, t = thread[known], t[known]
        process = self._process[thread]
        own = self._own_cells.lookup(thread, t)
        cells = np.where(own >= 0, own, self._any_cells.lookup(process, t))
        mine = self._all.lookup(thread, t)
        found = np.where(mine >= 0, mine, cells)
        inner[known] = np.where(found >= 0, found, self._wide.lookup(process, t))
        cell[known] = cells
        return inner, cell


def _enclosing(intervals: sweep.Intervals) -> Ints:
    """For each interval the nearest one that encloses all of it, -1 for none."""
    parent, stop = intervals.parent, intervals.stop
    above = parent.copy()
    active = np.flatnonzero(above >= 0)
    while len(active):
        active = active[stop[above[active]] < stop[active]]
        above[active] = parent[above[active]]
        active = active[above[active] >= 0]
    return above


def _process_ids(threads: list[tuple[int, int]]) -> Ints:
    ids: dict[int, int] = {}
    return np.array([ids.setdefault(pid, len(ids)) for pid, _ in threads], np.int64)
