"""Divide the time of a program's steps by kind of work and by kernel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from profharness.columns import column
from profharness.measurements.agreement import backend_of_kernel, backend_text, computes_attention
from profharness.program.layer_map import actual_backend, join_numbered, module_name, short_module
from profharness.program.phases import Place, step_place, steps_by_phase
from profharness.rows import PRODUCT_FAMILIES, CallRow, StepLaunch, StepRow
from profharness.store import Store
from profharness.traces.kernel_names import COLLECTIVE
from profharness.traces.steps import OPTIMIZER_STEP

ATTENTION = "attention"
PRODUCTS, OPTIMIZER, OTHER = "matrix products", "optimizer", "other kernels"
COMMUNICATION, COPIES, IDLE = "communication", "memory copies", "idle"
KINDS = (ATTENTION, PRODUCTS, OPTIMIZER, OTHER, COMMUNICATION, COPIES, IDLE)
"""The kinds of work. If several kinds run at once, the time counts for the first kind."""
_KINDS_OF_FAMILIES = {
    **dict.fromkeys((*PRODUCT_FAMILIES, "moe"), PRODUCTS),
    COLLECTIVE: COMMUNICATION,
    **dict.fromkeys(("memcpy", "memset"), COPIES),
}
# LBFGS runs the model in its steps
_OPTIMIZER_STEP = re.compile(rf"{OPTIMIZER_STEP}(?!LBFGS\.)")
UNKNOWN = "unknown backend"


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel of a program with the total time of its launches per step."""

    kernel: Annotated[str, column(meaning="canonical name of the kernel")]
    kernel_short: Annotated[str, column("kernel", shrink=True, meaning="short name of the kernel")]
    kind: Annotated[
        str,
        column(
            "kind",
            meaning="`attention`, `matrix products`, `optimizer`, `other kernels`, `communication` or "
            "`memory copies`",
        ),
    ]
    layer: Annotated[
        str | None,
        column(
            "layer or op",
            shrink=True,
            meaning="the modules whose attention calls launched the kernel, or the op that "
            "launched it",
        ),
    ]
    launches: Annotated[float, column("launches/step", "count", meaning="launches per step")]
    total_ns: Annotated[
        float,
        column("mean µs/step", "time", meaning="total time of the kernel's launches per step"),
    ]
    share: Annotated[
        float,
        column(
            "% of GPU time",
            "percent",
            meaning="share of the total time of all kernels; overlapping kernels count twice",
        ),
    ]
    backend: Annotated[str | None, column(meaning="the attention backend")] = None


@dataclass(frozen=True, slots=True)
class LaunchOwner:
    """The attention call that a launch belongs to."""

    module: str | None
    backend: str


@dataclass(frozen=True, slots=True)
class ProgramTimes:
    """The steps of a program by kind of work and by kernel. Times are averages per step."""

    steps: tuple[StepRow, ...]
    step_ns: float
    parts: Mapping[tuple[str, str | None], float]
    """The times by (kind, backend), which add up to `step_ns`. Only attention has a backend."""
    kernels: tuple[KernelTime, ...]
    """The kernels, sorted by time, longest first."""
    middle: StepRow
    """The step of median duration."""
    launches: tuple[StepLaunch, ...]
    """The launches of `middle` on the busiest GPU."""
    owners: Mapping[tuple[int, int], LaunchOwner]
    """Maps (trace, number of a call) to the owner of the launches of the call."""

    def owner(self, launch: StepLaunch) -> LaunchOwner | None:
        """Return the attention call of a launch of `middle`, or None."""
        return None if launch.call is None else self.owners.get((self.middle.trace, launch.call))

    def backend(self, launch: StepLaunch) -> str | None:
        """Return the attention backend of a launch of `middle`, or None for other launches."""
        return _backend(launch, self.owner(launch))


def times_by_phase(
    store: Store,
    steps: Sequence[StepRow],
    calls: Sequence[CallRow],
    phases: Mapping[Place, str],
) -> dict[str | None, ProgramTimes]:
    """Return the times of all steps under the key None, and the times of the steps of each phase.

    `phases` is the result of `step_phases`. Leave out phases without kernels on a GPU.
    """
    owners = {
        (call.trace, call.call): LaunchOwner(module_name(call), _shown(actual_backend(call)))
        for call in calls
    }
    groups = {None: steps, **steps_by_phase(steps, phases)}
    sums = {phase: _Sums(own) for phase, own in groups.items()}
    for step, started in zip(steps, store.step_launches(steps), strict=True):
        if launches := _busiest(started):
            own = [
                owners.get((step.trace, each.call)) if each.call is not None else None
                for each in launches
            ]
            for phase in {None, phases.get(step_place(step))}:
                sums[phase].add(step, launches, own)
    return {phase: each.times(store, owners) for phase, each in sums.items() if each.used}


# The names of a kernel, its kind and its backend. Different kernels may have the same short name.
_Kernel = tuple[str, str, str, str | None]


