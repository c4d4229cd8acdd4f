"""FlashAttention-2 in Triton, with a forward and a backward pass.

It supports head_dim up to 256, and fp16, bf16 and true fp32. Triton's autotuner selects the tiles.
naive.py describes the interface. The kernels are in _flash_triton_kernels.py, and the possible
tiles are in _flash_triton_tiles.py.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from profharness.attention.config import Config

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LOG2_E = 1.4426950408889634

try:
    import _flash_triton_kernels as kernels
    import _flash_triton_tiles as tiles
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("triton"):
        raise
    triton = None

NO_TRITON = (
    "needs Triton 3.4 or newer, which is part of PyTorch's CUDA wheels since 2.8, but not of its CPU "
    "wheels (pip install triton)"
)
_chosen: dict[str, object] = {}
_forced: dict[str, Any] = {}


def supports(config: Config) -> str | None:
    """Return the reason why a config is not supported, or None if it is supported."""
    if triton is None:
        return NO_TRITON
    if config.mask != "none":
        return f"does not support an attention mask (mask={config.mask}), only causal"
    if config.dropout:
        return "does not support dropout"
    if config.value_dim != config.head_dim:
        return "requires the same head_dim for query, key and value"
    if config.head_dim > MAX_HEAD_DIM:
        return f"supports head_dim up to {MAX_HEAD_DIM}"
    return None


def tuning() -> dict[str, object] | None:
    """Return the tiles that the last call used, or None before the first call.

    The keys are `forward` and, after a backward pass, `backward_kv` and `backward_q`. Each value
    contains BLOCK_M, BLOCK_N, num_warps, num_stages and the variant (`pointers` or `tma`).
    """
    return dict(_chosen) or None


def force(name: str, tile: Any) -> None:
    """Use a given triton.Config for a pass (`forward`, `backward_kv` or `backward_q`) from now on.

    If `tile` is None, use the autotuner again. Scripts call this function to measure each config.
    """
    _forced[name] = tile


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the attention output [B, Hq, Sq, D] in the dtype of q. It can be differentiated once.

    Raise ValueError if the numbers of heads do not match, and NotImplementedError if the kernels do
    not support the shapes, dtypes or device.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and (not enable_gqa or heads % kv_heads):
        raise ValueError(f"{heads} query heads and {kv_heads} key heads require enable_gqa")
    _check(q, k, v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if scale < 0:  # the kernels scale the maximum of the scores, so the scale must be positive
        q, scale = -q, -scale
    if torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v)):
        return _Attention.apply(q, k, v, is_causal, scale)
    return _forward(q, k, v, is_causal, scale, save=False)[0]


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    batch, _, _, head_dim = q.shape
    same = k.shape == v.shape and k.shape[0] == batch and k.shape[-1] == head_dim
    if not same or head_dim > MAX_HEAD_DIM:
        shapes = ", ".join(str(tuple(each.shape)) for each in (q, k, v))
        raise NotImplementedError(f"no kernel for the shapes {shapes}")
    if q.dtype not in DTYPES or {k.dtype, v.dtype} != {q.dtype}:
        raise NotImplementedError(f"no kernel for {q.dtype}, {k.dtype}, {v.dtype}")
    if triton is None:
        raise NotImplementedError(NO_TRITON)
    if tiles.INTERPRETED:
        return
    if q.device.type != "cuda":
        raise NotImplementedError(
            f"Triton compiles only for GPUs, not for {q.device.type}; TRITON_INTERPRET=1 runs its "
            "kernels slowly on a CPU"
        )
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        raise NotImplementedError("needs compute capability 8.0 or newer")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        is_causal: bool,
        scale: float,
    ) -> torch.Tensor:
        out, lse = _forward(q, k, v, is_causal, scale, save=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_backward(*ctx.saved_tensors, grad, ctx.is_causal, ctx.scale), None, None


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float, *, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output and, if `save` is set, `lse` [B, H, padded] for the backward pass."""
    batch, heads, sq, head_dim = q.shape
    kv_heads, skv = k.shape[1], k.shape[2]
    _chosen.clear()
    out = torch.empty_like(q)
    padded = tiles.padded(sq)
    lse = q.new_empty((batch, heads, padded), dtype=torch.float32) if save else None
    if out.numel() == 0 or skv == 0:
        return out.zero_(), lse
    kernel = _kernel("forward", head_dim, q.dtype, _tma_fits(q, k, v))
    with _on(q):
        kernel[lambda meta: (triton.cdiv(sq, meta["BLOCK_M"]) * batch * heads,)](
            q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
            heads, heads // kv_heads, sq, skv, padded, scale * LOG2_E, tiles.span(sq, skv),
            D=head_dim, CAUSAL=is_causal, SAVE=save, BLOCK_D=tiles.block_d(head_dim),
        )  # fmt: skip
    _chosen["forward"] = tiles.facts(kernel.best_config)
    return out, lse


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v."""
    batch, heads, sq, head_dim = q.shape
    kv_heads, skv = k.shape[1], k.shape[2]
    dq, dk, dv = (torch.empty_like(each) for each in (q, k, v))
    if out.numel() == 0 or skv == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    block_d = tiles.block_d(head_dim)
    shared = {
        "heads": heads, "group": heads // kv_heads, "sq": sq, "skv": skv, "padded": lse.shape[2],
        "qk_scale": scale * LOG2_E, "scale": scale, "span": tiles.span(sq, skv),
        "D": head_dim, "CAUSAL": is_causal, "BLOCK_D": block_d,
    }  # fmt: skip
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad.stride())
    tma = _tma_fits(q, k, v, grad)
    with _on(q):
        rows = tiles.delta_rows(block_d)
        kernels.flash_backward_delta[(lse.shape[2] // rows * batch * heads,)](
            out, grad, lse, delta, *out.stride(), *grad.stride(), heads, sq, lse.shape[2],
            D=head_dim, BLOCK_D=block_d, BLOCK_M=rows,
        )  # fmt: skip
        of_kv = _kernel("backward_kv", head_dim, q.dtype, tma)
        of_kv[lambda meta: (triton.cdiv(skv, meta["BLOCK_N"]) * batch * kv_heads,)](
            q, k, v, grad, lse, delta, dk, dv, *strides, *dk.stride(), *dv.stride(), **shared
        )
        of_q = _kernel("backward_q", head_dim, q.dtype, tma)
        of_q[lambda meta: (triton.cdiv(sq, meta["BLOCK_M"]) * batch * heads,)](
            q, k, v, grad, lse, delta, dq, *strides, *dq.stride(), **shared
        )
    _chosen["backward_kv"] = tiles.facts(of_kv.best_config)
    _chosen["backward_q"] = tiles.facts(of_q.best_config)
    return dq, dk, dv


def _kernel(name: str, head_dim: int, dtype: torch.dtype, tma: bool) -> Any:
    forced = _forced.get(name)
    return _tuned(name, head_dim, dtype, tma) if forced is None else _with_tiles(name, (forced,))


@functools.cache
def _tuned(name: str, head_dim: int, dtype: torch.dtype, tma: bool) -> Any:
    """Return a kernel that is autotuned at the first call for each bucket of lengths."""
    return _with_tiles(name, tuple(choices_of(name, head_dim, dtype, tma=tma)))


def choices_of(name: str, head_dim: int, dtype: torch.dtype, *, tma: bool) -> list[Any]:
    """Return the triton.Configs that the autotuner measures for a pass.

    `tma` is True if TMA can read the tensors.
    """
    return tiles.choices(name, tiles.block_d(head_dim), dtype.itemsize, tma=tma)


@functools.cache
def _with_tiles(name: str, choices: tuple[Any, ...]) -> Any:
    kernel = kernels.PASSES[name]
    made = [each for each in kernel.arg_names if each.endswith("_desc")]
    kernel = triton.heuristics({each: functools.partial(_descriptor, each) for each in made})(
        kernel
    )
    return triton.autotune(list(choices), key=["D", "CAUSAL", "span"], cache_results=True)(kernel)


def _descriptor(name: str, arguments: dict[str, Any]) -> Any:
    """Return the TMA descriptor of a tensor, or None if the config uses pointers."""
    if not arguments["TMA"]:
        return None
    name = name.removesuffix("_desc")
    rows = arguments["BLOCK_M" if name in ("q", "grad") else "BLOCK_N"]
    tensor = arguments[name]
    block = [1, 1, rows, arguments["BLOCK_D"]]
    return TensorDescriptor(tensor, list(tensor.shape), _tma_strides(tensor), block)


def _tma_strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides in elements.

    The stride of a dimension of size 1 is never used, so it is replaced with one that TMA allows.
    """
    allowed = 16 // tensor.element_size()
    return [
        allowed if size == 1 and place < 3 else stride
        for place, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]


def _tma_fits(*tensors: torch.Tensor) -> bool:
    """Return whether TMA can read the tensors.

    TMA needs rows that are contiguous and aligned to 16 bytes. It is used only for 16-bit dtypes.
    """
    if tensors[0].element_size() != 2:
        return False
    device = tensors[0].device
    capable = tiles.INTERPRETED or torch.cuda.get_device_capability(device) >= (9, 0)
    return capable and all(
        each.stride(3) == 1
        and each.data_ptr() % 16 == 0
        and all(s > 0 and s * each.element_size() % 16 == 0 for s in _tma_strides(each)[:3])
        for each in tensors
    )


def _on(tensor: torch.Tensor) -> Any:
    """Make the tensor's device current, because Triton launches kernels on the current device."""
    return torch.cuda.device(tensor.device if tensor.device.type == "cuda" else -1)
