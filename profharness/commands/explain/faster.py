"""Find the changes after which another backend computes a program's attention faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from profharness.attention.dispatch.by_rule import Explanation
from profharness.commands.explain.answer import Way, told_way
from profharness.commands.explain.calls import program_calls
from profharness.commands.explain.times import with_times
from profharness.device_types import is_gpu
from profharness.program.layer_map import LayerMap

MOST_EXPLAINED = 12  # maximum number of configs for which a faster backend is sought


def explained_calls(layers: LayerMap) -> list[Explanation]:
    """Return explanations of the costliest attention calls, with predicted times.

    Return an empty list for a CPU, which has no atlas.
    """
    if layers.platform is None or not is_gpu(layers.platform.device):
        return []
    spent: dict[str | None, float] = {}
    for row in layers.rows:
        spent[row.config] = spent.get(row.config, 0) + row.total_ns
    program = program_calls(layers)
    calls = sorted(program.calls, key=lambda call: -spent.get(call.config.label, 0))
    answers = replace(program, calls=tuple(calls[:MOST_EXPLAINED])).explain(layers.platform)
    return with_times(answers, layers.platform)[0]


def faster_ways(answers: Sequence[Explanation]) -> Iterator[tuple[Explanation, Way]]:
    """Yield the changes that are predicted to make a call faster, beyond the error of predictions.

    The advice on calls that math computes is part of the layer map.
    """
    for answer in answers:
        way = None if answer.observed in (None, "math") else told_way(answer, ())
        times = way.advice.predicted if way else None
        if way and times and times.certain and (times.speed_up or 0) > 1:
            yield answer, way
