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
#include "device.cuh"
#include "tiled_fp32.cuh"
#include "tiled_half.cuh"

template <class T, int BM, int BN, int BK, int PC>
struct TileOf {
    using type = HalfTile<T, BM, BN, BK, PC>;
};
template <int BM, int BN, int BK, int PC>
struct TileOf<float, BM, BN, BK, PC> {
    using type = Fp32Tile<BM, BN, BK, PC>;
};

__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// The dynamic shared memory, in bytes. tiled.py computes TOTAL by the same rule.
template <class Tile, int BM, int BN, int SLOTS, int VALUE_SLOTS>
struct Layout {
    static constexpr int PART_PITCH = BN + 8;  // floats; 8 more keep four rows in different banks
    static constexpr int PART = BM * PART_PITCH * 4;
    static constexpr int WEIGHTS = BM * Tile::WEIGHTS_PITCH * static_cast<int>(sizeof(typename Tile::Element));
    static constexpr int STAGING_AT = Tile::STAGING_BYTES <= PART ? 0 : PART + WEIGHTS;
    static constexpr int PHASES = larger(
        larger(SLOTS * Tile::STAGE_BYTES, Tile::GROUPS * PART),
        larger(PART + WEIGHTS, STAGING_AT + Tile::STAGING_BYTES));  // each phase reuses the memory of the one before
    static constexpr int VALUES_AT = (PHASES + 127) / 128 * 128;
    static constexpr int STATE_AT = VALUES_AT + VALUE_SLOTS * Tile::V_BYTES;
    static constexpr int TOTAL = STATE_AT + 4 * BM * 4;
};

// Where a block's share of the exchange lies. With GRID in global memory: parts x BM x BN scores, then weights, then factors.
struct Partners {
    int rank, parts;
    float* scratch;
    unsigned* counter;
    unsigned phase;  // of the counter before the next meeting
};

template <int N>
struct Vector;
template <>
struct Vector<1> {
    float at[1];
};
template <>
struct __align__(8) Vector<2> {
    float at[2];
};
template <>
struct __align__(16) Vector<4> {
    float at[4];
};

// What another block wrote: through distributed shared memory, or from L2.
template <bool GRID, int N>
__device__ __forceinline__ Vector<N> read_part(const float* from) {
    Vector<N> value;
    if constexpr (!GRID) {
        value = *reinterpret_cast<const Vector<N>*>(from);
    } else {
#pragma unroll
        for (int e = 0; e < N; ++e) value.at[e] = 0;
        load_l2(value.at, from);
    }
    return value;
}

template <class T, int N>
__device__ __forceinline__ void write_weights(T* to, const float (&weight)[N]) {
    if constexpr (sizeof(T) == 4) {
        Vector<N> value;
#pragma unroll
        for (int e = 0; e < N; ++e) value.at[e] = weight[e];
        *reinterpret_cast<Vector<N>*>(to) = value;
    } else if constexpr (N == 1) {
        *to = from_float<T>(weight[0]);
    } else if constexpr (N == 2) {
        *reinterpret_cast<unsigned*>(to) = pack2<T>(weight[0], weight[1]);
    } else {
        *reinterpret_cast<uint2*>(to) = make_uint2(pack2<T>(weight[0], weight[1]), pack2<T>(weight[2], weight[3]));
    }
}

// Row state in shared memory, BM floats each: what the old output is multiplied by, one over the sum of weights so far; and,
// of this block's own rows, the maximum so far (of scores times log2 e) and the sum of weights.
template <int BM>
struct State {
    float* factor;
    float* inverse;
    float* best;
    float* total;
    __device__ explicit State(float* at) : factor(at), inverse(at + BM), best(at + 2 * BM), total(at + 3 * BM) {}
};

template <bool GRID>
__device__ __forceinline__ void meet(Partners& partners) {
    if constexpr (GRID)
        partners.phase = gpu_barrier(partners.counter, partners.phase, partners.rank == 0, partners.parts);
    else
        cluster_sync();
}

