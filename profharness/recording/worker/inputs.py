"""The tensors of a config and the attention call on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from profharness.attention.backends.base import Attention, ImplementationError
from profharness.attention.backends.inputs import (
    Inputs,
    build_inputs,
    call_arguments,
    choice_arguments,
    leaf_names,
    output_shape,
)
from profharness.attention.config import Config
from profharness.attention.dispatch.rules import CAUSAL_MASK
from profharness.dtypes import DTYPES


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, DTYPES[name].torch)


def make_inputs(config: Config, device: str, seed: int | None) -> Inputs:
    """Return normally distributed inputs in the config's dtype and layout, reproducible by seed.
    With a seed of None they are allocated but never written, so no kernel is launched; `grad` is
    then None.
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

    return build_inputs(config, filled, kept, written=generator is not None)


def make_forward(
    config: Config, inputs: Inputs, attention: Attention | None = None
) -> Callable[[], Any]:
    """Return the forward call of `scaled_dot_product_attention` or of an `Attention`."""
    tensors = (inputs.query, inputs.key, inputs.value)
    arguments = call_arguments(config, inputs.mask, own=attention is not None)
    function = attention or scaled_dot_product_attention

    def forward() -> Any:
        return function(*tensors, **arguments)

    return forward


def make_call(
    config: Config, inputs: Inputs, attention: Attention | None = None
) -> Callable[[], Any]:
    """Return the call to profile and time: forward, and with `bwd` also the gradients."""
    leaves = [getattr(inputs, name) for name in leaf_names(config)]
    forward = make_forward(config, inputs, attention)

    def forward_and_backward() -> Any:
        # autograd.grad, not backward(): accumulating into .grad would add kernels that are not attention's
        return torch.autograd.grad(forward(), leaves, inputs.grad)

    return forward_and_backward if config.bwd else forward


def check_output(name: str, config: Config, inputs: Inputs, output: Any) -> None:
    """Raise ImplementationError if the output of the named backend is not a tensor like SDPA's."""
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
    """Return PyTorch's choice without a launch. Raise RuntimeError if no backend accepts the call,
    or if the choice is math and its call would raise.
    """
    tensors = (inputs.query, inputs.key, inputs.value)
    choice = torch._fused_sdp_choice(*tensors, **choice_arguments(config, inputs.mask))
    if choice == SDPBackend.MATH.value and config.causal and inputs.mask is not None:
        raise RuntimeError(CAUSAL_MASK)
    return int(choice)
