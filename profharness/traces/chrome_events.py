"""Decode Kineto's events to int64 columns.

The compiled scanner writes most events directly to columns, without creating an object for each
event. If the scanner cannot be certain that it reads an event correctly, the decoder reads the
event instead. The structs below define which fields the decoder reads.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from decimal import Decimal
from enum import IntEnum
from itertools import chain, islice
from typing import Any, Union

import msgspec
import numpy as np

from profharness.files import has_too_many_values
from profharness.traces import Scanner
from profharness.traces.columns import (
    MAX_INT,
    MAX_NS,
    REPLACED,
    Flags,
    GpuRows,
    Ids,
    Ints,
    LaunchRows,
    OpRows,
    Spool,
    Tables,
    distinct,
    nothing,
    whole,
)
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
Thread = int | str | float | None
ReadArguments = Callable[[list[int]], "list[tuple[OpArguments, int] | None]"]
"""A function that returns the arguments and the sequence number of each op in the given rows.

The result contains None for a broken op.
"""

# A double below this limit is precise enough to be converted to the right nanosecond.
MAX_DURATION_US = float(1 << 43)
MAX_ARGUMENTS = 4096  # maximum number of distinct op arguments in the cache
MODULE_MARK = f'"{MODULE}'.encode()
# The capitalized categories are those of PyTorch 1.8 and 1.9.
OPS = ("cpu_op", "Operator")
RANGE = "user_annotation"
GPU = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")
LAUNCH = ("cuda_runtime", "cuda_driver", "Runtime")
ARROWS = ("fwdbwd", "forward_backward")  # arrows from a forward op to its backward op
MODULES = "python_function"  # Python frames; the decoder reads only those that are calls of modules
IGNORED = (
    "python_function", "ac2g", "async_cpu_to_gpu",
    "cpu_instant_event", "overhead", "Trace", "gpu_user_annotation", "cuda_sync", "cuda_event",
    "cuda_profiler_range", "collective_comm", "async_gpu", "async",
)  # fmt: skip
# How to store the ops that have a certain name, in addition to their rows in the columns. 0 means
# that only the rows are stored.
AS_EVALUATION, AS_DETAIL, WITH_ARGUMENTS = 1, 2, 3

_NOT_FINITE = re.compile(
    rb'"(?:[^"\\]|\\.)*+"|-?\b(?:NaN|nan|Infinity|infinity|inf)\b', re.DOTALL | re.ASCII
)
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
# Matches text of any length without lone surrogates.
_PLAIN = rb"(?:[^\\]++|\\(?!u[dD][89a-fA-F]).|%s%s)++" % (_HIGH, _LOW)
_ESCAPE = re.compile(rb"%s|(%s|%s)" % (_PLAIN, _HIGH, _LOW), re.DOTALL)
# Exceptions that the decoder raises for a broken event. ArithmeticError is raised if the exponent
# of a number exceeds the limits of the decimal module.
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


class LaunchArgs(msgspec.Struct, gc=False):
    """The `args` of a call of the CUDA runtime or driver API."""

    correlation: int = -1
    kernel: Any = None  # name of the kernel, which ROCm records


class OpArgs(msgspec.Struct, gc=False):
    """The `args` of an op whose arguments are stored. The Raw fields are decoded later."""

    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    strides: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Strides")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    values: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Concrete Inputs")
    sequence: Any = msgspec.field(default=None, name="Sequence number")


class _Head(msgspec.Struct):
    cat: Any = None
    ph: Any = None


class _Other(msgspec.Struct):
    """An event of an unknown category."""

    name: str = ""
    ts: Any = None
    args: Any = None
    pid: Thread = None
    tid: Thread = None


def _structs(categories: Iterable[str], fields: Sequence[Any]) -> list[Any]:
    """Return a class of events for each category."""
    return [
        msgspec.defstruct(
            "Event_" + re.sub(r"\W", "_", category), fields, tag_field="cat", tag=category, gc=False
        )
        for category in categories
    ]


def kind_of(category: str) -> str:
    """Return the kind of activity in a category of events: `kernel`, `memcpy` or `memset`."""
    return category.lower().removeprefix("gpu_")


_TIMED: list[Any] = [("name", str), ("ts", Decimal), ("dur", float)]
_THREADED: list[Any] = [("pid", Thread, None), ("tid", Thread, None)]
CLASSES = {
    "gpu": _structs(GPU, [*_TIMED, ("args", GpuArgs)]),
    "launch": _structs(LAUNCH, [*_TIMED[:2], ("args", LaunchArgs), *_THREADED]),
    "op": _structs(OPS, [*_TIMED, *_THREADED, ("args", msgspec.Raw, msgspec.Raw())]),
    "arrow": _structs(
        ARROWS, [("ph", str, ""), ("id", Any, None), ("ts", Decimal, Decimal(0)), *_THREADED]
    ),
    "range": _structs([RANGE], [*_TIMED, *_THREADED]),
    "ignored": _structs(IGNORED, []),
}
KINDS = dict(zip(CLASSES["gpu"], map(kind_of, GPU), strict=True))
KNOWN = {*GPU, *LAUNCH, *ARROWS, *OPS, RANGE, *IGNORED}

_Event: Any = Union[(*chain.from_iterable(CLASSES.values()),)]
_EVENT: Any = msgspec.json.Decoder(_Event)
_EVENTS: Any = msgspec.json.Decoder(types.GenericAlias(list, (_Event,)))
_MODULE: Any = msgspec.json.Decoder(*_structs([MODULES], [*_TIMED, *_THREADED]))
_HEAD, _OTHER = msgspec.json.Decoder(_Head), msgspec.json.Decoder(_Other)
_OP_ARGS, _GPU_ARGS = msgspec.json.Decoder(OpArgs), msgspec.json.Decoder(GpuArgs)
_NAME, _THREAD = msgspec.json.Decoder(str), msgspec.json.Decoder(tuple[Thread, Thread])


def _decode_one(data: bytes) -> tuple[Any, bool]:
    """Decode a single event. Return the event or None, and whether the event is damaged.

    Events without a category or without a duration are ignored: the result is None, but the event
    is not damaged. An event of an unknown category is treated as an API call if it has a
    correlation ID but no stream. Numbers that are not finite are read as null, because Kineto
    writes `inf` for the bandwidth of a copy that took no time.
    """
    if has_too_many_values(data):
        return None, True
    with suppress(*UNDECODABLE):
        return _decoded(_EVENT, data), False
    try:
        data = _NOT_FINITE.sub(_null, data)
        head = _HEAD.decode(data)
        if not isinstance(head.cat, str) or head.ph not in (None, "X"):
            return None, False
        if head.cat in KNOWN:
            return _decoded(_EVENT, data), False
        event = _decoded(_OTHER, data)
    except UNDECODABLE:
        return None, True
    args = event.args if isinstance(event.args, dict) else {}
    number = args.get("correlation")
    if not isinstance(number, int) or "stream" in args or not isinstance(event.ts, int | float):
        return None, False
    launch = CLASSES["launch"][0]
    return launch(event.name, Decimal(event.ts), LaunchArgs(number), event.pid, event.tid), False


def _null(match: re.Match[bytes]) -> bytes:
    return match.group() if match.group().startswith(b'"') else b"null"


def _decoded(decoder: Any, data: bytes) -> Any:
    """Decode an event. Lone surrogates are accepted in fields that the decoder does not read."""
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


def whole_characters(data: bytes) -> bytes:
    r"""Replace escape sequences of lone surrogates, such as `\ud800`, with U+FFFD."""
    if not _HALF.search(data):
        return data
    return _ESCAPE.sub(lambda match: b"\\ufffd" if match[1] else match[0], data)


class Collector:
    """Collects decoded events and writes them to the tables as columns."""

    def __init__(self, spool: Spool) -> None:
        self.tables = Tables(spool)
        self._pending: dict[str, list[Any]] = {kind: [] for kind in (*CLASSES, "module")}
        self._take = {
            one: self._pending[kind].append for kind, classes in CLASSES.items() for one in classes
        }
        self._texts: list[str] = []  # the names of ops, by id
        self._kept: list[int] = []  # how to store the ops of each name, by the id of the name
        self._arguments: dict[tuple[bytes, ...], OpArguments] = {}
        self._arrow_ids = Ids()

    def add(self, events: Iterable[Any]) -> None:
        take = self._take
        for event in events:
            take[type(event)](event)

    def decode(self, texts: bytes) -> None:
        """Decode and collect events that are separated by commas.

        Raise one of the exceptions in UNDECODABLE if an event is broken.
        """
        events = _EVENTS.decode(b"[%b]" % texts)
        self.tables.events += len(events)
        self.add(events)

    def add_texts(self, texts: list[bytes]) -> None:
        """Decode and collect events. Broken events are skipped and counted."""
        try:
            self.decode(b",".join(texts))
        except UNDECODABLE:
            for text in texts:
                self.add_text(text)
        for text in texts:  # the decoder skips Python frames
            if MODULE_MARK in text:
                self.add_module(text)

    def add_text(self, data: bytes) -> None:
        event, bad = _decode_one(data)
        if bad:
            self.tables.skipped += 1
            return
        self.tables.events += 1
        if event is not None:
            self.add((event,))

    def add_module(self, data: bytes) -> None:
        """Collect an event if it is the call of an nn.Module."""
        with suppress(*UNDECODABLE):
            event = _decoded(_MODULE, data)
            if event.name.startswith(MODULE):  # MODULE may also occur in another field
                self._pending["module"].append(event)

    def flush(self) -> None:
        """Write the pending events to the tables.

        To keep the order of the file, call this before you add rows of later events.
        """
        writers = {
            "gpu": self._write_gpu,
            "launch": self._write_launches,
            "op": self._write_ops,
            "range": self._write_ranges,
            "arrow": self._write_arrows,
            "module": self._write_modules,
        }
        for kind, write in writers.items():
            if self._pending[kind]:
                write(self._pending[kind])
        for pending in self._pending.values():
            pending.clear()

    def _write_gpu(self, events: list[Any]) -> None:
        start, duration, keep = self._times(events)
        kernels, configs = self.tables.kernels, self.tables.configs
        args = [event.args for event in events]
        rows = GpuRows(
            start=start,
            duration=duration,
            kernel=kernels.column([(KINDS[type(e)], e.name) for e in events]),
            config=configs.column([(a.grid, a.block, a.registers, a.shared) for a in args]),
            device=_checked([a.device for a in args], keep),
            stream=_checked([a.stream for a in args], keep),
            correlation=_checked([a.correlation for a in args], keep),
            node=_checked([a.graph_node or -1 for a in args], keep),
            bytes=_checked([a.bytes for a in args], keep),
        )
        keys = list(configs)
        odd = [row for row in distinct(rows.config) if not _fits(keys[row])]
        if odd:  # a launch configuration exceeds int64
            keep &= ~np.isin(rows.config, odd)
        self._write(rows, keep)

    def _write_launches(self, events: list[Any]) -> None:
        keep = np.ones(len(events), np.bool_)
        rows = LaunchRows(
            correlation=_checked([e.args.correlation for e in events], keep),
            api=self.tables.apis.column([e.name for e in events]),
            thread=self._threads(events),
            start=_nanoseconds([e.ts for e in events], keep),
        )
        self._write(rows, keep)
        self.tables.launched |= {
            e.args.correlation: e.args.kernel for e in events if isinstance(e.args.kernel, str)
        }

    def _write_ops(self, events: list[Any]) -> None:
        start, duration, keep = self._times(events)
        names = self.tables.names.column([e.name for e in events])
        rows = OpRows(start, start + duration, self._threads(events), names)
        self.add_ops(rows, lambda rows: [self.decode_arguments(events[r].args) for r in rows], keep)

    def add_ops(self, rows: OpRows, read: ReadArguments, keep: Flags | None = None) -> None:
        """Write the ops that are marked in `keep`. Broken ops are skipped and counted.

        Ops with certain names are also stored in `evaluations` or `details` of the tables.
        """
        keep = np.ones(len(rows.start), np.bool_) if keep is None else keep
        new = list(islice(self.tables.names, len(self._kept), None))
        self._kept += map(_how_to_store, new)
        self._texts += new
        kept = np.array(self._kept, np.int64)[rows.name]
        evaluated = np.flatnonzero((kept == AS_EVALUATION) & keep)
        if len(evaluated):
            columns = (rows.start, rows.end, rows.thread)
            blocks = [*(column[evaluated] for column in columns), nothing(len(evaluated))]
            self.tables.evaluations.append(np.stack(blocks))
        places = np.flatnonzero((kept >= AS_DETAIL) & keep)
        wanted = places[kept[places] == WITH_ARGUMENTS].tolist()
        read_arguments = dict(zip(wanted, read(wanted), strict=True))
        lists = (column[places].tolist() for column in rows)
        for row, start, end, thread, name in zip(places.tolist(), *lists, strict=True):
            arguments = read_arguments.get(row, (NO_ARGUMENTS, -1))
            if arguments is None:
                keep[row] = False
                continue
            self.tables.details.append(HostSpan(self._texts[name], start, end, thread, *arguments))
        self._write(rows, keep)

    def decode_arguments(self, data: bytes | msgspec.Raw) -> tuple[OpArguments, int] | None:
        """Return the arguments of an op, and the sequence number or -1 if it is unknown.

        Ops whose arguments have the same text share one object. Return None for a broken op, whose
        `data` is not a JSON object.
        """
        text = bytes(data)
        if not text:
            return NO_ARGUMENTS, -1
        with suppress(*UNDECODABLE):
            return self._decode_arguments(text)
        with suppress(*UNDECODABLE):
            return self._decode_arguments(whole_characters(_NOT_FINITE.sub(_null, text)))
        return None

    def _decode_arguments(self, text: bytes) -> tuple[OpArguments, int]:
        op = _OP_ARGS.decode(text)
        key = (bytes(op.dims), bytes(op.strides), bytes(op.types), bytes(op.values))
        if (arguments := self._arguments.get(key)) is None:
            arguments = OpArguments(*map(_decoded_list, key))
            if len(self._arguments) >= MAX_ARGUMENTS:
                self._arguments.clear()
            self._arguments[key] = arguments
        sequence = whole(op.sequence)
        return arguments, -1 if sequence is None else sequence

    def _write_arrows(self, events: list[Any]) -> None:
        events = [e for e in events if isinstance(e.id, int | str) and e.ph in ("s", "f")]
        keep = np.ones(len(events), np.bool_)
        times = _nanoseconds([e.ts for e in events], keep)
        begins = np.array([e.ph == "s" for e in events], np.int64)
        # IDs that are not whole numbers are replaced by negative numbers
        keys = (e.id if whole(e.id) is not None else -1 - self._arrow_ids[e.id] for e in events)
        numbers = np.fromiter(keys, np.int64, len(events))
        columns = np.stack([numbers, begins, self._threads(events), times])
        self.tables.arrows.append(columns[:, keep])

    def _write_modules(self, events: list[Any]) -> None:
        self.tables.modules += [
            HostSpan(event.name, start, start + duration, thread)
            for event, kept, start, duration, thread in self._spans(events)
            if kept
        ]

    def _write_ranges(self, events: list[Any]) -> None:
        for event, kept, start, duration, thread in self._spans(events):
            if not kept:
                self.tables.skipped += 1
                continue
            self.tables.range_names.append(event.name)
            self.tables.ranges.extend((start, duration, thread, False))
            if is_detailed(event.name):
                detail = HostSpan(event.name, start, start + duration, thread)
                self.tables.details.append(detail)

    def _spans(self, events: list[Any]) -> Iterable[tuple[Any, bool, int, int, int]]:
        """Return a tuple for each event: the event, whether it is valid, start, duration and
        thread.
        """
        start, duration, keep = self._times(events)
        columns = (column.tolist() for column in (keep, start, duration, self._threads(events)))
        return zip(events, *columns, strict=True)

    def _times(self, events: list[Any]) -> tuple[Ints, Ints, Flags]:
        keep = np.ones(len(events), np.bool_)
        start = _nanoseconds([e.ts for e in events], keep)
        micro = np.array([e.dur for e in events], np.float64)
        self.tables.negative += int(np.count_nonzero(micro < 0))
        keep &= (micro >= 0) & (micro < MAX_DURATION_US)
        micro = np.where(keep, micro, 0.0)
        # Durations have three decimals. The fraction is converted separately, because the product
        # of a large double and 1000 may be wrong by 1 ns.
        units = np.floor(micro)
        fraction = np.rint((micro - units) * 1000)
        return start, units.astype(np.int64) * 1000 + fraction.astype(np.int64), keep

    def _threads(self, events: list[Any]) -> Ints:
        return self.tables.threads.column([(e.pid, e.tid) for e in events])

    def _write(self, rows: GpuRows | LaunchRows | OpRows, keep: Flags) -> None:
        if not keep.all():
            self.tables.skipped += int((~keep).sum())
            rows = type(rows)(*(column[keep] for column in rows))
        self.tables.write(rows)


def _how_to_store(name: str) -> int:
    if name.startswith(EVALUATION):
        return AS_EVALUATION
    return (WITH_ARGUMENTS if has_arguments(name) else AS_DETAIL) if is_detailed(name) else 0


def _decoded_list(text: bytes) -> Sequence[Any]:
    value = msgspec.json.decode(text) if text else None
    return value if isinstance(value, list) else ()


def _nanoseconds(values: list[Decimal], keep: Flags) -> Ints:
    """Convert microseconds to nanoseconds. Set `keep` to False for impossible values."""
    result = []
    for position, value in enumerate(values):
        # Check the value first, because arithmetic fails for NaN and for too many digits
        known = value.is_finite() and -MAX_NS < value < MAX_NS
        exact = round(value * 1000) if known else MAX_NS
        keep[position] &= abs(exact) < MAX_NS
        result.append(exact if abs(exact) < MAX_NS else 0)
    return np.array(result, np.int64)


def _checked(values: list[int], keep: Flags) -> Ints:
    """Convert values to int64. Set `keep` to False for values that do not fit into int64."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        fits = [-MAX_INT <= value <= MAX_INT for value in values]
        keep &= np.array(fits)
        return np.array([v if f else -1 for v, f in zip(values, fits, strict=True)], np.int64)


