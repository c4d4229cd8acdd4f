"""Rows returned by the store, independent of the profiler and the file that they came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

Triple = tuple[int, int, int]

TORCH, EVENTS, NSYS, NCU = "torch", "events", "nsys", "ncu"
"""Names of the profilers; `profilers.PROFILERS` describes them."""
TRACE_PROFILERS = (TORCH, NSYS, NCU)
"""Profilers with kernel launches, in order of preference for an answer."""
COUNTERS = (NCU,)
"""Those that read hardware counters. They run each kernel alone, with cold caches."""
COLD, GRAPH, KERNEL, EAGER, WALL = "cold", "graph", "kernel", "eager", "wall"
EVENT = "event"
"""A cold call of an older run, whose stream was not held until all work was queued."""
HOST = "host"
"""Host time of an eager call. It is recorded with EAGER and is not a latency."""
MEASUREMENTS = (COLD, EVENT, GRAPH, KERNEL, EAGER, WALL)
"""Kinds of latency samples, in the order of preference for ranking backends. `wall` is for the CPU."""
HOSTED = (EAGER, HOST, WALL)
"""Measurements that include host time."""
SHARED_CORES = (
    "lanes of this host share its cores: times with the host in them (eager, host, wall) may be off"
)
"""Warning of a cell that was measured while other lanes used the same cores."""
CPU_WAIT = "cpu_wait_max"
"""Key in a cell's clocks: share of the timing in which the worker was runnable but waited for a
CPU, at its worst process.
"""
GPU_MEASUREMENTS = (COLD, GRAPH, KERNEL, EAGER)
"""Measurements on a GPU."""
ALIASES = {EVENT: COLD}
"""Former names of measurements."""
CALL_MEASUREMENTS = (GRAPH, COLD, EVENT, EAGER, WALL)
"""Measurements in the order of how closely they represent the call's own time. Profiled kernels are
not included.
"""
DRAM_READ, DRAM_WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
ACTIVE_WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
"""Names of hardware counters in ncu."""


@dataclass(frozen=True)
class Refusal:
    """One reason why a backend cannot compute a config."""

    code: str
    message: str
    source: str = "live"
    """`live` (from PyTorch), `rule` or `inferred`."""


NAIVE_COMPILED = "naive-compiled"
"""The backend whose `tuning` contains REPLACEMENTS, the number of SDPA calls that Inductor put into
its graph.
"""
REPLACEMENTS = "sdpa_replacements"


def axes(name: str, triple: Triple | None) -> dict[str, int | None]:
    """Return a grid or block as three columns: `grid_x`, `grid_y`, `grid_z`."""
    return dict(zip((f"{name}_{axis}" for axis in "xyz"), triple or (None,) * 3, strict=True))


def triple(x: int | None, y: int | None, z: int | None) -> Triple | None:
    """Return a grid or block from its columns. None if one is unknown."""
    return None if x is None or y is None or z is None else (x, y, z)


class _OfProfiler(Protocol):
    @property
    def run(self) -> str: ...
    @property
    def profiler(self) -> str: ...


_R = TypeVar("_R", bound=_OfProfiler)


def of_first_profiler(rows: Iterable[_R]) -> list[_R]:
    """Keep, for each run, the rows of one profiler: the first in TRACE_PROFILERS that has any."""
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
    """One stored run."""

    run: str
    created: str
    source: str
    """`capture` (made by profharness) or `trace` (a file from elsewhere)."""
    kind: str
    """The command that made it (`capture bench verify explain`), or `trace`."""
    path: str
    device: str | None
    torch: str | None
    profilers: tuple[str, ...]
    cells: int
    failed_cells: int
    launches: int
    warnings: tuple[str, ...] = ()
    """Problems of its traces."""
    rank: int | None = None
    world_size: int | None = None
    host_key: str | None = None
    """Hash. None if unknown."""
    gpu_key: str | None = None
    """Hash. None if unknown."""


@dataclass(frozen=True, slots=True)
class CellRow:
    """One cell of a run."""

    run: str
    cell: str
    config: str
    backend: str
    status: str
    message: str | None
    """Why the cell failed."""
    choice: str | None
    """Backend that PyTorch reported before the call."""
    sdpa_op: str | None
    """Op that ran according to the trace, such as `aten::_scaled_dot_product_flash_attention`.
    Identifies the backend independently of kernel names.
    """
    iterations: int
    refusals: tuple[Refusal, ...]
    warnings: tuple[str, ...]
    samples: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Raw samples in ns by measurement."""
    peak_memory_bytes: int | None = None
    clocks: dict[str, Any] = field(default_factory=dict)
    predicted: str | None = None
    """Prediction of the dispatch rules: a backend or `none` for `auto`, `eligible` or `refused` for
    a forced backend. None if the rules do not cover the machine.
    """
    tuning: dict[str, Any] | None = None
    """Parameters that the implementation reports to have chosen."""

    @property
    def reason(self) -> str | None:
        """Why the cell did not run: its message, or those of its refusals."""
        return self.message or "; ".join(refusal.message for refusal in self.refusals) or None


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel of one cell in one launch configuration, summed over all its launches.

    Unmeasured times are None. config, backend and cell are None for launches of a foreign trace.
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
    """`kernel`, `memcpy`, `memset` or `op`."""
    family: str
    grid: Triple | None
    block: Triple | None
    registers_per_thread: int | None
    static_shared_bytes: int | None
    dynamic_shared_bytes: int | None
    shared_bytes: int | None
    launches: int
    launches_per_call: float | None
    """Launches divided by profiled calls."""
    duration_ns: int | None
    """Median of one launch."""
    total_ns: int | None
    """Sum over all launches of all profiled calls."""
    min_ns: int | None
    max_ns: int | None
    share: float | None
    """Share of the cell's total_ns, or of the range's in a foreign trace."""
    first_ns: int
    """Earliest start relative to the start of the cell's first call. Orders kernels within a call."""
    op_path: str | None
    """Folded op stack."""
    sdpa_op: str | None
    """Attention op in the stack, if any."""
    occupancy: float | None
    """Theoretical, 0 to 1. None if the device or the resources are unknown."""
    occupancy_limiter: str | None
    """`registers`, `shared_memory`, `block` or `warps`."""
    device: int
    metrics: dict[str, tuple[float, str]] = field(default_factory=dict, hash=False)
    """Hardware counters by ncu's name: median over the launches, and unit."""
    shared_share: float | None = None
    """Share of an SM's shared memory that one block uses, 0 to 1."""
    source: str = "profiled"
    """`profiled`, or from an atlas `measured`, `model` or `floor`."""

    @property
    def dram_bytes_per_s(self) -> float | None:
        """Bytes to and from DRAM per second of ncu's kernel time. None without its counters."""
        moved = [self.metrics[name][0] for name in (DRAM_READ, DRAM_WRITE) if name in self.metrics]
        return sum(moved) / self.duration_ns * 1e9 if moved and self.duration_ns else None

    @property
    def call_ns(self) -> float | None:
        """Time of the kernel's launches in one call. None for a foreign trace, or if unmeasured."""
        if self.total_ns is None or self.launches_per_call is None:
            return None
        return self.total_ns / self.launches * self.launches_per_call


