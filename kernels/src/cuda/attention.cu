// Paged attention: decode with the splits of a sequence side by side, and prefill (chunks, mixed lengths) with the splits
// one after the other. Both run attention_rows.cuh, so a row's bits do not depend on which of them computes it.
#include "attention.h"

#include "attention_rows.cuh"

namespace paged {

constexpr int kStages = 2;
constexpr int kDecodeWarps = 2;

template <int D>
constexpr int kPrefillWarps = D > 128 ? 2 : 4;
// To a multiprocessor, at least: shared memory holds no more, so registers need not make room for more either.
constexpr int kPrefillBlocks = 2;

// What the kernels take of a `PagedAttention`.
template <class T>
struct Arguments {
    const T* q;
    const T* keys;
    const T* values;
    const int* blocks;
    const int* row_start;
    const int* lengths;
    T* out;
    float* partial;
    int max_blocks;
    Divisor block_size;
    int num_heads;
    int num_kv_heads;
    Divisor group;
    int window;
    int split;
    int num_splits;
    float scale;

    explicit Arguments(const PagedAttention& a)
        : q(static_cast<const T*>(a.q)),
          keys(static_cast<const T*>(a.keys)),
          values(static_cast<const T*>(a.values)),
          blocks(a.blocks),
          row_start(a.row_start),
          lengths(a.lengths),
          out(static_cast<T*>(a.out)),
          partial(a.partial),
          max_blocks(a.max_blocks),
          block_size(Divisor::of(static_cast<uint32_t>(a.block_size))),
          num_heads(a.num_heads),
          num_kv_heads(a.num_kv_heads),
          group(Divisor::of(static_cast<uint32_t>(a.num_heads / a.num_kv_heads))),
          window(a.window),
          split(a.split),
          num_splits(a.num_splits),
          scale(a.scale * 1.4426950408889634f) {}

    PAGED_DEVICE int first_visible(int position) const { return window > 0 ? max(0, position - window + 1) : 0; }

    template <int D>
    PAGED_DEVICE PagedKeys<T, D> sequence(int index, int kv_head) const {
        return {keys, values, blocks + int64_t{index} * max_blocks, block_size, num_kv_heads, kv_head};
    }
};

// The 16 rows of a warp within its sequence: `first` counts rows-and-heads, `count` of them exist.
template <class T, int D>
struct Tile {
    const Arguments<T>& a;
    int first_row;  // of the sequence, in the batch
    int kv_head;
    int first;
    int count;

    PAGED_DEVICE int token(int row) const {
        return static_cast<int>(a.group.divide(static_cast<uint32_t>(first + row)));
    }
    // Elements from the start of q (and of the result) to a row.
    PAGED_DEVICE int64_t offset(int row) const {
        const int in_sequence = token(row);
        const int head = kv_head * static_cast<int>(a.group.divisor) + first + row -
                         in_sequence * static_cast<int>(a.group.divisor);
        return (int64_t{first_row + in_sequence} * a.num_heads + head) * D;
    }
    PAGED_DEVICE void copy_query(T* shared) const {
        for (int part = threadIdx.x & 31; part < kRows * D / 8; part += 32) {
            const int row = part / (D / 8), column = part % (D / 8) * 8;
            const bool is_valid = row < count;
            copy_async(shared + row * HeadShape<D>::kStride + column, a.q + (is_valid ? offset(row) : 0) + column, is_valid);
        }
    }
    // Rows that do not exist see nothing.
    PAGED_DEVICE Visible visible(int first_position) const {
        Visible result;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = ((threadIdx.x & 31) >> 2) + 8 * r;
            const int position = first_position + token(row);
            result.first[r] = a.first_visible(position);
            result.last[r] = row < count ? position : -1;
        }
        return result;
    }
};

// ---- decode

