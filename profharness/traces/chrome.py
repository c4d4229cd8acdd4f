"""Parse Kineto's Chrome traces, the JSON files that torch.profiler writes, in bounded memory.

A file is read in small blocks. The scanner divides the file into segments that end at event
boundaries, and decodes one segment after another. The file may be compressed with gzip.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from profharness.devices import Device
from profharness.errors import NotATraceError, TraceFormatError, with_count
from profharness.files import JSON_WEIGHT, has_too_many_values
from profharness.rows import TORCH
from profharness.trace import LaunchConfig, Trace
from profharness.traces import GzipReader, open_file
from profharness.traces.attribution import (
    CHUNK_ROWS,
    MAX_DEPTH,
    SLICE_ROWS,
    Attribution,
    Chunk,
    linked_chunks,
)
from profharness.traces.chrome_events import (
    MODULE_MARK,
    UNDECODABLE,
    Collector,
    EventColumns,
    whole_characters,
)
from profharness.traces.columns import (
    KINETO_KEYS,
    MAX_NS,
    MAX_TEXT,
    THREAD_GRIDS,
    UNNAMED_GPU,
    GpuRows,
    Ints,
    LaunchRows,
    Spool,
    Tables,
    blocks_of,
    distinct,
    hashed,
    make_device,
    map_values,
    nothing,
)
from profharness.traces.graphs import GraphCapture, find_captures, read_annotations, replayed

KEPT = (
    "schemaVersion", "trace_id", "record_shapes", "with_stack", "profile_memory", "with_flops",
    "with_modules", "cuda_runtime_version", "cuda_driver_version", "cupti_version",
    "hip_runtime_version", "hip_driver_version", "rocm_version", "torch_version",
)  # fmt: skip
DISTRIBUTED = ("backend", "rank", "world_size")
BLOCK = 128 * 1024  # sizes from 32 to 256 KiB are fastest, because bigger buffers cost page faults
SEGMENT = 1 << 21  # number of bytes that the compiled scanner reads at once
MAX_PIECE = 32 << 20  # maximum size of an event, of the header and of the trailer, in bytes
FLUSH = 2 * 1024 * 1024
REACH = 4 * 1024 * 1024  # maximum number of bytes in which to search for the end of a broken event
# The end of a broken event is searched within REACH bytes for this number of events. The search is
# slow, so any further broken event is assumed to end at the next separator.
MAX_UNCLOSED = 8
MAX_FRAME = 1 << 12  # maximum size of the event of a Python frame, in bytes
# Repeated ops are reported only if they are more than this fraction of all ops, because short ops
# that start in the same microsecond also look repeated.
REPEATED_OPS = 0.05

HIP = "hip"  # prefix of the names of ROCm's API calls

_EVENTS_KEY = b'"traceEvents"'
_ARRAY = re.compile(rb"\s*+:\s*+\[")
_SPACE_AND_COLON = re.compile(rb"\s*+:?+\s*+")
_SPACE = re.compile(rb"[ \t\r\n]*")
_GAP = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*(?=\{)")
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(_STRING + rb'|[{}\[\]"]', re.DOTALL)
_KEY = re.compile(rb"\{[ \t\r\n]*" + _STRING, re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]{1,18}")


def parse_chrome(
    path: Path,
    captures: Sequence[Path] = (),
    *,
    chunk_rows: int = CHUNK_ROWS,
    slice_rows: int = SLICE_ROWS,
) -> Trace:
    """Parse a Kineto trace. The caller must close the returned Trace.

    The launches of the Trace are kernels, memcpys and memsets. If the trace contains none of these,
    the launches are ATen ops, and the duration of an op excludes its child ops. Events that cannot
    be read are skipped and counted. `captures` are traces of the same program that contain the
    captures of its CUDA graphs, or the names that `mark_kernels` gave to their nodes. They describe
    the kernels of replays. `chunk_rows` and `slice_rows` affect the memory that the parser uses,
    but not the result.

    Raise TraceFormatError if the file is truncated, damaged or not a Kineto trace.
    """
    path = Path(path)
    with closing(Window(path)) as window:
        layout = probe(window)
    annotations: dict[int, str] = {}
    recorded = {}
    for file in captures:
        if (names := read_annotations(file)) is not None:
            annotations |= names
        else:
            recorded[file.name] = read_captures(file)
    with ExitStack() as stack:
        collector = Collector(Spool(stack))
        with closing(Window(path)) as window:
            end = FileScanner(window, layout, collector).scan()
        header = read_trailer(path, layout, end)
        return _assemble(
            path, collector.tables, header, recorded, annotations, chunk_rows, slice_rows, stack
        )


def read_captures(path: Path) -> list[GraphCapture]:
    """Return the captures of CUDA graphs in a Kineto trace.

    Raise TraceFormatError if the file is truncated, damaged or not a Kineto trace.
    """
    with closing(Window(path)) as window:
        layout = probe(window)
    with ExitStack() as stack, closing(Window(path)) as window:
        collector = Collector(Spool(stack))
        # The compiled scanner does not read the names of launched kernels.
        FileScanner(window, layout, collector, compiled=False).scan()
        tables = collector.tables
        threads = [(_number(pid), _number(tid)) for pid, tid in tables.threads]
        at = Attribution(tables, _flows(tables.arrows)[0], threads, 0)
        return find_captures(tables, at, threads)


def _assemble(
    path: Path,
    tables: Tables,
    header: dict[str, Any],
    recorded: Mapping[str, Sequence[GraphCapture]],
    annotations: Mapping[int, str],
    chunk_rows: int,
    slice_rows: int,
    stack: ExitStack,
) -> Trace:
    base, doubts = header.get("baseTimeNanoseconds", 0), []
    if not isinstance(base, int) or isinstance(base, bool) or abs(base) >= MAX_NS:
        base = 0
        doubts = ["baseTimeNanoseconds is not a valid number, so times start at 0"]
    is_rocm = any(name.startswith(HIP) for name in tables.apis)
    devices, odd = _devices(header, UNNAMED_GPU if is_rocm else "")
    threads = [(_number(pid), _number(tid)) for pid, tid in tables.threads]
    flows, lone = _flows(tables.arrows)
    at = Attribution(tables, flows, threads, base, slice_rows=slice_rows)
    own = find_captures(tables, at, threads)
    at.calls, ops = replayed(
        *(tables, at.calls, at.steps, threads, base),
        kernels=list(tables.kernels),
        own=own,
        recorded=recorded,
        annotations=annotations,
    )
    stacks = np.array([at.stacks.number(names) for names in ops.stacks], np.int64)
    counts, hashes = Counter[str](), [nothing(0)]
    used: set[int] = set()  # the devices of launches

    def gpu_chunks() -> Iterator[Chunk]:
        first = 0
        for gpu, launched in linked_chunks(tables, counts, chunk_rows):
            counts["unmatched"] += int(np.count_nonzero(launched.thread < 0))
            hashes.append(hashed(gpu))
            used.update(distinct(gpu.device))
            gpu = in_blocks(gpu, launched)
            paths = at.stacks.lookup(launched.thread, launched.start)
            low, high = np.searchsorted(ops.rows, [first, first + len(paths)])
            paths[ops.rows[low:high] - first] = stacks[ops.row_stacks[low:high]]
            first += len(paths)
            yield gpu, launched, paths

    configs = [
        LaunchConfig(grid, block, registers, shared_bytes=shared)
        for grid, block, registers, shared in tables.configs
    ]
    in_blocks = GridConverter(tables, configs)
    if tables.gpu:
        chunks, kernels = gpu_chunks(), list(tables.kernels)
    else:
        chunks, kernels = at.op_chunks(), [("op", name) for name in tables.names]
        configs = [LaunchConfig(None, None)]
    trace = at.make_trace(
        stack,
        chunks,
        kernels,
        configs,
        profiler=TORCH,
        devices=devices,
        environment=_environment(header),
        close=stack.close,
    )
    skipped = []
    if tables.skipped:
        negative = (
            f", {tables.negative} of them because of a negative duration" if tables.negative else ""
        )
        text = f"{{n}} [event|events] could not be read and [was|were] skipped{negative}"
        skipped = [with_count(text, tables.skipped)]
    if not trace.num_launches:
        message = "traceEvents is empty"
        if tables.events or tables.skipped:
            message = "; ".join(
                [
                    with_count(
                        "the {n} [event|events] in the file [records|record] no work",
                        tables.events,
                    ),
                    *skipped,
                ]
            )
        raise TraceFormatError(path, message, expected="at least one kernel, copy or ATen op")
    seen = np.sort(np.concatenate(hashes))
    repeated = int(np.count_nonzero(seen[1:] == seen[:-1]))
    if at.stacks.repeated > trace.num_launches * REPEATED_OPS:
        repeated += at.stacks.repeated
    counts["repeated"] = repeated
    texts = {
        "unmatched": (
            "{n} [launch has|launches have] no API call with the same correlation id, so the thread, range "
            "and op are unknown"
        ),
        "ambiguous": (
            "{n} [launch has|launches have] several API calls with the same correlation id; the first one is "
            "used"
        ),
        "repeated": "{n} [launch occurs|launches occur] twice in the file and [is|are] counted twice",
    }
    found = [with_count(text, counts[key]) for key, text in texts.items() if counts[key]]
    if at.stacks.paths.deep:
        found.append(f"op stacks of more than {MAX_DEPTH} ops are stored without their middle part")
    warnings = (*doubts, *odd, *skipped, *found, *lone, *at.calls.warnings)
    if is_rocm:
        devices = _with_agents(devices, used)
    return replace(trace, close=stack.pop_all().close, warnings=warnings, devices=devices)


class GridConverter:
    """Converts the sizes of grids from threads to blocks.

    ROCm's Kineto records the arguments of the call that launched a kernel. New launch
    configurations are appended to `configs`.
    """

    def __init__(self, tables: Tables, configs: list[LaunchConfig]) -> None:
        self._configs = configs
        self._apis = [tables.apis[name] for name in THREAD_GRIDS if name in tables.apis]
        self._converted: dict[int, int] = {}

    def __call__(self, gpu: GpuRows, launched: LaunchRows) -> GpuRows:
        """Return the launches with the sizes of grids in blocks."""
        rows = np.flatnonzero(np.isin(launched.api, self._apis)) if self._apis else ()
        if not len(rows):
            return gpu
        config = gpu.config.copy()
        config[rows] = map_values(config[rows], self._convert)
        return gpu._replace(config=config)

    def _convert(self, config: int) -> int:
        if config not in self._converted:
            given = self._configs[config]
            self._converted[config] = len(self._configs)
            self._configs.append(replace(given, grid=blocks_of(given.grid, given.block)))
        return self._converted[config]


def _with_agents(devices: tuple[Device, ...], used: set[int]) -> tuple[Device, ...]:
    """Return the GPUs of a ROCm trace, including those that its launches refer to.

    ROCm numbers the GPUs of launches as agents, and CPUs are agents too, so these numbers are
    larger than those of the header. This does not matter if all GPUs have the same properties.
    """
    if not devices or any(
        replace(each, index=0) != replace(devices[0], index=0) for each in devices
    ):
        return devices
    missing = sorted(used - {each.index for each in devices} - {-1})
    return (*devices, *(replace(devices[0], index=index) for index in missing))


def _flows(arrows: list[Ints]) -> tuple[Ints, list[str]]:
    """Return the `flows` for `Attribution`, and a warning if some arrows have only one end."""
    key, begins, thread, t = np.concatenate([np.empty((4, 0), np.int64), *arrows], axis=1)
    sides = []
    for rows in (np.flatnonzero(begins), np.flatnonzero(begins == 0)):
        # if an arrow has several starts or ends, the last start and the last end are used
        keys, last = np.unique(key[rows][::-1], return_index=True)
        sides.append((keys, rows[len(rows) - 1 - last]))
    (keys, starts), (others, ends) = sides
    both, at, to = np.intersect1d(keys, others, assume_unique=True, return_indices=True)
    starts, ends = starts[at], ends[to]
    order = np.lexsort((both, t[starts]))
    made = np.stack([thread[starts], t[starts], thread[ends], t[ends]], axis=1)
    lone = len(keys) + len(others) - 2 * len(both)
    text = (
        f"{lone:,} forward-to-backward arrows have only one end, so their backward ops are unknown"
    )
    return made[order], [text] if lone else []


def _environment(header: dict[str, Any]) -> dict[str, object]:
    """Return the properties of a header that do not identify a person or a machine."""
    kept: dict[str, object] = {key: header[key] for key in KEPT if _is_scalar(header.get(key))}
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    if distributed := {key: info[key] for key in DISTRIBUTED if _is_scalar(info.get(key))}:
        kept["distributedInfo"] = distributed
    return kept


def _is_scalar(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < 1 << 62)


def _devices(header: dict[str, Any], unnamed: str) -> tuple[tuple[Device, ...], list[str]]:
    rows = header.get("deviceProperties", [])
    given = rows if isinstance(rows, list) else [rows]
    made = [
        make_device(
            row.get("id"),
            unnamed if row.get("name") == "" else row.get("name"),
            {limit: row.get(key) for limit, key in KINETO_KEYS.items()},
        )
        for row in given
        if isinstance(row, dict)
    ]
    doubts = [text for _, texts in made for text in texts]
    if len(made) < len(given):
        doubts.append(
            f"{len(given) - len(made)} of {len(given)} entries in deviceProperties are not devices"
        )
    return tuple(device for device, _ in made if device), doubts


def _number(value: Any) -> int:
    """Return a pid or tid as a number, or -1 if Kineto wrote a word instead of a number."""
    text = str(value)
    return int(text) if isinstance(value, int | str) and _NUMBER.fullmatch(text) else -1


class FileScanner:
    """Scans the events of a file and passes them to a collector."""

    def __init__(
        self, window: Window, layout: Layout, collector: Collector, *, compiled: bool = True
    ) -> None:
        self._window, self._layout, self._collector = window, layout, collector
        self._columns = EventColumns.build(collector) if compiled else None
        # Allocated only once, because new memory costs page faults
        self._segment_bytes = bytearray(SEGMENT if self._columns else 0)
        self._array_end: int | None = None
        self._unclosed = 0

    def scan(self) -> int:
        """Collect all events. Return the offset of the bracket that closes the array of events."""
        window, separator, lead = self._window, self._layout.separator, self._layout.gap + 1
        if self._layout.empty:
            return self._layout.first
        window.fill()
        window.seek(self._layout.first)
        flushed = window.base
        wanted = 1
        # Whether the whole file has been read and the last separator lies inside an event
        stuck = False
        while self._array_end is None:
            self._scan_segments()
            more = True
            if len(window.buffer) < wanted or separator not in window.buffer:
                least = SEGMENT if self._columns else BLOCK
                more = window.fill(max(least, min(len(window.buffer), MAX_PIECE // 4)))
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
            used = self._collect(buffer, length, last=final)
            if self._array_end is None:
                if final:
                    break
                complete = used == length
                window.seek(window.base + (stop + lead if complete else used))
                stuck = window.eof and not complete
                wanted = 1 if complete else min(2 * len(window.buffer), REACH)
            if window.base - flushed >= FLUSH:
                self._collector.flush()
                flushed = window.base
        self._collector.flush()
        if self._array_end is None:
            message = "the file ends inside traceEvents"
            raise window.error(message, expected="] at the end of the events")
        return self._array_end

    def _scan_segments(self) -> None:
        """Collect segments of the file until the compiled scanner cannot read a whole segment."""
        window, separator, columns = self._window, self._layout.separator, self._columns
        segment = memoryview(self._segment_bytes)
        while columns and (size := window.read_into(segment)):
            stop = self._segment_bytes.rfind(separator, 0, size)
            if stop < 0:
                return
            used = columns.collect(segment, stop + 1)
            window.seek(window.base + (stop + self._layout.gap + 1 if used > stop else used))
            self._collector.flush()
            if used <= stop:
                return

    def _collect(self, text: bytes, length: int, *, last: bool) -> int:
        """Collect the events of text[:length]. Return the number of bytes consumed."""
        begin = self._columns.collect(text, length) if self._columns else 0
        if begin == length:
            return begin
        segment = text[:length]
        try:
            if has_too_many_values(segment):
                used = self._collect_singly(segment, begin, last=last)
            else:
                self._collector.decode(segment[begin:])
                used = length
        except UNDECODABLE:
            used = self._collect_singly(segment, begin, last=last)
        # The decoder skips all Python frames, because they are most of the events in a trace that
        # contains stacks. The frames that are calls of nn.Modules are decoded here.
        at = segment.find(MODULE_MARK, begin, used)
        while at >= 0:
            begin = segment.rfind(b"{", max(0, at - MAX_FRAME), at)
            end = object_end(segment, begin, min(used, begin + MAX_FRAME)) if begin >= 0 else None
            if end is not None:
                self._collector.add_module(segment[begin:end])
            at = segment.find(MODULE_MARK, max(at + 1, end or 0), used)
        return used

    def _collect_singly(self, segment: bytes, position: int, *, last: bool) -> int:
        """Decode one event after another, and find the end of the array.

        Broken events are skipped and counted. Return the number of bytes consumed.
        """
        separator, lead = self._layout.separator, self._layout.gap + 1
        tables = self._collector.tables
        while position < len(segment):
            certain = self._layout.certain or self._unclosed > MAX_UNCLOSED
            border = segment.find(separator, position) if certain else -1
            behind = object_end(segment, position, border + 1 if border >= 0 else len(segment))
            if behind is None:
                self._unclosed += 1
                if border < 0 and not last and len(segment) - position < REACH:
                    return position
                border = segment.find(separator, position + 1) if border < 0 else border
                if border < 0 and last:
                    return self._lost_end(segment, position)
                tables.skipped += 1
                position = len(segment) if border < 0 else border + lead
                continue
            before = tables.skipped
            self._collector.add_text(segment[position:behind])
            position = skip_space(segment, behind)
            mark = segment[position : position + 1]
            if mark == b"]":
                self._array_end = self._window.base + position
                return position
            if mark == b",":
                position = skip_space(segment, position + 1)
                if segment[position : position + 1] in (b"{", b""):
                    continue
            if not mark:
                break
            # Something other than an event follows, so the previous event is broken
            tables.skipped += tables.skipped == before
            border = segment.find(separator, position)
            position = len(segment) if border < 0 else border + lead
        return len(segment)

    def _lost_end(self, segment: bytes, position: int) -> int:
        """Find the end of the array after a broken event. Return the number of bytes consumed."""
        tail = segment[position:].rstrip()
        border = max(tail.rfind(b"}\n  ]"), tail.rfind(b"}]"), tail.rfind(b"}\n ]"))
        if border < 0 or not tail.endswith((b"}", b"]")):
            return len(segment)
        self._collector.tables.skipped += 1
        self._array_end = self._window.base + position + tail.index(b"]", border)
        return position


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of the events in a file."""

    first: int  # offset of the first event, or of the `]` if traceEvents is `[]`
    separator: bytes = b""  # from the `}` that ends an event to the beginning of the next event
    gap: int = 0  # number of bytes between this `}` and the next event's `{`
    # Whether the separator contains a newline. A JSON string cannot contain a newline, so every
    # occurrence of such a separator is an event boundary.
    certain: bool = True
    bare: bool = False  # whether the file consists only of the array of events
    empty: bool = False
    header: dict[str, Any] = field(default_factory=dict)


