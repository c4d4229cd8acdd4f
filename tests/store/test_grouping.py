"""Group statistics are exact and need bounded memory, however rows are split into blocks."""

from __future__ import annotations

import statistics
import tracemalloc
from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from profharness.store.groups import Grouping

ROW = st.tuples(
    st.integers(-1, 3),
    st.integers(-1, 2),
    st.integers(0, 10**9) | st.integers(0, 3),
    st.integers(0, 10**12),
)


@given(
    rows=st.lists(ROW, min_size=1, max_size=60),
    block=st.integers(1, 20),
    merge_rows=st.integers(1, 80),
)
def test_groups_equal_direct_computation(
    rows: list[tuple[int, int, int, int]], block: int, merge_rows: int
) -> None:
    grouping = Grouping(("a", "b"), merge_rows=merge_rows)
    for at in range(0, len(rows), block):
        columns = [
            np.array(column, np.int64) for column in zip(*rows[at : at + block], strict=True)
        ]
        grouping.add(columns[:2], columns[2], columns[3])
    for width, found in enumerate(grouping.finish(), start=1):
        names = list(zip(*(found[name].tolist() for name in "ab"[:width]), strict=True))
        expected: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for *key, duration, start in rows:
            expected[tuple(key[:width])].append((duration, start))
        assert sorted(names) == sorted(expected)
        for index, name in enumerate(names):
            durations = [duration for duration, _ in expected[name]]
            assert found["launches"][index] == len(durations)
            assert found["total_ns"][index] == sum(durations)
            assert abs(found["median_ns"][index] - statistics.median(durations)) <= 0.5
            assert found["min_ns"][index] == min(durations)
            assert found["max_ns"][index] == max(durations)
            assert found["first_ns"][index] == min(start for _, start in expected[name])


def test_memory_grows_with_distinct_durations() -> None:
    random = np.random.default_rng(0)
    grouping = Grouping(("a", "b"), merge_rows=5000)
    tracemalloc.start()
    for _ in range(300):
        keys = [np.zeros(1000, np.int64), random.integers(0, 2, 1000)]
        grouping.add(keys, random.integers(2000, 3000, 1000), random.integers(0, 10**12, 1000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grouping.finish()[1]["launches"].sum() == 300_000
    assert peak < 2_000_000  # 300,000 rows are 7 MB
