"""`ingest --scheduler local` gives the store of a sequential ingest, even if processes are killed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make_ranks import Fleet, make_ranks, read
from store_contents import contents
from waiting import PATIENCE_S, alive, until, written_pid

import profharness
from profharness.errors import ProfharnessError, UsageError
from profharness.jobs import parallel_ingest
from profharness.jobs.parallel_ingest import ingest_sources, readers_of
from profharness.processes import kill
from profharness.run import RUN_FILE, read_run
from profharness.store import ingest_path
from profharness.store.ingest_worker import SourceReader
from profharness.store.schema import connect
from profharness.store.sources import find_sources, read_source
from profharness.trace import LaunchBatch, Trace
from profharness.traces.attribution import CHUNK_ROWS

ROOT = Path(__file__).parents[2]
MODELS, CAPTURED = ROOT / "traces" / "models", ROOT / "traces" / "h200-torch-nsys-ncu"
RANKS = 5
DAMAGED = "rank3b.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with traces of a job's ranks, one damaged, and their store `direct.db`."""
    folder = tmp_path_factory.mktemp("job")
    paths = make_ranks(read(), folder / "ranks", Fleet(RANKS))
    with closing(connect(folder / "empty.db", write=True)):
        pass  # copies of an empty store are made faster than new stores
    shutil.copyfile(folder / "empty.db", folder / "direct.db")
    for path in paths:
        ingest_path(folder / "direct.db", path)
    (folder / "ranks" / DAMAGED).write_bytes(paths[3].read_bytes()[:100_000])
    return folder


def started(folder: Path, store: Path) -> subprocess.Popen[str]:
    """Start to ingest the folder into an empty store with two workers."""
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
    """Return the ids of the child processes of a process."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def test_store_equals_sequential_ingest_and_damaged_file_fails_alone(
    folder: Path, tmp_path: Path
) -> None:
    """This includes a killed worker, whose source another one reads again."""
    store = tmp_path / "s.db"
    process = started(folder, store)
    until(lambda: children(process.pid), process)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, errors
    names = [f"rank{rank}.json" for rank in range(RANKS)]
    assert [line.partition(":")[0] for line in output.splitlines()] == [f"ranks/{n}" for n in names]
    assert f"error: ranks/{DAMAGED}, byte" in errors
    assert f"1 of {RANKS + 1} sources could not be ingested" in errors
    assert f"To compare the {RANKS} ranks, use: profharness ranks rank" in errors
    mine, direct = contents(store), contents(folder / "direct.db")
    for rows in (mine, direct):  # the paths of the sources differ
        rows["runs"] = [row[:5] + row[6:] for row in rows["runs"]]
    assert mine == direct
    again = ingest_sources(store, find_sources(folder / "ranks"), readers_of("local:1"))
    states = [result.status for taken in again for result in taken.results]
    assert states == ["unchanged"] * RANKS
    with pytest.raises(ProfharnessError, match=rf"{DAMAGED}, byte \d+"):
        profharness.ingest(folder / "ranks", scheduler="local:1", store=store)
    assert [path.name for path in tmp_path.iterdir()] == ["s.db"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_ingest_leaves_complete_sources_and_no_process(
    number: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    """It is killed after a source is stored, and interrupted as soon as there are workers."""
    store = tmp_path / "s.db"
    process = started(folder, store)
    until(lambda: len(children(process.pid)) == 2, process)
    workers = children(process.pid)
    assert process.stdout is not None
    if number == signal.SIGKILL:
        assert "rank0.json: new" in process.stdout.readline()
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    until(lambda: not any(map(alive, workers)))
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert f"of {RANKS + 1} sources are done; to ingest the other sources, run" in errors
    else:
        assert process.returncode == -number and len(contents(store)["runs"]) >= 1
    for _ in ingest_sources(store, find_sources(folder / "ranks"), readers_of("local:1")):
        pass
    mine, direct = contents(store), contents(folder / "direct.db")
    assert mine["launches"] == direct["launches"] and mine["kernels"] == direct["kernels"]
    assert [path.name for path in tmp_path.iterdir()] == ["s.db"]


def test_source_is_parsed_while_store_is_being_created(folder: Path, tmp_path: Path) -> None:
    """An empty file is not a store yet."""
    store, path = tmp_path / "s.db", folder / "ranks" / "rank0.json"
    for make in (store.touch, store.unlink):
        make()
        with closing(SourceReader(store)) as reader:
            assert reader.source(path).content_hash == read_source(path).content_hash
            trace, first = reader.trace(path)
            batches = list(reader.batches(path))
            assert batches.pop() is None
            launches = sum(len(batch.kernel) for batch in (*first, *batches) if batch)
            assert launches == trace.num_launches > 0


def test_sources_of_all_kinds_are_stored_as_by_sequential_ingest(tmp_path: Path) -> None:
    """These are runs with several traces, one of them damaged, calls of models, and counters."""
    damaged, rewritten = tmp_path / "damaged", tmp_path / "rewritten"
    shutil.copytree(CAPTURED, damaged)
    trace = next(damaged.glob("nsys*.sqlite*"))
    trace.write_bytes(trace.read_bytes()[: trace.stat().st_size // 2])
    shutil.copytree(CAPTURED, rewritten)
    (rewritten / RUN_FILE).write_text(
        (rewritten / RUN_FILE).read_text().replace(read_run(CAPTURED).run, "20261124-rewritten")
    )
    models = [MODELS / "vit.json.gz", MODELS / "llama_eager.json.gz"]
    sources = [rewritten, models[0], damaged, models[1], CAPTURED / "ncu-1.csv"]
    direct, store = tmp_path / "direct.db", tmp_path / "s.db"
    results = [result for source in sources for result in ingest_path(direct, source)]
    with closing(ingest_sources(store, sources, readers_of("local:2"))) as outcomes:
        assert [result for outcome in outcomes for result in outcome.results] == results
    stored = contents(store)
    assert stored == contents(direct)
    assert all(stored[name] for name in ("metrics", "calls", "cells", "device_times"))


def test_worker_killed_twice_is_an_error_of_its_source(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is killed while batches are sent. The transaction is rolled back."""
    first, second = folder / "ranks" / "rank0.json", folder / "ranks" / "rank1.json"
    taken = parallel_ingest._Worker.take
    kills = []

    def take(worker: Any, path: Path, content_hash: str) -> Trace:
        trace = taken(worker, path, content_hash)
        batches = trace.batches()

        def killed() -> Iterator[LaunchBatch]:
            yield next(batches)
            worker.kill(signal.SIGKILL)
            kills.append(path)
            yield from batches

        return replace(trace, batches=lambda: killed() if path == first else batches)

    monkeypatch.setattr(parallel_ingest._Worker, "take", take)
    store = tmp_path / "s.db"
    with closing(ingest_sources(store, [first, second], readers_of("local:1"))) as outcomes:
        failed, stored = list(outcomes)
    assert (
        failed.error is not None
        and "the process that read this source was ended by SIGKILL" in failed.error
    )
    assert kills == [first, first]
    assert [result.status for result in stored.results] == ["new"]
    assert len(contents(store)["runs"]) == 1


