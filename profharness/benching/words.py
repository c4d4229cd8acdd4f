"""What a bench says in sentences. `unknown` is said as what it is: neither slower nor as fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from profharness import stats
from profharness.benching.rows import CHOSEN, REFERENCES, BenchRow

if TYPE_CHECKING:
    from profharness.benching.answer import Loss, Winner

SHOWN_WINNERS = 3
WITHIN = f"{stats.THRESHOLD:.0%}"


def why_open(one: BenchRow, other: BenchRow) -> str:
    """Why the verdict on two measured rows is `unknown`: from `stats.MIN_SAMPLES` a side the rank
    test can only fail where samples of one lie among those of the other.
    """
    few = min(one.samples, other.samples) < stats.MIN_SAMPLES
    return "too few samples" if few else "the samples overlap"


def conclude(
    figures: Sequence[BenchRow],
    winners: Sequence[Winner],
    losses: Sequence[Loss],
    samples_of: Callable[[BenchRow], tuple[int, ...]],
    *,
    against_config: bool = False,
) -> list[str]:
    """Sentences that follow from the rows of the ranking measurement, each from figures that the
    table shows. losses come the largest first; against_config: speed-ups are against a config.
    """
    ranked = [row for row in figures if row.ranked]
    found = []
    if len({row.config for row in ranked}) > 1:
        found += _across_configs(ranked)
    if len(winners) <= SHOWN_WINNERS:
        timed = [row.config for row in ranked]
        found += [_fastest(each) for each in winners if timed.count(each.config) > 1]
    found += _against_plain(ranked, samples_of)
    found += _regret_in_words(losses)
    wrong = [f"{row.config} {row.backend}" for row in figures if row.verified is False]
    if wrong:
        found.append(f"not ranked, for its output is wrong: {', '.join(wrong)}")
    if against_config:
        found.append(
            "speed-ups against another config are ratios of latencies; where the work differs, "
            "FLOP/s say which is used better"
        )
    doubtful = sum(bool(row.doubts) for row in figures)
    if doubtful:
        found.append(f"{doubtful} of {len(figures)} figures are doubtful; the notes say why")
    return found


def _across_configs(ranked: Sequence[BenchRow]) -> list[str]:
    quick = min(ranked, key=lambda row: row.median_ns or float("inf"))
    found = [
        f"lowest latency: {quick.config} on {quick.backend}, {(quick.median_ns or 0) / 1e3:,.2f} µs"
    ]
    sound = [row for row in ranked if row.flops_per_s and not (row.efficiency or 0) > 1]
    if sound:
        best = max(sound, key=lambda row: row.flops_per_s or 0)
        found.append(
            f"most work a second: {best.config} on {best.backend}, "
            f"{(best.flops_per_s or 0) / 1e12:,.4g} TFLOP/s"
        )
    return found


def _fastest(winner: Winner) -> str:
    tied = f", with {', '.join(winner.ties)} within {WITHIN} of it" if winner.ties else ""
    if not winner.open:
        return f"{winner.config}: {winner.backend} is fastest{tied}"
    return (
        f"{winner.config}: {winner.backend} has the lowest median{tied}, but is not told apart "
        f"from {', '.join(winner.open)}: {winner.why_open}"
    )


def _against_plain(
    ranked: Sequence[BenchRow], samples_of: Callable[[BenchRow], tuple[int, ...]]
) -> list[str]:
    """Where the plain reference is faster than `auto`, or seems so."""
    by_cell = {(row.config, row.backend): row for row in ranked}
    found = []
    for row in ranked:
        if row.backend != CHOSEN or row.baseline not in REFERENCES or not row.speedup:
            continue
        plain = by_cell[row.config, str(row.baseline)]
        verdict = stats.compare(samples_of(plain), samples_of(row)).verdict
        if verdict == "slower":
            found.append(f"{row.config}: auto is {1 / row.speedup:.2f}x slower than {row.baseline}")
        elif verdict == "unknown" and row.speedup < 1:
            found.append(
                f"{row.config}: the median of auto is {1 / row.speedup:.2f}x that of "
                f"{row.baseline}, but they are not told apart: {why_open(plain, row)}"
            )
    return found


def _regret_in_words(losses: Sequence[Loss]) -> list[str]:
    if not losses:
        return []
    count, found = len(losses), []
    real = [each for each in losses if each.real]
    unproven = [each for each in losses if each.open]
    if real:
        found.append(
            f"auto is slower than another correct backend on {len(real)} of {count} config(s); "
            f"most on {_cost(real[0])}"
        )
    if unproven:
        reasons = " or ".join(dict.fromkeys(each.why_open for each in unproven))
        most = f"; most on {_cost(unproven[0])}, by the medians" if unproven[0].regret else ""
        found.append(
            f"auto is not told apart from the fastest other backend on {len(unproven)} of {count} "
            f"config(s): {reasons}{most}"
        )
    if not real and not unproven:
        found.append(f"auto is as fast as the fastest backend on all {count} config(s)")
    return found


def _cost(loss: Loss) -> str:
    took = f" (it took {loss.choice})" if loss.choice else ""
    return f"{loss.config}{took}: {loss.regret:.1%} over {loss.best}"
