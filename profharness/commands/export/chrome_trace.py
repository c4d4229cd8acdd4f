"""Export a stored run as a Chrome trace in Kineto's layout, for Perfetto, chrome://tracing and
HolisticTraceAnalysis.

The format is "Trace Event Format" (Google, 2016). Categories and argument names are those of
PyTorch's own traces.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import msgspec
from isal import igzip

from profharness.devices import Device, occupancy
from profharness.errors import NotFoundError
from profharness.files import atomic_file
from profharness.rows import COUNTERS, TRACE_PROFILERS
from profharness.store import LaunchRow, RangeRow, Selection, Store

Event = dict[str, Any]
# A sort key and the event. The number breaks ties, because dicts cannot be compared.
_Timed = tuple[int, int, int, Event]

# Above every Linux thread id, because CPU ops share a process with real threads.
FIRST_TRACK = (1 << 22) + 1
# Offset between named sections: above every process, thread and track number.
SECTION_STEP = 1 << 24
WINDOW = 1 << 14  # number of events that are buffered to sort them
# recent launch calls that are kept, because one graph launch starts many kernels
RECENT_CALLS = 1 << 12
CATEGORIES = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset", "op": "cpu_op"}
LONGEST_OP = (
    WINDOW // 8
)  # maximum number of launches in the event of an op, so that it can be sorted
NO_THREAD = "a thread that was not recorded"


_ARGS = {
    "registers_per_thread": "registers per thread",
    "shared_bytes": "shared memory",
    "static_shared_bytes": "static shared memory",
    "dynamic_shared_bytes": "dynamic shared memory",
    "correlation": "correlation",
    "stream": "stream",
    "graph_node": "graph node id",
    "bytes": "bytes",
    "kernel_short": "short name",
    "family": "family",
    "profiler": "profiler",
    "config": "config",
    "backend": "backend",
    "cell": "cell",
    "iteration": "iteration",
    "range": "range",
    "op_path": "op path",
    "sdpa_op": "sdpa op",
}
_DEVICE_KEYS = {
    "id": "index",
    "name": "name",
    "totalGlobalMem": "total_memory_bytes",
    "computeMajor": "compute_major",
    "computeMinor": "compute_minor",
    "maxThreadsPerBlock": "max_threads_per_block",
    "maxThreadsPerMultiprocessor": "max_threads_per_sm",
    "regsPerBlock": "registers_per_block",
    "regsPerMultiprocessor": "registers_per_sm",
    "warpSize": "warp_size",
    "sharedMemPerBlock": "shared_bytes_per_block",
    "sharedMemPerBlockOptin": "shared_bytes_per_block_optin",
    "sharedMemPerMultiprocessor": "shared_bytes_per_sm",
    "numSms": "num_sms",
}


@dataclass(frozen=True, slots=True)
class Section:
    """The data of one profiler, on one clock."""

    launches: Iterable[LaunchRow]
    ranges: Iterable[RangeRow] = ()
    name: str | None = None  # a named section has processes of its own
    # metrics (value and unit) by launch id
    counters: Callable[[int], Mapping[str, tuple[float, str]]] | None = None


@dataclass(slots=True)
class _Tracks:
    """Track numbers: one per process and name, and another if two launches of a track overlap."""

    numbers: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    announced: set[tuple[int, int]] = field(default_factory=set)
    open_ends: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def lane(self, pid: int, name: str, start_ns: int, end_ns: int) -> tuple[int, str | None]:
        """Return the track that is free at start_ns, and its title if it is new."""
        lanes = self.numbers.setdefault((pid, name), [])
        for number in lanes:
            if self.ends[number] <= start_ns:
                self.ends[number] = end_ns
                return number, None
        number = FIRST_TRACK + len(self.ends)
        lanes.append(number)
        self.ends[number] = end_ns
        return number, name if len(lanes) == 1 else f"{name} #{len(lanes)}"

    def nests(self, pid: int, tid: int, start_ns: int, end_ns: int) -> bool:
        """Open a range if it is within the innermost open one of its thread. Ranges are sorted by
        start.
        """
        ends = self.open_ends.setdefault((pid, tid), [])
        while ends and ends[-1] <= start_ns:
            ends.pop()
        if ends and ends[-1] < end_ns:
            return False
        ends.append(end_ns)
        return True


def write_chrome_trace(
    out: IO[bytes],
    sections: Iterable[Section],
    *,
    devices: Iterable[Device] = (),
    properties: Mapping[str, Any] | None = None,
) -> int:
    """Write the trace and return its number of launches. Every section starts at time zero. Rows
    are read once, so memory use is constant.
    """
    encode = msgspec.json.Encoder().encode
    devices = tuple(devices)
    header: dict[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [
            {
                key: value
                for key, name in _DEVICE_KEYS.items()
                if (value := getattr(device, name)) is not None
            }
            for device in devices
        ],
        **(properties or {}),
        "displayTimeUnit": "ns",
    }
    # leave the object open, so that events are written as they arrive
    out.write(encode(header)[:-1] + b',"traceEvents":[')
    separator = b"\n"
    launches = 0
    for event in _events(sections, devices):
        launches += _is_launch(event)
        out.write(separator + encode(event))
        separator = b",\n"
    out.write(b"\n]}\n")
    return launches


def _is_launch(event: Event) -> bool:
    """Return whether an event is a launch, and not an op, a call or a range around it."""
    return event["ph"] == "X" and "family" in event["args"]


def _metadata(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _events(sections: Iterable[Section], devices: tuple[Device, ...]) -> Iterator[Event]:
    """Yield the events of all sections. The n-th named one has processes from n * SECTION_STEP."""
    tracks = _Tracks()
    titles = {device.index: f"GPU {device.index} {device.name}" for device in devices}
    named = itertools.count(1)
    for section in sections:
        if section.name is None:
            for index, title in titles.items():
                yield _metadata("process_name", index, 0, title)
            yield from _section_events(section, tracks, devices)
        else:
            events = _section_events(section, _Tracks(), devices)
            yield from _apart(events, section.name, next(named) * SECTION_STEP, titles)


def _apart(
    events: Iterator[Event], name: str, shift: int, titles: Mapping[int, str]
) -> Iterator[Event]:
    """Yield the events with processes of their own. Tracks shift too, because Perfetto numbers
    threads globally.
    """
    named: set[int] = set()
    for event in events:
        pid = event["pid"]
        if pid not in named:
            named.add(pid)
            title = titles.get(pid, f"process {pid}")
            yield _metadata("process_name", pid + shift, 0, f"{name}: {title}")
        yield {**event, "pid": pid + shift, "tid": event["tid"] + shift}


def _section_events(
    section: Section, tracks: _Tracks, devices: tuple[Device, ...]
) -> Iterator[Event]:
    """Yield all events of a section by time, a range before events inside it that start at the same
    time.
    """
    ties = itertools.count()
    ranges = (
        (
            row.start_ns,
            -row.duration_ns,
            next(ties),
            _event("user_annotation", row.name, row.pid, row.tid, row.duration_ns, {}),
        )
        for row in section.ranges
    )
    details = _Details(section.counters, {device.index: device for device in devices})
    launches = _launch_events(section.launches, details, ties)
    base: int | None = None
    for start_ns, _, _, event in heapq.merge(in_order(ranges), in_order(launches)):
        base = start_ns if base is None else base
        end_ns = start_ns - base + event["dur"]
        launched, thread = _is_launch(event), (event["pid"], event["tid"])
        loose = event["cat"] in ("user_annotation", "cpu_op") and not launched
        # A negative number means that the profiler did not record the thread.
        loose = loose and not (thread[1] >= 0 and tracks.nests(*thread, start_ns - base, end_ns))
        if loose or launched:
            # NVTX start/end ranges may overlap, which one track cannot show
            name = _loose_title(event) if loose else event["tid"]
            track, title = tracks.lane(event["pid"], name, start_ns - base, end_ns)
            event["tid"] = track
            if title is not None:
                yield _metadata("thread_name", event["pid"], track, title)
        elif (event["pid"], event["tid"]) not in tracks.announced:
            tracks.announced.add((event["pid"], event["tid"]))
            yield _metadata("thread_name", event["pid"], event["tid"], f"thread {event['tid']}")
        event["ts"] = (start_ns - base) / 1000
        if "dur" in event:
            event["dur"] /= 1000
        yield event
        yield from _arrow(event)


def _loose_title(event: Event) -> str:
    what = "ops" if event["cat"] == "cpu_op" else "ranges"
    return f"{what} of {'thread ' + str(event['tid']) if event['tid'] >= 0 else NO_THREAD}"


def _arrow(event: Event) -> Iterator[Event]:
    """Yield the flow from a launch call to its launch, under the launch's id, which is unique among
    profilers.
    """
    flow = event["args"].get("flow")
    if flow is None:
        return
    # bp e: the arrow ends at the launch itself, not at the event after it
    end = {"ph": "s"} if event["cat"].startswith("cuda_") else {"ph": "f", "bp": "e"}
    place = {key: event[key] for key in ("pid", "tid", "ts")}
    yield {**end, "id": flow, "cat": "ac2g", "name": "ac2g", **place}


def in_order(events: Iterable[_Timed], window: int = WINDOW) -> Iterator[_Timed]:
    """Sort the events by time, provided that none is more than `window` positions off."""
    heap: list[_Timed] = []
    for event in events:
        if len(heap) < window:
            heapq.heappush(heap, event)
        else:
            yield heapq.heappushpop(heap, event)
    while heap:
        yield heapq.heappop(heap)


def _event(cat: str, name: str, pid: Any, tid: Any, dur: int, args: dict[str, Any]) -> Event:
    """Return a complete event without its `ts`. `dur` is in ns until it is written."""
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "dur": dur, "args": args}


@dataclass(frozen=True, slots=True)
class _Details:
    """Data about launches other than their rows."""

    counters: Callable[[int], Mapping[str, tuple[float, str]]] | None
    devices: Mapping[int, Device]

    def args(self, row: LaunchRow) -> dict[str, Any]:
        """Return the occupancy and the hardware counters of a launch, if they are known."""
        args: dict[str, Any] = {}
        device = self.devices.get(row.device)
        shared, registers = row.shared_bytes, row.registers_per_thread
        if device and None not in (row.block_x, shared, registers):
            threads = (row.block_x or 0) * (row.block_y or 0) * (row.block_z or 0)
            if result := occupancy(threads, registers or 0, shared or 0, device):
                args["theoretical occupancy %"] = round(100 * result.fraction, 1)
                args["occupancy limiter"] = result.limiter
        for name, (value, unit) in self.counters(row.launch_id).items() if self.counters else ():
            args[f"{name} [{unit}]" if unit else name] = value
        return args


@dataclass(slots=True)
class _OpenOp:
    """An op of a thread's stack, from its first launch to the latest one."""

    name: str
    start_ns: int
    end_ns: int
    tie: int
    launches: int = 1


