"""Summarize explanations in a few sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from profharness.attention.backends import BACKENDS
from profharness.attention.config import (
    AUTO,
    SDPA_BACKENDS,
    outside_sdpa,
    parse_config,
    sdpa_setting,
)
from profharness.attention.dispatch.advice import (
    FLEX,
    NOT_PREDICTED,
    PACK,
    PREPARATION,
    SELECT,
    Advice,
    BackendAnswer,
    PredictedTimes,
)
from profharness.attention.dispatch.by_rule import (
    FUSED_BACKENDS,
    Explanation,
    MatrixRow,
    by_preference,
    chosen,
    refusals_text,
    unread,
)
from profharness.commands._answers import split_text
from profharness.commands.explain.maps import Bisection
from profharness.devices import platform_text, short_device_name
from profharness.errors import counted, join_and
from profharness.render.document import More, Note
from profharness.rows import MEASURED
from profharness.units import by_how_much, compared, time_text

if TYPE_CHECKING:
    from profharness.commands.explain.calls import ProgramCalls

SHOWN_FLIPS = 3


def explain_answer(answer: Explanation, named: Sequence[str] = ()) -> tuple[str, ...]:
    """Return sentences on what runs, why PyTorch refuses other backends, how long a call takes, and
    the best change.

    `named` contains the backends of --backend. A sentence says so if no change helps one of them.
    """
    config = parse_config(answer.config)
    if reason := outside_sdpa(config):
        able = [name for name, each in BACKENDS.items() if each.load and not each.supports(config)]
        others = (
            f"this config is supported by {join_and(able)}"
            if able
            else "this config is not supported by any built-in backend"
        )
        return (f"PyTorch's {reason}; {others}.",)
    torch, device = platform_text(answer.environment)
    subject = torch if answer.asked == AUTO else f"With {answer.asked}, {torch}"
    if answer.choice is None and unread([answer]) is not None:
        return (
            (
                f"The backend that {torch} runs on {device} is unknown, because the rules do not "
                "cover this release."
            ),
        )
    sentences = [_choice(answer, subject, device), *_others(answer), *_time(answer)]
    way = told_way(answer, named)
    change = (*change_texts(way), *unpredicted_texts(answer, way)) if way else ()
    return (*sentences, *change, *_without_advice(answer, named))


def _choice(answer: Explanation, subject: str, device: str) -> str:
    choice, predicted = chosen(answer), answer.source == "rules"
    if choice == "unknown":
        setting, comma, torch = subject.rpartition(", ")
        the = f"{setting}{comma}the" if setting else "The"
        return f"{the} backend that {torch} runs on {device} is unknown."
    if choice == "none":
        verb = "is predicted to raise" if predicted else "raises"
        if taking := [side.backend for side in answer.backends if side.eligible]:
            alone = join_and(list(taking))
            return (
                f"{subject} {verb} on {device}: it chooses math, although only {alone} could run."
            )
        which = "backend" if answer.asked == AUTO else "backend among them"
        return f"{subject} {verb} on {device}: no {which} supports this config."
    verb = "is predicted to run" if predicted else "runs"
    first = ", its first choice" if answer.priority_order[:1] == (choice,) else ""
    library = f" (computed by {answer.computed_by})" if answer.computed_by else ""
    return f"{subject} {verb} {choice}{library} on {device}{first}."


def _time(answer: Explanation) -> Iterator[str]:
    """Yield sentences on the time of a call: the measured time in a program, and the prediction."""
    prediction = answer.prediction or {}
    statement, predicted = str(prediction.get("statement", "")), prediction.get("kernel_ns")
    if answer.observed_ns is not None:
        measured = f"{answer.observed} took {time_text(answer.observed_ns)} per call"
        if predicted is None:
            yield f"{measured}."
        else:
            # The rest of the statement describes the fastest backend.
            _, mark, fastest = statement.rstrip(".").partition("; ")
            yield f"{measured} (predicted: {time_text(predicted)}){mark}{fastest}."
    elif statement:
        yield statement


def _others(answer: Explanation) -> Iterator[str]:
    """Yield sentences on the other backends: which could run, which are refused, and why."""
    choice, parts = chosen(answer), []
    setting = sdpa_setting(answer.asked)
    allowed = SDPA_BACKENDS if setting is None else setting.backends
    considered = [
        side
        for side in answer.backends
        if side.backend in allowed
        and side.backend != choice
        and (not answer.priority_order or side.backend in answer.priority_order)
    ]
    able = [side.backend for side in considered if side.eligible]
    if able and choice != "none":
        parts.append(f"{join_and(able)} could also run")
    refused = [side for side in considered if side.eligible is False]
    if refusals := refusals_text(answer, refused):
        parts.append(refusals)
    if unknown := [side.backend for side in considered if side.eligible is None]:
        parts.append(f"whether {join_and(unknown)} could run is unknown")
    if forbidden := [name for name in SDPA_BACKENDS if name not in allowed]:
        parts.append(f"PyTorch refuses {join_and(forbidden)}, which {answer.asked} excludes")
    if parts:
        yield f"{'; '.join(parts)}."


@dataclass(frozen=True)
class Way:
    """Advice on a backend."""

    side: BackendAnswer
    advice: Advice
    observed_ns: float | None = None
    """The measured time of a call before the change, or None if it is unknown."""

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return self.side.backend

    @property
    def runs(self) -> str:
        """The name of the backend whose kernels run after the change."""
        # flex_attention runs its own kernels, not those of the backend.
        return "flex" if self.advice.steps == FLEX else self.backend

    @property
    def times(self) -> PredictedTimes | None:
        """The predicted times. The time before the change is the measured time if it is known."""
        times, before = self.advice.predicted, self.observed_ns
        if times is None or before is None:
            return times
        return replace(times, before_ns=round(before), speed_up=before / times.after_ns)

    @property
    def speed_up(self) -> float | None:
        """The measured gain or, failing that, the predicted speed-up. None if both are unknown."""
        return replace(self.advice, predicted=self.times).speed_up

    @property
    def is_slower(self) -> bool:
        """Whether the call is known to be slower after the change."""
        return self.speed_up is not None and self.speed_up < 1


def ranked_ways(answer: Explanation) -> list[Way]:
    """Return the advice on all backends, with the best advice first.

    Of equally good advice, that on the backend that PyTorch prefers comes first.
    """
    ways = [
        Way(side, advice, answer.observed_ns)
        for side in by_preference(answer)
        for advice in side.advice
    ]
    return sorted(ways, key=lambda way: way.advice.rank)


def limit_advice(answer: Explanation, named: Sequence[str]) -> Explanation:
    """Return the explanation with only the advice that runs one of the backends in `named`.

    Return the explanation as it is if `named` is empty.
    """
    if not named:
        return answer
    sides = tuple(
        replace(side, advice=tuple(each for each in side.advice if Way(side, each).runs in named))
        for side in answer.backends
    )
    return replace(answer, backends=sides)


def told_way(answer: Explanation, named: Sequence[str]) -> Way | None:
    """Return the best change after which another fused backend runs, or the same one is faster.

    Leave out changes that make the call slower, or that run a backend which PyTorch prefers less and
    whose time is unknown, unless their backends are in `named`.
    """
    for way in ranked_ways(answer):
        changed = way.side.eligible is False or way.advice.config not in (None, answer.config)
        if changed and way.backend in FUSED_BACKENDS:
            hidden = way.is_slower or _without_gain(answer, way)
            if way.backend in named or not hidden:
                return way
    return None


def faster_way(answer: Explanation) -> Way | None:
    """Return the best change that is predicted to make a call faster, beyond the error of
    predictions.

    The change is that of `told_way`, or it only selects the fastest backend that accepts the call.
    """
    selected = [way for way in ranked_ways(answer) if way.advice.steps == SELECT]
    ways = [*filter(None, [told_way(answer, ())]), *selected[:1]]
    return next(filter(_is_faster, sorted(ways, key=lambda way: way.advice.rank)), None)


def _is_faster(way: Way) -> bool:
    times = way.advice.predicted
    if times is None or not times.certain or (times.speed_up or 0) <= 1:
        return False
    # A call that took less time than predicted may already be as fast.
    return (way.speed_up or 0) > 1


def advised_way(answer: Explanation) -> Way | None:
    """Return the change of `faster_way`, or that of `told_way` for a call that math computes."""
    way = faster_way(answer)
    if way is None and (answer.observed or chosen(answer)) == "math":
        return told_way(answer, ())
    return way


def _without_gain(answer: Explanation, way: Way) -> bool:
    """Return whether a change of unknown time runs a backend that PyTorch prefers less than the chosen
    one.

    PyTorch's order does not apply to changes that replace the call with another function. If math is
    chosen, any fused backend may be faster.
    """
    choice, order = chosen(answer), answer.priority_order
    if way.speed_up is not None or way.advice.steps in NOT_PREDICTED:
        return False
    if choice not in FUSED_BACKENDS or not {choice, way.backend} <= {*order}:
        return False
    return order.index(way.backend) > order.index(choice)


def shown_ways(answer: Explanation, named: Sequence[str], *, full: bool) -> list[Way]:
    """Return the advice to show: first the change that the answer describes, if there is one.

    The rest is sorted by gain, and advice whose gain is unknown comes last. By default, leave out
    advice that makes the call slower, advice of unknown time on a backend that is eligible or that
    PyTorch prefers less than the chosen one, and the same change for a backend that is slower than
    one that is shown.
    """
    first = told_way(answer, named)
    shown: list[Way] = []
    configs: set[str | None] = set()
    for way in ranked_ways(answer):
        known = way.speed_up is not None
        better = not way.is_slower and (known or way.side.eligible is not True)
        better = better and not _without_gain(answer, way)
        again = known and way.advice.config in configs
        if full or way.backend in named or (better and not again):
            shown.append(way)
            configs |= {way.advice.config} if known else set()
    return sorted(shown, key=lambda way: (way != first, -(way.speed_up or 0)))


def unpredicted_texts(answer: Explanation, way: Way) -> Iterator[str]:
    """Yield sentences on a change whose time cannot be predicted, if those of other changes can.

    If changes for the same backend have predicted times, but apply only to some masks, the second
    sentence gives these times.
    """
    ways = ranked_ways(answer)
    reason = NOT_PREDICTED.get(way.advice.steps)
    if reason is None or way.speed_up is not None or not any(each.times for each in ways):
        return
    yield f"The time of this change cannot be predicted, because {reason}."
    if way.advice.steps != PACK:
        return
    known: dict[str, PredictedTimes] = {}
    for each in ways:
        condition, comma, _ = each.advice.change.partition(", ")
        if each.backend == way.backend and each.times and comma and condition.startswith("if "):
            known.setdefault(condition, each.times)
    if known:
        before = next(iter(known.values())).before_ns
        texts = [f"{time_text(times.after_ns)} {condition}" for condition, times in known.items()]
        instead = f", instead of {time_text(before)}" if before is not None else ""
        yield f"Without packing, a call of {way.backend} is predicted to take {join_and(texts)}{instead}."


def hidden_blocks(answer: Explanation, shown: Sequence[Way]) -> Iterator[Note | More]:
    """Yield blocks on the backends whose advice is not shown."""
    told = {way.backend for way in shown}
    hidden = {way.backend: way for way in ranked_ways(answer) if way.backend not in told}
    if not hidden:
        return
    if all(way.speed_up is not None for way in hidden.values()):
        yield Note(_hidden_times(hidden, shown), level="hint")
    yield More(f"how to run {join_and(list(hidden))}")


def _hidden_times(hidden: Mapping[str, Way], shown: Sequence[Way]) -> str:
    """Return a sentence on the predicted times of the backends whose advice is not shown."""
    names = join_and(list(hidden))
    slower = f"{'is' if len(hidden) == 1 else 'are'} predicted to be slower"
    if not all(way.is_slower for way in hidden.values()):
        most = max(way.speed_up or 0 for way in hidden.values())
        faster = next((way for way in shown if (way.speed_up or 0) > most), None)
        slower += f" than {faster.backend}" if faster else ""
    changed = [name for name, way in hidden.items() if not way.side.eligible]
    if not changed:
        return f"{names} {slower}."
    if len(changed) == len(hidden):
        return f"{names} could run after a change, but {slower}."
    as_it_is = [name for name in hidden if name not in changed]
    return (
        f"{join_and(as_it_is)} could also run, and {join_and(changed)} could run after a change, "
        f"but {slower}."
    )


def call_times(times: PredictedTimes, *, prepares: bool = False) -> str:
    """Return text such as `8.38 µs instead of 49.2 µs per call`.

    Set `prepares` if the change copies or converts inputs, which the times do not include.
    """
    after = time_text(times.after_ns)
    if prepares:
        after += f" plus {PREPARATION}"
    if times.before_ns is None:
        return f"{after} per call"
    comma = "," if prepares else ""
    return f"{after}{comma} instead of {time_text(times.before_ns)} per call"


def compared_times(times: PredictedTimes, advice: Advice) -> str:
    """Return `call_times` with the speed-up, unless it depends on the time to prepare the inputs."""
    notes = []
    if times.speed_up is not None and not advice.prepares:
        notes.append(by_how_much(times.speed_up))
    if times.certain is False:
        notes.append("but the intervals overlap" if notes else "the intervals overlap")
    text = call_times(times, prepares=advice.prepares)
    return f"{text} ({', '.join(notes)})" if notes else text


def saving_texts(way: Way) -> Iterator[str]:
    """Yield sentences on the time that advice saves, first as measured and then as predicted."""
    advice, times = way.advice, way.times
    if advice.gain is not None:
        without = f", without {PREPARATION}" if advice.prepares else ""
        yield f"The measured call {compared(advice.gain)} ({advice.gain_source}){without}."
    if times is not None:
        lead = "According to the atlas" if times.source == MEASURED else "Predicted"
        yield f"{lead}: {way.backend} takes {compared_times(times, advice)}."


def change_texts(way: Way) -> Iterator[str]:
    """Yield a sentence on a change, and one on the time that it saves."""
    change = way.advice.change.rstrip(".")
    code = " (code below)" if way.advice.code else ""
    if way.side.eligible:
        yield f"{change[0].upper()}{change[1:]}{code}."
    else:
        yield f"To run {way.runs}: {change}{code}."
    yield from islice(saving_texts(way), 1)


def short_change_text(way: Way) -> str:
    """Return what `change_texts` says on a change, but without explanations."""
    # The explanation of a step follows its colon.
    steps = (step.partition(": ")[0] for step in way.advice.change.rstrip(".").split("; "))
    saving = " ".join(islice(saving_texts(way), 1))
    change = "; ".join(steps)
    if way.side.eligible:
        return f"{change[0].upper()}{change[1:]}. {saving}".rstrip()
    return f"To run {way.runs}: {change}. {saving}".rstrip()


def _without_advice(answer: Explanation, named: Sequence[str]) -> Iterator[str]:
    setting = sdpa_setting(answer.asked)
    allowed = SDPA_BACKENDS if setting is None else setting.backends
    names = [
        side.backend
        for side in answer.backends
        if side.backend in named and side.backend in allowed
        if side.eligible is False and not side.advice
    ]
    if names:
        yield (
            f"No advice is available for {join_and(names)}: no known change to the call would "
            "prevent the refusal."
        )


def gpu_of(answer: Explanation) -> str:
    """Return the GPU of an explanation, or `CPU`."""
    return short_device_name(answer.environment.get("gpu") or "CPU")


def compares_gpus(matrices: Sequence[Sequence[MatrixRow]]) -> bool:
    """Return whether the rows of a matrix are GPUs instead of releases."""
    return len({gpu_of(row.explanation) for row in matrices[0]}) > 1


def matrix_answer(matrices: Sequence[Sequence[MatrixRow]]) -> tuple[str, ...]:
    """Return sentences on the releases at which the predicted backend changes, or on the GPUs."""
    if all(chosen(row.explanation) == "unknown" for matrix in matrices for row in matrix):
        return ("The choices are unknown, because the dispatch rules do not cover these releases.",)
    by_gpu = compares_gpus(matrices)
    configs = {matrix[0].explanation.config for matrix in matrices}
    if len(configs) == 1:
        return tuple(map(_of_gpus if by_gpu else _of_releases, matrices))
    changing = {
        row.explanation.config for matrix in matrices for row in matrix if row.flips
    }  # on any of the GPUs
    if changing:
        between = "GPUs" if by_gpu else "releases"
        return (
            f"The chosen backend differs between {between} for {len(changing)} of {len(configs)} "
            "configs.",
        )
    where = "on all GPUs" if by_gpu else "in all releases"
    return (f"For {_all(len(configs), 'configs')}, the chosen backend is the same {where}.",)


def _all(count: int, noun: str) -> str:
    """Return `both configs` or `all 3 configs`, given a noun in the plural."""
    return f"both {noun}" if count == 2 else f"all {count} {noun}"


def _of_gpus(matrix: Sequence[MatrixRow]) -> str:
    """Return a sentence on what each GPU is predicted to run."""
    gpus_of: dict[str, list[str]] = {}
    for row in matrix:
        device = platform_text(row.explanation.environment)[1]
        gpus_of.setdefault(chosen(row.explanation), []).append(device)
    parts = [f"{name} on {join_and(gpus)}" for name, gpus in gpus_of.items()]
    torch = platform_text(matrix[0].explanation.environment)[0]
    return f"{torch} is predicted to run {join_and(parts)}."


def _of_releases(matrix: Sequence[MatrixRow]) -> str:
    """Return a sentence on the releases at which the choice changes."""
    texts = []
    for before, row in pairwise(matrix):
        if row.flips:
            was, now = (chosen(each.explanation) for each in (before, row))
            texts.append(f"at {platform_text(row.explanation.environment)[0]} from {was} to {now}")
    _, device = platform_text(matrix[0].explanation.environment)
    if texts:
        return f"The backend predicted for {device} changes {join_and(texts)}."
    choice = chosen(matrix[0].explanation)
    return f"The backend predicted for {device} is {choice} in {_all(len(matrix), 'releases')}."


def map_answer(answers: Sequence[Explanation]) -> tuple[str, ...]:
    """Return a sentence on how often each backend is chosen."""
    torch, device = platform_text(answers[0].environment)
    if unread(answers) is not None:
        return (
            (
                f"The backend that {torch} runs on {device} is unknown, because the rules do not "
                "cover this release."
            ),
        )
    subject = torch if answers[0].asked == AUTO else f"With {answers[0].asked}, {torch}"
    verb = "is predicted to run" if answers[0].source == "rules" else "runs"
    counts = Counter(map(chosen, answers))
    sentences = []
    lost = {name: counts.pop(name, 0) for name in ("none", "unknown")}
    outside = sum(outside_sdpa(parse_config(answer.config)) is not None for answer in answers)
    if counts:
        sentences.append(f"{subject} {verb} {split_text(counts, total=len(answers))} on {device}.")
    if outside:
        sentences.append(
            f"scaled_dot_product_attention has no parameters to express {counted(outside, 'config')}."
        )
    if lost["none"] > outside:
        errors = counted(lost["none"] - outside, "config")
        sentences.append(f"PyTorch raises an error for {errors}.")
    if lost["unknown"]:
        sentences.append(
            f"The choice of backend is unknown for {counted(lost['unknown'], 'config')}."
        )
    return tuple(sentences)


def program_answer(
    program: ProgramCalls, answers: Sequence[Explanation], named: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return sentences on what a program ran, and on whether the rules predict it.

    For one config, also return the sentences of `explain_answer` on the other backends.
    """
    torch, device = platform_text(answers[0].environment)
    counts = Counter(str(answer.observed) for answer in answers)
    ran = f"{program.name} ran {split_text(counts)}"
    unlike = [answer for answer in answers if answer.agree is False]
    unknown = [answer for answer in answers if answer.agree is None]
    if unlike and len(answers) == 1:
        ran += f", but the rules of {torch} predict {chosen(unlike[0])} for {device}"
    elif unlike:
        ran += (
            f", but the rules of {torch} predict other backends for {device} on "
            f"{counted(len(unlike), 'config')}"
        )
    elif unknown:
        what = "the choice" if len(answers) == 1 else f"{counted(len(unknown), 'choice')}"
        ran += f"; the rules of {torch} do not determine {what} on {device}"
    else:
        ran += f", as the rules of {torch} predict for {device}"
    # The other sentences describe the backend that the rules predict.
    told = len(answers) == 1 and not unlike
    return (f"{ran}.", *(explain_answer(answers[0], named)[1:] if told else ()))


def bisect_answer(bisections: Sequence[Bisection]) -> tuple[str, ...]:
    """Return a sentence on the values at which the choice changes, one per config."""
    return tuple(map(_of_bisection, bisections[:SHOWN_FLIPS]))


def _of_bisection(found: Bisection) -> str:
    ends = f"{found.name} from {found.stretches[0].first:,} to {found.stretches[-1].last:,}"
    if not found.flips:
        return f"The choice is {found.stretches[0].choice} for {ends}."
    if len(found.flips) > SHOWN_FLIPS:
        return f"For {ends}, the choice of backend changes {len(found.flips):,} times."
    texts = [
        f"at {found.name} {after.first:,} from {before.choice} to {after.choice}"
        for before, after in pairwise(found.stretches)
    ]
    return f"The choice changes {join_and(texts)}."
