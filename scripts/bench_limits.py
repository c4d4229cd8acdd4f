"""Measure what limits the kernels in kernels/ on a GPU of compute capability 9.0, with small
separate programs.

python scripts/bench_limits.py

* fp32: multiply-adds of 8 x 16 outer products on registers alone, then with operands from shared memory as
  tiled_fp32.cuh reads them; TFLOP/s, against the 67 of the data sheet.
* copy: the bytes of a problem (Q, K, V read, O written, once) moved by 128 blocks that compute nothing; µs a
  launch in a CUDA graph, L2 warm.
* launch: a kernel that does nothing, and one whose blocks synchronize twice, in a cluster of 16 or
  through L2; µs. How many large clusters the GPU holds.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from profharness.attention.backends.cuda_source import CudaSource
from profharness.recording.worker.timing import open_graph

CUDA = r"""
#include "../kernels/device.cuh"

// SHARED_OPERANDS: of 256 threads each group of 128 has a 128 x 128 tile, as Fp32Tile<128, 128, 32, ...>::Scores.
template <bool SHARED_OPERANDS>
__global__ void __launch_bounds__(256, 1) multiply_add(float* out, int rounds) {
    SHARED(memory);
    constexpr int PITCH = 36;
    float* operands = reinterpret_cast<float*>(memory);
    for (int i = threadIdx.x; i < 256 * PITCH; i += 256) operands[i] = i * 1e-5f;
    __syncthreads();
    const int group = threadIdx.x / 128, row = threadIdx.x % 128 / 8, column = threadIdx.x % 8;
    const float* q = operands + row * PITCH;
    const float* k = operands + (128 + column) * PITCH;
    float sum[8][16];
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 16; ++j) sum[i][j] = 0;
    float4 a[8], b[16];
    for (int i = 0; i < 8; ++i) a[i] = make_float4(i, row, i + 1, column);
    for (int j = 0; j < 16; ++j) b[j] = make_float4(j, column, j + 1, row);
    for (int round = 0; round < rounds; ++round) {
#pragma unroll 1
        for (int step = 0; step < 4; ++step) {
            const int at = (step * 2 + group) * 4;
            if (SHARED_OPERANDS) {
#pragma unroll
                for (int i = 0; i < 8; ++i) a[i] = *reinterpret_cast<const float4*>(q + i * 16 * PITCH + at);
            }
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                if (SHARED_OPERANDS) b[j] = *reinterpret_cast<const float4*>(k + j * 8 * PITCH + at);
                const float4 c = SHARED_OPERANDS ? b[j] : b[j % 4];
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i][j] = fmaf(a[i].x, c.x, sum[i][j]);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i][j] = fmaf(a[i].y, c.y, sum[i][j]);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i][j] = fmaf(a[i].z, c.z, sum[i][j]);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i][j] = fmaf(a[i].w, c.w, sum[i][j]);
            }
        }
        __syncthreads();
    }
    float all = 0;
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 16; ++j) all += sum[i][j];
    if (all == 1.2345f) out[0] = all;
}

// A block copies `read` bytes of its own into shared memory, 96 KB of them under way, and writes `written` bytes.
__global__ void __launch_bounds__(256, 1) copy(const float* in, float* out, long long read, long long written) {
    SHARED(memory);
    constexpr int PART = 256 * 16 * 4, DEPTH = 6;
    const unsigned char* from = reinterpret_cast<const unsigned char*>(in) + blockIdx.x * read + threadIdx.x * 16;
    const int parts = static_cast<int>(read / PART);
    for (int n = 0; n < parts; ++n) {
        for (int j = 0; j < 4; ++j)
            copy16(memory + n % DEPTH * PART + j * 4096 + threadIdx.x * 16, from + n * PART + j * 4096, true);
        copy_commit();
        copy_wait<DEPTH - 1>();
    }
    copy_wait<0>();
    __syncthreads();
    const float4 value = *reinterpret_cast<const float4*>(memory + threadIdx.x * 16);
    unsigned char* to = reinterpret_cast<unsigned char*>(out) + blockIdx.x * written;
    for (long long at = threadIdx.x * 16; at < written; at += 256 * 16) *reinterpret_cast<float4*>(to + at) = value;
}

// HOW 0: nothing; 1: two cluster barriers; 2: two barriers of all blocks through L2.
template <int HOW>
__global__ void __launch_bounds__(256, 1) meet(unsigned* counter) {
    if (HOW == 1) {
        cluster_sync();
        cluster_sync();
    }
    if (HOW == 2) {
        unsigned phase = gpu_phase(counter);
        for (int i = 0; i < 2; ++i) {
            gpu_arrive(counter, blockIdx.x == 0, gridDim.x);
            phase = gpu_wait(counter, phase);
        }
    }
}
"""
SOURCE = CudaSource(Path(__file__), text=CUDA)
SAMPLES = 15


def graph_us(call: Any) -> float:
    """Return the median µs of a call in a CUDA graph."""
    call()
    return statistics.median(open_graph(call, 1)(SAMPLES)["graph"]) / 1000


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{torch.cuda.get_device_name()}, {sms} SMs")
    out = torch.zeros(1, device="cuda")
    for shared, words in (("false", "registers alone"), ("true", "from shared memory")):
        kernel = SOURCE.kernel(f"multiply_add<{shared}>", shared_bytes=40 * 1024)
        rounds = 200
        spent = graph_us(lambda k=kernel: k.launch((sms,), (256,), out, 200))
        flop = 2 * 128 * 128 * 32 * rounds * sms
        print(f"fp32, {words:20} {flop / spent / 1e6:6.1f} TFLOP/s")
    for block in (65536, 131072, 262144):  # 33.6, 67.1 and 134.2 MB in all
        source = torch.randn(128 * 3 * block // 4, device="cuda")
        target = torch.empty(128 * block // 4, device="cuda")
        kernel = SOURCE.kernel("copy", shared_bytes=96 * 1024)
        sizes = (np.int64(3 * block), np.int64(block))
        spent = graph_us(
            lambda s=source, t=target, k=kernel, n=sizes: k.launch((128,), (256,), s, t, *n)
        )
        moved = 128 * 4 * block
        print(
            f"copy of {moved / 1e6:6.1f} MB          {spent:8.2f} us  {moved / spent / 1e6:5.2f} TB/s"
        )
    counter = torch.zeros(32, dtype=torch.int32, device="cuda")
    for how, words, blocks, options in (
        (0, "launch of 128 blocks", 128, {}),
        (1, "two meetings, cluster of 16", 16, {"cluster": (16, 1, 1)}),
        (2, "two meetings of 128 by L2", 128, {"cooperative": True}),
    ):
        kernel = SOURCE.kernel(f"meet<{how}>", cluster=16 if how == 1 else 1)
        spent = graph_us(lambda k=kernel, n=blocks, o=options: k.launch((n,), (256,), counter, **o))
        print(f"{words:28}{spent:6.2f} us")
    kernel = SOURCE.kernel("meet<1>", shared_bytes=220 * 1024, cluster=8)
    held = kernel.max_active_clusters((128,), (256,), (8, 1, 1))
    print(f"clusters of 8 blocks with 220 KB that can be there at once: {held}")


if __name__ == "__main__":
    main()
