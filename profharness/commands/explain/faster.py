"""Find the changes after which another backend computes a program's attention faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from profharness.attention.dispatch.advice import OF_PADDING, PACK, SELECT
from profharness.attention.dispatch.by_rule import Explanation, explain_by_rule
from profharness.commands.explain.answer import Way, call_times, compared_times, faster_way
from profharness.commands.explain.calls import RunConfigs, program_calls
from profharness.commands.explain.savings import matters, saving_text
from profharness.commands.explain.times import with_times
from profharness.device_types import is_gpu
from profharness.errors import counted
from profharness.program.layer_map import LayerMap
from profharness.render.document import Note
from profharness.rows import MEASURED
from profharness.units import by_how_much

OTHERWISE_PACK = " Otherwise, pack the sequences, so that no padding is computed."
SELECT_IT = "select it with sdpa_kernel"
MOST_EXPLAINED = 12  # maximum number of configs for which a faster backend is sought


def explained_calls(layers: LayerMap) -> list[Explanation]:
    """Return explanations of the costliest attention calls, with predicted times on a GPU."""
    if layers.platform is None:
        return []
    spent: dict[str | None, float] = {}
    for row in layers.rows:
        spent[row.config] = spent.get(row.config, 0) + row.total_ns
    program = program_calls(layers)
    if not program.calls:
        return []
    calls = sorted(program.calls, key=lambda call: -spent.get(call.config.label, 0))
    answers = replace(program, calls=tuple(calls[:MOST_EXPLAINED])).explain(layers.platform)
    return with_times(answers, layers.platform)[0] if is_gpu(layers.platform.device) else answers


def faster_changes(layers: LayerMap) -> list[tuple[Explanation, Way]]:
    """Return the changes that make attention calls of a program faster, the costliest call first.

    Return no change if attention takes little of the GPU time, or if a benchmark has measured the
    backends, because predictions then say nothing new.
    """
    if not matters(layers) or layers.regret is not None or layers.benched:
        return []
    answers = explained_calls(layers)
    if layers.forecasts:  # which contain the predicted times before the changes
        answers = [replace(answer, observed_ns=None) for answer in answers]
    return list(faster_ways(answers))


def faster_ways(answers: Sequence[Explanation]) -> Iterator[tuple[Explanation, Way]]:
    """Yield the changes that are predicted to make a call faster, beyond the error of predictions.

    The advice on calls that math computes is part of the layer map.
    """
    for answer in answers:
        if answer.observed in (None, "math"):
            continue
        if way := faster_way(answer):
            yield answer, way


def faster_configs(run: RunConfigs) -> Iterator[tuple[Explanation, Way]]:
    """Yield the changes that are predicted to make configs of a run faster on `auto`.

    The time before the change is the measured time of `auto` if the run has it. A change that only
    selects another backend is left out, because `bench` measures the backends.
    """
    if run.platform is None or not is_gpu(run.platform.device):
        return
    answers = [
        replace(
            explain_by_rule(config, run.platform), observed_ns=run.times_of_auto.get(config.label)
        )
        for config in run.configs[:MOST_EXPLAINED]
    ]
    for answer in with_times(answers, run.platform)[0]:
        way = faster_way(answer)
        if way and way.advice.steps != SELECT:
            yield answer, way


def _change_lead(way: Way, where: str = "") -> str:
    """Return the start of a sentence on a change, such as `To run cudnn on CONFIG, pad …`.

    `where` names the configs, or is "".
    """
    select = way.advice.steps == SELECT
    # The call may already run on the backend that the change makes faster.
    to = f"to run {way.runs}" if select or not way.side.eligible else ""
    lead = " ".join(filter(None, [to, f"on {where}" if where else ""]))
    # The explanation of a step follows its colon.
    steps = (step.partition(": ")[0] for step in way.advice.change.rstrip(".").split("; "))
    change = SELECT_IT if select else "; ".join(steps)
    text = ", ".join(filter(None, [lead, change]))
    return f"{text[0].upper()}{text[1:]}"


def faster_config_text(way: Way, where: str = "") -> str:
    """Return a sentence on a change of `faster_way`, with the kernel times of a call.

    `where` names the config. It is "" if the config is already named.
    """
    times = way.times
    assert times is not None
    how = "according to the atlas, it takes" if times.source == MEASURED else "predicted to take"
    return f"{_change_lead(way, where)}: {how} {compared_times(times, way.advice)}."


def _configs_text(ways: Sequence[Way], count: int) -> str:
    """Return a sentence on one change of several of `count` configs, with the range of speed-ups."""
    change = _change_lead(ways[0], f"{len(ways)} of {counted(count, 'config')}")
    known = [way.speed_up or 0 for way in ways]
    measured = all(way.times and way.times.source == MEASURED for way in ways)
    how = "according to the atlas, it is" if measured else "predicted to be"
    ratio = by_how_much(min(known), most=max(known))
    if ways[0].advice.prepares:
        ratio += ", but preparing the inputs takes time, too"
    return f"{change}: {how} {ratio}."


def summarize_changes(
    changes: Iterable[tuple[Explanation, Way]], count: int = 0
) -> tuple[list[str], list[Note]]:
    """Return a sentence on the change with the largest predicted speed-up, and a note on each other
    change.

    The label of a note is the config. If `count`, the number of configs, is given, the sentence or
    note on a change describes all configs that it applies to. Without changes, both lists are empty.
    """
    groups: dict[object, list[tuple[Explanation, Way]]] = {}
    for answer, way in changes:
        groups.setdefault(_change_lead(way) if count else answer.config, []).append((answer, way))
    first = largest_change(list(chain.from_iterable(groups.values())))
    told, notes = [], []
    for group in groups.values():
        answer, way = group[0]
        several = len(group) > 1
        whole = _configs_text([way for _, way in group], count) if several else ""
        if first in group:
            told.append(whole or faster_config_text(way, answer.config))
        else:
            notes.append(Note(whole or faster_config_text(way), "" if several else answer.config))
    return told, notes


def largest_change(changes: Sequence[tuple[Explanation, Way]]) -> tuple[Explanation, Way] | None:
    """Return the change with the largest speed-up, or None if there are no changes."""
    return max(changes, key=lambda each: each[1].speed_up or 0, default=None)


def faster_text(layers: LayerMap, answer: Explanation, way: Way) -> str:
    """Return a sentence on a change of `faster_ways`, with the time that it saves per step."""
    times = way.times
    assert times is not None and times.before_ns is not None
    calls: dict[str | None, float] = {}
    for row in layers.rows:
        own = row.config == answer.config and row.ran == answer.observed
        if own and row.calls and row.direction != "recompute":
            calls[row.step_phase] = calls.get(row.step_phase, 0) + row.calls
    where = answer.config if len({row.config for row in layers.rows}) > 1 else ""
    change = f"{_change_lead(way, where)}: "
    if not (layers.steps and calls):
        return f"{change}predicted to take {call_times(times, prepares=way.advice.prepares)}."
    saves = [(phase, count * (times.before_ns - times.after_ns)) for phase, count in calls.items()]
    packed = any(advice.steps == PACK for side in answer.backends for advice in side.advice)
    # A mask for each sequence usually hides padding.
    otherwise = OTHERWISE_PACK if packed and OF_PADDING.intersection(way.advice.steps) else ""
    return f"{change}{saving_text(saves, prepares=way.advice.prepares)} ({call_times(times)}).{otherwise}"
