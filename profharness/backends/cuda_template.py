"""The starting point for an implementation in CUDA, compiled at its first call by `CudaSource`."""

from __future__ import annotations

CUDA_IMPLEMENTATION = '''"""{name}: forward attention as a CUDA kernel that is compiled at the first call; one warp per
query row, sums in fp32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from profharness.backends.cuda_source import CudaSource

if TYPE_CHECKING:
    from profharness.config import Config

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
        raise NotImplementedError(f"takes fp16, bf16 and fp32 on a GPU, not {q.dtype} on {q.device}")
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
    """A reason against a config, or None. Masks and dropout never get here."""
    if config.bwd:
        return "has no backward kernel yet"
    if config.value_dim != config.head_dim or config.head_dim > 256:
        return "takes one head_dim up to 256"
    return None
'''
"""Of the file `NAME.py`; `{name}` and `{signature}` are to be replaced."""

CUDA_CHECK = """

@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_compiles_without_a_gpu(arch):
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'profharness[kernels]'")
    implementation = find_backend(KERNEL).load().__globals__
    names = list(implementation["KERNELS"].values())
    assert set(implementation["SOURCE"].cubin(names, arch).names) == set(names)
"""
"""What the test of such a file has in addition."""
