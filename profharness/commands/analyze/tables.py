"""Show the answer of `analyze`: figures, findings, remedies and sweeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict, replace
from typing import Any

from profharness.columns import Column, pick
from profharness.commands.analyze.figures import (
    FIELDS,
    SCHEMA,
    CellAnalysis,
    Evidence,
    Figures,
    Finding,
    KernelFigures,
    PhaseFigures,
    Remedy,
    analyze_record,
    kernels_past_l1,
)
from profharness.commands.analyze.several import (
    ScenarioChoice,
    changed_problems,
    choices,
    common_findings,
    common_remedies,
    drops,
    missing_scenarios,
    sweep,
    where,
)
from profharness.commands.bench.tables import roofline_chart
from profharness.devices import DeviceFact, Peaks
from profharness.program.counters import Counters
from profharness.program.layer_map import short_module
from profharness.render.document import (
    Block,
    Chart,
    Document,
    Heading,
    Note,
    Table,
    filled_columns,
    status_note,
)

MB = 1e6
_RATES = pick(Figures, "flops_per_s", "flops_share", "bytes_per_s", "bandwidth_share")
COLUMNS = (
    *pick(CellAnalysis, "module", "backend", "bottleneck"),
    *pick(Figures, "duration_ns", "basis"),
    *_RATES,
    *pick(Figures, "dram_bytes"),
    *pick(KernelFigures, "blocks", "waves", "occupancy"),
)
SWEEP_COLUMNS = (
    *pick(Figures, "duration_ns"),
    *_RATES,
    *pick(Figures, "intensity", "kv_head_bytes"),
    Column("places", "K+V of a head fit in"),
    *pick(KernelFigures, "waves"),
    *pick(CellAnalysis, "bottleneck"),
)
PHASE_COLUMNS = (
    Column("execution", "execution", repeat=False),
    *pick(PhaseFigures, "name", "flops", "bytes", "intensity", "bound"),
)
COUNTER_COLUMNS = (
    Column("backend", "backend", repeat=False),
    *pick(KernelFigures, "kernel", "share", "dram_bytes_per_s"),
    *pick(Counters, "dram_throughput", "l2_throughput", "l1_throughput", "l1_hit_rate"),
    *pick(Counters, "l2_hit_rate"),
    *pick(KernelFigures, "shared_share"),
    *pick(Counters, "bank_conflicts", "load_sectors", "store_sectors", "tensor_pipe", "fma_pipe"),
    *pick(Counters, "sm_throughput", "issue_active", "stall"),
)
TRAFFIC_COLUMNS = (
    Column("backend", "backend", repeat=False),
    Column("level", "traffic"),
    Column("mb", "MB", "figures"),
    Column("ratio", "x compulsory", "ratio"),
    Column("intensity", "FLOP/B", "count"),
    Column("gb_per_s", "GB/s", "figures"),
)
COUNTED_SHARE = 0.01  # minimum share of a cell's kernel time for a kernel to be listed


def analyze_document(analyses: Sequence[CellAnalysis], *, full: bool = False) -> Document:
    """Return the document of `analyze`: one section per config, one table per sweep.

    If `full` is set, the document contains every finding with all of its evidence.
    """
    blocks: list[Block] = [Note(text) for text in _peak_notes(analyses)]
    several = len({analysis.run for analysis in analyses}) > 1
    common, covered = ([], frozenset()) if full else common_blocks(analyses)
    for run, config in dict.fromkeys((analysis.run, analysis.config) for analysis in analyses):
        own = [
            analysis for analysis in analyses if (analysis.run, analysis.config) == (run, config)
        ]
        blocks.append(Heading(config.label, f"run {run}" if several else ""))
        if any(analysis.figures for analysis in own):
            lines = [_parts(analysis) for analysis in own if analysis.figures]
            blocks.append(Table.of(filled_columns(COLUMNS, lines), lines))
        if rows := _phase_rows(own):
            blocks.append(Table.of(PHASE_COLUMNS, rows))
        if traffic := [point for analysis in own for point in traffic_points(analysis)]:
            blocks.append(Table.of(TRAFFIC_COLUMNS, traffic))
            blocks += _past_l1(own)
        if counted := _counter_rows(own):
            blocks.append(Table.of(filled_columns(COUNTER_COLUMNS, counted), counted))
        for analysis in own:
            module = short_module(analysis.module) if len(own) > 1 else None
            label = f"{module} {analysis.backend}" if module else analysis.backend
            blocks += cell_notes(analysis, label, full=full, covered=covered)
    blocks += [*common, *advice_blocks(analyses)]
    sweeps = sweep(analyses)
    for name, group in sweeps:
        blocks += _sweep(name, group)
    blocks += [*_changed_problems(analyses), *_sweep_charts(sweeps)]
    blocks += [*_roofline(analyses), *_traffic_roofline(analyses)]
    devices = {each.machine.name: each.machine.facts() for each in analyses if each.machine.name}
    for name, facts in devices.items():
        if facts:
            blocks += [Heading("Device", name), Table.of(pick(DeviceFact), facts)]
    extra = {
        "peaks": [asdict(peaks) for peaks in _peaks(analyses)],
        "devices": [
            {"device": name, "facts": [fact._asdict() for fact in facts]}
            for name, facts in devices.items()
        ],
    }
    records = tuple(map(analyze_record, analyses))
    return Document(SCHEMA, "Analysis", tuple(blocks), FIELDS, records, extra)


def _peaks(analyses: Sequence[CellAnalysis]) -> list[Peaks]:
    """Return the peaks of the devices, without duplicates."""
    roofs_by_device: dict[tuple[str, str], Peaks] = {}
    for analysis in analyses:
        if peaks := analysis.machine.peaks:
            roofs_by_device.setdefault((peaks.device, peaks.source), peaks)
    return list(roofs_by_device.values())


def _peak_notes(analyses: Sequence[CellAnalysis]) -> list[str]:
    texts = []
    for peaks in _peaks(analyses):
        rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in peaks.flops_per_s.items())
        bandwidth = peaks.bandwidth_bytes_per_s
        memory = f"{bandwidth / 1e9:,.0f} GB/s; " if bandwidth else ""
        texts.append(f"{peaks.device}, {peaks.source}: {memory}TFLOP/s: {rates} ({peaks.origin})")
    if texts or not analyses:
        return texts
    text = "no peaks are known for this device, so no share of peak is told"
    return [f"{text}; --peaks measure on it gives them"]


def _parts(analysis: CellAnalysis) -> tuple[Any, ...]:
    """Return the parts of a row of a cell."""
    places = None if analysis.kv_places is None else ", ".join(analysis.kv_places) or "none"
    shown = {"module": short_module(analysis.module), "places": places}
    return shown, analysis, analysis.figures, analysis.main


def _phase_rows(own: Sequence[CellAnalysis]) -> list[tuple[Any, ...]]:
    """Return the phases of each way of execution once, under the backends that use it."""
    ways: dict[tuple[PhaseFigures, ...], list[str]] = {}
    for analysis in own:
        ways.setdefault(analysis.phases, []).append(analysis.backend)
    return [
        ({"execution": ", ".join(names)}, phase)
        for phases, names in ways.items()
        for phase in phases
    ]


def _counter_rows(own: Sequence[CellAnalysis]) -> list[tuple[Any, ...]]:
    """Return the counters of the kernels that ncu recorded, without kernels of negligible time."""
    return [
        (analysis, kernel, kernel.counters)
        for analysis in own
        for kernel in analysis.kernels
        if kernel.ncu_ns is not None and (kernel.share or 0) >= COUNTED_SHARE
    ]


def _sweep(name: str, group: Sequence[CellAnalysis]) -> list[Block]:
    first = group[0]
    title = {"seq_len_kv": "seq_len"}.get(name, name)
    columns = (Column("swept", title, right=True, format="count"), *SWEEP_COLUMNS)
    rows = [({"swept": getattr(each.config, name)}, *_parts(each)) for each in group]
    start, end = (getattr(analysis.config, name) for analysis in (first, group[-1]))
    return [
        Heading(f"{first.backend} over {title} {start} to {end}", f"from {first.config.label}"),
        Table.of(filled_columns(columns, rows), rows),
        *(
            Note(f"TFLOP/s fall {factor:.1f} times from {title} {before} to {after}")
            for before, after, factor in drops(name, group)
        ),
    ]


def _changed_problems(analyses: Sequence[CellAnalysis]) -> list[Note]:
    """Return warnings for configs that look like a sweep over head_dim but are not."""
    return [
        Note(
            f"head_dim is {', '.join(map(str, scores))} here, and batch x heads x queries x keys "
            f"is {', '.join(f'{count:,}' for count in scores.values())} with it: these configs differ in "
            "how much can run at once too, so a change of TFLOP/s over them is not of head_dim alone "
            "(a set, as in --config 'B,H,S,{512,1024}', keeps the rest)",
            backend,
            "warning",
        )
        for backend, scores in changed_problems(analyses)
    ]


def _sweep_charts(sweeps: Sequence[tuple[str, list[CellAnalysis]]]) -> list[Chart]:
    """Return charts of TFLOP/s over each swept number, with one line per backend (and config, if
    there are several).
    """
    charts = []
    for name in dict.fromkeys(name for name, _ in sweeps):
        groups = [group for swept, group in sweeps if swept == name]
        several = len({group[0].config for group in groups}) > 1
        rows = tuple(
            {
                "x": getattr(analysis.config, name),
                "y": analysis.figures.flops_per_s / 1e12,
                "series": f"{analysis.backend} {group[0].config.label}"
                if several
                else analysis.backend,
            }
            for group in groups
            for analysis in group
            if analysis.figures is not None and analysis.figures.flops_per_s
        )
        if rows:
            title = {"seq_len_kv": "seq_len"}.get(name, name)
            text = f"Achieved TFLOP/s (exact FLOPs) over {title}, a line a backend."
            axes = ("x", "y", "series", title, "TFLOP/s", text)
            charts.append(Chart("lines", f"TFLOP/s over {title}", rows, *axes))
    return charts


def traffic_points(analysis: CellAnalysis) -> list[dict[str, Any]]:
    """Return the intensity of a cell for the bytes that ncu counted in each memory, and for
    compulsory bytes.

    All rates use the time under ncu. Return an empty list if ncu counted no bytes.
    """
    figures = analysis.figures
    if figures is None or not figures.ncu_ns or figures.dram_bytes is None:
        return []
    levels = (
        ("compulsory", figures.compulsory_bytes),
        ("DRAM", figures.dram_bytes),
        ("L2", figures.l2_bytes),
        ("L1", None if figures.past_l1 else figures.l1_bytes),
    )
    return [
        {
            "backend": analysis.backend,
            "level": level,
            "mb": moved / MB,
            "ratio": moved / figures.compulsory_bytes,
            "intensity": figures.flops / moved,
            "gb_per_s": moved / figures.ncu_ns,
            "flops_per_s": figures.flops / figures.ncu_ns * 1e9,
            "label": analysis.config.label,
        }
        for level, moved in levels
        if moved
    ]


def _past_l1(own: Sequence[CellAnalysis]) -> list[Note]:
    """Return notes that explain why some cells have no value for L1 bytes."""
    names: dict[str, list[str]] = {}
    for each in own:
        if each.figures is None or not each.figures.past_l1:
            continue
        kernels = kernels_past_l1(each.kernels)
        products = [kernel.kernel for kernel in kernels if kernel.role != "attention"]
        alone = bool(products) and len(products) == len(kernels)
        what = f"the operands of {' and '.join(products)}" if alone else "K and V"
        names.setdefault(what, []).append(each.backend)
    how = "past the L1 (TMA copies from the L2 to shared memory), so the L1 counts none"
    return [Note(f"moves {what} {how}", ", ".join(backends)) for what, backends in names.items()]


_Roofs = list[tuple[str, Peaks, float]]


def _roofs(analyses: Iterable[CellAnalysis]) -> _Roofs:
    """Return the roof for the device and dtype of each cell with known peaks."""
    return [
        (f"{peaks.device} {figures.rate}, {peaks.source}", peaks, peaks.flops_per_s[figures.rate])
        for analysis in analyses
        if (peaks := analysis.machine.peaks) and (figures := analysis.figures) and figures.rate
    ]


def _traffic_roofline(analyses: Sequence[CellAnalysis]) -> list[Chart]:
    """Return a roofline of the cells that ncu recorded, with one point per memory."""
    rows = [
        # one series per memory, so that marks differ; the label of a point is its cell
        point
        | {"backend": f"{point['level']} bytes", "label": f"{point['backend']} {point['label']}"}
        for analysis in analyses
        for point in traffic_points(analysis)
    ]
    return roofline_chart(
        "Roofline on measured traffic",
        rows,
        _roofs(analyses),
        x_title="FLOPs per byte counted",
        y_title="FLOP/s",
        caption="Achieved FLOP/s of each cell under ncu (cold caches) over its FLOPs per byte: "
        "compulsory bytes, and those that ncu counted in DRAM, L2 and L1. The roof is DRAM's, so that "
        "points on L2 and L1 bytes may stand above it.",
    )


def _roofline(analyses: Sequence[CellAnalysis]) -> list[Chart]:
    """Return a roofline of all cells for their devices and dtypes. Empty without peaks."""
    shown = [
        analysis
        for analysis in analyses
        if analysis.figures and analysis.figures.flops_per_s and analysis.figures.rate
    ]
    rows = [
        asdict(analysis.figures) | {"backend": analysis.backend, "label": analysis.config.label}
        for analysis in shown
        if analysis.figures is not None and analysis.machine.peaks is not None
    ]
    return roofline_chart(
        "Roofline",
        rows,
        _roofs(shown),
        x_title="FLOPs per compulsory byte",
        y_title="FLOP/s",
        caption="Achieved FLOP/s of each cell over its intensity, below what the device can do at most.",
    )


EVIDENCE_SHOWN = 4
ADVICE_COLUMNS = pick(
    ScenarioChoice, "scenario", "config", "best", "median", "measurement", "runner_up", "factor"
)
Covered = Set[tuple[str, str, object]]
"""The run, the cell, and the finding or remedy that is shown once for several configs."""


def evidence_text(evidence: Sequence[Evidence], shown: int | None = None) -> str:
    """Format the first `shown` pieces of evidence as `name value unit (source); …`."""
    parts = [
        f"{item.name} {_value(item.value)}{' ' + item.unit if item.unit else ''} ({item.source})"
        for item in evidence[:shown]
    ]
    return "; ".join(parts)


def _value(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else f"{value:,}"


def shown_findings(analysis: CellAnalysis, *, full: bool) -> list[Finding]:
    """Return the findings to show for a cell: with `full`, all that the bottleneck does not repeat."""
    named = analysis.finding("bottleneck")
    if named is None:
        return [each for each in analysis.findings if full or each.severity != "note"]
    return [
        each
        for each in analysis.findings
        if each is named
        or (
            each.sentence not in named.sentence
            and (full or (each.severity != "note" and each.evidence != named.evidence))
        )
    ]


def cell_notes(
    analysis: CellAnalysis, label: str, *, full: bool, covered: Covered = frozenset()
) -> list[Note]:
    """Return the notes on one cell, without those that are covered by another section."""
    if analysis.status != "ok":
        return [status_note(analysis.status, analysis.message or "no reason recorded", label)]
    place = (analysis.run, analysis.cell)
    notes = [
        _finding_note(finding, label, full=full)
        for finding in shown_findings(analysis, full=full)
        if (*place, finding) not in covered
    ]
    notes += [
        _remedy_note(remedy, f"{label}, remedy {rank}")
        for rank, remedy in enumerate(analysis.remedies, start=1)
        if (*place, remedy) not in covered
    ]
    return notes


def _finding_note(finding: Finding, label: str, *, full: bool) -> Note:
    evidence = evidence_text(finding.evidence, None if full else EVIDENCE_SHOWN)
    level = "warning" if finding.severity == "major" else "note"
    return Note(f"{finding.sentence} [{finding.grade}: {evidence}]", label, level)


def _at(where: str, note: Note) -> Note:
    return replace(note, text=f"{where}: {note.text}")


def _remedy_note(remedy: Remedy, label: str, measured: str = "Measured:") -> Note:
    most = measured if remedy.findings == ("faster_backend",) else "At most"
    gain = f" {most} {remedy.factor:.2f} times faster." if remedy.factor else ""
    return Note(f"{remedy.text}{gain} [{', '.join(remedy.findings)}]", label)


def common_blocks(analyses: Sequence[CellAnalysis]) -> tuple[list[Block], Covered]:
    """Return a section on what cells of several configs have in common, and what it covers."""
    findings = common_findings(
        [(each, item) for each in analyses for item in shown_findings(each, full=False)]
    )
    remedies = common_remedies([(each, item) for each in analyses for item in each.remedies])
    covered: set[tuple[str, str, object]] = set()
    notes = []
    for finding, members in findings:
        covered |= {(cell.run, cell.cell, each) for cell, each in members}
        notes.append(_at(where(members), _finding_note(finding, finding.code, full=False)))
    for remedy, holders in remedies:
        covered |= {(cell.run, cell.cell, each) for cell, each in holders}
        notes.append(_at(where(holders), _remedy_note(remedy, "remedy", "Up to")))
    return ([Heading("In several configs"), *notes] if notes else []), covered


def advice_blocks(analyses: Sequence[CellAnalysis]) -> list[Block]:
    """Return which backend is best for what, judged by these cells, or what to capture to find out.

    Return an empty list if no config has several backends.
    """
    made = choices(analyses)
    if not made:
        return []
    notes = [
        Note(f"no such config here; `profharness capture --config {example}` makes one", scenario)
        for scenario, example in missing_scenarios(analyses).items()
    ]
    return [Heading("Best backend for"), Table.of(ADVICE_COLUMNS, made), *notes]
