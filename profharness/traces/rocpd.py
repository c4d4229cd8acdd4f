"""Parse rocpd files, the SQLite databases of rocprofv3 and rocprof-sys, in bounded memory.

The names of the tables end with an id of the recording, such as
`rocpd_kernel_dispatch_00003fdc_92cb_72cb_9169_c7e541b1fcdf`. A merged file contains the tables of
several recordings. The views of the file are not used, because they may be missing.

A dispatch and the API call that caused it have the same `stack_id` in the table of events.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from profharness.devices import Device
from profharness.errors import TraceFormatError
from profharness.rows import ROCPROFV3
from profharness.trace import Trace
from profharness.traces.columns import whole
from profharness.traces.rocm import (
    Counters,
    Dispatch,
    Recording,
    copy_name,
    gpu,
    limits_of,
    plain_name,
    read_parts,
    triple,
)
from profharness.traces.sqlite_file import Form, columns_or_null, database, table_columns

FORM = Form(
    "a rocpd database from rocprofv3 or rocprof-sys",
    "record the trace again: rocprofv3 --kernel-trace --hip-trace --marker-trace -- PROGRAM",
)
DISPATCH, COPY, EVENT, REGION = "kernel_dispatch", "memory_copy", "event", "region"
SCHEMA = 3  # the version of the schema that this module reads
NEEDED = ("start", "end")
# Columns that the schema always has. If one is missing, its values are unknown.
COLUMNS = {
    DISPATCH: (
        "id", "pid", "agent_id", "kernel_id", "stream_id", "start", "end", "event_id",
        "private_segment_size", "group_segment_size", "workgroup_size_x", "workgroup_size_y",
        "workgroup_size_z", "grid_size_x", "grid_size_y", "grid_size_z",
    ),
    COPY: (
        "id", "pid", "start", "end", "name_id", "dst_agent_id", "src_agent_id", "size", "stream_id",
        "event_id",
    ),
    EVENT: ("id", "stack_id", "category_id", "extdata"),
    REGION: ("id", "pid", "tid", "start", "end", "name_id", "event_id"),
    "string": ("id", "string"),
    "info_agent": (
        "id", "type", "type_index", "absolute_index", "name", "model_name", "product_name",
        "user_name", "extdata",
    ),
    "info_process": ("id", "pid"),
    "info_thread": ("id", "tid"),
    "info_kernel_symbol": (
        "id", "kernel_name", "display_name", "group_segment_size", "sgpr_count",
        "arch_vgpr_count", "accum_vgpr_count",
    ),
    "info_pmc": ("id", "name", "units"),
    "pmc_event": ("id", "event_id", "pmc_id", "value"),
    "metadata": ("id", "tag", "value"),
}  # fmt: skip
NAMES = tuple(sorted(COLUMNS, key=len, reverse=True))
MAX_RECORDINGS = 1024
MAX_TEXT = 65536  # maximum number of characters that are read from a text
MAX_JSON = 1 << 20  # maximum number of characters of the properties of an agent
FETCH_ROWS = 8192
WIDE = "roctxRangeStart"  # such a range may end on another thread
NOT_RANGES = ("MARKER_CONTROL_API", "MARKER_NAME_API")
USER = ("USER",)  # regions of rocprof-sys that the user opened

_TABLE = re.compile(rf"rocpd_(?P<name>{'|'.join(NAMES)})(?P<recording>_[0-9a-f_]+)?")
_HSA_HIP = re.compile(r"(?:ROCM_)?(?:HIP|HSA)_.*")
_VERSION = re.compile(r"\d{1,4}(?:\.\d{1,4}){0,2}")


def parse_rocpd(path: Path) -> Trace:
    """Parse a rocpd database. The caller must close the returned Trace.

    Times are taken from the file, which counts from the start of the machine. Raise
    TraceFormatError if the file is not a rocpd database, or is damaged or incomplete.
    """
    path = Path(path)
    with ExitStack() as stack, database(path, path, FORM) as connection:
        recording = Recording(path, stack)
        readers = [
            Reader(connection, recording, tables, index)
            for index, tables in enumerate(_recordings(connection, path))
        ]
        return read_parts(recording, stack, readers, ROCPROFV3)


def _recordings(connection: sqlite3.Connection, path: Path) -> list[dict[str, tuple[str, Any]]]:
    """Return the tables of each recording: the full name and the columns by the short name.

    Raise TraceFormatError if the dispatches cannot be read.
    """
    found: dict[str, dict[str, tuple[str, Any]]] = {}
    for name, columns in table_columns(connection).items():
        if match := _TABLE.fullmatch(name):
            found.setdefault(match["recording"] or "", {})[match["name"]] = name, columns
    made = [tables for tables in found.values() if DISPATCH in tables]
    if not made:
        message = "the SQLite file is not from rocprofv3: it has no table rocpd_kernel_dispatch"
        raise TraceFormatError(path, message, expected=FORM.expected)
    if len(made) > MAX_RECORDINGS:
        message = f"contains {len(made)} recordings"
        raise TraceFormatError(path, message, expected=f"at most {MAX_RECORDINGS} recordings")
    for tables in made:
        table, columns = tables[DISPATCH]
        if missing := [name for name in NEEDED if name not in columns]:
            message = f"{table[:80]} has no column {', '.join(missing)}; use a newer profharness"
            raise TraceFormatError(path, message, expected=f"rocpd schema {SCHEMA}")
    return made


class Reader:
    """Reads the tables of one recording."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        recording: Recording,
        tables: dict[str, tuple[str, frozenset[str]]],
        index: int,
    ) -> None:
        self._connection, self._recording = connection, recording
        self._tables, self._index = tables, index
        self._symbols: dict[object, tuple[Any, ...]] = {}
        for name in (DISPATCH, COPY, REGION, EVENT):
            table, columns = tables.get(name, ("", frozenset()))
            lacking = [column for column in COLUMNS[name] if column not in columns]
            if table and lacking:
                recording.doubt(
                    f"{table[:80]} has no column {', '.join(lacking)}, so these values are unknown"
                )

    def read_activities(self, counters: Counters) -> None:
        """Read the dispatches, their counters, and the copies."""
        launches = self._read_dispatches()
        self._read_counters(launches, counters)
        self._read_copies()

    def _read_dispatches(self) -> dict[int, int]:
        """Return the positions of dispatches by the ids of their events.

        The dict is empty if the file contains no counters.
        """
        event_of: dict[int, int] = {}
        counted = self._has_rows("pmc_event")
        process = "ifnull(p.pid, ifnull(k.pid, -1))"
        sql = (
            f"SELECT ifnull(k.start, -1), k.end, ifnull(CASE a.type WHEN 'GPU' THEN a.type_index "
            f"END, ifnull(k.agent_id, -1)), ifnull(k.stream_id, -1), ifnull(e.stack_id, -1), "
            f"{process}, -1, {self._index}, k.kernel_id, k.workgroup_size_x, k.workgroup_size_y, "
            "k.workgroup_size_z, k.grid_size_x, k.grid_size_y, k.grid_size_z, "
            "k.group_segment_size, k.private_segment_size, k.event_id "
            f"FROM {self._from(DISPATCH)} k LEFT JOIN {self._from('info_agent')} a "
            f"ON a.id = k.agent_id LEFT JOIN {self._from('info_process')} p ON p.id = k.pid "
            f"LEFT JOIN {self._from(EVENT)} e ON e.id = k.event_id"
        )
        for batch in self._batches(sql):
            first = self._recording.count
            rows = [row[:-1] for row in batch]
            kept = self._recording.add_activities(rows, self._tables[DISPATCH][0])
            if counted:
                events = [row[-1] for row, keep in zip(batch, kept.tolist(), strict=True) if keep]
                event_of.update({event: first + at for at, event in enumerate(events)})
        return event_of

    def _read_counters(self, launches: dict[int, int], counters: Counters) -> None:
        sql = (
            f"SELECT v.event_id, substr(c.name, 1, 200), v.value, substr(c.units, 1, 40) "
            f"FROM {self._from('pmc_event')} v CROSS JOIN {self._from('info_pmc')} c ON c.id = v.pmc_id"
        )
        for batch in self._batches(sql) if launches else ():
            for event, name, value, unit in batch:
                known = isinstance(name, str) and isinstance(value, int | float)
                if known and event in launches:  # counters of a sample belong to no dispatch
                    counters.add(launches[event], name, float(value), str(unit or ""))

    def _read_copies(self) -> None:
        if COPY not in self._tables:
            return
        gpus = (f"CASE {end}.type WHEN 'GPU' THEN {end}.type_index END" for end in "ts")
        sql = (
            f"SELECT ifnull(m.start, -1), m.end, coalesce({', '.join(gpus)}, -1), "
            "ifnull(m.stream_id, -1), ifnull(e.stack_id, -1), ifnull(p.pid, ifnull(m.pid, -1)), "
            f"ifnull(m.size, -1), {self._index}, substr(n.string, 1, 200) "
            f"FROM {self._from(COPY)} m LEFT JOIN {self._from('info_agent')} t "
            f"ON t.id = m.dst_agent_id LEFT JOIN {self._from('info_agent')} s "
            f"ON s.id = m.src_agent_id LEFT JOIN {self._from('info_process')} p ON p.id = m.pid "
            f"LEFT JOIN {self._from(EVENT)} e ON e.id = m.event_id "
            f"LEFT JOIN {self._from('string')} n ON n.id = m.name_id"
        )
        for batch in self._batches(sql):
            self._recording.add_activities(batch, self._tables[COPY][0])

    def read_calls(self) -> None:
        """Read the API calls that started activities, and the roctx ranges."""
        if REGION not in self._tables:
            return
        calls, ranges, left = [], [], dict[int, str]()
        where = f"id IN (SELECT DISTINCT category_id FROM {self._from(EVENT)})"
        for number, text in self._rows("string", ("id", "string"), where):
            category = str(text)[:80].upper()
            if _HSA_HIP.fullmatch(category):
                calls.append(number)
            elif ("MARKER" in category and category not in NOT_RANGES) or category in USER:
                ranges.append(number)
            elif category not in NOT_RANGES:
                left[number] = category
        table = self._tables[REGION][0]
        # with CROSS JOIN, SQLite does not start at the events, which have no index
        regions = (
            f"{self._from(REGION)} r CROSS JOIN {self._from(EVENT)} e ON e.id = r.event_id "
            f"LEFT JOIN {self._from('info_process')} p ON p.id = r.pid "
            f"LEFT JOIN {self._from('info_thread')} t ON t.id = r.tid "
            f"LEFT JOIN {self._from('string')} n ON n.id = r.name_id"
        )
        place = "ifnull(p.pid, ifnull(r.pid, -1)), ifnull(t.tid, ifnull(r.tid, -1))"
        sql = (
            f"SELECT ifnull(e.stack_id, -1), {place}, r.start, substr(n.string, 1, 200) "
            f"FROM {regions} WHERE e.category_id IN ({_listed(calls)})"
        )
        for batch in self._batches(sql) if calls else ():
            self._recording.add_calls(batch, table)
        sql = (
            f"SELECT r.start, r.end, {place}, substr(n.string, 1, {MAX_TEXT}), "
            f"substr(e.extdata, 1, {MAX_TEXT}) FROM {regions} "
            f"WHERE e.category_id IN ({_listed(ranges)}) ORDER BY r.start, r.end DESC"
        )
        for batch in self._batches(sql) if ranges else ():
            for start, end, process, thread, function, details in batch:
                if not isinstance(process, int) or not isinstance(thread, int):
                    self._recording.skip(table, 1)
                elif (name := range_name(function, details)) is not None:
                    wide = str(function).startswith(WIDE)
                    self._recording.add_range(name, start, end, process, thread, wide=wide)
        sql = (
            f"SELECT DISTINCT e.category_id FROM {regions} WHERE e.category_id IN ({_listed(left)})"
        )
        numbers = [row[0] for batch in (self._batches(sql) if left else ()) for row in batch]
        if numbers:
            unread = ", ".join(sorted(left[number] for number in numbers))
            self._recording.doubt(f"regions in the categories {unread[:200]} are not read")

    def describe(self, values: Sequence[Any]) -> tuple[str, Dispatch]:
        """Return the kind and the properties of an activity."""
        if len(values) == 1:
            return "memcpy", Dispatch(copy_name(values[0]))
        kernel, *sizes, shared, scratch = values
        name, plain, static, scalar, registers, accum = self._symbol(kernel)
        return "kernel", Dispatch(
            name=plain_name(plain) or plain_name(name),
            threads=triple(*sizes[3:]),
            block=triple(*sizes[:3]),
            registers=whole(registers),
            accum_registers=whole(accum),
            scalar_registers=whole(scalar),
            shared_bytes=whole(shared),
            static_shared_bytes=whole(static),
            scratch_bytes=whole(scratch),
        )

    def devices(self) -> Iterator[Device]:
        """Yield the GPUs. Impossible properties become warnings."""
        columns = COLUMNS["info_agent"]
        for row in self._rows("info_agent", columns, "type = 'GPU'"):
            agent = dict(zip(columns, row, strict=True))
            text = agent["extdata"]
            facts: Any = {}
            if isinstance(text, str) and len(text) < MAX_JSON:
                try:
                    facts = json.loads(text)
                except (ValueError, RecursionError):
                    self._recording.doubt("the properties of {n} [GPU|GPUs] could not be read")
            device, doubts = gpu(
                agent["type_index"],
                [agent[key] for key in ("product_name", "user_name", "model_name", "name")],
                limits_of(facts if isinstance(facts, dict) else {}),
                facts.get("gfx_target_version") if isinstance(facts, dict) else None,
            )
            for each in doubts:
                self._recording.doubt(each)
            if device is not None:
                yield device

    def environment(self) -> dict[str, object]:
        """Return the schema version that the file records."""
        for tag, value in self._rows("metadata", ("tag", "value")):
            if tag == "schema_version" and _VERSION.fullmatch(str(value)):
                text = str(value)
                if text.partition(".")[0] != str(SCHEMA):
                    self._recording.doubt(
                        f"rocpd schema {text} is unknown; schema {SCHEMA} is assumed"
                    )
                return {"rocpd_schema_version": int(text) if text.isdecimal() else text}
        return {}

    def _symbol(self, kernel: object) -> tuple[Any, ...]:
        if kernel not in self._symbols:
            columns = COLUMNS["info_kernel_symbol"][1:]
            texts = [f"substr({name}, 1, {MAX_TEXT})" for name in columns[:2]]
            sql = (
                f"SELECT {', '.join([*texts, *columns[2:]])} "
                f"FROM {self._from('info_kernel_symbol')} WHERE id = ?"
            )
            row = self._connection.execute(sql, (kernel,)).fetchone()
            self._symbols[kernel] = row or (None,) * len(columns)
        return self._symbols[kernel]

    def _from(self, name: str) -> str:
        table, columns = self._tables.get(name, (None, frozenset[str]()))
        return columns_or_null(table, columns, COLUMNS[name])

    def _has_rows(self, name: str) -> bool:
        sql = f"SELECT 1 FROM {self._from(name)} LIMIT 1"
        return self._connection.execute(sql).fetchone() is not None

    def _rows(self, name: str, columns: Sequence[str], where: str = "1") -> Iterator[Any]:
        sql = f"SELECT {', '.join(columns)} FROM {self._from(name)} WHERE {where}"
        for batch in self._batches(sql):
            yield from batch

    def _batches(self, sql: str) -> Iterator[list[tuple[Any, ...]]]:
        cursor = self._connection.execute(sql)
        cursor.arraysize = FETCH_ROWS
        while batch := cursor.fetchmany():
            yield batch


def _listed(numbers: Sequence[object] | dict[int, str]) -> str:
    return ", ".join(str(number) for number in numbers if isinstance(number, int))


def range_name(function: object, details: object) -> str | None:
    """Return the name of a roctx range, or None if the call of roctx opened no range."""
    message = None
    if isinstance(details, str) and details.startswith("{") and '"message"' in details:
        try:
            message = json.loads(details).get("message")
        except (ValueError, RecursionError, AttributeError):
            message = None
    if isinstance(message, str) and message:
        return message
    return None if not isinstance(function, str) or function.startswith("roctx") else function
