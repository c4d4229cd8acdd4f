"""Find run folders and trace files, and compute their content hashes.

Traces of a run that is still being recorded can be parsed in advance.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from profharness.errors import NotATraceError, TraceFormatError, printable_path
from profharness.files import open_input
from profharness.run import (
    OBSERVE,
    RUN_FILE,
    Run,
    TraceFile,
    counts_file,
    observed_journals,
    read_run,
)
from profharness.store.ranks import NAMED_RANK
from profharness.trace import Trace
from profharness.traces import is_trace, open_file, open_trace, sniff

EXPECTED = "a run folder, a trace file, or a folder of these"
CHUNK = 1 << 20
ARCHIVES = (".tar", ".tar.gz", ".tgz")
# maximum total size of cached trace files; parsed traces take several times as much memory
MOST_BYTES = 16 << 20
# vLLM and SGLang use these names for traces of CUDA graph captures, for their folder, and for a list
# of these traces.
ANNOTATIONS = re.compile(r"annotations?\.json(?:\.gz)?$")  # names of the nodes of CUDA graphs
CAPTURE, CAPTURES, CAPTURE_LIST = "graph_capture", "capture_traces", "execution_details.json"
MAX_PATH, SHOWN_PATH = 1024, 60  # maximum characters of a path, and of a path in a message


@dataclass(frozen=True, slots=True)
class Raw:
    """One trace file of a source."""

    profiler: str | None
    name: str
    path: Path
    content_hash: str
    cells: tuple[str, ...] = ()  # the cells that run.json lists for this trace
    problem: str | None = None  # why the trace cannot be read; None if it is readable


@dataclass(frozen=True, slots=True)
class Companion:
    """A file that describes a trace: a trace of CUDA graph captures, or a log."""

    path: Path
    content_hash: str
    is_log: bool


@dataclass(frozen=True, slots=True)
class Source:
    """A run folder or trace file whose traces are not parsed yet."""

    path: Path
    """The run folder, the trace file, or a folder whose only trace is read. It names the run."""
    run: Run | None  # None for a trace file outside of a run folder
    raws: tuple[Raw, ...]
    content_hash: str
    companions: tuple[Companion, ...] = ()
    """Files that belong to a trace file. The content hash does not include these files."""

    @property
    def captures(self) -> tuple[Path, ...]:
        """The traces that contain the captures of CUDA graphs."""
        return tuple(each.path for each in self.companions if not each.is_log)


def find_sources(path: Path) -> list[Path]:
    """Return the run folders and trace files at or below a path.

    If a folder contains only one trace, return the folder, which then names the run. Raise
    TraceFormatError if there are no sources.
    """
    try:
        if path.is_file() or (path / RUN_FILE).is_file():
            return [path]
        if not path.is_dir():
            missing = "not a regular file" if path.exists() else "no such file or folder"
            raise NotATraceError(path, missing, expected=EXPECTED)
        sources = list(_walk(path))
    except OSError as error:
        unreadable = error.filename or path
        raise TraceFormatError(unreadable, f"cannot be read: {error.strerror}") from None
    if not sources:
        raise NotATraceError(path, "this folder contains nothing to ingest", expected=EXPECTED)
    if _is_one_trace(sources):
        # `.` and `..` name nothing
        return [path if path.name not in ("", "..") else path.resolve()]
    return sources


def _is_one_trace(sources: Sequence[Path]) -> bool:
    return len(sources) == 1 and sources[0].is_file() and not is_archive(sources[0])


def _trace_of(path: Path) -> Path | None:
    """Return a trace file, or the only trace in a folder. Return None for a run folder."""
    if path.is_file() or not path.is_dir() or (path / RUN_FILE).is_file():
        return path if path.is_file() else None
    found = list(_walk(path))
    return found[0] if _is_one_trace(found) else None


def _walk(folder: Path) -> Iterator[Path]:
    # sorted, because the order of a folder's entries is arbitrary
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    traces = list(filter(_is_source, entries))
    # Captures of CUDA graphs are read together with the traces that they describe.
    steps = [entry for entry in traces if not _is_capture(entry)]
    for entry in entries:
        # do not follow symbolic links, because they could form a cycle
        if entry.is_dir() and not entry.is_symlink():
            if entry.name == CAPTURES and steps:
                continue
            try:
                yield from [entry] if (entry / RUN_FILE).is_file() else list(_walk(entry))
            except PermissionError:
                yield entry  # reading this folder later raises the error
        elif entry in (steps or traces):
            yield entry


def _is_source(path: Path) -> bool:
    """Return whether a path is a file that should be read as a trace."""
    if not path.is_file():
        return False
    try:
        return is_trace(path) and sniff(path) is not None
    except TraceFormatError:
        return True  # reading this file later raises the error


def _is_capture(path: Path) -> bool:
    """Return whether a trace has the name of a capture of CUDA graphs."""
    return path.name.startswith(CAPTURE) or path.parent.name == CAPTURES


def find_companions(path: Path) -> list[Path]:
    """Return the files that a serving engine recorded beside a trace of its steps.

    These files are captures of CUDA graphs, names of graph nodes, and logs. If the name of the trace
    contains a rank, omit captures with another rank in their names.
    """
    if _is_capture(path):
        return []
    rank = NAMED_RANK.findall(path.name)
    found = []
    with suppress(OSError):
        for each in sorted([*path.parent.iterdir(), *(path.parent / CAPTURES).glob("*")]):
            named = NAMED_RANK.findall(each.name)
            is_ours = not rank or not named or rank == named
            is_capture = _is_capture(each) and is_ours and is_trace(each)
            is_described = is_log(each) or ANNOTATIONS.search(each.name) is not None
            if each.is_file() and (is_described or (is_capture and each.name != CAPTURE_LIST)):
                found.append(each)
    return found


def is_archive(path: Path) -> bool:
    """Return whether a file has the name of an archive, which may contain several traces."""
    return path.name.lower().endswith(ARCHIVES) and path.is_file()


def is_log(path: Path) -> bool:
    """Return whether a file has the name of a log."""
    return path.suffix == ".log"


def read_source(path: Path, companions: Sequence[Path] = ()) -> Source:
    """Read a run folder or trace file and compute its content hash, without parsing traces.

    `path` may also be a folder that contains only one trace. `companions` are files that describe a
    trace file. Files that an engine recorded beside the trace are found automatically. Raise
    TraceFormatError if the source is invalid or cannot be read.
    """
    if is_archive(path):
        message = (
            "the file is an archive, which may contain several traces; first store them with "
            "`profharness ingest ARCHIVE`"
        )
        expected = "a run folder or a trace"
        raise NotATraceError(path, message, expected=expected)
    if (trace_file := _trace_of(path)) is not None:
        # hash the uncompressed content, because a compressed copy is the same trace
        content_hash = hash_file(trace_file, packed=False)
        raw = Raw(None, printable_path(trace_file.name), trace_file, content_hash)
        files = dict.fromkeys((*companions, *find_companions(trace_file)))
        found = tuple(Companion(each, hash_file(each), is_log(each)) for each in files)
        return Source(path, None, (raw,), content_hash, found)
    run = read_run(path)
    if len({_real_path(path, trace) for trace in run.traces}) < len(run.traces):
        raise TraceFormatError(path / RUN_FILE, "lists a trace twice", expected="each trace once")
    raws = tuple(_raw(path, trace) for trace in run.traces)
    digest = xxhash.xxh3_128(msgspec.json.encode(run))
    for raw in raws:
        digest.update(raw.content_hash.encode())
    for journal in observed_journals(path) if run.kind == OBSERVE else ():
        for file in filter(Path.is_file, (journal, counts_file(journal))):
            digest.update(hash_file(file).encode())
    return Source(path, run, raws, digest.hexdigest())


def hash_file(path: Path, *, packed: bool = True) -> str:
    """Return the XXH3-128 hash of a file in hexadecimal.

    If `packed` is False and the file is compressed, hash its uncompressed content.
    Raise TraceFormatError if the file cannot be read.
    """
    digest = xxhash.xxh3_128()
    try:
        with closing(open_input(path) if packed else open_file(path)[0]) as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _real_path(folder: Path, trace: TraceFile) -> str:
    """Return the resolved path of a trace of a run folder.

    Raise TraceFormatError if the path is outside of the folder, too long or not a valid path.
    """
    try:
        real = os.path.realpath(folder / trace.path)
        if Path(real).is_relative_to(os.path.realpath(folder)) and len(trace.path) <= MAX_PATH:
            return real
    except (OSError, ValueError):  # ValueError if the path contains a NUL
        pass
    shown = f"{trace.path[:SHOWN_PATH]!r}" + ("…" if len(trace.path) > SHOWN_PATH else "")
    raise TraceFormatError(
        folder / RUN_FILE,
        f"lists a trace that is outside its folder or has an invalid name: {shown}",
        expected="a path inside the run folder",
    )


def _raw(folder: Path, trace: TraceFile) -> Raw:
    path = folder / trace.path
    content_hash, problem = "", None
    try:
        if not path.is_file():
            raise TraceFormatError(
                path, "the file is listed in run.json but is missing", expected="a raw trace"
            )
        content_hash = hash_file(path)
    except OSError as error:
        problem = f"{path}: cannot be read: {error.strerror}"
    except TraceFormatError as error:
        problem = str(error)
    return Raw(trace.profiler, trace.path, path, content_hash, trace.cells, problem)


class ParsedTraces(Protocol):
    """Traces that this process or another process has already parsed."""

    def take(self, path: Path, content_hash: str) -> Trace | None:
        """Return a trace, or None if it is not parsed yet. Raise errors from parsing."""


class ParsedTraceCache:
    """A cache of parsed traces with a total file size of at most MOST_BYTES.

    Traces that are not in the cache are parsed when their run is ingested. Several threads may add
    traces at the same time, but `take` must not be called while a trace is added.
    """

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[str, Trace]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, path: Path) -> None:
        """Parse a complete trace and cache it.

        Ignore an unreadable trace here, because the ingest reports the error.
        """
        with suppress(OSError, TraceFormatError, ValueError, OverflowError):
            size = path.stat().st_size
            with self._lock:
                if path in self._kept or self._bytes + size > MOST_BYTES:
                    return
                self._bytes += size
            try:
                content_hash, trace = hash_file(path), open_trace(path)
                with closing(trace):  # removes the temporary file of the trace
                    batches = list(trace.batches())
                self._kept[path] = content_hash, replace(trace, batches=lambda: iter(batches))
            finally:
                if path not in self._kept:
                    with self._lock:
                        self._bytes -= size

    def take(self, path: Path, content_hash: str) -> Trace | None:
        """Remove a parsed trace from the cache and return it.

        Return None if the trace is not cached, or if its file has changed after parsing.
        """
        known, trace = self._kept.pop(path, (None, None))
        return trace if known == content_hash else None
