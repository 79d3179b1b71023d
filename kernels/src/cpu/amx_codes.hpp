// Int8 rows times codes on AMX tiles: up to 32 rows and 32 outputs at a time, as two times two tiles.
//
//   A tile: 16 rows, up to 64 k        B tile: up to 16 quads of k, 16 outputs x 4        C tile: 16 x 16 int32
//
// A packed line of 8-bit codes is a row of a B tile as it lies; 4-bit codes are unpacked before, less their zero
// points. Tiles give the exact sums of some blocks; meanwhile the vector unit scales and adds those of the blocks
// before.
#pragma once

#include <immintrin.h>

#include "codes.hpp"
#include "gather.hpp"

namespace paged::PAGED_VARIANT {

// Tiles 0 to 3 sums, 4 and 5 rows, 6 and 7 codes: 0, 1 and 4 are of the first sixteen rows, 2, 3 and 5 of the others.
// They are loaded when the number of rows changes.
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
        const int upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : upper, quads = width_ / 4;
        const int all[8] = {upper, upper, lower, lower, upper, lower, quads, quads};
        Config config;
        for (int tile = 0; tile < 8; tile++) {
            config.rows[tile] = static_cast<uint8_t>(all[tile]);
            config.column_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? width_ : 64);
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

// Bytes ahead of codes that are unpacked.
constexpr int64_t PANEL_AHEAD = 2048;

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
            __builtin_prefetch(column.codes + 8 * k + PANEL_AHEAD);
            _mm512_storeu_si512(to + 16 * k, _mm512_sub_epi8(low_nibbles(line).v, zeros));
            _mm512_storeu_si512(to + 16 * k + 64, _mm512_sub_epi8(high_nibbles(line).v, zeros));
        }
    }
}

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
                lines[m] =
                    m < rows ? _mm512_maskz_loadu_epi32(some, from + m * stride + 4 * block) : _mm512_setzero_si512();
            });
            transpose_words(lines, columns);
            unroll<16>([&](auto i) { _mm512_storeu_si512(to + 16 * (block + i), columns[i]); });
        }
    }
};

// Blocks whose sums are added together. Those of some are added while tiles are at the next.
constexpr int64_t SUM_BLOCKS = 2;
constexpr int64_t TILE_SUMS = 2 * SUM_BLOCKS * 4;
constexpr int SUM_ROWS = 8;
static_assert(SUM_BLOCKS * SUM_ROWS == 16, "a tile of sums is added in as many pieces as blocks");

// Adds the sums of blocks [first, first + count) of eight rows and sixteen outputs to `out`, in order. `products` are
// four apart. Codes of 8 bits still contain their zero points, those of 4 do not.
template <int Bits>
PAGED_OUTLINE void add_blocks(
    const PagedQuantizedWeight& w, const Grid& grid, const Column& column, const TileRows& tile, int64_t row,
    const BlockSums* products, int64_t first, int64_t count, float* out, int64_t out_stride
) {
    F16 sums[SUM_ROWS];
    unroll<SUM_ROWS>([&](auto m) { sums[m] = first == 0 ? zero() : load(out + m * out_stride); });
    for (int64_t block = first; block < first + count; block++, products += 4) {
        const int64_t group = grid.per_group == 1 ? block : block / grid.per_group;
        const float *scales = tile.scales + 16 * block + row, *row_sums = tile.sums + 16 * block + row;
        const auto* from = products->at + row;
        const F16 scale = column.scale(group);
        if constexpr (Bits == 4) {
            unroll<SUM_ROWS>([&](auto m) {
                sums[m] = fma(to_floats(load_words(from[m])), scale * set1(scales[m]), sums[m]);
            });
        } else {
            const F16 minus = w.float_offsets ? zero() : zero() - column.zero(group);
            unroll<SUM_ROWS>([&](auto m) {
                const F16 product = fma(minus, set1(row_sums[m]), to_floats(load_words(from[m])));
                sums[m] = fma(product, scale * set1(scales[m]), sums[m]);
            });
        }
        if (w.float_offsets) {
            const F16 offset = column.offset(group);
            unroll<SUM_ROWS>([&](auto m) { sums[m] = fma(offset, set1(scales[m] * row_sums[m]), sums[m]); });
        }
    }
    unroll<SUM_ROWS>([&](auto m) { store(out + m * out_stride, sums[m]); });
}

// Bytes less their zero points are signed, codes of 8 bits are not. Tiles are named by literals, hence a macro.
#define PAGED_TILE_PRODUCT(sums, rows_tile, codes_tile) \
    do {                                                \
        if constexpr (Bits == 4) {                      \
            _tile_dpbssd(sums, rows_tile, codes_tile);  \
        } else {                                        \
            _tile_dpbsud(sums, rows_tile, codes_tile);  \
        }                                               \
    } while (false)

