"""The main program of the worker: measure each cell by a first call, profiled calls and timing."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec
import nvtx
import torch
from isal import igzip
from torch.autograd.profiler import profile, record_function

from profharness.attention.backends import find_backend
from profharness.attention.backends.base import (
    Attention,
    Backend,
    ImplementationError,
    Inputs,
    RefusedError,
)
from profharness.device_types import CUDA, is_gpu
from profharness.recording.worker import timing
from profharness.recording.worker.attention import (
    check_output,
    fused_choice,
    make_call,
    make_forward,
    make_inputs,
)
from profharness.recording.worker.environment import backend_name, set_deterministic
from profharness.recording.worker.failures import (
    RefusedBeforehandError,
    context_is_dead,
    failure,
    implementation_errors,
    reasons_beforehand,
    recorded_warnings,
    unless_dead,
)
from profharness.recording.worker.program import (
    FOLDER_ERRORS,
    Stage,
    exit_unwritable,
    run_each,
)
from profharness.recording.worker.timing import Workspace
from profharness.rows import COLD, EAGER, GRAPH, KERNEL, TORCH
from profharness.run import Cell
from profharness.trace import WARMUP_RANGE, cell_range

NVTX_DOMAIN = "profharness"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
SLOW_NS = 10 * timing.EAGER_NS  # if a warm-up call takes this long, no trial burst is needed


def body(workspace: Workspace) -> None:
    """Measure every cell."""
    workspace.open_clocks()
    run_each(workspace, lambda cell, stage: run_cell(cell, workspace, stage))


@contextlib.contextmanager
def open_range(name: str) -> Iterator[None]:
    """Open a range on this thread (record_function, NVTX push/pop) and one of the process (NVTX
    start/end). The latter contains backward kernels, which autograd launches from its own thread.
    """
    process_wide = nvtx.start_range(name, domain=NVTX_DOMAIN)
    with nvtx.annotate(name, domain=NVTX_DOMAIN), record_function(name):
        yield
    nvtx.end_range(process_wide)


def profiled_calls(call: Callable[[], Any], cell: str, workspace: Workspace) -> None:
    """Make the profiled calls. Each has its own range and completes before the next begins."""
    for _ in range(workspace.plan.protocol.iterations):
        with open_range(cell_range(cell)):
            call()
            workspace.sync()


def with_torch_profiler(call: Callable[[], Any], cell: Cell, workspace: Workspace) -> list[int]:
    """Profile the calls of a cell. Return the kernel time per call.

    The first process of a cell writes its Chrome trace into the run folder. Each session starts with
    a warm-up call, because Kineto can drop records before its capture window.
    """
    device = CUDA if torch.cuda.is_available() else None
    with profile(use_kineto=True, use_device=device, record_shapes=True) as session:
        with record_function(WARMUP_RANGE):
            call()
            workspace.sync()
        profiled_calls(call, cell.cell, workspace)
    if cell.process == 0:
        data = _write_trace(session, workspace.folder / f"{cell.cell}.torch.json")
    else:
        with tempfile.TemporaryDirectory() as folder:
            session.export_chrome_trace(path := f"{folder}/trace.json")
            data = Path(path).read_bytes()
    return call_sums(data, cell_range(cell.cell))


def call_sums(trace: bytes, name: str) -> list[int]:
    """Return the device time in ns of each range of that name. A range contains its call until it
    ends. Return nothing for a trace that is not JSON; ingest reports the reason.
    """
    try:
        events = msgspec.json.decode(trace)["traceEvents"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return []
    complete = [event for event in events if event.get("ph") == "X"]
    launches = [event for event in complete if event.get("cat") in ON_DEVICE]
    sums = []
    for event in complete:
        if event.get("cat") == "user_annotation" and event["name"] == name:
            begin, end = event["ts"], event["ts"] + event["dur"]  # in microseconds
            inside = [launch["dur"] for launch in launches if begin <= launch["ts"] <= end]
            sums.append(round(sum(inside) * 1000))
    return [value for value in sums if value]


def _write_trace(session: profile, plain: Path) -> bytes:
    """Write a compressed trace and return it uncompressed. End the program if the run folder is not
    writable, because Kineto only logs a failed write.
    """
    packed = Path(f"{plain}.gz")
    try:
        session.export_chrome_trace(str(plain))
        data = plain.read_bytes()
        if not data.rstrip().endswith(b"}"):
            plain.write_bytes(bytes(2 * len(data)))  # fails like Kineto, but with a reason
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        packed.write_bytes(igzip.compress(data, 2))
        return data
    except OSError as error:
        with contextlib.suppress(OSError):
            packed.unlink(missing_ok=True)
        if error.errno not in FOLDER_ERRORS:
            raise
        exit_unwritable(f"{plain.name}: {error.strerror}")
    finally:
        for path in (plain, Path(f"{plain}.tmp")):  # Kineto's own temporary file
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


@dataclass
class Attempt:
    """A cell during its first calls."""

    cell: Cell
    workspace: Workspace
    stage: Stage
    warning_texts: list[str] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)  # fields that the cell keeps if it fails
    backend: Backend = field(init=False)
    attention: Attention | None = field(init=False)
    loaded_ns: int = field(init=False)

    def load(self) -> None:
        """Find and load the backend. Raise RefusedBeforehandError."""
        self.backend = find_backend(self.cell.backend, self.workspace.sources)
        if self.backend.load is not None:
            self.stage("compile")  # importing an implementation may compile it
        begin = perf_counter_ns()
        reasons = reasons_beforehand(self.cell.config, self.workspace, self.backend)
        if reasons:
            raise RefusedBeforehandError(reasons)
        self.attention = self.backend.load() if self.backend.load is not None else None
        self.loaded_ns = perf_counter_ns() - begin
        self.stage("inputs")

    def call_first(self, inputs: Inputs, call: Callable[[], Any]) -> Cell:
        """Return the cell after its first call, on a GPU after a second one with its peak memory.

        Must run in the backend's own context.
        """
        if self.attention is None:
            # query PyTorch's choice before the call, which repeats any warnings
            with recorded_warnings([]), contextlib.suppress(RuntimeError):
                self.known["choice"] = backend_name(fused_choice(self.cell.config, inputs))
        else:
            self.stage("compile")
            begin = perf_counter_ns()
            with recorded_warnings(self.warning_texts):
                self._try_out(self.attention, inputs)
            self.known["compile_ns"] = self.loaded_ns + perf_counter_ns() - begin
            self.known["tuning"] = tuning_of(self.backend, self.attention)
        self.stage("warm-up")
        with recorded_warnings(self.warning_texts):
            call()
            self.workspace.sync()
        cell = replace(self.cell, **self.known)
        if not is_gpu(self.workspace.device):
            return cell
        # Measure the second call. The first call of a process also allocates cuBLAS' workspace
        # (32 MiB) and other caches that are kept, which would count only for the first cell.
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self.workspace.sync()
        return replace(cell, peak_memory_bytes=torch.cuda.max_memory_allocated() - before)

    def _try_out(self, attention: Attention, inputs: Inputs) -> None:
        """Make the first call of an implementation and check its result against the contract.

        Raise RefusedError, or ImplementationError for a violated contract.
        """
        config = self.cell.config
        with implementation_errors(self.backend):
            output = make_forward(config, inputs, attention)()
            check_output(self.backend.name, config, inputs, output)
            if config.bwd and not output.requires_grad:
                raise RefusedError("unsupported", "its output carries no gradient; leave bwd out")
            if config.bwd:
                make_call(config, inputs, attention)()
            self.workspace.sync()


def tuning_of(backend: Backend, attention: Attention | None) -> dict[str, Any] | None:
    """Return the loaded function's `tuning` of the last call, else the backend's.

    Raise ImplementationError if it is not a dict that JSON can represent.
    """
    own = getattr(attention, "tuning", None)
    answer = own() if callable(own) else backend.tuning()
    if answer is None:
        return None
    try:
        if not isinstance(answer, dict):
            raise TypeError
        tuning: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(answer))
    except (TypeError, ValueError, OverflowError):
        raise ImplementationError(
            f"tuning() returned {answer!r}; it must return a dict that JSON can hold, or None"
        ) from None
    return tuning


def run_cell(cell: Cell, workspace: Workspace, stage: Stage) -> Cell:
    """Return the cell with its result. Raise DeadContextError if no other cell can follow."""
    cell = replace(cell, config=cell.config.resolve(workspace.device))
    begin = perf_counter_ns()
    attempt = Attempt(cell, workspace, stage)
    set_deterministic(cell.config.deterministic)
    # else deterministic mode fills every new tensor, by kernels that are not attention's
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        result = _measured(attempt)
    except Exception as error:
        result = failure(replace(cell, **attempt.known), workspace, attempt.warning_texts, error)
        return unless_dead(replace(result, duration_ns=perf_counter_ns() - begin), error)
    return replace(result, duration_ns=perf_counter_ns() - begin)


def _measured(attempt: Attempt) -> Cell:
    workspace, plan = attempt.workspace, attempt.workspace.plan
    attempt.load()
    config = attempt.cell.config
    inputs = make_inputs(config, workspace.device, plan.protocol.seed)
    call = make_call(config, inputs, attempt.attention)
    with attempt.backend.context():
        cell = attempt.call_first(inputs, call)
        begin = perf_counter_ns()
        for _ in range(plan.protocol.warmup):
            call()
        workspace.sync()
        warm_ns = (perf_counter_ns() - begin) // max(1, plan.protocol.warmup)
        attempt.stage("profile")
        if TORCH in plan.profilers:
            sums = with_torch_profiler(call, cell, workspace)
            cell = replace(cell, samples={KERNEL: sums} if sums else {})
        else:
            profiled_calls(call, cell.cell, workspace)
        attempt.stage("timing")
        if plan.protocol.samples and not plan.wrapped:  # times under a tool include its overhead
            with timing.CpuWait() as cpu_wait:
                cell = _sampled(cell, workspace, call, warm_ns)
            cell = replace(cell, clocks=cell.clocks | cpu_wait.reading())
    turns = {name: [(cell.process, 0, len(values))] for name, values in cell.samples.items()}
    return replace(cell, status="ok", iterations=plan.protocol.iterations, turns=turns)


def _sampled(cell: Cell, workspace: Workspace, call: Callable[[], Any], warm_ns: int) -> Cell:
    """Return the cell with its samples. `warm_ns` is the time of a warm-up call, or 0 if there was none."""
    count = workspace.plan.protocol.samples
    if not is_gpu(workspace.device):
        return replace(cell, samples=cell.samples | timing.time_wall(call, count))
    expected_ns = warm_ns
    if warm_ns < SLOW_NS:
        (expected_ns,) = timing.time_eager(call, 1, timing.EAGER_NS)[EAGER]
    samples = timing.time_eager(call, count, expected_ns)
    clocks = workspace.clocks.latest() if workspace.clocks else {}
    samplers: dict[str, Callable[[], timing.Sampler]] = {
        COLD: lambda: partial(timing.time_cold, call, delay=timing.StreamDelay()),
        GRAPH: partial(timing.open_graph, call, expected_ns),
    }
    for name, open_sampler in samplers.items():
        try:
            samples |= open_sampler()(count)
        except RuntimeError as error:
            cell = without(name, cell, error)
    return replace(cell, samples=cell.samples | samples, clocks=clocks)


def without(measurement: str, cell: Cell, error: RuntimeError) -> Cell:
    """Return the cell with a note on a measurement that failed. Raise if the context is lost."""
    if context_is_dead(error):
        raise error
    name = {COLD: "cold", GRAPH: "CUDA-graph"}[measurement]
    note = f"no {name} timing: {str(error).splitlines()[0]}"
    return replace(cell, warnings=(*cell.warnings, note))
