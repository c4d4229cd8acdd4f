"""Parse Nsight Systems' SQLite exports in bounded memory.

A report (.nsys-rep) is first exported to SQLite.

Device activities, API calls and NVTX ranges become int64 columns in a temporary file.

Some NVTX ranges are ops. PyTorch's `emit_nvtx`, which `nsys profile --pytorch=autograd-shapes-nvtx`
enables, describes an op in the range's text: `aten::mm, seq = 5, op_id = 7, sizes = [[2, 3], [3, 4]],
input_op_ids = [(1,0), (2,0)]`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from profharness.errors import TraceFormatError
from profharness.recording.profilers import require_tool
from profharness.recording.profilers.nsys import export_report
from profharness.rows import NSYS
from profharness.trace import NONE, LaunchConfig, Trace
from profharness.traces import attribution
from profharness.traces.columns import (
    Block,
    EvaluationRows,
    Flags,
    GpuRows,
    Ids,
    Ints,
    LaunchRows,
    Spool,
    Tables,
    distinct,
    hashed,
)
from profharness.traces.demangle import canonical_names
from profharness.traces.devices import MAX_NS, whole
from profharness.traces.nsys_export import (
    GRAPHS,
    KERNEL,
    MEMCPY,
    NAMES,
    NVTX,
    RUNTIME,
    STRINGS,
    VARIANTS,
    Export,
    absent_tables,
    check_schema,
    devices,
    diagnostics,
    environment,
    memcpy_name,
    memset_name,
    opened,
    start_time,
)
from profharness.traces.ops import (
    EVALUATION,
    NO_ARGUMENTS,
    Flow,
    HostSpan,
    OpArguments,
    has_arguments,
    is_detailed,
)

REPORT_SUFFIX = ".nsys-rep"
NO_CONFIG = LaunchConfig(None, None)
NO_NAME = "unknown"
NUMBERS = (
    "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId", "bytes",
)  # fmt: skip
MAX_PROCESSES = 4096
OWN_DOMAIN = "profharness"
# The types of push/pop ranges, of start/end ranges, and of the same ranges from nvtxt files.
RANGES = "eventType IN (59, 60, 70, 71)"
START_END = (60, 71)
DOMAINS = "eventType = 75"
MAX_RANGE_NAME = 4096
# Patterns for the names of the API calls that start most activities. An export can contain ten times
# as many other calls, so those are read only if the call of some activity has not been found.
LAUNCHING = ("cu%Launch%", "cu%Memcpy%", "cu%Memset%")
KERNEL_LAUNCHES = ("cu%Launch%Kernel%",)  # API calls that start exactly one kernel
# After such a call, launches do not start kernels. They are added to a CUDA graph instead.
CAPTURES = ("cu%StreamBeginCapture%",)
MAX_DURATION_NS = 1 << 53  # this is 104 days
MAX_SMALL = 1 << 62  # devices, streams, nodes and bytes in the store must be less than this

_API_VERSION = re.compile(r"_v\d{4,6}$")


def parse_nsys(path: Path) -> Trace:
    """Parse an SQLite export of nsys, or a .nsys-rep. The caller must close the returned Trace.

    A .nsys-rep is exported to a temporary file first.

    nsys counts times from the start of the capture. If the export records that start in
    TARGET_INFO_SESSION_START_TIME.utcEpochNs, the times of the Trace count from 1970. If the file
    contains no launches, the Trace is empty and its warnings contain nsys's own messages. If the API
    call of a launch is not in the file, launch_ns, range and cell_range of the launch are NONE.

    Raise TraceFormatError if the file is not an export, or is damaged or incomplete. Also raise the
    errors of `export_report`.
    """
    path = Path(path)
    if not path.name.lower().endswith(REPORT_SUFFIX):
        return _parse(path, path)
    if not path.is_file():
        raise TraceFormatError(path, "no such file", expected="a report of nsys")
    with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
        output = Path(folder) / "report.sqlite"
        export_report(path, output, require_tool(NSYS).path)
        return _parse(output, path)


def _parse(path: Path, shown: Path) -> Trace:
    with ExitStack() as stack:
        spool = Spool.temporary(stack)
        with opened(path, shown) as export:
            warnings = check_schema(export)
            reader = Reader(export, spool)
            reader.read()
            kernels = _Kernels(export, reader.variants)
            versions = environment(export)
            gpus, doubt = devices(export)
            base, unknown_start = start_time(export)
            warnings += [*doubt, *unknown_start, *kernels.warnings, *_notes(export, reader)]
        source = attribution.Source(reader.tables, spool)
        threads, apis = list(source.tables.threads), list(source.tables.apis)
        ranges, calls, steps = attribution.contexts(source.tables, reader.flows, threads, base)
        output = attribution.Output(ranges, base, Spool.temporary(stack), calls)
        op_paths, doubts = _join(source, reader.doubles(), kernels, output)
        return Trace(
            profiler=NSYS,
            devices=gpus,
            environment=versions,
            kernels=kernels.names,
            kernel_kinds=kernels.kinds,
            launch_configs=kernels.configs,
            op_paths=op_paths,
            apis=[apis[row] for row in output.apis.order],
            ranges=ranges.rows,
            num_launches=output.rows,
            skipped=source.tables.skipped,
            batches=output.batches(),
            close=stack.pop_all().close,
            warnings=(*warnings, *doubts, *calls.warnings),
            calls=calls.calls,
            call_spans=calls.spans,
            steps=steps,
        )


def _join(
    source: attribution.Source,
    doubles: Doubles | None,
    kernels: _Kernels,
    output: attribution.Output,
) -> tuple[list[str], list[str]]:
    """Write the launches with their API calls to `output`. Exact copies of a launch are left out.

    Return the op stacks, and warnings about missing data.
    """
    lost = nameless = 0
    stacks, path_ids = attribution.Stacks(source), attribution.Renumber()
    for chunk in attribution.linked_chunks(source):
        if doubles is not None:
            keep = doubles.fresh(hashed(chunk.gpu))
            gpu = GpuRows(*(column[keep] for column in chunk.gpu))
            chunk = attribution.LinkedLaunches(
                gpu, chunk.api[keep], chunk.thread[keep], chunk.launch[keep]
            )
        lost += int((chunk.api < 0).sum())
        rows, key = chunk.gpu, chunk.gpu.correlation
        chunk.gpu = rows._replace(correlation=np.where(key >= 0, key % CORRELATIONS, NONE))
        kernel, config = kernels.kernel_of[rows.kernel], kernels.config_of[rows.kernel]
        nameless += int((kernel == kernels.nameless).sum())
        paths = path_ids(stacks.lookup(chunk.thread, chunk.launch))
        output.write(chunk, kernel, config, paths)
    of, copies = f"of {output.rows} launches", doubles.count if doubles else 0
    counted = {
        f"{lost} {of} have no API call in the file and so belong to no range": lost,
        f"{nameless} {of} have no name in {STRINGS}": nameless,
        f"{copies} launches are exact copies of others and are left out": copies,
        f"stacks of more than {attribution.MAX_DEPTH} ops are told without their middle": stacks.paths.deep,
    }
    folded = stacks.folded()
    texts = [text for text, count in counted.items() if count]
    return [folded[row] for row in path_ids.order], texts


def _notes(export: Export, reader: Reader) -> list[str]:
    notes = [text.replace("{n}", str(count)) for text, count in reader.doubts.items()]
    if reader.tables.gpu:
        notes += absent_tables(export)
    else:
        notes.append("the export holds no kernel, memcpy or memset")
    graphs = sum(1 for _ in export.rows(GRAPHS, ("start",)))
    if graphs:
        notes.append(
            f"{graphs} launches of CUDA graphs were recorded whole, without their kernels; "
            "capture with --cuda-graph-trace=node to see them"
        )
    return notes + diagnostics(export)


class _Kernels:
    """The names, kinds and launch configurations of the kernels in the Trace.

    `kernel_of` and `config_of` map the index of a variant to the index of its name and of its launch
    configuration. `Reader` explains variants.
    """

    def __init__(self, export: Export, variants: Iterable[tuple[str, tuple[Any, ...]]]) -> None:
        names, configs = Ids(), Ids()
        string = cache(export.text)
        # The first of mangledName, demangledName and shortName whose text is in the export
        texts = {}
        for table, values in variants:
            if table == KERNEL:
                ids = values[: len(NAMES)]
                filled = filter(None, (string(number) for number in ids if number is not None))
                texts[ids] = next(filled, NO_NAME)
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
        self.nameless = names.get(("kernel", NO_NAME), NONE)
        self.names = [name for _, name in names]
        self.kinds = [kind for kind, _ in names]
        self.configs = list(configs)
        self.kernel_of = np.array(kernel_of, np.int64)
        self.config_of = np.array(config_of, np.int64)


def _config(values: tuple[Any, ...]) -> LaunchConfig:
    """Return the launch configuration that a row of CONFIG columns contains.

    Missing and impossible values become None.
    """
    gx, gy, gz, bx, by, bz, registers, static, dynamic = map(whole, values)
    grid = None if gx is None or gy is None or gz is None else (gx, gy, gz)
    block = None if bx is None or by is None or bz is None else (bx, by, bz)
    shared = None if static is None or dynamic is None else static + dynamic
    return LaunchConfig(grid, block, registers, static, dynamic, shared)


class Reader:
    """Reads one export into `tables` and `spool`.

    A variant is a distinct combination of the values that describe an activity. For a kernel, these
    are its names and its launch configuration. For a memcpy or memset, these are the kinds of
    memory. The column `kernel` of GpuRows contains an index into `variants`, and the column `config`
    is always 0. The column `correlation` of GpuRows and LaunchRows contains a key, which
    PROCESS_SHIFT explains. The rows are sorted by key.
    """

    def __init__(self, export: Export, spool: Spool) -> None:
        self.tables = Tables()
        self.variants = Ids()
        self.flows = np.empty((0, 4), np.int64)  # rows of Flow
        self.doubts: Counter[str] = Counter()  # counts by warning; {n} in a warning is its count
        self._export = export
        self._spool = spool
        self._processes = Ids()
        self._needed = NeededCalls()
        self._unjoined = 0  # number of activities that have no key
        self._nameless: set[int] = set()  # ids of names that are not in StringIds
        self._string = cache(export.text)

    def read(self) -> None:
        """Read all tables. Each step needs the results of the steps before it."""
        shared = 0
        for table in VARIANTS:
            if self._export.has(table, "start", "end"):
                shared += self._read_activities(table)
        if self._export.has(RUNTIME, "start", "globalTid", "correlationId"):
            self._read_needed_calls()
        self._read_ranges()
        self._doubt("{n} launches share the id of their API call with an earlier one", shared)
        text = f"{{n}} calls in {RUNTIME} have the id of an earlier one, which counts"
        self._doubt(text, self._needed.repeated)
        for blocks in (self.tables.gpu, self.tables.launches):
            blocks.sort(key=lambda block: block.low)

    def doubles(self) -> Doubles | None:
        """Return an object that finds repeated activities.

        Return None if no activity can be repeated.
        """
        if not (self._needed.shared or self._needed.all or self._unjoined):
            return None
        blocks = (self._spool.read(block) for block in self.tables.gpu)
        return Doubles([hashed(list(block)) for block in blocks])

    def _doubt(self, text: str, count: int) -> None:
        if count:
            self.doubts[text] += count

    def _skip(self, table: str, count: int) -> None:
        self.tables.skipped += count
        self._doubt(f"{{n}} rows of {table} could not be read and were skipped", count)

    def _read_needed_calls(self) -> None:
        """Read the API calls that started the activities.

        If it is unknown which calls these are, read all calls.
        """
        ids = self._export.strings_like(LAUNCHING)
        if self._needed.all or not ids or not self._export.has(RUNTIME, "nameId"):
            self._read_calls("")
            return
        listed = ", ".join(map(str, ids))
        self._read_calls(f"nameId IN ({listed})")
        if self._needed.waiting():
            self._read_calls(f"nameId IS NULL OR nameId NOT IN ({listed})")

    def _read_calls(self, where: str) -> None:
        columns = ("correlationId", "nameId", "globalTid", "start")
        kernel = self._kernel_launches()
        for batch in self._export.batches(RUNTIME, columns, where, filled=4):
            (correlation, name, thread, start), rows = self._numbers(RUNTIME, batch, 4)
            key = self._keys(correlation, thread)
            keep = (key >= 0) & (thread != -1) & _near(start)
            self._skip(RUNTIME, len(rows) - int(keep.sum()))
            needed, idle = self._needed.take(key[keep])
            lone = int((idle & np.isin(name[keep], kernel)).sum())
            self._doubt("{n} launches of a kernel have no kernel in the export", lone)
            keep[keep] = needed
            key, name, thread = key[keep], name[keep], thread[keep]
            api, thread = _mapped(name, self._api), _mapped(thread, self._thread)
            self._write(self.tables.launches, LaunchRows(key, api, thread, start[keep]), key)

    def _kernel_launches(self) -> list[int]:
        """Return the ids of the names of API calls that must have started a kernel.

        Return [] if a CUDA graph was captured, because then such a call may not start a kernel.
        """
        if self._export.strings_like(CAPTURES) or self._export.columns(GRAPHS) is not None:
            return []
        return self._export.strings_like(KERNEL_LAUNCHES)

    def _read_activities(self, table: str) -> int:
        """Read the activities in a table.

        Return the number of activities that have the same API call as an earlier activity. Activities
        of CUDA graphs do not count.
        """
        width, variants = len(NUMBERS), self.variants
        columns = (*NUMBERS, *VARIANTS[table])
        shared = 0
        for batch in self._export.batches(table, columns, filled=width):
            rows, batch = self._numbers(table, batch, width)
            start, end, device, stream, correlation, process, node, size = rows
            variant = variants.column([(table, row[width:]) for row in batch])
            keep = _near(start) & _near(end) & (end >= start)
            keep &= (end - start < MAX_DURATION_NS) & (device >= NONE) & (device < MAX_SMALL)
            self._skip(table, int((~keep).sum()))
            early = int((start[keep] < 0).sum())
            self._doubt(f"{{n}} rows of {table} begin before the capture did", early)
            key = self._keys(correlation, process)
            single = keep & (node <= 0)
            shared += self._needed.note(key[single])
            self._needed.note(key[keep & ~single])
            self._unjoined += int((key[keep] < 0).sum())
            stream, node, size = (_small(column) for column in (stream, node, size))
            node, zero = np.where(node > 0, node, NONE), np.zeros_like(start)
            gpu = GpuRows(start, end - start, variant, zero, device, stream, key, node, size)
            self._write(self.tables.gpu, (column[keep] for column in gpu), key[keep])
        return shared

    def _read_ranges(self) -> None:
        if not self._export.has(NVTX, "start", "eventType", "globalTid"):
            return
        domains, ops = self._domains(), OpRanges(self.tables, self._spool)
        end_of_trace: int | None = None
        columns = ("start", "end", "globalTid", "eventType", "domainId", "textId", "text")
        names: dict[str, str] = {}  # names of ranges that are not ops
        seen: set[int] = set()
        for row in self._export.rows(NVTX, columns, RANGES):
            start, end, thread, kind, domain, string, text = row
            if not (_time(start) and (end is None or _time(end)) and isinstance(thread, int)):
                self._skip(NVTX, 1)
                continue
            if end is None and end_of_trace is None:
                end_of_trace = self._end_of_trace()
            stop = max(end_of_trace or 0, start) if end is None else end
            if stop < start:
                self._skip(NVTX, 1)
                continue
            message = (text if string is None else self._string(string)) or ""
            self._doubt("{n} ranges have no name in the export", not message)
            prefix, wide = domains.get((thread >> 24, domain), ""), kind in START_END
            name = f"{prefix}{message}"
            if (key := hash((name, start, stop, thread, wide))) in seen:
                self._doubt("{n} ranges are exact copies of others and are left out", 1)
                continue
            seen.add(key)
            number = self._thread(thread)
            if name not in names and not (prefix or wide):
                op_name = ops.collect(name, start, stop, number)
                if op_name is None:
                    continue
                name = op_name
            name = name[:MAX_RANGE_NAME]
            name = names.setdefault(name, name)
            self.tables.ranges.add(name, start, stop - start, number, wide)
        ops.finish()
        self.flows, unclear = ops.flows()
        self._doubt("{n} ops have sizes that could not be read", ops.unread)
        text = (
            "{n} backward ops have a sequence number of several threads; their forward is unknown"
        )
        self._doubt(text, unclear)

    def _end_of_trace(self) -> int:
        """Return the latest end in any table, in ns since the start of the capture."""
        tables = (*VARIANTS, RUNTIME, NVTX)
        return max(min(self._export.largest(table, "end") or 0, MAX_NS - 1) for table in tables)

    def _domains(self) -> dict[tuple[int, Any], str]:
        """Return the prefixes that the names of ranges get, by process and domain id.

        Ranges of the default domain and of the domain `profharness` get no prefix.
        """
        prefixes: dict[tuple[int, Any], str] = {}
        columns = ("globalTid", "domainId", "textId", "text")
        for thread, domain, string, text in self._export.rows(NVTX, columns, DOMAINS):
            name = text if string is None else self._string(string)
            if isinstance(thread, int) and domain and name and name != OWN_DOMAIN:
                prefixes[(thread >> 24, domain)] = f"{name}:"
        return prefixes

    def _numbers(
        self, table: str, batch: list[tuple[Any, ...]], width: int
    ) -> tuple[Ints, list[tuple[Any, ...]]]:
        """Return the first `width` columns as an array, and the rows that are in the array.

        Rows that have a value other than an integer in these columns are skipped and counted.
        """
        try:
            return _array(batch, width), batch
        except (TypeError, ValueError, OverflowError):
            good = [row for row in batch if all(isinstance(v, int) for v in row[:width])]
            self._skip(table, len(batch) - len(good))
            return _array(good, width), good

    def _keys(self, correlation: Ints, thread_or_process: Ints) -> Ints:
        """Return keys, which are correlation ids made unique across processes.

        A key is -1 if the correlation id or the process is invalid.
        """
        process = _mapped(thread_or_process >> 24, self._process)
        valid = (correlation >= 0) & (correlation < CORRELATIONS) & (process >= 0)
        return np.where(valid, process * CORRELATIONS + correlation, -1)

    def _process(self, number: int) -> int:
        if number == -1:  # unknown, unless only one process made API calls
            calls = self._export.distinct_processes(RUNTIME)
            if len(calls) != 1:
                return -1
            number = calls[0]
        process = self._processes[number]
        return process if process < MAX_PROCESSES else -1

    def _thread(self, number: int) -> int:
        return self.tables.threads[(number >> 24) & 0xFFFFFF, number & 0xFFFFFF]

    def _api(self, string: int) -> int:
        name = self._string(string)
        if name is None and string not in self._nameless:
            self._nameless.add(string)
            self._doubt(f"{{n}} names of API calls are not in {STRINGS}", 1)
        return self.tables.apis[_API_VERSION.sub("", name or NO_NAME)]

    def _write(self, blocks: list[Block], rows: Iterable[Ints], key: Ints) -> None:
        """Sort rows by key, and write one block for each process."""
        if not len(key):
            return
        columns = list(rows)
        order = np.argsort(key, kind="stable")
        key = key[order]
        borders = np.flatnonzero(np.diff(key >> PROCESS_SHIFT)) + 1
        for part in np.split(np.arange(len(key)), borders):
            offset = self._spool.write([column[order[part]] for column in columns])
            span = int(key[part[0]]), int(key[part[-1]])
            blocks.append(Block(offset, len(columns), len(part), *span))


def _array(batch: list[tuple[Any, ...]], width: int) -> Ints:
    flat = chain.from_iterable(row[:width] for row in batch)
    values: NDArray[np.int64] = np.fromiter(flat, np.int64, width * len(batch))
    return np.ascontiguousarray(values.reshape(len(batch), width).T)


def _mapped(values: Ints, number: Any) -> Ints:
    """Return the result of calling `number` for each value.

    `number` is called only once for each distinct value.
    """
    each, inverse = np.unique(values, return_inverse=True)
    return np.array([number(value) for value in each.tolist()], np.int64)[inverse]


def _near(times: Ints) -> Flags:
    """Return for each time whether its absolute value is less than MAX_NS."""
    # abs() would return a negative number for the lowest int64
    near: Flags = (times > -MAX_NS) & (times < MAX_NS)
    return near


def _small(values: Ints) -> Ints:
    """Replace the numbers that the store cannot contain by NONE."""
    small: Ints = np.where((values >= 0) & (values < MAX_SMALL), values, NONE)
    return small


def _time(value: object) -> bool:
    return isinstance(value, int) and abs(value) < MAX_NS


# Each process counts its correlation ids separately. A key is process << PROCESS_SHIFT | correlation.
PROCESS_SHIFT = 40
CORRELATIONS = 1 << PROCESS_SHIFT
MAX_NEEDED = 1 << 25  # maximum size of the flags in NeededCalls, in bytes; a byte contains 8 flags

Bits = NDArray[np.uint8]


class NeededCalls:
    """Determines which API calls are needed because they started an activity.

    An API call and the activities that it started have the same key. First call `note` for all
    activities, then call `take` for the API calls.

    `shared` counts the activities that have the key of an earlier activity. `repeated` counts the API
    calls that have the key of an earlier call, if an activity has that key, too. If the ids are too
    large for the flags, `all` becomes true, every call counts as needed, and both counts are lower
    bounds.
    """

    def __init__(self) -> None:
        self.all = False
        self.shared = self.repeated = 0
        self._waiting: dict[int, Bits] = {}
        self._taken: dict[int, Bits] = {}

    def note(self, key: Ints) -> int:
        """Note the keys of activities. A key of -1 means that the activity has no key.

        Return the number of activities that have the key of an earlier activity.
        """
        if self.all:
            return 0
        shared = 0
        for process in distinct(key[key >= 0] >> PROCESS_SHIFT):
            ids = key[key >> PROCESS_SHIFT == process] % CORRELATIONS
            flags = self._waiting.get(process, np.zeros(0, np.uint8))
            more = int(ids.max() >> 3) + 1 - len(flags)
            if more + sum(map(len, self._waiting.values())) > MAX_NEEDED:
                self.all = True
                return shared
            if more > 0:
                flags = np.append(flags, np.zeros(more + len(flags) // 2, np.uint8))
                self._waiting[process] = flags
            fresh = np.unique(ids)
            fresh = fresh[(flags[fresh >> 3] & _bit(fresh)) == 0]
            np.bitwise_or.at(flags, fresh >> 3, _bit(fresh))
            shared += len(ids) - len(fresh)
        self.shared += shared
        return shared

    def take(self, key: Ints) -> tuple[Flags, Flags]:
        """Return for each API call whether it is needed, and whether no activity has its key.

        A call is needed if an activity has its key and that key was in no earlier `take`. `key` must
        not contain -1. Afterwards, the calls count as found.
        """
        if self.all:
            return np.ones(len(key), np.bool_), np.zeros(len(key), np.bool_)
        needed, idle = np.zeros(len(key), np.bool_), np.ones(len(key), np.bool_)
        process, ids = key >> PROCESS_SHIFT, key % CORRELATIONS
        for number in distinct(process):
            flags = self._waiting.get(number, np.zeros(0, np.uint8))
            taken = self._taken.setdefault(number, np.zeros_like(flags))
            rows = np.flatnonzero((process == number) & (ids >> 3 < len(flags)))
            byte, bit = ids[rows] >> 3, _bit(ids[rows])
            waited, again = (flags[byte] & bit) > 0, (taken[byte] & bit) > 0
            needed[rows], idle[rows] = waited, ~(waited | again)
            count = int(waited.sum())
            first = len(np.unique(ids[rows[waited]])) if count else 0
            self.repeated += int(again.sum()) + count - first
            np.bitwise_or.at(taken, byte[waited], bit[waited])
            np.bitwise_and.at(flags, byte, ~bit)
        return needed, idle

    def waiting(self) -> bool:
        """Return whether there is an activity whose API call has not been found."""
        return any(flags.any() for flags in self._waiting.values())


def _bit(ids: Ints) -> Bits:
    """Return the bit of each id within its byte."""
    bit: Bits = np.left_shift(1, ids & 7).astype(np.uint8)
    return bit


class Doubles:
    """Finds rows that are exact copies of earlier rows, by comparing 64-bit hashes of the rows."""

    def __init__(self, hashes: list[Ints]) -> None:
        """Find the hashes that occur more than once. `hashes` contains the hashes of all rows."""
        ordered = np.sort(np.concatenate(hashes)) if hashes else np.zeros(0, np.int64)
        self._doubled = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
        self._seen: set[int] = set()
        self.count = 0

    def fresh(self, hashes: Ints) -> Flags:
        """Return for each row whether no earlier row has the same hash."""
        keep = np.ones(len(hashes), np.bool_)
        for row in np.flatnonzero(np.isin(hashes, self._doubled)).tolist():
            value = int(hashes[row])
            keep[row] = value not in self._seen
            self._seen.add(value)
        self.count += int((~keep).sum())
        return keep


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


class OpText(NamedTuple):
    """The parts of the text of a range that PyTorch opened.

    `is_op` is false if the range comes from a `record_function` of the user.
    """

    name: str
    sequence: int
    sizes: str | None
    is_op: bool


def read_text(text: str) -> OpText | None:
    """Parse the text of a range that PyTorch opened. Return None for the text of any other range.

    The text of every op contains a number (`op_id`). The text of a `record_function` also contains
    such a number, but neither a sequence number nor the size of a tensor.
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
    return OpText(name, int(sequence or -1), sizes, is_op)


