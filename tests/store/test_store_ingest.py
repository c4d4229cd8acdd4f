"""Ingest is atomic and idempotent, and agrees with the parsed trace."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sqlite3
import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nsys_make import unpacked

from profharness.commands.report import report_document
from profharness.errors import StoreError, TraceFormatError
from profharness.recording.profilers.ncu import check_file
from profharness.rows import Refusal
from profharness.run import BenchPlan, Cell, Problem, TraceFile, read_run, write_run
from profharness.store import ingest_path, open_store
from profharness.store.ingest import _set_span
from profharness.store.insert import insert_trace
from profharness.store.schema import connect, transaction
from profharness.store.sources import find_sources
from profharness.traces import open_trace

Folder = Callable[..., Path]
KINETO = Path(__file__).parents[1] / "data" / "kineto_h200.json.gz"
SAMPLE = Path(__file__).parents[2] / "traces" / "h200-torch-nsys-ncu"


def dump(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return all rows of all tables."""
    with closing(sqlite3.connect(path)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for (name,) in names}


def check_integrity(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def change_record(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    run = json.loads((folder / "run.json").read_text())
    change(run)
    (folder / "run.json").write_text(json.dumps(run))


def stored_problems(store: Path) -> list[dict[str, str]]:
    """Return the problems of the only run."""
    with closing(sqlite3.connect(store)) as connection:
        ((problems,),) = connection.execute("SELECT problems FROM runs").fetchall()
    found: list[dict[str, str]] = json.loads(problems)
    return found


def test_foreign_trace_equals_parsed_trace(tmp_path: Path, kineto: Path) -> None:
    store = tmp_path / "p.db"
    seen: list[tuple[str, int, int]] = []
    (result,) = ingest_path(store, kineto, progress=lambda *told: seen.append(told))
    assert (result.status, result.launches, result.cells) == ("new", 384, 0)
    assert result.run.startswith("trace-") and len(result.run) == 16
    assert seen[-1] == (kineto.name, 384, 384)
    trace = open_trace(kineto)
    expected: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for batch in trace.batches():
        for i in range(len(batch.kernel)):
            config = trace.launch_configs[batch.launch_config[i]]
            inner = batch.range[i]
            name = trace.ranges[inner].name if inner >= 0 else None
            key = (name, trace.kernels[batch.kernel[i]], config.grid, config.block)
            resources = (config.registers_per_thread, config.shared_bytes)
            expected[key + resources].append(int(batch.duration_ns[i]))
    trace.close()
    with open_store(store) as opened:
        rows = opened.kernels()
        found = {
            (r.range, r.kernel, r.grid, r.block, r.registers_per_thread, r.shared_bytes): r
            for r in rows
        }
        assert len(found) == len(rows)
        assert found.keys() == expected.keys()
        for key, durations in expected.items():
            row = found[key]
            assert (row.launches, row.total_ns) == (len(durations), sum(durations))
            assert row.duration_ns == int(statistics.median(durations))
            assert (row.min_ns, row.max_ns) == (min(durations), max(durations))
            assert (row.config, row.backend, row.cell, row.status) == (None,) * 4
        launches = list(opened.launches())
        assert len(launches) == 384
        assert sum(launch.duration_ns for launch in launches) == sum(r.total_ns for r in rows)
        assert [device.name for device in opened.devices()] == ["NVIDIA H200"]
    check_integrity(store)


def test_ingesting_again_changes_nothing(tmp_path: Path, kineto: Path, run_folder: Folder) -> None:
    store = tmp_path / "p.db"
    folder = run_folder()
    ingest_path(store, kineto)
    ingest_path(store, folder)
    before = dump(store)
    copy = tmp_path / "copy.json.gz"
    shutil.copy(kineto, copy)
    results = [*ingest_path(store, copy), *ingest_path(store, folder)]
    assert [result.status for result in results] == ["unchanged", "unchanged"]
    assert results[0].launches == 384
    assert dump(store) == before


def test_compressed_copy_of_trace_is_same_run(tmp_path: Path) -> None:
    for name in ("torch.json.gz", "nsys.sqlite.gz", "ncu.csv.gz"):
        packed = tmp_path / name
        if name.startswith("torch"):
            shutil.copy(KINETO, packed)
        else:
            source = SAMPLE / ("nsys-1.sqlite" if name.startswith("nsys") else "ncu-1.csv")
            packed.write_bytes(gzip.compress(source.read_bytes()))
        plain = tmp_path / name.removesuffix(".gz")
        plain.write_bytes(gzip.decompress(packed.read_bytes()))
        results = [ingest_path(tmp_path / "p.db", path)[0] for path in (packed, plain, packed)]
        assert [result.status for result in results] == ["new", "unchanged", "unchanged"]
        assert len({result.run for result in results}) == 1


def test_ncu_report_has_its_recorded_date(tmp_path: Path) -> None:
    """The modification time of the file is that of the last copy."""
    file = tmp_path / "copy.ncu-rep"
    file.write_bytes(gzip.decompress((KINETO.parent / "ncu_h200.ncu-rep.gz").read_bytes()))
    assert check_file(file).created_s == 1795259696
    trace = tmp_path / "copy.csv"
    shutil.copy(SAMPLE / "ncu-1.csv", trace)
    ingest_path(tmp_path / "p.db", trace)
    pytest.importorskip("ncu_report", reason="NVIDIA's reader is not installed")
    ingest_path(tmp_path / "p.db", file)
    with open_store(tmp_path / "p.db") as store:
        assert [row.created for row in store.runs()][1] == "2026-11-21T11:14:56+00:00"


def test_run_folder_attributes_launches_to_cells(tmp_path: Path, run_folder: Folder) -> None:
    store = tmp_path / "p.db"
    (result,) = ingest_path(store, run_folder())
    assert (result.run, result.status, result.cells) == ("20261121-aaaa", "new", 3)
    with open_store(store) as opened:
        rows = opened.kernels()
        flash, efficient, refused = opened.cells()
        dropped = opened.connection.execute("SELECT dropped FROM traces").fetchone()[0]
        sources = {row.run: row.source for row in opened.runs()}
    assert [(row.backend, row.family, row.launches) for row in rows] == [
        ("flash", "flash_splitkv", 3),
        ("flash", "flash_combine", 3),
        ("efficient", "efficient", 3),
    ]
    assert {row.config for row in rows} == {"b2-h8-s512-d64-fp16"}
    assert all(row.launches_per_call == 3 and row.status == "ok" for row in rows)
    assert sum(row.share or 0 for row in rows if row.cell == "c0") == pytest.approx(1)
    assert rows[0].first_ns < rows[1].first_ns
    assert rows[0].occupancy and rows[0].occupancy_limiter
    assert flash.sdpa_op == "aten::_scaled_dot_product_flash_attention"
    assert efficient.sdpa_op == "aten::_scaled_dot_product_efficient_attention"
    assert flash.samples == {"event": (5, 1, 3, 9)} and flash.clocks == {"sm_mhz": 1980}
    assert refused.status == "refused" and refused.sdpa_op is None and refused.warnings == ()
    assert refused.refusals == (
        Refusal("head_dim", "too large", "live"),
        Refusal("dtype", "no", "rule"),
    )
    assert (result.launches, dropped) == (9, 375)
    assert sources == {"20261121-aaaa": "capture"}
    check_integrity(store)


def test_calls_with_different_kernel_counts_give_warning(
    tmp_path: Path, run_folder: Folder
) -> None:
    cells = {"c0": ["auto", "flash", "efficient"], "c1": []}
    (result,) = ingest_path(tmp_path / "p.db", run_folder(cells=cells))
    with open_store(tmp_path / "p.db") as opened:
        differing, silent, _ = opened.cells()
        iterations = {launch.iteration for launch in opened.launches(cell="c0")}
        calls = {row.launches / (row.launches_per_call or 1) for row in opened.kernels()}
    assert differing.warnings == ("kernel count differs between calls: 6,6,3",)
    assert silent.warnings == ("the torch trace contains no launch of this cell",)
    assert iterations == {0, 1, 2} and calls == {3}
    assert f"c0: {differing.warnings[0]}" in result.warnings


def test_run_with_new_cells_is_replaced(tmp_path: Path, run_folder: Folder) -> None:
    store = tmp_path / "p.db"
    ingest_path(store, run_folder(samples=[7], cells={"c0": ["flash"]}))
    ingest_path(store, run_folder(run="20261121-bbbb"))
    folder = run_folder(samples=[7, 8])
    (result,) = ingest_path(store, folder)
    assert (result.status, result.launches) == ("replaced", 9)
    with open_store(store) as opened:
        assert opened.cells("20261121-aaaa")[0].samples == {"event": (7, 8)}
        assert len(opened.cells("20261121-bbbb")) == 3
        assert len(opened.runs()) == 2
        assert len(list(opened.launches("20261121-bbbb"))) == 9
    check_integrity(store)
    fresh = tmp_path / "fresh.db"
    ingest_path(fresh, run_folder(run="20261121-bbbb"))
    ingest_path(fresh, folder)
    found, expected = (
        {name: len(rows) for name, rows in dump(path).items() if name != "range_names"}
        for path in (store, fresh)  # range names are kept after their last range is deleted
    )
    assert found == expected


def add_damaged(folder: Path, damage: str) -> None:
    """Add a damaged second trace with its own cell."""
    path = folder / "more.json.gz"
    if damage == "truncated":
        path.write_bytes((folder / "torch.json.gz").read_bytes()[:20])
    elif damage == "garbage":
        path.write_bytes(gzip.compress(b'{"traceEvents": 5}'))
    elif damage == "another profiler's":
        path.write_bytes((folder / "torch.json.gz").read_bytes())
    elif damage == "outside":
        (folder.parent / "more.json.gz").write_bytes((folder / "torch.json.gz").read_bytes())
    run = read_run(folder)
    name = "../more.json.gz" if damage == "outside" else "more.json.gz"
    profiler = "nsys" if damage == "another profiler's" else "torch"
    write_run(folder, replace(run, traces=(*run.traces, TraceFile(profiler, name, ("c1",)))))


@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing", "another profiler's"])
def test_run_is_stored_without_damaged_trace(
    tmp_path: Path, run_folder: Folder, damage: str
) -> None:
    store, folder = tmp_path / "p.db", run_folder()
    add_damaged(folder, damage)
    (result,) = ingest_path(store, folder)
    assert (result.status, result.launches, result.cells) == ("new", 9, 3)
    assert [text for text in result.warnings if "not ingested" in text and "more.json.gz" in text]
    (problem,) = stored_problems(store)
    assert (problem["code"], problem["cells"]) == ("trace_unreadable", ["c1"])
    assert "more.json.gz" in problem["message"] and problem["remedy"]
    again = ingest_path(store, folder)[0]
    assert (again.status, again.warnings) == ("unchanged", result.warnings)
    with open_store(store) as opened:
        assert opened.runs()[0].warnings == result.warnings
        assert opened.warnings([result.run, "another"]) == {result.run: result.warnings}
    (folder / "more.json.gz").write_bytes((folder / "torch.json.gz").read_bytes())
    if damage != "another profiler's":
        assert ingest_path(store, folder)[0].status == "replaced"
        assert stored_problems(store) == []
        with open_store(store) as opened:
            assert not [text for text in opened.runs()[0].warnings if "not ingested" in text]
    check_integrity(store)


def test_run_is_stored_without_truncated_nsys_export(tmp_path: Path, run_folder: Folder) -> None:
    """The header is intact, so reading rows fails, for some of them after the store is locked."""
    folder = run_folder()
    whole = unpacked("nsys_h200.sqlite.gz", tmp_path).read_bytes()
    run = read_run(folder)
    write_run(folder, replace(run, traces=(*run.traces, TraceFile("nsys", "n.sqlite", ("c1",)))))
    for part in (0.1, 0.5, 0.9):
        (folder / "n.sqlite").write_bytes(whole[: int(len(whole) * part)])
        store = tmp_path / f"{part}.db"
        (result,) = ingest_path(store, folder)
        assert result.launches == 9
        with open_store(store) as opened:
            assert {row.profiler for row in opened.kernels()} == {"torch"}
        check_integrity(store)


def test_trace_outside_of_its_folder_leaves_store_unchanged(
    tmp_path: Path, run_folder: Folder
) -> None:
    store = tmp_path / "p.db"
    ingest_path(store, run_folder())
    before = dump(store)
    folder = run_folder(samples=[7])
    add_damaged(folder, "outside")
    with pytest.raises(TraceFormatError) as caught:
        ingest_path(store, folder)
    assert str(folder) in str(caught.value)
    assert dump(store) == before


@pytest.mark.parametrize("content", [b"{", b'{"traceEvents": 5}', b"", None])
def test_unreadable_file_is_an_error_and_creates_no_store(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "bad.json"
    if content is None:
        file.symlink_to("/proc/self/mem")  # opens, and then cannot be read
    else:
        file.write_bytes(content)
    with pytest.raises(TraceFormatError, match=r"bad\.json"):
        ingest_path(tmp_path / "p.db", file)
    assert not (tmp_path / "p.db").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"cell": "c0002"}, "2 cells have the name 'c0002'"),
        (
            {"samples": {"event": [1, -(1 << 63)]}},
            "cell 'c0001' contains a number that is too large",
        ),
        ({"peak_memory_bytes": 1 << 63}, "cell 'c0001' contains a number that is too large"),
        ({"duration_ns": 1 << 200}, "cell 'c0001' contains a number that is too large"),
    ],
)
def test_unstorable_record_is_an_error_and_creates_no_store(
    tmp_path: Path, run_folder: Folder, change: dict[str, object], told: str
) -> None:
    folder = run_folder(cells={"c0001": ["flash"], "c0002": ["math"]})
    change_record(folder, lambda run: run["cells"][0].update(change))
    with pytest.raises(TraceFormatError, match=rf"run\.json: .*{told}"):
        ingest_path(tmp_path / "p.db", folder)
    assert list(tmp_path.glob("p.db*")) == []


