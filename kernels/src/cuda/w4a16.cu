// Matrix products with 4-bit weights (codes.cuh): one kernel for up to 8 rows, bound by reading the weights, one for up
// to 64 rows with weights and activations in a ring of asynchronous copies, and dequantization for more. Sums are
// float32 in one order that depends on the shape of the weight and the kernel, not on the other rows.
#include "w4a16.h"

#include "codes.cuh"

namespace paged {

// ---- up to 8 rows: outputs are the rows of the tensor-core product, activations its 8 columns

constexpr int kFewRows = 8;
constexpr int kFewWarps = 8;
constexpr int kAhead = 4;

// One block for 16 outputs; its warps share the inputs among them, block by block in turn.
template <class T>
__global__ void __launch_bounds__(32 * kFewWarps)
    few_rows_kernel(Codes<T> w, T* __restrict__ y, const T* __restrict__ x, int m) {
    PAGED_SHARED(float, partial, kFewWarps * 32 * 4);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tile = blockIdx.x;
    const int row = lane >> 2, steps = w.k / kBlockInputs;
    const bool is_row = row < m;
    const T* inputs = x + int64_t{is_row ? row : 0} * w.k + (lane & 3) * 16;

    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint4 codes[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
        const int step = warp + i * kFewWarps;
        codes[i] = step < steps ? load_once(w.block(step, tile, lane)) : make_uint4(0, 0, 0, 0);
    }
    for (int first = warp; first < steps; first += kAhead * kFewWarps) {
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const int step = first + i * kFewWarps;
            if (step >= steps) {
                break;
            }
            const uint4 mine = codes[i];
            const int later = step + kAhead * kFewWarps;
            if (later < steps) {
                codes[i] = load_once(w.block(later, tile, lane));
            }
            LaneScales<T> scales;
            scales.load(w, step, tile, lane);
            const auto* from = reinterpret_cast<const uint4*>(inputs + step * kBlockInputs);
            const uint4 nothing = make_uint4(0, 0, 0, 0);
            const uint4 low = is_row ? from[0] : nothing, high = is_row ? from[1] : nothing;
            const uint32_t columns[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int s = 0; s < 4; s++) {
                uint32_t numbers[4];
                dequantize<T>(numbers, word_of(mine, s), scales);
                const uint32_t a[4] = {numbers[0], numbers[2], numbers[1], numbers[3]};
                const uint32_t b[2] = {columns[2 * s], columns[2 * s + 1]};
                mma<T>(sums, a, b);
            }
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        partial[(warp * 4 + e) * 32 + lane] = sums[e];
    }
    __syncthreads();
    if (warp != 0) {
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        float sum = 0.0f;
#pragma unroll
        for (int of = 0; of < kFewWarps; of++) {
            sum += partial[(of * 4 + e) * 32 + lane];
        }
        const int output = tile * kBlockOutputs + (lane >> 2) + 8 * (e >> 1), y_row = 2 * (lane & 3) + (e & 1);
        if (y_row < m) {
            const float bias = w.bias ? Number<T>::to_float(w.bias[output]) : 0.0f;
            y[int64_t{y_row} * w.n + output] = Number<T>::from_float(sum + bias);
        }
    }
}

// ---- up to 64 rows: a ring of stages; blocks share the inputs of a tile of outputs and the last one adds up

constexpr int kRingWarps = 4;
constexpr int kRingThreads = 32 * kRingWarps;
constexpr int kRingStages = 4;
constexpr int kTilesPerWarp = 2;  // of 16 outputs
constexpr int kRingTiles = kRingWarps * kTilesPerWarp;
constexpr int kRingOutputs = kRingTiles * kBlockOutputs;
// Elements from row to row of activations: 9 units of 16 bytes, so that lanes of two rows meet in no bank.
constexpr int kInputStride = kBlockInputs + 8;
constexpr int kMostRows = 64;
constexpr int kMostSplits = 8;
constexpr int kCounters = 1024;  // tiles of outputs that may share their inputs

template <int kRowTiles>
constexpr size_t ring_bytes() {
    return kRingStages * (size_t{kRowTiles} * 16 * kInputStride * 2 + size_t{kRingTiles} * 32 * sizeof(uint4));
}

// How many blocks share the inputs, as a power of two: of the weight's shape alone.
inline int ring_split_bits(int n, int k) {
    constexpr int kWanted = 256, kLeastSteps = 8;
    const int tiles = (n + kRingOutputs - 1) / kRingOutputs, steps = k / kBlockInputs;
    int bits = 0;
    while ((1 << bits) < kMostSplits && (tiles << bits) < kWanted && (steps >> (bits + 1)) >= kLeastSteps) {
        bits++;
    }
    return tiles <= kCounters ? bits : 0;
}

// Fragments of 16 rows for the four words of a block: lane's rows g and g + 8, inputs 16 t to 16 t + 15.
template <class T>
PAGED_DEVICE void load_inputs(uint32_t (&a)[4][4], const T* rows, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const auto* from = reinterpret_cast<const uint4*>(rows + ((lane >> 2) + 8 * r) * kInputStride + (lane & 3) * 16);
        const uint4 low = from[0], high = from[1];
        const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int s = 0; s < 4; s++) {
            a[s][r] = words[2 * s];
            a[s][2 + r] = words[2 * s + 1];
        }
    }
}

