// Exponential and activations on sixteen floats: polynomials, no library call whose bits could depend on the machine.
#pragma once

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

PAGED_INLINE F16 sigmoid(F16 x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

PAGED_INLINE F16 gelu_tanh(F16 x) {
    // 0.5 * (1 + tanh(y)) is sigmoid(2 y).
    F16 cubic = fma(x * x * x, set1(0.044715f), x);
    return x * sigmoid(cubic * set1(1.5957691216057308f));
}

PAGED_INLINE F16 gelu_erf(F16 x) {
    alignas(64) float lanes[16];
    store(lanes, x);
    for (float& lane : lanes) {
        lane = 0.5f * lane * (1.0f + std::erf(lane * 0.70710678118654752f));
    }
    return load(lanes);
}

PAGED_INLINE F16 activate(F16 x, int activation) {
    switch (activation) {
        case 0:
            return x * sigmoid(x);
        case 1:
            return gelu_erf(x);
        default:
            return gelu_tanh(x);
    }
}

}  // namespace paged::PAGED_VARIANT
