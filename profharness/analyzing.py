"""Analyses of stored cells as one step: which run answers, with which peaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profharness.analysis import CellAnalysis, analyze_all, machine_of
from profharness.config import Config
from profharness.errors import NotFoundError, UsageError
from profharness.peaks import DATA_SHEET
from profharness.rows import CellRow, KernelRow
from profharness.store import Store, open_store

MEASURE, TABLE = "measure", "data-sheet"
SOURCES = (MEASURE, TABLE)


def analyze_stored(
    path: Path,
    run: str | None = None,
    configs: Sequence[Config] = (),
    backends: Sequence[str] = (),
    peaks: str | None = None,
) -> list[CellAnalysis]:
    """The analyses of a run's cells, in its order; nothing is captured.

    run is an id, a unique prefix, latest or latest~1; None the latest that has all the configs.
    peaks: `data-sheet`, the built-in table; `measure`, this machine's device, measured now and
    kept in the store; None, what the store has measured, else the table. Raises NotFoundError if
    nothing answers, UsageError for other peaks or a device that the cells did not run on.
    """
    if peaks not in (None, *SOURCES):
        raise UsageError(f"no peaks {peaks!r}; known are {', '.join(SOURCES)}")
    with open_store(path) as store:
        name = _run_with(store, run, configs, backends)
        cells = store.cells(name, configs=configs or None, backends=backends or None)
        rows = store.kernels(name, configs=configs or None, backends=backends or None)
    if not cells:
        asked = ", ".join([*(config.label for config in configs), *backends]) or "captured cells"
        raise NotFoundError(f"run {name} has none of: {asked}; profharness.capture(…) makes them")
    if peaks == MEASURE:
        measure_here(path, cells)
    return analyze_rows(path, cells, rows, peaks)


def analyze_rows(
    path: Path, cells: Sequence[CellRow], rows: Sequence[KernelRow], peaks: str | None
) -> list[CellAnalysis]:
    """The analyses of cells of any runs with their kernels; peaks as for `analyze_stored`."""
    source = DATA_SHEET if peaks == TABLE else None
    found: list[CellAnalysis] = []
    with open_store(path) as store:
        for run in dict.fromkeys(cell.run for cell in cells):
            own = [cell for cell in cells if cell.run == run]
            mine = [row for row in rows if row.run == run]
            machine = machine_of(
                store.environment(run), store.devices(run), store.peaks(run, source)
            )
            found += analyze_all(own, mine, machine, store.wrong(run), store.cells(run))
    return found


def measure_here(path: Path, cells: Sequence[CellRow]) -> None:
    """Measure this machine's device and keep it in the store. Raises UsageError for cells that did
    not run on such a device.
    """
    from profharness.runner.peaks import measure_peaks
    from profharness.store.peaks import device_name

    with open_store(path) as store:
        devices = {device_name(store.environment(cell.run)) for cell in cells}
    measured = measure_peaks()
    if devices and measured.peaks.device not in devices:
        there = ", ".join(sorted(str(name) for name in devices))
        raise UsageError(
            f"peaks {MEASURE}: this machine has {measured.peaks.device}, the cells ran on {there}; "
            f"measure there, or take the {TABLE}"
        )
    with open_store(path, write=True) as store:
        store.add_peaks(measured.peaks, measured.created, measured.environment)


def _run_with(
    store: Store, run: str | None, configs: Sequence[Config], backends: Sequence[str]
) -> str:
    if run is not None or not configs:
        return store.resolve(run or "latest")
    found = store.latest_run_with(configs, backends or None)
    if found is None:
        labels = ", ".join(config.label for config in configs)
        raise NotFoundError(f"no stored run has {labels}; profharness.capture(…) makes one")
    return found
