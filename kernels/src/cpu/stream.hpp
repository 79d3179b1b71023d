// Weights that come from memory are fetched ahead in the order in which they are read; those of a cache are not.
//
//   blocks w[0] to w[3], read side by side; some bytes before their end the blocks after them begin to be fetched
//
//   w[0] |----------> ahead |   w[1] |----------> ahead |   ...        w[0] + next |--> |   w[1] + next ...
#pragma once

#include <cstdint>

#include "simd.hpp"

// A lambda that is a part of the loop that calls it.
#define PAGED_INLINE_LAMBDA __attribute__((always_inline))

namespace paged::PAGED_VARIANT {

// What an inner loop fetches beside the line that it reads.
struct LinesAhead {
    int64_t bytes;

    PAGED_INLINE void fetch(const void* at) const { __builtin_prefetch(static_cast<const char*>(at) + bytes); }

    // Sixteen lines.
    PAGED_INLINE void fetch_tile(const void* at) const {
        unroll<16>([&](auto line) { fetch(static_cast<const char*>(at) + 64 * line); });
    }
};

struct NoLinesAhead {
    PAGED_INLINE void fetch(const void*) const {}
    PAGED_INLINE void fetch_tile(const void*) const {}
};

struct FromMemory {
    static constexpr int64_t BYTES_AHEAD = 2048;

    // Bytes from a block to the one that is read after it.
    int64_t next;

    // Calls step(k, what to fetch) for k = 0, Step, ... below `depth`; `Bytes` of a block belong to each k.
    template <int Step, int64_t Bytes, class F>
    PAGED_INLINE void each(int64_t depth, F&& step) const {
        int64_t k = 0;
        for (const LinesAhead within{BYTES_AHEAD}; k + BYTES_AHEAD / Bytes < depth; k += Step) {
            step(k, within);
        }
        for (const LinesAhead beyond{BYTES_AHEAD + next - Bytes * depth}; k < depth; k += Step) {
            step(k, beyond);
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
