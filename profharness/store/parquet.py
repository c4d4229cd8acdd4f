"""Launches of one trace as a Parquet file, written and read by DuckDB. Importing this module raises
ImportError where that is not installed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np

ROWS = 1 << 17  # held as Python objects at a time
NULL = -1  # in columns that may be NULL, where no value is below 0


def write_launches(
    connection: sqlite3.Connection, span: tuple[int, int], columns: dict[str, bool], path: Path
) -> None:
    """Write the stored launches of a span of ids, in their order. columns: whether each may be NULL.

    Raises OSError where the file cannot be written.
    """
    told = ", ".join(f"coalesce({name}, {NULL})" for name in columns)
    cursor = connection.execute(
        f"SELECT {told} FROM launches WHERE id BETWEEN ? AND ? ORDER BY id", span
    )
    kept = ", ".join(
        f"nullif({name}, {NULL}) AS {name}" if nullable else name
        for name, nullable in columns.items()
    )
    with duckdb.connect(config={"threads": 1}) as engine:
        engine.execute(f"CREATE TABLE launches ({', '.join(f'{name} BIGINT' for name in columns)})")
        while rows := cursor.fetchmany(ROWS):
            block = dict(zip(columns, np.array(rows, np.int64).T.copy(), strict=True))
            engine.register("block", block)
            engine.execute(f"INSERT INTO launches SELECT {kept} FROM block")
            engine.unregister("block")
        try:
            engine.execute(
                f"COPY (SELECT * FROM launches ORDER BY id) TO {_text(path)} (FORMAT parquet, COMPRESSION zstd)"
            )
        except duckdb.Error as error:
            raise OSError(f"cannot be written: {error}") from None


def read_launches(path: Path, columns: dict[str, bool]) -> Iterator[list[tuple[int | None, ...]]]:
    """The rows of a file in the order of their ids, a block at a time. Raises ValueError for a file that
    holds no launches.
    """
    with duckdb.connect(config={"threads": 1}) as engine:
        try:
            engine.execute(f"SELECT {', '.join(columns)} FROM read_parquet({_text(path)})")
            while rows := engine.fetchmany(ROWS):
                yield rows
        except duckdb.Error as error:
            raise ValueError(str(error).splitlines()[0]) from None


def _text(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"
