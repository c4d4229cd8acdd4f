"""The built-in backends. What they need of torch stands in the worker, which alone calls it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from profharness.backends.base import (
    HALF,
    Attention,
    Backend,
    GpuBackend,
    RefusedError,
    needs_module,
    outside_contract,
    wants,
)
from profharness.rows import NAIVE_COMPILED


def _in_worker(function: str, *arguments: Any) -> Callable[[], Any]:
    """A call of a function of worker/attention.py, loaded only then: it imports torch."""

    def call() -> Any:
        module = importlib.import_module("profharness.worker.attention")
        return getattr(module, function)(*arguments)

    return call


def _loaded(name: str, function: str, *arguments: Any) -> Callable[[], Attention]:
    """A `load` whose failure is an `absent` refusal: installed, but of no use here."""
    load = _in_worker(function, *arguments)

    def wrapped() -> Attention:
        try:
            attention: Attention = load()
        except RefusedError:
            raise
        except Exception as error:
            text = f"{name} is installed but cannot be loaded: {type(error).__name__}: {error}"
            raise RefusedError("absent", text) from error
        return attention

    return wrapped


def _flash_impl(
    name: str, summary: str, module: str, remedy: str, majors: tuple[int, ...]
) -> Backend:
    return GpuBackend(
        name,
        summary,
        context=_in_worker("activated", name.upper()),
        load=_in_worker("sdpa"),
        supports=wants(dtypes=HALF),
        absent=_in_worker("flash_impl_absent", name.upper(), module, remedy, majors),
    )


_BOTH = ("cuda", "cpu")
SDPA_BACKENDS = (
    Backend("auto", "PyTorch's own choice, all flags as they are", _BOTH),
    Backend(
        "flash",
        "FlashAttention (FA2 built into PyTorch, or an activated FA3/FA4)",
        _BOTH,
        _in_worker("only", "FLASH_ATTENTION"),
    ),
    Backend(
        "efficient",
        "memory-efficient attention (CUTLASS)",
        ("cuda",),
        _in_worker("only", "EFFICIENT_ATTENTION"),
    ),
    Backend("cudnn", "cuDNN's fused attention", ("cuda",), _in_worker("only", "CUDNN_ATTENTION")),
    Backend(
        "math", "matmul, softmax, matmul as separate ATen ops", _BOTH, _in_worker("only", "MATH")
    ),
    Backend(
        "all-disabled",
        "legacy sdp_kernel with flash, math and efficient off: leaves cuDNN on",
        _BOTH,
        _in_worker("legacy_all_disabled"),
    ),
)
TORCH_BACKENDS = (
    # On a CPU Inductor could write C++ for flex: no Triton kernel, half a minute to compile, no
    # backward. Uncompiled it is no fused kernel at all. Neither is what is asked for.
    GpuBackend(
        "flex",
        "flex_attention under torch.compile (Triton); causal as a block mask",
        load=_loaded("flex_attention", "flex", None),
        supports=outside_contract,
        absent=needs_module("triton", "pip install triton"),
    ),
    GpuBackend(
        "flex-flash",
        "flex_attention with kernel_options BACKEND FLASH (FA4 kernels)",
        load=_loaded("flex_attention", "flex", {"BACKEND": "FLASH"}),
        supports=wants(dtypes=HALF),
        absent=_in_worker("flex_flash_absent"),
        packages=("flash-attn-4",),
    ),
    GpuBackend(
        "varlen",
        "torch.nn.attention.varlen; packs the inputs, a copy unless layout=bshd",
        load=_in_worker("varlen"),
        supports=wants(dtypes=HALF, square_causal=True, same_head_dim=True, max_head_dim=256),
        absent=_in_worker("varlen_absent"),
    ),
    _flash_impl(
        "fa3",
        "SDPA with FlashAttention-3 in place of FA2",
        "flash_attn_interface",
        "build it from the folder hopper of flash-attention",
        (9,),
    ),
    _flash_impl(
        "fa4",
        "SDPA with FlashAttention-4 in place of FA2",
        "flash_attn.cute",
        "pip install flash-attn-4",
        (9, 10),
    ),
    # On a CPU Inductor writes C++: other kernels than those asked for, as for flex above.
    GpuBackend(
        NAIVE_COMPILED,
        "torch.compile of kernels/naive.py, which Inductor may replace by SDPA",
        load=_loaded(NAIVE_COMPILED, "naive_compiled"),
        supports=outside_contract,
        absent=_in_worker("naive_compiled_absent"),
    ),
)
LIBRARY_BACKENDS = (
    GpuBackend(
        "flash-attn",
        "flash_attn_func of the package flash-attn (FA2)",
        load=_loaded("flash_attn", "flash_attn"),
        supports=wants(dtypes=HALF, square_causal=True, same_head_dim=True, max_head_dim=256),
        absent=needs_module("flash_attn.flash_attn_interface", "pip install flash-attn"),
        packages=("flash-attn",),
    ),
    GpuBackend(
        "xformers",
        "memory_efficient_attention of the package xformers",
        load=_loaded("xformers", "xformers"),
        supports=outside_contract,
        absent=needs_module("xformers.ops", "pip install xformers"),
        packages=("xformers",),
    ),
    GpuBackend(
        "sage",
        "sageattn of the package sageattention (8-bit Q·K)",
        load=_loaded("sageattention", "sage"),
        supports=wants(
            dtypes=HALF, square_causal=True, same_head_dim=True, max_head_dim=128, forward_only=True
        ),
        absent=needs_module("sageattention", "pip install sageattention"),
        packages=("sageattention",),
    ),
    GpuBackend(
        "flashinfer",
        "single_prefill_with_kv_cache of the package flashinfer-python",
        load=_loaded("flashinfer", "flashinfer"),
        supports=wants(dtypes=HALF, square_causal=True, forward_only=True, one_batch=True),
        absent=needs_module("flashinfer", "pip install flashinfer-python"),
        packages=("flashinfer-python",),
    ),
)
