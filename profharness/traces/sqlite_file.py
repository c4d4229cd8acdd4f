"""Open SQLite files that other programs wrote, without ever writing to them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from profharness.errors import TraceFormatError
from profharness.files import open_input

MAGIC = b"SQLite format 3\0"
PLAIN_TABLES = (
    "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
)


@dataclass(frozen=True, slots=True)
class Form:
    """The texts of messages about a kind of SQLite file."""

    expected: str
    again: str  # how to make the file again
    empty: str = "the file is empty"


@contextmanager
def database(path: Path, shown: Path, form: Form) -> Iterator[sqlite3.Connection]:
    """Open an SQLite file for reading. Messages name the path `shown` instead of `path`.

    Raise TraceFormatError if the file is not complete. SQLite's errors inside the `with` block are
    also converted to TraceFormatError.
    """
    _check_file(path, shown, form)
    try:
        # With `immutable`, SQLite creates neither a -shm file nor locks
        uri = path.resolve().as_uri() + "?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True, check_same_thread=False)) as connection:
            connection.text_factory = lambda data: data.decode("utf-8", "replace")
            connection.execute("PRAGMA trusted_schema = OFF")
            yield connection
    # UnicodeDecodeError is raised if a damaged schema is not UTF-8, because sqlite3 then cannot
    # build its error message
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise TraceFormatError(
            shown, f"damaged: {error}; {form.again}", expected=form.expected
        ) from None


def quoted(name: str) -> str:
    """Return the name of a table or column, quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def table_columns(connection: sqlite3.Connection) -> dict[str, frozenset[str]]:
    """Return the columns of each table that is neither virtual nor a view."""
    names = [str(name) for (name,) in connection.execute(PLAIN_TABLES).fetchall()]
    return {name: columns_of(connection, name) for name in names}


def columns_of(connection: sqlite3.Connection, table: str) -> frozenset[str]:
    """Return the names of the columns of a table."""
    rows = connection.execute(f"PRAGMA table_info({quoted(table)})").fetchall()
    return frozenset(str(row[1]) for row in rows)


def columns_or_null(table: str | None, present: frozenset[str], wanted: Sequence[str]) -> str:
    """Return a subquery with the wanted columns of a table, with NULL for missing columns.

    If there is no table, the subquery has no rows.
    """
    values = (quoted(name) if table and name in present else "NULL" for name in wanted)
    listed = ", ".join(
        f"{value} AS {quoted(name)}" for value, name in zip(values, wanted, strict=True)
    )
    if table is None:
        return f"(SELECT {listed} WHERE 0)"
    return f"(SELECT {listed} FROM {quoted(table)})"


def _check_file(path: Path, shown: Path, form: Form) -> None:
    """Raise TraceFormatError if a file is not a complete SQLite file, or is still being written."""
    try:
        with open_input(path) as file:
            size, head = file.size, file.read(100)
    except OSError as error:
        raise TraceFormatError(shown, f"cannot be read: {error.strerror}") from None
    if not size:
        message = form.empty
        raise TraceFormatError(shown, f"{message}; {form.again}", expected=form.expected)
    if not head.startswith(MAGIC) or len(head) < 100:
        raise TraceFormatError(shown, "not an SQLite file", offset=0, expected=form.expected)
    page = int.from_bytes(head[16:18], "big")
    page = 65536 if page == 1 else page
    pages = int.from_bytes(head[28:32], "big")
    counted = head[24:28] == head[92:96]  # whether the number of pages in the header is valid
    if counted and size < page * pages:
        message = f"cut off: {size} of {page * pages} bytes; {form.again}"
        raise TraceFormatError(shown, message, offset=size, expected=form.expected)
    for suffix in ("-journal", "-wal"):
        beside = path.with_name(path.name + suffix)
        if beside.exists() and beside.stat().st_size:
            message = (
                f"incomplete: {beside.name} exists beside it; wait until the file is complete, "
                f"or {form.again}"
            )
            raise TraceFormatError(shown, message, expected=form.expected)
