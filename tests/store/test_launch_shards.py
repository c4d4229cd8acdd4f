"""Launches kept as Parquet files beside the store: the same answers, and nothing lost or left."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness.cli.main import cli
from profharness.errors import StoreError
from profharness.store import ingest_path, merge_shard, open_store
from profharness.store.frames import query
from profharness.store.ingest import ingest_source
from profharness.store.schema import connect, make_shard
from profharness.store.shards import move_launches, tidy
from profharness.store.sources import read_source

DATA = Path(__file__).resolve().parents[1] / "data"
TRACE = DATA / "kineto_h200.json.gz"
COUNT = "SELECT count(*) FROM main.launches"


def run(*arguments: object) -> str:
    done = CliRunner().invoke(cli, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same trace in a store, and in one with its launches beside it."""
    folder = tmp_path_factory.mktemp("shards")
    for name in ("store", "shards"):
        run("ingest", TRACE, "--launches", name, "--store", folder / f"{name}.db")
    return folder / "store.db", folder / "shards.db"


def files(store: Path) -> list[Path]:
    return sorted(Path(f"{store}.launches").glob("*"))


def test_the_store_keeps_sums_alone(stores: tuple[Path, Path]) -> None:
    plain, sharded = stores
    with open_store(plain) as one, open_store(sharded) as other:
        assert one.connection.execute(COUNT).fetchone()[0] > 0
        assert other.connection.execute(COUNT).fetchone() == (0,)
    assert [path.suffix for path in files(sharded)] == [".parquet"]


def test_answers_are_the_same_wherever_launches_are(
    stores: tuple[Path, Path], tmp_path: Path
) -> None:
    for arguments in (
        ["kernels", "--format", "json"],
        ["runs", "--format", "json"],
        ["diff", "latest", "latest", "--format", "json"],
    ):
        assert len({run(*arguments, "--store", store) for store in stores}) == 1
    exports = []
    for store in stores:
        run("export", "latest", "-o", tmp_path / f"{store.stem}.json", "--store", store)
        exports.append((tmp_path / f"{store.stem}.json").read_bytes())
    assert exports[0] == exports[1]
    with open_store(stores[0]) as one, open_store(stores[1]) as other:
        assert list(one.launches()) == list(other.launches())
        assert one.steps() == other.steps()
        assert one.gaps(one.steps()) == other.gaps(other.steps())
        for sql in ("SELECT * FROM kernel_launches", "SELECT * FROM launches"):
            assert query(one, sql).equals(query(other, sql))


def test_runs_of_both_kinds_live_in_one_store(tmp_path: Path) -> None:
    store, direct = tmp_path / "store.db", tmp_path / "direct.db"
    other = tmp_path / "half.json"
    trace = json.loads(gzip.decompress(TRACE.read_bytes()))
    kernels = [each for each in trace["traceEvents"] if each.get("cat") == "kernel"]
    trace["traceEvents"] = kernels[: len(kernels) // 2]
    other.write_text(json.dumps(trace))
    for path in (TRACE, other):
        for each in (store, direct):
            (result,) = ingest_path(each, path)
        if path == TRACE:
            move_launches(store, result.run)
    with open_store(store) as mixed, open_store(direct) as whole:
        names = [row.run for row in whole.runs()]
        for name in (*names, *names):
            assert list(mixed.launches(name)) == list(whole.launches(name))


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "not what was written"),
        (lambda path: path.write_bytes(b"PAR1"), "not what was written"),
    ],
    ids=["missing", "cut", "foreign"],
)
def test_a_lost_file_is_named_and_sums_are_still_told(
    harm: object, what: str, stores: tuple[Path, Path], tmp_path: Path
) -> None:
    store = tmp_path / "store.db"
    shutil.copy(stores[1], store)
    shutil.copytree(f"{stores[1]}.launches", f"{store}.launches")
    (path,) = files(store)
    harm(path)  # type: ignore[operator]
    with open_store(store) as opened:
        assert opened.kernels()
        with pytest.raises(StoreError, match=what) as raised:
            list(opened.launches())
    assert path.name in str(raised.value)


