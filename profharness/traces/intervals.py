"""Find the intervals of a thread that enclose a given time.

This takes O(n log n) time, even if the intervals overlap. An interval encloses t if
start <= t < end. An interval whose duration is 0 encloses its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from profharness.trace import NONE
from profharness.traces import parents as compiled_parents
from profharness.traces.columns import MAX_NS, Flags, Ints, nothing, pack
from profharness.traces.ops import EVALUATION, HostSpan

STEPS = 16  # maximum number of linear steps of a search before a binary search starts
MAX_DEPTH = 100  # maximum number of spans, such as modules, that are found around a time
_COLUMNS = (attrgetter("thread"), attrgetter("start"), attrgetter("end"))


class Intervals:
    """Intervals sorted by thread, start and descending length.

    `rows` contains the position of each interval before the sort. `parent` contains the index of
    the last earlier interval of the thread that encloses the start of the interval, or -1. An
    interval, its parent, the parent of the parent and so on form the chain of the interval. All
    intervals that enclose a time t are on the chain of the last interval that starts at or before
    t. `nested` is True for an interval if all intervals on the chain of the interval end within
    their parents.
    """

    def __init__(self, thread: Ints, start: Ints, end: Ints) -> None:
        stop = np.maximum(end, start + 1)
        self.rows = _order(thread, start, stop)
        self.thread, self.start, self.stop = (c[self.rows] for c in (thread, start, stop))
        self.parent = _parents(self.thread, self.start, self.stop)
        self.nested = _nested(self.parent, self.stop)

    def chains(self, at: Ints, t: Ints, depth: int) -> Ints:
        """Return the innermost intervals that enclose t on the chain of each index in `at`.

        A row of the result has `depth` elements. Elements without an interval are -1.
        """
        columns = np.full((depth, len(at)), NONE, np.int64)
        active, at = np.arange(len(at)), self._ending_after(at.copy(), t)
        for column in columns:
            active, at = active[at >= 0], at[at >= 0]
            if not len(active):
                break
            column[active] = at
            at = self._ending_after(self.parent[at], t[active])
        return columns.T

    def innermost(self, thread: Ints, t: Ints) -> Ints:
        """Return the enclosing interval that starts last for each (thread, t), or -1."""
        result = nothing(len(t))
        if not len(t) or not len(self.start):
            return result
        order = np.argsort(thread, kind="stable")
        numbers, begins = np.unique(thread[order], return_index=True)
        for number, mine in zip(numbers, np.split(order, begins[1:]), strict=True):
            low, high = np.searchsorted(self.thread, [number, number + 1])
            if low < high:
                last = np.searchsorted(self.start[low:high], t[mine], side="right") - 1
                result[mine] = np.where(last >= 0, last + low, -1)
        return self._ending_after(result, t)

    def enclosing_any(self, thread: Ints, t: Ints) -> Flags:
        """Return whether each interval encloses any of the times (thread, t)."""
        result = np.zeros(len(self.start), np.bool_)
        at = self.innermost(thread, t)
        while len(open_ := np.flatnonzero(at >= 0)):
            at, t = at[open_], t[open_]
            result[at] = True
            at = self._ending_after(self.parent[at], t)
        return result

    def enclosing(self) -> Ints:
        """Return the nearest other interval that encloses each interval completely, or -1."""
        return self._ending_after(self.parent.copy(), self.stop - 1)

    def _ending_after(self, at: Ints, t: Ints) -> Ints:
        """Return for each index in `at` the first interval of its chain that ends after t.

        The result is -1 if no interval of the chain ends after t.
        """
        return _climb(at, self.parent, self.thread, self.stop, t)


def _order(thread: Ints, start: Ints, stop: Ints) -> Ints:
    """Return the indices that stably sort intervals by thread, start and descending length."""
    key = pack([column - column.min(initial=MAX_NS) for column in (thread, start)])
    rows = np.argsort(key, kind="stable")  # faster than lexsort for nearly sorted traces
    ordered = key[rows]
    tied = np.zeros(len(rows), np.bool_)
    tied[1:] = ordered[1:] == ordered[:-1]
    tied[:-1] |= tied[1:]
    some = rows[tied]
    rows[tied] = some[np.lexsort((-stop[some], key[some]))]
    return rows


def _parents(thread: Ints, start: Ints, stop: Ints) -> Ints:
    if compiled_parents is not None:
        compiled_parents(thread, start, stop, parent := nothing(len(start)))
        return parent
    before = np.arange(-1, len(start) - 1, dtype=np.int64)
    before[1:][thread[1:] != thread[:-1]] = -1
    # The search for a parent starts at the previous interval. If an interval has ended, the search
    # continues at its parent, because all intervals between the two have ended, too.
    return _climb(before, before, thread, stop, start)


def _climb(at: Ints, above: Ints, thread: Ints, stop: Ints, t: Ints) -> Ints:
    """Return for each index in `at` the last interval up to this index that stops after t, or -1.

    Only intervals of the same thread are considered. If the interval i has stopped, the search
    continues at `above[i]`, so `above` may skip only intervals that cannot be the result. `above`
    may be the same array as `at`, which every step updates. A few linear steps find nearly all
    results. A binary search finds the others.
    """
    active = np.flatnonzero(at >= 0)
    for _ in range(STEPS):
        active = active[stop[at[active]] <= t[active]]
        if not len(active):
            return at
        at[active] = above[at[active]]
        active = active[at[active] >= 0]
    if len(active):
        ancestor = _last_above(stop, at[active], t[active])
        strange = thread[ancestor] != thread[at[active]]
        at[active] = np.where(strange, -1, ancestor)
    return at


def _last_above(values: Ints, last: Ints, limits: Ints) -> Ints:
    """Return for each index in `last` the last index up to it whose value exceeds a limit, or -1.

    `limits` contains the limit for each element of `last`. The function searches in a binary tree
    whose nodes contain the maxima of their subtrees.
    """
    tree = [values]
    while len(tree[-1]) > 1:
        below = tree[-1]
        pairs = np.append(below, np.iinfo(np.int64).min) if len(below) % 2 else below
        tree.append(np.maximum(pairs[::2], pairs[1::2]))
    node, level_of = last.copy(), nothing(len(last))
    searching = np.arange(len(last))
    for level, maxima in enumerate(tree):
        here = maxima[node[searching]] > limits[searching]
        level_of[searching[here]] = level
        searching = searching[~here]
        # If the node is even, continue with the left neighbour of its parent. If it is odd,
        # continue with its parent, which contains only the node itself and its left sibling.
        node[searching] = (node[searching] >> 1) - 1 + (node[searching] & 1)
        searching = searching[node[searching] >= 0]
    for level in range(len(tree) - 1, 0, -1):
        down = np.flatnonzero(level_of >= level)
        right = np.minimum(2 * node[down] + 1, len(tree[level - 1]) - 1)
        node[down] = np.where(tree[level - 1][right] > limits[down], right, 2 * node[down])
    return np.where(level_of >= 0, node, -1)


def _nested(parent: Ints, stop: Ints) -> Flags:
    """Return for each interval whether it and all of its ancestors end within their parents."""
    wrong = (parent >= 0) & (stop[parent] < stop)
    above = parent.copy()
    while wrong.any() and (above >= 0).any():  # each pass checks twice as many ancestors
        has = np.flatnonzero(above >= 0)
        wrong[has] |= wrong[above[has]]
        above[has] = above[above[has]]
    return ~wrong


class AutogradNodes:
    """The ops in which autograd evaluates its nodes, made from `Tables.evaluations`.

    A training step has many of these ops, and only a few of them belong to attention. So an op is
    converted to a HostSpan only when it is needed.
    """

    def __init__(self, blocks: Sequence[Ints]) -> None:
        columns = np.concatenate([np.empty((4, 0), np.int64), *blocks], axis=1)
        start, end, thread, _ = columns
        self.intervals = Intervals(thread, start, end)
        self._columns = columns[:, self.intervals.rows]
        self.last = int(end.max(initial=-MAX_NS))

    def ops(self, at: Ints) -> list[HostSpan]:
        rows = self._columns[:, at].T.tolist()
        return [
            HostSpan(EVALUATION, start, end, thread, sequence=sequence)
            for start, end, thread, sequence in rows
        ]

    def around(self, thread: Ints, t: Ints) -> list[HostSpan]:
        """Return the ops that enclose at least one of the (thread, t) pairs, sorted by thread and start."""
        return self.ops(np.flatnonzero(self.intervals.enclosing_any(thread, t)))


class SpanTree:
    """Spans sorted by thread, start and descending length.

    `above` contains for each span the index of the nearest span that encloses it, or -1.
    """

    def __init__(self, spans: Iterable[Any]) -> None:
        given = list(spans)
        columns = (np.fromiter(map(column, given), np.int64, len(given)) for column in _COLUMNS)
        self.intervals = Intervals(*columns)
        self.spans = [given[row] for row in self.intervals.rows.tolist()]
        self.above = self.intervals.enclosing().tolist()

    def ancestors(self, at: int) -> Iterator[int]:
        """Yield the indices of the spans that enclose the span `at`, innermost first."""
        while (at := self.above[at]) >= 0:
            yield at

    def overlaps(self) -> int:
        """Count the spans that start inside another span of their thread and end after it."""
        count, thread, open_ends = 0, None, list[int]()
        for span in self.spans:
            if span.thread != thread:
                thread, open_ends = span.thread, []
            while open_ends and open_ends[-1] <= span.start:
                open_ends.pop()
            count += bool(open_ends) and open_ends[-1] < span.end
            open_ends.append(span.end)
        return count

    def below(self, own: Sequence[bool]) -> list[bool]:
        """Return for each span whether a span that encloses it is marked in `own`."""
        result: list[bool] = []
        for above in self.above:  # enclosing spans come first, so their results are known
            result.append(above >= 0 and (own[above] or result[above]))
        return result

    def around(self, moments: Iterable[tuple[int, int]]) -> list[list[Any]]:
        """Return the spans that are open at each (thread, t), outermost first."""
        threads, times = np.array(list(moments), np.int64).reshape(-1, 2).T
        if not self.spans:
            return [[] for _ in times]
        innermost = self.intervals.innermost(threads, times)
        chains = self.intervals.chains(innermost, times, MAX_DEPTH)
        deepest = int((chains >= 0).any(axis=0).sum())
        rows = chains[:, :deepest][:, ::-1].tolist()
        return [[self.spans[at] for at in chain if at >= 0] for chain in rows]
