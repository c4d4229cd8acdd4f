"""A program of the worker that times the backends of each config in turns, so that drift of clocks
and temperature affects all of them alike.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import Any

import torch

from profharness import stats
from profharness.attention.backends.inputs import Inputs
from profharness.attention.config import Config
from profharness.device_types import is_gpu
from profharness.recording.worker import timing
from profharness.recording.worker.attention import make_call, make_inputs
from profharness.recording.worker.cell import Attempt, with_torch_profiler, without
from profharness.recording.worker.environment import set_deterministic
from profharness.recording.worker.failures import failure, unless_dead
from profharness.recording.worker.program import Program, Write
from profharness.recording.worker.timing import Workspace, open_workspace, over_time
from profharness.rows import COLD, EAGER, GRAPH, KERNEL, TORCH, WALL
from profharness.run import BenchPlan, Cell, JournalEntry, read_plan, turn_order

MIN_SAMPLES = 20  # minimum before the confidence interval is computed
FEWEST = 5  # minimum number of samples of a call that has reached its time limit
MAX_SAMPLES = 2000  # with more samples, the interval narrows too slowly
GROWTH = 1.5  # factor on the number of samples between two checks of the interval
TURN_NS = 20_000_000  # intended duration of a turn
TURN_MAX = 10  # maximum number of samples in a turn
MIN_TURNS = 3  # minimum before the interval is computed, because turns differ
DISCARD_MAX_NS = 50_000_000  # the first round of slower calls is not discarded
WARMUP_MAX_S = 5.0
COPIES_MAX = 8
COPIES_BYTES = 2 << 30  # maximum size of all copies of the inputs
CPU_CACHE_BYTES = 64 << 20


def body(program: Program) -> None:
    """Benchmark the cells, config by config."""
    workspace = open_workspace(program)
    plan = read_plan(program.folder) or BenchPlan()
    if program.cells:
        plan = plan.part(program.cells[0].process, program.plan.protocol.processes)
    cells = [replace(cell, config=cell.config.resolve(program.device)) for cell in program.cells]
    for _, group in itertools.groupby(cells, key=lambda cell: cell.config):
        bench_group(list(group), workspace, plan, program.write)


@dataclass
class TimedCell:
    """A cell that is ready to be timed.

    `samplers` sample each measurement in ns. `cost_ns` is the time per sample of each measurement's
    last turn. `span` extends from the begin of the first kept turn to the end of the last one, in
    `time.perf_counter`.
    """

    cell: Cell
    context: Callable[[], Any]
    call: Callable[[], Any]
    expected_ns: int
    samplers: dict[str, timing.Sampler]
    samples: dict[str, list[int]] = field(default_factory=dict)
    turns: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    spent_s: float = 0.0
    cost_ns: dict[str, int] = field(default_factory=dict)
    next_look: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    readings: list[dict[str, Any]] = field(default_factory=list)
    cpu_wait: timing.CpuWait = field(default_factory=timing.CpuWait)
    span: tuple[float, float] | None = None

    def samples_wanted(self, name: str, plan: BenchPlan) -> int:
        """Return the number of samples for the next turn, 0 if the measurement is done."""
        if name in self.done:
            return 0
        have = len(self.samples.get(name, ()))
        cost_ns = self.cost_ns.get(name, self.expected_ns)
        turn = max(1, min(TURN_MAX, TURN_NS // max(1, cost_ns)))
        return turn if plan.iterations is None else min(turn, plan.iterations - have)

    def add_samples(
        self, name: str, samples: dict[str, list[int]], plan: BenchPlan, turn: int
    ) -> None:
        """Store the samples of a measurement and its side values, and check if they are enough."""
        for series, values in samples.items():
            self.samples.setdefault(series, []).extend(values)
            self.turns.setdefault(series, []).append((self.cell.process, turn, len(values)))
        if self._enough(name, stats.Series.of(self.samples[name], self.turns[name]), plan):
            self.done.add(name)

    def keep_sums(self, sums: list[int]) -> None:
        """Store the kernel times, so that the run folder contains them without its traces."""
        if sums:
            self.samples[KERNEL], self.turns[KERNEL] = sums, [(self.cell.process, 0, len(sums))]

    def drop(self, name: str, error: RuntimeError) -> None:
        """Drop a measurement that the call does not support."""
        del self.samplers[name]
        self.samples.pop(name, None)
        self.turns.pop(name, None)
        self.cell = without(name, self.cell, error)

    def _enough(self, name: str, kept: stats.Series, plan: BenchPlan) -> bool:
        if plan.iterations is not None:
            return len(kept) >= plan.iterations
        if len(kept) >= MAX_SAMPLES:
            return True
        if self.spent_s >= plan.max_time_s and len(kept) >= FEWEST:
            return True
        if len(kept) < self.next_look.get(name, MIN_SAMPLES) or len(kept.turns) < MIN_TURNS:
            return False
        self.next_look[name] = int(len(kept) * GROWTH)
        return narrow(kept, plan.precision)


def narrow(samples: Sequence[int], precision: float) -> bool:
    """Return whether half the 95 % interval of the median is at most `precision` of the median."""
    interval = stats.interval(samples)
    if interval is None:
        return False
    half = (interval.high - interval.low) / 2
    return half <= precision * stats.summarize(samples).median


def rotating(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a call that cycles through `calls`."""
    turn = itertools.cycle(calls).__next__

    def call() -> Any:
        return turn()()

    return call


