"""Separate a run's rank, host and GPU from its environment.

Runs of one job differ in these and have the same environment otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from profharness.environment import hashed_key

DISTRIBUTED = "distributedInfo"  # section of Kineto's header
NUMBERS, KEYS = ("rank", "world_size"), ("host_key", "gpu_key")
MAX_RANK = 1 << 24
# file names of tensorboard_trace_handler: HOST_PID.NANOSECONDS.pt.trace.json
TENSORBOARD = re.compile(r"(?P<host>.+)_\d+\.\d{10,}\.pt\.trace\.json(?:\.gz)?")
NAMED_RANK = re.compile(r"(?<![a-z])rank[._-]?(\d{1,7})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Columns of `runs` that identify a rank. Keys are hashes; None means unknown."""

    rank: int | None = None
    world_size: int | None = None
    host_key: str | None = None
    gpu_key: str | None = None


def split_place(
    environment: Mapping[str, object], name: str | None = None
) -> tuple[RankIdentity, dict[str, object]]:
    """Return the rank identity in an environment, and the environment without it.

    `name` is the name of a trace file outside of a run folder. It gives the rank and the host if the
    environment does not contain them. The number of ranks stays in the environment, because
    environments with different numbers do differ.
    """
    rest = dict(environment)
    section = rest.get(DISTRIBUTED)
    distributed = dict(section) if isinstance(section, Mapping) else {}
    values = {key: rest.pop(key, None) for key in (*NUMBERS, *KEYS)}
    inner = distributed.pop("rank", None)
    if distributed:
        rest[DISTRIBUTED] = distributed
    else:
        rest.pop(DISTRIBUTED, None)
    rank = rank_number(inner if values["rank"] is None else values["rank"])
    size = values["world_size"]
    size = rank_number(distributed.get("world_size") if size is None else size)
    host, gpu = (str(key) if isinstance(key, str) else None for key in map(values.get, KEYS))
    if name is not None:
        rank = _rank_of(name) if rank is None else rank
        made = TENSORBOARD.fullmatch(name)
        host = hashed_key(made["host"]) if host is None and made else host
    return RankIdentity(rank, size, host, gpu), rest


def rank_number(value: object) -> int | None:
    """Return a rank or number of ranks from an integer or its decimal text, None for other values."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 9:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MAX_RANK else None


def _rank_of(name: str) -> int | None:
    named = NAMED_RANK.findall(name)
    return int(named[0]) if len(named) == 1 else None
