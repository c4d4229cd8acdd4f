"""`profharness ingest`: take traces and run folders into the store."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import profharness.store as stores
from profharness.cli._options import hint, quiet_stdout, store_option
from profharness.errors import ProfharnessError, shown
from profharness.profilers.nsys import SUFFIX, export_limit_s
from profharness.store import open_store
from profharness.store.sources import find_sources

if TYPE_CHECKING:
    from profharness.store import IngestResult
    from profharness.store.ingest import Progress


@click.command()
@click.argument(
    "sources",
    metavar="FILE_OR_FOLDER...",
    nargs=-1,
    required=True,
    # readable=False: what cannot be read is told with the other sources' failures
    type=click.Path(readable=False, path_type=Path),
)
@click.option(
    "--strict", is_flag=True, help="Exit 1 where anything about a source gives a warning."
)
@store_option
def command(sources: tuple[Path, ...], strict: bool, store: Path) -> None:
    """Take traces and run folders into the store.

    Run folders, and traces whoever made them: of the PyTorch profiler (Kineto JSON, .json or
    .json.gz), of Nsight Systems (.nsys-rep, or its export .sqlite) and of Nsight Compute
    (.ncu-rep, or its .csv). A folder stands for all of these below it.

    A source that is already there changes nothing. One that cannot be read leaves the store as it
    was, the others are taken in, and the exit code is 1. Of a run folder whose trace cannot be
    read the rest is taken in, with a warning. Warnings are stored with the run: `runs` and `kernels`
    show them.

    \b
    Examples:
      profharness ingest trace.json.gz traces/runs
      profharness ingest profile.nsys-rep counters.ncu-rep
    """
    done = failed = warned = 0
    taken: list[str] = []
    for given in sources:
        try:
            paths = find_sources(given)
        except ProfharnessError as error:
            failed += 1
            hint(f"error: {error}")
            continue
        for source in paths:
            try:
                with _progress(source) as progress:
                    results = stores.ingest_path(store, source, progress=progress)
            except ProfharnessError as error:
                failed += 1
                hint(f"error: {error}")
            except OSError as error:  # TMPDIR is full, the file went away
                failed += 1
                reason = error.strerror or f"{type(error).__name__}: {error}"
                hint(f"error: {shown(source)}: {error.filename or 'TMPDIR'}: {reason}")
            else:
                done += 1
                warned += any(result.warnings for result in results)
                _report(source, results)
                taken += [result.run for result in results]
    if taken:
        with open_store(store) as opened:
            which = "it" if len(set(taken)) == 1 else f"the last of {len(set(taken))} runs"
            hint(f"see {which} with: {opened.shown_by(taken[-1])}")
    # only now: one bad source keeps no other out of the store
    if failed:
        raise ProfharnessError(f"{failed} of {done + failed} sources could not be taken in")
    if strict and warned:
        raise ProfharnessError(f"--strict: {warned} of {done} sources gave warnings, told above")


def _report(source: Path, results: Sequence[IngestResult]) -> None:
    """A line on each run: its name, whether it is new, and what of it is stored."""
    for warning in [text for result in results for text in result.warnings]:
        # a lone trace's own name need not stand twice
        hint(f"warning: {shown(source)}: {warning.removeprefix(f'{shown(source.name)}: ')}")
    with quiet_stdout() as stream:
        for result in results:
            counts = f"{result.launches:,} launches"
            counts += f", {result.cells} cells" if result.cells else ""
            kept = f" (stored from {result.kept})" if result.kept else ""
            line = f"{shown(source)}: {result.status}, run {result.run}{kept}: {counts}\n"
            stream.write(line.encode())


@contextlib.contextmanager
def _progress(source: Path) -> Iterator[Progress | None]:
    """A line that counts launches where stderr is a terminal, else one line that says what is
    read. How long nsys may take is told in both cases.
    """
    if source.suffix == SUFFIX:
        hint(f"{shown(source)}: nsys exports it, for {export_limit_s(source):.0f} s at most")
    if not sys.stderr.isatty():
        hint(f"reading {shown(source)}")
        yield None
        return

    def show(name: str, done: int, total: int) -> None:
        # cleared to its end: the line before may have been longer
        click.echo(f"\r\x1b[K{shown(name)}: {done:,} of {total:,} launches", err=True, nl=False)

    yield show
    click.echo("\r\x1b[K", err=True, nl=False)
