"""The interval sweep against brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from profharness.parse.columns import Ints
from profharness.parse.join import Intervals

INTERVALS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 30)), max_size=30
)


def brute(rows: list[tuple[int, int, int]], thread: int, t: int) -> list[tuple[int, int, int]]:
    around = [r for r in rows if r[0] == thread and r[1] <= t < max(r[1] + r[2], r[1] + 1)]
    return sorted(around, key=lambda r: (r[1], -max(r[2], 1)))


def columns(rows: list[tuple[int, int, int]]) -> list[Ints]:
    return [np.array([r[i] for r in rows], np.int64) for i in range(3)]


@given(INTERVALS, st.integers(0, 2), st.integers(-2, 75))
def test_chain_is_every_enclosing_interval(
    rows: list[tuple[int, int, int]], thread: int, t: int
) -> None:
    threads, start, dur = columns(rows)
    built = Intervals.build(threads, start, start + dur)
    (at,) = built.innermost(np.array([thread]), np.array([t]))
    chain = built.chain(int(at), t)
    found = [(int(built.thread[i]), int(built.start[i]), int(built.stop[i])) for i in chain]
    wanted = [(r[0], r[1], max(r[1] + r[2], r[1] + 1)) for r in brute(rows, thread, t)]
    assert found == wanted
    if at >= 0 and built.nested[at]:
        assert chain == _ancestors(built, int(at))


def _ancestors(built: Intervals, at: int) -> list[int]:
    found = []
    while at >= 0:
        found.append(at)
        at = int(built.parent[at])
    return found[::-1]


@given(INTERVALS)
def test_parent_encloses_the_start(rows: list[tuple[int, int, int]]) -> None:
    threads, start, dur = columns(rows)
    built = Intervals.build(threads, start, start + dur)
    for i, parent in enumerate(built.parent.tolist()):
        earlier = [
            j for j in range(i)
            if built.thread[j] == built.thread[i] and built.stop[j] > built.start[i]
        ]  # fmt: skip
        assert parent == (earlier[-1] if earlier else -1)
