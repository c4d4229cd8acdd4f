"""Evaluate a benchmark: find the fastest backends and compare `auto` with them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from profharness import stats
from profharness.attention.backends import (
    ALL,
    DEFAULT_BACKENDS,
    KERNELS,
    expand_backends,
    find_backend,
    stored_names,
)
from profharness.attention.config import (
    OWN_CHOICE,
    Config,
    parse_config,
    pytorch_chooses,
    require_configs,
    sdpa_setting,
)
from profharness.attention.costs import CONVENTIONS
from profharness.attention.dispatch.advice import call_code
from profharness.columns import VS_FASTEST, column
from profharness.device_types import CUDA, on_gpu
from profharness.devices import Peaks
from profharness.dtypes import CONFIG_DTYPES
from profharness.errors import NotFoundError, UsageError, counted, join_and, percent
from profharness.measurements.agreement import backend_that_ran, times_of_auto
from profharness.measurements.measurements import (
    CHOSEN,
    REFERENCES,
    Baseline,
    BenchRow,
    DtypePair,
    Ran,
    Samples,
    SamplesOf,
    Sweep,
    all_samples,
    bench_rows,
    contenders,
    dtype_pairs,
    run_cells,
    sweeps,
    without_choice,
)
from profharness.rows import MEASUREMENTS, CellRow
from profharness.run import PRECISION
from profharness.store import Need, Selection, Store
from profharness.units import as_long, by_how_much, ratio_text


def parse_baseline(text: str | None) -> Baseline | None:
    """Parse a baseline. Raise UsageError if it is neither a config nor the name of a backend."""
    if text is None or "," in text or re.match(r"\d|b\d+-h\d+-", text):
        return None if text is None else parse_config(text)
    return find_backend(text).name


def bench_configs(
    configs: Sequence[Config],
    dtypes: Sequence[str] = (),
    baseline: Baseline | None = None,
    device_type: str | None = None,
) -> list[Config]:
    """Return the configs without duplicates. A baseline that is a config comes first.

    A config without a dtype is returned once for each of the dtypes. If `device_type` is set, a
    config without a dtype is a duplicate of the config with the device's default dtype. Raise
    UsageError for an unknown dtype, or if `configs` is empty.
    """
    _check_dtypes(dtypes)
    require_configs(configs, runs=True)
    ahead = [baseline] if isinstance(baseline, Config) and baseline not in configs else []
    unique: dict[Config, Config] = {}
    for config in [*ahead, *configs]:
        for dtype in dtypes or (None,):
            full = config if config.dtype else replace(config, dtype=dtype)
            unique.setdefault(full.resolve(device_type) if device_type else full, full)
    return list(unique.values())


def stored_configs(
    store: Store, run: str, configs: Sequence[Config], dtypes: Sequence[str] = ()
) -> list[Config] | None:
    """Return the configs that a query selects in a stored run. None means all configs. Raise
    UsageError for an unknown dtype, and NotFoundError for a dtype that no config of the run has.
    """
    if configs:
        return bench_configs(configs, dtypes)
    _check_dtypes(dtypes)
    if not dtypes:
        return None
    held = [
        parse_config(label) for label in dict.fromkeys(cell.config for cell in store.cells(run))
    ]
    for dtype in dtypes:
        if all(config.dtype != dtype for config in held):
            dtypes = ", ".join(sorted({str(config.dtype) for config in held}))
            name = store.run_name(run)
            raise NotFoundError(f"run {name} has no config in {dtype}; it has {dtypes}")
    return [config for config in held if config.dtype in dtypes]


def stored_backends(store: Store, run: str, names: Sequence[str]) -> list[str] | None:
    """Return the backends that a query selects in a stored run. None means all backends."""
    if not names:
        return None
    held = {cell.backend for cell in store.cells(run)}
    return [
        backend
        for name in names
        for backend in stored_names(expand_backends([name], DEFAULT_BACKENDS[CUDA]))
        if backend in held or name not in (ALL, KERNELS)
    ]


def _check_dtypes(names: Sequence[str]) -> None:
    for name in names:
        if name not in CONFIG_DTYPES:
            raise UsageError(f"unknown dtype {name!r}; choose from {', '.join(CONFIG_DTYPES)}")


def backend_of_cell(cell: CellRow) -> str | None:
    """Return the backend that computed a cell. Return None if PyTorch chose the backend and its
    choice is unknown.
    """
    return backend_that_ran(cell) if pytorch_chooses(cell.backend) else cell.backend


# These needs select the latest run with times, or the latest run if no run has times.
TIMED: tuple[Need, ...] = ("times", "run")


@dataclass(frozen=True, slots=True)
class Winner:
    """The correct backend with the lowest median on a config."""

    config: str
    backend: str
    median_ns: float
    ties: tuple[str, ...]  # other backends that are as fast, within the threshold, and `same`
    code: str  # Python code that selects the backend
    # other backends for which the samples do not show whether they are slower
    open: tuple[str, ...] = ()
    why_open: str = ""  # the reason, such as `the samples overlap`
    ran: str | None = None  # the backend that ran, such as the choice of `auto`
    same: tuple[str, ...] = ()  # other backends whose calls ran the same backend
    # what ran in `open` and in the other `ties`, without the backends in `busy`
    rivals: tuple[str, ...] = ()
    # other backends whose times cannot be used, because the machine was too busy
    busy: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The backend that ran or, if it is unknown, the requested backend."""
        return self.ran or self.backend

    @property
    def subject(self) -> str:
        """The requested backend, whose row has the median, and what ran: `auto, which runs flash,`."""
        return (
            self.backend
            if self.name == self.backend
            else f"{self.backend}, which runs {self.name},"
        )

    @property
    def not_comparable(self) -> str:
        """A text on the backends whose times cannot be used, or "" if there are none."""
        if not self.busy:
            return ""
        return f"{join_and(self.busy)} {'is' if len(self.busy) == 1 else 'are'} not comparable"

    @property
    def of_auto(self) -> bool:
        """Whether `auto` is known to run the fastest backend."""
        return self.name != CHOSEN and CHOSEN in (self.backend, *self.same)

    @property
    def between(self) -> str:
        """A text on backends without a significant difference, or "" if one is the fastest."""
        if not self.rivals:
            return ""
        # Sorted, because which of them has the lowest median is chance.
        return f"no significant difference between {join_and(sorted([self.name, *self.rivals]))}"


