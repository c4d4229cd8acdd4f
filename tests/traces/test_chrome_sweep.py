"""Compare the interval search with brute force."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profharness.traces import intervals
from profharness.traces.attribution import MAX_DEPTH, StackIds
from profharness.traces.chrome import parse_chrome
from profharness.traces.columns import Ints
from profharness.traces.intervals import Intervals

INTERVALS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 30)), max_size=30
)


def brute(rows: list[tuple[int, int, int]], thread: int, t: int) -> list[tuple[int, int, int]]:
    around = [r for r in rows if r[0] == thread and r[1] <= t < max(r[1] + r[2], r[1] + 1)]
    return sorted(around, key=lambda r: (r[1], -max(r[2], 1)))


def columns(rows: list[tuple[int, int, int]]) -> list[Ints]:
    return [np.array([r[i] for r in rows], np.int64) for i in range(3)]


@pytest.fixture(params=["compiled", 0, 1, 16], autouse=True, scope="module")
def steps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run with the compiled code, with linear steps and with the binary search. 0 steps: search
    only.
    """
    assert intervals.compiled_parents is not None
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "compiled":
            patch.setattr(intervals, "compiled_parents", None)
            patch.setattr(intervals, "STEPS", request.param)
        yield


@given(INTERVALS, st.sampled_from([0, -(1 << 61), 1 << 61]))
def test_intervals_have_an_order_parents_and_enclosing_intervals(
    rows: list[tuple[int, int, int]], far: int
) -> None:
    rows = [(0, far, 1), *rows]  # so far from the others that one key cannot represent both columns
    threads, start, dur = columns(rows)
    built = Intervals(threads, start, start + dur)
    # of equal intervals the first stays first
    keys = [(thread, begin, -max(lasts, 1)) for thread, begin, lasts in rows]
    assert built.rows.tolist() == sorted(range(len(rows)), key=keys.__getitem__)
    enclosing = built.enclosing().tolist()
    for i, nested in enumerate(built.nested.tolist()):
        before = [j for j in range(i) if built.thread[j] == built.thread[i]]
        earlier = [j for j in before if built.stop[j] > built.start[i]]
        assert built.parent[i] == (earlier[-1] if earlier else -1)
        around = [j for j in before if built.stop[j] >= built.stop[i]]
        assert enclosing[i] == (around[-1] if around else -1)
        stops = [int(built.stop[j]) for j in _ancestors(built, i)]
        assert nested == (stops == sorted(stops, reverse=True))


@given(INTERVALS, st.integers(0, 2), st.integers(-2, 75))
def test_a_chain_contains_every_enclosing_interval(
    rows: list[tuple[int, int, int]], thread: int, t: int
) -> None:
    threads, start, dur = columns(rows)
    built = Intervals(threads, start, start + dur)
    at = built.innermost(np.array([thread]), np.array([t]))
    (row,) = built.chains(at, np.array([t]), 40)
    chain = row[row >= 0][::-1].tolist()
    found = [(int(built.thread[i]), int(built.start[i]), int(built.stop[i])) for i in chain]
    wanted = [(r[0], r[1], max(r[1] + r[2], r[1] + 1)) for r in brute(rows, thread, t)]
    assert found == wanted
    assert at[0] == (chain[-1] if chain else -1)
    if at[0] >= 0 and built.nested[at[0]]:
        assert chain == _ancestors(built, int(at[0]))


def test_a_deep_stack_keeps_its_outermost_ops_and_the_innermost() -> None:
    ids, above = StackIds(), -1
    for name in range(MAX_DEPTH + 5):
        above = ids[above, name]
    assert ids.deep == 5
    assert len(ids.rows) == MAX_DEPTH + 5
    assert ids.rows[above] == (MAX_DEPTH - 2, MAX_DEPTH + 4)


def _ancestors(built: Intervals, at: int) -> list[int]:
    found = []
    while at >= 0:
        found.append(at)
        at = int(built.parent[at])
    return found[::-1]


@pytest.mark.parametrize("category", ["user_annotation", "cpu_op"])
@pytest.mark.parametrize("shape", ["overlapping", "nested"])
def test_many_overlapping_intervals_take_linear_time(
    category: str, shape: str, tmp_path: Path
) -> None:
    count = 40_000
    event = '{{"ph":"X","cat":"{}","name":"n{}","pid":1,"tid":1,"ts":{},"dur":{}}}'
    call = '{{"ph":"X","cat":"{}","name":"k","pid":1,"tid":1,"ts":{},"dur":1,"args":{{"correlation":{}}}}}'
    lines = [
        event.format(category, i % 97, i, count if shape == "overlapping" else 2 * (count - i))
        for i in range(count)
    ]
    for i in range(0, count, 8) if category == "user_annotation" else ():
        lines += [call.format("cuda_runtime", i, i + 1), call.format("kernel", i, i + 1)]
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [\n' + ",\n".join(lines) + "\n]}")
    before = time.process_time()
    with closing(parse_chrome(path)) as trace:
        assert trace.num_launches == (count if category == "cpu_op" else count // 8)
        assert any("without their middle part" in text for text in trace.warnings) == (
            category == "cpu_op"
        )
        assert max(text.count(";") for text in [*trace.op_paths, ""]) < MAX_DEPTH
    assert time.process_time() - before < 20  # quadratic time would take minutes
