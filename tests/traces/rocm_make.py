"""Make small files of AMD's profilers: rocpd, rpd and rocprof databases, CSV and JSON."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

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
