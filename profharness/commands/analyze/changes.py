"""Add changes to another backend to the analyses of a program's calls and of cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from profharness.attention.dispatch.by_rule import chosen
from profharness.commands.analyze.figures import PREDICTED, CellAnalysis, Remedy
from profharness.commands.explain.calls import RunConfigs
from profharness.commands.explain.faster import (
    faster_changes,
    faster_config_text,
    faster_configs,
    faster_text,
)
from profharness.commands.explain.savings import Change
from profharness.commands.layers.answer import advised_text, idle_time, told_change
from profharness.program.layer_map import LayerMap

OF_THE_CALL = ("launch_gap",)
"""Findings that do not describe the kernels of a call, so they apply to any backend."""


@dataclass(frozen=True, slots=True)
class ProgramChange:
    """A change that `layers`, `bench` or `explain` advises, and what the calls run after it."""

    text: str
    speed_up: float | None
    """The predicted speed-up of a call, or None if it is unknown."""
    other_backend: bool
    """Whether another backend then computes the calls."""
    assumes_release: bool
    """Whether the change depends on a PyTorch release that the run does not record."""
    assumes: str = ""
    """A sentence on what the predicted saving assumes, or ""."""


Changes = dict[tuple[str | None, str | None], ProgramChange]
"""The changes by the config of the calls and the backend that ran."""


def program_changes(layers: LayerMap) -> Changes:
    """Return the changes that `layers` advises."""
    changes: Changes = {}
    if told := told_change(layers):
        text = _told_text(told)
        for row in told.rows:
            changes[row.config, row.ran] = ProgramChange(
                text,
                None,
                True,
                bool(layers.assumed) and row.kind != "eager",
                told.assumes,
            )
    for answer, way in faster_changes(layers):
        changes.setdefault(
            (answer.config, answer.observed),
            ProgramChange(
                faster_text(layers, answer, way),
                way.speed_up,
                way.backend != answer.observed,
                bool(layers.assumed),
            ),
        )
    return changes


def _told_text(told: Change) -> str:
    text = advised_text(told)
    return f"{text[0].upper()}{text[1:]}."


def launch_limit(layers: LayerMap, analyses: Sequence[CellAnalysis]) -> str:
    """Return the sentence of `layers` on a GPU that waits for the CPU to launch kernels, or ""."""
    told = told_change(layers)
    given = {remedy.text for each in analyses for remedy in each.remedies}
    idle = idle_time(layers, told if told and _told_text(told) in given else None)
    return idle.sentence if idle and idle.remedy else ""


def config_changes(run: RunConfigs) -> Changes:
    """Return the changes that `bench` advises for the configs of a run of `capture`."""
    several = len(run.configs) > 1
    return {
        (answer.config, chosen(answer)): ProgramChange(
            faster_config_text(way, answer.config if several else ""),
            way.speed_up,
            way.backend != chosen(answer),
            False,
        )
        for answer, way in faster_configs(run)
    }


def with_change(analysis: CellAnalysis, change: ProgramChange | None) -> CellAnalysis:
    """Return the analysis with a change as its first remedy.

    If another backend then computes the calls, leave out the remedies for the kernels that ran,
    except for a backend that was measured to be faster. Cells without usable times get no change.
    """
    if change is None or analysis.figures is None or analysis.busy:
        return analysis
    kept = [
        each
        for each in analysis.remedies
        if not change.other_backend or each.measured or set(each.findings) <= set(OF_THE_CALL)
    ]
    replaced = [code for each in analysis.remedies if each not in kept for code in each.findings]
    first = Remedy(change.text, tuple(dict.fromkeys(replaced)), change.speed_up, PREDICTED)
    return replace(analysis, remedies=(first, *kept))
