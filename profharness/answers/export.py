"""A stored run as a Chrome trace in Kineto's layout, for Perfetto, chrome://tracing and
HolisticTraceAnalysis. Format: "Trace Event Format" (Google, 2016); categories and argument names
are those of PyTorch's own traces.
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
# A sort key and the event; the number breaks ties, because dicts do not compare.
_Timed = tuple[int, int, int, Event]

# Above every Linux thread id, because ops of the CPU share a process with real threads.
FIRST_TRACK = (1 << 22) + 1
# Sections with a name keep apart by it: above every process, thread and track number.
SECTION_STEP = 1 << 24
WINDOW = 1 << 14  # events held back to bring them into order
RECENT_CALLS = 1 << 12  # launch calls remembered, since one graph launch starts many kernels
CATEGORIES = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset", "op": "cpu_op"}
LONGEST_OP = WINDOW // 8  # launches of an op in one event, so that it is still brought into order
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
    """What one profiler saw, on one clock. A name gives the section processes of its own; counters
    gives the metrics (value and unit) of a launch by its id.
    """

    launches: Iterable[LaunchRow]
    ranges: Iterable[RangeRow] = ()
    name: str | None = None
    counters: Callable[[int], Mapping[str, tuple[float, str]]] | None = None


@dataclass(slots=True)
class _Tracks:
    """Track numbers: one a process and name, and another where two launches of a track overlap."""

    numbers: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    announced: set[tuple[int, int]] = field(default_factory=set)
    open_ends: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def lane(self, pid: int, name: str, start_ns: int, end_ns: int) -> tuple[int, str | None]:
        """The track that is free at start_ns, and its title if it is new."""
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
        """Open a range if it lies within the innermost open one of its thread; ranges come by
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
    are read once, so memory does not grow with them.
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
    # the object stays open, so that events are written as they come
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
    """Whether an event is a launch, and not an op, a call or a range around it."""
    return event["ph"] == "X" and "family" in event["args"]


def _metadata(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _events(sections: Iterable[Section], devices: tuple[Device, ...]) -> Iterator[Event]:
    """The events of all sections; those of the n-th named one in processes from n * SECTION_STEP."""
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
    """The events in processes of their own; tracks shift too, for Perfetto numbers threads
    globally.
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
    """All events of a section by time, a range before what starts within it at the same moment."""
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
        # a negative thread is one that the profiler did not record
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
    """The flow from a launch call to its launch, under the launch's id: no two profilers share it."""
    flow = event["args"].get("flow")
    if flow is None:
        return
    # bp e: the arrow ends at the launch itself, not at the event after it
    end = {"ph": "s"} if event["cat"].startswith("cuda_") else {"ph": "f", "bp": "e"}
    place = {key: event[key] for key in ("pid", "tid", "ts")}
    yield {**end, "id": flow, "cat": "ac2g", "name": "ac2g", **place}


def in_order(events: Iterable[_Timed], window: int = WINDOW) -> Iterator[_Timed]:
    """The events by time, provided that none is more than window places off."""
    heap: list[_Timed] = []
    for event in events:
        if len(heap) < window:
            heapq.heappush(heap, event)
        else:
            yield heapq.heappushpop(heap, event)
    while heap:
        yield heapq.heappop(heap)


def _event(cat: str, name: str, pid: Any, tid: Any, dur: int, args: dict[str, Any]) -> Event:
    """A complete event, without its `ts`; `dur` is in ns until it is written."""
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "dur": dur, "args": args}


@dataclass(frozen=True, slots=True)
class _Details:
    """What is known of launches besides their rows."""

    counters: Callable[[int], Mapping[str, tuple[float, str]]] | None
    devices: Mapping[int, Device]

    def args(self, row: LaunchRow) -> dict[str, Any]:
        """Occupancy and hardware counters, as far as they are known."""
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
    """An op of a thread's stack, from its first launch to the last one so far."""

    name: str
    start_ns: int
    end_ns: int
    tie: int
    launches: int = 1


