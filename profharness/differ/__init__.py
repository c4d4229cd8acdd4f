"""What changed between two backends of a run, or between two runs: kernels paired by role."""

from profharness.differ.environment import environment_changes
from profharness.differ.model import (
    SCHEMA,
    VERDICTS,
    Change,
    Diff,
    DiffRow,
    EnvChange,
    Side,
    Verdict,
)
from profharness.differ.pairing import diff_cells

__all__ = [
    "SCHEMA",
    "VERDICTS",
    "Change",
    "Diff",
    "DiffRow",
    "EnvChange",
    "Side",
    "Verdict",
    "diff_cells",
    "environment_changes",
]
