"""A capture from plan to finished run folder, and its resumption."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from profharness import __version__
from profharness.backends import (
    SOURCES_FILE,
    find_backend,
    find_backends,
    fingerprints,
    read_sources,
    write_sources,
)
from profharness.cases import STANDARD, derive_cases
from profharness.config import Config, parse_config
from profharness.errors import CaptureError, UsageError
from profharness.logs import log_wanted
from profharness.profilers import Profiler, find_profilers, open_session, require_tools
from profharness.profilers.base import Outcome, Tool
from profharness.run import (
    JOURNAL_FILE,
    PLAN_FILE,
    BenchPlan,
    Cell,
    Check,
    JournalEntry,
    Problem,
    Protocol,
    Run,
    read_plan,
    read_run,
    write_plan,
)
from profharness.runner.book import Book, Progress
from profharness.runner.supervise import LOG_FILE, run_cells, worker_argv

START_REMEDY = (
    "`profharness doctor` shows what is missing; the worker's own words are in worker.log"
)


@dataclass(frozen=True)
class CaptureOptions:
    """What a capture is asked for besides configs and backends. out: the folder that run folders go
    into; bench: time the backends of each config in turns, as this plan says.
    """

    profilers: tuple[str, ...] = ("torch",)
    out: Path = Path("traces/runs")
    protocol: Protocol = field(default_factory=Protocol)
    note: str | None = None
    bench: BenchPlan | None = None


def capture(
    configs: Sequence[Config],
    backends: Sequence[str],
    options: CaptureOptions | None = None,
    progress: Progress | None = None,
) -> Path:
    """Run every config on every backend and return the run folder.

    Failed cells are results, not errors, and what a wrapping profiler fails at stands in the run's
    problems. Raises UsageError for unknown names, ToolError for a tool that is not there,
    CaptureError if no worker starts. After KeyboardInterrupt the folder is valid and `resume` goes on with it; the
    exception's `folder` attribute names it.
    """
    options = options or CaptureOptions()
    profilers = find_profilers(options.profilers)
    tools = require_tools(profilers)
    run = Run(
        run=_new_id(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        profilers=tuple(profiler.name for profiler in profilers),
        protocol=options.protocol,
        cells=plan_cells(configs, backends),
        note=options.note,
        profharness=__version__,
    )
    folder = options.out / run.run
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CaptureError(
            f"cannot make the run folder {folder}: {error.strerror}; choose another with --out"
        ) from None
    write_sources(folder, find_backends(backends).values())
    if options.bench is not None:
        write_plan(folder, options.bench)
    return _carry_out(folder, run, tools, progress)


def resume(folder: Path, progress: Progress | None = None) -> Path:
    """Run the cells of a folder that have no result yet, with the protocol that it was begun with."""
    run = read_run(folder)
    tools = require_tools(find_profilers(run.profilers))
    return _carry_out(folder, run, tools, progress)


def plan_cells(configs: Sequence[Config], backends: Sequence[str]) -> tuple[Cell, ...]:
    """One pending cell per config and backend, in that order. Raises UsageError for unknown
    backends or an empty plan.
    """
    if not configs:
        raise UsageError("no config: say --config 2,8,512,64 (or --configs FILE)")
    unique = find_backends(backends)
    pairs = [(config, backend) for config in dict.fromkeys(configs) for backend in unique]
    return tuple(
        Cell(f"c{index:04d}", config, backend)
        for index, (config, backend) in enumerate(pairs, start=1)
    )


def bench_argv(folder: Path) -> list[str]:
    """The program that times in turns, called as the worker is."""
    *start, _, last = worker_argv(folder)
    return [*start, "profharness.worker.bench", last]


def _carry_out(folder: Path, run: Run, tools: dict[str, Tool], progress: Progress | None) -> Path:
    book = Book(folder, run, progress)
    book.save()
    hear = _with_code(book, _code(folder, run))
    profilers = find_profilers(run.profilers)
    try:
        if any(profiler.session is None for profiler in profilers):
            inside = tuple(item.name for item in profilers if item.session is None)
            command = bench_argv if read_plan(folder) is not None else worker_argv
            todo = book.begin_pass(None)
            run_cells(folder, todo, run.protocol, inside, hear, command=command)
        for profiler in profilers:
            if profiler.session is not None:
                _wrapped_pass(book, profiler, tools, hear)
    except KeyboardInterrupt as stop:
        stop.folder = folder  # type: ignore[attr-defined]
        raise
    finally:
        book.save()
    book.explain_pending()
    _tidy(folder, book.run)
    return folder


def _code(folder: Path, run: Run) -> dict[str, str]:
    """What tells one version of the backends' code from another; what is not found says nothing."""
    sources = read_sources(folder)
    found = []
    for name in dict.fromkeys(cell.backend for cell in run.cells):
        with contextlib.suppress(UsageError):
            found.append(find_backend(name, sources))
    return fingerprints(found)


