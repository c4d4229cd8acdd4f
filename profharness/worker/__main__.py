"""Runs one program of the worker: `python -m profharness.worker [MODULE [ARGUMENT ...]] FOLDER`;
without a module, the cells of plan.json one after another.
"""

from __future__ import annotations

import sys
from pathlib import Path

from profharness.worker.program import run_program

if __name__ == "__main__":
    run_program(Path(sys.argv[-1]), sys.argv[1] if sys.argv[2:] else "profharness.worker.cell")
