"""What follows from the rows of a bench: the best backend of each config, what PyTorch's choice
cost against it, and conclusions in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from profharness import stats
from profharness.bench_plan import PRECISION, RANKING
from profharness.benching.rows import CHOSEN, REFERENCES, BenchRow, all_samples, bench_rows
from profharness.config import Config, parse_config
from profharness.dispatch.rewrite import SDP_BACKENDS, call_code

if TYPE_CHECKING:
    from profharness.peaks import Peaks
    from profharness.rows import CellRow
    from profharness.store import Store

SETTINGS = ("auto", "all-disabled")  # they leave the choice to PyTorch
Samples = Mapping[str, Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Winner:
    """The fastest correct backend of a config; ties are those that the samples do not tell from it.
    code selects it.
    """

    config: str
    backend: str
    median_ns: float
    ties: tuple[str, ...]
    code: str


@dataclass(frozen=True, slots=True)
class Loss:
    """What `auto` cost on a config. choice is the backend that it took, where known; regret is its
    median over the best one's, less 1; real: the samples tell the two apart, and they are not
    one backend.
    """

    config: str
    choice: str | None
    chosen_ns: float
    best: str
    best_ns: float
    regret: float
    real: bool
    code: str


@dataclass(frozen=True)
class Benched:
    """A whole answer. ranking is the measurement that ranks; losses are sorted, the largest first."""

    run: str
    rows: tuple[BenchRow, ...]
    cells: tuple[CellRow, ...]
    ranking: str
    convention: str
    precision: float
    peaks: Peaks | None
    environment: dict[str, Any]
    winners: tuple[Winner, ...]
    losses: tuple[Loss, ...]
    conclusions: tuple[str, ...]
    samples: Samples = field(default_factory=dict)

    def ranking_rows(self) -> list[BenchRow]:
        """One row a cell, by the measurement that ranks; cells without samples too."""
        return [row for row in self.rows if row.measurement in (self.ranking, None)]


def benched(
    store: Store,
    run: str | None = None,
    *,
    convention: str = "exact",
    baseline: Config | None = None,
    precision: float = PRECISION,
    configs: Sequence[Config] | None = None,
    backends: Sequence[str] | None = None,
    verifications: Sequence[str] = (),
    rank_by: Sequence[str] = RANKING,
) -> Benched:
    """The answer of a stored run (None: the latest); the first of rank_by that it has ranks.
    Raises as `bench_rows` does.
    """
    name = store.resolve(run or "latest")
    rows = bench_rows(
        store,
        name,
        convention=convention,
        baseline=baseline,
        precision=precision,
        configs=configs,
        backends=backends,
        verifications=verifications,
    )
    cells = store.cells(name, configs=configs, backends=backends)
    samples = all_samples(store, name, cells)
    ranking = _ranking(rows, rank_by)
    ranked = [row for row in rows if row.measurement == ranking and row.ranked]
    by_cell = {(cell.config, cell.backend): cell for cell in cells}

    def samples_of(row: BenchRow) -> tuple[int, ...]:
        return samples[by_cell[row.config, row.backend].cell][ranking]

    winners, losses = [], []
    for label in dict.fromkeys(cell.config for cell in cells):
        alike = [row for row in ranked if row.config == label]
        winners += [_winner(alike, samples_of)] if alike else []
        losses += _losses(alike, by_cell, samples_of)
    losses.sort(key=lambda each: -each.regret)
    return Benched(
        run=name,
        rows=tuple(rows),
        cells=tuple(cells),
        ranking=ranking,
        convention=convention,
        precision=precision,
        peaks=store.peaks(name),
        environment=store.environment(name),
        winners=tuple(winners),
        losses=tuple(losses),
        conclusions=tuple(conclude(rows, ranked, winners, losses, baseline)),
        samples=samples,
    )


def _ranking(rows: Sequence[BenchRow], rank_by: Sequence[str]) -> str:
    """The first measurement in that order that any row has."""
    seen = {row.measurement for row in rows}
    return next((one for one in (*rank_by, *RANKING) if one in seen), RANKING[0])


def _winner(alike: Sequence[BenchRow], samples_of: Any) -> Winner:
    best = _best([row for row in alike if row.backend != SETTINGS[1]] or alike)
    ties = [
        row.backend
        for row in alike
        if row is not best and stats.compare(samples_of(best), samples_of(row)).verdict == "same"
    ]
    median_ns = float(best.median_ns or 0)
    return Winner(best.config, best.backend, median_ns, tuple(ties), selecting(best))


def _losses(
    alike: Sequence[BenchRow], by_cell: Mapping[tuple[str, str], CellRow], samples_of: Any
) -> list[Loss]:
    """The loss of `auto` on one config; none where it was not timed, or timed alone."""
    chosen = next((row for row in alike if row.backend == CHOSEN), None)
    others = [row for row in alike if row.backend not in SETTINGS]
    if chosen is None or not others:
        return []
    best = _best(others)
    chosen_ns, best_ns = float(chosen.median_ns or 0), float(best.median_ns or 0)
    choice = by_cell[chosen.config, CHOSEN].choice
    slower = stats.compare(samples_of(best), samples_of(chosen)).verdict == "slower"
    real = slower and choice != best.backend
    regret = max(0.0, chosen_ns / best_ns - 1) if best_ns else 0.0
    return [
        Loss(chosen.config, choice, chosen_ns, best.backend, best_ns, regret, real, selecting(best))
    ]


def _best(rows: Sequence[BenchRow]) -> BenchRow:
    return min(rows, key=lambda row: row.median_ns or float("inf"))


def selecting(row: BenchRow) -> str:
    """Python that has a config computed by the row's backend."""
    config = parse_config(row.config)
    if row.backend == CHOSEN:
        return call_code(config, config)
    if row.backend in SDP_BACKENDS:
        return call_code(config, config, row.backend)
    return (
        f"# {row.backend} is none of scaled_dot_product_attention's backends: call it itself\n"
        f"# with q, k, v in the layout [batch, heads, seq_len, head_dim]"
    )


