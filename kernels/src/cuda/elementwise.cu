// The ops between the matrix products: gather of rows, RMS norm with residual, gated activations, RoPE with the write of
// keys and values. Each row is computed by itself in one order, 16 bytes to a load; they are bound by bandwidth.
#include "elementwise.h"

#include "numeric.cuh"

namespace paged {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 256;

// ---- rows

__global__ void __launch_bounds__(kThreads)
    rows_kernel(uint4* __restrict__ out, const uint4* __restrict__ table, const int64_t* __restrict__ ids, int parts) {
    const int64_t from = ids[blockIdx.x] * parts, to = int64_t{blockIdx.x} * parts;
    for (int part = threadIdx.x; part < parts; part += kThreads) {
        out[to + part] = table[from + part];
    }
}

// ---- RMS norm

// The sum over the block, for every thread; lanes by halving distance, then warps in order.
PAGED_DEVICE float block_sum(float value) {
    PAGED_SHARED(float, of_warp, kThreads / 32);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(kAllLanes, value, distance);
    }
    if ((threadIdx.x & 31) == 0) {
        of_warp[threadIdx.x >> 5] = value;
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; warp++) {
        sum += of_warp[warp];
    }
    return sum;
}

template <class T, bool kAdds>
__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(T* out, T* sum, const T* x, const T* residual, const T* __restrict__ weight, int features, float eps) {
    const int64_t row = int64_t{blockIdx.x} * features;
    float squares = 0.0f;
    for (int at = threadIdx.x * 8; at < features; at += kThreads * 8) {
        Eight<T> values = Eight<T>::load(x + row + at);
        if constexpr (kAdds) {
            const Eight<T> other = Eight<T>::load(residual + row + at);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                values.value[i] += other.value[i];
            }
            values.store(sum + row + at);
            values = Eight<T>::load(sum + row + at);  // as it was rounded
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            squares = fmaf(values.value[i], values.value[i], squares);
        }
    }
    const float scale = rsqrtf(block_sum(squares) / static_cast<float>(features) + eps);
    for (int at = threadIdx.x * 8; at < features; at += kThreads * 8) {
        Eight<T> values = Eight<T>::load((kAdds ? sum : x) + row + at);
        const Eight<T> weights = Eight<T>::load(weight + at);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            values.value[i] = values.value[i] * scale * weights.value[i];
        }
        values.store(out + row + at);
    }
}

// ---- gated activations

enum class Activation : int { kSilu, kGelu, kGeluTanh };

template <Activation kActivation>
PAGED_DEVICE float activate(float x) {
    if constexpr (kActivation == Activation::kSilu) {
        return x / (1.0f + expf(-x));
    } else if constexpr (kActivation == Activation::kGelu) {
        return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    } else {
        return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    }
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(kThreads)
    gated_kernel(T* __restrict__ out, const T* __restrict__ gate_up, int features) {
    const int at = (blockIdx.y * kThreads + threadIdx.x) * 8;
    if (at >= features) {
        return;
    }
    const T* gate = gate_up + int64_t{blockIdx.x} * 2 * features + at;
    Eight<T> values = Eight<T>::load(gate);
    const Eight<T> factors = Eight<T>::load(gate + features);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        values.value[i] = activate<kActivation>(values.value[i]) * factors.value[i];
    }
    values.store(out + int64_t{blockIdx.x} * features + at);
}

template <class T>
__global__ void __launch_bounds__(kThreads) add_kernel(T* out, const T* x, const T* y, int64_t parts) {
    const int64_t part = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (part >= parts) {
        return;
    }
    Eight<T> values = Eight<T>::load(x + part * 8);
    const Eight<T> others = Eight<T>::load(y + part * 8);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        values.value[i] += others.value[i];
    }
    values.store(out + part * 8);
}

// ---- RoPE and the cache

template <class T>
struct Rope {
    const T* qkv;
    const float* cos;
    const float* sin;
    const int64_t* positions;
    const int64_t* slots;
    const T* q_norm;
    const T* k_norm;
    T* q;
    T* keys;
    T* values;
    Divisor block_size;
    int num_heads;
    int num_kv_heads;
    float eps;

    // Elements from the cache's start to the row of a slot and key-value head.
    template <int D>
    PAGED_DEVICE int64_t cache_row(int64_t slot, int head) const {
        const auto at = static_cast<uint32_t>(slot);
        const uint32_t block = block_size.divide(at), in_block = at - block * block_size.divisor;
        return ((int64_t{block} * num_kv_heads + head) * block_size.divisor + in_block) * D;
    }
};

