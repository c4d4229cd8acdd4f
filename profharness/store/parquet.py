"""Launches of one trace as a Parquet file, written and read by DuckDB. Importing this module raises
ImportError where that is not installed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

import duckdb
import numpy as np

from profharness.store.launch_columns import NULL, Column, LaunchColumns

ROWS = 1 << 17  # held as Python objects at a time


def stored_launches(
    connection: sqlite3.Connection, span: tuple[int, int], columns: Mapping[str, bool]
) -> LaunchColumns:
    """The stored launches of a span of ids, in their order. columns: whether each may be NULL."""
    told = ", ".join(f"coalesce({name}, {NULL})" for name in columns)
    cursor = connection.execute(
        f"SELECT {told} FROM launches WHERE id BETWEEN ? AND ? ORDER BY id", span
    )
    held = LaunchColumns()
    while rows := cursor.fetchmany(ROWS):
        held.add(dict(zip(columns, np.array(rows, np.int64).T, strict=True)))
    return held


def file_launches(path: Path, columns: Mapping[str, bool]) -> dict[str, Column]:
    """The columns of a file in the order of its ids, NULL where there is none. Raises ValueError for a file
    that holds no launches.
    """
    told = ", ".join(f"coalesce({name}, {NULL}) AS {name}" for name in columns)
    with duckdb.connect(config={"threads": 1}) as engine:
        try:
            held = engine.execute(f"SELECT {told} FROM read_parquet({_text(path)})").fetchnumpy()
        except duckdb.Error as error:
            raise ValueError(str(error).splitlines()[0]) from None
    return {name: np.asarray(held[name], np.int64) for name in columns}


def write_launches(held: Mapping[str, Column], columns: Mapping[str, bool], path: Path) -> None:
    """Write launches in their order. columns: whether each may be NULL. Raises OSError where the file
    cannot be written.
    """
    kept = ", ".join(
        f"CAST({f'nullif({name}, {NULL})' if nullable else name} AS BIGINT) AS {name}"
        for name, nullable in columns.items()
    )
    with duckdb.connect(config={"threads": 1}) as engine:
        engine.register("held", dict(held))
        try:
            engine.execute(
                f"COPY (SELECT {kept} FROM held) TO {_text(path)} (FORMAT parquet, COMPRESSION zstd)"
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
