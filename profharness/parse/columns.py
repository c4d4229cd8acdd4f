"""Decoded events to int64 columns in an unlinked temporary file, with every string interned."""

from __future__ import annotations

import math
import os
import re
import tempfile
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain, islice
from typing import Any, BinaryIO, NamedTuple, Union, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from profharness.parse.ops import Detail, has_arguments, is_detailed
from profharness.parse.packed import without_room

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Triple = tuple[int, int, int]

EXACT_LIMIT = float(1 << 43)  # µs; below it a double still rounds to the right nanosecond
MAX_NS = 1 << 61
MAX_INT = (1 << 63) - 1
MAX_TEXT = 200  # characters of a text from a header
MAX_ARGUMENTS = 4096  # different arguments of ops that are remembered


class GpuRows(NamedTuple):
    """Kernels, memcpys and memsets; kernel and config are ids, times are ns."""

    start: Ints
    duration: Ints
    kernel: Ints
    config: Ints
    device: Ints
    stream: Ints
    correlation: Ints
    node: Ints
    bytes: Ints


class LaunchRows(NamedTuple):
    """Runtime and driver calls; api and thread are ids."""

    correlation: Ints
    api: Ints
    thread: Ints
    start: Ints


class OpRows(NamedTuple):
    """ATen ops; thread and name are ids."""

    start: Ints
    end: Ints
    thread: Ints
    name: Ints


class Arrow(NamedTuple):
    """One end of an arrow between two moments: where it starts or, with begins 0, where it ends."""

    key: int | str
    begins: int
    thread: int
    t: int


class NeedExactTimes(Exception):
    """A double does not hold a timestamp to the nanosecond; the file has to be read with decimals."""


class Ids(dict[Any, int]):
    """Numbers of values in order of first use: looking a new one up gives it the next number."""

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        return number

    def column(self, values: list[Any]) -> Ints:
        """The number of each value."""
        return np.fromiter(map(self.__getitem__, values), np.int64, len(values))


@dataclass(frozen=True, slots=True)
class Block:
    """One stretch of rows in a spool file: rows of `columns` int64, column after column.

    order sorts blocks into file order; low and high bound the correlation, or ops' start and end.
    """

    order: tuple[int, int]
    offset: int
    columns: int
    rows: int
    low: int
    high: int
    owner: int = 0


@dataclass(slots=True)
class RangeColumns:
    """Ranges as they come: times in ns, thread as an index, wide 1 for a start/end range, which
    NVTX means to hold for the whole process.
    """

    names: list[str] = field(default_factory=list)
    start: array[int] = field(default_factory=lambda: array("q"))
    duration: array[int] = field(default_factory=lambda: array("q"))
    thread: array[int] = field(default_factory=lambda: array("q"))
    wide: array[int] = field(default_factory=lambda: array("b"))

    def add(self, name: str, start: int, duration: int, thread: int, wide: bool = False) -> None:
        self.names.append(name)
        self.start.append(start)
        self.duration.append(duration)
        self.thread.append(thread)
        self.wide.append(wide)

    def extend(self, other: RangeColumns, threads: Ints) -> None:
        """Append another process's ranges; threads maps its thread ids to these."""
        self.names += other.names
        self.start += other.start
        self.duration += other.duration
        self.thread.extend(threads[np.array(other.thread, np.int64)].tolist())
        self.wide += other.wide


@dataclass(slots=True)
class Tables:
    """What one process read: interned strings, row blocks, ranges, counts."""

    threads: Ids = field(default_factory=Ids)
    kernels: Ids = field(default_factory=Ids)
    configs: Ids = field(default_factory=Ids)
    apis: Ids = field(default_factory=Ids)
    names: Ids = field(default_factory=Ids)
    gpu: list[Block] = field(default_factory=list)
    launches: list[Block] = field(default_factory=list)
    ops: list[Block] = field(default_factory=list)
    ranges: RangeColumns = field(default_factory=RangeColumns)
    details: list[Detail] = field(default_factory=list)
    modules: list[Detail] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    events: int = 0
    skipped: int = 0
    negative: int = 0  # of the skipped, for their duration