@lru_cache(maxsize=4096)
def op_arguments(text: str) -> OpArguments | None:
    """Parse shapes such as `[[2, 3], []]`. Return None if the text is not a list of lists."""
    try:
        shapes = json.loads(text.removesuffix(", "))
        return OpArguments(tuple(map(tuple, shapes)))
    except (ValueError, TypeError, RecursionError):
        return None


class OpRanges:
    """Collects the ranges that are ops, and adds them to the tables and the spool.

    `unread` counts the ops whose sizes could not be read.
    """

    def __init__(self, tables: Tables, spool: Spool) -> None:
        self.unread = 0
        self._tables = tables
        self._spool = spool
        self._any = False
        # The whole texts of the ranges before the first op, by number
        self._renamed: dict[int, str] = {}
        self._pending: list[tuple[int, int, int, int]] = []
        self._evaluations = array("q")  # the values of EvaluationRows, one row after another
        # Thread, start, sequence number and name of each op that has a sequence number
        self._numbered = array("q")

    def collect(self, text: str, start: int, stop: int, thread: int) -> str | None:
        """Collect a range if it is an op, and return None. Otherwise, return the name of the range.

        Times are in ns.
        """
        op = read_text(text)
        if op is None:
            return text
        if op.name.startswith(EVALUATION):
            self._evaluations.extend((start, stop, thread, op.sequence))
        elif is_detailed(op.name):
            self._detail(op, start, stop, thread)
        if not op.is_op:
            if not self._any:
                self._renamed[len(self._tables.ranges.names)] = text
            return op.name
        self._any = True
        name = self._tables.names[op.name]
        if op.sequence >= 0:
            self._numbered.extend((thread, start, op.sequence, name))
        self._pending.append((start, stop, thread, name))
        if len(self._pending) == BLOCK_ROWS:
            self._flush()
        return None

    def finish(self) -> None:
        """Write the pending ops.

        If no op was found, the ranges do not come from PyTorch, so they get their whole texts back
        as names.
        """
        self._flush()
        if not self._any:
            self._tables.details.clear()
            self._evaluations = array("q")
            for number, text in self._renamed.items():
                self._tables.ranges.names[number] = text
        rows = np.array(self._evaluations, np.int64).reshape(-1, len(EvaluationRows._fields))
        self._tables.evaluations.append(rows.T)
        self._renamed.clear()

    def _detail(self, op: OpText, start: int, stop: int, thread: int) -> None:
        wanted = op.sizes and has_arguments(op.name)
        arguments = op_arguments(op.sizes) if wanted else NO_ARGUMENTS
        self.unread += arguments is None
        detail = HostSpan(op.name, start, stop, thread, arguments or NO_ARGUMENTS, op.sequence)
        self._tables.details.append(detail)

    def _flush(self) -> None:
        if not self._pending:
            return
        columns = np.array(self._pending, np.int64).T
        low, high = int(columns[0].min()), int(columns[1].max())
        offset = self._spool.write(columns)
        self._tables.ops.append(Block(offset, len(columns), len(self._pending), low, high))
        self._pending.clear()

    def flows(self) -> tuple[Ints, int]:
        """Match forward ops with backward ops by their sequence numbers.

        Return a row of Flow for each pair, sorted by start, and the number of backward ops whose
        forward op is unknown because several threads used the sequence number.

        Autograd numbers the backward ops that each thread prepares. The forward op is the op that
        started last among those with the same number.
        """
        rows = np.array(self._numbered, np.int64).reshape(-1, 4).T
        ids = self._tables.names
        names = list(ids)
        nodes = [number for name, number in ids.items() if EVALUATION + name in ids]
        is_node = np.isin(rows[3], nodes)
        processes = np.array([pid for pid, _ in self._tables.threads], np.int64)
        key = _keys(processes[rows[0]], rows[2])
        forward = np.flatnonzero(~is_node)
        thread, start = rows[0, forward], rows[1, forward]
        forward = forward[np.lexsort((start, thread, key[forward]))]
        changes = np.diff(key[forward], append=-1) | np.diff(rows[0, forward], append=-1)
        last = forward[changes != 0]
        backward = np.flatnonzero(is_node)
        low, high = (np.searchsorted(key[last], key[backward], side) for side in ("left", "right"))
        matched, unclear = [], 0
        columns = (backward.tolist(), low.tolist(), high.tolist())
        for node, begin, end in zip(*columns, strict=True):
            ops = last[begin:end].tolist()
            if len(ops) > 1:
                wanted = _stem(names[rows[3, node]])
                ops = [op for op in ops if _stem(names[rows[3, op]]) == wanted]
                unclear += len(ops) != 1
            if len(ops) == 1 and rows[1, ops[0]] < rows[1, node]:
                matched.append(Flow(*rows[:2, ops[0]].tolist(), *rows[:2, node].tolist()))
        matched.sort(key=lambda flow: flow.start)
        return np.array(matched, np.int64).reshape(-1, 4), unclear


def _keys(process: Ints, sequence: Ints) -> Ints:
    """Return a number for each pair of process and sequence. Equal pairs get equal numbers."""
    sequences, number = np.unique(sequence, return_inverse=True)
    keys: Ints = np.unique(process, return_inverse=True)[1] * len(sequences) + number
    return keys


def _stem(name: str) -> str:
    """Return the part of a name that a forward op and its autograd node have in common.

    For example, this is `mm` for both `aten::mm` and `MmBackward0`.
    """
    return NODE.sub("", name.rpartition("::")[2]).replace("_", "").lower()
