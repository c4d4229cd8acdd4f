"""Copies of real runs contain nothing private, and are otherwise unchanged."""

from __future__ import annotations

import dataclasses
import decimal
import gzip
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import profharness
from profharness.cli import find_command
from profharness.errors import GateError, NotFoundError, TraceFormatError, UsageError
from profharness.run import Problem, TraceFile, read_run, write_run
from profharness.scrub import PrivateDataError, audit, scrub
from profharness.scrub.copies import default_output
from profharness.store import ingest_path, open_store
from profharness.traces import open_trace
from profharness.traces.ncu_readers import has_package

command = find_command("scrub")

ROOT = Path(__file__).parents[2]
H200 = ROOT / "traces" / "h200-torch2.11"
DATA = ROOT / "tests" / "data"
SECRET = "/home/user7/attention/run.py"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the H200 run with three cells and private texts, as an ordinary capture leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    record = read_run(H200)
    traces = record.traces[:3]
    for trace in traces:
        plain = json.loads(gzip.decompress((H200 / trace.path).read_bytes()))
        (folder / trace.path).write_bytes(gzip.compress(json.dumps(careless(plain)).encode()))
    cells = list(record.cells[:3])
    cells[0] = replace(cells[0], warnings=(f"{SECRET}:3: UserWarning",), message="on blade17")
    problem = Problem("nsys", "no_tool", "no nsys", "install it", f"PATH=/usr/bin at {SECRET}")
    environment = {**record.environment, "env": {"CUDA_VISIBLE_DEVICES": "3"}, "cwd": SECRET}
    write_run(
        folder,
        replace(
            record,
            cells=tuple(cells),
            traces=traces,
            environment=environment,
            note="for 10.1.2.3",
            problems=(problem,),
        ),
    )
    (folder / "worker.log").write_text(SECRET)
    return folder


def replace(thing: Any, **changes: Any) -> Any:
    return dataclasses.replace(thing, **changes)


def careless(trace: dict[str, Any]) -> dict[str, Any]:
    events = trace["traceEvents"]
    first = next(event for event in events if event.get("cat") == "cpu_op")
    first["args"]["Call stack"] = (
        f"{SECRET}(7): main;/usr/lib/python3.12/site-packages/torch/a.py(1)"
    )
    where = {"ph": "X", "pid": first["pid"], "tid": first["tid"], "ts": first["ts"], "dur": 1.125}
    events.append({**where, "cat": "python_function", "name": f"{SECRET}(7): main"})
    for name, args in (
        ("process_name", {"name": f"python {SECRET}"}),
        ("process_labels", {"labels": "blade17"}),
        ("thread_name", {"name": "user7"}),
    ):
        events.append({"ph": "M", "name": name, "pid": 1, "tid": 1, "ts": 1.0, "args": args})
    private = {"host_name": "blade17", "trace_id": "AB", "distributedInfo": {"rank": 0}}
    return {**private, **trace, "traceName": SECRET}


def ingested(folder: Path, store: Path) -> dict[str, Any]:
    """Return everything that the store has of a run, without times of day and file names."""
    ingest_path(store, folder)
    with open_store(store) as opened:
        cells = [replace(cell, warnings=(), message=None) for cell in opened.cells("latest")]
        return {
            "kernels": opened.kernels("latest", by_op=True),
            "launches": list(opened.launches("latest")),
            "ranges": opened.ranges("latest"),
            "cells": cells,
            "devices": opened.devices("latest"),
        }


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_traces_stay_in_the_folders_of_their_groups(run: Path, tmp_path: Path) -> None:
    record = read_run(run)
    (run / "groups" / "g").mkdir(parents=True)
    moved = tuple(replace(trace, path=f"groups/g/{trace.path}") for trace in record.traces)
    for before, after in zip(record.traces, moved, strict=True):
        (run / before.path).rename(run / after.path)
    write_run(run, replace(record, traces=moved))
    scrub(run, tmp_path / "copy")
    assert {trace.path for trace in moved} <= content(tmp_path / "copy").keys()
    assert read_run(tmp_path / "copy").traces == moved


