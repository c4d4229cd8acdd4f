// Blocks, warps and barriers of one cluster, and the scheduler that draws its order from a seed.
#pragma once
#include <unistd.h>

#include <cstdarg>
#include <cstring>
#include <source_location>
#include <utility>
#include <vector>

#include "fibres.hpp"

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline dim3 blockDim, gridDim;

namespace emulator {

using Place = std::source_location;
constexpr unsigned char poison = 0xff;  // every fp32, fp16 and bf16 made of it is NaN

struct Copy {
    unsigned char* shared;
    const unsigned char* global;  // null: zeros
};

struct Warp;

struct Block {
    uint3 index;
    int rank;
    unsigned char* shared;
    int arrived, ended;
};

struct Fibre {
    Context context;
    uint3 thread;
    int number, lane;  // in its block, in its warp
    Block* block;
    Warp* warp;
    void* deposit;  // what it brings to a warp-wide function
    const char* waits_for;  // null: it runs, "": it has ended
    Place place;
    bool cluster_arrived;
    unsigned cluster_phase;
    std::vector<Copy> copies;
    std::vector<std::size_t> groups;  // ends of the committed groups in `copies`
};

struct Group {  // threads of a warp that wait for each other in one warp-wide function
    const char* name;
    unsigned mask, line, arrived;
};

struct Warp {
    Fibre* lanes;
    unsigned present, ready;
    bool queued;
    int group_count;
    Group groups[32];
};

struct Extent {
    const unsigned char *low, *high;
    int argument;
};

struct Machine {
    std::vector<Fibre> fibres;
    std::vector<Warp> warps;
    std::vector<Block> blocks;
    std::vector<Warp*> queue;  // warps with a thread that can go on, without the running one
    std::vector<Extent> extents;
    Stacks stacks;
    Context main;
    Warp* running = nullptr;
    std::size_t shared_bytes = 0;
    int block_threads = 0, ended = 0, cluster_count = 0;
    unsigned cluster_phase = 0, give_way_every = 0;
    std::uint64_t state = 1;
    void (*kernel)(const void*) = nullptr;
    const void* arguments = nullptr;

    unsigned random(unsigned below) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<unsigned>((state >> 32) * below >> 32);
    }
};

inline Machine machine;
inline Fibre* current = nullptr;

[[noreturn]] inline void stop() {
    std::fflush(nullptr);
    _exit(3);
}

inline const char* base_name(const char* path) {
    const char* slash = std::strrchr(path, '/');
    return slash ? slash + 1 : path;
}

inline void print_thread(const Fibre& fibre) {
    const uint3& b = fibre.block->index;
    std::fprintf(stderr, "thread %d of block (%u, %u, %u)", fibre.number, b.x, b.y, b.z);
}

[[noreturn, gnu::format(printf, 2, 3)]] inline void fail(const Place& place, const char* format, ...) {
    std::fprintf(stderr, "%s:%u: ", base_name(place.file_name()), static_cast<unsigned>(place.line()));
    if (current) print_thread(*current);
    std::fputs(": ", stderr);
    va_list values;
    va_start(values, format);
    std::vfprintf(stderr, format, values);
    va_end(values);
    std::fputc('\n', stderr);
    stop();
}

inline void make_ready(Fibre& fibre) {
    Warp& warp = *fibre.warp;
    fibre.waits_for = nullptr;
    warp.ready |= 1u << fibre.lane;
    if (&warp != machine.running && !warp.queued) {
        warp.queued = true;
        machine.queue.push_back(&warp);
    }
}

inline Fibre* draw(bool other_warp) {
    Machine& m = machine;
    if (m.running && (other_warp || !m.running->ready)) {
        Warp* left = std::exchange(m.running, nullptr);
        if (left->ready) {
            left->queued = true;
            m.queue.push_back(left);
        }
    }
    if (!m.running) {
        if (m.queue.empty()) return nullptr;
        std::swap(m.queue[m.random(static_cast<unsigned>(m.queue.size()))], m.queue.back());
        m.running = m.queue.back();
        m.queue.pop_back();
        m.running->queued = false;
    }
    Warp& warp = *m.running;
    const unsigned turn = m.random(32);
    const unsigned turned = warp.ready >> turn | warp.ready << (31 & (32 - turn));
    const unsigned lane = (static_cast<unsigned>(__builtin_ctz(turned)) + turn) & 31;
    warp.ready &= ~(1u << lane);
    return warp.lanes + lane;
}

// Lets another thread run; comes back when this one is drawn again.
inline void switch_away(bool other_warp) {
    Fibre* self = current;
    Fibre* next = draw(other_warp);
    if (next == self) return;
    current = next;
    self->context.go_to(next ? next->context : machine.main);
}

