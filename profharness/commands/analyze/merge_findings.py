"""Merge findings and remedies that several configs share. Figures that differ become ranges."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from profharness.attention.config import Config
from profharness.commands.analyze.figures import CellAnalysis, Evidence, Finding, Remedy

# A number on its own. Digits inside a kernel's name or a dtype do not match.
NUMBER = re.compile(r"(?<![\w<>,.x-])(\d[\d,]*(?:\.\d+)?)(?![\w<>,x])")
SEVERAL = 2  # number of configs from which a finding is merged


Item = TypeVar("Item", Finding, Remedy)


@dataclass(frozen=True, slots=True)
class Common(Generic[Item]):
    """A finding or remedy shared by cells of several configs."""

    item: Item  # figures in its texts are ranges over members
    members: tuple[tuple[CellAnalysis, Item], ...]

    @property
    def where(self) -> str:
        """Return text such as `naive, single_query at 4 configs`."""
        configs: dict[str, set[tuple[str, Config]]] = {}
        for analysis, _ in self.members:
            configs.setdefault(analysis.backend, set()).add((analysis.run, analysis.config))
        backends: dict[int, list[str]] = {}
        for backend, seen in configs.items():
            backends.setdefault(len(seen), []).append(backend)
        return "; ".join(
            f"{', '.join(names)} at {count} config{'s' * (count != 1)}"
            for count, names in backends.items()
        )


def common_findings(pairs: Iterable[tuple[CellAnalysis, Finding]]) -> list[Common[Finding]]:
    """Return the findings that cells of several configs share. Their texts differ in figures only."""
    return _common(pairs, _finding_form, _merged_finding)


def common_remedies(pairs: Iterable[tuple[CellAnalysis, Remedy]]) -> list[Common[Remedy]]:
    """Return the remedies that cells of several configs share, each with its largest gain."""
    return _common(pairs, lambda remedy: (remedy.text, remedy.findings), _merged_remedy)


def _common(
    pairs: Iterable[tuple[CellAnalysis, Item]],
    form: Callable[[Item], tuple[object, ...]],
    merged: Callable[[Sequence[Item]], Item],
) -> list[Common[Item]]:
    groups: dict[tuple[object, ...], list[tuple[CellAnalysis, Item]]] = {}
    for analysis, item in pairs:
        groups.setdefault(form(item), []).append((analysis, item))
    return [
        Common(merged([item for _, item in group]), tuple(group))
        for group in groups.values()
        if len({analysis.config for analysis, _ in group}) >= SEVERAL
    ]


def _finding_form(finding: Finding) -> tuple[object, ...]:
    """Return everything of a finding except its figures, as a key."""
    names = tuple((item.name, item.unit, item.source) for item in finding.evidence)
    return (finding.code, finding.severity, finding.grade, NUMBER.sub("#", finding.sentence), names)


def _merged_finding(findings: Sequence[Finding]) -> Finding:
    evidence = tuple(map(_merged_evidence, zip(*(each.evidence for each in findings), strict=True)))
    sentence = merged_text([each.sentence for each in findings])
    return replace(findings[0], sentence=sentence, evidence=evidence)


def _merged_evidence(items: tuple[Evidence, ...]) -> Evidence:
    values = [item.value for item in items]
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values):
        texts = dict.fromkeys(str(value) for value in values)
        return replace(items[0], value=", ".join(texts))
    low, high = min(numbers), max(numbers)
    return replace(items[0], value=low if low == high else f"{low:,.10g} to {high:,.10g}")


def _merged_remedy(remedies: Sequence[Remedy]) -> Remedy:
    return max(remedies, key=lambda remedy: remedy.factor or 0)


def merged_text(texts: Sequence[str]) -> str:
    """Merge texts that differ in their figures only. A figure that varies becomes `low to high`."""
    columns = list(zip(*(NUMBER.findall(text) for text in texts), strict=True))
    ranges = iter(map(_range, columns))
    return NUMBER.sub(lambda _: next(ranges), texts[0])


def _range(numbers: tuple[str, ...]) -> str:
    ranked = sorted(numbers, key=lambda number: float(number.replace(",", "")))
    return ranked[0] if ranked[0] == ranked[-1] else f"{ranked[0]} to {ranked[-1]}"
