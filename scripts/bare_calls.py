"""The same attention calls that a capture makes, without any profiler: the floor that
`bench_capture.py` compares with.

python scripts/bare_calls.py CONFIGS_FILE BACKEND… [--calls N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from profharness.backends import find_backend
from profharness.config import parse_config_lines
from profharness.worker.inputs import make_call, make_inputs


def main() -> None:
    """Call each config on each backend `--calls` times, synchronised once per cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", type=Path)
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--calls", type=int, default=40, help="calls per cell (default 40)")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lines = arguments.configs.read_text().splitlines()
    refused = 0
    for config in parse_config_lines(lines, str(arguments.configs)):
        inputs = make_inputs(config.resolve(device), device, 0)
        call = make_call(config, inputs)
        for name in arguments.backends:
            with find_backend(name).context():
                try:
                    for _ in range(arguments.calls):
                        call()
                except RuntimeError:
                    refused += 1
            if device == "cuda":
                torch.cuda.synchronize()
    print(f"{refused} cells refused")


if __name__ == "__main__":
    main()