@dataclass(slots=True)
class _Ops:
    """The ops of launches' stacks by thread. The store has no times of ops, so an op lasts from the
    first to the last of the neighbouring launches with it in their stack.
    """

    ties: Iterator[int]
    stacks: dict[tuple[int, int], tuple[Any, list[_OpenOp]]] = field(default_factory=dict)

    def add(self, row: LaunchRow) -> Iterator[_Timed]:
        """Add a launch, and yield the events of ops that have ended before it."""
        if row.launch_ns is None or row.pid is None or row.tid is None or not row.op_path:
            return
        if row.kernel_kind == "op":
            return  # The trace itself contains this op, with its time.
        thread, call = (row.pid, row.tid), (row.cell, row.iteration)
        before, stack = self.stacks.get(thread, (call, []))
        path = row.op_path.split(";")
        shared = 0
        while (
            call == before
            and shared < min(len(stack), len(path))
            and stack[shared].name == path[shared]
            and stack[shared].launches < LONGEST_OP
            and stack[shared].end_ns <= row.launch_ns
        ):
            shared += 1
        yield from self._closed(thread, stack[shared:])
        for op in stack[:shared]:
            op.end_ns, op.launches = row.launch_ns, op.launches + 1
        opened = [
            _OpenOp(name, row.launch_ns, row.launch_ns, next(self.ties)) for name in path[shared:]
        ]
        self.stacks[thread] = call, [*stack[:shared], *opened]

    def rest(self) -> Iterator[_Timed]:
        """Yield the events of all ops that are still open."""
        for thread, (_, stack) in self.stacks.items():
            yield from self._closed(thread, stack)

    def _closed(self, thread: tuple[int, int], stack: list[_OpenOp]) -> Iterator[_Timed]:
        for op in stack:
            duration = op.end_ns - op.start_ns
            args = {"extent": "from its first launch to its last", "launches": op.launches}
            yield op.start_ns, -duration, op.tie, _event("cpu_op", op.name, *thread, duration, args)


