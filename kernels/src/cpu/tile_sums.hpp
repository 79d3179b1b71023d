// What tiles compute (amx.hpp), bit for bit, with vectors: for one row that waits for weights from memory.
//
// A step of 32 k gives two sums for each output, one over the first and one over the second elements of its sixteen
// pairs, each a chain of fused multiply-adds from 0; both are added, and that to what the steps before gave. Numbers
// too small to be normal count as 0, as operands and as results.
//
// The rate of the tile unit depends on its neighbours; two rows and more are quicker with it all the same (measured:
// one row takes 1.01 to 1.03 times as long, two 0.93, four 0.86).
#pragma once

#include <immintrin.h>

#include "paged/types.h"
#include "simd.hpp"
#include "stream.hpp"

namespace paged::PAGED_VARIANT {

// Rounding as the tile unit does it. Memory is neither read nor written across the borders of its life.
class TileRounding {
public:
    TileRounding() {
        const uint32_t flushing = 0x1f80 | 0x8000 | 0x40;  // no exceptions, to nearest, results and operands to zero
        __asm__ volatile("stmxcsr %0" : "=m"(before_) : : "memory");
        __asm__ volatile("ldmxcsr %0" : : "m"(flushing) : "memory");
    }
    ~TileRounding() { __asm__ volatile("ldmxcsr %0" : : "m"(before_) : "memory"); }
    TileRounding(const TileRounding&) = delete;
    TileRounding& operator=(const TileRounding&) = delete;

private:
    uint32_t before_;
};

PAGED_INLINE __m512 pairs_first(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
PAGED_INLINE __m512 pairs_second(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

template <int B>
struct TileSums {
    __m512 total[B], first[B], second[B];
};

// One pair of k.
template <int B, class Ahead>
PAGED_INLINE void add_pair(TileSums<B>& sums, const bf16* x, const bf16* const (&w)[B], int64_t k, Ahead ahead) {
    int pair;
    std::memcpy(&pair, x + k, 4);
    const __m512 x_first = pairs_first(_mm512_set1_epi32(pair)), x_second = pairs_second(_mm512_set1_epi32(pair));
    unroll<B>([&](auto b) {
        ahead.fetch(w[b] + 16 * k);
        const __m512i pairs = _mm512_loadu_si512(w[b] + 16 * k);
        sums.first[b] = _mm512_fmadd_ps(pairs_first(pairs), x_first, sums.first[b]);
        sums.second[b] = _mm512_fmadd_ps(pairs_second(pairs), x_second, sums.second[b]);
    });
}

template <int B, class Source>
PAGED_OUTLINE void tile_sums(Source source, const bf16* x, const bf16* const* w, int64_t depth, float* out) {
    const TileRounding rounding;
    const bf16* blocks[B];
    unroll<B>([&](auto b) { blocks[b] = w[b]; });
    TileSums<B> sums;
    unroll<B>([&](auto b) { sums.total[b] = _mm512_setzero_ps(); });
    source.template each<PAGED_BLOCK_K, 32>(depth, [&](int64_t step, auto ahead) PAGED_INLINE_LAMBDA {
        unroll<B>([&](auto b) { sums.first[b] = sums.second[b] = _mm512_setzero_ps(); });
        for (int64_t k = step; k < step + PAGED_BLOCK_K; k += 2) {
            add_pair<B>(sums, x, blocks, k, ahead);
        }
        unroll<B>([&](auto b) {
            sums.total[b] = _mm512_add_ps(sums.total[b], _mm512_add_ps(sums.first[b], sums.second[b]));
        });
    });
    unroll<B>([&](auto b) { _mm512_storeu_ps(out + 16 * b, sums.total[b]); });
}

template <class Source>
void multiply_tile_sums(Source source, const bf16* x, const bf16* const* w, int blocks, int64_t depth, float* out) {
    int b = 0;
    for (; b + 4 <= blocks; b += 4) {
        tile_sums<4>(source, x, w + b, depth, out + 16 * b);
    }
    if (b + 2 <= blocks) {
        tile_sums<2>(source, x, w + b, depth, out + 16 * b);
        b += 2;
    }
    if (b < blocks) {
        tile_sums<1>(source, x, w + b, depth, out + 16 * b);
    }
}

}  // namespace paged::PAGED_VARIANT
