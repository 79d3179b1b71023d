#include "gptq.hpp"

// Wider registers where the machine has them; what is computed stays the same, as nothing is fused or reordered.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define PAGED_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PAGED_WIDE
#endif
#define PAGED_INTO_CLONE inline __attribute__((always_inline))

namespace paged {

namespace {

// Columns at a time: their sums stay in registers.
constexpr int64_t WIDTH = 32;

// To nearest, ties to even, of what is far smaller than the mantissa.
PAGED_INTO_CLONE float nearest(float x) {
    constexpr float shift = 12582912.0f;  // 1.5 * 2^23
    return (x + shift) - shift;
}

PAGED_INTO_CLONE double nearest(double x) {
    constexpr double shift = 6755399441055744.0;  // 1.5 * 2^52
    return (x + shift) - shift;
}

// A weight in steps from its zero point.
template <class T>
PAGED_INTO_CLONE T steps_of(T weight, T scale, T zero, T top) {
    const T low = -zero, high = top - zero;
    T step = weight / scale;
    step = step > low ? step : low;  // not a number: the lowest
    return nearest(step < high ? step : high);
}

template <class T>
PAGED_INTO_CLONE void round_columns(const GptqStrip<T>& strip, int64_t first, int64_t width) {
    const T top = strip.top;
    for (int64_t i = 0; i < strip.features; i++) {
        T weights[WIDTH];
        const T* row = strip.state + i * strip.state_stride + first;
        for (int64_t j = 0; j < width; j++) {
            weights[j] = row[j];
        }
        for (int64_t earlier = 0; earlier < i; earlier++) {
            const T unit = strip.unit[earlier * strip.unit_stride + i];
            const T* error = strip.errors + earlier * strip.columns + first;
            for (int64_t j = 0; j < width; j++) {
                weights[j] -= unit * error[j];
            }
        }
        const T* __restrict scales = strip.scales + strip.groups[i] * strip.columns + first;
        const T* __restrict zeros = strip.zeros + strip.groups[i] * strip.columns + first;
        T* __restrict errors = strip.errors + i * strip.columns + first;
        uint8_t* __restrict codes = strip.codes + i * strip.columns + first;
        for (int64_t j = 0; j < width; j++) {
            const T step = steps_of(weights[j], scales[j], zeros[j], top);
            errors[j] = weights[j] - step * scales[j];
            codes[j] = static_cast<uint8_t>(static_cast<int32_t>(step + zeros[j]));
        }
    }
}

template <class T>
PAGED_INTO_CLONE void round_strip(const GptqStrip<T>& strip) {
    int64_t first = 0;
    for (; first + WIDTH <= strip.columns; first += WIDTH) {
        round_columns(strip, first, WIDTH);
    }
    if (first < strip.columns) {
        round_columns(strip, first, strip.columns - first);
    }
}

template <class T>
PAGED_INTO_CLONE T weighted_square(T weight, T scale, T zero, T top, T importance) {
    const T error = steps_of(weight, scale, zero, top) * scale - weight;
    return error * error * importance;
}

template <class T>
PAGED_INTO_CLONE void losses_of(const GptqGroups<T>& groups) {
    constexpr int64_t SUMS = 32;
    const T top = groups.top;
    for (int64_t r = 0; r < groups.rows; r++) {
        const T* row = groups.weights + r * groups.size;
        const T scale = groups.scales[r], zero = groups.zeros[r];
        T sums[SUMS] = {};
        int64_t k = 0;
        for (; k + SUMS <= groups.size; k += SUMS) {
            for (int64_t s = 0; s < SUMS; s++) {
                sums[s] += weighted_square(row[k + s], scale, zero, top, groups.importance[k + s]);
            }
        }
        for (int64_t s = 0; k < groups.size; k++, s++) {
            sums[s] += weighted_square(row[k], scale, zero, top, groups.importance[k]);
        }
        T total = 0;
        for (const T sum : sums) {
            total += sum;
        }
        groups.losses[r] = total;
    }
}

}  // namespace

PAGED_WIDE void gptq_losses(const GptqGroups<float>& groups) { losses_of(groups); }

PAGED_WIDE void gptq_losses(const GptqGroups<double>& groups) { losses_of(groups); }

PAGED_WIDE void gptq_strip(const GptqStrip<float>& strip) { round_strip(strip); }

PAGED_WIDE void gptq_strip(const GptqStrip<double>& strip) { round_strip(strip); }

}  // namespace paged
