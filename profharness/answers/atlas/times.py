"""How long launches take: of each kernel a curve over the work that its time follows most closely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from profharness.answers.atlas.features import SMS, Columns, at, ceil, product_sizes
from profharness.answers.atlas.kernels import Calls
from profharness.answers.atlas.trees import Integers, Values

KERNEL_US = 1.5  # of a kernel without a curve
FEW_QUERIES = 8
TINY_US, LONG_US = 20, 200
KNOTS = 24
LEAST = 6  # launches a knot
FEW = 12  # launches of a kernel that are too few to choose its work by


def _pairs(c: Columns, rows: float, keys: float) -> Values:
    """Scores of a head in whole tiles; causal ones end at the diagonal."""
    height, width = ceil(c["SQ"], rows) * rows, ceil(c["SK"], keys) * keys
    low = np.minimum(height, width)
    below = low * (low + keys) / 2 + (height - low) * width
    return np.where(c["CAUSAL"] > 0, np.minimum(below, height * width), height * width)


def _quantized(blocks: Values) -> Values:
    """Waves of one block an SM, the last one whole."""
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
    """The keys that the block with the most of them goes over, by head_dim."""
    keys = np.where(c["CAUSAL"] > 0, np.minimum(c["SQ"], c["SK"]), c["SK"])
    width: Values = c["D8"]
    return ceil(keys, 64) * 64 * width


def _makespan(rows: float) -> Callable[[Columns], Values]:
    """What one SM of all has to do, and no less than the longest block."""

    def work(c: Columns) -> Values:
        longest: Values = np.minimum(c["SQ"], rows) * _walk(c)
        return np.maximum(c["BH"] * _pairs(c, rows, 64) * c["D8"] / SMS, longest) + longest / 2

    return work


# What a kernel's time may follow, by the columns of its configs, of which GRID are its blocks.
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


@dataclass(frozen=True)
class Curve:
    """The time of a launch, by the binary logarithms of work and microseconds at knots. Beyond the
    last one time grows as work does.
    """

    work: str
    x: Values
    y: Values

    def us(self, work: Values) -> Values:
        """The microseconds of some work."""
        x = np.log2(np.maximum(work, 1e-9))
        beyond = np.maximum(0, x - self.x[-1])
        return np.asarray(np.exp2(np.interp(x, self.x, self.y) + beyond))


def curve_of(works: dict[str, Values], us: Values) -> Curve:
    """The curve over the work that gives these times best."""
    y = np.log2(np.maximum(us, 0.1))
    best, found = np.inf, Curve("blocks", np.zeros(1), np.array([np.median(y)]))
    for name, work in works.items():
        x = np.log2(np.maximum(work, 1e-9))
        curve = _through(name, x, y)
        missed = float(np.mean(np.minimum(np.abs(np.log2(curve.us(work)) - y), 1)))
        missed += 1e-4 * len(curve.x)  # fewer knots are better
        if missed < best:
            best, found = missed, curve
        if len(us) < FEW:
            break
    return found


def _through(name: str, x: Values, y: Values) -> Curve:
    order = np.argsort(x, kind="stable")
    count = int(np.clip(len(x) // LEAST, 1, KNOTS))
    parts = np.array_split(order, count)
    at = np.array([np.median(x[part]) for part in parts])
    value = np.array([np.median(y[part]) for part in parts])
    keep = np.concatenate([[True], np.diff(at) > 1e-6])
    at, value = at[keep], value[keep]
    return Curve(name, at, np.maximum.accumulate(value))


SIZES = ("B", "H", "KV", "SQ", "SK", "D", "BH", "BKV", "G", "S", "Q", "K", "M", "BLOCKS64", "BLOCKS128", "KBLOCKS64",
         "KBLOCKS128", "SQSK", "ROWS", "KROWS", "FBLOCKS", "D8")  # fmt: skip
PLAIN = ("DT", "F32", "CAUSAL", "MASK", "MB", "MH", "MQ", "SK%8", "SK%4", "SK%64", "SK%128", "SQ%64", "SQ%128", "D%8",
         "D%32", "SPLITS", "KEYSPLITS", "SWAP", "SQ=SK", "EVEN")  # fmt: skip


def columns(c: Columns, launches: Launched) -> Values:
    """The features of the trees, a row for each."""
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
    """What the launches of each config say together: the time by their curves, their number, the
    longest one's time, share, blocks and code.
    """

    us: Values
    count: Values
    longest: Values
    share: Values
    blocks: Values
    code: Values
    each: Values  # microseconds of every launch

    def at(self, rows: Integers) -> Launched:
        """Those of some configs; each is left as it is."""
        names = ("us", "count", "longest", "share", "blocks", "code")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


def launch_columns(c: Columns, calls: Calls, some: Integers, product: int) -> Columns:
    """The columns that the work of some launches hangs on."""
    columns = at(c, calls.place[some])
    if product >= 0:
        columns = columns | product_sizes(columns, product)
    return columns | {"GRID": calls.blocks[some]}


def works_of(c: Columns, product: int) -> dict[str, Values]:
    """All works that a curve may follow."""
    return {name: work(c) for name, work in (PRODUCT_WORKS if product >= 0 else WORKS).items()}


def together(
    calls: Calls, c: Columns, codes: Integers, curves: dict[tuple[int, int], Curve]
) -> Launched:
    """The launches of configs by their curves, summed up for each config."""
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
    """What kind of call each is: `decode tiny`, `masked long`."""
    kinds = np.select(
        [c["SQ"] <= FEW_QUERIES, c["MASK"] > 0, c["CAUSAL"] > 0],
        ["decode", "masked", "causal"],
        "whole",
    )
    sizes = np.select([us < TINY_US, us < LONG_US], ["tiny", "short"], "long")
    return [f"{kind} {size}" for kind, size in zip(kinds.tolist(), sizes.tolist(), strict=True)]
