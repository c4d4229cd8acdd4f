"""Parse the SQLite databases of rpd (rocmProfileData) in bounded memory.

An op on the GPU is a kernel or a copy. The `rocpd_api_ops` table links the op to the API call that
started the op. The API call records the size of the grid. The ops of a replayed graph have no API
call of their own, so the sizes of their grids are unknown.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Hashable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from profharness.errors import TraceFormatError
from profharness.rows import RPD
from profharness.trace import Trace
from profharness.traces.columns import THREAD_GRIDS, blocks_of, whole
from profharness.traces.rocm import Dispatch, Recording, copy_name, plain_name, triple
from profharness.traces.sqlite_file import Form, columns_or_null, database, table_columns

FORM = Form("an rpd database", "record the trace again: runTracer.sh -o OUT.rpd PROGRAM")
OP, API = "rocpd_op", "rocpd_api"
MARKER = "UserMarker"
COLUMNS = {
    OP: ("id", "gpuId", "queueId", "start", "end", "description_id", "opType_id"),
    API: ("id", "pid", "tid", "start", "end", "apiName_id", "args_id"),
    "rocpd_api_ops": ("api_id", "op_id"),
    "rocpd_kernelapi": (
        "api_ptr_id", "gridX", "gridY", "gridZ", "workgroupX", "workgroupY", "workgroupZ",
        "groupSegmentSize", "kernelName_id",
    ),
    "rocpd_copyapi": ("api_ptr_id", "size"),
    "rocpd_string": ("id", "string"),
    "rocpd_metadata": ("tag", "value"),
    "ext_autogradapi": ("api_ptr_id", "autogradName_id", "seq", "op_id", "sizes"),
}  # fmt: skip
NEEDED = {OP: ("id", "start", "end"), API: ("id", "start"), "rocpd_string": ("id", "string")}
MAX_TEXT = 65536
FETCH_ROWS = 8192
COPY, FILL = "Copy", "Fill"  # the types of ops that are no kernels begin with these words
MEMSET = "Memset (Device)"


def parse_rpd(path: Path) -> Trace:
    """Parse a database of rpd. The caller must close the returned Trace.

    Raise TraceFormatError if the file is not a database of rpd, or is damaged or incomplete.
    """
    path = Path(path)
    with ExitStack() as stack, database(path, path, FORM) as connection:
        recording = Recording(path, stack)
        reader = _Reader(connection, recording, path)
        reader.read_ops()
        reader.read_calls()
        reader.read_markers()
        return recording.make_trace(
            stack, reader.describe, profiler=RPD, environment=reader.environment()
        )


class _Reader:
    """Reads the tables of a database."""

    def __init__(self, connection: sqlite3.Connection, recording: Recording, path: Path) -> None:
        self._connection, self._recording = connection, recording
        self._tables = table_columns(connection)
        for table, columns in NEEDED.items():
            if lacking := [name for name in columns if name not in self._tables.get(table, ())]:
                raise TraceFormatError(
                    path, f"{table} has no column {', '.join(lacking)}", expected=FORM.expected
                )
        self._strings: dict[object, str | None] = {}

    def read_ops(self) -> None:
        """Read the kernels and copies."""
        # an op that several calls claim is read once
        links = (
            f"(SELECT op_id, min(api_id) AS api_id FROM {self._from('rocpd_api_ops')} GROUP BY 1)"
        )
        grid = ", ".join(f"k.{name}" for name in COLUMNS["rocpd_kernelapi"][1:-1])
        sql = (
            "SELECT ifnull(o.start, -1), o.end, ifnull(o.gpuId, -1), ifnull(o.queueId, -1), "
            "ifnull(l.api_id, -1), ifnull(a.pid, -1), ifnull(c.size, -1), o.description_id, o.opType_id, "
            f"k.kernelName_id, a.apiName_id, {grid} FROM {self._from(OP)} o "
            f"LEFT JOIN {links} l ON l.op_id = o.id LEFT JOIN {self._from(API)} a ON a.id = l.api_id "
            f"LEFT JOIN {self._from('rocpd_kernelapi')} k ON k.api_ptr_id = l.api_id "
            f"LEFT JOIN {self._from('rocpd_copyapi')} c ON c.api_ptr_id = l.api_id"
        )
        for batch in self._batches(sql):
            self._recording.add_activities(batch, OP)

    def read_calls(self) -> None:
        """Read the API calls that started ops."""
        sql = (
            "SELECT a.id, ifnull(a.pid, -1), ifnull(a.tid, -1), ifnull(a.start, -1), "
            f"substr(n.string, 1, 200) FROM {self._from(API)} a "
            f"LEFT JOIN {self._from('rocpd_string')} n ON n.id = a.apiName_id"
        )
        for batch in self._batches(sql):
            self._recording.add_calls(batch, API)

    def read_markers(self) -> None:
        """Read the roctx ranges, some of which are ops of PyTorch."""
        sql = (
            "SELECT a.start, a.end, a.pid, a.tid, substr(t.string, 1, :length), g.seq, g.op_id, "
            f"substr(g.sizes, 1, :length) FROM {self._from(API)} a "
            # with CROSS JOIN, SQLite does not start at the strings, which have no index
            f"CROSS JOIN {self._from('rocpd_string')} n ON n.id = a.apiName_id "
            f"LEFT JOIN {self._from('rocpd_string')} t ON t.id = a.args_id "
            f"LEFT JOIN {self._from('ext_autogradapi')} g ON g.api_ptr_id = a.id "
            "WHERE n.string = :marker ORDER BY a.start, a.end DESC"
        )
        for batch in self._batches(sql, {"length": MAX_TEXT, "marker": MARKER}):
            for start, end, pid, tid, text, sequence, number, sizes in batch:
                if not isinstance(pid, int) or not isinstance(tid, int):
                    self._recording.skip(API, 1)
                elif isinstance(text, str) and text and start != end:  # a mark has no duration
                    # rpd's tool for autograd keeps only the name, and the rest in another table
                    details = (("seq", sequence), ("op_id", number), ("sizes", sizes))
                    rest = "".join(
                        f", {key} = {value}" for key, value in details if value not in (None, "")
                    )
                    self._recording.add_range(text + rest, start, end, pid, tid, wide=False)

    def describe(self, variant: Hashable) -> tuple[str, Dispatch]:
        """Return the kind and the properties of an op."""
        text, kind, kernel, api, *sizes, shared = cast("tuple[Any, ...]", variant)
        name, op = plain_name(self._string(text)), self._string(kind) or ""
        if name is None and op.startswith(COPY):
            return "memcpy", Dispatch(copy_name(op))
        if name is None and op.startswith(FILL):
            return "memset", Dispatch(MEMSET)
        grid, block = triple(*sizes[:3]), triple(*sizes[3:])
        in_threads = self._string(api) in THREAD_GRIDS
        return "kernel", Dispatch(
            name=name or plain_name(self._string(kernel)),
            blocks=blocks_of(grid, block) if in_threads else grid,
            block=block,
            dynamic_shared_bytes=whole(shared),  # the argument of the call
        )

    def environment(self) -> dict[str, object]:
        """Return the schema version that the file records."""
        sql = f"SELECT value FROM {self._from('rocpd_metadata')} WHERE tag = 'schema_version'"
        for batch in self._batches(sql):
            for (value,) in batch:
                if str(value).isdecimal() and len(str(value)) < 5:
                    return {"rpd_schema_version": int(value)}
        return {}

    def _string(self, number: object) -> str | None:
        if number not in self._strings:
            sql = f"SELECT substr(string, 1, {MAX_TEXT}) FROM rocpd_string WHERE id = ?"
            row = self._connection.execute(sql, (number,)).fetchone()
            self._strings[number] = row[0] if row and isinstance(row[0], str) else None
        return self._strings[number]

    def _from(self, table: str) -> str:
        present = self._tables.get(table)
        return columns_or_null(table if present else None, present or frozenset(), COLUMNS[table])

    def _batches(
        self, sql: str, values: dict[str, object] | None = None
    ) -> Iterator[list[tuple[Any, ...]]]:
        cursor = self._connection.execute(sql, values or {})
        cursor.arraysize = FETCH_ROWS
        while batch := cursor.fetchmany():
            yield batch
