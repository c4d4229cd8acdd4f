"""Time calls without a profiler.

On a GPU, there are three measurements: single calls with a cold L2, bursts of eager calls, and
replays of a CUDA graph. On a CPU, calls are timed by the wall clock. Samples are in ns per call.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from operator import or_
from pathlib import Path
from statistics import median
from time import perf_counter, perf_counter_ns, sleep
from typing import Any, TypeVar

import torch
from torch.cuda import synchronize

from profharness.device_types import CUDA, is_gpu
from profharness.environment import gpu_handle
from profharness.recording.worker.environment import gpu_uuid
from profharness.rows import COLD, CPU_WAIT, EAGER, GRAPH, HOST, WALL
from profharness.run import Cell, JournalEntry, Plan

PERIOD_S = 0.05  # time between two readings of the clocks
KEPT = 4096  # maximum number of stored readings; they cover more than three minutes
FIRST_S = 5.0  # maximum time to wait for the first reading of NVML
# Time limits of a measurement. They reduce the number of samples of a slow call, but not below
# MIN_SAMPLES.
SAMPLE_S = 0.001  # time allowed per requested sample
LEAST_BUDGET_S = 0.03  # minimum time limit, which is longer than a turn of a benchmark
WALL_BUDGET_S = 0.5  # time limit for calls on a CPU, which other programs disturb more
MIN_SAMPLES = 5
GRAPH_CALLS = 100  # maximum number of calls in a graph, which share the time to start it
GRAPH_NS = 500_000  # intended duration of a graph; the time to start it is then negligible
TRIAL_CALLS = 10
FLUSH_BYTES = 256 << 20  # larger than the L2 of any GPU (H200: 60 MB)
DELAY_NS = 50_000  # first delay; doubled if queueing the launches of a call takes longer
DELAY_MAX_NS = 50_000_000  # maximum delay; a call that takes longer must be waiting for the GPU
TRIAL_CYCLES = 1_000_000  # length of the delay that is timed to find the clock rate
EAGER_CALLS = 20  # maximum calls in a burst, whose launches must fit into CUDA's queue (1024)
EAGER_NS = 500_000  # intended duration of a burst
T = TypeVar("T")
Questions = dict[str, Callable[[], Any]]
Write = Callable[[JournalEntry], None]


class TimingEvent(torch.cuda.Event):  # type: ignore[misc]
    """A CUDA event that keeps torch's own methods even if a backend later replaces them."""

    record = torch.cuda.Event.record
    query = torch.cuda.Event.query
    synchronize = torch.cuda.Event.synchronize
    elapsed_time = torch.cuda.Event.elapsed_time


class ClockReader:
    """Reads the clocks, power and temperature of torch's device 0 every PERIOD_S in a thread.

    The thread is separate because an NVML query can take milliseconds. Values that NVML does not
    provide are left out. `open_questions` is called in the thread and returns functions that query
    one value each.
    """

    def __init__(self, open_questions: Callable[[], Questions] | None = None) -> None:
        # (time at which the queries began, time at which they ended, reading)
        self._kept: deque[tuple[float, float, dict[str, Any]]] = deque(maxlen=KEPT)
        self._begun = threading.Event()
        ask = open_questions or _questions
        threading.Thread(target=self._run, args=(ask,), daemon=True).start()

    def latest(self) -> dict[str, Any]:
        """Return the last reading, or an empty dict if there is none."""
        return self._kept[-1][2] if self._kept else {}

    def between(self, begin: float, end: float) -> list[dict[str, Any]]:
        """Return the readings that overlap an interval, given by two times of `perf_counter`."""
        kept = tuple(self._kept)
        return [reading for begun, answered, reading in kept if begun <= end and begin <= answered]

    def nearest(self, begin: float, end: float) -> list[dict[str, Any]]:
        """Return a list that contains only the reading nearest to an interval.

        The list is empty if NVML is not available.
        """
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
            return  # without NVML, cells have no clocks
        while True:
            begun = perf_counter()
            reading = {}
            for name, question in questions.items():
                with contextlib.suppress(Exception):
                    reading[name] = question()
            if reading:
                self._kept.append((begun, perf_counter(), reading))
            self._begun.set()
            sleep(PERIOD_S)


