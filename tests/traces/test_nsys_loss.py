"""Real exports with tables, columns and rows removed, renamed or doubled: lost kernels are refused
by name or counted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from nsys_make import Maker, unpacked

from profharness.errors import TraceFormatError
from profharness.trace import NONE, Trace
from profharness.traces.nsys import parse_nsys

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
        (f"DROP TABLE {KERNEL}", 16, "253 launches of a kernel have no kernel in the export"),
        (
            f"DELETE FROM {KERNEL} WHERE rowid % 10 = 0", 244,
            "25 launches of a kernel have no kernel in the export",
        ),
        (
            f"ALTER TABLE {MEMSET} RENAME COLUMN start TO begin", 253,
            f"{MEMSET} has no column start, so its 16 rows cannot be read",
        ),
        (
            f"ALTER TABLE {MEMSET} RENAME TO {MEMSET}_GRAPH", 253,
            f"the table {MEMSET}_GRAPH with 16 rows is not known and not read",
        ),
        (
            f"ALTER TABLE {KERNEL} RENAME COLUMN gridX TO gridWidth", 269,
            f"{KERNEL} has no column gridX; what it says is unknown",
        ),
        (
            f"ALTER TABLE {RUNTIME} RENAME TO CALLS", 269,
            f"the export has no table {RUNTIME}: no launch has its API call, and none belongs to a range",
        ),
        (
            f"ALTER TABLE {RUNTIME} RENAME COLUMN correlationId TO id", 269,
            f"{RUNTIME} has no column correlationId, so its 2712 rows cannot be read",
        ),
        (
            "DROP TABLE NVTX_EVENTS", 269,
            "the export has no table NVTX_EVENTS: no launch belongs to a range",
        ),
        ("DROP TABLE StringIds", 269, "253 of 269 launches have no name in StringIds"),
        (
            "DELETE FROM StringIds WHERE value LIKE '%flash%'", 269,
            " launches have no name in StringIds",
        ),
        (
            f"UPDATE {KERNEL} SET correlationId = 1", 269,
            "252 launches share the id of their API call with an earlier one",
        ),
        (
            f"UPDATE {RUNTIME} SET correlationId = 157", 269,
            f"2711 calls in {RUNTIME} have the id of an earlier one, which counts",
        ),
        (
            f"UPDATE {KERNEL} SET correlationId = correlationId + 1000000", 269,
            "253 of 269 launches have no API call in the file and so belong to no range",
        ),
        (
            f'UPDATE {KERNEL} SET "end" = start - 1 WHERE rowid <= 5', 264,
            f"5 rows of {KERNEL} could not be read and were skipped",
        ),
        (
            f"UPDATE {KERNEL} SET start = -start WHERE rowid <= 5", 269,
            f"5 rows of {KERNEL} begin before the capture did",
        ),
        (
            f"INSERT INTO {KERNEL} SELECT * FROM {KERNEL}", 269,
            "253 launches are exact copies of others and are left out",
        ),
        (
            f"INSERT INTO {RUNTIME} SELECT * FROM {RUNTIME}", 269,
            f"269 calls in {RUNTIME} have the id of an earlier one, which counts",
        ),
        (
            "INSERT INTO NVTX_EVENTS SELECT * FROM NVTX_EVENTS", 269,
            "17 ranges are exact copies of others and are left out",
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
    assert read(path).warnings == ("NVTX_EVENTS_V2 has rows as well and is not read",)


def test_launches_into_a_graph_are_not_losses(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("mine", 100, 900)
    maker.launch(200)
    for call in (300, 400):
        maker.add(
            RUNTIME, start=call, end=call + 5, globalTid=maker.rows[RUNTIME][0]["globalTid"],
            correlationId=call, nameId=maker.string("cudaLaunchKernel_v7000"), returnValue=0,
        )  # fmt: skip
    lost = "2 launches of a kernel have no kernel in the export"
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
    assert "500 launches are exact copies of others and are left out" in trace.warnings
