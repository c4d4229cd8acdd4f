"""Backends of one config timed in turns, so that a drift of clocks and temperature hits all of them
alike.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from profharness import stats
from profharness.bench_plan import BenchPlan, turn_order
from profharness.record import Cell, JournalEntry
from profharness.worker.program import Write

MIN_SAMPLES = 20  # before the interval is asked; a call that is out of time stops at FEWEST
FEWEST = 5
MAX_SAMPLES = 2000  # beyond this the interval narrows too slowly to wait for
GROWTH = 1.5  # samples between two looks at the interval
TURN_NS = 20_000_000
TURN_MAX = 25  # samples in one turn
DISCARD_MAX_NS = 50_000_000  # the first round of a slower call is not thrown away
WARMUP_MAX_S = 5.0
COPIES_MAX = 8
COPIES_BYTES = 2 << 30  # all copies of the inputs together
CPU_CACHE_BYTES = 64 << 20


@dataclass
class Contestant:
    """One cell that is ready to be timed; samplers give samples of each measurement, in ns, and
    cost_ns is what the last turn of each took a sample. span is from the first kept turn's begin to
    the last one's end, moments of `time.perf_counter`.
    """

    cell: Cell
    context: Callable[[], Any]
    call: Callable[[], Any]
    expected_ns: int
    samplers: dict[str, Callable[[int], list[int]]]
    samples: dict[str, list[int]] = field(default_factory=dict)
    spent_s: float = 0.0
    cost_ns: dict[str, int] = field(default_factory=dict)
    next_look: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    readings: list[dict[str, Any]] = field(default_factory=list)
    span: tuple[float, float] | None = None

    def wants(self, name: str, plan: BenchPlan) -> int:
        """How many samples the next turn should take; 0 when the measurement is done."""
        if name in self.done:
            return 0
        have = len(self.samples.get(name, ()))
        cost_ns = self.cost_ns.get(name, self.expected_ns)
        turn = max(1, min(TURN_MAX, TURN_NS // max(1, cost_ns)))
        return turn if plan.iterations is None else min(turn, plan.iterations - have)

    def take(self, name: str, found: list[int], plan: BenchPlan) -> None:
        """Keep samples, and say whether it is enough."""
        kept = self.samples.setdefault(name, [])
        kept += found
        if self._enough(name, kept, plan):
            self.done.add(name)

    def _enough(self, name: str, kept: list[int], plan: BenchPlan) -> bool:
        if plan.iterations is not None:
            return len(kept) >= plan.iterations
        if len(kept) >= MAX_SAMPLES:
            return True
        if self.spent_s >= plan.max_time_s and len(kept) >= FEWEST:
            return True
        if len(kept) < self.next_look.get(name, MIN_SAMPLES):
            return False
        self.next_look[name] = int(len(kept) * GROWTH)
        return narrow(kept, plan.precision)


def narrow(samples: Sequence[int], precision: float) -> bool:
    """Whether half the 95 % interval of the median is at most `precision` of the median."""
    interval = stats.median_ci(samples)
    if interval is None:
        return False
    low, high = interval
    return (high - low) / 2 <= precision * stats.summarize(samples).median


def rotating(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """One call after the other, round and round."""
    turn = itertools.cycle(calls).__next__

    def call() -> Any:
        return turn()()

    return call


def copies_of(inputs_bytes: int, cache_bytes: int) -> int:
    """How many copies of the inputs are more than twice the last cache, within bounds."""
    size = max(1, inputs_bytes)
    wanted = 2 * cache_bytes // size + 1
    return max(1, min(COPIES_MAX, wanted, COPIES_BYTES // size))


def take_turns(
    contestants: Sequence[Contestant],
    plan: BenchPlan,
    seed: int,
    write: Write,
    between: Callable[[float, float], list[dict[str, Any]]],
    fail: Callable[[Contestant, Exception], None],
) -> list[Contestant]:
    """Sample all measurements of all contestants, round after round in an order of its own each,
    until all are done; those that did not fail, in their order. between gives the clock readings
    from one moment to another; fail hears of a contestant that raised, which is out.
    """
    out: set[str] = set()
    for number in itertools.count():
        racing = [one for one in contestants if one.cell.cell not in out]
        turns = [(one, name) for one in racing for name in one.samplers if one.wants(name, plan)]
        if not turns:
            return racing
        for place in turn_order(seed, turns[0][0].cell.config.label, number, len(turns)):
            one, name = turns[place]
            if one.cell.cell in out:
                continue
            write(JournalEntry("begin", cell=one.cell.cell, stage="turn"))
            have = len(one.samples.get(name, ()))
            write(JournalEntry("stage", cell=one.cell.cell, stage=f"{name}, {have} samples"))
            begin = time.perf_counter()
            try:
                found = _sampled(one, name, plan)
            except Exception as error:
                out.add(one.cell.cell)
                fail(one, error)
                continue
            end = time.perf_counter()
            one.cost_ns[name] = round((end - begin) * 1e9) // max(1, len(found))
            if number == 0 and one.expected_ns < DISCARD_MAX_NS:
                continue  # clocks rise under the first load
            one.spent_s += end - begin
            one.readings += between(begin, end)
            one.span = (one.span[0] if one.span else begin, end)
            one.take(name, found, plan)
    raise AssertionError("unreachable")


def _sampled(one: Contestant, name: str, plan: BenchPlan) -> list[int]:
    """A turn's samples, with the garbage collector kept out of them."""
    gc.disable()
    try:
        with one.context():
            return one.samplers[name](one.wants(name, plan))
    finally:
        gc.enable()
