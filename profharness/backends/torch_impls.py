"""PyTorch's other ways to attention: flex_attention, varlen_attn, SDPA with FA3 or FA4 put in, and
the plain form under torch.compile.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

from profharness.backends.base import (
    HALF,
    Attention,
    Backend,
    GpuBackend,
    RefusedError,
    capability_reason,
    loaded,
    needs_module,
    outside_contract,
    wants,
)
from profharness.backends.sources import find_implementation
from profharness.rows import NAIVE_COMPILED, REPLACEMENTS


def _only(name: str) -> Callable[[], AbstractContextManager[None]]:
    def context() -> AbstractContextManager[None]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([getattr(SDPBackend, name)])  # type: ignore[no-any-return]

    return context


@contextlib.contextmanager
def _legacy_all_disabled() -> Iterator[None]:
    """The deprecated context with its three flags off; it has no say over cuDNN by default, so
    cuDNN stays on.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context = torch.backends.cuda.sdp_kernel(
            enable_flash=False, enable_math=False, enable_mem_efficient=False
        )
        with context:
            yield


SDPA_BACKENDS = (
    Backend(
        "auto",
        "PyTorch's own choice, all flags as they are",
        ("cuda", "cpu"),
        contextlib.nullcontext,
    ),
    Backend(
        "flash",
        "FlashAttention (FA2 built into PyTorch, or an activated FA3/FA4)",
        ("cuda", "cpu"),
        _only("FLASH_ATTENTION"),
    ),
    Backend(
        "efficient", "memory-efficient attention (CUTLASS)", ("cuda",), _only("EFFICIENT_ATTENTION")
    ),
    Backend("cudnn", "cuDNN's fused attention", ("cuda",), _only("CUDNN_ATTENTION")),
    Backend("math", "matmul, softmax, matmul as separate ATen ops", ("cuda", "cpu"), _only("MATH")),
    Backend(
        "all-disabled",
        "legacy sdp_kernel with flash, math and efficient off: leaves cuDNN on",
        ("cuda", "cpu"),
        _legacy_all_disabled,
    ),
)


needs_triton = needs_module("triton", "pip install triton")
_PLAIN = "naive"
_MISSING = (
    "there is no kernels/naive.py in the working directory or beside the package; run in a "
    "checkout of profharness"
)


def naive_compiled_absent() -> str | None:
    """Why there is nothing to compile, or nothing to compile it with on a GPU."""
    if find_implementation(_PLAIN) is None:
        return _MISSING
    return needs_triton()


