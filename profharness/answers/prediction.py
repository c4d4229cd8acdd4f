"""What the dispatch rules say of a stored cell, from the environment that its run was made in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from profharness.config import Config, parse_config

if TYPE_CHECKING:
    from profharness.dispatch import Machine
    from profharness.rows import CellRow
    from profharness.store import Store


FORCED = ("flash", "efficient", "cudnn", "math")
PREDICTED = frozenset((*FORCED, "auto", "all-disabled"))
ELIGIBLE = "eligible"
REFUSED = "refused"


def predicted(
    config: Config, backend: str, environment: Mapping[str, Any], machine: Machine
) -> str | None:
    """What the rules say of a cell: for `auto` and `all-disabled` the backend that PyTorch takes,
    or `none` where it raises; for a forced backend `eligible` or `refused`. None where they cannot
    tell, and for backends that PyTorch's dispatcher does not know.
    """
    from profharness.dispatch.machine import with_flags
    from profharness.dispatch.params import from_config
    from profharness.dispatch.predict import judge, predict

    params = with_flags(environment)(from_config(config, str(environment.get("device_type"))))
    if backend in FORCED:
        alone = replace(params, enabled=frozenset({backend}))
        eligible = judge(backend, alone, machine).eligible
        return None if eligible is None else ELIGIBLE if eligible else REFUSED
    if backend == "all-disabled":
        params = replace(params, enabled=frozenset({"cudnn"}))
    elif backend != "auto":
        return None
    choice = predict(params, machine).choice
    return None if choice == "unknown" else choice


def with_predictions(store: Store, cells: Sequence[CellRow]) -> list[CellRow]:
    """The cells of a store with `predicted` filled in. The rules are imported for the first cell
    that they may have a word on; equal cells of one run are judged once.
    """
    environment = lru_cache(maxsize=256)(store.environment)
    machine = lru_cache(maxsize=256)(lambda run: _machine(environment(run)))

    @lru_cache(maxsize=4096)
    def judged(label: str, backend: str, run: str) -> str | None:
        known = machine(run) if "device_type" in environment(run) else None
        if known is None:
            return None
        return predicted(parse_config(label), backend, environment(run), known)

    return [
        replace(cell, predicted=judged(cell.config, cell.backend, cell.run))
        if cell.backend in PREDICTED
        else cell
        for cell in cells
    ]


def _machine(environment: Mapping[str, Any]) -> Machine | None:
    from profharness.dispatch.machine import is_told, machine_of

    return machine_of(environment) if is_told(environment) else None
