"""Plan, execute and resume captures, benchmarks and verifications. The result is a run folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from profharness import __version__
from profharness.attention.backends import (
    SOURCES_FILE,
    commits,
    find_backend,
    find_backends,
    fingerprints,
    read_sources,
    write_sources,
)
from profharness.attention.cases import derive_cases
from profharness.attention.config import Config, require_configs
from profharness.device_types import CPU
from profharness.environment import VisibleGpu, visible_gpus
from profharness.errors import CaptureError, Interrupted, UnwritableError, UsageError
from profharness.files import LOCKS, hold_lock_file, open_lock_file, read_input, try_lock
from profharness.logs import log_wanted
from profharness.processes import (
    STEP_S,
    PrewarmedWorker,
    defer_signals,
    delay_signals,
    raise_deferred_signals,
)
from profharness.recording.profilers import Profiler, find_profilers, open_session, require_tools
from profharness.recording.profilers.base import Tool
from profharness.recording.supervise import LOG_FILE, Progress, RunRecord, run_cells, worker_argv
from profharness.run import (
    GPU,
    JOURNAL_FILE,
    OBSERVE,
    PLAN_FILE,
    PYTHON_FILE,
    RUN_FILE,
    BenchPlan,
    CaptureOptions,
    Cell,
    Problem,
    Protocol,
    Run,
    read_run,
    unwritable,
    write_run,
)

LOCK_FILE = ".lock"
START_REMEDY = "run `profharness doctor` to see what is missing; see also worker.log"


def capture(
    configs: Sequence[Config],
    backends: Sequence[str],
    options: CaptureOptions | None = None,
    progress: Progress | None = None,
) -> Path:
    """Run every config on every backend and return the run folder.

    If `options.cases` is set, verify every case of every config instead of measuring. Failed cells
    and wrong outputs of backends are recorded as results, and failures of nsys or ncu as problems.

    Raise UsageError for unknown names, ToolError for a missing tool, CaptureError if no worker
    starts, and Interrupted if the user stops the run. `resume` can finish an interrupted capture.
    """
    options = options or CaptureOptions()
    run, tools = plan_capture(configs, backends, options)
    return execute(run, tools, backends, options.out, options.python, progress).folder


@dataclass(frozen=True)
class RunFolder:
    folder: Path
    run: Run


def execute(
    run: Run,
    tools: dict[str, Tool],
    backends: Sequence[str],
    out: Path,
    python: str | None = None,
    progress: Progress | None = None,
    prewarmed: PrewarmedWorker | None = None,
) -> RunFolder:
    """Execute a planned run in a new folder in `out`.

    `python` is the Python interpreter for the worker, and `prewarmed` is a worker that already
    loads torch. If no worker starts, remove the folder and raise CaptureError, or UsageError for a
    missing GPU. Raise Interrupted if the user stops the run.
    """
    folder = write_folder(out, run, backends, python)
    try:
        with locked(folder):
            return _carry_out(folder, run, tools, progress, prewarmed)
    except UnwritableError:
        raise
    except (CaptureError, UsageError):
        # a run in which no worker started has nothing to resume, but a log that was asked for
        if not (folder / JOURNAL_FILE).exists() and not log_wanted():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def plan_capture(
    configs: Sequence[Config], backends: Sequence[str], options: CaptureOptions
) -> tuple[Run, dict[str, Tool]]:
    """Plan a capture, benchmark or verification, and find the tools that its profilers need.

    Raise UsageError for unknown names, and ToolError for a missing tool.
    """
    if options.cases:
        cells = plan_checks(
            configs, list(find_backends(backends)), options.cases, grad=options.grad
        )
        protocol = replace(options.protocol, iterations=0, warmup=0, samples=0, processes=1)
        return new_run("verify", protocol, cells), {}
    profilers = find_profilers(options.profilers)
    tools = require_tools(profilers)
    names = tuple(profiler.name for profiler in profilers)
    kind = options.kind if options.bench is None else "bench"
    cells = plan_cells(configs, backends)
    run = new_run(kind, options.protocol, cells, names, options.note, options.bench)
    return run, tools


def resume(folder: Path, progress: Progress | None = None) -> RunFolder:
    """Run the cells of a run folder that have no result yet, and failed passes of profilers.

    Raise UsageError if the run is finished or cannot be resumed, and CaptureError if another
    process is executing the run.
    """
    with locked(folder):
        # read the run after locking, because another process may have just finished the run
        run = read_run(folder)
        reason = why_not_resumed(folder, run)
        if reason is not None:
            raise UsageError(f"--resume: {reason}")
        tools = require_tools(find_profilers(run.profilers))
        return _carry_out(folder, run, tools, progress)


def carry_on(folder: Path, progress: Progress | None = None) -> None:
    """Run the cells of a run folder that have no result yet, even if the run is a verification.

    Do nothing if the run is finished. Raise the same errors as `capture`.
    """
    with locked(folder):
        run = read_run(folder)
        begun = (folder / JOURNAL_FILE).exists()
        if begun or any(cell.status == "pending" for cell in run.cells):
            tools = require_tools(find_profilers(run.profilers))
            _carry_out(folder, run, tools, progress)


def why_not_resumed(folder: Path, run: Run) -> str | None:
    """Return why a run cannot be resumed, or None if the run can be resumed.

    This does not check whether another process has locked the run folder.
    """
    if any(cell.case is not None for cell in run.cells):
        return (
            f"run {run.run} was created by `profharness verify` and cannot be resumed; run "
            "`profharness verify` again"
        )
    if run.kind == OBSERVE:
        return (
            f"run {run.run} was created by `profharness observe` and cannot be resumed; run "
            "`profharness observe` again"
        )
    left = any(problem.profiler != GPU for problem in run.problems)
    left = left or any(cell.status == "pending" for cell in run.cells)
    if left or (folder / JOURNAL_FILE).exists():
        return None
    return finished_message(folder, run)


def finished_message(folder: Path, run: Run) -> str:
    return (
        f"run {run.run} is finished, because all {len(run.cells)} of its cells have a result; "
        f"to store the results, run `profharness ingest {shlex.quote(str(folder))}`"
    )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder inside the block. Raise CaptureError if another process has locked it."""
    with hold_lock_file(folder / LOCK_FILE) as holder:
        if holder is not None:
            raise CaptureError(f"{folder}: {holder} is working on this run; wait until it ends")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                # the folder may have been deleted
                (folder / LOCK_FILE).unlink()


