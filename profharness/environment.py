"""What the machine and its software are, as far as they decide which kernels run or how fast.

`collect()` imports torch and belongs in the worker; nothing here records a host, a user, a path or
a command line.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from typing import Any


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


def driver_version() -> str | None:
    """The NVIDIA driver's version; None without a driver."""
    with _opened_nvml() as nvml:
        return None if nvml is None else _text(nvml.nvmlSystemGetDriverVersion())


def gpu_present() -> bool:
    """Whether there is an NVIDIA GPU."""
    with _opened_nvml() as nvml:
        return nvml is not None and int(nvml.nvmlDeviceGetCount()) > 0


def gpu_name() -> str | None:
    """The first GPU's name, which is what CUDA calls it too; None without one, or if it cannot be
    told.
    """
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
    "TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED",
    "TORCH_CUDNN_SDPA_PREFERRED",
)


def collect(device_type: str) -> dict[str, Any]:
    """The environment as flat keys and JSON values; device_type is `cuda` or `cpu`.

    On CUDA one tiny SDPA choice is asked first: torch fills its priority order at the first
    dispatch only.
    """
    import torch

    from profharness import __version__

    keys: dict[str, Any] = {
        "profharness": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "torch_cuda": torch.version.cuda,
        "num_threads": torch.get_num_threads(),
        "device_type": device_type,
        "triton": _version("triton"),
        "env": {name: os.environ[name] for name in RELEVANT_VARIABLES if name in os.environ},
    }
    if device_type == "cuda":
        keys |= _cuda(torch)
    return keys | _flags(torch)


def cpu_name() -> str:
    """The processor's model name, from /proc/cpuinfo where there is one."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def default_device(torch: Any) -> str:
    """`cuda` if torch sees a usable GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _cuda(torch: Any) -> dict[str, Any]:
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    probe = torch.empty(1, 1, 8, 64, device="cuda", dtype=torch.float16)
    torch._fused_sdp_choice(probe, probe, probe)
    return {
        "gpu": device.name,
        "capability": f"{device.major}.{device.minor}",
        "num_sms": device.multi_processor_count,
        "gpu_memory_bytes": device.total_memory,
        "l2_bytes": getattr(device, "L2_cache_size", None),
        "cudnn": torch.backends.cudnn.version(),
        **({"driver": driver} if (driver := driver_version()) is not None else {}),
    }


def _flags(torch: Any) -> dict[str, Any]:
    cuda = torch.backends.cuda
    return {
        "sdp_flash": cuda.flash_sdp_enabled(),
        "sdp_efficient": cuda.mem_efficient_sdp_enabled(),
        "sdp_math": cuda.math_sdp_enabled(),
        "sdp_cudnn": cuda.cudnn_sdp_enabled(),
        "priority_order": priority_order(),
        "flash_attention_impl": _flash_impl(),
        "fp16_reduction_math": cuda.fp16_bf16_reduction_math_sdp_allowed(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.get_float32_matmul_precision() != "highest",
    }


def priority_order() -> list[str] | None:
    """The backends in the order in which PyTorch tries them; None where it cannot tell. It is filled
    at the first dispatch.
    """
    import torch

    order = getattr(torch._C, "_get_sdp_priority_order", None)
    return [backend_name(number) for number in order()] if order else None


def backend_name(number: int) -> str:
    """The name of an SDPBackend's number, as `_fused_sdp_choice` and the priority order give it."""
    names = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
    return names.get(int(number), f"sdp{number}")


def _flash_impl() -> str | None:
    try:
        import torch.nn.attention as attention
    except ImportError:
        return None
    current = getattr(attention, "current_flash_attention_impl", None)
    return str(current()) if current is not None and current() is not None else None


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
