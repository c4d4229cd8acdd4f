"""Every timed cell has at least one clock reading, however short it is and however late the first
reading arrives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, until

from profharness.attention.config import parse_config
from profharness.recording.worker import timing
from profharness.recording.worker.bench import Group
from profharness.recording.worker.timing import ClockReader, Workspace, over_time
from profharness.run import BenchPlan, Cell, JournalEntry, Plan, Protocol


def questions(ask: Callable[[], int]) -> Callable[[], dict[str, Callable[[], Any]]]:
    """Return a clock source that opens at once."""
    return lambda: {"sm_mhz": ask}


def late(seconds: float) -> Callable[[], dict[str, Callable[[], Any]]]:
    """Return a clock source that opens after some seconds."""

    def opened() -> dict[str, Callable[[], Any]]:
        time.sleep(seconds)
        return {"sm_mhz": lambda: 1980}

    return opened


def test_the_nearest_reading_waits_for_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FIRST_S", PATIENCE_S)
    answer = threading.Event()
    reader = ClockReader(questions(lambda: answer.wait(PATIENCE_S) and 1980))
    now = time.perf_counter()
    assert reader.between(now, now) == []
    threading.Timer(0.1, answer.set).start()
    assert over_time(reader.nearest(now, now)) == {
        "sm_mhz": 1980,
        "sm_mhz_min": 1980,
        "sm_mhz_max": 1980,
        "readings": 1,
    }


def test_a_reading_counts_while_it_is_under_way() -> None:
    asked, answer = threading.Event(), threading.Event()

    def ask() -> int:
        if asked.is_set():
            raise RuntimeError("one reading is enough")
        asked.set()
        answer.wait(PATIENCE_S)
        return 1980

    reader = ClockReader(questions(ask))
    assert asked.wait(PATIENCE_S)
    begin = time.perf_counter()
    end = begin + 1e-6
    answer.set()
    until(lambda: reader.between(begin, end))
    assert reader.between(begin, end) == [{"sm_mhz": 1980}]
    assert reader.between(begin - 60, begin - 50) == []


def test_the_nearest_reading_is_returned() -> None:
    counted = iter(range(1_000_000))
    reader = ClockReader(questions(lambda: next(counted)))
    until(lambda: reader.latest().get("sm_mhz", 0) >= 4)
    end = time.perf_counter()
    (first,) = reader.nearest(0.0, 0.0)
    (last,) = reader.nearest(end, end)
    assert first == {"sm_mhz": 0}
    assert last["sm_mhz"] >= 3


def test_without_a_source_there_is_no_reading_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, Callable[[], Any]]:
        raise OSError("no NVML")

    monkeypatch.setattr(timing, "FIRST_S", PATIENCE_S)
    begin = time.perf_counter()
    assert ClockReader(broken).nearest(begin, begin) == []
    assert time.perf_counter() - begin < PATIENCE_S


@pytest.mark.parametrize("iterations", [1, 3])
def test_cells_shorter_than_a_reading_have_one(tmp_path: Path, iterations: int) -> None:
    """The first reading arrives after all turns."""
    config = parse_config("1,1,8,8").resolve("cpu")
    cells = [Cell(f"c{n}", config, name) for n, name in enumerate(("auto", "flash", "math"))]
    protocol = Protocol(iterations=iterations, warmup=0, samples=0, device="cpu")
    plan = Plan(tuple(cells), protocol, ("events",), 0)
    ended: list[Cell] = []

    def write(entry: JournalEntry) -> None:
        ended.extend([entry.result] if entry.result else [])

    workspace = Workspace(
        "cpu", tmp_path, plan, {}, tuple(cells), {}, write, ClockReader(late(1.5))
    )
    Group(config, workspace, replace(BenchPlan(), iterations=iterations)).run(cells)
    assert [cell.status for cell in ended] == ["ok"] * 3
    for cell in ended:
        assert cell.clocks["sm_mhz_min"] <= cell.clocks["sm_mhz"] <= cell.clocks["sm_mhz_max"]
        assert cell.clocks["readings"] >= 1
