"""Progress of a capture on stderr: a bar on a terminal, a line per finished cell elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from profharness.run import Cell
    from profharness.runner.book import Progress


@contextlib.contextmanager
def capture_progress() -> Iterator[Progress]:
    """A `Progress` for `capture`; with the current cell and the time left where stderr is a
    terminal.
    """
    if not sys.stderr.isatty():
        yield _line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import (
        Progress as Bar,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting the worker", total=None)

        def show(done: int, total: int, cell: Cell, stage: str) -> None:
            if _told_ending(stage):
                return
            bar.update(
                task,
                completed=done,
                total=total,
                description=f"{cell.config} {cell.backend}: {stage}",
            )

        yield show


def _line(done: int, total: int, cell: Cell, stage: str) -> None:
    if not _told_ending(stage) and cell.status != "pending" and stage == cell.status:
        click.echo(f"[{done}/{total}] {cell.config} {cell.backend}: {stage}", err=True)


def _told_ending(stage: str) -> bool:
    """What the user has to wait for at the end is a line of its own."""
    from profharness.runner.book import ENDING

    if stage.startswith(ENDING):
        click.echo(stage, err=True)
        return True
    return False
