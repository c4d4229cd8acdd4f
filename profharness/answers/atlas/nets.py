"""Small networks that decide between classes where the rule behind them is a comparison of many numbers, such
as cuBLAS's among its kernels.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profharness.answers.atlas.trees import Integers, Values

Floats = npt.NDArray[np.float32]
ROWS = 8192  # that are answered at once


@dataclass(frozen=True)
class Net:
    """Layers of weights, the bias as the last row of each. Features are shifted and scaled before;
    all layers but the last keep what is above zero.
    """

    shift: Values
    scale: Values
    layers: tuple[npt.NDArray[np.float16], ...]

    def classes(self, table: Values) -> Integers:
        """The class of each row of a table, features as columns."""
        layers = [layer.astype(np.float32) for layer in self.layers]
        found = np.empty(len(table), np.int64)
        for first in range(0, len(table), ROWS):
            values = self.normal(table[first : first + ROWS])
            found[first : first + ROWS] = _forward(layers, values)[-1].argmax(axis=1)
        return found

    def normal(self, table: Values) -> Floats:
        """The features as the first layer takes them."""
        values: Floats = ((table - self.shift) * self.scale).astype(np.float32)
        return values


def _forward(layers: list[Floats], values: Floats) -> list[Floats]:
    """What goes into each layer, and what comes out of the last one."""
    between = [values]
    for number, layer in enumerate(layers):
        values = values @ layer[:-1]
        values += layer[-1]
        if number + 1 < len(layers):
            np.maximum(values, 0, out=values)
        between.append(values)
    return between


@dataclass(frozen=True)
class Lessons:
    """How a network is fitted: neurons of a layer, rounds over all rows, rows a step, and the largest step."""

    width: int = 256
    rounds: int = 24
    rows: int = 2048
    step: float = 0.02
    warm: float = 0.3  # the share of the steps in which they grow
    decay: float = 1e-4


def fitted(table: Values, classes: Integers, lessons: Lessons = Lessons(), seed: int = 0) -> Net:
    """The network that gives the rows of a table their classes, by cross-entropy and Adam."""
    dice = np.random.default_rng(seed)
    shift = table.mean(axis=0)
    scale = 1 / (table.std(axis=0) + 1e-3)
    empty = Net(shift.astype(np.float32), scale.astype(np.float32), ())
    values = empty.normal(table)
    sizes = (table.shape[1], lessons.width, lessons.width, int(classes.max()) + 1)
    layers = [
        np.vstack([dice.normal(0, np.sqrt(2 / rows), (rows, width)), np.zeros((1, width))]).astype(np.float32)
        for rows, width in itertools.pairwise(sizes)
    ]  # fmt: skip
    first, second = (
        [np.zeros_like(each) for each in layers],
        [np.zeros_like(each) for each in layers],
    )
    batches = max(1, len(table) // lessons.rows)
    steps = lessons.rounds * batches
    for step in range(steps):
        if step % batches == 0:
            order = dice.permutation(len(table))
        rows = order[step % batches * lessons.rows :][: lessons.rows]
        rate = _rate(step / steps, lessons)
        slopes = _slopes(layers, values[rows], classes[rows])
        shrunk = np.float32((1 - 0.9 ** (step + 1)) / np.sqrt(1 - 0.999 ** (step + 1)))
        for layer, slope, mean, square in zip(layers, slopes, first, second, strict=True):
            mean += np.float32(0.1) * (slope - mean)
            square += np.float32(0.001) * (slope * slope - square)
            layer *= np.float32(1 - rate * lessons.decay)
            layer -= np.float32(rate) / shrunk * mean / (np.sqrt(square) + np.float32(1e-8))
    return Net(empty.shift, empty.scale, tuple(each.astype(np.float16) for each in layers))


def _rate(done: float, lessons: Lessons) -> float:
    """The size of a step: growing, then falling to nothing, by cosines."""
    if done < lessons.warm:
        return lessons.step * (0.52 - 0.48 * float(np.cos(np.pi * done / lessons.warm)))
    return lessons.step * (
        0.5 + 0.5 * float(np.cos(np.pi * (done - lessons.warm) / (1 - lessons.warm)))
    )


def _slopes(layers: list[Floats], values: Floats, classes: Integers) -> list[Floats]:
    """How the cross-entropy changes with each layer."""
    *between, result = _forward(layers, values)
    result = np.exp(result - result.max(axis=1, keepdims=True))
    result /= result.sum(axis=1, keepdims=True)
    result[np.arange(len(classes)), classes] -= 1
    result /= np.float32(len(classes))
    slopes = []
    for number in reversed(range(len(layers))):
        into = between[number]
        slopes.append(np.vstack([into.T @ result, result.sum(axis=0, keepdims=True)]))
        if number:
            result = result @ layers[number][:-1].T
            result *= into > 0
    return slopes[::-1]
