"""The kernels of an Nsight Compute report, without an object per number."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from profharness.errors import TraceFormatError

DEVICE_PREFIX = "device__attribute_"
CONSTANTS = (DEVICE_PREFIX, "nvlink__")  # constants of the machine, the same for every kernel
# Limits on the size of a report, in slots of 8 bytes: a multiple of the file's size, and a minimum.
PLACES_A_BYTE, MIN_PLACES = 0.25, 1 << 24
LAUNCH_PLACES, RANGE_PLACES, ENTRY_PLACES = 48, 24, 16  # slots per launch, range and dict entry
# Limits on the slots in a table of metrics: a multiple of the values, above which most kernels and
# metrics of a report have nothing in common, and a minimum.
PLACES_A_VALUE, MIN_TABLE_PLACES = 64, 1 << 20

Triple = tuple[int, int, int]


class NvtxRange(NamedTuple):
    """An NVTX range that was open at a launch."""

    domain: str
    name: str


@dataclass(frozen=True, slots=True)
class NcuLaunch:
    """A profiled kernel.

    `name` is the mangled name, or ncu's demangled text if a CSV has no other. `values` are the
    numeric metrics in the units of the report, `texts` the others. Device attributes are only in
    the first launch of each device. `push_pop` has each domain's stack, outermost first. `grid` and
    `block` are columns of a CSV, and None otherwise.
    """

    name: str
    values: Mapping[str, float]
    texts: dict[str, str]
    device: int = 0
    stream: int | None = None
    start_end: tuple[NvtxRange, ...] = ()
    push_pop: tuple[NvtxRange, ...] = ()
    grid: Triple | None = None
    block: Triple | None = None


@dataclass(frozen=True, slots=True)
class NcuReport:
    """A report's kernels, and units by metric.

    `skipped` counts profiled ranges and graphs. `warnings` describe unreadable or incomplete parts
    of the file.
    """

    launches: list[NcuLaunch]
    units: dict[str, str]
    skipped: int = 0
    warnings: tuple[str, ...] = ()


class Values(Mapping[str, float]):
    """The numeric metrics of a kernel, in slots that all kernels of a report share. NaN: no value."""

    __slots__ = ("_places", "_row")

    def __init__(self, places: dict[str, int], values: Mapping[str, float]) -> None:
        last = max((places.setdefault(name, len(places)) for name in values), default=-1)
        row = array("d", [math.nan]) * (last + 1)
        for name, value in values.items():
            row[places[name]] = value
        self._places, self._row = places, row

    def __getitem__(self, name: str) -> float:
        place = self._places[name]
        if place >= len(self._row) or math.isnan(value := self._row[place]):
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        row = zip(self._places, self._row, strict=False)
        return (name for name, value in row if not math.isnan(value))

    def __len__(self) -> int:
        return sum(not math.isnan(value) for value in self._row)


class LaunchCompactor:
    """Converts launches to a compact form, and refuses a report that would fill the memory."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._most = self._left = max(MIN_PLACES, int(size * PLACES_A_BYTE))
        self._places: dict[str, int] = {}
        self._devices: set[int] = set()

    def allocate(self, places: int) -> None:
        """Allocate slots. Raise TraceFormatError if none are left."""
        self._left -= places
        if self._left < 0:
            message = f"more values than a report of its size has ({self._most:,} places are full)"
            raise TraceFormatError(self._path, message, expected="fewer kernels or metrics")

    def has(self, device: int) -> bool:
        """Return whether a launch of the device was kept, so that its constants are known."""
        return device in self._devices

    def compact(self, launch: NcuLaunch) -> NcuLaunch:
        """Return the launch in its compact form."""
        ranges = len(launch.start_end) + len(launch.push_pop)
        self.allocate(LAUNCH_PLACES + ENTRY_PLACES * len(launch.texts) + RANGE_PLACES * ranges)
        if launch.device not in self._devices:
            self._devices.add(launch.device)  # its first launch has all constants
            self.allocate(ENTRY_PLACES * len(launch.values))
            return launch
        values = Values(self._places, launch.values)
        self.allocate(len(self._places))
        return replace(launch, values=values)


def check_shape(path: Path, kernels: int, metrics: int, filled: int) -> None:
    """Raise TraceFormatError for a table of kernels and metrics that would be nearly empty."""
    if kernels * metrics > max(MIN_TABLE_PLACES, PLACES_A_VALUE * filled):
        message = f"{kernels} kernels with {metrics} metrics, but {filled} values"
        raise TraceFormatError(path, message, expected="kernels that have most metrics in common")
