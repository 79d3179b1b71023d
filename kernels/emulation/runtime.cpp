// Runs grids: one fiber for each thread of a block, one block after the other. Compiled without sanitizers.
//
// Environment: EMULATION_SEED=N runs threads in a random order of that seed instead of in turn.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "state.hpp"

extern "C" {
void emulation_switch(void** from, void* to);
void emulation_entry();
void emulation_fiber_main();
}

#if defined(__x86_64__)
asm(R"(
.text
.globl emulation_switch
emulation_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.globl emulation_entry
emulation_entry:
  xor %ebp,%ebp
  and $-16,%rsp
  call emulation_fiber_main
)");
constexpr int kSavedWords = 6;  // below the return address
#elif defined(__aarch64__)
asm(R"(
.text
.globl emulation_switch
emulation_switch:
  stp x29, x30, [sp, #-160]!
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x29, x30, [sp], #160
  ret
.globl emulation_entry
emulation_entry:
  mov x29, xzr
  bl emulation_fiber_main
)");
#else
#error "the emulator switches fibers on x86-64 and AArch64 only"
#endif

namespace emulation {

thread_local ThreadContext* current;
thread_local Block* block;
thread_local Fiber* fiber;

namespace {

// The launch is a fiber too, so to speak: what to return to.
thread_local void* launch_stack_pointer;
thread_local void* launch_tsan;
thread_local const void* launch_stack;
thread_local size_t launch_stack_bytes;
thread_local void* launch_asan_stack;
thread_local uint64_t random_state;

constexpr size_t kStaticShared = 48 * 1024;
constexpr size_t kArena = kStaticShared + 8 * 1024;  // and the gaps between variables
// Of static and dynamic shared memory together: what a block may have, and what it may have where that was asked for
// (of compute capability 8.6 and 8.9; the others have more).
constexpr size_t kSharedUnasked = 48 * 1024, kSharedAsked = 99 * 1024;
constexpr unsigned kMaxThreads = 1024, kMaxDepth = 64;
constexpr unsigned kMaxGridX = 0x7fffffff, kMaxGrid = 0xffff;
constexpr size_t kMaxVariables = 64;

char order_of_start, order_of_end;
const char* kernel_name = "";

size_t stack_bytes() { return (__sanitizer_start_switch_fiber ? 256 : 64) * size_t{1024}; }

char* map_stack(void* at) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
    void* stack = mmap(at, stack_bytes(), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stack == MAP_FAILED)
        fail("no memory for a thread's stack");
    return static_cast<char*>(stack);
}

void* shared_memory(size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 128, bytes))
        fail("no memory for %zu bytes of shared memory", bytes);
    auto* each = static_cast<volatile unsigned char*>(memory);
    for (size_t i = 0; i < bytes; i++)
        each[i] = 0xff;  // NaN in every format
    return memory;
}

void report_waiting() {
    constexpr int kShown = 40;
    int shown = 0;
    for (const Fiber& other : block->fibers) {
        if (shown++ == kShown)
            break;
        const char* what = other.state == State::kDone ? "has ended" : "waits at";
        std::fprintf(
            stderr, "  thread %u %s %s:%d\n", other.context.linear, what, other.site.file ? other.site.file : "",
            other.site.line
        );
    }
}

// Frees what the thread sanitizer must not see used again before the launch is over.
struct Remains {
    std::vector<void*> memory;
    std::vector<void*> fibers;

    void clear() {
        for (void* each : fibers)
            __tsan_destroy_fiber(each);
        for (void* each : memory)
            std::free(each);
    }
};

void check_shared(const Block& self) {
    if (self.shared_used > self.shared_limit)
        fail("%zu bytes of shared memory, a block may have %zu", self.shared_used, self.shared_limit);
}

void check_sizes(dim3 grid, dim3 size) {
    const bool is_grid = grid.x && grid.y && grid.z && grid.x <= kMaxGridX && grid.y <= kMaxGrid && grid.z <= kMaxGrid;
    if (!is_grid)
        fail("a grid of %u x %u x %u blocks", grid.x, grid.y, grid.z);
    const unsigned threads = size.x * size.y * size.z;
    if (threads == 0 || threads > kMaxThreads || size.z > kMaxDepth)
        fail("a block of %u x %u x %u threads", size.x, size.y, size.z);
}

