"""Copies of run folders and traces that are fit to publish: whole and audited, or not at all."""

from __future__ import annotations

import gzip
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import msgspec

from profharness.errors import TraceFormatError, UsageError
from profharness.files import open_input
from profharness.parse.nsys_export import MAGIC
from profharness.parse.packed import unpacked
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
from profharness.scrub import kineto, nsys, reports
from profharness.scrub.audit import PrivateDataError, audit
from profharness.scrub.reports import EXPORTS, check_name, exported, split_name
from profharness.scrub.text import Cleaner, machine_names, names_in

SHOWN = 5
_Journals = dict[str, list[dict[str, Any]]]
_Kind = tuple[Callable[[Path], frozenset[str]], Callable[[Path, IO[bytes], Cleaner], None]]


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """What became of a source. files are the copy's, left_out the source's, replaced raw reports
    with what stands in their place; all names are relative.
    """

    output: Path
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Job:
    """One trace: the file to read (an export for a raw report), and its name in the copy."""

    original: str
    source: Path
    name: str


def default_output(source: Path) -> Path:
    """`<name>-scrubbed` beside the source, with its suffix or that of a raw report's export."""
    source = source.resolve()
    if source.is_dir():
        return source.with_name(f"{source.name}-scrubbed")
    stem, suffix = split_name(source.name)
    return source.with_name(f"{stem}-scrubbed{EXPORTS.get(suffix, suffix)}")


def scrub(source: Path, output: Path | None = None, *, force: bool = False) -> Scrubbed:
    """Copy a run folder or a trace without what is private; the source is never changed.

    force replaces an output that is there (a folder only if it is a run folder). Raises UsageError
    for an output that cannot be, TraceFormatError for a source that cannot be read, and
    PrivateDataError when the audit still finds something; the output then is as it was.
    """
    if not source.exists():
        raise TraceFormatError(source, "no such file or folder", expected="a run folder or a trace")
    output = default_output(source) if output is None else output
    _check_output(source, output, force=force)
    if source.is_file():
        check_name(source, output)
    try:
        # beside the output, so that a rename puts the whole copy in its place
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as made:
            work = Path(made)
            copy = work / output.name
            done = (_folder if source.is_dir() else _file)(source, copy, work)
            _put(copy, output, work)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
    return replace(done, output=output)


def _folder(source: Path, copy: Path, work: Path) -> Scrubbed:
    run = read_run(source)
    jobs = {trace.path: _job(source, trace.path, work) for trace in run.traces}
    own = {job.name: job for job in jobs.values() if job.name == job.original}
    # a report and its export have one name in the copy: the run's own export counts
    single = {job.name: own.get(job.name, job) for job in jobs.values()}
    journals = _journals(source, run)
    cleaner = _cleaner(single.values(), run, journals)
    copy.mkdir()
    for job in single.values():
        # the traces of a campaign stand in the folders of its groups
        (copy / job.name).parent.mkdir(parents=True, exist_ok=True)
        _scrub_one(job, copy / job.name, cleaner)
    for name, rows in journals.items():
        lines = (msgspec.json.encode(cleaner.clean_json(row)) + b"\n" for row in rows)
        (copy / name).write_bytes(b"".join(lines))
    traces = _once(run.traces, jobs)
    write_run(copy, scrub_run(replace(run, traces=traces), cleaner))
    _check(copy, source, cleaner)
    counts = {
        counts_file(source / name).name for name in journals
    }  # they stand in the journals now
    used = {RUN_FILE, *jobs, *journals, *counts}
    there = [str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()]
    return Scrubbed(
        copy,
        (RUN_FILE, *dict.fromkeys(job.name for job in jobs.values()), *journals),
        tuple(sorted(set(there) - used - {job.name for job in jobs.values()})),
        tuple((job.original, job.name) for job in jobs.values() if job.original != job.name),
    )


def _journals(source: Path, run: Run) -> _Journals:
    """The events of an observed program by file; lines that are none have no copy."""
    paths = observed_journals(source) if run.kind == OBSERVE else []
    return {path.name: [row for row in observed_rows(path) if row is not None] for path in paths}


def _file(source: Path, copy: Path, work: Path) -> Scrubbed:
    job = _job(source.parent, source.name, work)
    cleaner = _cleaner([job])
    _scrub_one(job, copy, cleaner)
    _check(copy, source, cleaner)
    replaced = ((source.name, copy.name),) if job.name != job.original else ()
    return Scrubbed(copy, (copy.name,), (), replaced)


def scrub_run(run: Run, cleaner: Cleaner) -> Run:
    """The record with every text cleaned and without environment variables; what profharness asks
    for by name (ids, statuses, codes, configs) keeps its value.
    """
    plain: dict[str, Any] = msgspec.to_builtins(run)
    kept = {key: plain[key] for key in ("run", "created", "profilers", "protocol", "schema")}
    cleaned = {**cleaner.clean_json(plain), **kept}
    if "env" in plain["environment"]:
        cleaned["environment"]["env"] = {}
    for before, after in zip(plain["cells"], cleaned["cells"], strict=True):
        after |= {key: before[key] for key in ("cell", "config", "status", "choice")}
        path, colon, function = before["backend"].rpartition(":")
        name = dict(cleaner.files).get(path)
        after["backend"] = before["backend"] if name is None else f"{name}{colon}{function}"
    for key in ("traces", "problems"):
        for before, after in zip(plain[key], cleaned[key], strict=True):
            after["cells"] = before["cells"]
    return msgspec.convert(cleaned, Run)


