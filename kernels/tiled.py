"""Attention for any head_dim on Hopper: several blocks share a tile of query rows, each with its part
of head_dim, and exchange partial scores; tiled.cu says how. Keys, values and queries are read once a
tile. fp32 is computed in true fp32. The contract is that of naive.py; forward only.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from _tiled_plan import Plan, Problem, choose_plan

from profharness.backends.cuda_source import CudaSource

if TYPE_CHECKING:
    from profharness.config import Config

SOURCE = CudaSource(Path(__file__).with_suffix(".cu"))
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "float"}
LOG2_E = math.log2(math.e)
MAX_HEAD_DIM = 8192
COUNTERS = 1 << 12
"""Launches that may be in flight at once before two of them share a barrier."""

_last: dict[str, object] | None = None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """[B, Hq, Sq, D] in q's dtype, contiguous. Raises ValueError for head counts that do not fit,
    NotImplementedError for what the kernel has no code for.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and (not enable_gqa or heads % kv_heads):
        raise ValueError(f"{heads} query heads and {kv_heads} key heads need enable_gqa")
    if not q.is_cuda or q.dtype not in TYPES:
        raise NotImplementedError(
            f"takes fp16, bf16 and fp32 on a GPU, not {q.dtype} on {q.device}"
        )
    if torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v)):
        raise NotImplementedError("has no backward kernel")
    plan = choose_plan(_problem(q, k, is_causal), _multiprocessors(q.device.index))
    return run(plan, q, k, v, is_causal=is_causal, scale=scale)


def run(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """`attention` by a given plan; the plan must suit the problem."""
    global _last
    batch, heads, rows, head_dim = q.shape
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    q, k, v = (_aligned(each) for each in (q, k, v))
    width = q.shape[-1]
    element = TYPES[q.dtype]
    lines = batch * heads * rows
    out = torch.empty((batch, heads, rows, width), dtype=q.dtype, device=q.device)
    target, log_sums = out, None
    if plan.splits > 1:
        target = torch.empty(plan.splits * lines * width, dtype=torch.float32, device=q.device)
        log_sums = torch.empty(plan.splits * lines, dtype=torch.float32, device=q.device)
    units = math.ceil(rows / plan.rows) * plan.splits * heads * batch
    scratch = counters = None
    if plan.grid:
        floats = units * plan.scratch_floats
        scratch = torch.empty(floats, dtype=torch.float32, device=q.device)
        counters = _next_counters(q.device.index, units)
    kernel = SOURCE.kernel(
        f"tiled_attention<{element}, {plan.template}>",
        shared_bytes=plan.shared_bytes,
        cluster=1 if plan.grid else plan.parts,
    )
    shape = (heads, heads // k.shape[1], rows, k.shape[2], width, plan.parts)
    strides = (np.int64(step) for each in (q, k, v) for step in each.stride()[:3])
    tiles = math.ceil(rows / plan.rows)
    kernel.launch(
        (batch * heads * plan.parts, tiles, plan.splits),
        (256,),
        *(q, k, v, target, log_sums, scratch, counters, scale * LOG2_E, *shape, plan.splits),
        bool(is_causal),
        *strides,
        cooperative=plan.grid,
    )
    if plan.splits > 1:
        combine = SOURCE.kernel(f"combine_splits<{element}>")
        combine.launch((lines,), (256,), target, log_sums, out, plan.splits, width)
    _last = plan.described()
    return out if width == head_dim else out[..., :head_dim].contiguous()


def tuning() -> dict[str, object] | None:
    """The plan of the last call."""
    return _last


def supports(config: Config) -> str | None:
    """A reason against a config, or None. Masks and dropout never get here."""
    if config.bwd:
        return "has no backward kernel"
    if config.value_dim != config.head_dim:
        return "takes one head_dim for query, key and value"
    if config.head_dim > MAX_HEAD_DIM:
        return f"takes head_dim up to {MAX_HEAD_DIM}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9:
        return "needs thread block clusters (compute capability 9.0)"
    return None


def _problem(q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> Problem:
    batch, heads, rows, head_dim = q.shape
    return Problem(batch * heads, rows, k.shape[2], head_dim, q.element_size(), is_causal)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Rows that start at multiples of 16 bytes and are a multiple of 16 bytes long, padded by zeros
    where they are not.
    """
    per = 16 // tensor.element_size()
    short = -tensor.shape[-1] % per
    if short:
        return torch.nn.functional.pad(tensor, (0, short))
    strides = [s for s, n in zip(tensor.stride()[:3], tensor.shape, strict=False) if n > 1]
    straight = tensor.stride(-1) == 1 and not any(step % per for step in strides)
    return (
        tensor
        if straight and tensor.data_ptr() % 16 == 0
        else tensor.clone(memory_format=torch.contiguous_format)
    )


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_counters: dict[int, tuple[torch.Tensor, int]] = {}


def _next_counters(device: int, units: int) -> torch.Tensor:
    """A barrier's words for each tile of a launch, 128 bytes each and zero between launches. They are
    handed out in turn, so that launches in flight together do not share any.
    """
    memory, used = _counters.get(device, (None, 0))
    if memory is None:
        memory = torch.zeros((COUNTERS, 32), dtype=torch.int32, device=f"cuda:{device}")
    if used + units > COUNTERS:
        used = 0
    _counters[device] = (memory, used + units)
    return memory[used : used + units]
