// The inner steps of GPTQ. Without fused multiply-adds: the same bits on every machine.
#pragma once

#include <cstdint>

namespace paged {

// Features of one strip, in the order of work, each a row of `columns` weights (one for each output).
template <class T>
struct GptqStrip {
    const T* state;         // [features, columns], rows `state_stride` apart: weights with all errors of earlier strips
    const T* unit;          // [features, features], rows `unit_stride` apart: U_ij / U_ii
    const T* scales;        // [groups, columns]
    const T* zeros;         // [groups, columns]
    const int64_t* groups;  // [features]
    T* errors;              // [features, columns]
    uint8_t* codes;         // [features, columns]
    int64_t features, columns, state_stride, unit_stride;
    T top;  // the largest code, at most 255
};

// Rounds one feature after the other; the error of each is taken from the later ones of the strip.
void gptq_strip(const GptqStrip<float>& strip);
void gptq_strip(const GptqStrip<double>& strip);

// Groups of weights, each row with a grid of its own.
template <class T>
struct GptqGroups {
    const T* weights;     // [rows, size]
    const T* scales;      // [rows]
    const T* zeros;       // [rows]
    const T* importance;  // [size]
    T* losses;            // [rows]
    int64_t rows, size;
    T top;
};

// The squared error of rounding each row, features weighted by their importance; over 32 features side by side.
void gptq_losses(const GptqGroups<float>& groups);
void gptq_losses(const GptqGroups<double>& groups);

}  // namespace paged
