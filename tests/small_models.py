"""Small models on the CPU, and a function that records real traces of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

HEADS, KV_HEADS, DIM = 4, 2, 8


class Attention(torch.nn.Module):
    """Grouped attention with SDPA or with plain operations."""

    def __init__(self, *, eager: bool = False) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, (HEADS + 2 * KV_HEADS) * DIM)
        self.softmax = torch.nn.Softmax(-1)
        self.eager = eager

    def forward(self, x: Any, mask: Any = None) -> Any:
        parts = self.qkv(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        q, k, v = (part.unflatten(-1, (-1, DIM)).transpose(1, 2) for part in parts)
        if not self.eager:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        else:
            k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
            out = self.softmax(q @ k.transpose(-2, -1) / DIM**0.5) @ v
        return out.transpose(1, 2).flatten(2)


class Model(torch.nn.Module):
    def __init__(self, *, eager: bool = False, again: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention(eager=eager) for _ in range(2))
        self.again = again

    def forward(self, x: Any, mask: Any = None) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.again else layer(x, mask)
        return x


def record(path: Path, work: Callable[[], Any], **options: Any) -> Path:
    """Write a trace of `work` after a warm-up to `path`, and return the path."""
    work()
    told: dict[str, Any] = {"record_shapes": True, "with_stack": True, **options}
    with profile(activities=[ProfilerActivity.CPU], **told) as seen:
        work()
    seen.export_chrome_trace(str(path))
    return path