def copies_of(inputs_bytes: int, cache_bytes: int) -> int:
    """Return how many copies of the inputs exceed twice the last-level cache, within bounds."""
    size = max(1, inputs_bytes)
    enough = 2 * cache_bytes // size + 1
    return max(1, min(COPIES_MAX, enough, COPIES_BYTES // size))


def sample_in_turns(
    timed_cells: Sequence[TimedCell],
    plan: BenchPlan,
    seed: int,
    write: Write,
    between: Callable[[float, float], list[dict[str, Any]]],
    fail: Callable[[TimedCell, Exception], None],
) -> list[TimedCell]:
    """Sample all measurements of all cells in rounds, each in a random order, until all are
    done.

    Return the cells that did not fail, in their order. `between` returns the clock readings
    between two moments, and `fail` receives a cell that raised.
    """
    out: set[str] = set()
    for number in itertools.count():
        remaining = [timed for timed in timed_cells if timed.cell.cell not in out]
        turns = [
            (timed, name)
            for timed in remaining
            for name in timed.samplers
            if timed.samples_wanted(name, plan)
        ]
        if not turns:
            return remaining
        for place in turn_order(seed, turns[0][0].cell.config.label, number, len(turns)):
            timed, name = turns[place]
            cell = timed.cell.cell
            if cell in out:
                continue
            write(JournalEntry("begin", cell=cell, stage="turn"))
            have = len(timed.samples.get(name, ()))
            write(JournalEntry("stage", cell=cell, stage=f"{name}, {have} samples"))
            begin = perf_counter()
            try:
                samples = _sampled(timed, name, plan)
            except timing.NotQueuedError as error:
                timed.drop(name, error)
                continue
            except Exception as error:
                out.add(cell)
                fail(timed, error)
                continue
            end = perf_counter()
            timed.cost_ns[name] = round((end - begin) * 1e9) // max(1, len(samples[name]))
            if number == 0 and timed.expected_ns < DISCARD_MAX_NS:
                continue  # clocks rise under the first load
            timed.spent_s += end - begin
            timed.readings += between(begin, end)
            timed.span = (timed.span[0] if timed.span else begin, end)
            timed.add_samples(name, samples, plan, number)
    raise AssertionError("unreachable")


def _sampled(timed: TimedCell, name: str, plan: BenchPlan) -> dict[str, list[int]]:
    """Return the samples of a turn, with the garbage collector disabled."""
    gc.disable()
    try:
        with timed.context(), timed.cpu_wait:
            return timed.samplers[name](timed.samples_wanted(name, plan))
    finally:
        gc.enable()


@dataclass
class _Group:
    """The state that the backends of one config share. The first one that needs the inputs creates
    them.
    """

    config: Config
    workspace: Workspace
    plan: BenchPlan
    write: Write
    inputs: list[Inputs] = field(default_factory=list)

    def copies(self) -> list[Inputs]:
        """Create copies of the inputs, each with different values."""
        if not self.inputs:
            device, seed = self.workspace.device, self.workspace.plan.protocol.seed
            first = make_inputs(self.config, device, seed)
            self.inputs.append(first)
            tensors = (first.query, first.key, first.value, first.mask, first.grad)
            size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
            cache_bytes = CPU_CACHE_BYTES
            if is_gpu(device):
                properties = torch.cuda.get_device_properties(0)
                cache_bytes = int(getattr(properties, "L2_cache_size", 64 << 20))
            for number in range(1, copies_of(size, cache_bytes)):
                self.inputs.append(make_inputs(self.config, device, seed + number))
        return self.inputs

    def stage(self, cell: Cell, name: str) -> None:
        self.write(JournalEntry("stage", cell=cell.cell, stage=name))

    def fail(self, cell: Cell, warning_texts: list[str], error: Exception) -> None:
        """Record a cell that raised. Raise DeadContextError if no other cell can follow."""
        result = unless_dead(failure(cell, self.workspace, warning_texts, error), error)
        self.write(JournalEntry("end", cell=cell.cell, result=result))

    def ready(self, attempt: Attempt) -> TimedCell:
        """Return a backend after its first call and warm-up."""
        attempt.load()
        inputs = self.copies()
        calls = [make_call(self.config, copy, attempt.attention) for copy in inputs]
        with attempt.backend.context():
            cell = attempt.call_first(inputs[0], calls[0])
            expected_ns = _warmed_up(rotating(calls), self.workspace)
            cell, samplers = self._samplers(cell, calls, expected_ns)
        return TimedCell(cell, attempt.backend.context, calls[0], expected_ns, samplers)

    def _samplers(
        self, cell: Cell, calls: Sequence[Callable[[], Any]], expected_ns: int
    ) -> tuple[Cell, dict[str, timing.Sampler]]:
        """Return a sampler per measurement. The cell records why one is missing."""
        turning, measurements = rotating(calls), self.plan.on(self.workspace.device)
        samplers: dict[str, timing.Sampler] = {}
        if WALL in measurements:
            samplers[WALL] = partial(timing.time_wall, turning)
        if COLD in measurements:
            samplers[COLD] = partial(timing.time_cold, turning, delay=timing.StreamDelay())
        if EAGER in measurements:
            # on one copy, like the graph, so that they differ only by the host's share
            samplers[EAGER] = partial(timing.time_eager, calls[0], expected_ns=expected_ns)
        if GRAPH in measurements:
            self.stage(cell, "graph capture")
            try:
                samplers[GRAPH] = timing.open_graph(calls[0], expected_ns)
            except RuntimeError as error:
                cell = without(GRAPH, cell, error)
        return cell, samplers

    def finished(self, timed: TimedCell) -> Cell:
        """Return the cell with its samples, after profiled calls if kernel times are requested."""
        workspace, cell = self.workspace, timed.cell
        profiled = KERNEL in self.plan.on(workspace.device)
        iterations = 0
        begin = perf_counter_ns()
        if profiled and TORCH in workspace.plan.profilers:
            self.stage(cell, "kernel")
            iterations = workspace.plan.protocol.iterations
            with timed.context():
                timed.keep_sums(with_torch_profiler(timed.call, cell, workspace))
        taken_ns = round(timed.spent_s * 1e9) + perf_counter_ns() - begin
        readings = timed.readings
        if not readings and timed.span and workspace.clocks:
            # all turns were too short to contain a reading
            readings = workspace.clocks.nearest(*timed.span)
        return replace(
            cell,
            status="ok",
            samples=timed.samples,
            turns=timed.turns,
            iterations=iterations,
            clocks=over_time(readings) | timed.cpu_wait.reading(),
            duration_ns=taken_ns,
        )


def bench_group(cells: Sequence[Cell], workspace: Workspace, plan: BenchPlan, write: Write) -> None:
    """Benchmark the cells of one config. Raise DeadContextError if no other cell can follow."""
    set_deterministic(cells[0].config.deterministic)
    group = _Group(cells[0].config, workspace, plan, write)
    timed_cells = []
    for cell in cells:
        write(JournalEntry("begin", cell=cell.cell))
        attempt = Attempt(cell, workspace, partial(group.stage, cell))
        try:
            timed_cells.append(group.ready(attempt))
        except Exception as error:
            group.fail(cell, attempt.warning_texts, error)
    sampled_cells = sample_in_turns(
        timed_cells,
        plan,
        workspace.plan.protocol.seed,
        write,
        workspace.clocks.between if workspace.clocks else lambda *_: [],
        lambda timed, error: group.fail(timed.cell, [], error),
    )
    for timed in sampled_cells:
        cell = timed.cell
        write(JournalEntry("begin", cell=cell.cell))
        try:
            result = group.finished(timed)
        except Exception as error:
            group.fail(cell, [], error)
        else:
            write(JournalEntry("end", cell=cell.cell, result=result))


def _warmed_up(call: Callable[[], Any], workspace: Workspace) -> int:
    """Make the warm-up calls, at most for WARMUP_MAX_S. Return the nanoseconds per call after them."""
    deadline = perf_counter() + WARMUP_MAX_S
    for _ in range(workspace.plan.protocol.warmup):
        call()
        if perf_counter() > deadline:
            break
    workspace.sync()
    begin = perf_counter_ns()
    call()
    workspace.sync()
    return max(1, perf_counter_ns() - begin)
