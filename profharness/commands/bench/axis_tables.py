"""Show the sweeps of a benchmark: statements, charts, dtype pairs, and peak memory over length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from profharness.attention.config import parse_config
from profharness.measurements.axes import (
    AXES,
    DTYPE_TOKEN,
    LENGTH,
    MIB,
    Axis,
    Sweep,
    families,
    family,
)
from profharness.measurements.evaluation import BenchResult
from profharness.render.document import Block, Chart, Heading, Mark, Note

SHOWN_SWEEPS = 4
"""Statements and charts per axis, the longest sweeps first."""
SHOWN_MARKS = 5
SHOWN_PAIRS = 24
"""Rows of the chart of dtypes."""


def axis_blocks(answer: BenchResult) -> Iterator[Block]:
    """Yield statements on each sweep and on pairs of dtypes."""
    if not answer.sweeps and not answer.dtypes:
        return
    yield Heading("Along each axis", "configs that differ in it alone")
    for axis in AXES:
        own = [sweep for sweep in answer.sweeps if sweep.axis == axis.key]
        for sweep in own[:SHOWN_SWEEPS]:
            if sweep.statement:
                yield Note(sweep.statement, f"{axis.title}, {sweep.name}")
            if sweep.growth:
                text = "; ".join(growth.text for growth in sweep.growth)
                yield Note(text, f"peak memory over {axis.title}, {sweep.name}")
        if len(own) > SHOWN_SWEEPS:
            more = f"{len(own) - SHOWN_SWEEPS} more sweeps (--format json has them all)"
            yield Note(more, axis.title)
    yield from (Note(pair.statement, "dtype") for pair in answer.dtypes)


def axis_charts(answer: BenchResult) -> Iterator[Chart]:
    """Yield charts of peak memory over length, and of dtypes side by side."""
    memory = [
        {
            "label": row.config,
            "backend": row.backend,
            "MiB": row.peak_memory_bytes / MIB,
        }
        for row in answer.figures()
        if row.peak_memory_bytes and row.ranked
    ]
    yield from sweep_charts(memory, "Peak memory", "MiB", "PyTorch's allocator")
    rows: list[dict[str, Any]] = [
        {
            "pair": f"{row.backend}, {family(row.config, DTYPE_TOKEN)}",
            "dtype": str(parse_config(row.config).dtype),
            "µs": row.median_ns / 1e3,
            "label": row.config,
        }
        for row in answer.figures()
        if row.ranked and row.median_ns
    ]
    counts = Counter(row["pair"] for row in rows)
    pairs = [pair for pair, count in counts.items() if count > 1][:SHOWN_PAIRS]
    shown = tuple(row for row in rows if row["pair"] in pairs)
    if shown:
        title = f"Latency by dtype ({answer.ranking})"
        yield Chart("dumbbell", title, shown, "µs", "pair", "dtype", "µs", label="label")


def sweep_charts(
    rows: Sequence[dict[str, Any]],
    what: str,
    unit: str,
    measurement: str,
    *,
    axes: Iterable[Axis] = (LENGTH,),
    found: Sequence[Sweep] = (),
    events: Collection[str] = (),
) -> list[Chart]:
    """Return a chart of lines for each sweep over each axis.

    Rows contain `label` (of the config), `backend` and a value under the key `unit`. Events in
    `found` whose kind is in `events` are marked.
    """
    charts = []
    for axis in axes:
        groups = families([row["label"] for row in rows], axis)
        longest = sorted(groups.items(), key=lambda item: -len(item[1]))
        for name, group in longest[:SHOWN_SWEEPS]:
            places = {label: value for value, label in group.items()}
            points = tuple(
                row | {axis.key: places[row["label"]]} for row in rows if row["label"] in places
            )
            marks = [
                Mark(event.place, event.mark)
                for sweep in found
                if (sweep.axis, sweep.name) == (axis.key, name)
                for event in sweep.events
                if event.kind in events
            ]
            title = f"{what} over {axis.title}, {name} ({measurement})"
            keys = (axis.key, unit, "backend", axis.title, unit)
            chart = Chart("lines", title, points, *keys, low="low", high="high", label="label")
            charts.append(replace(chart, marks=tuple(marks[:SHOWN_MARKS])))
    return charts
