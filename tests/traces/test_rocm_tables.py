"""CSVs of rocprofv3, and CSVs and databases of rocprof v1."""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from rocm_make import (
    CONVERTED,
    COPIES,
    COUNTERS,
    KERNEL_TRACE,
    NAME,
    OLD_KERNEL_TRACE,
    V1,
    launches,
    write_csv,
    write_v1,
)

from profharness.errors import TraceFormatError
from profharness.store.ingest import ingest_path
from profharness.store.sources import find_sources
from profharness.trace import NONE, LaunchConfig, Trace
from profharness.traces import open_trace

GRID, BLOCK = (2, 64, 3), (256, 2, 1)
CONFIGS = {
    # rocprofv3 writes the static size of the LDS
    KERNEL_TRACE: LaunchConfig(GRID, BLOCK, 128, 512, None, None, 64, 96, 16),
    CONVERTED: LaunchConfig(GRID, BLOCK, 128, None, None, 512, 64, 96, 16),
    OLD_KERNEL_TRACE: LaunchConfig(GRID, BLOCK, shared_bytes=65536, scratch_bytes_per_thread=16),
}
TOTALS = "the grid and block dimensions are unknown"


@contextmanager
def opened(path: Path) -> Iterator[Trace]:
    with closing(open_trace(path)) as trace:
        yield trace


@pytest.mark.parametrize("columns", CONFIGS, ids=["new", "converted", "old"])
def test_a_kernel_trace_has_blocks_and_resources(tmp_path: Path, columns: str) -> None:
    path = write_csv(tmp_path / "1_kernel_trace.csv", columns, {}, {"Start_Timestamp": 1010})
    with opened(path) as trace:
        row, later = launches(trace)
        assert trace.profiler == "rocprofv3"
        assert trace.warnings == ()
    assert row["config"] == CONFIGS[columns]
    assert (row["kernel"], row["start_ns"], row["duration_ns"]) == (NAME, 1000, 70)
    assert (row["device"], row["stream"]) == (4, 2 if columns == OLD_KERNEL_TRACE else 3)
    assert (row["correlation"], row["api"], row["tid"]) == (77, None, NONE)
    assert (later["start_ns"], later["duration_ns"]) == (1010, 60)


def test_attention_kernels_without_api_calls_are_calls(tmp_path: Path) -> None:
    """Bug: `kernels` found attention in such a file, and `layers` did not."""
    names = ("flash_attn_ext_f16", "mul_mat_q", "flash_attn_ext_f16")
    rows = [
        {"Kernel_Name": name, "Start_Timestamp": 1000 + 100 * at, "End_Timestamp": 1050 + 100 * at}
        for at, name in enumerate(names)
    ]
    path = write_csv(tmp_path / "1_kernel_trace.csv", KERNEL_TRACE, *rows)
    with opened(path) as trace:
        assert [(call.kind, call.start_ns) for call in trace.calls] == [
            ("custom", 1000),
            ("custom", 1200),
        ]
        (batch,) = trace.batches()
        assert (batch.call_span >= 0).tolist() == [True, False, True]


def test_attention_kernels_of_two_gpus_are_separate_calls(tmp_path: Path) -> None:
    """Bug: sorted by start alone, a call consisted of kernels of both GPUs."""
    tile, combine = "flash_attn_ext_f16", "flash_attn_combine_results"
    rows = [
        {"Kernel_Name": name, "Agent_Id": f"Agent {gpu}", "Start_Timestamp": start, "End_Timestamp": start + 5}
        for at in range(2)
        for name, gpu, start in (
            (tile, 1, 1000 + 100 * at), (tile, 2, 1010 + 100 * at),
            (combine, 1, 1020 + 100 * at), (combine, 2, 1030 + 100 * at),
        )
    ]  # fmt: skip
    with opened(write_csv(tmp_path / "1_kernel_trace.csv", KERNEL_TRACE, *rows)) as trace:
        assert len(trace.calls) == 4
        devices: dict[int, set[int]] = {}
        for batch in trace.batches():
            for span, device in zip(batch.call_span.tolist(), batch.device.tolist(), strict=True):
                devices.setdefault(trace.call_spans[span].call, set()).add(device)
    assert len(devices) == 4 and all(len(own) == 1 for own in devices.values())