def test_unfinished_trace_does_not_affect_the_next_source(folder: Path, tmp_path: Path) -> None:
    """A worker sends batches until the end, also if the writer fails before."""
    properties = {"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0}
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "dur": 1}
    arguments = {"device": 0, "stream": 7}
    events = [
        kernel | {"ts": 2 * number, "args": arguments | {"correlation": number + 1}}
        for number in range(2 * CHUNK_ROWS + 1)
    ]
    large, next_ = tmp_path / "large.json", folder / "ranks" / "rank0.json"
    large.write_text(json.dumps({"deviceProperties": [properties], "traceEvents": events}))
    with parallel_ingest._workers(tmp_path / "s.db", readers_of("local:1")) as (worker,):
        worker.source(large, lambda: None)
        trace = worker.take(large, "")
        batches = trace.batches()
        assert len(next(batches).kernel) + len(next(batches).kernel) < trace.num_launches
        trace.close()
        assert worker.source(next_, lambda: None).path == next_


def stubborn_nsys(folder: Path) -> Path:
    """Write a tool that writes its process id to `tool` and its parent's to `worker`, ignores
    SIGTERM, and never ends.
    """
    tool = folder / "nsys"
    tool.write_text(
        f"#!{sys.executable}\nimport os, signal, sys, time\nfrom pathlib import Path\n"
        "if '--version' in sys.argv:\n"
        "    sys.exit('NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"for name, pid in (('worker', os.getppid()), ('tool', os.getpid())):\n"
        f"    part = Path({str(folder)!r}, name + '.part')\n"
        "    part.write_text(str(pid))\n"
        "    part.rename(part.with_suffix(''))\n"
        "time.sleep(86400)\n"
    )
    tool.chmod(0o755)
    return tool


