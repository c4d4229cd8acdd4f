"""Build the document of `analyze`, with figures, findings, remedies and sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, replace
from typing import Any

from profharness.attention.config import Config
from profharness.columns import Column, pick
from profharness.commands._answers import NUMBER, all_disabled_notes, merged_text
from profharness.commands.analyze.answer import LIMITS, analyze_answer, gain_text
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
    separate,
    sweep,
    where,
)
from profharness.commands.bench.tables import roofline_chart
from profharness.devices import DeviceFact, Peaks, short_device_name
from profharness.errors import counted
from profharness.measurements.measurements import basis_text
from profharness.program.counters import Counters
from profharness.program.layer_map import short_module
from profharness.render.document import (
    Block,
    Chart,
    Document,
    Heading,
    More,
    Note,
    Table,
    filled_columns,
    status_note,
)
from profharness.rows import KERNEL

_RATES = pick(Figures, "flops_per_s", "flops_share", "bytes_per_s", "bandwidth_share")
CONFIG = Column("label", "config", importance="key", shrink=True, repeat=False)
COLUMNS = (
    *pick(CellAnalysis, "module", "backend", "bottleneck"),
    *pick(Figures, "duration_ns", "basis"),
    *_RATES,
    *pick(Figures, "dram_bytes"),
    Column("kernel", "main kernel", importance="detail", shrink=True),
    # Narrow terminals hide these before the kernel to which they belong.
    *(
        replace(column, importance="detail", spare=1)
        for column in pick(KernelFigures, "blocks", "waves", "occupancy")
    ),
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
    Column("moved_bytes", "MiB", "mib", importance="answer"),
    Column("ratio", "x compulsory", "ratio"),
    Column("intensity", "FLOP/B", "count"),
    Column("gb_per_s", "GB/s", "figures"),
)
EXPLAINED = 4  # maximum number of cells whose findings are all shown without --full
SWEPT = 3  # minimum number of values of a sweep whose drops are shown without --full
MOST_SHARED = 2  # maximum number of findings, and of remedies, of many cells without --full
COUNTED_SHARE = 0.01  # Kernels with a smaller share of the kernel time are not listed.


def analyze_document(
    analyses: Sequence[CellAnalysis],
    caveats: Sequence[str] = (),
    launch_limit: str = "",
    *,
    full: bool = False,
) -> Document:
    """Return the document of `analyze`: a table of the cells, their findings and remedies.

    If there are many cells, only the findings that most configs share are shown. If `full` is set,
    the document has a section per config with every finding, its evidence, the phases and the
    counters. The best backends, the sweeps, and the facts of the devices follow. `launch_limit` is
    the last sentence of the answer.
    """
    found: dict[tuple[str, str], Peaks] = {}
    for analysis in analyses:
        if peaks := analysis.machine.peaks:
            found.setdefault((peaks.device, peaks.source), peaks)
    known = [*found.values()]
    answer = (*analyze_answer(analyses), *([launch_limit] if launch_limit else ()))
    blocks = [*(_full_sections(analyses) if full else _brief_sections(analyses, answer))]
    sweeps = sweep(analyses)
    for name, group in sweeps:
        if full or len(group) >= SWEPT:
            blocks += _sweep_blocks(name, group, full=full)
    blocks += all_disabled_notes([each.backend for each in analyses if each.figures])
    blocks += map(Note, dict.fromkeys(each.lengths for each in analyses if each.lengths))
    blocks += [*_changed_problems(analyses), *_sweep_charts(sweeps), *_rooflines(analyses)]
    blocks += _peak_notes(known, analyses, full=full) if analyses else ()
    devices = {each.machine.name: each.machine.facts() for each in analyses if each.machine.name}
    for name, facts in devices.items() if full else ():
        if facts:
            blocks += [
                Heading("Device", short_device_name(name)),
                Table.of(pick(DeviceFact), facts),
            ]
    blocks += [Note(text, level="warning") for text in caveats]
    extra = {
        "peaks": [asdict(peaks) for peaks in known],
        "devices": [
            {"device": name, "facts": [fact._asdict() for fact in facts]}
            for name, facts in devices.items()
        ],
        "caveats": list(caveats),
    }
    records = tuple(map(analyze_record, analyses))
    return Document(SCHEMA, "Analysis", tuple(blocks), FIELDS, records, extra, answer=answer)


def _full_sections(analyses: Sequence[CellAnalysis]) -> Iterator[Block]:
    """Yield the tables and notes of each config, and then the best backends."""
    for heading, own in _by_config(analyses):
        yield replace(heading, detail=_detail(own, full=True))
        yield from (*_cell_table(own), *_phase_table(own), *_counter_tables(own))
        yield from _notes_of(own, full=True)
    yield from advice_blocks(analyses)


def _brief_sections(analyses: Sequence[CellAnalysis], answer: Sequence[str]) -> Iterator[Block]:
    """Yield a table of the cells, the findings that several configs share, and other findings.

    If there are many cells, yield only the shared findings or, for a single config, the bottleneck
    and the first remedy of each cell. Omit remedies that the answer already contains.
    """
    configs = _by_config(analyses)
    several = len(configs) > 1
    many = len(analyses) > EXPLAINED
    told = " ".join(answer)
    answered = {
        (each.run, each.cell, remedy)
        for each in analyses
        for remedy in each.remedies
        if remedy.text.removesuffix(".") in told
    }
    common, shared = common_blocks(separate(analyses), answered, MOST_SHARED if many else None)
    if table := [*_cell_table(analyses, with_config=several)]:
        yield Heading("Bottlenecks", _detail(analyses))
        yield from table
        if many and several:
            yield from _legend(analyses)
    yield from common
    for heading, own in () if many and several else configs:
        notes = _notes_of(own, most=1 if many else None, covered=answered | shared)
        if several and notes:
            yield heading
        yield from notes
    absent = Counter(each.status for each in analyses if each.status != "ok")
    if many and several and absent:
        counts = ", ".join(f"{count} {status}" for status, count in absent.items())
        yield Note(f"{absent.total()} of {counted(len(analyses), 'cell')} did not run: {counts}")
    if many:
        yield More("the phases, counters and all findings of each cell")


_MEANINGS = {**LIMITS, "latency": "neither compute nor memory is near its peak"}


def _legend(analyses: Sequence[CellAnalysis]) -> Iterator[Note]:
    """Yield a note on the meaning of each bottleneck that occurs, the most frequent first."""
    counts = Counter(each.bottleneck for each in analyses if each.bottleneck)
    for name, _ in counts.most_common():
        yield Note(_MEANINGS[name], name)


def _by_config(analyses: Sequence[CellAnalysis]) -> list[tuple[Heading, list[CellAnalysis]]]:
    groups: dict[tuple[str, Config], list[CellAnalysis]] = {}
    for analysis in analyses:
        groups.setdefault((analysis.run, analysis.config), []).append(analysis)
    several = len({run for run, _ in groups}) > 1
    return [
        (Heading(config.label, own[0].machine.context() if several else ""), own)
        for (_, config), own in groups.items()
    ]


def _notes_of(
    own: Sequence[CellAnalysis],
    *,
    full: bool = False,
    most: int | None = None,
    covered: Covered = frozenset(),
) -> list[Note]:
    """Return the notes on the cells of one config, merging equal notes.

    `most` is the maximum number of findings, and of remedies, per cell.
    """
    notes, not_run = list[tuple[str, Note]](), list[Note]()
    for analysis in own:
        if analysis.status != "ok":
            not_run.append(
                status_note(analysis.status, _reason(analysis, full=full), analysis.backend)
            )
            continue
        module = short_module(analysis.module) if len(own) > 1 else None
        name = f"{module} {analysis.backend}" if module else analysis.backend
        found = cell_notes(analysis, full=full, most=most, covered=covered)
        notes += [(name, note) for note in found]
    return [*merged_notes(notes, full=full), *not_run]


def _reason(analysis: CellAnalysis, *, full: bool) -> str:
    """Return why a cell did not run, in PyTorch's own words if `full` is set."""
    return (None if full else analysis.short_reason) or analysis.message or "no reason recorded"


