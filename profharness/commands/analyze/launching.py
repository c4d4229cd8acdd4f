"""The launch gap: the part of an eager call in which no kernel runs."""

from __future__ import annotations

from profharness.commands.analyze.figures import (
    BASIS_SOURCE,
    MEASURED,
    Evidence,
    Facts,
    Finding,
    percent,
    us,
)
from profharness.rows import EAGER, EVENT, GRAPH, HOST, KERNEL

GAP_MAJOR, GAP_MINOR = 0.40, 0.20  # part of the call in which no kernel runs


def launch_gap(facts: Facts) -> list[Finding]:
    """Report the time of an eager call in which the GPU waits for the CPU: its time minus that of
    its graph replay, or minus its kernels without a graph. Both have warm caches.
    """
    figures = facts.figures
    if not figures.eager_ns:
        return _gap_of_older_runs(facts)
    basis, busy = GRAPH, figures.graph_ns
    if not busy:
        basis, busy = KERNEL, figures.kernels_ns
    if not busy or 1 - busy / figures.eager_ns < GAP_MINOR:
        return []
    gap = 1 - busy / figures.eager_ns
    evidence = [
        us("eager time", figures.eager_ns, BASIS_SOURCE[EAGER]),
        us(f"{basis} time", busy, BASIS_SOURCE[basis]),
        Evidence("launches", figures.launches, "per call", "trace"),
    ]
    without = "replayed as a CUDA graph it takes" if basis == GRAPH else "its kernels take"
    text = (
        f"Of an eager call of {figures.eager_ns / 1e3:.1f} µs {percent(gap)} pass waiting for the "
        f"CPU: {without} {busy / 1e3:.1f} µs"
    )
    if figures.host_ns:
        evidence.append(us("host time", figures.host_ns, HOST_SOURCE))
        text += f", and the CPU needs {figures.host_ns / 1e3:.1f} µs to issue it"
    factor = figures.eager_ns / busy
    return [Finding("launch_gap", f"{text}.", _severity(gap), MEASURED, tuple(evidence), factor)]


HOST_SOURCE = f"{HOST} samples: the CPU's own time of an eager call"


def _severity(gap: float) -> str:
    return "major" if gap >= GAP_MAJOR else "minor"


def _gap_of_older_runs(facts: Facts) -> list[Finding]:
    """Return a lower bound of the gap from an `event` sample. Its flush hid a part of the launch
    path, and its caches were cold.
    """
    figures = facts.figures
    if figures.cold_ns or not figures.event_ns or not figures.kernels_ns:
        return []
    busy, evidence = _busy_ns(facts)
    gap = 1 - busy / figures.event_ns
    if gap < GAP_MINOR:
        return []
    evidence = [
        us("event time", figures.event_ns, BASIS_SOURCE[EVENT]),
        us("kernel time", figures.kernels_ns, BASIS_SOURCE[KERNEL]),
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
        evidence.append(us("graph time", figures.graph_ns, BASIS_SOURCE[GRAPH]))
        text += f", and replayed as a CUDA graph the call takes {figures.graph_ns / 1e3:.1f} µs"
    return [Finding("launch_gap", f"{text}.", _severity(gap), MEASURED, tuple(evidence), factor)]


def _busy_ns(facts: Facts) -> tuple[float, list[Evidence]]:
    """Return an upper bound of the kernels' time with cold caches, and its evidence: ncu's time
    plus that of copies, or the profiled time plus the time to refill the L2.
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
                evidence.append(us("copies and fills", rest, BASIS_SOURCE[KERNEL]))
    return busy, evidence
