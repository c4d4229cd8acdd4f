"""How tiled.cu cuts a problem: pure arithmetic, no GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

THREADS = 256
WARPS = THREADS // 32
SHARED_BYTES = 227 * 1024
"""Shared memory that one block can have (compute capability 9.0)."""
SHARED_BYTES_OF_TWO = 113 * 1024
"""The same where two blocks are to share an SM."""
MAX_CLUSTER = 16
MAX_ONE_TILE = 128
"""Keys that are one tile."""


@dataclass(frozen=True)
class Problem:
    """heads: batch times query heads; rows, keys and head_dim of each; element_bytes 2 or 4."""

    heads: int
    rows: int
    keys: int
    head_dim: int
    element_bytes: int
    causal: bool = False


@dataclass(frozen=True)
class Plan:
    """One instance of the kernel and how often it is launched; the names are those of tiled.cu.

    rows and keys are the tile (BM, BN), chunk the columns of head_dim a block has, columns those it
    writes in a pass (PC), slice those of queries and keys it copies at a time (BK); stages and
    value_stages how many copies are under way; one: all keys are one tile; grid: exchange through L2
    among blocks that are resident together, else in a cluster.
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

    @property
    def template(self) -> str:
        """The kernel's template arguments after its element type."""
        numbers = (self.rows, self.keys, self.slice, self.chunk, self.columns)
        flags = (self.one, self.grid, self.splits > 1)
        words = [*map(str, (*numbers, self.stages, self.value_stages))]
        words += [str(flag).lower() for flag in flags]
        return ", ".join([*words, str(self.per_sm)])

    @property
    def stage_bytes(self) -> int:
        pad = 4 if self.element_bytes == 4 else 0
        return (self.rows + self.keys) * (self.slice + pad) * self.element_bytes

    @property
    def value_keys(self) -> int:
        """Keys of V in one copy."""
        return min(self.keys, 16 if self.element_bytes == 4 else 64)

    @property
    def slices(self) -> int:
        return self.chunk // self.slice

    @property
    def units(self) -> int:
        """Copies of V that a tile takes."""
        return self.keys // self.value_keys * (self.chunk // self.columns)

    @property
    def shared_bytes(self) -> int:
        """Layout::TOTAL of tiled_memory.cuh."""
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
        """Global memory that the exchange of one tile takes, with grid."""
        return (self.parts + 1) * self.rows * self.keys + 2 * self.rows

    @property
    def _groups(self) -> int:
        if self.element_bytes == 4:
            per_thread = min(8, self.rows // 4)
            return THREADS // (self.rows // per_thread * 8)
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
        """For a record of the run."""
        return {
            "tile": f"{self.rows}x{self.keys}",
            "chunk": self.chunk,
            "parts": self.parts,
            "splits": self.splits,
            "exchange": "grid" if self.grid else "cluster" if self.parts > 1 else "block",
            "stages": self.stages,
            "value_stages": self.value_stages,
            "shared_bytes": self.shared_bytes,
        }


def choose_plan(problem: Problem, multiprocessors: int) -> Plan:
    """The plan for a problem on a GPU with that many SMs."""
    if problem.keys <= MAX_ONE_TILE:
        return _one_tile(problem, multiprocessors)
    return _many_tiles(problem, multiprocessors)


def _one_tile(problem: Problem, multiprocessors: int) -> Plan:
    """All keys at once: enough parts to give every SM a block, in a grid where a cluster is too small."""
    size = problem.element_bytes
    rows = min(128, max(16, _power_of_two(problem.rows)))
    keys = max(16, _power_of_two(problem.keys))
    chunk = min(_power_of_two(problem.head_dim), 512)
    while _blocks(problem, rows, chunk // 2) <= multiprocessors and chunk > 64:
        chunk //= 2
    chunk = max(64, chunk)
    parts = math.ceil(problem.head_dim / chunk)
    while parts > MAX_CLUSTER and _blocks(problem, rows, chunk) > multiprocessors:
        chunk, parts = chunk * 2, math.ceil(problem.head_dim / (chunk * 2))
    grid = parts > 1 and _blocks(problem, rows, chunk) <= multiprocessors
    columns = min(chunk, 512, 32768 // rows // (2 if size == 2 and rows == 128 else 1))
    slice_ = 64 if size == 2 else 32
    plan = Plan(size, rows, keys, slice_, chunk, columns, 3, 2, parts, grid=grid)
    return _with_copies(plan)


def _many_tiles(problem: Problem, multiprocessors: int) -> Plan:
    """Tile by tile: a block keeps its part of the output, up to 512 columns, in registers; keys are
    split where there are too few blocks.
    """
    size = problem.element_bytes
    rows = min(64, max(16, _power_of_two(problem.rows)))
    chunk = min(512, max(64, _power_of_two(problem.head_dim)))
    parts = math.ceil(problem.head_dim / chunk)
    tiles = math.ceil(problem.keys / 64)
    splits = max(1, min(tiles // 2, multiprocessors // _blocks(problem, rows, chunk)))
    splits = math.ceil(tiles / math.ceil(tiles / splits))
    slice_ = 64 if size == 2 else 32
    plan = Plan(size, rows, 64, slice_, chunk, chunk, 3, 2, parts, splits, one=False)
    return _with_copies(plan)


def _with_copies(plan: Plan) -> Plan:
    """As many copies under way as the shared memory holds."""
    plan = replace(plan, stages=min(plan.stages, plan.slices + 1))
    for values in range(plan.units + 1, 2, -1):
        more = replace(plan, value_stages=values)
        if more.shared_bytes <= SHARED_BYTES:
            return more
    return replace(plan, value_stages=2)


def _blocks(problem: Problem, rows: int, chunk: int) -> int:
    tiles = math.ceil(problem.rows / rows)
    return tiles * problem.heads * math.ceil(problem.head_dim / max(chunk, 64))


def _power_of_two(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()
