"""Unprofiled latency: raw nanoseconds a call, by CUDA events, by CUDA-graph replay, or by the wall
clock on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

BUDGET_S = 0.5  # per measurement; a slow call gets fewer samples, never under MIN_SAMPLES
MIN_SAMPLES = 5
GRAPH_CALLS = 100  # at most: a replay's own launch costs 11 us, many calls in a graph share it
GRAPH_NS = 500_000  # no more calls than this in one graph: by then that cost is lost in the noise
TRIAL_CALLS = 10
GRAPH_WORTH_MAX_NS = (
    5_000_000  # beyond this the launch path is no part of the time, and a graph tells nothing new
)
FLUSH_BYTES = 256 << 20  # more than any L2 (H200: 60 MB)


class L2Flush:
    """Evicts the L2 by writing a buffer much larger than it; the buffer is made once."""

    def __init__(self) -> None:
        self._buffer: Any = None

    def __call__(self) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._buffer.zero_()


def time_events(call: Callable[[], Any], samples: int, flush: L2Flush) -> list[int]:
    """Each sample is the time between two events around one eager call, L2 flushed before it.

    All pairs are recorded before the first is read, so the launch queue stays ahead of the device.
    For a call shorter than its own launch path this measures the launch path.
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
    """Each sample is a graph replay's time over the calls in it, L2 warm. Raises what the capture
    raises.
    """
    return open_graph(call, expected_ns)(samples)


def open_graph(call: Callable[[], Any], expected_ns: int) -> Callable[[int], list[int]]:
    """A graph of the call, captured and replayed once: it gives as many samples as it is asked for,
    or as fit into BUDGET_S. How many calls a graph holds is found by a short one, since expected_ns,
    of a call outside of graphs, may be mostly the CPU's. Raises what the capture raises.
    """
    calls = max(1, min(TRIAL_CALLS, GRAPH_NS // max(1, expected_ns)))
    graph = _captured(call, calls)
    graph.replay()
    per_call = max(1, round(_replayed_ms(graph) * 1e6 / calls))
    enough = min(GRAPH_CALLS, GRAPH_NS // per_call)
    if enough > calls:
        calls, graph = enough, _captured(call, enough)
        graph.replay()
        torch.cuda.synchronize()

    def replay(samples: int) -> list[int]:
        pairs = []
        deadline = time.perf_counter() + BUDGET_S
        for index in range(samples):
            pairs.append(_replayed_ms(graph))
            if index + 1 >= MIN_SAMPLES and time.perf_counter() > deadline:
                break
        return [round(milliseconds * 1e6 / calls) for milliseconds in pairs]

    return replay


def _replayed_ms(graph: Any) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def _captured(call: Callable[[], Any], calls: int) -> Any:
    """A graph of that many calls. torch.cuda.graph would collect garbage and empty the allocator's
    cache first, which costs more than the timing.
    """
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
    durations = []
    deadline = time.perf_counter() + BUDGET_S
    for index in range(samples):
        start = time.perf_counter_ns()
        call()
        durations.append(time.perf_counter_ns() - start)
        if index + 1 >= MIN_SAMPLES and time.perf_counter() > deadline:
            break
    return durations
