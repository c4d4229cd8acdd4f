"""Clocks, power, temperature and throttle reasons through NVML: read, never set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

PERIOD_S = 0.05


class ClockReader:
    """The GPU that torch's device 0 is, read by a thread of its own every PERIOD_S: NVML can take
    milliseconds an answer. Every value is left out where NVML will not say.
    """

    def __init__(self) -> None:
        self._latest: dict[str, Any] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self) -> dict[str, Any]:
        """The last reading: sm_mhz, memory_mhz, power_w, temperature_c, throttle_reasons (a bit
        mask of NVML's).
        """
        return self._latest

    def _run(self) -> None:
        try:
            questions = _questions()
        except Exception:
            return  # no NVML, no clocks: the cells go without
        while True:
            self._latest = _ask(questions)
            time.sleep(PERIOD_S)


def _questions() -> dict[str, Callable[[], Any]]:
    import pynvml as nvml
    import torch

    nvml.nvmlInit()
    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    handle = _by_uuid(nvml, uuid) or nvml.nvmlDeviceGetHandleByIndex(0)
    return {
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }


def _ask(questions: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, question in questions.items():
        try:
            found[name] = question()
        except Exception:
            continue
    return found


def _by_uuid(nvml: Any, uuid: str) -> Any:
    if not uuid:
        return None
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}".encode())
    except nvml.NVMLError:
        return None