def test_unstorable_config_costs_only_its_own_run(tmp_path: Path, run_folder: Folder) -> None:
    folder = run_folder(cells={"c0001": ["flash"]})
    change_record(folder, lambda run: run["cells"][0]["config"].update(batch=1 << 63))
    with pytest.raises(TraceFormatError, match="cell 'c0001' contains a number that is too large"):
        ingest_path(tmp_path / "p.db", folder)


def test_largest_numbers_are_stored(tmp_path: Path, run_folder: Folder) -> None:
    """The tuning of a cell is stored as text."""
    largest = (1 << 63) - 1
    folder = run_folder(cells={"c0001": ["flash"]}, samples=[largest])
    change_record(folder, lambda run: run["cells"][0].update(tuning={"hash": 1 << 70}))
    ingest_path(tmp_path / "p.db", folder)
    with open_store(tmp_path / "p.db") as store:
        assert store.cells()[0].tuning == {"hash": 1 << 70}
        assert store.cells()[0].samples["event"] == (largest,)


def test_unusable_store_error_names_run_and_remedy(tmp_path: Path, run_folder: Folder) -> None:
    folder = run_folder()
    with pytest.raises(StoreError) as caught:
        ingest_path(tmp_path / "absent" / "p.db", folder)
    assert f"profharness ingest {folder} --store OTHER" in str(caught.value)
    store = tmp_path / "p.db"
    ingest_path(store, run_folder(run="20261121-bbbb"))
    connection = sqlite3.connect(store)
    connection.execute("CREATE UNIQUE INDEX one_only ON runs(source)")
    connection.close()
    with pytest.raises(StoreError, match=r"cannot write to the store.*UNIQUE(?s:.*)--store OTHER"):
        ingest_path(store, folder)


