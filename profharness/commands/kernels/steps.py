"""The steps of an attention call, such as QK^T and softmax, and what the call takes besides kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from statistics import median
from typing import Annotated, Any

from profharness.attention.config import Config, parse_config
from profharness.attention.costs import copy_bytes, matrix_bytes, tensor_bytes
from profharness.columns import column, columns_of, pick
from profharness.device_types import CPU, CUDA
from profharness.measurements.agreement import backend_of_op
from profharness.program.roles import (
    MATH_OP,
    assign_roles,
    call_ns,
    launches_per_call,
    score_dtype,
)
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
from profharness.rows import COLD, EAGER, EVENT, GRAPH, HOST, WALL, CellRow, KernelRow, Triple
from profharness.traces.kernel_names import parse_kernel_name

CALL_TIMES = (EAGER, HOST, COLD, EVENT, WALL)
LAUNCH = ("grid", "block", "shared_bytes", "occupancy")
GAPS = "launch gaps"
WAITING = "waiting for the host"
REFILL = "cold refill"
JOINED = (f"{GAPS}, {WAITING}", f"{REFILL}, {WAITING}", f"{GAPS}, {REFILL}, {WAITING}")
"""Sums of these that the measurements of a run cannot separate."""
BEYOND_KERNELS = (GAPS, WAITING, REFILL, *JOINED)
"""Parts of a call's time in which none of its kernels runs."""
OTHER = "other"
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
"""Each step with the roles that belong to it, in display order."""
STEP_OF = {role: step for step, roles in STEPS for role in roles}
ORDER = {step: place for place, step in enumerate([*dict(STEPS), *BEYOND_KERNELS])}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one cell. The launch configuration and the tile are those of its longest kernel."""

    backend: Annotated[str, column("backend", repeat=False, meaning="the backend of the cell")]
    step: Annotated[str, column("step", meaning="what its kernels compute together")]
    launches_per_call: Annotated[
        float | None, column("n/call", "count", meaning="launches in a call")
    ]
    mean_ns: Annotated[float | None, column("µs each", "us", meaning="mean time of one launch")]
    call_ns: Annotated[
        float | None, column("µs/call", "us", meaning="time of its launches in a call")
    ]
    share: Annotated[
        float | None,
        column(
            "share%",
            "percent",
            meaning="share of the eager call; without one of an older run's event sample, the CPU's "
            "clock or the kernels",
        ),
    ]
    """None for a part that an eager call does not contain."""
    tile: Annotated[str | None, column("tile", meaning="tile of its longest kernel")]
    kernels: Annotated[
        tuple[str, ...], column("kernels", "names", shrink=True, meaning="its kernels")
    ]
    profiler: Annotated[str | None, column(meaning="what recorded the launches")]
    grid: Triple | None = None
    block: Triple | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None


@dataclass(frozen=True, slots=True)
class CallFigures:
    """Times and memory of one call of a cell that ran. Times are medians in ns."""

    backend: Annotated[str, column("backend", meaning="the backend of the cell")]
    kernels_ns: Annotated[float | None, column("kernel µs", "us", meaning="sum of its kernels")]
    """None for a CPU: the sum of its ops is not a latency."""
    graph_ns: Annotated[float | None, column("graph µs", "us", meaning="CUDA-graph replay")]
    eager_ns: Annotated[float | None, column("eager µs", "us", meaning="eager call")]
    host_ns: Annotated[float | None, column("host µs", "us", meaning="host time of an eager call")]
    cold_ns: Annotated[float | None, column("cold µs", "us", meaning="call with a flushed L2")]
    event_ns: Annotated[float | None, column("event µs", "us", meaning="cold call of an older run")]
    wall_ns: Annotated[float | None, column("wall µs", "us", meaning="wall clock of the CPU")]
    speedup: Annotated[float | None, column("speed-up", "ratio", meaning="against the slowest")]
    peak_memory_bytes: Annotated[
        int | None, column("peak MiB", "mib", meaning="peak memory without the inputs")
    ]
    peak_over_output: Annotated[
        float | None,
        column("peak / output", "count", meaning="the peak divided by the output's size"),
    ]
    score_matrices: Annotated[
        float | None,
        column(
            "score matrices", "count", meaning="the peak divided by the size of the score matrix"
        ),
    ]
    """None if the cell has no score matrix, or if copies of the inputs are larger than it."""
    growth: Annotated[str | None, column("grows with", meaning="what the memory grows with")]
    """By the shapes: `S` is the length of queries and keys, `S_q` and `S_kv` are their lengths if they
    differ.
    """


def find_steps(cell: CellRow, rows: Sequence[KernelRow], *, full: bool = False) -> list[Step]:
    """Return the steps of one cell in the order of STEPS, then the parts of BEYOND_KERNELS.

    `rows` are those of one profiler. With `full`, steps contain whole kernel names.
    """
    busy = sum(call_ns(row, cell.iterations) or 0 for row in rows)
    whole = max(busy, median_ns(cell, EAGER, EVENT, GRAPH, WALL) or 0)
    names = attrgetter("kernel" if full else "kernel_short")
    steps = [_step(cell, name, own, whole, names) for name, own in _group_by_step(rows).items()]
    if rows and rows[0].kernel_kind != "op":
        for name, time in _time_beyond_kernels(cell, busy):
            share = None if name == REFILL else time / whole
            steps.append(Step(cell.backend, name, None, None, time, share, None, (), None))
    return sorted(steps, key=lambda step: ORDER[step.step])


def _group_by_step(rows: Sequence[KernelRow]) -> dict[str, list[KernelRow]]:
    grouped: dict[str, list[KernelRow]] = {}
    for role, row in assign_roles(rows):
        grouped.setdefault(STEP_OF.get(role, OTHER), []).append(row)
    return grouped


def _time_beyond_kernels(cell: CellRow, busy_ns: float) -> Iterator[tuple[str, float]]:
    """Yield the parts of a call, in ns, in which none of its kernels runs.

    The GPU waits between kernels of one replay, the host issues an eager call more slowly, and a
    flushed L2 has to be filled again.
    """
    graph = median_ns(cell, GRAPH)
    replay = max(busy_ns, graph or 0)
    eager, cold, event = (median_ns(cell, name) for name in (EAGER, COLD, EVENT))
    parts = [(GAPS, replay - busy_ns)]
    if eager is not None:
        parts.append((WAITING if graph else JOINED[0], eager - replay))
    if cold is not None:
        parts.append((REFILL, cold - replay))
    elif eager is None and event is not None:
        parts.append((JOINED[1] if graph else JOINED[2], event - replay))
    yield from ((name, time) for name, time in parts if time > 0)


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


def median_ns(cell: CellRow, *measurements: str) -> float | None:
    """Return the median of the first of these measurements that the cell has."""
    name = next((name for name in measurements if cell.samples.get(name)), None)
    return float(median(cell.samples[name])) if name else None


def compare_calls(
    config: Config,
    cells: Sequence[CellRow],
    steps: Mapping[str, Sequence[Step]],
    rows: Mapping[str, Sequence[KernelRow]],
) -> dict[str, CallFigures]:
    """Return the figures of the cells of one config that ran. All mappings are by cell id."""
    done = [cell for cell in cells if cell.status == "ok"]
    kernels_ns = {cell.cell: _kernels_ns(cell, steps[cell.cell]) for cell in done}
    basis = {
        cell.cell: kernels_ns[cell.cell] or median_ns(cell, COLD, EVENT, WALL) for cell in done
    }
    slowest = max((time for time in basis.values() if time), default=None)
    figures = {}
    for cell in done:
        peak, time = cell.peak_memory_bytes, basis[cell.cell]
        dtype = score_matrix_dtype(config, rows[cell.cell])
        # where copies are the larger part, the peak does not show the score matrices
        matrix = matrix_bytes(config, dtype) if dtype else 0
        conclusive = dtype and copy_bytes(config, dtype) < matrix
        figures[cell.cell] = CallFigures(
            backend=cell.backend,
            kernels_ns=kernels_ns[cell.cell],
            **{f"{name}_ns": median_ns(cell, name) for name in (GRAPH, *CALL_TIMES)},
            speedup=slowest / time if slowest and time else None,
            peak_memory_bytes=peak,
            peak_over_output=peak and peak / tensor_bytes(config).output,
            score_matrices=peak / matrix if peak and conclusive else None,
            growth=memory_growth(config, dtype) if steps[cell.cell] else None,
        )
    return figures


def score_matrix_dtype(config: Config, rows: Sequence[KernelRow]) -> str | None:
    """Return the dtype of a cell's score matrices. None if it makes none."""
    roles = assign_roles(rows)
    names = [(role, parse_kernel_name(row.kernel, row.kernel_kind).dtype) for role, row in roles]
    return score_dtype(str(config.dtype), names)


