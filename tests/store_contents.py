"""The contents of a store, to compare stores."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from profharness.store.tables import TABLES

NAMES = [line.split()[2] for line in TABLES.splitlines() if line.startswith("CREATE TABLE")]


def contents(store: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return every row of every table, including ids. Fail if the store is damaged or has a
    dangling reference.
    """
    with closing(sqlite3.connect(store)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        tables = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in NAMES}
    return {name: sorted(rows, key=repr) for name, rows in tables.items()}
