// Reads a launch from a file, runs all clusters of its grid one after another, writes the tensors back.
#pragma once
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <tuple>
#include <type_traits>

#include "machine.hpp"

namespace emulator {

struct Region {  // memory with pages around it that nobody may touch; a tensor or the shared memory of a block
    unsigned char *page, *start, *end, *limit;  // start to end was asked for, page to limit can be touched

    static Region make(std::size_t bytes, std::size_t alignment) {
        const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
        const std::size_t room = (rounded + page_bytes - 1) / page_bytes * page_bytes;
        unsigned char* base = reserve(room + 2 * page_bytes) + page_bytes;
        allow(base, room);
        std::memset(base, poison, room);
        return {base, base + room - rounded, base + room - rounded + bytes, base + room};
    }
    // Some bytes lie between the untouchable pages and the region; they hold the poison, or somebody wrote there.
    bool surroundings_are_intact() const {
        const auto clean = [](unsigned char byte) { return byte == poison; };
        return std::all_of(page, start, clean) && std::all_of(end, limit, clean);
    }
    void open(int access) const { allow(page, static_cast<std::size_t>(limit - page), access); }
    bool near(const unsigned char* at) const { return at + page_bytes >= start && at < limit + page_bytes; }
};

struct Argument {
    char kind;  // p: pointer, i: integer, f: floating point
    std::size_t item_bytes;  // of the tensor or of the value; 0: not known
    std::vector<unsigned char> value;
};

struct Request {
    unsigned grid[3], block[3], cluster[3];
    std::uint64_t seed;
    std::string data_path;
    std::vector<Region> regions;
    std::vector<Argument> arguments;
};

inline std::vector<Region> shared_regions, global_regions;

[[noreturn]] inline void refuse(const std::string& message) {
    std::fprintf(stderr, "%s\n", message.c_str());
    stop();
}

inline Request read_request(const char* path) {
    Request r{};
    std::ifstream file(path);
    std::string word;
    while (file >> word) {
        if (word == "launch") {
            for (auto* three : {r.grid, r.block, r.cluster}) file >> three[0] >> three[1] >> three[2];
            file >> machine.shared_bytes >> r.seed >> r.data_path;
        } else if (word == "region") {
            std::size_t bytes;
            file >> bytes;
            r.regions.push_back(Region::make(bytes, 256));
        } else if (word == "tensor") {
            std::size_t region, offset, low, high, item;
            file >> region >> offset >> low >> high >> item;
            unsigned char* start = r.regions.at(region).start;
            const unsigned char* pointer = start + offset;
            machine.extents.push_back({start + low, start + high, static_cast<int>(r.arguments.size())});
            std::vector<unsigned char> value(sizeof pointer);
            std::memcpy(value.data(), &pointer, sizeof pointer);
            r.arguments.push_back({'p', item, value});
        } else if (word == "value") {
            char kind;
            std::size_t bytes;
            file >> kind >> bytes;
            std::vector<unsigned char> value(bytes);
            for (unsigned char& byte : value) {
                unsigned number;
                file >> number;
                byte = static_cast<unsigned char>(number);
            }
            r.arguments.push_back({kind, kind == 'p' ? 0 : bytes, value});  // p: a null pointer
        }
    }
    return r;
}

inline void move_data(const Request& r, bool out) {
    std::fstream file(r.data_path, std::ios::binary | std::ios::in | std::ios::out);
    for (const Region& region : r.regions) {
        auto* bytes = reinterpret_cast<char*>(region.start);
        if (out)
            file.write(bytes, region.end - region.start);
        else
            file.read(bytes, region.end - region.start);
    }
    file.flush();
    if (!file) refuse("the emulator could not move the tensors through " + r.data_path);
}

template <class P>
P take(const Argument& argument, std::size_t index) {
    using Bare = std::remove_cv_t<P>;
    const std::string name = "argument " + std::to_string(index) + ": ";
    const auto bytes = [](std::size_t n) { return std::to_string(n) + (n == 1 ? " byte" : " bytes"); };
    if constexpr (std::is_pointer_v<Bare>) {
        using To = std::remove_cv_t<std::remove_pointer_t<Bare>>;
        if (argument.kind != 'p') refuse(name + "the kernel takes a pointer, not a number");
        if constexpr (!std::is_void_v<To>)
            if (argument.item_bytes && sizeof(To) % argument.item_bytes)
                refuse(name + "a tensor of " + bytes(argument.item_bytes) + " an element; the kernel takes " +
                       bytes(sizeof(To)));
    } else {
        constexpr char kind = std::is_floating_point_v<Bare> ? 'f' : 'i';
        if (argument.kind == 'p') refuse(name + "the kernel takes a number, not a tensor");
        if (argument.kind != kind || argument.value.size() != sizeof(Bare))
            refuse(name + "a number of " + bytes(argument.value.size()) + " (" + argument.kind + "); the kernel takes " +
                   bytes(sizeof(Bare)) + " (" + kind + ")");
    }
    Bare result;
    std::memcpy(&result, argument.value.data(), sizeof result);
    return result;
}

inline void fault(int number, siginfo_t* info, void* state) {
    const auto* at = static_cast<const unsigned char*>(info->si_addr);
    std::string what = "an address that belongs to no tensor and no shared memory";
    const auto name = [&](const Region& region, const std::string& owner, bool closed) {
        if (!region.near(at)) return;
        const auto offset = std::to_string(at - region.start), size = std::to_string(region.end - region.start);
        what = "byte " + offset + " of " + owner + ", which has " + size + " bytes";
        if (closed && at >= region.start && at < region.end) what += "; that block has ended";
    };
    for (std::size_t i = 0; i < global_regions.size(); ++i) {
        std::string owner = "the tensor of argument";
        for (const Extent& extent : machine.extents)
            if (extent.low >= global_regions[i].start && extent.high <= global_regions[i].limit)
                owner += " " + std::to_string(extent.argument);
        name(global_regions[i], owner, false);
    }
    for (std::size_t i = 0; i < shared_regions.size(); ++i)
        name(shared_regions[i], "the shared memory of block " + std::to_string(i) + " of the cluster", true);
    if (machine.stacks.holds(at)) what = "beyond the thread's stack: too many local variables";
    if (number == SIGILL) what = "an access that is not aligned, or an index outside of its array";
    if (number == SIGFPE) what = "an integer division by zero";
    if (info->si_code == SI_KERNEL) what = "a 16-byte access whose address is not a multiple of 16, or a wild address";
    std::uintptr_t code = 0;
#if defined(__x86_64__)
    code = static_cast<std::uintptr_t>(static_cast<ucontext_t*>(state)->uc_mcontext.gregs[REG_RIP]);
#endif
    std::fprintf(stderr, "@0x%zx: ", static_cast<std::size_t>(code));
    if (current) print_thread(*current);
    std::fprintf(stderr, ": fault: %s\n", what.c_str());
    stop();
}

inline void catch_faults() {
    static unsigned char memory[64 * 1024];
    const stack_t stack{memory, 0, sizeof memory};
    sigaltstack(&stack, nullptr);
    struct sigaction action {};
    action.sa_sigaction = fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigaction(number, &action, nullptr);
}

inline void end_thread() {
    Machine& m = machine;
    Block& block = *current->block;
    current->waits_for = "";
    ++m.ended;
    if (++block.ended == m.block_threads) {
        const Region& region = shared_regions[static_cast<std::size_t>(block.rank)];
        if (!region.surroundings_are_intact()) fail(Place::current(), "this block wrote outside of its shared memory");
        if (m.blocks.size() > 1) region.open(PROT_NONE);
    }
    switch_away(false);
    std::abort();
}

inline void thread_entry() {
    machine.kernel(machine.arguments);
    end_thread();
}

inline void make_machine(const Request& r) {
    Machine& m = machine;
    const std::size_t blocks = std::size_t{r.cluster[0]} * r.cluster[1] * r.cluster[2];
    m.block_threads = static_cast<int>(r.block[0] * r.block[1] * r.block[2]);
    const std::size_t threads = static_cast<std::size_t>(m.block_threads), warps = (threads + 31) / 32;
    m.blocks.resize(blocks);
    m.warps.resize(blocks * warps);
    m.fibres.resize(blocks * threads);
    m.stacks.make(blocks * threads);
    for (std::size_t b = 0; b < blocks; ++b) shared_regions.push_back(Region::make(m.shared_bytes, 1024));
    for (std::size_t i = 0; i < m.fibres.size(); ++i) {
        Fibre& fibre = m.fibres[i];
        const std::size_t number = i % threads;
        fibre.number = static_cast<int>(number);
        fibre.lane = fibre.number % 32;
        fibre.block = &m.blocks[i / threads];
        fibre.warp = &m.warps[i / threads * warps + number / 32];
        const unsigned n = static_cast<unsigned>(number);
        fibre.thread = {n % r.block[0], n / r.block[0] % r.block[1], n / r.block[0] / r.block[1]};
        if (fibre.lane == 0) fibre.warp->lanes = &fibre;
        fibre.warp->present |= 1u << fibre.lane;
    }
}

inline void run_cluster(const Request& r, unsigned x, unsigned y, unsigned z) {
    Machine& m = machine;
    const unsigned* c = r.cluster;
    for (unsigned rank = 0; rank < m.blocks.size(); ++rank) {
        const Region& region = shared_regions[rank];
        region.open(PROT_READ | PROT_WRITE);
        std::memset(region.start, poison, static_cast<std::size_t>(region.limit - region.start));
        const uint3 index{x * c[0] + rank % c[0], y * c[1] + rank / c[0] % c[1], z * c[2] + rank / c[0] / c[1]};
        m.blocks[rank] = {index, static_cast<int>(rank), region.start, 0, 0};
    }
    m.ended = m.cluster_count = 0;
    for (Warp& warp : m.warps) warp.ready = 0, warp.queued = false, warp.group_count = 0;
    for (std::size_t i = 0; i < m.fibres.size(); ++i) {
        Fibre& fibre = m.fibres[i];
        fibre.cluster_arrived = false;
        fibre.copies.clear();
        fibre.groups.clear();
        fibre.context.start(m.stacks.top(i), Stacks::bytes - page_bytes, thread_entry);
        make_ready(fibre);
    }
    current = draw(true);
    m.main.go_to(current->context);
    if (m.ended < static_cast<int>(m.fibres.size())) report_deadlock();
    m.running = nullptr;
}

inline void run_grid(const Request& r) {
    Machine& m = machine;
    gridDim = {r.grid[0], r.grid[1], r.grid[2]};
    blockDim = {r.block[0], r.block[1], r.block[2]};
    m.state = (r.seed + 1) * 0x9e3779b97f4a7c15u | 1;
    constexpr unsigned often[] = {0, 64, 8, 512};
    m.give_way_every = often[r.seed % 4];
    const unsigned nx = r.grid[0] / r.cluster[0], ny = r.grid[1] / r.cluster[1], nz = r.grid[2] / r.cluster[2];
    std::vector<unsigned> order(nx * ny * nz);
    for (unsigned i = 0; i < order.size(); ++i) {
        order[i] = i;
        std::swap(order[i], order[r.seed ? m.random(i + 1) : i]);
    }
    for (unsigned i : order) run_cluster(r, i % nx, i / nx % ny, i / nx / ny);
}

template <class... P>
int run(const char* request, void (*kernel)(P...)) {
    const Request r = read_request(request);
    if (r.arguments.size() != sizeof...(P))
        refuse(std::to_string(r.arguments.size()) + " arguments; the kernel takes " + std::to_string(sizeof...(P)));
    move_data(r, false);
    static void (*called)(P...) = kernel;
    using Values = std::tuple<std::remove_cv_t<P>...>;
    const auto values = [&]<std::size_t... I>(std::index_sequence<I...>) {
        return Values{take<P>(r.arguments[I], I)...};
    }(std::index_sequence_for<P...>{});
    machine.arguments = &values;
    machine.kernel = [](const void* packed) { std::apply(called, *static_cast<const Values*>(packed)); };
    global_regions = r.regions;
    catch_faults();
    make_machine(r);
    run_grid(r);
    current = nullptr;
    for (const Extent& extent : machine.extents)
        for (const Region& region : r.regions)
            if (extent.low >= region.start && extent.high <= region.end && !region.surroundings_are_intact())
                refuse("the kernel wrote outside of argument " + std::to_string(extent.argument));
    move_data(r, true);
    return 0;
}

}  // namespace emulator
