"""Clock readings: every timed cell has at least one, however quick it was and however late the
first answer comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profharness.config import parse_config
from profharness.run import BenchPlan, Cell, JournalEntry, Plan, Protocol
from profharness.worker import timing
from profharness.worker.timing import ClockReader, over_time
from profharness.worker.turns import bench_group
from profharness.worker.workspace import Workspace


def late(seconds: float, answer_s: float = 0.0) -> Callable[[], dict[str, Callable[[], Any]]]:
    """A source of clocks that opens after some seconds and takes a while to answer."""

    def ask() -> int:
        time.sleep(answer_s)
        return 1980

    def questions() -> dict[str, Callable[[], Any]]:
        time.sleep(seconds)
        return {"sm_mhz": ask}

    return questions


def test_the_nearest_reading_waits_for_the_first_one() -> None:
    reader = ClockReader(late(0.3))
    now = time.perf_counter()
    assert reader.between(now, now) == []
    assert over_time(reader.nearest(now, now)) == {
        "sm_mhz": 1980,
        "sm_mhz_min": 1980,
        "sm_mhz_max": 1980,
        "readings": 1,
    }


def test_a_reading_counts_while_it_is_under_way() -> None:
    reader = ClockReader(late(0.0, answer_s=0.2))
    time.sleep(0.1)
    begin = time.perf_counter()
    end = begin + 0.01
    time.sleep(0.2)
    assert reader.between(begin, end) == [{"sm_mhz": 1980}]
    assert reader.between(begin - 60, begin - 50) == []


def test_the_nearest_is_the_nearest() -> None:
    counted = iter(range(1_000_000))
    reader = ClockReader(lambda: {"sm_mhz": lambda: next(counted)})
    time.sleep(0.3)
    end = time.perf_counter()
    (first,) = reader.nearest(0.0, 0.0)
    (last,) = reader.nearest(end, end)
    assert first == {"sm_mhz": 0}
    assert last["sm_mhz"] >= 3


def test_without_a_source_nothing_is_said_and_nobody_waits() -> None:
    def broken() -> dict[str, Callable[[], Any]]:
        raise OSError("no NVML")

    begin = time.perf_counter()
    assert ClockReader(broken).nearest(begin, begin) == []
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize("iterations", [1, 3])
def test_cells_too_quick_for_the_thread_have_a_reading(tmp_path: Path, iterations: int) -> None:
    """The first answer comes after all turns are done."""
    config = parse_config("1,1,8,8").resolve("cpu")
    cells = [Cell(f"c{n}", config, name) for n, name in enumerate(("auto", "flash", "math"))]
    protocol = Protocol(iterations=iterations, warmup=0, samples=0, device="cpu")
    plan = Plan(tuple(cells), protocol, ("events",), 0)
    workspace = Workspace("cpu", tmp_path, plan, ClockReader(late(1.5)), timing.L2Flush(), {})
    ended: list[Cell] = []

    def write(entry: JournalEntry) -> None:
        ended.extend([entry.result] if entry.result else [])

    bench_group(cells, workspace, replace(BenchPlan(), iterations=iterations), write)
    assert [cell.status for cell in ended] == ["ok"] * 3
    for cell in ended:
        assert cell.clocks["sm_mhz_min"] <= cell.clocks["sm_mhz"] <= cell.clocks["sm_mhz_max"]
        assert cell.clocks["readings"] >= 1
