// Sixteen whole numbers, the codes of packed quantized weights and their products with int8 rows.
//
// A packed line has four bytes for each of sixteen outputs. `dot4` adds the products of a line's bytes with four int8
// numbers, exactly: with VNNI in one instruction; elsewhere in 16-bit halves, which four bits times seven never fill
// (2 * 15 * 127 = 3810), and codes of eight bits as two of four.
#pragma once

#include "paged/quantized.h"
#include "scratch.hpp"
#include "simd.hpp"

namespace paged::PAGED_VARIANT {

#if defined(PAGED_SIMD_AVX512)

struct I16 {
    __m512i v;
};

PAGED_INLINE I16 zero_words() { return {_mm512_setzero_si512()}; }
PAGED_INLINE I16 load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
PAGED_INLINE void store_words(void* p, I16 a) { _mm512_storeu_si512(p, a.v); }
PAGED_INLINE F16 to_floats(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
template <int Shift>
PAGED_INLINE I16 bits_of(I16 a, int mask) {
    return {_mm512_and_si512(_mm512_srli_epi32(a.v, Shift), _mm512_set1_epi32(mask))};
}
PAGED_INLINE F16 load_halves(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
PAGED_INLINE F16 load_bytes(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Bytes below 16 times four int8 numbers.
PAGED_INLINE I16 dot4(I16 sum, I16 line, int32_t x) {
#if defined(PAGED_HAS_VNNI)
    return {_mm512_dpbusd_epi32(sum.v, line.v, _mm512_set1_epi32(x))};
#else
    const __m512i pairs = _mm512_maddubs_epi16(line.v, _mm512_set1_epi32(x));
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#endif
}

#else

struct I16 {
    Ints v[PARTS];
};

PAGED_INLINE I16 zero_words() { return {}; }
// Part by part: see `load`.
PAGED_INLINE I16 load_words(const void* p) {
    I16 out;
    unroll<PARTS>([&](auto i) {
        std::memcpy(&out.v[i], static_cast<const char*>(p) + i * sizeof(Ints), sizeof(Ints));
    });
    return out;
}
PAGED_INLINE void store_words(void* p, I16 a) {
    unroll<PARTS>([&](auto i) { std::memcpy(static_cast<char*>(p) + i * sizeof(Ints), &a.v[i], sizeof(Ints)); });
}
PAGED_INLINE F16 to_floats(I16 a) {
    return per_part([&](auto i) { return __builtin_convertvector(a.v[i], Part); });
}
template <int Shift>
PAGED_INLINE I16 bits_of(I16 a, int mask) {
    I16 out;
    unroll<PARTS>([&](auto i) { out.v[i] = reinterpret_cast<Ints>(reinterpret_cast<Words>(a.v[i]) >> Shift) & mask; });
    return out;
}
PAGED_INLINE F16 load_halves(const uint16_t* p) {
    // Finite halves: the exponent and the fraction moved into a float, and its exponent's other bias multiplied in.
    typedef uint16_t Half __attribute__((vector_size(sizeof(Part) / 2)));
    return per_part([&](int i) {
        Half half;
        std::memcpy(&half, p + i * LANES, sizeof(half));
        const Words bits = __builtin_convertvector(half, Words);
        const Part size = reinterpret_cast<Part>((bits & 0x7fff) << 13) * 5.192296858534827628530496e33f;  // 2^112
        return reinterpret_cast<Part>(reinterpret_cast<Words>(size) | (bits & 0x8000) << 16);
    });
}
PAGED_INLINE F16 load_bytes(const uint8_t* p) {
    typedef uint8_t Bytes __attribute__((vector_size(sizeof(Part) / 4)));
    return per_part([&](int i) {
        Bytes bytes;
        std::memcpy(&bytes, p + i * LANES, sizeof(bytes));
        return __builtin_convertvector(bytes, Part);
    });
}
PAGED_INLINE I16 dot4(I16 sum, I16 line, int32_t x) {
#if defined(PAGED_SIMD_AVX2)
    unroll<PARTS>([&](auto i) {
        const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(line.v[i]), _mm256_set1_epi32(x));
        sum.v[i] += reinterpret_cast<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    });
#elif defined(__ARM_FEATURE_DOTPROD)
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x));
    unroll<PARTS>([&](auto i) {
        sum.v[i] = reinterpret_cast<Ints>(
            vdotq_s32(reinterpret_cast<int32x4_t>(sum.v[i]), reinterpret_cast<int8x16_t>(line.v[i]), four)
        );
    });
#elif defined(PAGED_SIMD_NEON)
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x));
    unroll<PARTS>([&](auto i) {
        const int8x16_t bytes = reinterpret_cast<int8x16_t>(line.v[i]);
        const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(bytes), vget_low_s8(four)));
        const int32x4_t high = vpaddlq_s16(vmull_high_s8(bytes, four));
        sum.v[i] += reinterpret_cast<Ints>(vpaddq_s32(low, high));
    });
