"""Build a report on stored runs: a part for each run, and for two runs what changed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from profharness import stats
from profharness.atlas.rows import against
from profharness.attention.config import parse_config
from profharness.columns import Column
from profharness.commands.analyze.figures import run_machine
from profharness.commands.bench.tables import (
    bench_document,
    gpu_blocks,
    gpu_record,
    latency_charts,
    lengthless,
    on_several_gpus,
    rate_blocks,
)
from profharness.commands.diff.compare import diff_cells
from profharness.commands.diff.result import Diff, find_sides
from profharness.commands.diff.tables import diff_document
from profharness.commands.kernels.steps import math_blocks
from profharness.commands.kernels.tables import (
    cell_record,
    kernel_record,
    kernels_document,
    witness_document,
)
from profharness.commands.layers.by_gpu import (
    find_programs,
    layers_by_gpu_blocks,
    layers_by_gpu_record,
)
from profharness.commands.layers.tables import layers_document
from profharness.commands.predict.tables import against_blocks
from profharness.commands.report.glossary import glossary_blocks
from profharness.commands.verify.tables import verify_document
from profharness.device_types import device_name
from profharness.errors import NotFoundError
from profharness.measurements.agreement import backend_that_ran, disagreements, with_predictions
from profharness.measurements.evaluation import BenchResult, Loss, evaluate_bench
from profharness.program.changes import OF_A_FILE
from profharness.render.devices import device_blocks
from profharness.render.document import Block, Chart, Code, Document, Heading, Note, Table
from profharness.rows import CALL_MEASUREMENTS, TRACE_PROFILERS, CellRow, KernelRow
from profharness.run import Problem
from profharness.stats import THRESHOLD
from profharness.store import Store

SCHEMA = "profharness.report/1"

_LATENCY = ("measurement", "samples", "median_ns", "p10_ns", "p90_ns", "min_ns")
CELL_COLUMNS = (
    Column("config", "config", repeat=False),
    Column("backend", "backend"),
    Column("status", "status"),
    Column("ran", "ran"),
    Column("predicted", "rules say"),
    Column("peak_memory_bytes", "peak KiB", "kib"),
    Column("reason", "reason", shrink=True),
)
LATENCY_COLUMNS = (
    Column("config", "config", repeat=False),
    Column("backend", "backend"),
    Column("measurement", "measured by"),
    Column("samples", "n", "count"),
    Column("median_ns", "median µs", "us"),
    Column("p10_ns", "p10 µs", "us"),
    Column("p90_ns", "p90 µs", "us"),
    Column("min_ns", "min µs", "us"),
    Column("against", "to fastest", "ratio"),
)
FIELDS = (
    *("run", "config", "backend", "status", "message", "predicted", "choice", "sdpa_op"),
    *(*_LATENCY, "peak_memory_bytes"),
)


def report_document(store: Store, refs: Sequence[str], *, bench: bool | None = None) -> Document:
    """Return the report on the runs that `refs` name, each once.

    `bench` adds the figures of `bench`; None adds them for a run that `bench` made while its folder
    exists. JSON also contains the diff of two runs, the layers of programs, and all kernels and
    cells. Raise NotFoundError for an unknown run.
    """
    runs = list(dict.fromkeys(store.resolve(ref) for ref in refs))
    blocks: list[Block] = []
    records: list[dict[str, Any]] = []
    extra: dict[str, Any] = {"runs": [], "kernels": [], "cells": [], "summary": []}
    if len(runs) == 2:
        diff = diff_cells(*find_sides(store, runs[0], runs[1]))
        blocks += [*change_blocks(diff), *diff_blocks(diff)]
        extra["diff"] = diff.to_json()
    programs = find_programs(store, runs)
    maps = {each.layers.run: layers_document(each.layers) for each in programs.classes}
    if len(maps) > 1:
        blocks += layers_by_gpu_blocks(programs)
        extra["layer_classes"] = layers_by_gpu_record(programs)
    if classes := _classes(store, runs):
        blocks += gpu_blocks(classes)
        extra["classes"] = [gpu_record(answer) for answer in classes]
    for run in runs:
        cells, kernels = with_predictions(store, store.cells(run)), store.kernels(run)
        own = _run_blocks(store, run, cells, kernels, extra, bench)
        if run in maps:
            own = [*maps[run].blocks, *own]
            extra.setdefault("layers", []).extend(maps[run].records)
        if len(runs) > 1:
            own = [Heading(f"Run {run}"), *_deeper(own)]
        blocks += own
        records += _records(cells)
        extra["runs"].append({"run": run, "environment": store.environment(run)})
        extra["kernels"] += [kernel_record(row) for row in kernels]
        extra["cells"] += [cell_record(cell) for cell in cells]
    blocks += glossary_blocks(blocks)
    title = f"{f'Run {runs[0]}' if len(runs) == 1 else f'{len(runs)} runs'}: attention kernels"
    return Document(SCHEMA, title, tuple(blocks), FIELDS, tuple(records), extra)


def _classes(store: Store, runs: Sequence[str]) -> list[BenchResult]:
    """Return the times of the same cells on several kinds of GPU.

    The result is empty if there is a single kind.
    """
    environments = map(store.environment, runs)
    if len({device_name(each) for each in environments}) < 2:
        return []
    timed = []
    for run in runs:
        with contextlib.suppress(NotFoundError):  # programs and verifications have no times
            timed.append(evaluate_bench(store, run))
    return timed if on_several_gpus(timed) else []


def _run_blocks(
    store: Store,
    run: str,
    cells: Sequence[CellRow],
    kernels: Sequence[KernelRow],
    extra: dict[str, Any],
    bench: bool | None,
) -> list[Block]:
    """Return the sections of one run in reading order, from results to the environment."""
    environment, wrong = store.environment(run), store.wrong(run)
    name, medians = charted_medians(cells)
    sentences, code = summarize_run(store, run, cells)
    extra["summary"].append({"run": run, "sentences": sentences})
    blocks: list[Block] = [Heading("In short"), *map(Note, sentences)] if sentences else []
    blocks += [*([Code(code)] if code else ()), *latency_charts(medians, name)]
    tf32 = bool(environment.get("tf32"))
    blocks += rate_blocks(medians, name, store.peaks(run), tf32=tf32, wrong=wrong)
    blocks += [*problem_blocks(store.problems(run)), *selection_blocks(cells)]
    blocks += [*cell_blocks(cells), *latency_blocks(cells)]
    if bench is None:
        bench = any(row.run == run and row.kind == "bench" for row in store.runs())
    if bench:
        document = bench_document(evaluate_bench(store, run), charts=False)
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
    # Use the rows of one profiler, because several profilers recorded the same launches.
    best = next((name for name in TRACE_PROFILERS if name in profilers), None)
    blocks += math_blocks(store.kernels(run, profilers=[best], by_op=True) if best else [])
    blocks += disagreement_blocks(cells, kernels)
    if told := against(cells, [row for row in kernels if row.profiler == best], environment):
        blocks += against_blocks(told)
        extra.setdefault("atlas", []).extend({"run": run} | row for row in told)
    machine = run_machine(store, run, cells=cells)
    blocks += device_blocks(machine.name, machine.facts())
    blocks += environment_blocks(environment)
    return blocks


def _deeper(blocks: Sequence[Block]) -> list[Block]:
    return [
        replace(block, level=block.level + 1) if isinstance(block, Heading) else block
        for block in blocks
    ]


def change_blocks(diff: Diff) -> list[Block]:
    """Return one sentence per verdict with the number of its rows."""
    verdicts = ", ".join(f"{count} {name}" for name, count in diff.verdicts().most_common())
    sentences = [f"{diff.baseline} → {diff.candidate}: {verdicts or 'nothing pairs'}."]
    costs = Counter(f"{row.what} {row.verdict}" for row in diff.costs if row.verdict != "same")
    if diff.costs:
        told = ", ".join(f"{name} on {count}" for name, count in costs.most_common())
        sentences.append(f"Peak memory, launches and refusals: {told or 'the same'}.")
    keys = ", ".join(change.key for change in diff.environment if change.explains)
    sentences.append(f"Of the environment these can explain it: {keys or 'nothing that is known'}.")
    return [Heading("In short"), *map(Note, sentences)]


def diff_blocks(diff: Diff) -> list[Block]:
    """Return a diff with a chart of the calls that both sides timed.

    The result is empty if no cells are paired.
    """
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
    return [*blocks, *_deeper(diff_document(diff, changed_first=True).blocks)]


def _records(cells: Sequence[CellRow]) -> Iterator[dict[str, Any]]:
    """Yield one record per cell and measurement. A cell without samples has one, with nulls."""
    for cell in cells:
        for figures in latencies(cell) or [dict.fromkeys(_LATENCY)]:
            yield {
                name: figures[name] if name in figures else getattr(cell, name) for name in FIELDS
            }


def latencies(cell: CellRow) -> list[dict[str, Any]]:
    """Return the figures of a cell's raw samples in ns, for each of its CALL_MEASUREMENTS."""
    rows = []
    for name in CALL_MEASUREMENTS:
        if samples := cell.samples.get(name):
            x = stats.summarize(samples)
            figures = (name, x.n, x.median, x.p10, x.p90, x.min)
            rows.append(dict(zip(_LATENCY, figures, strict=True)))
    return rows