class Window:
    """A buffer that contains a part of the uncompressed file, starting at the offset `base`.

    The methods raise TraceFormatError if the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer = b""
        self.base = 0
        self.eof = False
        self._file, _ = open_file(path)

    @property
    def end(self) -> int:
        return self.base + len(self.buffer)

    def fill(self, size: int = BLOCK) -> bool:
        """Append up to `size` bytes to the buffer. Return False at the end of the file."""
        kept = len(self.buffer)
        if 0 < kept < size // 8 and not isinstance(self._file, GzipReader) and not self.eof:
            self._file.seek(self.base)  # reading bytes again is faster than joining buffers
            data = self._read(kept + size)
            self.eof = len(data) <= kept
            self.buffer = self.buffer if self.eof else data
            return not self.eof
        data = b"" if self.eof else self._read(size)
        self.eof = not data
        self.buffer = self.buffer + data if kept else data
        return bool(data)

    def read_into(self, segment: memoryview) -> int:
        """Read the bytes from `base` on into `segment`, without moving the window.

        Return the number of bytes read, which is always 0 if the file is compressed.
        """
        if isinstance(self._file, GzipReader):
            return 0
        try:
            self._file.seek(self.base)
            size = self._file.readinto(segment)
            self._file.seek(self.end)
        except OSError:
            return 0  # `fill` reports the error
        return size or 0

    def seek(self, offset: int) -> None:
        """Move the window to `offset`, which must not be before `base`.

        If the file is shorter, move the window to the end of the file.
        """
        if offset > self.end and not isinstance(self._file, GzipReader):
            offset = min(offset, self._file.seek(0, os.SEEK_END))
            self._file.seek(offset)
            self.base, self.buffer = offset, b""
        while offset > self.end:
            self.base, self.buffer = self.end, b""
            if not self.fill():
                return
        self.base, self.buffer = offset, self.buffer[offset - self.base :]

    def rest(self) -> bytes:
        """Return all bytes from `base` to the end of the file.

        Raise TraceFormatError if there are more than MAX_PIECE bytes.
        """
        begin = self.end
        while self.fill(max(BLOCK, len(self.buffer))):
            if len(self.buffer) > MAX_PIECE:
                message = f"more than {MAX_PIECE >> 20} MiB of other data follow the events"
                raise self.error(
                    message, offset=begin, expected="the end of the file after the events"
                )
        return self.buffer

    def error(self, message: str, *, offset: int | None = None, expected: str) -> TraceFormatError:
        """Return an error that names this file and an offset, by default the end of the buffer."""
        where = self.end if offset is None else offset
        return TraceFormatError(self.path, message, offset=where, expected=expected)

    def too_long(self, offset: int) -> TraceFormatError:
        message = f"an event is larger than {MAX_PIECE >> 20} MiB"
        return self.error(message, offset=offset, expected="an event")

    def close(self) -> None:
        self._file.close()

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size) or b""
        except OSError as error:
            message = f"cannot be read: {error.strerror}"
            raise self.error(message, expected="an undamaged file") from None


def object_end(data: bytes, start: int, stop: int | None = None) -> int | None:
    """Return the offset after the JSON object at `start`, or None if `stop` comes first."""
    depth = 0
    for match in _TOKEN.finditer(data, start, len(data) if stop is None else stop):
        token = data[match.start()]
        if token in b"{[":
            depth += 1
        elif token in b"}]":
            depth -= 1
            if depth == 0:
                return match.end()
        elif match.end() - match.start() == 1:
            return None
    return None


def skip_space(data: bytes, position: int) -> int:
    match = _SPACE.match(data, position)
    return match.end() if match else position


def decode_lenient(data: bytes) -> Any:
    """Decode JSON that may contain NaN, invalid UTF-8 or control characters.

    Raise ValueError if the data is not JSON, has too many values or is nested too deeply.
    """
    if has_too_many_values(data):
        raise ValueError(f"more than {JSON_WEIGHT:,} values")
    try:
        try:
            return msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return json.loads(whole_characters(data).decode("utf-8", "replace"), strict=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def probe(window: Window) -> Layout:
    """Determine the layout of a file. The window must be at the beginning of the file.

    Raise TraceFormatError if the file is not JSON, has no traceEvents or is truncated.
    """
    window.fill()
    if not window.buffer:
        raise window.error("the file is empty", expected="a Kineto trace")
    start = skip_space(window.buffer, 3 if window.buffer.startswith(b"\xef\xbb\xbf") else 0)
    opening = window.buffer[start : start + 1]
    if opening == b"[":
        return _layout(window, start + 1, {}, bare=True)
    if opening != b"{":
        raise NotATraceError(
            window.path,
            "not JSON",
            offset=start,
            expected="{ or [ at the start of a Kineto trace",
        )
    position = _find_events(window, start)
    try:
        header = decode_lenient(window.buffer[start:position] + b"]}")
    except ValueError:
        raise _foreign(window) from None
    return _layout(window, position, header, bare=False)


def _find_events(window: Window, start: int) -> int:
    """Return the offset after the `[` that starts the top-level traceEvents."""
    depth, position = 0, start
    while True:
        for match in _TOKEN.finditer(window.buffer, position):
            position, opening = match.start(), match[0][:1]
            if match[0] == b'"':
                break  # the string does not end in the buffer
            if depth == 1 and match[0] == _EVENTS_KEY:
                behind = _ARRAY.match(window.buffer, match.end())
                if behind is not None:
                    return behind.end()
                if _SPACE_AND_COLON.fullmatch(window.buffer, match.end()):
                    break
            depth += (opening in b"{[") - (opening in b"]}")
            position = match.end()
            if not depth:
                raise _foreign(window)
        if len(window.buffer) > MAX_PIECE:
            message = f"the first {MAX_PIECE >> 20} MiB do not contain traceEvents"
            raise window.error(message, expected='"traceEvents": [')
        if not window.fill(min(max(BLOCK, len(window.buffer)), MAX_PIECE // 4)):
            raise _foreign(window)


def _foreign(window: Window) -> TraceFormatError:
    try:
        value = decode_lenient(window.buffer.removeprefix(b"\xef\xbb\xbf"))
    except json.JSONDecodeError as error:
        offset = len(error.doc[: error.pos].encode("utf-8", "replace"))
        message = f"invalid JSON: {error.msg}"
        return window.error(message, offset=offset, expected='"traceEvents": [')
    except ValueError as error:
        return window.error(f"not JSON: {error}", expected='"traceEvents": [')
    if isinstance(value, dict) and "traceEvents" in value:
        return window.error("traceEvents is not an array", expected='"traceEvents": [')
    return NotATraceError(
        window.path,
        "valid JSON, but not a Kineto trace",
        offset=0,
        expected='the key "traceEvents"',
    )


def _layout(window: Window, position: int, header: dict[str, Any], *, bare: bool) -> Layout:
    """Find the separator between the first two events, and return the layout of the file."""
    header.pop("traceEvents", None)
    between, tail, certain = b",", b"{", False  # used if there is no second event
    size = BLOCK
    while True:
        first = skip_space(window.buffer, position)
        opening = window.buffer[first : first + 1]
        if opening == b"]":
            return Layout(first, bare=bare, empty=True, header=header)
        if opening and opening != b"{":
            raise window.error("not an event", offset=first, expected="{ at the start of an event")
        end = object_end(window.buffer, first) if opening else None
        if end is not None and (gap := _GAP.match(window.buffer, end)):
            certain = b"\n" in gap.group()
            key = None if certain else _KEY.match(window.buffer, gap.end())
            if certain or key:
                between, tail = gap.group(), key.group() if key else tail
                break
        elif end is not None and window.buffer[skip_space(window.buffer, end) :][:1] == b"]":
            break
        if len(window.buffer) - position > MAX_PIECE:
            raise window.too_long(first)
        if not window.fill(size):
            if end is None:
                message = "the file ends inside its first event"
                raise window.error(message, expected="a complete event")
            break
        size = min(max(BLOCK, len(window.buffer)), MAX_PIECE // 4)
    return Layout(first, b"}" + between + tail, len(between), certain, bare, header=header)


def read_trailer(path: Path, layout: Layout, end: int) -> dict[str, Any]:
    """Return the members of the file before and after the events, which end at offset `end`."""
    with closing(Window(path)) as window:
        window.fill()
        window.seek(end + 1)
        data = window.rest()
        at = skip_space(data, 0)
        if layout.bare:
            if data[at:].strip(b" \t\r\n\0"):
                message = "there is other data after the events"
                raise window.error(message, offset=end + 1 + at, expected="the end of the file")
            return {}
        mark = data[at : at + 1]
        try:
            if mark not in (b",", b"}"):
                raise ValueError("no closing }")
            tail = data[at + 1 :] if mark == b"," else data[at:]
            trailer = decode_lenient(b"{" + tail.rstrip(b" \t\r\n\0"))
            if "traceEvents" in trailer:
                raise ValueError("traceEvents occurs twice")
        except ValueError as error:
            message = f"the file is invalid after the events: {error}"
            raise window.error(message, expected="} at the end of the trace") from None
        return {**trailer, **layout.header}
