"""Parse Kineto's Chrome traces, the JSON files that torch.profiler writes, in bounded memory.

The scanner divides a file into segments that end at event boundaries, and decodes one segment after
another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from profharness.devices import Device
from profharness.errors import TraceFormatError
from profharness.files import has_too_many_values
from profharness.rows import TORCH
from profharness.trace import LaunchConfig, Trace
from profharness.traces import attribution
from profharness.traces.chrome_events import (
    EXACT_LIMIT,
    MODULE_MARK,
    UNDECODABLE,
    Collector,
    EventColumns,
    Events,
    NeedExactTimes,
)
from profharness.traces.chrome_read import (
    BLOCK,
    MAX_PIECE,
    Layout,
    Window,
    object_end,
    probe,
    read_trailer,
    skip_space,
)
from profharness.traces.columns import Ints, Spool, Tables
from profharness.traces.devices import MAX_NS, MAX_TEXT, make_device
from profharness.traces.graphs import replayed

KEPT = (
    "schemaVersion", "trace_id", "record_shapes", "with_stack", "profile_memory", "with_flops",
    "with_modules", "cuda_runtime_version", "cuda_driver_version", "cupti_version",
    "hip_runtime_version", "hip_driver_version", "rocm_version", "torch_version",
)  # fmt: skip
DISTRIBUTED = ("backend", "rank", "world_size")
DEVICE_KEYS = {
    "compute_major": "computeMajor",
    "compute_minor": "computeMinor",
    "num_sms": "numSms",
    "total_memory_bytes": "totalGlobalMem",
    "max_threads_per_block": "maxThreadsPerBlock",
    "max_threads_per_sm": "maxThreadsPerMultiprocessor",
    "registers_per_block": "regsPerBlock",
    "registers_per_sm": "regsPerMultiprocessor",
    "shared_bytes_per_block": "sharedMemPerBlock",
    "shared_bytes_per_block_optin": "sharedMemPerBlockOptin",
    "shared_bytes_per_sm": "sharedMemPerMultiprocessor",
    "warp_size": "warpSize",
}
FLUSH = 2 * 1024 * 1024
REACH = 4 * 1024 * 1024  # maximum number of bytes in which to search for the end of a broken event
# Maximum number of broken events for which to search up to REACH, because the search is slow. Any
# further broken event is assumed to end at the next separator.
MAX_UNCLOSED = 8
NUMBER = re.compile(r"-?[0-9]{1,18}")
MAX_FRAME = 1 << 12  # maximum size of the event of a Python frame, in bytes
SEGMENT = 1 << 21  # number of bytes that the compiled scanner reads at once


def parse_chrome(
    path: Path,
    *,
    chunk_rows: int = attribution.CHUNK_ROWS,
    slice_rows: int = attribution.SLICE_ROWS,
) -> Trace:
    """Parse a Kineto trace. The caller must close the returned Trace.

    The launches of the Trace are kernels, memcpys and memsets. If the trace contains none of these,
    the launches are ATen ops, and the duration of an op excludes its child ops. Events that cannot be
    read are skipped and counted. `chunk_rows` and `slice_rows` affect the memory that the parser
    uses, but not the result.

    Raise TraceFormatError if the file is truncated, damaged or not a Kineto trace.
    """
    path = Path(path)
    with closing(Window(path)) as window:
        layout = probe(window)
    with ExitStack() as stack:
        source, header = _scan_file(path, layout, stack)
        return _assemble(path, source, header, (chunk_rows, slice_rows), stack)


def _scan_file(
    path: Path, layout: Layout, stack: ExitStack
) -> tuple[attribution.Source, dict[str, Any]]:
    """Scan the events of a file. Return the tables and the header.

    If a double cannot hold the times exactly, scan the file a second time with decimals.
    """
    exact = _needs_decimals(layout.first_ts)
    while True:
        collector = Collector(Events(exact=exact), Spool.temporary(stack))
        try:
            with closing(Window(path)) as window:
                end = (
                    layout.first if layout.empty else FileScanner(window, layout, collector).scan()
                )
        except NeedExactTimes:
            exact = True
            continue
        source = attribution.Source(collector.tables, collector.spool)
        return source, read_trailer(path, layout, end)


class FileScanner:
    """Scans the events of a file and passes them to a collector."""

    def __init__(self, window: Window, layout: Layout, collector: Collector) -> None:
        self.window = window
        self.layout = layout
        self.collector = collector
        self._columns = EventColumns.build(collector)
        self._segment_bytes = bytearray(
            SEGMENT if self._columns else 0
        )  # this is allocated only once, because new memory costs page faults
        self._array_end: int | None = None
        self._unclosed = 0

    def scan(self) -> int:
        """Collect all events. Return the offset of the bracket that closes the array of events.

        Raise TraceFormatError if there is no such bracket. Raise NeedExactTimes if a double cannot
        hold a time exactly and the collector does not use decimals.
        """
        window, separator, lead = self.window, self.layout.separator, self.layout.gap + 1
        window.fill()
        window.seek(self.layout.first)
        flushed = window.base
        wanted = 1
        # Whether the end of the file lies inside an event that contains a separator
        stuck = False
        while self._array_end is None:
            self._scan_segments()
            more = True
            if len(window.buffer) < wanted or separator not in window.buffer:
                more = window.fill(self._block())
                if len(window.buffer) > MAX_PIECE:
                    raise window.too_long(window.base)
            if more and len(window.buffer) < wanted:
                continue
            buffer = window.buffer
            stop = buffer.rfind(separator)
            final = stop < 0 or stuck
            if final and more and not stuck:
                continue
            length = len(buffer) if final else stop + 1
            used = self._segment(buffer, length, last=final)
            if self._array_end is None:
                if final:
                    break
                whole = used == length
                window.seek(window.base + (stop + lead if whole else used))
                stuck = window.eof and not whole
                wanted = 1 if whole else 2 * len(window.buffer)
                wanted = min(wanted, REACH)
            if window.base - flushed >= FLUSH:
                self.collector.flush()
                flushed = window.base
        self.collector.flush()
        if self._array_end is None:
            message = "the file ends inside traceEvents"
            raise window.error(message, expected="], the end of the events")
        return self._array_end

    def _scan_segments(self) -> None:
        """Collect segments of the file for as long as the compiled scanner consumes all of them."""
        window, separator, columns = self.window, self.layout.separator, self._columns
        segment = memoryview(self._segment_bytes)
        while columns and (size := window.read_into(segment)):
            stop = self._segment_bytes.rfind(separator, 0, size)
            if stop < 0:
                return
            used = columns.collect(segment, stop + 1)
            window.seek(window.base + (stop + self.layout.gap + 1 if used > stop else used))
            self.collector.flush()
            if used <= stop:
                return

    def _block(self) -> int:
        """Return the number of bytes to read at once."""
        least = SEGMENT if self._columns else BLOCK
        return max(least, min(len(self.window.buffer), MAX_PIECE // 4))

    def _segment(self, text: bytes, length: int, *, last: bool) -> int:
        """Collect the events of text[:length]. Return the number of bytes consumed, which is less
        than `length` if the last event is incomplete.
        """
        begin = self._columns.collect(text, length) if self._columns else 0
        if begin == length:
            return begin
        segment = text[:length]
        used = self._decode(segment, begin, last=last)
        # If a trace contains stacks, most of its events are Python frames. The decoder skips all of
        # them. Those that are calls of nn.Modules are decoded here.
        at = segment.find(MODULE_MARK, begin, used)
        while at >= 0:
            begin = segment.rfind(b"{", max(0, at - MAX_FRAME), at)
            end = object_end(segment, begin, min(used, begin + MAX_FRAME)) if begin >= 0 else None
            if end is not None:
                self.collector.add_module(segment[begin:end])
            at = segment.find(MODULE_MARK, max(at + 1, end or 0), used)
        return used

    def _decode(self, segment: bytes, begin: int, *, last: bool) -> int:
        """Decode the events from `begin` on and return the number of bytes consumed."""
        if has_too_many_values(segment):
            return self._piecewise(segment, begin, last=last)
        try:
            events = self.collector.events.many.decode(b"[%b]" % segment[begin:])
        except UNDECODABLE:
            return self._piecewise(segment, begin, last=last)
        self.collector.tables.events += len(events)
        self.collector.add(events)
        return len(segment)

    def _piecewise(self, segment: bytes, position: int, *, last: bool) -> int:
        """Decode one event after another, and find the end of the array.

        Broken events are skipped and counted. Return the number of bytes consumed.
        """
        separator, lead = self.layout.separator, self.layout.gap + 1
        while position < len(segment):
            certain = self.layout.certain or self._unclosed > MAX_UNCLOSED
            border = segment.find(separator, position) if certain else -1
            stop = border + 1 if border >= 0 else len(segment)
            behind = object_end(segment, position, stop)
            if behind is None:
                self._unclosed += 1
                if border < 0 and not last and len(segment) - position < REACH:
                    return position
                border = segment.find(separator, position + 1) if border < 0 else border
                if border < 0 and last:
                    return self._lost_end(segment, position)
                self.collector.tables.skipped += 1
                if border < 0:
                    return len(segment)
                position = border + lead
                continue
            before = self.collector.tables.skipped
            self.collector.add_text(segment[position:behind])
            counted = self.collector.tables.skipped > before
            position = skip_space(segment, behind)
            mark = segment[position : position + 1]
            if mark == b"]":
                self._array_end = self.window.base + position
                return position
            position = self._next(segment, position, mark, counted=counted)
        return len(segment)

    def _next(self, segment: bytes, position: int, mark: bytes, *, counted: bool) -> int:
        """Return the start of the next event.

        If something other than an event follows, the event before it is counted as skipped, unless
        `counted` says that it was already counted.
        """
        if mark == b",":
            position = skip_space(segment, position + 1)
            if segment[position : position + 1] in (b"{", b""):
                return position
        if not mark:
            return len(segment)
        self.collector.tables.skipped += not counted
        border = segment.find(self.layout.separator, position)
        return len(segment) if border < 0 else border + self.layout.gap + 1

    def _lost_end(self, segment: bytes, position: int) -> int:
        """Find the end of the array if the file ends with a broken event.

        Return the number of bytes consumed.
        """
        tail = segment[position:].rstrip()
        border = max(tail.rfind(b"}\n  ]"), tail.rfind(b"}]"), tail.rfind(b"}\n ]"))
        if border < 0 or not tail.endswith((b"}", b"]")):
            return len(segment)
        self.collector.tables.skipped += 1
        self._array_end = self.window.base + position + tail.index(b"]", border)
        return position


def _needs_decimals(ts: str) -> bool:
    try:
        return abs(float(ts)) >= EXACT_LIMIT
    except ValueError:
        return False


def environment(header: dict[str, Any]) -> dict[str, object]:
    """Return the properties of a header that do not identify a person or a machine.

    These are the scalars in KEPT, and the backend, rank and world size of a distributed program.
    """
    kept: dict[str, object] = {key: header[key] for key in KEPT if _scalar(header.get(key))}
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    if distributed := {key: info[key] for key in DISTRIBUTED if _scalar(info.get(key))}:
        kept["distributedInfo"] = distributed
    return kept


def _scalar(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < 1 << 62)


def devices(header: dict[str, Any]) -> tuple[tuple[Device, ...], list[str]]:
    """Return the devices in deviceProperties, and warnings. Incomplete entries are left out."""
    rows = header.get("deviceProperties", [])
    given = rows if isinstance(rows, list) else [rows]
    made = [
        make_device(
            row.get("id"),
            row.get("name"),
            {field: row.get(key) for field, key in DEVICE_KEYS.items()},
        )
        for row in given
        if isinstance(row, dict)
    ]
    doubts = [text for _, texts in made for text in texts]
    if len(made) < len(given):
        doubts.append(f"deviceProperties: {len(given) - len(made)} of {len(given)} are no device")
    return tuple(device for device, _ in made if device), doubts


def time_base(header: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the number of nanoseconds to add to every time in the trace, and warnings."""
    base = header.get("baseTimeNanoseconds", 0)
    if isinstance(base, int) and not isinstance(base, bool) and abs(base) < MAX_NS:
        return base, []
    return 0, ["baseTimeNanoseconds is not a usable number; times count from 0"]


