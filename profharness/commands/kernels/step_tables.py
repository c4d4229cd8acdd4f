"""Show the steps of each backend: `kernels --steps`, and the steps of math in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from profharness.attention.config import Config, parse_config
from profharness.attention.costs import copy_bytes, matrix_bytes, tensor_bytes
from profharness.columns import columns_of, pick
from profharness.commands.kernels.steps import (
    CALL_TIMES,
    GAPS,
    LAUNCH,
    REFILL,
    WAITING,
    CallFigures,
    MathStep,
    Step,
    compare_calls,
    find_math_steps,
    find_steps,
    memory_growth,
    score_matrix_dtype,
)
from profharness.device_types import CPU, CUDA
from profharness.render.document import (
    Block,
    Chart,
    Document,
    Heading,
    Note,
    Table,
    field_names,
    filled_columns,
    status_note,
)
from profharness.rows import EAGER, WALL, CellRow, KernelRow

MIB = 1 << 20
SCHEMA = "profharness.steps/1"
BY_CALL = tuple(f"{name}_ns" for name in CALL_TIMES)
FIELDS = (
    *("run", "config", "backend", "cell", "profiler", "step", "launches_per_call", "mean_ns"),
    *("call_ns", "share", "kernels", "tile"),
    # the same in all steps of a cell
    *field_names(CallFigures)[1:],
    *LAUNCH,
)
STEP_COLUMNS = (
    *pick(Step, "backend", "step", "launches_per_call", "mean_ns", "call_ns", "share", "tile"),
    *pick(KernelRow, *LAUNCH),
    *pick(Step, "kernels"),
)
MATH_COLUMNS = tuple(columns_of(MathStep).values())
CALL_COLUMNS = tuple(columns_of(CallFigures).values())


def steps_document(
    rows: Sequence[KernelRow], cells: Sequence[CellRow], *, full: bool = False
) -> Document:
    """Return the document of `kernels --steps`: tables of steps and of backends for every config.

    With `full`, kernel names are not shortened.
    """
    columns = (*STEP_COLUMNS[:-1], replace(STEP_COLUMNS[-1], shrink=not full))
    blocks: list[Block] = []
    records: list[dict[str, Any]] = []
    for run, label in dict.fromkeys((cell.run, cell.config) for cell in cells):
        own = [cell for cell in cells if (cell.run, cell.config) == (run, label)]
        rows_of = {
            cell.cell: [r for r in rows if (r.run, r.cell) == (run, cell.cell)] for cell in own
        }
        steps = {cell.cell: find_steps(cell, rows_of[cell.cell], full=full) for cell in own}
        on_gpu = any(row.kernel_kind != "op" for row in rows)
        config = parse_config(label).resolve(CUDA if on_gpu else CPU)
        shown = [step for cell in own for step in steps[cell.cell]]
        blocks.append(Heading(label))
        if shown:
            blocks.append(Table.of(filled_columns(columns, shown, LAUNCH), shown))
        figures = compare_calls(config, own, steps, rows_of)
        blocks += _call_blocks(config, own, figures, rows_of)
        for cell in own:
            if cell.status != "ok":
                blocks.append(status_note(cell.status, cell.reason or "", cell.backend))
            place = {"run": cell.run, "config": cell.config, "cell": cell.cell}
            of_call = asdict(figures[cell.cell]) if cell.cell in figures else {}
            for step in steps[cell.cell]:
                values = asdict(step) | place | of_call
                records.append({name: values[name] for name in FIELDS})
    if not cells:
        blocks.append(Note("steps need the cells of a captured run; a foreign trace has none"))
    return Document(SCHEMA, "Steps", tuple(blocks), FIELDS, tuple(records))


def _call_blocks(
    config: Config,
    cells: Sequence[CellRow],
    figures: Mapping[str, CallFigures],
    rows_of: Mapping[str, Sequence[KernelRow]],
) -> list[Block]:
    """Return the table of backends and the definition of its figures."""
    if not figures:
        return []
    dtypes = [score_matrix_dtype(config, rows_of[cell]) for cell in figures]
    text = _memory_text(config, [dtype for dtype in dtypes if dtype])
    if any(WALL in cell.samples for cell in cells):
        text += "speed-up is of the CPU's wall clock, against the slowest"
    else:
        text += (
            f"speed-up is of kernel times, against the slowest; {GAPS} are the graph time less the "
            "kernels"
        )
    if any(EAGER in cell.samples for cell in cells):
        text += f", {WAITING} is the eager time less the graph's, {REFILL} the cold time less the graph's"
    lines = list(figures.values())
    return [Table.of(filled_columns(CALL_COLUMNS, lines, BY_CALL), lines), Note(text)]


def _memory_text(config: Config, dtypes: Sequence[str]) -> str:
    """Describe the memory of fused and unfused calls. `dtypes` are those of score matrices."""
    output, parts = tensor_bytes(config).output, []
    for dtype in dict.fromkeys(dtypes):
        text = f"one score matrix in {dtype} {matrix_bytes(config, dtype) / MIB:.2f} MiB"
        if copies := copy_bytes(config, dtype):
            text += f" (repeated and cast inputs {copies / MIB:.2f} MiB)"
        parts.append(text)
    lines = ", ".join([f"output {output / MIB:.2f} MiB", *parts])
    unfused, fused = (memory_growth(config, dtype) for dtype in ("fp32", None))
    return (
        f"{lines}: backends with a softmax of their own hold score matrices and what they repeat or "
        f"cast, and grow with {unfused}; fused ones hold what is of the output's size and grow with "
        f"{fused}; "
    )


def math_blocks(rows: Sequence[KernelRow]) -> list[Block]:
    """Return the blocks about cells that math computed. `rows` are those of one profiler."""
    steps = find_math_steps(rows)
    if not steps:
        return []
    points = tuple(
        {"cell": f"{step.config} {step.backend}", "µs": step.ns / 1e3, "step": step.step}
        for step in steps
        if step.ns > 0
    )
    return [
        Heading("Steps of math"),
        Chart("stack", "Kernel time by step", points, "µs", "cell", "step", "µs a call"),
        Table.of(MATH_COLUMNS, steps),
        Note("kernel time alone: gaps between launches are not in it"),
    ]
