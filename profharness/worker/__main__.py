"""Reads plan.json in a run folder, runs its cells one after another, and appends what came of each
to the journal.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import msgspec

from profharness.record import JOURNAL_FILE, PLAN_FILE, JournalEntry, Plan

EXIT_DEAD_CONTEXT = 70
EXIT_PARENT_GONE = 71


def main(folder: Path) -> int:
    """Run the plan; 0 when all its cells have a result, EXIT_DEAD_CONTEXT when a new process has to
    go on.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    plan = msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=Plan)
    journal = os.open(folder / JOURNAL_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(entry: JournalEntry) -> None:
        os.write(journal, msgspec.json.encode(entry) + b"\n")

    import torch

    from profharness import environment
    from profharness.worker.cell import DeadContextError, open_bench, run_cell

    wanted = plan.protocol.device
    device = environment.default_device(torch) if wanted == "auto" else wanted
    write(JournalEntry("environment", environment=environment.collect(device)))
    bench = open_bench(folder, plan.profilers, plan.protocol, device)
    for cell in plan.cells:
        write(JournalEntry("begin", cell=cell.cell))

        def stage(name: str, cell_id: str = cell.cell) -> None:
            write(JournalEntry("stage", cell=cell_id, stage=name))

        try:
            result = run_cell(cell, bench, stage)
        except DeadContextError as dead:
            write(JournalEntry("end", cell=cell.cell, result=dead.args[0]))
            os._exit(EXIT_DEAD_CONTEXT)
        write(JournalEntry("end", cell=cell.cell, result=result))
    return 0


def _end_with_parent() -> None:
    """End this process when its standard input closes: whoever started it is gone, however it went."""
    while True:
        try:
            if not os.read(0, 1 << 12):
                break
        except OSError:
            break
    os._exit(EXIT_PARENT_GONE)


if __name__ == "__main__":
    # Everything is on disk: tearing torch and the CUDA context down would only take time.
    os._exit(main(Path(sys.argv[1])))
