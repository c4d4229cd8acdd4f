"""One word for what holds a cell back, taken only from findings that are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from profharness.analysis.facts import DERIVED, MEASURED, Evidence, Facts, Finding, percent
from profharness.analysis.rules_parts import GEMMS

NEAR_PEAK = 0.6  # of a peak from which that resource is what limits
HALF = 0.5
BESIDE_PRODUCTS = 0.4  # of the kernel time, from which the steps between products are what limits

Findings = Mapping[str, Finding]
Answer = tuple[str, str, str, tuple[Evidence, ...]]  # word, sentence, grade, evidence


def bottleneck(facts: Facts, findings: Findings) -> tuple[str, Finding] | None:
    """The word and the finding `bottleneck`; None where no figure decides."""
    for judge in _JUDGES:
        answer = judge(facts, findings)
        if answer is not None:
            word, sentence, grade, evidence = answer
            return word, Finding("bottleneck", sentence, "major", grade, evidence)
    return None


def _launch(_: Facts, findings: Findings) -> Answer | None:
    found = findings.get("launch_gap")
    if found is None or found.severity != "major":
        return None
    return (
        "launch",
        f"Bottleneck: launching. {found.sentence}",
        MEASURED,
        found.evidence,
    )


def _at_peak(facts: Facts, findings: Findings) -> Answer | None:
    figures = facts.figures
    rate, memory = figures.flops_share or 0, figures.bandwidth_share or 0
    traffic = findings.get("dram_traffic")
    counted = [e for e in (traffic.evidence if traffic else ()) if e.name == "DRAM share"]
    if counted and float(counted[0].value) >= NEAR_PEAK and traffic is not None:
        text = f"Bottleneck: memory. DRAM runs at {percent(float(counted[0].value))} of its peak."
        return "memory", text, MEASURED, traffic.evidence
    achieved = findings.get("achieved")
    if achieved is None or "bandwidth_above_peak" in findings or "rate_above_peak" in findings:
        return None
    if memory >= NEAR_PEAK and memory >= rate:
        text = f"Bottleneck: memory. Compulsory bytes alone take {percent(memory)} of its peak."
        return "memory", text, MEASURED, achieved.evidence
    if rate >= NEAR_PEAK:
        text = (
            f"Bottleneck: compute. The products run at {percent(rate)} of the {figures.rate} peak."
        )
        return "compute", text, MEASURED, achieved.evidence
    return None


def _scores(facts: Facts, findings: Findings) -> Answer | None:
    found = findings.get("score_traffic")
    if found is None or found.severity != "major" or facts.figures.kernels_ns is None:
        return None
    if 1 - facts.share_of(*GEMMS) < BESIDE_PRODUCTS:
        return None
    return (
        "score traffic",
        f"Bottleneck: score traffic. {found.sentence}",
        found.grade,
        found.evidence,
    )


def _few_blocks(_: Facts, findings: Findings) -> Answer | None:
    found = findings.get("few_blocks")
    if found is None or found.severity != "major":
        return None
    return "few blocks", f"Bottleneck: too few blocks. {found.sentence}", DERIVED, found.evidence


def _combine(facts: Facts, findings: Findings) -> Answer | None:
    found = findings.get("split_overhead")
    if found is None or facts.share_of("combine") < HALF:
        return None
    return "combine", f"Bottleneck: combining. {found.sentence}", MEASURED, found.evidence


def _rereads(_: Facts, findings: Findings) -> Answer | None:
    found = findings.get("kv_reread")
    if found is None or found.severity != "major":
        return None
    return (
        "K and V traffic",
        f"Bottleneck: K and V traffic. {found.sentence}",
        DERIVED,
        found.evidence,
    )


def _latency(facts: Facts, findings: Findings) -> Answer | None:
    """Neither ceiling is near and the grid is no reason: waiting, shown by what it is not."""
    figures, achieved = facts.figures, findings.get("achieved")
    if achieved is None or figures.flops_share is None or figures.bandwidth_share is None:
        return None
    if max(figures.flops_share, figures.bandwidth_share) >= NEAR_PEAK or facts.main is None:
        return None
    text = (
        f"Bottleneck: latency. Neither the {figures.rate} rate ({percent(figures.flops_share)}) nor "
        f"the bandwidth ({percent(figures.bandwidth_share)}) is near its peak"
    )
    evidence = achieved.evidence
    for code in ("one_wave", "tail", "few_blocks", "low_occupancy", "idle_warps"):
        if code in findings:
            evidence += findings[code].evidence
    if facts.main.waves is not None and facts.main.waves <= 1:
        text += ", and a single wave of blocks leaves nothing to overlap its start and end with"
    return "latency", f"{text}.", MEASURED, tuple(dict.fromkeys(evidence))


_JUDGES: tuple[Callable[[Facts, Findings], Answer | None], ...] = (
    _launch,
    _at_peak,
    _scores,
    _few_blocks,
    _combine,
    _rereads,
    _latency,
)
