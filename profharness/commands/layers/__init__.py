"""`profharness layers`: show the attention of a program, layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from profharness.atlas.predictions import Place, assumed_release, find_place, known_atlases
from profharness.attention.config import split_names
from profharness.attention.dispatch.by_rule import named_platforms
from profharness.commands._command import command, declaration_of, document, gate, usage
from profharness.commands._help import legend
from profharness.commands._options import Option
from profharness.commands._output import capture_progress, echo, hint, keep_measured, shared_release
from profharness.commands._runs import find_listed, run_text
from profharness.commands._types import (
    BACKENDS_OPTION,
    AtlasFolder,
    Driver,
    Names,
    OutFolder,
    PathLike,
    Runs,
    Store,
    complete_names,
    complete_runs,
    duration_option,
    gpu_option,
    release_option,
    store_path,
)
from profharness.commands.layers.by_gpu import (
    LayersByGpu,
    benches_document,
    compare_maps,
    find_benches,
    find_layers_by_gpu,
    layers_by_gpu_document,
    left_out_text,
)
from profharness.commands.layers.forecast_map import forecast_map
from profharness.commands.layers.tables import layers_document
from profharness.device_types import CPU
from profharness.errors import GateError, GateResult, NotFoundError, UsageError
from profharness.files import RUNS_FOLDER
from profharness.jobs.into_store import Listener, time_layers
from profharness.program.gates import (
    BACKENDS,
    GATES,
    Gates,
    gate_results,
    parse_gates,
    require_recorded,
)
from profharness.program.layer_map import LayerMap, find_layers, replay_lines
from profharness.program.regret import timed_configs
from profharness.render.document import Document
from profharness.run import BenchOptions, gpu_names, require_distinct
from profharness.store import Selection, frame, open_store

if TYPE_CHECKING:
    import pandas as pd

WORDS = {
    "attention": "self, cross (to another sequence); shown if the program has cross attention",
    "phase": "training (with a backward pass; CSV and JSON write train), recompute (a forward pass "
    "repeated by checkpointing; CSV and JSON write train, and recompute as the direction), decode "
    "(one query), prefill (causal). In a program with phases, it is the phase of the steps: prefill, "
    "decode, mixed (both), verify (drafted tokens), draft, diffusion, idle or other",
    "mode": "compile (inside torch.compile), graph (replayed by a CUDA graph), fast path "
    "(nn.TransformerEncoder's own op); blank otherwise, where CSV and JSON write eager",
    "ran": "flash, efficient, cudnn, math; eager (matrix products and a softmax); flex; or the "
    "library of the kernel, such as fa3",
}
"""Maps columns of the tables to their values, for the help text."""
EPILOG = f"""
{legend(WORDS)}

--savings adds the time per step that the calls of each row would save on the fastest correct
backend. The saving is the number of calls, multiplied by the difference between the measured times
of the backend that ran and of the fastest backend. The savings of the forward pass and the backward
pass are computed separately. If the GPU waits for the CPU, the program saves less time.

--gpu adds a table that predicts the same calls on another GPU. The table shows the backend that
PyTorch chooses on the other GPU, the kernel time with a 90 % interval, the source of the time, and
the time that the fastest backend would save. The source is `measured`, `model` or `floor`. With the
source `floor`, only a lower bound is known. The run may be a trace from another GPU, or a program
that was observed on a CPU. If you name several GPUs, such as H100,H200, the table has a column for each GPU.

To compare a model on several GPU models, name one run for each GPU model. The table then shows the
backends that ran, the median time per call in each run, and the speed-up over the first run.

