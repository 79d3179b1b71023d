// CUDA C++ for g++: the words, built-in variables and functions that the kernels use, on top of runtime.h. Included by
// device.cuh when PAGED_EMULATE is defined; needs the toolkit's headers of types only. Collectives are real: lanes wait
// for each other, and lanes that meet at different places are an error.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include "runtime.h"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __forceinline__
#define __global__ static
#define __device__
#define __host__
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))

#define threadIdx (emulation::current->thread)
#define blockIdx (emulation::current->block)
#define blockDim (emulation::current->block_size)
#define gridDim (emulation::current->grid_size)

// Where a collective stands in the kernel, taken from its caller.
#define EMULATION_SITE int line = __builtin_LINE(), const char *file = __builtin_FILE()
#define EMULATION_HERE \
    emulation::Site { line, file }

// ---- barriers

inline void __syncthreads(EMULATION_SITE) { emulation::sync_block(EMULATION_HERE); }
inline int __syncthreads_count(int predicate, EMULATION_SITE) {
    return emulation::vote_block(predicate != 0, emulation::Vote::kCount, EMULATION_HERE);
}
inline int __syncthreads_and(int predicate, EMULATION_SITE) {
    return emulation::vote_block(predicate != 0, emulation::Vote::kAll, EMULATION_HERE);
}
inline int __syncthreads_or(int predicate, EMULATION_SITE) {
    return emulation::vote_block(predicate != 0, emulation::Vote::kAny, EMULATION_HERE);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATION_SITE) { emulation::sync_warp(mask, EMULATION_HERE); }
// Blocks run one after the other, so memory is in order; for the thread sanitizer atomics order it.
inline void __threadfence() {}

// ---- shuffles, votes

namespace emulation {
template <class T>
__attribute__((no_sanitize("thread"))) T
shuffle(unsigned mask, T value, int source, int width, Collective kind, Site site) {
    static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 4 * kWords);
    uint32_t words[sizeof(T) / 4];
    std::memcpy(words, &value, sizeof(T));
    const uint32_t* table = exchange(mask, words, sizeof(T) / 4, kind, site);
    const int first = static_cast<int>(current->lane) & ~(width - 1);
    if (source < first || source >= first + width)
        return value;
    if (!(mask >> source & 1)) {
        fail("a shuffle reads lane %d, which is not in its mask %08x (%s:%d)", source, mask, site.file, site.line);
    }
    std::memcpy(&value, table + source * kWords, sizeof(T));
    return value;
}
}  // namespace emulation

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATION_SITE) {
    const int first = static_cast<int>(emulation::current->lane) & ~(width - 1);
    return emulation::shuffle(mask, value, first + (source & (width - 1)), width, emulation::kShuffle, EMULATION_HERE);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMULATION_SITE) {
    const int source = static_cast<int>(emulation::current->lane) ^ bits;
    return emulation::shuffle(mask, value, source, width, emulation::kShuffleXor, EMULATION_HERE);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATION_SITE) {
    const int source = static_cast<int>(emulation::current->lane + delta);
    return emulation::shuffle(mask, value, source, width, emulation::kShuffleDown, EMULATION_HERE);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATION_SITE) {
    const int source = static_cast<int>(emulation::current->lane) - static_cast<int>(delta);
    return emulation::shuffle(mask, value, source, width, emulation::kShuffleUp, EMULATION_HERE);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATION_SITE) {
    const uint32_t word = predicate != 0;
    const uint32_t* table = emulation::exchange(mask, &word, 1, emulation::kBallot, EMULATION_HERE);
    unsigned result = 0;
    for (int lane = 0; lane < emulation::kLanes; lane++) {
        if ((mask >> lane & 1) && table[lane * emulation::kWords])
            result |= 1u << lane;
    }
    return result;
}
inline int __any_sync(unsigned mask, int predicate, EMULATION_SITE) {
    return __ballot_sync(mask, predicate, line, file) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATION_SITE) {
    return __ballot_sync(mask, predicate, line, file) == mask;
}

// ---- atomics

template <class T>
T atomicAdd(T* address, T value) {
    if constexpr (std::is_floating_point_v<T>) {
        using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
        auto* bits = reinterpret_cast<Bits*>(address);
        Bits old = __atomic_load_n(bits, __ATOMIC_ACQUIRE), sum_bits;
        T before;
        do {
            std::memcpy(&before, &old, sizeof(T));
            const T sum = before + value;
            std::memcpy(&sum_bits, &sum, sizeof(T));
        } while (!__atomic_compare_exchange_n(bits, &old, sum_bits, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
        return before;
    } else {
        return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
    }
}
template <class T>
T atomicExch(T* address, T value) {
    return __atomic_exchange_n(address, value, __ATOMIC_ACQ_REL);
}
template <class T>
T atomicOr(T* address, T value) {
    return __atomic_fetch_or(address, value, __ATOMIC_ACQ_REL);
}
template <class T>
T atomicMax(T* address, T value) {
    T old = __atomic_load_n(address, __ATOMIC_ACQUIRE);
    while (old < value &&
           !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    }
    return old;
}

// ---- arithmetic

template <class T>
T __ldg(const T* address) {
    return *address;
}
inline float __expf(float x) { return expf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __double2float_rd(double x) {
    const float near = static_cast<float>(x);
    return static_cast<double>(near) > x ? nextafterf(near, -INFINITY) : near;
}
inline float __double2float_ru(double x) { return -__double2float_rd(-x); }
namespace emulation {
template <class To, class From>
To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}
}  // namespace emulation
inline float __int_as_float(int bits) { return emulation::same_bits<float>(bits); }
inline int __float_as_int(float value) { return emulation::same_bits<int>(value); }
inline float __uint_as_float(unsigned bits) { return emulation::same_bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return emulation::same_bits<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return emulation::same_bits<double>(bits); }
inline long long __double_as_longlong(double value) { return emulation::same_bits<long long>(value); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class T>
T max(T a, T b) {
    return a > b ? a : b;
}
template <class T>
T min(T a, T b) {
    return a < b ? a : b;
}
