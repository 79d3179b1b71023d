// Philox4x32-10 and Gumbel noise: the rule of paged_kernels/sampling.py.
//
// Counter (token_id >> 2, position, sample_index, 0), key the 64-bit seed, word token_id & 3 of the result. Of its bits
// x comes v = (x + 0.5) / 2^32, and the noise -log(-log1p(-v)).
#pragma once

#include <cmath>
#include <cstdint>

namespace paged::PAGED_VARIANT {

struct NoiseKey {
    uint32_t key0, key1, position, sample_index;
};

constexpr int PHILOX_LANES = 16;

// Words of counters quad .. quad + 15: out[word][lane].
inline void philox(const NoiseKey& key, uint32_t quad, uint32_t (&out)[4][PHILOX_LANES]) {
    uint32_t key0 = key.key0, key1 = key.key1;
    for (int lane = 0; lane < PHILOX_LANES; lane++) {
        out[0][lane] = quad + static_cast<uint32_t>(lane);
        out[1][lane] = key.position;
        out[2][lane] = key.sample_index;
        out[3][lane] = 0;
    }
    for (int round = 0; round < 10; round++) {
        for (int lane = 0; lane < PHILOX_LANES; lane++) {
            const uint64_t product0 = uint64_t{0xD2511F53u} * out[0][lane];
            const uint64_t product1 = uint64_t{0xCD9E8D57u} * out[2][lane];
            out[0][lane] = static_cast<uint32_t>(product1 >> 32) ^ out[1][lane] ^ key0;
            out[2][lane] = static_cast<uint32_t>(product0 >> 32) ^ out[3][lane] ^ key1;
            out[1][lane] = static_cast<uint32_t>(product1);
            out[3][lane] = static_cast<uint32_t>(product0);
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

inline double noise_of(uint32_t bits) {
    const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-32;
    return -std::log(-std::log1p(-uniform));
}

inline double gumbel_noise(const NoiseKey& key, int64_t token) {
    uint32_t words[4][PHILOX_LANES];
    philox(key, static_cast<uint32_t>(token >> 2), words);
    return noise_of(words[token & 3][0]);
}

}  // namespace paged::PAGED_VARIANT
