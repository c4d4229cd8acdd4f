"""Create the inputs of a config, and the attention call that is measured on them.

This module also has adapters for the other attention functions of PyTorch, such as flex_attention.
`attention/backends/__init__.py` refers to the adapters by name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.attention as torch_attention
from torch.nn.functional import scaled_dot_product_attention

from profharness.attention.backends.base import (
    Attention,
    ImplementationError,
    Inputs,
    RefusedError,
    build_inputs,
    call_arguments,
    choice_arguments,
    leaf_names,
    needs_module,
    output_shape,
    window_size,
)
from profharness.attention.backends.sources import find_implementation
from profharness.attention.config import SDP_BACKENDS, Config, SdpaSetting
from profharness.attention.dispatch.rules import CAUSAL_MASK
from profharness.dtypes import DTYPES
from profharness.rows import REPLACEMENTS

PLAIN_MISSING = (
    "kernels/naive.py is missing from the working directory and from profharness; reinstall "
    "profharness"
)
FA4_REMEDY = "pip install flash-attn-4"
needs_triton = needs_module("triton", "pip install triton")


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, DTYPES[name].torch)


def make_inputs(config: Config, device: str, seed: int | None) -> Inputs:
    """Return random inputs in the dtype and memory layout of the config.

    Values are normally distributed and depend only on `seed`. If `seed` is None, the tensors stay
    uninitialized, so that no kernel is launched, and `grad` is None.
    """
    dtype = torch_dtype(str(config.dtype))
    generator = None if seed is None else torch.Generator(device=device).manual_seed(seed)

    def filled(*shape: int) -> Any:
        if generator is None:
            return torch.empty(shape, device=device, dtype=dtype)
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    def kept(*shape: int) -> Any:
        if generator is None:
            return torch.empty(shape, device=device, dtype=torch.bool)
        return torch.rand(shape, device=device, generator=generator) < 0.75

    return in_cache(config, build_inputs(config, filled, kept, written=generator is not None))


def in_cache(config: Config, inputs: Inputs) -> Inputs:
    """Return the inputs with keys and values that the dtype of the cache can represent.

    The rounding of a narrow cache therefore does not count as an error of a backend.
    """
    if config.kv_dtype is None:
        return inputs
    narrow = torch_dtype(config.kv_dtype)
    key, value = (tensor.to(narrow).to(tensor.dtype) for tensor in (inputs.key, inputs.value))
    return replace(inputs, key=key, value=value)


def window_mask(config: Config, device: Any) -> Any:
    """Return the bool mask [Sq, Skv] of a config with a window."""
    rows = torch.arange(config.seq_len_q, device=device)[:, None]
    columns = torch.arange(config.seq_len_kv, device=device)
    return in_window(rows, columns, config.window, config.causal)


def in_window(row: Any, column: Any, window: int | None, causal: bool) -> Any:
    """Return whether a query row attends to a key under `causal` and a window of this size."""
    ahead = 1 if causal else window
    if window is None:
        return column <= row
    return (column > row - window) & (column < row + ahead)


def sdpa_mask(config: Config, inputs: Inputs) -> Any:
    """Return the mask of the SDPA call that computes a config, or None if it has none."""
    return inputs.mask if config.window is None else window_mask(config, inputs.query.device)


def make_forward(
    config: Config, inputs: Inputs, attention: Attention | None = None
) -> Callable[[], Any]:
    """Return a function that runs the forward pass of `attention`.

    The default is PyTorch's `scaled_dot_product_attention`.
    """
    if prepare := getattr(attention, "prepare", None):
        call: Callable[[], Any] = prepare(config, inputs).call
        return call
    tensors = (inputs.query, inputs.key, inputs.value)
    own = attention is not None
    mask = None if own else sdpa_mask(config, inputs)
    arguments = call_arguments(config, mask, own=own, sinks=inputs.sinks)
    function = attention or scaled_dot_product_attention

    def forward() -> Any:
        return function(*tensors, **arguments)

    return forward


def make_call(
    config: Config, inputs: Inputs, attention: Attention | None = None
) -> Callable[[], Any]:
    """Return the function to profile and time.

    The function runs the forward pass. If the config has `bwd`, the function also computes the
    gradients.
    """
    leaves = [getattr(inputs, name) for name in leaf_names(config)]
    forward = make_forward(config, inputs, attention)

    def forward_and_backward() -> Any:
        # not backward(), which launches extra kernels to accumulate into .grad
        return torch.autograd.grad(forward(), leaves, inputs.grad)

    return forward_and_backward if config.bwd else forward


def make_output(config: Config, inputs: Inputs, attention: Attention | None = None) -> Any:
    """Return the output [B, Hq, Sq, Dv] of one call of the forward pass."""
    if prepare := getattr(attention, "prepare", None):
        prepared = prepare(config, inputs)
        return prepared.unpack(prepared.call())
    return make_forward(config, inputs, attention)()


def check_output(name: str, config: Config, inputs: Inputs, output: Any) -> None:
    """Raise ImplementationError unless the output has the type, shape, dtype and device of SDPA's
    output.

    `name` is the name of the backend.
    """
    if not isinstance(output, torch.Tensor):
        raise ImplementationError(f"{name} returned {type(output).__name__}, not a tensor")
    shape = output_shape(config)
    if tuple(output.shape) != shape:
        raise ImplementationError(
            f"{name} returned shape {list(output.shape)}; it must be {list(shape)}, [B, H, Sq, Dv]"
        )
    query = inputs.query
    if (output.dtype, output.device) != (query.dtype, query.device):
        raise ImplementationError(
            f"{name} returned {output.dtype} on {output.device}; "
            f"the inputs are {query.dtype} on {query.device}"
        )


def fused_choice(config: Config, inputs: Inputs) -> int:
    """Return the number of the SDPBackend that PyTorch chooses. No kernel is launched.

    Raise RuntimeError if no backend accepts the call, or if PyTorch chooses math but math would
    raise because the config has both a causal and an explicit mask.
    """
    tensors = (inputs.query, inputs.key, inputs.value)
    mask = sdpa_mask(config, inputs)
    choice = torch._fused_sdp_choice(*tensors, **choice_arguments(config, mask))
    if (
        choice == torch_attention.SDPBackend.MATH.value
        and config.sdpa_call().causal
        and mask is not None
    ):
        raise RuntimeError(CAUSAL_MASK)
    return int(choice)


def only(setting: SdpaSetting) -> AbstractContextManager[None]:
    """Return a context in which SDPA may use only the backends of `setting`.

    If the setting is ordered, SDPA also prefers the backends in that order. On CUDA, call
    `environment.collect` first, because PyTorch resets the order at the first choice in a process.
    """
    members = [getattr(torch_attention.SDPBackend, SDP_BACKENDS[name]) for name in setting.backends]
    order = {"set_priority": True} if setting.ordered else {}
    return torch_attention.sdpa_kernel(members, **order)  # type: ignore[no-any-return]


def priority_absent() -> str | None:
    """Return why `sdpa_kernel` of this torch cannot set an order of backends, or None if it can."""
    if "set_priority" in inspect.signature(torch_attention.sdpa_kernel).parameters:
        return None
    return (
        "a backend order requires torch >= 2.6 (sdpa_kernel with set_priority), but this is "
        f"torch {torch.__version__}; join the backends with + "
        "to allow them in any order"
    )


@contextlib.contextmanager
def legacy_all_disabled() -> Iterator[None]:
    """Disable flash, efficient and math in the block with the deprecated `sdp_kernel`.

    cuDNN stays enabled because `sdp_kernel` is called without its flag.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context = torch.backends.cuda.sdp_kernel(
            enable_flash=False, enable_math=False, enable_mem_efficient=False
        )
        with context:
            yield


