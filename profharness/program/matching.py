"""Match the layers of several programs by their attention calls, and compare two programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from typing import Annotated, Any

from profharness import stats
from profharness.attention.config import Config, parse_config, without_strides
from profharness.attention.costs import compulsory_bytes, flops
from profharness.columns import SPEED_UP, column
from profharness.devices import Peaks, roofline_ns, short_device_names
from profharness.errors import counted
from profharness.measurements.agreement import AMD_LIBRARIES, backend_text
from profharness.program.changes import MIN_LAUNCHES, RESOLUTION_NS, Verdict
from profharness.program.layer_map import (
    NUMBER,
    LayerRow,
    actual_backend,
    calls_in_steps,
    join_numbered,
    library_of,
    module_name,
    module_names,
    points_of,
    short_module,
)
from profharness.program.observed_calls import ObservedCalls
from profharness.program.phases import (
    PhaseRow,
    Place,
    find_phases,
    phase_of,
    step_phases,
    step_place,
    steps_by_phase,
)
from profharness.rows import UNTRACED, CallRow, StepRow
from profharness.store import Store
from profharness.units import compared as compared_text
from profharness.units import speed_up_of

# Modules that wrap a model, as torch.compile and DistributedDataParallel do. Such modules are not
# layers of the model.
WRAPPER = re.compile(r"(^|\.)(_orig_mod|OptimizedModule_\d+|DistributedDataParallel_\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Program:
    """The attention calls of a program and the steps that contain them."""

    calls: tuple[CallRow, ...]  # the calls in traces
    steps: tuple[StepRow, ...] = ()
    device: str | None = None  # name of the program's GPU, if known
    # one representative call for each observed kind of which some calls are in no trace
    untraced: tuple[CallRow, ...] = ()
    observed: ObservedCalls = field(default_factory=lambda: ObservedCalls((), ()))
    phases: tuple[PhaseRow, ...] = ()
    step_phases: Mapping[Place, str] = field(default_factory=dict)
    step_phase: str | None = None  # the phase of all steps, in a part of a program with phases
    peaks: Peaks | None = None  # the limits of the program's GPU, if known


FORWARD_TIME, CALL_TIME = "median forward µs/call", "median µs/call"
"""Titles of columns with the times of calls: of forward passes, and of the passes that are compared."""


@dataclass(frozen=True, slots=True)
class LayerSide:
    """Equal calls of equal layers in one program, represented by the call of median length."""

    module: str | None  # name of the module; equal layers are merged, as in `layers.{0-11}.attn`
    config: str | None
    calls: Annotated[
        float | None,
        column(
            "calls/step",
            importance="detail",
            right=True,
            meaning="calls per step; null if no step was recorded",
        ),
    ]
    phase: str | None
    mode: str
    ran: Annotated[
        str | None,
        column("ran", importance="answer", meaning="the backend that computed the calls"),
    ]
    sdpa_op: str | None
    forward_ns: Annotated[
        float | None,
        column(FORWARD_TIME, "time", scale="call", meaning="median kernel time of one call"),
    ]
    backward_ns: Annotated[float | None, column("median backward µs/call", "time", scale="call")]
    # Only the observer records the following values.
    asked: Annotated[
        str | None,
        column("requested", importance="detail", meaning="backends that the program allowed"),
    ] = None
    choice: str | None = None
    mask: str | None = None
    program_calls: Annotated[
        int | None,
        column(
            "calls in all", importance="detail", right=True, meaning="calls in the whole program"
        ),
    ] = None
    # The configs to time instead of the calls, each with the number of calls that it represents.
    # This is a number per step, or for the whole program if no step was recorded. The tuple is
    # empty if no config replays the calls.
    points: tuple[tuple[str, float], ...] = ()
    kernels: Annotated[
        tuple[str, ...],
        column("kernels", "names", meaning="forward kernels of one call, the longest first"),
    ] = ()
    roofline_share: Annotated[
        float | None,
        column(
            "% of roofline",
            "percent",
            importance="detail",
            right=True,
            meaning="shortest time that the GPU's peak rates allow for the compared passes (`basis`), "
            "divided by their actual time",
        ),
    ] = None
    # The sum of the kernel times of all calls, per step. It is not the median time of a call times
    # the number of calls if calls differ.
    forward_step_ns: float | None = None
    backward_step_ns: float | None = None
    library: str | None = None  # the AMD library whose kernels computed the backend
    # the sizes of query, key, value and mask if no config describes them
    dims: tuple[tuple[int, ...] | None, ...] = ()
    # The phase of the steps that the values per step refer to. None if the programs are not compared
    # by phase, so that the values are means over all steps.
    step_phase: str | None = None

    @property
    def sized(self) -> bool:
        """Whether the sizes of the calls are known."""
        return self.config is not None or any(self.dims)


def told_ratio(of_sums: float, of_calls: float | None) -> float:
    """Return the ratio of the times of a step that an answer gives.

    A table shows the ratio of the median calls of each layer. If there is only one layer, the
    answer gives the same ratio `of_calls`, unless the sums differ, for example because of one slow
    call.
    """
    if of_calls is None or stats.beyond(of_sums / of_calls, stats.THRESHOLD):
        return of_sums
    return of_calls


def ran_text(call: LayerRow | LayerSide) -> str | None:
    """Return the backend that ran, as tables show it.

    If an AMD library computed one of PyTorch's backends, both are named: `flash (AOTriton)`.
    """
    if not call.ran:
        return None
    # A backend that is the library itself, such as `ck`, is named once.
    library = call.library if AMD_LIBRARIES.keys().isdisjoint(call.ran.split(" and ")) else None
    return f"{backend_text(call.ran)}{f' ({library})' if library else ''}"


@dataclass(frozen=True, slots=True)
class MatchedLayers:
    """Equal layers of several programs. The side of a program without these layers is None."""

    direction: str
    sides: tuple[LayerSide | None, ...]
    call_ns: tuple[float | None, ...]  # median time of the kernels of one call; None if unknown
    basis: str | None  # what `call_ns` includes: `forward` or `forward and backward`
    # the differences between each program and the first program that has the layers
    reasons: tuple[tuple[str, ...], ...]

    @property
    def first(self) -> LayerSide:
        """The first side that is not None."""
        return next(filter(None, self.sides))

    @property
    def phase(self) -> str | None:
        """The phase, or the direction of recomputed calls."""
        return _phase(self.sides, self.direction)


@dataclass(frozen=True, slots=True)
class LayerDiff:
    """Equal layers of the baseline and the candidate. A side without these layers is None."""

    direction: str
    baseline: LayerSide | None = None
    candidate: LayerSide | None = None
    ratio: Annotated[
        float | None,
        column(meaning="the candidate's time divided by the baseline's time (1 / `speedup`)"),
    ] = None
    basis: str | None = None  # what the ratio compares: `forward` or `forward and backward`
    verdict: Annotated[
        Verdict,
        column(
            "verdict",
            importance="answer",
            meaning="`changed` if a different backend or mode ran, otherwise the same as `speed`",
        ),
    ] = "unknown"
    speed: Verdict = "unknown"  # the verdict if only times are compared
    changed: bool = False
    backend_changed: bool = False  # whether both backends are known and differ
    reasons: tuple[str, ...] = ()
    speedup: Annotated[
        float | None, column("speed-up", "ratio", importance="answer", meaning=SPEED_UP)
    ] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "speedup", speed_up_of(self.ratio))

    @property
    def sides(self) -> tuple[LayerSide | None, LayerSide | None]:
        """The baseline and the candidate."""
        return self.baseline, self.candidate

    @property
    def first(self) -> LayerSide:
        """The first side that is not None."""
        return next(filter(None, self.sides))

    @property
    def phase(self) -> str | None:
        """The phase, or the direction of recomputed calls."""
        return _phase(self.sides, self.direction)

    @property
    def name(self) -> Annotated[str, column("module", shrink=True)]:
        """The module of the layers. If it is unknown, the config, kernel or op of their calls."""
        return _name(self.sides, full=True)


_Rows = Sequence[LayerDiff | MatchedLayers]


def layer_names(rows: _Rows, *, full: bool, with_config: bool = False) -> list[str]:
    """Return a name for each row, which differs from the names of all other rows of its phase.

    The name is the module. If it is unknown, the name is the config, kernel or op. Rows with the
    same name also get their config, sizes, kernel or mode, or else a number. Modules are shortened
    unless `full` is set. If `with_config` is set, configs distinguish rows too, because a table
    shows them next to the names.
    """
    names = [_name(row.sides, full=full) for row in rows]

    def key(at: int) -> Hashable:
        return names[at], rows[at].phase, rows[at].first.config if with_config else None

    for detail in _DETAILS:
        alike: dict[Hashable, list[int]] = {}
        for at in range(len(rows)):
            alike.setdefault(key(at), []).append(at)
        for group in alike.values():
            texts = [detail(rows[at].first) for at in group]
            if len(set(texts)) > 1:
                for at, text in zip(group, texts, strict=True):
                    names[at] += f" ({text})" if text else ""
    counts = Counter(map(key, range(len(rows))))
    numbers: Counter[Hashable] = Counter()
    for at in range(len(rows)):
        this = key(at)
        numbers[this] += 1
        names[at] += f" #{numbers[this]}" if counts[this] > 1 else ""
    return names


def phases_distinguish(rows: _Rows, names: Sequence[str]) -> bool:
    """Return whether rows have the same name and different phases, or are recomputed."""
    phases = {(name, row.phase) for name, row in zip(names, rows, strict=True)}
    return len(phases) > len(set(names)) or any(row.direction != "forward" for row in rows)


def layer_labels(rows: _Rows, *, full: bool, with_config: bool = False) -> list[str]:
    """Return the names of rows, with their phases where these distinguish rows."""
    names = layer_names(rows, full=full, with_config=with_config)
    phases: dict[str, set[str | None]] = {}
    for name, row in zip(names, rows, strict=True):
        phases.setdefault(name, set()).add(row.phase)
    return [
        f"{name} ({row.phase})" if row.direction != "forward" or len(phases[name]) > 1 else name
        for name, row in zip(names, rows, strict=True)
    ]


def _phase(sides: Sequence[LayerSide | None], direction: str) -> str | None:
    phases = (side.phase for side in sides if side)
    return next(filter(None, phases), None) if direction == "forward" else direction


def _name(sides: Sequence[LayerSide | None], *, full: bool) -> str:
    present = [side for side in sides if side]
    if module := next((side.module for side in present if side.module), None):
        return module if full else str(short_module(module))
    if config := next((side.config for side in present if side.config), None):
        return config if full else without_strides(config)
    names = chain.from_iterable((*side.kernels[:1], side.sdpa_op) for side in present)
    return next(filter(None, names), "a call")


_DETAILS: tuple[Callable[[LayerSide], str | None], ...] = (
    lambda side: side.config or next(("x".join(map(str, own)) for own in side.dims if own), None),
    lambda side: next(iter(side.kernels), None),
    lambda side: side.mode,
)
"""Functions that return what can distinguish layers with the same name."""


def opposite_layer(
    layers: Iterable[tuple[str, float | None, float]], ratio: float
) -> tuple[str, float] | None:
    """Return the layer that differs most in the other direction than all layers together.

    `layers` are (name, ratio of the times of a call, difference between the times of a step), and
    `ratio` is the ratio of all layers. Return (name, ratio), or None if there is no such layer.
    """
    others = [
        (abs(step_ns), name, own)
        for name, own, step_ns in layers
        if own and (own > 1) != (ratio > 1) and stats.beyond(own, stats.THRESHOLD)
    ]
    return max(others)[1:] if others else None


@dataclass(frozen=True, slots=True)
class _Site:
    """The calls of one layer that have the same shape and direction."""

    name: str | None  # name of the module without wrappers; None if unknown
    number: int  # position among the sites of the same shape if the module is unknown, else 0
    shape: Hashable
    core: Hashable  # None if the sizes are unknown
    direction: str
    dotted: bool  # whether the name is a module path instead of class names
    calls: tuple[CallRow, ...] = ()
    calls_per_step: float = 0

    @property
    def place(self) -> Hashable:
        """The name, or the position if only the sizes are known. None if neither is known."""
        return self.name or (None if self.core is None else self.number)

    @property
    def pattern(self) -> str | None:
        return NUMBER.sub("{}", self.name) if self.name else None

    @property
    def tail(self) -> str | None:
        return self.pattern.rpartition(".")[2] if self.pattern else None


SIDES = ("baseline", "candidate")
# fields of LayerSide that only the observer records
RECORDED = ("asked", "choice", "mask")
_NAMES, _SIZES = {"place", "name", "pattern", "tail"}, {"shape", "core"}  # the fields in _KEYS
_Pair = tuple[list[_Site], list[_Site]]
_Group = tuple[str, list[list[CallRow]]]  # a direction, and the calls of each program

# Two sites are paired if the fields of one of these keys are equal. The strictest key comes first.
# The less strict keys pair layers that only one program compiles, and layers with different masks or
# different numbers of key-value heads. The keys without a name apply if the names of the two
# programs cannot be compared, and the keys without sizes if one program does not record the sizes.
_KEYS = (
    ("place", "shape"),
    ("pattern", "shape"),
    ("place", "core"),
    ("pattern", "core"),
    ("tail", "core"),
    ("core",),
    ("name",),
    ("pattern",),
    ("tail",),
    (),
)


def find_program(store: Store, run: str, configs: Sequence[Config] = ()) -> Program | None:
    """Return the program of a run, or None if the run has cells or no calls.

    If `configs` is not empty, keep only calls with these configs.
    """
    if store.cells(run):
        return None
    calls = store.calls(run)
    steps = store.steps(run) if calls else []
    observed = ObservedCalls(store.templates(run), calls)
    calls = calls_in_steps(calls, steps)
    of_steps = step_phases(steps, calls)
    untraced = observed.untraced()
    if configs:
        labels = {call.config for call in (*calls, *untraced) if call.config}
        selected = {
            label for label in labels if any(c.matches(parse_config(label)) for c in configs)
        }
        calls, untraced = (
            [call for call in made if call.config in selected] for made in (calls, untraced)
        )
    if not calls and not untraced:
        return None
    devices = store.devices(run)
    device = (devices[0].name or "a GPU without a name") if devices else None
    peaks = store.peaks(run)
    return Program(
        calls=tuple(calls),
        steps=tuple(steps) if calls else (),
        device=device,
        untraced=tuple(untraced),
        observed=observed,
        phases=find_phases(steps, calls, of_steps, peaks),
        step_phases=of_steps if calls else {},
        peaks=peaks,
    )


def diff_layers(baseline: Program, candidate: Program, threshold: float) -> tuple[LayerDiff, ...]:
    """Return one row per group of equal layers.

    A layer counts as faster or slower if the relative change of its time exceeds `threshold`.
    """
    doubt, note = _doubt(baseline, candidate), _other_gpu(baseline, candidate)
    return tuple(
        chain.from_iterable(
            _diff_part(one, other, doubt, note, threshold)
            for one, other in _parts((baseline, candidate))
        )
    )


def _diff_part(
    baseline: Program, candidate: Program, doubt: str | None, note: str | None, threshold: float
) -> Iterator[LayerDiff]:
    groups = _equal_layers((baseline, candidate))

    def order(group: _Group) -> tuple[bool, bool, int, int]:
        _, (left, right) = group
        first = (left or right)[0]
        return not left, not right, first.trace, first.call

    groups.sort(key=order)
    for direction, (left, right) in groups:
        if left and right:
            both_ways = _have_backward((left, right))
            sides = (
                _side(baseline, left, both_ways=both_ways),
                _side(candidate, right, both_ways=both_ways),
            )
            yield _diff(direction, sides, (left, right), doubt, note, threshold)
        elif left:
            side = _side(baseline, left, both_ways=_have_backward((left,)))
            why = (_why_unmatched(side, "candidate", candidate),)
            yield LayerDiff(direction, baseline=side, verdict="removed", reasons=why)
        else:
            side = _side(candidate, right, both_ways=_have_backward((right,)))
            why = (_why_unmatched(side, "baseline", baseline),)
            yield LayerDiff(direction, candidate=side, verdict="added", reasons=why)


def _parts(programs: Sequence[Program]) -> list[Sequence[Program]]:
    """Divide programs by phase, because only steps of the same phase can be compared.

    The programs are one part if one of them has no phases, or no calls in traces.
    """
    if not all(program.step_phases for program in programs):
        return [programs]
    groups = [steps_by_phase(program.steps, program.step_phases) for program in programs]
    phases = dict.fromkeys(chain.from_iterable(groups))
    return [[_part(program, phase) for program in programs] for phase in phases]


def _part(program: Program, phase: str | None) -> Program:
    """Return the part of a program that consists of the steps of a phase."""
    of_steps = program.step_phases
    return replace(
        program,
        calls=tuple(c for c in program.calls if of_steps.get((c.trace, c.step)) == phase),
        steps=tuple(s for s in program.steps if of_steps.get(step_place(s)) == phase),
        untraced=(),
        step_phase=phase,
    )


def _why_unmatched(side: LayerSide, name: str, other: Program) -> str:
    """Return why the program `other`, which is called `name`, has no layer that matches a side."""
    if side.step_phase and not other.steps:
        return f"the {name} has no {side.step_phase} steps"
    return f"the {name} has no matching layer{' with the same size' if side.sized else ''}"


def match_layers(programs: Sequence[Program]) -> tuple[MatchedLayers, ...]:
    """Return one row per group of equal layers, starting with the layers of the first program."""
    return tuple(chain.from_iterable(map(_match_part, _parts(programs))))


def _match_part(programs: Sequence[Program]) -> Iterator[MatchedLayers]:
    for direction, calls in _equal_layers(programs):
        both_ways = _have_backward(calls)
        sides = [
            _side(program, own, both_ways=both_ways) if own else None
            for program, own in zip(programs, calls, strict=True)
        ]
        present = [side for side in sides if side is not None]
        timed = [side for side in present if side.forward_ns is not None]
        samples = [_samples(own, both_ways=both_ways) for own in calls]
        yield MatchedLayers(
            direction=direction,
            sides=tuple(sides),
            call_ns=tuple(median(own) if own else None for own in samples),
            basis=("forward and backward" if both_ways else "forward") if timed else None,
            reasons=tuple(
                tuple(_differences(present[0], side)) if side not in (None, present[0]) else ()
                for side in sides
            ),
        )


def _equal_layers(programs: Sequence[Program]) -> list[_Group]:
    """Return the groups of equal layers, starting with the layers of the first program."""
    # If a program has no calls in traces, include the untraced calls of all programs.
    whole = not all(program.calls for program in programs)
    layers: list[list[list[_Site]]] = []  # the sites of each layer, by program
    for place, program in enumerate(programs):
        heads = [next(filter(None, layer))[0] for layer in layers]
        owners = {id(head): layer for head, layer in zip(heads, layers, strict=True)}
        pairs, added = _paired(heads, _sites(program, whole))
        for left, right in pairs:
            kept, *rest = (owners[id(head)] for head in left)
            for layer in rest:  # layers that names cannot distinguish become one row
                kept[:] = [[*sites, *more] for sites, more in zip(kept, layer, strict=True)]
            layers = [layer for layer in layers if not any(layer is other for other in rest)]
            kept[place] += right
        layers += [[[site] if at == place else [] for at in range(len(programs))] for site in added]
    groups: dict[Hashable, _Group] = {}
    for layer in layers:
        direction = next(filter(None, layer))[0].direction
        calls = [list(chain.from_iterable(site.calls for site in sites)) for sites in layer]
        key = tuple(
            _group_key(program, sites[0], own) if sites else None
            for program, sites, own in zip(programs, layer, calls, strict=True)
        )
        _, grouped = groups.setdefault(key, (direction, [[] for _ in programs]))
        for mine, own in zip(grouped, calls, strict=True):
            mine += own
    return list(groups.values())


def _sites(program: Program, whole: bool) -> list[_Site]:
    calls_by_site: dict[_Site, list[CallRow]] = {}
    seen: Counter[Hashable] = Counter()
    for call in (*program.calls, *(program.untraced if whole else ())):
        config = parse_config(call.config) if call.config else None
        module = module_name(call)
        name = WRAPPER.sub("", module).lstrip(".") if module else None
        shape, core = _shapes(call, config)
        direction = "recompute" if call.recompute else "forward"
        number = 0
        if name is None and phase_of(call) != "decode":
            where = (call.trace, call.step, shape, direction)
            number = seen[where]
            seen[where] += 1
        dotted = call.path is not None
        site = _Site(name, number, shape, core, direction, dotted)
        calls_by_site.setdefault(site, []).append(call)
    steps = max(len(program.steps), 1)
    return [
        replace(site, calls=tuple(calls), calls_per_step=len(calls) / steps)
        for site, calls in calls_by_site.items()
    ]


def _shapes(call: CallRow, config: Config | None) -> tuple[Hashable, Hashable]:
    """Return a strict and a loose key for the shape of a call.

    The strict key is the config without dtype and strides. The loose key contains only sizes,
    without the number of key-value heads. For decoding calls, neither key contains the sequence
    length of K and V. The loose key is None if the sizes are unknown.
    """
    if config is None:
        dims = tuple(dims for dims in call.dims if dims is not None)
        return (call.op, dims), (call.op, dims) if dims else None
    keys = None if phase_of(call) == "decode" else config.seq_len_kv
    core = (
        *(config.output_batch, config.num_heads, config.seq_len_q, keys),
        *(config.head_dim, config.value_dim),
    )
    masked = (
        config.causal,
        config.window,
        config.mask,
        config.mask_shape,
        config.dropout,
        config.scale,
    )
    return (*core, config.num_kv_heads, config.bwd, *masked), core


def _paired(base: list[_Site], cand: list[_Site]) -> tuple[list[_Pair], list[_Site]]:
    """Return pairs of sites, in the order of `base`, and the sites of `cand` that have no pair.

    Sites with an equal key are paired in order if both programs have the same number of such sites.
    If the names in the two programs cannot be compared, all sites of equal size form one pair.
    """
    pairs: list[_Pair] = []
    paired: set[int] = set()  # ids of objects, because sites of both programs may compare equal
    for key in _KEYS:
        left, right = _by(key, base), _by(key, cand)
        for value in left.keys() & right.keys():
            sites, others = left[value], right[value]
            if not _may_pair(key, sites, others):
                continue
            if len(sites) == len(others):
                pairs += [([site], [other]) for site, other in zip(sites, others, strict=True)]
            elif _NAMES.isdisjoint(key):
                pairs.append((sites, others))
            else:
                continue
            paired |= {id(site) for site in chain(sites, others)}
        base, cand = ([site for site in sites if id(site) not in paired] for sites in (base, cand))
    # sorted, because the keys above are visited in an arbitrary order
    pairs.sort(key=lambda pair: (pair[0][0].calls[0].trace, pair[0][0].calls[0].call))
    return pairs, cand


def _may_pair(key: Sequence[str], sites: Sequence[_Site], others: Sequence[_Site]) -> bool:
    """Return whether sites whose `key` is equal can be the same layers."""
    unsized = any(all(site.core is None for site in own) for own in (sites, others))
    if _SIZES.isdisjoint(key) and not unsized:
        return False  # the sizes are known, and differ
    if not _NAMES.isdisjoint(key):
        return True
    one, other = sites[0], others[0]
    comparable = None not in (one.name, other.name) and one.dotted == other.dotted
    # Compiled code and graph replays have the name of one module instead of those of the layers.
    whole = [call.compiled or call.kind == "replay" for call in (one.calls[0], other.calls[0])]
    if comparable and whole[0] == whole[1]:
        return False
    if not unsized:
        return True
    # Without names and sizes, the layers can only be all calls of a step.
    alike = all(len({(site.pattern, site.core) for site in own}) == 1 for own in (sites, others))
    rates = [sum(site.calls_per_step for site in own) for own in (sites, others)]
    return alike and rates[0] == rates[1]


def _by(key: Sequence[str], sites: Iterable[_Site]) -> dict[Hashable, list[_Site]]:
    groups: dict[Hashable, list[_Site]] = {}
    for site in sites:
        value = tuple(getattr(site, name) for name in (*key, "direction"))
        groups.setdefault(value, []).append(site)
    return groups


def _group_key(program: Program, site: _Site, calls: Sequence[CallRow]) -> Hashable:
    first = calls[0]
    return (
        *(site.pattern, site.shape, site.direction, first.kind),
        *(first.config and parse_config(first.config).dtype, _ran(program, calls), first.mode),
        *(_recorded(program, calls, name) for name in RECORDED),
    )


def _ran(program: Program, calls: Iterable[CallRow]) -> str | None:
    """Return the backends that ran as text, such as `flash and math`, or None if unknown."""
    names = (actual_backend(call) or program.observed.common_field(call, "ran") for call in calls)
    return " and ".join(sorted(set(filter(None, names)))) or None


def _recorded(program: Program, calls: Iterable[CallRow], name: str) -> str | None:
    values = (program.observed.common_field(call, name) for call in calls)
    return " and ".join(sorted(set(filter(None, values)))) or None


def _have_backward(groups: Iterable[Sequence[CallRow]]) -> bool:
    """Return whether all groups of calls with kernels have backward kernels."""
    timed = [times for calls in groups if (times := list(filter(None, map(_kernel_times, calls))))]
    return bool(timed) and all(
        any(backward is not None for _, backward in times) for times in timed
    )


def _side(program: Program, calls: Sequence[CallRow], *, both_ways: bool) -> LayerSide:
    """Return the values of equal calls. With `both_ways`, rates include the backward pass."""

    def length(call: CallRow) -> int:
        return parse_config(call.config).seq_len_kv if call.config else 0

    middle = sorted(calls, key=length)[(len(calls) - 1) // 2]
    spent = [times for call in calls if (times := _kernel_times(call))]
    backward = [times[1] for times in spent if times[1] is not None]
    traced = [call for call in calls if call.trace != UNTRACED]
    steps = max(len(program.steps), 1)
    points: tuple[tuple[str, float], ...] = ()
    if all(call.config and not call.reason for call in calls):
        points = points_of(traced, steps) if program.calls else program.observed.points(calls)
    recorded = {name: _recorded(program, calls, name) for name in RECORDED}
    samples = _samples(calls, both_ways=both_ways)
    return LayerSide(
        module=join_numbered(module_names(calls)) or None,
        config=middle.config,
        calls=len(traced) / steps if program.calls else None,
        phase=program.step_phase or phase_of(middle),
        mode=middle.mode,
        ran=_ran(program, calls),
        sdpa_op=middle.sdpa_op,
        forward_ns=median(times[0] for times in spent) if spent else None,
        backward_ns=median(backward) if backward else None,
        forward_step_ns=sum(times[0] for times in spent) / steps if spent else None,
        backward_step_ns=sum(backward) / steps if backward else None,
        program_calls=program.observed.counts([calls])[0],
        points=points,
        kernels=_forward_kernels(middle),
        library=library_of(calls),
        dims=() if middle.config else middle.dims,
        step_phase=program.step_phase,
        roofline_share=_roofline_share(program.peaks, middle, samples, both_ways=both_ways),
        **recorded,
    )


def _forward_kernels(call: CallRow) -> tuple[str, ...]:
    """Return the short names of a call's forward kernels. The kernel with the longest time is
    first.
    """
    own = [kernel for kernel in call.kernels if kernel.direction != "backward"]
    own.sort(key=lambda kernel: -kernel.total_ns)
    return tuple(dict.fromkeys(kernel.kernel_short for kernel in own))


def _roofline_share(
    peaks: Peaks | None, call: CallRow, samples: Sequence[int], *, both_ways: bool
) -> float | None:
    """Return the least time of a call divided by its median time, or None if unknown.

    `samples` are the times of the forward pass, or with `both_ways` of the forward and backward
    pass.
    """
    if not call.config or not samples or peaks is None:
        return None
    config = replace(parse_config(call.config), bwd=both_ways)
    least = roofline_ns(peaks, config.dtype, flops(config), compulsory_bytes(config))
    return least and least / median(samples)


def _kernel_times(call: CallRow) -> tuple[int, int | None] | None:
    """Return (the time of a call's forward kernels, the time of the backward kernels).

    The second time is None if there are no backward kernels. Return None if there are no kernels.
    """
    if not call.kernels:
        return None
    backward = [kernel.total_ns for kernel in call.kernels if kernel.direction == "backward"]
    whole = sum(kernel.total_ns for kernel in call.kernels)
    return whole - sum(backward), sum(backward) if backward else None


def _samples(calls: Iterable[CallRow], *, both_ways: bool) -> list[int]:
    times = filter(None, map(_kernel_times, calls))
    if not both_ways:
        return [forward for forward, _ in times]
    return [forward + backward for forward, backward in times if backward is not None]


def _diff(
    direction: str,
    sides: tuple[LayerSide, LayerSide],
    calls: tuple[Sequence[CallRow], Sequence[CallRow]],
    doubt: str | None,
    note: str | None,
    threshold: float,
) -> LayerDiff:
    """Compare a layer. `doubt` is why times cannot be compared, and `note` what explains them."""
    base, cand = sides
    other_backend = None not in (base.ran, cand.ran) and base.ran != cand.ran
    with_backward = [side.backward_ns is not None for side in sides]
    left, right = (_samples(own, both_ways=all(with_backward)) for own in calls)
    ratio, speed, why = _speed(left, right, threshold)
    if doubt and ratio is not None:
        ratio, speed, why = None, "unknown", doubt
    uncounted = [name for name, side in zip(SIDES, sides, strict=True) if side.calls is None]
    if ratio is None and uncounted:
        why = f"no step of the {' or the '.join(uncounted)} was recorded, so the time is unknown"
    reasons = [*_differences(base, cand), *([note] if note else []), why]
    if any(with_backward) and not all(with_backward) and not uncounted:
        one = "baseline" if with_backward[0] else "candidate"
        reasons.append(f"only the {one} has a backward pass")
    changed = other_backend or base.mode != cand.mode
    basis = "forward and backward" if all(with_backward) else "forward"
    return LayerDiff(
        direction=direction,
        baseline=base,
        candidate=cand,
        ratio=ratio,
        basis=None if ratio is None else basis,
        verdict="changed" if changed else speed,
        speed=speed,
        changed=changed,
        backend_changed=other_backend,
        reasons=tuple(reasons),
    )


def _differences(base: LayerSide, cand: LayerSide) -> list[str]:
    steps = [None if side.calls is None else f"{side.calls:g}" for side in (base, cand)]
    if_both_known: tuple[tuple[str, Any, Any], ...] = (
        ("module", base.module, cand.module),
        ("config", base.config, cand.config),
        ("calls per step", steps[0], steps[1]),
        ("calls in all", base.program_calls, cand.program_calls),
        ("backends allowed", base.asked, cand.asked),
        ("PyTorch's choice", base.choice, cand.choice),
        ("effect of the mask", base.mask, cand.mask),
    )
    pairs = (*(pair for pair in if_both_known if None not in pair), ("mode", base.mode, cand.mode))
    texts = [f"{what}: {before} → {after}" for what, before, after in pairs if before != after]
    if not base.sized or not cand.sized:
        where = "one" if base.sized or cand.sized else "either"
        texts.append(
            f"sizes are not recorded on {where} side, so layers are paired by module and order"
        )
    return texts


def _speed(
    base: Sequence[int], cand: Sequence[int], threshold: float
) -> tuple[float | None, Verdict, str]:
    """Return the ratio of the times, the verdict, and the reason for the verdict."""
    if not base or not cand or not median(base) or not median(cand):
        return None, "unknown", "kernel times are missing on at least one side"
    times = median(base), median(cand)
    ratio = times[1] / times[0]
    basis = f"{len(base)} and {counted(len(cand), 'call')}"
    differ = f"{basis}: the medians differ"
    least = min(len(base), len(cand))
    if times[0] == times[1]:
        return ratio, "same", f"{basis}: the medians are equal"
    if least < MIN_LAUNCHES:
        return (
            ratio,
            "unknown",
            f"too few calls ({basis}; each side needs at least {MIN_LAUNCHES})",
        )
    if stats.beyond(ratio, threshold) and abs(times[1] - times[0]) <= RESOLUTION_NS:
        return ratio, "same", f"{differ} by no more than the clock's resolution"
    if least >= stats.MIN_SAMPLES:
        compared = stats.compare(base, cand, threshold=threshold)
        clear = compared.verdict in ("slower", "faster")
        how = f"the candidate {compared_text(1 / ratio)}; " if clear else ""
        return ratio, compared.verdict, f"{basis}: {how}{compared.reason}"
    if not stats.beyond(ratio, threshold):
        return ratio, "same", f"{differ} by no more than the {threshold * 100:g} % threshold"
    if min(base) <= times[1] <= max(base) or min(cand) <= times[0] <= max(cand):
        return ratio, "unknown", f"{differ}, but the ranges of single calls overlap"
    how = compared_text(1 / ratio)
    reason = (
        f"{basis}: the candidate {how}, and both medians lie outside the range of the other side"
    )
    return ratio, "slower" if ratio > 1 else "faster", reason


def _other_gpu(baseline: Program, candidate: Program) -> str | None:
    devices = baseline.device, candidate.device
    if None in devices or devices[0] == devices[1]:
        return None
    names = short_device_names(map(str, devices))
    return f"the GPUs differ ({' and '.join(names.values())})"


def _doubt(baseline: Program, candidate: Program) -> str | None:
    """Return why the times of two programs cannot be compared, or None if they can."""
    on_cpu = set()  # on a CPU, the recorded kernels are ATen ops
    for program in (baseline, candidate):
        names = [kernel.kernel for call in program.calls for kernel in call.kernels]
        if names:
            on_cpu.add(any(name.startswith("aten::") for name in names))
    return "one side has CPU ops and the other has GPU kernels" if len(on_cpu) > 1 else None
