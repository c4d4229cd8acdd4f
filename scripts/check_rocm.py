"""Compare what profharness stores of ROCm traces with an independent reading of the files.

`check_rocm.py FOLDER` reads each trace of AMD's profilers, and each Kineto trace, in a folder with
SQL, JSON or CSV alone, and compares all launches: name, start, duration, device, stream, grid,
block, registers and memory. The script prints a line for each file, and ends with exit code 1 if a
launch differs.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, cast

from profharness.errors import ProfharnessError
from profharness.store.ingest import ingest_path
from profharness.traces.demangle import canonical_names

FIELDS = (
    "name", "start", "duration", "device", "stream", "grid", "block", "registers", "accum",
    "scalar", "shared", "scratch",
)  # fmt: skip
Launch = tuple[Any, ...]
SHOWN = 3
STORED = """SELECT k.name, k.kind, l.start_ns, l.duration_ns, l.device, l.stream, c.grid_x,
    c.grid_y, c.grid_z, c.block_x, c.block_y, c.block_z, c.registers_per_thread,
    c.accum_registers_per_thread, c.scalar_registers,
    coalesce(c.shared_bytes, c.static_shared_bytes), c.scratch_bytes_per_thread
    FROM launches l JOIN kernels k ON k.id = l.kernel_id
    JOIN launch_configs c ON c.id = l.launch_config_id"""
ROCPD = """SELECT s.display_name, k.start, k.end - k.start, a.type_index, k.stream_id,
    k.grid_size_x, k.grid_size_y, k.grid_size_z, k.workgroup_size_x, k.workgroup_size_y,
    k.workgroup_size_z, s.arch_vgpr_count, s.accum_vgpr_count, s.sgpr_count, k.group_segment_size,
    k.private_segment_size FROM rocpd_kernel_dispatch k
    JOIN rocpd_info_kernel_symbol s ON s.id = k.kernel_id AND s.guid = k.guid
    JOIN rocpd_info_agent a ON a.id = k.agent_id AND a.guid = k.guid"""


def blocks(threads: list[int], block: list[int]) -> tuple[int, ...]:
    """Return the number of blocks in each dimension."""
    return tuple(-(-size // width) for size, width in zip(threads, block, strict=True))


def read_rocpd(path: Path) -> Iterator[Launch]:
    """Yield the dispatches of a rocpd database. Copies are not compared."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as db:
        for name, start, duration, device, stream, *sizes in db.execute(ROCPD):
            grid, block = blocks(sizes[:3], sizes[3:6]), tuple(sizes[3:6])
            yield name, start, duration, device, stream, grid, block, *sizes[6:]


def read_rpd(path: Path) -> Iterator[Launch]:
    """Yield the kernels of a database of rpd. Its grids are arguments of the calls."""
    sql = """SELECT d.string, o.start, o.end - o.start, o.gpuId, o.queueId, n.string, k.gridX,
        k.gridY, k.gridZ, k.workgroupX, k.workgroupY, k.workgroupZ FROM rocpd_op o
        JOIN rocpd_string d ON d.id = o.description_id
        LEFT JOIN rocpd_api_ops l ON l.op_id = o.id LEFT JOIN rocpd_api a ON a.id = l.api_id
        LEFT JOIN rocpd_string n ON n.id = a.apiName_id
        LEFT JOIN rocpd_kernelapi k ON k.api_ptr_id = l.api_id WHERE d.string <> ''"""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as db:
        for name, start, duration, device, queue, api, *sizes in db.execute(sql):
            grid, block = known(sizes[:3]), known(sizes[3:])
            if grid and "ExtModule" in api:
                grid = blocks(sizes[:3], sizes[3:])
            yield name, start, duration, device, queue, grid, block, *[None] * 5


