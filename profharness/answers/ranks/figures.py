"""Figures of many ranks at once, from the summed up launches: ratios of times, counts, families."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from profharness.kernel_names import ATTENTION_FAMILIES, COLLECTIVE
from profharness.rows import RankKernel, RankLaunches, RankRow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Figures = NDArray[np.float64]
    Column = NDArray[np.int64]

MAD_TO_SIGMA = 1.4826  # of a normal distribution
LEFT_OUT_UP_TO = 32  # ranks; of more, one hardly moves the median


@dataclass(frozen=True, slots=True)
class Launched:
    """Launches and their time by rank (row) and key (column): a kernel in a launch configuration and
    a place. total is NaN where a time is not known.
    """

    count: Figures
    total: Figures
    place: Column
    kernel: Column
    kernels: dict[int, RankKernel]
    places: dict[int, str]

    @property
    def computes(self) -> NDArray[np.bool_]:
        """Which keys are kernels that compute: no copies, no collectives."""
        wanted = [
            n for n, k in self.kernels.items() if k.kind == "kernel" and k.family != COLLECTIVE
        ]
        return np.isin(self.kernel, wanted)


def launched(ranks: Sequence[RankRow], launches: RankLaunches) -> Launched:
    """The matrices of the ranks, in their order."""
    table = np.array(launches.groups, np.int64).reshape(-1, 7)
    owner = {trace: row for row, rank in enumerate(ranks) for trace in rank.traces}
    traces, which = np.unique(table[:, 0], return_inverse=True)
    row = np.array([owner[trace] for trace in traces.tolist()], np.int64)[which]
    keys, column = _unique(table[:, 1:4])
    shape = (len(ranks), len(keys))
    cell = row * shape[1] + column
    times = np.where(table[:, 5] < 0, np.nan, table[:, 5])
    length = shape[0] * shape[1]
    count: Figures = np.bincount(cell, table[:, 4], length).astype(float).reshape(shape)
    total: Figures = np.bincount(cell, times, length).astype(float).reshape(shape)
    return Launched(count, total, keys[:, 0], keys[:, 1], launches.kernels, launches.places)


def _unique(columns: Column) -> tuple[Column, Column]:
    """The rows that differ, and for each row which of these it is."""
    key = np.zeros(len(columns), np.int64)
    for values in columns.T:
        _, inverse = np.unique(values, return_inverse=True)
        _, key = np.unique(key * (inverse.max(initial=0) + 1) + inverse, return_inverse=True)
    _, first = np.unique(key, return_index=True)
    return columns[first], key


@dataclass(frozen=True, slots=True)
class Paces:
    """How long each rank's kernels took against those of the other ranks. ratio is NaN for a rank that
    shares no kernel with another. broad is the part of its time in kernels that are slow; worst the key
    that costs it the most, and worst_ratio how much longer that took.
    """

    ratio: Figures
    broad: Figures
    worst: Column
    worst_ratio: Figures


def paces(table: Launched, members: Sequence[int], slow: float) -> Paces:
    """The paces of these rows of a table, in their order. slow: the ratio from which on a kernel is."""
    rows = np.asarray(members)
    count, total = table.count[rows], table.total[rows]
    keys = table.computes & ((count > 0).sum(axis=0) > 1)
    count, total = count[:, keys], total[:, keys]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(count > 0, total / count, np.nan)
    usual = _medians_of_others(mean)
    known = np.isfinite(mean) & np.isfinite(usual) & (usual > 0)
    mean, usual = np.where(known, mean, 0), np.where(known, usual, 0)
    own, expected = (mean * count).sum(axis=1), (usual * count).sum(axis=1)
    is_slow = mean > slow * usual
    lost = np.where(known, (mean - usual) * count, -np.inf)
    places = np.flatnonzero(keys)
    worst = lost.argmax(axis=1) if len(places) else np.zeros(len(rows), np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        each = mean / usual
        return Paces(
            ratio=own / expected,
            broad=(mean * count * is_slow).sum(axis=1) / own,
            worst=places[worst] if len(places) else worst,
            worst_ratio=each[np.arange(len(rows)), worst] if len(places) else own,
        )


def _medians_of_others(values: Figures) -> Figures:
    """Of each element the median of its column in the other rows, where they have one."""
    if len(values) > LEFT_OUT_UP_TO:
        return np.broadcast_to(_medians(values), values.shape)
    rows = range(len(values))
    return np.stack([_medians(np.delete(values, row, axis=0)) for row in rows])


def _medians(values: Figures) -> Figures:
    """Of each column the median of what is known; NaN without any. Faster than nanmedian."""
    ordered = np.sort(values, axis=0)  # NaN comes last
    known = np.isfinite(values).sum(axis=0)
    at = np.arange(values.shape[1])
    low, high = np.maximum(known - 1, 0) // 2, np.minimum(known // 2, len(values) - 1)
    middle: Figures = (ordered[low, at] + ordered[high, at]) / 2
    return np.where(known > 0, middle, np.nan)


def center(values: Figures) -> tuple[float, float]:
    """(the median, the standard deviation by the median absolute deviation)."""
    middle = float(np.median(values))
    return middle, MAD_TO_SIGMA * float(np.median(np.abs(values - middle)))


def outside(values: Figures, sigmas: float) -> tuple[Figures, Figures]:
    """(how far each value lies above the median of the others, how far the spread of the others reaches):
    so many standard deviations, from the median absolute deviation. NaN is left out.
    """
    known = np.flatnonzero(np.isfinite(values))
    above, reach = np.full(len(values), np.nan), np.full(len(values), np.nan)
    if len(known) < 2:
        return above, reach
    seen = values[known]
    if len(seen) > LEFT_OUT_UP_TO:
        middle, sigma = center(seen)
        above[known] = seen - middle
        reach[known] = sigmas * sigma
        return above, reach
    for place, index in enumerate(known):
        middle, sigma = center(np.delete(seen, place))
        above[index] = values[index] - middle
        reach[index] = sigmas * sigma
    return above, reach


def attention(table: Launched) -> tuple[list[int], list[dict[int, frozenset[str]]]]:
    """(the places where attention ran, for each rank its families there)."""
    names = {number: kernel.family for number, kernel in table.kernels.items()}
    keys = [
        key
        for key, number in enumerate(table.kernel.tolist())
        if names[number] in ATTENTION_FAMILIES
    ]
    ran: list[dict[int, set[str]]] = [{} for _ in table.count]
    for key in keys:
        place, family = int(table.place[key]), names[int(table.kernel[key])]
        for row in np.flatnonzero(table.count[:, key]).tolist():
            ran[row].setdefault(place, set()).add(family)
    places = list(dict.fromkeys(table.place[keys].tolist()))
    return places, [
        {place: frozenset(families) for place, families in rank.items()} for rank in ran
    ]


def uneven(table: Launched) -> Iterator[tuple[int, int, Column]]:
    """(place, kernel, launches by rank) of the kernels that ranks did not launch equally often."""
    keys = np.flatnonzero(
        np.isin(table.kernel, [n for n, kernel in table.kernels.items() if kernel.kind == "kernel"])
    )
    if not len(keys):
        return
    pairs, column = _unique(np.stack([table.place[keys], table.kernel[keys]], axis=1))
    order = np.argsort(column, kind="stable")
    begins = np.flatnonzero(np.r_[True, np.diff(column[order]) != 0])
    counts = np.add.reduceat(table.count[:, keys[order]], begins, axis=1).astype(np.int64)
    for index in np.flatnonzero((counts != counts[:1]).any(axis=0)).tolist():
        yield int(pairs[index, 0]), int(pairs[index, 1]), counts[:, index]
