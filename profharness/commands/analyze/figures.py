"""Define the dataclasses of an analysis, and compute the figures of a cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Annotated, Any

from profharness.attention.config import Config
from profharness.attention.costs import REPEAT, compulsory_bytes, flops, phases, working_set_bytes
from profharness.columns import column
from profharness.device_types import device_name
from profharness.devices import (
    Device,
    DeviceFact,
    Peaks,
    data_sheet,
    device_facts,
    flop_peak,
    launch_occupancy,
    ridge,
    run_context,
)
from profharness.program.counters import Counters, metric, read_counters
from profharness.program.roles import (
    FUSED_ROLES,
    assign_roles,
    call_ns,
    launches_per_call,
    score_dtype,
)
from profharness.recording.profilers.ncu import L1_BYTES, L2_BYTES
from profharness.rows import (
    ACTIVE_WARPS,
    COLD,
    COUNTERS,
    DRAM_READ,
    DRAM_WRITE,
    EAGER,
    EVENT,
    GRAPH,
    HOST,
    KERNEL,
    LAUNCH_PROFILERS,
    WALL,
    CellRow,
    KernelRow,
)
from profharness.store import Store
from profharness.traces.kernel_names import parse_kernel_name

MEASURED = "measured"  # from a counter or a timing
DERIVED = "derived"  # from a formula or a launch configuration
PREDICTED = "predicted"  # from the dispatch rules and the atlas, as in `layers`; only for remedies
FASTER = 1.1  # A backend is reported as faster if it is more than this many times faster.
SEVERITIES = ("major", "minor", "note")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One figure that supports a finding."""

    name: str
    value: float | str
    unit: str
    source: str  # the counter, the timing or the formula


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about the performance of a cell, such as `launch_gap`."""

    code: str
    sentence: str
    severity: str  # one of SEVERITIES
    grade: str  # MEASURED or DERIVED
    evidence: tuple[Evidence, ...]
    factor: float | None = None  # the largest possible gain from removing the cause
    basis: str | None = None  # the measurement whose medians `factor` compares, if it was measured


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that may improve the performance of a cell."""

    text: str
    findings: tuple[str, ...]  # codes of the findings that the change addresses
    factor: float | None  # the largest possible gain, or the predicted one; None if it is unknown
    grade: str  # MEASURED, DERIVED or PREDICTED; the text of a predicted remedy contains its gain
    basis: str | None = None  # the measurement whose medians `factor` compares, if it was measured

    @property
    def measured(self) -> bool:
        """Whether `factor` was measured, and is not only an upper bound."""
        return self.findings == ("faster_backend",)


@dataclass(frozen=True, slots=True)
class RunMachine:
    """The machine on which the cells ran. A field is None if its value is unknown."""

    device: Device | None = None
    peaks: Peaks | None = None
    l2_bytes: int | None = None
    tf32: bool = False  # whether matrix products of fp32 inputs may use TF32
    sm_mhz: float | None = None  # median SM clock while the cells were timed
    memory_mhz: float | None = None  # median memory clock while the cells were timed
    host: Mapping[str, Any] = field(default_factory=dict)  # the run's environment
    run: str = ""  # the name of the run
    busy: str | None = (
        None  # the warning that the machine was too busy for reliable times, if it was
    )

    @property
    def name(self) -> str | None:
        """The name of the device, from the traces or, if they do not contain it, from the peaks."""
        named = self.device.name if self.device else None
        return named or (self.peaks.device if self.peaks else None)

    def context(self, *, full: bool = False) -> str:
        """Return a text such as `H200, torch 2.11.0, run NAME`, or "" if the run is unknown."""
        host = self.host if device_name(self.host) else {**self.host, "gpu": self.name}
        return run_context(host, self.run, full=full) if self.run else ""

    @property
    def num_sms(self) -> int | None:
        return self.device.num_sms if self.device else None

    def facts(self) -> tuple[DeviceFact, ...]:
        """Return all known facts about the device, including its data sheet and its peak rates."""
        known = (data_sheet(self.name or "", self.num_sms), self.peaks)
        return device_facts(
            self.device,
            [*{peaks.source: peaks for peaks in known if peaks}.values()],
            l2_bytes=self.l2_bytes,
            sm_mhz=self.sm_mhz,
            memory_mhz=self.memory_mhz,
            host=self.host,
        )


