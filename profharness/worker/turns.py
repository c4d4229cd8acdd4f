"""Backends of one config timed in turns, so that a drift of clocks and temperature hits all of them
alike.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from profharness import stats
from profharness.backends import find_backend
from profharness.config import Config
from profharness.run import BenchPlan, Cell, JournalEntry, turn_order
from profharness.worker import cell as cells
from profharness.worker import failures as failing
from profharness.worker import timing
from profharness.worker.cell import tuning_of, with_torch_profiler
from profharness.worker.failures import heard_warnings
from profharness.worker.inputs import Inputs, make_call, make_inputs
from profharness.worker.program import Write
from profharness.worker.timing import ClockReader, over_time
from profharness.worker.workspace import Bench

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


@dataclass
class _Group:
    """What the backends of one config share; inputs are made with the first backend that gets so
    far.
    """

    config: Config
    bench: Bench
    plan: BenchPlan
    write: Write
    inputs: list[Inputs] = field(default_factory=list)

    def copies(self) -> list[Inputs]:
        """Copies of the inputs, each with values of its own."""
        if not self.inputs:
            seed = self.bench.plan.protocol.seed
            first = make_inputs(self.config, self.bench.device, seed)
            self.inputs.append(first)
            for number in range(1, copies_of(_size(first), _cache_bytes(self.bench.device))):
                self.inputs.append(make_inputs(self.config, self.bench.device, seed + number))
        return self.inputs

    def stage(self, cell: Cell, name: str) -> None:
        self.write(JournalEntry("stage", cell=cell.cell, stage=name))

    def fail(self, cell: Cell, heard: list[str], error: Exception) -> None:
        """Write down a cell that raised. Raises DeadContextError where nothing can follow."""
        result = failing.failure(cell, self.bench, heard, error)
        if failing.context_is_dead(error):
            raise failing.DeadContextError(result) from None
        self.write(JournalEntry("end", cell=cell.cell, result=result))


def bench_group(group: Sequence[Cell], bench: Bench, plan: BenchPlan, write: Write) -> None:
    """Bench the cells of one config; each has an `end` in the journal afterwards. Raises
    DeadContextError (carrying a cell's result) when the process has to end.
    """
    torch.use_deterministic_algorithms(group[0].config.deterministic)
    shared = _Group(group[0].config, bench, plan, write)
    ready = []
    for cell in group:
        write(JournalEntry("begin", cell=cell.cell))
        heard: list[str] = []
        try:
            made = _ready(cell, shared, heard)
        except Exception as error:
            shared.fail(cell, heard, error)
            continue
        if isinstance(made, Cell):
            write(JournalEntry("end", cell=cell.cell, result=made))
        else:
            ready.append(made)
    reader = bench.read_clocks
    between = reader.between if isinstance(reader, ClockReader) else (lambda *_: [])
    raced = take_turns(
        ready,
        plan,
        bench.plan.protocol.seed,
        write,
        between,
        lambda one, error: shared.fail(one.cell, [], error),
    )
    for one in raced:
        write(JournalEntry("begin", cell=one.cell.cell))
        try:
            result = _finished(one, shared)
        except Exception as error:
            shared.fail(one.cell, [], error)
            continue
        write(JournalEntry("end", cell=one.cell.cell, result=result))


def _ready(cell: Cell, shared: _Group, heard: list[str]) -> Contestant | Cell:
    """A backend after its first call and warm-up, or the cell as refused."""
    bench = shared.bench
    backend = find_backend(cell.backend, bench.sources)
    shared.stage(cell, "compile" if backend.load is not None else "inputs")
    begin = time.perf_counter_ns()
    reasons = cells.reasons_beforehand(cell, bench, backend)
    if reasons:
        message = "; ".join(reason.message for reason in reasons)
        return replace(cell, status="refused", message=message, refusals=reasons)
    attention = backend.load() if backend.load is not None else None
    loaded_ns = time.perf_counter_ns() - begin
    inputs = shared.copies()
    calls = [make_call(cell.config, each, attention) for each in inputs]
    with backend.context():
        if attention is None:
            cell = replace(cell, choice=cells.own_choice(cell, inputs[0]))
        else:
            begin = time.perf_counter_ns()
            with heard_warnings(heard):
                cells.try_out(cell, bench, backend, attention, inputs[0])
            taken_ns = loaded_ns + time.perf_counter_ns() - begin
            cell = replace(cell, compile_ns=taken_ns, tuning=tuning_of(backend, attention))
        shared.stage(cell, "warm-up")
        cell = cells.first_call(cell, bench, calls[0], heard)
        expected_ns = _warmed_up(rotating(calls), bench)
        cell, samplers = _samplers(cell, shared, calls, expected_ns)
    return Contestant(cell, backend.context, calls[0], expected_ns, samplers)


def _warmed_up(call: Callable[[], Any], bench: Bench) -> int:
    """Nanoseconds of one call after the warm-up calls, which WARMUP_MAX_S ends early."""
    deadline = time.perf_counter() + WARMUP_MAX_S
    for _ in range(bench.plan.protocol.warmup):
        call()
        if time.perf_counter() > deadline:
            break
    bench.sync()
    begin = time.perf_counter_ns()
    call()
    bench.sync()
    return max(1, time.perf_counter_ns() - begin)


def _samplers(
    cell: Cell, shared: _Group, calls: Sequence[Callable[[], Any]], expected_ns: int
) -> tuple[Cell, dict[str, Callable[[int], list[int]]]]:
    """A sampler per measurement; the cell says why one is not there."""
    bench, turning = shared.bench, rotating(calls)
    wanted = shared.plan.on(bench.device)
    found: dict[str, Callable[[int], list[int]]] = {}
    if "wall" in wanted:
        found["wall"] = lambda samples: timing.time_wall(turning, samples)
    if "event" in wanted:
        found["event"] = lambda samples: timing.time_events(turning, samples, bench.flush)
    if "graph" in wanted and expected_ns <= timing.GRAPH_WORTH_MAX_NS:
        shared.stage(cell, "graph capture")
        try:
            found["graph"] = timing.open_graph(calls[0], expected_ns)
        except RuntimeError as error:
            if failing.context_is_dead(error):
                raise
            note = f"no CUDA-graph timing: {str(error).splitlines()[0]}"
            cell = replace(cell, warnings=(*cell.warnings, note))
    return cell, found


def _finished(one: Contestant, shared: _Group) -> Cell:
    """The cell with its samples, after the profiled calls where kernel times are wanted."""
    bench, protocol = shared.bench, shared.bench.plan.protocol
    iterations = 0
    begin = time.perf_counter_ns()
    if "kernel" in shared.plan.on(bench.device) and "torch" in bench.plan.profilers:
        shared.stage(one.cell, "kernel")
        path = bench.folder / f"{one.cell.cell}.torch.json.gz"
        iterations = protocol.iterations
        with one.context():
            with_torch_profiler(one.call, one.cell.cell, iterations, bench.sync, path)
    taken_ns = round(one.spent_s * 1e9) + time.perf_counter_ns() - begin
    return replace(
        one.cell,
        status="ok",
        samples=one.samples,
        iterations=iterations,
        clocks=over_time(_readings(one, bench)),
        duration_ns=taken_ns,
    )


def _readings(one: Contestant, bench: Bench) -> list[dict[str, Any]]:
    """The clock readings of its turns; where all were too short for one, the nearest."""
    reader = bench.read_clocks
    if one.readings or one.span is None or not isinstance(reader, ClockReader):
        return one.readings
    return reader.nearest(*one.span)


def _size(inputs: Inputs) -> int:
    tensors = (inputs.query, inputs.key, inputs.value, inputs.mask, inputs.grad)
    return sum(each.numel() * each.element_size() for each in tensors if each is not None)


def _cache_bytes(device: str) -> int:
    if device != "cuda":
        return CPU_CACHE_BYTES
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20))
