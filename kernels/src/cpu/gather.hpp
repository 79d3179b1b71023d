// What a tile of attention sees of the cache, and its gathering into the packed layout of the linears.
#pragma once

#include "paged/kernels.h"
#include "scratch.hpp"
#include "simd.hpp"

namespace paged::PAGED_VARIANT {

constexpr int64_t SPLIT = PAGED_SPLIT_TOKENS;
constexpr int64_t TILE = PAGED_TILE_TOKENS;
// Rows of scores and weights, a line longer than a power of two: rows of a tile then lie in different sets of the
// cache.
constexpr int64_t SCORES_STRIDE = SPLIT + 16, WEIGHTS_STRIDE = SPLIT + 32;

// One tile of rows of one kv head.
struct Tile {
    int64_t kv_head, group, queries;
    int64_t first_row;       // of the batch
    int64_t first_position;  // of the first row
    int64_t last_position;
    const int32_t* table;
    int64_t sequence;
    int64_t shared_splits;  // of the first splits, so many parts are there already
};

// The tokens of a split that a tile looks at: whole pairs of tiles at absolute positions.
struct Span {
    int64_t begin, end;  // positions; end is beyond the last key that any row sees
    int64_t tokens() const { return end - begin; }
    int64_t padded() const { return round_up(tokens(), PAGED_BLOCK_K); }
};

inline int64_t first_seen(const PagedAttention& p, int64_t position) {
    return p.window > 0 ? most(0, position - p.window + 1) : 0;
}

inline Tile tile_at(const PagedAttention& p, int64_t index) {
    const int64_t sequence = p.tiles[index] >> 32, offset = p.tiles[index] & 0xffffffff;
    const int64_t rows = p.query_start[sequence + 1] - p.query_start[sequence];
    const int64_t length = p.seq_lens[sequence], count = least(p.tile_rows, rows - offset);
    const int64_t group = p.num_heads / p.num_kv_heads, position = length - rows + offset;
    return {
        0,
        group,
        count * group,
        p.query_start[sequence] + offset,
        position,
        position + count - 1,
        p.block_table + sequence * p.table_stride,
        sequence,
        p.shared_splits == nullptr ? 0 : p.shared_splits[sequence]
    };
}

inline Span span_of(const PagedAttention& p, const Tile& tile, int64_t split) {
    const int64_t begin = most(split * SPLIT, first_seen(p, tile.first_position) / PAGED_BLOCK_K * PAGED_BLOCK_K);
    return {begin, least((split + 1) * SPLIT, tile.last_position + 1)};
}

// Where keys and values of consecutive positions lie, in elements of the cache.
class Cells {
public:
    Cells(const PagedAttention& p, const Tile& tile, int64_t position)
        : p_(p), tile_(tile), block_(position / p.block_size), offset_(position % p.block_size) {
        if (tile.table != nullptr) {
            enter();
        }
    }

    PAGED_INLINE int64_t next() {
        if (offset_ == p_.block_size) {
            block_++;
            offset_ = 0;
            enter();
        }
        return base_ + p_.head_dim * offset_++;
    }

private:
    void enter() { base_ = (tile_.table[block_] * p_.num_kv_heads + tile_.kv_head) * p_.block_size * p_.head_dim; }

    const PagedAttention& p_;
    const Tile& tile_;
    int64_t block_, offset_, base_ = 0;
};

// ---- gathering, into the packed layout

// Keys of sixteen tokens (null: none, zeros) as a packed block: [depth][16] or, in pairs, [depth / 2][16][2].
template <class T>
void pack_keys(const T* const* keys, int64_t head_dim, int64_t depth, float* block) {
    for (int64_t t = 0; t < TILE; t++) {
        for (int64_t d = 0; d < head_dim; d++) {
            block[16 * d + t] = keys[t] == nullptr ? 0.0f : to_float(keys[t][d]);
        }
        for (int64_t d = head_dim; d < depth; d++) {
            block[16 * d + t] = 0.0f;
        }
    }
}

// Values as [head_dim / 16][tokens][16], or in pairs of tokens.
template <class T>
void pack_value_pair(const T* first, const T* second, int64_t head_dim, int64_t tokens, int64_t at, float* packed) {
    for_lanes(head_dim, [&](int64_t d, auto n) {
        float* to = packed + d * tokens + 16 * at;
        store(to, first == nullptr ? zero() : load_some(first + d, n));
        store(to + 16, second == nullptr ? zero() : load_some(second + d, n));
    });
}

#if defined(PAGED_HAS_BF16)

// Sixteen rows of sixteen words to columns.
PAGED_INLINE void transpose_words(const __m512i (&in)[16], __m512i (&out)[16]) {
    __m512i a[16], b[16];
    unroll<8>([&](auto i) {
        a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
    });
    unroll<4>([&](auto i) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    });
    unroll<4>([&](auto i) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
        a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
        a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    });
    unroll<4>([&](auto i) {
        out[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
        out[4 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0x88);
        out[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
        out[12 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0xdd);
    });
}
inline void pack_keys(const bf16* const* keys, int64_t head_dim, int64_t depth, bf16* block) {
    int64_t d = 0;
    for (; d + 32 <= head_dim; d += 32) {
        __m512i rows[16], columns[16];
        unroll<16>([&](auto t) {
            rows[t] = keys[t] == nullptr ? _mm512_setzero_si512() : _mm512_loadu_si512(keys[t] + d);
        });
        transpose_words(rows, columns);
        unroll<16>([&](auto i) { _mm512_storeu_si512(block + 16 * d + 32 * i, columns[i]); });
    }
    for (; d < depth; d += 2) {
        for (int64_t t = 0; t < TILE; t++) {
            bf16* pair = block + 16 * d + 2 * t;
            if (keys[t] == nullptr || d >= head_dim) {
                pair[0] = pair[1] = bf16{0};
            } else {
                std::memcpy(pair, keys[t] + d, 4);  // head_dim is even
            }
        }
    }
}

PAGED_INLINE __m512i words(const bf16* p, int64_t d, int64_t n) {
    return p == nullptr ? _mm512_setzero_si512()
                        : _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p + d));
}

inline void pack_value_pair(
    const bf16* first, const bf16* second, int64_t head_dim, int64_t tokens, int64_t at, bf16* packed
) {
    for (int64_t d = 0; d < head_dim; d += 16) {
        const int64_t n = least(16, head_dim - d);
        const __m512i low = words(first, d, n), high = _mm512_slli_epi32(words(second, d, n), 16);
        _mm512_storeu_si512(packed + d * tokens + 16 * at, _mm512_or_si512(low, high));
    }
}

#endif

}  // namespace paged::PAGED_VARIANT
