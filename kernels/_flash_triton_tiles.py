"""The tiles that flash_triton chooses from, and how lengths fall into buckets."""

from __future__ import annotations

import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
SPANS = (64, 512, 2048, 8192)

Tile = tuple[int, int, int, int]
"""BLOCK_M, BLOCK_N, num_warps, num_stages."""

# kernel -> BLOCK_D up to -> tiles. Compiled for sm_90 none needs more shared memory than a block may
# have. None spills more than 16 bytes a thread with Triton 3.6; with 3.9 backward_kv does at 256.
HALF: dict[str, dict[int, tuple[Tile, ...]]] = {
    "forward": {
        64: ((128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3)),
        128: ((128, 128, 8, 2), (128, 64, 8, 3), (128, 32, 4, 4), (64, 64, 4, 2)),
        256: ((128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 3)),
    },
    "backward_kv": {
        64: ((64, 64, 8, 2), (32, 64, 4, 2)),
        128: ((32, 64, 8, 2),),
        256: ((16, 64, 8, 2),),
    },
    "backward_q": {
        64: ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)),
        128: ((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2)),
        256: ((64, 32, 8, 2), (128, 32, 8, 2)),
    },
}
# those that have no registers left for pointers
TMA_ALONE: dict[str, dict[int, tuple[Tile, ...]]] = {
    "forward": {
        64: ((128, 128, 4, 2),),
        128: ((64, 128, 4, 2), (256, 64, 16, 2)),
        256: ((64, 64, 4, 2),),
    },
    "backward_kv": {
        64: ((64, 128, 8, 3),),
        128: ((32, 128, 8, 2), (64, 64, 8, 2)),
        256: ((32, 64, 8, 2),),
    },
    "backward_q": {64: (), 128: (), 256: ()},
}
# fp32 without tensor cores: a dot is unrolled, and larger tiles spill and take long to compile
SINGLE: dict[str, dict[int, tuple[Tile, ...]]] = {
    "forward": {
        64: ((64, 32, 8, 2), (32, 32, 4, 2)),
        128: ((32, 32, 8, 1), (16, 32, 4, 1)),
        256: ((16, 32, 8, 1), (16, 16, 8, 1)),
    },
    "backward_kv": {
        64: ((32, 32, 8, 2), (16, 32, 4, 1)),
        128: ((16, 32, 8, 1), (16, 32, 4, 1)),
        256: ((16, 16, 8, 1),),
    },
    "backward_q": {
        64: ((64, 32, 8, 2), (32, 32, 4, 2)),
        128: ((32, 32, 4, 2), (16, 32, 4, 2)),
        256: ((16, 16, 4, 1),),
    },
}
# one each, small, so that short lengths have several tiles
INTERPRETER: dict[str, Tile] = {
    "forward": (64, 32, 4, 1),
    "backward_kv": (32, 64, 4, 1),
    "backward_q": (64, 32, 4, 1),
}


def block_d(head_dim: int) -> int:
    """head_dim filled up to what a dot takes."""
    return max(16, triton.next_power_of_2(head_dim))


def span(seq_len_q: int, seq_len_kv: int) -> int:
    """The bucket of two lengths, as one number: tiles are chosen once a bucket."""
    places = [
        next((at for at, most in enumerate(SPANS) if length <= most), len(SPANS))
        for length in (seq_len_q, seq_len_kv)
    ]
    return places[0] * (len(SPANS) + 1) + places[1]


def padded(seq_len_q: int) -> int:
    """Rows filled up to the largest BLOCK_M, which divides into all others."""
    return triton.cdiv(seq_len_q, 128) * 128


def delta_rows(columns: int) -> int:
    """Rows of a tile of `deltas` with that many columns."""
    return max(16, min(128, 8192 // columns))


def choices(kernel: str, columns: int, itemsize: int, *, tma: bool) -> list[triton.Config]:
    """The configs to measure; one under the interpreter, which has nothing to measure."""
    if INTERPRETED:
        return [config(INTERPRETER[kernel], tma=tma)]
    made = [config(each) for each in _of(HALF if itemsize == 2 else SINGLE, kernel, columns)]
    if tma and itemsize == 2:
        made += [config(each, tma=True) for each in _of(HALF, kernel, columns)]
        made += [config(each, tma=True) for each in _of(TMA_ALONE, kernel, columns)]
    return made


def _of(
    table: dict[str, dict[int, tuple[Tile, ...]]], kernel: str, columns: int
) -> tuple[Tile, ...]:
    return next(each for most, each in table[kernel].items() if columns <= most)


def config(tile: Tile, *, tma: bool = False) -> triton.Config:
    """A tile as Triton's autotuner takes it."""
    block_m, block_n, num_warps, num_stages = tile
    meta = {"BLOCK_M": block_m, "BLOCK_N": block_n, "TMA": tma}
    return triton.Config(meta, num_warps=num_warps, num_stages=num_stages)


def facts(chosen: triton.Config) -> dict[str, object]:
    """What is told of a config."""
    return {
        "BLOCK_M": chosen.kwargs["BLOCK_M"],
        "BLOCK_N": chosen.kwargs["BLOCK_N"],
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
        "variant": "tma" if chosen.kwargs["TMA"] else "pointers",
    }
