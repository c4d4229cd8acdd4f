"""A second program beside the worker, which runs nothing: it asks PyTorch what each config of a
plan would run, what stands in the way of each backend, and what would help.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec

from profharness import environment
from profharness.dispatch.live import ANSWERS_FILE
from profharness.record import JOURNAL_FILE, PLAN_FILE, JournalEntry, Plan
from profharness.worker.ending import end_with, leave

NO_ADVICE = "--no-advice"


def main(folder: Path, *, advice: bool) -> NoReturn:
    """Answer the plan's cells, one line of JSON each, and leave with 0."""
    plan = msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=Plan)
    threading.Thread(target=end_with, args=(plan.parent,), daemon=True).start()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    journal = os.open(folder / JOURNAL_FILE, flags, 0o644)
    answers = os.open(folder / ANSWERS_FILE, flags, 0o644)

    def write(entry: JournalEntry) -> None:
        os.write(journal, msgspec.json.encode(entry) + b"\n")

    import torch

    from profharness.worker.asker import Asker

    wanted = plan.protocol.device
    device = environment.default_device(torch) if wanted == "auto" else wanted
    told = environment.collect(device)
    write(JournalEntry("environment", environment=told))
    asker = Asker(device, told, advice)
    for cell in plan.cells:
        write(JournalEntry("begin", cell=cell.cell))
        os.write(answers, msgspec.json.encode(asker.answer(cell)) + b"\n")
        done = replace(cell, config=cell.config.resolve(device), status="ok")
        write(JournalEntry("end", cell=cell.cell, result=done))
    leave(0, wrapped=plan.wrapped)


if __name__ == "__main__":
    # without Python's handler an interrupt ends also a program that waits inside of CUDA
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(Path(sys.argv[1]), advice=NO_ADVICE not in sys.argv[2:])
