"""Clocks, power, temperature and throttle reasons through NVML: read, never set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ClockReader:
    """Reads the GPU that torch's device 0 is; every value is left out where NVML will not say."""

    def __init__(self) -> None:
        self._handle: Any = None
        try:
            import pynvml
            import torch

            pynvml.nvmlInit()
            uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
            self._handle = _by_uuid(pynvml, uuid) or pynvml.nvmlDeviceGetHandleByIndex(0)
            self._nvml = pynvml
        except Exception:
            self._handle = None

    def __call__(self) -> dict[str, Any]:
        """sm_mhz, memory_mhz, power_w, temperature_c, throttle_reasons (a bit mask of NVML's)."""
        if self._handle is None:
            return {}
        nvml, handle = self._nvml, self._handle
        asked: dict[str, Callable[[], Any]] = {
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }
        found: dict[str, Any] = {}
        for name, ask in asked.items():
            try:
                found[name] = ask()
            except nvml.NVMLError:
                continue
        return found


def _by_uuid(nvml: Any, uuid: str) -> Any:
    if not uuid:
        return None
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}".encode())
    except nvml.NVMLError:
        return None
