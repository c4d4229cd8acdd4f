"""Nsight Systems' SQLite export (or a report, through the nsys at hand) to a Trace, in bounded
memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from profharness.errors import TraceFormatError
from profharness.parse import nsys_read as header
from profharness.parse.chrome_scan import temporary_file
from profharness.parse.columns import Block, Ints, Spool
from profharness.parse.join import Linked, Source, linked_chunks
from profharness.parse.nsys_export import Export, canonical_names, memcpy_name, memset_name, opened
from profharness.parse.nsys_read import CORRELATIONS, KERNEL, MEMCPY, NAMES, Reader
from profharness.parse.output import Renumber
from profharness.parse.ranges import NsysRanges
from profharness.profilers import require_tool
from profharness.profilers.nsys import export_report
from profharness.trace import LaunchBatch, LaunchConfig, Trace

REPORT_SUFFIX = ".nsys-rep"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NO_CONFIG = LaunchConfig(None, None)
COLUMNS = (
    "kernel", "launch_config", "range", "cell_range", "api", "device", "stream", "correlation",
    "graph_node", "pid", "tid", "launch_ns", "start_ns", "duration_ns", "bytes",
)  # fmt: skip


def parse_nsys(path: Path) -> Trace:
    """Parse an SQLite export of nsys, or a .nsys-rep by exporting it to a temporary file first.

    nsys counts times from the start of the capture; where the export tells that start
    (TARGET_INFO_SESSION_START_TIME.utcEpochNs), the Trace's times count from 1970. Launches are
    kernels, memcpys and memsets; a file without any gives an empty Trace whose warnings say what
    nsys said. A launch without its API call in the file has launch_ns, range and cell_range NONE.
    Raises TraceFormatError when the file is no export, damaged or half-written, and what
    `export_report` raises. The caller closes the Trace.
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
        spool = Spool(stack.enter_context(temporary_file()))
        with opened(path, shown) as export:
            reader = Reader(export, spool)
            reader.read()
            kernels = _Kernels(export, reader.variants)
            environment = header.environment(export)
            devices, warnings = header.devices(export)
            base, doubt = header.start_time(export)
            warnings = [*warnings, *doubt, *kernels.warnings, *_notes(export, reader)]
        return _assemble(reader, spool, kernels, base, environment, devices, warnings, stack)


def _assemble(
    reader: Reader,
    spool: Spool,
    kernels: _Kernels,
    base: int,
    environment: dict[str, object],
    devices: tuple[Any, ...],
    warnings: list[str],
    stack: ExitStack,
) -> Trace:
    """Join launches with calls and ranges, write the result to a file of its own, wrap it up."""
    tables = reader.tables
    out = Spool(stack.enter_context(temporary_file()))
    threads = [(int(pid), int(tid)) for pid, tid in tables.threads]
    ranges = NsysRanges(reader.ranges, threads, base)
    apis = Renumber()
    numbers = np.array(threads, np.int64).reshape(len(threads), 2)
    blocks: list[Block] = []
    lost = 0
    for chunk in linked_chunks(Source(tables, [spool], [{}])):
        columns = _columns(chunk, kernels, ranges, apis, numbers, base)
        lost += int((chunk.api < 0).sum())
        count = len(chunk.api)
        offset = out.write(columns)
        blocks.append(Block((0, len(blocks)), offset, len(columns), count, 0, 0))
    launches = sum(block.rows for block in blocks)
    if lost:
        warnings.append(
            f"{lost} of {launches} launches have no API call in the file and so belong to no range"
        )
    if tables.skipped:
        warnings.append(f"{tables.skipped} rows could not be read and were skipped")
    names = list(tables.apis)
    files = stack.pop_all()
    return Trace(
        profiler="nsys",
        devices=devices,
        environment=environment,
        kernels=kernels.names,
        kernel_kinds=kernels.kinds,
        launch_configs=kernels.configs,
        op_paths=[],
        apis=[names[row] for row in apis.order],
        ranges=ranges.rows,
        num_launches=launches,
        skipped=tables.skipped,
        batches=partial(_batches, out, blocks),
        close=files.close,
        warnings=tuple(warnings),
    )


