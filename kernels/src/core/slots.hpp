// What the engine remembers of running sequences, slot by slot, and the arrays of a step made of it.
//
// A step's entries are added one by one; each continues the sequence of its slot. So a step is laid out by one pass
// over its entries, in memory that is there, and what is sampled is where the next step finds it.
//
//   token store, a row per slot | prompt ... sampled ... |      tables, a row per slot | 7 3 9 . |
//
// An entry computes only positions whose tokens are in the store and whose blocks are in the slot's table.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory.hpp"
#include "paged/kernels.h"
#include "pool.hpp"
#include "program.hpp"

namespace paged {

// `count` positions of a slot's sequence from `start` on; `samples`: the token after the last of them.
struct Entry {
    int64_t request, slot, start, count;
    bool samples;
};

// A token's log-probability, its rank and the `num_top` most probable tokens.
struct TokenScores {
    int64_t token, num_top, rank;
    double logprob;
    const int64_t* top_ids;
    const double* top;
};

class Slots {
public:
    struct Sizes {
        int64_t slots, max_model_len, block_size, vocab_size, max_top;
    };
    explicit Slots(const Sizes& sizes);

    void free(int64_t slot);
    // A sequence starts in a slot. `row` is its sampling, all but tokens, logit_row and position; `prompt_top`:
    // alternatives for prompt tokens whose logits are asked for.
    void admit(
        int64_t slot, const std::vector<int32_t>& tokens, const std::vector<int32_t>& table, const PagedSampleRow& row,
        int64_t prompt_top
    );
    void append_block(int64_t slot, int64_t block);

    // The entries of a new step; `offsets`: rows of the entry whose logits are wanted, ascending.
    void begin();
    void add(const Entry& entry, const std::vector<int64_t>& offsets);
    // Arrays of the entries added since `begin`, valid until the next one.
    const Batch& batch();

    // Kernel calls that read some of the step's rows of logits; they may run until `finish`.
    void read_logits(const PagedTable& table, const LogitPart& part, std::vector<Call>& calls);
    // Takes over what was sampled; of a whole step, after all its logits were read.
    void finish();

    // Of the finished step, by entry: the token, -1 where none was sampled; the fault of the sampler, or 0.
    const std::vector<int64_t>& tokens() const { return chosen_; }
    const std::vector<int64_t>& faults() const { return entry_faults_; }
    bool has_faults() const { return has_faults_; }
    bool has_scores() const { return has_scores_; }
    bool has_prompt() const { return !prompt_entries_.empty(); }
    // Entries and scores of sampled tokens whose scores are asked for, and of prompt tokens.
    std::vector<std::pair<int64_t, TokenScores>> scores() const;
    std::vector<std::pair<int64_t, TokenScores>> prompt_scores() const;

private:
    struct Slot {
        int64_t known = 0, blocks = 0, prompt_top = 0;
        bool used = false;
        PagedSampleRow row{};
    };
    // What one reading kernel writes, one element per row.
    struct Scores {
        std::vector<double> logprobs, top;
        std::vector<int64_t> ranks, top_ids;
        void resize(int64_t rows, int64_t max_top);
    };

    Slot& at(int64_t slot);
    void check(const Entry& entry, const Slot& slot) const;
    void add_rows(const Entry& entry);
    void add_logits(const Entry& entry, const Slot& slot, const std::vector<int64_t>& offsets);
    TokenScores scores_of(const Scores& from, int64_t row, int64_t token, int64_t num_top) const;
    void read_sampled(const PagedTable& table, const LogitPart& part, std::vector<Call>& calls);
    void read_prompt(const PagedTable& table, const LogitPart& part, std::vector<Call>& calls);
    int32_t* tokens_of(int64_t slot) { return store_ + slot * (sizes_.max_model_len + 1); }
    int32_t* table_of(int64_t slot) { return tables_ + slot * table_width_; }

    Sizes sizes_;
    int64_t table_width_;
    Memory store_memory_, table_memory_;
    int32_t *store_, *tables_;
    std::vector<Slot> slots_;

    std::vector<Entry> entries_;
    std::vector<int64_t> token_ids_, positions_, slot_mapping_, logit_rows_;
    std::vector<int32_t> query_start_, seq_lens_, block_table_;
    Batch batch_{};

    std::vector<PagedSampleRow> rows_;
    std::vector<int64_t> row_entries_, sampled_, sampled_faults_, chosen_, entry_faults_;
    Scores row_scores_;
    std::vector<int64_t> prompt_entries_, prompt_rows_, prompt_tokens_, prompt_tops_;
    Scores prompt_scores_;
    int64_t rows_read_ = 0, prompt_read_ = 0;
    // Parameters of the calls of one part.
    PagedSample sample_{};
    PagedLogprobs logprobs_{};
    bool has_faults_ = false, has_scores_ = false;
};

}  // namespace paged
