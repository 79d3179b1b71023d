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

constexpr int64_t GROUP_ROWS = 256, DEEP_GROUP_ROWS = 32;
constexpr int64_t CHUNK_BLOCKS = 32;

constexpr int64_t SUMS_STRIDE = 16 * MAX_BLOCKS;

struct Layout {
    int64_t group_rows, groups, blocks;
};

Layout layout(const PagedLinear& p) {
    const int64_t blocks = round_up(p.out_features, 16) / 16;
    // A group's rows may have to be converted into the scratch memory.
    const int64_t rows = p.in_features <= 16384 ? GROUP_ROWS : DEEP_GROUP_ROWS;
    return {rows, round_up(p.rows, rows) / rows, p.gated ? blocks / 2 : blocks};
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

// The rows of a group as the product wants them: as they lie if possible, else converted and padded into `room`.
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

// Sums of a tile on their way to the output: bias, gated activation, rounding. Row by row, so that it can be done
// while the next tile is multiplied; whoever multiplies calls `step` now and then, `complete` does the rest.
template <class Out>
class Finish {
public:
    explicit Finish(const PagedLinear& p)
        : out_(static_cast<Out*>(p.out)), bias_(p.bias), out_stride_(p.out_stride), columns_(p.out_features),
          gated_(p.gated != 0), activation_(p.activation) {}

    // Takes over [rows, SUMS_STRIDE] sums of `count` blocks from `block`; what was there before is completed first.
    void begin(const float* sums, int64_t row, int64_t rows, int64_t block, int count, int64_t steps) {
        complete();
        sums_ = sums;
        column_ = 16 * block;
        blocks_ = count;
        place_ = out_ + row * out_stride_ + column_;
        left_ = rows;
        rows_of_step_ = (rows + steps - 1) / steps;
    }

    PAGED_INLINE void step() {
        for (int64_t r = 0; r < rows_of_step_ && left_ > 0; r++) {
            finish_row();
        }
    }

    void complete() {
        while (left_ > 0) {
            finish_row();
        }
    }

private:
    PAGED_INLINE void finish_row() {
        if (gated_) {
            gate_row();
        } else if (columns_ - column_ >= 16 * blocks_) {
            for (int b = 0; b < blocks_; b++) {
                const F16 sum = load(sums_ + 16 * b);
                store(place_ + 16 * b, bias_ == nullptr ? sum : sum + load(bias_ + column_ + 16 * b));
            }
        } else {
            cut_row();
        }
        sums_ += SUMS_STRIDE;
        place_ += out_stride_;
        left_--;
    }

    // A row whose last block is not full.
    void cut_row() {
        for (int64_t b = 0; b < blocks_; b++) {
            const int64_t n = least(16, columns_ - column_ - 16 * b);
            const F16 sum = load(sums_ + 16 * b);
            store_first(place_ + 16 * b, bias_ == nullptr ? sum : sum + load_first(bias_ + column_ + 16 * b, n), n);
        }
    }

    PAGED_INLINE void gate_row() {
        for (int b = 0; b < blocks_; b++) {
            F16 gate = load(sums_ + 16 * b), up = load(sums_ + 16 * (blocks_ + b));
            if (bias_ != nullptr) {
                gate = gate + load(bias_ + column_ + 16 * b);
                up = up + load(bias_ + columns_ / 2 + column_ + 16 * b);
            }
            store(place_ + 16 * b, activate<Out>(gate, activation_) * up);
        }
    }

    Out* const out_;
    const float* const bias_;
    const int64_t out_stride_, columns_;
    const bool gated_;
    const int activation_;
    const float* sums_ = nullptr;
    Out* place_ = nullptr;
    int64_t column_ = 0, left_ = 0, rows_of_step_ = 0;
    int blocks_ = 0;
};

// Two buffers of sums: one is multiplied into while the other is finished.
struct Sums2 {
    float* both[2];
    int next = 0;

    float* take() {
        next ^= 1;
        return both[next];
    }
};

// Some blocks for all rows of a group. `up`: how far the blocks of the second half lie behind, or 0.
template <class T, class X, class Out>
void run_blocks(
    const PagedLinear& p, Multiplier& multiply, const X* x, int64_t stride, int64_t depth, int64_t row, int64_t rows,
    int64_t block, int count, int64_t up, Sums2& room, Finish<Out>& finish
) {
    const int64_t block_size = round_up(p.in_features, PAGED_BLOCK_K) * 16;
    const T* weight = static_cast<const T*>(p.weight) + block * block_size;
    const T* blocks[MAX_BLOCKS];
    for (int b = 0; b < count; b++) {
        blocks[b] = weight + b * block_size;
        if (up > 0) {
            blocks[count + b] = weight + (up + b) * block_size;
        }
    }
    for (int64_t r = 0; r < rows; r += PASS_ROWS) {
        const int64_t some = least(PASS_ROWS, rows - r);
        float* sums = room.take();
        multiply(x + r * stride, stride, some, blocks, up > 0 ? 2 * count : count, depth, sums, SUMS_STRIDE, finish);
        finish.begin(sums, row + r, some, block, count, round_up(depth, PAGED_BLOCK_K) / PAGED_BLOCK_K);
    }
}

template <class T, class Out>
void run_part(const PagedLinear& p, const Layout& l, const Part& part, Multiplier& multiply, void* scratch) {
    using X = Operand<T>;
    const int64_t depth = sizeof(T) == 4 ? p.in_features : round_up(p.in_features, PAGED_BLOCK_K);
    const int64_t row = part.group * l.group_rows, rows = least(l.group_rows, p.rows - row);
    Scratch room(scratch);
    Sums2 sums{{room.take<float>(PASS_ROWS * SUMS_STRIDE), room.take<float>(PASS_ROWS * SUMS_STRIDE)}};
    int64_t stride;
    const X* x = operand<T, X>(p, row, rows, room.take<X>(rows * depth), depth, stride);
    Finish<Out> finish(p);
    // Many rows pass over blocks that stay in the first cache; few rows read the weights as fast as they come.
    const int step = (rows > 16 ? WIDE_PASS_BLOCKS : MAX_BLOCKS) / (p.gated ? 2 : 1);
    for (int64_t block = part.first_block; block < part.last_block; block += step) {
        const int count = static_cast<int>(least(step, part.last_block - block));
        run_blocks<T>(p, multiply, x, stride, depth, row, rows, block, count, p.gated ? l.blocks : 0, sums, finish);
    }
    finish.complete();
}

void run(const PagedLinear& p, int64_t first, int64_t last, void* scratch) {
    const Layout l = layout(p);
    Multiplier multiply;
    while (first < last) {
        const Part part = part_at(l, first, last);
        if (p.dtype == PAGED_F32) {
            run_part<float, float>(p, l, part, multiply, scratch);
        } else if (p.out_dtype == PAGED_F32) {
            run_part<bf16, float>(p, l, part, multiply, scratch);
        } else {
            run_part<bf16, bf16>(p, l, part, multiply, scratch);
        }
        first += part.last_block - part.first_block;
    }
}

}  // namespace

const PagedKernel LINEAR = kernel<PagedLinear, items, grain, run>();

}  // namespace paged::PAGED_VARIANT