def _job(folder: Path, name: str, work: Path) -> _Job:
    """What to read for a trace of the folder; raw reports are exported first."""
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
        return _Job(name, source, name)
    target = f"{stem}{EXPORTS[suffix]}"
    return _Job(name, exported(source, work / "raw" / target), target)


def _once(traces: tuple[TraceFile, ...], jobs: dict[str, _Job]) -> tuple[TraceFile, ...]:
    """The traces under their names in the copy; a report and its export are one, of both's cells."""
    merged: dict[str, TraceFile] = {}
    for trace in traces:
        name = jobs[trace.path].name
        first = merged.get(name, replace(trace, path=name))
        merged[name] = replace(first, cells=tuple(dict.fromkeys((*first.cells, *trace.cells))))
    return tuple(merged.values())


def _cleaner(
    jobs: Iterable[_Job], run: Run | None = None, journals: _Journals | None = None
) -> Cleaner:
    """The rules with the names of this machine and those in the traces, the record and journals."""
    names = machine_names()
    backends: tuple[str, ...] = ()
    if run is not None:
        # a name that the record tells is private in the traces too
        names |= names_in([msgspec.json.encode(run).decode()])
        backends = tuple(dict.fromkeys(cell.backend for cell in run.cells))
    for rows in (journals or {}).values():
        names |= names_in(msgspec.json.encode(row).decode() for row in rows)
    for job in jobs:
        with _plain(job.source) as path:
            names_of, _ = _kind(path)
            names |= names_of(path)
    return Cleaner(names, _file_names(backends, Cleaner(names)))


def _file_names(backends: Iterable[str], cleaner: Cleaner) -> tuple[tuple[str, str], ...]:
    """The file's name for each private path that a backend is (`/home/x/mine.py:attention`); two files
    of one name stay two: `mine.py`, `mine-2.py`.
    """
    paths = dict.fromkeys(text.rpartition(":")[0] for text in backends)
    private = [path for path in paths if cleaner.clean(path) != path and "/" in path]
    taken = set(paths) - set(private)
    names: list[tuple[str, str]] = []
    for path in private:
        file = PurePosixPath(path)
        numbers = (f"{file.stem}-{number}{file.suffix}" for number in itertools.count(2))
        name = next(
            name
            for name in (file.name, *itertools.islice(numbers, len(paths)))
            if name not in taken
        )
        taken.add(name)
        names.append((path, name))
    return tuple(names)


def _scrub_one(job: _Job, target: Path, cleaner: Cleaner) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _plain(job.source) as path, _writer(target) as out:
        _, write = _kind(path)
        write(path, out, cleaner)


def _kind(path: Path) -> _Kind:
    """How the names in a trace are found, and how its copy is written."""
    with open_input(path) as file:
        head = file.read(len(MAGIC))
    if head == MAGIC:
        return nsys.private_names_in, nsys.scrub_nsys
    if path.name.lower().endswith(".csv"):
        return reports.private_names_in, reports.scrub_ncu
    return kineto.private_names_in, kineto.scrub_kineto


def _plain(path: Path) -> AbstractContextManager[Path]:
    """The file itself, or an export or CSV unpacked; Kineto's is read packed."""
    return nullcontext(path) if path.name.lower().endswith(".json.gz") else unpacked(path)


@contextmanager
def _writer(target: Path) -> Iterator[IO[bytes]]:
    """Plain, or compressed without name and time, so that the same source gives the same bytes."""
    with target.open("xb") as file:
        if target.suffix != ".gz":
            yield file
            return
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as out:
            yield cast("IO[bytes]", out)


def _check(copy: Path, source: Path, cleaner: Cleaner) -> None:
    # with the source's own names, which a copy alone does not tell
    findings = audit(copy, names=cleaner.names)
    if findings:
        shown = "\n".join(f"  {item.where}: {item.kind}: {item.text}" for item in findings[:SHOWN])
        raise PrivateDataError(
            f"{source}: the copy still holds {len(findings)} private thing(s), so it was thrown "
            f"away; please report this with its kinds, not its texts:\n{shown}"
        )


def _check_output(source: Path, output: Path, *, force: bool) -> None:
    real, target = source.resolve(), output.resolve()
    if (
        target == real
        or real.is_relative_to(target)
        or (real.is_dir() and target.is_relative_to(real))
    ):
        raise UsageError(f"{output}: is or holds the source, or lies in it; choose another with -o")
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
    """Give the copy its name; an earlier one goes into the folder that is about to vanish."""
    if output.is_dir():
        output.rename(work / "earlier")
    copy.replace(output)
