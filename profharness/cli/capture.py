"""`profharness capture`: the main job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from profharness.cli._options import (
    backend_option,
    capture_progress,
    config_options,
    device_option,
    out_option,
    read_configs,
    split_names,
    store_option,
)

if TYPE_CHECKING:
    from profharness.config import Config
    from profharness.jobs import Captured
    from profharness.run import Protocol


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
@out_option
@store_option
@click.option(
    "--iterations",
    type=click.IntRange(1, 10_000),
    default=5,
    show_default=True,
    help="Profiled calls per cell.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0, 10_000),
    default=3,
    show_default=True,
    help="Calls before the profiled ones.",
)
@click.option(
    "--samples",
    type=click.IntRange(0, 100_000),
    default=30,
    show_default=True,
    help="Unprofiled timing samples; 0: none.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1),
    default=120,
    show_default=True,
    help="Seconds that one cell may take.",
)
@click.option(
    "--metrics",
    multiple=True,
    metavar="NAME",
    help="Metrics that ncu takes besides the default ones. Repeatable, or separated by commas.",
)
@click.option(
    "--section",
    "sections",
    multiple=True,
    metavar="NAME",
    help="Sections that ncu takes, as in `ncu --list-sections`; each costs more passes. Repeatable.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the inputs.")
@device_option
@click.option("--note", help="A remark that is kept with the run.")
@click.option(
    "--resume",
    "resume_folder",
    metavar="RUN",
    help="A run folder or run id: do only its cells that have no result.",
)
def command(
    config: tuple[str, ...],
    configs_file: Path | None,
    backend: tuple[str, ...],
    profiler: tuple[str, ...],
    out: Path,
    store: Path,
    iterations: int,
    warmup: int,
    samples: int,
    timeout_s: float,
    metrics: tuple[str, ...],
    sections: tuple[str, ...],
    seed: int,
    device: str,
    note: str | None,
    resume_folder: str | None,
) -> None:
    """Run attention configs on backends under a profiler.

    Every config runs on every backend in a worker process. The raw traces stay in a run folder,
    and the run goes into the store. A backend that refuses a config is a result, and so is a cell
    that fails or kills its worker.

    torch and events share one pass over the cells and give the timing samples; nsys and ncu wrap
    the worker and take a pass of their own each, over the cells that ran. ncu replays one call a
    cell, kernel by kernel and with cold caches; a cell may take ten times --timeout under it, and
    twice --timeout under nsys.

    \b
    Configs: batch,heads,seq_len,head_dim then, in any order,
      fp16 bf16 fp32  causal  bwd  deterministic
      kv_heads= seq_q= seq_kv= head_dim_v=  dropout=0.1  scale=0.125
      mask=none|bool|float|bool_2d|float_bh|float_grad
      layout=contiguous|bshd|strided_last|offset1|broadcast_batch
    A number may be a set {1,2,4} or a range 128:4096:*2.

    \b
    Examples:
      profharness capture --config 2,8,512,64 --backend auto,flash,math
      profharness capture --config 2,8,512,64 --profiler torch,nsys,ncu
    """
    from profharness.run import Protocol

    configs = read_configs(config, configs_file)
    backends = split_names(backend)
    if resume_folder is not None:
        captured = _resume(resume_folder, out, store, bool(configs or backends))
    else:
        more = split_names(metrics), split_names(sections)
        protocol = Protocol(iterations, warmup, samples, timeout_s, seed, device, *more)
        profilers = split_names(profiler) or ("torch",)
        captured = _capture(configs, backends, profilers, protocol, out, store, note)
    _report(captured)


def _capture(
    configs: Sequence[Config],
    backends: tuple[str, ...],
    profilers: tuple[str, ...],
    protocol: Protocol,
    out: Path,
    store: Path,
    note: str | None,
) -> Captured:
    from profharness.errors import UsageError
    from profharness.jobs import capture_into_store
    from profharness.rows import COUNTERS
    from profharness.runner import CaptureOptions

    if (protocol.metrics or protocol.sections) and not {*COUNTERS} & {*profilers}:
        counters = ", ".join(COUNTERS)
        raise UsageError(f"--metrics and --section are {counters}'s; add --profiler {counters}")
    options = CaptureOptions(profilers, out, protocol, note)
    with capture_progress() as progress:
        return capture_into_store(configs, backends, store, options, progress)


def _resume(text: str, out: Path, store: Path, named: bool) -> Captured:
    """Go on with a run folder; named says whether configs or backends were asked for as well."""
    from profharness.errors import UsageError
    from profharness.jobs import resume_into_store

    if named:
        raise UsageError(
            "--resume goes on with the run's own cells; leave --config, --configs and --backend out"
        )
    with capture_progress() as progress:
        return resume_into_store(_find_folder(text, out), store, progress)


def _find_folder(text: str, out: Path) -> Path:
    """A run folder given as a path, a run id or a unique prefix of one below `out`."""
    from profharness.errors import NotFoundError

    if (Path(text) / "run.json").exists():
        return Path(text)
    found = sorted(path.parent for path in out.glob(f"{text}*/run.json"))
    if text == "latest":
        found = sorted(path.parent for path in out.glob("*/run.json"))[-1:]
    if len(found) != 1:
        many = f"{len(found)} of them fit" if found else "there is none"
        raise NotFoundError(
            f"no run folder {text!r} in {out}: {many}; give the folder's path or a longer id"
        )
    return found[0]


def _report(captured: Captured) -> None:
    """The run's id and what came of its cells on stdout; what failed, with its message, on stderr.

    Raises CaptureError if a profiler did not do its work.
    """
    from profharness.errors import CaptureError

    run = captured.run
    counts = Counter(cell.status for cell in run.cells)
    summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    click.echo(f"{run.run}: {len(run.cells)} cells: {summary}; in {captured.folder}")
    for cell in run.cells:
        if cell.status in FAILED:
            why = cell.message or "not run; --resume goes on with it"
            click.echo(f"{cell.status}: {cell.config} {cell.backend}: {why}", err=True)
    for result in captured.ingested:
        for warning in result.warnings:
            click.echo(f"warning: {warning}", err=True)
    click.echo("see it with: profharness kernels", err=True)
    if run.problems:
        raise CaptureError(_problems(captured))


def _problems(captured: Captured) -> str:
    """What profilers failed at, each with its remedy; the rest of the run is kept."""
    lines = [
        f"{problem.profiler}: {problem.message} [{problem.code}]\n  remedy: {problem.remedy}"
        for problem in captured.run.problems
    ]
    kept = f"what the others saw is kept in {captured.folder}"
    return "\n".join(["not every profiler did its work; " + kept, *lines])
