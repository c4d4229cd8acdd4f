"""Compare the nsys parser with the same program's Kineto trace and with a naive search, in every schema."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nsys_make import (
    AUTOGRAD,
    DATA,
    FLASH,
    FLASH_CANONICAL,
    FLASH_NSYS,
    MAIN,
    PID,
    VERSIONS,
    Maker,
    unpacked,
)

from profharness.trace import NONE, LaunchConfig, Trace
from profharness.traces.chrome import parse_chrome
from profharness.traces.nsys import parse_nsys

Row = dict[str, Any]


@contextmanager
def parsed(path: Path) -> Iterator[Trace]:
    with closing(parse_nsys(path)) as trace:
        yield trace


def launches(trace: Trace) -> list[Row]:
    """Return every launch with names in place of indices, sorted by launch and start."""
    found = []
    for batch in trace.batches():
        for i in range(len(batch.kernel)):
            row: Row = {name: int(getattr(batch, name)[i]) for name in batch.__slots__}
            row["kind"] = trace.kernel_kinds[row["kernel"]]
            row["kernel"] = trace.kernels[row["kernel"]]
            row["config"] = trace.launch_configs[row["launch_config"]]
            for name in ("range", "cell_range"):
                row[name] = trace.ranges[row[name]].name if row[name] >= 0 else None
            row["api"] = trace.apis[row["api"]] if row["api"] >= 0 else None
            found.append(row)
    return sorted(found, key=lambda row: (row["launch_ns"], row["start_ns"]))


def facts(row: Row) -> tuple[Any, ...]:
    """Return the facts that two profilers must agree on."""
    config: LaunchConfig = row["config"]
    shape = (config.grid, config.block, config.registers_per_thread, config.shared_bytes)
    transfer = row["kind"] != "kernel"
    return (
        row["range"], row["kind"], row["kernel"], None if transfer else shape, row["api"],
        row["bytes"], row["device"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nsys_h200.sqlite.gz", tmp_path_factory.mktemp("nsys"))


@pytest.fixture(scope="module")
def startend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nsys_h200_startend.sqlite.gz", tmp_path_factory.mktemp("nsys"))


def test_an_export_equals_the_kineto_trace_of_the_same_program(h200: Path) -> None:
    """Kineto's program made every call three times, nsys's once."""
    with parsed(h200) as trace, closing(parse_chrome(DATA / "kineto_h200.json.gz")) as kineto:
        mine = Counter(facts(row) for row in launches(trace) if row["range"])
        theirs = Counter(facts(row) for row in launches(kineto) if row["range"])
        assert sum(mine.values()) == 128
        assert {fact: 3 * count for fact, count in mine.items()} == theirs
        assert trace.devices == kineto.devices


def test_the_h200_export_has_times_and_environment(h200: Path) -> None:
    with parsed(h200) as trace:
        rows = launches(trace)
        assert (trace.profiler, trace.num_launches, trace.skipped) == ("nsys", 269, 0)
        assert trace.warnings == ()
        assert trace.environment == {
            "nsys_version": "2025.3.2.0",
            "nsys_schema_version": "3.20.3",
        }
        first = rows[0]
        assert first["start_ns"] == 1795259683722435887 + 3645177577
        assert first["duration_ns"] == 5152
        assert first["launch_ns"] < first["start_ns"]
        assert (first["pid"], first["tid"], first["correlation"]) == (488, 488, 157)
        assert first["config"].static_shared_bytes == 0
        splitkv = [r["config"] for r in rows if "flash_fwd_splitkv_kernel" in r["kernel"]]
        assert {(c.static_shared_bytes, c.dynamic_shared_bytes) for c in splitkv} == {
            (0, 73728),
            (0, 81920),
        }
        assert Counter(row["kind"] for row in rows) == {"kernel": 253, "memset": 16}


def test_start_end_ranges_include_the_backward(startend: Path) -> None:
    """Each cell has as many launches, autograd's included, as ncu profiled in start/end ranges.
    Ranges of a foreign domain have its name as prefix, those of the default domain and ours do
    not.
    """
    with parsed(startend) as trace:
        rows = [row for row in launches(trace) if row["range"]]
        kernels = [row for row in rows if row["kind"] == "kernel"]
        assert len(kernels) == 79
        assert len({row["tid"] for row in kernels}) == 2
        assert all(row["range"].startswith("py:") for row in rows)
        backward = [row for row in kernels if "bwd" in row["kernel"]]
        assert backward
        assert all("-bwd/" in row["range"] for row in backward)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "full"])
def test_every_schema_gives_the_same_result(version: str, lazy: bool, tmp_path: Path) -> None:
    maker = Maker(version)
    maker.gpu()
    maker.nvtx("profharness:c1", 100, 900)
    maker.launch(200)
    maker.launch(
        300, table="MEMCPY", api="cudaMemcpyAsync_v3020", bytes=64, copyKind=1, srcKind=1, dstKind=2
    )
    maker.launch(400, table="MEMSET", api="cudaMemsetAsync_v3020", bytes=32, memKind=2)
    maker.launch(950, thread=AUTOGRAD)
    with parsed(maker.write(tmp_path / "t.sqlite", lazy=lazy)) as trace:
        assert trace.environment == {"nsys_version": f"{version}.0"}
        assert trace.devices[0].max_threads_per_sm == 2048
        kernel, copy, fill, late = launches(trace)
    assert kernel["kernel"] == FLASH_CANONICAL
    assert kernel["config"] == LaunchConfig((8, 4, 2), (128, 1, 1), 168, 16, 49152, 49168)
    assert (kernel["api"], kernel["bytes"], kernel["graph_node"]) == (
        "cudaLaunchKernel",
        NONE,
        NONE,
    )
    assert (copy["kernel"], copy["kind"]) == ("Memcpy HtoD (Pinned -> Device)", "memcpy")
    assert (copy["bytes"], copy["config"]) == (64, LaunchConfig(None, None))
    assert (fill["kernel"], fill["kind"], fill["bytes"]) == ("Memset (Device)", "memset", 32)
    for row in (kernel, copy, fill):
        assert row["range"] == row["cell_range"] == "profharness:c1"
    assert (late["range"], late["cell_range"]) == (None, None)


def test_columns_and_tables_may_be_missing(tmp_path: Path) -> None:
    maker = Maker()
    maker.launch(200)
    path = maker.write(
        tmp_path / "t.sqlite",
        without=[
            "META_DATA_EXPORT", "CUPTI_ACTIVITY_KIND_KERNEL.mangledName",
            "CUPTI_ACTIVITY_KIND_KERNEL.gridZ", "CUPTI_ACTIVITY_KIND_KERNEL.globalPid",
            "CUPTI_ACTIVITY_KIND_KERNEL.dynamicSharedMemory",
        ],
    )  # fmt: skip
    with parsed(path) as trace:
        (row,) = launches(trace)
        assert trace.devices == ()
        assert row["kernel"] == FLASH_NSYS
        assert row["config"] == LaunchConfig(None, (128, 1, 1), 168, 16, None, None)
        assert (row["api"], row["launch_ns"]) == ("cudaLaunchKernel", 200)


def test_tables_may_have_a_version_suffix(tmp_path: Path) -> None:
    maker = Maker("2026.2.1")
    maker.nvtx("mine", 100, 900)
    maker.launch(200)
    path = maker.write(tmp_path / "t.sqlite", rename={"NVTX_EVENTS": "NVTX_EVENTS_V2"})
    with parsed(path) as trace:
        assert [row["range"] for row in launches(trace)] == ["mine"]


def test_a_range_contains_the_call_not_the_kernel(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("outer", 100, 5000)
    maker.nvtx("inner", 190, 250)
    maker.nvtx("later", 1100, 2000)  # open when the kernel runs
    maker.launch(200)
    maker.launch(260)
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        assert [row["range"] for row in launches(trace)] == ["inner", "outer"]
        parents = [(r.name, r.parent) for r in trace.ranges]
        assert parents == [("outer", None), ("inner", 0), ("later", 0)]
        assert (trace.ranges[1].pid, trace.ranges[1].tid) == (PID, PID)


def test_an_autograd_thread_gets_the_cell_and_keeps_its_own_range(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("profharness:c1", 100, 900, eventType=60, rangeId=1)
    maker.nvtx("backward", 300, 400, globalTid=AUTOGRAD)
    other = (2 << 48) | (999 << 24)
    maker.launch(200, thread=AUTOGRAD)
    maker.launch(350, thread=AUTOGRAD)
    maker.launch(500, thread=other | 999)
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        rows = launches(trace)
        assert [row["range"] for row in rows] == ["profharness:c1", "backward", None]
        assert [row["cell_range"] for row in rows] == ["profharness:c1", "profharness:c1", None]


def test_the_only_thread_with_a_push_pop_range_provides_it(
    tmp_path: Path,
) -> None:
    maker = Maker()
    maker.nvtx("push", 100, 900)
    maker.nvtx("inside", 150, 250)
    maker.nvtx("wide", 300, 900, eventType=60)
    maker.nvtx("other", 910, 990)
    maker.nvtx("third", 920, 990, globalTid=AUTOGRAD + 2)
    for t in (200, 260, 350, 915, 930):
        maker.launch(t, thread=AUTOGRAD)
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        found = [row["range"] for row in launches(trace)]
    assert found == ["inside", "push", "wide", "other", None]


def test_correlation_ids_are_per_process(tmp_path: Path) -> None:
    maker = Maker()
    second = (1 << 48) | (700 << 24) | 700
    maker.nvtx("first", 0, 900)
    maker.nvtx("second", 0, 900, globalTid=second)
    maker.launch(200, thread=second, correlation=1)
    maker.launch(100, correlation=1)
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        rows = launches(trace)
        assert [(row["range"], row["pid"]) for row in rows] == [("first", 488), ("second", 700)]
        assert [row["correlation"] for row in rows] == [1, 1]


def test_domains_and_registered_strings_are_resolved(tmp_path: Path) -> None:
    maker = Maker()
    for number, name in ((1, "profharness"), (2, "CCCL")):
        maker.nvtx(name, 0, None, eventType=75, domainId=number)
    for domain in (None, 0, 1, 2, 3):
        maker.nvtx("", 100, 900, textId=maker.string(f"r{domain}"), domainId=domain)
    maker.launch(200)
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        assert sorted(r.name for r in trace.ranges) == ["CCCL:r2", "r0", "r1", "r3", "rNone"]


def test_a_range_never_closed_ends_with_the_trace(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("open", 100, None)
    maker.nvtx("ended elsewhere", 100, 300, eventType=60, endGlobalTid=AUTOGRAD)
    maker.launch(200)
    maker.launch(5000)
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        ends = {r.name: r.start_ns + r.duration_ns for r in trace.ranges}
        assert ends == {"open": 6500, "ended elsewhere": 300}
        assert launches(trace)[1]["range"] == "open"


def test_graph_kernels_belong_to_the_graph_launch(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("step", 100, 900)
    number = maker.launch(200, api="cudaGraphLaunch_v10000", graphNodeId=11)
    maker.launch(205, api=None, correlation=number, graphNodeId=12)
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        rows = launches(trace)
        assert [row["graph_node"] for row in rows] == [11, 12]
        assert [(row["range"], row["launch_ns"]) for row in rows] == [("step", 200)] * 2
        assert {row["api"] for row in rows} == {"cudaGraphLaunch"}


def test_launches_without_a_call_have_no_range(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("profharness:c1", 100, 9000)
    maker.launch(200)
    maker.launch(300, api=None)
    maker.add(
        "CUPTI_ACTIVITY_KIND_MEMCPY", start=400, end=500, deviceId=0, streamId=7, copyKind=11,
        srcKind=4, dstKind=4, bytes=1,
    )  # fmt: skip
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        lost = [row for row in launches(trace) if row["range"] is None]
        assert [row["launch_ns"] for row in lost] == [NONE, NONE]
        assert [row["pid"] for row in lost] == [NONE, NONE]
        assert any(text.startswith("2 of 3 launches have no API call") for text in trace.warnings)


def test_devices_have_the_index_of_cuda(tmp_path: Path) -> None:
    maker = Maker()
    maker.gpu(0, name="first")
    maker.gpu(1, name="second")
    maker.add("TARGET_INFO_CUDA_DEVICE", gpuId=1, cudaId=0, pid=PID)
    maker.launch(200)
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        assert [(device.index, device.name) for device in trace.devices] == [(0, "second")]


def test_diagnostics_are_reported_if_there_are_no_kernels(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("mine", 100, 900)
    told = ["No CUDA events collected. Does the process use CUDA?", "lost /home/ann/x", "USER=ann"]
    for text in told:
        maker.add("DIAGNOSTIC_EVENT", severity=2, text=text)
    maker.add("DIAGNOSTIC_EVENT", severity=1, text="Profiling has started.")
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        assert trace.num_launches == 0
        assert list(trace.batches()) == []
        assert [r.name for r in trace.ranges] == ["mine"]
        assert trace.warnings[-2:] == (
            "the export contains no kernel, memcpy or memset",
            "nsys reports: No CUDA events collected. Does the process use CUDA?",
        )


def test_the_file_is_not_changed(tmp_path: Path) -> None:
    maker = Maker()
    maker.launch(200, mangled=FLASH, thread=MAIN)
    path = maker.write(tmp_path / "t.sqlite")
    before = path.read_bytes()
    path.chmod(0o444)
    with parsed(path) as trace:
        assert trace.num_launches == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.sqlite"]
    assert path.read_bytes() == before


THREADS = [(1 << 48) | (pid << 24) | tid for pid in (5, 6) for tid in (5, 9)]
NAMES = ("profharness:a", "profharness:b", "x", "y")
APIS = ("cudaLaunchKernel_v7000", "cudaGraphLaunch_v10000", "cudaSomethingNew_v13000", None)

ranges = st.lists(
    st.tuples(
        st.sampled_from(NAMES), st.integers(0, 60), st.integers(1, 40), st.sampled_from(THREADS),
        st.sampled_from((59, 60)),
    ),
    max_size=12,
    unique_by=lambda row: (row[1], row[3] >> 24),  # otherwise the innermost range is ambiguous
)  # fmt: skip
calls = st.lists(
    st.tuples(st.integers(0, 100), st.sampled_from(THREADS), st.sampled_from(APIS)),
    min_size=1, max_size=12,
)  # fmt: skip


def naive(rows: Sequence[tuple[Any, ...]], t: int, thread: int) -> tuple[str | None, str | None]:
    """Return range and cell_range by checking every range."""
    around = sorted((r for r in rows if r[1] <= t < r[1] + r[2]), key=lambda row: row[1])
    process = [row for row in around if row[3] >> 24 == thread >> 24]
    own = [row for row in process if row[3] == thread]
    cells = [row for row in own if row[0].startswith("profharness:")]
    cells = cells or [row for row in process if row[0].startswith("profharness:")]
    wide = [row for row in process if row[4] == 60]
    only = process if len({row[3] for row in process}) == 1 else []
    inner = own or cells or wide or only
    return (inner[-1][0] if inner else None), (cells[-1][0] if cells else None)


@settings(max_examples=80)
@given(told=ranges, made=calls, high=st.sampled_from((0, 1 << 31, 1 << 41)))
def test_ranges_equal_those_of_a_naive_search(
    tmp_path_factory: pytest.TempPathFactory,
    told: list[tuple[str, int, int, int, int]],
    made: list[tuple[int, int, str | None]],
    high: int,
) -> None:
    """`high`: correlation ids too large for flags, and invalid ones."""
    maker = Maker()
    for name, start, duration, thread, kind in told:
        maker.nvtx(name, start, start + duration, globalTid=thread, eventType=kind)
    expected = []
    for number, (t, thread, api) in enumerate(made):
        maker.launch(t, thread=thread, api=api, correlation=high + number, streamId=number)
        known = api is not None and high < 1 << 40
        expected.append(naive(told, t, thread) if known else (None, None))
    path = maker.write(tmp_path_factory.mktemp("made") / "t.sqlite")
    found: dict[int, tuple[str | None, str | None]] = {}
    with closing(parse_nsys(path)) as trace:
        names = {index: one.name for index, one in enumerate(trace.ranges)}
        for batch in trace.batches():
            for i, stream in enumerate(batch.stream.tolist()):
                found[stream] = (
                    names.get(int(batch.range[i])),
                    names.get(int(batch.cell_range[i])),
                )
    assert [found[number] for number in range(len(made))] == expected


def test_steps_that_nvtx_nested_follow_each_other() -> None:
    """In the file, step 0 lasts to the end of step 1, and step 1 only 35 µs."""
    folder = Path(__file__).parents[2] / "traces" / "models" / "llama_train_nsys"
    with closing(parse_nsys(folder / "nsys-1.sqlite")) as trace:
        ranges = {row.name: row for row in trace.ranges}
        counts = Counter(row["range"] for row in launches(trace))
    first, second = ranges["ProfilerStep#0"], ranges["ProfilerStep#1"]
    assert first.start_ns + first.duration_ns == second.start_ns
    assert second.duration_ns > 25_000_000
    assert counts["ProfilerStep#0"] == counts["ProfilerStep#1"] > 0
