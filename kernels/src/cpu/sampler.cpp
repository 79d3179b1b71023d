// The sampler: the rules of pagedcli.runtime.sampler and sampling_rows, row by row, in double precision.
//
//   repetition penalty -> presence and frequency penalties -> bias -> forbidden tokens -> temperature
//   -> top_k -> top_p -> min_p -> Gumbel-max, ties to the lowest id
//
// Cut-offs are ranks. Nothing sorts the vocabulary: fronts of the ranking grow until the cut lies within them, and
// Gumbel-max over the whole vocabulary evaluates a logarithm only where the noise could beat the best so far.
#include <cmath>

#include "math.hpp"
#include "philox.hpp"
#include "ranking.hpp"
#include "scratch.hpp"
#include "tables.hpp"

namespace paged::PAGED_VARIANT {
namespace {

constexpr int64_t FAULT_NOT_FINITE = 1, FAULT_NOTHING_LEFT = 2;
constexpr int64_t FIRST_CANDIDATES = 64, CANDIDATE_GROWTH = 8;

// Greatest of a row and whether it is a finite number (NaN anywhere and +inf are not; all -inf is not either).
bool greatest(const float* row, int64_t size, float& best) {
    int wrong = 0;
    for (int64_t i = 0; i < size; i++) {
        wrong |= !(row[i] < INFINITY);
    }
    F16 highest = set1(-INFINITY);
    for_lanes(size, [&](int64_t i, auto n) {
        if (n == 16) {
            highest = max(highest, load(row + i));
        } else {
            for (int j = 0; j < n; j++) {
                highest = max(highest, set1(row[i + j]));
            }
        }
    });
    best = max_lanes(highest);
    return !wrong && best > -INFINITY;
}

template <class T>
int64_t first_equal(const T* row, int64_t size, T value) {
    constexpr int64_t step = 64;
    int64_t i = 0;
    for (; i + step <= size; i += step) {
        int found = 0;
        for (int64_t j = 0; j < step; j++) {
            found |= row[i + j] == value;
        }
        if (found) {
            break;
        }
    }
    while (i < size - 1 && row[i] != value) {
        i++;
    }
    return i;
}

double greatest_of(const double* row, int64_t size) {
    double lanes[8];
    std::fill(lanes, lanes + 8, -INFINITY);
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        for (int j = 0; j < 8; j++) {
            lanes[j] = row[i + j] > lanes[j] ? row[i + j] : lanes[j];
        }
    }
    for (; i < size; i++) {
        lanes[0] = row[i] > lanes[0] ? row[i] : lanes[0];
    }
    return *std::max_element(lanes, lanes + 8);
}

// ---- what changes the logits

class Adjust {
public:
    Adjust(const PagedSampleRow& row, int64_t vocabulary, double* logits, int32_t* counts)
        : row_(row), size_(vocabulary), logits_(logits), counts_(counts) {}

    void apply() {
        repeat();
        presence();
        for (int64_t i = 0; i < row_.num_bias; i++) {
            if (inside(row_.bias_ids[i])) {
                logits_[row_.bias_ids[i]] += row_.bias[i];
            }
        }
        allow();
        forbid(row_.banned, row_.num_banned);
        if (row_.position - row_.num_prompt < row_.min_tokens) {
            forbid(row_.stop_ids, row_.num_stop_ids);
        }
        forbid_words();
    }

    static bool changes(const PagedSampleRow& row) {
        return row.repetition_penalty != 1.0 || row.presence_penalty != 0.0 || row.frequency_penalty != 0.0 ||
               row.num_bias > 0 || row.num_allowed >= 0 || row.num_banned > 0 || row.num_bad > 0 ||
               (row.num_stop_ids > 0 && row.position - row.num_prompt < row.min_tokens);
    }

private:
    bool inside(int64_t token) const { return token >= 0 && token < size_; }

