"""The launches of one trace as columns, held until they are written beside the store."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from profharness.trace import NONE as NULL  # in columns that may be NULL, where no value is below 0

Column = NDArray[np.int64]
NARROW = np.iinfo(np.int32)

__all__ = ["NULL", "Column", "LaunchColumns"]


class LaunchColumns:
    """Pieces of columns in the order of the launches' ids; 100 B a launch, for most values are small."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[NDArray[np.integer]]] = {}

    def add(self, columns: Mapping[str, Column]) -> None:
        """Take the next launches, which all have the columns of the first."""
        for name, column in columns.items():
            small = NARROW.min <= column.min() and column.max() <= NARROW.max
            # a copy, for the piece may be a view of a parser's buffer
            self._pieces.setdefault(name, []).append(column.astype(np.int32 if small else np.int64))

    def joined(self) -> dict[str, NDArray[np.integer]]:
        """Each column whole. The pieces are given up."""
        names = list(self._pieces)
        return {name: np.concatenate(self._pieces.pop(name)) for name in names}