def run_machine(
    store: Store, run: str | None = None, source: str | None = None, cells: Sequence[CellRow] = ()
) -> RunMachine:
    """Return the machine of a run, with the median clocks that were recorded for `cells`.

    `source` is the source of the peak rates. If it is None, measured peaks are preferred.
    """
    environment, devices = store.environment(run), store.devices(run)

    def clock(name: str) -> float | None:
        values = [value for cell in cells if (value := cell.clocks.get(name))]
        return float(median(values)) if values else None

    return RunMachine(
        device=devices[0] if devices else None,
        peaks=store.peaks(run, source),
        l2_bytes=environment.get("l2_bytes"),
        tf32=bool(environment.get("tf32")),
        sm_mhz=clock("sm_mhz"),
        memory_mhz=clock("memory_mhz"),
        host=environment,
        run=store.run_name(store.resolve(run)),
    )


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """One kernel of a cell. Times are in ns per call."""

    role: str
    kernel: Annotated[
        str, column("kernel", importance="key", shrink=True, meaning="short name of the kernel")
    ]
    family: str
    launches_per_call: float
    call_ns: float | None
    share: Annotated[
        float | None,
        column(
            "% of call", "percent", importance="answer", meaning="share of the call's kernel time"
        ),
    ]
    blocks: Annotated[
        int | None,
        column("blocks", "count", importance="detail", meaning="number of blocks in the grid"),
    ]
    threads: int | None
    blocks_per_sm: int | None
    waves: Annotated[
        float | None,
        column(
            "waves",
            "count",
            meaning="number of blocks in the grid, divided by the number of blocks that fit on the device at "
            "once",
        ),
    ]
    occupancy: Annotated[
        float | None,
        column("% occupancy", "percent", importance="detail", meaning="theoretical occupancy"),
    ]
    limiter: str | None
    achieved_occupancy: float | None  # measured by ncu, per launch
    registers_per_thread: int | None
    shared_bytes: int | None
    dram_read_bytes: float | None  # counted by ncu, per launch, as are all byte counts below
    dram_write_bytes: float | None
    ncu_ns: float | None  # duration of a launch under ncu
    grid: tuple[int, int, int] | None = None
    l1_bytes: float | None = None
    l2_bytes: float | None = None
    dtype: str | None = None  # the dtype that the kernel's name contains
    dram_bytes_per_s: Annotated[
        float | None, column("DRAM GB/s", "giga", meaning="traffic to and from DRAM")
    ] = None
    shared_share: Annotated[
        float | None,
        column(
            "% of smem",
            "percent",
            meaning="shared memory of one block, as a share of the shared memory of an SM",
        ),
    ] = None
    counters: Counters = field(default_factory=Counters)


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One phase of the attention computation, such as the product of Q and K."""

    name: Annotated[str, column("phase", importance="key", meaning="step of the call")]
    flops: Annotated[int, column("MFLOP", "mega", meaning="FLOPs of the step")]
    bytes: Annotated[int, column("MiB", "mib", meaning="bytes that the step moves")]
    intensity: Annotated[float | None, column("FLOP/B", "count", meaning="FLOPs per byte")]
    bound: Annotated[
        str | None, column("bound by", importance="answer", meaning="`memory` or `compute`")
    ]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a cell. `flops_share` and `bandwidth_share` are fractions of the peaks."""

    basis: Annotated[
        str | None,
        column(
            "of",
            importance="detail",
            spare=3,
            meaning="the measurement that the rates are based on",
        ),
    ]
    duration_ns: Annotated[
        float | None,
        column(
            "median µs/call",
            "time",
            importance="answer",
            meaning="median time in the measurement that `basis` names",
        ),
    ]
    kernels_ns: float | None
    event_ns: float | None  # median `event` sample, or cold_ns if the run has no `event` samples
    graph_ns: float | None
    wall_ns: float | None
    launches: float
    flops: int
    compulsory_bytes: int
    intensity: Annotated[
        float, column("FLOP/B", "count", importance="detail", meaning="FLOPs per compulsory byte")
    ]
    ridge: float | None
    flops_per_s: Annotated[
        float | None,
        column(
            "TFLOP/s",
            "tera",
            importance="answer",
            meaning="FLOPs per second, from the exact number of FLOPs",
        ),
    ]
    flops_share: Annotated[
        float | None,
        column(
            "% of peak FLOP/s",
            "percent",
            importance="answer",
            meaning="the FLOP rate as a share of the peak rate",
        ),
    ]
    rate: str | None
    bytes_per_s: Annotated[
        float | None, column("GB/s", "giga", meaning="compulsory bytes per second")
    ]
    bandwidth_share: Annotated[
        float | None,
        column(
            "% of peak GB/s", "percent", meaning="the byte rate as a share of the peak bandwidth"
        ),
    ]
    dram_bytes: Annotated[
        float | None,
        column(
            "DRAM MiB",
            "mib",
            importance="detail",
            meaning="DRAM traffic per call, as counted by ncu",
        ),
    ]
    dram_bytes_per_s: float | None  # dram_bytes divided by ncu_ns
    against: str | None
    peak_memory_bytes: int | None
    kv_head_bytes: Annotated[
        int,
        column(
            "K+V KiB/head", "kib", importance="detail", meaning="total size of K and V of one head"
        ),
    ] = 0
    working_set_bytes: int = 0
    cold_ns: float | None = None
    eager_ns: float | None = None
    host_ns: float | None = None
    l2_bytes: float | None = None
    l1_bytes: float | None = None
    ncu_ns: float | None = None  # time of the kernels of a call under ncu, with cold caches
    past_l1: bool = False  # l1_bytes is incomplete, because a kernel bypassed the L1 by TMA copies

    def time_of(self, measurement: str) -> float | None:
        """Return the time of a call by one of the MEASUREMENTS, or None if it is unknown."""
        time: float | None = getattr(self, TIMES.get(measurement, f"{measurement}_ns"))
        return time


