"""The Chrome trace: layout, order, exact times, constant memory, and a third-party reader."""

from __future__ import annotations

import io
import itertools
import json
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profharness.commands.export import (
    FIRST_TRACK,
    Section,
    in_order,
    write_chrome_trace,
)
from profharness.devices import Device
from profharness.rows import LaunchRow, RangeRow

BASE = 1_790_857_026_000_000_000
DEVICE = Device(0, "NVIDIA H200", 9, 0, 132, warp_size=32)


def launch(number: int, start_ns: int, duration_ns: int = 2001, **changes: Any) -> LaunchRow:
    values: dict[str, Any] = dict.fromkeys(LaunchRow._fields)
    values |= {
        "run": "r",
        "config": "b2-h8-s512-d64-fp16",
        "backend": "flash",
        "profiler": "torch",
        "kernel": "flash_fwd_kernel<64>",
        "kernel_short": "flash_fwd_kernel",
        "family": "flash",
        "grid_x": 4,
        "grid_y": 2,
        "grid_z": 8,
        "block_x": 128,
        "block_y": 1,
        "block_z": 1,
        "registers_per_thread": 255,
        "shared_bytes": 49152,
        "stream": 7,
        "device": 0,
        "start_ns": BASE + start_ns,
        "duration_ns": duration_ns,
        "kernel_kind": "kernel",
        "cell": "0",
        "iteration": 0,
        "api": "cudaLaunchKernel",
        "correlation": number,
        "pid": 440,
        "tid": 466,
        "launch_ns": BASE + start_ns - 500,
        "launch_id": number,
    }
    return LaunchRow(**(values | changes))


def outer(start_ns: int, duration_ns: int) -> RangeRow:
    return RangeRow(
        1, "torch", "profharness:0", BASE + start_ns, duration_ns, 440, 466, None, "0", 0
    )


def written(*sections: Section) -> dict[str, Any]:
    out = io.BytesIO()
    write_chrome_trace(out, sections, [DEVICE], "t")
    read: dict[str, Any] = json.loads(out.getvalue())
    return read


def complete(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == category]


def test_a_launch_has_all_its_columns_and_exact_times() -> None:
    trace = written(Section([launch(1, 1000)], [outer(0, 9007)]))
    (kernel,) = complete(trace, "kernel")
    assert (kernel["ts"], kernel["dur"]) == (1.0, 2.001)
    assert kernel["args"]["grid"] == [4, 2, 8]
    assert kernel["args"]["block"] == [128, 1, 1]
    assert kernel["args"]["registers per thread"] == 255
    assert kernel["args"]["shared memory"] == 49152
    assert {"stream": 7, "device": 0, "correlation": 1}.items() <= kernel["args"].items()
    (call,) = complete(trace, "cuda_runtime")
    assert call["args"]["correlation"] == 1
    assert (call["pid"], call["tid"], call["ts"]) == (440, 466, 0.5)
    (around,) = complete(trace, "user_annotation")
    assert (around["name"], around["ts"], around["dur"]) == ("profharness:0", 0.0, 9.007)
    assert trace["deviceProperties"][0]["numSms"] == 132


def test_a_launch_has_its_occupancy_and_counters() -> None:
    counters = {1: {"dram__bytes_read.sum": (4096.0, "byte"), "launch__waves": (0.5, "")}}
    section = Section([launch(1, 1000, profiler="ncu")], counters=lambda n: counters[n])
    (kernel,) = complete(written(section), "kernel")
    assert kernel["args"]["dram__bytes_read.sum [byte]"] == 4096
    assert kernel["args"]["launch__waves"] == 0.5
    assert kernel["args"]["theoretical occupancy %"] == 12.5
    assert kernel["args"]["occupancy limiter"] == "registers"


