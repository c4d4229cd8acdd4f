"""What an nsys export says about itself: devices, versions, start time, diagnostics; nothing that
names a host, user, path or command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from profharness.parse.nsys_export import META_TABLES, Export
from profharness.trace import Device

MAX_TEXT = 200
MAX_DIAGNOSTICS = 5
WARNING = 2  # DIAGNOSTIC_EVENT.severity; 3 is an error
PRODUCT = {"EXPORT_PRODUCT_VERSION": "nsys_version", "EXPORT_SCHEMA_VERSION": "nsys_schema_version"}
SYSTEM = {"CudaDriverVersion": "cuda_driver_version", "NvDriverVersion": "driver_version"}

_VERSION = re.compile(r"\d[\w.\-+]{0,63}")
_PRIVATE = re.compile(r"[/\\@=~]|\w\.\w+\.\w")  # a path, an address, an assignment, a host
_GPU = (
    "id", "name", "computeMajor", "computeMinor", "smCount", "totalMemory", "maxThreadsPerBlock",
    "maxWarpsPerSm", "threadsPerWarp", "maxRegistersPerBlock", "maxRegistersPerSm",
    "maxShmemPerBlock", "maxShmemPerBlockOptin", "maxShmemPerSm", "cuDevice",
)  # fmt: skip


def environment(export: Export) -> dict[str, object]:
    """Versions of nsys, of its schema, of CUDA's driver and of NVIDIA's, as far as they are told
    and look like versions.
    """
    found: dict[str, object] = {}
    for table in META_TABLES:
        found.update(_versions(export.rows(table, ("name", "value")), PRODUCT))
    found.update(_versions(export.rows("TARGET_INFO_SYSTEM_ENV", ("name", "value")), SYSTEM))
    return found


def _versions(rows: Iterator[tuple[Any, ...]], keys: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for name, value in rows:
        if name in keys and value is not None and _VERSION.fullmatch(str(value)):
            text = str(value)
            yield keys[name], int(text) if text.isdecimal() else text


def start_time(export: Export) -> tuple[int, list[str]]:
    """(nanoseconds since 1970 at which the capture's times count 0, warnings)."""
    for (value,) in export.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
        if _integer(value) and value < 1 << 61:
            return int(value), []
    return 0, ["the export does not tell when the capture started; times count from 0"]


def devices(export: Export) -> tuple[tuple[Device, ...], list[str]]:
    """(GPUs under the index that CUDA gave them in the profiled process, warnings)."""
    rows = [dict(zip(_GPU, row, strict=True)) for row in export.rows("TARGET_INFO_GPU", _GPU)]
    by_id = {row["id"]: row for row in rows}
    pairs: dict[int, dict[str, Any]] = {}
    doubt: list[str] = []
    for gpu, cuda in export.rows("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId")):
        if gpu not in by_id or not _integer(cuda):
            continue
        if pairs.setdefault(cuda, by_id[gpu]) is not by_id[gpu]:
            doubt = ["processes of this capture number their GPUs differently; the first counts"]
    if not pairs:
        for row in rows:
            index = row["id"] if row["cuDevice"] is None else row["cuDevice"]
            pairs.setdefault(index, row)
    found = (_device(index, row) for index, row in sorted(pairs.items(), key=lambda p: str(p[0])))
    return tuple(device for device in found if device), doubt


def _device(index: object, row: dict[str, Any]) -> Device | None:
    essentials = [index, row["computeMajor"], row["computeMinor"], row["smCount"]]
    if not all(_integer(value) for value in essentials) or not isinstance(row["name"], str):
        return None
    number, major, minor, sms = (int(str(value)) for value in essentials)
    warp, warps = _limit(row, "threadsPerWarp"), _limit(row, "maxWarpsPerSm")
    return Device(
        index=number,
        name=row["name"][:MAX_TEXT],
        compute_major=major,
        compute_minor=minor,
        num_sms=sms,
        total_memory_bytes=_limit(row, "totalMemory"),
        max_threads_per_block=_limit(row, "maxThreadsPerBlock"),
        max_threads_per_sm=warp * warps if warp and warps else None,
        registers_per_block=_limit(row, "maxRegistersPerBlock"),
        registers_per_sm=_limit(row, "maxRegistersPerSm"),
        shared_bytes_per_block=_limit(row, "maxShmemPerBlock"),
        shared_bytes_per_block_optin=_limit(row, "maxShmemPerBlockOptin"),
        shared_bytes_per_sm=_limit(row, "maxShmemPerSm"),
        warp_size=warp or 32,
    )


def diagnostics(export: Export) -> list[str]:
    """nsys's own warnings and errors of the capture, without those that could name a path, a host
    or a command; at most MAX_DIAGNOSTICS.
    """
    rows = export.rows("DIAGNOSTIC_EVENT", ("severity", "text"))
    texts: dict[str, None] = {}
    for severity, text in rows:
        if severity not in (WARNING, WARNING + 1) or not isinstance(text, str):
            continue
        plain = " ".join(text.split())
        if plain and not _PRIVATE.search(plain) and len(texts) < MAX_DIAGNOSTICS:
            texts.setdefault(f"nsys says: {plain[:MAX_TEXT]}")
    return list(texts)


def _limit(row: dict[str, Any], key: str) -> int | None:
    value = row[key]
    return int(value) if _integer(value) and value > 0 else None


def _integer(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 62
