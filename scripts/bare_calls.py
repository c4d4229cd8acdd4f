"""The same attention calls that a capture makes, without any profiler: the floor that `bench_capture.py` compares with.

python scripts/bare_calls.py CONFIGS_FILE BACKEND…
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from profharness.backends import find_backend
from profharness.config import parse_config_lines
from profharness.record import Protocol
from profharness.worker.inputs import make_call, make_inputs
from profharness.worker.timing import BUDGET_S, MIN_SAMPLES

WARMUP_CALL = 1  # the one that opens a profiler session


def main() -> None:
    """Call each config on each backend as often as a capture with the default protocol does."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = Path(sys.argv[1])
    refused = 0
    for config in parse_config_lines(path.read_text().splitlines(), str(path)):
        call = make_call(config, make_inputs(config.resolve(device), device, 0))
        for name in sys.argv[2:]:
            with find_backend(name).context():
                try:
                    call()
                    calls(call, device)
                except RuntimeError:
                    refused += 1
    print(f"{refused} cells refused")


def calls(call: Callable[[], Any], device: str) -> None:
    """Warm-up and profiled calls, then as many as the event timing makes within its budget."""
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
