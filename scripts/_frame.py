"""Helpers of the benchmarks: run commands and programs in turns, each in a fresh process, and print
medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from profharness.attention.config import SDPA_BACKENDS
from profharness.measurements.measurements import all_samples
from profharness.rows import KERNEL
from profharness.run import Cell, read_run, write_run
from profharness.stats import Series
from profharness.store import ingest_path, open_store

# Write the bytecode first, as an installed program has it; otherwise each process compiles its modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
HERE = Path(__file__).resolve().parent
CELLS = (str(HERE / "bench_configs.txt"), "auto", *SDPA_BACKENDS)
PROGRAM = """
import json, resource, sys, time
from pathlib import Path
path, store = map(Path, sys.argv[1:])
extra = []
{setup}
start = time.perf_counter()
{work}
seconds = time.perf_counter() - start
usages = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
peak = max(resource.getrusage(usage).ru_maxrss for usage in usages)
print(json.dumps([seconds, peak * 1024 / 1e6, *extra]))
"""
Measured = TypeVar("Measured")


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return an argument parser with the option --rounds."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=rounds)
    return made


def output(argv: Sequence[str], cwd: Path | None = None) -> str:
    """Return the output of a command. Exit with this output if the command fails."""
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env=environment, cwd=cwd
    )
    if done.returncode:
        raise SystemExit(f"{argv} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def pack_files(folder: Path, files: Iterable[Path], target: Path) -> None:
    """Write files below a folder into one tar.xz atomically, without owners and times."""

    def bare(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    partial = target.with_name(target.name + ".partial")
    with tarfile.open(partial, "w:xz") as archive:
        for path in sorted(files):
            archive.add(path, str(path.relative_to(folder)), filter=bare)
    partial.replace(target)


def without_traces(place: Path) -> None:
    """Remove the traces of a run and keep its record with all samples.
    Runs of an older version have the kernels' times of the first process only in traces; copy
    them to the record.
    """
    run = read_run(place)
    with tempfile.TemporaryDirectory() as scratch:
        ingest_path(store := Path(scratch) / "s.db", place)
        with open_store(store) as opened:
            rows = [cell for cell in opened.cells(run.run) if cell.status == "ok"]
            samples = all_samples(opened, run.run, rows)
    sums = {row.cell: samples[row.config, row.backend].get(KERNEL) for row in rows}
    for path in place.iterdir():
        path.unlink()
    cells = tuple(with_sums(cell, sums.get(cell.cell)) for cell in run.cells)
    write_run(place, replace(run, cells=cells, traces=()))


def with_sums(cell: Cell, sums: Sequence[int] | None) -> Cell:
    """Return the cell with the kernel times of all its processes."""
    if not isinstance(sums, Series):
        return cell
    samples, turns = cell.samples | {KERNEL: list(sums)}, cell.turns | {KERNEL: list(sums.turns)}
    return replace(cell, samples=samples, turns=turns)


def seconds(argv: Sequence[str]) -> float:
    """Return the wall time of a command in seconds."""
    start = time.perf_counter()
    output(argv)
    return time.perf_counter() - start


def cost(setup: str, work: str, path: Path, store: Path) -> list[Any]:
    """Run some work in a fresh process. Return its seconds, the peak RSS in MB of its largest
    process, and the value of `extra`. The program can use the names `path` and `store`.
    """
    program = PROGRAM.format(setup=setup, work=work)
    lines = output([sys.executable, "-c", program, str(path), str(store)]).splitlines()
    figures: list[Any] = json.loads(lines[-1])
    return figures


def capture(folder: Path, *words: str) -> list[str]:
    """Return the command line of a capture of CELLS into the folder, and into its store.db."""
    configs, *backends = CELLS
    places = ("--out", str(folder), "--store", str(folder / "store.db"))
    cells = ("--configs", configs, "--backend", ",".join(backends))
    return [sys.executable, "-m", "profharness", "capture", *cells, *words, *places]


def bare_calls(*words: str) -> list[str]:
    """Return the command line of the script that makes the calls of CELLS without a profiler."""
    return [sys.executable, str(HERE / "bare_calls.py"), *words, *CELLS]


def in_turns(
    subjects: Sequence[str], measure: Callable[[str], Measured], rounds: int
) -> dict[str, list[Measured]]:
    """Measure each subject `rounds` times, interleaved."""
    measured: dict[str, list[Measured]] = {subject: [] for subject in subjects}
    for _ in range(rounds):
        for subject in subjects:
            measured[subject].append(measure(subject))
    return measured


def print_times(times: Mapping[str, Sequence[float]]) -> None:
    """Print median and range in seconds, one line per subject."""
    width = max(map(len, times))
    print(f"{'':{width}} {'median s':>9} {'min s':>8} {'max s':>8}")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:{width}} {median:9.2f} {min(values):8.2f} {max(values):8.2f}")


def print_ratio(times: Mapping[str, Sequence[float]], name: str, floor: str) -> None:
    """Print median and range of the ratios of two subjects, round by round."""
    ratios = [above / below for above, below in zip(times[name], times[floor], strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{name} / {floor}: {statistics.median(ratios):.2f} ({spread}, {len(ratios)} rounds)")
