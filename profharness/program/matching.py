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
from profharness.attention.config import Config, parse_config
from profharness.attention.costs import compulsory_bytes, flops
from profharness.columns import column
from profharness.devices import Peaks, roofline_ns
from profharness.measurements.agreement import AMD_LIBRARIES, backend_text
from profharness.program.changes import MIN_LAUNCHES, RESOLUTION_NS, Verdict
from profharness.program.layer_map import (
    NUMBER,
    LayerRow,
    actual_backend,
    calls_in_steps,
    library_of,
    merge_numbered,
    module_name,
    module_names,
    points_of,
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
        column("forward median µs/call", right=True, meaning="median kernel time of one call"),
    ]
    backward_ns: Annotated[float | None, column("backward median µs/call", right=True)]
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
            meaning="shortest forward time that the GPU's peak rates allow, divided by the actual "
            "forward time",
        ),
    ] = None
    # The sum of the kernel times of all calls, per step. It is not the median time of a call times
    # the number of calls if calls differ.
    forward_step_ns: float | None = None
    backward_step_ns: float | None = None
    library: str | None = None  # the AMD library whose kernels computed the backend
    # The phase of the steps that the values per step refer to. None if the programs are not compared
    # by phase, so that the values are means over all steps.
    step_phase: str | None = None


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
    def step_phase(self) -> str | None:
        """The phase of the steps that contain the calls, or None if phases are not compared."""
        return self.first.step_phase


