"""Queries, views and frames of the store, and foreign files."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from profharness.attention.config import parse_config
from profharness.devices import Device
from profharness.errors import NotFoundError, StoreError, UsageError
from profharness.store import Selection, ingest_path, open_store, query, to_frame
from profharness.store.insert import insert_trace, sdpa_op
from profharness.store.schema import FIRST_VERSION, SCHEMA_VERSION, connect, transaction
from profharness.store.tables import ROCM_RESOURCES, VIEWS
from profharness.trace import LaunchBatch, LaunchConfig, Range, Trace

Folder = Callable[..., Path]
KERNEL_LAUNCHES = (
    "run", "config", "backend", "profiler", "range", "kernel", "kernel_short", "family",
    "grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "registers_per_thread",
    "static_shared_bytes", "dynamic_shared_bytes", "shared_bytes", "stream", "device",
    "start_ns", "duration_ns",
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, run_folder: Folder, kineto: Path) -> Path:
    """Return a store with two runs of one config in two dtypes, and a foreign trace."""
    path = tmp_path / "p.db"
    ingest_path(path, kineto)
    ingest_path(path, run_folder("20261122-aa", "2026-11-22T00:00:00+00:00"))
    ingest_path(path, run_folder("20261123-bb", "2026-11-23T00:00:00+00:00", dtype="bf16"))
    return path


def test_runs_resolve_by_id_prefix_and_age(store: Path) -> None:
    with open_store(store) as opened:
        runs = opened.runs()
        assert [row.run for row in runs[:2]] == ["20261123-bb", "20261122-aa"]
        assert (runs[2].source, runs[2].device, runs[2].launches) == ("trace", "NVIDIA H200", 384)
        assert (runs[0].torch, runs[0].cells, runs[0].failed_cells) == ("2.11", 3, 0)
        assert opened.resolve("latest") == "20261123-bb"
        assert opened.resolve("latest~1") == "20261122-aa"
        assert opened.resolve("20261122") == "20261122-aa"
        assert opened.resolve("trace-").startswith("trace-")
        for ref in ("2026", "nope", "latest~3", "", "latest~x"):
            with pytest.raises(NotFoundError, match="20261122-aa"):
                opened.resolve(ref)


def test_config_without_dtype_matches_any(store: Path) -> None:
    plain, half = parse_config("2,8,512,64"), parse_config("2,8,512,64,fp16")
    other = parse_config("2,8,1024,64")
    with open_store(store) as opened:
        assert opened.find_run(Selection(None, [plain])) == "20261123-bb"
        assert opened.find_run(Selection(None, [half])) == "20261122-aa"
        assert opened.find_run(Selection(None, [half], ["efficient", "flash"])) == "20261122-aa"
        for selection in (Selection(None, [half], ["math"]), Selection(None, [half, other])):
            with pytest.raises(NotFoundError, match="no stored run has kernels"):
                opened.find_run(selection)
        assert len(opened.kernels("all", configs=[plain])) == 6
        assert len(opened.kernels("all", configs=[half], backends=["flash"])) == 2
        assert opened.kernels("all", configs=[other]) == []
        assert opened.kernels(configs=[half]) == []
        assert len(opened.kernels("all", profilers=["torch"])) > 90
        assert opened.kernels("all", profilers=["nsys"]) == []
        assert len(opened.kernels(cells=["c1"])) == 1
        assert [c.backend for c in opened.cells(backends=["cudnn"])] == ["cudnn"]
        assert opened.environment() == {"torch": "2.11"}


def test_views_have_their_columns_and_agree_with_the_rows(store: Path) -> None:
    with open_store(store) as opened:
        launches = query(opened, "SELECT * FROM kernel_launches")
        assert list(launches.columns[: len(KERNEL_LAUNCHES)]) == list(KERNEL_LAUNCHES)
        assert len(launches) == 384 + 2 * 9
        summary = query(opened, "SELECT * FROM kernel_summary WHERE run = ?", ["20261123-bb"])
        rows = opened.kernels()
        assert summary["duration_ns"].tolist() == [row.duration_ns for row in rows]
        assert summary["launches_per_call"].tolist() == [row.launches_per_call for row in rows]
        cells = query(opened, "SELECT * FROM cell_summary WHERE run = '20261123-bb'")
        assert cells["event_median_ns"].tolist()[:2] == [4.0, 4.0]
        assert cells["event_samples"].tolist()[:2] == [4, 4]
        assert cells["refusal_codes"].tolist()[2] == "head_dim,dtype"
        frame = to_frame(rows)
        assert frame["grid_x"].tolist() == [row.grid[0] for row in rows if row.grid]
        flat = to_frame(opened.cells())
        assert flat["event_median_ns"].tolist()[:2] == [4, 4]
        assert flat["refusals"].tolist()[2] == "head_dim; dtype"
        assert len(to_frame(opened.runs())) == 3
        with pytest.raises(UsageError, match="only SELECT"):
            query(opened, "DELETE FROM runs")


def test_deleting_a_run_leaves_the_others(store: Path) -> None:
    with open_store(store, write=True) as opened:
        assert opened.connection.execute("PRAGMA foreign_keys").fetchone() == (1,)
        assert opened.delete_run("latest") == "20261123-bb"
        assert len(list(opened.launches("20261122"))) == 9
        assert opened.connection.execute("SELECT count(*) FROM launches").fetchone() == (393,)
        assert opened.connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_missing_store_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="ingest"):
        open_store(tmp_path / "no.db")
    with pytest.raises(StoreError, match="folder"):
        open_store(tmp_path / "no" / "p.db", write=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "kind", ["text", "short", "header", "pipe", "database", "application", "newer", "older"]
)
@pytest.mark.parametrize("write", [False, True])
def test_foreign_files_are_refused_untouched(tmp_path: Path, kind: str, write: bool) -> None:
    path = tmp_path / "other.db"
    if kind == "pipe":
        os.mkfifo(path)
        with pytest.raises(StoreError, match="not a regular file"):
            open_store(path, write=write)
        return
    if kind == "header":
        path.write_bytes(b"SQLite format 3\0")
    elif kind in ("text", "short"):
        path.write_bytes(b"hello" * (100 if kind == "text" else 1))
    elif kind in ("newer", "older"):
        open_store(path, write=True).close()
        version = SCHEMA_VERSION + 1 if kind == "newer" else FIRST_VERSION - 1
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA user_version = {version}")
    else:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE precious (x)")
            if kind == "application":
                connection.execute("PRAGMA application_id = 7")
    before = path.read_bytes()
    remedy = "store with --store.*ingest FOLDER" if kind == "older" else "store with --store"
    with pytest.raises(StoreError, match=remedy):
        open_store(path, write=write)
    assert path.read_bytes() == before


def test_a_store_of_the_first_version_is_read_as_it_is_and_migrated_to_write(store: Path) -> None:
    with closing(sqlite3.connect(store)) as connection:
        for name in ("window", "lens", "page", "kv_dtype", "mla", "softcap", "sinks"):
            connection.execute(f"ALTER TABLE configs DROP COLUMN {name}")
        for name in ("ended", "duration_ns", "lanes_ns", "recorded_with", "engine"):
            connection.execute(f"ALTER TABLE runs DROP COLUMN {name}")
        for view in VIEWS:
            connection.execute(f"DROP VIEW {view}")
        for name in ROCM_RESOURCES.removeprefix(", ").split(", "):
            connection.execute(f"ALTER TABLE launch_configs DROP COLUMN {name}")
        for view, select in VIEWS.items():
            connection.execute(f"CREATE VIEW {view} AS {select.replace(ROCM_RESOURCES, '')}")
        connection.execute("DELETE FROM _sqlite_migrations WHERE name > '016'")
        connection.execute(f"PRAGMA user_version = {FIRST_VERSION}")
        connection.commit()

    def state() -> tuple[int, bool]:
        with closing(sqlite3.connect(store)) as connection:
            columns = [row[1] for row in connection.execute("PRAGMA table_info(configs)")]
            return connection.execute("PRAGMA user_version").fetchone()[0], "window" in columns

    with open_store(store) as opened:
        before, kernels = opened.cells("all"), opened.kernels()
        assert {run.duration_ns for run in opened.runs()} == {None}
        assert opened.engine(before[0].run) is None
        assert opened.calls(before[0].run) == []
    assert state() == (FIRST_VERSION, False)
    with open_store(store, write=True) as opened:
        assert (opened.cells("all"), opened.kernels()) == (before, kernels)
    assert state() == (SCHEMA_VERSION, True)


@pytest.mark.parametrize("application", [0, 7])
@pytest.mark.parametrize("write", [False, True])
def test_log_of_a_foreign_file_is_left_alone(tmp_path: Path, application: int, write: bool) -> None:
    path = tmp_path / "left" / "other.db"
    path.parent.mkdir()
    with closing(sqlite3.connect(tmp_path / "used.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA application_id = {application}")
        connection.execute("CREATE TABLE precious (x)")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("INSERT INTO precious VALUES (1)")
        for suffix in ("", "-wal"):  # the state after a process was killed
            shutil.copyfile(tmp_path / f"used.db{suffix}", f"{path}{suffix}")
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(StoreError, match="another program"):
        open_store(path, write=write)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def test_sdpa_op_is_the_innermost_implementation() -> None:
    flash = "aten::_scaled_dot_product_flash_attention"
    assert sdpa_op(f"aten::scaled_dot_product_attention;{flash};aten::_x") == flash
    assert sdpa_op("aten::scaled_dot_product_attention;aten::bmm") is None
    math = "aten::_scaled_dot_product_attention_math"
    assert sdpa_op(f"aten::scaled_dot_product_attention;{math};aten::bmm") == math


LAUNCHES = 100_000


def big_trace() -> Trace:
    """Return launches of 60 kernels in 200 ranges of 50 names, with two op paths per kernel."""

    def batches() -> Iterator[LaunchBatch]:
        for begin in range(0, LAUNCHES, 65536):
            i = np.arange(begin, min(begin + 65536, LAUNCHES))
            kernel, none, zero = i % 60, np.full(len(i), -1), np.zeros(len(i), np.int64)
            yield LaunchBatch(
                kernel, kernel % 30, (i // 60) % 2, i // 500, none, zero, zero, zero, i, none,
                zero, zero, i * 100, i * 100 + 50, 100 + kernel, none, none,
            )  # fmt: skip

    return Trace(
        "torch", (Device(0, "NVIDIA H200", 9, 0, 132),), {}, [f"k{i}" for i in range(60)],
        ["kernel"] * 60, [LaunchConfig((i, 1, 1), (128, 1, 1)) for i in range(30)],
        ["a;b", "c;d"], ["cudaLaunchKernel"],
        [Range(f"step{i % 50}", i * 50_000, 50_000, 0, 0) for i in range(200)], LAUNCHES, 0,
        batches, lambda: None,
    )  # fmt: skip


def test_launches_of_many_batches_are_queried_from_groups(tmp_path: Path) -> None:
    path = tmp_path / "big.db"
    connection = connect(path, write=True, foreign_keys=False)
    trace = big_trace()
    with transaction(connection):
        connection.execute("INSERT INTO environments VALUES (1, 'e', '{}')")
        connection.execute(
            "INSERT INTO runs VALUES (1, 'r', 'now', 'trace', 'trace', 'p', 'h', 1, NULL, NULL, "
            "'[]', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '[]', '[]', NULL, NULL, NULL, NULL, NULL)"
        )
        connection.execute(
            "INSERT INTO traces VALUES (1, 1, 'torch', 'p', 'h', ?, 0, 0, '{}', 1, ?)",
            (LAUNCHES, LAUNCHES),
        )
        assert insert_trace(connection, 1, trace, trace.batches(), None).launches == LAUNCHES
    connection.close()
    with open_store(path) as opened:
        rows = opened.kernels()
        apart = opened.kernels(by_op=True)
    assert sum(row.launches for row in rows) == LAUNCHES
    assert sum(row.launches for row in apart) == LAUNCHES
    assert len(rows) == 50 * 60 and len(apart) == 2 * len(rows)
    assert {row.duration_ns for row in rows} == set(range(100, 160))
