"""Predict the kernels that a backend launches for a config, their grids and times.

A template lists the slots of a call, in the order of the launches. For each slot, a tree or network
selects the kernels to launch, another tree selects the block, registers and shared memory of each
kernel, and formulas compute the sizes of the grid. A curve describes the time of a kernel as a
function of its work. Regression trees correct the sum of the times of a call.
scripts/atlas_train.py fits the trees, networks, formulas and curves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from profharness.atlas.data import NOTHING
from profharness.atlas.features import (
    SMS,
    Columns,
    Integers,
    Values,
    at,
    ceil,
    product_features,
    product_sizes,
    tiled,
)

# Kernels whose shared memory contains a row of scores and one number for each warp of the block.
COMPUTED = re.compile(r"cunn_SoftMax(Forward|Backward)Smem")
PRODUCT = "product"  # the family of the kernels of batched matrix products (bmm)
MAX_SLOTS = 16  # maximum number of slots of one family between two anchors
MAX_PARTS = 4  # maximum number of kernels in one slot
# A slot is identified by a family of kernels and a number. The number is the number of anchors
# before the slot times MAX_SLOTS, plus the number of slots of the family since the last anchor. An
# anchor is a slot of a main kernel, such as a batched product or the forward kernel of
# FlashAttention (ANCHORS in scripts/atlas_train.py).
Key = tuple[str, int]
# The product dP has the same sizes as the scores, and dQ has the same sizes as the output. The
# rules for dV also apply to dK, which has the same memory layout but other sizes.
SAME_PRODUCT = {3: 0, 5: 1}
SAME_LAYOUT = {4: 2}
KERNEL_US = 1.5  # time of a kernel that has no curve
FEW_QUERIES = 8
TINY_US, LONG_US = 20, 200
LEAF = -1
ROWS_AT_ONCE = 8192


class Tree(msgspec.Struct, frozen=True, tag=True):
    """A binary decision tree that predicts a class. Children are stored after their parent."""

    names: tuple[str, ...]  # names of the features
    feature: Integers  # LEAF at a leaf
    threshold: Values  # the left child is selected if the feature is at most the threshold
    left: Integers  # the left child, or the class at a leaf
    right: Integers

    def __post_init__(self) -> None:
        # if all children are stored after their parents, the search for a leaf always ends
        inner = np.flatnonzero(self.feature != LEAF)
        for child in (self.left[inner], self.right[inner]):
            if not ((child > inner) & (child < len(self.feature))).all():
                raise ValueError("a tree with a cycle")

    def classes(self, columns: Mapping[str, Values]) -> Integers:
        """Return the class of each row. `columns` contains the features by name."""
        if self.feature[0] == LEAF:
            return np.full(len(columns["B"]), self.left[0])
        table = np.stack([columns[name] for name in self.names], axis=1)
        node = np.zeros(len(table), np.int64)
        going = np.arange(len(table))
        while len(going):
            at = node[going]
            lower = table[going, self.feature[at]] <= self.threshold[at]
            node[going] = np.where(lower, self.left[at], self.right[at])
            going = going[self.feature[node[going]] != LEAF]
        return self.left[node]


class Net(msgspec.Struct, frozen=True, tag=True):
    """A neural network that predicts a class, with fully connected layers and ReLU between them."""

    shift: Values
    scale: Values
    layers: tuple[Values, ...]  # weights of each layer; the last row is the bias

    def classes(self, table: Values) -> Integers:
        """Return the class of each row of a table that has features as columns."""
        layers = [layer.astype(np.float32) for layer in self.layers]
        found = np.empty(len(table), np.int64)
        for first in range(0, len(table), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            values = ((table[rows] - self.shift) * self.scale).astype(np.float32)
            for layer in layers[:-1]:
                values = np.maximum(values @ layer[:-1] + layer[-1], 0)
            found[rows] = (values @ layers[-1][:-1] + layers[-1][-1]).argmax(axis=1)
        return found


class Subset(Columns):
    """A selection of rows from columns. The rows of a column are selected on first use."""

    def __init__(self, whole: Columns, rows: Integers) -> None:
        super().__init__()
        self.whole, self.rows = whole, rows

    def __missing__(self, name: str) -> Values:
        self[name] = self.whole[name][self.rows]
        return self[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.whole


class Formula(NamedTuple):
    """The formula min(ceil(quantity / step) * multiplier, limit) for a size of a grid.

    `quantity` and `multiplier` are products of column names, such as `BH*D`, or the number `1`.
    """

    quantity: str
    step: float
    multiplier: str
    limit: int = 0  # 0 means no limit

    def values(self, c: Columns) -> Values:
        """Return a size for each config."""
        steps = np.ceil(quantity(c, self.quantity) / self.step - 1e-9)
        value = steps * quantity(c, self.multiplier)
        return np.minimum(value, self.limit) if self.limit else value


def quantity(c: Columns, name: str) -> Values:
    """Return the product of the columns in a name such as `BH*D`."""
    if name in c:
        return c[name]
    value = np.ones_like(c["B"])
    for part in name.split("*"):
        if part != "1":
            value = value * c[part]
    return value


class Choice(msgspec.Struct, frozen=True, tag=True):
    """A list of possible sizes of a grid, and a tree that selects one of them."""

    sizes: tuple[int, ...]
    tree: Tree

    def values(self, c: Columns) -> Values:
        """Return a size for each config."""
        return np.array(self.sizes, np.float64)[self.tree.classes(c)]


Size = Formula | Choice


@dataclass
class Calls:
    """The launches of many calls. Each field is a column with one value per launch."""

    place: Integers  # index of the config
    order: Integers
    kind: Integers
    grid: Integers  # launches x 3
    product: Integers  # for a batched product, its key in PRODUCTS; NOTHING for other launches

    @cached_property
    def blocks(self) -> Values:
        """Return the number of blocks of each launch. A memset counts as one block."""
        blocks: Values = np.maximum(np.prod(self.grid, axis=1), 1).astype(np.float64)
        return blocks


class Rules(msgspec.Struct, frozen=True):
    """The rules that predict the kernels of one backend."""

    templates: tuple[tuple[Key, ...], ...]  # the slots of a call
    template: Tree
    # kernels of a slot, for each class that the tree or network in `roles` can predict
    parts: dict[Key, tuple[tuple[str, ...], ...]] = {}
    roles: dict[Key, Tree | Net] = {}
    # launch kinds of a kernel in a slot, and the tree that selects a launch kind
    kinds: dict[tuple[Key, str], tuple[tuple[int, ...], Tree]] = {}
    # sizes x, y and z of the grid, by launch kind and slot
    formulas: dict[tuple[int, Key], tuple[Size, Size, Size]] = {}

    def calls(self, c: Columns) -> Calls:
        """Return the launches of each config, in order."""
        chosen = self.template.classes(c)
        slots: dict[Key, list[tuple[Integers, int, int]]] = defaultdict(list)
        for template in np.unique(chosen):
            rows = np.flatnonzero(chosen == template)
            for number, key in enumerate(self.templates[template]):
                slots[pooled(key)].append((rows, number, product_of(key)))
        found: list[Calls] = []
        for key, users in slots.items():
            rows = np.concatenate([each for each, _, _ in users])
            order = np.concatenate([np.full(len(each), number) for each, number, _ in users])
            product = np.concatenate([np.full(len(each), number) for each, _, number in users])
            some = with_product(Subset(c, rows), product)
            found += self._slot_calls(key, rows, order * MAX_PARTS, product, some)
        names = ("place", "order", "kind", "grid", "product")
        columns = [np.concatenate([getattr(each, name) for each in found]) for name in names]
        by = np.lexsort((columns[1], columns[0]))
        return Calls(*(column[by] for column in columns))

    def _slot_calls(
        self, key: Key, rows: Integers, order: Integers, product: Integers, c: Columns
    ) -> list[Calls]:
        role, parts = self.roles[key], self.parts[key]
        classes = role.classes(product_features(c)) if isinstance(role, Net) else role.classes(c)
        found = []
        for number in np.unique(classes):
            inside = np.flatnonzero(classes == number)
            part = Subset(c, inside)
            for place, name in enumerate(parts[number]):
                kinds, tree = self.kinds[key, name]
                indexes = np.array(kinds)[tree.classes(part)]
                grid = np.empty((len(inside), 3), np.int64)
                for kind in np.unique(indexes):
                    same = indexes == kind
                    those = Subset(part, same)
                    formulas = self.formulas[int(kind), key]
                    grid[same] = np.stack([each.values(those) for each in formulas], axis=1)
                found.append(
                    Calls(rows[inside], order[inside] + place, indexes, grid, product[inside])
                )
        return found


def pooled(key: Key) -> Key:
    """Return the slot whose rules apply to a given slot. Some products share their rules."""
    product = product_of(key)
    return key if product == NOTHING else (PRODUCT, MAX_SLOTS * SAME_LAYOUT.get(product, product))


def product_of(key: Key) -> int:
    """Return the key in PRODUCTS of the product in a slot, or NOTHING if there is no product."""
    product = key[1] // MAX_SLOTS
    return SAME_PRODUCT.get(product, product) if key[0] == PRODUCT else NOTHING


def with_product(c: Columns, product: Integers) -> Columns:
    """Add the sizes and tiles of the batched products in a slot, if the slot has products."""
    if len(product) and product[0] != NOTHING:
        sizes = product_sizes(c, product)
        c.update(sizes | tiled(sizes))
    return c


def _pairs(c: Columns, rows: float, keys: float) -> Values:
    """Return the number of scores in the tiles of a head that the causal mask does not exclude."""
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


# Amounts of work on which the time of a kernel may depend. The column GRID is the number of blocks.
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
    """The time of a launch as a function of its work.

    The logarithm of the time is interpolated linearly between knots. Beyond the last knot, the time
    is proportional to the work.
    """

    work: str  # a key of WORKS or PRODUCT_WORKS
    x: Values  # log2 of the work
    y: Values  # log2 of microseconds

    def us(self, work: Values) -> Values:
        """Return the time in microseconds for each amount of work."""
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
    """Sums over the launches of each config, and properties of the longest launch.

    Times are in microseconds and come from the curves.
    """

    us: Values  # total time
    count: Values  # number of launches
    longest: Values  # time of the longest launch; the next three fields also describe this launch
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
