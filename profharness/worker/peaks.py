"""A program of its own that measures what the device can do: copy bandwidth and matrix rates."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from profharness import environment
from profharness.devices import MEASURED, PEAKS_FILE, Peaks
from profharness.worker.program import end_with

BUDGET_S = 0.4  # per figure, warm-up apart
MIN_SAMPLES, MAX_SAMPLES, WARMUP = 5, 50, 3
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}  # much more than any last-level cache of a GPU
SHAPES = {"cuda": (4096, 8192), "cpu": (512,)}  # rows of the square products; the best rate counts
ORIGIN = "copy of {copy} MiB read and written; square matrix products of {shapes}; medians"


def measure(device: str) -> Peaks:
    """Measured peaks of `cuda` or `cpu`; a few seconds. A dtype that the device has no units for
    is left out.
    """
    import torch

    told = environment.collect(device)
    name = str(told.get("gpu") or told.get("cpu") or device)
    shapes = SHAPES[device]
    rates = {}
    for dtype, tf32 in _kinds(torch, device):
        with _tf32(torch, tf32):
            found = [_matrix_rate(torch, device, dtype, rows) for rows in shapes]
        rates["tf32" if tf32 else dtype] = max(found)
    return Peaks(
        device=name,
        source=MEASURED,
        bandwidth_bytes_per_s=_bandwidth(torch, device),
        flops_per_s=rates,
        l2_bytes=told.get("l2_bytes"),
        num_sms=told.get("num_sms"),
        origin=ORIGIN.format(copy=COPY_BYTES[device] >> 20, shapes=" and ".join(map(str, shapes))),
    )


def _kinds(torch: Any, device: str) -> list[tuple[str, bool]]:
    """(dtype, with TF32) of what the device multiplies at a rate worth naming."""
    if device == "cpu":
        return [("fp32", False)]
    recent = torch.cuda.get_device_capability() >= (8, 0)
    return [("fp16", False), ("fp32", False)] + [("bf16", False), ("fp32", True)] * recent


@contextmanager
def _tf32(torch: Any, wanted: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = wanted
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _bandwidth(torch: Any, device: str) -> float:
    """Bytes a second of a copy, those read and those written both counted."""
    size = COPY_BYTES[device]
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        size = min(size, free // 4)
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    seconds = _median_s(torch, device, lambda: target.copy_(source))
    return 2.0 * float(source.numel()) * 4 / seconds


def _matrix_rate(torch: Any, device: str, dtype: str, rows: int) -> float:
    """FLOP/s of a square product of normally distributed numbers (zeros would draw less power)."""
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    left, right = (torch.randn(rows, rows, device=device).to(kind) for _ in range(2))
    out = torch.empty_like(left)
    return 2.0 * float(rows) ** 3 / _median_s(torch, device, lambda: torch.mm(left, right, out=out))


def _median_s(torch: Any, device: str, call: Callable[[], Any]) -> float:
    for _ in range(WARMUP):
        call()
    one = _event_s if device == "cuda" else _wall_s
    if device == "cuda":
        torch.cuda.synchronize()
    samples: list[float] = []
    deadline = time.perf_counter() + BUDGET_S
    while len(samples) < MIN_SAMPLES or (
        len(samples) < MAX_SAMPLES and time.perf_counter() < deadline
    ):
        samples.append(one(torch, call))
    return statistics.median(samples)


def _event_s(torch: Any, call: Callable[[], Any]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def _wall_s(_: Any, call: Callable[[], Any]) -> float:
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def main(folder: Path, device: str, parent: int) -> None:
    """Measure and leave the result in the folder, whole or not at all."""
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    import torch

    chosen = environment.default_device(torch) if device == "auto" else device
    answer = {"peaks": measure(chosen), "environment": environment.collect(chosen)}
    temporary = folder / f".{PEAKS_FILE}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.encode(answer))
    temporary.replace(folder / PEAKS_FILE)


if __name__ == "__main__":
    # without Python's handler an interrupt ends also a program that waits inside of CUDA
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
