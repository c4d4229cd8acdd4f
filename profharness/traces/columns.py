"""Store the rows of a trace as int64 columns in a temporary file, and check the properties of GPUs.

All strings are replaced by integer ids. The file is unlinked as soon as it is open, so it
disappears when the process ends. Impossible properties of a GPU are left out with a warning.
"""

from __future__ import annotations

import os
import re
import tempfile
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from profharness.devices import Device
from profharness.trace import NONE
from profharness.traces import without_room
from profharness.traces.ops import HostSpan

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MAX_INT = (1 << 63) - 1
MAX_KEY_BITS = 62
MAX_NS = 1 << 61
# prefixes of the names of API calls in CUDA's runtime, in its driver, and in ROCm
CUDA_API = r"(?:cuda|cu|hip)"
# Calls of ROCm that get the size of a grid in threads. All others get it in blocks.
THREAD_GRIDS = ("hipExtModuleLaunchKernel", "hipHccModuleLaunchKernel")
MAX_TEXT = 200  # maximum number of characters of a text from a header
# The names of each property of a GPU in Kineto, nsys and ncu. nsys does not record the number of
# threads per multiprocessor.
_DEVICE_KEYS = {
    "compute_major": "computeMajor computeMajor compute_capability_major",
    "compute_minor": "computeMinor computeMinor compute_capability_minor",
    "num_sms": "numSms smCount multiprocessor_count",
    "total_memory_bytes": "totalGlobalMem totalMemory total_memory",
    "max_threads_per_block": "maxThreadsPerBlock maxThreadsPerBlock max_threads_per_block",
    "max_threads_per_sm": "maxThreadsPerMultiprocessor - max_threads_per_multiprocessor",
    "registers_per_block": "regsPerBlock maxRegistersPerBlock max_registers_per_block",
    "registers_per_sm": "regsPerMultiprocessor maxRegistersPerSm max_registers_per_multiprocessor",
    "shared_bytes_per_block": "sharedMemPerBlock maxShmemPerBlock max_shared_memory_per_block",
    "shared_bytes_per_block_optin":
        "sharedMemPerBlockOptin maxShmemPerBlockOptin max_shared_memory_per_block_optin",
    "shared_bytes_per_sm":
        "sharedMemPerMultiprocessor maxShmemPerSm max_shared_memory_per_multiprocessor",
    "warp_size": "warpSize threadsPerWarp warp_size",
}  # fmt: skip
KINETO_KEYS, NSYS_KEYS, NCU_KEYS = (
    {field: keys.split()[tool] for field, keys in _DEVICE_KEYS.items()} for tool in range(3)
)
del NSYS_KEYS["max_threads_per_sm"]
CORE_FIELDS = ("compute_major", "compute_minor", "num_sms")
LARGEST = {"total_memory_bytes": 1 << 50, "warp_size": 1 << 10}
LARGEST_OF_OTHERS = 1 << 24
UNNAMED_GPU = "AMD GPU"  # ROCm may leave the name of a GPU empty
REPLACED = "\ufffd"  # replaces invalid characters
SHOWN = 40  # maximum number of characters of a value in a message


class GpuRows(NamedTuple):
    """Columns of kernels, memcpys and memsets. `kernel` and `config` are ids. Times are in ns."""

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
    """Columns of calls of the CUDA runtime and driver API. `api` and `thread` are ids."""

    correlation: Ints
    api: Ints
    thread: Ints
    start: Ints


class OpRows(NamedTuple):
    """Columns of ATen ops. `thread` and `name` are ids."""

    start: Ints
    end: Ints
    thread: Ints
    name: Ints


class Ids(dict[Any, int]):
    """Assigns ids to values in the order of first use. Looking up a new value assigns an id to it."""

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        return number

    def column(self, values: list[Any]) -> Ints:
        return np.fromiter(map(self.__getitem__, values), np.int64, len(values))


