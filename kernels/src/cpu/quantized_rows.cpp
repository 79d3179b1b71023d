// Around quantized linears: rows on their way in, packing, and tables of which single rows are read.
#include "codes.hpp"
#include "tables.hpp"

namespace paged::PAGED_VARIANT {
namespace {

// ---- rows

// A row in the weight's order of features, padded with zeros.
template <class T, class X>
void arrange(const PagedPrepare& p, const T* x, X* to) {
    if (p.columns != nullptr) {
        for (int64_t k = 0; k < p.depth; k++) {
            to[k] = p.columns[k] < 0 ? X{} : from_float<X>(to_float(x[p.columns[k]]));
        }
        return;
    }
    for_lanes(p.in_features, [&](int64_t i, auto n) { store_some(to + i, load_some(x + i, n), n); });
    std::memset(to + p.in_features, 0, static_cast<size_t>(p.depth - p.in_features) * sizeof(X));
}

// Adding it to a number of up to 2^22 leaves the nearest whole number, as two's complement, in the lowest bits.
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23
// A block of smaller numbers is all zeros.
constexpr float LEAST = 1e-30f;

// Floats without their signs, as whole numbers: in the same order, and those that are not finite are the largest.
PAGED_INLINE I16 max_size(I16 most, F16 value) {
#if defined(PAGED_SIMD_AVX512)
    const __m512i size = _mm512_and_si512(_mm512_castps_si512(value.v), _mm512_set1_epi32(0x7fffffff));
    return {_mm512_max_epi32(most.v, size)};
#else
    unroll<PARTS>([&](auto i) {
        const Ints size = reinterpret_cast<Ints>(value.v[i]) & 0x7fffffff;
        most.v[i] = most.v[i] > size ? most.v[i] : size;
    });
    return most;
#endif
}

PAGED_INLINE float largest_size(I16 sizes) {
    int32_t bits;
#if defined(PAGED_SIMD_AVX512)
    bits = _mm512_reduce_max_epi32(sizes.v);
#else
    int32_t lanes[16];
    store_words(lanes, sizes);
    bits = 0;
    for (const int32_t lane : lanes) {
        bits = bits > lane ? bits : lane;
    }
#endif
    float size;
    std::memcpy(&size, &bits, 4);
    return size;
}

PAGED_INLINE void store_low_bytes(int8_t* to, F16 a) {
#if defined(PAGED_SIMD_AVX512)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_castps_si512(a.v)));
#else
    typedef uint8_t Bytes __attribute__((vector_size(sizeof(Part) / 4)));
    unroll<PARTS>([&](auto i) {
        const Bytes bytes = __builtin_convertvector(reinterpret_cast<Words>(a.v[i]) & 255u, Bytes);
        std::memcpy(to + i * LANES, &bytes, sizeof(bytes));
    });
#endif
}

#if defined(PAGED_SIMD_AVX512)

// Sixteen pairs of bfloat16, 32 numbers, times `factor`, as 16-bit whole numbers in their order.
PAGED_INLINE __m512i round_pairs(__m512i pairs, __m512 factor) {
    const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    const __m512 second =
        _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(first, factor));
    const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(second, factor));
    return _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_slli_epi32(high, 16));
}

PAGED_INLINE float largest_half(__m512i sizes) {
    const __m256i upper = _mm512_extracti64x4_epi64(sizes, 1);
    const __m256i eight = _mm256_max_epu16(_mm512_castsi512_si256(sizes), upper);
    const __m128i four = _mm_max_epu16(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    // There is a minimum of eight, no maximum.
    const __m128i ones = _mm_set1_epi16(-1), least_of = _mm_minpos_epu16(_mm_xor_si128(four, ones));
    return to_float(bf16{static_cast<uint16_t>(~_mm_cvtsi128_si32(least_of))});
}

PAGED_INLINE int32_t sum_bytes(__m512i bytes) {
    // Differences to -128 are unsigned.
    const __m512i eights = _mm512_sad_epu8(_mm512_xor_si512(bytes, _mm512_set1_epi8(-128)), _mm512_setzero_si512());
    const __m256i four = _mm256_add_epi64(_mm512_castsi512_si256(eights), _mm512_extracti64x4_epi64(eights, 1));
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    return _mm_cvtsi128_si32(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two))) - 64 * 128;
}