def _fits(config: tuple[Any, ...]) -> bool:
    """Return whether a launch configuration contains only numbers from 0 to 2**63 - 1."""
    grid, block, registers, shared = config
    values = (*(grid or ()), *(block or ()), registers or 0, shared or 0)
    return bool(max(values) <= MAX_INT and min(values) >= 0)


# Number of rows that are scanned at once. The rows fit into the CPU's cache. If the number were a
# power of two, all columns would be mapped to the same set of the cache.
CAPACITY = (1 << 13) + (1 << 6)


class Role(IntEnum):
    """The roles of event categories. They must match those in scanner.c.

    Events with the role DROP are ignored. CALL is an API call, DEVICE is a kernel, memcpy or
    memset, FRAME is a Python frame, and OTHER is an event of an unknown category. UNSURE means that
    a key of the event is repeated or contains an escape sequence.
    """

    DROP, OP, CALL, DEVICE, FRAME, ARROW, OTHER, UNSURE = range(8)


class Column(IntEnum):
    """The columns of a row. They must match those in scanner.c.

    BEGIN and END are the offsets of the event in the text. NAMED is the id of the name. For an
    arrow, NAMED is 1 if the event is the start of the arrow, and 0 if it is the end. KEY is the
    correlation ID, or the ID of an arrow. Times are in ns. The columns after KEY exist only in rows
    of kernels, memcpys and memsets.
    """

    (KNOWN, BEGIN, END, NAMED, THREAD, START, DURATION, CONFIG, ARGS_BEGIN, ARGS_END, KEY,
     DEVICE, STREAM, NODE, BYTES) = range(15)  # fmt: skip


