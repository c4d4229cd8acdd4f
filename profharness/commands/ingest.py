"""`profharness ingest`: add traces and run folders to the store."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

import profharness.store as stores
from profharness.commands._command import command, declaration_of
from profharness.commands._options import Option
from profharness.commands._output import hint, is_command_line, live, quiet_stdout
from profharness.commands._runs import hint_warnings, ingest_progress, require_file
from profharness.commands._types import PathLike, Store, store_path
from profharness.errors import ProfharnessError, UsageError, counted, printable, printable_path
from profharness.files import shell_command
from profharness.logs import duration
from profharness.store import open_store
from profharness.store.schema import require_writable
from profharness.store.sources import find_sources, is_archive

if TYPE_CHECKING:
    import pandas as pd

    from profharness.jobs.parallel_ingest import IngestOutcome
    from profharness.store import IngestResult

LIVE_S, REPORT_S = 0.2, 30.0  # seconds between two updates on a terminal, and in a log

Sources = Annotated[
    PathLike,
    Option(
        metavar="FILE_OR_FOLDER...",
        # Click must not check readability, because `ingest` reports unreadable files itself.
        type=click.Path(readable=False, path_type=Path),
        click={"required": True},
    ),
]
Companions = Annotated[
    Sequence[PathLike],
    Option(
        ("--with",),
        multiple=True,
        metavar="FILE",
        help=(
            "An additional file from the same program, to be read together with the trace: a "
            "trace of the CUDA graph capture, or the serving engine's log (.log). Repeatable."
        ),
    ),
]
Strict = Annotated[
    bool, Option(("--strict",), help="Exit with code 1 if a source causes a warning.")
]
Scheduler = Annotated[
    str | None,
    Option(
        ("--scheduler",),
        metavar="WHERE",
        help="Read sources in parallel. local means one process per CPU, and local:4 means four "
        "processes.",
    ),
]


def _to_frame(results: list[IngestResult]) -> pd.DataFrame:
    return stores.to_frame(results, stores.IngestResult)


@command("ingest", frame=_to_frame)
def ingest(
    *sources: Sources,
    companions: Companions = (),
    strict: Strict = False,
    scheduler: Scheduler = None,
    store: Store = None,
) -> list[IngestResult]:
    """Add traces and run folders to the store.

    A source is a run folder or a trace of any program. A trace is a file written by the PyTorch
    profiler (Kineto JSON, .json or .json.gz), by Nsight Systems (.nsys-rep, or exported .sqlite) or
    by Nsight Compute (.ncu-rep, or exported .csv). If a folder is not a run folder, all sources in
    the folder and its subfolders are ingested.

    A serving engine records several files: a trace of its steps, traces of its CUDA graph capture
    (named graph_capture…, or in a folder capture_traces), and a log. If the files of an engine are
    in the same folder, they become one run. If some of the files are in other folders, name them
    with --with.

    Ingesting a stored source again changes nothing. If one of several sources cannot be read,
    the other sources are ingested, and the exit code is 1. If only one trace of a run folder cannot be read, the rest
    of the folder is ingested with a warning. Warnings are stored with the run, and appear in the
    output of `runs` and `kernels`.

    With --scheduler local, several sources are read in parallel, and the stored runs are the same
    as without this option. A source is stored completely or not at all. After Ctrl-C or a crash,
    run the same command again to ingest the missing sources.

    \b
    Examples:
      profharness ingest trace.json.gz traces/runs
      profharness ingest step100 --scheduler local && profharness ranks
      profharness ingest profile.nsys-rep counters.ncu-rep
      profharness ingest decode.json.gz --with graph_capture_rank_0.json.gz --with server.log

    In Python the result has one row per run with the status new, unchanged or replaced. Raise
    TraceFormatError for the first source that cannot be read.
    """
    path, paths = store_path(store), list(map(Path, sources))
    files = list(map(Path, companions))
    _require_one_trace(paths, files)
    if is_command_line():
        return _ingest_each(path, paths, files, scheduler, strict=strict)
    from profharness.jobs.parallel_ingest import ingested  # loads numpy

    results = (
        stores.ingest_path(path, paths[0], companions=files)
        if files
        else ingested(path, paths, scheduler)
    )
    if strict and any(result.warnings for result in results):
        raise ProfharnessError(
            "some sources caused warnings, and strict=True treats warnings as errors"
        )
    return results


def _require_one_trace(sources: Sequence[Path], companions: Sequence[Path]) -> None:
    """Raise UsageError unless companions are files and describe a single trace file."""
    if companions and not (len(sources) == 1 and sources[0].is_file()):
        raise UsageError("--with describes one trace; name exactly one trace file")
    for each in companions:
        if not each.is_file():
            raise UsageError(f"--with: {printable_path(each)}: no such file")


def _ingest_each(
    store: Path,
    sources: Sequence[Path],
    companions: Sequence[Path],
    scheduler: str | None,
    *,
    strict: bool,
) -> list[IngestResult]:
    """Ingest each source and print its result. Raise ProfharnessError at the end if any failed."""
    from profharness.jobs.parallel_ingest import readers_of  # loads numpy

    # the reader processes read one trace at a time, and an archive may contain several
    in_turn = bool(companions) or any(map(is_archive, sources))
    cpus = readers_of(scheduler) if scheduler and not in_turn else []
    # check the store only once, and not for each source
    require_writable(store)
    if len(sources) == 1:
        require_file(str(sources[0]))
    paths: list[Path] = []
    failed = done = warned = 0
    for given in sources:
        try:
            paths += find_sources(given)
        except ProfharnessError as error:
            if len(sources) == 1:
                raise
            failed += 1
            hint(f"error: {error}")
    taken: list[IngestResult] = []
    outcomes = _in_parallel(store, paths, cpus) if cpus else _in_turn(store, paths, companions)
    # Closing the generator ends the reader processes, even after an error.
    with contextlib.closing(outcomes):
        for outcome in outcomes:
            if outcome.error is not None:
                failed += 1
                hint(f"error: {outcome.error}")
                continue
            done += 1
            warned += any(result.warnings for result in outcome.results)
            _report(outcome.source, outcome.results)
            taken += outcome.results
    if taken:
        stores.require_stored(store, taken, failed)
        hint(_shown_by(store, list(dict.fromkeys(result.run for result in taken))))
    # Raise only now, so that the other sources are ingested.
    if failed:
        raise ProfharnessError(f"{failed} of {done + failed} sources could not be ingested")
    if strict and warned:
        raise ProfharnessError(f"--strict: {warned} of {done} sources caused the warnings above")
    return taken


def _in_turn(
    store: Path, paths: Sequence[Path], companions: Sequence[Path]
) -> Generator[IngestOutcome, None, None]:
    """Ingest one source after another in this process, and yield the outcomes."""
    from profharness.jobs.parallel_ingest import IngestOutcome  # loads numpy

    for source in paths:
        try:
            with ingest_progress(source) as progress:
                results = stores.ingest_path(
                    store, source, progress=progress, companions=companions
                )
        except ProfharnessError as error:
            yield IngestOutcome(source, error=str(error))
        except OSError as error:  # such as a full TMPDIR or a deleted file
            reason = error.strerror or f"{type(error).__name__}: {error}"
            place = error.filename or "TMPDIR"
            yield IngestOutcome(source, error=f"{printable_path(source)}: {place}: {reason}")
        else:
            yield IngestOutcome(source, tuple(results))


def _in_parallel(
    store: Path, paths: Sequence[Path], cpus: Sequence[int]
) -> Generator[IngestOutcome, None, None]:
    """Ingest the sources with one process per CPU, yield the outcomes, and show the progress."""
    from profharness.jobs.parallel_ingest import ingest_sources  # loads numpy

    sources, processes = len(paths), min(len(cpus), len(paths))
    hint(f"reading {counted(sources, 'source')} in {counted(processes, 'process', 'processes')}")
    progress = _Countdown([_size(path) for path in paths])
    done = 0
    try:
        with contextlib.closing(ingest_sources(store, paths, cpus, progress.tell)) as outcomes:
            for outcome in outcomes:
                progress.clear()
                yield outcome
                done += 1
                progress.advance()
    except KeyboardInterrupt:
        progress.clear()
        hint(
            f"{done:,} of {len(paths):,} sources are done; to ingest the other sources, run the same "
            "command again"
        )
        raise


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        files = path.iterdir() if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files)
    return 0


class _Countdown:
    """Shows the number of ingested sources, and the remaining time as estimated from file sizes.

    On a terminal, one line is updated. Otherwise, a line is printed every REPORT_S seconds.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.done = 0
        self.begin = self.told = time.monotonic()

    def advance(self) -> None:
        """Count a source as ingested, and update the progress."""
        self.done += 1
        self.tell()

    def tell(self) -> None:
        now = time.monotonic()
        on_terminal = sys.stderr.isatty()
        if now - self.told < (LIVE_S if on_terminal else REPORT_S):
            return
        self.told = now
        read, whole = sum(self.sizes[: self.done]), sum(self.sizes)
        line = f"{self.done:,} of {len(self.sizes):,} sources"
        if read and whole:
            line += f", {duration((now - self.begin) * (whole - read) / read)} left"
        if on_terminal:
            live(line)
        else:
            hint(line)

    def clear(self) -> None:
        """Clear the progress line, so that other lines can be printed."""
        if sys.stderr.isatty():
            live()


