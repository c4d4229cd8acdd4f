"""Measure start-up: `profharness --help` against `python -c pass`, `predict` of one config, and
`kernels` on a store of a million launches.

python scripts/bench_startup.py [--launches N] [--rounds N]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _frame import in_turns, output, parser, seconds

from profharness.attention.config import parse_config
from profharness.run import Cell, Protocol, Run, TraceFile, write_run

KERNELS_PER_CALL = 10
RESOURCES = {"registers per thread": 32, "shared memory": 0, "stream": 7, "device": 0}


def big_run(folder: Path, launches: int) -> Path:
    """Return a run folder of one cell whose trace has this many launches in `profharness:` ranges."""
    folder.mkdir()
    calls = launches // KERNELS_PER_CALL
    with (folder / "c0001.torch.json").open("w") as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [\n')
        for call in range(calls):
            file.writelines(json.dumps(event) + ",\n" for event in events(call))
        file.write(
            '{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {}}\n]}'
        )
    cell = Cell("c0001", parse_config("2,8,512,64,fp16"), "math", "ok", iterations=calls)
    trace = TraceFile("torch", "c0001.torch.json", ("c0001",))
    created = "2026-01-01T00:00:00+00:00"
    write_run(folder, Run("big", created, ("torch",), Protocol(), (cell,), traces=(trace,)))
    return folder


def events(call: int) -> Iterator[dict[str, Any]]:
    """Yield the range of a call, and the runtime call and kernel of each launch."""
    start, host = call * 1000.0, {"ph": "X", "pid": 1, "tid": 1}
    name = {"cat": "user_annotation", "name": "profharness:c0001"}
    yield {**host, **name, "ts": start, "dur": 900.0, "args": {"External id": call}}
    for number in range(KERNELS_PER_CALL):
        at = start + number * 50
        args: dict[str, Any] = {"correlation": call * KERNELS_PER_CALL + number + 1}
        name = {"cat": "cuda_runtime", "name": "cudaLaunchKernel"}
        yield {**host, **name, "ts": at, "dur": 5.0, "args": {"cbid": 211, **args}}
        name = {"cat": "kernel", "name": f"kernel_{number}"}
        args |= {**RESOURCES, "grid": [number + 1, 1, 1], "block": [128, 1, 1]}
        device = {"ph": "X", "pid": 0, "tid": 7}
        yield {**device, **name, "ts": at + 10, "dur": 20.0 + call % 7, "args": args}


def main() -> None:
    """Interleave the three, and print medians."""
    made = parser(__doc__, rounds=7)
    made.add_argument("--launches", type=int, default=1_000_000)
    options = made.parse_args()
    command = str(Path(sys.executable).with_name("profharness"))
    with tempfile.TemporaryDirectory() as name:
        store = ("--store", f"{name}/store.db")
        run = big_run(Path(name) / "big", options.launches)
        output([command, "ingest", str(run), *store])
        config = ["--config", "2,8,512,64,bf16", "--gpu", "H200"]
        subjects = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "profharness --help": [command, "--help"],
            "predict, one config": [command, "predict", *config],
            "predict, one config, as JSON": [command, "predict", *config, "--format", "json"],
            f"kernels, {options.launches:,} launches": [command, "kernels", *store],
        }
        times = in_turns(list(subjects), lambda name: seconds(subjects[name]), options.rounds)
    medians = {subject: statistics.median(values) for subject, values in times.items()}
    print(f"{'':32} {'median ms':>10} {'above pass':>11}")
    for subject, median in medians.items():
        above = median - medians["python -c pass"]
        print(f"{subject:32} {1e3 * median:10.0f} {1e3 * above:11.0f}")


if __name__ == "__main__":
    main()
