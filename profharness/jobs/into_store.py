"""Jobs that start workers, record a run in a run folder, and ingest the folder into the store."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import profharness.store as stores
from profharness.attention.backends import (
    ALL,
    DEFAULT_BACKENDS,
    KERNELS,
    check_names,
    expand_backends,
)
from profharness.attention.cases import NO_CASES, VerificationRow
from profharness.attention.config import Config, parse_config
from profharness.device_types import CPU, CUDA, is_gpu
from profharness.environment import gpu_name, gpu_present
from profharness.errors import (
    CaptureError,
    NotFoundError,
    TraceFormatError,
    UsageError,
    counted,
)
from profharness.jobs import fleet
from profharness.jobs.background_ingest import open_background_ingest
from profharness.jobs.campaign import is_campaign
from profharness.jobs.fleet import run_on_lanes
from profharness.measurements import evaluation
from profharness.processes import PrewarmedWorker
from profharness.program.layer_map import LayerMap
from profharness.program.regret import (
    MEASUREMENTS,
    phase_backends,
    regret_backends,
    regret_configs,
    regret_map,
)
from profharness.recording.capture import (
    RunFolder,
    execute,
    interrupts_name,
    plan_capture,
    resume,
    why_not_resumed,
)
from profharness.recording.observe import Observed, observe
from profharness.recording.probe import probe_interpreter
from profharness.recording.profilers import find_profilers, require_tools
from profharness.recording.supervise import Progress
from profharness.rows import EVENTS, KERNEL, TORCH
from profharness.run import (
    PRECISION,
    PROCESSES,
    RUN_FILE,
    BenchOptions,
    BenchPlan,
    CaptureOptions,
    Fleet,
    ObserveOptions,
    Protocol,
    check_protocol,
    make_plan,
    read_run,
    require_number,
)
from profharness.store import LATEST, Selection, open_store
from profharness.store.schema import require_writable
from profharness.store.sources import ParsedTraceCache

if TYPE_CHECKING:
    from profharness.store import IngestResult


PROFILED_CALLS = 10  # number of calls per benchmark process for the `kernel` measurement
# Maps each use of attention to a config per device. These configs are captured if the user names no
# config. A CPU computes its configs in milliseconds.
EVERYDAY = {
    "prefill": {CUDA: "4,16,2048,128,bf16,causal", CPU: "1,8,512,64,fp32,causal"},
    "decode": {CUDA: "16,16,4096,128,bf16,seq_q=1", CPU: "4,8,1024,64,fp32,seq_q=1"},
    "training": {CUDA: "4,16,1024,64,bf16,causal,bwd", CPU: "1,8,256,64,fp32,causal,bwd"},
    "a mask": {CUDA: "4,16,1024,64,bf16,mask=bool", CPU: "1,8,256,64,fp32,mask=bool"},
    "grouped queries": {
        CUDA: "4,32,1024,128,bf16,causal,kv_heads=8",
        CPU: "1,8,256,64,fp32,kv_heads=2",
    },
}


@dataclass(frozen=True)
class Listener:
    """Functions that a job calls to inform the user."""

    say: Callable[[str], None] = lambda _: None  # called with a sentence to print
    # Opens a display of the progress of the cells.
    progress: Callable[[], AbstractContextManager[Progress | None]] = contextlib.nullcontext


SILENT = Listener()


def everyday_configs(device: str = "auto", lanes: Fleet | None = None) -> dict[str, Config]:
    """Return the config of each use in EVERYDAY for a device, or for the device of the lanes."""
    kind = device_type(fleet.lanes_device(lanes or Fleet(), device))
    return {use: parse_config(configs[kind]) for use, configs in EVERYDAY.items()}


@dataclass(frozen=True)
class Captured(RunFolder):
    """The folder of a finished run, and the results of its ingest into the store."""

    ingested: list[IngestResult]
    others: tuple[Captured, ...] = ()  # the runs of all other GPU classes


def default_backends(device: str = "auto") -> tuple[str, ...]:
    """Return the names of the default backends of a device."""
    return DEFAULT_BACKENDS[device_type(device)]


def device_type(device: str) -> str:
    """Return `cuda` or `cpu`. For `auto`, return `cuda` if this machine has a GPU."""
    return CUDA if device == CUDA or (device == "auto" and gpu_present()) else CPU


def capture_into_store(
    configs: Sequence[Config],
    backends: Sequence[str],
    store: Path,
    options: CaptureOptions | None = None,
    progress: Progress | None = None,
    prewarmed: PrewarmedWorker | None = None,
) -> Captured:
    """Capture a run and ingest it. If `backends` is empty, use the device's default backends."""
    options = _on_lanes(options or CaptureOptions())
    check_protocol(options.protocol, counted=options.bench is None and not options.cases)
    chosen = expand_backends(backends or (ALL,), default_backends(options.protocol.device))
    # This raises an error for invalid options before a store or a run folder is created.
    run, tools = plan_capture(configs, chosen, options)
    require_store(store)
    with open_background_ingest(store) as background:
        folders = run_on_lanes(
            run,
            chosen,
            options.out,
            options.fleet,
            progress,
            python=options.python,
            background=background,
            prewarmed=prewarmed,
        ) or [
            execute(
                run,
                tools,
                chosen,
                options.out,
                python=options.python,
                progress=background.wrap_progress(progress),
                prewarmed=prewarmed,
            )
        ]
    first, *others = (_ingest_run_folder(folder, store, background.parsed) for folder in folders)
    return replace(first, others=tuple(others))


