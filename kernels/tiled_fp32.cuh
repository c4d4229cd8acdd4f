// The arithmetic of tiled.cu in fp32: outer products on the CUDA cores, each thread a block of rows x columns in
// registers. Operands come from shared memory four at a time along the summed dimension.
#pragma once
#include "device.cuh"

// BM query rows, BN keys, BK columns of head_dim a stage, PC columns of the output a pass.
template <int BM, int BN, int BK, int PC>
struct Fp32Tile {
    using Element = float;
    static constexpr int THREADS = 256;
    static constexpr int VK = BN < 16 ? BN : 16;  // keys of V a copy
    static constexpr int STAGE_PITCH = BK + 4;    // floats; 4 more keep eight rows in different banks
    static constexpr int STAGE_BYTES = (BM + BN) * STAGE_PITCH * 4;
    static constexpr int V_BYTES = VK * PC * 4;
    static constexpr int WEIGHTS_PITCH = BN + 4;
    static constexpr int WEIGHTS_BYTES = BM * WEIGHTS_PITCH * 4;
    static constexpr int STAGING_BYTES = 0;

    // Scores: TM x TN a thread, LANES threads side by side; GROUPS of threads share out the columns of a stage.
    static constexpr int TM = BM / 4 < 8 ? BM / 4 : 8;
    static constexpr int LANES = BN < 32 && BM < 32 ? 4 : 8;
    static constexpr int TN = BN / LANES;
    static constexpr int GROUP_THREADS = BM / TM * LANES;
    static constexpr int GROUPS = THREADS / GROUP_THREADS;
    static_assert(GROUP_THREADS <= THREADS && BK % 32 == 0 && BK / 4 >= GROUPS, "scores");

    static constexpr int UNROLL = TM * TN <= 64 ? 4 : 1;  // more does not fit the instruction cache

    // Output: OM x ON a thread.
    static constexpr int AREA = BM * PC / THREADS;
    static constexpr int ON = AREA >= 128 ? 16 : AREA >= 32 ? 8 : 4;
    static constexpr int OM = AREA / ON;
    static constexpr int ROW_THREADS = BM / OM;
    static constexpr int COLUMN_THREADS = PC / ON;
    static_assert(ROW_THREADS * COLUMN_THREADS == THREADS && ROW_THREADS % 4 == 0, "output");

    __device__ static int stage_offset(int row, int chunk) { return row * STAGE_PITCH * 4 + chunk * 16; }
    __device__ static int value_offset(int key, int chunk) { return key * PC * 4 + chunk * 16; }
    __device__ static int weight_offset(int row, int column) { return (row * WEIGHTS_PITCH + column) * 4; }
    __device__ static void publish() {}

    struct Scores {
        float sum[TM][TN];

        __device__ void clear() {
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) sum[i][j] = 0;
        }

        __device__ void finish() {}
        __device__ static int group() { return threadIdx.x / GROUP_THREADS; }
        __device__ static int row() { return threadIdx.x % GROUP_THREADS / LANES; }
        __device__ static int column() { return threadIdx.x % LANES; }

        __device__ void add(const unsigned char* stage) {
            const float* queries = reinterpret_cast<const float*>(stage) + row() * STAGE_PITCH;
            const float* keys = reinterpret_cast<const float*>(stage) + (BM + column()) * STAGE_PITCH;
#pragma unroll UNROLL
            for (int step = 0; step < BK / 4 / GROUPS; ++step) {
                const int at = (step * GROUPS + group()) * 4;
                float4 a[TM];
#pragma unroll
                for (int i = 0; i < TM; ++i)
                    a[i] = *reinterpret_cast<const float4*>(queries + i * (BM / TM) * STAGE_PITCH + at);
#pragma unroll
                for (int j = 0; j < TN; ++j) {
                    const float4 b = *reinterpret_cast<const float4*>(keys + j * LANES * STAGE_PITCH + at);
#pragma unroll
                    for (int i = 0; i < TM; ++i) sum[i][j] = fmaf(a[i].x, b.x, sum[i][j]);
#pragma unroll
                    for (int i = 0; i < TM; ++i) sum[i][j] = fmaf(a[i].y, b.y, sum[i][j]);
#pragma unroll
                    for (int i = 0; i < TM; ++i) sum[i][j] = fmaf(a[i].z, b.z, sum[i][j]);
#pragma unroll
                    for (int i = 0; i < TM; ++i) sum[i][j] = fmaf(a[i].w, b.w, sum[i][j]);
                }
            }
        }

