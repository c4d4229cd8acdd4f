"""Wall time of a whole capture (8 configs x 5 backends, ingest included) over a bare script with the same calls.

python scripts/bench_capture.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONFIGS = HERE / "bench_configs.txt"
BACKENDS = ("auto", "flash", "efficient", "cudnn", "math")


def seconds(argv: list[str]) -> float:
    """Wall time of one command; its output is shown only if it fails."""
    start = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{argv} failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - start


def main() -> None:
    """Interleave the two and print medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    bare: list[float] = []
    captures: list[float] = []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            floor = seconds([sys.executable, str(HERE / "bare_calls.py"), str(CONFIGS), *BACKENDS])
            capture = seconds(
                [
                    *(sys.executable, "-m", "profharness", "capture", "--configs", str(CONFIGS)),
                    *("--backend", ",".join(BACKENDS), "--out", folder),
                    *("--store", f"{folder}/store.db"),
                ]
            )
        if number:  # the first round warms the file cache
            bare.append(floor)
            captures.append(capture)
    ratios = [capture / floor for capture, floor in zip(captures, bare, strict=True)]
    print(f"{'':10} {'median s':>9} {'min s':>8} {'max s':>8}")
    for name, values in (("bare", bare), ("capture", captures)):
        median = statistics.median(values)
        print(f"{name:10} {median:9.2f} {min(values):8.2f} {max(values):8.2f}")
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"ratio {statistics.median(ratios):.2f} ({spread}, {rounds} rounds)")


if __name__ == "__main__":
    main()