// ROWS rows of the tile, `row` and every eighth after it, by one warp: sums the partners' scores, takes the softmax step, gives
// weights and state to all, or keeps them if EACH partner does this for itself.
template <class Tile, int BM, int BN, int PITCH, int ROWS, bool GRID, bool EACH>
__device__ __forceinline__ void settle_rows(float* part, typename Tile::Element* weights, const State<BM>& state,
                                            const Partners& partners, int row, int end, int visible, int slope, int keys,
                                            float scale, bool first) {
    using T = typename Tile::Element;
    constexpr int N = BN / 32 > 0 ? BN / 32 : 1, WARPS = Tile::THREADS / 32;
    const int lane = threadIdx.x % 32;
    const int column = lane * N;
    float score[ROWS][N], best[ROWS], before[ROWS], total_before[ROWS], sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int e = 0; e < N; ++e) score[r][e] = 0;
    if (column < BN) {
#pragma unroll 16
        for (int p = 0; p < partners.parts; ++p) {
            const float* from = (GRID ? partners.scratch + p * BM * BN : peer(part, p)) + column;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (row + r * WARPS >= end) continue;
                const Vector<N> value = read_part<GRID, N>(from + (row + r * WARPS) * (GRID ? BN : PITCH));
#pragma unroll
                for (int e = 0; e < N; ++e) score[r][e] += value.at[e];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int at = row + r * WARPS, seen = smaller(keys, visible + slope * at);
        // read by all lanes before the shuffles, written by lane 0 after them
        before[r] = first || at >= end ? -INFINITY : state.best[at];
        total_before[r] = first || at >= end ? 0.f : state.total[at];
        best[r] = before[r];
#pragma unroll
        for (int e = 0; e < N; ++e) {
            score[r][e] = column + e < BN && column + e < seen ? score[r][e] * scale : -INFINITY;
            best[r] = fmaxf(best[r], score[r][e]);
        }
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) best[r] = fmaxf(best[r], shuffle_xor(best[r], mask));
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float zero = best[r] == -INFINITY ? 0.f : best[r];  // no key of this row was visible yet
        sum[r] = 0;
#pragma unroll
        for (int e = 0; e < N; ++e) {
            score[r][e] = exp2_fast(score[r][e] - zero);
            sum[r] += score[r][e];
        }
        before[r] = exp2_fast(before[r] - zero);  // what the old output is multiplied by
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] += shuffle_xor(sum[r], mask);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int at = row + r * WARPS;
        if (at >= end) continue;
        const float total = total_before[r] * before[r] + sum[r], inverse = total > 0 ? 1 / total : 0.f;
        if constexpr (GRID) {
            T* shared_weights = reinterpret_cast<T*>(partners.scratch + partners.parts * BM * BN);
            float* shared_state = partners.scratch + (partners.parts + 1) * BM * BN;
            if (column < BN) write_weights(shared_weights + at * BN + column, score[r]);
            if (lane == 0) {
                shared_state[at] = before[r];
                shared_state[BM + at] = inverse;
            }
        } else {
            const int receivers = EACH ? 1 : partners.parts;
            if (column < BN) {
#pragma unroll 8
                for (int p = 0; p < receivers; ++p)
                    write_weights((EACH ? weights : peer(weights, p)) + at * Tile::WEIGHTS_PITCH + column, score[r]);
            }
            if (lane < receivers) {
                (EACH ? state.factor : peer(state.factor, lane))[at] = before[r];
                (EACH ? state.inverse : peer(state.inverse, lane))[at] = inverse;
            }
        }
        if (lane == 0) {
            state.best[at] = best[r];
            state.total[at] = total;
        }
    }
}

// Small tiles in a cluster: that every partner settles all rows is faster than a second exchange.
template <int BM, int BN, bool GRID>
constexpr bool each_settles = !GRID && BM * BN <= 512;

