"""Run cells in real workers that execute other code before each cell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import indent

from profharness.attention.config import Config
from profharness.recording.profilers import PROFILERS, open_session, require_tools
from profharness.recording.profilers.base import Outcome, Session
from profharness.recording.supervise import run_cells
from profharness.run import Cell, Protocol

CODE = """
import os, runpy, sys, time
import profharness.recording.worker.cell as cell
run_cell = cell.run_cell
def changed(job, bench, stage):
{body}
    return run_cell(job, bench, stage)
cell.run_cell = changed
sys.argv = ["worker", sys.argv[1]]
runpy.run_module("profharness.recording.worker", run_name="__main__")
"""


def changed_worker(body: str) -> Callable[[Path], list[str]]:
    """Return a function for the argv of a worker. The code has `job`, `bench`, `stage`, `run_cell`."""
    code = CODE.format(body=indent(body, "    "))
    return lambda folder: [sys.executable, "-c", code, str(folder)]


def run_changed(
    folder: Path,
    configs: Sequence[Config],
    protocol: Protocol,
    command: Callable[[Path], list[str]],
    profiler: str = "events",
    backend: str = "math",
    grace_s: Sequence[float] | None = None,
) -> tuple[dict[str, Cell], list[Outcome]]:
    """Run the cells c0001, c0002, … and return their results and what each worker left."""
    folder.mkdir(exist_ok=True)
    cells = [Cell(f"c{n:04d}", config, backend) for n, config in enumerate(configs, start=1)]
    results: dict[str, Cell] = {}
    outcomes: list[Outcome] = []
    tools = require_tools([PROFILERS[profiler]])

    def session() -> Session:
        if not tools:
            return Session()
        made = open_session(PROFILERS[profiler], tools, folder, protocol)
        made.grace_s = grace_s or made.grace_s
        return made

    run_cells(
        folder,
        cells,
        protocol,
        (profiler,),
        lambda entry: results.update({entry.result.cell: entry.result}) if entry.result else None,
        session,
        outcomes.append,
        command,
    )
    return results, outcomes


def statuses(results: dict[str, Cell]) -> dict[str, str]:
    return {name: cell.status for name, cell in sorted(results.items())}
