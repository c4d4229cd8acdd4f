"""Attention in plain torch ops in any dtype: in fp64 the reference, in the inputs' own dtype the
expected error. Gradients are computed explicitly, not by autograd.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from profharness.attention.backends.inputs import Inputs, output_shape
from profharness.attention.config import Config

MAX_SCORES = 1 << 24  # scores held at once; fp64 and a few temporaries of them stay below 1 GiB
ORDERS = ("plain", "scaled_first", "reversed")
GRADIENTS = {"dq": "query", "dk": "key", "dv": "value"}


@dataclass(frozen=True)
class Variant:
    """Attention with a mistake. The default is correct.

    `scale` overrides the config's. With `diagonal`, row i attends to columns 0..i+diagonal under
    causal. With `interleaved`, query head h uses key head h % Hkv. `keys` limits the number of
    keys. `order` is one of ORDERS: another way to round the same scores, which is not a mistake.
    """

    scale: float | None = None
    causal: bool | None = None
    diagonal: int = 0
    interleaved: bool = False
    keys: int | None = None
    order: str = "plain"


@dataclass
class Attended:
    """Tensors by name (`out` `dq` `dk` `dv`), and the magnitude of the terms of each sum without
    cancellation, as (largest element, Frobenius norm). `sizes` also contains the scores, as
    `score`.
    """

    tensors: dict[str, Any]
    sizes: dict[str, tuple[float, float]] = field(default_factory=dict)


@functools.cache
def masked_row_value() -> float:
    """Return the output of torch's math for a query without keys: 0 from 2.5 on, NaN before."""
    tensor = torch.ones(1, 1, 1, 1)
    with sdpa_kernel([SDPBackend.MATH]):
        out = torch.nn.functional.scaled_dot_product_attention(
            tensor, tensor, tensor, attn_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool)
        )
    return float(out)


def attend(
    config: Config,
    inputs: Inputs,
    dtype: Any,
    *,
    variant: Variant | None = None,
    sizes: bool = False,
) -> Attended:
    """Return softmax(Q K^T * scale + mask) V and, if the config has bwd, the inputs' gradients for
    `inputs.grad`, in their shapes. causal is SDPA's, aligned to the first row and column.
    """
    variant = variant or Variant()
    tensors = _results(config, inputs, dtype)
    terms = _results(config, inputs, dtype) if sizes else {}
    if sizes:
        terms["score"] = torch.zeros((), dtype=dtype, device=inputs.query.device)
    with torch.no_grad():
        for place in _places(config, variant):
            _block(config, inputs, dtype, variant, place, tensors, terms)
    return Attended(
        {name: tensor.to(dtype) for name, tensor in tensors.items()},
        {name: _size(tensor) for name, tensor in terms.items()},
    )


def batched_out(config: Config, inputs: Inputs, dtype: Any) -> Any:
    """Return `out` by one matrix product for all heads of a batch, like eager attention.

    BLAS may sum it in another, less exact order than head by head (fp32 on an H200 at head_dim
    2048: 2.4 times the error). Return None if the scores of one head are too many.
    """
    group = config.num_heads // config.num_kv_heads
    step = MAX_SCORES // (config.seq_len_q * config.seq_len_kv)
    rows = slice(0, config.seq_len_q)
    if step == 0:
        return None
    made = _results(config, inputs, dtype)["out"]
    with torch.no_grad():
        for batch in range(config.output_batch):
            key, value = (
                tensor[batch % config.key_batch].to(dtype).repeat_interleave(group, dim=0)
                for tensor in (inputs.key, inputs.value)
            )
            for first in range(0, config.num_heads, step):
                heads = slice(first, min(first + step, config.num_heads))
                query = inputs.query[batch % config.batch, heads].to(dtype)
                scores = query @ key[heads].transpose(-2, -1) * default_scale(config)
                place = (batch, heads, 0, rows)
                made[batch, heads] = (
                    _weights(config, inputs, Variant(), place, scores) @ value[heads]
                )
    return made