def _peak_notes(
    known: Sequence[Peaks], analyses: Sequence[CellAnalysis], *, full: bool
) -> Iterator[Note]:
    """Yield notes on the peaks with which the rates are compared.

    If `full` is set, the notes list all known peaks.
    """
    compared = {each.figures.rate for each in analyses if each.figures}
    for peaks in known:
        rates = ", ".join(
            f"{name} {rate / 1e12:.4g}"
            for name, rate in peaks.flops_per_s.items()
            if full or name in compared
        )
        bandwidth = peaks.bandwidth_bytes_per_s
        parts = (
            f"{bandwidth / 1e9:,.0f} GB/s" if bandwidth else "",
            f"TFLOP/s: {rates}" if rates else "",
        )
        origin = f" ({peaks.origin})" if full else ""
        text = "; ".join(filter(None, parts))
        kind = peaks.source[0].upper() + peaks.source[1:]  # data sheet or measured
        yield Note(f"{kind} peaks of {short_device_name(peaks.device)}: {text}{origin}")
    if not known:
        yield Note("The peaks of this device are unknown, so no percentages of peak are shown.")
        if any(each.machine.name for each in analyses):
            yield Note(
                "To measure the peaks, run analyze with --peaks measure on the device of the run.",
                level="hint",
            )


