"""Read the properties of a call from torch without a profiler: tensors, flags and the backend."""

from __future__ import annotations

import platform
from typing import Any

import torch

C: Any = torch._C
PLAIN = (torch.Tensor, torch.nn.Parameter)
CHOICES = {-1: "none", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
# The C++ name of an autograd node identifies the kernel.
NODES = {
    "ScaledDotProductFlashAttentionBackward": "flash",
    "ScaledDotProductFlashAttentionForCpuBackward": "flash",
    "ScaledDotProductEfficientAttentionBackward": "efficient",
    "ScaledDotProductCudnnAttentionBackward": "cudnn",
    "ScaledDotProductFusedAttentionOverrideableBackward": "overrideable",
}
SWITCHES = {
    "flash": "_get_flash_sdp_enabled",
    "efficient": "_get_mem_efficient_sdp_enabled",
    "math": "_get_math_sdp_enabled",
    "cudnn": "_get_cudnn_sdp_enabled",
}
_switches = [(name, getattr(C, attr)) for name, attr in SWITCHES.items() if hasattr(C, attr)]
PRIORITY = getattr(C, "_get_sdp_priority_order", None)  # from torch 2.6 on
MOST_BYTES = 64 << 20  # per tensor that is created to query the choice under autocast


def tensor(value: Any) -> dict[str, Any] | None:
    """Return dims, strides, dtype and device of a tensor. Return None for other objects. Dims are None
    if they are symbolic.
    """
    if not isinstance(value, torch.Tensor):
        return None
    dims = list(value.shape)
    if not all(type(size) is int for size in dims):
        return {"dims": None, "dtype": str(value.dtype).removeprefix("torch.")}
    plain = value.layout == torch.strided and not value.is_nested
    return {
        "dims": dims,
        "strides": list(value.stride()) if plain else None,
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": value.device.type,
        "requires_grad": value.requires_grad,
        **({} if type(value) in PLAIN else {"class": type(value).__name__}),
    }


def flags() -> dict[str, Any]:
    """Return the enabled backends, their order, and the other flags that change the choice."""
    order = [CHOICES.get(int(number), str(number)) for number in PRIORITY()] if PRIORITY else None
    return {
        "enabled": {name: bool(enabled()) for name, enabled in _switches},
        "priority": order,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def autocast(device: str) -> str | None:
    """Return the autocast dtype of a device, or None if autocast is off or the device has none, such
    as `meta`.
    """
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def choice(inputs: list[Any], mask: Any, options: dict[str, Any]) -> str | None:
    """Return the backend that torch would select. Return None for tensors without data, and in modes
    where calling torch has side effects.
    """
    tensors, query = [*inputs, mask], inputs[0]
    if query.device.type == "meta" or any(type(item) not in PLAIN for item in inputs):
        return None
    if C._functorch.peek_interpreter_stack() is not None or C._len_torch_dispatch_stack():
        return None
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype == torch.float32:
        tensors = [_cast(item, torch.get_autocast_dtype(device)) for item in tensors]
        if tensors[0] is None:
            return None
    number = torch._fused_sdp_choice(
        *tensors,
        options["dropout"],
        options["causal"],
        scale=options["scale"],
        enable_gqa=options["gqa"],
    )
    return CHOICES.get(int(number), str(number))


def _cast(item: Any, dtype: Any) -> Any:
    """Return an uninitialized tensor with the same shape and strides in another dtype."""
    if item is None or item.dtype == torch.bool:
        return item
    if item.numel() * 2 > MOST_BYTES:
        return None
    return torch.empty_strided(item.shape, item.stride(), dtype=dtype, device=item.device)


def node(output: Any) -> str | None:
    """Return the name of an output's autograd node, without its number."""
    made = getattr(output, "grad_fn", None)
    return None if made is None else str(made.name()).rstrip("0123456789")


def ran(node_name: str | None, chosen: str | None) -> str | None:
    """Return the backend that computed a call: that of its autograd node, else torch's choice."""
    if node_name in NODES:
        return NODES[node_name]
    return chosen


def environment() -> dict[str, Any]:
    """Return the software and device of this process, with the keys of a run's environment."""
    keys: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "torch_cuda": torch.version.cuda,
        "num_threads": torch.get_num_threads(),
        "device_type": "cuda" if torch.cuda.is_initialized() else "cpu",
    }
    if torch.cuda.is_initialized():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        keys |= {
            "gpu": device.name,
            "capability": f"{device.major}.{device.minor}",
            "num_sms": device.multi_processor_count,
            "gpu_memory_bytes": device.total_memory,
            "cudnn": torch.backends.cudnn.version(),
        }
    return keys
