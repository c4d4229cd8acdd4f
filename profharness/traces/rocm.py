"""Build a Trace from the rows that the readers of AMD's profilers find.

All of AMD's profilers record the same things: dispatches of kernels, copies, API calls and roctx
ranges. They record the size of a grid in threads, which this module converts to blocks.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from profharness.devices import CU_LIMITS, Device, find_instinct
from profharness.errors import TraceFormatError, with_count
from profharness.trace import NONE, HardwareMetrics, LaunchConfig, Trace
from profharness.traces.attribution import Attribution, Chunk, linked_chunks
from profharness.traces.columns import (
    UNNAMED_GPU,
    Flags,
    GpuRows,
    Ids,
    Ints,
    LaunchRows,
    Spool,
    Tables,
    blocks_of,
    int_columns,
    is_near,
    make_device,
    map_values,
    nothing,
    whole,
)
from profharness.traces.demangle import canonical_names
from profharness.traces.graphs import replayed
from profharness.traces.ncu_csv import check_shape
from profharness.traces.nsys import MAX_RANGE_NAME, OpRanges

Row = Sequence[Any]
Triple = tuple[int, int, int]

NO_NAME = "unknown"
KERNELS_OF_V1 = "KERN"  # the table of rocprof v1
# The first values of the row of an activity. Times are in ns. An unknown value is -1.
ACTIVITY = ("start", "end", "device", "stream", "call", "process", "bytes")
# Each process counts its calls separately, so calls and activities are matched by a key, which is
# process << PROCESS_SHIFT | id of the call.
PROCESS_SHIFT = 40
CALLS = 1 << PROCESS_SHIFT
MAX_PROCESSES = 4096
MAX_SMALL = 1 << 62  # the store accepts only devices, streams and sizes below this
MAX_DURATION_NS = 1 << 53
MAX_COUNTERS = 4096
ENDS = {"HOST": "Host", "DEVICE": "Device"}
_DIRECTION = re.compile(r"(?:.*[_ ])?(HOST|DEVICE)_?TO_?(HOST|DEVICE)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The properties of a kernel and of its dispatch. A value is None if it is unknown."""

    name: str | None
    threads: Triple | None = None  # size of the grid in threads
    block: Triple | None = None
    registers: int | None = None
    accum_registers: int | None = None
    scalar_registers: int | None = None
    shared_bytes: int | None = None
    static_shared_bytes: int | None = None
    scratch_bytes: int | None = None
    blocks: Triple | None = None  # size of the grid in blocks, if the file has no threads
    dynamic_shared_bytes: int | None = None  # if the file has neither the static size nor the sum

    @property
    def config(self) -> LaunchConfig:
        static, shared = self.static_shared_bytes, self.shared_bytes
        known = static is not None and shared is not None
        dynamic = shared - static if known else self.dynamic_shared_bytes  # type: ignore[operator]
        return LaunchConfig(
            grid=self.blocks or blocks_of(self.threads, self.block),
            block=self.block,
            registers_per_thread=self.registers,
            static_shared_bytes=static,
            dynamic_shared_bytes=None if dynamic is None or dynamic < 0 else dynamic,
            shared_bytes=shared,
            accum_registers_per_thread=self.accum_registers,
            scalar_registers=self.scalar_registers,
            scratch_bytes_per_thread=self.scratch_bytes,
        )


def triple(x: object, y: object, z: object) -> Triple | None:
    """Return three sizes, or None if one of them is unknown."""
    a, b, c = whole(x), whole(y), whole(z)
    return None if a is None or b is None or c is None else (a, b, c)


def plain_name(text: object) -> str | None:
    """Return the name of a kernel without the quotes and the suffixes of a code object."""
    name = text.strip('" ') if isinstance(text, str) else ""
    return name.removesuffix(" [clone .kd]").removesuffix(".kd") or None


def copy_name(direction: str | None) -> str:
    """Return Kineto's name for the direction of a copy, such as `Memcpy HtoD (Host -> Device)`.

    AMD's profilers write `MEMORY_COPY_HOST_TO_DEVICE`, `HOST_TO_DEVICE` or `CopyHostToDevice`.
    """
    match = _DIRECTION.fullmatch((direction or "").removeprefix("Copy"))
    if match is None:
        return "Memcpy <unknown> (Unknown -> Unknown)"
    source, target = (ENDS[end.upper()] for end in match.groups())
    return f"Memcpy {source[0]}to{target[0]} ({source} -> {target})"


