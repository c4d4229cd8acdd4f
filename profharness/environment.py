"""The NVIDIA driver and GPU as NVML sees them, without torch, the extras that are installed, and
the variables that are recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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


def gpu_present() -> bool:
    """Whether there is an NVIDIA GPU."""
    with _opened_nvml() as nvml:
        return nvml is not None and int(nvml.nvmlDeviceGetCount()) > 0


def gpu_name() -> str | None:
    """The first GPU's name as CUDA gives it; None without one."""
    with _opened_nvml() as nvml:
        if nvml is None:
            return None
        try:
            return _text(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)))
        except nvml.NVMLError:  # there is no GPU, or it is lost
            return None


def _text(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer


# The variables that change dispatch or speed; no others are recorded.
RELEVANT_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
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
