"""Rules about intensity, achieved rates, DRAM traffic and launch gaps."""

from __future__ import annotations

from profharness.answers.analyze.figures import (
    BASIS_SOURCE,
    FLUSHED,
    Facts,
    Rule,
    percent,
    share,
    size,
    us,
)
from profharness.answers.analyze.model import DERIVED, MEASURED, Evidence, Finding
from profharness.costs import tensor_bytes

GAP_MAJOR, GAP_MINOR = 0.40, 0.20  # part of the call without a kernel running
DRAM_EXCESS = 1.5
SPLIT_MINOR, SPLIT_MAJOR = 0.05, 0.25
HELPERS_MINOR, HELPERS_MAJOR = 0.10, 0.30
GEMMS = ("qk", "pv", "qk+pv", "dV", "dP", "dV+dP", "dK", "dQ", "dK+dQ", "gemm_bwd")
COPIES = ("copy", "copy_bwd", "cast", "cast_bwd", "memory", "memory_bwd")


def intensity(facts: Facts) -> list[Finding]:
    """Which side of the ridge the config lies on, whatever ran."""
    figures = facts.figures
    peaks = facts.machine.peaks
    if figures.ridge is None or peaks is None:
        return []
    side = "memory" if figures.intensity < figures.ridge else "compute"
    than = "below" if side == "memory" else "above"
    formula = "FLOPs (exact) / compulsory bytes"
    source = f"{figures.rate} rate / bandwidth, {peaks.source}"
    evidence: tuple[Evidence, ...] = (
        Evidence("intensity", round(figures.intensity, 2), "FLOP/B", formula),
        Evidence("ridge", round(figures.ridge, 1), "FLOP/B", source),
    )
    text = (
        f"By its shapes the config is {side}-bound: {figures.intensity:.2f} FLOPs per compulsory "
        f"byte, {than} the ridge of {figures.ridge:.0f}."
    )
    low = [p for p in facts.phases if p.bound == "memory" and p.intensity is not None]
    if low and side == "compute":
        text += f" These phases alone lie below it: {', '.join(p.name for p in low)}."
    evidence += tuple(
        Evidence(f"intensity of {p.name}", round(p.intensity, 2), "FLOP/B", "FLOPs / bytes of it")
        for p in facts.phases
        if p.intensity is not None
    )
    return [Finding(f"{side}_bound", text, "note", DERIVED, evidence)]


def achieved(facts: Facts) -> list[Finding]:
    """FLOP/s and compulsory bytes a second as shares of the peaks."""
    figures = facts.figures
    if figures.flops_per_s is None or figures.bytes_per_s is None or not facts.kernels:
        return []
    against = f"{figures.against} peak" if figures.against else ""
    work, moved = (
        f"{what} / {figures.basis} time" for what in ("FLOPs (exact)", "compulsory bytes")
    )
    evidence = [
        facts.duration(),
        Evidence("rate", round(figures.flops_per_s / 1e12, 3), "TFLOP/s", work),
        Evidence("compulsory bandwidth", round(figures.bytes_per_s / 1e9, 1), "GB/s", moved),
    ]
    text = (
        f"{figures.flops_per_s / 1e12:.2f} TFLOP/s and {figures.bytes_per_s / 1e9:.0f} GB/s of "
        "compulsory bytes"
    )
    parts = []
    if figures.flops_share is not None:
        parts.append(f"{percent(figures.flops_share)} of the {figures.rate} rate")
        evidence.append(share("share of rate", figures.flops_share, against))
    if figures.bandwidth_share is not None:
        parts.append(f"{percent(figures.bandwidth_share)} of the bandwidth")
        evidence.append(share("share of bandwidth", figures.bandwidth_share, against))
    text += f": {' and '.join(parts)} ({figures.against})." if parts else "; no peaks are known."
    return [Finding("achieved", text, "note", MEASURED, tuple(evidence))]


def above_ceiling(facts: Facts) -> list[Finding]:
    """A figure above its ceiling, with what explains it."""
    figures, found = facts.figures, []
    if (figures.bandwidth_share or 0) > 1:
        working, l2 = figures.working_set_bytes, facts.l2_bytes
        if l2 and working < l2 and figures.basis != "event":
            why = (
                f"the inputs and the output ({size(working)}) fit in the L2 ({size(l2)}) and were "
                "read from there, so this is no DRAM bandwidth"
            )
        else:
            why = (
                "the working set does not explain it: the peak is too low for this device, or the "
                "time misses part of the work"
            )
        text = f"{percent(figures.bandwidth_share or 0)} of the peak bandwidth cannot be: {why}."
        evidence = (
            facts.duration(),
            Evidence("working set", working, "B", "shapes and dtype"),
            Evidence("L2", l2 or "unknown", "B", "device"),
        )
        found.append(Finding("bandwidth_above_peak", text, "minor", MEASURED, evidence))
    if (figures.flops_share or 0) > 1:
        text = (
            f"{percent(figures.flops_share or 0)} of the peak {figures.rate} rate cannot be: the "
            f"peak ({figures.against}) is too low for this device, or the call skips scores that "
            "the formula counts (a mask with blocks of nothing)."
        )
        found.append(Finding("rate_above_peak", text, "minor", MEASURED, (facts.duration(),)))
    return found


