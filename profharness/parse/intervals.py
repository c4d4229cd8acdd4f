"""Which intervals enclose which instants, thread by thread: sorted sweeps by vectorised pointer
jumping.

An interval encloses t when start <= t < end; one of no duration encloses its own start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals sorted by (thread, start, longest first). rows says where each stood before
    sorting.

    parent is the last earlier interval of the thread that encloses this one's start, -1 for none:
    every interval that encloses
    some t lies on the parent chain of the last one that starts at or before t. nested says that
    this one and all
    its ancestors end within their parents, so that the whole chain encloses whatever this one does.
    """

    thread: Ints
    start: Ints
    stop: Ints
    parent: Ints
    nested: NDArray[np.bool_]
    rows: Ints

    def chain(self, at: int, t: int) -> list[int]:
        """Indices of every interval on the chain from `at` that encloses t, outermost first."""
        found = []
        while at >= 0:
            if self.stop[at] > t:
                found.append(at)
            at = int(self.parent[at])
        return found[::-1]


def build(thread: Ints, start: Ints, end: Ints) -> Intervals:
    """Sort intervals and find their parents. O(n log n); exact also where intervals overlap
    without nesting.
    """
    stop = np.maximum(end, start + 1)
    rows = np.lexsort((-stop, start, thread))
    thread, start, stop = thread[rows], start[rows], stop[rows]
    parent = _parents(thread, start, stop)
    return Intervals(thread, start, stop, parent, _nested(parent, stop), rows)


def innermost(intervals: Intervals, thread: Ints, t: Ints) -> Ints:
    """For each (thread, t) the index of the enclosing interval that starts last, -1 for none."""
    found = np.full(len(t), -1, np.int64)
    for one in np.unique(thread):
        low, high = np.searchsorted(intervals.thread, [one, one + 1])
        if low == high:
            continue
        mine = np.flatnonzero(thread == one)
        last = np.searchsorted(intervals.start[low:high], t[mine], side="right") - 1
        found[mine] = np.where(last >= 0, last + low, -1)
    active = np.flatnonzero(found >= 0)
    while len(active):
        at = found[active]
        active = active[intervals.stop[at] <= t[active]]
        found[active] = intervals.parent[found[active]]
        active = active[found[active] >= 0]
    return found


def _parents(thread: Ints, start: Ints, stop: Ints) -> Ints:
    count = len(start)
    candidate = np.arange(-1, count - 1, dtype=np.int64)
    if not count:
        return candidate
    candidate[0] = -1
    candidate[1:][thread[1:] != thread[:-1]] = -1
    active = np.flatnonzero(candidate >= 0)
    while len(active):
        at = candidate[active]
        active = active[stop[at] <= start[active]]
        # what lies between a candidate and its own candidate ended before the candidate began
        candidate[active] = candidate[candidate[active]]
        active = active[candidate[active] >= 0]
    return candidate


def _nested(parent: Ints, stop: Ints) -> NDArray[np.bool_]:
    """Whether each interval ends within its parent, and so do all of its ancestors."""
    has = parent >= 0
    wrong = has & (stop[parent] < stop) if len(parent) else has
    while wrong.any():
        spread = wrong | (has & wrong[parent])
        if (spread == wrong).all():
            break
        wrong = spread
    return ~wrong