@contextlib.contextmanager
def gpu_locked(
    device: str, notify: Callable[[str], None], folder: Path = LOCKS
) -> Iterator[tuple[int, ...]]:
    """Lock the GPU that a worker on this device would use, if there is one.

    If another process holds the lock, call `notify` with a message and wait. Yield the lock's file
    descriptors, which child processes must inherit, because the GPU stays locked while any process
    has a descriptor open.
    """
    gpu = next(iter(visible_gpus()), None) if device != CPU else None
    descriptor = open_lock_file(lock_file(gpu, folder)) if gpu else None
    if gpu is None or descriptor is None:
        yield ()
        return
    try:
        if not try_lock(descriptor, fcntl.LOCK_EX):
            notify(
                f"waiting: another profharness process is measuring on {gpu.name} ({gpu.key}); set "
                "CUDA_VISIBLE_DEVICES to use another GPU"
            )
            while not try_lock(descriptor, fcntl.LOCK_EX):
                raise_deferred_signals()
                time.sleep(STEP_S)
        yield (descriptor,)
    finally:
        os.close(descriptor)


def lock_file(gpu: VisibleGpu, folder: Path = LOCKS) -> Path:
    return folder / f"profharness-{gpu.key}.gpu"


def plan_cells(configs: Sequence[Config], backends: Sequence[str]) -> tuple[Cell, ...]:
    """Return one pending cell for each pair of config and backend.

    Raise UsageError if a backend is unknown or there is no config.
    """
    require_configs(configs)
    unique = find_backends(backends)
    # use each config only once
    pairs = [(config, backend) for config in dict.fromkeys(configs) for backend in unique]
    return tuple(
        Cell(f"c{index:04d}", config, backend)
        for index, (config, backend) in enumerate(pairs, start=1)
    )


