"""`profharness lane`: what a task of an array job does in the folder of a campaign."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.cli._options import hint
from profharness.errors import UsageError
from profharness.jobs.campaign import is_campaign
from profharness.jobs.slurm import Task


@click.command()
@click.argument("campaign", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--index",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="With which group to begin; each task of an array has another one.",
)
def command(campaign: Path, index: int) -> None:
    """Run groups of a campaign until none is left that no other lane works on.

    CAMPAIGN is the folder that `--scheduler slurm:FILE` has made, on storage that all hosts see.
    The lane is the first visible GPU. Groups whose lane has died are taken over.

    \b
    Example:
      profharness lane traces/runs/20261122-201500-ab12 --index 3
    """
    if not is_campaign(campaign):
        raise UsageError(f"{campaign}: not the folder of a campaign; name one")
    task = Task(campaign, index, hint)
    run = task.carry_out()
    hint(f"this lane has run {task.done} group(s)" + (f"; run {run.run} is whole" if run else ""))
