"""What the traces of a run say about its cells, against what was asked for."""

from __future__ import annotations

import sqlite3

from profharness import record
from profharness.store.insert import CellTrace, Inserted, to_json
from profharness.trace import Trace


def tell_cells(
    connection: sqlite3.Connection,
    run: record.Run,
    ids: dict[str, int],
    results: list[tuple[str, Inserted]],
) -> list[str]:
    """Write what the traces say about the cells; the new warnings, each with its cell."""
    seen: dict[str, list[tuple[str, CellTrace]]] = {}
    for profiler, result in results:
        for trace in result.cells:
            seen.setdefault(trace.cell, []).append((profiler, trace))
    told = []
    for cell in run.cells:
        traces = seen.get(cell.cell, [])
        fresh = list(dict.fromkeys(text for _, trace in traces if (text := trace.warning())))
        fresh += [
            f"the {profiler} trace holds no launch of this cell"
            for profiler in _watched(run, cell)
            if not sum(sum(item.launches_per_call) for name, item in traces if name == profiler)
        ]
        ops = [trace.sdpa_op for _, trace in traces if trace.sdpa_op]
        connection.execute(
            "UPDATE cells SET sdpa_op = ?, warnings = ? WHERE id = ?",
            (ops[0] if ops else None, to_json([*cell.warnings, *fresh]), ids[cell.cell]),
        )
        told += [f"{cell.cell}: {text}" for text in fresh]
    return told


def _watched(run: record.Run, cell: record.Cell) -> list[str]:
    """The profilers that left a trace with this cell in it, which ran."""
    if cell.status != "ok":
        return []
    return list(dict.fromkeys(item.profiler for item in run.traces if cell.cell in item.cells))


def unmeasured(protocol: record.Protocol, trace: Trace) -> list[str]:
    """A warning for each metric asked for that ncu left out: it passes over names that it does not
    know, without a word.
    """
    if trace.profiler != "ncu" or not trace.num_launches:
        return []
    known = trace.metrics.names if trace.metrics else []
    return [
        f"ncu measured no {name}; `ncu --query-metrics` lists what this GPU has"
        for name in protocol.metrics
        if not any(each == name or each.startswith(f"{name}.") for each in known)
    ]