// Grid (tiles of outputs, splits of the inputs).
template <class T, int kRowTiles>
__global__ void __launch_bounds__(kRingThreads, kRowTiles > 2 ? 3 : 4)
    ring_kernel(Codes<T> w, T* __restrict__ y, const T* __restrict__ x, int m, int split_bits, float* sums, unsigned* arrived) {
    PAGED_DYNAMIC_SHARED(unsigned char, shared);
    auto* inputs = reinterpret_cast<T*>(shared);
    auto* blocks = reinterpret_cast<uint4*>(shared + kRingStages * kRowTiles * 16 * kInputStride * 2);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int tiles = w.n / kBlockOutputs, first_tile = blockIdx.x * kRingTiles;
    const int steps = w.k / kBlockInputs, splits = 1 << split_bits;
    const int first_step = steps * static_cast<int>(blockIdx.y) >> split_bits;
    const int last_step = steps * (static_cast<int>(blockIdx.y) + 1) >> split_bits;

    auto copy = [&](int step) {
        const int stage = step % kRingStages;
        if (step < last_step) {
            T* to = inputs + stage * kRowTiles * 16 * kInputStride;
            for (int part = threadIdx.x; part < kRowTiles * 16 * 8; part += kRingThreads) {
                const int row = part >> 3, column = (part & 7) * 8;
                const bool is_row = row < m;
                const T* from = x + int64_t{is_row ? row : 0} * w.k + step * kBlockInputs + column;
                copy_async(to + row * kInputStride + column, from, is_row);
            }
            for (int part = threadIdx.x; part < kRingTiles * 32; part += kRingThreads) {
                const int tile = first_tile + part / 32;
                const bool is_tile = tile < tiles;
                copy_async(blocks + stage * kRingTiles * 32 + part, w.block(step, is_tile ? tile : 0, part & 31), is_tile);
            }
        }
        commit_copies();
    };
    LaneScales<T> scales[kTilesPerWarp], next_scales[kTilesPerWarp];
    auto load_scales = [&](LaneScales<T>(&to)[kTilesPerWarp], int step) {
#pragma unroll
        for (int j = 0; j < kTilesPerWarp; j++) {
            to[j].load(w, step, min(first_tile + warp * kTilesPerWarp + j, tiles - 1), lane);
        }
    };

#pragma unroll
    for (int i = 0; i < kRingStages - 1; i++) {
        copy(first_step + i);
    }
    load_scales(next_scales, first_step);
    float acc[kRowTiles][2 * kTilesPerWarp][4] = {};
    for (int step = first_step; step < last_step; step++) {
        wait_copies<kRingStages - 2>();
        __syncthreads();
        copy(step + kRingStages - 1);
#pragma unroll
        for (int j = 0; j < kTilesPerWarp; j++) {
            scales[j] = next_scales[j];
        }
        load_scales(next_scales, min(step + 1, last_step - 1));
        const int stage = step % kRingStages;
        const T* rows = inputs + stage * kRowTiles * 16 * kInputStride;
        uint4 mine[kTilesPerWarp];
#pragma unroll
        for (int j = 0; j < kTilesPerWarp; j++) {
            mine[j] = blocks[stage * kRingTiles * 32 + (warp * kTilesPerWarp + j) * 32 + lane];
        }
        uint32_t a[kRowTiles][4][4];
#pragma unroll
        for (int r = 0; r < kRowTiles; r++) {
            load_inputs<T>(a[r], rows + r * 16 * kInputStride, lane);
        }
#pragma unroll
        for (int s = 0; s < 4; s++) {
#pragma unroll
            for (int j = 0; j < kTilesPerWarp; j++) {
                uint32_t numbers[4];
                dequantize<T>(numbers, word_of(mine[j], s), scales[j]);
                const uint32_t low[2] = {numbers[0], numbers[1]}, high[2] = {numbers[2], numbers[3]};
#pragma unroll
                for (int r = 0; r < kRowTiles; r++) {
                    mma<T>(acc[r][2 * j], a[r][s], low);
                    mma<T>(acc[r][2 * j + 1], a[r][s], high);
                }
            }
        }
    }

    // Element (r, j, e) of this lane: row 16 r + lane / 4 + 8 (e / 2), output 8 j + 2 (lane % 4) + e % 2 of the warp's.
    const int first_output = (first_tile + warp * kTilesPerWarp) * kBlockOutputs + 2 * (lane & 3);
    auto for_pairs = [&](auto use) {
#pragma unroll
        for (int r = 0; r < kRowTiles; r++) {
#pragma unroll
            for (int j = 0; j < 2 * kTilesPerWarp; j++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int row = r * 16 + (lane >> 2) + 8 * half, output = first_output + j * 8;
                    if (row < m && output < w.n) {
                        use(acc[r][j][2 * half], acc[r][j][2 * half + 1], row, output);
                    }
                }
            }
        }
    };
    if (splits > 1) {
        const int64_t size = int64_t{kMostRows} * w.n;
        for_pairs([&](float& low, float& high, int row, int output) {
            float* to = sums + blockIdx.y * size + int64_t{row} * w.n + output;
            *reinterpret_cast<float2*>(to) = make_float2(low, high);
        });
        PAGED_SHARED(int, is_last, 1);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last[0] = atomicAdd(arrived + blockIdx.x, 1u) == static_cast<unsigned>(splits - 1);
        }
        __syncthreads();
        if (!is_last[0]) {
            return;
        }
        __threadfence();
        for_pairs([&](float& low, float& high, int row, int output) {
            low = high = 0.0f;
            for (int split = 0; split < splits; split++) {
                const float* from = sums + split * size + int64_t{row} * w.n + output;
                const float2 pair = load_fresh(reinterpret_cast<const float2*>(from));
                low += pair.x;
                high += pair.y;
            }
        });
        if (threadIdx.x == 0) {
            arrived[blockIdx.x] = 0;
        }
    }
    for_pairs([&](float& low, float& high, int row, int output) {
        const float low_bias = w.bias ? Number<T>::to_float(w.bias[output]) : 0.0f;
        const float high_bias = w.bias ? Number<T>::to_float(w.bias[output + 1]) : 0.0f;
        *reinterpret_cast<uint32_t*>(y + int64_t{row} * w.n + output) = Number<T>::pack(low + low_bias, high + high_bias);
    });
}

