// Int8 rows times codes on AMX tiles: sixteen rows and sixteen outputs at a time.
//
//   A tile: 16 rows, up to 64 k        B tile: up to 16 quads of k, 16 outputs x 4        C tile: 16 x 16 int32
//
// A packed line of 8-bit codes is a row of a B tile as it lies; 4-bit codes are unpacked before, less their zero points.
// The tiles give a block's exact sums; the vector unit scales and adds those of the block before at the same time.
#pragma once

#include <immintrin.h>

#include "codes.hpp"
#include "gather.hpp"

namespace paged::PAGED_VARIANT {

// Tiles 0 and 1 sums, 4 and 5 rows, 6 and 7 codes; loaded when the number of rows changes.
class CodeShapes {
public:
    // `width`: k of a tile, 16, 32 or 64.
    explicit CodeShapes(int64_t width) : width_(static_cast<int>(width)) {}
    ~CodeShapes() {
        if (rows_ != 0) {
            _tile_release();
        }
    }
    CodeShapes(const CodeShapes&) = delete;
    CodeShapes& operator=(const CodeShapes&) = delete;

    int64_t width() const { return width_; }

    void set(int rows) {
        if (rows == rows_) {
            return;
        }
        Config config;
        for (int tile = 0; tile < 8; tile++) {
            const bool is_rows = tile == 4 || tile == 5;
            config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : width_ / 4);
            config.column_bytes[tile] = static_cast<uint16_t>(is_rows ? width_ : 64);
        }
        // gcc 12 takes the intrinsic to read nothing and may drop the stores before it.
        __asm__ volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
        rows_ = rows;
    }

private:
    struct alignas(64) Config {
        uint8_t palette = 1;
        uint8_t start_row = 0;
        uint8_t reserved[14] = {};
        uint16_t column_bytes[16] = {};
        uint8_t rows[16] = {};
    };

    int width_, rows_ = 0;
};

// The widest tiles that blocks are whole numbers of.
inline int64_t tile_width(const Grid& grid) {
    const int64_t common = grid.group | grid.block;
    return common % 64 == 0 ? 64 : common % 32 == 0 ? 32 : 16;
}

// Codes of 4 bits as bytes, [depth / 4][16][4], less their zero points if these are whole numbers.
inline void unpack_codes(const PagedQuantizedWeight& w, const Grid& grid, const Column& column, int8_t* to) {
    for (int64_t g = 0; g < grid.groups; g++) {
        __m512i zeros = _mm512_setzero_si512();
        if (!w.float_offsets) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(column.zero_bytes(g)));
            zeros = _mm512_mullo_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(0x01010101));
        }
        for (int64_t k = g * grid.group; k < least(grid.depth, (g + 1) * grid.group); k += 8) {
            const I16 line = load_words(column.codes + 8 * k);
            _mm512_storeu_si512(to + 16 * k, _mm512_sub_epi8(low_nibbles(line).v, zeros));
            _mm512_storeu_si512(to + 16 * k + 64, _mm512_sub_epi8(high_nibbles(line).v, zeros));
        }
    }
}

// Tiles are named by literals, hence a macro: the sums of features [first, last) into `room`.
#define PAGED_BLOCK_SUMS(product, sums, rows_tile, codes_tile, room)    \
    do {                                                                \
        _tile_zero(sums);                                               \
        for (int64_t k = first; k < last; k += width) {                 \
            _tile_loadd(rows_tile, x + k, x_stride);                    \
            _tile_loadd(codes_tile, panel + 16 * k, 64);                \
            product(sums, rows_tile, codes_tile);                       \
        }                                                               \
        _tile_stored(sums, room, 64);                                   \
    } while (false)

struct alignas(64) BlockSums {
    int32_t at[16][16];
};

// Scales and, where they are wanted, sums of a tile's rows, [blocks rounded up to 16][16].
struct TileRows {
    float* scales;
    float* sums;

    void take(const Grid& grid, const char* x, int64_t x_stride, int rows, bool with_sums) const {
        transpose(grid, x + grid.depth, x_stride, rows, scales);
        if (with_sums) {
            transpose(grid, x + grid.depth + 4 * grid.blocks(), x_stride, rows, sums);
        }
    }

private:
    static void transpose(const Grid& grid, const char* from, int64_t stride, int rows, float* to) {
        for (int64_t block = 0; block < grid.blocks(); block += 16) {
            const __mmask16 some = first_lanes(least(16, grid.blocks() - block));
            __m512i lines[16], columns[16];
            unroll<16>([&](auto m) {
                lines[m] = m < rows ? _mm512_maskz_loadu_epi32(some, from + m * stride + 4 * block)
                                    : _mm512_setzero_si512();
            });
            transpose_words(lines, columns);
            unroll<16>([&](auto i) { _mm512_storeu_si512(to + 16 * (block + i), columns[i]); });
        }
    }
};

// Sixteen outputs of up to sixteen rows. Bytes less their zero points are signed, codes of 8 bits are not.
template <int Bits>
PAGED_OUTLINE void multiply_column(
    const PagedQuantizedWeight& w, const Grid& grid, int64_t width, const char* x, int64_t x_stride, int rows,
    const TileRows& tile, const Column& column, const void* codes, BlockSums* room, float* out, int64_t out_stride
) {
    const char* panel = static_cast<const char*>(codes);
    const int64_t blocks = grid.blocks();
    F16 sums[16];
    unroll<16>([&](auto m) { sums[m] = zero(); });
    auto add = [&](int64_t block, int64_t group) {
        const BlockSums& products = room[block & 1];
        const float *scales = tile.scales + 16 * block, *row_sums = tile.sums + 16 * block;
        const F16 scale = column.scale(group);
        const F16 offset = w.float_offsets ? column.offset(group) : zero();
        const F16 minus = Bits == 8 && !w.float_offsets ? zero() - column.zero(group) : zero();
        unroll<16>([&](auto m) {
            F16 product = to_floats(load_words(products.at[m]));
            if constexpr (Bits == 8) {
                product = fma(minus, set1(row_sums[m]), product);
            }
            sums[m] = fma(product, scale * set1(scales[m]), sums[m]);
        });
        if (w.float_offsets) {
            unroll<16>([&](auto m) { sums[m] = fma(offset, set1(scales[m] * row_sums[m]), sums[m]); });
        }
    };
    int64_t before = -1;
    grid.each([&](int64_t block, int64_t group, int64_t first, int64_t last) {
        if constexpr (Bits == 4) {
            if (block & 1) {
                PAGED_BLOCK_SUMS(_tile_dpbssd, 1, 5, 7, room[1].at);
            } else {
                PAGED_BLOCK_SUMS(_tile_dpbssd, 0, 4, 6, room[0].at);
            }
        } else {
            if (block & 1) {
                PAGED_BLOCK_SUMS(_tile_dpbsud, 1, 5, 7, room[1].at);
            } else {
                PAGED_BLOCK_SUMS(_tile_dpbsud, 0, 4, 6, room[0].at);
            }
        }
        if (before >= 0) {
            add(block - 1, before);
        }
        before = group;
    });
    add(blocks - 1, before);
    unroll<16>([&](auto m) {
        if (m < rows) {
            store(out + m * out_stride, sums[m]);
        }
    });
}

#undef PAGED_BLOCK_SUMS

}  // namespace paged::PAGED_VARIANT
