#include "shared_prefix.hpp"

#include <algorithm>

#include "program.hpp"

namespace paged {

namespace {

// Rows of a part are worth its extra steps from so many on.
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

SharedPrefix SharedPrefix::of(const Batch& batch, int64_t block_size, int64_t part_rows) {
    SharedPrefix shared;
    std::vector<int32_t> sequences(static_cast<size_t>(batch.num_seqs));
    for (size_t i = 0; i < sequences.size(); i++) {
        sequences[i] = static_cast<int32_t>(i);
    }
    shared.splits.assign(sequences.size(), 0);
    for (int32_t split = 0; sequences.size() >= FEWEST_MEMBERS; split++) {
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
    // Blocks are shared from the beginning of a sequence on, so that the first one tells whom to compare with.
    std::stable_sort(sequences.begin(), sequences.end(), [&](int32_t a, int32_t b) {
        return blocks(a)[begin] < blocks(b)[begin];
    });
    std::vector<int32_t> sharing;
    for (size_t at = 0; at < sequences.size();) {
        const int32_t* of_first = blocks(sequences[at]);
        std::vector<int32_t> group;
        for (; at < sequences.size() && blocks(sequences[at])[begin] == of_first[begin]; at++) {
            if (std::equal(of_first + begin, of_first + end, blocks(sequences[at]) + begin)) {
                group.push_back(sequences[at]);
            }
        }
        if (group.size() < FEWEST_MEMBERS) {
            continue;
        }
        for (size_t first = 0; first < group.size(); first += static_cast<size_t>(part_rows)) {
            const size_t count = std::min(static_cast<size_t>(part_rows), group.size() - first);
            parts.push_back(
                {group.front(), split, static_cast<int32_t>(members.size() + first), static_cast<int32_t>(count)}
            );
        }
        for (const int32_t sequence : group) {
            splits[static_cast<size_t>(sequence)] = split + 1;
        }
        members.insert(members.end(), group.begin(), group.end());
        sharing.insert(sharing.end(), group.begin(), group.end());
    }
    std::sort(sharing.begin(), sharing.end());
    return sharing;
}

}  // namespace paged