@dataclass(frozen=True, slots=True)
class Block:
    """A block of int64 columns in a spool file.

    `low` and `high` are the smallest and the largest correlation ID in the block. If the block
    contains ops, they are the earliest start and the latest end.
    """

    offset: int
    columns: int
    rows: int
    low: int
    high: int


class Spool:
    """A temporary file that contains blocks of rows. The file exists until `stack` is closed."""

    def __init__(self, stack: ExitStack) -> None:
        with without_room():
            file = tempfile.TemporaryFile(prefix="profharness-", buffering=0)  # noqa: SIM115
        self.file = cast(BinaryIO, stack.enter_context(file))
        self.size = 0

    def write(self, columns: Sequence[Ints], low: int = 0, high: int = 0) -> Block:
        """Append columns of equal length. Raise ProfharnessError if the disk is full."""
        block = Block(self.size, len(columns), len(columns[0]), low, high)
        with without_room():
            for column in columns:
                view = np.ascontiguousarray(column).data.cast("B")
                while view:
                    done = os.pwrite(self.file.fileno(), view, self.size)
                    self.size, view = self.size + done, view[done:]
        return block

    def read(self, block: Block) -> Ints:
        """Return a block as an array of shape (columns, rows)."""
        data = os.pread(self.file.fileno(), block.columns * block.rows * 8, block.offset)
        return np.frombuffer(data, np.int64).reshape(block.columns, block.rows)


@dataclass(slots=True)
class Tables:
    """The contents of a trace file: ids of strings, blocks of rows, ranges, ops and counts."""

    spool: Spool
    threads: Ids = field(default_factory=Ids)
    kernels: Ids = field(default_factory=Ids)
    configs: Ids = field(default_factory=Ids)
    apis: Ids = field(default_factory=Ids)
    names: Ids = field(default_factory=Ids)
    gpu: list[Block] = field(default_factory=list)
    launches: list[Block] = field(default_factory=list)
    ops: list[Block] = field(default_factory=list)
    range_names: list[str] = field(default_factory=list)
    # Four numbers for each range: start, duration, thread, and 1 if the range applies to all
    # threads of the process or 0 otherwise
    ranges: array[int] = field(default_factory=lambda: array("q"))
    details: list[HostSpan] = field(default_factory=list)
    # Columns of the ops in which autograd evaluates its nodes: start, end, thread, and sequence
    # number or -1
    evaluations: list[Ints] = field(default_factory=list)
    modules: list[HostSpan] = field(default_factory=list)
    # An arrow leads from a forward op to its backward op. For each of the two ends of an arrow, the
    # columns contain a key that both ends share, 1 for the start or 0 for the end, thread and time.
    arrows: list[Ints] = field(default_factory=list)
    # Maps correlation ids to the kernels that API calls launched, if the file contains their names
    # and was not read by the compiled scanner
    launched: dict[int, str] = field(default_factory=dict)
    events: int = 0
    skipped: int = 0
    negative: int = 0  # number of events that were skipped because their duration is negative

    def write(self, rows: GpuRows | LaunchRows | OpRows) -> None:
        if isinstance(rows, OpRows):
            blocks, low, high = self.ops, rows.start, rows.end
        else:
            blocks = self.gpu if isinstance(rows, GpuRows) else self.launches
            low = high = rows.correlation
        if len(low):
            blocks.append(self.spool.write(rows, int(low.min()), int(high.max())))

    def read(self, blocks: Sequence[Block]) -> Ints:
        """Return the rows of one or more blocks as an array of shape (columns, rows)."""
        return np.concatenate([self.spool.read(block) for block in blocks], axis=1)

    def calls_of(self, rule: re.Pattern[str]) -> LaunchRows:
        """Return the API calls whose name matches a pattern, sorted by start."""
        wanted = np.array([bool(rule.fullmatch(name)) for name in self.apis], np.bool_)
        parts = [np.empty((len(LaunchRows._fields), 0), np.int64)]
        if wanted.any():
            for block in self.launches:
                rows = self.spool.read(block)
                parts.append(rows[:, wanted[LaunchRows(*rows).api]])
        selected = np.concatenate(parts, axis=1)
        return LaunchRows(*selected[:, np.argsort(LaunchRows(*selected).start, kind="stable")])


