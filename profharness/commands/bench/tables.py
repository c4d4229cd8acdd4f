"""Build the document of `bench`, with tables, warnings, charts and sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from typing import Any

from profharness.attention.config import ALL_DISABLED, AUTO, parse_config
from profharness.attention.costs import compulsory_bytes, flops
from profharness.attention.dispatch.by_rule import Explanation
from profharness.attention.dispatch.predict import every_refusal
from profharness.columns import Column, pick
from profharness.commands._answers import (
    NUMBER,
    all_disabled_notes,
    cell_reason,
    choices_of_auto,
    merged_text,
    not_run_notes,
    same_as_fastest,
    same_kernels_notes,
)
from profharness.commands.bench.answer import TRUST, bench_answer, noise_of_auto, samples_text
from profharness.commands.explain.answer import Way
from profharness.commands.explain.calls import run_configs
from profharness.commands.explain.faster import faster_configs, summarize_changes
from profharness.device_types import device_name
from profharness.devices import (
    Peaks,
    device_and_release,
    flop_peak,
    short_device_name,
    short_device_names,
)
from profharness.errors import counted, join_few, percent
from profharness.measurements.agreement import replaced_by, replacement_notes
from profharness.measurements.evaluation import BenchResult, Loss
from profharness.measurements.measurements import (
    AXES,
    DTYPE_TOKEN,
    LENGTH,
    Axis,
    BenchRow,
    Sweep,
    basis_text,
    families,
    family,
    fastest_backends,
)
from profharness.render.document import (
    FLOPS,
    Block,
    Chart,
    Code,
    Document,
    Heading,
    More,
    Note,
    Roof,
    Table,
    field_names,
    filled_columns,
    record,
)
from profharness.rows import (
    ALIASES,
    COLD,
    EAGER,
    EVENT,
    GPU_MEASUREMENTS,
    GRAPH,
    HOST,
    KERNEL,
    SHARED_CORES,
    WALL,
    CellRow,
)
from profharness.units import MIB

SHOWN_SWEEPS = 4
"""The maximum number of sweeps per axis that are described or drawn. The longest are shown."""
SHOWN_MARKS = 5
"""The maximum number of events, such as crossovers, that are marked in a chart."""
SHOWN_PAIRS = 24
"""The maximum number of rows in the chart of latency by dtype."""


def _axis_blocks(answer: BenchResult) -> Iterator[Block]:
    """Yield sentences about each sweep over an axis, and about each pair of dtypes."""
    if not answer.sweeps and not answer.dtypes:
        return
    yield Heading("Along each axis", "configs that differ in only one property")
    for axis in AXES:
        own = [sweep for sweep in answer.sweeps if sweep.axis == axis.key]
        for sweep in own[:SHOWN_SWEEPS]:
            if sweep.statement:
                yield Note(f"{sweep.name}: {sweep.statement}", axis.title)
            if sweep.growth:
                text = "; ".join(growth.text for growth in sweep.growth)
                yield Note(f"{sweep.name} over {axis.title}: {text}", "peak memory")
        if len(own) > SHOWN_SWEEPS:
            more = f"{len(own) - SHOWN_SWEEPS} more sweeps are hidden; the JSON contains all sweeps"
            yield Note(more, axis.title)
    yield from (Note(pair.statement, "dtype") for pair in answer.dtypes)


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
    """Return a line chart for each sweep over each axis.

    Each row is a dict with the label of the config under "label", the backend under "backend", and
    the value under the key that `unit` names. Events of the sweeps in `found` are marked if their
    kind is in `events`.
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
                (event.place, event.mark)
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


