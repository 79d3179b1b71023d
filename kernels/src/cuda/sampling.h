// The C interface of the sampler: which token each row of logits gives, and log-probabilities of given tokens. Pointers
// are to device memory, the rows too, so that a captured graph may be replayed with other contents. Functions return a
// CUDA error code, or -1 for a vocabulary that there is no kernel for.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Ids beyond the vocabulary are ignored. The order of what is done to a row is that of the CPU's sampler:
// penalties, bias, forbidden tokens, temperature, top_k, top_p, min_p.
typedef struct {
    int64_t logit_row;          // row of the logits
    double temperature;         // 0: greedy
    double top_p;               // 1: none
    double min_p;               // 0: none
    double repetition_penalty;  // 1: none
    double presence_penalty;    // 0: none
    double frequency_penalty;   // 0: none
    int64_t top_k;              // <= 0: none
    uint64_t seed;
    int64_t position;          // of the sampled token: tokens[0 .. position) are known
    int64_t sample_index;      // part of the random numbers' key
    const int32_t* tokens;     // [position]
    int64_t num_prompt;        // of the tokens
    int64_t min_tokens;        // `early` is forbidden while position - num_prompt < min_tokens
    const int64_t* forbidden;  // [num_forbidden]
    const int64_t* early;      // [num_early]
    const int64_t* bias_ids;   // [num_bias], each once
    const double* bias;
    const int64_t* bad_heads;  // [num_bad, bad_length], right-aligned, -1 fills the left
    const int64_t* bad_last;   // [num_bad]
    int64_t num_forbidden;
    int64_t num_early;
    int64_t num_bias;
    int64_t num_bad;
    int64_t bad_length;
    void* room;  // paged_cuda_sample_room bytes for each of min(vocabulary, position + num_bias) tokens, where
                 // penalties or a bias change logits; else null
} PagedSampleRow;

typedef struct {
    const float* logits;         // [any, vocab_size], `stride` elements from row to row
    const PagedSampleRow* rows;  // [num_rows]
    int64_t* tokens;             // [num_rows]
    int64_t* faults;  // [num_rows]: 0 none, 1 logits not finite, 2 nothing left to sample; the token is then 0
    int64_t stride;
    int32_t num_rows;
    int32_t vocab_size;
} PagedSample;

typedef struct {
    const float* logits;
    const int64_t* logit_rows;  // [num_rows]
    const int64_t* tokens;      // [num_rows]
    const int64_t* num_top;     // [num_rows]: alternatives, at most max_top
    double* logprobs;           // [num_rows]; NaN where the logits are not finite
    int64_t* ranks;             // [num_rows], 1 for the most probable
    int64_t* top_ids;           // [num_rows, max_top]
    double* top;                // [num_rows, max_top]
    int64_t stride;
    int32_t num_rows;
    int32_t vocab_size;
    int32_t max_top;  // at most 32
} PagedLogprobs;

int paged_cuda_sample_room(void);
int paged_cuda_sample_max_vocabulary(void);
int paged_cuda_sample(const PagedSample* a, void* stream);
int paged_cuda_logprobs(const PagedLogprobs* a, void* stream);

#ifdef __cplusplus
}
#endif
