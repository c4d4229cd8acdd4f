"""Rules about what runs beside attention itself: score matrices, combines, casts, copies."""

from __future__ import annotations

from profharness.analysis.facts import (
    BASIS_SOURCE,
    DERIVED,
    MEASURED,
    Evidence,
    Facts,
    Finding,
    Rule,
    percent,
    size,
    us,
)
from profharness.costs import score_bytes

SPLIT_MINOR, SPLIT_MAJOR = 0.05, 0.25
HELPERS_MINOR, HELPERS_MAJOR = 0.10, 0.30
GEMMS = ("qk", "pv", "qk+pv", "dV", "dP", "dV+dP", "dK", "dQ", "dK+dQ", "gemm_bwd")
COPIES = ("copy", "copy_bwd", "cast", "cast_bwd", "memory", "memory_bwd")


def score_traffic(facts: Facts) -> list[Finding]:
    """Unfused attention: score matrices through memory, by formula, and by ncu where it ran."""
    if not facts.unfused:
        return []
    figures = facts.figures
    matrix = score_bytes(facts.config)
    by_phases = sum(phase.bytes for phase in facts.phases)
    outside = 1 - facts.share_of(*GEMMS)
    evidence = [
        Evidence("score matrix", matrix, "B", "batch x heads x seq_q x seq_kv x 4"),
        Evidence("bytes of the steps", by_phases, "B", "phases, unfused"),
        Evidence("compulsory bytes", figures.compulsory_bytes, "B", "shapes and dtype"),
        Evidence("time outside of products", round(outside, 4), "", "roles of the kernels"),
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
    share = facts.share_of("combine")
    if not found or share < SPLIT_MINOR:
        return []
    time_ns = sum(kernel.call_ns or 0 for kernel in found)
    text = (
        f"Splitting over the keys costs a second kernel: {found[0].kernel} takes {percent(share)} "
        f"of the kernel time ({time_ns / 1e3:.1f} µs) to put the parts together."
    )
    evidence = (
        us("combine time", time_ns, "trace"),
        us("kernel time", facts.figures.kernels_ns or 0, BASIS_SOURCE["kernel"]),
        Evidence("share", round(share, 4), "", "trace"),
    )
    severity = "major" if share >= SPLIT_MAJOR else "minor"
    factor = 1 / (1 - share) if share < 1 else None
    return [Finding("split_overhead", text, severity, MEASURED, evidence, factor)]


def helpers(facts: Facts) -> list[Finding]:
    """Copies, padding and casts beside a fused kernel."""
    share = facts.share_of(*COPIES)
    if not facts.fused or share < HELPERS_MINOR:
        return []
    names = sorted({kernel.kernel for kernel in facts.kernels if kernel.role in COPIES})
    time_ns = sum(kernel.call_ns or 0 for kernel in facts.kernels if kernel.role in COPIES)
    text = (
        f"Copies around the attention kernel take {percent(share)} of the kernel time "
        f"({time_ns / 1e3:.1f} µs): {', '.join(names)}"
    )
    dims = (facts.config.head_dim, facts.config.value_dim)
    if any(dim % 8 for dim in dims):
        text += f"; head_dim {max(dims)} is no multiple of 8, so the inputs are padded"
    evidence = (us("copy time", time_ns, "trace"), Evidence("share", round(share, 4), "", "trace"))
    severity = "major" if share >= HELPERS_MAJOR else "minor"
    factor = 1 / (1 - share) if share < 1 else None
    return [Finding("copies", f"{text}.", severity, MEASURED, evidence, factor)]


RULES: tuple[Rule, ...] = (score_traffic, full_precision, split_overhead, helpers)
