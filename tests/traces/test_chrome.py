"""Compare the Kineto parser with the naive reference, in every layout and with every split."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from reference import actual_rows, expected_rows, load, ordered_rows, told

from profharness.trace import Trace
from profharness.traces import chrome_events
from profharness.traces.chrome import parse_chrome
from profharness.traces.chrome_events import Collector

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "kineto_h200.json.gz"
STACKS = ROOT / "traces" / "models" / "llama_train.json.gz"
SMALL: dict[str, int] = {"chunk_rows": 50, "slice_rows": 100}
lasting_rows = cache(expected_rows)  # for files that no test changes


@contextmanager
def parsed(path: Path, **options: Any) -> Iterator[Trace]:
    with closing(parse_chrome(path, **options)) as trace:
        yield trace


@pytest.fixture(scope="module")
def cpu_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    path = tmp_path_factory.mktemp("cpu") / "cpu.json"
    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    # torch 2.11 warns without acc_events
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as prof:
        for cell in ("c1", "c2"):
            with record_function(f"profharness:{cell}"):
                out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
                out.sum().backward()
    prof.export_chrome_trace(str(path))
    return path


LAYOUTS: dict[str, Callable[[Any], str]] = {
    "compact": lambda t: json.dumps(t, separators=(",", ":")),
    "default": json.dumps,
    "pretty": lambda t: json.dumps(t, indent=2),
    "array": lambda t: json.dumps(t["traceEvents"], indent=1),
    "events-first": lambda t: json.dumps(
        {"traceEvents": t["traceEvents"], **t, "more": [{"a": i} for i in range(9000)]}, indent=1
    ),
}


@pytest.mark.parametrize("options", [{}, SMALL], ids=["whole", "parts"])
def test_h200_equals_the_reference(options: dict[str, int]) -> None:
    with parsed(DATA, **options) as trace:
        assert actual_rows(trace) == lasting_rows(DATA)
        assert trace.skipped == 0
        assert trace.kernel_kinds.count("kernel") == 49
        kernels = [row for row in actual_rows(trace) if row[1] == "kernel"]
        assert len(kernels) == 366
        assert all(row[9] is not None and row[6] for row in kernels)
        assert trace.num_launches == len(actual_rows(trace)) == 384


@pytest.mark.parametrize("options", [{}, {**SMALL, "slice_rows": 3}])
def test_a_cpu_trace_gives_the_innermost_ops(cpu_trace: Path, options: dict[str, int]) -> None:
    with parsed(cpu_trace, **options) as trace:
        assert actual_rows(trace) == lasting_rows(cpu_trace)
        assert set(trace.kernel_kinds) == {"op"}
        cells = {row[8] for row in actual_rows(trace)}
        assert {"profharness:c1", "profharness:c2"} <= cells
        names = [r.name for r in trace.ranges]
        assert names.count("profharness:c1") == 1


def spelled(folder: Path) -> Path:
    """Return a trace in which each event has other white space than the previous one."""
    colons = itertools.cycle([": ", ":", ":  ", "\n:\t"])
    header, texts = load(DATA), []
    for row, colon in zip(header.pop("traceEvents"), colons, strict=False):
        texts.append(json.dumps(row, separators=(", ", colon), default=float))
    path = folder / "trace.json"
    head = json.dumps(header, default=float).removesuffix("}")
    path.write_text(f'{head}, "traceEvents": [\n' + ",\n".join(texts) + "]}")
    return path


@pytest.mark.parametrize("source", ["2.11", "stacks", "installed", "spelled"])
def test_the_scanner_and_the_decoder_agree(
    source: str, cpu_trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"2.11": DATA, "stacks": STACKS, "installed": cpu_trace}
    path = known.get(source) or spelled(tmp_path)
    left: list[Any] = []
    add = Collector.add

    def counted(collector: Collector, events: list[Any]) -> None:
        left.extend(event for event in events if type(event) in chrome_events.CLASSES["op"])
        add(collector, events)

    monkeypatch.setattr(Collector, "add", counted)
    scanned = told(path)
    assert not left  # the scanner was compiled, and read all events
    monkeypatch.setattr(chrome_events, "Scanner", None)
    assert told(path) == scanned


def test_the_scanner_works_without_avx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force"]
    command += ["--build-lib", str(tmp_path), "--build-temp", str(tmp_path / "made")]
    flags = f"{os.environ.get('CFLAGS', '')} -DNARROW"
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"CFLAGS": flags})
    (built,) = tmp_path.rglob("_scanner*.so")
    spec = importlib.util.spec_from_file_location("_scanner", built)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    wide = told(DATA)
    monkeypatch.setattr(chrome_events, "Scanner", module.Scanner)
    assert told(DATA) == wide


def test_a_scanner_of_an_older_source_is_not_used() -> None:
    program = """
