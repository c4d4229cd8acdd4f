"""Launches beside the store: one Parquet file a trace, while what sums them up stays in SQLite.

A file has a name of its own and is whole before the row that names it is committed. What no row names
is removed by the next writer.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import xxhash

from profharness.errors import StoreError, pip_line
from profharness.files import open_input
from profharness.store.schema import connect, transaction
from profharness.store.tables import VIEWS

HINTED_LAUNCHES = 50_000_000
EXTRA = "shards"
BLOCK = 1 << 20
_OURS = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.parquet(\.tmp)?")
_OF_LAUNCHES = ("kernel_launches", "kernel_metrics")  # views


def move_launches(store: Path, run: str) -> int:
    """Move the launches of a run's traces out of the store, in one transaction; how many there were.

    Launches with hardware counters stay. Raises StoreError, and then changes nothing.
    """
    with closing(connect(store, write=True, foreign_keys=False)) as connection:
        engine = require_parquet(f"{store}: launches are written as Parquet")
        columns = columns_of(connection)
        try:
            with transaction(connection):
                traces = connection.execute(
                    "SELECT t.id, t.content_hash, t.first_launch_id, t.last_launch_id FROM traces t "
                    "JOIN runs r ON r.id = t.run_id WHERE r.run = ? AND t.launches > 0 AND t.id NOT IN "
                    "(SELECT trace_id FROM launch_shards) AND NOT EXISTS (SELECT 1 FROM metrics m "
                    "WHERE m.launch_id BETWEEN t.first_launch_id AND t.last_launch_id)",
                    (run,),
                ).fetchall()
                moved = 0
                for trace, content_hash, *span in traces:
                    held = engine.stored_launches(connection, span, columns).joined()
                    keep_launches(connection, trace, content_hash, held)
                    connection.execute("DELETE FROM launches WHERE id BETWEEN ? AND ?", span)
                    moved += span[1] - span[0] + 1
        finally:
            sweep(connection)
    return moved


def keep_launches(
    connection: sqlite3.Connection, trace: int, content_hash: str, held: Mapping[str, Any]
) -> None:
    """Write the columns of a trace's launches beside the store, inside the caller's transaction. The file
    is on the disk before this returns, and counts with the commit. Raises StoreError.
    """
    engine = require_parquet(f"{_folder(connection)}: launches are written as Parquet")
    try:
        path = _new_path(connection, content_hash)
        part = path.with_name(f"{path.name}.tmp")
        engine.write_launches(held, columns_of(connection), part)
        digest = _digest(part)
        _settle(part, path)
    except OSError as error:
        reason = error.strerror or error
        raise StoreError(
            f"{_folder(connection)}: launches cannot be written there: {reason}; the store stays as it was"
        ) from None
    row = (trace, path.name, digest)
    connection.execute("INSERT INTO launch_shards VALUES (?, ?, ?)", row)


def shard_launches(
    connection: sqlite3.Connection, shard: Path
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Of each trace of an attached shard whose launches lie beside that: its id there, its content's hash,
    and the launches. Raises StoreError for a file that holds none.
    """
    rows = connection.execute(
        "SELECT t.id, t.content_hash, s.file FROM shard.launch_shards s "
        "JOIN shard.traces t ON t.id = s.trace_id ORDER BY t.id"
    )
    columns = columns_of(connection)
    for trace, content_hash, name in rows.fetchall():
        path = Path(f"{shard}.launches") / name
        engine = require_parquet(f"{path}: launches are kept as Parquet")
        try:
            held = engine.file_launches(path, columns)
        except ValueError as error:
            raise StoreError(
                f"{path}: launches that another process has read: the file holds none ({error}); the same "
                "command reads their source again"
            ) from None
        yield trace, content_hash, held


def sweep(connection: sqlite3.Connection) -> None:
    """Remove what no row names: of deleted runs, and of writers that were ended. Files of others stay."""
    folder = _folder(connection)
    if not folder.is_dir():
        return
    # whoever writes a file holds the store meanwhile
    with transaction(connection):
        kept = {name for (name,) in connection.execute("SELECT file FROM launch_shards")}
        for path in list(folder.iterdir()):
            if _OURS.fullmatch(path.name) and path.name not in kept:
                path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def tidy(store: Path) -> int:
    """Remove files that no row of the store names; how many launches the store holds itself."""
    with closing(connect(store, write=True)) as connection:
        sweep(connection)
        (count,) = connection.execute(
            "SELECT coalesce(sum(launches), 0) FROM traces WHERE id NOT IN "
            "(SELECT trace_id FROM launch_shards)"
        ).fetchone()
    return int(count)


def load_launches(connection: sqlite3.Connection, traces: Sequence[int] | None = None) -> None:
    """Let questions on these traces (None: on all) find their launches, wherever these are kept.

    A temporary table stands before the store's own from the first trace on that is kept beside it.
    Raises StoreError for a file that is missing or not what was written.
    """
    files = dict(connection.execute("SELECT trace_id, file FROM launch_shards").fetchall())
    asked = [row[0] for row in connection.execute("SELECT id FROM traces ORDER BY id")]
    if traces is not None:
        wanted = set(traces)
        asked = [trace for trace in asked if trace in wanted]
    shadowed = _is_shadowed(connection)
    if not files or not (shadowed or files.keys() & set(asked)):
        return
    (read_only,) = connection.execute("PRAGMA query_only").fetchone()
    connection.execute("PRAGMA query_only = OFF")
    try:
        if not shadowed:
            _shadow(connection)
        for trace in asked:
            if connection.execute("SELECT 1 FROM temp.loaded WHERE id = ?", (trace,)).fetchone():
                continue
            _load(connection, trace, trace in files)
    finally:
        connection.execute(f"PRAGMA query_only = {read_only}")


