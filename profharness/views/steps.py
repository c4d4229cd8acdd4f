"""The steps of each backend: `kernels --steps` with what is no kernel, memory and speed-up, and the
steps of math in a report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from statistics import median
from typing import Any

from profharness.answers.agreement import backend_of_op
from profharness.answers.roles import (
    MATH_OP,
    assign_roles,
    by_role,
    call_ns,
    launches_per_call,
    score_dtype,
)
from profharness.columns import Column, pick
from profharness.config import Config, parse_config
from profharness.costs import copy_bytes, matrix_bytes, tensor_bytes
from profharness.kernel_names import parse_kernel_name
from profharness.rows import COLD, EAGER, EVENT, GRAPH, HOST, WALL, CellRow, KernelRow
from profharness.views.document import (
    Block,
    Chart,
    Document,
    Heading,
    Note,
    Table,
    filled_columns,
    status_note,
)

SCHEMA = "profharness.steps/1"
CALL_TIMES = (EAGER, HOST, COLD, EVENT, WALL)
BY_CALL = tuple(f"{name}_ns" for name in CALL_TIMES)
LAUNCH = ("grid", "block", "shared_bytes", "occupancy")
FIELDS = (
    *("run", "config", "backend", "cell", "profiler", "step", "launches_per_call", "mean_ns"),
    *("call_ns", "share", "kernels", "tile"),
    # of the whole call, the same in all steps of a cell
    *("kernels_ns", "graph_ns", *BY_CALL, "speedup", "peak_memory_bytes"),
    *("peak_over_output", "score_matrices", "growth"),
    # of the step's longest kernel, as tile is
    *LAUNCH,
)
GAPS = "launch gaps"
WAITING = "waiting for the host"
REFILL = "cold refill"
# what of it a run's measurements cannot tell apart
JOINED = (f"{GAPS}, {WAITING}", f"{REFILL}, {WAITING}", f"{GAPS}, {REFILL}, {WAITING}")
BEYOND_KERNELS = (GAPS, WAITING, REFILL, *JOINED)
OTHER = "other"
MIB = 1 << 20
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
ORDER = {step: place for place, step in enumerate([*dict(STEPS), *BEYOND_KERNELS])}


STEP_COLUMNS = (
    Column("backend", "backend", repeat=False),
    Column("step", "step"),
    Column("launches_per_call", "n/call", "count"),
    Column("mean_ns", "µs each", "us"),
    Column("call_ns", "µs/call", "us"),
    Column("share", "share%", "percent"),
    Column("tile", "tile"),
    *pick(KernelRow, *LAUNCH),
    Column("kernels", "kernels", "names", shrink=True),
)
MATH_COLUMNS = (
    Column("config", "config", repeat=False),
    Column("backend", "backend", repeat=False),
    Column("step", "step"),
    Column("launches", "n/call", "count"),
    Column("ns", "µs/call", "us"),
    Column("share", "share%", "percent"),
)
BACKEND_COLUMNS = (
    Column("backend", "backend"),
    Column("kernels_ns", "kernel µs", "us"),
    Column("graph_ns", "graph µs", "us"),
    *(Column(f"{name}_ns", f"{name} µs", "us") for name in CALL_TIMES),
    Column("speedup", "speed-up", "ratio"),
    Column("peak_mib", "peak MiB", "count"),
    Column("peak_over_output", "peak / output", "count"),
    Column("score_matrices", "score matrices", "count"),
    Column("growth", "grows with"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one cell, times in ns. share is of the eager call, of an older run's event sample or
    the CPU's clock, else of the kernels; None for what an eager call does not hold. tile, and what
    follows kernels and profiler, is that of its longest kernel.
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
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None


def steps_of(cell: CellRow, rows: Sequence[KernelRow], *, full: bool = False) -> list[Step]:
    """The steps of one cell in the order of STEPS, what is no kernel last; rows are one profiler's.
    full: with whole kernel names.
    """
    grouped: dict[str, list[KernelRow]] = {}
    for role, row in assign_roles(rows):
        grouped.setdefault(STEP_OF.get(role, OTHER), []).append(row)
    busy = sum(call_ns(row, cell.iterations) or 0 for row in rows)
    whole = max(busy, _median(cell, EAGER, EVENT, GRAPH, WALL) or 0)
    names = attrgetter("kernel" if full else "kernel_short")
    steps = [_step(cell, name, mine, whole, names) for name, mine in grouped.items()]
    if rows and rows[0].kernel_kind != "op":
        for name, time in _beyond_kernels(cell, busy):
            share = None if name == REFILL else time / whole
            steps.append(Step(cell.backend, name, None, None, time, share, None, (), None))
    return sorted(steps, key=lambda step: ORDER[step.step])


def _beyond_kernels(cell: CellRow, busy: float) -> Iterator[tuple[str, float]]:
    """What a call takes besides its kernels, in ns: between them on the GPU, for the CPU to issue them,
    and for what a flushed L2 has to read again.
    """
    graph = _median(cell, GRAPH)
    replay = max(busy, graph or 0)
    eager, cold, event = (_median(cell, name) for name in (EAGER, COLD, EVENT))
    losses = [(GAPS, replay - busy)]
    if eager is not None:
        losses.append((WAITING if graph else JOINED[0], eager - replay))
    if cold is not None:
        losses.append((REFILL, cold - replay))
    elif eager is None and event is not None:
        losses.append((JOINED[1] if graph else JOINED[2], event - replay))
    yield from ((name, time) for name, time in losses if time > 0)


def steps_document(
    rows: Sequence[KernelRow], cells: Sequence[CellRow], *, full: bool = False
) -> Document:
    """The answer of `kernels --steps`: a step table and a table of backends for every config. full
    shows whole kernel names.
    """
    columns = (*STEP_COLUMNS[:-1], replace(STEP_COLUMNS[-1], shrink=not full))
    blocks: list[Block] = []
    records: list[dict[str, Any]] = []
    for run, label in dict.fromkeys((cell.run, cell.config) for cell in cells):
        own = [cell for cell in cells if (cell.run, cell.config) == (run, label)]
        rows_of = {
            cell.cell: [r for r in rows if (r.run, r.cell) == (run, cell.cell)] for cell in own
        }
        steps = {cell.cell: steps_of(cell, rows_of[cell.cell], full=full) for cell in own}
        on_gpu = any(row.kernel_kind != "op" for row in rows)
        config = parse_config(label).resolve("cuda" if on_gpu else "cpu")
        shown = [step for cell in own for step in steps[cell.cell]]
        blocks.append(Heading(label))
        if shown:
            blocks.append(Table.of(filled_columns(columns, shown, LAUNCH), shown))
        of_cell = _backends(config, own, steps, rows_of)
        blocks += _backend_blocks(config, own, of_cell, rows_of)
        for cell in own:
            if cell.status != "ok":
                blocks.append(status_note(cell.status, cell.reason or "", cell.backend))
            place = {"run": cell.run, "config": cell.config, "cell": cell.cell}
            place |= of_cell.get(cell.cell, {})
            for step in steps[cell.cell]:
                values = asdict(step) | place
                records.append({name: values[name] for name in FIELDS})
    if not cells:
        blocks.append(Note("steps need the cells of a captured run; a foreign trace has none"))
    return Document(SCHEMA, "Steps", tuple(blocks), FIELDS, tuple(records))


def _step(
    cell: CellRow,
    name: str,
    rows: Sequence[KernelRow],
    whole_ns: float,
    name_of: Callable[[KernelRow], str],
) -> Step:
    per_call = sum(launches_per_call(row, cell.iterations) for row in rows)
    times = [call_ns(row, cell.iterations) for row in rows]
    measured = [time for time in times if time is not None]
    total = sum(measured) if len(measured) == len(times) else None
    longest = max(rows, key=lambda row: row.total_ns or 0)
    return Step(
        backend=cell.backend,
        step=name,
        launches_per_call=per_call,
        mean_ns=total / per_call if total is not None and per_call else None,
        call_ns=total,
        share=total / whole_ns if total is not None and whole_ns else None,
        tile=parse_kernel_name(longest.kernel, longest.kernel_kind).tile,
        kernels=tuple(dict.fromkeys(map(name_of, rows))),
        profiler=longest.profiler,
        **{name: getattr(longest, name) for name in LAUNCH},
    )


def _median(cell: CellRow, *names: str) -> float | None:
    """The median of the first of these measurements that the cell has."""
    name = next((name for name in names if cell.samples.get(name)), None)
    return float(median(cell.samples[name])) if name else None


def _backends(
    config: Config,
    cells: Sequence[CellRow],
    steps: dict[str, list[Step]],
    rows_of: dict[str, list[KernelRow]],
) -> dict[str, dict[str, Any]]:
    """Times, speed-up against the slowest, and peak memory of the cells that ran."""
    done = [cell for cell in cells if cell.status == "ok"]
    kernels_ns = {cell.cell: _kernels_ns(cell, steps[cell.cell]) for cell in done}
    basis = {cell.cell: kernels_ns[cell.cell] or _median(cell, COLD, EVENT, WALL) for cell in done}
    slowest = max((time for time in basis.values() if time), default=None)
    rows = {}
    for cell in done:
        peak, time = cell.peak_memory_bytes, basis[cell.cell]
        dtype = _score_dtype(config, rows_of[cell.cell])
        # where copies are the larger part, the peak says nothing of score matrices
        matrix = matrix_bytes(config, dtype) if dtype else 0
        conclusive = dtype and copy_bytes(config, dtype) < matrix
        rows[cell.cell] = {
            "backend": cell.backend,
            "kernels_ns": kernels_ns[cell.cell],
            "graph_ns": _median(cell, GRAPH),
            **{f"{name}_ns": _median(cell, name) for name in CALL_TIMES},
            "speedup": slowest / time if slowest and time else None,
            "peak_memory_bytes": peak,
            "peak_over_output": peak and peak / tensor_bytes(config).output,
            "score_matrices": peak / matrix if peak and conclusive else None,
            "growth": _growth(config, dtype) if steps[cell.cell] else None,
        }
    return rows


def _backend_blocks(
    config: Config,
    cells: Sequence[CellRow],
    of_cell: dict[str, dict[str, Any]],
    rows_of: dict[str, list[KernelRow]],
) -> list[Block]:
    """The table of backends and what it rests on."""
    if not of_cell:
        return []
    dtypes = [_score_dtype(config, rows_of[cell]) for cell in of_cell]
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
    lines = [row | {"peak_mib": _mib(row["peak_memory_bytes"])} for row in of_cell.values()]
    columns = filled_columns(BACKEND_COLUMNS, lines, BY_CALL)
    return [Table.of(columns, lines), Note(text)]


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB


def _score_dtype(config: Config, rows: Sequence[KernelRow]) -> str | None:
    """The dtype of a cell's score matrices, None where it made none."""
    roles = assign_roles(rows)
    names = [(role, parse_kernel_name(row.kernel, row.kernel_kind).dtype) for role, row in roles]
    return score_dtype(str(config.dtype), names)


