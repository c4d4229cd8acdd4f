"""Scrub an nsys SQLite export by writing a new file that contains only the allowed values.

The new file has all tables and columns with known names, because other programs expect them. Tables
and columns that are not allowed are empty.

A mark before the name of a column in TABLES shows what the column contains: `$` a text, `@` a key
of the table StringIds, `#` a serialized process and thread id, and `%` a process id. A column
without a mark contains numbers.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

from profharness.errors import TraceFormatError
from profharness.scrub.allowed import Scrubber
from profharness.traces.nsys_export import EXPECTED, opened

SYSTEM_TABLE = "TARGET_INFO_SYSTEM_ENV"
_PLACE = "deviceId contextId greenContextId streamId correlationId #globalPid"
TABLES: dict[str, str] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        f"start end {_PLACE} @demangledName @shortName @mangledName launchType cacheConfig "
        "registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory "
        "dynamicSharedMemory localMemoryPerThread localMemoryTotal gridId sharedMemoryExecuted "
        "graphNodeId graphId sharedMemoryLimitConfig clusterX clusterY clusterZ "
        "clusterSchedulingPolicy maxPotentialClusterSize maxActiveClusters "
        "sharedMemoryRequestedPercentage qmdBulkReleaseDone qmdPreexitDone qmdLastCtaDone"
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start end eventClass #globalTid correlationId @nameId returnValue"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        f"start end {_PLACE} bytes copyKind srcKind dstKind srcDeviceId srcContextId dstDeviceId "
        "dstContextId migrationCause graphNodeId copyCount"
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": f"start end {_PLACE} value bytes graphNodeId memKind",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
        f"start end {_PLACE} syncType eventId deprecatedSyncType eventSyncId"
    ),
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": f"{_PLACE} eventId timestamp eventSyncId",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"start end {_PLACE} graphId graphExecId",
    "CUPTI_ACTIVITY_KIND_OVERHEAD": (
        "start end eventClass #globalTid correlationId @nameId overheadType"
    ),
    "CUDA_GRAPH_NODE_EVENTS": (
        "start end eventClass #globalTid @nameId graphNodeId originalGraphNodeId"
    ),
    "CUDA_GRAPH_EVENTS": (
        "start end eventClass #globalTid @nameId graphNodeId originalGraphNodeId graphId "
        "originalGraphId graphExecId"
    ),
    "PROFILER_OVERHEAD": "start end #globalTid @nameId returnValue overheadType",
    "NVTX_EVENTS": (
        "start end eventType rangeId category color $text #globalTid #endGlobalTid @textId domainId "
        "uint64Value int64Value doubleValue uint32Value int32Value floatValue"
    ),
    "PROCESSES": "#globalPid %pid",
    "TARGET_INFO_GPU": (
        "vmId id $name isDiscrete l2CacheSize totalMemory memoryBandwidth clockRate smCount "
        "$chipName cuDevice revision constantMemory maxIPC maxRegistersPerBlock "
        "maxShmemPerBlock maxShmemPerBlockOptin maxShmemPerSm maxRegistersPerSm threadsPerWarp "
        "asyncEngines maxWarpsPerSm maxBlocksPerSm maxThreadsPerBlock maxBlockDimX maxBlockDimY "
        "maxBlockDimZ maxGridDimX maxGridDimY maxGridDimZ computeMajor computeMinor smMajor smMinor"
    ),
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId %pid numMultiprocessors",
    "TARGET_INFO_CUDA_CONTEXT_INFO": (
        "nullStreamId hwId vmId %processId deviceId contextId parentContextId isGreenContext "
        "numMultiprocessors"
    ),
    "TARGET_INFO_CUDA_STREAM": "streamId hwId vmId %processId contextId priority flag",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs",
    "ANALYSIS_DETAILS": "globalVid duration startTime stopTime",
    "DIAGNOSTIC_EVENT": "timestamp timestampType source severity $text #globalPid",
    "META_DATA_EXPORT": "$name $value",
    "EXPORT_META_DATA": "$name $value",
    SYSTEM_TABLE: "globalVid $name nameEnum $value",
}
STRINGS = "StringIds"
ENUM_COLUMNS = "id $name $label"


TYPE = re.compile(r"[A-Za-z ]{0,30}")
DIAGNOSTICS = re.compile(r"Number of [A-Za-z ]{1,40} events collected: [\d,]{1,15}\.?")
_NUMBER = re.compile(r"[0-9]{1,5}")
_VERSION = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,3}){0,2}")
# Maps names in the tables NAMED_VALUES to patterns. A row of such a table is copied only if its
# value matches the pattern of its name.
VALUES = {
    "EXPORT_PRODUCT_NAME": re.compile("NVIDIA Nsight Systems"),
    "EXPORT_PRODUCT_VERSION": re.compile(
        r"20[0-9]{2}\.[0-9]{1,2}(?:\.[0-9]{1,4}){2}(?:-\w{1,20})?"
    ),
    "EXPORT_PRODUCT_DATE": _VERSION,
    "EXPORT_SCHEMA_VERSION": _VERSION,
    "EXPORT_SCHEMA_VERSION_MAJOR": _NUMBER,
    "EXPORT_SCHEMA_VERSION_MINOR": _NUMBER,
    "EXPORT_SCHEMA_VERSION_MICRO": _NUMBER,
    "EXPORT_SCHEMA_VERSION_CKSUM": re.compile(r"[0-9]{9,10} [0-9]{5,7}"),
    "EXPORT_PLATFORM": re.compile(r"(?:linux|windows|macos)(?:-desktop|-server)?"),
    "EXPORT_ARCH": re.compile("x64|x86_64|aarch64|arm64"),
    "EXPORT_TIME_UTC": re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}"),
    **dict.fromkeys(("EXPORT_PARAM_LAZY", "EXPORT_PARAM_TIME_NORMALIZE"), re.compile("true|false")),
    **dict.fromkeys(
        ("EXPORT_PARAM_TIME_SHIFT", "EXPORT_CONFIG_TIME_SHIFT"), re.compile("[0-9]{1,19}")
    ),
    "CudaDriverVersion": _NUMBER,
    "NvDriverVersion": _VERSION,
}
NAMED_VALUES = ("META_DATA_EXPORT", "EXPORT_META_DATA", SYSTEM_TABLE)
PID_SHIFT = 24
PID_MASK = (1 << PID_SHIFT) - 1
BATCH = 10_000
_TEXT = re.compile(rb"[ -~]{12,200}")
_PLAIN_TABLES = "type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%' AND name NOT LIKE 'sqlite_%'"


def columns_of(table: str) -> dict[str, str]:
    """Return the marks of the columns that may be copied from a table, by column.

    The name of the table may end with a version such as `_V2`.
    """
    is_enum = re.fullmatch(r"ENUM_[A-Z0-9_]+", table)
    text = ENUM_COLUMNS if is_enum else TABLES.get(re.sub(r"_V\d+$", "", table), "")
    return {word.lstrip("@#%$"): word[0] if word[0] in "@#%$" else "" for word in text.split()}


def row_allowed(table: str, row: dict[str, object]) -> bool:
    """Return whether a row may be copied. Only a few tables have rows that may not be copied."""
    if table == "DIAGNOSTIC_EVENT":
        return DIAGNOSTICS.fullmatch(str(row.get("text"))) is not None
    if table not in NAMED_VALUES:
        return True
    form = VALUES.get(str(row.get("name")))
    return form is not None and form.fullmatch(str(row.get("value"))) is not None


def scrub_nsys(path: Path, out: IO[bytes], scrubber: Scrubber) -> None:
    """Write a scrubbed copy of an nsys export.

    Each process or thread id is replaced with the same small number in all tables. Texts are copied
    only if a copied row refers to them. Raise TraceFormatError if it is not an nsys export.
    """
    # `opened` raises an error if the file is not an export, is cut off or is still being written
    with opened(path, path) as export, new_database(path, out, scrubber) as target:
        copied = _Export(export.connection, target, scrubber)
        if not copied.kept:
            raise TraceFormatError(path, "no nsys tables", expected=EXPECTED)
        copied.copy()


@contextmanager
def new_database(path: Path, out: IO[bytes], scrubber: Scrubber) -> Iterator[sqlite3.Connection]:
    """Open a new database, and write it to `out` if the `with` block raises no error.

    `path` is the database of which it is a copy. Record texts in deleted rows of that database.
    """
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as file:
        with closing(sqlite3.connect(file.name)) as target:
            # no journal and no fsync are necessary, because an incomplete copy is deleted
            target.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF")
            yield target
            target.commit()
        if scrubber.looks_for_deleted and _has_deleted(path, Path(file.name)):
            scrubber.record("deleted rows", "parts of the file that no table uses", "pages")
        with Path(file.name).open("rb") as copy:
            shutil.copyfileobj(copy, out)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _tables(source: sqlite3.Connection) -> list[str]:
    sql = f"SELECT name FROM sqlite_master WHERE {_PLAIN_TABLES} ORDER BY rowid"
    return [str(name) for (name,) in source.execute(sql).fetchall()]


def _columns(source: sqlite3.Connection, table: str) -> list[str]:
    return [str(row[1]) for row in source.execute(f"PRAGMA table_info({_quoted(table)})")]


class _Export:
    """Copies the allowed contents of an export into a new file."""

    def __init__(
        self, source: sqlite3.Connection, target: sqlite3.Connection, scrubber: Scrubber
    ) -> None:
        self.source, self.target, self.scrubber = source, target, scrubber
        self.kept: dict[str, dict[str, str]] = {}  # marks of columns to copy, by table and column
        for table in _tables(source):
            allowed = columns_of(table)
            if columns := [name for name in _columns(source, table) if name in allowed]:
                self.kept[table] = {name: allowed[name] for name in columns}
        self.numbers = self._numbers()
        self.used: set[int] = set()  # keys of StringIds in copied rows

    def copy(self) -> None:
        empty = self._declare()
        for table, columns in self.kept.items():
            self._copy_rows(table, columns, empty[table])
        self._copy_strings(empty)

    def _copy_rows(self, table: str, columns: dict[str, str], empty: dict[str, str]) -> None:
        converts: dict[str, Callable[[str, Any], Any]] = {
            # in SQLite, a column of numbers may also contain texts
            "": lambda _, value: value if isinstance(value, int | float) else None,
            "@": lambda _, value: value if isinstance(value, int) else None,
            "#": lambda _, value: self._renumber(value) if isinstance(value, int) else None,
            "%": lambda _, value: self.numbers.get(value),
            "$": lambda column, value: (
                self.scrubber.clean(value, where=f"{table}.{column}")
                if isinstance(value, str)
                else None
            ),
        }
        if table in (*NAMED_VALUES, "DIAGNOSTIC_EVENT"):
            converts["$"] = lambda _, value: value  # `row_allowed` has checked the texts of the row
        strings = [index for index, mark in enumerate(columns.values()) if mark == "@"]
        names = ", ".join(map(_quoted, columns))
        cursor = self.source.execute(f"SELECT {names} FROM {_quoted(table)} ORDER BY rowid")
        given = [(name, "?") for name in columns]
        given += [pair for pair in empty.items() if pair[0] not in columns]
        into = ", ".join(_quoted(name) for name, _ in given)
        holes = ", ".join(hole for _, hole in given)
        while rows := cursor.fetchmany(BATCH):
            done = []
            for row in rows:
                if not row_allowed(table, dict(zip(columns, row, strict=True))):
                    self.scrubber.record("row", "an unknown row", table)
                    continue
                cleaned = tuple(
                    converts[mark](column, value)
                    for (column, mark), value in zip(columns.items(), row, strict=True)
                )
                for (column, mark), before, after in zip(
                    columns.items(), row, cleaned, strict=True
                ):
                    if before != after and mark != "$":
                        self.scrubber.record("value", "an unknown value", f"{table}.{column}")
                done.append(cleaned)
            self.used.update(row[at] for row in done for at in strings if row[at] is not None)
            sql = f"INSERT INTO {_quoted(table)} ({into}) VALUES ({holes})"
            self.target.executemany(sql, done)

    def _copy_strings(self, empty: dict[str, dict[str, str]]) -> None:
        if STRINGS not in empty:
            sql = f"CREATE TABLE {STRINGS} (id INTEGER PRIMARY KEY, value TEXT NOT NULL)"
            self.target.execute(sql)
        if not {"id", "value"} <= set(_columns(self.source, STRINGS)):
            return
        where = f"{STRINGS}.value"
        for key, text in self.source.execute(f"SELECT id, value FROM {STRINGS} ORDER BY id"):
            if key in self.used:
                row = (key, self.scrubber.clean(str(text), where=where))
                self.target.execute(f"INSERT INTO {STRINGS} VALUES (?, ?)", row)
            else:
                self.scrubber.record("text", "text that no copied row refers to", where)

    def _declare(self) -> dict[str, dict[str, str]]:
        """Create the tables of the source without rows.

        For each table, return the columns that must not be null, and an empty value for each of
        these columns.
        """
        empty: dict[str, dict[str, str]] = {}
        for table in _tables(self.source):
            allowed = {"id", "value"} if table == STRINGS else set(columns_of(table))
            if not allowed and not self.scrubber.is_known_name(table):
                self.scrubber.record("table", "an unknown table", "schema")
                continue
            declared = []
            sql = f"PRAGMA table_info({_quoted(table)})"
            for _, name, kind, needed, _, key in self.source.execute(sql).fetchall():
                if name not in allowed:
                    is_known = self.scrubber.is_known_name(name)
                    filled = f"{_quoted(name)} NOT IN ('', 0)"
                    query = f"SELECT 1 FROM {_quoted(table)} WHERE {filled} LIMIT 1"
                    if self.source.execute(query).fetchone():
                        shown = f"{table}.{name}" if is_known else table
                        self.scrubber.record("column", "an unknown column", shown)
                    if not is_known:
                        continue
                kind = kind.upper() if TYPE.fullmatch(kind) else ""
                needs = " PRIMARY KEY" if key == 1 and kind == "INTEGER" else " NOT NULL" * needed
                declared.append(f'"{name}" {kind}{needs}')
                if needed and not key:
                    empty.setdefault(table, {})[name] = "''" if "TEXT" in kind else "0"
            if declared:
                empty.setdefault(table, {})
                self.target.execute(f"CREATE TABLE {_quoted(table)} ({', '.join(declared)})")
        return empty

    def _renumber(self, value: int) -> int:
        """Return a serialized id with new process and thread numbers and unchanged machine bits."""
        machine, pid = value >> (2 * PID_SHIFT), (value >> PID_SHIFT) & PID_MASK
        ids = self.numbers[pid] << PID_SHIFT | self.numbers[value & PID_MASK]
        return machine << (2 * PID_SHIFT) | ids

    def _numbers(self) -> dict[int, int]:
        """Return the numbers that replace process and thread ids in the copy, by id.

        The numbers are 1, 2, … in the order of the ids. A process and its first thread have the
        same id and get the same number.
        """
        ids = {0}
        for table, columns in self.kept.items():
            for column in [column for column, mark in columns.items() if mark in ("#", "%")]:
                name = _quoted(column)
                sql = (
                    f"SELECT DISTINCT {name} FROM {_quoted(table)} WHERE typeof({name}) = 'integer'"
                )
                for (value,) in self.source.execute(sql):
                    serialized = {(value >> PID_SHIFT) & PID_MASK, value & PID_MASK}
                    ids |= {value} if columns[column] == "%" else serialized
        return {value: number for number, value in enumerate([0, *sorted(ids - {0})])}


def _has_deleted(path: Path, copy: Path) -> bool:
    """Return whether the unused parts of an SQLite file contain a text that is not in the copy.

    Sections 1.5 and 1.6 of the SQLite file format describe the unused parts. When SQLite moves a
    row, the old bytes of the row remain there. Therefore a text does not count as deleted if the
    copy contains it, or if the text can be cut into two parts that the copy contains.
    """
    found: set[bytes] = set()
    with path.open("rb") as file:
        head = file.read(100)
        size = int.from_bytes(head[16:18], "big")
        size = 65536 if size == 1 else size
        file.seek(0)
        for number, page in enumerate(iter(lambda: file.read(size), b"")):
            for free in _free_parts(page, 100 if number == 0 else 0):
                found.update(_TEXT.findall(free))
    if not found:
        return False
    with closing(sqlite3.connect(copy)) as db:
        texts = "\n".join(_texts(db)).encode()
    return not all(
        any(text[:cut] in texts and text[cut:] in texts for cut in range(len(text)))
        for text in found
    )


def _free_parts(page: bytes, start: int) -> Iterator[bytes]:
    kind = page[start]
    # a page of another kind is a free page, or contains the end of a long row
    if kind not in (2, 5, 10, 13):
        yield b"" if kind == 0 and any(page[:4]) else page
        return
    block, cells, content = (
        int.from_bytes(page[start + at : start + at + 2], "big") for at in (1, 3, 5)
    )
    yield page[start + (8 if kind in (10, 13) else 12) + 2 * cells : content or 65536]
    while block:
        following = int.from_bytes(page[block : block + 2], "big")
        length = int.from_bytes(page[block + 2 : block + 4], "big")
        yield page[block + 4 : block + length]
        block = following if following > block else 0


def _texts(db: sqlite3.Connection) -> Iterator[str]:
    yield from (str(sql) for (sql,) in db.execute("SELECT sql FROM sqlite_master"))
    for table in _tables(db):
        for column in _columns(db, table):
            name = _quoted(column)
            sql = f"SELECT DISTINCT {name} FROM {_quoted(table)} WHERE typeof({name}) = 'text'"
            yield from (str(text) for (text,) in db.execute(sql))
