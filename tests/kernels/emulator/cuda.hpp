// What CUDA C++ knows without a header: keywords, built-in variables, vector types, intrinsics. Force-included.
#pragma once
#include <algorithm>

#include "launch.hpp"
#include "primitives.hpp"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) alignas(n)
#define __shared__ static_assert(false, "the emulator has dynamic shared memory only: use SHARED(name)");

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block->index)
constexpr int warpSize = 32;

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline void __syncthreads(emulator::Place place = emulator::Place::current()) {
    emulator::block_barrier("__syncthreads", place);
}

inline void __syncwarp(unsigned mask = ~0u, emulator::Place place = emulator::Place::current()) {
    int none = 0;
    emulator::collective("__syncwarp", mask, none, place, [](int**, unsigned) {});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, emulator::Place place = emulator::Place::current()) {
    const int own = emulator::current->lane, source = own ^ lanes;
    return emulator::shuffle("__shfl_xor_sync", mask, value, source / width > own / width ? own : source & 31, place);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, emulator::Place place = emulator::Place::current()) {
    const int segment = emulator::current->lane & ~(width - 1);
    return emulator::shuffle("__shfl_sync", mask, value, segment | (source & (width - 1)), place);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32, emulator::Place place = emulator::Place::current()) {
    const int own = emulator::current->lane, inside = (own & (width - 1)) + delta < width;
    return emulator::shuffle("__shfl_down_sync", mask, value, inside ? own + delta : own, place);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32, emulator::Place place = emulator::Place::current()) {
    const int own = emulator::current->lane, inside = (own & (width - 1)) >= delta;
    return emulator::shuffle("__shfl_up_sync", mask, value, inside ? own - delta : own, place);
}

inline unsigned __ballot_sync(unsigned mask, int value, emulator::Place place = emulator::Place::current()) {
    std::pair<int, unsigned> own{value, 0};
    emulator::collective("__ballot_sync", mask, own, place, [](std::pair<int, unsigned>** lanes, unsigned all) {
        unsigned votes = 0;
        for (unsigned left = all; left; left &= left - 1)
            if (lanes[__builtin_ctz(left)]->first) votes |= left & -left;
        for (unsigned left = all; left; left &= left - 1) lanes[__builtin_ctz(left)]->second = votes;
    });
    return own.second;
}

inline int __any_sync(unsigned mask, int value, emulator::Place place = emulator::Place::current()) {
    return __ballot_sync(mask, value, place) != 0;
}

inline int __all_sync(unsigned mask, int value, emulator::Place place = emulator::Place::current()) {
    return __ballot_sync(mask, !value, place) == 0;
}

inline void __threadfence() {}
inline void __threadfence_block() {}

// Threads run one at a time, so a plain read and write is atomic.
template <class T>
T atomicAdd(T* at, T value) {
    return std::exchange(*at, *at + value);
}
template <class T>
T atomicMax(T* at, T value) {
    return std::exchange(*at, std::max(*at, value));
}
template <class T>
T atomicCAS(T* at, T expected, T value) {
    return *at == expected ? std::exchange(*at, value) : *at;
}

template <class T>
T __ldg(const T* at) {
    return *at;
}

template <class A, class B>
constexpr auto min(A a, B b) -> decltype(a + b) {
    return b < a ? b : a;
}
template <class A, class B>
constexpr auto max(A a, B b) -> decltype(a + b) {
    return a < b ? b : a;
}

inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float value) { return 1.0f / value; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __int_as_float(int value) { return std::bit_cast<float>(value); }
inline float __uint_as_float(unsigned value) { return std::bit_cast<float>(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __ffs(int value) { return __builtin_ffs(value); }
// The C library has hidden functions of these names.
#define __expf(value) expf(value)
#define __logf(value) logf(value)
#define __log2f(value) log2f(value)
#define __powf(base, exponent) powf(base, exponent)
#define __trap() emulator::fail(emulator::Place::current(), "__trap()")
