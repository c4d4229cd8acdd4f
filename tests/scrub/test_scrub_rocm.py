"""Scrub databases, CSVs and JSON of AMD's profilers."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from rocm_make import (
    COUNTERS,
    KERNEL_TRACE,
    MARKER,
    NAME,
    PID,
    Rocpd,
    Rpd,
    launches,
    rocprofv3_json,
    write_csv,
    write_v1,
)

from profharness.errors import TraceFormatError
from profharness.scrub.copies import audit, scrub
from profharness.traces import open_trace

SECRETS = ("secret", "hunter2", "b24179676c5e", "00003fdc", "zebrafish")


def write_rocpd(path: Path) -> Path:
    maker = Rocpd()
    maker.launch(1)
    maker.copy(2, 2000, 4096)
    maker.region(MARKER, 11, 800, 1500, 10, message="forward")
    maker.region(MARKER, 11, 2800, 3500, 11, message="zebrafish")
    maker.add("string", id=99, string="zebrafish")
    maker.rows["info_agent"][1]["extdata"] = json.dumps(
        json.loads(maker.rows["info_agent"][1]["extdata"]) | {"hive_id": 77, "uuid": "zebrafish"}
    )
    return maker.write(path)


def write_rpd(path: Path) -> Path:
    maker = Rpd()
    maker.launch("hipLaunchKernel", 1000, (8, 2, 1))
    maker.api("UserMarker", 800, 2000, "zebrafish")
    maker.api("hipMalloc", 10, 20, "secret")
    return maker.write(path)


def write_json(path: Path) -> Path:
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [rocprofv3_json()]}))
    return path


def write_trace_csv(path: Path) -> Path:
    return write_csv(path, KERNEL_TRACE, {}, {"Dispatch_Id": 2, "Kernel_Name": "zebrafish(int)"})


def write_counter_csv(path: Path) -> Path:
    return write_csv(path, COUNTERS, {}, {"Counter_Value": "1"})


FORMS: dict[str, Callable[[Path], Path]] = {
    "t.db": write_rocpd,
    "t.rpd": write_rpd,
    "v1.db": lambda path: write_v1(path, {}, {"KernelName": "zebrafish"}),
    "kernel_trace.csv": write_trace_csv,
    "counters.csv": write_counter_csv,
    "t.json": write_json,
}


@pytest.mark.parametrize("name", FORMS)
def test_a_copy_has_the_same_launches_and_no_secrets(tmp_path: Path, name: str) -> None:
    source, copy = FORMS[name](tmp_path / name), tmp_path / f"copy-{name}"
    assert audit(source)
    scrub(source, copy)
    assert audit(copy) == []
    data = copy.read_bytes()
    assert not [secret for secret in SECRETS if secret.encode() in data]
    rows = []
    for path in (source, copy):
        with closing(open_trace(path)) as trace:
            assert trace.skipped == 0
            rows.append(
                [
                    tuple(row[key] for key in ("config", "start_ns", "duration_ns", "bytes", "api"))
                    for row in launches(trace)
                ]
            )
            kept = [row["kernel"] for row in launches(trace)]
            devices = trace.devices
    assert rows[0] == rows[1]
    assert kept[0] == NAME
    if name in ("t.db", "t.json"):
        assert (devices[0].num_sms, devices[0].total_memory_bytes) == (304, 206141652992)


def test_ids_of_processes_are_replaced_in_all_tables(tmp_path: Path) -> None:
    scrub(write_rocpd(tmp_path / "t.db"), tmp_path / "copy.db")
    with closing(open_trace(tmp_path / "copy.db")) as trace:
        row = launches(trace)[0]
        assert row["range"] == "forward"
        assert row["pid"] in (1, 2, 3)
        assert row["pid"] != PID
    with closing(sqlite3.connect(tmp_path / "copy.db")) as db:
        assert db.execute("SELECT count(*) FROM rocpd_kernel_dispatch").fetchone() == (1,)


def test_cut_files_are_not_copied(tmp_path: Path) -> None:
    for name, write in FORMS.items():
        path = write(tmp_path / name)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])
        with pytest.raises(TraceFormatError):
            scrub(path, tmp_path / f"copy-{name}")
        assert not (tmp_path / f"copy-{name}").exists()


def test_a_json_with_invalid_characters_is_not_copied(tmp_path: Path) -> None:
    path = write_json(tmp_path / "t.json")
    path.write_bytes(path.read_bytes().replace(b'"command"', b'"comm\xffnd"'))
    with pytest.raises(TraceFormatError, match="damaged"):
        scrub(path, tmp_path / "copy.json")
