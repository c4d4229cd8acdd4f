"""What the rules look at, and small helpers that turn figures into evidence and words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from profharness.analysis.figures import FUSED_ROLES, is_unfused
from profharness.analysis.model import (
    DERIVED,
    MEASURED,
    Evidence,
    Figures,
    Finding,
    KernelFigures,
    Machine,
    PhaseFigures,
)
from profharness.config import Config

KIB, MIB = 1024, 1 << 20
FLUSHED = "event samples, L2 flushed"
BASIS_SOURCE = {
    "kernel": "profiled launches of one call",
    "graph": "graph samples, L2 warm",
    "event": FLUSHED,
    "wall": "wall samples",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """One cell, ready for the rules. main is None where there is no kernel with a grid."""

    config: Config
    backend: str
    machine: Machine
    figures: Figures
    kernels: tuple[KernelFigures, ...]
    phases: tuple[PhaseFigures, ...]
    main: KernelFigures | None

    @property
    def unfused(self) -> bool:
        return is_unfused(self.kernels)

    @property
    def l2_bytes(self) -> int | None:
        """What the run's machine told, else the peaks'."""
        told = self.machine.l2_bytes
        return told or (self.machine.peaks.l2_bytes if self.machine.peaks else None)

    @property
    def num_sms(self) -> int | None:
        return self.machine.device.num_sms if self.machine.device else None

    @property
    def fused(self) -> tuple[KernelFigures, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.role in FUSED_ROLES)

    def share_of(self, *roles: str) -> float:
        """Share of the kernels' time, 0 to 1, that these roles take."""
        return sum(kernel.share or 0 for kernel in self.kernels if kernel.role in roles)

    def duration(self) -> Evidence:
        """The time that rates rest on, as evidence."""
        basis = self.figures.basis or ""
        return us(f"{basis} time", self.figures.duration_ns or 0, BASIS_SOURCE[basis])


Rule = Callable[[Facts], list[Finding]]


def us(name: str, value_ns: float, source: str) -> Evidence:
    """A time as evidence, in microseconds."""
    return Evidence(name, round(value_ns / 1e3, 3), "µs", source)


def size(value: float) -> str:
    """Bytes in the unit that people would use: `16.8 MB`, `64.0 kB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


def percent(value: float) -> str:
    """A share as text: `38.5 %`."""
    return f"{100 * value:.1f} %"


__all__ = [
    "BASIS_SOURCE",
    "DERIVED",
    "FLUSHED",
    "KIB",
    "MEASURED",
    "MIB",
    "Evidence",
    "Facts",
    "Finding",
    "Rule",
    "percent",
    "size",
    "us",
]
