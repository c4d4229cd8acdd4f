"""The Python interface: the commands as plain functions that return pandas DataFrames."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import profharness.store as stores
from profharness import jobs
from profharness.answers.agreement import with_predictions
from profharness.commands._types import ConfigLike, Names, PathLike, config_list, store_path
from profharness.config import split_names
from profharness.errors import UsageError
from profharness.files import (
    RUNS_FOLDER,
)
from profharness.jobs.parallel_ingest import ingested
from profharness.jobs.progress import shown
from profharness.profilers.ncu_metrics import metric_names
from profharness.rows import (
    TRACE_PROFILERS,
    CellRow,
    LaunchRow,
    of_first_profiler,
)
from profharness.run import (
    CaptureOptions,
    Fleet,
    Protocol,
    gpu_classes,
)
from profharness.scrub import scrub
from profharness.store import open_store

if TYPE_CHECKING:
    import pandas as pd


ALL = "all"
OBSERVER = "profharness.observer.in_process"  # by name: nothing of the package imports it
# What a frame of kernels begins with, since pandas shows the first and the last columns only.
KERNEL_COLUMNS = (
    *("config", "backend", "kernel_short", "launches_per_call", "duration_ns", "total_ns", "share"),
)


def profiler_tuple(names: Names) -> tuple[str, ...]:
    """The profilers that leave traces; empty for every one. Raises UsageError for another name."""
    profilers = split_names(names)
    for name in profilers:
        if name not in (ALL, *TRACE_PROFILERS):
            raise UsageError(
                f"no launches of a profiler {name!r}; known are {', '.join(TRACE_PROFILERS)}, {ALL}"
            )
    return () if ALL in profilers else profilers


def capture(
    configs: ConfigLike = None,
    backends: Names = (),
    *,
    profilers: Names = CaptureOptions.profilers,
    store: PathLike | None = None,
    out: PathLike = RUNS_FOLDER,
    iterations: int = Protocol.iterations,
    warmup: int = Protocol.warmup,
    samples: int = Protocol.samples,
    timeout_s: float = Protocol.timeout_s,
    seed: int = Protocol.seed,
    device: str = Protocol.device,
    note: str | None = None,
    metrics: Names = (),
    sections: Names = (),
    processes: int = Protocol.processes,
    python: Names = (),
    scheduler: str | None = None,
    gpu: Names = (),
    progress: bool | None = None,
) -> pd.DataFrame:
    """Run configs on backends in a worker process, ingest the run, and return one row per cell.

    configs are grammar texts ("2,8,512,64,bf16"), Config objects or a list of them, None for an
    everyday set (`profharness capture` prints it); without backends, or for `all`, PyTorch's own on
    this machine's device run; `kernels` stands for what lies in kernels/. metrics (`tensor`,
    `memory`, `cache`, `stalls`, or ncu's own names) and sections are what ncu takes besides its
    default ones. Each cell is timed in so many processes, and profiled in the first. python:
    interpreters whose torch is measured, with a run and rows of its own each. scheduler: where lanes
    run, as --scheduler takes it; gpu: classes that each have a run. Failed and refused
    cells are rows with their status and message. progress: a line that tells how far it is; None:
    on a terminal and in a notebook. Raises UsageError for what cannot be meant, CaptureError when
    no worker starts.
    """
    counters = metric_names(split_names(metrics)), split_names(sections)
    protocol = Protocol(iterations, warmup, samples, timeout_s, seed, device, *counters, processes)
    fleet = Fleet(scheduler, gpu_classes(gpu))
    options = CaptureOptions(split_names(profilers), Path(out), protocol, note, fleet=fleet)
    everyday = () if configs is not None else jobs.everyday_configs(device).values()
    asked, path = config_list(configs) or [*everyday], store_path(store)
    what = asked, split_names(backends), path, options
    if pythons := split_names(python):
        listener = jobs.Listener(progress=lambda: shown(progress))
        runs = [done.run.run for done in jobs.capture_with_each(pythons, *what, listener)]
        return pd.concat([cells(run, store=path) for run in runs], ignore_index=True)
    with shown(progress) as show:
        captured = jobs.capture_into_store(*what, show)
    each = [cells(done.run.run, store=path) for done in (captured, *captured.others)]
    return pd.concat(each, ignore_index=True) if len(each) > 1 else each[0]


def resume(
    run: PathLike,
    *,
    store: PathLike | None = None,
    out: PathLike = RUNS_FOLDER,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Do the cells of an interrupted run that have no result; one row per cell, as `capture`. run is
    a run folder, or an id, a unique prefix or `latest` below out. Raises NotFoundError.
    """
    path = store_path(store)
    folder = jobs.find_run_folder(os.fspath(run), Path(out))
    with shown(progress) as show:
        captured = jobs.resume_into_store(folder, path, show)
    return cells(captured.run.run, store=path)


