"""Several processes ingest into one store at once. A killed process leaves nothing behind."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from profharness.errors import NotFoundError
from profharness.store import open_store, schema

Folder = Callable[..., Path]
INGEST = """
import sys
from pathlib import Path
from profharness.store import ingest_path
sys.stdin.read()
for source in sys.argv[2:]:
    print(ingest_path(Path(sys.argv[1]), Path(source))[0].status)
"""
HALF = """
import os, signal, sqlite3, sys
store = sqlite3.connect(sys.argv[1], isolation_level=None)
store.execute("PRAGMA journal_mode = DELETE")
store.execute("PRAGMA cache_size = 1")
store.execute("BEGIN IMMEDIATE")
store.execute("CREATE TABLE half AS SELECT * FROM sqlite_master a, sqlite_master b")
os.kill(os.getpid(), signal.SIGKILL)
"""
PROCESSES = 6


def start(store: Path, *sources: Path, program: str = INGEST) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(store), *map(str, sources)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def release(children: list[subprocess.Popen[str]]) -> list[str]:
    """Let all children continue at once and return their output. Fail if any of them failed."""
    for child in children:
        assert child.stdin
        child.stdin.close()
        child.stdin = None
    answers = []
    for child in children:
        out, errors = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 0, errors
        answers.append(out)
    return answers


def test_processes_share_a_new_store(tmp_path: Path, kineto: Path, run_folder: Folder) -> None:
    store = tmp_path / "new.db"
    folders = [run_folder(run=f"run-{i}", samples=[i + 1]) for i in range(PROCESSES)]
    answers = release([start(store, folder, kineto) for folder in folders])
    words = " ".join(answers).split()
    assert words.count("new") == PROCESSES + 1
    assert words.count("unchanged") == PROCESSES - 1
    with open_store(store) as opened:
        assert len(opened.runs()) == PROCESSES + 1
        for i in range(PROCESSES):
            assert opened.cells(f"run-{i}")[0].samples == {"event": (i + 1,)}
            assert len(list(opened.launches(f"run-{i}"))) == 9
        assert opened.connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert opened.connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_killed_ingest_leaves_nothing(tmp_path: Path, kineto: Path, run_folder: Folder) -> None:
    store = tmp_path / "p.db"
    release([start(store, run_folder())])
    program = INGEST.replace(
        "Path(source))", "Path(source), progress=lambda *a: __import__('os')._exit(9))"
    )
    child = start(store, kineto, program=program)
    child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 9
    with open_store(store) as opened:
        assert [row.run for row in opened.runs()] == ["20261121-aaaa"]
        assert opened.connection.execute("SELECT count(*) FROM launches").fetchone() == (9,)
    assert release([start(store, kineto)]) == ["new\n"]


@pytest.mark.parametrize("write", [True, False])
def test_interrupted_transaction_is_rolled_back(tmp_path: Path, write: bool) -> None:
    store = tmp_path / "s.db"
    open_store(store, write=True).close()
    subprocess.run([sys.executable, "-c", HALF, str(store)], check=False)
    assert (tmp_path / "s.db-journal").exists()
    with open_store(store, write=write) as opened:
        names = opened.connection.execute("SELECT name FROM sqlite_master").fetchall()
        assert ("half",) not in names and opened.runs() == []


def test_store_being_created_is_not_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader checks the header in one statement, so a store created meanwhile counts as empty."""
    store = tmp_path / "s.db"
    store.touch()
    opened = schema._raw

    def make(statement: str) -> None:
        if "user_version" in statement and "application_id" not in statement:
            with (
                closing(sqlite3.connect(store, timeout=0)) as maker,
                suppress(sqlite3.OperationalError),  # the reader has locked it
            ):
                maker.execute("CREATE TABLE environments (id INTEGER PRIMARY KEY)")

    def watched(path: Path, mode: str, **options: bool) -> sqlite3.Connection:
        connection = opened(path, mode, **options)
        connection.set_trace_callback(make)
        return connection

    monkeypatch.setattr(schema, "_raw", watched)
    with pytest.raises(NotFoundError, match="the store is empty"):
        schema.connect(store, write=False)


@pytest.mark.parametrize("module", ["numpy", "pandas", "sqlite_utils", "torch"])
def test_reading_imports_nothing_heavy(tmp_path: Path, run_folder: Folder, module: str) -> None:
    release([start(tmp_path / "p.db", run_folder())])
    program = (
        "import sys; from pathlib import Path; from profharness.store import open_store\n"
        "with open_store(Path(sys.argv[1])) as store: print(len(store.kernels()))\n"
        f"print({module!r} in sys.modules)"
    )
    assert release([start(tmp_path / "p.db", program=program)]) == ["3\nFalse\n"]
