"""Make small files of AMD's profilers: rocpd, rpd and rocprof databases, CSV and JSON."""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

from profharness.trace import NONE, LaunchBatch, Trace

GUID = "_00003fdc_92cb_72cb_9169_c7e541b1fcdf"
OTHER = "_00003fdd_92cb_72cb_9169_c7e541b1fcdf"
PID, TID = 28, 31
MANGLED = "_ZN7ck_tile10fmha_fwd_tIDF16_EEvi.kd"
NAME = "void ck_tile::fmha_fwd_t<_Float16>(int)"
FACTS = {
    "cu_count": 304,
    "wave_front_size": 64,
    "max_waves_per_cu": 32,
    "lds_size_in_kb": 64,
    "gfx_target_version": 90402,
    "workgroup_max_size": 1024,
    "mem_banks": [{"size_in_bytes": 206141652992}],
}
ROCPD = {
    "metadata": "id tag value",
    "string": "id string",
    "info_node": "id machine_id hostname",
    "info_process": "id nid pid command environment",
    "info_thread": "id nid pid tid",
    "info_agent": (
        "id type absolute_index logical_index type_index name model_name product_name user_name "
        "extdata"
    ),
    "info_kernel_symbol": (
        "id kernel_name display_name group_segment_size private_segment_size sgpr_count "
        "arch_vgpr_count accum_vgpr_count"
    ),
    "info_pmc": "id name units",
    "event": "id category_id stack_id parent_stack_id correlation_id extdata",
    "pmc_event": "id event_id pmc_id value",
    "region": "id nid pid tid start end name_id event_id",
    "kernel_dispatch": (
        "id nid pid tid agent_id kernel_id dispatch_id queue_id stream_id start end "
        "private_segment_size group_segment_size workgroup_size_x workgroup_size_y "
        "workgroup_size_z grid_size_x grid_size_y grid_size_z region_name_id event_id"
    ),
    "memory_copy": (
        "id nid pid tid start end name_id dst_agent_id src_agent_id size queue_id stream_id event_id"
    ),
}
HIP, HSA, KERNEL, MARKER, COPY, RCCL = 1, 2, 3, 4, 5, 6
STRINGS = {
    HIP: "HIP_RUNTIME_API_EXT",
    HSA: "HSA_CORE_API",
    KERNEL: "KERNEL_DISPATCH",
    MARKER: "MARKER_CORE_RANGE_API",
    COPY: "MEMORY_COPY",
    RCCL: "RCCL_API",
    10: "hipLaunchKernel",
    11: "roctxRangePushA",
    12: "roctxRangeStartA",
    13: "MEMORY_COPY_HOST_TO_DEVICE",
    14: "hipMemcpyAsync",
    15: "ncclAllReduce",
}


