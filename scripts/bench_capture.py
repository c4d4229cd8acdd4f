"""Compare the wall time of a capture (8 configs x 5 backends, including ingest) with a bare script
that makes the same calls, and show where the capture spends it.

python scripts/bench_capture.py [--rounds N]
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _frame import bare_calls, capture, in_turns, output, parser, print_ratio, print_times

from profharness.run import JOURNAL_FILE, PLAN_FILE

LOOK_S = 0.001
COMMAND, WORKER, PROGRAM = "the command starts", "torch, CUDA", "the worker's program"
BETWEEN, STORED = "between cells", "ingest, end"
STAGES = {"begin": "find the backend", "inputs": "inputs, first calls", "warm-up": "warm-up"}
# Phase that follows each kind of journal entry.
Phases = dict[str, float]


def measure(subject: str) -> Phases:
    """Return the seconds of one subject by phase, in a new folder. Loading torch is a separate
    phase.
    """
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        if subject == "capture":
            return split(list(events(capture(Path(folder)), Path(folder))))
        calls = float(output(bare_calls()).splitlines()[-1].split()[-2])
        return {WORKER: time.perf_counter() - begin - calls, "calls": calls}


def events(argv: Sequence[str], folder: Path) -> Iterator[tuple[float, str]]:
    """Run a capture. Yield the start of each phase with its name, as seen in its files."""
    begin, done = time.perf_counter(), 0
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
        yield begin, COMMAND
        planned = False
        while process.poll() is None:
            time.sleep(LOOK_S)
            now = time.perf_counter()
            if not planned and any(folder.glob(f"*/{PLAN_FILE}")):
                planned = True
                yield now, WORKER
            for line in lines(folder)[done:]:
                done += 1
                yield now, phase(json.loads(line))
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{argv} failed:\n{log.read().decode()}")
    yield time.perf_counter(), ""


def lines(folder: Path) -> list[bytes]:
    """Return the complete lines of the journal so far."""
    for path in folder.glob(f"*/{JOURNAL_FILE}"):
        try:
            return path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            break
    return []


def phase(entry: dict[str, Any]) -> str:
    """Return the phase that starts with an entry of the journal."""
    event = entry["event"]
    if event == "stage":
        return STAGES.get(entry["stage"], entry["stage"])
    return {"environment": PROGRAM, "begin": STAGES["begin"], "end": BETWEEN}.get(event, event)


def split(moments: Sequence[tuple[float, str]]) -> Phases:
    """Return the seconds of each phase, up to the last cell."""
    sums: Phases = {}
    last = max(n for n, (_, name) in enumerate(moments) if name == BETWEEN)
    for place, ((begin, name), (end, _)) in enumerate(itertools.pairwise(moments)):
        name = STORED if place >= last else name
        sums[name] = sums.get(name, 0.0) + end - begin
    return sums


def print_phases(subject: str, rounds: Sequence[Phases]) -> None:
    """Print the median of each phase over the rounds."""
    names = dict.fromkeys(name for each in rounds for name in each)
    print(f"{subject}, median s by phase:")
    for name in names:
        print(f"  {name:22} {statistics.median(each.get(name, 0.0) for each in rounds):7.3f}")


def main() -> None:
    """Interleave the two subjects, and print medians, the ratio and the phases."""
    rounds = parser(__doc__, rounds=5).parse_args().rounds
    in_turns(("bare", "capture"), measure, 1)  # warm the file cache
    measured = in_turns(("bare", "capture"), measure, rounds)
    times = {name: [sum(each.values()) for each in phases] for name, phases in measured.items()}
    print_times(times)
    print_ratio(times, "capture", "bare")
    for name, phases in measured.items():
        print_phases(name, phases)


if __name__ == "__main__":
    main()
