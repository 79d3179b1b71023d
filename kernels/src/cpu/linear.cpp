// Linear: rows times packed weights, with bias and, for a fused gate and up, the gated activation.
//
// Items are blocks of sixteen outputs for one group of rows. A chunk of blocks stays in the second cache while all
// groups pass over it, a group's rows in the first one while they pass over the blocks; the items' order is chunk by
// chunk:
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

#if defined(PAGED_HAS_AMX)
constexpr int64_t GROUP_ROWS = PASS_ROWS;
#else
constexpr int64_t GROUP_ROWS = 16 * PASS_ROWS;
#endif
// So few rows are one group: the weights come from memory, and what counts is that each is read once.
constexpr int64_t FEW_ROWS = 64;
constexpr int64_t CHUNK_BYTES = 400 << 10, MAX_CHUNK_BLOCKS = 32;
// Items of a chunk are taken together, and there should be enough chunks for all threads to end at the same time.
constexpr int64_t FEW_CHUNKS = 32;
constexpr int64_t SUMS_STRIDE = 16 * MAX_BLOCKS;

struct Layout {
    int64_t group_rows, groups, blocks, chunk;
};

Layout layout(const PagedLinear& p) {
    const int64_t blocks = round_up(p.out_features, 16) / 16 / (p.gated ? 2 : 1);
    const int64_t group_rows = p.rows <= FEW_ROWS ? FEW_ROWS : GROUP_ROWS;
    const int64_t groups = round_up(p.rows, group_rows) / group_rows;
    const int64_t block_bytes =
        round_up(p.in_features, PAGED_BLOCK_K) * (p.dtype == PAGED_F32 ? 64 : 32) * (p.gated ? 2 : 1);
    const int64_t fits = least(MAX_CHUNK_BLOCKS, CHUNK_BYTES / block_bytes);
    const int64_t chunk = least(fits, groups * blocks / FEW_CHUNKS) / MAX_BLOCKS * MAX_BLOCKS;
    return {group_rows, groups, blocks, most(MAX_BLOCKS, chunk)};
}

struct Part {
    int64_t group, first_block, last_block;
};

// The longest stretch of items from `first`, below `last`, that lies in one group.
Part part_at(const Layout& l, int64_t first, int64_t last) {
    const int64_t chunk = first / (l.chunk * l.groups), begin = chunk * l.chunk;
    const int64_t size = least(l.chunk, l.blocks - begin);
    const int64_t within = first - begin * l.groups, group = within / size, offset = within % size;
    const int64_t count = least(size - offset, last - first);
    return {group, begin + offset, begin + offset + count};
}

int64_t items(const PagedLinear& p) {
    const Layout l = layout(p);
    return l.groups * l.blocks;
}

int64_t grain(const PagedLinear& p) {
    const Layout l = layout(p);
    return l.groups > 1 ? l.chunk : p.gated ? MAX_BLOCKS / 2 : MAX_BLOCKS;
}

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
        for_lanes(p.in_features, [&](int64_t i, auto n) {
            store_some(to + i, load_some(from + r * p.x_stride + i, n), n);
        });
        std::memset(to + p.in_features, 0, static_cast<size_t>(depth - p.in_features) * sizeof(X));
    }
    return room;
}

// Sums of a tile on their way to the output: bias, gated activation, rounding. Row by row, so that it can be done
// while the next tile is multiplied; whoever multiplies calls `step` now and then, `complete` does the rest.
template <class Out, bool Gated>
class Finish {
public:
    explicit Finish(const PagedLinear& p)
        : out_(static_cast<Out*>(p.out)),
          residual_(static_cast<const Out*>(p.residual)),
          bias_(p.bias),
          out_stride_(p.out_stride),
          residual_stride_(p.residual_stride),
          columns_(p.out_features),
          activation_(p.activation) {}

    // Takes over [rows, SUMS_STRIDE] sums of `count` blocks from `block`; what was there before is completed first.
    void begin(const float* sums, int64_t row, int64_t rows, int64_t block, int count) {
        complete();
        sums_ = sums;
        blocks_ = count;
        const int64_t column = 16 * block;
        width_ = least(16 * count, columns_ - column);
        place_ = out_ + row * out_stride_ + column;
        bias_at_ = bias_ == nullptr ? nullptr : bias_ + column;
        residual_at_ = residual_ == nullptr ? nullptr : residual_ + row * residual_stride_ + column;
        left_ = rows;
    }

