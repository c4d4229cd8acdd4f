"""`ingest --scheduler local`: the same store as without, whatever ends a process in the middle."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from make_ranks import Fleet, make_ranks, read
from store_contents import contents
from waiting import PATIENCE_S, alive, until

import profharness
from profharness.errors import ProfharnessError, UsageError
from profharness.jobs.parallel_ingest import ingest_sources, readers_of
from profharness.store import ingest_path
from profharness.store.reader import answered
from profharness.store.schema import connect
from profharness.store.sources import find_sources

RANKS = 5
DAMAGED = "rank3b.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a job's ranks, one of them damaged, and `direct.db`, into which they were ingested."""
    folder = tmp_path_factory.mktemp("job")
    paths = make_ranks(read(), folder / "ranks", Fleet(RANKS))
    with closing(connect(folder / "empty.db", write=True)):
        pass  # a store that is there saves each process what makes one
    shutil.copyfile(folder / "empty.db", folder / "direct.db")
    for path in paths:
        ingest_path(folder / "direct.db", path)
    (folder / "ranks" / DAMAGED).write_bytes(paths[3].read_bytes()[:100_000])
    return folder


def started(folder: Path, store: Path) -> subprocess.Popen[str]:
    """Two readers' ingest of the folder into an empty store."""
    shutil.copyfile(folder / "empty.db", store)
    command = [sys.executable, "-m", "profharness", "ingest", "ranks", "--store", str(store)]
    return subprocess.Popen(
        [*command, "--scheduler", "local:2"],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(profharness.__file__).parents[1])},
    )


def children(pid: int) -> list[int]:
    """The processes that this one has started."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def test_the_store_is_that_of_a_direct_ingest_and_a_damaged_file_fails_alone(
    folder: Path, tmp_path: Path
) -> None:
    """Also where a reader is killed: another one reads its source again."""
    store = tmp_path / "s.db"
    process = started(folder, store)
    until(lambda: children(process.pid), process)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, errors
    names = [f"rank{rank}.json" for rank in range(RANKS)]
    assert [line.partition(":")[0] for line in output.splitlines()] == [f"ranks/{n}" for n in names]
    assert f"error: ranks/{DAMAGED}, byte" in errors
    assert f"1 of {RANKS + 1} sources could not be taken in" in errors
    assert f"compare the {RANKS} ranks with: profharness ranks trace-" in errors
    mine, direct = contents(store), contents(folder / "direct.db")
    for rows in (mine, direct):  # as the one was given, and the other
        rows["runs"] = [row[:5] + row[6:] for row in rows["runs"]]
    assert mine == direct
    again = ingest_sources(store, find_sources(folder / "ranks"), readers_of("local:1"))
    states = [result.status for taken in again for result in taken.results]
    assert states == ["unchanged"] * RANKS
    with pytest.raises(ProfharnessError, match=rf"{DAMAGED}, byte \d+"):
        profharness.ingest(folder / "ranks", scheduler="local:1", store=store)
    assert [path.name for path in tmp_path.iterdir()] == ["s.db"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_ends_in_the_middle_leaves_whole_sources_and_no_process(
    number: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    """Killed once something is stored, interrupted as soon as there are readers."""
    store = tmp_path / "s.db"
    process = started(folder, store)
    until(lambda: len(children(process.pid)) == 2, process)
    readers = children(process.pid)
    assert process.stdout is not None
    if number == signal.SIGKILL:
        assert "rank0.json: new" in process.stdout.readline()
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    until(lambda: not any(map(alive, readers)))
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert f"of {RANKS + 1} sources are done; the same command goes on" in errors
    else:
        assert process.returncode == -number and len(contents(store)["runs"]) >= 1
    for _ in ingest_sources(store, find_sources(folder / "ranks"), readers_of("local:1")):
        pass
    mine, direct = contents(store), contents(folder / "direct.db")
    assert mine["launches"] == direct["launches"] and mine["kernels"] == direct["kernels"]
    assert [path.name for path in tmp_path.iterdir()] == ["s.db"]


def test_a_source_is_read_while_the_store_is_being_made(folder: Path, tmp_path: Path) -> None:
    """A file that is empty so far is no store yet, and no reason to fail."""
    store, shard = tmp_path / "s.db", tmp_path / "shard.db"
    source = folder / "ranks" / "rank0.json"
    task = {"store": str(store), "shard": str(shard), "source": str(source)}
    store.touch()
    assert answered(task)["status"] == "new" and shard.stat().st_size > 0
    store.unlink()
    assert answered(task)["status"] == "new" and not store.exists()


@pytest.mark.parametrize("text", ["local:0", "local:x", "tls://head:8786", "slurm:x.sbatch"])
def test_another_scheduler_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError, match="`local:N`"):
        readers_of(text)


def test_a_process_reads_on_one_cpu() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    assert readers_of("local") == cpus
    assert readers_of(f"local:{len(cpus) + 1}") == [*cpus, cpus[0]]