class LaunchRow(NamedTuple):
    """One launch. Values that a profiler cannot provide are None. Times are in ns on the trace's clock."""

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
    """One user range."""

    id: int
    profiler: str
    name: str
    start_ns: int
    duration_ns: int
    pid: int
    tid: int
    parent: int | None
    """Id of the enclosing range."""
    cell: str | None
    iteration: int | None
    """Ordinal of the range's call in its cell."""


class CallKernel(NamedTuple):
    """A kernel of an attention call in one launch configuration."""

    direction: str
    """`forward`, `recompute` or `backward`."""
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
    """An attention call of a program, with the fields of `profharness.trace.AttentionCall`."""

    run: str
    trace: int
    """Row id of the trace, UNTRACED for calls that were counted but not traced."""
    call: int
    step: int | None
    """Number of the step in its trace. None outside of steps."""
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
    """Row id of the observed kind of call, or None."""

    @property
    def mode(self) -> str:
        """`eager`, `compile`, or `graph` for calls replayed by a CUDA graph."""
        return "graph" if self.graph else "compile" if self.compiled else "eager"

    @property
    def dims(self) -> tuple[tuple[int, ...] | None, ...]:
        """Dims of query, key, value and mask. None for an unknown tensor."""
        return tuple(tuple(tensor["dims"]) if tensor else None for tensor in self.tensors)


UNTRACED = 0
"""Replaces the trace's row id."""


@dataclass(frozen=True, slots=True)
class CallSignature:
    """A kind of call in one process of an observed program and its number of calls, with the fields
    of `profharness.parse.observed.ObservedCall`.
    """

    template: int
    pid: int
    rank: int | None
    kind: str
    op: str
    name: str | None
    """Name of the module as in a trace."""
    compiled: bool
    recompute: bool
    backward: bool
    modules: tuple[str, ...]
    config: str | None
    """Config of the first call."""
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
"""Name of the only step of a trace without steps."""


class StepRow(NamedTuple):
    """A step of a trace."""

    trace: int
    step: int
    name: str
    start_ns: int
    duration_ns: int
    busy_ns: int
    """Time during which at least one kernel ran that started in the step."""


class GapRow(NamedTuple):
    """An interval without a kernel on a device, and the launch that ended it."""

    device: int
    start_ns: int
    duration_ns: int
    kernel_short: str
    op_path: str | None
    launch_ns: int | None
    """When the program made that launch."""


class DeviceTime(NamedTuple):
    """How long a GPU was busy between its first and its last launch of a trace."""

    device: int
    launches: int
    start_ns: int
    end_ns: int
    busy_ns: int
    collective_ns: int
    exposed_ns: int
    """Time during which only collectives ran."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank of a job: a run, or one rank's traces of a run of several ranks."""

    run: str
    rank: int | None
    """None if unknown."""
    world_size: int | None
    host_key: str | None
    gpu_key: str | None
    name: str
    """Name of its file or folder."""
    created: str
    device: str | None
    environment: dict[str, Any]
    traces: tuple[int, ...]
    """Row ids."""
    times: tuple[DeviceTime, ...] = ()

    @property
    def label(self) -> str:
        """`rank 3`, or the name of its file."""
        return self.name if self.rank is None else f"rank {self.rank}"


class RankKernel(NamedTuple):
    """The kernel of an id in `RankLaunches`."""

    name: str
    short: str
    family: str
    kind: str


@dataclass(frozen=True, slots=True)
class RankLaunches:
    """Aggregated launches of traces."""

    groups: list[tuple[int, ...]]
    """(trace, place, kernel, launch configuration, launches, total_ns, cell), all ids but launches
    and total_ns. A total_ns of -1 is unknown.
    """
    places: dict[int, str]
    """Id -> range, or config and backend."""
    kernels: dict[int, RankKernel]
