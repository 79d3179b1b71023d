// What each file of a variant contributes to its table.
#pragma once

#include "paged/kernels.h"

namespace paged::PAGED_VARIANT {

extern const PagedKernel EMBEDDING, NORM, LINEAR, ROPE, ATTENTION, ATTENTION_SHARED, ATTENTION_JOIN, GATED, ADD, SELECT,
    PACK, SAMPLE, LOGPROBS, PREPARE, QUANTIZED_LINEAR, QUANTIZED_EMBEDDING, QUANTIZED_PACK;

int64_t attention_tile_rows(const PagedAttention* shape);

// A PagedKernel from functions on a typed struct.
template <
    class P, int64_t (*Items)(const P&), int64_t (*Grain)(const P&), void (*Run)(const P&, int64_t, int64_t, void*)>
constexpr PagedKernel kernel() {
    return {
        [](const void* params) { return Items(*static_cast<const P*>(params)); },
        [](const void* params) { return Grain(*static_cast<const P*>(params)); },
        [](const void* params, int64_t first, int64_t last, void* scratch) {
            Run(*static_cast<const P*>(params), first, last, scratch);
        },
    };
}

}  // namespace paged::PAGED_VARIANT