// RMS norm of a head that `kLanes` lanes hold, 8 elements of each half to a lane; lanes past the head hold zeros.
template <class T, int D, int kLanes>
PAGED_DEVICE void norm_head(Eight<T>& low, Eight<T>& high, const T* weight, int at, bool is_inside, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        squares = fmaf(low.value[i], low.value[i], squares);
        squares = fmaf(high.value[i], high.value[i], squares);
    }
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        squares += __shfl_xor_sync(kAllLanes, squares, distance);
    }
    const float scale = rsqrtf(squares / static_cast<float>(D) + eps);
    const Eight<T> low_weight = Eight<T>::load(weight + (is_inside ? at : 0));
    const Eight<T> high_weight = Eight<T>::load(weight + (is_inside ? at + D / 2 : 0));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        low.value[i] = low.value[i] * scale * low_weight.value[i];
        high.value[i] = high.value[i] * scale * high_weight.value[i];
    }
}

template <class T>
PAGED_DEVICE void rotate(Eight<T>& low, Eight<T>& high, const float* cos, const float* sin) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float before = low.value[i];
        low.value[i] = __fmul_rn(before, cos[i]) - __fmul_rn(high.value[i], sin[i]);
        high.value[i] = __fmul_rn(high.value[i], cos[i]) + __fmul_rn(before, sin[i]);
    }
}

// Grid (rows, groups of heads); several heads to a warp. Heads are counted q, then k, then v, as they lie in a row.
template <class T, int D, bool kNorms>
__global__ void __launch_bounds__(kThreads) rope_kernel(Rope<T> a) {
    constexpr int kParts = D / 16;
    constexpr int kLanes = kParts <= 4 ? 4 : kParts <= 8 ? 8 : 16;
    constexpr int kHeads = kThreads / kLanes;
    const int64_t row = blockIdx.x;
    const int head = blockIdx.y * kHeads + static_cast<int>(threadIdx.x) / kLanes;
    const int part = threadIdx.x % kLanes, at = part * 8, num_rotated = a.num_heads + a.num_kv_heads;
    const int num_all = num_rotated + a.num_kv_heads;
    const bool is_inside = head < num_all && part < kParts;
    Eight<T> low{}, high{};
    if (is_inside) {
        const T* from = a.qkv + (row * num_all + head) * D + at;
        low = Eight<T>::load(from);
        high = Eight<T>::load(from + D / 2);
    }
    if (kNorms && static_cast<int>(blockIdx.y) * kHeads < num_rotated) {  // the same for the whole block: lanes meet in the norm
        Eight<T> normed_low = low, normed_high = high;
        const T* weight = head < a.num_heads ? a.q_norm : a.k_norm;
        norm_head<T, D, kLanes>(normed_low, normed_high, weight, at, is_inside, a.eps);
        if (head < num_rotated) {
            low = normed_low;
            high = normed_high;
        }
    }
    if (!is_inside) {
        return;
    }
    if (head < num_rotated) {
        const int64_t angle = a.positions[row] * (D / 2) + at;
        rotate(low, high, a.cos + angle, a.sin + angle);
    }
    T* to;
    if (head < a.num_heads) {
        to = a.q + (row * a.num_heads + head) * D;
    } else if (head < num_rotated) {
        to = a.keys + a.template cache_row<D>(a.slots[row], head - a.num_heads);
    } else {
        to = a.values + a.template cache_row<D>(a.slots[row], head - num_rotated);
    }
    low.store(to + at);
    high.store(to + at + D / 2);
}

template <class T, int D>
int rope(const PagedRope& p, void* stream) {
    constexpr int kParts = D / 16;
    constexpr int kHeads = kThreads / (kParts <= 4 ? 4 : kParts <= 8 ? 8 : 16);
    const Rope<T> a{
        static_cast<const T*>(p.qkv), p.cos, p.sin, p.positions, p.slots, static_cast<const T*>(p.q_norm),
        static_cast<const T*>(p.k_norm), static_cast<T*>(p.q), static_cast<T*>(p.keys), static_cast<T*>(p.values),
        Divisor::of(static_cast<uint32_t>(p.block_size)), p.num_heads, p.num_kv_heads, p.eps
    };
    const dim3 grid(p.num_rows, (p.num_heads + 2 * p.num_kv_heads + kHeads - 1) / kHeads);
    return p.q_norm ? launch(rope_kernel<T, D, true>, grid, dim3(kThreads), 0, stream, a)
                    : launch(rope_kernel<T, D, false>, grid, dim3(kThreads), 0, stream, a);
}

