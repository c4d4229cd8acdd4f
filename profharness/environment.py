"""The NVIDIA driver and GPU as NVML sees them, without torch, the extras that are installed, and
the variables that are recorded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import metadata
from importlib.util import find_spec
from typing import Any

CHANGED = ", changed"  # behind the commit of a work tree whose file is not as committed


@dataclass(frozen=True)
class Extra:
    """Optional packages of pyproject.toml. modules: name to import -> name to install."""

    modules: dict[str, str]
    purpose: str


EXTRAS = {
    "kernels": Extra(
        {"cuda.bindings": "cuda-bindings", "cuda.core": "cuda-core", "triton": "triton"},
        "backends in CUDA and Triton",
    ),
    "mcp": Extra({"mcp": "mcp"}, "`profharness mcp`"),
    "ncu": Extra({"ncu_report": "ncu-report"}, "reading reports of Nsight Compute"),
    "report": Extra(
        {"altair": "altair", "vl_convert": "vl-convert-python"}, "charts in HTML and Markdown"
    ),
    "cluster": Extra(
        {"distributed": "distributed", "cryptography": "cryptography"},
        "lanes of many hosts through Dask",
    ),
    "web": Extra({"datasette": "datasette"}, "`profharness serve`"),
}


def lacking(extra: str) -> list[str]:
    """The packages of an extra that are not installed. None of them is imported whole."""
    return [package for name, package in EXTRAS[extra].modules.items() if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # its package is missing, or hidden
        return False


def installed_versions(extra: str) -> str:
    """`altair 6.3.0, vl-convert-python 1.9.0`: what is installed of an extra."""
    versions = []
    for package in EXTRAS[extra].modules.values():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return ", ".join(versions)


@contextlib.contextmanager
def _opened_nvml() -> Iterator[Any]:
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


def hashed_key(text: str) -> str:
    """Stands for a host's name or a GPU's UUID where neither is to be kept."""
    return blake2b(
        text.lower().encode(errors="replace"), digest_size=6, person=b"profharness"
    ).hexdigest()


def driver_version() -> str | None:
    """The NVIDIA driver's version; None without a driver."""
    with _opened_nvml() as nvml:
        return None if nvml is None else _text(nvml.nvmlSystemGetDriverVersion())


VISIBLE = "CUDA_VISIBLE_DEVICES"
MIG = "MIG-"  # begins the UUID of an instance


@dataclass(frozen=True)
class VisibleGpu:
    """One GPU, or MIG instance, that CUDA shows to this process. bus is its PCI address as sysfs has it."""

    uuid: str
    name: str
    memory_bytes: int
    bus: str

    @property
    def key(self) -> str:
        """What is recorded of the UUID: the same for the same GPU, and not the UUID."""
        return hashed_key(self.uuid)


def visible_gpus() -> tuple[VisibleGpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, else in that of their PCI addresses.
    The MIG instances of a GPU stand in its place.
    """
    with _opened_nvml() as nvml:
        if nvml is None:
            return ()
        gpus: list[list[VisibleGpu]] = []
        with contextlib.suppress(nvml.NVMLError):
            gpus = [[] for _ in range(nvml.nvmlDeviceGetCount())]
        for index in range(len(gpus)):
            # one that is lost is left out, and the others keep their numbers
            with contextlib.suppress(nvml.NVMLError):
                gpus[index] = _instances(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        return _chosen(gpus)


def _instances(nvml: Any, handle: Any) -> list[VisibleGpu]:
    """A GPU, then its MIG instances."""
    parts = [handle]
    with contextlib.suppress(Exception):  # no MIG on this GPU or driver
        if nvml.nvmlDeviceGetMigMode(handle)[0]:
            for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with contextlib.suppress(nvml.NVMLError):  # a place without an instance
                    parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    bus = ""
    with contextlib.suppress(Exception):
        # sysfs writes four digits of the domain where NVML writes eight
        bus = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]
    return [
        VisibleGpu(
            _text(nvml.nvmlDeviceGetUUID(part)),
            _text(nvml.nvmlDeviceGetName(part)),
            int(nvml.nvmlDeviceGetMemoryInfo(part).total),
            bus,
        )
        for part in parts
    ]


def _chosen(gpus: Sequence[Sequence[VisibleGpu]]) -> tuple[VisibleGpu, ...]:
    """What CUDA_VISIBLE_DEVICES names, by index or by how a UUID begins; a name that fits nothing
    ends the list, as in CUDA.
    """
    # a GPU that is parted computes by its instances alone
    whole = [gpu[1:] or gpu for gpu in gpus]
    names = os.environ.get(VISIBLE)
    if names is None:
        return tuple(each for gpu in whole for each in gpu)
    chosen: list[VisibleGpu] = []
    for name in (name.strip() for name in names.split(",")):
        if name.isdigit():
            fitting = list(whole[int(name)][:1]) if int(name) < len(whole) else []
        else:
            every = [each for gpu in gpus for each in gpu] if name else []
            fitting = [each for each in every if each.uuid.startswith(name)]
        if len(fitting) != 1:
            break
        chosen += fitting
    return tuple(chosen)


def gpu_handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of the GPU with that UUID, of a MIG instance its whole GPU's. Raises NVMLError."""
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    if uuid.startswith(MIG):
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return handle


def gpu_present() -> bool:
    """Whether there is an NVIDIA GPU for this process."""
    return bool(visible_gpus())


def gpu_name() -> str | None:
    """The name of the first GPU for this process as CUDA gives it; None without one."""
    return next((gpu.name for gpu in visible_gpus()), None)


def _text(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer


# The variables that change dispatch or speed; no others are recorded. Not CUDA_VISIBLE_DEVICES: which
# GPU it was stands in `gpu_key`.
RELEVANT_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "DISABLE_ADDMM_CUDA_LT",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_SDPA_AVOID_RECOMPILE",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "TORCH_CUDNN_SDPA_ENABLED",
    "TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED",
    "TORCH_CUDNN_SDPA_PREFERRED",
)