@dataclass(frozen=True, slots=True)
class Loss:
    """The cost of `auto` on a config, compared with the fastest correct other backend."""

    config: Annotated[str, column("config", meaning="label of the attention problem")]
    choice: Annotated[
        str | None,
        column("auto ran", importance="answer", meaning="the backend that ran for `auto`"),
    ]
    chosen_ns: Annotated[
        float,
        column(
            "median auto µs/call",
            "time",
            importance="answer",
            scale="call",
            meaning="median of `auto`",
        ),
    ]
    best: Annotated[
        str,
        column(
            "fastest other",
            importance="answer",
            meaning="the fastest other backend with correct output",
        ),
    ]
    best_ns: Annotated[
        float,
        column(
            "median fastest µs/call",
            "time",
            importance="answer",
            scale="call",
            meaning="median of `best`",
        ),
    ]
    regret: Annotated[
        float,
        column(
            VS_FASTEST,
            "excess",
            importance="answer",
            meaning="how much longer `auto` took than the fastest other backend with correct "
            "output; tables show the ratio of the times",
        ),
    ]
    # True if the samples show that `auto` is slower than `best`. False if both are known to have
    # run the same backend.
    real: bool
    code: str
    verdict: stats.Speed = "same"
    why_open: str = ""
    best_ran: str | None = None  # the backend that ran in the cell of `best`

    @property
    def same_backend(self) -> bool:
        """Whether `auto` is known to have run the same backend as `best`."""
        return self.choice is not None and self.choice == self.best_ran

    @property
    def open(self) -> bool:
        """Whether the samples do not show if `auto` is slower than `best`."""
        return self.verdict == "unknown" and not self.same_backend

    @property
    def remark(self) -> Annotated[str, column(meaning="why `auto` does not count as slower")]:
        """The reason why `auto` does not count as slower, or an empty string if `auto` counts as
        slower.
        """
        if self.real:
            return ""
        if self.same_backend:
            return "the same backend"
        if self.verdict == "unknown":
            return f"no significant difference: {self.why_open}"
        if self.verdict == "faster":
            return "auto is faster"
        return f"as fast, within {percent(stats.THRESHOLD)}"


