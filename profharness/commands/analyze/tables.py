"""Build the document of `analyze`, with figures, findings, remedies and sweeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict
from typing import Any

from profharness.columns import Column, pick
from profharness.commands.analyze.answer import analyze_answer
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
CONFIG = Column("label", "config", importance="key", repeat=False)
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
    *pick(Counters, "sm_throughput", "issue_active", "active_threads", "stall"),
)
TRAFFIC_COLUMNS = (
    Column("backend", "backend", repeat=False),
    Column("level", "traffic", importance="key"),
    Column("mb", "MB", "figures", importance="answer"),
    Column("ratio", "x compulsory", "ratio"),
    Column("intensity", "FLOP/B", "count"),
    Column("gb_per_s", "GB/s", "figures"),
)
EXPLAINED = 4  # maximum number of cells whose findings are told one by one without --full
SWEPT = 3  # minimum number of values of a sweep that has a table if there are many cells
COUNTED_SHARE = 0.01  # Kernels with a smaller share of the kernel time are not listed.


def analyze_document(analyses: Sequence[CellAnalysis], *, full: bool = False) -> Document:
    """Return the document of `analyze`, with one section per config and one table per sweep.

    Of many configs, only the findings that several of them share are told. If `full` is set, the
    document contains every finding with all of its evidence, the phases of each cell, and the facts
    of the devices.
    """
    found: dict[tuple[str, str], Peaks] = {}
    for analysis in analyses:
        if peaks := analysis.machine.peaks:
            found.setdefault((peaks.device, peaks.source), peaks)
    known = [*found.values()]
    blocks: list[Block] = []
    several = len({analysis.run for analysis in analyses}) > 1
    common, covered = ([], frozenset()) if full else common_blocks(analyses)
    pairs = dict.fromkeys((analysis.run, analysis.config) for analysis in analyses)
    if not full:
        blocks += _cell_table(analyses, with_config=len(pairs) > 1)
    brief = not full and len(pairs) > 1 and len(analyses) > EXPLAINED
    for run, config in () if brief else pairs:
        own = [each for each in analyses if (each.run, each.config) == (run, config)]
        head = Heading(config.label, f"run {run}" if several else "")
        blocks += [head, *_cell_table(own), *_phase_table(own)] if full else []
        blocks += _counter_tables(own)
        notes: list[Note] = []
        for analysis in own:
            module = short_module(analysis.module) if len(own) > 1 else None
            label = f"{module} {analysis.backend}" if module else analysis.backend
            notes += cell_notes(analysis, label, full=full, covered=covered)
        merged = list(merged_notes(notes))
        blocks += [head] if merged and not full and len(pairs) > 1 else []
        blocks += merged
    if brief:
        blocks.append(
            Note("--full explains each cell, with its phases and counters.", level="hint")
        )
    blocks += [*common, *advice_blocks(analyses)]
    sweeps = sweep(analyses)
    for name, group in sweeps:
        if not brief or len(group) >= SWEPT:
            blocks += _sweep_blocks(name, group)
    blocks += [*_changed_problems(analyses), *_sweep_charts(sweeps), *_rooflines(analyses)]
    blocks += _peak_notes(known) if analyses else ()
    devices = {each.machine.name: each.machine.facts() for each in analyses if each.machine.name}
    for name, facts in devices.items() if full else ():
        if facts:
            blocks += [Heading("Device", name), Table.of(pick(DeviceFact), facts)]
    extra = {
        "peaks": [asdict(peaks) for peaks in known],
        "devices": [
            {"device": name, "facts": [fact._asdict() for fact in facts]}
            for name, facts in devices.items()
        ],
    }
    records = tuple(map(analyze_record, analyses))
    answer = analyze_answer(analyses)
    return Document(SCHEMA, "Analysis", tuple(blocks), FIELDS, records, extra, answer=answer)


def _peak_notes(known: Sequence[Peaks]) -> Iterator[Note]:
    for peaks in known:
        rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in peaks.flops_per_s.items())
        bandwidth = peaks.bandwidth_bytes_per_s
        memory = f"{bandwidth / 1e9:,.0f} GB/s; " if bandwidth else ""
        yield Note(
            f"Peaks of {peaks.device}, {peaks.source}: {memory}TFLOP/s: {rates} ({peaks.origin})"
        )
    if not known:
        text = "The peaks of this device are unknown, and so are the shares of the peaks"
        yield Note(f"{text}.")
        yield Note("Measure them on that device with --peaks measure.", level="hint")


def _row_parts(analysis: CellAnalysis) -> tuple[Any, ...]:
    places = None if analysis.kv_places is None else ", ".join(analysis.kv_places) or "none"
    shown = {
        "label": analysis.config.label,
        "module": short_module(analysis.module),
        "places": places,
    }
    return shown, analysis, analysis.figures, analysis.main


def _cell_table(cells: Sequence[CellAnalysis], *, with_config: bool = False) -> Iterator[Block]:
    """Yield the table of the bottlenecks and rates of cells, if any cell has figures."""
    columns = (*((CONFIG,) if with_config else ()), *COLUMNS)
    if rows := [_row_parts(analysis) for analysis in cells if analysis.figures]:
        yield Table.of(filled_columns(columns, rows), rows)


def _phase_table(own: Sequence[CellAnalysis]) -> Iterator[Block]:
    """Yield the table of the phases of the cells of one config."""
    # Backends with equal phases share one group of rows in the table.
    ways: dict[tuple[PhaseFigures, ...], list[str]] = {}
    for analysis in own:
        ways.setdefault(analysis.phases, []).append(analysis.backend)
    if steps := [
        ({"execution": ", ".join(names)}, phase)
        for phases, names in ways.items()
        for phase in phases
    ]:
        yield Table.of(PHASE_COLUMNS, steps)


def _counter_tables(own: Sequence[CellAnalysis]) -> Iterator[Block]:
    """Yield tables of the memory traffic and the counters of the cells of one config."""
    if traffic := [point for analysis in own for point in traffic_points(analysis)]:
        yield Table.of(TRAFFIC_COLUMNS, traffic)
        yield from _past_l1(own)
    if counted := [
        (analysis, kernel, kernel.counters)
        for analysis in own
        for kernel in analysis.kernels
        if kernel.ncu_ns is not None and (kernel.share or 0) >= COUNTED_SHARE
    ]:
        yield Table.of(filled_columns(COUNTER_COLUMNS, counted), counted)


def _swept_title(name: str) -> str:
    return "seq_len" if name == "seq_len_kv" else name


def _sweep_blocks(name: str, group: Sequence[CellAnalysis]) -> Iterator[Block]:
    first, title = group[0], _swept_title(name)
    columns = (Column("swept", title, right=True, format="count"), *SWEEP_COLUMNS)
    rows = [({"swept": getattr(each.config, name)}, *_row_parts(each)) for each in group]
    start, end = (getattr(analysis.config, name) for analysis in (first, group[-1]))
    yield Heading(f"{first.backend} over {title} {start} to {end}", f"from {first.config.label}")
    yield Table.of(filled_columns(columns, rows), rows)
    for before, after, factor in drops(name, group):
        yield Note(f"TFLOP/s fall by a factor of {factor:.1f} from {title} {before} to {after}.")


def _changed_problems(analyses: Sequence[CellAnalysis]) -> Iterator[Note]:
    """Yield warnings for configs that look like a sweep over head_dim but differ in more."""
    for backend, scores in changed_problems(analyses):
        counts = ", ".join(f"{count:,}" for count in scores.values())
        yield Note(
            (
                f"head_dim is {', '.join(map(str, scores))}, and batch x heads x queries x keys is "
                f"{counts}: these configs also differ in how much work can run at once, so head_dim "
                "alone does not explain a change of TFLOP/s. A set such as --config "
                "'B,H,S,{512,1024}' keeps the rest equal"
            ),
            backend,
            "warning",
        )


def _sweep_charts(sweeps: Sequence[tuple[str, list[CellAnalysis]]]) -> Iterator[Chart]:
    """Yield a chart of TFLOP/s over each swept property, with one line per sweep."""
    for name in dict.fromkeys(name for name, _ in sweeps):
        groups = [group for swept, group in sweeps if swept == name]
        several = len({group[0].config for group in groups}) > 1
        rows = tuple(
            {
                "x": getattr(each.config, name),
                "y": each.figures.flops_per_s / 1e12,
                "series": f"{each.backend} {group[0].config.label}" if several else each.backend,
            }
            for group in groups
            for each in group
            if each.figures is not None and each.figures.flops_per_s
        )
        if rows:
            title = _swept_title(name)
            text = f"Achieved TFLOP/s (exact FLOPs) over {title}, one line per backend."
            axes = ("x", "y", "series", title, "TFLOP/s", text)
            yield Chart("lines", f"TFLOP/s over {title}", rows, *axes)


def traffic_points(analysis: CellAnalysis) -> list[dict[str, Any]]:
    """Return the bytes and the FLOPs per byte of a cell in DRAM, L2 and L1, as ncu counted them.

    A further row has these figures for the compulsory bytes. All rates use the time under ncu. The
    list is empty if ncu did not record the cell.
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


