"""Unprofiled latency: raw nanoseconds a call, by CUDA events, by CUDA-graph replay, or by the wall
clock on the CPU.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from statistics import median
from typing import Any, TypeVar

import torch

from profharness.worker.environment import gpu_uuid

PERIOD_S = 0.05
KEPT = 4096  # readings, more than three minutes
FIRST_S = 5.0  # NVML's first answer can be this late
BUDGET_S = 0.5  # per measurement; a slow call gets fewer samples, never under MIN_SAMPLES
MIN_SAMPLES = 5
GRAPH_CALLS = 100  # at most: a replay's own launch costs 11 us, many calls in a graph share it
GRAPH_NS = 500_000  # no more calls than this in one graph: by then that cost is lost in the noise
TRIAL_CALLS = 10
# Beyond this the launch path is no part of the time, and a graph tells nothing new.
GRAPH_WORTH_MAX_NS = 5_000_000
FLUSH_BYTES = 256 << 20  # more than any L2 (H200: 60 MB)
T = TypeVar("T")
Questions = dict[str, Callable[[], Any]]


class ClockReader:
    """Reads the clocks of torch's device 0 every PERIOD_S, in a thread of its own: NVML can take
    milliseconds an answer. A value that NVML does not give is left out. open_questions gives the
    questions by name; it runs in the thread.
    """

    def __init__(self, open_questions: Callable[[], Questions] | None = None) -> None:
        self._latest: dict[str, Any] = {}
        # each with the moments between which it was asked for and answered
        self._kept: deque[tuple[float, float, dict[str, Any]]] = deque(maxlen=KEPT)
        self._begun = threading.Event()
        ask = open_questions or _questions
        threading.Thread(target=self._run, args=(ask,), daemon=True).start()

    def __call__(self) -> dict[str, Any]:
        """The last reading, by the names of `_questions`; throttle_reasons is NVML's bit mask."""
        return self._latest

    def between(self, begin: float, end: float) -> list[dict[str, Any]]:
        """The readings under way at some time between two moments of `time.perf_counter`."""
        kept = tuple(self._kept)
        return [reading for begun, answered, reading in kept if begun <= end and begin <= answered]

    def nearest(self, begin: float, end: float) -> list[dict[str, Any]]:
        """The reading nearest to a time too short for one of its own; empty without NVML."""
        self._begun.wait(FIRST_S)
        kept = tuple(self._kept)
        if not kept:
            return []
        return [min(kept, key=lambda item: max(begin - item[1], item[0] - end, 0.0))[2]]

    def _run(self, open_questions: Callable[[], Questions]) -> None:
        try:
            questions = open_questions()
        except Exception:
            self._begun.set()
            return  # no NVML, no clocks: the cells go without
        while True:
            begun = time.perf_counter()
            reading = {}
            for name, question in questions.items():
                with contextlib.suppress(Exception):
                    reading[name] = question()
            if reading:
                self._latest = reading
                self._kept.append((begun, time.perf_counter(), reading))
            self._begun.set()
            time.sleep(PERIOD_S)


def over_time(readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Many readings as one: the median of each value, with `_min` and `_max` beside it, and every
    throttle reason that was ever set; nothing of none.
    """
    summary: dict[str, Any] = {}
    for name in dict.fromkeys(name for reading in readings for name in reading):
        values = [reading[name] for reading in readings if name in reading]
        if name == "throttle_reasons":
            summary[name] = reduce(or_, values)
        else:
            spread = {f"{name}_min": min(values), f"{name}_max": max(values)}
            summary |= {name: median(values), **spread}
    return summary | {"readings": len(readings)} if summary else {}


def _questions() -> Questions:
    import pynvml as nvml

    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid().encode())
    except nvml.NVMLError:
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
    return {
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }


class L2Flush:
    """Evicts the L2 by writing a buffer much larger than it; the buffer is made once."""

    def __init__(self) -> None:
        self._buffer: Any = None

    def __call__(self) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._buffer.zero_()


def time_events(call: Callable[[], Any], samples: int, flush: L2Flush) -> list[int]:
    """Each sample is the time between two events around one eager call, L2 flushed before it. All
    pairs are recorded before the first is read, so the launch queue stays ahead of the device. For
    a call shorter than its own launch path this measures the launch path.
    """
    pairs = []
    deadline = time.perf_counter() + BUDGET_S
    for index in range(samples):
        flush()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        pairs.append((start, stop))
        if index + 1 >= MIN_SAMPLES and time.perf_counter() > deadline:
            break
        if index % 8 == 7:
            stop.synchronize()
    torch.cuda.synchronize()
    return [round(start.elapsed_time(stop) * 1e6) for start, stop in pairs]


def time_graph(call: Callable[[], Any], samples: int, expected_ns: int) -> list[int]:
    """Each sample is a graph replay's time over its calls, L2 warm. Raises what the capture raises."""
    return open_graph(call, expected_ns)(samples)


def open_graph(call: Callable[[], Any], expected_ns: int) -> Callable[[int], list[int]]:
    """A graph of the call, captured and replayed once: it gives as many samples as it is asked for,
    or as fit into BUDGET_S. How many calls a graph holds is found by a short one, since expected_ns,
    of a call outside of graphs, may be mostly the CPU's. Raises what the capture raises.
    """
    calls = max(1, min(TRIAL_CALLS, GRAPH_NS // max(1, expected_ns)))
    graph = _captured(call, calls)
    graph.replay()
    per_call = max(1, round(elapsed_ms(graph.replay) * 1e6 / calls))
    enough = min(GRAPH_CALLS, GRAPH_NS // per_call)
    if enough > calls:
        calls, graph = enough, _captured(call, enough)
        graph.replay()
        torch.cuda.synchronize()

    def replay(samples: int) -> list[int]:
        times = sampled(lambda: elapsed_ms(graph.replay), samples)
        return [round(milliseconds * 1e6 / calls) for milliseconds in times]

    return replay


def _captured(call: Callable[[], Any], calls: int) -> Any:
    # torch.cuda.graph would collect garbage and empty the allocator's cache first, which costs more
    # than the timing
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for _ in range(calls):
                call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def time_wall(call: Callable[[], Any], samples: int) -> list[int]:
    """Each sample is one call on the CPU by the monotonic clock."""
    return sampled(lambda: wall_ns(call), samples)


def sampled(sample: Callable[[], T], count: int, budget_s: float = BUDGET_S) -> list[T]:
    """As many samples as fit into the budget, at least MIN_SAMPLES and at most count."""
    samples: list[T] = []
    deadline = time.perf_counter() + budget_s
    while len(samples) < count:
        samples.append(sample())
        if len(samples) >= MIN_SAMPLES and time.perf_counter() > deadline:
            break
    return samples


def elapsed_ms(call: Callable[[], Any]) -> float:
    """Milliseconds between two events around a call on the current stream."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def wall_ns(call: Callable[[], Any]) -> int:
    """Nanoseconds of a call by the monotonic clock."""
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start
