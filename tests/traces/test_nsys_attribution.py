"""Compare the ranges of launches with a naive search, on random captures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nsys_make import Maker

from profharness.traces.nsys import parse_nsys

THREADS = [(1 << 48) | (pid << 24) | tid for pid in (5, 6) for tid in (5, 9)]
NAMES = ("profharness:a", "profharness:b", "x", "y")
APIS = ("cudaLaunchKernel_v7000", "cudaGraphLaunch_v10000", "cudaSomethingNew_v13000", None)

ranges = st.lists(
    st.tuples(
        st.sampled_from(NAMES), st.integers(0, 60), st.integers(1, 40), st.sampled_from(THREADS),
        st.sampled_from((59, 60)),
    ),
    max_size=12,
    unique_by=lambda row: (row[1], row[3] >> 24),  # otherwise the innermost range is ambiguous
)  # fmt: skip
calls = st.lists(
    st.tuples(st.integers(0, 100), st.sampled_from(THREADS), st.sampled_from(APIS)),
    min_size=1, max_size=12,
)  # fmt: skip


def naive(rows: Sequence[tuple[Any, ...]], t: int, thread: int) -> tuple[str | None, str | None]:
    """Return range and cell_range by checking every range."""
    around = sorted((r for r in rows if r[1] <= t < r[1] + r[2]), key=lambda row: row[1])
    process = [row for row in around if row[3] >> 24 == thread >> 24]
    own = [row for row in process if row[3] == thread]
    cells = [row for row in own if row[0].startswith("profharness:")]
    cells = cells or [row for row in process if row[0].startswith("profharness:")]
    wide = [row for row in process if row[4] == 60]
    only = process if len({row[3] for row in process}) == 1 else []
    inner = own or cells or wide or only
    return (inner[-1][0] if inner else None), (cells[-1][0] if cells else None)


@settings(max_examples=80)
@given(told=ranges, made=calls, high=st.sampled_from((0, 1 << 31, 1 << 41)))
def test_ranges_equal_those_of_a_naive_search(
    tmp_path_factory: pytest.TempPathFactory,
    told: list[tuple[str, int, int, int, int]],
    made: list[tuple[int, int, str | None]],
    high: int,
) -> None:
    """`high`: correlation ids too large for flags, and invalid ones."""
    maker = Maker()
    for name, start, duration, thread, kind in told:
        maker.nvtx(name, start, start + duration, globalTid=thread, eventType=kind)
    expected = []
    for number, (t, thread, api) in enumerate(made):
        maker.launch(t, thread=thread, api=api, correlation=high + number, streamId=number)
        known = api is not None and high < 1 << 40
        expected.append(naive(told, t, thread) if known else (None, None))
    path = maker.write(tmp_path_factory.mktemp("made") / "t.sqlite")
    found: dict[int, tuple[str | None, str | None]] = {}
    with closing(parse_nsys(path)) as trace:
        names = {index: one.name for index, one in enumerate(trace.ranges)}
        for batch in trace.batches():
            for i, stream in enumerate(batch.stream.tolist()):
                found[stream] = (
                    names.get(int(batch.range[i])),
                    names.get(int(batch.cell_range[i])),
                )
    assert [found[number] for number in range(len(made))] == expected
