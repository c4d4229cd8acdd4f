"""What follows from the rows of a bench: the best backend of each config, and what PyTorch's choice
cost against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from profharness import stats
from profharness.bench_plan import PRECISION, RANKING, BenchPlan, read_plan
from profharness.benching.rows import CHOSEN, BenchRow, all_samples, bench_rows, run_cells
from profharness.benching.words import conclude, why_open
from profharness.config import Config, parse_config
from profharness.dispatch.rewrite import SDP_BACKENDS, call_code

if TYPE_CHECKING:
    from profharness.peaks import Peaks
    from profharness.rows import CellRow
    from profharness.store import Store

SETTINGS = ("auto", "all-disabled")  # they leave the choice to PyTorch
Samples = Mapping[str, Mapping[str, tuple[int, ...]]]
SamplesOf = Callable[[BenchRow], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Winner:
    """The correct backend with the lowest median on a config; ties are those within
    `stats.THRESHOLD` of it. open are those that are slower by their medians but not by their
    samples, and why: while there are any, it is not known which is fastest. code selects it.
    """

    config: str
    backend: str
    median_ns: float
    ties: tuple[str, ...]
    code: str
    open: tuple[str, ...] = ()
    why_open: str = ""


@dataclass(frozen=True, slots=True)
class Loss:
    """What `auto` cost on a config. choice is the backend that it took, where known; regret is its
    median over the best one's, less 1; real: the samples show that `auto` is slower, and the two
    are not one backend. verdict is `auto` against the best, `unknown` for why_open.
    """

    config: str
    choice: str | None
    chosen_ns: float
    best: str
    best_ns: float
    regret: float
    real: bool
    code: str
    verdict: stats.Speed = "same"
    why_open: str = ""

    @property
    def open(self) -> bool:
        """Whether it is not known that `auto` is slower, or not."""
        return self.verdict == "unknown" and self.choice != self.best


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

    def figures(self) -> list[BenchRow]:
        """The ranking rows that have one; what is told of `n of m` figures counts these."""
        return [row for row in self.ranking_rows() if row.median_ns is not None]


def benched(
    store: Store,
    run: str | None = None,
    *,
    convention: str = "exact",
    baseline: Config | None = None,
    precision: float | None = None,
    configs: Sequence[Config] | None = None,
    backends: Sequence[str] | None = None,
    verifications: Sequence[str] = (),
    rank_by: Sequence[str] | None = None,
) -> Benched:
    """The answer of a stored run (None: the latest); the first of rank_by that it has ranks.
    precision and rank_by: None for what the run was measured with, as its folder says. configs and
    backends: of these alone. Raises as `bench_rows` does.
    """
    name = store.resolve(run or "latest")
    plan = _plan_of(store, name)
    precision = (plan.precision if plan else PRECISION) if precision is None else precision
    rank_by = (plan.measurements if plan else RANKING) if rank_by is None else rank_by
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
    cells = run_cells(store, name, configs, backends, baseline)
    samples = all_samples(store, name, cells)
    ranking = _ranking(rows, rank_by)
    by_cell = {(cell.config, cell.backend): cell for cell in cells}

    def samples_of(row: BenchRow) -> tuple[int, ...]:
        return samples[by_cell[row.config, row.backend].cell][ranking]

    figures = [row for row in rows if row.measurement == ranking]
    winners, losses = _compared(figures, by_cell, samples_of)
    told = conclude(figures, winners, losses, samples_of, against_config=baseline is not None)
    return Benched(
        run=name,
        rows=tuple(rows),
        cells=tuple(cells),
        ranking=ranking,
        convention=convention,
        precision=precision,
        peaks=store.peaks(name),
        environment=store.environment(name),
        winners=winners,
        losses=losses,
        conclusions=tuple(told),
        samples=samples,
    )


def _compared(
    figures: Sequence[BenchRow],
    by_cell: Mapping[tuple[str, str], CellRow],
    samples_of: SamplesOf,
) -> tuple[tuple[Winner, ...], tuple[Loss, ...]]:
    """The winner of each config, and what `auto` lost, the largest loss first."""
    winners, losses = [], []
    for label in dict.fromkeys(row.config for row in figures):
        alike = [row for row in figures if row.config == label and row.ranked]
        winners += [_winner(alike, samples_of)] if alike else []
        losses += _losses(alike, by_cell, samples_of)
    return tuple(winners), tuple(sorted(losses, key=lambda each: -each.regret))


def _plan_of(store: Store, run: str) -> BenchPlan | None:
    """The plan in the run's folder, whose path may be relative to the store's; None if it is no
    bench, or the folder is not there any more.
    """
    path = next(each.path for each in store.runs() if each.run == run)
    for folder in (Path(path), store.path.parent / path):
        try:
            plan = read_plan(folder)
        except (OSError, msgspec.MsgspecError):
            continue
        if plan is not None:
            return plan
    return None


def _ranking(rows: Sequence[BenchRow], rank_by: Sequence[str]) -> str:
    """The first measurement in that order that any row has."""
    seen = {row.measurement for row in rows}
    return next((one for one in (*rank_by, *RANKING) if one in seen), RANKING[0])


def _winner(alike: Sequence[BenchRow], samples_of: SamplesOf) -> Winner:
    best = _best([row for row in alike if row.backend != SETTINGS[1]] or alike)
    ties, unproven = [], []
    for row in alike:
        if row is not best:
            verdict = stats.compare(samples_of(best), samples_of(row)).verdict
            ties += [row] if verdict == "same" else []
            unproven += [row] if verdict == "unknown" else []
    return Winner(
        best.config,
        best.backend,
        float(best.median_ns or 0),
        tuple(row.backend for row in ties),
        selecting(best),
        tuple(row.backend for row in unproven),
        " or ".join(dict.fromkeys(why_open(best, row) for row in unproven)),
    )


def _losses(
    alike: Sequence[BenchRow], by_cell: Mapping[tuple[str, str], CellRow], samples_of: SamplesOf
) -> list[Loss]:
    """The loss of `auto` on one config; none where it was not timed, or timed alone."""
    chosen = next((row for row in alike if row.backend == CHOSEN), None)
    others = [row for row in alike if row.backend not in SETTINGS]
    if chosen is None or not others:
        return []
    best = _best(others)
    chosen_ns, best_ns = float(chosen.median_ns or 0), float(best.median_ns or 0)
    choice = by_cell[chosen.config, CHOSEN].choice
    verdict = stats.compare(samples_of(best), samples_of(chosen)).verdict
    return [
        Loss(
            chosen.config,
            choice,
            chosen_ns,
            best.backend,
            best_ns,
            max(0.0, chosen_ns / best_ns - 1) if best_ns else 0.0,
            verdict == "slower" and choice != best.backend,
            selecting(best),
            verdict,
            why_open(best, chosen) if verdict == "unknown" else "",
        )
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