    // How often each token occurs from `begin` on.
    void count(int64_t begin) {
        std::memset(counts_, 0, static_cast<size_t>(size_) * sizeof(int32_t));
        for (int64_t i = begin; i < row_.position; i++) {
            if (inside(row_.tokens[i])) {
                counts_[row_.tokens[i]]++;
            }
        }
    }

    void repeat() {
        if (row_.repetition_penalty == 1.0) {
            return;
        }
        count(0);
        for (int64_t i = 0; i < row_.position; i++) {
            const int64_t token = row_.tokens[i];
            if (inside(token) && counts_[token] > 0) {
                counts_[token] = 0;  // once for each token
                double& logit = logits_[token];
                logit = logit > 0 ? logit / row_.repetition_penalty : logit * row_.repetition_penalty;
            }
        }
    }

    void presence() {
        if (row_.presence_penalty == 0.0 && row_.frequency_penalty == 0.0) {
            return;
        }
        count(row_.num_prompt);
        for (int64_t i = row_.num_prompt; i < row_.position; i++) {
            const int64_t token = row_.tokens[i];
            if (inside(token) && counts_[token] > 0) {
                logits_[token] -= counts_[token] * row_.frequency_penalty;
                logits_[token] -= row_.presence_penalty;
                counts_[token] = 0;
            }
        }
    }

    void allow() {
        if (row_.num_allowed < 0) {
            return;
        }
        std::memset(counts_, 0, static_cast<size_t>(size_) * sizeof(int32_t));
        for (int64_t i = 0; i < row_.num_allowed; i++) {
            if (inside(row_.allowed[i])) {
                counts_[row_.allowed[i]] = 1;
            }
        }
        for (int64_t token = 0; token < size_; token++) {
            logits_[token] = counts_[token] ? logits_[token] : -INFINITY;
        }
    }

    void forbid(const int32_t* ids, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            if (inside(ids[i])) {
                logits_[ids[i]] = -INFINITY;
            }
        }
    }

    void forbid_words() {
        for (int64_t word = 0; word < row_.num_bad; word++) {
            bool matches = true;
            for (int64_t i = 0; i < row_.bad_length && matches; i++) {
                const int64_t wanted = row_.bad_heads[word * row_.bad_length + i];
                const int64_t at = row_.position - row_.bad_length + i;
                matches = wanted == -1 || (at >= 0 && row_.tokens[at] == wanted);
            }
            if (matches && inside(row_.bad_last[word])) {
                logits_[row_.bad_last[word]] = -INFINITY;
            }
        }
    }

    const PagedSampleRow& row_;
    int64_t size_;
    double* logits_;
    int32_t* counts_;
};

// ---- choosing

struct Best {
    double score;
    int64_t token;

    void offer(double other, int64_t id) {
        if (other > score || (other == score && id < token)) {
            score = other;
            token = id;
        }
    }
};

NoiseKey noise_key(const PagedSampleRow& row) {
    return {
        static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32), static_cast<uint32_t>(row.position),
        static_cast<uint32_t>(row.sample_index),
    };
}

// Gumbel-max over all tokens. scaled: [size], at most 0, with `top` the first that is 0.
//
// With noise -log(E), E = -log1p(-v) >= v, a token can beat the best score B only if v < exp(scaled - B).
int64_t choose_from_all(const double* scaled, int64_t size, int64_t top, const NoiseKey& key) {
    Best best{scaled[top] + gumbel_noise(key, top), top};
    constexpr int64_t step = 4 * PHILOX_LANES;
    for (int64_t begin = 0; begin < size; begin += step) {
        const int64_t count = std::min(step, size - begin);
        alignas(64) float room[step];
        float highest = -INFINITY;
        for (int64_t i = 0; i < step; i++) {
            room[i] = i < count ? static_cast<float>(scaled[begin + i] - best.score) : -INFINITY;
            highest = room[i] > highest ? room[i] : highest;
        }
        if (highest < -23.0f) {
            continue;  // below the least uniform number, 2^-33
        }
        uint32_t words[4][PHILOX_LANES];
        philox(key, static_cast<uint32_t>(begin / 4), words);
        for (int64_t i = 0; i < step; i += 16) {
            // The margin covers the rounding to float; a score far above the best is cut off, and stays a candidate.
            store(room + i, exp(min(load(room + i), set1(1.0f))) * set1(1.001f * 4294967296.0f));
        }
        for (int64_t i = 0; i < count; i++) {
            const uint32_t bits = words[i % 4][i / 4];
            if (static_cast<float>(bits) <= room[i]) {
                best.offer(scaled[begin + i] + noise_of(bits), begin + i);
            }
        }
    }
    return best.token;
}

