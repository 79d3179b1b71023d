#include "slots.hpp"

#include <algorithm>
#include <cmath>

#include "error.hpp"

namespace paged {

namespace {

constexpr int64_t NO_TOKEN = -1, NOT_FINITE = 1;
// Blocks by which the step's table grows, so that its width seldom changes.
constexpr int64_t TABLE_STEP = 16;

std::string text(int64_t number) { return std::to_string(number); }
std::string text(const char* words) { return words; }

// What the scheduler promises; a message is made only where it was not kept.
template <class... Parts>
void promise(bool kept, const Parts&... parts) {
    if (!kept) {
        throw Broken((std::string() + ... + text(parts)));
    }
}

Memory zeros(int64_t count) { return Memory(static_cast<size_t>(count) * sizeof(int32_t), false); }

int32_t* numbers(const Memory& memory) { return reinterpret_cast<int32_t*>(memory.data()); }

}  // namespace

// The store has one place more than the longest sequence: the token after the last position may be sampled, never
// computed.
Slots::Slots(const Sizes& sizes)
    : sizes_(sizes),
      table_width_((sizes.max_model_len + sizes.block_size - 1) / sizes.block_size),
      store_memory_(zeros(sizes.slots * (sizes.max_model_len + 1))),
      table_memory_(zeros(sizes.slots * table_width_)),
      store_(numbers(store_memory_)),
      tables_(numbers(table_memory_)),
      slots_(static_cast<size_t>(sizes.slots)) {}

Slots::Slot& Slots::at(int64_t slot) {
    promise(slot >= 0 && slot < sizes_.slots, "slot ", slot, " of ", sizes_.slots);
    return slots_[static_cast<size_t>(slot)];
}

void Slots::free(int64_t slot) { at(slot) = Slot{}; }

void Slots::admit(
    int64_t slot, const std::vector<int32_t>& tokens, const std::vector<int32_t>& table, const PagedSampleRow& row,
    int64_t prompt_top
) {
    Slot& state = at(slot);
    const auto count = static_cast<int64_t>(tokens.size()), blocks = static_cast<int64_t>(table.size());
    promise(
        count >= 1 && count <= sizes_.max_model_len && blocks <= table_width_, "slot ", slot, ": ", count,
        " tokens in ", blocks, " blocks"
    );
    for (int32_t token : tokens) {  // the kernels trust the ids that they look up
        promise(token >= 0 && token < sizes_.vocab_size, "slot ", slot, ": ids beyond the vocabulary");
    }
    std::copy(tokens.begin(), tokens.end(), tokens_of(slot));
    std::copy(table.begin(), table.end(), table_of(slot));
    state = {count, blocks, prompt_top, true, row};
    state.row.tokens = tokens_of(slot);
}

void Slots::append_block(int64_t slot, int64_t block) {
    Slot& state = at(slot);
    promise(state.blocks < table_width_, "slot ", slot, ": more blocks than its table has");
    table_of(slot)[state.blocks++] = static_cast<int32_t>(block);
}

void Slots::begin() {
    for (std::vector<int64_t>* all :
         {&token_ids_, &positions_, &slot_mapping_, &logit_rows_, &row_entries_, &prompt_entries_, &prompt_rows_,
          &prompt_tokens_, &prompt_tops_}) {
        all->clear();
    }
    entries_.clear();
    rows_.clear();
    seq_lens_.clear();
    query_start_.assign(1, 0);
    rows_read_ = prompt_read_ = 0;
    has_faults_ = has_scores_ = false;
}

void Slots::check(const Entry& entry, const Slot& slot) const {
    const int64_t end = entry.start + entry.count;
    promise(entry.count >= 1 && entry.start >= 0, "request ", entry.request, ": an empty entry");
    const bool fits = slot.used && end <= slot.blocks * sizes_.block_size && end <= sizes_.max_model_len;
    promise(fits, "request ", entry.request, ": beyond its table");
    promise(end <= slot.known, "request ", entry.request, ": a position without a token");
    promise(!entry.samples || end == slot.known, "request ", entry.request, ": samples too early");
}

void Slots::add(const Entry& entry, const std::vector<int64_t>& offsets) {
    Slot& slot = at(entry.slot);
    check(entry, slot);
    add_logits(entry, slot, offsets);
    add_rows(entry);
    slot.known += entry.samples;
    entries_.push_back(entry);
}

void Slots::add_rows(const Entry& entry) {
    const int32_t *tokens = tokens_of(entry.slot), *table = table_of(entry.slot);
    int64_t block = entry.start / sizes_.block_size, offset = entry.start % sizes_.block_size;
    for (int64_t position = entry.start; position < entry.start + entry.count; position++) {
        token_ids_.push_back(tokens[position]);
        positions_.push_back(position);
        slot_mapping_.push_back(table[block] * sizes_.block_size + offset);
        if (++offset == sizes_.block_size) {
            block++;
            offset = 0;
        }
    }
    query_start_.push_back(static_cast<int32_t>(token_ids_.size()));
    seq_lens_.push_back(static_cast<int32_t>(entry.start + entry.count));
}

// Rows that predict a prompt token, and the row that is sampled from.
void Slots::add_logits(const Entry& entry, const Slot& slot, const std::vector<int64_t>& offsets) {
    const int64_t first_row = query_start_.back(), number = static_cast<int64_t>(entries_.size());
    for (int64_t offset : offsets) {
        promise(offset >= 0 && offset < entry.count, "request ", entry.request, ": logits of no row");
        const int64_t position = entry.start + offset + 1, logit_row = static_cast<int64_t>(logit_rows_.size());
        if (position < slot.row.num_prompt) {
            prompt_entries_.push_back(number);
            prompt_rows_.push_back(logit_row);
            prompt_tokens_.push_back(tokens_of(entry.slot)[position]);
            prompt_tops_.push_back(std::min(slot.prompt_top, sizes_.max_top));
        } else if (entry.samples && offset == entry.count - 1) {
            rows_.push_back(slot.row);
            rows_.back().logit_row = logit_row;
            rows_.back().position = position;
            row_entries_.push_back(number);
            has_scores_ = has_scores_ || slot.row.num_top >= 0;
        }
        logit_rows_.push_back(first_row + offset);
    }
}

const Batch& Slots::batch() {
    int64_t width = 1;
    for (int32_t length : seq_lens_) {
        width = std::max<int64_t>(width, (length + sizes_.block_size - 1) / sizes_.block_size);
    }
    width = (width + TABLE_STEP - 1) / TABLE_STEP * TABLE_STEP;
    block_table_.resize(static_cast<size_t>(width) * entries_.size());
    for (size_t i = 0; i < entries_.size(); i++) {
        const int64_t used = (seq_lens_[i] + sizes_.block_size - 1) / sizes_.block_size;
        std::copy_n(table_of(entries_[i].slot), used, block_table_.begin() + static_cast<int64_t>(i) * width);
    }
    batch_ = {
        token_ids_.data(),
        positions_.data(),
        slot_mapping_.data(),
        query_start_.data(),
        seq_lens_.data(),
        block_table_.data(),
        logit_rows_.data(),
        static_cast<int64_t>(token_ids_.size()),
        static_cast<int64_t>(entries_.size()),
        width,
        static_cast<int64_t>(logit_rows_.size()),
    };
    const auto sampled = static_cast<int64_t>(rows_.size());
    sampled_.assign(rows_.size(), 0);
    sampled_faults_.assign(rows_.size(), 0);
    row_scores_.resize(has_scores_ ? sampled : 0, sizes_.max_top);
    prompt_scores_.resize(static_cast<int64_t>(prompt_rows_.size()), sizes_.max_top);
    return batch_;
}

void Slots::Scores::resize(int64_t rows, int64_t max_top) {
    logprobs.resize(static_cast<size_t>(rows));
    ranks.resize(static_cast<size_t>(rows));
    top.resize(static_cast<size_t>(rows * max_top));
    top_ids.resize(static_cast<size_t>(rows * max_top));
}

void Slots::read_logits(const PagedTable& table, const LogitPart& part, std::vector<Call>& calls) {
    read_sampled(table, part, calls);
    read_prompt(table, part, calls);
}

void Slots::read_sampled(const PagedTable& table, const LogitPart& part, std::vector<Call>& calls) {
    const int64_t first = rows_read_, all = static_cast<int64_t>(rows_.size());
    while (rows_read_ < all && rows_[static_cast<size_t>(rows_read_)].logit_row < part.first + part.count) {
        rows_[static_cast<size_t>(rows_read_++)].logit_row -= part.first;
    }
    if (rows_read_ == first) {
        return;
    }
    const int64_t scores = has_scores_ ? first : 0;
    sample_ = {
        part.logits,
        rows_.data() + first,
        rows_read_ - first,
        sizes_.vocab_size,
        part.stride,
        sizes_.max_top,
        sampled_.data() + first,
        sampled_faults_.data() + first,
        row_scores_.logprobs.data() + scores,
        row_scores_.ranks.data() + scores,
        row_scores_.top_ids.data() + scores * sizes_.max_top,
        row_scores_.top.data() + scores * sizes_.max_top,
    };
    calls.push_back({&table.sample, &sample_});
}

void Slots::read_prompt(const PagedTable& table, const LogitPart& part, std::vector<Call>& calls) {
    const int64_t first = prompt_read_, all = static_cast<int64_t>(prompt_rows_.size());
    while (prompt_read_ < all && prompt_rows_[static_cast<size_t>(prompt_read_)] < part.first + part.count) {
        prompt_rows_[static_cast<size_t>(prompt_read_++)] -= part.first;
    }
    if (prompt_read_ == first) {
        return;
    }
    logprobs_ = {
        part.logits,
        prompt_rows_.data() + first,
        prompt_tokens_.data() + first,
        prompt_tops_.data() + first,
        prompt_read_ - first,
        sizes_.vocab_size,
        part.stride,
        sizes_.max_top,
        prompt_scores_.logprobs.data() + first,
        prompt_scores_.ranks.data() + first,
        prompt_scores_.top_ids.data() + first * sizes_.max_top,
        prompt_scores_.top.data() + first * sizes_.max_top,
    };
    calls.push_back({&table.logprobs, &logprobs_});
}

void Slots::finish() {
    chosen_.assign(entries_.size(), NO_TOKEN);
    entry_faults_.assign(entries_.size(), 0);
    for (size_t i = 0; i < rows_.size(); i++) {
        const auto number = static_cast<size_t>(row_entries_[i]);
        // Even a token that is none has a place: a plan that was made ahead may compute it before its request is ended.
        tokens_of(entries_[number].slot)[rows_[i].position] = static_cast<int32_t>(sampled_[i]);
        entry_faults_[number] = sampled_faults_[i];
        has_faults_ = has_faults_ || sampled_faults_[i] != 0;
        chosen_[number] = sampled_faults_[i] == 0 ? sampled_[i] : NO_TOKEN;
    }
    for (size_t i = 0; i < prompt_entries_.size(); i++) {
        if (std::isnan(prompt_scores_.logprobs[i])) {
            const auto number = static_cast<size_t>(prompt_entries_[i]);
            entry_faults_[number] = NOT_FINITE;
            chosen_[number] = NO_TOKEN;
            has_faults_ = true;
        }
    }
}

TokenScores Slots::scores_of(const Scores& from, int64_t row, int64_t token, int64_t num_top) const {
    const auto at = static_cast<size_t>(row);
    return {
        token,
        num_top,
        from.ranks[at],
        from.logprobs[at],
        from.top_ids.data() + row * sizes_.max_top,
        from.top.data() + row * sizes_.max_top,
    };
}

std::vector<std::pair<int64_t, TokenScores>> Slots::scores() const {
    std::vector<std::pair<int64_t, TokenScores>> all;
    for (size_t i = 0; i < rows_.size(); i++) {
        if (rows_[i].num_top >= 0) {
            const auto row = static_cast<int64_t>(i);
            all.emplace_back(row_entries_[i], scores_of(row_scores_, row, sampled_[i], rows_[i].num_top));
        }
    }
    return all;
}

std::vector<std::pair<int64_t, TokenScores>> Slots::prompt_scores() const {
    std::vector<std::pair<int64_t, TokenScores>> all;
    for (size_t i = 0; i < prompt_entries_.size(); i++) {
        const auto row = static_cast<int64_t>(i);
        all.emplace_back(prompt_entries_[i], scores_of(prompt_scores_, row, prompt_tokens_[i], prompt_tops_[i]));
    }
    return all;
}

}  // namespace paged
