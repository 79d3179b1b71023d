// Small cases of every CUDA kernel against plain loops in double, for builds with sanitizers: each buffer is a heap
// block of exactly its size. Prints one line for each case; exit code 1 if one is wrong.
//
//   paged_cuda_check [CASE ...]     (none: all)
//
// On the emulator (PAGED_EMULATE), or compiled by nvcc with the kernels (PAGED_ON_GPU) for compute-sanitizer.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention.h"
#include "check_sampling.h"
#include "check_support.h"
#include "elementwise.h"
#include "w4a16.h"
#ifdef PAGED_ON_GPU
#include <cuda_runtime.h>
#else
#include "runtime.h"
#endif

namespace {

double number(__half value) { return static_cast<double>(__half2float(value)); }
double number(__nv_bfloat16 value) { return static_cast<double>(__bfloat162float(value)); }
template <class T>
T rounded(double value);
template <>
__half rounded(double value) {
    return __float2half(static_cast<float>(value));
}
template <>
__nv_bfloat16 rounded(double value) {
    return __float2bfloat16(static_cast<float>(value));
}
template <class T>
constexpr int kDtype = std::is_same_v<T, __nv_bfloat16> ? 1 : 0;
template <class T>
constexpr double kBound = std::is_same_v<T, __nv_bfloat16> ? 0.02 : 0.003;

std::mt19937 generator(1);

template <class T>
Buffer<T> normal(size_t count) {
    std::normal_distribution<double> draw;
    Buffer<T> buffer(count);
    for (size_t i = 0; i < count; i++)
        buffer[i] = rounded<T>(draw(generator));
    return buffer;
}

// Whether all of `got` is within the type's rounding of `expected`, measured by the largest.
template <class T>
bool near(Buffer<T>& got, const std::vector<double>& expected) {
    double largest = 0.0, error = 0.0;
    for (size_t i = 0; i < got.size; i++) {
        largest = std::fmax(largest, std::fabs(expected[i]));
        const double off = std::fabs(number(got[i]) - expected[i]);
        error = std::isnan(off) ? INFINITY : std::fmax(error, off);
    }
    return error <= kBound<T> * largest;
}

// ---- attention: one key-value head, two query heads; decode and prefill must agree to the bit

template <class T, int D>
bool attention() {
    constexpr int kHeads = 2, kPage = 5, kLength = 70, kNew = 9, kPages = kLength / kPage, kSplit = 32;
    auto q = normal<T>(kNew * kHeads * D), keys = normal<T>(kLength * D), values = normal<T>(kLength * D);
    Buffer<int> blocks(kPages), row_start(2), lengths(1), items(1), tiles(2);
    for (int i = 0; i < kPages; i++)
        blocks[i] = (i * 3 + 1) % kPages;
    row_start[0] = tiles[0] = tiles[1] = items[0] = 0;
    row_start[1] = kNew;
    lengths[0] = kLength;
    Buffer<T> out(kNew * kHeads * D), last(kHeads * D);
    constexpr int kSplits = (kLength + kSplit - 1) / kSplit;
    Buffer<float> partial(kHeads * kSplits * (D + 2));
    const float scale = 1.0f / std::sqrt(static_cast<float>(D));
    PagedAttention a{
        q.get(),
        keys.get(),
        values.get(),
        blocks.get(),
        row_start.get(),
        lengths.get(),
        out.get(),
        partial.get(),
        kPages,
        kPage,
        kHeads,
        1,
        D,
        kDtype<T>,
        0,
        kSplit,
        kSplits,
        scale
    };
    if (paged_cuda_attention_prefill(&a, tiles.get(), 1, nullptr))
        return false;
    a.q = q.get() + (kNew - 1) * kHeads * D;
    a.out = last.get();
    row_start[1] = 1;
    if (paged_cuda_attention_decode(&a, items.get(), 1, 1, nullptr))
        return false;
    if (std::memcmp(last.get(), out.get() + (kNew - 1) * kHeads * D, sizeof(T) * kHeads * D))
        return false;

    std::vector<double> expected(out.size);
    auto at = [&](int position) {
        return static_cast<size_t>((blocks[position / kPage] * kPage + position % kPage) * D);
    };
    for (int row = 0; row < kNew; row++) {
        for (int head = 0; head < kHeads; head++) {
            const size_t mine = static_cast<size_t>(row * kHeads + head) * D;
            double total = 0.0;
            for (int position = 0; position <= kLength - kNew + row; position++) {
                double score = 0.0;
                for (int i = 0; i < D; i++)
                    score += number(q[mine + i]) * number(keys[at(position) + i]);
                const double weight = std::exp(score * scale);
                total += weight;
                for (int i = 0; i < D; i++)
                    expected[mine + i] += weight * number(values[at(position) + i]);
            }
            for (int i = 0; i < D; i++)
                expected[mine + i] /= total;
        }
    }
    return near(out, expected);
}

// ---- 4-bit products

template <class T, int kRows>
bool product() {
    constexpr int kN = 48, kK = 1024, kGroup = 64, kGroups = kK / kGroup;
    Buffer<uint32_t> codes(kN * kK / 8);
    for (size_t i = 0; i < codes.size; i++)
        codes[i] = static_cast<uint32_t>(generator());
    Buffer<T> scales(kGroups * kN), zeros(kGroups * kN), y(kRows * kN);
    for (size_t i = 0; i < scales.size; i++) {
        scales[i] = rounded<T>(0.01 * (1 + i % 7));
        zeros[i] = rounded<T>((kDtype<T> ? 128 : 1024) + static_cast<double>(i % 16));
    }
    auto x = normal<T>(kRows * kK), bias = normal<T>(kN);
    const PagedCodes w{codes.get(), scales.get(), zeros.get(), bias.get(), kN, kK, kGroup, kDtype<T>};
    // As codes.cuh describes the layout, written down once more.
    Buffer<T> numbers(kN * kK), dequantized(kN * kK);
    for (int n = 0; n < kN; n++) {
        for (int k = 0; k < kK; k++) {
            const int lane = n % 8 * 4 + k % 64 / 16, word = k % 16 / 4;
            const size_t at = ((static_cast<size_t>(k / 64) * (kN / 16) + n / 16) * 32 + lane) * 4 + word;
            const int nibble = (n % 16 / 8) * 2 + k % 4 / 2 + 4 * (k % 2);
            const double code = codes[at] >> (4 * nibble) & 15, bias = kDtype<T> ? 128 : 1024;
            const size_t group = static_cast<size_t>(k / kGroup * kN + n);
            numbers[n * kK + k] = rounded<T>((code - (number(zeros[group]) - bias)) * number(scales[group]));
        }
    }
    if (paged_cuda_w4a16_dequantize(&w, dequantized.get(), nullptr))
        return false;
    if (std::memcmp(numbers.get(), dequantized.get(), sizeof(T) * numbers.size))
        return false;
    Buffer<uint64_t> scratch(static_cast<size_t>(paged_cuda_w4a16_scratch(&w)) / 8);
    std::memset(scratch.get(), 0, scratch.size * 8);
    if (paged_cuda_w4a16(&w, y.get(), x.get(), kRows, scratch.get(), nullptr))
        return false;
    std::vector<double> expected(y.size);
    for (int row = 0; row < kRows; row++) {
        for (int n = 0; n < kN; n++) {
            double sum = number(bias[n]);
            for (int k = 0; k < kK; k++)
                sum += number(x[row * kK + k]) * number(numbers[n * kK + k]);
            expected[row * kN + n] = sum;
        }
    }
    return near(y, expected);
}

// ---- between the products

template <class T>
bool norm() {
    constexpr int kRows = 2, kFeatures = 2056;
    auto x = normal<T>(kRows * kFeatures), residual = normal<T>(kRows * kFeatures), weight = normal<T>(kFeatures);
    Buffer<T> out(x.size), sum(x.size);
    if (paged_cuda_rms_norm(
            out.get(), sum.get(), x.get(), residual.get(), weight.get(), kRows, kFeatures, 1e-5f, kDtype<T>, nullptr
        )) {
        return false;
    }
    std::vector<double> expected(x.size);
    for (int row = 0; row < kRows; row++) {
        double squares = 0.0;
        for (int i = 0; i < kFeatures; i++)
            squares += std::pow(number(sum[row * kFeatures + i]), 2);
        const double scale = 1.0 / std::sqrt(squares / kFeatures + 1e-5);
        for (int i = 0; i < kFeatures; i++) {
            const size_t at = static_cast<size_t>(row * kFeatures + i);
            if (number(sum[at]) != number(rounded<T>(number(x[at]) + number(residual[at]))))
                return false;
            expected[at] = number(sum[at]) * scale * number(weight[i]);
        }
    }
    return near(out, expected);
}

template <class T>
bool rope() {
    constexpr int kRows = 2, kHeads = 3, kKvHeads = 2, kDim = 80, kPage = 4, kHalf = kDim / 2,
                  kAll = kHeads + 2 * kKvHeads;
    auto qkv = normal<T>(kRows * kAll * kDim), q_norm = normal<T>(kDim), k_norm = normal<T>(kDim);
    Buffer<float> cos(8 * kHalf), sin(8 * kHalf);
    for (size_t i = 0; i < cos.size; i++) {
        cos[i] = std::cos(0.1f * static_cast<float>(i));
        sin[i] = std::sin(0.1f * static_cast<float>(i));
    }
    Buffer<int64_t> positions(kRows), slots(kRows);
    positions[0] = 7, positions[1] = 0, slots[0] = 6, slots[1] = 1;
    Buffer<T> q(kRows * kHeads * kDim), keys(2 * kKvHeads * kPage * kDim), values(keys.size);
    const PagedRope a{qkv.get(),    cos.get(), sin.get(),  positions.get(), slots.get(), q_norm.get(),
                      k_norm.get(), q.get(),   keys.get(), values.get(),    kRows,       kHeads,
                      kKvHeads,     kDim,      kPage,      kDtype<T>,       1e-6f};
    if (paged_cuda_rope_kv_write(&a, nullptr))
        return false;
    Buffer<T> got(kRows * kAll * kDim);
    std::vector<double> expected(got.size);
    for (int row = 0; row < kRows; row++) {
        for (int head = 0; head < kAll; head++) {
            const size_t from = static_cast<size_t>(row * kAll + head) * kDim;
            const int kv = (head - kHeads) % kKvHeads;
            const size_t in_cache =
                static_cast<size_t>((slots[row] / kPage * kKvHeads + kv) * kPage + slots[row] % kPage) * kDim;
            double squares = 0.0;
            for (int i = 0; i < kDim; i++)
                squares += std::pow(number(qkv[from + i]), 2);
            const bool is_rotated = head < kHeads + kKvHeads;
            const double scale = is_rotated ? 1.0 / std::sqrt(squares / kDim + 1e-6) : 1.0;
            auto normed = [&](int i) {
                const double weight = !is_rotated ? 1.0 : number(head < kHeads ? q_norm[i] : k_norm[i]);
                return number(qkv[from + i]) * scale * weight;
            };
            for (int i = 0; i < kDim; i++) {
                const size_t angle = static_cast<size_t>(positions[row] * kHalf + i % kHalf);
                const double other = i < kHalf ? -normed(i + kHalf) : normed(i - kHalf);
                expected[from + i] = is_rotated ? normed(i) * cos[angle] + other * sin[angle] : normed(i);
                got[from + i] =
                    head < kHeads ? q[(row * kHeads + head) * kDim + i] : (is_rotated ? keys : values)[in_cache + i];
            }
        }
    }
    return near(got, expected);
}

template <class T>
bool gated() {
    constexpr int kRows = 2, kFeatures = 2056;
    auto gate_up = normal<T>(kRows * 2 * kFeatures);
    Buffer<T> out(kRows * kFeatures);
    if (paged_cuda_gated(out.get(), gate_up.get(), kRows, kFeatures, 0, kDtype<T>, nullptr))
        return false;
    std::vector<double> expected(out.size);
    for (int row = 0; row < kRows; row++) {
        for (int i = 0; i < kFeatures; i++) {
            const double gate = number(gate_up[row * 2 * kFeatures + i]);
            expected[row * kFeatures + i] =
                gate / (1.0 + std::exp(-gate)) * number(gate_up[(row * 2 + 1) * kFeatures + i]);
        }
    }
    return near(out, expected);
}

struct Case {
    const char* name;
    bool (*run)();
};

const Case kCases[] = {
    {"attention-64", attention<__nv_bfloat16, 64>},
    {"attention-80", attention<__half, 80>},
    {"attention-256", attention<__half, 256>},
    {"product-3", product<__half, 3>},
    {"product-20", product<__nv_bfloat16, 20>},
    {"norm", norm<__half>},
    {"rope", rope<__nv_bfloat16>},
    {"gated", gated<__nv_bfloat16>},
    {"sample-race", sampling_check::race},
    {"sample-rivals", sampling_check::rivals},
    {"sample-sums", sampling_check::sums},
    {"sample-candidates", sampling_check::candidates},
    {"sample-changes", sampling_check::changes},
    {"sample-faults", sampling_check::faults},
    {"logprobs", sampling_check::logprobs},
};

}  // namespace

int main(int count, char** names) {
    int wrong = 0;
    for (const Case& one : kCases) {
        bool is_wanted = count == 1;
        for (int i = 1; i < count; i++)
            is_wanted |= std::string(names[i]) == one.name;
        if (!is_wanted)
            continue;
        const bool is_right = one.run();
        std::printf("%s: %s\n", one.name, is_right ? "right" : "WRONG");
        std::fflush(stdout);
        wrong += !is_right;
    }
#ifndef PAGED_ON_GPU
    std::printf("bank conflicts: %llu\n", static_cast<unsigned long long>(emulation::counters().bank_conflicts));
#endif
    return wrong != 0;
}