def _launch_events(
    launches: Iterable[LaunchRow], details: _Details, ties: Iterator[int]
) -> Iterator[_Timed]:
    """Yield each launch, preceded by its launch call once per call, and surrounded by its ops."""
    recent: dict[tuple[int, int], int] = {}
    ops = _Ops(ties)
    for row in launches:
        flow: int | None = None
        yield from ops.add(row)
        if row.api is not None and row.launch_ns is not None and row.pid is not None:
            call = (row.pid, row.correlation if row.correlation is not None else -1)
            flow = recent.get(call)
            if flow is None or row.correlation is None:
                flow = row.launch_id
                recent[call] = flow
                if len(recent) > RECENT_CALLS:
                    # A dict keeps its order, so the first key is the oldest.
                    del recent[next(iter(recent))]
                yield row.launch_ns, 0, next(ties), _call_event(row, flow)
        event = _launch_event(row, flow, details.args(row))
        yield row.start_ns, -(row.duration_ns or 0), next(ties), event
    yield from ops.rest()


def _call_event(row: LaunchRow, flow: int) -> Event:
    """Return the launch call with duration 0: the store has its start only."""
    name = row.api or ""
    driver = name.startswith("cu") and not name.startswith("cuda")
    args = {"correlation": row.correlation, "flow": flow}
    given = {key: value for key, value in args.items() if value is not None}
    return _event("cuda_driver" if driver else "cuda_runtime", name, row.pid, row.tid, 0, given)


