from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from profharness.backends import (
    read_sources,
)
from profharness.run import Plan
from profharness.worker import timing
from profharness.worker.timing import ClockReader


@dataclass(frozen=True)
class Bench:
    """What a worker keeps from cell to cell."""

    device: str
    folder: Path
    plan: Plan
    read_clocks: Callable[[], dict[str, Any]]
    flush: timing.L2Flush
    sources: dict[str, str]

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def open_bench(folder: Path, plan: Plan, device: str) -> Bench:
    """The bench of one worker process on one device."""
    reader = ClockReader() if device == "cuda" and not plan.wrapped else dict
    return Bench(device, folder, plan, reader, timing.L2Flush(), read_sources(folder))