def _past_l1(own: Sequence[CellAnalysis]) -> Iterator[Note]:
    """Yield notes that explain why L1 bytes are missing for backends that bypass the L1."""
    names: dict[str, list[str]] = {}
    for each in own:
        if each.figures is None or not each.figures.past_l1:
            continue
        kernels = kernels_past_l1(each.kernels)
        products = [kernel.kernel for kernel in kernels if kernel.role != "attention"]
        alone = bool(products) and len(products) == len(kernels)
        what = f"the operands of {' and '.join(products)}" if alone else "K and V"
        names.setdefault(what, []).append(each.backend)
    how = "without the L1 (TMA copies from the L2 to shared memory), so no L1 traffic is counted"
    for what, backends in names.items():
        yield Note(f"loads {what} {how}", ", ".join(backends))


def _rooflines(analyses: Sequence[CellAnalysis]) -> Iterator[Chart]:
    """Yield a roofline chart of all cells, and one of the memory traffic that ncu counted.

    The second chart has one point per cell and memory. No chart is drawn if no peak rate is known.
    """
    roofs: list[tuple[str, Peaks, float]] = []
    cells, points = [], []
    for each in analyses:
        figures, peaks = each.figures, each.machine.peaks
        # Each memory is a series of the chart, so that its points have a mark of their own.
        points += [
            point
            | {"backend": f"{point['level']} bytes", "label": f"{each.backend} {point['label']}"}
            for point in traffic_points(each)
        ]
        if figures is not None and peaks is not None and figures.rate and figures.flops_per_s:
            label = f"{peaks.device} {figures.rate}, {peaks.source}"
            roofs.append((label, peaks, peaks.flops_per_s[figures.rate]))
            names = {"backend": each.backend, "label": each.config.label}
            cells.append(asdict(figures) | names)
    for title, rows, x_title, caption in (
        (
            "Roofline",
            cells,
            "FLOPs per compulsory byte",
            "Achieved FLOP/s of each cell over its intensity, below the limits of the device.",
        ),
        (
            "Roofline on measured traffic",
            points,
            "FLOPs per byte counted",
            (
                "Achieved FLOP/s of each cell under ncu (cold caches) over its FLOPs per byte, for "
                "the compulsory bytes and for those that ncu counted in DRAM, L2 and L1. The roof is "
                "DRAM's, so points of L2 and L1 may be above it."
            ),
        ),
    ):
        yield from roofline_chart(
            title, rows, roofs, x_title=x_title, y_title="FLOP/s", caption=caption
        )


