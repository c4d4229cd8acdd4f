"""The sections of a report on one run, from rows alone: environment, cells, latency, steps of math,
choices and problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from profharness import stats
from profharness.answers.agreement import backend_of_op, disagreements
from profharness.answers.roles import MATH_OP, assign_roles
from profharness.config import Config, parse_config
from profharness.rows import CellRow, KernelRow
from profharness.run import Problem
from profharness.views.document import Block, Chart, Column, Heading, Note, Table

MEASUREMENTS = ("graph", "event", "wall")  # what tells the call's own time best comes first
CELL_COLUMNS = (
    Column("config", "config", repeat=False),
    Column("backend", "backend"),
    Column("status", "status"),
    Column("ran", "ran"),
    Column("predicted", "rules say"),
    Column("peak_memory_bytes", "peak KiB", "kib", right=True),
    Column("reason", "reason", shrink=True),
)
LATENCY_COLUMNS = (
    Column("config", "config", repeat=False),
    Column("backend", "backend"),
    Column("measurement", "measured by"),
    Column("samples", "n", "count", right=True),
    Column("median_ns", "median µs", "us", right=True),
    Column("p10_ns", "p10 µs", "us", right=True),
    Column("p90_ns", "p90 µs", "us", right=True),
    Column("min_ns", "min µs", "us", right=True),
    Column("against", "to fastest", "ratio", right=True),
)
STEP_COLUMNS = (
    Column("config", "config", repeat=False),
    Column("backend", "backend", repeat=False),
    Column("role", "step"),
    Column("launches", "n/call", "count", right=True),
    Column("ns", "µs/call", "us", right=True),
    Column("share", "share%", "percent", right=True),
)


@dataclass(frozen=True, slots=True)
class Latency:
    """What the raw samples of one cell say, in nanoseconds; measurement is one of MEASUREMENTS."""

    config: str
    backend: str
    measurement: str
    samples: int
    median_ns: float
    p10_ns: float
    p90_ns: float
    min_ns: float


def latencies(cells: Iterable[CellRow]) -> list[Latency]:
    """One for each cell and measurement that it has samples of."""
    found = []
    for cell in cells:
        for name in MEASUREMENTS:
            if values := cell.samples.get(name):
                told = stats.summarize(values)
                figures = (told.n, told.median, told.p10, told.p90, told.min)
                found.append(Latency(cell.config, cell.backend, name, *figures))
    return found


def environment_blocks(environment: Mapping[str, Any]) -> list[Block]:
    """All keys that the run recorded, in its order."""
    columns = (Column("key", "what"), Column("value", "value"))
    rows = tuple((key, _plain(value)) for key, value in environment.items())
    return [Heading("Environment"), Table(columns, rows)] if rows else []


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return "" if value is None else str(value)


def cell_blocks(cells: Sequence[CellRow]) -> list[Block]:
    """Every cell with its status, what ran, and why it did not where it did not."""
    if not cells:
        return []
    counts: dict[str, int] = {}
    for cell in cells:
        counts[cell.status] = counts.get(cell.status, 0) + 1
    detail = ", ".join(f"{count} {status}" for status, count in counts.items())
    rows = tuple(
        (
            *(cell.config, cell.backend, cell.status, ran(cell), cell.predicted),
            *(cell.peak_memory_bytes, _reason(cell)),
        )
        for cell in cells
    )
    return [Heading("Cells", detail), Table(CELL_COLUMNS, rows)]


def ran(cell: CellRow) -> str | None:
    """The backend that the op in the trace names; without a trace what PyTorch said it would take."""
    if cell.status != "ok":
        return ""
    return backend_of_op(cell.sdpa_op) or cell.choice


def _reason(cell: CellRow) -> str:
    if cell.status == "ok":
        return ""
    texts = [cell.message or "", *(refusal.message for refusal in cell.refusals)]
    return "; ".join(dict.fromkeys(text for text in texts if text))


def latency_blocks(cells: Sequence[CellRow]) -> list[Block]:
    """The table of all measurements, and a chart of the one that most cells have."""
    found = latencies(cells)
    if not found:
        return []
    fastest: dict[tuple[str, str], float] = {}
    for each in found:
        key = each.config, each.measurement
        fastest[key] = min(fastest.get(key, each.median_ns), each.median_ns)
    rows = tuple(
        (
            *(each.config, each.backend, each.measurement, each.samples),
            *(each.median_ns, each.p10_ns, each.p90_ns, each.min_ns),
            _over(each.median_ns, fastest[each.config, each.measurement]),
        )
        for each in found
    )
    charted, medians = charted_medians(cells)
    return [
        Heading("Latency", "without a profiler, raw samples"),
        *latency_charts(medians, charted),
        Table(LATENCY_COLUMNS, rows),
    ]


def charted_medians(cells: Sequence[CellRow]) -> tuple[str, list[tuple[str, str, float]]]:
    """The measurement that most cells have, and config, backend, median ns of each that has it."""
    found = latencies(cells)
    name = max(MEASUREMENTS, key=lambda name: sum(each.measurement == name for each in found))
    own = [each for each in found if each.measurement == name]
    return name, [(each.config, each.backend, each.median_ns) for each in own]


def _over(value: float, least: float) -> float | None:
    return value / least if least > 0 else None


def latency_charts(medians: Sequence[tuple[str, str, float]], measurement: str) -> list[Chart]:
    """Lines over sequence length for each sweep of it, and one chart of dots for other configs.

    medians: config label, backend, ns.
    """
    charts = []
    rows = [
        (parse_config(config), config, backend, ns) for config, backend, ns in medians if ns > 0
    ]
    groups = sweeps([config for config, *_ in rows])
    for name, members in groups.items():
        points = tuple(
            {"seq_len": config.seq_len_kv, "µs": ns / 1e3, "backend": backend}
            for config, _, backend, ns in rows
            if config in members
        )
        title = f"Latency over sequence length, {name} ({measurement})"
        charts.append(
            Chart("lines", title, points, "seq_len", "µs", "backend", "sequence length", "µs")
        )
    swept = {config for members in groups.values() for config in members}
    points = tuple(
        {"config": label, "µs": ns / 1e3, "backend": backend}
        for config, label, backend, ns in rows
        if config not in swept
    )
    if points:
        title = f"Latency by config and backend ({measurement})"
        charts.append(Chart("dots", title, points, "µs", "config", "backend", "µs"))
    return charts


def sweeps(configs: Iterable[Config]) -> dict[str, set[Config]]:
    """Configs that differ in their sequence lengths alone, two lengths or more, under what they
    share."""
    groups: dict[str, set[Config]] = {}
    for config in configs:
        groups.setdefault(shape_family(config), set()).add(config)
    return {name: group for name, group in groups.items() if len(group) > 1}


def shape_family(config: Config) -> str:
    """The label without sequence lengths; a decode step (one query) is a family of its own."""
    square = config.seq_len_q == config.seq_len_kv
    label = replace(config, seq_len_q=1, seq_len_kv=1).label.replace("-s1-", "-")
    if square:
        return label
    fixed = f"sq{config.seq_len_q}" if config.seq_len_q != config.seq_len_kv else ""
    return f"{label}, {fixed}"


def step_blocks(rows: Sequence[KernelRow]) -> list[Block]:
    """What the steps of math take in a call: rows are those of one profiler, op by op.

    Cells without a matrix product and a softmax of their own (fused kernels) are left out.
    """
    steps: list[tuple[str, str, str, float, float, float]] = []
    for (config, backend), mine in _by_cell(rows).items():
        if not any(MATH_OP in (row.op_path or "").split(";") or _is_math(row) for row in mine):
            continue
        total = sum(row.total_ns or 0 for row in mine)
        times: dict[str, tuple[float, float]] = {}
        for role, row in assign_roles(mine):
            count, ns = times.get(role, (0.0, 0.0))
            calls = row.launches / row.launches_per_call if row.launches_per_call else 1
            per_call = (row.total_ns or 0) / calls
            times[role] = (count + (row.launches_per_call or row.launches), ns + per_call)
        steps += [
            (config, backend, role, count, ns, ns * _calls(mine) / total if total else 0.0)
            for role, (count, ns) in times.items()
        ]
    if not steps:
        return []
    points = tuple(
        {"cell": f"{config} {backend}", "µs": ns / 1e3, "step": role}
        for config, backend, role, _, ns, _ in steps
        if ns > 0
    )
    note = Note("kernel time alone: gaps between launches are not in it")
    return [
        Heading("Steps of math"),
        Chart("stack", "Kernel time by step", points, "µs", "cell", "step", "µs a call"),
        Table(STEP_COLUMNS, tuple(steps)),
        note,
    ]


def _is_math(row: KernelRow) -> bool:
    return backend_of_op(row.sdpa_op) == "math"


def _calls(rows: Sequence[KernelRow]) -> float:
    row = next((row for row in rows if row.launches_per_call), None)
    return row.launches / row.launches_per_call if row and row.launches_per_call else 1.0


def _by_cell(rows: Iterable[KernelRow]) -> dict[tuple[str, str], list[KernelRow]]:
    groups: dict[tuple[str, str], list[KernelRow]] = {}
    for row in rows:
        if row.config is not None:
            groups.setdefault((row.config, row.backend or ""), []).append(row)
    return groups


def selection_blocks(cells: Sequence[CellRow]) -> list[Block]:
    """What `auto` took for each shape; nothing for fewer than two shapes."""
    chosen = [cell for cell in cells if cell.backend == "auto"]
    rows = []
    for cell in chosen:
        config = parse_config(cell.config)
        took = (ran(cell) or "unknown") if cell.status == "ok" else cell.status
        square = config.seq_len_q == config.seq_len_kv
        lengths = f"{config.seq_len_q}" if square else f"{config.seq_len_q}×{config.seq_len_kv}"
        rest = replace(config, seq_len_q=1, seq_len_kv=1).label.replace("-s1-", "-")
        rows.append({"config": cell.config, "lengths": lengths, "rest": rest, "backend": took})
    if len({row["config"] for row in rows}) < 2:
        return []
    columns = (Column("config", "config"), Column("backend", "auto took"))
    return [
        Heading("Selection map"),
        Chart(
            "map", "What auto took", tuple(rows), "lengths", "rest", "backend", "sequence length"
        ),
        Table(columns, tuple((row["config"], row["backend"]) for row in rows)),
    ]


def disagreement_blocks(cells: Sequence[CellRow], rows: Sequence[KernelRow]) -> list[Block]:
    """Where rules, PyTorch's answer, op and kernels do not name the same backend."""
    by_cell: dict[str | None, list[KernelRow]] = {}
    for row in rows:
        by_cell.setdefault(row.cell, []).append(row)
    notes: list[Block] = [
        Note(text, f"{cell.config} {cell.backend}", "warning")
        for cell in cells
        for text in disagreements(cell, by_cell.get(cell.cell, []))
    ]
    if not cells:
        return []
    return [
        Heading("Disagreements"),
        *(notes or [Note("none: all witnesses name the same backend")]),
    ]


def problem_blocks(problems: Sequence[Problem]) -> list[Block]:
    """What the profilers failed to do, with its remedy; nothing where all went well."""
    if not problems:
        return []
    notes = [
        Note(f"{each.message}; {each.remedy}", f"{each.profiler} {each.code}", "error")
        for each in problems
    ]
    return [Heading("Problems"), *notes]


def meaning_blocks() -> list[Block]:
    """What the numbers mean, for somebody who sees a report for the first time."""
    return [
        Heading("What the numbers mean"),
        Note("one call, between two CUDA events on the stream, no profiler running", "event"),
        Note("one replay of a CUDA graph of the call: no launch from the CPU in it", "graph"),
        Note("one call by the clock of a CPU", "wall"),
        Note(
            "kernel times come from the profiler and leave the gaps between kernels out", "kernels"
        ),
        Note("the median over all samples; p10 and p90 hold the middle 80 % of them", "median"),
        Note("the median over that of the fastest backend of the same config", "to fastest"),
        Note("theoretical: what registers, shared memory and block size leave room for", "occ%"),
        Note("a - is what a profiler cannot know; it is never a zero", "-"),
    ]
