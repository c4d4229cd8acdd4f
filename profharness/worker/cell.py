"""Runs one cell: first call, profiled calls, timing; whatever happens becomes the cell's result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import nvtx
import torch
from isal import igzip
from torch.autograd.profiler import profile, record_function

from profharness.backends import (
    Attention,
    Backend,
    ImplementationError,
    RefusedError,
    find_backend,
)
from profharness.environment import backend_name
from profharness.rows import Refusal
from profharness.run import Cell
from profharness.trace import WARMUP_RANGE, cell_range
from profharness.worker import timing
from profharness.worker.failures import (
    DeadContextError,
    context_is_dead,
    failure,
    heard_warnings,
    is_oom,
    is_refusal,
    shortened,
)
from profharness.worker.inputs import (
    Inputs,
    broken_output,
    fused_choice,
    make_call,
    make_forward,
    make_inputs,
)
from profharness.worker.workspace import Bench


def tuning_of(backend: Backend, attention: Attention | None) -> dict[str, Any] | None:
    """What the loaded function says of its last call by an attribute `tuning`, else what its backend
    says; None where neither says anything. Raises ImplementationError for an answer that is not a
    dict that JSON can hold.
    """
    own = getattr(attention, "tuning", None)
    answer = own() if callable(own) else backend.tuning()
    if answer is None:
        return None
    try:
        if not isinstance(answer, dict):
            raise TypeError
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(answer))
    except (TypeError, ValueError, OverflowError):
        raise ImplementationError(
            f"tuning() returned {answer!r}; it must return a dict that JSON can hold, or None"
        ) from None
    return found


NVTX_DOMAIN = "profharness"


@contextlib.contextmanager
def open_range(name: str) -> Iterator[None]:
    """A range on this thread (record_function, NVTX push/pop) and one of the whole process (NVTX
    start/end).

    The process-wide one catches backward kernels: autograd launches them from a thread of its own.
    """
    process_wide = nvtx.start_range(name, domain=NVTX_DOMAIN)
    with nvtx.annotate(name, domain=NVTX_DOMAIN), record_function(name):
        yield
    nvtx.end_range(process_wide)


def profiled_calls(
    call: Callable[[], Any], cell: str, iterations: int, sync: Callable[[], None]
) -> None:
    """The calls of a cell, each in a range of its own and complete before the next one begins."""
    for _ in range(iterations):
        with open_range(cell_range(cell)):
            call()
            sync()


def with_torch_profiler(
    call: Callable[[], Any],
    cell: str,
    iterations: int,
    sync: Callable[[], None],
    path: Path,
) -> None:
    """Profile the calls and export the Chrome trace to `path`.

    A warm-up call opens each session: Kineto can drop records from before its capture window, and
    those would be the first.
    """
    device = "cuda" if torch.cuda.is_available() else None
    with profile(use_kineto=True, use_device=device, record_shapes=True) as session:
        with record_function(WARMUP_RANGE):
            call()
            sync()
        profiled_calls(call, cell, iterations, sync)
    plain = path.with_suffix("")
    session.export_chrome_trace(str(plain))
    path.write_bytes(igzip.compress(plain.read_bytes(), 2))
    plain.unlink()


def run_cell(cell: Cell, bench: Bench, stage: Callable[[str], None]) -> Cell:
    """The cell with its result. Raises DeadContextError (carrying the result) when the process has
    to end after it.
    """
    cell = replace(cell, config=cell.config.resolve(bench.device))
    begin = time.perf_counter_ns()
    heard: list[str] = []
    known: dict[str, Any] = {}
    torch.use_deterministic_algorithms(cell.config.deterministic)
    # else deterministic mode fills every new tensor, by kernels that are not attention's
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        result = _measure(cell, bench, stage, heard, known)
    except Exception as error:
        result = failure(replace(cell, **known), bench, heard, error)
        if context_is_dead(error):
            raise DeadContextError(
                replace(result, duration_ns=time.perf_counter_ns() - begin)
            ) from None
    return replace(result, duration_ns=time.perf_counter_ns() - begin)


def _measure(
    cell: Cell,
    bench: Bench,
    stage: Callable[[str], None],
    heard: list[str],
    known: dict[str, Any],
) -> Cell:
    """The cell as it ran. known gets fields that hold also if it then fails."""
    backend = find_backend(cell.backend, bench.sources)
    if backend.load is not None:
        stage("compile")  # importing an implementation may compile it
    begin = time.perf_counter_ns()
    reasons = reasons_beforehand(cell, bench, backend)
    if reasons:
        message = "; ".join(reason.message for reason in reasons)
        return replace(cell, status="refused", message=message, refusals=reasons)
    attention = backend.load() if backend.load is not None else None
    loaded_ns = time.perf_counter_ns() - begin
    stage("inputs")
    inputs = make_inputs(cell.config, bench.device, bench.plan.protocol.seed)
    call = make_call(cell.config, inputs, attention)
    with backend.context():
        if attention is None:
            known["choice"] = own_choice(cell, inputs)
        else:
            stage("compile")
            begin = time.perf_counter_ns()
            with heard_warnings(heard):
                try_out(cell, bench, backend, attention, inputs)
            known["compile_ns"] = loaded_ns + time.perf_counter_ns() - begin
            known["tuning"] = tuning_of(backend, attention)
        stage("warm-up")
        cell = first_call(replace(cell, **known), bench, call, heard)
        for _ in range(bench.plan.protocol.warmup):
            call()
        bench.sync()
        stage("profile")
        if "torch" in bench.plan.profilers:
            path = bench.folder / f"{cell.cell}.torch.json.gz"
            with_torch_profiler(call, cell.cell, bench.plan.protocol.iterations, bench.sync, path)
        else:
            profiled_calls(call, cell.cell, bench.plan.protocol.iterations, bench.sync)
        stage("timing")
        return replace(
            _timed(cell, bench, call), status="ok", iterations=bench.plan.protocol.iterations
        )


def reasons_beforehand(cell: Cell, bench: Bench, backend: Backend) -> tuple[Refusal, ...]:
    """Every reason against the cell that shows without a call."""
    device = None
    if bench.device not in backend.devices:
        device = f"{cell.backend} attention does not exist on {bench.device}"
    told = (
        ("absent", backend.absent()),
        ("no_device", device),
        ("unsupported", backend.supports(cell.config)),
    )
    return tuple(Refusal(code, reason, "inferred") for code, reason in told if reason)


def try_out(
    cell: Cell, bench: Bench, backend: Backend, attention: Attention, inputs: Inputs
) -> None:
    """The first call of an implementation: it compiles, and what it returns is held to the contract.

    Raises RefusedError for what the backend says it cannot do, ImplementationError for a broken
    contract.
    """
    try:
        output = make_forward(cell.config, inputs, attention)()
        broken = broken_output(cell.config, inputs, output)
        if broken:
            raise ImplementationError(f"{cell.backend} {broken}")
        if cell.config.bwd and not output.requires_grad:
            raise RefusedError("unsupported", "its output carries no gradient; leave bwd out")
        if cell.config.bwd:
            make_call(cell.config, inputs, attention)()
        bench.sync()
    except backend.refuses as error:
        known = isinstance(error, (RefusedError, ImplementationError))
        if known or is_refusal(error) or is_oom(error) or context_is_dead(error):
            raise
        text = f"{type(error).__name__}: {str(error).strip()}"
        raise RefusedError("unsupported", shortened(text)) from error
    except SystemExit as error:
        raise ImplementationError(f"{cell.backend} called exit({error.code})") from error


def first_call(cell: Cell, bench: Bench, call: Callable[[], Any], heard: list[str]) -> Cell:
    """The call that shows whether the backend takes the config; it also gives the peak memory."""
    before = 0
    if bench.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with heard_warnings(heard):
        call()
        bench.sync()
    peak = torch.cuda.max_memory_allocated() - before if bench.device == "cuda" else None
    return replace(cell, peak_memory_bytes=peak)


def _timed(cell: Cell, bench: Bench, call: Callable[[], Any]) -> Cell:
    samples = bench.plan.protocol.samples
    if samples == 0 or bench.plan.wrapped:  # times under another program are not the call's own
        return cell
    if bench.device == "cpu":
        return replace(cell, samples={"wall": timing.time_wall(call, samples)})
    found = {"event": timing.time_events(call, samples, bench.flush)}
    clocks = bench.read_clocks()
    expected_ns = sorted(found["event"])[len(found["event"]) // 2]
    if expected_ns > timing.GRAPH_WORTH_MAX_NS:
        return replace(cell, samples=found, clocks=clocks)
    notes: tuple[str, ...] = ()
    try:
        found["graph"] = timing.time_graph(call, samples, expected_ns)
    except RuntimeError as error:
        if context_is_dead(error):
            raise
        notes = (f"no CUDA-graph timing: {str(error).splitlines()[0]}",)
    return replace(cell, samples=found, clocks=clocks, warnings=cell.warnings + notes)


def own_choice(cell: Cell, inputs: Inputs) -> str | None:
    """PyTorch's answer beforehand, None where it raises; its warnings come again with the first
    call.
    """
    with heard_warnings([]):
        try:
            return backend_name(fused_choice(cell.config, inputs))
        except RuntimeError:
            return None
