"""Make a copy of a run folder or a trace that can be published, and audit files.

An audit reports everything that `scrub` would replace or drop.
"""

from __future__ import annotations

import contextlib
import gzip
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from profharness.errors import ProfharnessError, TraceFormatError, UsageError, counted
from profharness.files import is_store, open_input
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
from profharness.scrub.allowed import Scrubber
from profharness.scrub.kineto import scrub_kineto
from profharness.scrub.nsys import scrub_nsys
from profharness.scrub.reports import EXPORTS, check_name, exported, scrub_ncu, split_name
from profharness.scrub.rocm import scrub_rocm_csv, scrub_rocm_database, scrub_rocm_json
from profharness.traces import GZIP, GZIP_SUFFIX, sniff, unpacked
from profharness.traces.sqlite_file import MAGIC

RAW_SUFFIXES = (".nsys-rep", ".qdrep", ".qdstrm", ".ncu-rep")
ROCM_TEXTS = ("rocprofv3-json", "rocprof-csv")  # parsers of text files of AMD's profilers
# Maximum bytes of a JSON document that is not a trace. A larger document is read line by line.
MAX_JSON = 1 << 28
SHOWN = 5


class PrivateDataError(ProfharnessError):
    """A copy contained data that is not known to be harmless. The copy was deleted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A place with data that `scrub` replaces or drops. `text` contains no private data."""

    path: Path
    where: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}, {self.where}: {self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """The result of `scrub`.

    `files` are the files of the copy, and `left_out` are the files of the source that were not
    copied. `replaced` contains pairs of a raw report and the export that replaces it in the copy.
    All names are relative to the folder.
    """

    output: Path
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...]


def audit(path: Path) -> list[Finding]:
    """Return a finding for everything that `scrub` would replace or drop in a file or a folder.

    In a folder, the names of the files are checked too. Raise TraceFormatError if a file cannot be
    read.
    """
    if not path.is_dir():
        return list(_findings(path, Scrubber()))
    findings: list[Finding] = []
    for file in filter(Path.is_file, sorted(path.rglob("*"))):
        scrubber = Scrubber()
        for part in file.relative_to(path).parts:
            scrubber.clean(part, where="its name")
        findings += _findings(file, scrubber)
    return findings


def _findings(path: Path, scrubber: Scrubber) -> Iterator[Finding]:
    try:
        _check(path, scrubber)
    except (OSError, EOFError, sqlite3.Error) as error:
        raise TraceFormatError(path, f"cannot be read: {error}") from None
    for change in scrubber.changes:
        yield Finding(path, *change)


def _check(path: Path, scrubber: Scrubber) -> None:
    name = path.name.lower().removesuffix(GZIP_SUFFIX)
    if name.endswith(RAW_SUFFIXES):
        scrubber.record(
            "raw report",
            "the report contains the environment variables of the profiled process",
            "the file",
        )
        return
    if is_store(path):
        scrubber.record(
            "store", "the store contains the paths and environments of its runs", "the file"
        )
        return
    with _opened(path) as file:
        head = file.read(len(MAGIC))
        is_trace = head == MAGIC or (name.endswith(".csv") and b'"ID"' in head + file.read(1 << 16))
        is_trace = is_trace or sniff(path) in ROCM_TEXTS
        document = None
        if not is_trace and not name.endswith(".jsonl"):
            is_trace, document = _json_of(file)
    if document is not None:
        scrubber.where = "member"
        scrubber.value(document)
        return
    is_readable = is_trace
    if is_trace:
        attempt = Scrubber(looks_for_deleted=True)
        try:
            with Path("/dev/null").open("wb") as nowhere:
                _scrub_trace(path, nowhere, attempt)
        except TraceFormatError:
            attempt.record("damage", "the trace cannot be read completely", "the file")
            is_readable = head == MAGIC
        scrubber.changes.update(attempt.changes)
    if not is_readable:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                scrubber.where = f"line {number}"
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                if text.startswith("{"):
                    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
                        scrubber.value(msgspec.json.decode(line))
                        continue
                scrubber.clean(text)