def read_rocprof(path: Path) -> Iterator[Launch]:
    """Yield the kernels of a database of rocprof v1, which has no dimensions."""
    sql = """SELECT trim(KernelName, '"'), BeginNs, DurationNs, "gpu-id", "queue-id", NULL, NULL,
        arch_vgpr, accum_vgpr, sgpr, lds, scr FROM KERN"""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as db:
        for name, *values in db.execute(sql):
            yield name.replace(" [clone .kd]", "").replace(".kd", ""), *values


def read_csv(path: Path) -> Iterator[Launch]:
    """Yield the kernels of a CSV of rocprofv3. A dispatch occurs once for each counter."""
    seen = set()
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["Dispatch_Id"] in seen:
                continue
            seen.add(row["Dispatch_Id"])
            start, end = int(row["Start_Timestamp"]), int(row["End_Timestamp"])
            grid = block = None
            if "Grid_Size_X" in row:
                sizes, widths = (
                    [int(row[f"{what}_Size_{axis}"]) for axis in "XYZ"]
                    for what in ("Grid", "Workgroup")
                )
                grid, block = blocks(sizes, widths), tuple(widths)
            resources = (row[key] for key in ("VGPR_Count", "Accum_VGPR_Count", "SGPR_Count"))
            yield (
                row["Kernel_Name"], start, end - start, int(row["Agent_Id"].split()[-1]),
                int(row.get("Stream_Id", row["Queue_Id"])), grid, block, *map(int, resources),
                int(row["LDS_Block_Size"]), int(row["Scratch_Size"]),
            )  # fmt: skip


def open_unpacked(path: Path) -> BinaryIO:
    """Open a file, or the contents of a `.gz` file, for reading."""
    return cast("BinaryIO", (gzip.open if path.suffix == ".gz" else open)(path, "rb"))


def read_json(path: Path) -> Iterator[Launch]:
    """Yield the dispatches of a JSON of rocprofv3. Its grids are in threads."""
    with open_unpacked(path) as file:
        processes = json.load(file)["rocprofiler-sdk-tool"]
    for process in processes:
        symbols = {each["kernel_id"]: each for each in process["kernel_symbols"]}
        gpus = {each["id"]["handle"]: each["logical_node_type_id"] for each in process["agents"]}
        for launch in process["buffer_records"]["kernel_dispatch"]:
            info, start = launch["dispatch_info"], launch["start_timestamp"]
            symbol = symbols[info["kernel_id"]]
            sizes, widths = (
                [info[f"{what}_size"][axis] for axis in "xyz"] for what in ("grid", "workgroup")
            )
            resources = (symbol[f"{name}_count"] for name in ("arch_vgpr", "accum_vgpr", "sgpr"))
            yield (
                symbol["formatted_kernel_name"], start, launch["end_timestamp"] - start,
                gpus[info["agent_id"]["handle"]], launch["stream_id"]["handle"],
                blocks(sizes, widths), tuple(widths), *resources,
                info["group_segment_size"], info["private_segment_size"],
            )  # fmt: skip


