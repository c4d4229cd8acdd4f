"""Shards: a source read elsewhere and merged is stored as if it had been ingested here."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from profharness.errors import TraceFormatError
from profharness.run import RUN_FILE
from profharness.store import IngestResult, ingest_path, merge_shard
from profharness.store.ingest import ingest_source
from profharness.store.schema import connect, make_shard
from profharness.store.sources import read_source
from profharness.store.tables import TABLES

ROOT = Path(__file__).parents[2]
SOURCES = (  # of three profilers, with cells, calls, counters and observed calls
    ROOT / "traces" / "models" / "vit.json.gz",
    ROOT / "traces" / "h200-torch-nsys-ncu",
    ROOT / "traces" / "models" / "llama_eager.json.gz",
)
RUN = ROOT / "traces" / "h200-torch2.11"
NAMES = [line.split()[2] for line in TABLES.splitlines() if line.startswith("CREATE TABLE")]


def contents(store: Path) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table, ids included; whole and without a reference into nothing."""
    with sqlite3.connect(store) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        tables = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in NAMES}
    connection.close()
    return {name: sorted(rows, key=repr) for name, rows in tables.items()}


def merged(store: Path, source: Path) -> IngestResult:
    """A source through a shard into a store."""
    shard = store.with_name("shard.db")
    shard.unlink(missing_ok=True)
    read = read_source(source)
    whole = all(raw.problem is None for raw in read.raws)
    with make_shard(shard) as connection:
        result = ingest_source(shard, lambda: connection, read, None)
    connection.close()
    with connect(store, write=True, foreign_keys=False) as writer:
        try:
            return merge_shard(writer, shard, result, read.content_hash, whole=whole)
        finally:
            assert "shard" not in {row[1] for row in writer.execute("PRAGMA database_list")}
            writer.commit()


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("direct") / "s.db"
    for source in SOURCES:
        ingest_path(store, source)
    return store


def test_merged_shards_are_the_same_store_row_by_row(direct: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    assert [merged(store, source).status for source in SOURCES] == ["new"] * 3
    assert contents(store) == contents(direct)
    assert all(len(rows) for name, rows in contents(store).items() if name in ("metrics", "calls"))


def test_a_shard_of_what_is_stored_changes_nothing(direct: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    shutil.copyfile(direct, store)
    before = contents(store)
    assert [merged(store, source).status for source in SOURCES] == ["unchanged"] * 3
    assert contents(store) == before


def test_a_run_that_grew_is_replaced_and_one_that_lost_is_refused(tmp_path: Path) -> None:
    store, folder = tmp_path / "s.db", tmp_path / "run"
    shutil.copytree(RUN, folder)
    whole = (folder / "c0005.torch.json.gz").read_bytes()
    (folder / "c0005.torch.json.gz").unlink()
    assert merged(store, folder).status == "new"
    (folder / "c0005.torch.json.gz").write_bytes(whole)
    assert merged(store, folder).status == "replaced"
    before = contents(store)
    (folder / "c0005.torch.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceFormatError, match="holds less of run"):
        merged(store, folder)
    assert contents(store) == before


def test_a_copy_beside_its_source_is_told_and_not_stored(tmp_path: Path) -> None:
    store, copy = tmp_path / "s.db", tmp_path / "copy"
    merged(store, RUN)
    shutil.copytree(RUN, copy)
    # another text, and so another content hash
    (copy / RUN_FILE).write_text((copy / RUN_FILE).read_text().replace('"note":null', '"note":"x"'))
    result = merged(store, copy)
    assert result.status == "unchanged"
