// The C interface of paged attention. Pointers are to device memory; functions return a CUDA error code, or -1 for a
// shape that there is no kernel for. `dtype` is 0 for float16 and 1 for bfloat16.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const void* q;             // [rows, num_heads, head_dim]
    const void* keys;          // [num_blocks, num_kv_heads, block_size, head_dim]
    const void* values;        // as keys
    const int32_t* blocks;     // [sequences, max_blocks]
    const int32_t* row_start;  // [sequences + 1]: first row of each sequence in the batch
    const int32_t* lengths;    // [sequences]: tokens whose keys exist, the batch's own included
    void* out;                 // [rows, num_heads, head_dim]
    float* partial;            // decode: [items, num_heads, num_splits, head_dim + 2]
    int32_t max_blocks;
    int32_t block_size;  // 1 to 256
    int32_t num_heads;
    int32_t num_kv_heads;  // divides num_heads
    int32_t head_dim;      // 64, 80, 96, 128, 256
    int32_t dtype;
    int32_t window;      // a row sees this many positions, its own included; 0: all before it
    int32_t split;       // tokens, a multiple of 32; equal in all calls that are to agree
    int32_t num_splits;  // decode: room in `partial`; split * num_splits covers every length
    float scale;
} PagedAttention;

// Sequences with one row each: `items[i]` is the sequence. `parallel` says how many thread blocks share the splits of
// a head, for speed alone.
int paged_cuda_attention_decode(
    const PagedAttention* a, const int32_t* items, int32_t num_items, int32_t parallel, void* stream
);

// Rows of any number of sequences: tile i holds the rows of sequence `tiles[2 i]` from its row-and-head
// `tiles[2 i + 1]` on, counted as token * group + head in the group; see paged_cuda_attention_tile_rows.
int paged_cuda_attention_prefill(const PagedAttention* a, const int32_t* tiles, int32_t num_tiles, void* stream);

// Rows-and-heads in a tile of prefill; 0: no kernel for this head size.
int paged_cuda_attention_tile_rows(int32_t head_dim);

#ifdef __cplusplus
}
#endif