def _scrub_trace(path: Path, out: IO[bytes], scrubber: Scrubber) -> None:
    """Write the scrubbed copy of a trace, which may be compressed.

    Raise TraceFormatError if the trace cannot be read.
    """
    # the reader of Kineto traces decompresses them itself
    is_kineto = path.name.lower().endswith(".json.gz")
    with contextlib.nullcontext(path) if is_kineto else unpacked(path) as plain:
        with open_input(plain) as file:
            head = file.read(len(MAGIC))
        parser = sniff(plain)
        if head == MAGIC:
            is_nsys = parser == "nsys"
            (scrub_nsys if is_nsys else scrub_rocm_database)(plain, out, scrubber)
        elif parser == "rocprofv3-json":
            scrub_rocm_json(plain, out, scrubber)
        elif parser == "rocprof-csv":
            scrub_rocm_csv(plain, out, scrubber)
        elif plain.name.lower().endswith(".csv"):
            scrub_ncu(plain, out, scrubber)
        else:
            scrub_kineto(plain, out, scrubber)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as plain:
        packed = plain.read(len(GZIP)) == GZIP  # the suffix of the file may be wrong
    with gzip.open(path, "rb") if packed else path.open("rb") as file:
        yield cast("IO[bytes]", file)


def _json_of(file: IO[bytes]) -> tuple[bool, Any]:
    """Return whether a file is a Kineto trace, and the decoded content of any other JSON file.

    The content is None if the file is a Kineto trace, is too large or is not JSON.
    """
    file.seek(0)
    head = file.read(1 << 16)
    if head.lstrip()[:1] not in (b"{", b"["):
        return False, None
    if b'"traceEvents"' in head or (b'"ph"' in head and head.lstrip()[:1] == b"["):
        return True, None
    file.seek(0)
    data = file.read(MAX_JSON + 1)
    if b'"traceEvents"' in data:
        return True, None
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False, msgspec.json.decode(data) if len(data) <= MAX_JSON else None
    return False, None


def default_output(source: Path) -> Path:
    """Return the path `<name>-scrubbed` in the folder of the source.

    The path has the suffix of the source, or the suffix of an export if the source is a raw report.
    """
    source = source.resolve()
    if source.is_dir():
        return source.with_name(f"{source.name}-scrubbed")
    stem, suffix = split_name(source.name)
    return source.with_name(f"{stem}-scrubbed{EXPORTS.get(suffix, suffix)}")


def scrub(source: Path, output: Path | None = None, *, force: bool = False) -> Scrubbed:
    """Copy a run folder or a trace, and replace or drop all data that is not known to be harmless.

    The source is never changed. If `force` is set, an existing output is replaced, but an existing
    folder only if it is a run folder. Raise UsageError for an invalid output, TraceFormatError for
    a source that cannot be read, and PrivateDataError if the audit of the copy finds anything.
    After an error, the output is unchanged.
    """
    if not source.exists():
        raise TraceFormatError(source, "no such file or folder", expected="a run folder or a trace")
    output = default_output(source) if output is None else output
    _check_output(source, output, force=force)
    try:
        # The temporary folder is on the file system of the output, so that the copy can be renamed
        # to the output.
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as made:
            work = Path(made)
            copy = work / output.name
            done = (_copy_folder if source.is_dir() else _copy_file)(source, copy, work)
            if findings := audit(copy):
                shown = (f"  {each.where}: {each.kind}: {each.text}" for each in findings[:SHOWN])
                raise PrivateDataError(
                    (
                        f"{source}: the copy contains {counted(len(findings), 'item')} that are "
                        "not known to be harmless, so it was deleted; please report this:\n"
                    )
                    + "\n".join(shown)
                )
            if output.is_dir():
                output.rename(work / "earlier")
            copy.replace(output)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
    return replace(done, output=output)


def _check_output(source: Path, output: Path, *, force: bool) -> None:
    real, target = source.resolve(), output.resolve()
    if real.is_relative_to(target) or (real.is_dir() and target.is_relative_to(real)):
        raise UsageError(f"{output}: overlaps the source; choose another output with -o")
    if not output.parent.is_dir():
        raise UsageError(f"{output}: its folder does not exist")
    if output.exists():
        if not force:
            raise UsageError(f"{output}: already exists; --force overwrites it")
        is_run = output.is_dir() and (output / RUN_FILE).is_file()
        if not (is_run if source.is_dir() else output.is_file()):
            raise UsageError(
                f"{output}: is not an earlier copy, so --force does not replace it; delete it first"
            )
    if source.is_file():
        check_name(source, output)


