"""The layer map of a program, which has one row for equal attention calls of equal layers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

from profharness.attention.config import AUTO, SDPA_BACKENDS, Config, parse_config
from profharness.attention.dispatch.advice import Advice
from profharness.attention.dispatch.by_rule import (
    Platform,
    by_preference,
    explain_by_rule,
    named_platforms,
    why_ran,
)
from profharness.attention.dispatch.machine import machine_of, release_text, rules_know
from profharness.columns import column
from profharness.device_types import CPU
from profharness.devices import Peaks
from profharness.errors import NotFoundError, UsageError, counted, join_and
from profharness.files import default_store, shell_command
from profharness.measurements.agreement import (
    AMD_LIBRARIES,
    FAMILY_BACKENDS,
    OF_PACKAGES,
    backend_of_kernel,
    backend_of_op,
    backend_text,
)
from profharness.program.observed_calls import ObservedCalls
from profharness.program.phases import (
    PhaseRow,
    Place,
    attention_kind,
    find_phases,
    mean_config,
    merged_doubts,
    phase_of,
    slow_steps,
    step_phases,
    step_place,
    steps_by_phase,
)
from profharness.rows import (
    MEASURED,
    PRODUCT_FAMILIES,
    UNTRACED,
    CallRow,
    CallSignature,
    GapRow,
    StepRow,
)
from profharness.store import Store
from profharness.trace import LAUNCHED_WITHOUT_OP, NO_OP, NO_SHAPES
from profharness.traces.engine_log import EngineLog
from profharness.traces.kernel_names import parse_kernel_name

WHOLE_PROGRAM = "the whole program"
NO_MASK_EFFECT, NO_MASK = "nothing", "none"  # special values of `LayerRow.mask`
NUMBER = re.compile(r"(?<![^._])\d+(?=\.|$)")
EAGER = "use scaled_dot_product_attention (in transformers: attn_implementation='sdpa')"

# Maps the effect of a mask to a reason, and to the change that makes the mask unnecessary.
_MASKS = {
    NO_MASK_EFFECT: ("the mask hides nothing", "leave attn_mask out"),
    "causal": ("the mask is causal", "pass is_causal=True instead of attn_mask"),
}
Points = tuple[tuple[str, float], ...]  # config labels, each with a number of calls
Text = str | None
Number = float | None
THROUGH_SDPA = ("sdpa", "inner")  # kinds of calls for which PyTorch chooses the backend
NO_CHOICE = {
    "eager": "eager attention uses no backend of scaled_dot_product_attention",
    "flex": "flex_attention uses no backend of scaled_dot_product_attention",
    "fast_path": "the fast path of nn.TransformerEncoder calls an op of its own",
    "replay": "the shapes of the replayed calls are unknown",
}
"""Maps a kind of call to the reason why the dispatch rules do not apply to it (see `no_choice`)."""
FP32_PRODUCTS, FOREACH = "fp32 products", "foreach"  # kinds of OtherWork
# ranges around the steps of the optimizers that accept fused=True on a GPU
_FUSED_OPTIMIZER = re.compile(r"Optimizer\.step#(Adam|AdamW|SGD)\.step")
MODULES_SHOWN = 2  # number of innermost modules that are shown for a call if --full is not given
UNFUSED = "flex_attention without torch.compile computes and stores all scores"
FUSE = "compile flex_attention, as in torch.compile(flex_attention), to get one fused kernel"
CHANGE_CODE = {
    EAGER: """\
import torch.nn.functional as F

# q, k, v: [batch, heads, seq_len, head_dim]
out = F.scaled_dot_product_attention(
    q, k, v,
    is_causal=...,  # replace ... by True if the mask is causal, else by False
    # attn_mask=mask,  # if there is another mask
)""",
    FUSE: """\
import torch
from torch.nn.attention.flex_attention import flex_attention