@dataclass(frozen=True)
class BenchResult:
    """The evaluation of a benchmark."""

    run: str
    name: str  # the folder or the id of the run
    rows: tuple[BenchRow, ...]
    cells: tuple[CellRow, ...]
    ranking: str  # the measurement by which backends are ranked
    convention: str
    precision: float
    peaks: Peaks | None
    environment: dict[str, Any]
    winners: tuple[Winner, ...]
    losses: tuple[Loss, ...]  # in descending order of regret
    conclusions: tuple[str, ...]
    samples: Samples = field(default_factory=dict)
    # the mean kernel times of profiled calls of `auto`, by config
    times_of_auto: dict[str, float] = field(default_factory=dict)
    created: str = ""
    protocol: dict[str, Any] = field(default_factory=dict)  # keys are fields of `run.Protocol`
    baseline: Baseline | None = None  # the baseline that the user named
    sweeps: tuple[Sweep, ...] = ()
    dtypes: tuple[DtypePair, ...] = ()
    others: tuple[str, ...] = ()  # ids of runs with the same cells on other GPU models

    @property
    def gpu(self) -> str | None:
        """The name of the GPU, or None if the benchmark ran on a CPU."""
        return self.environment.get("gpu") if on_gpu(self.environment) else None

    def ranking_rows(self) -> list[BenchRow]:
        """Return the rows of the ranking measurement, and the rows of cells without samples."""
        return [row for row in self.rows if row.measurement in (self.ranking, None)]

    def busy(self) -> set[tuple[str, str]]:
        """Return the cells, as (config, backend), whose ranking figure is unusable."""
        return {(row.config, row.backend) for row in self.figures() if row.busy}

    def comparable(self) -> set[str]:
        """Return the configs with usable times to compare.

        If a time of a config cannot be used, two other backends need usable times. `auto` and the
        backend that it ran count once.
        """
        return _comparable(self.figures(), self.ran())

    def ran(self) -> dict[tuple[str, str], str | None]:
        """Return what ran in each cell, by config and requested backend."""
        return _backends_of(self.cells)

    def sound_losses(self) -> list[Loss]:
        """Return the losses on comparable configs for which both times are usable."""
        busy, comparable = self.busy(), self.comparable()
        return [
            loss
            for loss in self.losses
            if loss.config in comparable
            and busy.isdisjoint({(loss.config, CHOSEN), (loss.config, loss.best)})
        ]

    def sound_winners(self) -> list[Winner]:
        """Return the winners with a usable time on comparable configs."""
        return _sound_winners(self.winners, self.figures(), self.comparable())

    def figures(self) -> list[BenchRow]:
        """Return the ranking rows that have a median.

        Texts such as `2 of 9 figures` count these rows.
        """
        return [row for row in self.ranking_rows() if row.median_ns is not None]

    def drawn(self) -> list[BenchRow]:
        """Return the figures that charts show.

        Times that cannot be used are left out. `all-disabled` is left out because it is not ranked,
        and a second mark for cudnn could seem to be the fastest.
        """
        return [
            row
            for row in self.figures()
            if not row.busy and (row.regret is not None or not row.ranked)
        ]


def _backends_of(cells: Iterable[CellRow]) -> dict[tuple[str, str], str | None]:
    return {(cell.config, cell.backend): backend_of_cell(cell) for cell in cells}


