"""The run folder's run.json: what a capture planned, what came of it, and which raw traces belong
to it.

The worker appends one `JournalEntry` a line to journal.jsonl as it goes; run.json is the sum of it,
rewritten whole. A folder whose run.json is older than its journal (a run that was killed) loads
just as well.
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
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from profharness.config import Config
from profharness.errors import TraceFormatError, UnwritableError, UsageError
from profharness.files import RUNS_FOLDER, decode_json, read_input, read_json, read_lines
from profharness.rows import ALIASES, GPU_MEASUREMENTS, WALL, Refusal

RUN_FILE = "run.json"
JOURNAL_FILE = "journal.jsonl"
CAMPAIGN_FILE = "campaign.json"  # in the folder of a run that is cut into groups
GROUPS_FOLDER = "groups"  # there, with a run folder for each group
GROUP_NAME = re.compile(r"\w[\w-]*")
PLAN_FILE = "plan.json"
SCHEMA = "profharness.run/1"
GPU = "gpu"  # in place of a profiler: a problem that makes times doubtful, and fails no run
EXIT_UNWRITABLE = 72  # of a worker that cannot write to the run folder
UNWRITABLE = "the run folder takes nothing: "  # what such a worker prints, with the reason
BENCH_FILE = "bench.json"
PYTHON_FILE = "python"  # in a run folder that has something left to do, of another interpreter
PRECISION = 0.01
NOT_A_RECORD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # of msgspec's decoding
PRECISIONS = (1e-9, 1 - 1e-9)
SHORTEST_SAMPLING_S = 1e-6
T = TypeVar("T")
_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0}
OBSERVE = "observe"
KINDS = ("capture", "bench", "verify", "explain", OBSERVE)  # the commands that make runs
STATUSES = ("ok", "refused", "oom", "error", "crashed", "timeout", "pending")


@dataclass(frozen=True)
class Check:
    """One comparison of a verified cell with the fp64 reference; fields as in `VerificationRow`."""

    what: str
    passed: bool | None
    message: str | None = None
    error: float | None = None
    allowance: float | None = None
    relative_error: float | None = None
    relative_allowance: float | None = None


@dataclass(frozen=True)
class Cell:
    """One config on one backend in one run, and what came of it.

    samples: name of what was measured (`rows.MEASUREMENTS`, and `host`) to raw nanoseconds a call.
    choice is what PyTorch itself said it would choose (`_fused_sdp_choice`) for the inputs in the
    backend's own context. iterations counts the profiled calls. compile_ns is what loading and the
    first call took, for backends besides PyTorch's own. tuning is what an implementation says that it
    chose for the last call, where it has `tuning()`. A cell of `verify` names its case and the
    label of the config that the case was derived from. turns: measurement name to process, turn and
    number of samples, in the order of the samples. process is the last one that timed it, from 0.
    """

    cell: str
    config: Config
    backend: str
    status: str = "pending"
    message: str | None = None
    choice: str | None = None
    iterations: int = 0
    samples: dict[str, list[int]] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    peak_memory_bytes: int | None = None
    duration_ns: int | None = None
    clocks: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    compile_ns: int | None = None
    case: str | None = None
    asked: str | None = None
    checks: tuple[Check, ...] = ()
    tuning: dict[str, Any] | None = None
    turns: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    process: int = 0


@dataclass(frozen=True)
class TraceFile:
    """One raw trace of a run, relative to its folder; cells it covers."""

    profiler: str
    path: str
    cells: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """What a profiler of a run failed to do, and what helps; or, with GPU for the profiler, what may
    have disturbed the times. code is one of those in docs/nsight.md; raw is the tool's own text;
    cells are those without its rows (empty: all of them).
    """

    profiler: str
    code: str
    message: str
    remedy: str
    raw: str = ""
    cells: tuple[str, ...] = ()


@dataclass(frozen=True)
class Protocol:
    """How the cells were run: counts of calls, the seconds a cell may take, what ncu was asked for
    besides its default metrics, and in how many worker processes each cell is timed.
    """

    iterations: int = 5
    warmup: int = 3
    samples: int = 30
    timeout_s: float = 120.0
    seed: int = 0
    device: str = "auto"
    metrics: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    processes: int = 1


DEVICES = ("auto", "cuda", "cpu")
LIMITS = {"iterations": (1, 10_000), "warmup": (0, 10_000), "samples": (0, 100_000)}
"""How many calls a capture may be asked for."""
PROCESSES = (1, 100)
SHORTEST_S, LONGEST_S = 0.1, 1e9
SEEDS = (-(2**63), 2**64 - 1)  # what torch.Generator takes


def check_protocol(protocol: Protocol, *, counted: bool = False) -> None:
    """Raise UsageError for what no worker can be asked for; counted: the counts have LIMITS."""
    for name, (low, high) in LIMITS.items():
        limits = (low, high) if counted else (0, math.inf)
        require_number(name, getattr(protocol, name), *limits, whole=True)
    require_number("processes", protocol.processes, *PROCESSES, whole=True)
    require_number("seed", protocol.seed, *SEEDS, whole=True)
    require_number("timeout_s", protocol.timeout_s, SHORTEST_S, LONGEST_S)
    require_device(protocol.device)


def require_device(device: str) -> None:
    """Raise UsageError for a device that is none."""
    if device not in DEVICES:
        raise UsageError(f"device {device!r} is not one of {', '.join(DEVICES)}")


def require_number(
    name: str, value: object, low: float, high: float = math.inf, *, whole: bool = False
) -> None:
    """Raise UsageError for what is no number, or outside of both limits, which belong to it."""
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        kind = "whole number" if whole else "number"
        limits = f"from {low:,}" + (f" to {high:,}" if high < math.inf else " on")
        raise UsageError(f"{name}={value!r} is not a {kind} {limits}")


@dataclass(frozen=True)
class Run:
    """A whole run. environment is `environment.collect()`'s answer, flat keys to JSON values.

    kind is the command that made it: one of KINDS. bench is the plan by which cells were timed.
    """

    run: str
    created: str
    profilers: tuple[str, ...]
    protocol: Protocol
    cells: tuple[Cell, ...]
    environment: dict[str, Any] = field(default_factory=dict)
    traces: tuple[TraceFile, ...] = ()
    note: str | None = None
    profharness: str = ""
    schema: str = SCHEMA
    problems: tuple[Problem, ...] = ()
    kind: str | None = None
    bench: BenchPlan | None = None


def run_kind(folder: Path, run: Run) -> str:
    """The command that made a run; a record without one is judged by what its folder holds."""
    if run.kind in KINDS:
        return run.kind
    if any(cell.case is not None for cell in run.cells):
        return "verify"
    return "bench" if run.bench or (folder / BENCH_FILE).is_file() else "capture"


def write_run(folder: Path, run: Run) -> None:
    """Write run.json whole or not at all (a temporary file beside it, then a rename). Raises
    UnwritableError.
    """
    # hosts that share a folder share no process ids
    temporary = folder / f".{RUN_FILE}.{os.urandom(6).hex()}"
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1))
        temporary.replace(folder / RUN_FILE)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise unwritable(folder, error.strerror) from None


def unwritable(folder: Path, why: str | None) -> UnwritableError:
    """The error of a run folder that cannot be written to; what stands in it can be gone on with."""
    return UnwritableError(
        f"{folder}: cannot be written to: {why}; mend that, then go on with what is kept: "
        f"profharness capture --resume {shlex.quote(str(folder))}"
    )


def read_part(path: Path, kind: type[T], what: str) -> T:
    """Decode a JSON file of a run folder. Raises FileNotFoundError, and TraceFormatError for a file that
    is not what it should be.
    """
    try:
        return read_json(path, kind, within=path.parent)
    except FileNotFoundError:
        raise
    except NOT_A_RECORD as error:
        raise TraceFormatError(path, f"not {what}: {error}") from None
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None


def read_record(folder: Path) -> Run:
    """What run.json of a run folder says. Raises TraceFormatError."""
    path = folder / RUN_FILE
    try:
        run = read_part(path, Run, f"a run record of schema {SCHEMA}")
    except FileNotFoundError:
        expected = "a run folder, as `profharness capture` writes it"
        raise TraceFormatError(folder, "no run.json in this folder", expected=expected) from None
    if run.schema != SCHEMA:
        raise TraceFormatError(path, f"schema {run.schema!r}", expected=SCHEMA)
    return run


def read_run(folder: Path) -> Run:
    """Read a run folder, newer journal lines and groups of a campaign included. Raises TraceFormatError."""
    run = _with_journal(folder, read_record(folder))
    return _with_groups(folder, run) if (folder / CAMPAIGN_FILE).is_file() else run


def _with_groups(folder: Path, run: Run) -> Run:
    """The run of a campaign with what its groups that are done have given."""
    groups = [
        (path.name, _with_journal(path, read_record(path)))
        for path in (folder / GROUPS_FOLDER).glob("*")
        # a link may lead anywhere, also back up
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
    return replace(
        run,
        cells=tuple(results.get(cell.cell, cell) for cell in run.cells),
        traces=tuple(traces),
        problems=tuple(dict.fromkeys(problems)),
        environment=_one_environment(environments),
    )


def _one_environment(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """That of the first group, with the keys of all GPUs that were used."""
    keys = sorted({environment["gpu_key"] for environment in each if "gpu_key" in environment})
    return (dict(each[0]) if each else {}) | ({"gpu_key": ",".join(keys)} if keys else {})


def with_result(cell: Cell, result: Cell) -> Cell:
    """The cell with a result of it: its first one, or what a later process adds to that. Any other
    changes nothing.
    """
    if cell.status == "pending":
        return result if result.process == 0 else cell
    if cell.status != "ok" or not cell.process < result.process < PROCESSES[1]:
        return cell
    if result.status != "ok":
        why = (result.message or "").splitlines()[:1]
        text = f"process {result.process + 1} ended as {result.status}, so it gave no samples"
        warnings = (*cell.warnings, ": ".join([text, *why]))
        return replace(cell, process=result.process, warnings=warnings)
    return replace(
        cell,
        process=result.process,
        samples=_appended(cell.samples, result.samples),
        turns=_appended(cell.turns, result.turns),
        clocks=_merged_clocks(cell.clocks, result.clocks),
        duration_ns=(cell.duration_ns or 0) + (result.duration_ns or 0),
        warnings=tuple(dict.fromkeys((*cell.warnings, *result.warnings))),
    )


def _appended(first: dict[str, list[T]], more: dict[str, list[T]]) -> dict[str, list[T]]:
    return {name: [*first.get(name, ()), *more.get(name, ())] for name in {**first, **more}}


def _merged_clocks(first: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The clocks of two processes as one: extremes of both, all throttle reasons, and the mean of the
    medians by their readings.
    """
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
    """The run with the results in its journal; a line cut short by a crash is passed over."""
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
    """The journals of an observed program, one a process."""
    return sorted(folder.glob("[0-9]*.jsonl"))


