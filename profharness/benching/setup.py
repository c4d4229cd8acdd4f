"""What a bench is to run, and what of a stored one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from profharness.backends import ALL, DEFAULT_BACKENDS, KERNELS, expand_backends
from profharness.config import DTYPES, Config, parse_config
from profharness.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from profharness.store import Store


def read_baseline(text: str | None) -> Config | None:
    """The one config of --baseline. Raises UsageError if it stands for more than one."""
    return None if text is None else parse_config(text)


def bench_configs(
    configs: Sequence[Config],
    dtypes: Sequence[str] = (),
    baseline: Config | None = None,
    device_type: str | None = None,
) -> list[Config]:
    """The configs in every one of the dtypes (one that names its own keeps it), the baseline first
    where it is not among them. device_type, `cuda` or `cpu`: those that are one config there, a
    dtype left out and the device's default, are one here. Raises UsageError for an unknown dtype or
    no config at all.
    """
    _check_dtypes(dtypes)
    if not configs:
        raise UsageError("no config: say --config 2,8,512,64 (or --configs FILE)")
    asked = [baseline] if baseline is not None and baseline not in configs else []
    found: dict[Config, Config] = {}
    for config in [*asked, *configs]:
        for dtype in dtypes or (None,):
            full = config if config.dtype else replace(config, dtype=dtype)
            found.setdefault(full.resolve(device_type) if device_type else full, full)
    return list(found.values())


def stored_configs(
    store: Store, run: str, configs: Sequence[Config], dtypes: Sequence[str] = ()
) -> list[Config] | None:
    """The configs that a question about a stored run means, None for all: those in every one of the
    dtypes, or without any the run's own in them. Raises UsageError for an unknown dtype,
    NotFoundError if the run has no config in one of them.
    """
    if configs:
        return bench_configs(configs, dtypes)
    _check_dtypes(dtypes)
    if not dtypes:
        return None
    held = [
        parse_config(label) for label in dict.fromkeys(cell.config for cell in store.cells(run))
    ]
    for dtype in dtypes:
        if all(config.dtype != dtype for config in held):
            known = ", ".join(sorted({str(config.dtype) for config in held}))
            raise NotFoundError(f"run {run} has no config in {dtype}; it has {known}")
    return [config for config in held if config.dtype in dtypes]


def stored_backends(store: Store, run: str, names: Sequence[str]) -> list[str] | None:
    """The backends that a question about a stored run means, None for all. `all` and `kernels` stand
    for those of theirs that the run has.
    """
    if not names:
        return None
    held = {cell.backend for cell in store.cells(run)}
    return [
        each
        for name in names
        for each in expand_backends([name], DEFAULT_BACKENDS)
        if each in held or name not in (ALL, KERNELS)
    ]


def _check_dtypes(names: Sequence[str]) -> None:
    for name in names:
        if name not in DTYPES:
            raise UsageError(f"no dtype {name!r}; known are {', '.join(DTYPES)}")
