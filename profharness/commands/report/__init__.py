"""`profharness report`: write a report on stored runs."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from profharness import stats
from profharness.atlas.rows import AtlasComparison, against
from profharness.attention.config import (
    AUTO,
    SDPA_BACKENDS,
    in_usual_order,
    parse_config,
    sdpa_setting,
)
from profharness.attention.dispatch.by_rule import Explanation
from profharness.columns import Column, column, pick
from profharness.commands._answers import (
    all_disabled_notes,
    cell_reason,
    choices_of_auto,
    not_run_notes,
    same_as_fastest,
    same_kernels_notes,
)
from profharness.commands._command import command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._output import FORMATS, SUFFIX_FORMATS, chosen_format, emit
from profharness.commands._output import sentences as in_sentences
from profharness.commands._types import (
    Force,
    Format,
    Full,
    OutputFile,
    Runs,
    store_path,
)
from profharness.commands._types import Store as StorePath
from profharness.commands.analyze.answer import limits_text
from profharness.commands.analyze.cells import analyze_all
from profharness.commands.analyze.figures import CellAnalysis, run_machine
from profharness.commands.analyze.tables import analyze_document
from profharness.commands.bench.answer import bench_answer, noise_of_auto
from profharness.commands.bench.tables import (
    MEANS,
    bench_document,
    changes_of,
    gpu_blocks,
    gpu_record,
    latency_charts,
    on_several_gpus,
    rate_blocks,
)
from profharness.commands.diff import busy_sides, diff_document, marked_names
from profharness.commands.diff.answer import diff_answer, diff_caveats, diff_record
from profharness.commands.diff.compare import Diff, DiffRow, diff_cells, find_sides
from profharness.commands.explain.answer import Way
from profharness.commands.explain.faster import faster_config_text, summarize_changes
from profharness.commands.explain.tables import VERDICTS
from profharness.commands.kernels.answer import noun
from profharness.commands.kernels.steps import math_blocks
from profharness.commands.kernels.tables import (
    call_columns,
    cell_record,
    full_names,
    kernel_record,
    kernels_document,
    longer_names,
    witness_document,
)
from profharness.commands.layers.answer import lead_length
from profharness.commands.layers.by_gpu import (
    FEW_RUNS,
    find_programs,
    layers_by_gpu_blocks,
    layers_by_gpu_record,
    overview_answer,
    overview_blocks,
)
from profharness.commands.layers.tables import layers_document, phase_blocks
from profharness.commands.report.program import (
    ProgramAdvice,
    ProgramParts,
    change_blocks,
    compared_steps,
    program_advice,
    program_parts,
)
from profharness.commands.verify import verify_document
from profharness.device_types import device_name
from profharness.devices import DeviceFact, device_and_release, short_device_name
from profharness.errors import NotFoundError, UsageError, join_few
from profharness.files import atomic_file, check_output
from profharness.measurements.agreement import backend_that_ran, disagreements, with_predictions
from profharness.measurements.evaluation import BenchResult, Loss, evaluate_bench
from profharness.measurements.measurements import (
    BenchRow,
    basis_detail,
    basis_text,
    busy_text,
    fastest_backends,
)
from profharness.program.changes import OF_A_FILE, EnvChange, with_short_devices
from profharness.program.layer_map import LayerMap, short_module
from profharness.program.roles import split_passes
from profharness.render.document import (
    MISSING,
    Block,
    Chart,
    Code,
    Document,
    Heading,
    Note,
    Table,
    as_page,
    field_names,
    for_reading,
    merged_notes,
    record,
)
from profharness.render.renderers import RENDERERS
from profharness.rows import (
    ALIASES,
    CALL_MEASUREMENTS,
    EVENT,
    KERNEL,
    LAUNCH_PROFILERS,
    CellRow,
    KernelRow,
    decisive,
)
from profharness.stats import NOTABLE_LOSS
from profharness.store import Store, open_store
from profharness.units import as_long, time_text

SCHEMA = "profharness.report/1"
_OF_OTHER_COMMANDS = re.compile(
    r"; (?:specify|to compare|compare|choose|see) [^;()]*?(?:--[a-z]|`?profharness )[^;()]*?(?=\.?$|\. |;)"
)


@dataclass(frozen=True, slots=True)
class Latency:
    """A summary of the samples of one measurement in a cell."""

    measurement: Annotated[
        str, column("measured by", importance="key", meaning="the measurement, such as `cold`")
    ]
    samples: Annotated[int, column("n", "count", importance="detail", meaning="number of samples")]
    median_ns: Annotated[
        float,
        column(
            "median µs/call",
            "time",
            importance="answer",
            scale="call",
            meaning="median of the samples; 80 % of the samples are between p10 and p90",
        ),
    ]
    p10_ns: Annotated[float, column("p10 µs/call", "time", scale="call", meaning="10th percentile")]
    p90_ns: Annotated[float, column("p90 µs/call", "time", scale="call", meaning="90th percentile")]
    min_ns: Annotated[
        float,
        column("min µs/call", "time", importance="detail", scale="call", meaning="shortest sample"),
    ]


ATLAS_COLUMNS = pick(
    AtlasComparison,
    *("config", "backend", "ran_ns", "kernel_ns", "interval", "ratio", "source", "same_kernels"),
    *("best", "regret"),
)
RAN = Column(
    "ran",
    "ran",
    importance="answer",
    meaning="the backend whose op and kernels appear in the trace, or the status of a cell that did "
    "not run",
)
PREDICTED = replace(
    *pick(CellRow, "predicted"),
    meaning="the backend that the dispatch rules choose, or `refused` if they refuse the config; "
    "empty if the rules do not cover the machine",
)
CELL_COLUMNS = (
    *pick(CellRow, "config", "backend"),
    RAN,
    PREDICTED,
    *pick(CellRow, "peak_memory_bytes", "reason"),
)
LATENCY_COLUMNS = (
    *pick(CellRow, "config", "backend"),
    *pick(Latency),
    *pick(BenchRow, "regret"),
)
TOP_KERNELS = pick(
    KernelRow, "config", "backend", "kernel_short", "launches_per_call", "call_ns", "share"
)
DEVICE = tuple(
    replace(each, meaning="") for each in pick(DeviceFact)
)  # titles are self-explanatory
WITHOUT_KERNELS = (
    "No kernels on a GPU were recorded, so the report has no step bar and no timeline."
)
LAYER_BARS = ("forward_ns", "backward_ns")
"""The columns of the table of layers that have bars."""
MOST_BOTTLENECKS = 24  # maximum number of rows of an unfolded table of bottlenecks
NO_LATENCY = dict.fromkeys(field_names(Latency))
FIELDS = (
    *("run", "config", "backend", "status", "message", "predicted", "choice", "sdpa_op"),
    *(*NO_LATENCY, "peak_memory_bytes"),
)


TERMS = {
    **{
        name: f"{MEANS[name]}; no profiler is active"
        for name in CALL_MEASUREMENTS
        if name not in ALIASES
    },
    "kernel": "a function that runs on the GPU or, on a CPU, an ATen op; kernel times come from the "
    "profiler and exclude the gaps between kernels",
    "launch": "one execution of a kernel",
    "cell": "one config on one backend",
    "refused": "rejected because the backend does not support the config; a refusal is a result, "
    "not an error",
    "GPU time": "the time during which the GPU was busy",
    "waves": "the number of blocks in a launch divided by the number of blocks that the GPU runs "
    "at once; a partial wave leaves SMs idle",
    "roofline": "the highest possible rate at a given intensity, limited by the memory bandwidth and by "
    "the peak rate",
    "intensity": "FLOPs per byte of memory traffic",
    MISSING: "a value that the profiler cannot record; it does not mean zero",
}
GLOSSARY = {
    **TERMS,
    "median": pick(Latency, "median_ns")[0].meaning,
    **{
        column.title: column.meaning
        for column in (
            RAN,
            PREDICTED,
            *pick(CellRow, "peak_memory_bytes"),
            *pick(KernelRow, "launches_per_call", "grid", "block", "shared_bytes"),
            *pick(KernelRow, "registers_per_thread", "occupancy", "share"),
            *pick(DiffRow, "role"),
            *pick(BenchRow, "half", "efficiency", "speedup", "regret"),
        )
    },
}
"""Maps words in texts to their meanings.