def cell_blocks(cells: Sequence[CellRow]) -> list[Block]:
    """Return every cell with its status, the backend that ran, or the reason why it did not."""
    if not cells:
        return []
    counts = Counter(cell.status for cell in cells)
    detail = ", ".join(f"{count} {status}" for status, count in counts.items())
    rows = []
    for cell in cells:
        ran, reasons = backend_that_ran(cell), []
        if cell.status != "ok":
            ran, reasons = "", [cell.message, *(refusal.message for refusal in cell.refusals)]
        reason = "; ".join(dict.fromkeys(filter(None, reasons)))
        place = (cell.config, cell.backend, cell.status, ran, cell.predicted)
        rows.append((*place, cell.peak_memory_bytes, reason))
    return [Heading("Cells", detail), Table(CELL_COLUMNS, tuple(rows))]


def latency_blocks(cells: Sequence[CellRow]) -> list[Block]:
    """Return the table of all measurements."""
    rows = [
        {"config": cell.config, "backend": cell.backend} | figures
        for cell in cells
        for figures in latencies(cell)
    ]
    fastest: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row["config"], row["measurement"]
        fastest[key] = min(fastest.get(key, row["median_ns"]), row["median_ns"])
    for row in rows:
        least = fastest[row["config"], row["measurement"]]
        row["against"] = row["median_ns"] / least if least > 0 else None
    heading = Heading("Latency", "without a profiler, raw samples")
    return [heading, Table.of(LATENCY_COLUMNS, rows)] if rows else []


