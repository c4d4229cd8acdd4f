// The functions of kernels/device.cuh with the same names and meaning, on the emulated machine.
#pragma once
#include <bit>
#include <cmath>

#include "machine.hpp"

#define PROFHARNESS_EMULATOR 1
#define SHARED(name) unsigned char* const name = emulator::current->block->shared

struct fp16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};

inline float to_float(float value) { return value; }
inline float to_float(fp16 value) { return static_cast<float>(std::bit_cast<_Float16>(value.bits)); }
inline float to_float(bf16 value) { return std::bit_cast<float>(static_cast<unsigned>(value.bits) << 16); }

template <class T>
constexpr bool is_bf16 = false;
template <>
constexpr bool is_bf16<bf16> = true;

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
    return value;
}

template <>
inline fp16 from_float<fp16>(float value) {
    if (value != value) return {0x7fff};
    return {std::bit_cast<unsigned short>(static_cast<_Float16>(value))};
}

template <>
inline bf16 from_float<bf16>(float value) {
    if (value != value) return {0x7fff};
    const unsigned bits = std::bit_cast<unsigned>(value);
    return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <class T>
unsigned pack2(float low, float high) {
    return from_float<T>(low).bits | static_cast<unsigned>(from_float<T>(high).bits) << 16;
}

namespace emulator {

inline void check_shared(const void* address, const char* name, const Place& place) {
    const auto* at = static_cast<const unsigned char*>(address);
    const std::ptrdiff_t offset = at - current->block->shared, size = static_cast<std::ptrdiff_t>(machine.shared_bytes);
    if (offset % 16) fail(place, "%s: shared address at byte %td is not a multiple of 16", name, offset);
    if (offset < 0 || offset + 16 > size)
        fail(place, "%s: shared address at byte %td, outside of the %td bytes of shared memory", name, offset, size);
}

inline void check_global(const void* address, const char* name, const Place& place) {
    const auto* at = static_cast<const unsigned char*>(address);
    if (reinterpret_cast<std::uintptr_t>(address) % 16)
        fail(place, "%s: the global address is not a multiple of 16", name);
    const Extent* nearest = nullptr;
    std::ptrdiff_t least = 0;
    for (const Extent& extent : machine.extents) {
        if (at >= extent.low && at + 16 <= extent.high) return;
        const std::ptrdiff_t off = at < extent.low ? extent.low - at : at + 16 - extent.high;
        if (!nearest || off < least) nearest = &extent, least = off;
    }
    if (!nearest) fail(place, "%s: a global address, but no argument is a tensor", name);
    fail(place, "%s: global address outside of all tensors, %td bytes %s argument %d", name, least,
         at < nearest->low ? "before the start of" : "past the end of", nearest->argument);
}

struct Row {
    unsigned short values[8];
    unsigned* result;
};

// A row is read when its thread arrives: what other threads write without __syncwarp() may come too late.
template <bool transposed>
void ldmatrix(unsigned (&r)[4], const void* address, const Place& place) {
    const char* name = transposed ? "ldmatrix4_trans" : "ldmatrix4";
    check_shared(address, name, place);
    Row row;
    std::memcpy(row.values, address, 16);
    row.result = r;
    collective(name, ~0u, row, place, [&](Row** rows, unsigned mask) {
        if (mask != ~0u) fail(place, "%s in a warp of fewer than 32 threads", name);
        for (int lane = 0; lane < 32; ++lane)
            for (int m = 0; m < 4; ++m) {
                const int outer = lane / 4, inner = 2 * (lane % 4);
                const unsigned low = transposed ? rows[8 * m + inner]->values[outer] : rows[8 * m + outer]->values[inner];
                const unsigned high =
                    transposed ? rows[8 * m + inner + 1]->values[outer] : rows[8 * m + outer]->values[inner + 1];
                rows[lane]->result[m] = low | high << 16;
            }
    });
}

struct Fragments {
    float* c;
    const unsigned *a, *b;
};

// fp32 sums in the order of k.
template <class T>
void multiply(Fragments** lanes) {
    typedef float Line __attribute__((vector_size(32)));
    [[gnu::uninitialized]] T a16[16][16], b16[16][8];
    [[gnu::uninitialized]] float a[16][16];
    [[gnu::uninitialized]] Line b[16], c[16];
    const auto half = [](unsigned word, int high) { return T{static_cast<unsigned short>(word >> 16 * high)}; };
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = 2 * (lane % 4);
        const Fragments& own = *lanes[lane];
        for (int h = 0; h < 2; ++h) {
            for (int i = 0; i < 4; ++i) a16[g + 8 * (i % 2)][t + 8 * (i / 2) + h] = half(own.a[i], h);
            for (int i = 0; i < 2; ++i) {
                b16[t + 8 * i + h][g] = half(own.b[i], h);
                c[g + 8 * i][t + h] = own.c[2 * i + h];
            }
        }
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 16; ++k) a[row][k] = to_float(a16[row][k]);
        for (int n = 0; n < 8; ++n) b[row][n] = to_float(b16[row][n]);
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k) c[row] += a[row][k] * b[k];
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) lanes[lane]->c[i] = c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}