class Rocpd:
    """The tables of one recording. Times are in ns."""

    def __init__(self, guid: str = GUID, pid: int = PID, tables: dict[str, str] = ROCPD) -> None:
        self.guid, self.pid = guid, pid
        self.columns = {name: columns.split() for name, columns in tables.items()}
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in tables}
        self.add("metadata", tag="schema_version", value="3")
        for number, text in STRINGS.items():
            self.add("string", id=number, string=text)
        self.add("info_node", machine_id="b24179676c5e", hostname="secret-host")
        self.add("info_process", id=pid, nid=1, pid=pid, command="./secret --token hunter2")
        self.add("info_thread", id=7, nid=1, pid=pid, tid=TID)
        self.add("info_agent", id=0, type="CPU", absolute_index=0, type_index=0, name="cpu")
        self.add(
            "info_agent", id=2, type="GPU", absolute_index=2, logical_index=2, type_index=0,
            name="gfx942", model_name="ip discovery", product_name="AMD Instinct MI300X",
            user_name="", extdata=json.dumps(FACTS),
        )  # fmt: skip
        self.add(
            "info_kernel_symbol", id=9, kernel_name=MANGLED, display_name=NAME,
            group_segment_size=1024, private_segment_size=0, sgpr_count=96, arch_vgpr_count=128,
            accum_vgpr_count=64,
        )  # fmt: skip

    def add(self, table: str, **row: Any) -> int:
        """Add a row and return its id."""
        number = row.setdefault("id", len(self.rows[table]) + 1)
        self.rows[table].append(row)
        return int(number)

    def event(self, category: int, call: int, details: str = "{}") -> int:
        row = {"category_id": category, "stack_id": call, "correlation_id": 0, "extdata": details}
        return self.add("event", **row)

    def region(self, category: int, name: int, start: int, end: int, call: int, **more: Any) -> int:
        event = self.event(category, call, json.dumps(more) if more else "{}")
        row = {"nid": 1, "pid": self.pid, "tid": 7, "start": start, "end": end}
        return self.add("region", name_id=name, event_id=event, **row)

    def launch(self, call: int, start: int = 1000, **changes: Any) -> int:
        """Add a call of hipLaunchKernel and its dispatch. Return the event of the dispatch."""
        self.region(HIP, 10, start - 100, start - 50, call)
        event = self.event(KERNEL, call)
        row = {
            "nid": 1, "pid": self.pid, "tid": 7, "agent_id": 2, "kernel_id": 9, "queue_id": 16,
            "stream_id": 3, "start": start, "end": start + 70, "private_segment_size": 16,
            "group_segment_size": 65536, "workgroup_size_x": 256, "workgroup_size_y": 2,
            "workgroup_size_z": 1, "grid_size_x": 512, "grid_size_y": 128, "grid_size_z": 3,
            "region_name_id": None, "event_id": event,
        }  # fmt: skip
        self.add("kernel_dispatch", **(row | changes))
        return event

    def copy(self, call: int, start: int, size: int, **changes: Any) -> None:
        self.region(HIP, 14, start - 100, start - 50, call)
        row = {
            "nid": 1, "pid": self.pid, "tid": 7, "start": start, "end": start + 9, "name_id": 13,
            "dst_agent_id": 2, "src_agent_id": 0, "size": size, "stream_id": 0,
            "event_id": self.event(COPY, call),
        }  # fmt: skip
        self.add("memory_copy", **(row | changes))

    def write(self, path: Path) -> Path:
        """Create or extend a file."""
        with closing(sqlite3.connect(path)) as db, db:
            for name, columns in self.columns.items():
                table = f'"rocpd_{name}{self.guid}"'
                declared = ", ".join(f'"{each}"' for each in columns if each != "id")
                db.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {declared})")
                for row in self.rows[name]:
                    kept = {
                        key: value for key, value in row.items() if key in columns or key == "id"
                    }
                    names = ", ".join(f'"{key}"' for key in kept)
                    marks = ", ".join("?" * len(kept))
                    db.execute(
                        f"INSERT INTO {table} ({names}) VALUES ({marks})", list(kept.values())
                    )
        return path


KERNEL_TRACE = (
    "Kind Agent_Id Queue_Id Stream_Id Thread_Id Dispatch_Id Kernel_Id Kernel_Name Correlation_Id "
    "Start_Timestamp End_Timestamp LDS_Block_Size Scratch_Size VGPR_Count Accum_VGPR_Count "
    "SGPR_Count Workgroup_Size_X Workgroup_Size_Y Workgroup_Size_Z Grid_Size_X Grid_Size_Y "
    "Grid_Size_Z"
)
OLD_KERNEL_TRACE = (
    "Kind Agent_Id Queue_Id Kernel_Id Kernel_Name Correlation_Id Start_Timestamp End_Timestamp "
    "Private_Segment_Size Group_Segment_Size Workgroup_Size_X Workgroup_Size_Y Workgroup_Size_Z "
    "Grid_Size_X Grid_Size_Y Grid_Size_Z"
)
CONVERTED = f"Guid {KERNEL_TRACE}"
COUNTERS = (
    "Correlation_Id Dispatch_Id Agent_Id Queue_Id Process_Id Thread_Id Grid_Size Kernel_Id "
    "Kernel_Name Workgroup_Size LDS_Block_Size Scratch_Size VGPR_Count Accum_VGPR_Count "
    "SGPR_Count Counter_Name Counter_Value Start_Timestamp End_Timestamp"
)
COPIES = (
    "Kind Direction Stream_Id Source_Agent_Id Destination_Agent_Id Correlation_Id Start_Timestamp "
    "End_Timestamp"
)
V1 = (
    "Index KernelName gpu-id queue-id queue-index pid tid grd wgr lds scr arch_vgpr accum_vgpr sgpr "
    "wave_size sig obj DispatchNs BeginNs EndNs CompleteNs DurationNs"
)
VALUES: dict[str, object] = {
    "Guid": "0000", "Kind": "KERNEL_DISPATCH", "Agent_Id": "Agent 4", "Queue_Id": 2, "Stream_Id": 3,
    "Thread_Id": TID, "Process_Id": PID, "Dispatch_Id": 1, "Kernel_Id": 9, "Kernel_Name": NAME,
    "Correlation_Id": 77, "Start_Timestamp": 1000, "End_Timestamp": 1070, "LDS_Block_Size": 512,
    "Group_Segment_Size": 65536, "Scratch_Size": 16, "Private_Segment_Size": 16,
    "VGPR_Count": 128, "Accum_VGPR_Count": 64, "SGPR_Count": 96, "Workgroup_Size_X": 256,
    "Workgroup_Size_Y": 2, "Workgroup_Size_Z": 1, "Grid_Size_X": 512, "Grid_Size_Y": 128,
    "Grid_Size_Z": 3, "Grid_Size": 196608, "Workgroup_Size": 512, "Counter_Name": "SQ_WAVES",
    "Counter_Value": "7.500000", "Direction": "MEMORY_COPY_HOST_TO_DEVICE",
    "Source_Agent_Id": "Agent 0", "Destination_Agent_Id": "Agent 4",
    "Index": 0, "KernelName": f'"{NAME} [clone .kd]"', "gpu-id": 4, "queue-id": 2, "pid": PID,
    "tid": TID, "grd": 196608, "wgr": 512, "lds": 512, "scr": 16, "arch_vgpr": 128,
    "accum_vgpr": 64, "sgpr": 96, "BeginNs": 1000, "EndNs": 1070, "DurationNs": 70,
}  # fmt: skip


