"""The Python interface: the commands as plain functions that return pandas DataFrames."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profharness.config import Config, expand_configs
from profharness.errors import NotFoundError, UsageError
from profharness.rows import TRACE_PROFILERS

if TYPE_CHECKING:
    import pandas as pd

    from profharness.answers.bench.answer import Benched


PathLike = str | os.PathLike[str]
Configs = str | Config | Iterable[str | Config] | None


STORE_VARIABLE = "PROFHARNESS_STORE"
DEFAULT_STORE = "profharness.db"
ALL = "all"


def store_path(store: PathLike | None) -> Path:
    """The store that is meant; None: the one of the environment, else of the working directory."""
    return Path(store if store is not None else os.environ.get(STORE_VARIABLE, DEFAULT_STORE))


def name_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    """`"flash, math"` or `["flash", "math"]` -> `("flash", "math")`; empty names are left out."""
    words = names.split(",") if isinstance(names, str) else names
    return tuple(word.strip() for word in words if word.strip())


def backend_tuple(names: str | Sequence[str], device: str) -> tuple[str, ...]:
    """The names, with what `all` and `kernels` stand for on the device; empty for none."""
    from profharness.backends import expand_backends
    from profharness.jobs import default_backends

    found = name_tuple(names)
    return tuple(expand_backends(found, default_backends(device))) if found else ()


def profiler_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    """The profilers that leave traces; empty for every one. Raises UsageError for another name."""
    found = name_tuple(names)
    for name in found:
        if name not in (ALL, *TRACE_PROFILERS):
            raise UsageError(
                f"no launches of a profiler {name!r}; known are {', '.join(TRACE_PROFILERS)}, {ALL}"
            )
    return () if ALL in found else found


def config_list(configs: Configs) -> list[Config]:
    """Grammar texts expanded, each config once; empty for None. Raises UsageError for a text that
    is no config.
    """
    if configs is None:
        return []
    items = [configs] if isinstance(configs, str | Config) else list(configs)
    found: list[Config] = []
    for item in items:
        found += [item] if isinstance(item, Config) else expand_configs(item)
    return list(dict.fromkeys(found))


def capture(
    configs: Configs,
    backends: str | Sequence[str] = (),
    *,
    profilers: str | Sequence[str] = ("torch",),
    store: PathLike | None = None,
    out: PathLike = "traces/runs",
    iterations: int = 5,
    warmup: int = 3,
    samples: int = 30,
    timeout_s: float = 120.0,
    seed: int = 0,
    device: str = "auto",
    note: str | None = None,
    metrics: str | Sequence[str] = (),
    sections: str | Sequence[str] = (),
) -> pd.DataFrame:
    """Run configs on backends in a worker process, ingest the run, and return one row per cell.

    configs are grammar texts ("2,8,512,64,bf16"), Config objects or a list of them; without
    backends, or for `all`, PyTorch's own on this machine's device run; `kernels` stands for what
    lies in kernels/. metrics and sections are what ncu takes besides its default ones. Failed and
    refused cells are rows with their status and message. Raises UsageError for what cannot be
    meant, CaptureError when no worker starts.
    """
    from profharness.jobs import capture_into_store
    from profharness.run import Protocol
    from profharness.runner import CaptureOptions

    protocol = Protocol(
        *(iterations, warmup, samples, float(timeout_s), seed, device),
        metrics=name_tuple(metrics),
        sections=name_tuple(sections),
    )
    options = CaptureOptions(name_tuple(profilers), Path(out), protocol, note)
    path = store_path(store)
    captured = capture_into_store(
        config_list(configs), backend_tuple(backends, device), path, options
    )
    return cells(captured.run.run, store=path)


def ingest(*sources: PathLike, store: PathLike | None = None) -> pd.DataFrame:
    """Take traces and run folders into the store; one row per run, status new, unchanged or
    replaced. Raises TraceFormatError; the file that raises leaves the store as it was.
    """
    from profharness.store import ingest_path, to_frame

    path = store_path(store)
    return to_frame([result for source in sources for result in ingest_path(path, Path(source))])


def runs(*, store: PathLike | None = None) -> pd.DataFrame:
    """One row per stored run, the newest first."""
    from profharness.store import open_store, to_frame

    with open_store(store_path(store)) as opened:
        return to_frame(opened.runs())


def cells(
    run: str | None = None,
    *,
    configs: Configs = None,
    backends: str | Sequence[str] = (),
    store: PathLike | None = None,
) -> pd.DataFrame:
    """One row per cell of a run (None: the latest; "all"): status, reasons, latency samples."""
    from profharness.answers.prediction import with_predictions
    from profharness.store import open_store, to_frame

    wanted, named = config_list(configs) or None, name_tuple(backends) or None
    with open_store(store_path(store)) as opened:
        found = opened.cells(run, configs=wanted, backends=named)
        return to_frame(with_predictions(opened, found))


def kernels(
    configs: Configs = None,
    *,
    run: str | None = None,
    backends: str | Sequence[str] = (),
    profilers: str | Sequence[str] = (),
    store: PathLike | None = None,
) -> pd.DataFrame:
    """One row per kernel and launch configuration of each cell, from the store only.

    run is an id, a unique prefix, latest, latest~1 or all; None means the latest run that has all
    the configs. profilers: torch, nsys and ncu; `all`, or none, is every one. Raises NotFoundError
    if nothing answers (`capture` makes an answer), UsageError for a profiler that is not known.
    """
    from profharness.store import open_store, to_frame

    watched = profiler_tuple(profilers)
    wanted = config_list(configs)
    with open_store(store_path(store)) as opened:
        if run is None and wanted:
            run = opened.latest_run_with(wanted, name_tuple(backends) or None)
            if run is None:
                labels = ", ".join(config.label for config in wanted)
                raise NotFoundError(f"no stored run has {labels}; profharness.capture(…) makes one")
        rows = opened.kernels(
            run,
            configs=wanted or None,
            backends=name_tuple(backends) or None,
            profilers=watched or None,
        )
        return to_frame(rows)


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
    from profharness.store import open_store, to_frame

    watched = None if profiler in (None, ALL) else str(profiler)
    profiler_tuple(watched or ())
    with open_store(store_path(store)) as opened:
        return to_frame(list(opened.launches(run, profiler=watched, cell=cell)))


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
    import pandas as pd

    from profharness import stats
    from profharness.answers.diff.answer import diff_cells, find_side
    from profharness.store import open_store

    wanted = config_list(configs)
    with open_store(store_path(store)) as opened:
        sides = [find_side(opened, text, wanted) for text in (baseline, candidate)]
    found = diff_cells(*sides, threshold=stats.THRESHOLD if threshold is None else threshold)
    told = found.to_json()
    frame = pd.DataFrame(told["rows"])
    frame.attrs["environment"] = told["environment"]
    return frame


def explain(
    configs: Configs,
    *,
    torch: str | None = None,
    gpu: str | None = None,
    cudnn: str | None = None,
    cuda: str | None = None,
    cudnn_compiled: str | None = None,
    device: str = "auto",
    timeout_s: float = 120.0,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """Why PyTorch takes the backend that it takes: one row per config and release.

    Without torch and gpu, PyTorch on this machine is asked. torch ("2.8", "2.5..2.15") and gpu
    ("RTX A6000") name another machine, for which the rules answer. `<backend>_eligible` is missing
    where it is not known; `<backend>_reasons` are codes, the one that PyTorch stops at first. The
    whole answers are in the frame's `attrs["answers"]`.
    """
    import pandas as pd

    from profharness.answers.explain.answer import explain_all, flat_record, named_places

    places = named_places(torch, gpu, cudnn, cuda, cudnn_compiled)
    answers = explain_all(
        config_list(configs), places, device=device, timeout_s=timeout_s, store=store_path(store)
    )
    frame = pd.DataFrame([flat_record(answer) for answer in answers])
    frame.attrs["answers"] = answers
    return frame


def analyze(
    configs: Configs = None,
    backends: str | Sequence[str] | None = None,
    *,
    run: str | None = None,
    peaks: str | None = None,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """What holds each backend back, from stored rows: one row per cell, keys as in the JSON.

    `findings` and `remedies` are lists of dicts; `frame.explode("findings")` has one finding a row.
    Whole answers: `attrs["analyses"]`. What peaks may be, and errors: `analyzing.analyze_stored`.
    """
    import pandas as pd

    from profharness.answers.analyze.answer import analyze_stored
    from profharness.answers.analyze.model import FIELDS, analyze_record

    found = analyze_stored(
        store_path(store), run, config_list(configs), name_tuple(backends or ()), peaks
    )
    frame = pd.DataFrame(map(analyze_record, found), columns=list(FIELDS))
    frame.attrs["analyses"] = found
    return frame


def verify(
    configs: Configs,
    backends: str | Sequence[str] = (),
    *,
    grad: bool = False,
    cases: str | Sequence[str] = "standard",
    store: PathLike | None = None,
    out: PathLike = "traces/runs",
    timeout_s: float = 120.0,
    seed: int = 0,
    device: str = "auto",
) -> pd.DataFrame:
    """Hold backends and implementations against an fp64 reference: one row per check, `passed`
    False where one is wrong, None where it was skipped. `all` are PyTorch's own backends on this
    device, `kernels` what lies in kernels/; without backends both. Raises UsageError, CaptureError
    when no worker starts.
    """
    from profharness.jobs import default_backends, every_backend, verify_into_store
    from profharness.run import Protocol
    from profharness.runner.capture import VerifyOptions
    from profharness.store import to_frame

    protocol = Protocol(0, 0, 0, float(timeout_s), seed, device)
    options = VerifyOptions(name_tuple(cases), grad, Path(out), protocol)
    names = every_backend(name_tuple(backends), default_backends(device))
    verified = verify_into_store(config_list(configs), names, store_path(store), options)
    return to_frame(list(verified.rows))


def bench(
    configs: Configs = None,
    backends: str | Sequence[str] = (),
    *,
    run: str | None = None,
    baseline: str | None = None,
    dtypes: str | Sequence[str] = (),
    measurements: str | Sequence[str] = (),
    precision: float = 0.01,
    max_time_s: float = 10.0,
    iterations: int | None = None,
    warmup: int = 10,
    convention: str = "exact",
    seed: int = 42,
    timeout_s: float = 120.0,
    device: str = "auto",
    store: PathLike | None = None,
    out: PathLike = "traces/runs",
) -> pd.DataFrame:
    """Time the backends of each config in turns: one row per cell and measurement, times in ns.

    Without backends, or for `all`, PyTorch's own on this device are timed; `kernels` stands for
    kernels/. With run nothing is measured, a stored run answers. The whole answer is in the frame's
    `attrs["answer"]`. Raises UsageError, or CaptureError when no worker starts.
    """
    from profharness.answers.bench import answer as setup
    from profharness.answers.bench.answer import benched
    from profharness.backends import DEFAULT_BACKENDS
    from profharness.jobs import bench_into_store, default_backends
    from profharness.run import Protocol, make_plan
    from profharness.runner import CaptureOptions
    from profharness.store import open_store

    plan = make_plan(name_tuple(measurements), precision, max_time_s, iterations)
    against, path, asked = setup.read_baseline(baseline), store_path(store), config_list(configs)
    measured = run is None
    if run is None:
        here = "cuda" if default_backends(device) == DEFAULT_BACKENDS else "cpu"
        wanted = setup.bench_configs(asked, name_tuple(dtypes), against, here)
        protocol = Protocol(10, warmup, iterations or 0, float(timeout_s), seed, device)
        options = CaptureOptions(out=Path(out), protocol=protocol, bench=plan)
        run = bench_into_store(wanted, backend_tuple(backends, device), path, options).run.run
    with open_store(path) as opened:
        answer = benched(
            opened,
            run,
            convention=convention,
            baseline=against,
            precision=precision if measured else None,
            rank_by=plan.measurements if measured or measurements else None,
            configs=None
            if measured
            else setup.stored_configs(opened, run, asked, name_tuple(dtypes)),
            backends=None if measured else setup.stored_backends(opened, run, name_tuple(backends)),
        )
    return _bench_frame(answer)


def _bench_frame(answer: Benched) -> pd.DataFrame:
    import dataclasses

    import pandas as pd

    from profharness.answers.bench.rows import BenchRow

    columns = [each.name for each in dataclasses.fields(BenchRow)]
    frame = pd.DataFrame([dataclasses.asdict(row) for row in answer.rows], columns=columns)
    frame.attrs["answer"] = answer
    return frame


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
    from profharness.answers.export import write_run_file
    from profharness.store import open_store

    with open_store(store_path(store)) as opened:
        return write_run_file(
            opened, opened.resolve(run), Path(path), profiler=profiler, force=force
        )


def query(
    sql: str,
    params: Sequence[Any] | Mapping[str, Any] = (),
    *,
    store: PathLike | None = None,
) -> pd.DataFrame:
    """Any SELECT on the store, for example on the views kernel_launches and kernel_summary."""
    from profharness.store import open_store
    from profharness.store import query as run_query

    with open_store(store_path(store)) as opened:
        return run_query(opened, sql, params)