// As `quantize_block`, for `Lines` times 64 numbers.
template <int Lines>
void quantize_lines(const bf16* x, int8_t* q, float* scale, float* sum) {
    __m512i pairs[2 * Lines], sizes = _mm512_setzero_si512();
    unroll<2 * Lines>([&](auto i) {
        pairs[i] = _mm512_loadu_si512(x + 32 * i);
        sizes = _mm512_max_epu16(sizes, _mm512_and_si512(pairs[i], _mm512_set1_epi16(0x7fff)));
    });
    const float most = largest_half(sizes);
    const __m512 factor = _mm512_set1_ps(most < LEAST ? 0.0f : 127.0f / most);
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    int32_t total = 0;
    unroll<Lines>([&](auto i) {
        const __m512i first = round_pairs(pairs[2 * i], factor), second = round_pairs(pairs[2 * i + 1], factor);
        const __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_packs_epi16(first, second));
        _mm512_storeu_si512(q + 64 * i, bytes);
        total += sum_bytes(bytes);
    });
    *scale = most < LEAST ? 0.0f : most < INFINITY ? most / 127.0f : NAN;
    *sum = static_cast<float>(total);
}

#endif

// One block: x = scale * q up to half a scale. Numbers that are not finite make the scale NaN.
template <class T>
void quantize_block(const T* x, int64_t count, int8_t* q, float* scale, float* sum) {
#if defined(PAGED_SIMD_AVX512)
    if constexpr (sizeof(T) == 2) {
        if (count == 64 || count == 128) {
            return count == 64 ? quantize_lines<1>(x, q, scale, sum) : quantize_lines<2>(x, q, scale, sum);
        }
    }
#endif
    I16 sizes = zero_words();
    for (int64_t k = 0; k < count; k += 16) {
        sizes = max_size(sizes, load(x + k));
    }
    const float most = largest_size(sizes);
    const F16 factor = set1(most < LEAST ? 0.0f : 127.0f / most);
    F16 total = zero();
    for (int64_t k = 0; k < count; k += 16) {
        const F16 shifted = load(x + k) * factor + set1(MAGIC);
        store_low_bytes(q + k, shifted);
        total = total + (shifted - set1(MAGIC));
    }
    *scale = most < LEAST ? 0.0f : most < INFINITY ? most / 127.0f : NAN;
    *sum = sum_lanes(total);
}

template <class T>
void quantize_row(const PagedPrepare& p, const T* x, char* out) {
    const Grid grid(p.depth, p.group_size);
    auto* q = reinterpret_cast<int8_t*>(out);
    auto* scales = reinterpret_cast<float*>(out + p.depth);
    float* sums = scales + grid.blocks();
    grid.each([&](int64_t block, int64_t, int64_t first, int64_t last) {
        quantize_block(x + first, last - first, q + first, scales + block, sums + block);
    });
}

template <class T>
void prepare_row(const PagedPrepare& p, int64_t row, float* room) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    char* out = static_cast<char*>(p.out) + row * p.out_stride;
    if (p.kind == PAGED_ROW_F32) {
        arrange(p, x, reinterpret_cast<float*>(out));
    } else if (p.kind == PAGED_ROW_BF16) {
        arrange(p, x, reinterpret_cast<bf16*>(out));
    } else if (p.columns == nullptr && p.depth == p.in_features) {
        quantize_row(p, x, out);
    } else {
        arrange(p, x, room);
        quantize_row(p, room, out);
    }
}

int64_t prepare_items(const PagedPrepare& p) { return p.rows; }
int64_t prepare_grain(const PagedPrepare&) { return 4; }

void prepare(const PagedPrepare& p, int64_t first, int64_t last, void* scratch) {
    for (int64_t row = first; row < last; row++) {
        if (p.dtype == PAGED_F32) {
            prepare_row<float>(p, row, static_cast<float*>(scratch));
        } else {
            prepare_row<bf16>(p, row, static_cast<float*>(scratch));
        }
    }
}

// ---- embedding