template <class T, int D>
__global__ void __launch_bounds__(32 * kDecodeWarps)
    attention_decode_kernel(Arguments<T> a, const int* __restrict__ items, int head_tiles) {
    using Shape = HeadShape<D>;
    PAGED_DYNAMIC_SHARED(T, shared);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    T* query_rows = shared + warp * (kRows * Shape::kStride + kStages * 2 * Shape::kTile);
    T* ring = query_rows + kRows * Shape::kStride;

    const int item = blockIdx.z, sequence = items[item];
    const int kv_head = blockIdx.y / head_tiles, first_head = blockIdx.y % head_tiles * kRows;
    const int position = a.lengths[sequence] - 1, group = static_cast<int>(a.group.divisor);
    const Tile<T, D> tile{a, a.row_start[sequence], kv_head, first_head, min(kRows, group - first_head)};
    const PagedKeys<T, D> cache = a.template sequence<D>(sequence, kv_head);
    const int first_split = a.first_visible(position) / a.split, last_split = position / a.split;
    const int stride = static_cast<int>(gridDim.x) * kDecodeWarps;

    tile.copy_query(query_rows);
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    Query<T, D> query;
    query.load(query_rows);
    const Visible visible = tile.visible(position);

    for (int split = first_split + static_cast<int>(blockIdx.x) * kDecodeWarps + warp; split <= last_split; split += stride) {
        const int last_key = min(position, (split + 1) * a.split - 1);
        const int first_key = max(split * a.split, a.first_visible(position) / Shape::kKeys * Shape::kKeys);
        auto copy = [&](int key) {
            T* at = ring + (key / Shape::kKeys % kStages) * 2 * Shape::kTile;
            if (key <= last_key) {
                cache.template copy<32>(at, at + Shape::kTile, key, last_key, lane);
            }
            commit_copies();
        };
        RowState<D> state;
        state.clear();
        copy(first_key);
        for (int key = first_key; key <= last_key; key += Shape::kKeys) {
            copy(key + Shape::kKeys);
            wait_copies<kStages - 1>();
            __syncwarp();
            const T* at = ring + (key / Shape::kKeys % kStages) * 2 * Shape::kTile;
            attend<T, D>(state, query, visible, at, at + Shape::kTile, key, a.scale);
            __syncwarp();
        }
        state.finish_split();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = (lane >> 2) + 8 * r;
            if (row < tile.count) {
                const int head = kv_head * group + first_head + row;
                float* out = a.partial + ((int64_t{item} * a.num_heads + head) * a.num_splits + split) * (D + 2);
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
                    const float2 pair = make_float2(state.values[n][2 * r], state.values[n][2 * r + 1]);
                    *reinterpret_cast<float2*>(out + n * 8 + 2 * (lane & 3)) = pair;
                }
                if ((lane & 3) == 0) {
                    *reinterpret_cast<float2*>(out + D) = make_float2(state.largest[r], state.weights[r]);
                }
            }
        }
    }
}

// One thread block for a head of a row; a thread for a feature.
template <class T, int D>
__global__ void __launch_bounds__((D + 31) / 32 * 32)
    attention_merge_kernel(Arguments<T> a, const int* __restrict__ items) {
    const int item = blockIdx.x, head = blockIdx.y, sequence = items[item], feature = threadIdx.x;
    if (feature >= D) {
        return;
    }
    const int position = a.lengths[sequence] - 1;
    const float* partial = a.partial + (int64_t{item} * a.num_heads + head) * a.num_splits * (D + 2);
    float largest = kNothing, weight = 0.0f, value = 0.0f;
    const int last_split = position / a.split;
    for (int split = a.first_visible(position) / a.split; split <= last_split; split++) {
        const float* one = partial + split * (D + 2);
        const Merge merge = Merge::of(largest, one[D]);
        weight = merge(weight, one[D + 1]);
        value = merge(value, one[feature]);
        largest = merge.largest;
    }
    const int64_t row = a.row_start[sequence];
    a.out[(row * a.num_heads + head) * D + feature] = Number<T>::from_float(normalize(value, weight));
}

