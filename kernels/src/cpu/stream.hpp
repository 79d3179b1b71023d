// Weights that come from memory are fetched ahead in the order in which they are read; those of a cache are not.
//
//   blocks w[0] to w[3], read side by side; some bytes before their end the blocks after them begin to be fetched
//
//   w[0] |----> first ----------> second |   w[1] |----> first ----------> second |   ...   w[0] + next |--> |   ...
//
// Two distances, because a line takes long to come from memory, and what waits for it in the first cache keeps one of
// the few places for lines on their way there (measured: a plain loop gains 1%, one that multiplies 8 to 12%).
#pragma once

#include <cstdint>

#include "simd.hpp"

// A lambda that is a part of the loop that calls it.
#define PAGED_INLINE_LAMBDA __attribute__((always_inline))

namespace paged::PAGED_VARIANT {

// What an inner loop fetches beside the line that it reads: one into the second cache, and one that came there before
// into the first.
struct LinesAhead {
    int64_t second, first;  // bytes ahead

    PAGED_INLINE void fetch(const void* at) const {
        __builtin_prefetch(static_cast<const char*>(at) + second, 0, 2);
        __builtin_prefetch(static_cast<const char*>(at) + first);
    }

    // Sixteen lines. GCC 12 takes a lambda that only fetches for one without effect and drops the call: this is a loop.
    PAGED_INLINE void fetch_tile(const void* at) const {
#pragma GCC unroll 16
        for (int64_t line = 0; line < 16; line++) {
            fetch(static_cast<const char*>(at) + 64 * line);
        }
    }
};

struct NoLinesAhead {
    PAGED_INLINE void fetch(const void*) const {}
    PAGED_INLINE void fetch_tile(const void*) const {}
};

struct FromMemory {
    static constexpr int64_t SECOND_BYTES = 2048, FIRST_BYTES = 512;

    // Bytes from a block to the one that is read after it.
    int64_t next;

    // Calls step(k, what to fetch) for k = 0, Step, ... below `depth`; `Bytes` of a block belong to each k.
    template <int Step, int64_t Bytes, class F>
    PAGED_INLINE void each(int64_t depth, F&& step) const {
        const int64_t jump = next - Bytes * depth;
        int64_t k = 0;
        for (const LinesAhead ahead{SECOND_BYTES, FIRST_BYTES}; k + SECOND_BYTES / Bytes < depth; k += Step) {
            step(k, ahead);
        }
        for (const LinesAhead ahead{SECOND_BYTES + jump, FIRST_BYTES}; k + FIRST_BYTES / Bytes < depth; k += Step) {
            step(k, ahead);
        }
        for (const LinesAhead ahead{SECOND_BYTES + jump, FIRST_BYTES + jump}; k < depth; k += Step) {
            step(k, ahead);
        }
    }
};

struct FromCache {
    template <int Step, int64_t Bytes, class F>
    PAGED_INLINE void each(int64_t depth, F&& step) const {
        for (int64_t k = 0; k < depth; k += Step) {
            step(k, NoLinesAhead{});
        }
    }
};

}  // namespace paged::PAGED_VARIANT
