"""Traces that are parsed while their run goes on: the store holds what it holds without that."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until

from profharness.attention.config import parse_config
from profharness.jobs import background_ingest
from profharness.jobs.background_ingest import open_background_ingest
from profharness.recording.supervise import Step
from profharness.rows import COLD, WALL
from profharness.run import Cell, TraceFile, read_run, write_run
from profharness.store import ingest, ingest_path, sources
from profharness.store.sources import ParsedTraceCache

TRACES = Path(__file__).resolve().parents[2] / "traces"
RUN = TRACES / "h200-torch2.11"
CELL = Cell("c0001", parse_config("1,1,8,8"), "flash", status="ok")


def contents(store: Path) -> dict[str, list[object]]:
    with closing(sqlite3.connect(store)) as connection:
        # not SQLite's own, nor the dates of migrations
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name GLOB '[a-z]*'"
        )
        return {
            name: connection.execute(f"SELECT * FROM {name}").fetchall()
            for (name,) in tables.fetchall()
        }


def traces(folder: Path) -> list[Path]:
    return sorted(folder / trace.path for trace in read_run(folder).traces)


def test_traces_parsed_ahead_are_stored_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(RUN, folder)
    (plain,) = ingest_path(tmp_path / "plain.db", folder)
    monkeypatch.setattr(background_ingest, "ENOUGH_CPUS", 1)
    steps = [Step(1, 1, CELL, "begin")]
    steps += [
        Step(1, 1, Cell("c", CELL.config, "flash", samples={COLD: [1]}), "ok", traces=(path,))
        for path in traces(folder)
    ]
    received: list[Step] = []
    with open_background_ingest(tmp_path / "ahead.db") as beside:
        forward = beside.wrap_progress(received.append)
        for step in steps:
            forward(step)
    assert received == steps
    opened: list[Path] = []
    parse = ingest.open_trace
    monkeypatch.setattr(ingest, "open_trace", lambda path: opened.append(path) or parse(path))
    (result,) = ingest_path(tmp_path / "ahead.db", folder, cache=beside.parsed)
    assert opened == []
    assert result == plain
    assert contents(tmp_path / "ahead.db") == contents(tmp_path / "plain.db")


def test_cells_timed_by_cpu_clock_are_not_parsed_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_ingest, "ENOUGH_CPUS", 1)
    path = traces(RUN)[0]
    with open_background_ingest(tmp_path / "s.db") as beside:
        timed = Cell("c", CELL.config, "flash", samples={WALL: [1]})
        beside.wrap_progress(None)(Step(1, 1, timed, "ok", traces=(path,)))
    assert beside.parsed.take(path, sources.hash_file(path)) is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_groups_are_parsed_with_lowest_priority_on_free_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_ingest, "ENOUGH_CPUS", 1)
    here = sorted(os.sched_getaffinity(0))
    parsed: dict[Path, tuple[int, set[int]]] = {}

    def add(_: ParsedTraceCache, path: Path) -> None:
        thread = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        parsed[path] = thread, os.sched_getaffinity(0)

    monkeypatch.setattr(ParsedTraceCache, "add", add)
    run = read_run(RUN)
    for name, samples in (("gpu", {COLD: [1]}), ("cpu", {WALL: [1]})):
        (tmp_path / name).mkdir()
        cells = tuple(replace(cell, samples=samples) for cell in run.cells)
        wrapped = TraceFile("nsys", "all.nsys-rep", (cells[0].cell,))
        write_run(tmp_path / name, replace(run, cells=cells, traces=(*run.traces, wrapped)))
    (tmp_path / "foreign").mkdir()
    with open_background_ingest(tmp_path / "s.db") as beside:
        beside.lanes([{"cpus": here[1:]}, {"cpus": []}, {}])
        for name in ("foreign", "cpu", "gpu"):
            beside.group(tmp_path / name)
        until(lambda: len(parsed) == len(run.traces))  # what is left then has no such priority
    assert list(parsed) == [tmp_path / "gpu" / trace.path for trace in run.traces]
    assert set(map(str, parsed.values())) == {str((19, {here[0]}))}
    assert sorted(os.sched_getaffinity(0)) == here
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19


def test_changed_or_unreadable_file_is_not_cached(tmp_path: Path) -> None:
    good, bad = tmp_path / "c1.torch.json.gz", tmp_path / "c2.torch.json"
    shutil.copy(next(path for path in traces(RUN) if path.suffix == ".gz"), good)
    bad.write_text('{"traceEvents": [')
    parsed = ParsedTraceCache()
    for path in (good, good, bad, tmp_path / "none.json"):
        parsed.add(path)
    assert parsed.take(good, "another") is None
    parsed.add(good)
    content = sources.hash_file(good)
    assert parsed.take(good, content) is not None
    assert parsed.take(good, content) is None
    assert parsed.take(bad, content) is None


def test_unreadable_file_uses_no_cache_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = tmp_path / "c1.torch.json.gz", tmp_path / "c2.torch.json"
    shutil.copy(next(path for path in traces(RUN) if path.suffix == ".gz"), good)
    bad.write_text('{"traceEvents": [' + " " * good.stat().st_size)
    monkeypatch.setattr(sources, "MOST_BYTES", bad.stat().st_size)
    parsed = ParsedTraceCache()
    for path in (bad, good):
        parsed.add(path)
    assert parsed.take(good, sources.hash_file(good)) is not None
