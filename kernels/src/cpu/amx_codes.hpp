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

// Sums of one block of features: 32 rows, two blocks of outputs side by side.
struct alignas(64) BlockSums {
    int32_t at[32][32];
};

// Blocks whose sums are added together, and rows for which that is done at a time: their sums stay in registers.
constexpr int64_t SUM_BLOCKS = 3;
constexpr int64_t SUM_ROWS = 8;
constexpr int64_t TILE_SUMS = 2 * SUM_BLOCKS;

// Sixteen outputs for tiles: their codes as bytes; scales and, of 8 bits or with offsets, minus the zero points or the
// offsets as floats, [blocks][16].
struct Panel {
    const char* codes;
    const float* scales;
    const float* others;
};

// Scales and sums of up to 32 rows, [blocks rounded up to 16][32]; those of rows that are not there are zero.
struct RowScales {
    float* scales;
    float* sums;

    void take(const Grid& grid, const char* x, int64_t x_stride, int64_t rows, bool with_sums) const {
        for (int64_t first = 0; first < rows; first += 16) {
            const char* from = x + first * x_stride + grid.depth;
            transpose(grid, from, x_stride, rows - first, scales + first);
            if (with_sums) {
                transpose(grid, from + 4 * grid.blocks(), x_stride, rows - first, sums + first);
            }
        }
    }

private:
    static void transpose(const Grid& grid, const char* from, int64_t stride, int64_t rows, float* to) {
        for (int64_t block = 0; block < grid.blocks(); block += 16) {
            const __mmask16 some = first_lanes(least(16, grid.blocks() - block));
            __m512i lines[16], columns[16];
            unroll<16>([&](auto m) {
                lines[m] =
                    m < rows ? _mm512_maskz_loadu_epi32(some, from + m * stride + 4 * block) : _mm512_setzero_si512();
            });
            transpose_words(lines, columns);
            unroll<16>([&](auto i) { _mm512_storeu_si512(to + 32 * (block + i), columns[i]); });
        }
    }
};

// What all products of up to 32 rows share.
struct CodePass {
    const Grid& grid;
    RowScales row;
    int64_t width;  // of a tile
    const char* x;
    int64_t x_stride, rows;
    bool offsets;  // of panels: `others` are not minus the zero points
    float* out;    // [32][32] sums of two blocks of outputs
};

// Some blocks of features of two blocks of outputs, and the sums that tiles have left of them.
struct CodePart {
    const Panel* panels[2];
    int64_t pair;  // the number of the first one
    int64_t first, count;
    bool last;  // of these outputs
    BlockSums* products;
};

// What there is to do with a block's sums: those of 4 bits are without their zero points.
enum class Others { none, zeros, offsets };