SCHEMA = "profharness.bench/1"
FIELDS = field_names(BenchRow)
CELL_FIELDS = (
    *("config", "backend", "status", "message", "choice", "peak_memory_bytes", "clocks", "tuning"),
    *("refusals", "warnings"),
)
RAW, TURNS = "samples_ns", "turns"
MEANS = {
    COLD: "GPU time of one call with the L2 cache flushed, excluding host time",
    GRAPH: "time per call in a CUDA-graph replay with a warm L2 cache",
    KERNEL: "kernel time of a profiled call with a warm L2 cache",
    EAGER: "time per call when a program issues calls one after another, with a warm L2 cache",
    HOST: "CPU time of an eager call; if it is close to the eager time, the GPU waits for the CPU",
    EVENT: "time of a cold call in an older run, measured with the L2 cache flushed and including "
    "part of the launch path",
    WALL: "wall-clock time of one call on the CPU",
}
COUNTED = {
    "exact": "Rates are computed from the exact number of FLOPs and from the compulsory bytes, "
    "which are those of the inputs and outputs.",
    "flash-attention": "Rates are computed from the number of FLOPs as the FlashAttention "
    "benchmarks count them and from the compulsory bytes, which are those of the inputs and outputs.",
}
"""Maps each way to count FLOPs to a sentence on it."""
OF_THE_MACHINE = ("driver", "torch_cuda", "cudnn", "triton", "python", "cpu", "num_threads", "tf32")
SHOWN_CODES = 3
VERIFIED = {True: "yes", False: "WRONG", None: None}
LOG_LINES = 6
"""The maximum number of lines of compiler output that are shown for a failed cell."""
BESIDE = (*GPU_MEASUREMENTS, EVENT, HOST)
"""Measurements with a column of their own in the main table."""
ONLY_FULL = ("half_between_processes", "mean_ns", "std_ns")
COLUMNS = (
    *pick(BenchRow, "config", "backend", "median_ns", "half", "half_between_processes"),
    *pick(BenchRow, "mean_ns", "std_ns"),
    *(
        Column(
            name,
            f"median {ALIASES.get(name, name)} µs/call",
            "time",
            scale="call",
            optional=True,
        )
        for name in BESIDE
    ),
    *pick(BenchRow, "flops_per_s", "bytes_per_s", "efficiency", "queries_per_s"),
    *pick(BenchRow, "sequences_per_s", "regret", "speedup", "verified"),
    Column("mark", "note", importance="answer", optional=True),
)
LOSS_COLUMNS = pick(Loss, "config", "choice", "chosen_ns", "best", "best_ns", "regret", "remark")


def changes_of(answer: BenchResult) -> Iterator[tuple[Explanation, Way]]:
    """Yield the changes that are predicted to make configs faster on `auto`."""
    labels = [cell.config for cell in answer.cells if cell.backend == AUTO]
    yield from faster_configs(
        run_configs(answer.name, labels, answer.environment, answer.times_of_auto)
    )