def load_naive_compiled() -> Attention:
    """torch.compile(naive, dynamic=False, fullgraph=True), compiled anew for each load.

    Its attribute `tuning`, a function, says how often Inductor's pattern matcher found attention in
    the graph and put scaled_dot_product_attention there (`counters["inductor"]["fuse_attention"]`
    of torch._dynamo.utils). Raises RefusedError without kernels/naive.py.
    """
    import torch
    from torch._dynamo.utils import counters

    found = find_implementation(_PLAIN)
    if found is None or found.load is None:
        raise RefusedError("absent", _MISSING)
    before = counters["inductor"]["fuse_attention"]
    compiled: Attention = torch.compile(
        code_of_its_own(found.load()),
        dynamic=False,
        fullgraph=True,
        # a graph from the cache on disk passes no pattern matcher, so nothing would be counted
        options={"fx_graph_cache": False},
    )

    def attention(
        q: Any, k: Any, v: Any, *, is_causal: bool, scale: float | None, enable_gqa: bool
    ) -> Any:
        return compiled(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

    def tuning() -> dict[str, object]:
        return {REPLACEMENTS: counters["inductor"]["fuse_attention"] - before}

    attention.tuning = tuning  # type: ignore[attr-defined]
    return attention


def code_of_its_own(function: Any) -> Any:
    """The same function with a new code object, which is what Dynamo counts recompiles by and keeps
    graphs with: each cell starts anew, and no other compiled backend of the process loses its
    graphs, as after torch._dynamo.reset().
    """
    code = function.__code__.replace()
    new = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    new.__kwdefaults__ = function.__kwdefaults__
    return new


FA4_REMEDY = "pip install flash-attn-4"
FA3_REMEDY = "build it from the folder hopper of flash-attention"


def _flex_flash_absent() -> str | None:
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        return f"kernel_options BACKEND needs torch >= 2.10; this is {torch.__version__}"
    reason = needs_module("flash_attn.cute", FA4_REMEDY)()
    return needs_triton() or reason or capability_reason("flex-flash", (9, 10))


def _flex(kernel_options: dict[str, Any] | None) -> Callable[[], Attention]:
    """flex_attention takes SDPA's layout as it is; causal is a block mask, made once per shape."""

    def load() -> Attention:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # past Dynamo's recompile limit it would run uncompiled: start each cell anew
        own = code_of_its_own(flex_attention)
        compiled = torch.compile(own, dynamic=False, fullgraph=True)
        masks: dict[tuple[int, int], Any] = {}

        def causal(_batch: Any, _head: Any, row: Any, column: Any) -> Any:
            return row >= column

        def attention(
            q: Any, k: Any, v: Any, *, is_causal: bool, scale: float | None, enable_gqa: bool
        ) -> Any:
            shape = (q.shape[2], k.shape[2])
            if is_causal and shape not in masks:
                masks[shape] = create_block_mask(causal, None, None, *shape, device=q.device)
            return compiled(
                q,
                k,
                v,
                block_mask=masks[shape] if is_causal else None,
                scale=scale,
                enable_gqa=enable_gqa,
                kernel_options=kernel_options,
            )

        return attention

    return load


def _varlen_absent() -> str | None:
    if needs_module("torch.nn.attention.varlen", "")():
        return "torch.nn.attention.varlen needs torch >= 2.10"
    return None


def _load_varlen() -> Attention:
    """varlen_attn takes packed [B * S, H, D]: a copy of contiguous inputs, none of layout=bshd."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    starts: dict[tuple[int, int], Any] = {}

    def offsets(batch: int, rows: int, device: Any) -> Any:
        key = (batch, rows)
        if key not in starts:
            starts[key] = torch.arange(batch + 1, device=device, dtype=torch.int32) * rows
        return starts[key]

    def packed(tensor: Any) -> Any:
        return tensor.transpose(1, 2).flatten(0, 1)

    def attention(
        q: Any, k: Any, v: Any, *, is_causal: bool, scale: float | None, enable_gqa: bool
    ) -> Any:
        batch, _, rows, _ = q.shape
        columns = k.shape[2]
        options: dict[str, Any] = {}
        if "window_size" in known:
            options["window_size"] = (-1, 0 if is_causal else -1)
        elif is_causal:
            options["is_causal"] = True
        if "enable_gqa" in known:  # without it, fewer key heads are taken as they are
            options["enable_gqa"] = enable_gqa
        if scale is not None and "scale" not in known:
            raise RefusedError("unsupported", "varlen_attn of this torch takes no scale")
        if scale is not None:
            options["scale"] = scale
        lengths = (offsets(batch, rows, q.device), offsets(batch, columns, q.device))
        out = varlen_attn(packed(q), packed(k), packed(v), *lengths, rows, columns, **options)
        return out.unflatten(0, (batch, rows)).transpose(1, 2)

    return attention


def _flash_impl_absent(
    impl: str, module: str, remedy: str, majors: tuple[int, ...]
) -> Callable[[], str | None]:
    def absent() -> str | None:
        import torch
        import torch.nn.attention as attention

        if not hasattr(attention, "restore_flash_attention_impl"):
            return f"choosing {impl} for SDPA needs torch >= 2.11; this is {torch.__version__}"
        if impl not in attention.list_flash_attention_impls():
            return f"{impl} is not among the implementations that this torch knows"
        return needs_module(module, remedy)() or capability_reason(impl, majors)

    return absent


def _activated(impl: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """SDPA limited to flash, with `impl` in place of FA2; what was active before comes back."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        import torch.nn.attention as attention

        before = attention.current_flash_attention_impl()
        try:
            attention.activate_flash_attention_impl(impl)
        except Exception as error:
            text = f"{impl} cannot be activated: {type(error).__name__}: {error}"
            raise RefusedError("absent", text) from error
        try:
            with attention.sdpa_kernel([attention.SDPBackend.FLASH_ATTENTION]):
                yield
        finally:
            attention.restore_flash_attention_impl()
            if before is not None:
                attention.activate_flash_attention_impl(before)

    return context


def _load_sdpa() -> Attention:
    import torch.nn.functional as functional

    attention: Attention = functional.scaled_dot_product_attention
    return attention


def _flash_impl(
    name: str, summary: str, module: str, remedy: str, majors: tuple[int, ...]
) -> Backend:
    return GpuBackend(
        name,
        summary,
        context=_activated(name.upper()),
        load=_load_sdpa,
        supports=wants(dtypes=HALF),
        absent=_flash_impl_absent(name.upper(), module, remedy, majors),
    )


TORCH_BACKENDS = (
    # On a CPU Inductor could write C++ for flex: no Triton kernel, half a minute to compile, no
    # backward. Uncompiled it is no fused kernel at all. Neither is what is asked for.
    GpuBackend(
        "flex",
        "flex_attention under torch.compile (Triton); causal as a block mask",
        load=loaded("flex_attention", _flex(None)),
        supports=outside_contract,
        absent=needs_triton,
    ),
    GpuBackend(
        "flex-flash",
        "flex_attention with kernel_options BACKEND FLASH (FA4 kernels)",
        load=loaded("flex_attention", _flex({"BACKEND": "FLASH"})),
        supports=wants(dtypes=HALF),
        absent=_flex_flash_absent,
        packages=("flash-attn-4",),
    ),
    GpuBackend(
        "varlen",
        "torch.nn.attention.varlen; packs the inputs, a copy unless layout=bshd",
        load=_load_varlen,
        supports=wants(dtypes=HALF, square_causal=True, same_head_dim=True, max_head_dim=256),
        absent=_varlen_absent,
    ),
    _flash_impl(
        "fa3",
        "SDPA with FlashAttention-3 in place of FA2",
        "flash_attn_interface",
        FA3_REMEDY,
        (9,),
    ),
    _flash_impl(
        "fa4",
        "SDPA with FlashAttention-4 in place of FA2",
        "flash_attn.cute",
        FA4_REMEDY,
        (9, 10),
    ),
    # On a CPU Inductor writes C++: other kernels than those asked for, as for flex above.
    GpuBackend(
        NAIVE_COMPILED,
        "torch.compile of kernels/naive.py, which Inductor may replace by SDPA",
        load=loaded(NAIVE_COMPILED, load_naive_compiled),
        supports=outside_contract,
        absent=naive_compiled_absent,
    ),
)
