"""Latency without a profiler, in raw nanoseconds per call: cold, eager in bursts, by CUDA-graph
replay, or by the wall clock on the CPU.
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

PERIOD_S = 0.05
KEPT = 4096  # maximum number of stored readings; they cover more than three minutes
FIRST_S = 5.0  # maximum time to wait for the first reading of NVML
# Time limits of a measurement. A slow call gets fewer samples, but at least MIN_SAMPLES.
SAMPLE_S = 0.001  # seconds allowed for each requested sample
LEAST_BUDGET_S = 0.03  # minimum time limit; longer than a turn of a benchmark
WALL_BUDGET_S = 0.5  # limit for the wall clock, which other programs on a CPU disturb
MIN_SAMPLES = 5
GRAPH_CALLS = 100  # maximum number of calls in a graph; they share the GPU's cost of starting it
GRAPH_NS = 500_000  # maximum duration of a graph; the cost of starting it is then negligible
TRIAL_CALLS = 10
FLUSH_BYTES = 256 << 20  # more than any L2 (H200: 60 MB)
DELAY_NS = 50_000  # the first delay; a call whose queueing takes longer doubles it
DELAY_MAX_NS = 50_000_000  # maximum delay; a call that takes longer to queue waits for the device
TRIAL_CYCLES = 1_000_000  # length of a spin that is timed to measure the cycles per nanosecond
EAGER_CALLS = 20  # maximum calls in a burst; their launches must fit into the launch queue (1024)
EAGER_NS = 500_000  # maximum duration of a burst
T = TypeVar("T")
Questions = dict[str, Callable[[], Any]]
Write = Callable[[JournalEntry], None]


class TimingEvent(torch.cuda.Event):  # type: ignore[misc]
    """An event with torch's own methods, even if a backend replaces them later."""

    record = torch.cuda.Event.record
    query = torch.cuda.Event.query
    synchronize = torch.cuda.Event.synchronize
    elapsed_time = torch.cuda.Event.elapsed_time


class ClockReader:
    """Read the clocks of torch's device 0 every PERIOD_S in its own thread, as an NVML query can
    take milliseconds.

    Values that NVML does not provide are omitted. `open_questions` returns the queries by name; it
    runs in the thread.
    """

    def __init__(self, open_questions: Callable[[], Questions] | None = None) -> None:
        # each reading with the times at which its queries began and ended
        self._kept: deque[tuple[float, float, dict[str, Any]]] = deque(maxlen=KEPT)
        self._begun = threading.Event()
        ask = open_questions or _questions
        threading.Thread(target=self._run, args=(ask,), daemon=True).start()

    def latest(self) -> dict[str, Any]:
        """Return the last reading, if any."""
        return self._kept[-1][2] if self._kept else {}

    def between(self, begin: float, end: float) -> list[dict[str, Any]]:
        """Return the readings in progress between two moments of `time.perf_counter`."""
        kept = tuple(self._kept)
        return [reading for begun, answered, reading in kept if begun <= end and begin <= answered]

    def nearest(self, begin: float, end: float) -> list[dict[str, Any]]:
        """Return the reading nearest to an interval that contains none, if NVML is available."""
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
    """Combine readings into one: the median of each value with `_min` and `_max`, and all throttle
    reasons that occurred. Return an empty dict if there are no readings.
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
    """Measure the share of time in its blocks that this thread was ready to run but waited for a
    CPU.
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
        """Return the share under its key, if the system counts waiting times."""
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
    """The state of a worker process."""

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
        """Read clocks from now on, but not on a CPU or under a profiler."""
        if is_gpu(self.device) and not self.plan.wrapped:
            self.clocks = ClockReader()


class NotQueuedError(RuntimeError):
    """A call cannot be queued while the stream is blocked, because it waits for the device."""


