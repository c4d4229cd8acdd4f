"""`profharness ranks`: the ranks of a job, held against each other."""

from __future__ import annotations

from pathlib import Path

import click

from profharness import stats
from profharness.answers.ranks import compare_ranks
from profharness.answers.ranks.model import CODES
from profharness.cli._options import FiniteRange, complete_runs, emit, output_options, store_option
from profharness.config import split_names
from profharness.errors import GateError, UsageError
from profharness.store import open_store
from profharness.views.ranks import ranks_document

ANY = "any"


@click.command()
@click.argument("runs", metavar="[RUN_OR_FOLDER]...", nargs=-1, shell_complete=complete_runs)
@click.option(
    "--threshold",
    type=FiniteRange(0, min_open=True),
    default=stats.THRESHOLD,
    help="How much longer kernels must take to be called slow.  [default: 0.03]",
)
@click.option(
    "--fail-on",
    multiple=True,
    metavar="FINDING",
    help="Exit 3 on a finding: slow-gpu, other-attention, … or any. Repeatable, or by commas.",
)
@click.option("--full", is_flag=True, help="Every rank of a large job, not those set apart first.")
@output_options
@store_option
def command(
    runs: tuple[str, ...],
    threshold: float,
    fail_on: tuple[str, ...],
    full: bool,
    format_: str | None,
    output: Path | None,
    force: bool,
    store: Path,
) -> None:
    """Compare the ranks of a job: which GPU is slow, which rank ran something else.

    Kernels are held against the same kernel with the same grid in the same range on the other ranks,
    collectives left out: where all wait for one GPU, its own kernels still show it. A run stands for
    the job that it is of: the traces beside it that tell as many ranks. Without one it is the newest job.

    \b
    {codes}

    \b
    Examples:
      profharness ingest traces/step100 --scheduler local && profharness ranks
      profharness ranks traces/step100 --fail-on slow-gpu,other-attention
    """
    gates = split_names(fail_on)
    for name in gates:
        if name not in (*CODES, ANY):
            raise UsageError(f"--fail-on {name!r}: not one of {', '.join((*CODES, ANY))}")
    with open_store(store) as opened:
        answer = compare_ranks(opened, runs, threshold)
    emit(ranks_document(answer, full=full), format_, output, force=force)
    met = [each for each in answer.findings if each.code in gates or ANY in gates]
    if met:
        lines = [f"{each.code}: {', '.join(each.ranks)}: {each.sentence}" for each in met]
        raise GateError(f"--fail-on {','.join(gates)} is met: " + "\n  ".join(lines))


_WIDTH = max(map(len, CODES))
_LINES = "\n    ".join(f"{code:{_WIDTH}}  {text}" for code, text in CODES.items())
command.help = (command.help or "").replace("{codes}", _LINES)
