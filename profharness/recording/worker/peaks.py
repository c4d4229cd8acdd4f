"""A program of the worker that measures the memory bandwidth and the FLOP rates of the device."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from profharness.device_types import DEVICE_TYPES, device_name, is_gpu
from profharness.devices import MEASURED, PEAKS_FILE, Peaks
from profharness.recording.worker.timing import Workspace, elapsed_ms, sampled, wall_ns

BUDGET_S = 0.4  # time limit of each measurement, without its warm-up
MAX_SAMPLES, WARMUP = 50, 3
ORIGIN = (
    "medians of a copy of {copy} MiB (read and written) and of square matrix products of {shapes}"
)


def body(workspace: Workspace) -> None:
    """Measure the peaks and write them to the folder atomically."""
    peaks = _measure(workspace.device, workspace.environment)
    temporary = workspace.folder / f".{PEAKS_FILE}.{os.getpid()}"
    answer = {"peaks": peaks, "environment": workspace.environment}
    temporary.write_bytes(msgspec.json.encode(answer))
    temporary.replace(workspace.folder / PEAKS_FILE)


def _measure(device: str, environment: dict[str, Any]) -> Peaks:
    shapes = DEVICE_TYPES[device].product_rows
    rates = {}
    for name, dtype, tf32 in _kinds(device):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        rates[name] = max(_matrix_rate(device, dtype, rows) for rows in shapes)
    return Peaks(
        device=device_name(environment) or device,
        source=MEASURED,
        bandwidth_bytes_per_s=_bandwidth(device),
        flops_per_s=rates,
        l2_bytes=environment.get("l2_bytes"),
        num_sms=environment.get("num_sms"),
        origin=ORIGIN.format(
            copy=DEVICE_TYPES[device].copy_bytes >> 20, shapes=" and ".join(map(str, shapes))
        ),
    )


def _kinds(device: str) -> list[tuple[str, Any, bool]]:
    """Return name, dtype and whether to allow TF32 for each kind of matrix product to measure."""
    if not is_gpu(device):
        return [("fp32", torch.float32, False)]
    kinds = [("fp16", torch.float16, False), ("fp32", torch.float32, False)]
    if torch.cuda.get_device_capability() >= (8, 0):
        kinds += [("bf16", torch.bfloat16, False), ("tf32", torch.float32, True)]
    return kinds


def _bandwidth(device: str) -> float:
    """Measure a copy in memory. Return the bytes read and written per second."""
    size = DEVICE_TYPES[device].copy_bytes
    if is_gpu(device):
        free, _ = torch.cuda.mem_get_info()
        size = min(size, free // 4)
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    seconds = _median_s(device, lambda: target.copy_(source))
    return 2.0 * float(source.numel()) * 4 / seconds


def _matrix_rate(device: str, dtype: Any, rows: int) -> float:
    # random numbers, because products of zeros would draw less power
    left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2.0 * float(rows) ** 3 / _median_s(device, lambda: torch.mm(left, right, out=out))


def _median_s(device: str, call: Callable[[], Any]) -> float:
    for _ in range(WARMUP):
        call()
    if not is_gpu(device):
        return statistics.median(sampled(lambda: wall_ns(call), MAX_SAMPLES, BUDGET_S)) / 1e9
    torch.cuda.synchronize()
    return statistics.median(sampled(lambda: elapsed_ms(call), MAX_SAMPLES, BUDGET_S)) / 1e3