flex_attention = torch.compile(flex_attention)  # once, for all calls""",
}
"""Maps a change that does not depend on the config to its code.

Traces do not show the mask of eager attention, so its code does not run until the reader fills it in.
"""


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Equal calls of equal layers.

    Numbers of calls and times are averages per step, or None for observed calls that are in no
    trace. In a program with phases, they refer to the steps of one phase. An observed call of this
    kind has the config of the first call.
    """

    run: Annotated[str, column(meaning="id of the run")]
    step: Annotated[str, column(meaning="name of the steps that the row refers to")]
    module: Annotated[
        Text,
        column(
            "module",
            shrink=True,
            meaning="path of the module; the numbers of identical layers are in braces",
        ),
    ]
    module_class: Annotated[Text, column(meaning="class of the module")]
    kind: Annotated[
        str, column(meaning="`sdpa`, `inner`, `fast_path`, `flex`, `custom`, `eager` or `replay`")
    ]
    config: Annotated[
        Text,
        column(
            "config",
            importance="key",
            shrink=True,
            meaning="config of the call with the median length",
        ),
    ]
    lengths: Annotated[
        tuple[int, int] | None, column(meaning="the smallest and the largest seq_kv")
    ]
    calls: Annotated[
        Number,
        column("calls/step", "count", importance="normal", meaning="number of calls per step"),
    ]
    phase: Annotated[
        Text,
        column(
            "phase",
            spare=1,
            meaning="`train`, `decode` (one query), `prefill` (causal), `self` (not causal) or "
            "`cross` (different lengths). Tables show `train` as `training`, or as `recompute` if "
            "this is the direction, and leave out `self` and `cross`, which `attention` contains. "
            "If the program has phases, tables show `step_phase` instead",
        ),
    ]
    direction: Annotated[str, column(meaning="`forward` or `recompute`")]
    mode: Annotated[
        str,
        column(
            "mode",
            importance="detail",
            meaning="`eager`, `compile` or `graph` (replayed by a CUDA graph); tables omit `eager`",
        ),
    ]
    asked: Annotated[
        Text,
        column(
            "requested",
            importance="detail",
            meaning="backends that the program allowed, separated by commas. The value is `auto` if the "
            "program excluded no backend, and empty if the allowed backends are unknown",
        ),
    ]
    ran: Annotated[
        Text, column("ran", importance="answer", meaning="the backend that computed the calls")
    ]
    sdpa_op: Annotated[Text, column(meaning="the attention op in the trace")]
    kernels: Annotated[
        tuple[str, ...],
        column(
            "kernels",
            "names",
            meaning="short names of the kernels, in the order of their first launches",
        ),
    ]
    forward_ns: Annotated[
        Number,
        column(
            "forward µs/step",
            "time",
            importance="answer",
            scale="layer",
            meaning="forward kernel time per step",
        ),
    ]
    backward_ns: Annotated[
        Number,
        column(
            "backward µs/step",
            "time",
            importance="answer",
            scale="layer",
            meaning="backward kernel time per step",
        ),
    ]
    share: Annotated[
        Number,
        column(
            "% of GPU time",
            "percent",
            importance="answer",
            meaning="the kernels' share of the GPU's busy time in the steps that the row refers to",
        ),
    ]
    step_share: Annotated[
        Number,
        column(
            "% of step",
            "percent",
            importance="detail",
            spare=1,
            meaning="the kernels' share of the mean duration of the steps that the row refers to",
        ),
    ]
    reasons: Annotated[
        tuple[str, ...],
        column(
            meaning="why this backend ran, or which properties of the call the config does not "
            "describe"
        ),
    ]
    advice: Annotated[tuple[str, ...], column(meaning="possible improvements")]
    replayable: Annotated[bool, column(meaning="whether the config fully describes the call")]
    names: Annotated[tuple[str, ...], column(meaning="full names of the modules")] = ()
    mask: Annotated[
        Text,
        column(
            "mask",
            importance="detail",
            meaning="effect of the first call's mask. The value is `none` if there is no mask, and empty if "
            "the effect is unknown",
        ),
    ] = None
    points: Annotated[
        Points,
        column(
            meaning="the configs to time, each with the number of calls per step that it represents"
        ),
    ] = ()
    best: Annotated[
        Text,
        column(
            "fastest",
            importance="answer",
            meaning="the fastest backend with correct output (only with `--bench`)",
        ),
    ] = None
    ran_ns: Annotated[
        Number, column(meaning="time of one call on the backend that ran (only with `--bench`)")
    ] = None
    best_ns: Annotated[
        Number, column(meaning="time of one call on the best backend (only with `--bench`)")
    ] = None
    saves_ns: Annotated[
        Number,
        column(
            "saves µs/step",
            "time",
            importance="answer",
            meaning="time that the best backend saves per step, in the forward and backward pass",
        ),
    ] = None
    saves_forward_ns: Annotated[
        Number, column(meaning="time that the best backend saves per step in the forward pass")
    ] = None
    saves_backward_ns: Annotated[
        Number, column(meaning="time that the best backend saves per step in the backward pass")
    ] = None
    choice: Annotated[
        Text, column(meaning="the backend that PyTorch chose, as recorded by `observe`")
    ] = None
    site: Annotated[
        Text,
        column(
            "at",
            importance="detail",
            shrink=True,
            meaning="file and line of the call, recorded by `observe`",
        ),
    ] = None
    program_calls: Annotated[
        int | None,
        column(
            "calls in all",
            "count",
            importance="detail",
            spare=1,
            meaning="number of calls in the whole program, recorded by `observe`",
        ),
    ] = None
    dims: Annotated[
        tuple[tuple[int, ...] | None, ...],
        column(meaning="dimensions of query, key, value and mask if no config describes them"),
    ] = ()
    program_points: Annotated[
        Points,
        column(
            meaning="the configs of calls outside steps, each with the number of calls that it represents"
        ),
    ] = ()
    library: Annotated[
        Text,
        column(meaning="the library that contains the kernels (only on AMD GPUs)"),
    ] = None
    why: Annotated[
        Text,
        column(
            meaning="why PyTorch ran this backend, according to the dispatch rules (`reasons` also "
            "contains this text); empty if the backend is PyTorch's first choice"
        ),
    ] = None
    step_phase: Annotated[
        Text,
        column(
            "phase",
            importance="key",
            optional=True,
            meaning="phase of the steps that the row refers to; empty if the program has no phases",
        ),
    ] = None
    steps: Annotated[
        int | None,
        column(meaning="number of steps that the row refers to; empty if none was recorded"),
    ] = None
    attention: Annotated[
        Text,
        column(
            "attention",
            spare=1,
            meaning="`self` or `cross` (not causal, different lengths); empty if the shapes are "
            "unknown or there is one query. Tables without `cross` leave out this column",
        ),
    ] = None
    mean_config: Annotated[
        Text,
        column(
            meaning="config with the mean lengths of the requests in a step, from the annotations of a "
            "serving engine, if no config describes the calls; tables show it as `config`"
        ),
    ] = None

    @property
    def kernel_ns(self) -> float:
        """The time of all kernels of the row per step, or 0 if it has no kernels."""
        return (self.forward_ns or 0) + (self.backward_ns or 0)

    @property
    def total_ns(self) -> float:
        """The time of all kernels of the row in all its steps, or 0 if it has no kernels."""
        return self.kernel_ns * (self.steps or 0)


@dataclass(frozen=True, slots=True)
class Regret:
    """The time per step that the fastest correct backends would save, averaged over all steps.

    The savings of the forward and of the backward pass are None if a forward pass was not timed
    separately. The savings of the backward pass are also None if no call has a backward pass.
    """

    run: str  # id of the run that contains the benchmark
    measurement: str  # the measurement, such as `kernel`
    gpu: Text
    saves_ns: float
    saves_forward_ns: Number
    saves_backward_ns: Number
    timed_calls: float
    untimed_calls: float
    launch_bound: bool
    # sentences about the results, and about calls that the benchmark does not cover
    conclusions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerForecast:
    """The prediction for one row on another GPU.

    Times include the backward pass if the config has `bwd`.
    """

    predicted_backend: Annotated[
        Text,
        column(
            "predicted backend",
            importance="answer",
            meaning="the backend, among those allowed, that the dispatch rules choose on the GPU of the prediction",
        ),
    ] = None
    predicted_source: Annotated[
        Text,
        column(
            "source",
            meaning="the least certain source of the times: `measured`, `model` or `floor` (only a "
            "lower bound is known)",
        ),
    ] = None
    predicted_kernels: Annotated[
        tuple[str, ...],
        column("kernels", "names", meaning="kernels of the call with the median length"),
    ] = ()
    predicted_ns: Annotated[
        Number,
        column(
            "predicted µs/call",
            "time",
            scale="prediction",
            meaning="mean time of one call",
        ),
    ] = None
    predicted_low_ns: Annotated[
        Number,
        column(
            meaning="lower end of the 90 % prediction interval for the mean time of one call",
        ),
    ] = None
    predicted_high_ns: Annotated[
        Number,
        column(
            meaning="upper end of the 90 % prediction interval for the mean time of one call",
        ),
    ] = None
    predicted_total_ns: Annotated[
        Number,
        column(
            "predicted µs/step",
            "time",
            importance="answer",
            scale="program",
            meaning="time of all calls in a step, or in the whole program if there are no steps",
        ),
    ] = None
    predicted_share: Annotated[
        Number,
        column(
            "% of attention",
            "percent",
            meaning="the row's share of the total predicted attention time",
        ),
    ] = None
    predicted_best: Annotated[
        Text,
        column(
            "fastest",
            importance="answer",
            meaning="the fastest backend with a known time that supports the call",
        ),
    ] = None
    predicted_best_ns: Annotated[Number, column(meaning="time of one call on the best backend")] = (
        None
    )
    predicted_saves_ns: Annotated[
        Number,
        column(
            "saves µs/step",
            "time",
            importance="answer",
            scale="program",
            meaning="time that the best backend saves, summed over all calls",
        ),
    ] = None
    predicted_certain: Annotated[
        bool | None,
        column(
            meaning="true if the chosen and the best backend have non-overlapping intervals and "
            "their times differ by more than 3 %"
        ),
    ] = None
    predicted_reason: Annotated[Text, column(meaning="why a value is missing")] = None
    predicted_gpu: Annotated[Text, column(meaning="the GPU that the times are predicted for")] = (
        None
    )

    @property
    def predicted_interval(
        self,
    ) -> Annotated[
        tuple[float, float | None] | None,
        column(
            "90 % interval",
            "interval",
            importance="detail",
            scale="prediction",
            meaning="90 % prediction interval for the mean time of one call; a lower bound if the source is `floor`",
        ),
    ]:
        """The interval of the time, or None if the time was measured."""
        if self.predicted_low_ns is None or self.predicted_source == MEASURED:
            return None
        return self.predicted_low_ns, self.predicted_high_ns


@dataclass(frozen=True, slots=True)
class PredictedTime:
    """The predicted attention time of a step of a phase, or of the program if it has no phases."""

    phase: Text
    ns: float
    low_ns: float
    high_ns: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predictions for all rows on another GPU, in the order of the rows of the layer map.

    If the program has phases, the times and calls are averages over all steps, and `groups` contains
    the times of a step of each phase.
    """

    gpu: str
    torch: str
    machine: Text  # the machine that the atlas was measured on; None if there is no atlas
    cudnn: int | None
    of: str  # what the calls and times refer to: `step`, or `program` if no step was recorded
    ns: float
    low_ns: float
    high_ns: float
    saves_ns: float
    calls: float
    unpredicted_calls: float  # calls for which no time was predicted
    conclusions: tuple[str, ...]
    rows: tuple[LayerForecast, ...]
    groups: tuple[PredictedTime, ...] = ()


