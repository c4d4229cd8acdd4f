// Small kernels for the tests of the emulator: each function of device.cuh alone, and each mistake alone.
#include "device.cuh"
#include "wgmma.cuh"

template <class T>
__global__ void convert(const T* from, float* widened, const float* values, T* narrowed, unsigned* packed, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        widened[i] = to_float(from[i]);
        narrowed[i] = from_float<T>(values[i]);
        packed[i] = pack2<T>(values[i], values[n - 1 - i]);
    }
}

__global__ void exponential(const float* in, float* out) { out[threadIdx.x] = exp2_fast(in[threadIdx.x]); }

// One warp, `bytes` of 32 rows of 16 bytes that lie in shared memory.
template <bool transposed>
__global__ void matrices(const float4* rows, unsigned* out, int offset) {
    SHARED(memory);
    float4* place = reinterpret_cast<float4*>(memory);
    place[threadIdx.x] = rows[threadIdx.x];
    __syncwarp();
    unsigned r[4];
    const unsigned char* row = memory + 16 * threadIdx.x + offset;
    if (transposed)
        ldmatrix4_trans(r, row);
    else
        ldmatrix4(r, row);
    for (int m = 0; m < 4; ++m) out[4 * threadIdx.x + m] = r[m];
}

// c = a @ b + c for a [16, 16], b [16, 8], c [16, 8], row after row in memory.
template <class T>
__global__ void product(const T* a, const T* b, float* c) {
    SHARED(memory);
    T* shared_a = reinterpret_cast<T*>(memory);
    T* shared_b = shared_a + 256;
    const int lane = threadIdx.x, row = lane / 4, column = 2 * (lane % 4);
    for (int i = lane; i < 256; i += 32) shared_a[i] = a[i];
    for (int i = lane; i < 128; i += 32) shared_b[i] = b[i];
    __syncwarp();
    unsigned left[4], right[4];
    ldmatrix4(left, shared_a + (lane % 16) * 16 + (lane / 16) * 8);
    ldmatrix4_trans(right, shared_b + (lane % 16) * 8);
    const unsigned half[2] = {right[0], right[1]};
    float sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = c[(row + 8 * (i / 2)) * 8 + column + i % 2];
    mma16816<T>(sums, left, half);
    for (int i = 0; i < 4; ++i) c[(row + 8 * (i / 2)) * 8 + column + i % 2] = sums[i];
}

// Copies two groups; shows what stands in shared memory when at most `pending` may be unfinished.
template <int pending, bool with_wait>
__global__ void copy(const float4* first, const float4* second, float4* out, int there) {
    SHARED(memory);
    float4* place = reinterpret_cast<float4*>(memory);
    const int thread = threadIdx.x;
    place[thread] = place[32 + thread] = make_float4(7, 7, 7, 7);
    __syncwarp();
    copy16(place + thread, first + thread, true);
    copy_commit();
    copy16(place + 32 + thread, second + thread, thread < there);
    copy_commit();
    if (with_wait) copy_wait<pending>();
    out[thread] = place[thread];
    out[32 + thread] = place[32 + thread];
}

__global__ void copy_at(const unsigned char* from, int shared_at, int global_at) {
    SHARED(memory);
    copy16(memory + shared_at, from + global_at, true);
    copy_commit();
    copy_wait<0>();
}

template <bool with_barrier>
__global__ void reverse(const float* in, float* out) {
    SHARED(memory);
    float* place = reinterpret_cast<float*>(memory);
    place[threadIdx.x] = in[threadIdx.x];
    if (with_barrier) block_sync();
    out[threadIdx.x] = place[blockDim.x - 1 - threadIdx.x];
}

// A tile that is filled again while slow warps still read it.
template <bool with_barrier>
__global__ void refill(float* out) {
    SHARED(memory);
    float* place = reinterpret_cast<float*>(memory);
    float sum = 0;
    for (int step = 0; step < 4; ++step) {
        place[threadIdx.x] = step;
        block_sync();
        sum = 10 * sum + place[blockDim.x - 1 - threadIdx.x];
        if (with_barrier) block_sync();
    }
    out[threadIdx.x] = sum;
}

template <bool with_barrier>
__global__ void neighbours(float* out) {
    SHARED(memory);
    float* place = reinterpret_cast<float*>(memory);
    place[threadIdx.x] = threadIdx.x;
    if (with_barrier) __syncwarp();
    out[threadIdx.x] = place[threadIdx.x ^ 5];
}

// out[block, thread]: what the next block of the cluster wrote. 0: right, 1: no wait, 2: ends too early.
template <int mistake>
__global__ void exchange(float* out) {
    SHARED(memory);
    float* place = reinterpret_cast<float*>(memory);
    const int size = static_cast<int>(gridDim.x) / 2, rank = cluster_rank();
    place[threadIdx.x] = 1000 * blockIdx.x + threadIdx.x;
    cluster_arrive();
    if (mistake != 1) cluster_wait();
    const float got = peer(place, (rank + 1) % size)[threadIdx.x];
    if (mistake == 1) cluster_wait();
    if (mistake != 2) cluster_sync();
    out[blockIdx.x * blockDim.x + threadIdx.x] = got;
}

__global__ void half_barrier() {
    if (threadIdx.x < 40) block_sync();
}

__global__ void half_product(float* out) {
    float c[4] = {};
    const unsigned a[4] = {}, b[2] = {};
    if (threadIdx.x < 16)
        mma16816<fp16>(c, a, b);
    else
        block_sync();
    out[threadIdx.x] = c[0];
}

