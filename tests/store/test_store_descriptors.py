"""Only SQLite opens a store: closing any other descriptor of it would release SQLite's locks."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from profharness.errors import StoreError, TraceFormatError
from profharness.run import Protocol, Run, TraceFile, write_run
from profharness.scrub import audit, scrub
from profharness.store import ingest_path, open_store
from profharness.store.sources import ParsedTraceCache, hash_file

TRACES = Path(__file__).parents[2] / "traces"

# Checks that a process has SQLite's locks on a store in use: one in its file, one in its index.
HELD = """
import fcntl, sys

for path, start, length in ((sys.argv[1], 0x40000002, 510), (sys.argv[1] + "-shm", 128, 1)):
    with open(path, "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError:
            continue
        sys.exit(path + " is not locked")
"""
# Ingests the traces named on stdin and prints a line for each.
INGEST = """
import sys
from pathlib import Path
from profharness.store import ingest_path
for line in sys.stdin:
    print(ingest_path(Path(sys.argv[1]), Path(line.strip()))[0].run, flush=True)
"""
NEW_RUNS = 20
CAPTURE = "20261121-151544-59c7"  # of traces/h200-torch2.11


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with a capture."""
    store = tmp_path_factory.mktemp("whole") / "s.db"
    ingest_path(store, TRACES / "h200-torch2.11")
    return store


def write_trace(path: Path, kernel: str) -> None:
    event = {"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": 7, "ts": 5, "dur": 1}
    path.write_text(json.dumps({"traceEvents": [event | {"args": {}}]}))


@pytest.fixture
def place(tmp_path: Path, whole: Path) -> Path:
    """Return a folder with a store that is also listed as a trace of the run in that folder."""
    shutil.copyfile(whole, tmp_path / "s.db")
    (tmp_path / "linked.sqlite").symlink_to(tmp_path / "s.db")
    write_trace(tmp_path / "rank.json", "k")
    trace = TraceFile("nsys", "s.db", ())
    created = "2026-11-21T10:00:00+00:00"
    write_run(tmp_path, Run("run", created, ("nsys",), Protocol(), (), {}, (trace,)))
    return tmp_path


def test_serve_shows_new_runs(place: Path) -> None:
    """New runs show at once, while another process opens and closes the store for each of them."""
    pytest.importorskip("datasette", reason="datasette is not installed")
    ingest = [sys.executable, "-c", INGEST, "s.db"]
    serve = [sys.executable, "-m", "profharness", "serve", "--port", "0", "--store", "s.db"]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(serve, cwd=place, stdout=pipe, stderr=pipe, text=True) as process,
        subprocess.Popen(ingest, cwd=place, stdin=pipe, stdout=pipe, text=True) as other,
    ):
        assert process.stderr and other.stdin and other.stdout
        address = process.stderr.readline().split()[3]
        for path in ("", "profharness/runs", "profharness/regret", "-/report/latest"):
            fetch(address + path)
        runs = {row["run"] for row in asked(address, "stored_runs")}
        for number in range(NEW_RUNS):
            write_trace(place / f"{number}.json", f"kernel {number}")
            print(f"{number}.json", file=other.stdin, flush=True)
            runs.add(other.stdout.readline().strip())
            assert {row["run"] for row in asked(address, "stored_runs")} == runs
            assert {row["run"] for row in asked(address, "slowest_kernels")} <= runs
            assert {row["run"] for row in asked(address, "latency")} == {CAPTURE}
        other.communicate()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert "malformed" not in errors


def asked(address: str, question: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(
        fetch(f"{address}profharness/{question}.json?_shape=array")
    )
    return rows


def fetch(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        text: bytes = answer.read()
        return text


def refuse_as_input(path: Path) -> None:
    other = path.with_name("other.db")
    for read_input in (hash_file, lambda path: ingest_path(other, path), scrub):
        with pytest.raises(TraceFormatError, match="a profharness store, not a trace"):
            read_input(path)


USES: dict[str, Callable[[Path], object]] = {
    "reading": lambda path: open_store(path).close(),
    "writing": lambda path: open_store(path, write=True).close(),
    "ingest": lambda path: ingest_path(path, path.with_name("rank.json")),
    "an input": refuse_as_input,
    "an input's log": lambda path: refuse_as_input(path.with_name("s.db-shm")),
    "a linked input": lambda path: refuse_as_input(path.with_name("linked.sqlite")),
    "a trace of a run": lambda path: ingest_path(path, path.parent),
    "a trace parsed early": lambda path: ParsedTraceCache().add(path),
    "an audit": lambda path: audit(path.parent),
}


@pytest.mark.parametrize("use", USES)
def test_connection_keeps_its_locks_and_sees_new_runs(use: str, place: Path, kineto: Path) -> None:
    """This does not depend on what else the process does with the store."""
    store = place / "s.db"
    with open_store(store) as held:
        assert held.runs()
        USES[use](store)
        subprocess.run([sys.executable, "-I", "-c", HELD, str(store)], check=True)
        before = len(held.runs())
        ingest = [sys.executable, "-c", INGEST, str(store)]
        subprocess.run(ingest, input=str(kineto), text=True, check=True)
        assert store.with_name("s.db-wal").stat().st_size > 0
        assert len(held.runs()) == before + 1
        assert held.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_store_with_hard_links_is_not_written(tmp_path: Path, kineto: Path) -> None:
    """SQLite would keep one log per name, and neither would show the other's rows."""
    store, link = tmp_path / "s.db", tmp_path / "link.db"
    ingest_path(store, kineto)
    link.hardlink_to(store)
    for name in (store, link):
        with pytest.raises(StoreError, match="has 2 hard links"):
            ingest_path(name, kineto)
        with open_store(name) as opened:
            assert len(opened.runs()) == 1
    link.unlink()
    ingest_path(store, kineto)


def test_symbolic_link_is_the_store_that_it_names(
    tmp_path: Path, kineto: Path, run_folder: Callable[..., Path]
) -> None:
    store, link = tmp_path / "folder" / "s.db", tmp_path / "link.db"
    store.parent.mkdir()
    ingest_path(store, kineto)
    link.symlink_to(store)
    with open_store(store) as opened:
        ingest_path(link, run_folder())
        assert len(opened.runs()) == 2
    with closing(sqlite3.connect(store)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert sorted(path.name for path in tmp_path.glob("link.db*")) == ["link.db"]