def nothing(count: int) -> Ints:
    """Return a column of `count` values that are all NONE."""
    return np.full(count, NONE, np.int64)


def distinct(values: Ints) -> list[int]:
    """Return the distinct values in ascending order.

    np.unique is not used, because it imports numpy.ma, which takes 10 ms.
    """
    ordered = np.sort(values)
    return [*ordered[:1].tolist(), *ordered[1:][ordered[1:] != ordered[:-1]].tolist()]


def int_columns(rows: Sequence[Sequence[Any]], width: int) -> Ints:
    """Return the first `width` values of each row as an array of shape (width, rows)."""
    flat = chain.from_iterable(row[:width] for row in rows)
    values: Ints = np.fromiter(flat, np.int64, width * len(rows))
    return np.ascontiguousarray(values.reshape(len(rows), width).T)


def map_values(values: Ints, number: Callable[[int], int]) -> Ints:
    """Return `number(value)` for each value. Call `number` only once for equal values."""
    each, inverse = np.unique(values, return_inverse=True)
    return np.array([number(value) for value in each.tolist()], np.int64)[inverse]


def is_near(times: Ints) -> Flags:
    """Return which times are small enough to be stored."""
    # abs() would return a negative number for the lowest int64
    near: Flags = (times > -MAX_NS) & (times < MAX_NS)
    return near


def hashed(columns: Iterable[Ints]) -> Ints:
    """Return a 64-bit hash of each row."""
    value: Any = np.uint64(0)
    for column in columns:
        value = (value ^ column.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    hashes: Ints = value.view(np.int64)
    return hashes


def pack(columns: Sequence[Ints]) -> Ints:
    """Return an int64 key for each row. All values must be at least -1.

    Sorting the keys sorts the rows by the first column, then by the second column, and so on.
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


def whole(value: object) -> int | None:
    """Return the value if it is an integer from 0 to 2**62 - 1. Otherwise, return None."""
    is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
    return cast(int, value) if is_whole else None


def blocks_of(
    threads: tuple[int, int, int] | None, block: tuple[int, int, int] | None
) -> tuple[int, int, int] | None:
    """Return the size of a grid in blocks, given its size in threads, or None if it is unknown."""
    if threads is None or block is None or min(block) < 1:
        return None
    x, y, z = (-(-size // width) for size, width in zip(threads, block, strict=True))
    return x, y, z


def make_device(
    index: object, name: object, limits: Mapping[str, object]
) -> tuple[Device | None, list[str]]:
    """Return a Device with the given properties, and warnings about impossible values.

    A property that is missing or impossible becomes None. If the index, the name or one of
    CORE_FIELDS is missing or impossible, the result is None instead of a Device.
    """
    used: dict[str, Any] = {}
    for key, value in limits.items():
        number = whole(value)
        possible = number is not None and number <= LARGEST.get(key, LARGEST_OF_OTHERS)
        used[key] = number if possible else None
    used |= {"index": whole(index), "name": name if isinstance(name, str) else None}
    shown = f"device {str(index)[:SHOWN]}"
    warnings = [
        f"{shown}: {key} has the impossible value {str(value)[:SHOWN]}, which is ignored"
        for key, value in {**limits, "index": index, "name": name}.items()
        if value is not None and used[key] is None
    ]
    if isinstance(name, str) and REPLACED in name:
        warnings.append(f"{shown}: its name contains invalid characters")
    if None in (used[key] for key in ("index", "name", *CORE_FIELDS)):
        return None, warnings
    used |= {"name": used["name"][:MAX_TEXT], "warp_size": used["warp_size"] or 32}
    return Device(**used), warnings
