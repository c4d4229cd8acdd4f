"""A program beside the worker: it times the backends of each config in turns."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

from profharness.run import BenchPlan, read_plan
from profharness.worker.program import Program, run_program


def body(program: Program) -> None:
    """Bench the plan's cells, config by config."""
    from profharness.worker.turns import bench_group
    from profharness.worker.workspace import open_workspace

    workspace = open_workspace(program.folder, program.plan, program.device)
    plan = read_plan(program.folder) or BenchPlan()
    cells = [
        replace(cell, config=cell.config.resolve(program.device)) for cell in program.plan.cells
    ]
    for _, group in itertools.groupby(cells, key=lambda cell: cell.config):
        bench_group(list(group), workspace, plan, program.write)


if __name__ == "__main__":
    run_program(Path(sys.argv[1]), body)
