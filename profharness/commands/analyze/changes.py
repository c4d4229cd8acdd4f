"""Add the changes that `layers` advises to the analysis of a program's calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from profharness.commands.analyze.figures import PREDICTED, CellAnalysis, Remedy
from profharness.commands.explain.faster import faster_changes, faster_text
from profharness.commands.layers.answer import advised_text, told_change
from profharness.program.layer_map import LayerMap

OF_THE_CALL = ("launch_gap",)
"""Findings that do not describe the kernels of a call, so they apply to any backend."""


@dataclass(frozen=True, slots=True)
class ProgramChange:
    """A change that `layers` advises, and what the calls run after it."""

    text: str
    speed_up: float | None
    """The predicted speed-up of a call, or None if it is unknown."""
    other_backend: bool
    """Whether another backend then computes the calls."""
    assumes_release: bool
    """Whether the change depends on a PyTorch release that the run does not record."""


Changes = dict[tuple[str | None, str | None], ProgramChange]
"""The changes by the config of the calls and the backend that ran."""


def program_changes(layers: LayerMap) -> Changes:
    """Return the changes that `layers` advises."""
    changes: Changes = {}
    if told := told_change(layers):
        text = advised_text(told)
        for row in told.rows:
            changes[row.config, row.ran] = ProgramChange(
                f"{text[0].upper()}{text[1:]}.", None, True, row.kind != "eager"
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


def with_change(analysis: CellAnalysis, change: ProgramChange | None) -> CellAnalysis:
    """Return the analysis with a change as its first remedy.

    If another backend then computes the calls, leave out the remedies for the kernels that ran.
    """
    if change is None:
        return analysis
    kept = [
        each
        for each in analysis.remedies
        if not change.other_backend or set(each.findings) <= set(OF_THE_CALL)
    ]
    replaced = [code for each in analysis.remedies if each not in kept for code in each.findings]
    first = Remedy(change.text, tuple(dict.fromkeys(replaced)), change.speed_up, PREDICTED)
    return replace(analysis, remedies=(first, *kept))