def _growth(config: Config, score_dtype: str | None) -> str:
    """What a call's memory grows with, by its shapes: S is the length of queries and keys alike,
    S_q and S_kv are the two of a config where they differ.
    """
    if config.seq_len_q == config.seq_len_kv:
        return "S^2" if score_dtype else "S"
    if not score_dtype:
        return "S_q"
    return "S_kv" if config.seq_len_q == 1 else "S_q x S_kv"


def _memory_text(config: Config, dtypes: Sequence[str]) -> str:
    """What fused and unfused calls hold; dtypes are those of score matrices."""
    output, held = tensor_bytes(config).output, []
    for dtype in dict.fromkeys(dtypes):
        text = f"one score matrix in {dtype} {matrix_bytes(config, dtype) / MIB:.2f} MiB"
        if copies := copy_bytes(config, dtype):
            text += f" (repeated and cast inputs {copies / MIB:.2f} MiB)"
        held.append(text)
    lines = ", ".join([f"output {output / MIB:.2f} MiB", *held])
    unfused, fused = (_growth(config, dtype) for dtype in ("fp32", None))
    return (
        f"{lines}: backends with a softmax of their own hold score matrices and what they repeat or "
        f"cast, and grow with {unfused}; fused ones hold what is of the output's size and grow with "
        f"{fused}; "
    )


