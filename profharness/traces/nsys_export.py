"""Open an SQLite export of nsys and check its tables.

This module also reads the versions, the start time, the GPUs and the diagnostics that the export
records. The module never writes to the export.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from profharness.devices import Device
from profharness.errors import TraceFormatError, counted
from profharness.traces.columns import (
    CORE_FIELDS,
    MAX_NS,
    MAX_TEXT,
    NSYS_KEYS,
    make_device,
    whole,
)
from profharness.traces.sqlite_file import PLAIN_TABLES, Form, database, quoted

# Kineto's words for the numbers in nsys's ENUM tables
COPY_KINDS = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD",
    9: "HtoH", 10: "PtoP", 11: "UVM HtoD", 12: "UVM DtoH", 13: "UVM DtoD",
}  # fmt: skip
MEMORY_KINDS = {
    0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static",
    6: "Managed Static", 7: "Unknown",
}  # fmt: skip
EXPECTED = "an SQLite file exported by nsys"
AGAIN = (
    "export the file again from the report: nsys export --type sqlite --output OUT.sqlite "
    "REPORT.nsys-rep"
)
FORM = Form(
    EXPECTED, AGAIN, "the file is empty; nsys leaves an empty file behind if its export fails"
)
META_TABLES = ("META_DATA_EXPORT", "EXPORT_META_DATA")  # EXPORT_META_DATA is used until nsys 2022.4
MAX_STRING = 65536  # maximum number of characters that are read from a string
MAX_IDS = 1000
FETCH_ROWS = 8192
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
STRINGS = "StringIds"
NAMES = ("mangledName", "demangledName", "shortName")
CONFIG = (
    "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread",
    "staticSharedMemory", "dynamicSharedMemory",
)  # fmt: skip
VARIANTS = {
    KERNEL: (*NAMES, *CONFIG),
    MEMCPY: ("copyKind", "srcKind", "dstKind"),
    MEMSET: ("memKind",),
}
# Columns that a table must have. If one of them is missing, no row of the table can be read.
NEEDED = {
    **dict.fromkeys(VARIANTS, ("start", "end")),
    RUNTIME: ("start", "globalTid", "correlationId"),
    NVTX: ("start", "eventType", "globalTid"),
    STRINGS: ("id", "value"),
}
_ACTIVITY = ("deviceId", "streamId", "correlationId", "globalPid")
# Columns that the exports of all known versions have. If such a column is missing, the result is
# incomplete.
WANTED = {
    KERNEL: (*_ACTIVITY, *VARIANTS[KERNEL]),
    MEMCPY: (*_ACTIVITY, "bytes", *VARIANTS[MEMCPY]),
    MEMSET: (*_ACTIVITY, "bytes", *VARIANTS[MEMSET]),
    RUNTIME: ("nameId",),
    NVTX: ("end", "text", "textId", "domainId"),
}
ABSENT = {
    RUNTIME: "the API calls and ranges that the launches belong to are unknown",
    NVTX: "the ranges that the launches belong to are unknown",
    STRINGS: "the names of kernels, ranges and API calls are unknown",
}
# CUPTI activities that this reader knows but does not need.
UNUSED = (
    "SYNCHRONIZATION", "CUDA_EVENT", "OVERHEAD", "MEMORY", "MEMORY_POOL", "MEM_DECOMPRESS",
    "GRAPH_NODE", "GRAPH_NODE_EVENT", "UM_CPU_PAGE_FAULT_EVENTS", "UM_GPU_PAGE_FAULT_EVENTS",
)  # fmt: skip
_ACTIVITIES = "CUPTI_ACTIVITY_KIND_"
KERNEL_LIKE = {"gridX", "blockX"}
UPDATE = "use a newer profharness, or an older nsys"
MAX_DIAGNOSTICS = 5
WARNING = 2  # value of DIAGNOSTIC_EVENT.severity for a warning; the value for an error is 3
PRODUCT = {"EXPORT_PRODUCT_VERSION": "nsys_version", "EXPORT_SCHEMA_VERSION": "nsys_schema_version"}
SYSTEM_TABLE = "TARGET_INFO_SYSTEM_ENV"
SYSTEM = {"CudaDriverVersion": "cuda_driver_version", "NvDriverVersion": "driver_version"}

_MARK = re.compile(r"(?:META_DATA_EXPORT|EXPORT_META_DATA|CUPTI_ACTIVITY_.*|NVTX_EVENTS.*)")
_VERSIONED = re.compile(r"(?P<base>.+?)_V(?P<number>\d{1,4})")
_VERSION = re.compile(r"\d[\w.\-+]{0,63}")
# Matches a path, an address, an assignment or the name of a host.
_PRIVATE = re.compile(r"[/\\@=~]|\w\.\w+\.\w")
_GPU = ("id", "name", "cuDevice", "maxWarpsPerSm", *NSYS_KEYS.values())


def memcpy_name(copy: int, source: int, target: int) -> str:
    """Return a name such as `Memcpy HtoD (Pinned -> Device)` for nsys's kind numbers."""
    start, end = (MEMORY_KINDS.get(kind, "Unknown") for kind in (source, target))
    return f"Memcpy {COPY_KINDS.get(copy, '<unknown>')} ({start} -> {end})"