def _copy_file(source: Path, copy: Path, work: Path) -> Scrubbed:
    file, name = _find_trace(source.parent, source.name, work)
    _copy_trace(file, copy, Scrubber())
    replaced = ((source.name, copy.name),) if name != source.name else ()
    return Scrubbed(copy, (copy.name,), (), replaced)


def _copy_folder(source: Path, copy: Path, work: Path) -> Scrubbed:
    run = read_run(source)
    # maps the name of each trace to the file to read and to the name of the trace in the copy
    traces = {trace.path: _find_trace(source, trace.path, work) for trace in run.traces}
    # a report and its export have the same name in the copy, which is made from the export
    files: dict[str, Path] = {}
    for original, (file, name) in traces.items():
        if name == original or name not in files:
            files[name] = file
    merged: dict[str, TraceFile] = {}
    for trace in run.traces:
        _, name = traces[trace.path]
        first = merged.get(name, replace(trace, path=name))
        merged[name] = replace(first, cells=tuple(dict.fromkeys((*first.cells, *trace.cells))))
    # omit lines of journals that are not valid events
    journals = {
        path.name: [row for row in observed_rows(path) if row is not None]
        for path in (observed_journals(source) if run.kind == OBSERVE else ())
    }
    scrubber = Scrubber()
    copy.mkdir()
    write_run(copy, _clean_run(replace(run, traces=tuple(merged.values())), scrubber))
    for name, file in files.items():
        _copy_trace(file, copy / name, scrubber)
    for name, rows in journals.items():
        lines = (msgspec.json.encode(scrubber.value(row)) + b"\n" for row in rows)
        (copy / name).write_bytes(b"".join(lines))
    # the rows of the copied journals contain the counts, so the files of counts are not copied
    counts = {counts_file(source / name).name for name in journals}
    used = {RUN_FILE, *traces, *journals, *counts, *files}
    present = {str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()}
    return Scrubbed(
        copy,
        (RUN_FILE, *files, *journals),
        tuple(sorted(present - used)),
        tuple((original, name) for original, (_, name) in traces.items() if original != name),
    )


def _clean_run(run: Run, scrubber: Scrubber) -> Run:
    """Return the record of a run with cleaned texts and without environment variables."""
    scrubber.where = RUN_FILE
    plain: dict[str, Any] = msgspec.to_builtins(run)
    cleaned = scrubber.value(plain)
    for before, after in zip(plain["traces"], cleaned["traces"], strict=True):
        after["path"] = before["path"]  # the audit checks the names of files
    if "env" in plain["environment"]:
        cleaned["environment"]["env"] = {}
    return msgspec.convert(cleaned, Run)


def _find_trace(folder: Path, name: str, work: Path) -> tuple[Path, str]:
    """Return the file to read for a trace of a run, and the name of the trace in the copy.

    If the trace is a raw report, the file is an export, which is made if necessary.
    """
    source = folder / name
    if not source.resolve().is_relative_to(folder.resolve()):
        raise TraceFormatError(
            folder / RUN_FILE,
            f"lists a trace outside its folder: {name!r}",
            expected="a path inside the run folder",
        )
    if not source.is_file():
        raise TraceFormatError(
            source, "the file is listed in run.json but is missing", expected="a raw trace"
        )
    stem, suffix = split_name(name)
    if suffix not in EXPORTS:
        return source, name
    target = f"{stem}{EXPORTS[suffix]}"
    return exported(source, work / "raw" / target), target


def _copy_trace(source: Path, target: Path, scrubber: Scrubber) -> None:
    # the traces of a campaign are in the folders of its groups
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file, contextlib.ExitStack() as stack:
        out: Any = file
        if target.suffix == ".gz":
            # omit the name and the time, so that copies of equal traces have equal bytes
            packed = gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6)
            out = stack.enter_context(packed)
        _scrub_trace(source, out, scrubber)
