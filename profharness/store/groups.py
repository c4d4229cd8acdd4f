"""Exact launch statistics per group, from columns: what the store keeps so that questions need not
read launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[np.int64]

MAX_BITS = 62


@dataclass(frozen=True, slots=True)
class Groups:
    """One element a group, all int64. index is the row of one member; the rest are over the
    members' values.

    median is the middle duration, for an even count the mean of the two middle ones, rounded down.
    """

    index: Column
    count: Column
    total: Column
    median: Column
    minimum: Column
    maximum: Column
    first: Column


def pack(columns: Sequence[Column]) -> Column:
    """One key a row: equal keys exactly where all columns (values >= -1) are equal."""
    key = np.zeros(len(columns[0]), np.int64)
    used = 0
    for column in columns:
        shifted = column + 1
        bits = int(shifted.max(initial=0)).bit_length()
        if used + bits > MAX_BITS:
            unique, inverse = np.unique(key, return_inverse=True)
            key, used = inverse.astype(np.int64), len(unique).bit_length()
        if used + bits > MAX_BITS:
            unique, inverse = np.unique(shifted, return_inverse=True)
            shifted, bits = inverse.astype(np.int64), len(unique).bit_length()
        key = (key << bits) | shifted
        used += bits
    return key


def group(key: Column, duration: Column, start: Column) -> Groups:
    """Group rows by key; duration gives count, total, median, minimum and maximum, start the
    earliest.
    """
    order = np.argsort(pack([key, duration]))  # quicker than lexsort, same order
    ordered_key, ordered = key[order], duration[order]
    begins = np.flatnonzero(np.r_[True, ordered_key[1:] != ordered_key[:-1]][: len(key)])
    ends = np.r_[begins[1:], len(key)][: len(begins)]
    count = ends - begins
    low, high = begins + (count - 1) // 2, begins + count // 2
    empty = np.zeros(0, np.int64)
    return Groups(
        index=order[begins],
        count=count,
        total=np.add.reduceat(ordered, begins) if len(begins) else empty,
        median=ordered[low] + (ordered[high] - ordered[low]) // 2,
        minimum=ordered[begins],
        maximum=ordered[ends - 1],
        first=np.minimum.reduceat(start[order], begins) if len(begins) else empty,
    )


def busiest(key: Column, fine: Groups, coarse: Groups) -> Column:
    """For each coarse group the row index of its finest subgroup with the most members.

    key is the coarse key of every row. Ties go to the subgroup that started first.
    """
    owner = key[fine.index]
    order = np.lexsort((fine.first, -fine.count, owner))
    owners = owner[order]
    heads = order[np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]][: len(owners)])]
    place = np.searchsorted(owner[heads], key[coarse.index])
    return fine.index[heads][place]
