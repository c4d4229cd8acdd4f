// The arithmetic of tiled.cu in fp16 and bf16: mma.sync m16n8k16 on the tensor cores with fp32 sums. Operands come from
// shared memory through ldmatrix; rows of 128 bytes or more are swizzled in 16-byte chunks, so eight rows never meet in a bank.
#pragma once
#include "device.cuh"

// BM query rows, BN keys, BK columns of head_dim a stage, PC columns of the output a pass.
template <class T, int BM, int BN, int BK, int PC>
struct HalfTile {
    using Element = T;
    static constexpr int THREADS = 256;
    static constexpr int WARPS = THREADS / 32;
    static constexpr int VK = BN < 64 ? BN : 64;  // keys of V a copy
    static constexpr int STAGE_BYTES = (BM + BN) * BK * 2;
    static constexpr int V_BYTES = VK * PC * 2;
    static constexpr int WEIGHTS_PITCH = BN + 8;
    static constexpr int WEIGHTS_BYTES = BM * WEIGHTS_PITCH * 2;
    static_assert(BK % 64 == 0 && PC % 64 == 0 && BM % 16 == 0 && BN % 16 == 0, "whole swizzled rows");

    // Scores: WM x WN warps; GROUPS of them share out the columns of a stage, the rest of the warps wait.
    static constexpr int WM = BM / 16 < 4 ? BM / 16 : 4;
    static constexpr int WN = BN / 16 < WARPS / WM ? BN / 16 : WARPS / WM;
    static constexpr int GROUPS = WARPS / (WM * WN) < BK / 16 ? WARPS / (WM * WN) : BK / 16;
    static constexpr int SM = BM / WM / 16;  // tiles of 16 rows a warp
    static constexpr int SN = BN / WN / 16;  // pairs of tiles of 8 columns a warp

    // Output: OWM x OWN warps, each OM tiles of 16 rows and ON pairs of tiles of 8 columns.
    static constexpr int OWM = BM >= 128 ? 4 : BM >= 64 ? 2 : 1;
    static constexpr int OWN = PC / 16 < WARPS / OWM ? PC / 16 : WARPS / OWM;
    static constexpr int OM = BM / OWM / 16;
    static constexpr int ON = PC / OWN / 16;
    static constexpr int STAGING_PITCH = ON * 16 + 8;
    static constexpr int STAGING_BYTES = WARPS * 16 * STAGING_PITCH * 2;

    __device__ static int swizzled(int row, int chunk) { return (chunk & ~7) | ((chunk ^ row) & 7); }
    __device__ static int stage_offset(int row, int chunk) { return row * BK * 2 + swizzled(row, chunk) * 16; }
    __device__ static int value_offset(int key, int chunk) { return key * PC * 2 + swizzled(key, chunk) * 16; }
    __device__ static int weight_offset(int row, int column) { return (row * WEIGHTS_PITCH + column) * 2; }
    __device__ static void publish() {}
    // The byte offset of chunk c + x in a row, from `lane_part` = x ^ row % 8: x is 0 or 1, c even. Constant but for the lane.
    __device__ static int spot(int lane_part, int c) { return ((lane_part ^ (c & 7)) + (c & ~7)) * 16; }
    __device__ static int lane() { return threadIdx.x % 32; }
    __device__ static int warp() { return threadIdx.x / 32; }

    struct Scores {
        float sum[SM][2 * SN][4];

        __device__ void clear() {
#pragma unroll
            for (int i = 0; i < SM; ++i)
#pragma unroll
                for (int j = 0; j < 2 * SN; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[i][j][e] = 0;
        }

        __device__ void finish() {}
        __device__ static int group() { return WM * WN == WARPS ? 0 : warp() / (WM * WN); }
        __device__ static int row() { return warp() % WM * SM * 16; }
        __device__ static int column() { return warp() / WM % WN * SN * 16; }

        __device__ void add(const unsigned char* stage) {
            if (group() >= GROUPS) return;
            const int in_eight = lane() % 8;
            const unsigned char* queries = stage + (row() + lane() % 16) * BK * 2;
            const unsigned char* keys = stage + (BM + column() + lane() / 16 * 8 + in_eight) * BK * 2;
            const int query_part = lane() / 16 ^ in_eight, key_part = lane() / 8 % 2 ^ in_eight;
#pragma unroll
            for (int step = 0; step < BK / 16 / GROUPS; ++step) {
                const int chunk = (step * GROUPS + group()) * 2;
                unsigned a[SM][4];
#pragma unroll
                for (int i = 0; i < SM; ++i) ldmatrix4(a[i], queries + i * 16 * BK * 2 + spot(query_part, chunk));
#pragma unroll
                for (int j = 0; j < SN; ++j) {
                    unsigned b[4];
                    ldmatrix4(b, keys + j * 16 * BK * 2 + spot(key_part, chunk));
                    const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
                    for (int i = 0; i < SM; ++i) {
                        mma16816<T>(sum[i][2 * j], a[i], low);
                        mma16816<T>(sum[i][2 * j + 1], a[i], high);
                    }
                }
            }
        }

        // parts: GROUPS x BM x pitch
        __device__ void put(float* parts, int pitch) const {
            if (group() >= GROUPS) return;
            float* at = parts + (group() * BM + row() + lane() / 4) * pitch + column() + lane() % 4 * 2;
#pragma unroll
            for (int i = 0; i < SM; ++i)
#pragma unroll
                for (int j = 0; j < 2 * SN; ++j) {
                    *reinterpret_cast<float2*>(at + i * 16 * pitch + j * 8) = make_float2(sum[i][j][0], sum[i][j][1]);
                    *reinterpret_cast<float2*>(at + (i * 16 + 8) * pitch + j * 8) =
                        make_float2(sum[i][j][2], sum[i][j][3]);
                }
        }
    };

