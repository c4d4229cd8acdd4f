"""The call as a whole: status and latency of two cells, and what forbids comparing times."""

from __future__ import annotations

from collections.abc import Sequence

from profharness import stats
from profharness.differ.model import Change, DiffRow, Side, Verdict
from profharness.rows import CellRow

MEASUREMENTS = ("graph", "event", "wall")
MAX_CLOCK_RATIO = 1.05


def incomparable(
    baseline: Side, candidate: Side, base_cell: CellRow | None, cand_cell: CellRow | None
) -> tuple[str, ...]:
    """Why times of the two sides must not be compared; empty when they may be."""
    base, cand = baseline.environment, candidate.environment
    reasons = []
    for key, text in (("device_type", "kinds of device differ"), ("gpu", "the GPUs differ")):
        if base.get(key) is not None and cand.get(key) is not None and base[key] != cand[key]:
            reasons.append(f"{text} ({base[key]} and {cand[key]})")
    on_cpu = base.get("device_type") == cand.get("device_type") == "cpu"
    if on_cpu and base.get("cpu") != cand.get("cpu"):
        reasons.append(f"the CPUs differ ({base.get('cpu')} and {cand.get('cpu')})")
    clocks = [cell.clocks.get("sm_mhz", 0) if cell else 0 for cell in (base_cell, cand_cell)]
    if all(clocks) and max(clocks) / min(clocks) > MAX_CLOCK_RATIO:
        reasons.append(f"SM clocks differ by more than 5 % ({clocks[0]:g} and {clocks[1]:g} MHz)")
    return tuple(reasons)


def status_row(config: str, baseline: CellRow, candidate: CellRow) -> DiffRow | None:
    """How the cells ended; None where both are ok, `same` where both have one status and codes."""
    if baseline.status == candidate.status == "ok":
        return None
    codes = [_codes(cell) for cell in (baseline, candidate)]
    differing = []
    if baseline.status != candidate.status:
        differing.append(Change("status", baseline.status, candidate.status))
    if codes[0] != codes[1]:
        differing.append(Change("refusals", codes[0], codes[1]))
    return DiffRow(
        config=config,
        backend_baseline=baseline.backend,
        backend_candidate=candidate.backend,
        role="status",
        baseline=(),
        candidate=(),
        ratio=None,
        verdict="changed" if differing else "same",
        reasons=(f"baseline: {_told(baseline)}", f"candidate: {_told(candidate)}"),
        changes=tuple(differing),
        changed=bool(differing),
    )


def call_row(
    config: str, baseline: CellRow, candidate: CellRow, doubts: Sequence[str], threshold: float
) -> DiffRow:
    """Latency of the whole call, unprofiled: graph replay if both sides have it, events, or
    wall."""
    basis = next((n for n in MEASUREMENTS if _has(baseline, n) and _has(candidate, n)), None)
    verdict: Verdict = "unknown"
    ratio: float | None = None
    reasons = ["no unprofiled measurement that both sides have"]
    times: tuple[float, float] | tuple[None, None] = (None, None)
    if basis is not None:
        samples = baseline.samples[basis], candidate.samples[basis]
        compared = stats.compare(*samples, threshold=threshold)
        ratio, verdict, reasons = compared.ratio, compared.verdict, [compared.reason]
        times = stats.summarize(samples[0]).median, stats.summarize(samples[1]).median
    if doubts:
        verdict = "unknown"
    found = [
        Change(name, getattr(baseline, name), getattr(candidate, name))
        for name in ("sdpa_op", "choice", "peak_memory_bytes")
        if _known_to_differ(getattr(baseline, name), getattr(candidate, name))
    ]
    return DiffRow(
        config=config,
        backend_baseline=baseline.backend,
        backend_candidate=candidate.backend,
        role="call",
        baseline=(),
        candidate=(),
        ratio=ratio,
        verdict=verdict,
        reasons=(*doubts, *reasons),
        changes=tuple(found),
        baseline_ns=times[0],
        candidate_ns=times[1],
        basis=basis,
    )


def _codes(cell: CellRow) -> tuple[str, ...]:
    return tuple(sorted({code for code, _, _ in cell.refusals}))


def _told(cell: CellRow) -> str:
    texts = [cell.message] if cell.message else [text for _, text, _ in cell.refusals]
    codes = f" [{', '.join(_codes(cell))}]" if cell.refusals else ""
    return f"{cell.status}{codes}" + (f": {'; '.join(texts)}" if texts else "")


def _has(cell: CellRow, measurement: str) -> bool:
    return bool(cell.samples.get(measurement))


def _known_to_differ(baseline: object, candidate: object) -> bool:
    return baseline is not None and candidate is not None and baseline != candidate
