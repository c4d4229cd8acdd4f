"""Summarize the evaluation of `bench` in a few sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from profharness.attention.config import AUTO, pytorch_chooses, sdpa_setting
from profharness.attention.dispatch.advice import setting_code
from profharness.commands._answers import refused_and_failed, split_text
from profharness.device_types import CPU, device_name
from profharness.devices import pytorch_text, with_article
from profharness.errors import counted, join_and, percent
from profharness.measurements.evaluation import BenchResult, Loss, Winner
from profharness.measurements.measurements import BenchRow, basis_text
from profharness.rows import COLD, EAGER, EVENT, GRAPH, KERNEL
from profharness.stats import NOTABLE_LOSS, THRESHOLD
from profharness.units import as_long, ratio_text, time_text

_COLD_CALLS = (
    "For a call that runs between other layers of a model, use the cold time, which is measured with "
    "flushed caches."
)
TRUST = {
    EAGER: "For programs without CUDA graphs, use the eager time, which includes the launch cost.",
    GRAPH: "For CUDA-graph replays, use the graph time, which is measured with warm caches and "
    "excludes the launch cost.",
    COLD: _COLD_CALLS,
    EVENT: _COLD_CALLS,  # has the title of COLD, too
    KERNEL: "To compare kernels, use the kernel time, which is measured with warm caches and "
    "excludes the launch cost.",
}
"""Maps each measurement to a sentence on what to use it for."""
WIDE_INTERVAL = 0.25
"""Sentences contain the half-width of an interval if it is at least this share of the median."""


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
    total = len(losses)
    notable = [loss for loss in losses if loss.regret > NOTABLE_LOSS and not loss.same_backend]
    real = [loss for loss in notable if loss.real]
    found = real or [loss for loss in notable if loss.open]
    if not found:
        winners = answer.sound_winners()
        if total == 1:
            return _good_choice(answer, losses[0])
        text = _of_winners(answer)
        if all(each.of_auto and not each.rivals for each in winners):
            return text
        return f"On {_all(total)}, auto takes at most {as_long(1 + NOTABLE_LOSS, 'the fastest backend')}. {text}"
    worst, may = found[0], "" if real else "may "
    rows = {(row.config, row.backend): row for row in answer.figures()}
    own, best = (_interval(rows[worst.config, name]) for name in (AUTO, worst.best))
    times = (
        f"{_time(worst.chosen_ns, worst.choice)}{own} against "
        f"{_time(worst.best_ns, worst.best)}{best}"
    )
    where = _all(total) if len(found) == total else f"{len(found)} of {total} configs"
    lead = f"auto {may}{'take' if may else 'takes'} {as_long(1 + worst.regret)}: {times}"
    if total > 1:
        lead = (
            f"On {where}, auto {may}{'take' if may else 'takes'} more than "
            f"{as_long(1 + NOTABLE_LOSS, 'the fastest backend')}. The worst case is "
            f"{worst.config}, where auto {may}{'take' if may else 'takes'} "
            f"{as_long(1 + worst.regret)}: {times}"
        )
    if not real:
        return f"{lead}. The difference is not significant: {worst.why_open}."
    return f"{lead}. {_instead(worst.best)}"


def _good_choice(answer: BenchResult, loss: Loss) -> str:
    """Return the fastest backend of a single config on which `auto` is about as fast."""
    lead = _of_winners(answer)
    if loss.same_backend or any(
        AUTO in (each.backend, *each.same) for each in answer.winners if each.config == loss.config
    ):
        return lead
    (own,) = (row for row in answer.figures() if (row.config, row.backend) == (loss.config, AUTO))
    chosen = f"{_time(loss.chosen_ns, loss.choice)}{_interval(own)}"
    return f"{lead} auto takes {as_long(1 + loss.regret)}: {chosen}."


def noise_of_auto(losses: Sequence[Loss]) -> Iterator[str]:
    """Yield a sentence if the times of `auto` and of the backend that it ran differ visibly."""
    same = [loss.regret for loss in losses if loss.same_backend]
    if max(same, default=0) <= THRESHOLD:
        return
    names = {loss.best for loss in losses if loss.same_backend}
    backend = names.pop() if len(names) == 1 else "the fastest backend"
    ran = f"auto ran the same kernels as {backend}, so the"
    ratio, noise = ratio_text(1 + max(same)), "noise between measurements"
    if len(losses) == 1:
        yield f"{ran} difference between their times ({ratio}) is {noise}."
        return
    some = f"{len(same)} of {counted(len(losses), 'config')}"
    where = _all(len(losses)) if len(same) == len(losses) else some
    yield f"On {where}, {ran} differences between their times (up to {ratio}) are {noise}."


def _all(count: int) -> str:
    return "both configs" if count == 2 else f"all {count} configs"


def _interval(row: BenchRow) -> str:
    """Return the half-width of a wide interval, such as ` (±95 %)`, or "" if it is not wide."""
    half = row.half or 0
    return f" (±{percent(half)})" if half >= WIDE_INTERVAL else ""


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
    ran = answer.ran()
    names = {ran.get((row.config, row.backend)) or row.backend for row in ranked}
    if len(names) == 1:
        return _of_one_backend(ranked, names.pop())
    if len(winners) > 1:
        return _of_several(answer, winners, any(row.backend == AUTO for row in ranked))
    (winner,) = winners
    fastest = next(
        row for row in ranked if (row.config, row.backend) == (winner.config, winner.backend)
    )
    time = f"{time_text(winner.median_ns)}{_interval(fastest)}"
    if winner.rivals:
        why = f" ({winner.why_open})" if winner.why_open else ""
        lead = f"{winner.subject} has the lowest median, {time}, but there is {winner.between}{why}"
    elif winner.of_auto:
        # The median is that of the backend's own row, which may differ from that of `auto`.
        lead = f"auto already runs the fastest available backend: {winner.name} takes {time}"
    else:
        lead = f"{winner.subject} is the fastest: {time}"
    if winner.busy:
        lead = f"{lead}; {winner.not_comparable}"
    slowest = max(ranked, key=lambda row: row.median_ns or 0)
    known = (winner.backend, *winner.ties, *winner.open)
    if slowest.backend in known or pytorch_chooses(slowest.backend):
        return f"{lead}."
    ratio = as_long((slowest.median_ns or 0) / winner.median_ns)
    return f"{lead}; {slowest.backend} takes {ratio}{_interval(slowest)}."


def _of_several(answer: BenchResult, winners: Sequence[Winner], with_auto: bool) -> str:
    """Return sentences on the fastest backends of several configs, of which `winners` are known.

    A backend counts as the fastest of a config only if all others are significantly slower.
    """
    total = len(answer.winners)
    decided = [each for each in winners if not each.rivals]
    undecided = Counter(
        each.between.removeprefix("no significant difference ") for each in winners if each.rivals
    )
    texts = []
    if decided:
        counts = Counter(each.name for each in decided)
        split = split_text(counts, total)
        first = counts.most_common(1)[0][0]
        of_auto = sum(each.of_auto for each in decided)
        if of_auto < len(decided):
            lead = f"{first} is the fastest{split.removeprefix(first)}"
            also = f"; auto already runs the fastest on {of_auto}" if with_auto and of_auto else ""
            texts.append(f"{lead}{also}.")
        elif len(counts) > 1:
            texts.append(f"auto already runs the fastest available backend: {split}.")
        else:
            texts.append(f"auto already runs {first}, the fastest{split.removeprefix(first)}.")
    if undecided:
        text = split_text(undecided, total)
        texts.append(f"There is no significant difference {text}.")
    if busy := sum(bool(each.busy) or each not in winners for each in answer.winners):
        texts.append(f"On {counted(busy, 'config')}, some backends are not comparable.")
    return " ".join(texts)


def _of_one_backend(rows: Sequence[BenchRow], name: str) -> str:
    """Return a sentence on the times of the only backend that ran, which `auto` may have run."""
    own = [row for row in rows if row.backend == name] or rows
    low, high = (find(own, key=lambda row: row.median_ns or 0) for find in (min, max))
    chosen = name != AUTO and any(row.backend == AUTO for row in rows)
    subject = f"auto runs {name}, which" if chosen else name
    text = f"{subject} takes {time_text(low.median_ns or 0)}"
    if low is high:
        return f"{text} on {low.config}."
    return f"{text} ({low.config}) to {time_text(high.median_ns or 0)} ({high.config})."


def samples_text(figures: Sequence[BenchRow]) -> str:
    """Return the number of samples per figure, such as `584 to 2,526`."""
    counts = [row.samples for row in figures]
    return " to ".join(f"{count:,}" for count in dict.fromkeys((min(counts), max(counts))))


def _measurement(answer: BenchResult) -> str:
    """Return a sentence on what was measured, how often and where."""
    number = samples_text(answer.figures())
    what = basis_text(answer.ranking, conditions=True)
    environment = answer.environment
    torch = environment.get("torch")
    release = pytorch_text(torch) if torch else "an unknown release of PyTorch"
    device = device_name(environment)
    on_cpu = environment.get("device_type") == CPU
    where = with_article(device) if device else "a CPU" if on_cpu else "an unknown device"
    return f"Medians of {number} {what} on {where} with {release}."


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
