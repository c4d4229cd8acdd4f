"""Kineto traces of ROCm, and those of PyTorch 1.8 and 1.9."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rocm_make import launches

from profharness.store import open_store
from profharness.store.ingest import ingest_path
from profharness.trace import LaunchConfig
from profharness.traces import chrome_events
from profharness.traces.chrome import parse_chrome

DEVICE = {
    "name": "AMD Instinct MI300X", "totalGlobalMem": 206141652992, "computeMajor": 9,
    "computeMinor": 4, "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048,
    "regsPerBlock": 65536, "warpSize": 64, "sharedMemPerBlock": 65536, "numSms": 304,
}  # fmt: skip
PLAIN, EXTENDED = "hipLaunchKernel", "hipExtModuleLaunchKernel"


@pytest.fixture(autouse=True, params=["compiled", "decoder"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read events with the compiled scanner, and without it."""
    if request.param == "decoder":
        monkeypatch.setattr(chrome_events, "Scanner", None)


def event(category: str, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, **more}


def launch(call: int, api: str | None, **args: Any) -> list[dict[str, Any]]:
    """Return a kernel on the agent 2, and the API call that launched it."""
    about = {"device": 2, "stream": 0, "correlation": call, "kind": "Dispatch Kernel", **args}
    made = [event("kernel", "attn_fwd", 100 + call, 5, pid=2, tid=0, args=about)]
    if api:
        given = {"cid": 1, "correlation": call}
        made.append(event("cuda_runtime", api, 50 + call, 1, pid=7, tid=8, args=given))
    return made


def write(path: Path, events: list[dict[str, Any]], *devices: dict[str, Any]) -> Path:
    numbered = [device | {"id": index} for index, device in enumerate(devices)]
    path.write_text(json.dumps({"deviceProperties": numbered, "traceEvents": events}))
    return path


def test_grids_are_in_blocks(tmp_path: Path) -> None:
    shapes: list[tuple[str | None, Any, Any]] = [
        (PLAIN, [512, 2, 1], [256, 1, 1]),
        (EXTENDED, [512, 2, 1], [256, 1, 1]),
        (EXTENDED, [784, 1, 64], [256, 1, 1]),
        (EXTENDED, [784, 1, 64], [256, 1, 1]),
        (None, [512, 2, 1], [256, 1, 1]),
        (EXTENDED, [512, 1, 1], [0, 1, 1]),
    ]
    events = [
        each
        for call, (api, grid, block) in enumerate(shapes)
        for each in launch(call + 1, api, grid=grid, block=block)
    ]
    events += launch(9, EXTENDED) + launch(10, PLAIN)
    with closing(parse_chrome(write(tmp_path / "t.json", events))) as trace:
        configs = [row["config"] for row in launches(trace)]
    block = (256, 1, 1)
    assert configs == [
        LaunchConfig((512, 2, 1), block),
        LaunchConfig((2, 2, 1), block),
        LaunchConfig((4, 1, 64), block),
        LaunchConfig((4, 1, 64), block),
        LaunchConfig((512, 2, 1), block),
        LaunchConfig(None, (0, 1, 1)),
        LaunchConfig(None, None),
        LaunchConfig(None, None),
    ]


def test_gpus_are_found_by_the_number_of_their_agent(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", launch(1, PLAIN), DEVICE, DEVICE)
    with closing(parse_chrome(path)) as trace:
        assert [device.index for device in trace.devices] == [0, 1, 2]
        assert {device.name for device in trace.devices} == {DEVICE["name"]}
        assert launches(trace)[0]["device"] == 2


def test_gpus_that_differ_are_not_mixed_up(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", launch(1, PLAIN), DEVICE, DEVICE | {"numSms": 38})
    with closing(parse_chrome(path)) as trace:
        assert [device.index for device in trace.devices] == [0, 1]


def test_agents_are_only_of_rocm(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", launch(1, "cudaLaunchKernel"), DEVICE | {"name": ""})
    with closing(parse_chrome(path)) as trace:
        assert [(device.index, device.name) for device in trace.devices] == [(0, "")]


def test_an_empty_name_of_a_gpu_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", launch(1, PLAIN), DEVICE | {"name": ""})
    ingest_path(tmp_path / "s.db", path)
    with open_store(tmp_path / "s.db") as store:
        assert [run.device for run in store.runs()] == ["AMD GPU"]


def test_the_categories_of_old_releases_are_read(tmp_path: Path) -> None:
    stream = {"pid": 0, "tid": "stream 7"}
    host = {"pid": 67844, "tid": "4093687616"}
    about = {"queued": 0, "device": 0, "context": 1, "stream": 7, "external id": 1}
    given = {"Input dims": [], "Input type": [], "Device": 67844, "External id": 1}
    path = tmp_path / "t.json"
    path.write_text(
        json.dumps([
            event("Operator", "aten::mm", 100, 50, **host, args=given),
            event("Runtime", "cudaLaunchKernel", 110, 5, **host, args={"correlation": 5}),
            event(
                "Kernel", "sgemm", 120, 9, **stream,
                args=about
                | {
                    "correlation": 5,
                    "registers per thread": 57,
                    "shared memory": 16,
                    "grid": [1, 2, 3],
                    "block": [64, 1, 1],
                },
            ),
            event("Memcpy", "Memcpy HtoD (Pageable -> Device)", 130, 3, **stream,
                  args=about | {"correlation": 6, "bytes": 4096}),
            event("Memset", "Memset (Device)", 140, 1, **stream,
                  args=about | {"correlation": 7, "bytes": 64}),
        ], indent=1)
    )  # fmt: skip
    with closing(parse_chrome(path)) as trace:
        kernel, copy, fill = launches(trace)
        assert trace.op_paths[kernel["op_path"]] == "aten::mm"
    assert kernel["config"] == LaunchConfig((1, 2, 3), (64, 1, 1), 57, shared_bytes=16)
    assert (kernel["kernel"], kernel["kind"], kernel["api"]) == (
        "sgemm",
        "kernel",
        "cudaLaunchKernel",
    )
    assert (kernel["start_ns"], kernel["duration_ns"]) == (120_000, 9_000)
    assert (kernel["pid"], kernel["tid"]) == (67844, 4093687616)
    assert [(row["kind"], row["bytes"]) for row in (copy, fill)] == [
        ("memcpy", 4096),
        ("memset", 64),
    ]
