"""What a bench is asked for besides configs and backends; it lies in the run folder, for the worker
and for whoever resumes the run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from profharness.errors import UsageError

BENCH_FILE = "bench.json"
MEASUREMENTS = ("event", "graph", "kernel")
RANKING = ("event", "graph", "kernel", "wall")
PRECISION = 0.01
WIDE = "the median is known to"  # how the doubt begins that every short run has
_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0}


@dataclass(frozen=True)
class BenchPlan:
    """precision: half the width of the 95 % interval over the median at which a measurement is
    done; max_time_s: seconds of sampling that one cell may take; iterations fixes the samples of
    each measurement instead (None: until precise or out of time). measurements are of `MEASUREMENTS`;
    on a CPU the wall clock stands in for all of them. The first one ranks.
    """

    measurements: tuple[str, ...] = MEASUREMENTS
    precision: float = PRECISION
    max_time_s: float = 10.0
    iterations: int | None = None

    def on(self, device: str) -> tuple[str, ...]:
        """The measurements that exist on a device, `cuda` or `cpu`."""
        return self.measurements if device == "cuda" else ("wall",)


def make_plan(
    measurements: Sequence[str], precision: float, max_time_s: float, iterations: int | None = None
) -> BenchPlan:
    """A plan that can be meant. Raises UsageError for an unknown measurement."""
    for name in measurements:
        if name not in MEASUREMENTS:
            raise UsageError(f"no measurement {name!r}; known are {', '.join(MEASUREMENTS)}")
    chosen = tuple(dict.fromkeys(measurements)) or MEASUREMENTS
    return BenchPlan(chosen, precision, max_time_s, iterations)


def parse_precision(text: str) -> float:
    """`1%` or `0.01` as a fraction above 0 and below 1. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value < 1:
        raise UsageError(f"precision {text!r}: write 1% or 0.01, above 0 and below 100%")
    return value


def parse_seconds(text: str) -> float:
    """`30`, `30s`, `500ms` or `2m` in seconds, above 0. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(ms|s|min|m|)\s*", text)
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if value <= 0:
        raise UsageError(f"time {text!r}: write 30s, 500ms or 2m")
    return value


def turn_order(seed: int, config: str, round_number: int, count: int) -> list[int]:
    """The places 0 to count - 1 in the order of one round, the same for the same arguments."""
    order = list(range(count))
    random.Random(f"{seed}/{config}/{round_number}").shuffle(order)
    return order


def write_plan(folder: Path, plan: BenchPlan) -> None:
    """Leave the plan in a run folder."""
    (folder / BENCH_FILE).write_bytes(msgspec.json.encode(plan))


def read_plan(folder: Path) -> BenchPlan | None:
    """What `write_plan` left; None for a run that is no bench."""
    try:
        return msgspec.json.decode((folder / BENCH_FILE).read_bytes(), type=BenchPlan)
    except FileNotFoundError:
        return None