def test_names_of_columns_differ_in_case(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", CONVERTED, {})
    head, rest = path.read_text().split("\n", 1)
    path.write_text(f"{head.lower()}\n{rest}")
    with opened(path) as trace:
        assert launches(trace)[0]["config"] == CONFIGS[CONVERTED]


def test_counters_belong_to_dispatches(tmp_path: Path) -> None:
    rows = [
        {"Dispatch_Id": dispatch, "Start_Timestamp": 1000 + dispatch, "Counter_Name": name}
        for name in ("SQ_WAVES", "L2CacheHit")
        for dispatch in (1, 2)
    ]
    rows += [{"Dispatch_Id": 2, "Counter_Value": "1"}, {"Dispatch_Id": 2, "Counter_Value": "x"}]
    path = write_csv(tmp_path / "counters.csv", COUNTERS, *rows)
    (result,) = ingest_path(tmp_path / "s.db", path)
    assert result.launches == 2
    assert any(TOTALS in text for text in result.warnings)
    assert any("1 counter value could not be read" in text for text in result.warnings)
    with closing(sqlite3.connect(tmp_path / "s.db")) as db:
        values = db.execute(
            "SELECT l.start_ns, m.name, m.value FROM metrics m JOIN launches l ON l.id = launch_id "
            "ORDER BY 1, 2"
        ).fetchall()
    assert values == [
        (1001, "L2CacheHit", 7.5),
        (1001, "SQ_WAVES", 7.5),
        (1002, "L2CacheHit", 7.5),
        (1002, "SQ_WAVES", 8.5),
    ]


def test_a_dispatch_that_cannot_be_read_takes_no_counters_of_others(tmp_path: Path) -> None:
    rows = [{"Dispatch_Id": n, "Counter_Value": n, "Start_Timestamp": n} for n in (1, 2, 3)]
    rows[1] |= {"End_Timestamp": "soon"}
    with opened(write_csv(tmp_path / "counters.csv", COUNTERS, *rows)) as trace:
        assert (trace.num_launches, trace.skipped) == (2, 1)
        assert trace.metrics is not None
        assert trace.metrics.values[:, 0].tolist() == [1, 3]


def test_copies_have_a_direction_and_no_bytes(tmp_path: Path) -> None:
    back = {"Direction": "DEVICE_TO_HOST", "Source_Agent_Id": 5, "Destination_Agent_Id": 0}
    with opened(write_csv(tmp_path / "t.csv", COPIES, {}, back)) as trace:
        rows = launches(trace)
    assert [(row["kernel"], row["device"], row["bytes"]) for row in rows] == [
        ("Memcpy HtoD (Host -> Device)", 4, NONE),
        ("Memcpy DtoH (Device -> Host)", 5, NONE),
    ]


@pytest.mark.parametrize("form", ["database", "csv"])
def test_the_first_rocprof_has_no_dimensions(tmp_path: Path, form: str) -> None:
    one = {"Index": 1, "grd": 1, "wgr": 1, "BeginNs": 1010}
    if form == "csv":
        path = write_csv(tmp_path / "results.csv", V1, {}, one)
    else:
        path = write_v1(tmp_path / "results.db", {}, one)
    with opened(path) as trace:
        row, single = launches(trace)
        assert trace.profiler == "rocprof"
        assert any(TOTALS in text for text in trace.warnings)
    assert row["config"] == LaunchConfig(None, None, 128, None, None, 512, 64, 96, 16)
    assert single["config"].grid == single["config"].block == (1, 1, 1)
    assert (row["kernel"], row["start_ns"], row["duration_ns"]) == (NAME, 1000, 70)
    assert (row["device"], row["stream"]) == (4, 2)
    assert row["pid"] == NONE  # the process of a launch is that of its API call


def test_the_first_rocprof_has_kernels_in_another_table_with_hip_trace(tmp_path: Path) -> None:
    """Bug: such a database was refused, because its table KERN has no times."""
    path = tmp_path / "results.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute('CREATE TABLE KERN ("Index", "KernelName")')
        db.execute(
            'CREATE TABLE OPS ("BeginNs", "EndNs", "dev-id", "queue-id", "Name", "stream-id")'
        )
        db.execute("INSERT INTO OPS VALUES (1000, 1070, 2, 0, 'softmax(float*)', 1)")
        for name in ("CopyHostToDevice", "FillBuffer", "Marker"):  # of older releases
            db.execute("INSERT INTO OPS VALUES (2000, 2070, 2, 0, ?, 1)", (name,))
    with opened(path) as trace:
        (row,) = launches(trace)
        assert trace.profiler == "rocprof" and trace.warnings == ()
    assert (row["kernel"], row["start_ns"], row["duration_ns"]) == ("softmax(float*)", 1000, 70)
    assert (row["device"], row["stream"]) == (2, 1)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", KERNEL_TRACE, {}, {})
    whole = path.read_text()
    changes = {
        r"no column for the launch end": whole.replace("End_Timestamp", "Stop"),
        r"the last row is cut off": whole[:-40],
        r"damaged: field larger than": whole.replace(NAME, "x" * 200_000),
    }
    for match, text in changes.items():
        path.write_text(text)
        with pytest.raises(TraceFormatError, match=match):
            open_trace(path)
    path.write_text('"Name","Calls","TotalDurationNs"\n"a","1","2"\n')
    with pytest.raises(TraceFormatError, match="not a trace that profharness can read"):
        open_trace(path)
    with closing(sqlite3.connect(tmp_path / "t.db")) as db:
        db.execute("CREATE TABLE KERN (a)")
    with pytest.raises(TraceFormatError, match="no column for the launch start and launch end"):
        open_trace(tmp_path / "t.db")


def test_short_rows_are_counted(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", KERNEL_TRACE, {}, {})
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-20], lines[2], ""]))
    with opened(path) as trace:
        assert (trace.num_launches, trace.skipped) == (1, 1)


def test_a_folder_is_searched_for_tables(tmp_path: Path) -> None:
    wanted = write_csv(tmp_path / "1_kernel_trace.csv", KERNEL_TRACE, {})
    packed = tmp_path / "2_kernel_trace.csv.gz"
    packed.write_bytes(gzip.compress(wanted.read_bytes() + b""))
    (tmp_path / "1_agent_info.csv").write_text('"Node_Id","Agent_Type"\n"0","CPU"\n')
    assert find_sources(tmp_path) == [wanted, packed]
    with opened(packed) as trace:
        assert trace.num_launches == 1
