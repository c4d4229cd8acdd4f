"""`profharness bench`: latency that can be believed, per config and backend."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from profharness.cli._options import (
    STDOUT,
    SUFFIX_FORMATS,
    backend_option,
    capture_progress,
    check_file,
    complete_runs,
    config_options,
    device_option,
    emit,
    format_option,
    hint,
    measured,
    out_option,
    processes_option,
    read_configs,
    require_charts,
    scheduler_options,
    store_option,
    timeout_option,
)
from profharness.config import split_names
from profharness.environment import lacking
from profharness.errors import MissingExtraError, UsageError
from profharness.files import atomic_file, shell_command
from profharness.rows import GPU_MEASUREMENTS
from profharness.run import BenchOptions, Protocol, parse_precision, parse_seconds
from profharness.views.document import Document
from profharness.views.renderers import RENDERERS

FOLDER_FILES = {
    kind: f"bench{suffix}" for suffix, kind in SUFFIX_FORMATS.items() if suffix != ".htm"
}
ENVIRONMENT_FILE = "environment.json"


def _is_folder(output: Path) -> bool:
    return output.is_dir() or not output.suffix


def _check_output(ctx: click.Context, option: click.Parameter, output: Path | None) -> Path | None:
    """`check_file`, for a folder too."""
    if output is None or output == STDOUT or not _is_folder(output):
        return check_file(ctx, option, output)
    for name in (*FOLDER_FILES.values(), ENVIRONMENT_FILE):
        if (output / name).exists() and not (ctx.params["force"] or ctx.resilient_parsing):
            raise UsageError(f"{output / name}: already exists; --force overwrites it")
    return output


@click.command()
@config_options
@backend_option
@click.option(
    "--dtype", multiple=True, metavar="NAME", help="fp16, bf16, fp32, for configs without."
)
@click.option(
    "--measurement",
    multiple=True,
    metavar="NAME",
    help=f"{', '.join(GPU_MEASUREMENTS)} (default: all); the first one ranks. A CPU has the wall "
    "clock.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=BenchOptions.warmup,
    show_default=True,
    help="Calls.",
)
@click.option("--iterations", type=click.IntRange(1), help="Exactly so many samples each.")
@processes_option(BenchOptions.processes)
@scheduler_options
@click.option(
    "--precision",
    metavar="PART",
    help="Sample until half the 95 % interval of the median is at most this part of it.  "
    "[default: 1%; with --run what the run was measured with]",
)
@click.option(
    "--max-time",
    default=f"{BenchOptions.max_time_s:g}s",
    show_default=True,
    help="Time that sampling one cell may take.",
)
@click.option(
    "--baseline",
    metavar="BACKEND",
    help="What speed-ups are told against: a backend, on each config, or a config.  [default: naive, "
    "else math]",
)
@click.option(
    "--convention",
    type=click.Choice(["exact", "flash-attention"]),
    default=BenchOptions.convention,
    show_default=True,
    help="How FLOPs are counted.",
)
@click.option("--explain", is_flag=True, help="Say every reason why a backend refused.")
@click.option("--verify", is_flag=True, help="Check outputs; a wrong backend is not ranked.")
@click.option("--raw", is_flag=True, help="Put the samples into JSON and CSV too.")
@click.option(
    "--seed", type=int, default=BenchOptions.seed, show_default=True, help="Of inputs and order."
)
@timeout_option(Protocol.timeout_s, "Seconds that one step of a cell may take.")
@device_option
@click.option(
    "--run",
    metavar="RUN",
    shell_complete=complete_runs,
    help="Measure nothing: answer from a stored run, all of it or the configs and backends named.",
)
@out_option
@store_option
@format_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    callback=_check_output,
    help="A file, - for stdout, or a folder (out/) for all formats and the environment.",
)
@click.option("--force", is_flag=True, is_eager=True, help="Overwrite the file or the files of -o.")
def command(
    config: tuple[str, ...],
    configs_file: Path | None,
    backend: tuple[str, ...],
    dtype: tuple[str, ...],
    measurement: tuple[str, ...],
    precision: str | None,
    max_time: str,
    explain: bool,
    raw: bool,
    store: Path,
    format_: str | None,
    output: Path | None,
    force: bool,
    **others: Any,
) -> None:
    """Time backends on configs, side by side.

    All backends of a config are made ready first and then sampled in turns, in an order drawn anew
    each round, so that clocks and temperature hit all alike. cold: one call on the GPU, L2 flushed,
    inputs rotated, the host not in it; graph: CUDA-graph replay; kernel: the kernels of a profiled
    call; eager: calls one after the other, as a program makes them. A cell that is refused, fails,
    crashes or hangs is a row that says why.

    Without --backend, or with `all`, the default backends of the device are timed.

    \b
    Examples:
      profharness bench --config 8,4,128,2048 --backend all,naive --explain
      profharness bench --config '32,8,{128:2048:*2},64' --baseline 32,8,512,64
      profharness bench --config '1,8,{256:4096:*2},64' --backend all --baseline auto
      profharness bench --config 8,4,128,64 --backend auto,flash+math,flash-then-cudnn
      profharness bench --config 8,4,128,64 --dtype fp16,bf16 --iterations 500 -o out/
    """
    from profharness.jobs import Listener, bench
    from profharness.views.classes import classes_document

    options = BenchOptions(
        configs=read_configs(config, configs_file),
        backends=split_names(backend),
        dtypes=split_names(dtype),
        measurements=split_names(measurement),
        precision=parse_precision(precision) if precision else None,
        max_time_s=parse_seconds(max_time),
        **others,
    )
    if output is None or not _is_folder(output):
        require_charts(format_, output)
    answer = bench(options, store, Listener(hint, capture_progress))
    further = (replace(options, run=run, verify=False) for run in answer.others)
    answers = [answer, *(bench(asked, store) for asked in further)]
    with contextlib.nullcontext() if options.run else measured("bench", "--run", answer.run):
        document = classes_document(answers, explain=explain, raw=raw)
        if output is not None and _is_folder(output):
            _write_folder(document, output, answer.environment, force=force)
            emit(document, "table")
        else:
            emit(document, format_, output, force=force)
    for run in answer.others:
        hint(f"compare them with: {shell_command('diff', answer.run, run, store=store)}")


def _write_folder(
    document: Document, folder: Path, environment: dict[str, Any], *, force: bool
) -> None:
    """Every format and the environment, each file whole or not at all. Charts, and so the HTML page,
    need an extra; without it the page is left out, and that is told.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}") from None
    left_out = {"html"} if lacking("report") else set()
    texts = {
        name: RENDERERS[kind](document)
        for kind, name in FOLDER_FILES.items()
        if kind not in left_out
    }
    texts[ENVIRONMENT_FILE] = json.dumps(environment, indent=1, sort_keys=True) + "\n"
    for name, text in texts.items():
        with atomic_file(folder / name, force=force) as file:
            file.write(text.encode())
    hint(f"wrote {', '.join(texts)} in {folder}")
    if left_out:
        hint(
            f"{FOLDER_FILES['html']} is left out: {MissingExtraError('drawing a chart', 'report')}"
        )