def counts_file(journal: Path) -> Path:
    """The file beside a journal in which its process counts calls; journals of old have none."""
    return journal.with_suffix(".counts")


def observed_rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """The events in a journal of an observed process, and at its end the counts of its calls; None for
    a line that is no event, as one that a crash cut short. Raises TraceFormatError for a file that
    cannot be read.
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
        yield {"event": "counts", "counts": _counts(numbers), "final": not failed}


def _counts(numbers: bytes) -> list[Any]:
    """Template, calls, and calls by lengths of each row of the observer's `Counts`."""
    found: dict[int, list[list[int]]] = {}
    for template, *lengths, calls in struct.iter_unpack("=5q", numbers[: len(numbers) // 40 * 40]):
        if template:
            key = [] if lengths == [-1, -1, -1] else lengths
            found.setdefault(template - 1, []).append([*key, calls])
    return [[number, sum(row[-1] for row in rows), rows] for number, rows in found.items()]


@dataclass(frozen=True)
class JournalEntry:
    """One line of the journal: a cell begins, a cell ended, or the worker tells its environment or a
    problem.
    """

    event: str
    cell: str | None = None
    result: Cell | None = None
    environment: dict[str, Any] | None = None
    stage: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class Plan:
    """What one worker process is to do. parent is the process whose end is the worker's too;
    wrapped: another program watches the worker and has to see it end in order.
    """

    cells: tuple[Cell, ...]
    protocol: Protocol
    profilers: tuple[str, ...]
    parent: int
    wrapped: bool = False


@dataclass(frozen=True)
class BenchPlan:
    """precision: half the width of the 95 % interval over the median at which a measurement is
    done; max_time_s: seconds of sampling that one cell may take; iterations fixes the samples of
    each measurement instead (None: until precise or out of time). measurements are of `GPU_MEASUREMENTS`;
    on a CPU the wall clock stands in for all of them. The first one ranks.
    """

    measurements: tuple[str, ...] = GPU_MEASUREMENTS
    precision: float = PRECISION
    max_time_s: float = 10.0
    iterations: int | None = None

    def part(self, process: int, processes: int) -> BenchPlan:
        """What one of several processes has to do; together they do the plan."""
        count = self.iterations
        if count is not None:
            count = count // processes + (process < count % processes)
        precision = min(self.precision * processes**0.5, PRECISIONS[1])
        return replace(
            self, precision=precision, max_time_s=self.max_time_s / processes, iterations=count
        )

    def on(self, device: str) -> tuple[str, ...]:
        """The measurements that exist on a device, `cuda` or `cpu`."""
        return current_names(self.measurements) if device == "cuda" else (WALL,)


def current_names(measurements: Sequence[str]) -> tuple[str, ...]:
    """Measurements as they are called now, each once."""
    return tuple(dict.fromkeys(ALIASES.get(name, name) for name in measurements))


def make_plan(
    measurements: Sequence[str], precision: float, max_time_s: float, iterations: int | None = None
) -> BenchPlan:
    """A plan of known measurements, each once. Raises UsageError for an unknown one, and for numbers
    that cannot be.
    """
    for name in current_names(measurements):
        if name not in GPU_MEASUREMENTS:
            raise UsageError(f"no measurement {name!r}; known are {', '.join(GPU_MEASUREMENTS)}")
    require_number("precision", precision, *PRECISIONS)
    require_number("max_time_s", max_time_s, SHORTEST_SAMPLING_S, LONGEST_S)
    if iterations is not None:
        require_number("iterations", iterations, 1, whole=True)
    chosen = current_names(measurements) or GPU_MEASUREMENTS
    return BenchPlan(chosen, precision, max_time_s, iterations)


def parse_precision(text: str) -> float:
    """`1%` or `0.01` as a fraction above 0 and below 1. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value < 1:
        raise UsageError(f"precision {text!r}: write 1% or 0.01, above 0 and below 100%")
    return value


def parse_seconds(text: str) -> float:
    """`30`, `30s`, `500ms` or `2m` in seconds, above 0. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(ms|s|min|m|)\s*", text)
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if value <= 0:
        raise UsageError(f"time {text!r}: write 30s, 500ms or 2m")
    return value


def turn_order(seed: int, config: str, round_number: int, count: int) -> list[int]:
    """The places 0 to count - 1 in the order of one round, the same for the same arguments."""
    order = list(range(count))
    random.Random(f"{seed}/{config}/{round_number}").shuffle(order)
    return order


@dataclass(frozen=True)
class Fleet:
    """Where the cells of a run are executed."""

    scheduler: str | None = None
    """`local`, `local:2` or the address of a Dask scheduler. None selects this host, with all of
    its GPUs if there are several."""
    gpus: tuple[str, ...] = ()
    """The GPU classes that run every config."""
    insecure: bool = False
    """Allow a scheduler without TLS on another host."""


def gpu_classes(given: str | Sequence[str]) -> tuple[str, ...]:
    """The classes of GPU in texts such as `H100,H200`. Raises UsageError where there is no name in one,
    and for a class that is named twice.
    """
    names = gpu_names(given)
    require_apart(names, list(map(class_word, names)))
    return names


def gpu_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """The names in such texts. Raises UsageError where one is empty."""
    texts = (given,) if isinstance(given, str) else tuple(given)
    names = tuple(name.strip() for text in texts for name in text.split(","))
    if not all(map(class_word, names)):
        raise UsageError(f"--gpu {','.join(texts)!r}: a class has no name; say them as H100,H200")
    return names


def require_apart(names: Sequence[str], meant: Sequence[str]) -> None:
    """Raises UsageError for two names that mean one class; meant: what each of them means."""
    for place, word in enumerate(meant):
        first = meant.index(word)
        if first < place:
            raise UsageError(
                f"--gpu: {names[first]} and {names[place]} are one class; name it once"
            )


def class_word(gpu: str) -> str:
    """Return a GPU class as a part of a run id: lower case, without blanks."""
    return re.sub(r"[^a-z0-9_.]+", "", gpu.casefold())


@dataclass(frozen=True)
class CaptureOptions:
    """Options besides configs and backends. out: the folder of the run folders; bench: time the
    backends of each config in turns, as this plan says; kind: the command, unless that is bench.
    python: the path of the interpreter whose torch is measured, None for this one.
    """

    profilers: tuple[str, ...] = ("torch",)
    out: Path = RUNS_FOLDER
    protocol: Protocol = field(default_factory=Protocol)
    note: str | None = None
    bench: BenchPlan | None = None
    kind: str = "capture"
    python: str | None = None
    fleet: Fleet = Fleet()


@dataclass(frozen=True)
class ObserveOptions:
    """How a program is observed. profiler: `torch`, `nsys` or `none`; steps: of its window; warmup:
    steps without a call of a new kind before that; rank: the one whose process gets a window, or `all`.
    """

    profiler: str = "torch"
    steps: int = 3
    warmup: int = 3
    rank: str = "0"
    out: Path = RUNS_FOLDER
    note: str | None = None


@dataclass(frozen=True)
class VerifyOptions:
    """What a verification is asked for besides configs and backends. grad: gradients too; of the
    protocol its counts of calls do not matter.
    """

    cases: tuple[str, ...] = ("standard",)
    grad: bool = False
    out: Path = RUNS_FOLDER
    protocol: Protocol = field(default_factory=Protocol)
    fleet: Fleet = Fleet()


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command. run: answer from this stored run instead of measuring; precision
    None: 1 %, or what the stored run was measured with.
    """

    configs: Sequence[Config] = ()
    backends: tuple[str, ...] = ()
    run: str | None = None
    baseline: str | None = None
    dtypes: tuple[str, ...] = ()
    measurements: tuple[str, ...] = ()
    precision: float | None = None
    max_time_s: float = BenchPlan.max_time_s
    iterations: int | None = None
    warmup: int = 10
    convention: str = "exact"
    verify: bool = False
    seed: int = 42
    timeout_s: float = Protocol.timeout_s
    device: str = Protocol.device
    out: Path = RUNS_FOLDER
    processes: int = 3
    fleet: Fleet = Fleet()


def write_plan(folder: Path, plan: BenchPlan) -> None:
    """Leave the plan in a run folder."""
    (folder / BENCH_FILE).write_bytes(msgspec.json.encode(plan))


def read_plan(folder: Path) -> BenchPlan | None:
    """What `write_plan` left; None for a run that is no bench. Raises TraceFormatError."""
    try:
        return read_part(folder / BENCH_FILE, BenchPlan, "the plan of a bench")
    except FileNotFoundError:
        return None