def memory_growth(config: Config, score_dtype: str | None) -> str:
    """Return what a call's memory grows with, as in `CallFigures.growth`."""
    if config.seq_len_q == config.seq_len_kv:
        return "S^2" if score_dtype else "S"
    if not score_dtype:
        return "S_q"
    return "S_kv" if config.seq_len_q == 1 else "S_q x S_kv"


def _kernels_ns(cell: CellRow, steps: Sequence[Step]) -> float | None:
    own = [step for step in steps if step.step not in BEYOND_KERNELS]
    if not own or WALL in cell.samples or any(step.call_ns is None for step in own):
        return None
    return sum(step.call_ns or 0 for step in own)


@dataclass(frozen=True, slots=True)
class MathStep:
    """One step of a cell that math computed."""

    config: Annotated[str, column("config", repeat=False, meaning="label of the attention problem")]
    backend: Annotated[str, column("backend", repeat=False, meaning="the backend of the cell")]
    step: Annotated[str, column("step", meaning="what its kernels compute together")]
    launches: Annotated[float, column("n/call", "count", meaning="launches in a call")]
    ns: Annotated[float, column("µs/call", "us", meaning="time of its launches in a call")]
    share: Annotated[float, column("share%", "percent", meaning="share of the cell's kernel time")]


def find_math_steps(rows: Sequence[KernelRow]) -> list[MathStep]:
    """Return the steps of all cells that math computed. `rows` are those of one profiler."""
    cells: dict[tuple[str, str], list[KernelRow]] = {}
    for row in rows:
        if row.config is not None:
            cells.setdefault((row.config, row.backend or ""), []).append(row)
    steps: list[MathStep] = []
    for (config, backend), own in cells.items():
        paths = [(row.op_path or "").split(";") for row in own]
        named = any(backend_of_op(row.sdpa_op) == "math" for row in own)
        if named or any(MATH_OP in path for path in paths):
            steps += _math_steps(config, backend, own)
    return steps


def _math_steps(config: str, backend: str, rows: Sequence[KernelRow]) -> Iterator[MathStep]:
    total = sum(row.total_ns or 0 for row in rows)
    for step, own in sorted(_group_by_step(rows).items(), key=lambda item: ORDER[item[0]]):
        launches = sum(launches_per_call(row, 1) for row in own)
        ns = sum(call_ns(row, 1) or 0 for row in own)
        share = sum(row.total_ns or 0 for row in own) / total if total else 0.0
        yield MathStep(config, backend, step, launches, ns, share)


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
