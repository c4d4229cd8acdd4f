"""Plain attention: softmax(Q K^T * scale + causal mask) V, computed with separate torch ops.

All ops use the dtype of the inputs. Run in fp64, it is the reference for the other implementations.

Every file in this folder has the same interface:

    attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False) -> out

- The shapes are q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv] and out [B, Hq, Sq, Dv].
- `out` has the dtype of `q`.
- If `scale` is None, the scale is 1 / sqrt(D).
- If `enable_gqa` is set, query head h uses key head h // (Hq / Hkv).
- If `is_causal` is set, row i sees the columns 0 to i, even if Sq and Skv differ.
- A function with an argument `window` also computes sliding windows: row i sees the columns above
  i - window, and below i + window if `is_causal` is not set.
- With an argument `softcap`, scores s become softcap * tanh(s / softcap) before they are masked.
- With an argument `sinks`, a tensor [Hq], each head has one more logit in its softmax, without a
  value.

An optional function `supports(config)` returns the reason why a config is not supported, or None.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from profharness.attention.config import Config


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output [B, Hq, Sq, Dv] in the dtype of q. It is differentiable.

    The output of a row that sees no column is 0.

    Raise ValueError if the numbers of heads differ, unless `enable_gqa` is set and the number of
    query heads is a multiple of the number of key heads.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads:
        if not enable_gqa or heads % kv_heads:
            raise ValueError(f"{heads} query heads and {kv_heads} key heads require enable_gqa")
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        v = v.repeat_interleave(heads // kv_heads, dim=1)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if window is not None:
        whole = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        hidden = whole.tril(-window) | whole.triu(1 if is_causal else window)
        weights = _softmax(scores.masked_fill(hidden, -math.inf), sinks)
        return weights.masked_fill(hidden.all(-1, keepdim=True), 0) @ v
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return _softmax(scores, sinks) @ v


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax of scores [B, Hq, Sq, Skv], to which each sink adds a logit of its head."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


def supports(config: Config) -> str | None:
    """Return the reason why a config is not supported, or None if it is supported."""
    if config.mask != "none":
        return f"does not support an attention mask (mask={config.mask}), only causal"
    if config.dropout:
        return "does not support dropout"
    return None
