// Attention of 16 rows by one warp, the piece that decode and prefill share: whatever kernel runs it, in whatever batch,
// a row goes through the same operations in the same order, so its bits are the same.
//
// Keys lie in splits of a fixed number of tokens at absolute positions. Within a split a row takes `kKeys` keys at a
// time (online softmax: Milakov and Gimelshein 2018; tiles in registers: Dao, FlashAttention-2, 2023); the splits of a
// row are then merged in the order of their positions. Keys that a row does not see count for exactly nothing.
//
//   rows of a tile: row i is token i / group, query head i % group of the key-value head; 16 to a warp
//   fragments: lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the one after, of every 8 columns
#pragma once
#include "numeric.cuh"

namespace paged {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kRows = 16;
// Below every score; finite, so that the difference of two of them is 0 and not NaN.
constexpr float kNothing = -1e30f;

template <int D>
struct HeadShape {
    static_assert(D % 16 == 0);
    static constexpr int kKeys = D > 128 ? 16 : 32;
    // Elements from row to row in shared memory: an odd number of 16-byte units, so that 8 rows lie in 8 banks.
    static constexpr int kStride = D + 8;
    static_assert((kStride / 8) % 2 == 1);
    static constexpr int kTile = kKeys * kStride;
    static constexpr bool kQueryInRegisters = D <= 128;
};

// What a row has seen so far: the weighted sum of values, relative to 2^largest, and the sum of weights.
template <int D>
struct RowState {
    float values[D / 8][4];
    float largest[2];
    float weights[2];

    PAGED_DEVICE void clear() {
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                values[n][e] = 0.0f;
            }
        }
        largest[0] = largest[1] = kNothing;
        weights[0] = weights[1] = 0.0f;
    }

    // Each lane has added the weights of its own columns: now all of a row.
    PAGED_DEVICE void finish_split() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            weights[r] += __shfl_xor_sync(kAllLanes, weights[r], 1);
            weights[r] += __shfl_xor_sync(kAllLanes, weights[r], 2);
        }
    }
};

// One split more: sums that are relative to different maxima. The only place where splits are merged.
struct Merge {
    float largest;
    float keep;
    float take;

    static PAGED_DEVICE Merge of(float before, float split) {
        const float largest = fmaxf(before, split);
        return {largest, exp2f(before - largest), exp2f(split - largest)};
    }
    PAGED_DEVICE float operator()(float before, float split) const {
        return fmaf(before, keep, __fmul_rn(split, take));
    }
};

// Zero for rows that see nothing; a sum that is NaN stays it, so that the sampler finds out.
PAGED_DEVICE float normalize(float value, float weight) { return weight == 0.0f ? 0.0f : value / weight; }

// Which keys the two rows of a lane see: first[r] to last[r].
struct Visible {
    int first[2];
    int last[2];
};

// Query fragments of a tile's 16 rows, from shared memory.
template <class T, int D>
struct Query {
    static constexpr int kHeld = HeadShape<D>::kQueryInRegisters ? D / 16 : 1;
    uint32_t held[kHeld][4];
    const T* rows;

    PAGED_DEVICE void load(const T* shared_rows) {
        rows = shared_rows;
        if constexpr (HeadShape<D>::kQueryInRegisters) {
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                fetch(held[k], k);
            }
        }
    }
    PAGED_DEVICE void fetch(uint32_t (&fragment)[4], int k) const {
        const int lane = threadIdx.x & 31;
        load_matrices(fragment, rows + (lane & 15) * HeadShape<D>::kStride + k * 16 + (lane >> 4) * 8);
    }
};

// Scores of 16 rows and kKeys keys, scaled for powers of two.
template <class T, int D>
PAGED_DEVICE void score(float (&scores)[HeadShape<D>::kKeys / 8][4], Query<T, D>& query, const T* keys, float scale) {
    using Shape = HeadShape<D>;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            scores[n][e] = 0.0f;
        }
    }
    const T* row = keys + ((lane & 7) + (lane >> 4) * 8) * Shape::kStride + (lane >> 3 & 1) * 8;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        if constexpr (!Shape::kQueryInRegisters) {
            query.fetch(query.held[0], k);
        }
        const auto& a = query.held[Shape::kQueryInRegisters ? k : 0];
#pragma unroll
        for (int n = 0; n < Shape::kKeys / 16; n++) {
            uint32_t b[4];
            load_matrices(b, row + n * 16 * Shape::kStride + k * 16);
            const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
            mma<T>(scores[2 * n], a, low);
            mma<T>(scores[2 * n + 1], a, high);
        }
    }
#pragma unroll
    for (int n = 0; n < Shape::kKeys / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            scores[n][e] = __fmul_rn(scores[n][e], scale);
        }
    }
}