def _on_lanes(options: CaptureOptions) -> CaptureOptions:
    """Replace the device in the options with the device of the lanes."""
    device = fleet.lanes_device(options.fleet, options.protocol.device)
    return replace(options, protocol=replace(options.protocol, device=device))


def capture_with_each(
    pythons: Sequence[str],
    configs: Sequence[Config],
    backends: Sequence[str],
    store: Path,
    options: CaptureOptions,
    listener: Listener = SILENT,
) -> Iterator[Captured]:
    """Capture the same configs with several Python interpreters, which may have different torch.

    Probe all interpreters first, and skip unusable interpreters. Raise CaptureError at the end if an
    interpreter was skipped or a capture failed.
    """
    profilers = find_profilers(options.profilers)
    wrapped = [profiler.name for profiler in profilers if profiler.session]
    require_tools(profilers)
    usable, left_out = [], []
    for name in pythons:
        try:
            usable.append((name, *probe_interpreter(name, wrapped)))
        except CaptureError as error:
            left_out.append(f"{name}: {error}")
            listener.say(f"left out: {left_out[-1]}")
    for name, path, versions in usable:
        listener.say(versions)
        chosen = replace(options, python=path)
        with listener.progress() as progress:
            try:
                captured = capture_into_store(configs, backends, store, chosen, progress)
            except CaptureError as error:
                left_out.append(f"{name}: {error}")
                continue
        yield captured
    if left_out:
        raise CaptureError(
            "\n  ".join(
                [f"{len(left_out)} of {len(pythons)} interpreters could not be used:", *left_out]
            )
        )


def bench_into_store(
    configs: Sequence[Config],
    backends: Sequence[str],
    store: Path,
    options: CaptureOptions | None = None,
    progress: Progress | None = None,
) -> Captured:
    """Benchmark backends and ingest the run. The backends of each config take turns.

    Traces are recorded only if the plan contains the `kernel` measurement.
    """
    options = _on_lanes(options or CaptureOptions())
    plan = options.bench or BenchPlan()
    traced = KERNEL in plan.measurements and is_gpu(device_type(options.protocol.device))
    options = replace(options, bench=plan, profilers=(TORCH if traced else EVENTS,))
    return capture_into_store(configs, backends, store, options, progress)


def observe_into_store(
    argv: Sequence[str], store: Path, options: ObserveOptions
) -> tuple[Observed, list[IngestResult]]:
    """Run a program under the observer. Ingest the run folder if attention calls were recorded."""
    require_store(store)
    observed = observe(argv, options)
    ingested = stores.ingest_path(store, observed.folder) if observed.why is None else []
    return observed, ingested


def find_run_folder(text: str, out: Path) -> Path:
    """Return the run folder that the user named in order to resume it.

    `text` is a path, the id of a run in the `out` folder, a unique prefix of such an id, or
    `latest` for the newest folder that can be resumed. Raise NotFoundError if there is no such
    folder.
    """
    for exact in (Path(text), out / text):
        if (exact / RUN_FILE).exists():
            return exact
    if text == LATEST:
        return _find_latest(out)
    # wildcards in the text are escaped
    folders = sorted(path.parent for path in out.glob(f"{glob.escape(text)}*/{RUN_FILE}"))
    if len(folders) != 1:
        many = f"{len(folders)} folders match" if folders else "no folder matches"
        raise NotFoundError(
            f"cannot find the run folder {text!r} in {out}, because {many}; give the path of the "
            "folder or a longer id"
        )
    return folders[0]


