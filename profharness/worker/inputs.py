"""The tensors of a config and the attention call on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from profharness.backends.base import Attention, ImplementationError
from profharness.config import Config
from profharness.dispatch.rules import CAUSAL_MASK

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Inputs:
    """query [B, Hq, Sq, D]; key [B, Hkv, Skv, D]; value [B, Hkv, Skv, Dv]; mask as the config says,
    or None; grad like the output [B, Hq, Sq, Dv], or None.
    """

    query: Any
    key: Any
    value: Any
    mask: Any
    grad: Any


def make_inputs(config: Config, device: str, seed: int | None) -> Inputs:
    """Normally distributed inputs in the config's dtype and layout, the same for the same seed. With
    None they are allocated and never written, so nothing is launched; grad is None then.
    """
    dtype = DTYPES[str(config.dtype)]
    generator = None if seed is None else torch.Generator(device=device).manual_seed(seed)

    def filled(*shape: int) -> Any:
        if generator is None:
            return torch.empty(shape, device=device, dtype=dtype)
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    def tensor(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Any:
        made = _laid_out(config.layout, shape, strides, filled)
        return made.requires_grad_() if config.bwd else made

    keys = (config.key_batch, config.num_kv_heads, config.seq_len_kv)
    query = tensor(
        (config.batch, config.num_heads, config.seq_len_q, config.head_dim), config.q_strides
    )
    key = tensor((*keys, config.head_dim), config.k_strides)
    value = tensor((*keys, config.value_dim), config.v_strides)
    grad = None
    if config.bwd and generator is not None:
        grad = filled(*output_shape(config))
    return Inputs(query, key, value, _mask(config, device, filled, generator), grad)


def output_shape(config: Config) -> tuple[int, int, int, int]:
    """[B, Hq, Sq, Dv]."""
    return config.output_batch, config.num_heads, config.seq_len_q, config.value_dim


def _laid_out(
    layout: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    filled: Callable[..., Any],
) -> Any:
    if strides:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return filled(elements).as_strided(shape, strides)
    batch, heads, rows, head_dim = shape
    if layout == "bshd":
        return filled(batch, rows, heads, head_dim).transpose(1, 2)
    if layout == "strided_last":
        return filled(batch, heads, rows, 2 * head_dim)[..., ::2]
    if layout == "offset1":
        return filled(batch * heads * rows * head_dim + 1)[1:].view(shape)
    if layout == "broadcast_batch":
        return filled(1, heads, rows, head_dim).expand(shape)
    return filled(*shape)


def _mask(config: Config, device: str, filled: Callable[..., Any], generator: Any) -> Any:
    if config.mask == "none":
        return None
    shape, strides = config.mask_dims, config.mask_strides
    if config.mask.startswith("float"):
        made = _laid_out("contiguous", shape, strides, filled) if strides else filled(*shape)
        return made.requires_grad_(config.mask == "float_grad")

    def kept(*sizes: int) -> Any:
        if generator is None:
            return torch.empty(sizes, device=device, dtype=torch.bool)
        return torch.rand(sizes, device=device, generator=generator) < 0.75

    if not strides:
        mask = kept(*shape)
    else:  # a dimension of stride 0 cannot be written as a whole
        mask = _laid_out("contiguous", shape, strides, kept)
        stored = tuple(size if stride else 1 for size, stride in zip(shape, strides, strict=True))
        mask = mask.as_strided(stored, strides)
    if generator is not None:
        mask[..., 0] = True  # a row with nothing to attend to would be NaN by definition
    return mask.as_strided(shape, strides) if strides else mask


def make_forward(
    config: Config, inputs: Inputs, attention: Attention | None = None
) -> Callable[[], Any]:
    """The forward call, of `scaled_dot_product_attention` or of an `Attention`."""
    tensors = (inputs.query, inputs.key, inputs.value)
    grouped = config.num_kv_heads != config.num_heads
    arguments: dict[str, Any] = {"is_causal": config.causal, "scale": config.scale}
    if attention is None:
        arguments |= {"attn_mask": inputs.mask, "dropout_p": config.dropout}
    if attention is not None or grouped:
        arguments["enable_gqa"] = grouped
    function = attention or F.scaled_dot_product_attention

    def forward() -> Any:
        return function(*tensors, **arguments)

    return forward


def make_call(
    config: Config, inputs: Inputs, attention: Attention | None = None
) -> Callable[[], Any]:
    """The call that is profiled and timed: forward, and with `bwd` the gradients too."""
    tensors = (inputs.query, inputs.key, inputs.value)
    leaves = (*tensors, inputs.mask) if config.mask == "float_grad" else tensors
    forward = make_forward(config, inputs, attention)

    def forward_and_backward() -> Any:
        # autograd.grad, not backward(): accumulating into .grad would add kernels that are not attention's
        return torch.autograd.grad(forward(), leaves, inputs.grad)

    return forward_and_backward if config.bwd else forward


def check_output(name: str, config: Config, inputs: Inputs, output: Any) -> None:
    """Raises ImplementationError for an output of the named backend that is no tensor like SDPA's."""
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
    """PyTorch's own answer, nothing launched. Raises RuntimeError where no backend fits, and where
    math is the answer, whose call would raise.
    """
    tensors = (inputs.query, inputs.key, inputs.value)
    grouped = config.num_kv_heads != config.num_heads
    options = {"attn_mask": inputs.mask, "dropout_p": config.dropout, "is_causal": config.causal}
    choice = torch._fused_sdp_choice(*tensors, **options, scale=config.scale, enable_gqa=grouped)
    if choice == SDPBackend.MATH.value and config.causal and inputs.mask is not None:
        raise RuntimeError(CAUSAL_MASK)
    return int(choice)
