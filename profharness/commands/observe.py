"""`profharness observe`: run a program and record its attention calls."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click

from profharness.atlas.predictions import Place
from profharness.commands._command import as_is, command, declaration_of, document, gate
from profharness.commands._options import Option
from profharness.commands._output import DEFAULT_WIDTH, hint
from profharness.commands._types import (
    AtlasFolder,
    Driver,
    OutFolder,
    Store,
    gpu_option,
    store_path,
)
from profharness.commands.capture import RunNote
from profharness.commands.layers import (
    Expected,
    FailOn,
    find_places,
    forecast,
    require_forecast_alone,
    require_gpu,
)
from profharness.commands.layers.answer import layers_answer, told_change
from profharness.commands.layers.tables import layers_document
from profharness.errors import GateError, ProfharnessError, UsageError, counted
from profharness.files import RUNS_FOLDER, shell_command
from profharness.jobs.into_store import observe_into_store
from profharness.program.gates import Gates, check_gates, parse_gates
from profharness.program.layer_map import NO_MASK_EFFECT, find_layers
from profharness.recording.observe import Observed
from profharness.render.renderers import RENDERERS
from profharness.run import ObserveOptions
from profharness.store import IngestResult, open_store
from profharness.traces.observed import ObservedCall, read_observed

FAILED = 1


def check_rank(text: str) -> None:
    """Raise UsageError unless the text is a number or `all`."""
    if text != "all" and not text.isdecimal():
        raise UsageError(f"--rank {text!r} is neither a number nor all")


Program = Annotated[str, Option(type=click.UNPROCESSED, click={"required": True})]
Profiler = Annotated[
    Literal["torch", "none", "nsys"],
    Option(
        ("--profiler",),
        help=(
            "The profiler that records a few steps: torch (PyTorch's profiler) or nsys (Nsight "
            "Systems). With `none`, calls are counted, but no steps are recorded."
        ),
    ),
]
Steps = Annotated[
    int,
    Option(
        ("--steps",),
        type=click.IntRange(1, 1000),
        help="Number of steps that the profiler records.",
    ),
]
Warmup = Annotated[
    int,
    Option(
        ("--warmup",),
        type=click.IntRange(0, 1_000_000),
        help="Start the profiler after this many steps without a new kind of call. With 0, start the "
        "profiler at the first call.",
        click={"show_default": True},
    ),
]
Rank = Annotated[
    str,
    Option(
        ("--rank",),
        metavar="N|all",
        check=check_rank,
        help="The rank that the profiler records under torchrun, or `all` for every rank. Calls "
        "are counted in every rank.",
    ),
]
GpuNames = Annotated[
    str | None,
    gpu_option("At the end, predict the time of each layer on another GPU from its atlas."),
]


@dataclass(frozen=True)
class ObservedProgram:
    """The result of an observed program, and the GPUs for which to predict its layers."""

    observed: Observed
    ingested: list[IngestResult]
    places: list[tuple[Place, str]]
    store: Path

    @property
    def code(self) -> int:
        """Return the program's exit code. Replace 0 with 1 if no process could be observed."""
        if self.observed.why is None or self.observed.reported:
            return self.observed.code
        return self.observed.code or FAILED


@command("observe", frame=as_is, context_settings={"allow_interspersed_args": False})
def observe_program(
    *program: Program,
    profiler: Profiler = "torch",
    steps: Steps = ObserveOptions.steps,
    warmup: Warmup = ObserveOptions.warmup,
    rank: Rank = ObserveOptions.rank,
    gpu: GpuNames = None,
    driver: Driver = None,
    atlas: AtlasFolder = None,
    out: OutFolder = RUNS_FOLDER,
    note: RunNote = None,
    fail_on: FailOn = (),
    expect: Expected = (),
    store: Store = None,
) -> ObservedProgram:
    """Run a program unchanged and record its attention calls.

    Calls to scaled_dot_product_attention and flex_attention are counted by kind. Two calls are of
    the same kind if they have the same module path, file and line, the same tensor shapes and
    dtypes, the same mask effect and allowed backends, and ran on the same backend. All Python
    processes started by the program are observed. After three steps without a new kind of call, a
    profiler records a few steps. A new step begins after each optimizer step; if there is no
    optimizer, it begins when the first attention module of the model is called again. The program's
    standard streams, signals and exit code are passed through unchanged.

    --fail-on and --expect are checked against all observed calls after the program ends. A gate
    (--fail-on or --expect) also fails if the data that it needs was not recorded. If the program
    itself fails, its own exit code is returned, even if a gate fails too.

    With --gpu, the time of each layer on another GPU is predicted at the end and printed on stderr,
    in the format of `layers --gpu`. The program may run on a CPU, or with tensors on the `meta`
    device, which contain no data. The recorded calls and dtypes are those that the program uses on
    this machine.

    No run is created for a program without attention calls. If no process of the program could be
    observed, an exit code of 0 is replaced by 1.

    Python processes started with -I, -E or -S are not observed. If attention runs without a call to
    scaled_dot_product_attention or flex_attention from Python, as in the fast path of
    nn.TransformerEncoder, it is not counted, but appears in the recorded steps.

    \b
    Examples:
      profharness observe -- python train.py --epochs 1
      profharness observe --profiler none -- python -m pytest tests
      profharness observe --fail-on math-fallback,noop-mask --expect flash@'*' -- python train.py
      profharness observe --gpu H200 --profiler none -- python model.py
      profharness layers
    """
    require_gpu(gpu, driver, atlas)
    places = []
    if gpu is not None:
        require_forecast_alone(fail_on, expect)
        places = find_places(gpu, None, driver, atlas)
    if program[0].startswith("-"):
        raise UsageError(
            f"{program[0]} is not a program; to record a program, use: profharness observe -- python train.py"
        )
    options = ObserveOptions(
        profiler=profiler, steps=steps, warmup=warmup, rank=rank, out=Path(out), note=note
    )
    path = store_path(store)
    return ObservedProgram(*observe_into_store(program, path, options), places, path)