    // Two rows: a product of 512 and more features has enough steps for a whole tile.
    PAGED_INLINE void step() {
        for (int r = 0; r < 2; r++) {
            if (left_ > 0) {
                finish_row();
            }
        }
    }

    void complete() {
        while (left_ > 0) {
            finish_row();
        }
    }

private:
    PAGED_INLINE void finish_row() {
        if constexpr (Gated) {
            gate_row();
        } else if (width_ == 16 * blocks_) {
            for (int b = 0; b < blocks_; b++) {
                F16 sum = load(sums_ + 16 * b);
                if (bias_at_ != nullptr) {
                    sum = sum + load(bias_at_ + 16 * b);
                }
                if (residual_at_ != nullptr) {
                    sum = sum + load(residual_at_ + 16 * b);
                }
                store(place_ + 16 * b, sum);
            }
        } else {
            cut_row();
        }
        sums_ += SUMS_STRIDE;
        place_ += out_stride_;
        residual_at_ = residual_at_ == nullptr ? nullptr : residual_at_ + residual_stride_;
        left_--;
    }

    // A row whose last block is not full.
    PAGED_OUTLINE void cut_row() {
        for (int64_t b = 0; b < blocks_; b++) {
            const int64_t n = least(16, width_ - 16 * b);
            F16 sum = load(sums_ + 16 * b);
            if (bias_at_ != nullptr) {
                sum = sum + load_first(bias_at_ + 16 * b, n);
            }
            if (residual_at_ != nullptr) {
                sum = sum + load_first(residual_at_ + 16 * b, n);
            }
            store_first(place_ + 16 * b, sum, n);
        }
    }

    PAGED_INLINE void gate_row() {
        for (int b = 0; b < blocks_; b++) {
            F16 gate = load(sums_ + 16 * b), up = load(sums_ + 16 * (blocks_ + b));
            if (bias_at_ != nullptr) {
                gate = gate + load(bias_at_ + 16 * b);
                up = up + load(bias_at_ + columns_ / 2 + 16 * b);
            }
            store(place_ + 16 * b, activate<Out>(gate, activation_) * up);
        }
    }

    Out* out_;
    const Out* residual_;
    const float* bias_;
    int64_t out_stride_, residual_stride_, columns_;
    int activation_;
    const float* sums_ = nullptr;
    const float* bias_at_ = nullptr;
    const Out* residual_at_ = nullptr;
    Out* place_ = nullptr;
    int64_t width_ = 0, left_ = 0;
    int blocks_ = 0;
};

// Memory that is wanted soon, fetched into the second cache line by line while products run.
class Ahead {
public:
    // Lines from `from` within about `steps` steps.
    void begin(const void* from, int64_t bytes, int64_t steps) {
        at_ = static_cast<const char*>(from);
        left_ = (bytes + LINE - 1) / LINE;
        of_step_ = (left_ + steps - 1) / most(1, steps);
    }

    PAGED_INLINE void step() {
        for (int64_t i = least(of_step_, left_); i > 0; i--) {
            __builtin_prefetch(at_, 0, 2);
            at_ += LINE;
            left_--;
        }
    }

private:
    static constexpr int64_t LINE = 64;
    const char* at_ = nullptr;
    int64_t left_ = 0, of_step_ = 0;
};

// What is done between the steps of a product: the tile before is finished, the next rows and weights are fetched.
template <class Finisher>
struct Between {
    Finisher finish;
    Ahead rows, weights, up;

