"""Plan how tiled.cu splits a problem into tiles and blocks. Planning needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

THREADS = 256
WARPS = THREADS // 32
SHARED_BYTES = 227 * 1024
"""Maximum shared memory of a block on compute capability 9.0."""
MAX_CLUSTER = 16
MAX_ONE_TILE = 128
"""Maximum number of keys for which a single tile contains all keys."""
START_US = 2.6
SM_BYTES_PER_NS = 60
MEMORY_BYTES_PER_NS = 5500
FP32_FLOP_PER_NS = 300
WGMMA_FLOP_PER_NS = 2500
MMA_FLOP_PER_NS = 1250
EXCHANGE_US = {"block": (0.3, 0.0), "cluster": (1.4, 0.03), "grid": (3.0, 0.06)}
"""Time of an exchange in µs, and the additional time for each part."""


@dataclass(frozen=True)
class Problem:
    """The sizes of an attention problem.

    `heads` is the batch size times the number of query heads. `element_bytes` is 2 or 4.
    """

    heads: int
    rows: int
    keys: int
    head_dim: int
    element_bytes: int


@dataclass(frozen=True)
class Plan:
    """The template arguments and launch parameters of the kernel in tiled.cu.

    `rows` and `keys` are the sizes of a tile (BM and BN in tiled.cu). `parts` blocks share a tile,
    and each of them computes `chunk` columns of head_dim. A block writes `columns` columns per pass
    (PC), and copies `slice` columns of queries and keys at a time (BK). `stages` and `value_stages`
    are the numbers of copies in flight. If `one` is set, a single tile contains all keys. If `grid`
    is set, blocks exchange scores through L2 and must all be resident at the same time. Otherwise,
    they exchange scores within a cluster.
    """

    element_bytes: int
    rows: int
    keys: int
    slice: int
    chunk: int
    columns: int
    stages: int
    value_stages: int
    parts: int
    splits: int = 1
    one: bool = True
    grid: bool = False
    per_sm: int = 1

    @cached_property
    def template(self) -> str:
        """The template arguments of the kernel after the element type."""
        numbers = (self.rows, self.keys, self.slice, self.chunk, self.columns)
        flags = (self.one, self.grid, self.splits > 1)
        words = [*map(str, (*numbers, self.stages, self.value_stages))]
        words += [str(flag).lower() for flag in flags]
        return ", ".join([*words, str(self.per_sm)])

    def instance(self, element: str) -> str:
        """Return the C++ name of the kernel. `element` is a value of `tiled.TYPES`."""
        return f"tiled_attention<{element}, {self.template}>"

    @property
    def exchange(self) -> str:
        """Scope in which blocks exchange scores: `grid`, `cluster`, or `block` for one part."""
        return "grid" if self.grid else "cluster" if self.parts > 1 else "block"

    @property
    def stage_bytes(self) -> int:
        pad = 4 if self.element_bytes == 4 else 0
        return (self.rows + self.keys) * (self.slice + pad) * self.element_bytes

    @property
    def value_keys(self) -> int:
        """Number of keys whose values one copy loads."""
        return min(self.keys, 16 if self.element_bytes == 4 else 64)

    @property
    def slices(self) -> int:
        return self.chunk // self.slice

    @property
    def units(self) -> int:
        """Number of copies that load the values of a tile."""
        return self.keys // self.value_keys * (self.chunk // self.columns)

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a block. The value is the same as Layout::TOTAL in tiled_memory.cuh."""
        part = self.rows * (self.keys + 8) * 4
        weights = self.rows * (self.keys + 16 // self.element_bytes) * self.element_bytes
        staging = self._staging_bytes
        staging_at = 0 if staging <= part else part + weights
        stages = min(self.stages, self.slices) * self.stage_bytes
        phases = max(stages, self._groups * part, part + weights, staging_at + staging)
        copies = min(self.value_stages, self.units)
        values = self.value_keys * self.columns * self.element_bytes
        return math.ceil(phases / 1024) * 1024 + copies * values + 4 * self.rows * 4

    @property
    def scratch_floats(self) -> int:
        """Number of floats in global memory for the exchange of one tile if `grid` is set."""
        return (self.parts + 1) * self.rows * self.keys + 2 * self.rows

    @property
    def _groups(self) -> int:
        if self.element_bytes == 4:
            per_thread = min(8, self.rows // 4)
            return THREADS // (
                self.rows // per_thread * (4 if self.keys < 32 and self.rows < 32 else 8)
            )
        down = min(4, self.rows // 16)
        across = min(self.keys // 16, WARPS // down)
        return min(WARPS // (down * across), self.slice // 16)

    @property
    def _staging_bytes(self) -> int:
        if self.element_bytes == 4:
            return 0
        down = 4 if self.rows >= 128 else 2 if self.rows >= 64 else 1
        across = min(self.columns // 16, WARPS // down)
        return WARPS * 16 * (self.columns // across + 8) * 2

    def described(self) -> dict[str, object]:
        """Return the parameters that `tiled.tuning` reports."""
        return {
            "tile": f"{self.rows}x{self.keys}",
            "chunk": self.chunk,
            "parts": self.parts,
            "splits": self.splits,
            "exchange": self.exchange,
            "stages": self.stages,
            "value_stages": self.value_stages,
            "shared_bytes": self.shared_bytes,
        }


@lru_cache(maxsize=1024)
def choose_plan(problem: Problem, multiprocessors: int, exchange: str | None = None) -> Plan:
    """Return the plan with the shortest expected time on a GPU with the given number of SMs.

    If `exchange` is not None, consider only plans with this scope: `block` (nothing is exchanged,
    because a tile has one block), `cluster` or `grid`. Raise NotImplementedError if there is no
    plan.
    """
    if problem.keys > MAX_ONE_TILE:
        if exchange is not None:
            raise NotImplementedError(f"exchange {exchange} supports up to {MAX_ONE_TILE} keys")
        return _many_tiles(problem, multiprocessors)
    plans = [
        plan
        for plan in one_tile_plans(problem, multiprocessors)
        if exchange is None or plan.exchange == exchange
    ]
    if not plans:
        raise NotImplementedError(f"no plan exchanges through a {exchange} for {problem}")
    return min(plans, key=lambda plan: expected_us(plan, problem, multiprocessors))


def one_tile_plans(problem: Problem, multiprocessors: int) -> Iterator[Plan]:
    """Yield all plans in which a single tile contains all keys.

    The plans differ in the number of rows, the number of parts, and the scope of the exchange.
    """
    size = problem.element_bytes
    keys = max(16, _power_of_two(problem.keys))
    width = max(64, _power_of_two(problem.head_dim))
    for rows in (16, 32, 64, 128):
        if rows > max(16, _power_of_two(problem.rows)):
            continue
        chunk = 64
        while chunk <= width:
            parts = math.ceil(problem.head_dim / chunk)
            columns = min(chunk, 512, 32768 // rows // (2 if size == 2 and rows == 128 else 1))
            wide = 128 if rows == 16 else 64 if size == 2 or chunk >= 256 else 32
            plan = Plan(size, rows, keys, min(wide, chunk), chunk, columns, 2, 2, parts)
            if parts <= MAX_CLUSTER:
                yield _with_copies(plan)
            if parts > 1 and _blocks(problem, plan) <= multiprocessors:
                yield _with_copies(replace(plan, grid=True))
            chunk *= 2


def _many_tiles(problem: Problem, multiprocessors: int) -> Plan:
    """Return a plan in which a block processes the keys tile by tile.

    A block keeps up to 512 columns of the output in registers. If there are fewer blocks than SMs,
    the keys are split among more blocks.
    """
    size = problem.element_bytes
    rows = min(64, max(16, _power_of_two(problem.rows)))
    chunk = min(512, max(64, _power_of_two(problem.head_dim)))
    if size == 2 and chunk <= 128 and problem.rows > 64:
        rows = 128
    parts = math.ceil(problem.head_dim / chunk)
    slice_ = 64 if size == 2 else 32
    plan = Plan(size, rows, 64, slice_, chunk, chunk, 2, 2, parts, one=False)
    tiles = math.ceil(problem.keys / plan.keys)
    splits = max(1, min(tiles // 2, multiprocessors // _blocks(problem, plan)))
    splits = math.ceil(tiles / math.ceil(tiles / splits))
    return _with_copies(replace(plan, splits=splits))


def _with_copies(plan: Plan) -> Plan:
    """Return the plan with the largest numbers of copies in flight that fit into shared memory.

    Maximize the copies of values first (up to five), and then the copies of queries and keys.
    """
    for values in range(min(plan.units + 1, 5), 1, -1):
        for stages in range(plan.slices + 1, 1, -1):
            more = replace(plan, stages=stages, value_stages=values)
            if more.shared_bytes <= SHARED_BYTES:
                return more
    raise ValueError(f"{plan} does not fit into {SHARED_BYTES} bytes of shared memory")


def expected_us(plan: Plan, problem: Problem, multiprocessors: int) -> float:
    """Return a rough estimate of the time on an H200, in order to compare plans.

    Copies and arithmetic overlap partly, and the exchange follows them. The rates were fitted to
    measurements of scripts/tune_tiled.py.
    """
    blocks = _blocks(problem, plan)
    waves = math.ceil(blocks / multiprocessors)
    if plan.exchange == "cluster":
        # a cluster must fit into one GPC, which has 16 or 18 SMs, so some SMs remain unused
        waves = math.ceil(blocks / max(1, multiprocessors - 4 - plan.parts))
    bytes_ = (plan.rows * 2 + plan.keys * 2) * plan.chunk * plan.element_bytes
    rate = min(SM_BYTES_PER_NS, MEMORY_BYTES_PER_NS / min(blocks, multiprocessors))
    flop = 4 * plan.rows * plan.keys * plan.chunk
    half_rate = WGMMA_FLOP_PER_NS if plan.rows == 128 else MMA_FLOP_PER_NS
    arithmetic = flop / (FP32_FLOP_PER_NS if plan.element_bytes == 4 else half_rate)
    copies = bytes_ / rate
    spent = max(copies, arithmetic) + min(copies, arithmetic) / 2
    exchange, each = EXCHANGE_US[plan.exchange]
    return START_US + waves * (spent / 1000 + exchange + each * plan.parts)


def _blocks(problem: Problem, plan: Plan) -> int:
    return math.ceil(problem.rows / plan.rows) * problem.heads * plan.parts


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (max(1, number) - 1).bit_length()
