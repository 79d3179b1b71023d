// The product of `product.hpp` on AMX tiles. A packed block of weights is a column of B tiles as it lies:
//
//   A tile: 16 rows of x, 32 k       B tile: 16 pairs of k, 16 outputs x 2       C tile: 16 rows, 16 floats
//
// Results of a row do not depend on the other rows of its tile: tiles of fewer rows give the same bits.
//
// In a wide pass x stays in the first cache while weights come from the second: they are loaded with the hint that they
// are not needed again there, else each pass would drive out the other's lines (measured: 1.4 times the rate).
//
// The tile unit works for 64 cycles on what one step of k loads; `between.step()` is called there for vector work that
// is to be done at the same time: the finishing of the tile before.
#pragma once

#include <immintrin.h>

#include "paged/types.h"
#include "simd.hpp"
#include "stream.hpp"

namespace paged::PAGED_VARIANT {

// The tiles' shapes as they are loaded: tiles 0 to 3 sums, 4 and 5 x, 6 and 7 weights.
//
// A pass of up to 16 rows has one tile of x (4) and up to four of sums; one of 17 to 32 rows has two (4 and 5).
// Loading shapes clears the tiles and takes a while, so it is done only when they change.
class TileShapes {
public:
    ~TileShapes() {
        if (rows_ != 0) {
            _tile_release();  // the system need not save what nobody uses
        }
    }

    PAGED_INLINE void set(int rows) {
        if (rows != rows_) {
            load(rows);
        }
    }

private:
    struct alignas(64) Config {
        uint8_t palette = 1;
        uint8_t start_row = 0;
        uint8_t reserved[14] = {};
        uint16_t column_bytes[16] = {};
        uint8_t rows[16] = {};
    };

    void load(int rows) {
        const int second = rows > 16 ? rows - 16 : rows, first = rows > 16 ? 16 : rows;
        // In a narrow pass tile 5 holds weights.
        const int all[8] = {first, first, second, second, first, rows > 16 ? second : 16, 16, 16};
        Config config;
        for (int i = 0; i < 8; i++) {
            config.rows[i] = static_cast<uint8_t>(all[i]);
            config.column_bytes[i] = 64;
        }
        // gcc 12 takes the intrinsic to read nothing and may drop the stores before it.
        __asm__ volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
        rows_ = rows;
    }

