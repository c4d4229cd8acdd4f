"""Costs of a cell other than time, on both sides of a diff: peak memory, launches, and whether it
runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from profharness import stats
from profharness.commands.diff.result import LAUNCHES, MEMORY, REFUSED, Cost, CostVerdict
from profharness.program.roles import launches_per_call
from profharness.rows import CellRow, KernelRow

MEMORY_THRESHOLD = 0.01
"""Peaks are repeatable to the byte. An allocation is rounded up to 512 bytes."""


def memory_cost(baseline: CellRow, candidate: CellRow) -> Iterator[Cost]:
    """Compare peak memory, if both sides report it. A CPU does not."""
    peaks = baseline.peak_memory_bytes, candidate.peak_memory_bytes
    if peaks[0] and peaks[1]:
        same = not stats.beyond(peaks[1] / peaks[0], MEMORY_THRESHOLD)
        yield _cost(MEMORY, baseline, candidate, (peaks[0], peaks[1]), same=same)


def launch_cost(
    baseline: CellRow,
    candidate: CellRow,
    kernels: tuple[Sequence[KernelRow], Sequence[KernelRow]],
    calls: tuple[int, int],
) -> Iterator[Cost]:
    """Compare the launches of one call, including copies, if one profiler recorded both sides.
    `calls` are those of a side whose rows do not have them.
    """
    if all(kernels) and kernels[0][0].profiler == kernels[1][0].profiler:
        counts = [
            round(sum(launches_per_call(row, number) for row in rows), 2)
            for rows, number in zip(kernels, calls, strict=True)
        ]
        same = counts[0] == counts[1]
        yield _cost(LAUNCHES, baseline, candidate, (counts[0], counts[1]), same=same)


def refusal_cost(baseline: CellRow, candidate: CellRow) -> Iterator[Cost]:
    """Report a config that only one side refuses."""
    statuses = baseline.status, candidate.status
    verdicts: dict[tuple[str, str], CostVerdict] = {
        ("ok", "refused"): "refused",
        ("refused", "ok"): "accepted",
    }
    same = statuses[0] == statuses[1] in ("ok", "refused")
    if same or statuses in verdicts:
        pair = baseline.config, baseline.backend, candidate.backend
        yield Cost(*pair, REFUSED, *statuses, verdict=verdicts.get(statuses, "same"))


def _cost(
    what: str, baseline: CellRow, candidate: CellRow, values: tuple[float, float], *, same: bool
) -> Cost:
    ratio = values[1] / values[0] if values[0] else None
    verdict: CostVerdict = "same" if same else "more" if values[1] > values[0] else "less"
    pair = baseline.config, baseline.backend, candidate.backend
    return Cost(*pair, what, *values, verdict=verdict, ratio=ratio)