@dataclass(frozen=True, slots=True)
class LayerDiff:
    """Equal layers of the baseline and the candidate. A side without these layers is None."""

    direction: str
    baseline: LayerSide | None = None
    candidate: LayerSide | None = None
    ratio: Annotated[
        float | None,
        column(
            "speed-up",
            "inverse",
            importance="answer",
            meaning="time of the candidate divided by the time of the baseline; tables show the inverse",
        ),
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

    @property
    def name(self) -> Annotated[str, column("module", shrink=True)]:
        """The module of the layers, or the config of their calls if the module is unknown."""
        side = self.baseline or self.candidate
        assert side is not None
        return side.module or side.config or "a call"

    @property
    def step_phase(self) -> str | None:
        """The phase of the steps that contain the calls, or None if phases are not compared."""
        side = self.baseline or self.candidate
        return side.step_phase if side else None


@dataclass(frozen=True, slots=True)
class _Site:
    """The calls of one layer that have the same shape and direction."""

    name: str | None  # name of the module without wrappers; None if unknown
    number: int  # position among the sites of the same shape if the module is unknown, else 0
    shape: Hashable
    core: Hashable
    direction: str
    dotted: bool  # whether the name is a module path instead of class names
    calls: tuple[CallRow, ...] = ()

    @property
    def pattern(self) -> str | None:
        return NUMBER.sub("{}", self.name) if self.name else None

    @property
    def tail(self) -> str | None:
        return self.pattern.rpartition(".")[2] if self.pattern else None


SIDES = ("baseline", "candidate")
# fields of LayerSide that only the observer records
RECORDED = ("asked", "choice", "mask")
_Pair = tuple[list[_Site], list[_Site]]
_Group = tuple[str, list[list[CallRow]]]  # a direction, and the calls of each program

# Two sites are paired if one of these keys is equal. The strictest key comes first. The less strict
# keys pair layers that only one program compiles, and layers with different masks or different
# numbers of key-value heads. If the names of the two programs cannot be compared,
# `_paired` pairs sites by their sizes alone.
_KEYS: tuple[Callable[[_Site], Hashable], ...] = (
    lambda site: (site.name or site.number, site.shape),
    lambda site: (site.pattern, site.shape),
    lambda site: (site.name or site.number, site.core),
    lambda site: (site.pattern, site.core),
    lambda site: (site.tail, site.core),
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
        step_phases=of_steps,
        peaks=peaks,
    )


def diff_layers(baseline: Program, candidate: Program, threshold: float) -> tuple[LayerDiff, ...]:
    """Return one row per group of equal layers.

    A layer counts as faster or slower if the relative change of its time exceeds `threshold`.
    """
    doubts = _doubts(baseline, candidate)
    return tuple(
        chain.from_iterable(
            _diff_part(one, other, doubts, threshold)
            for one, other in _parts((baseline, candidate))
        )
    )


def _diff_part(
    baseline: Program, candidate: Program, doubts: Sequence[str], threshold: float
) -> Iterator[LayerDiff]:
    groups = _equal_layers((baseline, candidate))

    def order(group: _Group) -> tuple[bool, bool, int, int]:
        _, (left, right) = group
        first = (left or right)[0]
        return not left, not right, first.trace, first.call

    groups.sort(key=order)
    for direction, (left, right) in groups:
        if left and right:
            sides = _side(baseline, left), _side(candidate, right)
            yield _diff(direction, sides, (left, right), doubts, threshold)
        elif left:
            why = ("the candidate has no matching layer with the same size",)
            yield LayerDiff(
                direction, baseline=_side(baseline, left), verdict="removed", reasons=why
            )
        else:
            why = ("the baseline has no matching layer with the same size",)
            yield LayerDiff(
                direction, candidate=_side(candidate, right), verdict="added", reasons=why
            )


def _parts(programs: Sequence[Program]) -> list[Sequence[Program]]:
    """Divide programs by phase, because only steps of the same phase can be compared.

    The programs are one part if one of them has no phases.
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


def match_layers(programs: Sequence[Program]) -> tuple[MatchedLayers, ...]:
    """Return one row per group of equal layers, starting with the layers of the first program."""
    return tuple(chain.from_iterable(map(_match_part, _parts(programs))))


def _match_part(programs: Sequence[Program]) -> Iterator[MatchedLayers]:
    for direction, calls in _equal_layers(programs):
        sides = [
            _side(program, own) if own else None
            for program, own in zip(programs, calls, strict=True)
        ]
        present = [side for side in sides if side is not None]
        timed = [side for side in present if side.forward_ns is not None]
        both_ways = bool(timed) and all(side.backward_ns is not None for side in timed)
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
        site = _Site(name, number, shape, core, direction, call.path is not None)
        calls_by_site.setdefault(site, []).append(call)
    return [replace(site, calls=tuple(calls)) for site, calls in calls_by_site.items()]


def _shapes(call: CallRow, config: Config | None) -> tuple[Hashable, Hashable]:
    """Return a strict and a loose key for the shape of a call.

    The strict key is the config without dtype and strides. The loose key contains only sizes,
    without the number of key-value heads. For decoding calls, neither key contains the sequence
    length of K and V.
    """
    if config is None:
        dims = tuple(dims for dims in call.dims if dims is not None)
        return (call.op, dims), (call.op, dims)
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
    for key in (*_KEYS, None):
        left, right = (_by(key or (lambda site: site.core), sites) for sites in (base, cand))
        for value in left.keys() & right.keys():
            sites, others = left[value], right[value]
            one, other = sites[0], others[0]
            comparable = None not in (one.name, other.name) and one.dotted == other.dotted
            # Compiled code has the name of the compiled module instead of those of the layers.
            comparable = comparable and one.calls[0].compiled == other.calls[0].compiled
            if key is None and comparable:
                continue
            if len(sites) == len(others):
                pairs += [([site], [other]) for site, other in zip(sites, others, strict=True)]
            elif key is None:
                pairs.append((sites, others))
            else:
                continue
            paired |= {id(site) for site in chain(sites, others)}
        base, cand = ([site for site in sites if id(site) not in paired] for sites in (base, cand))
    # sorted, because the keys above are visited in an arbitrary order
    pairs.sort(key=lambda pair: (pair[0][0].calls[0].trace, pair[0][0].calls[0].call))
    return pairs, cand


def _by(
    key: Callable[[_Site], Hashable], sites: Iterable[_Site]
) -> dict[tuple[Hashable, str], list[_Site]]:
    groups: dict[tuple[Hashable, str], list[_Site]] = {}
    for site in sites:
        groups.setdefault((key(site), site.direction), []).append(site)
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


def _side(program: Program, calls: Sequence[CallRow]) -> LayerSide:
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
    forward_ns = median(times[0] for times in spent) if spent else None
    return LayerSide(
        module=merge_numbered(module_names(calls)),
        config=middle.config,
        calls=len(traced) / steps if program.calls else None,
        phase=phase_of(middle),
        mode=middle.mode,
        ran=_ran(program, calls),
        sdpa_op=middle.sdpa_op,
        forward_ns=forward_ns,
        backward_ns=median(backward) if backward else None,
        forward_step_ns=sum(times[0] for times in spent) / steps if spent else None,
        backward_step_ns=sum(backward) / steps if backward else None,
        program_calls=program.observed.counts([calls])[0],
        points=points,
        kernels=_forward_kernels(middle),
        library=library_of(calls),
        step_phase=program.step_phase,
        roofline_share=_roofline_share(program.peaks, middle, forward_ns),
        **recorded,
    )


def _forward_kernels(call: CallRow) -> tuple[str, ...]:
    """Return the short names of a call's forward kernels. The kernel with the longest time is
    first.
    """
    own = [kernel for kernel in call.kernels if kernel.direction != "backward"]
    own.sort(key=lambda kernel: -kernel.total_ns)
    return tuple(dict.fromkeys(kernel.kernel_short for kernel in own))


def _roofline_share(peaks: Peaks | None, call: CallRow, forward_ns: float | None) -> float | None:
    """Return the least forward time of a call divided by the actual time, or None if unknown."""
    if not call.config or not forward_ns or peaks is None:
        return None
    config = replace(parse_config(call.config), bwd=False)
    least = roofline_ns(peaks, config.dtype, flops(config), compulsory_bytes(config))
    return least and least / forward_ns


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
    doubts: Sequence[str],
    threshold: float,
) -> LayerDiff:
    base, cand = sides
    other_backend = None not in (base.ran, cand.ran) and base.ran != cand.ran
    with_backward = [side.backward_ns is not None for side in sides]
    left, right = (_samples(own, both_ways=all(with_backward)) for own in calls)
    ratio, speed, why = _speed(left, right, threshold)
    if doubts and ratio is not None:
        speed, why = "unknown", "; ".join(doubts)
    uncounted = [name for name, side in zip(SIDES, sides, strict=True) if side.calls is None]
    if ratio is None and uncounted:
        why = f"no step of the {' or the '.join(uncounted)} was recorded, so the time is unknown"
    reasons = [*_differences(base, cand), why]
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
        ("calls per step", steps[0], steps[1]),
        ("calls in all", base.program_calls, cand.program_calls),
        ("backends allowed", base.asked, cand.asked),
        ("PyTorch's choice", base.choice, cand.choice),
        ("effect of the mask", base.mask, cand.mask),
    )
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("module", base.module, cand.module),
        ("config", base.config, cand.config),
        ("mode", base.mode, cand.mode),
        *(pair for pair in if_both_known if None not in pair),
    )
    return [f"{what}: {before} → {after}" for what, before, after in pairs if before != after]


def _speed(
    base: Sequence[int], cand: Sequence[int], threshold: float
) -> tuple[float | None, Verdict, str]:
    """Return the ratio of the times, the verdict, and the reason for the verdict."""
    if not base or not cand or not median(base) or not median(cand):
        return None, "unknown", "kernel times are missing on at least one side"
    times = median(base), median(cand)
    ratio = times[1] / times[0]
    basis = f"{len(base)} and {len(cand)} calls"
    change = f"{basis}: {(ratio - 1) * 100:+.1f} %"
    least = min(len(base), len(cand))
    if least < MIN_LAUNCHES:
        return (
            ratio,
            "unknown",
            f"too few calls ({change}; each side needs at least {MIN_LAUNCHES})",
        )
    if stats.beyond(ratio, threshold) and abs(times[1] - times[0]) <= RESOLUTION_NS:
        return ratio, "same", f"{change}, within the clock's resolution"
    if least >= stats.MIN_SAMPLES:
        compared = stats.compare(base, cand, threshold=threshold)
        return ratio, compared.verdict, f"{basis}: {compared.reason}"
    if not stats.beyond(ratio, threshold):
        return ratio, "same", f"{change}, within the {threshold * 100:g} % threshold"
    if min(base) <= times[1] <= max(base) or min(cand) <= times[0] <= max(cand):
        return ratio, "unknown", f"{change}, but the ranges of single calls overlap"
    return ratio, "slower" if ratio > 1 else "faster", f"{change}, outside the range of both sides"


def _doubts(baseline: Program, candidate: Program) -> list[str]:
    devices = baseline.device, candidate.device
    if None not in devices and devices[0] != devices[1]:
        return [f"the GPUs differ ({devices[0]} and {devices[1]})"]
    on_cpu = set()  # on a CPU, the recorded kernels are ATen ops
    for program in (baseline, candidate):
        names = [kernel.kernel for call in program.calls for kernel in call.kernels]
        if names:
            on_cpu.add(all(name.startswith("aten::") for name in names))
    return ["one side has CPU ops and the other has GPU kernels"] if len(on_cpu) > 1 else []
