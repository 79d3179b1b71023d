// Packing of stored weights (include/paged/types.h): done once, at load time, by all threads.
#include "gather.hpp"
#include "scratch.hpp"
#include "simd.hpp"
#include "tables.hpp"

namespace paged::PAGED_VARIANT {
namespace {

// Blocks of sixteen output features that the part touches.
int64_t items(const PagedPack& p) { return round_up(p.row_offset + p.rows, 16) / 16 - p.row_offset / 16; }

int64_t grain(const PagedPack&) { return 1; }

float half_to_float(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent == 0) {
        // Subnormal halves are multiples of 2^-24, which a float holds exactly.
        float value = static_cast<float>(fraction) * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    uint32_t word = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

// ---- blocks of 32 codes with their scales, as in GGUF files

constexpr int64_t CODES = 32;

float scale_at(const uint8_t* block) {
    uint16_t bits;
    std::memcpy(&bits, block, 2);
    return half_to_float(bits);
}

// (code - 8) * scale; low halves of the bytes first.
struct BlockQ40 {
    static constexpr int64_t BYTES = 18;
    static PAGED_INLINE void values(const uint8_t* block, float* out) {
        const float scale = scale_at(block);
        for (int i = 0; i < 16; i++) {
            out[i] = static_cast<float>((block[2 + i] & 15) - 8) * scale;
            out[16 + i] = static_cast<float>((block[2 + i] >> 4) - 8) * scale;
        }
    }
};

// Code * scale + the least value.
struct BlockQ41 {
    static constexpr int64_t BYTES = 20;
    static PAGED_INLINE void values(const uint8_t* block, float* out) {
        const float scale = scale_at(block), low = scale_at(block + 2);
        for (int i = 0; i < 16; i++) {
            out[i] = static_cast<float>(block[4 + i] & 15) * scale + low;
            out[16 + i] = static_cast<float>(block[4 + i] >> 4) * scale + low;
        }
    }
};

// Signed code * scale.
struct BlockQ80 {
    static constexpr int64_t BYTES = 34;
    static PAGED_INLINE void values(const uint8_t* block, float* out) {
        const float scale = scale_at(block);
        for (int i = 0; i < CODES; i++) {
            out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
        }
    }
};

template <class Block, class T>
void take_blocks(const PagedPack& p, int64_t row, T* room) {
    const int64_t blocks = p.in_features / CODES;
    const uint8_t* from = static_cast<const uint8_t*>(p.source) + row * blocks * Block::BYTES;
    for (int64_t b = 0; b < blocks; b++) {
        alignas(64) float values[CODES];
        Block::values(from + b * Block::BYTES, values);
        store(room + b * CODES, load(values));
        store(room + b * CODES + 16, load(values + 16));
    }
}

// A stored row as T in `room`; the source may lie at any address.
template <class T>
void take_row(const PagedPack& p, int64_t row, T* room) {
    row = p.order == nullptr ? row : p.order[row];
    if (p.source_dtype == PAGED_Q4_0) {
        return take_blocks<BlockQ40>(p, row, room);
    }
    if (p.source_dtype == PAGED_Q4_1) {
        return take_blocks<BlockQ41>(p, row, room);
    }
    if (p.source_dtype == PAGED_Q8_0) {
        return take_blocks<BlockQ80>(p, row, room);
    }
    const int64_t sizes[] = {4, 2, 2, 8};
    const char* from = static_cast<const char*>(p.source) + row * p.in_features * sizes[p.source_dtype];
    if (p.source_dtype == p.dtype) {
        std::memcpy(room, from, static_cast<size_t>(p.in_features) * sizeof(T));
        return;
    }
    for (int64_t k = 0; k < p.in_features; k++) {
        float value;
        if (p.source_dtype == PAGED_F32) {
            std::memcpy(&value, from + 4 * k, 4);
        } else if (p.source_dtype == PAGED_F64) {
            double wide;
            std::memcpy(&wide, from + 8 * k, 8);
            value = static_cast<float>(wide);
        } else {
            uint16_t bits;
            std::memcpy(&bits, from + 2 * k, 2);
            value = p.source_dtype == PAGED_BF16 ? to_float(bf16{bits}) : half_to_float(bits);
        }
        room[k] = from_float<T>(value);
    }
}

void place(const float* row, int64_t count, int64_t lane, float* block) {
    for (int64_t k = 0; k < count; k++) {
        block[16 * k + lane] = row[k];
    }
}

void place(const bf16* row, int64_t count, int64_t lane, bf16* block) {
    for (int64_t k = 0; k < count; k++) {
        block[(k / 2 * 16 + lane) * 2 + k % 2] = row[k];
    }
}

// Sixteen whole rows at once: writes go line by line instead of scattering.
void place_all(const float* rows, int64_t stride, int64_t count, float* block) {
    for (int64_t k = 0; k < count; k++) {
        for (int lane = 0; lane < 16; lane++) {
            block[16 * k + lane] = rows[lane * stride + k];
        }
    }
}

void place_all(const bf16* rows, int64_t stride, int64_t count, bf16* block) {
#if defined(PAGED_HAS_BF16)
    if (count % PAGED_BLOCK_K == 0) {
        const bf16* each[16];
        for (int lane = 0; lane < 16; lane++) {
            each[lane] = rows + lane * stride;
        }
        pack_keys(each, count, count, block);  // sixteen keys are packed as sixteen output features are
        return;
    }
#endif
    for (int64_t k = 0; k + 2 <= count; k += 2) {
        for (int lane = 0; lane < 16; lane++) {
            std::memcpy(block + 16 * k + 2 * lane, rows + lane * stride + k, 4);
        }
    }
    if (count % 2) {
        for (int lane = 0; lane < 16; lane++) {
            block[16 * (count - 1) + 2 * lane] = rows[lane * stride + count - 1];
        }
    }
}

// Features of a stored row that are taken at a time.
template <class T>
void run_block(const PagedPack& p, int64_t index, T* room) {
    const int64_t begin = (p.row_offset / 16 + index) * 16;
    const int64_t first = most(begin, p.row_offset), last = least(begin + 16, p.row_offset + p.rows);
    T* block = static_cast<T*>(p.packed) + begin * round_up(p.in_features, PAGED_BLOCK_K);
    const int64_t stride = round_up(p.in_features, 16);
    if (last - first == 16 && 16 * stride * static_cast<int64_t>(sizeof(T)) <= PAGED_SCRATCH_BYTES) {
        for (int64_t r = 0; r < 16; r++) {
            take_row(p, first + r - p.row_offset, room + r * stride);
        }
        place_all(room, stride, p.in_features, block);
        return;
    }
    for (int64_t r = first; r < last; r++) {
        take_row(p, r - p.row_offset, room);
        place(room, p.in_features, r - begin, block);
    }
}

void run(const PagedPack& p, int64_t first, int64_t last, void* scratch) {
    for (int64_t index = first; index < last; index++) {
        if (p.dtype == PAGED_F32) {
            run_block(p, index, static_cast<float*>(scratch));
        } else {
            run_block(p, index, static_cast<bf16*>(scratch));
        }
    }
}

}  // namespace

const PagedKernel PACK = kernel<PagedPack, items, grain, run>();

}  // namespace paged::PAGED_VARIANT