// ---- more rows

// One warp for a block of 64 inputs x 16 outputs.
template <class T>
__global__ void __launch_bounds__(32) dequantize_kernel(Codes<T> w, T* __restrict__ out) {
    const int lane = threadIdx.x, step = blockIdx.x, tile = blockIdx.y;
    const uint4 words = load_once(w.block(step, tile, lane));
    LaneScales<T> scales;
    scales.load(w, step, tile, lane);
    uint32_t numbers[4][4];
#pragma unroll
    for (int s = 0; s < 4; s++) {
        dequantize<T>(numbers[s], word_of(words, s), scales);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int64_t output = tile * kBlockOutputs + (lane >> 2) + 8 * j;
        auto* to = reinterpret_cast<uint4*>(out + output * w.k + step * kBlockInputs + (lane & 3) * 16);
        to[0] = make_uint4(numbers[0][2 * j], numbers[0][2 * j + 1], numbers[1][2 * j], numbers[1][2 * j + 1]);
        to[1] = make_uint4(numbers[2][2 * j], numbers[2][2 * j + 1], numbers[3][2 * j], numbers[3][2 * j + 1]);
    }
}

constexpr int kColumnThreads = 256;

__global__ void __launch_bounds__(kColumnThreads)
    columns_kernel(uint16_t* __restrict__ out, const uint16_t* __restrict__ x, const int* __restrict__ order, int features) {
    const int at = blockIdx.y * kColumnThreads + threadIdx.x;
    if (at < features) {
        const int64_t row = int64_t{blockIdx.x} * features;
        out[row + at] = x[row + order[at]];
    }
}

