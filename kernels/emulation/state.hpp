// The emulator's own state: fibers, the block that runs, barriers, and how sanitizers are told. For runtime.cpp and
// rendezvous.cpp only; compiled without sanitizers.
#pragma once
#include <vector>

#include "runtime.h"

extern "C" {
// Present only in programs that are linked with a sanitizer.
void* __tsan_create_fiber(unsigned) __attribute__((weak));
void __tsan_destroy_fiber(void*) __attribute__((weak));
void __tsan_switch_to_fiber(void*, unsigned) __attribute__((weak));
void* __tsan_get_current_fiber() __attribute__((weak));
void __tsan_acquire(void*) __attribute__((weak));
void __tsan_release(void*) __attribute__((weak));
void __sanitizer_start_switch_fiber(void**, const void*, size_t) __attribute__((weak));
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) __attribute__((weak));
void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));
void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));
}

namespace emulation {

enum class State { kReady, kWaiting, kDone };

struct Copy {
    void* destination;
    const void* source;
    int bytes;
    int valid;
};

struct Fiber {
    ThreadContext context;
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    State state = State::kReady;
    void* tsan = nullptr;
    void* asan_stack = nullptr;
    const void* waits_for = nullptr;
    Site site{};
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};

// `order` are addresses by which the thread sanitizer orders what comes before a meeting and what comes after it; two,
// so that a thread that runs ahead to the next meeting does not disturb the last.
struct Barrier {
    int arrived = 0;
    int generation = 0;
    int votes = 0;
    int result[2] = {0, 0};
    Site site{};
    char* order = nullptr;
};

struct Meeting {
    unsigned mask = 0;
    unsigned arrived = 0;
    int generation = 0;
    Collective kind{};
    Site site{};
    uint32_t table[2][kLanes * kWords];
    char* order = nullptr;
};

// Lanes of a warp may be divided into as many groups that meet at the same time.
constexpr int kGroups = 4;

struct Warp {
    Meeting meetings[kGroups];
    unsigned alive = 0;
};

struct SharedVariable {
    const void* key;
    void* address;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier barrier;
    int alive = 0;
    void* dynamic = nullptr;
    char* arena = nullptr;
    size_t arena_used = 0;
    size_t shared_used = 0;  // static and dynamic, without the gaps
    size_t shared_limit = 0;
    std::vector<SharedVariable> variables;
    const std::function<void()>* body = nullptr;
};

extern thread_local Block* block;
extern thread_local Fiber* fiber;

// The next fiber that can run, or null.
Fiber* next_ready(unsigned after);
// Gives the core to another fiber, or to the launch (null).
void switch_to(Fiber* next);
// Lets the others run until whoever completes `what` makes this fiber ready.
void wait_for(const void* what, Site site);
void wake(const void* what);
void complete(Barrier& barrier);

inline void acquire(void* address) {
    if (__tsan_acquire)
        __tsan_acquire(address);
}
inline void release(void* address) {
    if (__tsan_release)
        __tsan_release(address);
}

// Bytes touched on behalf of the kernel, compiled with its sanitizers (copies.cpp). A copy may land at any moment from
// when it is issued until it is waited for: it spoils its destination at the first and brings the data at the last.
void spoil(const Copy& copy);
void apply(const Copy& copy);

}  // namespace emulation
