"""A simple and slow attention kernel that serves as a teaching example. Do not optimize it.

Each block computes one query row, reads all of K and V, and keeps all scores of the row in shared
memory. single_query.cu explains why this is slow. naive.py describes the interface. There is no
backward pass.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from profharness.attention.backends.cuda_source import CudaSource

if TYPE_CHECKING:
    from profharness.attention.config import Config

SOURCE = CudaSource(Path(__file__).with_suffix(".cu"))
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "float"}
THREADS = 256
WARPS = THREADS // 32
MAX_KEYS = 24 * 1024
"""Maximum number of keys. Their scores take 96 KB of shared memory, which every GPU of compute
capability 8.0 or newer provides for one block.
"""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the contiguous attention output [B, Hq, Sq, Dv] in the dtype of q.

    Raise ValueError if the numbers of heads do not match, and NotImplementedError if the kernel
    does not support the inputs.
    """
    (batch, heads, rows, head_dim), (kv_heads, columns) = q.shape, k.shape[1:3]
    if heads != kv_heads and (not enable_gqa or heads % kv_heads):
        raise ValueError(f"{heads} query heads and {kv_heads} key heads require enable_gqa")
    if not q.is_cuda or q.dtype not in TYPES:
        raise NotImplementedError(
            f"supports fp16, bf16 and fp32 on a GPU, not {q.dtype} on {q.device}"
        )
    if torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v)):
        raise NotImplementedError("has no backward kernel")
    if columns > MAX_KEYS:
        raise NotImplementedError(
            f"supports up to {MAX_KEYS} keys, because it keeps all scores of a row"
        )
    out = torch.empty((batch, heads, rows, v.shape[-1]), dtype=q.dtype, device=q.device)
    name, shared_bytes, arguments = launch_of(
        q, k, v, out, is_causal, 1 / math.sqrt(head_dim) if scale is None else scale
    )
    kernel = SOURCE.kernel(name, shared_bytes=shared_bytes)
    kernel.launch((batch * heads * rows,), (THREADS,), *arguments)
    return out


def launch_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[str, int, list[object]]:
    """Return the name of the kernel, its dynamic shared memory in bytes, and its arguments."""
    (_, heads, rows, head_dim), (kv_heads, columns) = q.shape, k.shape[1:3]
    q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, v))
    sizes = [heads, heads // kv_heads, rows, columns, head_dim, v.shape[-1]]
    strides = [np.int64(step) for each in (q, k, v) for step in each.stride()[:3]]
    # rounded up to a multiple of 1 KB, so that similar lengths share one loaded kernel
    shared_bytes = math.ceil((columns + WARPS) * 4 / 1024) * 1024
    arguments = [q, k, v, out, float(scale), bool(is_causal), *sizes, *strides]
    return f"single_query<{TYPES[q.dtype]}>", shared_bytes, arguments


def supports(config: Config) -> str | None:
    """Return the reason why a config is not supported, or None if it is supported.

    Configs with a mask or dropout are rejected before this function is called.
    """
    if config.bwd:
        return "has no backward kernel"
    if config.seq_len_kv > MAX_KEYS:
        return (
            f"supports up to {MAX_KEYS} keys, because it keeps all scores of a row in shared memory"
        )
    return None
