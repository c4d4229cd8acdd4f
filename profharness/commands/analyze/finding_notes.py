"""Show the findings, remedies and advice of an analysis."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from profharness.columns import Column
from profharness.commands.analyze.figures import CellAnalysis, Evidence, Finding, Remedy
from profharness.commands.analyze.merge_findings import common_findings, common_remedies
from profharness.commands.analyze.scenarios import LITTLE_MEMORY, choices, missing_scenarios
from profharness.render.document import Block, Heading, Note, Table, status_note

EVIDENCE_SHOWN = 4
MIB = 1 << 20
ADVICE_COLUMNS = (
    Column("scenario", "for", repeat=False),
    Column("config", "config", shrink=True),
    Column("best", "best"),
    Column("value", "median", right=True),
    Column("measurement", "of"),
    Column("runner_up", "next"),
    Column("factor", "next / best", "ratio"),
)
Covered = Set[tuple[str, str, object]]
"""Run, cell, and the finding or remedy that is told for several configs at once."""


def evidence_text(evidence: Sequence[Evidence], shown: int | None = None) -> str:
    """Format the first `shown` pieces of evidence as `name value unit (source); …`."""
    parts = [
        f"{item.name} {_value(item.value)}{' ' + item.unit if item.unit else ''} ({item.source})"
        for item in evidence[:shown]
    ]
    return "; ".join(parts)


def _value(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else f"{value:,}"


def shown_findings(analysis: CellAnalysis, *, full: bool) -> list[Finding]:
    """Return the findings to show for a cell: with `full`, all that the bottleneck does not repeat."""
    named = analysis.finding("bottleneck")
    if named is None:
        return [each for each in analysis.findings if full or each.severity != "note"]
    return [
        each
        for each in analysis.findings
        if each is named
        or (
            each.sentence not in named.sentence
            and (full or (each.severity != "note" and each.evidence != named.evidence))
        )
    ]


def cell_notes(
    analysis: CellAnalysis, label: str, *, full: bool, covered: Covered = frozenset()
) -> list[Note]:
    """Return the notes on one cell, without those that are covered by another section."""
    if analysis.status != "ok":
        return [status_note(analysis.status, analysis.message or "no reason recorded", label)]
    place = (analysis.run, analysis.cell)
    notes = [
        _finding_note(finding, label, full=full)
        for finding in shown_findings(analysis, full=full)
        if (*place, finding) not in covered
    ]
    notes += [
        _remedy_note(remedy, f"{label}, remedy {rank}")
        for rank, remedy in enumerate(analysis.remedies, start=1)
        if (*place, remedy) not in covered
    ]
    return notes


def _finding_note(finding: Finding, label: str, *, full: bool) -> Note:
    evidence = evidence_text(finding.evidence, None if full else EVIDENCE_SHOWN)
    level = "warning" if finding.severity == "major" else "note"
    return Note(f"{finding.sentence} [{finding.grade}: {evidence}]", label, level)


def _at(where: str, note: Note) -> Note:
    return replace(note, text=f"{where}: {note.text}")


def _remedy_note(remedy: Remedy, label: str, measured: str = "Measured:") -> Note:
    most = measured if remedy.findings == ("faster_backend",) else "At most"
    gain = f" {most} {remedy.factor:.2f} times faster." if remedy.factor else ""
    return Note(f"{remedy.text}{gain} [{', '.join(remedy.findings)}]", label)


def common_blocks(analyses: Sequence[CellAnalysis]) -> tuple[list[Block], Covered]:
    """Return a section on what cells of several configs have in common, and what it covers."""
    findings = common_findings(
        [(each, item) for each in analyses for item in shown_findings(each, full=False)]
    )
    remedies = common_remedies([(each, item) for each in analyses for item in each.remedies])
    covered: set[tuple[str, str, object]] = set()
    for members in (*(each.members for each in findings), *(each.members for each in remedies)):
        covered |= {(cell.run, cell.cell, item) for cell, item in members}
    notes = [
        _at(each.where, _finding_note(each.item, each.item.code, full=False)) for each in findings
    ]
    notes += [_at(each.where, _remedy_note(each.item, "remedy", "Up to")) for each in remedies]
    return ([Heading("In several configs"), *notes] if notes else []), covered


def advice_blocks(analyses: Sequence[CellAnalysis]) -> list[Block]:
    """Return which backend is best for what, judged by these cells, or what to capture to find out.

    Empty if no config has several backends.
    """
    made = choices(analyses)
    if not made:
        return []
    rows = [
        (
            choice.scenario,
            choice.config.label,
            ", ".join(choice.best),
            f"{choice.value / MIB:,.1f} MiB"
            if choice.scenario == LITTLE_MEMORY
            else f"{choice.value / 1e3:,.2f} µs",
            choice.measurement,
            choice.runner_up,
            choice.factor,
        )
        for choice in made
    ]
    notes = [
        Note(f"no such config here; `profharness capture --config {example}` makes one", scenario)
        for scenario, example in missing_scenarios(analyses).items()
    ]
    return [Heading("Best backend for"), Table(ADVICE_COLUMNS, tuple(rows)), *notes]
