"""Collect the software versions and the device of a worker.

The host name, user name, paths and command line are not collected, because runs may be published.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention

import profharness
from profharness.device_types import CPU, CUDA, is_gpu
from profharness.environment import (
    MIG,
    RELEVANT_VARIABLES,
    VISIBLE,
    amd_driver_version,
    driver_version,
    hashed_key,
    operating_system,
    processor,
    rocm_libraries,
    visible_gpus,
)


def collect(device_type: str) -> dict[str, Any]:
    """Return the environment as a dict of JSON values. `device_type` is `cuda` or `cpu`.

    On CUDA, this also makes PyTorch choose an SDPA backend once, because PyTorch sets its priority
    order only at the first choice.
    """
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    keys: dict[str, Any] = {
        "profharness": profharness.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **operating_system(),
        **processor(),
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "torch_cuda": torch.version.cuda,
        "num_threads": torch.get_num_threads(),
        "device_type": device_type,
        "triton": triton,
        "env": {name: os.environ[name] for name in RELEVANT_VARIABLES if name in os.environ},
    }
    if is_gpu(device_type):
        keys |= _cuda()
    return keys | _flags()


def default_device() -> str:
    return CUDA if torch.cuda.is_available() else CPU


def gpu_uuid() -> str:
    """Return the UUID of the GPU in use in NVML's format, or an empty string if it is unknown.

    A run records only a hash of the UUID.
    """
    named = os.environ.get(VISIBLE, "")
    if named.startswith(MIG):  # torch reports a MIG instance's UUID in another format
        return named.partition(",")[0].strip()
    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    if uuid:
        return f"GPU-{uuid.removeprefix('GPU-')}"
    return next((gpu.uuid for gpu in visible_gpus()), "")  # torch before 2.4 reports no UUID


def _cuda() -> dict[str, Any]:
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    probe = torch.empty(1, 1, 8, 64, device=CUDA, dtype=torch.float16)
    torch._fused_sdp_choice(probe, probe, probe)
    return {
        "gpu": device.name,
        "capability": f"{device.major}.{device.minor}",
        "num_sms": device.multi_processor_count,
        "gpu_memory_bytes": device.total_memory,
        "l2_bytes": getattr(device, "L2_cache_size", None),
        "cudnn": torch.backends.cudnn.version(),
        **({"gpu_key": hashed_key(uuid)} if (uuid := gpu_uuid()) else {}),
        **({"driver": driver} if (driver := driver_version()) is not None else {}),
        **(_rocm(device) if torch.version.hip else {}),
    }


def _rocm(device: Any) -> dict[str, Any]:
    """Return the versions of a ROCm build of torch, and the architecture of the GPU, such as gfx942."""
    driver = amd_driver_version()
    return {
        "torch_hip": torch.version.hip,
        "architecture": str(getattr(device, "gcnArchName", "")).partition(":")[0] or None,
        **({"driver": driver} if driver else {}),
        **rocm_libraries(Path(torch.__file__).parent / "lib"),
    }


def _flags() -> dict[str, Any]:
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
    """Return the SDPA backends in the order in which PyTorch tries them, or None if it is unknown.

    The order is only valid after PyTorch has chosen a backend once in this process.
    """
    order = getattr(torch._C, "_get_sdp_priority_order", None)
    return [backend_name(number) for number in order()] if order else None


def set_deterministic(wanted: bool) -> None:
    """Turn deterministic algorithms on or off.

    Call torch's function only to change the mode, because the function imports torch's compiler,
    which takes as long as importing torch.
    """
    if torch.are_deterministic_algorithms_enabled() != wanted:
        torch.use_deterministic_algorithms(wanted)


def backend_name(number: int) -> str:
    """Return the name of the backend with this number in torch's enum SDPBackend."""
    names = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
    return names.get(int(number), f"sdp{number}")


def _flash_impl() -> str | None:
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return str(current()) if current is not None and current() is not None else None
