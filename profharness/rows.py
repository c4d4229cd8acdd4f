"""The rows that the store returns. Rows have the same form for all profilers and file formats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar

from profharness.columns import column

Triple = tuple[int, int, int]

TORCH, EVENTS, NSYS, NCU = "torch", "events", "nsys", "ncu"
"""Names of the profilers. `profilers.PROFILERS` describes each profiler."""
ROCPROFV3, RPD, ROCPROF = "rocprofv3", "rpd", "rocprof"
"""Names of AMD's profilers: rocprofv3 of rocprofiler-sdk, rocmProfileData, and rocprof v1."""
TRACE_PROFILERS = (TORCH, NSYS, NCU)
"""Profilers that `capture` runs on NVIDIA GPUs and that record kernel launches, in order of preference."""
LAUNCH_PROFILERS = (*TRACE_PROFILERS, ROCPROFV3, RPD, ROCPROF)
"""All profilers whose files contain kernel launches, in order of preference."""
COUNTERS = (NCU,)
"""Profilers that read hardware counters. They run each kernel separately, with cold caches."""
COLD, GRAPH, KERNEL, EAGER, WALL = "cold", "graph", "kernel", "eager", "wall"
EVENT = "event"
"""A measurement of older runs, in which kernels could start before all work was queued."""
HOST = "host"
"""Host time of an eager call. It is recorded together with EAGER and is not a latency."""
MEASUREMENTS = (COLD, GRAPH, EVENT, KERNEL, EAGER, WALL)
"""Kinds of latency samples. Backends and runs are compared by the first kind that all of them have.

EVENT is behind GRAPH, because it includes part of the launch path, so that its medians differ
between runs of the same code. WALL is for cells on a CPU.
"""
CALL_MEASUREMENTS = tuple(name for name in MEASUREMENTS if name != KERNEL)
"""Measurements of whole calls, in the same order. KERNEL excludes the gaps between kernels."""


def shared_measurement(
    times: Collection[Callable[[str], object]], among: Sequence[str] = MEASUREMENTS
) -> str | None:
    """Return the first of the measurements `among` that all cells have, or None.

    `times` contains a function for each cell, which maps a measurement to its times, such as
    `cell.samples.get`.
    """
    return next((name for name in among if all(of_cell(name) for of_cell in times)), None)


HOSTED = (EAGER, HOST, WALL)
"""Measurements that include host time."""
SHARED_CORES = (
    "several lanes share the CPU cores of this host, so times that include the host (eager, "
    "host, wall) may be wrong"
)
"""Warning for a cell that was measured while other lanes used the same cores."""
CPU_WAIT = "cpu_wait_max"
"""Key in the clocks of a cell: the share of the measurement in which a process waited for a CPU.

If several processes timed the cell, the value is the maximum.
"""
GPU_MEASUREMENTS = (COLD, GRAPH, KERNEL, EAGER)
"""Measurements on a GPU."""
ALIASES = {EVENT: COLD}
"""Maps the former name of a measurement to its current name."""
DRAM_READ, DRAM_WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
ACTIVE_WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
"""Names of hardware counters in ncu."""


PRODUCT_FAMILIES = ("gemm", "gemv")
"""Families of the kernels that compute matrix products."""

DISABLED = "runtime_disabled"
"""Code of a refusal whose cause is that the caller switched the backend off."""


@dataclass(frozen=True)
class Refusal:
    """One reason why a backend cannot compute a config."""

    code: Annotated[
        str, column("reason", importance="answer", meaning="name of the violated constraint")
    ]
    message: Annotated[str, column("explanation", wrap=True, meaning="the reason in words")]
    source: Annotated[
        str,
        column(
            "source", importance="detail", meaning="`live` (from PyTorch), `rule` or `inferred`"
        ),
    ] = "live"


