// Tensor-core and matrix-load instructions on the emulator. The layout of fragments over lanes is that of the PTX ISA,
// sections "mma.m16n8k16" and "ldmatrix".
#pragma once
#include "cuda_language.h"

namespace emulation {

inline float half_value(uint16_t bits) {
    __half_raw raw;
    raw.x = bits;
    return __half2float(__half(raw));
}
inline float bfloat16_value(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Words of a lane: a[4], b[2], c[4]; the result goes behind them.
constexpr int kMmaIn = 10;

template <bool kIsBfloat16>
__attribute__((no_sanitize("thread"))) void multiply_fragments(uint32_t* table) {
    float a[16][16], b[16][8];
    auto value = [](uint32_t word, int half) {
        const auto bits = static_cast<uint16_t>(half ? word >> 16 : word & 0xffff);
        return kIsBfloat16 ? bfloat16_value(bits) : half_value(bits);
    };
    for (int lane = 0; lane < kLanes; lane++) {
        const int row = lane >> 2, pair = 2 * (lane & 3);
        const uint32_t* words = table + lane * kWords;
        for (int half = 0; half < 2; half++) {
            a[row][pair + half] = value(words[0], half);
            a[row + 8][pair + half] = value(words[1], half);
            a[row][pair + 8 + half] = value(words[2], half);
            a[row + 8][pair + 8 + half] = value(words[3], half);
            b[pair + half][row] = value(words[4], half);
            b[pair + 8 + half][row] = value(words[5], half);
        }
    }
    for (int lane = 0; lane < kLanes; lane++) {
        uint32_t* words = table + lane * kWords;
        for (int element = 0; element < 4; element++) {
            const int row = (lane >> 2) + 8 * (element >> 1), column = 2 * (lane & 3) + (element & 1);
            float sum;
            std::memcpy(&sum, words + 6 + element, 4);
            for (int k = 0; k < 16; k++)
                sum += a[row][k] * b[k][column];
            std::memcpy(words + kMmaIn + element, &sum, 4);
        }
    }
}

template <bool kIsBfloat16>
__attribute__((no_sanitize("thread"))) void mma(
    float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site
) {
    static_assert(kMmaIn + 4 <= kWords);
    uint32_t words[kMmaIn] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    std::memcpy(words + 6, d, sizeof d);
    const Collective kind = kIsBfloat16 ? kMmaBfloat16 : kMmaHalf;
    const uint32_t* table = exchange(0xffffffffu, words, kMmaIn, kind, site, multiply_fragments<kIsBfloat16>);
    std::memcpy(d, table + current->lane * kWords + kMmaIn, sizeof d);
    if (current->lane == 0)
        count_mma();
}

// Each lane reads the 16-byte row that it names, so that sanitizers see who reads what.
template <int kMatrices, bool kTransposed>
void load_matrix(uint32_t (&result)[kMatrices], const void* row, Site site) {
    uint32_t words[6] = {};
    const int lane = static_cast<int>(current->lane);
    if (lane < 8 * kMatrices) {
        const auto address = reinterpret_cast<uintptr_t>(row);
        if (address & 15)
            fail("a row of ldmatrix is not aligned to 16 bytes (%s:%d)", site.file, site.line);
        std::memcpy(words, row, 16);
        std::memcpy(words + 4, &address, 8);
    }
    const Collective kind = kTransposed ? kLoadMatrixTransposed : kLoadMatrix;
    const uint32_t* table = exchange(0xffffffffu, words, 6, kind, site);
    if (lane == 0)
        count_load_matrix(table, kMatrices);
    for (int matrix = 0; matrix < kMatrices; matrix++) {
        if constexpr (kTransposed) {
            const int column = lane / 4, first = 2 * (lane % 4);
            auto at = [&](int in_row) {
                const uint32_t word = table[(8 * matrix + in_row) * kWords + column / 2];
                return column & 1 ? word >> 16 : word & 0xffff;
            };
            result[matrix] = at(first) | at(first + 1) << 16;
        } else {
            result[matrix] = table[(8 * matrix + lane / 4) * kWords + lane % 4];
        }
    }
}

}  // namespace emulation
