"""Show the answer of `analyze`: figures, findings, remedies and sweeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from profharness.columns import Column
from profharness.commands.analyze.figures import (
    FIELDS,
    SCHEMA,
    CellAnalysis,
    analyze_record,
    kernels_past_l1,
)
from profharness.commands.analyze.finding_notes import advice_blocks, cell_notes, common_blocks
from profharness.commands.analyze.sweeps import changed_problems, drops, sweep
from profharness.commands.bench.tables import roofline_chart
from profharness.commands.layers.tables import short_module
from profharness.devices import Peaks
from profharness.render.devices import device_blocks, device_record
from profharness.render.document import Block, Chart, Document, Heading, Note, Table, filled_columns

MB = 1e6
_COLUMNS: dict[str, Column] = {
    column.key: column
    for column in (
        Column("module", "module", shrink=True),
        Column("backend", "backend"),
        Column("bottleneck", "bottleneck"),
        Column("duration_ns", "µs", "us"),
        Column("basis", "of"),
        Column("tflops", "TFLOP/s", "figures"),
        Column("flops_share", "rate%", "percent"),
        Column("gb_per_s", "GB/s", "figures"),
        Column("bandwidth_share", "bw%", "percent"),
        Column("dram_mb", "DRAM MB", "figures"),
        Column("intensity", "FLOP/B", "count"),
        Column("kv_head", "K+V KiB/head", "kib"),
        Column("places", "K+V of a head fit in"),
        Column("blocks", "blocks", "count"),
        Column("waves", "waves", "count"),
        Column("occupancy", "occ%", "percent"),
    )
}
_RATES = ("tflops", "flops_share", "gb_per_s", "bandwidth_share")
_OF_A_CELL = (
    *("module", "backend", "bottleneck", "duration_ns", "basis", *_RATES),
    *("dram_mb", "blocks", "waves", "occupancy"),
)
_OF_A_SWEEP = (*("duration_ns", *_RATES, "intensity", "kv_head", "places", "waves", "bottleneck"),)
COLUMNS = tuple(_COLUMNS[name] for name in _OF_A_CELL)
SWEEP_COLUMNS = tuple(_COLUMNS[name] for name in _OF_A_SWEEP)
PHASE_COLUMNS = (
    Column("execution", "execution", repeat=False),
    Column("phase", "phase"),
    Column("mflop", "MFLOP", "figures"),
    Column("mb", "MB", "figures"),
    Column("intensity", "FLOP/B", "count"),
    Column("bound", "bound by"),
)

# What ncu counted, one row per kernel. Columns without a value are dropped.
COUNTER_COLUMNS = (
    Column("backend", "backend", repeat=False),
    Column("kernel", "kernel", shrink=True),
    Column("share", "share%", "percent"),
    Column("dram", "DRAM GB/s", "figures"),
    Column("dram_throughput", "DRAM%", "percent"),
    Column("l2_throughput", "L2%", "percent"),
    Column("l1_throughput", "L1%", "percent"),
    Column("l1_hit_rate", "L1 hit%", "percent"),
    Column("l2_hit_rate", "L2 hit%", "percent"),
    Column("shared_share", "smem%", "percent"),
    Column("bank_conflicts", "conflict%", "percent"),
    Column("load_sectors", "sectors/ld", "figures"),
    Column("store_sectors", "sectors/st", "figures"),
    Column("tensor_pipe", "tensor%", "percent"),
    Column("fma_pipe", "FMA%", "percent"),
    Column("sm_throughput", "SM%", "percent"),
    Column("issue_active", "issue%", "percent"),
    Column("stall", "most stalled by"),
)
TRAFFIC_COLUMNS = (
    Column("backend", "backend", repeat=False),
    Column("level", "traffic"),
    Column("mb", "MB", "figures"),
    Column("ratio", "x compulsory", "ratio"),
    Column("intensity", "FLOP/B", "count"),
    Column("gb_per_s", "GB/s", "figures"),
)
COUNTED_SHARE = 0.01  # share of a cell's kernel time below which a kernel has no row


def analyze_document(analyses: Sequence[CellAnalysis], *, full: bool = False) -> Document:
    """Return the document of `analyze`: one section per config, one table per sweep.

    With `full`, it contains every finding with all of its evidence.
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
            lines = [_values(analysis) for analysis in own if analysis.figures]
            blocks.append(Table.of(filled_columns(COLUMNS, lines), lines))
        if rows := tuple(_phase_rows(own)):
            blocks.append(Table(PHASE_COLUMNS, rows))
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
        blocks += device_blocks(name, facts)
    extra = {
        "peaks": [asdict(peaks) for peaks in _peaks(analyses)],
        "devices": [device_record(name, facts) for name, facts in devices.items()],
    }
    records = tuple(map(analyze_record, analyses))
    return Document(SCHEMA, "Analysis", tuple(blocks), FIELDS, records, extra)


