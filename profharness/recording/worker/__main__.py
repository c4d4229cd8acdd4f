"""Run one program of the worker: `python -m profharness.recording.worker [MODULE [ARGUMENT ...]] FOLDER`.

Without a module, run the cells of plan.json one after another.
"""

from __future__ import annotations

import sys

from profharness.recording.worker.program import run_arguments

if __name__ == "__main__":
    run_arguments(sys.argv[1:])
