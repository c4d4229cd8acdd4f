"""The state that a worker process keeps between cells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.cuda import synchronize

from profharness.attention.backends import read_sources
from profharness.device_types import is_gpu
from profharness.recording.worker.program import Program
from profharness.recording.worker.timing import ClockReader, L2Flush
from profharness.run import Plan


@dataclass(frozen=True)
class Workspace:
    """The state that a worker keeps between cells. `clocks` is None on a CPU and under a profiler."""

    device: str
    folder: Path
    plan: Plan
    clocks: ClockReader | None
    flush: L2Flush
    sources: dict[str, str]

    def sync(self) -> None:
        if is_gpu(self.device):
            synchronize()


def open_workspace(program: Program) -> Workspace:
    """Create the workspace of a worker process."""
    folder, plan, device = program.folder, program.plan, program.device
    clocks = ClockReader() if is_gpu(device) and not plan.wrapped else None
    return Workspace(device, folder, plan, clocks, L2Flush(), read_sources(folder))
