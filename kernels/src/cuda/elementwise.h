// The C interface of the ops between the matrix products. Pointers are to device memory; rows are contiguous; `dtype`
// is 0 for float16 and 1 for bfloat16. Functions return a CUDA error code, or -1 for a shape that there is no kernel
// for: features are multiples of 8, and the halves of a rotated head too.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// out[i] = table[ids[i]]; also picks rows of activations.
int paged_cuda_rows(
    void* out, const void* table, const int64_t* ids, int32_t num_rows, int32_t features, int32_t dtype, void* stream
);

// RMS norm of each row in float32, rounded once. With `residual`, x + residual is rounded, stored in `sum` (which may
// be x or residual) and normed.
int paged_cuda_rms_norm(
    void* out, void* sum, const void* x, const void* residual, const void* weight, int32_t num_rows, int32_t features,
    float eps, int32_t dtype, void* stream
);

// activation(first half) * second half: [rows, 2 features] -> [rows, features]; 0 silu, 1 gelu, 2 gelu by tanh.
int paged_cuda_gated(
    void* out, const void* gate_up, int32_t num_rows, int32_t features, int32_t activation, int32_t dtype, void* stream
);

// out = x + y, elements a multiple of 8; out may be x or y.
int paged_cuda_add(void* out, const void* x, const void* y, int64_t elements, int32_t dtype, void* stream);

typedef struct {
    const void* qkv;   // [rows, (num_heads + 2 num_kv_heads) head_dim]
    const float* cos;  // [max_positions, head_dim / 2]
    const float* sin;
    const int64_t* positions;  // [rows]
    const int64_t* slots;      // [rows]: block * block_size + offset
    const void* q_norm;        // [head_dim], with k_norm, or both null
    const void* k_norm;
    void* q;     // [rows, num_heads head_dim]
    void* keys;  // [num_blocks, num_kv_heads, block_size, head_dim]
    void* values;
    int32_t num_rows;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;  // 64, 80, 96, 128, 256
    int32_t block_size;
    int32_t dtype;
    float eps;
} PagedRope;

// Norms (if any) and rotates q and k, writes k and v into the cache.
int paged_cuda_rope_kv_write(const PagedRope* a, void* stream);

#ifdef __cplusplus
}
#endif
