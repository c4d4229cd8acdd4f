"""Read the properties of a call from torch without a profiler: tensors, flags, the backend, and what
a mask contains (nothing, causal, key padding, a window, a bias, or other).
"""

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
CAST_BYTES = 64 << 20  # maximum size of a tensor created to query the choice under autocast
MASK_BYTES = 16 << 20  # maximum size of a mask whose contents are read


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
    if item.numel() * 2 > CAST_BYTES:
        return None
    return torch.empty_strided(item.shape, item.stride(), dtype=dtype, device=item.device)


def node(output: Any) -> str | None:
    """Return the name of an output's autograd node, without its number."""
    made = getattr(output, "grad_fn", None)
    return None if made is None else str(made.name()).rstrip("0123456789")


def ran(node_name: str | None, chosen: str | None) -> str | None:
    """Return the backend that computed a call.

    The autograd node identifies the backend. Otherwise, return the backend that torch would select.
    """
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


def mask_contents(mask: Any) -> dict[str, Any] | None:
    """Return the class of a mask and its properties. Return None for a mask that is too large or must
    not be read now.
    """
    if type(mask) not in (torch.Tensor, torch.nn.Parameter) or mask.device.type == "meta":
        return None
    if mask.numel() == 0 or not 2 <= mask.dim() <= 4 or _busy():
        return None
    size = 1
    for length, stride in zip(mask.shape, mask.stride(), strict=True):
        size *= length if stride else 1
    if size * mask.element_size() > MASK_BYTES:
        return None
    # Read broadcast dims only once.
    distinct = mask.detach()[
        tuple(slice(0, 1) if s == 0 else slice(None) for s in mask.stride()[:-2])
    ]
    if distinct.numel() * mask.element_size() > MASK_BYTES:
        return None
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return None
    with torch.no_grad():
        return _classify(distinct.to("cpu"))


def block_mask(mask: Any) -> dict[str, Any]:
    """Return the properties of a block mask of flex_attention, whose function defines its contents."""
    if mask is None:
        return {"contents": "none"}
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if type(mask.kv_num_blocks) is not torch.Tensor or _busy() or capturing:
        return {"contents": "block_mask"}
    with torch.no_grad():
        return {"contents": "block_mask", "masked": float(mask.sparsity()) / 100}


def _busy() -> bool:
    """Return whether a dispatch mode, a function transform or a profiler would record our ops."""
    functorch = getattr(torch._C, "_functorch", None)
    return bool(
        torch._C._len_torch_dispatch_stack()
        or (functorch is not None and functorch.peek_interpreter_stack() is not None)
        or torch.autograd._profiler_enabled()
    )


def _classify(mask: Any) -> dict[str, Any]:
    rows, columns = mask.shape[-2:]
    if mask.dtype == torch.bool:
        kept = mask
    else:
        values = mask.float()
        lowest = torch.finfo(mask.dtype).min / 2
        kept = values > lowest
        if bool((values[kept] != 0).any()):
            return {"contents": "bias", "masked": _share(kept)}
    masked = _share(kept)
    if masked == 0.0:
        return {"contents": "nothing", "masked": masked}
    flat = kept.reshape(-1, rows, columns)
    if rows > 1:
        lower = torch.ones(rows, columns, dtype=torch.bool)
        for name, offset in (("causal", 0), ("causal_lower_right", columns - rows)):
            if bool((flat == lower.tril(offset)).all()):
                return {"contents": name, "masked": masked}
    if bool((flat == flat[:, :1]).all()):
        return {"contents": "key_padding", "masked": masked}
    if rows == columns:
        padding = flat.any(dim=1, keepdim=True)
        if bool((flat == (padding & lower.tril())).all()):
            return {"contents": "causal_and_key_padding", "masked": masked}
    window = _window(flat, columns - rows)
    if window is not None:
        return {"contents": "window", "masked": masked, "window": window}
    return {"contents": "other", "masked": masked}


def _share(kept: Any) -> float:
    return 1.0 - float(kept.float().mean())


def _window(flat: Any, offset: int) -> list[int] | None:
    """Return how far a band extends to the left and right of the diagonal, or None if it is not a band."""
    rows, columns = flat.shape[-2:]
    distance = torch.arange(columns)[None, :] - torch.arange(rows)[:, None] - offset
    inside = distance[flat[0]]
    if inside.numel() == 0:
        return None
    left, right = int(inside.min()), int(inside.max())
    band = (distance >= left) & (distance <= right)
    return [-left, right] if bool((flat == band).all()) else None
