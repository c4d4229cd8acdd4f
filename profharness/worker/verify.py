"""A program beside the worker that verifies instead of measuring: `python -m
profharness.worker.verify FOLDER` holds each cell of plan.json against an fp64 reference.
"""

from __future__ import annotations

import sys
from pathlib import Path

from profharness.worker.program import Program, run_each, run_program


def body(program: Program) -> None:
    """Verify every cell."""
    from profharness.worker.verifier import Verifier
    from profharness.worker.workspace import open_workspace

    verifier = Verifier(open_workspace(program.folder, program.plan, program.device))
    run_each(program, verifier.verify)


if __name__ == "__main__":
    run_program(Path(sys.argv[1]), body)