def test_copy_of_a_run_has_the_same_content_and_nothing_private(run: Path, tmp_path: Path) -> None:
    before = content(run)
    assert audit(run)
    done = scrub(run)
    assert done.output == tmp_path / "run-scrubbed"
    assert done.left_out == ("worker.log",)
    assert content(run) == before
    assert audit(done.output) == []
    text = b"".join(
        gzip.decompress(data) if name.endswith(".gz") else data
        for name, data in content(done.output).items()
    )
    for word in (b"blade17", b"user7", b"distributedInfo", b"trace_id", b"10.1.2.3", b"PATH"):
        assert word not in text, word
    assert b"torch/a.py(1)" in text
    mine = ingested(run, tmp_path / "a.db")
    assert len(mine["launches"]) > 20
    assert ingested(done.output, tmp_path / "b.db") == mine


def test_the_record_keeps_what_profharness_needs(run: Path) -> None:
    copy = read_run(scrub(run).output)
    record = read_run(run)
    assert (copy.run, copy.created, copy.protocol) == (record.run, record.created, record.protocol)
    assert [replace(cell, message=None, warnings=()) for cell in copy.cells] == [
        replace(cell, message=None, warnings=()) for cell in record.cells
    ]
    assert copy.cells[0].warnings == ("removed_2",)
    plain = {key: value for key, value in record.environment.items() if key != "cwd"}
    assert copy.environment == {**plain, "env": {}}
    assert copy.problems[0].raw.startswith("removed_")
    assert copy.traces == record.traces


def test_scrubbing_the_published_run_changes_nothing(tmp_path: Path) -> None:
    """A file without private texts keeps all events and digits."""
    trace = H200 / "c0005.torch.json.gz"
    copy = scrub(trace, tmp_path / "c.json.gz").output
    was, now = (gzip.decompress(path.read_bytes()) for path in (trace, copy))
    was_read, now_read = (json.loads(data, parse_float=decimal.Decimal) for data in (was, now))
    assert now_read == was_read


def test_a_run_folder_is_copied_atomically(run: Path, tmp_path: Path) -> None:
    broken = run / read_run(run).traces[-1].path
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(TraceFormatError):
        scrub(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_an_earlier_copy_is_replaced_only_by_force(run: Path, tmp_path: Path) -> None:
    scrub(run)
    with pytest.raises(UsageError, match="--force"):
        scrub(run)
    (tmp_path / "run-scrubbed" / "stale").write_text("")
    scrub(run, force=True)
    assert not (tmp_path / "run-scrubbed" / "stale").exists()
    (tmp_path / "mine").mkdir()
    for output in (tmp_path / "mine", run, run / "inside", tmp_path):
        with pytest.raises(UsageError):
            scrub(run, output, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "run", "run-scrubbed"]


def test_a_trace_outside_of_the_folder_is_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"traceEvents": []}')
    write_run(run, replace(read_run(run), traces=(TraceFile("torch", "../x.json"),)))
    with pytest.raises(TraceFormatError, match="outside"):
        scrub(run)


def test_a_copy_that_fails_its_audit_is_deleted(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / read_run(run).traces[0].path, run / "at 10.9.8.7.json.gz")
    write_run(run, replace(read_run(run), traces=(TraceFile("torch", "at 10.9.8.7.json.gz"),)))
    with pytest.raises(PrivateDataError, match="its name"):
        scrub(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    event = b'{"ph":"X","cat":"cpu_op","name":"aten::add","pid":1,"tid":1,"ts":1,"dur":1},\n'
    with (tmp_path / "big.json").open("wb") as file:
        file.write(b'{"schemaVersion":1,"traceEvents":[\n' + event * 400_000)
        file.write(event.rstrip(b",\n") + b"]}")
    code = "from profharness.cli import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, "scrub", str(tmp_path / "big.json")],
        stderr=subprocess.DEVNULL,
    )
    while not [path for path in tmp_path.rglob("*scrubbed*") if path.is_file()]:
        time.sleep(0.01)
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["big.json"]