class Spool:
    """Rows in one temporary file that has no name any more."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0

    @classmethod
    def temporary(cls, stack: ExitStack) -> Spool:
        """A new empty file, gone when the stack is closed."""
        with without_room():
            file = tempfile.TemporaryFile(prefix="profharness-", buffering=0)  # noqa: SIM115
        return cls(cast(BinaryIO, stack.enter_context(file)))

    def write(self, columns: Iterable[Ints]) -> int:
        """Append columns of equal length; returns their offset. Raises ProfharnessError without
        room for them.
        """
        offset = self.size
        data = b"".join(column.tobytes() for column in columns)
        view = memoryview(data)
        with without_room():
            while view:
                view = view[os.pwrite(self.file.fileno(), view, self.size) :]
                self.size = offset + len(data) - len(view)
        return offset

    def read(self, block: Block) -> Ints:
        """The block as an array of shape (columns, rows)."""
        data = os.pread(self.file.fileno(), block.columns * block.rows * 8, block.offset)
        return np.frombuffer(data, np.int64).reshape(block.columns, block.rows)


def whole(value: object) -> int | None:
    """A number from a file where it is an integer from 0 to 2**62 - 1, else None."""
    is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
    return cast(int, value) if is_whole else None


class Collector:
    """Takes decoded events in, and writes them out as columns."""

    def __init__(self, events: Events, spool: Spool) -> None:
        self.events = events
        self.spool = spool
        self.tables = Tables()
        self._pending: dict[str, list[Any]] = {kind: [] for kind in events.classes}
        self._take: dict[type, Callable[[Any], object]] = {}
        self._sequence = 0
        self._detailed: list[bool] = []  # by id of a name
        self._arguments = Arguments()
        self.register()

    def register(self) -> None:
        """Learn the event classes, again after the union has grown."""
        for kind, classes in self.events.classes.items():
            self._take.update(dict.fromkeys(classes, self._pending[kind].append))
        drop = deque[Any](maxlen=0).append
        self._take.update(dict.fromkeys(self.events.ignored, drop))

    def add(self, events: Iterable[Any]) -> None:
        """Sort events by class into the pending lists."""
        take = self._take
        for event in events:
            take[type(event)](event)

    def add_module(self, data: bytes) -> None:
        """Take in an event that may be the call of an nn.Module."""
        with suppress(*UNDECODABLE):
            self._pending["module"].append(self.events.module.decode(data))

    def flush(self, part: int) -> None:
        """Write the pending events as blocks of a part of the file. Raises NeedExactTimes."""
        order = (part, self._sequence)
        self._sequence += 1
        pending = self._pending
        pending["launch"].extend(filter(None, map(self.events.launch_of, pending["loose"])))
        pending["loose"].clear()
        writers = {
            "gpu": self._write_gpu,
            "launch": self._write_launches,
            "op": self._write_ops,
            "range": self._write_ranges,
            "arrow": self._write_arrows,
            "module": self._write_modules,
        }
        for kind, write in writers.items():
            if pending[kind]:
                write(pending[kind], order)
                pending[kind].clear()

    def _write_gpu(self, events: list[Any], order: tuple[int, int]) -> None:
        start, duration, keep = self._times(events)
        kinds, kernels, configs = self.events.kinds, self.tables.kernels, self.tables.configs
        args = [event.args for event in events]
        rows = GpuRows(
            start=start,
            duration=duration,
            kernel=kernels.column([(kinds[type(e)], e.name) for e in events]),
            config=configs.column([(a.grid, a.block, a.registers, a.shared) for a in args]),
            device=_checked([a.device for a in args], keep),
            stream=_checked([a.stream for a in args], keep),
            correlation=_checked([a.correlation for a in args], keep),
            node=_checked([a.graph_node or -1 for a in args], keep),
            bytes=_checked([a.bytes for a in args], keep),
        )
        keys = list(configs)
        odd = [row for row in np.unique(rows.config).tolist() if not _fits(keys[row])]
        if odd:  # a launch configuration that does not fit into int64
            keep &= ~np.isin(rows.config, odd)
        self._write(self.tables.gpu, rows, keep, order, rows.correlation, rows.correlation)

    def _write_launches(self, events: list[Any], order: tuple[int, int]) -> None:
        keep = np.ones(len(events), np.bool_)
        rows = LaunchRows(
            correlation=_checked([e.args.correlation for e in events], keep),
            api=self.tables.apis.column([e.name for e in events]),
            thread=self._threads(events),
            start=self._nanoseconds([e.ts for e in events], keep),
        )
        self._write(self.tables.launches, rows, keep, order, rows.correlation, rows.correlation)

    def _write_ops(self, events: list[Any], order: tuple[int, int]) -> None:
        start, duration, keep = self._times(events)
        names = self.tables.names.column([e.name for e in events])
        rows = OpRows(start, start + duration, self._threads(events), names)
        known = len(self._detailed)
        self._detailed += map(is_detailed, islice(self.tables.names, known, None))
        for at in np.flatnonzero(np.array(self._detailed)[names] & keep).tolist():
            self._detail(events[at], int(start[at]), int(rows.end[at]), int(rows.thread[at]))
        self._write(self.tables.ops, rows, keep, order, start, rows.end)

    def _detail(self, event: Any, start: int, end: int, thread: int) -> None:
        arguments, sequence = NO_ARGUMENTS, -1
        if has_arguments(event.name):
            with suppress(msgspec.MsgspecError):
                arguments, sequence = self._arguments.read(bytes(event.args))
        self.tables.details.append(Detail(event.name, start, end, thread, *arguments, sequence))

    def _write_arrows(self, events: list[Any], _order: tuple[int, int]) -> None:
        keep = np.ones(len(events), np.bool_)
        times = self._nanoseconds([e.ts for e in events], keep).tolist()
        threads = self._threads(events).tolist()
        self.tables.arrows += [
            Arrow(event.id, event.ph == "s", thread, t)
            for event, thread, t, kept in zip(events, threads, times, keep.tolist(), strict=True)
            if kept and isinstance(event.id, int | str) and event.ph in ("s", "f")
        ]

    def _write_modules(self, events: list[Any], _order: tuple[int, int]) -> None:
        start, duration, keep = self._times(events)
        columns = (start, start + duration, self._threads(events))
        self.tables.modules += [
            Detail(event.name, *row)
            for event, kept, *row in zip(events, keep, *(c.tolist() for c in columns), strict=True)
            if kept
        ]

    def _write_ranges(self, events: list[Any], _order: tuple[int, int]) -> None:
        start, duration, keep = self._times(events)
        columns = (start, duration, self._threads(events))
        for event, kept, *row in zip(events, keep, *(c.tolist() for c in columns), strict=True):
            if kept:
                self.tables.ranges.add(event.name, *row)
                if is_detailed(event.name):
                    begin, lasted, own = row
                    self.tables.details.append(Detail(event.name, begin, begin + lasted, own))
            else:
                self.tables.skipped += 1

    def _times(self, events: list[Any]) -> tuple[Ints, Ints, Flags]:
        keep = np.ones(len(events), np.bool_)
        start = self._nanoseconds([e.ts for e in events], keep)
        micro = np.array([e.dur for e in events], np.float64)
        self.tables.negative += int(np.count_nonzero(micro < 0))
        keep &= (micro >= 0) & (micro < EXACT_LIMIT)
        return start, _to_ns(np.where(keep, micro, 0.0)), keep

    def _nanoseconds(self, values: list[Any], keep: Flags) -> Ints:
        if not self.events.exact:
            micro = np.array(values, np.float64)
            if (np.abs(micro) >= EXACT_LIMIT).any():
                raise NeedExactTimes
            return _to_ns(micro)
        result = []
        for position, value in enumerate(values):
            # Decimals are compared bare: arithmetic raises for those that are no numbers or too long
            known = value.is_finite() and -MAX_NS < value < MAX_NS
            exact = round(value * 1000) if known else MAX_NS
            keep[position] &= abs(exact) < MAX_NS
            result.append(exact if abs(exact) < MAX_NS else 0)
        return np.array(result, np.int64)

    def _threads(self, events: list[Any]) -> Ints:
        return self.tables.threads.column([(e.pid, e.tid) for e in events])

    def _write(
        self,
        blocks: list[Block],
        rows: Iterable[Ints],
        keep: Flags,
        order: tuple[int, int],
        low: Ints,
        high: Ints,
    ) -> None:
        columns = list(rows)
        if not keep.all():
            self.tables.skipped += int((~keep).sum())
            columns = [column[keep] for column in columns]
            low, high = low[keep], high[keep]
        if len(low):
            span = (int(low.min()), int(high.max()))
            offset = self.spool.write(columns)
            blocks.append(Block(order, offset, len(columns), len(low), *span))


def _to_ns(micro: NDArray[np.float64]) -> Ints:
    """Microseconds with three decimals to nanoseconds, exact below EXACT_LIMIT.

    Whole and fraction apart: near 2**42 a double is off by up to 0.49 ns, and the rounding of a
    plain product by 1000 would make a whole one of it.
    """
    whole = np.floor(micro)
    fraction = np.rint((micro - whole) * 1000)
    return whole.astype(np.int64) * 1000 + fraction.astype(np.int64)


def _checked(values: list[int], keep: Flags) -> Ints:
    """Values as int64; those that do not fit lose their row."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        fits = [-MAX_INT <= value <= MAX_INT for value in values]
        keep &= np.array(fits)
        return np.array([v if f else -1 for v, f in zip(values, fits, strict=True)], np.int64)


