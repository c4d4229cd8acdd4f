"""A program of the worker that benchmarks the backends of each config.

The backends are timed alternately, a few samples per turn, so that changes of the GPU's clocks and
temperature affect all backends alike.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import Any

import msgspec
import torch

from profharness import stats
from profharness.attention.backends.base import Inputs
from profharness.attention.config import Config
from profharness.device_types import is_gpu
from profharness.recording.worker import timing
from profharness.recording.worker.attention import make_call, make_inputs
from profharness.recording.worker.cell import Attempt, with_torch_profiler, without
from profharness.recording.worker.environment import set_deterministic
from profharness.recording.worker.failures import failure, unless_dead
from profharness.recording.worker.timing import Workspace, Write, over_time
from profharness.rows import COLD, EAGER, GRAPH, KERNEL, TORCH, WALL
from profharness.run import RUN_FILE, BenchPlan, Cell, JournalEntry, turn_order

MIN_SAMPLES = 20  # minimum number of samples before the confidence interval is computed
FEWEST = 5  # minimum number of samples for a cell that has reached its time limit
MAX_SAMPLES = 2000  # beyond this number, more samples hardly narrow the confidence interval
GROWTH = 1.5  # the interval is checked again after the number of samples has grown by this factor
TURN_NS = 20_000_000  # intended duration of a turn
TURN_MAX = 10  # maximum number of samples in a turn
MIN_TURNS = 3  # minimum number of turns before the interval is computed, because turns differ
DISCARD_MAX_NS = 50_000_000  # keep the first round of calls that are slower than this
WARMUP_MAX_S = 5.0
COPIES_MAX = 8
COPIES_BYTES = 2 << 30  # maximum size of all copies of the inputs
CPU_CACHE_BYTES = 64 << 20


def body(workspace: Workspace) -> None:
    """Benchmark the cells of one config after another."""
    workspace.open_clocks()
    # Python's own decoder, because run.json can be large and another Python may lack msgspec
    kept = json.loads((workspace.folder / RUN_FILE).read_bytes()).get("bench")
    plan = msgspec.json.decode(json.dumps(kept).encode(), type=BenchPlan) if kept else BenchPlan()
    if workspace.cells:
        plan = plan.part(workspace.cells[0].process, workspace.plan.protocol.processes)
    cells = [
        replace(cell, config=cell.config.resolve(workspace.device)) for cell in workspace.cells
    ]
    for config, group in itertools.groupby(cells, key=lambda cell: cell.config):
        Group(config, workspace, plan).run(list(group))


@dataclass
class TimedCell:
    """A cell that is ready to be timed."""

    cell: Cell
    context: Callable[[], Any]
    call: Callable[[], Any]
    expected_ns: int
    samplers: dict[str, timing.Sampler]  # one per measurement; samples are in ns
    samples: dict[str, list[int]] = field(default_factory=dict)
    turns: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    spent_s: float = 0.0
    cost_ns: dict[str, int] = field(default_factory=dict)  # time per sample in the last turn
    next_look: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    readings: list[dict[str, Any]] = field(default_factory=list)
    cpu_wait: timing.CpuWait = field(default_factory=timing.CpuWait)
    # perf_counter times of the start of the first kept turn and the end of the last kept turn
    span: tuple[float, float] | None = None

    def samples_wanted(self, name: str, plan: BenchPlan) -> int:
        """Return how many samples to take in the next turn, or 0 if the measurement is done."""
        if name in self.done:
            return 0
        cost_ns = self.cost_ns.get(name, self.expected_ns)
        turn = max(1, min(TURN_MAX, TURN_NS // max(1, cost_ns)))
        have = len(self.samples.get(name, ()))
        return turn if plan.iterations is None else min(turn, plan.iterations - have)

    def sample(self, name: str, plan: BenchPlan) -> dict[str, list[int]]:
        """Take the samples of one turn while the garbage collector is disabled."""
        gc.disable()
        try:
            with self.context(), self.cpu_wait:
                return self.samplers[name](self.samples_wanted(name, plan))
        finally:
            gc.enable()

    def add_samples(
        self, name: str, samples: dict[str, list[int]], plan: BenchPlan, turn: int
    ) -> None:
        """Store the samples of a turn, and mark the measurement as done if it has enough samples.

        `samples` may have other series besides `name`, such as the host's time per call.
        """
        for series, values in samples.items():
            self.samples.setdefault(series, []).extend(values)
            self.turns.setdefault(series, []).append((self.cell.process, turn, len(values)))
        kept = stats.Series.of(self.samples[name], self.turns[name])
        count = len(kept)
        if plan.iterations is not None:
            enough = count >= plan.iterations
        elif count >= MAX_SAMPLES or (self.spent_s >= plan.max_time_s and count >= FEWEST):
            enough = True
        elif count < self.next_look.get(name, MIN_SAMPLES) or len(kept.turns) < MIN_TURNS:
            enough = False
        else:
            self.next_look[name] = int(count * GROWTH)
            enough = narrow(kept, plan.precision)
        if enough:
            self.done.add(name)

    def keep_sums(self, sums: list[int]) -> None:
        """Store the kernel times of the profiled calls as samples, if there are any."""
        if sums:
            self.samples[KERNEL], self.turns[KERNEL] = sums, [(self.cell.process, 0, len(sums))]


def narrow(samples: Sequence[int], precision: float) -> bool:
    """Return whether the median is known precisely enough.

    Half the width of its 95 % confidence interval must be at most `precision` times the median.
    """
    interval = stats.interval(samples)
    if interval is None:
        return False
    half = (interval.high - interval.low) / 2
    return half <= precision * stats.summarize(samples).median


def rotating(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a function that, each time it is called, makes the next of `calls` in a cycle."""
    turn = itertools.cycle(calls).__next__
    return lambda: turn()()


