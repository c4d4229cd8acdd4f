"""The frame of the programs beside the parent: reads plan.json, tells the environment, writes the
journal, ends with the parent, and leaves in order.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from profharness.logs import start_log
from profharness.record import JOURNAL_FILE, PLAN_FILE, Cell, JournalEntry, Plan
from profharness.worker.ending import EXIT_DEAD_CONTEXT, end_with, leave

Write = Callable[[JournalEntry], None]
Stage = Callable[[str], None]
RunOne = Callable[[Cell, Stage], Cell]


@dataclass(frozen=True)
class Program:
    """What a program works with: its plan, the device that it settled on, what it told of the
    environment, and the journal.
    """

    folder: Path
    plan: Plan
    device: str
    environment: dict[str, Any]
    write: Write


def run_program(folder: Path, body: Callable[[Program], None]) -> NoReturn:
    """Do the work of a plan and leave: 0 when it is done, EXIT_DEAD_CONTEXT when a new process has
    to go on after the cell whose result the DeadContextError carries.
    """
    # without Python's handler an interrupt ends also a program that waits inside of CUDA
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    start_log()
    plan = msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=Plan)
    threading.Thread(target=end_with, args=(plan.parent,), daemon=True).start()
    journal = os.open(folder / JOURNAL_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(entry: JournalEntry) -> None:
        os.write(journal, msgspec.json.encode(entry) + b"\n")

    import torch

    from profharness import environment
    from profharness.worker.failing import DeadContextError

    wanted = plan.protocol.device
    device = environment.default_device(torch) if wanted == "auto" else wanted
    told = environment.collect(device)
    write(JournalEntry("environment", environment=told))
    try:
        body(Program(folder, plan, device, told, write))
    except DeadContextError as dead:
        write(JournalEntry("end", cell=dead.args[0].cell, result=dead.args[0]))
        leave(EXIT_DEAD_CONTEXT, wrapped=plan.wrapped)
    leave(0, wrapped=plan.wrapped)


def run_each(program: Program, run_one: RunOne) -> None:
    """Run the plan's cells one after another, each with its begin, stages and end in the journal."""
    for cell in program.plan.cells:
        program.write(JournalEntry("begin", cell=cell.cell))

        def stage(name: str, cell_id: str = cell.cell) -> None:
            program.write(JournalEntry("stage", cell=cell_id, stage=name))

        result = run_one(cell, stage)
        program.write(JournalEntry("end", cell=cell.cell, result=result))
