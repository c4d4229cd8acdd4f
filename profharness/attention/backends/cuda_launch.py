"""Launch compiled CUDA kernels in torch's context and on its streams, through cuda.core."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profharness.attention.backends.base import ImplementationError

PORTABLE_CLUSTER = 8
"""The largest cluster size that every GPU with clusters supports, in blocks (CUDA C++ Programming
Guide).
"""
DEFAULT_SHARED_BYTES = 48 * 1024
"""The amount of dynamic shared memory, in bytes, that a kernel can use without opting in to more.
"""
Dim = int | tuple[int, ...]
# After one of these errors, every call in the same CUDA context fails.
_STICKY = (
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
)
_MAX_CONFIGS = 256
Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class CompiledSource:
    """A CUDA source that was compiled for one architecture."""

    cubin: bytes
    names: Mapping[str, str]
    """The mangled name of each C++ name expression."""
    arch: str
    nvrtc: str
    """The version of NVRTC that compiled the source, such as `13.0`."""
    from_cache: bool = False


class LaunchError(ImplementationError):
    """Raised if a kernel cannot be loaded or launched."""


class CudaKernel:
    """A kernel that is loaded on one device. `CudaSource.kernel` creates such objects."""

    def __init__(
        self, kernel: Any, name: str, device: int, shared_bytes: int, cluster: int
    ) -> None:
        import torch
        from cuda import core

        self.name = name
        self.device = device
        self.shared_bytes = shared_bytes
        self.cluster = cluster
        self._core = core
        self._kernel = kernel
        # The private function is used because it takes only 0.1 µs. The public function replaces it
        # if this version of torch does not have it.
        self._stream: Callable[[int], int] = getattr(
            torch._C,
            "_cuda_getCurrentRawStream",
            lambda device: torch.cuda.current_stream(device).cuda_stream,
        )
        self._converters: dict[tuple[type, ...], list[Convert]] = {}
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._streams: dict[int, Any] = {}
        attributes = kernel.attributes[device]
        self.registers: int = attributes.num_regs
        self.local_bytes: int = attributes.local_size_bytes
        self.static_shared_bytes: int = attributes.shared_size_bytes

    def launch(
        self,
        grid: Dim,
        block: Dim,
        *args: Any,
        cluster: Dim | None = None,
        cooperative: bool = False,
        overlap: bool = False,
    ) -> None:
        """Launch the kernel on torch's current stream, and return without waiting until the kernel
        ends.

        `grid` always counts blocks. If the kernel uses clusters, `grid` must be a multiple of the
        cluster. If `cooperative` is true, the driver refuses the launch unless all blocks fit on
        the device at the same time. If `overlap` is true, blocks may start before the previous
        kernel in the stream has ended, so the kernel must execute griddepcontrol.wait before it
        accesses memory.

        A tensor is passed as its pointer, None as a null pointer, bool and int as int32, float as
        float32, and a numpy scalar as its own type. Raise LaunchError if the kernel expects other
        arguments, or if the driver refuses the launch.
        """
        types = tuple(map(type, args))
        converters = self._converters.get(types) or self._learn(types, args)
        values = [convert(arg) for convert, arg in zip(converters, args, strict=True)]
        handle = self._stream(self.device)
        stream = self._streams.get(handle)
        if stream is None:
            wrap = self._core.Stream.from_handle
            stream = wrap(handle) if handle else self._core.LEGACY_DEFAULT_STREAM
            self._streams[handle] = stream
        shape = (grid, block, cluster, cooperative, overlap)
        try:
            try:
                self._core.launch(stream, self._config(*shape), self._kernel, *values)
            except Exception as error:
                if "CUDA_ERROR_INVALID_CONTEXT" not in str(error):
                    raise
                # The current thread has no CUDA context yet. It may be a thread of autograd.
                self._core.Device(self.device).set_current()
                self._core.launch(stream, self._config(*shape), self._kernel, *values)
        except Exception as error:  # cuda.core's exception types are private
            what = f"{self.name} with grid {grid}, block {block}, cluster {cluster or self.cluster}"
            raise LaunchError(f"{what}, {self.shared_bytes} B shared: {reason(error)}") from error

    def max_active_clusters(self, grid: Dim, block: Dim, cluster: Dim) -> int:
        """Return how many clusters of a launch with this grid, block and cluster fit on the device
        at once.
        """
        config = self._config(grid, block, cluster, False, False)
        stream = self._core.LEGACY_DEFAULT_STREAM
        return int(self._kernel.occupancy.max_active_clusters(config, stream=stream))

    def blocks_per_sm(self, block: Dim) -> int:
        """Return how many blocks of this size fit on one SM at once."""
        x, y, z = _three(block)
        occupancy = self._kernel.occupancy
        return int(occupancy.max_active_blocks_per_multiprocessor(x * y * z, self.shared_bytes))

    def _learn(self, types: tuple[type, ...], args: Sequence[Any]) -> list[Convert]:
        """Return functions that convert arguments of these types, and store them for later calls.
        Raise LaunchError if the kernel expects arguments of other sizes.
        """
        pairs = [converter(index, arg) for index, arg in enumerate(args)]
        given = [size for size, _ in pairs]
        try:
            sizes = [info.size for info in self._kernel.arguments_info]
        # a driver older than CUDA 12.4 does not report the sizes
        except (NotImplementedError, RuntimeError):
            sizes = given
        if sizes != given:
            raise LaunchError(
                f"{self.name} expects arguments of {sizes} bytes, but the call passes {given} bytes "
                f"({', '.join(kind.__name__ for kind in types)})"
            )
        self._converters[types] = [convert for _, convert in pairs]
        return self._converters[types]

    def _config(
        self, grid: Dim, block: Dim, cluster: Dim | None, cooperative: bool, overlap: bool
    ) -> Any:
        key = (grid, block, cluster, cooperative, overlap)
        config = self._configs.get(key)
        if config is None:
            # A program may use any number of grids, so the cache needs a limit.
            if len(self._configs) >= _MAX_CONFIGS:
                self._configs.clear()
            clusters = _three(self.cluster if cluster is None else cluster)
            config = self._configs[key] = self._core.LaunchConfig(
                grid=clusters_in(_three(grid), clusters),
                block=_three(block),
                cluster=clusters if clusters != (1, 1, 1) else None,
                shmem_size=self.shared_bytes,
                is_cooperative=cooperative,
                programmatic_stream_serialization=overlap,
            )
        return config


def load_kernel(
    compiled: CompiledSource, name: str, device: int, shared_bytes: int, cluster: int
) -> CudaKernel:
    """Load a kernel from a cubin on a device. If necessary, raise the kernel's limits for shared
    memory and cluster size.
    """
    import torch
    from cuda import core

    torch.cuda.init()
    what = f"{name} ({compiled.arch}, NVRTC {compiled.nvrtc})"
    try:
        core.Device(device).set_current()
        kernel = core.ObjectCode.from_cubin(compiled.cubin).get_kernel(compiled.names[name])
        if shared_bytes > DEFAULT_SHARED_BYTES:
            what = f"{name} with {shared_bytes} B of shared memory"
            _set_attribute(kernel, device, "MAX_DYNAMIC_SHARED_SIZE_BYTES", shared_bytes)
        if cluster > PORTABLE_CLUSTER:
            what = f"{name} with clusters of {cluster}"
            _set_attribute(kernel, device, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        return CudaKernel(kernel, name, device, shared_bytes, cluster)
    except Exception as error:  # cuda.core's exception types are private
        raise LaunchError(f"{what}: {reason(error)}") from error


def _set_attribute(kernel: Any, device: int, name: str, value: int) -> None:
    """Set an attribute through the driver, because cuda.core 1.2 can only read attributes."""
    from cuda.bindings import driver

    attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    handle = driver.CUkernel(int(kernel.handle))
    (code,) = driver.cuKernelSetAttribute(attribute, value, handle, driver.CUdevice(device))
    if code != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(code.name)


def reason(error: Exception) -> str:
    """Return the message of an exception from cuda.core. If the error makes the CUDA context
    unusable, the message is prefixed with `CUDA error`.
    """
    text = str(error)
    return f"CUDA error: {text}" if any(name in text for name in _STICKY) else text


def clusters_in(grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> tuple[int, int, int]:
    """Convert a grid size from blocks to clusters. Raise LaunchError if the grid is not a multiple
    of the cluster.
    """
    if any(blocks % size for blocks, size in zip(grid, cluster, strict=True)):
        raise LaunchError(f"grid {grid} is not a multiple of the cluster {cluster}")
    x, y, z = (blocks // size for blocks, size in zip(grid, cluster, strict=True))
    return x, y, z


def _three(dim: Dim) -> tuple[int, int, int]:
    x, y, z = (*((dim,) if isinstance(dim, int) else dim), 1, 1, 1)[:3]
    return int(x), int(y), int(z)


def converter(index: int, arg: Any) -> tuple[int, Convert]:
    """Return the size of a kernel argument in bytes, and a function that converts such arguments
    for cuda.core.

    Raise LaunchError if a kernel cannot take arguments of this type. The returned function raises
    LaunchError if a number does not fit.
    """
    import numpy as np

    if arg is None:
        return ctypes.sizeof(ctypes.c_void_p), lambda _: 0
    if hasattr(arg, "data_ptr"):
        return ctypes.sizeof(ctypes.c_void_p), operator.methodcaller("data_ptr")
    # Check numpy types first, because numpy.float64 is a float but must be passed as a double.
    if isinstance(arg, np.generic):
        return arg.itemsize, lambda scalar: scalar
    if isinstance(arg, bool | int):
        return ctypes.sizeof(ctypes.c_int), functools.partial(_int32, index)
    if isinstance(arg, float):
        return ctypes.sizeof(ctypes.c_float), functools.partial(_float32, index)
    raise LaunchError(
        f"argument {index} is a {type(arg).__name__}; kernels accept tensors, bool, int, float, "
        "numpy scalars and None"
    )


def _int32(index: int, value: int) -> ctypes.c_int:
    if not -(2**31) <= value < 2**31:
        raise LaunchError(
            f"argument {index} ({value}) does not fit in an int32; pass it as numpy.int64"
        )
    return ctypes.c_int(value)


def _float32(index: int, value: float) -> ctypes.c_float:
    converted = ctypes.c_float(value)
    if math.isinf(converted.value) and not math.isinf(value):
        raise LaunchError(
            f"argument {index} ({value}) does not fit in a float32; pass it as numpy.float64"
        )
    return converted