@contextlib.contextmanager
def activated(impl: str) -> Iterator[None]:
    """Limit SDPA to flash attention in the block, and replace FA2 with the implementation `impl`."""
    before = torch_attention.current_flash_attention_impl()
    try:
        torch_attention.activate_flash_attention_impl(impl)
    except Exception as error:
        text = f"{impl} cannot be activated: {type(error).__name__}: {error}"
        raise RefusedError("absent", text) from error
    try:
        with only(SdpaSetting(("flash",))):
            yield
    finally:
        torch_attention.restore_flash_attention_impl()
        if before is not None:
            torch_attention.activate_flash_attention_impl(before)


def sdpa() -> Attention:
    attention: Attention = torch.nn.functional.scaled_dot_product_attention
    return attention


def flash_impl_absent(impl: str, module: str, remedy: str, majors: tuple[int, ...]) -> str | None:
    """Return why `impl` cannot replace FA2 in PyTorch, or None if it can.

    The `module` argument is the Python package of `impl`, and `remedy` says how to install the
    package. The `majors` argument lists the major compute capabilities that `impl` supports.
    """
    if not hasattr(torch_attention, "restore_flash_attention_impl"):
        return f"choosing {impl} for SDPA requires torch >= 2.11, but this is {torch.__version__}"
    if impl not in torch_attention.list_flash_attention_impls():
        return f"this torch does not include the implementation {impl}"
    return needs_module(module, remedy)() or capability_reason(impl, majors)


def capability_reason(name: str, majors: tuple[int, ...]) -> str | None:
    """Return a message if the GPU's major compute capability is not in `majors`, otherwise None.

    The message says that the backend `name` needs another GPU.
    """
    if not torch.cuda.is_available():
        return f"{name} requires an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability()
    if major in majors:
        return None
    needed = " or ".join(f"{needed}.x" for needed in majors)
    return f"{name} requires compute capability {needed}, but this GPU has {major}.{minor}"


def naive_compiled_absent() -> str | None:
    """Return why naive attention cannot be compiled, or None if it can."""
    return PLAIN_MISSING if find_implementation("naive") is None else needs_triton()


