"""The start of NVML and of CUDA, which take as long as some cells, beside the loading of torch."""

from __future__ import annotations

import ctypes
import os
import threading
from importlib.util import find_spec
from pathlib import Path

from profharness.worker.gpu_watch import GpuWatch, open_watch

MODULE_LOADING = "CUDA_MODULE_LOADING"


class EarlyStart:
    """A thread that opens the watch and then the context of device 0, which torch finds made. Nothing
    comes of it without a driver; torch then says why.
    """

    def __init__(self) -> None:
        self._watch: GpuWatch | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def watch(self) -> GpuWatch | None:
        """The watch, once all is open; None without NVML."""
        self._thread.join()
        return self._watch

    def _run(self) -> None:
        # the watch has to be made before this process has a context
        self._watch = open_watch()
        if torch_has_cuda():
            open_context()


def torch_has_cuda() -> bool:
    """Whether the torch of this Python is built for CUDA, found out without loading it."""
    spec = find_spec("torch")
    places = (spec and spec.submodule_search_locations) or ()
    return any((Path(place) / "lib" / "libtorch_cuda.so").exists() for place in places)


def open_context() -> bool:
    """Make the context that torch will use of device 0; False where that cannot be."""
    if MODULE_LOADING not in os.environ:
        # as torch does it, which drivers before 12.2 need; not in os.environ, which is recorded
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
