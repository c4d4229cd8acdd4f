"""Parse Nsight Systems' SQLite exports in bounded memory.

A report (.nsys-rep) is first exported to SQLite.

Device activities, API calls and NVTX ranges become int64 columns in a temporary file.

Some NVTX ranges are ops. PyTorch's `emit_nvtx`, which `nsys profile --pytorch=autograd-shapes-nvtx`
enables, describes an op in the range's text:
`aten::mm, seq = 5, op_id = 7, sizes = [[2, 3], [3, 4]], input_op_ids = [(1,0), (2,0)]`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from profharness.errors import TraceFormatError, with_count
from profharness.recording.profilers import require_tool
from profharness.recording.profilers.nsys import export_report
from profharness.rows import NSYS
from profharness.trace import NONE, LaunchConfig, Trace
from profharness.traces import nsys_export as schema
from profharness.traces.attribution import MAX_DEPTH, Attribution, Chunk, linked_chunks
from profharness.traces.columns import (
    MAX_NS,
    GpuRows,
    Ids,
    Ints,
    LaunchRows,
    OpRows,
    Spool,
    Tables,
    distinct,
    hashed,
    int_columns,
    is_near,
    map_values,
    nothing,
    pack,
    whole,
)
from profharness.traces.demangle import canonical_names
from profharness.traces.ops import (
    EVALUATION,
    NO_ARGUMENTS,
    HostSpan,
    OpArguments,
    has_arguments,
    is_detailed,
)
from profharness.traces.steps import PROFILER_STEP

REPORT_SUFFIX = ".nsys-rep"
NO_CONFIG = LaunchConfig(None, None)
NO_NAME = "unknown"
NUMBERS = (
    "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId", "bytes",
)  # fmt: skip
# Each process counts its correlation IDs separately. So API calls and activities are matched by a
# key, which is process << PROCESS_SHIFT | correlation ID.
PROCESS_SHIFT = 40
CORRELATIONS = 1 << PROCESS_SHIFT
MAX_PROCESSES = 4096
OWN_DOMAIN = "profharness"
# The event types of push/pop ranges, of start/end ranges, and of both kinds from nvtxt files.
RANGES = "eventType IN (59, 60, 70, 71)"
START_END = (60, 71)
DOMAINS = "eventType = 75"
MAX_RANGE_NAME = 4096
# Patterns for the names of the API calls that start most activities. An export can contain ten
# times as many other calls. They are read only if the call of an activity is not found.
LAUNCHING = ("cu%Launch%", "cu%Memcpy%", "cu%Memset%")
KERNEL_LAUNCHES = ("cu%Launch%Kernel%",)  # API calls that start exactly one kernel
# After such an API call, launches are added to a CUDA graph and do not start kernels.
CAPTURES = ("cu%StreamBeginCapture%",)
MAX_DURATION_NS = 1 << 53  # this is 104 days
MAX_SMALL = 1 << 62  # the store accepts only devices, streams, nodes and sizes below this
BLOCK_ROWS = 65536
# The end of a range's text, in the format of getNvtxStr in torch/csrc/profiler/util.cpp. nsys may
# truncate the lists in it.
TAIL = re.compile(
    r", (?=(?:seq|op_id|sizes|input_op_ids) = )(?:seq = (?P<sequence>\d{1,18})(?:, |\Z))?"
    r"(?:op_id = (?P<id>\d+)(?:, |\Z))?(?:sizes = (?P<sizes>[\[\]\d, ]*))?"
    r"(?:input_op_ids = [\[\]()\d, -]*)?\Z",
    re.ASCII,
)
OWN = ("aten::", "autograd::", "torch::")
NAMESPACED = re.compile(r"[a-z_]\w*::\w")
BARE = re.compile(r"detach_?|triton_\w+")  # ops whose names have no namespace
A_SIZE = re.compile(r"[0-9]")
NODE = re.compile(r"Backwards?\d*$")

_API_VERSION = re.compile(r"_v\d{4,6}$")

_Row = tuple[Any, ...]


def parse_nsys(path: Path) -> Trace:
    """Parse an SQLite export of nsys, or a .nsys-rep. The caller must close the returned Trace.

    nsys counts times from the start of the capture. If the export contains the time of this start,
    the times of the Trace count from 1970. If the file contains no launches, the Trace is empty and
    its warnings contain nsys's own messages. If the API call of a launch is not in the file,
    launch_ns, range and cell_range of the launch are NONE.

    Raise TraceFormatError if the file is not an export, or is damaged or incomplete. Also raise the
    errors that `export_report` raises.
    """
    path = Path(path)
    if not path.name.lower().endswith(REPORT_SUFFIX):
        return _parse(path, path)
    if not path.is_file():
        raise TraceFormatError(path, "no such file", expected="an nsys report")
    with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
        output = Path(folder) / "report.sqlite"
        export_report(path, output, require_tool(NSYS).path)
        return _parse(output, path)


def _parse(path: Path, shown: Path) -> Trace:
    with ExitStack() as stack:
        tables = Tables(Spool(stack))
        with schema.opened(path, shown) as export:
            warnings = schema.check_schema(export)
            reader = Reader(export, tables)
            reader.read()
            kernels, configs, variants, intricate = _describe(export, reader.variants)
            versions = schema.environment(export)
            gpus, odd = schema.devices(export)
            base, unknown_start = schema.start_time(export)
            warnings += [*odd, *unknown_start, *intricate, *reader.notes()]
        at = Attribution(tables, reader.flows, list(tables.threads), base)
        doubled, counts = reader.doubled(), Counter[str]()
        nameless = kernels.get(("kernel", NO_NAME), NONE)

        def chunks() -> Iterator[Chunk]:
            seen: set[int] = set()
            for gpu, launched in linked_chunks(tables, counts):
                if len(doubled):
                    hashes = hashed(gpu)
                    keep = np.ones(len(hashes), np.bool_)
                    for row in np.flatnonzero(np.isin(hashes, doubled)).tolist():
                        keep[row] = (value := int(hashes[row])) not in seen
                        seen.add(value)
                    counts["copies"] += int((~keep).sum())
                    gpu = GpuRows(*(column[keep] for column in gpu))
                    launched = LaunchRows(*(column[keep] for column in launched))
                kernel, config = variants[:, gpu.kernel]
                key = gpu.correlation
                counts["lost"] += int((launched.api < 0).sum())
                counts["nameless"] += int((kernel == nameless).sum())
                correlation = np.where(key >= 0, key % CORRELATIONS, NONE)
                gpu = gpu._replace(kernel=kernel, config=config, correlation=correlation)
                yield gpu, launched, at.stacks.lookup(launched.thread, launched.start)

        trace = at.make_trace(
            stack,
            chunks(),
            list(kernels),
            list(configs),
            profiler=NSYS,
            devices=gpus,
            environment=versions,
            close=stack.close,
        )
        of = f"of {trace.num_launches:,} launches"
        counted = {
            (
                f"{counts['lost']:,} {of} have no API call in the file, so their ranges are unknown"
            ): "lost",
            f"{counts['nameless']:,} {of} have no name in {schema.STRINGS}": "nameless",
            with_count(
                "{n} [launch is an exact copy of another and is|launches are exact copies of others "
                "and are] skipped",
                counts["copies"],
            ): "copies",
        }
        warnings += [text for text, name in counted.items() if counts[name]]
        if at.stacks.paths.deep:
            warnings.append(
                f"op stacks of more than {MAX_DEPTH} ops are stored without their middle part"
            )
        warnings += at.calls.warnings
        return replace(trace, close=stack.pop_all().close, warnings=tuple(warnings))


def _describe(export: schema.Export, variants: Ids) -> tuple[Ids, Ids, Ints, list[str]]:
    """Return the kernels as (kind, name), the launch configurations, an array and warnings.

    Column i of the array contains the ids of the kernel and the launch configuration of variant i.
    """
    kernels, configs = Ids(), Ids()
    string = cache(export.text)
    # The name of a kernel is the first of mangledName, demangledName and shortName that has a text
    texts = {}
    for table, values in variants:
        if table == schema.KERNEL:
            ids = values[: len(schema.NAMES)]
            filled = filter(None, (string(number) for number in ids if number is not None))
            texts[ids] = next(filled, NO_NAME)
    canonical, warnings = canonical_names(texts.values())
    pairs = []
    for table, values in variants:
        config = NO_CONFIG
        kinds = [value if isinstance(value, int) else -1 for value in values]
        if table == schema.KERNEL:
            key = ("kernel", canonical[texts[values[: len(schema.NAMES)]]])
            config = _config(values[len(schema.NAMES) :])
        elif table == schema.MEMCPY:
            key = ("memcpy", schema.memcpy_name(*kinds))
        else:
            key = ("memset", schema.memset_name(*kinds))
        pairs.append((kernels[key], configs[config]))
    return kernels, configs, np.array(pairs, np.int64).reshape(-1, 2).T, warnings


def _config(values: _Row) -> LaunchConfig:
    gx, gy, gz, bx, by, bz, registers, static, dynamic = map(whole, values)
    grid = None if gx is None or gy is None or gz is None else (gx, gy, gz)
    block = None if bx is None or by is None or bz is None else (bx, by, bz)
    shared = None if static is None or dynamic is None else static + dynamic
    return LaunchConfig(grid, block, registers, static, dynamic, shared)


class Reader:
    """Reads one export into tables.

    A variant is a distinct combination of the values that describe an activity: the names and the
    launch configuration of a kernel, or the kinds of memory of a memcpy or memset. The column
    `kernel` of GpuRows contains an index into `variants`, and `config` is always 0. The column
    `correlation` contains the key that is defined at PROCESS_SHIFT. The rows are sorted by key.
    """

    def __init__(self, export: schema.Export, tables: Tables) -> None:
        self.variants = Ids()
        self.flows = np.empty((0, 4), np.int64)  # the `flows` for Attribution
        self._tables = tables
        self._export = export
        self._doubts: Counter[str] = Counter()  # how often each warning occurred; replaces {n}
        self._processes = Ids()
        # The keys of activities outside and inside of CUDA graphs
        self._keys = {False: array("q"), True: array("q")}
        self._copies = False  # whether the export may contain copies of activities
        # `_needed` contains the sorted keys of the activities and, at the end, a larger number.
        # `_found` contains for each key whether its API call has been found.
        self._needed, self._found = nothing(0), np.empty(0, np.bool_)
        self._nameless: set[int] = set()  # ids of names that are not in StringIds
        self._string = cache(export.text)

    def read(self) -> None:
        """Read all tables.

        The order of the tables matters, because each step uses results of earlier steps.
        """
        for table in schema.VARIANTS:
            if self._export.has(table, "start", "end"):
                self._read_activities(table)
        self._keys[False].append(MAX_SMALL)
        launches, nodes = map(np.asarray, self._keys.values())
        launches.sort()
        shared = int(np.count_nonzero(launches[1:] == launches[:-1]))
        self._doubt(
            "{n} [launch has|launches have] the same API call id as an earlier launch", shared
        )
        every = np.sort(np.append(launches, nodes)) if len(nodes) else launches
        self._needed = every[np.append(True, every[1:] != every[:-1])]
        self._copies |= len(self._needed) < len(every)
        self._found = self._needed == MAX_SMALL
        self._keys.clear()
        if self._export.has(schema.RUNTIME, "start", "globalTid", "correlationId"):
            self._read_needed_calls()
        self._read_ranges()
        for blocks in (self._tables.gpu, self._tables.launches):
            blocks.sort(key=lambda block: block.low)

    def doubled(self) -> Ints:
        """Return the hashes of activities that occur more than once."""
        if not self._copies:
            return nothing(0)
        blocks = (hashed(self._tables.spool.read(block)) for block in self._tables.gpu)
        ordered = np.sort(np.concatenate([nothing(0), *blocks]))
        return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])

    def notes(self) -> list[str]:
        """Return warnings about the rows that were read, and the warnings that nsys recorded."""
        notes = [with_count(text, count) for text, count in self._doubts.items()]
        if self._tables.gpu:
            notes += schema.absent_tables(self._export)
        else:
            notes.append("the export contains no kernel, memcpy or memset")
        if graphs := sum(1 for _ in self._export.rows(schema.GRAPHS, ("start",))):
            notes.append(
                f"{graphs} CUDA graph launches were recorded without their kernels; capture "
                "with --cuda-graph-trace=node to see the kernels"
            )
        return notes + schema.diagnostics(self._export)

    def _doubt(self, text: str, count: int) -> None:
        if count:
            self._doubts[text] += count

    def _skip(self, table: str, count: int) -> None:
        self._tables.skipped += count
        self._doubt(f"{{n}} [row|rows] of {table} could not be read and [was|were] skipped", count)

    def _read_needed_calls(self) -> None:
        """Read the API calls that started activities. If calls have no names, read all calls."""
        ids = self._export.strings_like(LAUNCHING)
        if not ids or not self._export.has(schema.RUNTIME, "nameId"):
            self._read_calls("")
            return
        listed = ", ".join(map(str, ids))
        self._read_calls(f"nameId IN ({listed})")
        if not self._found.all():
            self._read_calls(f"nameId IS NULL OR nameId NOT IN ({listed})")

    def _read_calls(self, where: str) -> None:
        columns = ("correlationId", "nameId", "globalTid", "start")
        # Ids of the names of API calls that must have started a kernel. The list is empty if the
        # export contains a CUDA graph, because launches that are added to a graph start no kernel.
        kernel = []
        if self._export.columns(schema.GRAPHS) is None and not self._export.strings_like(CAPTURES):
            kernel = self._export.strings_like(KERNEL_LAUNCHES)
        for batch in self._export.batches(schema.RUNTIME, columns, where, filled=4):
            numbers, _ = self._numbers(schema.RUNTIME, batch, 4)
            key = self._to_keys(numbers[0], numbers[2])
            keep = (key >= 0) & (numbers[2] != -1) & is_near(numbers[3])
            self._skip(schema.RUNTIME, len(key) - int(keep.sum()))
            key, (_, name, thread, start) = key[keep], numbers[:, keep]
            at = np.searchsorted(self._needed, key)
            hit = self._needed[at] == key
            lone = int((~hit & np.isin(name, kernel)).sum())
            self._doubt("{n} kernel [launch has|launches have] no kernel in the export", lone)
            needed = hit & ~self._found[at]
            repeated = int(hit.sum()) - len(distinct(at[needed]))
            text = (
                f"{{n}} [call|calls] in {schema.RUNTIME} [has|have] the same id as an earlier call; the "
                "earlier call is used"
            )
            self._doubt(text, repeated)
            self._found[at[hit]] = True
            api, thread = (
                map_values(name[needed], self._api),
                map_values(thread[needed], self._thread),
            )
            self._write(LaunchRows(key[needed], api, thread, start[needed]))

    def _read_activities(self, table: str) -> None:
        width, columns = len(NUMBERS), (*NUMBERS, *schema.VARIANTS[table])
        for batch in self._export.batches(table, columns, filled=width):
            rows, batch = self._numbers(table, batch, width)
            start, end, device, stream, correlation, process, node, size = rows
            variant = self.variants.column([(table, row[width:]) for row in batch])
            keep = is_near(start) & is_near(end) & (end >= start)
            keep &= (end - start < MAX_DURATION_NS) & (device >= NONE) & (device < MAX_SMALL)
            self._skip(table, int((~keep).sum()))
            early = int((start[keep] < 0).sum())
            self._doubt(f"{{n}} [row|rows] of {table} [begins|begin] before the capture", early)
            key = self._to_keys(correlation, process)
            self._copies |= bool((key[keep] < 0).any())
            for is_node in (False, True):
                mine = key[keep & (key >= 0) & ((node > 0) == is_node)]
                self._keys[is_node].frombytes(mine.tobytes())
            stream, node, size = (
                np.where((column >= 0) & (column < MAX_SMALL), column, NONE)
                for column in (stream, node, size)
            )
            node, zero = np.where(node > 0, node, NONE), np.zeros_like(start)
            gpu = GpuRows(start, end - start, variant, zero, device, stream, key, node, size)
            self._write(GpuRows(*(column[keep] for column in gpu)))

    def _read_ranges(self) -> None:
        if not self._export.has(schema.NVTX, "start", "eventType", "globalTid"):
            return
        tables, domains, ops = self._tables, self._domains(), OpRanges(self._tables)
        end_of_trace: int | None = None
        columns = ("start", "end", "globalTid", "eventType", "domainId", "textId", "text")
        names: dict[str, str] = {}  # names of ranges that are not ops
        seen: set[int] = set()
        for row in self._export.rows(schema.NVTX, columns, RANGES):
            start, end, thread, kind, domain, string, text = row
            if not (_is_time(start) and (end is None or _is_time(end)) and isinstance(thread, int)):
                self._skip(schema.NVTX, 1)
                continue
            if end is None and end_of_trace is None:
                with_ends = (*schema.VARIANTS, schema.RUNTIME, schema.NVTX)
                ends = (self._export.largest(table, "end") or 0 for table in with_ends)
                end_of_trace = min(max(ends), MAX_NS - 1)
            stop = max(end_of_trace or 0, start) if end is None else end
            if stop < start:
                self._skip(schema.NVTX, 1)
                continue
            message = (text if string is None else self._string(string)) or ""
            self._doubt("{n} [range has|ranges have] no name in the export", not message)
            prefix, wide = domains.get((thread >> 24, domain), ""), kind in START_END
            name = f"{prefix}{message}"
            if (key := hash((name, start, stop, thread, wide))) in seen:
                self._doubt(
                    "{n} [range is an exact copy of another and is|ranges are exact copies of others and are] skipped",
                    1,
                )
                continue
            seen.add(key)
            number = self._thread(thread)
            if name not in names and not (prefix or wide):
                op_name = ops.collect(name, start, stop, number)
                if op_name is None:
                    continue
                name = op_name
            name = name[:MAX_RANGE_NAME]
            tables.range_names.append(names.setdefault(name, name))
            tables.ranges.extend((start, stop - start, number, wide))
        self._separate_steps()
        self.flows, unclear = ops.finish()
        self._doubt("{n} [op has|ops have] sizes that could not be read", ops.unread)
        text = (
            "{n} backward [op has|ops have] a sequence number that several threads use, so their forward "
            "ops are unknown"
        )
        self._doubt(text, unclear)

    def _separate_steps(self) -> None:
        """End each step of the profiler where the next one of its thread begins.

        NVTX ranges are a stack. If a program begins a step inside another range, such as that of its
        optimizer, the end of this range ends the step instead, and the previous step stays open.
        """
        tables = self._tables
        rows = tables.ranges
        steps = sorted(
            (rows[4 * at + 2], rows[4 * at], 4 * at)  # thread, start, place in the rows
            for at, name in enumerate(tables.range_names)
            # Ranges that start and end anywhere are not on a stack.
            if name.startswith(PROFILER_STEP) and not rows[4 * at + 3]
        )
        for (thread, start, at), (other, border, after) in pairwise(steps):
            end = start + rows[at + 1]
            if thread == other and start < border < end:
                rows[at + 1] = border - start
                rows[after + 1] = max(rows[after + 1], end - border)

    def _domains(self) -> dict[tuple[int, Any], str]:
        """Return the prefix of the names of ranges for each (process, domain id)."""
        prefixes: dict[tuple[int, Any], str] = {}
        columns = ("globalTid", "domainId", "textId", "text")
        for thread, domain, string, text in self._export.rows(schema.NVTX, columns, DOMAINS):
            name = text if string is None else self._string(string)
            if isinstance(thread, int) and domain and name and name != OWN_DOMAIN:
                prefixes[(thread >> 24, domain)] = f"{name}:"
        return prefixes

    def _numbers(self, table: str, batch: list[_Row], width: int) -> tuple[Ints, list[_Row]]:
        """Return the first `width` columns as an array, and the rows that are in the array.

        Rows that have a value other than an integer in these columns are skipped and counted.
        """
        try:
            return int_columns(batch, width), batch
        except (TypeError, ValueError, OverflowError):
            good = [row for row in batch if all(isinstance(v, int) for v in row[:width])]
            self._skip(table, len(batch) - len(good))
            return int_columns(good, width), good

    def _to_keys(self, correlation: Ints, thread_or_process: Ints) -> Ints:
        """Return a key for each row, or -1 if the correlation ID or the process is invalid."""
        process = map_values(thread_or_process >> 24, self._process)
        valid = (correlation >= 0) & (correlation < CORRELATIONS) & (process >= 0)
        return np.where(valid, process * CORRELATIONS + correlation, -1)

    def _process(self, number: int) -> int:
        if number == -1:  # unknown, so assume the process that made the API calls
            calls = self._export.processes_of_calls
            if len(calls) != 1:
                return -1
            number = calls[0]
        process = self._processes[number]
        return process if process < MAX_PROCESSES else -1

    def _thread(self, number: int) -> int:
        return self._tables.threads[(number >> 24) & 0xFFFFFF, number & 0xFFFFFF]

    def _api(self, string: int) -> int:
        name = self._string(string)
        if name is None and string not in self._nameless:
            self._nameless.add(string)
            self._doubt(f"{{n}} API call [name is|names are] missing from {schema.STRINGS}", 1)
        return self._tables.apis[_API_VERSION.sub("", name or NO_NAME)]

    def _write(self, rows: GpuRows | LaunchRows) -> None:
        """Sort rows by key, and write one block for each process."""
        order = np.argsort(rows.correlation, kind="stable")
        borders = np.flatnonzero(np.diff(rows.correlation[order] >> PROCESS_SHIFT)) + 1
        for part in np.split(order, borders):
            self._tables.write(type(rows)(*(column[part] for column in rows)))


def _is_time(value: object) -> bool:
    return isinstance(value, int) and abs(value) < MAX_NS


def read_text(text: str) -> tuple[str, int, str | None, bool] | None:
    """Parse the text of a range that PyTorch opened. Return None for the text of any other range.

    Return the name, the sequence number or -1, the text of the sizes, and whether the range is an
    op instead of a `record_function` of the user. The texts of both kinds of ranges may contain an
    `op_id`, but only the text of an op contains a sequence number or the size of a tensor.
    """
    match = TAIL.search(text)
    if match is None or not match.start():
        return None
    name = sys.intern(text[: match.start()])
    sequence, number, sizes = match.group("sequence", "id", "sizes")
    own = name.startswith(OWN)
    if number is None and not own:
        return None
    has_details = sequence is not None or bool(sizes and A_SIZE.search(sizes))
    is_op = own or has_details or bool(NAMESPACED.match(name) or BARE.fullmatch(name))
    return name, int(sequence or -1), sizes, is_op


@lru_cache(maxsize=4096)
def op_arguments(text: str) -> OpArguments | None:
    """Parse shapes such as `[[2, 3], []]`. Return None if the text is not a list of lists."""
    try:
        shapes = json.loads(text.removesuffix(", "))
        return OpArguments(tuple(map(tuple, shapes)))
    except (ValueError, TypeError, RecursionError):
        return None


class OpRanges:
    """Collects the ranges that are ops, and adds them to the tables.

    `unread` counts the ops whose sizes could not be read.
    """

    def __init__(self, tables: Tables) -> None:
        self.unread = 0
        self._tables = tables
        self._any = False
        # The whole texts of the ranges before the first op, by the index of the range
        self._renamed: dict[int, str] = {}
        self._pending: list[tuple[int, int, int, int]] = []
        # Start, end, thread and sequence number of the ops in which autograd evaluates its nodes
        self._evaluations = array("q")
        # Thread, start, sequence number and name of each op that has a sequence number
        self._numbered = array("q")

    def collect(self, text: str, start: int, stop: int, thread: int) -> str | None:
        """Collect a range that is an op, and return None. For other ranges, return the name."""
        op = read_text(text)
        if op is None:
            return text
        op_name, sequence, sizes, is_op = op
        if op_name.startswith(EVALUATION):
            self._evaluations.extend((start, stop, thread, sequence))
        elif is_detailed(op_name):
            wanted = sizes and has_arguments(op_name)
            arguments = op_arguments(sizes) if wanted else NO_ARGUMENTS
            self.unread += arguments is None
            detail = HostSpan(op_name, start, stop, thread, arguments or NO_ARGUMENTS, sequence)
            self._tables.details.append(detail)
        if not is_op:
            if not self._any:
                self._renamed[len(self._tables.range_names)] = text
            return op_name
        self._any = True
        name = self._tables.names[op_name]
        if sequence >= 0:
            self._numbered.extend((thread, start, sequence, name))
        self._pending.append((start, stop, thread, name))
        if len(self._pending) == BLOCK_ROWS:
            self._flush()
        return None

    def _flush(self) -> None:
        if self._pending:
            self._tables.write(OpRows(*np.array(self._pending, np.int64).T))
            self._pending.clear()

    def finish(self) -> tuple[Ints, int]:
        """Write the pending ops, and match forward ops with backward ops by their sequence numbers.

        Return the `flows` for `Attribution`, and the number of backward ops whose forward op is
        unknown because several threads used the sequence number. If no op was found, the ranges do
        not come from PyTorch, so the whole texts become their names again.

        Autograd numbers the backward ops that each thread prepares. Of the ops that have the same
        sequence number in a thread, the forward op is the op that started last.
        """
        self._flush()
        if not self._any:
            self._tables.details.clear()
            self._evaluations = array("q")
            for number, text in self._renamed.items():
                self._tables.range_names[number] = text
        self._tables.evaluations.append(np.array(self._evaluations, np.int64).reshape(-1, 4).T)
        threads, starts, sequences, name = np.array(self._numbered, np.int64).reshape(-1, 4).T
        ids = self._tables.names
        names = list(ids)
        nodes = [number for text, number in ids.items() if EVALUATION + text in ids]
        is_node = np.isin(name, nodes)
        processes = np.array([pid for pid, _ in self._tables.threads], np.int64)
        key = pack([processes[threads], sequences])
        forward = np.flatnonzero(~is_node)
        forward = forward[np.lexsort((starts[forward], threads[forward], key[forward]))]
        changes = np.diff(key[forward], append=-1) | np.diff(threads[forward], append=-1)
        last = forward[changes != 0]
        backward = np.flatnonzero(is_node)
        low, high = (np.searchsorted(key[last], key[backward], side) for side in ("left", "right"))
        matched, unclear = [], 0
        columns = (backward.tolist(), low.tolist(), high.tolist())
        for node, begin, end in zip(*columns, strict=True):
            ops = last[begin:end].tolist()
            if len(ops) > 1:
                wanted = _stem(names[name[node]])
                ops = [op for op in ops if _stem(names[name[op]]) == wanted]
                unclear += len(ops) != 1
            if len(ops) == 1 and starts[ops[0]] < starts[node]:
                matched.append((ops[0], node))
        pairs = np.array(matched, np.int64).reshape(-1, 2)
        pairs = pairs[np.argsort(starts[pairs[:, 0]], kind="stable")]
        return np.stack([threads, starts])[:, pairs].transpose(1, 2, 0).reshape(-1, 4), unclear


def _stem(name: str) -> str:
    """Return the part of a name that an op and its autograd node share.

    For `aten::mm` and `MmBackward0`, this is `mm`.
    """
    return NODE.sub("", name.rpartition("::")[2]).replace("_", "").lower()
