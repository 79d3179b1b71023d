// Which decodes of a step see the same blocks at their beginning, so that attention can take those splits once for all.
#pragma once

#include <cstdint>
#include <vector>

#include "paged/kernels.h"

namespace paged {

struct Batch;

// As PagedAttention wants it. Only whole splits of PAGED_SPLIT_TOKENS are shared, and only by sequences that have one
// row in the step, the decodes: a tile of many rows gathers its keys and values for all of them anyway.
struct SharedPrefix {
    std::vector<PagedSharedPart> parts;
    std::vector<int32_t> members;
    std::vector<int32_t> splits;  // per sequence
    int64_t most_splits = 0;

    // `part_rows`: members of a part at most; of one there is nothing to share. `splits`: at most so many.
    static SharedPrefix of(const Batch& batch, int64_t block_size, int64_t part_rows, int64_t splits);

private:
    std::vector<int32_t> share_split(
        const Batch& batch, int64_t block_size, int64_t part_rows, int32_t split, std::vector<int32_t> sequences
    );
    void add_parts(int32_t split, const std::vector<int32_t>& group, int64_t part_rows);
};

}  // namespace paged
