"""Compute exact statistics of each group of launches, and the busy time of each device.

The store contains these statistics, so that most queries need not read launches.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from profharness.rows import NSYS, TORCH
from profharness.store.tables import insert_row
from profharness.trace import LaunchBatch
from profharness.traces.columns import distinct, pack
from profharness.traces.kernel_names import COLLECTIVE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

TIMED = (TORCH, NSYS)  # not ncu, because it serializes kernels and so has no real start times
MERGE_ROWS = 1 << 20  # number of rows above which rows of the same group and duration are merged


@dataclass(frozen=True, slots=True)
class Groups:
    """Columns with one int64 element per group. Statistics are over the members' durations."""

    index: Column  # index of the row of one launch in the group
    count: Column
    total: Column
    median: Column
    """median of the durations; for an even count, the mean of the two middle durations, rounded down"""
    minimum: Column
    maximum: Column
    first: Column  # earliest start


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows grouped in two ways: by the whole key, and by the key without its last column."""

    keys: Column
    """sorted keys, one row per fine group; `fine.index` and `coarse.index` are indices into it"""
    fine: Groups
    coarse: Groups
    coarse_of: Column  # index of the coarse group of each fine group

    def busiest(self) -> Column:
        """Return the fine group with the most launches for each coarse group.

        On a tie, return the group that started first.
        """
        order = np.lexsort((self.fine.first, -self.fine.count, self.coarse_of))
        owner = self.coarse_of[order]
        heads: Column = order[np.r_[True, owner[1:] != owner[:-1]]]
        return heads


def group(key: Column, duration: Column, start: Column, count: Column) -> Groups:
    """Group rows by key and return the groups sorted by key. There must be at least one row.

    `count` is the number of launches that each row represents.
    """
    order = np.argsort(pack([key, duration]))  # faster than lexsort, with the same order
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
        # low + high could overflow int64
        median=low + (high - low) // 2,
        minimum=ordered[begins],
        maximum=ordered[ends - 1],
        first=np.minimum.reduceat(start[order], begins),
    )


class Grouping:
    """Group rows that arrive in blocks.

    Memory grows with the number of distinct durations in each group, not with the number of rows.
    """

    def __init__(self, *, merge_rows: int = MERGE_ROWS) -> None:
        self._ids: dict[tuple[int, ...], int] = {}
        self._blocks: list[tuple[NDArray[Any], ...]] = []
        self._rows, self._merge_rows, self._merge_at = 0, merge_rows, merge_rows

    def add(self, keys: Sequence[Column], duration: Column, start: Column) -> None:
        """Add rows. `keys` are columns of integers, none of them below -1."""
        _, index, member_of = np.unique(pack(keys), return_index=True, return_inverse=True)
        rows = zip(*(column[index].tolist() for column in keys), strict=True)
        ids = np.array([self._ids.setdefault(row, len(self._ids)) for row in rows], np.int64)
        # copied, because a view would keep the whole batch in memory
        self._blocks.append((ids[member_of], duration.copy(), start.copy(), np.ones_like(start)))
        self._rows += len(duration)
        if self._rows > self._merge_at:
            ids, *columns = map(np.concatenate, zip(*self._blocks, strict=True))
            merged = group(pack([ids, columns[0]]), *columns)
            self._blocks = [(ids[merged.index], merged.minimum, merged.first, merged.count)]
            self._rows = len(merged.index)
            self._merge_at = max(self._merge_rows, 2 * self._rows)

    def finish(self) -> Grouped:
        """Return the groups of all added rows, of which there must be at least one."""
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


class DeviceTimes:
    """Collect the device, kernel, start and duration of each launch on a GPU, in 24 bytes."""

    def __init__(self) -> None:
        self._blocks: list[tuple[NDArray[Any], ...]] = []

    def watch(self, batches: Iterable[LaunchBatch]) -> Iterator[LaunchBatch]:
        """Collect the launches of batches, and yield the batches unchanged."""
        for batch in batches:
            timed = (batch.device >= 0) & (batch.duration_ns >= 0)
            small = (column[timed].astype(np.int32) for column in (batch.device, batch.kernel))
            self._blocks.append((*small, batch.start_ns[timed], batch.duration_ns[timed]))
            yield batch

    def insert(
        self, connection: sqlite3.Connection, trace_id: int, kernels: Sequence[tuple[str, str]]
    ) -> None:
        """Insert one row per device with its busy time and the time of its collectives.

        `kernels` contains the name and kind of each kernel that the batches refer to. All of them
        must be stored already.
        """
        if not self._blocks:
            return
        device, kernel, start, duration = map(np.concatenate, zip(*self._blocks, strict=True))
        families = (
            connection.execute("SELECT family FROM kernels WHERE name = ? AND kind = ?", key)
            for key in kernels
        )
        communicates = np.array([row.fetchone()[0] == COLLECTIVE for row in families], bool)[kernel]
        for index in distinct(device):
            here = device == index
            order = np.argsort(start[here], kind="stable")
            begins, ends = start[here][order], (start[here] + duration[here])[order]
            collective = communicates[here][order]
            busy = _union(begins, ends)
            row = {
                "trace_id": trace_id,
                "device": index,
                "launches": len(begins),
                "start_ns": int(begins[0]),
                "end_ns": int(ends.max()),
                "busy_ns": busy,
                "collective_ns": _union(begins[collective], ends[collective]),
                # the time in which only collectives ran
                "exposed_ns": busy - _union(begins[~collective], ends[~collective]),
            }
            insert_row(connection, "device_times", row)


def _union(begins: Column, ends: Column) -> int:
    """Return the length of the union of intervals in ns. They must be sorted by their start."""
    if not len(begins):
        return 0
    until = np.maximum.accumulate(ends)
    covered = np.r_[begins[:1], until[:-1]]
    return int(np.maximum(ends - np.maximum(begins, covered), 0).sum())
