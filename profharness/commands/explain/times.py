"""Add the times that an atlas predicts to explanations and their advice. This module loads numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from profharness.atlas.predictions import (
    Predicted,
    contiguous_note,
    predict_all,
    prediction_record,
    saving,
    timed_place,
)
from profharness.attention.config import AUTO, parse_config
from profharness.attention.dispatch.advice import THEN_SELECT, Advice, BackendAnswer, call_code
from profharness.attention.dispatch.by_rule import Explanation, Platform, chosen

Rows = Mapping[str, Predicted]
"""The predictions for one config, by backend."""


def with_times(answers: Sequence[Explanation], platform: Platform) -> tuple[list[Explanation], str]:
    """Return the explanations with predicted times, and the reason if there are none.

    Each backend that supports a config gets the time of a call, and each verified advice gets the
    times before and after its change. The explanation of a single
    config also gets the prediction for `auto`. The reason is "" if there are times, or if the GPU
    has no atlas at all.
    """
    place, doubt = timed_place(str(platform.gpu), platform.machine)
    if place is None:
        return list(answers), doubt
    labels = [
        label for answer in answers for label in (answer.config, *map(_changed, _advice(answer)))
    ]
    labels = list(dict.fromkeys(filter(None, labels)))
    predictions = predict_all(place, list(map(parse_config, labels)))
    rows = {
        label: {row.backend: row for row in found}
        for label, found in zip(labels, predictions, strict=True)
    }
    return [_timed(answer, rows, single=len(answers) == 1) for answer in answers], ""


def _advice(answer: Explanation) -> list[Advice]:
    return [advice for side in answer.backends for advice in side.advice]


def _changed(advice: Advice) -> str:
    return (advice.verified and advice.config) or ""


def _of_choices(
    answer: Explanation, before: Predicted | None, rows: Mapping[str, Rows]
) -> tuple[BackendAnswer, ...]:
    """Return the backends, each also with the changes after which PyTorch would choose it.

    A change that lets a backend run may let PyTorch choose another one. If that one is faster, and
    certainly faster than before the change, the change is advice for it, without `sdpa_kernel`.
    """
    found: dict[str, dict[str, Advice]] = {}
    for side in answer.backends:
        for advice in side.advice:
            choice, label = advice.choice, _changed(advice)
            if not label or choice in (None, side.backend) or label == answer.config:
                continue
            after, slower = rows[label].get(choice), rows[label][side.backend].kernel_ns
            if after is None or not after.kernel_ns or not slower or after.kernel_ns >= slower:
                continue
            times = saving(before, after)
            if times is None or not times.certain or (times.speed_up or 0) < 1:
                continue
            found.setdefault(choice, {}).setdefault(
                label,
                replace(
                    advice,
                    change=advice.change.partition(f"; {THEN_SELECT}")[0],
                    code=call_code(parse_config(answer.config), parse_config(label)),
                    predicted=times,
                ),
            )
    sides = []
    for side in answer.backends:
        known = {advice.config for advice in side.advice}
        more = (each for label, each in found.get(side.backend, {}).items() if label not in known)
        sides.append(replace(side, advice=(*side.advice, *more)))
    return tuple(sides)


def _timed(answer: Explanation, rows: Mapping[str, Rows], *, single: bool) -> Explanation:
    own = rows[answer.config]
    before = own.get(chosen(answer))
    used = [] if before is None else [before]

    def times(advice: Advice, backend: str) -> Advice:
        if not _changed(advice):
            return advice
        after = rows[_changed(advice)][backend]
        used.append(after)
        return replace(advice, predicted=saving(before, after))

    backends = tuple(
        replace(
            side,
            advice=tuple(times(each, side.backend) for each in side.advice),
            predicted_ns=own[side.backend].kernel_ns if side.eligible else None,
        )
        for side in answer.backends
    )
    if answer.asked == AUTO:
        backends = _of_choices(replace(answer, backends=backends), before, rows)
    has_prediction = single and answer.asked == AUTO
    prediction = prediction_record(tuple(own.values())) if has_prediction else None
    note = contiguous_note(row.backend for row in used if row.timed_as)
    why = (
        f"No time is predicted for this config: {before.outside}."
        if before and before.outside
        else ""
    )
    caveats = (*answer.caveats, *filter(None, [note, why]))
    return replace(answer, backends=backends, prediction=prediction, caveats=caveats)
