"""Statistics over raw samples: summaries, a bootstrap interval of the median, and the verdict on
two sets of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Speed = Literal["same", "faster", "slower", "unknown"]

ALPHA = 0.05
THRESHOLD = 0.03  # the smallest relative change of the median that is worth a word
MIN_SAMPLES = 5
MIN_SAMPLES_CI = 3
NOISY_IQR = 0.10  # interquartile range over median from which samples are called noisy
# Variance that two clusters must explain (0.64 for a normal, 0.75 for a uniform distribution).
BIMODAL_SHARE = 0.85
BIMODAL_DISTANCE = 0.10  # distance of the two cluster means over the median
BIMODAL_MIN_SAMPLES = 10
BOOTSTRAP_RESAMPLES = 2000
SEED = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """Location and spread of n samples, in their own unit. std is the sample's (n - 1), 0 for one."""

    n: int
    median: float
    mean: float
    std: float
    iqr: float
    p10: float
    p90: float
    p99: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Candidate against baseline. ratio is that of the medians (above 1: slower), None without
    samples; p_value the two-sided Mann-Whitney U test's, None when it was not made. reason says
    what the verdict rests on.
    """

    ratio: float | None
    p_value: float | None
    verdict: Speed
    reason: str


def _numpy() -> Any:
    """NumPy, loaded at the first use: commands that compute nothing start without it."""
    import numpy

    return numpy


def _scipy_stats() -> Any:
    from scipy import stats

    return stats


def summarize(samples: Sequence[float]) -> Summary:
    """Summary of at least one sample. Percentiles interpolate linearly. Raises ValueError on none."""
    if not len(samples):
        raise ValueError("no samples to summarize")
    np = _numpy()
    x = np.asarray(samples, dtype=np.float64)
    p10, p25, p50, p75, p90, p99 = map(float, np.percentile(x, [10, 25, 50, 75, 90, 99]))
    return Summary(
        n=len(x),
        median=p50,
        mean=float(x.mean()),
        std=float(x.std(ddof=1)) if len(x) > 1 else 0.0,
        iqr=p75 - p25,
        p10=p10,
        p90=p90,
        p99=p99,
        min=float(x.min()),
        max=float(x.max()),
    )


def median_ci(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Bootstrap interval of the median, the same on every call; None below three samples."""
    if len(samples) < MIN_SAMPLES_CI:
        return None
    np = _numpy()
    result = _scipy_stats().bootstrap(
        (np.asarray(samples, dtype=np.float64),),
        np.median,
        confidence_level=confidence,
        n_resamples=BOOTSTRAP_RESAMPLES,
        method="percentile",
        vectorized=True,
        random_state=np.random.default_rng(SEED),
    )
    low, high = result.confidence_interval
    return float(low), float(high)


def is_bimodal(samples: Sequence[float]) -> bool:
    """Whether two clusters, each with a fifth of the samples or more, explain nearly all of the
    variance. The best split is Otsu's (largest between-class variance). Fewer than ten samples are
    never bimodal.
    """
    if len(samples) < BIMODAL_MIN_SAMPLES:
        return False
    np = _numpy()
    x = np.sort(np.asarray(samples, dtype=np.float64))
    total = float(((x - x.mean()) ** 2).sum())
    median = float(np.median(x))
    if total <= 0 or median <= 0:
        return False
    fifth = -(-len(x) // 5)
    cuts = np.arange(fifth, len(x) - fifth + 1)
    sums = np.concatenate(([0.0], np.cumsum(x)))
    low, high = sums[cuts] / cuts, (sums[-1] - sums[cuts]) / (len(x) - cuts)
    between = cuts * (len(x) - cuts) / len(x) * (high - low) ** 2
    best = int(np.argmax(between))
    distance = float(high[best] - low[best]) / median
    return float(between[best]) / total >= BIMODAL_SHARE and distance >= BIMODAL_DISTANCE


def compare(
    baseline: Sequence[float], candidate: Sequence[float], *, threshold: float = THRESHOLD
) -> Comparison:
    """Verdict on two independent sets of times. A change of the medians within threshold is `same`
    whatever the rank test says. One beyond it that the test does not support at 5 % is `unknown`,
    as are fewer than five samples on a side.
    """
    if not len(baseline) or not len(candidate):
        side = "baseline" if not len(baseline) else "candidate"
        return Comparison(None, None, "unknown", f"no samples on the {side} side")
    base, cand = summarize(baseline), summarize(candidate)
    if base.median <= 0:
        return Comparison(None, None, "unknown", "the baseline's median is not positive")
    ratio = cand.median / base.median
    if min(base.n, cand.n) < MIN_SAMPLES:
        reason = f"too few samples ({base.n} and {cand.n}; {MIN_SAMPLES} a side are needed)"
        return Comparison(ratio, None, "unknown", reason)
    p_value = _rank_test(baseline, candidate)
    verdict, reason = _judge(ratio, p_value, threshold)
    doubts = _doubt("baseline", baseline, base) + _doubt("candidate", candidate, cand)
    return Comparison(ratio, p_value, verdict, reason + doubts)


def beyond(ratio: float, threshold: float) -> bool:
    """Whether a ratio differs from 1 by more than threshold; a ratio and its inverse agree."""
    return ratio > 1 + threshold or ratio * (1 + threshold) < 1


def _judge(ratio: float, p_value: float, threshold: float) -> tuple[Speed, str]:
    change = f"medians differ by {(ratio - 1) * 100:+.1f} %"
    if not beyond(ratio, threshold):
        return "same", f"{change}, within the {threshold * 100:g} % threshold"
    if p_value >= ALPHA:
        return "unknown", f"{change}, but not significantly (p = {p_value:.2g})"
    return ("slower" if ratio > 1 else "faster"), f"{change}, p = {p_value:.2g}"


def _rank_test(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    np = _numpy()
    a, b = (np.asarray(samples, dtype=np.float64) for samples in (baseline, candidate))
    if a.min() == a.max() == b.min() == b.max():
        return 1.0
    return float(_scipy_stats().mannwhitneyu(a, b, alternative="two-sided").pvalue)


def _doubt(side: str, samples: Sequence[float], summary: Summary) -> str:
    if is_bimodal(samples):
        return f"; the {side}'s samples are bimodal, so its median may jump between two modes"
    spread = summary.iqr / summary.median if summary.median > 0 else 0.0
    if spread >= NOISY_IQR:
        return f"; the {side} is noisy (interquartile range {spread * 100:.0f} % of the median)"
    return ""
