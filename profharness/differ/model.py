"""The frozen pieces of a diff and its JSON form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args

from profharness.rows import CellRow, KernelRow

Verdict = Literal["same", "faster", "slower", "changed", "added", "removed", "unknown"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
SCHEMA = "profharness.diff/1"


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a diff: the rows of one run, as the store gives them. backend narrows them to
    one backend's.

    cells may be empty (a foreign trace); kernels without a config are then grouped by their range.
    """

    label: str
    cells: tuple[CellRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    backend: str | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """One differing property of a row; a tuple of values where a side has several kernels."""

    field: str
    baseline: Any
    candidate: Any


@dataclass(frozen=True, slots=True)
class EnvChange:
    """One differing key of the environments; explains says what such a change can do, None where
    it does nothing known."""

    key: str
    baseline: Any
    candidate: Any
    explains: str | None


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One role of one config on both sides; role is `call`, `status`, or one of roles.ROLES.

    A row of role attention or attention_bwd that holds a fused kernel on one side and the math
    kernels on the other is composite.
    baseline_ns and candidate_ns are per call, ratio is candidate over baseline; all None where
    unknown. basis says what was
    timed (`graph event wall` of unprofiled samples, or `profiler launches`). changed: another
    kernel, tile, grid, block, shared
    memory, registers, launch count or status; the verdict names it only where the time says
    neither slower nor faster.
    """

    config: str
    backend_baseline: str | None
    backend_candidate: str | None
    role: str
    baseline: tuple[KernelRow, ...]
    candidate: tuple[KernelRow, ...]
    ratio: float | None
    verdict: Verdict
    reasons: tuple[str, ...]
    changes: tuple[Change, ...]
    changed: bool = False
    composite: bool = False
    baseline_ns: float | None = None
    candidate_ns: float | None = None
    basis: str | None = None


@dataclass(frozen=True, slots=True)
class Diff:
    """All rows, configs in the baseline's order, and the differences of the environments,
    explaining ones first."""

    baseline: str
    candidate: str
    environment: tuple[EnvChange, ...]
    rows: tuple[DiffRow, ...]

    def verdicts(self) -> Counter[str]:
        """How many rows have each verdict."""
        return Counter(row.verdict for row in self.rows)

    def fails(self, on: Set[str]) -> list[DiffRow]:
        """The rows whose verdict is in on; `changed` also meets rows that are changed and slower
        or faster."""
        return [row for row in self.rows if row.verdict in on or (row.changed and "changed" in on)]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars under schema `profharness.diff/1`."""
        return {
            "schema": SCHEMA,
            "baseline": self.baseline,
            "candidate": self.candidate,
            "environment": [plain(change) for change in self.environment],
            "rows": [plain(row) for row in self.rows],
        }


def plain(value: Any) -> Any:
    """A value as JSON knows it: dataclasses and mappings as dicts, sequences as lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
