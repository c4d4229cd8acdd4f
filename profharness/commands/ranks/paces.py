"""Figures of many ranks at once, from summed launches: ratios of times, counts, families."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from profharness.rows import RankKernel, RankLaunches, RankRow
from profharness.traces.kernel_names import ATTENTION_FAMILIES, COLLECTIVE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Figures = NDArray[np.float64]
    Column = NDArray[np.int64]

MAD_TO_SIGMA = 1.4826  # for a normal distribution
LEFT_OUT_UP_TO = 32  # number of ranks; in larger jobs one rank hardly changes the median


@dataclass(frozen=True, slots=True)
class Launched:
    """Launches and their time by rank (row) and key (column). A key is a kernel with a launch
    configuration and a range.
    """

    count: Figures
    total: Figures  # ns; NaN if a time is unknown
    place: Column
    kernel: Column
    kernels: dict[int, RankKernel]
    places: dict[int, str]

    @property
    def computes(self) -> NDArray[np.bool_]:
        """Return which keys are compute kernels, so no copies and no collectives."""
        wanted = [
            n for n, k in self.kernels.items() if k.kind == "kernel" and k.family != COLLECTIVE
        ]
        return np.isin(self.kernel, wanted)


def launched(ranks: Sequence[RankRow], launches: RankLaunches) -> Launched:
    """Return the matrices of the ranks, in their order."""
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
    """Return the distinct rows, and the index of each row among them."""
    key = np.zeros(len(columns), np.int64)
    for values in columns.T:
        _, inverse = np.unique(values, return_inverse=True)
        _, key = np.unique(key * (inverse.max(initial=0) + 1) + inverse, return_inverse=True)
    _, first = np.unique(key, return_index=True)
    return columns[first], key


@dataclass(frozen=True, slots=True)
class Paces:
    """The time of each rank's kernels relative to the other ranks."""

    ratio: Figures  # NaN for a rank that shares no kernel with another
    broad: Figures  # share of its time in slow kernels
    worst: Column  # the key that costs it the most
    worst_ratio: Figures  # how much longer that one took


def paces(table: Launched, members: Sequence[int], slow: float) -> Paces:
    """Return the paces of these rows of a table, in order. `slow` is the smallest ratio of a slow
    kernel.
    """
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
    """Return for each element the median of the other rows in its column."""
    if len(values) > LEFT_OUT_UP_TO:
        return np.broadcast_to(_medians(values), values.shape)
    rows = range(len(values))
    return np.stack([_medians(np.delete(values, row, axis=0)) for row in rows])


def _medians(values: Figures) -> Figures:
    """Return the median of each column without NaN, or NaN for an empty one. Faster than nanmedian."""
    ordered = np.sort(values, axis=0)  # sorts NaN to the end
    known = np.isfinite(values).sum(axis=0)
    at = np.arange(values.shape[1])
    low, high = np.maximum(known - 1, 0) // 2, np.minimum(known // 2, len(values) - 1)
    middle: Figures = (ordered[low, at] + ordered[high, at]) / 2
    return np.where(known > 0, middle, np.nan)


def center(values: Figures) -> tuple[float, float]:
    """Return (the median, the standard deviation estimated from the median absolute deviation)."""
    middle = float(np.median(values))
    return middle, MAD_TO_SIGMA * float(np.median(np.abs(values - middle)))


def outside(values: Figures, sigmas: float) -> tuple[Figures, Figures]:
    """Return (the distance of each value above the median of the others, `sigmas` standard
    deviations of the others by their median absolute deviation). NaN is ignored.
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
    """Return (the ranges in which attention ran, for each rank its families there)."""
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
    """Yield (range, kernel, launches by rank) of kernels with unequal launch counts."""
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
