"""Nsight Systems' SQLite export (or a report, through the nsys at hand) to a Trace, in bounded
memory: device activities, API calls and NVTX ranges become int64 columns in a temporary file.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profharness.devices import Device
from profharness.errors import TraceFormatError
from profharness.parse import join as link
from profharness.parse.columns import (
    CORE_FIELDS,
    MAX_NS,
    MAX_TEXT,
    Block,
    Flags,
    GpuRows,
    Ids,
    Ints,
    LaunchRows,
    Spool,
    Tables,
    make_device,
    whole,
)
from profharness.parse.demangle import canonical_names
from profharness.parse.intervals import nothing
from profharness.parse.nsys_export import (
    META_TABLES,
    Export,
    memcpy_name,
    memset_name,
    opened,
)
from profharness.profilers import require_tool
from profharness.profilers.nsys import export_report
from profharness.trace import NONE, LaunchConfig, Trace

REPORT_SUFFIX = ".nsys-rep"
NO_CONFIG = LaunchConfig(None, None)
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
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


def parse_nsys(path: Path) -> Trace:
    """Parse an SQLite export of nsys, or a .nsys-rep by exporting it to a temporary file first.

    nsys counts times from the start of the capture. The Trace's times count from 1970 where the
    export tells that start (TARGET_INFO_SESSION_START_TIME.utcEpochNs). A file without launches
    gives an empty Trace whose warnings say what nsys said. A launch without its API call has
    launch_ns, range and cell_range NONE. The caller closes the Trace. Raises TraceFormatError
    when the file is no export, damaged or half-written, and what export_report raises.
    """
    path = Path(path)
    if not path.name.lower().endswith(REPORT_SUFFIX):
        return _parse(path, path)
    if not path.is_file():
        raise TraceFormatError(path, "no such file", expected="a report of nsys")
    with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
        output = Path(folder) / "report.sqlite"
        export_report(path, output, require_tool("nsys").path)
        return _parse(output, path)


def _parse(path: Path, shown: Path) -> Trace:
    with ExitStack() as stack:
        spool = Spool.temporary(stack)
        with opened(path, shown) as export:
            reader = Reader(export, spool)
            reader.read()
            kernels = _Kernels(export, reader.variants)
            versions = environment(export)
            gpus, doubt = devices(export)
            base, unknown_start = start_time(export)
            warnings = [*doubt, *unknown_start, *kernels.warnings, *_notes(export, reader)]
        tables = reader.tables
        threads = list(tables.threads)
        ranges = link.Ranges(tables.ranges, threads, base)
        output = link.Output(ranges, base, Spool.temporary(stack))
        lost = 0
        for chunk in link.linked_chunks(link.Source(tables, [spool], [{}])):
            lost += int((chunk.api < 0).sum())
            rows, key = chunk.gpu, chunk.gpu.correlation
            chunk.gpu = rows._replace(correlation=np.where(key >= 0, key % CORRELATIONS, NONE))
            kernel, config = kernels.kernel_of[rows.kernel], kernels.config_of[rows.kernel]
            output.write(chunk, kernel, config, nothing(len(key)))
        launches = output.file.rows
        if lost:
            warnings.append(
                f"{lost} of {launches} launches have no API call in the file and so belong to no range"
            )
        if tables.skipped:
            warnings.append(f"{tables.skipped} rows could not be read and were skipped")
        apis = list(tables.apis)
        return Trace(
            profiler="nsys",
            devices=gpus,
            environment=versions,
            kernels=kernels.names,
            kernel_kinds=kernels.kinds,
            launch_configs=kernels.configs,
            op_paths=[],
            apis=[apis[row] for row in output.apis.order],
            ranges=ranges.rows,
            num_launches=launches,
            skipped=tables.skipped,
            batches=output.file.read,
            close=stack.pop_all().close,
            warnings=tuple(warnings),
        )


def _notes(export: Export, reader: Reader) -> list[str]:
    notes = [] if reader.tables.gpu else ["the export holds no kernel, memcpy or memset"]
    graphs = sum(1 for _ in export.rows(GRAPHS, ("start",)))
    if graphs:
        notes.append(
            f"{graphs} launches of CUDA graphs were recorded whole, without their kernels; "
            "capture with --cuda-graph-trace=node to see them"
        )
    return notes + diagnostics(export)


class _Kernels:
    """The Trace's names, kinds and launch configurations; for each variant its index into them."""

    def __init__(self, export: Export, variants: Iterable[tuple[str, tuple[Any, ...]]]) -> None:
        names, configs = Ids(), Ids()
        string = cache(export.text)
        texts = {}  # of (mangledName, demangledName, shortName): the first that StringIds knows
        for table, values in variants:
            if table == KERNEL:
                ids = values[: len(NAMES)]
                known = filter(None, (string(number) for number in ids if number is not None))
                texts[ids] = next(known, "unknown")
        canonical, self.warnings = canonical_names(texts.values())
        kernel_of, config_of = [], []
        for table, values in variants:
            config = NO_CONFIG
            kinds = [value if isinstance(value, int) else -1 for value in values]
            if table == KERNEL:
                key = ("kernel", canonical[texts[values[: len(NAMES)]]])
                config = _config(values[len(NAMES) :])
            elif table == MEMCPY:
                key = ("memcpy", memcpy_name(*kinds))
            else:
                key = ("memset", memset_name(*kinds))
            kernel_of.append(names[key])
            config_of.append(configs[config])
        self.names = [name for _, name in names]
        self.kinds = [kind for kind, _ in names]
        self.configs = list(configs)
        self.kernel_of = np.array(kernel_of, np.int64)
        self.config_of = np.array(config_of, np.int64)