def test_nothing_is_left_of_deleted_runs_and_ended_writers(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    (result,) = ingest_path(store, TRACE)
    folder = Path(f"{store}.launches")
    folder.mkdir()
    (folder / f"{'0' * 16}-{'1' * 16}.parquet.tmp").touch()
    (folder / "notes.txt").touch()
    move_launches(store, result.run)
    assert len(files(store)) == 2
    with open_store(store, write=True) as opened:
        opened.delete_run(result.run)
    assert [path.name for path in files(store)] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    assert tidy(store) == 0
    assert not folder.exists()


def test_without_duckdb_the_extra_is_named(
    stores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "profharness.store.parquet", raising=False)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with open_store(stores[1]) as opened, pytest.raises(StoreError, match=r"profharness\[shards\]"):
        list(opened.launches())
    done = CliRunner().invoke(cli, ["ingest", str(TRACE), "--launches", "shards"])
    assert done.exit_code and "profharness[shards]" in str(done.exception)


MODELS = DATA.parents[1] / "traces" / "models"
SOURCES = (
    TRACE,
    MODELS / "whisper.json.gz",
    MODELS / "llama_train.json.gz",
    MODELS / "llama_generate",
)
QUESTIONS = (
    ["analyze"],
    ["layers"],
    ["ranks"],
    ["kernels", "--run", "all", "--format", "json"],
    ["runs"],
)


def contents(store: Path) -> list[object]:
    """All that single launches and their sums tell."""
    with open_store(store) as opened:
        runs = [row.run for row in opened.runs()]
        tables = (
            "kernel_launches",
            "launches",
            "kernel_summary",
            "attention_calls",
            "cell_summary",
        )
        frames = [query(opened, f"SELECT * FROM {name}").to_csv() for name in tables]
        steps = [opened.steps(run) for run in runs]
        return [runs, frames, steps, [opened.gaps(each) for each in steps]]


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same sources taken in: into the store, beside it, by several processes, and moved later."""
    folder = tmp_path_factory.mktemp("ways")
    ways = {name: folder / f"{name}.db" for name in ("plain", "beside", "local", "moved")}
    run("ingest", *SOURCES, "--store", ways["plain"])
    run("ingest", *SOURCES, "--store", ways["beside"], "--launches", "shards")
    run(
        "ingest",
        *SOURCES,
        "--store",
        ways["local"],
        "--launches",
        "shards",
        "--scheduler",
        "local:2",
    )
    for more in ([], ["--launches", "shards"]):
        run("ingest", *SOURCES, "--store", ways["moved"], *more)
    return ways


@pytest.mark.parametrize("way", ["beside", "local", "moved"])
def test_all_ways_give_the_same_answers(ways: dict[str, Path], way: str) -> None:
    with open_store(ways[way]) as opened:
        assert opened.connection.execute(COUNT).fetchone() == (0,)
        traces = opened.connection.execute("SELECT count(*) FROM traces WHERE launches").fetchone()[
            0
        ]
    assert len(files(ways[way])) == traces >= len(SOURCES)
    assert contents(ways[way]) == contents(ways["plain"])
    for question in QUESTIONS:
        texts = [
            run(*question, "--store", ways[name]).replace(str(ways[name]), "STORE")
            for name in ("plain", way)
        ]
        assert texts[0] == texts[1]


def test_what_cannot_be_written_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    Path(f"{store}.launches").write_text("no folder")
    with pytest.raises(StoreError, match="cannot be written there"):
        ingest_path(store, TRACE, beside=True)
    with open_store(store) as opened:
        assert opened.runs() == []
    Path(f"{store}.launches").unlink()
    ingest_path(store, TRACE, beside=True)
    assert len(files(store)) == 1


def test_a_killed_ingest_leaves_no_run_and_no_file(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    program = (
        "import os, signal, sys; from pathlib import Path; import profharness.store.shards as shards\n"
        "settle = shards._settle\n"
        "def killed(part, path):\n    settle(part, path); os.kill(os.getpid(), signal.SIGKILL)\n"
        "shards._settle = killed\n"
        "from profharness.store import ingest_path\n"
        "ingest_path(Path(sys.argv[1]), Path(sys.argv[2]), beside=True)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(store), str(TRACE)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(files(store)) == 1
    with open_store(store) as opened:
        assert opened.runs() == []
    run("ingest", TRACE, "--launches", "shards", "--store", store)
    assert len(files(store)) == 1
    with open_store(store) as opened:
        assert sum(1 for _ in opened.launches())


def test_a_damaged_file_of_a_shard_is_named(tmp_path: Path) -> None:
    shard, store = tmp_path / "0.db", tmp_path / "store.db"
    source = read_source(TRACE)
    with closing(make_shard(shard)) as made:
        result = ingest_source(shard, lambda: made, source, None, beside=True)
    (path,) = files(shard)
    path.write_bytes(b"PAR1")
    with closing(connect(store, write=True, foreign_keys=False)) as connection:
        with pytest.raises(StoreError, match="reads their source again") as raised:
            merge_shard(connection, shard, result, source.content_hash, whole=True)
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (0,)
    assert path.name in str(raised.value)