def _columns(
    chunk: Linked, kernels: _Kernels, ranges: NsysRanges, apis: Renumber, threads: Ints, base: int
) -> list[Ints]:
    """The chunk in the order of COLUMNS."""
    start, duration, variant, _, device, stream, key, node, size = chunk.gpu
    inner, cell = ranges.lookup(chunk.thread, chunk.launch)
    known = chunk.thread >= 0
    pid, tid = (
        (np.where(known, threads[chunk.thread, column], -1) for column in (0, 1))
        if len(threads)
        else (np.full_like(start, -1), np.full_like(start, -1))
    )
    correlation = np.where(key >= 0, key % CORRELATIONS, -1)
    launch = np.where(known, chunk.launch + base, -1)
    return [
        kernels.kernel_of[variant], kernels.config_of[variant], inner, cell, apis(chunk.api), device,
        stream, correlation, np.where(node > 0, node, -1), pid, tid, launch, start + base,
        duration, size,
    ]  # fmt: skip


def _batches(spool: Spool, blocks: list[Block]) -> Iterator[LaunchBatch]:
    for block in blocks:
        rows = dict(zip(COLUMNS, spool.read(block), strict=True))
        yield LaunchBatch(op_path=np.full(block.rows, -1, np.int64), **rows)


def _notes(export: Export, reader: Reader) -> list[str]:
    """What the user should know about the capture."""
    notes = [] if reader.tables.gpu else ["the export holds no kernel, memcpy or memset"]
    graphs = sum(1 for _ in export.rows(GRAPHS, ("start",)))
    if graphs:
        notes.append(
            f"{graphs} launches of CUDA graphs were recorded whole, without their kernels; "
            "capture with --cuda-graph-trace=node to see them"
        )
    return notes + header.diagnostics(export)


class _Kernels:
    """The Trace's names, kinds and launch configurations, and for each variant its index into
    them.
    """

    def __init__(self, export: Export, variants: dict[tuple[str, tuple[Any, ...]], int]) -> None:
        names: dict[tuple[str, str], int] = {}
        configs: dict[LaunchConfig, int] = {}
        texts = _kernel_texts(export, variants)
        canonical, left = canonical_names(list(dict.fromkeys(texts.values())))
        kernel_of, config_of = [], []
        for table, told in variants:
            if table == KERNEL:
                key = ("kernel", canonical[texts[told[: len(NAMES)]]])
                config = _config(told[len(NAMES) :])
            else:
                key, config = _transfer(table, told), NO_CONFIG
            kernel_of.append(names.setdefault(key, len(names)))
            config_of.append(configs.setdefault(config, len(configs)))
        self.names = [name for _, name in names]
        self.kinds = [kind for kind, _ in names]
        self.configs = list(configs)
        self.kernel_of = np.array(kernel_of, np.int64)
        self.config_of = np.array(config_of, np.int64)
        self.warnings = (
            [f"{left} kernel names are too intricate to demangle and stay mangled"] if left else []
        )


def _kernel_texts(
    export: Export, variants: dict[tuple[str, tuple[Any, ...]], int]
) -> dict[tuple[Any, ...], str]:
    """(mangledName, demangledName, shortName) ids to the first of them that StringIds knows."""
    found: dict[tuple[Any, ...], str] = {}
    strings: dict[Any, str | None] = {None: None}
    for table, told in variants:
        ids = told[: len(NAMES)]
        if table != KERNEL or ids in found:
            continue
        for one in ids:
            if one not in strings:
                strings[one] = export.text(one)
        found[ids] = next((text for one in ids if (text := strings[one])), "unknown")
    return found


def _config(told: tuple[Any, ...]) -> LaunchConfig:
    """A kernel's row of CONFIG columns; what is missing or no number is None."""
    values = [v if isinstance(v, int) and 0 <= v < 1 << 62 else None for v in told]
    gx, gy, gz, bx, by, bz, registers, static, dynamic = values
    grid = None if gx is None or gy is None or gz is None else (gx, gy, gz)
    block = None if bx is None or by is None or bz is None else (bx, by, bz)
    shared = None if static is None or dynamic is None else static + dynamic
    return LaunchConfig(grid, block, registers, static, dynamic, shared)


def _transfer(table: str, told: tuple[Any, ...]) -> tuple[str, str]:
    """(kind, name) of a memcpy or memset."""
    kinds = [value if isinstance(value, int) else -1 for value in told]
    if table == MEMCPY:
        return "memcpy", memcpy_name(*kinds)
    return "memset", memset_name(*kinds)
