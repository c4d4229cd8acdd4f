"""Attention for any head_dim up to 8192 on Hopper.

Several blocks share a tile of query rows. Each block computes one part of head_dim, and the blocks
exchange partial scores, as tiled.cu explains. Queries, keys and values are read once per tile. fp32
is computed without TF32. naive.py describes the interface. There is no backward pass.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from _tiled_plan import Plan, Problem, choose_plan

from profharness.attention.backends.cuda_source import CudaSource

if TYPE_CHECKING:
    from profharness.attention.config import Config

SOURCE = CudaSource(Path(__file__).with_suffix(".cu"))
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "float"}
LOG2_E = math.log2(math.e)
MAX_HEAD_DIM = 8192
MAX_ROWS = 65535 * 64
"""Maximum number of query rows. A grid has at most 65535 tiles in its y dimension."""
WORDS_OF_CAPTURES = 1 << 13

_last: Plan | None = None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the contiguous attention output [B, Hq, Sq, D] in the dtype of q.

    Raise ValueError if the numbers of heads do not match, and NotImplementedError if the kernel
    does not support the inputs.
    """
    return _planned(q, k, v, None, is_causal, scale, enable_gqa)


def one_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute `attention` with all of head_dim in one block, for up to 128 keys.

    This slower variant shows an intermediate step of the optimization.
    """
    return _planned(q, k, v, "block", is_causal, scale, enable_gqa)


def one_cluster(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute `attention` with head_dim split over the blocks of a cluster, for up to 128 keys.

    Like `one_block`, this variant shows an intermediate step of the optimization.
    """
    return _planned(q, k, v, "cluster", is_causal, scale, enable_gqa)


def _planned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    exchange: str | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    _check(q, k, v, enable_gqa)
    if not q.numel() or not k.shape[2]:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    problem = Problem(q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3], q.element_size())
    plan = choose_plan(problem, _multiprocessors(q.device.index), exchange)
    with torch.cuda.device_of(q):
        return run(plan, q, k, v, is_causal=is_causal, scale=scale)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> None:
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and (not enable_gqa or not kv_heads or heads % kv_heads):
        raise ValueError(f"{heads} query heads and {kv_heads} key heads require enable_gqa")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(str(tuple(each.shape)) for each in (q, k, v))
        raise NotImplementedError(
            f"requires the same batch and head_dim for q, k and v, not {shapes}"
        )
    if not (q.is_cuda and q.device == k.device == v.device):
        raise NotImplementedError(
            f"requires q, k and v on one GPU, not on {q.device}, {k.device}, {v.device}"
        )
    if q.dtype not in TYPES or not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(
            f"requires fp16, bf16 or fp32 for all of q, k and v, not {q.dtype}, {k.dtype}, "
            f"{v.dtype}"
        )
    if q.shape[3] > MAX_HEAD_DIM or q.shape[2] > MAX_ROWS:
        raise NotImplementedError(
            f"supports head_dim up to {MAX_HEAD_DIM} and up to {MAX_ROWS} query rows, not "
            f"{q.shape[3]} and {q.shape[2]}"
        )
    if torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v)):
        raise NotImplementedError("has no backward kernel")


def run(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute `attention` with the given plan, which must fit the problem."""
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
    tiles = math.ceil(rows / plan.rows)
    units = tiles * plan.splits * heads * batch
    scratch = counters = None
    if plan.grid:
        floats = units * plan.scratch_floats
        scratch = torch.empty(floats, dtype=torch.float32, device=q.device)
        counters = _counters(q.device.index, units)
    kernel = SOURCE.kernel(
        plan.instance(element),
        shared_bytes=plan.shared_bytes,
        cluster=1 if plan.grid else plan.parts,
    )
    shape = (heads, heads // k.shape[1], rows, k.shape[2], width, plan.parts)
    strides = (np.int64(step) for each in (q, k, v) for step in each.stride()[:3])
    kernel.launch(
        (batch * heads * plan.parts, tiles, plan.splits),
        (256,),
        *(q, k, v, target, log_sums, scratch, counters, scale * LOG2_E, *shape, plan.splits),
        bool(is_causal),
        *strides,
        cooperative=plan.grid,
        overlap=True,
    )
    if plan.splits > 1:
        combine = SOURCE.kernel(f"combine_splits<{element}>")
        combine.launch((lines,), (256,), target, log_sums, out, plan.splits, width)
    _last = plan
    return out if width == head_dim else out[..., :head_dim].contiguous()


def tuning() -> dict[str, object] | None:
    """Return the parameters of the last call's plan, or None before the first call."""
    return None if _last is None else _last.described()


def supports(config: Config) -> str | None:
    """Return the reason why a config is not supported, or None if it is supported.

    Configs with a mask or dropout are rejected before this function is called.
    """
    if config.bwd:
        return "has no backward kernel"
    if config.value_dim != config.head_dim:
        return "requires the same head_dim for query, key and value"
    if config.head_dim > MAX_HEAD_DIM:
        return f"supports head_dim up to {MAX_HEAD_DIM}"
    if config.seq_len_q > MAX_ROWS:
        return f"supports up to {MAX_ROWS} query rows"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10):
        return (
            "requires clusters and 227 KB of shared memory per block (compute capability 9.0 or "
            "10.0)"
        )
    return None


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in which the address and the size of each row are multiples of 16 bytes.

    If necessary, copy the tensor and pad the rows with zeros.
    """
    per = 16 // tensor.element_size()
    short = -tensor.shape[-1] % per
    if short:
        return torch.nn.functional.pad(tensor, (0, short)).contiguous()
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


_of_stream: dict[tuple[int, int], torch.Tensor] = {}
_of_captures: dict[int, tuple[torch.Tensor, int]] = {}


def _counters(device: int, units: int) -> torch.Tensor:
    """Return the barrier counters of a launch, which take 128 bytes per tile and are 0 between
    launches.

    Launches on the same stream share the counters, because they run one after the other. Every
    captured launch has its own counters, because graphs may be replayed concurrently.
    """
    if torch.cuda.is_current_stream_capturing():
        memory, used = _of_captures.get(device, (None, 0))
        if memory is None or used + units > len(memory):
            return _zeroed(device, units)  # the graph itself zeroes the counters at each replay
        _of_captures[device] = (memory, used + units)
        return memory[used : used + units]
    if device not in _of_captures or _of_captures[device][1] > WORDS_OF_CAPTURES // 2:
        _of_captures[device] = (_zeroed(device, WORDS_OF_CAPTURES), 0)
        torch.cuda.current_stream(device).synchronize()
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _of_stream or len(_of_stream[key]) < units:
        _of_stream[key] = _zeroed(device, max(units, 256))
    return _of_stream[key][:units]


def _zeroed(device: int, units: int) -> torch.Tensor:
    return torch.zeros((units, 32), dtype=torch.int32, device=f"cuda:{device}")