def test_failure_in_the_middle_of_the_transaction_rolls_back(
    tmp_path: Path, run_folder: Folder
) -> None:
    store = tmp_path / "p.db"
    ingest_path(store, run_folder())
    before = dump(store)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest_path(store, run_folder(samples=[4] * 5), progress=interrupt)
    assert dump(store) == before
    assert ingest_path(store, run_folder(samples=[4] * 5))[0].status == "replaced"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("missing", r"9 launches of torch\.json\.gz \(.*listed in run.json but is missing"),
        ("damaged", r"9 launches of torch\.json\.gz \(.*torch\.json\.gz"),
        ("emptied", r"9 launches of torch\.json\.gz"),
        ("pending", "4 measurements of cell c0"),
        ("samples", "4 measurements of cell c0"),
        ("cells", "4 measurements of cell c1, the result of cell c9"),
    ],
)
def test_smaller_folder_never_replaces_stored_run(
    tmp_path: Path, run_folder: Folder, damage: str, told: str
) -> None:
    store, folder = tmp_path / "p.db", run_folder()
    ingest_path(store, folder)
    before = dump(store)
    run = read_run(folder)
    first, *others = run.cells
    trace = folder / "torch.json.gz"
    if damage == "missing":
        trace.unlink()
    elif damage == "damaged":
        trace.write_bytes(trace.read_bytes()[:99])
    else:
        changes: dict[str, Any] = {
            "emptied": {"traces": ()},
            "pending": {"cells": (replace(first, status="pending"), *others)},
            "samples": {"cells": (replace(first, samples={}), *others)},
            "cells": {"cells": (first,)},
        }
        write_run(folder, replace(run, **changes[damage]))
    for _ in range(2):
        with pytest.raises(
            TraceFormatError, match=f"the store, so the store was not changed.*{told}"
        ):
            ingest_path(store, folder)
        assert dump(store) == before
    with open_store(store, write=True) as opened:
        opened.delete_run(run.run)
    assert ingest_path(store, folder)[0].status == "new"


