"""Divide an attention call into steps, such as QK^T and softmax, and the time between kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Annotated, Any

from profharness.attention.config import AUTO, Config, parse_config
from profharness.attention.costs import copy_bytes, matrix_bytes, tensor_bytes
from profharness.columns import VS_FASTEST, Column, column, columns_of, pick
from profharness.commands._answers import (
    all_disabled_notes,
    cell_reason,
    choices_of_auto,
    same_as_fastest,
    same_kernels_notes,
)
from profharness.commands.kernels.answer import kernels_answer
from profharness.device_types import CPU, CUDA
from profharness.measurements.agreement import backend_of_op, backend_that_ran
from profharness.measurements.measurements import CHOSEN, contenders, without_choice
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
from profharness.units import memory_text, share_text, time_text

CALL_TIMES = (EAGER, HOST, COLD, EVENT, WALL)
LAUNCH = ("grid", "block", "shared_bytes", "occupancy")
GAPS = "launch gaps"
WAITING = "waiting for the host"
REFILL = "cold refill"
JOINED = (f"{GAPS}, {WAITING}", f"{REFILL}, {WAITING}", f"{GAPS}, {REFILL}, {WAITING}")
"""Combinations of the three names above, for runs whose measurements cannot separate them."""
BEYOND_KERNELS = (GAPS, WAITING, REFILL, *JOINED)
"""Names for the time of a call in which no kernel runs."""
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
    """A step of a cell. Its launch configuration and its tile come from its longest kernel."""

    backend: Annotated[str, column("backend", repeat=False, meaning="the backend of the cell")]
    step: Annotated[
        str,
        column("step", importance="key", meaning="what the kernels of the step compute together"),
    ]
    launches_per_call: Annotated[
        float | None, column("launches/call", "count", meaning="launches per call")
    ]
    mean_ns: Annotated[
        float | None,
        column(
            "mean µs/launch",
            "time",
            importance="detail",
            scale="launch",
            meaning="mean time of one launch",
        ),
    ]
    call_ns: Annotated[
        float | None,
        column(
            "mean µs/call",
            "time",
            importance="answer",
            scale="launch",
            meaning="total time of the step's launches in one call",
        ),
    ]
    share: Annotated[
        float | None,
        column(
            "% of call",
            "percent",
            importance="answer",
            meaning=(
                "the step's share of the call's eager time or, if the eager time is unknown, of "
                "the first known time in this order: cold (older runs only), graph, wall, kernel"
            ),
        ),
    ]
    """None for the cold refill, because an eager call contains no refill."""
    tile: Annotated[
        str | None,
        column("tile", importance="detail", meaning="tile size of the step's longest kernel"),
    ]
    kernels: Annotated[
        tuple[str, ...], column("kernels", "names", wrap=True, meaning="kernels of the step")
    ]
    profiler: Annotated[str | None, column(meaning="the profiler that recorded the launches")]
    grid: Triple | None = None
    block: Triple | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None


@dataclass(frozen=True, slots=True)
class CallFigures:
    """Times in ns and memory of one call of a cell that ran."""

    backend: Annotated[str, column("backend", meaning="the backend of the cell")]
    kernels_ns: Annotated[
        float | None,
        column(
            "mean kernel µs/call",
            "time",
            importance="answer",
            scale="call",
            meaning="mean of the sum of the call's kernel times",
        ),
    ]
    """None on a CPU, because the times of its ops do not add up to a latency."""
    graph_ns: Annotated[
        float | None,
        column(
            "median graph µs/call",
            "time",
            scale="call",
            meaning="time of a call in a CUDA graph replay",
        ),
    ]
    eager_ns: Annotated[
        float | None,
        column("median eager µs/call", "time", scale="call", meaning="time of an eager call"),
    ]
    host_ns: Annotated[
        float | None,
        column(
            "median host µs/call",
            "time",
            importance="detail",
            scale="call",
            meaning="CPU time of an eager call",
        ),
    ]
    cold_ns: Annotated[
        float | None,
        column(
            "median cold µs/call",
            "time",
            scale="call",
            meaning="time of a call with a flushed L2 cache",
        ),
    ]
    event_ns: Annotated[
        float | None,
        column(
            "median cold µs/call",
            "time",
            importance="normal",
            scale="call",
            meaning="time of a cold call in older runs",
        ),
    ]
    wall_ns: Annotated[
        float | None,
        column(
            "median wall µs/call",
            "time",
            importance="normal",
            scale="call",
            meaning="wall-clock time of a call on the CPU",
        ),
    ]
    speedup: Annotated[
        float | None,
        column(
            meaning="speed-up relative to the slowest backend",
        ),
    ]
    vs_fastest: Annotated[
        float | None,
        column(
            VS_FASTEST,
            "ratio",
            importance="answer",
            meaning="the backend's time divided by the fastest backend's time",
        ),
    ]
    peak_memory_bytes: Annotated[
        int | None, column("peak MiB", "mib", meaning="peak memory, excluding the inputs")
    ]
    peak_over_output: Annotated[
        float | None,
        column(
            "peak / output",
            "count",
            importance="detail",
            meaning="peak memory divided by the size of the output",
        ),
    ]
    score_matrices: Annotated[
        float | None,
        column(
            "score matrices",
            "count",
            meaning="peak memory divided by the size of the score matrix",
        ),
    ]
    """None if there is no score matrix, or if copies of the inputs are larger than the matrix."""
    growth: Annotated[
        str | None,
        column(
            "grows with",
            importance="detail",
            meaning="how the peak memory grows with the sequence length",
        ),
    ]
    """The growth is derived from the shapes.

    `S` is the length of queries and keys. If the lengths differ, `S_q` is the length of queries and
    `S_kv` the length of keys.
    """


def find_steps(cell: CellRow, rows: Sequence[KernelRow], *, full: bool = False) -> list[Step]:
    """Return the steps of a cell under one profiler, followed by the times in BEYOND_KERNELS."""
    busy = sum(call_ns(row, cell.iterations) or 0 for row in rows)
    whole = max(busy, _median_ns(cell, *_WHOLE) or 0)
    steps = [_step(cell, name, own, whole, full) for name, own in _group_by_step(rows).items()]
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
    """Yield (name, duration) for the time of a call in which no kernel runs.

    The GPU pauses between the kernels of a CUDA-graph replay. In an eager call, it also waits for
    the host. In a cold call, the flushed L2 cache is filled again.
    """
    graph = _median_ns(cell, GRAPH)
    replay = max(busy_ns, graph or 0)
    eager, cold, event = (_median_ns(cell, name) for name in (EAGER, COLD, EVENT))
    parts = [(GAPS, replay - busy_ns)]
    if eager is not None:
        parts.append((WAITING if graph else JOINED[0], eager - replay))
    if cold is not None:
        parts.append((REFILL, cold - replay))
    elif eager is None and event is not None:
        parts.append((JOINED[1] if graph else JOINED[2], event - replay))
    yield from ((name, time) for name, time in parts if time > 0)


def _step(cell: CellRow, name: str, rows: Sequence[KernelRow], whole_ns: float, full: bool) -> Step:
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
        kernels=tuple(dict.fromkeys(row.kernel if full else row.kernel_short for row in rows)),
        profiler=longest.profiler,
        **{name: getattr(longest, name) for name in LAUNCH},
    )


def _measured(cell: CellRow, *measurements: str) -> str | None:
    """Return the first of the measurements that a cell has, or None if it has none of them."""
    return next((name for name in measurements if cell.samples.get(name)), None)


def _median_ns(cell: CellRow, *measurements: str) -> float | None:
    name = _measured(cell, *measurements)
    return float(median(cell.samples[name])) if name else None


def _compare_calls(
    config: Config,
    cells: Sequence[CellRow],
    steps: Mapping[str, Sequence[Step]],
    rows: Mapping[str, Sequence[KernelRow]],
) -> dict[str, CallFigures]:
    figures = {}
    for cell in cells:
        if cell.status != "ok":
            continue
        times = [step.call_ns for step in steps[cell.cell] if step.step not in BEYOND_KERNELS]
        known = [time for time in times if time is not None]
        kernels_ns = None
        if times and len(known) == len(times) and WALL not in cell.samples:
            kernels_ns = sum(known)
        peak = cell.peak_memory_bytes
        dtype = _score_dtype(config, rows[cell.cell])
        # If copies are larger than a score matrix, the peak does not show the number of matrices.
        matrix = matrix_bytes(config, dtype) if dtype else 0
        conclusive = dtype and copy_bytes(config, dtype) < matrix
        figures[cell.cell] = CallFigures(
            backend=cell.backend,
            kernels_ns=kernels_ns,
            **{f"{name}_ns": _median_ns(cell, name) for name in (GRAPH, *CALL_TIMES)},
            speedup=None,
            vs_fastest=None,
            peak_memory_bytes=peak,
            peak_over_output=peak and peak / tensor_bytes(config).output,
            score_matrices=peak / matrix if peak and conclusive else None,
            growth=_memory_growth(config, dtype) if steps[cell.cell] else None,
        )
    basis = {
        cell: row.kernels_ns or row.cold_ns or row.event_ns or row.wall_ns
        for cell, row in figures.items()
    }
    timed = {cell: time for cell, time in basis.items() if time}
    most = max(timed.values(), default=0)
    ranked = contenders({row.backend for row in figures.values()})
    choice = next((backend_that_ran(cell) for cell in cells if cell.backend == CHOSEN), None)
    rivals = without_choice(ranked, choice)
    least = min((timed[cell] for cell in timed if figures[cell].backend in rivals), default=0)
    return {
        cell: replace(
            row,
            speedup=most / timed[cell],
            vs_fastest=max(1.0, timed[cell] / least) if least and row.backend in ranked else None,
        )
        if cell in timed
        else row
        for cell, row in figures.items()
    }


def _score_dtype(config: Config, rows: Sequence[KernelRow]) -> str | None:
    roles = assign_roles(rows)
    names = [(role, parse_kernel_name(row.kernel, row.kernel_kind).dtype) for role, row in roles]
    return score_dtype(str(config.dtype), names)


def _memory_growth(config: Config, score_dtype: str | None) -> str:
    if config.seq_len_q == config.seq_len_kv:
        return "S^2" if score_dtype else "S"
    if not score_dtype:
        return "S_q"
    return "S_kv" if config.seq_len_q == 1 else "S_q x S_kv"


SCHEMA = "profharness.steps/1"
BY_CALL = tuple(f"{name}_ns" for name in CALL_TIMES)
FIELDS = (
    *("run", "config", "backend", "cell", "profiler", "step", "launches_per_call", "mean_ns"),
    *("call_ns", "share", "kernels", "tile"),
    # equal in all steps of a cell
    *field_names(CallFigures)[1:],
    *LAUNCH,
)
STEP_COLUMNS = (
    *pick(Step, "backend", "step", "launches_per_call", "mean_ns", "call_ns", "share", "tile"),
    *pick(KernelRow, *LAUNCH),
    *pick(Step, "kernels"),
)
MATH_COLUMNS = (
    Column("config", "config", repeat=False, meaning="label of the attention problem"),
    *pick(Step, "backend", "step", "launches_per_call", "call_ns"),
    replace(columns_of(Step)["share"], meaning="share of the cell's kernel time"),
)
CALL_COLUMNS = pick(CallFigures)
# Titles of the shares of a call, by the time that they refer to, in the order of preference.
_WHOLE: dict[str, str] = {
    EAGER: "% of eager call",
    EVENT: "% of cold call",
    GRAPH: "% of graph replay",
    WALL: "% of wall time",
}


def _share_title(cells: Iterable[CellRow]) -> str:
    """Return a title that names what the shares refer to, if this is the same in all cells."""
    found = {_measured(cell, *_WHOLE) for cell in cells}
    return _WHOLE.get(found.pop() or "", "% of call") if len(found) == 1 else "% of call"


def steps_document(
    rows: Sequence[KernelRow], cells: Sequence[CellRow], *, full: bool = False
) -> Document:
    """Return the document of `kernels --breakdown`. Each config has a table of steps and one of backends."""
    ran = [cell for cell in cells if cell.status == "ok"]
    columns = tuple(
        replace(each, title=_share_title(ran)) if each.key == "share" else each
        for each in (*STEP_COLUMNS[:-1], replace(STEP_COLUMNS[-1], shrink=not full))
    )
    blocks: list[Block] = []
    records: list[dict[str, Any]] = []
    figures_of: dict[tuple[str, str], list[CallFigures]] = {}
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
        figures = _compare_calls(config, own, steps, rows_of)
        if figures:
            figures_of[run, label] = [*figures.values()]
        blocks += _call_blocks(config, figures, rows_of, choices_of_auto(own).get(label))
        for cell in own:
            if cell.status != "ok":
                blocks.append(status_note(cell.status, cell_reason(cell, full=full), cell.backend))
            place = {"run": cell.run, "config": cell.config, "cell": cell.cell}
            of_call = asdict(figures[cell.cell]) if cell.cell in figures else {}
            for step in steps[cell.cell]:
                values = asdict(step) | place | of_call
                records.append({name: values[name] for name in FIELDS})
    if not cells:
        blocks.append(
            Note("a breakdown requires the cells of a captured run, but this trace has no cells")
        )
    if figures_of:
        blocks += all_disabled_notes([row.backend for own in figures_of.values() for row in own])
        blocks += _explanations(cells, [*figures_of.values()])
    answer = (*kernels_answer(rows, cells), *_of_call(figures_of))
    return Document(SCHEMA, "Steps", tuple(blocks), FIELDS, tuple(records), answer=answer)


def _of_call(figures_of: Mapping[tuple[str, str], Sequence[CallFigures]]) -> Iterator[str]:
    """Yield a sentence on how long kernels run in an eager call, if there is one config."""
    for figures in figures_of.values() if len(figures_of) == 1 else ():
        shown = next((row for row in figures if row.backend == AUTO), figures[0])
        if shown.eager_ns and shown.kernels_ns:
            yield (
                f"An eager call of {shown.backend} takes {time_text(shown.eager_ns)}; "
                f"its kernels run for {share_text(min(1, shown.kernels_ns / shown.eager_ns))} of that time."
            )


def _call_blocks(
    config: Config,
    figures: Mapping[str, CallFigures],
    rows_of: Mapping[str, Sequence[KernelRow]],
    choice: str | None,
) -> list[Block]:
    """Return a table of the backends of a config. `choice` is the backend that `auto` ran."""
    if not figures:
        return []
    dtypes = [_score_dtype(config, rows_of[cell]) for cell in figures]
    fastest = {row.backend for row in figures.values() if row.vs_fastest == 1}
    lines = [
        ({"vs_fastest": same_as_fastest(row.backend, choice, fastest) or row.vs_fastest}, row)
        for row in figures.values()
    ]
    text = _memory_text(config, [dtype for dtype in dtypes if dtype])
    table = Table.of(filled_columns(CALL_COLUMNS, lines, BY_CALL), lines)
    return [table, Note(text, "memory"), *same_kernels_notes(table)]


def _memory_text(config: Config, dtypes: Sequence[str]) -> str:
    output, parts = tensor_bytes(config).output, []
    for dtype in dict.fromkeys(dtypes):
        text = f"one score matrix in {dtype} {memory_text(matrix_bytes(config, dtype))}"
        if copies := copy_bytes(config, dtype):
            text += f" (repeated and cast inputs {memory_text(copies)})"
        parts.append(text)
    return ", ".join([f"output {memory_text(output)}", *parts])


def _explanations(
    cells: Sequence[CellRow], figures: Sequence[Sequence[CallFigures]]
) -> Iterator[Note]:
    """Yield notes on how the memory grows and on what the times mean."""
    growing = [each.growth for own in figures for each in own]
    if any(growth and growth not in ("S", "S_q") for growth in growing):
        yield Note(
            "Fused backends allocate about as much memory as the output takes. The other "
            "backends also allocate score matrices and copies of repeated or cast inputs."
        )
    if any(WALL in cell.samples for cell in cells):
        yield Note(
            f'The column "{VS_FASTEST}" compares the wall-clock time of each backend with that of the '
            "fastest backend."
        )
        return
    parts = [f"{GAPS} are the graph time minus the kernel time"]
    if any(EAGER in cell.samples for cell in cells):
        parts += [f"{WAITING} is eager minus graph", f"{REFILL} is cold minus graph"]
    text = (
        f'The column "{VS_FASTEST}" compares the kernel time of each backend with that of the fastest '
        "backend; "
        f"{', '.join(parts)}."
    )
    yield Note(text)


def math_blocks(rows: Sequence[KernelRow]) -> list[Block]:
    """Return the blocks about cells that the `math` backend computed, with rows of one profiler."""
    cells: dict[tuple[str, str], list[KernelRow]] = {}
    for row in rows:
        if row.config is not None:
            cells.setdefault((row.config, row.backend or ""), []).append(row)
    lines: list[dict[str, Any]] = []
    for (config, backend), own in cells.items():
        if not any(
            backend_of_op(row.sdpa_op) == "math" or MATH_OP in (row.op_path or "").split(";")
            for row in own
        ):
            continue
        total = sum(row.total_ns or 0 for row in own)
        for step, mine in sorted(_group_by_step(own).items(), key=lambda item: ORDER[item[0]]):
            line = {
                "config": config,
                "backend": backend,
                "step": step,
                "launches_per_call": sum(launches_per_call(row, 1) for row in mine),
                "call_ns": sum(call_ns(row, 1) or 0 for row in mine),
                "share": sum(row.total_ns or 0 for row in mine) / total if total else 0.0,
            }
            lines.append(line)
    if not lines:
        return []
    points = tuple(
        {
            "cell": f"{line['config']} {line['backend']}",
            "µs": line["call_ns"] / 1e3,
            "step": line["step"],
        }
        for line in lines
        if line["call_ns"] > 0
    )
    return [
        Heading("Steps of math"),
        Chart("stack", "Kernel time by step", points, "µs", "cell", "step", "µs per call"),
        Table.of(MATH_COLUMNS, lines),
        Note("The times are kernel times, which exclude the gaps between launches."),
    ]
