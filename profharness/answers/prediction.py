"""What the dispatch rules say of a stored cell, from the environment that its run was made in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from profharness.config import OWN_CHOICE, SDPA_BACKENDS, parse_config

if TYPE_CHECKING:
    from profharness.rows import CellRow
    from profharness.store import Store


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
