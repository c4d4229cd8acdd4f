"""Runs one cell: first call, profiled calls, timing; whatever happens becomes the cell's result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from profharness.backends import find_backend
from profharness.environment import backend_name
from profharness.record import Cell, Protocol, Refusal
from profharness.worker import timing
from profharness.worker.clocks import ClockReader
from profharness.worker.inputs import Inputs, fused_choice, make_call, make_inputs
from profharness.worker.profile import profiled_calls, with_torch_profiler
from profharness.worker.refusal import heard_warnings, is_refusal, refusals

OOM_TEXTS = ("not enough memory", "can't allocate memory", "CUDA out of memory")


class DeadContextError(Exception):
    """The CUDA context is lost; this process can compute nothing more. args: the cell's result."""


@dataclass(frozen=True)
class Bench:
    """What a worker keeps from cell to cell."""

    device: str
    folder: Path
    profilers: tuple[str, ...]
    protocol: Protocol
    read_clocks: Callable[[], dict[str, Any]]
    flush: timing.L2Flush

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def open_bench(folder: Path, profilers: tuple[str, ...], protocol: Protocol, device: str) -> Bench:
    """The bench of one worker process on one device."""
    reader = ClockReader() if device == "cuda" else dict
    return Bench(device, folder, profilers, protocol, reader, timing.L2Flush())


def run_cell(cell: Cell, bench: Bench, stage: Callable[[str], None]) -> Cell:
    """The cell with its result. Raises DeadContextError (carrying the result) when the process has
    to end after it.
    """
    cell = replace(cell, config=cell.config.resolve(bench.device))
    begin = time.perf_counter_ns()
    heard: list[str] = []
    torch.use_deterministic_algorithms(cell.config.deterministic)
    try:
        result = _measure(cell, bench, stage, heard)
    except Exception as error:
        result = _failure(cell, bench, heard, error)
        if _context_is_dead(error):
            raise DeadContextError(
                replace(result, duration_ns=time.perf_counter_ns() - begin)
            ) from None
    return replace(result, duration_ns=time.perf_counter_ns() - begin)


def _measure(cell: Cell, bench: Bench, stage: Callable[[str], None], heard: list[str]) -> Cell:
    backend = find_backend(cell.backend)
    if bench.device not in backend.devices:
        reason = Refusal(
            "no_device", f"{cell.backend} attention does not exist on {bench.device}", "inferred"
        )
        return replace(cell, status="refused", message=reason.message, refusals=(reason,))
    stage("inputs")
    inputs = make_inputs(cell.config, bench.device, bench.protocol.seed)
    call = make_call(cell.config, inputs)
    with backend.context():
        cell = replace(cell, choice=_choice(cell, inputs))
        stage("warm-up")
        cell = _first_call(cell, bench, call, heard)
        for _ in range(bench.protocol.warmup):
            call()
        bench.sync()
        stage("profile")
        if "torch" in bench.profilers:
            path = bench.folder / f"{cell.cell}.torch.json.gz"
            with_torch_profiler(call, cell.cell, bench.protocol.iterations, bench.sync, path)
        else:
            profiled_calls(call, cell.cell, bench.protocol.iterations, bench.sync)
        stage("timing")
        return replace(_timed(cell, bench, call), status="ok", iterations=bench.protocol.iterations)


def _first_call(cell: Cell, bench: Bench, call: Callable[[], Any], heard: list[str]) -> Cell:
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
    samples = bench.protocol.samples
    if samples == 0:
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
        if _context_is_dead(error):
            raise
        notes = (f"no CUDA-graph timing: {str(error).splitlines()[0]}",)
    return replace(cell, samples=found, clocks=clocks, warnings=cell.warnings + notes)


def _choice(cell: Cell, inputs: Inputs) -> str | None:
    """PyTorch's answer beforehand, None where it raises; its warnings come again with the first
    call.
    """
    with heard_warnings([]):
        try:
            return backend_name(fused_choice(cell.config, inputs))
        except RuntimeError:
            return None


def _failure(cell: Cell, bench: Bench, heard: list[str], error: Exception) -> Cell:
    message = f"{type(error).__name__}: {str(error).strip()}"
    if is_refusal(error):
        reasons = refusals(cell.backend, heard, error)
        return replace(cell, status="refused", message=reasons[0].message, refusals=reasons)
    if _is_oom(error):
        if bench.device == "cuda":
            torch.cuda.empty_cache()
        return replace(cell, status="oom", message=message.splitlines()[0])
    if _context_is_dead(error):
        return replace(cell, status="crashed", message=message)
    return replace(cell, status="error", message=message)


def _is_oom(error: Exception) -> bool:
    kinds = (MemoryError, torch.cuda.OutOfMemoryError)
    return isinstance(error, kinds) or any(text in str(error) for text in OOM_TEXTS)


def _context_is_dead(error: Exception) -> bool:
    """Whether a CUDA error is one of those after which every later call in the process fails too."""
    if _is_oom(error) or not torch.cuda.is_available():
        return False
    return "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