def bench_document(
    answer: BenchResult,
    *,
    explain: bool = False,
    raw: bool = False,
    charts: bool = True,
    full: bool = False,
) -> Document:
    """Return the document of `bench`.

    If `explain` is set, the document lists every reason for a refusal. If `raw` is set, the records
    contain the samples. If `charts` is not set, the document has no charts. The means, the standard
    deviations, the differences between processes, the protocol and the machine are shown only if
    `full` is set.
    """
    environment = answer.environment
    change, other_changes = summarize_changes(changes_of(answer))
    first, *others = bench_answer(answer)
    facts = [*device_and_release(environment, full=full), answer.created[:10]]
    table = _main_table(answer, full)
    blocks: list[Block] = [
        Heading(f"Benchmark of run {answer.name}", ", ".join(filter(None, facts))),
        table,
        *(Note(text, AUTO) for text in noise_of_auto(answer.sound_losses())),
        *_legend(answer, full),
        *same_kernels_notes(table),
        Note(_measured(answer), "measured") if full else More("how the times were measured"),
        # warnings about cells in which torch.compile replaced the requested attention by SDPA
        *(Note(text, where, "warning") for where, text in replacement_notes(answer.cells)),
        *_failed(answer, explain=explain, full=full),
        *other_changes,
        *_doubts(answer),
        *(_charts(answer) if charts else ()),
        *_regret(answer),
        *([Heading("Comparison")] if answer.conclusions else ()),
        *(Note(text) for text in answer.conclusions),
        *_axis_blocks(answer),
    ]
    records = [record(row) for row in answer.rows]
    for plain in records if raw else ():
        samples = answer.samples.get((plain["config"], plain["backend"]), {})
        values = samples.get(str(plain["measurement"]), ())
        plain[RAW] = list(values)
        plain[TURNS] = list(map(list, getattr(values, "turns", ())))
    return Document(
        SCHEMA,
        f"Bench of run {answer.name}",
        tuple(blocks),
        (*FIELDS, RAW, TURNS) if raw else FIELDS,
        tuple(records),
        {
            "run": answer.run,
            "ranking": answer.ranking,
            "convention": answer.convention,
            "peaks": record(answer.peaks) if answer.peaks else None,
            "winners": [record(winner) for winner in answer.winners],
            "losses": [record(loss) for loss in answer.losses],
            "conclusions": list(answer.conclusions),
            "axes": [record(sweep) for sweep in answer.sweeps],
            "dtypes": [record(pair) for pair in answer.dtypes],
            "replaced": [
                {"backend": cell.backend, "config": cell.config, "took": backend or None}
                for cell in answer.cells
                if (backend := replaced_by(cell)) is not None
            ],
            "cells": [record(cell, CELL_FIELDS) for cell in answer.cells],
            "environment": environment,
        },
        answer=(first, *change, *others),
    )


def _charts(answer: BenchResult) -> Iterator[Block]:
    """Yield charts of latency, FLOP/s, the roofline, peak memory, and latency by dtype.

    Backends with wrong results are left out.
    """
    medians = [
        (row.config, row.backend, row.median_ns)
        for row in answer.drawn()
        if row.median_ns and row.verified is not False
    ]
    intervals = {
        (row.config, row.backend): (row.low_ns, row.high_ns)
        for row in answer.ranking_rows()
        if row.low_ns and row.high_ns
    }
    every: dict[str, Any] = {"axes": AXES, "found": answer.sweeps}
    yield from latency_charts(medians, answer.ranking, intervals, **every)
    tf32 = bool(answer.environment.get("tf32"))
    yield from rate_blocks(medians, answer.ranking, answer.peaks, tf32=tf32, **every)
    ranked = [row for row in answer.drawn() if row.ranked]
    memory = [
        {"label": row.config, "backend": row.backend, "MiB": row.peak_memory_bytes / MIB}
        for row in ranked
        if row.peak_memory_bytes
    ]
    yield from sweep_charts(memory, "Peak memory", "MiB", "PyTorch's allocator")
    rows: list[dict[str, Any]] = [
        {
            "pair": f"{row.backend}, {family(row.config, DTYPE_TOKEN)}",
            "dtype": str(parse_config(row.config).dtype),
            "µs": row.median_ns / 1e3,
            "label": row.config,
        }
        for row in ranked
        if row.median_ns
    ]
    counts = Counter(row["pair"] for row in rows)
    pairs = [pair for pair, count in counts.items() if count > 1][:SHOWN_PAIRS]
    if shown := tuple(row for row in rows if row["pair"] in pairs):
        title = f"Time per call by dtype ({answer.ranking})"
        yield Chart("dumbbell", title, shown, "µs", "pair", "dtype", "µs", label="label")