def _comparable(figures: Sequence[BenchRow], ran: Ran) -> set[str]:
    usable: dict[str, set[str]] = {}
    busy = set()
    for row in figures:
        if row.ranked and row.busy:
            busy.add(row.config)
        elif row.ranked:
            name = ran.get((row.config, row.backend)) or row.backend
            usable.setdefault(row.config, set()).add(name)
    return {config for config, names in usable.items() if config not in busy or len(names) > 1}


def _sound_winners(
    winners: Sequence[Winner], figures: Sequence[BenchRow], comparable: Set[str]
) -> list[Winner]:
    busy = {(row.config, row.backend) for row in figures if row.busy}
    return [
        winner
        for winner in winners
        if winner.config in comparable and (winner.config, winner.backend) not in busy
    ]


def check_convention(name: str) -> None:
    """Raise UsageError if the convention for counting FLOPs is unknown."""
    if name not in CONVENTIONS:
        raise UsageError(f"unknown FLOP convention {name!r}; choose from {', '.join(CONVENTIONS)}")


def evaluate_bench(
    store: Store,
    run: str | None = None,
    *,
    convention: str = "exact",
    baseline: Baseline | None = None,
    precision: float | None = None,
    configs: Sequence[Config] | None = None,
    backends: Sequence[str] | None = None,
    rank_by: Sequence[str] | None = None,
) -> BenchResult:
    """Evaluate a stored run, or the latest run if `run` is None.

    `precision` and `rank_by` default to the values that are stored with the run. Raise
    NotFoundError for a missing run, config or backend, and UsageError for an unknown convention.
    """
    name = store.find_run(Selection(run), *TIMED)
    store.require_cells(name)
    check_convention(convention)
    plan = store.bench_plan(name)
    precision = plan.get("precision", PRECISION) if precision is None else precision
    rank_by = plan.get("measurements", MEASUREMENTS) if rank_by is None else rank_by
    cells = run_cells(store, name, configs, backends, baseline)
    samples = all_samples(store, name, cells)
    ran = _backends_of(cells)
    rows = bench_rows(store, name, cells, samples, convention, precision, baseline, ran)
    held = {row.measurement for row in rows}
    ranking = next((name for name in (*rank_by, *MEASUREMENTS) if name in held), MEASUREMENTS[0])

    def samples_of(row: BenchRow) -> tuple[int, ...]:
        return samples[row.config, row.backend][ranking]

    figures = [row for row in rows if row.measurement == ranking]
    winners, losses = [], []
    for label in dict.fromkeys(row.config for row in figures):
        alike = [row for row in figures if row.config == label and row.ranked]
        winners += [_winner(alike, samples_of, ran)] if alike else []
        if loss := _loss(alike, ran, samples_of):
            losses.append(loss)
    losses.sort(key=lambda loss: -loss.regret)
    sound = [row for row in figures if not row.busy]
    won = _sound_winners(winners, figures, _comparable(figures, ran))
    return BenchResult(
        run=name,
        name=store.run_name(name),
        rows=tuple(rows),
        cells=tuple(cells),
        ranking=ranking,
        convention=convention,
        precision=precision,
        peaks=store.peaks(name),
        environment=store.environment(name),
        winners=tuple(winners),
        losses=tuple(losses),
        conclusions=tuple(_conclude(sound, won, samples_of, ran, baseline)),
        samples=samples,
        times_of_auto=times_of_auto(cells, store.kernels(name)),
        created=next(row.created for row in store.runs() if row.run == name),
        protocol=store.protocol(name),
        baseline=baseline,
        sweeps=sweeps(sound, samples_of, ran),
        dtypes=dtype_pairs(sound, samples_of),
    )


_ONE = "one"  # both rows are measurements of one backend
_BUSY = "busy"  # the machine was too busy to compare the rows


def _verdict(base: BenchRow, row: BenchRow, samples_of: SamplesOf, ran: Ran) -> str:
    """Return the verdict of `stats.compare` on a row, or `_ONE` if both rows ran the same backend."""
    actual = ran.get((row.config, row.backend))
    if actual is not None and actual == ran.get((base.config, base.backend)):
        return _ONE
    return stats.compare(samples_of(base), samples_of(row)).verdict


