"""The Python interface: the commands as plain functions that return pandas DataFrames."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import profharness.store as stores
from profharness import jobs, stats
from profharness.answers.agreement import predicted_rows, with_predictions
from profharness.answers.analyze.figures import FIELDS, analyze_record
from profharness.answers.analyze.programs import analyze_selected
from profharness.answers.atlas.answer import flat_record as predicted_flat
from profharness.answers.atlas.catalog import predicted
from profharness.answers.bench.rows import BenchRow
from profharness.answers.diff.answer import diff_cells
from profharness.answers.diff.sides import find_sides
from profharness.answers.explain.answer import explain_all
from profharness.answers.explain.rules import asked_about, flat_record, named_places
from profharness.answers.export import find_exported, write_run_file
from profharness.answers.ranks import compare_ranks
from profharness.answers.repro import asked_cell, repro_script, stored_cell
from profharness.backends import stored_names
from profharness.cases import VerificationRow
from profharness.config import AUTO, Config, expand_configs, split_names
from profharness.dispatch.machine import release_text, skipped_releases
from profharness.doctor import Check, run_checks
from profharness.errors import UsageError
from profharness.files import (
    DEFAULT_STORE,
    RUNS_FOLDER,
    STORE_VARIABLE,
    atomic_file,
    check_output,
)
from profharness.jobs.progress import shown
from profharness.jobs.side_by_side import ingested
from profharness.profilers.ncu_metrics import metric_names
from profharness.rows import (
    TRACE_PROFILERS,
    CellRow,
    KernelRow,
    LaunchRow,
    RunRow,
    of_first_profiler,
)
from profharness.run import (
    BenchOptions,
    BenchPlan,
    CaptureOptions,
    Fleet,
    Protocol,
    VerifyOptions,
    gpu_classes,
    require_device,
)
from profharness.runner.probe import BackendState, probe_backends, probe_environment
from profharness.scrub import scrub
from profharness.store import KERNELS_ELSE_CELLS, Selection, open_store
from profharness.views.diff import FIELDS as DIFF_FIELDS
from profharness.views.explain_kernel import described, name_record
from profharness.views.ranks import ranks_document
from profharness.views.renderers import RENDERERS
from profharness.views.report import report_document

if TYPE_CHECKING:
    import pandas as pd


PathLike = str | os.PathLike[str]
Names = str | Sequence[str]
Configs = str | Config | Iterable[str | Config] | None


ALL = "all"
OBSERVER = "profharness.observer.seen"  # by name: nothing of the package imports it
# What a frame of kernels begins with, since pandas shows the first and the last columns only.
KERNEL_COLUMNS = (
    *("config", "backend", "kernel_short", "launches_per_call", "duration_ns", "total_ns", "share"),
)


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
    is_single = isinstance(configs, str | Config) or not isinstance(configs, Iterable)
    items: list[Any] = [configs] if is_single else [*configs]  # type: ignore[misc]
    expanded: list[list[Config]] = []
    for item in items:
        if not isinstance(item, str | Config):
            raise UsageError(f"{item!r} is no config; write text as in '2,8,512,64', or a Config")
        expanded.append([item] if isinstance(item, Config) else expand_configs(item))
    return list(dict.fromkeys(config for group in expanded for config in group))


def capture(
    configs: Configs = None,
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


def runs(*, store: PathLike | None = None) -> pd.DataFrame:
    """One row per stored run, the newest first."""
    with open_store(store_path(store)) as opened:
        return stores.to_frame(opened.runs(), RunRow)


def ranks(
    *refs: PathLike, threshold: float = stats.THRESHOLD, store: PathLike | None = None
) -> pd.DataFrame:
    """One row per rank of a job: refs are runs or folders, none is the newest job. What sets ranks apart
    is in the frame's `attrs["findings"]`. Raises NotFoundError for fewer than two ranks.
    """
    with open_store(store_path(store)) as opened:
        document = ranks_document(compare_ranks(opened, [str(ref) for ref in refs], threshold))
    return _frame(document.records, list(document.fields), findings=document.extra["findings"])


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
        return stores.to_frame(with_predictions(opened, rows), CellRow)


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
    the configs. profilers: torch, nsys and ncu, or `all`; none: of each run the first of them that
    it has, so that no kernel counts twice. Raises NotFoundError if nothing answers (`capture` makes
    an answer), UsageError for a profiler that is not known.
    """
    named = profiler_tuple(profilers)
    backends = stored_names(split_names(backends))
    selection = Selection(run, config_list(configs), backends, named)
    rows, _ = predicted_rows(store_path(store), selection, needs=KERNELS_ELSE_CELLS)
    frame = stores.to_frame(rows if profilers else of_first_profiler(rows), KernelRow)
    return frame[[*KERNEL_COLUMNS, *(name for name in frame.columns if name not in KERNEL_COLUMNS)]]


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