def over_time(readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize readings by the median, minimum and maximum of each value.

    For example, `sm_mhz` becomes `sm_mhz`, `sm_mhz_min` and `sm_mhz_max`. Throttle reasons are
    combined with a bitwise or. Return an empty dict if there are no readings.
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


class CpuWait:
    """Measures how long the calling thread waits for a CPU in `with` blocks.

    A thread waits if it is ready to run but all CPUs are busy with other threads.
    """

    def __init__(self) -> None:
        self._waited_ns = self._passed_ns = 0

    def __enter__(self) -> CpuWait:
        self._waited_ns -= _run_delay_ns()
        self._passed_ns -= perf_counter_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self._passed_ns += perf_counter_ns()
        self._waited_ns += _run_delay_ns()

    def reading(self) -> dict[str, float]:
        """Return the waiting time divided by the duration of the blocks, under the key CPU_WAIT.

        Return an empty dict if the thread never waited or the system does not count waiting times.
        """
        share = self._waited_ns / max(1, self._passed_ns)
        return {CPU_WAIT: round(share, 3)} if self._waited_ns > 0 else {}


def _run_delay_ns() -> int:
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _questions() -> Questions:
    import pynvml as nvml

    nvml.nvmlInit()
    handle = gpu_handle(nvml, gpu_uuid())
    return {
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }


@cache
def _flush_buffer() -> Any:
    return torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=CUDA)


def _flush_l2() -> None:
    _flush_buffer().zero_()


@dataclass
class Workspace:
    """The device, plan and other data that all functions of a worker process share."""

    device: str  # `cuda` or `cpu`
    folder: Path
    plan: Plan
    sources: dict[str, str]
    cells: tuple[Cell, ...]  # the cells of the plan that run in this process
    environment: dict[str, Any]
    write: Write  # appends an entry to the journal
    clocks: ClockReader | None = None

    def sync(self) -> None:
        if is_gpu(self.device):
            synchronize()

    def open_clocks(self) -> None:
        """Start to read clocks, except on a CPU or under nsys or ncu."""
        if is_gpu(self.device) and not self.plan.wrapped:
            self.clocks = ClockReader()


class NotQueuedError(RuntimeError):
    """Raised for a call that waits for the GPU, so it cannot be queued on a blocked stream."""


@dataclass
class StreamDelay:
    """Blocks the current stream for `length_ns`, so that the host can queue work meanwhile."""

    length_ns: int = DELAY_NS
    cycles_per_ns: float | None = None

    def __call__(self) -> None:
        if self.cycles_per_ns is None:
            spin = partial(torch.cuda._sleep, TRIAL_CYCLES)
            spin()  # the first launch loads the kernel, which takes a long time
            self.cycles_per_ns = TRIAL_CYCLES / (elapsed_ms(spin) * 1e6)
        torch.cuda._sleep(round(self.length_ns * self.cycles_per_ns))

    def lengthen(self) -> None:
        """Double the delay. Raise NotQueuedError if the delay would exceed DELAY_MAX_NS."""
        if self.length_ns * 2 > DELAY_MAX_NS:
            raise NotQueuedError(
                "the launches cannot be queued in advance, because the call waits for the GPU"
            )
        self.length_ns *= 2


def time_cold(call: Callable[[], Any], samples: int, delay: StreamDelay) -> dict[str, list[int]]:
    """Time single calls on the GPU. The L2 cache is flushed before each call.

    All launches of a call are queued before the first launch can run, so that the samples do not
    include time of the host. Raise NotQueuedError if the call waits for the GPU.
    """
    queue = partial(_queue_delayed, call, delay, _flush_l2)
    return {COLD: queue_samples(queue, delay.lengthen, samples)}


Queued = tuple[bool, Callable[[], int]]
"""Whether the GPU began before all work was queued, and a function that returns the time in ns."""


def queue_samples(
    queue: Callable[[], Queued], lengthen: Callable[[], None], samples: int
) -> list[int]:
    """Return the times in ns of the work that each call of `queue` puts onto the stream.

    If the GPU began before all work was queued, discard the sample, and call `lengthen` to make the
    delay before the next sample longer.
    """
    reads: list[Callable[[], int]] = []
    times: list[int] = []
    deadline = perf_counter() + budget_s(samples)
    while len(times) + len(reads) < samples:
        early, read = queue()
        if early:
            lengthen()
            continue
        reads.append(read)
        # Queue at most 8 samples, because the host would wait if CUDA's launch queue were full.
        # Queued work has not taken any time yet, so finish it before checking the deadline.
        if len(reads) == 8 or len(times) + len(reads) == MIN_SAMPLES:
            times += [each() for each in reads]
            reads.clear()
        if len(times) + len(reads) >= MIN_SAMPLES and perf_counter() > deadline:
            break
    return times + [each() for each in reads]


def _queue_delayed(
    call: Callable[[], Any], delay: StreamDelay, prepare: Callable[[], None] = lambda: None
) -> Queued:
    prepare()
    delay()
    start, stop = TimingEvent(enable_timing=True), TimingEvent(enable_timing=True)
    start.record()
    call()
    stop.record()
    return start.query(), lambda: elapsed_ns(start, stop)


