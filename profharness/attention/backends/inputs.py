"""The tensors of a config and the arguments of its call.

The operations used here work on tensors and on source text. The worker uses them to create tensors,
and `repro` uses them to write a script.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from profharness.attention.config import Config

Fill = Callable[..., Any]
"""A function that returns a new tensor. Its arguments are the sizes of the dimensions."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call: query [B, Hq, Sq, D], key [B, Hkv, Skv, D], value [B, Hkv, Skv, Dv], and
    the gradient of the output [B, Hq, Sq, Dv]. grad and mask are None if the config has no backward
    or no mask.
    """

    query: Any
    key: Any
    value: Any
    grad: Any
    mask: Any


def build_inputs(config: Config, normal: Fill, kept: Fill, *, written: bool = True) -> Inputs:
    """Return the inputs. Their values are drawn in the order of the fields.

    `normal` fills tensors with numbers, and `kept` fills a bool mask. If `written` is false, the
    tensors have no values and `grad` is None.
    """

    def tensor(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Any:
        made = laid_out(config.layout, shape, strides, normal)
        return made.requires_grad_() if config.bwd else made

    keys = (config.key_batch, config.num_kv_heads, config.seq_len_kv)
    queries = (config.batch, config.num_heads, config.seq_len_q, config.head_dim)
    return Inputs(
        tensor(queries, config.q_strides),
        tensor((*keys, config.head_dim), config.k_strides),
        tensor((*keys, config.value_dim), config.v_strides),
        normal(*output_shape(config)) if config.bwd and written else None,
        _mask(config, normal, kept, written),
    )


def output_shape(config: Config) -> tuple[int, int, int, int]:
    """Return the shape of the output, [B, Hq, Sq, Dv]."""
    return config.output_batch, config.num_heads, config.seq_len_q, config.value_dim


def laid_out(
    layout: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, fill: Fill
) -> Any:
    """Return a tensor with the given strides, or with the given layout if `strides` is None."""
    if strides:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return fill(elements).as_strided(shape, strides)
    batch, heads, rows, head_dim = shape
    if layout == "bshd":
        return fill(batch, rows, heads, head_dim).transpose(1, 2)
    if layout == "strided_last":
        return fill(batch, heads, rows, 2 * head_dim)[..., ::2]
    if layout == "offset1":
        return fill(batch * heads * rows * head_dim + 1)[1:].view(shape)
    if layout == "broadcast_batch":
        return fill(1, heads, rows, head_dim).expand(shape)
    return fill(*shape)


def _mask(config: Config, normal: Fill, kept: Fill, written: bool) -> Any:
    if config.mask == "none":
        return None
    shape, strides = config.mask_dims, config.mask_strides
    fill = normal if config.mask.startswith("float") else kept
    mask = laid_out("contiguous", shape, strides, fill) if strides else fill(*shape)
    if fill is normal:
        return mask.requires_grad_() if config.mask == "float_grad" else mask
    # a dimension with stride 0 has only one element in memory, so write to that element alone
    if strides:
        stored = tuple(size if stride else 1 for size, stride in zip(shape, strides, strict=True))
        mask = mask.as_strided(stored, strides)
    if written:
        # without a key to attend to, the result of a row would be NaN by definition
        mask[..., 0] = True
    return mask.as_strided(shape, strides) if strides else mask


def call_arguments(config: Config, mask: Any, *, own: bool) -> dict[str, Any]:
    """Return the keyword arguments of the call. If `own` is true, return those of an `Attention`
    function, which takes no mask and no dropout.
    """
    grouped = config.num_kv_heads != config.num_heads
    arguments: dict[str, Any] = {"is_causal": config.causal, "scale": config.scale}
    if not own:
        arguments |= {"attn_mask": mask, "dropout_p": config.dropout}
    if own or grouped:
        arguments["enable_gqa"] = grouped
    return arguments


def choice_arguments(config: Config, mask: Any) -> dict[str, Any]:
    """Return the keyword arguments of `_fused_sdp_choice`."""
    grouped = config.num_kv_heads != config.num_heads
    return call_arguments(config, mask, own=False) | {"enable_gqa": grouped}


def leaf_names(config: Config) -> list[str]:
    """Return the names of the inputs that receive a gradient in the backward pass."""
    return ["query", "key", "value", *(["mask"] if config.mask == "float_grad" else [])]