def _fits(config: tuple[Any, ...]) -> bool:
    """Whether a launch configuration holds only numbers from 0 to int64's largest."""
    grid, block, registers, shared = config
    values = (*(grid or ()), *(block or ()), registers or 0, shared or 0)
    return bool(max(values) <= MAX_INT and min(values) >= 0)


GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")
ARROWS = ("fwdbwd", "forward_backward")  # from a forward op to its backward op
MODULES = "python_function"  # skipped by the decoder, but for those that modules are
IGNORED = (
    "python_function", "ac2g", "async_cpu_to_gpu",
    "cpu_instant_event", "overhead", "Trace", "gpu_user_annotation", "cuda_sync", "cuda_event",
    "cuda_profiler_range", "collective_comm", "async_gpu", "async",
)  # fmt: skip
MAX_EXTRA = 256  # unknown categories that are looked at

_NOT_FINITE = re.compile(
    rb'"(?:[^"\\]|\\.)*+"|-?\b(?:NaN|nan|Infinity|infinity|inf)\b', re.DOTALL | re.ASCII
)
# a Decimal's exponent may be beyond decimal's own limits
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ArithmeticError)


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


class OpArgs(msgspec.Struct, gc=False):
    """`args` of an op that is kept on its own."""

    dims: Any = msgspec.field(default=None, name="Input Dims")
    strides: Any = msgspec.field(default=None, name="Input Strides")
    types: Any = msgspec.field(default=None, name="Input type")
    values: Any = msgspec.field(default=None, name="Concrete Inputs")
    sequence: Any = msgspec.field(default=None, name="Sequence number")


