"""One config of a bench: its backends made ready, timed in turns, and profiled for kernel times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from profharness.backends import find_backend
from profharness.bench_plan import BenchPlan
from profharness.config import Config
from profharness.record import Cell, JournalEntry
from profharness.worker import cell as cells
from profharness.worker import failing, timing
from profharness.worker.clocks import ClockReader, over_time
from profharness.worker.inputs import Inputs, make_call, make_inputs
from profharness.worker.profile import with_torch_profiler
from profharness.worker.program import Write
from profharness.worker.refusal import heard_warnings
from profharness.worker.tuning import tuning_of
from profharness.worker.turns import (
    CPU_CACHE_BYTES,
    WARMUP_MAX_S,
    Contestant,
    copies_of,
    rotating,
    take_turns,
)


@dataclass
class _Group:
    """What the backends of one config share; inputs are made with the first backend that gets so
    far.
    """

    config: Config
    bench: cells.Bench
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


def bench_group(group: Sequence[Cell], bench: cells.Bench, plan: BenchPlan, write: Write) -> None:
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


def _warmed_up(call: Callable[[], Any], bench: cells.Bench) -> int:
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


def _readings(one: Contestant, bench: cells.Bench) -> list[dict[str, Any]]:
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