def read_kineto(path: Path) -> Iterator[Launch]:
    """Yield the kernels of a Kineto trace of ROCm, or of PyTorch 1.8 and 1.9."""
    with open_unpacked(path) as file:
        trace = json.loads(file.read(), parse_float=Decimal)
    trace = trace if isinstance(trace, dict) else {"traceEvents": trace}
    base = trace.get("baseTimeNanoseconds", 0)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    calls = {
        event["args"]["correlation"]: event["name"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver", "Runtime")
        and "correlation" in event.get("args", {})
    }
    for event in events:
        if event.get("cat") in ("kernel", "Kernel"):
            args = event["args"]
            grid, block = args.get("grid"), args.get("block")
            if grid and "ExtModule" in calls.get(args["correlation"], ""):
                grid = blocks(grid, block)
            yield (
                event["name"], int(event["ts"] * 1000) + base, int(event["dur"] * 1000),
                args["device"], args["stream"], grid and tuple(grid), block and tuple(block),
                args.get("registers per thread"), None, None, args.get("shared memory"), None,
            )  # fmt: skip


def stored_launches(store: Path) -> list[Launch]:
    """Return the kernels in a store, and the number of its other launches."""
    with contextlib.closing(sqlite3.connect(store)) as db:
        rows = db.execute(STORED).fetchall()
    return [
        (name, start, duration, device, stream, known(sizes[:3]), known(sizes[3:6]), *sizes[6:])
        for name, kind, start, duration, device, stream, *sizes in rows
        if kind == "kernel"
    ]


def known(sizes: list[Any]) -> tuple[Any, ...] | None:
    """Return three sizes as a tuple, or None if they are unknown."""
    return None if sizes[0] is None else tuple(sizes)


FORMS: tuple[tuple[Callable[[bytes], bool], Callable[[Path], Iterator[Launch]]], ...] = (
    (lambda head: head.startswith(b"SQLite") and b"rocpd_kernel_dispatch" in head, read_rocpd),
    (lambda head: head.startswith(b"SQLite") and b"rocpd_kernelapi" in head, read_rpd),
    (
        lambda head: head.startswith(b"SQLite") and b"KERN" in head and b"arch_vgpr" in head,
        read_rocprof,
    ),
    (lambda head: b"Kernel_Name" in head and b"Start_Timestamp" in head[:1000], read_csv),
    (lambda head: b'"rocprofiler-sdk-tool"' in head[:1000], read_json),
    (lambda head: b'"Dispatch Kernel"' in head or b'"cat": "Operator"' in head, read_kineto),
)


def form_of(path: Path) -> Callable[[Path], Iterator[Launch]] | None:
    """Return the function that reads a file, or None if the file is not from AMD's profilers."""
    with open_unpacked(path) as file:
        head = file.read(1 << 20)
        head += file.read() if b'"traceEvents"' in head or head.startswith(b"{") else b""
    return next((read for matches, read in FORMS if matches(head)), None)


def comparable(launches: list[Launch]) -> Counter[Launch]:
    """Return the number of equal launches, with canonical names."""
    names, _ = canonical_names({str(launch[0]) for launch in launches})
    return Counter((names[str(launch[0])], *launch[1:]) for launch in launches)


def check(path: Path, read: Callable[[Path], Iterator[Launch]]) -> tuple[str, bool]:
    """Return a line about a file, and whether its launches are equal to the stored launches."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "s.db"
        try:
            ingest_path(store, path)
        except ProfharnessError as error:
            return f"not read: {error}", False
        stored = comparable(stored_launches(store))
    read_alone = comparable(list(read(path)))
    count, lost, added = read_alone.total(), read_alone - stored, stored - read_alone
    lines = [f"{count:,} kernels, {lost.total():,} differ"]
    for sign, launches in (("file ", lost), ("store", added)):
        for launch in list(launches)[:SHOWN]:
            shown = (f"{name} {value}" for name, value in zip(FIELDS, launch, strict=True))
            lines.append(f"  {sign} {', '.join(text[:60] for text in shown)}")
    return "\n".join(lines), not (lost or added)


def check_file(path: Path) -> tuple[str, bool] | None:
    """Return a line about a file and whether it is read correctly. Return None if the file is not
    from AMD's profilers.
    """
    read = form_of(path)
    return None if read is None else check(path, read)


def check_all(
    folder: Path, check_one: Callable[[Path], tuple[str, bool] | None], summary: str
) -> int:
    """Check all files in a folder, and print a line for each and the summary. Return the exit code."""
    passed = []
    for path in sorted(filter(Path.is_file, folder.rglob("*"))):
        if answer := check_one(path):
            print(f"{path.name}: {answer[0]}", flush=True)
            passed.append(answer[1])
    print(f"{sum(passed)} of {len(passed)} {summary}")
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(check_all(Path(sys.argv[1]), check_file, "files are read correctly"))