The glossary of a page explains the TERMS and the columns that occur on the page. The module
`traces.kernel_names` explains the parts of kernel names.
"""


def report_document(store: Store, refs: Sequence[str], *, bench: bool | None = None) -> Document:
    """Return the report on the runs that `refs` select. Include each run only once.

    If `bench` is set, include the document of `bench` for each run. If `bench` is None, include
    this document only for runs that `bench` recorded. The JSON form also contains the diff of two
    runs, the layers of programs, and all kernels and cells. Raise NotFoundError if a run does not
    exist.
    """
    if len(refs) == 2 and all(ref in (AUTO, *SDPA_BACKENDS) for ref in refs):
        raise UsageError(
            f"report takes runs, not backends; to compare two backends, use: profharness diff "
            f"{' '.join(refs)}"
        )
    runs = list(dict.fromkeys(store.resolve(ref) for ref in refs))
    names = {run: store.run_name(run) for run in runs}
    blocks: list[Block] = []
    records: list[dict[str, Any]] = []
    extra: dict[str, Any] = {"runs": [], "kernels": [], "cells": [], "summary": []}
    answer: tuple[str, ...] = ()
    every: list[CellRow] = []
    diff = None
    if len(runs) == 2:
        sides = find_sides(store, runs[0], runs[1])
        diff = diff_cells(*sides)
        answer = diff_answer(diff, busy_sides(sides))
        extra["diff"] = diff_record(diff)
    programs = find_programs(store, runs)
    maps = {each.layers.run: each.layers for each in programs.classes}
    launched = {run: store.kernels(run) for run in runs}
    parts = {
        run: program_parts(store, run, maps.get(run), longer_names(kernels))
        for run, kernels in launched.items()
    }
    if many := len(maps) > FEW_RUNS:
        answer = (overview_answer(programs),)
        blocks += [Heading("The programs compared"), *overview_blocks(programs)]
    blocks += compared_steps({names[run]: each.times for run, each in parts.items()})
    on_several = len({each.device for each in programs.classes}) > 1
    if diff and not on_several:
        blocks += diff_blocks(diff)
    elif diff and diff.environment:
        blocks += [
            Heading("What changed"),
            Table.of(pick(EnvChange), map(with_short_devices, diff.environment)),
        ]
    if diff and on_several:
        blocks += map(Note, diff_caveats(diff))
    if len(maps) > 1:
        # On one class of GPU, the diff of two runs has these figures.
        if (diff is None or on_several) and not many:
            blocks += layers_by_gpu_blocks(programs)
        extra["layer_classes"] = layers_by_gpu_record(programs)
    if classes := _classes(store, runs):
        blocks += gpu_blocks(classes)
        extra["classes"] = [gpu_record(answer) for answer in classes]
    for run in runs:
        cells, kernels = with_predictions(store, store.cells(run)), launched[run]
        every += cells
        own, sentences = _run_blocks(
            store, run, cells, kernels, extra, bench, maps.get(run), parts[run]
        )
        if len(runs) > 1:
            head = Heading(names[run], _run_detail(store, run))
            own = [head, *map(Note, sentences), *_deeper(own)]
        else:
            answer = tuple(sentences)
        blocks += own
        records += _records(cells)
        environment = store.environment(run)
        extra["runs"].append({"run": run, "environment": environment, "name": names[run]})
        extra["kernels"] += [kernel_record(row) for row in kernels]
        extra["cells"] += [cell_record(cell) for cell in cells]
    names_in_full = full_names(launched.values())
    marked = marked_names(names_in_full) if diff else {}
    several = f"{len(runs)} runs: {join_few(list(names.values()), FEW_RUNS)}"
    title = several if len(runs) > 2 else " → ".join(names.values())
    made = Document(
        SCHEMA,
        f"{title}: attention report",
        tuple(blocks),
        FIELDS,
        tuple(records),
        extra,
        answer=answer,
        subtitle=_run_detail(store, runs[0]) if len(runs) == 1 else "",
        full_names={**names_in_full, **marked, **_full_reasons(every)},
    )
    # Explain the columns with the units that people see.
    shown = for_reading(made).blocks
    blocks = [
        replace(block, text=without_options(block.text)) if isinstance(block, Note) else block
        for block in blocks
    ]
    return replace(
        made,
        blocks=(*blocks, *glossary_blocks(shown, answer)),
        answer=tuple(map(without_options, answer)),
    )


def without_options(text: str) -> str:
    """Remove the clauses that name options or commands of profharness which the reader of a page
    cannot use, such as `; specify another with --torch`.
    """
    return _OF_OTHER_COMMANDS.sub("", text)


def _run_detail(store: Store, run: str) -> str:
    """Return the GPU, the PyTorch release and the time of a run. Omit unknown values."""
    environment = store.environment(run)
    (row,) = (row for row in store.runs() if row.run == run)
    parts = [
        *device_and_release({"gpu": store.device_name(run), "torch": environment.get("torch")}),
        row.created.replace("T", " ")[:16] + " UTC" if row.created else None,
    ]
    return " · ".join(filter(None, parts))


def _classes(store: Store, runs: Sequence[str]) -> list[BenchResult]:
    """Return the results of `bench` for each run if the runs used several GPU models.

    Return an empty list if the runs used one GPU model or have no cells in common.
    """
    environments = map(store.environment, runs)
    if len({device_name(each) for each in environments}) < 2:
        return []
    timed = []
    for run in runs:
        # Programs and verifications have no times, so evaluate_bench raises NotFoundError.
        with contextlib.suppress(NotFoundError):
            timed.append(evaluate_bench(store, run))
    return timed if on_several_gpus(timed) else []


def _run_blocks(
    store: Store,
    run: str,
    cells: Sequence[CellRow],
    kernels: Sequence[KernelRow],
    extra: dict[str, Any],
    bench: bool | None,
    layers: LayerMap | None,
    parts: ProgramParts,
) -> tuple[list[Block], list[str]]:
    """Return the blocks of a run, with folded details, and sentences that summarize the run."""
    environment, wrong = store.environment(run), store.wrong(run)
    if bench is None:
        bench = any(row.run == run and row.kind == "bench" for row in store.runs())
    timed = any(cell.samples.get(name) for cell in cells for name in CALL_MEASUREMENTS)
    evaluated = evaluate_bench(store, run) if timed or bench else None
    sentences, verdict, loss = _summarize_run(store, run, cells)
    problems = store.problems(run)
    broken = []
    if cells and problems:
        broken = [f"{_count(len(problems), 'profiler or GPU problem')}: see below."]
    extra["summary"].append({"run": run, "sentences": [*sentences, *verdict, *broken]})
    machine = run_machine(store, run, cells=cells)
    analyses: list[CellAnalysis] = []
    summary: list[str] = []  # sentences for the details
    changes: list[tuple[Explanation, Way]] = []
    if evaluated:
        first, *others = bench_answer(evaluated)
        # The answer of `bench` already tells notable losses.
        notable = any(loss.real and loss.regret > NOTABLE_LOSS for loss in evaluated.losses)
        passes = split_passes(kernels, store.kernels(run, by_op=True))
        analyses = analyze_all(cells, passes, machine, wrong)
        limits = _limits(cells, analyses, evaluated)
        changes = list(changes_of(evaluated))
        # The answer of `bench` also tells that no backend is faster than auto.
        enough = notable or not any(loss.real for loss in evaluated.losses)
        summary = [*sentences, *(verdict if enough else ()), *broken]
        sentences = [
            first,
            *(() if enough else verdict),
            *summarize_changes(changes)[0],
            *limits,
            *others,
        ]
    else:
        sentences = [*sentences, *broken]
    busy = busy_text(kernels, cells)
    # The answer of `bench` already tells that the machine was too busy for some times.
    if busy and not (evaluated and evaluated.busy()):
        sentences.append(in_sentences(busy))
    details: list[Block] = []
    # the notes on the layers of a program contain its warnings
    warned = {} if layers else store.warnings([run])
    warnings = [text for texts in warned.values() for text in texts]
    blocks: list[Block] = [Heading("Problems")] if problems or warnings else []
    for each in problems:
        text = f"{each.message}; {each.remedy}"
        blocks.append(Note(text, f"{each.profiler} {each.code}", "error"))
    blocks += [Note(text, level="warning") for text in warnings]
    if not cells:
        advice = program_advice(layers) if layers else ProgramAdvice()
        blocks += [*advice.blocks, *parts.step]
        details += advice.details
        if layers is not None:
            blocks += phase_blocks(layers, level=2)
            document = layers_document(layers)
            extra.setdefault("layers", []).extend(document.records)
            lead = lead_length(layers)
            sentences = [*document.answer[:lead], *advice.sentences, *document.answer[lead:]]
            tables = [block for block in document.blocks if isinstance(block, Table)]
            blocks += [
                Heading("Layers"),
                *(replace(table, bars=LAYER_BARS, colored_by="ran") for table in tables[:1]),
                *_layer_notes(layers, sentences),
                *([] if parts.step else [Note(WITHOUT_KERNELS)]),
                *parts.layers,
            ]
        blocks += parts.kernels
        blocks += parts.timeline
        if parts.record:
            extra.setdefault("programs", []).append(parts.record)
    if evaluated:
        blocks += _advice_blocks(evaluated, changes, loss)
    tf32 = bool(environment.get("tf32"))
    drawn: list[Block] = []
    if evaluated:
        measured = basis_text(evaluated.ranking)
        medians = [
            (row.config, row.backend, row.median_ns)
            for row in evaluated.drawn()
            if row.median_ns is not None
        ]
        drawn += latency_charts(medians, measured)
        drawn += rate_blocks(medians, measured, store.peaks(run), tf32=tf32, wrong=wrong)
        # The document of `bench` has this table and its notes too.
        if not bench:
            drawn += _latency_tables(cells, evaluated.rows, [evaluated.ranking])
            drawn += map(Note, noise_of_auto(evaluated.sound_losses()))
    if evaluated and bench:
        document = bench_document(evaluated, charts=False)
        drawn += _deeper(document.blocks)
        extra.setdefault("bench", []).extend(document.records)
    if evaluated and drawn:
        blocks += [Heading("Time per call", basis_detail(evaluated.ranking)), *drawn]
    blocks += _bottleneck_blocks(analyses)
    if checks := store.verifications(run):
        document = verify_document(checks)
        blocks += [Heading("Verification"), *_deeper(document.blocks)]
        extra.setdefault("verifications", []).extend(document.records)
    blocks += selection_blocks(cells)
    profilers = {row.profiler for row in kernels}
    # Use the rows of one profiler only, because several profilers record the same launches.
    best = next((name for name in LAUNCH_PROFILERS if name in profilers), None)
    if cells:
        blocks += top_kernel_blocks([row for row in kernels if row.profiler == best])
    told = _disagreement_blocks(cells, kernels)
    apart = any(isinstance(each, Note) and each.label for each in told)
    blocks += told if apart else []
    latency = _latency_blocks(cells, evaluated.rows) if evaluated else []
    details += [*_cell_blocks(cells), *map(Note, summary), *latency]
    details += [] if apart else told
    details += math_blocks(store.kernels(run, profilers=[best], by_op=True) if best else [])
    if kernels:
        view = witness_document if len(profilers) > 1 else kernels_document
        details += [Heading(f"All {noun(kernels)}s"), *_deeper(view(kernels, cells).blocks)]
    if compared := against(cells, [row for row in kernels if row.profiler == best], environment):
        inside = [row.inside for row in compared if row.inside is not None]
        text = (
            f"{sum(inside)} of {len(inside)} measured times are within the predicted 90 % interval."
        )
        details += [
            Heading("Compared with the atlas", "measured times and the predictions of an atlas"),
            Note(text),
        ]
        details.append(Table.of(ATLAS_COLUMNS, compared))
        extra.setdefault("atlas", []).extend({"run": run} | record(row) for row in compared)
    if facts := machine.facts():
        details += [
            Heading("Device", short_device_name(machine.name or "")),
            Table.of(DEVICE, facts),
        ]
    details += environment_blocks(environment)
    return [*blocks, *_folded(details)], sentences


def _layer_notes(layers: LayerMap, told: Collection[str]) -> list[Note]:
    """Return the reasons for the backends of the layers, and warnings about missing data.

    Leave out the reasons that the sentences in `told` give.
    """
    reasons = [
        Note(reason, short_module(row.module) or row.config or row.kind)
        for row in layers.rows
        for reason in layers.shown_reasons(row)
        if f"{reason}." not in told
    ]
    return [*merged_notes(reasons), *(Note(text, "", "warning") for text in layers.caveats)]


def top_kernel_blocks(kernels: Sequence[KernelRow]) -> list[Block]:
    """Return a table of the kernel with the longest time per call in each cell.

    The table shows which kernel each backend ran. math runs many kernels that only prepare others.
    """
    timed = [row for row in kernels if row.call_ns]
    longest: dict[tuple[str, str], KernelRow] = {}
    for row in sorted(timed, key=lambda row: -(row.call_ns or 0)):
        longest.setdefault((row.config or "", row.backend or ""), row)
    cells = dict.fromkeys((row.config or "", row.backend or "") for row in timed)
    if not cells:
        return []
    left_out = len(timed) - len(cells)
    what = noun(timed)
    others = f"; {_count(left_out, f'shorter {what}')} under “All {what}s”" if left_out else ""
    detail = f"the longest {what} of each config on each backend{others}"
    columns = call_columns(TOP_KERNELS, timed)
    return [Heading(f"Top {what}s", detail), Table.of(columns, [longest[at] for at in cells])]


def _folded(blocks: Sequence[Block]) -> list[Block]:
    return [
        replace(block, folded=True) if isinstance(block, Heading) and block.level == 2 else block
        for block in blocks
    ]


def _deeper(blocks: Sequence[Block]) -> list[Block]:
    return [
        replace(block, level=block.level + 1) if isinstance(block, Heading) else block
        for block in blocks
    ]


def diff_blocks(diff: Diff) -> list[Block]:
    """Return a chart of the calls that were timed on both sides, and the document of the diff.

    Return an empty list if the diff has no rows.
    """
    if not diff.rows:
        return []
    points = tuple(
        {"call": f"{row.config} {row.backend_candidate or ''}", "µs": ns / 1e3, "side": side}
        for row in diff.rows
        if row.role == "call" and row.baseline_ns and row.candidate_ns
        for side, ns in (("baseline", row.baseline_ns), ("candidate", row.candidate_ns))
    )
    page = as_page(diff_document(diff, changed_first=True))
    blocks: list[Block] = [Heading("What changed", page.subtitle)]
    if points:
        caption = "baseline: {}; candidate: {}".format(*diff.names)
        title = "Time per call in the baseline and in the candidate"
        axes = ("µs", "call", "side", "µs")
        blocks.append(Chart("dumbbell", title, points, *axes, caption=caption))
    return [*blocks, *_deeper(page.blocks)]


def _records(cells: Sequence[CellRow]) -> Iterator[dict[str, Any]]:
    """Yield one record per cell and measurement.

    For a cell without samples, yield one record. The measurement fields of this record are None.
    """
    for cell in cells:
        own = {name: getattr(cell, name, None) for name in FIELDS}
        for figures in map(record, latencies(cell)) if latencies(cell) else [NO_LATENCY]:
            yield own | figures


def latencies(cell: CellRow) -> list[Latency]:
    """Return a summary of the samples for each measurement in CALL_MEASUREMENTS of a cell."""
    rows = []
    for name in CALL_MEASUREMENTS:
        if samples := cell.samples.get(name):
            x = stats.summarize(samples)
            rows.append(Latency(name, x.n, x.median, x.p10, x.p90, x.min))
    return rows


def _cell_blocks(cells: Sequence[CellRow]) -> Iterator[Block]:
    """Yield a table of all cells with the backend that ran, or the reason why none ran."""
    if not cells:
        return
    counts = Counter(cell.status for cell in cells)
    yield Heading("Cells", ", ".join(f"{count} {status}" for status, count in counts.items()))
    rows: list[tuple[Any, ...]] = []
    for cell in cells:
        shown = {
            "ran": backend_that_ran(cell) if cell.status == "ok" else cell.status,
            "reason": "" if cell.status == "ok" else cell_reason(cell),
            "predicted": _predicted_text(cell),
        }
        rows.append((shown, cell))
    yield Table.of(CELL_COLUMNS, rows)


def _predicted_text(cell: CellRow) -> str | None:
    """Return the backend that the rules choose for a cell, or `refused`, as `predict` shows it."""
    if cell.predicted == "eligible":
        return cell.backend
    return VERDICTS[False] if cell.predicted in ("refused", "none") else cell.predicted


def _full_reasons(cells: Sequence[CellRow]) -> dict[str, tuple[str, ...]]:
    """Map each short reason to PyTorch's own messages. A page shows them if the reader clicks it."""
    reasons: dict[str, dict[str, None]] = {}
    for cell in cells:
        if cell.status != "ok" and cell.reason:
            reasons.setdefault(cell_reason(cell), {})[cell.reason] = None
    return {short: tuple(full) for short, full in reasons.items() if [*full] != [short]}


