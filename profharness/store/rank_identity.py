"""Where a run was made: its rank in a job, its host and its GPU. Runs of one job differ in these, and
their environments do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from profharness.environment import hashed_key

DISTRIBUTED = "distributedInfo"  # Kineto's section of a header
NUMBERS, KEYS = ("rank", "world_size"), ("host_key", "gpu_key")
MAX_RANK = 1 << 24
# tensorboard_trace_handler names a file so: HOST_PID.NANOSECONDS.pt.trace.json
TENSORBOARD = re.compile(r"(?P<host>.+)_\d+\.\d{10,}\.pt\.trace\.json(?:\.gz)?")
NAMED_RANK = re.compile(r"(?<![a-z])rank[._-]?(\d{1,7})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """The columns of `runs` that tell where one was made; keys are hashes, None is not told."""

    rank: int | None = None
    world_size: int | None = None
    host_key: str | None = None
    gpu_key: str | None = None


def split_place(
    environment: Mapping[str, object], name: str | None = None
) -> tuple[RankIdentity, dict[str, object]]:
    """The place that an environment tells, and the environment without it.

    name is that of a lone trace file: it tells the rank and the host where the environment does not.
    The number of ranks stays in the section of the trace, since another number is a difference.
    """
    rest = dict(environment)
    section = rest.get(DISTRIBUTED)
    distributed = dict(section) if isinstance(section, Mapping) else {}
    told = {key: rest.pop(key, None) for key in (*NUMBERS, *KEYS)}
    inner = distributed.pop("rank", None)
    if distributed:
        rest[DISTRIBUTED] = distributed
    else:
        rest.pop(DISTRIBUTED, None)
    rank = rank_number(inner if told["rank"] is None else told["rank"])
    size = told["world_size"]
    size = rank_number(distributed.get("world_size") if size is None else size)
    host, gpu = (str(key) if isinstance(key, str) else None for key in map(told.get, KEYS))
    if name is not None:
        rank = _rank_of(name) if rank is None else rank
        made = TENSORBOARD.fullmatch(name)
        host = hashed_key(made["host"]) if host is None and made else host
    return RankIdentity(rank, size, host, gpu), rest


def rank_number(value: object) -> int | None:
    """A rank or a number of ranks, which variables of the environment tell as text; None for what is
    none.
    """
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 9:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MAX_RANK else None


def _rank_of(name: str) -> int | None:
    named = NAMED_RANK.findall(name)
    return int(named[0]) if len(named) == 1 else None
