"""Make the attention calls of a capture without any profiler, as the baseline of
`bench_capture.py`.

python scripts/bare_calls.py [--calls N] [--range] CONFIGS_FILE BACKEND…
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvtx
import torch

from profharness.attention.backends import find_backend
from profharness.attention.config import parse_config_lines
from profharness.recording.worker.attention import make_call, make_inputs
from profharness.recording.worker.timing import MIN_SAMPLES
from profharness.run import Protocol

WARMUP_CALL = 1  # the call that opens a profiler session
BUDGET_S = 0.5  # of the calls that replace samples; shorter than a capture's, as a lower bound


def main() -> None:
    """Call each config on each backend as often as a capture with the default protocol does, or
    --calls times. --range opens an NVTX range around the last call.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--range", action="store_true")
    parser.add_argument("configs", type=Path)
    parser.add_argument("backends", nargs="+")
    asked = parser.parse_args()
    begin, refused = time.perf_counter(), 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for config in parse_config_lines(asked.configs.read_text().splitlines(), str(asked.configs)):
        call = make_call(config, make_inputs(config.resolve(device), device, 0))
        for name in asked.backends:
            with find_backend(name).context():
                try:
                    call()
                    if asked.calls:
                        few_calls(call, asked.calls - 1, in_range=asked.range)
                    else:
                        calls(call, device)
                except RuntimeError:
                    refused += 1
    print(f"{refused} cells refused")
    print(f"calls and inputs: {time.perf_counter() - begin:.3f} s")


def few_calls(call: Callable[[], Any], count: int, *, in_range: bool) -> None:
    """Make `count` calls, the last one in a process-wide range if `in_range`."""
    for _ in range(count - 1):
        call()
    with contextlib.ExitStack() as stack:
        if in_range:
            opened = nvtx.start_range("bare", domain="profharness")
            stack.callback(nvtx.end_range, opened)
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def calls(call: Callable[[], Any], device: str) -> None:
    """Make the warm-up and profiled calls, then one call per sample within the budget."""
    protocol = Protocol()
    for _ in range(protocol.warmup + WARMUP_CALL + protocol.iterations):
        call()
    deadline = time.perf_counter() + BUDGET_S
    for index in range(protocol.samples):
        call()
        if device == "cuda" and index % 8 == 7:
            torch.cuda.synchronize()
        if index + 1 >= MIN_SAMPLES and time.perf_counter() > deadline:
            break


if __name__ == "__main__":
    main()
