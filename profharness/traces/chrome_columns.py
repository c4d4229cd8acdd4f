"""Read events as columns with the compiled scanner, without an object per event.

Events that the scanner cannot read with certainty go to the decoder.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np

from profharness.traces.chrome_events import (
    ARROWS,
    GPU,
    IGNORED,
    LAUNCH,
    MODULES,
    UNDECODABLE,
    Collector,
    GpuArgs,
    fits,
)
from profharness.traces.columns import Flags, GpuRows, Ints, LaunchRows, OpRows
from profharness.traces.compiled import Scanner
from profharness.traces.ops import MODULE

# rows at once; they fit into the CPU's cache, and a power of two would map all columns to one set
CAPACITY = (1 << 13) + (1 << 6)
OP = "cpu_op"


class Role(IntEnum):
    """The role of a category, as in scanner.c. UNSURE: a key is repeated or escaped."""

    DROP, OP, CALL, DEVICE, FRAME, ARROW, OTHER, UNSURE = range(8)


class Column(IntEnum):
    """The columns of a row, as in scanner.c. BEGIN and END are offsets in the text, NAMED is 1 for
    the start of an arrow, times are in ns. Rows of devices have more numbers after their key.
    """

    (KNOWN, BEGIN, END, NAMED, THREAD, START, DURATION, CONFIG, ARGS_BEGIN, ARGS_END, KEY,
     DEVICE, STREAM, NODE, BYTES) = range(15)  # fmt: skip


ROLES = {
    **dict.fromkeys(IGNORED, Role.DROP),
    OP: Role.OP,
    **dict.fromkeys(LAUNCH, Role.CALL),
    **dict.fromkeys(GPU, Role.DEVICE),
    MODULES: Role.FRAME,
    **dict.fromkeys(ARROWS, Role.ARROW),
}
# columns that contain ids of texts, by role
_RESOLVED = {
    Role.OP: (Column.NAMED, Column.THREAD),
    Role.CALL: (Column.NAMED, Column.THREAD),
    Role.DEVICE: (Column.NAMED, Column.CONFIG),
    Role.FRAME: (Column.NAMED, Column.THREAD),
    Role.ARROW: (Column.THREAD,),
}
# in the order of the fields of OpRows, LaunchRows, Arrows and GpuRows
_OP = [Column.START, Column.DURATION, Column.NAMED, Column.THREAD]
_KEYED = [Column.KEY, Column.NAMED, Column.THREAD, Column.START]
_DEVICE = [
    Column.START, Column.DURATION, Column.NAMED, Column.CONFIG, Column.DEVICE, Column.STREAM,
    Column.KEY, Column.NODE, Column.BYTES,
]  # fmt: skip
THREADS, CONFIGS = 254, 255  # kinds of texts with ids, besides the positions in ROLES
_KEYS = {field.name: field.encode_name for field in msgspec.structs.fields(GpuArgs)}
NUMBERS = [_KEYS[name] for name in ("correlation", "device", "stream", "graph_node", "bytes")]
PARTS = [_KEYS[name] for name in ("grid", "block", "registers", "shared")]


class _Place(msgspec.Struct, gc=False):
    """The thread of an event, decoded as the decoder does it."""

    pid: int | str | float | None = None
    tid: int | str | float | None = None


_NAME, _PLACE = msgspec.json.Decoder(str), msgspec.json.Decoder(_Place)
_GPU_ARGS = msgspec.json.Decoder(GpuArgs)


def _joined(texts: list[str]) -> bytes:
    return "\0".join(texts).encode()


def _members(keys: list[str], text: bytes) -> bytes:
    """Return an object of the keys whose values a text contains. Empty values become null."""
    values = zip(keys, text.split(b"\0"), strict=True)
    return b"{%b}" % b",".join(b'"%b":%b' % (key.encode(), v) for key, v in values if v)


class EventColumns:
    """Reads texts of events into a collector."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        roles = bytes(ROLES.values())
        self._scanner = Scanner(
            _joined([*ROLES]), roles, _joined(NUMBERS), _joined(PARTS), MODULE.encode()
        )
        self._rows: Ints = np.empty((len(Role), len(Column), CAPACITY), np.int64)
        self._modules: list[str] = []
        # The collector's id for each of the scanner's; -1: unreadable
        self._ids = np.empty(0, np.int64)

    def collect(self, text: bytes | memoryview, end: int, part: int) -> int:
        """Collect the events of text[:end] in one part of the file. Return the number of bytes
        consumed. The rest is an incomplete event or the last event of the array.
        """
        used = begin = 0
        while True:
            used, counts = self._scanner.scan(text, begin, end, self._rows)
            self._collector.tables.events += counts[Role.DROP]
            if any(counts[Role.OP :]):
                self._learn()
                self._write(text, counts, part)
            if max(counts[Role.OP :]) < CAPACITY or used == begin:
                return used
            begin = used

    def _learn(self) -> None:
        """Assign ids in the collector's tables to the texts that the scanner met first."""
        if texts := self._scanner.texts(len(self._ids)):
            self._ids = np.append(self._ids, [self._number(text[0], text[1:]) for text in texts])

    def _number(self, kind: int, text: bytes) -> int:
        tables = self._collector.tables
        try:
            if kind == THREADS:
                place = _PLACE.decode(_members(["pid", "tid"], text))
                return tables.threads[place.pid, place.tid]
            if kind == CONFIGS:
                args = _GPU_ARGS.decode(_members(PARTS, text))
                config = (args.grid, args.block, args.registers, args.shared)
                return tables.configs[config] if fits(config) else -1
            name = _NAME.decode(text)
        except UNDECODABLE:
            return -1
        category, role = [*ROLES.items()][kind]
        if role == Role.DEVICE:
            return tables.kernels[category.removeprefix("gpu_"), name]
        if role == Role.FRAME:
            self._modules.append(name)
            return len(self._modules) - 1
        return (tables.names if role == Role.OP else tables.apis)[name]

    def _write(self, text: bytes | memoryview, counts: tuple[int, ...], part: int) -> None:
        """Write the rows with known texts and decode the others."""
        rows = {role: self._rows[role][:, : counts[role]] for role in Role}
        left = [rows[Role.OTHER], rows[Role.UNSURE]]
        for role in _RESOLVED:
            known = self._resolve(role, rows[role])
            # the decoder reads all rows or none, which keeps their order
            if role in (Role.CALL, Role.DEVICE) and (counts[Role.UNSURE] or not known.all()):
                known[:] = False
            if not known.all():
                left.append(rows[role][:, ~known])
                rows[role] = rows[role][:, known]
        add = self._collector
        add.settle(part)
        ops, modules = rows[Role.OP], rows[Role.FRAME]
        begins, ends = ops[[Column.ARGS_BEGIN, Column.ARGS_END]]
        start, duration, name, thread = (ops[column] for column in _OP)
        columns = OpRows(start, start + duration, thread, name)
        add.add_ops(part, columns, lambda row: bytes(text[begins[row] : ends[row]]))
        add.add_launches(part, LaunchRows(*(rows[Role.CALL][column] for column in _KEYED)))
        add.add_device(part, GpuRows(*(rows[Role.DEVICE][column] for column in _DEVICE)))
        add.add_arrows(rows[Role.ARROW][_KEYED])
        start, duration, name, thread = (modules[column] for column in _OP)
        names = [self._modules[number] for number in name.tolist()]
        add.add_modules(names, (start, start + duration, thread))
        add.tables.events += sum(rows[role].shape[1] for role in _RESOLVED)
        places = np.concatenate([each[[Column.BEGIN, Column.END]] for each in left], axis=1)
        if places.size:
            places = places[:, np.argsort(places[0])]
            add.add_texts([bytes(text[begin:end]) for begin, end in places.T.tolist()])

    def _resolve(self, role: Role, rows: Ints) -> Flags:
        """Replace scanner ids by the tables' ids. Return which rows have only known texts."""
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


def is_compiled() -> bool:
    """Return whether the scanner was compiled from this source at installation."""
    return Scanner is not None


def reader(collector: Collector) -> EventColumns | None:
    """Return the reader of event texts, or None without the compiled scanner."""
    return EventColumns(collector) if is_compiled() else None