def _row_parts(analysis: CellAnalysis) -> tuple[Any, ...]:
    places = None if analysis.kv_places is None else ", ".join(analysis.kv_places) or "none"
    shown = {
        "label": analysis.config.label,
        "module": short_module(analysis.module),
        "places": places,
    }
    if analysis.finding("score_traffic"):
        # These rates count only the compulsory bytes, but unfused attention moves many more bytes.
        shown |= {"bytes_per_s": None, "bandwidth_share": None}
    return shown, analysis, analysis.figures, analysis.main


def rates_basis(cells: Iterable[CellAnalysis]) -> str | None:
    """Return the measurement of the times of all cells, or None if there are several."""
    bases = {each.figures.basis for each in cells if each.figures and not each.busy}
    return bases.pop() if len(bases) == 1 else None


def _detail(cells: Sequence[CellAnalysis], *, full: bool = False) -> str:
    """Return the detail of a heading: the run of the cells, and what their rates are based on.

    If there are several runs or bases, leave them out.
    """
    contexts = {each.machine.context(full=full) for each in cells}
    basis = rates_basis(cells)
    of_ops = basis == KERNEL and all(each.parts == "op" for each in cells)
    parts = [
        *(contexts if len(contexts) == 1 else ()),
        f"rates of {'op times' if of_ops else basis_text(basis)}" if basis else "",
    ]
    return ", ".join(filter(None, parts))


def _cell_table(cells: Sequence[CellAnalysis], *, with_config: bool = False) -> Iterator[Block]:
    """Yield the table of the bottlenecks and rates of cells, if any cell has figures."""
    module, *others = COLUMNS
    columns = (module, *((CONFIG,) if with_config else ()), *others)
    basis = rates_basis(cells)
    if basis is not None:  # The heading names it.
        columns = tuple(each for each in columns if each.key != "basis")
    if basis == KERNEL:
        # Unlike the other measurements, the time of the kernels is a mean.
        columns = tuple(
            replace(each, title="mean µs/call") if each.key == "duration_ns" else each
            for each in columns
        )
    shown = [each for each in cells if each.figures]
    if rows := [*map(_row_parts, shown)]:
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
    if profiled := [
        (analysis, kernel, kernel.counters)
        for analysis in own
        for kernel in analysis.kernels
        if kernel.ncu_ns is not None and (kernel.share or 0) >= COUNTED_SHARE
    ]:
        yield Table.of(filled_columns(COUNTER_COLUMNS, profiled), profiled)


def _swept_title(name: str) -> str:
    return "seq_len" if name == "seq_len_kv" else name


def _sweep_blocks(name: str, group: Sequence[CellAnalysis], *, full: bool) -> Iterator[Block]:
    """Yield a note on each drop of the rate in a sweep. If `full` is set, first yield its table."""
    first, title = group[0], _swept_title(name)
    if full:
        columns = (Column("swept", title, right=True, format="count"), *SWEEP_COLUMNS)
        rows = [({"swept": getattr(each.config, name)}, *_row_parts(each)) for each in group]
        start, end = (getattr(each.config, name) for each in (first, group[-1]))
        heading = f"{first.backend} over {title} {start} to {end}"
        yield Heading(heading, f"from {first.config.label}")
        yield Table.of(filled_columns(columns, rows), rows)
    for before, after, factor in drops(name, group):
        text = f"TFLOP/s fall by a factor of {factor:.1f} from {title} {before} to {after}"
        aside = "" if full else f" (sweep from {first.config.label})"
        yield Note(f"{text}{aside}." if full else f"{first.backend}: {text}{aside}.", FINDING)


