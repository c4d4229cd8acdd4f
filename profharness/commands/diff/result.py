"""The records of a diff and their JSON form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from profharness.program.changes import EnvChange, Verdict
from profharness.program.matching import LayerDiff, Program
from profharness.rows import CellRow, KernelRow

BACKEND_CHANGED = "backend-changed"
"""The gate's name for a layer that another backend computes."""
CostVerdict = Literal["same", "more", "less", "refused", "accepted"]
COSTS = MEMORY, LAUNCHES, REFUSED = "memory", "launches", "refused"
"""The gate's names for a candidate that needs more memory or launches, or refuses what the baseline
runs.
"""
SCHEMA = "profharness.diff/1"


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a diff. Kernels without a config are grouped by their range."""

    label: str
    cells: tuple[CellRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    backend: str | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    program: Program | None = None  # the calls of a run that is no capture


@dataclass(frozen=True, slots=True)
class Change:
    """A property of a row that differs. A tuple of values if a side has several kernels."""

    field: str
    baseline: Any
    candidate: Any


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One role of one config on both sides. Times are ns per call."""

    config: str
    backend_baseline: str | None
    backend_candidate: str | None
    role: str  # `call`, `status`, a role of answers/roles, or `kernels` for their sum
    baseline: tuple[KernelRow, ...] = ()
    candidate: tuple[KernelRow, ...] = ()
    ratio: float | None = None  # candidate over baseline
    verdict: Verdict = "unknown"
    reasons: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    # The kernels' identity, launch properties or status differ, whatever the verdict on the time.
    changed: bool = False
    composite: bool = False  # a fused kernel on one side, math kernels on the other
    baseline_ns: float | None = None
    candidate_ns: float | None = None
    basis: str | None = None  # what was timed


@dataclass(frozen=True, slots=True)
class Cost:
    """One of COSTS of one config on both sides."""

    config: str
    backend_baseline: str | None
    backend_candidate: str | None
    what: str
    baseline: float | str  # bytes at the peak, launches per call, or how the cell ended
    candidate: float | str
    verdict: CostVerdict  # `accepted`: only the baseline refuses
    ratio: float | None = None  # candidate over baseline


@dataclass(frozen=True, slots=True)
class Diff:
    """All rows in the order of the baseline's configs, and the differences of the environments."""

    baseline: str
    candidate: str
    environment: tuple[EnvChange, ...]
    rows: tuple[DiffRow, ...]
    layers: tuple[LayerDiff, ...] = ()  # of two programs with attention calls
    # Both sides record their PyTorch. A trace alone records little, so that its lack of differences
    # is no evidence.
    environment_told: bool = True
    costs: tuple[Cost, ...] = ()

    def verdicts(self) -> Counter[str]:
        """Count the rows per verdict."""
        return Counter(row.verdict for row in self.rows)

    def fails(self, on: Set[str]) -> list[DiffRow]:
        """Return the rows whose verdict is in `on`. `changed` also matches changed rows with
        another verdict.
        """
        return [row for row in self.rows if row.verdict in on or (row.changed and "changed" in on)]

    def failing_costs(self, on: Set[str]) -> list[Cost]:
        """Return the costs in `on` that are higher on the candidate or refused only there."""
        return [row for row in self.costs if row.what in on and row.verdict in ("more", REFUSED)]

    def failing_layers(self, on: Set[str]) -> list[LayerDiff]:
        """Return the layers whose verdict or speed is in `on`. BACKEND_CHANGED matches those of
        another backend.
        """
        return [
            row
            for row in self.layers
            if row.verdict in on
            or (row.speed in on and row.baseline and row.candidate)
            or (row.backend_changed and BACKEND_CHANGED in on)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars under schema `profharness.diff/1`. `layers` and
        `costs` are left out if empty, `environment_told` if true.
        """
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self, enc_hook=str))
        for name in ("layers", "costs"):
            if not plain[name]:
                del plain[name]
        if self.environment_told:
            del plain["environment_told"]
        return {"schema": SCHEMA, **plain}
