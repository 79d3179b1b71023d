/*
 * Quantized weights: their packed layout, and the kernels that make and use them.
 *
 * A weight is w[n][k] = scale[n][g] * (code[n][k] - zero[n][g]), or scale * code + offset, where g = k / group_size and
 * codes have 4 or 8 bits. `depth` is in_features padded to a multiple of PAGED_QUANTIZED_K; `columns` may put the input
 * features into any order (act-order), and may leave gaps so that odd groups begin at a multiple of 16.
 *
 *   codes, 8 bits   [N / 16][depth / 4][16][4]   the four bytes of a lane are four k of one output feature
 *   codes, 4 bits   [N / 16][depth / 8][16][4]   low nibbles k 0 to 3, high nibbles k 4 to 7
 *   scales          [N / 16][groups][16]         float, or half where all of a weight's scales are exact halves
 *   zeros           [N / 16][groups][16]         uint8 zero points (at most 127 with 4 bits), or float offsets
 *
 *   8 bits, a line of 64 bytes:   n0k0 n0k1 n0k2 n0k3 | n1k0 ... | ... n15k3    sixteen of them are one AMX tile
 *
 * Products with int8 rows: rows are quantized in blocks, a group of the weight or 128 features of it, whichever is
 * less, x = scale * q with |q| <= 127. A block's sum of products is an exact integer, the same however it is computed;
 * the blocks' sums are scaled and added in order in float. Products with float and bfloat16 rows: the weight is
 * dequantized in float, rounded to bfloat16 for those, and multiplied as a dense one is.
 */
#ifndef PAGED_QUANTIZED_H
#define PAGED_QUANTIZED_H

#include "paged/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Input features are padded to a multiple of this. */
#define PAGED_QUANTIZED_K 64
/* Features of a row that share a scale, at most. */
#define PAGED_INT8_BLOCK 128

/* What rows are before they meet a quantized weight. */
typedef enum PagedRowKind { PAGED_ROW_F32 = 0, PAGED_ROW_BF16 = 1, PAGED_ROW_INT8 = 2 } PagedRowKind;

typedef struct PagedQuantizedWeight {
    const uint8_t* codes;
    const void* scales;
    const void* zeros;
    int64_t out_features, depth;
    int64_t group_size;    /* a multiple of 16; at least depth: one group */
    int32_t bits;          /* 4 or 8 */
    int32_t half_scales;   /* 1: halves, 0: floats */
    int32_t float_offsets; /* 1: float offsets, 0: uint8 zero points */
} PagedQuantizedWeight;

/*
 * Rows as a quantized weight wants them: in its order of features, padded with zeros, quantized. Items: rows.
 *
 *   int8 row:   q [depth] int8 | scales [blocks] float | sums of the block's q [blocks] float
 */
typedef struct PagedPrepare {
    const void* x;          /* [rows, in_features] of dtype */
    const int32_t* columns; /* [depth] the feature that comes there, -1: none; or null: as they lie */
    void* out;              /* [rows, depth] of kind */
    int64_t rows, in_features, depth, group_size;
    int64_t x_stride;   /* elements */
    int64_t out_stride; /* bytes */
    int32_t dtype, kind;
} PagedPrepare;

/* out = x @ weight.T + bias (+ residual), or gated, as PagedLinear. Items: blocks of outputs for groups of rows. */
typedef struct PagedQuantizedLinear {
    const void* x; /* prepared rows */
    const PagedQuantizedWeight* weight;
    const float* bias;    /* [out_features] or null */
    const void* residual; /* [rows, out_features] of out_dtype or null; may be out; not with gated */
    void* out;            /* [rows, out_features] of out_dtype; gated: [rows, out_features / 2] */
    int64_t rows;
    int64_t x_stride; /* bytes */
    int64_t residual_stride, out_stride;
    int32_t kind; /* of x */
    int32_t out_dtype;
    int32_t gated, activation;
} PagedQuantizedLinear;

/* Dequantized rows of a table by token id, rounded to dtype. Items: rows. */
typedef struct PagedQuantizedEmbedding {
    const PagedQuantizedWeight* table;
    const int64_t* token_ids;
    void* out;
    int64_t rows, hidden_size, out_stride;
    int32_t dtype;
} PagedQuantizedEmbedding;

/* Rows row_offset to row_offset + rows - 1 of a packed weight. Items: blocks of 16 output features. */
typedef struct PagedQuantizedPack {
    const uint8_t* source;      /* [rows, in_features] one code a byte */
    const float* source_scales; /* [rows, groups] */
    const void* source_zeros;   /* [rows, groups] uint8 zero points or float offsets, as packed */
    const int32_t* columns;     /* as in PagedPrepare */
    uint8_t* codes;             /* all zeroed before the first part */
    void* scales;
    void* zeros;
    int64_t rows, row_offset, in_features, depth;
    int64_t groups, packed_groups; /* of a stored row and, at least as many, of a packed one */
    int32_t bits, half_scales, float_offsets;
} PagedQuantizedPack;

#ifdef __cplusplus
}
#endif
#endif