// Room for one row; all of it within a thread's scratch, which takes memory where it is written.
struct Room {
    double *logits, *weights, *sums, *other, *maxima;
    Ranked* ranked;
    int32_t* counts;

    Room(void* memory, int64_t size) {
        Scratch scratch(memory);
        logits = scratch.take<double>(size);
        weights = scratch.take<double>(size);
        sums = scratch.take<double>(size);
        other = scratch.take<double>(size);
        maxima = scratch.take<double>(2 * (size / STRETCH + 1));
        ranked = scratch.take<Ranked>(size);
        counts = scratch.take<int32_t>(size);
    }
};

// How many of the candidates top_k, top_p and min_p keep: a front of the ranking.
int64_t kept_front(const PagedSampleRow& row, Room& room, int64_t count, double total) {
    const int64_t limit = row.top_k > 0 ? row.top_k : count;
    for (int64_t i = 0; i < count; i++) {
        room.weights[i] = std::exp(room.ranked[i].value);
        room.sums[i] = i < limit ? room.weights[i] : 0.0;
    }
    running_sum(room.sums, room.other, count);
    if (row.top_k > 0) {
        total = room.sums[count - 1];  // the distribution that top_p cuts is that of the k tokens
    }
    int64_t kept = 0;
    for (; kept < least(count, limit); kept++) {
        const double before = kept == 0 ? 0.0 : room.sums[kept - 1];
        if ((row.top_p != 1.0 && !(before < row.top_p * total)) || room.weights[kept] < row.min_p ||
            room.ranked[kept].value == -INFINITY) {
            break;
        }
    }
    return kept;
}

// Gumbel-max over what the filters keep. scaled: [size], at most 0.
int64_t choose_kept(const PagedSampleRow& row, const double* scaled, int64_t size, Room& room) {
    double total = 0.0;
    if (row.top_p < 1.0 && row.top_k <= 0) {
        exp_all(scaled, 0.0, room.weights, size);
        total = tree_sum(room.weights, size);
    }
    const NoiseKey key = noise_key(row);
    int64_t wanted = FIRST_CANDIDATES;
    if (row.top_k > 0 && row.top_p < 1.0) {
        wanted = most(wanted, least(row.top_k, size));  // the sum over all k is needed
    }
    for (;; wanted *= CANDIDATE_GROWTH) {
        const int64_t count = front_of_ranking(scaled, size, least(wanted, size), room.maxima, room.ranked);
        const int64_t kept = kept_front(row, room, count, total);
        if (kept == count && count < size) {
            continue;
        }
        Best best{-INFINITY, size};
        for (int64_t i = 0; i < kept; i++) {
            best.offer(room.ranked[i].value + gumbel_noise(key, room.ranked[i].id), room.ranked[i].id);
        }
        return best.token;
    }
}

// ---- log-probabilities

struct LogprobOut {
    double* logprob;
    int64_t* rank;
    int64_t* top_ids;
    double* top;
};

