"""`profharness bench`: time backends on configs, side by side."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from profharness.attention.config import split_names
from profharness.commands._command import command, declaration_of, document
from profharness.commands._options import Fraction, Option
from profharness.commands._output import (
    CPU_RAN,
    FORCE_OPTION,
    STDOUT,
    SUFFIX_FORMATS,
    check_file,
    drawable,
    emit,
    hint,
    hint_cpu,
    measured,
    run_listener,
)
from profharness.commands._runs import run_text
from profharness.commands._types import (
    SEVERAL_VALUES,
    BackendsToRun,
    Configs,
    Device,
    Format,
    Full,
    GpuClasses,
    Insecure,
    Names,
    OutFolder,
    PathLike,
    Processes,
    RunOrConfigs,
    Scheduler,
    SeedRange,
    ShowProgress,
    Store,
    backend_names,
    complete_backends,
    complete_names,
    config_list,
    duration_option,
    fleet,
    store_path,
    timeout_option,
)
from profharness.dtypes import CONFIG_DTYPES
from profharness.errors import UsageError
from profharness.files import RUNS_FOLDER, atomic_file, shell_command
from profharness.measurements.measurements import BenchRow
from profharness.render.document import Document
from profharness.render.renderers import RENDERERS
from profharness.rows import GPU_MEASUREMENTS
from profharness.run import (
    BenchOptions,
    BenchPlan,
    Protocol,
)
from profharness.store import frame

if TYPE_CHECKING:
    import pandas as pd

    from profharness.measurements.evaluation import BenchResult

FOLDER_FILES = {
    kind: f"bench{suffix}" for suffix, kind in SUFFIX_FORMATS.items() if suffix != ".htm"
}
ENVIRONMENT_FILE = "environment.json"


def is_folder(output: Path) -> bool:
    """Return whether the value of -o is a folder: one that exists, or a path without a suffix."""
    return output.is_dir() or not output.suffix


def check_target(ctx: click.Context, option: click.Parameter, output: Path | None) -> Path | None:
    """Check the value of -o, which is a file or a folder, and return it.

    Return None for stdout. Raise UsageError if the file, or an output file in the folder, exists
    and --force is not given.
    """
    if output is None or output == STDOUT or not is_folder(output):
        return check_file(ctx, option, output)
    for name in (*FOLDER_FILES.values(), ENVIRONMENT_FILE):
        if (output / name).exists() and not (ctx.params["force"] or ctx.resilient_parsing):
            raise UsageError(f"{output / name} already exists; --force overwrites it")
    return output


Dtypes = Annotated[
    Names,
    Option(
        ("--dtype",),
        complete=complete_names(lambda: CONFIG_DTYPES),
        multiple=True,
        metavar="NAME",
        help=(
            "The dtype (fp16, bf16 or fp32) of configs that do not specify one. Separate several "
            "values by commas, or repeat the option."
        ),
    ),
]
Measurements = Annotated[
    Names | None,
    Option(
        ("--measurement",),
        complete=complete_names(lambda: GPU_MEASUREMENTS),
        multiple=True,
        metavar="NAME",
        help=f"The measurement to take: {', '.join(GPU_MEASUREMENTS[:-1])} or "
        f"{GPU_MEASUREMENTS[-1]}. Backends are ranked by the first measurement, but those of a run of "
        "`capture` by graph, unless this option is given. On a CPU, only "
        f"wall-clock time is measured. {SEVERAL_VALUES}  [default: all]",
    ),
]
Warmup = Annotated[
    int, Option(("--warmup",), type=click.IntRange(0), help="Number of warm-up calls.")
]
Iterations = Annotated[
    int | None,
    Option(
        ("--samples",),
        old_flags=("--iterations",),
        type=click.IntRange(1),
        help="Take exactly this many samples per cell.",
    ),
]
Precision = Annotated[
    float | None,
    Option(
        ("--precision",),
        type=Fraction(0, 1, min_open=True, max_open=True),
        metavar="FRACTION",
        help="Sample until the half-width of the median's 95 % confidence interval is at most this "
        "fraction of the median.  [default: 1%; with RUN, the precision of the run]",
    ),
]
MaxTime = Annotated[
    float,
    duration_option("--max-time", "Time limit for sampling one cell.", BenchPlan.max_time_s),
]
Baseline = Annotated[
    str | None,
    Option(
        ("--baseline",),
        complete=complete_backends,
        metavar="BACKEND",
        help="Show speed-ups relative to this backend on the same config, or relative to this config. "
        "Without this option, only JSON and CSV contain speed-ups, relative to naive, else math.",
    ),
]
Convention = Annotated[
    Literal["exact", "flash-attention"],
    Option(("--flop-count",), old_flags=("--convention",), help="How to count FLOPs."),
]
Verified = Annotated[
    bool,
    Option(
        ("--verify",), help="Also verify the outputs. Backends with wrong results are not ranked."
    ),
]
BenchSeed = Annotated[
    int,
    Option(
        ("--seed",),
        type=SeedRange(),
        help="Random seed for the inputs and for the order of the measurements.",
    ),
]
Timeout = Annotated[float, timeout_option("Time limit for one step of a cell.")]
Explained = Annotated[
    bool, Option(("--explain",), help="Show every reason why a backend refused a config.")
]
Raw = Annotated[bool, Option(("--raw",), help="Include the timing samples in JSON and CSV.")]
Overwrite = Annotated[bool, replace(FORCE_OPTION, help="Overwrite the output files if they exist.")]
Target = Annotated[
    PathLike | None,
    Option(
        ("-o", "--output"),
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write the result to this file. `-` means stdout, the default. If FILE is a folder "
        "(out/), write the result to it in every format, with a description of the environment.",
        click={"callback": check_target},
    ),
]


def _to_frame(answers: list[BenchResult]) -> pd.DataFrame:
    rows = [asdict(row) for row in answers[0].rows]
    made = frame(rows, [field.name for field in fields(BenchRow)])
    made.attrs["answer"] = answers[0]
    return made


@command("bench", frame=_to_frame)
def bench(
    configs: Configs = None,
    backends: BackendsToRun = None,
    *,
    dtypes: Dtypes = (),
    measurements: Measurements = None,
    warmup: Warmup = BenchOptions.warmup,
    iterations: Iterations = None,
    processes: Processes = BenchOptions.processes,
    scheduler: Scheduler = None,
    gpu: GpuClasses = (),
    insecure: Insecure = False,
    precision: Precision = None,
    max_time_s: MaxTime = BenchPlan.max_time_s,
    baseline: Baseline = None,
    convention: Convention = "exact",
    verify: Verified = False,
    seed: BenchSeed = BenchOptions.seed,
    timeout_s: Timeout = Protocol.timeout_s,
    device: Device = Protocol.device,
    run: RunOrConfigs = None,
    out: OutFolder = RUNS_FOLDER,
    store: Store = None,
    progress: ShowProgress = None,
) -> list[BenchResult]:
    """Time several backends on the same configs, side by side.

    All backends of a config are prepared before the first one is timed. The backends then take
    turns, in a random order in each round, so that clocks and temperature affect all backends
    alike. A cell that is refused, fails, crashes or hangs gets a row with the reason.

    The `cold` measurement is the GPU time of one call, with the L2 cache flushed and the inputs
    rotated. The `cold` measurement excludes host time. The `graph` measurement is the time per call
    in a CUDA graph replay, `kernel` is the kernel time of a profiled call, and `eager` is the time
    per call when calls are issued one after another, as a program would issue them.

    With RUN (a run folder or a stored run, such as `latest`), nothing is measured; the output shows
    the results stored in the run, or only those of the given configs and backends. Without RUN, at
    least one config is required.

    \b
    Examples:
      profharness bench 8,4,128,2048 --backend all,naive --explain
      profharness bench '32,8,{128:2048:*2},64' --baseline 32,8,512,64
      profharness bench '1,8,{256:4096:*2},64' --backend all --baseline auto
      profharness bench 8,4,128,64 --backend auto,flash+math,flash-then-cudnn
      profharness bench 8,4,128,64 --dtype fp16,bf16 --samples 500 -o out/

    In Python, the result has one row per cell and measurement, with times in ns. The BenchResult is
    in `attrs["answer"]`. Raise CaptureError if no worker starts.
    """
    # Imported here because --help does not need the code that runs workers.
    from profharness.jobs import into_store

    options = BenchOptions(
        configs=config_list(configs),
        backends=split_names(backends) if run else backend_names(backends),
        run=run_text(run),
        baseline=baseline,
        dtypes=split_names(dtypes),
        measurements=split_names(measurements),
        precision=precision,
        max_time_s=max_time_s,
        iterations=iterations,
        warmup=warmup,
        convention=convention,
        verify=verify,
        seed=seed,
        timeout_s=timeout_s,
        device=device,
        out=Path(out),
        processes=processes,
        fleet=fleet(scheduler, gpu, insecure, device),
    )
    path, listener = store_path(store), run_listener(progress)
    answer = into_store.bench(options, path, listener)
    further = (replace(options, run=other, verify=False) for other in answer.others)
    return [answer, *(into_store.bench(each, path, listener) for each in further)]


@document(bench)
def show(
    answers: list[BenchResult],
    *,
    explain: Explained = False,
    raw: Raw = False,
    full: Full = False,
    device: Device = Protocol.device,
    run: RunOrConfigs = None,
    store: Store = None,
    format: Format = None,
    output: Target = None,
    force: Overwrite = False,
) -> None:
    """Print the results, or write them to a file or a folder."""
    from profharness.commands.bench.tables import benches_by_gpu_document

    answer, *_ = answers
    path = None if output is None else Path(output)
    with contextlib.nullcontext() if run else measured("bench", answer.run):
        page = benches_by_gpu_document(answers, explain=explain, raw=raw, full=full)
        if path is not None and is_folder(path):
            _write_folder(page, path, answer.environment, force=force)
            emit(page, "table", full=full)
        else:
            emit(page, format, path, force=force, full=full)
    if run is None:
        hint_cpu(answer.environment, device, CPU_RAN)
    for other in answer.others:
        again = shell_command("diff", answer.run, other, store=store_path(store))
        hint(f"To compare the runs, use: {again}")


def _write_folder(
    document: Document, folder: Path, environment: dict[str, Any], *, force: bool
) -> None:
    """Write one file per format and a file with the environment, each atomically."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {folder}: {error.strerror}") from None
    texts = {name: RENDERERS[kind](drawable(document, kind)) for kind, name in FOLDER_FILES.items()}
    texts[ENVIRONMENT_FILE] = json.dumps(environment, indent=1, sort_keys=True) + "\n"
    for name, text in texts.items():
        with atomic_file(folder / name, force=force) as file:
            file.write(text.encode())
    hint(f"wrote {', '.join(texts)} in {folder}")


DECLARATION = declaration_of(bench)
