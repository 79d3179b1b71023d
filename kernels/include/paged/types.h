/* What every part of the kernels shares: element types, weight layouts, the ABI's version. Plain C, no torch, no
 * Python. */
#ifndef PAGED_TYPES_H
#define PAGED_TYPES_H

#include <stdint.h>

/* Raised by every change of a struct or of a function's meaning; a variant library of another version is refused. */
#define PAGED_ABI_VERSION 4

#ifdef __cplusplus
extern "C" {
#endif

/* Element types. Activations, packed weights and KV are float32 or bfloat16; the others are only read when packing. */
typedef enum PagedDtype {
    PAGED_F32 = 0,
    PAGED_BF16 = 1,
    PAGED_F16 = 2,
    PAGED_F64 = 3,
    /* Blocks of 32 elements as GGUF files have them: a float16 scale, in Q4_1 the least value too, then the codes. */
    PAGED_Q4_0 = 4,
    PAGED_Q4_1 = 5,
    PAGED_Q8_0 = 6
} PagedDtype;

typedef enum PagedActivation {
    PAGED_SILU = 0,
    PAGED_GELU = 1,     /* by erf */
    PAGED_GELU_TANH = 2 /* by tanh */
} PagedActivation;

/* Output features of one packed block, on every machine. */
#define PAGED_BLOCK_N 16
/* Input features are padded with zeros to a multiple of this (one AMX tile). */
#define PAGED_BLOCK_K 32
/* Tokens of one attention tile and of one split, at absolute positions whatever the block size. */
#define PAGED_TILE_TOKENS 16
#define PAGED_SPLIT_TOKENS 256

/*
 * Packed weights of out_features x in_features, one layout for all variants. N and K are padded with zeros.
 *
 *   bfloat16   [N / 16][K / 2][16][2]      the pair (k, k + 1) of one output feature lies together
 *   float32    [N / 16][K][16]
 *
 *   block of 16 output features, bfloat16:   k pair 0 | n0k0 n0k1 n1k0 n1k1 ... n15k0 n15k1 |   64 bytes
 *                                            k pair 1 | n0k2 n0k3 ...
 *
 * Embedding tables are packed the same way (output feature = token id), so that a tied head is the same memory.
 */

#ifdef __cplusplus
}
#endif
#endif