def test_copy_beside_its_source_changes_nothing(tmp_path: Path, run_folder: Folder) -> None:
    """Its record differs, like that of a scrubbed copy. It replaces a deleted source."""
    store, folder = tmp_path / "p.db", run_folder()
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    write_run(copy, replace(read_run(folder), note="scrubbed"))
    ingest_path(store, folder)
    before = dump(store)
    for _ in range(2):
        results = [*ingest_path(store, folder), *ingest_path(store, copy)]
        assert [(result.status, result.kept) for result in results] == [
            ("unchanged", None),
            ("unchanged", folder),
        ]
        assert dump(store) == before
    write_run(copy, replace(read_run(copy), cells=(*read_run(copy).cells, more_cell(folder))))
    assert ingest_path(store, copy)[0].status == "replaced"
    with pytest.raises(TraceFormatError, match="the result of cell c10"):
        ingest_path(store, folder)
    shutil.rmtree(copy)
    write_run(folder, replace(read_run(folder), cells=(*read_run(folder).cells, more_cell(folder))))
    assert ingest_path(store, folder)[0].status == "replaced"


def more_cell(folder: Path) -> Cell:
    return replace(read_run(folder).cells[-1], cell="c10")


def test_folder_of_runs_and_traces_is_walked_in_order(
    tmp_path: Path, kineto: Path, run_folder: Folder
) -> None:
    run_folder(run="r2")
    run_folder(run="r1", cells={"c0": ["flash"]})
    (tmp_path / "deep").mkdir()
    shutil.copy(kineto, tmp_path / "deep" / "foreign.json.gz")
    (tmp_path / "README.md").write_text("no trace")
    results = ingest_path(tmp_path / "p.db", tmp_path)
    assert [result.source.name for result in results] == ["foreign.json.gz", "r1", "r2"]
    assert {result.status for result in results} == {"new"}


