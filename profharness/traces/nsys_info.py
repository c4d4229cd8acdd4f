"""Read an nsys export's versions, start time, GPUs and diagnostics, and check its tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from profharness.devices import Device
from profharness.errors import TraceFormatError
from profharness.traces.columns import MAX_NS, MAX_TEXT, whole
from profharness.traces.devices import CORE_FIELDS, make_device
from profharness.traces.nsys_export import META_TABLES, Export

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
# Columns without which no row of a table can be read.
NEEDED = {
    **dict.fromkeys(VARIANTS, ("start", "end")),
    RUNTIME: ("start", "globalTid", "correlationId"),
    NVTX: ("start", "eventType", "globalTid"),
    STRINGS: ("id", "value"),
}
_ACTIVITY = ("deviceId", "streamId", "correlationId", "globalPid")
# Columns that exports of all known versions have, and without which a result is incomplete.
WANTED = {
    KERNEL: (*_ACTIVITY, *VARIANTS[KERNEL]),
    MEMCPY: (*_ACTIVITY, "bytes", *VARIANTS[MEMCPY]),
    MEMSET: (*_ACTIVITY, "bytes", *VARIANTS[MEMSET]),
    RUNTIME: ("nameId",),
    NVTX: ("end", "text", "textId", "domainId"),
}
ABSENT = {
    RUNTIME: "no launch has its API call, and none belongs to a range",
    NVTX: "no launch belongs to a range",
    STRINGS: "kernels, ranges and API calls have no names",
}
# CUPTI activities that this reader knows and does not need.
UNUSED = (
    "SYNCHRONIZATION", "CUDA_EVENT", "OVERHEAD", "MEMORY", "MEMORY_POOL", "MEM_DECOMPRESS",
    "GRAPH_NODE", "GRAPH_NODE_EVENT", "UM_CPU_PAGE_FAULT_EVENTS", "UM_GPU_PAGE_FAULT_EVENTS",
)  # fmt: skip
_ACTIVITIES = "CUPTI_ACTIVITY_KIND_"
KERNEL_LIKE = {"gridX", "blockX"}
UPDATE = "use a newer profharness, or an older nsys"
MAX_DIAGNOSTICS = 5
WARNING = 2  # DIAGNOSTIC_EVENT.severity; 3 is an error
PRODUCT = {"EXPORT_PRODUCT_VERSION": "nsys_version", "EXPORT_SCHEMA_VERSION": "nsys_schema_version"}
SYSTEM = {"CudaDriverVersion": "cuda_driver_version", "NvDriverVersion": "driver_version"}

_VERSION = re.compile(r"\d[\w.\-+]{0,63}")
_PRIVATE = re.compile(r"[/\\@=~]|\w\.\w+\.\w")  # a path, an address, an assignment, a host
GPU_KEYS = {
    "compute_major": "computeMajor",
    "compute_minor": "computeMinor",
    "num_sms": "smCount",
    "total_memory_bytes": "totalMemory",
    "max_threads_per_block": "maxThreadsPerBlock",
    "registers_per_block": "maxRegistersPerBlock",
    "registers_per_sm": "maxRegistersPerSm",
    "shared_bytes_per_block": "maxShmemPerBlock",
    "shared_bytes_per_block_optin": "maxShmemPerBlockOptin",
    "shared_bytes_per_sm": "maxShmemPerSm",
    "warp_size": "threadsPerWarp",
}
_GPU = ("id", "name", "cuDevice", "maxWarpsPerSm", *GPU_KEYS.values())


def check_schema(export: Export) -> list[str]:
    """Return warnings about missing tables and columns, and about unread tables with rows.

    Raise TraceFormatError if kernels are in an unknown form, because a trace is useless without
    them.
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
            text = f"{table} has no column {', '.join(lacks)}, so its {count} rows cannot be read"
            if table == KERNEL:
                raise TraceFormatError(export.path, text, expected=_expected(export))
            warnings.append(text)
        else:
            warnings.append(f"{table} has no column {', '.join(unknown)}; what it says is unknown")
    return warnings + _unread(export)


