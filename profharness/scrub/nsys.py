"""An nsys SQLite export as a fresh file: all tables and columns, with allowed contents alone."""

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
from profharness.parse.nsys_export import EXPECTED, opened
from profharness.scrub.text import Cleaner, names_in, private_names

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


KIND = re.compile(r"[A-Za-z ]{0,30}")
# Rows of texts are copied only where the whole text is one of these.
DIAGNOSTICS = re.compile(r"Number of [A-Za-z ]+ events collected: [\d,]+\.?")
METADATA = re.compile(
    r"EXPORT_(?:PRODUCT_NAME|PRODUCT_VERSION|PRODUCT_DATE|SCHEMA_VERSION(?:_\w+)?|PLATFORM|ARCH"
    r"|TIME_UTC|PARAM_LAZY|PARAM_TIME_NORMALIZE|PARAM_TIME_SHIFT|CONFIG_TIME_SHIFT)"
)
SYSTEM = re.compile(r"CudaDriverVersion|NvDriverVersion")
SYSTEM_VALUES = re.compile(r"\d[\d.]{0,63}")
# Table: the column that tells what a row is, and what it may say.
FILTERED = {
    "META_DATA_EXPORT": ("name", METADATA),
    "EXPORT_META_DATA": ("name", METADATA),
    SYSTEM_TABLE: ("name", SYSTEM),
    "DIAGNOSTIC_EVENT": ("text", DIAGNOSTICS),
}
PRIVATE_COLUMNS = frozenset({"uuid", "busLocation", "ctxswDevPath", "ctrlDevPath", "filename"})
HOMES = ("/home", "/Users/", "/users/", "\\Users\\", "USER=", "HOST=", "HOSTNAME=", "LOGNAME=")
PID_SHIFT = 24
PID_MASK = (1 << PID_SHIFT) - 1
BATCH = 10_000
_Kept = dict[str, dict[str, str]]  # table to column to mark


def columns_of(table: str) -> dict[str, str] | None:
    """Column name to mark for a table that may be copied, also one named with `_V2`; else None."""
    base = re.sub(r"_V\d+$", "", table)
    text = ENUM_COLUMNS if re.fullmatch(r"ENUM_[A-Z0-9_]+", table) else TABLES.get(base)
    if text is None:
        return None
    return {word.lstrip("@#%$"): word[0] if word[0] in "@#%$" else "" for word in text.split()}


def row_allowed(table: str, row: dict[str, object]) -> bool:
    """Whether a row may be copied, where only some rows of its table may."""
    if table not in FILTERED:
        return True
    column, pattern = FILTERED[table]
    value_allowed = table != SYSTEM_TABLE or SYSTEM_VALUES.fullmatch(str(row.get("value")))
    return bool(pattern.fullmatch(str(row.get(column))) and value_allowed)


def private_names_in(path: Path) -> frozenset[str]:
    """Host and user names in an export's texts. Raises TraceFormatError if it is none of nsys."""
    with _opened(path, "read") as source:
        return private_names(_system_names(source)) | names_in(_texts(source))


def _system_names(source: sqlite3.Connection) -> Iterator[str]:
    for table in (SYSTEM_TABLE, "META_DATA_CAPTURE"):
        if not {"name", "value"} <= set(_columns(source, table)):
            continue
        for name, value in source.execute(f"SELECT name, value FROM {table}"):
            if re.search(r"host_?name|user_?name", str(name), re.IGNORECASE):
                yield str(value)


def _texts(source: sqlite3.Connection) -> Iterator[str]:
    """Texts of any table that can give a name away."""
    sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
    for (table,) in source.execute(sql).fetchall():
        # the names are the file's own, and may hold a quote
        quoted = table.replace('"', '""')
        for column, kind in source.execute(f'SELECT name, type FROM pragma_table_info("{quoted}")'):
            if kind.upper().startswith(("INT", "REAL")):
                continue
            name = column.replace('"', '""')
            matches = " OR ".join([f'instr("{name}", ?)'] * len(HOMES))
            where = f"typeof(\"{name}\") = 'text' AND ({matches})"
            rows = source.execute(f'SELECT "{name}" FROM "{quoted}" WHERE {where}', HOMES)
            yield from (str(text) for (text,) in rows)


def scrub_nsys(path: Path, out: IO[bytes], cleaner: Cleaner) -> None:
    """Write the copy; raises TraceFormatError for a file that is no export of nsys.

    Process and thread ids become small numbers, the same in every table. Texts are cleaned; those
    that no copied row refers to are left out.
    """
    with _opened(path, "copied") as source, tempfile.NamedTemporaryFile(suffix=".sqlite") as file:
        kept = _kept(source)
        if not kept:
            raise TraceFormatError(path, "not by nsys", expected=EXPECTED)
        with closing(sqlite3.connect(file.name)) as target:
            # a copy that fails is thrown away: it needs neither journal nor fsync
            target.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF")
            _copy(source, target, kept, cleaner)
            target.commit()
        with Path(file.name).open("rb") as copy:
            shutil.copyfileobj(copy, out)


@contextmanager
def _opened(path: Path, done: str) -> Iterator[sqlite3.Connection]:
    with opened(path, path) as export:  # refuses what is foreign, cut off or being written
        try:
            yield export.connection
        except (sqlite3.Error, OverflowError) as error:
            raise TraceFormatError(path, f"cannot be {done}: {error}", expected=EXPECTED) from None


