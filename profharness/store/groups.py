"""Exact launch statistics per group, from columns: what the store keeps so that questions need not
read launches. Memory grows with the number of groups, not of launches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]


MAX_BITS = 62
SORT_ROWS = 1 << 19  # durations sorted at once for medians (more only if one group has more)
READ_BYTES = 1 << 20  # whole pairs of group number and duration


@dataclass(frozen=True, slots=True)
class Groups:
    """One element a group, all int64. index is the row of one member; the rest are over the
    members' values, and ordered holds all durations, group by group, each group's rising.

    median is the middle duration, for an even count the mean of the two middle ones, rounded down.
    """

    index: Column
    count: Column
    total: Column
    median: Column
    minimum: Column
    maximum: Column
    first: Column
    ordered: Column


@dataclass(frozen=True, slots=True)
class Grouped:
    """All rows in fine groups (equal keys) and coarse ones (equal keys but for the last column).

    keys has a row a fine group, in rising order. index of fine and coarse counts rows of keys;
    coarse_of gives each fine group its coarse one.
    """

    keys: Column
    fine: Groups
    coarse: Groups
    coarse_of: Column


def pack(columns: Sequence[Column]) -> Column:
    """One key a row: equal keys exactly where all columns (values >= -1) are equal."""
    key = np.zeros(len(columns[0]), np.int64)
    used = 0
    for column in columns:
        shifted = column + 1
        bits = int(shifted.max(initial=0)).bit_length()
        if used + bits > MAX_BITS:
            unique, inverse = np.unique(key, return_inverse=True)
            key, used = inverse.astype(np.int64), len(unique).bit_length()
        if used + bits > MAX_BITS:
            unique, inverse = np.unique(shifted, return_inverse=True)
            shifted, bits = inverse.astype(np.int64), len(unique).bit_length()
        key = (key << bits) | shifted
        used += bits
    return key


def group(key: Column, duration: Column, start: Column) -> Groups:
    """Group rows by key; duration gives count, total, median, minimum and maximum, start the
    earliest.
    """
    order = np.argsort(pack([key, duration]))  # quicker than lexsort, same order
    ordered_key, ordered = key[order], duration[order]
    begins = np.flatnonzero(np.r_[True, ordered_key[1:] != ordered_key[:-1]][: len(key)])
    ends = np.r_[begins[1:], len(key)][: len(begins)]
    count = ends - begins
    low, high = begins + (count - 1) // 2, begins + count // 2
    empty = np.zeros(0, np.int64)
    return Groups(
        index=order[begins],
        count=count,
        total=np.add.reduceat(ordered, begins) if len(begins) else empty,
        median=ordered[low] + (ordered[high] - ordered[low]) // 2,
        minimum=ordered[begins],
        maximum=ordered[ends - 1],
        first=np.minimum.reduceat(start[order], begins) if len(begins) else empty,
        ordered=ordered,
    )


class Grouping:
    """Groups rows that come in blocks; the durations wait in a temporary file for their medians."""

    def __init__(self, *, sort_rows: int = SORT_ROWS) -> None:
        self._sort_rows = sort_rows
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._ids: dict[tuple[int, ...], int] = {}
        self._stats = np.zeros((0, 5), np.int64)  # count, total, minimum, maximum, first

    def __enter__(self) -> Grouping:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, keys: Sequence[Column], duration: Column, start: Column) -> None:
        """Take in rows; keys are columns of values >= -1."""
        block = group(pack(keys), duration, start)
        rows = zip(*(column[block.index].tolist() for column in keys), strict=True)
        ids = np.array([self._ids.setdefault(row, len(self._ids)) for row in rows], np.int64)
        if len(self._ids) > len(self._stats):
            self._grow()
        stats = self._stats
        stats[ids, 0] += block.count
        stats[ids, 1] += block.total
        stats[ids, 2] = np.minimum(stats[ids, 2], block.minimum)
        stats[ids, 3] = np.maximum(stats[ids, 3], block.maximum)
        stats[ids, 4] = np.minimum(stats[ids, 4], block.first)
        pairs = np.stack((np.repeat(ids, block.count), block.ordered), axis=1)
        self._file.write(pairs.tobytes())

    def _grow(self) -> None:
        limit = np.iinfo(np.int64)
        more = np.zeros((max(len(self._ids), 2 * len(self._stats)) - len(self._stats), 5), np.int64)
        more[:, (2, 4)], more[:, 3] = limit.max, limit.min
        self._stats = np.concatenate([self._stats, more])

    def finish(self) -> Grouped:
        """The groups of all rows taken in; there must be at least one."""
        keys = np.array(list(self._ids), np.int64)
        order = np.lexsort(keys.T[::-1])
        keys, stats = keys[order], self._stats[order]
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        new = np.r_[True, (keys[1:, :-1] != keys[:-1, :-1]).any(axis=1)]
        begins, coarse_of = np.flatnonzero(new), np.cumsum(new) - 1
        fine = self._groups(np.arange(len(keys)), stats, place)
        if len(begins) == len(keys):
            return Grouped(keys, fine, fine, coarse_of)
        joined = np.empty((len(begins), 5), np.int64)
        joined[:, :2] = np.add.reduceat(stats[:, :2], begins)
        joined[:, 3] = np.maximum.reduceat(stats[:, 3], begins)
        joined[:, (2, 4)] = np.minimum.reduceat(stats[:, (2, 4)], begins)
        return Grouped(keys, fine, self._groups(begins, joined, coarse_of[place]), coarse_of)

    def _groups(self, index: Column, stats: Column, group_of: Column) -> Groups:
        """Statistics with medians; group_of says the group of each number in the file."""
        count, total, minimum, maximum, first = stats.T
        median = np.empty_like(count)
        ends, begin = np.cumsum(count), 0
        while begin < len(count):
            limit = ends[begin] - count[begin] + self._sort_rows
            end = max(begin + 1, int(np.searchsorted(ends, limit, "right")))
            median[begin:end] = self._medians(group_of - begin, count[begin:end])
            begin = end
        empty = np.zeros(0, np.int64)
        return Groups(index, count, total, median, minimum, maximum, first, empty)

    def _medians(self, group_of: Column, count: Column) -> Column:
        """Medians of the groups 0 to len(count), read from the file in one go."""
        values, groups = np.empty(count.sum(), np.int64), np.empty(count.sum(), np.int64)
        filled = 0
        for ids, durations in self._pairs():
            found = group_of[ids]
            keep = (found >= 0) & (found < len(count))
            stop = filled + int(np.count_nonzero(keep))
            values[filled:stop], groups[filled:stop] = durations[keep], found[keep]
            filled = stop
        if len(count) == 1:
            values.sort()
        else:
            values = values[np.argsort(pack([groups, values]))]
        begins = np.cumsum(count) - count
        low, high = begins + (count - 1) // 2, begins + count // 2
        median: Column = values[low] + (values[high] - values[low]) // 2
        return median

    def _pairs(self) -> Iterator[tuple[Column, Column]]:
        self._file.seek(0)
        while data := self._file.read(READ_BYTES):
            ids, durations = np.frombuffer(data, np.int64).reshape(-1, 2).T
            yield ids, durations


def busiest(key: Column, fine: Groups, coarse: Groups) -> Column:
    """For each coarse group the row index of its finest subgroup with the most members.

    key is the coarse key of every row. Ties go to the subgroup that started first.
    """
    owner = key[fine.index]
    order = np.lexsort((fine.first, -fine.count, owner))
    owners = owner[order]
    heads = order[np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]][: len(owners)])]
    place = np.searchsorted(owner[heads], key[coarse.index])
    return fine.index[heads][place]
