"""Reads plan.json in a run folder, runs its cells one after another, and appends what came of each
to the journal.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

import msgspec

from profharness.record import JOURNAL_FILE, PLAN_FILE, JournalEntry, Plan
from profharness.worker.ending import EXIT_DEAD_CONTEXT, end_with, leave


def main(folder: Path) -> NoReturn:
    """Run the plan and leave: 0 when all its cells have a result, EXIT_DEAD_CONTEXT when a new
    process has to go on.
    """
    plan = msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=Plan)
    threading.Thread(target=end_with, args=(plan.parent,), daemon=True).start()
    journal = os.open(folder / JOURNAL_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(entry: JournalEntry) -> None:
        os.write(journal, msgspec.json.encode(entry) + b"\n")

    import torch

    from profharness import environment
    from profharness.worker.cell import open_bench, run_cell
    from profharness.worker.failing import DeadContextError

    wanted = plan.protocol.device
    device = environment.default_device(torch) if wanted == "auto" else wanted
    write(JournalEntry("environment", environment=environment.collect(device)))
    bench = open_bench(folder, plan, device)
    for cell in plan.cells:
        write(JournalEntry("begin", cell=cell.cell))

        def stage(name: str, cell_id: str = cell.cell) -> None:
            write(JournalEntry("stage", cell=cell_id, stage=name))

        try:
            result = run_cell(cell, bench, stage)
        except DeadContextError as dead:
            write(JournalEntry("end", cell=cell.cell, result=dead.args[0]))
            leave(EXIT_DEAD_CONTEXT, wrapped=plan.wrapped)
        write(JournalEntry("end", cell=cell.cell, result=result))
    leave(0, wrapped=plan.wrapped)


if __name__ == "__main__":
    # without Python's handler an interrupt ends also a worker that waits inside of CUDA
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(Path(sys.argv[1]))