def _latency_blocks(cells: Sequence[CellRow], evaluated: Sequence[BenchRow]) -> list[Block]:
    """Return a table of the latencies of cells under a heading, or no blocks."""
    tables = _latency_tables(cells, evaluated, CALL_MEASUREMENTS)
    return (
        [
            Heading(
                "All times per call",
                "computed from raw samples that were measured without a profiler",
            ),
            *tables,
        ]
        if tables
        else []
    )


def _latency_tables(
    cells: Sequence[CellRow], evaluated: Sequence[BenchRow], measurements: Collection[str]
) -> list[Block]:
    """Return a table of the latencies of cells by some measurements with its notes, or no blocks.

    A cell that did not run has its status in place of the median. The rows of the evaluated
    benchmark say how each latency compares with the fastest backend.
    """
    # Times that cannot be used are not compared.
    known = {(row.config, row.measurement) for row in evaluated if row.regret == 0 and not row.busy}
    regrets = {
        (row.config, row.backend, row.measurement): row.regret
        for row in evaluated
        if (row.config, row.measurement) in known and not row.busy
    }
    best = {
        name: fastest_backends(row for row in evaluated if row.measurement == name)
        for name in measurements
    }
    choices = choices_of_auto(cells)
    rows: list[tuple[Any, ...]] = []
    for cell in cells:
        if cell.status not in ("ok", "unknown"):
            empty = dict.fromkeys(column.key for column in LATENCY_COLUMNS)
            named = {"config": cell.config, "backend": cell.backend, "median_ns": cell.status}
            rows.append((empty | named, cell))
            continue
        for each in latencies(cell):
            if each.measurement in measurements:
                own = best[each.measurement].get(cell.config, ())
                same = same_as_fastest(cell.backend, choices.get(cell.config), own)
                # Put the latency before `cell`, because `samples` shows the number of samples.
                shown = {
                    "regret": same or regrets.get((cell.config, cell.backend, each.measurement)),
                    "measurement": ALIASES.get(each.measurement, each.measurement),
                }
                rows.append((shown, each, cell))
    # A heading names a single measurement, and the table of all latencies has the other values.
    hidden = ("measurement", "samples", "min_ns") if len(measurements) == 1 else ()
    columns = [column for column in LATENCY_COLUMNS if column.key not in hidden]
    if not any(latencies(cell) for cell in cells):
        return []
    table = Table.of(columns, rows)
    old = not hidden and any(row.measurement == EVENT for cell in cells for row in latencies(cell))
    return [
        table,
        *all_disabled_notes(row[-1].backend for row in rows),
        *same_kernels_notes(table),
        *not_run_notes([cell for cell in cells if cell.status != "unknown"]),
        *([Note(MEANS[EVENT], ALIASES[EVENT])] if old else []),
    ]


