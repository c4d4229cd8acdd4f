"""A program beside the worker, which runs nothing: it asks PyTorch what each config of a plan would
run, what stands in the way of each backend, and what would help.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from profharness.dispatch.advice import ANSWERS_FILE
from profharness.run import Cell
from profharness.worker.program import Program, Stage, run_each, run_program

NO_ADVICE = "--no-advice"


def body(program: Program) -> None:
    """Answer every cell, one line of JSON each."""
    from profharness.worker.choices import LiveDispatch

    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    answers = os.open(program.folder / ANSWERS_FILE, flags, 0o644)
    advice = NO_ADVICE not in sys.argv[2:]
    dispatch = LiveDispatch(program.device, program.environment, advice)

    def answer(cell: Cell, _: Stage) -> Cell:
        os.write(answers, msgspec.json.encode(dispatch.answer(cell)) + b"\n")
        return replace(cell, config=cell.config.resolve(program.device), status="ok")

    run_each(program, answer)


if __name__ == "__main__":
    run_program(Path(sys.argv[1]), body)