def _columns(source: sqlite3.Connection, table: str) -> list[str]:
    return [str(row[1]) for row in source.execute(f'PRAGMA table_info("{table}")')]


def _kept(source: sqlite3.Connection) -> _Kept:
    names = source.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid")
    kept: _Kept = {}
    for (name,) in names.fetchall():
        allowed = columns_of(str(name)) or {}
        columns = [column for column in _columns(source, name) if column in allowed]
        if columns:
            kept[name] = {column: allowed[column] for column in columns}
    return kept


def _copy(
    source: sqlite3.Connection, target: sqlite3.Connection, kept: _Kept, cleaner: Cleaner
) -> None:
    numbers = _numbers(source, kept)
    converts: dict[str, Callable[[Any], Any]] = {
        # SQLite keeps a text in a column of numbers too
        "": lambda value: value if isinstance(value, int | float) else None,
        "@": lambda value: value if isinstance(value, int) else None,
        "#": lambda value: _global(value, numbers),
        "%": lambda value: numbers.get(value),
        "$": lambda value: cleaner.clean(value) if isinstance(value, str) else None,
    }
    empty = _declare(source, target, cleaner)
    used: set[int] = set()
    for table, columns in kept.items():
        chosen = [converts[mark] for mark in columns.values()]
        strings = [index for index, mark in enumerate(columns.values()) if mark == "@"]
        names = ", ".join(f'"{column}"' for column in columns)
        cursor = source.execute(f'SELECT {names} FROM "{table}" ORDER BY rowid')
        given = [(name, "?") for name in columns]
        given += [pair for pair in empty[table].items() if pair[0] not in columns]
        into, holes = (", ".join(part) for part in zip(*given, strict=True))
        while rows := cursor.fetchmany(BATCH):
            done = [
                tuple(convert(value) for convert, value in zip(chosen, row, strict=True))
                for row in rows
                if row_allowed(table, dict(zip(columns, row, strict=True)))
            ]
            used.update(row[index] for row in done for index in strings if row[index] is not None)
            target.executemany(f'INSERT INTO "{table}" ({into}) VALUES ({holes})', done)
    if STRINGS not in empty:
        target.execute(f"CREATE TABLE {STRINGS} (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
    if {"id", "value"} <= set(_columns(source, STRINGS)):
        texts = source.execute(f"SELECT id, value FROM {STRINGS} ORDER BY id")
        cleaned = ((key, cleaner.clean(str(text))) for key, text in texts if key in used)
        target.executemany(f"INSERT INTO {STRINGS} VALUES (?, ?)", cleaned)


def _declare(
    source: sqlite3.Connection, target: sqlite3.Connection, cleaner: Cleaner
) -> dict[str, dict[str, str]]:
    """Make all tables of the source, empty: other readers look for them and for each column. Gives
    what stands for nothing in the columns of each that must not be null.
    """
    sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
    empty: dict[str, dict[str, str]] = {}
    for (table,) in source.execute(f"{sql} ORDER BY rowid").fetchall():
        has_rule = table == STRINGS or columns_of(table) is not None
        if str(table).startswith("sqlite_") or not (has_rule or _harmless(table, cleaner)):
            continue
        declared = []
        for _, name, kind, needed, _, key in source.execute(f'PRAGMA table_info("{table}")'):
            if not _harmless(name, cleaner):
                continue
            kind = kind.upper() if KIND.fullmatch(kind) else ""
            needs = " PRIMARY KEY" if key == 1 and kind == "INTEGER" else " NOT NULL" * needed
            declared.append(f'"{name}" {kind}{needs}')
            if needed and not key:
                empty.setdefault(table, {})[name] = "''" if "TEXT" in kind else "0"
        if declared:
            empty.setdefault(table, {})
            target.execute(f'CREATE TABLE "{table}" ({", ".join(declared)})')
    return empty


def _harmless(name: str, cleaner: Cleaner) -> bool:
    """Whether the name of a table or column is a plain word with nothing private."""
    return re.fullmatch(r"\w{1,80}", name) is not None and cleaner.clean(name) == name


def _numbers(source: sqlite3.Connection, kept: _Kept) -> dict[int, int]:
    """Process and thread ids to 1, 2, …; a process and its first thread share an id."""
    ids = {0}
    for table, columns in kept.items():
        for column in [column for column, mark in columns.items() if mark in ("#", "%")]:
            where = f"typeof(\"{column}\") = 'integer'"
            for (value,) in source.execute(
                f'SELECT DISTINCT "{column}" FROM "{table}" WHERE {where}'
            ):
                ids |= {value} if columns[column] == "%" else {_pid(value), value & PID_MASK}
    return {value: number for number, value in enumerate([0, *sorted(ids - {0})])}


def _pid(value: int) -> int:
    return (value >> PID_SHIFT) & PID_MASK


def _global(value: object, numbers: dict[int, int]) -> int | None:
    """A serialized id with its process and thread renumbered; the 16 bits of the machine stay."""
    if not isinstance(value, int):
        return None
    machine = value >> (2 * PID_SHIFT)
    pid, tid = numbers[_pid(value)], numbers[value & PID_MASK]
    return (machine << (2 * PID_SHIFT)) | (pid << PID_SHIFT) | tid
