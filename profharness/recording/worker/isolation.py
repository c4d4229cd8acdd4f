"""Protect measurements from side effects of backends.

This module selects the cells that one worker process runs, detects changes that a backend makes to
the process, and rejects impossible times.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import locale
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.attention
from torch.nn.modules import module as torch_module

from profharness.attention.backends import find_backend
from profharness.attention.costs import flops, tensor_bytes
from profharness.devices import Peaks, data_sheet
from profharness.errors import join_few
from profharness.rows import COLD, HOST
from profharness.run import Cell, JournalEntry, Plan, turn_order

SHOWN = 12  # maximum number of changes of one kind that a message lists
# Largest ratio of any format's peak rate to the fp16 rate with fp32 accumulation (fp4 on GeForce).
FASTEST_FORMAT = 8
MEMORY_MARGIN = 2  # tolerance, because data sheets round and GPUs may compress memory
MODULES = (
    *(torch.nn.functional, torch, torch.autograd, torch.backends.cuda, torch.cuda, torch.nn),
    *(torch.nn.attention, time, builtins, gc, os, random, signal, subprocess, sys, threading),
    warnings,
)
CLASSES = (torch.Tensor, torch.nn.Module, torch.cuda.Event, torch.cuda.CUDAGraph, torch.cuda.Stream)
OPERATORS = (
    *("scaled_dot_product_attention", "_scaled_dot_product_attention_math", "_fused_sdp_choice"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("matmul", "bmm", "mm", "softmax.int", "_softmax"),
)
REPLACED, CHANGED = "replaced ", "changed "
TORCH_FOLDER = f"{Path(torch.__file__).parent}{os.sep}"
# Keep the original functions here, because a backend may replace them in their modules.
getsignal, fstat = signal.getsignal, os.fstat
KEYS = ("CPU:", "CUDA:", "AutogradCPU:", "AutogradCUDA:")
DETERMINISTIC = "torch.are_deterministic_algorithms_enabled()"
SETTINGS = (
    *("torch.get_default_dtype", "torch.get_default_device", "torch.get_num_threads"),
    *("torch.get_float32_matmul_precision", "torch.initial_seed", "torch.is_anomaly_enabled"),
    *("torch.is_grad_enabled", "torch.is_inference_mode_enabled", "torch.is_autocast_enabled"),
    DETERMINISTIC.removesuffix("()"),
    *("torch.backends.cuda.flash_sdp_enabled", "torch.backends.cuda.mem_efficient_sdp_enabled"),
    *("torch.backends.cuda.math_sdp_enabled", "torch.backends.cuda.cudnn_sdp_enabled"),
    *("torch.backends.cuda.matmul.allow_tf32", "torch.backends.cuda.matmul.fp32_precision"),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
    *("torch.backends.cudnn.benchmark", "torch.backends.cudnn.deterministic"),
    *("torch.backends.cudnn.enabled", "torch.backends.mkldnn.enabled"),
    *("torch._C._get_sdp_priority_order", "torch._C._len_torch_function_stack"),
    "torch._C._len_torch_dispatch_stack",
    *("gc.isenabled", "os.getcwd", "sys.getprofile", "sys.getrecursionlimit", "sys.gettrace"),
    *("sys.getswitchinterval", "sys.stderr", "sys.stdin", "sys.stdout"),
)
OTHERS: dict[str, Callable[[], Any]] = {
    "torch.is_autocast_enabled('cpu')": lambda: torch.is_autocast_enabled("cpu"),
    "PyTorch's global module hooks": lambda: [
        len(hooks)
        for name, hooks in vars(torch_module).items()
        if name.startswith("_global_") and isinstance(hooks, dict)
    ],
    # ignore other filters, because many packages hide warnings when they are imported
    "the filters that turn warnings into errors": lambda: [
        (category, module)
        for action, _, category, module, _ in warnings.filters
        if action == "error"
    ],
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "the CPUs that the process may use": lambda: os.sched_getaffinity(0),
    "the priority of the process": lambda: os.getpriority(os.PRIO_PROCESS, 0),
    "the resource limits of the process": lambda: [
        resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    ],
    "the timers of the process": lambda: [signal.getitimer(n) > (0.0, 0.0) for n in range(3)],
}


def cells_here(plan: Plan, sources: Mapping[str, str], device: str) -> tuple[tuple[Cell, ...], str]:
    """Return the cells of a plan that this process runs, and the isolated backend that owns it.

    Each isolated backend gets its own process, because side effects of the backend could change the
    results of others. All other backends share one process, for which the owner is an empty string.
    An isolated backend that is not available also shares this process, because none of its code
    runs. The first process of each cell follows the plan's order. Later repetitions use a random
    order that depends on the seed, so that changes of clocks and temperature favor no backend.
    """
    backends = dict.fromkeys(cell.backend for cell in plan.cells)
    owners = {backend: _owner(backend, sources, device) for backend in backends}
    names = list(dict.fromkeys(owners.values()))
    if not names:
        return (), ""
    process = plan.cells[0].process
    index = turn_order(plan.protocol.seed, "", process, len(names))[0] if process else 0
    return tuple(cell for cell in plan.cells if owners[cell.backend] == names[index]), names[index]


def _owner(name: str, sources: Mapping[str, str], device: str) -> str:
    try:
        backend = find_backend(name, sources)
        isolated = backend.isolated and device in backend.devices and not backend.absent()
    except Exception:
        return ""  # the cells of this backend fail with the same error
    return name if isolated else ""


@dataclass(frozen=True)
class ProcessState:
    """The state of a process that a backend could change, such as functions, settings and handlers.

    Functions are compared by identity, all other values by equality.
    """

    parts: dict[str, Any]
    threads: frozenset[threading.Thread]

    @classmethod
    def read(cls) -> ProcessState:
        return cls(dict(_parts()), frozenset(threading.enumerate()))

    def changes_since(self, before: ProcessState) -> list[str]:
        # Of added entries, report only environment variables, because an added function replaces
        # no other function.
        added = [name for name in self.parts if name not in before.parts and name.startswith("$")]
        texts = [
            _change(name, before.parts.get(name), self.parts.get(name))
            for name in (*before.parts, *added)
            if _differs(before.parts.get(name), self.parts.get(name))
        ]
        begun = len(self.threads - before.threads)
        texts += [f"left {begun} thread{'s' * (begun > 1)} running"] if begun else []
        groups = {
            verb: [text.removeprefix(verb) for text in texts if text.startswith(verb + sign)]
            for verb, sign in ((REPLACED, ""), (CHANGED, "$"))
        }
        others = [text for text in texts if not text.startswith((REPLACED, CHANGED + "$"))]
        return [verb + join_few(names, SHOWN) for verb, names in groups.items() if names] + others


def with_changes(result: Cell, before: ProcessState) -> Cell:
    """Add a warning to a result if the backend has changed its process since `before`.

    If `verify` produced the result, its passed check of the inputs gets the same message.
    """
    # the worker itself sets deterministic mode for each config
    expected = before.parts | {DETERMINISTIC: result.config.deterministic}
    try:
        changes = ProcessState.read().changes_since(replace(before, parts=expected))
    except Exception as error:  # raised by a function that the backend replaced
        changes = [f"replaced functions that Python needs ({type(error).__name__}: {error})"]
    if not changes:
        return result
    text = f"this backend {join_few(changes, SHOWN)}; no other backend ran in its process"
    checks = tuple(
        replace(check, message=text) if check.what == "inputs" and check.passed else check
        for check in result.checks
    )
    return replace(result, warnings=(*result.warnings, text), checks=checks)


def checked_write(
    write: Callable[[JournalEntry], None], gpu: str, *, alone: bool
) -> Callable[[JournalEntry], None]:
    """Return a function that checks results before it calls `write`.

    A result with impossible times becomes an error. If `alone` is set, an isolated backend owns the
    process, and a result gets a warning about the backend's changes to the process.
    """
    peaks = data_sheet(gpu)
    before: list[ProcessState] = []

    def check_and_write(entry: JournalEntry) -> None:
        if alone and not before:  # the first entry is written before the backend is loaded
            before.append(ProcessState.read())
        if entry.result is not None:
            result = with_doubt(entry.result, peaks)
            entry = replace(entry, result=with_changes(result, *before) if alone else result)
        write(entry)

    return check_and_write


def with_doubt(result: Cell, peaks: Peaks | None) -> Cell:
    """Replace a result with an error without samples if any of its times is impossible."""
    for name, samples in result.samples.items():
        why = why_impossible(result, name, samples, peaks) if samples else None
        if why is not None:
            message = (
                f"the {name} times are impossible ({why}); the call did not do its work, or the "
                "clock is wrong"
            )
            return replace(result, status="error", message=message, samples={}, turns={})
    return result


def why_impossible(cell: Cell, name: str, samples: list[int], peaks: Peaks | None) -> str | None:
    """Return why the samples of a measurement are impossible, or None if they are possible.

    `samples` are in ns per call. For example, a call cannot exceed the peak rate of the GPU.
    """
    if min(samples) <= 0:
        return f"{min(samples)} ns per call"
    if name == HOST or peaks is None:
        return None
    seconds = median(samples) / 1e9
    rate = FASTEST_FORMAT * max(peaks.flops_per_s.values(), default=0.0)
    if rate and (done := flops(cell.config) / seconds) > rate:
        return (
            f"{done / 1000000000000.0:,.0f} TFLOP/s, but tensor cores reach at most "
            f"{rate / 1000000000000.0:,.0f} TFLOP/s"
        )
    tensors = tensor_bytes(cell.config)
    # do not count the output and unflushed inputs, because they may stay in the L2
    cached = 0 if name == COLD else peaks.l2_bytes
    width = MEMORY_MARGIN * (peaks.bandwidth_bytes_per_s or 0.0)
    if width and cached is not None:
        read = (tensors.forward - tensors.output - cached) / seconds
        if read > width:
            return (
                f"{read / 1e12:,.1f} TB/s from memory, but its bandwidth is "
                f"{width / MEMORY_MARGIN / 1e12:,.1f} TB/s"
            )
    return None


def _differs(old: Any, new: Any) -> bool:
    if old is new:
        return False
    if callable(old) or callable(new):
        # ignore replacements by functions of torch itself, because torch.compile makes them
        code = getattr(new, "__code__", None)
        return code is None or not code.co_filename.startswith(TORCH_FOLDER)
    return bool(old != new)


def _change(name: str, old: Any, new: Any) -> str:
    if name.startswith("aten::"):
        return f"registered another kernel for {name}"
    if callable(old) or callable(new) or name.startswith(("sys.modules", "sys.std")):
        return REPLACED + name
    if isinstance(new, bool | int | float | torch.dtype | torch.device):
        return f"set {name} to {new}"
    return CHANGED + name


def _readers() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each setting and a function that reads it.

    The functions are looked up now, before a backend can replace them.
    """
    for name in SETTINGS:
        root, _, path = name.partition(".")
        with contextlib.suppress(AttributeError, RuntimeError):
            get = partial(attrgetter(path), globals()[root])
            value = get()
            yield (f"{name}()", value) if callable(value) else (name, get)


