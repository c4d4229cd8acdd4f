"""Insert the attention calls of traces and of observed programs.

A call in a trace is stored with the kernels that it launched.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from profharness.attention.config import Config
from profharness.store.tables import config_ids, insert_row, insert_rows
from profharness.trace import AttentionCall, LaunchBatch, TensorArgument, Trace

if TYPE_CHECKING:
    from profharness.traces.observed import Journals, ObservedCall

Column = NDArray[np.int64]
Tensors = tuple[TensorArgument | None, ...]

CALL_FIELDS = (  # fields of AttentionCall that are columns of the same name
    "step", "kind", "op", "sdpa_op", "compiled", "graph", "recompute", "backward", "path", "reason",
    "pid", "tid", "start_ns", "duration_ns",
)  # fmt: skip


KERNEL_COLUMNS = (
    "call_id", "direction", "kernel_id", "launch_config_id", "launches", "total_ns", "first_ns",
)  # fmt: skip


class CallLaunches:
    """Sum the launches of each call in a trace, batch by batch."""

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
        """Insert the steps, the calls and their kernels in the caller's transaction.

        `configs` maps configs to row ids.
        """
        trace = self._trace
        insert_rows(
            connection,
            "steps",
            ("trace_id", "ordinal", "name", "start_ns", "duration_ns"),
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
        insert_rows(
            connection,
            "calls",
            columns,
            (
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
            ),
        )
        if not self._blocks:
            return
        call, direction, *rest = _added_up(np.concatenate(self._blocks, axis=1)).tolist()
        names = map(self._directions.__getitem__, direction)
        insert_rows(
            connection,
            "call_kernels",
            KERNEL_COLUMNS,
            zip(map(ids.__getitem__, call), names, *rest, strict=True),
        )


def _json(tensors: Tensors) -> str:
    return json.dumps(msgspec.to_builtins(tensors))


def _added_up(rows: Column) -> Column:
    """Sum the launches that have equal keys.

    Return the columns call, direction, kernel, launch configuration, launches, total and first,
    sorted by key.
    """
    rows = rows[:, np.lexsort(rows[3::-1])]
    is_new = (rows[:4, 1:] != rows[:4, :-1]).any(axis=0)
    begins = np.flatnonzero(np.r_[True, is_new])
    sums = np.add.reduceat(rows[4:6], begins, axis=1)
    first = np.minimum.reduceat(rows[6], begins)
    return np.concatenate([rows[:4, begins], sums, first[None]])


_OF_CALL = ("kind", "op", "path", "compiled", "recompute", "backward", "reason")
_OF_TEMPLATE = (
    "pid", "rank", "name", "asked", "choice", "ran", "mask", "file", "line", "function"
)  # fmt: skip


def insert_journals(
    connection: sqlite3.Connection,
    run_id: int,
    journals: Journals,
    calls: Sequence[AttentionCall],
) -> list[str]:
    """Insert observed calls, and link the stored calls of the traces to them.

    Values that the trace of a linked call lacks are copied from the observed call. Return warnings.
    """
    from profharness.traces.observed import completed, match_calls

    if not journals.calls:
        return list(journals.warnings)
    labels = (item.call.config for item in journals.calls)
    configs = config_ids(connection, (config for config in labels if config))
    ids = _insert_templates(connection, run_id, journals.calls, configs)
    places = match_calls(calls, journals.calls)
    rows = []
    for at, call in zip(places, calls, strict=True):
        whole = call if at is None else completed(call, journals.calls[at])
        config = configs[whole.config] if whole.config and call.config is None else None
        number = None if at is None else ids[at]
        rows.append((number, whole.kind, whole.compiled, config, whole.reason))
    _link_calls(connection, run_id, rows)
    lost = sum(at is None and call.path is not None for at, call in zip(places, calls, strict=True))
    text = f"{lost} call(s) of the traces fit no observed kind of call, or several"
    return [*journals.warnings, *([text] if lost else [])]


def _insert_templates(
    connection: sqlite3.Connection,
    run_id: int,
    observed: Sequence[ObservedCall],
    configs: Mapping[Config, int],
) -> list[int]:
    """Insert observed calls and return their row ids, in order.

    `configs` maps configs to row ids.
    """
    ids = []
    for item in observed:
        call = item.call
        row = {name: getattr(call, name) for name in _OF_CALL}
        row |= {name: getattr(item, name) for name in _OF_TEMPLATE}
        row |= {
            "run_id": run_id,
            "config_id": configs[call.config] if call.config else None,
            "modules": json.dumps(call.modules),
            "tensors": _json(call.tensors),
            "calls": item.count,
            "lengths": json.dumps(item.lengths),
            "enabled": json.dumps(item.enabled),
        }
        ids.append(insert_row(connection, "templates", row))
    return ids


def _link_calls(
    connection: sqlite3.Connection,
    run_id: int,
    rows: Sequence[tuple[int | None, str, bool, int | None, str | None]],
) -> None:
    """Link the calls in a run's traces to their observed calls, and fill in missing values.

    `rows` has one element per call, in the order of the traces.
    """
    calls = connection.execute(
        "SELECT c.id FROM calls c JOIN traces t ON t.id = c.trace_id WHERE t.run_id = ? "
        "ORDER BY t.id, c.ordinal",
        (run_id,),
    ).fetchall()
    numbered = ((*row, *call) for row, call in zip(rows, calls, strict=True))
    connection.executemany(
        "UPDATE calls SET template_id = ?, kind = ?, compiled = ?, "
        "config_id = coalesce(?, config_id), reason = ? WHERE id = ?",
        numbered,
    )
