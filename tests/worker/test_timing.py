"""Holding cold calls and graph replays: samples that the device started too early do not count."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from profharness.recording.worker import timing
from profharness.recording.worker.timing import (
    DELAY_MAX_NS,
    DELAY_NS,
    MIN_SAMPLES,
    CpuWait,
    NotQueuedError,
    Queued,
    StreamDelay,
    open_graph,
    overlapped,
    queue_samples,
)
from profharness.rows import CPU_WAIT


def queue_of(needed_ns: int, delay: StreamDelay, queued: list[int]) -> Queued:
    """Return a call whose queueing takes `needed_ns`. It records its own time if the delay lasts longer."""
    queued.append(delay.length_ns)
    place = len(queued)
    return delay.length_ns <= needed_ns, lambda: place


def test_holds_grow_until_all_work_is_queued() -> None:
    delay, queued = StreamDelay(), list[int]()
    times = queue_samples(lambda: queue_of(3 * DELAY_NS, delay, queued), delay.lengthen, 20)
    assert queued[:3] == [DELAY_NS, 2 * DELAY_NS, 4 * DELAY_NS]
    assert set(queued[3:]) == {4 * DELAY_NS}
    assert times == list(range(3, 23))  # without the two that were queued too late, and in order


def test_a_call_that_waits_for_the_device_is_never_queued() -> None:
    delay, queued = StreamDelay(), list[int]()
    with pytest.raises(NotQueuedError, match="waits for the GPU"):
        queue_samples(lambda: queue_of(2 * DELAY_MAX_NS, delay, queued), delay.lengthen, 20)
    assert DELAY_MAX_NS / 2 < queued[-1] <= DELAY_MAX_NS


@dataclass
class Stream:
    """A GPU stream and the host that launches into it, each with its own clock in ns. A cycle is 1 ns."""

    launch_ns: int
    host_ns: int = 0
    device_ns: int = 0

    def run(self, nanoseconds: int) -> None:
        self.device_ns = max(self.host_ns, self.device_ns) + nanoseconds

    def graph(self, calls: int) -> SimpleNamespace:
        def replay() -> None:
            self.host_ns += self.launch_ns
            self.run(calls * CALL_NS)

        return SimpleNamespace(replay=replay)

    def event(self, **_: Any) -> SimpleNamespace:
        def record() -> None:
            self.run(0)
            made.ns = self.device_ns

        def wait() -> None:
            self.host_ns = max(self.host_ns, made.ns)

        made = SimpleNamespace(record=record, synchronize=wait, ns=0)
        made.query = lambda: made.ns <= self.host_ns
        made.elapsed_time = lambda end: (end.ns - made.ns) / 1e6
        return made


CALL_NS = 20_000


@pytest.mark.parametrize("launch_ns", [0, 5_000, 40_000, 3_000_000])
def test_graph_samples_exclude_host_time(monkeypatch: pytest.MonkeyPatch, launch_ns: int) -> None:
    stream = Stream(launch_ns)
    monkeypatch.setattr(timing, "TimingEvent", stream.event)
    monkeypatch.setattr(timing.torch.cuda, "_sleep", stream.run)
    monkeypatch.setattr(timing, "_captured", lambda _, calls: stream.graph(calls))
    assert open_graph(lambda: None, 1)(20) == {"graph": [CALL_NS] * 20}


def test_each_burst_is_awaited_after_the_next_is_queued() -> None:
    events: list[str] = []

    def queue() -> Callable[[], int]:
        number = sum(event.startswith("queue") for event in events)
        events.append(f"queue {number}")

        def read() -> int:
            events.append(f"read {number}")
            return number

        return read

    assert overlapped(queue, 4) == [0, 1, 2, 3]
    assert events == [
        *("queue 0", "queue 1", "read 0", "queue 2", "read 1", "queue 3", "read 2", "read 3"),
    ]


def test_a_slow_call_has_the_least_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAST_BUDGET_S", 0.0)
    monkeypatch.setattr(timing, "SAMPLE_S", 0.0)
    assert overlapped(lambda: lambda: 1, 30) == [1] * MIN_SAMPLES
    assert queue_samples(lambda: (False, lambda: 1), lambda: None, 30) == [1] * MIN_SAMPLES


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="nobody counts it")
def test_a_thread_that_shares_its_cpu_waits_for_it() -> None:
    before, wait = os.sched_getaffinity(0), CpuWait()
    burner = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"],
                              stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert burner.stdout is not None and burner.stdout.readline()
        os.sched_setaffinity(burner.pid, {min(before)})
        os.sched_setaffinity(0, {min(before)})

        def waited() -> bool:
            with wait:
                end = time.perf_counter() + 0.1
                while time.perf_counter() < end:
                    pass
            return wait.reading().get(CPU_WAIT, 0) > 0.2

        until(waited)
    finally:
        os.sched_setaffinity(0, before)
        burner.kill()
        burner.communicate()
    assert wait.reading()[CPU_WAIT] < 1
    assert CpuWait().reading() == {}
