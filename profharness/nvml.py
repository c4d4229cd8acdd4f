"""What NVML tells of this machine, asked without torch; nothing where there is no NVIDIA driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """The pynvml module, initialised within the block; None without the package or a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str | None:
    """The driver's version; None without a driver."""
    with opened() as nvml:
        return None if nvml is None else _text(nvml.nvmlSystemGetDriverVersion())


def gpu_present() -> bool:
    """Whether there is an NVIDIA GPU."""
    with opened() as nvml:
        return nvml is not None and int(nvml.nvmlDeviceGetCount()) > 0


def gpu_name() -> str | None:
    """The first GPU's name, which is what CUDA calls it too; None without one, or if it cannot be
    told.
    """
    with opened() as nvml:
        if nvml is None:
            return None
        try:
            if not nvml.nvmlDeviceGetCount():
                return None
            return _text(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)))
        except nvml.NVMLError:
            return None


def _text(told: str | bytes) -> str:
    return told.decode() if isinstance(told, bytes) else str(told)
