"""A store that is damaged or has another schema is refused and left unchanged."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from profharness.errors import StoreError, UsageError
from profharness.store import Store, ingest_path, open_store, query, schema
from profharness.store.tables import VIEWS

Folder = Callable[..., Path]
REMEDY = "To rebuild it from the run folders, use: profharness ingest traces/runs --store NEW"
PLACES, PAGE = 20, 4096
READS: tuple[Callable[[Store], object], ...] = (
    Store.runs,
    lambda store: store.kernels("all", by_op=True),
    lambda store: store.cells("all"),
    lambda store: [list(store.launches(row.run)) for row in store.runs()],
    lambda store: [store.ranges(row.run) for row in store.runs()],
    lambda store: [store.devices(row.run) for row in store.runs()],
    lambda store: [store.environment(row.run) for row in store.runs()],
    lambda store: [store.problems(row.run) for row in store.runs()],
    lambda store: [store.wrong(row.run) for row in store.runs()],
)


@pytest.fixture
def whole(tmp_path: Path, kineto: Path, run_folder: Folder) -> Path:
    path = tmp_path / "whole.db"
    ingest_path(path, kineto)
    ingest_path(path, run_folder())
    return path


def changed(path: Path, *statements: str) -> Path:
    """Return a copy of a store after running SQL statements on it."""
    copy = path.with_name("changed.db")
    shutil.copy(path, copy)
    with closing(sqlite3.connect(copy)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return copy


def refused(path: Path, *sources: Path) -> Iterator[str]:
    """Yield the errors of readers and writers. The file must stay unchanged."""
    before = path.read_bytes()
    for write in (False, True):
        with pytest.raises(StoreError) as caught, open_store(path, write=write) as store:
            store.runs()
        yield str(caught.value)
    for source in sources:
        with pytest.raises(StoreError) as caught:
            ingest_path(path, source)
        yield str(caught.value)
    assert path.read_bytes() == before


def test_store_with_trigger_is_refused(whole: Path, run_folder: Folder) -> None:
    trigger = "CREATE TRIGGER evil AFTER INSERT ON runs BEGIN DELETE FROM launches; END"
    for text in refused(changed(whole, trigger), run_folder(run="20261122-bbbb")):
        assert "'evil'" in text and "the store was altered" in text and REMEDY in text


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("DROP TABLE runs", "runs"),
        ("ALTER TABLE runs RENAME COLUMN kind TO sort", "kind"),
        ("ALTER TABLE runs RENAME COLUMN warnings TO notes", "warnings"),
    ],
)
def test_missing_table_or_column_is_reported(
    whole: Path, run_folder: Folder, statement: str, name: str
) -> None:
    views = [f"DROP VIEW {view}" for view in VIEWS]  # SQLite would check them
    for text in refused(changed(whole, *views, statement), run_folder(run="20261122-bbbb")):
        assert name in text and "the store was altered" in text and REMEDY in text


def test_users_may_add_tables_and_views(whole: Path, run_folder: Folder) -> None:
    store = changed(whole, "CREATE TABLE mine (x)", "CREATE VIEW own AS SELECT * FROM cell_summary")
    ingest_path(store, run_folder(run="20261122-bbbb"))
    with open_store(store) as opened:
        assert len(query(opened, "SELECT * FROM own")) == 6


@pytest.mark.parametrize("seed", range(6))
def test_random_damage_is_reported_and_never_written(
    whole: Path, run_folder: Folder, seed: int
) -> None:
    pick = random.Random(seed)
    data = bytearray(whole.read_bytes())
    for _ in range(PLACES):
        at = pick.randrange(PAGE, len(data) - PAGE)
        data[at : at + 200] = pick.randbytes(200)
    store = whole.with_name(f"damaged-{seed}.db")
    store.write_bytes(data)
    told = 0
    for read in READS:
        try:
            with open_store(store) as opened:
                read(opened)
        except StoreError as error:
            told += 1
            assert REMEDY in str(error)
    assert told
    with pytest.raises(
        StoreError, match=r"was not changed.*profharness ingest traces/runs --store"
    ):
        ingest_path(store, run_folder(run="20261122-bbbb"))
    assert store.read_bytes() == data


def test_invalid_utf8_is_reported(whole: Path) -> None:
    for column, value in (("warnings", "'{'"), ("run", "CAST(x'ff' AS TEXT)")):
        store = changed(whole, f"UPDATE runs SET {column} = {value} WHERE id = 1")
        with pytest.raises(StoreError, match="the store is damaged"), open_store(store) as opened:
            opened.runs()


def test_large_store_is_checked_in_small_tables(
    whole: Path, run_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "WHOLLY_CHECKED_BYTES", 0)
    for table in ("kernels", "launches"):
        store = changed(whole)
        with closing(sqlite3.connect(store)) as connection:
            (page,) = connection.execute(
                "SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)
            ).fetchone()
        data = bytearray(store.read_bytes())
        data[(page - 1) * PAGE : page * PAGE] = b"\x7f" * PAGE
        damaged = whole.with_name(f"{table}.db")
        damaged.write_bytes(data)
        with pytest.raises(StoreError, match="the store is damaged"):
            ingest_path(damaged, run_folder(run="20261122-bbbb"))
        assert damaged.read_bytes() == data


def test_wrong_query_is_not_damage(whole: Path) -> None:
    with (
        pytest.raises(UsageError, match="no such column"),
        open_store(whole) as store,
    ):
        query(store, "SELECT absent FROM runs")
