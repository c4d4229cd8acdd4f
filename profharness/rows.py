"""What the store answers with: frozen rows, the same whatever profiler or file they came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

Triple = tuple[int, int, int]

TRACE_PROFILERS = ("torch", "nsys", "ncu")
"""The profilers whose launches can be stored, in the order in which an answer prefers them."""
COUNTERS = ("ncu",)
"""Those of them that read hardware counters; they run each kernel alone, with cold caches."""
COLD, GRAPH, KERNEL, EAGER, WALL = "cold", "graph", "kernel", "eager", "wall"
EVENT = "event"
"""A cold call of an older run, on which the stream was not held until all was queued."""
HOST = "host"
"""The host's own time of an eager call. It stands beside EAGER, and is no latency."""
MEASUREMENTS = (COLD, EVENT, GRAPH, KERNEL, EAGER, WALL)
"""What a latency sample can be, in the order in which one ranks backends; wall is the CPU's."""
HOSTED = (EAGER, HOST, WALL)
"""Measurements with the host in them."""
SHARED_CORES = (
    "lanes of this host share its cores: times with the host in them (eager, host, wall) may be off"
)
"""Warning of a cell that was measured beside other lanes, on cores that they used too."""
CPU_WAIT = "cpu_wait_max"
"""The share of its timing in which the worker was ready to run and waited for a CPU, among a cell's
clocks: the largest of its processes.
"""
GPU_MEASUREMENTS = (COLD, GRAPH, KERNEL, EAGER)
"""What a GPU is measured by."""
ALIASES = {EVENT: COLD}
"""What a measurement was called before, and is called now."""
CALL_MEASUREMENTS = (GRAPH, COLD, EVENT, EAGER, WALL)
"""What tells the call's own time best comes first; profiled kernels are not among them."""
DRAM_READ, DRAM_WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
ACTIVE_WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
"""Hardware counters by ncu's names."""


@dataclass(frozen=True)
class Refusal:
    """One reason why a backend cannot take a config. source: live (PyTorch said so), rule, or
    inferred.
    """

    code: str
    message: str
    source: str = "live"


NAIVE_COMPILED = "naive-compiled"
"""The backend whose `tuning` counts REPLACEMENTS: how often Inductor put SDPA into its graph."""
REPLACEMENTS = "sdpa_replacements"


def axes(name: str, triple: Triple | None) -> dict[str, int | None]:
    """A grid or block as three columns: `grid_x`, `grid_y`, `grid_z`."""
    return dict(zip((f"{name}_{axis}" for axis in "xyz"), triple or (None,) * 3, strict=True))


def triple(x: int | None, y: int | None, z: int | None) -> Triple | None:
    """A grid or block of its three columns; None where one is not known."""
    return None if x is None or y is None or z is None else (x, y, z)


class _OfProfiler(Protocol):
    @property
    def run(self) -> str: ...
    @property
    def profiler(self) -> str: ...


_R = TypeVar("_R", bound=_OfProfiler)


def of_first_profiler(rows: Iterable[_R]) -> list[_R]:
    """Of each run the rows of one profiler: the first of TRACE_PROFILERS that it has."""
    kept = list(rows)
    seen: dict[str, set[str]] = {}
    for row in kept:
        seen.setdefault(row.run, set()).add(row.profiler)
    chosen = {
        run: next((name for name in TRACE_PROFILERS if name in names), min(names))
        for run, names in seen.items()
    }
    return [row for row in kept if row.profiler == chosen[row.run]]


@dataclass(frozen=True, slots=True)
class RunRow:
    """One stored run. source is `capture` (made by profharness) or `trace` (somebody's file).

    kind is the command that made it (`capture bench verify explain`), or `trace`. warnings tell what
    was wrong with its traces. host_key and gpu_key are hashes; the last four are None where not told.
    """

    run: str
    created: str
    source: str
    kind: str
    path: str
    device: str | None
    torch: str | None
    profilers: tuple[str, ...]
    cells: int
    failed_cells: int
    launches: int
    warnings: tuple[str, ...] = ()
    rank: int | None = None
    world_size: int | None = None
    host_key: str | None = None
    gpu_key: str | None = None


