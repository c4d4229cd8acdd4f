"""The records of a diff and their JSON form."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

import msgspec

from profharness.attention.config import Config, setting_name
from profharness.errors import NotFoundError, join_few
from profharness.program.changes import EnvChange, Verdict
from profharness.program.matching import LayerDiff, Program, find_program
from profharness.rows import CellRow, KernelRow
from profharness.store import Need, Selection, Store

BACKEND_CHANGED = "backend-changed"
"""The gate's name for a layer that another backend computes."""
CostVerdict = Literal["same", "more", "less", "refused", "accepted"]
COSTS = MEMORY, LAUNCHES, REFUSED = "memory", "launches", "refused"
"""The gate's names for a candidate that needs more memory or launches, or refuses what the baseline
runs.
"""
SCHEMA = "profharness.diff/1"


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a diff. Kernels without a config are grouped by their range."""

    label: str
    cells: tuple[CellRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    backend: str | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    program: Program | None = None  # the calls of the run, if it is a program and not a capture


@dataclass(frozen=True, slots=True)
class Change:
    """A property that differs. Its value is a tuple on a side that has several kernels."""

    field: str
    baseline: Any
    candidate: Any


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One role of one config on both sides. Times are ns per call."""

    config: str
    backend_baseline: str | None
    backend_candidate: str | None
    role: str  # `call`, `status`, a role of answers/roles, or `kernels` for their sum
    baseline: tuple[KernelRow, ...] = ()
    candidate: tuple[KernelRow, ...] = ()
    ratio: float | None = None  # candidate over baseline
    verdict: Verdict = "unknown"
    reasons: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    # The kernels' identity, launch properties or status differ, whatever the verdict on the time.
    changed: bool = False
    composite: bool = False  # a fused kernel on one side, math kernels on the other
    baseline_ns: float | None = None
    candidate_ns: float | None = None
    basis: str | None = None  # the measurement from which the times come


@dataclass(frozen=True, slots=True)
class Cost:
    """A cost (one of COSTS) of one config, compared between both sides."""

    config: str
    backend_baseline: str | None
    backend_candidate: str | None
    what: str
    baseline: float | str  # bytes at the peak, launches per call, or how the cell ended
    candidate: float | str
    verdict: CostVerdict  # `accepted`: only the baseline refuses
    ratio: float | None = None  # candidate over baseline


