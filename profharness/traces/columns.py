"""Store rows as int64 columns in a temporary file.

All strings are replaced by integer ids. The file is unlinked as soon as it is open, so it disappears
when the process ends.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from profharness.traces.devices import whole
from profharness.traces.ops import HostSpan
from profharness.traces.packed import without_room

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MAX_INT = (1 << 63) - 1
MAX_KEY_BITS = 62


class GpuRows(NamedTuple):
    """Kernels, memcpys and memsets. `kernel` and `config` contain ids. Times are in ns."""

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
    """Calls of the CUDA runtime and driver API. `api` and `thread` contain ids."""

    correlation: Ints
    api: Ints
    thread: Ints
    start: Ints


class OpRows(NamedTuple):
    """ATen ops. `thread` and `name` contain ids."""

    start: Ints
    end: Ints
    thread: Ints
    name: Ints


class EvaluationRows(NamedTuple):
    """Ops in which autograd evaluates its nodes.

    `thread` contains ids. `sequence` contains autograd's sequence numbers, or -1 if a number is
    unknown.
    """

    start: Ints
    end: Ints
    thread: Ints
    sequence: Ints


class Ids(dict[Any, int]):
    """Assigns ids to values in the order of first use. Looking up a new value assigns the next id."""

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        return number

    def column(self, values: list[Any]) -> Ints:
        """Return the id of each value."""
        return np.fromiter(map(self.__getitem__, values), np.int64, len(values))


@dataclass(frozen=True, slots=True)
class Block:
    """Describes a block of rows in a spool file.

    A block consists of `columns` int64 columns, one after the other. `low` and `high` are the
    smallest and the largest correlation in the block. If the rows are ops, they are the earliest
    start and the latest end.
    """

    offset: int
    columns: int
    rows: int
    low: int
    high: int


@dataclass(slots=True)
class RangeColumns:
    """The ranges of a trace, in the order of the file.

    Times are in ns. `thread` contains ids. `wide` is 1 for a start/end range of NVTX, which applies to
    the whole process.
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


@dataclass(slots=True)
class Arrows:
    """The starts and ends of arrows. An arrow connects two points in time.

    Each block has the columns key, begins, thread and t. The start and the end of an arrow have the
    same key. `begins` is 1 for a start and 0 for an end. If a key is not an integer from 0 to
    2**62 - 1, it is replaced by -1 minus its id in `odd`.
    """

    blocks: list[Ints] = field(default_factory=list)
    odd: Ids = field(default_factory=Ids)

    def keys(self, values: list[int | str]) -> Ints:
        """Return a number for each key."""
        numbers = (key if whole(key) is not None else -1 - self.odd[key] for key in values)
        return np.fromiter(numbers, np.int64, len(values))

    def columns(self) -> Ints:
        """Return the columns of all blocks as an array that has four rows."""
        return np.concatenate([np.empty((4, 0), np.int64), *self.blocks], axis=1)


@dataclass(slots=True)
class Tables:
    """The result of a scan: the ids of strings, the blocks of rows, the ranges and the counts."""

    threads: Ids = field(default_factory=Ids)
    kernels: Ids = field(default_factory=Ids)
    configs: Ids = field(default_factory=Ids)
    apis: Ids = field(default_factory=Ids)
    names: Ids = field(default_factory=Ids)
    gpu: list[Block] = field(default_factory=list)
    launches: list[Block] = field(default_factory=list)
    ops: list[Block] = field(default_factory=list)
    ranges: RangeColumns = field(default_factory=RangeColumns)
    details: list[HostSpan] = field(default_factory=list)
    evaluations: list[Ints] = field(default_factory=list)  # arrays of EvaluationRows
    modules: list[HostSpan] = field(default_factory=list)
    arrows: Arrows = field(default_factory=Arrows)
    events: int = 0
    skipped: int = 0
    negative: int = 0  # number of events that were skipped because their duration is negative


class Spool:
    """A temporary file that contains blocks of rows."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0

    @classmethod
    def temporary(cls, stack: ExitStack) -> Spool:
        """Create an empty file. It exists until the stack is closed."""
        with without_room():
            file = tempfile.TemporaryFile(prefix="profharness-", buffering=0)  # noqa: SIM115
        return cls(cast(BinaryIO, stack.enter_context(file)))

    def write(self, columns: Iterable[Ints]) -> int:
        """Append columns of equal length to the file, and return their offset.

        Raise ProfharnessError if the file cannot be written, for example because the disk is full.
        """
        offset = self.size
        with without_room():
            for column in columns:
                view = np.ascontiguousarray(column).data.cast("B")
                while view:
                    done = os.pwrite(self.file.fileno(), view, self.size)
                    self.size, view = self.size + done, view[done:]
        return offset

    def read(self, block: Block) -> Ints:
        """Return a block as an array of shape (columns, rows)."""
        data = os.pread(self.file.fileno(), block.columns * block.rows * 8, block.offset)
        return np.frombuffer(data, np.int64).reshape(block.columns, block.rows)


def distinct(values: Ints) -> list[int]:
    """Return the distinct values of an array, in ascending order.

    np.unique is not used, because it would import numpy.ma, which takes 10 ms.
    """
    ordered = np.sort(values)
    return [*ordered[:1].tolist(), *ordered[1:][ordered[1:] != ordered[:-1]].tolist()]


def hashed(columns: Sequence[Ints]) -> Ints:
    """Return a 64-bit hash of each row."""
    value = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        value = (value ^ column.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return value.view(np.int64)


def pack(columns: Sequence[Ints]) -> Ints:
    """Return an int64 key for each row of the columns.

    The keys have the same order as the rows. All values in the columns must be at least -1.
    """
    key = np.zeros(len(columns[0]), np.int64)
    used = 0
    for column in columns:
        shifted = column + 1
        bits = int(shifted.max(initial=0)).bit_length()
        if used + bits > MAX_KEY_BITS:
            unique, inverse = np.unique(key, return_inverse=True)
            key, used = inverse.astype(np.int64), len(unique).bit_length()
        if used + bits > MAX_KEY_BITS:
            unique, inverse = np.unique(shifted, return_inverse=True)
            shifted, bits = inverse.astype(np.int64), len(unique).bit_length()
        key = (key << bits) | shifted
        used += bits
    return key
