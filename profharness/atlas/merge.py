"""Merge atlases, compare the cells that two atlases share, and build atlases from a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from statistics import median
from typing import Any

from profharness.atlas.data import (
    BACKENDS,
    SETTLED,
    SUFFIX,
    VERSIONS,
    Atlas,
    AtlasCell,
    Launch,
    Machine,
    build_atlas,
    write_atlas,
)
from profharness.atlas.predictions import MAX_EXAMPLES, Entry, same_machine
from profharness.attention.config import SDPA_BACKENDS, parse_config
from profharness.device_types import on_gpu
from profharness.errors import NotFoundError, UsageError
from profharness.rows import GRAPH, CellRow, LaunchRow, preferred_profiler_rows, triple
from profharness.store import ALL_RUNS, Store

OWN_REGIME = "own"  # the regime of cells that come from a store
MAX_MEDIAN_GAP = 0.1  # maximum deviation from 1 of the median ratio of the times of shared cells
LEAST_FOR_MEDIAN = 10  # the median ratio is checked if at least this many shared cells have times


def merge(atlases: Sequence[Atlas]) -> Atlas:
    """Merge atlases of one machine.

    If several atlases contain a cell, prefer the first result with the status `ok` or `refused`.
    Raise UsageError if the machines differ or if results of a cell disagree.
    """
    first, *others = atlases
    for other in others:
        for name in VERSIONS:
            old, new = getattr(first.machine, name), getattr(other.machine, name)
            if old != new:
                raise UsageError(
                    f"{first.source or 'the first'} is for {name} {old}, but {other.source or 'another'} "
                    f"is for {new}; only atlases of one machine can be merged"
                )
    for number, later in enumerate(atlases):
        for earlier in atlases[:number]:
            if text := conflicts(earlier, later):
                raise UsageError(f"cannot merge {earlier.source} and {later.source}: {text}")
    # Iterate over the atlases twice, because a list of all cells would take far more memory than
    # columns.
    cells = (
        cell
        for settled in (True, False)
        for cell in chain.from_iterable(atlas.cells() for atlas in atlases)
        if (cell.status in SETTLED) is settled
    )
    return build_atlas(first.machine, cells, first.source)


def conflicts(one: Atlas, other: Atlas) -> str:
    """Describe the cells whose results differ between two atlases of a machine.

    Return a text such as `3 of 40 shared cells disagree: kernels in 2, choice in 1; for example
    b2-… auto: …`, or "" if the atlases agree.
    """
    counts: Counter[str] = Counter()
    examples: list[str] = []
    ratios: list[float] = []
    shared = 0
    for cell in other.cells():
        known = one.find(cell.config, cell.backend)
        if known is None or not {known.status, cell.status} <= {*SETTLED}:
            continue
        shared += 1
        if known.kernel_us and cell.kernel_us:
            ratios.append(cell.kernel_us / known.kernel_us)
        if found := known.difference(cell):
            counts[found[0]] += 1
            examples.append(f"{cell.config.label} {cell.backend}: {found[1]}")
    texts = []
    if counts:
        parts = ", ".join(f"{what} in {count}" for what, count in counts.items())
        texts = [
            f"{counts.total():,} of {shared:,} shared cells disagree: {parts}",
            f"for example {'; '.join(examples[:MAX_EXAMPLES])}",
        ]
    ratio = median(ratios) if len(ratios) >= LEAST_FOR_MEDIAN else 1.0
    if abs(ratio - 1) > MAX_MEDIAN_GAP:
        texts.append(
            f"over the {shared:,} cells of both atlases, "
            f"the median ratio of the times is {ratio:.2f}"
        )
    return "; ".join(texts)


def add(atlas: Atlas, folder: Path, entries: Sequence[Entry]) -> tuple[Path | None, int]:
    """Add the new cells of an atlas to the user's own atlas of that machine.

    Return the path of the user's atlas and the number of new cells. If there are no new cells,
    write nothing and return None as the path. Raise the errors of `merge`.
    """
    same = [entry for entry in entries if same_machine(entry.atlas.machine, atlas.machine)]
    for entry in same:
        if text := conflicts(entry.atlas, atlas):
            raise UsageError(f"cannot add {atlas.source} to {entry.name} ({entry.origin}): {text}")
    unknown = (
        cell for cell in atlas.cells() if not any(_contains(each.atlas, cell) for each in same)
    )
    new = build_atlas(atlas.machine, unknown, atlas.source)
    if not len(new):
        return None, 0
    path = folder / f"{atlas.machine.name}{SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot be created: {error.strerror}; choose another folder with --atlas"
        ) from None
    parts = [each.atlas for each in same if each.path == path]
    write_atlas(merge([*parts, new]), path, force=True)
    return path, len(new)


def _contains(atlas: Atlas, cell: AtlasCell) -> bool:
    known = atlas.find(cell.config, cell.backend)
    return known is not None and (known.status in SETTLED or cell.status not in SETTLED)


def atlases_of_store(store: Store, run: str = ALL_RUNS) -> list[Atlas]:
    """Build an atlas for each machine on which the runs of a store captured PyTorch's backends.

    If several runs contain a cell, the result of the newest run is used. Raise NotFoundError if the
    store has no such cells, and UsageError if a run's environment is invalid.
    """
    names = [row.run for row in store.runs()] if run == ALL_RUNS else [store.resolve(run)]
    found: dict[Machine, list[AtlasCell]] = {}
    for name in names:
        environment = store.environment(name)
        if on_gpu(environment) and environment.get("gpu"):
            cells = list(_run_cells(store, name))
            if not cells:
                continue
            try:
                machine = Machine.from_environment(environment)
            except UsageError as error:
                raise UsageError(f"run {name}: {error}") from None
            machine.require_gpu_and_release(f"run {name}")
            found.setdefault(machine, []).extend(cells)
    atlases = [
        build_atlas(machine, every, f"the store's {machine.name}")
        for machine, every in found.items()
    ]
    if not atlases:
        what = "the store" if run == ALL_RUNS else f"run {names[0]}"
        raise NotFoundError(
            f"{what} has no cells of auto, {', '.join(SDPA_BACKENDS)} with kernels on a GPU; "
            "record some with `profharness capture` on a GPU"
        )
    return atlases


def _run_cells(store: Store, run: str) -> Iterator[AtlasCell]:
    launches: dict[str | None, list[LaunchRow]] = {}
    for launch in preferred_profiler_rows(store.launches(run)):
        launches.setdefault(launch.cell, []).append(launch)
    for cell in store.cells(run):
        own = launches.get(cell.cell, [])
        if cell.backend in BACKENDS and (cell.status == "refused" or (cell.status == "ok" and own)):
            yield _cell(cell, own)


def _cell(cell: CellRow, launches: Iterable[LaunchRow]) -> AtlasCell:
    """Convert a captured cell to a cell of an atlas.

    The result contains the most frequent sequence of launches, and the median time of each launch.
    """
    ordered = sorted(launches, key=lambda launch: (launch.iteration or 0, launch.start_ns))
    calls = [list(call) for _, call in groupby(ordered, key=lambda launch: launch.iteration)]
    sequences = [tuple(map(_kind, call)) for call in calls]
    usual = Counter(sequences).most_common(1)[0][0] if calls else ()
    same = [call for call, kinds in zip(calls, sequences, strict=True) if kinds == usual]
    times = [[each.duration_ns for each in call if each.duration_ns is not None] for call in same]
    known = bool(usual) and all(len(each) == len(usual) for each in times)
    medians = [median(each) / 1e3 for each in zip(*times, strict=True)] if known else []
    graph = cell.samples.get(GRAPH)
    return AtlasCell(
        config=parse_config(cell.config),
        backend=cell.backend,
        regime=OWN_REGIME,
        status=cell.status,
        choice=cell.choice,
        launches=tuple(
            Launch._make((*kind, medians[at] if known else None)) for at, kind in enumerate(usual)
        ),
        kernel_us=median(map(sum, times)) / 1e3 if known else None,
        graph_us=median(graph) / 1e3 if graph else None,
        peak_bytes=cell.peak_memory_bytes,
        message=cell.reason,
    )


def _kind(launch: LaunchRow) -> tuple[Any, ...]:
    grid = triple(launch.grid_x, launch.grid_y, launch.grid_z)
    block = triple(launch.block_x, launch.block_y, launch.block_z)
    return launch.kernel, grid, block, launch.registers_per_thread, launch.shared_bytes