def _config(values: tuple[Any, ...]) -> LaunchConfig:
    """A kernel's row of CONFIG columns; what is missing or no number is None."""
    gx, gy, gz, bx, by, bz, registers, static, dynamic = map(whole, values)
    grid = None if gx is None or gy is None or gz is None else (gx, gy, gz)
    block = None if bx is None or by is None or bz is None else (bx, by, bz)
    shared = None if static is None or dynamic is None else static + dynamic
    return LaunchConfig(grid, block, registers, static, dynamic, shared)


class Reader:
    """Reads one export into `tables` and `spool`.

    The kernel of GpuRows is an index into `variants`, their config is 0. The correlation of
    GpuRows and LaunchRows is a key, see PROCESS_SHIFT. Blocks are sorted by key. variants are
    (table, names and launch configuration or kinds of memory).
    """

    def __init__(self, export: Export, spool: Spool) -> None:
        self.tables = Tables()
        self.variants = Ids()
        self._export = export
        self._spool = spool
        self._processes = Ids()
        self._needed: dict[int, NDArray[np.uint8]] | None = {}  # bits of ids by process; None: all
        self._string = cache(export.text)

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
        if any(flags.any() for flags in self._needed.values()):
            self._read_calls(f"nameId IS NULL OR nameId NOT IN ({listed})")

    def _read_calls(self, where: str) -> None:
        columns = ("correlationId", "nameId", "globalTid", "start")
        for batch in self._export.batches(RUNTIME, columns, where, filled=4):
            correlation, name, thread, start = self._numbers(batch, 4)[0]
            key = self._keys(correlation, thread)
            keep = (key >= 0) & (thread != -1) & (np.abs(start) < MAX_NS)
            keep[keep] = self._take_needed(key[keep])
            key, name, thread = key[keep], name[keep], thread[keep]
            api, thread = _mapped(name, self._api), _mapped(thread, self._thread)
            self._write(self.tables.launches, LaunchRows(key, api, thread, start[keep]), key)

    def _need(self, key: Ints) -> None:
        """Note that calls with these keys are needed; all calls are when the ids grow too large."""
        for process in np.unique(key[key >= 0] >> PROCESS_SHIFT).tolist():
            if self._needed is None:
                return
            ids = key[key >> PROCESS_SHIFT == process] % CORRELATIONS
            flags = self._needed.get(process, np.zeros(0, np.uint8))
            more = int(ids.max() >> 3) + 1 - len(flags)
            if more + sum(map(len, self._needed.values())) > MAX_NEEDED:
                self._needed = None
                return
            if more > 0:
                flags = np.append(flags, np.zeros(more + len(flags) // 2, np.uint8))
                self._needed[process] = flags
            np.bitwise_or.at(flags, ids >> 3, _flag(ids))

    def _take_needed(self, key: Ints) -> Flags:
        """Which of these calls an activity waits for; from then on it does not."""
        if self._needed is None:
            return np.ones(len(key), np.bool_)
        needed = np.zeros(len(key), np.bool_)
        process, ids = key >> PROCESS_SHIFT, key % CORRELATIONS
        for number in np.unique(process).tolist():
            flags = self._needed.get(number, np.zeros(0, np.uint8))
            rows = np.flatnonzero((process == number) & (ids >> 3 < len(flags)))
            byte, flag = ids[rows] >> 3, _flag(ids[rows])
            needed[rows] = (flags[byte] & flag) > 0
            np.bitwise_and.at(flags, byte, ~flag)
        return needed

    def _read_activities(self, table: str) -> None:
        width, variants = len(NUMBERS), self.variants
        columns = (*NUMBERS, *VARIANTS[table])
        for batch in self._export.batches(table, columns, filled=width):
            rows, batch = self._numbers(batch, width)
            start, end, device, stream, correlation, process, node, size = rows
            variant = variants.column([(table, row[width:]) for row in batch])
            keep = (np.abs(start) < MAX_NS) & (np.abs(end) < MAX_NS) & (end >= start)
            self.tables.skipped += int((~keep).sum())
            key = self._keys(correlation, process)
            self._need(key[keep])
            node, zero = np.where(node > 0, node, NONE), np.zeros_like(start)
            gpu = GpuRows(start, end - start, variant, zero, device, stream, key, node, size)
            self._write(self.tables.gpu, (column[keep] for column in gpu), key[keep])

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
            message = (text if string is None else self._string(string)) or ""
            name = f"{domains.get((thread >> 24, domain), '')}{message}"[:MAX_RANGE_NAME]
            name = names.setdefault(name, name)
            wide = kind in START_END
            self.tables.ranges.add(name, start, stop - start, self._thread(thread), wide)

    def _end_of_trace(self) -> int:
        """The latest end of anything, in ns since the start of the capture."""
        tables = (*VARIANTS, RUNTIME, "NVTX_EVENTS")
        return max(min(self._export.largest(table, "end") or 0, MAX_NS - 1) for table in tables)

    def _domains(self) -> dict[tuple[int, Any], str]:
        """Prefix of range names by process and domain id; none for the own and default domain."""
        prefixes: dict[tuple[int, Any], str] = {}
        columns = ("globalTid", "domainId", "textId", "text")
        for thread, domain, string, text in self._export.rows("NVTX_EVENTS", columns, DOMAINS):
            name = text if string is None else self._string(string)
            if isinstance(thread, int) and domain and name and name != OWN_DOMAIN:
                prefixes[(thread >> 24, domain)] = f"{name}:"
        return prefixes

    def _numbers(
        self, batch: list[tuple[Any, ...]], width: int
    ) -> tuple[Ints, list[tuple[Any, ...]]]:
        """(first `width` columns as an array, the rows kept); others than integers are skipped."""
        try:
            return _array(batch, width), batch
        except (TypeError, ValueError, OverflowError):
            good = [row for row in batch if all(isinstance(v, int) for v in row[:width])]
            self.tables.skipped += len(batch) - len(good)
            return _array(good, width), good

    def _keys(self, correlation: Ints, thread_or_process: Ints) -> Ints:
        """Correlation ids made unique across processes; -1 where there is none."""
        process = _mapped(thread_or_process >> 24, self._process)
        known = (correlation >= 0) & (correlation < CORRELATIONS) & (process >= 0)
        return np.where(known, process * CORRELATIONS + correlation, -1)

    def _process(self, number: int) -> int:
        if number == -1:  # not told: clear all the same where there is but one
            calls = self._export.distinct_processes(RUNTIME)
            if len(calls) != 1:
                return -1
            number = calls[0]
        process = self._processes[number]
        return process if process < MAX_PROCESSES else -1

    def _thread(self, number: int) -> int:
        return self.tables.threads[(number >> 24) & 0xFFFFFF, number & 0xFFFFFF]

    def _api(self, string: int) -> int:
        return self.tables.apis[_API_VERSION.sub("", self._string(string) or "unknown")]

    def _write(self, blocks: list[Block], rows: Iterable[Ints], key: Ints) -> None:
        """Write rows sorted by key, in one block per process."""
        if not len(key):
            return
        columns = list(rows)
        order = np.argsort(key, kind="stable")
        key = key[order]
        borders = np.flatnonzero(np.diff(key >> PROCESS_SHIFT)) + 1
        for part in np.split(np.arange(len(key)), borders):
            offset = self._spool.write([column[order[part]] for column in columns])
            span = int(key[part[0]]), int(key[part[-1]])
            blocks.append(Block((0, len(blocks)), offset, len(columns), len(part), *span))


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


def environment(export: Export) -> dict[str, object]:
    """Versions of nsys, its schema, CUDA's driver and NVIDIA's, as far as they look like such."""
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
    """(nanoseconds since 1970 at which the capture's times count 0, warnings)."""
    for (value,) in export.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
        if (start := whole(value)) is not None and start < MAX_NS:
            return start, []
    return 0, ["the export does not tell when the capture started; times count from 0"]


def devices(export: Export) -> tuple[tuple[Device, ...], list[str]]:
    """(GPUs under the index that CUDA gave them in the profiled process, warnings)."""
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
    made = (_device(*pair) for pair in sorted(by_index.items(), key=lambda pair: str(pair[0])))
    return tuple(device for device in made if device), doubt


def _device(index: object, row: dict[str, Any]) -> Device | None:
    limits = {field: whole(row[key]) for field, key in GPU_KEYS.items()}
    for field in limits.keys() - CORE_FIELDS:
        limits[field] = limits[field] or None  # nsys writes 0 for what it does not know
    warp, warps = limits["warp_size"], whole(row["maxWarpsPerSm"])
    limits["max_threads_per_sm"] = warp * warps if warp and warps else None
    return make_device(whole(index), row["name"], limits)


def diagnostics(export: Export) -> list[str]:
    """nsys's own warnings and errors, at most MAX_DIAGNOSTICS; none that could name a path, a
    host or a command.
    """
    texts: dict[str, None] = {}
    for severity, text in export.rows("DIAGNOSTIC_EVENT", ("severity", "text")):
        if severity not in (WARNING, WARNING + 1) or not isinstance(text, str):
            continue
        plain = " ".join(text.split())
        if plain and not _PRIVATE.search(plain) and len(texts) < MAX_DIAGNOSTICS:
            texts.setdefault(f"nsys says: {plain[:MAX_TEXT]}")
    return list(texts)