def _unread(export: Export) -> list[str]:
    """Return warnings about unknown tables with rows."""
    expected_tables = {*VARIANTS, RUNTIME, GRAPHS, *(f"{_ACTIVITIES}{name}" for name in UNUSED)}
    warnings = [f"{name} has rows as well and is not read" for name in export.passed_over]
    for table in export.tables:
        columns = export.columns(table) or frozenset()
        is_kernel = columns >= KERNEL_LIKE
        if table in expected_tables or not (is_kernel or table.startswith(_ACTIVITIES)):
            continue
        if count := export.count(table):
            text = f"the table {table[:80]} with {count} rows is not known"
            if is_kernel:
                raise TraceFormatError(export.path, text, expected=_expected(export))
            warnings.append(f"{text} and not read")
    return warnings


def _expected(export: Export) -> str:
    version = environment(export).get("nsys_version", "unknown")
    return f"the tables of a known nsys (this file is of version {version}); {UPDATE}"


def absent_tables(export: Export) -> list[str]:
    """Return warnings about tables that an export with launches should have."""
    return [
        f"the export has no table {table}: {text}"
        for table, text in ABSENT.items()
        if export.columns(table) is None
    ]


def environment(export: Export) -> dict[str, object]:
    """Return the versions of nsys, its schema, CUDA's driver and NVIDIA's, if they look like
    versions.
    """
    versions: dict[str, object] = {}
    for table in META_TABLES:
        versions.update(_versions(export.rows(table, ("name", "value")), PRODUCT))
    versions.update(_versions(export.rows("TARGET_INFO_SYSTEM_ENV", ("name", "value")), SYSTEM))
    return versions


def _versions(rows: Iterator[tuple[Any, ...]], keys: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for name, value in rows:
        if name in keys and value is not None and _VERSION.fullmatch(str(value)):
            text = str(value)
            yield keys[name], int(text) if text.isdecimal() else text


def start_time(export: Export) -> tuple[int, list[str]]:
    """Return the time of the capture's 0 in ns since 1970, and warnings."""
    for (value,) in export.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
        if (start := whole(value)) is not None and start < MAX_NS:
            return start, []
    return 0, ["the export does not tell when the capture started; times count from 0"]


def devices(export: Export) -> tuple[tuple[Device, ...], list[str]]:
    """Return the GPUs by their CUDA index in the profiled process, and warnings."""
    rows = [dict(zip(_GPU, row, strict=True)) for row in export.rows("TARGET_INFO_GPU", _GPU)]
    by_id = {row["id"]: row for row in rows}
    by_index: dict[Any, dict[str, Any]] = {}
    doubt: list[str] = []
    for gpu, cuda in export.rows("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId")):
        if gpu not in by_id or whole(cuda) is None:
            continue
        if by_index.setdefault(cuda, by_id[gpu]) is not by_id[gpu]:
            doubt = ["processes of this capture number their GPUs differently; the first counts"]
    if not by_index:
        for row in rows:
            by_index.setdefault(row["id"] if row["cuDevice"] is None else row["cuDevice"], row)
    made = [_device(*pair) for pair in sorted(by_index.items(), key=lambda pair: str(pair[0]))]
    doubt += [text for _, texts in made for text in texts]
    return tuple(device for device, _ in made if device), doubt


def _device(index: object, row: dict[str, Any]) -> tuple[Device | None, list[str]]:
    limits = {field: row[key] for field, key in GPU_KEYS.items()}
    for field in limits.keys() - CORE_FIELDS:
        limits[field] = limits[field] or None  # nsys writes 0 for unknown values
    warp, warps = whole(limits["warp_size"]), whole(row["maxWarpsPerSm"])
    limits["max_threads_per_sm"] = warp * warps if warp and warps else None
    return make_device(index, row["name"], limits)


def diagnostics(export: Export) -> list[str]:
    """Return up to MAX_DIAGNOSTICS warnings and errors of nsys, without those that may contain a
    path, a host or a command.
    """
    texts: dict[str, None] = {}
    for severity, text in export.rows("DIAGNOSTIC_EVENT", ("severity", "text")):
        if severity not in (WARNING, WARNING + 1) or not isinstance(text, str):
            continue
        plain = " ".join(text.split())
        if plain and not _PRIVATE.search(plain) and len(texts) < MAX_DIAGNOSTICS:
            texts.setdefault(f"nsys says: {plain[:MAX_TEXT]}")
    return list(texts)
