"""Charts of rates: TFLOP/s over sequence length, and the roofline, from medians and costs."""

from __future__ import annotations

from collections.abc import Sequence, Set

from profharness.config import Config, parse_config
from profharness.costs import compulsory_bytes, flops
from profharness.peaks import Peaks, flop_peak
from profharness.report.charts import Chart, Roof
from profharness.report.document import Block, Note
from profharness.report.run_view import sweeps


def rate_blocks(
    medians: Sequence[tuple[str, str, float]],
    measurement: str,
    peaks: Peaks | None,
    *,
    tf32: bool = False,
    wrong: Set[tuple[str, str]] = frozenset(),
) -> list[Block]:
    """medians: config label, backend, ns. What is in wrong (config label, backend) is left out: a
    wrong answer has no rate. tf32: fp32 products may use the tensor cores.
    """
    rows = [
        (parse_config(label), backend, ns)
        for label, backend, ns in medians
        if ns > 0 and (label, backend) not in wrong
    ]
    blocks: list[Block] = list(_sweep_charts(rows, measurement))
    if peaks is not None and rows:
        blocks += _roofline(rows, measurement, peaks, tf32)
    if wrong:
        named = ", ".join(f"{backend} on {label}" for label, backend in sorted(wrong))
        blocks.append(Note(f"left out of every comparison of rates: {named}", "wrong", "error"))
    return blocks


def _sweep_charts(rows: Sequence[tuple[Config, str, float]], measurement: str) -> list[Chart]:
    charts = []
    for name, members in sweeps([config for config, _, _ in rows]).items():
        points = tuple(
            {"s": config.seq_len_kv, "rate": flops(config) / ns / 1e3, "backend": backend}
            for config, backend, ns in rows
            if config in members
        )
        title = f"TFLOP/s over sequence length, {name} ({measurement})"
        words = ("sequence length", "TFLOP/s")
        charts.append(Chart("lines", title, points, "s", "rate", "backend", *words))
    return charts


def _roofline(
    rows: Sequence[tuple[Config, str, float]], measurement: str, peaks: Peaks, tf32: bool
) -> list[Block]:
    bandwidth = peaks.bandwidth_bytes_per_s
    if not bandwidth:
        return []
    roofs = []
    for dtype in dict.fromkeys(config.dtype or "" for config, _, _ in rows):
        peak = flop_peak(peaks, dtype, tf32=tf32)
        if peak is not None:
            roofs.append(Roof(f"{peak[0]}, {peaks.source}", bandwidth, peak[1]))
    if not roofs:
        return []
    points = tuple(
        {
            "intensity": flops(config) / compulsory_bytes(config),
            "rate": flops(config) / ns * 1e9,
            "backend": backend,
        }
        for config, backend, ns in rows
    )
    caption = (
        f"Compulsory bytes, FLOPs by the convention exact; the roofs are the {peaks.source} peaks "
        f"of {peaks.device}. What sits in L2 can be above the slope."
    )
    title = f"Roofline ({measurement})"
    roofs = _merged(roofs)
    place = ("intensity", "rate", "backend")
    return [Chart("roofline", title, points, *place, caption=caption, roofs=tuple(roofs))]


def _merged(roofs: Sequence[Roof]) -> list[Roof]:
    """Roofs of the same height as one (fp16 and bf16), so that no label covers another."""
    labels: dict[tuple[float, float], list[str]] = {}
    for roof in roofs:
        labels.setdefault((roof.bytes_per_s, roof.flops_per_s), []).append(roof.label)
    return [Roof("; ".join(names), *key) for key, names in labels.items()]