def plan_checks(
    configs: Sequence[Config], backends: Sequence[str], cases: Sequence[str], *, grad: bool
) -> tuple[Cell, ...]:
    """Return one pending cell for each config, case that applies to the config, and backend.

    If `grad` is set, verify gradients too. Raise UsageError for an unknown case.
    """
    require_configs(configs)
    planned = [
        (derived, backend, case, config.label)
        for config in dict.fromkeys(configs)
        for case, derived in derive_cases(replace(config, bwd=config.bwd or grad), cases)
        for backend in backends
    ]
    return tuple(
        Cell(f"v{index:05d}", config, backend, case=case, asked=asked)
        for index, (config, backend, case, asked) in enumerate(planned, 1)
    )


def new_run(
    kind: str,
    protocol: Protocol,
    cells: tuple[Cell, ...],
    profilers: tuple[str, ...] = (),
    note: str | None = None,
    bench: BenchPlan | None = None,
) -> Run:
    now = datetime.now(UTC)
    return Run(
        # add random digits, because two runs may start in the same second
        run=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        created=now.isoformat(timespec="seconds"),
        profilers=profilers,
        protocol=protocol,
        cells=cells,
        note=note,
        profharness=__version__,
        kind=kind,
        bench=bench,
    )


def write_folder(
    out: Path,
    run: Run,
    backends: Sequence[str],
    python: str | None = None,
    name: str | None = None,
) -> Path:
    """Create a run folder in `out`, with run.json and the sources of the backends.

    `python` is the Python interpreter for the worker. The name of the folder is `name`, or the
    run ID by default. If anything fails, or the user interrupts, remove the folder again. Raise
    CaptureError if the folder cannot be written.
    """
    folder = out / (name or run.run)
    made = False
    try:
        with delay_signals():
            folder.mkdir(parents=True)
            made = True
            # find the backends by the user's arguments, because the name of a backend in a file does
            # not contain the folder of the file
            write_sources(folder, find_backends(backends).values())
            if python is not None:
                (folder / PYTHON_FILE).write_text(python, encoding="utf-8")
            write_run(folder, run)
    except BaseException as error:
        if made:
            # an incomplete folder could neither be resumed nor ingested
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError | CaptureError):
            raise
        why = getattr(error if isinstance(error, OSError) else error.__context__, "strerror", error)
        what = f"cannot write to {out}" if made else f"cannot create the run folder {folder}"
        raise CaptureError(
            f"{what}: {why}; nothing ran; choose another folder with --out"
        ) from None
    return folder


def _carry_out(
    folder: Path,
    run: Run,
    tools: dict[str, Tool],
    progress: Progress | None,
    prewarmed: PrewarmedWorker | None = None,
) -> RunFolder:
    python = _read_python(folder)
    record = RunRecord(folder, run, progress, _backend_code(folder, run))
    record.begin_period()
    # save before the first cell, so that the run can be resumed if this process is killed
    record.save()
    profilers = find_profilers(run.profilers)
    inside = tuple(profiler.name for profiler in profilers if profiler.session is None)
    try:
        with (
            interrupts_name(folder),
            defer_signals(),
            gpu_locked(run.protocol.device, record.notify) as inherited,
        ):
            if inside or not profilers:
                program: tuple[str, ...] = ()
                if any(cell.case is not None for cell in run.cells):
                    program = ("profharness.recording.worker.verify",)
                elif run.bench is not None:
                    program = ("profharness.recording.worker.bench",)
                command = partial(worker_argv, program=program, python=python)
                for process in range(run.protocol.processes):
                    run_cells(
                        folder,
                        record.begin_pass(None, process),
                        run.protocol,
                        inside,
                        record.add_entry,
                        command=command,
                        inherited=inherited,
                        prewarmed=prewarmed if process == 0 else None,
                    )
            # run nsys and ncu last, when it is known which cells fail without them
            for profiler in profilers:
                if profiler.session is not None:
                    _wrapped_pass(record, profiler, tools, python)
            # raise a deferred interrupt inside `interrupts_name`, which adds the run folder to it
            raise_deferred_signals()
    except OSError as error:  # raised for the run folder or for TMPDIR
        raise unwritable(folder, f"{error.filename or folder}: {error.strerror}") from None
    finally:
        record.end_period()
        record.save()
    record.explain_pending()
    _tidy(folder, record.run)
    return RunFolder(folder, record.run)


