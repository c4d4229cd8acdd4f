"""Find the baseline and the candidate of a diff, and compare their cells and kernels.

Cells are paired by config, and kernels by role.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from statistics import fmean
from typing import Annotated, Any, Literal

import msgspec

from profharness import stats
from profharness.attention.config import Config, in_usual_order, pytorch_chooses, setting_name
from profharness.columns import SPEED_UP, column
from profharness.commands._answers import cell_reason
from profharness.device_types import CPU
from profharness.devices import short_device_names
from profharness.errors import (
    AmbiguousNameError,
    NotFoundError,
    UnknownNameError,
    UsageError,
    did_you_mean,
    join_few,
    near_names,
)
from profharness.files import shell_command
from profharness.measurements.measurements import (
    AGAIN,
    clock_doubts,
    host_doubts,
    is_disturbed,
    usable_times,
)
from profharness.program.changes import (
    MIN_LAUNCHES,
    RESOLUTION_NS,
    EnvChange,
    Verdict,
    environment_changes,
)
from profharness.program.matching import LayerDiff, Program, diff_layers, find_program
from profharness.program.phases import PhaseRow, middle_steps
from profharness.program.roles import (
    ROLES,
    by_role,
    launches_per_call,
    role_order,
    split_passes,
)
from profharness.rows import (
    CALL_MEASUREMENTS,
    KERNEL,
    LAUNCH_PROFILERS,
    WHOLE_TRACE,
    CellRow,
    KernelRow,
    StepRow,
    shared_measurement,
)
from profharness.store import Need, Selection, Store
from profharness.traces.kernel_names import parse_kernel_name
from profharness.units import compared as compared_text
from profharness.units import ratio_text, speed_up_of

SCHEMA = "profharness.diff/1"
BACKEND_CHANGED = "backend-changed"
"""The value of --fail-on for layers that run on another backend in the candidate."""
COSTS = MEMORY, LAUNCHES, REFUSED = "memory", "launches", "refused"
"""The values of --fail-on for costs.

They match a candidate that uses more memory or more launches than the baseline, or that refuses a
config that the baseline runs.
"""
Kernels = tuple[KernelRow, ...]
Groups = dict[str, Kernels]

FORWARD = (
    *("attention", "combine", "qk", "softmax", "softmax_guard", "pv", "qk+pv"),
    *("mask", "scale", "dropout", "cast", "copy"),
)
BACKWARD = (
    *("attention_bwd", "bwd_preprocess", "bwd_postprocess", "gemm_bwd", "bwd_init"),
    *(name for name in ROLES if name.endswith("_bwd") or name[:2] in ("dV", "dP", "dK", "dQ")),
)
COMPOSITES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("attention", ("qk", "qk+pv"), FORWARD),
    ("attention_bwd", ("gemm_bwd", "dV", "dV+dP", "dK", "dK+dQ"), BACKWARD),
)
MERGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qk+pv", ("qk", "pv")),
    ("dV+dP", ("dV", "dP")),
    ("dK+dQ", ("dK", "dQ")),
    ("gemm_bwd", ("dV", "dP", "dV+dP", "dK", "dQ", "dK+dQ")),
)
UNFUSED = (
    "the time of a fused kernel is compared with the total time of the unfused kernels in the same "
    "direction"
)
COMBINED = (
    "the time of the attention kernel is compared with the total time of the split-KV kernel and "
    "of the kernel that combines its outputs"
)
FIELDS = (
    *("kernel", "tile", "grid", "block", "registers_per_thread"),
    *("shared_bytes", "static_shared_bytes", "dynamic_shared_bytes", "launches_per_call"),
)
NO_CONFIG = "(no config)"
MAX_CLOCK_RATIO = 1.05
PROFILED = "profiler launches"
MEMORY_THRESHOLD = 0.01
"""The smallest relative change of peak memory that is reported. Peaks are repeatable to the byte,
but the allocator rounds each allocation up to 512 bytes.
"""
REFUSALS = {
    ("ok", "ok"): "same",
    ("refused", "refused"): "same",
    ("ok", "refused"): "refused",
    ("refused", "ok"): "accepted",
}
UNUSABLE: dict[tuple[bool, ...], str] = {
    (True, False): "the machine was busy, so the times of the baseline cannot be used",
    (False, True): "the machine was busy, so the times of the candidate cannot be used",
    (True, True): "the machine was busy, so the times of both sides cannot be used",
}
"""Maps whether the times of each side are unusable to the reason why they cannot be compared."""
SHOWN = 6  # maximum number of configs that an error message lists per side
NEEDS: tuple[Need, ...] = ("kernels", "times", "traced attention calls", "attention calls")
OF_TIMES = ("same", "faster", "slower")
OF_KERNELS = ("changed", "added", "removed", "unknown")
# Maps a cost to the reason why the cost may be missing although both sides have the same cells.
MISSING_COSTS = {
    LAUNCHES: "no config has launches recorded by the same profiler on both sides",
    MEMORY: "no config has a recorded peak memory on both sides (CPU cells have none)",
}


@dataclass(frozen=True, slots=True)
class Side:
    """The baseline or the candidate of a diff."""

    label: str  # RUN or RUN:BACKEND, with the id of the run
    cells: tuple[CellRow, ...] = ()
    kernels: Kernels = ()
    backend: str | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    program: Program | None = None  # the attention calls of the run, or None for a capture
    name: str = ""  # `label` with the name of the run instead of its id


@dataclass(frozen=True, slots=True)
class Change:
    """A property, such as `grid`, that differs between both sides.

    If a role has several kernels on one side, the value of that side is a tuple with one item per
    kernel.
    """

    field: str
    baseline: Any
    candidate: Any


@dataclass(frozen=True, slots=True)
class DiffRow:
    """The comparison of one role of one config. Times are in ns per call."""

    config: Annotated[str, column(meaning="label of the attention problem")]
    backend_baseline: Annotated[str | None, column(meaning="backend of the baseline")]
    backend_candidate: Annotated[str | None, column(meaning="backend of the candidate")]
    role: Annotated[
        str,
        column(
            "role",
            repeat=False,
            meaning="the part of the call that the kernels compute, such as attention, softmax or "
            "dQ. The roles `call` and `status` refer to the whole call, and `kernels` refers to "
            "all its kernels together",
        ),
    ]
    verdict: Annotated[
        Verdict,
        column(
            "verdict",
            importance="answer",
            meaning="`same`, `faster`, `slower`, `changed`, `added`, `removed` or `unknown`",
        ),
    ] = "unknown"
    changed: Annotated[
        bool, column(meaning="whether the kernels, their launch properties or the status differ")
    ] = False
    ratio: Annotated[
        float | None,
        column(meaning="the candidate's time divided by the baseline's time (1 / `speedup`)"),
    ] = None
    baseline_ns: Annotated[float | None, column(meaning="the baseline's time per call")] = None
    candidate_ns: Annotated[float | None, column(meaning="the candidate's time per call")] = None
    basis: Annotated[str | None, column(meaning="the measurement that the times come from")] = None
    composite: Annotated[
        bool,
        column(meaning="whether the times of several kernels of a side are compared as a whole"),
    ] = False
    reasons: Annotated[tuple[str, ...], column(meaning="reasons for the verdict")] = ()
    endings: Annotated[
        tuple[str, ...],
        column(
            meaning="how the call ended on both sides if it did not run on both; unlike in `reasons`, "
            "the reason of a refusal is short"
        ),
    ] = ()
    changes: Annotated[tuple[Change, ...], column(meaning="the properties that differ")] = ()
    baseline: Annotated[tuple[KernelRow, ...], column(meaning="kernels of the baseline")] = ()
    candidate: Annotated[tuple[KernelRow, ...], column(meaning="kernels of the candidate")] = ()
    speedup: Annotated[
        float | None,
        column("speed-up", "ratio", importance="answer", meaning=SPEED_UP),
    ] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "speedup", speed_up_of(self.ratio))

    @property
    def call(self) -> tuple[str, str | None, str | None]:
        """The config and the backends of the compared calls."""
        return self.config, self.backend_baseline, self.backend_candidate

    @property
    def unusable(self) -> str | None:
        """The reason in UNUSABLE why the times cannot be compared, or None."""
        return next((text for text in self.reasons if text in UNUSABLE.values()), None)


@dataclass(frozen=True, slots=True)
class Cost:
    """The comparison of one cost of one config."""

    config: str
    backend_baseline: str | None
    backend_candidate: str | None
    what: str  # one of COSTS
    baseline: float | str  # peak memory in bytes, launches per call, or the status of the cell
    candidate: float | str
    verdict: Literal[
        "same", "more", "less", "refused", "accepted"
    ]  # `accepted` if only the baseline refuses the config
    ratio: float | None = None  # candidate divided by baseline

    @property
    def call(self) -> tuple[str, str | None, str | None]:
        """The config and the backends of the compared calls."""
        return self.config, self.backend_baseline, self.backend_candidate


@dataclass(frozen=True, slots=True)
class StepTime:
    """The average duration of a program's steps, and the time in which the GPU is busy."""

    duration_ns: float
    busy_ns: float
    steps: int
    median_ns: float  # the median duration
    median_busy_ns: float  # the time in which the GPU is busy in the median step
    whole_trace: bool  # whether the trace has no steps, so that the whole trace counts as one step


