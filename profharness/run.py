"""Read and write the record of a run in its folder, and describe the options and plans of a run.

run.json contains the plan, the results, and the paths of the raw traces. The worker appends one
`JournalEntry` per line to journal.jsonl, and run.json is rewritten from time to time. If a run is
killed, run.json can lack some results. `read_run` reads the missing results from the journal.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import shlex
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from profharness.attention.config import Config
from profharness.device_types import DEVICE_TYPES, is_gpu
from profharness.errors import TraceFormatError, UnwritableError, UsageError
from profharness.files import (
    RECORD_BYTES,
    RUNS_FOLDER,
    decode_json,
    read_input,
    read_json,
    read_lines,
)
from profharness.rows import ALIASES, GPU_MEASUREMENTS, TORCH, WALL, Refusal

RUN_FILE = "run.json"
JOURNAL_FILE = "journal.jsonl"
CAMPAIGN_FILE = "campaign.json"  # exists in the folder of a campaign, a run split into groups
GROUPS_FOLDER = "groups"  # exists in the folder of a campaign, and contains a run folder per group
GROUP_NAME = re.compile(r"\w[\w-]*")
PLAN_FILE = "plan.json"
SCHEMA = "profharness.run/1"
GPU = "gpu"  # `Problem.profiler` if the GPU made timings unreliable; the run does not fail
EXIT_UNWRITABLE = 72  # exit code of a worker that cannot write to the run folder
EXIT_NO_GPU = 73  # exit code of a worker that was told to use a GPU, but its torch finds none
UNWRITABLE = "cannot write to the run folder: "  # start of the message of such a worker
PYTHON_FILE = "python"  # contains the path of another interpreter until the run is finished
# maximum size in bytes of campaign.json, and of each field of run.json except `cells`
PART_BYTES = 16_000_000
PRECISION = 0.01
# errors that msgspec raises for invalid data
NOT_A_RECORD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
PRECISIONS = (1e-9, 1 - 1e-9)
SHORTEST_SAMPLING_S = 1e-6
T = TypeVar("T")
OBSERVE = "observe"
KINDS = ("capture", "bench", "verify", "explain", OBSERVE)  # the commands that make runs
STATUSES = ("ok", "refused", "oom", "error", "crashed", "timeout", "pending")


@dataclass(frozen=True)
class Check:
    """One comparison of a verified cell with the fp64 reference.

    `VerificationRow` describes the fields.
    """

    what: str
    passed: bool | None
    message: str | None = None
    error: float | None = None
    allowance: float | None = None
    relative_error: float | None = None
    relative_allowance: float | None = None


WRONG = "wrong "
"""Start of the message of a cell in which `verify` found a wrong result."""


@dataclass(frozen=True)
class Cell:
    """A config that a run executes on one backend, and its result."""

    cell: str
    config: Config
    backend: str
    status: str = "pending"
    message: str | None = None
    choice: str | None = None  # the backend that PyTorch's `_fused_sdp_choice` returned
    iterations: int = 0  # number of profiled calls
    # Maps each measurement (one of `rows.MEASUREMENTS`, or `host`) to its samples in ns per call.
    samples: dict[str, list[int]] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    peak_memory_bytes: int | None = None
    duration_ns: int | None = None
    clocks: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    compile_ns: int | None = None  # time to load the backend and call it once; None for PyTorch's
    case: str | None = None  # name of the case of a verified cell
    asked: str | None = None  # label of the config from which the case was derived
    checks: tuple[Check, ...] = ()
    tuning: dict[str, Any] | None = None  # the implementation's `tuning()` after the last call
    # Maps each measurement to tuples (process, turn, number of samples) in the order of the
    # samples.
    turns: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    process: int = 0  # number of the last process that timed the cell, counted from 0

    @property
    def outcome(self) -> str:
        """The status, or `wrong` if `verify` found a wrong result."""
        wrong = self.case is not None and (self.message or "").startswith(WRONG)
        return "wrong" if wrong else self.status


@dataclass(frozen=True)
class TraceFile:
    """A raw trace of a run, and the cells that it covers."""

    profiler: str
    path: str  # relative to the run folder
    cells: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """A failure of a profiler, or a disturbance that makes timings unreliable."""

    profiler: str  # name of the profiler, or the constant GPU for a disturbance
    code: str  # does not change between versions; docs/nsight.md lists all codes
    message: str
    remedy: str
    raw: str = ""  # raw output of the tool
    cells: tuple[str, ...] = ()  # cells without results from the profiler; empty if no cell has any


SEED = 0  # the default of --seed in every command


@dataclass(frozen=True)
class Protocol:
    """The settings with which the cells of a run are executed."""

    iterations: int = 5
    warmup: int = 3
    samples: int = 30
    timeout_s: float = 120.0  # maximum time per cell
    seed: int = SEED
    device: str = "auto"
    metrics: tuple[str, ...] = ()  # metrics that ncu collects besides the default ones
    sections: tuple[str, ...] = ()  # sections that ncu collects
    processes: int = 1  # number of worker processes that time each cell


DEVICES = ("auto", *DEVICE_TYPES)
LIMITS = {"iterations": (1, 10_000), "warmup": (0, 10_000), "samples": (0, 100_000)}
"""Minimum and maximum numbers of calls in a capture."""
PROCESSES = (1, 100)
SHORTEST_S, LONGEST_S = 0.1, 1_000_000_000
SEEDS = (-(2**63), 2**64 - 1)  # range of torch.Generator


def check_protocol(protocol: Protocol, *, counted: bool = False) -> None:
    """Raise UsageError for an invalid protocol. If `counted` is set, apply LIMITS to the counts."""
    for name, (low, high) in LIMITS.items():
        limits = (low, high) if counted else (0, math.inf)
        require_number(name, getattr(protocol, name), *limits, whole=True)
    require_number("processes", protocol.processes, *PROCESSES, whole=True)
    require_number("seed", protocol.seed, *SEEDS, whole=True)
    require_number("timeout_s", protocol.timeout_s, SHORTEST_S, LONGEST_S)
    if protocol.device not in DEVICES:
        raise UsageError(f"unknown device {protocol.device!r}; choose from {', '.join(DEVICES)}")


def require_number(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    whole: bool = False,
    above: bool = False,
    below: bool = False,
) -> None:
    """Raise UsageError if the value is not a finite number between `low` and `high`, inclusive.

    If `above` is set, the value must be larger than `low`, and if `below` is set, smaller than
    `high`. If `whole` is set, the value must be an integer.
    """
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    fits = is_number and low <= value <= high and value != math.inf  # type: ignore[operator]
    if not fits or (above and value == low) or (below and value == high):
        kind = "whole number" if whole else "number"
        limits = f"above {low:,}" if above else f"from {low:,}"
        if high < math.inf:
            limits += f" and below {high:,}" if below else f" to {high:,}"
        elif not above:
            limits = f"of at least {low:,}"
        raise UsageError(f"{name}={value!r} is not a {kind} {limits}")


@dataclass(frozen=True)
class Period:
    """A period in which a process worked on a run. A resumed run has several periods."""

    began: str  # UTC, in ISO 8601 format
    seconds: float | None = None  # None if the process was killed, or has not ended yet

    @classmethod
    def begin(cls) -> Period:
        """Return a period that begins now."""
        return cls(datetime.now(UTC).isoformat(timespec="milliseconds"))

    def end(self, seconds: float) -> Period:
        """Return the period with its length."""
        return replace(self, seconds=round(seconds, 3))


@dataclass(frozen=True)
class Run:
    """The content of run.json: the plan, the environment and the results of a run."""

    run: str
    created: str
    profilers: tuple[str, ...]
    protocol: Protocol
    cells: tuple[Cell, ...]
    environment: dict[str, Any] = field(default_factory=dict)  # from `environment.collect()`
    traces: tuple[TraceFile, ...] = ()
    note: str | None = None
    profharness: str = ""
    schema: str = SCHEMA
    problems: tuple[Problem, ...] = ()
    kind: str | None = None  # the command that made the run, one of KINDS
    bench: BenchPlan | None = None
    periods: tuple[Period, ...] = ()


LONGEST = timedelta(days=36525)  # more nanoseconds may not fit into an integer of the store


@dataclass(frozen=True)
class RunTimes:
    """The end and the duration of a run. An unknown time is None."""

    ended: str | None = None  # UTC, in ISO 8601 format
    duration_ns: int | None = None  # time in which at least one process worked on the run
    lanes_ns: int | None = None  # summed over lanes that worked at the same time


def run_times(run: Run) -> RunTimes:
    """Compute the times of a run from its periods. Leave times unknown if a period has no end."""
    spans = []
    try:
        for each in run.periods:
            if (each.seconds or 0) < 0:
                return RunTimes()
            began = datetime.fromisoformat(each.began)
            seconds = None if each.seconds is None else timedelta(seconds=each.seconds)
            spans.append((began, None if seconds is None else began + seconds))
        spans.sort(key=lambda span: span[0])
        ends = [end for _, end in spans if end is not None]
        if not spans or spans[-1][1] is None:
            return RunTimes()
        whole = sum((end - began for began, end in spans if end is not None), timedelta())
        ended = max(ends).astimezone(UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, TypeError):  # a record that was changed
        return RunTimes()
    if len(ends) < len(spans) or whole > LONGEST:
        return RunTimes(ended)
    covered, until = timedelta(), spans[0][0]
    for (began, _), end in zip(spans, ends, strict=True):
        covered += max(end - max(began, until), timedelta())
        until = max(until, end)
    return RunTimes(ended, _nanoseconds(covered), _nanoseconds(whole))


def _nanoseconds(time: timedelta) -> int:
    return time // timedelta(microseconds=1) * 1000


def run_kind(run: Run) -> str:
    """Return the command that made a run.

    If the record does not contain the command, derive it from the cells and the plan.
    """
    if run.kind in KINDS:
        return run.kind
    if any(cell.case is not None for cell in run.cells):
        return "verify"
    return "bench" if run.bench else "capture"


def write_run(folder: Path, run: Run) -> None:
    """Write run.json atomically. Raise UnwritableError if the folder is not writable."""
    # a random name, because hosts that share a folder may use the same process ids
    temporary = folder / f".{RUN_FILE}.{os.urandom(6).hex()}"
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1))
        temporary.replace(folder / RUN_FILE)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise unwritable(folder, error.strerror) from None


def unwritable(folder: Path, why: str | None) -> UnwritableError:
    """Return the error for a run folder that is not writable."""
    return UnwritableError(
        f"{folder}: cannot write to this folder: {why}; fix the problem; to resume the run, use: "
        f"profharness capture --resume {shlex.quote(str(folder))}"
    )


def read_part(path: Path, kind: type[T], what: str, limit: int = PART_BYTES) -> T:
    """Decode a JSON file of a run folder.

    Raise FileNotFoundError if the file does not exist, and TraceFormatError if it cannot be read or
    is invalid. `what` describes the expected content in the error message.
    """
    try:
        return read_json(path, kind, limit=limit, within=path.parent)
    except FileNotFoundError:
        raise
    except NOT_A_RECORD as error:
        raise TraceFormatError(path, f"not {what}: {error}") from None
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None


def read_record(folder: Path) -> Run:
    """Read run.json of a run folder. Ignore newer results in the journal or in groups.

    Raise TraceFormatError if the file is missing or invalid.
    """
    path = folder / RUN_FILE
    try:
        what = f"a run record with schema {SCHEMA}"
        if path.stat().st_size > PART_BYTES:
            parts = read_part(path, dict[str, msgspec.Raw], what, RECORD_BYTES)
            for name, part in parts.items():
                if name != "cells" and memoryview(part).nbytes > PART_BYTES:
                    raise TraceFormatError(path, f"{name!r} is larger than {PART_BYTES:,} bytes")
            del parts
        run = read_part(path, Run, what, RECORD_BYTES)
    except FileNotFoundError:
        expected = "a run folder written by `profharness capture`"
        raise TraceFormatError(
            folder, "this folder contains no run.json", expected=expected
        ) from None
    if run.schema != SCHEMA:
        raise TraceFormatError(path, f"schema {run.schema!r}", expected=SCHEMA)
    return run


def read_run(folder: Path) -> Run:
    """Read a run folder, including its journal and the groups of a campaign.

    Raise TraceFormatError if a file is missing or invalid.
    """
    run = _with_journal(folder, read_record(folder))
    return _with_groups(folder, run) if (folder / CAMPAIGN_FILE).is_file() else run


def _with_groups(folder: Path, run: Run) -> Run:
    """Add the results of the finished groups to the run of a campaign."""
    groups = [
        (path.name, _with_journal(path, read_record(path)))
        for path in (folder / GROUPS_FOLDER).glob("*")
        # symbolic links may lead outside of the folder
        if GROUP_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    if not groups:
        return run
    groups.sort(key=lambda group: group[1].cells[0].cell if group[1].cells else "")
    results = {cell.cell: cell for _, part in groups for cell in part.cells}
    traces = (
        TraceFile(trace.profiler, f"{GROUPS_FOLDER}/{name}/{trace.path}", trace.cells)
        for name, part in groups
        for trace in part.traces
    )
    problems = (problem for _, part in groups for problem in part.problems)
    environments = [part.environment for _, part in groups if part.environment]
    gpu_keys = {each["gpu_key"] for each in environments if "gpu_key" in each}
    return replace(
        run,
        cells=tuple(results.get(cell.cell, cell) for cell in run.cells),
        traces=tuple(traces),
        problems=tuple(dict.fromkeys(problems)),
        # the times are unknown if the times of any group are unknown
        periods=(
            tuple(period for _, part in groups for period in part.periods)
            if all(part.periods for _, part in groups)
            else ()
        ),
        # the first environment, with the keys of all GPUs that were used
        environment=(environments[0] if environments else {})
        | ({"gpu_key": ",".join(sorted(gpu_keys))} if gpu_keys else {}),
    )


def with_result(cell: Cell, result: Cell) -> Cell:
    """Return the cell with the added result of a process.

    Replace a pending cell with the result of the first process. If the cell is `ok`, add the samples
    of each later process, or a warning if the process failed. Ignore all other results.
    """
    if cell.status == "pending":
        return result if result.process == 0 else cell
    if cell.status != "ok" or not cell.process < result.process < PROCESSES[1]:
        return cell
    if result.status != "ok":
        why = (result.message or "").splitlines()[:1]
        text = f"process {result.process + 1} has the status {result.status} and no samples"
        warnings = (*cell.warnings, ": ".join([text, *why]))
        return replace(cell, process=result.process, warnings=warnings)
    names = {**cell.samples, **result.samples}
    return replace(
        cell,
        process=result.process,
        samples={name: cell.samples.get(name, []) + result.samples.get(name, []) for name in names},
        turns={
            name: cell.turns.get(name, []) + result.turns.get(name, [])
            for name in {**cell.turns, **result.turns}
        },
        clocks=_merge_clocks(cell.clocks, result.clocks),
        duration_ns=(cell.duration_ns or 0) + (result.duration_ns or 0),
        warnings=tuple(dict.fromkeys((*cell.warnings, *result.warnings))),
    )


def _merge_clocks(first: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Merge the clocks of two processes. Weight their medians by the number of readings."""
    merged, counts = first | more, (first.get("readings", 1), more.get("readings", 1))
    for name in first.keys() & more.keys():
        values = first[name], more[name]
        if name == "throttle_reasons":
            merged[name] = values[0] | values[1]
        elif name == "readings":
            merged[name] = sum(values)
        elif name.endswith(("_min", "_max")):
            merged[name] = min(values) if name.endswith("_min") else max(values)
        else:
            merged[name] = (values[0] * counts[0] + values[1] * counts[1]) / sum(counts)
    return merged


