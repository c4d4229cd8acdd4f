"""`profharness kernels --steps`: the steps of each backend, launch gaps, memory, and speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from profharness.answers.roles import assign_roles
from profharness.config import Config, parse_config
from profharness.costs import tensor_bytes
from profharness.kernel_names import parse_kernel_name
from profharness.rows import CellRow, KernelRow
from profharness.views.document import Block, Column, Document, Heading, Note, Table

SCHEMA = "profharness.steps/1"
FIELDS = (
    *("run", "config", "backend", "cell", "profiler", "step", "launches_per_call", "mean_ns"),
    *("call_ns", "share", "kernels", "tile"),
)
GAPS = "launch gaps"
OTHER = "other"
SCORE_STEPS = ("QK^T", "softmax", "PV", "QK^T and PV")
# In the order in which they are shown: what a step is, and the roles that belong to it.
STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("attention",)),
    ("combine", ("combine",)),
    ("QK^T", ("qk",)),
    ("scale and mask", ("scale", "mask")),
    ("softmax", ("softmax", "softmax_guard")),
    ("dropout", ("dropout",)),
    ("PV", ("pv",)),
    ("QK^T and PV", ("qk+pv",)),
    ("casts, copies, fills", ("cast", "copy", "memory")),
    ("attention backward", ("attention_bwd", "bwd_preprocess", "bwd_postprocess", "bwd_init")),
    ("dV and dP", ("dV", "dP", "dV+dP")),
    ("softmax backward", ("softmax_bwd",)),
    ("dQ and dK", ("dQ", "dK", "dK+dQ")),
    ("products backward", ("gemm_bwd",)),
    ("scale and mask backward", ("scale_bwd", "mask_bwd")),
    ("dropout backward", ("dropout_bwd",)),
    ("casts, copies, fills backward", ("cast_bwd", "copy_bwd", "memory_bwd", "reduce_bwd")),
    (OTHER, ("helper", "helper_bwd", "grad_init", "grad_accumulate")),
)
STEP_OF = {role: step for step, roles in STEPS for role in roles}
ORDER = {step: place for place, (step, _) in enumerate(STEPS)} | {GAPS: len(STEPS)}


STEP_COLUMNS = (
    Column("backend", "backend", repeat=False),
    Column("step", "step"),
    Column("launches_per_call", "n/call", "count", right=True),
    Column("mean_ns", "µs each", "us", right=True),
    Column("call_ns", "µs/call", "us", right=True),
    Column("share", "share%", "percent", right=True),
    Column("tile", "tile"),
    Column("kernels", "kernels", "names", shrink=True),
)
BACKEND_COLUMNS = (
    Column("backend", "backend"),
    Column("kernel_ns", "kernel µs", "us", right=True),
    Column("graph_ns", "graph µs", "us", right=True),
    Column("event_ns", "event µs", "us", right=True),
    Column("speedup", "speed-up", "ratio", right=True),
    Column("peak_mib", "peak MiB", "count", right=True),
    Column("over_output", "peak / output", "count", right=True),
    Column("matrices", "score matrices", "count", right=True),
    Column("growth", "grows with"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one cell. Times in ns: mean_ns of one launch, call_ns of all in one call; share
    is of the call (its event or wall time if that was taken, else the sum of its kernels). tile
    is that of its longest kernel, from the kernel's name.
    """

    backend: str
    step: str
    launches_per_call: float | None
    mean_ns: float | None
    call_ns: float | None
    share: float | None
    tile: str | None
    kernels: tuple[str, ...]
    profiler: str | None


def steps_of(cell: CellRow, rows: Sequence[KernelRow]) -> list[Step]:
    """The steps of one cell in the order of STEPS, launch gaps last; rows of one profiler, best
    asked with by_op."""
    grouped: dict[str, list[KernelRow]] = {}
    for role, row in assign_roles(rows):
        grouped.setdefault(STEP_OF.get(role, OTHER), []).append(row)
    busy = sum(_call_ns(row, cell) or 0 for row in rows)
    whole = max(busy, _whole_call_ns(cell) or 0)
    found = [_step(cell, name, mine, whole) for name, mine in grouped.items()]
    if rows and rows[0].kernel_kind != "op" and whole > busy:
        gap = whole - busy
        found.append(Step(cell.backend, GAPS, None, None, gap, gap / whole, None, (), None))
    return sorted(found, key=lambda step: ORDER[step.step])