class StepTimes:
    """The average times of some steps, and of the attention in them."""

    __slots__ = ()
    rows: tuple[LayerRow, ...]
    steps: tuple[StepRow, ...]

    @property
    def step_ns(self) -> float:
        """The average duration of a step."""
        return sum(step.duration_ns for step in self.steps) / max(len(self.steps), 1)

    @property
    def busy_ns(self) -> float:
        """The average time per step in which a GPU was busy."""
        return sum(step.busy_ns for step in self.steps) / max(len(self.steps), 1)

    @property
    def attention_ns(self) -> float:
        """The time of all attention kernels per step."""
        return self.mean((row, row.kernel_ns) for row in self.rows)

    @property
    def gpu_ns(self) -> float:
        """The sum of the busy times of all GPUs per step. The sum includes attention."""
        return self._whole_ns()[0]

    @property
    def gpu_step_ns(self) -> float:
        """The average duration of a step, summed over all GPUs. The sum includes attention."""
        return self._whole_ns()[1]

    def mean(self, figures: Iterable[tuple[LayerRow, Number]]) -> float:
        """Return the sum of figures per step, given for each row its figure per step of the row."""
        total = sum((value or 0) * (row.steps or 0) for row, value in figures)
        return total / max(len(self.steps), 1)

    def _whole_ns(self) -> tuple[float, float]:
        count = max(len(self.steps), 1)
        busy, long = _whole_ns(self.steps, self.attention_ns * count)
        return busy / count, long / count