def selection_blocks(cells: Sequence[CellRow]) -> list[Block]:
    """Return a chart or a table of the backend that `auto` selected for each config.

    Return an empty list if `auto` ran on fewer than two configs.
    """
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
                "rest": replace(config, seq_len_q=1, seq_len_kv=1).label.replace("-s1-", "-"),
                "backend": (backend_that_ran(cell) or "unknown")
                if cell.status == "ok"
                else cell.status,
            }
        )
    if len({row["config"] for row in rows}) < 2:
        return []
    columns = (*pick(CellRow, "config"), Column("backend", "ran"))
    axes = ("lengths", "rest", "backend", "sequence length")
    return [
        Heading("Selection map"),
        Chart("map", "What auto ran", tuple(rows), *axes),
        replace(Table.of(columns, rows), drawn=True),
    ]


def _disagreement_blocks(cells: Sequence[CellRow], rows: Sequence[KernelRow]) -> list[Block]:
    """Return warnings about cells for which different sources name different backends.

    The sources are the dispatch rules, PyTorch's choice, the op and the kernels.
    """
    notes = [
        Note(text, f"{cell.config} {cell.backend}", "warning")
        for cell in cells
        for text in disagreements(cell, [row for row in rows if row.cell == cell.cell])
    ]
    none = Note("all sources agree on the backend of each cell")
    return [Heading("Disagreements"), *(notes or [none])] if cells else []