def _winner(alike: Sequence[BenchRow], samples_of: SamplesOf, ran: Ran) -> Winner:
    named = {row.backend: row for row in alike}
    named = {name: named[name] for name in contenders(named)}
    choice = ran.get((alike[0].config, CHOSEN))
    best = _best([named[name] for name in without_choice(named, choice)])
    rows: dict[str, list[BenchRow]] = {}
    for row in named.values():
        if row is not best:
            verdict = _verdict(best, row, samples_of, ran)
            rows.setdefault(_BUSY if row.busy and verdict != _ONE else verdict, []).append(row)
    one, tied, unknown, busy = (
        rows.get(verdict, []) for verdict in (_ONE, "same", "unknown", _BUSY)
    )
    took = ran.get((best.config, best.backend))
    return Winner(
        config=best.config,
        backend=best.backend,
        median_ns=float(best.median_ns or 0),
        ties=tuple(row.backend for row in alike if row in (*one, *tied)),
        code=selecting(best),
        open=tuple(row.backend for row in unknown),
        why_open=" or ".join(dict.fromkeys(_why_open(best, row) for row in unknown)),
        ran=took,
        same=tuple(row.backend for row in one),
        rivals=tuple(
            dict.fromkeys(
                ran.get((row.config, row.backend)) or row.backend for row in (*tied, *unknown)
            )
        ),
        busy=tuple(row.backend for row in busy),
    )


def _loss(alike: Sequence[BenchRow], ran: Ran, samples_of: SamplesOf) -> Loss | None:
    """Return the loss of `auto` on one config. Return None unless `auto` and another backend were
    timed.
    """
    chosen = next((row for row in alike if row.backend == CHOSEN), None)
    others = [row for row in alike if row.backend not in OWN_CHOICE]
    if chosen is None or not others:
        return None
    best = _best(others)
    choice, best_ran = ran[chosen.config, CHOSEN], ran[best.config, best.backend]
    chosen_ns, best_ns = float(chosen.median_ns or 0), float(best.median_ns or 0)
    speed = stats.compare(samples_of(best), samples_of(chosen)).verdict
    return Loss(
        config=chosen.config,
        choice=choice,
        chosen_ns=chosen_ns,
        best=best.backend,
        best_ns=best_ns,
        regret=max(0.0, chosen_ns / best_ns - 1) if best_ns else 0.0,
        real=_verdict(best, chosen, samples_of, ran) == "slower",
        code=selecting(best),
        verdict=speed,
        why_open=_why_open(best, chosen) if speed == "unknown" else "",
        best_ran=best_ran,
    )


def _best(rows: Sequence[BenchRow]) -> BenchRow:
    return min(rows, key=lambda row: row.median_ns or float("inf"))


def selecting(row: BenchRow) -> str:
    """Return Python code that computes the row's config on the row's backend."""
    config = parse_config(row.config)
    if row.backend == CHOSEN:
        return call_code(config, config)
    if sdpa_setting(row.backend) is not None:
        return call_code(config, config, row.backend)
    return (
        f"# {row.backend} is not a backend of scaled_dot_product_attention;\n"
        "# call it directly, with q, k, v in the layout\n"
        "# [batch, heads, seq_len, head_dim]"
    )


SHOWN_WINNERS = 3
WITHIN = percent(stats.THRESHOLD)
_WORDS: dict[str, str] = {
    "faster": "faster",
    "slower": "slower",
    "same": f"as fast (within {WITHIN})",
    "unknown": "not significantly different",
    _ONE: "the same backend",
}


def _why_open(left: BenchRow, right: BenchRow) -> str:
    if min(left.samples, right.samples) < stats.MIN_SAMPLES:
        return "too few samples"
    several = min(left.processes or 0, right.processes or 0) > 1
    return (
        "the samples overlap, or the medians of the processes overlap"
        if several
        else "the samples overlap"
    )


