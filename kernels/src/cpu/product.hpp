// The inner product of all linears and of attention: a few rows times some packed blocks of sixteen outputs.
//
//   out[r][16 b + lane] = sum over k of x[r][k] * w[b][k][lane]          one chain over k for each output
//
// Tiles of several rows only share loads: every output sees the same operations in the same order whatever the number
// of rows and blocks. Packed bfloat16 holds pairs of k (include/paged/types.h); the operand x is float where the
// machine has no bfloat16 dot product, else bfloat16, and then k is a multiple of PAGED_BLOCK_K.
#pragma once

#include "paged/types.h"
#include "simd.hpp"

#include "stream.hpp"

#if defined(PAGED_HAS_AMX)
#include "amx.hpp"
#include "tile_sums.hpp"
#endif

namespace paged::PAGED_VARIANT {

// What x must be for packed weights of T.
#if defined(PAGED_HAS_BF16)
template <class T>
using Operand = T;
#else
template <class T>
using Operand = float;
#endif

constexpr int MAX_BLOCKS = 4;

#if defined(PAGED_SIMD_AVX512)
constexpr int ROWS = 6;
constexpr int blocks_for(int rows) { return rows > 0 ? 4 : 0; }
#elif defined(PAGED_SIMD_PORTABLE)
constexpr int ROWS = 2;
constexpr int blocks_for(int rows) { return rows == 1 ? 2 : 1; }
#else
constexpr int ROWS = 6;
constexpr int blocks_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif

template <int M, int B>
struct Sums {
    F16 at[M][B];
};

template <class Ahead, int M, int B>
PAGED_INLINE void multiply_step(
    Ahead ahead, Sums<M, B>& sums, const float* x, int64_t x_stride, const float* const* w, int64_t k
) {
    F16 weights[B];
    unroll<B>([&](auto b) {
        weights[b] = load(w[b] + 16 * k);
        ahead.fetch(w[b] + 16 * k);
    });
    unroll<M>([&](auto m) {
        F16 value = set1(x[m * x_stride + k]);
        unroll<B>([&](auto b) { sums.at[m][b] = fma(weights[b], value, sums.at[m][b]); });
    });
}

template <class Ahead, int M, int B>
PAGED_INLINE void multiply_step(
    Ahead ahead, Sums<M, B>& sums, const float* x, int64_t x_stride, const bf16* const* w, int64_t k
) {
    // First elements of the pairs, then the second ones: there are not registers for both.
    F16 weights[B];
    unroll<B>([&](auto b) {
        weights[b] = load_pairs_first(w[b] + 16 * k);
        ahead.fetch(w[b] + 16 * k);
    });
    unroll<M>([&](auto m) {
        const F16 value = set1(x[m * x_stride + k]);
        unroll<B>([&](auto b) { sums.at[m][b] = fma(weights[b], value, sums.at[m][b]); });
    });
    unroll<B>([&](auto b) { weights[b] = load_pairs_second(w[b] + 16 * k); });
    unroll<M>([&](auto m) {
        const F16 value = set1(x[m * x_stride + k + 1]);
        unroll<B>([&](auto b) { sums.at[m][b] = fma(weights[b], value, sums.at[m][b]); });
    });
}

#if defined(PAGED_HAS_BF16)
template <class Ahead, int M, int B>
PAGED_INLINE void multiply_step(
    Ahead ahead, Sums<M, B>& sums, const bf16* x, int64_t x_stride, const bf16* const* w, int64_t k
) {
    __m512bh weights[B];
    unroll<B>([&](auto b) {
        weights[b] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w[b] + 16 * k));
        ahead.fetch(w[b] + 16 * k);
    });
    unroll<M>([&](auto m) {
        int pair;
        std::memcpy(&pair, x + m * x_stride + k, 4);
        __m512bh value = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        unroll<B>([&](auto b) { sums.at[m][b].v = _mm512_dpbf16_ps(sums.at[m][b].v, weights[b], value); });
    });
}
#endif