def environment_blocks(environment: Mapping[str, Any]) -> list[Block]:
    """Return a table of the recorded environment."""
    rows = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            value = [f"{name}={item}" for name, item in value.items()]
        if isinstance(value, list | tuple):
            value = ", ".join(map(str, value))
        if key not in OF_A_FILE:
            rows.append((key, "" if value is None else str(value)))
    if not rows and environment:
        return [Heading("Environment"), Note("the trace does not record where it was made")]
    columns = (Column("key", "what"), Column("value", "value"))
    return [Heading("Environment"), Table(columns, tuple(rows))] if rows else []


def _limits(
    cells: Sequence[CellRow], analyses: Sequence[CellAnalysis], evaluated: BenchResult
) -> list[str]:
    """Return a sentence on what limits the fastest backend of each config, if this is known."""
    winners = {(each.config, each.backend) for each in evaluated.sound_winners()}
    analyzed = zip(cells, analyses, strict=True)
    text = limits_text([each for cell, each in analyzed if (cell.config, cell.backend) in winners])
    return [text] if text else []


def _bottleneck_blocks(analyses: Sequence[CellAnalysis]) -> list[Block]:
    """Return the first section of the document of `analyze`: the bottlenecks of all cells.

    The section is folded if its table is long. If no bottleneck is known, it has only the findings
    and remedies, because the page has the times elsewhere, or is left out. The page has its own
    charts of the rates, and the section on all kernels has the details of the main kernels.
    """
    blocks = analyze_document(analyses).blocks
    section = [*takewhile(lambda block: not isinstance(block, Heading), blocks[1:])]
    if not any(each.bottleneck for each in analyses):
        notes = [block for block in section if isinstance(block, Note) and block.label]
        return [Heading("Findings"), *notes] if notes else []
    shown = [
        _without_details(block) if isinstance(block, Table) else block
        for block in section
        if isinstance(block, Table | Note)
    ]
    rows = sum(len(block.rows) for block in shown if isinstance(block, Table))
    whole = [blocks[0], *shown]
    return _folded(whole) if rows > MOST_BOTTLENECKS else whole