NOTABLE_WORK = {FP32_PRODUCTS: 0.2, FOREACH: 0.1}
"""The minimum share of the GPU time at which a kind of OtherWork is worth a change."""
AUTOCAST_CODE = """\
import torch

# attention and the other matrix products then compute in bf16
with torch.autocast("cuda", dtype=torch.bfloat16):
    output = model(...)  # replace ... by the inputs of the model"""
"""The code that computes a model in bf16, without its backward pass."""


@dataclass(frozen=True, slots=True)
class OtherWork:
    """Kernels outside attention for which a faster way is known, and their time per step."""

    kind: str  # FP32_PRODUCTS or FOREACH
    ns: float
    optimizer: str = ""  # the class in torch.optim whose steps launch the foreach kernels

    @property
    def code(self) -> str:
        """The code of the faster way."""
        if self.kind == FP32_PRODUCTS:
            return AUTOCAST_CODE
        return f"optimizer = torch.optim.{self.optimizer}(model.parameters(), fused=True)"


@dataclass(frozen=True, slots=True)
class StepGroup(StepTimes):
    """The steps of one phase, and the rows that refer to them.

    In a program without phases, these are all steps, and `phase` is None.
    """

    phase: Text
    steps: tuple[StepRow, ...]
    rows: tuple[LayerRow, ...]


@dataclass(frozen=True, slots=True)
class LayerMap(StepTimes):
    """The layer map of one run.

    The phase that takes the most time comes first. In a phase, the rows with the longest kernel
    times come first. The times of the map are averages over all steps. The times of each phase are
    in `groups`.
    """

    run: str
    rows: tuple[LayerRow, ...]
    steps: tuple[StepRow, ...]
    gaps: tuple[GapRow, ...]  # the longest gaps of all steps
    caveats: tuple[str, ...]
    platform: Platform | None = None  # platform to which dispatch rules are applied
    gpu: str | None = None  # name of the GPU; None for a CPU
    regret: Regret | None = None
    processes: int = 0  # number of observed processes
    forecasts: tuple[Forecast, ...] = ()  # predictions for other GPUs
    name: str = ""  # the file of a trace, otherwise the id of the run
    phases: tuple[PhaseRow, ...] = ()
    step_phases: Mapping[Place, str] = field(default_factory=dict)
    benched: str | None = None  # the bench run that the phases are compared with
    engine: EngineLog | None = None  # the contents of the engine's log
    assumed: str = ""  # a sentence about the release of `platform`, if the run does not record it
    other_work: tuple[OtherWork, ...] = ()  # kernels outside attention that could be faster
    detailed: bool = False  # whether torch.profiler recorded shapes or stacks, which slows the CPU
    launch_share: float = 0.0  # share of the attention calls in the launches of the steps
    reference: str = ""  # the text that selects the run in a command line
    store: Path | None = None  # the store that contains the run
    usual_gaps: tuple[GapRow, ...] = ()  # the longest gaps of the steps that are not slow

    @property
    def usual_steps(self) -> tuple[StepRow, ...]:
        """The steps that are not slow."""
        slow = {step for group in self.groups for step in slow_steps(group.steps)}
        return tuple(step for step in self.steps if step not in slow)

    @property
    def notable_work(self) -> dict[OtherWork, float]:
        """The kernels outside attention that are worth a change, with their shares of the GPU time."""
        shares = {
            work: min(work.ns / self.gpu_ns, 1) if self.gpu_ns else 0.0 for work in self.other_work
        }
        return {
            work: share
            for work, share in shares.items()
            if share >= NOTABLE_WORK[work.kind]
            and (work.kind != FOREACH or work.ns > self.attention_ns)
        }

    def command(self, name: str, *options: str) -> str:
        """Return the command line that runs a command on the run."""
        return shell_command(
            name, self.reference or self.name, *options, store=self.store or default_store()
        )

    @property
    def groups(self) -> tuple[StepGroup, ...]:
        """The steps of each phase with their rows, or all steps if the program has no phases."""
        groups = steps_by_phase(self.steps, self.step_phases)
        if any(row.steps and row.step_phase is None for row in self.rows):
            groups.setdefault(None, list(self.steps))
        return tuple(
            StepGroup(
                phase, tuple(steps), tuple(row for row in self.rows if row.step_phase == phase)
            )
            for phase, steps in groups.items()
        )

    def shown_reasons(self, row: LayerRow) -> tuple[str, ...]:
        """Return the reasons of a row, without a reason that a caveat gives for all calls of a step."""
        told = any(
            doubt.endswith(LAUNCHED_WITHOUT_OP)
            for phase in self.phases
            if phase.phase == row.step_phase
            for doubt in phase.doubts
        )
        return tuple(reason for reason in row.reasons if not (told and reason == NO_OP))

    def of_phase(self, phase: str | None) -> StepTimes:
        """Return the times of a phase, or those of all steps if `phase` is None."""
        return next((group for group in self.groups if group.phase == phase), self)


