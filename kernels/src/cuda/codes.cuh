// 4-bit weights as tensor-core fragments. A block of 64 inputs x 16 outputs is one 16-byte load of each lane; the inputs
// of a block are dealt to lanes so that a lane's share of the activations is contiguous too (a product does not mind
// the order of its inputs as long as both sides agree):
//
//   lane l, g = l / 4, t = l % 4:  inputs 16 t to 16 t + 15 of outputs g and g + 8
//   word s of 4:                   inputs 16 t + 4 s to + 3;  nibbles 0,4: (g, +0 and +1)    1,5: (g, +2 and +3)
//                                                             2,6: (g + 8, +0 and +1)        3,7: (g + 8, +2 and +3)
//
// A nibble pair under the bits of a magic number is a pair of numbers without a conversion (Kim et al., "Who Says
// Elephants Can't Run", 2022); zeros hold the same bias, so that the difference is exact.
#pragma once
#include "numeric.cuh"
#include "w4a16.h"

namespace paged {

constexpr int kBlockInputs = 64;
constexpr int kBlockOutputs = 16;

template <class T>
struct Codes {
    const uint4* codes;
    const T* scales;
    const T* zeros;
    const T* bias;
    int n;
    int k;
    Divisor group;

    explicit Codes(const PagedCodes& w)
        : codes(reinterpret_cast<const uint4*>(w.codes)),
          scales(static_cast<const T*>(w.scales)),
          zeros(static_cast<const T*>(w.zeros)),
          bias(static_cast<const T*>(w.bias)),
          n(w.n),
          k(w.k),
          group(Divisor::of(static_cast<uint32_t>(w.group))) {}

    // Of block (`step` along K, `tile` along N), for this lane.
    PAGED_DEVICE const uint4* block(int step, int tile, int lane) const {
        return codes + (int64_t{step} * (n / kBlockOutputs) + tile) * 32 + lane;
    }
};

// Scale and zero of a lane's two outputs in its share of a block.
template <class T>
struct LaneScales {
    using Pair = typename Number<T>::Pair;
    Pair scale[2];
    Pair zero[2];

    PAGED_DEVICE void load(const Codes<T>& w, int step, int tile, int lane) {
        const int input = step * kBlockInputs + (lane & 3) * 16;
        const int64_t row = int64_t{w.group.divide(static_cast<uint32_t>(input))} * w.n;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int64_t at = row + tile * kBlockOutputs + (lane >> 2) + 8 * j;
            scale[j].x = scale[j].y = w.scales[at];
            zero[j].x = zero[j].y = w.zeros[at];
        }
    }
};

// Word s of a lane as numbers: [output g: inputs +0 +1, +2 +3; output g + 8: the same].
template <class T>
PAGED_DEVICE void dequantize(uint32_t (&out)[4], uint32_t word, const LaneScales<T>& scales) {
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const uint32_t bits = and_or(word >> (4 * p), 0x000f000fu, Number<T>::kMagic);
        typename Number<T>::Pair pair;
        memcpy(&pair, &bits, 4);
        pair = __hmul2(__hsub2(pair, scales.zero[p >> 1]), scales.scale[p >> 1]);
        memcpy(&out[p], &pair, 4);
    }
}

PAGED_DEVICE uint32_t word_of(const uint4& words, int s) {
    return s == 0 ? words.x : s == 1 ? words.y : s == 2 ? words.z : words.w;
}

}  // namespace paged