// ---- prefill

template <class T, int D>
__global__ void __launch_bounds__(32 * kPrefillWarps<D>, kPrefillBlocks)
    attention_prefill_kernel(Arguments<T> a, const int* __restrict__ tiles) {
    using Shape = HeadShape<D>;
    constexpr int kWarps = kPrefillWarps<D>, kThreads = 32 * kWarps;
    PAGED_DYNAMIC_SHARED(T, shared);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    T* query_rows = shared + warp * kRows * Shape::kStride;
    T* ring = shared + kWarps * kRows * Shape::kStride;
    // The merged splits of a warp's rows; every lane reads what it wrote itself.
    float* merged = reinterpret_cast<float*>(ring + kStages * 2 * Shape::kTile) + warp * kRows * D + lane;

    const int sequence = tiles[2 * blockIdx.x], first = tiles[2 * blockIdx.x + 1], kv_head = blockIdx.y;
    const int first_row = a.row_start[sequence], num_rows = a.row_start[sequence + 1] - first_row;
    const int first_position = a.lengths[sequence] - num_rows, group = static_cast<int>(a.group.divisor);
    const int left = num_rows * group - first;
    const Tile<T, D> tile{a, first_row, kv_head, first + warp * kRows, min(kRows, left - warp * kRows)};
    const PagedKeys<T, D> cache = a.template sequence<D>(sequence, kv_head);

    tile.copy_query(query_rows);
    commit_copies();
    const int in_block = min(kWarps * kRows, left);
    const int first_token = static_cast<int>(a.group.divide(static_cast<uint32_t>(first)));
    const int last_token = static_cast<int>(a.group.divide(static_cast<uint32_t>(first + in_block - 1)));
    const int last_key = first_position + last_token;
    const int first_key = a.first_visible(first_position + first_token) / Shape::kKeys * Shape::kKeys;
    const Visible visible = tile.visible(first_position);
    const int my_last = tile.count > 0 ? first_position + tile.token(tile.count - 1) : -1;
    auto copy = [&](int key) {
        T* at = ring + (key / Shape::kKeys % kStages) * 2 * Shape::kTile;
        if (key <= last_key) {
            cache.template copy<kThreads>(at, at + Shape::kTile, key, last_key, threadIdx.x);
        }
        commit_copies();
    };
    copy(first_key);
    wait_copies<1>();
    __syncwarp();
    Query<T, D> query;
    query.load(query_rows);

    RowState<D> state;
    state.clear();
    float largest[2] = {kNothing, kNothing}, weights[2] = {0.0f, 0.0f};
    bool is_first_split = true;
    auto merge_split = [&] {
        state.finish_split();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const Merge merge = Merge::of(largest[r], state.largest[r]);
            largest[r] = merge.largest;
            weights[r] = merge(weights[r], state.weights[r]);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    float* sum = merged + (n * 4 + e) * 32;
                    *sum = merge(is_first_split ? 0.0f : *sum, state.values[n][e]);
                }
            }
        }
        is_first_split = false;
        state.clear();
    };
    int split_end = (first_key / a.split + 1) * a.split;
    for (int key = first_key; key <= last_key; key += Shape::kKeys) {
        if (key == split_end) {
            merge_split();
            split_end += a.split;
        }
        copy(key + Shape::kKeys);
        wait_copies<kStages - 1>();
        __syncthreads();
        if (key <= my_last) {
            const T* at = ring + (key / Shape::kKeys % kStages) * 2 * Shape::kTile;
            attend<T, D>(state, query, visible, at, at + Shape::kTile, key, a.scale);
        }
        __syncthreads();
    }
    merge_split();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = (lane >> 2) + 8 * r;
        if (row < tile.count) {
            T* out = a.out + tile.offset(row);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                const float low = normalize(merged[(n * 4 + 2 * r) * 32], weights[r]);
                const float high = normalize(merged[(n * 4 + 2 * r + 1) * 32], weights[r]);
                *reinterpret_cast<uint32_t*>(out + n * 8 + 2 * (lane & 3)) = Number<T>::pack(low, high);
            }
        }
    }
}