def _places(config: Config, variant: Variant) -> Iterator[tuple[int, slice, int, slice]]:
    """Yield (batch, query heads, key head, rows) of blocks with at most MAX_SCORES scores."""
    group = config.num_heads // config.num_kv_heads
    step = max(1, MAX_SCORES // (group * config.seq_len_kv))
    for batch in range(config.output_batch):
        for kv in range(config.num_kv_heads):
            heads = slice(kv * group, (kv + 1) * group)
            if variant.interleaved:
                heads = slice(kv, None, config.num_kv_heads)
            for first in range(0, config.seq_len_q, step):
                yield batch, heads, kv, slice(first, min(first + step, config.seq_len_q))


def default_scale(config: Config) -> float:
    return 1 / math.sqrt(config.head_dim) if config.scale is None else config.scale


def _results(config: Config, inputs: Inputs, dtype: Any) -> dict[str, Any]:
    """Return zeros to accumulate in. Key and value gradients of a narrow dtype accumulate in fp32."""
    query = inputs.query
    shape = output_shape(config)
    made = {"out": torch.zeros(shape, dtype=dtype, device=query.device)}
    if config.bwd:
        wide = torch.promote_types(dtype, torch.float32)
        for name, source in GRADIENTS.items():
            like = getattr(inputs, source)
            made[name] = torch.zeros(like.shape, dtype=wide, device=like.device)
    return made


def _block(
    config: Config,
    inputs: Inputs,
    dtype: Any,
    variant: Variant,
    place: tuple[int, slice, int, slice],
    tensors: dict[str, Any],
    terms: dict[str, Any],
) -> None:
    """Compute some rows of the query heads of one key head: [G, rows, D] against [Skv, D]."""
    batch, heads, kv, rows = place
    query = inputs.query[batch % config.batch, heads, rows].to(dtype)
    key, value = (
        tensor[batch % config.key_batch, kv].to(dtype) for tensor in (inputs.key, inputs.value)
    )
    scale = default_scale(config) if variant.scale is None else variant.scale
    scores = _scores(query, key, scale, variant.order)
    if terms:
        terms["score"] = torch.maximum(terms["score"], scores.abs().max())
    weights = _weights(config, inputs, variant, place, scores)
    at = (batch, heads, rows)
    tensors["out"][at] = weights @ value
    if terms:
        terms["out"][at] = weights.abs() @ value.abs()
    if not config.bwd:
        return
    grad = inputs.grad[at].to(dtype)
    slope = grad @ value.transpose(-2, -1)
    mean = (weights * slope).sum(-1, keepdim=True)
    inner = weights * (slope - mean) * scale
    _add(tensors, place, inner, weights, (query, key, grad))
    if terms:
        outer = weights.abs() * (slope.abs() + mean.abs()) * abs(scale)
        _add(terms, place, outer, weights.abs(), (query.abs(), key.abs(), grad.abs()))


def _scores(query: Any, key: Any, scale: float, order: str) -> Any:
    if order == "scaled_first":
        return (query * scale) @ key.transpose(-2, -1)
    if order == "reversed":
        query, key = query.flip(-1), key.flip(-1)
    return query @ key.transpose(-2, -1) * scale


def _add(
    into: dict[str, Any],
    place: tuple[int, slice, int, slice],
    inner: Any,
    weights: Any,
    factors: tuple[Any, Any, Any],
) -> None:
    batch, heads, kv, rows = place
    query, key, grad = factors
    wide = into["dk"].dtype
    mine, theirs = (batch % len(into[name]) for name in ("dq", "dk"))  # 0 in a batch of 1
    into["dq"][mine, heads, rows] += (inner @ key).to(wide)
    into["dk"][theirs, kv] += (inner.transpose(-2, -1) @ query).to(wide).sum(0)
    into["dv"][theirs, kv] += (weights.transpose(-2, -1) @ grad).to(wide).sum(0)


def _weights(
    config: Config,
    inputs: Inputs,
    variant: Variant,
    place: tuple[int, slice, int, slice],
    scores: Any,
) -> Any:
    batch, heads, _, rows = place
    if inputs.mask is not None:
        full = (config.output_batch, config.num_heads, config.seq_len_q, config.seq_len_kv)
        mask = inputs.mask.detach().broadcast_to(full)[batch, heads, rows]
        hides = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if hides else scores + mask.to(scores.dtype)
    columns = torch.arange(config.seq_len_kv, device=scores.device)
    if config.causal if variant.causal is None else variant.causal:
        row = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        scores = scores.masked_fill(columns > row + variant.diagonal, -math.inf)
    if variant.keys is not None:
        scores = scores.masked_fill(columns >= variant.keys, -math.inf)
    nothing = torch.isneginf(scores).all(-1, keepdim=True)
    return torch.softmax(scores, dim=-1).masked_fill(nothing, masked_row_value())


def _size(tensor: Any) -> tuple[float, float]:
    wide = tensor.double()
    return float(wide.abs().max()), float(wide.norm())