def test_nothing_to_ingest_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in ("empty", "absent"):
        with pytest.raises(TraceFormatError, match=source):
            ingest_path(tmp_path / "p.db", tmp_path / source)


def test_rebuilt_store_equals_deleted_one(tmp_path: Path, kineto: Path, run_folder: Folder) -> None:
    folder = run_folder()
    dumps = []
    for name in ("one.db", "two.db"):
        for source in (folder, kineto):
            ingest_path(tmp_path / name, source)
        dumps.append(dump(tmp_path / name))
        dumps[-1].pop("_sqlite_migrations")
    assert dumps[0] == dumps[1]


def test_journal_result_changes_the_content(tmp_path: Path, run_folder: Folder) -> None:
    """The pending cell of a killed run is filled from the journal, which changes the content."""
    folder = run_folder()
    run = read_run(folder)
    done = msgspec.to_builtins(run.cells[0])
    pending = Cell("c0", run.cells[0].config, "flash")
    write_run(folder, replace(run, cells=(pending, *run.cells[1:])))
    ingest_path(tmp_path / "p.db", folder)
    with open_store(tmp_path / "p.db") as opened:
        assert opened.cells()[0].status == "pending"
    line = json.dumps({"event": "end", "cell": "c0", "result": done})
    (folder / "journal.jsonl").write_text(line + "\n")
    assert ingest_path(tmp_path / "p.db", folder)[0].status == "replaced"
    with open_store(tmp_path / "p.db") as opened:
        assert opened.cells()[0].status == "ok"
    (folder / "journal.jsonl").unlink()
    write_run(folder, run)
    assert ingest_path(tmp_path / "p.db", folder)[0].status == "unchanged"