// ---- choice of kernels

template <class T, int D>
int decode(const PagedAttention& a, const int32_t* items, int num_items, int parallel, void* stream) {
    using Shape = HeadShape<D>;
    const Arguments<T> arguments(a);
    const int head_tiles = (a.num_heads / a.num_kv_heads + kRows - 1) / kRows;
    constexpr size_t bytes = sizeof(T) * kDecodeWarps * (kRows * Shape::kStride + kStages * 2 * Shape::kTile);
    static_assert(bytes <= kMostShared);
    const int error = launch(
        attention_decode_kernel<T, D>, dim3(parallel, a.num_kv_heads * head_tiles, num_items), dim3(32 * kDecodeWarps),
        bytes, stream, arguments, items, head_tiles
    );
    if (error) {
        return error;
    }
    const dim3 threads((D + 31) / 32 * 32);
    return launch(attention_merge_kernel<T, D>, dim3(num_items, a.num_heads), threads, 0, stream, arguments, items);
}

template <class T, int D>
int prefill(const PagedAttention& a, const int32_t* tiles, int num_tiles, void* stream) {
    using Shape = HeadShape<D>;
    constexpr int kWarps = kPrefillWarps<D>;
    constexpr size_t bytes = sizeof(T) * (kWarps * kRows * Shape::kStride + kStages * 2 * Shape::kTile) +
                             sizeof(float) * kWarps * kRows * D;
    static_assert(bytes <= kMostShared);
    return launch(
        attention_prefill_kernel<T, D>, dim3(num_tiles, a.num_kv_heads), dim3(32 * kWarps), bytes, stream,
        Arguments<T>(a), tiles
    );
}

// Calls `run.operator()<T, D>()` for the type and head size of `a`.
template <class Run>
int with_shape(const PagedAttention& a, Run run) {
    auto with_size = [&]<class T>() {
        switch (a.head_dim) {
            case 64: return run.template operator()<T, 64>();
            case 80: return run.template operator()<T, 80>();
            case 96: return run.template operator()<T, 96>();
            case 128: return run.template operator()<T, 128>();
            case 256: return run.template operator()<T, 256>();
            default: return -1;
        }
    };
    const bool is_possible = a.block_size >= 1 && a.block_size <= 256 && a.num_kv_heads > 0 &&
                             a.num_heads % a.num_kv_heads == 0 && a.split > 0 && a.split % 32 == 0;
    if (!is_possible) {
        return -1;
    }
    return a.dtype == 1 ? with_size.template operator()<__nv_bfloat16>() : with_size.template operator()<__half>();
}

}  // namespace paged

#define PAGED_EXPORT extern "C" __attribute__((visibility("default")))

PAGED_EXPORT int paged_cuda_attention_decode(
    const PagedAttention* a, const int32_t* items, int32_t num_items, int32_t parallel, void* stream
) {
    if (num_items == 0) {
        return 0;
    }
    return paged::with_shape(*a, [&]<class T, int D>() {
        return paged::decode<T, D>(*a, items, num_items, parallel, stream);
    });
}

PAGED_EXPORT int paged_cuda_attention_prefill(
    const PagedAttention* a, const int32_t* tiles, int32_t num_tiles, void* stream
) {
    if (num_tiles == 0) {
        return 0;
    }
    return paged::with_shape(*a, [&]<class T, int D>() { return paged::prefill<T, D>(*a, tiles, num_tiles, stream); });
}

PAGED_EXPORT int paged_cuda_attention_tile_rows(int32_t head_dim) {
    switch (head_dim) {
        case 64:
        case 80:
        case 96:
        case 128: return paged::kRows * paged::kPrefillWarps<128>;
        case 256: return paged::kRows * paged::kPrefillWarps<256>;
        default: return 0;
    }
}