def traces_of(connection: sqlite3.Connection, run: str) -> list[int]:
    """The ids of a run's traces."""
    rows = connection.execute(
        "SELECT t.id FROM traces t JOIN runs r ON r.id = t.run_id WHERE r.run = ?", (run,)
    )
    return [number for (number,) in rows]


def _load(connection: sqlite3.Connection, trace: int, beside: bool) -> None:
    """Copy the launches of a trace into the temporary table."""
    with _at_once(connection):
        if beside:
            columns = columns_of(connection)
            marks = ", ".join("?" * len(columns))
            insert = f"INSERT INTO temp.launches ({', '.join(columns)}) VALUES ({marks})"
            path = _checked(connection, trace)
            engine = require_parquet(f"{path}: launches are kept as Parquet")
            try:
                for rows in engine.read_launches(path, columns):
                    connection.executemany(insert, rows)
            except ValueError as error:
                raise _unusable(path, f"holds no launches ({error})") from None
        else:
            connection.execute(
                "INSERT INTO temp.launches SELECT l.* FROM traces t JOIN main.launches l "
                "ON l.id BETWEEN t.first_launch_id AND t.last_launch_id WHERE t.id = ?",
                (trace,),
            )
        connection.execute("INSERT INTO temp.loaded VALUES (?)", (trace,))


def _checked(connection: sqlite3.Connection, trace: int) -> Path:
    """The file of a trace. Raises StoreError where it is missing, or not as it was written."""
    name, digest = connection.execute(
        "SELECT file, hash FROM launch_shards WHERE trace_id = ?", (trace,)
    ).fetchone()
    path: Path = _folder(connection) / name
    if not _OURS.fullmatch(name):
        raise _unusable(path, "has no name of a file of launches")
    try:
        same = _digest(path) == digest
    except FileNotFoundError:
        raise _unusable(path, "is missing") from None
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror or error})") from None
    if not same:
        raise _unusable(path, "is not what was written (damaged, or of another store)")
    return path


def _unusable(path: Path, what: str) -> StoreError:
    return StoreError(
        f"{path}: launches of the store beside it: the file {what}; bring it back, or delete its run and "
        "take it in again: profharness runs --delete RUN"
    )


def _shadow(connection: sqlite3.Connection) -> None:
    """Make the temporary table of launches, and the views on launches anew on it."""
    with _at_once(connection):
        columns = ", ".join(name for name in columns_of(connection) if name != "id")
        connection.execute("CREATE TEMP TABLE loaded (id INTEGER PRIMARY KEY)")
        connection.execute(f"CREATE TEMP TABLE launches (id INTEGER PRIMARY KEY, {columns})")
        connection.execute(
            "CREATE INDEX temp.launches_cell ON launches(cell_id) WHERE cell_id IS NOT NULL"
        )
        for name in _OF_LAUNCHES:
            connection.execute(f"CREATE TEMP VIEW {name} AS {VIEWS[name]}")


def _is_shadowed(connection: sqlite3.Connection) -> bool:
    return bool(
        connection.execute("SELECT 1 FROM sqlite_temp_master WHERE name = 'launches'").fetchone()
    )


@contextmanager
def _at_once(connection: sqlite3.Connection) -> Iterator[None]:
    """Whole or undone; inside of a transaction or not."""
    connection.execute("SAVEPOINT loading")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK TO loading")
        raise
    finally:
        connection.execute("RELEASE loading")


def columns_of(connection: sqlite3.Connection) -> dict[str, bool]:
    """The columns of launches, and whether each may be NULL."""
    rows = connection.execute("PRAGMA main.table_info(launches)")
    return {name: not (required or key) for _, name, _, required, _, key in rows}


def _folder(connection: sqlite3.Connection) -> Path:
    (path,) = (row[2] for row in connection.execute("PRAGMA database_list") if row[1] == "main")
    return Path(f"{path}.launches")


def _new_path(connection: sqlite3.Connection, content_hash: str) -> Path:
    folder = _folder(connection)
    folder.mkdir(exist_ok=True)
    return (
        folder / f"{xxhash.xxh3_64_hexdigest(content_hash.encode())}-{secrets.token_hex(8)}.parquet"
    )


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open_input(path) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _settle(part: Path, path: Path) -> None:
    """Give a written file its name, on the disk before this returns."""
    with open_input(part) as file:
        os.fsync(file.fileno())
    part.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def require_parquet(what: str) -> Any:
    """What writes and reads Parquet. Raises StoreError where it is not installed."""
    try:
        return importlib.import_module("profharness.store.parquet")
    except ImportError:
        raise StoreError(f"{what}, and duckdb is not installed: {pip_line(EXTRA)}") from None