def _with_journal(folder: Path, run: Run) -> Run:
    """Add the results in the journal to the run. Ignore lines that are incomplete after a crash."""
    path = folder / JOURNAL_FILE
    cells = {cell.cell: cell for cell in run.cells}
    try:
        for line in read_lines(path, within=folder):
            with contextlib.suppress(*NOT_A_RECORD):
                result = decode_json(line, JournalEntry).result
                if result is not None and result.cell in cells:
                    cells[result.cell] = with_result(cells[result.cell], result)
    except FileNotFoundError:
        return run
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None
    return replace(run, cells=tuple(cells[cell.cell] for cell in run.cells))


def observed_journals(folder: Path) -> list[Path]:
    """Return the journals of an observed program, one per process."""
    return sorted(folder.glob("[0-9]*.jsonl"))


def counts_file(journal: Path) -> Path:
    """Return the path of the file beside a journal in which the process counts calls.

    Old journals have no such file.
    """
    return journal.with_suffix(".counts")


def observed_rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the events in a journal of an observed process, then the numbers of attention calls.

    Yield None for an invalid or incomplete line. Raise TraceFormatError if a file cannot be read.
    """
    counts = counts_file(path)
    try:
        failed = False
        for line in read_lines(path, within=path.parent):
            row = None
            with contextlib.suppress(*NOT_A_RECORD):
                row = decode_json(line, dict[str, Any])
            failed |= row is not None and row.get("event") == "failed"
            yield row
        numbers = read_input(counts, within=path.parent) if counts.is_file() else b""
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None
    if numbers:
        # maps each template (a kind of call) to the number of calls per combination of lengths
        found: dict[int, list[list[int]]] = {}
        whole = numbers[: len(numbers) // 40 * 40]
        for template, *lengths, calls in struct.iter_unpack("=5q", whole):
            if template:
                key = [] if lengths == [-1, -1, -1] else lengths
                found.setdefault(template - 1, []).append([*key, calls])
        totals = [[number, sum(row[-1] for row in rows), rows] for number, rows in found.items()]
        yield {"event": "counts", "counts": totals, "final": not failed}


@dataclass(frozen=True)
class JournalEntry:
    """One line of the journal, such as the start, a stage or the end of a cell."""

    event: str
    cell: str | None = None
    result: Cell | None = None
    environment: dict[str, Any] | None = None
    stage: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class Plan:
    """The work that one worker process does."""

    cells: tuple[Cell, ...]
    protocol: Protocol
    profilers: tuple[str, ...]
    parent: int  # id of the parent process; the worker ends when this process ends
    wrapped: bool = False  # whether nsys or ncu runs the worker, which must then exit normally


@dataclass(frozen=True)
class BenchPlan:
    """The measurements of a benchmark, and their precision."""

    # The first measurement ranks the backends. On a CPU, `wall` replaces all measurements.
    measurements: tuple[str, ...] = GPU_MEASUREMENTS
    precision: float = PRECISION  # target half-width of the 95 % interval, divided by the median
    max_time_s: float = 10.0  # maximum time to sample each cell
    iterations: int | None = None  # number of samples per measurement, instead of a precision

    def part(self, process: int, processes: int) -> BenchPlan:
        """Return the plan of one process if several processes share the samples of a cell."""
        count = self.iterations
        if count is not None:
            count = count // processes + (process < count % processes)
        precision = min(self.precision * processes**0.5, PRECISIONS[1])
        return replace(
            self, precision=precision, max_time_s=self.max_time_s / processes, iterations=count
        )

    def on(self, device: str) -> tuple[str, ...]:
        """Return the measurements that exist on a device, `cuda` or `cpu`."""
        return current_names(self.measurements) if is_gpu(device) else (WALL,)


def current_names(measurements: Sequence[str]) -> tuple[str, ...]:
    """Return the current names of measurements, without duplicates."""
    return tuple(dict.fromkeys(ALIASES.get(name, name) for name in measurements))


def make_plan(
    measurements: Sequence[str], precision: float, max_time_s: float, iterations: int | None = None
) -> BenchPlan:
    """Create a benchmark plan. Ignore duplicate measurements.

    Raise UsageError for unknown measurements and invalid numbers.
    """
    for name in current_names(measurements):
        if name not in GPU_MEASUREMENTS:
            raise UsageError(
                f"unknown measurement {name!r}; choose from {', '.join(GPU_MEASUREMENTS)}"
            )
    require_number("precision", precision, *PRECISIONS)
    require_number("max_time_s", max_time_s, SHORTEST_SAMPLING_S, LONGEST_S)
    if iterations is not None:
        require_number("iterations", iterations, 1, whole=True)
    chosen = current_names(measurements) or GPU_MEASUREMENTS
    return BenchPlan(chosen, precision, max_time_s, iterations)


def turn_order(seed: int, config: str, round_number: int, count: int) -> list[int]:
    """Return the numbers from 0 to count - 1 in a pseudo-random order that depends on the round."""
    order = list(range(count))
    random.Random(f"{seed}/{config}/{round_number}").shuffle(order)
    return order


@dataclass(frozen=True)
class Fleet:
    """The hosts and GPUs on which the cells of a run are executed."""

    scheduler: str | None = None
    """`local`, `local:2` or the address of a Dask scheduler. None selects this host."""
    gpus: tuple[str, ...] = ()  # the GPU classes; all configs run on every class
    insecure: bool = False  # whether a scheduler on another host may lack TLS


def gpu_classes(given: str | Sequence[str]) -> tuple[str, ...]:
    """Split texts such as `H100,H200` into GPU classes.

    Raise UsageError if a name is empty or if a class occurs twice.
    """
    names = gpu_names(given)
    require_distinct(names, list(map(class_word, names)))
    return names


def gpu_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Split texts such as `H100,H200` into names. Raise UsageError if a name is empty."""
    texts = (given,) if isinstance(given, str) else tuple(given)
    names = tuple(name.strip() for text in texts for name in text.split(","))
    if not all(map(class_word, names)):
        raise UsageError(f"{','.join(texts)!r}: a GPU name is empty; use names such as H100,H200")
    return names


