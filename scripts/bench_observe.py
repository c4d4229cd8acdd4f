"""What observing costs: µs an attention call, µs another op, ms a start of Python.

python scripts/bench_observe.py [--rounds 15]

Each figure is the difference of two medians of CPU time, taken in turns with and without.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

STARTUP = Path(__file__).resolve().parents[1] / "profharness" / "observer" / "startup"
CALLS = 500


def main() -> None:
    """Print the three figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"attention call  {calls(rounds):+8.2f} µs")
    print(f"other op        {other_ops(rounds):+8.2f} µs")
    print(f"start of Python {starts(rounds):+8.2f} ms")


class Attention(torch.nn.Module):
    """As deep a stack as a layer's."""

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        for _ in range(CALLS):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return q


def calls(rounds: int) -> float:
    """µs that a recorded call takes more."""
    q, module = torch.randn(1, 2, 4, 8), torch.nn.Sequential(Attention())
    return pair(rounds, lambda: module(q), CALLS)


def other_ops(rounds: int) -> float:
    """µs that any other op takes more."""
    x = torch.randn(8)

    def work() -> None:
        for _ in range(CALLS):
            torch.relu(x)

    return pair(rounds, work, CALLS)


def pair(rounds: int, work: Callable[[], Any], count: int) -> float:
    """The difference of the medians with and without a recorder, for one of count."""
    seen = importlib.import_module("profharness.observer.seen")
    wrapper = importlib.import_module("profharness.observer.wrapper")
    without, recorded = [], []
    for _ in range(rounds):
        F.scaled_dot_product_attention = wrapper.sd
        without.append(cpu_ns(work))
        with seen.observe():
            work()
            recorded.append(cpu_ns(work))
    difference = statistics.median(recorded) - statistics.median(without)
    return difference / count / 1e3


def cpu_ns(work: Callable[[], Any]) -> int:
    """CPU time of this thread."""
    begin = time.thread_time_ns()
    work()
    return time.thread_time_ns() - begin


def starts(rounds: int) -> float:
    """ms of CPU time that a start of Python takes more."""
    with tempfile.TemporaryDirectory() as folder:
        plain = {**os.environ, "PYTHONPATH": ""}
        observed = {**plain, "PYTHONPATH": str(STARTUP), "PROFHARNESS_OBSERVE": folder}
        start_ms(observed)
        both = [(start_ms(plain), start_ms(observed)) for _ in range(rounds)]
    without, with_it = zip(*both, strict=True)
    return statistics.median(with_it) - statistics.median(without)


def start_ms(environment: dict[str, str]) -> float:
    """ms of CPU time of an empty program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "pass"], env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


if __name__ == "__main__":
    main()
