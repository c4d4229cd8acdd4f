"""Detect impossible times, from a manipulated clock or from work that was not done."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from profharness.attention.costs import flops, tensor_bytes
from profharness.devices import Peaks
from profharness.rows import COLD, HOST
from profharness.run import Cell

# No number format is faster by more: fp4 against fp16 that is added up in fp32, on a GeForce.
FASTEST_FORMAT = 8
# Data sheets round, and memory may be compressed.
MEMORY_MARGIN = 2


def with_doubt(result: Cell, peaks: Peaks | None) -> Cell:
    """Return the result as an error without samples if a time in it is impossible."""
    for name, samples in result.samples.items():
        why = why_impossible(result, name, samples, peaks) if samples else None
        if why is not None:
            message = f"impossible {name} times: {why}; the call did not do its work, or the clock is wrong"
            return replace(result, status="error", message=message, samples={}, turns={})
    return result


def why_impossible(cell: Cell, name: str, samples: list[int], peaks: Peaks | None) -> str | None:
    """Return why the samples of a measurement, in ns per call, are impossible, or None."""
    if min(samples) <= 0:
        return f"{min(samples)} ns a call"
    if name == HOST or peaks is None:
        return None
    seconds = median(samples) / 1e9
    rate = FASTEST_FORMAT * max(peaks.flops_per_s.values(), default=0.0)
    if rate and (done := flops(cell.config) / seconds) > rate:
        return (
            f"{done / 1e12:,.0f} TFLOP/s, where tensor cores reach {rate / 1e12:,.0f} in any format"
        )
    tensors = tensor_bytes(cell.config)
    # The output and unflushed inputs may stay in the L2.
    cached = 0 if name == COLD else peaks.l2_bytes
    width = MEMORY_MARGIN * (peaks.bandwidth_bytes_per_s or 0.0)
    if width and cached is not None:
        read = (tensors.forward - tensors.output - cached) / seconds
        if read > width:
            return f"{read / 1e12:,.1f} TB/s from memory, which has {width / MEMORY_MARGIN / 1e12:,.1f}"
    return None
