"""The Python interface: the commands as plain functions that return pandas DataFrames."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import profharness.store as stores
from profharness import jobs, stats
from profharness.answers.agreement import with_predictions
from profharness.answers.analyze.answer import analyze_stored
from profharness.answers.analyze.figures import FIELDS, analyze_record
from profharness.answers.bench.rows import BenchRow
from profharness.answers.diff.answer import diff_cells, find_side
from profharness.answers.explain.answer import explain_all
from profharness.answers.explain.rules import flat_record, named_places
from profharness.answers.export import write_run_file
from profharness.config import Config, expand_configs, split_names
from profharness.errors import UsageError
from profharness.files import DEFAULT_STORE, RUNS_FOLDER, STORE_VARIABLE
from profharness.rows import TRACE_PROFILERS
from profharness.run import BenchOptions, BenchPlan, CaptureOptions, Protocol, VerifyOptions
from profharness.store import Selection, open_store

if TYPE_CHECKING:
    import pandas as pd


PathLike = str | os.PathLike[str]
Names = str | Sequence[str]
Configs = str | Config | Iterable[str | Config] | None


ALL = "all"


def store_path(store: PathLike | None) -> Path:
    """The store that is meant; None: the one of the environment, else of the working directory."""
    return Path(store if store is not None else os.environ.get(STORE_VARIABLE, DEFAULT_STORE))


def profiler_tuple(names: Names) -> tuple[str, ...]:
    """The profilers that leave traces; empty for every one. Raises UsageError for another name."""
    profilers = split_names(names)
    for name in profilers:
        if name not in (ALL, *TRACE_PROFILERS):
            raise UsageError(
                f"no launches of a profiler {name!r}; known are {', '.join(TRACE_PROFILERS)}, {ALL}"
            )
    return () if ALL in profilers else profilers


def config_list(configs: Configs) -> list[Config]:
    """Configs, each once, of grammar texts; empty for None. Raises UsageError for another text."""
    if configs is None:
        return []
    items = [configs] if isinstance(configs, str | Config) else configs
    expanded = [[item] if isinstance(item, Config) else expand_configs(item) for item in items]
    return list(dict.fromkeys(config for group in expanded for config in group))


def capture(
    configs: Configs,
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
) -> pd.DataFrame:
    """Run configs on backends in a worker process, ingest the run, and return one row per cell.

    configs are grammar texts ("2,8,512,64,bf16"), Config objects or a list of them; without
    backends, or for `all`, PyTorch's own on this machine's device run; `kernels` stands for what
    lies in kernels/. metrics and sections are what ncu takes besides its default ones. Failed and
    refused cells are rows with their status and message. Raises UsageError for what cannot be
    meant, CaptureError when no worker starts.
    """
    counts = iterations, warmup, samples
    counters = split_names(metrics), split_names(sections)
    protocol = Protocol(*counts, float(timeout_s), seed, device, *counters)
    options = CaptureOptions(split_names(profilers), Path(out), protocol, note)
    path = store_path(store)
    captured = jobs.capture_into_store(config_list(configs), split_names(backends), path, options)
    return cells(captured.run.run, store=path)


def ingest(*sources: PathLike, store: PathLike | None = None) -> pd.DataFrame:
    """Take traces and run folders into the store; one row per run, status new, unchanged or
    replaced. Raises TraceFormatError; the file that raises leaves the store as it was.
    """
    path = store_path(store)
    return stores.to_frame(
        [result for source in sources for result in stores.ingest_path(path, Path(source))]
    )


def runs(*, store: PathLike | None = None) -> pd.DataFrame:
    """One row per stored run, the newest first."""
    with open_store(store_path(store)) as opened:
        return stores.to_frame(opened.runs())


def cells(
    run: str | None = None,
    *,
    configs: Configs = None,
    backends: Names = (),
    store: PathLike | None = None,
) -> pd.DataFrame:
    """One row per cell of a run (None: the latest; "all"): status, reasons, latency samples."""
    with open_store(store_path(store)) as opened:
        rows = opened.cells(
            run, configs=config_list(configs) or None, backends=split_names(backends) or None
        )
        return stores.to_frame(with_predictions(opened, rows))


def kernels(
    configs: Configs = None,
    *,
    run: str | None = None,
    backends: Names = (),
    profilers: Names = (),
    store: PathLike | None = None,
) -> pd.DataFrame:
    """One row per kernel and launch configuration of each cell, from the store only.

    run is an id, a unique prefix, latest, latest~1 or all; None means the latest run that has all
    the configs. profilers: torch, nsys and ncu; `all`, or none, is every one. Raises NotFoundError
    if nothing answers (`capture` makes an answer), UsageError for a profiler that is not known.
    """
    selection = Selection(
        run, config_list(configs), split_names(backends), profiler_tuple(profilers)
    )
    with open_store(store_path(store)) as opened:
        rows, _ = opened.rows(selection)
        return stores.to_frame(rows)


def launches(
    run: str | None = None,
    *,
    cell: str | None = None,
    profiler: str | None = None,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """Every single launch of a run, in order of its start; of one profiler (torch, nsys, ncu), or
    with None or `all` of every one. Raises UsageError for a profiler that is not known.
    """
    watched = None if profiler in (None, ALL) else str(profiler)
    profiler_tuple(watched or ())
    with open_store(store_path(store)) as opened:
        return stores.to_frame(list(opened.launches(run, profiler=watched, cell=cell)))


def diff(
    baseline: str,
    candidate: str,
    *,
    configs: Configs = None,
    threshold: float | None = None,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """Paired rows of two sides (RUN, RUN:BACKEND, or a backend of the latest run) with verdicts.

    What changed in the environment is in the frame's `attrs["environment"]`.
    """
    chosen = config_list(configs)
    with open_store(store_path(store)) as opened:
        sides = [find_side(opened, text, chosen) for text in (baseline, candidate)]
    record = diff_cells(
        *sides, threshold=stats.THRESHOLD if threshold is None else threshold
    ).to_json()
    return _frame(record["rows"], environment=list(record["environment"]))


def explain(
    configs: Configs,
    *,
    torch: str | None = None,
    gpu: str | None = None,
    cudnn: str | None = None,
    cuda: str | None = None,
    cudnn_compiled: str | None = None,
    device: str = Protocol.device,
    timeout_s: float = Protocol.timeout_s,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """Why PyTorch takes the backend that it takes: one row per config and release.

    Without torch and gpu, PyTorch on this machine is asked. torch ("2.8", "2.5..2.15") and gpu
    ("RTX A6000") name another machine, for which the rules answer. `<backend>_eligible` is missing
    where it is not known; `<backend>_reasons` are codes, the one that PyTorch stops at first. The
    whole answers are in the frame's `attrs["answers"]`.
    """
    places = named_places(torch, gpu, cudnn, cuda, cudnn_compiled)
    answers = explain_all(
        config_list(configs), places, device=device, timeout_s=timeout_s, store=store_path(store)
    )
    return _frame(map(flat_record, answers), answers=answers)


def analyze(
    configs: Configs = None,
    backends: Names | None = None,
    *,
    run: str | None = None,
    peaks: str | None = None,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """What holds each backend back, from stored rows: one row per cell, keys as in the JSON.

    run is as for `kernels`. `findings` and `remedies` are lists of dicts;
    `frame.explode("findings")` has one finding a row. Whole answers: `attrs["analyses"]`. What
    peaks may be, and errors: `analyze_stored`.
    """
    selection = Selection(run, config_list(configs), split_names(backends or ()))
    analyses = analyze_stored(store_path(store), selection, peaks)
    return _frame(map(analyze_record, analyses), list(FIELDS), analyses=analyses)


def verify(
    configs: Configs,
    backends: Names = (),
    *,
    grad: bool = False,
    cases: Names = VerifyOptions.cases,
    store: PathLike | None = None,
    out: PathLike = RUNS_FOLDER,
    timeout_s: float = Protocol.timeout_s,
    seed: int = Protocol.seed,
    device: str = Protocol.device,
) -> pd.DataFrame:
    """Hold backends and implementations against an fp64 reference: one row per check, `passed`
    False where one is wrong, None where it was skipped. `all` are PyTorch's own backends on this
    device, `kernels` what lies in kernels/; without backends both. Raises UsageError, CaptureError
    when no worker starts.
    """
    protocol = Protocol(timeout_s=float(timeout_s), seed=seed, device=device)
    options = VerifyOptions(split_names(cases), grad, Path(out), protocol)
    verified = jobs.verify_into_store(
        config_list(configs), split_names(backends), store_path(store), options
    )
    return stores.to_frame(verified.rows)


def bench(
    configs: Configs = None,
    backends: Names = (),
    *,
    run: str | None = None,
    baseline: str | None = None,
    dtypes: Names = (),
    measurements: Names = (),
    precision: float | None = None,
    max_time_s: float = BenchPlan.max_time_s,
    iterations: int | None = None,
    warmup: int = BenchOptions.warmup,
    convention: str = BenchOptions.convention,
    seed: int = BenchOptions.seed,
    timeout_s: float = Protocol.timeout_s,
    device: str = Protocol.device,
    store: PathLike | None = None,
    out: PathLike = RUNS_FOLDER,
) -> pd.DataFrame:
    """Time the backends of each config in turns: one row per cell and measurement, times in ns.

    Without backends, or for `all`, PyTorch's own on this device are timed; `kernels` stands for
    kernels/. With run nothing is measured, a stored run answers. precision None: 0.01, or what the
    stored run was measured with. The whole answer is in the frame's `attrs["answer"]`. Raises
    UsageError, or CaptureError when no worker starts.
    """
    options = BenchOptions(
        configs=config_list(configs),
        backends=split_names(backends),
        run=run,
        baseline=baseline,
        dtypes=split_names(dtypes),
        measurements=split_names(measurements),
        precision=precision,
        max_time_s=max_time_s,
        iterations=iterations,
        warmup=warmup,
        convention=convention,
        seed=seed,
        timeout_s=float(timeout_s),
        device=device,
        out=Path(out),
    )
    answer = jobs.bench(options, store_path(store))
    columns = [field.name for field in dataclasses.fields(BenchRow)]
    return _frame(map(dataclasses.asdict, answer.rows), columns, answer=answer)


def export(
    run: str,
    path: PathLike,
    *,
    profiler: str | None = None,
    store: PathLike | None = None,
    force: bool = False,
) -> int:
    """Write a run as a Chrome trace (gzip if the name ends in .gz); the number of launches in it.

    profiler: whose part of the run; `all`: every one; None: the first of torch, nsys and ncu.
    """
    with open_store(store_path(store)) as opened:
        name = opened.resolve(run)
        return write_run_file(opened, name, Path(path), profiler=profiler, force=force)


def query(
    sql: str,
    params: Sequence[Any] | Mapping[str, Any] = (),
    *,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """Any SELECT on the store, for example on the views kernel_launches and kernel_summary."""
    with open_store(store_path(store)) as opened:
        return stores.query(opened, sql, params)


def _frame(
    records: Iterable[dict[str, Any]], columns: list[str] | None = None, **attributes: Any
) -> pd.DataFrame:
    """A frame of the records, with the attributes in its `attrs`."""
    frame = stores.frame(list(records), columns)
    frame.attrs |= attributes
    return frame
