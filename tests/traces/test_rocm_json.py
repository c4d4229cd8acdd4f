"""JSON files of rocprofv3."""

from __future__ import annotations

import gzip
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rocm_make import NAME, PID, TID, launches, rocprofv3_json

from profharness.errors import TraceFormatError
from profharness.store import open_store
from profharness.store.ingest import ingest_path
from profharness.trace import NONE, LaunchConfig
from profharness.traces import open_trace


def write(path: Path, *processes: dict[str, Any]) -> Path:
    text = json.dumps({"rocprofiler-sdk-tool": list(processes)}, indent=4)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["1_results.json", "1_results.json.gz"])
def test_a_json_has_launches_copies_ranges_and_counters(tmp_path: Path, name: str) -> None:
    with closing(open_trace(write(tmp_path / name, rocprofv3_json()))) as trace:
        kernel, copy = launches(trace)
        assert trace.profiler == "rocprofv3"
        assert trace.warnings == (
            "1 of 2 launches have no API call in the file, so their ranges are unknown",
        )
        (device,) = trace.devices
        assert trace.metrics is not None
        assert trace.metrics.names == ["SQ_WAVES"]
        assert trace.metrics.values[0].tolist() == [7.5]
    assert kernel["config"] == LaunchConfig(
        (2, 64, 3), (256, 2, 1), 128, 1024, 64512, 65536, 64, 96, 16
    )
    assert (kernel["kernel"], kernel["api"], kernel["range"]) == (
        NAME,
        "hipLaunchKernel",
        "forward",
    )
    assert (kernel["start_ns"], kernel["duration_ns"], kernel["stream"]) == (1000, 70, 3)
    assert (kernel["pid"], kernel["tid"], kernel["device"]) == (PID, TID, 0)
    assert (copy["kernel"], copy["bytes"]) == ("Memcpy HtoD (Host -> Device)", 4096)
    assert (device.name, device.num_sms, device.warp_size) == ("AMD Instinct MI300X", 304, 64)


def test_a_kernel_of_a_json_has_its_occupancy(tmp_path: Path) -> None:
    ingest_path(tmp_path / "s.db", write(tmp_path / "t.json", rocprofv3_json()))
    with open_store(tmp_path / "s.db") as store:
        row = next(row for row in store.kernels() if row.kernel_kind == "kernel")
    # 192 vector registers and all of the local memory for a block of 8 waves
    assert (row.occupancy, row.occupancy_limiter) == (8 / 32, "registers")


def test_dispatches_with_counters_only_are_launches(tmp_path: Path) -> None:
    process = rocprofv3_json(buffer_records={}, counters=[])
    with closing(open_trace(write(tmp_path / "t.json", process))) as trace:
        (kernel,) = launches(trace)
        assert trace.metrics is None
        assert trace.warnings == ("2 counter values could not be read",)
    assert kernel["config"].grid == (2, 64, 3)


def test_each_process_has_its_own_calls(tmp_path: Path) -> None:
    other = rocprofv3_json(metadata={"pid": 99})
    del other["buffer_records"]["hip_api"]
    with closing(open_trace(write(tmp_path / "t.json", rocprofv3_json(), other))) as trace:
        kernels = [row for row in launches(trace) if row["kind"] == "kernel"]
    assert [row["api"] for row in kernels] == ["hipLaunchKernel", None]


def test_what_a_json_does_not_hold_is_unknown(tmp_path: Path) -> None:
    process = rocprofv3_json(kernel_symbols=[], agents=[], strings={}, callback_records={})
    launch = process["buffer_records"]["kernel_dispatch"][0]
    launch["dispatch_info"] = {"kernel_id": 9}
    with closing(open_trace(write(tmp_path / "t.json", process))) as trace:
        kernel, copy = launches(trace)
        assert trace.devices == ()
    assert kernel["config"] == LaunchConfig(None, None)
    assert (kernel["kernel"], kernel["device"], kernel["range"]) == ("unknown", NONE, None)
    assert copy["kernel"] == "Memcpy <unknown> (Unknown -> Unknown)"


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", rocprofv3_json())
    whole = path.read_text()
    changes = {
        "damaged or cut off": whole[: len(whole) // 2],
        "Expected `array`": json.dumps({"rocprofiler-sdk-tool": {"metadata": 1}}),
        "Expected `object`": json.dumps({"rocprofiler-sdk-tool": [[]]}),
    }
    for match, text in changes.items():
        path.write_text(text)
        with pytest.raises(TraceFormatError, match=match):
            open_trace(path)
        with pytest.raises(TraceFormatError, match=match):
            ingest_path(tmp_path / "s.db", path)
    path.write_text(json.dumps({"other": [], "rocprofiler-sdk-tool": []}))
    with pytest.raises(TraceFormatError, match="not a Kineto trace"):
        open_trace(path)


def test_times_that_are_no_numbers_are_counted(tmp_path: Path) -> None:
    process = rocprofv3_json()
    process["buffer_records"]["kernel_dispatch"][0]["end_timestamp"] = "late"
    process["buffer_records"]["marker_api"][0]["end_timestamp"] = 1
    with closing(open_trace(write(tmp_path / "t.json", process))) as trace:
        assert [row["kind"] for row in launches(trace)] == ["memcpy"]
        assert trace.skipped == 2
