"""`profharness bench`: latency that can be believed, per config and backend."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profharness.cli._options import (
    FORMATS,
    backend_option,
    capture_progress,
    config_options,
    device_option,
    emit,
    hint,
    out_option,
    read_configs,
    split_names,
    store_option,
)
from profharness.errors import UsageError
from profharness.files import atomic_file, check_output

if TYPE_CHECKING:
    from profharness.answers.bench.answer import Benched
    from profharness.config import Config
    from profharness.jobs import Captured
    from profharness.runner import CaptureOptions
    from profharness.views.document import Document


WARMUP = 10
PROFILED_CALLS = 10
FOLDER_FILES = {"json": "bench.json", "jsonl": "bench.jsonl", "csv": "bench.csv", "md": "bench.md"}
ENVIRONMENT_FILE = "environment.json"


@dataclass(frozen=True)
class _Asked:
    """The options, by click's names. run None: measure."""

    config: tuple[str, ...]
    configs_file: Path | None
    backend: tuple[str, ...]
    dtype: tuple[str, ...]
    measurement: tuple[str, ...]
    warmup: int
    iterations: int | None
    precision: str | None
    max_time: str
    baseline: str | None
    convention: str
    explain: bool
    verify: bool
    raw: bool
    seed: int
    timeout_s: float
    device: str
    run: str | None
    out: Path
    store: Path
    format_: str | None
    output: Path | None
    force: bool


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
    help="event, graph, kernel (default: all three); the first one ranks. A CPU has the wall clock.",
)
@click.option("--warmup", type=click.IntRange(0), default=WARMUP, show_default=True, help="Calls.")
@click.option("--iterations", type=click.IntRange(1), help="Exactly so many samples each.")
@click.option(
    "--precision",
    metavar="PART",
    help="Sample until half the 95 % interval of the median is at most this part of it.  "
    "[default: 1%; with --run what the run was measured with]",
)
@click.option(
    "--max-time", default="10s", show_default=True, help="Time that sampling one cell may take."
)
@click.option("--baseline", metavar="CONFIG", help="What speed-ups are told against.")
@click.option(
    "--convention",
    type=click.Choice(["exact", "flash-attention"]),
    default="exact",
    show_default=True,
    help="How FLOPs are counted.",
)
@click.option("--explain", is_flag=True, help="Say every reason why a backend refused.")
@click.option("--verify", is_flag=True, help="Check outputs; a wrong backend is not ranked.")
@click.option("--raw", is_flag=True, help="Put the samples into JSON and CSV too.")
@click.option("--seed", type=int, default=42, show_default=True, help="Of inputs and order.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1),
    default=120,
    show_default=True,
    help="Seconds that one step of a cell may take.",
)
@device_option
@click.option(
    "--run",
    metavar="RUN",
    help="Measure nothing: answer from a stored run, all of it or the configs and backends named.",
)
@out_option
@store_option
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    help="How to print the result.  [default: by the name of -o, else table]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A file, or a folder (out/) for all formats and the environment.",
)
@click.option("--force", is_flag=True, help="Overwrite the file or the files of -o.")
def command(**options: Any) -> None:
    """Time backends on configs, side by side.

    All backends of a config are made ready first and then sampled in turns, in an order drawn anew
    each round, so that clocks and temperature hit all alike. event: CUDA events around one call,
    L2 flushed before it, inputs rotated; graph: CUDA-graph replay; kernel: the kernels of a
    profiled call. A cell that is refused, fails, crashes or hangs is a row that says why.

    Without --backend, or with `all`, the default backends of the device are timed.

    \b
    Examples:
      profharness bench --config 8,4,128,2048 --backend all,naive --explain
      profharness bench --config '32,8,{128:2048:*2},64' --baseline 32,8,512,64
      profharness bench --config 8,4,128,64 --dtype fp16,bf16 --iterations 500 -o out/
    """
    asked = _Asked(**options)
    _check_output(asked.output, force=asked.force)
    answer = _stored(asked) if asked.run is not None else _measured(asked)
    _write(answer, asked)


