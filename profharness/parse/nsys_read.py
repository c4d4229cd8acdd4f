"""Rows of an nsys export to int64 columns in a temporary file: device activities, API calls, NVTX
ranges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profharness.devices import Device
from profharness.parse.columns import MAX_NS, Block, Ints, Spool, Tables
from profharness.parse.nsys_export import META_TABLES, Export
from profharness.parse.ranges import RangeColumns

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


KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NUMBERS = (
    "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId", "bytes",
)  # fmt: skip
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
PROCESS_SHIFT = 40  # correlation ids count per process; a key is process << 40 | correlation
CORRELATIONS = 1 << PROCESS_SHIFT
MAX_PROCESSES = 4096
OWN_DOMAIN = "profharness"
RANGES = "eventType IN (59, 60, 70, 71)"  # push/pop and start/end, and their nvtxt twins
START_END = (60, 71)
DOMAINS = "eventType = 75"
MAX_RANGE_NAME = 4096


# Names of calls that start most activities. Others are read only where these leave some without a
# call: an export can hold ten times as many.
LAUNCHING = ("cu%Launch%", "cu%Memcpy%", "cu%Memset%")
MAX_NEEDED = 1 << 25  # bytes of flags, eight to a byte, that say which calls are needed


_API_VERSION = re.compile(r"_v\d{4,6}$")


class Reader:
    """Reads one export into `tables` and `spool`.

    tables.gpu has rows of chrome_columns.GPU_ROW, kernel being an index into `variants` and config
    unused (0); tables.launches rows of LAUNCH_ROW; the correlation of both is a key, see
    PROCESS_SHIFT. Blocks are sorted by key. variants are (table, names and launch configuration or
    kinds of memory).
    """

    def __init__(self, export: Export, spool: Spool) -> None:
        self.tables = Tables()
        self.variants: dict[tuple[str, tuple[Any, ...]], int] = {}
        self.ranges = RangeColumns()
        self._export = export
        self._spool = spool
        self._processes: dict[int, int] = {}
        self._needed: list[NDArray[np.uint8]] | None = []
        self._strings: dict[int, str | None] = {}

    def read(self) -> None:
        """Everything, in the order in which one needs the other."""
        for table in VARIANTS:
            if self._export.has(table, "start", "end"):
                self._read_activities(table)
        if self._export.has(RUNTIME, "start", "globalTid", "correlationId"):
            self._read_needed_calls()
        self._needed = None
        self._read_ranges()
        for blocks in (self.tables.gpu, self.tables.launches):
            blocks.sort(key=lambda block: block.low)

    def _read_needed_calls(self) -> None:
        """The calls of the activities read so far, or all where there is no telling."""
        ids = self._export.strings_like(LAUNCHING)
        if self._needed is None or not ids or not self._export.has(RUNTIME, "nameId"):
            self._read_calls("")
            return
        listed = ", ".join(map(str, ids))
        self._read_calls(f"nameId IN ({listed})")
        if any(needed.any() for needed in self._needed):
            self._read_calls(f"nameId IS NULL OR nameId NOT IN ({listed})")

    def _read_calls(self, where: str) -> None:
        columns = ("correlationId", "nameId", "globalTid", "start")
        for batch in self._export.batches(RUNTIME, columns, where, filled=4):
            correlation, name, thread, start = self._numbers(batch, 4)[0]
            key = self._keys(correlation, thread)
            keep = (key >= 0) & (thread != -1) & (np.abs(start) < MAX_NS)
            keep[keep] = self._answers(key[keep])
            key, name, thread = key[keep], name[keep], thread[keep]
            calls = [key, _mapped(name, self._api), _mapped(thread, self._thread), start[keep]]
            self._write(self.tables.launches, calls, key)

    def _need(self, key: Ints) -> None:
        """Note that calls with these keys are wanted; all calls are when the ids grow too large."""
        for process in np.unique(key[key >= 0] >> PROCESS_SHIFT).tolist():
            if self._needed is None:
                return
            ids = key[key >> PROCESS_SHIFT == process] % CORRELATIONS
            self._needed += [np.zeros(0, np.uint8)] * (process + 1 - len(self._needed))
            more = int(ids.max() >> 3) + 1 - len(self._needed[process])
            if more + sum(len(needed) for needed in self._needed) > MAX_NEEDED:
                self._needed = None
                return
            if more > 0:
                room = np.zeros(more + len(self._needed[process]) // 2, np.uint8)
                self._needed[process] = np.concatenate([self._needed[process], room])
            np.bitwise_or.at(self._needed[process], ids >> 3, _flag(ids))

    def _answers(self, key: Ints) -> NDArray[np.bool_]:
        """Which of these calls an activity waits for; from then on it does not."""
        found = np.ones(len(key), np.bool_)
        if self._needed is None:
            return found
        process = key >> PROCESS_SHIFT
        for one in np.unique(process).tolist():
            mine = np.flatnonzero(process == one)
            needed = self._needed[one] if one < len(self._needed) else np.zeros(0, np.uint8)
            ids = key[mine] % CORRELATIONS
            inside = ids >> 3 < len(needed)
            ids = ids[inside]
            found[mine] = inside
            found[mine[inside]] = (needed[ids >> 3] & _flag(ids)) > 0
            np.bitwise_and.at(needed, ids >> 3, ~_flag(ids))
        return found

    def _read_activities(self, table: str) -> None:
        width, variants = len(NUMBERS), self.variants
        columns = (*NUMBERS, *VARIANTS[table])
        for batch in self._export.batches(table, columns, filled=width):
            rows, batch = self._numbers(batch, width)
            start, end, device, stream, correlation, process, node, size = rows
            variant = np.array(
                [variants.setdefault((table, row[width:]), len(variants)) for row in batch],
                np.int64,
            )
            keep = (np.abs(start) < MAX_NS) & (np.abs(end) < MAX_NS) & (end >= start)
            self.tables.skipped += int((~keep).sum())
            key = self._keys(correlation, process)
            self._need(key[keep])
            zero = np.zeros_like(start)
            gpu = [start, end - start, variant, zero, device, stream, key, node, size]
            self._write(self.tables.gpu, [column[keep] for column in gpu], key[keep])

    def _read_ranges(self) -> None:
        if not self._export.has("NVTX_EVENTS", "start", "eventType", "globalTid"):
            return
        domains = self._domains()
        end_of_trace: int | None = None
        columns = ("start", "end", "globalTid", "eventType", "domainId", "textId", "text")
        names: dict[str, str] = {}
        for row in self._export.rows("NVTX_EVENTS", columns, RANGES):
            start, end, thread, kind, domain, string, text = row
            if not (_time(start) and (end is None or _time(end)) and isinstance(thread, int)):
                self.tables.skipped += 1
                continue
            if end is None and end_of_trace is None:
                end_of_trace = self._end_of_trace()
            stop = max(end_of_trace or 0, start) if end is None else end
            if stop < start:
                self.tables.skipped += 1
                continue
            told = (text if string is None else self._string(string)) or ""
            name = f"{domains.get((thread >> 24, domain), '')}{told}"[:MAX_RANGE_NAME]
            wide = kind in START_END
            name = names.setdefault(name, name)
            self.ranges.add(name, start, stop - start, self._thread(thread), wide)

    def _end_of_trace(self) -> int:
        """The latest end of anything, in ns since the start of the capture."""
        tables = (*VARIANTS, RUNTIME, "NVTX_EVENTS")
        return max(min(self._export.largest(table, "end") or 0, MAX_NS - 1) for table in tables)

    def _domains(self) -> dict[tuple[int, Any], str]:
        """Prefix of range names by process and domain id; none for profharness' own domain and for
        the default one.
        """
        found: dict[tuple[int, Any], str] = {}
        columns = ("globalTid", "domainId", "textId", "text")
        for thread, domain, string, text in self._export.rows("NVTX_EVENTS", columns, DOMAINS):
            name = text if string is None else self._string(string)
            if isinstance(thread, int) and domain and name and name != OWN_DOMAIN:
                found[(thread >> 24, domain)] = f"{name}:"
        return found

    def _numbers(
        self, batch: list[tuple[Any, ...]], width: int
    ) -> tuple[Ints, list[tuple[Any, ...]]]:
        """(the first `width` columns as an array [width, rows], the rows kept); rows that hold
        something else than integers are skipped and counted.
        """
        try:
            return _array(batch, width), batch
        except (TypeError, ValueError, OverflowError):
            good = [row for row in batch if all(isinstance(v, int) for v in row[:width])]
            self.tables.skipped += len(batch) - len(good)
            return _array(good, width), good

    def _keys(self, correlation: Ints, thread_or_process: Ints) -> Ints:
        """Correlation ids made unique across processes; -1 where there is none."""
        ids = thread_or_process >> 24
        process = _mapped(ids, self._process)
        known = (correlation >= 0) & (correlation < CORRELATIONS) & (process >= 0)
        return np.where(known, process * CORRELATIONS + correlation, -1)

    def _process(self, number: int) -> int:
        if number == -1:  # not told: clear all the same where there is but one
            calls = self._export.distinct_processes(RUNTIME)
            if len(calls) != 1:
                return -1
            number = calls[0]
        found = self._processes.setdefault(number, len(self._processes))
        return found if found < MAX_PROCESSES else -1

    def _thread(self, number: int) -> int:
        threads = self.tables.threads
        key = ((number >> 24) & 0xFFFFFF, number & 0xFFFFFF)
        return threads.setdefault(key, len(threads))

    def _api(self, string: int) -> int:
        name = _API_VERSION.sub("", self._string(string) or "unknown")
        return self.tables.apis.setdefault(name, len(self.tables.apis))

    def _string(self, number: Any) -> str | None:
        if number not in self._strings:
            self._strings[number] = self._export.text(number)
        return self._strings[number]

    def _write(self, blocks: list[Block], columns: list[Ints], key: Ints) -> None:
        """Write rows sorted by key, in one block per process."""
        if not len(key):
            return
        order = np.argsort(key, kind="stable")
        key = key[order]
        borders = np.flatnonzero(np.diff(key >> PROCESS_SHIFT)) + 1
        for part in np.split(np.arange(len(key)), borders):
            rows = order[part]
            offset = self._spool.write([column[rows] for column in columns])
            low, high = int(key[part[0]]), int(key[part[-1]])
            number = (0, len(blocks))
            blocks.append(Block(number, offset, len(columns), len(part), low, high))


def _array(batch: list[tuple[Any, ...]], width: int) -> Ints:
    flat = chain.from_iterable(row[:width] for row in batch)
    values: NDArray[np.int64] = np.fromiter(flat, np.int64, width * len(batch))
    return np.ascontiguousarray(values.reshape(len(batch), width).T)


def _mapped(values: Ints, number: Any) -> Ints:
    """`number` of each value, called once per distinct one."""
    distinct, inverse = np.unique(values, return_inverse=True)
    return np.array([number(value) for value in distinct.tolist()], np.int64)[inverse]


def _flag(ids: Ints) -> NDArray[np.uint8]:
    """The bit of each id within its byte."""
    flag: NDArray[np.uint8] = np.left_shift(1, ids & 7).astype(np.uint8)
    return flag


def _time(value: object) -> bool:
    return isinstance(value, int) and abs(value) < MAX_NS
