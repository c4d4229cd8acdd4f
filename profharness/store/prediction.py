"""What the dispatch rules say of a stored cell, from the environment that its run was made in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from profharness.config import Config, parse_config

if TYPE_CHECKING:
    from profharness.dispatch import Machine

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
    from profharness.dispatch.params import from_config
    from profharness.dispatch.predict import judge, predict
    from profharness.dispatch.told import with_flags

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


class Predictions:
    """Predictions for the cells of one answer; environments and cells that are the same are judged
    once. The rules are imported for the first cell that they may have a word on.
    """

    def __init__(self) -> None:
        self._environments: dict[int, Mapping[str, Any]] = {}
        self._machine = lru_cache(maxsize=256)(self._find_machine)
        self._known = lru_cache(maxsize=4096)(self._ask)

    def add(self, environment_id: int, environment: Mapping[str, Any]) -> None:
        """Make an environment known by its id."""
        self._environments[environment_id] = environment

    def has(self, environment_id: int) -> bool:
        """Whether `add` has seen this id."""
        return environment_id in self._environments

    def of(self, label: str, backend: str, environment_id: int) -> str | None:
        """`predicted` for a config's label in an environment."""
        if backend not in PREDICTED or "device_type" not in self._environments[environment_id]:
            return None
        return self._known(label, backend, environment_id)

    def _ask(self, label: str, backend: str, environment_id: int) -> str | None:
        machine = self._machine(environment_id)
        if machine is None:
            return None
        environment = self._environments[environment_id]
        return predicted(parse_config(label), backend, environment, machine)

    def _find_machine(self, environment_id: int) -> Machine | None:
        from profharness.dispatch.told import is_told, machine_of

        environment = self._environments[environment_id]
        return machine_of(environment) if is_told(environment) else None
