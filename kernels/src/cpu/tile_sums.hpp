// What tiles compute (amx.hpp), bit for bit, with vectors: for the few rows that wait for weights from memory.
//
// A step of 32 k gives two sums for each output, one over the first and one over the second elements of its sixteen
// pairs, each a chain of fused multiply-adds from 0; both are added, and that to what the steps before gave. Numbers
// too small to be normal count as 0, as operands and as results.
//
// Loads of tiles leave the reading of memory to whatever the processor guesses, and the rate of the tile unit depends
// on its neighbours (measured: one row takes 1.0 to 1.3 times as long). Many rows need its rate, one does not.
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

template <int M, int B>
struct TileSums {
    __m512 total[M][B], first[M][B], second[M][B];
};

// One pair of k.
template <int M, int B, class Ahead>
PAGED_INLINE void add_pair(
    TileSums<M, B>& sums, const bf16* x, int64_t x_stride, const bf16* const (&w)[B], int64_t k, Ahead ahead
) {
    __m512 x_first[M], x_second[M];
    unroll<M>([&](auto m) {
        int pair;
        std::memcpy(&pair, x + m * x_stride + k, 4);
        x_first[m] = pairs_first(_mm512_set1_epi32(pair));
        x_second[m] = pairs_second(_mm512_set1_epi32(pair));
    });
    unroll<B>([&](auto b) {
        ahead.fetch(w[b] + 16 * k);
        const __m512i pairs = _mm512_loadu_si512(w[b] + 16 * k);
        const __m512 first = pairs_first(pairs), second = pairs_second(pairs);
        unroll<M>([&](auto m) {
            sums.first[m][b] = _mm512_fmadd_ps(first, x_first[m], sums.first[m][b]);
            sums.second[m][b] = _mm512_fmadd_ps(second, x_second[m], sums.second[m][b]);
        });
    });
}

template <int M, int B, class Source>
PAGED_OUTLINE void tile_sums(
    Source source, const bf16* x, int64_t x_stride, const bf16* const* w, int64_t depth, float* out, int64_t out_stride
) {
    const TileRounding rounding;
    const bf16* blocks[B];
    unroll<B>([&](auto b) { blocks[b] = w[b]; });
    TileSums<M, B> sums;
    unroll<M>([&](auto m) { unroll<B>([&](auto b) { sums.total[m][b] = _mm512_setzero_ps(); }); });
    source.template each<PAGED_BLOCK_K, 32>(depth, [&](int64_t step, auto ahead) PAGED_INLINE_LAMBDA {
        unroll<M>([&](auto m) {
            unroll<B>([&](auto b) { sums.first[m][b] = sums.second[m][b] = _mm512_setzero_ps(); });
        });
        for (int64_t k = step; k < step + PAGED_BLOCK_K; k += 2) {
            add_pair<M, B>(sums, x, x_stride, blocks, k, ahead);
        }
        unroll<M>([&](auto m) {
            unroll<B>([&](auto b) {
                const __m512 both = _mm512_add_ps(sums.first[m][b], sums.second[m][b]);
                sums.total[m][b] = _mm512_add_ps(sums.total[m][b], both);
            });
        });
    });
    unroll<M>([&](auto m) {
        unroll<B>([&](auto b) { _mm512_storeu_ps(out + m * out_stride + 16 * b, sums.total[m][b]); });
    });
}

// Rows of one pass that vectors multiply.
constexpr int64_t MAX_VECTOR_ROWS = 4;

template <int M, class Source>
void tile_sums_rows(
    Source source, const bf16* x, int64_t x_stride, const bf16* const* w, int blocks, int64_t depth, float* out,
    int64_t out_stride
) {
    constexpr int most = M <= 2 ? 4 : 2;
    int b = 0;
    for (; b + most <= blocks; b += most) {
        tile_sums<M, most>(source, x, x_stride, w + b, depth, out + 16 * b, out_stride);
    }
    if (most == 4 && b + 2 <= blocks) {
        tile_sums<M, 2>(source, x, x_stride, w + b, depth, out + 16 * b, out_stride);
        b += 2;
    }
    if (b < blocks) {
        tile_sums<M, 1>(source, x, x_stride, w + b, depth, out + 16 * b, out_stride);
    }
}

template <class Source>
void multiply_tile_sums(
    Source source, const bf16* x, int64_t x_stride, int64_t rows, const bf16* const* w, int blocks, int64_t depth,
    float* out, int64_t out_stride
) {
    unroll<MAX_VECTOR_ROWS>([&](auto m) {
        if (rows == m + 1) {
            tile_sums_rows<m + 1>(source, x, x_stride, w, blocks, depth, out, out_stride);
        }
    });
}

}  // namespace paged::PAGED_VARIANT
