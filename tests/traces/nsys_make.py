"""Make small nsys exports: schemas of several versions of nsys, tables left out or renamed."""

from __future__ import annotations

import gzip
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"
PID = 488
PROCESS = (1 << 48) | (PID << 24)
MAIN = PROCESS | PID
AUTOGRAD = PROCESS | (PID + 7)
FLASH = "_ZN13pytorch_flash16flash_fwd_kernelILi64ELb1EEEv16Flash_fwd_params"
FLASH_CANONICAL = "void pytorch_flash::flash_fwd_kernel<64, true>(Flash_fwd_params)"
FLASH_NSYS = "void pytorch_flash::flash_fwd_kernel<(int)64, (bool)1>(Flash_fwd_params)"

ACTIVITY = "start end deviceId contextId streamId correlationId globalPid"
KERNEL = (
    f"{ACTIVITY} demangledName shortName mangledName launchType cacheConfig registersPerThread "
    "gridX gridY gridZ blockX blockY blockZ staticSharedMemory dynamicSharedMemory "
    "localMemoryPerThread localMemoryTotal gridId sharedMemoryExecuted graphNodeId "
    "sharedMemoryLimitConfig"
)
NVTX = (
    "start end eventType rangeId category color text globalTid endGlobalTid textId domainId "
    "uint64Value int64Value doubleValue uint32Value int32Value floatValue jsonTextId jsonText"
)
BASE = {
    "StringIds": "id value",
    "CUPTI_ACTIVITY_KIND_KERNEL": KERNEL,
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start end eventClass globalTid correlationId nameId returnValue callchainId"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        f"{ACTIVITY} bytes copyKind deprecatedSrcId srcKind dstKind srcDeviceId srcContextId "
        "dstDeviceId dstContextId migrationCause graphNodeId virtualAddress"
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{ACTIVITY} value bytes graphNodeId memKind",
    "NVTX_EVENTS": NVTX,
    "TARGET_INFO_GPU": (
        "vmId id name smCount totalMemory cuDevice maxRegistersPerBlock maxShmemPerBlock "
        "maxShmemPerBlockOptin maxShmemPerSm maxRegistersPerSm threadsPerWarp maxWarpsPerSm "
        "maxThreadsPerBlock computeMajor computeMinor"
    ),
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime localTime",
    "PROCESSES": "globalPid pid name",
}
GREEN = {
    name: columns.replace("contextId ", "contextId greenContextId ", 1)
    for name, columns in BASE.items()
    if columns.startswith(ACTIVITY)
}
META = {"META_DATA_EXPORT": "name value", "META_DATA_CAPTURE": "name value"}
LATER = {
    "DIAGNOSTIC_EVENT": "timestamp timestampType source severity text globalPid",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid",
}
GRAPH_TRACE = {
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (
        "start end deviceId contextId greenContextId streamId correlationId globalPid graphId "
        "graphExecId"
    )
}
MORE_KERNEL = (
    "qmdBulkReleaseDone qmdPreexitDone qmdLastCtaDone graphId clusterX clusterY clusterZ "
    "clusterSchedulingPolicy maxPotentialClusterSize maxActiveClusters "
    "sharedMemoryRequestedPercentage"
)
NEW_KERNEL = {"CUPTI_ACTIVITY_KIND_KERNEL": f"{GREEN['CUPTI_ACTIVITY_KIND_KERNEL']} {MORE_KERNEL}"}
NEWEST_KERNEL = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        f"{NEW_KERNEL['CUPTI_ACTIVITY_KIND_KERNEL']} tensorSizeMinusOneElements"
    )
}
VERSIONS: dict[str, dict[str, str]] = {
    "2022.4.2": {**BASE, "EXPORT_META_DATA": "name value"},
    "2023.4.4": {**BASE, **GREEN, **META},
    "2024.2.3": {**BASE, **GREEN, **META, "DIAGNOSTIC_EVENT": LATER["DIAGNOSTIC_EVENT"]},
    "2025.3.2": {**BASE, **GREEN, **META, **LATER, "NVTX_EVENTS": f"{NVTX} binaryData"},
    "2026.1.1": {**BASE, **GREEN, **META, **LATER, **NEW_KERNEL},
    "2026.2.1": {**BASE, **GREEN, **META, **LATER, **NEWEST_KERNEL},
}


