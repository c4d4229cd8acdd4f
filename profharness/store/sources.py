"""What there is to take in: run folders, their raw traces, lone trace files, and their content
hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from profharness import run as record
from profharness.errors import TraceFormatError
from profharness.parse import is_trace, sniff

EXPECTED = "a run folder, a trace file, or a folder of these"
CHUNK = 1 << 20
UNREADABLE = "trace_unreadable"


@dataclass(frozen=True, slots=True)
class Raw:
    """One raw trace file of a source; cells are those that run.json says it covers. problem: why it
    cannot be read.
    """

    profiler: str | None
    name: str
    path: Path
    content_hash: str
    cells: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A source before it is parsed; run is None for a trace file that no run folder holds."""

    path: Path
    run: record.Run | None
    raws: tuple[Raw, ...]
    content_hash: str


def find_sources(path: Path) -> list[Path]:
    """The run folders and trace files that a path stands for. Raises TraceFormatError if there is
    none.
    """
    try:
        if path.is_file() or (path / record.RUN_FILE).is_file():
            return [path]
        if not path.is_dir():
            raise TraceFormatError(path, "no such file or folder", expected=EXPECTED)
        found = list(_walk(path))
    except OSError as error:
        place = error.filename or path
        raise TraceFormatError(place, f"cannot be read: {error.strerror}") from None
    if not found:
        raise TraceFormatError(path, "nothing to ingest in this folder", expected=EXPECTED)
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for entry in sorted(entry for entry in folder.iterdir() if not entry.name.startswith(".")):
        if entry.is_dir() and not entry.is_symlink():
            yield from [entry] if (entry / record.RUN_FILE).is_file() else _walk(entry)
        elif entry.is_file() and is_trace(entry) and sniff(entry):
            yield entry


def hash_file(path: Path) -> str:
    """The content hash of a file: XXH3-128 of its bytes, as hex. Raises TraceFormatError if it
    cannot be read.
    """
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def read_source(path: Path) -> Source:
    """A run folder or trace file with its content hash, nothing parsed. Raises TraceFormatError."""
    if path.is_file():
        content_hash = hash_file(path)
        return Source(path, None, (Raw(None, path.name, path, content_hash),), content_hash)
    run = record.read_run(path)
    raws = tuple(_raw(path, trace) for trace in run.traces)
    digest = xxhash.xxh3_128(msgspec.json.encode(run))
    for raw in raws:
        digest.update(raw.content_hash.encode())
    return Source(path, run, raws, digest.hexdigest())


def _raw(folder: Path, trace: record.TraceFile) -> Raw:
    path = folder / trace.path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TraceFormatError(
            folder / record.RUN_FILE,
            f"names a trace outside of its folder: {trace.path!r}",
            expected="a path inside the run folder",
        )
    content_hash, problem = "", None
    try:
        if not path.is_file():
            raise TraceFormatError(path, "named in run.json but missing", expected="a raw trace")
        content_hash = hash_file(path)
    except TraceFormatError as error:
        problem = str(error)
    return Raw(trace.profiler, trace.path, path, content_hash, trace.cells, problem)


def problems(source: Source) -> tuple[record.Problem, ...]:
    """The problems that run.json tells of, and the traces that cannot be read."""
    if source.run is None:
        return ()
    unreadable = (
        record.Problem(
            raw.profiler or "",
            UNREADABLE,
            raw.problem,
            f"copy {raw.name} again if another copy is whole, or capture again with "
            f"--profiler {raw.profiler}",
            cells=raw.cells,
        )
        for raw in source.raws
        if raw.problem is not None
    )
    return (*source.run.problems, *unreadable)
