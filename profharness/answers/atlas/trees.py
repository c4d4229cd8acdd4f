"""Decision trees in numpy: one kind decides between classes, the other adds up corrections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]  # floats
Integers = npt.NDArray[Any]
LEAF = -1
MANY = 2000  # rows from which a split is looked for between codes
MOST_CODES = 512


@dataclass(frozen=True)
class Tree:
    """Binary decisions: rows with a feature at most its threshold go left. At a leaf, where the
    feature is LEAF, left holds the class.
    """

    feature: Integers
    threshold: Values
    left: Integers
    right: Integers

    def classes(self, table: Values) -> Integers:
        """The class of each row of a table, features as columns."""
        node = np.zeros(len(table), np.int64)
        going = np.arange(len(table)) if self.feature[0] != LEAF else np.arange(0)
        while len(going):
            at = node[going]
            feature = self.feature[at]
            lower = table[going, feature] <= self.threshold[at]
            node[going] = np.where(lower, self.left[at], self.right[at])
            going = going[self.feature[node[going]] != LEAF]
        return self.left[node]


def grow(table: Values, classes: Integers, asked: int = 0) -> Tree:
    """The tree that parts all rows by class as well as their features can, by Gini impurity.
    asked: how many features, drawn anew, a node looks at first; 0 for all.
    """
    binned = _Binned(table)
    dice = np.random.default_rng(len(table))
    nodes: list[tuple[int, float, int, int]] = []
    stack = [(np.arange(len(classes)), -1, False)]
    while stack:
        rows, parent, is_right = stack.pop()
        at = len(nodes)
        if parent >= 0:
            feature, threshold, left, right = nodes[parent]
            nodes[parent] = (
                feature,
                threshold,
                left if is_right else at,
                at if is_right else right,
            )
        present, local = np.unique(classes[rows], return_inverse=True)
        split = None
        if len(present) > 1:
            order = dice.permutation(table.shape[1]) if asked else np.arange(table.shape[1])
            split = binned.split(rows, local, len(present), order[:asked] if asked else order)
            if split is None and asked:
                split = binned.split(rows, local, len(present), order[asked:])
        if split is None:
            nodes.append((LEAF, 0.0, int(present[np.argmax(np.bincount(local))]), 0))
            continue
        nodes.append((*split, 0, 0))
        lower = table[rows, split[0]] <= split[1]
        stack += [(rows[~lower], at, True), (rows[lower], at, False)]
    columns = list(zip(*nodes, strict=True))
    return Tree(*(np.array(c, np.float64 if i == 1 else np.int64) for i, c in enumerate(columns)))


class _Binned:
    """Features as codes of their values; where these are many, of intervals of them."""

    def __init__(self, table: Values) -> None:
        self.table = table
        self.edges: list[Values] = []
        self.codes = np.empty(table.shape[::-1], np.int64)
        for feature, column in enumerate(table.T):
            known = np.unique(column)
            if len(known) > MOST_CODES:
                known = np.unique(
                    np.quantile(known, np.linspace(0, 1, MOST_CODES), method="nearest")
                )
            self.codes[feature] = np.searchsorted(known, column)
            self.edges.append(known)

    def split(
        self, rows: Integers, local: Integers, count: int, features: Integers
    ) -> tuple[int, float] | None:
        """The feature and threshold with the purest two parts; None where nothing parts the rows."""
        total = np.bincount(local, minlength=count).astype(np.float64)
        best, found = (total**2).sum() / len(rows) + 1e-9, None
        one_hot = np.zeros((len(rows), count), np.float32)
        one_hot[np.arange(len(rows)), local] = 1
        for feature in features.tolist():
            if len(rows) > MANY:
                lower, ends = self._by_codes(feature, rows, local, count)
            else:
                lower, ends = self._by_values(feature, rows, one_hot)
            if not len(lower):
                continue
            upper, size = total - lower, lower.sum(1)
            score = (lower**2).sum(1) / size + (upper**2).sum(1) / (len(rows) - size)
            at = int(np.argmax(score))
            if score[at] > best:
                best, found = score[at], (feature, roundest(*ends(at)))
        return found

    def _by_codes(
        self, feature: int, rows: Integers, local: Integers, count: int
    ) -> tuple[Values, Callable[[int], tuple[float, float]]]:
        """The rows of each class up to each code, and the values on both sides of a cut."""
        codes, edges = self.codes[feature][rows], self.edges[feature]
        cells = np.bincount(codes * count + local, minlength=len(edges) * count)
        cells = cells.reshape(-1, count)
        used = np.flatnonzero(cells.any(1))
        lower = cells[used].cumsum(0)[:-1].astype(np.float64)

        def ends(at: int) -> tuple[float, float]:
            inside = self.table[rows, feature]
            return float(inside[codes <= used[at]].max()), float(inside[codes > used[at]].min())

        return lower, ends

    def _by_values(
        self, feature: int, rows: Integers, one_hot: Values
    ) -> tuple[Values, Callable[[int], tuple[float, float]]]:
        """The same for each value that the rows have."""
        values = self.table[rows, feature]
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        edges = np.flatnonzero(ordered[1:] > ordered[:-1])
        lower = np.cumsum(one_hot[order], axis=0, dtype=np.float64)[edges] if len(edges) else edges
        return lower, lambda at: (float(ordered[edges[at]]), float(ordered[edges[at] + 1]))


def roundest(low: float, high: float) -> float:
    """A threshold from low up to below high: the multiple of the largest power of two, as limits in
    programs are; the middle where the numbers are no integers.
    """
    if low != int(low) or high != int(high) or high - low < 1:
        middle = (low + high) / 2
        return middle if middle < high else low
    first, last, step = int(low), int(high) - 1, 1
    while (last // (2 * step)) * 2 * step >= first and 2 * step <= max(last, 1):
        step *= 2
    return float((last // step) * step)
