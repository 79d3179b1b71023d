// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) and the noise made of it, by the
// rule of paged_kernels/sampling.py: counter (token_id >> 2, position, sample_index, 0), key the seed, word
// token_id & 3; of its bits x comes v = (x + 0.5) / 2^32 and the Gumbel noise -log(E) with E = -log1p(-v).
#pragma once
#include <cmath>

#include "device.cuh"

namespace paged {

struct NoiseKey {
    uint32_t key0;
    uint32_t key1;
    uint32_t position;
    uint32_t sample_index;
};

// The words of tokens 4 quad to 4 quad + 3.
PAGED_DEVICE uint4 philox(const NoiseKey& key, uint32_t quad) {
    uint32_t key0 = key.key0, key1 = key.key1;
    uint4 word = {quad, key.position, key.sample_index, 0};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64_t product0 = uint64_t{0xD2511F53u} * word.x, product1 = uint64_t{0xCD9E8D57u} * word.z;
        word = {
            static_cast<uint32_t>(product1 >> 32) ^ word.y ^ key0, static_cast<uint32_t>(product1),
            static_cast<uint32_t>(product0 >> 32) ^ word.w ^ key1, static_cast<uint32_t>(product0)
        };
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return word;
}

PAGED_DEVICE uint32_t word_of(const uint4& words, int token) {
    const int lane = token & 3;
    return lane == 0 ? words.x : lane == 1 ? words.y : lane == 2 ? words.z : words.w;
}

PAGED_DEVICE double noise_of(uint32_t bits) {
    const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-32;
    return -log(-log1p(-uniform));
}

// v rounded down, without a conversion; E is never less.
PAGED_DEVICE float uniform_below(uint32_t bits) {
    return __uint_as_float(0x3f800000u | bits >> 9) - 1.0f;
}

// E to 1 part in 10,000.
PAGED_DEVICE float exponential(uint32_t bits) {
    constexpr uint32_t kSmall = 1u << 26;
    if (bits < kSmall) {
        const float v = (static_cast<float>(bits) + 0.5f) * 0x1p-32f;
        return v * (1.0f + v * (0.5f + v * 0.33333333f));
    }
    return -0.69314718f * __log2f((static_cast<float>(~bits) + 0.5f) * 0x1p-32f);
}

}  // namespace paged