@dataclass(frozen=True, slots=True)
class CellRow:
    """One cell: status, why it failed or was refused, and its raw samples in nanoseconds by
    measurement name.

    sdpa_op is the op that the trace shows to have run
    (`aten::_scaled_dot_product_flash_attention`), a witness of the backend that is independent of
    the kernels' names; choice is what PyTorch said beforehand; predicted what the dispatch rules
    say: a backend or `none` for `auto`, `eligible` or `refused` for a forced backend, None where
    the rules of its machine are not known. tuning is what an implementation says that it chose.
    """

    run: str
    cell: str
    config: str
    backend: str
    status: str
    message: str | None
    choice: str | None
    sdpa_op: str | None
    iterations: int
    refusals: tuple[Refusal, ...]
    warnings: tuple[str, ...]
    samples: dict[str, tuple[int, ...]] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    clocks: dict[str, Any] = field(default_factory=dict)
    predicted: str | None = None
    tuning: dict[str, Any] | None = None

    @property
    def reason(self) -> str | None:
        """Why it did not run: the message, else those of its refusals."""
        return self.message or "; ".join(refusal.message for refusal in self.refusals) or None


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel of one cell in one launch configuration, all its launches summed up.

    config, backend, cell are None for a foreign trace's launches. kernel_kind is `kernel memcpy
    memset op`. duration_ns is the median of one launch, total_ns the sum over all launches of all
    profiled calls, launches_per_call launches over calls, share the part of the cell's (for a
    foreign trace: the range's) total_ns; a time that was not measured is None. first_ns orders
    kernels within a call: earliest start relative to the start of its cell's first call. op_path
    is the folded op stack, sdpa_op its attention op if any. occupancy is theoretical, 0 to 1, with
    its limiter (`registers shared_memory block warps`), None where the device or resources are
    unknown. metrics are hardware counters by ncu's name: the median over the launches, and the
    unit. shared_share is what one block takes of an SM's shared memory, 0 to 1. source is `profiled`, or
    of an atlas `measured`, `model` or `floor`.
    """

    run: str
    config: str | None
    backend: str | None
    cell: str | None
    profiler: str
    status: str | None
    range: str | None
    kernel: str
    kernel_short: str
    kernel_kind: str
    family: str
    grid: Triple | None
    block: Triple | None
    registers_per_thread: int | None
    static_shared_bytes: int | None
    dynamic_shared_bytes: int | None
    shared_bytes: int | None
    launches: int
    launches_per_call: float | None
    duration_ns: int | None
    total_ns: int | None
    min_ns: int | None
    max_ns: int | None
    share: float | None
    first_ns: int
    op_path: str | None
    sdpa_op: str | None
    occupancy: float | None
    occupancy_limiter: str | None
    device: int
    metrics: dict[str, tuple[float, str]] = field(default_factory=dict, hash=False)
    shared_share: float | None = None
    source: str = "profiled"

    @property
    def dram_bytes_per_s(self) -> float | None:
        """Bytes from and to DRAM over the time that ncu saw; None without its counters."""
        moved = [self.metrics[name][0] for name in (DRAM_READ, DRAM_WRITE) if name in self.metrics]
        return sum(moved) / self.duration_ns * 1e9 if moved and self.duration_ns else None

    @property
    def call_ns(self) -> float | None:
        """The time of its launches in one call; None for a foreign trace, or without a time."""
        if self.total_ns is None or self.launches_per_call is None:
            return None
        return self.total_ns / self.launches * self.launches_per_call


class LaunchRow(NamedTuple):
    """One launch; None where a profiler cannot know. Times in ns, on the trace's clock."""

    run: str
    config: str | None
    backend: str | None
    profiler: str
    range: str | None
    kernel: str
    kernel_short: str
    family: str
    grid_x: int | None
    grid_y: int | None
    grid_z: int | None
    block_x: int | None
    block_y: int | None
    block_z: int | None
    registers_per_thread: int | None
    static_shared_bytes: int | None
    dynamic_shared_bytes: int | None
    shared_bytes: int | None
    stream: int | None
    device: int
    start_ns: int
    duration_ns: int | None
    kernel_kind: str
    cell: str | None
    iteration: int | None
    op_path: str | None
    sdpa_op: str | None
    api: str | None
    correlation: int | None
    graph_node: int | None
    pid: int | None
    tid: int | None
    launch_ns: int | None
    bytes: int | None
    launch_id: int


class RangeRow(NamedTuple):
    """One user range; parent is the enclosing one's id, iteration the ordinal of its call."""

    id: int
    profiler: str
    name: str
    start_ns: int
    duration_ns: int
    pid: int
    tid: int
    parent: int | None
    cell: str | None
    iteration: int | None


class CallKernel(NamedTuple):
    """A kernel of an attention call in a direction: `forward`, `recompute` or `backward`, in one
    launch configuration.
    """

    direction: str
    kernel: str
    kernel_short: str
    family: str
    launches: int
    total_ns: int
    kernel_kind: str = "kernel"
    grid: Triple | None = None
    block: Triple | None = None
    registers_per_thread: int | None = None
    shared_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CallRow:
    """An attention call of a program, as `profharness.trace.AttentionCall` describes it. step counts
    the steps of its trace, None outside of them. template is the row of the observed kind of call that
    it is of, None where there is none. Calls that were counted and not traced have trace UNTRACED.
    """

    run: str
    trace: int
    call: int
    step: int | None
    kind: str
    op: str
    sdpa_op: str | None
    compiled: bool
    recompute: bool
    backward: bool
    path: str | None
    modules: tuple[str, ...]
    config: str | None
    reason: str | None
    tensors: tuple[Any, ...]
    start_ns: int
    duration_ns: int
    kernels: tuple[CallKernel, ...] = ()
    graph: bool = False
    template: int | None = None

    @property
    def mode(self) -> str:
        """`eager`, `compile` or, in whatever way it was captured, `graph`."""
        return "graph" if self.graph else "compile" if self.compiled else "eager"

    @property
    def dims(self) -> tuple[tuple[int, ...] | None, ...]:
        """Those of query, key, value and mask; None for a tensor that is not told."""
        return tuple(tuple(tensor["dims"]) if tensor else None for tensor in self.tensors)


UNTRACED = 0
"""In place of a trace's number."""


@dataclass(frozen=True, slots=True)
class CallSignature:
    """A kind of call that a process of an observed program made, and how often, as
    `profharness.parse.observed.ObservedCall` describes it. name is what the module is called in a
    trace, config that of the first call.
    """

    template: int
    pid: int
    rank: int | None
    kind: str
    op: str
    name: str | None
    compiled: bool
    recompute: bool
    backward: bool
    modules: tuple[str, ...]
    config: str | None
    reason: str | None
    tensors: tuple[Any, ...]
    calls: int
    lengths: tuple[tuple[tuple[int, ...], int], ...]
    asked: str | None
    choice: str | None
    ran: str | None
    mask: str | None
    file: str | None
    line: int | None
    function: str | None


WHOLE_TRACE = "the whole trace"
"""The name of the one step of a trace that tells none."""


class StepRow(NamedTuple):
    """A step of a trace; busy_ns is how long at least one kernel ran that began in it."""

    trace: int
    step: int
    name: str
    start_ns: int
    duration_ns: int
    busy_ns: int


class GapRow(NamedTuple):
    """A stretch without any kernel on a device, and the launch that ended it: launch_ns is when the
    program asked for it.
    """

    device: int
    start_ns: int
    duration_ns: int
    kernel_short: str
    op_path: str | None
    launch_ns: int | None


class DeviceTime(NamedTuple):
    """How long a GPU was busy between its first and its last launch of a trace. exposed_ns is the time
    in which collectives ran and nothing else did.
    """

    device: int
    launches: int
    start_ns: int
    end_ns: int
    busy_ns: int
    collective_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank of a job: a run, or of a run of several ranks the traces of one. rank is None where
    nothing tells it; name is that of its file or folder. traces are row ids.
    """

    run: str
    rank: int | None
    world_size: int | None
    host_key: str | None
    gpu_key: str | None
    name: str
    created: str
    device: str | None
    environment: dict[str, Any]
    traces: tuple[int, ...]
    times: tuple[DeviceTime, ...] = ()

    @property
    def label(self) -> str:
        """`rank 3`, or the name of its file."""
        return self.name if self.rank is None else f"rank {self.rank}"


class RankKernel(NamedTuple):
    """What a kernel's id stands for in a `RankLaunches`."""

    name: str
    short: str
    family: str
    kind: str


@dataclass(frozen=True, slots=True)
class RankLaunches:
    """The launches of traces, summed up. groups are (trace, place, kernel, launch configuration,
    launches, total_ns, cell) with ids; a total of -1 is not known. A place is a range, or a config on a backend.
    """

    groups: list[tuple[int, ...]]
    places: dict[int, str]
    kernels: dict[int, RankKernel]