def charted_medians(cells: Sequence[CellRow]) -> tuple[str, list[tuple[str, str, float]]]:
    """Return the measurement that most cells have, and (config, backend, median ns) of those cells."""
    name = max(
        CALL_MEASUREMENTS, key=lambda name: sum(bool(cell.samples.get(name)) for cell in cells)
    )
    return name, [
        (cell.config, cell.backend, stats.summarize(cell.samples[name]).median)
        for cell in cells
        if cell.samples.get(name)
    ]


def selection_blocks(cells: Sequence[CellRow]) -> list[Block]:
    """Return the backend that `auto` selected for each shape. Empty for fewer than two shapes."""
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
                "rest": lengthless(config),
                "backend": (backend_that_ran(cell) or "unknown")
                if cell.status == "ok"
                else cell.status,
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
    """Return the cells for which rules, PyTorch, op and kernels do not name the same backend."""
    by_cell: dict[str | None, list[KernelRow]] = {}
    for row in rows:
        by_cell.setdefault(row.cell, []).append(row)
    notes = [
        Note(text, f"{cell.config} {cell.backend}", "warning")
        for cell in cells
        for text in disagreements(cell, by_cell.get(cell.cell, []))
    ]
    if not cells:
        return []
    notes = notes or [Note("none: all witnesses name the same backend")]
    return [Heading("Disagreements"), *notes]


def problem_blocks(problems: Sequence[Problem]) -> list[Block]:
    """Return the problems of profilers with their remedies.

    The result is empty if there are no problems.
    """
    if not problems:
        return []
    notes = [
        Note(f"{problem.message}; {problem.remedy}", f"{problem.profiler} {problem.code}", "error")
        for problem in problems
    ]
    return [Heading("Problems"), *notes]