def find_layers(
    store: Store,
    run: str,
    *,
    step: int | None = None,
    torch: str | None = None,
    assume: Callable[[str | None], str] | None = None,
) -> LayerMap:
    """Return the layer map of a run.

    `step` selects one step, counted from 0 over all traces. `torch` names the PyTorch release if
    the run does not record it. If both are missing, `assume` returns the release to assume for a
    GPU, or for the CPU if the GPU is None. Raise NotFoundError if there are no attention calls or no such step,
    and UsageError for an unknown release.
    """
    calls = store.calls(run)
    observed = ObservedCalls(store.templates(run), calls)
    if not calls and not observed:
        name = store.run_name(run)
        own = store.shown_by(run)
        if store.cells(run):
            raise NotFoundError(
                f"run {name} contains configs, not a program; to show them, use: {own}"
            )
        has_kernels = store.has(run, "kernels")
        shown = f"to show the kernels of the run, use: {own}; " if has_kernels else ""
        raise NotFoundError(
            f"run {name} contains no attention call; {shown}if the program runs attention, record "
            "its ops and modules with torch.profiler.profile(record_shapes=True, with_stack=True)"
        )
    steps = store.steps(run) if calls else []
    outside = 0
    if step is None:
        inside = calls_in_steps(calls, steps)
        outside = len(calls) - len(inside)
        calls = inside + observed.untraced()
    else:
        if not 0 <= step < len(steps):
            there = f"steps 0 to {len(steps) - 1}"
            if len(steps) < 2:
                there = "only step 0" if steps else "no recorded step"
            raise UsageError(f"--step {step}: run {store.run_name(run)} has {there}")
        steps = [steps[step]]
        calls = _strictly_in(calls, steps)
    gpu = next(
        (device.name for device in store.devices(run)),
        None if steps else store.environment(run).get("gpu"),
    )
    platform = _platform(store, run, torch)
    assumed = None
    if platform is None and assume is not None and any(map(_through_sdpa, calls)):
        busy = any(step.busy_ns for step in steps)
        platform = assumed = _assumed_platform(store.environment(run), gpu, assume, busy=busy)
    of_steps = step_phases(steps, calls)
    by_phase = steps_by_phase(steps, of_steps)
    wholes = _wholes(calls, steps, of_steps)
    groups = group_calls(calls, observed, of_steps)
    counts = observed.counts(groups)
    rows = []
    for group, made in zip(groups, counts, strict=True):
        phase = of_steps.get((group[0].trace, group[0].step))
        of_phase = by_phase.get(phase, steps)
        rows.append(_row(run, phase, group, of_phase, wholes[phase], platform, observed, made))
    # Rows with the longest times come first. Rows without times are sorted by number of calls.
    order = {phase: place for place, phase in enumerate(by_phase)}
    rows.sort(
        key=lambda row: (
            *(order.get(row.step_phase, len(order)), -row.kernel_ns),
            *(row.calls is None, -(row.program_calls or 0)),
        )
    )
    problems = [f"{problem.message}; {problem.remedy}" for problem in store.problems(run)]
    peaks = store.peaks(run)
    phases = find_phases(steps, calls, of_steps, peaks)
    layers = LayerMap(
        run=run,
        rows=tuple(rows),
        steps=tuple(steps),
        gaps=tuple(store.gaps(steps)),
        caveats=(
            *_caveats(rows, platform, observed, outside, assumed),
            *problems,
            *merged_doubts(phases),
            *store.warnings([run]).get(run, ()),
        ),
        platform=platform,
        gpu=gpu,
        processes=observed.processes,
        name=store.run_name(run),
        phases=phases,
        step_phases=of_steps,
        engine=store.engine(run),
        assumed=_assumption(assumed) if assumed is not None else "",
        other_work=tuple(_other_work(store, steps, calls, peaks)),
        detailed=store.has_detailed_trace(run),
        launch_share=_launch_share(calls, steps),
        reference=store.run_reference(run),
        store=store.path,
    )
    usual = layers.usual_steps
    gaps = layers.gaps if len(usual) == len(steps) else tuple(store.gaps(usual))
    return replace(layers, usual_gaps=gaps)


def _other_work(
    store: Store, steps: Sequence[StepRow], calls: Iterable[CallRow], peaks: Peaks | None
) -> Iterator[OtherWork]:
    """Yield the kinds of kernels outside attention for which a faster way is known."""
    if not steps:
        return
    if products := _fp32_products_ns(store, steps, calls, peaks):
        yield OtherWork(FP32_PRODUCTS, products)
    spent: Counter[str] = Counter()
    for name, ns in store.foreach_ns(steps).items():
        if match := _FUSED_OPTIMIZER.fullmatch(name):
            spent[match[1]] += ns
    for optimizer, ns in spent.items():
        yield OtherWork(FOREACH, ns / len(steps), optimizer)


def _fp32_products_ns(
    store: Store, steps: Sequence[StepRow], calls: Iterable[CallRow], peaks: Peaks | None
) -> float:
    """Return the mean time per step of the fp32 matrix products that do not compute attention.

    Return 0 if the GPU is not known to have a higher rate in bf16.
    """
    rates = peaks.flops_per_s if peaks else {}
    if rates.get("bf16", 0) <= rates.get("fp32", math.inf):
        return 0.0
    of_attention = sum(
        kernel.total_ns
        for call in calls
        for kernel in call.kernels
        if kernel.family in PRODUCT_FAMILIES and parse_kernel_name(kernel.kernel).dtype == "fp32"
    )
    return max(0, store.products_ns(steps, "fp32") - of_attention) / len(steps)


def _whole_ns(steps: Sequence[StepRow], kernel_ns: float) -> tuple[float, float]:
    """Return (the sum of the busy times of all GPUs, the sum of the durations of the steps).

    Both are at least `kernel_ns`, the time of the attention kernels. Attention kernels can run at
    the same time on several streams.
    """
    busy = sum(step.busy_ns * step.devices for step in steps)
    long = sum(step.duration_ns * step.devices for step in steps)
    return max(busy, kernel_ns) if busy else 0, max(long, kernel_ns) if long else 0


def _launch_share(calls: Iterable[CallRow], steps: Sequence[StepRow]) -> float:
    """Return the share of the attention calls in the launches of the steps, or 0 without launches."""
    whole = sum(step.launches for step in steps)
    own = sum(kernel.launches for call in calls for kernel in call.kernels)
    return min(own / whole, 1) if whole else 0.0


def _wholes(
    calls: Iterable[CallRow], steps: Sequence[StepRow], phases: Mapping[Place, str]
) -> dict[str | None, tuple[float, float]]:
    """Return the result of `_whole_ns` for each phase of the calls."""
    spent: Counter[str | None] = Counter()
    for call in calls:
        own = sum(kernel.total_ns for kernel in call.kernels)
        spent[phases.get((call.trace, call.step))] += own
    groups = steps_by_phase(steps, phases)
    return {phase: _whole_ns(groups.get(phase, steps), ns) for phase, ns in spent.items()}


