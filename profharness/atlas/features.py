"""Compute the features of configs from which the model selects kernels and estimates times.

All functions take and return arrays with one value per config. The rules for tiles and splits come
from the public code of FlashAttention and PyTorch. The other rules were derived from the atlas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from profharness.attention.config import Config
from profharness.dtypes import CONFIG_DTYPES

Values = npt.NDArray[Any]  # floats
Integers = npt.NDArray[Any]
Columns = dict[str, Values]
SMS = 132
KINDS = ("none", "bool", "float")  # kinds of masks that the atlas contains
MASK_LETTERS = "bhqk"
DEFAULT_MASK = "11qk"
# The sizes m, n and k of the batched products that the math backend computes. cuBLAS receives
# matrices in column-major order.
PRODUCTS: Mapping[int, tuple[str, str, str]] = {
    0: ("SK", "SQ", "D"),  # scores
    1: ("D", "SQ", "SK"),  # output
    2: ("D", "SK", "SQ"),  # dV
    3: ("SK", "SQ", "D"),  # dP
    4: ("SK", "D", "SQ"),  # dK, transposed
    5: ("D", "SQ", "SK"),  # dQ
}
# Tile sizes of cuBLAS's fp32 kernels.
TILES = ((32, 32), (32, 64), (64, 32), (64, 64), (128, 32), (32, 128), (64, 128), (128, 64), (128, 128),
         (64, 256), (256, 64), (128, 256), (256, 128))  # fmt: skip
RESIDENT = (1, 2, 3, 4, 6, 8)  # numbers of blocks per SM for which waves are counted


def ceil(value: Values, step: Values | float) -> Values:
    """Return value / step, rounded up."""
    return np.ceil(value / step)


def sizes(configs: Sequence[Config]) -> Columns:
    """Return the sizes of configs as columns.

    The dtypes and masks of the configs must be among those that an atlas can contain.
    """
    rows = [
        (
            each.batch,
            each.num_heads,
            each.num_kv_heads,
            each.seq_len_q,
            each.seq_len_kv,
            each.head_dim,
            CONFIG_DTYPES.index(str(each.dtype)),
            each.causal,
            each.bwd,
            KINDS.index(each.mask),
            *(letter != "1" for letter in (each.mask_shape or DEFAULT_MASK)),
        )
        for each in configs
    ]
    names = ("B", "H", "KV", "SQ", "SK", "D", "DT", "CAUSAL", "BWD", "MASK", "MB", "MH", "MQ", "MK")
    table = np.array(rows, np.float64).reshape(-1, len(names)).T
    return dict(zip(names, table, strict=True))


def with_shapes(c: Columns) -> Columns:
    """Return the sizes and all features that are derived from them."""
    c = dict(c)
    c["BH"], c["BKV"], c["G"] = c["B"] * c["H"], c["B"] * c["KV"], c["H"] / c["KV"]
    c["F32"] = (c["DT"] == 2) * 1.0
    c["ITEM"] = np.where(c["DT"] == 2, 4.0, 2.0)
    c["D8"] = ceil(c["D"], 8) * 8
    for name in ("SQ", "SK"):
        for step in (4, 8, 32, 64, 128, 256):
            c[f"{name}%{step}"] = c[name] % step
    c["D%8"], c["D%4"], c["D%32"] = c["D"] % 8, c["D"] % 4, c["D"] % 32
    c["Q"], c["K"] = c["BH"] * c["SQ"] * c["D"], c["BKV"] * c["SK"] * c["D"]
    c["KX"] = c["BH"] * c["SK"] * c["D"]
    c["S"] = c["BH"] * c["SQ"] * c["SK"]
    c["ROWS"], c["KROWS"] = c["BH"] * c["SQ"], c["BH"] * c["SK"]
    c["SQSK"], c["SQ=SK"] = c["SQ"] * c["SK"], (c["SQ"] == c["SK"]) * 1.0
    c["M"] = np.where(c["MASK"] > 0, _product(c), 0.0)
    c["SK8"] = ceil(c["SK"], 8) * 8
    c["M8"] = np.where(c["MASK"] > 0, _product(c | {"SK": c["SK8"]}), 0.0)
    c["SK16"] = ceil(c["SK"], 16) * 16
    for step in (64, 128):
        c[f"BLOCKS{step}"] = c["BH"] * ceil(c["SQ"], step)
        c[f"KBLOCKS{step}"] = c["BH"] * ceil(c["SK"], step)
    c["SQ*SK8"] = c["SQ"] * c["SK8"]
    # number of elements of a padded mask, which a fill kernel writes
    c["PADDED"] = np.where(c["MASK"] == 2, c["M8"], 1.0)
    # PyTorch splits elementwise kernels so that each of them processes at most 2 GiB
    for name in ("S", "K", "KX"):
        pieces = np.exp2(np.ceil(np.log2(np.maximum(1, c[name] * 4 / 2**31))))
        c[f"{name}P"], c[f"{name}PIECES"] = c[name] / pieces, pieces
    return _cudnn_shapes(_efficient_shapes(_flash_shapes(c)))


def _efficient_shapes(c: Columns) -> Columns:
    """Add the numbers of key splits and of floats to clear in the backward pass of `efficient`.

    For each tile of dQ, the backward pass clears a buffer and a lock. The backward pass also clears
    the sums over splits.
    """
    narrow, middle = c["D"] <= 64, (c["D"] > 64) & (c["D"] <= 128) & (c["F32"] == 0)
    wide = (c["D"] > 128) & (c["F32"] == 0)
    tiles = ceil(c["SK"], np.where(middle, 128.0, 64.0))
    tiles = np.where((c["BH"] >= 256) & (tiles <= 2), 1.0, tiles)
    c["KEYSPLITS"] = np.where(wide, np.clip(200 // c["BH"], 1, tiles), tiles)
    c["ESPLIT"] = (c["KEYSPLITS"] > 1) * 1.0
    buffers = ceil(c["SQ"], np.where(narrow, 64.0, 128.0))
    buffers = buffers * np.where(narrow, 4100.0, np.where(middle, 16388.0, ceil(c["D"], 64) * 8196))
    sums = np.where(wide, c["KEYSPLITS"] * 128 * ceil(c["D"], 128) * 128, 0.0)
    c["CLEARED"] = c["BH"] * (buffers + sums)
    return c


def _cudnn_shapes(c: Columns) -> Columns:
    """Add the grids of small kernels in cuDNN's backward pass, and the key splits in its decode.

    If there are many keys but few blocks, the decode kernel splits the keys. The number of splits
    is the largest power of two up to 64 for which there are fewer than two blocks per SM and at
    least 128 keys per split. This rule was derived from measurements.
    """
    blocks = c["BKV"] * ceil(c["G"], 16)
    fitting = 2 ** np.floor(np.log2(np.maximum(1, (2 * SMS - 1) / blocks)))
    tiles = 2 ** np.floor(np.log2(np.maximum(1, c["SK8"] / 128)))
    split = (blocks < 0.6 * SMS) & (c["SK"] > 512)
    c["CSPLITS"] = np.where(split, np.minimum(np.minimum(fitting, 64), tiles), 1.0)
    c["CPARTS"] = c["CSPLITS"] * ceil(c["D"], 128)
    odd = c["D"] % 16 > 0
    c["DQBLOCKS"] = ceil(c["SQ"], np.maximum(1, np.where(odd, 1024, 2048) // c["D"]))
    c["HEADBLOCKS"] = ceil(c["SK"], np.maximum(1, 1024 // c["D"]))
    c["DELTABLOCKS"] = ceil(c["SQ"], 2 ** np.floor(np.log2(np.maximum(1, 1024 / c["D"]))))
    return c


def _product(c: Columns) -> Values:
    result = np.ones_like(c["B"])
    for letter, size in zip(("MB", "MH", "MQ", "MK"), ("B", "H", "SQ", "SK"), strict=True):
        result = result * np.where(c[letter] > 0, c[size], 1.0)
    return result


def _flash_shapes(c: Columns) -> Columns:
    """Add the sizes that FlashAttention uses after it has rearranged heads and queries.

    If there is one query and several query heads share a key head, FlashAttention treats these
    heads as queries. FlashAttention splits the keys if there are too few blocks for all SMs
    (num_splits_heuristic in its public code).
    """
    swapped = (c["SQ"] == 1) & (c["H"] > c["KV"])
    c["SWAP"] = swapped * 1.0
    c["FSQ"] = np.where(swapped, c["G"], c["SQ"])
    c["FBH"] = np.where(swapped, c["BKV"], c["BH"])
    c["FH"] = np.where(swapped, c["KV"], c["H"])
    step = np.where(c["D8"] <= 64, 256.0, np.where(c["D8"] <= 128, 128.0, 64.0))
    c["FN"] = ceil(c["SK"], step)
    c["FBLOCKS"] = c["FBH"] * ceil(c["FSQ"], 64)
    c["SPLITS"] = _split_count(c["FBLOCKS"], c["FN"])
    c["SPLIT"] = (c["SPLITS"] > 1) * 1.0
    c["LOGSPLITS"] = np.ceil(np.log2(c["SPLITS"]))
    rows = np.where(c["D8"] > 224, 64.0, 128.0)
    width = np.where(c["D8"] <= 64, 128.0, 64.0)
    c["EVEN"] = ((c["FSQ"] % rows == 0) & (c["SK"] % width == 0)) * 1.0
    c["EVENSPLIT"] = ((c["FSQ"] % 64 == 0) & (c["SK"] % step == 0)) * 1.0
    return c


def _split_count(blocks: Values, tiles: Values, sms: int = 2 * SMS, most: int = 128) -> Values:
    """Return the smallest number of key splits with 85 % of the best utilization of the SMs."""
    limit = np.minimum(np.minimum(float(sms), tiles), most)
    best, result = np.zeros(len(blocks), np.float32), np.ones_like(blocks)
    uses = []
    for splits in range(1, most + 1):
        waves = np.float32(blocks * splits) / np.float32(sms)
        eligible = (splits <= limit) & (
            (splits == 1) | (ceil(tiles, splits) != ceil(tiles, max(1, splits - 1)))
        )
        use = np.where(eligible, waves / np.ceil(waves), np.float32(0))
        uses.append(use)
        best = np.maximum(best, use)
    for splits in range(most, 0, -1):
        use = uses[splits - 1]
        result = np.where(
            (use > 0) & (use >= np.float32(0.85) * best) & (splits <= limit), splits, result
        )
    return np.where(blocks >= 0.8 * sms, 1.0, result)


def at(c: Columns, rows: Integers) -> Columns:
    """Return the columns of the configs in `rows`."""
    return {name: column[rows] for name, column in c.items()}


def product_sizes(c: Columns, product: Integers | int) -> Columns:
    """Return the sizes of batched products.

    `product` is a key of PRODUCTS, or an array of keys, one per config.
    """
    if isinstance(product, int):
        m, n, k = (c[name] for name in PRODUCTS[product])
    else:
        present = np.unique(product).tolist()
        m, n, k = (
            np.select(
                [product == each for each in present], [c[PRODUCTS[each][at]] for each in present]
            )
            for at in range(3)
        )
    return {"m": m, "n": n, "k": k, "batch": c["BH"], "mn": m * n, "mnb": m * n * c["BH"]}


def tiled(p: Columns) -> Columns:
    """Return the number of tiles of each size in a product, and CUTLASS's grid for them.

    Column `T32x64` has the number of tiles of 32x64, and columns `X32x64` and `Y32x64` have the x
    and y sizes of the grid. CUTLASS groups up to eight tiles along m.
    """
    columns = {}
    for rows, width in TILES:
        down, across = ceil(p["m"], rows), ceil(p["n"], width)
        together = np.select([down >= 6, down >= 3, down >= 2], [8.0, 4.0, 2.0], 1.0)
        columns[f"T{rows}x{width}"] = down * across
        columns[f"X{rows}x{width}"] = across * together
        columns[f"Y{rows}x{width}"] = ceil(down, together)
    return columns


def product_features(p: Columns) -> Values:
    """Return the features that predict which kernel cuBLAS selects. Each feature is a column.

    The features are the logarithms and the alignment of the sizes. For each tile size, there are
    also the wasted work, the utilization of the SMs by the waves, and the data that a wave reads.
    """
    b, sizes = p["batch"], [p[name] for name in ("m", "n", "k")]
    m, n, k = sizes
    log, whole = np.log2, p["mnb"]
    rows = [log(b), *map(log, sizes), log(whole), log(m / n)]
    for height, width in TILES:
        down, across = ceil(m, height), ceil(n, width)
        blocks = b * down * across
        rows.append(log(blocks * height * width / whole))
        for resident in RESIDENT:
            waves = blocks / (SMS * resident)
            rows.append(log(np.ceil(waves) / waves))
        rows.append(np.minimum(log(blocks / SMS), 0))
        for wave in (SMS, 2 * SMS):
            edges = np.minimum(down, wave) * height + np.clip(wave / down, 1, across) * width
            rows.append(
                log(np.clip(wave / (down * across), 1, b) * edges / (height + width) / wave)
            )
        rows.append(((blocks - 1) % SMS + 1) / SMS)
    for size in sizes:
        rows += [size % step == 0 for step in (4, 8, 16, 32)]
        rows += [size <= most for most in (1, 2, 4, 8, 16, 32, 64)]
    rows += [ceil(k, step) * step / k - 1 for step in (8, 16, 32, 64, 128, 256)]
    return np.stack(rows, axis=1).astype(np.float32)
