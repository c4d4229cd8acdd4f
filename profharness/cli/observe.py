"""`profharness observe`: the attention of a running program."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from profharness.answers.atlas.answer import Place
from profharness.answers.layers.gates import Gates, check_gates, parse_gates
from profharness.answers.layers.layer_map import NO_MASK_EFFECT, find_layers
from profharness.cli._options import (
    atlas_option,
    driver_option,
    gate_options,
    hint,
    out_option,
    store_option,
)
from profharness.commands._output import DEFAULT_WIDTH
from profharness.commands.layers import (
    find_places,
    forecast,
    require_forecast_alone,
    require_gpu,
)
from profharness.errors import GateError, ProfharnessError, UsageError
from profharness.files import shell_command
from profharness.jobs import ObserveResult, observe_into_store
from profharness.parse.observed import ObservedCall
from profharness.run import ObserveOptions
from profharness.store import open_store
from profharness.views.layer_classes import forecasts_document
from profharness.views.renderers import RENDERERS

FAILED = 1
PROFILERS = ("torch", "none", "nsys")


def _rank(_: click.Context, __: click.Parameter, text: str) -> str:
    if text != "all" and not text.isdecimal():
        raise click.BadParameter(f"{text!r} is neither a number nor all")
    return text


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--profiler",
    type=click.Choice(PROFILERS),
    default=ObserveOptions.profiler,
    show_default=True,
    help="What records a few steps: PyTorch's, Nsight Systems, or none: calls are only counted.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, 1000),
    default=ObserveOptions.steps,
    show_default=True,
    help="Steps that the profiler records.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0, 1_000_000),
    default=ObserveOptions.warmup,
    show_default=True,
    help="Steps without a new kind of call before that; 0: from the first call on.",
)
@click.option(
    "--rank",
    callback=_rank,
    default=ObserveOptions.rank,
    show_default=True,
    metavar="N|all",
    help="Under torchrun, whose process the profiler records. Calls are counted in all.",
)
@click.option(
    "--gpu",
    metavar="NAME",
    help="Then predict what other GPUs would do with each layer, by their atlases: H200.",
)
@driver_option
@atlas_option
@out_option
@store_option
@click.option("--note", help="A remark that is kept with the run.")
@gate_options
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    program: tuple[str, ...],
    gpu: str | None,
    driver: str | None,
    atlas: Path | None,
    out: Path,
    store: Path,
    fail_on: tuple[str, ...],
    expect: tuple[str, ...],
    **options: Any,
) -> int:
    """Run a program unchanged, and record the attention in it.

    Each call of scaled_dot_product_attention and flex_attention is counted by kind: the module's
    dotted path, file and line, tensors, what the mask masks, the backends allowed, and the one that
    computed it. All Python processes that the program starts are watched. A profiler records a few
    steps, once three steps brought nothing new: a step ends with an optimizer's step, or begins where
    the first attention of the model comes again. Streams, signals and the exit code are the program's.

    --fail-on and --expect hold for all calls that were seen, once the program has ended; what was
    not recorded fails a gate that is about it. A program that fails keeps its own exit code.

    --gpu shows the map of another GPU at the end, on stderr, as `layers --gpu` does: on a CPU, or with
    tensors on the device `meta`, which hold nothing. Calls are those that the program makes here, in
    the dtypes that it makes them in.

    A program without attention leaves no run. It keeps its exit code; where none of its processes
    could be watched, 0 becomes 1.

    Not seen: Python with -I, -E or -S; attention that does not call the function from Python, such as
    nn.TransformerEncoder's fast path, which the recorded steps show all the same.

    \b
    Examples:
      profharness observe -- python train.py --epochs 1
      profharness observe --profiler none -- python -m pytest tests
      profharness observe --fail-on math-fallback,noop-mask --expect flash@'*' -- python train.py
      profharness observe --gpu H200 --profiler none -- python model.py
      profharness layers
    """
    gates = parse_gates(fail_on, expect)
    require_gpu(gpu, driver, atlas)
    places = []
    if gpu is not None:
        require_forecast_alone(fail_on, expect)
        places = find_places(gpu, None, driver, atlas)
    if program[0].startswith("-"):
        raise UsageError(
            f"{program[0]} is no program; write: profharness observe -- python train.py"
        )
    asked = ObserveOptions(out=out, **options)
    watched = observe_into_store(program, store, asked)
    code = _report(watched, store)
    if places and watched.observed.why is None:
        _show_forecast(watched, places, store, {"--driver": driver, "--atlas": atlas})
    if gates:
        _check(watched, gates, store)
    return code


def _show_forecast(
    watched: ObserveResult,
    places: Sequence[tuple[Place, str]],
    store: Path,
    options: Mapping[str, object],
) -> None:
    """The map of other GPUs; the program's own exit code stays where nothing can be predicted. options
    are those that `layers` needs too.
    """
    run = watched.observed.run.run
    try:
        document = forecasts_document(forecast(store, run, places))
    except ProfharnessError as error:
        hint(f"error: {error}")
        return
    hint(RENDERERS["table"](document, width=shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns))
    words = [word for name, value in options.items() if value for word in (name, str(value))]
    gpus = ",".join(place.gpu for place, _ in places)
    again = shell_command("layers", run, "--gpu", gpus, *words, store=store)
    hint(f"see it again with: {again}")


def _check(watched: ObserveResult, gates: Gates, store: Path) -> None:
    """Raises GateError where a gate is not met and the program itself did not fail."""
    observed = watched.observed
    try:
        if observed.why is not None:
            raise GateError("the gates cannot be answered, for no attention was recorded")
        with open_store(store) as opened:
            layers = find_layers(opened, observed.run.run)
        check_gates(layers, gates)
    except GateError as error:
        if not observed.code:
            raise
        hint(f"error: {error}\nthe exit code {observed.code} is the program's")


def _report(watched: ObserveResult, store: Path) -> int:
    """What was seen, to stderr, for stdout is the program's; the exit code."""
    observed = watched.observed
    if observed.why is not None:
        begin = "" if observed.reported else "error: "
        hint(f"{begin}no attention was recorded: {observed.why}")
        return observed.code if observed.reported else observed.code or FAILED
    for line in _summary(watched.calls):
        hint(line)
    for problem in observed.run.problems:
        hint(f"{problem.profiler}: {problem.message} [{problem.code}]\n  remedy: {problem.remedy}")
    for warning in [text for result in watched.ingested for text in result.warnings]:
        hint(f"warning: {warning}")
    hint(f"see it with: {shell_command('layers', observed.run.run, store=store)}")
    return observed.code


def _summary(calls: tuple[ObservedCall, ...]) -> list[str]:
    """How many calls there were, and which backends computed them."""
    total = sum(item.count for item in calls)
    processes = len({item.pid for item in calls})
    ran = Counter[str]()
    for item in calls:
        if item.count:
            ran[item.ran or "unknown"] += item.count
    shares = ", ".join(f"{name} {count:,}" for name, count in ran.most_common())
    compiled = sum(item.call.compiled for item in calls)
    kinds = len(calls) - compiled
    lines = []
    if kinds:
        lines.append(
            f"{total:,} attention calls of {kinds} kinds in {processes} process(es): {shares}"
        )
    if compiled:
        lines.append(f"{compiled} calls are in compiled code, which a trace counts")
    idle = [item for item in calls if item.mask == NO_MASK_EFFECT]
    if idle:
        where = ", ".join(dict.fromkeys(item.call.path or str(item.function) for item in idle[:3]))
        lines.append(f"a mask that masks nothing was given in {len(idle)} kinds of calls: {where}")
    return lines