def _kernels_ns(cell: CellRow, steps: Sequence[Step]) -> float | None:
    """Sum of the steps on a device; None for a CPU's ops, whose sum is not a latency."""
    own = [step for step in steps if step.step not in BEYOND_KERNELS]
    if not own or WALL in cell.samples or any(step.call_ns is None for step in own):
        return None
    return sum(step.call_ns or 0 for step in own)


def math_blocks(rows: Sequence[KernelRow]) -> list[Block]:
    """What the steps of math take in a call, from one profiler's rows; fused cells are left out."""
    cells: dict[tuple[str, str], list[KernelRow]] = {}
    for row in rows:
        if row.config is not None:
            cells.setdefault((row.config, row.backend or ""), []).append(row)
    steps: list[dict[str, Any]] = []
    for (config, backend), mine in cells.items():
        paths = [(row.op_path or "").split(";") for row in mine]
        named = any(backend_of_op(row.sdpa_op) == "math" for row in mine)
        if named or any(MATH_OP in path for path in paths):
            steps += [{"config": config, "backend": backend} | step for step in _math_steps(mine)]
    if not steps:
        return []
    points = tuple(
        {
            "cell": f"{step['config']} {step['backend']}",
            "µs": step["ns"] / 1e3,
            "step": step["step"],
        }
        for step in steps
        if step["ns"] > 0
    )
    return [
        Heading("Steps of math"),
        Chart("stack", "Kernel time by step", points, "µs", "cell", "step", "µs a call"),
        Table.of(MATH_COLUMNS, steps),
        Note("kernel time alone: gaps between launches are not in it"),
    ]


def _math_steps(rows: Sequence[KernelRow]) -> Iterator[dict[str, Any]]:
    total = sum(row.total_ns or 0 for row in rows)
    grouped: dict[str, list[KernelRow]] = {}
    for role, mine in by_role(rows).items():
        grouped.setdefault(STEP_OF.get(role, OTHER), []).extend(mine)
    for step, own in sorted(grouped.items(), key=lambda item: ORDER[item[0]]):
        launches = sum(launches_per_call(row, 1) for row in own)
        ns = sum(call_ns(row, 1) or 0 for row in own)
        share = sum(row.total_ns or 0 for row in own) / total if total else 0.0
        yield {"step": step, "launches": launches, "ns": ns, "share": share}