@dataclass(frozen=True, slots=True)
class PhaseDiff:
    """A phase of a serving engine on both sides. One side may not have the phase."""

    phase: str
    baseline: PhaseRow | None
    candidate: PhaseRow | None

    @property
    def total_ns(self) -> float:
        """The time of all steps of the phase, on the side where it is longer."""
        sides = filter(None, (self.baseline, self.candidate))
        return max(side.mean_ns * side.steps for side in sides)


@dataclass(frozen=True, slots=True)
class Diff:
    """The result of a comparison. The rows follow the order of the configs in the baseline."""

    baseline: str
    candidate: str
    environment: tuple[EnvChange, ...]
    rows: tuple[DiffRow, ...]
    layers: tuple[LayerDiff, ...] = ()  # empty unless both sides are programs
    # Whether both sides recorded their PyTorch version. If not, the environments may have other
    # differences, because a trace records only a small part of its environment.
    environment_told: bool = True
    costs: tuple[Cost, ...] = ()
    baseline_name: str = ""  # `baseline` with the name of the run instead of its id
    candidate_name: str = ""
    # The sides that did not record their PyTorch version, by name.
    environment_unknown: tuple[str, ...] = ()
    steps: tuple[StepTime, ...] = ()  # of both programs; empty unless both recorded steps
    phases: tuple[PhaseDiff, ...] = ()  # empty unless both sides are traces of an engine

    @property
    def names(self) -> tuple[str, str]:
        """The names of both sides."""
        return self.baseline_name or self.baseline, self.candidate_name or self.candidate

    def verdicts(self) -> Counter[str]:
        """Return the number of rows with each verdict."""
        return Counter(row.verdict for row in self.rows)

    def fails(self, on: Set[str]) -> list[DiffRow]:
        """Return the rows whose verdict is in `on`.

        `changed` also matches rows that have another verdict but whose kernels, launch properties
        or status differ.
        """
        return [row for row in self.rows if row.verdict in on or (row.changed and "changed" in on)]

    def failing_costs(self, on: Set[str]) -> list[Cost]:
        """Return the costs in `on` that are higher in the candidate.

        A refusal is higher if only the candidate refuses the config.
        """
        return [row for row in self.costs if row.what in on and row.verdict in ("more", REFUSED)]

    def failing_layers(self, on: Set[str]) -> list[LayerDiff]:
        """Return the layers whose verdict or speed is in `on`.

        BACKEND_CHANGED matches layers that ran on different backends.
        """
        return [
            row
            for row in self.layers
            if row.verdict in on
            or (row.speed in on and row.baseline and row.candidate)
            or (row.backend_changed and BACKEND_CHANGED in on)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the diff as plain dicts, lists and scalars in the schema `profharness.diff/1`.

        Omit `layers`, `costs`, `steps` and `phases` if they are empty. If `environment_told` is
        true, omit both `environment_told` and `environment_unknown`.
        """
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self, enc_hook=str))
        for name in ("layers", "costs", "steps", "phases", "environment_unknown"):
            if not plain[name]:
                del plain[name]
        if self.environment_told:
            del plain["environment_told"]
        return {"schema": SCHEMA, **plain}


@dataclass(frozen=True, slots=True)
class _Cell:
    """A config of one side, with the kernel rows of all profilers."""

    config: str
    backend: str | None
    cell: CellRow | None = None  # None for kernels of a trace
    kernels: Kernels = ()

    def of(self, profiler: str | None) -> Kernels:
        return tuple(row for row in self.kernels if row.profiler == profiler)


def backends_of(store: Store, run: str, sides: tuple[str, str]) -> tuple[str, str]:
    """Return both sides as RUN:BACKEND. Raise UsageError if a side is not a stored backend."""
    stored = store.backends()
    for side in sides:
        if setting_name(side) not in stored:
            raise UsageError(
                f"{side!r} is not a stored backend ({_known(side, stored)}); to compare two backends "
                "of a run, use: profharness diff RUN BACKEND BACKEND [CONFIG]..., with configs such "
                "as 2,8,512,64"
            )
    return f"{run}:{sides[0]}", f"{run}:{sides[1]}"


def find_sides(
    store: Store, baseline: str, candidate: str, configs: Sequence[Config] = ()
) -> tuple[Side, Side]:
    """Return the baseline and the candidate, each given as RUN, RUN:BACKEND or a backend.

    A backend without a run selects the latest run that has all named backends and configs.
    `latest` selects the newest run with kernels. If no run has kernels, `latest` selects the newest
    run with times, or else the newest run with attention calls. Raise NotFoundError if no run
    matches, and UsageError if one side is a part of the other side.
    """
    parts = (text.rpartition(":") for text in (baseline, candidate))
    # The store has the canonical names of sets and orders of backends, such as `flash+math`.
    texts = [f"{run}{colon}{setting_name(backend)}" for run, colon, backend in parts]
    found = _find_parts(store, texts, configs)
    first, second = (_side(store, run, backend, configs) for run, backend in found)
    _require_two_parts(store, found)
    return first, second


def _find_parts(
    store: Store, texts: Sequence[str], configs: Sequence[Config]
) -> list[tuple[str, str | None]]:
    """Return the run of each side, and its backend or None."""
    for need in NEEDS:
        with contextlib.suppress(NotFoundError):
            return _parts_with(store, texts, configs, need)
    return _parts_with(store, texts, configs, "times")  # raises the most helpful error


def _parts_with(
    store: Store, texts: Sequence[str], configs: Sequence[Config], need: Need
) -> list[tuple[str, str | None]]:
    stored = store.backends()
    names = [text for text in dict.fromkeys(texts) if text in stored]
    run = _run_of(store, configs, names, need) if names else None
    parts: list[tuple[str, str | None]] = []
    for text in texts:
        ref, colon, backend = text.partition(":")
        if run is not None and text in names:
            parts.append((run, text))
        elif colon:
            parts.append((store.find_run(Selection(ref, configs, (backend,)), need), backend))
        else:
            try:
                parts.append((store.find_run(Selection(text, configs), need), None))
            except AmbiguousNameError:
                raise
            except UnknownNameError as error:
                # The error of the run comes last, because it may end with a command.
                raise UnknownNameError(
                    f"{text!r} is not a stored backend ({_known(text, stored)}); {error}"
                ) from None
    return parts


def _require_two_parts(store: Store, parts: Sequence[tuple[str, str | None]]) -> None:
    """Raise UsageError if both sides would be the same backend of the same run.

    A side without a backend uses the backend of the other side.
    """
    runs, backends = ({*values} - {None} for values in zip(*parts, strict=True))
    if len(runs) != 1 or len(backends) != 1:
        return
    (run,), (backend,) = runs, backends
    name = store.run_reference(run)
    others = in_usual_order({cell.backend for cell in store.cells(run)} - {backend})
    # If PyTorch chooses the backend, it may choose the same one.
    others.sort(key=pytorch_chooses)
    remedy = "name a second run"
    if others:
        command = shell_command("diff", backend, others[0], name, store=store.path)
        remedy += f", or a second backend to compare with {backend}, for example: {command}"
    raise UsageError(f"both sides are {backend} of run {name}; {remedy}")


def _known(text: str, stored: Sequence[str]) -> str:
    """Return the stored backends with a name like `text`, or all stored backends."""
    return did_you_mean(near_names(text, stored)) or f"stored: {', '.join(stored) or 'none'}"


def _run_of(store: Store, configs: Sequence[Config], names: Sequence[str], need: Need) -> str:
    """Return the latest run that has all these configs on all these backends.

    Raise NotFoundError if no run does. The message suggests runs that have one of the backends.
    """
    try:
        return store.find_run(Selection(None, configs, names), need)
    except NotFoundError as error:
        if len(names) < 2:
            raise
        runs = [store.find_run(Selection(None, configs, [name]), need) for name in names]
        pairs = [f"{run}:{name}" for run, name in zip(runs, names, strict=True)]
        raise NotFoundError(f"{error}; compare {' with '.join(pairs)} instead") from None


def _side(store: Store, run: str, backend: str | None, configs: Sequence[Config]) -> Side:
    # A program may use one kernel for attention and for other ops, such as a product of scores and
    # a linear layer. Its rows are therefore separate for each op.
    kernels, cells = store.rows(Selection(run, configs), by_op=True)
    if store.cells(run):
        kernels = split_passes(store.rows(Selection(run, configs))[0], kernels)
    if backend is not None and backend not in {cell.backend for cell in cells}:
        if store.cells(run):
            store.require_cells(run, configs)
        has = ", ".join(dict.fromkeys(cell.backend for cell in store.cells(run))) or "none"
        of = f" of {', '.join(config.label for config in configs)}" if configs else ""
        raise NotFoundError(
            f"run {store.run_name(run)} has no cell on {backend!r}{of}; the run has {has}"
        )
    # The GPU of a trace is stored as a device, not in the environment.
    gpus = [("gpu", device.name) for device in store.devices(run)[:1] if device.name]
    log = store.engine(run)
    return Side(
        label=_with_backend(run, backend),
        name=_with_backend(store.run_name(run), backend),
        cells=tuple(cells),
        kernels=tuple(kernels),
        backend=backend,
        environment=dict(gpus) | store.environment(run) | (log.environment if log else {}),
        program=find_program(store, run, configs),
    )


def _with_backend(run: str, backend: str | None) -> str:
    return f"{run}:{backend}" if backend else run


def nothing_compared(
    diff: Diff, sides: Iterable[Side], verdicts: Collection[str] = ()
) -> str | None:
    """Return the reason why a diff cannot judge some of these verdicts.

    Return None if the diff can judge all of `verdicts`, or if `verdicts` is empty and the diff can
    judge any verdict. Times and kernels can be judged if both sides have them for the same config
    or layer.
    """
    judged = {cost.what for cost in diff.costs}
    for _, group in groupby(diff.rows, attrgetter("call")):
        rows = list(group)
        status = any(row.role == "status" for row in rows)
        times = any(row.ratio is not None for row in rows)
        kernels = any(row.baseline for row in rows) and any(row.candidate for row in rows)
        judged |= {*OF_TIMES} if status or times else set()
        judged |= {*OF_KERNELS} if status or kernels else {"unknown"} if times else set()
    for layer in diff.layers:
        judged |= _judged_by(layer)
    open_ones = sorted(name for name in verdicts if name not in judged)
    if judged and not open_ones:
        return None
    sides = tuple(sides)
    what = f" for {', '.join(open_ones)}" if judged else ""
    if judged and all(name in MISSING_COSTS for name in open_ones):
        why = "; ".join(MISSING_COSTS[name] for name in open_ones)
    else:
        busy = next((f"{text}; {AGAIN}" for row in diff.rows if (text := row.unusable)), None)
        why = differing_kinds(sides) or busy or _contents(sides)
    return f"nothing to compare{what}: {why}"


def differing_kinds(sides: Sequence[Side]) -> str | None:
    """Return why a trace of a program and a capture of configs cannot be compared.

    Return None if both sides are of the same kind.
    """
    programs = [side for side in sides if side.kernels and not side.cells]
    captures = [side for side in sides if side.cells]
    if not programs or not captures:
        return None
    return (
        f"{programs[0].name or programs[0].label} is the trace of a program, but "
        f"{captures[0].name or captures[0].label} is a capture of configs; compare two traces or "
        "two captures"
    )


def _judged_by(layer: LayerDiff) -> set[str]:
    """Return the verdicts that are possible with the data that both sides have on a layer.

    For example, `faster` is possible only if both sides have times.
    """
    sides = layer.baseline, layer.candidate
    both_ran = all(side and side.ran is not None for side in sides)
    if not all(sides) or not (both_ran or all(side and side.calls is not None for side in sides)):
        return {"added", "removed"}
    times = OF_TIMES if layer.ratio is not None else ()
    return {*OF_KERNELS, *times, *([BACKEND_CHANGED] if both_ran else ())}


def _contents(sides: Sequence[Side]) -> str:
    """Return what each side has, and whether the sides have no config in common."""
    configs = [{cell.config for cell in side.cells} for side in sides]
    if all(configs) and not set.intersection(*configs):
        return "; ".join(["no config in common", *(_content(side, lacks=False) for side in sides)])
    return "; ".join(map(_content, sides))


def _content(side: Side, *, lacks: bool = True) -> str:
    cells = [cell for cell in side.cells if side.backend in (None, cell.backend)]
    rows = [row for row in side.kernels if side.backend in (None, row.backend)]
    labels = dict.fromkeys(
        [cell.config for cell in cells]
        or [row.range or "kernels outside any range" for row in rows]
    )
    if not labels and side.program and not side.program.calls:
        return (
            f"{side.name or side.label} has no kernels or times, because its calls were only counted "
            "and no step was recorded"
        )
    if not labels:
        return f"{side.name or side.label} has no matching cells or kernels"
    missing = [] if rows else ["kernels"]
    missing += [] if any(cell.samples for cell in cells) or not cells else ["times"]
    without = f", without {' and '.join(missing)}" if lacks and missing else ""
    return f"{side.name or side.label} has {join_few(list(labels), SHOWN)}{without}"


def diff_cells(baseline: Side, candidate: Side, *, threshold: float = stats.THRESHOLD) -> Diff:
    """Compare the cells of two sides.

    If a side names a backend, cells are paired by config. If only one side names a backend, that
    backend is used on both sides. If neither side names a backend, cells are paired by config and
    backend. `threshold` is the smallest relative change that is reported.
    """
    if baseline.backend is None or candidate.backend is None:
        backend = baseline.backend or candidate.backend
        baseline, candidate = (replace(side, backend=backend) for side in (baseline, candidate))
    sides = baseline, candidate
    base, cand = map(_cells, sides)
    notes = _other_hardware(sides)
    rows: list[DiffRow] = []
    costs: list[Cost] = []
    # Use lists, because a union of sets would lose the order of the configs.
    for key in [*base, *(key for key in cand if key not in base)]:
        if key in base and key in cand:
            compared = _paired_rows(sides, (base[key], cand[key]), threshold)
            rows += [replace(row, reasons=(*row.reasons, *notes)) for row in compared]
            costs += _costs(base[key], cand[key])
        else:
            rows += _one_sided_rows(base.get(key), cand.get(key))
    before, after = baseline.program, candidate.program
    unknown = [side for side in sides if not side.environment.get("torch")]
    return Diff(
        baseline=baseline.label,
        candidate=candidate.label,
        baseline_name=baseline.name,
        candidate_name=candidate.name,
        environment=tuple(environment_changes(baseline.environment, candidate.environment)),
        rows=tuple(rows),
        layers=diff_layers(before, after, threshold) if before and after else (),
        environment_told=not unknown,
        costs=tuple(costs),
        environment_unknown=tuple(side.name or side.label for side in unknown),
        steps=tuple(map(_step_time, (before.steps, after.steps)))
        if before and after and before.steps and after.steps
        else (),
        phases=_phases(before.phases, after.phases) if before and after else (),
    )


def _phases(before: Sequence[PhaseRow], after: Sequence[PhaseRow]) -> tuple[PhaseDiff, ...]:
    """Pair the phases of two engines by name. The phase that takes the most time comes first.

    Return no phases if a side has none.
    """
    if not before or not after:
        return ()
    left, right = ({row.phase: row for row in rows} for rows in (before, after))
    pairs = (PhaseDiff(name, left.get(name), right.get(name)) for name in left | right)
    return tuple(sorted(pairs, key=lambda pair: -pair.total_ns))


def _step_time(steps: Sequence[StepRow]) -> StepTime:
    middle = middle_steps(steps)
    return StepTime(
        duration_ns=fmean(each.duration_ns for each in steps),
        busy_ns=fmean(each.busy_ns for each in steps),
        steps=len(steps),
        median_ns=fmean(each.duration_ns for each in middle),
        median_busy_ns=fmean(each.busy_ns for each in middle),
        whole_trace=any(each.name == WHOLE_TRACE for each in steps),
    )


def _cells(side: Side) -> dict[tuple[str, str | None], _Cell]:
    """Return the cells of a side in order. The keys (config, backend or None) pair both sides."""
    cells: dict[tuple[str, str | None], _Cell] = {}
    for cell in side.cells:
        if side.backend in (None, cell.backend):
            key = cell.config, None if side.backend else cell.backend
            cells.setdefault(key, _Cell(cell.config, cell.backend, cell))
    for row in side.kernels:
        if side.backend in (None, row.backend):
            config = row.config or row.range or NO_CONFIG
            key = config, None if side.backend else row.backend
            entry = cells.get(key, _Cell(config, row.backend))
            cells[key] = replace(entry, kernels=(*entry.kernels, row))
    return cells


def _costs(base: _Cell, cand: _Cell) -> Iterator[Cost]:
    """Yield comparisons of refusals, peak memory and launches per call if both sides have them."""
    old, new = base.cell, cand.cell
    if old is None or new is None:
        return
    pair = old.config, old.backend, new.backend
    statuses = old.status, new.status
    if statuses in REFUSALS:
        yield Cost(*pair, REFUSED, *statuses, verdict=REFUSALS[statuses])  # type: ignore[arg-type]
    amounts: list[tuple[str, float, float, float]] = []
    if old.peak_memory_bytes and new.peak_memory_bytes:  # not recorded on a CPU
        amounts.append((MEMORY, old.peak_memory_bytes, new.peak_memory_bytes, MEMORY_THRESHOLD))
    profilers = _common_profilers(base, cand)
    kernels = base.of(profilers[0]), cand.of(profilers[1])
    if all(kernels) and profilers[0] == profilers[1]:
        counts = [sum(launches_per_call(row, _calls(rows)) for row in rows) for rows in kernels]
        amounts.append((LAUNCHES, round(counts[0], 2), round(counts[1], 2), 0))
    for what, before, after, threshold in amounts:
        same = not stats.beyond(after / before, threshold) if before else after == before
        verdict: Literal["same", "more", "less"] = (
            "same" if same else "more" if after > before else "less"
        )
        yield Cost(*pair, what, before, after, verdict, after / before if before else None)


def _one_sided_rows(base: _Cell | None, cand: _Cell | None) -> Iterator[DiffRow]:
    here = base or cand
    assert here is not None
    side, other = ("baseline", "candidate") if base else ("candidate", "baseline")
    row = DiffRow(
        config=here.config,
        backend_baseline=base.backend if base else None,
        backend_candidate=cand.backend if cand else None,
        role="call",
        verdict="removed" if base else "added",
        reasons=(f"the {other} does not contain this config",),
    )
    if here.cell:
        yield row
    own = here.of(_common_profilers(here, here)[0])
    for role, kernels in _grouped(own).items():
        values: dict[str, Any] = {side: kernels, f"{side}_ns": _call_ns(kernels, _calls(own))}
        yield replace(row, role=role, basis=PROFILED, **values)


def _paired_rows(
    sides: tuple[Side, Side], cells: tuple[_Cell, _Cell], threshold: float
) -> Iterator[DiffRow]:
    """Yield the rows of a config that both sides have.

    The first row compares the status or the latency of the call. One row per role follows. If a
    side has no kernel rows but `kernel` samples, the last row compares the total time of the
    kernels.
    """
    base, cand = cells
    call = DiffRow(base.config, base.backend, cand.backend, "call")
    doubts = _incomparable(sides, cells)
    busy = False
    if base.cell and cand.cell:
        compared = _status_or_call(call, base.cell, cand.cell, doubts, threshold)
        yield compared
        busy = compared.unusable is not None
    profilers = _common_profilers(base, cand)
    kernels = base.of(profilers[0]), cand.of(profilers[1])
    if all(profilers) and profilers[0] != profilers[1]:
        text = f"the times come from different profilers ({profilers[0]}, {profilers[1]})"
        doubts = (*doubts, text)
    of_roles = doubts
    if busy and (reason := _busy_ops(cells, kernels)):
        of_roles = (*doubts, reason)
    yield from _role_rows(call, cells, kernels, of_roles, threshold)
    # Kernel rows may be missing because the trace was deleted.
    if (busy or not all(kernels)) and base.cell and cand.cell:
        samples = usable_times(base.cell).samples, usable_times(cand.cell).samples
        if all(each.get(KERNEL) for each in samples):
            row = replace(call, role="kernels")
            yield _timed_row(row, KERNEL, *samples, doubts, threshold)


def _busy_ops(cells: tuple[_Cell, _Cell], kernels: tuple[Kernels, Kernels]) -> str | None:
    """Return why the times of ops cannot be compared, or None if the CPU did not disturb them."""
    busy = tuple(
        each.cell is not None and is_disturbed(rows, each.cell)
        for each, rows in zip(cells, kernels, strict=True)
    )
    return UNUSABLE.get(busy)


def _role_rows(
    call: DiffRow,
    cells: tuple[_Cell, _Cell],
    kernels: tuple[Kernels, Kernels],
    doubts: tuple[str, ...],
    threshold: float,
) -> Iterator[DiffRow]:
    calls = _calls(kernels[0]), _calls(kernels[1])
    allowance = stats.process_allowance(
        *(_process_times(*side) for side in zip(cells, kernels, calls, strict=True))
    )
    unseen = _why_unknown(cells[0], kernels[0], "baseline") or _why_unknown(
        cells[1], kernels[1], "candidate"
    )
    left, right, composite = _aligned(*map(_grouped, kernels))
    # Sorted, because a set has no order. Roles with equal rank are sorted by name.
    for role in sorted({*left, *right}, key=lambda name: (role_order(name), name)):
        old, new = left.get(role, ()), right.get(role, ())
        times = _call_ns(old, calls[0]), _call_ns(new, calls[1])
        differing = _changes(old, new) if old and new else ()
        verdict: Verdict
        reasons: tuple[str, ...]
        if not old or not new:
            here, verdict = ("baseline", "removed") if old else ("candidate", "added")
            reasons = (f"this kernel runs only in the {here}",)
        elif doubts:
            verdict, reasons = "changed" if differing else "unknown", doubts
        else:
            verdict, reason = _speed(old, new, calls, threshold, allowance)
            verdict = "changed" if differing and verdict in ("same", "unknown") else verdict
            reasons = (reason,)
        if unseen is not None:
            verdict, reasons = "unknown", (unseen,)
        if role in composite:
            reasons = (composite[role], *reasons)
        yield replace(
            call,
            role=role,
            baseline=old,
            candidate=new,
            ratio=times[1] / times[0] if times[0] and times[1] and not doubts else None,
            verdict=verdict,
            reasons=reasons,
            changes=differing,
            changed=bool(differing),
            composite=role in composite,
            baseline_ns=times[0],
            candidate_ns=times[1],
            basis=PROFILED,
        )


def _process_times(side: _Cell, kernels: Kernels, calls: int) -> list[float]:
    """Return the total time of the kernels of a call, in ns, for each process that measured it."""
    traced = _call_ns(kernels, calls)
    samples = side.cell.samples.get(KERNEL, ()) if side.cell else ()
    if not traced:
        return []
    medians = stats.process_medians(samples)
    # Runs of older versions have no samples of the first process. Use the time in its trace.
    return medians if stats.of_first_process(samples) else [traced, *medians]


def _why_unknown(side: _Cell, kernels: Kernels, name: str) -> str | None:
    """Return why the kernels of a side are unknown.

    Return None if they are known, or if there are none because the backend refused the config.
    """
    if kernels or side.cell is None or side.cell.status == "refused":
        return None
    if side.cell.status == "ok":
        return f"no profiler recorded the kernels of the {name}"
    return f"the {name} has no kernels, because its cell has the status {side.cell.status}"


def _calls(rows: Kernels) -> int:
    """Estimate the number of calls by assuming that the rarest kernel runs once per call."""
    return min((row.launches for row in rows), default=1) or 1


def _incomparable(sides: tuple[Side, Side], cells: tuple[_Cell, _Cell]) -> tuple[str, ...]:
    """Return the reasons why the times of two cells cannot be compared."""
    base, cand = (side.environment for side in sides)
    if difference := _difference(base, cand, "device_type"):
        return (f"the kinds of device differ {difference}",)
    clocks = [each.cell.clocks.get("sm_mhz", 0) if each.cell else 0 for each in cells]
    other_gpu = _difference(base, cand, "gpu")  # its clocks may differ
    if all(clocks) and max(clocks) / min(clocks) > MAX_CLOCK_RATIO and not other_gpu:
        return (f"the SM clocks differ by more than 5 % ({clocks[0]:g} and {clocks[1]:g} MHz)",)
    return ()


def _other_hardware(sides: tuple[Side, Side]) -> tuple[str, ...]:
    """Return a note if both sides ran on different GPUs or CPUs, which can explain their times."""
    base, cand = (side.environment for side in sides)
    # On a CPU, the `gpu` key does not show which CPU it was.
    key, what = ("cpu", "CPUs") if base.get("device_type") == CPU else ("gpu", "GPUs")
    if not _difference(base, cand, key):
        return ()
    names = short_device_names(str(each[key]) for each in (base, cand))
    return (f"the {what} differ ({' and '.join(names.values())})",)


def _difference(base: Mapping[str, Any], cand: Mapping[str, Any], key: str) -> str | None:
    """Return both values of a key as `(A and B)`, or None if they are equal or unknown."""
    values = base.get(key), cand.get(key)
    return None if None in values or values[0] == values[1] else f"({values[0]} and {values[1]})"


def _status_or_call(
    row: DiffRow,
    baseline: CellRow,
    candidate: CellRow,
    doubts: tuple[str, ...],
    threshold: float,
) -> DiffRow:
    """Compare the latency of two cells that ran, or else their statuses and refusal codes.

    If only one cell ran, the row has its time. Times that `bench` cannot use do not count.
    """
    recorded = baseline, candidate
    cells = baseline, candidate = usable_times(baseline), usable_times(candidate)
    if not baseline.status == candidate.status == "ok":
        statuses, codes = [cell.status for cell in cells], list(map(_codes, cells))
        differing = [Change("status", *statuses)] if statuses[0] != statuses[1] else []
        differing += [Change("refusals", *codes)] if codes[0] != codes[1] else []
        endings, reasons = (
            tuple(
                f"{side}: {_ending(cell, full=full)}"
                for side, cell in zip(("baseline", "candidate"), cells, strict=True)
            )
            for full in (False, True)
        )
        ran = [cell for cell in cells if cell.status == "ok"]
        basis = _call_measurement(ran) if ran else None
        times = [
            stats.summarize(cell.samples[basis]).median if basis and cell in ran else None
            for cell in cells
        ]
        return replace(
            row,
            role="status",
            baseline_ns=times[0],
            candidate_ns=times[1],
            basis=basis,
            verdict="changed" if differing else "same",
            reasons=reasons,
            endings=endings,
            changes=tuple(differing),
            changed=bool(differing),
        )
    differing = [
        Change(name, *values)
        for name in ("sdpa_op", "choice", "peak_memory_bytes")
        if None not in (values := [getattr(cell, name) for cell in cells])
        and values[0] != values[1]
    ]
    row = replace(row, changes=tuple(differing))
    basis = _call_measurement(cells)
    if basis is None and (shared := _call_measurement(recorded)):
        unusable = tuple(not cell.samples.get(shared) for cell in cells)
        return replace(row, reasons=(*doubts, UNUSABLE[unusable]))
    if basis is None:
        return replace(
            row, reasons=(*doubts, "the two sides share no measurement made without a profiler")
        )
    timed = _timed_row(row, basis, baseline.samples, candidate.samples, doubts, threshold)
    # Add the warnings about clocks and parallel lanes that apply to one side only.
    texts = [(*clock_doubts(cell.clocks), *host_doubts(cell, basis)) for cell in cells]
    own = [f"baseline: {text}" for text in texts[0] if text not in texts[1]]
    own += [f"candidate: {text}" for text in texts[1] if text not in texts[0]]
    return replace(timed, reasons=(*timed.reasons, *own))


def _call_measurement(cells: Sequence[CellRow]) -> str | None:
    """Return the first measurement of whole calls that all cells have, or None."""
    return shared_measurement([cell.samples.get for cell in cells], CALL_MEASUREMENTS)


def _timed_row(
    row: DiffRow,
    basis: str,
    baseline: Mapping[str, Sequence[int]],
    candidate: Mapping[str, Sequence[int]],
    doubts: tuple[str, ...],
    threshold: float,
) -> DiffRow:
    base, cand = baseline[basis], candidate[basis]
    compared = stats.compare(base, cand, threshold=threshold)
    how = ""
    if compared.ratio and compared.verdict in ("slower", "faster"):
        how = f"the candidate {compared_text(1 / compared.ratio)}; "
    return replace(
        row,
        ratio=None if doubts else compared.ratio,
        verdict="unknown" if doubts else compared.verdict,
        reasons=doubts or (f"{how}{compared.reason}",),
        baseline_ns=stats.summarize(base).median,
        candidate_ns=stats.summarize(cand).median,
        basis=basis,
    )


def _codes(cell: CellRow) -> tuple[str, ...]:
    # Sorted, because a different order of the same codes is not a difference.
    return tuple(sorted({refusal.code for refusal in cell.refusals}))


def _ending(cell: CellRow, *, full: bool) -> str:
    """Return how a call ended. If `full` is set, include the codes and messages of a refusal."""
    codes = f" [{', '.join(_codes(cell))}]" if full and cell.refusals else ""
    reason = f": {cell_reason(cell, full=full)}" if cell.reason else ""
    return f"{cell.status}{codes}{reason}"


def _grouped(rows: Kernels) -> Groups:
    groups = by_role(rows)
    return {name: tuple(groups[name]) for name in sorted(groups, key=role_order)}


def _aligned(baseline: Groups, candidate: Groups) -> tuple[Groups, Groups, dict[str, str]]:
    """Merge roles so that both sides can be compared.

    If one side has a fused kernel and the other has math's kernels, merge all kernels of a
    direction (forward or backward) into one composite role. If only one side combines the partial
    outputs of split keys, merge the attention kernel and the combine kernel, because only together
    do they compute attention. If the kernel names of one side do not distinguish two matrix
    products, merge these products on both sides. Return both sides, and for each composite role
    the reason why its kernels are compared as a whole.
    """
    composite: dict[str, str] = {}
    for name, math, whole in COMPOSITES:
        fused = [name in side for side in (baseline, candidate)]
        maths = [any(part in side for part in math) for side in (baseline, candidate)]
        if (fused[0] and maths[1]) or (fused[1] and maths[0]):
            baseline, candidate = _merged(baseline, name, whole), _merged(candidate, name, whole)
            composite[name] = UNFUSED
    in_both = "attention" in baseline and "attention" in candidate
    if in_both and ("combine" in baseline) != ("combine" in candidate):
        both = ("attention", "combine")
        baseline, candidate = (_merged(side, "attention", both) for side in (baseline, candidate))
        composite["attention"] = COMBINED
    for name, parts in MERGES:
        if name in baseline or name in candidate:
            baseline = _merged(baseline, name, (name, *parts))
            candidate = _merged(candidate, name, (name, *parts))
    return baseline, candidate, composite


def _merged(groups: Groups, name: str, parts: Sequence[str]) -> Groups:
    rows = [row for part in groups if part in parts for row in groups[part]]
    rest = {part: group for part, group in groups.items() if part not in parts}
    return rest | {name: tuple(sorted(rows, key=lambda row: row.first_ns))} if rows else rest


def _common_profilers(baseline: _Cell, candidate: _Cell) -> list[str | None]:
    """Return for each side the profiler whose kernel rows are compared.

    Use the same profiler if both sides have a profiler in common. Otherwise, use the first profiler
    in LAUNCH_PROFILERS that recorded the side.
    """
    base, cand = ({row.profiler for row in side.kernels} for side in (baseline, candidate))
    return [
        # Names decide between profilers of equal rank, because sets have no order.
        min(
            (base & cand) or own,
            key=lambda name: (
                LAUNCH_PROFILERS.index(name) if name in LAUNCH_PROFILERS else len(LAUNCH_PROFILERS),
                name,
            ),
            default=None,
        )
        for own in (base, cand)
    ]


def _changes(baseline: Kernels, candidate: Kernels) -> tuple[Change, ...]:
    """Return the properties in FIELDS that differ. An unknown value does not count as different."""
    sides = [[_properties(row) for row in rows] for rows in (baseline, candidate)]
    if Counter(sides[0]) == Counter(sides[1]):
        return ()
    differing = []
    for place, name in enumerate(FIELDS):
        base, cand = (tuple(row[place] for row in rows) for rows in sides)
        if len(base) == len(cand):
            pairs = zip(base, cand, strict=True)
            differs = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        else:
            differs = any(value is not None for value in base + cand)
        if differs:
            values = (side[0] if len(side) == 1 else side for side in (base, cand))
            differing.append(Change(name, *values))
    return tuple(differing)


def _properties(row: KernelRow) -> tuple[Any, ...]:
    tile = parse_kernel_name(row.kernel, row.kernel_kind).tile
    return tuple(tile if name == "tile" else getattr(row, name) for name in FIELDS)


def _call_ns(rows: Kernels, calls: int, time: str = "duration_ns") -> float | None:
    """Return the total time of the kernels of one call.

    Multiply the time of a launch by the launches per call, and sum over the rows. `time` names the
    field with the time of a launch, by default the median. Return None if there are no rows or a
    time is missing.
    """
    times = [getattr(row, time) for row in rows]
    if not rows or None in times:
        return None
    parts = (ns * launches_per_call(row, calls) for ns, row in zip(times, rows, strict=True))
    return float(sum(parts))


def _speed(
    baseline: Kernels,
    candidate: Kernels,
    calls: tuple[int, int],
    threshold: float,
    allowance: float | None = None,
) -> tuple[Verdict, str]:
    """Compare the medians and ranges of the launches, and return the verdict and its reason.

    The verdict is `same`, `faster`, `slower` or `unknown`. `allowance` is the ratio (1 or more) by
    which the times of two processes may differ although they run the same code, or None if it is
    unknown.
    """
    times = _call_ns(baseline, calls[0]), _call_ns(candidate, calls[1])
    old, new = times
    if baseline == candidate:
        return "same", "both sides contain the same launches"
    if not old or not new:
        return "unknown", "no times are recorded for the kernels of one side"
    ratio = new / old
    launches = [min(row.launches for row in rows) for rows in (baseline, candidate)]
    medians = f"the medians of {launches[0]} and {launches[1]} profiled launches"
    if min(launches) < MIN_LAUNCHES:
        # Without figures, so that a note can name all roles with this reason.
        text = f"there are too few launches to compare (at least {MIN_LAUNCHES} are needed)"
        return "unknown", text
    if old == new:
        return "same", f"{medians} are equal"
    if not stats.beyond(ratio, threshold):
        return "same", f"{medians} differ by no more than the {threshold * 100:g} % threshold"
    if abs(new - old) <= RESOLUTION_NS * max(len(baseline), len(candidate)):
        return "same", f"{medians} differ by no more than the clock's resolution"
    ranges = [
        [_call_ns(rows, number, end) or 0.0 for end in ("min_ns", "max_ns")]
        for rows, number in zip((baseline, candidate), calls, strict=True)
    ]
    if any(low <= other <= high for (low, high), other in zip(ranges, (new, old), strict=True)):
        return "unknown", f"{medians} differ, but the ranges of single launches overlap"
    if allowance is not None and max(ratio, 1 / ratio) <= allowance:
        alike = f"the times of processes that run the same code (up to {ratio_text(allowance)})"
        return "unknown", f"{medians} differ, but by no more than {alike}"
    reason = (
        f"the candidate {compared_text(1 / ratio)}; {medians} each lie outside the range of the other "
        "side"
    )
    return "slower" if ratio > 1 else "faster", reason
