"""`profharness export`: a stored run as a Chrome trace."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.cli._options import file_options, store_option
from profharness.cli._output import hint, quiet_stdout
from profharness.files import check_output


@click.command()
@click.argument("run")
@file_options
@store_option
def command(run: str, output: Path | None, force: bool, store: Path) -> None:
    """Write a run as a Chrome trace, whatever profiler made it.

    The file opens in Perfetto, chrome://tracing and HolisticTraceAnalysis: a track per cell with
    its kernels and all that is known of each launch, the ranges and launch calls on the tracks of
    their threads. A name that ends in .gz is compressed; without -o the trace goes to stdout as
    plain JSON.

    \b
    Example:
      profharness export latest -o trace.json.gz
    """
    from profharness.exports import write_run, write_run_file
    from profharness.store import open_store

    check_output(output, force=force)
    with open_store(store) as opened:
        name = opened.resolve(run)
        if output is None:
            with quiet_stdout() as stream:
                write_run(opened, name, stream)
            return
        launches = write_run_file(opened, name, output, force=force)
    hint(f"wrote {output}: {launches:,} launches of run {name}")