def calls_in_steps(calls: Sequence[CallRow], steps: Sequence[StepRow]) -> list[CallRow]:
    """Return the calls that are in a step. If there are none, return all calls."""
    return _strictly_in(calls, steps) or list(calls)


def _strictly_in(calls: Sequence[CallRow], steps: Sequence[StepRow]) -> list[CallRow]:
    places = set(map(step_place, steps))
    return [call for call in calls if (call.trace, call.step) in places]


def no_choice(row: LayerRow) -> str | None:
    """Return why PyTorch's dispatch rules do not apply to the calls of a row, or None if they may."""
    if row.kind != "custom":
        return NO_CHOICE.get(row.kind)
    ran = row.ran or OF_PACKAGES
    verb = "compute" if " and " in ran else "computes"
    return f"{backend_text(ran)} {verb} the attention, not scaled_dot_product_attention"


def group_calls(
    calls: Iterable[CallRow],
    observed: ObservedCalls | None = None,
    phases: Mapping[Place, str] | None = None,
) -> list[list[CallRow]]:
    """Group equal calls, in the order of the first calls.

    Decoding calls of a group may differ in the number of keys. If `phases`, the result of
    `step_phases`, is given, the calls of a group are in steps of the same phase.
    """
    groups: dict[tuple[Any, ...], list[CallRow]] = {}
    for call in calls:
        kind = observed.kind(call) if observed else None
        recorded = (kind.asked, kind.choice, kind.ran, kind.mask, _site(kind)) if kind else ()
        config = any_length(parse_config(call.config), phase_of(call)) if call.config else None
        shapes = call.dims if config is None else ()
        pattern = NUMBER.sub("{}", module_name(call) or "")
        key = (
            *(pattern, call.kind, call.op, call.sdpa_op, config, shapes, call.mode),
            *(call.recompute, call.backward, actual_backend(call)),
            *(call.trace == UNTRACED, recorded),
            phases.get((call.trace, call.step)) if phases else None,
        )
        groups.setdefault(key, []).append(call)
    return list(groups.values())


def _site(kind: CallSignature | None) -> str | None:
    """Return the file and line of a call, such as `model.py:18`."""
    if kind is None or kind.file is None:
        return None
    return kind.file if kind.line is None else f"{kind.file}:{kind.line}"


def _platform(store: Store, run: str, torch: str | None) -> Platform | None:
    """Return the platform of the program. Return None if its PyTorch release is unknown."""
    environment = store.environment(run)
    if torch is not None:
        devices = store.devices(run)
        gpu = devices[0].name if devices else environment.get("gpu")
        platforms = named_platforms(torch, gpu or CPU)
        if len(platforms) > 1 or ".." in torch:
            raise UsageError(
                f"--torch {torch!r} names several releases; name the release of the program, such as "
                "2.11"
            )
        return platforms[0]
    if not rules_know(environment):
        return None
    device = str(environment["device_type"])
    # pinned is false, because the environment records the actual version of cuDNN
    return Platform(machine_of(environment), device, environment.get("gpu"), pinned=False)


def _assumed_platform(
    environment: Mapping[str, Any],
    gpu: str | None,
    assume: Callable[[str | None], str],
    *,
    busy: bool,
) -> Platform | None:
    """Return the platform with the release that `assume` returns for the GPU, or for the CPU.

    Return None if the run records a release, whose rules are then unknown. Return None if the GPU is
    unknown; `busy` says that there was one.
    """
    if environment.get("torch") or (gpu is None and busy):
        return None
    try:
        (platform,) = named_platforms(assume(gpu), gpu or CPU)
    except UsageError:  # a GPU whose capability or rules are unknown
        return None
    return platform


def _through_sdpa(call: CallRow) -> bool:
    """Return whether PyTorch chose the backend of a call, and the config of the call is known."""
    return call.kind in THROUGH_SDPA and call.config is not None


def module_name(call: CallRow) -> str | None:
    """Return the dotted path of the call's module.

    If the path is unknown, join the numbered classes of the modules around the call. Return None if
    there are no modules.
    """
    return call.path or ".".join(call.modules) or None


def any_length(config: Config, phase: str | None) -> Config:
    """Return the config of a call.

    For a decoding call, reset the number of keys and the strides, which change with each token.
    """
    if phase != "decode":
        return config
    return replace(config.contiguous(), seq_len_kv=1, mask_strides=None)


def actual_backend(call: CallRow) -> str | None:
    """Return the backend that computed a call, or None if it is unknown.

    The backend is derived from the op, or otherwise from the families of the kernels.
    """
    if call.kind in ("eager", "flex"):
        return call.kind
    by_op = backend_of_op(call.sdpa_op)
    if by_op and by_op != "fused":
        return by_op
    names = {backend_of_kernel(kernel.family, kernel.kernel) for kernel in call.kernels} - {None}
    # sorted, because the order of a set differs between processes
    return " and ".join(sorted(map(str, names))) or None


def library_of(calls: Iterable[CallRow]) -> str | None:
    """Return the AMD libraries whose kernels computed the calls, or None if there are none."""
    families = {kernel.family for call in calls for kernel in call.kernels}
    found = {FAMILY_BACKENDS.get(family, "") for family in families} & AMD_LIBRARIES.keys()
    return join_and(sorted(AMD_LIBRARIES[name] for name in found)) if found else None


def module_names(calls: Iterable[CallRow]) -> tuple[str, ...]:
    """Return the names of the modules of calls, without duplicates."""
    return tuple(dict.fromkeys(name for call in calls if (name := module_name(call))))


