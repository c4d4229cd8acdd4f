"""What callers of the Python interface may write for a store, names and configs, brought to one form."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from profharness.config import Config, expand_configs
from profharness.errors import UsageError
from profharness.profiler_names import PROFILERS

PathLike = str | os.PathLike[str]
Configs = str | Config | Iterable[str | Config] | None

STORE_VARIABLE = "PROFHARNESS_STORE"
DEFAULT_STORE = "profharness.db"
ALL = "all"


def store_path(store: PathLike | None) -> Path:
    """The store that is meant; None: the one of the environment, else of the working directory."""
    return Path(store if store is not None else os.environ.get(STORE_VARIABLE, DEFAULT_STORE))


def name_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    """`"flash, math"` or `["flash", "math"]` -> `("flash", "math")`; empty names are left out."""
    words = names.split(",") if isinstance(names, str) else names
    return tuple(word.strip() for word in words if word.strip())


def backend_tuple(names: str | Sequence[str], device: str) -> tuple[str, ...]:
    """The names, with what `all` and `kernels` stand for on the device; empty for none."""
    from profharness.backends import expand_backends
    from profharness.jobs import default_backends

    found = name_tuple(names)
    return tuple(expand_backends(found, default_backends(device))) if found else ()


def profiler_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    """The profilers that leave traces; empty for every one. Raises UsageError for another name."""
    found = name_tuple(names)
    for name in found:
        if name not in (ALL, *PROFILERS):
            raise UsageError(
                f"no launches of a profiler {name!r}; known are {', '.join(PROFILERS)}, {ALL}"
            )
    return () if ALL in found else found


def config_list(configs: Configs) -> list[Config]:
    """Grammar texts expanded, each config once; empty for None. Raises UsageError for a text that
    is no config.
    """
    if configs is None:
        return []
    items = [configs] if isinstance(configs, str | Config) else list(configs)
    found: list[Config] = []
    for item in items:
        found += [item] if isinstance(item, Config) else expand_configs(item)
    return list(dict.fromkeys(found))
