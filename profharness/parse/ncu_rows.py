"""What every reader of an Nsight Compute report gives: its profiled kernels with their values, in
profiled order.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_DOMAIN = "<default domain>"
DURATION = "gpu__time_duration.sum"
DEVICE_PREFIX = "device__attribute_"
CONSTANTS = (DEVICE_PREFIX, "nvlink__")  # facts of the machine, the same for every kernel

Triple = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class NvtxRange:
    """One NVTX range that was open at a launch."""

    domain: str
    name: str


@dataclass(frozen=True, slots=True)
class NcuLaunch:
    """One profiled kernel.

    name is the mangled name, or ncu's demangled text where a CSV has nothing else. values are the
    numeric metrics in the units of the report, texts the others; device attributes stand only in
    the first launch of each device. push_pop lists each domain's stack, outermost first. grid and
    block are a CSV's own columns, None elsewhere.
    """

    name: str
    values: dict[str, float]
    texts: dict[str, str]
    device: int = 0
    stream: int | None = None
    start_end: tuple[NvtxRange, ...] = ()
    push_pop: tuple[NvtxRange, ...] = ()
    grid: Triple | None = None
    block: Triple | None = None


@dataclass(frozen=True, slots=True)
class NcuReport:
    """A report's kernels, and the unit of each metric. skipped counts results that are no kernel:
    whole ranges and graphs.
    """

    launches: list[NcuLaunch]
    units: dict[str, str]
    skipped: int = 0
