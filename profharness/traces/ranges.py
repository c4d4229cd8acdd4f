"""Find the user ranges that contain a launch call."""

from __future__ import annotations

import numpy as np

from profharness.trace import CELL_RANGE_PREFIX, NONE, Range
from profharness.traces.columns import Ints, RangeColumns, distinct
from profharness.traces.intervals import Intervals, nothing


class _RangeIndex:
    """An index of the ranges `rows` by group (thread or process) and time."""

    def __init__(self, rows: Ints, group: Ints, start: Ints, stop: Ints) -> None:
        self.intervals = Intervals.build(group[rows], start[rows], stop[rows])
        self.rows = np.append(rows[self.intervals.rows], NONE)  # index -1 is NONE

    def lookup(self, group: Ints, t: Ints) -> Ints:
        """Return the innermost range at each (group, t), or NONE."""
        if len(self.rows) == 1:
            return nothing(len(t))
        return self.rows[self.intervals.innermost(group, t)]


class _Open:
    """The number of threads in a process with an open range: stretches begun minus stretches
    ended, where a stretch is the time in which a thread has any open range.
    """

    def __init__(self, ranges: Intervals, pids: Ints) -> None:
        self._of = {}
        first = np.flatnonzero(ranges.parent == NONE)  # no earlier range of the thread is open
        process, start = pids[ranges.thread[first]], ranges.start[first]
        stop = np.maximum.reduceat(ranges.stop, first) if len(first) else start
        for number in distinct(process):
            mine = process == number
            self._of[number] = np.sort(start[mine]), np.sort(stop[mine])

    def count(self, process: Ints, t: Ints) -> Ints:
        """Return the number of threads with an open range at each time."""
        result = np.zeros(len(t), np.int64)
        for number, (starts, stops) in self._of.items():
            mine = np.flatnonzero(process == number)
            begun = np.searchsorted(starts, t[mine], side="right")
            result[mine] = begun - np.searchsorted(stops, t[mine], side="right")
        return result


class _Forward:
    """The times of the forward ops behind backward ops, by autograd's arrows (rows of Flow)."""

    def __init__(self, evaluations: Intervals, flows: Ints) -> None:
        self._nodes, count = evaluations, len(evaluations.start) + 1
        arrows = flows.T
        at = self._nodes.innermost(arrows[2], arrows[3])
        self._thread, self._t = nothing(count), nothing(count)
        self._thread[at[at >= 0]], self._t[at[at >= 0]] = arrows[:2, at >= 0]

    def lookup(self, thread: Ints, t: Ints) -> tuple[Ints, Ints]:
        """Return the (thread, t) of the forward ops, -1 for none."""
        at = self._nodes.innermost(thread, t)
        return self._thread[at], self._t[at]


class Ranges:
    """User ranges by start and descending length, and the lookup of launch calls in them.

    `threads` has the (pid, tid) of each thread index. `base` is added in ns to every time of the
    Trace.
    """

    def __init__(self, columns: RangeColumns, threads: list[tuple[int, int]], base: int) -> None:
        start, duration, thread = (
            np.array(column, np.int64)
            for column in (columns.start, columns.duration, columns.thread)
        )
        pids, tids = np.array([*threads, (NONE, NONE)], np.int64).T
        ranks = {name: rank for rank, name in enumerate(sorted(set(columns.names)))}
        names = np.array([ranks[name] for name in columns.names], np.int64)
        # independent of the number of processes that read the file
        order = np.lexsort((names, tids[thread], pids[thread], -duration, start))
        start, duration, thread = start[order], duration[order], thread[order]
        text = [columns.names[row] for row in order.tolist()]
        cells = np.flatnonzero([name.startswith(CELL_RANGE_PREFIX) for name in text])
        wide = np.flatnonzero(np.array(columns.wide, np.bool_)[order])
        process, stop = pids[thread], start + duration
        self.pids, self.tids = pids, tids  # by thread index; NONE for -1
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
        """Return the range and cell_range of calls at (thread, t), as LaunchBatch documents them.

        A call outside all ranges of its thread and cell gets the process's innermost start/end
        range, else the range of the only thread that has one, else that of the forward op behind
        its backward op.
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
        """Assign launches of backward ops outside ranges to the range of their forward op.

        `evaluations` are the ops in which autograd evaluates its nodes, `flows` has rows of Flow.
        """
        self._forward = _Forward(evaluations, flows)
