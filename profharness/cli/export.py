"""`profharness export`: a stored run as a Chrome trace."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import click

from profharness.cli._options import file_options, store_option
from profharness.cli._output import atomic_file, check_output, hint, quiet_stdout

if TYPE_CHECKING:
    from profharness.store import Store


@click.command()
@click.argument("run")
@file_options
@store_option
def command(run: str, output: Path | None, force: bool, store: Path) -> None:
    """Write a run as a Chrome trace, whatever profiler made it.

    The file opens in Perfetto, chrome://tracing and HolisticTraceAnalysis: a track per cell with
    its kernels and all that is
    known of each launch, the ranges and launch calls on the tracks of their threads. A name that
    ends in .gz is compressed;
    without -o the trace goes to stdout as plain JSON.

    \b
    Example:
      profharness export latest -o trace.json.gz
    """
    from profharness.store import open_store

    check_output(output, force=force)
    with open_store(store) as opened:
        name = opened.resolve(run)
        if output is None:
            with quiet_stdout() as stream:
                _write(opened, name, stream)
            return
        with atomic_file(output, force=force) as file:
            launches = _write_file(opened, name, file, compress=output.suffix == ".gz")
    hint(f"wrote {output}: {launches:,} launches of run {name}")


def _write_file(store: Store, run: str, file: IO[bytes], *, compress: bool) -> int:
    if not compress:
        return _write(store, run, file)
    from isal import igzip

    # No time stamp and no name inside, so that the same run gives the same bytes.
    with igzip.GzipFile(filename="", mode="wb", compresslevel=2, fileobj=file, mtime=0) as packed:
        return _write(store, run, cast("IO[bytes]", packed))


def _write(store: Store, run: str, out: IO[bytes]) -> int:
    from profharness.report.chrome import Section, write_chrome_trace

    ranges = store.ranges(run)
    profilers = next(row.profilers for row in store.runs() if row.run == run)
    sections = (
        Section(
            store.launches(run, profiler=profiler),
            [each for each in ranges if each.profiler == profiler],
        )
        for profiler in profilers
    )
    return write_chrome_trace(
        out,
        sections,
        devices=store.devices(run),
        properties={"traceName": f"profharness run {run}"},
    )