def test_a_stored_run_is_named_by_id(run: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    ingest_path(store, run)
    name = read_run(run).run
    for ref in (name, name[:-1], "latest", "latest~0"):
        done = CliRunner().invoke(command, [ref, "--store", str(store), "--force"])
        assert done.exit_code == 0, done.stderr
        assert read_run(tmp_path / "run-scrubbed").run == name
        shutil.rmtree(tmp_path / "run-scrubbed")
    checked = CliRunner().invoke(command, ["--check", "latest", "--store", str(store)])
    assert isinstance(checked.exception, GateError)
    assert profharness.scrub_run("latest", store=store) == tmp_path / "run-scrubbed"
    no_run = CliRunner().invoke(command, ["latest~7", "--store", str(store)])
    assert isinstance(no_run.exception, NotFoundError)
    shutil.rmtree(run)
    gone = CliRunner().invoke(command, ["latest", "--store", str(store)])
    assert isinstance(gone.exception, NotFoundError)
    assert "no longer exists" in str(gone.exception)


def test_a_backend_that_is_a_path_keeps_its_function(tmp_path: Path) -> None:
    record = read_run(H200)
    cells = [replace(cell) for cell in record.cells[:3]]
    paths = ("/home/user7/mine.py", "/srv/other/mine.py", "kernels/slow.py")
    for at, path in enumerate(paths):
        message = f"{path} and {paths[0]}"
        cells[at] = replace(cells[at], backend=f"{path}:attention", message=message)
    folder = tmp_path / "run"
    folder.mkdir()
    versions = {f"{paths[0]}:attention": "sha256:0123456789abcdef"}
    write_run(
        folder,
        replace(
            record,
            cells=tuple(cells),
            traces=(),
            environment={**record.environment, "implementations": versions},
        ),
    )
    copy = read_run(scrub(folder).output)
    assert [cell.backend for cell in copy.cells] == [
        "removed_1:attention",
        "removed_3:attention",
        "kernels/slow.py:attention",
    ]
    assert copy.environment["implementations"] == {"removed_1:attention": "sha256:0123456789abcdef"}


def test_python_stacks_keep_the_parts_of_packages(tmp_path: Path) -> None:
    """Scrub a real trace with stacks and shapes, unchanged and with the full paths that some
    releases write.
    """
    torch = pytest.importorskip("torch")
    profiler = pytest.importorskip("torch.profiler")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    path = tmp_path / "t.json"
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU],
        with_stack=True,
        record_shapes=True,
        experimental_config=torch._C._profiler._ExperimentalConfig(verbose=True),
    ) as profile:
        model(torch.ones(2, 8)).sum().backward()
    profile.export_chrome_trace(str(path))
    text = path.read_text()
    stacks = [*re.findall(r"torch/nn/modules/module\.py\(\d+\): _call_impl", text)]
    assert stacks
    for root in ("", "/home/user7/env/lib/python3.11/site-packages/", "../env/site-packages/"):
        path.write_text(text.replace("torch/nn/modules", f"{root}torch/nn/modules"))
        copy = scrub(path, tmp_path / "copy.json", force=True).output
        kept = copy.read_text()
        assert re.findall(r"torch/nn/modules/module\.py\(\d+\): _call_impl", kept) == stacks
        assert "user7" not in kept and "/env/" not in kept


def test_default_names() -> None:
    here = Path.cwd()
    assert default_output(Path("a.json.gz")) == here / "a-scrubbed.json.gz"
    assert default_output(Path("a.nsys-rep")) == here / "a-scrubbed.sqlite"
    assert default_output(Path("a.ncu-rep")) == here / "a-scrubbed.csv"


@pytest.mark.parametrize("bare", [False, True])
def test_odd_events_are_copied_too(tmp_path: Path, bare: bool) -> None:
    events = (
        '[{"name":"a\\n/home/x/y.py","ph":"X","cat":"cpu_op","ts":4398046511104.123,"dur":NaN},'
        ' {"name":"b","ph":"X","ts":8796093022208.123, "args":{"a":["/tmp/x", 1.50]}},'
        ' {"name":"c","ph":"X","args":{"user":"user7","n":1}},{"name":"d","ph":"X","env":{"A":"b"}}]'
    )
    path = tmp_path / "odd.json"
    path.write_text(events if bare else f'{{"traceEvents":{events},"user":"user7"}}')
    text = scrub(path).output.read_text()
    assert "8796093022208.123" in text
    assert "home" not in text
    assert '["removed_2",1.5' in text
    read = json.loads(text)
    last = (read if bare else read["traceEvents"])[2:]
    assert last == [
        {"name": "c", "ph": "X", "args": {"user": "removed_3", "n": 1}},
        {"name": "d", "ph": "X"},
    ]
    assert bare or set(read) == {"traceEvents"}