void log_probabilities(
    const float* logits, int64_t size, int64_t token, int64_t num_top, Room& room, const LogprobOut& out
) {
    for (int64_t i = 0; i < size; i++) {
        room.logits[i] = static_cast<double>(logits[i]);
    }
    const double best = greatest_of(room.logits, size);
    exp_all(room.logits, best, room.weights, size);
    const double norm = best + std::log(tree_sum(room.weights, size));
    const double chosen = room.logits[token];
    int64_t ahead = 0;
    for (int64_t i = 0; i < size; i++) {
        ahead += room.logits[i] > chosen;
    }
    for (int64_t i = 0; i < token; i++) {
        ahead += room.logits[i] == chosen;
    }
    *out.logprob = chosen - norm;
    *out.rank = ahead + 1;
    if (num_top > 0) {
        const int64_t found = front_of_ranking(room.logits, size, least(num_top, size), room.maxima, room.ranked);
        for (int64_t i = 0; i < least(num_top, found); i++) {
            out.top_ids[i] = room.ranked[i].id;
            out.top[i] = room.ranked[i].value - norm;
        }
    }
}

// ---- the kernels

int64_t choose(const PagedSampleRow& row, const float* logits, int64_t size, float peak, Room& room, int64_t& fault) {
    const bool changes = Adjust::changes(row);
    if (row.temperature == 0.0 && !changes) {
        return first_equal(logits, size, peak);
    }
    for (int64_t i = 0; i < size; i++) {
        room.logits[i] = static_cast<double>(logits[i]);
    }
    double best = static_cast<double>(peak);
    if (changes) {
        Adjust(row, size, room.logits, room.counts).apply();
        best = greatest_of(room.logits, size);
        if (best == -INFINITY) {
            fault = FAULT_NOTHING_LEFT;
            return 0;
        }
    }
    const int64_t top = first_equal(room.logits, size, best);
    if (row.temperature == 0.0) {
        return top;
    }
    for (int64_t i = 0; i < size; i++) {
        room.logits[i] = (room.logits[i] - best) / row.temperature;
    }
    if (row.top_k <= 0 && row.top_p == 1.0 && row.min_p == 0.0) {
        return choose_from_all(room.logits, size, top, noise_key(row));
    }
    return choose_kept(row, room.logits, size, room);
}

int64_t sample_items(const PagedSample& p) { return p.num_rows; }
int64_t one_row(const PagedSample&) { return 1; }

void sample_run(const PagedSample& p, int64_t first, int64_t last, void* scratch) {
    Room room(scratch, p.vocab_size);
    for (int64_t i = first; i < last; i++) {
        const PagedSampleRow& row = p.rows[i];
        const float* logits = p.logits + row.logit_row * p.logits_stride;
        float peak;
        p.tokens[i] = p.faults[i] = 0;
        if (!greatest(logits, p.vocab_size, peak)) {
            p.faults[i] = FAULT_NOT_FINITE;
        } else {
            p.tokens[i] = choose(row, logits, p.vocab_size, peak, room, p.faults[i]);
        }
        if (row.num_top >= 0) {
            const LogprobOut out{p.logprobs + i, p.ranks + i, p.top_ids + i * p.max_top, p.top + i * p.max_top};
            log_probabilities(logits, p.vocab_size, p.tokens[i], row.num_top, room, out);
        }
    }
}

int64_t logprob_items(const PagedLogprobs& p) { return p.num_rows; }
int64_t one_logprob(const PagedLogprobs&) { return 1; }

void logprob_run(const PagedLogprobs& p, int64_t first, int64_t last, void* scratch) {
    Room room(scratch, p.vocab_size);
    for (int64_t i = first; i < last; i++) {
        const LogprobOut out{p.logprobs + i, p.ranks + i, p.top_ids + i * p.max_top, p.top + i * p.max_top};
        const float* logits = p.logits + p.logit_rows[i] * p.logits_stride;
        log_probabilities(logits, p.vocab_size, p.tokens[i], p.num_top[i], room, out);
    }
}

}  // namespace

const PagedKernel SAMPLE = kernel<PagedSample, sample_items, one_row, sample_run>();
const PagedKernel LOGPROBS = kernel<PagedLogprobs, logprob_items, one_logprob, logprob_run>();

}  // namespace paged::PAGED_VARIANT
