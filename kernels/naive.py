"""Plain attention: softmax(Q K^T * scale + causal) V, one torch op after another, in the inputs' own
dtype. It defines what right means for the other implementations: run it in fp64 as a reference.

The contract of every file in this folder:

    attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False) -> out

q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv], out [B, Hq, Sq, Dv] like q; scale None is
1 / sqrt(D); with enable_gqa query head h uses key head h // (Hq / Hkv); is_causal lets row i see
columns 0..i, also where Sq and Skv differ. `supports(config)` may return a reason against a config.
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
) -> torch.Tensor:
    """[B, Hq, Sq, Dv] in q's dtype. Differentiable. Raises ValueError if the head counts differ
    without enable_gqa or do not divide.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads:
        if not enable_gqa or heads % kv_heads:
            raise ValueError(f"{heads} query heads and {kv_heads} key heads need enable_gqa")
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        v = v.repeat_interleave(heads // kv_heads, dim=1)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


def supports(config: Config) -> str | None:
    """Masks and dropout have no argument here; everything else is taken."""
    if config.mask != "none":
        return f"takes no attention mask (mask={config.mask}); causal is an argument of its own"
    if config.dropout:
        return "takes no dropout"
    return None