--bench BENCH-ON-H100,BENCH-ON-H200 adds columns for each benchmark of the layers' configs. The columns
show the backend that PyTorch chose and the fastest backend. With one run, the benchmarks may come from
any GPUs. With several runs, name a benchmark for the GPU of each run.
"""
MAX_TIME_S = 2.0  # time limit for sampling one config on one backend

Step = Annotated[
    int | None,
    Option(
        ("--step",),
        type=click.IntRange(0),
        help="Show only this step. Steps are counted from 0.",
        tool="Show only the recorded step with this number, counted from 0.",
    ),
]
Release = Annotated[
    str | None,
    release_option(
        "layers",
        "The program's PyTorch release, such as 2.11, if the trace does not record it. With "
        "--gpu, also predict for this release.",
    ),
]
GpuNames = Annotated[
    str | None,
    gpu_option(
        "Predict the time of each layer on another GPU from its atlas. No kernel runs.",
        tool="The names of one or more GPUs. The time of each layer on these GPUs is predicted "
        "from their atlases.",
        tool_examples=("H200",),
    ),
]
OnlyConfigs = Annotated[
    bool,
    Option(
        ("--list-configs",),
        old_flags=("--configs",),
        help="Print the configs of the attention calls, as input for `capture --configs`. "
        "With --savings, print the configs to time, as input for `bench --configs`.",
    ),
]
Full = Annotated[
    bool,
    Option(
        ("--full",),
        help="Show full module names, the kernels, and the gaps in which the GPU waited.",
    ),
]
Regret = Annotated[
    bool,
    Option(
        ("--savings",),
        old_flags=("--regret",),
        help="Time the calls on each backend on this machine, and show the time that the best backend "
        "would save per step.",
    ),
]
Benches = Annotated[
    Names,
    Option(
        ("--bench",),
        metavar="RUN",
        multiple=True,
        complete=complete_runs,
        find=find_listed,
        help="Take the times for --savings from this stored bench run. To compare GPU models, "
        "name one run per model. Separate several values by commas, or repeat the option.",
    ),
]
TimedBackends = Annotated[
    Names,
    replace(
        BACKENDS_OPTION,
        help="With --savings, time only these backends, named as in `bench`. Separate several "
        "values by commas, or repeat the option.",
        tool="",
    ),
]
MaxTime = Annotated[
    float | None,
    duration_option(
        "--max-time",
        "Time limit for sampling one config on one backend with --savings.  "
        f"[default: {MAX_TIME_S:g}s]",
    ),
]
FailOn = Annotated[
    tuple[str, ...],
    Option(
        ("--fail-on",),
        complete=complete_names(lambda: GATES),
        multiple=True,
        metavar="GATE",
        check=lambda names: parse_gates(names, ()),
        help="Exit with code 3 if any of these findings occurs: math-fallback, eager-attention, "
        "backend-changed or unseen (the backend is unknown). For an observed program, the "
        "findings noop-mask and requested-not-run are also accepted. Separate several values by "
        "commas, or repeat the option.",
    ),
]
Expected = Annotated[
    tuple[str, ...],
    Option(
        ("--expect",),
        complete=complete_names(lambda: BACKENDS),
        multiple=True,
        metavar="BACKEND[@GLOB]",
        check=lambda texts: parse_gates((), texts),
        help="Exit with code 3 unless this backend ran in all modules that match the glob, as in "
        "flash@'model.layers.*', or in all modules if there is no glob. At least one module must "
        "match. flash,cudnn accepts either backend. Repeatable.",
    ),
]


@dataclass(frozen=True)
class LayersFound:
    """The layer maps of one program, or of several programs to compare."""

    store: Path
    maps: tuple[LayerMap, ...]
    classes: LayersByGpu | None = None
    """The comparison of several programs, or None for one program."""


def _to_frame(found: LayersFound) -> pd.DataFrame:
    rows = [
        {"run": each.run, **record} if found.classes else record
        for each in found.maps
        for record in layers_document(each).records
    ]
    made = frame(rows)
    made.attrs["layers"] = found.maps
    return made


@command(
    "layers",
    frame=_to_frame,
    epilog=EPILOG,
    tool="Use this tool for a model or a training step. For single configs, use `kernels`. If "
    "`gpu` is given, the `predicted_*` keys contain predictions for the same calls on that GPU.",
)
def layers(
    *run: Runs,
    step: Step = None,
    torch: Release = None,
    gpu: GpuNames = None,
    driver: Driver = None,
    atlas: AtlasFolder = None,
    store: Store = None,
) -> LayersFound:
    """Show the attention of a program, layer by layer: what ran, why, and what it cost.

    RUN is a trace file or a stored run. Without RUN, show the latest stored program. A trace may
    come from any program that was recorded with PyTorch's profiler. To see shapes, record the trace
    with record_shapes=True. To see modules, record the trace with with_stack=True. Each row of the
    table represents a group of identical calls from identical layers. Times are kernel times per
    step. If a program has both prefill and decode steps, each row refers to the steps of one phase.
    If the trace contains ProfilerStep ranges, each of these ranges is a step. In a trace without
    ProfilerStep ranges, a step is a recurring range that contains attention calls, an
    iteration of a serving engine, or a call of the outermost module.

    \b
    Examples:
      profharness layers trace.json.gz
      profharness layers --torch 2.11 --full
      profharness layers --gpu H200
      profharness layers RUN-ON-H100 RUN-ON-H200
      profharness layers --fail-on math-fallback,eager-attention --expect flash@'model.layers.*'
      profharness layers --list-configs > calls.txt
      profharness capture --configs calls.txt

    In Python the result contains the rows of the table, with the keys of the JSON output.
    `attrs["layers"]` contains the layer maps.
    """
    path, several = store_path(store), len(run) > 1
    if gpu is not None and not several:
        places = find_places(gpu, torch, driver, atlas)
        selected = run_text(run[0]) if run else None
        return LayersFound(path, (forecast(path, selected, places, step=step, torch=torch),))
    with open_store(path) as opened:
        names = [
            opened.find_run(Selection(run_text(each)), "attention calls") for each in run or (None,)
        ]
        if not several:
            own = find_layers(opened, names[0], step=step, torch=torch, assume=assumed_release)
            return LayersFound(path, (own,))
        unique = list(dict.fromkeys(names))
        if len(unique) < 2:
            raise UsageError(
                f"{' and '.join(map(str, run))} are the same run, {names[0]}; name this run once"
            )
        classes = find_layers_by_gpu(opened, unique, torch=torch)
    found = tuple(each.layers for each in classes.classes)
    return LayersFound(path, found, classes)


@usage(layers)
def check_options(
    *,
    run: Sequence[str] = (),
    step: int | None = None,
    gpu: str | None = None,
    driver: str | None = None,
    atlas: PathLike | None = None,
    only_configs: bool = False,
    regret: bool = False,
    benches: Names = (),
    backend: Names = (),
    max_time: float | None = None,
    fail_on: Sequence[str] = (),
    expect: Sequence[str] = (),
    format: str | None = None,
    output: PathLike | None = None,
) -> None:
    """Raise UsageError for options that exclude each other or have no effect."""
    require_gpu(gpu, driver, atlas)
    named = split_names(benches)
    if len(run) > 1 or len(named) > 1:
        of_one = (step is not None, gpu, backend, max_time, only_configs, regret and not named)
        if any(of_one):
            raise UsageError(
                "--step, --gpu, --list-configs, --savings without --bench, --backend and --max-time "
                "apply to one run; name only one run"
            )
        return
    if gpu is not None:
        require_forecast_alone(fail_on, expect, named, only_configs, regret)
        return
    if only_configs and named:
        raise UsageError(
            "--list-configs prints configs to bench, and --bench reads the results; use only one of "
            "these options"
        )
    if only_configs and (output or format):
        raise UsageError(
            "--list-configs cannot be combined with -o or --format; redirect stdout, as in "
            "`--list-configs > calls.txt`"
        )
    if named and max_time is not None:
        raise UsageError(
            "--max-time limits measurements, but --bench measures nothing; use only one of these options"
        )
    if not regret and not named:
        for option, value in (("--backend", backend), ("--max-time", max_time)):
            if value:
                raise UsageError(f"{option} requires --savings")


@document(layers)
def show(
    found: LayersFound,
    *,
    only_configs: OnlyConfigs = False,
    full: Full = False,
    regret: Regret = False,
    benches: Benches = (),
    backend: TimedBackends = (),
    max_time: MaxTime = None,
    fail_on: FailOn = (),
    expect: Expected = (),
    out: OutFolder = RUNS_FOLDER,
) -> Document | None:
    """Return the document of the layer maps. With --list-configs, print the configs and return None."""
    named = split_names(benches)
    gates = parse_gates(fail_on, expect)
    if found.classes is not None or len(named) > 1:
        return _show_several(found, named, gates, full=full)
    (own,) = found.maps
    require_recorded(own, gates)  # fail before anything is measured
    if only_configs:
        echo("\n".join(_config_lines(own, timed=regret)))
        return None
    if regret or named:
        options = BenchOptions(
            backends=split_names(backend),
            run=named[0] if named else None,
            max_time_s=max_time or MAX_TIME_S,
            out=Path(out),
        )
        own = time_layers(own, options, found.store, Listener(hint, capture_progress))
        if own.regret is not None:
            keep_measured("layers", own.name, "--bench", own.regret.run)
    return layers_document(own, full=full)


@gate(layers)
def check(found: LayersFound, *, fail_on: FailOn = (), expect: Expected = ()) -> list[GateResult]:
    """Return the result of each gate in each run.

    Raise GateError if a run could not be checked.
    """
    gates = parse_gates(fail_on, expect)
    if (fail_on or expect) and found.classes and (names := found.classes.left_out):
        raise GateError(f"cannot check the gates, because {left_out_text(names)}")
    return [result for each in found.maps for result in gate_results(each, gates)]


def _show_several(
    found: LayersFound, benches: Sequence[str], gates: Gates, *, full: bool
) -> Document:
    with open_store(found.store) as opened:
        classes = found.classes or compare_maps(opened, found.maps)
        beside = find_benches(opened, classes, benches) if benches else None
    for each in classes.classes:
        require_recorded(each.layers, gates)
    if beside is None:
        return layers_by_gpu_document(classes, full=full)
    return benches_document(classes, beside, full=full)


def forecast(
    store: Path,
    run: str | None,
    places: Sequence[tuple[Place, str]],
    *,
    step: int | None = None,
    torch: str | None = None,
) -> LayerMap:
    """Return the layer map of a run with predictions for the GPUs in `places`.

    If the run does not record its release, use the release of the predictions, so that only the
    GPUs differ. This release is an assumption unless the user gave it as `torch`. Raise
    NotFoundError if the run has no attention calls, or if none of them can be predicted.
    """
    predicted = places[0][0].release

    def assume(gpu: str | None) -> str:
        with contextlib.suppress(UsageError):  # the rules of the GPU may end at an older release
            named_platforms(predicted, gpu or CPU)
            return predicted
        return assumed_release(gpu)

    with open_store(store) as opened:
        name = opened.find_run(Selection(run), "attention calls")
        own = None
        if torch is not None and not opened.environment(name).get("torch"):
            with contextlib.suppress(UsageError):  # the rules of the run's GPU may end earlier
                own = find_layers(opened, name, step=step, torch=predicted)
        own = own or find_layers(opened, name, step=step, assume=assume)
    for place, doubt in places:
        own = forecast_map(own, place, doubt)
    return own


def find_places(
    gpus: str, torch: str | None, driver: str | None = None, atlas: PathLike | None = None
) -> list[tuple[Place, str]]:
    """Return the GPUs that a text such as `H100,H200` names.

    Each GPU comes with the reason why it has no atlas, or with an empty text. Raise UsageError for
    an unknown GPU, and for a GPU that is named twice.
    """
    entries, names = known_atlases(atlas), gpu_names(gpus)
    release = shared_release(names, torch, atlas)
    places = [find_place(entries, name, release, driver=driver) for name in names]
    require_distinct(names, [place.gpu for place, _ in places])
    return places


def require_gpu(gpu: str | None, *options: object) -> None:
    """Raise UsageError if --gpu is missing and any of the options that require it is set."""
    if gpu is None and any(options):
        raise UsageError("--driver and --atlas require --gpu NAME")


def require_forecast_alone(*others: object) -> None:
    """Raise UsageError if --gpu is combined with an option that needs the calls that ran."""
    if any(others):
        raise UsageError(
            "--gpu cannot be combined with --list-configs, --savings, --bench, --fail-on or --expect; "
            "to compare benchmarks on several GPUs, use --bench RUN,RUN without --gpu"
        )


def _config_lines(own: LayerMap, *, timed: bool) -> list[str]:
    """Return the configs that replay the calls. If `timed`, return the configs to time instead."""
    if timed:
        return [config.label for config in timed_configs(own)]
    lines = replay_lines(own)
    if not lines:
        why = "; ".join(dict.fromkeys(text for row in own.rows for text in row.reasons))
        if any(phase.points for phase in own.phases):
            command = own.command("layers", "--savings", "--list-configs")
            why += f"; to print configs with the mean lengths of the phases, use: {command}"
        raise NotFoundError(f"no config replays a call of run {own.name}: {why}")
    return lines


DECLARATION = declaration_of(layers)
