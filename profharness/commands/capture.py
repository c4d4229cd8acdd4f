"""`profharness capture`: run attention configs on backends under a profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from profharness.attention.config import Config, grammar_lines, split_names
from profharness.commands._command import command, declaration_of, document, usage
from profharness.commands._options import Option
from profharness.commands._output import (
    CPU_RAN,
    echo,
    hint,
    hint_cpu,
    is_command_line,
    run_listener,
)
from profharness.commands._types import (
    SEVERAL_VALUES,
    BackendsToRun,
    ConfigArguments,
    ConfigLike,
    Device,
    GpuClasses,
    Insecure,
    Names,
    OutFolder,
    PathLike,
    Processes,
    Scheduler,
    Seed,
    ShowProgress,
    Store,
    backend_names,
    complete_names,
    config_list,
    fleet,
    store_path,
    timeout_option,
)
from profharness.errors import CaptureError, UsageError, counted
from profharness.files import RUNS_FOLDER, shell_command
from profharness.processes import prewarmed_worker
from profharness.recording.profilers import PROFILERS
from profharness.recording.profilers.ncu import PRESETS, metric_names
from profharness.rows import COUNTERS
from profharness.run import GPU, LIMITS, CaptureOptions, Cell, Fleet, Protocol

if TYPE_CHECKING:
    import pandas as pd

    from profharness.jobs.into_store import Captured

OUTCOMES = {"oom": "out of memory", "error": "failed", "pending": "not run"}
# statuses of failed cells; a refusal is a valid result
FAILED = ("crashed", "timeout", "oom", "error", "pending")

Profilers = Annotated[
    Names | None,
    Option(
        ("--profiler",),
        complete=complete_names(lambda: PROFILERS),
        multiple=True,
        metavar="NAME",
        help="The profiler to use: torch, events (timing only), nsys, ncu or rocprofv3. "
        f"{SEVERAL_VALUES}  [default: torch]",
    ),
]
Pythons = Annotated[
    Names,
    Option(
        ("--python",),
        multiple=True,
        metavar="PYTHON",
        help="Measure the torch that this Python interpreter imports; profharness need not be "
        "installed there. If the option is repeated, each interpreter gets its own run.",
    ),
]
Iterations = Annotated[
    int,
    Option(
        ("--iterations",),
        type=click.IntRange(*LIMITS["iterations"]),
        help="Profiled calls per cell.",
    ),
]
Warmup = Annotated[
    int,
    Option(
        ("--warmup",),
        type=click.IntRange(*LIMITS["warmup"]),
        help="Number of warm-up calls before the profiled calls.",
    ),
]
Samples = Annotated[
    int,
    Option(
        ("--samples",),
        type=click.IntRange(*LIMITS["samples"]),
        help="Number of timing samples to take without a profiler; 0 disables timing.",
        click={"show_default": True},
    ),
]
Timeout = Annotated[float, timeout_option("Time limit for each cell.")]
Metrics = Annotated[
    Names,
    Option(
        ("--metrics",),
        complete=complete_names(lambda: PRESETS),
        multiple=True,
        metavar="NAME",
        help=(
            "An additional metric for ncu to collect: a preset (tensor, memory, cache or stalls) "
            "or the name of an ncu metric. Separate several values by commas, or repeat the option."
        ),
    ),
]
Sections = Annotated[
    Names,
    Option(
        ("--section",),
        multiple=True,
        metavar="NAME",
        help=(
            "A section for ncu to collect, as listed by `ncu --list-sections`. Each section "
            "requires additional ncu passes. Repeatable."
        ),
    ),
]
RunNote = Annotated[str | None, Option(("--note",), help="A remark to store with the run.")]
UnfinishedRun = Annotated[
    PathLike | None,
    Option(
        ("--resume",),
        metavar="RUN",
        type=click.STRING,
        help="Resume this capture or benchmark: a run folder, a run id, or latest for the newest "
        "unfinished one. Only cells without a result are run.",
    ),
]


@dataclass(frozen=True)
class CapturedRuns:
    """The runs of a capture. The iterator yields each run when it ends."""

    store: Path
    runs: Iterator[Captured]


def _to_frame(captured: CapturedRuns) -> pd.DataFrame:
    import pandas as pd

    from profharness.commands._python import cells

    each = [cells(done.run.run, store=captured.store) for done in captured.runs]
    return pd.concat(each, ignore_index=True) if len(each) > 1 else each[0]


@command("capture", frame=_to_frame, fill={"grammar": "\n  ".join(grammar_lines())})
def capture(
    configs: ConfigArguments = None,
    backends: BackendsToRun = None,
    *,
    profilers: Profilers = None,
    python: Pythons = (),
    out: OutFolder = RUNS_FOLDER,
    store: Store = None,
    iterations: Iterations = Protocol.iterations,
    warmup: Warmup = Protocol.warmup,
    samples: Samples = Protocol.samples,
    processes: Processes = Protocol.processes,
    scheduler: Scheduler = None,
    gpu: GpuClasses = (),
    insecure: Insecure = False,
    timeout_s: Timeout = Protocol.timeout_s,
    metrics: Metrics = (),
    sections: Sections = (),
    seed: Seed = Protocol.seed,
    device: Device = Protocol.device,
    note: RunNote = None,
    resume: UnfinishedRun = None,
    progress: ShowProgress = None,
) -> CapturedRuns:
    """Run attention configs on backends under a profiler.

    If no config is given, print a default set of common configs (a smaller set on a CPU) and run
    it.

    Every config runs on every backend in a worker process. The raw traces are kept in a run folder,
    and the run is added to the store. Refusals, failures and worker crashes are recorded as
    results.

    The `torch` and `events` profilers share one pass over all cells, in which the timing samples are
    also taken. The profilers nsys and ncu each run the worker again, for one more pass over the
    cells that have succeeded. Under ncu, one call per cell is replayed kernel by kernel, with cold
    caches. The time limit of a cell is ten times --timeout under ncu, and twice --timeout under
    nsys.

    \b
    Configs: batch,heads,seq_len,head_dim then, in any order,
      {grammar}
    A number may be a set {1,2,4} or a range 128:4096:*2.

    \b
    Examples:
      profharness capture 2,8,512,64 --backend auto,flash,math
      profharness capture 2,8,512,64 --profiler torch,nsys,ncu
      profharness capture 2,8,512,64 --profiler torch,ncu --metrics tensor,memory,cache,stalls
      profharness capture --python old/bin/python --python new/bin/python

    In Python, the result has one row per cell, including cells that failed or were refused.
    `configs` are texts ("2,8,512,64,bf16"), Config objects or a list of them. Raise UsageError for
    invalid arguments, and CaptureError if no worker starts.
    """
    path, pythons, where = (
        store_path(store),
        split_names(python),
        fleet(scheduler, gpu, insecure, device),
    )
    watched = split_names(profilers) or CaptureOptions.profilers
    counters = split_names(metrics), split_names(sections)
    protocol = Protocol(
        iterations,
        warmup,
        samples,
        timeout_s,
        seed,
        device,
        metric_names(counters[0]),
        counters[1],
        processes,
    )
    options = CaptureOptions(watched, Path(out), protocol, note, fleet=where)
    named, chosen = backend_names(backends), config_list(configs)

    def runs() -> Iterator[Captured]:
        # Start the worker before the imports, so that it loads torch in the meantime.
        wanted = not (resume or pythons or profilers) and where == Fleet()
        with prewarmed_worker(wanted=wanted) as prewarmed:
            from profharness.jobs import into_store  # loads the code that runs workers

            listener = run_listener(progress)
            if resume is not None:
                folder = into_store.find_run_folder(str(resume), Path(out))
                with listener.progress() as show_progress:
                    captured = into_store.resume_into_store(folder, path, show_progress, where)
                yield captured
                return
            asked = chosen or _print_everyday(into_store.everyday_configs(device, where))
            if pythons:
                yield from into_store.capture_with_each(
                    pythons, asked, named, path, options, listener
                )
                return
            with listener.progress() as show_progress:
                captured = into_store.capture_into_store(
                    asked, named, path, options, show_progress, prewarmed
                )
            yield captured
            yield from captured.others

    return CapturedRuns(path, runs())


@usage(capture)
def check_options(
    *,
    configs: ConfigLike = None,
    backends: Names | None = None,
    profilers: Names | None = None,
    python: Names = (),
    metrics: Names = (),
    sections: Names = (),
    resume: PathLike | None = None,
) -> None:
    """Raise UsageError for options that have no effect."""
    if resume is not None:
        if configs or backends or python:
            raise UsageError(
                "--resume runs the remaining cells of the run; it cannot be combined with "
                "--config, --configs, --backend or --python"
            )
        return
    if is_command_line() and (metrics or sections) and not {*COUNTERS} & {*split_names(profilers)}:
        names = ", ".join(COUNTERS)
        raise UsageError(f"--metrics and --section require --profiler {names}")


@document(capture)
def show(captured: CapturedRuns) -> None:
    """Print each run when it ends. For several runs, also print the commands that compare them.

    Raise CaptureError if a profiler or an interpreter failed.
    """
    runs: list[str] = []
    failures: list[str] = []
    store = captured.store
    try:
        for each in captured.runs:
            runs.append(each.run.run)
            failures += _print_run(each, store)
    except CaptureError as error:  # some interpreters could not be used
        failures.append(str(error))
    for run in runs[1:]:
        hint(f"To compare the runs, use: {shell_command('diff', runs[0], run, store=store)}")
    if failures:
        raise CaptureError("\n".join(failures))


def _print_everyday(everyday: dict[str, Config]) -> list[Config]:
    """Print and return the everyday configs, before anything runs."""
    hint(
        "No config was given, so a default set of configs is run. To choose your own, use "
        "--config 2,8,512,64"
    )
    for use, config in everyday.items():
        hint(f"  {use:15}  {config}")
    return list(everyday.values())


def _print_run(captured: Captured, store: Path) -> list[str]:
    """Print a summary of the run to stdout, and failed cells and warnings to stderr.

    Return lines about the profilers that failed.
    """
    # imported here so that the worker starts earlier
    from profharness.measurements.measurements import busy_text
    from profharness.store import open_store

    run = captured.run
    again = shell_command("capture", "--resume", str(captured.folder), store=store)
    echo(f"{run.run}: {capture_answer(run.cells)} in {captured.folder}")
    for cell in run.cells:
        if cell.status in FAILED:
            why = cell.message or f"not run; to resume the run, use: {again}"
            hint(f"{cell.status}: {cell.config} {cell.backend}: {why}")
    for result in captured.ingested:
        for warning in result.warnings:
            hint(f"warning: {warning}")
    with open_store(store) as opened:
        if busy := busy_text(opened.kernels(run.run), opened.cells(run.run)):
            hint(f"warning: {busy}")
        hint(f"To show the run, use: {opened.shown_by(run.run)}")
    hint_cpu(run.environment, run.protocol.device, CPU_RAN)
    # Problems of the GPU were already printed as notices.
    failed = [problem for problem in run.problems if problem.profiler != GPU]
    lines = [
        f"{problem.profiler}: {problem.message} [{problem.code}]\n  remedy: {problem.remedy}"
        for problem in failed
    ]
    kept = f"the other profilers' data is in {captured.folder}"
    return ["some profilers failed; " + kept, *lines] if lines else []


def capture_answer(cells: Sequence[Cell]) -> str:
    """Return how many cells ran, and which backends refused or failed: `all 6 cells ran`."""
    ran = sum(cell.status == "ok" for cell in cells)
    lead = f"all {counted(ran, 'cell')} ran" if ran > 1 else "1 cell ran"
    if ran < len(cells):
        lead = f"{ran} of {counted(len(cells), 'cell')} ran"
    parts = [lead]
    for status in dict.fromkeys(cell.status for cell in cells if cell.status != "ok"):
        own = Counter(cell.backend for cell in cells if cell.status == status)
        names = (name if count == 1 else f"{name} {count} times" for name, count in own.items())
        parts.append(f"{OUTCOMES.get(status, status)}: {', '.join(names)}")
    return f"{'; '.join(parts)};"


def resume(
    run: PathLike,
    *,
    store: PathLike | None = None,
    out: PathLike = RUNS_FOLDER,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Run the cells of an interrupted run that have no result. Return one row per cell of the run.

    `run` is a run folder, the id of a run in the `out` folder, a unique prefix of an id, or `latest`.
    Raise NotFoundError if there is no such run.
    """
    return capture(resume=run, store=store, out=out, progress=progress)


DECLARATION = declaration_of(capture)
