"""Files that are no exports, damaged or incomplete, and exports whose tables, columns or rows are wrong.

Lost kernels are refused by name or counted.
"""

from __future__ import annotations

import gzip
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nsys_make import DATA, FLASH_CANONICAL, Maker, unpacked

from profharness.errors import TraceFormatError
from profharness.store.schema import connect
from profharness.trace import NONE, Trace
from profharness.traces import open_trace
from profharness.traces.nsys import parse_nsys


@pytest.fixture
def export(tmp_path: Path) -> Path:
    maker = Maker()
    maker.nvtx("mine", 100, 900)
    for call in range(200, 230):
        maker.launch(call)
    return maker.write(tmp_path / "t.sqlite")


REFUSED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", r"empty.*nsys export --type sqlite"),
    "text": (lambda _: b"start,end\n" * 50, "not an SQLite file"),
    "truncated": (lambda data: data[: len(data) * 2 // 3], r"cut off: \d+ of \d+ bytes"),
    "hole": (lambda data: data[:4096] + bytes(len(data) - 4096), "damaged"),
    "schema": (lambda data: data.replace(b"CREATE TABLE", b"CRE\xa7\xffE TABLE", 1), "damaged"),
}


@pytest.mark.parametrize(("change", "match"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_file_is_refused(
    export: Path, change: Callable[[bytes], bytes], match: str
) -> None:
    export.write_bytes(change(export.read_bytes()))
    with pytest.raises(TraceFormatError, match=match):
        open_trace(export)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for name in ("t.sqlite", "t.nsys-rep"):
        with pytest.raises(TraceFormatError, match=r"cannot be read|no such file"):
            parse_nsys(tmp_path / name)


def test_an_incomplete_export_is_refused(export: Path) -> None:
    beside = export.with_name(export.name + "-journal")
    beside.write_bytes(b"x" * 512)
    with pytest.raises(TraceFormatError, match="incomplete"):
        open_trace(export)
    beside.write_bytes(b"")
    open_trace(export).close()


def test_our_own_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profharness.db"
    connect(path, write=True).close()
    with pytest.raises(TraceFormatError, match="a profharness store, not a trace"):
        open_trace(path)


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mail.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mail (id)")
    with pytest.raises(TraceFormatError, match="not from nsys"):
        open_trace(path)


def test_rows_with_wrong_values_are_skipped_and_counted(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("mine", 100, 900)
    maker.nvtx("backwards", 900, 100)
    maker.nvtx("words", 100, 900, globalTid="me")
    maker.launch(200)
    maker.launch(210, start="soon")
    maker.launch(220, end=5)
    maker.launch(230, end=None)
    maker.launch(240, start=-(1 << 63), end=9 - (1 << 63))
    with closing(parse_nsys(maker.write(tmp_path / "t.sqlite"))) as trace:
        assert (trace.num_launches, trace.skipped) == (1, 6)
        for text in ("4 rows of CUPTI_ACTIVITY_KIND_KERNEL", "2 rows of NVTX_EVENTS"):
            assert f"{text} could not be read and were skipped" in trace.warnings
        (batch,) = trace.batches()
        assert trace.ranges[int(batch.range[0])].name == "mine"


def test_invalid_launch_configurations_are_left_out(tmp_path: Path) -> None:
    maker = Maker()
    maker.launch(200, gridX=-1, blockX="wide", registersPerThread=1.5, staticSharedMemory=1 << 62)
    with closing(parse_nsys(maker.write(tmp_path / "t.sqlite"))) as trace:
        (config,) = trace.launch_configs
        assert (config.grid, config.block, config.registers_per_thread) == (None, None, None)
        assert (config.static_shared_bytes, config.shared_bytes) == (None, None)


def test_a_view_is_never_read(tmp_path: Path) -> None:
    """A view may compute anything, for any time."""
    path = tmp_path / "t.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE META_DATA_EXPORT (name, value)")
        connection.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n(start) AS "
            "(SELECT 1 UNION ALL SELECT start + 1 FROM n) SELECT start, start AS end FROM n"
        )
    with closing(parse_nsys(path)) as trace:
        assert trace.num_launches == 0


def test_nothing_private_is_reported(tmp_path: Path) -> None:
    maker = Maker("2026.1.1")
    maker.launch(200)
    maker.add("META_DATA_CAPTURE", name="COMMAND", value="python /home/ann/secret.py")
    maker.add("PROCESSES", globalPid=1, pid=1, name="secret.py")
    maker.add("DIAGNOSTIC_EVENT", severity=3, text="cannot open /home/ann/secret.py")
    maker.add("DIAGNOSTIC_EVENT", severity=3, text="host secret.example.org is slow")
    path = maker.write(tmp_path / "t.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name, value)")
        rows = [("Hostname", "secret"), ("CudaDriverVersion", "13010"), ("NvDriverVersion", "a/b")]
        connection.executemany("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (?, ?)", rows)
        connection.commit()
    with closing(parse_nsys(path)) as trace:
        assert trace.environment == {"nsys_version": "2026.1.1.0", "cuda_driver_version": 13010}
        assert not any("secret" in warning for warning in trace.warnings)


def test_close_removes_temporary_files(export: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    trace = parse_nsys(export)
    assert set(Path("/proc/self/fd").iterdir()) > before
    trace.close()
    assert set(Path("/proc/self/fd").iterdir()) == before


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 1 << 30), data=st.binary(min_size=1, max_size=40))
def test_any_damage_gives_a_trace_or_a_format_error(
    tmp_path_factory: pytest.TempPathFactory, seed: int, data: bytes
) -> None:
    whole = gzip.decompress((DATA / "nsys_h200.sqlite.gz").read_bytes())
    path = tmp_path_factory.mktemp("damage") / "t.sqlite"
    at = seed % (len(whole) - len(data))
    path.write_bytes(whole[:at] + data + whole[at + len(data) :])
    begun = time.process_time()
    try:
        trace = parse_nsys(path)
    except TraceFormatError:
        pass
    else:
        assert sum(len(batch.kernel) for batch in trace.batches()) == trace.num_launches
        trace.close()
    assert time.process_time() - begun < 20


REPORTER = """#!/bin/sh
case "$1" in --version) echo "NVIDIA Nsight Systems version 2025.3.2.0"; exit 0;; esac
while [ $# -gt 1 ]; do
  case "$1" in --output|-o) out="$2";; --output=*) out="${1#--output=}";; esac
  shift
done
cp "$1" "$out"
"""


def test_a_report_is_exported_by_the_installed_nsys(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nsys here is a real program that copies its input, because the report is already an export."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tool = folder / "nsys"
    tool.write_text(REPORTER)
    tool.chmod(0o755)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    report = tmp_path / "r.nsys-rep"
    report.write_bytes(export.read_bytes())
    with closing(open_trace(report)) as trace:
        assert trace.num_launches == 30
        assert trace.kernels == [FLASH_CANONICAL]
    assert list(temporary.iterdir()) == []


KERNEL, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
TRACES = Path(__file__).parents[2] / "traces"
Change = Callable[..., Path]


@pytest.fixture
def changed(tmp_path: Path) -> Change:
    """Run SQL on the H200's export (253 kernels, 16 memsets)."""

    def change(*statements: str) -> Path:
        path = unpacked("nsys_h200.sqlite.gz", tmp_path)
        with closing(sqlite3.connect(path)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()
        return path

    return change


def read(path: Path) -> Trace:
    trace = parse_nsys(path)
    trace.close()
    return trace


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (f'ALTER TABLE {KERNEL} RENAME COLUMN "end" TO "endTime"', f"{KERNEL} has no column end"),
        (f"ALTER TABLE {KERNEL} DROP COLUMN start", f"{KERNEL} has no column start"),
        (f"ALTER TABLE {KERNEL} RENAME TO GPU_KERNELS", "the table GPU_KERNELS with 253 rows"),
        (f"ALTER TABLE {KERNEL} RENAME TO {KERNEL}S", f"the table {KERNEL}S with 253 rows"),
    ],
)
def test_kernels_in_an_unknown_form_are_refused_by_name(
    changed: Change, statement: str, words: str
) -> None:
    with pytest.raises(TraceFormatError, match=words) as caught:
        read(changed(statement))
    assert "2025.3.2.0" in str(caught.value) and "nsys_h200.sqlite" in str(caught.value)


MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"


@pytest.mark.parametrize(
    ("statement", "launches", "warning"),
    [
        (f"DROP TABLE {KERNEL}", 16, "253 kernel launches have no kernel in the export"),
        (
            f"DELETE FROM {KERNEL} WHERE rowid % 10 = 0", 244,
            "25 kernel launches have no kernel in the export",
        ),
        (
            f"ALTER TABLE {MEMSET} RENAME COLUMN start TO begin", 253,
            f"{MEMSET} has no column start, so its 16 rows cannot be read",
        ),
        (
            f"ALTER TABLE {MEMSET} RENAME TO {MEMSET}_GRAPH", 253,
            f"the table {MEMSET}_GRAPH with 16 rows is unknown and was not read",
        ),
        (
            f"ALTER TABLE {KERNEL} RENAME COLUMN gridX TO gridWidth", 269,
            f"{KERNEL} has no column gridX, so these values are unknown",
        ),
        (
            f"ALTER TABLE {RUNTIME} RENAME TO CALLS", 269,
            f"the export has no table {RUNTIME}: the API calls and ranges that the launches belong "
            "to are unknown",
        ),
        (
            f"ALTER TABLE {RUNTIME} RENAME COLUMN correlationId TO id", 269,
            f"{RUNTIME} has no column correlationId, so its 2,712 rows cannot be read",
        ),
        (
            "DROP TABLE NVTX_EVENTS", 269,
            "the export has no table NVTX_EVENTS: the ranges that the launches belong to are "
            "unknown",
        ),
        ("DROP TABLE StringIds", 269, "253 of 269 launches have no name in StringIds"),
        (
            "DELETE FROM StringIds WHERE value LIKE '%flash%'", 269,
            " launches have no name in StringIds",
        ),
        (
            f"UPDATE {KERNEL} SET correlationId = 1", 269,
            "252 launches have the same API call id as an earlier launch",
        ),
        (
            f"UPDATE {RUNTIME} SET correlationId = 157", 269,
            f"2,711 calls in {RUNTIME} have the same id as an earlier call; the earlier call is used",
        ),
        (
            f"UPDATE {KERNEL} SET correlationId = correlationId + 1000000", 269,
            "253 of 269 launches have no API call in the file, so their ranges are unknown",
        ),
        (
            f'UPDATE {KERNEL} SET "end" = start - 1 WHERE rowid <= 5', 264,
            f"5 rows of {KERNEL} could not be read and were skipped",
        ),
        (
            f"UPDATE {KERNEL} SET start = -start WHERE rowid <= 5", 269,
            f"5 rows of {KERNEL} begin before the capture",
        ),
        (
            f"INSERT INTO {KERNEL} SELECT * FROM {KERNEL}", 269,
            "253 launches are exact copies of others and are skipped",
        ),
        (
            f"INSERT INTO {RUNTIME} SELECT * FROM {RUNTIME}", 269,
            f"269 calls in {RUNTIME} have the same id as an earlier call; the earlier call is used",
        ),
        (
            "INSERT INTO NVTX_EVENTS SELECT * FROM NVTX_EVENTS", 269,
            "17 ranges are exact copies of others and are skipped",
        ),
    ],
)  # fmt: skip
def test_lost_rows_are_counted(
    changed: Change, statement: str, launches: int, warning: str
) -> None:
    trace = read(changed(statement))
    assert trace.num_launches == launches
    assert any(text.endswith(warning) for text in trace.warnings), trace.warnings


def test_complete_exports_have_no_warnings(changed: Change) -> None:
    assert read(changed()).warnings == ()
    assert read(TRACES / "h200-torch-nsys-ncu" / "nsys-1.sqlite").warnings == ()


def test_a_table_in_two_versions_is_reported(changed: Change) -> None:
    path = changed("CREATE TABLE NVTX_EVENTS_V2 AS SELECT * FROM NVTX_EVENTS")
    assert read(path).warnings == ("NVTX_EVENTS_V2 also has rows, but is not read",)


def test_launches_into_a_graph_are_not_losses(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("mine", 100, 900)
    maker.launch(200)
    for call in (300, 400):
        maker.add(
            RUNTIME, start=call, end=call + 5, globalTid=maker.rows[RUNTIME][0]["globalTid"],
            correlationId=call, nameId=maker.string("cudaLaunchKernel_v7000"), returnValue=0,
        )  # fmt: skip
    lost = "2 kernel launches have no kernel in the export"
    assert lost in read(maker.write(tmp_path / "lost.sqlite")).warnings
    maker.string("cudaStreamBeginCapture_v10000")
    assert lost not in read(maker.write(tmp_path / "graph.sqlite")).warnings


def test_numbers_that_the_store_cannot_hold_are_left_out(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("mine", 100, 900)
    maker.gpu(threadsPerWarp=1 << 40, maxWarpsPerSm=1 << 40, totalMemory=(1 << 63) - 1)
    maker.launch(200, streamId=-5, bytes=(1 << 63) - 1)
    maker.launch(210, deviceId=-7)
    maker.launch(220, end=1 << 60)
    path = maker.write(tmp_path / "t.sqlite")
    trace = parse_nsys(path)
    (batch,) = trace.batches()
    assert batch.stream.tolist() == [NONE]
    assert f"2 rows of {KERNEL} could not be read and were skipped" in trace.warnings
    assert trace.devices[0].max_threads_per_sm is None
    trace.close()


def test_repeated_rows_far_apart_are_found(tmp_path: Path) -> None:
    """The copies are at the end, after more rows than are joined at once."""
    maker = Maker()
    maker.nvtx("mine", 100, 900)
    for call in range(70_000):
        maker.launch(1000 + call)
    kernels = maker.rows[KERNEL]
    kernels += kernels[:500]
    trace = read(maker.write(tmp_path / "t.sqlite"))
    assert trace.num_launches == 70_000
    assert "500 launches are exact copies of others and are skipped" in trace.warnings