ADVICE_COLUMNS = pick(
    ScenarioChoice, "scenario", "config", "best", "median", "measurement", "runner_up", "factor"
)
Covered = Set[tuple[str, str, object]]
"""Tuples (run, cell, finding or remedy) that are shown once for several configs."""


def _evidence_text(evidence: Sequence[Evidence]) -> str:
    parts = []
    for item in evidence:
        value = item.value
        if isinstance(value, float):
            value = f"{value:,.4f}".rstrip("0").rstrip(".")
        elif isinstance(value, int):
            value = f"{value:,}"
        parts.append(f"{item.name} {value}{' ' + item.unit if item.unit else ''} ({item.source})")
    return "; ".join(parts)


def shown_findings(analysis: CellAnalysis, *, full: bool) -> list[Finding]:
    """Return the findings to show for a cell.

    If `full` is set, return all findings that the bottleneck does not already state. Otherwise,
    also leave out notes, findings with the same evidence as the bottleneck, and those that another
    finding or a remedy states.
    """
    named = analysis.finding("bottleneck")
    codes = {each.code for each in analysis.findings}

    def is_repeated(finding: Finding) -> bool:
        return (
            finding.code == "faster_backend"  # its remedy has the gain
            or (finding.code == "dram_traffic" and "score_traffic" in codes)
            or (named is not None and finding.evidence == named.evidence)
        )

    return [
        each
        for each in analysis.findings
        if each is named
        or (
            (named is None or each.sentence not in named.sentence)
            and (full or not (each.severity == "note" or is_repeated(each)))
        )
    ]


