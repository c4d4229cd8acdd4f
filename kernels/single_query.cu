// The classic slow attention kernel, kept to be studied: right, readable, and slow for reasons that a profiler shows.
//
//   * One block computes one query row, so K and V are read from memory again for every row: Sq times the traffic
//     that is needed. Blocks of the same head share nothing but what the L2 cache happens to hold.
//   * Shared memory holds the scores of all keys and no tile of K or V, so nothing that was loaded is used twice.
//   * There are two passes over the keys with the whole row of scores between them, where a running softmax has one.
//   * All products are scalar fp32 FMAs: the tensor cores stand still.
//
// tiled.cu and flash_triton.py do the opposite of each.
#include "device.cuh"

constexpr int WARP = 32;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

struct Maximum {
    static __device__ float of(float a, float b) { return fmaxf(a, b); }
};
struct Sum {
    static __device__ float of(float a, float b) { return a + b; }
};

template <class Operation>
__device__ float over_warp(float value) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) value = Operation::of(value, shuffle_xor(value, mask));
    return value;
}

// Every thread gets the result. `partial` has room for one value per warp; it may be used again after the return.
template <class Operation>
__device__ float over_block(float value, float* partial) {
    value = over_warp<Operation>(value);
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = value;
    block_sync();
    value = partial[0];
    for (int warp = 1; warp < WARPS; ++warp) value = Operation::of(value, partial[warp]);
    block_sync();
    return value;
}

// q [B, Hq, rows, d], k [B, Hq / group, columns, d], v [B, Hq / group, columns, dv], out [B, Hq, rows, dv]. Strides
// are in elements; the last dimension of each is contiguous, and out is contiguous altogether. The grid has B * Hq *
// rows blocks of THREADS threads. Dynamic shared memory: WARPS + columns floats.
template <class T>
__global__ void __launch_bounds__(THREADS)
    single_query(const T* q, const T* k, const T* v, T* out, float scale, int causal, int heads, int group, int rows,
                 int columns, int d, int dv, long long q_batch, long long q_head, long long q_row, long long k_batch,
                 long long k_head, long long k_row, long long v_batch, long long v_head, long long v_row) {
    SHARED(shared);
    float* partial = reinterpret_cast<float*>(shared);
    float* scores = partial + WARPS;

    const int row = blockIdx.x % rows;
    const int head = blockIdx.x / rows % heads;
    const int batch = blockIdx.x / rows / heads;
    q += batch * q_batch + head * q_head + row * q_row;
    k += batch * k_batch + head / group * k_head;
    v += batch * v_batch + head / group * v_head;
    out += static_cast<long long>(blockIdx.x) * dv;
    const int seen = causal && row + 1 < columns ? row + 1 : columns;
    const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;

    // scores: a warp per key, its lanes along the head dimension
    for (int key = warp; key < seen; key += WARPS) {
        float score = 0;
        for (int i = lane; i < d; i += WARP) score += to_float(q[i]) * to_float(k[key * k_row + i]);
        score = over_warp<Sum>(score);
        if (lane == 0) scores[key] = score * scale;
    }
    block_sync();

    // softmax over the row
    float best = -INFINITY;
    for (int key = thread; key < seen; key += THREADS) best = fmaxf(best, scores[key]);
    best = over_block<Maximum>(best, partial);
    float total = 0;
    for (int key = thread; key < seen; key += THREADS) {
        scores[key] = expf(scores[key] - best);
        total += scores[key];
    }
    total = over_block<Sum>(total, partial);  // its barriers also make all weights visible

    // output: a thread per column of V, over all keys
    for (int i = thread; i < dv; i += THREADS) {
        float sum = 0;
        for (int key = 0; key < seen; ++key) sum += scores[key] * to_float(v[key * v_row + i]);
        out[i] = from_float<T>(sum / total);
    }
}
