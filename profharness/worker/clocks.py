"""Clocks, power, temperature and throttle reasons through NVML: read, never set."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from statistics import median
from typing import Any

PERIOD_S = 0.05
KEPT = 4096  # readings, more than three minutes
FIRST_S = 5.0  # NVML's first answer can be this late

Questions = dict[str, Callable[[], Any]]


class ClockReader:
    """The GPU that torch's device 0 is, read by a thread of its own every PERIOD_S: NVML can take
    milliseconds an answer. Every value is left out where NVML will not say. open_questions gives
    what is asked, by name; it runs in the thread.
    """

    def __init__(self, open_questions: Callable[[], Questions] | None = None) -> None:
        self._latest: dict[str, Any] = {}
        # each with the moments between which it was asked for and answered
        self._kept: deque[tuple[float, float, dict[str, Any]]] = deque(maxlen=KEPT)
        self._begun = threading.Event()
        ask = open_questions or _questions
        threading.Thread(target=self._run, args=(ask,), daemon=True).start()

    def __call__(self) -> dict[str, Any]:
        """The last reading: sm_mhz, memory_mhz, power_w, temperature_c, throttle_reasons (a bit
        mask of NVML's).
        """
        return self._latest

    def between(self, begin: float, end: float) -> list[dict[str, Any]]:
        """The readings under way at some time between two moments of `time.perf_counter`."""
        return [
            reading
            for asked, answered, reading in tuple(self._kept)
            if asked <= end and begin <= answered
        ]

    def nearest(self, begin: float, end: float) -> list[dict[str, Any]]:
        """The one reading that is nearest to a time too short to have one of its own; waits for
        the first reading of all. Empty where there is no NVML.
        """
        self._begun.wait(FIRST_S)
        kept = tuple(self._kept)
        if not kept:
            return []
        return [min(kept, key=lambda item: max(begin - item[1], item[0] - end, 0.0))[2]]

    def _run(self, open_questions: Callable[[], Questions]) -> None:
        try:
            questions = open_questions()
        except Exception:
            self._begun.set()
            return  # no NVML, no clocks: the cells go without
        while True:
            asked = time.perf_counter()
            found = _ask(questions)
            if found:
                self._latest = found
                self._kept.append((asked, time.perf_counter(), found))
            self._begun.set()
            time.sleep(PERIOD_S)


def over_time(readings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Many readings as one: the median of each value, with `_min` and `_max` beside it, and every
    throttle reason that was ever set; nothing of none.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for reading in readings for name in reading):
        values = [reading[name] for reading in readings if name in reading]
        if name == "throttle_reasons":
            found[name] = reduce(or_, values)
        else:
            found |= {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return found | {"readings": len(readings)} if found else {}


def _questions() -> Questions:
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


def _ask(questions: Questions) -> dict[str, Any]:
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