def _conclude(
    figures: Sequence[BenchRow],
    winners: Sequence[Winner],
    samples_of: SamplesOf,
    ran: Ran,
    baseline: Baseline | None,
) -> Iterator[str]:
    """Yield sentences that compare the ranking rows."""
    ranked = [row for row in figures if row.ranked]
    undecided = [winner for winner in winners if winner.rivals]
    # The answer of `bench` counts the configs without a single fastest backend.
    for winner in undecided if len(undecided) <= SHOWN_WINNERS else ():
        text = f"{winner.config}: {winner.between} ({winner.why_open or f'within {WITHIN}'})"
        yield f"{text}; {winner.not_comparable}" if winner.busy else text
    if isinstance(baseline, str):
        yield from _against_backend(ranked, baseline, samples_of, ran)
    else:
        yield from _against_plain(ranked, samples_of, ran)
    lost = [row for row in ranked if row.speedup is None]
    if baseline is not None and lost:
        where = " for their config" if isinstance(baseline, str) else ""
        number = f"{len(lost)} of {counted(len(ranked), 'figure')}"
        yield f"no speed-up for {number}, because the baseline {baseline} has no time{where}"
    wrong = [f"{row.config} {row.backend}" for row in figures if row.verified is False]
    if wrong:
        yield f"not ranked because of wrong output: {', '.join(wrong)}"
    if isinstance(baseline, Config):
        yield (
            "speed-ups over another config are ratios of latencies; if the configs need different "
            "numbers of FLOPs, compare FLOP/s"
        )


def _against_plain(ranked: Sequence[BenchRow], samples_of: SamplesOf, ran: Ran) -> Iterator[str]:
    by_cell = {(row.config, row.backend): row for row in ranked}
    slower: dict[str, list[BenchRow]] = {}
    for row in ranked:
        if row.backend != CHOSEN or row.baseline not in REFERENCES or not row.speedup:
            continue
        plain = by_cell.get((row.config, str(row.baseline)))
        if plain is None:  # the machine was too busy to time it
            continue
        verdict = _verdict(plain, row, samples_of, ran)
        if verdict == "slower":
            slower.setdefault(str(row.baseline), []).append(row)
        elif verdict == "unknown" and row.speedup < 1:
            yield (
                f"{row.config}: the median of auto is {ratio_text(1 / row.speedup)} the median "
                f"of {row.baseline}, but the difference is not significant: {_why_open(plain, row)}"
            )
    for baseline, rows in slower.items():
        worst = min(rows, key=lambda row: row.speedup or 1)
        most = f"auto takes {as_long(1 / (worst.speedup or 1))} as {baseline} on {worst.config}"
        others = ""
        if len(rows) > 1:
            others = f", and is slower on {counted(len(rows) - 1, 'other config')}"
        yield f"{most}{others}"


def _against_backend(
    ranked: Sequence[BenchRow], baseline: str, samples_of: SamplesOf, ran: Ran
) -> Iterator[str]:
    plain = {row.config: row for row in ranked if row.backend == baseline}
    for backend in dict.fromkeys(row.backend for row in ranked if row.backend != baseline):
        verdicts: dict[str, list[BenchRow]] = {}
        own = [row for row in ranked if row.backend == backend and row.config in plain]
        for row in own:
            base = plain[row.config]
            verdicts.setdefault(_verdict(base, row, samples_of, ran), []).append(row)
        parts = []
        for verdict, words in _WORDS.items():
            if not (rows := verdicts.get(verdict)):
                continue
            most = ""
            if verdict in ("faster", "slower"):
                extreme = max(rows, key=lambda row: abs(math.log(row.speedup or 1)))
                ratio = by_how_much(extreme.speedup or 1)
                most = f" ({'up to ' if len(rows) > 1 else ''}{ratio}, {extreme.config})"
            parts.append(f"{words} on {len(rows)}{most}")
        if parts:
            where = counted(len(own), "config")
            yield f"compared with {baseline} on {where}, {backend} is {', '.join(parts)}"