@dataclass(slots=True)
class _Ops:
    """The ops of launches' stacks by thread. The store keeps no times of ops, so one lasts from the
    first of neighbouring launches with it in their stack to the last.
    """

    ties: Iterator[int]
    stacks: dict[tuple[int, int], tuple[Any, list[_OpenOp]]] = field(default_factory=dict)

    def add(self, row: LaunchRow) -> Iterator[_Timed]:
        """Take a launch in; the events of what it shows to have ended."""
        if row.launch_ns is None or row.pid is None or row.tid is None or not row.op_path:
            return
        if row.kernel_kind == "op":
            return  # it is in the trace itself, with its time
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
        """The events of all that is still open."""
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
    """Each launch, before it the call that made it, once per call, and around these the ops."""
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
                    # a dict keeps its order: the first is the oldest
                    del recent[next(iter(recent))]
                yield row.launch_ns, 0, next(ties), _call_event(row, flow)
        event = _launch_event(row, flow, details.args(row))
        yield row.start_ns, -(row.duration_ns or 0), next(ties), event
    yield from ops.rest()


def _call_event(row: LaunchRow, flow: int) -> Event:
    """The launching call, of duration 0: the store keeps when it began, not how long it took."""
    name = row.api or ""
    driver = name.startswith("cu") and not name.startswith("cuda")
    args = {"correlation": row.correlation, "flow": flow}
    given = {key: value for key, value in args.items() if value is not None}
    return _event("cuda_driver" if driver else "cuda_runtime", name, row.pid, row.tid, 0, given)


def _launch_event(row: LaunchRow, flow: int | None, more: Mapping[str, Any]) -> Event:
    """A kernel, copy or op on the track of its cell; tid is the track's title for now."""
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
    """A track's name: the cell's config and backend; for a foreign trace the stream or thread."""
    if row.cell is not None:
        return f"{row.config} {row.backend} ({row.profiler})"
    if on_host:
        return f"ops of thread {row.tid} ({row.profiler})"
    return f"stream {row.stream if row.stream is not None else '-'} ({row.profiler})"


ALL = "all"


def find_exported(store: Store, ref: str, profiler: str | None = None) -> str:
    """The run that is meant: `latest` is the newest with launches, of that profiler if any has them.

    Raises NotFoundError.
    """
    if profiler not in (None, ALL):
        with contextlib.suppress(NotFoundError):
            return store.find_run(Selection(ref, profilers=(str(profiler),)))
    return store.find_run(Selection(ref))


def choose_profilers(store: Store, run: str, profiler: str | None = None) -> tuple[str, ...]:
    """The profilers that an export of the run is made of, out of those that left launches. None:
    the first of TRACE_PROFILERS; `all`: every one. Raises NotFoundError where there are none.
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
    """Write the run to a file, compressed if it ends in .gz; the number of launches. Raises
    UsageError if the file exists and force is not given.
    """
    chosen = choose_profilers(store, run, profiler)
    with atomic_file(output, force=force) as file:
        if output.suffix != ".gz":
            return write_run(store, run, file, chosen)
        # no time stamp and no name inside, so that the same run gives the same bytes
        with igzip.GzipFile("", "wb", compresslevel=2, fileobj=file, mtime=0) as packed:
            return write_run(store, run, cast("IO[bytes]", packed), chosen)


def write_run(store: Store, run: str, out: IO[bytes], profilers: tuple[str, ...]) -> int:
    """Write what these profilers saw of the run as plain JSON; the number of launches in it."""
    ranges, sections = store.ranges(run), []
    for profiler in profilers:
        own = [row for row in ranges if row.profiler == profiler]
        name = profiler if len(profilers) > 1 else None
        counters = store.launch_metrics if profiler in COUNTERS else None
        sections.append(Section(store.launches(run, profiler=profiler), own, name, counters))
    properties = {"traceName": f"profharness run {run}"}
    return write_chrome_trace(out, sections, devices=store.devices(run), properties=properties)
