"""How cold calls are held: what the device began too early counts for nothing."""

from __future__ import annotations

import pytest

from profharness.worker.timing import HOLD_MAX_NS, HOLD_NS, Hold, NeverHeldError, Queued, held


def queue_of(needed_ns: int, hold: Hold, queued: list[int]) -> Queued:
    """A call whose queueing takes so long: a time of its own where the hold outlasts it."""
    queued.append(hold.length_ns)
    place = len(queued)
    return hold.length_ns <= needed_ns, lambda: place


def test_holds_grow_until_all_is_queued() -> None:
    hold, queued = Hold(), list[int]()
    times = held(lambda: queue_of(3 * HOLD_NS, hold, queued), hold.lengthen, 20)
    assert queued[:3] == [HOLD_NS, 2 * HOLD_NS, 4 * HOLD_NS]
    assert set(queued[3:]) == {4 * HOLD_NS}
    assert times == list(range(3, 23))  # the two that were not held are left out, the rest in order


def test_a_call_that_waits_for_the_device_is_never_held() -> None:
    hold, queued = Hold(), list[int]()
    with pytest.raises(NeverHeldError, match="waits for the GPU"):
        held(lambda: queue_of(2 * HOLD_MAX_NS, hold, queued), hold.lengthen, 20)
    assert HOLD_MAX_NS / 2 < queued[-1] <= HOLD_MAX_NS
