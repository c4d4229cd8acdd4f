"""Profiled calls: ranges that every profiler can see, and the torch profiler's own session around
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nvtx
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from profharness.trace import WARMUP_RANGE, cell_range

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
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as session:
        with record_function(WARMUP_RANGE):
            call()
            sync()
        profiled_calls(call, cell, iterations, sync)
    session.export_chrome_trace(str(path))