READERS = dict(_readers()) | OTHERS


def _parts() -> Iterator[tuple[str, Any]]:
    for module in MODULES:
        yield f"sys.modules[{module.__name__!r}]", id(sys.modules.get(module.__name__))
        yield from _functions(module.__name__, vars(module))
    for owner in CLASSES:
        inherited: dict[str, Any] = {}
        for base in reversed(owner.__mro__):
            inherited |= vars(base)
        yield from _functions(f"{owner.__module__}.{owner.__qualname__}", inherited)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings about deprecated functions
        for name, read in READERS.items():
            with contextlib.suppress(Exception):
                yield name, read()
    for name, text in os.environ.items():
        if not name.lstrip("_").startswith("TORCHINDUCTOR"):  # torch.compile sets some of these
            yield f"${name}", text
    for handled in signal.Signals:
        with contextlib.suppress(Exception):
            yield f"the handler of {handled.name}", getsignal(handled)
    for operator in OPERATORS:
        with contextlib.suppress(Exception):
            table = torch._C._dispatch_dump_table(f"aten::{operator}").splitlines()
            yield f"aten::{operator}", [line for line in table if line.startswith(KEYS)]
    for number in range(3):
        with contextlib.suppress(OSError):
            state = fstat(number)
            yield f"file descriptor {number}", (state.st_dev, state.st_ino)


def _functions(path: str, members: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(members.items()):
        if callable(value) or isinstance(value, classmethod | staticmethod | property):
            yield f"{path}.{name}", value
