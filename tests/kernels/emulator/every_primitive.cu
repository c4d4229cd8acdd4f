// Calls every function of device.cuh and wgmma.cuh once for each type: what the compilers must take.
#include "wgmma.cuh"

template <class T>
__global__ void __launch_bounds__(128) every_primitive(float* out, const T* in, unsigned* counter, int n) {
    SHARED(memory);
    const int thread = threadIdx.x;
    let_next_start();
    wait_for_previous();
    copy16(memory + 16 * thread, in + 8 * thread, thread < n);
    copy_commit();
    copy_wait<0>();
    block_sync();
    cluster_arrive();
    cluster_wait();
    const float other = *peer(reinterpret_cast<float*>(memory) + thread, cluster_rank() ^ 1);
    unsigned a[4], b[4];
    ldmatrix4(a, memory + 16 * thread);
    ldmatrix4_trans(b, memory + 16 * thread);
    float c[4] = {0.0f, other, -INFINITY, 0.0f};
    const unsigned half[2] = {b[0], b[1]};
    mma16816<T>(c, a, half);
    const unsigned packed = pack2<T>(c[0], c[1]);
    const float4 four = *reinterpret_cast<const float4*>(memory + 16 * thread);
    cluster_sync();
    const unsigned phase = gpu_phase(counter);
    gpu_arrive(counter, blockIdx.x == 0, gridDim.x);
    gpu_wait(counter, phase);
    float one[1], two[2], all[4];
    load_l2(one, out + 4 * thread);
    load_l2(two, out + 4 * thread);
    load_l2(all, out + 4 * thread);
    const float mixed = shuffle_xor(exp2_fast(c[2]), 1) + four.x + one[0] + two[1] + all[3] + __uint_as_float(packed);
    out[thread] = to_float(from_float<T>(mixed)) + from_float<float>(to_float(c[3]));
#ifdef WGMMA
    fence_async_shared();
    block_sync();
    float few[32] = {}, many[64] = {};
    wgmma_fence();
    wgmma<T, 64, false>(few, wgmma_operand(memory, 16, 1024), wgmma_operand(memory + 8192, 16, 1024));
    wgmma<T, 64, true>(few, wgmma_operand(memory, 16, 1024), wgmma_operand(memory + 8192, 8192, 1024));
    wgmma<T, 128, false>(many, wgmma_operand(memory, 16, 1024), wgmma_operand(memory + 8192, 16, 1024));
    wgmma<T, 128, true>(many, wgmma_operand(memory, 16, 1024), wgmma_operand(memory + 8192, 8192, 1024));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(few);
    wgmma_hold(many);
    for (int i = 0; i < 32; ++i) out[thread] += few[i] + many[i] + many[32 + i];
#endif
}

template __global__ void every_primitive<fp16>(float*, const fp16*, unsigned*, int);
template __global__ void every_primitive<bf16>(float*, const bf16*, unsigned*, int);