def conclude(
    rows: Sequence[BenchRow],
    ranked: Sequence[BenchRow],
    winners: Sequence[Winner],
    losses: Sequence[Loss],
    baseline: Config | None = None,
) -> list[str]:
    """Sentences that follow from the rows, each from figures that the table shows."""
    found = []
    if len({row.config for row in ranked}) > 1:
        found += _across_configs(ranked)
    for each in winners:
        timed = sum(row.config == each.config for row in ranked)
        if timed > 1 and len(winners) <= 3:
            tied = f", not told apart from {', '.join(each.ties)}" if each.ties else ""
            found.append(f"{each.config}: {each.backend} is fastest{tied}")
    found += _slower_than_plain(ranked)
    found += _regret_in_words(losses)
    wrong = [f"{row.config} {row.backend}" for row in rows if row.verified is False]
    if wrong:
        found.append(f"not ranked, for its output is wrong: {', '.join(dict.fromkeys(wrong))}")
    if baseline is not None:
        found.append(
            "speed-ups against another config are ratios of latencies; where the work differs, "
            "FLOP/s say which is used better"
        )
    doubtful = sum(bool(row.doubts) for row in ranked)
    if doubtful:
        found.append(f"{doubtful} of {len(ranked)} figures are doubtful; the notes say why")
    return found


def _across_configs(ranked: Sequence[BenchRow]) -> list[str]:
    quick = _best(ranked)
    found = [
        f"lowest latency: {quick.config} on {quick.backend}, {(quick.median_ns or 0) / 1e3:,.2f} µs"
    ]
    sound = [row for row in ranked if row.flops_per_s and not _impossible(row)]
    if sound:
        best = max(sound, key=lambda row: row.flops_per_s or 0)
        found.append(
            f"most work a second: {best.config} on {best.backend}, "
            f"{(best.flops_per_s or 0) / 1e12:,.4g} TFLOP/s"
        )
    return found


def _impossible(row: BenchRow) -> bool:
    return row.efficiency is not None and row.efficiency > 1


def _slower_than_plain(ranked: Sequence[BenchRow]) -> list[str]:
    """Where the plain reference is faster than `auto`."""
    return [
        f"{row.config}: auto is {1 / row.speedup:.2f}x slower than {row.baseline}"
        for row in ranked
        if row.backend == CHOSEN
        and row.baseline in REFERENCES
        and row.speedup
        and row.speedup < 1 / (1 + stats.THRESHOLD)
    ]


def _regret_in_words(losses: Sequence[Loss]) -> list[str]:
    if not losses:
        return []
    real = [each for each in losses if each.real]
    if not real:
        return [f"auto is as fast as the fastest backend on all {len(losses)} config(s)"]
    worst = real[0]
    took = f" (it took {worst.choice})" if worst.choice else ""
    return [
        f"auto is slower than another correct backend on {len(real)} of {len(losses)} config(s); "
        f"most on {worst.config}{took}: {worst.regret:.1%} over {worst.best}"
    ]
