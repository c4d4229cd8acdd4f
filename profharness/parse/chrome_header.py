"""What a Kineto file says about itself: devices, versions, the time base; nothing that names a
host, user or path.
"""

from __future__ import annotations

from typing import Any

from profharness.trace import Device

KEPT = (
    "schemaVersion", "trace_id", "record_shapes", "with_stack", "profile_memory", "with_flops",
    "with_modules", "cuda_runtime_version", "cuda_driver_version", "cupti_version",
    "hip_runtime_version", "hip_driver_version", "rocm_version", "torch_version",
)  # fmt: skip
DISTRIBUTED = ("backend", "rank", "world_size")
MAX_TEXT = 200


def environment(header: dict[str, Any]) -> dict[str, object]:
    """The header's harmless scalars, and of distributedInfo backend, rank and world_size."""
    found: dict[str, object] = {key: header[key] for key in KEPT if _scalar(header.get(key))}
    info = header.get("distributedInfo")
    if isinstance(info, dict):
        kept = {key: info[key] for key in DISTRIBUTED if _scalar(info.get(key))}
        if kept:
            found["distributedInfo"] = kept
    return found


def devices(header: dict[str, Any]) -> tuple[Device, ...]:
    """deviceProperties as Devices; an entry without the essentials is left out."""
    rows = header.get("deviceProperties")
    found = (
        (_device(row) for row in rows if isinstance(row, dict)) if isinstance(rows, list) else ()
    )
    return tuple(device for device in found if device)


def time_base(header: dict[str, Any]) -> tuple[int, list[str]]:
    """(nanoseconds to add to every ts, warnings)."""
    base = header.get("baseTimeNanoseconds", 0)
    if isinstance(base, int) and not isinstance(base, bool) and abs(base) < 1 << 61:
        return base, []
    return 0, ["baseTimeNanoseconds is not a usable number; times count from 0"]


def _device(row: dict[str, Any]) -> Device | None:
    essentials = [row.get(key) for key in ("id", "computeMajor", "computeMinor", "numSms")]
    if not all(_integer(value) for value in essentials) or not isinstance(row.get("name"), str):
        return None
    index, major, minor, sms = (int(value) for value in essentials if value is not None)
    warp = row.get("warpSize")
    return Device(
        index=index,
        name=row["name"][:MAX_TEXT],
        compute_major=major,
        compute_minor=minor,
        num_sms=sms,
        total_memory_bytes=_limit(row, "totalGlobalMem"),
        max_threads_per_block=_limit(row, "maxThreadsPerBlock"),
        max_threads_per_sm=_limit(row, "maxThreadsPerMultiprocessor"),
        registers_per_block=_limit(row, "regsPerBlock"),
        registers_per_sm=_limit(row, "regsPerMultiprocessor"),
        shared_bytes_per_block=_limit(row, "sharedMemPerBlock"),
        shared_bytes_per_block_optin=_limit(row, "sharedMemPerBlockOptin"),
        shared_bytes_per_sm=_limit(row, "sharedMemPerMultiprocessor"),
        warp_size=warp if isinstance(warp, int) and _integer(warp) else 32,
    )


def _limit(row: dict[str, Any], key: str) -> int | None:
    value = row.get(key)
    return value if isinstance(value, int) and _integer(value) else None


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _scalar(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < 1 << 62)
