"""The numeric metrics of ncu's kernels, without an object per number."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

from profharness.errors import TraceFormatError

# Limits on the slots in a table of metrics: a multiple of the values, above which most kernels and
# metrics of a report have nothing in common, and a minimum.
PLACES_A_VALUE, MIN_PLACES = 64, 1 << 20


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


def check_shape(path: Path, kernels: int, metrics: int, filled: int) -> None:
    """Raise TraceFormatError for a table of kernels and metrics that would be nearly empty."""
    if kernels * metrics > max(MIN_PLACES, PLACES_A_VALUE * filled):
        message = f"{kernels} kernels with {metrics} metrics, but {filled} values"
        raise TraceFormatError(path, message, expected="kernels that have most metrics in common")
