"""Sum up how long each GPU of a trace was busy, and how long with collectives."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from profharness.rows import NSYS, TORCH
from profharness.store.schema import insert_row
from profharness.trace import LaunchBatch
from profharness.traces.columns import distinct
from profharness.traces.kernel_names import COLLECTIVE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

TIMED = (TORCH, NSYS)  # ncu runs each kernel alone and lays them end to end


class DeviceTimes:
    """Collect the device, kernel, start and duration of each launch on a GPU: 24 bytes each."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Column, ...]] = []

    def watch(self, batches: Iterable[LaunchBatch]) -> Iterator[LaunchBatch]:
        """Yield the batches unchanged. Call `insert` after the last one."""
        for batch in batches:
            timed = (batch.device >= 0) & (batch.duration_ns >= 0)
            kept = (batch.device, batch.kernel, batch.start_ns, batch.duration_ns)
            columns = tuple(column[timed] for column in kept)
            self._blocks.append(
                (columns[0].astype(np.int32), columns[1].astype(np.int32), *columns[2:])
            )
            yield batch

    def insert(
        self, connection: sqlite3.Connection, trace_id: int, kernels: Sequence[tuple[str, str]]
    ) -> None:
        """Insert one row per device.

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
                # the time in which collectives ran and nothing else did
                "exposed_ns": busy - _union(begins[~collective], ends[~collective]),
            }
            insert_row(connection, "device_times", row)


def _union(begins: Column, ends: Column) -> int:
    """Return how many ns the intervals cover together. They must be sorted by their begins."""
    if not len(begins):
        return 0
    until = np.maximum.accumulate(ends)
    covered = np.r_[begins[:1], until[:-1]]
    return int(np.maximum(ends - np.maximum(begins, covered), 0).sum())