        // parts: GROUPS x BM x pitch
        __device__ void put(float* parts, int pitch) const {
            float* at = parts + (group() * BM + row()) * pitch + column();
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) at[i * (BM / TM) * pitch + j * LANES] = sum[i][j];
        }
    };

    struct Output {
        float sum[OM][ON];

        __device__ void clear() {
#pragma unroll
            for (int i = 0; i < OM; ++i)
#pragma unroll
                for (int j = 0; j < ON; ++j) sum[i][j] = 0;
        }

        __device__ void finish() {}
        // A warp is 4 rows x 8 columns of threads; warps go down the rows first.
        __device__ static int row() {
            return threadIdx.x / 32 % (ROW_THREADS / 4) * 4 + threadIdx.x % 32 / 8;
        }
        __device__ static int column() {
            return (threadIdx.x / 32 / (ROW_THREADS / 4) * 8 + threadIdx.x % 8) * 4;
        }

        // factors: one a row of the tile
        __device__ void scale(const float* factors) {
#pragma unroll
            for (int i = 0; i < OM; ++i) {
                const float factor = factors[row() + i * ROW_THREADS];
#pragma unroll
                for (int j = 0; j < ON; ++j) sum[i][j] *= factor;
            }
        }

        __device__ void add(const float* weights, const unsigned char* values, int key) {
            const float* p = weights + row() * WEIGHTS_PITCH + key;
            const float* v = reinterpret_cast<const float*>(values) + column();
#pragma unroll UNROLL
            for (int quad = 0; quad < VK; quad += 4) {
                float4 a[OM];
#pragma unroll
                for (int i = 0; i < OM; ++i)
                    a[i] = *reinterpret_cast<const float4*>(p + i * ROW_THREADS * WEIGHTS_PITCH + quad);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    float4 b[ON / 4];
#pragma unroll
                    for (int j = 0; j < ON / 4; ++j)
                        b[j] = *reinterpret_cast<const float4*>(v + (quad + k) * PC + j * COLUMN_THREADS * 4);
#pragma unroll
                    for (int i = 0; i < OM; ++i) {
                        const float x = k == 0 ? a[i].x : k == 1 ? a[i].y : k == 2 ? a[i].z : a[i].w;
#pragma unroll
                        for (int j = 0; j < ON / 4; ++j) {
                            sum[i][4 * j] = fmaf(x, b[j].x, sum[i][4 * j]);
                            sum[i][4 * j + 1] = fmaf(x, b[j].y, sum[i][4 * j + 1]);
                            sum[i][4 * j + 2] = fmaf(x, b[j].z, sum[i][4 * j + 2]);
                            sum[i][4 * j + 3] = fmaf(x, b[j].w, sum[i][4 * j + 3]);
                        }
                    }
                }
            }
        }

        // out: the tile's first row and the pass's first column; rows and columns: how many of them exist.
        template <class Out>
        __device__ void store(Out* out, int pitch, int rows, int columns, unsigned char*) const {
#pragma unroll
            for (int i = 0; i < OM; ++i) {
                const int r = row() + i * ROW_THREADS;
#pragma unroll
                for (int j = 0; j < ON / 4; ++j) {
                    const int c = column() + j * COLUMN_THREADS * 4;
                    if (r < rows && c < columns)
                        *reinterpret_cast<float4*>(out + static_cast<long long>(r) * pitch + c) =
                            make_float4(sum[i][4 * j], sum[i][4 * j + 1], sum[i][4 * j + 2], sum[i][4 * j + 3]);
                }
            }
        }
    };
};
