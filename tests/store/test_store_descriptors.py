"""Only SQLite opens a store: closing any other descriptor of it would release SQLite's locks."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click
import pytest
from make_ranks import Fleet, make_ranks, read
from waiting import PATIENCE_S

import profharness
from profharness.cli import cli
from profharness.errors import StoreError, TraceFormatError
from profharness.run import Protocol, Run, TraceFile, write_run
from profharness.scrub import audit, scrub
from profharness.store import ingest_path, open_store
from profharness.store.sources import ParsedTraceCache, hash_file

TRACES = Path(__file__).parents[2] / "traces"

# sitecustomize of each Python process: writes a line whenever it opens a file of the store.
HOOK = """
import os, sys

store, log = os.environ["WATCHED_STORE"], os.environ["WATCHED_LOG"]
files = {store + suffix for suffix in ("", "-wal", "-shm", "-journal")}

def watch(event, arguments):
    path = arguments[0] if event in ("open", "sqlite3.connect") else None
    if isinstance(path, (str, bytes, os.PathLike)):
        path = os.fsdecode(path).partition("?")[0].removeprefix("file://")
        if os.path.realpath(path) in files:
            with open(log, "a") as file:
                print(event, path, sys.argv, file=file)

sys.addaudithook(watch)
"""
# Runs several commands in one process and prints the exit code and exception of each.
RUN = """
import shlex, sys
from profharness.cli import main

for line in sys.stdin.read().splitlines():
    sys.argv = ["profharness", *shlex.split(line)]
    try:
        main()
    except SystemExit as end:
        print("END", end.code, line, flush=True)
"""
CAPTURE = "20261121-151544-59c7"  # of traces/h200-torch2.11
CELL = "--config 1,1,8,8,fp32 --backend math --device cpu --store s.db"
COMMANDS = {
    "analyze": ["analyze --store s.db"],
    "atlas add": ["atlas add --atlas atlases --store s.db"],
    "bench": ["bench --run {run} --store s.db", f"bench {CELL} --iterations 2 --warmup 0"],
    "capture": [f"capture {CELL} --samples 2 --iterations 1"],
    "diff": ["diff flash math --store s.db"],
    "doctor": ["doctor --store s.db"],
    "explain": ["explain --config 2,8,512,64,fp16 --gpu H200 --torch 2.11 --store s.db"],
    "export": ["export {run} -o trace.json --store s.db"],
    "ingest": [
        "ingest s.db s.db-wal s.db-shm linked.sqlite . rank.json --store s.db",
        "ingest s.db linked.sqlite . rank.json --scheduler local:1 --store s.db",
    ],
    "kernels": ["kernels --profiler all --store s.db"],
    "layers": ["layers --full --store s.db"],
    "mcp": ["mcp --store s.db"],
    "observe": ["observe --profiler none --store s.db -- {python} program.py"],
    "ranks": ["ranks --store s.db"],
    "repro": [
        "repro --run {run} --config 2,8,512,64,fp16 --backend flash -o repro.py --store s.db"
    ],
    "report": ["report -o report.html --store s.db"],
    "runs": ["runs --store s.db", "runs --delete {run} --store s.db"],
    "scrub": [
        "scrub {run} -o copy --store s.db",
        "scrub --check . --store s.db",
        "scrub s.db --store s.db",
        "scrub . --store s.db",
    ],
    "serve": ["serve --port 0 --store s.db"],
    "verify": [f"verify {CELL} --cases none"],
}
SERVERS = ("mcp", "serve")
INVALID = {"ingest", "scrub", "ranks"}  # commands that get the store as their input
ASK_MCP = """{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": \
"2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}}
{"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "runs"}}
"""
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


def commands_with_store(command: click.Command, *names: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from commands_with_store(found, *names, name)
    elif any(parameter.name == "store" for parameter in command.params):
        yield " ".join(names)


def test_every_command_with_a_store_is_watched() -> None:
    assert sorted(commands_with_store(cli)) == sorted(COMMANDS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with the ranks of a job, a program's trace and a capture."""
    store = tmp_path_factory.mktemp("whole") / "s.db"
    paths = make_ranks(read(), store.parent / "ranks", Fleet(2))
    for source in (*paths, TRACES / "models" / "llama_prefill.json.gz", TRACES / "h200-torch2.11"):
        ingest_path(store, source)
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
    (tmp_path / "program.py").write_text("import torch\n")
    trace = TraceFile("nsys", "s.db", ())
    created = "2026-11-21T10:00:00+00:00"
    write_run(tmp_path, Run("run", created, ("nsys",), Protocol(), (), {}, (trace,)))
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    return tmp_path


@contextmanager
def watched(place: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start Python in a folder. It and its children may open the store through SQLite only."""
    path = os.pathsep.join((str(place / "hook"), str(Path(profharness.__file__).parents[1])))
    names = {"WATCHED_STORE": str(place / "s.db"), "WATCHED_LOG": str(place / "log")}
    pipe = subprocess.PIPE
    with (
        open_store(place / "s.db"),  # so that there is a log
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=place,
            env=os.environ | names | {"PYTHONPATH": path},
            stdin=pipe, stdout=pipe, stderr=pipe, text=True,
        ) as process,
    ):  # fmt: skip
        yield process
    events = (place / "log").read_text().splitlines()
    assert any(event.startswith("sqlite3.connect") for event in events)
    assert [event for event in events if event.startswith("open")] == []


def test_commands_leave_store_to_sqlite(place: Path) -> None:
    """This includes commands that get the store or its log as an input."""
    lines = [line for name in COMMANDS if name not in SERVERS for line in COMMANDS[name]]
    lines = [line.format(python=sys.executable, run=CAPTURE) for line in lines]
    with watched(place, "-c", RUN) as process:
        output, errors = process.communicate("\n".join(lines), PATIENCE_S)
    assert "Traceback" not in output + errors
    ends = [line.split(maxsplit=2)[1:] for line in output.splitlines() if line.startswith("END")]
    assert [line for _, line in ends] == lines, errors
    assert {line.split()[0] for code, line in ends if code not in ("0", "None")} <= INVALID, errors


def test_mcp_leaves_store_to_sqlite(place: Path) -> None:
    pytest.importorskip("mcp", reason="mcp is not installed")
    with watched(place, "-m", "profharness", *shlex.split(*COMMANDS["mcp"])) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(ASK_MCP)
        process.stdin.flush()
        answers = [process.stdout.readline() for _ in range(2)]
        process.communicate(timeout=PATIENCE_S)
    assert CAPTURE in answers[1]


def test_serve_leaves_store_to_sqlite_and_shows_new_runs(place: Path) -> None:
    """New runs show at once, while another process opens and closes the store for each of them."""
    pytest.importorskip("datasette", reason="datasette is not installed")
    ingest = [sys.executable, "-c", INGEST, "s.db"]
    pipe = subprocess.PIPE
    with (
        watched(place, "-m", "profharness", *shlex.split(*COMMANDS["serve"])) as process,
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
        with pytest.raises(TraceFormatError, match="a store of profharness, not a trace"):
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