    struct Output {
        float sum[OM][2 * ON][4];

        __device__ void clear() {
#pragma unroll
            for (int i = 0; i < OM; ++i)
#pragma unroll
                for (int j = 0; j < 2 * ON; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[i][j][e] = 0;
        }

        __device__ void finish() {}
        __device__ static bool idle() { return warp() >= OWM * OWN; }
        __device__ static int row() { return warp() % OWM * OM * 16; }
        __device__ static int column() { return warp() / OWM * ON * 16; }

        // factors: one a row of the tile
        __device__ void scale(const float* factors) {
            if (idle()) return;
#pragma unroll
            for (int i = 0; i < OM; ++i) {
                const float low = factors[row() + i * 16 + lane() / 4];
                const float high = factors[row() + i * 16 + lane() / 4 + 8];
#pragma unroll
                for (int j = 0; j < 2 * ON; ++j) {
                    sum[i][j][0] *= low;
                    sum[i][j][1] *= low;
                    sum[i][j][2] *= high;
                    sum[i][j][3] *= high;
                }
            }
        }

        __device__ void add(const T* weights, const unsigned char* values, int key) {
            if (idle()) return;
            const T* p = weights + (row() + lane() % 16) * WEIGHTS_PITCH + key + lane() / 16 * 8;
            const unsigned char* v = values + lane() % 16 * PC * 2;
            const int first = column() / 8, part = lane() / 16 ^ lane() % 8;
#pragma unroll
            for (int k = 0; k < VK; k += 16) {
                unsigned a[OM][4];
#pragma unroll
                for (int i = 0; i < OM; ++i) ldmatrix4(a[i], p + i * 16 * WEIGHTS_PITCH + k);
#pragma unroll
                for (int j = 0; j < ON; ++j) {
                    unsigned b[4];
                    ldmatrix4_trans(b, v + k * PC * 2 + spot(part, first + 2 * j));
                    const unsigned low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
                    for (int i = 0; i < OM; ++i) {
                        mma16816<T>(sum[i][2 * j], a[i], low);
                        mma16816<T>(sum[i][2 * j + 1], a[i], high);
                    }
                }
            }
        }

        // out: the tile's first row and the pass's first column; rows and columns: how many of them exist.
        __device__ void store(float* out, int pitch, int rows, int columns, unsigned char*) const {
            if (idle()) return;
#pragma unroll
            for (int i = 0; i < OM; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int r = row() + i * 16 + half * 8 + lane() / 4;
#pragma unroll
                    for (int j = 0; j < 2 * ON; ++j) {
                        const int c = column() + j * 8 + lane() % 4 * 2;
                        if (r < rows && c < columns)
                            *reinterpret_cast<float2*>(out + static_cast<long long>(r) * pitch + c) =
                                make_float2(sum[i][j][2 * half], sum[i][j][2 * half + 1]);
                    }
                }
        }

        // The same in 16 bits. staging: 8 warps x 16 rows x STAGING_PITCH; through it every store is 16 bytes.
        __device__ void store(T* out, int pitch, int rows, int columns, unsigned char* staging) const {
            if (idle()) return;
            unsigned short* mine = reinterpret_cast<unsigned short*>(staging) + warp() * 16 * STAGING_PITCH;
#pragma unroll
            for (int i = 0; i < OM; ++i) {
                __syncwarp();
#pragma unroll
                for (int j = 0; j < 2 * ON; ++j) {
                    unsigned short* at = mine + lane() / 4 * STAGING_PITCH + j * 8 + lane() % 4 * 2;
                    *reinterpret_cast<unsigned*>(at) = pack2<T>(sum[i][j][0], sum[i][j][1]);
                    *reinterpret_cast<unsigned*>(at + 8 * STAGING_PITCH) = pack2<T>(sum[i][j][2], sum[i][j][3]);
                }
                __syncwarp();
#pragma unroll
                for (int at = lane(); at < 16 * ON * 2; at += 32) {
                    const int r = at / (ON * 2), c = at % (ON * 2) * 8;
                    const int target_row = row() + i * 16 + r, target_column = column() + c;
                    if (target_row < rows && target_column < columns)
                        *reinterpret_cast<uint4*>(out + static_cast<long long>(target_row) * pitch + target_column) =
                            *reinterpret_cast<const uint4*>(mine + r * STAGING_PITCH + c);
                }
            }
        }
    };
};
