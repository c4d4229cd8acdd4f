"""A shard into the store: a store of one source, whose rows get the ids that a direct ingest of the
source would have given them.

Rows that sources share (kernels, names, configs, environments) are looked up by their keys; all
others move by an offset. Which column refers to what is read from the schema.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from profharness.run import RUN_FILE, read_run
from profharness.store import overwrite_guard
from profharness.store.ingest import UNREADABLE, IngestResult, unchanged
from profharness.store.schema import forget_run, make_shard, transaction
from profharness.store.sources import Raw, Source

# by which columns a shared row is known; none: by all of them
SHARED: dict[str, tuple[str, ...]] = {
    "environments": ("hash",),
    "configs": (),
    "kernels": ("name", "kind"),
    "launch_configs": (),
    "op_paths": ("path",),
    "apis": ("name",),
    "range_names": ("name",),
}
NOT_MERGED = {"peaks"}  # measured here, and in no source
# refer to launches, and no clause of the schema says so
LAUNCH_IDS = {"traces": ("first_launch_id", "last_launch_id")}


@dataclass(frozen=True, slots=True)
class _Table:
    """A table: its columns, and the table that a column refers to."""

    name: str
    columns: tuple[str, ...]
    refers: dict[str, str]


@cache
def _tables() -> tuple[_Table, ...]:
    """The tables of the schema, in the order in which they are made."""
    with closing(make_shard(Path(":memory:"))) as connection:
        names = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid"
        ).fetchall()
        return tuple(_table(connection, name) for (name,) in names if name not in NOT_MERGED)


def _table(connection: sqlite3.Connection, name: str) -> _Table:
    columns = tuple(row[1] for row in connection.execute(f"PRAGMA table_info({name})"))
    keys = connection.execute(f"PRAGMA foreign_key_list({name})")
    refers = {row[3]: str(row[2]) for row in keys}
    refers |= dict.fromkeys(LAUNCH_IDS.get(name, ()), "launches")
    return _Table(name, columns, refers | ({"id": name} if "id" in columns else {}))


def merge_shard(
    connection: sqlite3.Connection,
    shard: Path,
    result: IngestResult,
    content_hash: str,
    *,
    whole: bool,
) -> IngestResult:
    """Take a shard in, in one transaction; what became of its source. result is what came of the
    source in its shard; whole: none of its traces had a problem.

    Raises TraceFormatError where the store has more of the run, and then changes nothing.
    """
    source = _read_again(result.source, content_hash, whole)
    with _attached(connection, shard), transaction(connection):
        # another process, or an equal source, may have been quicker
        if same := unchanged(connection, source):
            return same
        before = overwrite_guard.stored(connection, result.run)
        forget_run(connection, result.run)
        _copy(connection)
        (problems,) = connection.execute(
            "SELECT problems FROM runs WHERE run = ?", (result.run,)
        ).fetchone()
        lost = [each["message"] for each in json.loads(problems) if each["code"] == UNREADABLE]
        overwrite_guard.require(connection, source.path, result.run, before, lost)
        fields = {name: getattr(result, name) for name in ("run", "source", "launches", "cells")}
        status = "new" if before is None else "replaced"
        return IngestResult(status=status, warnings=result.warnings, **fields)


def _read_again(path: Path, content_hash: str, whole: bool) -> Source:
    """A source that another process has read, without its traces."""
    run = read_run(path) if (path / RUN_FILE).is_file() else None
    damaged = (Raw(None, "", path, "", problem="told by its shard"),)
    return Source(path, run, () if whole else damaged, content_hash)


@contextmanager
def _attached(connection: sqlite3.Connection, shard: Path) -> Iterator[None]:
    connection.execute("ATTACH ? AS shard", (f"{shard.absolute().as_uri()}?mode=ro",))
    try:
        yield
    finally:
        connection.execute("DETACH shard")


def _copy(connection: sqlite3.Connection) -> None:
    moved: dict[str, int] = {}
    mapped: set[str] = set()
    for table in _tables():
        if table.name in SHARED:
            if _map(connection, table):
                mapped.add(table.name)
            else:
                moved[table.name] = 0  # its rows have the same ids here
        elif "id" in table.columns:
            query = f"SELECT coalesce(max(id), 0) FROM main.{table.name}"
            (last,) = connection.execute(query).fetchone()
            moved[table.name] = last
    for table in _tables():
        if table.name not in SHARED:
            _append(connection, table, moved, mapped)
    for name in mapped:
        connection.execute(f"DROP TABLE temp.map_{name}")


def _map(connection: sqlite3.Connection, table: _Table) -> bool:
    """Insert the shared rows that the store lacks; whether any has another id there, which the table
    `map_NAME` then tells.
    """
    name = table.name
    rest = tuple(column for column in table.columns if column != "id")
    same = " AND ".join(f"m.{key} IS s.{key}" for key in SHARED[name] or rest)
    columns = ", ".join(rest)
    connection.execute(
        f"INSERT INTO main.{name} ({columns}) SELECT {columns} FROM shard.{name} s "
        f"WHERE NOT EXISTS (SELECT 1 FROM main.{name} m WHERE {same}) ORDER BY s.id"
    )
    connection.execute(f"CREATE TEMP TABLE map_{name} (old INTEGER PRIMARY KEY, new INTEGER)")
    connection.execute(
        f"INSERT INTO temp.map_{name} SELECT s.id, min(m.id) FROM shard.{name} s "
        f"JOIN main.{name} m ON {same} GROUP BY s.id"
    )
    differs = connection.execute(f"SELECT 1 FROM temp.map_{name} WHERE old <> new LIMIT 1")
    if differs.fetchone() is not None:
        return True
    connection.execute(f"DROP TABLE temp.map_{name}")
    return False


def _append(
    connection: sqlite3.Connection, table: _Table, moved: dict[str, int], mapped: set[str]
) -> None:
    """Insert the rows of a table that belongs to runs, with the ids that they have in the store."""
    values, joins = {}, []
    for column in table.columns:
        to = table.refers.get(column)
        if to in mapped:
            joins.append(f"LEFT JOIN temp.map_{to} AS {column}_of ON {column}_of.old = s.{column}")
            values[column] = f"{column}_of.new"
        elif to is not None and moved[to]:
            values[column] = f"s.{column} + {moved[to]}"
        else:
            values[column] = f"s.{column}"

    def insert(where: str = "") -> None:
        # columns in their order and not named, or SQLite would copy each value once more
        connection.execute(
            f"INSERT INTO main.{table.name} SELECT {', '.join(values.values())} "
            f"FROM shard.{table.name} s {' '.join(joins)} {where}"
        )

    if table.name != "launches":
        insert()
        return
    values |= _of_all(connection, moved)
    # after the first SQLite counts on from there, which takes less time than ids that it is given
    insert("WHERE s.id = 1")
    values["id"] = "NULL"
    insert("WHERE s.id > 1 ORDER BY s.id")


def _of_all(connection: sqlite3.Connection, moved: dict[str, int]) -> dict[str, str]:
    """Columns of launches in which all that the shard holds have one value: it takes less time written
    into the statement than read from each row.
    """
    traces, trace, cells = connection.execute(
        "SELECT count(*), max(id), (SELECT count(*) FROM shard.cells) FROM shard.traces"
    ).fetchone()
    same = {"trace_id": str(trace + moved["traces"])} if traces == 1 else {}
    return same if cells else same | {"cell_id": "NULL", "iteration": "NULL"}
