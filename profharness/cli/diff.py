"""`profharness diff`: two backends of a run, or two runs, kernel by kernel."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import click

from profharness import stats
from profharness.answers.diff.answer import diff_cells
from profharness.answers.diff.model import BACKEND_CHANGED, COSTS, VERDICTS, Diff
from profharness.answers.diff.sides import find_sides, nothing_compared
from profharness.cli._options import (
    FiniteRange,
    complete_sides,
    config_options,
    emit,
    hint,
    output_options,
    read_configs,
    store_option,
)
from profharness.config import split_names
from profharness.errors import GateError, NotFoundError, UsageError
from profharness.store import open_store
from profharness.views.diff import cost_text, diff_document, layer_text


@click.command()
@click.argument("baseline", shell_complete=complete_sides)
@click.argument("candidate", shell_complete=complete_sides)
@config_options
@click.option(
    "--fail-on",
    multiple=True,
    metavar="VERDICT",
    help="Exit 3 if a row has this verdict: slower, changed, removed, …; if the candidate takes more "
    "memory or launches, or has refused what the baseline runs: memory, launches, refused; or, of "
    "programs, if another backend computes a layer: backend-changed. Repeatable, or by commas.",
)
@click.option(
    "--threshold",
    type=FiniteRange(0, min_open=True),
    default=stats.THRESHOLD,
    help="The smallest relative change of a time that counts.  [default: 0.03]",
)
@click.option("--full", is_flag=True, help="Whole kernel names.")
@output_options
@store_option
def command(
    baseline: str,
    candidate: str,
    config: tuple[str, ...],
    configs_file: Path | None,
    fail_on: tuple[str, ...],
    threshold: float,
    full: bool,
    format_: str | None,
    output: Path | None,
    force: bool,
    store: Path,
) -> None:
    """Compare two backends of a run, or two runs.

    BASELINE and CANDIDATE are each a run (an id, a unique prefix, latest, latest~1), RUN:BACKEND,
    or the name of a backend in the latest run that has all the backends named. Kernels are paired by
    what they compute; ratio is the candidate's time over the baseline's. A gate (--fail-on) for which
    there is nothing to compare is not met. Traces of two programs are compared layer by layer too.

    \b
    Examples:
      profharness diff flash math --config 2,8,512,64 --fail-on slower
      profharness diff latest~1 latest --fail-on memory,launches,refused
      profharness diff latest~1 latest --fail-on backend-changed
    """
    verdicts = frozenset(split_names(fail_on))
    for name in split_names(fail_on):
        if name not in (*VERDICTS, *COSTS, BACKEND_CHANGED):
            names = ", ".join((*VERDICTS, *COSTS, BACKEND_CHANGED))
            raise UsageError(f"--fail-on {name!r}: not one of {names}")
    configs = read_configs(config, configs_file)
    with open_store(store) as opened:
        sides = find_sides(opened, baseline, candidate, configs)
    diff = diff_cells(*sides, threshold=threshold)
    empty = nothing_compared(diff, sides, verdicts)
    if not diff.rows and not diff.layers and not verdicts:
        raise NotFoundError(empty or "nothing to compare")
    # before the gates, so that one that fails still has its rows to look at
    emit(diff_document(diff, full=full), format_, output, force=force)
    # a set's order would differ from run to run
    gate = f"--fail-on {','.join(sorted(verdicts))}"
    lines = _failing(diff, verdicts)
    if lines:
        lines += [empty] if empty else []
        raise GateError(f"{gate} is met: " + "\n  ".join(lines))
    if empty and verdicts:
        raise GateError(f"{gate}: {empty}")
    if empty:
        hint(f"warning: {empty}")


def _failing(diff: Diff, verdicts: Set[str]) -> list[str]:
    """A line for each row, cost and layer that a gate is about."""
    lines = [
        f"{row.config} {row.role}: {'; '.join((row.verdict, *row.reasons))}"
        for row in diff.fails(verdicts)
    ]
    lines += [
        f"{row.config} {row.backend_candidate or ''} {row.what}: {cost_text(row)}"
        for row in diff.failing_costs(verdicts)
    ]
    lines += [
        f"{row.name}: {'; '.join((layer_text(row), *row.reasons))}"
        for row in diff.failing_layers(verdicts)
    ]
    return lines