import sys, types
old = sys.modules["profharness.traces._scanner"] = types.ModuleType("_scanner")
old.Scanner = object
from profharness.traces import Scanner
print(Scanner is not None)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(layout: str, tmp_path: Path) -> None:
    native = load(DATA)
    text = LAYOUTS[layout](json.loads(json.dumps(native, default=float)))
    path = tmp_path / "trace.json"
    path.write_text(text)
    with parsed(path, **SMALL) as trace:
        assert actual_rows(trace) == expected_rows(path)
        assert trace.skipped == 0
        assert len(trace.devices) == (0 if layout == "array" else 1)


def test_the_header_keeps_no_host_and_no_path() -> None:
    with parsed(DATA) as trace:
        assert set(trace.environment) == {
            "schemaVersion", "trace_id", "record_shapes", "cuda_runtime_version",
            "cuda_driver_version", "cupti_version",
        }  # fmt: skip
        device = trace.devices[0]
        assert (device.name, device.num_sms, device.compute_major) == ("NVIDIA H200", 132, 9)
        assert device.shared_bytes_per_block_optin == 232448


def event(cat: str, name: str, ts: float | str, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, **more}


def write(path: Path, events: list[dict[str, Any]], **keys: Any) -> Path:
    path.write_text(json.dumps({**keys, "traceEvents": events}, indent=1))
    return path


def test_a_graph_replay_keeps_every_kernel(tmp_path: Path) -> None:
    kernels = [
        event("kernel", f"k{i}", 10 + i, 1, args={"correlation": 7, "graph node id": i})
        for i in range(4)
    ]
    launch = event("cuda_runtime", "cudaGraphLaunch", 1, 2, args={"correlation": 7})
    lost = event("kernel", "lost", 50, 1, args={"correlation": 8})
    path = write(tmp_path / "t.json", [*kernels, launch, lost], baseTimeNanoseconds=10**18)
    with parsed(path) as trace:
        rows = ordered_rows(trace)
        assert actual_rows(trace) == expected_rows(path)
        assert [row[9] for row in rows] == ["cudaGraphLaunch"] * 4 + [None]
        assert [row[16] for row in rows] == [-1, 1, 2, 3, -1]
        assert rows[4][12] == -1


def test_an_autograd_thread_falls_back_to_the_cell_of_the_process(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "profharness:c1", 0, 100),
        event("cuda_driver", "cuLaunchKernel", 50, 1, args={"correlation": 3}) | {"tid": 2},
        event("cuda_driver", "cuLaunchKernel", 51, 1, args={"correlation": 4}) | {"pid": 9},
        event("kernel", "k", 60, 1, args={"correlation": 3}),
        event("kernel", "k", 61, 1, args={"correlation": 4}),
    ]
    with parsed(write(tmp_path / "t.json", events)) as trace:
        assert [row[7:9] for row in ordered_rows(trace)] == [("profharness:c1",) * 2, (None, None)]


@pytest.mark.parametrize("ts", ["9007199254740.993", "98765432109876.543", "4400546794635.281"])
def test_times_are_exact(ts: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [event("kernel", "k", 1, 1, args={})])
    path.write_text(path.read_text().replace('"ts": 1', f'"ts": {ts}'))
    with parsed(path) as trace:
        (batch,) = trace.batches()
        assert int(batch.start_ns[0]) == int(ts.replace(".", ""))


def test_an_unknown_category_with_a_correlation_is_a_launch(tmp_path: Path) -> None:
    events = [
        event("musa_runtime", "launch", 1, 1, args={"correlation": 5}),
        event("kernel", "k", 2, 1, args={"correlation": 5}),
        event("whatever", "x", 2, 1, args={"stream": 1, "correlation": 5}),
    ]
    with parsed(write(tmp_path / "t.json", events)) as trace:
        assert trace.apis == ["launch"]
        assert trace.skipped == 0