def decisive(refusals: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """Return the refusals without those of switched-off backends, unless there are no others.

    A caller who switches a backend off wants to know why the remaining ones refuse the config.
    """
    return tuple(each for each in refusals if each.code != DISABLED) or tuple(refusals)


NAIVE_COMPILED = "naive-compiled"
"""Backend whose `tuning` contains REPLACEMENTS, the number of SDPA calls that Inductor inserted."""
REPLACEMENTS = "sdpa_replacements"


PROFILED, MEASURED, MODEL, FLOOR = "profiled", "measured", "model", "floor"
"""Sources of a time: a trace, or an atlas with a measurement, a prediction or a lower bound."""
SOURCE_WORDS = {MEASURED: "measured", MODEL: "predicted", FLOOR: "bound only"}


def times_word(sources: Collection[str]) -> str:
    """Return what to call times from these sources: `predicted`, `measured` or, if mixed, `kernel`.

    A lower bound is not a time, so its source does not matter.
    """
    timed = {*sources} - {FLOOR}
    return SOURCE_WORDS.get(timed.pop(), "kernel") if len(timed) == 1 else "kernel"


def sourced(name: str | None, source: str) -> str:
    """Return a name with the source of its time, unless a trace is the source: `flash (predicted)`."""
    return f"{name} ({SOURCE_WORDS[source]})" if name and source in SOURCE_WORDS else name or ""


def axes(name: str, triple: Triple | None) -> dict[str, int | None]:
    """Return a grid or block as three columns, such as `grid_x`, `grid_y` and `grid_z`."""
    return dict(zip((f"{name}_{axis}" for axis in "xyz"), triple or (None,) * 3, strict=True))


def triple(x: int | None, y: int | None, z: int | None) -> Triple | None:
    """Return a grid or block from its three columns, or None if a column is unknown."""
    return None if x is None or y is None or z is None else (x, y, z)


@dataclass(frozen=True, slots=True)
class RunRow:
    """One stored run."""

    run: Annotated[str, column("run", meaning="id of the run")]
    created: Annotated[
        str,
        column(
            "created",
            importance="normal",
            meaning="time at which the run was measured or stored, in UTC",
        ),
    ]
    source: Annotated[
        str,
        column(
            meaning="`capture` if profharness made the run, with any command, else `trace`; `kind` "
            "names the command"
        ),
    ]
    kind: Annotated[
        str,
        column(
            "kind",
            importance="normal",
            meaning="the command that created the run, such as `capture`. The value is `trace` if the "
            "run was read from another file",
        ),
    ]
    path: Annotated[
        str, column(meaning="run folder, trace file, or folder that contains only this trace")
    ]
    device: Annotated[
        str | None,
        column(
            "device",
            importance="answer",
            shrink=True,
            meaning="the GPU, or the CPU if the run used no GPU",
        ),
    ]
    torch: Annotated[
        str | None, column("torch", importance="detail", shrink=True, meaning="release of PyTorch")
    ]
    profilers: Annotated[
        tuple[str, ...],
        column(
            "profilers",
            "names",
            importance="detail",
            meaning="the profilers that recorded the kernels and times of the run",
        ),
    ]
    cells: Annotated[int, column("cells", "count", importance="detail", meaning="number of cells")]
    failed_cells: Annotated[
        int,
        column(
            "failed",
            "count",
            importance="detail",
            meaning="number of cells that neither ran nor were refused",
        ),
    ]
    launches: Annotated[
        int,
        column(
            "launches", "count", importance="detail", meaning="number of stored kernel launches"
        ),
    ]
    warnings: Annotated[tuple[str, ...], column(meaning="problems found in the traces of the run")]
    rank: Annotated[
        int | None,
        column(
            "rank", importance="detail", right=True, meaning="rank in a distributed job, if known"
        ),
    ]
    world_size: Annotated[int | None, column(meaning="number of ranks in the job, if known")]
    host_key: Annotated[str | None, column(meaning="hash of the host, if known")]
    gpu_key: Annotated[str | None, column(meaning="hash of the GPU, if known")]
    name: Annotated[
        str,
        column(
            "run",
            importance="key",
            shrink=True,
            meaning="the file or folder that the user named; for other runs, the id of the run",
        ),
    ]
    ended: Annotated[str | None, column(meaning="end of the run in UTC, if known")] = None
    duration_ns: Annotated[
        int | None,
        column(
            "duration",
            "duration",
            importance="detail",
            meaning="duration of the run, or the time that a trace covers, if known; a trace covers "
            "a little more than its steps",
        ),
    ] = None
    lanes_ns: Annotated[
        int | None,
        column(
            meaning="sum of the durations of all GPUs (or groups of cores) that worked in parallel"
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class CellRow:
    """One cell of a run."""

    run: Annotated[str, column("run", meaning="id of the run")]
    cell: Annotated[str, column(meaning="id of the cell in its run")]
    config: Annotated[str, column("config", repeat=False, meaning="label of the attention problem")]
    backend: Annotated[str, column("backend", importance="key", meaning="the requested backend")]
    status: Annotated[
        str,
        column("status", importance="answer", meaning="`ok`, `refused`, or the kind of failure"),
    ]
    message: Annotated[str | None, column(meaning="reason why the cell failed")]
    choice: Annotated[str | None, column(meaning="backend that PyTorch reported before the call")]
    sdpa_op: Annotated[
        str | None,
        column(
            meaning="op that ran according to the trace, such as "
            "`aten::_scaled_dot_product_flash_attention`; the op identifies the backend"
        ),
    ]
    iterations: Annotated[int, column(meaning="number of profiled calls")]
    refusals: Annotated[
        tuple[Refusal, ...], column(meaning="reasons why the backend refuses the config")
    ]
    warnings: Annotated[tuple[str, ...], column(meaning="reasons to doubt the cell's figures")]
    samples: Annotated[
        dict[str, tuple[int, ...]], column(meaning="raw samples in ns, grouped by measurement")
    ] = field(default_factory=dict)
    peak_memory_bytes: Annotated[
        int | None,
        column(
            "peak MiB",
            "mib",
            importance="detail",
            meaning="peak memory of a call, excluding its inputs",
        ),
    ] = None
    clocks: Annotated[
        dict[str, Any], column(meaning="clocks, temperature and load while the cell was timed")
    ] = field(default_factory=dict)
    predicted: Annotated[
        str | None,
        column(
            "predicted backend",
            importance="detail",
            meaning="prediction of the dispatch rules: a backend or `none` for `auto`, and "
            "`eligible` or `refused` for a forced backend; empty if the rules do not cover the "
            "machine",
        ),
    ] = None
    tuning: Annotated[
        dict[str, Any] | None, column(meaning="parameters that the implementation reports")
    ] = None

    @property
    def reason(
        self,
    ) -> Annotated[str | None, column("reason", wrap=True, meaning="why the cell did not run")]:
        """The decisive refusals of the cell, or else the message of the cell."""
        texts = dict.fromkeys(refusal.message for refusal in decisive(self.refusals))
        return "; ".join(texts) or self.message


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel of one cell in one launch configuration, summed over all its launches.

    A time that was not measured is None. `config`, `backend` and `cell` are None if the trace does
    not come from a run of profharness.
    """

    run: Annotated[str, column("run", meaning="id of the run")]
    config: Annotated[
        str | None, column("config", repeat=False, meaning="label of the attention problem")
    ]
    backend: Annotated[str | None, column("backend", repeat=False, meaning="the requested backend")]
    cell: Annotated[str | None, column(meaning="id of the cell in its run")]
    profiler: Annotated[
        str,
        column(
            "profiler",
            importance="normal",
            repeat=False,
            meaning="the profiler that recorded the launches, such as torch, nsys, ncu or rocprofv3",
        ),
    ]
    status: Annotated[str | None, column(meaning="status of the cell")]
    range: Annotated[
        str | None,
        column(meaning="`record_function`, NVTX or roctx range that encloses the launches"),
    ]
    kernel: Annotated[
        str,
        column(
            "kernel",
            importance="key",
            shrink=True,
            meaning="canonical name of the kernel, with all template parameters",
        ),
    ]
    kernel_short: Annotated[
        str, column("kernel", importance="key", shrink=True, meaning="short name of the kernel")
    ]
    kernel_kind: Annotated[str, column(meaning="`kernel`, `memcpy`, `memset` or `op`")]
    family: Annotated[str, column(meaning="family of the kernel, such as `flash` or `gemm`")]
    grid: Annotated[
        Triple | None,
        column(
            "grid",
            "triple",
            importance="detail",
            meaning="blocks per launch, in three dimensions",
        ),
    ]
    block: Annotated[
        Triple | None,
        column(
            "block",
            "triple",
            importance="detail",
            spare=3,
            meaning="threads per block, in three dimensions",
        ),
    ]
    registers_per_thread: Annotated[
        int | None, column("regs", "count", importance="detail", meaning="registers per thread")
    ]
    static_shared_bytes: Annotated[int | None, column(meaning="static shared memory per block")]
    dynamic_shared_bytes: Annotated[int | None, column(meaning="dynamic shared memory per block")]
    shared_bytes: Annotated[
        int | None,
        column(
            "smem KiB",
            "kib",
            importance="detail",
            spare=2,
            meaning="shared memory per block, static and dynamic",
        ),
    ]
    launches: Annotated[
        int, column("launches", "count", meaning="number of launches in all profiled calls")
    ]
    launches_per_call: Annotated[
        float | None,
        column("launches/call", "count", meaning="number of launches of the kernel in one call"),
    ]
    duration_ns: Annotated[
        int | None,
        column(
            "median µs/launch",
            "time",
            importance="answer",
            scale="launch",
            meaning="median time of one launch",
        ),
    ]
    total_ns: Annotated[
        int | None,
        column(
            "total µs",
            "time",
            importance="answer",
            meaning="total time of all launches in all profiled calls",
        ),
    ]
    min_ns: Annotated[int | None, column(meaning="duration of the shortest launch")]
    max_ns: Annotated[int | None, column(meaning="duration of the longest launch")]
    share: Annotated[
        float | None,
        column(
            "% of call",
            "percent",
            importance="answer",
            meaning="the kernel's share of the call's kernel time",
        ),
    ]
    """Share of the sum of `total_ns` in the cell, or in the range if the row has no cell."""
    first_ns: Annotated[
        int,
        column(
            meaning="earliest start of the kernel, relative to the start of the cell's first call"
        ),
    ]
    """The kernels of a call are sorted by this time."""
    op_path: Annotated[
        str | None,
        column(json_key="op", meaning="the ops that enclose the launches, outermost first"),
    ]
    sdpa_op: Annotated[
        str | None, column(meaning="the attention op that launched the kernels, if any")
    ]
    occupancy: Annotated[
        float | None,
        column(
            "% occupancy",
            "percent",
            importance="detail",
            meaning="theoretical occupancy, as limited by registers, shared memory and block size",
        ),
    ]
    """A number from 0 to 1, or None if the device or the resources are unknown."""
    occupancy_limiter: Annotated[
        str | None,
        column(
            meaning="what limits the occupancy: `registers`, `shared_memory`, `block` or `warps`"
        ),
    ]
    device: Annotated[int, column("gpu", "count", meaning="index of the GPU in its process")]
    metrics: Annotated[
        dict[str, tuple[float, str]],
        column(
            meaning="names of ncu hardware counters, each with its median over the launches and "
            "its unit"
        ),
    ] = field(default_factory=dict, hash=False)
    shared_share: Annotated[
        float | None,
        column(
            "% of smem",
            "percent",
            importance="detail",
            spare=4,
            meaning="share of an SM's shared memory that one block uses",
        ),
    ] = None
    source: Annotated[
        str,
        column(
            meaning="`profiled` for a stored run, and `measured`, `model` or `floor` for an atlas"
        ),
    ] = PROFILED
    accum_registers_per_thread: Annotated[
        int | None, column(meaning="accumulation registers (AGPRs) per thread on AMD GPUs")
    ] = None
    scalar_registers: Annotated[
        int | None, column(meaning="scalar registers (SGPRs) per wavefront on AMD GPUs")
    ] = None
    scratch_bytes_per_thread: Annotated[
        int | None, column(meaning="scratch memory per thread on AMD GPUs")
    ] = None

    @property
    def dram_bytes_per_s(
        self,
    ) -> Annotated[
        float | None,
        column(
            meaning="bytes read from and written to DRAM, per second of the kernel time that ncu "
            "measured"
        ),
    ]:
        """Memory throughput of the kernel, or None if the DRAM counters were not collected."""
        moved = [self.metrics[name][0] for name in (DRAM_READ, DRAM_WRITE) if name in self.metrics]
        return sum(moved) / self.duration_ns * 1e9 if moved and self.duration_ns else None

    @property
    def call_ns(
        self,
    ) -> Annotated[
        float | None,
        column(
            "mean µs/call",
            "time",
            importance="answer",
            scale="launch",
            meaning="mean time per call, summed over the launches of the kernel",
        ),
    ]:
        """Time of the kernel's launches in one call, or None if the time or the call is unknown."""
        if self.total_ns is None or self.launches_per_call is None:
            return None
        return self.total_ns / self.launches * self.launches_per_call


class LaunchRow(NamedTuple):
    """One launch. A value that the profiler cannot provide is None.

    Times are in nanoseconds on the clock of the trace.
    """

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
    accum_registers_per_thread: int | None = None
    scalar_registers: int | None = None


_R = TypeVar("_R", KernelRow, LaunchRow)


def preferred_profiler_rows(rows: Iterable[_R]) -> list[_R]:
    """Keep only the rows of one profiler per run: the first in LAUNCH_PROFILERS that has rows."""
    kept = list(rows)
    order = {name: number for number, name in enumerate(LAUNCH_PROFILERS)}
    seen = {(row.run, row.profiler) for row in kept}
    chosen = dict(sorted(seen, key=lambda pair: order.get(pair[1], len(order)), reverse=True))
    return [row for row in kept if row.profiler == chosen[row.run]]


class RangeRow(NamedTuple):
    """One range that a program opened with `record_function` or NVTX."""

    id: int
    profiler: str
    name: str
    start_ns: int
    duration_ns: int
    pid: int
    tid: int
    parent: int | None  # id of the enclosing range
    cell: str | None
    iteration: int | None  # index of the profiled call within its cell


class CallKernel(NamedTuple):
    """A kernel of an attention call in one launch configuration."""

    direction: str  # `forward`, `recompute` or `backward`
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
    accum_registers_per_thread: int | None = None
    scalar_registers: int | None = None


@dataclass(frozen=True, slots=True)
class CallRow:
    """An attention call of a program, with the fields of `profharness.trace.AttentionCall`."""

    run: str
    trace: int  # row id of the trace, or UNTRACED for calls that were counted but not traced
    call: int
    step: int | None  # number of the step in its trace, or None for a call outside of all steps
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
    """Row id of the matching `CallSignature`, or None if the observer did not record the call."""

    @property
    def mode(self) -> str:
        """`eager`, `compile` for a compiled call, or `graph` if a CUDA graph replayed the call."""
        return "graph" if self.graph else "compile" if self.compiled else "eager"

    @property
    def dims(self) -> tuple[tuple[int, ...] | None, ...]:
        """The sizes of query, key, value and mask. The sizes of an unknown tensor are None."""
        return tuple(tuple(tensor["dims"]) if tensor else None for tensor in self.tensors)


UNTRACED = 0
"""Value of `CallRow.trace` for calls that were counted but not traced."""


@dataclass(frozen=True, slots=True)
class CallSignature:
    """A kind of attention call in one process of an observed program, and the number of such calls.

    `profharness.traces.observed.ObservedCall` describes the fields.
    """

    template: int
    pid: int
    rank: int | None
    kind: str
    op: str
    name: str | None  # name of the module, as it appears in a trace
    compiled: bool
    recompute: bool
    backward: bool
    modules: tuple[str, ...]
    config: str | None  # config of the first call
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
"""Name of the step that stands for the whole trace if the trace contains no steps."""


class StepRow(NamedTuple):
    """A step of a program in a trace. `step_rows` in `store/steps.py` defines the times."""

    trace: int
    step: int
    name: str
    start_ns: int
    duration_ns: int
    busy_ns: int  # time during which a kernel was running, averaged over the GPUs of the trace
    devices: int = 1  # number of GPUs in the trace
    launches: int = 0  # number of launches on all GPUs that started in the step


class StepLaunch(NamedTuple):
    """A launch on a GPU that started in a step of a program."""

    device: int
    stream: int | None
    start_ns: int
    duration_ns: int
    kernel: str
    kernel_short: str
    family: str
    kernel_kind: str
    op_path: str | None
    call: int | None  # number of the attention call in its trace, or None for other launches
    direction: str | None  # `forward`, `recompute` or `backward` for a launch of an attention call
    range: str | None = None  # name of the innermost range around the launch


STEP_END = "the end of the step"
"""Ends an interval after the last kernel of a step, in place of a kernel."""


class GapRow(NamedTuple):
    """An interval in which no kernel ran on a device, and the launch that ended the interval.

    The interval before the first kernel of a step begins with the step. The interval after the last
    kernel ends with the step, and `kernel_short` is STEP_END.
    """

    device: int
    start_ns: int
    duration_ns: int
    kernel_short: str
    op_path: str | None
    launch_ns: int | None  # time of the launch call in the program


class DeviceTime(NamedTuple):
    """The time during which a GPU was busy between the first and the last launch of a trace."""

    device: int
    launches: int
    start_ns: int
    end_ns: int
    busy_ns: int
    collective_ns: int
    exposed_ns: int  # time during which collectives but no other kernels ran


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank of a job.

    The row describes a whole run, or only the traces of one rank if a run contains several ranks.
    """

    run: str
    rank: int | None  # number of the rank, or None if it is unknown
    world_size: int | None
    host_key: str | None
    gpu_key: str | None
    name: str  # name of the file or folder of the rank
    created: str
    device: str | None
    environment: dict[str, Any]
    traces: tuple[int, ...]  # row ids of the traces of the rank
    times: tuple[DeviceTime, ...] = ()

    @property
    def label(self) -> str:
        """Text such as `rank 3`, or the name of the file or folder if the rank is unknown."""
        return self.name if self.rank is None else f"rank {self.rank}"


class RankKernel(NamedTuple):
    """A kernel that `RankLaunches` refers to by id."""

    name: str
    short: str
    family: str
    kind: str


@dataclass(frozen=True, slots=True)
class RankLaunches:
    """Launches of traces, aggregated into groups."""

    groups: list[tuple[int, ...]]
    """The groups, as tuples (trace, place, kernel, launch configuration, launches, total_ns, cell).

    `launches` is the number of launches. `total_ns` is a time, or -1 if the time is unknown. The
    other elements are IDs.
    """
    places: dict[int, str]  # maps the ID of a place to its range, or to its config and backend
    kernels: dict[int, RankKernel]