TIMES = {KERNEL: "kernels_ns"}
"""Maps a measurement to the field of Figures with its time. The others are `cold_ns` and so on."""


@dataclass(frozen=True, slots=True)
class CellAnalysis:
    """The complete analysis of one cell."""

    run: str
    cell: str
    config: Config
    backend: Annotated[str, column("backend", importance="key", meaning="the requested backend")]
    status: str
    message: str | None
    figures: Figures | None = None
    kernels: tuple[KernelFigures, ...] = ()
    phases: tuple[PhaseFigures, ...] = ()
    findings: tuple[Finding, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    # None if the figures show no bottleneck. The finding `bottleneck` contains the evidence.
    bottleneck: Annotated[
        str | None,
        column("bottleneck", importance="answer", meaning="the bottleneck, in a word or two"),
    ] = None
    machine: RunMachine = field(default_factory=RunMachine)
    main: KernelFigures | None = None
    # The memories in which K and V of one head fit, such as `L2 (51,200 KiB)`, or None if no memory
    # size is known.
    kv_places: tuple[str, ...] | None = None
    module: Annotated[
        str | None,
        column("module", importance="key", shrink=True, meaning="the layers of a program"),
    ] = None
    wrong: bool = False  # whether a verification found wrong results of the backend
    busy: bool = False  # whether the machine was too busy for any time of the cell to be usable
    # why PyTorch refused the config, in short; `message` has PyTorch's own words
    short_reason: str = ""
    lengths: str = ""  # a sentence about the lengths in the config, if they are mean lengths

    @property
    def parts(self) -> str:
        """What the call consists of: a kernel or, on a CPU, an op."""
        on_device = any(kernel.blocks is not None for kernel in self.kernels)
        return "kernel" if on_device or not self.kernels else "op"

    @property
    def l2_size(self) -> int | None:
        """The size of the L2 cache in bytes, or None if it is unknown."""
        peaks = self.machine.peaks
        return self.machine.l2_bytes or (peaks.l2_bytes if peaks else None)

    def share_of(self, *roles: str) -> float:
        """Return the fraction of the kernel time that kernels with these roles take."""
        return sum(kernel.share or 0 for kernel in self.kernels if kernel.role in roles)

    def finding(self, code: str) -> Finding | None:
        """Return the finding with this code, or None if the cell has no such finding."""
        return next((finding for finding in self.findings if finding.code == code), None)


@dataclass(frozen=True, slots=True)
class Analyses:
    """The analyses of several cells, and sentences on what they assume or leave out."""

    cells: Sequence[CellAnalysis]
    caveats: tuple[str, ...] = ()
    launch_limit: str = ""  # a sentence, if the launches limit the steps of the program


SCHEMA = "profharness.analyze/1"
_CELL = ("run", "cell", "config", "backend", "status", "message", "bottleneck")
_LISTS = ("kernels", "phases", "findings", "remedies")
FIELDS = (*_CELL, *(item.name for item in fields(Figures)), *_LISTS, "module")


def analyze_record(analysis: CellAnalysis) -> dict[str, Any]:
    """Return the JSON record of one cell, with the keys of FIELDS."""
    record: dict[str, Any] = dict.fromkeys(FIELDS)
    if analysis.figures is not None:
        record |= asdict(analysis.figures)
    record |= {name: getattr(analysis, name) for name in _CELL}
    record |= {"config": analysis.config.label, "module": analysis.module}
    return record | {name: [asdict(item) for item in getattr(analysis, name)] for name in _LISTS}


BASIS_SOURCE = {
    KERNEL: "number of profiled kernel launches in one call",
    GRAPH: "graph samples, L2 warm",
    COLD: "cold samples, L2 flushed",
    EVENT: "event samples, L2 flushed",
    EAGER: "eager samples, L2 warm",
    WALL: "wall samples",
}
WAVES = "launch__waves_per_multiprocessor"


def kernel_figures(
    rows: Sequence[KernelRow], machine: RunMachine, calls: int
) -> tuple[KernelFigures, ...]:
    """Return the figures of all kernels of one cell in launch order.

    The times come from the first profiler in LAUNCH_PROFILERS that recorded the cell. The counters
    come from ncu.
    """
    timed = next((name for name in LAUNCH_PROFILERS if any(r.profiler == name for r in rows)), None)
    roles = assign_roles(row for row in rows if row.profiler == timed)
    counted = {(row.kernel, row.grid, row.block): row for row in rows if row.profiler in COUNTERS}
    whole = sum(row.total_ns or 0 for _, row in roles)
    figures = []
    for role, row in roles:
        ncu = counted.get((row.kernel, row.grid, row.block))
        metrics = ncu.metrics if ncu else {}
        blocks = math.prod(row.grid) if row.grid else None
        threads = math.prod(row.block) if row.block else None
        fit = launch_occupancy(threads, row, machine.device)
        waves = metric(metrics, WAVES)
        if waves is None and blocks and fit and machine.num_sms:
            waves = blocks / (fit.blocks_per_sm * machine.num_sms)
        active = metric(metrics, ACTIVE_WARPS)
        figures.append(
            KernelFigures(
                role=role,
                kernel=row.kernel_short,
                family=row.family,
                launches_per_call=launches_per_call(row, calls),
                call_ns=call_ns(row, calls),
                share=row.total_ns / whole if row.total_ns and whole else None,
                blocks=blocks,
                threads=threads,
                blocks_per_sm=fit.blocks_per_sm if fit else None,
                waves=waves,
                occupancy=row.occupancy,
                limiter=row.occupancy_limiter,
                achieved_occupancy=None if active is None else active / 100,
                registers_per_thread=row.registers_per_thread,
                shared_bytes=row.shared_bytes,
                dram_read_bytes=metric(metrics, DRAM_READ),
                dram_write_bytes=metric(metrics, DRAM_WRITE),
                ncu_ns=float(ncu.duration_ns) if ncu and ncu.duration_ns else None,
                grid=row.grid,
                l1_bytes=metric(metrics, L1_BYTES),
                l2_bytes=metric(metrics, L2_BYTES),
                dtype=parse_kernel_name(row.kernel, row.kernel_kind).dtype,
                dram_bytes_per_s=ncu.dram_bytes_per_s if ncu else None,
                shared_share=row.shared_share,
                counters=read_counters(metrics),
            )
        )
    return tuple(figures)


def call_kernels_ns(kernels: Sequence[KernelFigures]) -> float | None:
    """Return the mean time of the kernels of a call on a GPU, or None if a time is unknown."""
    times = [kernel.call_ns for kernel in kernels if kernel.call_ns is not None]
    on_device = any(kernel.blocks is not None for kernel in kernels)
    return sum(times) if on_device and len(times) == len(kernels) else None


def cell_figures(
    cell: CellRow,
    config: Config,
    kernels: Sequence[KernelFigures],
    machine: RunMachine,
    exact: tuple[int, int] | None = None,
) -> Figures:
    """Compute the figures of one cell, such as FLOP/s and bytes per second.

    The dtype of `config` must be set. `exact` contains the FLOPs and bytes of a call if the config
    contains only its mean lengths.
    """
    times = {name: float(median(values)) for name, values in cell.samples.items() if values}
    on_device = any(kernel.blocks is not None for kernel in kernels)
    if (kernels_ns := call_kernels_ns(kernels)) is not None:
        times[KERNEL] = kernels_ns
    basis = next((name for name in BASIS_SOURCE if times.get(name)), None)
    duration = times[basis] if basis else None
    work, moved = exact or (flops(config), compulsory_bytes(config))
    peaks = machine.peaks
    rate = flop_peak(peaks, str(config.dtype), tf32=machine.tf32) if peaks else None
    top = peaks.bandwidth_bytes_per_s if peaks else None
    flops_per_s = work / duration * 1e9 if duration else None
    bytes_per_s = moved / duration * 1e9 if duration else None
    dram = _sum_of_call(kernels, "dram_read_bytes", "dram_write_bytes")
    l1, ncu_ns = _sum_of_call(kernels, "l1_bytes"), _sum_of_call(kernels, "ncu_ns")
    one_head = config.seq_len_kv * (config.head_dim + config.value_dim)
    return Figures(
        basis=basis,
        duration_ns=duration,
        kernels_ns=times.get(KERNEL),
        event_ns=times.get(EVENT, times.get(COLD)),
        graph_ns=times.get(GRAPH),
        wall_ns=times.get(WALL),
        launches=sum(kernel.launches_per_call for kernel in kernels) if on_device else 0,
        flops=work,
        compulsory_bytes=moved,
        intensity=work / moved,
        ridge=ridge(peaks, str(config.dtype), tf32=machine.tf32) if peaks else None,
        flops_per_s=flops_per_s,
        flops_share=flops_per_s / rate[1] if flops_per_s and rate else None,
        rate=rate[0] if rate else None,
        bytes_per_s=bytes_per_s,
        bandwidth_share=bytes_per_s / top if bytes_per_s and top else None,
        dram_bytes=dram,
        dram_bytes_per_s=dram / ncu_ns * 1e9 if dram is not None and ncu_ns else None,
        against=peaks.source if peaks else None,
        peak_memory_bytes=cell.peak_memory_bytes,
        kv_head_bytes=one_head * (4 if config.dtype == "fp32" else 2),
        working_set_bytes=working_set_bytes(config),
        cold_ns=times.get(COLD),
        eager_ns=times.get(EAGER),
        host_ns=times.get(HOST),
        l2_bytes=_sum_of_call(kernels, "l2_bytes"),
        l1_bytes=l1,
        ncu_ns=ncu_ns,
        past_l1=bool(kernels_past_l1(kernels)) or (l1 is not None and l1 < moved),
    )


def _sum_of_call(kernels: Sequence[KernelFigures], name: str, *others: str) -> float | None:
    """Return the sum of one or more counters over the kernels of a call, without copies and fills.

    Return None if ncu did not record the counter `name` for every kernel.
    """
    launched = [kernel for kernel in kernels if kernel.blocks is not None]
    if not launched or any(getattr(kernel, name) is None for kernel in launched):
        return None
    return sum(
        sum(getattr(kernel, each) or 0 for each in (name, *others)) * kernel.launches_per_call
        for kernel in launched
    )


# A kernel that counts less than this fraction of its L2 bytes in the L1 bypasses the L1. On an
# H200, the fraction is below 0.001 for kernels that load by TMA and above 0.1 for other kernels.
# Very small kernels come close to 0.1 because of cold reads from the L2, so kernels that move less
# than a tenth of the cell's L2 bytes are ignored.
PAST_L1 = 0.1


def kernels_past_l1(kernels: Sequence[KernelFigures]) -> list[KernelFigures]:
    """Return the kernels that bypass the L1 and move at least a tenth of the cell's L2 bytes.

    Such a kernel copies by TMA from the L2 to shared memory, and the L1 does not count these bytes.
    """
    total = sum(kernel.l2_bytes or 0 for kernel in kernels)
    return [
        kernel
        for kernel in kernels
        if kernel.l1_bytes is not None
        and kernel.l1_bytes < (kernel.l2_bytes or 0) * PAST_L1
        and (kernel.l2_bytes or 0) >= total * PAST_L1
    ]


def stored_score_dtype(config: Config, kernels: Sequence[KernelFigures]) -> str | None:
    """Return the dtype of the score matrices, or None if the kernels store no scores in memory."""
    return score_dtype(str(config.dtype), [(kernel.role, kernel.dtype) for kernel in kernels])


def phase_figures(
    config: Config, kernels: Sequence[KernelFigures], ridge_point: float | None
) -> tuple[PhaseFigures, ...]:
    """Return the phases of the attention computation that the kernels execute, with their figures.

    `ridge_point` is the intensity below which a matrix product is limited by memory, or None if it
    is unknown.
    """
    copies = any(kernel.role == "copy" for kernel in kernels)
    result = []
    for phase in phases(config, stored_score_dtype(config, kernels)):
        if phase.name == REPEAT and not copies:
            continue
        bound = None
        if ridge_point is not None and phase.intensity is not None and phase.matmul:
            bound = "compute" if phase.intensity >= ridge_point else "memory"
        elif phase.bytes and not phase.matmul:
            # Products have their own units. Other phases above the ridge may be limited by either.
            below = ridge_point is None or phase.intensity is None or phase.intensity < ridge_point
            bound = "memory" if below else None
        result.append(PhaseFigures(phase.name, phase.flops, phase.bytes, phase.intensity, bound))
    return tuple(result)


def main_kernel(kernels: Sequence[KernelFigures]) -> KernelFigures | None:
    """Return the fused attention kernel that takes the longest time per call.

    If no kernel is fused, return the kernel that takes the longest time. Kernels without a grid are
    ignored. Return None if no kernel has a grid.
    """
    own = [kernel for kernel in kernels if kernel.blocks is not None]
    fused = [kernel for kernel in own if kernel.role in FUSED_ROLES]
    return max(fused or own, key=lambda kernel: kernel.call_ns or 0, default=None)
