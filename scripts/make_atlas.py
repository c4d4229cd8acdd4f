"""Measure the cells of an atlas into a folder of shards (JSON lines, described in docs/atlas.md).
An interrupted call loses its last batch, and the next call continues.

    python scripts/make_atlas.py measure FOLDER --seconds 540 [--seed 0] [--device cuda]
    python scripts/make_atlas.py measure FOLDER --scheduler local     all GPUs of this host, one folder per class
    python scripts/make_atlas.py stats FOLDER
    python scripts/make_atlas.py pack FOLDER OUT.tar.xz
    python scripts/make_atlas.py package SHARDS [--products FILE]   a folder or an archive of shards
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _frame import pack_files
from atlas_cells import LONGEST_US, Cell, Sampler
from atlas_fleet import measure_on_lanes

from profharness.atlas.data import MODEL_SUFFIX, PACKAGED, SUFFIX, write_atlas
from profharness.atlas.model import write_model
from profharness.atlas.shards import SHARD_VERSION, read_shards, shard_lines
from profharness.attention.dispatch.machine import Machine, machine_for, machine_of, release_text
from profharness.errors import ProfharnessError, UsageError
from profharness.recording.worker.program import end_with
from profharness.trace import NONE, LaunchConfig, Trace, range_cell
from profharness.traces import open_trace

WORKER = Path(__file__).with_name("atlas_worker.py")
CELLS_A_BATCH = 32
WORKERS = 5  # while one measures, the others prepare: cuDNN may need a second for a new shape
SILENCE_S = 60  # a step that takes longer hangs
START_S = 120  # until the first line: torch and CUDA are loading
DEATHS = 3  # consecutive deaths of workers without a result
PARSERS = 4
UNLIKELY = 150  # if none of this many cells ran, something else is wrong
LAST_S = 15  # no batch starts this close to the end: it takes seconds, and its trace has to be read
# The kinds of values in a folder that must be equal.
OF_THE_MACHINE = ("device_type", "gpu", "torch", "torch_cuda", "cudnn")
KEPT = ("status", "choice", "graph_us", "peak_bytes", "message")
Row = dict[str, Any]


def launches_of(trace: Trace) -> dict[str, list[list[tuple[int, int, int]]]]:
    """Return the calls of each cell in order, each as a list of (kernel, launch configuration, ns)."""
    calls: dict[int, list[tuple[int, int, int, int]]] = {}
    for batch in trace.batches():
        columns = (
            batch.cell_range,
            batch.start_ns,
            batch.kernel,
            batch.launch_config,
            batch.duration_ns,
        )
        for index, *launch in zip(*(column.tolist() for column in columns), strict=True):
            if index != NONE:
                calls.setdefault(index, []).append(tuple(launch))
    cells: dict[str, list[list[tuple[int, int, int]]]] = {}
    for index in sorted(calls, key=lambda each: trace.ranges[each].start_ns):
        cell = range_cell(trace.ranges[index].name)
        if cell is not None:
            ordered = [launch[1:] for launch in sorted(calls[index])]
            cells.setdefault(cell, []).append(ordered)
    return cells


def kernels_of(trace: Trace, calls: list[list[tuple[int, int, int]]]) -> Row:
    """Return the kernels of a cell, as in most of its calls, with the medians of their times."""
    kinds = Counter(tuple(launch[:2] for launch in call) for call in calls)
    ((usual, _),) = kinds.most_common(1)
    alike = [call for call in calls if tuple(launch[:2] for launch in call) == usual]
    each = [
        statistics.median(times) / 1e3
        for times in zip(*([ns for *_, ns in call] for call in alike), strict=True)
    ]
    total = statistics.median(sum(ns for *_, ns in call) for call in alike) / 1e3
    return {
        "kernel_us": round(total, 3),
        "kernel_us_each": [round(us, 3) for us in each],
        "kernels": [
            launch_row(trace.kernels[kernel], trace.launch_configs[at]) for kernel, at in usual
        ],
        "calls": len(alike),
    }


def launch_row(name: str, launch: LaunchConfig) -> list[Any]:
    """Return [name, grid, block, registers, shared_bytes], with None for what a memset lacks."""
    return [name, launch.grid, launch.block, launch.registers_per_thread, launch.shared_bytes]


def end_with_parent(parent: int) -> None:
    """End this process with its parent."""
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()


def rows_of(cells: list[Row], results: list[Row], path: str) -> list[Row]:
    """Return the lines of a batch. Its trace is read and deleted."""
    seen: dict[str, Row] = {}
    lacking = "its calls are not in the trace"
    if Path(path).exists():
        try:
            trace = open_trace(Path(path))
            try:
                seen = {
                    cell: kernels_of(trace, calls) for cell, calls in launches_of(trace).items()
                }
            finally:
                trace.close()
        except ProfharnessError as error:
            lacking = str(error).replace(path, "its trace")
        finally:
            Path(path).unlink()
    rows = []
    for number, (cell, result) in enumerate(zip(cells, results, strict=True)):
        row = {name: cell[name] for name in ("config", "backend", "regime")}
        row |= {name: result[name] for name in KEPT if name in result}
        if result["status"] == "ok":
            kernels = seen.get(f"c{number:04}")
            row |= kernels or {"status": "error", "message": lacking}
        rows.append(row)
    return rows


def lines_of(path: Path) -> Iterator[Row]:
    """Yield the lines of a shard. A truncated last line is skipped. Raise UsageError for other
    files.
    """
    for number, row in enumerate(shard_lines(path)):
        if number == 0 and row.get("atlas") != SHARD_VERSION:
            raise UsageError(f"{path}: not a shard of an atlas of version {SHARD_VERSION}")
        yield row


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.jsonl"))


@dataclass
class Shard:
    """The file of one call. Lines are written in complete batches."""

    path: Path
    begun: float = field(default_factory=time.monotonic)
    count: int = 0

    def write(self, rows: list[Row]) -> None:
        at = round(time.monotonic() - self.begun, 1)
        text = "".join(json.dumps(row | {"at_s": at}, separators=(",", ":")) + "\n" for row in rows)
        data = text.encode()
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            while data:
                data = data[os.write(file, data) :]
            os.fsync(file)
        finally:
            os.close(file)
        self.count += len(rows)


def new_shard(folder: Path, environment: Row, seed: int) -> Shard:
    """Create a new shard for each call, since an earlier one may end in half a line. Raise
    UsageError if the folder belongs to another machine.
    """
    shards = shards_of(folder)
    for path in shards:
        for row in lines_of(path):
            other = row["environment"]
            for name in OF_THE_MACHINE:
                if other.get(name) != environment.get(name):
                    raise UsageError(
                        f"{folder} contains cells of {name} {other.get(name)}; this machine has "
                        f"{environment.get(name)}: give another folder"
                    )
            break
    number = 1 + max((int(path.stem.split("-")[1]) for path in shards), default=0)
    while True:  # another process of a fleet may take the same number
        path = folder / f"shard-{number:04}.jsonl"
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            break
        number += 1
    shard = Shard(path)
    shard.write([{"atlas": SHARD_VERSION, "environment": environment, "seed": seed}])
    return shard


@dataclass
class Batch:
    number: int
    cells: list[Row]
    trace: str

    def message(self) -> Row:
        return {"batch": self.number, "cells": self.cells, "trace": self.trace}


@dataclass(eq=False)
class Worker:
    """A measuring process. Its lines are put into `said` together with the worker, followed by
    None. `batch` is its current batch, `stage` its last reported step, and `since` the time of
    that.
    """

    argv: list[str]
    log: Path
    said: queue.Queue[tuple[Worker, Row | None]]
    process: subprocess.Popen[str] = field(init=False)
    batch: Batch | None = None
    stage: Row = field(default_factory=lambda: {"stage": "start"})
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                self.said.put((self, json.loads(line)))
            except ValueError:
                break  # it died in the middle of a line
        self.said.put((self, None))

    @property
    def is_ready(self) -> bool:
        return self.batch is None and self.stage["stage"] != "start"

    @property
    def limit_s(self) -> float:
        """Return how long it may be silent. A hanging worker may keep it waiting for the GPU."""
        return {"start": START_S, "wait": 2 * SILENCE_S}.get(self.stage["stage"], SILENCE_S)

    def ask(self, batch: Batch) -> None:
        """Send it a batch."""
        self.batch, self.since = batch, time.monotonic()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is dead, which its end will show
            self.process.stdin.write(json.dumps(batch.message()) + "\n")
            self.process.stdin.flush()

    def end(self) -> int:
        """Kill it if it still runs, and return its exit code."""
        self.process.kill()
        code = self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        return code


@dataclass
class Campaign:
    """One call of `measure`. Distributes batches, replaces workers that die, and writes the
    results.
    """

    options: argparse.Namespace
    folder: Path
    scratch: Path
    deadline: float
    parsers: ProcessPoolExecutor
    shard: Shard | None = None
    cells: Iterator[list[Cell]] = field(default_factory=lambda: iter(()))
    done: set[tuple[str, str]] = field(default_factory=set)
    again: deque[list[Row]] = field(default_factory=deque)
    said: queue.Queue[tuple[Worker, Row | None]] = field(default_factory=queue.Queue)
    workers: list[Worker] = field(default_factory=list)
    reading: list[Future[list[Row]]] = field(default_factory=list)
    batches: int = 0
    left: int = sys.maxsize
    deaths: int = 0
    ran: int = 0
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def run(self) -> int:
        """Measure until the time or the cells are used up. Return the number of cells written."""
        self.left = self.options.cells or sys.maxsize
        for path in shards_of(self.folder):
            self.done |= {
                (row["config"], row["backend"]) for row in lines_of(path) if "config" in row
            }
        if self.done:
            print(f"{len(self.done)} cells were already measured", flush=True)
        try:
            while self.workers or self.is_going():
                self.step()
        finally:
            for worker in self.workers:
                worker.end()
        while self.reading:
            self.collect(wait=True)
        spent = sorted(self.spent.items(), key=lambda item: -item[1])
        parts = (f"{name} {seconds:.1f}" for name, seconds in spent)
        print(f"seconds of the workers: {', '.join(parts)}", flush=True)
        return self.shard.count - 1 if self.shard else 0

    def is_going(self) -> bool:
        return time.monotonic() < self.deadline and (self.left > 0 or bool(self.again))

    def start(self) -> Worker:
        device, lock = self.options.device, self.scratch / "gpu.lock"
        argv = [sys.executable, str(WORKER), device, str(os.getpid()), str(lock)]
        return Worker([*argv, str(self.options.workers)], self.scratch / "worker.log", self.said)

    def step(self) -> None:
        """Keep the workers busy, and process the next message of any of them."""
        while self.is_going() and len(self.workers) < self.options.workers:
            self.workers.append(self.start())
        for worker in self.workers:
            if worker.is_ready and self.is_going() and (batch := self.next()):
                worker.ask(batch)
        if not self.is_going():  # idle workers end, and all of them when the time is over
            late = time.monotonic() > self.deadline + LAST_S
            for worker in [each for each in self.workers if late or each.batch is None]:
                self.workers.remove(worker)
                worker.end()
        with contextlib.suppress(queue.Empty):
            worker, message = self.said.get(timeout=0.2)
            if worker in self.workers:
                if message is None:
                    self.lose(worker, f"the process ended with {worker.process.wait()}")
                else:
                    self.take(worker, message)
        for worker in [*self.workers]:
            silent = time.monotonic() - worker.since
            if not worker.is_ready and self.said.empty() and silent > worker.limit_s:
                self.lose(worker, f"no answer within {worker.limit_s} s")
        self.collect()

    def take(self, worker: Worker, message: Row) -> None:
        """Process a message of a worker."""
        now, at = time.monotonic(), worker.stage.get("cell")
        backend = worker.batch.cells[at]["backend"] if worker.batch and at is not None else ""
        self.spent[f"{worker.stage['stage']} {backend}".strip()] += now - worker.since
        worker.since = now
        if "environment" in message:
            worker.stage = {"stage": "batch"}
            if self.shard is None:
                self.open(message["environment"])
        elif "stage" in message:
            worker.stage = message
        else:
            batch, worker.batch, worker.stage = worker.batch, None, {"stage": "batch"}
            assert batch is not None
            self.deaths = 0
            results = message["cells"]
            self.reading.append(self.parsers.submit(rows_of, batch.cells, results, batch.trace))

    def open(self, environment: Row) -> None:
        """Plan for the machine that responded. A CPU is planned for like an H200."""
        machine: Machine = machine_of(environment)
        if environment["device_type"] != "cuda" or not machine.known:
            machine = machine_for("H200", "2.11")
        print(
            f"{environment.get('gpu', environment['device_type'])}, torch {environment['torch']}, "
            f"rules of {release_text(machine.torch)}",
            flush=True,
        )
        sampler = Sampler(machine, self.options.seed, self.options.longest)
        place, count = self.options.part
        self.cells = itertools.islice(sampler.cells(), place, None, count)
        self.shard = new_shard(self.folder, environment, self.options.seed)

    def next(self) -> Batch | None:
        """Return the next cells that are missing, those of one config together."""
        rows: list[Row] = []
        if self.again:
            rows = self.again.popleft()
        while len(rows) < min(self.options.batch, self.left) and not self.again:
            rows += [
                cell.row()
                for cell in next(self.cells)
                if (cell.config, cell.backend) not in self.done
            ]
        self.left -= sum((row["config"], row["backend"]) not in self.done for row in rows)
        self.done |= {(row["config"], row["backend"]) for row in rows}
        self.batches += 1
        path = self.scratch / f"{self.batches}.json"
        return Batch(self.batches, rows, str(path)) if rows else None

    def lose(self, worker: Worker, reason: str) -> None:
        """Record that a worker is gone. The cell that it was measuring gets this result, unless
        only its graph was the cause. The others of its batch are measured again.
        """
        self.workers.remove(worker)
        worker.end()
        text = (self.scratch / "worker.log").read_text(errors="replace")[-1500:]
        print(f"worker lost: {reason} at {worker.stage}: {text}", file=sys.stderr, flush=True)
        self.deaths += 1
        if self.deaths >= DEATHS * self.options.workers or self.shard is None:
            raise ProfharnessError(
                f"{self.deaths} workers in a row were lost ({reason}); see their output above"
            )
        if worker.batch is None:
            return
        cells, at, stage = worker.batch.cells, worker.stage.get("cell"), worker.stage["stage"]
        if at is None and len(cells) > 1:  # an error of the profiler itself: try halves
            self.again.append(cells[: len(cells) // 2])
            cells = cells[len(cells) // 2 :]
        elif at is not None:
            cell, cells = cells[at], cells[:at] + cells[at + 1 :]
            if stage in ("graph", "replay") and cell.get("graph", True):
                cells.append(cell | {"graph": False})
            else:
                row = {name: cell[name] for name in ("config", "backend", "regime")}
                message = f"{reason}, in its step {stage}"
                self.shard.write([row | {"status": "error", "choice": None, "message": message}])
        if cells:
            self.again.append(cells)

    def collect(self, *, wait: bool = False) -> None:
        """Write the batches whose traces have been read."""
        assert self.shard is not None or not self.reading
        while self.reading and (wait or self.reading[0].done()):
            rows = self.reading.pop(0).result()
            if self.options.workers > 1:  # others used the memory: leave it for a call of its own
                rows = [row for row in rows if row["status"] != "oom"]
            if self.shard is not None:
                self.shard.write(rows)
                self.ran += sum(row["status"] == "ok" for row in rows)
                if not self.ran and self.shard.count > UNLIKELY:
                    texts = sorted({row.get("message", "") for row in rows})
                    raise ProfharnessError(
                        f"none of more than {UNLIKELY} cells ran: {'; '.join(texts[:3])}"
                    )
                seconds = time.monotonic() - self.shard.begun
                rate = self.shard.count / max(seconds, 1e-9)
                print(f"{seconds:6.1f} s {self.shard.count:6} cells {rate:5.1f}/s", flush=True)


def part_of(text: str) -> tuple[int, int]:
    """Parse `0/4`, the part of the plan and the number of parts. Raise ArgumentTypeError."""
    place, slash, count = text.partition("/")
    if not (slash and place.isdigit() and count.isdigit() and int(place) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part; write 0/4 to 3/4")
    return int(place), int(count)


def measure(options: argparse.Namespace) -> int:
    """Measure cells into the folder."""
    if options.scheduler is not None:
        return measure_on_lanes(options)
    if options.parent is not None:
        end_with_parent(options.parent)
    begun = time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    # on SIGTERM, remove the scratch folder and end the processes, as on Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    context = multiprocessing.get_context("spawn")
    count = max(1, min(PARSERS, (os.cpu_count() or 2) // 2))
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(count, context, end_with_parent, (os.getpid(),)) as parsers,
    ):
        deadline = begun + options.seconds - LAST_S
        campaign = Campaign(options, options.folder, Path(scratch), deadline, parsers)
        print(f"{campaign.run()} cells measured", flush=True)
    return 0


def stats(options: argparse.Namespace) -> int:
    """Print the cells by regime, backend and status, and how fast they were measured."""
    table: Counter[tuple[str, str]] = Counter()
    kernels: set[str] = set()
    for path in shards_of(options.folder):
        count, end = 0, 0.0
        for row in lines_of(path):
            if "environment" in row:
                told = {name: row["environment"].get(name) for name in OF_THE_MACHINE}
                print(
                    f"{path.name}: {', '.join(f'{name} {value}' for name, value in told.items())}"
                )
                continue
            count, end = count + 1, row["at_s"]
            kernels |= {kernel[0] for kernel in row.get("kernels", ())}
            for kind in ("regime", "backend"):
                table[f"{kind} {row[kind]}", row["status"]] += 1
        print(f"{path.name}: {count} cells in {end:.0f} s, {count / max(end, 0.1):.1f} a second")
    statuses = sorted({status for _, status in table})
    print(f"{'':20}" + "".join(f"{status:>9}" for status in statuses))
    for name in sorted({name for name, _ in table}):
        print(f"{name:20}" + "".join(f"{table[name, status]:9}" for status in statuses))
    print(f"{len(kernels)} kernels")
    return 0


def pack(options: argparse.Namespace) -> int:
    """Pack the shards into one file."""
    shards = shards_of(options.folder)
    if not shards:
        raise UsageError(f"{options.folder} has no shards (shard-*.jsonl) to pack")
    pack_files(options.folder, shards, options.out)
    print(f"{options.out}: {len(shards)} shards, {options.out.stat().st_size} bytes")
    return 0


def package(options: argparse.Namespace) -> int:
    """Write the files of the package, an atlas and its model, from a folder or an archive of
    shards.
    """
    from atlas_train import (
        fit_model,
        read_products,
    )  # needs scikit-learn and lightgbm (the extra `train`)

    atlas = read_shards(options.folder)
    path = PACKAGED / f"{atlas.machine.name}{SUFFIX}"
    write_atlas(atlas, path, force=True)
    print(f"{path}: {len(atlas)} cells, {path.stat().st_size} bytes", flush=True)
    products = read_products(options.products) if options.products else None
    path = PACKAGED / f"{atlas.machine.name}{MODEL_SUFFIX}"
    write_model(fit_model(atlas, products), path)
    print(f"{path}: {path.stat().st_size} bytes")
    return 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for function in (measure, stats, pack, package):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.set_defaults(function=function)
        command.add_argument("folder", type=Path)
        if function is pack:
            command.add_argument("out", type=Path)
        if function is package:
            text = "the kernels that cuBLAS selected for further products (traces/cublas-*.json.xz)"
            command.add_argument("--products", type=Path, help=text)
        if function is measure:
            command.add_argument("--seconds", type=float, default=540)
            command.add_argument("--seed", type=int, default=0)
            command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
            command.add_argument(
                "--part", type=part_of, default=(0, 1), help="part of the plan, such as 0/4 to 3/4"
            )
            command.add_argument("--parent", type=int, help=argparse.SUPPRESS)
            command.add_argument(
                "--scheduler", metavar="local[:N]", help="the GPUs of this host, or N of them"
            )
            command.add_argument("--workers", type=int, default=WORKERS)
            command.add_argument("--batch", type=int, default=CELLS_A_BATCH, help="cells per trace")
            command.add_argument(
                "--cells", type=int, default=0, help="approximate maximum number of cells"
            )
            command.add_argument(
                "--longest",
                type=float,
                default=LONGEST_US,
                help="longest estimated time of a call on a GPU, in us",
            )
    options = parser.parse_args(words)
    try:
        code: int = options.function(options)
    except (ProfharnessError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "interrupted; the results written so far are kept, and the next call continues",
            file=sys.stderr,
        )
        return 130
    return code


if __name__ == "__main__":
    raise SystemExit(main())
