/*
 * The kernels of one instruction-set variant: parameters and the table of functions.
 *
 * A kernel does not know threads. It tells how many independent work items a call has, and computes items
 * [first, last) in any order and on any thread; items write disjoint outputs. Every output element is computed in an
 * order that depends on its own row only: neither on the other rows, nor on the range of items, nor on the block size.
 *
 * Rows are row-major with a stride in elements. Activations have the call's dtype. No kernel allocates; `scratch` is
 * 64-byte aligned memory of the thread, of `PAGED_SCRATCH_BYTES`, with nothing kept in it between calls.
 */
#ifndef PAGED_KERNELS_H
#define PAGED_KERNELS_H

#include "paged/quantized.h"
#include "paged/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PAGED_SCRATCH_BYTES (128 << 20)
/* Largest vocabulary that a sampling row fits the scratch with. */
#define PAGED_MAX_VOCABULARY (2048 * 1024)

/* Rows of a packed table by token id. Items: rows. */
typedef struct PagedEmbedding {
    const void* table;        /* packed [vocab_size, hidden_size] */
    const int64_t* token_ids; /* [rows]; checked by the caller to be within the vocabulary */
    void* out;                /* [rows, hidden_size] */
    int64_t rows, hidden_size, out_stride;
    int32_t dtype;
} PagedEmbedding;

/* out = x / sqrt(mean(x^2) + eps) * weight; with a residual, x + residual is rounded, stored and normed. Items: rows.
 */
typedef struct PagedNorm {
    const void* x;        /* [rows, features] */
    const void* residual; /* [rows, features] or null */
    const float* weight;  /* [features] */
    void* out;            /* [rows, features]; may be x */
    void* sum;            /* [rows, features], only with a residual; may be x or residual */
    int64_t rows, features, x_stride, residual_stride, out_stride, sum_stride;
    float eps;
    int32_t dtype;
} PagedNorm;

/* out = x @ weight.T + bias (+ residual); one chain over K for every output. Items: see `linear_items`. */
typedef struct PagedLinear {
    const void* x;        /* [rows, in_features] */
    const void* weight;   /* packed [out_features, in_features] of dtype */
    const float* bias;    /* [out_features] or null */
    const void* residual; /* [rows, out_features] of out_dtype or null; may be out; not with gated */
    void* out;            /* [rows, out_features] of out_dtype; gated: [rows, out_features / 2] */
    int64_t rows, in_features, out_features, x_stride, residual_stride, out_stride;
    int32_t dtype;
    int32_t out_dtype; /* dtype, or PAGED_F32 */
    int32_t gated;     /* 1: out = activation(first half of the outputs) * second half; out_features % 32 == 0 */
    int32_t activation;
} PagedLinear;

/* Norm (if any) and rotate the heads of q and k, write k and v to the cache. Items: rows. */
typedef struct PagedRope {
    const void* qkv;             /* [rows, (num_heads + 2 * num_kv_heads) * head_dim] */
    const int64_t* positions;    /* [rows] */
    const int64_t* slot_mapping; /* [rows], block * block_size + offset */
    const float* cos;            /* [max_positions, head_dim / 2] */
    const float* sin;            /* as cos */
    const float* q_norm;         /* [head_dim] or null */
    const float* k_norm;         /* [head_dim] or null */
    void* q;                     /* out [rows, num_heads * head_dim] */
    void* key;                   /* out [num_blocks, num_kv_heads, block_size, head_dim] */
    void* value;                 /* as key */
    int64_t rows, num_heads, num_kv_heads, head_dim, block_size, qkv_stride, q_stride;
    float norm_eps;
    int32_t dtype;
} PagedRope;

/* Rows of decodes that see the whole of one split in the very same blocks: those of `sequence`. */
typedef struct PagedSharedPart {
    int32_t sequence, split;
    int32_t first, count; /* its members, in PagedAttention.members */
} PagedSharedPart;

/*
 * Causal attention of the rows of several sequences over their cached keys. Rows of sequence i are query_start[i] to
 * query_start[i + 1] - 1 and stand at the last positions of its seq_lens[i] tokens.
 * Items: (tile of rows, kv head), listed in `tiles` by the caller once per step.
 *
 * What sequences share at their beginning can be computed before, once for all of them: `attention_shared` with
 * items (part of `shared`, kv head) gives their rows' parts of the first `shared_splits` splits.
 */
typedef struct PagedAttention {
    const void* q;              /* [rows, num_heads * head_dim] */
    const void* key;            /* [num_blocks, num_kv_heads, block_size, head_dim] */
    const void* value;          /* as key */
    const int32_t* block_table; /* [num_seqs, table_stride] */
    const int32_t* query_start; /* [num_seqs + 1] */
    const int32_t* seq_lens;    /* [num_seqs] */
    void* out;                  /* [rows, num_heads * head_dim] */
    int64_t rows, num_seqs, table_stride, num_heads, num_kv_heads, head_dim, block_size, q_stride, out_stride;
    int64_t window; /* a row at p sees p - window + 1 to p; 0: all up to p */
    float scale;
    int32_t dtype;
    const int64_t* tiles; /* [num_tiles] sequence << 32 | first row within the sequence */
    int64_t num_tiles;
    int64_t tile_rows; /* rows (tokens) of a tile at most */
    float* partial;    /* null, or room for the parts of long rows: see attention.cpp */
    int64_t num_splits;
    const PagedSharedPart* shared; /* [num_shared] or null */
    int64_t num_shared;
    const int32_t* members;       /* sequences of one row each, part by part; tile_rows to a part at most */
    const int32_t* shared_splits; /* [num_seqs] or null: how many of its first splits are in `shared` */
    float* shared_partial;        /* [num_seqs, num_heads, most_shared, head_dim + 2] */
    int64_t most_shared;
} PagedAttention;

