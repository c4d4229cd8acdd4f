"""Analyses of stored cells as one step: which run answers, with which peaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profharness.analysis import CellAnalysis, analyze_all, machine_of
from profharness.config import Config
from profharness.errors import NotFoundError, UsageError
from profharness.peaks import DATA_SHEET
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
        device = _device(store, name)
    if not cells:
        asked = ", ".join([*(config.label for config in configs), *backends]) or "captured cells"
        raise NotFoundError(f"run {name} has none of: {asked}; profharness.capture(…) makes them")
    if peaks == MEASURE:
        _measure(path, device)
    with open_store(path) as store:
        found = store.peaks(name, DATA_SHEET if peaks == TABLE else None)
        machine = machine_of(store.environment(name), store.devices(name), found)
        rows = store.kernels(name, configs=configs or None, backends=backends or None)
        return analyze_all(cells, rows, machine, store.wrong(name), store.cells(name))


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


def _device(store: Store, run: str) -> str | None:
    from profharness.store.peaks import device_name

    return device_name(store.environment(run))


def _measure(path: Path, device: str | None) -> None:
    """Measure here and keep it; the cells must have run on such a device."""
    from profharness.runner.peaks import measure_peaks

    measured = measure_peaks()
    if measured.peaks.device != device:
        raise UsageError(
            f"peaks={MEASURE!r}: this machine has {measured.peaks.device}, the cells ran on "
            f"{device}; measure there, or use peaks={TABLE!r}"
        )
    with open_store(path, write=True) as store:
        store.add_peaks(measured.peaks, measured.created, measured.environment)