def _legend(answer: BenchResult, full: bool) -> Iterator[Note]:
    """Yield notes on the columns, and on what each measurement is good for.

    Yield nothing if nothing was measured.
    """
    if not answer.figures():
        return
    measured = {str(row.measurement) for row in answer.rows}
    text = MEANS.get(answer.ranking) or basis_text(answer.ranking)
    text += "; rates are computed from it, and ±% is half the width of its 95 % interval"
    if all(row.half_between_processes is None for row in answer.figures()):
        text += ", without differences between processes (to include these, use --processes)"
    elif full:
        text += "; ±% processes is the part due to differences between processes"
    yield Note(text, "median")
    if len(trusted := [name for name in TRUST if name in measured]) > 1:
        yield Note(" ".join(dict.fromkeys(TRUST[name] for name in trusted)), "measurements")
    yield from all_disabled_notes([row.backend for row in answer.rows])
    if any(row.host_ns for row in answer.rows):
        yield Note(MEANS[HOST], HOST)
    if full:
        yield _rates(answer)
    named = answer.figures() if answer.baseline is not None else ()
    if baselines := dict.fromkeys(str(row.baseline) for row in named if row.baseline):
        yield Note(f"relative to {'; '.join(baselines)}", "speed-up")


def _rates(answer: BenchResult) -> Note:
    """Return a note on how the rates are computed, and on the peaks that they are compared with."""
    ceiling = "The efficiency is unknown, because the peaks of this device are unknown."
    if peaks := answer.peaks:
        against = dict.fromkeys(row.against for row in answer.ranking_rows() if row.against)
        which = "; ".join(against) or f"{peaks.source} of {peaks.device}"
        ceiling = f"% of roofline is relative to the peak that limits a config first: {which}."
    return Note(f"{COUNTED[answer.convention]} {ceiling}", "rates")


def _sample_counts(answer: BenchResult) -> str:
    figures = answer.figures()
    return f"{samples_text(figures)} samples per figure" if figures else ""


def _measured(answer: BenchResult) -> str:
    """Return text on the protocol and the machine, so that users can repeat the measurement."""
    parts = [answer.created, _sample_counts(answer)]
    if several := max((row.processes or 0 for row in answer.figures()), default=0):
        parts.append(f"in {several} process{'es' if several > 1 else ''}")
    for key, text in (("warmup", "warm-up calls {}"), ("seed", "seed {}")):
        if key in answer.protocol:
            parts.append(text.format(answer.protocol[key]))
    environment = answer.environment
    parts += [
        f"{name} of commit {text}" for name, text in environment.get("backend_commit", {}).items()
    ]
    parts += [f"{key} {environment[key]}" for key in OF_THE_MACHINE if environment.get(key)]
    return ", ".join(filter(None, parts))


def _main_table(answer: BenchResult, full: bool) -> Table:
    """Return a table with one line per cell and a column for the median of each measurement.

    The line of a cell without samples shows its status in place of the first median.
    """
    medians: dict[tuple[str, str], dict[str, float | None]] = {}
    for row in answer.rows:
        own = medians.setdefault((row.config, row.backend), dict.fromkeys(BESIDE))
        if row.measurement != answer.ranking:
            own[str(row.measurement)] = row.median_ns
        if row.host_ns:
            own[HOST] = row.host_ns
    batches = {parse_config(row.config).batch for row in answer.figures()}
    numbers: dict[tuple[str, str], list[str]] = {}
    for number, cells in enumerate(_doubtful(answer).values(), start=1):
        for cell in cells:
            numbers.setdefault(cell, []).append(f"[{number}]")
    busy, comparable = answer.busy(), answer.comparable()
    ranked = answer.ranking_rows()
    fastest = {row.config: (row.config, row.backend) for row in ranked if row.regret == 0}
    sound = Counter(row.config for row in answer.figures() if row.ranked and not row.busy)
    choices, best = choices_of_auto(answer.cells), fastest_backends(ranked)
    lines: list[tuple[Any, ...]] = []
    for row in ranked:
        cell = row.config, row.backend
        if row.median_ns is None:
            empty = dict.fromkeys(column.key for column in COLUMNS)
            status = None if row.status == "ok" else row.status
            named = {"config": row.config, "backend": row.backend, "median_ns": status}
            lines.append((empty | named | {"mark": ""},))
            continue
        values = {
            "regret": same_as_fastest(
                row.backend, choices.get(row.config), best.get(row.config, ())
            )
            or row.regret,
            "verified": VERIFIED[row.verified],
            **medians[cell],
        }
        values["mark"] = " ".join(numbers.get(cell, ()))
        baseline = tuple(str(row.baseline).split(" "))
        needed: dict[str, set[object]] = {
            "efficiency": {cell},
            "regret": {cell, fastest.get(row.config)},
            "speedup": {cell, (row.config, str(row.baseline)), baseline},
        }
        values |= {key: None for key, cells in needed.items() if busy & cells}
        ranks = row.config in comparable and sound[row.config] > 1
        if not ranks or row.backend == ALL_DISABLED:
            values["regret"] = None
        # If all batch sizes are equal, sequences/s shows no more than the time, so omit it.
        if len(batches) < 2:
            values["sequences_per_s"] = None
        lines.append((values, row))
    columns = [each for each in _columns(answer) if full or each.key not in ONLY_FULL]
    if not answer.figures():
        columns = filled_columns(columns, lines)
    return Table.of(columns, lines)


