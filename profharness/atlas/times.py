"""Estimate the times of launches.

Each kernel has a curve, which gives its time as a function of its work. Regression trees correct the
sum of a call. scripts/atlas_train.py fits both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from profharness.atlas.features import SMS, Columns, Integers, Values, at, ceil, product_sizes
from profharness.atlas.kernels import Calls

KERNEL_US = 1.5  # time of a kernel that has no curve
FEW_QUERIES = 8
TINY_US, LONG_US = 20, 200


def _pairs(c: Columns, rows: float, keys: float) -> Values:
    """Return the scores of a head in whole tiles, up to the diagonal if the mask is causal."""
    height, width = ceil(c["SQ"], rows) * rows, ceil(c["SK"], keys) * keys
    low = np.minimum(height, width)
    below = low * (low + keys) / 2 + (height - low) * width
    return np.where(c["CAUSAL"] > 0, np.minimum(below, height * width), height * width)


def _quantized(blocks: Values) -> Values:
    """Return the number of waves, rounded up, if each SM runs one block at a time."""
    return np.ceil(blocks / SMS)


def _forward(rows: float) -> Callable[[Columns], Values]:
    def work(c: Columns) -> Values:
        tiles = c["BH"] * ceil(c["SQ"], rows)
        waves: Values = _quantized(tiles) / tiles
        return waves * c["BH"] * _pairs(c, rows, 128) * c["D8"]

    return work


def _backward(c: Columns) -> Values:
    tiles = c["BH"] * ceil(c["SK"], 128)
    waves: Values = _quantized(tiles) / tiles
    return waves * c["BH"] * _pairs(c, 64, 128) * c["D8"]


def _walk(c: Columns) -> Values:
    """Return the number of keys that the longest block loops over, times head_dim."""
    keys = np.where(c["CAUSAL"] > 0, np.minimum(c["SQ"], c["SK"]), c["SK"])
    width: Values = c["D8"]
    return ceil(keys, 64) * 64 * width


def _makespan(rows: float) -> Callable[[Columns], Values]:
    """Return a function that estimates the work of the busiest SM.

    The work is shared evenly by all SMs, but an SM has at least the work of the longest block.
    """

    def work(c: Columns) -> Values:
        longest: Values = np.minimum(c["SQ"], rows) * _walk(c)
        return np.maximum(c["BH"] * _pairs(c, rows, 64) * c["D8"] / SMS, longest) + longest / 2

    return work


# Quantities on which the time of a kernel may depend. GRID is its number of blocks.
WORKS: dict[str, Callable[[Columns], Values]] = {
    "waves": lambda c: _quantized(c["GRID"]),
    "blocks": lambda c: c["GRID"],
    "scores": lambda c: c["S"],
    "query": lambda c: c["Q"],
    "keys": lambda c: c["K"],
    "repeated keys": lambda c: c["KX"],
    "mask": lambda c: np.maximum(c["M"], 1),
    "keys of a block": lambda c: c["SK"] * _quantized(c["GRID"]),
    "rows": lambda c: c["GRID"] * c["SK"],
    "walk": lambda c: _walk(c) * _quantized(c["GRID"]),
    "walk of two": lambda c: _walk(c) * _quantized(c["GRID"] / 2),
    "pairs of a block": lambda c: _quantized(c["GRID"]) / c["GRID"] * c["BH"] * _pairs(c, 64, 64) * c["D8"],
    "pairs of two blocks": lambda c: _quantized(c["GRID"] / 2) / c["GRID"] * c["BH"] * _pairs(c, 64, 64) * c["D8"],
    "makespan 64": _makespan(64),
    "makespan 32": _makespan(32),
    "forward 128": _forward(128),
    "forward 64": _forward(64),
    "forward 32": _forward(32),
    "split keys": lambda c: _quantized(c["GRID"]) * ceil(c["SK"], 64) * c["D8"] * c["FBLOCKS"] / c["GRID"],
    "read": lambda c: c["BKV"] * np.where(c["CAUSAL"] > 0, np.minimum(c["SQ"], c["SK"]), c["SK"]) * c["D8"]
    + c["Q"] / 2,
    "backward": _backward,
    "pairs": lambda c: c["BH"] * _pairs(c, 64, 64) * c["D8"],
}  # fmt: skip
PRODUCT_WORKS: dict[str, Callable[[Columns], Values]] = {
    "waves of k": lambda c: _quantized(c["GRID"]) * c["k"],
    "blocks": WORKS["blocks"],
    "blocks of k": lambda c: c["GRID"] * c["k"],
    "m n k": lambda c: c["mnb"] * c["k"],
    "read": lambda c: (c["m"] + c["n"]) * c["k"] * c["batch"] + c["mnb"],
}


class Boost(msgspec.Struct, frozen=True):
    """A sum of small regression trees.

    A tree with n inner nodes is stored as a table of 2**n values. Bit i of the index into the table
    is set if the feature of node i is above its threshold.
    """

    feature: Integers  # trees x n
    threshold: Values  # trees x n
    values: Values  # trees x 2**n
    base: float = 0.0  # added to the sum

    def sums(self, table: Values) -> Values:
        """Return the sum for each column of a table that has features as rows."""
        bits = (1 << np.arange(self.feature.shape[1], dtype=np.uint8))[:, None]
        total = np.full(table.shape[1], self.base)
        thresholds, values = self.threshold[:, :, None], self.values.astype(np.float64)
        for feature, threshold, tree in zip(self.feature, thresholds, values, strict=True):
            above = (table[feature] > threshold).view(np.uint8)
            total += tree[np.bitwise_or.reduce(above * bits, axis=0)]
        return total


class Curve(msgspec.Struct, frozen=True):
    """The time of a launch, interpolated linearly between knots.

    Beyond the last knot the time is proportional to the work.
    """

    work: str  # a key of WORKS or PRODUCT_WORKS
    x: Values  # log2 of the work
    y: Values  # log2 of microseconds

    def us(self, work: Values) -> Values:
        """Return the times in microseconds."""
        x = np.log2(np.maximum(work, 1e-9))
        beyond = np.maximum(0, x - self.x[-1])
        return np.asarray(np.exp2(np.interp(x, self.x, self.y) + beyond))


SIZES = ("B", "H", "KV", "SQ", "SK", "D", "BH", "BKV", "G", "S", "Q", "K", "M", "BLOCKS64", "BLOCKS128", "KBLOCKS64",
         "KBLOCKS128", "SQSK", "ROWS", "KROWS", "FBLOCKS", "D8")  # fmt: skip
PLAIN = ("DT", "F32", "CAUSAL", "MASK", "MB", "MH", "MQ", "SK%8", "SK%4", "SK%64", "SK%128", "SQ%64", "SQ%128", "D%8",
         "D%32", "SPLITS", "KEYSPLITS", "SWAP", "SQ=SK", "EVEN")  # fmt: skip


def columns(c: Columns, launches: Launched) -> Values:
    """Return the features from which the trees correct the times. Each feature is a row."""
    rows = [np.log2(np.maximum(c[name], 0.5)) for name in SIZES]
    rows += [c[name] for name in PLAIN]
    rows += [np.log2(launches.us), launches.count, np.log2(launches.longest), launches.share]
    rows += [np.log2(np.maximum(launches.blocks, 1)), launches.blocks / SMS % 1, launches.code]
    for tile in (64, 128):
        for blocks in (c["BH"] * ceil(c["SQ"], tile), c["BH"] * ceil(c["SK"], tile)):
            waves = blocks / SMS
            rows += [np.ceil(waves), waves / np.ceil(waves)]
    rows += [np.log2(_walk(c)), np.log2(_makespan(64)(c)), c["D"] > 128]
    bytes_read = c["ITEM"] * (2 * c["Q"] + 2 * c["K"])
    rows += [np.log2(bytes_read), np.log2(c["BH"] * _pairs(c, 64, 64) * c["D8"] / bytes_read)]
    return np.stack(rows)


@dataclass(frozen=True)
class Launched:
    """The launches of each config, summed, with times from the curves."""

    us: Values  # microseconds, as all times
    count: Values
    longest: Values  # time of the longest launch, to which also the next three fields belong
    share: Values
    blocks: Values
    code: Values
    each: Values  # time of every launch

    def at(self, rows: Integers) -> Launched:
        """Return the values of the configs in `rows`. `each` is not changed."""
        names = ("us", "count", "longest", "share", "blocks", "code")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


def launch_columns(c: Columns, calls: Calls, some: Integers, product: int) -> Columns:
    """Return the columns from which the functions in WORKS compute the work of some launches."""
    columns = at(c, calls.place[some])
    if product >= 0:
        columns = columns | product_sizes(columns, product)
    return columns | {"GRID": calls.blocks[some]}


def together(
    calls: Calls, c: Columns, codes: Integers, curves: dict[tuple[int, int], Curve]
) -> Launched:
    """Compute the time of each launch from its curve, and the sums for each config."""
    code, us = codes[calls.kind], np.full(len(calls.kind), KERNEL_US)
    joined = code * 8 + calls.product + 1
    order = np.argsort(joined, kind="stable")
    for some in np.split(order, np.flatnonzero(np.diff(joined[order])) + 1):
        product = int(calls.product[some[0]])
        curve = curves.get((int(code[some[0]]), product))
        if curve is not None:
            table = PRODUCT_WORKS if product >= 0 else WORKS
            us[some] = curve.us(table[curve.work](launch_columns(c, calls, some, product)))
    count = len(c["B"])
    total = np.bincount(calls.place, us, count)
    number = np.bincount(calls.place, minlength=count)
    last = np.lexsort((us, calls.place))[np.cumsum(number) - 1]
    return Launched(
        total, number.astype(np.float64), us[last], us[last] / total, calls.blocks[last],
        joined[last].astype(np.float64), us,
    )  # fmt: skip


def regimes_of(c: Columns, us: Values) -> list[str]:
    """Return the regime of each call, such as `decode tiny` or `masked long`."""
    kinds = np.select(
        [c["SQ"] <= FEW_QUERIES, c["MASK"] > 0, c["CAUSAL"] > 0],
        ["decode", "masked", "causal"],
        "whole",
    )
    sizes = np.select([us < TINY_US, us < LONG_US], ["tiny", "short"], "long")
    return [f"{kind} {size}" for kind, size in zip(kinds.tolist(), sizes.tolist(), strict=True)]
