"""Wall time of captures under nsys and ncu (8 configs x 5 backends, export and ingest included)
over the bare tools on a bare script with the same calls.

python scripts/bench_nsight.py [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from profharness.profilers import require_tool
from profharness.run import Protocol

HERE = Path(__file__).resolve().parent
CONFIGS = HERE / "bench_configs.txt"
BACKENDS = ("auto", "flash", "efficient", "cudnn", "math")
FIRST_CALL = 1
TRACED = Protocol().warmup + Protocol().iterations + FIRST_CALL
REPLAYED = Protocol().warmup + FIRST_CALL + 1


def seconds(argv: list[str]) -> float:
    """Wall time of one command; its output is shown only if it fails."""
    start = time.perf_counter()
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"}
    )
    if done.returncode:
        raise SystemExit(f"{argv} failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - start


def bare(calls: int, *more: str) -> list[str]:
    """The bare script's argv."""
    script = [sys.executable, str(HERE / "bare_calls.py"), "--calls", str(calls), *more]
    return [*script, str(CONFIGS), *BACKENDS]


def capture(profiler: str, folder: Path) -> list[str]:
    """The capture's argv."""
    return [
        *(sys.executable, "-m", "profharness", "capture", "--configs", str(CONFIGS)),
        *("--backend", ",".join(BACKENDS), "--profiler", profiler, "--out", str(folder)),
        *("--store", str(folder / f"{profiler}.db")),
    ]


def commands(folder: Path) -> dict[str, list[str]]:
    """What is timed, by name."""
    nsys, ncu = (str(require_tool(name).path) for name in ("nsys", "ncu"))
    duration = [ncu, "--metrics", "gpu__time_duration.sum", "-f", "-o", str(folder / "bare")]
    in_range = ["--nvtx", "--nvtx-include", "profharness@bare"]
    trace = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true"]
    return {
        "script": bare(REPLAYED),
        "nsys": [nsys, "profile", *trace, f"--output={folder / 'bare'}", *bare(TRACED)],
        "nsys capture": capture("nsys", folder),
        "ncu": [*duration, *bare(REPLAYED)],
        "ncu in ranges": [*duration, *in_range, *bare(REPLAYED, "--range")],
        "ncu capture": capture("ncu", folder),
    }


def kernels(store: Path) -> int:
    """Launches in a store."""
    with sqlite3.connect(store) as connection:
        return int(connection.execute("SELECT count(*) FROM launches").fetchone()[0])


def main() -> None:
    """Interleave all commands and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {}
    found = 0
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            for what, argv in commands(Path(name)).items():
                took = seconds(argv)
                if number:  # the first round warms the file cache
                    times.setdefault(what, []).append(took)
            found = kernels(Path(name) / "ncu.db")
    print(f"{'':14} {'median s':>9} {'min s':>8} {'max s':>8}")
    for what, values in times.items():
        print(f"{what:14} {statistics.median(values):9.2f} {min(values):8.2f} {max(values):8.2f}")
    for one, other in (
        ("nsys capture", "nsys"),
        ("ncu capture", "ncu"),
        ("ncu capture", "ncu in ranges"),
    ):
        ratios = [a / b for a, b in zip(times[one], times[other], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{one} / {other}: {statistics.median(ratios):.2f} ({spread}, {rounds} rounds)")
    above = statistics.median(times["ncu capture"]) - statistics.median(times["script"])
    cost = above / found
    print(
        f"{found} kernels under ncu: {1000 * cost:.1f} ms each above the script without a profiler"
    )


if __name__ == "__main__":
    main()