def test_ops_stand_around_their_launches() -> None:
    math = "aten::sdpa;aten::math"
    paths = (f"{math};aten::bmm", f"{math};aten::softmax", f"{math};aten::bmm", "aten::add")
    rows = [launch(n, 1000 * n, 100, op_path=path) for n, path in enumerate(paths, start=1)]
    trace = written(Section(rows, [outer(0, 9000)]))
    ops = {(e["name"], e["ts"]): e for e in complete(trace, "cpu_op")}
    assert [(name, start, op["dur"]) for (name, start), op in ops.items()] == [
        ("aten::sdpa", 0.5, 2.0),
        ("aten::math", 0.5, 2.0),
        ("aten::bmm", 0.5, 0.0),
        ("aten::softmax", 1.5, 0.0),
        ("aten::bmm", 2.5, 0.0),
        ("aten::add", 3.5, 0.0),
    ]
    assert {(op["pid"], op["tid"]) for op in ops.values()} == {(440, 466)}
    assert ops["aten::math", 0.5]["args"]["launches"] == 3
    assert "first launch" in ops["aten::math", 0.5]["args"]["extent"]
    places = [(e["cat"], e["name"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert places.index(("cpu_op", "aten::bmm")) < places.index(
        ("cuda_runtime", "cudaLaunchKernel")
    )
    out = io.BytesIO()
    assert write_chrome_trace(out, [Section(rows)]) == len(rows)


def test_two_calls_are_two_ops() -> None:
    rows = [launch(n, 1000 * n, 100, op_path="aten::sdpa", iteration=n // 2) for n in (0, 1, 2, 3)]
    ops = complete(written(Section(rows, [outer(0, 9000)])), "cpu_op")
    assert [(op["ts"], op["dur"]) for op in ops] == [(0.0, 1.0), (2.0, 1.0)]


def test_a_thread_that_nobody_recorded_is_none() -> None:
    unknown = outer(0, 9000)._replace(tid=-1)
    events = written(Section([launch(1, 1000, tid=None, api=None)], [unknown]))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert "ranges of an unrecorded thread" in names
    assert all(event["tid"] >= 0 for event in events)


def test_a_launch_without_a_time_says_so() -> None:
    rows = [launch(1, 1000, profiler="ncu")._replace(duration_ns=None), launch(2, 1000)]
    timed, untimed = complete(written(Section(rows)), "kernel")
    assert (untimed["ts"], untimed["dur"]) == (0.5, 0)
    assert untimed["args"]["duration"] == "not measured"
    assert (timed["dur"], "duration" in timed["args"]) == (2.001, False)


def test_every_cell_has_a_named_track() -> None:
    rows = [launch(1, 1000), launch(2, 9000, backend="math", cell="1")]
    events = written(Section(rows))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[FIRST_TRACK] == "b2-h8-s512-d64-fp16 flash (torch)"
    assert names[FIRST_TRACK + 1] == "b2-h8-s512-d64-fp16 math (torch)"
    assert names[466] == "thread 466"


def test_a_graph_launch_is_one_call_with_many_kernels() -> None:
    rows = [launch(n, 1000 * n, 100, correlation=9, launch_ns=BASE) for n in (1, 2, 3)]
    trace = written(Section(rows))
    assert len(complete(trace, "cuda_runtime")) == 1
    assert len(complete(trace, "kernel")) == 3


def test_each_profiler_starts_at_zero() -> None:
    later = launch(2, 10**15, profiler="nsys")
    trace = written(Section([launch(1, 1000)]), Section([later]))
    assert [event["ts"] for event in complete(trace, "cuda_runtime")] == [0.0, 0.0]


def test_named_sections_share_no_process_and_no_track() -> None:
    sections = [
        Section([launch(n, 1000 * n, profiler=name)], [outer(0, 9000)], name)
        for n, name in enumerate(("torch", "nsys"), start=1)
    ]
    events = written(*sections)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == [
        "nsys: GPU 0 NVIDIA H200",
        "nsys: process 440",
        "torch: GPU 0 NVIDIA H200",
        "torch: process 440",
    ]
    owner: dict[int, str] = {}
    for event in events:
        profiler = names[event["pid"]].partition(":")[0]
        if event["name"] != "process_name":
            assert owner.setdefault(event["tid"], profiler) == profiler
    starts = [e["ts"] for e in events if e.get("cat") == "user_annotation"]
    assert starts == [0.0, 0.0]


def _spans(trace: dict[str, Any], category: str) -> dict[int, list[tuple[int, int]]]:
    """Return (start, end) in ns of all events, by track."""
    tracks = defaultdict(list)
    for event in complete(trace, category):
        start = round(event["ts"] * 1000)
        tracks[event["tid"]].append((start, start + round(event["dur"] * 1000)))
    return tracks


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_ranges_of_a_track_nest(times: list[tuple[int, int]]) -> None:
    ordered = sorted(times, key=lambda each: (each[0], -each[1]))
    tracks = _spans(written(Section([], [outer(*each) for each in ordered])), "user_annotation")
    assert sum(map(len, tracks.values())) == len(times)
    for track in tracks.values():
        for (start, end), (other_start, other_end) in itertools.permutations(track, 2):
            assert not start < other_start < end or other_end <= end


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), max_size=40))
def test_tracks_are_sorted_and_never_overlap(times: list[tuple[int, int]]) -> None:
    rows = [launch(n, start, duration) for n, (start, duration) in enumerate(times)]
    tracks = _spans(written(Section(rows)), "kernel")
    assert sum(map(len, tracks.values())) == len(times)
    for track in tracks.values():
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(track))


def test_rows_are_streamed() -> None:
    taken = 0

    def rows() -> Any:
        nonlocal taken
        for taken in range(1, 101):
            yield (taken, 0, taken, {})

    first = next(iter(in_order(rows(), window=10)))
    assert first[0] == 1
    assert taken == 11


@pytest.mark.filterwarnings("ignore")  # its own use of pandas is deprecated
def test_holistic_trace_analysis_reads_it(tmp_path: Path) -> None:
    from hta.common.trace_parser import parse_trace_dataframe
    from hta.configs.parser_config import ParserConfig

    logging.getLogger("hta").setLevel(logging.ERROR)
    rows = [launch(n, 10_000 * n, 5000) for n in range(1, 6)]
    path = tmp_path / "trace.json"
    with path.open("wb") as file:
        write_chrome_trace(file, [Section(rows, [outer(0, 90_000)])], devices=[DEVICE])
    _, frame, symbols = parse_trace_dataframe(str(path), ParserConfig(ParserConfig.ARGS_MINIMUM))
    names = symbols.get_sym_table()
    categories = [names[index] for index in frame["cat"]]
    assert categories.count("kernel") == 5
    assert categories.count("cuda_runtime") == 5
    launched = frame[[category == "kernel" for category in categories]]
    assert sorted(launched["correlation"]) == [1, 2, 3, 4, 5]
    assert set(launched["stream"]) == {7}
