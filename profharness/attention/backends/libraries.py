"""Backends that call the attention functions of other packages. Each backend has one adapter and
one row in LIBRARY_BACKENDS.

An adapter converts the tensors from SDPA's layout to the layout of the package, and converts the
output back. The conversions create views, so they do not copy data.
"""

from __future__ import annotations

from typing import Any

from profharness.attention.backends.base import (
    WINDOW,
    Attention,
    GpuBackend,
    check_limits,
    needs_module,
    outside_contract,
    refuse_if_unloadable,
    window_size,
)
from profharness.attention.config import Config
from profharness.dtypes import HALF


def flash_attn() -> Attention:
    """Adapt flash_attn_func, which takes tensors [B, S, H, D] and supports grouped key heads."""
    from flash_attn import flash_attn_func

    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        is_causal: bool,
        scale: Any,
        enable_gqa: bool,
        window: int | None = None,
    ) -> Any:
        del enable_gqa
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        sides = window_size(window, is_causal)
        out = flash_attn_func(q, k, v, softmax_scale=scale, causal=is_causal, window_size=sides)
        return out.transpose(1, 2)

    return attention


def xformers() -> Attention:
    """Adapt memory_efficient_attention(query, key, value, attn_bias, p, scale), which takes tensors
    [B, S, H, D].

    For grouped key heads, the function takes tensors [B, S, Hkv, Hq / Hkv, D], in which key and
    value are expanded. LowerTriangularMask is aligned to the top left, like SDPA's causal mask. The
    masks of windows are aligned to the bottom right.
    """
    from xformers.ops import LowerTriangularMask, fmha, memory_efficient_attention

    def bias_of(is_causal: bool, window: int | None) -> Any:
        biases = fmha.attn_bias
        if window is None:
            return LowerTriangularMask() if is_causal else None
        if is_causal:
            return biases.LowerTriangularFromBottomRightMask().make_local_attention(window)
        return biases.LocalAttentionFromBottomRightMask(window - 1, window - 1)

    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        is_causal: bool,
        scale: Any,
        enable_gqa: bool,
        window: int | None = None,
    ) -> Any:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        if enable_gqa:
            groups, size = k.shape[2], q.shape[2] // k.shape[2]
            q = q.unflatten(2, (groups, size))
            k, v = (tensor.unsqueeze(3).expand(-1, -1, -1, size, -1) for tensor in (k, v))
        bias = bias_of(is_causal, window)
        out = memory_efficient_attention(q, k, v, attn_bias=bias, scale=scale)
        return (out.flatten(2, 3) if enable_gqa else out).transpose(1, 2)

    return attention


def sage() -> Attention:
    """Adapt sageattn, whose layout `HND` is SDPA's layout, and which supports grouped key heads."""
    from sageattention import sageattn

    def attention(q: Any, k: Any, v: Any, *, is_causal: bool, scale: Any, enable_gqa: bool) -> Any:
        del enable_gqa
        return sageattn(q, k, v, tensor_layout="HND", is_causal=is_causal, sm_scale=scale)

    return attention


def flashinfer() -> Attention:
    """Adapt single_prefill_with_kv_cache, which takes one sequence without a batch dimension.

    The window has no right side, so a config with a window needs a causal mask.
    """
    from flashinfer import single_prefill_with_kv_cache

    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        is_causal: bool,
        scale: Any,
        enable_gqa: bool,
        window: int | None = None,
    ) -> Any:
        del enable_gqa
        rows = [tensor[0].transpose(0, 1) for tensor in (q, k, v)]
        # The fa3 kernels of FlashInfer 0.6.4 end the process with SIGFPE for other layouts.
        kernels = "auto" if all(each.is_contiguous() for each in rows) else "fa2"
        out = single_prefill_with_kv_cache(
            *rows,
            causal=is_causal,
            kv_layout="NHD",
            backend=kernels,
            sm_scale=scale,
            window_left=window_size(window, is_causal)[0],
        )
        return out.transpose(0, 1)[None]

    return attention


def xformers_supports(config: Config) -> str | None:
    """Return why xformers cannot compute the config, or None if xformers can compute it."""
    if config.window is None:
        return outside_contract(config)
    return check_limits(takes=WINDOW, square_causal=True)(config)


def flashinfer_supports(config: Config) -> str | None:
    """Return why flashinfer cannot compute the config, or None if flashinfer can compute it."""
    if config.window is not None and not config.causal:
        return "supports a window only with a causal mask"
    return check_limits(
        dtypes=HALF, takes=WINDOW, square_causal=True, forward_only=True, one_batch=True
    )(config)


LIBRARY_BACKENDS = (
    GpuBackend(
        "flash-attn",
        "flash_attn_func from the flash-attn package (FA2)",
        load=refuse_if_unloadable("flash_attn", flash_attn),
        supports=check_limits(
            dtypes=HALF, takes=WINDOW, square_causal=True, same_head_dim=True, max_head_dim=256
        ),
        absent=needs_module("flash_attn.flash_attn_interface", "pip install flash-attn"),
        packages=("flash-attn",),
        isolated=True,
    ),
    GpuBackend(
        "xformers",
        "memory_efficient_attention from the xformers package",
        load=refuse_if_unloadable("xformers", xformers),
        supports=xformers_supports,
        absent=needs_module("xformers.ops", "pip install xformers"),
        packages=("xformers",),
        isolated=True,
    ),
    GpuBackend(
        "sage",
        "sageattn from the sageattention package (8-bit Q·K)",
        load=refuse_if_unloadable("sageattention", sage),
        supports=check_limits(
            dtypes=HALF, square_causal=True, same_head_dim=True, max_head_dim=128, forward_only=True
        ),
        absent=needs_module("sageattention", "pip install sageattention"),
        packages=("sageattention",),
        isolated=True,
    ),
    GpuBackend(
        "flashinfer",
        "single_prefill_with_kv_cache from the flashinfer-python package",
        load=refuse_if_unloadable("flashinfer", flashinfer),
        supports=flashinfer_supports,
        absent=needs_module("flashinfer", "pip install flashinfer-python"),
        packages=("flashinfer-python",),
        isolated=True,
    ),
)