def ingest_reports(folder: Path, tmp_path: Path) -> subprocess.Popen[str]:
    """Start to ingest a report that never gets exported, and a trace, with one worker."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "temporary").mkdir()
    (tmp_path / "sources" / "a.nsys-rep").write_bytes(b"report")
    shutil.copyfile(folder / "ranks" / "rank0.json", tmp_path / "sources" / "b.json")
    command = [sys.executable, "-m", "profharness", "ingest", "sources", "--store", "s.db"]
    return subprocess.Popen(
        [*command, "--scheduler", "local:1"],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ
        | {
            "PYTHONPATH": str(Path(profharness.__file__).parents[1]),
            "PROFHARNESS_NSYS": str(stubborn_nsys(tmp_path)),
            "TMPDIR": str(tmp_path / "temporary"),
        },
    )


def test_interrupt_ends_tool_that_ignores_sigterm(folder: Path, tmp_path: Path) -> None:
    process = ingest_reports(folder, tmp_path)
    until(lambda: written_pid(tmp_path / "tool"), process)
    pid = written_pid(tmp_path / "tool")
    assert pid is not None
    try:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, errors
        assert not alive(pid)
        assert not list((tmp_path / "temporary").iterdir())
    finally:
        kill(pid, signal.SIGKILL)


def test_tool_of_killed_worker_is_ended_and_other_sources_are_stored(
    folder: Path, tmp_path: Path
) -> None:
    process = ingest_reports(folder, tmp_path)
    tools = []
    try:
        for _ in range(parallel_ingest.TRIES):
            until(lambda: written_pid(tmp_path / "tool"), process)
            tool, worker = (written_pid(tmp_path / name) for name in ("tool", "worker"))
            assert tool is not None and worker is not None
            tools.append(tool)
            (tmp_path / "tool").unlink()
            kill(worker, signal.SIGKILL)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "a.nsys-rep: the process that read this source was ended by SIGKILL" in errors
        assert "b.json: new" in output
        assert not any(map(alive, tools))
    finally:
        for tool in tools:
            kill(tool, signal.SIGKILL)


def test_trace_is_read_again_if_worker_was_killed_in_the_middle_of_another(
    folder: Path, tmp_path: Path
) -> None:
    path = folder / "ranks" / "rank0.json"
    with parallel_ingest._workers(tmp_path / "s.db", readers_of("local:1")) as (worker,):
        worker.source(path, lambda: None)
        trace = worker.take(path, "")
        next(trace.batches())
        worker._request("batches", path)
        worker._streams = True
        worker.kill(signal.SIGKILL)
        trace.close()
        again = worker.take(path, "")
        assert sum(len(batch.kernel) for batch in again.batches()) == again.num_launches > 0


IN_WORKER = """
from profharness.store.ingest_worker import SourceReader
class Unpicklable:
    def __reduce__(self):
        raise MemoryError
trace = SourceReader.trace
def without_memory(reader, path):
    found = trace(reader, path)
    return [b"1" * 100_000, found, Unpicklable()] if path.name == "rank0.json" else found
SourceReader.trace = without_memory
"""


def test_worker_without_memory_for_a_reply_ends(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part of the reply that it sent is not taken for the next reply."""
    begin, end = parallel_ingest.WORKER.rsplit("main()", 1)
    code = f"{begin}exec({IN_WORKER!r}); main(){end}"
    monkeypatch.setattr(parallel_ingest, "WORKER", code)
    store, ranks = tmp_path / "s.db", folder / "ranks"
    paths = [ranks / "rank0.json", ranks / "rank1.json"]
    with closing(ingest_sources(store, paths, readers_of("local:1"))) as outcomes:
        failed, stored = list(outcomes)
    assert failed.error is not None and failed.error.endswith("ended with 1: MemoryError")
    assert [result.status for result in stored.results] == ["new"]


def test_unread_reply_is_not_taken_for_the_next_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, failures = pickle.load, [MemoryError()]

    def load_later(file: Any) -> Any:
        if failures:
            raise failures.pop()
        return load(file)

    monkeypatch.setattr(pickle, "load", load_later)
    store, ranks = tmp_path / "s.db", folder / "ranks"
    paths = [ranks / "rank0.json", ranks / "rank1.json"]
    with closing(ingest_sources(store, paths, readers_of("local:1"))) as outcomes:
        failed, stored = list(outcomes)
    assert failed.error is not None and "not enough memory" in failed.error
    assert [(result.status, result.source) for result in stored.results] == [("new", paths[1])]


@pytest.mark.parametrize("text", ["local:0", "local:x", "tls://head:8786", "slurm:x.sbatch"])
def test_other_scheduler_is_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="`local:N`"):
        readers_of(text)


def test_each_worker_has_one_cpu() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    assert readers_of("local") == cpus
    assert readers_of(f"local:{len(cpus) + 1}") == [*cpus, cpus[0]]
