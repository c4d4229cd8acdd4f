// The arithmetic of tiled.cu in fp16 and bf16 for tiles of 128 rows on Hopper: wgmma, which reads all operands from shared
// memory and runs at twice the rate of mma.sync there. Each of two warpgroups has 64 rows.
#pragma once
#include "wgmma.cuh"
#ifdef WGMMA

// BM query rows, BN keys, BK columns of head_dim a stage, PC columns of the output a pass.
template <class T, int BM, int BN, int BK, int PC>
struct WideTile {
    using Element = T;
    static constexpr int THREADS = 256;
    static constexpr int WARPS = THREADS / 32;
    static constexpr int GROUPS = 1;
    static constexpr int VK = 64;  // keys of V a copy
    static constexpr int STAGE_BYTES = (BM + BN) * BK * 2;
    static constexpr int V_BYTES = VK * PC * 2;
    static constexpr int WEIGHTS_BYTES = BM * BN * 2;
    static constexpr int STAGING_PITCH = PC + 8;
    static constexpr int STAGING_BYTES = WARPS * 16 * STAGING_PITCH * 2;
    static_assert(BM == 128 && BK == 64 && (BN == 64 || BN == 128) && (PC == 64 || PC == 128), "wgmma");

    // Everything lies in rows of 128 bytes with swizzled chunks: stages as BM + BN rows, weights and values as blocks of 64
    // columns, a row for each query row or key.
    __device__ static int stage_offset(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }
    __device__ static int value_offset(int key, int chunk) {
        return chunk / 8 * (VK * 128) + key * 128 + ((chunk ^ key) & 7) * 16;
    }
    __device__ static int weight_offset(int row, int column) {
        return column / 64 * (BM * 128) + row * 128 + ((column / 8 ^ row) & 7) * 16 + column % 8 * 2;
    }
    __device__ static int lane() { return threadIdx.x % 32; }
    __device__ static int group_row() { return threadIdx.x / 128 * 64; }
    __device__ static int row() { return threadIdx.x / 32 * 16 + lane() / 4; }

    // What copies and stores wrote is seen by wgmma after this, then a barrier.
    __device__ static void publish() { fence_async_shared(); }

    template <int N>
    struct Sums {
        float sum[N / 2];

        __device__ void clear() {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sum[i] = 0;
        }

        // Waits for the products that add() began; before it neither sums nor operands may be touched.
        __device__ void finish() {
            wgmma_wait<0>();
            wgmma_hold(sum);
        }
    };

    struct Scores : Sums<BN> {
        __device__ void add(const unsigned char* stage) {
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < BK; k += 16)
                wgmma<T, BN, false>(this->sum, wgmma_operand(stage + group_row() * 128 + k * 2, 16, 1024),
                                    wgmma_operand(stage + BM * 128 + k * 2, 16, 1024));
            wgmma_commit();
        }

        // parts: BM x pitch
        __device__ void put(float* parts, int pitch) const {
            float* at = parts + row() * pitch + lane() % 4 * 2;
#pragma unroll
            for (int j = 0; j < BN / 8; ++j) {
                *reinterpret_cast<float2*>(at + j * 8) = make_float2(this->sum[4 * j], this->sum[4 * j + 1]);
                *reinterpret_cast<float2*>(at + 8 * pitch + j * 8) = make_float2(this->sum[4 * j + 2], this->sum[4 * j + 3]);
            }
        }
    };

    struct Output : Sums<PC> {
        // factors: one a row of the tile
        __device__ void scale(const float* factors) {
            const float low = factors[row()], high = factors[row() + 8];
#pragma unroll
            for (int j = 0; j < PC / 8; ++j) {
                this->sum[4 * j] *= low;
                this->sum[4 * j + 1] *= low;
                this->sum[4 * j + 2] *= high;
                this->sum[4 * j + 3] *= high;
            }
        }

        __device__ void add(const T* weights, const unsigned char* values, int key) {
            const unsigned char* p = reinterpret_cast<const unsigned char*>(weights) + weight_offset(group_row(), key);
            static_assert(VK % 64 == 0, "whole blocks of weights");
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < VK; k += 16)
                wgmma<T, PC, true>(this->sum, wgmma_operand(p + k / 64 * (BM * 128) + k % 64 * 2, 16, 1024),
                                   wgmma_operand(values + k * 128, VK * 128, 1024));
            wgmma_commit();
        }

        // out: the tile's first row and the pass's first column; rows and columns: how many of them exist.
        __device__ void store(float* out, int pitch, int rows, int columns, unsigned char*) const {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < PC / 8; ++j) {
                    const int r = row() + half * 8, c = j * 8 + lane() % 4 * 2;
                    if (r < rows && c < columns)
                        *reinterpret_cast<float2*>(out + static_cast<long long>(r) * pitch + c) =
                            make_float2(this->sum[4 * j + 2 * half], this->sum[4 * j + 2 * half + 1]);
                }
        }

        // The same in 16 bits. staging: 8 warps x 16 rows x STAGING_PITCH; through it every store is 16 bytes.
        __device__ void store(T* out, int pitch, int rows, int columns, unsigned char* staging) const {
            const int warp_row = threadIdx.x / 32 * 16;
            unsigned short* mine = reinterpret_cast<unsigned short*>(staging) + warp_row * STAGING_PITCH;
            unsigned short* at = mine + lane() / 4 * STAGING_PITCH + lane() % 4 * 2;
            __syncwarp();
#pragma unroll
            for (int j = 0; j < PC / 8; ++j) {
                *reinterpret_cast<unsigned*>(at + j * 8) = pack2<T>(this->sum[4 * j], this->sum[4 * j + 1]);
                *reinterpret_cast<unsigned*>(at + 8 * STAGING_PITCH + j * 8) =
                    pack2<T>(this->sum[4 * j + 2], this->sum[4 * j + 3]);
            }
            __syncwarp();
            constexpr int CHUNKS = PC / 8, STEP = 32 / CHUNKS;
            const int first = lane() / CHUNKS, column = lane() % CHUNKS * 8;
            T* to = out + static_cast<long long>(warp_row + first) * pitch + column;
#pragma unroll
            for (int r = 0; r < 16; r += STEP) {
                if (warp_row + first + r < rows && column < columns)
                    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(mine + (first + r) * STAGING_PITCH + column);
                to += static_cast<long long>(STEP) * pitch;
            }
        }
    };
};
#endif  // WGMMA