// ---- choice of kernels

bool is_possible(const PagedCodes& w) {
    return w.k > 0 && w.n > 0 && w.group > 0 && w.k % kBlockInputs == 0 && w.n % kBlockOutputs == 0 &&
           w.group % 16 == 0 && w.k % w.group == 0;
}

struct Scratch {
    unsigned* arrived;
    float* sums;

    explicit Scratch(void* memory)
        : arrived(static_cast<unsigned*>(memory)), sums(reinterpret_cast<float*>(arrived + kCounters)) {}
};

template <class T, int kRowTiles>
int ring(const PagedCodes& w, T* y, const T* x, int m, const Scratch& scratch, void* stream) {
    static_assert(ring_bytes<kRowTiles>() + kMostStaticShared <= kMostShared);
    const int split_bits = ring_split_bits(w.n, w.k);
    const dim3 grid((w.n + kRingOutputs - 1) / kRingOutputs, 1 << split_bits);
    return launch(
        ring_kernel<T, kRowTiles>, grid, dim3(kRingThreads), ring_bytes<kRowTiles>(), stream, Codes<T>(w), y, x, m,
        split_bits, scratch.sums, scratch.arrived
    );
}

template <class T>
int product(const PagedCodes& w, void* out, const void* in, int m, void* scratch, void* stream) {
    auto* y = static_cast<T*>(out);
    const auto* x = static_cast<const T*>(in);
    if (m <= kFewRows) {
        return launch(few_rows_kernel<T>, dim3(w.n / kBlockOutputs), dim3(32 * kFewWarps), 0, stream, Codes<T>(w), y, x, m);
    }
    switch ((m + 15) / 16) {
        case 1: return ring<T, 1>(w, y, x, m, Scratch(scratch), stream);
        case 2: return ring<T, 2>(w, y, x, m, Scratch(scratch), stream);
        default: return ring<T, 4>(w, y, x, m, Scratch(scratch), stream);
    }
}

template <class T>
int dequantize_all(const PagedCodes& w, void* out, void* stream) {
    const dim3 grid(w.k / kBlockInputs, w.n / kBlockOutputs);
    return launch(dequantize_kernel<T>, grid, dim3(32), 0, stream, Codes<T>(w), static_cast<T*>(out));
}

}  // namespace paged

#define PAGED_EXPORT extern "C" __attribute__((visibility("default")))

PAGED_EXPORT int paged_cuda_w4a16(
    const PagedCodes* w, void* y, const void* x, int32_t m, void* scratch, void* stream
) {
    if (!paged::is_possible(*w) || m > paged::kMostRows) {
        return -1;
    }
    if (m == 0) {
        return 0;
    }
    auto run = w->dtype == 1 ? paged::product<__nv_bfloat16> : paged::product<__half>;
    return run(*w, y, x, m, scratch, stream);
}

PAGED_EXPORT int64_t paged_cuda_w4a16_scratch(const PagedCodes* w) {
    const int splits = 1 << paged::ring_split_bits(w->n, w->k);
    const int64_t sums = splits > 1 ? int64_t{splits} * paged::kMostRows * w->n : 0;
    return paged::kCounters * int64_t{sizeof(unsigned)} + sums * int64_t{sizeof(float)};
}

PAGED_EXPORT int32_t paged_cuda_w4a16_max_rows(void) { return paged::kMostRows; }

PAGED_EXPORT int paged_cuda_w4a16_dequantize(const PagedCodes* w, void* out, void* stream) {
    if (!paged::is_possible(*w)) {
        return -1;
    }
    auto run = w->dtype == 1 ? paged::dequantize_all<__nv_bfloat16> : paged::dequantize_all<__half>;
    return run(*w, out, stream);
}

PAGED_EXPORT int paged_cuda_columns(
    void* out, const void* x, const int32_t* order, int32_t num_rows, int32_t features, void* stream
) {
    if (num_rows == 0) {
        return 0;
    }
    const dim3 grid(num_rows, (features + paged::kColumnThreads - 1) / paged::kColumnThreads);
    return paged::launch(
        paged::columns_kernel, grid, dim3(paged::kColumnThreads), 0, stream, static_cast<uint16_t*>(out),
        static_cast<const uint16_t*>(x), order, features
    );
}
