"""Copy a run folder or a trace so that the copy can be published."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from profharness.errors import TraceFormatError, UsageError
from profharness.run import (
    OBSERVE,
    RUN_FILE,
    Run,
    TraceFile,
    counts_file,
    observed_journals,
    observed_rows,
    read_run,
    write_run,
)
from profharness.scrub.check import PrivateDataError, as_plain_file, audit, writer_of
from profharness.scrub.replace import Scrubber
from profharness.scrub.reports import EXPORTS, check_name, exported, split_name

SHOWN = 5
_Journals = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """The result of `scrub`.

    `files` are the files of the copy, and `left_out` the files of the source that were not copied.
    `replaced` pairs each raw report with the export that replaces it. The names are relative to the
    folder.
    """

    output: Path
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Trace:
    """A trace to copy.

    `source` is the file to read, which is an export if the trace is a raw report. `original` is the
    name of the trace in the source, and `name` its name in the copy.
    """

    original: str
    source: Path
    name: str


def default_output(source: Path) -> Path:
    """Return the path `<name>-scrubbed` beside the source.

    It has the suffix of the source. If the source is a raw report, it has the suffix of an export.
    """
    source = source.resolve()
    if source.is_dir():
        return source.with_name(f"{source.name}-scrubbed")
    stem, suffix = split_name(source.name)
    return source.with_name(f"{stem}-scrubbed{EXPORTS.get(suffix, suffix)}")


def scrub(source: Path, output: Path | None = None, *, force: bool = False) -> Scrubbed:
    """Copy a run folder or a trace, and replace or drop everything not known to be harmless.

    The source is never changed. `force` replaces an existing output (a folder only if it is a run
    folder). Raise UsageError for an invalid output, TraceFormatError for a source that cannot be read,
    and PrivateDataError if the copy fails its audit. On an error the output is unchanged.
    """
    if not source.exists():
        raise TraceFormatError(source, "no such file or folder", expected="a run folder or a trace")
    output = default_output(source) if output is None else output
    _check_output(source, output, force=force)
    if source.is_file():
        check_name(source, output)
    try:
        # on the file system of the output, so that a rename moves the whole copy
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as made:
            work = Path(made)
            copy = work / output.name
            done = (_scrub_folder if source.is_dir() else _scrub_file)(source, copy, work)
            _check_copy(copy, source)
            _put(copy, output, work)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
    return replace(done, output=output)


def _scrub_folder(source: Path, copy: Path, work: Path) -> Scrubbed:
    run = read_run(source)
    traces = {trace.path: _trace(source, trace.path, work) for trace in run.traces}
    own = {trace.name: trace for trace in traces.values() if trace.name == trace.original}
    # a report and its export have the same name in the copy, and the export of the run is preferred
    single = {trace.name: own.get(trace.name, trace) for trace in traces.values()}
    journals = _journals(source, run)
    scrubber = Scrubber()
    copy.mkdir()
    write_run(copy, _scrub_run(replace(run, traces=_merged(run.traces, traces)), scrubber))
    for trace in single.values():
        _scrub_trace(trace, copy / trace.name, scrubber)
    for name, rows in journals.items():
        lines = (msgspec.json.encode(scrubber.value(row)) + b"\n" for row in rows)
        (copy / name).write_bytes(b"".join(lines))
    # the copied journals contain the counts
    counts = {counts_file(source / name).name for name in journals}
    used = {RUN_FILE, *traces, *journals, *counts, *single}
    there = {str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()}
    renamed = ((each.original, each.name) for each in traces.values())
    return Scrubbed(
        copy,
        (RUN_FILE, *single, *journals),
        tuple(sorted(there - used)),
        tuple(pair for pair in renamed if pair[0] != pair[1]),
    )


def _journals(source: Path, run: Run) -> _Journals:
    """Return the events of an observed program by file. Lines that are not events are dropped."""
    paths = observed_journals(source) if run.kind == OBSERVE else []
    return {path.name: [row for row in observed_rows(path) if row is not None] for path in paths}


def _scrub_file(source: Path, copy: Path, work: Path) -> Scrubbed:
    trace = _trace(source.parent, source.name, work)
    _scrub_trace(trace, copy, Scrubber())
    replaced = ((source.name, copy.name),) if trace.name != trace.original else ()
    return Scrubbed(copy, (copy.name,), (), replaced)


def _scrub_run(run: Run, scrubber: Scrubber) -> Run:
    """Return the record with cleaned texts and without environment variables."""
    scrubber.where = RUN_FILE
    plain: dict[str, Any] = msgspec.to_builtins(run)
    cleaned = scrubber.value(plain)
    for before, after in zip(plain["traces"], cleaned["traces"], strict=True):
        after["path"] = before["path"]  # the audit checks the names of files
    if "env" in plain["environment"]:
        cleaned["environment"]["env"] = {}
    return msgspec.convert(cleaned, Run)


def _trace(folder: Path, name: str, work: Path) -> _Trace:
    """Find the file to read for a trace of the folder. Export a raw report first."""
    source = folder / name
    if not source.resolve().is_relative_to(folder.resolve()):
        raise TraceFormatError(
            folder / RUN_FILE,
            f"names a trace outside of its folder: {name!r}",
            expected="a path inside the run folder",
        )
    if not source.is_file():
        raise TraceFormatError(source, "named in run.json but missing", expected="a raw trace")
    stem, suffix = split_name(name)
    if suffix not in EXPORTS:
        return _Trace(name, source, name)
    target = f"{stem}{EXPORTS[suffix]}"
    return _Trace(name, exported(source, work / "raw" / target), target)


def _merged(traces: tuple[TraceFile, ...], read: dict[str, _Trace]) -> tuple[TraceFile, ...]:
    """Return the traces under their names in the copy. A report and its export become one trace."""
    merged: dict[str, TraceFile] = {}
    for trace in traces:
        name = read[trace.path].name
        first = merged.get(name, replace(trace, path=name))
        merged[name] = replace(first, cells=tuple(dict.fromkeys((*first.cells, *trace.cells))))
    return tuple(merged.values())


def _scrub_trace(trace: _Trace, target: Path, scrubber: Scrubber) -> None:
    # the traces of a campaign are in the folders of its groups
    target.parent.mkdir(parents=True, exist_ok=True)
    with as_plain_file(trace.source) as path, _created(target) as out:
        writer_of(path)(path, out, scrubber)


@contextmanager
def _created(target: Path) -> Iterator[IO[bytes]]:
    """Open a new file for writing, and compress it if its suffix is .gz.

    The compressed file contains no name and no time, so equal sources give equal bytes.
    """
    with target.open("xb") as file:
        if target.suffix != ".gz":
            yield file
            return
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as out:
            yield cast("IO[bytes]", out)


def _check_copy(copy: Path, source: Path) -> None:
    findings = audit(copy)
    if findings:
        shown = "\n".join(f"  {item.where}: {item.kind}: {item.text}" for item in findings[:SHOWN])
        raise PrivateDataError(
            f"{source}: the copy contains {len(findings)} thing(s) that are not known to be "
            f"harmless, so it was deleted; please report this:\n{shown}"
        )


def _check_output(source: Path, output: Path, *, force: bool) -> None:
    real, target = source.resolve(), output.resolve()
    if (
        target == real
        or real.is_relative_to(target)
        or (real.is_dir() and target.is_relative_to(real))
    ):
        raise UsageError(
            f"{output}: is or contains the source, or is in it; choose another with -o"
        )
    if not output.parent.is_dir():
        raise UsageError(f"{output}: its folder does not exist")
    if not output.exists():
        return
    if not force:
        raise UsageError(f"{output}: already exists; --force overwrites it")
    if source.is_dir() != output.is_dir() or (
        output.is_dir() and not (output / RUN_FILE).is_file()
    ):
        raise UsageError(
            f"{output}: is no earlier copy, so --force leaves it alone; delete it first"
        )


def _put(copy: Path, output: Path, work: Path) -> None:
    """Rename the copy to its final name. Move an earlier copy into the temporary folder."""
    if output.is_dir():
        output.rename(work / "earlier")
    copy.replace(output)
