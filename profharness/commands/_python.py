"""The functions of the Python interface that are not commands."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import profharness.store as stores
from profharness.attention.config import split_names
from profharness.commands._runs import find_one
from profharness.commands._types import (
    EVERY_PROFILER,
    ConfigLike,
    Names,
    PathLike,
    config_list,
    require_profilers,
    store_path,
)
from profharness.errors import UsageError
from profharness.measurements.agreement import with_predictions
from profharness.rows import CellRow, LaunchRow, preferred_profiler_rows
from profharness.store import open_store

if TYPE_CHECKING:
    import pandas as pd

# a string, because no module of the package may import the observer
OBSERVER = "profharness.recording.observer.wrapper"


def observe() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that records the attention calls in its block.

    This function imports torch. The context manager yields an object with two attributes: `calls`
    has one dict per kind of call, and `backends` is the set of backends that ran. A function that was
    imported by name from torch.nn.functional before the first block is not recorded.
    """
    block: contextlib.AbstractContextManager[Any] = import_module(OBSERVER).observe()
    return block


def cells(
    run: PathLike | None = None,
    *,
    configs: ConfigLike = None,
    backends: Names | None = None,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """Return one row per cell of a run, with status, refusals and latency samples.

    `run` is a trace file, a run folder, the name of an ingested file, a run id, a unique prefix of a run
    id, `latest`, `latest~1` or `all`. None means the latest run. Raise UsageError if `configs` or
    `backends` is empty.
    """
    chosen = config_list(configs) or None
    names = None if backends is None else split_names(backends)
    if names == ():
        raise UsageError("backends is empty")
    path = store_path(store)
    found = find_one(run, path)
    with open_store(path) as opened:
        rows = opened.cells(found, configs=chosen, backends=names)
        return stores.to_frame(with_predictions(opened, rows), CellRow)


def launches(
    run: PathLike | None = None,
    *,
    cell: str | None = None,
    profiler: str | None = None,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """Return all launches of a run, ordered by start time.

    `profiler` is `torch`, `nsys`, `ncu` or `all`. None means the first profiler in this list that
    recorded launches in the run. Raise UsageError for an unknown profiler.
    """
    watched = None if profiler in (None, EVERY_PROFILER) else str(profiler)
    require_profilers(watched or ())
    path = store_path(store)
    found = find_one(run, path)
    with open_store(path) as opened:
        rows = list(opened.launches(found, profiler=watched, cell=cell))
    return stores.to_frame(preferred_profiler_rows(rows) if profiler is None else rows, LaunchRow)


def query(
    sql: str,
    params: Sequence[Any] | Mapping[str, Any] = (),
    *,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """Return the result of a SELECT statement on the store. Raise UsageError for any other SQL.

    The store has tables, and views such as `kernel_launches` and `kernel_summary`.
    """
    with open_store(store_path(store)) as opened:
        return stores.query(opened, sql, params)