// The products of one block, features [first, last), with two blocks of outputs; `room`: four sums. `between(i)` is
// called for each of the four (or two) tiles of sums where the tile unit has work to go on with.
template <int Bits, bool Lower, class Between>
PAGED_INLINE void multiply_block(
    const char* x, int64_t x_stride, const char* const (&codes)[2], int64_t width, int64_t first, int64_t last,
    BlockSums* room, Between&& between
) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
    int64_t k = first;
    for (; k < last - width; k += width) {
        _tile_loadd(6, codes[0] + 16 * k, 64);
        _tile_loadd(4, x + k, x_stride);
        PAGED_TILE_PRODUCT(0, 4, 6);
        _tile_loadd(7, codes[1] + 16 * k, 64);
        PAGED_TILE_PRODUCT(1, 4, 7);
        if constexpr (Lower) {
            _tile_loadd(5, x + 16 * x_stride + k, x_stride);
            PAGED_TILE_PRODUCT(2, 5, 6);
            PAGED_TILE_PRODUCT(3, 5, 7);
        }
    }
    _tile_loadd(6, codes[0] + 16 * k, 64);
    _tile_loadd(4, x + k, x_stride);
    PAGED_TILE_PRODUCT(0, 4, 6);
    between(0);
    _tile_loadd(7, codes[1] + 16 * k, 64);
    PAGED_TILE_PRODUCT(1, 4, 7);
    _tile_stored(0, room[0].at, 64);
    between(1);
    if constexpr (Lower) {
        _tile_loadd(5, x + 16 * x_stride + k, x_stride);
        PAGED_TILE_PRODUCT(2, 5, 6);
        _tile_stored(1, room[1].at, 64);
        between(2);
        PAGED_TILE_PRODUCT(3, 5, 7);
        _tile_stored(2, room[2].at, 64);
        between(3);
        _tile_stored(3, room[3].at, 64);
    } else {
        _tile_stored(1, room[1].at, 64);
    }
}

#undef PAGED_TILE_PRODUCT

// Two blocks of outputs for up to 32 rows (Lower: more than 16); out [16 or 32][out_stride], 32 columns.
template <int Bits, bool Lower>
PAGED_OUTLINE void multiply_columns(
    const PagedQuantizedWeight& w, const Grid& grid, int64_t width, const char* x, int64_t x_stride,
    const TileRows (&tiles)[2], const Column* const (&columns)[2], const char* const (&codes)[2], BlockSums* room,
    float* out, int64_t out_stride
) {
    constexpr int64_t tiles_of_block = Lower ? 4 : 2, pieces = SUM_BLOCKS * tiles_of_block;
    const int64_t blocks = grid.blocks();
    // Piece i of `pieces`: eight rows of one tile, blocks [first, first + count). While a tile is multiplied the place
    // of its sums is read: loads from where others are just being stored, up to 4 KB multiples, would wait for them.
    auto add = [&](int64_t piece, int64_t first, int64_t count) {
        const int64_t tile = piece % tiles_of_block, lower = tile / 2, right = tile % 2;
        const int64_t row = piece / tiles_of_block * SUM_ROWS;
        add_blocks<Bits>(
            w, grid, *columns[right], tiles[lower], row, room + first / SUM_BLOCKS % 2 * SUM_BLOCKS * 4 + tile, first,
            count, out + (16 * lower + row) * out_stride + 16 * right, out_stride
        );
    };
    grid.each([&](int64_t block, int64_t, int64_t first, int64_t last) {
        const int64_t within = block % SUM_BLOCKS, begin = block - within - SUM_BLOCKS;
        BlockSums* const sums = room + block % (2 * SUM_BLOCKS) * 4;
        multiply_block<Bits, Lower>(x, x_stride, codes, width, first, last, sums, [&](int64_t tile) {
            if (begin >= 0) {
                add(within * tiles_of_block + tile, begin, SUM_BLOCKS);
            }
        });
    });
    // What is left of the blocks before the last ones, and those.
    const int64_t last = (blocks - 1) / SUM_BLOCKS * SUM_BLOCKS;
    for (int64_t piece = (blocks - last) * tiles_of_block; piece < pieces && last > 0; piece++) {
        add(piece, last - SUM_BLOCKS, SUM_BLOCKS);
    }
    for (int64_t piece = 0; piece < pieces; piece++) {
        add(piece, last, blocks - last);
    }
}

}  // namespace paged::PAGED_VARIANT
