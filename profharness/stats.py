"""Summarize samples, estimate the uncertainty of a median, and compare two sets of samples.

The uncertainty of a median includes the differences between turns and between processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

Speed = Literal["same", "faster", "slower", "unknown"]

ALPHA = 0.05
THRESHOLD = 0.03  # minimum relative difference of medians that counts as a change
NOTABLE_LOSS = 0.1  # minimum loss of time for which an answer recommends another backend
MIN_SAMPLES = 5
MIN_SAMPLES_CI = 3
NOISY_IQR = 0.10  # samples are noisy if interquartile range / median is at least this
# Minimum share of the variance that the two clusters of a bimodal distribution explain. Two
# clusters explain 0.64 of a normal distribution and 0.75 of a uniform distribution.
BIMODAL_SHARE = 0.85
BIMODAL_DISTANCE = 0.10  # minimum distance of the two cluster means, divided by the median
BIMODAL_MIN_SAMPLES = 10
BOOTSTRAP_RESAMPLES = 2000
SEED = 0


class Turn(NamedTuple):
    """The number of samples that a process took in one turn. Processes and turns count from 0."""

    process: int
    turn: int
    samples: int


class Series(tuple[int, ...]):
    """Samples in the order of measurement, with their turns if these are known."""

    turns: tuple[Turn, ...] = ()

    @classmethod
    def of(cls, samples: Iterable[int], turns: Iterable[Sequence[int]] = ()) -> Series:
        """Create a series. Ignore the turns if their numbers of samples do not match `samples`."""
        series = cls(samples)
        known = tuple(Turn(*turn) for turn in turns)
        if sum(turn.samples for turn in known) == len(series):
            series.turns = known
        return series


@dataclass(frozen=True, slots=True)
class Interval:
    """The 95 % interval of a median.

    The `between_*` fields are the half-widths computed from the variation between turns or
    processes alone. A field is None if there was only one turn or process.
    """

    low: float
    high: float
    processes: int | None = None
    between_turns: float | None = None
    between_processes: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Location and spread of n samples.

    `std` is computed with n - 1 degrees of freedom, and is 0 for a single sample.
    """

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
    """The comparison of a candidate with a baseline.

    `ratio` is the median of the candidate divided by the median of the baseline, or None if one side
    has no samples. `p_value` is the largest p-value of the statistical tests, or None if no test was
    made. `reason` explains the verdict.
    """

    ratio: float | None
    p_value: float | None
    verdict: Speed
    reason: str


def _numpy() -> Any:
    import numpy

    return numpy


def _scipy_stats() -> Any:
    from scipy import stats

    return stats


def summarize(samples: Sequence[float]) -> Summary:
    """Return the summary of samples, with interpolated percentiles.

    Raise ValueError if there are no samples.
    """
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
    """Return the bootstrap interval of the median, or None for fewer than three samples."""
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


def interval(samples: Sequence[int]) -> Interval | None:
    """Return the interval that contains the median of a repeated run in 95 % of cases.

    Return None for fewer than three samples. Resample the turns within each process (a block
    bootstrap). There are only a few processes, so assume that the medians of processes follow
    Student's t-distribution. The deterministic result covers both intervals.
    """
    if len(samples) < MIN_SAMPLES_CI:
        return None
    turns = samples.turns if isinstance(samples, Series) else ()
    drawn = _drawn_turns(samples, turns) or median_ci(samples)
    if drawn is None:
        return None
    medians = process_medians(samples)
    low, high = drawn
    known = any(turn.turn != turns[0].turn for turn in turns)
    between_turns = (high - low) / 2 if known else None
    between = None
    if len(medians) > 1:
        np = _numpy()
        center = float(np.mean(medians))
        spread = float(np.std(medians, ddof=1)) / len(medians) ** 0.5
        between = _student(len(medians) - 1) * spread
        low, high = max(0.0, min(low, center - between)), max(high, center + between)
    return Interval(low, high, len(medians) or None, between_turns, between)


