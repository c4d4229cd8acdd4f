"""What is wrong with a line of a shard, by its field; what may be absent is not judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from profharness.config import AUTO, SDPA_BACKENDS, Config, parse_config
from profharness.dispatch.machine import parse_release
from profharness.errors import UsageError

STATUSES = ("ok", "refused", "oom", "error")
BACKENDS = (AUTO, *SDPA_BACKENDS)
CHOICES = (*SDPA_BACKENDS, "none", "unknown")
NEEDED = ("config", "backend", "status")
LARGEST = 1 << 62  # a column has signed integers of 64 bits


def line_fault(row: Mapping[str, Any]) -> str | None:
    """The first fault, as `backend 'naive': one of auto, flash, …`; None where there is none."""
    if "environment" in row:
        environment = row["environment"]
        if not isinstance(environment, Mapping):
            return _fault("environment", environment, "an object")
        return _first(environment, ENVIRONMENT)
    missing = next((name for name in NEEDED if row.get(name) is None), None)
    if missing and "atlas" not in row:  # which is the head of a shard
        return f"no {missing}: a cell has {', '.join(NEEDED)}"
    return _first(row, CELL)


def machine_fault(machine: Mapping[str, Any]) -> str | None:
    """What is wrong with the fields of an atlas's machine, as `torch 'banana': …`."""
    for name in ("gpu", "torch"):
        if not machine[name]:
            return f"no {name}: an atlas is of a GPU and a release"
    return _first({**machine, "torch_cuda": machine["cuda"]}, ENVIRONMENT)


def _first(row: Mapping[str, Any], fields: Mapping[str, Field]) -> str | None:
    for name, (is_right, wanted) in fields.items():
        value = row.get(name)
        if value is not None and not is_right(value):
            return _fault(name, value, wanted)
    return None


def _fault(name: str, value: object, wanted: str) -> str:
    text = repr(value)
    return f"{name} {text if len(text) <= MOST else f'{text[:MOST]}…'}: it should be {wanted}"


Field = tuple[Callable[[Any], bool], str]
MOST = 60  # characters of a value that a message shows


def _is_release(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(parse_release(value))
    except UsageError:
        return False


@lru_cache(maxsize=16)
def parsed(label: str) -> Config:
    """The config of a cell; the cells of one follow each other. Raises UsageError."""
    return parse_config(label)


def _is_config(value: object) -> bool:
    try:
        config = parsed(value) if isinstance(value, str) else None
    except UsageError:
        config = None
    if config is None:
        return False
    sizes = (config.batch, config.num_heads, config.num_kv_heads, config.head_dim)
    return min(*sizes, config.seq_len_q, config.seq_len_kv) > 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and 0 <= value < LARGEST / 1e3


def _are_times(value: object) -> bool:
    return isinstance(value, list) and all(each is None or _is_time(each) for each in value)


def _is_size(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, list) and len(value) == 3 and all(map(_is_count, value))


def _are_launches(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_launch, value))


def _is_launch(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 5 or not _is_text(value[0]):
        return False
    numbers = (each is None or _is_count(each) for each in value[3:])
    return _is_size(value[1]) and _is_size(value[2]) and all(numbers)


_TIME: Field = (_is_time, "microseconds, 0 or more")
ENVIRONMENT: Mapping[str, Field] = {
    "gpu": (_is_text, "the GPU's name"),
    "torch": (_is_release, "a release of PyTorch, such as 2.11.0"),
    "torch_cuda": (_is_text, "CUDA's version, such as '13.0'"),
    "cudnn": (lambda value: _is_count(value) and value > 0, "cuDNN's number, such as 91900"),
    "driver": (_is_text, "the driver's version, such as '580.159.04'"),
}
CELL: Mapping[str, Field] = {
    "config": (_is_config, "a config whose sizes are 1 or more, such as b2-h8-s512-d64-fp16"),
    "backend": (lambda value: value in BACKENDS, f"one of {', '.join(BACKENDS)}"),
    "status": (lambda value: value in STATUSES, f"one of {', '.join(STATUSES)}"),
    "choice": (lambda value: value in CHOICES, f"one of {', '.join(CHOICES)}"),
    "regime": (lambda value: isinstance(value, str), "a word"),
    "kernels": (_are_launches, "a list of [name, grid, block, registers, shared bytes]"),
    "kernel_us_each": (_are_times, "a list of microseconds, 0 or more"),
    "kernel_us": _TIME,
    "graph_us": _TIME,
    "peak_bytes": (_is_count, "bytes, 0 or more"),
    "message": (lambda value: isinstance(value, str), "a text"),
}
