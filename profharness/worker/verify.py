"""A program beside the worker that verifies instead of measuring: `python -m
profharness.worker.verify FOLDER` holds each cell of plan.json against an fp64 reference.
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
    """Verify the plan's cells and leave: 0 when all have a result, EXIT_DEAD_CONTEXT when a new
    process has to go on.
    """
    plan = msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=Plan)
    threading.Thread(target=end_with, args=(plan.parent,), daemon=True).start()
    journal = os.open(folder / JOURNAL_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(entry: JournalEntry) -> None:
        os.write(journal, msgspec.json.encode(entry) + b"\n")

    import torch

    from profharness import environment
    from profharness.worker.cell import open_bench
    from profharness.worker.failing import DeadContextError
    from profharness.worker.verifier import Verifier

    wanted = plan.protocol.device
    device = environment.default_device(torch) if wanted == "auto" else wanted
    write(JournalEntry("environment", environment=environment.collect(device)))
    verifier = Verifier(open_bench(folder, plan, device))
    for cell in plan.cells:
        write(JournalEntry("begin", cell=cell.cell))

        def stage(name: str, cell_id: str = cell.cell) -> None:
            write(JournalEntry("stage", cell=cell_id, stage=name))

        try:
            result = verifier.verify(cell, stage)
        except DeadContextError as dead:
            write(JournalEntry("end", cell=cell.cell, result=dead.args[0]))
            leave(EXIT_DEAD_CONTEXT, wrapped=plan.wrapped)
        write(JournalEntry("end", cell=cell.cell, result=result))
    leave(0, wrapped=plan.wrapped)


if __name__ == "__main__":
    # without Python's handler an interrupt ends also a program that waits inside of CUDA
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(Path(sys.argv[1]))