def test_folder_yields_nsys_report_once_and_no_foreign_table(tmp_path: Path) -> None:
    for name in ("a.nsys-rep", "a.sqlite", "b.nsys-rep", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "table.csv").write_text("config,time\n1,2\n")
    (tmp_path / "ncu.csv").write_text('"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n')
    found = [path.name for path in find_sources(tmp_path)]
    assert found == ["a.sqlite", "b.nsys-rep", "ncu.csv"]


def test_run_kind_is_the_command_that_made_it(
    tmp_path: Path, kineto: Path, run_folder: Folder
) -> None:
    """The command comes from the record, or else from the contents of the folder."""
    store = tmp_path / "p.db"
    ingest_path(store, kineto)
    for number, kind in enumerate(("capture", "bench", "verify", "explain", None, "?"), start=1):
        folder = run_folder(run=f"r{number}")
        write_run(folder, replace(read_run(folder), kind=kind))
        ingest_path(store, folder)
    folder = run_folder(run="r7")
    write_run(folder, replace(read_run(folder), bench=BenchPlan()))
    ingest_path(store, folder)
    folder = run_folder(run="r8")
    run = read_run(folder)
    write_run(folder, replace(run, cells=(replace(run.cells[0], case="plain"),)))
    ingest_path(store, folder)
    with open_store(store) as opened:
        kinds = {row.run: row.kind for row in opened.runs() if row.source == "capture"}
        (foreign,) = [row.kind for row in opened.runs() if row.source == "trace"]
    told = ("capture", "bench", "verify", "explain", "capture", "capture", "bench", "verify")
    assert kinds == {f"r{number}": kind for number, kind in enumerate(told, start=1)}
    assert foreign == "trace"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a\0b.json", "an invalid name"),
        ("x" * 5000, "an invalid name"),
        ("y/" * 2000, "an invalid name"),
        ("x" * 300, "cannot be read: File name too long"),
    ],
)
def test_impossible_trace_path_is_refused(
    tmp_path: Path, run_folder: Folder, name: str, told: str
) -> None:
    folder = run_folder()
    run = read_run(folder)
    write_run(folder, replace(run, traces=(*run.traces, TraceFile("torch", name))))
    if "too long" in told:  # the run is stored without that trace
        (result,) = ingest_path(tmp_path / "p.db", folder)
        assert result.launches == 9 and told in result.warnings[0]
        return
    with pytest.raises(TraceFormatError, match=told) as caught:
        ingest_path(tmp_path / "p.db", folder)
    assert len(str(caught.value)) < 400 and "\0" not in str(caught.value)
    assert list(tmp_path.glob("p.db*")) == []


def test_record_that_is_not_utf8_is_refused(tmp_path: Path, run_folder: Folder) -> None:
    folder = run_folder()
    record = folder / "run.json"
    record.write_bytes(record.read_bytes().replace(b"flash", b"fl\xffsh", 1))
    with pytest.raises(TraceFormatError, match=r"run\.json: not a run record"):
        ingest_path(tmp_path / "p.db", folder)
    assert list(tmp_path.glob("p.db*")) == []


def test_journal_line_that_is_not_utf8_is_skipped(run_folder: Folder) -> None:
    folder = run_folder()
    run = read_run(folder)
    done = msgspec.to_builtins(run.cells[0])
    write_run(folder, replace(run, cells=(replace(run.cells[0], status="pending"),)))
    line = json.dumps({"event": "end", "cell": "c0", "result": done}).encode()
    bad = line.replace(b"flash", b"fl\xffsh", 1)
    deep = b'{"event": "end", "environment": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001
    (folder / "journal.jsonl").write_bytes(b"\n".join((bad, deep, b"\xff\xfe", line, b"")))
    assert read_run(folder).cells[0].status == "ok"


def test_problem_with_few_keys_is_stored_complete(tmp_path: Path, run_folder: Folder) -> None:
    folder = run_folder()
    problem = {"profiler": "ncu", "code": "no_permission", "message": "m", "remedy": "r"}
    change_record(folder, lambda run: run.update(problems=[problem]))
    ingest_path(tmp_path / "p.db", folder)
    with open_store(tmp_path / "p.db") as store:
        assert store.problems() == (Problem(**problem),)
        assert report_document(store, ["latest"]).records