int code_at(const PagedQuantizedWeight& w, int64_t block, int64_t lane, int64_t k) {
    const uint8_t* codes = w.codes + block * 16 * w.depth * w.bits / 8;
    if (w.bits == 8) {
        return codes[k / 4 * 64 + 4 * lane + k % 4];
    }
    return codes[k / 8 * 64 + 4 * lane + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15;
}

template <class T>
void dequantize_row(const PagedQuantizedWeight& w, int64_t row, int64_t count, T* out) {
    const Grid grid(w.depth, w.group_size);
    const int64_t block = row / 16, lane = row % 16;
    const Column column(w, grid, block);
    for (int64_t k = 0; k < count;) {
        const int64_t g = k / grid.group, end = least(count, (g + 1) * grid.group);
        float scales[16], zeros[16];
        store(scales, column.scale(g));
        store(zeros, w.float_offsets ? column.offset(g) : column.zero(g));
        for (; k < end; k++) {
            const auto code = static_cast<float>(code_at(w, block, lane, k));
            const float value =
                w.float_offsets ? code * scales[lane] + zeros[lane] : (code - zeros[lane]) * scales[lane];
            out[k] = from_float<T>(value);
        }
    }
}

int64_t embedding_items(const PagedQuantizedEmbedding& p) { return p.rows; }
int64_t embedding_grain(const PagedQuantizedEmbedding&) { return 4; }

void embedding(const PagedQuantizedEmbedding& p, int64_t first, int64_t last, void*) {
    for (int64_t row = first; row < last; row++) {
        if (p.dtype == PAGED_F32) {
            dequantize_row(*p.table, p.token_ids[row], p.hidden_size, static_cast<float*>(p.out) + row * p.out_stride);
        } else {
            dequantize_row(*p.table, p.token_ids[row], p.hidden_size, static_cast<bf16*>(p.out) + row * p.out_stride);
        }
    }
}

// ---- packing

int64_t pack_items(const PagedQuantizedPack& p) { return round_up(p.row_offset + p.rows, 16) / 16 - p.row_offset / 16; }
int64_t pack_grain(const PagedQuantizedPack&) { return 1; }

void pack_codes(const PagedQuantizedPack& p, int64_t row, const uint8_t* from) {
    const int64_t at = p.row_offset + row, lane = at % 16;
    uint8_t* codes = p.codes + at / 16 * 16 * p.depth * p.bits / 8 + 4 * lane;
    const int64_t count = p.columns == nullptr ? p.in_features : p.depth;
    for (int64_t k = 0; k < count; k++) {
        const int64_t source = p.columns == nullptr ? k : p.columns[k];
        if (source < 0) {
            continue;
        }
        if (p.bits == 8) {
            codes[k / 4 * 64 + k % 4] = from[source];
        } else {
            uint8_t& both = codes[k / 8 * 64 + k % 4];
            both =
                static_cast<uint8_t>(k % 8 < 4 ? (both & 0xf0) | (from[source] & 15) : (both & 15) | from[source] << 4);
        }
    }
}

// Numbers that halves hold exactly.
uint16_t to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size >= 0x38800000) {
        return static_cast<uint16_t>(sign | ((size >> 13) - (112 << 10)));
    }
    float small;
    std::memcpy(&small, &size, 4);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(small * 16777216.0f));  // in units of 2^-24
}

void pack_groups(const PagedQuantizedPack& p, int64_t row) {
    const int64_t at = p.row_offset + row, base = at / 16 * p.packed_groups * 16 + at % 16;
    const float* scales = p.source_scales + row * p.groups;
    for (int64_t g = 0; g < p.groups; g++) {
        const int64_t to = base + 16 * g, from = row * p.groups + g;
        if (p.half_scales) {
            static_cast<uint16_t*>(p.scales)[to] = to_half(scales[g]);
        } else {
            static_cast<float*>(p.scales)[to] = scales[g];
        }
        if (p.float_offsets) {
            static_cast<float*>(p.zeros)[to] = static_cast<const float*>(p.source_zeros)[from];
        } else {
            static_cast<uint8_t*>(p.zeros)[to] = static_cast<const uint8_t*>(p.source_zeros)[from];
        }
    }
}

void pack(const PagedQuantizedPack& p, int64_t first, int64_t last, void*) {
    for (int64_t index = first; index < last; index++) {
        const int64_t begin = (p.row_offset / 16 + index) * 16 - p.row_offset;
        for (int64_t row = most(begin, 0); row < least(begin + 16, p.rows); row++) {
            pack_codes(p, row, p.source + row * p.in_features);
            pack_groups(p, row);
        }
    }
}

}  // namespace

const PagedKernel PREPARE = kernel<PagedPrepare, prepare_items, prepare_grain, prepare>();
const PagedKernel QUANTIZED_EMBEDDING = kernel<PagedQuantizedEmbedding, embedding_items, embedding_grain, embedding>();
const PagedKernel QUANTIZED_PACK = kernel<PagedQuantizedPack, pack_items, pack_grain, pack>();

}  // namespace paged::PAGED_VARIANT