def _number(value: Any) -> int:
    """Return a pid or tid as a number.

    Return -1 if it is a word. Kineto uses words to name its own tracks.
    """
    text = str(value)
    return int(text) if isinstance(value, int | str) and NUMBER.fullmatch(text) else -1


def _skipped(tables: Tables) -> list[str]:
    """Return a list with the warning about skipped events. It is empty if no event was skipped."""
    if not tables.skipped:
        return []
    negative = f", {tables.negative} for a negative duration" if tables.negative else ""
    return [f"{tables.skipped} events could not be read and were skipped{negative}"]


def _check_use(path: Path, tables: Tables, launches: int) -> None:
    """Raise TraceFormatError if a file contains no launch."""
    if launches:
        return
    message = "traceEvents is empty"
    if tables.events or tables.skipped:
        message = "; ".join([f"nothing ran in its {tables.events:,} events", *_skipped(tables)])
    raise TraceFormatError(path, message, expected="a kernel, a copy or an ATen op")


def _assemble(
    path: Path,
    source: attribution.Source,
    header: dict[str, Any],
    rows: tuple[int, int],
    stack: ExitStack,
) -> Trace:
    tables = source.tables
    base, doubt = time_base(header)
    gpus, odd = devices(header)
    threads = [(_number(pid), _number(tid)) for pid, tid in tables.threads]
    flows, lone_ends = attribution.flows(tables.arrows)
    ranges, calls, steps = attribution.contexts(tables, flows, threads, base)
    calls = replayed(source, calls, steps, threads, base)
    output = attribution.Output(ranges, base, Spool.temporary(stack), calls)
    stacks, doubts = attribution.Stacks(source, rows=rows[1]), attribution.TraceWarnings()
    chunks: Iterator[tuple[attribution.LinkedLaunches, Ints]]
    if tables.gpu:
        kernels, configs = list(tables.kernels), list(tables.configs)
        linked = attribution.linked_chunks(source, doubts, rows=rows[0])
        chunks = ((chunk, stacks.lookup(chunk.thread, chunk.launch)) for chunk in linked)
    else:
        kernels, configs = [("op", name) for name in tables.names], [(None,) * 4]
        chunks = attribution.op_chunks(stacks, ranges, doubts)
    kernel_ids, config_ids, path_ids = (
        attribution.Renumber(),
        attribution.Renumber(),
        attribution.Renumber(),
    )
    for chunk, paths in chunks:
        kernel, config = kernel_ids(chunk.gpu.kernel), config_ids(chunk.gpu.config)
        output.write(chunk, kernel, config, path_ids(paths))
    _check_use(path, tables, output.rows)
    folded, apis = stacks.folded(), list(tables.apis)
    return Trace(
        profiler=TORCH,
        devices=gpus,
        environment=environment(header),
        kernels=[kernels[i][1] for i in kernel_ids.order],
        kernel_kinds=[kernels[i][0] for i in kernel_ids.order],
        launch_configs=[
            LaunchConfig(grid, block, registers, shared_bytes=shared)
            for grid, block, registers, shared in (configs[i] for i in config_ids.order)
        ],
        op_paths=[folded[i] for i in path_ids.order],
        apis=[apis[i] for i in output.apis.order],
        ranges=ranges.rows,
        num_launches=output.rows,
        skipped=tables.skipped,
        batches=output.batches(),
        close=stack.pop_all().close,
        warnings=(
            *doubt,
            *odd,
            *_skipped(tables),
            *doubts.texts(output.rows, stacks),
            *lone_ends,
            *calls.warnings,
        ),
        calls=calls.calls,
        call_spans=calls.spans,
        steps=steps,
    )