def merge_numbered(names: Sequence[str]) -> str | None:
    """Merge names that differ only in numbers. Return None if there are no names.

    For example, merge `layers.0.attn` and `layers.1.attn` to `layers.{0-1}.attn`.
    """
    if not names:
        return None
    columns = [NUMBER.findall(name) for name in names]
    numbers = iter([sorted({int(row[at]) for row in columns}) for at in range(len(columns[0]))])
    return NUMBER.sub(lambda _: _spans(next(numbers)), names[0])


def join_numbered(names: Iterable[str]) -> str:
    """Merge names that differ only in numbers, and join the results with commas."""
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault(NUMBER.sub("{}", name), []).append(name)
    return ", ".join(str(merge_numbered(group)) for group in alike.values())


def _spans(numbers: Sequence[int]) -> str:
    """Format sorted numbers as `3`, `{0-2}`, `{0-2,5}` or `{1,3,…,23}`."""
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{{{numbers[0]},{numbers[1]},…,{numbers[-1]}}}"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in spans)
    return text if len(numbers) == 1 else f"{{{text}}}"


def _row(
    run: str,
    phase: str | None,
    group: Sequence[CallRow],
    steps: Sequence[StepRow],
    whole: tuple[float, float],
    platform: Platform | None,
    observed: ObservedCalls,
    made: int | None,
) -> LayerRow:
    """Return the row of a group of calls in steps of a phase. `whole` is the result of `_whole_ns`."""
    # `count` is at least 1, because an observed program may have no recorded step.
    first, count = group[0], max(len(steps), 1)
    kind, traced = observed.kind(first), first.trace != UNTRACED
    configs = [parse_config(call.config) for call in group if call.config]
    middle = median_config(configs)
    spent: Counter[str] = Counter()
    for kernel in chain.from_iterable(call.kernels for call in group):
        spent["backward" if kernel.direction == "backward" else "forward"] += kernel.total_ns
    ran = actual_backend(first) or (kind.ran if kind else None)
    mask = observed.common_field(first, "mask")
    if mask is None and observed and middle and middle.mask == "none" and first.reason is None:
        mask = NO_MASK
    why = _why(first, middle, platform, ran, kind)
    reasons, advice = _reasons_and_advice(first, middle, platform, ran, kind, why)
    has_kernels = any(call.kernels for call in group)
    busy, long = whole
    lengths = [config.seq_len_kv for config in configs]
    if not traced:
        lengths = observed.lengths(group) or lengths
    return LayerRow(
        run=run,
        step=_steps_name(steps, phase) if traced else WHOLE_PROGRAM,
        module=merge_numbered(module_names(group)),
        module_class=NUMBER.sub("", first.modules[-1]).rstrip("_") if first.modules else None,
        kind=first.kind,
        config=middle.label if middle else None,
        lengths=(min(lengths), max(lengths)) if lengths else None,
        calls=len(group) / count if traced else None,
        phase=phase_of(first),
        direction="recompute" if first.recompute else "forward",
        mode=first.mode,
        asked=observed.common_field(first, "asked"),
        ran=ran,
        sdpa_op=first.sdpa_op,
        kernels=tuple(dict.fromkeys(kernel.kernel_short for kernel in first.kernels)),
        forward_ns=spent["forward"] / count if has_kernels else None,
        backward_ns=spent["backward"] / count if has_kernels and spent["backward"] else None,
        share=spent.total() / busy if has_kernels and busy else None,
        step_share=spent.total() / long if has_kernels and long else None,
        reasons=reasons,
        advice=advice,
        replayable=middle is not None and all(call.reason is None for call in group),
        names=module_names(group),
        mask=mask,
        points=points_of(group, count) if traced else (),
        choice=kind.choice if kind else None,
        site=_site(kind),
        program_calls=made,
        dims=() if middle else first.dims,
        program_points=observed.points(group),
        library=library_of(group),
        why=why,
        step_phase=phase,
        steps=count if traced else None,
        attention=attention_kind(middle.label) if middle else None,
        mean_config=average.label if (average := mean_config(group, steps)) else None,
    )


def _steps_name(steps: Sequence[StepRow], phase: str | None) -> str:
    """Return the name of one step, or text such as `5 decode steps`."""
    if len(steps) == 1:
        return steps[0].name
    return counted(len(steps), f"{phase} step" if phase else "step")


def points_of(calls: Iterable[CallRow], count: int) -> Points:
    """Return the configs with the smallest, the median and the largest seq_kv.

    Each config comes with the number of calls per step that it represents. `calls` are the calls in
    `count` steps. If the seq_kv of a call is between two configs, the call counts partly for both
    configs, and more for the closer one. A call that is recomputed in the backward pass counts as a
    forward call.
    """
    configs = [
        replace(config, bwd=False) if call.recompute else config
        for call in calls
        if call.config and (config := parse_config(call.config))
    ]
    if not configs:
        return ()
    ordered = sorted(configs, key=lambda config: config.seq_len_kv)
    chosen = (ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1])
    points = list({config.seq_len_kv: config for config in chosen}.values())
    weights = [0.0] * len(points)
    for config in ordered:
        length = config.seq_len_kv
        for at, (low, high) in enumerate(pairwise(point.seq_len_kv for point in points)):
            if low <= length < high:
                part = (length - low) / (high - low)
                weights[at] += 1 - part
                weights[at + 1] += part
                break
        else:
            weights[-1] += 1
    return tuple(
        (point.label, weight / count) for point, weight in zip(points, weights, strict=True)
    )


