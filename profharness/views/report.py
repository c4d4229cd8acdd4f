"""A report on stored runs as one Document: a part for each run, and for two of them what changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from profharness.answers.agreement import with_predictions
from profharness.answers.bench.answer import benched
from profharness.answers.diff.answer import diff_cells, find_side
from profharness.answers.diff.model import Diff
from profharness.rows import TRACE_PROFILERS, CellRow, KernelRow
from profharness.run import BENCH_FILE
from profharness.store import Store
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

SCHEMA = "profharness.report/1"

_LATENCY = ("measurement", "samples", "median_ns", "p10_ns", "p90_ns", "min_ns")
FIELDS = (
    *("run", "config", "backend", "status", "message", "predicted", "choice", "sdpa_op"),
    *(*_LATENCY, "peak_memory_bytes"),
)


def report_document(store: Store, refs: Sequence[str], *, bench: bool | None = None) -> Document:
    """The report on the runs that refs name, each once. bench: with the figures of `bench`; None:
    for a run that `bench` made, as long as its folder is there. Beside the records stand the diff
    of two runs, and all kernels and cells. Raises NotFoundError.
    """
    runs = list(dict.fromkeys(store.resolve(ref) for ref in refs))
    blocks: list[Block] = []
    records: list[dict[str, Any]] = []
    extra: dict[str, Any] = {"runs": [], "kernels": [], "cells": []}
    if len(runs) == 2:
        diff = diff_cells(*(find_side(store, run, ()) for run in runs))
        blocks += diff_blocks(diff)
        extra["diff"] = diff.to_json()
    for run in runs:
        cells, kernels = with_predictions(store, store.cells(run)), store.kernels(run)
        own = _run_blocks(store, run, cells, kernels, extra, bench)
        if len(runs) > 1:
            own = [Heading(f"Run {run}"), *_deeper(own)]
        blocks += own
        records += _records(cells)
        extra["runs"].append({"run": run, "environment": store.environment(run)})
        extra["kernels"] += [kernel_record(row) for row in kernels]
        extra["cells"] += [cell_record(cell) for cell in cells]
    blocks += meaning_blocks()
    title = f"{f'Run {runs[0]}' if len(runs) == 1 else f'{len(runs)} runs'}: attention kernels"
    return Document(SCHEMA, title, tuple(blocks), FIELDS, tuple(records), extra)


def _run_blocks(
    store: Store,
    run: str,
    cells: Sequence[CellRow],
    kernels: Sequence[KernelRow],
    extra: dict[str, Any],
    bench: bool | None,
) -> list[Block]:
    """The sections of one run in reading order: what came of it first, where it ran last."""
    environment, wrong = store.environment(run), store.wrong(run)
    blocks: list[Block] = [*problem_blocks(store.problems(run)), *cell_blocks(cells)]
    blocks += [*selection_blocks(cells), *latency_blocks(cells)]
    name, medians = charted_medians(cells)
    tf32 = bool(environment.get("tf32"))
    blocks += rate_blocks(medians, name, store.peaks(run), tf32=tf32, wrong=wrong)
    if bench is None:
        path = next(row.path for row in store.runs() if row.run == run)
        bench = (Path(path) / BENCH_FILE).is_file()
    if bench:
        document = bench_document(benched(store, run), charts=False)
        blocks += [Heading("Bench"), *_deeper(document.blocks)]
        extra.setdefault("bench", []).extend(document.records)
    if checks := store.verifications(run):
        document = verify_document(checks)
        blocks += [Heading("Verification"), *_deeper(document.blocks)]
        extra.setdefault("verifications", []).extend(document.records)
    profilers = {row.profiler for row in kernels}
    if kernels:
        view = witness_document if len(profilers) > 1 else kernels_document
        blocks += [Heading("Kernels"), *_deeper(view(kernels, cells).blocks)]
    best = next((name for name in TRACE_PROFILERS if name in profilers), None)
    blocks += math_blocks(store.kernels(run, profilers=[best], by_op=True) if best else [])
    blocks += disagreement_blocks(cells, kernels)
    blocks += environment_blocks(environment)
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
