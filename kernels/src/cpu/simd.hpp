// Sixteen floats, whatever the machine: one AVX-512 register, two of AVX2, four of NEON or plain SSE.
//
// PAGED_SIMD_* is set by the build, once per variant library, and everything lives in that variant's own namespace, so
// that no two libraries can ever share a function by name. Sixteen lanes everywhere means one packed layout, and sums
// over lanes in one order. `fma` is fused where the variant has it (all but portable) and nowhere else: contraction
// by the compiler is off.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(PAGED_SIMD_AVX512) || defined(PAGED_SIMD_AVX2)
#include <immintrin.h>
#elif defined(PAGED_SIMD_NEON)
#include <arm_neon.h>
#elif !defined(PAGED_SIMD_PORTABLE)
#error "the build sets PAGED_SIMD_AVX512, PAGED_SIMD_AVX2, PAGED_SIMD_NEON or PAGED_SIMD_PORTABLE"
#endif

#define PAGED_INLINE inline __attribute__((always_inline))
// An inner loop of its own, so that all registers are its own.
#define PAGED_OUTLINE inline __attribute__((noinline))

namespace paged::PAGED_VARIANT {

struct bf16 {
    uint16_t bits;
};

PAGED_INLINE float to_float(float x) { return x; }

PAGED_INLINE float to_float(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// To nearest, ties to even; a NaN stays one.
PAGED_INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return {0x7fc0};
    }
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}

template <class T>
PAGED_INLINE T from_float(float x) {
    if constexpr (sizeof(T) == 4) {
        return x;
    } else {
        return to_bf16(x);
    }
}

// Calls f(0), f(1), ... with compile-time indices: arrays indexed by them stay in registers.
template <int N, class F>
PAGED_INLINE void unroll(F&& f) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}

#if defined(PAGED_SIMD_AVX512)

struct F16 {
    __m512 v;
};

PAGED_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

PAGED_INLINE F16 zero() { return {_mm512_setzero_ps()}; }
PAGED_INLINE F16 set1(float x) { return {_mm512_set1_ps(x)}; }
PAGED_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
PAGED_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
PAGED_INLINE F16 load_first(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
PAGED_INLINE void store_first(float* p, F16 a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
PAGED_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PAGED_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PAGED_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PAGED_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
PAGED_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PAGED_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
PAGED_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// a < b ? x : y
PAGED_INLINE F16 where_less(F16 a, F16 b, F16 x, F16 y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// a * 2^n for whole n whose sum with a's exponent stays normal.
PAGED_INLINE F16 scale_by_power(F16 a, F16 n) {
    __m512i shift = _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), shift))};
}

PAGED_INLINE F16 widen(__m256i bits) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
PAGED_INLINE __m256i narrow(F16 a) {
#if defined(PAGED_HAS_BF16)
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
#else
    __m512i bits = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
PAGED_INLINE F16 load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
PAGED_INLINE void store(bf16* p, F16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
PAGED_INLINE F16 load_first(const bf16* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
PAGED_INLINE void store_first(bf16* p, F16 a, int64_t n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(a)); }
// The first and the second elements of sixteen pairs.
PAGED_INLINE F16 load_pairs_first(const bf16* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
PAGED_INLINE F16 load_pairs_second(const bf16* p) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), upper))};
}

#else

#if defined(PAGED_SIMD_AVX2)
using Part = __m256;
#elif defined(PAGED_SIMD_NEON)
using Part = float32x4_t;
#else
typedef float Part __attribute__((vector_size(16)));
#endif

constexpr int LANES = sizeof(Part) / 4;
constexpr int PARTS = 16 / LANES;
typedef uint32_t Words __attribute__((vector_size(sizeof(Part))));
typedef int32_t Ints __attribute__((vector_size(sizeof(Part))));

struct F16 {
    Part v[PARTS];
};

template <class F>
PAGED_INLINE F16 per_part(F&& f) {
    F16 out;
    unroll<PARTS>([&](auto i) { out.v[i] = f(i); });
    return out;
}