ROLES = {
    **dict.fromkeys(IGNORED, Role.DROP),
    **dict.fromkeys(OPS, Role.OP),
    **dict.fromkeys(LAUNCH, Role.CALL),
    **dict.fromkeys(GPU, Role.DEVICE),
    MODULES: Role.FRAME,
    **dict.fromkeys(ARROWS, Role.ARROW),
}
# The columns that contain ids of texts, for each role.
_RESOLVED = {
    Role.OP: (Column.NAMED, Column.THREAD),
    Role.CALL: (Column.NAMED, Column.THREAD),
    Role.DEVICE: (Column.NAMED, Column.CONFIG),
    Role.FRAME: (Column.NAMED, Column.THREAD),
    Role.ARROW: (Column.THREAD,),
}
# The columns of ops and modules, of API calls and arrows, and of GpuRows, in the order in which
# they are written to the tables.
_SPAN = [Column.START, Column.DURATION, Column.THREAD, Column.NAMED]
_KEYED = [Column.KEY, Column.NAMED, Column.THREAD, Column.START]
_DEVICE = [
    Column.START, Column.DURATION, Column.NAMED, Column.CONFIG, Column.DEVICE, Column.STREAM,
    Column.KEY, Column.NODE, Column.BYTES,
]  # fmt: skip
# Kinds of texts in the scanner's table. The kind of an event's name is less than these numbers: it
# is the position of the event's category in ROLES.
ARGUMENTS, THREADS, CONFIGS = 253, 254, 255
_KEYS = {field.name: field.encode_name for field in msgspec.structs.fields(GpuArgs)}
NUMBERS = [_KEYS[name] for name in ("correlation", "device", "stream", "graph_node", "bytes")]
PARTS = [_KEYS[name] for name in ("grid", "block", "registers", "shared")]
OP_KEYS = ["Sequence number", "Input Dims", "Input Strides", "Input type", "Concrete Inputs"]


