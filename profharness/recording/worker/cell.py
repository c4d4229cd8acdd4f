"""The main program of the worker, which profiles and times each cell."""

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
    make_inputs,
    make_output,
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
SLOW_NS = 10 * timing.EAGER_NS  # no trial burst if a warm-up call takes at least this long


def body(workspace: Workspace) -> None:
    """Measure every cell of the plan that belongs to this process."""
    workspace.open_clocks()
    run_each(workspace, lambda cell, stage: run_cell(cell, workspace, stage))


@contextlib.contextmanager
def open_range(name: str) -> Iterator[None]:
    """Open ranges with this name for all profilers while the block runs.

    `record_function` and NVTX push/pop ranges contain only launches of this thread. The NVTX
    start/end range contains launches of the whole process, such as backward kernels, which autograd
    launches on another thread. With ROCm, torch.cuda.nvtx opens roctx ranges.
    """
    process_wide = nvtx.start_range(name, domain=NVTX_DOMAIN)
    roctx = torch.cuda.nvtx.range_start(name) if torch.version.hip else None
    with nvtx.annotate(name, domain=NVTX_DOMAIN), record_function(name):
        yield
    if roctx is not None:
        torch.cuda.nvtx.range_end(roctx)
    nvtx.end_range(process_wide)


def profiled_calls(call: Callable[[], Any], cell: str, workspace: Workspace) -> None:
    """Make the calls to profile, each in a range and synchronized before the next call."""
    for _ in range(workspace.plan.protocol.iterations):
        with open_range(cell_range(cell)):
            call()
            workspace.sync()


def with_torch_profiler(call: Callable[[], Any], cell: Cell, workspace: Workspace) -> list[int]:
    """Profile the calls of a cell with Kineto. Return the GPU time of each call in ns.

    Only the first process of a cell writes a trace into the run folder. The session starts with a
    warm-up call, because Kineto can lose the first launches.
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


class _Event(msgspec.Struct):
    """The fields of an event that are summed. `ts` and `dur` are in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0


class _Events(msgspec.Struct):
    """The events of a Chrome trace."""

    traceEvents: list[_Event]


def call_sums(trace: bytes, name: str) -> list[int]:
    """Return the GPU time in ns of the launches in each range that is called `name`.

    Ranges without launches are left out. If the trace is not valid JSON, return an empty list,
    because ingest reports the damage.
    """
    try:
        events = msgspec.json.decode(trace, type=_Events).traceEvents
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []
    complete = [event for event in events if event.ph == "X"]
    launches = [event for event in complete if event.cat in ON_DEVICE]
    sums = []
    for event in complete:
        if event.cat == "user_annotation" and event.name == name:
            begin, end = event.ts, event.ts + event.dur
            inside = [launch.dur for launch in launches if begin <= launch.ts <= end]
            sums.append(round(sum(inside) * 1000))
    return [value for value in sums if value]


def _write_trace(session: profile, plain: Path) -> bytes:
    """Write a compressed trace to the run folder and return the uncompressed bytes.

    Kineto only logs a failed write, so check the file, and exit if the run folder is not writable.
    """
    packed = Path(f"{plain}.gz")
    try:
        session.export_chrome_trace(str(plain))
        data = plain.read_bytes()
        if not data.rstrip().endswith(b"}"):
            plain.write_bytes(bytes(2 * len(data)))  # raises the OSError that Kineto hid
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
    """Loads the backend of one cell and makes the first calls."""

    cell: Cell
    workspace: Workspace
    stage: Stage
    warning_texts: list[str] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)  # fields of the cell to set on failure
    backend: Backend = field(init=False)
    attention: Attention | None = field(init=False)
    loaded_ns: int = field(init=False)

    def load(self) -> None:
        """Load the backend. Raise RefusedBeforehandError if it does not support the config."""
        self.backend = find_backend(self.cell.backend, self.workspace.sources)
        if self.backend.load is not None:
            self.stage("compile")  # loading an implementation may compile kernels
        begin = perf_counter_ns()
        reasons = reasons_beforehand(self.cell.config, self.workspace, self.backend)
        if reasons:
            raise RefusedBeforehandError(reasons)
        self.attention = self.backend.load() if self.backend.load is not None else None
        self.loaded_ns = perf_counter_ns() - begin
        self.stage("inputs")

    def call_first(self, inputs: Inputs, call: Callable[[], Any]) -> Cell:
        """Make the first call. Return the cell with the results, such as PyTorch's choice.

        On a GPU, make a second call and add its peak memory. The caller must have entered the
        backend's context.
        """
        if self.attention is None:
            # ignore warnings of this query, because the call below issues them again
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
        # Measure the memory of a second call. The first call in a process also allocates caches
        # such as the workspace of cuBLAS (32 MiB), which would count only for the first cell.
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self.workspace.sync()
        return replace(cell, peak_memory_bytes=torch.cuda.max_memory_allocated() - before)

    def _try_out(self, attention: Attention, inputs: Inputs) -> None:
        """Make the first call of an implementation and check its output.

        Raise RefusedError if the implementation refuses the config, and ImplementationError if its
        output is not like SDPA's output.
        """
        config = self.cell.config
        with implementation_errors(self.backend):
            output = make_output(config, inputs, attention)
            check_output(self.backend.name, config, inputs, output)
            if config.bwd and not output.requires_grad:
                raise RefusedError(
                    "unsupported",
                    "the output of this implementation has no gradient; remove bwd from the config",
                )
            if config.bwd:
                make_call(config, inputs, attention)()
            self.workspace.sync()


def tuning_of(backend: Backend, attention: Attention | None) -> dict[str, Any] | None:
    """Return the tuning parameters, such as tile sizes, that an implementation reports.

    Use `tuning` of the loaded function, or of the backend if the function has none. Raise
    ImplementationError if the result is neither None nor a dict that JSON can represent.
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
            f"tuning() returned {answer!r}; it must return a dict of JSON values, or None"
        ) from None
    return tuning


def run_cell(cell: Cell, workspace: Workspace, stage: Stage) -> Cell:
    """Measure a cell and return its result. Raise DeadContextError if the CUDA context is lost."""
    cell = replace(cell, config=cell.config.resolve(workspace.device))
    begin = perf_counter_ns()
    attempt = Attempt(cell, workspace, stage)
    set_deterministic(cell.config.deterministic)
    # otherwise deterministic mode would launch kernels that fill every new tensor
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
        if plan.protocol.samples and not plan.wrapped:  # nsys and ncu slow calls down
            with timing.CpuWait() as cpu_wait:
                cell = _sampled(cell, workspace, call, warm_ns)
            cell = replace(cell, clocks=cell.clocks | cpu_wait.reading())
    turns = {name: [(cell.process, 0, len(values))] for name, values in cell.samples.items()}
    return replace(cell, status="ok", iterations=plan.protocol.iterations, turns=turns)


def _sampled(cell: Cell, workspace: Workspace, call: Callable[[], Any], warm_ns: int) -> Cell:
    """Time the call and return the cell with the samples.

    `warm_ns` is the mean time of a warm-up call, or about 0 if there were no such calls.
    """
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
    """Return the cell with a warning that `measurement` failed.

    Raise `error` again if the CUDA context is lost.
    """
    if context_is_dead(error):
        raise error
    name = {COLD: "cold", GRAPH: "CUDA-graph"}[measurement]
    note = f"no {name} timing: {str(error).splitlines()[0]}"
    return replace(cell, warnings=(*cell.warnings, note))