// Scores of all partners -> weights of the whole tile in every partner's shared memory. visible: how many of the tile's keys
// its first row sees; `slope` more for each row after it.
template <class Tile, int BM, int BN, int PITCH, bool GRID>
__device__ __forceinline__ void exchange(const typename Tile::Scores& scores, float* part, typename Tile::Element* weights, const State<BM>& state,
                                         Partners& partners, int visible, int slope, int keys, float scale,
                                         bool first) {
    using T = typename Tile::Element;
    if constexpr (GRID && Tile::GROUPS == 1) {
        scores.put(partners.scratch + partners.rank * BM * BN, BN);
    } else {
        scores.put(part, PITCH);
        block_sync();
    }
    if constexpr (Tile::GROUPS > 1) {
        for (int i = threadIdx.x; i < BM * BN / 4; i += Tile::THREADS) {
            const int row = i / (BN / 4), column = i % (BN / 4) * 4;
            float4 sum = *reinterpret_cast<const float4*>(part + row * PITCH + column);
#pragma unroll
            for (int g = 1; g < Tile::GROUPS; ++g) {
                const float4 more = *reinterpret_cast<const float4*>(part + (g * BM + row) * PITCH + column);
                sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
            }
            float* to = GRID ? partners.scratch + (partners.rank * BM + row) * BN : part + row * PITCH;
            *reinterpret_cast<float4*>(to + column) = sum;
        }
    }
    meet<GRID>(partners);
    constexpr bool EACH = each_settles<BM, BN, GRID>;
    constexpr int WARPS = Tile::THREADS / 32;
    const int share = EACH ? BM : (BM + partners.parts - 1) / partners.parts, begin = EACH ? 0 : partners.rank * share;
    const int end = smaller(BM, begin + share);
    if (share > WARPS) {
        for (int row = begin + threadIdx.x / 32; row < end; row += 2 * WARPS)
            settle_rows<Tile, BM, BN, PITCH, 2, GRID, EACH>(part, weights, state, partners, row, end, visible, slope, keys,
                                                            scale, first);
    } else if (begin + static_cast<int>(threadIdx.x) / 32 < end) {
        settle_rows<Tile, BM, BN, PITCH, 1, GRID, EACH>(part, weights, state, partners, begin + threadIdx.x / 32, end,
                                                        visible, slope, keys, scale, first);
    }
    if constexpr (EACH) {
        cluster_arrive();  // my partners' scores have been read; cluster_wait() stands behind the last use of mine
        block_sync();
    } else {
        meet<GRID>(partners);
    }
    if constexpr (GRID) {
        const float* shared_weights = partners.scratch + partners.parts * BM * BN;
        const float* shared_state = partners.scratch + (partners.parts + 1) * BM * BN;
        constexpr int WORDS = BN * static_cast<int>(sizeof(T)) / 16;  // 16 bytes each
        for (int i = threadIdx.x; i < BM * WORDS; i += Tile::THREADS) {
            float word[4];
            load_l2(word, shared_weights + i * 4);
            *reinterpret_cast<float4*>(reinterpret_cast<unsigned char*>(weights + i / WORDS * Tile::WEIGHTS_PITCH) +
                                       i % WORDS * 16) = make_float4(word[0], word[1], word[2], word[3]);
        }
        for (int row = threadIdx.x; row < BM; row += Tile::THREADS) {
            float one[1];
            load_l2(one, shared_state + row);
            state.factor[row] = one[0];
            load_l2(one, shared_state + BM + row);
            state.inverse[row] = one[0];
        }
        block_sync();
    }
}

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
    using Tile = typename TileOf<T, BM, BN, BK, PC>::type;
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
                            counters + unit * 32, GRID ? gpu_phase(counters + unit * 32) : 0u};
    const int column0 = rank * CHUNK, width = smaller(CHUNK, head_dim - column0);
    q += batch * q_batch + head * q_head + row0 * q_row + column0;
    k += batch * k_batch + head / group * k_head + column0;
    v += batch * v_batch + head / group * v_head + column0;
    const int last = causal ? smaller(columns, row0 + BM) : columns;
    const int tiles = (last + BN - 1) / BN, per_split = SPLIT ? (tiles + splits - 1) / splits : tiles;
    const int first_tile = split * per_split;
    const int end_tile = ONE ? first_tile + 1 : larger(first_tile + 1, smaller(tiles, first_tile + per_split));

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
        block_sync();
        const int visible = causal ? row0 + 1 - key0 : keys;
        exchange<Tile, BM, BN, Memory::PART_PITCH, GRID>(scores, part, weights, state, partners, visible, causal ? 1 : 0, keys, scale,
                                                         tile == first_tile);
        if (!ONE && tile > first_tile)
            output.scale(state.factor);
        else
            output.clear();
#pragma unroll 1
        for (int at = 0; at < UNITS; ++at) {
            copy_wait<VALUE_STAGES - 2>();
            block_sync();
            copy(SLICES + at + VALUE_STAGES - 1);
            copy_commit();
            output.add(weights, values + at % VALUE_SLOTS * Tile::V_BYTES, at % PER_PASS * Tile::VK);
            if (at % PER_PASS == PER_PASS - 1 && (ONE || tile == end_tile - 1)) {
                const int column = at / PER_PASS * PC;
                const long long row = static_cast<long long>(line) * rows + row0;
                output.scale(state.inverse);
                if constexpr (SPLIT) {
                    float* to = static_cast<float*>(out) + (lines * split + row) * head_dim + column0 + column;
                    output.store(to, head_dim, rows - row0, width - column, memory + Memory::STAGING_AT);
                } else {
                    T* to = static_cast<T*>(out) + row * head_dim + column0 + column;
                    output.store(to, head_dim, rows - row0, width - column, memory + Memory::STAGING_AT);
                }
                if (ONE) output.clear();
            }
        }
        if constexpr (each_settles<BM, BN, GRID>) cluster_wait();
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
