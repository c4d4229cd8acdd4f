"""`profharness runs`: what is stored."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.cli._options import emit, hint, output_options, store_option
from profharness.store import open_store
from profharness.views.runs import runs_document


@click.command()
@click.option(
    "--delete",
    "deleted",
    multiple=True,
    is_eager=True,  # known before -o is checked
    metavar="RUN",
    help="Delete a run. Repeatable.",
)
@output_options
@store_option
def command(
    deleted: tuple[str, ...],
    format_: str | None,
    output: Path | None,
    force: bool,
    store: Path,
) -> None:
    """List what is stored, the newest run first.

    --delete takes a run out of the store; its run folder and traces stay, and `ingest` brings it
    back.

    \b
    Example:
      profharness runs --format json
    """
    if deleted:
        with open_store(store, write=True) as opened:
            # All are looked up before the first one goes, so that `latest~1` means one run.
            for run in dict.fromkeys([opened.resolve(ref) for ref in deleted]):
                opened.delete_run(run)
                hint(f"deleted {run}")
        return
    with open_store(store) as opened:
        rows = opened.runs()
    if not rows:
        hint(f"{store} holds no runs; `profharness capture` or `profharness ingest FILE` makes one")
    emit(runs_document(rows), format_, output, force=force)
