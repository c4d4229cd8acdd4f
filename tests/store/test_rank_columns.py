"""Stored ranks of a job: their identities and how long their GPUs were busy."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from make_ranks import Fleet, make_ranks, read

from profharness.environment import hashed_key
from profharness.store import Store, ingest_path, open_store
from profharness.store.ranks import rank_rows, split_rank


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with a job of four ranks, made from a real training step."""
    folder = tmp_path_factory.mktemp("job")
    make_ranks(read(), folder / "ranks", Fleet(4))
    ingest_path(folder / "s.db", folder / "ranks")
    return folder / "s.db"


@pytest.fixture
def store(job: Path) -> Store:
    return open_store(job)


def test_ranks_of_a_job_have_one_environment(store: Store) -> None:
    with store:
        rows = store.connection.execute("SELECT rank, world_size FROM runs ORDER BY rank")
        assert rows.fetchall() == [(rank, 4) for rank in range(4)]
        (data,) = store.connection.execute("SELECT data FROM environments").fetchall()
        assert '"world_size":4' in data[0] and '"rank"' not in data[0]
        assert [row.rank for row in store.runs()] == [3, 2, 1, 0]


def test_device_busy_time_is_union_of_launches(store: Store) -> None:
    """Busy time is the union of all launches. Nothing else runs during the all-reduce."""
    with store:
        for rank in rank_rows(store):
            (time,) = rank.times
            rows = store.connection.execute(
                "SELECT l.start_ns, l.start_ns + l.duration_ns, k.family = 'collective' "
                "FROM launches l JOIN kernels k ON k.id = l.kernel_id WHERE l.trace_id = ? "
                "AND l.device >= 0",
                rank.traces,
            ).fetchall()
            moments = sorted({moment for begin, end, _ in rows for moment in (begin, end)})
            busy = sum(
                after - before
                for before, after in pairwise(moments)
                if any(begin <= before and after <= end for begin, end, _ in rows)
            )
            (alone,) = [end - begin for begin, end, collective in rows if collective]
            assert (time.collective_ns, time.exposed_ns) == (alone, alone)
            assert (time.busy_ns, time.launches) == (busy, len(rows))
            assert (time.start_ns, time.end_ns) == (moments[0], moments[-1])


def test_any_rank_finds_its_job(job: Path, store: Store) -> None:
    with store:
        whole = rank_rows(store)
        assert [row.label for row in whole] == [f"rank {rank}" for rank in range(4)]
        assert rank_rows(store, [whole[2].run]) == whole == rank_rows(store, ["latest"])
        assert rank_rows(store, [str(job.parent / "ranks")]) == whole
        assert rank_rows(store, [whole[3].run, whole[0].run]) == [whole[0], whole[3]]


def test_job_with_a_folder_per_host_excludes_the_job_beside_it(tmp_path: Path) -> None:
    """One rank lies in the folder of the job, the others one folder deeper."""
    for name in ("mine", "other"):
        make_ranks(read(), tmp_path / name, Fleet(4))
        for number, path in enumerate(sorted((tmp_path / name).iterdir())[1:]):
            host = tmp_path / name / f"host{number}"
            host.mkdir()
            path.rename(host / path.name)
    results = ingest_path(tmp_path / "s.db", tmp_path / "mine") + ingest_path(
        tmp_path / "s.db", tmp_path / "other"
    )
    with open_store(tmp_path / "s.db") as store:
        mine = {result.run for result in results[:4]}
        chosen = [result.run for result in results[:4] if "host" in str(result.source)]
        assert {row.run for row in rank_rows(store, chosen[:1])} == mine


@pytest.mark.parametrize("rank", [-3, 1 << 40, 10**30, "x", 2.5, [1]])
def test_invalid_rank_is_ignored(job: Path, tmp_path: Path, rank: object) -> None:
    shutil.copy(job, tmp_path / "s.db")
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection, connection:
        connection.execute(
            "UPDATE traces SET environment = json_set(environment, '$.distributedInfo.rank', json(?)) "
            "WHERE run_id = (SELECT id FROM runs WHERE rank = 3)",
            (json.dumps(rank),),
        )
        connection.execute("UPDATE runs SET rank = NULL")
    with open_store(tmp_path / "s.db") as opened:
        rows = rank_rows(opened, [row.run for row in opened.runs()])
    assert [row.rank for row in rows] == [0, 1, 2, None]


@pytest.mark.parametrize(
    ("environment", "name", "place"),
    [
        ({"rank": "3", "world_size": "8"}, None, {"rank": 3, "world_size": 8}),
        ({"distributedInfo": {"rank": 1, "backend": "nccl"}}, None, {"rank": 1}),
        (
            {"gpu_key": "ab", "host_key": "cd", "torch": "2"},
            None,
            {"host_key": "cd", "gpu_key": "ab"},
        ),
        ({"rank": True, "world_size": -1}, None, {}),
        ({}, "step_rank-12.json.gz", {"rank": 12}),
        ({}, "franks7.json", {}),
        ({}, "rank1_rank2.json", {}),
        (
            {},
            "node7_4711.1790857026000000000.pt.trace.json.gz",
            {"host_key": hashed_key("node7")},
        ),
    ],
)
def test_rank_identity_comes_from_environment_or_name(
    environment: dict[str, object], name: str | None, place: dict[str, object]
) -> None:
    told, rest = split_rank(environment, name)
    assert told == dict.fromkeys(("rank", "world_size", "host_key", "gpu_key")) | place
    assert not {"rank", "host_key", "gpu_key"} & rest.keys()
