"""Decoded events to int64 columns in an unlinked temporary file, with every string interned."""

from __future__ import annotations

import os
import re
import types
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


EXACT_LIMIT = float(1 << 43)  # µs; below it a double still rounds to the right nanosecond
MAX_NS = 1 << 61
MAX_INT = (1 << 63) - 1


GPU_ROW = ("start", "dur", "kernel", "config", "device", "stream", "correlation", "node", "bytes")
LAUNCH_ROW = ("correlation", "api", "thread", "start")
OP_ROW = ("start", "end", "thread", "name")


class NeedExactTimes(Exception):
    """A timestamp is beyond what a double holds to the nanosecond; the file must be read again
    with decimals.
    """


@dataclass(frozen=True, slots=True)
class Block:
    """One stretch of rows in a spool file: rows of `columns` int64, column after column.

    order sorts blocks into file order; low and high bound the key (correlation, or start and end of
    ops).
    """

    order: tuple[int, int]
    offset: int
    columns: int
    rows: int
    low: int
    high: int
    owner: int = 0


@dataclass(slots=True)
class Tables:
    """What one process found: interned strings, row blocks, ranges (name, start, duration,
    thread), counts.
    """

    threads: dict[tuple[Any, Any], int] = field(default_factory=dict)
    kernels: dict[tuple[str, str], int] = field(default_factory=dict)
    configs: dict[tuple[Any, ...], int] = field(default_factory=dict)
    apis: dict[str, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    gpu: list[Block] = field(default_factory=list)
    launches: list[Block] = field(default_factory=list)
    ops: list[Block] = field(default_factory=list)
    ranges: list[tuple[str, int, int, int]] = field(default_factory=list)
    events: int = 0
    skipped: int = 0


class Spool:
    """Rows in one temporary file that has no name any more."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0

    def write(self, columns: list[Ints]) -> int:
        """Append columns of equal length; returns their offset."""
        offset = self.size
        data = b"".join(column.tobytes() for column in columns)
        view = memoryview(data)
        while view:
            view = view[os.pwrite(self.file.fileno(), view, self.size) :]
            self.size = offset + len(data) - len(view)
        return offset

    def read(self, block: Block) -> Ints:
        """The block as an array of shape (columns, rows)."""
        data = os.pread(self.file.fileno(), block.columns * block.rows * 8, block.offset)
        return np.frombuffer(data, np.int64).reshape(block.columns, block.rows)


class Collector:
    """Takes decoded events in, and writes them out as columns."""

    def __init__(self, events: Events, spool: Spool) -> None:
        self.events = events
        self.spool = spool
        self.tables = Tables()
        self._gpu: list[Any] = []
        self._kinds: dict[type, str] = {}
        self._launch: list[Any] = []
        self._loose: list[Any] = []
        self._op: list[Any] = []
        self._range: list[Any] = []
        self._take: dict[type, Callable[[Any], object]] = {}
        self._sequence = 0
        self.register()

    def register(self) -> None:
        """Learn the event classes, again after the union has grown."""
        drop = deque[Any](maxlen=0).append
        take = self._take
        for cat, cls in zip(GPU, self.events.gpu, strict=True):
            take[cls] = self._gpu.append
            self._kinds[cls] = cat.removeprefix("gpu_")
        take.update(dict.fromkeys(self.events.launch, self._launch.append))
        take.update(dict.fromkeys(self.events.loose, self._loose.append))
        take.update(dict.fromkeys(self.events.ignored, drop))
        take[self.events.op] = self._op.append
        take[self.events.range] = self._range.append

    def add(self, events: Iterable[Any]) -> None:
        """Sort events by class into the pending lists."""
        take = self._take
        for event in events:
            take[type(event)](event)

    def flush(self, part: int) -> None:
        """Write the pending events as blocks of the given part of the file. Raises
        NeedExactTimes.
        """
        order = (part, self._sequence)
        self._sequence += 1
        if self._gpu:
            self._flush_gpu(order)
            self._gpu.clear()
        if self._loose:
            self._launch.extend(filter(None, map(_loose_launch, self._loose)))
            self._loose.clear()
        if self._launch:
            self._flush_launches(order)
            self._launch.clear()
        if self._op:
            self._flush_ops(order)
            self._op.clear()
        if self._range:
            self._flush_ranges()
            self._range.clear()

    def _flush_gpu(self, order: tuple[int, int]) -> None:
        events, kinds = self._gpu, self._kinds
        start, dur, keep = self._times(events)
        kernels, configs = self.tables.kernels, self.tables.configs
        args = [event.args for event in events]
        columns = [
            start,
            dur,
            _ints([kernels.setdefault((kinds[type(e)], e.name), len(kernels)) for e in events]),
            _ints(
                [
                    configs.setdefault((a.grid, a.block, a.registers, a.shared), len(configs))
                    for a in args
                ]
            ),
            _checked([a.device for a in args], keep),
            _checked([a.stream for a in args], keep),
            _checked([a.correlation for a in args], keep),
            _checked([a.graph_node or -1 for a in args], keep),
            _checked([a.bytes for a in args], keep),
        ]
        self._drop_odd_configs(columns[3], keep)
        self._write(self.tables.gpu, columns, keep, order, columns[6], columns[6])

    def _drop_odd_configs(self, config: Ints, keep: NDArray[np.bool_]) -> None:
        """Rows whose launch configuration does not fit into int64 are not kept."""
        used = np.unique(config)
        keys = list(self.tables.configs)
        odd = [number for number in used.tolist() if not _small(keys[number])]
        if odd:
            keep &= ~np.isin(config, odd)

    def _flush_launches(self, order: tuple[int, int]) -> None:
        events = self._launch
        keep = np.ones(len(events), np.bool_)
        apis = self.tables.apis
        columns = [
            _checked([e.args.correlation for e in events], keep),
            _ints([apis.setdefault(e.name, len(apis)) for e in events]),
            self._threads(events),
            self._nanoseconds([e.ts for e in events], keep),
        ]
        self._write(self.tables.launches, columns, keep, order, columns[0], columns[0])

    def _flush_ops(self, order: tuple[int, int]) -> None:
        events = self._op
        start, dur, keep = self._times(events)
        names = self.tables.names
        named = _ints([names.setdefault(e.name, len(names)) for e in events])
        columns = [start, start + dur, self._threads(events), named]
        self._write(self.tables.ops, columns, keep, order, start, columns[1])

    def _flush_ranges(self) -> None:
        start, dur, keep = self._times(self._range)
        thread = self._threads(self._range)
        rows = zip(self._range, start, dur, thread, keep, strict=True)
        for event, s, d, t, kept in rows:
            if kept:
                self.tables.ranges.append((event.name, int(s), int(d), int(t)))
            else:
                self.tables.skipped += 1

    def _times(self, events: list[Any]) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        keep = np.ones(len(events), np.bool_)
        start = self._nanoseconds([e.ts for e in events], keep)
        micro = np.array([e.dur for e in events], np.float64)
        keep &= (micro >= 0) & (micro < EXACT_LIMIT)
        dur = _to_ns(np.where(keep, micro, 0.0))
        return start, dur, keep

    def _nanoseconds(self, values: list[Any], keep: NDArray[np.bool_]) -> Ints:
        if not self.events.exact:
            micro = np.array(values, np.float64)
            if (np.abs(micro) >= EXACT_LIMIT).any():
                raise NeedExactTimes
            return _to_ns(micro)
        result = []
        for position, value in enumerate(values):
            exact = round(value * 1000) if abs(value) < MAX_NS else MAX_NS
            keep[position] &= abs(exact) < MAX_NS
            result.append(exact if abs(exact) < MAX_NS else 0)
        return np.array(result, np.int64)

    def _threads(self, events: list[Any]) -> Ints:
        threads = self.tables.threads
        return _ints([threads.setdefault((e.pid, e.tid), len(threads)) for e in events])

    def _write(
        self,
        blocks: list[Block],
        columns: list[Ints],
        keep: NDArray[np.bool_],
        order: tuple[int, int],
        low: Ints,
        high: Ints,
    ) -> None:
        if not keep.all():
            self.tables.skipped += int((~keep).sum())
            columns = [column[keep] for column in columns]
            low, high = low[keep], high[keep]
        if not len(low):
            return
        offset = self.spool.write(columns)
        span = (int(low.min()), int(high.max()))
        blocks.append(Block(order, offset, len(columns), len(low), *span))


@dataclass(slots=True)
class _Launch:
    name: str
    ts: Any
    args: Any
    pid: Any
    tid: Any


@dataclass(slots=True)
class _Correlated:
    correlation: int


def _loose_launch(event: Any) -> _Launch | None:
    """An event of an unknown category as a launch, if it looks like one."""
    args = event.args if isinstance(event.args, dict) else {}
    correlation = args.get("correlation")
    if not isinstance(correlation, int) or "stream" in args:
        return None
    if not isinstance(event.ts, int | float):
        return None
    return _Launch(event.name, event.ts, _Correlated(correlation), event.pid, event.tid)


def _to_ns(micro: NDArray[np.float64]) -> Ints:
    """Microseconds with three decimals to nanoseconds, exact below EXACT_LIMIT.

    Whole and fraction apart: near 2**42 a double is off by up to 0.49 ns, and the rounding of a
    plain product by 1000
    would make a whole one of it.
    """
    whole = np.floor(micro)
    fraction = np.rint((micro - whole) * 1000)
    return whole.astype(np.int64) * 1000 + fraction.astype(np.int64)


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


def _checked(values: list[int], keep: NDArray[np.bool_]) -> Ints:
    """Values as int64; those that do not fit lose their row."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        fits = [-MAX_INT <= value <= MAX_INT for value in values]
        keep &= np.array(fits)
        return np.array([v if f else -1 for v, f in zip(values, fits, strict=True)], np.int64)


def _small(config: tuple[Any, ...]) -> bool:
    """Whether a launch configuration holds only numbers from 0 to int64's largest."""
    grid, block, registers, shared = config
    values = (*(grid or ()), *(block or ()), registers or 0, shared or 0)
    return bool(max(values) <= MAX_INT and min(values) >= 0)


GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")
IGNORED = (
    "python_function", "ac2g", "async_cpu_to_gpu", "fwdbwd", "forward_backward",
    "cpu_instant_event", "overhead", "Trace", "gpu_user_annotation", "cuda_sync", "cuda_event",
    "cuda_profiler_range", "collective_comm", "async_gpu", "async",
)  # fmt: skip


Id = int | str | float | None
Triple = tuple[int, int, int]


_NOT_FINITE = re.compile(
    rb'"(?:[^"\\]|\\.)*+"|-?\b(?:NaN|nan|Infinity|infinity|inf)\b', re.DOTALL | re.ASCII
)


class GpuArgs(msgspec.Struct, gc=False):
    """`args` of a kernel, memcpy or memset."""

    device: int = -1
    stream: int = -1
    correlation: int = -1
    graph_node: int | None = msgspec.field(default=None, name="graph node id")
    registers: int | None = msgspec.field(default=None, name="registers per thread")
    shared: int | None = msgspec.field(default=None, name="shared memory")
    grid: Triple | None = None
    block: Triple | None = None
    bytes: int = -1


class LaunchArgs(msgspec.Struct, gc=False):
    """`args` of a runtime or driver call."""

    correlation: int = -1


class LooseArgs(msgspec.Struct, gc=False):
    """`args` of a category not known here: a launch if it has a correlation and no stream."""

    correlation: Any = -1
    stream: Any = None


_TIMES = {False: float, True: Decimal}


class Events:
    """The union's classes and decoders for one file; `exact` reads ts as Decimal (beyond float's
    exactness).
    """

    def __init__(self, *, exact: bool, extra: tuple[str, ...] = ()) -> None:
        self.exact = exact
        self.extra = list(extra)
        self._build()

    def _build(self) -> None:
        time = _TIMES[self.exact]
        timed: list[tuple[str, Any]] = [("name", str), ("ts", time), ("dur", float)]
        thread: list[Any] = [("pid", Id, None), ("tid", Id, None)]
        self.gpu = [_struct(cat, [*timed, ("args", GpuArgs)]) for cat in GPU]
        launch: list[Any] = [("name", str), ("ts", time), ("args", LaunchArgs), *thread]
        self.launch = [_struct(cat, launch) for cat in LAUNCH]
        loose: list[Any] = [
            ("name", str, ""),
            ("ts", Any, None),
            ("args", Any, None),
            *thread,
        ]
        self.loose = [_struct(cat, loose) for cat in self.extra]
        self.op = _struct("cpu_op", [*timed, *thread])
        self.range = _struct("user_annotation", [*timed, *thread])
        self.ignored = [_struct(cat, []) for cat in IGNORED]
        union: Any = self.op | self.range
        for cls in (*self.gpu, *self.launch, *self.loose, *self.ignored):
            union = union | cls
        self.many: Any = msgspec.json.Decoder(types.GenericAlias(list, (union,)))
        self.one: Any = msgspec.json.Decoder(union)
        self.known = {*GPU, *LAUNCH, "cpu_op", "user_annotation", *IGNORED, *self.extra}

    def decode_one(self, data: bytes) -> tuple[Any, bool]:
        """One event of a segment that did not decode as a whole: (event or None, whether it was
        bad).

        Events without a category and ones without a duration are none of ours and not bad. Numbers
        that are not finite
        become null: Kineto writes `inf` for the bandwidth of a copy that took no time.
        """
        try:
            return self.one.decode(data), False
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        data = _NOT_FINITE.sub(_null, data)
        try:
            head = _HEAD.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None, True
        if not isinstance(head.cat, str) or head.ph not in (None, "X"):
            return None, False
        if head.cat not in self.known:
            if len(self.extra) >= 256:
                return None, False
            self.extra.append(head.cat)
            self._build()
        try:
            return self.one.decode(data), False
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None, True


class _Head(msgspec.Struct):
    cat: Any = None
    ph: Any = None


_HEAD = msgspec.json.Decoder(_Head)


def _struct(category: str, fields: list[Any]) -> Any:
    name = "Event_" + re.sub(r"\W", "_", category)
    return msgspec.defstruct(name, fields, tag_field="cat", tag=category, gc=False)


def _null(match: re.Match[bytes]) -> bytes:
    return match.group() if match.group().startswith(b'"') else b"null"
