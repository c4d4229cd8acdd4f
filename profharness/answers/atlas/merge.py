"""Atlases put together: two of like machines become one, a store becomes one, and one becomes lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain, groupby
from pathlib import Path
from statistics import median
from typing import Any

from profharness.answers.atlas.archive import SHARD_VERSION
from profharness.answers.atlas.catalog import Entry, same_machine
from profharness.answers.atlas.checks import machine_fault
from profharness.answers.atlas.clash import SETTLED, clash_of
from profharness.answers.atlas.data import (
    SUFFIX,
    VERSIONS,
    Atlas,
    AtlasCell,
    Launch,
    Machine,
    atlas_of,
    machine_of,
    write_atlas,
)
from profharness.config import AUTO, SDPA_BACKENDS, parse_config
from profharness.errors import NotFoundError, ProfharnessError, UsageError
from profharness.rows import GRAPH, CellRow, LaunchRow, of_first_profiler, triple
from profharness.store import ALL_RUNS, Store

OWN_REGIME = "own"  # of cells that were not drawn for an atlas


def merge(atlases: Sequence[Atlas]) -> Atlas:
    """One atlas of all cells; of a cell that several have the first result that ran or was refused.
    Raises UsageError for unlike machines, ProfharnessError for atlases that disagree.
    """
    first, *others = atlases
    for other in others:
        for name in VERSIONS:
            old, new = getattr(first.machine, name), getattr(other.machine, name)
            if old != new:
                raise UsageError(
                    f"{first.source or 'the first'} is of {name} {old}, {other.source or 'another'} "
                    f"of {new}; an atlas is of one machine, so they are not mixed"
                )
    for number, later in enumerate(atlases):
        for earlier in atlases[:number]:
            if clash := clash_of(earlier, later):
                raise ProfharnessError(
                    f"{earlier.source} and {later.source} are not mixed: {clash.text}"
                )
    cells = chain.from_iterable(atlas.cells() for atlas in atlases)
    kept = sorted(cells, key=lambda cell: cell.status not in SETTLED)  # keeps the order otherwise
    return atlas_of(first.machine, kept, first.source)


def add(atlas: Atlas, folder: Path, entries: Sequence[Entry]) -> tuple[Path | None, int]:
    """Put the cells of an atlas that neither the package's nor a user's own of the same machine has into the
    user's own; its file, and how many cells are new. Nothing is written where none is. Raises
    UsageError for a machine that is none, and what `merge` raises.
    """
    source = atlas.source or "the atlas"
    if fault := machine_fault(asdict(atlas.machine)):
        raise UsageError(f"{source}: {fault}")
    like = [entry for entry in entries if same_machine(entry.atlas.machine, atlas.machine)]
    for entry in like:
        if clash := clash_of(entry.atlas, atlas):
            raise ProfharnessError(
                f"{source} is not added to {entry.name} ({entry.origin}), for the two disagree: "
                f"{clash.text}"
            )
    known = [entry.atlas for entry in like]
    new = [cell for cell in atlas.cells() if not any(_has(each, cell) for each in known)]
    if not new:
        return None, 0
    path = folder / f"{atlas.machine.name}{SUFFIX}"
    own = next((each.atlas for each in like if each.path == path), None)
    others = [atlas_of(atlas.machine, new, source)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}; give --atlas") from None
    write_atlas(merge([own, *others] if own else others), path, force=True)
    return path, len(new)


def _has(atlas: Atlas, cell: AtlasCell) -> bool:
    """Whether an atlas has a result of that cell that says something."""
    known = atlas.find(cell.config, cell.backend)
    return known is not None and (known.status in SETTLED or cell.status not in SETTLED)


def lines_of(atlas: Atlas) -> Iterator[str]:
    """A shard's lines, which `add` takes again."""
    machine = asdict(atlas.machine)
    machine["torch_cuda"] = machine.pop("cuda")
    head = {"atlas": SHARD_VERSION, "environment": machine | {"device_type": "cuda"}}
    yield json.dumps(head) + "\n"
    for cell in atlas.cells():
        row: dict[str, Any] = {"config": cell.config.label}
        names = ("backend", "regime", "status", "choice", "graph_us", "peak_bytes", "message")
        row |= {name: getattr(cell, name) for name in names}
        if cell.launches:
            row |= {"kernel_us": cell.kernel_us}
            row |= {"kernel_us_each": [launch.time_us for launch in cell.launches]}
            row |= {"kernels": [launch[:5] for launch in cell.launches]}
        yield json.dumps(row, separators=(",", ":")) + "\n"


def atlases_of_store(store: Store, run: str = ALL_RUNS) -> list[Atlas]:
    """An atlas for each machine that stored captures of PyTorch's own backends are of; a cell of an older
    run counts where no newer one has it. Raises NotFoundError where no run has such cells on a GPU.
    """
    names = [row.run for row in store.runs()] if run == ALL_RUNS else [store.resolve(run)]
    found: dict[Machine, list[AtlasCell]] = {}
    for name in names:
        environment = store.environment(name)
        if environment.get("device_type") != "cuda" or not environment.get("gpu"):
            continue
        machine = machine_of(environment)
        found.setdefault(machine, []).extend(_cells_of_run(store, name))
    kept = {machine: cells for machine, cells in found.items() if cells}
    if not kept:
        what = "the store" if run == ALL_RUNS else f"run {names[0]}"
        raise NotFoundError(
            f"{what} has no cells of auto, {', '.join(SDPA_BACKENDS)} with kernels on a GPU; "
            "`profharness capture` on one makes some"
        )
    return [
        atlas_of(machine, cells, f"the store's {machine.name}") for machine, cells in kept.items()
    ]


def _cells_of_run(store: Store, run: str) -> Iterator[AtlasCell]:
    """The cells of PyTorch's own backends that ran, with kernels, or were refused."""
    launches: list[LaunchRow] = of_first_profiler(store.launches(run))
    by_cell: dict[str | None, list[LaunchRow]] = {}
    for launch in launches:
        by_cell.setdefault(launch.cell, []).append(launch)
    for cell in store.cells(run):
        if cell.backend not in (AUTO, *SDPA_BACKENDS) or cell.status not in SETTLED:
            continue
        own = by_cell.get(cell.cell, [])
        if own or cell.status == "refused":
            yield _cell(cell, own)


def _cell(cell: CellRow, launches: Iterable[LaunchRow]) -> AtlasCell:
    """The cell with the launches of most of its calls, and medians of their times."""
    ordered = sorted(launches, key=lambda launch: (launch.iteration or 0, launch.start_ns))
    calls = [list(call) for _, call in groupby(ordered, key=lambda launch: launch.iteration)]
    kinds = Counter(tuple(map(_kind, call)) for call in calls)
    usual = kinds.most_common(1)[0][0] if kinds else ()
    alike = [call for call in calls if tuple(map(_kind, call)) == usual]
    times = [[each.duration_ns for each in call if each.duration_ns is not None] for call in alike]
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
    """The fields of a Launch but for its time."""
    grid = triple(launch.grid_x, launch.grid_y, launch.grid_z)
    block = triple(launch.block_x, launch.block_y, launch.block_z)
    return launch.kernel, grid, block, launch.registers_per_thread, launch.shared_bytes
