"""Create and open the store file.

Migrations use sqlite_utils. They are never edited after a release.

SQLite's write-ahead log does not work on a network file system. Its index is in shared memory,
which other hosts cannot access, and file locks are unreliable there. See
https://sqlite.org/wal.html.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from profharness.errors import NotAStoreError, NotFoundError, StoreError
from profharness.files import DEFAULT_STORE, STORE_ID, STORE_VARIABLE
from profharness.store.tables import TABLES, VIEWS

SCHEMA_VERSION = 19
FIRST_VERSION = 15  # versions 1 to 14 were never released
MIGRATION_SET = "profharness"
BUSY_SECONDS = 600.0
WHOLLY_CHECKED_BYTES = 32 << 20  # maximum size of a file that is checked completely, in about 0.2 s
SMALL_TABLES = (
    *("environments", "runs", "devices", "configs", "cells", "refusals", "traces", "trace_cells"),
    *("kernels", "launch_configs", "op_paths", "apis", "range_names"),
)
OTHER = "choose another store with --store"
ALTERED = "the store was altered"
MISSING = re.compile(
    r"no such (table|column)|table \w+ has (no column|\d+ columns)|Object missing required field"
)
MOUNTS = Path("/proc/self/mountinfo")
# types of network file systems in mountinfo, without the prefix `fuse.`
NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "ceph-fuse", "cifs", "gcsfuse", "glusterfs", "goofys", "gpfs",
    "juicefs", "lustre", "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "rclone", "s3fs", "smb3",
    "smbfs", "sshfs", "wekafs",
})  # fmt: skip
_OCTAL = re.compile(r"\\([0-7]{3})")
Answer = TypeVar("Answer")


def network_type(path: Path) -> str | None:
    """Return the type of the network file system that contains a path. The path need not exist.

    Return None if the path is on a local disk, or if the mounts cannot be read.
    """
    real = f"{os.path.realpath(path)}/"
    point, kind = "", ""
    with suppress(OSError):
        for line in MOUNTS.read_text(errors="surrogateescape").splitlines():
            mount, _, source = line.partition(" - ")
            folder = _OCTAL.sub(lambda match: chr(int(match[1], 8)), mount.split(" ")[4])
            # a later mount covers an earlier mount at the same point
            if real.startswith(f"{folder.rstrip('/')}/") and len(folder) >= len(point):
                point, kind = folder, source.split(" ")[0].removeprefix("fuse.")
    is_sandbox = (point, kind) == ("/", "9p")  # the root of a sandbox is often mounted with 9P
    return kind if kind in NETWORK and not is_sandbox else None


def refuse_network(path: Path) -> None:
    """Raise StoreError if a store that is to be written is on a network file system."""
    kind = network_type(path)
    if kind is not None:
        folders = [Path.home(), Path("/var/tmp"), Path(tempfile.gettempdir())]
        local = (each for each in folders if os.access(each, os.W_OK) and not network_type(each))
        elsewhere = next(local, folders[-1]) / DEFAULT_STORE
        raise StoreError(
            f"{path}: this store is on a network file system ({kind}), where concurrent hosts can "
            f"damage the store; keep the store on a local disk (--store {elsewhere}, or "
            f"{STORE_VARIABLE}); run folders and traces can stay where they are"
        )


def file_beside(path: Path, suffix: str) -> Path:
    """Return the path of a file that SQLite creates next to a store, such as its log.

    Symbolic links are resolved.
    """
    return Path(f"{os.path.realpath(path)}{suffix}")


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate the schema to the current version in the caller's write transaction."""
    # sqlite_utils would import pandas, which takes longer than ingesting a large trace
    is_loaded = "pandas" in sys.modules
    try:
        sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]
        from sqlite_utils import Database, Migrations
    finally:
        if not is_loaded:
            del sys.modules["pandas"]

    migrations = Migrations(MIGRATION_SET)
    migrations(name="015_initial")(_initial)
    migrations(name="016_window")(_add_window)
    migrations(name="017_run_times")(_add_run_times)
    migrations(name="018_engines")(_add_engines)
    migrations(name="019_rocm")(_add_rocm)
    migrations.apply(Database(connection, execute_plugins=False))
    connection.execute(f"PRAGMA application_id = {STORE_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _initial(db: Any) -> None:
    views = (f"CREATE VIEW {name} AS {select}" for name, select in VIEWS.items())
    for statement in chain(TABLES.split(";"), views):
        db.execute(statement)


def _add_window(db: Any) -> None:
    db.execute("ALTER TABLE configs ADD COLUMN window INTEGER")


def _add_run_times(db: Any) -> None:
    for column in ("ended TEXT", "duration_ns INTEGER", "lanes_ns INTEGER"):
        db.execute(f"ALTER TABLE runs ADD COLUMN {column}")


def _add_engines(db: Any) -> None:
    for column in ("recorded_with TEXT", "engine TEXT"):
        db.execute(f"ALTER TABLE runs ADD COLUMN {column}")
    for column in (
        *("lens TEXT", "page INTEGER", "kv_dtype TEXT", "mla TEXT", "softcap REAL"),
        "sinks INTEGER NOT NULL DEFAULT 0",
    ):
        db.execute(f"ALTER TABLE configs ADD COLUMN {column}")


def _add_rocm(db: Any) -> None:
    for column in ("accum_registers_per_thread", "scalar_registers", "scratch_bytes_per_thread"):
        db.execute(f"ALTER TABLE launch_configs ADD COLUMN {column} INTEGER")
    for name, select in VIEWS.items():  # the views contain the new columns
        db.execute(f"DROP VIEW IF EXISTS {name}")
        db.execute(f"CREATE VIEW {name} AS {select}")


def require_folder(path: Path) -> None:
    """Raise NotAStoreError if a store cannot be created because its folder does not exist."""
    if not path.exists() and not path.parent.is_dir():
        raise NotAStoreError(
            f"{path}: the folder does not exist; create it or choose another store with --store"
        )


def require_writable(path: Path) -> None:
    """Raise StoreError if a store cannot be written, or cannot be created in its folder."""
    require_folder(path)
    refuse_network(path)
    if path.exists() and not os.access(path, os.W_OK, effective_ids=True):
        raise StoreError(f"{path}: no permission to write this store; {OTHER}")
    # SQLite writes its log beside the store, not beside a link to the store
    folder = path.resolve().parent
    if not os.access(folder, os.W_OK, effective_ids=True):
        raise StoreError(f"{path}: no permission to write in the folder {folder}; {OTHER}")


def connect(path: Path, *, write: bool, foreign_keys: bool = True) -> sqlite3.Connection:
    """Return a connection in autocommit mode. If `write` is True, create a missing store.

    Raise NotFoundError if there is no store to read. Raise StoreError if the file belongs to
    another program, is damaged or has another schema version, or if a store on a network file
    system is to be written. In these cases, the file is not changed.
    """
    if write:
        require_writable(path)
    elif not path.exists():
        raise NotFoundError(
            f"{path}: the store does not exist; create it with `profharness ingest FILE` or "
            "`profharness capture`, or choose another store with --store"
        )
    try:
        _check_header(path, write)
        if write:
            return waiting(lambda: _open_writer(path, foreign_keys))
        return waiting(lambda: _open_reader(path))
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if is_damage(error):
            raise damaged(path, error) from None
        raise StoreError(f"{path}: cannot be used as a store: {error}") from None


class Writer:
    """A function that opens a store for writing on the first call.

    Later calls open the store again if the file was deleted or replaced.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    def __call__(self) -> sqlite3.Connection:
        """Return the connection, which does not check foreign keys."""
        if self._connection is not None and self._file != _identity(self._path):
            self.close()
        if self._connection is None:
            self._connection = connect(self._path, write=True, foreign_keys=False)
            self._file = _identity(self._path)
        return self._connection

    def close(self) -> None:
        """Close the store.

        If the file was replaced, checkpoint the log first, because the name of the log now belongs
        to another store.
        """
        if self._connection is None:
            return
        with closing(self._connection) as connection, suppress(sqlite3.Error):
            if self._file != _identity(self._path):
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection = None


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file, or None if the file does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def damaged(path: Path, detail: object, what: str | None = None) -> StoreError:
    """Return an error for a store that must not be used, with the command that rebuilds it."""
    what = what or (ALTERED if is_altered(detail) else "the store is damaged")
    return StoreError(
        f"{path}: {what} ({detail}). The file was not changed. To rebuild it from the run folders, use: "
        "profharness ingest traces/runs --store NEW"
    )


def is_damage(error: BaseException) -> bool:
    """Return whether only a damaged store file can cause an error."""
    if isinstance(error, UnicodeDecodeError | json.JSONDecodeError):
        return True
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or (
        isinstance(error, sqlite3.Error) and "decode to UTF-8" in str(error)
    )


def is_altered(error: object) -> bool:
    """Return whether an error shows that the schema of a store was changed."""
    kinds = (sqlite3.OperationalError, msgspec.ValidationError)
    return isinstance(error, kinds) and MISSING.match(str(error)) is not None


def find_damage(connection: sqlite3.Connection, *tables: str) -> str | None:
    """Return the first problem that SQLite finds in a store, or None if it finds no problem.

    If tables are given, only these tables are checked. The check reads about 200 MB per second.
    """
    try:
        for name in tables or ("1",):
            (text,) = connection.execute(f"PRAGMA quick_check({name})").fetchone()
            if text != "ok":
                return str(text).splitlines()[-1]
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            return str(error)
        raise
    return None


@cache
def _check_file(path: str, inode: int) -> None:  # noqa: ARG001
    """Raise StoreError if a file is damaged. Each process checks a file only once.

    In a store of more than WHOLLY_CHECKED_BYTES, only SMALL_TABLES are checked.
    """
    with closing(_raw(Path(path), "mode=ro")) as connection:
        large = Path(path).stat().st_size > WHOLLY_CHECKED_BYTES
        detail = find_damage(connection, *(SMALL_TABLES if large else ()))
    if detail:
        raise damaged(Path(path), detail)


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )


def waiting(action: Callable[[], Answer]) -> Answer:
    """Run an action and return its result. Repeat the action while SQLite reports a busy file.

    SQLite skips its own busy handler if waiting could cause a deadlock, for example when it
    switches to WAL or recovers a log.
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
    """Run a block in a write transaction.

    Roll back on any exception, including KeyboardInterrupt.
    """
    waiting(lambda: connection.execute("BEGIN IMMEDIATE"))
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _check_header(path: Path, write: bool) -> None:
    """Raise StoreError if a file belongs to another program, before SQLite replays the file's log.

    The header is read through SQLite, because closing any other descriptor of the file would
    release SQLite's locks on it in this process (https://sqlite.org/howtocorrupt.html). The
    connection is immutable, so that SQLite neither locks the file nor reads its log.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}; {OTHER}") from None
    if not stat.S_ISREG(status.st_mode):
        raise NotAStoreError(f"{path}: not a regular file; {OTHER}")
    if not os.access(path, os.R_OK):
        raise StoreError(f"{path}: cannot be read: Permission denied; {OTHER}")
    if write and status.st_nlink > 1:
        raise StoreError(
            f"{path}: the file has {status.st_nlink} hard links, and SQLite would keep a log for each "
            "link; remove the other links, or copy the store and choose the copy with --store"
        )
    with closing(_raw(path, "mode=ro&immutable=1")) as connection:
        # Ignore errors in the schema, because another process may be writing it.
        connection.execute("PRAGMA writable_schema = ON")
        objects = 0
        try:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            if application == 0:
                with suppress(sqlite3.DatabaseError):
                    (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
                # read again, because another process may have created the store meanwhile
                (application,) = connection.execute("PRAGMA application_id").fetchone()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_NOTADB:
                raise
            raise NotAStoreError(
                f"{path}: the file is not an SQLite file and was not changed; {OTHER}"
            ) from None
    if application != STORE_ID and (application or objects):
        raise _foreign(path)


def _foreign(path: Path) -> NotAStoreError:
    return NotAStoreError(
        f"{path}: the SQLite file belongs to another program and was not changed; {OTHER}"
    )


def _raw(path: Path, mode: str) -> sqlite3.Connection:
    """Return a connection that detects malformed b-tree cells.

    The connection does not run unsafe functions that the schema of a foreign file may contain.
    """
    uri = f"{path.absolute().as_uri()}?{mode}"
    connection = sqlite3.connect(uri, timeout=BUSY_SECONDS, isolation_level=None, uri=True)
    with _closed_on_error(connection):
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
    return connection


@contextmanager
def _closed_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema version of a store that can be read, or 0 if the file is empty.

    Raise StoreError for other files.
    """
    # one statement, because another process may be creating the store
    application, version, objects = connection.execute(
        "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master) "
        "FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if application != STORE_ID:
        if application or version or objects:
            raise _foreign(path)
        return 0
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: the store was made by a newer profharness (schema {version}, while this version "
            f"reads up to {SCHEMA_VERSION}); upgrade profharness or choose another store with --store"
        )
    if version < FIRST_VERSION:
        raise StoreError(
            f"{path}: the store was made by an unreleased profharness (schema {version}); delete it or "
            "choose another store with --store, and to ingest the run folders again, use: profharness "
            "ingest FOLDER"
        )
    # Users may add tables and views, but not triggers, which would run at the next ingest.
    query = "SELECT name FROM sqlite_master WHERE type = 'trigger' LIMIT 1"
    for (name,) in connection.execute(query):
        raise damaged(path, f"it contains the trigger {name!r}", ALTERED)
    return int(version)


def _open_writer(path: Path, foreign_keys: bool) -> sqlite3.Connection:
    if path.exists() and path.stat().st_size:
        # SQLite rolls back the transaction of a killed process, but not on a read-only connection
        half_written = file_beside(path, "-journal").exists()
        with closing(_raw(path, "mode=rw" if half_written else "mode=ro")) as probe:
            _version(probe, path)
        _check_file(str(path.absolute()), path.stat().st_ino)
    connection = _raw(path, "mode=rwc")
    with _closed_on_error(connection):
        if _version(connection, path) < SCHEMA_VERSION:
            with transaction(connection):
                # another process may have created or migrated the store
                if _version(connection, path) < SCHEMA_VERSION:
                    migrate(connection)
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
    return connection


def _open_reader(path: Path) -> sqlite3.Connection:
    """Return a connection that cannot write rows.

    Open the file as immutable if it is on a network file system or on read-only media, because no
    process writes to it there. Raise StoreError if another host may be writing to it.
    """
    kind, log = network_type(path), file_beside(path, "-wal")
    if kind and log.is_file() and log.stat().st_size:
        raise StoreError(
            f"{path}: this store is on a network file system ({kind}) and has a log ({log.name}), so "
            "another host may be writing to the store; copy both files to a local disk and choose "
            "the copy with --store"
        )
    if kind is None:
        try:
            return _reader(path, "mode=rw")
        except sqlite3.OperationalError as error:
            if _is_busy(error):
                raise
    return _reader(path, "mode=ro&immutable=1")


def _reader(path: Path, mode: str) -> sqlite3.Connection:
    connection = _raw(path, mode)
    with _closed_on_error(connection):
        if not _version(connection, path):
            raise NotFoundError(
                f"{path}: the store is empty; add data with `profharness ingest FILE`"
            )
        connection.execute("PRAGMA query_only = ON")
    return connection
