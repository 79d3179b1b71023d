// Exponential and activations on sixteen floats: polynomials, no library call whose bits could depend on the machine.
// What is rounded to bfloat16 afterwards needs fewer terms.
#pragma once

#include "paged/types.h"
#include "simd.hpp"

namespace paged::PAGED_VARIANT {

// exp(x) to about 1 ulp; 0 below -87.3 and infinity above 88.3. Constants: Cephes expf, minimax on [-ln2/2, ln2/2].
PAGED_INLINE F16 exp(F16 x) {
    const F16 low = set1(-87.33f), high = set1(88.3f);
    // In this order of operands a NaN comes through.
    F16 inside = min(high, max(low, x));
    const F16 magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    F16 n = fma(inside, set1(1.44269504088896341f), magic) - magic;
    F16 r = fma(n, set1(-0.693359375f), inside);
    r = fma(n, set1(2.12194440e-4f), r);
    F16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r) + set1(1.0f);
    F16 result = where_less(high, x, set1(INFINITY), scale_by_power(p, n));
    return where_less(x, low, zero(), result);
}

// exp(x) to 3e-6, for results that are rounded to bfloat16; 0 and infinity as above.
PAGED_INLINE F16 exp_coarse(F16 x) {
    const F16 scaled = x * set1(1.44269504088896341f);
#if defined(PAGED_SIMD_AVX512)
    const F16 n = {_mm512_roundscale_ps(scaled.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    const F16 f = scaled - n;
#else
    const F16 low = set1(-126.0f), high = set1(127.0f), magic = set1(12582912.0f);
    const F16 inside = min(high, max(low, scaled));
    const F16 n = (inside + magic) - magic;
    const F16 f = inside - n;
#endif
    // 2^f on [-1/2, 1/2], minimax.
    F16 p = fma(set1(9.57010177e-3f), f, set1(5.59178621e-2f));
    p = fma(p, f, set1(2.40247448e-1f));
    p = fma(p, f, set1(6.93121815e-1f));
    p = fma(p, f, set1(9.99999261e-1f));
#if defined(PAGED_SIMD_AVX512)
    return {_mm512_scalef_ps(p.v, n.v)};
#else
    const F16 result = where_less(high, scaled, set1(INFINITY), scale_by_power(p, n));
    return where_less(scaled, low, zero(), result);
#endif
}

// As exact as results of T can tell.
template <class T>
PAGED_INLINE F16 exp_for(F16 x) {
    return sizeof(T) == 4 ? exp(x) : exp_coarse(x);
}

template <class T>
PAGED_INLINE F16 sigmoid(F16 x) {
    const F16 sum = set1(1.0f) + exp_for<T>(zero() - x);
#if defined(PAGED_SIMD_AVX512)
    if constexpr (sizeof(T) == 2) {
        return {_mm512_rcp14_ps(sum.v)};
    }
#endif
    return set1(1.0f) / sum;
}

template <class T>
PAGED_INLINE F16 gelu_tanh(F16 x) {
    // 0.5 * (1 + tanh(y)) is sigmoid(2 y).
    const F16 cubic = fma(x * x * x, set1(0.044715f), x);
    return x * sigmoid<T>(cubic * set1(1.5957691216057308f));
}

inline F16 gelu_erf(F16 x) {
    alignas(64) float lanes[16];
    store(lanes, x);
    for (float& lane : lanes) {
        lane = 0.5f * lane * (1.0f + std::erf(lane * 0.70710678118654752f));
    }
    return load(lanes);
}

template <class T>
PAGED_INLINE F16 activate(F16 x, int activation) {
    if (activation == PAGED_SILU) {
        return x * sigmoid<T>(x);
    }
    return activation == PAGED_GELU ? gelu_erf(x) : gelu_tanh<T>(x);
}

}  // namespace paged::PAGED_VARIANT
