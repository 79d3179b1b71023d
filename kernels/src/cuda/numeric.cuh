// The two 16-bit formats under one name: pairs in a word, conversions rounded to nearest even, and the constants by
// which a 4-bit code becomes a number without a conversion.
#pragma once
#include "device.cuh"

namespace paged {

template <class T>
struct Number;

// A code c under the bits of `kMagic` is the number kBias + c exactly.
template <>
struct Number<__half> {
    using Pair = __half2;
    static constexpr uint32_t kMagic = 0x64006400u;
    static constexpr float kBias = 1024.0f;

    static PAGED_DEVICE float2 unpack(uint32_t word) {
        __half2 pair;
        memcpy(&pair, &word, 4);
        return __half22float2(pair);
    }
    static PAGED_DEVICE uint32_t pack(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        uint32_t word;
        memcpy(&word, &pair, 4);
        return word;
    }
    static PAGED_DEVICE float to_float(__half value) { return __half2float(value); }
    static PAGED_DEVICE __half from_float(float value) { return __float2half_rn(value); }
};

template <>
struct Number<__nv_bfloat16> {
    using Pair = __nv_bfloat162;
    static constexpr uint32_t kMagic = 0x43004300u;
    static constexpr float kBias = 128.0f;

    static PAGED_DEVICE float2 unpack(uint32_t word) {
        const uint32_t low = word << 16, high = word & 0xffff0000u;
        float2 pair;
        memcpy(&pair.x, &low, 4);
        memcpy(&pair.y, &high, 4);
        return pair;
    }
    static PAGED_DEVICE uint32_t pack(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        uint32_t word;
        memcpy(&word, &pair, 4);
        return word;
    }
    static PAGED_DEVICE float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
    static PAGED_DEVICE __nv_bfloat16 from_float(float value) { return __float2bfloat16_rn(value); }
};

// Eight elements of 16 bits as they lie in 16 bytes.
template <class T>
struct Eight {
    float value[8];

    static PAGED_DEVICE Eight of(uint4 words) {
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
        Eight eight;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = Number<T>::unpack(word[i]);
            eight.value[2 * i] = pair.x;
            eight.value[2 * i + 1] = pair.y;
        }
        return eight;
    }
    static PAGED_DEVICE Eight load(const T* address) { return of(*reinterpret_cast<const uint4*>(address)); }
    PAGED_DEVICE void store(T* address) const {
        uint4 words;
        words.x = Number<T>::pack(value[0], value[1]);
        words.y = Number<T>::pack(value[2], value[3]);
        words.z = Number<T>::pack(value[4], value[5]);
        words.w = Number<T>::pack(value[6], value[7]);
        *reinterpret_cast<uint4*>(address) = words;
    }
};

// Division of a position by a block size that the host knows: floor(n / d) for n < 2^31 (Granlund and Montgomery,
// "Division by invariant integers using multiplication", PLDI 1994).
struct Divisor {
    uint32_t divisor;
    uint32_t multiplier;
    uint32_t shift;

    static Divisor of(uint32_t divisor) {
        uint32_t shift = 0;
        while ((uint64_t{1} << shift) < divisor) {
            shift++;
        }
        const uint64_t multiplier = ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1;
        return {divisor, static_cast<uint32_t>(multiplier), shift};
    }
    PAGED_DEVICE uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

}  // namespace paged
