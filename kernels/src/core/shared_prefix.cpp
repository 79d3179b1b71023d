#include "shared_prefix.hpp"

#include <algorithm>

#include "program.hpp"

namespace paged {

namespace {

constexpr size_t FEWEST_MEMBERS = 2;

// Decodes that see the whole of a split, in order.
std::vector<int32_t> decodes_over(const Batch& batch, int32_t split, const std::vector<int32_t>& sequences) {
    std::vector<int32_t> found;
    for (const int32_t sequence : sequences) {
        const int64_t rows = batch.query_start[sequence + 1] - batch.query_start[sequence];
        if (rows == 1 && batch.seq_lens[sequence] >= int64_t{split + 1} * PAGED_SPLIT_TOKENS) {
            found.push_back(sequence);
        }
    }
    return found;
}

}  // namespace

SharedPrefix SharedPrefix::of(const Batch& batch, int64_t block_size, int64_t part_rows, int64_t splits) {
    SharedPrefix shared;
    std::vector<int32_t> sequences(static_cast<size_t>(batch.num_seqs));
    for (size_t i = 0; i < sequences.size(); i++) {
        sequences[i] = static_cast<int32_t>(i);
    }
    shared.splits.assign(sequences.size(), 0);
    if (part_rows < static_cast<int64_t>(FEWEST_MEMBERS)) {
        return shared;
    }
    for (int32_t split = 0; split < splits && sequences.size() >= FEWEST_MEMBERS; split++) {
        sequences = shared.share_split(batch, block_size, part_rows, split, decodes_over(batch, split, sequences));
        shared.most_splits = sequences.empty() ? split : split + 1;
    }
    return shared;
}

// Adds the parts of one split; returns the sequences that have one.
std::vector<int32_t> SharedPrefix::share_split(
    const Batch& batch, int64_t block_size, int64_t part_rows, int32_t split, std::vector<int32_t> sequences
) {
    const int64_t begin = split * PAGED_SPLIT_TOKENS / block_size;
    const int64_t end = ((split + 1) * PAGED_SPLIT_TOKENS + block_size - 1) / block_size;
    auto blocks = [&](int32_t sequence) { return batch.block_table + sequence * batch.table_stride; };
    auto order = [&](int32_t a, int32_t b) {
        return std::lexicographical_compare(blocks(a) + begin, blocks(a) + end, blocks(b) + begin, blocks(b) + end);
    };
    std::stable_sort(sequences.begin(), sequences.end(), order);
    std::vector<int32_t> sharing;
    for (auto first = sequences.begin(); first != sequences.end();) {
        const auto last = std::upper_bound(first, sequences.end(), *first, order);
        if (last - first >= static_cast<std::ptrdiff_t>(FEWEST_MEMBERS)) {
            add_parts(split, {first, last}, part_rows);
            sharing.insert(sharing.end(), first, last);
        }
        first = last;
    }
    std::sort(sharing.begin(), sharing.end());
    return sharing;
}

// As many parts as there must be, of about the same size.
void SharedPrefix::add_parts(int32_t split, const std::vector<int32_t>& group, int64_t part_rows) {
    const int64_t size = static_cast<int64_t>(group.size()), count = (size + part_rows - 1) / part_rows;
    const int64_t before = static_cast<int64_t>(members.size());
    for (int64_t part = 0; part < count; part++) {
        const int64_t first = size * part / count, last = size * (part + 1) / count;
        parts.push_back(
            {group.front(), split, static_cast<int32_t>(before + first), static_cast<int32_t>(last - first)}
        );
    }
    for (const int32_t sequence : group) {
        splits[static_cast<size_t>(sequence)] = split + 1;
    }
    members.insert(members.end(), group.begin(), group.end());
}

}  // namespace paged
