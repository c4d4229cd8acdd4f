"""A pure reader that finds what is private in published files."""

from __future__ import annotations

import gzip
import itertools
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from profharness.errors import ProfharnessError, TraceFormatError
from profharness.files import is_store
from profharness.parse.nsys_export import MAGIC, META_TABLES
from profharness.parse.packed import GZIP, SUFFIX
from profharness.scrub.nsys import FILTERED, PRIVATE_COLUMNS, STRINGS, columns_of, row_allowed
from profharness.scrub.reports import private_cells
from profharness.scrub.text import PRIVATE_KEYS, Cleaner, machine_names, windows

WINDOW = 1 << 18  # bytes searched at once
OVERLAP = 1 << 12  # no private thing is taken to be longer
EXCERPT = 80
RAW_SUFFIXES = (".nsys-rep", ".qdrep", ".qdstrm", ".ncu-rep")
_KEY = re.compile(
    rf'"(?P<key>{"|".join(sorted(PRIVATE_KEYS))})"\s*+:\s*+'
    r'(?!null|""|\{\s*\}|\[\s*\]|"profharness run )'
)
# A page of SQLite keeps deleted texts; what no table shows is looked for in the bytes.
DELETED = re.compile(
    rb"/(?:home|root|Users)/\w|(?<![A-Z_])(?:PATH|HOME|PWD|USER|LOGNAME|HOSTNAME)=[^\s\0]"
    rb"|(?<!\w)(?:gh[pousr]_[A-Za-z0-9]{20}|github_pat_\w{20}|AKIA[0-9A-Z]{16})"
)
_BOUNDARY = re.compile(rb'[\n"]')
_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|(["\\/bfnrt]))')
_PLAIN = {"b": " ", "f": " ", "n": "\n", "r": "\n", "t": "\t"}


class PrivateDataError(ProfharnessError):
    """A copy still held something private; it was thrown away."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something private. where is a byte of the uncompressed content, or table and column; text
    has at most EXCERPT characters.
    """

    path: Path
    where: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}, {self.where}: {self.kind}: {self.text}"


def audit(path: Path, *, names: Iterable[str] | None = None) -> list[Finding]:
    """Everything private in a file, or in all files below a folder, their names included.

    names: host and user names to look for, None: this machine's. Raises TraceFormatError for what
    cannot be read.
    """
    cleaner = Cleaner(machine_names() if names is None else frozenset(names))
    if not path.is_dir():
        return list(_file(path, path.parent, cleaner))
    files = filter(Path.is_file, sorted(path.rglob("*")))
    return [finding for file in files for finding in _file(file, path, cleaner)]


def _file(path: Path, root: Path, cleaner: Cleaner) -> Iterator[Finding]:
    for kind, text in cleaner.find(str(path.relative_to(root))):
        yield Finding(path, "its name", kind, text[:EXCERPT])
    try:
        name = path.name.lower().removesuffix(SUFFIX)
        if name.endswith(RAW_SUFFIXES):
            yield Finding(path, "the file", "raw report", "holds the environment of its process")
            return
        if is_store(path):
            yield Finding(path, "the file", "store", "holds paths and environments of its runs")
            return
        with path.open("rb") as plain:
            packed = plain.read(len(GZIP)) == GZIP  # whatever its name says
        with gzip.open(path, "rb") if packed else path.open("rb") as opened:
            file = cast("IO[bytes]", opened)
            if file.read(len(MAGIC)) == MAGIC:
                yield from _export(path, file, cleaner, packed=packed)
                return
            file.seek(0)
            yield from _stream(path, file, cleaner)
            if name.endswith(".csv"):
                file.seek(0)
                for column, kind, text in private_cells(path, file, cleaner):
                    yield Finding(path, column, kind, text[:EXCERPT])
    except (OSError, EOFError, sqlite3.Error) as error:
        raise TraceFormatError(path, f"cannot be read: {error}") from None


def _export(path: Path, file: IO[bytes], cleaner: Cleaner, *, packed: bool) -> Iterator[Finding]:
    if not packed:
        yield from _sqlite(path, path, cleaner)
        return
    file.seek(0)
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as unpacked:
        shutil.copyfileobj(file, unpacked, WINDOW)
        unpacked.flush()
        yield from _sqlite(path, Path(unpacked.name), cleaner)


def _stream(path: Path, file: IO[bytes], cleaner: Cleaner) -> Iterator[Finding]:
    """Search a text window by window; each finding once."""
    seen: set[tuple[str, str]] = set()
    # an empty block behind the last one, so that the last window knows that it is
    blocks = itertools.chain(iter(lambda: file.read(WINDOW), b""), (b"",))
    for (offset, window), (_, behind) in itertools.pairwise(windows(blocks, OVERLAP)):
        whole = _whole(window, first=offset == 0, last=len(behind) <= OVERLAP)
        for kind, text in _text(_unescaped(whole), cleaner):
            if (kind, text) not in seen:
                seen.add((kind, text))
                yield Finding(path, f"about byte {offset}", kind, text[:EXCERPT])


def _whole(window: bytes, *, first: bool, last: bool) -> bytes:
    """The window without the parts of texts at its cuts, if they are short: of a package's name a cut
    makes a path (`torch/nn/…`), and of a public address another one. Both stand in the next window.
    """
    start = end = None
    if not first and (head := _BOUNDARY.search(window, 0, OVERLAP // 4)):
        start = head.start()
    if not last:
        tail = max(window.rfind(mark, len(window) - OVERLAP // 4) for mark in (b"\n", b'"'))
        end = tail + 1 if tail >= 0 else None
    return window[start:end]


def _text(text: str, cleaner: Cleaner) -> Iterator[tuple[str, str]]:
    yield from cleaner.find(text)
    for key in _KEY.finditer(text):
        yield "private key", key["key"]


def _unescaped(data: bytes) -> str:
    """The text with JSON's escapes undone, so that `\\/home` and `\\n/home` are found."""
    text = data.decode("utf-8", "replace")
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda m: chr(int(m[1], 16)) if m[1] else _PLAIN.get(m[2], m[2]), text)


def _sqlite(path: Path, real: Path, cleaner: Cleaner) -> Iterator[Finding]:
    uri = real.resolve().as_uri() + "?mode=ro&immutable=1"
    with closing(sqlite3.connect(uri, uri=True)) as connection:
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        tables = [str(name) for (name,) in connection.execute(sql)]
        nsys = any(name in tables for name in META_TABLES)
        shown = False
        for table in tables:
            for finding in _table(connection, path, table, nsys, cleaner):
                shown = True
                yield finding
        if not shown:
            yield from _deleted(path, real)


def _table(
    connection: sqlite3.Connection, path: Path, table: str, nsys: bool, cleaner: Cleaner
) -> Iterator[Finding]:
    columns = [str(row[1]) for row in connection.execute(f'PRAGMA table_info("{table}")')]
    allowed = columns_of(table) if nsys and table != STRINGS else dict.fromkeys(columns, "")
    seen: set[tuple[str, str]] = set()
    for row in connection.execute(f'SELECT * FROM "{table}"'):
        values = dict(zip(columns, row, strict=True))
        if allowed is None:
            yield Finding(path, table, "rows of a table that nsys fills with private data", table)
            return
        if nsys and table in FILTERED and not row_allowed(table, values):
            text = str(values[FILTERED[table][0]])[:EXCERPT]
            yield Finding(path, table, "a row that is not known to be harmless", text)
        for column, value in values.items():
            if nsys and column in PRIVATE_COLUMNS and value not in (None, ""):
                yield Finding(path, f"{table}.{column}", "private column", str(value)[:EXCERPT])
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            if not isinstance(text, str):
                continue
            for kind, excerpt in _text(text, cleaner):
                if (kind, excerpt) not in seen:
                    seen.add((kind, excerpt))
                    yield Finding(path, f"{table}.{column}", kind, excerpt[:EXCERPT])


def _deleted(path: Path, real: Path) -> Iterator[Finding]:
    with real.open("rb") as file:
        for _, window in windows(iter(lambda: file.read(WINDOW), b""), OVERLAP):
            if match := DELETED.search(window):
                text = match[0][:8].decode("utf-8", "replace")
                yield Finding(path, "deleted rows", "left in the file; VACUUM removes it", text)
                return
