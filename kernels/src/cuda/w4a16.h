// The C interface of matrix products with 4-bit weights: y[M, N] = x[M, K] @ w[N, K]^T + bias, w = scale * (code -
// zero) rounded to the activations' type, with a scale and a zero for each output and group of K. Pointers are to
// device memory; functions return a CUDA error code, or -1 for a shape that there is no kernel for: K a multiple of 64,
// N of 16, the group a multiple of 16 that divides K.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const uint32_t* codes;  // packed by `paged_kernels.cuda_pack`: [K / 64, N / 16, 32 lanes, 4 words]
    const void* scales;     // [K / group, N]
    const void* zeros;      // [K / group, N]: the code that means 0 plus the type's bias (1024 or 128)
    const void* bias;       // [N] or null
    int32_t n;
    int32_t k;
    int32_t group;
    int32_t dtype;  // 0 float16, 1 bfloat16
} PagedCodes;

// Up to paged_cuda_w4a16_max_rows rows. `scratch`: paged_cuda_w4a16_scratch bytes, zero before the first call and left
// so that the next call can use it.
int paged_cuda_w4a16(const PagedCodes* w, void* y, const void* x, int32_t m, void* scratch, void* stream);
int64_t paged_cuda_w4a16_scratch(const PagedCodes* w);
int32_t paged_cuda_w4a16_max_rows(void);

// The weights as numbers, [N, K], for more rows and a dense product.
int paged_cuda_w4a16_dequantize(const PagedCodes* w, void* out, void* stream);

// out[r, i] = x[r, order[i]]: the activations of a weight whose inputs were reordered (GPTQ's act-order).
int paged_cuda_columns(
    void* out, const void* x, const int32_t* order, int32_t num_rows, int32_t features, void* stream
);

#ifdef __cplusplus
}
#endif
