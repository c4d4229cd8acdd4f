"""The answers of an analysis as frozen data: figures, evidence, findings, remedies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from profharness.config import Config
from profharness.devices import Device, Peaks

MEASURED = "measured"  # from a counter or a timing
DERIVED = "derived"  # from a formula or a launch configuration
SEVERITIES = ("major", "minor", "note")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One figure that a finding rests on. source: the counter, the timing or the formula."""

    name: str
    value: float | str
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about a cell. severity is one of SEVERITIES; factor is what removing the cause
    gains at most.
    """

    code: str
    sentence: str
    severity: str
    grade: str
    evidence: tuple[Evidence, ...]
    factor: float | None = None


@dataclass(frozen=True, slots=True)
class Remedy:
    """What helps, tied to the codes of findings; grade says what the factor rests on."""

    text: str
    findings: tuple[str, ...]
    factor: float | None
    grade: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the cells ran; None where it is not known. tf32: fp32 products may use TF32."""

    device: Device | None = None
    peaks: Peaks | None = None
    l2_bytes: int | None = None
    tf32: bool = False
    fp16_math: bool = False


def machine_of(
    environment: Mapping[str, Any], devices: Sequence[Device], peaks: Peaks | None
) -> Machine:
    """The machine of a run, from what the store tells: environment, devices, peaks."""
    return Machine(
        device=devices[0] if devices else None,
        peaks=peaks,
        l2_bytes=environment.get("l2_bytes"),
        tf32=bool(environment.get("tf32")),
        fp16_math=bool(environment.get("fp16_reduction_math")),
    )


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """One kernel of a cell, times in ns per call. waves are blocks over those that fit at once.
    achieved_occupancy, ncu_ns and what counts bytes are ncu's, per launch.
    """

    role: str
    kernel: str
    family: str
    launches_per_call: float
    call_ns: float | None
    share: float | None
    blocks: int | None
    threads: int | None
    blocks_per_sm: int | None
    waves: float | None
    occupancy: float | None
    limiter: str | None
    achieved_occupancy: float | None
    registers_per_thread: int | None
    shared_bytes: int | None
    dram_read_bytes: float | None
    dram_write_bytes: float | None
    ncu_ns: float | None
    grid: tuple[int, int, int] | None = None
    l1_bytes: float | None = None
    l2_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One phase of the call; bound is `memory`, `compute` or None."""

    name: str
    flops: int
    bytes: int
    intensity: float | None
    bound: str | None


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a cell. basis names the time behind the rates: `kernel`, `graph`, `event` or
    `wall`; duration_ns is its median. Shares are of the peak. dram_bytes are those of a call,
    dram_bytes_per_s is over ncu's own time.
    """

    basis: str | None
    duration_ns: float | None
    kernels_ns: float | None
    event_ns: float | None
    graph_ns: float | None
    wall_ns: float | None
    launches: float
    flops: int
    compulsory_bytes: int
    intensity: float
    ridge: float | None
    flops_per_s: float | None
    flops_share: float | None
    rate: str | None
    bytes_per_s: float | None
    bandwidth_share: float | None
    dram_bytes: float | None
    dram_bytes_per_s: float | None
    against: str | None
    peak_memory_bytes: int | None
    kv_head_bytes: int = 0
    working_set_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CellAnalysis:
    """Everything about one cell. bottleneck is one word, None where nothing decides; its finding
    holds the evidence. kv_places (`shared`, `L1`, `L2`) hold K and V of one head, None where sizes
    are unknown.
    """

    run: str
    cell: str
    config: Config
    backend: str
    status: str
    message: str | None
    figures: Figures | None = None
    kernels: tuple[KernelFigures, ...] = ()
    phases: tuple[PhaseFigures, ...] = ()
    findings: tuple[Finding, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    bottleneck: str | None = None
    machine: Machine = field(default_factory=Machine)
    main: KernelFigures | None = None
    kv_places: tuple[str, ...] | None = None

    def finding(self, code: str) -> Finding | None:
        """The finding with this code, None if it was not made."""
        return next((each for each in self.findings if each.code == code), None)


SCHEMA = "profharness.analyze/1"
_CELL = ("run", "cell", "config", "backend", "status", "message", "bottleneck")
_LISTS = ("kernels", "phases", "findings", "remedies")
FIELDS = (*_CELL, *(item.name for item in fields(Figures)), *_LISTS)


def analyze_record(each: CellAnalysis) -> dict[str, Any]:
    """The JSON record of one cell; keys as in FIELDS."""
    record: dict[str, Any] = dict.fromkeys(FIELDS)
    if each.figures is not None:
        record |= asdict(each.figures)
    record |= {name: getattr(each, name) for name in _CELL}
    record["config"] = each.config.label
    return record | {name: [asdict(item) for item in getattr(each, name)] for name in _LISTS}
