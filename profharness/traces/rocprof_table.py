"""Parse tables of kernels: the CSVs of rocprofv3, and the CSVs and databases of rocprof v1.

A row describes a dispatch of a kernel, a copy, or a counter of a dispatch. The names of the columns
differ between versions, sometimes only in case, so a column is found by any of its known names.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, cast

from profharness.errors import TraceFormatError
from profharness.files import open_input
from profharness.rows import ROCPROF, ROCPROFV3
from profharness.trace import Trace
from profharness.traces.columns import whole
from profharness.traces.rocm import (
    KERNELS_OF_V1,
    Counters,
    Dispatch,
    Recording,
    Triple,
    copy_name,
    plain_name,
    triple,
)
from profharness.traces.sqlite_file import Form, columns_of, database, quoted

EXPECTED = "a kernel_trace, memory_copy_trace or counter_collection CSV from rocprofv3"
V1_FORM = Form("a rocprof database", "record the trace again: rocprof --timestamp on PROGRAM")
# The names of each column, in lower case and without punctuation.
COLUMNS = {
    "name": "kernelname name",
    "start": "starttimestamp start beginns",
    "end": "endtimestamp end endns",
    "agent": "agentid agentabsindex gpuid devid",
    "stream": "streamid",
    "queue": "queueid",
    "process": "processid pid",
    "call": "correlationid corrid",
    "dispatch": "dispatchid index",
    "registers": "vgprcount archvgprcount archvgpr",
    "accum": "accumvgprcount accumvgpr",
    "scalar": "sgprcount sgpr",
    "scratch": "scratchsize privatesegmentsize scr",
    "shared": "groupsegmentsize ldssize",
    "lds": "ldsblocksize lds",
    "block_x": "workgroupsizex workgroupx",
    "block_y": "workgroupsizey workgroupy",
    "block_z": "workgroupsizez workgroupz",
    "grid_x": "gridsizex gridx",
    "grid_y": "gridsizey gridy",
    "grid_z": "gridsizez gridz",
    "block": "workgroupsize wgr",
    "grid": "gridsize grd",
    "direction": "direction",
    "source": "sourceagentid srcagentabsindex",
    "target": "destinationagentid dstagentabsindex",
    "bytes": "size bytes",
    "counter": "countername",
    "value": "countervalue",
}
CONVERTED = "guid"  # a CSV with this column was converted from a rocpd database
OPS_OF_V1, BEGIN = "OPS", "BeginNs"  # with --hip-trace, rocprof v1 has the kernels in this table
# Old releases also write copies, fills and markers to this table.
NOT_KERNELS = " AND ".join(
    f"\"Name\" NOT LIKE '{kind}%'"
    for kind in ("Copy", "Memcpy", "hipMemcpy", "Fill", "Marker", "Barrier")
)
BATCH = 8192
_PUNCTUATION = re.compile(r"[\W_]+")
_NUMBER = re.compile(r"(?:Agent |GPU )?(\d{1,18})")
_Cells = Sequence[object]


def parse_rocprof_csv(path: Path) -> Trace:
    """Parse a CSV of rocprofv3 or rocprof. The caller must close the returned Trace.

    Raise TraceFormatError if the file has no times, or is damaged or cut off.
    """
    path = Path(path)
    with ExitStack() as stack:
        file = stack.enter_context(
            io.TextIOWrapper(open_input(path), encoding="utf-8-sig", errors="replace", newline="")
        )
        try:
            rows = csv.reader(file)
            head = next(rows, [])
            return _Table(path, head).parse(_whole_rows(path, rows, len(head)))
        except csv.Error as error:
            raise TraceFormatError(path, f"damaged: {error}", expected=EXPECTED) from None


def parse_rocprof(path: Path) -> Trace:
    """Parse a database of rocprof v1. The caller must close the returned Trace.

    Raise TraceFormatError if the file is not such a database, or is damaged or incomplete.
    """
    path = Path(path)
    with database(path, path, V1_FORM) as connection:
        table = KERNELS_OF_V1
        if BEGIN not in columns_of(connection, table) and BEGIN in columns_of(
            connection, OPS_OF_V1
        ):
            table = OPS_OF_V1
        head = sorted(columns_of(connection, table))
        listed = ", ".join(map(quoted, head)) or "1"
        only = f" WHERE {NOT_KERNELS}" if table == OPS_OF_V1 and "Name" in head else ""
        rows = connection.execute(f"SELECT {listed} FROM {table}{only}")
        return _Table(path, head).parse(rows)


def _whole_rows(path: Path, rows: Iterator[list[str]], width: int) -> Iterator[list[str]]:
    """Yield the rows. Raise TraceFormatError if the last row is cut off."""
    short = False
    for row in rows:
        if short:
            yield []  # a short row inside the file is counted as unreadable
        short = len(row) != width
        if not short:
            yield row
    if short:
        raise TraceFormatError(
            path, "the last row is cut off", expected="a complete copy of the CSV"
        )


class _Table:
    """The columns of a table, and the trace that is made of its rows."""

    def __init__(self, path: Path, head: Sequence[str]) -> None:
        self._path = path
        names = [_PUNCTUATION.sub("", name).lower() for name in head]
        self._at = {
            field: next((names.index(name) for name in texts.split() if name in names), None)
            for field, texts in COLUMNS.items()
        }
        needed = ["start", "end", "direction" if self._has("direction") else "name"]
        if missing := [field for field in needed if not self._has(field)]:
            columns = " and ".join(f"launch {field}" for field in missing)
            raise TraceFormatError(path, f"has no column for the {columns}", expected=EXPECTED)
        self._is_v1 = "beginns" in names
        self._is_total = self._is_v1 or CONVERTED in names

    def _has(self, field: str) -> bool:
        return self._at[field] is not None

    def parse(self, rows: Iterable[_Cells]) -> Trace:
        """Return the trace of the rows."""
        counters, ordinals = Counters(self._path), dict[object, int]()
        with ExitStack() as stack:
            recording = Recording(self._path, stack)
            positions = list[int]()
            left = iter(rows)
            while batch := list(islice(left, BATCH)):
                self._add(recording, batch, ordinals, positions, counters)
            if self._has("grid") and not self._has("grid_x"):
                recording.doubt(
                    "the file contains only the number of threads per grid and per block, so "
                    "the grid and block dimensions are unknown"
                )
            return recording.make_trace(
                stack,
                self._describe,
                profiler=ROCPROF if self._is_v1 else ROCPROFV3,
                metrics=counters.metrics(recording.count),
                has_calls=False,
            )

    def _add(
        self,
        recording: Recording,
        batch: list[_Cells],
        ordinals: dict[object, int],
        positions: list[int],
        counters: Counters,
    ) -> None:
        """Add a batch of rows.

        `ordinals` maps a dispatch to its number among all dispatches, and `positions` contains the
        position of each dispatch among the launches, or -1 if it could not be read.
        """
        activities, values = list[_Cells](), list[tuple[int, str, float]]()
        for row in batch:
            if not self._has("counter"):
                activities.append(self._activity(row))
                continue
            key = (self._number(row, "process"), self._number(row, "dispatch"))
            ordinal = ordinals.setdefault(key, len(ordinals)) if row else len(ordinals)
            if not row or ordinal == len(positions) + len(activities):
                activities.append(self._activity(row))
            if row:
                value = _float(self._cell(row, "value"))
                if value is not None:
                    values.append((ordinal, str(self._cell(row, "counter"))[:200], value))
                else:
                    recording.doubt("{n} counter [value|values] could not be read")
        first = recording.count
        for keep in recording.add_activities(activities, "the table").tolist():
            positions.append(first if keep else -1)
            first += keep
        for ordinal, name, value in values:
            if positions[ordinal] >= 0:
                counters.add(positions[ordinal], name, value)

    def _activity(self, row: _Cells) -> tuple[object, ...]:
        """Return a row for `Recording.add_activities`, which is invalid if the row is empty."""
        if not row:
            return (None,) * 8

        def number(field: str) -> int:
            value = self._number(row, field)
            return -1 if value is None else value

        stream = "stream" if self._has("stream") else "queue"
        agent = "agent"
        direction = self._cell(row, "direction")
        if direction is not None:
            to_host = str(direction).upper().endswith("HOST")
            agent, direction = "source" if to_host else "target", str(direction)
        numbers = (
            self._number(row, "start"), self._number(row, "end"), number(agent), number(stream),
            number("call"), number("process"), number("bytes"),
        )  # fmt: skip
        if direction is not None:
            return (*numbers, direction)
        sizes = [
            self._number(row, f"{what}_{axis}") for what in ("grid", "block") for axis in "xyz"
        ]
        if self._number(row, "grid") == self._number(row, "block") == 1:
            sizes = [1] * 6
        resources = (
            self._number(row, field)
            for field in ("registers", "accum", "scalar", "scratch", "shared", "lds")
        )
        return (*numbers, str(self._cell(row, "name")), *sizes, *resources)

    def _describe(self, variant: Hashable) -> tuple[str, Dispatch]:
        name, *values = cast("tuple[Any, ...]", variant)
        if not values:
            return "memcpy", Dispatch(copy_name(name))
        grid: Triple | None = triple(*values[:3])
        registers, accum, scalar, scratch, shared, lds = map(whole, values[6:])
        # rocprofv3 itself writes the static size, rounded up, as LDS_Block_Size
        total = shared if not self._is_total or lds is None else lds
        return "kernel", Dispatch(
            name=plain_name(name),
            threads=grid,
            block=triple(*values[3:6]),
            registers=registers,
            accum_registers=accum,
            scalar_registers=scalar,
            shared_bytes=total,
            static_shared_bytes=None if self._is_total else lds,
            scratch_bytes=scratch,
        )

    def _cell(self, row: _Cells, field: str) -> object:
        at = self._at[field]
        return None if at is None else row[at]

    def _number(self, row: _Cells, field: str) -> int | None:
        value = self._cell(row, field) if row else None
        if isinstance(value, str):
            match = _NUMBER.fullmatch(value.strip())
            return int(match[1]) if match else None
        return value if isinstance(value, int) else None


def _float(value: object) -> float | None:
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if number == number else None
