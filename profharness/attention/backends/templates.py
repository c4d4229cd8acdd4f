"""Templates for the files that `new-kernel` writes.

Each template is a correct implementation of attention, and comes with a test.
"""

from __future__ import annotations

# In the content of `NAME.py`, `{name}` and `{signature}` are placeholders.
_CUDA = '''"""{name}: forward attention as a CUDA kernel that is compiled at the first call; one warp per
query row, sums in fp32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from profharness.attention.backends.cuda_source import CudaSource

if TYPE_CHECKING:
    from profharness.attention.config import Config

CUDA = r"""
constexpr int WARP = 32, MAX_HEAD_DIM = 256;

// NVRTC compiles without the toolkit's headers: half and bfloat16 are bits, converted by PTX.
struct half_bits { unsigned short bits; };
struct bfloat_bits { unsigned short bits; };
__device__ float wide(float x) { return x; }
__device__ float wide(half_bits x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ float wide(bfloat_bits x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ void store(float* to, float x) { *to = x; }
__device__ void store(half_bits* to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x)); }
__device__ void store(bfloat_bits* to, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(x)); }

template <typename T>
__global__ void attention_forward(const T* q, const T* k, const T* v, T* out, float scale,
                                  int batches, int heads, int kv_heads, int rows, int columns, int d, int causal) {
  long long at = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  int row = at % rows, head = at / rows % heads;
  long long batch = at / rows / heads;
  if (at >= (long long)batches * heads * rows) return;
  const T* q_row = q + at * d;
  long long kv = (batch * kv_heads + head / (heads / kv_heads)) * columns * d;
  float sums[MAX_HEAD_DIM / WARP] = {}, best = -__int_as_float(0x7f800000), total = 0;
  int last = causal ? min(row + 1, columns) : columns;
  for (int column = 0; column < last; ++column) {
    const T *k_row = k + kv + (long long)column * d, *v_row = v + kv + (long long)column * d;
    float score = 0;
    for (int i = threadIdx.x; i < d; i += WARP) score += wide(q_row[i]) * wide(k_row[i]);
    for (int lane = WARP / 2; lane > 0; lane /= 2) score += __shfl_xor_sync(~0u, score, lane);
    score *= scale;
    float new_best = fmaxf(best, score), shrink = expf(best - new_best), weight = expf(score - new_best);
    total = total * shrink + weight;
#pragma unroll
    for (int n = 0; n < MAX_HEAD_DIM / WARP; ++n) {
      int i = threadIdx.x + n * WARP;
      if (i < d) sums[n] = sums[n] * shrink + weight * wide(v_row[i]);
    }
    best = new_best;
  }
#pragma unroll
  for (int n = 0; n < MAX_HEAD_DIM / WARP; ++n) {
    int i = threadIdx.x + n * WARP;
    if (i < d) store(out + at * d + i, sums[n] / total);
  }
}
"""
# In a file of its own, {name}.cu, it would be CudaSource(Path(__file__).with_suffix(".cu")).
SOURCE = CudaSource(Path(__file__), text=CUDA)
TYPES = {torch.float32: "float", torch.float16: "half_bits", torch.bfloat16: "bfloat_bits"}
KERNELS = {dtype: f"attention_forward<{word}>" for dtype, word in TYPES.items()}
WARPS = 4


{signature}    if not q.is_cuda or q.dtype not in KERNELS:
        raise NotImplementedError(f"supports fp16, bf16 and fp32 on a GPU, not {q.dtype} on {q.device}")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    batch, heads, rows, head_dim = q.shape
    sizes = (batch, heads, k.shape[1], rows, k.shape[2], head_dim)
    # tensors go as pointers, int and bool as int, float as float; numpy.int64(x) as long long
    SOURCE.kernel(KERNELS[q.dtype]).launch(
        (math.ceil(batch * heads * rows / WARPS),), (32, WARPS), q, k, v, out, scale, *sizes, is_causal
    )
    return out


def supports(config: Config) -> str | None:
    """Return why the config is not supported, or None. Masks and dropout are refused earlier."""
    if config.bwd:
        return "has no backward kernel yet"
    if config.value_dim != config.head_dim or config.head_dim > 256:
        return "requires the same head_dim for query, key and value, up to 256"
    return None
'''
_CUDA_CHECK = """

@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_compiles_without_a_gpu(arch):
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'profharness[kernels]'")
    implementation = find_backend(KERNEL).load().__globals__
    names = list(implementation["KERNELS"].values())
    assert set(implementation["SOURCE"].cubin(names, arch).names) == set(names)
"""
_SIGNATURE = '''def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, D]; returns [B, Hq, Sq, D] like q."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
'''
_TORCH = '''"""{name}: attention block by block over the keys, with a running softmax, in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from profharness.attention.config import Config

BLOCK = 128


{signature}    group = q.shape[1] // k.shape[1]
    if enable_gqa and group > 1:
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    rows, columns = q.shape[2], k.shape[2]
    row = torch.arange(rows, device=q.device)[:, None]
    best = q.new_full((*q.shape[:3], 1), -math.inf)
    total = torch.zeros_like(best)
    out = q.new_zeros((*q.shape[:3], v.shape[-1]))
    for start in range(0, columns, BLOCK):
        keys, values = k[:, :, start : start + BLOCK], v[:, :, start : start + BLOCK]
        scores = q @ keys.transpose(-2, -1) * scale
        if is_causal:
            column = torch.arange(start, start + keys.shape[2], device=q.device)
            scores = scores.masked_fill(column > row, -math.inf)
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new_best)
        shrink = torch.exp(best - new_best)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ values
        best = new_best
    return out / total


def supports(config: Config) -> str | None:
    """Return why the config is not supported, or None. Masks and dropout are refused earlier."""
    return None
'''
_TRITON = '''"""{name}: forward attention as a Triton kernel; one program per block of query rows."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from profharness.attention.config import Config

BLOCK_ROWS = 64
BLOCK_COLUMNS = 64


@triton.jit
def attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, heads, group, rows, columns,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, o_b, o_h, o_s, o_d,
    CAUSAL: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STOP: tl.constexpr,
):
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D_PADDED)
    q_at = q_ptr + batch * q_b + head * q_h + row[:, None] * q_s + d[None, :] * q_d
    inside = (row[:, None] < rows) & (d[None, :] < D)
    q = tl.load(q_at, mask=inside, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, D_PADDED], tl.float32)
    # STOP is constant: with a tensor as its end the interpreter fails on newer NumPy
    for start in range(0, STOP, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = (column[:, None] < columns) & (d[None, :] < D)
        k_at = k_ptr + batch * k_b + (head // group) * k_h + column[:, None] * k_s + d[None, :] * k_d
        v_at = v_ptr + batch * v_b + (head // group) * v_h + column[:, None] * v_s + d[None, :] * v_d
        k = tl.load(k_at, mask=there, other=0.0)
        v = tl.load(v_at, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = column[None, :] < columns
        if CAUSAL:
            seen = seen & (column[None, :] <= row[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    out = out / total[:, None]
    o_at = out_ptr + batch * o_b + head * o_h + row[:, None] * o_s + d[None, :] * o_d
    tl.store(o_at, out.to(out_ptr.dtype.element_ty), mask=inside)


{signature}    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotImplementedError(
            f"Triton compiles only for GPUs, not for {q.device.type}; TRITON_INTERPRET=1 runs it slowly on a CPU"
        )
    batch, heads, rows, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grid = (triton.cdiv(rows, BLOCK_ROWS), batch * heads)
    attention_forward[grid](
        q, k, v, out, scale, heads, heads // k.shape[1], rows, k.shape[2],
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        CAUSAL=is_causal, D=head_dim, D_PADDED=max(16, triton.next_power_of_2(head_dim)),
        ROWS=BLOCK_ROWS, COLUMNS=BLOCK_COLUMNS,
        STOP=triton.cdiv(k.shape[2], BLOCK_COLUMNS) * BLOCK_COLUMNS,
    )
    return out


def supports(config: Config) -> str | None:
    """Return why the config is not supported, or None. Masks and dropout are refused earlier."""
    if config.bwd:
        return "has no backward kernel yet"
    if config.value_dim != config.head_dim or config.head_dim > 128:
        return "requires the same head_dim for query, key and value, up to 128"
    return None
'''
_TEST = '''"""{name} against the plain attention in fp64."""

from __future__ import annotations

{imports}from pathlib import Path

import pytest
import torch

from profharness.attention.backends import find_backend
from profharness.errors import UsageError

{device}
KERNEL = str(Path(__file__).resolve().parent / "{file}")


def reference(q, k, v, **arguments):
    """Compute `naive` in fp64, or PyTorch's math in fp64 if naive is not available."""
    try:
        attention = find_backend("naive").load()
    except UsageError:
        attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q.double(), k.double(), v.double(), **arguments)


{marks}@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "columns", "head_dim", "scale"),
    [(2, 2, 64, 64, 32, None), (4, 2, 65, 130, 16, 0.5), (2, 1, 1, 7, 8, None), (1, 1, 130, 3, 64, None)],
)
def test_it_agrees_with_naive(heads, kv_heads, rows, columns, head_dim, scale, is_causal):
    torch.manual_seed(0)
    q = torch.randn(2, heads, rows, head_dim, device=DEVICE)
    k = torch.randn(2, kv_heads, columns, head_dim, device=DEVICE)
    v = torch.randn(2, kv_heads, columns, head_dim, device=DEVICE)
    arguments = {{"is_causal": is_causal, "scale": scale, "enable_gqa": heads != kv_heads}}
    out = find_backend(KERNEL).load()(q, k, v, **arguments)
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.double(), reference(q, k, v, **arguments), atol=1e-5, rtol=1e-4)
{more}'''
_TRITON_IMPORTS = """import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its interpreter runs on the CPU
"""
_TRITON_DEVICE = """pytest.importorskip("triton", reason="needs Triton: pip install triton")
DEVICE = "cpu"
"""
_CUDA_MARKS = """@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
"""
_KERNELS = {"torch": _TORCH, "triton": _TRITON, "cuda": _CUDA}
KINDS = tuple(_KERNELS)
# The imports, the device, the pytest marks and the additional tests to insert into _TEST.
_TEST_PARTS = {
    "torch": ("", 'DEVICE = "cpu"\n', "", ""),
    "triton": (_TRITON_IMPORTS, _TRITON_DEVICE, "", ""),
    "cuda": ("", 'DEVICE = "cuda"\n', _CUDA_MARKS, _CUDA_CHECK),
}


def kernel_text(name: str, kind: str) -> str:
    """Return the content of `NAME.py` for a kind of implementation, which is one of KINDS."""
    return _KERNELS[kind].replace("{signature}", _SIGNATURE).replace("{name}", name)


def check_text(name: str, kind: str, file: str) -> str:
    """Return the content of `test_NAME.py`. `file` is relative to the folder of the test."""
    imports, device, marks, more = _TEST_PARTS[kind]
    return _TEST.format(
        name=name, file=file, imports=imports, device=device, marks=marks, more=more
    )