    PAGED_INLINE void step() {
        finish.step();
        rows.step();
        weights.step();
        up.step();
    }
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
template <class T, class X, class Work>
void run_blocks(
    const PagedLinear& p, Multiplier& multiply, const X* x, int64_t stride, int64_t depth, int64_t row, int64_t rows,
    int64_t block, int count, int64_t up, Sums2& room, Work& work
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
    if (rows > PASS_ROWS) {
        const int64_t bytes = count * block_size * static_cast<int64_t>(sizeof(T));
        const int64_t steps = round_up(rows, PASS_ROWS) / PASS_ROWS * depth / PAGED_BLOCK_K;
        work.weights.begin(weight + count * block_size, bytes, steps);
        work.up.begin(weight + (up + count) * block_size, up > 0 ? bytes : 0, steps);
    }
    // Other groups of rows, and other passes, find the weights in a cache.
    multiply.next = p.rows > PASS_ROWS ? 0 : count * block_size * static_cast<int64_t>(sizeof(T));
    for (int64_t r = 0; r < rows; r += PASS_ROWS) {
        const int64_t some = least(PASS_ROWS, rows - r);
        float* sums = room.take();
        multiply(x + r * stride, stride, some, blocks, up > 0 ? 2 * count : count, depth, sums, SUMS_STRIDE, work);
        work.finish.begin(sums, row + r, some, block, count);
    }
}

// Of many groups of rows: the next group's rows and, once the first group has brought in this chunk of weights, a part
// of the next one.
template <class T, class X, class Work>
void look_ahead(
    const PagedLinear& p, const Layout& l, const Part& part, const X* x, int64_t rows, int64_t stride, Work& work
) {
    const int64_t blocks = part.last_block - part.first_block, size = static_cast<int64_t>(sizeof(T));
    const int64_t steps = blocks * p.in_features / PAGED_BLOCK_K / WIDE_PASS_BLOCKS * (p.gated ? 2 : 1);
    if (part.group + 1 < l.groups) {
        work.rows.begin(x + rows * stride, rows * stride * static_cast<int64_t>(sizeof(X)), steps);
    }
    if (part.group > 0 && part.last_block < l.blocks) {
        const int64_t block_size = round_up(p.in_features, PAGED_BLOCK_K) * 16;
        const int64_t share = blocks * block_size / (l.groups - 1);
        const T* next = static_cast<const T*>(p.weight) + part.last_block * block_size + (part.group - 1) * share;
        work.weights.begin(next, share * size, steps);
        if (p.gated) {
            work.up.begin(next + l.blocks * block_size, share * size, steps);
        }
    }
}

template <class T, class Out, bool Gated>
void run_part(const PagedLinear& p, const Layout& l, const Part& part, Multiplier& multiply, void* scratch) {
    using X = Operand<T>;
    const int64_t depth = sizeof(T) == 4 ? p.in_features : round_up(p.in_features, PAGED_BLOCK_K);
    const int64_t row = part.group * l.group_rows, rows = least(l.group_rows, p.rows - row);
    Scratch room(scratch);
    Sums2 sums{{room.take<float>(PASS_ROWS * SUMS_STRIDE), room.take<float>(PASS_ROWS * SUMS_STRIDE)}};
    int64_t stride;
    const X* x = operand<T, X>(p, row, rows, room.take<X>(rows * depth), depth, stride);
    Between<Finish<Out, Gated>> work{Finish<Out, Gated>(p), {}, {}, {}};
    multiply.again = part.group > 0;
    if (l.groups > 1) {
        look_ahead<T>(p, l, part, x, rows, stride, work);
    }
    const int step = (rows > 16 ? WIDE_PASS_BLOCKS : MAX_BLOCKS) / (Gated ? 2 : 1);
    for (int64_t block = part.first_block; block < part.last_block; block += step) {
        const int count = static_cast<int>(least(step, part.last_block - block));
        run_blocks<T>(p, multiply, x, stride, depth, row, rows, block, count, Gated ? l.blocks : 0, sums, work);
    }
    work.finish.complete();
}

template <class T, class Out>
void run_items(const PagedLinear& p, int64_t first, int64_t last, void* scratch) {
    const Layout l = layout(p);
    Multiplier multiply;
    while (first < last) {
        const Part part = part_at(l, first, last);
        if (p.gated) {
            run_part<T, Out, true>(p, l, part, multiply, scratch);
        } else {
            run_part<T, Out, false>(p, l, part, multiply, scratch);
        }
        first += part.last_block - part.first_block;
    }
}

void run(const PagedLinear& p, int64_t first, int64_t last, void* scratch) {
    if (p.dtype == PAGED_F32) {
        run_items<float, float>(p, first, last, scratch);
    } else if (p.out_dtype == PAGED_F32) {
        run_items<bf16, float>(p, first, last, scratch);
    } else {
        run_items<bf16, bf16>(p, first, last, scratch);
    }
}

}  // namespace

const PagedKernel LINEAR = kernel<PagedLinear, items, grain, run>();

}  // namespace paged::PAGED_VARIANT