def _columns(answer: BenchResult) -> tuple[Column, ...]:
    """Return the columns of the main table.

    The title of the median by which backends are ranked names its measurement if the table also has
    other measurements. Only a named baseline has a column of speed-ups.
    """
    titles = {}
    measured = {row.measurement for row in answer.rows if row.median_ns}
    if len(measured) > 1 or any(row.host_ns for row in answer.rows):
        name = ALIASES.get(answer.ranking, answer.ranking)
        titles["median_ns"] = f"median {name} µs/call"
    if isinstance(answer.baseline, str):
        titles["speedup"] = f"speed-up vs {answer.baseline}"
    return tuple(
        replace(each, title=titles.get(each.key, each.title))
        for each in COLUMNS
        if answer.baseline is not None or each.key != "speedup"
    )


def _mostly_wide(answer: BenchResult) -> bool:
    """Return whether the intervals of most figures are too wide, so that a mark would say little."""
    figures = answer.figures()
    return 2 * sum(row.is_wide(answer.precision) for row in figures) > len(figures) > 2


def _doubtful(answer: BenchResult) -> dict[str, list[tuple[str, str]]]:
    """Return the cells, as (config, backend), to which each warning about a measurement applies.

    A warning about a measurement that does not rank the backends starts with its name. If several
    measurements of a cell share a warning, the cell is listed once. Warnings that differ only in
    their numbers are one warning.
    """
    order = {(row.config, row.backend): place for place, row in enumerate(answer.rows)}
    doubts: dict[tuple[str, str], dict[str, str]] = {}
    for row in sorted(answer.rows, key=lambda row: row.measurement != answer.ranking):
        lead = "" if row.measurement == answer.ranking else f"{row.measurement}: "
        # The last warning of such a row is that its interval is wide. It applies to every short
        # run, so it is shown once for all rows.
        for text in row.doubts[:-1] if row.is_wide(answer.precision) else row.doubts:
            doubts.setdefault((row.config, row.backend), {}).setdefault(text, lead + text)
    alike: dict[str, list[tuple[str, tuple[str, str]]]] = {}
    for key in sorted(doubts, key=lambda key: order[key]):
        for text in doubts[key].values():
            alike.setdefault(NUMBER.sub("#", text), []).append((text, key))
    cells = {
        merged_text([text for text, _ in group]): list(dict.fromkeys(key for _, key in group))
        for group in alike.values()
    }
    wide = [(row.config, row.backend) for row in answer.figures() if row.is_wide(answer.precision)]
    if wide and not _mostly_wide(answer):
        cells[
            f"the interval is wider than ±{percent(answer.precision, 1)}; take more samples to "
            "narrow it"
        ] = wide
    return cells


def _doubts(answer: BenchResult) -> Iterator[Note]:
    figures = answer.figures()
    wide = sum(row.is_wide(answer.precision) for row in figures)
    if wide and _mostly_wide(answer):
        text = (
            f"the intervals of {wide} of {counted(len(figures), 'figure')} are wider than "
            f"±{percent(answer.precision, 1)}; take more samples to narrow them"
        )
        yield Note(text, "precision", "warning")
    for number, (text, cells) in enumerate(_doubtful(answer).items(), start=1):
        where = " ".join(cells[0]) if len(cells) == 1 else f"{len(cells)} figures"
        yield Note(text, f"[{number}] {where}", "warning")