// Adds the sums of a part for rows [row, row + SUM_ROWS), block by block.
template <Others Other>
PAGED_OUTLINE void add_rows(const CodePass& pass, const CodePart& part, int64_t row) {
    F16 sums[SUM_ROWS][2];
    float* const out = pass.out + 32 * row;
    unroll<SUM_ROWS>([&](auto m) {
        unroll<2>([&](auto b) { sums[m][b] = part.first == 0 ? zero() : load(out + 32 * m + 16 * b); });
    });
    const float *row_scales = pass.row.scales + 32 * part.first + row,
                *row_sums = pass.row.sums + 32 * part.first + row;
    const float *left = part.panels[0]->scales + 16 * part.first, *right = part.panels[1]->scales + 16 * part.first;
    const float *left_other = part.panels[0]->others + 16 * part.first,
                *right_other = part.panels[1]->others + 16 * part.first;
    const int32_t* products = part.products->at[row];
    for (int64_t i = 0; i < part.count; i++) {
        unroll<2>([&](auto b) {
            const F16 scale = load((b == 0 ? left : right) + 16 * i);
            [[maybe_unused]] F16 other;
            if constexpr (Other != Others::none) {
                other = load((b == 0 ? left_other : right_other) + 16 * i);
            }
            unroll<SUM_ROWS>([&](auto m) {
                F16 product = to_floats(load_words(products + 1024 * i + 32 * m + 16 * b));
                if constexpr (Other == Others::zeros) {
                    product = fma(other, set1(row_sums[32 * i + m]), product);
                }
                sums[m][b] = fma(product, scale * set1(row_scales[32 * i + m]), sums[m][b]);
                if constexpr (Other == Others::offsets) {
                    sums[m][b] = fma(other, set1(row_scales[32 * i + m] * row_sums[32 * i + m]), sums[m][b]);
                }
            });
        });
    }
    unroll<SUM_ROWS>([&](auto m) { unroll<2>([&](auto b) { store(out + 32 * m + 16 * b, sums[m][b]); }); });
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
// The rows are what is to stay in the first cache.
#define PAGED_LOAD_CODES(tile, from) _tile_stream_loadd(tile, from, 64)

// Stores what a tile has left of the block before, if there was one, and clears it. Its product was begun four tiles
// ago, so that the store need not wait for it.
#define PAGED_TILE_TURN(tile, row, column)                       \
    do {                                                         \
        if (before != nullptr) {                                 \
            _tile_stored(tile, before->at[row] + (column), 128); \
        }                                                        \
        _tile_zero(tile);                                        \
    } while (false)

// The products of features [first, last) with two blocks of outputs, which stay in the tiles; `before` gets the sums
// that they hold. `between(i)` is called four (or two) times where the tile unit has work to go on with.
template <int Bits, bool Lower, class Between>
PAGED_INLINE void multiply_block(
    const CodePass& pass, const Panel* const (&panels)[2], int64_t first, int64_t last, BlockSums* before,
    Between&& between
) {
    const char *x = pass.x, *lower = pass.x + 16 * pass.x_stride;
    const char *left = panels[0]->codes, *right = panels[1]->codes;
    const int64_t second = least(first + pass.width, last - pass.width);
    for (int64_t k = first; k < last; k += pass.width) {
        if (k == first) {
            PAGED_TILE_TURN(0, 0, 0);
        }
        PAGED_LOAD_CODES(6, left + 16 * k);
        _tile_loadd(4, x + k, pass.x_stride);
        PAGED_TILE_PRODUCT(0, 4, 6);
        if (k == first) {
            between(0);
            PAGED_TILE_TURN(1, 0, 16);
        }
        PAGED_LOAD_CODES(7, right + 16 * k);
        PAGED_TILE_PRODUCT(1, 4, 7);
        if (k == first) {
            between(1);
        }
        if constexpr (Lower) {
            if (k == first) {
                PAGED_TILE_TURN(2, 16, 0);
            }
            _tile_loadd(5, lower + k, pass.x_stride);
            PAGED_TILE_PRODUCT(2, 5, 6);
            if (k == second) {
                between(2);
            }
            if (k == first) {
                PAGED_TILE_TURN(3, 16, 16);
            }
            PAGED_TILE_PRODUCT(3, 5, 7);
            if (k == second) {
                between(3);
            }
        }
    }
}

#undef PAGED_TILE_TURN
#undef PAGED_TILE_PRODUCT
#undef PAGED_LOAD_CODES

// Adds a part's sums little by little while other blocks are multiplied. Loads from where others are just being stored,
// up to multiples of 4 KB, would wait for them: while tiles of the upper rows are stored, the lower ones are added.
template <int Bits, bool Lower>
class CodeAdder {
public:
    explicit CodeAdder(const CodePass& pass) : pass_(pass) {}

    const CodePart& part() const { return part_; }

    void begin(const CodePart& part) {
        part_ = part;
        slot_ = done_[0] = done_[1] = 0;
    }
    // At a point of a block: as much as is to be done until there.
    PAGED_INLINE void step(int64_t point) {
        if (part_.count == 0) {
            return;
        }
        const int64_t half = Lower && point < 2 ? 1 : 0, goal = 2 * slot_ + 1 + point % 2;
        until(half, PIECES * goal);
    }
    void next() { slot_++; }
    void finish() {
        if (part_.count > 0) {
            until(0, PIECES * 2 * part_.count);
            until(1, Lower ? PIECES * 2 * part_.count : 0);
        }
    }

private:
    static constexpr int64_t PIECES = 16 / SUM_ROWS;

    // `goal`: pieces, times the steps of a block, two, and the number of blocks.
    PAGED_INLINE void until(int64_t half, int64_t goal) {
        for (; done_[half] < PIECES && (done_[half] + 1) * 2 * part_.count <= goal; done_[half]++) {
            const int64_t row = 16 * half + SUM_ROWS * done_[half];
            if (row < pass_.rows) {
                add(row);
            }
        }
    }

    PAGED_INLINE void add(int64_t row) {
        if (pass_.offsets) {
            add_rows<Others::offsets>(pass_, part_, row);
        } else {
            add_rows<Bits == 4 ? Others::none : Others::zeros>(pass_, part_, row);
        }
    }

    const CodePass& pass_;
    CodePart part_{};
    int64_t slot_ = 0, done_[2] = {0, 0};
};

// Up to 32 rows (Lower: more than 16) times pairs of blocks of outputs; `take(pair)` finds the sums in `pass.out`.
//
//   block of features     0   1   2   3   4   5   6       in two parts, 0 to 2 and 3 to 5, for example
//   tiles multiply it    |   |   |   |   |   |   |
//   and store             -   0   1   2   3   4   5
//   meanwhile added       -   -   -   -  [0 ... 2] [3 ...
template <int Bits, bool Lower, class Take>
PAGED_OUTLINE void multiply_pass(
    const CodePass& pass, const Panel* panels, int64_t count, BlockSums* products, Take&& take
) {
    const Grid& grid = pass.grid;
    const int64_t blocks = grid.blocks(), parts = (blocks + SUM_BLOCKS - 1) / SUM_BLOCKS;
    CodeAdder<Bits, Lower> adder(pass);
    CodePart part{}, stored{};
    BlockSums* before = nullptr;
    auto begin_adding = [&](const CodePart& next) {
        adder.finish();
        if (adder.part().count > 0 && adder.part().last) {
            take(adder.part().pair);
        }
        adder.begin(next);
    };
    int64_t number = 0;
    for (int64_t at = 0; at < count; at += 2) {
        for (int64_t i = 0; i < parts; i++, number++) {
            const int64_t begin = i * blocks / parts, end = (i + 1) * blocks / parts;
            // An odd last block is multiplied twice.
            const Panel *left = panels + at, *right = at + 1 < count ? left + 1 : left;
            stored = part;
            part = {{left, right}, at, begin, end - begin, i + 1 == parts, products + number % 2 * SUM_BLOCKS};
            for (int64_t block = begin; block < end; block++) {
                const int64_t group = block / grid.per_group;
                const int64_t first = group * grid.group + block % grid.per_group * grid.block;
                const int64_t last = least(first + grid.block, least(grid.depth, (group + 1) * grid.group));
                multiply_block<Bits, Lower>(pass, part.panels, first, last, before, [&](int64_t point) {
                    adder.step(point);
                });
                adder.next();
                before = part.products + (block - begin);
                if (block == begin && stored.count > 0) {
                    begin_adding(stored);
                }
            }
        }
    }
    _tile_stored(0, before->at[0], 128);
    _tile_stored(1, before->at[0] + 16, 128);
    if constexpr (Lower) {
        _tile_stored(2, before->at[16], 128);
        _tile_stored(3, before->at[16] + 16, 128);
    }
    begin_adding(part);
    begin_adding({});
}

}  // namespace paged::PAGED_VARIANT
