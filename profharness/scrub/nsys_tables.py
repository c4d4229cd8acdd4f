"""The allow-list of an nsys export: tables and columns that are copied, and how.

A column's mark says what it holds: none a number, `@` an id in StringIds, `#` a serialized global
id, `%` a process id, `$` a text. Names are those of schema 3.0 (2022.4) to 3.25 (2026.2).
"""

from __future__ import annotations

import re

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
    "TARGET_INFO_SYSTEM_ENV": "globalVid $name nameEnum $value",
}
STRINGS = "StringIds"
ENUM_COLUMNS = "id $name $label"

# Rows of texts are copied only where the whole text is one of these.
DIAGNOSTICS = re.compile(r"Number of [A-Za-z ]+ events collected: [\d,]+\.?")
METADATA = re.compile(
    r"EXPORT_(?:PRODUCT_NAME|PRODUCT_VERSION|PRODUCT_DATE|SCHEMA_VERSION(?:_\w+)?|PLATFORM|ARCH"
    r"|TIME_UTC|PARAM_LAZY|PARAM_TIME_NORMALIZE|PARAM_TIME_SHIFT|CONFIG_TIME_SHIFT)"
)
SYSTEM = re.compile(r"CudaDriverVersion|NvDriverVersion")
SYSTEM_VALUES = re.compile(r"\d[\d.]{0,63}")
FILTERED = {  # table: the column that tells what a row is
    "META_DATA_EXPORT": "name",
    "EXPORT_META_DATA": "name",
    "TARGET_INFO_SYSTEM_ENV": "name",
    "DIAGNOSTIC_EVENT": "text",
}
PRIVATE_COLUMNS = frozenset({"uuid", "busLocation", "ctxswDevPath", "ctrlDevPath", "filename"})


def columns_of(table: str) -> dict[str, str] | None:
    """Column name to mark for a table that may be copied, also under a name such as
    `NVTX_EVENTS_V2`; None for any other.
    """
    base = re.sub(r"_V\d+$", "", table)
    text = ENUM_COLUMNS if re.fullmatch(r"ENUM_[A-Z0-9_]+", table) else TABLES.get(base)
    if text is None:
        return None
    return {word.lstrip("@#%$"): word[0] if word[0] in "@#%$" else "" for word in text.split()}


def row_allowed(table: str, row: dict[str, object]) -> bool:
    """Whether a row may be copied, where only some rows of its table may."""
    if table not in FILTERED:
        return True
    text = str(row.get(FILTERED[table]))
    if table == "TARGET_INFO_SYSTEM_ENV":
        known = SYSTEM.fullmatch(text) and SYSTEM_VALUES.fullmatch(str(row.get("value")))
        return known is not None
    return (DIAGNOSTICS if table == "DIAGNOSTIC_EVENT" else METADATA).fullmatch(text) is not None
