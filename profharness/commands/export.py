"""`profharness export`: write a stored run as a Chrome trace.

The format is "Trace Event Format" (Google, 2016). Categories and argument names are the same as in
traces of the PyTorch profiler (Kineto).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, cast

import msgspec
from isal import igzip

from profharness.commands._command import as_is, command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._output import hint, quiet_stdout
from profharness.commands._runs import run_text
from profharness.commands._types import (
    EVERY_PROFILER,
    Force,
    OneRun,
    OutputFile,
    Store,
    complete_names,
    require_profilers,
    store_path,
)
from profharness.devices import Device, launch_occupancy
from profharness.errors import NotFoundError, counted
from profharness.files import atomic_file
from profharness.rows import COUNTERS, LAUNCH_PROFILERS, LaunchRow, RangeRow
from profharness.store import Selection, open_store
from profharness.store import Store as OpenStore

Event = dict[str, Any]
# (start, negative duration, unique number, event). The number breaks ties in the sorting, because
# dicts cannot be compared.
_Timed = tuple[int, int, int, Event]
Counters = Callable[[int], Mapping[str, tuple[float, str]]]

# Number of the first track. It is above every Linux thread ID, because a process in the trace may
# contain both tracks and real threads.
FIRST_TRACK = (1 << 22) + 1
# Offset between the numbers of named sections, above every process, thread and track number.
SECTION_STEP = 1 << 24
WINDOW = 1 << 14  # number of events that are buffered to sort them
# Number of recent launch calls to remember. One graph launch starts many kernels.
RECENT_CALLS = 1 << 12
CATEGORIES = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset", "op": "cpu_op"}
# maximum number of launches in one event of an op, so that WINDOW suffices to sort the events
LONGEST_OP = WINDOW // 8
NO_THREAD = "an unrecorded thread"


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

Profiler = Annotated[
    str | None,
    Option(
        ("--profiler",),
        complete=complete_names(lambda: (*LAUNCH_PROFILERS, EVERY_PROFILER)),
        metavar="NAME",
        check=require_profilers,
        help="Write only the launches that this profiler recorded, or those of all profilers (all).  "
        "[default: the first of torch, nsys and ncu that the run has]",
    ),
]


@command("export", frame=as_is)
def export(
    run: OneRun = None,
    path: OutputFile = None,
    *,
    profiler: Profiler = None,
    force: Force = False,
    store: Store = None,
) -> int:
    """Write a run as a Chrome trace.

    The run may come from any profiler. RUN is a trace file, a run folder or a stored run; the
    default is the latest run with kernels.

    The trace can be opened in Perfetto, chrome://tracing or HolisticTraceAnalysis. Each cell has
    its own track, which shows that cell's kernels. Each launch in the trace lists its resources,
    theoretical occupancy, op stack and ncu counters. Thread tracks contain ranges, launch calls,
    and ops that launched kernels. The store does not contain op times, so each op is
    drawn from its first launch to its last. The file is compressed if FILE ends in .gz. Without -o,
    the trace is written to stdout as plain JSON.

    Each profiler of a run has its own clock. With `--profiler all`, each profiler has
    its own processes in the trace, and the times of each profiler start at 0.

    \b
    Example:
      profharness export profile.nsys-rep -o trace.json.gz

    In Python the result is the number of launches in the trace.
    """
    with open_store(store_path(store)) as opened:
        name = _find_run(opened, run_text(run), profiler)
        profilers = _profilers_with_launches(opened, name, profiler)
        # Each profiler has its own clock, so write only one profiler unless `all` is given.
        if profiler is None:
            if profilers[1:]:
                names = [*sorted(profilers[1:]), EVERY_PROFILER]
                others = " or ".join(f"--profiler {name}" for name in names)
                hint(
                    f"wrote only the launches that {profilers[0]} recorded; to write others, use "
                    f"{others}"
                )
            profilers = profilers[:1]
        if path is None:
            with quiet_stdout() as stream:
                return _write_run(opened, name, stream, profilers)
            return 0  # `quiet_stdout` ignored that the reader closed the pipe
        output = Path(path)
        with atomic_file(output, force=force) as file:
            if output.suffix == ".gz":
                # Write no timestamp and no file name, so that two exports of a run are identical.
                with igzip.GzipFile("", "wb", compresslevel=2, fileobj=file, mtime=0) as packed:
                    launches = _write_run(opened, name, cast("IO[bytes]", packed), profilers)
            else:
                launches = _write_run(opened, name, file, profilers)
        shown = opened.run_name(name)
    hint(f"wrote {path}: {counted(launches, 'launch', 'launches')} of run {shown}")
    return launches


@document(export)
def show(launches: int) -> None:
    """Print nothing, because `export` has already written the trace."""


def _find_run(store: OpenStore, ref: str | None, profiler: str | None) -> str:
    """Return the run that `ref` names, preferably a run with launches of the profiler."""
    if profiler not in (None, EVERY_PROFILER):
        with contextlib.suppress(NotFoundError):
            return store.find_run(Selection(ref, profilers=(str(profiler),)))
    return store.find_run(Selection(ref))


def _profilers_with_launches(store: OpenStore, run: str, profiler: str | None) -> list[str]:
    """Return the profilers that recorded launches of a run, in the order of LAUNCH_PROFILERS.

    If `profiler` names a single profiler, return only this profiler. Raise NotFoundError if there
    are no launches, or none of the named profiler.
    """
    row = next(row for row in store.runs() if row.run == run)
    found = [name for name in row.profilers if next(store.launches(run, profiler=name), None)]
    if not found:
        raise NotFoundError(
            f"run {store.run_name(run)} has no kernels; to see it, use: {store.shown_by(run)}"
        )
    if profiler in (None, EVERY_PROFILER):
        return sorted(found, key=(*LAUNCH_PROFILERS, *found).index)
    if profiler not in found:
        there = f"choose from {', '.join(found)}"
        raise NotFoundError(
            f"run {store.run_name(run)} has no launches of profiler {profiler!r}; {there}"
        )
    return [profiler]


def _write_run(store: OpenStore, run: str, out: IO[bytes], profilers: list[str]) -> int:
    ranges, sections = store.ranges(run), []
    for profiler in profilers:
        own = [row for row in ranges if row.profiler == profiler]
        name = profiler if len(profilers) > 1 else None
        counters = store.launch_metrics if profiler in COUNTERS else None
        sections.append(Section(store.launches(run, profiler=profiler), own, name, counters))
    return write_chrome_trace(out, sections, store.devices(run), f"profharness run {run}")


@dataclass(frozen=True, slots=True)
class Section:
    """The launches and ranges that one profiler recorded. All times come from one clock."""

    launches: Iterable[LaunchRow]
    ranges: Iterable[RangeRow] = ()
    name: str | None = None  # if set, the section has separate processes in the trace
    counters: Counters | None = None  # returns the metrics (value, unit) of a launch ID


@dataclass(slots=True)
class _Tracks:
    """The numbers of tracks. A title has several tracks if events with this title overlap."""

    numbers: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    announced: set[tuple[int, int]] = field(default_factory=set)
    open_ends: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def free(self, pid: int, name: str, start_ns: int, end_ns: int) -> tuple[int, str | None]:
        """Return a track that is free at `start_ns`, and the title of the track if it is new."""
        numbers = self.numbers.setdefault((pid, name), [])
        for number in numbers:
            if self.ends[number] <= start_ns:
                self.ends[number] = end_ns
                return number, None
        number = FIRST_TRACK + len(self.ends)
        numbers.append(number)
        self.ends[number] = end_ns
        return number, name if len(numbers) == 1 else f"{name} #{len(numbers)}"

    def nests(self, pid: int, tid: int, start_ns: int, end_ns: int) -> bool:
        """Open a range. Return False if the range ends after the innermost open range of the thread.

        Ranges must be passed in order of their start.
        """
        ends = self.open_ends.setdefault((pid, tid), [])
        while ends and ends[-1] <= start_ns:
            ends.pop()
        if ends and ends[-1] < end_ns:
            return False
        ends.append(end_ns)
        return True


def write_chrome_trace(
    out: IO[bytes], sections: Iterable[Section], devices: Iterable[Device] = (), name: str = ""
) -> int:
    """Write a trace, and return the number of launches that were written.

    Every section starts at time 0. Memory use is constant, because rows are iterated only once.
    """
    encode = msgspec.json.Encoder().encode
    devices = tuple(devices)
    known = [{key: getattr(each, name) for key, name in _DEVICE_KEYS.items()} for each in devices]
    header = {
        "schemaVersion": 1,
        "deviceProperties": [
            {key: value for key, value in each.items() if value is not None} for each in known
        ],
        "traceName": name,
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
    """Return whether an event is a launch, and not a range, a launch call or an enclosing op."""
    return event["ph"] == "X" and "family" in event["args"]


def _metadata(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _events(sections: Iterable[Section], devices: tuple[Device, ...]) -> Iterator[Event]:
    """Yield the events of all sections.

    Add n * SECTION_STEP to the numbers of processes and tracks in the n-th named section. The tracks
    need different numbers, because Perfetto expects unique thread numbers in the whole file.
    """
    tracks = _Tracks()
    titles = {device.index: f"GPU {device.index} {device.name}" for device in devices}
    shift = 0
    for section in sections:
        if section.name is None:
            for index, title in titles.items():
                yield _metadata("process_name", index, 0, title)
            yield from _section_events(section, tracks, devices)
            continue
        shift += SECTION_STEP
        named: set[int] = set()
        for event in _section_events(section, _Tracks(), devices):
            pid = event["pid"]
            if pid not in named:
                named.add(pid)
                title = f"{section.name}: {titles.get(pid, f'process {pid}')}"
                yield _metadata("process_name", pid + shift, 0, title)
            yield {**event, "pid": pid + shift, "tid": event["tid"] + shift}


def _section_events(
    section: Section, tracks: _Tracks, devices: tuple[Device, ...]
) -> Iterator[Event]:
    """Yield the events of a section in order of time. A range precedes the events inside it."""
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
    launches = _launch_events(section, {device.index: device for device in devices}, ties)
    base: int | None = None
    for start_ns, _, _, event in heapq.merge(in_order(ranges), in_order(launches)):
        base = start_ns if base is None else base
        begin, end = start_ns - base, start_ns - base + event["dur"]
        pid, tid, is_op = event["pid"], event["tid"], event["cat"] == "cpu_op"
        name: str | None = None
        if _is_launch(event):
            name = tid
        elif (is_op or event["cat"] == "user_annotation") and (
            # NVTX start/end ranges may overlap, which one track cannot show. A negative thread ID
            # means that the profiler did not record the thread.
            tid < 0 or not tracks.nests(pid, tid, begin, end)
        ):
            thread = f"thread {tid}" if tid >= 0 else NO_THREAD
            name = f"{'ops' if is_op else 'ranges'} of {thread}"
        if name is not None:
            event["tid"], title = tracks.free(pid, name, begin, end)
            if title is not None:
                yield _metadata("thread_name", pid, event["tid"], title)
        elif (pid, tid) not in tracks.announced:
            tracks.announced.add((pid, tid))
            yield _metadata("thread_name", pid, tid, f"thread {tid}")
        event["ts"] = begin / 1000
        event["dur"] /= 1000
        yield event
        # An arrow connects a launch call to its launches. The ID of the arrow is a launch ID, which
        # is unique among all profilers.
        if (flow := event["args"].get("flow")) is not None:
            # "bp": "e" makes the arrow end at the launch itself, and not at the event after it.
            end_of = {"ph": "s"} if event["cat"].startswith("cuda_") else {"ph": "f", "bp": "e"}
            position = {key: event[key] for key in ("pid", "tid", "ts")}
            yield {**end_of, "id": flow, "cat": "ac2g", "name": "ac2g", **position}


def in_order(events: Iterable[_Timed], window: int = WINDOW) -> Iterator[_Timed]:
    """Sort events that are at most `window` positions away from their sorted position."""
    heap: list[_Timed] = []
    for event in events:
        if len(heap) < window:
            heapq.heappush(heap, event)
        else:
            yield heapq.heappushpop(heap, event)
    while heap:
        yield heapq.heappop(heap)


def _event(cat: str, name: str, pid: Any, tid: Any, dur: int, args: dict[str, Any]) -> Event:
    """Return a complete event ("ph": "X") without `ts`. `dur` is in ns."""
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "dur": dur, "args": args}


@dataclass(slots=True)
class _OpenOp:
    """An op in the stack of a thread. It lasts from its first launch to its latest launch."""

    name: str
    start_ns: int
    end_ns: int
    tie: int
    launches: int = 1


@dataclass(slots=True)
class _Ops:
    """The ops of each thread, reconstructed from the op stacks of launches.

    The store contains no op times. Therefore, an op lasts from the first to the last of the
    consecutive launches with this op in their stacks.
    """

    ties: Iterator[int]
    stacks: dict[tuple[int, int], tuple[Any, list[_OpenOp]]] = field(default_factory=dict)

    def add(self, row: LaunchRow) -> Iterator[_Timed]:
        """Add a launch, and yield the events of the ops that ended before this launch."""
        if row.launch_ns is None or row.pid is None or row.tid is None or not row.op_path:
            return
        if row.kernel_kind == "op":
            return  # this launch is an op itself, and has a time
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
            args = {
                "extent": "from the op's first launch to its last launch",
                "launches": op.launches,
            }
            yield op.start_ns, -duration, op.tie, _event("cpu_op", op.name, *thread, duration, args)


def _launch_events(
    section: Section, devices: Mapping[int, Device], ties: Iterator[int]
) -> Iterator[_Timed]:
    """Yield the events of launches, of their launch calls, and of the ops that launched them."""
    recent: dict[tuple[int, int], int] = {}
    ops = _Ops(ties)
    for row in section.launches:
        flow: int | None = None
        yield from ops.add(row)
        if row.api is not None and row.launch_ns is not None and row.pid is not None:
            call = (row.pid, row.correlation if row.correlation is not None else -1)
            flow = recent.get(call)
            if flow is None or row.correlation is None:
                flow = row.launch_id
                recent[call] = flow
                if len(recent) > RECENT_CALLS:
                    # The first key of a dict is the oldest.
                    del recent[next(iter(recent))]
                yield row.launch_ns, 0, next(ties), _call_event(row, flow)
        event = _launch_event(row, flow, devices.get(row.device), section.counters)
        yield row.start_ns, -(row.duration_ns or 0), next(ties), event
    yield from ops.rest()


def _call_event(row: LaunchRow, flow: int) -> Event:
    """Return the event of a launch call. Use duration 0, because the store has only the start."""
    name = row.api or ""
    driver = name.startswith("cu") and not name.startswith("cuda")
    args = {"correlation": row.correlation} if row.correlation is not None else {}
    category = "cuda_driver" if driver else "cuda_runtime"
    return _event(category, name, row.pid, row.tid, 0, {**args, "flow": flow})


def _launch_event(
    row: LaunchRow, flow: int | None, device: Device | None, counters: Counters | None
) -> Event:
    """Return the event of a kernel, a copy or a CPU op. Use the title of the track as `tid`.

    The title is the config and the backend. In the trace of a program, the title is the stream or
    the thread.
    """
    on_host = row.device is None or row.device < 0
    values = ((name, getattr(row, key)) for key, name in _ARGS.items())
    args: dict[str, Any] = {name: value for name, value in values if value is not None}
    threads = None
    if row.grid_x is not None:
        args["grid"] = [row.grid_x, row.grid_y, row.grid_z]
    if row.block_x is not None:
        args["block"] = [row.block_x, row.block_y, row.block_z]
        threads = math.prod(size or 0 for size in args["block"])
    if not on_host:
        args["device"] = row.device
    if flow is not None:
        args["flow"] = flow
    if row.duration_ns is None:  # ncu did not collect the metric for time
        args["duration"] = "not measured"
    if result := launch_occupancy(threads, row, device):
        args["theoretical occupancy %"] = round(100 * result.fraction, 1)
        args["occupancy limiter"] = result.limiter
    for name, (value, unit) in counters(row.launch_id).items() if counters else ():
        args[f"{name} [{unit}]" if unit else name] = value
    if row.cell is not None:
        title = f"{row.config} {row.backend}"
    elif on_host:
        title = f"ops of thread {row.tid}"
    else:
        title = f"stream {row.stream if row.stream is not None else '-'}"
    category = CATEGORIES.get(row.kernel_kind, "kernel")
    pid = (row.pid or 0) if on_host else row.device
    track = f"{title} ({row.profiler})"
    return _event(category, row.kernel, pid, track, row.duration_ns or 0, args)


DECLARATION = declaration_of(export)