def careless_nsys(path: Path) -> None:
    """Add to the scrubbed sample what nsys itself writes."""
    with closing(sqlite3.connect(path)) as db:
        pid = db.execute("SELECT globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()[0]
        db.executemany(
            "INSERT INTO META_DATA_CAPTURE VALUES (?, ?)",
            [("PROCESS_0:ENVIRONMENT_VARIABLE", "HOSTNAME=blade17"), ("CMD", f"python {SECRET}")],
        )
        db.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (1, '', 'Hostname', 1, 'blade17')")
        db.execute(
            "INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (1, '', 'NvDriverVersion', 2, '580.1.2')"
        )
        db.executemany(
            "INSERT INTO DIAGNOSTIC_EVENT VALUES (0, 0, 1, 1, ?, ?)",
            [("Number of CUDA events collected: 2,712.", pid), (f"Loaded {SECRET}", pid)],
        )
        db.execute("UPDATE PROCESSES SET name = ?", (SECRET,))
        db.execute("INSERT INTO StringIds VALUES (90001, ?)", (SECRET,))
        db.execute("INSERT INTO ThreadNames VALUES (90001, 0, ?)", (pid,))
        db.execute(
            "UPDATE NVTX_EVENTS SET text = text || ' of blade17 in /srv/x/y' WHERE rowid = 3"
        )
        db.execute("CREATE TABLE OSRT_API (start, nameId)")
        db.execute("INSERT INTO OSRT_API VALUES (1, 90001)")
        db.commit()


@pytest.fixture(params=["nsys_h200", "nsys_h200_startend"])
def export(request: pytest.FixtureRequest, tmp_path: Path, nsys: Callable[[str], Path]) -> Path:
    path = tmp_path / "x.sqlite"
    path.write_bytes(nsys(request.param).read_bytes())
    careless_nsys(path)
    return path


def plain_rows(path: Path, table: str, columns: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(f"SELECT {columns} FROM {table} ORDER BY rowid").fetchall()


def test_copy_of_an_export_has_the_same_content(export: Path) -> None:
    before = export.read_bytes()
    copy = scrub(export).output
    assert export.read_bytes() == before
    assert b"blade17" not in copy.read_bytes()
    assert b"user7" not in copy.read_bytes()
    assert b"eda911fc" not in copy.read_bytes()
    assert audit(copy) == []
    was, now = open_trace(export), open_trace(copy)
    assert (was.kernels, was.launch_configs) == (now.kernels, now.launch_configs)
    assert (was.devices, was.apis) == (now.devices, now.apis)
    assert was.environment == now.environment
    assert len(now.environment) > 1
    names = [re.sub(r"blade17 in /srv/x/y", "removed_1", item.name) for item in was.ranges]
    assert [item.name for item in now.ranges] == names
    assert [(r.start_ns, r.duration_ns, r.parent) for r in was.ranges] == [
        (r.start_ns, r.duration_ns, r.parent) for r in now.ranges
    ]
    same = (
        "kernel launch_config range cell_range api device stream correlation start_ns duration_ns"
    )
    for old, new in zip(was.batches(), now.batches(), strict=True):
        for column in same.split():
            assert (getattr(old, column) == getattr(new, column)).all(), column
        assert ((old.pid == old.tid) == (new.pid == new.tid)).all()
        assert set(new.pid) <= {1, 2, 3}
    was.close()
    now.close()


def test_only_known_tables_and_rows_are_copied(export: Path) -> None:
    copy = scrub(export).output
    for table in ("OSRT_API", "META_DATA_CAPTURE", "ThreadNames", "ProcessStreams"):
        assert plain_rows(copy, table, "*") == []
    assert plain_rows(copy, "DIAGNOSTIC_EVENT", "text") == [
        ("Number of CUDA events collected: 2,712.",)
    ]
    assert plain_rows(copy, "TARGET_INFO_SYSTEM_ENV", "name, value") == [
        ("NvDriverVersion", "580.1.2")
    ]
    processes = plain_rows(copy, "PROCESSES", "globalPid, pid, name")
    assert processes == [(281474976710656 + (1 << 24), 1, None)]
    gpu = plain_rows(copy, "TARGET_INFO_GPU", "*")[0]
    assert "NVIDIA H200" in gpu
    assert not [value for value in gpu if isinstance(value, str) and ":" in value]


def test_a_copy_has_every_table_and_column_of_its_export(export: Path) -> None:
    """Programs that read exports fail if a column is missing."""
    with closing(sqlite3.connect(export)) as db:
        db.execute(
            "ALTER TABLE TARGET_INFO_GPU ADD COLUMN revisionText TEXT NOT NULL DEFAULT 'SN-77'"
        )
        db.execute('CREATE TABLE "of blade17" (x)')
        db.commit()
    copy = scrub(export).output
    sql = (
        "SELECT t.name, c.name, upper(c.type) FROM sqlite_master t, pragma_table_info(t.name) c "
        "WHERE t.type = 'table' AND t.name != 'of blade17' ORDER BY 1, c.cid"
    )
    columns = []
    for path in (export, copy):
        with closing(sqlite3.connect(path)) as db:
            columns.append(db.execute(sql).fetchall())
    assert columns[0] == columns[1]
    assert plain_rows(copy, "TARGET_INFO_GPU", "revisionText, uuid") == [("", None)]
    assert audit(copy) == []


def test_a_compressed_export_stays_compressed(export: Path, tmp_path: Path) -> None:
    packed = tmp_path / "y.sqlite.gz"
    packed.write_bytes(gzip.compress(export.read_bytes()))
    assert audit(packed)
    copy = scrub(packed).output
    assert copy.name == "y-scrubbed.sqlite.gz"
    assert gzip.decompress(copy.read_bytes()).startswith(b"SQLite format 3")
    assert sorted(path.name for path in tmp_path.glob("*.gz")) == [copy.name, packed.name]


CSV = (
    "==PROF== Connected to process 77 (/home/user7/python)\n"
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Metric"\n'
    '"","","","","","ns"\n'
    '"0","4711","python3.11","blade17","f<int=3>(a, b)","1,234.5"\n'
    '"1","4711","python3.11","blade17","g","2"\n'
    '"2","4712","python3.11","blade17","g of blade17","3"\n'
)


def test_a_csv_of_ncu_loses_host_and_process(tmp_path: Path) -> None:
    path = tmp_path / "k.csv"
    path.write_text(CSV)
    assert scrub(path).output.read_text().splitlines() == [
        '"ID","Process ID","Process Name","Host Name","Kernel Name","Metric"',
        '"","","","","","ns"',
        '"0","1","","","f<int=3>(a, b)","1,234.5"',
        '"1","1","","","g","2"',
        '"2","2","","","g of removed_1","3"',
    ]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(TraceFormatError):
        scrub(tmp_path / "other.csv")


def test_a_report_of_ncu_is_replaced_by_an_equal_csv(tmp_path: Path) -> None:
    report = tmp_path / "k.ncu-rep"
    report.write_bytes(gzip.decompress((DATA / "ncu_h200.ncu-rep.gz").read_bytes()))
    if not has_package():
        pytest.skip("reading a report needs the package ncu-report")
    done = scrub(report)
    assert done.replaced == (("k.ncu-rep", "k-scrubbed.csv"),)
    was, now = open_trace(report), open_trace(done.output)
    assert (was.kernels, was.launch_configs) == (now.kernels, now.launch_configs)
    assert [item.name for item in was.ranges] == [item.name for item in now.ranges]
    for old, new in zip(was.batches(), now.batches(), strict=True):
        for column in ("kernel", "launch_config", "range", "cell_range", "duration_ns"):
            assert (getattr(old, column) == getattr(new, column)).all(), column
    assert was.metrics is not None
    assert now.metrics is not None
    assert set(now.metrics.names) == set(was.metrics.names)
    was.close()
    now.close()


def test_permissions_are_those_of_any_new_file(run: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    assert scrub(run).output.stat().st_mode & 0o777 == 0o777 & ~mask
