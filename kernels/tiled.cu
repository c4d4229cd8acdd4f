// Attention for any head_dim: several blocks share a tile of BM query rows, each with CHUNK columns of head_dim.
//
// For every tile of BN keys a block (1) sums its columns' part of the scores, (2) exchanges parts with its partners: each
// adds up the parts of its own share of the rows, turns them into softmax weights (online: with a running maximum and sum)
// and gives these to all, (3) adds weights x values to its columns of the output. Queries, keys and values are read once a
// tile, whatever head_dim is, and no scores reach device memory. The partners are a cluster that exchanges through
// distributed shared memory or, with GRID, blocks that are resident together and exchange through L2.
//
// With one key tile (ONE) the output may be computed in passes of PC columns; with more of them a block keeps all of its
// output in registers (PC == CHUNK). Keys can be split over blocks (SPLIT): each writes its own output in fp32 and the logarithm of
// its sum, and combine_splits weighs them.
#include "tiled_exchange.cuh"
#include "tiled_memory.cuh"

// Grid: x = parts * heads * batch, the parts of a tile next to each other, y = query tiles, z = splits; cluster: parts blocks.
// q [B, H, rows, D], k and v [B, H / group, columns, D], strides in elements, D contiguous and a multiple of 16 bytes. out
// [B, H, rows, D], contiguous; with SPLIT [splits, B, H, rows, D] in fp32, and log_sums [splits, B, H, rows], to base 2.
// scale: of the scores, times log2 e. scratch, counters: with GRID, per tile (parts + 1) * BM * BN + 2 * BM floats, and 32
// words that are zero before the first launch and left so.
template <class T, int BM, int BN, int BK, int CHUNK, int PC, int STAGES, int VALUE_STAGES, bool ONE, bool GRID,
          bool SPLIT, int PER_SM>
