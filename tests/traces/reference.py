"""A naive reference for the Kineto parser: json.load and linear scans, no code in common."""

from __future__ import annotations

import gzip
import json
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

from profharness.errors import TraceFormatError
from profharness.trace import Trace
from profharness.traces.chrome import parse_chrome

Row = tuple[Any, ...]
KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}


def load(path: Path) -> dict[str, Any]:
    """Load the file with json.load. Numbers with a fraction become Decimal."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    value = json.loads(data, parse_float=Decimal)
    return value if isinstance(value, dict) else {"traceEvents": value}


def _ns(value: Any) -> int:
    return int(Decimal(value) * 1000)


def _encloses(event: dict[str, Any], t: int) -> bool:
    start = _ns(event["ts"])
    return start <= t < max(start + _ns(event["dur"]), start + 1)


def _order(event: dict[str, Any]) -> tuple[int, int]:
    return _ns(event["ts"]), -_ns(event["dur"])


def _fold(ops: list[dict[str, Any]], t: int) -> str:
    around = sorted((e for e in ops if _encloses(e, t)), key=_order)
    return ";".join(e["name"].replace(";", ",") for e in around)


def _range(notes: list[dict[str, Any]], call: dict[str, Any], t: int) -> tuple[Any, Any]:
    mine = [e for e in notes if e["pid"] == call["pid"] and _encloses(e, t)]
    own = sorted((e for e in mine if e["tid"] == call["tid"]), key=_order)
    cells = [e for e in own if e["name"].startswith("profharness:")]
    cells = cells or sorted((e for e in mine if e["name"].startswith("profharness:")), key=_order)
    cell = cells[-1]["name"] if cells else None
    if own or cell or len({e["tid"] for e in mine}) != 1:
        return (own[-1]["name"] if own else cell), cell
    return max(mine, key=_order)["name"], cell


def expected_rows(path: Path) -> list[Row]:
    """Return every launch of the file as a row of plain values, sorted."""
    trace = load(path)
    base = trace.get("baseTimeNanoseconds", 0)
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    notes = [e for e in events if e.get("cat") == "user_annotation"]
    ops: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            ops.setdefault((event["pid"], event["tid"]), []).append(event)
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls.setdefault(event["args"].get("correlation"), event)
    device = [e for e in events if e.get("cat") in KINDS]
    rows = [
        _device_row(e, calls.get(e["args"].get("correlation")), ops, notes, base) for e in device
    ]
    if not device:
        rows = [
            _op_row(e, own, mine, notes, base)
            for mine in ops.values()
            for e, own in zip(mine, _own_times(mine), strict=True)
            if own is not None
        ]
    return sorted(rows, key=repr)


def _own_times(ops: list[dict[str, Any]]) -> list[int | None]:
    """Return each op's duration minus that of its direct children, or None if they cover all of
    it.
    """
    own: list[int | None] = []
    for event in ops:
        covered = 0
        for child in ops:
            above = [e for e in ops if e is not child and _is_child(child, e)]
            if above and max(above, key=_order) is event:
                stop = min(
                    _ns(child["ts"]) + _ns(child["dur"]), _ns(event["ts"]) + _ns(event["dur"])
                )
                covered += max(stop - _ns(child["ts"]), 1)
        left = max(_ns(event["dur"]) - covered, 0)
        own.append(left if left or not covered else None)
    return own


def _is_child(other: dict[str, Any], event: dict[str, Any]) -> bool:
    return (
        other is not event and _encloses(event, _ns(other["ts"])) and _order(other) > _order(event)
    )


def _device_row(
    e: dict[str, Any], call: dict[str, Any] | None, ops: Any, notes: Any, base: int
) -> Row:
    a = e["args"]
    triple = lambda key: tuple(a[key]) if key in a else None  # noqa: E731
    launched: Row = (None, None, None, None, -1, -1, -1)
    if call is not None:
        t = _ns(call["ts"])
        thread = call["pid"], call["tid"]
        path = _fold(ops.get(thread, []), t) or None
        launched = (path, *_range(notes, call, t), call["name"], *thread, base + t)
    return (
        e["name"], KINDS[e["cat"]], triple("grid"), triple("block"),
        a.get("registers per thread"), a.get("shared memory"),
        *launched, a.get("device", -1), a.get("stream", -1), a.get("correlation", -1),
        a.get("graph node id") or -1, base + _ns(e["ts"]), _ns(e["dur"]), a.get("bytes", -1),
    )  # fmt: skip


def _op_row(e: dict[str, Any], own: int, mine: list[dict[str, Any]], notes: Any, base: int) -> Row:
    t = _ns(e["ts"])
    return (
        e["name"], "op", None, None, None, None,
        _fold(mine, t), *_range(notes, e, t), None, e["pid"], e["tid"], base + t,
        -1, -1, -1, -1, base + t, own, -1,
    )  # fmt: skip


def actual_rows(trace: Trace) -> list[Row]:
    """Return the rows of the parsed trace in the same form, sorted."""
    return sorted(ordered_rows(trace), key=repr)


def ordered_rows(trace: Trace) -> list[Row]:
    """Return the rows of the parsed trace in its own order."""

    def text(table: list[str], index: int) -> str | None:
        return table[index] if index >= 0 else None

    def range_name(index: int) -> str | None:
        return trace.ranges[index].name if index >= 0 else None

    rows: list[Row] = []
    for b in trace.batches():
        for i in range(len(b.kernel)):
            config = trace.launch_configs[b.launch_config[i]]
            rows.append((
                trace.kernels[b.kernel[i]], trace.kernel_kinds[b.kernel[i]],
                config.grid, config.block,
                config.registers_per_thread, config.shared_bytes,
                text(trace.op_paths, b.op_path[i]), range_name(b.range[i]),
                range_name(b.cell_range[i]),
                text(trace.apis, b.api[i]), int(b.pid[i]), int(b.tid[i]), int(b.launch_ns[i]),
                int(b.device[i]), int(b.stream[i]), int(b.correlation[i]), int(b.graph_node[i]),
                int(b.start_ns[i]), int(b.duration_ns[i]), int(b.bytes[i]),
            ))  # fmt: skip
    return rows


def told(path: Path) -> tuple[Any, ...]:
    """Return the contents of a trace, or the text of the error."""
    try:
        trace = parse_chrome(path)
    except TraceFormatError as error:
        return (str(error),)
    with closing(trace):
        lists = trace.kernels, trace.launch_configs, trace.op_paths, trace.apis, trace.calls
        return ordered_rows(trace), *lists, trace.ranges, trace.steps, trace.warnings, trace.skipped
