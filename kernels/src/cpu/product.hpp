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

#if defined(PAGED_HAS_AMX)
#include "amx.hpp"
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

// Bytes ahead of a stream of weights that is read once.
constexpr int PREFETCH_BYTES = 1024;

template <int M, int B>
struct Sums {
    F16 at[M][B];
};

template <int M, int B>
PAGED_INLINE void multiply_step(
    Sums<M, B>& sums, const float* x, int64_t x_stride, const float* const* w, int64_t k
) {
    F16 weights[B];
    unroll<B>([&](auto b) {
        weights[b] = load(w[b] + 16 * k);
        if constexpr (M == 1) {
            __builtin_prefetch(reinterpret_cast<const char*>(w[b] + 16 * k) + PREFETCH_BYTES);
        }
    });
    unroll<M>([&](auto m) {
        F16 value = set1(x[m * x_stride + k]);
        unroll<B>([&](auto b) { sums.at[m][b] = fma(weights[b], value, sums.at[m][b]); });
    });
}

template <int M, int B>
PAGED_INLINE void multiply_step(
    Sums<M, B>& sums, const float* x, int64_t x_stride, const bf16* const* w, int64_t k
) {
    F16 first[B], second[B];
    unroll<B>([&](auto b) {
        load_pairs(w[b] + 16 * k, first[b], second[b]);
        if constexpr (M == 1) {
            __builtin_prefetch(reinterpret_cast<const char*>(w[b] + 16 * k) + PREFETCH_BYTES);
        }
    });
    unroll<M>([&](auto m) {
        F16 value = set1(x[m * x_stride + k]);
        unroll<B>([&](auto b) { sums.at[m][b] = fma(first[b], value, sums.at[m][b]); });
    });
    unroll<M>([&](auto m) {
        F16 value = set1(x[m * x_stride + k + 1]);
        unroll<B>([&](auto b) { sums.at[m][b] = fma(second[b], value, sums.at[m][b]); });
    });
}

#if defined(PAGED_HAS_BF16)
template <int M, int B>
PAGED_INLINE void multiply_step(
    Sums<M, B>& sums, const bf16* x, int64_t x_stride, const bf16* const* w, int64_t k
) {
    __m512bh weights[B];
    unroll<B>([&](auto b) {
        weights[b] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w[b] + 16 * k));
        if constexpr (M == 1) {
            __builtin_prefetch(reinterpret_cast<const char*>(w[b] + 16 * k) + PREFETCH_BYTES);
        }
    });
    unroll<M>([&](auto m) {
        int pair;
        std::memcpy(&pair, x + m * x_stride + k, 4);
        __m512bh value = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        unroll<B>([&](auto b) { sums.at[m][b].v = _mm512_dpbf16_ps(sums.at[m][b].v, weights[b], value); });
    });
}
#endif

template <int M, int B, class X, class W>
void multiply_tile(
    const X* x, int64_t x_stride, const W* const* w, int64_t depth, float* out, int64_t out_stride
) {
    Sums<M, B> sums;
    unroll<M>([&](auto m) { unroll<B>([&](auto b) { sums.at[m][b] = zero(); }); });
    const W* blocks[B];
    unroll<B>([&](auto b) { blocks[b] = w[b]; });
    constexpr int step = sizeof(W) == 4 ? 1 : 2;
    for (int64_t k = 0; k < depth; k += step) {
        multiply_step<M, B>(sums, x, x_stride, blocks, k);
    }
    unroll<M>([&](auto m) {
        unroll<B>([&](auto b) { store(out + m * out_stride + 16 * b, sums.at[m][b]); });
    });
}

template <int M, class X, class W>
void multiply_rows(
    const X* x, int64_t x_stride, const W* const* w, int blocks, int64_t depth, float* out, int64_t out_stride
) {
    constexpr int most = blocks_for(M);
    for (int b = 0; b < blocks;) {
        if (most >= 4 && blocks - b >= 4) {
            multiply_tile<M, most >= 4 ? 4 : 1>(x, x_stride, w + b, depth, out + 16 * b, out_stride);
            b += 4;
        } else if (most >= 2 && blocks - b >= 2) {
            multiply_tile<M, most >= 2 ? 2 : 1>(x, x_stride, w + b, depth, out + 16 * b, out_stride);
            b += 2;
        } else {
            multiply_tile<M, 1>(x, x_stride, w + b, depth, out + 16 * b, out_stride);
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

    // `between.step()` may be called any number of times meanwhile, for work that does not depend on the result.
    template <class X, class W, class Between>
    void operator()(
        const X* x, int64_t x_stride, int64_t rows, const W* const* w, int blocks, int64_t depth, float* out,
        int64_t out_stride, [[maybe_unused]] Between& between
    ) {
#if defined(PAGED_HAS_AMX)
        if constexpr (sizeof(X) == 2) {
            multiply_amx(shapes_, again, x, x_stride, rows, w, blocks, depth, out, out_stride, between);
            return;
        }
#endif
        for (int64_t r = 0; r < rows; r += ROWS) {
            const X* from = x + r * x_stride;
            float* to = out + r * out_stride;
            const int64_t left = rows - r < ROWS ? rows - r : ROWS;
            unroll<ROWS>([&](auto m) {
                if (left == m + 1) {
                    multiply_rows<m + 1>(from, x_stride, w, blocks, depth, to, out_stride);
                }
            });
        }
    }

#if defined(PAGED_HAS_AMX)
private:
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
