"""Evaluate decision trees and neural networks with numpy. scripts/atlas_train.py fits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]  # floats
Integers = npt.NDArray[Any]
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
