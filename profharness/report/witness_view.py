"""`kernels --profiler all` as a Document: a line per kernel with the time under each profiler, ncu's
counters, and every disagreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profharness.profiler_names import PROFILERS
from profharness.report.document import Block, Column, Document, Heading, Note, Table
from profharness.report.kernels_view import FIELDS, SCHEMA, cell_notes, cell_record, kernel_record
from profharness.report.witnesses import Witnesses, cold_ratio, join
from profharness.rows import CellRow, KernelRow

ACHIEVED_OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
DRAM_BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")
OWN_COLUMNS = (ACHIEVED_OCCUPANCY, *DRAM_BYTES, "gpu__time_duration.sum")
COMPARED = (
    *("duration_ns", "registers_per_thread", "static_shared_bytes", "dynamic_shared_bytes"),
    *("shared_bytes", "launches", "launches_per_call"),
)
MAX_NOTES = 12
FORMS: dict[str, Column] = {
    column.key: column
    for column in (
        Column("backend", "backend", repeat=False),
        Column("kernel_short", "kernel", shrink=True),
        Column("grid", "grid", "triple", right=True),
        Column("block", "block", "triple", right=True),
        Column("shared_bytes", "KiB", "kib", right=True),
        Column("registers_per_thread", "regs", "count", right=True),
        Column("launches_per_call", "n/call", "count", right=True),
        *(Column(name, f"{name} µs", "us", right=True) for name in PROFILERS),
        Column("achieved", "achieved%", "percent", right=True),
        Column("dram", "DRAM KiB", "kib", right=True),
        Column("disagree", "disagree", "names"),
    )
}


def witness_document(
    rows: Sequence[KernelRow], cells: Sequence[CellRow] = (), *, full: bool = False
) -> Document:
    """Three witnesses side by side. rows: those of all profilers, newest run first; cells as in
    kernels_document. full lists every counter that ncu took.
    """
    joined = join(rows)
    blocks: list[Block] = []
    configs = dict.fromkeys([*(cell.config for cell in cells), *(each.config for each in joined)])
    for config in configs:
        own = [each for each in joined if each.config == config]
        beside = [cell for cell in cells if cell.config == config]
        blocks.append(Heading(config or "outside of any config"))
        if own:
            blocks.append(_table(own))
        for cell in beside:
            mine = [row for each in own for row in each.rows.values() if row.cell == cell.cell]
            blocks += cell_notes(cell, mine)
        blocks += _disagreements(own)
        if full:
            blocks += _counters(own)
    blocks += _closing(rows, joined)
    return Document(
        schema=SCHEMA,
        title="Kernels under every profiler",
        blocks=tuple(blocks),
        fields=FIELDS,
        records=tuple(kernel_record(row) for row in rows),
        extra={
            "cells": [cell_record(cell) for cell in cells],
            "witnesses": [witness_record(each) for each in joined],
        },
    )


def witness_record(each: Witnesses) -> dict[str, Any]:
    """The JSON record of one kernel: what each profiler says, and where they disagree."""
    return {
        "config": each.config,
        "backend": each.backend,
        "kernel": each.kernel,
        "grid": each.grid,
        "block": each.block,
        "profilers": {
            profiler: {"run": row.run} | {name: getattr(row, name) for name in COMPARED}
            for profiler, row in each.rows.items()
        },
        "disagreements": [{"code": one.code, "text": one.text} for one in each.disagreements],
    }


def _table(joined: Sequence[Witnesses]) -> Table:
    """One line a kernel; a column that no kernel here has a value for is left out."""
    lines = [_values(each) for each in joined]
    shown = [key for key in FORMS if any(line[key] not in (None, ()) for line in lines)]
    rows = tuple(tuple("" if line[key] == () else line[key] for key in shown) for line in lines)
    return Table(tuple(FORMS[key] for key in shown), rows)


def _values(each: Witnesses) -> dict[str, Any]:
    achieved = each.metric(ACHIEVED_OCCUPANCY)
    moved = [value for name in DRAM_BYTES if (value := each.metric(name)) is not None]
    named = ("shared_bytes", "registers_per_thread", "launches_per_call")
    times = {name: each.rows[name].duration_ns if name in each.rows else None for name in PROFILERS}
    return {
        "backend": each.backend,
        "kernel_short": each.kernel_short,
        "grid": each.grid,
        "block": each.block,
        "achieved": None if achieved is None else achieved / 100,
        "dram": sum(moved) if moved else None,
        "disagree": tuple(dict.fromkeys(one.code for one in each.disagreements)),
        **{name: each.value(name) for name in named},
        **times,
    }


def _disagreements(joined: Sequence[Witnesses]) -> list[Note]:
    notes = [
        Note(f"{each.kernel_short}: {one.text}", each.backend or "", "warning")
        for each in joined
        for one in each.disagreements
    ]
    left = len(notes) - MAX_NOTES
    if left > 0:
        notes[MAX_NOTES:] = [Note(f"{left} more disagreements (--format json has them all)")]
    return notes


def _counters(joined: Sequence[Witnesses]) -> list[Block]:
    """Every counter of every kernel that ncu saw, besides those that have a column."""
    columns = (
        Column("backend", "backend", repeat=False),
        Column("kernel_short", "kernel", repeat=False, shrink=True),
        Column("metric", "metric"),
        Column("value", "value", "count", right=True),
        Column("unit", "unit"),
    )
    rows = tuple(
        (each.backend, each.kernel_short, name, value, unit)
        for each in joined
        if "ncu" in each.rows
        for name, (value, unit) in sorted(each.rows["ncu"].metrics.items())
        if name not in OWN_COLUMNS
    )
    return [Table(columns, rows)] if rows else []


def _closing(rows: Sequence[KernelRow], joined: Sequence[Witnesses]) -> list[Note]:
    """What holds for the whole table: which witnesses there are, and how to read ncu's times."""
    told = {row.profiler for row in rows}
    notes = []
    absent = [name for name in PROFILERS if name not in told]
    if absent and rows:
        notes.append(
            Note(
                f"no rows of {', '.join(absent)} here; "
                f"`profharness capture --profiler {','.join(PROFILERS)}` takes all three"
            )
        )
    ratios = cold_ratio(joined)
    if ratios:
        low, high = ratios
        notes.append(
            Note(
                f"ncu runs each kernel alone with cold caches: {low:.2f} to {high:.2f} times the "
                "time in the running program; take times from torch or nsys, counters from ncu"
            )
        )
    return notes