def _failed(answer: BenchResult, *, explain: bool, full: bool) -> Iterator[Note]:
    """Yield a note for each reason why cells did not run, and for each warning of the workers.

    The warning about shared cores is left out, because it is among the warnings about unreliable
    measurements. If `explain` is set, yield every reason for a refusal in PyTorch's words, including
    the reasons that only the dispatch rules give. If `full` is set, yield PyTorch's own messages.
    """

    def reasons_of(cell: CellRow) -> list[str]:
        if not (explain and cell.refusals):
            return [_opening(cell_reason(cell, full=full))]
        config = parse_config(cell.config)
        return [
            f"{reason.message} [{reason.code}{', by rule' if reason.source == 'rule' else ''}]"
            for reason in every_refusal(config, cell.backend, cell.refusals, answer.environment)
        ]

    yield from not_run_notes(answer.cells, reasons_of)
    configs: dict[tuple[str, str], list[str]] = {}
    for cell in answer.cells:
        for text in cell.warnings:
            if text != SHARED_CORES:
                configs.setdefault((cell.backend, text), []).append(cell.config)
    for (backend, text), labels in configs.items():
        where = labels[0] if len(labels) == 1 else f"{len(labels)} configs"
        yield Note(text, f"{backend}, {where}", "warning")


def _opening(message: str) -> str:
    """Return the first line of a message.

    If this line ends with a colon, append the first lines of the compiler output that follows.
    """
    first, *rest = message.splitlines() or [""]
    log = [line.strip() for line in rest if line.strip()][:LOG_LINES]
    return " ".join([first, *log]) if first.endswith(":") else first


def _regret(answer: BenchResult) -> Iterator[Block]:
    """Yield a table of the configs on which `auto` ran another backend than the fastest one, and code
    that selects the fastest one.
    """
    losses = [
        loss for loss in answer.sound_losses() if not loss.same_backend and loss.verdict != "faster"
    ]
    if not losses:
        return
    yield Heading(
        "Where auto is slower",
        "compared with the fastest of the other backends with correct results",
    )
    yield Table.of(LOSS_COLUMNS, losses)
    labels_of: dict[str, list[str]] = {}
    for loss in losses:
        if loss.real:
            labels_of.setdefault(loss.code, []).append(loss.config)
    for code, labels in list(labels_of.items())[:SHOWN_CODES]:
        text = f"the following code selects the fastest backend for {join_few(labels, SHOWN_CODES)}"
        yield Note(text, "faster")
        yield Code(code)


def latency_charts(
    medians: Sequence[tuple[str, str, float]],
    measurement: str,
    intervals: Mapping[tuple[str, str], tuple[float, float]] | None = None,
    *,
    axes: Sequence[Axis] = (LENGTH,),
    found: Sequence[Sweep] = (),
) -> list[Chart]:
    """Return a line chart of latency for each sweep over each axis, and a dot chart of other
    configs.

    `medians` contains tuples (config label, backend, ns). `intervals` maps (config label, backend)
    to (low, high) in ns. The crossovers and ends of the sweeps in `found` are marked.
    """
    rows: list[dict[str, Any]] = []
    for label, backend, ns in medians:
        if ns > 0:
            row = {"label": label, "backend": backend, "µs": ns / 1e3}
            low, high = (intervals or {}).get((label, backend), (None, None))
            row |= {"low": low and low / 1e3, "high": high and high / 1e3}
            rows.append(row)
    charts = sweep_charts(
        rows,
        "Time per call",
        "µs",
        measurement,
        axes=axes,
        found=found,
        events=("crossover", "end"),
    )
    swept = {row["label"] for chart in charts for row in chart.rows}
    points = tuple(row for row in rows if row["label"] not in swept)
    if points:
        title = f"Time per call by config and backend ({measurement})"
        keys = ("µs", "label", "backend", "µs")
        charts.append(Chart("dots", title, points, *keys, low="low", high="high"))
    return charts