def cell_notes(
    analysis: CellAnalysis, label: str, *, full: bool, covered: Covered = frozenset()
) -> Iterator[Note]:
    """Yield notes with the findings and remedies of one cell, without those in `covered`."""
    if analysis.status != "ok":
        yield status_note(analysis.status, analysis.message or "no reason recorded", label)
        return
    cell = (analysis.run, analysis.cell)
    remedies = [each for each in analysis.remedies if (*cell, each) not in covered]
    for finding in shown_findings(analysis, full=full):
        if (*cell, finding) in covered:
            continue
        yield _finding_note(finding, label, full=full)
        codes = _causes(finding, analysis)
        for remedy in [each for each in remedies if codes.intersection(each.findings)]:
            yield _remedy_note(remedy, label, "Remedy: ", full=full)
            remedies.remove(remedy)
    for remedy in remedies:
        yield _remedy_note(remedy, label, "Remedy: ", full=full)


def _causes(finding: Finding, analysis: CellAnalysis) -> set[str]:
    """Return the codes of a finding, and of those that a bottleneck sums up."""
    if finding.code != "bottleneck":
        return {finding.code}
    return {
        each.code
        for each in analysis.findings
        if each.evidence == finding.evidence or each.sentence in finding.sentence
    }


def merged_notes(notes: Iterable[Note]) -> list[Note]:
    """Merge notes with equal texts into one that names all their labels.

    Backends that run the same kernels, such as `auto` and the one that it chose, have equal notes.
    """
    labels: dict[tuple[str, str], list[str]] = {}
    for note in notes:
        labels.setdefault((note.text, note.level), []).append(note.label)
    return [Note(text, ", ".join(named), level) for (text, level), named in labels.items()]


def _finding_note(finding: Finding, label: str, prefix: str = "", *, full: bool = False) -> Note:
    figures = f"[{finding.grade}: {_evidence_text(finding.evidence)}]"
    level = "warning" if finding.severity == "major" else "note"
    return Note(
        f"{prefix}{finding.sentence} {figures if full else f'({finding.grade})'}", label, level
    )


def _remedy_note(
    remedy: Remedy,
    label: str,
    prefix: str,
    *,
    measured: str = "Measured:",
    full: bool = False,
) -> Note:
    most = measured if remedy.findings == ("faster_backend",) else "At most"
    gain = f" {most} {remedy.factor:.2f} times faster." if remedy.factor else ""
    codes = f" [{', '.join(remedy.findings)}]" if full else ""
    return Note(f"{prefix}{remedy.text}{gain}{codes}", label)


def common_blocks(analyses: Sequence[CellAnalysis]) -> tuple[list[Block], Covered]:
    """Return a section with the findings and remedies that cells of several configs share.

    Also return these findings and remedies, so that the sections on single configs can omit them.
    """
    covered: set[tuple[str, str, object]] = set()
    notes = []
    findings = ((each, item) for each in analyses for item in shown_findings(each, full=False))
    for finding, cells in common_findings(findings):
        covered |= {(cell.run, cell.cell, each) for cell, each in cells}
        notes.append(_finding_note(finding, "finding", f"{where(cells)}: "))
    remedies = ((each, item) for each in analyses for item in each.remedies)
    for remedy, members in common_remedies(remedies):
        covered |= {(cell.run, cell.cell, each) for cell, each in members}
        prefix = f"{where(members)}: "
        notes.append(_remedy_note(remedy, "remedy", prefix, measured="Up to"))
    return ([Heading("Shared by several configs"), *notes] if notes else []), covered


def advice_blocks(analyses: Sequence[CellAnalysis]) -> Iterator[Block]:
    """Yield a table of the best backends for training, prefill, decoding and low memory.

    For each of these uses that no cell represents, also yield a config to capture. Yield nothing if
    no config ran on several backends.
    """
    if made := choices(analyses):
        yield Heading("Best backend for")
        yield Table.of(ADVICE_COLUMNS, made)
        for scenario, example in missing_scenarios(analyses).items():
            text = f"no such config is stored; capture one with `profharness capture --config {example}`"
            yield Note(text, scenario)