class _Sums:
    """The sums of the times of some steps, to which the launches of one step at a time are added."""

    def __init__(self, steps: Sequence[StepRow]) -> None:
        ordered = sorted(steps, key=lambda step: step.duration_ns)
        self.middle = ordered[(len(ordered) - 1) // 2] if ordered else None
        self.shown: tuple[StepLaunch, ...] = ()  # the launches of the step of median duration
        self.used: list[StepRow] = []
        self.parts: Counter[tuple[str, str | None]] = Counter()
        self.kernels: dict[_Kernel, list[float]] = {}
        self.places: dict[_Kernel, dict[str, None]] = {}

    def add(
        self, step: StepRow, launches: Sequence[StepLaunch], owners: Sequence[LaunchOwner | None]
    ) -> None:
        self.used.append(step)
        self.parts.update(split_step(step, launches, owners))
        for launch, owner in zip(launches, owners, strict=True):
            key = launch.kernel, launch.kernel_short, kind_of(launch), _backend(launch, owner)
            figures = self.kernels.setdefault(key, [0, 0])
            figures[0] += 1
            figures[1] += launch.duration_ns
            name = (owner.module if owner else None) or _op(launch)
            if name:
                self.places.setdefault(key, {})[name] = None
        if step is self.middle:
            self.shown = tuple(launches)

    def times(self, store: Store, owners: Mapping[tuple[int, int], LaunchOwner]) -> ProgramTimes:
        """Return the averages over the steps with kernels."""
        middle, shown = self.middle, self.shown
        if not shown:  # the median step has no kernels
            middle = self.used[(len(self.used) - 1) // 2]
            (started,) = store.step_launches([middle])
            shown = tuple(_busiest(started))
        assert middle is not None
        count, whole = len(self.used), sum(total for _, total in self.kernels.values())
        rows = [
            KernelTime(
                kernel=name,
                kernel_short=short,
                kind=kind,
                layer=_layer(self.places.get((name, short, kind, backend), ())),
                launches=number / count,
                total_ns=total / count,
                share=total / whole if whole else 0.0,
                backend=backend,
            )
            for (name, short, kind, backend), (number, total) in self.kernels.items()
        ]
        rows.sort(key=lambda row: -row.total_ns)
        averages = {key: ns / count for key, ns in self.parts.items()}
        return ProgramTimes(
            steps=tuple(self.used),
            step_ns=sum(averages.values()),
            parts=averages,
            kernels=tuple(rows),
            middle=middle,
            launches=shown,
            owners=owners,
        )


def kind_of(launch: StepLaunch) -> str:
    """Return the kind of work of a launch. Every launch of an attention call is attention."""
    if launch.call is not None or computes_attention(launch.family, launch.kernel_short):
        return ATTENTION
    known = _KINDS_OF_FAMILIES.get(launch.family)
    optimizes = known is None and _OPTIMIZER_STEP.match(launch.range or "")
    return known or (OPTIMIZER if optimizes else OTHER)


def split_step(
    step: StepRow, launches: Sequence[StepLaunch], owners: Sequence[LaunchOwner | None]
) -> Counter[tuple[str, str | None]]:
    """Divide the duration of a step into the times of each kind of work, and the idle time."""
    end = step.start_ns + step.duration_ns
    parts: Counter[tuple[str, str | None]] = Counter()
    events: list[tuple[int, int, tuple[str, str | None]]] = []
    for launch, owner in zip(launches, owners, strict=True):
        key = kind_of(launch), _backend(launch, owner)
        events.append((launch.start_ns, 1, key))
        events.append((min(launch.start_ns + launch.duration_ns, end), -1, key))
    events.sort(key=lambda event: event[0])
    active: Counter[tuple[str, str | None]] = Counter()
    last = step.start_ns
    for time, change, key in [*events, (end, 0, (IDLE, None))]:
        if time > last:
            running = [each for each, number in active.items() if number]
            first = min(running, key=lambda each: KINDS.index(each[0]), default=(IDLE, None))
            parts[first] += time - last
            last = time
        active[key] += change
    return parts


def _busiest(launches: Sequence[StepLaunch]) -> list[StepLaunch]:
    """Return the launches on the GPU with the longest total kernel time."""
    busy: Counter[int] = Counter()
    for launch in launches:
        busy[launch.device] += launch.duration_ns
    if len(busy) < 2:
        return list(launches)
    (device, _), *_ = busy.most_common(1)
    return [launch for launch in launches if launch.device == device]


def _backend(launch: StepLaunch, owner: LaunchOwner | None) -> str | None:
    if kind_of(launch) != ATTENTION:
        return None
    if owner:
        return owner.backend
    return _shown(backend_of_kernel(launch.family, launch.kernel_short))


def _shown(backend: str | None) -> str:
    return backend_text(backend) if backend else UNKNOWN


def _op(launch: StepLaunch) -> str | None:
    return launch.op_path.rpartition(";")[2] if launch.op_path else None


def _layer(names: Iterable[str]) -> str | None:
    shortened = dict.fromkeys(short_module(name) or name for name in names)
    return join_numbered(shortened) or None
