"""The rules of each backend on each device, and the order in which a release asks them."""

from __future__ import annotations

from functools import lru_cache

from profharness.dispatch.early import EARLY
from profharness.dispatch.machine import Release
from profharness.dispatch.rules import (
    CPU_FLASH,
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    ON_DEVICE,
    Rule,
)

# Where releases from 2.5 on asked in another order: its span, and PyTorch's functions in turn.
EARLIER_ORDER: dict[str, tuple[tuple[Release, Release, tuple[str, ...]], ...]] = {
    "cudnn": (
        ((2, 5), (2, 7), ("runtime_disabled", "nested", "nonzero_lengths", "last_stride", "on_device",
                  "tensor_shapes", "cudnn_shapes", "deterministic", "dtypes", "mask_shape",
                  "hardware")),
        ((2, 7), (2, 9), ("runtime_disabled", "nested", "nonzero_lengths", "on_device", "tensor_shapes",
                  "cudnn_shapes", "deterministic", "dtypes", "mask_shape", "hardware",
                  "last_stride", "num_heads")),
    ),
}  # fmt: skip


TABLES: dict[tuple[str, str], tuple[Rule, ...]] = {
    key: (*EARLY.get(key, ()), *rules)
    for key, rules in {
        ("cuda", "flash"): FLASH,
        ("cuda", "efficient"): EFFICIENT,
        ("cuda", "cudnn"): CUDNN,
        ("cuda", "math"): MATH,
        ("cpu", "flash"): CPU_FLASH,
        ("cpu", "efficient"): (ON_DEVICE,),
        ("cpu", "cudnn"): (ON_DEVICE,),
        ("cpu", "math"): MATH,
    }.items()
}


@lru_cache(maxsize=1024)
def active_rules(device: str, backend: str, release: Release, nested: bool) -> tuple[Rule, ...]:
    """The rules that a release asks for such inputs, in its order."""
    scopes = ("any", "nested" if nested else "dense")
    rules = [
        rule
        for rule in TABLES[device, backend]
        if rule.since <= release < rule.until and rule.scope in scopes
    ]
    for since, until, names in EARLIER_ORDER.get(backend, ()) if device == "cuda" else ():
        if since <= release < until:
            return tuple(sorted(rules, key=lambda rule: names.index(rule.check)))
    return tuple(rules)
