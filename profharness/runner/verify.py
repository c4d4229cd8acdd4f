"""A verification from plan to finished run folder: like a capture, with another program in the
worker's place and no profiler.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from profharness import __version__
from profharness.backends import find_backends, write_sources
from profharness.config import Config, parse_config
from profharness.errors import CaptureError, UsageError
from profharness.record import Cell, Check, JournalEntry, Protocol, Run, read_run
from profharness.runner.book import Book, Progress
from profharness.runner.capture import _code, _new_id, _tidy, _with_code
from profharness.runner.supervise import run_cells
from profharness.verification import STANDARD, derive_cases


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