def write_csv(path: Path, columns: str, *changes: dict[str, object]) -> Path:
    """Write a CSV with a row for each dict of changes."""
    names = columns.split()
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow(names)
        for change in changes:
            writer.writerow([(VALUES | change).get(name, "") for name in names])
    return path


def write_v1(path: Path, *changes: dict[str, object]) -> Path:
    """Write a database of rocprof v1."""
    names = V1.split()
    declared = ", ".join(f'"{name}"' for name in names)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"CREATE TABLE KERN ({declared})")
        marks = ", ".join("?" * len(names))
        rows = [[(VALUES | change).get(name) for name in names] for change in changes]
        db.executemany(f"INSERT INTO KERN VALUES ({marks})", rows)
    return path


RPD = {
    "rocpd_metadata": "id tag value",
    "rocpd_string": "id string",
    "rocpd_op": "id gpuId queueId sequenceId start end description_id opType_id",
    "rocpd_api": "id pid tid start end apiName_id args_id",
    "rocpd_api_ops": "id api_id op_id",
    "rocpd_kernelapi": (
        "api_ptr_id stream gridX gridY gridZ workgroupX workgroupY workgroupZ groupSegmentSize "
        "privateSegmentSize kernelName_id"
    ),
    "rocpd_copyapi": "api_ptr_id stream size width height kind dst src",
    "ext_autogradapi": "api_ptr_id autogradName_id seq op_id sizes input_op_ids",
}