template <class T>
struct Shuffled {
    T value, result;
    int source;
};

template <class T>
T shuffle(const char* name, unsigned mask, T value, int source, const Place& place) {
    Shuffled<T> own{value, value, source};
    collective(name, mask, own, place, [&](Shuffled<T>** lanes, unsigned all) {
        for (unsigned left = all; left; left &= left - 1) {
            Shuffled<T>& lane = *lanes[__builtin_ctz(left)];
            if (!(all >> lane.source & 1))
                fail(place, "%s reads from lane %d, which does not take part", name, lane.source);
            lane.result = lanes[lane.source]->value;
        }
    });
    return own.result;
}

}  // namespace emulator

// The target is poisoned at once and gets its data in copy_wait: on a GPU either may be seen in between.
inline void copy16(void* shared, const void* global, bool there, emulator::Place place = emulator::Place::current()) {
    emulator::check_shared(shared, "copy16", place);
    if (there) emulator::check_global(global, "copy16", place);
    std::memset(shared, emulator::poison, 16);
    emulator::current->copies.push_back(
        {static_cast<unsigned char*>(shared), there ? static_cast<const unsigned char*>(global) : nullptr});
}

inline void copy_commit() { emulator::current->groups.push_back(emulator::current->copies.size()); }

template <int N>
void copy_wait() {
    static_assert(N >= 0);
    std::vector<emulator::Copy>& copies = emulator::current->copies;
    std::vector<std::size_t>& groups = emulator::current->groups;
    if (groups.size() <= N) return;
    const std::size_t done = groups[groups.size() - 1 - N];
    for (std::size_t i = 0; i < done; ++i) {
        if (copies[i].global)
            std::memcpy(copies[i].shared, copies[i].global, 16);
        else
            std::memset(copies[i].shared, 0, 16);
    }
    copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(done));
    groups.erase(groups.begin(), groups.end() - N);
    for (std::size_t& end : groups) end -= done;
}

inline void block_sync(emulator::Place place = emulator::Place::current()) {
    emulator::block_barrier("block_sync", place);
}

inline int cluster_rank() { return emulator::current->block->rank; }

inline void cluster_arrive(emulator::Place place = emulator::Place::current()) { emulator::arrive_at_cluster(place); }

inline void cluster_wait(emulator::Place place = emulator::Place::current()) { emulator::wait_for_cluster(place); }

inline void cluster_sync(emulator::Place place = emulator::Place::current()) {
    emulator::arrive_at_cluster(place);
    emulator::wait_for_cluster(place);
}

template <class T>
T* peer(T* shared, int rank, emulator::Place place = emulator::Place::current()) {
    const emulator::Machine& m = emulator::machine;
    const std::ptrdiff_t offset = (const unsigned char*)shared - emulator::current->block->shared;
    if (offset < 0 || offset >= static_cast<std::ptrdiff_t>(m.shared_bytes))
        emulator::fail(place, "peer: byte %td is not in the shared memory of the calling block", offset);
    if (rank < 0 || rank >= static_cast<int>(m.blocks.size()))
        emulator::fail(place, "peer: rank %d in a cluster of %zu blocks", rank, m.blocks.size());
    return (T*)(m.blocks[static_cast<std::size_t>(rank)].shared + offset);
}

inline void ldmatrix4(unsigned (&r)[4], const void* row, emulator::Place place = emulator::Place::current()) {
    emulator::ldmatrix<false>(r, row, place);
}

inline void ldmatrix4_trans(unsigned (&r)[4], const void* row, emulator::Place place = emulator::Place::current()) {
    emulator::ldmatrix<true>(r, row, place);
}

template <class T>
void mma16816(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2],
              emulator::Place place = emulator::Place::current()) {
    emulator::Fragments own{c, a, b};
    emulator::collective("mma16816", ~0u, own, place, [&](emulator::Fragments** lanes, unsigned mask) {
        if (mask != ~0u) emulator::fail(place, "mma16816 in a warp of fewer than 32 threads");
        emulator::multiply<T>(lanes);
    });
}