def _with_code(book: Book, code: dict[str, str]) -> Callable[[JournalEntry], None]:
    """The book's ear, with `backend_code` added to the environment that a worker tells."""

    def hear(entry: JournalEntry) -> None:
        if entry.environment is not None and code:
            entry = replace(entry, environment=entry.environment | {"backend_code": code})
        book.hear(entry)

    return hear


def _wrapped_pass(
    book: Book, profiler: Profiler, tools: dict[str, Tool], hear: Callable[[JournalEntry], None]
) -> None:
    """All cells under a profiler that wraps the worker. What goes wrong is a problem of the run."""
    protocol = replace(
        book.run.protocol,
        timeout_s=book.run.protocol.timeout_s * profiler.patience,
        iterations=profiler.iterations or book.run.protocol.iterations,
    )
    before = len(book.problems)
    try:
        run_cells(
            book.folder,
            book.begin_pass(profiler),
            protocol,
            (profiler.name,),
            hear,
            lambda: open_session(profiler, tools, book.folder, protocol, book.tell),
            book.take,
        )
    except CaptureError as error:
        if len(book.problems) == before:
            problem = Problem(profiler.name, "worker_not_started", str(error), START_REMEDY)
            book.take(Outcome(problem=problem))


def _tidy(folder: Path, run: Run) -> None:
    """After a complete run the journal and the plan say nothing that run.json does not; the log
    stays if a cell failed, and where PROFHARNESS_LOG asks for it.
    """
    (folder / JOURNAL_FILE).unlink(missing_ok=True)
    (folder / PLAN_FILE).unlink(missing_ok=True)
    (folder / SOURCES_FILE).unlink(missing_ok=True)
    went_well = all(cell.status in ("ok", "refused") for cell in run.cells) and not run.problems
    if went_well and not log_wanted():
        (folder / LOG_FILE).unlink(missing_ok=True)


def _new_id() -> str:
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


@dataclass(frozen=True)
class VerifyOptions:
    """What a verification is asked for besides configs and backends. grad: gradients too."""

    cases: tuple[str, ...] = (STANDARD,)
    grad: bool = False
    out: Path = Path("traces/runs")
    protocol: Protocol = field(default_factory=lambda: Protocol(0, 0, 0))


def verify(
    configs: Sequence[Config],
    backends: Sequence[str],
    options: VerifyOptions | None = None,
    progress: Progress | None = None,
) -> Path:
    """Verify every case of every config on every backend and return the run folder, whose run has
    no profilers and whose cells have checks.

    A backend that is wrong, crashes or takes too long is a result. Raises UsageError for unknown
    names, CaptureError if no worker starts.
    """
    options = options or VerifyOptions()
    found = find_backends(backends)
    run = Run(
        run=_new_id(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        profilers=(),
        protocol=options.protocol,
        cells=plan_checks(configs, list(found), options.cases, grad=options.grad),
        profharness=__version__,
    )
    folder = options.out / run.run
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CaptureError(
            f"cannot make the run folder {folder}: {error.strerror}; choose another with --out"
        ) from None
    write_sources(folder, found.values())
    book = Book(folder, run, progress)
    book.save()
    heard = _with_code(book, _code(folder, run))
    device = "cpu"

    def hear(entry: JournalEntry) -> None:
        nonlocal device
        if entry.environment is not None:
            device = str(entry.environment.get("device_type", device))
        if entry.result is not None:
            entry = replace(entry, result=_complete(entry.result, device))
        heard(entry)

    try:
        run_cells(folder, book.begin_pass(None), run.protocol, (), hear, command=verify_argv)
    finally:
        book.save()
    _tidy(folder, read_run(folder))
    return folder


def verify_argv(folder: Path) -> list[str]:
    """-P as for the worker: what lies in the user's folder is not on the program's path."""
    return [sys.executable, "-P", "-m", "profharness.worker.verify", str(folder)]


def plan_checks(
    configs: Sequence[Config], backends: Sequence[str], cases: Sequence[str], *, grad: bool
) -> tuple[Cell, ...]:
    """One pending cell per config, case and backend, the backends of a case side by side. Raises
    UsageError for an unknown case or an empty plan.
    """
    if not configs:
        raise UsageError("no config: say --config 2,8,512,64 (or --configs FILE)")
    planned = [
        (config, case, backend)
        for config in dict.fromkeys(configs)
        for case in derive_cases(replace(config, bwd=config.bwd or grad), cases)
        for backend in backends
    ]
    return tuple(
        Cell(f"v{index:05d}", case.config, backend, case=case.name, asked=config.label)
        for index, (config, case, backend) in enumerate(planned, 1)
    )


def _complete(result: Cell, device: str) -> Cell:
    """The result with its dtypes filled in; what its worker died of or hung on failed its check."""
    asked = parse_config(result.asked or result.config.label).resolve(device).label
    result = replace(result, config=result.config.resolve(device), asked=asked)
    if result.checks:
        return result
    return replace(result, checks=(Check("out", False, f"{result.status}: {result.message}"),))
