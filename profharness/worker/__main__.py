"""The worker: runs the cells of plan.json one after another, and appends what came of each to the
journal.
"""

from __future__ import annotations

import sys
from pathlib import Path

from profharness.worker.program import Program, run_each, run_program


def body(program: Program) -> None:
    """Measure every cell."""
    from profharness.worker.cell import run_cell
    from profharness.worker.workspace import open_workspace

    workspace = open_workspace(program.folder, program.plan, program.device)
    run_each(program, lambda cell, stage: run_cell(cell, workspace, stage))


if __name__ == "__main__":
    run_program(Path(sys.argv[1]), body)