void begin_block(Block& self, unsigned threads, size_t shared_bytes, Remains& remains) {
    self.warps.assign((threads + kLanes - 1) / kLanes, Warp{});
    self.alive = static_cast<int>(threads);
    // Fresh addresses for every block: the thread sanitizer orders by address, and blocks are not ordered.
    auto* order = static_cast<char*>(std::malloc(2 + 2 * kGroups * self.warps.size()));
    remains.memory.push_back(order);
    self.barrier = Barrier{};
    self.barrier.order = order;
    for (Warp& warp : self.warps) {
        for (Meeting& meeting : warp.meetings)
            meeting.order = order += 2;
    }
    self.arena_used = 0;
    self.shared_used = shared_bytes;
    self.arena = static_cast<char*>(shared_memory(kArena));
    if (__asan_poison_memory_region)
        __asan_poison_memory_region(self.arena, kArena);
    self.dynamic = shared_bytes ? shared_memory(shared_bytes) : nullptr;
    counters().blocks++;
    counters().threads += threads;
}

void end_block(Block& self, Remains& remains) {
    if (__asan_unpoison_memory_region)
        __asan_unpoison_memory_region(self.arena, kArena);
    for (void* memory : {self.dynamic, static_cast<void*>(self.arena)})
        remains.memory.push_back(memory);
    if (__tsan_destroy_fiber) {
        for (Fiber& each : self.fibers)
            remains.fibers.push_back(each.tsan);
    } else {
        remains.clear();
        remains = {};
    }
    self.variables.clear();
}

void begin_fibers(Block& self, dim3 grid, dim3 size, uint3 at, const std::vector<char*>& stacks) {
    for (unsigned i = 0; i < self.fibers.size(); i++) {
        Fiber& each = self.fibers[i];
        each.state = State::kReady;
        each.stack = stacks[i];
        each.asan_stack = nullptr;
        each.site = {};
        each.context = {
            {i % size.x, i / size.x % size.y, i / (size.x * size.y)}, at, size, grid, i % kLanes, i / kLanes, i
        };
        self.warps[i / kLanes].alive |= 1u << (i % kLanes);
        if (__tsan_create_fiber) {
            each.tsan = __tsan_create_fiber(0);
            map_stack(stacks[i]);  // accesses of the last block's thread to its stack must be forgotten
        }
        auto** top = reinterpret_cast<void**>(stacks[i] + stack_bytes() - 64);
#if defined(__x86_64__)
        *--top = reinterpret_cast<void*>(emulation_entry);
        for (int word = 0; word < kSavedWords; word++)
            *--top = nullptr;
#else
        top -= 20;
        for (int word = 0; word < 20; word++)
            top[word] = nullptr;
        top[1] = reinterpret_cast<void*>(emulation_entry);
#endif
        each.stack_pointer = top;
    }
}

void run_block(Block& self) {
    release(&order_of_start);  // nothing is acquired between blocks: they stay unordered
    fiber = nullptr;
    switch_to(&self.fibers[random_state ? random_state % self.fibers.size() : 0]);
}

}  // namespace

Counters& counters() {
    static Counters all;
    return all;
}

void fail(const char* format, ...) {
    std::fprintf(stderr, "emulation: kernel %s", kernel_name);
    if (fiber) {
        const uint3 at = fiber->context.block;
        std::fprintf(stderr, ", block (%u, %u, %u), thread %u", at.x, at.y, at.z, fiber->context.linear);
    }
    std::fprintf(stderr, ": ");
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fputc('\n', stderr);
    std::abort();
}

void switch_to(Fiber* next) {
    Fiber* from = fiber;
    counters().switches++;
    if (__sanitizer_start_switch_fiber) {
        void** save = !from ? &launch_asan_stack : from->state == State::kDone ? nullptr : &from->asan_stack;
        __sanitizer_start_switch_fiber(
            save, next ? next->stack : launch_stack, next ? stack_bytes() : launch_stack_bytes
        );
    }
    if (__tsan_switch_to_fiber)
        __tsan_switch_to_fiber(next ? next->tsan : launch_tsan, 1);
    fiber = next;
    current = next ? &next->context : nullptr;
    emulation_switch(
        from ? &from->stack_pointer : &launch_stack_pointer, next ? next->stack_pointer : launch_stack_pointer
    );
    if (__sanitizer_finish_switch_fiber) {
        __sanitizer_finish_switch_fiber(from ? from->asan_stack : launch_asan_stack, nullptr, nullptr);
    }
}

