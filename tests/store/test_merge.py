"""Shards: a source read elsewhere and merged is stored as if it had been ingested here."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from store_contents import contents

from profharness.errors import TraceFormatError
from profharness.run import RUN_FILE
from profharness.store import IngestResult, ingest_path, merge_shard
from profharness.store.ingest import ingest_source
from profharness.store.insert import row_id
from profharness.store.schema import connect, make_shard
from profharness.store.sources import read_source

ROOT = Path(__file__).parents[2]
MODELS, CAPTURED = ROOT / "traces" / "models", ROOT / "traces" / "h200-torch-nsys-ncu"
Folder = Callable[..., Path]


def merged(store: Path, source: Path, stored: sqlite3.Connection | None = None) -> IngestResult:
    """A source through a shard, which may look at what is stored, into a store."""
    shard = store.with_name("shard.db")
    shard.unlink(missing_ok=True)
    read = read_source(source)
    whole = all(raw.problem is None for raw in read.raws)
    with closing(make_shard(shard, stored)) as connection:
        result = ingest_source(shard, lambda: connection, read, None)
    with closing(connect(store, write=True, foreign_keys=False)) as writer:
        try:
            return merge_shard(writer, shard, result, read.content_hash, whole=whole)
        finally:
            assert "shard" not in {row[1] for row in writer.execute("PRAGMA database_list")}
            writer.commit()


def test_merged_shards_are_the_same_store_row_by_row(
    run_folder: Folder, kineto: Path, tmp_path: Path
) -> None:
    """Sources of two profilers, with cells, calls and counters; then all of them once more."""
    sources = (
        MODELS / "vit.json.gz",
        run_folder(),
        CAPTURED / "ncu-1.csv",
        MODELS / "llama_eager.json.gz",
        kineto,
    )
    direct, store = tmp_path / "direct.db", tmp_path / "s.db"
    for source in sources:
        ingest_path(direct, source)
    assert {merged(store, source).status for source in sources} == {"new"}
    before = contents(store)
    assert before == contents(direct)
    assert all(before[name] for name in ("metrics", "calls", "cells", "device_times"))
    assert {merged(store, source).status for source in sources} == {"unchanged"}
    assert contents(store) == before


@pytest.mark.parametrize("late", [False, True], ids=["before", "meanwhile"])
def test_a_shard_has_the_ids_of_the_store(late: bool, kineto: Path, tmp_path: Path) -> None:
    """Of what the store has already, and of what it lacks, unless it is taken in meanwhile."""
    first, second = MODELS / "vit.json.gz", MODELS / "llama_eager.json.gz"
    direct, store, early = (tmp_path / name for name in ("direct.db", "s.db", "early.db"))
    for source in (kineto, first, second):
        ingest_path(direct, source)
    ingest_path(store, kineto)
    shutil.copyfile(store, early)
    ingest_path(store, first)
    with closing(connect(early if late else store, write=False)) as stored:
        merged(store, second, stored)
    assert contents(store) == contents(direct)
    with closing(connect(store, write=False)) as opened:
        opened.execute("ATTACH ? AS shard", (str(tmp_path / "shard.db"),))
        for table, key in (("kernels", "s.kind = m.kind AND s.name"), ("op_paths", "s.path")):
            name = key.rpartition(".")[2]
            joined = f"shard.{table} s JOIN main.{table} m ON {key} = m.{name}"
            query = f"SELECT count(*), sum(s.id <> m.id) FROM {joined}"
            count, others = opened.execute(query).fetchone()
            assert count > 10 and bool(others) == late


def test_an_id_is_given_once(tmp_path: Path) -> None:
    """Where the store gives it to another row while the source is read."""
    with (
        closing(connect(tmp_path / "s.db", write=True)) as stored,
        closing(make_shard(tmp_path / "shard.db", stored)) as shard,
    ):
        assert row_id(shard, "apis", {"name": "new"}) == 1
        assert row_id(stored, "apis", {"name": "other"}) == 1
        assert [row_id(shard, "apis", {"name": name}) for name in ("other", "next")] == [2, 3]
        assert row_id(shard, "apis", {"name": "new"}) == 1


def test_a_run_that_grew_is_replaced_and_one_that_lost_is_refused(
    run_folder: Folder, tmp_path: Path
) -> None:
    store, folder = tmp_path / "s.db", run_folder(samples=[5, 1])
    assert merged(store, folder).status == "new"
    assert merged(store, run_folder(samples=[5, 1, 3])).status == "replaced"
    before = contents(store)
    with pytest.raises(TraceFormatError, match="holds less of run"):
        merged(store, run_folder(samples=[5]))
    trace = folder / "torch.json.gz"
    trace.write_bytes(trace.read_bytes()[:1000])
    with pytest.raises(TraceFormatError, match=r"holds less of run .* launches of torch"):
        merged(store, folder)
    assert contents(store) == before


def test_a_copy_beside_its_source_is_told_and_not_stored(
    run_folder: Folder, tmp_path: Path
) -> None:
    store, folder = tmp_path / "s.db", run_folder()
    merged(store, folder)
    before = contents(store)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    record = (copy / RUN_FILE).read_text()
    assert '"torch":"2.11"' in record.replace(" ", "")
    (copy / RUN_FILE).write_text(record.replace("2.11", "2.12"))  # another content hash
    result = merged(store, copy)
    assert (result.status, result.kept) == ("unchanged", folder)
    assert contents(store) == before
