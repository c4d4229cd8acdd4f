"""Compute the time that a program would save if its attention ran on the fastest correct backends.

The times come from a benchmark of the program's configs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from profharness import stats
from profharness.attention.backends.serving import SERVING_BACKENDS
from profharness.attention.config import (
    OWN_CHOICE,
    SDP_BACKENDS,
    SDPA_BACKENDS,
    Config,
    parse_config,
)
from profharness.attention.dispatch.advice import Advice
from profharness.errors import NotFoundError, percent
from profharness.measurements.agreement import backend_that_ran
from profharness.measurements.evaluation import BenchResult
from profharness.program.layer_map import (
    LayerMap,
    LayerRow,
    Regret,
    StepGroup,
    StepTimes,
    suggestions,
)
from profharness.program.phases import PhaseRow, in_phase
from profharness.rows import COLD, KERNEL
from profharness.units import by_how_much, time_text

# measurements of a benchmark; the first one that is available ranks the backends
MEASUREMENTS = KERNEL, COLD
Points = Sequence[tuple[str, float]]
# if the GPU is busy for less than this share of a step, the program counts as launch-bound
LAUNCH_BOUND = 0.9
# A warning is reported if the times of a call in the trace and in the benchmark differ by more than
# this factor.
UNLIKE = 1.5


class Saved(NamedTuple):
    """The time that the fastest correct backends save per step, as in `Regret`."""

    saves_ns: float
    saves_forward_ns: float | None
    saves_backward_ns: float | None


class BenchTimes:
    """The samples of a benchmark by config and backend, without cells with wrong output.

    Points are pairs of a config label and a number of calls.
    """

    def __init__(self, benched: BenchResult) -> None:
        self.samples = {
            (row.config, row.backend): benched.samples[row.config, row.backend][benched.ranking]
            for row in benched.figures()
            if row.ranked
        }

    def median(self, label: str, backend: str) -> float | None:
        """Return the median time of a call in ns, or None if the call was not timed."""
        values = self.samples.get((label, backend))
        return stats.summarize(values).median if values else None

    def total(self, points: Points, backend: str) -> float | None:
        """Return the time of all calls in ns, or None if one of the configs was not timed."""
        whole = 0.0
        for label, weight in points:
            ns = self.median(label, backend)
            if ns is None:
                return None
            whole += ns * weight
        return whole

    def fastest(self, points: Points) -> str | None:
        """Return the fastest backend that was timed on all points, or None if there is none.

        Backends that let PyTorch choose, such as `auto`, are ignored.
        """
        labels = {label for label, _ in points}
        timed = Counter(backend for label, backend in self.samples if label in labels)
        everywhere = sorted(name for name, count in timed.items() if count == len(labels))
        times = {
            name: self.total(points, name) or 0 for name in everywhere if name not in OWN_CHOICE
        }
        return min(times, key=lambda name: times[name], default=None)

    def verdict(self, points: Points, backend: str, than: str) -> stats.Speed:
        """Return `slower` if `backend` is slower than `than` on at least one point.

        Otherwise, return `unknown` if at least one comparison is `unknown`, and `same` if not.
        """
        verdicts = {
            stats.compare(self.samples[label, than], self.samples[label, backend]).verdict
            for label, _ in points
        }
        return "slower" if "slower" in verdicts else "unknown" if "unknown" in verdicts else "same"


def regret_configs(layers: LayerMap) -> list[Config]:
    """Return the configs to time, with and without the backward pass.

    The result contains the configs of calls that can be replayed, and the configs after changes that
    the rules suggest. Raise NotFoundError if there are no such configs.
    """
    configs: dict[Config, None] = {}
    for row in layers.rows:
        if not _timeable(row):
            continue
        labels = [label for label, _ in row.points]
        labels += [str(change.config) for _, change in _changes(row, layers)]
        for config in map(parse_config, labels):
            configs[config] = None
            # the savings in the backward pass are the total minus the savings in the forward pass
            configs[replace(config, bwd=False)] = None
    for phase in layers.phases:
        configs |= {parse_config(label): None for label, _ in phase.points}
    if not configs:
        reasons = dict.fromkeys(text for row in layers.rows for text in row.reasons)
        raise NotFoundError(
            f"no config replays a call of run {layers.name}, so nothing can be timed: "
            f"{'; '.join(reasons) or 'the backend is unknown'}"
        )
    return list(configs)


def timed_configs(layers: LayerMap) -> list[Config]:
    """Return the configs that a benchmark of the layers must time.

    If no step was recorded, return the configs of the whole program. Raise NotFoundError if there
    are no configs to time.
    """
    labels = dict.fromkeys(label for row in layers.rows for label, _ in row.program_points)
    if labels and all(row.calls is None for row in layers.rows):
        return list(map(parse_config, labels))
    return regret_configs(layers)


def regret_backends(layers: LayerMap) -> list[str]:
    """Return the backends that ran, which must be timed even if the user does not request them."""
    return list(dict.fromkeys(str(row.ran) for row in layers.rows if _timeable(row)))


def phase_backends(layers: LayerMap) -> list[str]:
    """Return the backends that read a paged cache, if the program is an engine with known shapes."""
    names = [backend.name for backend in SERVING_BACKENDS]
    return names if any(phase.points for phase in layers.phases) else []


def _timeable(row: LayerRow) -> bool:
    return row.replayable and row.ran in SDPA_BACKENDS and bool(row.points)


def _median(row: LayerRow) -> Config:
    """Return the config of median length. Drop the backward pass of a recomputed call."""
    config = parse_config(str(row.config))
    return replace(config, bwd=False) if row.direction == "recompute" else config


def _changes(row: LayerRow, layers: LayerMap) -> list[tuple[str, Advice]]:
    """Return the changes after which other backends support a row that ran on math.

    Changes that no config can express are left out.
    """
    if row.ran != "math" or row.config is None or layers.platform is None:
        return []
    changes = suggestions(_median(row), layers.platform)
    return [(backend, change) for backend, change in changes if change and change.config]


def regret_map(layers: LayerMap, benched: BenchResult) -> LayerMap:
    """Return the layer map with the savings of each row per step.

    Raise NotFoundError if the benchmark ran on another device, or contains no times for any row.
    """
    gpu = benched.gpu
    if gpu != layers.gpu:
        raise NotFoundError(
            f"run {benched.name} was timed on {gpu or 'a CPU'}, but run {layers.name} comes from "
            f"{layers.gpu or 'a CPU'}; time the configs on {layers.gpu or 'a CPU'} with "
            "`profharness layers --savings`, or compare benchmarks of several GPUs with "
            "--bench RUN,RUN"
        )
    times = BenchTimes(benched)
    rows = [_with_best(row, layers, benched, times) for row in layers.rows]
    timed = [row for row in rows if row.saves_ns is not None]
    phases = tuple(_faster_phase(phase, times) for phase in layers.phases)
    if not timed and any(phase.fastest for phase in phases):
        return replace(layers, phases=phases, benched=benched.name)
    if not timed:
        configs = ", ".join(label for row in rows if _timeable(row) for label, _ in row.points)
        raise NotFoundError(
            f"run {benched.name} contains no times of the backends that ran in run {layers.name}: "
            f"{configs or 'no replayable config'} on {', '.join(regret_backends(layers))}"
        )
    layers = replace(layers, rows=tuple(rows), phases=phases, benched=benched.name)
    saves, forward, backward = saved(layers)
    untimed = [row for row in rows if row.saves_ns is None]
    regret = Regret(
        run=benched.run,
        measurement=benched.ranking,
        gpu=layers.gpu,
        saves_ns=saves,
        saves_forward_ns=forward,
        saves_backward_ns=backward,
        timed_calls=layers.mean((row, row.calls) for row in timed),
        untimed_calls=layers.mean((row, row.calls) for row in untimed),
        launch_bound=is_launch_bound(layers, layers.gpu),
        conclusions=(*_conclusions(layers), *_doubts(rows, benched, times)),
    )
    return replace(layers, regret=regret)


def saved(times: StepTimes) -> Saved:
    """Return the time that the fastest backends of the rows save per step."""
    timed = [row for row in times.rows if row.saves_ns is not None]
    saves = times.mean((row, row.saves_ns) for row in timed)
    apart = [(row, row.saves_forward_ns) for row in timed if row.saves_forward_ns is not None]
    forward = times.mean(apart) if len(apart) == len(timed) else None
    trained = any(row.saves_backward_ns is not None for row in timed)
    return Saved(saves, forward, saves - forward if trained and forward is not None else None)


def _faster_phase(phase: PhaseRow, times: BenchTimes) -> PhaseRow:
    """Add the fastest backend of the benchmark and its saving per step to a phase.

    The saving is the time of attention in the trace minus the time in the benchmark. If the benchmark
    is not faster, the saving is 0.
    """
    best = times.fastest(phase.points) if phase.points else None
    spent = times.total(phase.points, best) if best else None
    if best is None or spent is None:
        return phase
    saves = max(0.0, phase.attention_ns - spent)
    return replace(
        phase,
        fastest=best,
        fastest_ns=spent,
        saves_ns=saves,
        fastest_tokens_per_s=_faster_rate(phase.tokens_per_s, phase.mean_ns, saves),
        # The saving is a mean, so it shortens the median step by the same share as the mean step.
        fastest_median_step_tokens_per_s=_faster_rate(
            phase.median_step_tokens_per_s, phase.mean_ns, saves
        ),
    )


def _faster_rate(rate: float | None, step_ns: float, saves_ns: float) -> float | None:
    """Return a rate that refers to steps of `step_ns`, after each of them takes `saves_ns` less."""
    after = step_ns - saves_ns
    return rate * step_ns / after if rate and after > 0 else None


def is_launch_bound(times: StepTimes, gpu: str | None) -> bool:
    """Return whether faster kernels may not shorten a step, because the GPU is often idle.

    `gpu` is the name of the GPU, or None for a CPU.
    """
    return gpu is not None and times.busy_ns < LAUNCH_BOUND * times.step_ns


def _with_best(
    row: LayerRow, layers: LayerMap, benched: BenchResult, times: BenchTimes
) -> LayerRow:
    """Add the best backend to a row.

    The best backend is the backend that ran, unless the samples show that another one is faster.
    """
    if not _timeable(row):
        return row
    calls, actual = sum(weight for _, weight in row.points), str(row.ran)
    spent = times.total(row.points, actual)
    if spent is None or not calls:
        return row
    best = times.fastest(row.points)
    # a lower median alone may be noise
    if best is None or times.verdict(row.points, actual, than=best) != "slower":
        best = actual
    least = times.total(row.points, best) or 0.0
    saves = spent - least
    twins = [(replace(parse_config(label), bwd=False).label, part) for label, part in row.points]
    before, after = (times.total(twins, backend) for backend in (actual, best))
    forward = None if before is None or after is None else before - after
    trained = any(parse_config(label).bwd for label, _ in row.points)
    judged = replace(
        row,
        best=best,
        ran_ns=spent / calls,
        best_ns=least / calls,
        saves_ns=saves,
        saves_forward_ns=forward,
        saves_backward_ns=saves - forward if trained and forward is not None else None,
    )
    advice = [_switch(judged, layers, benched)] if best != actual else []
    return replace(judged, advice=(*advice, *_gains(judged, layers, times)))


def _switch(row: LayerRow, layers: LayerMap, benched: BenchResult) -> str:
    chosen = {
        backend_that_ran(cell)
        for cell in benched.cells
        if cell.backend == OWN_CHOICE[0] and cell.config == row.points[0][0]
    }
    if row.best in chosen:
        how = f"leave the choice to PyTorch, which then chooses {row.best}"
    elif row.best in SDP_BACKENDS:
        how = f"use sdpa_kernel(SDPBackend.{SDP_BACKENDS[row.best]})"
    else:
        how = f"call {row.best} instead"
    speed = (row.ran_ns or 0) / row.best_ns if row.best_ns else 0
    return f"{how}: {by_how_much(speed)}, {_saves(row, layers)} {_saved_text(row)} per {_step(row)}"


def _gains(row: LayerRow, layers: LayerMap, times: BenchTimes) -> list[str]:
    """Return the advice on a row. Add the measured gain to each change that was timed."""
    calls = sum(weight for _, weight in row.points)
    result = {text: text for text in row.advice}
    for backend, change in _changes(row, layers):
        text = f"{backend}: {change.change}"
        before = times.median(_median(row).label, "math")
        after = times.median(str(change.config), backend)
        if before and after and text in result:
            saved_time = time_text((before - after) * calls)
            saves = f", {_saves(row, layers)} {saved_time} per {_step(row)}"
            gain = f"{by_how_much(before / after)}{saves if after < before else ''}"
            result[text] = f"{text} ({gain})"
    return list(result.values())


def _saves(row: LayerRow, layers: LayerMap) -> str:
    launch_bound = is_launch_bound(layers.of_phase(row.step_phase), layers.gpu)
    return "saves at most" if launch_bound else "saves"


def _step(row: LayerRow) -> str:
    return f"{row.step_phase} step" if row.step_phase else "step"


def _saved_text(figures: LayerRow | Saved) -> str:
    text = time_text(figures.saves_ns or 0.0)
    forward, backward = figures.saves_forward_ns, figures.saves_backward_ns
    if forward is None or backward is None:
        return text
    return f"{text} ({time_text(forward)} forward, {time_text(backward)} backward)"


def _conclusions(layers: LayerMap) -> list[str]:
    timed = [row for row in layers.rows if row.saves_ns is not None]
    if saved(layers).saves_ns <= 0:
        texts = [
            "No backend with correct output is significantly faster than the backend that ran."
        ]
    else:
        phases = {row.step_phase for row in timed if row.saves_ns}
        texts = [
            in_phase(group.phase, text)
            for group in layers.groups
            if group.phase in phases
            for text in _of_steps(group, layers.gpu)
        ]
    if layers.gpu_step_ns:
        texts.append(
            "The profiler lengthens the traced step. The step time without a profiler is unknown."
        )
    return texts


def _of_steps(steps: StepGroup, gpu: str | None) -> Iterator[str]:
    step, busy = steps.gpu_step_ns, steps.gpu_ns
    saves = saved(steps)
    shares = (
        [f"{percent(saves.saves_ns / busy, 1)} of the time in which the GPU is busy"]
        if busy
        else []
    )
    shares += [f"{percent(saves.saves_ns / step, 1)} of the traced step"] if step else []
    parts = f", {' and '.join(shares)}" if shares else ""
    if not is_launch_bound(steps, gpu):
        yield f"The fastest correct backends save {_saved_text(saves)} per step{parts}."
        return
    waits = "The trace has no kernels, so it is unknown how busy the GPU is."
    if busy:
        waits = (
            f"The GPU is busy for only {percent(steps.busy_ns / steps.step_ns)} of the traced step."
        )
    yield (
        f"{waits} Faster kernels save time only while the GPU is busy: at most "
        f"{_saved_text(saves)} per step{parts}."
    )


def _doubts(rows: Sequence[LayerRow], benched: BenchResult, times: BenchTimes) -> list[str]:
    texts = []
    for row in rows:
        name = row.module or row.config or row.kind
        if row.calls is None:
            texts.append(
                f"The calls of {name} were not timed, because they do not belong to any recorded "
                "step."
            )
            continue
        if row.saves_ns is None:
            why = "no config fully describes the calls"
            if row.replayable:
                why = (
                    f"run {benched.name} has no times for these calls on {row.ran} with correct "
                    "output"
                )
            texts.append(
                f"There are no times for {row.calls:g} calls of {name} per {_step(row)}, "
                f"because {why}."
            )
            continue
        fastest = times.fastest(row.points)
        if fastest and times.verdict(row.points, str(row.ran), than=fastest) == "unknown":
            texts.append(
                f"{name}: no significant difference between {row.ran} and {fastest}, which has the "
                "lower median; measure longer"
            )
        seen = row.kernel_ns
        alone = (row.ran_ns or 0) * row.calls
        if seen and alone and not 1 / UNLIKE <= seen / alone <= UNLIKE:
            texts.append(
                f"{name}: {row.ran} takes {time_text(seen / row.calls)} per call in the trace, but "
                f"{time_text(alone / row.calls)} in run {benched.name} ({benched.ranking})"
            )
    return [*texts, *bench_doubts(benched)]


def bench_doubts(benched: BenchResult) -> list[str]:
    """Return warnings about unreliable times in a benchmark, and about cells that are left out."""
    texts = []
    # `wall` is measured on a CPU, which launches no kernels
    if benched.ranking not in ("kernel", "wall"):
        texts.append(
            f"run {benched.name} has no kernel times; its {benched.ranking} times include the "
            "launch cost"
        )
    wrong = {f"{row.config} {row.backend}" for row in benched.figures() if row.verified is False}
    if wrong:
        texts.append(f"excluded because of wrong output: {', '.join(sorted(wrong))}")
    return texts
