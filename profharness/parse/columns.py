"""What a trace is read into: int64 columns in an unlinked temporary file, with every string interned."""

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

from profharness.parse.ops import HostSpan
from profharness.parse.packed import without_room

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MAX_NS = 1 << 61
MAX_INT = (1 << 63) - 1
MAX_KEY_BITS = 62
MAX_TEXT = 200  # characters of a text from a header


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


class EvaluationRows(NamedTuple):
    """Ops in which autograd evaluates its nodes; thread is an id, sequence is autograd's number or -1."""

    start: Ints
    end: Ints
    thread: Ints
    sequence: Ints


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


@dataclass(slots=True)
class Arrows:
    """Ends of arrows between two moments: blocks of the columns key, begins (1 where an arrow starts,
    0 where it ends), thread and t. A key that is no number from 0 on counts as -1 less its place in odd.
    """

    blocks: list[Ints] = field(default_factory=list)
    odd: Ids = field(default_factory=Ids)

    def keys(self, values: list[int | str]) -> Ints:
        """The keys as numbers."""
        numbers = (key if whole(key) is not None else -1 - self.odd[key] for key in values)
        return np.fromiter(numbers, np.int64, len(values))

    def columns(self) -> Ints:
        """All of them as an array of four rows."""
        return np.concatenate([np.empty((4, 0), np.int64), *self.blocks], axis=1)


@dataclass(slots=True)
class Tables:
    """What a scan read: interned strings, row blocks, ranges, counts."""

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
    evaluations: list[Ints] = field(default_factory=list)  # blocks of EvaluationRows
    modules: list[HostSpan] = field(default_factory=list)
    arrows: Arrows = field(default_factory=Arrows)
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
        with without_room():
            for column in columns:
                view = np.ascontiguousarray(column).data.cast("B")
                while view:
                    done = os.pwrite(self.file.fileno(), view, self.size)
                    self.size, view = self.size + done, view[done:]
        return offset

    def read(self, block: Block) -> Ints:
        """The block as an array of shape (columns, rows)."""
        data = os.pread(self.file.fileno(), block.columns * block.rows * 8, block.offset)
        return np.frombuffer(data, np.int64).reshape(block.columns, block.rows)


def distinct(values: Ints) -> list[int]:
    """Rising values, each once; np.unique would import masked arrays, at 10 ms."""
    ordered = np.sort(values)
    return [*ordered[:1].tolist(), *ordered[1:][ordered[1:] != ordered[:-1]].tolist()]


def pack(columns: Sequence[Ints]) -> Ints:
    """One key a row of columns (values >= -1): equal exactly where all are equal, and in their order."""
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


def whole(value: object) -> int | None:
    """A number from a file where it is an integer from 0 to 2**62 - 1, else None."""
    is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
    return cast(int, value) if is_whole else None
