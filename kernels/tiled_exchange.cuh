// How the blocks that share a tile of tiled.cu exchange their parts of the scores and share out the softmax.
#pragma once
#include "device.cuh"

__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

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

template <class T>
__device__ __forceinline__ T* shifted(T* from, int bytes) {
    return reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(from) + bytes);
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
__device__ __forceinline__ void arrive(const Partners& partners) {
    if constexpr (GRID)
        gpu_arrive(partners.counter, partners.rank == 0, partners.parts);
    else
        cluster_arrive();
}

template <bool GRID>
__device__ __forceinline__ void await(Partners& partners) {
    if constexpr (GRID)
        partners.phase = gpu_wait(partners.counter, partners.phase);
    else
        cluster_wait();
}

// ROWS rows of the tile, `row` and every eighth after it, by one warp: sums the partners' scores, takes the softmax step, gives
// weights and state to all. Where there is ONE tile the weights are divided by their sum at once.
template <class Tile, int BM, int BN, int PITCH, int ROWS, bool ONE, bool GRID>
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
        constexpr int TOGETHER = N * ROWS <= 2 ? 16 : 8;  // loads of so many partners' parts are under way at once
#pragma unroll 1
        for (int p = 0; p < partners.parts; p += TOGETHER) {
            Vector<N> value[TOGETHER][ROWS];
#pragma unroll
            for (int t = 0; t < TOGETHER; ++t)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    value[t][r] = {};
                    if (p + t >= partners.parts || row + r * WARPS >= end) continue;
                    const float* from = GRID ? partners.scratch + (p + t) * BM * BN : peer(part, p + t);
                    value[t][r] = read_part<GRID, N>(from + (row + r * WARPS) * (GRID ? BN : PITCH) + column);
                }
#pragma unroll
            for (int t = 0; t < TOGETHER; ++t)
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int e = 0; e < N; ++e) score[r][e] += value[t][r].at[e];
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
        if constexpr (ONE) {
#pragma unroll
            for (int e = 0; e < N; ++e) score[r][e] *= inverse;
        }
        if constexpr (GRID) {
            T* shared_weights = reinterpret_cast<T*>(partners.scratch + partners.parts * BM * BN);
            float* shared_state = partners.scratch + (partners.parts + 1) * BM * BN;
            if (column < BN) write_weights(shared_weights + at * BN + column, score[r]);
            if (lane == 0) {
                shared_state[at] = before[r];
                shared_state[BM + at] = inverse;
            }
        } else {
            if (column < BN) {
#pragma unroll 8
                for (int p = 0; p < partners.parts; ++p)
                    write_weights(shifted(peer(weights, p), Tile::weight_offset(at, column)), score[r]);
            }
            if (lane < partners.parts) {
                peer(state.factor, lane)[at] = before[r];
                peer(state.inverse, lane)[at] = inverse;
            }
        }
        if (lane == 0) {
            state.best[at] = best[r];
            state.total[at] = total;
        }
    }
}

// An exchange has three steps, and work of other tiles may stand between them. First, a block gives its part of the scores.
template <class Tile, int BM, int BN, int PITCH, bool GRID>
__device__ __forceinline__ void give_scores(const typename Tile::Scores& scores, float* part, const Partners& partners) {
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
    arrive<GRID>(partners);
}

// Second, it settles its share of the rows. visible: how many of the tile's keys its first row sees; `slope` more for each row
// after it.
template <class Tile, int BM, int BN, int PITCH, bool ONE, bool GRID>
__device__ __forceinline__ void settle(float* part, typename Tile::Element* weights, const State<BM>& state,
                                       Partners& partners, int visible, int slope, int keys, float scale, bool first) {
    await<GRID>(partners);
    constexpr int WARPS = Tile::THREADS / 32;
    const int share = (BM + partners.parts - 1) / partners.parts, begin = partners.rank * share;
    const int end = smaller(BM, begin + share), warp = threadIdx.x / 32;
    if (share > WARPS) {
        for (int row = begin + warp; row < end; row += 2 * WARPS)
            settle_rows<Tile, BM, BN, PITCH, 2, ONE, GRID>(part, weights, state, partners, row, end, visible, slope, keys, scale,
                                                      first);
    } else if (begin + warp < end) {
        settle_rows<Tile, BM, BN, PITCH, 1, ONE, GRID>(part, weights, state, partners, begin + warp, end, visible, slope, keys,
                                                  scale, first);
    }
    arrive<GRID>(partners);
}

// Third, it takes the weights and the state of all rows into its shared memory; in a cluster they are there already.
template <class Tile, int BM, int BN, bool GRID>
__device__ __forceinline__ void take_weights(typename Tile::Element* weights, const State<BM>& state, Partners& partners) {
    using T = typename Tile::Element;
    await<GRID>(partners);
    if constexpr (GRID) {
        const float* shared_weights = partners.scratch + partners.parts * BM * BN;
        const float* shared_state = partners.scratch + (partners.parts + 1) * BM * BN;
        constexpr int WORDS = BN * static_cast<int>(sizeof(T)) / 16;  // 16 bytes each
#pragma unroll 8
        for (int i = threadIdx.x; i < BM * WORDS; i += Tile::THREADS) {
            float word[4];
            load_l2(word, shared_weights + i * 4);
            const int row = i / WORDS, column = i % WORDS * 16 / static_cast<int>(sizeof(T));
            *reinterpret_cast<float4*>(shifted(weights, Tile::weight_offset(row, column))) =
                make_float4(word[0], word[1], word[2], word[3]);
        }
        for (int row = threadIdx.x; row < BM; row += Tile::THREADS) {
            float factor[1], inverse[1];
            load_l2(factor, shared_state + row);
            load_l2(inverse, shared_state + BM + row);
            state.factor[row] = factor[0];
            state.inverse[row] = inverse[0];
        }
        block_sync();
    }
}
