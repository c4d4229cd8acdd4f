"""Exact launch statistics per group, from columns: what the store keeps so that questions need not
read launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from profharness.parse.columns import pack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

MERGE_ROWS = 1 << 20  # held before rows that are equal but for their start become one


@dataclass(frozen=True, slots=True)
class Groups:
    """One element a group, all int64. index is the row of one member, first the earliest start; the
    rest are over the members' durations.

    median is the middle duration, for an even count the mean of the two middle ones, rounded down.
    """

    index: Column
    count: Column
    total: Column
    median: Column
    minimum: Column
    maximum: Column
    first: Column


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

    def busiest(self) -> Column:
        """For each coarse group its fine group with the most members; of several, the earliest."""
        order = np.lexsort((self.fine.first, -self.fine.count, self.coarse_of))
        owner = self.coarse_of[order]
        heads: Column = order[np.r_[True, owner[1:] != owner[:-1]]]
        return heads


def group(key: Column, duration: Column, start: Column, count: Column) -> Groups:
    """Group rows, of which there must be one at least, by key; the groups' keys rise. count: how
    many launches a row stands for.
    """
    order = np.argsort(pack([key, duration]))  # quicker than lexsort, same order
    ordered_key, ordered, counts = key[order], duration[order], count[order]
    begins = np.flatnonzero(np.r_[True, ordered_key[1:] != ordered_key[:-1]])
    ends = np.r_[begins[1:], len(key)]
    total_count = np.add.reduceat(counts, begins)
    places = np.cumsum(counts)
    before = places[ends - 1] - total_count
    low = ordered[np.searchsorted(places, before + (total_count - 1) // 2, "right")]
    high = ordered[np.searchsorted(places, before + total_count // 2, "right")]
    return Groups(
        index=order[begins],
        count=total_count,
        total=np.add.reduceat(ordered * counts, begins),
        # the sum of both could leave int64
        median=low + (high - low) // 2,
        minimum=ordered[begins],
        maximum=ordered[ends - 1],
        first=np.minimum.reduceat(start[order], begins),
    )


class Grouping:
    """Groups rows that come in blocks. Memory grows with the durations that differ, not with the
    rows: those of one group and duration are merged.
    """

    def __init__(self, *, merge_rows: int = MERGE_ROWS) -> None:
        self._ids: dict[tuple[int, ...], int] = {}
        self._blocks: list[tuple[Column, ...]] = []
        self._rows, self._merge_rows, self._merge_at = 0, merge_rows, merge_rows

    def add(self, keys: Sequence[Column], duration: Column, start: Column) -> None:
        """Take in rows; keys are columns of values >= -1."""
        _, index, member_of = np.unique(pack(keys), return_index=True, return_inverse=True)
        rows = zip(*(column[index].tolist() for column in keys), strict=True)
        ids = np.array([self._ids.setdefault(row, len(self._ids)) for row in rows], np.int64)
        # Copies, for a view would keep the whole batch.
        self._blocks.append((ids[member_of], duration.copy(), start.copy(), np.ones_like(start)))
        self._rows += len(duration)
        if self._rows > self._merge_at:
            self._blocks = [self._merged()]
            self._rows = len(self._blocks[0][0])
            self._merge_at = max(self._merge_rows, 2 * self._rows)

    def _merged(self) -> tuple[Column, ...]:
        ids, duration, start, count = map(np.concatenate, zip(*self._blocks, strict=True))
        groups = group(pack([ids, duration]), duration, start, count)
        return ids[groups.index], groups.minimum, groups.first, groups.count

    def finish(self) -> Grouped:
        """The groups of all rows taken in; there must be at least one."""
        ids, *columns = map(np.concatenate, zip(*self._blocks, strict=True))
        keys = np.array(list(self._ids), np.int64)
        order = np.lexsort(keys.T[::-1])
        keys = keys[order]
        fine_of = np.argsort(order)[ids]
        is_new = np.r_[True, (keys[1:, :-1] != keys[:-1, :-1]).any(axis=1)]
        coarse_of = np.cumsum(is_new) - 1
        fine = replace(group(fine_of, *columns), index=np.arange(len(keys)))
        if is_new.all():
            return Grouped(keys, fine, fine, coarse_of)
        coarse = group(coarse_of[fine_of], *columns)
        return Grouped(keys, fine, replace(coarse, index=np.flatnonzero(is_new)), coarse_of)
