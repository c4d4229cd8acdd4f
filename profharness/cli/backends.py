"""`profharness backends`: what can run here, and why not the others."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.cli._options import emit, output_options
from profharness.views.doctor import backends_document


@click.command()
@output_options
def command(format_: str | None, output: Path | None, force: bool) -> None:
    """List what can run here, and why not the others.

    Every backend is tried on one small config in a worker process, so the answer is what happens,
    not what should. Implementations of your own count if they are in kernels/ or offered by an
    installed package (entry points of the group profharness.backends).

    \b
    Example:
      profharness backends --format json
    """
    # loads what starts workers, which --help does not need
    from profharness.runner.probe import probe_backends

    emit(backends_document(probe_backends()), format_, output, force=force)