PAGED_INLINE F16 zero() {
    return per_part([](int) { return Part{}; });
}
PAGED_INLINE F16 set1(float x) {
    return per_part([&](int) { return x - Part{}; });
}
// Part by part: copied as a whole, a value would live in memory instead of registers.
PAGED_INLINE F16 load(const float* p) {
    return per_part([&](int i) {
        Part part;
        std::memcpy(&part, p + i * LANES, sizeof(part));
        return part;
    });
}
PAGED_INLINE void store(float* p, F16 a) {
    unroll<PARTS>([&](auto i) { std::memcpy(p + i * LANES, &a.v[i], sizeof(Part)); });
}
PAGED_INLINE F16 load_first(const float* p, int64_t n) {
    F16 out = zero();
    std::memcpy(&out, p, static_cast<size_t>(n) * 4);
    return out;
}
PAGED_INLINE void store_first(float* p, F16 a, int64_t n) { std::memcpy(p, &a, static_cast<size_t>(n) * 4); }
PAGED_INLINE F16 operator+(F16 a, F16 b) {
    return per_part([&](auto i) { return a.v[i] + b.v[i]; });
}
PAGED_INLINE F16 operator-(F16 a, F16 b) {
    return per_part([&](auto i) { return a.v[i] - b.v[i]; });
}
PAGED_INLINE F16 operator*(F16 a, F16 b) {
    return per_part([&](auto i) { return a.v[i] * b.v[i]; });
}
PAGED_INLINE F16 operator/(F16 a, F16 b) {
    return per_part([&](auto i) { return a.v[i] / b.v[i]; });
}
PAGED_INLINE F16 fma(F16 a, F16 b, F16 c) {
#if defined(PAGED_SIMD_AVX2)
    return per_part([&](auto i) { return _mm256_fmadd_ps(a.v[i], b.v[i], c.v[i]); });
#elif defined(PAGED_SIMD_NEON)
    return per_part([&](auto i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
#else
    return a * b + c;
#endif
}
PAGED_INLINE F16 where_less(F16 a, F16 b, F16 x, F16 y) {
    return per_part([&](auto i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
}
PAGED_INLINE F16 max(F16 a, F16 b) { return where_less(b, a, a, b); }
PAGED_INLINE F16 min(F16 a, F16 b) { return where_less(a, b, a, b); }
PAGED_INLINE F16 scale_by_power(F16 a, F16 n) {
    return per_part([&](auto i) {
        Ints shift = __builtin_convertvector(n.v[i], Ints) << 23;
        return reinterpret_cast<Part>(reinterpret_cast<Ints>(a.v[i]) + shift);
    });
}

PAGED_INLINE F16 load(const bf16* p) {
    typedef uint16_t Half __attribute__((vector_size(sizeof(Part) / 2)));
    return per_part([&](int i) {
        Half half;
        std::memcpy(&half, p + i * LANES, sizeof(half));
        return reinterpret_cast<Part>(__builtin_convertvector(half, Words) << 16);
    });
}
PAGED_INLINE void store(bf16* p, F16 a) {
    typedef uint16_t Half __attribute__((vector_size(sizeof(Part) / 2)));
    unroll<PARTS>([&](auto i) {
        Words bits = reinterpret_cast<Words>(a.v[i]);
        Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
        Words nan = reinterpret_cast<Words>((bits & 0x7fffffffu) > 0x7f800000u);
        rounded = (rounded & ~nan) | (0x7fc0u & nan);
        Half half = __builtin_convertvector(rounded, Half);
        std::memcpy(p + i * LANES, &half, sizeof(half));
    });
}
PAGED_INLINE F16 load_first(const bf16* p, int64_t n) {
    bf16 padded[16] = {};
    std::memcpy(padded, p, static_cast<size_t>(n) * 2);
    return load(padded);
}
PAGED_INLINE void store_first(bf16* p, F16 a, int64_t n) {
    bf16 all[16];
    store(all, a);
    std::memcpy(p, all, static_cast<size_t>(n) * 2);
}
PAGED_INLINE F16 load_pairs_first(const bf16* p) {
    return per_part([&](int i) {
        Words bits;
        std::memcpy(&bits, p + 2 * LANES * i, sizeof(bits));
        return reinterpret_cast<Part>(bits << 16);
    });
}
PAGED_INLINE F16 load_pairs_second(const bf16* p) {
    return per_part([&](int i) {
        Words bits;
        std::memcpy(&bits, p + 2 * LANES * i, sizeof(bits));
        return reinterpret_cast<Part>(bits & 0xffff0000u);
    });
}

#endif

// Halves, quarters, ... of the lanes onto each other: one tree for sums and maxima, the same in every variant.
template <class F>
PAGED_INLINE float fold_lanes(F16 a, F&& f) {
#if defined(PAGED_SIMD_PORTABLE) || defined(PAGED_SIMD_NEON)
    Part eight[2] = {f(a.v[0], a.v[2]), f(a.v[1], a.v[3])};
    Part four = f(eight[0], eight[1]);
    const Part upper = {four[2], four[3], four[2], four[3]};
    four = f(four, upper);
    const Part second = {four[1], four[1], four[1], four[1]};
    return f(four, second)[0];
#else
#if defined(PAGED_SIMD_AVX512)
    const __m256 eight = f(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
    const __m256 eight = f(a.v[0], a.v[1]);
#endif
    __m128 four = f(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = f(four, _mm_movehl_ps(four, four));
    return f(four, _mm_shuffle_ps(four, four, 1))[0];
#endif
}

PAGED_INLINE float sum_lanes(F16 a) {
    return fold_lanes(a, [](auto x, auto y) { return x + y; });
}

PAGED_INLINE float max_lanes(F16 a) {
    return fold_lanes(a, [](auto x, auto y) { return x > y ? x : y; });
}

// Calls f(offset, n) for n = 16 lanes at a time and once for the rest; n is a constant 16 in all but the last call.
template <class F>
PAGED_INLINE void for_lanes(int64_t count, F&& f) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        f(i, std::integral_constant<int, 16>{});
    }
    if (i < count) {
        f(i, static_cast<int>(count - i));
    }
}

template <class T>
PAGED_INLINE F16 load_some(const T* p, std::integral_constant<int, 16>) {
    return load(p);
}
template <class T>
PAGED_INLINE F16 load_some(const T* p, int n) {
    return load_first(p, n);
}
template <class T>
PAGED_INLINE void store_some(T* p, F16 a, std::integral_constant<int, 16>) {
    store(p, a);
}
template <class T>
PAGED_INLINE void store_some(T* p, F16 a, int n) {
    store_first(p, a, n);
}

}  // namespace paged::PAGED_VARIANT