inline void wait(const char* what, const Place& place) {
    current->waits_for = what;
    current->place = place;
    switch_away(false);
}

inline void give_way() {
    make_ready(*current);
    switch_away(true);
}

// Holds the threads of `mask` until all of them are here; then the last calls all(data of each lane, mask).
template <class Data, class All>
void collective(const char* name, unsigned mask, Data& data, const Place& place, All all) {
    Fibre& self = *current;
    Warp& warp = *self.warp;
    const unsigned bit = 1u << self.lane;
    mask &= warp.present;
    if (!(mask & bit)) fail(place, "%s with a mask that lacks the calling thread", name);
    int at = 0;
    for (; at < warp.group_count; ++at) {
        const Group& group = warp.groups[at];
        if (group.name == name && group.mask == mask && group.line == place.line()) break;
    }
    if (at == warp.group_count) warp.groups[warp.group_count++] = {name, mask, place.line(), 0};
    warp.groups[at].arrived |= bit;
    self.deposit = &data;
    if (warp.groups[at].arrived != mask) return wait(name, place);
    warp.groups[at] = warp.groups[--warp.group_count];
    Data* brought[32] = {};
    for (unsigned left = mask; left; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        brought[lane] = static_cast<Data*>(warp.lanes[lane].deposit);
    }
    all(brought, mask);
    for (unsigned left = mask & ~bit; left; left &= left - 1) warp.lanes[__builtin_ctz(left)].waits_for = nullptr;
    warp.ready |= mask & ~bit;
    if (machine.give_way_every && machine.random(machine.give_way_every) == 0) give_way();
}

inline void block_barrier(const char* name, const Place& place) {
    Machine& m = machine;
    Block& block = *current->block;
    if (++block.arrived < m.block_threads) return wait(name, place);
    block.arrived = 0;
    current->place = place;
    Fibre* first = current - current->number;
    for (int i = 0; i < m.block_threads; ++i) {
        Fibre& fibre = first[i];
        if (fibre.place.line() != fibre.warp->lanes[0].place.line())
            fail(fibre.place, "%s: thread %d of the same warp is at line %u; a warp must reach one barrier together",
                 name, fibre.warp->lanes[0].number, static_cast<unsigned>(fibre.warp->lanes[0].place.line()));
    }
    for (int i = 0; i < m.block_threads; ++i)
        if (first + i != current) make_ready(first[i]);
    give_way();
}

inline void arrive_at_cluster(const Place& place) {
    Machine& m = machine;
    if (current->cluster_arrived) fail(place, "a second cluster_arrive without a cluster_wait between them");
    current->cluster_arrived = true;
    current->cluster_phase = m.cluster_phase;
    if (++m.cluster_count < static_cast<int>(m.fibres.size())) return;
    m.cluster_count = 0;
    ++m.cluster_phase;
    for (Fibre& fibre : m.fibres)
        if (fibre.waits_for && std::strcmp(fibre.waits_for, "cluster_wait") == 0) make_ready(fibre);
}

inline void wait_for_cluster(const Place& place) {
    if (!current->cluster_arrived) fail(place, "cluster_wait without a cluster_arrive before it");
    if (current->cluster_phase == machine.cluster_phase)
        wait("cluster_wait", place);
    else
        give_way();
    current->cluster_arrived = false;
}

// What every thread waits for, where and how many, neighbours with the same answer in one line.
[[noreturn]] inline void report_deadlock() {
    const auto same = [](const Fibre& a, const Fibre& b) {
        return a.block == b.block && std::strcmp(a.waits_for, b.waits_for) == 0 &&
               (!*a.waits_for || a.place.line() == b.place.line());
    };
    std::fputs("deadlock, no thread can go on:\n", stderr);
    const std::vector<Fibre>& all = machine.fibres;
    int lines = 0;
    for (std::size_t i = 0, next; i < all.size(); i = next) {
        for (next = i + 1; next < all.size() && same(all[i], all[next]);) ++next;
        if (++lines > 40) {
            std::fputs("  and more\n", stderr);
            break;
        }
        const Fibre& fibre = all[i];
        const uint3& b = fibre.block->index;
        std::fprintf(stderr, "  block (%u, %u, %u) threads %d to %d ", b.x, b.y, b.z, fibre.number, all[next - 1].number);
        if (*fibre.waits_for)
            std::fprintf(stderr, "wait in %s at %s:%u\n", fibre.waits_for, base_name(fibre.place.file_name()),
                         static_cast<unsigned>(fibre.place.line()));
        else
            std::fputs("have ended\n", stderr);
    }
    stop();
}

}  // namespace emulator