def median_config(configs: Sequence[Config]) -> Config | None:
    """Return the config with the median seq_kv, or None if there are no configs."""
    if not configs:
        return None
    ordered = sorted(configs, key=lambda config: config.seq_len_kv)
    return ordered[(len(ordered) - 1) // 2]


def is_explained(row: LayerRow) -> bool:
    """Return whether the dispatch rules apply to the calls of a row, whose backend is known."""
    return row.kind in THROUGH_SDPA and row.config is not None and row.ran in SDPA_BACKENDS


def allowed_setting(asked: str | None) -> str:
    """Return `auto`, or the allowed backends as a set such as `flash+math`, or "" if there are none.

    `asked` is a value of `LayerRow.asked`. Unknown backends count as `auto`.
    """
    return AUTO if asked is None else asked.replace(",", "+")


def _why(
    call: CallRow,
    config: Config | None,
    platform: Platform | None,
    ran: str | None,
    kind: CallSignature | None,
) -> str | None:
    """Return the reason why PyTorch ran a backend according to the rules, or None.

    If the rules predict another backend, say so, unless something else explains the difference.
    """
    setting = allowed_setting(kind.asked if kind else None)
    if call.kind not in THROUGH_SDPA or None in (config, platform) or not setting:
        return None
    assert config is not None and platform is not None
    answer = explain_by_rule(config, platform, advice=False, asked=setting)
    explained = call.reason or setting != AUTO or (kind and kind.choice not in (None, ran))
    return None if explained and answer.predicted != ran else why_ran(answer, ran)


def _reasons_and_advice(
    call: CallRow,
    config: Config | None,
    platform: Platform | None,
    ran: str | None,
    kind: CallSignature | None,
    why: str | None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    reasons = list(filter(None, (why, call.reason)))
    advice: list[str] = []
    if kind:
        if ran == "math" and kind.asked not in (None, "math"):
            allowed = "any backend" if kind.asked == AUTO else kind.asked
            reasons.append(
                f"PyTorch silently fell back to math, although the program allows {allowed}"
            )
        if ran and kind.choice and kind.choice != ran and ran != "none":
            reasons.append(f"PyTorch chose {kind.choice}, but {ran} ran")
        if kind.mask in _MASKS:
            reason, change = _MASKS[kind.mask]
            reasons.append(f"{reason} in the first call")
            then = ""
            if config is not None and platform is not None:
                bare = replace(config, mask="none", mask_shape=None, mask_strides=None)
                bare = replace(bare, causal=bare.causal or kind.mask == "causal")
                predicted = explain_by_rule(bare, platform, advice=False).predicted
                then = "" if predicted in (None, "none", ran) else f"; {predicted} then runs"
            advice.append(f"{change} if the mask is the same in all calls{then}")
        if ran == kind.asked == "math":
            advice.append(
                "allow the other backends, which are excluded by sdpa_kernel or torch.backends.cuda"
            )
    if call.kind == "eager":
        return tuple(reasons), (EAGER,)
    if call.kind == "flex" and not call.compiled:
        return (*reasons, UNFUSED), (FUSE,)
    if ran == "math" and config is not None and platform is not None:
        for backend, item in suggestions(config, platform):
            advice += [f"{backend}: {item.change}"] if item else []
    return tuple(reasons), tuple(advice)


def suggestions(config: Config, platform: Platform) -> list[tuple[str, Advice | None]]:
    """Return the backends except math that the rules refuse.

    Each backend comes with the first change after which the backend supports the config, or None.
    """
    return [
        (side.backend, next(iter(side.advice), None))
        for side in by_preference(explain_by_rule(config, platform))
        if side.backend != "math" and side.eligible is False and side.reasons
    ]


def _caveats(
    rows: Sequence[LayerRow],
    platform: Platform | None,
    observed: ObservedCalls,
    outside: int,
    assumed: Platform | None,
) -> list[str]:
    texts = []
    if outside:
        texts.append(f"{outside} attention calls ran outside the steps and are not counted.")
    if names := join_numbered([kind.name for kind in observed.hidden() if kind.name]):
        texts.append(
            f"Compiled code calls attention in {names}; the trace does not show which module made "
            "each call."
        )
    live = [row for row in rows if row.kind != "replay"]
    if any(row.kind == "replay" and NO_SHAPES in row.reasons for row in rows):
        texts.append(
            "Traces do not record the shapes of CUDA graph replays. To see the shapes, also record the "
            "capture of the graph, or run the program without CUDA graphs."
        )
    if live and not observed and not any(row.module for row in live):
        texts.append(
            "The trace has no modules. Record the trace with with_stack=True, or with "
            "`profharness observe` under nsys."
        )
    if assumed is not None and any(row.why for row in rows):
        texts.append(_assumption(assumed))
    if platform is None and any(row.ran == "math" for row in rows):
        texts.append(
            "The reason why math ran depends on the PyTorch release, which the trace does not "
            "record; to see the reason, specify the release, such as torch 2.11."
        )
    return texts


def _assumption(platform: Platform) -> str:
    return (
        "The run does not record its PyTorch release, so "
        f"{release_text(platform.machine.torch)} is assumed; specify another with --torch."
    )


def replay_lines(layers: LayerMap) -> list[str]:
    """Return the output lines of `--list-configs`. Each line contains a config that replays some calls,
    followed by the modules that make these calls.
    """
    lines: dict[str, list[str]] = {}
    for row in layers.rows:
        if row.config and row.replayable:
            lines.setdefault(row.config, []).append(row.module or "a call")
    return [f"{config}  # {', '.join(modules)}" for config, modules in lines.items()]


def short_module(module: str | None) -> str | None:
    """Return the last MODULES_SHOWN names of a module's path.

    If the first name is a number, also keep the name before the number, as in `layers.0.self_attn`.
    """
    parts = (module or "").split(".")
    if "{" in parts[0] or not module:
        return module
    numbered = parts[-MODULES_SHOWN:][0][0:1] in ("{", *"0123456789")
    return ".".join(parts[-MODULES_SHOWN - numbered :])