class Rpd:
    """The tables of a database of rpd. Times are in ns."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in RPD}
        self.strings: dict[str, int] = {"": 1}
        self.rows["rocpd_metadata"].append({"tag": "schema_version", "value": "2"})

    def text(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def api(self, name: str, start: int, end: int, text: str = "") -> int:
        """Add an API call and return its id."""
        number = (1 << 32) + len(self.rows["rocpd_api"]) + 1
        names = {"apiName_id": self.text(name), "args_id": self.text(text)}
        row = {"id": number, "pid": PID, "tid": TID, "start": start, "end": end, **names}
        self.rows["rocpd_api"].append(row)
        return number

    def op(self, call: int | None, name: str, kind: str, start: int, **changes: Any) -> None:
        """Add an op that the call started."""
        number = (1 << 32) + len(self.rows["rocpd_op"]) + 1
        names = {"description_id": self.text(name), "opType_id": self.text(kind)}
        row = {"id": number, "gpuId": 2, "queueId": 1, "start": start, "end": start + 70, **names}
        self.rows["rocpd_op"].append(row | changes)
        if call is not None:
            self.rows["rocpd_api_ops"].append({"api_id": call, "op_id": number})

    def launch(self, api: str, start: int, grid: tuple[int, int, int]) -> None:
        call = self.api(api, start - 100, start - 50)
        self.op(call, NAME, "KernelExecution", start)
        sizes = dict(zip(("gridX", "gridY", "gridZ"), grid, strict=True))
        widths = {"workgroupX": 256, "workgroupY": 1, "workgroupZ": 1}
        row = {"api_ptr_id": call, "groupSegmentSize": 512, "kernelName_id": self.text(NAME)}
        self.rows["rocpd_kernelapi"].append(row | sizes | widths)

    def write(self, path: Path) -> Path:
        rows = self.rows | {
            "rocpd_string": [{"id": at, "string": text} for text, at in self.strings.items()]
        }
        with closing(sqlite3.connect(path)) as db, db:
            for name, columns in RPD.items():
                names = columns.split()
                declared = ", ".join(f'"{each}"' for each in names)
                db.execute(f'CREATE TABLE "{name}" ({declared})')
                marks = ", ".join("?" * len(names))
                values = [[row.get(each) for each in names] for row in rows[name]]
                db.executemany(f'INSERT INTO "{name}" VALUES ({marks})', values)
        return path


def rocprofv3_json(**changes: object) -> dict[str, Any]:
    """Return the records of one process, as rocprofv3 writes them as JSON."""
    call = {"correlation_id": {"internal": 77, "external": 0}, "thread_id": TID}
    times = {"start_timestamp": 1000, "end_timestamp": 1070}
    info = {
        "agent_id": {"handle": 5600}, "queue_id": {"handle": 2}, "kernel_id": 9, "dispatch_id": 1,
        "private_segment_size": 16, "group_segment_size": 65536,
        "workgroup_size": {"x": 256, "y": 2, "z": 1}, "grid_size": {"x": 512, "y": 128, "z": 3},
    }  # fmt: skip
    early = {"start_timestamp": 900, "end_timestamp": 950}
    process = {
        "metadata": {"pid": PID, "node": {"hostname": "secret-host"}, "command": ["./secret"]},
        "agents": [
            {"id": {"handle": 5598}, "type": 1, "node_id": 0, "logical_node_type_id": 0},
            {
                "id": {"handle": 5600}, "type": 2, "node_id": 2, "logical_node_type_id": 0,
                "product_name": "AMD Instinct MI300X", "name": "gfx942", **FACTS,
            },
        ],
        "kernel_symbols": [
            {
                "kernel_id": 9, "kernel_name": MANGLED, "formatted_kernel_name": NAME,
                "group_segment_size": 1024, "arch_vgpr_count": 128, "accum_vgpr_count": 64,
                "sgpr_count": 96,
            }
        ],
        "counters": [{"id": {"handle": 400}, "name": "SQ_WAVES"}],
        "strings": {
            "buffer_records": [
                {"kind": "NONE", "operations": []},
                {"kind": "HIP_RUNTIME_API", "operations": ["hipLaunchKernel", "hipMemcpyAsync"]},
                {"kind": "MARKER_CORE_RANGE_API", "operations": ["roctxRangePushA"]},
                {"kind": "MEMORY_COPY", "operations": ["", "MEMORY_COPY_HOST_TO_DEVICE"]},
            ],
            "marker_api": [{"key": 50, "value": "forward"}],
        },
        "buffer_records": {
            "kernel_dispatch": [
                {"kind": 11, "dispatch_info": info, "stream_id": {"handle": 3}, **call, **times}
            ],
            "hip_api": [{"kind": 1, "operation": 0, **call, **early}],
            "marker_api": [
                {
                    "kind": 2, "operation": 0, "thread_id": TID, "start_timestamp": 800,
                    "end_timestamp": 2000, "correlation_id": {"internal": 50},
                }
            ],
            "memory_copy": [
                {
                    "kind": 3, "operation": 1, "bytes": 4096, "stream_id": {"handle": 0},
                    "dst_agent_id": {"handle": 5600}, "src_agent_id": {"handle": 5598},
                    "start_timestamp": 3000, "end_timestamp": 3009,
                    "correlation_id": {"internal": 78},
                }
            ],
        },
        "callback_records": {
            "counter_collection": [
                {
                    "dispatch_data": {"dispatch_info": info, **call, **times},
                    "records": [
                        {"counter_id": {"handle": 400}, "value": value} for value in (3.0, 4.5)
                    ],
                }
            ]
        },
    }  # fmt: skip
    return process | changes


def launches(trace: Trace) -> list[dict[str, Any]]:
    """Return the launches of a trace with their names, ranges and launch configurations."""
    rows = []
    for batch in trace.batches():
        columns = [getattr(batch, item.name).tolist() for item in fields(LaunchBatch)]
        for values in zip(*columns, strict=True):
            row = dict(zip([item.name for item in fields(LaunchBatch)], values, strict=True))
            row["config"] = trace.launch_configs[row["launch_config"]]
            row["kind"] = trace.kernel_kinds[row["kernel"]]
            row["kernel"] = trace.kernels[row["kernel"]]
            row["api"] = trace.apis[row["api"]] if row["api"] != NONE else None
            row["range"] = trace.ranges[row["range"]].name if row["range"] != NONE else None
            rows.append(row)
    return rows
