"""Summarize which side of a diff is faster, by how much, and what else changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from profharness import stats
from profharness.attention.config import parse_config
from profharness.commands._output import sentences
from profharness.commands.diff.compare import (
    LAUNCHES,
    MEMORY,
    PROFILED,
    REFUSALS,
    REFUSED,
    Cost,
    Diff,
    DiffRow,
    StepTime,
)
from profharness.errors import counted, join_and
from profharness.measurements.measurements import AGAIN
from profharness.program.changes import with_short_devices
from profharness.program.matching import (
    LayerDiff,
    layer_labels,
    opposite_layer,
    ran_text,
    told_ratio,
)
from profharness.rows import COLD, EAGER, EVENT, GRAPH, KERNEL
from profharness.units import by_how_much, compared, ratio_text, time_text

KEYS_SHOWN = 3  # maximum number of environment keys in a sentence
IDLE = 0.5  # a GPU counts as mostly idle if it is busy for a smaller share of the step
STEP_NOISE = 0.1  # a smaller relative change of the time of a step may be noise
MEASURED_BY = {
    GRAPH: " in CUDA-graph replays",
    COLD: " in cold calls",
    EVENT: " in cold calls",
    EAGER: " in eager calls",
    KERNEL: " by kernel time",
    PROFILED: " by kernel time",
}
"""Maps a measurement to the words that name it after a comparison."""
MODES = {"graph": "replays CUDA graphs", "compile": "runs compiled code"}
"""Maps a mode that one side may not use to the words for its use."""
WHOLE_CALL = ("call", "status", "kernels")
"""Roles of the rows that compare whole calls."""


def diff_answer(diff: Diff, busy: str | None = None) -> tuple[str, ...]:
    """Return the answer of `diff`: sentences about times, other costs and environments.

    `busy` is a warning that the times are unreliable. It follows the first sentence.
    """
    if diff.phases:
        texts = [*_phases(diff)]
    else:
        about_times = _layers(diff, diff.layers) if diff.layers else _cells(diff)
        texts = [*about_times, *_steps(diff)]
    warning = busy or (AGAIN if any(row.unusable for row in compared_calls(diff)) else None)
    texts[1:1] = [sentences(warning)] if warning else []
    return (*texts, *_environment(diff))


def diff_caveats(diff: Diff) -> tuple[str, ...]:
    """Return sentences about what the traces do not show, and about what limits the answer."""
    before, after = _names(diff)
    hidden = _only_in([row for row in _timed(diff.layers) if _has_eager(row)], before, after)
    texts = []
    if hidden:
        # Such a trace shows neither the mask nor the number of key heads.
        texts.append(
            f"The compared calls may have different configs ({hidden}), which a trace of eager "
            "attention does not show."
        )
    steps = [] if diff.phases else _compared_steps(diff)
    if steps and _speed_up(steps) and _idle(steps):  # otherwise, the answer says so
        texts.append(f"The GPU is idle for most of the {_step_words(steps)} on both sides.")
    return (*texts, *_unknown_environment(diff))


def diff_record(diff: Diff) -> dict[str, Any]:
    """Return the JSON record of a diff, with its caveats if there are any."""
    caveats = diff_caveats(diff)
    return diff.to_json() | ({"caveats": list(caveats)} if caveats else {})


def _timed(rows: Sequence[LayerDiff]) -> list[LayerDiff]:
    return [row for row in rows if row.baseline and row.candidate and row.ratio is not None]


def _names(diff: Diff) -> tuple[str, str]:
    """Return short names of both sides. Omit the run if both sides are backends of one run."""
    before, after = diff.names
    run, _, backend = before.rpartition(":")
    other_run, _, other = after.rpartition(":")
    if run and run == other_run:
        return backend, other
    return ("the baseline", "the candidate") if before == after else (before, after)


def _layers(diff: Diff, rows: Sequence[LayerDiff], lead: str = "") -> Iterator[str]:
    """Yield sentences about layers. The first sentence begins with `lead`."""
    before, after = _names(diff)
    both = [row for row in rows if row.baseline and row.candidate]
    timed = _timed(rows)
    # If only one side computes a forward pass again, that takes a part of its attention time.
    again = [row for row in rows if row.direction == "recompute" and row not in both]
    if not both:
        sized = all(row.first.sized for row in rows)
        same = " of equal size" if sized else ""
        yield _joined(lead, f"{before} and {after} have no attention layers{same} in common.")
        return
    if timed:
        times = [sum(_step_ns(row, side) for row in [*timed, *again]) for side in (0, 1)]
        speeds = {row.speed for row in timed}
        some = len(both) + len(again) < len(rows)
        whole = f"({time_text(times[0])} → {time_text(times[1])} per step"
        whole += ", without the unmatched layers)" if some else ")"
        both_ways = any(row.basis != "forward" for row in timed)
        what = "attention" if both_ways else "the attention forward pass"
        if (speeds == {"same"} and not again) or times[0] == times[1] > 0:
            text = f"{what} takes as long in {after} as in {before} {whole}"
        elif not times[0] or not times[1] or speeds == {"unknown"}:
            reason = next((row.reasons[-1] for row in timed if row.reasons), "")
            text = f"no verdict on {what} {whole}: {reason}"
        else:
            alone = timed[0].ratio if len(timed) == 1 and not again else None
            ratio = told_ratio(times[1] / times[0], alone)
            text = f"{after} {compared(1 / ratio, before)} in {what} {whole}"
            text += _opposite(timed, ratio)
    else:
        text = f"the times of {before} and {after} cannot be compared"
    changes = (*_backend_changes(both), *_mode_changes(both, (before, after)))
    yield _joined(lead, f"{text}{''.join(changes)}.")
    seen = [row for row in timed if not _has_eager(row)]
    if text := _only_in(seen, before, after):
        yield f"The compared calls have different configs ({text})."
    yield from _recomputed(again, before, after)
    unmatched = [row for row in rows if row not in again]
    gone = sum(row.candidate is None for row in unmatched)
    new = sum(row.baseline is None for row in unmatched)
    if gone or new:
        parts = [
            f"{count} only in {name}" for count, name in ((gone, before), (new, after)) if count
        ]
        yield f"Unmatched layers: {join_and(parts)}."


def _opposite(rows: Sequence[LayerDiff], ratio: float) -> str:
    """Return a clause about the layer that differs most in the other direction than all of them."""
    names = layer_labels(rows, full=False)
    steps = (_step_ns(row, 1) - _step_ns(row, 0) for row in rows)
    most = opposite_layer(zip(names, (row.ratio for row in rows), steps, strict=True), ratio)
    return f", but {by_how_much(1 / most[1])} in {most[0]}" if most else ""


def _recomputed(rows: Sequence[LayerDiff], before: str, after: str) -> Iterator[str]:
    """Yield a sentence about the forward passes that only one side computes again."""
    for place, name in enumerate((before, after)):
        own = [side for row in rows if (side := (row.baseline, row.candidate)[place])]
        if own:
            calls = counted(sum(round(side.calls or 1) for side in own), "call")
            ns = sum(side.forward_step_ns or 0 for side in own)
            yield (
                f"Only {name} uses checkpointing: in each step, its backward pass spends "
                f"{time_text(ns)} repeating the forward pass of {calls}."
            )


def _only_in(rows: Sequence[LayerDiff], before: str, after: str) -> str:
    """Return the parts of the configs that only one side has, such as `causal only in a.json.gz`.

    Ignore layouts.
    """
    found: dict[str, dict[str, None]] = {before: {}, after: {}}
    for row in rows:
        for name, own in zip(found, _config_differences(row), strict=True):
            found[name] |= dict.fromkeys(own)
    return "; ".join(f"{join_and(own)} only in {name}" for name, own in found.items() if own)


def _has_eager(row: LayerDiff) -> bool:
    return any(each and each.ran == "eager" for each in (row.baseline, row.candidate))


def _config_differences(row: LayerDiff) -> tuple[list[str], list[str]]:
    """Return the parts of the configs that only the baseline or only the candidate has."""
    labels = [each.config for each in (row.baseline, row.candidate) if each and each.config]
    if len(labels) < 2:
        return [], []
    left, right = (_compared(label).split("-") for label in labels)
    return [part for part in left if part not in right], [
        part for part in right if part not in left
    ]


def _compared(label: str) -> str:
    """Return the label of a config without its layout and without its backward pass."""
    return replace(parse_config(label).contiguous(), bwd=False).label


def _compared_steps(diff: Diff) -> Sequence[StepTime]:
    """Return the steps of both sides, or nothing if they cannot be compared."""
    shared = any(row.baseline and row.candidate for row in diff.layers)
    alike = len({step.whole_trace for step in diff.steps}) == 1
    return diff.steps if shared and alike else ()


def _step_words(steps: Sequence[StepTime]) -> str:
    if any(step.steps > 1 for step in steps):
        return "median step"
    return "whole trace" if steps[0].whole_trace else "step"


def _steps(diff: Diff) -> Iterator[str]:
    """Yield a sentence on the time of the step on both sides."""
    steps = _compared_steps(diff)
    if not steps:
        return
    before, after = (time_text(step.median_ns) for step in steps)
    speed_up = _speed_up(steps)
    change = f" ({by_how_much(speed_up)})" if speed_up else ""
    limit = "; the GPU is idle for most of it on both sides" if not change and _idle(steps) else ""
    yield f"The {_step_words(steps)} takes {before} → {after}{change}{limit}."


def _speed_up(steps: Sequence[StepTime]) -> float | None:
    """Return the speed-up of the step, or None if it may be noise."""
    ratio = steps[0].median_ns / steps[1].median_ns if steps[1].median_ns else 1.0
    return ratio if stats.beyond(ratio, STEP_NOISE) else None


def _idle(steps: Sequence[StepTime]) -> bool:
    """Return whether the GPU is idle for most of the step on both sides."""
    return all(0 < step.median_busy_ns < IDLE * step.median_ns for step in steps)


def _phases(diff: Diff) -> Iterator[str]:
    """Yield sentences about each phase that both engines have, and name the other phases."""
    before, after = _names(diff)
    shared = [
        (row.baseline, row.candidate) for row in diff.phases if row.baseline and row.candidate
    ]
    for left, right in shared:
        tokens = [row.new_tokens for row in (left, right)]
        differ = tokens[0] != tokens[1] and None not in tokens
        counts = " and ".join(f"{count or 0:,.0f}" for count in tokens)
        steps = (
            f"The median {left.phase} step takes {time_text(left.step_ns)} → "
            f"{time_text(right.step_ns)}{f' for {counts} tokens' if differ else ''}"
        )
        rows = [row for row in diff.layers if row.first.step_phase == left.phase]
        if any(row.baseline and row.candidate for row in rows):
            yield from _layers(diff, rows, steps)
        else:
            spent = f"{time_text(left.attention_ns)} → {time_text(right.attention_ns)}"
            unpaired = "; its layers cannot be paired" if rows else ""
            yield f"{steps}. Attention in these steps takes {spent} on average{unpaired}."
    for name, own in (
        (before, [row.phase for row in diff.phases if row.candidate is None]),
        (after, [row.phase for row in diff.phases if row.baseline is None]),
    ):
        if own:
            yield f"Only {name} has {join_and(own)} steps."


def _joined(lead: str, text: str) -> str:
    """Append a clause to the beginning of a sentence, or make a sentence of it."""
    if lead:
        return f"{lead}, and {text}"
    # The names of files are not capitalized.
    own_words = text.startswith(("the ", "no ", "attention "))
    return f"{text[0].upper()}{text[1:]}" if own_words else text


def _step_ns(row: LayerDiff, place: int) -> float:
    """Return the time of a layer's calls in a step.

    Include the backward pass if both sides have one. A side without the layer takes no time.
    """
    side = (row.baseline, row.candidate)[place]
    if side is None:
        return 0
    backward = side.backward_step_ns or 0 if row.basis != "forward" else 0
    return (side.forward_step_ns or 0) + backward


def _backend_changes(rows: Sequence[LayerDiff]) -> Iterator[str]:
    changes: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if row.backend_changed and row.baseline and row.candidate:
            changes[str(ran_text(row.baseline)), str(ran_text(row.candidate))] += round(
                row.candidate.calls or 1
            )
    texts = []
    for (before, after), calls in changes.items():
        texts.append(
            f"attention changed from {before} to {after} in {counted(calls, 'call')} per step"
        )
    if texts:
        yield f": {join_and(texts)}"
    elif all(row.baseline and row.baseline.ran for row in rows):
        yield "; every layer runs on the same backend on both sides"


def _mode_changes(rows: Sequence[LayerDiff], names: tuple[str, str]) -> Iterator[str]:
    """Yield a clause for each mode that only one side uses."""
    modes = [{side.mode for row in rows if (side := row.sides[at])} for at in (0, 1)]
    for mode, text in MODES.items():
        users = [name for name, own in zip(names, modes, strict=True) if mode in own]
        unclear = mode == "compile" and any("graph" in own for own in modes)
        if len(users) == 1 and not unclear:  # a graph may replay compiled code
            yield f"; only {users[0]} {text}"


def _cells(diff: Diff) -> Iterator[str]:
    before, after = _names(diff)
    every = list(whole_calls(diff))
    rows = compared_calls(diff)
    noun = noun_of(rows)
    if rows:
        yield _speeds(before, after, rows, noun, that_ran=len(rows) < len(every))
        busy = sum(row.unusable is not None for row in rows)
        if 0 < busy < len(rows):
            of = f"{busy:,} of {counted(len(rows), noun)}"
            yield f"The machine was busy, so the times of {of} cannot be used."
    elif every:
        yield f"Nothing ran in {before} or in {after}."
    verbs = {MEMORY: "uses more memory in", LAUNCHES: "launches more kernels in"}
    worse = []
    for what, verb in verbs.items():
        found = [cost for cost in diff.costs if cost.what == what and cost.verdict == "more"]
        if found:
            worse.append(f"{verb} {counted(len(found), noun)}{_most(found)}")
    if worse:
        yield _joined("", f"{after} {join_and(worse)}.")


def _most(costs: Sequence[Cost]) -> str:
    ratios = [cost.ratio for cost in costs if cost.ratio]
    if not ratios:
        return ""
    most = max(ratios)
    return f" (up to {ratio_text(most)})"


def compared_calls(diff: Diff) -> list[DiffRow]:
    """Return one row per config and pair of backends, except for those that both sides refuse."""
    rows = whole_calls(diff)
    return [row for row in rows if row.role != "status" or row.verdict != "same"]


def outcome(row: DiffRow) -> str:
    """Return the verdict on a row, or `refused` or `accepted` if only one side refuses the config."""
    statuses = ((each.baseline, each.candidate) for each in row.changes if each.field == "status")
    return REFUSALS.get(next(statuses, ("", "")), row.verdict)


def noun_of(rows: Sequence[DiffRow]) -> str:
    """Return what `compared_calls` contains: a diff of two runs compares each backend of a config."""
    return "config" if len({row.config for row in rows}) == len(rows) else "cell"


def whole_calls(diff: Diff) -> Iterator[DiffRow]:
    """Yield one row per config and pair of backends.

    Prefer the row that compares the whole call, unless its times are unusable.
    """
    for _, group in groupby(diff.rows, attrgetter("call")):
        rows = list(group)
        whole = [row for row in rows if row.role in WHOLE_CALL]
        yield from sorted(whole, key=lambda row: row.unusable is not None)[:1]


def _speeds(
    before: str, after: str, rows: Sequence[DiffRow], noun: str, *, that_ran: bool = False
) -> str:
    """Return a sentence such as `Compared with flash, math is slower in all 9 configs (3.40 to 13.00 times).`"""
    if all(row.unusable for row in rows):
        return (
            f"The times of {before} and {after} cannot be compared, because the machine was busy."
        )
    bases = {row.basis for row in rows if row.ratio}
    measured = MEASURED_BY.get(bases.pop() or "", "") if len(bases) == 1 else ""
    parts: list[str] = []
    for verdict in ("slower", "faster"):
        found = [row for row in rows if row.verdict == verdict and row.ratio]
        if not found:
            continue
        speed_ups = [1 / (row.ratio or 1) for row in found]
        if len(rows) == 1:
            return f"{after} {compared(speed_ups[0], before)}{measured}."
        amount = by_how_much(min(speed_ups), most=max(speed_ups))
        count = (
            f"{len(found):,} of {'the ' if that_ran else ''}{len(rows):,}"
            if len(found) < len(rows)
            else "both"
            if len(rows) == 2
            else f"all {len(rows):,}"
        )
        which = " that ran" if that_ran and not parts else ""
        parts.append(f"{verdict} in {count} {noun}s{which} ({amount})")
    others = Counter(outcome(row) for row in rows if row.verdict not in ("slower", "faster"))
    words = {
        "same": "the same in {}",
        "unknown": "not comparable in {}",
        REFUSED: "refused in {}",
        "accepted": "the only side that runs {}",
        "changed": "changed in {}",
        "added": "without a baseline in {}",
        "removed": "without a candidate in {}",
    }
    parts += [words[name].format(counted(count, noun)) for name, count in others.items()]
    text = f"Compared with {before}{measured}, {after} is {join_and(parts)}."
    if len(parts) == 1 and set(others) == {"same"}:
        where = f"{counted(len(rows), noun)}{' that ran' if that_ran else ''}"
        where = f"the {where}" if that_ran else where
        return _joined("", f"{after} takes as long as {before}{measured} in {where}.")
    return text


def _environment(diff: Diff) -> Iterator[str]:
    if diff.environment:
        keys = [
            f"{change.key} ({change.baseline} → {change.candidate})"
            for change in map(with_short_devices, diff.environment)
            if change.explains
        ]
        more = len(diff.environment) - len(keys[:KEYS_SHOWN])
        names = [*keys[:KEYS_SHOWN], *([counted(more, "other key")] if more else [])]
        yield f"The environments differ in {join_and(names)}."
    elif diff.environment_told:
        yield "The environments are the same."


def _unknown_environment(diff: Diff) -> Iterator[str]:
    """Yield a sentence if a side did not record its whole environment."""
    if not diff.environment_told:
        lead = (
            "The environments may also differ in other ways"
            if diff.environment
            else "The environments cannot be compared"
        )
        both = len(diff.environment_unknown) > 1
        why = (
            "the traces do not record their PyTorch versions"
            if both
            else "{} does not record its PyTorch version"
        )
        yield f"{lead}, because {why.format(*diff.environment_unknown)}."