__global__ void __launch_bounds__(256, PER_SM)
    tiled_attention(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, void* __restrict__ out,
                    float* __restrict__ log_sums, float* scratch, unsigned* counters, float scale, int heads, int group,
                    int rows, int columns, int head_dim, int parts, int splits, int causal, long long q_batch,
                    long long q_head, long long q_row, long long k_batch, long long k_head, long long k_row,
                    long long v_batch, long long v_head, long long v_row) {
    using Tile = decltype(tile_of<T, BM, BN, BK, PC>());
    constexpr int PER = 16 / sizeof(T);
    constexpr int SLICES = CHUNK / BK, PASSES = CHUNK / PC, PER_PASS = BN / Tile::VK, UNITS = PER_PASS * PASSES;
    constexpr int SLOTS = smaller(STAGES, SLICES), VALUE_SLOTS = smaller(VALUE_STAGES, UNITS);
    static_assert(CHUNK % BK == 0 && CHUNK % PC == 0 && STAGES >= 2 && VALUE_STAGES >= 2, "tile");
    static_assert(ONE || PASSES == 1, "more than one key tile needs the whole output in registers");
    using Memory = Layout<Tile, BM, BN, SLOTS, VALUE_SLOTS>;
    SHARED(memory);
    float* part = reinterpret_cast<float*>(memory);
    T* weights = reinterpret_cast<T*>(memory + Memory::PART);
    unsigned char* values = memory + Memory::VALUES_AT;
    const State<BM> state(reinterpret_cast<float*>(memory + Memory::STATE_AT));

    const int line = blockIdx.x / parts, rank = blockIdx.x - line * parts;  // of batch x heads
    const int batch = line / heads, head = line - batch * heads, split = blockIdx.z;
    const int unit = (line * gridDim.z + split) * gridDim.y + blockIdx.y;
    const int row0 = (gridDim.y - 1 - blockIdx.y) * BM;  // causal: the longest first
    const long long lines = static_cast<long long>(gridDim.x / parts) * rows;
    Partners partners{rank, parts, scratch + static_cast<long long>(unit) * ((parts + 1) * BM * BN + 2 * BM),
                            counters + unit * 32, 0};
    const int column0 = rank * CHUNK, width = smaller(CHUNK, head_dim - column0);
    q += batch * q_batch + head * q_head + row0 * q_row + column0;
    k += batch * k_batch + head / group * k_head + column0;
    v += batch * v_batch + head / group * v_head + column0;
    const int last = causal ? smaller(columns, row0 + BM) : columns;
    const int tiles = (last + BN - 1) / BN, per_split = SPLIT ? (tiles + splits - 1) / splits : tiles;
    const int first_tile = split * per_split;
    const int end_tile = ONE ? first_tile + 1 : larger(first_tile + 1, smaller(tiles, first_tile + per_split));

    let_next_start();
    wait_for_previous();
    if (GRID) partners.phase = gpu_phase(partners.counter);
    typename Tile::Output output;
    for (int tile = first_tile; tile < end_tile; ++tile) {
        const int key0 = tile * BN, keys = larger(0, columns - key0);
        const T* tile_k = k + key0 * k_row;
        const T* tile_v = v + key0 * v_row;
        // Copies go in one order: the slices of queries and keys, then units of values; group n is the n-th of them.
        const bool whole = rows - row0 >= BM && keys >= BN && width == CHUNK;
        const auto copy = [&](int n) {
            if (n < SLICES) {
                unsigned char* stage = memory + n % SLOTS * Tile::STAGE_BYTES;
                copy_rows<BM, BK / PER, Tile::THREADS>(stage, q + n * BK, q_row, rows - row0, width - n * BK, whole,
                                                       [](int row, int chunk) { return Tile::stage_offset(row, chunk); });
                copy_rows<BN, BK / PER, Tile::THREADS>(stage, tile_k + n * BK, k_row, keys, width - n * BK, whole,
                                                       [](int row, int chunk) { return Tile::stage_offset(BM + row, chunk); });
            } else if (n - SLICES < UNITS) {
                const int at = n - SLICES, key = at % PER_PASS * Tile::VK, column = at / PER_PASS * PC;
                copy_rows<Tile::VK, PC / PER, Tile::THREADS>(
                    values + at % VALUE_SLOTS * Tile::V_BYTES, tile_v + key * v_row + column, v_row, keys - key,
                    width - column, whole, [](int row, int chunk) { return Tile::value_offset(row, chunk); });
            }
        };
        if (tile > first_tile) block_sync();
#pragma unroll 1
        for (int n = 0; n < STAGES - 1; ++n) {
            if (n < SLICES + VALUE_STAGES - 1) copy(n);
            copy_commit();
        }
        typename Tile::Scores scores;
        scores.clear();
#pragma unroll 1
        for (int slice = 0; slice < SLICES; ++slice) {
            copy_wait<STAGES - 2>();
            scores.finish();
            Tile::publish();
            block_sync();
            if (slice + STAGES - 1 < SLICES + VALUE_STAGES - 1) copy(slice + STAGES - 1);
            copy_commit();
            scores.add(memory + slice % SLOTS * Tile::STAGE_BYTES);
        }
#pragma unroll 1
        for (int n = SLICES + STAGES - 1; n < SLICES + VALUE_STAGES - 1; ++n) {
            copy(n);
            copy_commit();
        }
        scores.finish();
        block_sync();
        const int visible = causal ? row0 + 1 - key0 : keys;
        give_scores<Tile, BM, BN, Memory::PART_PITCH, GRID>(scores, part, partners);
        settle<Tile, BM, BN, Memory::PART_PITCH, ONE, GRID>(part, weights, state, partners, visible, causal ? 1 : 0, keys, scale,
                                                       tile == first_tile);
        take_weights<Tile, BM, BN, GRID>(weights, state, partners);
#pragma unroll 1
        for (int pass = 0; pass < PASSES; ++pass) {
            if (!ONE && tile > first_tile)
                output.scale(state.factor);
            else
                output.clear();
#pragma unroll 1
            for (int at = 0; at < PER_PASS; ++at) {
                const int n = pass * PER_PASS + at;
                copy_wait<VALUE_STAGES - 2>();
                output.finish();
                Tile::publish();
                block_sync();
                copy(SLICES + n + VALUE_STAGES - 1);
                copy_commit();
                output.add(weights, values + n % VALUE_SLOTS * Tile::V_BYTES, at * Tile::VK);
            }
            output.finish();
            if (!ONE && tile < end_tile - 1) continue;
            const int column = pass * PC;
            const long long row = static_cast<long long>(line) * rows + row0;
            if (!ONE) output.scale(state.inverse);
            if constexpr (SPLIT) {
                float* to = static_cast<float*>(out) + (lines * split + row) * head_dim + column0 + column;
                output.store(to, head_dim, rows - row0, width - column, memory + Memory::STAGING_AT);
            } else {
                T* to = static_cast<T*>(out) + row * head_dim + column0 + column;
                output.store(to, head_dim, rows - row0, width - column, memory + Memory::STAGING_AT);
            }
        }
    }
    if constexpr (SPLIT) {
        const int share = (BM + parts - 1) / parts, row = partners.rank * share + threadIdx.x;
        const long long first = lines * split + static_cast<long long>(line) * rows + row0;
        if (threadIdx.x < share && row < BM && row0 + row < rows)
            log_sums[first + row] = state.total[row] > 0 ? state.best[row] + log2f(state.total[row]) : -INFINITY;
    }
}

// Grid: one block a row of the output. partial [splits, rows, D], log_sums [splits, rows], out [rows, D].
template <class T>
__global__ void __launch_bounds__(256) combine_splits(const float* __restrict__ partial, const float* __restrict__ log_sums,
                                                      T* __restrict__ out, int splits, int head_dim) {
    const long long row = blockIdx.x, rows = gridDim.x;
    float best = -INFINITY, total = 0;
    for (int s = 0; s < splits; ++s) best = fmaxf(best, log_sums[s * rows + row]);
    for (int s = 0; s < splits; ++s) total += exp2_fast(log_sums[s * rows + row] - best);
    for (int column = threadIdx.x; column < head_dim; column += blockDim.x) {
        float sum = 0;
        for (int s = 0; s < splits; ++s)
            sum += exp2_fast(log_sums[s * rows + row] - best) * partial[(s * rows + row) * head_dim + column];
        out[row * head_dim + column] = from_float<T>(sum / total);
    }
}