template <class T>
int rope(const PagedRope& p, void* stream) {
    switch (p.head_dim) {
        case 64: return rope<T, 64>(p, stream);
        case 80: return rope<T, 80>(p, stream);
        case 96: return rope<T, 96>(p, stream);
        case 128: return rope<T, 128>(p, stream);
        case 256: return rope<T, 256>(p, stream);
        default: return -1;
    }
}

template <class T>
int rms_norm(
    void* out, void* sum, const void* x, const void* residual, const void* weight, int num_rows, int features, float eps,
    void* stream
) {
    auto run = [&](auto kernel) {
        return launch(
            kernel, dim3(num_rows), dim3(kThreads), 0, stream, static_cast<T*>(out), static_cast<T*>(sum),
            static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight), features, eps
        );
    };
    return residual ? run(rms_norm_kernel<T, true>) : run(rms_norm_kernel<T, false>);
}

template <class T>
int gated(void* out, const void* gate_up, int num_rows, int features, int activation, void* stream) {
    auto run = [&](auto kernel) {
        const dim3 grid(num_rows, (features / 8 + kThreads - 1) / kThreads);
        return launch(
            kernel, grid, dim3(kThreads), 0, stream, static_cast<T*>(out), static_cast<const T*>(gate_up), features
        );
    };
    switch (static_cast<Activation>(activation)) {
        case Activation::kSilu: return run(gated_kernel<T, Activation::kSilu>);
        case Activation::kGelu: return run(gated_kernel<T, Activation::kGelu>);
        case Activation::kGeluTanh: return run(gated_kernel<T, Activation::kGeluTanh>);
    }
    return -1;
}

}  // namespace paged

#define PAGED_EXPORT extern "C" __attribute__((visibility("default")))

PAGED_EXPORT int paged_cuda_rows(
    void* out, const void* table, const int64_t* ids, int32_t num_rows, int32_t features, int32_t, void* stream
) {
    if (features % 8) {
        return -1;
    }
    if (num_rows == 0) {
        return 0;
    }
    return paged::launch(
        paged::rows_kernel, dim3(num_rows), dim3(paged::kThreads), 0, stream, static_cast<uint4*>(out),
        static_cast<const uint4*>(table), ids, features / 8
    );
}

PAGED_EXPORT int paged_cuda_rms_norm(
    void* out, void* sum, const void* x, const void* residual, const void* weight, int32_t num_rows, int32_t features,
    float eps, int32_t dtype, void* stream
) {
    if (features % 8) {
        return -1;
    }
    if (num_rows == 0) {
        return 0;
    }
    auto run = dtype == 1 ? paged::rms_norm<__nv_bfloat16> : paged::rms_norm<__half>;
    return run(out, sum, x, residual, weight, num_rows, features, eps, stream);
}

PAGED_EXPORT int paged_cuda_gated(
    void* out, const void* gate_up, int32_t num_rows, int32_t features, int32_t activation, int32_t dtype, void* stream
) {
    if (features % 8) {
        return -1;
    }
    if (num_rows == 0) {
        return 0;
    }
    auto run = dtype == 1 ? paged::gated<__nv_bfloat16> : paged::gated<__half>;
    return run(out, gate_up, num_rows, features, activation, stream);
}

PAGED_EXPORT int paged_cuda_add(
    void* out, const void* x, const void* y, int64_t elements, int32_t dtype, void* stream
) {
    if (elements % 8) {
        return -1;
    }
    if (elements == 0) {
        return 0;
    }
    auto run = [&]<class T>() {
        const int64_t parts = elements / 8;
        const dim3 grid(static_cast<unsigned>((parts + paged::kThreads - 1) / paged::kThreads));
        return paged::launch(
            paged::add_kernel<T>, grid, dim3(paged::kThreads), 0, stream, static_cast<T*>(out), static_cast<const T*>(x),
            static_cast<const T*>(y), parts
        );
    };
    return dtype == 1 ? run.template operator()<__nv_bfloat16>() : run.template operator()<__half>();
}

PAGED_EXPORT int paged_cuda_rope_kv_write(const PagedRope* a, void* stream) {
    const bool is_possible = a->block_size >= 1 && a->num_heads > 0 && a->num_kv_heads > 0 && !a->q_norm == !a->k_norm;
    if (!is_possible) {
        return -1;
    }
    if (a->num_rows == 0) {
        return 0;
    }
    return a->dtype == 1 ? paged::rope<__nv_bfloat16>(*a, stream) : paged::rope<__half>(*a, stream);
}
