"""`profharness diff`: compare two backends of a run, or two runs, kernel by kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from profharness import stats
from profharness.attention.config import split_names
from profharness.commands._command import command, declaration_of, document, gate
from profharness.commands._options import Option, one_of
from profharness.commands._output import hint
from profharness.commands._types import (
    Configs,
    Store,
    complete_sides,
    config_list,
    store_path,
    threshold_option,
)
from profharness.commands.diff.compare import (
    BACKEND_CHANGED,
    COSTS,
    Diff,
    Side,
    diff_cells,
    find_sides,
    nothing_compared,
)
from profharness.commands.diff.tables import FIELDS, cost_text, diff_document, layer_text
from profharness.errors import GateError, NotFoundError
from profharness.program.changes import VERDICTS
from profharness.render.document import Document
from profharness.store import frame, open_store

if TYPE_CHECKING:
    import pandas as pd

Baseline = Annotated[
    str,
    Option(
        complete=complete_sides,
        tool="A run, RUN:BACKEND, or a backend in the latest run that has both.",
        tool_examples=("latest~1", "latest:flash", "flash"),
    ),
]
Candidate = Annotated[
    str,
    Option(
        complete=complete_sides,
        tool="Compared with the baseline; the same forms.",
        tool_examples=("latest", "math"),
    ),
]
THRESHOLD_HELP = "The smallest relative change of a time that counts."
Threshold = Annotated[float | None, threshold_option(THRESHOLD_HELP, THRESHOLD_HELP)]
FailOn = Annotated[
    tuple[str, ...],
    Option(
        ("--fail-on",),
        multiple=True,
        metavar="VERDICT",
        check=one_of((*VERDICTS, *COSTS, BACKEND_CHANGED), "--fail-on"),
        help="Exit 3 if a row has this verdict: slower, changed, removed, …; if the candidate uses more "
        "memory or launches, or refuses what the baseline runs: memory, launches, refused; for programs, "
        "if another backend computes a layer: backend-changed. Repeatable, or separated by commas.",
    ),
]
Full = Annotated[bool, Option(("--full",), help="Show full kernel names.")]


Comparison = tuple[Diff, tuple[Side, Side]]
"""A diff and the two sides that it compares."""


def to_frame(comparison: Comparison) -> pd.DataFrame:
    """Return the paired rows."""
    record = comparison[0].to_json()
    rows = frame(list(record["rows"]), list(FIELDS))
    rows.attrs |= {name: list(record.get(name, ())) for name in ("environment", "layers", "costs")}
    return rows


@command(
    "diff",
    frame=to_frame,
    tool="Use it to find what changed, or which backend is faster on what was measured.",
)
def diff(
    baseline: Baseline,
    candidate: Candidate,
    *,
    configs: Configs = None,
    threshold: Threshold = stats.THRESHOLD,
    store: Store = None,
) -> Comparison:
    """Compare two backends of a run, or two runs.

    BASELINE and CANDIDATE are each a run (an id, a unique prefix, latest or latest~1), RUN:BACKEND,
    or a backend in the latest run that has all the backends named. Kernels are paired by what they
    compute. `ratio` is the candidate's time divided by the baseline's. A gate (--fail-on) fails if
    there is nothing to compare. Traces of two programs are also compared layer by layer.

    \b
    Examples:
      profharness diff flash math --config 2,8,512,64 --fail-on slower
      profharness diff latest~1 latest --fail-on memory,launches,refused
      profharness diff latest~1 latest --fail-on backend-changed

    In Python the result has the paired rows. `attrs["environment"]` has the changes of the environment,
    `attrs["layers"]` the layers of two traced programs, and `attrs["costs"]` peak memory, launches and
    refusals of both sides.
    """
    with open_store(store_path(store)) as opened:
        sides = find_sides(opened, baseline, candidate, config_list(configs))
    threshold = stats.THRESHOLD if threshold is None else threshold
    return diff_cells(*sides, threshold=threshold), sides


@document(diff)
def show(comparison: Comparison, *, fail_on: FailOn = (), full: Full = False) -> Document:
    """Return the document. Raise NotFoundError if there is nothing to compare and no gate."""
    found, sides = comparison
    if not found.rows and not found.layers and not fail_on:
        raise NotFoundError(nothing_compared(found, sides) or "nothing to compare")
    return diff_document(found, full=full)


@gate(diff)
def check(comparison: Comparison, *, fail_on: FailOn = ()) -> None:
    """Raise GateError if a row, cost or layer has one of the verdicts, or none could be compared."""
    found, sides = comparison
    verdicts = frozenset(split_names(fail_on))
    empty = nothing_compared(found, sides, verdicts)
    # the order of a set would differ between processes
    name = f"--fail-on {','.join(sorted(verdicts))}"
    lines = [
        f"{row.config} {row.role}: {'; '.join((row.verdict, *row.reasons))}"
        for row in found.fails(verdicts)
    ]
    lines += [
        f"{row.config} {row.backend_candidate or ''} {row.what}: {cost_text(row)}"
        for row in found.failing_costs(verdicts)
    ]
    lines += [
        f"{row.name}: {'; '.join((layer_text(row), *row.reasons))}"
        for row in found.failing_layers(verdicts)
    ]
    if lines:
        lines += [empty] if empty else []
        raise GateError(f"{name} is met: " + "\n  ".join(lines))
    if empty and verdicts:
        raise GateError(f"{name}: {empty}")
    if empty:
        hint(f"warning: {empty}")


DECLARATION = declaration_of(diff)
