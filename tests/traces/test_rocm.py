"""rocpd databases of rocprofv3: launches, ranges, copies, counters, and wrong files."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rocm_make import FACTS, HSA, MARKER, NAME, OTHER, PID, RCCL, ROCPD, TID, Rocpd, launches

from profharness.errors import TraceFormatError
from profharness.store import open_store
from profharness.store.ingest import ingest_path
from profharness.store.sources import find_sources
from profharness.trace import NONE, LaunchConfig, Trace
from profharness.traces import open_trace


@pytest.fixture
def opened() -> Iterator[Callable[[Path], Trace]]:
    traces = []

    def parse(path: Path) -> Trace:
        traces.append(open_trace(path))
        return traces[-1]

    yield parse
    for trace in traces:
        trace.close()


Open = Callable[[Path], Trace]


def test_a_dispatch_has_blocks_registers_and_memory(tmp_path: Path, opened: Open) -> None:
    maker = Rocpd()
    maker.launch(77)
    trace = opened(maker.write(tmp_path / "1_results.db"))
    (row,) = launches(trace)
    assert trace.profiler == "rocprofv3"
    assert trace.environment == {"rocpd_schema_version": 3}
    assert trace.warnings == ()
    assert row["config"] == LaunchConfig(
        (2, 64, 3), (256, 2, 1), 128, 1024, 64512, 65536, 64, 96, 16
    )
    assert (row["kernel"], row["kind"], row["api"]) == (NAME, "kernel", "hipLaunchKernel")
    assert (row["start_ns"], row["duration_ns"], row["launch_ns"]) == (1000, 70, 900)
    assert (row["device"], row["stream"], row["correlation"]) == (0, 3, 77)
    assert (row["pid"], row["tid"]) == (PID, TID)


def test_the_gpu_is_described_by_its_agent(tmp_path: Path, opened: Open) -> None:
    maker = Rocpd()
    maker.launch(77)
    (device,) = opened(maker.write(tmp_path / "t.db")).devices
    assert (device.index, device.name) == (0, "AMD Instinct MI300X")
    assert (device.compute_major, device.compute_minor, device.num_sms) == (9, 4, 304)
    assert (device.warp_size, device.max_threads_per_sm) == (64, 2048)
    assert (device.shared_bytes_per_block, device.total_memory_bytes) == (65536, 206141652992)


def test_roctx_ranges_contain_launches(tmp_path: Path, opened: Open) -> None:
    maker = Rocpd()
    maker.launch(1, 1000)
    maker.launch(2, 3000)
    maker.launch(3, 5000)
    maker.region(MARKER, 11, 800, 1500, 10, message="forward")
    maker.region(MARKER, 11, 2800, 3500, 11, message="step, seq = 5")
    maker.region(MARKER, 12, 4000, 6000, 12, message="loop")
    maker.region(MARKER, 11, 4500, 4600, 13)  # no message, so its name is unknown
    maker.region(RCCL, 15, 100, 200, 14)
    trace = opened(maker.write(tmp_path / "t.db"))
    assert [row["range"] for row in launches(trace)] == ["forward", "step, seq = 5", "loop"]
    assert trace.warnings == ("regions in the categories RCCL_API are not read",)


def test_a_copy_has_a_direction_and_bytes(tmp_path: Path, opened: Open) -> None:
    maker = Rocpd()
    maker.copy(5, 2000, 4096)
    (row,) = launches(opened(maker.write(tmp_path / "t.db")))
    assert (row["kernel"], row["kind"]) == ("Memcpy HtoD (Host -> Device)", "memcpy")
    assert (row["bytes"], row["device"], row["api"]) == (4096, 0, "hipMemcpyAsync")
    assert row["config"] == LaunchConfig(None, None)


def test_counters_are_summed_over_instances(tmp_path: Path) -> None:
    maker = Rocpd()
    maker.launch(1, 1000)
    event = maker.launch(2, 3000)
    maker.add("info_pmc", id=4, name="SQ_WAVES", units="")
    for value in (3.0, 4.5):
        maker.add("pmc_event", event_id=event, pmc_id=4, value=value)
    maker.add("pmc_event", event_id=9999, pmc_id=4, value=1.0)
    ingest_path(tmp_path / "s.db", maker.write(tmp_path / "t.db"))
    with closing(sqlite3.connect(tmp_path / "s.db")) as db:
        rows = db.execute(
            "SELECT l.start_ns, m.name, m.value FROM metrics m JOIN launches l ON l.id = launch_id"
        ).fetchall()
    assert rows == [(3000, "SQ_WAVES", 7.5)]


def test_merged_recordings_are_one_trace(tmp_path: Path, opened: Open) -> None:
    first, second = Rocpd(), Rocpd(OTHER, pid=29)
    first.launch(1, 1000)
    second.launch(1, 2000, agent_id=3, group_segment_size=0)
    second.add("info_agent", id=3, type="GPU", type_index=1, name="gfx90a", product_name="")
    path = second.write(first.write(tmp_path / "t.db"))
    trace = opened(path)
    rows = launches(trace)
    assert [(row["pid"], row["device"], row["start_ns"]) for row in rows] == [
        (PID, 0, 1000),
        (29, 1, 2000),
    ]
    # the static size is larger than the whole, so the dynamic size is unknown
    assert rows[1]["config"].dynamic_shared_bytes is None


def test_calls_of_hsa_launch_kernels_too(tmp_path: Path, opened: Open) -> None:
    maker = Rocpd()
    maker.launch(1)
    maker.rows["event"][0]["category_id"] = HSA
    assert launches(opened(maker.write(tmp_path / "t.db")))[0]["api"] == "hipLaunchKernel"


def test_unknown_values_are_not_zero(tmp_path: Path, opened: Open) -> None:
    lacking = {name: columns for name, columns in ROCPD.items() if "info" not in name}
    lacking["kernel_dispatch"] = "id pid agent_id kernel_id start end event_id"
    maker = Rocpd(tables=dict.fromkeys(ROCPD, "id") | ROCPD)
    maker.launch(1)
    maker.columns = {name: columns.split() for name, columns in lacking.items()}
    trace = opened(maker.write(tmp_path / "t.db"))
    (row,) = launches(trace)
    assert row["config"] == LaunchConfig(None, None)
    assert (row["kernel"], row["stream"]) == ("unknown", NONE)
    text = "\n".join(trace.warnings)
    assert "has no column stream_id, private_segment_size" in text
    assert "1 of 1 launches have no name in the file" in text


def test_rows_that_cannot_be_read_are_counted(tmp_path: Path, opened: Open) -> None:
    maker = Rocpd()
    maker.launch(1, 1000)
    maker.launch(2, 2000, end=None)
    maker.launch(3, 3000, end=10)
    maker.launch(4, 4000, end="late")
    maker.launch(5, 5000, end=1 << 62)
    trace = opened(maker.write(tmp_path / "t.db"))
    assert trace.num_launches == 1
    assert trace.skipped == 4
    assert any("4 rows of rocpd_kernel_dispatch" in text for text in trace.warnings)


def test_a_file_without_launches_is_stored_with_a_warning(tmp_path: Path, opened: Open) -> None:
    trace = opened(Rocpd().write(tmp_path / "t.db"))
    assert trace.num_launches == 0
    assert trace.warnings == ("the file contains no kernel dispatches or copies",)


REFUSED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda data: data[: len(data) * 2 // 3], r"cut off: \d+ of \d+ bytes"),
    "hole": (lambda data: data[:8192] + bytes(len(data) - 8192), "damaged"),
    "renamed": (lambda data: data.replace(b"rocpd_kernel", b"xxxxx_kernel"), "not from nsys"),
}


@pytest.mark.parametrize(("change", "match"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_file_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], match: str
) -> None:
    maker = Rocpd()
    for call in range(200):
        maker.launch(call + 1, 1000 * call)
    path = maker.write(tmp_path / "t.db")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(TraceFormatError, match=match):
        open_trace(path)


def test_another_database_with_the_table_is_refused(tmp_path: Path) -> None:
    for table, match in (
        ("rocpd_kernel_dispatch_x (id)", "not from rocprofv3"),
        ("rocpd_kernel_dispatch (id, start)", "has no column end"),
    ):
        path = tmp_path / "t.db"
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as db:
            db.execute(f"CREATE TABLE {table}")
        with pytest.raises(TraceFormatError, match=match):
            open_trace(path)


def test_a_folder_is_searched_for_databases_of_profilers(tmp_path: Path) -> None:
    maker = Rocpd()
    maker.launch(1)
    wanted = maker.write(tmp_path / "1_results.db")
    packed = tmp_path / "2_results.db.gz"
    packed.write_bytes(gzip.compress(wanted.read_bytes()))
    ingest_path(tmp_path / "store.db", wanted)
    with closing(sqlite3.connect(tmp_path / "other.db")) as db:
        db.execute("CREATE TABLE mine (id)")
    assert find_sources(tmp_path) == [wanted, packed]
    with closing(open_trace(packed)) as trace:
        assert trace.num_launches == 1


def test_the_store_has_the_registers_of_amd(tmp_path: Path) -> None:
    maker = Rocpd()
    maker.launch(1)
    ingest_path(tmp_path / "s.db", maker.write(tmp_path / "t.db"))
    with open_store(tmp_path / "s.db") as store:
        (row,) = store.kernels()
    assert (row.accum_registers_per_thread, row.scalar_registers) == (64, 96)
    assert (row.scratch_bytes_per_thread, row.registers_per_thread) == (16, 128)
    # 8 waves of a block, and all of the local memory
    assert (row.occupancy, row.occupancy_limiter, row.shared_share) == (0.25, "registers", 1)


@pytest.mark.parametrize(
    ("symbol", "block", "shared", "expected"),
    [
        ({}, (256, 1), 0, (2 / 8, "registers")),  # 128 VGPRs and 64 AGPRs, rounded to 192
        ({"arch_vgpr_count": 32, "accum_vgpr_count": 0}, (256, 1), 32768, (2 / 8, "shared_memory")),
        ({"arch_vgpr_count": 32, "accum_vgpr_count": 0, "sgpr_count": 112}, (256, 1), 0, (6 / 8, "registers")),
        ({"accum_vgpr_count": None}, (256, 1), 0, (None, None)),
    ],
)  # fmt: skip
def test_a_kernel_has_the_occupancy_of_its_gpu(
    tmp_path: Path,
    symbol: dict[str, int | None],
    block: tuple[int, int],
    shared: int,
    expected: tuple[float | None, str | None],
) -> None:
    maker = Rocpd()
    maker.rows["info_kernel_symbol"][0].update(symbol)
    x, y = block
    maker.launch(1, workgroup_size_x=x, workgroup_size_y=y, group_segment_size=shared)
    ingest_path(tmp_path / "s.db", maker.write(tmp_path / "t.db"))
    with open_store(tmp_path / "s.db") as store:
        (row,) = store.kernels()
    assert (row.occupancy, row.occupancy_limiter) == expected


def test_a_gpu_without_a_name_is_known_by_its_architecture(tmp_path: Path, opened: Open) -> None:
    maker = Rocpd()
    maker.rows["info_agent"][1] |= {
        "product_name": "AMD Radeon Graphics",
        "extdata": json.dumps(FACTS | {"gfx_target_version": 90010}),
    }
    maker.launch(1)
    (device,) = opened(maker.write(tmp_path / "t.db")).devices
    assert device.name == "AMD Radeon Graphics (gfx90a)"