def diff(
    baseline: str,
    candidate: str,
    *,
    configs: Configs = None,
    threshold: float | None = None,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """Paired rows of two sides (RUN, RUN:BACKEND, or a backend of the latest run) with verdicts.

    What changed in the environment is in the frame's `attrs["environment"]`, and the layers of two
    programs that were traced in `attrs["layers"]`; peak memory, launches and refusals of both sides
    in `attrs["costs"]`.
    """
    chosen = config_list(configs)
    with open_store(store_path(store)) as opened:
        sides = find_sides(opened, baseline, candidate, chosen)
    record = diff_cells(
        *sides, threshold=stats.THRESHOLD if threshold is None else threshold
    ).to_json()
    beside = {name: list(record.get(name, ())) for name in ("environment", "layers", "costs")}
    return _frame(record["rows"], list(DIFF_FIELDS), **beside)


def explain(
    configs: Configs,
    *,
    backend: str = AUTO,
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

    Without torch and gpu, PyTorch on this machine is asked. torch ("2.8", "2.0..2.15") and gpu
    ("RTX A6000") name another machine, for which the rules answer. backend is `auto`, or a set or an
    order to ask about instead (`flash+math`, `cudnn>flash`). `<backend>_eligible` is missing where it
    is not known; `<backend>_reasons` are codes, the one that PyTorch stops at first. The whole answers
    are in the frame's `attrs["answers"]`, the releases of a range that the rules do not know in
    `attrs["unknown_releases"]`.
    """
    chosen = config_list(configs)
    if not chosen:
        raise UsageError("explain needs a config, as in '2,8,512,64,bf16'")
    require_device(device)
    places = named_places(torch, gpu, cudnn, cuda, cudnn_compiled)
    asked, other = asked_about(split_names(backend))
    if other:
        raise UsageError(
            f"explain asks about auto, a set or an order of backends, not {other[0]!r}"
        )
    answers = explain_all(
        chosen, places, device=device, timeout_s=timeout_s, store=store_path(store), asked=asked
    )
    unknown = [release_text(release) for release in skipped_releases(torch or "")]
    return _frame(map(flat_record, answers), answers=answers, unknown_releases=unknown)


def predict(
    configs: Configs,
    backends: Names = (),
    *,
    gpu: str | None = None,
    torch: str | None = None,
    atlas: PathLike | None = None,
) -> pd.DataFrame:
    """What a GPU does with configs, by its atlas: one row per config and backend, times in ns.

    gpu None: this machine's where it has an atlas, else the only one that has. torch None: the newest
    release of its atlases. atlas: the folder of your own. `source` is `measured`, `model` or `floor`,
    where low_ns is the roofline bound and there is no time. Kernels are short names; whole rows are in
    `attrs["answers"]`, the machine in `attrs["place"]`. Raises UsageError.
    """
    found = predicted(config_list(configs), split_names(backends), gpu, torch, atlas)
    place, rows = found.place, [row for answer in found.answers for row in found.of(answer)]
    return _frame(map(predicted_flat, rows), answers=rows, place=place.text, doubt=found.doubt)


def explain_kernel(names: Names) -> pd.DataFrame:
    """One row per name of a kernel: what made it, what its parts mean, and what it leaves open.

    A name is whole, mangled or demangled, or short as `kernels` has it. Raises UsageError for an
    empty one.
    """
    texts = [names] if isinstance(names, str) else [*names]
    return _frame([name_record(description) for description in described(texts)])


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
    analyses = analyze_selected(store_path(store), selection, peaks, warnings.warn)
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
    scheduler: str | None = None,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Hold backends and implementations against an fp64 reference: one row per check, `passed`
    False where one is wrong, None where it was skipped. `all` are PyTorch's own backends on this
    device, `kernels` what lies in kernels/; without backends both. progress and scheduler as for `capture`.
    Raises UsageError, CaptureError when no worker starts.
    """
    protocol = Protocol(timeout_s=timeout_s, seed=seed, device=device)
    options = VerifyOptions(split_names(cases), grad, Path(out), protocol, Fleet(scheduler))
    with shown(progress) as show:
        verified = jobs.verify_into_store(
            config_list(configs), split_names(backends), store_path(store), options, show
        )
    return stores.to_frame(verified.rows, VerificationRow)


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
    processes: int = BenchOptions.processes,
    convention: str = BenchOptions.convention,
    seed: int = BenchOptions.seed,
    timeout_s: float = Protocol.timeout_s,
    device: str = Protocol.device,
    store: PathLike | None = None,
    out: PathLike = RUNS_FOLDER,
    scheduler: str | None = None,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Time the backends of each config in turns: one row per cell and measurement, times in ns.

    Backends, scheduler and progress are as for `capture`. With run nothing is measured, a stored run answers.
    baseline is a backend or a config that speed-ups are told against. precision None: 0.01, or what the
    stored run was measured with. The whole answer is in the
    frame's `attrs["answer"]`. Raises UsageError, or CaptureError when no worker starts.
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
        processes=processes,
        convention=convention,
        seed=seed,
        timeout_s=timeout_s,
        device=device,
        out=Path(out),
        fleet=Fleet(scheduler),
    )
    listener = jobs.Listener(progress=functools.partial(shown, progress))
    answer = jobs.bench(options, store_path(store), listener)
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
        name = find_exported(opened, run, profiler)
        return write_run_file(opened, name, Path(path), profiler=profiler, force=force)


def report(
    *runs: str,
    path: PathLike | None = None,
    format: str | None = None,
    bench: bool | None = None,
    store: PathLike | None = None,
    force: bool = False,
) -> str:
    """A report on stored runs (none: the latest) as text: html, md, json, jsonl or csv. With a path
    the text is written there too, and the name's suffix stands for the format. bench: with
    intervals, rates and doubts; None: for runs that `bench` made. HTML has charts, which need the
    extra `report`. Raises NotFoundError, UsageError.
    """
    suffix = Path(path).suffix[1:].lower() if path is not None else "html"
    name = format or {"htm": "html"}.get(suffix, suffix)
    if name not in RENDERERS:
        raise UsageError(f"no format {name!r} of a report; known are {', '.join(RENDERERS)}")
    if path is not None:
        check_output(Path(path), force=force)
    with open_store(store_path(store)) as opened:
        text = RENDERERS[name](report_document(opened, runs or ("latest",), bench=bench))
    if path is not None:
        with atomic_file(Path(path), force=force) as file:
            file.write(text.encode())
    return text


def repro(
    configs: Configs = None,
    backend: str = "",
    *,
    run: str | None = None,
    seed: int | None = None,
    device: str = "auto",
    output: PathLike | None = None,
    force: bool = False,
    store: PathLike | None = None,
) -> str:
    """One cell as a Python script that needs torch alone, also written to output.

    Without run, config and backend (`auto`, if left out) say what to call, and no store is read;
    with it they choose a cell of that run. seed and device: None and `auto` for those of the run.
    Raises UsageError unless one cell is meant.
    """
    require_device(device)
    if output is not None:
        check_output(Path(output), force=force)
    asked, names = config_list(configs), split_names(backend)
    if run is None:
        cell = asked_cell(asked, names)
    else:
        with open_store(store_path(store)) as opened:
            cell = stored_cell(opened, Selection(run, asked, stored_names(names)))
    cell = dataclasses.replace(
        cell,
        device=cell.device if device == "auto" else device,
        seed=cell.seed if seed is None else seed,
    )
    text = repro_script(cell)
    if output is not None:
        with atomic_file(Path(output), force=force) as file:
            file.write(text.encode())
    return text


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


def list_backends() -> pd.DataFrame:
    """One row per backend: whether it runs here, tried on one small config, and why not."""
    return stores.to_frame(probe_backends(), BackendState)


def run_doctor(*, store: PathLike | None = None) -> pd.DataFrame:
    """One row per check of what is installed and works, with its state and remedy."""
    return stores.to_frame(run_checks(store_path(store), probe_environment), Check)


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
