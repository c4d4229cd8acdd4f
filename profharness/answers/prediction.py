"""What the dispatch rules say of a stored cell, from the environment that its run was made in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from profharness.config import OWN_CHOICE, SDPA_BACKENDS, parse_config
from profharness.errors import NotFoundError
from profharness.store import Selection, open_store

if TYPE_CHECKING:
    from profharness.rows import CellRow, KernelRow
    from profharness.store import Store


def predicted_rows(
    path: Path, selection: Selection, *, by_op: bool = False
) -> tuple[list[KernelRow], list[CellRow]]:
    """The selected kernels and cells of a store, with `predicted` filled in.

    Raises NotFoundError where there are none.
    """
    with open_store(path) as store:
        rows, cells = store.rows(selection, by_op=by_op)
        if rows or cells:
            return rows, with_predictions(store, cells)
    names = [f"config {config}" for config in selection.configs]
    names += [f"backend {name}" for name in selection.backends]
    names += [f"profiler {name}" for name in selection.profilers]
    run = selection.run
    where = {None: "the latest run", "all": "the store"}.get(run, f"run {run}")
    raise NotFoundError(
        f"{where} has nothing of: {', '.join(names) or 'kernels'}; "
        "`profharness runs` lists what is stored"
    )


def with_predictions(store: Store, cells: Sequence[CellRow]) -> list[CellRow]:
    """The cells of a store with `predicted` filled in; equal cells of one run are judged once."""
    environment = lru_cache(maxsize=256)(store.environment)

    @lru_cache(maxsize=4096)
    def predicted(label: str, backend: str, run: str) -> str | None:
        from profharness.dispatch import predict_cell  # only for cells that the rules know

        return predict_cell(parse_config(label), backend, environment(run))

    return [
        replace(cell, predicted=predicted(cell.config, cell.backend, cell.run))
        if cell.backend in (*SDPA_BACKENDS, *OWN_CHOICE)
        else cell
        for cell in cells
    ]
