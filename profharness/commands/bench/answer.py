"""Summarize the evaluation of `bench` in a few sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from profharness.attention.config import ALL_DISABLED, AUTO, pytorch_chooses, sdpa_setting
from profharness.attention.dispatch.advice import setting_code
from profharness.commands._answers import refused_and_failed, split_text
from profharness.device_types import device_name
from profharness.errors import counted, join_and
from profharness.measurements.evaluation import BenchResult, Loss
from profharness.measurements.measurements import BenchRow, basis_text
from profharness.rows import COLD, EAGER, GRAPH, KERNEL
from profharness.stats import NOTABLE_LOSS
from profharness.units import as_long, share_text, time_text

TRUST = {
    EAGER: "For programs without CUDA graphs, use the eager time, which includes the launch cost.",
    GRAPH: "For CUDA-graph replays, use the graph time, which is measured with warm caches and "
    "excludes the launch cost.",
    COLD: "For a call that runs between other layers of a model, use the cold time, which is "
    "measured with flushed caches.",
    KERNEL: "To compare kernels, use the kernel time, which is measured with warm caches and "
    "excludes the launch cost.",
}
"""Maps each measurement to a sentence on what to use it for."""


def bench_answer(answer: BenchResult) -> tuple[str, ...]:
    """Return sentences on how `auto` compares with the fastest backend, and how that was measured.

    If `auto` was not compared, the first sentence names the fastest backends.
    """
    figures = answer.figures()
    if not figures:
        several = len({cell.config for cell in answer.cells}) > 1
        return ("No cell was timed.", *refused_and_failed(answer.cells, several=several))
    losses = answer.sound_losses()
    if all(row.busy for row in figures):
        return (_measurement(answer), *_problems(figures))
    verdict = _of_auto(answer, losses) if losses else _of_winners(answer)
    return (verdict, _measurement(answer), *_problems(figures))


def _of_auto(answer: BenchResult, losses: Sequence[Loss]) -> str:
    much, total = share_text(NOTABLE_LOSS), len(losses)
    notable = [loss for loss in losses if loss.regret > NOTABLE_LOSS and not loss.same_backend]
    real = [loss for loss in notable if loss.real]
    found = real or [loss for loss in notable if loss.open]
    if not found:
        noise = max((loss.regret for loss in losses if loss.same_backend), default=0)
        if total > 1 and noise > NOTABLE_LOSS:
            return (
                f"auto runs the fastest backend, or one within {much} of it, on {_all(total)}; two "
                f"measurements of the same backend differ by up to {share_text(noise)}. "
                f"{_of_winners(answer)}"
            )
        if total > 1:
            return f"auto is within {much} of the fastest backend on {_all(total)}. {_of_winners(answer)}"
        return _good_choice(answer, losses[0])
    worst, may = found[0], "" if real else "may "
    times = f"{_time(worst.chosen_ns, worst.choice)} against {_time(worst.best_ns, worst.best)}"
    where = _all(total) if len(found) == total else f"{len(found)} of {total} configs"
    lead = f"auto {may}{'take' if may else 'takes'} {as_long(1 + worst.regret)}: {times}"
    if total > 1:
        lead = (
            f"On {where}, auto {may}{'take' if may else 'takes'} more than "
            f"{as_long(1 + NOTABLE_LOSS, 'the fastest backend')}. The worst case is "
            f"{worst.config}, where auto {may}{'take' if may else 'takes'} {as_long(1 + worst.regret)} ({times})"
        )
    if not real:
        return f"{lead}. The difference is not significant: {worst.why_open}."
    return f"{lead}. {_instead(worst.best)}"


def _good_choice(answer: BenchResult, loss: Loss) -> str:
    """Return the fastest backend of a single config on which `auto` is about as fast."""
    lead = _of_winners(answer)
    if loss.same_backend and loss.regret > NOTABLE_LOSS:
        return (
            f"{lead} auto runs {loss.best} too, but takes {time_text(loss.chosen_ns)}, so the times "
            f"vary by {share_text(loss.regret)}."
        )
    if any(each.backend == AUTO for each in answer.winners if each.config == loss.config):
        return lead
    if loss.same_backend:
        return f"{lead} auto runs {loss.best}."
    chosen = _time(loss.chosen_ns, loss.choice)
    return f"{lead} auto takes {chosen}, within {share_text(NOTABLE_LOSS)} of that."


def _all(count: int) -> str:
    return "both configs" if count == 2 else f"all {count} configs"


def _time(ns: float, backend: str | None) -> str:
    return f"{time_text(ns)} on {backend}" if backend else time_text(ns)


def _instead(backend: str) -> str:
    setting = sdpa_setting(backend)
    if setting is None:
        return f"Call {backend} itself instead."
    return f"Use {setting_code(setting)}; see the code below."


def _of_winners(answer: BenchResult) -> str:
    """Return a sentence on the fastest backends."""
    ranked = [row for row in answer.figures() if row.ranked and not row.busy]
    if not answer.winners:
        return "No backend has a correct result, so none is ranked."
    winners = answer.sound_winners()
    if not winners:
        return "The fastest backend is unknown."
    if len({row.backend for row in ranked}) == 1:
        return _of_one_backend(ranked)
    choices = {loss.config: loss.choice or AUTO for loss in answer.losses}
    if len(winners) > 1:
        counts = Counter(
            choices[each.config] if each.backend == AUTO else each.backend for each in winners
        )
        first = counts.most_common(1)[0][0]
        return f"{first} is the fastest{split_text(counts).removeprefix(first)}."
    (winner,) = winners
    name, choice = winner.backend, choices.get(winner.config)
    # auto and the backend that it runs are one backend, and all-disabled is not a backend to choose.
    same = {ALL_DISABLED, *((AUTO, choice) if name in (AUTO, choice) else (name,))}
    ties, unclear = (
        [each for each in names if each not in same] for names in (winner.ties, winner.open)
    )
    if name == AUTO and choice != AUTO:
        name = f"auto, which runs {choice},"
    time = time_text(winner.median_ns)
    if unclear:
        lead = (
            f"{name} has the lowest median, {time}, but is not significantly faster than "
            f"{join_and(unclear)}"
        )
    else:
        lead = f"{name} is the fastest: {time}" + (
            f", and {join_and(ties)} as fast" if ties else ""
        )
    slowest = max(ranked, key=lambda row: row.median_ns or 0)
    if slowest.backend in (*same, *ties, *unclear) or pytorch_chooses(slowest.backend):
        return f"{lead}."
    return (
        f"{lead}; {slowest.backend} takes {as_long((slowest.median_ns or 0) / winner.median_ns)}."
    )


def _of_one_backend(rows: Sequence[BenchRow]) -> str:
    low, high = (find(rows, key=lambda row: row.median_ns or 0) for find in (min, max))
    text = f"{low.backend} takes {time_text(low.median_ns or 0)}"
    if low is high:
        return f"{text} on {low.config}."
    return f"{text} ({low.config}) to {time_text(high.median_ns or 0)} ({high.config})."


def _measurement(answer: BenchResult) -> str:
    """Return a sentence on what was measured, how often and where."""
    counts = [row.samples for row in answer.figures()]
    least, most = min(counts), max(counts)
    number = f"{least}" if least == most else f"{least} to {most}"
    what = basis_text(answer.ranking, conditions=True)
    environment = answer.environment
    torch = str(environment.get("torch") or "unknown").split("+")[0]
    device = device_name(environment) or "an unknown device"
    return f"Medians of {number} {what} on {device} with PyTorch {torch}."


def _problems(figures: Sequence[BenchRow]) -> Iterator[str]:
    """Yield sentences on wrong results and on a busy machine."""
    wrong = Counter(row.backend for row in figures if row.verified is False)
    if wrong:
        parts = [f"{name} on {counted(n, 'config')}" for name, n in wrong.items()]
        yield f"The ranking excludes the wrong results of {join_and(parts)}."
    busy = sum(row.busy for row in figures)
    if busy:
        yield (
            f"The machine was busy, so {busy} of {counted(len(figures), 'time')} cannot be used. "
            "Repeat the benchmark when nothing else is running."
        )


def trust_note(measurements: Sequence[str]) -> str:
    """Return a legend that says what each of these measurements is good for."""
    return " ".join(text for name, text in TRUST.items() if name in measurements)