    int rows_ = 0;
};

template <class Source, class Between>
PAGED_OUTLINE void narrow_blocks4(
    Source source, const bf16* x, int64_t x_bytes, const bf16* const* w, int64_t depth, float* out, int64_t out_bytes,
    Between& between
) {
    Between work = between;  // a copy that can live in registers
    const bf16 *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    source.template each<PAGED_BLOCK_K, 32>(depth, [&](int64_t k, auto ahead) PAGED_INLINE_LAMBDA {
        _tile_loadd(4, x + k, x_bytes);
        ahead.fetch_tile(w0 + 16 * k);
        _tile_loadd(5, w0 + 16 * k, 64);
        _tile_dpbf16ps(0, 4, 5);
        ahead.fetch_tile(w1 + 16 * k);
        _tile_loadd(6, w1 + 16 * k, 64);
        _tile_dpbf16ps(1, 4, 6);
        ahead.fetch_tile(w2 + 16 * k);
        _tile_loadd(7, w2 + 16 * k, 64);
        _tile_dpbf16ps(2, 4, 7);
        ahead.fetch_tile(w3 + 16 * k);
        _tile_loadd(5, w3 + 16 * k, 64);
        _tile_dpbf16ps(3, 4, 5);
        work.step();
    });
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
    _tile_stored(2, out + 32, out_bytes);
    _tile_stored(3, out + 48, out_bytes);
    between = work;
}

template <class Source, class Between>
PAGED_OUTLINE void narrow_block1(
    Source source, const bf16* x, int64_t x_bytes, const bf16* w, int64_t depth, float* out, int64_t out_bytes,
    Between& between
) {
    Between work = between;  // a copy that can live in registers
    _tile_zero(0);
    source.template each<PAGED_BLOCK_K, 32>(depth, [&](int64_t k, auto ahead) PAGED_INLINE_LAMBDA {
        _tile_loadd(4, x + k, x_bytes);
        ahead.fetch_tile(w + 16 * k);
        _tile_loadd(5, w + 16 * k, 64);
        _tile_dpbf16ps(0, 4, 5);
        work.step();
    });
    _tile_stored(0, out, out_bytes);
    between = work;
}

// Weights of a wide pass: plainly the first time, so that they come to the second cache, else as a stream.
#define PAGED_LOAD_WEIGHTS(tile, from)          \
    do {                                        \
        if constexpr (Again) {                  \
            _tile_stream_loadd(tile, from, 64); \
        } else {                                \
            _tile_loadd(tile, from, 64);        \
        }                                       \
    } while (false)

template <bool Again, class Source, class Between>
PAGED_OUTLINE void wide_blocks2(
    Source source, const bf16* x, int64_t x_bytes, const bf16* const* w, int64_t depth, float* out, int64_t out_bytes,
    Between& between
) {
    Between work = between;  // a copy that can live in registers
    const bf16 *w0 = w[0], *w1 = w[1];
    const bf16* lower = x + 8 * x_bytes;  // 16 rows on, in elements
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    source.template each<PAGED_BLOCK_K, 32>(depth, [&](int64_t k, auto ahead) PAGED_INLINE_LAMBDA {
        ahead.fetch_tile(w0 + 16 * k);
        PAGED_LOAD_WEIGHTS(6, w0 + 16 * k);
        _tile_loadd(4, x + k, x_bytes);
        _tile_dpbf16ps(0, 4, 6);
        ahead.fetch_tile(w1 + 16 * k);
        PAGED_LOAD_WEIGHTS(7, w1 + 16 * k);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, lower + k, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        work.step();
    });
    float* lower_out = out + 4 * out_bytes;
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
    _tile_stored(2, lower_out, out_bytes);
    _tile_stored(3, lower_out + 16, out_bytes);
    between = work;
}

template <class Between>
PAGED_OUTLINE void wide_block1(
    const bf16* x, int64_t x_bytes, const bf16* w, int64_t depth, float* out, int64_t out_bytes, Between& between
) {
    Between work = between;  // a copy that can live in registers
    const bf16* lower = x + 8 * x_bytes;
    _tile_zero(0);
    _tile_zero(2);
    for (int64_t k = 0; k < depth; k += PAGED_BLOCK_K) {
        _tile_loadd(6, w + 16 * k, 64);
        _tile_loadd(4, x + k, x_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, lower + k, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        work.step();
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(2, out + 4 * out_bytes, out_bytes);
    between = work;
}

#undef PAGED_LOAD_WEIGHTS

// `again`: the same weights were multiplied a moment ago.
template <class Source, class Between>
inline void multiply_amx(
    TileShapes& shapes, bool again, Source source, const bf16* x, int64_t x_stride, int64_t rows, const bf16* const* w,
    int blocks, int64_t depth, float* out, int64_t out_stride, Between& between
) {
    const int64_t x_bytes = 2 * x_stride, out_bytes = 4 * out_stride;
    for (int64_t r = 0; r < rows; r += 32) {
        const bf16* from = x + r * x_stride;
        float* to = out + r * out_stride;
        const int left = static_cast<int>(rows - r < 32 ? rows - r : 32);
        int b = 0;
        shapes.set(left);
        if (left <= 16) {
            for (; b + 4 <= blocks; b += 4) {
                narrow_blocks4(source, from, x_bytes, w + b, depth, to + 16 * b, out_bytes, between);
            }
            for (; b < blocks; b++) {
                narrow_block1(source, from, x_bytes, w[b], depth, to + 16 * b, out_bytes, between);
            }
        } else {
            const auto wide2 = again ? wide_blocks2<true, Source, Between> : wide_blocks2<false, Source, Between>;
            for (; b + 2 <= blocks; b += 2) {
                wide2(source, from, x_bytes, w + b, depth, to + 16 * b, out_bytes, between);
            }
            if (b < blocks) {
                wide_block1(from, x_bytes, w[b], depth, to + 16 * b, out_bytes, between);
            }
        }
    }
}

}  // namespace paged::PAGED_VARIANT
