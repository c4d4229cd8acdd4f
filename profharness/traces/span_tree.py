"""Spans of CPU threads and their nesting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from profharness.traces.columns import EvaluationRows, Ints
from profharness.traces.intervals import Intervals
from profharness.traces.ops import EVALUATION, HostSpan

MAX_DEPTH = 100  # nested modules
_PLACE = (attrgetter("thread"), attrgetter("start"), attrgetter("end"))


@dataclass(frozen=True, slots=True)
class AutogradNodes:
    """The ops in which autograd evaluates its nodes. They are half as many as all other ops of a
    training step, and few belong to attention, so they stay columns until they are needed.
    """

    intervals: Intervals
    rows: EvaluationRows  # in the order of the intervals

    @classmethod
    def build(cls, blocks: Sequence[Ints]) -> AutogradNodes:
        """Build from arrays whose rows are the columns of `EvaluationRows`."""
        empty = np.empty((len(EvaluationRows._fields), 0), np.int64)
        columns = np.concatenate([empty, *blocks], axis=1)
        given = EvaluationRows(*columns)
        intervals = Intervals.build(given.thread, given.start, given.end)
        return cls(intervals, EvaluationRows(*columns[:, intervals.rows]))

    def ops(self, at: Ints) -> list[HostSpan]:
        """Return the ops at the given indices."""
        columns = (column[at].tolist() for column in self.rows)
        return [
            HostSpan(EVALUATION, start, end, thread, sequence=sequence)
            for start, end, thread, sequence in zip(*columns, strict=True)
        ]

    def around(self, thread: Ints, t: Ints) -> list[HostSpan]:
        """Return the ops that enclose any (thread, t), in order."""
        return self.ops(np.flatnonzero(self.intervals.enclosing_any(thread, t)))


class SpanTree:
    """Spans of threads by thread, start and descending length, with the span that encloses each."""

    def __init__(self, spans: Iterable[Any]) -> None:
        given = list(spans)
        columns = (np.fromiter(map(place, given), np.int64, len(given)) for place in _PLACE)
        self.intervals = Intervals.build(*columns)
        self.spans = [given[row] for row in self.intervals.rows.tolist()]
        self.above = self.intervals.enclosing().tolist()

    def ancestors(self, at: int) -> Iterator[int]:
        """Yield the indices of the spans that enclose a span, innermost first."""
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
        """Return for each span whether any span that encloses it is marked in `own`."""
        result: list[bool] = []
        for above in self.above:  # an index below the span's own
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