def process_medians(samples: Sequence[float]) -> list[float]:
    """Return the median of each process, or an empty list if the processes are unknown."""
    parts: dict[int, list[float]] = {}
    begin = 0
    for turn in samples.turns if isinstance(samples, Series) else ():
        parts.setdefault(turn.process, []).extend(samples[begin : begin + turn.samples])
        begin += turn.samples
    return [float(_numpy().median(part)) for _, part in sorted(parts.items()) if part]


def of_first_process(samples: Sequence[float]) -> bool:
    """Return whether the samples certainly include samples of the first process."""
    turns = samples.turns if isinstance(samples, Series) else ()
    return any(turn.process == 0 for turn in turns)


def _drawn_turns(samples: Sequence[int], turns: Sequence[Turn]) -> tuple[float, float] | None:
    """Resample the turns to estimate the interval of the median.

    Return None if no process has two turns. If a process has only one turn, resample its samples
    individually.
    """
    np = _numpy()
    blocks = np.empty(len(samples), dtype=np.int64)
    ends = list(accumulate(turn.samples for turn in turns))
    sizes: list[int] = []  # number of blocks in each process
    for process in dict.fromkeys(turn.process for turn in turns):
        own = [place for place, turn in enumerate(turns) if turn.process == process]
        single = len(own) < 2
        first, count = sum(sizes), 0
        for place in own:
            begin, end = ends[place] - turns[place].samples, ends[place]
            blocks[begin:end] = first + count + (np.arange(end - begin) if single else 0)
            count += end - begin if single else 1
        sizes.append(count)
    freedom = sum(sizes) - len(sizes)
    if len(turns) == len(sizes) or freedom < 1:
        return None
    medians = _weighted_medians(np.asarray(samples), blocks, _draws(tuple(sizes)))
    middle = summarize(samples).median
    low, high = (float(edge) for edge in np.percentile(medians, [2.5, 97.5]))
    # resampling underestimates the width if there are few blocks
    scale = (sum(sizes) / freedom) ** 0.5 * _student(freedom) / _student(10**6)
    return middle - scale * (middle - low), middle + scale * (high - middle)


# A small cache is enough, because most cells of a run have the same number of turns.
@lru_cache(maxsize=4)
def _draws(sizes: tuple[int, ...]) -> Any:
    """Draw the blocks of each process with replacement.

    Return a table with a row for each resample and a column for each block. Each value is the number
    of times that the block was drawn.
    """
    np = _numpy()
    random = np.random.default_rng(SEED)
    drawn = [random.multinomial(n, [1 / n] * n, size=BOOTSTRAP_RESAMPLES) for n in sizes]
    return np.concatenate(drawn, axis=1, dtype=np.int32)