@dataclass(frozen=True, slots=True)
class Diff:
    """All rows in the order of the baseline's configs, and the differences of the environments."""

    baseline: str
    candidate: str
    environment: tuple[EnvChange, ...]
    rows: tuple[DiffRow, ...]
    layers: tuple[LayerDiff, ...] = ()  # of two programs with attention calls
    # Whether both sides record their PyTorch version. A trace records little of its environment, so
    # finding no difference does not show that the environments are equal.
    environment_told: bool = True
    costs: tuple[Cost, ...] = ()

    def verdicts(self) -> Counter[str]:
        """Count the rows per verdict."""
        return Counter(row.verdict for row in self.rows)

    def fails(self, on: Set[str]) -> list[DiffRow]:
        """Return the rows whose verdict is in `on`. `changed` also matches changed rows with
        another verdict.
        """
        return [row for row in self.rows if row.verdict in on or (row.changed and "changed" in on)]

    def failing_costs(self, on: Set[str]) -> list[Cost]:
        """Return the costs in `on` that are higher on the candidate or refused only there."""
        return [row for row in self.costs if row.what in on and row.verdict in ("more", REFUSED)]

    def failing_layers(self, on: Set[str]) -> list[LayerDiff]:
        """Return the layers whose verdict or speed is in `on`. BACKEND_CHANGED matches those of
        another backend.
        """
        return [
            row
            for row in self.layers
            if row.verdict in on
            or (row.speed in on and row.baseline and row.candidate)
            or (row.backend_changed and BACKEND_CHANGED in on)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars under schema `profharness.diff/1`. `layers` and
        `costs` are left out if empty, `environment_told` if true.
        """
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self, enc_hook=str))
        for name in ("layers", "costs"):
            if not plain[name]:
                del plain[name]
        if self.environment_told:
            del plain["environment_told"]
        return {"schema": SCHEMA, **plain}


SHOWN = 6  # maximum number of configs of a side in one message
NEEDS: tuple[Need, ...] = ("kernels", "times", "traced attention calls", "attention calls")
OF_TIMES = ("same", "faster", "slower")
OF_KERNELS = ("changed", "added", "removed")


def find_sides(
    store: Store, baseline: str, candidate: str, configs: Sequence[Config] = ()
) -> tuple[Side, Side]:
    """Return both sides of a diff. A side is given as RUN, RUN:BACKEND or a backend.

    A backend alone selects the latest run that has all named backends and configs. `latest` is the
    newest run that has kernels, or else times, or else attention calls (traced or counted). Raise
    NotFoundError if there is no such run.
    """
    texts = _stored_text(baseline), _stored_text(candidate)
    for need in NEEDS:
        with contextlib.suppress(NotFoundError):
            return _find_sides(store, texts, configs, need)
    return _find_sides(store, texts, configs, "times")  # raises the error that explains most


def _stored_text(text: str) -> str:
    """Return a side's text with a set or an order of backends in the form that cells use."""
    run, colon, backend = text.rpartition(":")
    return f"{run}{colon}{setting_name(backend)}"


def _find_sides(
    store: Store, texts: tuple[str, str], configs: Sequence[Config], need: Need
) -> tuple[Side, Side]:
    stored = set(store.backends())
    names = [text for text in dict.fromkeys(texts) if text in stored]
    run = _run_of(store, configs, names, need) if names else None
    left, right = (
        _side(store, run, text, configs)
        if run is not None and text in names
        else _named_side(store, text, configs, need)
        for text in texts
    )
    return left, right


def _run_of(store: Store, configs: Sequence[Config], names: Sequence[str], need: Need) -> str:
    """Return the latest run with all the configs on all the backends."""
    try:
        return store.find_run(Selection(None, configs, names), need)
    except NotFoundError as error:
        if len(names) < 2:
            raise
        runs = [store.find_run(Selection(None, configs, [name]), need) for name in names]
        pairs = [f"{run}:{name}" for run, name in zip(runs, names, strict=True)]
        raise NotFoundError(f"{error}; there are {' and '.join(pairs)} to name instead") from None


def _named_side(store: Store, text: str, configs: Sequence[Config], need: Need) -> Side:
    ref, colon, backend = text.partition(":")
    if colon:
        run = store.find_run(Selection(ref, configs, (backend,)), need)
        return _side(store, run, backend, configs)
    try:
        run = store.find_run(Selection(text, configs), need)
    except NotFoundError as error:
        stored = ", ".join(store.backends()) or "none"
        raise NotFoundError(f"{error}; nor is it one of the stored backends ({stored})") from None
    return _side(store, run, None, configs)


def _side(store: Store, run: str, backend: str | None, configs: Sequence[Config]) -> Side:
    kernels, cells = store.rows(Selection(run, configs))
    if backend is not None and backend not in {cell.backend for cell in cells}:
        has = ", ".join(dict.fromkeys(cell.backend for cell in store.cells(run))) or "none"
        of = f" of {', '.join(config.label for config in configs)}" if configs else ""
        raise NotFoundError(f"run {run} has no cell on {backend!r}{of}; its backends are {has}")
    # a trace stores its GPU separately from its environment
    gpus = [("gpu", device.name) for device in store.devices(run)[:1]]
    return Side(
        label=f"{run}:{backend}" if backend else run,
        cells=tuple(cells),
        kernels=tuple(kernels),
        backend=backend,
        environment=dict(gpus) | store.environment(run),
        program=find_program(store, run, configs),
    )


# explains why two sides that have the same cells cannot be compared by this cost
MISSING_COSTS = {
    LAUNCHES: "no config has launches that one profiler saw on both sides",
    MEMORY: "no config has a peak of memory on both sides; cells that ran on a CPU have none",
}


def nothing_compared(
    diff: Diff, sides: Iterable[Side], verdicts: Collection[str] = ()
) -> str | None:
    """Return why a diff decides nothing on some of the verdicts, or nothing at all if none is
    named. Return None if it does. Times and kernels count as compared if some config or layer has
    them on both sides.
    """
    pair = attrgetter("config", "backend_baseline", "backend_candidate")
    judged: set[str] = set()
    for _, group in groupby(diff.rows, pair):
        judged |= _judged(list(group))
    judged |= {cost.what for cost in diff.costs}
    for row in diff.layers:
        judged |= _judged_layer(row)
    open_ones = [name for name in verdicts if name not in judged] if verdicts else []
    if judged and not open_ones:
        return None
    what = f" for {', '.join(sorted(open_ones))}" if judged else ""
    if judged and all(name in MISSING_COSTS for name in open_ones):
        why = "; ".join(MISSING_COSTS[name] for name in sorted(open_ones))
    else:
        why = "; ".join(map(_has, sides))
    return f"nothing to compare{what}: {why}"


def _judged(rows: Sequence[DiffRow]) -> set[str]:
    """Return the verdicts that were possible for one config on both sides."""
    every = {*OF_TIMES, *OF_KERNELS, "unknown"}
    if any(row.role == "status" for row in rows):
        return every
    times = any(row.ratio is not None for row in rows)
    kernels = any(row.baseline for row in rows) and any(row.candidate for row in rows)
    verdicts = {*(OF_TIMES if times else ()), *(OF_KERNELS if kernels else ())}
    return {*verdicts, "unknown"} if verdicts else verdicts


def _judged_layer(row: LayerDiff) -> set[str]:
    """Return the verdicts that were possible for one layer. A backend is judged if both sides know
    it, and so is `changed` for calls that a side only counted.
    """
    if row.baseline is None or row.candidate is None:
        return {"added", "removed"}
    both_ran = None not in (row.baseline.ran, row.candidate.ran)
    if not both_ran and None in (row.baseline.calls, row.candidate.calls):
        return {"added", "removed"}
    verdicts = {*OF_KERNELS, "unknown"} | (set(OF_TIMES) if row.ratio is not None else set())
    return verdicts | ({BACKEND_CHANGED} if both_ran else set())


def _has(side: Side) -> str:
    """Describe which data a side has, and for which configs."""
    cells = [cell for cell in side.cells if side.backend in (None, cell.backend)]
    rows = [row for row in side.kernels if side.backend in (None, row.backend)]
    labels = [cell.config for cell in cells] or [str(row.range) for row in rows]
    unique = list(dict.fromkeys(labels))
    if not unique and side.program and not side.program.calls:
        return f"{side.label} has counted calls and no recorded step, so no kernels and no times"
    if not unique:
        return f"{side.label} has no cells and no kernels of what was asked for"
    names = join_few(unique, SHOWN)
    lacks = [] if rows else ["kernels"]
    lacks += [] if any(cell.samples for cell in cells) or not cells else ["times"]
    without = f", without {' and '.join(lacks)}" if lacks else ""
    return f"{side.label} has {names}{without}"