template <int M, int B, class Source, class X, class W>
void multiply_tile(
    Source source, const X* x, int64_t x_stride, const W* const* w, int64_t depth, float* out, int64_t out_stride
) {
    Sums<M, B> sums;
    unroll<M>([&](auto m) { unroll<B>([&](auto b) { sums.at[m][b] = zero(); }); });
    const W* blocks[B];
    unroll<B>([&](auto b) { blocks[b] = w[b]; });
    constexpr int step = sizeof(W) == 4 ? 1 : 2;
    source.template each<step, 16 * sizeof(W)>(depth, [&](int64_t k, auto ahead) PAGED_INLINE_LAMBDA {
        multiply_step<decltype(ahead), M, B>(ahead, sums, x, x_stride, blocks, k);
    });
    unroll<M>([&](auto m) { unroll<B>([&](auto b) { store(out + m * out_stride + 16 * b, sums.at[m][b]); }); });
}

template <int M, class Source, class X, class W>
void multiply_rows(
    Source source, const X* x, int64_t x_stride, const W* const* w, int blocks, int64_t depth, float* out,
    int64_t out_stride
) {
    constexpr int most = blocks_for(M);
    for (int b = 0; b < blocks;) {
        if (most >= 4 && blocks - b >= 4) {
            multiply_tile<M, most >= 4 ? 4 : 1>(source, x, x_stride, w + b, depth, out + 16 * b, out_stride);
            b += 4;
        } else if (most >= 2 && blocks - b >= 2) {
            multiply_tile<M, most >= 2 ? 2 : 1>(source, x, x_stride, w + b, depth, out + 16 * b, out_stride);
            b += 2;
        } else {
            multiply_tile<M, 1>(source, x, x_stride, w + b, depth, out + 16 * b, out_stride);
            b += 1;
        }
    }
}

// Nothing to do between the steps of a product.
struct Nothing {
    void step() {}
};

// Multiplies any number of rows and blocks; out: [rows, 16 * blocks] floats with a stride. One for a run of a kernel.
class Multiplier {
public:
    // Whether the weights of the products to come were multiplied a moment ago.
    bool again = false;
    // Of products whose weights come from memory and are read once: how many bytes behind a block the one lies that is
    // multiplied after it. 0: they come from a cache.
    int64_t next = 0;

    // `between.step()` may be called any number of times meanwhile, for work that does not depend on the result.
    template <class X, class W, class Between>
    void operator()(
        const X* x, int64_t x_stride, int64_t rows, const W* const* w, int blocks, int64_t depth, float* out,
        int64_t out_stride, [[maybe_unused]] Between& between
    ) {
#if defined(PAGED_HAS_AMX)
        if constexpr (sizeof(X) == 2) {
            if (next != 0 && rows == 1) {
                multiply_tile_sums(FromMemory{next}, x, w, blocks, depth, out);
            } else if (next != 0) {
                multiply_amx(
                    shapes_, again, FromMemory{next}, x, x_stride, rows, w, blocks, depth, out, out_stride, between
                );
            } else {
                multiply_amx(
                    shapes_, again, FromCache{}, x, x_stride, rows, w, blocks, depth, out, out_stride, between
                );
            }
            return;
        }
#endif
        if (next != 0) {
            vectors(FromMemory{next}, x, x_stride, rows, w, blocks, depth, out, out_stride);
        } else {
            vectors(FromCache{}, x, x_stride, rows, w, blocks, depth, out, out_stride);
        }
    }

private:
    template <class Source, class X, class W>
    static void vectors(
        Source source, const X* x, int64_t x_stride, int64_t rows, const W* const* w, int blocks, int64_t depth,
        float* out, int64_t out_stride
    ) {
        for (int64_t r = 0; r < rows; r += ROWS) {
            const X* from = x + r * x_stride;
            float* to = out + r * out_stride;
            const int64_t left = rows - r < ROWS ? rows - r : ROWS;
            unroll<ROWS>([&](auto m) {
                if (left == m + 1) {
                    multiply_rows<m + 1>(source, from, x_stride, w, blocks, depth, to, out_stride);
                }
            });
        }
    }

#if defined(PAGED_HAS_AMX)
    TileShapes shapes_;
#endif
};

// Rows for one pass over some blocks of a linear: a whole number of tiles; and the blocks of a pass of many rows.
#if defined(PAGED_HAS_AMX)
constexpr int64_t PASS_ROWS = 32;
constexpr int WIDE_PASS_BLOCKS = 2;
#else
constexpr int64_t PASS_ROWS = ROWS;
constexpr int WIDE_PASS_BLOCKS = MAX_BLOCKS;
#endif

}  // namespace paged::PAGED_VARIANT
