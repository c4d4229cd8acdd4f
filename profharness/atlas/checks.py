"""Define the types and limits of the values in an atlas, and check lines of foreign files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from profharness.attention.config import AUTO, SDPA_BACKENDS, Config, parse_config
from profharness.attention.dispatch.machine import parse_release
from profharness.errors import UsageError

STATUSES = ("ok", "refused", "oom", "error")
SETTLED = ("ok", "refused")  # statuses that stay the same when the machine runs the cell again
BACKENDS = (AUTO, *SDPA_BACKENDS)
CHOICES = (*SDPA_BACKENDS, "none", "unknown")
LARGEST = 1 << 62  # upper limit of integers, because columns have the dtype int64
MAX_EXAMPLES = 3  # maximum number of cells that a message lists
MAX_SHOWN = 60  # maximum number of characters of a value in a message

Text = Annotated[str, Meta(pattern=r"\S")]
Count = Annotated[int, Meta(ge=0, lt=LARGEST)]
Microseconds = Annotated[float, Meta(ge=0, lt=LARGEST / 1e3)]
Dim3 = tuple[Count, Count, Count]


class Environment(msgspec.Struct):
    """The environment of the machine on which the cells of a shard were measured."""

    gpu: Text | None = None
    torch: Text | None = None
    torch_cuda: Text | None = None
    cudnn: Annotated[int, Meta(gt=0, lt=LARGEST)] | None = None  # 91900 for 9.19.0
    driver: Text | None = None


class Line(msgspec.Struct):
    """A line of a shard, which is its header, an environment or a cell.

    Fields that a line does not contain are not checked.
    """

    environment: Environment | None = None
    config: Text | None = None
    backend: Literal["auto", "flash", "efficient", "cudnn", "math"] | None = None
    status: Literal["ok", "refused", "oom", "error"] | None = None
    choice: Literal["flash", "efficient", "cudnn", "math", "none", "unknown"] | None = None
    regime: str | None = None
    kernels: list[tuple[Text, Dim3 | None, Dim3 | None, Count | None, Count | None]] | None = None
    kernel_us_each: list[Microseconds | None] | None = None
    kernel_us: Microseconds | None = None
    graph_us: Microseconds | None = None
    peak_bytes: Count | None = None
    message: str | None = None


def line_fault(row: Mapping[str, Any]) -> str | None:
    """Return the first error in a line, such as `backend 'naive': …`, or None if the line is valid."""
    fault = _fault(row, Line)
    if "environment" in row:
        environment = row["environment"]
        if not isinstance(environment, Mapping):
            return fault or "environment None: expected `object`"
        return machine_fault(environment, complete=False)
    if fault is None and "atlas" not in row:
        missing = [name for name in ("config", "backend", "status") if row.get(name) is None]
        fault = f"no {missing[0]}" if missing else None
    if fault is None and row.get("config") is not None and not _is_config(row["config"]):
        value = _shown(row["config"])
        return f"config {value}: expected a config such as b2-h8-s512-d64-fp16"
    return fault


def machine_fault(environment: Mapping[str, Any], *, complete: bool = True) -> str | None:
    """Return the first error in an environment, or None if it is valid.

    If `complete` is True, a missing GPU or PyTorch release is an error.
    """
    if fault := _fault(environment, Environment):
        return fault
    for name in ("gpu", "torch") if complete else ():
        if not environment.get(name):
            return f"no {name}: an atlas belongs to a GPU and a release"
    torch = environment.get("torch")
    if torch is not None and not _is_release(torch):
        return f"torch {_shown(torch)}: expected a release of PyTorch such as 2.11.0"
    return None


def _fault(row: Mapping[str, Any], kind: type[msgspec.Struct]) -> str | None:
    try:
        msgspec.convert(row, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`").split("[")[0].split(".")[0]
        return f"{name} {_shown(row.get(name))}: {text[:1].lower()}{text[1:]}"
    return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _is_release(value: str) -> bool:
    try:
        return bool(parse_release(value))
    except UsageError:
        return False


@lru_cache(maxsize=16)
def parse_label(label: str) -> Config:
    """Parse the label of a config. Raise UsageError if it is invalid.

    A small cache is enough, because the cells of a config are stored one after the other.
    """
    return parse_config(label)


def _is_config(label: str) -> bool:
    try:
        config = parse_label(label)
    except UsageError:
        return False
    sizes = (config.batch, config.num_heads, config.num_kv_heads, config.head_dim)
    return min(*sizes, config.seq_len_q, config.seq_len_kv) > 0