def _measured(asked: _Asked) -> Benched:
    """The answer of a new run."""
    from profharness.answers.bench.answer import bench_configs, benched, read_baseline
    from profharness.backends import DEFAULT_BACKENDS
    from profharness.jobs import default_backends
    from profharness.run import PRECISION, Protocol, make_plan, parse_precision, parse_seconds
    from profharness.runner import CaptureOptions
    from profharness.store import open_store

    precision = parse_precision(asked.precision) if asked.precision else PRECISION
    seconds = parse_seconds(asked.max_time)
    plan = make_plan(split_names(asked.measurement), precision, seconds, asked.iterations)
    against = read_baseline(asked.baseline)
    configs = read_configs(asked.config, asked.configs_file)
    device_type = "cuda" if default_backends(asked.device) == DEFAULT_BACKENDS else "cpu"
    configs = bench_configs(configs, split_names(asked.dtype), against, device_type)
    fixed = asked.iterations or 0
    protocol = Protocol(
        PROFILED_CALLS, asked.warmup, fixed, asked.timeout_s, asked.seed, asked.device
    )
    options = CaptureOptions(out=asked.out, protocol=protocol, bench=plan)
    captured = _measure(configs, split_names(asked.backend), asked.store, options)
    checked = (_verified(captured, asked.store),) if asked.verify else ()
    with open_store(asked.store) as opened:
        return benched(
            opened,
            captured.run.run,
            convention=asked.convention,
            baseline=against,
            precision=precision,
            rank_by=plan.measurements,
            verifications=checked,
        )


def _stored(asked: _Asked) -> Benched:
    """The answer of a stored run, by its own precision and ranking unless others are asked for."""
    from profharness.answers.bench.answer import (
        benched,
        read_baseline,
        stored_backends,
        stored_configs,
    )
    from profharness.run import PRECISION, make_plan, parse_precision, parse_seconds
    from profharness.store import open_store

    if asked.verify:
        raise UsageError("--verify measures; leave --run out, or use profharness verify")
    precision = parse_precision(asked.precision) if asked.precision else None
    named, seconds = split_names(asked.measurement), parse_seconds(asked.max_time)
    ranking = make_plan(named, PRECISION, seconds).measurements if named else None
    against = read_baseline(asked.baseline)
    configs = read_configs(asked.config, asked.configs_file)
    with open_store(asked.store) as opened:
        run = opened.resolve(str(asked.run))
        return benched(
            opened,
            run,
            convention=asked.convention,
            baseline=against,
            precision=precision,
            configs=stored_configs(opened, run, configs, split_names(asked.dtype)),
            backends=stored_backends(opened, run, split_names(asked.backend)),
            rank_by=ranking,
        )


def _write(answer: Benched, asked: _Asked) -> None:
    """The answer where it is wanted: printed, a file, or every format in a folder."""
    from profharness.views.bench import bench_document

    output, format_ = asked.output, asked.format_
    document = bench_document(answer, explain=asked.explain, raw=asked.raw)
    if output is not None and _is_folder(output):
        _write_folder(document, output, answer.environment, force=asked.force)
        emit(document, "table")
        return
    if format_ is None and output is not None and output.suffix == ".jsonl":
        format_ = "jsonl"
    emit(document, format_, output, force=asked.force)


def _measure(
    configs: list[Config], backends: tuple[str, ...], store: Path, options: CaptureOptions
) -> Captured:
    """The run; what its ingest warns of goes to stderr."""
    from profharness.jobs import bench_into_store

    with capture_progress() as progress:
        captured = bench_into_store(configs, backends, store, options, progress)
    for result in captured.ingested:
        for warning in result.warnings:
            hint(f"warning: {warning}")
    return captured


def _verified(captured: Captured, store: Path) -> str:
    """The run that checked the outputs of what was timed, on the configs as they are."""
    from profharness.cases import NONE
    from profharness.jobs import verify_into_store
    from profharness.runner.capture import VerifyOptions

    cells = [cell for cell in captured.run.cells if cell.status == "ok"]
    configs = list(dict.fromkeys(cell.config for cell in cells))
    backends = list(dict.fromkeys(cell.backend for cell in cells))
    protocol = replace(captured.run.protocol, iterations=0, warmup=0, samples=0)
    options = VerifyOptions((NONE,), False, captured.folder.parent, protocol)
    with capture_progress() as progress:
        return verify_into_store(configs, backends, store, options, progress).run


def _is_folder(output: Path) -> bool:
    return output.is_dir() or not output.suffix


def _check_output(output: Path | None, *, force: bool) -> None:
    """Refuse before any work what could not be written at its end."""
    if output is None or not _is_folder(output):
        check_output(output, force=force)
        return
    for name in (*FOLDER_FILES.values(), ENVIRONMENT_FILE):
        if (output / name).exists() and not force:
            raise UsageError(f"{output / name}: already exists; --force overwrites it")


def _write_folder(
    document: Document, folder: Path, environment: dict[str, Any], *, force: bool
) -> None:
    """Every format and the environment, each file whole or not at all."""
    from profharness.views.renderers import RENDERERS

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}") from None
    texts = {name: RENDERERS[kind](document) for kind, name in FOLDER_FILES.items()}
    texts[ENVIRONMENT_FILE] = json.dumps(environment, indent=1, sort_keys=True) + "\n"
    for name, text in texts.items():
        with atomic_file(folder / name, force=force) as file:
            file.write(text.encode())
    hint(f"wrote {', '.join(texts)} in {folder}")
