"""What two atlases of one machine say differently about cells that both have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any

from profharness.answers.atlas.data import Atlas, AtlasCell

TIMES_APART = 0.5  # a cell's time in one over that in the other, less 1
MEDIAN_APART = 0.1  # the same, of the median over all shared cells
FEW = 10  # shared cells with times that a median is not told of
SETTLED = ("ok", "refused")  # the results that say something about the machine
NAMED = 3  # cells that a message names


@dataclass(frozen=True, slots=True)
class Clash:
    """What two atlases say differently about cells that both have."""

    shared: int
    counts: dict[str, int]
    first: tuple[str, ...]
    ratio: float | None

    @property
    def text(self) -> str:
        """`3 of 40 shared cells disagree: kernels of 2, choice of 1; first b2-… auto: …`."""
        parts = ", ".join(f"{what} of {count}" for what, count in self.counts.items())
        several = f"{sum(self.counts.values()):,} of {self.shared:,} shared cells disagree: {parts}"
        text = f"{several}; first {'; '.join(self.first)}" if self.counts else ""
        if self.ratio is not None:
            apart = f"times are {self.ratio:.2f}x in the median over {self.shared:,} shared cells"
            text = f"{text}; {apart}" if text else apart
        return text


def clash_of(one: Atlas, other: Atlas) -> Clash | None:
    """What they disagree on: status, choice, kernels with launch configuration, and times; None where
    nothing does.
    """
    counts: Counter[str] = Counter()
    first: list[str] = []
    ratios: list[float] = []
    shared = 0
    for cell in other.cells():
        known = one.find(cell.config, cell.backend)
        if known is None or not {known.status, cell.status} <= {*SETTLED}:
            continue
        shared += 1
        if known.kernel_us and cell.kernel_us:
            ratios.append(cell.kernel_us / known.kernel_us)
        if (what := difference(known, cell)) is not None:
            counts[what[0]] += 1
            if len(first) < NAMED:
                first.append(f"{cell.config.label} {cell.backend}: {what[1]}")
    ratio = median(ratios) if len(ratios) >= FEW else 1.0
    apart = ratio if abs(ratio - 1) > MEDIAN_APART else None
    if not counts and apart is None:
        return None
    return Clash(shared, dict(counts), tuple(first), apart)


def difference(one: AtlasCell, other: AtlasCell) -> tuple[str, str] | None:
    """The first thing that two results of a cell differ in, and how; None where nothing does."""
    pairs: tuple[tuple[str, Callable[[AtlasCell], Any]], ...] = (
        ("status", attrgetter("status")),
        ("choice", attrgetter("choice")),
        ("kernels", lambda cell: [launch[:5] for launch in cell.launches]),
    )
    for what, value in pairs:
        old, new = value(one), value(other)
        if old != new and old and new:
            said = f"{len(old)} and {len(new)} launches" if what == "kernels" else f"{old} ↔ {new}"
            if what == "kernels" and len(old) == len(new):
                said = "other kernels or launch configurations"
            return what, said
    if one.kernel_us and other.kernel_us:
        low, high = sorted((one.kernel_us, other.kernel_us))
        if high / low - 1 > TIMES_APART:
            return "times", f"{one.kernel_us:g} ↔ {other.kernel_us:g} µs"
    return None
