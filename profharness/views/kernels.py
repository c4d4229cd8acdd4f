"""Kernels of cells as a Document: a heading per config, one table of its backends' kernels, a line
per backend without."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from profharness.answers.agreement import (
    JoinedKernel,
    cold_ratio,
    disagreements,
    join,
    replacement,
    replacement_text,
)
from profharness.rows import TRACE_PROFILERS, CellRow, KernelRow
from profharness.views.document import Block, Column, Document, Heading, Note, Table

SCHEMA = "profharness.kernels/1"


FIELDS = (
    *(
        "run",
        "config",
        "backend",
        "profiler",
        "status",
        "range",
        "kernel",
        "kernel_short",
        "family",
    ),
    *("grid", "block", "registers_per_thread", "static_shared_bytes", "dynamic_shared_bytes"),
    *("shared_bytes", "launches", "launches_per_call", "duration_ns", "total_ns", "share"),
    *("cell", "kernel_kind", "min_ns", "max_ns", "first_ns", "op", "sdpa_op", "occupancy"),
    *("occupancy_limiter", "device", "metrics"),
)
MINOR_SHARE = 0.005
_RENAMED = {"op": "op_path"}


# A heading's scope: run, and the config, or for a foreign trace the range.
_Scope = tuple[str, str | None, str | None]


def kernel_record(row: KernelRow) -> dict[str, Any]:
    """The JSON record of one kernel; keys as in FIELDS, durations in ns, sizes in bytes, grid and
    block as [x, y, z]."""
    record = {key: getattr(row, _RENAMED.get(key, key)) for key in FIELDS}
    record["metrics"] = {
        name: {"value": value, "unit": unit} for name, (value, unit) in row.metrics.items()
    }
    return record


def cell_record(cell: CellRow) -> dict[str, Any]:
    """The JSON record of one cell, without its raw samples."""
    return {
        "run": cell.run,
        "cell": cell.cell,
        "config": cell.config,
        "backend": cell.backend,
        "status": cell.status,
        "message": cell.message,
        "predicted": cell.predicted,
        "choice": cell.choice,
        "sdpa_op": cell.sdpa_op,
        "tuning": cell.tuning,
        "refusals": [asdict(refusal) for refusal in cell.refusals],
        "warnings": list(cell.warnings),
    }


def kernels_document(
    rows: Sequence[KernelRow], cells: Sequence[CellRow] = (), *, full: bool = False
) -> Document:
    """The answer of `profharness kernels`.

    rows and cells may come in any order; configs keep the order of their first mention, kernels
    that of their first launch.
    full shows whole kernel names instead of short ones.
    """
    several_runs = len({row.run for row in rows} | {cell.run for cell in cells}) > 1
    columns = kernel_columns(rows, full=full)
    blocks: list[Block] = []
    for scope in _scopes(rows, cells):
        run, config, range_name = scope
        own = [row for row in rows if _scope(row) == scope]
        beside = [cell for cell in cells if (cell.run, cell.config, None) == scope]
        blocks.append(Heading(_title(config, range_name), f"run {run}" if several_runs else ""))
        if own:
            order = _backend_order(beside, own)
            own.sort(key=lambda row: (order[row.backend], row.profiler, row.device, row.first_ns))
            shown = own if full else [row for row in own if not is_minor(row)]
            blocks.append(Table(columns, tuple(_table_row(columns, row) for row in shown)))
            blocks += _left_out(own) if not full else []
        for cell in beside:
            blocks += cell_notes(cell, [row for row in own if row.cell == cell.cell])
    return Document(
        schema=SCHEMA,
        title="Kernels",
        blocks=tuple(blocks),
        fields=FIELDS,
        records=tuple(kernel_record(row) for row in rows),
        extra={"cells": [cell_record(cell) for cell in cells]},
    )


def is_minor(row: KernelRow) -> bool:
    """Whether a row is an op on the CPU (a view, an allocation) that takes next to no time."""
    return row.kernel_kind == "op" and row.share is not None and row.share < MINOR_SHARE


def _left_out(rows: Sequence[KernelRow]) -> list[Note]:
    """One line per backend with minor ops: how many there are, and what they take together."""
    minor: dict[str, list[KernelRow]] = {}
    for row in filter(is_minor, rows):
        minor.setdefault(row.backend or "", []).append(row)
    return [
        Note(
            f"{len(mine)} more ops of under {MINOR_SHARE:.1%} each, {share:.1%} together (--full shows them)",
            backend,
        )
        for backend, mine in minor.items()
        for share in [sum(row.share or 0 for row in mine)]
    ]


def kernel_columns(rows: Iterable[KernelRow], *, full: bool) -> tuple[Column, ...]:
    """The columns for these rows: profiler and device only where they differ, a whole kernel name
    last."""
    rows = list(rows)
    foreign = bool(rows) and all(row.cell is None for row in rows)
    lead = [] if foreign else [Column("backend", "backend", repeat=False)]
    if len({row.profiler for row in rows}) > 1:
        lead.append(Column("profiler", "profiler", repeat=False))
    if len({row.device for row in rows}) > 1:
        lead.append(Column("device", "gpu", "count", right=True))
    figures = [
        Column("grid", "grid", "triple", right=True),
        Column("block", "block", "triple", right=True),
        Column("shared_bytes", "KiB", "kib", right=True),
        Column("registers_per_thread", "regs", "count", right=True),
        Column("launches", "n", "count", right=True)
        if foreign
        else Column("launches_per_call", "n/call", "count", right=True),
        Column("duration_ns", "µs", "us", right=True),
        Column("share", "share%", "percent", right=True),
        Column("occupancy", "occ%", "percent", right=True),
    ]
    if full:
        return (*lead, *figures, Column("kernel", "kernel"))
    return (*lead, Column("kernel_short", "kernel", shrink=True), *figures)


def _table_row(columns: tuple[Column, ...], row: KernelRow) -> tuple[Any, ...]:
    return tuple(getattr(row, column.key) for column in columns)


def _scope(row: KernelRow) -> _Scope:
    return (row.run, row.config, None if row.config is not None else row.range or "")


def _scopes(rows: Sequence[KernelRow], cells: Sequence[CellRow]) -> list[_Scope]:
    """Every scope once: cells in their order, then what only kernels mention."""
    named = [(cell.run, cell.config, None) for cell in cells]
    return list(dict.fromkeys([*named, *map(_scope, rows)]))


def _title(config: str | None, range_name: str | None) -> str:
    if config is not None:
        return config
    return f"range {range_name}" if range_name else "outside of any range"


def _backend_order(cells: Sequence[CellRow], rows: Sequence[KernelRow]) -> dict[str | None, int]:
    names = dict.fromkeys([*(cell.backend for cell in cells), *(row.backend for row in rows)])
    return {name: place for place, name in enumerate(names)}


def cell_notes(cell: CellRow, rows: Sequence[KernelRow]) -> list[Note]:
    """What is to be said below the table: why a backend has no kernels, what torch.compile
    replaced, each disagreement of the four witnesses, warnings."""
    notes: list[Note] = []
    if cell.status != "ok":
        level = "note" if cell.status == "refused" else "error"
        notes.append(Note(f"{cell.status}: {_reason(cell)}", cell.backend, level))
    elif not rows:
        notes.append(
            Note("no kernels recorded by the profilers asked for", cell.backend, "warning")
        )
    replaced = replacement(cell, rows)
    if replaced is not None:
        notes.append(Note(replacement_text(replaced.took), cell.backend, "warning"))
    notes += [Note(text, cell.backend, "warning") for text in disagreements(cell, rows)]
    notes += [Note(text, cell.backend, "warning") for text in cell.warnings]
    return notes


def _reason(cell: CellRow) -> str:
    texts = [refusal.message for refusal in cell.refusals]
    if cell.message and (cell.status != "refused" or not texts):
        texts.insert(0, cell.message)
    return "; ".join(dict.fromkeys(texts)) or "no reason recorded"


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
        *(Column(name, f"{name} µs", "us", right=True) for name in TRACE_PROFILERS),
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


def witness_record(each: JoinedKernel) -> dict[str, Any]:
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


def _table(joined: Sequence[JoinedKernel]) -> Table:
    """One line a kernel; a column that no kernel here has a value for is left out."""
    lines = [_values(each) for each in joined]
    shown = [key for key in FORMS if any(line[key] not in (None, ()) for line in lines)]
    rows = tuple(tuple("" if line[key] == () else line[key] for key in shown) for line in lines)
    return Table(tuple(FORMS[key] for key in shown), rows)


def _values(each: JoinedKernel) -> dict[str, Any]:
    achieved = each.metric(ACHIEVED_OCCUPANCY)
    moved = [value for name in DRAM_BYTES if (value := each.metric(name)) is not None]
    named = ("shared_bytes", "registers_per_thread", "launches_per_call")
    times = {
        name: each.rows[name].duration_ns if name in each.rows else None for name in TRACE_PROFILERS
    }
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


def _disagreements(joined: Sequence[JoinedKernel]) -> list[Note]:
    notes = [
        Note(f"{each.kernel_short}: {one.text}", each.backend or "", "warning")
        for each in joined
        for one in each.disagreements
    ]
    left = len(notes) - MAX_NOTES
    if left > 0:
        notes[MAX_NOTES:] = [Note(f"{left} more disagreements (--format json has them all)")]
    return notes


def _counters(joined: Sequence[JoinedKernel]) -> list[Block]:
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


def _closing(rows: Sequence[KernelRow], joined: Sequence[JoinedKernel]) -> list[Note]:
    """What holds for the whole table: which witnesses there are, and how to read ncu's times."""
    told = {row.profiler for row in rows}
    notes = []
    absent = [name for name in TRACE_PROFILERS if name not in told]
    if absent and rows:
        notes.append(
            Note(
                f"no rows of {', '.join(absent)} here; "
                f"`profharness capture --profiler {','.join(TRACE_PROFILERS)}` takes all three"
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