def _find_latest(out: Path) -> Path:
    """Return the newest run folder that can be resumed. Raise NotFoundError if there is none."""
    reasons = []
    # the names begin with the time of the run, so sorting by name sorts by age
    for path in sorted(out.glob(f"*/{RUN_FILE}"), reverse=True):
        folder = path.parent
        check = fleet.why_campaign_not_resumed if is_campaign(folder) else why_not_resumed
        reason = check(folder, read_run(folder))
        if reason is None:
            return folder
        reasons.append(reason)
    newest = f"; the newest: {reasons[0]}" if reasons else ""
    raise NotFoundError(f"no run folder in {out} can be resumed{newest}")


def find_source(text: str, store: Path) -> Path:
    """Return the path of a run folder or trace, or the path from which a stored run was ingested.

    `text` is a path, the id of a stored run, a unique prefix of such an id, `latest` or `latest~1`.
    Raise TraceFormatError if the path does not exist and `text` cannot be the id of a stored run.
    Raise NotFoundError if the run is unknown or its files no longer exist.
    """
    path = Path(text)
    if path.exists():
        return path
    # a text with several path components is not a run id, because run ids contain no slash
    if not store.is_file() or len(path.parts) > 1:
        raise TraceFormatError(path, "no such file or folder", expected="a run folder or a trace")
    with open_store(store) as opened:
        run = opened.resolve(text)
        source = next(Path(row.path) for row in opened.runs() if row.run == run)
    if not source.exists():
        raise NotFoundError(f"run {run} was ingested from {source}, which no longer exists")
    return source


def resume_into_store(
    folder: Path, store: Path, progress: Progress | None = None, lanes: Fleet | None = None
) -> Captured:
    """Finish an interrupted run and ingest it again.

    `lanes` selects the lanes that resume a campaign. By default, these are the lanes of this host.
    """
    require_store(store)
    with open_background_ingest(store) as background:
        if is_campaign(folder):
            resumed = fleet.resume_on_lanes(folder, lanes or Fleet(), progress, background)
        elif lanes is not None and lanes.scheduler is not None:
            raise UsageError(f"--scheduler: {folder} is not a campaign; omit --scheduler")
        else:
            resumed = resume(folder, background.wrap_progress(progress))
    return _ingest_run_folder(resumed, store, background.parsed)


def require_store(path: Path) -> None:
    """Raise StoreError if the store cannot be written to. Jobs check this before any cell runs."""
    require_writable(path)
    # do not create a new store here, because that takes as long as a cell
    if path.exists():
        open_store(path, write=True).close()


def _ingest_run_folder(
    done: RunFolder, store: Path, cache: ParsedTraceCache | None = None
) -> Captured:
    """Ingest a complete run folder. An exception after an interrupt contains the folder's path."""
    with interrupts_name(done.folder):
        ingested = stores.ingest_path(store, done.folder, cache=cache)
        return Captured(done.folder, done.run, ingested)


def verify_into_store(
    configs: Sequence[Config],
    backends: Sequence[str],
    store: Path,
    options: CaptureOptions,
    progress: Progress | None = None,
) -> list[VerificationRow]:
    """Verify backends on `options.cases`, ingest the run, and return the rows of the verification.

    If `backends` is empty, verify `all,kernels`. A wrong result of a backend raises no error. Raise
    UsageError for unknown names, and CaptureError if no worker starts.
    """
    first = capture_into_store(configs, backends or (ALL, KERNELS), store, options, progress)
    with open_store(store) as opened:
        return [
            row
            for captured in (first, *first.others)
            for row in opened.verifications(captured.run.run)
        ]


def capture_missing(store: Path, selection: Selection, listener: Listener = SILENT) -> Selection:
    """Capture configs that are not in the store, and return a selection of the new run.

    Raise UsageError for an unknown backend, before anything is printed or started.
    """
    check_names(selection.backends)
    configs = counted(len(selection.configs), "config")
    named = ", ".join(selection.backends) or "the usual backends"
    options = CaptureOptions(tuple(selection.profilers) or CaptureOptions.profilers)
    listener.say(
        f"{store} does not contain the requested kernels; capturing {configs} on {named}, "
        f"with the traces in {options.out}"
    )
    with listener.progress() as progress:
        captured = capture_into_store(
            selection.configs, selection.backends, store, options, progress
        )
    return replace(selection, run=captured.run.run)