def copies_of(inputs_bytes: int, cache_bytes: int) -> int:
    """Return how many copies of the inputs to make, so that the inputs do not stay in the cache.

    Together the copies exceed twice the size of the last-level cache, unless COPIES_MAX or
    COPIES_BYTES limits their number.
    """
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
    """Sample all measurements of all cells in rounds until every measurement is done.

    Each round has one turn per unfinished measurement, in random order. Return the cells that did
    not fail. `between` returns the clock readings between two times. `fail` is called for each cell
    that raises an exception.
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
        for index in turn_order(seed, turns[0][0].cell.config.label, number, len(turns)):
            timed, name = turns[index]
            cell = timed.cell.cell
            if cell in out:
                continue
            write(JournalEntry("begin", cell=cell, stage="turn"))
            have = len(timed.samples.get(name, ()))
            write(JournalEntry("stage", cell=cell, stage=f"{name}, {have} samples"))
            begin = perf_counter()
            try:
                samples = timed.sample(name, plan)
            except timing.NotQueuedError as error:
                # the call does not support this measurement
                for table in (timed.samplers, timed.samples, timed.turns):
                    table.pop(name, None)
                timed.cell = without(name, timed.cell, error)
                continue
            except Exception as error:
                out.add(cell)
                fail(timed, error)
                continue
            end = perf_counter()
            timed.cost_ns[name] = round((end - begin) * 1e9) // max(1, len(samples[name]))
            if number == 0 and timed.expected_ns < DISCARD_MAX_NS:
                continue  # discard the first round, during which the GPU's clocks still rise
            timed.spent_s += end - begin
            timed.readings += between(begin, end)
            timed.span = (timed.span[0] if timed.span else begin, end)
            timed.add_samples(name, samples, plan, number)
    raise AssertionError("unreachable")


@dataclass
class Group:
    """The backends of one config, which share the inputs."""

    config: Config
    workspace: Workspace
    plan: BenchPlan
    inputs: list[Inputs] = field(default_factory=list)

    def run(self, cells: Sequence[Cell]) -> None:
        """Benchmark the cells. Raise DeadContextError if the CUDA context is lost."""
        workspace, write = self.workspace, self.workspace.write
        set_deterministic(self.config.deterministic)
        timed_cells = []
        for cell in cells:
            write(JournalEntry("begin", cell=cell.cell))
            attempt = Attempt(cell, workspace, partial(self._stage, cell))
            try:
                timed_cells.append(self._ready(attempt))
            except Exception as error:
                self._fail(cell, attempt.warning_texts, error)
        sampled_cells = sample_in_turns(
            timed_cells,
            self.plan,
            workspace.plan.protocol.seed,
            write,
            workspace.clocks.between if workspace.clocks else lambda *_: [],
            lambda timed, error: self._fail(timed.cell, [], error),
        )
        for timed in sampled_cells:
            cell = timed.cell
            write(JournalEntry("begin", cell=cell.cell))
            try:
                result = self._finished(timed)
            except Exception as error:
                self._fail(cell, [], error)
            else:
                write(JournalEntry("end", cell=cell.cell, result=result))

    def _copies(self) -> list[Inputs]:
        """Return several inputs with different values, which are created by the first call."""
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

    def _stage(self, cell: Cell, name: str) -> None:
        self.workspace.write(JournalEntry("stage", cell=cell.cell, stage=name))

    def _fail(self, cell: Cell, warning_texts: list[str], error: Exception) -> None:
        result = unless_dead(failure(cell, self.workspace, warning_texts, error), error)
        self.workspace.write(JournalEntry("end", cell=cell.cell, result=result))

    def _ready(self, attempt: Attempt) -> TimedCell:
        """Load a backend and warm it up. Return its cell with a sampler per measurement.

        If the call cannot be captured in a CUDA graph, the cell has a warning instead of a sampler.
        """
        attempt.load()
        inputs = self._copies()
        calls = [make_call(self.config, copy, attempt.attention) for copy in inputs]
        turning, measurements = rotating(calls), self.plan.on(self.workspace.device)
        samplers: dict[str, timing.Sampler] = {}
        with attempt.backend.context():
            cell = attempt.call_first(inputs[0], calls[0])
            expected_ns = _warm_up(turning, self.workspace)
            if WALL in measurements:
                samplers[WALL] = partial(timing.time_wall, turning)
            if COLD in measurements:
                samplers[COLD] = partial(timing.time_cold, turning, delay=timing.StreamDelay())
            if EAGER in measurements:
                # Use one copy of the inputs, as the graph does, so that eager and graph times
                # differ only by the overhead of the host.
                samplers[EAGER] = partial(timing.time_eager, calls[0], expected_ns=expected_ns)
            if GRAPH in measurements:
                self._stage(cell, "graph capture")
                try:
                    samplers[GRAPH] = timing.open_graph(calls[0], expected_ns)
                except RuntimeError as error:
                    cell = without(GRAPH, cell, error)
        return TimedCell(cell, attempt.backend.context, calls[0], expected_ns, samplers)

    def _finished(self, timed: TimedCell) -> Cell:
        """Return the cell with its samples and clocks. Profile it if kernel times are requested."""
        workspace, iterations = self.workspace, 0
        begin = perf_counter_ns()
        if KERNEL in self.plan.on(workspace.device) and TORCH in workspace.plan.profilers:
            self._stage(timed.cell, "kernel")
            iterations = workspace.plan.protocol.iterations
            with timed.context():
                timed.keep_sums(with_torch_profiler(timed.call, timed.cell, workspace))
        readings = timed.readings
        if not readings and timed.span and workspace.clocks:
            # no clocks were read during the turns, because all turns were too short
            readings = workspace.clocks.nearest(*timed.span)
        return replace(
            timed.cell,
            status="ok",
            samples=timed.samples,
            turns=timed.turns,
            iterations=iterations,
            clocks=over_time(readings) | timed.cpu_wait.reading(),
            duration_ns=round(timed.spent_s * 1e9) + perf_counter_ns() - begin,
        )


def _warm_up(call: Callable[[], Any], workspace: Workspace) -> int:
    """Make the warm-up calls for at most WARMUP_MAX_S. Return the time in ns of one more call."""
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
