"""Predict the kernels that a backend launches for a config, and their grids.

A template lists the slots of a call, in the order of its launches. For each slot, a tree or network
selects the kernels that are launched, another tree selects the block, registers and shared memory
of each kernel, and formulas compute the sizes of the grid. scripts/atlas_train.py fits all of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from profharness.atlas.data import NOTHING
from profharness.atlas.features import (
    Columns,
    Integers,
    Values,
    product_features,
    product_sizes,
    tiled,
)

# Kernels whose shared memory contains a row of scores and one number for each warp of the block.
COMPUTED = re.compile(r"cunn_SoftMax(Forward|Backward)Smem")
PRODUCT = "product"  # the family of the kernels of batched products
MAX_SLOTS = 16  # maximum number of slots of one family between two anchors
MAX_PARTS = 4  # maximum number of kernels in one slot
# A slot is identified by a family of kernels and a number. The number is the number of anchors
# before the slot times MAX_SLOTS, plus the number of slots of the family since the last anchor.
Key = tuple[str, int]
# The product dP has the same sizes as the scores, and dQ has the same sizes as the output. The
# rules for dV also apply to dK, which has the same memory layout but other sizes.
SAME_PRODUCT = {3: 0, 5: 1}
SAME_LAYOUT = {4: 2}
LEAF = -1
ROWS_AT_ONCE = 8192


class Tree(msgspec.Struct, frozen=True, tag=True):
    """A binary decision tree that classifies. Children come after their parent."""

    names: tuple[str, ...]  # names of the features
    feature: Integers  # LEAF at a leaf
    threshold: Values  # a value up to the threshold goes to the left child
    left: Integers  # the left child, or the class at a leaf
    right: Integers

    def __post_init__(self) -> None:
        # if children come after their parents, every row reaches a leaf
        inner = np.flatnonzero(self.feature != LEAF)
        for child in (self.left[inner], self.right[inner]):
            if not ((child > inner) & (child < len(self.feature))).all():
                raise ValueError("a tree with a circle")

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
    """A neural network that classifies. It has fully connected layers with ReLU between them."""

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
    """The columns of some rows. Each column is selected on first use."""

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

    Quantity and multiplier are products of column names, such as `BH*D`. The name `1` is the number
    1.
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
    """Return the product of columns that a name such as `BH*D` describes."""
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
    """The launches of many calls, as columns."""

    place: Integers  # index of the config
    order: Integers
    kind: Integers
    grid: Integers  # launches x 3
    product: Integers  # for a batched product, its key in PRODUCTS; NOTHING for other launches

    @cached_property
    def blocks(self) -> Values:
        """Return the number of blocks of each launch. It is 1 for a memset."""
        blocks: Values = np.maximum(np.prod(self.grid, axis=1), 1).astype(np.float64)
        return blocks


class Rules(msgspec.Struct, frozen=True):
    """The rules that predict the kernels of one backend."""

    templates: tuple[tuple[Key, ...], ...]  # the slots of a call
    template: Tree
    # the kernels of a slot, for each class of its role
    parts: dict[Key, tuple[tuple[str, ...], ...]] = {}
    roles: dict[Key, Tree | Net] = {}
    # launch kinds of a kernel, and the tree that selects one
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
    """Return the slot whose rules are used for a slot. Some products share their rules."""
    product = product_of(key)
    return key if product == NOTHING else (PRODUCT, MAX_SLOTS * SAME_LAYOUT.get(product, product))


def product_of(key: Key) -> int:
    """Return the key in PRODUCTS of the batched product in a slot, or NOTHING if it has no product."""
    product = key[1] // MAX_SLOTS
    return SAME_PRODUCT.get(product, product) if key[0] == PRODUCT else NOTHING


def with_product(c: Columns, product: Integers) -> Columns:
    """Add the sizes and tiles of the batched products in a slot, if it has products."""
    if len(product) and product[0] != NOTHING:
        sizes = product_sizes(c, product)
        c.update(sizes | tiled(sizes))
    return c