def _changed_problems(analyses: Sequence[CellAnalysis]) -> Iterator[Note]:
    """Yield warnings for configs that look like a sweep over head_dim, but also differ otherwise."""
    for backend, scores in changed_problems(analyses):
        counts = ", ".join(f"{count:,}" for count in scores.values())
        yield Note(
            (
                f"{backend}: the configs with head_dim {', '.join(map(str, scores))} also differ in how much "
                f"work can run in parallel (batch x heads x queries x keys is {counts}), so "
                "head_dim alone does not explain a change in TFLOP/s. A set such as "
                "'B,H,S,{512,1024}' changes only head_dim"
            ),
            FINDING,
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
            text = f"Achieved TFLOP/s (exact FLOPs) against {title}, with one line per backend."
            axes = ("x", "y", "series", title, "TFLOP/s", text)
            yield Chart("lines", f"TFLOP/s over {title}", rows, *axes)


def traffic_points(analysis: CellAnalysis) -> list[dict[str, Any]]:
    """Return the bytes and the FLOPs per byte of a cell in DRAM, L2 and L1, as counted by ncu.

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
            "moved_bytes": moved,
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
    for what, backends in names.items():
        text = (
            f"{', '.join(backends)}: TMA copies load {what} from the L2 cache into shared memory and bypass the L1 "
            "cache, so no L1 traffic is counted"
        )
        yield Note(text, FINDING)


def _rooflines(analyses: Sequence[CellAnalysis]) -> Iterator[Chart]:
    """Yield a roofline chart of all cells, and one of the memory traffic that ncu counted.

    The second chart has one point per cell and memory. No chart is drawn if no peak rate is known.
    """
    roofs: list[tuple[str, Peaks, float]] = []
    cells, points = [], []
    for each in analyses:
        figures, peaks = each.figures, each.machine.peaks
        # Each memory is a series of the chart, so that its points have their own mark.
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
            "Each cell's achieved FLOP/s against its arithmetic intensity, with the device's roofline.",
        ),
        (
            "Roofline on measured traffic",
            points,
            "FLOPs per byte counted",
            (
                "Each cell's achieved FLOP/s under ncu (cold caches) against its FLOPs per byte. "
                "The bytes are either compulsory bytes or bytes that ncu counted in DRAM, L2 or L1. "
                "The roofline is for DRAM, so the points for L2 and L1 may lie above it."
            ),
        ),
    ):
        yield from roofline_chart(title, rows, roofs, x_title=x_title, caption=caption)


# Labels of notes. They are short, so that all notes have the same layout.
BOTTLENECK, FINDING, REMEDY = "bottleneck", "finding", "remedy"
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
    analysis: CellAnalysis,
    *,
    full: bool,
    most: int | None = None,
    covered: Covered = frozenset(),
) -> Iterator[Note]:
    """Yield notes with the first findings and remedies of one cell, except those in `covered`.

    The remedy whose gain was measured precedes all others.
    """
    cell = (analysis.run, analysis.cell)
    remedies = [each for each in analysis.remedies[:most] if (*cell, each) not in covered]
    shown = shown_findings(analysis, full=full)[:most]
    for finding in sorted(shown, key=lambda each: each.code != "faster_backend"):
        if (*cell, finding) in covered:
            continue
        yield _finding_note(finding, full=full)
        codes = _causes(finding, analysis)
        for remedy in [r for r in remedies if r.measured or codes.intersection(r.findings)]:
            yield _remedy_note([remedy], full=full)
            remedies.remove(remedy)
    for remedy in remedies:
        yield _remedy_note([remedy], full=full)


def _causes(finding: Finding, analysis: CellAnalysis) -> set[str]:
    """Return the code of a finding or, for a bottleneck, of all findings that it sums up."""
    if finding.code != "bottleneck":
        return {finding.code}
    return {
        each.code
        for each in analysis.findings
        if each.evidence == finding.evidence or each.sentence in finding.sentence
    }


def merged_notes(notes: Iterable[tuple[str, Note]], *, full: bool) -> list[Note]:
    """Merge equal notes on cells into one note that begins with the names of the cells.

    Backends that run the same kernels, such as `auto` and the backend that PyTorch chose for it, have
    equal notes.
    Unless `full` is set, texts may differ in their numbers, which become ranges.
    """
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}  # names and texts
    for name, note in notes:
        form = note.text if full else NUMBER.sub("#", note.text)
        groups.setdefault((form, note.label, note.level), []).append((name, note.text))
    return [
        Note(f"{', '.join(dict(group))}: {merged_text([text for _, text in group])}", label, level)
        for (_, label, level), group in groups.items()
    ]


def _kind(finding: Finding) -> dict[str, str]:
    """Return the label and the level of the note on a finding."""
    return {
        "label": BOTTLENECK if finding.code == "bottleneck" else FINDING,
        "level": "warning" if finding.severity == "major" else "note",
    }


def _finding_note(finding: Finding, *, full: bool) -> Note:
    figures = f"[{finding.grade}: {_evidence_text(finding.evidence)}]"
    text = finding.sentence.removeprefix("Bottleneck: ")  # the label says this
    return Note(f"{text} {figures if full else f'({finding.grade})'}", **_kind(finding))


def _remedy_note(alike: Sequence[Remedy], *, full: bool = False) -> Note:
    """Return the note on a remedy, which may be that of several cells."""
    remedy, gain = alike[0], gain_text(alike)
    gained = f" {gain[0].upper()}{gain[1:]}." if gain else ""
    codes = f" [{', '.join(remedy.findings)}]" if full else ""
    return Note(f"{remedy.text}{gained}{codes}", REMEDY)


def common_blocks(
    analyses: Sequence[CellAnalysis], answered: Covered, most: int | None = None
) -> tuple[list[Block], Covered]:
    """Return a section with the findings and remedies that cells of several configs share.

    Remedies in `answered` are left out. If `most` is set, bottlenecks are left out too, because a
    legend explains them. `most` is the maximum number of findings, and of remedies. The
    items that the most cells share are kept. Also return everything that the cells share, so that the
    sections on single configs can omit it.
    """
    shown = (
        (each, item)
        for each in analyses
        for item in shown_findings(each, full=False)
        if most is None or item.code != "bottleneck"
    )
    remedies = (
        (each, item)
        for each in analyses
        for item in each.remedies
        if (each.run, each.cell, item) not in answered
    )
    found = sorted(common_findings(shown), key=lambda pair: -len(pair[1]))
    helpful = sorted(common_remedies(remedies), key=lambda members: -len(members))
    covered: set[tuple[str, str, object]] = {
        *((cell.run, cell.cell, each) for _, members in found for cell, each in members),
        *((cell.run, cell.cell, each) for members in helpful for cell, each in members),
    }
    notes, given = [], list[list[tuple[CellAnalysis, Remedy]]]()
    for finding, cells in found[:most]:
        mine = next((each for each in helpful if _remedies_for(each, cells)), None)
        given += [mine] if mine else []
        notes.append(_shared_note(finding, cells, mine))
    notes += [
        Note(f"{_remedy_note([each for _, each in cells]).text} {_cells(cells)}", REMEDY)
        for cells in helpful[:most]
        if cells not in given
    ]
    return ([Heading("Shared by several configs"), *notes] if notes else []), covered


def _remedies_for(
    helpful: Sequence[tuple[CellAnalysis, Remedy]], cells: Sequence[tuple[CellAnalysis, Finding]]
) -> bool:
    """Return whether a remedy is for a finding and for the same cells."""
    causes = {(cell.run, cell.cell): _causes(finding, cell) for cell, finding in cells}
    return len(helpful) == len(cells) and all(
        causes.get((cell.run, cell.cell), set()).intersection(remedy.findings)
        for cell, remedy in helpful
    )


def _shared_note(
    finding: Finding,
    cells: Sequence[tuple[CellAnalysis, Finding]],
    helpful: Sequence[tuple[CellAnalysis, Remedy]] | None,
) -> Note:
    """Return a note with the first sentence of a finding, its remedy, and the cells that have it."""
    sentences = finding.sentence.split(". ")
    # Without its name, a bottleneck begins with the finding that causes it.
    first = sentences[sentences[0].startswith("Bottleneck") and len(sentences) > 1]
    texts = [f"{first.removesuffix('.')}."]
    texts += [_remedy_note([each for _, each in helpful]).text] if helpful else []
    return Note(" ".join([*texts, _cells(cells)]), **_kind(finding))


def _cells(members: Sequence[tuple[CellAnalysis, Any]]) -> str:
    return f"Applies to {counted(len(members), 'cell')}: {where([*members])}."


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
            yield Note(text, scenario, "hint")
