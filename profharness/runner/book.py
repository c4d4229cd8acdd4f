"""The run as it grows: takes in journal entries, traces and problems, and keeps run.json whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from profharness.profilers import PROFILERS, Profiler
from profharness.profilers.base import Outcome
from profharness.run import Cell, JournalEntry, Problem, Run, TraceFile, write_run

SAVE_EVERY_S = 1.0


Progress = Callable[[int, int, Cell, str], None]
"""Hears (cells done, cells in all, the cell, its stage or final status); a stage that begins with
ENDING is a sentence on what the user has to wait for.
"""
ENDING = "ending "


LESS = "or leave this config out for this profiler"
REMEDIES = {
    "timeout": f"give it more time with --timeout, {LESS}",
    "oom": "the profiler needs memory of its own: free some on the GPU, choose a smaller config, "
    f"{LESS}",
    "crashed": "see the worker's last words here and in worker.log; run the config without this "
    f"profiler to see whether it dies there too, {LESS}",
    "error": "see the message, which is the backend's own; run the config without this profiler to "
    f"see whether it fails there too, {LESS}",
    "refused": "run the config without this profiler to see whether it is refused there too, "
    f"{LESS}",
}


class Book:
    """One run and its folder. A cell keeps its first result; what a later profiler's pass says of
    it can only be a problem of that profiler.
    """

    def __init__(self, folder: Path, run: Run, progress: Progress | None) -> None:
        self.folder = folder
        self.run = run
        self._cells = {cell.cell: cell for cell in run.cells}
        self._wrapped = [item for item in run.traces if PROFILERS[item.profiler].session]
        self.problems: list[Problem] = []  # a run that is resumed tries again what failed
        self._progress = progress or (lambda *_: None)
        self._saved = 0.0
        self._pass: tuple[Profiler | None, int, int] = (None, 0, 0)

    def begin_pass(self, profiler: Profiler | None) -> list[Cell]:
        """The cells that a pass has to do; None: the pass inside the worker."""
        cells = list(self._cells.values())
        todo = [cell for cell in cells if cell.status == "pending"]
        if profiler is not None:
            seen = self._covered(profiler.name)
            todo += [cell for cell in cells if cell.status == "ok" and cell.cell not in seen]
        self._pass = (profiler, 0, len(todo) if profiler else len(cells))
        return [replace(cell, message=None) if cell.status == "pending" else cell for cell in todo]

    def _covered(self, profiler: str) -> set[str]:
        """Cells that a profiler has nothing more to say of."""
        told = [item.cells for item in self._wrapped if item.profiler == profiler]
        told += [item.cells for item in self.problems if item.profiler == profiler]
        return {cell for cells in told for cell in cells}

    def hear(self, entry: JournalEntry) -> None:
        """Take in one journal entry."""
        if entry.environment is not None:
            self._environment(entry.environment)
            return
        profiler, finished, total = self._pass
        cell = self._cells[str(entry.cell)]
        stage = entry.stage or "start"
        if entry.result is not None:
            if cell.status == "pending":
                cell = self._cells[cell.cell] = entry.result
            elif profiler is not None and entry.result.status != "ok":
                self.problems.append(_cell_problem(profiler.name, entry.result))
            stage, finished = entry.result.status, finished + 1
            self._pass = (profiler, finished, total)
        if profiler is None:
            finished = sum(known.status != "pending" for known in self._cells.values())
        elif entry.result is None:
            stage = f"{profiler.name} {stage}"
        self._progress(finished, total, cell, stage)
        if entry.result is not None and time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()

    def tell(self, text: str) -> None:
        """Pass on what the user has to wait for."""
        _, finished, total = self._pass
        for cell in self._cells.values():
            self._progress(finished, total, cell, text)
            return

    def explain_pending(self) -> None:
        """Give the cells that no pass got to the reason: what their profiler failed at."""
        for cell in self._cells.values():
            if cell.status != "pending":
                continue
            reasons = [
                f"{item.profiler}: {item.message} [{item.code}]"
                for item in self.problems
                if not item.cells or cell.cell in item.cells
            ]
            if reasons:
                message = f"not run, because of {'; '.join(reasons)}"
                self._cells[cell.cell] = replace(cell, message=message)
        self.save()

    def take(self, outcome: Outcome) -> None:
        """Take in what a wrapped start of the worker left."""
        if outcome.trace is not None:
            done = tuple(cell for cell in outcome.trace.cells if self._cells[cell].status == "ok")
            self._wrapped.append(replace(outcome.trace, cells=done))
        if outcome.problem is not None:
            self.problems.append(outcome.problem)
        if outcome != Outcome():
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
        traces = (*_cell_traces(self.folder, self.run.profilers, cells), *self._wrapped)
        self.run = replace(self.run, cells=cells, traces=traces, problems=tuple(self.problems))
        write_run(self.folder, self.run)
        self._saved = time.monotonic()


def _cell_problem(profiler: str, result: Cell) -> Problem:
    """A cell that ran without the profiler, or under another one, and did not under this one."""
    return Problem(
        profiler,
        f"cell_{result.status}",
        f"{result.config} {result.backend} ended as {result.status} under {profiler}: {result.message}",
        REMEDIES.get(result.status, REMEDIES["error"]),
        cells=(result.cell,),
    )


def _cell_traces(
    folder: Path, profilers: tuple[str, ...], cells: tuple[Cell, ...]
) -> list[TraceFile]:
    """The traces of finished cells that the worker wrote itself; what a dead worker left
    half-written belongs to no result and is not named.
    """
    found = []
    for profiler in (PROFILERS[name] for name in profilers):
        for cell in cells:
            path = f"{cell.cell}.{profiler.suffix}"
            inside = profiler.session is None and profiler.suffix and cell.status == "ok"
            if inside and (folder / path).exists():
                found.append(TraceFile(profiler.name, path, (cell.cell,)))
    return found
