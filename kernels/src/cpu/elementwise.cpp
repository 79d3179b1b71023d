// The small ops, row by row: embedding, norms, gated activation, sum, row selection.
#include "math.hpp"
#include "scratch.hpp"
#include "tables.hpp"

namespace paged::PAGED_VARIANT {
namespace {

constexpr int64_t SMALL_GRAIN = 4;

template <class P>
int64_t rows_of(const P& p) {
    return p.rows;
}

template <class P>
int64_t small_grain(const P&) {
    return SMALL_GRAIN;
}

// ---- embedding

void embedding_row(const PagedEmbedding& p, int64_t row, float*) {
    const int64_t token = p.token_ids[row];
    const float* table = static_cast<const float*>(p.table) + token / 16 * 16 * round_up(p.hidden_size, PAGED_BLOCK_K);
    float* out = static_cast<float*>(p.out) + row * p.out_stride;
    for (int64_t k = 0; k < p.hidden_size; k++) {
        out[k] = table[16 * k + token % 16];
    }
}

void embedding_row(const PagedEmbedding& p, int64_t row, bf16*) {
    const int64_t token = p.token_ids[row];
    const bf16* table = static_cast<const bf16*>(p.table) + token / 16 * 16 * round_up(p.hidden_size, PAGED_BLOCK_K);
    const bf16* pairs = table + 2 * (token % 16);
    bf16* out = static_cast<bf16*>(p.out) + row * p.out_stride;
    for (int64_t k = 0; k + 2 <= p.hidden_size; k += 2) {
        std::memcpy(out + k, pairs + 16 * k, 4);
    }
    if (p.hidden_size % 2) {
        out[p.hidden_size - 1] = pairs[16 * (p.hidden_size - 1)];
    }
}

void embedding(const PagedEmbedding& p, int64_t first, int64_t last, void*) {
    for (int64_t row = first; row < last; row++) {
        if (p.dtype == PAGED_F32) {
            embedding_row(p, row, static_cast<float*>(nullptr));
        } else {
            embedding_row(p, row, static_cast<bf16*>(nullptr));
        }
    }
}

// ---- norms

// Four sums side by side, so that no addition waits for the one before; the same for every row.
class Squares {
public:
    PAGED_INLINE void add(F16 x) {
        F16 oldest = sums_[0];
        sums_[0] = sums_[1];
        sums_[1] = sums_[2];
        sums_[2] = sums_[3];
        sums_[3] = fma(x, x, oldest);
    }
    PAGED_INLINE float total() const { return sum_lanes((sums_[0] + sums_[1]) + (sums_[2] + sums_[3])); }

private:
    F16 sums_[4] = {zero(), zero(), zero(), zero()};
};

PAGED_INLINE float norm_factor(float squares, int64_t count, float eps) {
    return 1.0f / std::sqrt(squares / static_cast<float>(count) + eps);
}

template <class T>
void norm_row(const PagedNorm& p, int64_t row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    T* out = static_cast<T*>(p.out) + row * p.out_stride;
    Squares squares;
    if (p.residual != nullptr) {
        const T* residual = static_cast<const T*>(p.residual) + row * p.residual_stride;
        T* sum = static_cast<T*>(p.sum) + row * p.sum_stride;
        for_lanes(p.features, [&](int64_t i, auto n) {
            store_some(sum + i, load_some(x + i, n) + load_some(residual + i, n), n);
            squares.add(load_some(sum + i, n));  // as rounded
        });
        x = sum;
    } else {
        for_lanes(p.features, [&](int64_t i, auto n) { squares.add(load_some(x + i, n)); });
    }
    const F16 factor = set1(norm_factor(squares.total(), p.features, p.eps));
    for_lanes(p.features, [&](int64_t i, auto n) {
        store_some(out + i, load_some(x + i, n) * factor * load_some(p.weight + i, n), n);
    });
}

void norm(const PagedNorm& p, int64_t first, int64_t last, void*) {
    for (int64_t row = first; row < last; row++) {
        if (p.dtype == PAGED_F32) {
            norm_row<float>(p, row);
        } else {
            norm_row<bf16>(p, row);
        }
    }
}

// ---- rotation and cache write

// One head into `head`, as floats: normed where there is a weight.
template <class T>
PAGED_INLINE void take_head(const T* from, int64_t size, const float* weight, float eps, float* head) {
    if (weight == nullptr) {
        for_lanes(size, [&](int64_t i, auto n) { store_some(head + i, load_some(from + i, n), n); });
        return;
    }
    Squares squares;
    for_lanes(size, [&](int64_t i, auto n) { squares.add(load_some(from + i, n)); });
    const F16 factor = set1(norm_factor(squares.total(), size, eps));
    for_lanes(size, [&](int64_t i, auto n) {
        store_some(head + i, load_some(from + i, n) * factor * load_some(weight + i, n), n);
    });
}

// Pairs (i, i + size / 2), rounded once.
template <class T>
PAGED_INLINE void rotate_head(const float* head, int64_t size, const float* cos, const float* sin, T* out) {
    const int64_t half = size / 2;
    for_lanes(half, [&](int64_t i, auto n) {
        F16 low = load_some(head + i, n), high = load_some(head + half + i, n);
        F16 c = load_some(cos + i, n), s = load_some(sin + i, n);
        store_some(out + i, fma(low, c, zero() - high * s), n);
        store_some(out + half + i, fma(high, c, low * s), n);
    });
}

template <class T>
void rope_row(const PagedRope& p, int64_t row, float* head) {
    const int64_t size = p.head_dim, half = size / 2, position = p.positions[row];
    const float *cos = p.cos + position * half, *sin = p.sin + position * half;
    const T* from = static_cast<const T*>(p.qkv) + row * p.qkv_stride;
    T* q = static_cast<T*>(p.q) + row * p.q_stride;
    for (int64_t h = 0; h < p.num_heads; h++) {
        take_head(from + h * size, size, p.q_norm, p.norm_eps, head);
        rotate_head(head, size, cos, sin, q + h * size);
    }
    const int64_t slot = p.slot_mapping[row], block = slot / p.block_size, offset = slot % p.block_size;
    for (int64_t h = 0; h < p.num_kv_heads; h++) {
        const int64_t cell = ((block * p.num_kv_heads + h) * p.block_size + offset) * size;
        take_head(from + (p.num_heads + h) * size, size, p.k_norm, p.norm_eps, head);
        rotate_head(head, size, cos, sin, static_cast<T*>(p.key) + cell);
        const T* value = from + (p.num_heads + p.num_kv_heads + h) * size;
        std::memcpy(static_cast<T*>(p.value) + cell, value, static_cast<size_t>(size) * sizeof(T));
    }
}

void rope(const PagedRope& p, int64_t first, int64_t last, void* scratch) {
    float* head = Scratch(scratch).take<float>(p.head_dim);
    for (int64_t row = first; row < last; row++) {
        if (p.dtype == PAGED_F32) {
            rope_row<float>(p, row, head);
        } else {
            rope_row<bf16>(p, row, head);
        }
    }
}

// ---- gated, add, select

template <class T>
void gated_row(const PagedGated& p, int64_t row) {
    const T* gate = static_cast<const T*>(p.gate_up) + row * p.in_stride;
    const T* up = gate + p.features;
    T* out = static_cast<T*>(p.out) + row * p.out_stride;
    for_lanes(p.features, [&](int64_t i, auto n) {
        store_some(out + i, activate<T>(load_some(gate + i, n), p.activation) * load_some(up + i, n), n);
    });
}

void gated(const PagedGated& p, int64_t first, int64_t last, void*) {
    for (int64_t row = first; row < last; row++) {
        if (p.dtype == PAGED_F32) {
            gated_row<float>(p, row);
        } else {
            gated_row<bf16>(p, row);
        }
    }
}

template <class T>
void add_row(const PagedAdd& p, int64_t row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    const T* residual = static_cast<const T*>(p.residual) + row * p.residual_stride;
    T* out = static_cast<T*>(p.out) + row * p.out_stride;
    for_lanes(p.features, [&](int64_t i, auto n) {
        store_some(out + i, load_some(x + i, n) + load_some(residual + i, n), n);
    });
}

void add(const PagedAdd& p, int64_t first, int64_t last, void*) {
    for (int64_t row = first; row < last; row++) {
        if (p.dtype == PAGED_F32) {
            add_row<float>(p, row);
        } else {
            add_row<bf16>(p, row);
        }
    }
}

void select(const PagedSelect& p, int64_t first, int64_t last, void*) {
    const int64_t size = p.dtype == PAGED_F32 ? 4 : 2;
    for (int64_t row = first; row < last; row++) {
        const char* from = static_cast<const char*>(p.x) + p.row_index[row] * p.x_stride * size;
        char* to = static_cast<char*>(p.out) + row * p.out_stride * size;
        std::memcpy(to, from, static_cast<size_t>(p.features * size));
    }
}

}  // namespace

const PagedKernel EMBEDDING =
    kernel<PagedEmbedding, rows_of<PagedEmbedding>, small_grain<PagedEmbedding>, embedding>();
const PagedKernel NORM = kernel<PagedNorm, rows_of<PagedNorm>, small_grain<PagedNorm>, norm>();
const PagedKernel ROPE = kernel<PagedRope, rows_of<PagedRope>, small_grain<PagedRope>, rope>();
const PagedKernel GATED = kernel<PagedGated, rows_of<PagedGated>, small_grain<PagedGated>, gated>();
const PagedKernel ADD = kernel<PagedAdd, rows_of<PagedAdd>, small_grain<PagedAdd>, add>();
const PagedKernel SELECT = kernel<PagedSelect, rows_of<PagedSelect>, small_grain<PagedSelect>, select>();

}  // namespace paged::PAGED_VARIANT
