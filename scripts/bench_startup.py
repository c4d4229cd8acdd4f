"""Start-up: `profharness --help` over `python -c pass`, and `kernels` on a store of a million launches.

python scripts/bench_startup.py [--launches N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS_PER_CALL = 10


def seconds(argv: list[str]) -> float:
    """Wall time of one command that must succeed."""
    start = time.perf_counter()
    subprocess.run(argv, capture_output=True, check=True)
    return time.perf_counter() - start


def big_run(folder: Path, launches: int) -> Path:
    """A run folder of one cell whose trace has that many launches in `profharness:` ranges."""
    from profharness.config import parse_config
    from profharness.run import Cell, Protocol, Run, TraceFile, write_run

    folder.mkdir()
    calls = launches // KERNELS_PER_CALL
    with (folder / "c0001.torch.json").open("w") as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [\n')
        for call in range(calls):
            file.write(_range(call))
            for number in range(KERNELS_PER_CALL):
                file.write(_launch(call, number))
        file.write(
            '{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {}}\n]}'
        )
    cell = Cell("c0001", parse_config("2,8,512,64,fp16"), "math", "ok", iterations=calls)
    trace = TraceFile("torch", "c0001.torch.json", ("c0001",))
    created = "2026-01-01T00:00:00+00:00"
    write_run(folder, Run("big", created, ("torch",), Protocol(), (cell,), traces=(trace,)))
    return folder


def _range(call: int) -> str:
    event = {
        "ph": "X",
        "cat": "user_annotation",
        "name": "profharness:c0001",
        "pid": 1,
        "tid": 1,
        "ts": call * 1000.0,
        "dur": 900.0,
        "args": {"External id": call},
    }
    return json.dumps(event) + ",\n"


def _launch(call: int, number: int) -> str:
    correlation = call * KERNELS_PER_CALL + number + 1
    at = call * 1000.0 + number * 50
    launch = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": 1,
        "tid": 1,
        "ts": at,
        "dur": 5.0,
        "args": {"cbid": 211, "correlation": correlation},
    }
    resources = {"registers per thread": 32, "shared memory": 0, "stream": 7, "device": 0}
    kernel = {
        "ph": "X",
        "cat": "kernel",
        "name": f"kernel_{number}",
        "pid": 0,
        "tid": 7,
        "ts": at + 10,
        "dur": 20.0 + call % 7,
        "args": {
            **resources,
            "correlation": correlation,
            "grid": [number + 1, 1, 1],
            "block": [128, 1, 1],
        },
    }
    return json.dumps(launch) + ",\n" + json.dumps(kernel) + ",\n"


def main() -> None:
    """Interleave the three and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, store = Path(name), f"{name}/store.db"
        run = big_run(folder / "big", options.launches)
        subprocess.run(
            [sys.executable, "-m", "profharness", "ingest", str(run), "--store", store], check=True
        )
        command = str(Path(sys.executable).with_name("profharness"))
        subjects = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "profharness --help": [command, "--help"],
            f"kernels, {options.launches:,} launches": [command, "kernels", "--store", store],
        }
        found: dict[str, list[float]] = {subject: [] for subject in subjects}
        for _ in range(options.rounds):
            for subject, argv in subjects.items():
                found[subject].append(seconds(argv))
    base = statistics.median(found["python -c pass"])
    print(f"{'':32} {'median ms':>10} {'above pass':>11}")
    for subject, values in found.items():
        median = statistics.median(values)
        print(f"{subject:32} {1e3 * median:10.0f} {1e3 * (median - base):11.0f}")


if __name__ == "__main__":
    main()
