"""Why a measurement should not be believed: clocks that moved, throttling, samples that disagree, a
figure above what the device can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from profharness import stats
from profharness.bench_plan import WIDE
from profharness.peaks import MB, Peaks

CLOCK_MOVED = 0.05
FEW_SAMPLES = 5
# Bits of NVML's clocks event reasons (nvml.h, nvmlClocksEventReason*) that mean a lost clock.
THROTTLES = {
    0x4: "the power limit (software power cap)",
    0x8: "a hardware slowdown",
    0x20: "temperature (software thermal slowdown)",
    0x40: "temperature (hardware thermal slowdown)",
    0x80: "the power supply (hardware power brake)",
}


class Rates(NamedTuple):
    """FLOP and bytes a second of one call, the share of the peak that binds and its name, the work
    they stand for, and the ceilings (rate: name and FLOP/s).
    """

    flops_per_s: float | None
    bytes_per_s: float | None
    efficiency: float | None
    against: str | None
    flops: int
    moved_bytes: int
    peaks: Peaks | None
    rate: tuple[str, float] | None


def doubts(
    measurement: str,
    samples: Sequence[int],
    interval: tuple[float, float] | None,
    clocks: Mapping[str, Any],
    rates: Rates,
    precision: float,
) -> tuple[str, ...]:
    """One sentence a doubt, the gravest first. clocks are a cell's, as `worker.clocks.over_time`
    makes them; precision is half an interval over its median from which it is wide.
    """
    return (
        *above_ceiling(measurement, rates),
        *clock_doubts(clocks),
        *_spread(samples, interval, precision),
    )


def above_ceiling(measurement: str, rates: Rates) -> tuple[str, ...]:
    """Rates that the device cannot have, with what explains them."""
    peaks, found = rates.peaks, []
    if peaks is None:
        return ()
    width = peaks.bandwidth_bytes_per_s
    if width and rates.bytes_per_s and rates.bytes_per_s > width:
        found.append(
            f"{rates.bytes_per_s / width:.0%} of the memory's {width / 1e9:,.4g} GB/s "
            f"({peaks.source}): {_why_bytes(measurement, rates, width)}"
        )
    if rates.rate and rates.flops_per_s and rates.flops_per_s > rates.rate[1]:
        name, peak = rates.rate
        reason = "check that the output is right and that the peak is this device's"
        if name == "fp32":
            reason = "tensor cores may have been used (TF32 or a split of fp32)"
        share = rates.flops_per_s / peak
        found.append(f"{share:.0%} of {peak / 1e12:,.4g} TFLOP/s {name} ({peaks.source}): {reason}")
    return tuple(found)


def _why_bytes(measurement: str, rates: Rates, width: float) -> str:
    """What explains a rate above the memory's: what L2 holds need not come from memory."""
    moved, l2_bytes = rates.moved_bytes, rates.peaks.l2_bytes if rates.peaks else None
    size = f"the working set of {moved / MB:,.1f} MB"
    if l2_bytes is None:
        return f"{size} may fit in L2, whose size is not known"
    l2 = f"the L2 of {l2_bytes / MB:,.0f} MB"
    flushed = "; it was flushed, but the output may stay there" if measurement == "event" else ""
    if moved <= l2_bytes:
        return f"{size} fits in {l2}{flushed or ', so this is not the rate of the memory'}"
    if (rates.bytes_per_s or 0) / width <= moved / (moved - l2_bytes):
        return f"a part of {size} can stay in {l2}{flushed}"
    return f"{size} is so much larger than {l2} that this is no reason; do not use the figure"


def clock_doubts(clocks: Mapping[str, Any]) -> tuple[str, ...]:
    """What the clocks and throttle reasons of a cell say against it."""
    found = []
    low, high = clocks.get("sm_mhz_min"), clocks.get("sm_mhz_max")
    if low and high and (high - low) / high > CLOCK_MOVED:
        found.append(f"the SM clock moved between {low:g} and {high:g} MHz")
    bits = int(clocks.get("throttle_reasons") or 0)
    reasons = [text for bit, text in THROTTLES.items() if bits & bit]
    if reasons:
        found.append(f"the clock was held back by {' and '.join(reasons)}")
    return tuple(found)


def _spread(
    samples: Sequence[int], interval: tuple[float, float] | None, precision: float
) -> list[str]:
    if len(samples) < FEW_SAMPLES or interval is None:
        return [f"only {len(samples)} samples"]
    found = []
    if stats.is_bimodal(samples):
        found.append("the samples have two modes, so the median may jump between them")
    half = (interval[1] - interval[0]) / 2
    median = stats.summarize(samples).median
    if half > precision * median:
        found.append(f"{WIDE} ±{half / median:.1%} only (asked for: ±{precision:.1%})")
    return found