#else
    int8_t four[4];
    std::memcpy(four, &x, 4);
    unroll<PARTS>([&](auto i) {
        unroll<4>([&](auto j) {
            sum.v[i] +=
                reinterpret_cast<Ints>((reinterpret_cast<Words>(line.v[i]) >> (8 * j)) & 255u) * int32_t{four[j]};
        });
    });
#endif
    return sum;
}

#endif

PAGED_INLINE I16 low_nibbles(I16 line) { return bits_of<0>(line, 0x0f0f0f0f); }
PAGED_INLINE I16 high_nibbles(I16 line) { return bits_of<4>(line, 0x0f0f0f0f); }

// Any bytes times four int8 numbers.
PAGED_INLINE I16 dot4_bytes(I16 sum, I16 line, int32_t x) {
#if defined(PAGED_HAS_VNNI) || defined(PAGED_SIMD_PORTABLE)
    return dot4(sum, line, x);
#elif defined(PAGED_SIMD_AVX512)
    const __m512i four = _mm512_set1_epi32(x);
    const __m512i low = _mm512_madd_epi16(_mm512_maddubs_epi16(low_nibbles(line).v, four), _mm512_set1_epi16(1));
    const __m512i high = _mm512_madd_epi16(_mm512_maddubs_epi16(high_nibbles(line).v, four), _mm512_set1_epi16(16));
    return {_mm512_add_epi32(sum.v, _mm512_add_epi32(low, high))};
#else
    sum = dot4(sum, low_nibbles(line), x);
    const I16 high = dot4(zero_words(), high_nibbles(line), x);
    unroll<PARTS>([&](auto i) { sum.v[i] += high.v[i] * 16; });
    return sum;
#endif
}

// Where there is no VNNI, the sums of eight lines' 16-bit halves are one add: eight times 3810 fit them still.
#if (defined(PAGED_SIMD_AVX512) && !defined(PAGED_HAS_VNNI)) || defined(PAGED_SIMD_AVX2)
#define PAGED_CODE_HALVES 8

PAGED_INLINE I16 add_halves(I16 halves, I16 line, int32_t x) {
#if defined(PAGED_SIMD_AVX512)
    return {_mm512_add_epi16(halves.v, _mm512_maddubs_epi16(line.v, _mm512_set1_epi32(x)))};
#else
    const __m256i four = _mm256_set1_epi32(x);
    unroll<PARTS>([&](auto i) {
        const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(line.v[i]), four);
        halves.v[i] = reinterpret_cast<Ints>(_mm256_add_epi16(reinterpret_cast<__m256i>(halves.v[i]), pairs));
    });
    return halves;
#endif
}

PAGED_INLINE I16 add_both(I16 sum, I16 halves) {
#if defined(PAGED_SIMD_AVX512)
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(halves.v, _mm512_set1_epi16(1)))};
#else
    unroll<PARTS>([&](auto i) {
        const __m256i both = _mm256_madd_epi16(reinterpret_cast<__m256i>(halves.v[i]), _mm256_set1_epi16(1));
        sum.v[i] = reinterpret_cast<Ints>(_mm256_add_epi32(reinterpret_cast<__m256i>(sum.v[i]), both));
    });
    return sum;
#endif
}
#endif

// How a weight's input features lie in groups, and groups in the blocks of int8 rows.
struct Grid {
    int64_t depth, group, groups, block, per_group;

    explicit Grid(int64_t depth_, int64_t group_size)
        : depth(depth_),
          group(least(depth_, group_size)),
          groups((depth_ + group - 1) / group),
          block(least(group, PAGED_INT8_BLOCK)),
          per_group((group + block - 1) / block) {}