def test_file_with_far_future_date_is_ingested(tmp_path: Path) -> None:
    table = tmp_path / "ncu.csv"
    shutil.copy(SAMPLE / "ncu-1.csv", table)
    os.utime(table, (1 << 40, 1 << 40))  # the year 36812
    if table.stat().st_mtime < 1 << 39:
        pytest.skip("this file system keeps no such time")
    ingest_path(tmp_path / "p.db", table)
    with open_store(tmp_path / "p.db") as store:
        assert store.runs()[0].created == "9999-12-31T23:59:59+00:00"


def test_a_file_without_a_date_was_created_when_it_is_stored(tmp_path: Path) -> None:
    trace = tmp_path / "ncu.csv"
    shutil.copy(SAMPLE / "ncu-1.csv", trace)
    os.utime(trace, (0, 0))  # as in an archive without dates
    ingest_path(tmp_path / "s.db", trace)
    with open_store(tmp_path / "s.db") as store:
        (run,) = store.runs()
    assert run.created[:4] >= "2026"


def test_unreadable_source_does_not_affect_others(tmp_path: Path, kineto: Path) -> None:
    (tmp_path / "in").mkdir()
    shutil.copy(kineto, tmp_path / "in" / "good.json.gz")
    (tmp_path / "in" / "a.json").symlink_to("/proc/self/mem")  # opens, and then cannot be read
    (tmp_path / "in" / "b").mkdir()
    found = [path.name for path in find_sources(tmp_path / "in")]
    assert found == ["a.json", "good.json.gz"]
    with pytest.raises(TraceFormatError, match=r"a\.json"):
        ingest_path(tmp_path / "p.db", tmp_path / "in")
    with open_store(tmp_path / "p.db") as store:
        assert [row.launches for row in store.runs()] == [384]


def kineto_with(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return the real trace with its first device or event changed."""
    trace = json.loads(gzip.decompress(KINETO.read_bytes()))
    change(trace)
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(trace))
    return file


@pytest.mark.parametrize("value", [1 << 63, 10**400, "\ud800"])
def test_unstorable_value_is_refused_and_creates_no_store(tmp_path: Path, value: object) -> None:
    key = "name" if isinstance(value, str) else "totalGlobalMem"

    def change(trace: dict[str, Any]) -> None:
        trace["deviceProperties"][0][key] = value

    file = kineto_with(tmp_path, change)
    try:
        (result,) = ingest_path(tmp_path / "p.db", file)
    except TraceFormatError as error:
        assert str(file) in str(error)
        assert list(tmp_path.glob("p.db*")) == []
    else:  # the parser may omit such a value with a warning
        assert result.launches == 384


def test_impossible_times_are_refused(tmp_path: Path, run_folder: Folder) -> None:
    """A parser's mistake must not make the groups of other launches wrong."""
    ingest_path(tmp_path / "p.db", run_folder())
    trace = open_trace(KINETO)
    whole = list(trace.batches())
    trace.close()
    for name in ("duration_ns", "device"):
        batches = [replace(batch, **{name: getattr(batch, name) - 10**12}) for batch in whole]
        with (
            closing(connect(tmp_path / "p.db", write=True)) as connection,
            pytest.raises(ValueError, match=f"a launch with {name} -"),
            transaction(connection),
        ):
            insert_trace(connection, 1, trace, batches, None)


def test_the_span_of_a_trace_is_found_without_the_ranges_of_other_traces(tmp_path: Path) -> None:
    """SQLite must search the ranges by the trace, because a store may have many traces."""
    ingest_path(
        tmp_path / "store.db",
        Path(__file__).resolve().parents[2] / "traces" / "models" / "vit.json.gz",
    )
    with closing(connect(tmp_path / "store.db", write=True)) as connection:
        (run,) = connection.execute("SELECT id FROM runs").fetchone()
        statements: list[str] = []
        connection.set_trace_callback(statements.append)
        _set_span(connection, run)
        connection.set_trace_callback(None)
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statements[0]}")]
    assert any(step.startswith("SEARCH ranges USING INDEX ranges_trace") for step in plan)
    assert not any(step in ("SCAN ranges", "SCAN steps", "SCAN device_times") for step in plan)