def _shown_by(store: Path, taken: Sequence[str]) -> str:
    """Return a hint with the command that displays the ingested runs."""
    with open_store(store) as opened:
        ranks = {row.rank for row in opened.runs() if row.run in set(taken)} - {None}
        last = opened.run_reference(taken[-1])
        if len(ranks) > 1:
            again = shell_command("ranks", last, store=store)
            return f"To compare the {len(ranks)} ranks, use: {again}"
        if len(taken) == 1:
            return f"To show the run, use: {opened.shown_by(taken[0])}"
        if len(taken) == 2 and all(opened.has(run, "attention calls") for run in taken):
            again = shell_command("diff", opened.run_reference(taken[0]), last, store=store)
            return f"To compare the two programs, use: {again}"
        return f"To show the last of {len(taken)} runs, use: {opened.shown_by(taken[-1])}"


def _report(source: Path, results: Sequence[IngestResult]) -> None:
    """Print the warnings about a source, and a line with the status and the size of each run."""
    hint_warnings(source, results)
    with quiet_stdout() as stream:
        for result in results:
            counts = counted(result.launches, "launch", "launches")
            counts += f", {counted(result.cells, 'cell')}" if result.cells else ""
            kept = f" (stored from {result.kept})" if result.kept else ""
            run = "" if result.is_trace else f", run {result.run}"
            # an archive contains several sources
            line = f"{printable_path(result.source)}: {result.status}{run}{kept}: {counts}\n"
            stream.write(printable(line).encode())


DECLARATION = declaration_of(ingest)
