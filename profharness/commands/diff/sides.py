"""Select the rows of the two sides of a diff, and check that anything could be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from profharness.attention.config import Config, setting_name
from profharness.commands.diff.result import BACKEND_CHANGED, LAUNCHES, MEMORY, Diff, DiffRow, Side
from profharness.errors import NotFoundError, join_few
from profharness.program.matching import LayerDiff, find_program
from profharness.store import Need, Selection, Store

SHOWN = 6  # configs of a side in one message
NEEDS: tuple[Need, ...] = ("kernels", "times", "traced attention calls", "attention calls")
OF_TIMES = ("same", "faster", "slower")
OF_KERNELS = ("changed", "added", "removed")


def find_sides(
    store: Store, baseline: str, candidate: str, configs: Sequence[Config] = ()
) -> tuple[Side, Side]:
    """Return the rows of RUN, RUN:BACKEND or a backend, by default of the latest run that has
    everything named. `latest` is the newest run with kernels, else with times, else with attention
    calls, traced or counted. Raise NotFoundError.
    """
    texts = _stored_text(baseline), _stored_text(candidate)
    for need in NEEDS:
        with contextlib.suppress(NotFoundError):
            return _find_sides(store, texts, configs, need)
    return _find_sides(store, texts, configs, "times")  # its error has the most information


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


# why two sides with equal cells may have no value of this cost in common
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
    """Describe what a side has of which configs."""
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
