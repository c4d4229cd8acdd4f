// Warpgroup matrix products of Hopper (sm_90a): four warps together, operands in shared memory, asynchronous. Facts are from
// the PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". tests/kernels/emulator has its own version.
#pragma once
#include "device.cuh"
#ifndef PROFHARNESS_EMULATOR
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA 1

// Shared memory written by ordinary stores or copy16 is seen by wgmma after this, then a barrier.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(N) : "memory");
}

// Sums that products under way may change are neither read nor moved across this.
template <int N>
__device__ __forceinline__ void wgmma_hold(float (&sum)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sum[i]) : : "memory");
}

// An operand in rows of 128 bytes whose 16-byte chunks are swizzled: chunk c of row r stands at c ^ r % 8; the pattern starts
// at a multiple of 1024 bytes. stride: bytes from eight rows to the next eight. leading: where the rows are along the summed
// dimension, bytes from 64 columns to the next 64.
__device__ __forceinline__ unsigned long long wgmma_operand(const void* shared, int leading, int stride) {
    const auto field = [](int bytes) { return static_cast<unsigned long long>(bytes & 0x3ffff) >> 4; };
    return field(static_cast<int>(shared_address(shared))) | field(leading) << 16 | field(stride) << 32 | 1ull << 62;
}

#define SUMS8(i)                                                                                                       \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])

#define WGMMA_64(type)                                                                                                 \
    asm volatile(                                                                                                      \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                                               \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                                                \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                      \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                            \
        "%32, %33, add, 1, 1, 0, %35;\n}\n"                                                                            \
        : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24)                                                                     \
        : "l"(a), "l"(b), "r"(1), "n"(ROWS_SUMMED ? 1 : 0))

#define WGMMA_128(type)                                                                                                \
    asm volatile(                                                                                                      \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                                               \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "                                               \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                      \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                             \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                             \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                            \
        "%64, %65, add, 1, 1, 0, %67;\n}\n"                                                                            \
        : SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24),                                                                    \
          SUMS8(32), SUMS8(40), SUMS8(48), SUMS8(56)                                                                   \
        : "l"(a), "l"(b), "r"(1), "n"(ROWS_SUMMED ? 1 : 0))

// c += a * b of a warpgroup: a is 64 x 16, in rows of 16; b is 16 x N, given as N rows of 16 or, if ROWS_SUMMED, as 16 rows of N.
// Warp w of the four has rows 16 w to 16 w + 15, for every eight columns in the layout of mma16816.
template <class T, int N, bool ROWS_SUMMED>
__device__ __forceinline__ void wgmma(float (&c)[N / 2], unsigned long long a, unsigned long long b) {
    static_assert(N == 64 || N == 128, "columns");
    if constexpr (N == 64) {
        if constexpr (is_bf16<T>)
            WGMMA_64("bf16");
        else
            WGMMA_64("f16");
    } else {
        if constexpr (is_bf16<T>)
            WGMMA_128("bf16");
        else
            WGMMA_128("f16");
    }
}

#undef WGMMA_64
#undef WGMMA_128
#undef SUMS8
#endif  // __CUDA_ARCH_FEAT_SM90_ALL
#endif  // PROFHARNESS_EMULATOR
