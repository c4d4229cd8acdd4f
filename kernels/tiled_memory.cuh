// What the kernels of tiled.cu hold in shared memory, and how they copy it there.
#pragma once
#include "device.cuh"
#include "tiled_exchange.cuh"
#include "tiled_fp32.cuh"
#include "tiled_half.cuh"
#include "tiled_wide.cuh"

// The tile that computes in T, by a value that is never made.
template <class T, int BM, int BN, int BK, int PC>
__host__ __device__ constexpr auto tile_of() {
    if constexpr (sizeof(T) == 4) return Fp32Tile<BM, BN, BK, PC>();
#ifdef WGMMA
    else if constexpr (BM == 128 && (BN == 64 || BN == 128) && BK == 64)
        return WideTile<T, BM, BN, BK, PC>();
#endif
    else
        return HalfTile<T, BM, BN, BK, PC>();
}

// The dynamic shared memory, in bytes. _tiled_plan.py computes TOTAL by the same rule.
template <class Tile, int BM, int BN, int SLOTS, int VALUE_SLOTS>
struct Layout {
    static constexpr int PART_PITCH = BN + 8;  // floats; 8 more keep four rows in different banks
    static constexpr int PART = BM * PART_PITCH * 4;
    static constexpr int WEIGHTS = Tile::WEIGHTS_BYTES;
    static constexpr int STAGING_AT = Tile::STAGING_BYTES <= PART ? 0 : PART + WEIGHTS;
    static constexpr int PHASES = larger(
        larger(SLOTS * Tile::STAGE_BYTES, Tile::GROUPS * PART),
        larger(PART + WEIGHTS, STAGING_AT + Tile::STAGING_BYTES));  // each phase reuses the memory of the one before
    static constexpr int VALUES_AT = (PHASES + 1023) / 1024 * 1024;  // a swizzled pattern starts there
    static constexpr int STATE_AT = VALUES_AT + VALUE_SLOTS * Tile::V_BYTES;
    static constexpr int TOTAL = STATE_AT + 4 * BM * 4;
};

// Starts to copy ROWS rows of CHUNKS x 16 bytes each, `pitch` elements apart; OFFSET says where a chunk goes. A thread has one
// chunk of every STEP-th row. Unless `whole`, rows and columns that do not exist become zeros.
template <int ROWS, int CHUNKS, int THREADS, class T, class Offset>
__device__ __forceinline__ void copy_rows(unsigned char* to, const T* from, long long pitch, int rows, int columns,
                                          bool whole, Offset offset) {
    constexpr int PER = 16 / sizeof(T), STEP = THREADS / CHUNKS, ROUNDS = (ROWS + STEP - 1) / STEP;
    static_assert(THREADS % CHUNKS == 0, "a row is copied by whole threads");
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    from += row * pitch + chunk * PER;
    if (whole) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            if (ROWS % STEP == 0 || row + i * STEP < ROWS) copy16(to + offset(row + i * STEP, chunk), from, true);
            from += STEP * pitch;
        }
    } else {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            if (ROWS % STEP == 0 || row + i * STEP < ROWS)
                copy16(to + offset(row + i * STEP, chunk), from, row + i * STEP < rows && chunk * PER < columns);
            from += STEP * pitch;
        }
    }
}
