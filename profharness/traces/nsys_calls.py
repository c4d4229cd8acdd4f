"""Find the API calls that an export's activities need, with a bit per call."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profharness.traces.columns import Flags, Ints, distinct

PROCESS_SHIFT = 40  # correlation ids count per process; a key is process << 40 | correlation
CORRELATIONS = 1 << PROCESS_SHIFT
MAX_NEEDED = 1 << 25  # bytes of flags for needed calls, eight flags per byte

Bits = NDArray[np.uint8]


class NeededCalls:
    """The calls whose keys activities have. Note all activities first, then take the calls.

    `shared` counts activities beyond the first with the same key, `repeated` counts calls beyond
    the first with the same key if an activity has it. If the ids exceed the flags, both are lower
    bounds, `all` is true, and every call counts as needed.
    """

    def __init__(self) -> None:
        self.all = False
        self.shared = self.repeated = 0
        self._waiting: dict[int, Bits] = {}
        self._taken: dict[int, Bits] = {}

    def note(self, key: Ints) -> int:
        """Note activities by key, -1 for none. Return how many share the key of an earlier one."""
        if self.all:
            return 0
        shared = 0
        for process in distinct(key[key >= 0] >> PROCESS_SHIFT):
            ids = key[key >> PROCESS_SHIFT == process] % CORRELATIONS
            flags = self._waiting.get(process, np.zeros(0, np.uint8))
            more = int(ids.max() >> 3) + 1 - len(flags)
            if more + sum(map(len, self._waiting.values())) > MAX_NEEDED:
                self.all = True
                return shared
            if more > 0:
                flags = np.append(flags, np.zeros(more + len(flags) // 2, np.uint8))
                self._waiting[process] = flags
            fresh = np.unique(ids)
            fresh = fresh[(flags[fresh >> 3] & _bit(fresh)) == 0]
            np.bitwise_or.at(flags, fresh >> 3, _bit(fresh))
            shared += len(ids) - len(fresh)
        self.shared += shared
        return shared

    def take(self, key: Ints) -> tuple[Flags, Flags]:
        """Return which calls activities still need, and which of the others no activity has.

        The calls are given by key, without -1, and count as found afterwards.
        """
        if self.all:
            return np.ones(len(key), np.bool_), np.zeros(len(key), np.bool_)
        needed, idle = np.zeros(len(key), np.bool_), np.ones(len(key), np.bool_)
        process, ids = key >> PROCESS_SHIFT, key % CORRELATIONS
        for number in distinct(process):
            flags = self._waiting.get(number, np.zeros(0, np.uint8))
            taken = self._taken.setdefault(number, np.zeros_like(flags))
            rows = np.flatnonzero((process == number) & (ids >> 3 < len(flags)))
            byte, bit = ids[rows] >> 3, _bit(ids[rows])
            waited, again = (flags[byte] & bit) > 0, (taken[byte] & bit) > 0
            needed[rows], idle[rows] = waited, ~(waited | again)
            count = int(waited.sum())
            first = len(np.unique(ids[rows[waited]])) if count else 0
            self.repeated += int(again.sum()) + count - first
            np.bitwise_or.at(taken, byte[waited], bit[waited])
            np.bitwise_and.at(flags, byte, ~bit)
        return needed, idle

    def waiting(self) -> bool:
        """Return whether an activity still needs its call."""
        return any(flags.any() for flags in self._waiting.values())


def _bit(ids: Ints) -> Bits:
    """Return the bit of each id within its byte."""
    bit: Bits = np.left_shift(1, ids & 7).astype(np.uint8)
    return bit


class Doubles:
    """Finds rows that are exact copies of earlier rows, by a 64-bit hash of their columns."""

    def __init__(self, hashes: list[Ints]) -> None:
        """Find the repeated hashes among `hashes`, which are those of all rows, in blocks."""
        ordered = np.sort(np.concatenate(hashes)) if hashes else np.zeros(0, np.int64)
        self._doubled = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
        self._seen: set[int] = set()
        self.count = 0

    def fresh(self, hashes: Ints) -> Flags:
        """Return which of these rows are the first with their hash."""
        keep = np.ones(len(hashes), np.bool_)
        for row in np.flatnonzero(np.isin(hashes, self._doubled)).tolist():
            value = int(hashes[row])
            keep[row] = value not in self._seen
            self._seen.add(value)
        self.count += int((~keep).sum())
        return keep


def hashed(columns: list[Ints]) -> Ints:
    """Return a 64-bit hash of each row."""
    value = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        value = (value ^ column.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return value.view(np.int64)
