"""The types of devices on which PyTorch computes.

To support the GPUs of another vendor, add a row to DEVICE_TYPES.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

CUDA = "cuda"
CPU = "cpu"


class DeviceType(NamedTuple):
    """A type of torch.device, and the constants that depend on it."""

    name: str
    is_gpu: bool
    default_dtype: str
    """Dtype of a config that does not name a dtype."""
    flops_per_s: float
    """Typical rate of a call, used to estimate the duration of a cell."""
    bytes_per_s: float
    """Typical bandwidth of a call, used to estimate the duration of a cell."""
    copy_bytes: int
    """Size of the copy that measures the bandwidth, much larger than any last-level cache."""
    product_rows: tuple[int, ...]
    """Sizes of the square matrices whose products are timed to measure the matrix rates.

    The highest measured rate is used.
    """


DEVICE_TYPES = {
    row.name: row
    for row in (
        DeviceType(CUDA, True, "fp16", 1e14, 1e12, 1 << 30, (4096, 8192)),
        DeviceType(CPU, False, "fp32", 2e10, 5e9, 64 << 20, (512,)),
    )
}


def is_gpu(device_type: object) -> bool:
    """Return whether a type of torch.device is a GPU. Return False for an unknown type."""
    row = DEVICE_TYPES.get(str(device_type))
    return row is not None and row.is_gpu


def on_gpu(environment: Mapping[str, Any]) -> bool:
    """Return whether an environment was recorded on a GPU."""
    return is_gpu(environment.get("device_type"))


def device_name(environment: Mapping[str, Any]) -> str | None:
    """Return the name of the GPU or CPU on which an environment was recorded.

    Return None if the name is unknown.
    """
    name = environment.get("gpu") or (None if on_gpu(environment) else environment.get("cpu"))
    return str(name) if name else None