def bench(
    options: BenchOptions, store: Path, listener: Listener = SILENT
) -> evaluation.BenchResult:
    """Benchmark backends, or evaluate the benchmark of a stored run.

    A stored run is evaluated with its own precision and ranking if the options do not set them.
    Raise UsageError for invalid options, NotFoundError if the run is not stored, and CaptureError
    if no worker starts.
    """
    evaluation.check_convention(options.convention)
    precision = PRECISION if options.precision is None else options.precision
    plan = make_plan(options.measurements, precision, options.max_time_s, options.iterations)
    baseline = evaluation.parse_baseline(options.baseline)
    if options.run is not None:
        if options.verify:
            raise UsageError("--verify requires a measurement; omit RUN, or use profharness verify")
        with open_store(store) as opened:
            run = opened.find_run(Selection(options.run), *evaluation.TIMED)
            return evaluation.evaluate_bench(
                opened,
                run,
                convention=options.convention,
                baseline=baseline,
                precision=options.precision,
                configs=evaluation.stored_configs(opened, run, options.configs, options.dtypes),
                backends=evaluation.stored_backends(opened, run, options.backends),
                rank_by=plan.measurements if options.measurements else None,
            )
    device = fleet.lanes_device(options.fleet, options.device)
    configs = evaluation.bench_configs(
        options.configs, options.dtypes, baseline, device_type(device)
    )
    require_number("warmup", options.warmup, 0, whole=True)
    require_number("processes", options.processes, *PROCESSES, whole=True)
    counts = PROFILED_CALLS, options.warmup, options.iterations or 0
    protocol = Protocol(
        *(*counts, options.timeout_s, options.seed, device),
        # no more processes than samples, so that each process measures at least one sample
        processes=min(options.processes, options.iterations or options.processes),
    )
    capture_options = CaptureOptions(
        out=options.out, protocol=protocol, bench=plan, fleet=options.fleet
    )
    backends = options.backends
    if isinstance(baseline, str):
        backends = (*(backends or (ALL,)), baseline)
    with listener.progress() as progress:
        captured = bench_into_store(configs, backends, store, capture_options, progress)
    for warning in [text for result in captured.ingested for text in result.warnings]:
        listener.say(f"warning: {warning}")
    if options.verify:
        _verify(captured, store, options.fleet, listener)
    with open_store(store) as opened:
        benched = evaluation.evaluate_bench(
            opened,
            captured.run.run,
            convention=options.convention,
            baseline=baseline,
            precision=precision,
            rank_by=plan.measurements,
        )
    return replace(benched, others=tuple(other.run.run for other in captured.others))


def time_layers(
    layers: LayerMap, options: BenchOptions, store: Path, listener: Listener = SILENT
) -> LayerMap:
    """Add to a layer map the time that each call would save on the fastest correct backend.

    The times of the backends come from the stored run `options.run`. If `options.run` is None, the
    configs of the layer map are benchmarked. Backends are ranked by kernel time, because the layer
    map contains kernel times. Raise CaptureError if a benchmark is necessary but this machine has
    another GPU than the trace. Raise also any error of `bench`.
    """
    device = CUDA if layers.gpu else CPU
    backends = options.backends
    if options.run is None:
        here = gpu_name() if layers.gpu else None
        if here != layers.gpu:
            raise CaptureError(
                f"run {layers.name} was recorded on {layers.gpu}, but this machine has {here or 'no GPU'}; "
                f"run the command on a machine with {layers.gpu}, or run `bench` on such a machine "
                "with the configs that `layers --savings --list-configs` prints, and then pass the "
                "bench run with --bench RUN"
            )
        options = replace(options, configs=regret_configs(layers), device=device)
        backends = tuple(expand_backends(backends or (ALL,), default_backends(device)))
        if not options.backends:
            backends = (*backends, *phase_backends(layers))
    if backends:
        backends = tuple(dict.fromkeys([*backends, *regret_backends(layers)]))
    options = replace(options, measurements=MEASUREMENTS, backends=backends)
    return regret_map(layers, bench(options, store, listener))


def _verify(captured: Captured, store: Path, lanes: Fleet, listener: Listener) -> None:
    """Verify the outputs of all configs and backends that were timed successfully."""
    cells = [cell for cell in captured.run.cells if cell.status == "ok"]
    configs = list(dict.fromkeys(cell.config for cell in cells))
    backends = list(dict.fromkeys(cell.backend for cell in cells))
    options = CaptureOptions(
        out=captured.folder.parent,
        protocol=captured.run.protocol,
        fleet=lanes,
        cases=(NO_CASES,),
    )
    with listener.progress() as progress:
        verify_into_store(configs, backends, store, options, progress)
