"""A capture from plan to finished run folder, and its resumption."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from profharness import __version__
from profharness.backends import find_backend
from profharness.config import Config
from profharness.errors import CaptureError, UsageError
from profharness.record import (
    JOURNAL_FILE,
    PLAN_FILE,
    Cell,
    JournalEntry,
    Protocol,
    Run,
    TraceFile,
    read_run,
    write_run,
)
from profharness.runner.profilers import PROFILERS, find_profilers
from profharness.runner.supervise import LOG_FILE, run_cells

SAVE_EVERY_S = 1.0

Progress = Callable[[int, int, Cell, str], None]
"""Hears (cells done, cells in all, the cell, its stage or final status)."""


@dataclass(frozen=True)
class CaptureOptions:
    """What a capture is asked for besides configs and backends. out: the folder that run folders go
    into.
    """

    profilers: tuple[str, ...] = ("torch",)
    out: Path = Path("traces/runs")
    protocol: Protocol = field(default_factory=Protocol)
    note: str | None = None


def capture(
    configs: Sequence[Config],
    backends: Sequence[str],
    options: CaptureOptions | None = None,
    progress: Progress | None = None,
) -> Path:
    """Run every config on every backend and return the run folder.

    Failed cells are results, not errors. Raises UsageError for unknown names, CaptureError if no
    worker starts. After KeyboardInterrupt the folder is valid and `resume` goes on with it; the
    exception's `folder` attribute names it.
    """
    options = options or CaptureOptions()
    names = tuple(profiler.name for profiler in find_profilers(options.profilers))
    run = Run(
        run=_new_id(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        profilers=names,
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
    return _carry_out(folder, run, progress)


def resume(folder: Path, progress: Progress | None = None) -> Path:
    """Run the cells of a folder that have no result yet, with the protocol that it was begun with."""
    return _carry_out(folder, read_run(folder), progress)


def plan_cells(configs: Sequence[Config], backends: Sequence[str]) -> tuple[Cell, ...]:
    """One pending cell per config and backend, in that order. Raises UsageError for unknown
    backends or an empty plan.
    """
    if not configs:
        raise UsageError("no config: say --config 2,8,512,64 (or --configs FILE)")
    unique = dict.fromkeys(find_backend(name).name for name in backends)
    pairs = [(config, backend) for config in dict.fromkeys(configs) for backend in unique]
    return tuple(
        Cell(f"c{index:04d}", config, backend)
        for index, (config, backend) in enumerate(pairs, start=1)
    )


class _Book:
    """The run as it grows: takes journal entries, saves run.json now and then."""

    def __init__(self, folder: Path, run: Run, progress: Progress | None) -> None:
        self.folder = folder
        self.run = run
        self._cells = {cell.cell: cell for cell in run.cells}
        self._progress = progress or (lambda *_: None)
        self._saved = 0.0

    def hear(self, entry: JournalEntry) -> None:
        if entry.environment is not None:
            self._environment(entry.environment)
            return
        cell = self._cells[str(entry.cell)]
        if entry.result is not None:
            cell = self._cells[cell.cell] = entry.result
        done = sum(known.status != "pending" for known in self._cells.values())
        self._progress(
            done, len(self._cells), cell, entry.stage or (cell.status if entry.result else "start")
        )
        if entry.result is not None and time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()

    def _environment(self, environment: dict[str, Any]) -> None:
        device = str(environment.get("device_type", "cpu"))
        self._cells = {
            name: replace(cell, config=cell.config.resolve(device))
            for name, cell in self._cells.items()
        }
        if not self.run.environment:
            self.run = replace(self.run, environment=environment)

    def save(self) -> None:
        """Write run.json with the traces that exist."""
        cells = tuple(self._cells.values())
        self.run = replace(
            self.run, cells=cells, traces=tuple(_traces(self.folder, self.run.profilers, cells))
        )
        write_run(self.folder, self.run)
        self._saved = time.monotonic()


def _carry_out(folder: Path, run: Run, progress: Progress | None) -> Path:
    book = _Book(folder, run, progress)
    book.save()
    pending = [cell for cell in run.cells if cell.status == "pending"]
    try:
        run_cells(folder, pending, run.protocol, run.profilers, book.hear)
    except KeyboardInterrupt as stop:
        stop.folder = folder  # type: ignore[attr-defined]
        raise
    finally:
        book.save()
    _tidy(folder, book.run)
    return folder


def _traces(folder: Path, profilers: tuple[str, ...], cells: tuple[Cell, ...]) -> list[TraceFile]:
    """The traces of finished cells; what a dead worker left half-written belongs to no result and
    is not named.
    """
    found = []
    for name in profilers:
        suffix = PROFILERS[name].suffix
        for cell in cells:
            path = f"{cell.cell}.{suffix}"
            if suffix and cell.status == "ok" and (folder / path).exists():
                found.append(TraceFile(name, path, (cell.cell,)))
    return found


def _tidy(folder: Path, run: Run) -> None:
    """After a complete run the journal and the plan say nothing that run.json does not; the log
    stays if a cell failed.
    """
    (folder / JOURNAL_FILE).unlink(missing_ok=True)
    (folder / PLAN_FILE).unlink(missing_ok=True)
    if all(cell.status in ("ok", "refused") for cell in run.cells):
        (folder / LOG_FILE).unlink(missing_ok=True)


def _new_id() -> str:
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
