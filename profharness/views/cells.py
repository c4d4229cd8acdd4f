"""The sections of a report on one run: environment, cells, latency, choices and problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from profharness import stats
from profharness.answers.agreement import backend_that_ran, disagreements
from profharness.config import Config, parse_config
from profharness.devices import Peaks
from profharness.rows import CALL_MEASUREMENTS, CellRow, KernelRow
from profharness.run import Problem
from profharness.views.document import Block, Chart, Column, Heading, Note, Roof, Table

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


@dataclass(frozen=True, slots=True)
class Latency:
    """The figures of one cell's raw samples, in ns; measurement is one of CALL_MEASUREMENTS."""

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
    rows = []
    for cell in cells:
        for name in CALL_MEASUREMENTS:
            if values := cell.samples.get(name):
                x = stats.summarize(values)
                figures = (x.n, x.median, x.p10, x.p90, x.min)
                rows.append(Latency(cell.config, cell.backend, name, *figures))
    return rows


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
    counts = Counter(cell.status for cell in cells)
    detail = ", ".join(f"{count} {status}" for status, count in counts.items())
    rows = tuple(
        (
            *(cell.config, cell.backend, cell.status, _ran(cell), cell.predicted),
            *(cell.peak_memory_bytes, _reason(cell)),
        )
        for cell in cells
    )
    return [Heading("Cells", detail), Table(CELL_COLUMNS, rows)]


def _ran(cell: CellRow) -> str | None:
    return backend_that_ran(cell) if cell.status == "ok" else ""


def _reason(cell: CellRow) -> str:
    if cell.status == "ok":
        return ""
    texts = [cell.message or "", *(refusal.message for refusal in cell.refusals)]
    return "; ".join(dict.fromkeys(text for text in texts if text))


def latency_blocks(cells: Sequence[CellRow]) -> list[Block]:
    """The table of all measurements, and a chart of the one that most cells have."""
    rows = latencies(cells)
    if not rows:
        return []
    fastest: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row.config, row.measurement
        fastest[key] = min(fastest.get(key, row.median_ns), row.median_ns)
    lines = []
    for row in rows:
        least = fastest[row.config, row.measurement]
        lines.append(asdict(row) | {"against": row.median_ns / least if least > 0 else None})
    charted, medians = charted_medians(cells)
    return [
        Heading("Latency", "without a profiler, raw samples"),
        *latency_charts(medians, charted),
        Table.of(LATENCY_COLUMNS, lines),
    ]


def charted_medians(cells: Sequence[CellRow]) -> tuple[str, list[tuple[str, str, float]]]:
    """The measurement that most cells have, and config, backend, median ns of each that has it."""
    rows = latencies(cells)
    name = max(CALL_MEASUREMENTS, key=lambda name: sum(row.measurement == name for row in rows))
    own = [row for row in rows if row.measurement == name]
    return name, [(row.config, row.backend, row.median_ns) for row in own]


def latency_charts(medians: Sequence[tuple[str, str, float]], measurement: str) -> list[Chart]:
    """Lines over sequence length for each sweep, dots for other configs; medians: label, backend,
    ns.
    """
    rows: list[dict[str, Any]] = [
        {"label": label, "config": parse_config(label), "backend": backend, "µs": ns / 1e3}
        for label, backend, ns in medians
        if ns > 0
    ]
    charts = sweep_charts(rows, "Latency", "µs", measurement)
    swept = sweeps([row["config"] for row in rows]).values()
    points = tuple(row for row in rows if not any(row["config"] in group for group in swept))
    if points:
        title = f"Latency by config and backend ({measurement})"
        charts.append(Chart("dots", title, points, "µs", "label", "backend", "µs"))
    return charts


def sweep_charts(
    rows: Sequence[dict[str, Any]], what: str, unit: str, measurement: str
) -> list[Chart]:
    """Lines over sequence length, one chart for each sweep; rows have `config`, `backend` and the
    unit.
    """
    charts = []
    for name, members in sweeps([row["config"] for row in rows]).items():
        points = tuple(
            row | {"seq_len": row["config"].seq_len_kv} for row in rows if row["config"] in members
        )
        title = f"{what} over sequence length, {name} ({measurement})"
        axes = ("seq_len", unit, "backend", "sequence length", unit)
        charts.append(Chart("lines", title, points, *axes))
    return charts


def roofline_chart(
    title: str,
    rows: Sequence[dict[str, Any]],
    roofs: Iterable[tuple[str, Peaks, float]],
    **texts: str,
) -> list[Chart]:
    """Rates below the roofs (label, peaks, FLOP/s) of their devices; empty where no roof is known.
    Roofs of the same height are one, so that no label covers another.
    """
    labels: dict[tuple[float, float], dict[str, None]] = {}
    for label, peaks, rate in roofs:
        if peaks.bandwidth_bytes_per_s:
            labels.setdefault((peaks.bandwidth_bytes_per_s, rate), {})[label] = None
    merged = tuple(Roof("; ".join(names), *key) for key, names in labels.items())
    if not rows or not merged:
        return []
    axes = ("intensity", "flops_per_s", "backend")
    return [Chart("roofline", title, tuple(rows), *axes, roofs=merged, **texts)]


def sweeps(configs: Iterable[Config]) -> dict[str, set[Config]]:
    """Configs that differ in their sequence lengths alone, two or more, under what they share."""
    groups: dict[str, set[Config]] = {}
    for config in configs:
        groups.setdefault(shape_family(config), set()).add(config)
    return {name: group for name, group in groups.items() if len(group) > 1}


def shape_family(config: Config) -> str:
    """The label without sequence lengths; a decode step (one query) is a family of its own."""
    square = config.seq_len_q == config.seq_len_kv
    return _lengthless(config) + ("" if square else f", sq{config.seq_len_q}")


def _lengthless(config: Config) -> str:
    return replace(config, seq_len_q=1, seq_len_kv=1).label.replace("-s1-", "-")


def selection_blocks(cells: Sequence[CellRow]) -> list[Block]:
    """What `auto` took for each shape; nothing for fewer than two shapes."""
    rows = []
    for cell in cells:
        if cell.backend != "auto":
            continue
        config = parse_config(cell.config)
        lengths = dict.fromkeys([config.seq_len_q, config.seq_len_kv])
        rows.append(
            {
                "config": cell.config,
                "lengths": "×".join(map(str, lengths)),
                "rest": _lengthless(config),
                "backend": (_ran(cell) or "unknown") if cell.status == "ok" else cell.status,
            }
        )
    if len({row["config"] for row in rows}) < 2:
        return []
    columns = (Column("config", "config"), Column("backend", "auto took"))
    axes = ("lengths", "rest", "backend", "sequence length")
    return [
        Heading("Selection map"),
        Chart("map", "What auto took", tuple(rows), *axes),
        Table.of(columns, rows),
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
