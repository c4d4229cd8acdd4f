"""Corrections to a time that physics gives: boosted trees, each of a few questions that all rows are
asked alike, so that many configs are answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profharness.answers.atlas.trees import Integers, Values

Codes = npt.NDArray[np.uint8]
MOST_BINS = 128


@dataclass(frozen=True)
class Boost:
    """A sum of trees. edges are the thresholds of each feature, all in one row, and starts where a
    feature's begin. Tree t asks depth questions: whether feature[t, i] lies above its bin[t, i]; the
    answers are the bits of the place of its value.
    """

    edges: Values
    starts: Integers
    feature: Integers
    bin: Integers
    values: Values
    base: float

    def codes(self, table: Values) -> Codes:
        """The bins of a table with a row for each feature."""
        return np.stack(
            [
                np.searchsorted(self.edges[first:last], row).astype(np.uint8)
                for row, first, last in zip(table, self.starts, self.starts[1:], strict=False)
            ]
        )

    def sums(self, table: Values) -> Values:
        """The correction for each column of a table with a row for each feature."""
        codes = self.codes(table)
        total = np.full(codes.shape[1], self.base)
        for feature, edge, values in zip(self.feature, self.bin, self.values, strict=True):
            total += values[places(codes, feature, edge)]
        return total


def places(codes: Codes, feature: Integers, edge: Integers) -> Integers:
    """The leaf of each row."""
    place = np.zeros(codes.shape[1], np.uint8)
    for at, (row, threshold) in enumerate(zip(feature.tolist(), edge.tolist(), strict=True)):
        place |= (codes[row] > threshold).view(np.uint8) << np.uint8(at)
    return place


def edges_of(row: Values) -> Values:
    """Thresholds between the values of a feature, so that about as many rows lie in each bin."""
    known = np.unique(row)
    if len(known) > MOST_BINS:
        known = np.unique(np.quantile(row, np.linspace(0, 1, MOST_BINS), method="nearest"))
    middles: Values = (known[1:] + known[:-1]) / 2
    return middles


@dataclass(frozen=True)
class Schedule:
    """How trees are grown: their number, questions each, and the share of each correction taken."""

    trees: int = 400
    depth: int = 6
    rate: float = 0.12
    calm: float = 2.0  # rows of no correction that each leaf has besides its own
    asked: float = 0.5  # the share of the features that a tree may ask
    most: float = 0.5  # a larger error counts as this one


def boost(table: Values, target: Values, schedule: Schedule = Schedule(), seed: int = 0) -> Boost:
    """The trees that bring a table with a row for each feature to a target."""
    rng = np.random.default_rng(seed)
    edges = [edges_of(row) for row in table]
    starts = np.cumsum([0, *map(len, edges)])
    base = float(np.median(target))
    none = np.zeros((0, schedule.depth), np.int64)
    empty = Boost(np.concatenate(edges), starts, none, none, np.zeros(0), base)
    codes = empty.codes(table)
    wide = codes.astype(np.int64)
    usable = np.flatnonzero([len(each) > 0 for each in edges])
    rest = target - base
    features, bins, values = [], [], []
    for _ in range(schedule.trees):
        slope = np.clip(rest, -schedule.most, schedule.most)
        some = rng.permutation(usable)[: max(4, int(len(usable) * schedule.asked))]
        feature, edge = _questions(wide, slope, some, schedule)
        place = places(codes, feature, edge)
        leaves = 1 << schedule.depth
        value = np.bincount(place, slope, leaves) / (
            np.bincount(place, minlength=leaves) + schedule.calm
        )
        value *= schedule.rate
        rest = rest - value[place]
        features.append(feature)
        bins.append(edge)
        values.append(value)
    return Boost(empty.edges, starts, np.array(features), np.array(bins), np.array(values), base)


def _questions(
    codes: Integers, slope: Values, some: Integers, schedule: Schedule
) -> tuple[Integers, Integers]:
    """The questions of one tree, each the one that tells most after those before it."""
    place = np.zeros(codes.shape[1], np.int64)
    features, bins = [], []
    for level in range(schedule.depth):
        best = (-1.0, 0, 0)
        leaves = 1 << level
        offset = place * MOST_BINS
        for feature in some.tolist():
            at = offset + codes[feature]
            sums = np.bincount(at, slope, leaves * MOST_BINS).reshape(leaves, -1).cumsum(1)
            counts = np.bincount(at, minlength=leaves * MOST_BINS).reshape(leaves, -1).cumsum(1)
            above, more = sums[:, -1:] - sums, counts[:, -1:] - counts
            gain = (sums**2 / (counts + schedule.calm) + above**2 / (more + schedule.calm)).sum(0)
            edge = int(np.argmax(gain))
            if gain[edge] > best[0]:
                best = (float(gain[edge]), feature, edge)
        _, feature, edge = best
        features.append(feature)
        bins.append(edge)
        place |= (codes[feature] > edge).astype(np.int64) << level
    return np.array(features), np.array(bins)
