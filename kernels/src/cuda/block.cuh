// A block of threads that works on one row of logits: reductions in one order, whatever the row and its company.
#pragma once
#include <climits>
#include <cmath>

#include "device.cuh"

namespace paged {

constexpr int kRowThreads = 512;
constexpr int kRowWarps = kRowThreads / 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

// A token by what it is ranked by: greatest first, ties to the lowest id. `value` is its logit.
struct Scored {
    double score;
    double value;
    int id;

    PAGED_DEVICE static Scored none() { return {-INFINITY, -INFINITY, INT_MAX}; }
    PAGED_DEVICE bool is_before(const Scored& other) const {
        return score > other.score || (score == other.score && id < other.id);
    }
    PAGED_DEVICE void offer(const Scored& other) {
        if (other.is_before(*this)) {
            *this = other;
        }
    }
};

template <class T>
PAGED_DEVICE T from_lane(T value, int distance) {
    return __shfl_xor_sync(kWholeWarp, value, distance);
}
PAGED_DEVICE Scored from_lane(const Scored& scored, int distance) {
    return {from_lane(scored.score, distance), from_lane(scored.value, distance), from_lane(scored.id, distance)};
}

// The same for every thread: lanes by halving distance, then warps in order. `combine` is commutative.
template <class T, class F>
PAGED_DEVICE T block_reduce(T value, F combine) {
    PAGED_SHARED(T, of_warp, kRowWarps);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value = combine(value, from_lane(value, distance));
    }
    if ((threadIdx.x & 31) == 0) {
        of_warp[threadIdx.x >> 5] = value;
    }
    __syncthreads();
    T all = of_warp[0];
#pragma unroll 1
    for (int warp = 1; warp < kRowWarps; warp++) {
        all = combine(all, of_warp[warp]);
    }
    __syncthreads();
    return all;
}

template <class T>
PAGED_DEVICE T block_sum(T value) {
    return block_reduce(value, [](T a, T b) { return a + b; });
}
template <class T>
PAGED_DEVICE T block_least(T value) {
    return block_reduce(value, [](T a, T b) { return b < a ? b : a; });
}
PAGED_DEVICE Scored block_best(const Scored& scored) {
    return block_reduce(scored, [](const Scored& a, const Scored& b) { return b.is_before(a) ? b : a; });
}

// Sum of the values of all threads before this one.
PAGED_DEVICE int sum_before(int value) {
    PAGED_SHARED(int, of_warp, kRowWarps);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int sum = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(kWholeWarp, sum, distance);
        sum += lane >= distance ? other : 0;
    }
    if (lane == 31) {
        of_warp[warp] = sum;
    }
    __syncthreads();
    int before = 0;
    for (int other = 0; other < warp; other++) {
        before += of_warp[other];
    }
    __syncthreads();
    return before + sum - value;
}

// A sum of floats that keeps what rounding drops (Kahan, "Further remarks on reducing truncation errors", 1965).
struct Sum {
    float sum = 0.0f;
    float rest = 0.0f;

    PAGED_DEVICE void add(float value) {
        const float part = value - rest, next = sum + part;
        rest = (next - sum) - part;
        sum = next;
    }
};

}  // namespace paged