@contextlib.contextmanager
def interrupts_name(folder: Path) -> Iterator[None]:
    """Convert a KeyboardInterrupt in the block to Interrupted, which names the run folder."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Interrupted(folder) from stop


def _read_python(folder: Path) -> str | None:
    """Return the path of the Python that the run's worker uses, or None for this Python.

    Raise CaptureError if that Python no longer exists.
    """
    try:
        python = os.fsdecode(read_input(folder / PYTHON_FILE, within=folder))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CaptureError(f"cannot read {folder / PYTHON_FILE}: {error.strerror}") from None
    if not os.access(python, os.X_OK):
        raise CaptureError(
            f"{folder} was started with {python}, which no longer exists; start a new capture"
        )
    return python


def _backend_code(folder: Path, run: Run) -> dict[str, dict[str, str]]:
    """Return the code hashes and Git commits of the backends, which extend the environment."""
    sources = read_sources(folder)
    backends = []
    for name in dict.fromkeys(cell.backend for cell in run.cells):
        # ignore a backend of a resumed run whose file no longer exists
        with contextlib.suppress(UsageError):
            backends.append(find_backend(name, sources))
    code = {"backend_code": fingerprints(backends), "backend_commit": commits(backends)}
    return {key: values for key, values in code.items() if values}


def _wrapped_pass(
    record: RunRecord, profiler: Profiler, tools: dict[str, Tool], python: str | None
) -> None:
    protocol = replace(
        record.run.protocol,
        timeout_s=record.run.protocol.timeout_s * profiler.patience,
        iterations=profiler.iterations or record.run.protocol.iterations,
    )
    before = len(record.problems)
    try:
        run_cells(
            record.folder,
            record.begin_pass(profiler),
            protocol,
            (profiler.name,),
            record.add_entry,
            lambda: open_session(profiler, tools, record.folder, protocol, record.notify),
            record.add_outcome,
            # pass no descriptors of the GPU's lock, because a daemon of nsys could keep them open
            partial(worker_argv, python=python),
        )
    except CaptureError as error:
        # if the session has reported a problem, it is more specific than this error
        if len(record.problems) == before:
            problem = Problem(profiler.name, "worker_not_started", str(error), START_REMEDY)
            record.add_outcome((None, problem))


def _tidy(folder: Path, run: Run) -> None:
    # run.json contains everything that the journal and the plan contain
    for name in (JOURNAL_FILE, PLAN_FILE, SOURCES_FILE):
        (folder / name).unlink(missing_ok=True)
    if why_not_resumed(folder, run) is not None:
        (folder / PYTHON_FILE).unlink(missing_ok=True)
    # remove temporary files that killed processes have left
    for path in (*folder.glob(f".{RUN_FILE}.*"), *folder.glob("c*.torch.json*.tmp")):
        path.unlink(missing_ok=True)
    went_well = all(cell.status in ("ok", "refused") for cell in run.cells) and not run.problems
    if went_well and not log_wanted():
        (folder / LOG_FILE).unlink(missing_ok=True)