def dram_traffic(facts: Facts) -> list[Finding]:
    """Measured DRAM bytes against compulsory bytes."""
    figures = facts.figures
    if figures.dram_bytes is None:
        return []
    ratio = figures.dram_bytes / figures.compulsory_bytes
    evidence = [
        Evidence("DRAM bytes", figures.dram_bytes, "B", "ncu dram__bytes_read + dram__bytes_write"),
        Evidence("compulsory bytes", figures.compulsory_bytes, "B", "shapes and dtype"),
    ]
    peaks = facts.machine.peaks
    text = (
        f"ncu counted {size(figures.dram_bytes)} of DRAM traffic, {ratio:.2f} times the compulsory "
        f"{size(figures.compulsory_bytes)}"
    )
    if facts.dram_share is not None and peaks:
        text += f", at {percent(facts.dram_share)} of the bandwidth ({peaks.source})"
        evidence.append(share("DRAM share", facts.dram_share, "ncu bytes / ncu time / bandwidth"))
    if ratio < 1:
        text += "; what is missing was in the L2, or is still there unwritten"
    severity = "major" if ratio >= 2 * DRAM_EXCESS else "minor" if ratio >= DRAM_EXCESS else "note"
    return [Finding("dram_traffic", f"{text}.", severity, MEASURED, tuple(evidence))]


def launch_gap(facts: Facts) -> list[Finding]:
    """Time of a call in which no kernel can be running, the flushed L2 allowed for."""
    figures = facts.figures
    if not figures.event_ns or not figures.kernels_ns:
        return []
    busy, evidence = _busy_ns(facts)
    gap = 1 - busy / figures.event_ns
    if gap < GAP_MINOR:
        return []
    evidence = [
        us("event time", figures.event_ns, FLUSHED),
        us("kernel time", figures.kernels_ns, BASIS_SOURCE["kernel"]),
        *evidence,
        Evidence("launches", figures.launches, "per call", "trace"),
    ]
    text = (
        f"Of a call of {figures.event_ns / 1e3:.1f} µs at least {percent(gap)} pass without a "
        f"kernel running: its {figures.launches:.0f} launches take {busy / 1e3:.1f} µs even with "
        "cold caches"
    )
    factor = figures.event_ns / busy
    if figures.graph_ns:
        evidence.append(us("graph time", figures.graph_ns, BASIS_SOURCE["graph"]))
        text += f", and replayed as a CUDA graph the call takes {figures.graph_ns / 1e3:.1f} µs"
    severity = "major" if gap >= GAP_MAJOR else "minor"
    return [Finding("launch_gap", f"{text}.", severity, MEASURED, tuple(evidence), factor)]


def _busy_ns(facts: Facts) -> tuple[float, list[Evidence]]:
    """An upper bound of the kernels' time with cold caches, and its evidence.

    It is ncu's own time (ncu flushes caches) with the profiled time of copies and fills, which ncu
    does not profile; or the profiled time and that of reading everything from DRAM once more.
    """
    figures, peaks = facts.figures, facts.machine.peaks
    warm = figures.kernels_ns or 0.0
    busy, evidence = warm, []
    if peaks and peaks.bandwidth_bytes_per_s:
        refill = figures.compulsory_bytes / peaks.bandwidth_bytes_per_s * 1e9
        busy = warm + refill
        evidence = [us("refilling the L2", refill, f"compulsory bytes / bandwidth, {peaks.source}")]
    launched = [kernel for kernel in facts.kernels if kernel.blocks is not None]
    if launched and all(kernel.ncu_ns for kernel in launched):
        cold = sum((kernel.ncu_ns or 0) * kernel.launches_per_call for kernel in launched)
        rest = sum(kernel.call_ns or 0 for kernel in facts.kernels if kernel.blocks is None)
        if cold + rest > busy:
            busy, evidence = cold + rest, [us("cold kernel time", cold, "ncu gpu__time_duration")]
            if rest:
                evidence.append(us("copies and fills", rest, BASIS_SOURCE["kernel"]))
    return busy, evidence