    int64_t blocks() const { return (groups - 1) * per_group + (last_group() + block - 1) / block; }
    int64_t last_group() const { return depth - (groups - 1) * group; }

    // Calls f(block, group, first k, last k) in the one order of all sums.
    template <class F>
    PAGED_INLINE void each(F&& f) const {
        int64_t index = 0;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t end = least(depth, (g + 1) * group);
            for (int64_t k = g * group; k < end; k += block, index++) {
                f(index, g, k, least(end, k + block));
            }
        }
    }
};

// Sixteen outputs of a packed weight.
class Column {
public:
    Column() = default;
    Column(const PagedQuantizedWeight& w, const Grid& grid, int64_t block)
        : codes(w.codes + block * 16 * w.depth * w.bits / 8),
          scale_bytes_(grid.groups * (w.half_scales ? 32 : 64)),
          zero_bytes_(grid.groups * (w.float_offsets ? 64 : 16)),
          scales_(static_cast<const char*>(w.scales) + block * scale_bytes_),
          zeros_(static_cast<const char*>(w.zeros) + block * zero_bytes_),
          half_scales_(w.half_scales) {}

    PAGED_INLINE F16 scale(int64_t group) const {
        return half_scales_ ? load_halves(reinterpret_cast<const uint16_t*>(scales_) + 16 * group)
                            : load(reinterpret_cast<const float*>(scales_) + 16 * group);
    }
    PAGED_INLINE const uint8_t* zero_bytes(int64_t group) const {
        return reinterpret_cast<const uint8_t*>(zeros_) + 16 * group;
    }
    PAGED_INLINE F16 zero(int64_t group) const { return load_bytes(zero_bytes(group)); }
    PAGED_INLINE F16 offset(int64_t group) const { return load(reinterpret_cast<const float*>(zeros_) + 16 * group); }

    // Fetches the scales and zero points or offsets of the column so many blocks on.
    PAGED_INLINE void fetch(int64_t blocks) const {
        for (int64_t line = 0; line < scale_bytes_; line += 64) {
            __builtin_prefetch(scales_ + blocks * scale_bytes_ + line, 0, 2);
        }
        for (int64_t line = 0; line < zero_bytes_; line += 64) {
            __builtin_prefetch(zeros_ + blocks * zero_bytes_ + line, 0, 2);
        }
    }

    const uint8_t* codes = nullptr;

private:
    int64_t scale_bytes_ = 0, zero_bytes_ = 0;  // of a column
    const char* scales_ = nullptr;
    const char* zeros_ = nullptr;
    int half_scales_ = 0;
};

// The codes of features k to k + 7 (4 bits) or k + 3 of sixteen outputs as floats: f(offset, even codes, odd codes).
template <int Bits, class F>
PAGED_INLINE void each_pair(const uint8_t* codes, int64_t k, F&& f) {
    const I16 line = load_words(codes + k * (2 * Bits));
    constexpr int mask = (1 << Bits) - 1;
    unroll<2>([&](auto j) {
        f(2 * j, to_floats(bits_of<16 * j>(line, mask)), to_floats(bits_of<16 * j + 8>(line, mask)));
    });
    if constexpr (Bits == 4) {
        unroll<2>([&](auto j) {
            f(4 + 2 * j, to_floats(bits_of<16 * j + 4>(line, mask)), to_floats(bits_of<16 * j + 12>(line, mask)));
        });
    }
}

// Sixteen pairs of bfloat16, as packed weights have them.
PAGED_INLINE void store_pairs(bf16* to, F16 first, F16 second) {
#if defined(PAGED_HAS_BF16)
    const __m512i low = _mm512_cvtepu16_epi32(narrow(first)), high = _mm512_cvtepu16_epi32(narrow(second));
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#else
    // Finite numbers, rounded to nearest, ties to even, in place.
    uint32_t low[16], high[16];
    std::memcpy(low, &first, 64);
    std::memcpy(high, &second, 64);
    for (int lane = 0; lane < 16; lane++) {
        const uint32_t a = low[lane] + 0x7fffu + (low[lane] >> 16 & 1),
                       b = high[lane] + 0x7fffu + (high[lane] >> 16 & 1);
        low[lane] = a >> 16 | (b & 0xffff0000u);
    }
    std::memcpy(to, low, 64);
#endif
}

}  // namespace paged::PAGED_VARIANT