def steps_document(rows: Sequence[KernelRow], cells: Sequence[CellRow]) -> Document:
    """The answer of `kernels --steps`: a step table and a table of backends for every config."""
    blocks: list[Block] = []
    records: list[dict[str, Any]] = []
    for run, label in dict.fromkeys((cell.run, cell.config) for cell in cells):
        own = [cell for cell in cells if (cell.run, cell.config) == (run, label)]
        steps = {
            cell.cell: steps_of(cell, [r for r in rows if (r.run, r.cell) == (run, cell.cell)])
            for cell in own
        }
        config = _with_dtype(parse_config(label), rows)
        shown = [step for cell in own for step in steps[cell.cell]]
        blocks.append(Heading(label))
        if shown:
            blocks.append(Table(STEP_COLUMNS, tuple(_cells(STEP_COLUMNS, s) for s in shown)))
        blocks += _backends(config, own, steps)
        for cell in own:
            if cell.status != "ok":
                reason = cell.message or "; ".join(refusal.message for refusal in cell.refusals)
                level = "note" if cell.status == "refused" else "error"
                blocks.append(Note(f"{cell.status}: {reason}", cell.backend, level))
            records += [_record(cell, step) for step in steps[cell.cell]]
    if not cells:
        blocks.append(Note("steps need the cells of a captured run; a foreign trace has none"))
    return Document(SCHEMA, "Steps", tuple(blocks), FIELDS, tuple(records))


def _record(cell: CellRow, step: Step) -> dict[str, Any]:
    record = {name: getattr(step, name, None) for name in FIELDS}
    return record | {"run": cell.run, "config": cell.config, "cell": cell.cell}


def _cells(columns: Sequence[Column], item: Any) -> tuple[Any, ...]:
    return tuple(getattr(item, column.key) for column in columns)


def _step(cell: CellRow, name: str, rows: Sequence[KernelRow], whole_ns: float) -> Step:
    per_call = sum(_per_call(row, cell) for row in rows)
    times = [_call_ns(row, cell) for row in rows]
    known = [each for each in times if each is not None]
    total = sum(known) if len(known) == len(times) else None
    longest = max(rows, key=lambda row: row.total_ns or 0)
    return Step(
        backend=cell.backend,
        step=name,
        launches_per_call=per_call,
        mean_ns=total / per_call if total is not None and per_call else None,
        call_ns=total,
        share=total / whole_ns if total is not None and whole_ns else None,
        tile=parse_kernel_name(longest.kernel, longest.kernel_kind).tile,
        kernels=tuple(dict.fromkeys(row.kernel_short for row in rows)),
        profiler=longest.profiler,
    )


def _per_call(row: KernelRow, cell: CellRow) -> float:
    return row.launches_per_call or row.launches / max(1, cell.iterations)


def _call_ns(row: KernelRow, cell: CellRow) -> float | None:
    """Time of a row's launches in one call."""
    if row.total_ns is None:
        return None
    return row.total_ns / row.launches * _per_call(row, cell)


def _whole_call_ns(cell: CellRow) -> float | None:
    name = next((name for name in ("event", "wall") if cell.samples.get(name)), None)
    return float(median(cell.samples[name])) if name else None


def _backends(
    config: Config, cells: Sequence[CellRow], steps: dict[str, list[Step]]
) -> list[Block]:
    """Times, speed-up against the slowest, and peak memory of the backends that ran."""
    done = [cell for cell in cells if cell.status == "ok"]
    if not done:
        return []
    kernel_ns = {cell.cell: _kernel_ns(cell, steps[cell.cell]) for cell in done}
    basis = {cell.cell: kernel_ns[cell.cell] or _whole_call_ns(cell) for cell in done}
    known = [time for time in basis.values() if time]
    slowest = max(known, default=None)
    tensors = tensor_bytes(config)
    rows = []
    for cell in done:
        names = {step.step for step in steps[cell.cell]}
        unfused = bool(names & set(SCORE_STEPS)) and "attention" not in names
        peak, time = cell.peak_memory_bytes, basis[cell.cell]
        rows.append(
            (
                cell.backend,
                kernel_ns[cell.cell],
                _median(cell, "graph"),
                _whole_call_ns(cell),
                slowest / time if slowest and time else None,
                peak / (1 << 20) if peak is not None else None,
                peak / tensors.output if peak is not None else None,
                peak / tensors.scores if peak is not None and unfused else None,
                ("S^2" if unfused else "S") if names else None,
            )
        )
    text = (
        f"output {tensors.output / (1 << 20):.2f} MiB, one score matrix in fp32 "
        f"{tensors.scores / (1 << 20):.2f} MiB: backends with a softmax of their own hold score "
        "matrices and grow with S^2, fused ones hold what is of the output's size and grow with S; "
        "speed-up is of kernel times, against the slowest; launch gaps are the event time less the "
        "kernels, refilling the flushed L2 included"
    )
    return [Table(BACKEND_COLUMNS, tuple(rows)), Note(text)]


def _kernel_ns(cell: CellRow, steps: Sequence[Step]) -> float | None:
    """Sum of the steps on a device; None for a CPU's ops, whose sum is not a latency."""
    own = [step for step in steps if step.step != GAPS]
    if not own or "wall" in cell.samples or any(step.call_ns is None for step in own):
        return None
    return sum(step.call_ns or 0 for step in own)


def _median(cell: CellRow, name: str) -> float | None:
    return float(median(cell.samples[name])) if cell.samples.get(name) else None


def _with_dtype(config: Config, rows: Sequence[KernelRow]) -> Config:
    on_gpu = any(row.kernel_kind != "op" for row in rows)
    return config.resolve("cuda" if on_gpu else "cpu")