// Scores become weights; the sums so far are made relative to the new maxima.
template <int D>
PAGED_DEVICE void weigh(float (&scores)[HeadShape<D>::kKeys / 8][4], RowState<D>& state, const Visible& visible,
                        int first_key) {
    constexpr int kColumns = HeadShape<D>::kKeys / 8;
    const int first_column = first_key + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        auto sees = [&](int n, int e) {
            const int key = first_column + n * 8 + e;
            return key >= visible.first[r] && key <= visible.last[r];
        };
        float largest = state.largest[r];
#pragma unroll
        for (int n = 0; n < kColumns; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                largest = fmaxf(largest, sees(n, e) ? scores[n][2 * r + e] : kNothing);
            }
        }
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        const float keep = exp2f(state.largest[r] - largest);
        float weights = 0.0f;
#pragma unroll
        for (int n = 0; n < kColumns; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float weight = sees(n, e) ? exp2f(scores[n][2 * r + e] - largest) : 0.0f;
                scores[n][2 * r + e] = weight;
                weights += weight;
            }
        }
        state.largest[r] = largest;
        state.weights[r] = fmaf(state.weights[r], keep, weights);
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            state.values[n][2 * r] *= keep;
            state.values[n][2 * r + 1] *= keep;
        }
    }
}

// Adds the weighted values; weights are rounded to the type of the cache.
template <class T, int D>
PAGED_DEVICE void add_values(RowState<D>& state, const float (&weights)[HeadShape<D>::kKeys / 8][4], const T* values) {
    using Shape = HeadShape<D>;
    const int lane = threadIdx.x & 31;
    const T* row = values + (lane & 15) * Shape::kStride + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < Shape::kKeys / 16; k++) {
        uint32_t a[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            a[2 * half] = Number<T>::pack(weights[2 * k + half][0], weights[2 * k + half][1]);
            a[2 * half + 1] = Number<T>::pack(weights[2 * k + half][2], weights[2 * k + half][3]);
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            load_matrices_transposed(b, row + k * 16 * Shape::kStride + n * 16);
            const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
            mma<T>(state.values[2 * n], a, low);
            mma<T>(state.values[2 * n + 1], a, high);
        }
    }
}

// kKeys keys more, from position `first_key` on, whose keys and values lie in shared memory.
template <class T, int D>
PAGED_DEVICE void attend(RowState<D>& state, Query<T, D>& query, const Visible& visible, const T* keys,
                         const T* values, int first_key, float scale) {
    float scores[HeadShape<D>::kKeys / 8][4];
    score<T, D>(scores, query, keys, scale);
    weigh<D>(scores, state, visible, first_key);
    add_values<T, D>(state, scores, values);
}

// Where the keys and values of a sequence's positions lie: [num_blocks, num_kv_heads, block_size, D].
template <class T, int D>
struct PagedKeys {
    const T* keys;
    const T* values;
    const int* blocks;  // of this sequence
    Divisor block_size;
    int num_kv_heads;
    int kv_head;

    // Elements from the cache's start to the row of a position.
    PAGED_DEVICE int64_t offset(int position) const {
        const uint32_t index = block_size.divide(static_cast<uint32_t>(position));
        const uint32_t in_block = static_cast<uint32_t>(position) - index * block_size.divisor;
        const int64_t block = int64_t{blocks[index]} * num_kv_heads + kv_head;
        return (block * block_size.divisor + in_block) * D;
    }

    // Starts copies of kKeys rows from `first` on into shared memory, zeros behind `last`, by `kThreads` threads: each
    // warp finds the rows of a tile once and hands the offsets to its lanes.
    template <int kThreads>
    PAGED_DEVICE void copy(T* shared_keys, T* shared_values, int first, int last, int thread) const {
        using Shape = HeadShape<D>;
        constexpr int kParts = D / 8;
        constexpr int kAll = Shape::kKeys * kParts, kRounds = (kAll + kThreads - 1) / kThreads;
        static_assert(Shape::kKeys <= 32);
        const int lane = thread & 31;
        const int mine = first + lane;
        const int64_t row = lane < Shape::kKeys && mine <= last ? offset(mine) : 0;
#pragma unroll
        for (int i = 0; i < kRounds; i++) {
            const int part = i * kThreads + thread;
            const int key = part / kParts, column = part % kParts * 8;
            const int64_t from = __shfl_sync(kAllLanes, row, key & 31) + column;
            if (kAll % kThreads != 0 && part >= kAll) {
                break;
            }
            const bool is_valid = first + key <= last;
            copy_async(shared_keys + key * Shape::kStride + column, keys + from, is_valid);
            copy_async(shared_values + key * Shape::kStride + column, values + from, is_valid);
        }
    }
};

}  // namespace paged
