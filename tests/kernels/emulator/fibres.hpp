// A CUDA thread as a fibre: a stack of its own, and a switch that saves only what calls must preserve.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

constexpr std::size_t page_bytes = 4096;

inline unsigned char* reserve(std::size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        std::fprintf(stderr, "the emulator could not reserve %zu bytes of memory\n", bytes);
        std::_Exit(3);
    }
    return static_cast<unsigned char*>(memory);
}

inline void allow(unsigned char* start, std::size_t bytes, int access = PROT_READ | PROT_WRITE) {
    if (bytes > 0 && mprotect(start, bytes, access) != 0) {
        std::fprintf(stderr, "the emulator could not protect %zu bytes of memory\n", bytes);
        std::_Exit(3);
    }
}

// Stacks with a page below each that nobody may touch. Their tops are spread over cache sets.
struct Stacks {
    static constexpr std::size_t bytes = 33 * page_bytes, stride = bytes + page_bytes;
    unsigned char* base = nullptr;
    std::size_t count = 0;

    void make(std::size_t how_many) {
        count = how_many;
        base = reserve(count * stride);
        if (count > 16384) return allow(base, count * stride);  // Linux allows 65,530 mappings: no guards
        for (std::size_t i = 0; i < count; ++i) allow(base + i * stride + page_bytes, bytes);
    }
    unsigned char* top(std::size_t i) const { return base + (i + 1) * stride - (i % 32) * 128; }
    bool holds(const unsigned char* address) const {
        return address >= base && address < base + count * stride;
    }
};

#if defined(__x86_64__)

extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, . - emulator_switch
)");

struct Context {
    void* stack_pointer = nullptr;

    void start(unsigned char* top, std::size_t, void (*entry)()) {
        auto* words = reinterpret_cast<std::uintptr_t*>(top);
        words[-1] = 0;
        words[-2] = reinterpret_cast<std::uintptr_t>(entry);
        for (int i = 3; i <= 8; ++i) words[-i] = 0;
        stack_pointer = words - 8;
    }
    void go_to(Context& other) { emulator_switch(&stack_pointer, other.stack_pointer); }
};

#else

struct Context {
    ucontext_t state;

    void start(unsigned char* top, std::size_t bytes, void (*entry)()) {
        getcontext(&state);
        state.uc_stack.ss_sp = top - bytes;
        state.uc_stack.ss_size = bytes;
        state.uc_link = nullptr;
        makecontext(&state, entry, 0);
    }
    void go_to(Context& other) { swapcontext(&state, &other.state); }
};

#endif

}  // namespace emulator