@dataclass(slots=True)
class Maker:
    """Rows by table, written as an export of one version of nsys.

    `rename` gives tables other names, `without` leaves out tables or single columns (table.column).
    """

    version: str = "2025.3.2"
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    strings: dict[str, int] = field(default_factory=dict)
    correlation: int = 0

    def add(self, table: str, **values: Any) -> None:
        self.rows.setdefault(table, []).append(values)

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def launch(
        self,
        call: int,
        *,
        thread: int = MAIN,
        table: str = "KERNEL",
        mangled: str | None = FLASH,
        api: str | None = "cudaLaunchKernel_v7000",
        correlation: int | None = None,
        **more: Any,
    ) -> int:
        """Add an activity that starts 1000 ns after its call and takes 500 ns. `api=None`: no
        call.
        """
        self.correlation += 1
        number = self.correlation if correlation is None else correlation
        if api is not None:
            self.add(
                "CUPTI_ACTIVITY_KIND_RUNTIME", start=call, end=call + 10, eventClass=0,
                globalTid=thread, correlationId=number, nameId=self.string(api), returnValue=0,
            )  # fmt: skip
        row = {
            "start": call + 1000, "end": call + 1500, "deviceId": 0, "contextId": 1, "streamId": 7,
            "correlationId": number, "globalPid": (thread >> 24) << 24,
        }  # fmt: skip
        if table == "KERNEL":
            row |= {
                "demangledName": self.string(FLASH_NSYS), "shortName": self.string("flash_fwd_kernel"),
                "mangledName": None if mangled is None else self.string(mangled),
                "registersPerThread": 168, "gridX": 8, "gridY": 4, "gridZ": 2, "blockX": 128, "blockY": 1, "blockZ": 1,
                "staticSharedMemory": 16, "dynamicSharedMemory": 49152,
            }  # fmt: skip
        self.add(f"CUPTI_ACTIVITY_KIND_{table}", **(row | more))
        return number

    def nvtx(self, name: str, start: int, end: int | None, **more: Any) -> None:
        row = {
            "start": start,
            "end": end,
            "eventType": 59,
            "text": name,
            "globalTid": MAIN,
            "domainId": 0,
        }
        self.add("NVTX_EVENTS", **(row | more))

    def gpu(self, number: int = 0, **more: Any) -> None:
        row = {
            "vmId": 1, "id": number, "name": "NVIDIA H200", "smCount": 132, "computeMajor": 9, "computeMinor": 0,
            "threadsPerWarp": 32, "maxWarpsPerSm": 64, "cuDevice": number,
        }  # fmt: skip
        self.add("TARGET_INFO_GPU", **(row | more))

    def write(
        self,
        path: Path,
        *,
        without: Iterable[str] = (),
        rename: dict[str, str] | None = None,
        lazy: bool = True,
    ) -> Path:
        schema = VERSIONS[self.version]
        left_out = set(without)
        rows = dict(self.rows)
        rows["StringIds"] = [{"id": i, "value": t} for t, i in self.strings.items()]
        meta = next(name for name in schema if name in ("META_DATA_EXPORT", "EXPORT_META_DATA"))
        rows[meta] = [{"name": "EXPORT_PRODUCT_VERSION", "value": f"{self.version}.0"}]
        with closing(sqlite3.connect(path)) as connection:
            for name, text in schema.items():
                mine = rows.get(name, [])
                # Nsys creates tables when it writes the first row
                if name in left_out or (lazy and not mine):
                    continue
                columns = [c for c in text.split() if f"{name}.{c}" not in left_out]
                table = (rename or {}).get(name, name)
                listed = ", ".join(f'"{column}"' for column in columns)
                connection.execute(f'CREATE TABLE "{table}" ({listed})')
                marks = ", ".join("?" * len(columns))
                connection.executemany(
                    f'INSERT INTO "{table}" VALUES ({marks})',
                    [[row.get(column) for column in columns] for row in mine],
                )
            connection.commit()
        return path


def unpacked(name: str, folder: Path) -> Path:
    """Unpack a gzipped export of tests/data."""
    path = folder / name.removesuffix(".gz")
    path.write_bytes(gzip.decompress((DATA / name).read_bytes()))
    return path
