"""Queries for the attention calls of programs, their kernels, and the idle time of the GPU."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from profharness.rows import (
    WHOLE_TRACE,
    CallKernel,
    CallRow,
    CallSignature,
    GapRow,
    StepRow,
    triple,
)

GAPS = 5  # number of gaps to return
# The idle time of a device before each launch, since the latest end of all earlier launches.
_ENDS = """
    SELECT l.id, l.device, l.start_ns, l.duration_ns, l.launch_ns, l.kernel_id, l.op_path_id,
        max(l.start_ns + l.duration_ns) OVER (
            PARTITION BY l.trace_id, l.device ORDER BY l.start_ns, l.id
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS busy_until
    FROM launches l JOIN traces t ON l.id BETWEEN t.first_launch_id AND t.last_launch_id
    WHERE t.id = ? AND l.duration_ns IS NOT NULL AND l.device >= 0
        AND l.start_ns >= ? AND l.start_ns < ?"""


def call_rows(connection: sqlite3.Connection, run: str) -> list[CallRow]:
    """Return the attention calls of a run with their kernels, sorted by trace and start time."""
    kernels: dict[int, list[CallKernel]] = {}
    for call, *values in connection.execute(
        "SELECT k.call_id, k.direction, n.name, n.short, n.family, k.launches, k.total_ns, n.kind, "
        "l.grid_x, l.grid_y, l.grid_z, l.block_x, l.block_y, l.block_z, l.registers_per_thread, "
        "coalesce(l.shared_bytes, l.static_shared_bytes + l.dynamic_shared_bytes) "
        "FROM call_kernels k JOIN kernels n ON n.id = k.kernel_id JOIN calls c ON c.id = k.call_id "
        "JOIN launch_configs l ON l.id = k.launch_config_id "
        "JOIN traces t ON t.id = c.trace_id JOIN runs r ON r.id = t.run_id WHERE r.run = ? "
        "ORDER BY k.call_id, k.first_ns",
        (run,),
    ):
        grid, block = triple(*values[7:10]), triple(*values[10:13])
        kernel = CallKernel._make((*values[:7], grid, block, *values[13:]))
        kernels.setdefault(call, []).append(kernel)
    rows = connection.execute(
        "SELECT c.id, c.trace_id, c.ordinal, c.step, c.kind, c.op, c.sdpa_op, c.compiled, "
        "c.recompute, c.backward, c.path, c.modules, cf.label, c.reason, c.tensors, c.start_ns, "
        "c.duration_ns, c.graph, c.template_id FROM calls c JOIN traces t ON t.id = c.trace_id "
        "JOIN runs r ON r.id = t.run_id LEFT JOIN configs cf ON cf.id = c.config_id "
        "WHERE r.run = ? ORDER BY c.id",
        (run,),
    )
    return [
        CallRow(
            run, trace, ordinal, step, kind, op, sdpa_op, bool(compiled), bool(recompute),
            bool(backward), path, tuple(json.loads(modules)), config, reason,
            tuple(json.loads(tensors)), start_ns, duration_ns, tuple(kernels.get(number, ())),
            bool(graph), template,
        )
        for (
            number, trace, ordinal, step, kind, op, sdpa_op, compiled, recompute, backward, path,
            modules, config, reason, tensors, start_ns, duration_ns, graph, template,
        ) in rows
    ]  # fmt: skip


def template_rows(connection: sqlite3.Connection, run: str) -> list[CallSignature]:
    """Return the distinct observed calls of a run, sorted by process and first call."""
    rows = connection.execute(
        "SELECT o.id, o.pid, o.rank, o.kind, o.op, o.name, o.compiled, o.recompute, o.backward, "
        "o.modules, cf.label, o.reason, o.tensors, o.calls, o.lengths, o.asked, o.choice, o.ran, "
        "o.mask, o.file, o.line, o.function FROM templates o JOIN runs r ON r.id = o.run_id "
        "LEFT JOIN configs cf ON cf.id = o.config_id WHERE r.run = ? ORDER BY o.id",
        (run,),
    )
    return [
        CallSignature(
            number, pid, rank, kind, op, name, bool(compiled), bool(recompute), bool(backward),
            tuple(json.loads(modules)), config, reason, tuple(json.loads(tensors)), calls,
            tuple((tuple(key), count) for key, count in json.loads(lengths)), *rest,
        )
        for (
            number, pid, rank, kind, op, name, compiled, recompute, backward, modules, config,
            reason, tensors, calls, lengths, *rest,
        ) in rows
    ]  # fmt: skip


def step_rows(connection: sqlite3.Connection, run: str) -> list[StepRow]:
    """Return the steps of a run's traces.

    If a trace has no steps, return one step that contains all its launches.
    """
    rows: list[StepRow] = []
    for trace, first, last in connection.execute(
        "SELECT t.id, min(l.start_ns), max(l.start_ns + coalesce(l.duration_ns, 0)) FROM traces t "
        "JOIN runs r ON r.id = t.run_id "
        "JOIN launches l ON l.id BETWEEN t.first_launch_id AND t.last_launch_id "
        "WHERE r.run = ? GROUP BY t.id",
        (run,),
    ).fetchall():
        steps = connection.execute(
            "SELECT ordinal, name, start_ns, duration_ns FROM steps WHERE trace_id = ? "
            "ORDER BY ordinal",
            (trace,),
        ).fetchall() or [(0, WHOLE_TRACE, first, last - first)]
        # the end is exclusive, and the last launch may have no duration
        ends = [*(step[2] for step in steps[1:]), last + 1]
        for (step, name, start, duration), end in zip(steps, ends, strict=True):
            busy = _busy(connection, trace, start, end)
            rows.append(StepRow(trace, step, name, start, duration, busy))
    return rows


def _busy(connection: sqlite3.Connection, trace: int, begin: int, end: int) -> int:
    """Return the busy time in ns, summed over devices, of kernels that started in [begin, end)."""
    row = connection.execute(
        "SELECT coalesce(sum(max(0, start_ns + duration_ns - max(start_ns, "
        f"coalesce(busy_until, start_ns)))), 0) FROM ({_ENDS})",
        (trace, begin, end),
    ).fetchone()
    return int(row[0])


def gap_rows(connection: sqlite3.Connection, steps: Sequence[StepRow]) -> list[GapRow]:
    """Return the longest periods within the steps in which a device was idle."""
    gaps: list[GapRow] = []
    for step in steps:
        rows: list[Any] = connection.execute(
            "SELECT e.device, e.busy_until, e.start_ns - e.busy_until AS idle, k.short, o.path, "
            f"e.launch_ns FROM ({_ENDS}) e JOIN kernels k ON k.id = e.kernel_id "
            "LEFT JOIN op_paths o ON o.id = e.op_path_id WHERE idle > 0 "
            f"ORDER BY idle DESC LIMIT {GAPS}",
            (step.trace, step.start_ns, step.start_ns + step.duration_ns),
        ).fetchall()
        gaps += [GapRow(*row) for row in rows]
    return sorted(gaps, key=lambda gap: -gap.duration_ns)[:GAPS]