inline float shuffle_xor(float value, int mask, emulator::Place place = emulator::Place::current()) {
    return emulator::shuffle("shuffle_xor", ~0u, value, (emulator::current->lane ^ mask) & 31, place);
}

inline float exp2_fast(float value) {
    const float result = exp2f(value);
    return result < 0x1p-126f ? 0.0f : result;
}

inline void wait_for_previous() {}
inline void let_next_start() {}

template <int N>
void load_l2(float (&to)[N], const float* from) {
    for (int e = 0; e < N; ++e) to[e] = from[e];
}

inline unsigned gpu_phase(const unsigned* counter) { return *counter & 0x80000000u; }

// The blocks of a grid-wide barrier are emulated as one cluster: only these are there at the same time.
inline void gpu_arrive(unsigned* counter, bool first, int blocks, emulator::Place place = emulator::Place::current()) {
    const int present = static_cast<int>(emulator::machine.blocks.size());
    if (blocks != present) emulator::fail(place, "gpu_arrive of %d blocks in a cluster of %d", blocks, present);
    emulator::block_barrier("gpu_arrive", place);
    if (emulator::current->thread.x == 0) *counter += first ? 0x80000000u - static_cast<unsigned>(blocks - 1) : 1u;
}

inline unsigned gpu_wait(const unsigned* counter, unsigned phase, emulator::Place place = emulator::Place::current()) {
    if (emulator::current->thread.x == 0) {
        for (int turns = 0; (*counter & 0x80000000u) == phase; ++turns) {
            if (turns == 1'000'000) emulator::fail(place, "gpu_wait: some block never arrives, or two are the first");
            emulator::current->place = place;
            emulator::give_way();
        }
    }
    emulator::block_barrier("gpu_wait", place);
    return phase ^ 0x80000000u;
}

// wgmma: each lane computes its own sums when it is called; what is missing is only that they come late.
#define WGMMA 1
inline void fence_async_shared() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int N>
void wgmma_wait() {}

template <int N>
void wgmma_hold(float (&)[N]) {}

struct WgmmaOperand {
    const unsigned char* shared;
    int leading, stride;
};

inline WgmmaOperand wgmma_operand(const void* shared, int leading, int stride,
                                  emulator::Place place = emulator::Place::current()) {
    emulator::check_shared(shared, "wgmma_operand", place);
    return {static_cast<const unsigned char*>(shared), leading, stride};
}

namespace emulator {

// The 16-bit value `at` bytes into an operand of rows of 128 bytes, swizzled by the address in shared memory.
template <class T>
float swizzled(const WgmmaOperand& operand, std::ptrdiff_t at, const Place& place) {
    const std::ptrdiff_t plain = operand.shared + at - current->block->shared, size = machine.shared_bytes;
    const std::ptrdiff_t place_of = plain ^ ((plain >> 7 & 7) << 4);
    if (place_of < 0 || place_of + 2 > size) fail(place, "wgmma: byte %td of %td bytes of shared memory", place_of, size);
    T value;
    std::memcpy(&value, current->block->shared + place_of, 2);
    return to_float(value);
}

}  // namespace emulator

template <class T, int N, bool ROWS_SUMMED>
void wgmma(float (&c)[N / 2], const WgmmaOperand& a, const WgmmaOperand& b,
           emulator::Place place = emulator::Place::current()) {
    using emulator::swizzled;
    const int lane = emulator::current->lane, warp = static_cast<int>(emulator::current->thread.x) / 32 % 4;
    for (int half = 0; half < 2; ++half) {
        const int row = 16 * warp + lane / 4 + 8 * half;
        float from_a[16];
        for (int k = 0; k < 16; ++k) from_a[k] = swizzled<T>(a, row / 8 * a.stride + row % 8 * 128 + k * 2, place);
        for (int j = 0; j < N / 8; ++j)
            for (int e = 0; e < 2; ++e) {
                const int n = 8 * j + 2 * (lane % 4) + e;
                for (int k = 0; k < 16; ++k) {
                    const int at = ROWS_SUMMED ? n / 64 * b.leading + n % 64 * 2 + k / 8 * b.stride + k % 8 * 128
                                               : n / 8 * b.stride + n % 8 * 128 + k * 2;
                    c[4 * j + 2 * half + e] += from_a[k] * swizzled<T>(b, at, place);
                }
            }
    }
}
