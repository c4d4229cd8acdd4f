"""Insert the attention calls of a trace, with the kernels that each of them launched."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter

import msgspec
import numpy as np
from numpy.typing import NDArray

from profharness.attention.config import Config
from profharness.trace import LaunchBatch, TensorArgument, Trace

Column = NDArray[np.int64]
Tensors = tuple[TensorArgument | None, ...]

ROWS_PER_STATEMENT = 64

CALL_FIELDS = (  # fields of AttentionCall that are columns of the same name
    "step", "kind", "op", "sdpa_op", "compiled", "graph", "recompute", "backward", "path", "reason",
    "pid", "tid", "start_ns", "duration_ns",
)  # fmt: skip


KERNEL_COLUMNS = (
    "call_id", "direction", "kernel_id", "launch_config_id", "launches", "total_ns", "first_ns",
)  # fmt: skip


class CallLaunches:
    """Sums of the launches of a trace's calls, batch by batch."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._directions = sorted({span.direction for span in trace.call_spans})
        places = [(span.call, self._directions.index(span.direction)) for span in trace.call_spans]
        self._places = np.array(places, np.int64).reshape(-1, 2).T
        self._blocks: list[Column] = []

    def add(self, batch: LaunchBatch, kernel: Column, launch_config: Column) -> None:
        """Add a batch. `kernel` and `launch_config` are row ids."""
        mine = np.flatnonzero(batch.call_span >= 0)
        if len(mine):
            places = self._places[:, batch.call_span[mine]]
            figures = (np.ones_like(mine), batch.duration_ns[mine], batch.start_ns[mine])
            rows = np.stack([*places, kernel[mine], launch_config[mine], *figures])
            self._blocks.append(_added_up(rows))

    def insert(
        self, connection: sqlite3.Connection, trace_id: int, configs: Mapping[Config, int]
    ) -> None:
        """Insert steps, calls and their kernels in the caller's transaction. `configs` has the row
        ids of configs.
        """
        trace = self._trace
        connection.executemany(
            "INSERT INTO steps (trace_id, ordinal, name, start_ns, duration_ns) VALUES (?, ?, ?, ?, ?)",
            (
                (trace_id, at, step.name, step.start_ns, step.duration_ns)
                for at, step in enumerate(trace.steps)
            ),
        )
        (first,) = connection.execute("SELECT coalesce(max(id), 0) + 1 FROM calls").fetchone()
        ids = range(first, first + len(trace.calls))
        tensors_text = cache(_json)
        modules_text = cache(json.dumps)
        of_call = attrgetter(*CALL_FIELDS)
        columns = ("id", "trace_id", "ordinal", "modules", "config_id", "tensors", *CALL_FIELDS)
        _insert_rows(
            connection,
            "calls",
            columns,
            [
                (
                    ids[ordinal],
                    trace_id,
                    ordinal,
                    modules_text(call.modules),
                    configs[call.config] if call.config else None,
                    tensors_text(call.tensors),
                    *of_call(call),
                )
                for ordinal, call in enumerate(trace.calls)
            ],
        )
        if not self._blocks:
            return
        call, direction, *rest = _added_up(np.concatenate(self._blocks, axis=1)).tolist()
        names = map(self._directions.__getitem__, direction)
        _insert_rows(
            connection,
            "call_kernels",
            KERNEL_COLUMNS,
            list(zip(map(ids.__getitem__, call), names, *rest, strict=True)),
        )


def _json(tensors: Tensors) -> str:
    return json.dumps(msgspec.to_builtins(tensors))


def _insert_rows(
    connection: sqlite3.Connection,
    table: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
) -> None:
    """Insert many rows per statement, which takes half the time of a statement per row."""
    insert = f"INSERT INTO {table} ({', '.join(columns)}) VALUES "
    marks = f"({', '.join('?' * len(columns))})"
    many = len(rows) - len(rows) % ROWS_PER_STATEMENT
    connection.executemany(
        insert + ", ".join([marks] * ROWS_PER_STATEMENT),
        (
            list(chain.from_iterable(rows[begin : begin + ROWS_PER_STATEMENT]))
            for begin in range(0, many, ROWS_PER_STATEMENT)
        ),
    )
    connection.executemany(insert + marks, rows[many:])


def _added_up(rows: Column) -> Column:
    """Sum launches with equal keys.

    Return the columns call, direction, kernel, launch configuration, launches, total and first,
    sorted by key.
    """
    rows = rows[:, np.lexsort(rows[3::-1])]
    is_new = (rows[:4, 1:] != rows[:4, :-1]).any(axis=0)
    begins = np.flatnonzero(np.r_[True, is_new])
    sums = np.add.reduceat(rows[4:6], begins, axis=1)
    first = np.minimum.reduceat(rows[6], begins)
    return np.concatenate([rows[:4, begins], sums, first[None]])