def memset_name(memory: int) -> str:
    """Return a name such as `Memset (Device)` for nsys's number for a kind of memory."""
    return f"Memset ({MEMORY_KINDS.get(memory, 'Unknown')})"


class Export:
    """An open export.

    Its methods return rows as tuples, with the columns in the requested order. A column that the
    table does not have is NULL. The keys of `tables` are names of tables without version suffixes
    such as `_V2`. The values contain the full name, quoted for use in SQL, and the columns.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection
        # Tables that have rows, but are ignored because another version of the same table is used
        self.passed_over: list[str] = []
        self.tables = self._tables()

    def rows(self, name: str, columns: Sequence[str], where: str = "") -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a table in file order. `where` must not contain text from a file."""
        for batch in self.batches(name, columns, where):
            yield from batch

    def batches(
        self, name: str, columns: Sequence[str], where: str = "", *, filled: int = 0
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Yield lists of up to FETCH_ROWS rows. In the first `filled` columns, NULL becomes -1."""
        if name not in self.tables:
            return
        table, present = self.tables[name]
        values = [f'"{column}"' if column in present else "NULL" for column in columns]
        values[:filled] = [f"ifnull({value}, -1)" for value in values[:filled]]
        clause = f" WHERE {where}" if where else ""
        cursor = self.connection.execute(f"SELECT {', '.join(values)} FROM {table}{clause}")
        cursor.arraysize = FETCH_ROWS
        while batch := cursor.fetchmany():
            yield batch

    def has(self, name: str, *columns: str) -> bool:
        """Return whether a table exists and has all of these columns."""
        return name in self.tables and self.tables[name][1].issuperset(columns)

    def columns(self, name: str) -> frozenset[str] | None:
        return self.tables[name][1] if name in self.tables else None

    def count(self, name: str) -> int:
        sql = f"SELECT count(*) FROM {self.tables[name][0]}"
        return int(self.connection.execute(sql).fetchone()[0])

    def text(self, string: int) -> str | None:
        """Return the first MAX_STRING characters of a string in StringIds, or None if unknown."""
        if not self.has(STRINGS, "id", "value"):
            return None
        sql = f"SELECT substr(value, 1, {MAX_STRING}) FROM {self.tables[STRINGS][0]} WHERE id = ?"
        row = self.connection.execute(sql, (string,)).fetchone()
        return row[0] if row and isinstance(row[0], str) else None

    def strings_like(self, patterns: Sequence[str]) -> list[int]:
        """Return the ids of up to MAX_IDS strings that match at least one pattern for SQL's LIKE.

        Return [] if more strings match.
        """
        if not self.has(STRINGS, "id", "value"):
            return []
        sql = (
            f"SELECT id FROM {self.tables[STRINGS][0]} WHERE typeof(id) = 'integer' "
            f"AND length(value) < 200 AND ({' OR '.join(['value LIKE ?'] * len(patterns))})"
        )
        rows = self.connection.execute(sql, patterns).fetchmany(MAX_IDS + 1)
        return [number for (number,) in rows] if len(rows) <= MAX_IDS else []

    @cached_property
    def processes_of_calls(self) -> list[int]:
        """Up to two distinct processes (globalTid >> 24) that made API calls."""
        if not self.has(RUNTIME, "globalTid"):
            return []
        sql = f"SELECT DISTINCT globalTid >> 24 FROM {self.tables[RUNTIME][0]} LIMIT 2"
        return [number for (number,) in self.connection.execute(sql) if isinstance(number, int)]

    def largest(self, name: str, column: str) -> int | None:
        if not self.has(name, column):
            return None
        sql = f'SELECT max("{column}") FROM {self.tables[name][0]}'
        (value,) = self.connection.execute(sql).fetchone()
        return value if isinstance(value, int) else None

    def _tables(self) -> dict[str, tuple[str, frozenset[str]]]:
        """Return the contents of `tables`.

        If a table exists in several versions, prefer the table without a suffix, then the highest
        version. Versions that have no rows are used only if no version has rows.
        """
        versions: dict[str, list[tuple[int, str]]] = {}
        for (name,) in self.connection.execute(PLAIN_TABLES).fetchall():
            match = _VERSIONED.fullmatch(str(name))
            base, number = (match["base"], int(match["number"])) if match else (str(name), 0)
            versions.setdefault(base, []).append((number, str(name)))
        tables = {}
        for base, names in versions.items():
            ordered = sorted(names, key=lambda pair: (pair[0] > 0, -pair[0]))
            named = {quoted(name): name for _, name in ordered}
            best = next(iter(named))
            if len(named) > 1:
                sql = "SELECT 1 FROM {} LIMIT 1"
                filled = [q for q in named if self.connection.execute(sql.format(q)).fetchone()]
                best = next(iter(filled), best)
                self.passed_over += [named[other] for other in filled if other != best]
            columns = self.connection.execute(f"PRAGMA table_info({best})").fetchall()
            tables[base] = best, frozenset(str(column[1]) for column in columns)
        return tables


@contextmanager
def opened(path: Path, shown: Path) -> Iterator[Export]:
    """Open the export at `path`. Error messages name the path `shown` instead of `path`.

    Raise TraceFormatError if the file is not a complete export. SQLite's errors inside the `with`
    block are also converted to TraceFormatError.
    """
    with database(path, shown, FORM) as connection:
        export = Export(shown, connection)
        if not any(map(_MARK.fullmatch, export.tables)):
            message = f"an SQLite file without tables; {AGAIN}"
            if export.tables:
                message = (
                    "the SQLite file is not from nsys or an AMD profiler: it has no table of "
                    "launches or ranges"
                )
            raise TraceFormatError(shown, message, expected=EXPECTED)
        yield export


def check_schema(export: Export) -> list[str]:
    """Return warnings about missing columns, and about tables that have rows but are not read.

    Raise TraceFormatError if the kernels cannot be read, because then the trace is useless.
    """
    warnings = []
    for table, needed in NEEDED.items():
        columns = export.columns(table)
        if columns is None:
            continue
        lacks = [column for column in needed if column not in columns]
        unknown = [column for column in WANTED.get(table, ()) if column not in columns]
        if not (lacks or unknown) or not (count := export.count(table)):
            continue
        if lacks:
            text = f"{table} has no column {', '.join(lacks)}, so its {counted(count, 'row')} cannot be read"
            if table == KERNEL:
                raise TraceFormatError(export.path, text, expected=_expected(export))
            warnings.append(text)
        else:
            warnings.append(
                f"{table} has no column {', '.join(unknown)}, so these values are unknown"
            )
    warnings += [f"{name} also has rows, but is not read" for name in export.passed_over]
    expected_tables = {*VARIANTS, RUNTIME, GRAPHS, *(f"{_ACTIVITIES}{name}" for name in UNUSED)}
    for table, (_, columns) in export.tables.items():
        is_kernel = columns >= KERNEL_LIKE
        if table in expected_tables or not (is_kernel or table.startswith(_ACTIVITIES)):
            continue
        if count := export.count(table):
            text = f"the table {table[:80]} with {counted(count, 'row')} is unknown"
            if is_kernel:
                raise TraceFormatError(export.path, text, expected=_expected(export))
            warnings.append(f"{text} and was not read")
    return warnings


def _expected(export: Export) -> str:
    version = environment(export).get("nsys_version", "unknown")
    return f"tables that a known version of nsys writes (this file has version {version}); {UPDATE}"


def absent_tables(export: Export) -> list[str]:
    """Return a warning for each missing table that an export with launches should contain."""
    return [
        f"the export has no table {table}: {text}"
        for table, text in ABSENT.items()
        if export.columns(table) is None
    ]


def environment(export: Export) -> dict[str, object]:
    """Return the versions of nsys, of the schema, of the CUDA driver API and of NVIDIA's driver."""
    versions: dict[str, object] = {}
    for table, keys in (*((table, PRODUCT) for table in META_TABLES), (SYSTEM_TABLE, SYSTEM)):
        for name, value in export.rows(table, ("name", "value")):
            if name in keys and value is not None and _VERSION.fullmatch(str(value)):
                text = str(value)
                versions[keys[name]] = int(text) if text.isdecimal() else text
    return versions


def start_time(export: Export) -> tuple[int, list[str]]:
    """Return the start of the capture in ns since 1970, or 0 if it is unknown, and warnings."""
    for (value,) in export.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
        if (start := whole(value)) is not None and start < MAX_NS:
            return start, []
    return 0, ["the export does not record when the capture started, so times start at 0"]


def devices(export: Export) -> tuple[tuple[Device, ...], list[str]]:
    """Return the GPUs and warnings. The index of a GPU is CUDA's index in the profiled process."""
    rows = [dict(zip(_GPU, row, strict=True)) for row in export.rows("TARGET_INFO_GPU", _GPU)]
    by_id = {row["id"]: row for row in rows}
    by_index: dict[Any, dict[str, Any]] = {}
    doubt: list[str] = []
    for gpu, cuda in export.rows("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId")):
        if gpu not in by_id or whole(cuda) is None:
            continue
        if by_index.setdefault(cuda, by_id[gpu]) is not by_id[gpu]:
            doubt = [
                (
                    "the processes in this capture number the GPUs differently; the first "
                    "numbering is used"
                )
            ]
    if not by_index:
        for row in rows:
            by_index.setdefault(row["id"] if row["cuDevice"] is None else row["cuDevice"], row)
    made = []
    for index, row in sorted(by_index.items(), key=lambda pair: str(pair[0])):
        limits = {field: row[key] for field, key in NSYS_KEYS.items()}
        for field in limits.keys() - CORE_FIELDS:
            limits[field] = limits[field] or None  # nsys writes 0 for unknown values
        warp, warps = whole(limits["warp_size"]), whole(row["maxWarpsPerSm"])
        limits["max_threads_per_sm"] = warp * warps if warp and warps else None
        device, texts = make_device(index, row["name"], limits)
        doubt += texts
        made += [device] if device else []
    return tuple(made), doubt


def diagnostics(export: Export) -> list[str]:
    """Return up to MAX_DIAGNOSTICS of the warnings and errors that nsys recorded.

    Messages that may contain a path, the name of a host or a command are left out.
    """
    texts: dict[str, None] = {}
    for severity, text in export.rows("DIAGNOSTIC_EVENT", ("severity", "text")):
        if severity not in (WARNING, WARNING + 1) or not isinstance(text, str):
            continue
        plain = " ".join(text.split())
        if plain and not _PRIVATE.search(plain) and len(texts) < MAX_DIAGNOSTICS:
            texts.setdefault(f"nsys reports: {plain[:MAX_TEXT]}")
    return list(texts)