def _without_details(table: Table) -> Table:
    """Return a table without the columns that narrow terminals hide first."""
    kept = [column.importance != "detail" for column in table.columns]
    rows = tuple(tuple(compress(row, kept)) for row in table.rows)
    return replace(table, columns=tuple(compress(table.columns, kept)), rows=rows)


def _summarize_run(
    store: Store, run: str, cells: Sequence[CellRow]
) -> tuple[list[str], list[str], Loss | None]:
    """Return sentences on a run, a verdict on `auto`, and the largest loss of `auto`.

    The loss is None if `auto` is never slower than another backend. All are empty for a run without
    cells.
    """
    if not cells:
        return [], [], None
    environment = store.environment(run)
    backends: dict[str, list[CellRow]] = {}
    for cell in cells:
        backends.setdefault(cell.backend, []).append(cell)
    statuses = Counter(cell.status for cell in cells)
    sentences = [
        f"{_count(len({cell.config for cell in cells}), 'config')} on "
        f"{_count(len(backends), 'backend')} ({', '.join(backends)}), in "
        f"{_count(len(cells), 'cell')}: "
        f"{', '.join(f'{count} {status}' for status, count in statuses.most_common())}; "
        f"{', '.join(device_and_release(environment)) or 'an unknown device'}."
    ]
    refusals = []
    for backend in in_usual_order(backends):
        own = backends[backend]
        refused = [cell for cell in own if cell.status == "refused"]
        codes = dict.fromkeys(reason.code for cell in refused for reason in decisive(cell.refusals))
        if refused:
            why = ", ".join(codes) or "no reason recorded"
            refusals.append(f"{backend} {len(refused)} of {len(own)} ({why})")
    if refusals:
        sentences.append(f"Refused: {'; '.join(refusals)}.")
    if failed := [cell for cell in cells if cell.status not in ("ok", "refused")]:
        first = failed[0]
        sentences.append(
            f"{_count(len(failed), 'cell')} failed, the first: {first.backend} on {first.config} "
            f"({first.status})."
        )
    loss, verdict = None, list[str]()
    if any(cell.samples.get(name) for cell in cells for name in CALL_MEASUREMENTS):
        losses = evaluate_bench(store, run).losses
        loss = next((each for each in losses if each.real), None)
        sentences += _choice_of_auto(backends.get("auto", ()))
        verdict += _cost_of_auto(losses)
    return sentences, verdict, loss