_OP_ARGS = msgspec.json.Decoder(OpArgs)
Four = tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]
NO_ARGUMENTS: Four = ((), (), (), ())


class Arguments:
    """Reads ops' `args`: dims, strides, types and values, decoded once where ops have the same text.

    Kineto writes these four next to each other, and numbers that differ in every op around them.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Four, Any]] = {}

    def read(self, data: bytes) -> tuple[Four, int]:
        """(dims, strides, types, values) and the sequence number, -1 for none. Raises MsgspecError."""
        begin, end = data.find(b'"Concrete Inputs"'), data.rfind(b', "Ev Idx"')
        rest = data[:begin] + data[end + 2 :] if 0 <= begin < end else b""
        if not rest or b'"Input ' in rest:
            arguments, number = _four(data)
        else:
            number = _OP_ARGS.decode(rest).sequence
            key = data[begin:end]
            if (known := self._known.get(key)) is None:
                if len(self._known) >= MAX_ARGUMENTS:
                    self._known.clear()
                known = self._known[key] = _four(b"{%b}" % key)
            arguments = known[0]
            number = known[1] if number is None else number
        sequence = whole(number)
        return arguments, -1 if sequence is None else sequence


def _four(data: bytes) -> tuple[Four, Any]:
    given = _OP_ARGS.decode(data)
    lists = (given.dims, given.strides, given.types, given.values)
    dims, strides, types, values = (item if isinstance(item, list) else () for item in lists)
    return (dims, strides, types, values), given.sequence


class LaunchArgs(msgspec.Struct, gc=False):
    """`args` of a runtime or driver call."""

    correlation: int = -1


class Events:
    """The union's classes and decoders for one file; `exact` reads ts as Decimal."""

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact
        self.extra: list[str] = []
        self.kinds: dict[type, str] = {}  # also of classes from before the union grew
        self._build()

    def _build(self) -> None:
        time = Decimal if self.exact else float
        timed: list[Any] = [("name", str), ("ts", time), ("dur", float)]
        thread: list[Any] = [(name, int | str | float | None, None) for name in ("pid", "tid")]
        launch = [("name", str), ("ts", time), ("args", LaunchArgs), *thread]
        arrow = [("ph", str, ""), ("id", Any, None), ("ts", time, 0), *thread]
        loose = [("name", str, ""), ("ts", Any, None), ("args", Any, None), *thread]
        self.classes = {
            "gpu": [_struct(category, [*timed, ("args", GpuArgs)]) for category in GPU],
            "launch": [_struct(category, launch) for category in LAUNCH],
            "loose": [_struct(category, loose) for category in self.extra],
            "op": [_struct("cpu_op", [*timed, *thread, ("args", msgspec.Raw, msgspec.Raw())])],
            "arrow": [_struct(category, arrow) for category in ARROWS],
            "module": [_struct(MODULES, [*timed, *thread])],
            "range": [_struct("user_annotation", [*timed, *thread])],
        }
        self.ignored = [_struct(category, []) for category in IGNORED]
        kinds = (category.removeprefix("gpu_") for category in GPU)
        self.kinds.update(zip(self.classes["gpu"], kinds, strict=True))
        decoded = (classes for kind, classes in self.classes.items() if kind != "module")
        union: Any = Union[(*chain.from_iterable(decoded), *self.ignored)]
        self.many: Any = msgspec.json.Decoder(types.GenericAlias(list, (union,)))
        self.one: Any = msgspec.json.Decoder(union)
        self.module: Any = msgspec.json.Decoder(*self.classes["module"])
        self.known = {*GPU, *LAUNCH, *ARROWS, "cpu_op", "user_annotation", *IGNORED, *self.extra}

    def launch_of(self, event: Any) -> Any | None:
        """An event of an unknown category as a launch, if it looks like one."""
        args = event.args if isinstance(event.args, dict) else {}
        correlation = args.get("correlation")
        if not isinstance(correlation, int) or "stream" in args:
            return None
        if not isinstance(event.ts, int | float):
            return None
        time = Decimal(event.ts) if self.exact else _double(event.ts)
        launch = self.classes["launch"][0]
        return launch(event.name, time, LaunchArgs(correlation), event.pid, event.tid)

    def decode_one(self, data: bytes) -> tuple[Any, bool]:
        """(event or None, whether it was bad) of a segment that did not decode as a whole.

        Events without a category or a duration are not bad. Numbers that are not finite become
        null: Kineto writes `inf` for the bandwidth of a copy that took no time.
        """
        try:
            return self.one.decode(data), False
        except UNDECODABLE:
            pass
        data = _NOT_FINITE.sub(_null, data)
        try:
            head = _HEAD.decode(data)
        except UNDECODABLE:
            return None, True
        if not isinstance(head.cat, str) or head.ph not in (None, "X"):
            return None, False
        if head.cat not in self.known:
            if len(self.extra) >= MAX_EXTRA:
                return None, False
            self.extra.append(head.cat)
            self._build()
        try:
            return self.one.decode(data), False
        except UNDECODABLE:
            return None, True


class _Head(msgspec.Struct):
    cat: Any = None
    ph: Any = None


_HEAD = msgspec.json.Decoder(_Head)


def _struct(category: str, fields: list[Any]) -> Any:
    name = "Event_" + re.sub(r"\W", "_", category)
    return msgspec.defstruct(name, fields, tag_field="cat", tag=category, gc=False)


def _double(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _null(match: re.Match[bytes]) -> bytes:
    return match.group() if match.group().startswith(b'"') else b"null"
