"""Compute exact statistics of each group of launches, and the busy time of each device.

With these statistics in the store, most queries need not read launches.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profharness.rows import NSYS, ROCPROF, ROCPROFV3, RPD, TORCH
from profharness.store.tables import insert_row
from profharness.trace import LaunchBatch
from profharness.traces.columns import distinct, pack
from profharness.traces.kernel_names import COLLECTIVE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

# without ncu, because ncu serializes kernels, which makes the start times useless
TIMED = (TORCH, NSYS, ROCPROFV3, RPD, ROCPROF)
MERGE_ROWS = 1 << 20  # number of rows above which rows of the same group and duration are merged


def group(
    key: Column, duration: Column, start: Column, count: Column
) -> tuple[Column, dict[str, Column]]:
    """Group rows by key, and sort the groups by key. There must be at least one row.

    `count` is the number of launches that each row represents. Return the index of one row per
    group, and the columns of `launch_groups`. The median of an even number of durations is the mean
    of the two middle durations, rounded down.
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
    return order[begins], {
        "launches": total_count,
        "total_ns": np.add.reduceat(ordered * counts, begins),
        # low + high could overflow int64
        "median_ns": low + (high - low) // 2,
        "min_ns": ordered[begins],
        "max_ns": ordered[ends - 1],
        "first_ns": np.minimum.reduceat(start[order], begins),
    }


class Grouping:
    """A grouping of rows by the columns `names`. The rows are added in blocks.

    Memory use grows with the number of distinct durations per group, and not with the number of
    rows.
    """

    def __init__(self, names: Sequence[str], *, merge_rows: int = MERGE_ROWS) -> None:
        self._names = names
        self._ids: dict[tuple[int, ...], int] = {}
        self._blocks: list[tuple[Column, ...]] = []
        self._rows, self._merge_rows, self._merge_at = 0, merge_rows, merge_rows

    def add(self, keys: Sequence[Column], duration: Column, start: Column) -> None:
        """Add rows. `keys` contains integer columns whose values are -1 or more."""
        _, index, member_of = np.unique(pack(keys), return_index=True, return_inverse=True)
        rows = zip(*(column[index].tolist() for column in keys), strict=True)
        ids = np.array([self._ids.setdefault(row, len(self._ids)) for row in rows], np.int64)
        # copied, because a view would keep the whole batch in memory
        self._blocks.append((ids[member_of], duration.copy(), start.copy(), np.ones_like(start)))
        self._rows += len(duration)
        if self._rows > self._merge_at:
            ids, *columns = map(np.concatenate, zip(*self._blocks, strict=True))
            index, merged = group(pack([ids, columns[0]]), *columns)
            kept = (merged["min_ns"], merged["first_ns"], merged["launches"])
            self._blocks = [(ids[index], *kept)]
            self._rows = len(index)
            self._merge_at = max(self._merge_rows, 2 * self._rows)

    def finish(self) -> tuple[dict[str, Column], dict[str, Column]]:
        """Return the columns of the coarse groups and of the fine groups.

        There must be at least one row. Coarse groups ignore the last key column. In the result,
        this column contains the value with the most launches, or the earliest of several such
        values.
        """
        ids, *columns = map(np.concatenate, zip(*self._blocks, strict=True))
        keys = np.array(list(self._ids), np.int64)
        order = np.lexsort(keys.T[::-1])
        keys = keys[order]
        fine_of = np.argsort(order)[ids]
        is_new = np.r_[True, (keys[1:, :-1] != keys[:-1, :-1]).any(axis=1)]
        coarse_of = np.cumsum(is_new) - 1
        _, fine = group(fine_of, *columns)
        _, coarse = (None, fine) if is_new.all() else group(coarse_of[fine_of], *columns)
        main = np.lexsort((fine["first_ns"], -fine["launches"], coarse_of))[is_new]
        coarse_keys, fine_keys = (zip(self._names, of.T, strict=True) for of in (keys[main], keys))
        return dict(coarse_keys) | coarse, dict(fine_keys) | fine


class DeviceTimes:
    """The device, kernel, start and duration of each GPU launch, in 24 bytes per launch."""

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
        """Insert one row per device with the busy time and the time of collectives.

        `kernels` contains the name and kind of each kernel in the batches. All these kernels must
        already be stored.
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
    """Return the length of the union of intervals in ns. The intervals must be sorted by start."""
    if not len(begins):
        return 0
    until = np.maximum.accumulate(ends)
    covered = np.r_[begins[:1], until[:-1]]
    return int(np.maximum(ends - np.maximum(begins, covered), 0).sum())