@document(observe_program)
def show(result: ObservedProgram, *, driver: Driver = None, atlas: AtlasFolder = None) -> None:
    """Print a summary to stderr, because stdout belongs to the program."""
    _print_summary(result)
    if result.places and result.observed.why is None:
        options = {"--driver": driver, "--atlas": atlas}
        _print_forecast(result, options)


@gate(observe_program)
def check(result: ObservedProgram, *, fail_on: FailOn = (), expect: Expected = ()) -> None:
    """Raise GateError if a gate is not met. Otherwise, exit with the program's exit code."""
    gates = parse_gates(fail_on, expect)
    if gates:
        _check(result, gates)
    click.get_current_context().exit(result.code)


def _print_forecast(result: ObservedProgram, options: Mapping[str, object]) -> None:
    """Print the predictions for other GPUs.

    Print errors instead of raising them, to keep the exit code of the program. `options` are the
    options of the `layers` command that is printed as a hint.
    """
    run, places, store = result.observed.run.run, result.places, result.store
    try:
        document = layers_document(forecast(store, run, places))
    except ProfharnessError as error:
        hint(f"error: {error}")
        return
    hint(RENDERERS["table"](document, width=shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns))
    words = [word for name, value in options.items() if value for word in (name, str(value))]
    gpus = ",".join(place.gpu for place, _ in places)
    again = shell_command("layers", run, "--gpu", gpus, *words, store=store)
    hint(f"To see these predictions again, use: {again}")


def _check(result: ObservedProgram, gates: Gates) -> None:
    """Raise GateError if a gate is not met and the program itself did not fail."""
    observed = result.observed
    try:
        if observed.why is not None:
            raise GateError("the gates cannot be checked, because no attention was recorded")
        with open_store(result.store) as opened:
            layers = find_layers(opened, observed.run.run)
        for line in check_gates(layers, gates):
            hint(line)
    except GateError as error:
        if not observed.code:
            raise
        hint(f"{error.label}: {error}\nthe program exited with {observed.code}")


def _print_summary(result: ObservedProgram) -> None:
    observed = result.observed
    if observed.why is not None:
        begin = "" if observed.reported else "error: "
        hint(f"{begin}no attention was recorded: {observed.why}")
        return
    for line in _summary(read_observed(observed.folder), observed.run.run, result.store):
        hint(line)
    for problem in observed.run.problems:
        hint(f"{problem.profiler}: {problem.message} [{problem.code}]\n  remedy: {problem.remedy}")
    for warning in [text for source in result.ingested for text in source.warnings]:
        hint(f"warning: {warning}")
    hint(f"To see the run, use: {shell_command('layers', observed.run.run, store=result.store)}")


def _summary(calls: tuple[ObservedCall, ...], run: str, store: Path) -> list[str]:
    """Return lines with the number of calls, their backends, and the answer of `layers`."""
    total = sum(item.count for item in calls)
    processes = len({item.pid for item in calls})
    ran = Counter[str]()
    for item in calls:
        if item.count:
            ran[item.ran or "unknown"] += item.count
    shares = ", ".join(f"{name} {count:,}" for name, count in ran.most_common())
    eager = [item for item in calls if not item.call.compiled]
    compiled = len(calls) - len(eager)
    lines = []
    if eager:
        places = len({(item.call.path, item.file, item.line) for item in eager})
        where = counted(places, "place")
        where += f" in {processes} processes" if processes > 1 else ""
        lines.append(f"{counted(total, 'attention call')} at {where}: {shares}")
    if compiled:
        lines.append(
            f"Compiled code calls attention in {counted(compiled, 'place')}; only a trace can show "
            "how many calls it makes."
        )
    with contextlib.suppress(ProfharnessError), open_store(store) as opened:
        layers = find_layers(opened, run)
        if layers.steps:
            lines += layers_answer(layers, told_change(layers))
    idle = [item for item in calls if item.mask == NO_MASK_EFFECT]
    if idle:
        where = ", ".join(dict.fromkeys(item.call.path or str(item.function) for item in idle[:3]))
        lines.append(f"The mask hides nothing in {where}, so attn_mask can be omitted.")
    return lines


DECLARATION = declaration_of(observe_program)