def require_distinct(names: Sequence[str], meant: Sequence[str]) -> None:
    """Raise UsageError if two names have the same class. `meant` lists the class of each name."""
    first: dict[str, str] = {}
    for name, word in zip(names, meant, strict=True):
        if word in first:
            raise UsageError(f"{first[word]} and {name} are the same GPU; give only one name")
        first[word] = name


def class_word(gpu: str) -> str:
    """Convert a GPU class to the form in run ids, such as `rtx4090` for `RTX 4090`."""
    return re.sub(r"[^a-z0-9_.]+", "", gpu.casefold())


@dataclass(frozen=True)
class CaptureOptions:
    """Options of a capture, benchmark or verification besides configs and backends."""

    profilers: tuple[str, ...] = (TORCH,)
    out: Path = RUNS_FOLDER  # parent of the run folder
    protocol: Protocol = field(default_factory=Protocol)
    note: str | None = None
    bench: BenchPlan | None = None  # plan for timing the backends of each config in turns
    kind: str = "capture"  # the command that makes the run, unless `bench` or `cases` is set
    python: str | None = None  # path of another interpreter whose torch is measured
    fleet: Fleet = Fleet()
    # Cases of each config to verify. A verification runs no profilers and ignores numbers of calls.
    cases: tuple[str, ...] = ()
    grad: bool = False  # verify gradients too


@dataclass(frozen=True)
class ObserveOptions:
    """Options for observing a program."""

    profiler: str = TORCH  # `torch`, `nsys` or `none`
    steps: int = 3  # number of recorded steps
    warmup: int = 3  # number of steps without a new kind of call before the recorded steps
    rank: str = "0"  # the rank to record, or `all`
    out: Path = RUNS_FOLDER
    note: str | None = None


@dataclass(frozen=True)
class BenchOptions:
    """Options of a benchmark."""

    configs: Sequence[Config] = ()
    backends: tuple[str, ...] = ()
    run: str | None = None  # a stored run whose results are used instead of new measurements
    baseline: str | None = None
    dtypes: tuple[str, ...] = ()
    measurements: tuple[str, ...] = ()
    precision: float | None = None  # None selects the precision of the stored run, or 1 %
    max_time_s: float = BenchPlan.max_time_s
    iterations: int | None = None
    warmup: int = 10
    convention: str = "exact"
    verify: bool = False
    seed: int = SEED
    timeout_s: float = Protocol.timeout_s
    device: str = Protocol.device
    out: Path = RUNS_FOLDER
    processes: int = 3
    fleet: Fleet = Fleet()
