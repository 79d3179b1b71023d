// Linear with quantized weights: prepared rows times codes, with bias, residual and, fused, the gated activation.
//
// Items are blocks of sixteen outputs for one group of rows, group by group. Up to four blocks are taken at a time:
//
//   int8 rows      a few rows with the codes as they lie; on AMX, for more rows, with tiles, codes unpacked once
//   other rows     the blocks are dequantized into the second cache and multiplied as dense ones
//
// For int8 rows all ways give the same bits: a block's sum is a whole number, scaled and added in one order.
#include "code_product.hpp"
#include "math.hpp"
#include "tables.hpp"

#if defined(PAGED_HAS_AMX)
#include "amx_codes.hpp"
#endif

namespace paged::PAGED_VARIANT {
namespace {

// So few rows are one group: what counts is that each weight is read once.
constexpr int64_t FEW_ROWS = 64;
constexpr int64_t FEW_CLAIMS = 12;

#if defined(PAGED_HAS_AMX)
constexpr int64_t INT8_GROUP_ROWS = 512;
constexpr int64_t FEW_FOR_TILES = 2 * CODE_ROWS;  // so many rows and fewer are faster without tiles
constexpr int64_t TILE_BLOCKS = 16;
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

// Some blocks times int8 rows, a few at a time; `take(sums, row, rows)` gets their sums.
template <int Bits, class Take>
void multiply_int8(
    const PagedQuantizedLinear& p, const Grid& grid, const char* x, int64_t rows, const Column* columns, int count,
    int64_t next, Scratch room, Take&& take
) {
    float* sums = room.take<float>(CODE_ROWS * SUMS_STRIDE);
    for (int64_t r = 0; r < rows; r += CODE_ROWS) {
        const int64_t some = least(CODE_ROWS, rows - r);
        unroll<CODE_ROWS>([&](auto m) {
            if (some == m + 1) {
                multiply_code_rows<Bits, m + 1>(
                    *p.weight, grid, x + r * p.x_stride, p.x_stride, columns, count, next, sums
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
PAGED_INLINE void place_pair(bf16* block, int64_t k, F16 first, F16 second) {
    store_pairs(block + 16 * k, first, second);
}

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

// One row's sums of `count` blocks from `block` on: bias, residual or gate, rounding. Sums of gate and up alternate
// block by block, or all ups are behind the gates.
template <class Out, bool Gated>
void finish_row(
    const PagedQuantizedLinear& p, const float* sums, int64_t row, int64_t block, int count, bool alternate = false
) {
    const int64_t outputs = p.weight->out_features, column = 16 * block;
    Out* out = static_cast<Out*>(p.out) + row * p.out_stride + column;
    const float* bias = p.bias == nullptr ? nullptr : p.bias + column;
    if constexpr (Gated) {
        for (int b = 0; b < count; b++) {
            F16 gate = load(sums + 16 * (alternate ? 2 * b : b));
            F16 up = load(sums + 16 * (alternate ? 2 * b + 1 : count + b));
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
            multiply_int8<Bits>(p, grid, x, rows, columns, all, step, room, take);
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

// Some blocks for tiles, codes unpacked once for all rows; of a fused gate and up, the blocks of both.
template <int Bits, bool Gated>
void take_panels(
    const PagedQuantizedLinear& p, const Grid& grid, int64_t up, int64_t block, int64_t count, Scratch room,
    Panel* panels
) {
    constexpr int64_t halves = Gated ? 2 : 1;
    const PagedQuantizedWeight& w = *p.weight;
    for (int64_t b = 0; b < count * halves; b++) {
        // Gate and up alternate, so that a step's blocks are neighbours.
        const int64_t at = block + b / halves + (b % halves == 1 ? up : 0);
        const Column column(w, grid, at);
        float *scales = room.take<float>(16 * grid.blocks()), *others = room.take<float>(16 * grid.blocks());
        grid.each([&](int64_t index, int64_t g, int64_t, int64_t) {
            store(scales + 16 * index, column.scale(g));
            store(others + 16 * index, w.float_offsets ? column.offset(g) : zero() - column.zero(g));
        });
        panels[b] = {reinterpret_cast<const char*>(column.codes), scales, others};
        if constexpr (Bits == 4) {
            auto* bytes = room.take<int8_t>(16 * grid.depth);
            unpack_codes(w, grid, column, bytes);
            panels[b].codes = reinterpret_cast<const char*>(bytes);
        }
    }
}

// As `run_part`, with tiles: two of them, 32 rows, pass over all the blocks whose codes fit the second cache.
template <int Bits, class Out, bool Gated>
void run_tiles(
    const PagedQuantizedLinear& p, const Layout& l, int64_t group, int64_t first, int64_t last, void* scratch
) {
    const Grid grid(p.weight->depth, p.weight->group_size);
    const int64_t row = group * l.group_rows, rows = least(l.group_rows, p.rows - row);
    const char* x = static_cast<const char*>(p.x) + row * p.x_stride;
    constexpr int64_t halves = Gated ? 2 : 1;
    const int64_t fits = PANEL_BYTES / (16 * grid.depth) / halves / 2 * 2;
    const int64_t chunk = most(2, least(fits, TILE_BLOCKS / halves));
    Scratch room(scratch);
    float* sums = room.take<float>(32 * 32);
    auto* products = room.take<BlockSums>(TILE_SUMS);
    const int64_t scales = 32 * round_up(grid.blocks(), 16);
    const RowScales row_scales{room.take<float>(scales), room.take<float>(scales)};
    const bool offsets = p.weight->float_offsets != 0;
    CodeShapes shapes(tile_width(grid));
    Panel panels[TILE_BLOCKS];
    for (int64_t begin = first; begin < last; begin += chunk) {
        const int64_t count = least(chunk, last - begin);
        take_panels<Bits, Gated>(p, grid, l.blocks, begin, count, room, panels);
        for (int64_t r = 0; r < rows; r += 32) {
            const int64_t some = least(32, rows - r);
            shapes.set(static_cast<int>(some));
            const char* from = x + r * p.x_stride;
            row_scales.take(grid, from, p.x_stride, some, Bits == 8 || offsets);
            const CodePass pass{grid, row_scales, shapes.width(), from, p.x_stride, some, offsets, sums};
            auto take = [&](int64_t at) {
                const int64_t block = at / halves;
                const int now = static_cast<int>(least(2 / halves, count - block));
                for (int64_t m = 0; m < some; m++) {
                    finish_row<Out, Gated>(p, sums + 32 * m, row + r + m, begin + block, now, true);
                }
            };
            if (some > 16) {
                multiply_pass<Bits, true>(pass, panels, count * halves, products, take);
            } else {
                multiply_pass<Bits, false>(pass, panels, count * halves, products, take);
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
