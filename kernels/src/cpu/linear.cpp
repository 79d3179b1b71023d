// Linear: rows times packed weights, with bias and, for a fused gate and up, the gated activation.
//
// Items are blocks of sixteen outputs. Many rows are cut into groups that stay in the second-level cache while a chunk
// of blocks passes; the order of items is then chunk by chunk, group by group:
//
//            blocks 0 .. 31     32 .. 63           an item: one block for one group of rows
//   group 0  | 0 .. 31        | 64 .. 95  |
//   group 1  | 32 .. 63       | 96 .. 127 |
#include "math.hpp"
#include "product.hpp"
#include "scratch.hpp"
#include "tables.hpp"

namespace paged::PAGED_VARIANT {
namespace {

constexpr int64_t GROUP_ROWS = 256;
constexpr int64_t CHUNK_BLOCKS = 32;

struct Layout {
    int64_t groups, blocks;
};

Layout layout(const PagedLinear& p) {
    int64_t blocks = round_up(p.out_features, 16) / 16;
    return {round_up(p.rows, GROUP_ROWS) / GROUP_ROWS, p.gated ? blocks / 2 : blocks};
}

struct Part {
    int64_t group, first_block, last_block;
};

// The longest stretch of items from `first`, below `last`, that lies in one group.
Part part_at(const Layout& l, int64_t first, int64_t last) {
    int64_t chunk = first / (CHUNK_BLOCKS * l.groups);
    int64_t begin = chunk * CHUNK_BLOCKS;
    int64_t size = least(CHUNK_BLOCKS, l.blocks - begin);
    int64_t within = first - begin * l.groups;
    int64_t group = within / size;
    int64_t offset = within % size;
    int64_t count = least(size - offset, last - first);
    return {group, begin + offset, begin + offset + count};
}

int64_t items(const PagedLinear& p) {
    Layout l = layout(p);
    return l.groups * l.blocks;
}

int64_t grain(const PagedLinear& p) { return p.gated ? MAX_BLOCKS / 2 : MAX_BLOCKS; }

// The rows as the product wants them: as they lie if possible, else converted and padded into `room`.
template <class T, class X>
const X* operand(const PagedLinear& p, int64_t row, int64_t rows, X* room, int64_t depth, int64_t& stride) {
    const T* from = static_cast<const T*>(p.x) + row * p.x_stride;
    if constexpr (sizeof(T) == sizeof(X)) {
        if (sizeof(T) == 4 || p.in_features % PAGED_BLOCK_K == 0) {
            stride = p.x_stride;
            return from;
        }
    }
    stride = depth;
    for (int64_t r = 0; r < rows; r++) {
        X* to = room + r * depth;
        for_lanes(p.in_features, [&](int64_t i, auto n) { store_some(to + i, load_some(from + r * p.x_stride + i, n), n); });
        std::memset(to + p.in_features, 0, static_cast<size_t>(depth - p.in_features) * sizeof(X));
    }
    return room;
}

PAGED_INLINE F16 with_bias(const PagedLinear& p, F16 sum, int64_t column, int n) {
    return p.bias == nullptr ? sum : sum + load_first(p.bias + column, n);
}

// Sixteen outputs of one row from `column`; n of them exist.
template <class Out>
PAGED_INLINE void finish(const PagedLinear& p, const float* sums, Out* out, int64_t column, int n) {
    F16 value = with_bias(p, load(sums), column, n);
    if (n == 16) {
        store(out + column, value);
    } else {
        store_first(out + column, value, n);
    }
}

template <class Out>
PAGED_INLINE void finish_gated(const PagedLinear& p, const float* sums, int64_t up, Out* out, int64_t column) {
    F16 gate = with_bias(p, load(sums), column, 16);
    F16 value = with_bias(p, load(sums + up), column + p.out_features / 2, 16);
    store(out + column, activate(gate, p.activation) * value);
}

template <class Out>
void finish_tile(const PagedLinear& p, const float* sums, int64_t row, int64_t rows, int64_t block, int count) {
    constexpr int64_t stride = 16 * MAX_BLOCKS;
    for (int64_t r = 0; r < rows; r++) {
        Out* out = static_cast<Out*>(p.out) + (row + r) * p.out_stride;
        for (int b = 0; b < count; b++) {
            const float* from = sums + r * stride + 16 * b;
            int64_t column = 16 * (block + b);
            if (p.gated) {
                finish_gated(p, from, 16 * count, out, column);
            } else {
                finish(p, from, out, column, static_cast<int>(least(16, p.out_features - column)));
            }
        }
    }
}

template <class T>
void run_part(const PagedLinear& p, const Layout& l, const Part& part, void* scratch) {
    using X = Operand<T>;
    const int64_t depth = sizeof(T) == 4 ? p.in_features : round_up(p.in_features, PAGED_BLOCK_K);
    const int64_t block_size = round_up(p.in_features, PAGED_BLOCK_K) * 16;
    Scratch room(scratch);
    float* sums = room.take<float>(PASS_ROWS * 16 * MAX_BLOCKS);
    X* rows_room = room.take<X>(PASS_ROWS * depth);
    const T* weight = static_cast<const T*>(p.weight);
    const int most_blocks = p.gated ? MAX_BLOCKS / 2 : MAX_BLOCKS;
    const int64_t end = least(p.rows, (part.group + 1) * GROUP_ROWS);
    for (int64_t row = part.group * GROUP_ROWS; row < end; row += PASS_ROWS) {
        int64_t rows = least(PASS_ROWS, end - row), stride;
        const X* x = operand<T, X>(p, row, rows, rows_room, depth, stride);
        for (int64_t block = part.first_block; block < part.last_block; block += most_blocks) {
            int count = static_cast<int>(least(most_blocks, part.last_block - block));
            const T* blocks[MAX_BLOCKS];
            for (int b = 0; b < count; b++) {
                blocks[b] = weight + (block + b) * block_size;
                if (p.gated) {
                    blocks[count + b] = weight + (l.blocks + block + b) * block_size;
                }
            }
            multiply(x, stride, rows, blocks, p.gated ? 2 * count : count, depth, sums, int64_t{16 * MAX_BLOCKS});
            if (p.out_dtype == PAGED_F32) {
                finish_tile<float>(p, sums, row, rows, block, count);
            } else {
                finish_tile<bf16>(p, sums, row, rows, block, count);
            }
        }
    }
}

void run(const PagedLinear& p, int64_t first, int64_t last, void* scratch) {
    Layout l = layout(p);
    while (first < last) {
        Part part = part_at(l, first, last);
        if (p.dtype == PAGED_F32) {
            run_part<float>(p, l, part, scratch);
        } else {
            run_part<bf16>(p, l, part, scratch);
        }
        first += part.last_block - part.first_block;
    }
#if defined(PAGED_HAS_AMX)
    release_tiles();
#endif
}

}  // namespace

const PagedKernel LINEAR = kernel<PagedLinear, items, grain, run>();

}  // namespace paged::PAGED_VARIANT
