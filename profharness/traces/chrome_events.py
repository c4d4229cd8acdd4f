"""Decode Kineto's events to int64 columns. The structs below list which fields are read."""

from __future__ import annotations

import math
import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import chain, islice
from typing import Any, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from profharness.files import has_too_many_values
from profharness.traces.chrome_read import whole_characters
from profharness.traces.columns import (
    MAX_INT,
    MAX_NS,
    Block,
    Flags,
    GpuRows,
    Ints,
    LaunchRows,
    OpRows,
    Spool,
    Tables,
    distinct,
    whole,
)
from profharness.traces.devices import REPLACED
from profharness.traces.intervals import nothing
from profharness.traces.ops import (
    EVALUATION,
    MODULE,
    NO_ARGUMENTS,
    HostSpan,
    OpArguments,
    has_arguments,
    is_detailed,
)

Triple = tuple[int, int, int]

EXACT_LIMIT = float(1 << 43)  # µs; below this a double rounds to the right nanosecond
MAX_ARGUMENTS = 4096  # distinct op arguments to cache


MODULE_MARK = f'"{MODULE}'.encode()


# How the ops of a name are kept as objects, besides their rows in the columns.
AS_EVALUATION, AS_DETAIL, WITH_ARGUMENTS = 1, 2, 3


class NeedExactTimes(Exception):
    """A double cannot hold a timestamp to the nanosecond, so the file needs decimals."""


