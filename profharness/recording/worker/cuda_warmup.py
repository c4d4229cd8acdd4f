"""Start NVML and CUDA while torch loads, as they take as long as some cells."""

from __future__ import annotations

import ctypes
import os
import threading
from importlib.util import find_spec
from pathlib import Path

from profharness.recording.worker.gpu_watch import GpuWatch, open_watch

MODULE_LOADING = "CUDA_MODULE_LOADING"


class CudaWarmup:
    """A thread that opens the GPU watch and then the context of device 0, which torch reuses.

    Without a driver it does nothing; torch then reports the reason.
    """

    def __init__(self) -> None:
        self._watch: GpuWatch | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def watch(self) -> GpuWatch | None:
        """Wait for the thread and return the watch, or None without NVML."""
        self._thread.join()
        return self._watch

    def _run(self) -> None:
        # The watch must be created before this process has a context.
        self._watch = open_watch()
        if torch_has_cuda():
            open_context()


def torch_has_cuda() -> bool:
    """Return whether the torch of this Python is built for CUDA, without loading it."""
    spec = find_spec("torch")
    places = (spec and spec.submodule_search_locations) or ()
    return any((Path(place) / "lib" / "libtorch_cuda.so").exists() for place in places)


def open_context() -> bool:
    """Create the context of device 0 that torch will use. Return False if that fails."""
    if MODULE_LOADING not in os.environ:
        # Drivers before 12.2 need it, as torch sets it. os.environ stays unchanged because it is recorded.
        os.putenv(MODULE_LOADING, "LAZY")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        return bool(
            cuda.cuInit(0) == 0
            and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
            and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        )
    except (OSError, AttributeError):
        return False
