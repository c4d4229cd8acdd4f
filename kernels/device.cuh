// GPU primitives of the kernels in this folder: conversions, asynchronous copies, clusters, tensor cores.
// Needs no header of the CUDA toolkit, so NVRTC and nvcc compile it alike (sm_90a, C++17). Facts are from the
// PTX ISA. tests/kernels/emulator has a version of every function here that runs on the CPU.
#pragma once
#ifndef PROFHARNESS_EMULATOR

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// Declares the dynamic shared memory of the block. In a template, one name for all instances.
#define SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

struct fp16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};

template <class T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<bf16> = true;

// Conversions, to nearest even.

__device__ __forceinline__ float to_float(float value) { return value; }

__device__ __forceinline__ float to_float(fp16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}

__device__ __forceinline__ float to_float(bf16 value) {
    return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

template <class T>
__device__ T from_float(float value);

template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}

template <>
__device__ __forceinline__ fp16 from_float<fp16>(float value) {
    fp16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

template <>
__device__ __forceinline__ bf16 from_float<bf16>(float value) {
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

// Two 16-bit values in a word, `low` in bits 0 to 15.
template <class T>
__device__ unsigned pack2(float low, float high);

template <>
__device__ __forceinline__ unsigned pack2<fp16>(float low, float high) {
    unsigned result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

template <>
__device__ __forceinline__ unsigned pack2<bf16>(float low, float high) {
    unsigned result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

// Asynchronous copies from global to shared memory.

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// 16 bytes, both addresses multiples of 16. Where not `there`, zeros are written and `global` is not read.
__device__ __forceinline__ void copy16(void* shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(there ? 16 : 0)
                 : "memory");
}

// Closes this thread's group of copies; it may be empty.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits until at most the N latest groups of this thread are pending. Other threads see the data after a barrier.
template <int N>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

// Barriers and clusters.

__device__ __forceinline__ void block_sync() { __syncthreads(); }

__device__ __forceinline__ int cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

// All threads of the cluster arrive; what they wrote before is seen after cluster_wait().
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// The same place in the shared memory of block `rank` of the cluster. That block must live until it was used.
template <class T>
__device__ __forceinline__ T* peer(T* shared, int rank) {
    unsigned long long result;
    asm("mapa.u64 %0, %1, %2;" : "=l"(result) : "l"(shared), "r"(rank));
    return reinterpret_cast<T*>(result);
}

// Warp-wide functions; all 32 threads call them together.

// Four 8 x 8 matrices of 16-bit values. Thread i gives the address of row i % 8 of matrix i / 8, a multiple of 16;
// it gets in r[m] elements 2 * (i % 4) and the next of row i / 4 of matrix m.
__device__ __forceinline__ void ldmatrix4(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same of the transposed matrices.
__device__ __forceinline__ void ldmatrix4_trans(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c += a * b, a is 16 x 16, b 16 x 8, c 16 x 8. With g = lane / 4 and t = lane % 4 a thread holds, low half first:
// a[0], a[1], a[2], a[3]: columns 2t, 2t + 1 of rows g, g + 8, then columns 2t + 8, 2t + 9 of rows g, g + 8;
// b[0], b[1]: rows 2t, 2t + 1, then rows 2t + 8, 2t + 9 of column g; c: columns 2t, 2t + 1 of row g, then of g + 8.
template <class T>
__device__ void mma16816(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

template <>
__device__ __forceinline__ void mma16816<fp16>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma16816<bf16>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ float shuffle_xor(float value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

// 2 to the power of `value`, relative error below 2^-22; subnormal results become 0.
__device__ __forceinline__ float exp2_fast(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// A launch with overlap starts while the kernel before it ends. wait_for_previous() stands before the first access to memory
// that the other may still use; let_next_start() lets the next kernel in the stream start as early.

__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" : : : "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// Through L2, where blocks of one launch see each other's writes.

__device__ __forceinline__ void load_l2(float (&to)[1], const float* from) {
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(to[0]) : "l"(__cvta_generic_to_global(from)) : "memory");
}

__device__ __forceinline__ void load_l2(float (&to)[2], const float* from) {
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
                 : "=f"(to[0]), "=f"(to[1])
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
}

__device__ __forceinline__ void load_l2(float (&to)[4], const float* from) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
}

// Barriers of `blocks` blocks that are resident together (a cooperative launch); all their threads call it. `counter` is
// theirs alone and zero before its first use; exactly one of them is `first`. Its bit 31, the phase, turns when the last one
// arrives, and the bits below are zero again: nothing is to be reset. Call gpu_phase() once, before the first barrier of a
// launch; every wait takes the phase that the one before gave. What was written before gpu_arrive() is seen after gpu_wait().
__device__ __forceinline__ unsigned gpu_phase(const unsigned* counter) {
    unsigned value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(counter)) : "memory");
    return value & 0x80000000u;
}

__device__ __forceinline__ void gpu_arrive(unsigned* counter, bool first, int blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned step = first ? 0x80000000u - static_cast<unsigned>(blocks - 1) : 1u;
        asm volatile("red.release.gpu.global.add.u32 [%0], %1;"
                     :
                     : "l"(__cvta_generic_to_global(counter)), "r"(step)
                     : "memory");
    }
}

__device__ __forceinline__ unsigned gpu_wait(const unsigned* counter, unsigned phase) {
    if (threadIdx.x == 0) {
        unsigned now;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                         : "=r"(now)
                         : "l"(__cvta_generic_to_global(counter))
                         : "memory");
        } while ((now & 0x80000000u) == phase);
    }
    __syncthreads();
    return phase ^ 0x80000000u;
}

#endif  // PROFHARNESS_EMULATOR