Fiber* next_ready(unsigned after) {
    auto& fibers = block->fibers;
    const size_t count = fibers.size();
    size_t first = after;
    if (random_state) {
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        first = random_state % count;
    }
    for (size_t i = 1; i <= count; i++) {
        Fiber& candidate = fibers[(first + i) % count];
        if (candidate.state == State::kReady)
            return &candidate;
    }
    return nullptr;
}

void wait_for(const void* what, Site site) {
    fiber->state = State::kWaiting;
    fiber->waits_for = what;
    fiber->site = site;
    Fiber* next = next_ready(fiber->context.linear);
    if (!next) {
        report_waiting();
        fail("deadlock: no thread can run");
    }
    switch_to(next);
}

void wake(const void* what) {
    for (Fiber& each : block->fibers) {
        if (each.state == State::kWaiting && each.waits_for == what)
            each.state = State::kReady;
    }
}

void* dynamic_shared() { return block->dynamic; }

void* static_shared(const void* key, size_t bytes) {
    for (const SharedVariable& variable : block->variables) {
        if (variable.key == key)
            return variable.address;
    }
    const size_t needed = (bytes + 127) / 128 * 128 + 128;
    if (block->arena_used + needed > kArena)
        fail("more than 48 KiB of static shared memory");
    block->shared_used = (block->shared_used + 15) / 16 * 16 + bytes;
    check_shared(*block);
    if (block->variables.size() == kMaxVariables)
        fail("more than %zu variables in static shared memory", kMaxVariables);
    char* address = block->arena + block->arena_used;
    block->arena_used += needed;
    block->variables.push_back({key, address});
    if (__asan_unpoison_memory_region)
        __asan_unpoison_memory_region(address, bytes);
    return address;
}

void launch(dim3 grid, dim3 size, size_t shared_bytes, bool asks, const std::function<void()>& body, const char* name) {
    const unsigned threads = size.x * size.y * size.z;
    kernel_name = name;
    check_sizes(grid, size);
    const char* seed = std::getenv("EMULATION_SEED");
    random_state = seed ? std::strtoull(seed, nullptr, 10) * 0x9E3779B97F4A7C15ull : 0;
    static thread_local std::vector<char*> stacks;
    while (stacks.size() < threads)
        stacks.push_back(map_stack(nullptr));
    if (__tsan_get_current_fiber)
        launch_tsan = __tsan_get_current_fiber();
    Block self;
    self.shared_used = shared_bytes;
    self.shared_limit = asks ? kSharedAsked : kSharedUnasked;
    check_shared(self);
    self.variables.reserve(kMaxVariables);  // never moved, which the thread sanitizer would take for a race
    Remains remains;
    self.fibers.resize(threads);
    self.body = &body;
    block = &self;
    counters().launches++;
    for (unsigned z = 0; z < grid.z; z++) {
        for (unsigned y = 0; y < grid.y; y++) {
            for (unsigned x = 0; x < grid.x; x++) {
                begin_block(self, threads, shared_bytes, remains);
                begin_fibers(self, grid, size, {x, y, z}, stacks);
                run_block(self);
                end_block(self, remains);
            }
        }
    }
    acquire(&order_of_end);
    remains.clear();
    block = nullptr;
    fiber = nullptr;
    current = nullptr;
}

}  // namespace emulation

extern "C" void emulation_fiber_main() {
    using namespace emulation;
    if (__sanitizer_finish_switch_fiber) {
        const bool is_first = launch_stack == nullptr;
        __sanitizer_finish_switch_fiber(
            nullptr, is_first ? &launch_stack : nullptr, is_first ? &launch_stack_bytes : nullptr
        );
    }
    acquire(&order_of_start);
    (*block->body)();
    Fiber* self = fiber;
    wait_copies(0);  // those that nobody waited for land at the end
    release(&order_of_end);
    block->warps[self->context.warp].alive &= ~(1u << self->context.lane);
    block->alive--;
    self->state = State::kDone;
    Barrier& barrier = block->barrier;
    if (barrier.arrived && barrier.arrived == block->alive)
        complete(barrier);
    Fiber* next = next_ready(self->context.linear);
    if (!next && block->alive) {
        report_waiting();
        fail("deadlock: the other threads have ended");
    }
    switch_to(next);
    std::abort();
}