def score_traffic(facts: Facts) -> list[Finding]:
    """Unfused attention: score matrices through memory, by formula, and by ncu where it ran."""
    if not facts.unfused:
        return []
    figures = facts.figures
    matrix = tensor_bytes(facts.config).scores
    by_phases = sum(phase.bytes for phase in facts.phases)
    outside = 1 - facts.share_of(*GEMMS)
    evidence = [
        Evidence("score matrix", matrix, "B", "batch x heads x seq_q x seq_kv x 4"),
        Evidence("bytes of the steps", by_phases, "B", "phases, unfused"),
        Evidence("compulsory bytes", figures.compulsory_bytes, "B", "shapes and dtype"),
        share("time outside of products", outside, "roles of the kernels"),
    ]
    text = (
        f"The scores go through memory: one matrix of them is {size(matrix)}, and the steps move at "
        f"least {size(by_phases)} where fused attention moves {size(figures.compulsory_bytes)}"
    )
    if figures.dram_bytes is not None:
        evidence.append(Evidence("DRAM bytes", figures.dram_bytes, "B", "ncu dram__bytes"))
        rest = ", the rest hit the L2" if figures.dram_bytes < by_phases else ""
        text += f" (ncu counted {size(figures.dram_bytes)} from and to DRAM{rest})"
    if figures.peak_memory_bytes:
        peak = figures.peak_memory_bytes
        evidence.append(Evidence("peak memory", peak, "B", "allocator"))
    text += f"; {percent(outside)} of the kernel time is no matrix product."
    measured = MEASURED if figures.dram_bytes is not None else DERIVED
    factor = by_phases / figures.compulsory_bytes
    severity = "major" if factor >= 2 else "minor"
    return [Finding("score_traffic", text, severity, measured, tuple(evidence))]


def full_precision(facts: Facts) -> list[Finding]:
    """PyTorch's math computes 16-bit inputs in fp32 unless told otherwise."""
    config, machine = facts.config, facts.machine
    if not facts.unfused or config.dtype == "fp32" or machine.fp16_math or not machine.peaks:
        return []
    name = "tf32" if machine.tf32 else "fp32"
    rates = machine.peaks.flops_per_s
    if name not in rates or str(config.dtype) not in rates:
        return []
    ratio = rates[str(config.dtype)] / rates[name]
    text = (
        f"The products run in fp32 on {config.dtype} inputs, where the device multiplies "
        f"{ratio:.0f} times slower ({name} against {config.dtype}, {machine.peaks.source})."
    )
    evidence = tuple(
        Evidence(f"{each} rate", round(rates[each] / 1e12, 1), "TFLOP/s", machine.peaks.source)
        for each in (name, str(config.dtype))
    )
    return [Finding("fp32_products", text, "major" if ratio >= 4 else "minor", DERIVED, evidence)]


def split_overhead(facts: Facts) -> list[Finding]:
    """The combine kernel's part of a forward pass that splits over the keys."""
    found = [kernel for kernel in facts.kernels if kernel.role == "combine"]
    part = facts.share_of("combine")
    if not found or part < SPLIT_MINOR:
        return []
    time_ns = sum(kernel.call_ns or 0 for kernel in found)
    text = (
        f"Splitting over the keys costs a second kernel: {found[0].kernel} takes {percent(part)} "
        f"of the kernel time ({time_ns / 1e3:.1f} µs) to put the parts together."
    )
    evidence = (
        us("combine time", time_ns, "trace"),
        us("kernel time", facts.figures.kernels_ns or 0, BASIS_SOURCE["kernel"]),
        share("share", part, "trace"),
    )
    return [_overhead("split_overhead", text, part, SPLIT_MAJOR, evidence)]


def _overhead(
    code: str, text: str, part: float, major: float, evidence: tuple[Evidence, ...]
) -> Finding:
    """A finding on kernels that take this part of the time and could take none."""
    severity = "major" if part >= major else "minor"
    factor = 1 / (1 - part) if part < 1 else None
    return Finding(code, text, severity, MEASURED, evidence, factor)


def helpers(facts: Facts) -> list[Finding]:
    """Copies, padding and casts beside a fused kernel."""
    part = facts.share_of(*COPIES)
    if not facts.fused or part < HELPERS_MINOR:
        return []
    copies = [kernel for kernel in facts.kernels if kernel.role in COPIES]
    names = sorted({kernel.kernel for kernel in copies})
    time_ns = sum(kernel.call_ns or 0 for kernel in copies)
    text = (
        f"Copies around the attention kernel take {percent(part)} of the kernel time "
        f"({time_ns / 1e3:.1f} µs): {', '.join(names)}"
    )
    dims = (facts.config.head_dim, facts.config.value_dim)
    if any(dim % 8 for dim in dims):
        text += f"; head_dim {max(dims)} is no multiple of 8, so the inputs are padded"
    evidence = (us("copy time", time_ns, "trace"), share("share", part, "trace"))
    return [_overhead("copies", f"{text}.", part, HELPERS_MAJOR, evidence)]


RULES: tuple[Rule, ...] = (intensity, achieved, above_ceiling, dram_traffic, launch_gap)
PART_RULES: tuple[Rule, ...] = (score_traffic, full_precision, split_overhead, helpers)
