"""A report on stored runs as one Document: a part for each run, and for two of them what changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profharness.answers.bench.answer import benched
from profharness.answers.diff.answer import diff_cells, find_side
from profharness.answers.prediction import with_predictions
from profharness.rows import TRACE_PROFILERS
from profharness.run import BENCH_FILE
from profharness.views.bench import bench_document, rate_blocks
from profharness.views.cells import (
    cell_blocks,
    charted_medians,
    disagreement_blocks,
    environment_blocks,
    latencies,
    latency_blocks,
    meaning_blocks,
    problem_blocks,
    selection_blocks,
)
from profharness.views.diff import diff_document
from profharness.views.document import Block, Chart, Document, Heading
from profharness.views.kernels import cell_record, kernel_record, kernels_document, witness_document
from profharness.views.steps import math_blocks
from profharness.views.verify import verify_document

if TYPE_CHECKING:
    from profharness.answers.diff.model import Diff
    from profharness.rows import CellRow, KernelRow
    from profharness.store import Store


SCHEMA = "profharness.report/1"

_LATENCY = ("measurement", "samples", "median_ns", "p10_ns", "p90_ns", "min_ns")
FIELDS = (
    *("run", "config", "backend", "status", "message", "predicted", "choice", "sdpa_op"),
    *(*_LATENCY, "peak_memory_bytes"),
)


@dataclass(frozen=True, slots=True)
class RunData:
    """All that a report asks the store about one run; steps are the kernels op by op."""

    run: str
    environment: Mapping[str, Any]
    cells: tuple[CellRow, ...]
    kernels: tuple[KernelRow, ...]
    steps: tuple[KernelRow, ...]


def report_document(store: Store, refs: Sequence[str], *, bench: bool | None = None) -> Document:
    """The report on the runs that refs name (ids, prefixes, `latest`), each once. bench: with the
    figures of `bench` (intervals, rates, doubts), which take a second to compute; None: for a run
    that `bench` made, as long as its folder is there. Records are one a cell and measurement;
    beside them stand the runs, the kernels, and for two runs the diff from the first to the second.
    Raises NotFoundError.
    """
    runs = list(dict.fromkeys(store.resolve(ref) for ref in refs))
    read = [_read(store, run) for run in runs]
    blocks: list[Block] = []
    extra: dict[str, Any] = {"runs": [], "kernels": [], "cells": []}
    if len(runs) == 2:
        diff = diff_cells(*(find_side(store, run, ()) for run in runs))
        blocks += diff_blocks(diff)
        extra["diff"] = diff.to_json()
    for data in read:
        own = _run_blocks(store, data, extra, bench)
        if len(runs) > 1:
            own = [Heading(f"Run {data.run}"), *_deeper(own)]
        blocks += own
        extra["runs"].append({"run": data.run, "environment": dict(data.environment)})
        extra["kernels"] += [kernel_record(row) for row in data.kernels]
        extra["cells"] += [cell_record(cell) for cell in data.cells]
    blocks += meaning_blocks()
    title = f"Run {runs[0]}" if len(runs) == 1 else f"{len(runs)} runs"
    return Document(
        schema=SCHEMA,
        title=f"{title}: attention kernels",
        blocks=tuple(blocks),
        fields=FIELDS,
        records=tuple(record for data in read for record in _records(data.cells)),
        extra=extra,
    )


def _read(store: Store, run: str) -> RunData:
    kernels = store.kernels(run)
    names = {row.profiler for row in kernels}
    best = next((name for name in TRACE_PROFILERS if name in names), None)
    steps = store.kernels(run, profilers=[best], by_op=True) if best else []
    return RunData(
        run,
        store.environment(run),
        tuple(with_predictions(store, store.cells(run))),
        tuple(kernels),
        tuple(steps),
    )


def _is_bench(store: Store, run: str) -> bool:
    path = next(row.path for row in store.runs() if row.run == run)
    return (Path(path) / BENCH_FILE).is_file()


def _run_blocks(
    store: Store, data: RunData, extra: dict[str, Any], bench: bool | None
) -> list[Block]:
    """The sections of one run in reading order: what came of it first, where it ran last."""
    several = len({row.profiler for row in data.kernels}) > 1
    view = witness_document if several else kernels_document
    blocks: list[Block] = [*problem_blocks(store.problems(data.run))]
    blocks += cell_blocks(data.cells)
    blocks += selection_blocks(data.cells)
    blocks += latency_blocks(data.cells)
    name, medians = charted_medians(data.cells)
    tf32, wrong = bool(data.environment.get("tf32")), store.wrong(data.run)
    blocks += rate_blocks(medians, name, store.peaks(data.run), tf32=tf32, wrong=wrong)
    if _is_bench(store, data.run) if bench is None else bench:
        document = bench_document(benched(store, data.run), charts=False)
        blocks += [Heading("Bench"), *_deeper(document.blocks)]
        extra.setdefault("bench", []).extend(document.records)
    if checks := store.verifications(data.run):
        document = verify_document(checks)
        blocks += [Heading("Verification"), *_deeper(document.blocks)]
        extra.setdefault("verifications", []).extend(document.records)
    if data.kernels:
        blocks += [Heading("Kernels"), *_deeper(view(data.kernels, data.cells).blocks)]
    blocks += math_blocks(data.steps)
    blocks += disagreement_blocks(data.cells, data.kernels)
    blocks += environment_blocks(data.environment)
    return blocks


def _deeper(blocks: Sequence[Block]) -> list[Block]:
    return [
        replace(block, level=block.level + 1) if isinstance(block, Heading) else block
        for block in blocks
    ]


def diff_blocks(diff: Diff) -> list[Block]:
    """A diff with a chart of the calls that both sides timed; nothing where nothing pairs."""
    if not diff.rows:
        return []
    points = tuple(
        {"call": f"{row.config} {row.backend_candidate or ''}", "µs": ns / 1e3, "side": side}
        for row in diff.rows
        if row.role == "call" and row.baseline_ns and row.candidate_ns
        for side, ns in (("baseline", row.baseline_ns), ("candidate", row.candidate_ns))
    )
    blocks: list[Block] = [Heading("What changed")]
    if points:
        caption = f"baseline: {diff.baseline}; candidate: {diff.candidate}"
        title = "Latency of a call on both sides"
        axes = ("µs", "call", "side", "µs")
        blocks.append(Chart("dumbbell", title, points, *axes, caption=caption))
    return [*blocks, *_deeper(diff_document(diff).blocks)]


def _records(cells: Sequence[CellRow]) -> Iterator[dict[str, Any]]:
    """One a cell and measurement; a cell without samples has one, with null in their place."""
    for cell in cells:
        for latency in latencies([cell]) or (None,):
            figures = {name: getattr(latency, name, None) for name in _LATENCY}
            yield {
                name: figures[name] if name in figures else getattr(cell, name) for name in FIELDS
            }