def observe() -> contextlib.AbstractContextManager[Any]:
    """Record the attention calls of a `with` block in this process: of what it yields, `calls` has a
    dict a kind of call and `backends` the set of those that ran. Loads torch. A name that was imported
    from torch.nn.functional before the first such block keeps the builtin, and is not seen.
    """
    block: contextlib.AbstractContextManager[Any] = import_module(OBSERVER).observe()
    return block


def ingest(
    *sources: PathLike, scheduler: str | None = None, store: PathLike | None = None
) -> pd.DataFrame:
    """Take traces and run folders into the store; one row per run, status new, unchanged or replaced.
    scheduler: `local` is a process a CPU. Raises TraceFormatError; the file that raises leaves the store as it was.
    """
    results = ingested(store_path(store), map(Path, sources), scheduler)
    return stores.to_frame(results, stores.IngestResult)


def cells(
    run: str | None = None,
    *,
    configs: ConfigLike = None,
    backends: Names = (),
    store: PathLike | None = None,
) -> pd.DataFrame:
    """One row per cell of a run (None: the latest; "all"): status, reasons, latency samples."""
    with open_store(store_path(store)) as opened:
        rows = opened.cells(
            run, configs=config_list(configs) or None, backends=split_names(backends) or None
        )
        return stores.to_frame(with_predictions(opened, rows), CellRow)


def launches(
    run: str | None = None,
    *,
    cell: str | None = None,
    profiler: str | None = None,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """Every single launch of a run, in order of its start; of one profiler (torch, nsys, ncu; None: the
    first of them that the run has), or with `all` of every one. Raises UsageError for a profiler
    that is not known.
    """
    watched = None if profiler in (None, ALL) else str(profiler)
    profiler_tuple(watched or ())
    with open_store(store_path(store)) as opened:
        rows = list(opened.launches(run, profiler=watched, cell=cell))
    return stores.to_frame(of_first_profiler(rows) if profiler is None else rows, LaunchRow)


def scrub_run(
    source: PathLike,
    path: PathLike | None = None,
    *,
    force: bool = False,
    store: PathLike | None = None,
) -> Path:
    """A copy of a run or a trace that is fit to publish; where it lies. source: a run folder, a file,
    or a stored run. path None: `<name>-scrubbed` beside the source. Raises what `scrub` raises.
    """
    original = jobs.find_source(str(source), store_path(store))
    return scrub(original, None if path is None else Path(path), force=force).output


def query(
    sql: str,
    params: Sequence[Any] | Mapping[str, Any] = (),
    *,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """Any SELECT on the store, for example on the views kernel_launches and kernel_summary. Raises
    UsageError for other SQL.
    """
    with open_store(store_path(store)) as opened:
        return stores.query(opened, sql, params)


def _frame(
    records: Iterable[Mapping[str, Any]], columns: list[str] | None = None, **attributes: Any
) -> pd.DataFrame:
    """A frame of the records, with the attributes in its `attrs`."""
    frame = stores.frame(list(records), columns)
    frame.attrs |= attributes
    return frame