__global__ void arrive_twice() {
    cluster_arrive();
    cluster_arrive();
}

__global__ void access(float* memory, int read_at, int write_at, int shared_at) {
    SHARED(shared);
    if (threadIdx.x == 3) {
        reinterpret_cast<float*>(shared)[shared_at] = 1;
        memory[write_at] = memory[read_at];
    }
}

__global__ void forever(int* flag) {
    while (*static_cast<volatile int*>(flag) == 0) {
    }
}

__global__ void indices(int* out) {
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1 + 1000 * block + thread;
}

__global__ void warp_functions(const float* in, float* out) {
    const int lane = threadIdx.x;
    float sum = in[lane];
    for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    out[lane] = sum;
    out[32 + lane] = __shfl_sync(0xffffffffu, in[lane], lane + 3, 8);
    out[64 + lane] = __shfl_xor_sync(0xffffffffu, in[lane], 1);
    out[96 + lane] = __shfl_down_sync(0xffffffffu, in[lane], 4);
    out[128 + lane] = static_cast<float>(__ballot_sync(0xffffffffu, lane % 3 == 0) >> 8);
}

__global__ void numbers(float* out, int a, float b, long long c, double d, bool e) {
    out[0] = a, out[1] = b, out[2] = c, out[3] = d, out[4] = e ? 1.0f : 0.0f;
}

__global__ void large_floats(float* out) {
    out[0] = fmaxf(out[0], -INFINITY) + max(1, 2) + __expf(0.0f) + __ldg(out + 1) + exp2f(3.0f);
}

__global__ void misaligned(const float* in, float* out, int at) {
    const float4 value = *reinterpret_cast<const float4*>(in + at);
    out[0] = value.x + value.w;
}

__global__ void outside_of_array(float* out, int at) {
    float values[4] = {};
    for (int i = 0; i < at; ++i) values[i] = out[i];
    out[0] = values[at % 4];
}

__global__ void large_stack(float* out) {
    volatile float values[1 << 20];
    for (int i = 0; i < 1 << 20; i += 512) values[i] = out[0];
    out[0] = values[512];
}

// Every block of a cooperative launch tells all the others a number, twice. 0: right, 1: nobody is the first, 2: two are,
// 3: no wait, 4: waits for more blocks than there are.
template <int mistake>
__global__ void meeting(float* numbers, float* out, unsigned* counter) {
    const int blocks = gridDim.x, block = blockIdx.x;
    const bool first = mistake == 1 ? false : block <= (mistake == 2 ? 1 : 0);
    const auto meet = [&](unsigned phase) {
        gpu_arrive(counter, first, mistake == 4 ? blocks + 1 : blocks);
        return mistake == 3 ? phase : gpu_wait(counter, phase);
    };
    float sum = 0;
    unsigned phase = gpu_phase(counter);
    for (int round = 0; round < 2; ++round) {
        if (threadIdx.x == 0) numbers[block] = block + 100 * round;
        phase = meet(phase);
        for (int other = 0; other < blocks; ++other) {
            float got[1];
            load_l2(got, numbers + other);
            sum += got[0];
        }
        if (round == 0) phase = meet(phase);
    }
    out[block * blockDim.x + threadIdx.x] = sum;
}

// out: 7 numbers, as one, two and four.
__global__ void from_l2(const float* in, float* out) {
    float one[1], two[2], four[4];
    load_l2(four, in);
    load_l2(two, in + 4);
    load_l2(one, in + 6);
    for (int i = 0; i < 4; ++i) out[i] = four[i];
    out[4] = two[0], out[5] = two[1], out[6] = one[0];
}

// c += a @ b of two warpgroups in four steps: a [128, 64]; b [N, 64], or [64, N] if rows_summed; c [128, N]. a_shift, b_shift:
// bytes that the operands are misplaced by.
template <class T, int N, bool rows_summed>
__global__ void warpgroups(const T* a, const T* b, float* c, int a_shift, int b_shift) {
    SHARED(memory);
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    const auto put = [&](int at, int row, int column, const T* from) {
        const int chunk = column / 8 ^ row % 8;
        reinterpret_cast<T*>(memory + at)[row * 64 + chunk * 8 + column % 8] = *from;
    };
    for (int i = threadIdx.x; i < 128 * 64; i += blockDim.x) put(0, i / 64, i % 64, a + i);
    for (int i = threadIdx.x; i < N * 64; i += blockDim.x) {
        if (rows_summed)
            put(16384 + i % N / 64 * 8192, i / N, i % 64, b + i);
        else
            put(16384, i / 64, i % 64, b + i);
    }
    fence_async_shared();
    block_sync();
    float sum[N / 2];
    const auto place = [&](int i) { return (row + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2; };
    for (int i = 0; i < N / 2; ++i) sum[i] = c[place(i)];
    wgmma_fence();
    for (int k = 0; k < 64; k += 16)
        wgmma<T, N, rows_summed>(sum, wgmma_operand(memory + a_shift + threadIdx.x / 128 * 8192 + k * 2, 16, 1024),
                                 wgmma_operand(memory + b_shift + 16384 + k * (rows_summed ? 128 : 2),
                                               rows_summed ? 8192 : 16, 1024));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(sum);
    for (int i = 0; i < N / 2; ++i) c[place(i)] = sum[i];
}
