// Linear with quantized weights: prepared rows times codes, with bias, residual and, fused, the gated activation.
//
// Items are blocks of sixteen outputs for one group of rows, group by group. Up to four blocks are taken at a time:
//
//   int8 rows      a few rows with the codes as they lie; on AMX, for more rows, with tiles, codes unpacked once
//   other rows     the blocks are dequantized into the second cache and multiplied as dense ones
//
// For int8 rows all ways give the same bits: a block's sum is a whole number, scaled and added in one order.
#include "codes.hpp"
#include "math.hpp"
#include "product.hpp"
#include "tables.hpp"

#if defined(PAGED_HAS_AMX)
#include "amx_codes.hpp"
#endif

namespace paged::PAGED_VARIANT {
namespace {

// So few rows are one group: what counts is that each weight is read once.
constexpr int64_t FEW_ROWS = 64;
constexpr int64_t SUMS_STRIDE = 16 * MAX_BLOCKS;
constexpr int64_t FEW_CLAIMS = 12;
constexpr int64_t CODES_AHEAD = 2048;  // bytes

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

#if defined(PAGED_HAS_AMX)
constexpr int64_t INT8_GROUP_ROWS = 256;
constexpr int64_t FEW_FOR_TILES = 4;  // so many rows and fewer are faster without tiles
constexpr int TILE_BLOCKS = 16;
constexpr int64_t PANEL_BYTES = 400 << 10;
#else
constexpr int64_t INT8_GROUP_ROWS = 16 * CODE_ROWS;
#endif
constexpr int64_t DENSE_GROUP_ROWS = 3 * PASS_ROWS > 96 ? 3 * PASS_ROWS : 96;

struct Layout {
    int64_t group_rows, groups, blocks;
};

Layout layout(const PagedQuantizedLinear& p) {
    const int64_t blocks = round_up(p.weight->out_features, 16) / 16 / (p.gated ? 2 : 1);
    const int64_t many = p.kind == PAGED_ROW_INT8 ? INT8_GROUP_ROWS : DENSE_GROUP_ROWS;
    const int64_t group_rows = p.rows <= FEW_ROWS ? FEW_ROWS : many;
    return {group_rows, round_up(p.rows, group_rows) / group_rows, blocks};
}

int64_t items(const PagedQuantizedLinear& p) {
    const Layout l = layout(p);
    return l.groups * l.blocks;
}

int64_t grain(const PagedQuantizedLinear& p) {
    const int64_t step = p.gated ? MAX_BLOCKS / 2 : MAX_BLOCKS;
    if (p.kind != PAGED_ROW_INT8 || p.rows <= FEW_ROWS) {
        return step;
    }
    // More at a time save unpacking rows' scales; enough claims are left for threads to end together.
    const Layout l = layout(p);
    return most(step, least(4 * step, l.groups * l.blocks / FEW_CLAIMS / step * step));
}

// ---- int8 rows

// Features [k, k + 32 / Bits) of M rows and B blocks.
template <int Bits, int M, int B>
PAGED_INLINE void code_step(
    I16 (&sums)[M][B], const char* x, int64_t x_stride, const uint8_t* const (&codes)[B], int64_t k
) {
    I16 lines[B];
    unroll<B>([&](auto b) {
        lines[b] = load_words(codes[b] + k * (2 * Bits));
        if constexpr (M == 1) {
            __builtin_prefetch(codes[b] + k * (2 * Bits) + CODES_AHEAD);
        }
    });
    auto add = [&](int64_t offset, const I16 (&bytes)[B]) {
        unroll<M>([&](auto m) {
            int32_t quad;
            std::memcpy(&quad, x + m * x_stride + k + offset, 4);
            unroll<B>([&](auto b) {
                sums[m][b] = Bits == 4 ? dot4(sums[m][b], bytes[b], quad) : dot4_bytes(sums[m][b], bytes[b], quad);
            });
        });
    };
    if constexpr (Bits == 4) {
        I16 nibbles[B];
        unroll<B>([&](auto b) { nibbles[b] = low_nibbles(lines[b]); });
        add(0, nibbles);
        unroll<B>([&](auto b) { nibbles[b] = high_nibbles(lines[b]); });
        add(4, nibbles);
    } else {
        add(0, lines);
    }
}

// M rows times B blocks; out [M][SUMS_STRIDE].
template <int Bits, int M, int B>
PAGED_OUTLINE void multiply_codes(
    const PagedQuantizedWeight& w, const Grid& grid, const char* x, int64_t x_stride, const Column* columns, float* out
) {
    F16 totals[M][B];
    unroll<M>([&](auto m) { unroll<B>([&](auto b) { totals[m][b] = zero(); }); });
    const uint8_t* codes[B];
    unroll<B>([&](auto b) { codes[b] = columns[b].codes; });
    const float* scales[M];
    unroll<M>([&](auto m) { scales[m] = reinterpret_cast<const float*>(x + m * x_stride + grid.depth); });
    const int64_t blocks = grid.blocks();
    grid.each([&](int64_t block, int64_t group, int64_t first, int64_t last) {
        I16 sums[M][B];
        unroll<M>([&](auto m) { unroll<B>([&](auto b) { sums[m][b] = zero_words(); }); });
        for (int64_t k = first; k < last; k += 32 / Bits) {
            code_step<Bits, M, B>(sums, x, x_stride, codes, k);
        }
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
    float* out
) {
    constexpr int most = code_blocks(M);
    int b = 0;
    for (; b + most <= count; b += most) {
        multiply_codes<Bits, M, most>(w, grid, x, x_stride, columns + b, out + 16 * b);
    }
    if constexpr (most > 1) {
        for (; b < count; b++) {
            multiply_codes<Bits, M, 1>(w, grid, x, x_stride, columns + b, out + 16 * b);
        }
    }
}

// Some blocks times int8 rows, a few at a time; `take(sums, row, rows)` gets their sums.
template <int Bits, class Take>
void multiply_int8(
    const PagedQuantizedLinear& p, const Grid& grid, const char* x, int64_t rows, const Column* columns, int count,
    Scratch room, Take&& take
) {
    float* sums = room.take<float>(CODE_ROWS * SUMS_STRIDE);
    for (int64_t r = 0; r < rows; r += CODE_ROWS) {
        const int64_t some = least(CODE_ROWS, rows - r);
        unroll<CODE_ROWS>([&](auto m) {
            if (some == m + 1) {
                multiply_code_rows<Bits, m + 1>(
                    *p.weight, grid, x + r * p.x_stride, p.x_stride, columns, count, sums
                );
            }
        });
        take(sums, r, some);
    }
}

// ---- other rows

// Features k and k + 1 of sixteen outputs.
PAGED_INLINE void place_pair(float* block, int64_t k, F16 first, F16 second) {
    store(block + 16 * k, first);
    store(block + 16 * k + 16, second);
}
PAGED_INLINE void place_pair(bf16* block, int64_t k, F16 first, F16 second) { store_pairs(block + 16 * k, first, second); }

// Sixteen outputs as a dense packed block (include/paged/types.h): (code - zero) * scale or code * scale + offset, in
// float, as they were written down.
template <int Bits, class T>
void dequantize(const PagedQuantizedWeight& w, const Grid& grid, const Column& column, T* block) {
    for (int64_t g = 0; g < grid.groups; g++) {
        const F16 scale = column.scale(g), other = w.float_offsets ? column.offset(g) : column.zero(g);
        for (int64_t k = g * grid.group; k < least(grid.depth, (g + 1) * grid.group); k += 32 / Bits) {
            each_pair<Bits>(column.codes, k, [&](int offset, F16 first, F16 second) {
                if (w.float_offsets) {
                    place_pair(block, k + offset, first * scale + other, second * scale + other);
                } else {
                    place_pair(block, k + offset, (first - other) * scale, (second - other) * scale);
                }
            });
        }
    }
}

// The rows of a group as the product wants them.
template <class T, class X>
const X* operand(const PagedQuantizedLinear& p, const char* x, int64_t rows, X* room, int64_t& stride) {
    if constexpr (sizeof(T) == sizeof(X)) {
        stride = p.x_stride / static_cast<int64_t>(sizeof(X));
        return reinterpret_cast<const X*>(x);
    } else {
        stride = p.weight->depth;
        for (int64_t r = 0; r < rows; r++) {
            const T* from = reinterpret_cast<const T*>(x + r * p.x_stride);
            for (int64_t k = 0; k < stride; k += 16) {
                store(room + r * stride + k, load(from + k));
            }
        }
        return room;
    }
}

template <int Bits, class T, class Take>
void multiply_dense(
    const PagedQuantizedLinear& p, const Grid& grid, const Operand<T>* x, int64_t stride, int64_t rows,
    const Column* columns, int count, Scratch room, Take&& take
) {
    const T* blocks[MAX_BLOCKS];
    for (int b = 0; b < count; b++) {
        T* block = room.take<T>(16 * grid.depth);
        dequantize<Bits>(*p.weight, grid, columns[b], block);
        blocks[b] = block;
    }
    float* sums = room.take<float>(PASS_ROWS * SUMS_STRIDE);
    Multiplier multiply;
    Nothing nothing;
    for (int64_t r = 0; r < rows; r += PASS_ROWS) {
        const int64_t some = least(PASS_ROWS, rows - r);
        multiply(x + r * stride, stride, some, blocks, count, grid.depth, sums, SUMS_STRIDE, nothing);
        take(sums, r, some);
    }
}

// ---- results

// One row's sums of `count` blocks from `block` on: bias, residual or gate, rounding.
template <class Out, bool Gated>
void finish_row(const PagedQuantizedLinear& p, const float* sums, int64_t row, int64_t block, int count) {
    const int64_t outputs = p.weight->out_features, column = 16 * block;
    Out* out = static_cast<Out*>(p.out) + row * p.out_stride + column;
    const float* bias = p.bias == nullptr ? nullptr : p.bias + column;
    if constexpr (Gated) {
        for (int b = 0; b < count; b++) {
            F16 gate = load(sums + 16 * b), up = load(sums + 16 * (count + b));
            if (bias != nullptr) {
                gate = gate + load(bias + 16 * b);
                up = up + load(bias + outputs / 2 + 16 * b);
            }
            store(out + 16 * b, activate<Out>(gate, p.activation) * up);
        }
    } else {
        const Out* residual = static_cast<const Out*>(p.residual);
        residual = residual == nullptr ? nullptr : residual + row * p.residual_stride + column;
        for_lanes(least(16 * count, outputs - column), [&](int64_t i, auto n) {
            F16 sum = load(sums + i);
            if (bias != nullptr) {
                sum = sum + load_some(bias + i, n);
            }
            if (residual != nullptr) {
                sum = sum + load_some(residual + i, n);
            }
            store_some(out + i, sum, n);
        });
    }
}

// Blocks [first, last) for one group of rows.
template <int Bits, class Out, bool Gated>
void run_part(
    const PagedQuantizedLinear& p, const Layout& l, int64_t group, int64_t first, int64_t last, void* scratch
) {
    const Grid grid(p.weight->depth, p.weight->group_size);
    const int64_t row = group * l.group_rows, rows = least(l.group_rows, p.rows - row);
    const char* x = static_cast<const char*>(p.x) + row * p.x_stride;
    Scratch room(scratch);
    int64_t stride = 0;
    const Operand<bf16>* halves = nullptr;
    if (p.kind == PAGED_ROW_BF16) {
        const bool converted = sizeof(Operand<bf16>) == 4;
        halves = operand<bf16>(p, x, rows, room.take<Operand<bf16>>(converted ? rows * grid.depth : 0), stride);
    }
    constexpr int step = Gated ? MAX_BLOCKS / 2 : MAX_BLOCKS;
    for (int64_t block = first; block < last; block += step) {
        const int count = static_cast<int>(least(step, last - block));
        Column columns[MAX_BLOCKS];
        for (int b = 0; b < count; b++) {
            columns[b] = Column(*p.weight, grid, block + b);
            if constexpr (Gated) {
                columns[count + b] = Column(*p.weight, grid, l.blocks + block + b);
            }
        }
        const int all = Gated ? 2 * count : count;
        auto take = [&](const float* sums, int64_t begin, int64_t some) {
            for (int64_t r = 0; r < some; r++) {
                finish_row<Out, Gated>(p, sums + r * SUMS_STRIDE, row + begin + r, block, count);
            }
        };
        if (p.kind == PAGED_ROW_INT8) {
            multiply_int8<Bits>(p, grid, x, rows, columns, all, room, take);
        } else if (p.kind == PAGED_ROW_F32) {
            const int64_t floats = p.x_stride / 4;
            multiply_dense<Bits, float>(
                p, grid, reinterpret_cast<const float*>(x), floats, rows, columns, all, room, take
            );
        } else {
            multiply_dense<Bits, bf16>(p, grid, halves, stride, rows, columns, all, room, take);
        }
    }
}

#if defined(PAGED_HAS_AMX)

// Some blocks, as bytes for tiles; of a fused gate and up, the blocks of both.
struct Panels {
    Column columns[TILE_BLOCKS];
    const void* codes[TILE_BLOCKS];
};

template <int Bits, bool Gated>
void take_panels(
    const PagedQuantizedLinear& p, const Grid& grid, int64_t up, int64_t block, int count, Scratch room, Panels& panels
) {
    constexpr int halves = Gated ? 2 : 1;
    for (int b = 0; b < count * halves; b++) {
        // Gate and up alternate, so that a step's blocks are neighbours.
        const int64_t at = block + b / halves + (b % halves == 1 ? up : 0);
        panels.columns[b] = Column(*p.weight, grid, at);
        panels.codes[b] = panels.columns[b].codes;
        if constexpr (Bits == 4) {
            auto* bytes = room.take<int8_t>(16 * grid.depth);
            unpack_codes(*p.weight, grid, panels.columns[b], bytes);
            panels.codes[b] = bytes;
        }
    }
}

// As `run_part`, with tiles: two of them, 32 rows, pass over all the blocks whose codes fit the second cache.
template <int Bits, class Out, bool Gated>
void run_tiles(
    const PagedQuantizedLinear& p, const Layout& l, int64_t group, int64_t first, int64_t last, void* scratch
) {
    const PagedQuantizedWeight& w = *p.weight;
    const Grid grid(w.depth, w.group_size);
    const int64_t row = group * l.group_rows, rows = least(l.group_rows, p.rows - row);
    const char* x = static_cast<const char*>(p.x) + row * p.x_stride;
    constexpr int halves = Gated ? 2 : 1, step = MAX_BLOCKS / halves;
    const int64_t fits = PANEL_BYTES / (16 * grid.depth) / MAX_BLOCKS * step;
    const int64_t chunk = most(step, least(fits, TILE_BLOCKS / halves));
    Scratch room(scratch);
    float* sums = room.take<float>(32 * SUMS_STRIDE);
    auto* products = room.take<BlockSums>(2);
    const int64_t scales = 16 * round_up(grid.blocks(), 16);
    const TileRows tiles[2] = {
        {room.take<float>(scales), room.take<float>(scales)}, {room.take<float>(scales), room.take<float>(scales)}};
    CodeShapes shapes(tile_width(grid));
    Panels panels;
    for (int64_t begin = first; begin < last; begin += chunk) {
        const int count = static_cast<int>(least(chunk, last - begin));
        take_panels<Bits, Gated>(p, grid, l.blocks, begin, count, room, panels);
        for (int64_t r = 0; r < rows; r += 32) {
            const int64_t some = least(32, rows - r);
            for (int64_t t = 0; 16 * t < some; t++) {
                const char* from = x + (r + 16 * t) * p.x_stride;
                const int here = static_cast<int>(least(16, some - 16 * t));
                tiles[t].take(grid, from, p.x_stride, here, Bits == 8 || w.float_offsets);
            }
            for (int b = 0; b < count; b += step) {
                const int now = static_cast<int>(least(step, count - b));
                for (int c = 0; c < now * halves; c++) {
                    // Gates first, then ups, as rows are finished.
                    const int at = b * halves + (Gated ? c % now * 2 + c / now : c);
                    for (int64_t t = 0; 16 * t < some; t++) {
                        const int here = static_cast<int>(least(16, some - 16 * t));
                        shapes.set(here);
                        multiply_column<Bits>(
                            w, grid, shapes.width(), x + (r + 16 * t) * p.x_stride, p.x_stride, here, tiles[t],
                            panels.columns[at], panels.codes[at], products, sums + 16 * t * SUMS_STRIDE + 16 * c,
                            SUMS_STRIDE
                        );
                    }
                }
                for (int64_t m = 0; m < some; m++) {
                    finish_row<Out, Gated>(p, sums + m * SUMS_STRIDE, row + r + m, begin + b, now);
                }
            }
        }
    }
}

#endif

template <int Bits, class Out>
void run_items(const PagedQuantizedLinear& p, int64_t first, int64_t last, void* scratch) {
    const Layout l = layout(p);
    while (first < last) {
        const int64_t group = first / l.blocks, begin = first % l.blocks, end = least(l.blocks, begin + last - first);
#if defined(PAGED_HAS_AMX)
        if (p.kind == PAGED_ROW_INT8 && least(l.group_rows, p.rows - group * l.group_rows) > FEW_FOR_TILES) {
            const auto run = p.gated ? run_tiles<Bits, Out, true> : run_tiles<Bits, Out, false>;
            run(p, l, group, begin, end, scratch);
            first += end - begin;
            continue;
        }
#endif
        if (p.gated) {
            run_part<Bits, Out, true>(p, l, group, begin, end, scratch);
        } else {
            run_part<Bits, Out, false>(p, l, group, begin, end, scratch);
        }
        first += end - begin;
    }
}

void run(const PagedQuantizedLinear& p, int64_t first, int64_t last, void* scratch) {
    const bool wide = p.out_dtype == PAGED_F32;
    if (p.weight->bits == 4) {
        wide ? run_items<4, float>(p, first, last, scratch) : run_items<4, bf16>(p, first, last, scratch);
    } else {
        wide ? run_items<8, float>(p, first, last, scratch) : run_items<8, bf16>(p, first, last, scratch);
    }
}

}  // namespace

const PagedKernel QUANTIZED_LINEAR = kernel<PagedQuantizedLinear, items, grain, run>();

}  // namespace paged::PAGED_VARIANT