class EventColumns:
    """Reads the text of events with the compiled scanner and passes them to a collector."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        roles = bytes(ROLES.values())
        names, numbers, parts, op_keys = (
            "\0".join(texts).encode() for texts in (ROLES, NUMBERS, PARTS, OP_KEYS)
        )
        self._scanner = Scanner(names, roles, numbers, parts, op_keys, MODULE.encode())
        self._rows: Ints = np.empty((len(Role), len(Column), CAPACITY), np.int64)
        self._modules: list[str] = []
        self._arguments: list[OpArguments] = []
        # The collector's id for each id of the scanner. -1 means that the text is unreadable.
        self._ids = np.empty(0, np.int64)

    @classmethod
    def build(cls, collector: Collector) -> EventColumns | None:
        return cls(collector) if Scanner is not None else None

    def collect(self, text: bytes | memoryview, end: int) -> int:
        """Collect the events of text[:end]. Return the number of bytes consumed.

        The rest of the text is an incomplete event or the last event of the array.
        """
        used = begin = 0
        while True:
            used, counts = self._scanner.scan(text, begin, end, self._rows)
            self._collector.tables.events += counts[Role.DROP]
            if any(counts[Role.OP :]):
                self._learn()
                self._write(text, counts)
            if max(counts[Role.OP :]) < CAPACITY or used == begin:
                return used
            begin = used

    def _learn(self) -> None:
        if texts := self._scanner.texts(len(self._ids)):
            self._ids = np.append(self._ids, [self._number(text[0], text[1:]) for text in texts])

    def _number(self, kind: int, text: bytes) -> int:
        """Return the id of a text, or -1 if it is unreadable. Its values are separated by NUL."""
        tables = self._collector.tables
        try:
            if kind == THREADS:
                values = (value or b"null" for value in text.split(b"\0"))
                return tables.threads[_THREAD.decode(b"[%b]" % b",".join(values))]
            if kind == CONFIGS:
                pairs = zip(PARTS, text.split(b"\0"), strict=True)
                members = (b'"%b":%b' % (key.encode(), value) for key, value in pairs if value)
                args = _GPU_ARGS.decode(b"{%b}" % b",".join(members))
                config = (args.grid, args.block, args.registers, args.shared)
                return tables.configs[config] if _fits(config) else -1
            if kind == ARGUMENTS:
                self._arguments.append(OpArguments(*map(_decoded_list, text.split(b"\0"))))
                return len(self._arguments) - 1
            name = _NAME.decode(text)
        except UNDECODABLE:
            return -1
        category, role = [*ROLES.items()][kind]
        if role == Role.DEVICE:
            return tables.kernels[kind_of(category), name]
        if role == Role.FRAME:
            self._modules.append(name)
            return len(self._modules) - 1
        return (tables.names if role == Role.OP else tables.apis)[name]

    def _write(self, text: bytes | memoryview, counts: tuple[int, ...]) -> None:
        """Write the rows that the scanner could read. Decode the events of the other rows."""
        rows = {role: self._rows[role][:, : counts[role]] for role in Role}
        left = [rows[Role.OTHER], rows[Role.UNSURE]]
        for role in _RESOLVED:
            known = self._resolve(role, rows[role])
            # To keep their order, the decoder reads either all or none of these rows
            if role in (Role.CALL, Role.DEVICE) and (counts[Role.UNSURE] or not known.all()):
                known[:] = False
            if not known.all():
                left.append(rows[role][:, ~known])
                rows[role] = rows[role][:, known]
        add, tables = self._collector, self._collector.tables
        add.flush()
        ops, modules = rows[Role.OP], rows[Role.FRAME]
        arguments = ops[[Column.ARGS_BEGIN, Column.ARGS_END]].T
        start, duration, thread, name = ops[_SPAN]
        columns = OpRows(start, start + duration, thread, name)
        add.add_ops(columns, lambda rows: self._read_arguments(text, arguments[rows]))
        tables.write(LaunchRows(*rows[Role.CALL][_KEYED]))
        tables.write(GpuRows(*rows[Role.DEVICE][_DEVICE]))
        tables.arrows.append(rows[Role.ARROW][_KEYED])
        tables.modules += [
            HostSpan(self._modules[name], start, start + duration, thread)
            for start, duration, thread, name in modules[_SPAN].T.tolist()
        ]
        tables.events += sum(rows[role].shape[1] for role in _RESOLVED)
        places = np.concatenate([each[[Column.BEGIN, Column.END]] for each in left], axis=1)
        if places.size:
            places = places[:, np.argsort(places[0])]
            add.add_texts([bytes(text[begin:end]) for begin, end in places.T.tolist()])

    def _read_arguments(
        self, text: bytes | memoryview, places: Ints
    ) -> list[tuple[OpArguments, int] | None]:
        found = np.ascontiguousarray(places)
        spans = found.tolist()
        self._scanner.arguments(text, found)
        self._learn()
        known = [-1 if number < 0 else self._ids[number] for number in found[:, 0].tolist()]
        return [
            (self._arguments[number], sequence)
            if number >= 0
            else self._collector.decode_arguments(bytes(text[begin:end]))
            for (begin, end), number, sequence in zip(
                spans, known, found[:, 1].tolist(), strict=True
            )
        ]

    def _resolve(self, role: Role, rows: Ints) -> Flags:
        """Replace the scanner's ids by the tables' ids. Return which rows have only known ids."""
        known: Flags = rows[Column.KNOWN].astype(np.bool_)
        if not known.any():
            return known
        for column in _RESOLVED[role]:
            numbers = self._ids[np.where(known, rows[column], 0)]
            known &= numbers >= 0
            rows[column] = numbers
        if role == Role.DEVICE:
            node = rows[Column.NODE]
            node[node == 0] = -1
        return known
