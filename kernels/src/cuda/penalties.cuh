// What a request changes of its logits, in double and in the CPU sampler's order: repetition, then frequency and
// presence penalties, bias, forbidden tokens. Counts come from the tokens themselves, anew in each step.
//
// Tokens whose logit changes get a bit in shared memory; a bit's rank among them is the token's place in the row's room:
//
//   bits   | word 0 | word 1 | ... | word 7 || word 8 | ...        256 tokens to a group
//   before | bits set before this group     || ...
#pragma once
#include "logit_row.cuh"
#include "sampling.h"

namespace paged {

constexpr int kGroupWords = 8;

PAGED_DEVICE bool penalizes(const PagedSampleRow& row) {
    return row.repetition_penalty != 1.0 || row.presence_penalty != 0.0 || row.frequency_penalty != 0.0;
}
PAGED_DEVICE bool is_early(const PagedSampleRow& row) {
    return row.num_early > 0 && row.position - row.num_prompt < row.min_tokens;
}
PAGED_DEVICE bool changes_logits(const PagedSampleRow& row) {
    return penalizes(row) || row.num_bias > 0 || row.num_forbidden > 0 || row.num_bad > 0 || is_early(row);
}

struct Penalties {
    const PagedSampleRow& row;
    const float* logits;
    int size;
    uint32_t* bits;       // [words]: changed; in the end forbidden too
    uint32_t* forbidden;  // [words]
    int* before;          // [groups + 1]
    Changed* room;

    static constexpr PAGED_ANYWHERE int words(int size) { return (size + 31) / 32; }
    static constexpr PAGED_ANYWHERE int groups(int size) { return (words(size) + kGroupWords - 1) / kGroupWords; }
    static constexpr PAGED_ANYWHERE size_t shared_bytes(int size) {
        return (2 * static_cast<size_t>(words(size)) + static_cast<size_t>(groups(size)) + 1) * 4;
    }

    PAGED_DEVICE Penalties(
        const PagedSampleRow& of_row, const float* of_logits, int vocabulary, uint32_t* shared
    )
        : row(of_row),
          logits(of_logits),
          size(vocabulary),
          bits(shared),
          forbidden(shared + words(vocabulary)),
          before(reinterpret_cast<int*>(shared + 2 * words(vocabulary))),
          room(static_cast<Changed*>(of_row.room)) {}

    // All of it; how many tokens are changed.
    PAGED_DEVICE int apply() const {
        for (int word = threadIdx.x; word < words(size); word += kRowThreads) {
            bits[word] = forbidden[word] = 0;
        }
        __syncthreads();
        mark();
        __syncthreads();
        rank();
        __syncthreads();
        begin();
        __syncthreads();
        occurrences();
        __syncthreads();
        const int count = before[groups(size)];
        for (int at = threadIdx.x; at < count; at += kRowThreads) {
            room[at].value = penalized(room[at]);
        }
        __syncthreads();
        bias();
        forbid();
        __syncthreads();
        for (int at = threadIdx.x; at < count; at += kRowThreads) {
            if (is_set(forbidden, room[at].id)) {
                room[at].value = -INFINITY;
            }
        }
        for (int word = threadIdx.x; word < words(size); word += kRowThreads) {
            bits[word] |= forbidden[word];
        }
        __syncthreads();
        return count;
    }

private:
    PAGED_DEVICE bool is_inside(int64_t token) const { return token >= 0 && token < size; }
    PAGED_DEVICE static bool is_set(const uint32_t* of, int token) { return of[token >> 5] >> (token & 31) & 1; }
    PAGED_DEVICE void set(uint32_t* of, int64_t token) const {
        if (is_inside(token)) {
            atomicOr(of + (token >> 5), 1u << (token & 31));
        }
    }

    // The first token that a penalty looks at; `position` if none does.
    PAGED_DEVICE int64_t first_seen() const {
        return row.repetition_penalty != 1.0 ? 0 : penalizes(row) ? row.num_prompt : row.position;
    }

