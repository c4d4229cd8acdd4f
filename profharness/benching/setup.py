"""What a bench is to run: the configs times dtypes, and the baseline among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from profharness.config import DTYPES, Config, parse_config
from profharness.errors import UsageError


def read_baseline(text: str | None) -> Config | None:
    """The one config of --baseline. Raises UsageError if it stands for more than one."""
    return None if text is None else parse_config(text)


def bench_configs(
    configs: Sequence[Config], dtypes: Sequence[str] = (), baseline: Config | None = None
) -> list[Config]:
    """The configs in every one of the dtypes (one that names its own keeps it), the baseline first
    where it is not among them. Raises UsageError for an unknown dtype or no config at all.
    """
    for name in dtypes:
        if name not in DTYPES:
            raise UsageError(f"no dtype {name!r}; known are {', '.join(DTYPES)}")
    if not configs:
        raise UsageError("no config: say --config 2,8,512,64 (or --configs FILE)")
    asked = [baseline] if baseline is not None and baseline not in configs else []
    return list(
        dict.fromkeys(
            config if config.dtype else replace(config, dtype=dtype)
            for config in [*asked, *configs]
            for dtype in (dtypes or (None,))
        )
    )
