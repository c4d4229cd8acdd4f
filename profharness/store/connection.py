"""Opening the store file: recognises foreign files, migrates once, waits for other processes
instead of failing.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from profharness.config import WORDS, Config
from profharness.errors import NotFoundError, StoreError
from profharness.store.schema import APPLICATION_ID, SCHEMA_VERSION, migrate

_FIELDS = tuple(field.name for field in fields(Config))


def config_of(values: Sequence[object]) -> Config:
    """The Config of a `configs` row, columns in Config's field order."""
    row = dict(zip(_FIELDS, values, strict=True))
    row |= {name: bool(row[name]) for name in WORDS}
    return Config(**row)  # type: ignore[arg-type]


def config_ids(connection: sqlite3.Connection, asked: Sequence[Config]) -> set[int]:
    """Ids of the stored configs that any of the asked ones matches (no dtype asked: any dtype)."""
    rows = connection.execute(f"SELECT id, {', '.join(_FIELDS)} FROM configs").fetchall()
    stored = [(row[0], config_of(row[1:])) for row in rows]
    return {one for one, config in stored if any(each.matches(config) for each in asked)}


def in_list(ids: Iterable[int]) -> str:
    """Integers as the inside of an SQL IN (...)."""
    return ", ".join(str(int(one)) for one in sorted(ids))


BUSY_SECONDS = 600.0
MAGIC = b"SQLite format 3\0"
Answer = TypeVar("Answer")


def connect(path: Path, *, write: bool, foreign_keys: bool = True) -> sqlite3.Connection:
    """A connection in autocommit mode to an up-to-date store.

    With write, the store is created or migrated where needed. Raises NotFoundError when there is no
    store to read, StoreError
    for a foreign, damaged or newer file, which stays untouched.
    """
    if write and not path.exists() and not path.parent.is_dir():
        raise StoreError(f"{path}: its folder does not exist; create it or name another --store")
    if not write and not path.exists():
        raise NotFoundError(
            f"{path}: no store here; `profharness ingest FILE` or `profharness capture` makes one, "
            "--store names another"
        )
    _check_header(path)
    try:
        if write:
            return waiting(lambda: _open_writer(path, foreign_keys))
        return waiting(lambda: _open_reader(path))
    except sqlite3.Error as error:
        raise StoreError(f"{path}: cannot be used as a store: {error}") from None


def waiting(action: Callable[[], Answer]) -> Answer:
    """The action's answer, tried again while SQLite says busy.

    SQLite skips its own busy handler where waiting could deadlock, as in the switch to WAL or the
    recovery of one.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A write transaction: committed whole, or rolled back on any exception, Ctrl-C included."""
    waiting(lambda: connection.execute("BEGIN IMMEDIATE"))
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )


def _check_header(path: Path) -> None:
    """Refuse what is plainly not ours before SQLite opens it (opening may already replay a foreign
    WAL).
    """
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be read: {error.strerror}; name another --store"
        ) from None
    if not header:
        return
    if header[:16] != MAGIC[: len(header)] or len(header) < 100:
        raise StoreError(f"{path}: not an SQLite file, left as it is; name another --store")
    application = int.from_bytes(header[68:72], "big")
    if application not in (0, APPLICATION_ID):
        raise _foreign(path)


def _foreign(path: Path) -> StoreError:
    return StoreError(
        f"{path}: an SQLite file of another program, left as it is; name another --store"
    )


def _raw(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{mode}", timeout=BUSY_SECONDS, isolation_level=None, uri=True
    )


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _state(connection: sqlite3.Connection, path: Path) -> int:
    """The schema version, 0 for an empty file. Raises StoreError for a foreign or newer one."""
    application = _pragma(connection, "application_id")
    version = _pragma(connection, "user_version")
    if application != APPLICATION_ID:
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application != 0 or tables or version:
            raise _foreign(path)
        return 0
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: made by a newer profharness (schema {version}, this one knows "
            f"{SCHEMA_VERSION}); upgrade profharness or name another --store"
        )
    return version


def _open_writer(path: Path, foreign_keys: bool) -> sqlite3.Connection:
    if path.exists() and path.stat().st_size:
        probe = _raw(path, "mode=ro")
        try:
            _state(probe, path)
        finally:
            probe.close()
    connection = _raw(path, "mode=rwc")
    try:
        if _state(connection, path) < SCHEMA_VERSION:
            connection.execute("BEGIN IMMEDIATE")
            try:
                if _state(connection, path) < SCHEMA_VERSION:
                    migrate(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
    except BaseException:
        connection.close()
        raise
    return connection


def _open_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write rows; on a medium that cannot be written at all, an immutable
    one.
    """
    for mode in ("mode=rw", "mode=ro&immutable=1"):
        connection = _raw(path, mode)
        try:
            version = _state(connection, path)
            connection.execute("PRAGMA query_only = ON")
        except sqlite3.OperationalError as error:
            connection.close()
            if _is_busy(error) or mode != "mode=rw":
                raise
        except BaseException:
            connection.close()
            raise
        else:
            if version == SCHEMA_VERSION:
                return connection
            connection.close()
            if version:
                _open_writer(path, True).close()
                return _open_reader(path)
            raise NotFoundError(f"{path}: an empty store; `profharness ingest FILE` fills it")
    raise StoreError(f"{path}: cannot be opened")
