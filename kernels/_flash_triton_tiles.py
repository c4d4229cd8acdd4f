"""The tile sizes that flash_triton can choose, and the buckets of lengths for autotuning."""

from __future__ import annotations

import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
SPANS = (64, 512, 2048, 8192)

Tile = tuple[int, int, int, int]
"""BLOCK_M, BLOCK_N, num_warps, num_stages."""

# Maps each pass, and the largest BLOCK_D, to the tiles to try. On sm_90, no tile needs more shared
# memory than a block may have. With Triton 3.6, no tile spills more than 16 bytes per thread. With
# Triton 3.9, the tile of backward_kv for a BLOCK_D of 256 spills more.
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
# Tiles that are used only with TMA, because pointers would need too many registers.
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
# Tiles for fp32, which is computed without tensor cores. Dot products are unrolled, so larger tiles
# would spill registers and take long to compile.
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
# One small tile per pass, so that even short sequences have several tiles.
INTERPRETER: dict[str, Tile] = {
    "forward": (64, 32, 4, 1),
    "backward_kv": (32, 64, 4, 1),
    "backward_q": (64, 32, 4, 1),
}


def block_d(head_dim: int) -> int:
    """Return head_dim rounded up to a size that tl.dot supports."""
    return max(16, triton.next_power_of_2(head_dim))


def span(seq_len_q: int, seq_len_kv: int) -> int:
    """Return the number of the bucket of two lengths. The autotuner runs once per bucket."""
    places = [
        next((at for at, most in enumerate(SPANS) if length <= most), len(SPANS))
        for length in (seq_len_q, seq_len_kv)
    ]
    return places[0] * (len(SPANS) + 1) + places[1]


def padded(seq_len_q: int) -> int:
    """Return the number of rows, rounded up to a multiple of every BLOCK_M of the backward pass."""
    return triton.cdiv(seq_len_q, 128) * 128


def delta_rows(columns: int) -> int:
    """Return the number of rows of a tile in `flash_backward_delta`, given its columns."""
    return max(16, min(128, 8192 // columns))


def choices(kernel: str, columns: int, itemsize: int, *, tma: bool) -> list[triton.Config]:
    """Return the Triton configs that the autotuner measures for a pass.

    For the interpreter, return only one config, because its times are meaningless.
    """
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
    """Convert a tile to a config for Triton's autotuner."""
    block_m, block_n, num_warps, num_stages = tile
    meta = {"BLOCK_M": block_m, "BLOCK_N": block_n, "TMA": tma}
    return triton.Config(meta, num_warps=num_warps, num_stages=num_stages)


def facts(chosen: triton.Config) -> dict[str, object]:
    """Return the properties of a config that `tuning` reports."""
    return {
        "BLOCK_M": chosen.kwargs["BLOCK_M"],
        "BLOCK_N": chosen.kwargs["BLOCK_N"],
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
        "variant": "tma" if chosen.kwargs["TMA"] else "pointers",
    }