def _weighted_medians(x: Any, blocks: Any, counts: Any) -> Any:
    """Return the median of `x` for each row of `counts`, given the block of each sample."""
    np = _numpy()
    values, places = np.unique(x, return_inverse=True)
    # table[i, b] is the number of samples of block b that are at most values[i]. There are few
    # distinct values, because clocks have a coarse resolution.
    table = np.zeros((len(values), counts.shape[1]), dtype=np.int32)
    np.add.at(table, (places, blocks), 1)
    table = table.cumsum(axis=0, dtype=np.int32)
    drawn = counts @ table[-1]
    lower, upper = (_first(counts, table, need) for need in ((drawn + 1) // 2, drawn // 2 + 1))
    return (values[lower] + values[upper]) / 2


def _first(counts: Any, table: Any, need: Any) -> Any:
    """Return, for each resample, the first row of `table` with at least `need` samples."""
    np = _numpy()
    low, high = np.zeros(len(counts), dtype=np.int64), np.full(len(counts), len(table) - 1)
    while (low < high).any():
        middle = (low + high) // 2
        enough = np.einsum("rb,rb->r", counts, table[middle]) >= need
        low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
    return low


@cache
def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's distribution with the given degrees of freedom."""
    return float(_scipy_stats().t.ppf(0.975, freedom))


def is_bimodal(samples: Sequence[float]) -> bool:
    """Return whether the samples form two distinct clusters.

    Otsu's method selects the two clusters with the largest variance between them. Each cluster must
    contain at least a fifth of the samples, and the clusters must explain at least BIMODAL_SHARE of
    the variance. Return False for fewer than ten samples.
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
    """Compare two independent sets of times.

    The verdict is `same` if the medians differ by no more than `threshold`. The verdict is `faster`
    or `slower` if the medians differ by more and the Mann-Whitney U test is significant at 5 %. If
    both sets come from several processes, Student's t-test on the medians of the processes must also
    be significant. Otherwise, the verdict is `unknown`.
    """
    if not len(baseline) or not len(candidate):
        side = "baseline" if not len(baseline) else "candidate"
        return Comparison(None, None, "unknown", f"the {side} has no samples")
    base, cand = summarize(baseline), summarize(candidate)
    if base.median <= 0:
        return Comparison(None, None, "unknown", "the baseline's median is not positive")
    ratio = cand.median / base.median
    if min(base.n, cand.n) < MIN_SAMPLES:
        reason = f"too few samples ({base.n} and {cand.n}; each side needs at least {MIN_SAMPLES})"
        return Comparison(ratio, None, "unknown", reason)
    p_value, basis = _rank_test(baseline, candidate), ""
    sides = process_medians(baseline), process_medians(candidate)
    if min(map(len, sides)) > 1:
        p_value = max(p_value, _process_test(*sides))
        basis = f" over {len(sides[0])} and {len(sides[1])} processes"
    verdict: Speed = "slower" if ratio > 1 else "faster"
    reason = f"the medians differ significantly (p = {p_value:.2g}){basis}"
    if not beyond(ratio, threshold):
        verdict = "same"
        reason = f"the medians differ by no more than the {threshold * 100:g} % threshold"
    elif p_value >= ALPHA:
        reason = f"the medians differ, but not significantly (p = {p_value:.2g}){basis}"
        verdict = "unknown"
    doubts = _doubt("baseline", baseline, base) + _doubt("candidate", candidate, cand)
    return Comparison(ratio, p_value, verdict, reason + doubts)


def beyond(ratio: float, threshold: float) -> bool:
    """Return whether a ratio or its inverse exceeds 1 by more than `threshold`."""
    return ratio > 1 + threshold or ratio * (1 + threshold) < 1


def _rank_test(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    np = _numpy()
    a, b = (np.asarray(samples, dtype=np.float64) for samples in (baseline, candidate))
    if a.min() == a.max() == b.min() == b.max():
        return 1.0
    return float(_scipy_stats().mannwhitneyu(a, b, alternative="two-sided").pvalue)


def _process_test(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """Return the p-value of Student's t-test on the logarithms of the processes' medians."""
    np = _numpy()
    a, b = np.log(baseline), np.log(candidate)
    if a.min() == a.max() and b.min() == b.max():
        return float(a[0] == b[0])
    # ttest_ind would print a warning if all medians of the baseline or the candidate are equal
    sides = [(side.mean(), side.std(ddof=1), len(side)) for side in (a, b)]
    return float(_scipy_stats().ttest_ind_from_stats(*sides[0], *sides[1]).pvalue)


def process_allowance(baseline: Sequence[float], candidate: Sequence[float]) -> float | None:
    """Return the factor that the ratio of two equal processes stays below in 95 % of cases.

    Compute the factor from Student's t-distribution and the pooled variance of the logarithms of the
    processes' medians. Return None if the baseline or the candidate has fewer than two processes.
    """
    if min(len(baseline), len(candidate)) < 2:
        return None
    np = _numpy()
    sides = [np.log(np.asarray(side, dtype=np.float64)) for side in (baseline, candidate)]
    freedom = sum(map(len, sides)) - 2
    variance = sum(float(((side - side.mean()) ** 2).sum()) for side in sides) / freedom
    return float(np.exp(_student(freedom) * (2 * variance) ** 0.5))


def _doubt(side: str, samples: Sequence[float], summary: Summary) -> str:
    if is_bimodal(samples):
        return f"; the samples of the {side} are bimodal, so the median may jump between two modes"
    spread = summary.iqr / summary.median if summary.median > 0 else 0.0
    if spread >= NOISY_IQR:
        return f"; the {side} is noisy (interquartile range {spread * 100:.0f} % of the median)"
    return ""