def roofline_chart(
    title: str,
    rows: Sequence[dict[str, Any]],
    roofs: Iterable[tuple[str, Peaks, float]],
    *,
    caption: str = "",
    x_title: str = "FLOP per byte",
) -> list[Chart]:
    """Return a roofline chart.

    `roofs` contains a tuple (label, peaks, FLOP/s) for each device and dtype. Equal roofs are
    merged, so that their labels do not overlap. The list is empty if there are no rows or no roof
    is known.
    """
    labels: dict[tuple[float, float], dict[str, None]] = {}
    for label, peaks, rate in roofs:
        if peaks.bandwidth_bytes_per_s:
            labels.setdefault((peaks.bandwidth_bytes_per_s, rate), {})[label] = None
    merged = tuple(Roof("; ".join(names), *key) for key, names in labels.items())
    if not rows or not merged:
        return []
    keys = ("intensity", "flops_per_s", "backend", x_title, FLOPS, caption)
    return [Chart("roofline", title, tuple(rows), *keys, roofs=merged, label="label")]


def rate_blocks(
    medians: Sequence[tuple[str, str, float]],
    measurement: str,
    peaks: Peaks | None,
    *,
    tf32: bool = False,
    wrong: Set[tuple[str, str]] = frozenset(),
    axes: Sequence[Axis] = (LENGTH,),
    found: Sequence[Sweep] = (),
) -> list[Block]:
    """Return charts of FLOP/s over each axis, and a roofline chart if the peaks are known.

    `medians` contains tuples (config label, backend, ns). `wrong` contains pairs (config label,
    backend) to leave out, because their results are wrong. If `tf32` is set, fp32 products may use
    the tensor cores. The drops of the sweeps in `found` are marked.
    """
    rows: list[dict[str, Any]] = [
        {
            "label": label,
            "config": (config := parse_config(label)),
            "backend": backend,
            "TFLOP/s": flops(config) / ns / 1e3,
            "flops_per_s": flops(config) / ns * 1e9,
            "intensity": flops(config) / compulsory_bytes(config),
        }
        for label, backend, ns in medians
        if ns > 0 and (label, backend) not in wrong
    ]
    swept = sweep_charts(
        rows, "TFLOP/s", "TFLOP/s", measurement, axes=axes, found=found, events=("drop",)
    )
    blocks: list[Block] = list(swept)
    if peaks is not None and rows:
        dtypes = dict.fromkeys(row["config"].dtype or "" for row in rows)
        rates = [rate for dtype in dtypes if (rate := flop_peak(peaks, dtype, tf32=tf32))]
        roofs = [(f"{name}, {peaks.source}", peaks, rate) for name, rate in rates]
        caption = (
            "The byte counts include only the compulsory memory traffic, and the FLOP counts are "
            f"exact. The roofs are the {peaks.source} peaks of {short_device_name(peaks.device)}. "
            "Points can lie above the sloped roof if the data is in the L2 cache."
        )
        blocks += roofline_chart(f"Roofline ({measurement})", rows, roofs, caption=caption)
    if wrong:
        named = ", ".join(f"{backend} on {label}" for label, backend in sorted(wrong))
        blocks.append(Note(f"excluded from all comparisons of rates: {named}", "wrong", "error"))
    return blocks


SHOWN = 3


