"""Databases of rpd (rocmProfileData)."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from rocm_make import NAME, PID, TID, Rpd, launches

from profharness.errors import TraceFormatError
from profharness.store.sources import find_sources
from profharness.trace import NONE, LaunchConfig
from profharness.traces import open_trace

BLOCK = (256, 1, 1)


def test_grids_are_in_blocks(tmp_path: Path) -> None:
    maker = Rpd()
    maker.launch("hipLaunchKernel", 1000, (512, 2, 1))
    maker.launch("hipExtModuleLaunchKernel", 2000, (512, 2, 1))
    with closing(open_trace(maker.write(tmp_path / "t.rpd"))) as trace:
        plain, extended = launches(trace)
        assert trace.profiler == "rpd"
        assert trace.environment == {"rpd_schema_version": 2}
        assert trace.warnings == ()
    # rpd records the size of the dynamic shared memory, which is an argument of the call
    assert plain["config"] == LaunchConfig((512, 2, 1), BLOCK, dynamic_shared_bytes=512)
    assert extended["config"] == LaunchConfig((2, 2, 1), BLOCK, dynamic_shared_bytes=512)
    assert (plain["kernel"], plain["api"], plain["kind"]) == (NAME, "hipLaunchKernel", "kernel")
    assert (plain["start_ns"], plain["duration_ns"], plain["launch_ns"]) == (1000, 70, 900)
    assert (plain["device"], plain["stream"]) == (2, 1)
    assert (plain["pid"], plain["tid"]) == (PID, TID)


def test_the_ops_of_a_graph_have_a_call_but_no_sizes(tmp_path: Path) -> None:
    maker = Rpd()
    call = maker.api("hipGraphLaunch", 900, 950)
    maker.op(call, NAME, "Task", 1000)
    maker.op(call, "", "CopyDeviceToDevice", 1100)
    maker.op(None, "", "FillBuffer", 1200)
    with closing(open_trace(maker.write(tmp_path / "t.rpd"))) as trace:
        rows = launches(trace)
    assert [(row["kind"], row["kernel"], row["api"]) for row in rows] == [
        ("kernel", NAME, "hipGraphLaunch"),
        ("memcpy", "Memcpy DtoD (Device -> Device)", "hipGraphLaunch"),
        ("memset", "Memset (Device)", None),
    ]
    assert {row["config"] for row in rows} == {LaunchConfig(None, None)}


def test_attention_in_a_graph_has_calls(tmp_path: Path) -> None:
    """Bug: only Kineto traces had calls of replayed kernels, so `layers` missed the decoding."""
    paged, reduce = "paged_attention_ll4mi_QKV_kernel", "paged_attention_ll4mi_reduce_kernel"
    maker = Rpd()
    call = maker.api("hipGraphLaunch", 900, 950)
    for number, name in enumerate((paged, reduce, "other_kernel", paged, reduce)):
        maker.op(call, name, "Task", 1000 + 100 * number)
    with closing(open_trace(maker.write(tmp_path / "t.rpd"))) as trace:
        assert [(call.kind, call.graph) for call in trace.calls] == [("replay", True)] * 2
        (batch,) = trace.batches()
        spans = [trace.call_spans[at].call if at >= 0 else None for at in batch.call_span.tolist()]
    assert spans == [0, 0, None, 1, 1]


def test_a_copy_has_the_bytes_of_its_call(tmp_path: Path) -> None:
    maker = Rpd()
    call = maker.api("hipMemcpyAsync", 900, 950)
    maker.op(call, "", "CopyHostToDevice", 1000)
    maker.rows["rocpd_copyapi"].append({"api_ptr_id": call, "size": 4096, "width": ""})
    with closing(open_trace(maker.write(tmp_path / "t.rpd"))) as trace:
        (row,) = launches(trace)
    assert (row["kernel"], row["bytes"]) == ("Memcpy HtoD (Host -> Device)", 4096)


def test_markers_are_ranges_or_ops(tmp_path: Path) -> None:
    maker = Rpd()
    maker.api("UserMarker", 800, 2000, "forward")
    number = maker.api("UserMarker", 850, 1900, "aten::mm")
    maker.rows["ext_autogradapi"].append(
        {"api_ptr_id": number, "seq": 5, "op_id": 7, "sizes": "[[2, 3], [3, 4]]"}
    )
    maker.api("UserMarker", 860, 860, "a mark")
    maker.api("UserMarker", 870, 1800, "aten::addmm, op_id = 9, sizes = [[2, 3]]")
    maker.launch("hipLaunchKernel", 1000, (8, 1, 1))
    with closing(open_trace(maker.write(tmp_path / "t.rpd"))) as trace:
        (row,) = launches(trace)
        assert row["range"] == "forward"
        assert trace.op_paths[row["op_path"]] == "aten::mm;aten::addmm"
        assert [each.name for each in trace.ranges] == ["forward"]


def test_rows_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    maker = Rpd()
    call = maker.api("hipLaunchKernel", 900, 950)
    maker.op(call, NAME, "KernelExecution", 1000, end="")
    maker.op(call, NAME, "KernelExecution", 1000, end=3)
    maker.op(call, NAME, "KernelExecution", 1000, gpuId="x")
    maker.op(call, "", "Unheard", 1000, gpuId=None)
    with closing(open_trace(maker.write(tmp_path / "t.rpd"))) as trace:
        (row,) = launches(trace)
        assert (row["kernel"], row["device"]) == ("unknown", NONE)
        assert trace.skipped == 3
        assert "3 rows of rocpd_op could not be read and were skipped" in trace.warnings


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    maker = Rpd()
    for start in range(1000, 90_000, 1000):
        maker.launch("hipLaunchKernel", start, (8, 1, 1))
    path = maker.write(tmp_path / "t.rpd")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(TraceFormatError, match="cut off"):
        open_trace(path)
    path.write_bytes(data)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute('ALTER TABLE rocpd_op DROP COLUMN "end"')
    with pytest.raises(TraceFormatError, match="rocpd_op has no column end"):
        open_trace(path)
    path.write_text("no database")
    with pytest.raises(TraceFormatError, match="not an SQLite file"):
        open_trace(path)
    assert find_sources(path) == [path]