class Collector:
    """Collects decoded events and writes them as columns."""

    def __init__(self, events: Events, spool: Spool) -> None:
        self.events = events
        self.spool = spool
        self.tables = Tables()
        self._pending: dict[str, list[Any]] = {kind: [] for kind in events.classes}
        self._take: dict[type, Callable[[Any], object]] = {}
        self._sequence = 0
        self._texts: list[str] = []  # names of ops, by id
        self._kept: list[int] = []  # how the ops of a name are kept, by the name's id
        self._arguments = ArgumentsDecoder()
        self.register()

    def register(self) -> None:
        """Register the event classes, again after the union has grown."""
        for kind, classes in self.events.classes.items():
            self._take.update(dict.fromkeys(classes, self._pending[kind].append))
        drop = deque[Any](maxlen=0).append
        self._take.update(dict.fromkeys(self.events.ignored, drop))

    def add(self, events: Iterable[Any]) -> None:
        """Sort events by class into the pending lists."""
        take = self._take
        for event in events:
            take[type(event)](event)

    def add_texts(self, texts: list[bytes]) -> None:
        """Decode and collect events. Broken ones are skipped and counted."""
        try:
            events = self.events.many.decode(b"[%b]" % b",".join(texts))
        except UNDECODABLE:
            for text in texts:
                self.add_text(text)
        else:
            self.tables.events += len(events)
            self.add(events)
        for text in texts:  # the decoder skips Python frames
            if MODULE_MARK in text:
                self.add_module(text)

    def add_text(self, data: bytes) -> None:
        """Decode and collect an event, or skip and count it."""
        categories = len(self.events.extra)
        event, bad = self.events.decode_one(data)
        if len(self.events.extra) != categories:
            self.register()
        if bad:
            self.tables.skipped += 1
            return
        self.tables.events += 1
        if event is not None:
            self.add((event,))

    def add_module(self, data: bytes) -> None:
        """Collect an event if it is the call of an nn.Module."""
        with suppress(*UNDECODABLE):
            event = decoded(self.events.module, data)
            if event.name.startswith(MODULE):  # the text may also occur in another field
                self._pending["module"].append(event)

    def settle(self, part: int) -> None:
        """Write the pending events that have to precede rows given as columns."""
        if any(self._pending[kind] for kind in ("op", "launch", "loose", "gpu")):
            self.flush(part)

    def add_ops(self, part: int, rows: OpRows, args: Callable[[int], bytes]) -> None:
        """Write ops. `args` returns the arguments of a row as text."""
        keep = np.ones(len(rows.start), np.bool_)
        self._detail(rows, keep, args)
        self._write(self.tables.ops, rows, keep, self._order(part), rows.start, rows.end)

    def add_launches(self, part: int, rows: LaunchRows) -> None:
        """Write launch calls."""
        key, keep = rows.correlation, np.ones(len(rows.start), np.bool_)
        self._write(self.tables.launches, rows, keep, self._order(part), key, key)

    def add_device(self, part: int, rows: GpuRows) -> None:
        """Write kernels, memcpys and memsets."""
        key, keep = rows.correlation, np.ones(len(rows.start), np.bool_)
        self._write(self.tables.gpu, rows, keep, self._order(part), key, key)

    def add_modules(self, names: list[str], columns: tuple[Ints, ...]) -> None:
        """Collect calls of modules from their names and columns of start, end and thread."""
        rows = zip(names, *(column.tolist() for column in columns), strict=True)
        self.tables.modules += [HostSpan(*row) for row in rows]

    def _order(self, part: int) -> tuple[int, int]:
        self._sequence += 1
        return part, self._sequence

    def flush(self, part: int) -> None:
        """Write the pending events as blocks of a part of the file. Raise NeedExactTimes."""
        order = self._order(part)
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
        odd = [row for row in distinct(rows.config) if not fits(keys[row])]
        if odd:  # a launch configuration exceeds int64
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
        self._detail(rows, keep, lambda row: bytes(events[row].args))
        self._write(self.tables.ops, rows, keep, order, start, rows.end)

    def _detail(self, rows: OpRows, keep: Flags, args: Callable[[int], bytes]) -> None:
        """Keep as objects the ops whose name requires it. `args` returns the arguments of a row."""
        names = self.tables.names
        new = list(islice(names, len(self._kept), None))
        self._kept += map(_kept, new)
        self._texts += new
        kept = np.array(self._kept, np.int64)[rows.name]
        evaluated = np.flatnonzero((kept == AS_EVALUATION) & keep)
        columns = (rows.start, rows.end, rows.thread)
        self._add_evaluations(*(column[evaluated] for column in columns))
        places = np.flatnonzero((kept >= AS_DETAIL) & keep)
        lists = (column[places].tolist() for column in (kept, *rows))
        for row, how, start, end, thread, name in zip(places.tolist(), *lists, strict=True):
            arguments, sequence = NO_ARGUMENTS, -1
            if how == WITH_ARGUMENTS and (text := args(row)):
                try:
                    arguments, sequence = self._arguments.decode(text)
                except UNDECODABLE:  # the decoder would have refused the event too
                    keep[row] = False
                    continue
            detail = HostSpan(self._texts[name], start, end, thread, arguments, sequence)
            self.tables.details.append(detail)

    def _add_evaluations(self, start: Ints, end: Ints, thread: Ints) -> None:
        if len(start):
            self.tables.evaluations.append(np.stack([start, end, thread, nothing(len(start))]))

    def _write_arrows(self, events: list[Any], _order: tuple[int, int]) -> None:
        events = [e for e in events if isinstance(e.id, int | str) and e.ph in ("s", "f")]
        keep = np.ones(len(events), np.bool_)
        times = self._nanoseconds([e.ts for e in events], keep)
        begins = np.array([e.ph == "s" for e in events], np.int64)
        keys = self.tables.arrows.keys([e.id for e in events])
        self.add_arrows(np.stack([keys, begins, self._threads(events), times])[:, keep])

    def add_arrows(self, columns: Ints) -> None:
        """Collect ends of arrows, given as the columns of Arrows."""
        self.tables.arrows.blocks.append(columns)

    def _write_modules(self, events: list[Any], _order: tuple[int, int]) -> None:
        start, duration, keep = self._times(events)
        columns = (start, start + duration, self._threads(events))
        self.tables.modules += [
            HostSpan(event.name, *row)
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
                    self.tables.details.append(HostSpan(event.name, begin, begin + lasted, own))
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
            # Decimals are only compared: arithmetic raises for NaN and for too many digits
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


def _kept(name: str) -> int:
    if name.startswith(EVALUATION):
        return AS_EVALUATION
    return (WITH_ARGUMENTS if has_arguments(name) else AS_DETAIL) if is_detailed(name) else 0


def _to_ns(micro: NDArray[np.float64]) -> Ints:
    """Convert microseconds with three decimals to nanoseconds, exactly below EXACT_LIMIT.

    The fraction is converted on its own: near 2**42 a double is off by up to 0.49 ns, and a plain
    product by 1000 would round that up to 1 ns.
    """
    whole = np.floor(micro)
    fraction = np.rint((micro - whole) * 1000)
    return whole.astype(np.int64) * 1000 + fraction.astype(np.int64)


def _checked(values: list[int], keep: Flags) -> Ints:
    """Return values as int64, and clear `keep` for those that do not fit."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        fits = [-MAX_INT <= value <= MAX_INT for value in values]
        keep &= np.array(fits)
        return np.array([v if f else -1 for v, f in zip(values, fits, strict=True)], np.int64)


def fits(config: tuple[Any, ...]) -> bool:
    """Return whether a launch configuration contains only numbers from 0 to 2**63 - 1."""
    grid, block, registers, shared = config
    values = (*(grid or ()), *(block or ()), registers or 0, shared or 0)
    return bool(max(values) <= MAX_INT and min(values) >= 0)


GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")
ARROWS = ("fwdbwd", "forward_backward")  # from a forward op to its backward op
MODULES = "python_function"  # skipped by the decoder, except for calls of modules
IGNORED = (
    "python_function", "ac2g", "async_cpu_to_gpu",
    "cpu_instant_event", "overhead", "Trace", "gpu_user_annotation", "cuda_sync", "cuda_event",
    "cuda_profiler_range", "collective_comm", "async_gpu", "async",
)  # fmt: skip
MAX_EXTRA = 256  # unknown categories to decode

_NOT_FINITE = re.compile(
    rb'"(?:[^"\\]|\\.)*+"|-?\b(?:NaN|nan|Infinity|infinity|inf)\b', re.DOTALL | re.ASCII
)
# ArithmeticError: a Decimal's exponent may exceed decimal's own limits
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ArithmeticError)


class GpuArgs(msgspec.Struct, gc=False):
    """The `args` of a kernel, memcpy or memset."""

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
    """The `args` of an op whose arguments are kept. Only the sequence number is decoded here."""

    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    strides: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Strides")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    values: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Concrete Inputs")
    sequence: Any = msgspec.field(default=None, name="Sequence number")


_OP_ARGS = msgspec.json.Decoder(OpArgs)


class ArgumentsDecoder:
    """Decodes the `args` of ops. Ops whose arguments have the same text share one object."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, ...], OpArguments] = {}

    def decode(self, data: bytes) -> tuple[OpArguments, int]:
        """Return the arguments, and the sequence number or -1.

        Raise one of UNDECODABLE if `data` is not an object.
        """
        try:
            return self._decode(data)
        except UNDECODABLE:
            return self._decode(whole_characters(_NOT_FINITE.sub(_null, data)))

    def _decode(self, data: bytes) -> tuple[OpArguments, int]:
        op = _OP_ARGS.decode(data)
        key = (bytes(op.dims), bytes(op.strides), bytes(op.types), bytes(op.values))
        if (arguments := self._known.get(key)) is None:
            arguments = OpArguments(*map(_decoded_list, key))
            if len(self._known) >= MAX_ARGUMENTS:
                self._known.clear()
            self._known[key] = arguments
        if op.sequence is None:
            return arguments, -1
        sequence = whole(op.sequence)
        return arguments, -1 if sequence is None else sequence


def _decoded_list(text: bytes) -> Sequence[Any]:
    value = msgspec.json.decode(text) if text else None
    return value if isinstance(value, list) else ()


class LaunchArgs(msgspec.Struct, gc=False):
    """The `args` of a runtime or driver call."""

    correlation: int = -1


class Events:
    """The event classes and decoders for one file. `exact` reads ts as Decimal."""

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact
        self.extra: list[str] = []
        self.kinds: dict[type, str] = {}  # includes classes from before the union grew
        self._build()

    def _build(self) -> None:
        time = Decimal if self.exact else float
        timed: list[Any] = [("name", str), ("ts", time), ("dur", float)]
        thread: list[Any] = [(name, int | str | float | None, None) for name in ("pid", "tid")]
        launch = [("name", str), ("ts", time), ("args", LaunchArgs), *thread]
        arrow = [("ph", str, ""), ("id", Any, None), ("ts", time, time(0)), *thread]
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
        """Return an event of an unknown category as a launch call, or None if it is not one."""
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
        """Decode an event from a segment that could not be decoded as a whole. Return the event or
        None, and whether it was damaged.

        Events without a category or a duration are not damaged. Numbers that are not finite become
        null: Kineto writes `inf` for the bandwidth of a copy that took no time.
        """
        if has_too_many_values(data):
            return None, True
        try:
            return decoded(self.one, data), False
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
            return decoded(self.one, data), False
        except UNDECODABLE:
            return None, True


def decoded(decoder: Any, data: bytes) -> Any:
    """Decode an event. Half of a surrogate pair is accepted in fields that are not read.

    Raise one of UNDECODABLE.
    """
    try:
        return decoder.decode(data)
    except UNDECODABLE:
        if (whole_data := whole_characters(data)) == data:
            raise
        event = decoder.decode(whole_data)
        fields = (getattr(event, name) for name in event.__struct_fields__)
        if any(isinstance(value, str) and REPLACED in value for value in fields):
            raise
        return event


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