def benches_by_gpu_document(
    answers: Sequence[BenchResult],
    *,
    explain: bool = False,
    raw: bool = False,
    full: bool = False,
) -> Document:
    """Return one document with the results of `bench` on each GPU, and a table that compares them.

    The records of all runs are concatenated. The other JSON keys come from the first run, except
    for the `classes` key, which has an item per GPU. If there is only one result, return its
    document.
    """
    documents = [bench_document(answer, explain=explain, raw=raw, full=full) for answer in answers]
    first = documents[0]
    if len(answers) < 2:
        return first
    blocks = [*chain.from_iterable(document.blocks for document in documents)]
    return Document(
        first.schema,
        f"Benchmarks of runs {', '.join(answer.name for answer in answers)}",
        (*blocks, *gpu_blocks(answers)),
        first.fields,
        tuple(chain.from_iterable(document.records for document in documents)),
        {**first.extra, "classes": [gpu_record(answer) for answer in answers]},
        answer=(
            *(
                f"{device}: {bench_answer(each)[0]}"
                for device, each in zip(_devices(answers), answers, strict=True)
            ),
            *(f"{text[0].upper()}{text[1:]}." for text in other_winners(answers)),
        ),
    )


def on_several_gpus(answers: Sequence[BenchResult]) -> bool:
    """Return whether the results come from several devices and some cell ran more than once."""
    cells = [{(row.config, row.backend) for row in answer.rows} for answer in answers]
    alike = sum(map(len, cells)) > len(set(chain.from_iterable(cells)))
    return alike and len({device_name(answer.environment) for answer in answers}) > 1


def gpu_record(answer: BenchResult) -> dict[str, object]:
    """Return the JSON record of the results on one GPU."""
    return {
        "run": answer.run,
        "device": device_name(answer.environment) or answer.name,
        "environment": answer.environment,
        "winners": [record(winner) for winner in answer.winners],
    }


def _devices(answers: Sequence[BenchResult]) -> list[str]:
    """Return the short name of each device, or the name of the run if the device is unknown."""
    devices = [device_name(answer.environment) or "" for answer in answers]
    short = short_device_names(filter(None, devices))
    return [short.get(device, answer.name) for device, answer in zip(devices, answers, strict=True)]


def gpu_blocks(answers: Sequence[BenchResult]) -> list[Block]:
    """Return a table of the medians on each GPU, and of the speed-ups relative to the first GPU."""
    names = _devices(answers)
    columns = [Column("config", "config", repeat=False), Column("backend", "backend")]
    columns += [
        Column(f"us{at}", f"{name} median µs/call", "time", scale="call")
        for at, name in enumerate(names)
    ]
    columns += [
        Column(f"times{at}", f"{name} speed-up", "ratio") for at, name in enumerate(names[1:], 1)
    ]
    medians = [
        {(row.config, row.backend): row.median_ns for row in answer.ranking_rows()}
        for answer in answers
    ]
    rows = []
    for cell in dict.fromkeys(chain.from_iterable(medians)):
        figures = [each.get(cell) for each in medians]
        base = figures[0]
        times = [base / other if base and other else None for other in figures[1:]]
        rows.append((*cell, *figures, *times))
    return [
        Heading("GPUs compared", f"medians of {basis_text(answers[0].ranking)}"),
        Table(tuple(columns), tuple(rows)),
    ]


def other_winners(answers: Sequence[BenchResult]) -> list[str]:
    """Return one sentence per further GPU on the configs whose fastest backend is another one there."""
    best = [{winner.config: winner for winner in answer.winners} for answer in answers]
    first, *others = _devices(answers)
    texts = []
    for device, each in zip(others, best[1:], strict=True):
        both = [config for config in best[0] if config in each]
        # Skip configs for which these two backends do not differ significantly.
        apart = [
            config
            for config in both
            if each[config].backend != best[0][config].backend
            and best[0][config].backend
            not in (*each[config].ties, *each[config].open, *each[config].busy)
        ]
        examples = ", ".join(
            f"{config} ({best[0][config].backend} → {each[config].backend})"
            for config in apart[:SHOWN]
        )
        texts.append(
            f"the fastest backend on {device} differs from the fastest on {first} for "
            f"{len(apart)} of {len(both)} "
            f"configs{(f': {examples}' if examples else '')}"
        )
    return texts
