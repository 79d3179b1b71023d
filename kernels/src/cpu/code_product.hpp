// A few int8 rows times some packed blocks of sixteen outputs, the codes as they lie.
//
// The integers are exact, and a block's sums are scaled and added in the order of `Grid::each`: every output sees the
// same operations whatever the number of rows and blocks.
#pragma once

#include "codes.hpp"
#include "product.hpp"

namespace paged::PAGED_VARIANT {

// Sums of a step's blocks lie side by side.
constexpr int64_t SUMS_STRIDE = 16 * MAX_BLOCKS;

// Where codes that come from memory are fetched ahead of their reading: as weights are (stream.hpp), also across the
// end of a block.
struct CodesAhead {
    int64_t bytes;  // of a block
    int64_t next;   // from a block to the one that is read after it

    PAGED_INLINE LinesAhead at(int64_t offset) const {
        const int64_t jump = next - bytes, second = FromMemory::SECOND_BYTES, first = FromMemory::FIRST_BYTES;
        return {offset + second < bytes ? second : second + jump, offset + first < bytes ? first : first + jump};
    }
};

// Rows and blocks of one inner loop with int8 rows.
#if defined(PAGED_SIMD_AVX512)
constexpr int CODE_ROWS = 6;
constexpr int code_blocks(int rows) { return rows == 1 ? 4 : 2; }
#elif defined(PAGED_SIMD_PORTABLE)
constexpr int CODE_ROWS = 2;
constexpr int code_blocks(int) { return 1; }
#else
constexpr int CODE_ROWS = 4;
constexpr int code_blocks(int rows) { return rows == 1 ? 2 : 1; }
#endif

// Calls f(offset, bytes) for the lines of bytes of features [k, k + 32 / Bits) of B blocks.
template <int Bits, int B, class F>
PAGED_INLINE void each_bytes(const CodesAhead& ahead, const uint8_t* const (&codes)[B], int64_t k, F&& f) {
    const LinesAhead lines_ahead = ahead.at(k * (2 * Bits));
    I16 lines[B], bytes[B];
    unroll<B>([&](auto b) {
        lines[b] = load_words(codes[b] + k * (2 * Bits));
        lines_ahead.fetch(codes[b] + k * (2 * Bits));
    });
    if constexpr (Bits == 4) {
        unroll<B>([&](auto b) { bytes[b] = low_nibbles(lines[b]); });
        f(0, bytes);
        unroll<B>([&](auto b) { bytes[b] = high_nibbles(lines[b]); });
        f(4, bytes);
    } else {
        f(0, lines);
    }
}

PAGED_INLINE int32_t quad_at(const char* x) {
    int32_t quad;
    std::memcpy(&quad, x, 4);
    return quad;
}

// Adds the products of features [first, last) of M rows and B blocks.
template <int Bits, int M, int B>
PAGED_INLINE void add_products(
    I16 (&sums)[M][B], const CodesAhead& ahead, const char* x, int64_t x_stride, const uint8_t* const (&codes)[B],
    int64_t first, int64_t last
) {
#if defined(PAGED_CODE_HALVES)
    if constexpr (Bits == 4) {
        for (int64_t k = first; k < last;) {
            I16 halves[M][B];
            unroll<M>([&](auto m) { unroll<B>([&](auto b) { halves[m][b] = zero_words(); }); });
            for (const int64_t end = least(last, k + 4 * PAGED_CODE_HALVES); k < end; k += 8) {
                each_bytes<4, B>(ahead, codes, k, [&](int64_t offset, const I16(&bytes)[B]) PAGED_INLINE_LAMBDA {
                    unroll<M>([&](auto m) {
                        const int32_t quad = quad_at(x + m * x_stride + k + offset);
                        unroll<B>([&](auto b) { halves[m][b] = add_halves(halves[m][b], bytes[b], quad); });
                    });
                });
            }
            unroll<M>([&](auto m) { unroll<B>([&](auto b) { sums[m][b] = add_both(sums[m][b], halves[m][b]); }); });
        }
        return;
    }
#endif
    for (int64_t k = first; k < last; k += 32 / Bits) {
        each_bytes<Bits, B>(ahead, codes, k, [&](int64_t offset, const I16(&bytes)[B]) PAGED_INLINE_LAMBDA {
            unroll<M>([&](auto m) {
                const int32_t quad = quad_at(x + m * x_stride + k + offset);
                unroll<B>([&](auto b) {
                    sums[m][b] = Bits == 4 ? dot4(sums[m][b], bytes[b], quad) : dot4_bytes(sums[m][b], bytes[b], quad);
                });
            });
        });
    }
}

// M rows times B blocks; out [M][SUMS_STRIDE]. `next`: how many blocks on those lie that
// are read after these, by the last rows that pass over them.
template <int Bits, int M, int B>
PAGED_OUTLINE void multiply_codes(
    const PagedQuantizedWeight& w, const Grid& grid, const char* x, int64_t x_stride, const Column* columns,
    int64_t next, float* out
) {
    const int64_t bytes = grid.depth * (2 * Bits);  // of a block's codes
    const CodesAhead ahead{bytes, next * bytes};
    F16 totals[M][B];
    unroll<M>([&](auto m) { unroll<B>([&](auto b) { totals[m][b] = zero(); }); });
    const uint8_t* codes[B];
    unroll<B>([&](auto b) {
        codes[b] = columns[b].codes;
        columns[b].fetch(next);
    });
    const float* scales[M];
    unroll<M>([&](auto m) { scales[m] = reinterpret_cast<const float*>(x + m * x_stride + grid.depth); });
    const int64_t blocks = grid.blocks();
    grid.each([&](int64_t block, int64_t group, int64_t first, int64_t last) PAGED_INLINE_LAMBDA {
        I16 sums[M][B];
        unroll<M>([&](auto m) { unroll<B>([&](auto b) { sums[m][b] = zero_words(); }); });
        add_products<Bits, M, B>(sums, ahead, x, x_stride, codes, first, last);
        unroll<B>([&](auto b) {
            const F16 scale = columns[b].scale(group);
            if (w.float_offsets) {
                const F16 offset = columns[b].offset(group);
                unroll<M>([&](auto m) {
                    const float row_scale = scales[m][block], row_sum = scales[m][blocks + block];
                    const F16 total = fma(to_floats(sums[m][b]), scale * set1(row_scale), totals[m][b]);
                    totals[m][b] = fma(offset, set1(row_scale * row_sum), total);
                });
            } else {
                const F16 minus = zero() - columns[b].zero(group);
                unroll<M>([&](auto m) {
                    // Whole numbers below 2^24: no rounding.
                    const F16 sum = fma(minus, set1(scales[m][blocks + block]), to_floats(sums[m][b]));
                    totals[m][b] = fma(sum, scale * set1(scales[m][block]), totals[m][b]);
                });
            }
        });
    });
    unroll<M>([&](auto m) { unroll<B>([&](auto b) { store(out + m * SUMS_STRIDE + 16 * b, totals[m][b]); }); });
}

template <int Bits, int M>
void multiply_code_rows(
    const PagedQuantizedWeight& w, const Grid& grid, const char* x, int64_t x_stride, const Column* columns, int count,
    int64_t next, float* out
) {
    constexpr int most = code_blocks(M);
    int b = 0;
    for (; b + most <= count; b += most) {
        multiply_codes<Bits, M, most>(w, grid, x, x_stride, columns + b, next, out + 16 * b);
    }
    if constexpr (most > 1) {
        for (; b < count; b++) {
            multiply_codes<Bits, M, 1>(w, grid, x, x_stride, columns + b, next, out + 16 * b);
        }
    }
}

}  // namespace paged::PAGED_VARIANT
