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
from isal import igzip

# not torch.profiler.profile: the first one of a process imports torch._inductor, 1.4 s
from torch.autograd.profiler import profile, record_function

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