def _advice_blocks(
    evaluated: BenchResult, changes: Sequence[tuple[Explanation, Way]], loss: Loss | None
) -> list[Block]:
    """Return a section with the changes that make configs faster, with code, or no blocks.

    `changes` are the changes with their predicted times, and `loss` is the largest measured loss of
    `auto`.
    """
    medians = {
        row.config: row.median_ns for row in evaluated.drawn() if row.backend == AUTO and row.ranked
    }
    basis = basis_text(evaluated.ranking)
    blocks: list[Block] = []
    if loss:
        use = f"Select {loss.best}" if sdpa_setting(loss.best) else f"Call {loss.best} directly"
        blocks += [Heading(use, loss.config, level=3), Code(loss.code)]
    for answer, way in changes:
        measured = medians.get(answer.config)
        beside = ""
        if measured and evaluated.ranking != KERNEL:
            beside = (
                f"Both times are kernel times. In this run, the median of {basis} is "
                f"{time_text(measured)} for auto, which includes more than the kernels."
            )
        blocks += change_blocks(faster_config_text(way), answer.config, way.advice.code, beside)
    return [Heading("Advice"), *blocks] if blocks else []


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _named(counts: Counter[str]) -> str:
    return ", ".join(f"{name} on {_count(n, 'config')}" for name, n in counts.most_common())


def _choice_of_auto(cells: Sequence[CellRow]) -> Iterator[str]:
    ran = [backend_that_ran(cell) for cell in cells if cell.status == "ok"]
    if ran:
        yield f"auto ran {_named(Counter(name or 'an unknown backend' for name in ran))}."


def _cost_of_auto(losses: Sequence[Loss]) -> Iterator[str]:
    """Yield sentences on whether another backend is faster than `auto`, and which one to select."""
    if not losses:
        return
    real = [loss for loss in losses if loss.real]
    unknown = sum(loss.open for loss in losses)
    doubt = f"; on {_count(unknown, 'config')} the difference is not significant" if unknown else ""
    compared = _count(len(losses), "config")
    if not real:
        yield (
            f"On {compared}, no other backend that accepts the call is significantly faster than "
            f"auto{doubt}."
        )
        return
    worst = real[0]
    yield (
        f"On {len(real)} of {compared}, auto was slower than the fastest other backend{doubt}. The "
        f"largest difference is on {worst.config}, where auto takes {as_long(1 + worst.regret)} as "
        f"{worst.best} ({time_text(worst.chosen_ns)} against {time_text(worst.best_ns)})."
    )
    code = (
        " The code under Advice selects the fastest backend for the config with the largest "
        "difference."
    )
    yield (
        f"Use {_named(Counter(loss.best for loss in real))}."
        f"{code if sdpa_setting(worst.best) else ''}"
    )


