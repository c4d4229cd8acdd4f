"""`profharness capture`: the main job."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profharness.cli._options import (
    backend_option,
    capture_progress,
    config_options,
    device_option,
    echo,
    hint,
    out_option,
    processes_option,
    read_configs,
    scheduler_options,
    store_option,
    timeout_option,
)
from profharness.config import Config, split_names
from profharness.errors import CaptureError, UsageError
from profharness.files import shell_command
from profharness.processes import PrewarmedWorker, prewarmed_worker
from profharness.profilers.ncu_metrics import metric_names
from profharness.rows import COUNTERS
from profharness.run import GPU, LIMITS, CaptureOptions, Fleet, Protocol
from profharness.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from profharness.jobs import Captured


# a refusal is a result
FAILED = ("crashed", "timeout", "oom", "error", "pending")


@click.command()
@config_options
@backend_option
@click.option(
    "--profiler",
    multiple=True,
    metavar="NAME",
    help="torch (default), events (timing only), nsys, ncu. Repeatable, or separated by commas.",
)
@click.option(
    "--python",
    multiple=True,
    metavar="PYTHON",
    help="Measure the torch of this interpreter, which needs no profharness. Repeatable: one run each.",
)
@out_option
@store_option
@click.option(
    "--iterations",
    type=click.IntRange(*LIMITS["iterations"]),
    default=Protocol.iterations,
    show_default=True,
    help="Profiled calls per cell.",
)
@click.option(
    "--warmup",
    type=click.IntRange(*LIMITS["warmup"]),
    default=Protocol.warmup,
    show_default=True,
    help="Calls before the profiled ones.",
)
@click.option(
    "--samples",
    type=click.IntRange(*LIMITS["samples"]),
    default=Protocol.samples,
    show_default=True,
    help="Unprofiled timing samples; 0: none.",
)
@processes_option(Protocol.processes)
@scheduler_options
@timeout_option(Protocol.timeout_s, "Seconds that one cell may take.")
@click.option(
    "--metrics",
    multiple=True,
    metavar="NAME",
    help="What ncu takes besides its default metrics: tensor, memory, cache, stalls, or metrics by "
    "ncu's own names. Repeatable, or separated by commas.",
)
@click.option(
    "--section",
    "sections",
    multiple=True,
    metavar="NAME",
    help="Sections that ncu takes, as in `ncu --list-sections`; each costs more passes. Repeatable.",
)
@click.option(
    "--seed", type=int, default=Protocol.seed, show_default=True, help="Seed of the inputs."
)
@device_option
@click.option("--note", help="A remark that is kept with the run.")
@click.option(
    "--resume",
    "resume_run",
    metavar="RUN",
    help="A run folder, a run id, or latest: the newest unfinished one. Does only its cells that "
    "have no result.",
)
def command(
    config: tuple[str, ...],
    configs_file: Path | None,
    backend: tuple[str, ...],
    python: tuple[str, ...],
    store: Path,
    resume_run: str | None,
    **options: Any,
) -> None:
    """Run attention configs on backends under a profiler.

    Without a config it runs an everyday set, smaller on a CPU, which it prints first.

    Every config runs on every backend in a worker process. The raw traces stay in a run folder,
    and the run goes into the store. A backend that refuses a config is a result, and so is a cell
    that fails or kills its worker.

    torch and events share one pass over the cells and give the timing samples; nsys and ncu wrap
    the worker and take a pass of their own each, over the cells that ran. ncu replays one call a
    cell, kernel by kernel and with cold caches; a cell may take ten times --timeout under it, and
    twice --timeout under nsys.

    \b
    Configs: batch,heads,seq_len,head_dim then, in any order,
      {grammar}
    A number may be a set {1,2,4} or a range 128:4096:*2.

    \b
    Examples:
      profharness capture --config 2,8,512,64 --backend auto,flash,math
      profharness capture --config 2,8,512,64 --profiler torch,nsys,ncu
      profharness capture --config 2,8,512,64 --profiler torch,ncu --metrics tensor,memory,cache,stalls
      profharness capture --python old/bin/python --python new/bin/python
    """
    # before the imports: the worker loads torch meanwhile
    in_this_python = not (resume_run or python or options["profiler"])
    wanted = in_this_python and options["fleet"] == Fleet()
    with prewarmed_worker(wanted=wanted) as prewarmed:
        configs = read_configs(config, configs_file)
        _capture(configs, backend, python, store, resume_run, prewarmed, **options)


def _capture(
    configs: list[Config],
    backend: tuple[str, ...],
    python: tuple[str, ...],
    store: Path,
    resume_run: str | None,
    prewarmed: PrewarmedWorker | None,
    **options: Any,
) -> None:
    # --help does not need the modules that run workers
    from profharness import jobs

    if resume_run is not None:
        if configs or backend or python:
            raise UsageError(
                "--resume goes on with the run's own cells; leave --config, --configs, --backend "
                "and --python out"
            )
        folder = jobs.find_run_folder(resume_run, options["out"])
        with capture_progress() as progress:
            captured = jobs.resume_into_store(folder, store, progress, options["fleet"])
        _report([captured], store)
        return
    chosen = _options(**options)
    configs = configs or _shown(jobs.everyday_configs(chosen.protocol.device, chosen.fleet))
    asked = configs, split_names(backend), store, chosen
    if python:
        listener = jobs.Listener(hint, capture_progress)
        _report(jobs.capture_with_each(python, *asked, listener), store)
        return
    with capture_progress() as progress:
        captured = jobs.capture_into_store(*asked, progress, prewarmed)
    _report([captured, *captured.others], store)


def _options(
    out: Path,
    profiler: tuple[str, ...],
    metrics: tuple[str, ...],
    sections: tuple[str, ...],
    note: str | None,
    fleet: Fleet,
    **protocol: Any,
) -> CaptureOptions:
    """Raises UsageError for counters without a profiler that takes them."""
    profilers = split_names(profiler) or CaptureOptions.profilers
    counters = split_names(metrics), split_names(sections)
    if any(counters) and not {*COUNTERS} & {*profilers}:
        names = ", ".join(COUNTERS)
        raise UsageError(f"--metrics and --section are {names}'s; add --profiler {names}")
    settings = Protocol(**protocol, metrics=metric_names(counters[0]), sections=counters[1])
    return CaptureOptions(profilers, out, settings, note, fleet=fleet)


def _shown(everyday: dict[str, Config]) -> list[Config]:
    """The everyday configs, told before anything runs."""
    hint("no config is named, so the everyday set runs; name others, as in --config 2,8,512,64")
    for use, config in everyday.items():
        hint(f"  {use:15}  {config}")
    return list(everyday.values())


def _report(each: Iterable[Captured], store: Path) -> None:
    """Each run as it comes, and of several how they compare. Raises CaptureError if a profiler or an
    interpreter did not do its work.
    """
    runs: list[str] = []
    failures: list[str] = []
    try:
        for captured in each:
            runs.append(captured.run.run)
            failures += _failures(captured, store)
    except CaptureError as error:  # of the interpreters that were left out
        failures.append(str(error))
    if len(runs) > 1:
        for run in runs[1:]:
            hint(f"compare them with: {shell_command('diff', runs[0], run, store=store)}")
    if failures:
        raise CaptureError("\n".join(failures))


def _failures(captured: Captured, store: Path) -> list[str]:
    """The run's id and what came of its cells on stdout; what failed, with its message, on stderr.
    Returns what its profilers failed at.
    """
    run = captured.run
    again = shell_command("capture", "--resume", str(captured.folder), store=store)
    counts = Counter(cell.status for cell in run.cells)
    summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    echo(f"{run.run}: {len(run.cells)} cells: {summary}; in {captured.folder}")
    for cell in run.cells:
        if cell.status in FAILED:
            why = cell.message or f"not run; go on with: {again}"
            hint(f"{cell.status}: {cell.config} {cell.backend}: {why}")
    for result in captured.ingested:
        for warning in result.warnings:
            hint(f"warning: {warning}")
    with open_store(store) as opened:
        hint(f"see it with: {opened.shown_by(run.run)}")
    failed = [problem for problem in run.problems if problem.profiler != GPU]  # those were told
    lines = [
        f"{problem.profiler}: {problem.message} [{problem.code}]\n  remedy: {problem.remedy}"
        for problem in failed
    ]
    kept = f"what the others saw is kept in {captured.folder}"
    return ["not every profiler did its work; " + kept, *lines] if lines else []
