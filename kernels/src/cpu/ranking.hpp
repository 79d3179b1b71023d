// The front of a ranking (value descending, ties to the lowest id) without sorting it all, and sums over a vocabulary.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#include "scratch.hpp"

namespace paged::PAGED_VARIANT {

struct Ranked {
    double value;
    int64_t id;
};

inline bool ranks_before(const Ranked& a, const Ranked& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

constexpr int64_t STRETCH = 64;

// At least `count` first of the ranking (all, if there are fewer), in order; returns how many. No tie is cut.
// `maxima`: room for count / STRETCH + 1 values; `out`: room for all.
inline int64_t front_of_ranking(const double* values, int64_t size, int64_t count, double* maxima, Ranked* out) {
    const int64_t stretches = (size + STRETCH - 1) / STRETCH;
    double threshold = -INFINITY;
    if (count < stretches) {
        // The count-th greatest of the stretches' maxima: at least so many values reach it.
        for (int64_t s = 0; s < stretches; s++) {
            double best = -INFINITY;
            for (int64_t i = s * STRETCH; i < std::min(size, (s + 1) * STRETCH); i++) {
                best = values[i] > best ? values[i] : best;
            }
            maxima[s] = best;
        }
        double* nth = maxima + stretches;
        std::memcpy(nth, maxima, static_cast<size_t>(stretches) * sizeof(double));
        std::nth_element(nth, nth + count - 1, nth + stretches, std::greater<double>());
        threshold = nth[count - 1];
    }
    int64_t found = 0;
    for (int64_t s = 0; s < stretches; s++) {
        if (count < stretches && maxima[s] < threshold) {
            continue;
        }
        for (int64_t i = s * STRETCH; i < std::min(size, (s + 1) * STRETCH); i++) {
            if (values[i] >= threshold) {
                out[found++] = {values[i], i};
            }
        }
    }
    std::sort(out, out + found, ranks_before);
    return found;
}

// Sum as a tree of one shape for a size, as paged_kernels/sampling.py has it; `values` are overwritten.
inline double tree_sum(double* values, int64_t size) {
    while (size > 1) {
        const int64_t half = (size + 1) / 2;
        for (int64_t i = 0; i < size - half; i++) {
            values[i] += values[half + i];
        }
        size = half;
    }
    return values[0];
}

// Inclusive prefix sums by doubling shifts, as there; `other` is room of the same size. The result is in `values`.
inline void running_sum(double* values, double* other, int64_t size) {
    for (int64_t shift = 1; shift < size; shift *= 2) {
        std::memcpy(other, values, static_cast<size_t>(size) * sizeof(double));
        for (int64_t i = shift; i < size; i++) {
            values[i] = other[i] + other[i - shift];
        }
    }
}

// exp of values at most 0, to 1 or 2 ulp; 0 below -708. Written for the vectorizer: no branch, no call.
inline void exp_all(const double* values, double shift, double* out, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        const double x = values[i] - shift;
        const double inside = x < -708.0 ? -708.0 : x;
        const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number
        const double shifted = inside * 1.4426950408889634074 + magic;
        const double n = shifted - magic;
        double r = inside - n * 6.93145751953125e-1;
        r -= n * 1.42860682030941723212e-6;
        // Taylor's series to r^13, |r| <= ln(2) / 2: its remainder is below 2^-57.
        double p = 1.0 / 6227020800.0;
        p = p * r + 1.0 / 479001600.0;
        p = p * r + 1.0 / 39916800.0;
        p = p * r + 1.0 / 3628800.0;
        p = p * r + 1.0 / 362880.0;
        p = p * r + 1.0 / 40320.0;
        p = p * r + 1.0 / 5040.0;
        p = p * r + 1.0 / 720.0;
        p = p * r + 1.0 / 120.0;
        p = p * r + 1.0 / 24.0;
        p = p * r + 1.0 / 6.0;
        p = p * r + 0.5;
        p = p * r * r + r + 1.0;
        int64_t bits, power;
        std::memcpy(&bits, &p, 8);
        std::memcpy(&power, &shifted, 8);
        bits += power << 52;
        double result;
        std::memcpy(&result, &bits, 8);
        out[i] = x < -708.0 ? 0.0 : result;
    }
}

}  // namespace paged::PAGED_VARIANT