def glossary_blocks(blocks: Sequence[Block], answer: Sequence[str] = ()) -> list[Block]:
    """Return a section that explains the TERMS and the columns that occur in the blocks.

    Return an empty list if the blocks contain neither. List all meanings of a title that has
    several.
    """
    texts = [*answer]
    columns: dict[str, dict[str, None]] = {}
    unused = set(CALL_MEASUREMENTS)  # the names of measurements are also words such as `eager`
    for block in blocks:
        if isinstance(block, Heading):
            texts += [block.text, block.detail]
        elif isinstance(block, Note):
            texts += [block.label, block.text]
        elif isinstance(block, Chart):
            texts += [block.title, block.x_title, block.y_title, block.kind]
        elif isinstance(block, Table):
            for column in block.columns:
                texts.append(column.title)
                if column.title and column.meaning:
                    columns.setdefault(column.title, {})[column.meaning] = None
                if column.key == "measurement":
                    unused.clear()
            values = [MISSING if value is None else value for row in block.rows for value in row]
            texts += [value for value in values if isinstance(value, str)]
    words = words_of("\n".join(texts), TERMS)
    told = {word: meaning for word, meaning in words.items() if word not in unused}
    own = {title: _joined(meanings) for title, meanings in columns.items()}
    # Use the meanings of a title in the tables on this page, and not its general meaning.
    told = own | {word: meaning for word, meaning in told.items() if word not in own}
    notes = [Note(meaning.replace("`", ""), word) for word, meaning in told.items()]
    return [Heading("What the words mean", folded=True), *notes] if notes else []


def _joined(meanings: Collection[str]) -> str:
    """Join the meanings of a title. Omit meanings that are part of another meaning."""
    whole = [each for each in meanings if not any(each in m for m in meanings if m != each)]
    return "; ".join(whole)


def words_of(text: str, words: Mapping[str, str] = GLOSSARY) -> dict[str, str]:
    """Return the words that occur in a text, with their meanings."""
    return {
        word: meaning
        for word, meaning in words.items()
        if re.search(rf"(?<![\w%]){re.escape(word)}(?![\w%])", text)
    }


WithBench = Annotated[
    bool | None,
    Option(
        ("--bench/--no-bench",),
        help="Include intervals, rates and warnings about the figures.  [default: for runs of `bench`]",
    ),
]
NoCharts = Annotated[bool, Option(("--no-charts",), help="Leave out charts.")]
Images = Annotated[
    Literal["svg", "png"],
    Option(("--images",), help="The format of the charts that accompany a Markdown report."),
]


Report = tuple[Document, Path | None, str | None, bool]
"""The document, the output file or None, the format or None, and whether to overwrite the file."""


def _write_text(made: Report) -> str:
    page, path, format, force = made
    text = RENDERERS[chosen_format(format, path) if format or path else "html"](page)
    if path is not None:
        with atomic_file(path, force=force) as file:
            file.write(text.encode())
    return text


@command("report", frame=_write_text)
def report(
    *runs: Runs,
    path: OutputFile = None,
    format: Format = None,
    force: Force = False,
    bench: WithBench = None,
    store: StorePath = None,
) -> Report:
    """Write a report on runs as HTML (with charts), Markdown or another format.

    The report covers the cells, latency, kernels, problems and environment of the runs. RUN is a
    trace file, a run folder or a stored run; the default is the latest run. For two runs, the
    report shows what changed from the first to the second. For several programs, or for benchmarks
    on several GPU classes, the report contains a table with one column per class. An HTML report is
    a single file that does not need a network connection. The charts of a Markdown report are
    separate files, named out-1.svg, out-2.svg and so on.

    \b
    Example:
      profharness report trace.json.gz -o report.html

    In Python the result is the text of the report: html, md, json, jsonl or csv.
    """
    if path is not None:
        suffix = Path(path).suffix.lower()
        if format is None and suffix not in SUFFIX_FORMATS:
            known = ", ".join(FORMATS)
            raise UsageError(f"unknown report format {suffix[1:]!r}; choose from {known}")
        check_output(Path(path), force=force)
    with open_store(store_path(store)) as opened:
        made = report_document(opened, [*map(str, runs)] or ["latest"], bench=bench)
    return made, None if path is None else Path(path), format, force


@document(report)
def show(
    made: Report, *, no_charts: NoCharts = False, images: Images = "svg", full: Full = False
) -> None:
    """Write the report to stdout or a file. Charts of a Markdown report become separate files."""
    page, path, format, force = made
    if no_charts:
        kept = tuple(block for block in page.blocks if not isinstance(block, Chart))
        page = replace(page, blocks=kept)
    named = ", ".join(entry["name"] for entry in page.extra["runs"])
    about = f"run {named}" if len(page.extra["runs"]) == 1 else f"runs {named}"
    emit(replace(page, about=about), format, path, force=force, images=images, full=full)


DECLARATION = declaration_of(report)