def gpu(
    index: object, names: Sequence[object], limits: dict[str, object], target: object = None
) -> tuple[Device | None, list[str]]:
    """Return a Device and warnings. The name is the first of `names` that is not empty.

    `target` is the version of the instruction set as a number, such as 90402 for gfx942. If the
    name does not contain the architecture, as in `AMD Radeon Graphics`, the architecture is
    appended.
    """
    number = whole(target)
    major, minor = (None, None) if number is None else (number // 10000, number // 100 % 100)
    limits |= {"compute_major": major, "compute_minor": minor}
    name = next((each for each in names if isinstance(each, str) and each.strip()), UNNAMED_GPU)
    gfx = "" if number is None else f"gfx{major}{minor}{number % 100:x}"
    if gfx in CU_LIMITS and find_instinct(name) is None and gfx not in name:
        name = f"{name} ({gfx})"
    return make_device(index, name, limits)


def limits_of(facts: dict[str, Any]) -> dict[str, object]:
    """Return the limits of a GPU from the properties that rocprofiler-sdk records for an agent."""
    wave, waves, lds = (
        whole(facts.get(key)) for key in ("wave_front_size", "max_waves_per_cu", "lds_size_in_kb")
    )
    banks = facts.get("mem_banks")
    sizes = [
        whole(bank.get("size_in_bytes")) or 0
        for bank in (banks if isinstance(banks, list) else [])
        if isinstance(bank, dict)
    ]
    return {
        "num_sms": facts.get("cu_count"),
        "total_memory_bytes": sum(sizes) or None,
        "max_threads_per_block": facts.get("workgroup_max_size"),
        "max_threads_per_sm": wave * waves if wave and waves else None,
        "shared_bytes_per_block": lds * 1024 if lds else None,
        "warp_size": wave,
    }


class Recording:
    """Collects the rows of one file.

    Add all activities before the API calls, because a file can contain ten times as many calls as
    activities, and only calls that started an activity are kept.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self.tables = Tables(Spool(stack))
        self.count = 0  # number of activities
        self._variants = Ids()
        self._processes = Ids()
        self._keys = array("q")
        self._needed: Ints | None = None
        self._doubts: Counter[str] = Counter()  # how often each warning occurred; replaces {n}
        self._ops = OpRanges(self.tables)

    def doubt(self, text: str, count: int = 1) -> None:
        """Record a warning. `{n}` in the text is replaced by the sum of the counts."""
        if count:
            self._doubts[text] += count

    def skip(self, what: str, count: int) -> None:
        """Count rows that cannot be read."""
        self.tables.skipped += count
        self.doubt(f"{{n}} [row|rows] of {what} could not be read and [was|were] skipped", count)

    def add_activities(self, rows: Sequence[Row], what: str) -> Flags:
        """Add activities. Return which of the rows could be read.

        A row contains the values in ACTIVITY and then a variant: any values that `make_trace` can
        turn into a name and a launch configuration.
        """
        width = len(ACTIVITY)
        good, numbers = self._numbers(rows, width)
        start, end, device, stream, call, process, size = numbers
        keep = is_near(start) & is_near(end) & (end >= start) & (end - start < MAX_DURATION_NS)
        keep &= (device >= NONE) & (device < MAX_SMALL)
        picked = [row for row, is_good in zip(rows, good.tolist(), strict=True) if is_good]
        variant = self._variants.column([tuple(row[width:]) for row in picked])
        key = self._to_keys(call, process)
        stream, size = (
            np.where((column >= 0) & (column < MAX_SMALL), column, NONE)
            for column in (stream, size)
        )
        none = nothing(len(start))
        gpu_rows = GpuRows(
            start, end - start, variant, np.zeros_like(none), device, stream, key, none, size
        )
        self.tables.write(GpuRows(*(column[keep] for column in gpu_rows)))
        self._keys.frombytes(key[keep & (key >= 0)].tobytes())
        self.count += int(keep.sum())
        kept = good.copy()
        kept[good] = keep
        self.skip(what, len(rows) - int(kept.sum()))
        return kept

    def add_calls(self, rows: Sequence[Row], what: str) -> None:
        """Add API calls. A row contains the call, its process, thread, start and name."""
        if self._needed is None:
            ordered = np.sort(np.asarray(self._keys))
            self._needed = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
        good, (call, process, thread, start) = self._numbers(rows, 4)
        self.skip(what, len(rows) - int(good.sum()))
        key = self._to_keys(call, process)
        at = np.searchsorted(self._needed, key)
        hit = (at < len(self._needed)) & (key >= 0) & is_near(start)
        hit[hit] = self._needed[at[hit]] == key[hit]
        kept = np.flatnonzero(good)[hit].tolist()
        apis = self.tables.apis.column([str(rows[row][4] or NO_NAME) for row in kept])
        pairs = list(zip(process[hit].tolist(), thread[hit].tolist(), strict=True))
        threads = self.tables.threads.column(pairs)
        self.tables.write(LaunchRows(key[hit], apis, threads, start[hit]))

    def add_range(
        self, name: str, start: object, end: object, process: int, thread: int, *, wide: bool
    ) -> None:
        """Add a roctx range. A `wide` range applies to all threads of its process.

        A range that PyTorch opened around an op is read as an op.
        """
        times = [value for value in (start, end) if isinstance(value, int)]
        if len(times) < 2 or not all(is_near(np.array(times)).tolist()) or times[1] < times[0]:
            self.skip("ranges", 1)
            return
        first, last = times
        number = self.tables.threads[process, thread]
        text = name if wide else self._ops.collect(name, first, last, number)
        if text is not None:
            self.tables.range_names.append(text[:MAX_RANGE_NAME])
            self.tables.ranges.extend((first, last - first, number, wide))

    def make_trace(
        self,
        stack: ExitStack,
        describe: Callable[[Hashable], tuple[str, Dispatch]],
        *,
        profiler: str,
        devices: Sequence[Device] = (),
        environment: dict[str, object] | None = None,
        metrics: HardwareMetrics | None = None,
        has_calls: bool = True,
        created_s: int | None = None,
    ) -> Trace:
        """Return a Trace of everything that was added.

        `describe` returns the kind and the properties of a variant. `has_calls` is False if files
        of this form never contain API calls.
        """
        flows, unclear = self._ops.finish()
        self.doubt("{n} [op has|ops have] sizes that could not be read", self._ops.unread)
        self.doubt(
            (
                "{n} backward [op has|ops have] a sequence number that several threads use, so their "
                "forward ops are unknown"
            ),
            unclear,
        )
        kernels, configs, variants, intricate = _describe(self._variants, describe)
        threads = list(self.tables.threads)
        at = Attribution(self.tables, flows, threads, 0)
        names = list(kernels)
        at.calls, _ = replayed(
            *(self.tables, at.calls, at.steps, threads, 0),
            kernels=[names[kernel] for kernel in variants[0].tolist()],
        )
        counts = Counter[str]()
        nameless = kernels.get(("kernel", NO_NAME), NONE)

        def chunks() -> Iterator[Chunk]:
            for gpu_rows, launched in linked_chunks(self.tables, counts):
                kernel, config = variants[:, gpu_rows.kernel]
                key = gpu_rows.correlation
                counts["lost"] += int((launched.api < 0).sum())
                counts["nameless"] += int((kernel == nameless).sum())
                correlation = np.where(key >= 0, key % CALLS, NONE)
                described = gpu_rows._replace(kernel=kernel, config=config, correlation=correlation)
                yield described, launched, at.stacks.lookup(launched.thread, launched.start)

        trace = at.make_trace(
            stack,
            chunks(),
            list(kernels),
            list(configs),
            profiler=profiler,
            devices=tuple(devices),
            environment=environment or {},
            metrics=metrics,
            created_s=created_s,
            close=stack.close,
        )
        of = f"of {trace.num_launches:,} launches"
        if has_calls:
            self.doubt(
                f"{{n}} {of} have no API call in the file, so their ranges are unknown",
                counts["lost"],
            )
        self.doubt(f"{{n}} {of} have several API calls; the first one is used", counts["ambiguous"])
        self.doubt(f"{{n}} {of} have no name in the file", counts["nameless"])
        notes = [with_count(text, count) for text, count in self._doubts.items()]
        if not trace.num_launches:
            notes.append("the file contains no kernel dispatches or copies")
        warnings = (*notes, *intricate, *at.calls.warnings)
        return replace(trace, close=stack.pop_all().close, warnings=warnings)

    def _numbers(self, rows: Sequence[Row], width: int) -> tuple[Flags, Ints]:
        """Return which rows begin with `width` integers, and these integers as columns."""
        try:
            return np.ones(len(rows), np.bool_), int_columns(rows, width)
        except (TypeError, ValueError, OverflowError):
            good = np.array([_are_integers(row[:width]) for row in rows], np.bool_)
            picked = [row for row, is_good in zip(rows, good.tolist(), strict=True) if is_good]
            return good, int_columns(picked, width)

    def _to_keys(self, call: Ints, process: Ints) -> Ints:
        """Return a key for each row, or -1 if the call is unknown."""
        number = map_values(process, self._processes.__getitem__) if len(process) else process
        valid = (call >= 0) & (call < CALLS) & (number < MAX_PROCESSES)
        return np.where(valid, number * CALLS + call, NONE)


def _are_integers(values: Row) -> bool:
    limit = 1 << 63
    return all(isinstance(value, int) and -limit <= value < limit for value in values)


def _describe(
    variants: Ids, describe: Callable[[Hashable], tuple[str, Dispatch]]
) -> tuple[Ids, Ids, Ints, list[str]]:
    """Return the kernels as (kind, name), the launch configurations, an array and warnings.

    Column i of the array contains the ids of the kernel and the launch configuration of variant i.
    """
    kernels, configs = Ids(), Ids()
    described = [describe(variant) for variant in variants]
    names = {each.name or NO_NAME for kind, each in described if kind == "kernel"}
    canonical, warnings = canonical_names(sorted(names))
    pairs = []
    for kind, each in described:
        name = each.name or NO_NAME
        key = (kind, canonical[name] if kind == "kernel" else name)
        pairs.append((kernels[key], configs[each.config]))
    return kernels, configs, np.array(pairs, np.int64).reshape(-1, 2).T, warnings


class Counters:
    """Collects the values of hardware counters. A launch is identified by its position."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[tuple[int, str], float] = {}
        self._units: dict[str, str] = {}

    def add(self, launch: int, name: str, value: float, unit: str = "") -> None:
        """Add the value of one instance of a counter. The value of a launch is the sum."""
        if name not in self._units and len(self._units) >= MAX_COUNTERS:
            raise TraceFormatError(
                self._path,
                f"contains more than {MAX_COUNTERS} counters",
                expected="rocprofv3 counters",
            )
        self._units.setdefault(name, unit)
        key = (launch, name)
        self._values[key] = self._values.get(key, 0.0) + value

    def metrics(self, launches: int) -> HardwareMetrics | None:
        """Return the counters of a trace with this number of launches, or None if there are none."""
        if not self._values:
            return None
        names = sorted(self._units)
        check_shape(self._path, launches, len(names), len(self._values))
        place = {name: index for index, name in enumerate(names)}
        values = np.full((launches, len(names)), np.nan)
        for (launch, name), value in self._values.items():
            values[launch, place[name]] = value
        return HardwareMetrics(names, [self._units[name] for name in names], values)


class Part(Protocol):
    """One part of a file, such as the records of a process."""

    def read_activities(self, counters: Counters) -> None:
        """Read the dispatches, their counters, and the copies."""

    def read_calls(self) -> None:
        """Read the API calls that started activities, and the roctx ranges."""

    def devices(self) -> Iterable[Device]:
        """Return the GPUs."""

    def describe(self, variant: Sequence[int]) -> tuple[str, Dispatch]:
        """Return the kind and the properties of an activity."""

    def environment(self) -> dict[str, object]:
        """Return the file's data about the machine and its software."""


def read_parts(
    recording: Recording,
    stack: ExitStack,
    parts: Sequence[Part],
    profiler: str,
    *,
    has_calls: bool = True,
) -> Trace:
    """Read all parts of a file, and return their Trace.

    The first value of each variant is the index of its part. `has_calls` is False if files of this
    form never contain API calls.
    """
    counters = Counters(recording.path)
    for part in parts:
        part.read_activities(counters)
    for part in parts:
        part.read_calls()
    devices: dict[int, Device] = {}
    for part in parts:
        for device in part.devices():
            devices.setdefault(device.index, device)

    def describe(variant: Hashable) -> tuple[str, Dispatch]:
        index, *values = cast("tuple[int, ...]", variant)
        return parts[index].describe(values)

    return recording.make_trace(
        stack,
        describe,
        profiler=profiler,
        devices=[devices[index] for index in sorted(devices)],
        environment=parts[0].environment() if parts else {},
        metrics=counters.metrics(recording.count),
        has_calls=has_calls,
    )
