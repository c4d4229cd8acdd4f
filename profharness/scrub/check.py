"""Audit files: report everything that `scrub` would replace or drop."""

from __future__ import annotations

import contextlib
import gzip
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from profharness.errors import ProfharnessError, TraceFormatError
from profharness.files import is_store, open_input
from profharness.scrub.kineto import scrub_kineto
from profharness.scrub.nsys import scrub_nsys
from profharness.scrub.replace import Scrubber
from profharness.scrub.reports import scrub_ncu
from profharness.traces.nsys_export import MAGIC
from profharness.traces.packed import GZIP, SUFFIX, unpacked

Writer = Callable[[Path, IO[bytes], Scrubber], None]
RAW_SUFFIXES = (".nsys-rep", ".qdrep", ".qdstrm", ".ncu-rep")
MAX_JSON = 1 << 28  # maximum bytes of a document; a larger one that is no trace is read by lines


class PrivateDataError(ProfharnessError):
    """A copy contained something that is not known to be harmless. The copy was deleted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that `scrub` replaces or drops. `text` is its replacement."""

    path: Path
    where: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}, {self.where}: {self.kind}: {self.text}"


def writer_of(path: Path) -> Writer:
    """Return the function that writes the scrubbed copy of an unpacked trace."""
    with open_input(path) as file:
        head = file.read(len(MAGIC))
    if head == MAGIC:
        return scrub_nsys
    return scrub_ncu if path.name.lower().endswith(".csv") else scrub_kineto


def as_plain_file(path: Path) -> contextlib.AbstractContextManager[Path]:
    """Return a context manager that yields the file, or an unpacked copy of a packed export or CSV.

    A packed Kineto trace is not unpacked, because its reader does that.
    """
    return (
        contextlib.nullcontext(path) if path.name.lower().endswith(".json.gz") else unpacked(path)
    )


def audit(path: Path) -> list[Finding]:
    """Return what `scrub` would replace in a file, or in the files of a folder and in their names.

    Raise TraceFormatError for files that cannot be read.
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
    name = path.name.lower().removesuffix(SUFFIX)
    if name.endswith(RAW_SUFFIXES):
        scrubber.record("raw report", "contains the environment of its process", "the file")
        return
    if is_store(path):
        scrubber.record("store", "contains paths and environments of its runs", "the file")
        return
    with _opened(path) as file:
        head = file.read(len(MAGIC))
        is_trace = head == MAGIC or (name.endswith(".csv") and b'"ID"' in head + file.read(1 << 16))
        document = None
        if not is_trace and not name.endswith(".jsonl"):
            is_trace, document = _json_of(file)
    if is_trace:
        attempt = Scrubber(looks_for_deleted=True)
        try:
            with as_plain_file(path) as plain, Path("/dev/null").open("wb") as nowhere:
                writer_of(plain)(plain, nowhere, attempt)
        except TraceFormatError:
            attempt.record("damage", "a trace that cannot be read whole", "the file")
            if head != MAGIC:
                _check_lines(path, scrubber)
        scrubber.changes.update(attempt.changes)
    elif document is not None:
        scrubber.where = "member"
        scrubber.value(document)
    else:
        _check_lines(path, scrubber)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as plain:
        packed = plain.read(len(GZIP)) == GZIP  # the suffix may be wrong
    with gzip.open(path, "rb") if packed else path.open("rb") as file:
        yield cast("IO[bytes]", file)


def _json_of(file: IO[bytes]) -> tuple[bool, Any]:
    """Return whether a file is a Kineto trace, and the content of any other JSON document.

    The content is None if the file is a Kineto trace, is too large or is no JSON.
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


def _check_lines(path: Path, scrubber: Scrubber) -> None:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            scrubber.where = f"line {number}"
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            if text.startswith("{"):
                with contextlib.suppress(msgspec.MsgspecError, RecursionError):
                    scrubber.value(msgspec.json.decode(line))
                    continue
            scrubber.clean(text)