def naive_compiled() -> Attention:
    """Return the attention of kernels/naive.py, compiled anew by torch.compile.

    The function has an attribute `tuning`, a function that returns how often Inductor's pattern
    matcher replaced naive attention in the graph with `scaled_dot_product_attention`. Raise
    RefusedError if kernels/naive.py does not exist.
    """
    plain = find_implementation("naive")
    if plain is None or plain.load is None:
        raise RefusedError("absent", PLAIN_MISSING)
    counters = torch._dynamo.utils.counters
    before = counters["inductor"]["fuse_attention"]
    compiled: Attention = torch.compile(
        copy_function(plain.load()),
        dynamic=False,
        fullgraph=True,
        # Inductor does not run the pattern matcher on a graph from the disk cache, so
        # replacements in that graph would not be counted.
        options={"fx_graph_cache": False},
    )

    def attention(*tensors: Any, **options: Any) -> Any:
        return compiled(*tensors, **options)

    def tuning() -> dict[str, object]:
        return {REPLACEMENTS: counters["inductor"]["fuse_attention"] - before}

    attention.tuning = tuning  # type: ignore[attr-defined]
    return attention


def copy_function(function: Any) -> Any:
    """Return a copy of a function with a new code object.

    Dynamo stores graphs and counts recompiles per code object, so Dynamo compiles the copy anew.
    Unlike torch._dynamo.reset(), this keeps the compiled graphs of other backends.
    """
    code = function.__code__.replace()
    new = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def flex_flash_absent() -> str | None:
    """Return why flex_attention cannot run the kernels of FA4, or None if it can."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        return f"kernel_options BACKEND requires torch >= 2.10, but this is {torch.__version__}"
    reason = needs_module("flash_attn.cute", FA4_REMEDY)()
    return needs_triton() or reason or capability_reason("flex-flash", (9, 10))


def flex(kernel_options: dict[str, Any] | None) -> Attention:
    """Return an adapter for flex_attention.

    The adapter passes `causal` and a window as a block mask, and a softcap as a modification of the
    scores. A sink s adds exp(s) to the sum of a row's exponentials, so it scales the row of the
    output by sigmoid(lse - s).
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Copy the function because, after too many recompiles, Dynamo would run it uncompiled.
    compiled = torch.compile(copy_function(flex_attention), dynamic=False, fullgraph=True)

    @functools.cache
    def block_mask(window: int | None, causal: bool, rows: int, columns: int, device: Any) -> Any:
        def seen(_batch: Any, _head: Any, row: Any, column: Any) -> Any:
            return in_window(row, column, window, causal)

        return create_block_mask(seen, None, None, rows, columns, device=device)

    @functools.cache
    def capped(softcap: float | None) -> Any:
        def modified(score: Any, *_: Any) -> Any:
            return softcap * torch.tanh(score / softcap)

        return None if softcap is None else modified

    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        is_causal: bool,
        scale: Any,
        enable_gqa: bool,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
    ) -> Any:
        mask = None
        if is_causal or window is not None:
            mask = block_mask(window, is_causal, q.shape[2], k.shape[2], q.device)
        options = {"scale": scale, "enable_gqa": enable_gqa, "kernel_options": kernel_options}
        options |= {"block_mask": mask, "score_mod": capped(softcap)}
        if sinks is None:
            return compiled(q, k, v, **options)
        out, lse = compiled(q, k, v, return_lse=True, **options)
        return out * torch.sigmoid(lse - sinks[None, :, None].float())[..., None].to(out.dtype)

    return attention


def varlen_absent() -> str | None:
    """Return why this torch has no varlen_attn, or None if it has one."""
    absent = needs_module("torch.nn.attention.varlen", "")()
    return "torch.nn.attention.varlen requires torch >= 2.10" if absent else None


def varlen() -> Attention:
    """Return an adapter for varlen_attn, whose arguments are packed tensors `[B * S, H, D]`.

    If the config has `layout=bshd`, packing makes views. Packing copies contiguous inputs.
    """
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters

    @functools.cache
    def offsets(batch: int, rows: int, device: Any) -> Any:
        return torch.arange(batch + 1, device=device, dtype=torch.int32) * rows

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
        batch, _, rows, _ = q.shape
        columns = k.shape[2]
        options: dict[str, Any] = {}
        if "window_size" in parameters:
            options["window_size"] = window_size(window, is_causal)
        elif window is not None:
            raise RefusedError(
                "unsupported", "in this torch version, varlen_attn does not accept window_size"
            )
        elif is_causal:
            options["is_causal"] = True
        # earlier versions have no such option and always accept fewer key heads
        if "enable_gqa" in parameters:
            options["enable_gqa"] = enable_gqa
        if scale is not None and "scale" not in parameters:
            raise RefusedError(
                "unsupported", "in this torch version, varlen_attn has no `scale` parameter"
            )
        if scale is not None:
            options["scale"] = scale
        packed = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v)]
        lengths = (offsets(batch, rows, q.device), offsets(batch, columns, q.device))
        out = varlen_attn(*packed, *lengths, rows, columns, **options)
        return out.unflatten(0, (batch, rows)).transpose(1, 2)

    return attention