    PAGED_DEVICE void mark() const {
        for (int64_t at = first_seen() + threadIdx.x; at < row.position; at += kRowThreads) {
            set(bits, row.tokens[at]);
        }
        for (int64_t at = threadIdx.x; at < row.num_bias; at += kRowThreads) {
            set(bits, row.bias_ids[at]);
        }
    }

    // Fills `before`: each thread takes some groups that lie together.
    PAGED_DEVICE void rank() const {
        const int all = groups(size), share = (all + kRowThreads - 1) / kRowThreads;
        const int first = min(static_cast<int>(threadIdx.x) * share, all), last = min(first + share, all);
        int count = 0;
        for (int group = first; group < last; group++) {
            count += bits_of(group);
        }
        int so_far = sum_before(count);
        for (int group = first; group < last; group++) {
            before[group] = so_far;
            so_far += bits_of(group);
        }
        if (threadIdx.x == kRowThreads - 1) {
            before[all] = so_far;
        }
    }
    PAGED_DEVICE int bits_of(int group) const {
        int count = 0;
        const int last = min((group + 1) * kGroupWords, words(size));
        for (int word = group * kGroupWords; word < last; word++) {
            count += __popc(bits[word]);
        }
        return count;
    }
    PAGED_DEVICE Changed& place(int token) const {
        const int word = token >> 5, group = word / kGroupWords;
        int at = before[group];
        for (int other = group * kGroupWords; other < word; other++) {
            at += __popc(bits[other]);
        }
        return room[at + __popc(bits[word] & ((1u << (token & 31)) - 1))];
    }

    PAGED_DEVICE void begin() const {
        for (int word = threadIdx.x; word < words(size); word += kRowThreads) {
            for (uint32_t left = bits[word]; left; left &= left - 1) {
                const int token = 32 * word + __ffs(static_cast<int>(left)) - 1;
                place(token) = {0.0, token, 0, 0, 0};
            }
        }
    }
    PAGED_DEVICE void occurrences() const {
        for (int64_t at = first_seen() + threadIdx.x; at < row.position; at += kRowThreads) {
            const int token = row.tokens[at];
            if (is_inside(token)) {
                Changed& changed = place(token);
                atomicAdd(&changed.seen, 1);
                if (at >= row.num_prompt) {
                    atomicAdd(&changed.in_output, 1);
                }
            }
        }
    }
    PAGED_DEVICE double penalized(const Changed& changed) const {
        double logit = static_cast<double>(logits[changed.id]);
        if (changed.seen && row.repetition_penalty != 1.0) {
            logit = logit > 0.0 ? logit / row.repetition_penalty : __dmul_rn(logit, row.repetition_penalty);
        }
        if (changed.in_output) {
            logit -= __dmul_rn(static_cast<double>(changed.in_output), row.frequency_penalty);
            logit -= row.presence_penalty;
        }
        return logit;
    }

    PAGED_DEVICE void bias() const {
        for (int64_t at = threadIdx.x; at < row.num_bias; at += kRowThreads) {
            if (is_inside(row.bias_ids[at])) {
                place(static_cast<int>(row.bias_ids[at])).value += row.bias[at];
            }
        }
    }
    PAGED_DEVICE void forbid() const {
        for (int64_t at = threadIdx.x; at < row.num_forbidden; at += kRowThreads) {
            set(forbidden, row.forbidden[at]);
        }
        for (int64_t at = threadIdx.x; is_early(row) && at < row.num_early; at += kRowThreads) {
            set(forbidden, row.early[at]);
        }
        for (int64_t word = threadIdx.x; word < row.num_bad; word += kRowThreads) {
            if (ends_in(row.bad_heads + word * row.bad_length)) {
                set(forbidden, row.bad_last[word]);
            }
        }
    }
    // Whether the tokens end in these, but for the filling on their left.
    PAGED_DEVICE bool ends_in(const int64_t* head) const {
        for (int64_t i = 0; i < row.bad_length; i++) {
            const int64_t at = row.position - row.bad_length + i;
            if (head[i] != -1 && (at < 0 || row.tokens[at] != head[i])) {
                return false;
            }
        }
        return true;
    }
};

}  // namespace paged