/* out = activation(first half) * second half. Items: rows. */
typedef struct PagedGated {
    const void* gate_up; /* [rows, 2 * features] */
    void* out;           /* [rows, features] */
    int64_t rows, features, in_stride, out_stride;
    int32_t activation;
    int32_t dtype;
} PagedGated;

/* out = x + residual, rounded once. Items: rows. */
typedef struct PagedAdd {
    const void *x, *residual; /* [rows, features] */
    void* out;                /* [rows, features]; may be x or residual */
    int64_t rows, features, x_stride, residual_stride, out_stride;
    int32_t dtype;
} PagedAdd;

/* out[i] = x[rows[i]]. Items: rows. */
typedef struct PagedSelect {
    const void* x;            /* [any, features] */
    const int64_t* row_index; /* [rows] */
    void* out;                /* [rows, features] */
    int64_t rows, features, x_stride, out_stride;
    int32_t dtype;
} PagedSelect;

/* Rows row_offset to row_offset + rows - 1 of a packed weight, from a stored tensor. Items: blocks of 16 features. */
typedef struct PagedPack {
    const void* source;   /* [rows, in_features] of source_dtype, row-major, any alignment */
    const int64_t* order; /* [rows]: which row of the source comes where; null: as they lie */
    void* packed;         /* the whole packed weight, zeroed before the first part */
    int64_t rows, row_offset, in_features;
    int32_t source_dtype; /* any PagedDtype */
    int32_t dtype;        /* PAGED_F32 or PAGED_BF16 */
} PagedPack;

/* One row to sample, in the order of pagedcli.runtime.sampling_rows; all arrays may be null when their count is 0. */
typedef struct PagedSampleRow {
    int64_t logit_row;         /* row of the logits */
    double temperature;        /* 0: greedy */
    double top_p, min_p;       /* 1 and 0: none */
    double repetition_penalty; /* 1: none */
    double presence_penalty;   /* 0: none */
    double frequency_penalty;  /* 0: none */
    int64_t top_k;             /* <= 0: none */
    uint64_t seed;
    int64_t position; /* of the sampled token: tokens[0 .. position) are known */
    int64_t sample_index;
    const int32_t* tokens;    /* [position] */
    int64_t num_prompt;       /* of them prompt */
    int64_t min_tokens;       /* stop_ids are forbidden while position - num_prompt < min_tokens */
    const int32_t* allowed;   /* [num_allowed]; num_allowed < 0: all are */
    const int32_t* banned;    /* [num_banned] */
    const int32_t* stop_ids;  /* [num_stop_ids] */
    const int32_t* bias_ids;  /* [num_bias] */
    const double* bias;       /* [num_bias] */
    const int32_t* bad_heads; /* [num_bad, bad_length], right-aligned, -1 fills the left */
    const int32_t* bad_last;  /* [num_bad] */
    int64_t num_allowed, num_banned, num_stop_ids, num_bias, num_bad, bad_length;
    int64_t num_top; /* alternatives whose log-probabilities are wanted; < 0: no log-probabilities */
} PagedSampleRow;

/* Choose tokens. Items: rows. */
typedef struct PagedSample {
    const float* logits;        /* [any, vocab_size] */
    const PagedSampleRow* rows; /* [num_rows] */
    int64_t num_rows, vocab_size, logits_stride;
    int64_t max_top;  /* columns of top_ids and top; >= every num_top */
    int64_t* tokens;  /* [num_rows] */
    int64_t* faults;  /* [num_rows] 0 none, 1 logits not finite, 2 nothing left; the token is then 0 */
    double* logprobs; /* [num_rows], written where num_top >= 0 */
    int64_t* ranks;   /* [num_rows], 1 for the most probable */
    int64_t* top_ids; /* [num_rows, max_top] */
    double* top;      /* [num_rows, max_top] */
} PagedSample;

/* Log-probabilities of given tokens under the unchanged logits. Items: rows. */
typedef struct PagedLogprobs {
    const float* logits;       /* [any, vocab_size] */
    const int64_t* logit_rows; /* [num_rows] */
    const int64_t* tokens;     /* [num_rows] */
    const int64_t* num_top;    /* [num_rows] */
    int64_t num_rows, vocab_size, logits_stride, max_top;
    double* logprobs; /* [num_rows] */
    int64_t* ranks;   /* [num_rows] */
    int64_t* top_ids; /* [num_rows, max_top] */
    double* top;      /* [num_rows, max_top] */
} PagedLogprobs;

/* One kernel: the number of its items and the smallest number of them worth a claim, and the work. */
typedef struct PagedKernel {
    int64_t (*items)(const void* params);
    int64_t (*grain)(const void* params);
    void (*run)(const void* params, int64_t first, int64_t last, void* scratch);
} PagedKernel;

typedef struct PagedTable {
    int32_t abi_version;
    const char* isa; /* "portable", "avx2", "avx512", "avx512bf16", "amx", "neon", "neondot" */
    PagedKernel embedding, norm, linear, rope, attention, attention_shared, attention_join, gated, add, select, pack,
        sample, logprobs;
    /* Rows of an attention tile for a shape: depends on heads and head_dim only. */
    int64_t (*attention_tile_rows)(const PagedAttention* shape);
    PagedKernel prepare, quantized_linear, quantized_embedding, quantized_pack;
} PagedTable;

/* The one symbol that a variant library exports. */
typedef const PagedTable* (*PagedTableFunction)(void);

#ifdef __cplusplus
}
#endif
#endif
