"""Measure the overhead of `observe`: µs per attention call, µs per other op, ms per start of
Python.

python scripts/bench_observe.py [--rounds 200]

Each figure is the median difference in CPU time with and without `observe`, in alternating
rounds.
"""

from __future__ import annotations

import argparse
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

from profharness.recording.observer import wrapper

STARTUP = Path(__file__).resolve().parents[1] / "profharness" / "recording" / "observer" / "startup"
CALLS = 100


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"attention call  {calls(rounds, recorded=True):+8.2f} µs")
    print(f"empty wrapper   {calls(rounds, recorded=False):+8.2f} µs, the minimum for any wrapper")
    print(f"other op        {other_ops(rounds):+8.2f} µs")
    print(f"start of Python {starts(min(rounds, 15)):+8.2f} ms")


class Attention(torch.nn.Module):
    """One call, as in a layer of a model."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layers(torch.nn.Module):
    """As many layers as calls, because each layer has its own record."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention() for _ in range(CALLS))

    def forward(self, *tensors: torch.Tensor) -> None:
        for layer in self.layers:
            layer(*tensors)


class Empty:
    """A wrapper that only calls the builtin."""

    def __call__(self, *a: Any, **k: Any) -> Any:
        return wrapper.sd(*a, **k)


def calls(rounds: int, *, recorded: bool) -> float:
    """Return the additional µs of a recorded call, or of one through an empty wrapper."""
    model, tensors = Layers(), torch.randn(3, 1, 2, 4, 8).unbind()
    with torch.no_grad():
        return pair(rounds, lambda: model(*tensors), wrapper.wrapper if recorded else Empty())


def other_ops(rounds: int) -> float:
    """Return the additional µs of any other op."""
    x = torch.randn(8)

    def work() -> None:
        for _ in range(CALLS):
            torch.relu(x)

    return pair(rounds, work, wrapper.wrapper)


def pair(rounds: int, work: Callable[[], Any], attention: Any) -> float:
    """Return the median difference with and without a recorder, per call."""
    differences = []
    with wrapper.observe():
        for each in range(rounds):
            took = {}
            for function in (wrapper.sd, attention)[:: 1 if each % 2 else -1]:
                F.scaled_dot_product_attention = function
                work()
                took[function is attention] = cpu_ns(work)
            differences.append(took[True] - took[False])
    return statistics.median(differences) / CALLS / 1e3


def cpu_ns(work: Callable[[], Any]) -> int:
    """Return the CPU time of this thread."""
    begin = time.thread_time_ns()
    work()
    return time.thread_time_ns() - begin


def starts(rounds: int) -> float:
    """Return the additional CPU time of a start of Python, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        plain = {**os.environ, "PYTHONPATH": ""}
        observed = {**plain, "PYTHONPATH": str(STARTUP), "PROFHARNESS_OBSERVE": folder}
        start_ms(observed)
        both = [(start_ms(plain), start_ms(observed)) for _ in range(rounds)]
    without, with_it = zip(*both, strict=True)
    return statistics.median(with_it) - statistics.median(without)


def start_ms(environment: dict[str, str]) -> float:
    """Return the CPU time of an empty program, in ms."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "pass"], env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


if __name__ == "__main__":
    main()