def environment_blocks(environment: Mapping[str, Any]) -> list[Block]:
    """Return all keys of the recorded environment, in its order."""
    columns = (Column("key", "what"), Column("value", "value"))
    rows = tuple((key, _plain(value)) for key, value in environment.items() if key not in OF_A_FILE)
    if not rows and environment:
        return [Heading("Environment"), Note("the trace does not say where it was recorded")]
    return [Heading("Environment"), Table(columns, rows)] if rows else []


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def summarize_run(store: Store, run: str, cells: Sequence[CellRow]) -> tuple[list[str], str]:
    """Return sentences in reading order, and code that selects the fastest backend where `auto` cost
    the most. Both are empty for a run without cells.
    """
    if not cells:
        return [], ""
    sentences = [_what_ran(store, run, cells), *_refused(cells), *_failed(cells)]
    code = ""
    if any(cell.samples.get(name) for cell in cells for name in CALL_MEASUREMENTS):
        losses = evaluate_bench(store, run).losses
        real = [loss for loss in losses if loss.real]
        code = real[0].code if real else ""
        sentences += _auto(cells, losses)
    problems = store.problems(run)
    if problems:
        sentences.append(
            f"{_count(len(problems), 'problem')} of profilers or of the GPU: see below."
        )
    return sentences, code


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _what_ran(store: Store, run: str, cells: Sequence[CellRow]) -> str:
    environment = store.environment(run)
    configs = dict.fromkeys(cell.config for cell in cells)
    backends = dict.fromkeys(cell.backend for cell in cells)
    counts = Counter(cell.status for cell in cells)
    ended = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    device = device_name(environment) or "an unknown device"
    what = f"{_count(len(configs), 'config')} on {_count(len(backends), 'backend')}"
    torch = environment.get("torch") or "of an unknown release"
    return f"{what} ({', '.join(backends)}) make {_count(len(cells), 'cell')}: {ended}; {device}, torch {torch}."


def _refused(cells: Sequence[CellRow]) -> Iterator[str]:
    """Yield one sentence on all refusals, with the codes of their reasons."""
    parts = []
    for backend in dict.fromkeys(cell.backend for cell in cells):
        own = [cell for cell in cells if cell.backend == backend]
        refused = [cell for cell in own if cell.status == "refused"]
        codes = dict.fromkeys(reason.code for cell in refused for reason in cell.refusals)
        if refused:
            why = ", ".join(codes) or "no reason told"
            parts.append(f"{backend} {len(refused)} of {len(own)} ({why})")
    if parts:
        yield f"Refused: {'; '.join(parts)}."


def _failed(cells: Sequence[CellRow]) -> Iterator[str]:
    failed = [cell for cell in cells if cell.status not in ("ok", "refused")]
    if failed:
        first = failed[0]
        yield (
            f"{_count(len(failed), 'cell')} failed, the first: {first.backend} on {first.config} "
            f"({first.status})."
        )


def _auto(cells: Sequence[CellRow], losses: Sequence[Loss]) -> Iterator[str]:
    """Yield auto's choice, its cost relative to the best, and what to change."""
    took = Counter(
        backend_that_ran(cell) or "an unknown backend"
        for cell in cells
        if cell.backend == "auto" and cell.status == "ok"
    )
    if took:
        yield f"auto took {_named(took)}."
    if not losses:
        return
    real = [loss for loss in losses if loss.real]
    unknown = sum(loss.open for loss in losses)
    doubt = f"; on {_count(unknown, 'config')} the two are not told apart" if unknown else ""
    compared = _count(len(losses), "config")
    if not real:
        yield (
            f"On none of {compared} was another backend shown to be faster than auto by "
            f"{THRESHOLD:.0%}{doubt}: nothing to change."
        )
        return
    worst = real[0]
    yield (
        f"auto was slower than the fastest other backend on {len(real)} of {compared}, at most by "
        f"{worst.regret:.1%} ({worst.config}: {worst.chosen_ns / 1e3:,.2f} µs, {worst.best} takes "
        f"{worst.best_ns / 1e3:,.2f}){doubt}."
    )
    yield (
        f"To change: select {_named(Counter(loss.best for loss in real))}; the code below does it "
        "where auto cost most."
    )


def _named(counts: Counter[str]) -> str:
    return ", ".join(f"{name} on {_count(n, 'config')}" for name, n in counts.most_common())
