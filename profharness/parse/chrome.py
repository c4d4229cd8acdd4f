"""Kineto's Chrome trace (torch.profiler's JSON, plain or gzip) to a Trace, at a few hundred MB a
second in bounded memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from profharness.devices import Device
from profharness.errors import TraceFormatError
from profharness.parse import join as link
from profharness.parse.chrome_read import Layout, Window, decode_lenient, probe, skip_space
from profharness.parse.chrome_scan import (
    RANGE,
    Answer,
    Request,
    finish_child,
    scan,
    start_child,
    stop_child,
    temporary_file,
)
from profharness.parse.columns import Block, Spool, Tables
from profharness.parse.output import Output
from profharness.trace import LaunchBatch, Trace

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


TWO_PROCESSES_FROM = (
    50_000_000  # bytes of JSON; below, starting a second process costs more than it saves
)
GZIP_RATIO = 13
COLUMNS = tuple(field.name for field in fields(LaunchBatch))


class _Inexact(Exception):
    """Ranges scanned apart do not add up to the file; it has to be scanned in one go."""


def parse_chrome(
    path: Path,
    *,
    processes: int | None = None,
    range_bytes: int = RANGE,
    chunk_rows: int = link.CHUNK_ROWS,
    slice_rows: int = link.SLICE_ROWS,
) -> Trace:
    """Parse a Kineto trace; processes None: two for large files where there are two CPUs, else one.

    Launches are kernels, memcpys and memsets; in a trace without any, ATen ops with their own time.
    Unreadable single events are
    skipped and counted. The sizes steer memory, not results. Raises TraceFormatError when the file
    is truncated, damaged
    or no Kineto trace. The caller closes the Trace.
    """
    path = Path(path)
    window = Window(path)
    try:
        layout = probe(window)
    finally:
        window.close()
    with ExitStack() as stack:
        source, header, warnings = _scan_file(path, layout, processes, range_bytes, stack)
        return _assemble(source, header, warnings, chunk_rows, slice_rows, stack)


def _scan_file(
    path: Path, layout: Layout, processes: int | None, range_bytes: int, stack: ExitStack
) -> tuple[link.Source, dict[str, Any], list[str]]:
    """Scan with as many processes as pay, again with decimals or in one go where that proves
    necessary.
    """
    count = _processes(path, layout, processes)
    exact = _needs_decimals(layout.first_ts)
    warnings: list[str] = []
    if layout.empty:
        return link.merge([Tables()], []), _trailer(path, layout, layout.first), warnings
    width = range_bytes if layout.certain else 0
    while True:
        answers, spools = _run(path, layout, exact, count, width, stack, warnings)
        if any(answer.need_exact for answer in answers):
            exact = True
            continue
        try:
            end = _array_end(path, answers)
        except _Inexact:
            count, width = 1, 0
            continue
        source = link.merge([answer.tables for answer in answers], spools)
        return source, _trailer(path, layout, end), warnings


def _run(
    path: Path,
    layout: Layout,
    exact: bool,
    count: int,
    width: int,
    stack: ExitStack,
    warnings: list[str],
) -> tuple[list[Answer], list[Spool]]:
    files = [stack.enter_context(temporary_file()) for _ in range(count)]
    spools = [Spool(file) for file in files]
    step = count if width else 0
    requests = [Request(str(path), layout, exact, i, step, width) for i in range(count)]
    if count == 1:
        return [scan(requests[0], spools[0])], spools
    child = start_child(requests[1], files[1])
    try:
        mine = scan(requests[0], spools[0])
        answer = finish_child(child)
    except BaseException:
        stop_child(child)
        raise
    if answer is None:
        warnings.append("the second reading process died; the file was read again by one")
        return _run(path, layout, exact, 1, width, stack, warnings)
    if answer.error:
        error = TraceFormatError(path, "", offset=answer.error[1], expected=answer.error[2])
        error.args = (answer.error[0],)
        raise error
    return [mine, answer], spools


def _array_end(path: Path, answers: list[Answer]) -> int:
    """Offset of the closing bracket. Raises TraceFormatError if there is none, _Inexact if parts
    contradict each other.
    """
    parts = sorted((part for answer in answers for part in answer.parts), key=lambda p: p.index)
    ends = [part for part in parts if part.array_end is not None]
    if not ends:
        size = max(answer.size for answer in answers)
        message = "the file ends inside traceEvents"
        raise TraceFormatError(path, message, offset=size, expected="], the end of the events")
    if any(part.index > ends[0].index and part.events for part in parts):
        raise _Inexact
    assert ends[0].array_end is not None
    return ends[0].array_end


def _trailer(path: Path, layout: Layout, end: int) -> dict[str, Any]:
    """Header and trailing keys. Raises TraceFormatError if the file does not close properly
    behind the events.
    """
    window = Window(path)
    try:
        window.fill()
        window.seek(end + 1)
        data = window.rest()
        at = skip_space(data, 0)
        if layout.bare:
            if data[at:].strip(b" \t\r\n\0"):
                message = "something follows the events"
                raise window.error(message, offset=end + 1 + at, expected="the end of the file")
            return {}
        mark = data[at : at + 1]
        try:
            if mark not in (b",", b"}"):
                raise ValueError("no closing }")
            tail = data[at + 1 :] if mark == b"," else data[at:]
            trailer = decode_lenient(b"{" + tail.rstrip(b" \t\r\n\0"))
        except (ValueError, RecursionError) as error:
            message = f"the file is not whole behind the events: {error}"
            raise window.error(message, expected="}, the end of the trace") from None
        return {**trailer, **layout.header}
    finally:
        window.close()


def _processes(path: Path, layout: Layout, asked: int | None) -> int:
    if not layout.certain:
        return 1
    if asked is not None:
        return max(1, min(asked, 2))
    with path.open("rb") as file:
        ratio = GZIP_RATIO if file.read(2) == b"\x1f\x8b" else 1
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    large = path.stat().st_size * ratio >= TWO_PROCESSES_FROM
    return 2 if large and (cpus or 1) > 1 else 1


def _needs_decimals(ts: str) -> bool:
    try:
        return abs(float(ts)) >= float(1 << 43)
    except ValueError:
        return False


def _assemble(
    source: link.Source,
    header: dict[str, Any],
    warnings: list[str],
    chunk_rows: int,
    slice_rows: int,
    stack: ExitStack,
) -> Trace:
    """Join everything, write the result columns to a file of their own, and wrap them up."""
    tables = source.tables
    base, doubt = time_base(header)
    threads = [(_number(pid), _number(tid)) for pid, tid in tables.threads]
    if tables.skipped:
        doubt.append(f"{tables.skipped} events could not be read and were skipped")
    out = Spool(stack.enter_context(temporary_file()))
    output = Output(source, threads, base, out)
    output.write(chunk_rows, slice_rows)
    files = stack.pop_all()
    return Trace(
        profiler="torch",
        devices=devices(header),
        environment=environment(header),
        kernels=output.kernels,
        kernel_kinds=output.kinds,
        launch_configs=output.configs,
        op_paths=output.op_paths,
        apis=output.apis,
        ranges=output.ranges,
        num_launches=sum(block.rows for block in output.blocks),
        skipped=tables.skipped,
        batches=partial(_batches, out, output.blocks),
        close=files.close,
        warnings=(*warnings, *doubt),
    )


def _batches(spool: Spool, blocks: list[Block]) -> Iterator[LaunchBatch]:
    for block in blocks:
        rows = spool.read(block)
        yield LaunchBatch(**dict(zip(COLUMNS, rows, strict=True)))


def _number(value: Any) -> int:
    """A pid or tid as a number; -1 for the words that Kineto uses for its own tracks."""
    text = str(value)
    if isinstance(value, int | str) and text.lstrip("-").isdecimal() and len(text) < 19:
        return int(text)
    return -1