def _launch_event(row: LaunchRow, flow: int | None, more: Mapping[str, Any]) -> Event:
    """Return a kernel, copy or op on the track of its cell. `tid` is the track's title at first."""
    on_host = row.device is None or row.device < 0
    values = ((name, getattr(row, key)) for key, name in _ARGS.items())
    args: dict[str, Any] = {name: value for name, value in values if value is not None}
    if row.grid_x is not None:
        args["grid"] = [row.grid_x, row.grid_y, row.grid_z]
    if row.block_x is not None:
        args["block"] = [row.block_x, row.block_y, row.block_z]
    if not on_host:
        args["device"] = row.device
    if flow is not None:
        args["flow"] = flow
    if row.duration_ns is None:  # ncu without its time metric
        args["duration"] = "not measured"
    args |= more
    category = CATEGORIES.get(row.kernel_kind, "kernel")
    pid = (row.pid or 0) if on_host else row.device
    return _event(category, row.kernel, pid, _title(row, on_host), row.duration_ns or 0, args)


def _title(row: LaunchRow, on_host: bool) -> str:
    """Return a track's name: the cell's config and backend, or for a foreign trace the stream or
    thread.
    """
    if row.cell is not None:
        return f"{row.config} {row.backend} ({row.profiler})"
    if on_host:
        return f"ops of thread {row.tid} ({row.profiler})"
    return f"stream {row.stream if row.stream is not None else '-'} ({row.profiler})"


ALL = "all"


def find_exported(store: Store, ref: str, profiler: str | None = None) -> str:
    """Return the run of a reference. `latest` is the newest with launches, preferably of that
    profiler. Raise NotFoundError.
    """
    if profiler not in (None, ALL):
        with contextlib.suppress(NotFoundError):
            return store.find_run(Selection(ref, profilers=(str(profiler),)))
    return store.find_run(Selection(ref))


def choose_profilers(store: Store, run: str, profiler: str | None = None) -> tuple[str, ...]:
    """Return the profilers to export, among those that recorded launches. None selects the first of
    TRACE_PROFILERS, `all` every one. Raise NotFoundError if there are none.
    """
    row = next(row for row in store.runs() if row.run == run)
    held = [name for name in row.profilers if next(store.launches(run, profiler=name), None)]
    if not held:
        raise NotFoundError(f"run {run} has no kernels; see it with: {store.shown_by(run)}")
    if profiler not in (None, ALL, *held):
        there = f"there are those of {', '.join(held)}"
        raise NotFoundError(f"run {run} has no launches of profiler {profiler!r}; {there}")
    if profiler not in (None, ALL):
        return (str(profiler),)
    ranked = dict.fromkeys([*(name for name in TRACE_PROFILERS if name in held), *held])
    return tuple(ranked if profiler == ALL else list(ranked)[:1])


def write_run_file(
    store: Store, run: str, output: Path, *, force: bool = False, profiler: str | None = None
) -> int:
    """Write the run to a file, compressed if its name ends in .gz. Return the number of launches.
    Raise UsageError if the file exists, unless `force` is set.
    """
    chosen = choose_profilers(store, run, profiler)
    with atomic_file(output, force=force) as file:
        if output.suffix != ".gz":
            return write_run(store, run, file, chosen)
        # Write no timestamp and no file name, so that equal runs give equal bytes.
        with igzip.GzipFile("", "wb", compresslevel=2, fileobj=file, mtime=0) as packed:
            return write_run(store, run, cast("IO[bytes]", packed), chosen)


def write_run(store: Store, run: str, out: IO[bytes], profilers: tuple[str, ...]) -> int:
    """Write the profilers' data of the run as plain JSON. Return its number of launches."""
    ranges, sections = store.ranges(run), []
    for profiler in profilers:
        own = [row for row in ranges if row.profiler == profiler]
        name = profiler if len(profilers) > 1 else None
        counters = store.launch_metrics if profiler in COUNTERS else None
        sections.append(Section(store.launches(run, profiler=profiler), own, name, counters))
    properties = {"traceName": f"profharness run {run}"}
    return write_chrome_trace(out, sections, devices=store.devices(run), properties=properties)
