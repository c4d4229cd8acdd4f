"""`profharness export`: a stored run as a Chrome trace."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.answers.export import choose_profilers, find_exported, write_run, write_run_file
from profharness.cli._options import complete_runs, file_options, hint, quiet_stdout, store_option
from profharness.store import open_store


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option(
    "--profiler",
    metavar="NAME",
    help="Whose part of the run: torch, nsys, ncu, or all.  [default: the first of these there is]",
)
@file_options
@store_option
def command(run: str, profiler: str | None, output: Path | None, force: bool, store: Path) -> None:
    """Write a run as a Chrome trace, whatever profiler made it.

    The file opens in Perfetto, chrome://tracing and HolisticTraceAnalysis: a track per cell with
    its kernels, and with each launch its resources, theoretical occupancy, op stack and ncu's
    counters. On the tracks of their threads stand the ranges, the launch calls, and the ops that
    launched something; the store keeps no times of ops, so one lasts from its first launch to its
    last. A name that ends in .gz is compressed; without -o the trace goes to stdout as plain JSON.

    Each profiler of a run has a clock of its own; with `--profiler all` each has processes of its
    own in the file, and all begin at 0.

    \b
    Example:
      profharness export latest -o trace.json.gz
    """
    with open_store(store) as opened:
        name = find_exported(opened, run, profiler)
        chosen = choose_profilers(opened, name, profiler)
        # each profiler saw the run by its own clock, so one is shown unless all are named
        others = set(choose_profilers(opened, name, "all")) - set(chosen)
        if others and profiler is None:
            hint(
                f"this is what {chosen[0]} saw; --profiler {'|'.join(sorted(others))}|all for more"
            )
        if output is None:
            with quiet_stdout() as stream:
                write_run(opened, name, stream, chosen)
            return
        launches = write_run_file(opened, name, output, force=force, profiler=profiler)
    hint(f"wrote {output}: {launches:,} launches of run {name}")
