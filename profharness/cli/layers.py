"""`profharness layers`: the attention of a program, layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click

from profharness.answers.atlas.answer import Place
from profharness.answers.atlas.catalog import find_place, known_atlases
from profharness.answers.forecast import forecast_map
from profharness.answers.layer_benches import find_benches
from profharness.answers.layer_classes import find_classes
from profharness.answers.layer_gates import Gates, check_gates, parse_gates, require_recorded
from profharness.answers.layers import LayerMap, find_layers, replay_lines
from profharness.answers.regret import timed_configs
from profharness.cli._options import (
    atlas_option,
    backend_option,
    capture_progress,
    complete_runs,
    driver_option,
    echo,
    emit,
    gate_options,
    hint,
    measured,
    out_option,
    output_options,
    store_option,
)
from profharness.config import split_names
from profharness.errors import NotFoundError, UsageError
from profharness.jobs import Listener, time_layers
from profharness.run import BenchOptions, gpu_names, parse_seconds, require_apart
from profharness.store import LATEST, Selection, open_store
from profharness.views.document import Document
from profharness.views.layer_benches import benches_document
from profharness.views.layer_classes import forecasts_document, layer_classes_document
from profharness.views.layers import layers_document

WORDS = """
\b
mode   eager, compile (inside torch.compile), graph (replayed by a CUDA graph),
       fast path (nn.TransformerEncoder's own op)
phase  prefill, decode (one query), cross (unlike lengths), train, recompute (checkpointing)
ran    flash, efficient, cudnn, math; eager: matrix products and a softmax; flex

--regret adds what each row would save a step on the fastest correct backend: calls times
(measured time of what ran, less that of the best), forward and backward apart. Where the GPU
waits for the CPU, that is the most that it can save.

--gpu shows what another GPU would do with the same calls, in a table of its own: the backend that
PyTorch takes there, the time of its kernels with its 90 % interval and where the figure is from
(measured, model; floor: no time is known), and what the fastest backend would save. A trace from
another GPU, or a program observed on a CPU, is enough. Several GPUs (H100,H200) have a column each.

Several runs of a model, one on each class of GPU, have a column each: what ran there, medians of one
call, and how many times as fast the others are as the first.

--bench BENCH-ON-H100,BENCH-ON-H200 adds, a column each, what runs there and what is the fastest in a
bench of the layers' configs. Of one run the benches are of any GPUs: beside what ran on its own, what
PyTorch took on the others. Each of several runs has the bench of its GPU.
"""
MAX_TIME_S = 2.0  # sampling of one config on one backend


@click.command(epilog=WORDS)
@click.argument("run", nargs=-1, shell_complete=complete_runs)
@click.option("--step", type=click.IntRange(0), help="Only this step, counted from 0.")
@click.option(
    "--torch",
    metavar="RELEASE",
    help="The program's PyTorch, for the reasons, where its trace does not tell it: 2.11. With --gpu "
    "the release that is predicted for.  [default: with --gpu its newest atlas's]",
)
@click.option(
    "--gpu",
    metavar="NAME",
    help="Predict what other GPUs would do with each layer, by their atlases: H200, or H100,H200 "
    "with a column each. Nothing runs.",
)
@driver_option
@atlas_option
@click.option(
    "--configs",
    "only_configs",
    is_flag=True,
    help="Print the configs that replay the calls, for `capture --configs`; with --regret those that "
    "it times, or that --bench needs, for `bench --configs`.",
)
@click.option("--full", is_flag=True, help="Whole module names, kernels, and where the GPU waited.")
@click.option(
    "--regret",
    is_flag=True,
    help="Time the calls on each backend, on this machine, and say what the best one saves a step.",
)
@click.option(
    "--bench",
    "benches",
    metavar="RUN",
    multiple=True,
    callback=lambda _context, _option, given: split_names(given),
    shell_complete=complete_runs,
    help="--regret from this stored bench run, without measuring. Several, one a class of GPU, by commas "
    "or repeated, have a column each.",
)
@backend_option
@click.option(
    "--max-time", help="Time that --regret may sample one config on one backend.  [default: 2s]"
)
@gate_options
@out_option
@output_options
@store_option
def command(
    run: tuple[str, ...],
    step: int | None,
    torch: str | None,
    gpu: str | None,
    driver: str | None,
    atlas: Path | None,
    only_configs: bool,
    full: bool,
    regret: bool,
    benches: tuple[str, ...],
    backend: tuple[str, ...],
    max_time: str | None,
    fail_on: tuple[str, ...],
    expect: tuple[str, ...],
    out: Path,
    format_: str | None,
    output: Path | None,
    force: bool,
    store: Path,
) -> None:
    """Show the attention of a program, layer by layer: what ran, why, what it cost.

    Answers from a trace of any program that PyTorch's profiler recorded, once `ingest` took it in.
    Shapes are told by a trace recorded with record_shapes=True, modules by with_stack=True. A line
    stands for the like calls of like layers; times are of kernels, per step: a step is a
    ProfilerStep, else it ends with an optimizer's step, else a call of the outermost module begins it.

    \b
    Examples:
      profharness ingest trace.json.gz && profharness layers
      profharness layers --torch 2.11 --full
      profharness layers --gpu H200
      profharness layers RUN-ON-H100 RUN-ON-H200
      profharness layers --fail-on math-fallback,eager-attention --expect flash@'model.layers.*'
      profharness layers --configs > calls.txt; profharness capture --configs calls.txt
    """
    require_gpu(gpu, driver, atlas)
    gates = parse_gates(fail_on, expect)
    show = partial(emit, format_=format_, output=output, force=force)
    if len(run) > 1 or len(benches) > 1:
        of_one = (gpu, step is not None, backend, max_time, only_configs, regret and not benches)
        _require_maps_alone(*of_one)
        _side_by_side(store, run or (LATEST,), torch, benches, gates, full, show)
        return
    one = run[0] if run else None
    if gpu is not None:
        require_forecast_alone(fail_on, expect, benches, only_configs, regret)
        places = find_places(gpu, torch, driver, atlas)
        show(forecast_document(store, one, places, step=step, full=full))
        return
    options = _bench_options(regret, benches, backend, max_time, out)
    _require_lines(only_configs, bool(benches), output, format_)
    layers = _find_map(store, one, step, torch)
    require_recorded(layers, gates)  # before anything is measured for them
    if only_configs:
        echo("\n".join(_config_lines(layers, timed=regret)))
    else:
        _show_map(layers, options, store, full, show)
    check_gates(layers, gates)


def _find_map(store: Path, run: str | None, step: int | None, torch: str | None) -> LayerMap:
    with open_store(store) as opened:
        name = opened.find_run(Selection(run), "attention calls")
        return find_layers(opened, name, step=step, torch=torch)


def _show_map(
    layers: LayerMap,
    options: BenchOptions | None,
    store: Path,
    full: bool,
    show: Callable[[Document], None],
) -> None:
    """Show the map, with what the best backend would save where options say what to time."""
    if options is not None:
        layers = time_layers(layers, options, store, Listener(hint, capture_progress))
    regret = layers.regret
    with (
        measured("layers", layers.run, "--bench", regret.run)
        if regret
        else contextlib.nullcontext()
    ):
        show(layers_document(layers, full=full))


def require_gpu(gpu: str | None, *options: object) -> None:
    """Raises UsageError for options of --gpu without it."""
    if gpu is None and any(options):
        raise UsageError("--driver and --atlas say what --gpu answers from; add --gpu NAME")


def _require_maps_alone(*others: object) -> None:
    """Raises UsageError for options of one run beside several."""
    if any(others):
        raise UsageError(
            "--step, --gpu, --configs, --regret without --bench, --backend and --max-time are about one "
            "run, and one bench; name one"
        )


def _side_by_side(
    store: Path,
    runs: tuple[str, ...],
    torch: str | None,
    benches: Sequence[str],
    gates: Gates,
    full: bool,
    show: Callable[[Document], None],
) -> None:
    """Show several runs, or the benches of one, with a column each; a gate holds for each run."""
    with open_store(store) as opened:
        names = [opened.find_run(Selection(run), "attention calls") for run in runs]
        if len(unique := list(dict.fromkeys(names))) < min(len(names), 2):
            raise UsageError(f"{' and '.join(runs)} are one run, {names[0]}; name it once")
        answer = find_classes(opened, unique, torch=torch)
        beside = find_benches(opened, answer, benches) if benches else None
    for each in answer.classes:
        require_recorded(each.layers, gates)
    if beside is None:
        show(layer_classes_document(answer, full=full))
    else:
        show(benches_document(answer, beside, full=full))
    for each in answer.classes:
        check_gates(each.layers, gates)


def find_places(
    gpus: str, torch: str | None, driver: str | None, atlas: Path | None
) -> list[tuple[Place, str]]:
    """The places that a text such as `H100,H200` names, each with why it has no atlas. Raises UsageError
    for what is no GPU, and for one that is named twice.
    """
    entries, names = known_atlases(atlas), gpu_names(gpus)
    places = [find_place(entries, name, torch, driver=driver) for name in names]
    require_apart(names, [place.gpu for place, _ in places])
    return places


def require_forecast_alone(*others: object) -> None:
    """Raises UsageError for options beside --gpu that are about what ran."""
    if any(others):
        raise UsageError(
            "--configs, --regret, --bench, --fail-on and --expect are about what ran, --gpu about what "
            "would run elsewhere; leave one out (benches of several GPUs stand beside each other without "
            "--gpu: --bench RUN,RUN)"
        )


def forecast_document(
    store: Path,
    run: str | None,
    places: Sequence[tuple[Place, str]],
    *,
    step: int | None = None,
    full: bool = False,
) -> Document:
    """The map of a run with what would run in some places, each with why it has no atlas. Raises
    NotFoundError.
    """
    layers = _find_map(store, run, step, None)
    for place, doubt in places:
        layers = forecast_map(layers, place, doubt)
    return forecasts_document(layers, full=full)


def _require_lines(
    only_configs: bool, benched: bool, output: Path | None, format_: str | None
) -> None:
    """Raises UsageError for options beside --configs that would say nothing."""
    if only_configs and benched:
        raise UsageError("--configs prints what to bench, and --bench reads one; leave one out")
    if only_configs and (output or format_):
        raise UsageError(
            "--configs prints lines to stdout: `--configs > calls.txt`, no -o, no --format"
        )


def _config_lines(layers: LayerMap, *, timed: bool) -> list[str]:
    """The configs that replay the calls, or those that --regret times. Raises NotFoundError."""
    if timed:
        return [config.label for config in timed_configs(layers)]
    lines = replay_lines(layers)
    if not lines:
        reasons = dict.fromkeys(text for row in layers.rows for text in row.reasons)
        raise NotFoundError(f"no config replays a call of run {layers.run}: {'; '.join(reasons)}")
    return lines


def _bench_options(
    regret: bool,
    benches: Sequence[str],
    backend: tuple[str, ...],
    max_time: str | None,
    out: Path,
) -> BenchOptions | None:
    """What to time, None without --regret. Raises UsageError for options that would say nothing."""
    if benches and max_time is not None:
        raise UsageError("--max-time is for measuring, and --bench measures nothing; leave one out")
    if not regret and not benches:
        for option, given in (("--backend", bool(backend)), ("--max-time", max_time is not None)):
            if given:
                raise UsageError(f"{option} says what --regret times; add --regret")
        return None
    return BenchOptions(
        backends=split_names(backend),
        run=benches[0] if benches else None,
        max_time_s=parse_seconds(max_time) if max_time else MAX_TIME_S,
        out=out,
    )