def _peaks(analyses: Sequence[CellAnalysis]) -> list[Peaks]:
    """Return the peaks of each device once."""
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


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def _values(analysis: CellAnalysis) -> dict[str, Any]:
    """Return all values that a table may show for a cell."""
    figures, main = analysis.figures, analysis.main
    assert figures is not None
    return {
        "module": short_module(analysis.module),
        "backend": analysis.backend,
        "bottleneck": analysis.bottleneck,
        "duration_ns": figures.duration_ns,
        "basis": figures.basis,
        "tflops": _scaled(figures.flops_per_s, 1e12),
        "flops_share": figures.flops_share,
        "gb_per_s": _scaled(figures.bytes_per_s, 1e9),
        "bandwidth_share": figures.bandwidth_share,
        "dram_mb": _scaled(figures.dram_bytes, MB),
        **{name: getattr(main, name, None) for name in ("blocks", "waves", "occupancy")},
        "intensity": figures.intensity,
        "kv_head": figures.kv_head_bytes,
        "places": None if analysis.kv_places is None else ", ".join(analysis.kv_places) or "none",
    }


def _phase_rows(own: Sequence[CellAnalysis]) -> list[tuple[Any, ...]]:
    """Return the phases of each way of execution once, under the backends that use it."""
    ways: dict[tuple[Any, ...], list[str]] = {}
    for analysis in own:
        if analysis.phases:
            ways.setdefault(analysis.phases, []).append(analysis.backend)
    return [
        (", ".join(names), p.name, p.flops / 1e6, p.bytes / MB, p.intensity, p.bound)
        for phases, names in ways.items()
        for p in phases
    ]


def _counter_rows(own: Sequence[CellAnalysis]) -> list[dict[str, Any]]:
    """Return the counters of the kernels that ncu recorded, without kernels of negligible time."""
    rows = []
    for analysis in own:
        for kernel in analysis.kernels:
            if kernel.ncu_ns is None or (kernel.share or 0) < COUNTED_SHARE:
                continue
            counters = kernel.counters
            stalled = next((state for state in counters.warp_states if state != "selected"), None)
            rows.append(
                {item.name: getattr(counters, item.name) for item in fields(counters)}
                | {name: getattr(kernel, name) for name in ("kernel", "share", "shared_share")}
                | {"backend": analysis.backend, "dram": _scaled(kernel.dram_bytes_per_s, 1e9)}
                | {"stall": stalled and f"{stalled} {counters.warp_states[stalled]:.0%}"}
            )
    return rows


def _sweep(name: str, group: Sequence[CellAnalysis]) -> list[Block]:
    first = group[0]
    title = {"seq_len_kv": "seq_len"}.get(name, name)
    columns = (Column("swept", title, right=True, format="count"), *SWEEP_COLUMNS)
    rows = [_values(analysis) | {"swept": getattr(analysis.config, name)} for analysis in group]
    start, end = (getattr(analysis.config, name) for analysis in (first, group[-1]))
    return [
        Heading(f"{first.backend} over {title} {start} to {end}", f"from {first.config.label}"),
        Table.of(filled_columns(columns, rows), rows),
        *(
            Note(f"TFLOP/s fall {drop.factor:.1f} times from {title} {drop.before} to {drop.after}")
            for drop in drops(name, group)
        ),
    ]


def _changed_problems(analyses: Sequence[CellAnalysis]) -> list[Note]:
    """Return warnings for configs that look like a sweep over head_dim but are not."""
    return [
        Note(
            f"head_dim is {', '.join(map(str, each.head_dims))} here, and batch x heads x queries x keys "
            f"is {', '.join(f'{count:,}' for count in each.scores)} with it: these configs differ in "
            "how much can run at once too, so a change of TFLOP/s over them is not of head_dim alone "
            "(a set, as in --config 'B,H,S,{512,1024}', keeps the rest)",
            each.backend,
            "warning",
        )
        for each in changed_problems(analyses)
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

    All rates use the time under ncu. Empty if ncu counted no bytes.
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
    """Return notes on why some cells have no bytes of L1."""
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