@dataclass
class StreamDelay:
    """Block the current stream for a time. `length_ns` grows if calls need longer."""

    length_ns: int = DELAY_NS
    cycles_per_ns: float | None = None

    def __call__(self) -> None:
        if self.cycles_per_ns is None:
            spin = partial(torch.cuda._sleep, TRIAL_CYCLES)
            spin()  # loads the kernel
            self.cycles_per_ns = TRIAL_CYCLES / (elapsed_ms(spin) * 1e6)
        torch.cuda._sleep(round(self.length_ns * self.cycles_per_ns))

    def lengthen(self) -> None:
        """Double the next delays. Raise NotQueuedError beyond DELAY_MAX_NS."""
        if self.length_ns * 2 > DELAY_MAX_NS:
            raise NotQueuedError("its launches cannot be queued ahead: the call waits for the GPU")
        self.length_ns *= 2


def time_cold(call: Callable[[], Any], samples: int, delay: StreamDelay) -> dict[str, list[int]]:
    """Time single calls on the device, with the L2 flushed before each.

    All launches of a call are queued before the first may run, so host time does not count. Raise
    NotQueuedError.
    """
    queue = partial(_queue_delayed, call, delay, _flush_l2)
    return {COLD: queue_samples(queue, delay.lengthen, samples)}


Queued = tuple[bool, Callable[[], int]]
"""Whether the device began before all work was queued, and a function that returns the time in ns."""


def queue_samples(
    queue: Callable[[], Queued], lengthen: Callable[[], None], samples: int
) -> list[int]:
    """Sample what `queue` puts onto the stream.

    Discard a sample if the device began too early, and call `lengthen` for the next.
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
        # Queue at most 8 samples, because a full launch queue makes the host wait. The host clock
        # does not show work that is still queued, so read all samples before checking the deadline.
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
    """Time bursts of calls without a flush or a wait in between, by two events around each burst.

    The host's time per call is reported under HOST.
    """
    calls = max(1, min(EAGER_CALLS, EAGER_NS // max(1, expected_ns)))
    last: Any = None

    def queue() -> Callable[[], tuple[int, int]]:
        """Queue a burst. Return a function that waits for it and returns the nanoseconds per call on
        the device and on the host.
        """
        nonlocal last
        start, stop = TimingEvent(enable_timing=True), TimingEvent(enable_timing=True)
        if last is None or last.query():
            # an idle device needs extra calls to bring device and host to their steady distance
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

    `queue` returns a function that waits for the sample. Each wait begins after the next sample is
    queued, so that a device that is slower than the host never idles.
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
"""Take a number of samples, or fewer within the time limit, and return them by measurement."""


def open_graph(call: Callable[[], Any], expected_ns: int) -> Sampler:
    """Capture a graph of the call and replay it once. Return its sampler.

    Each sample is a replay's time divided by its calls, with a warm L2 and the replay queued before
    it may run: its launch takes the host 10 to 40 us, and varies between processes by more than the
    GPU's time. A short graph determines the number of calls, since `expected_ns`, measured outside
    of graphs, may be mostly CPU time. Raise the errors of the capture, and NotQueuedError.
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
    graph.replay()  # load the graph, which takes the host a long time
    synchronize()
    return graph


def time_wall(call: Callable[[], Any], samples: int) -> dict[str, list[int]]:
    """Time single calls on the CPU by the monotonic clock."""
    return {WALL: sampled(lambda: wall_ns(call), samples, WALL_BUDGET_S)}


def budget_s(samples: int) -> float:
    """Return the seconds that a measurement of so many samples may take on a GPU."""
    return max(LEAST_BUDGET_S, samples * SAMPLE_S)


def sampled(sample: Callable[[], T], count: int, seconds: float) -> list[T]:
    """Take as many samples as fit into the seconds, from MIN_SAMPLES to `count`."""
    samples: list[T] = []
    deadline = perf_counter() + seconds
    while len(samples) < count:
        samples.append(sample())
        if len(samples) >= MIN_SAMPLES and perf_counter() > deadline:
            break
    return samples


def elapsed_ms(call: Callable[[], Any]) -> float:
    """Return the milliseconds between two events around a call on the current stream."""
    start, stop = TimingEvent(enable_timing=True), TimingEvent(enable_timing=True)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def elapsed_ns(start: Any, stop: Any) -> int:
    """Return the nanoseconds between two recorded events. Wait for the second."""
    stop.synchronize()
    return round(float(start.elapsed_time(stop)) * 1e6)


def wall_ns(call: Callable[[], Any]) -> int:
    start = perf_counter_ns()
    call()
    return perf_counter_ns() - start