def time_eager(call: Callable[[], Any], samples: int, expected_ns: int) -> dict[str, list[int]]:
    """Time bursts of calls with two events around each burst.

    The calls of a burst follow each other without a wait or a flush of the L2. Also return the time
    that the host takes per call, under the key HOST.
    """
    calls = max(1, min(EAGER_CALLS, EAGER_NS // max(1, expected_ns)))
    last: Any = None

    def queue() -> Callable[[], tuple[int, int]]:
        """Queue a burst. Return a function that waits until the burst is complete.

        The function returns the time per call in ns on the GPU, and the time per call on the host.
        """
        nonlocal last
        start, stop = TimingEvent(enable_timing=True), TimingEvent(enable_timing=True)
        if last is None or last.query():
            # if the GPU is idle, make extra calls first, to time only the steady state
            for _ in range(1 + calls // 5):
                call()
        start.record()
        begin = perf_counter_ns()
        for _ in range(calls):
            call()
        host_ns = perf_counter_ns() - begin
        stop.record()
        last = stop
        return lambda: (round(elapsed_ns(start, stop) / calls), round(host_ns / calls))

    synchronize()
    bursts = overlapped(queue, samples)
    return {EAGER: [eager for eager, _ in bursts], HOST: [host for _, host in bursts]}


def overlapped(queue: Callable[[], Callable[[], T]], samples: int) -> list[T]:
    """Return samples of the work that `queue` starts.

    `queue` returns a function that waits for the work and returns its sample. This function is
    called only after the next work is queued, so that the GPU does not become idle between samples.
    """
    reads: deque[Callable[[], T]] = deque()
    values: list[T] = []
    deadline = perf_counter() + budget_s(samples)
    while len(values) + len(reads) < samples:
        reads.append(queue())
        if len(reads) == 2:
            values.append(reads.popleft()())
        if len(values) + len(reads) >= MIN_SAMPLES and perf_counter() > deadline:
            break
    return values + [read() for read in reads]


Sampler = Callable[[int], dict[str, list[int]]]
"""A function that takes the given number of samples, or fewer if the time limit is reached.

The function returns the samples by measurement.
"""


def open_graph(call: Callable[[], Any], expected_ns: int) -> Sampler:
    """Capture several calls in a CUDA graph. Return a function that samples replays of the graph.

    A sample is the time of one replay divided by the number of calls in the graph. Each replay is
    queued before it can run, because the host takes 10 to 40 us to launch a graph, and this time
    varies between processes. Time a short graph first to choose the number of calls, because
    `expected_ns`, measured without a graph, may be mostly CPU time. Raise NotQueuedError, or a
    RuntimeError if the call cannot be captured.
    """
    delay = StreamDelay()

    def replayed(graph: Any, calls: int, samples: int) -> list[int]:
        times = queue_samples(partial(_queue_delayed, graph.replay, delay), delay.lengthen, samples)
        return [max(1, round(time_ns / calls)) for time_ns in times]

    calls = max(1, min(TRIAL_CALLS, GRAPH_NS // max(1, expected_ns)))
    graph = _captured(call, calls)
    (per_call,) = replayed(graph, calls, 1)
    enough = min(GRAPH_CALLS, GRAPH_NS // per_call)
    if enough > calls:
        calls, graph = enough, _captured(call, enough)
    return lambda samples: {GRAPH: replayed(graph, calls, samples)}


def _captured(call: Callable[[], Any], calls: int) -> Any:
    # Do not use torch.cuda.graph, because it first collects garbage and empties the allocator's
    # cache, which takes longer than the timing.
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
    graph.replay()  # the first replay loads the graph, which takes the host a long time
    synchronize()
    return graph


def time_wall(call: Callable[[], Any], samples: int) -> dict[str, list[int]]:
    """Time single calls on a CPU by the wall clock."""
    return {WALL: sampled(lambda: wall_ns(call), samples, WALL_BUDGET_S)}


def budget_s(samples: int) -> float:
    """Return the time limit, in seconds, of a measurement with this number of samples on a GPU."""
    return max(LEAST_BUDGET_S, samples * SAMPLE_S)


def sampled(sample: Callable[[], T], count: int, seconds: float) -> list[T]:
    """Return up to `count` results of `sample`, and stop early after the given time in seconds.

    Return at least MIN_SAMPLES results, or `count` if that is fewer.
    """
    samples: list[T] = []
    deadline = perf_counter() + seconds
    while len(samples) < count:
        samples.append(sample())
        if len(samples) >= MIN_SAMPLES and perf_counter() > deadline:
            break
    return samples


def elapsed_ms(call: Callable[[], Any]) -> float:
    """Return the GPU time of a call on the current stream in milliseconds."""
    start, stop = TimingEvent(enable_timing=True), TimingEvent(enable_timing=True)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def elapsed_ns(start: Any, stop: Any) -> int:
    """Wait for the event `stop`. Return the time between the two events in nanoseconds."""
    stop.synchronize()
    return round(float(start.elapsed_time(stop)) * 1e6)


def wall_ns(call: Callable[[], Any]) -> int:
    start = perf_counter_ns()
    call()
    return perf_counter_ns() - start
