// Cases of check.cpp for the sampler: its rule in plain loops and a full sort, in double.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "check_support.h"
#include "sampling.h"

namespace sampling_check {

inline std::mt19937 generator(2);

inline double noise(const PagedSampleRow& row, uint32_t token) {
    uint32_t c[4] = {token >> 2, static_cast<uint32_t>(row.position), static_cast<uint32_t>(row.sample_index), 0};
    uint32_t key[2] = {static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t p = uint64_t{0xD2511F53} * c[0], q = uint64_t{0xCD9E8D57} * c[2];
        const uint32_t next[4] = {
            static_cast<uint32_t>(q >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(q),
            static_cast<uint32_t>(p >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(p)
        };
        std::copy(next, next + 4, c);
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return -std::log(-std::log1p(-(c[token & 3] + 0.5) / 4294967296.0));
}

// The token that the rule gives for logits that are changed already; -1 if there is none.
inline int64_t choose(const std::vector<double>& logits, const PagedSampleRow& row) {
    std::vector<int> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const double best = *std::max_element(logits.begin(), logits.end());
    if (best == -INFINITY)
        return -1;
    const double divisor = row.temperature == 0.0 ? 1.0 : row.temperature;
    auto scaled = [&](int token) { return (logits[token] - best) / divisor; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scaled(a) > scaled(b); });
    if (row.temperature == 0.0)
        return order[0];
    if (row.top_k > 0)
        order.resize(std::min(order.size(), static_cast<size_t>(row.top_k)));
    double total = 0.0, before = 0.0, most = -INFINITY;
    for (int token : order)
        total += std::exp(scaled(token));
    int chosen = -1;
    for (int token : order) {
        const double weight = std::exp(scaled(token));
        if ((row.top_p < 1.0 && before >= row.top_p * total) || weight < row.min_p || scaled(token) == -INFINITY)
            break;
        before += weight;
        const double score = scaled(token) + noise(row, static_cast<uint32_t>(token));
        if (score > most || (score == most && token < chosen)) {
            most = score;
            chosen = token;
        }
    }
    return chosen;
}

inline PagedSampleRow plain_row(double temperature, uint64_t seed) {
    PagedSampleRow row{};
    row.temperature = temperature;
    row.top_p = row.repetition_penalty = 1.0;
    row.seed = seed;
    row.position = 9;
    row.sample_index = 2;
    return row;
}

// Rows of logits, one for each row to sample; what they are after changes, if they are not the same.
struct Rows {
    int size;
    std::vector<PagedSampleRow> wanted{};
    std::vector<float> logits{};
    std::vector<std::vector<double>> changed{};

    void add(const PagedSampleRow& row, const std::vector<float>& of_row) {
        wanted.push_back(row);
        wanted.back().logit_row = static_cast<int64_t>(wanted.size()) - 1;
        logits.insert(logits.end(), of_row.begin(), of_row.end());
        changed.emplace_back(of_row.begin(), of_row.end());
    }
    std::vector<float> normal(double scale) const {
        std::normal_distribution<double> draw(0.0, scale);
        std::vector<float> values(static_cast<size_t>(size));
        for (float& value : values)
            value = static_cast<float>(draw(generator));
        return values;
    }
    // Whether the kernel gives the rule's tokens, or, where the rule has none, the fault.
    bool are_right(int64_t fault = 2) {
        const size_t count = wanted.size();
        Buffer<float> exact(logits.size());
        std::copy(logits.begin(), logits.end(), exact.get());
        Buffer<PagedSampleRow> rows(count);
        std::copy(wanted.begin(), wanted.end(), rows.get());
        Buffer<int64_t> tokens(count), faults(count);
        constexpr size_t kAtOnce = 4;  // the thread sanitizer knows some thousand threads at a time
        for (size_t first = 0; first < count; first += kAtOnce) {
            const int some = static_cast<int>(std::min(kAtOnce, count - first));
            const PagedSample a{exact.get(), rows.get() + first, tokens.get() + first, faults.get() + first, size, some,
                                size};
            if (paged_cuda_sample(&a, nullptr))
                return false;
        }
        for (size_t row = 0; row < count; row++) {
            const int64_t expected = choose(changed[row], wanted[row]);
            if (tokens[row] != std::max<int64_t>(expected, 0) || faults[row] != (expected < 0 ? fault : 0))
                return false;
        }
        return true;
    }
};

// The race over all tokens, and again among fewer; logits that undo the noise; sums that only double decides.
inline bool race() {
    Rows rows{701};
    PagedSampleRow row = plain_row(1.0, 5);
    rows.add(row, rows.normal(3.0));
    row.top_p = 0.3;
    for (uint64_t seed = 0; seed < 3; seed++) {
        row.seed = seed;
        rows.add(row, rows.normal(0.5));
    }
    row.top_p = 1.0;
    row.min_p = 0.4;
    rows.add(row, rows.normal(1.0));
    for (uint64_t seed = 0; seed < 4; seed++) {
        row = plain_row(1.0, seed);
        std::vector<float> level(701);
        for (uint32_t token = 0; token < 701; token++)
            level[token] = static_cast<float>(-noise(row, token));
        rows.add(row, level);
    }
    return rows.are_right();
}

// Two in the race, of one thread.
inline bool rivals() {
    Rows rows{61};
    for (uint64_t seed = 0; seed < 24; seed++) {
        const PagedSampleRow row = plain_row(1.0, seed);
        std::vector<float> level(61);
        for (uint32_t token = 0; token < 61; token++)
            level[token] = static_cast<float>((token / 2 == 2 ? 0.0 : -12.0) - noise(row, token));
        rows.add(row, level);
    }
    return rows.are_right();
}

inline bool sums() {
    Rows rows{64};
    const std::vector<double> same(64, 0.0);
    int found = 0;
    for (uint64_t seed = 0; found < 3; seed++) {
        PagedSampleRow under = plain_row(1.0, seed), over = under;
        under.top_p = 0.5 - 1e-9;
        over.top_p = 0.5 + 1e-9;
        if (choose(same, under) == choose(same, over))
            continue;
        rows.add(under, std::vector<float>(64, 0.0f));
        rows.add(over, std::vector<float>(64, 0.0f));
        found++;
    }
    return rows.are_right();
}

// Few candidates from a list, many by halving, and more ties than a list holds.
inline bool candidates() {
    Rows rows{1303};
    PagedSampleRow row = plain_row(2.0, 3);
    row.top_k = 40;
    rows.add(row, rows.normal(2.0));
    for (uint64_t seed = 0; seed < 2; seed++) {
        row.seed = seed;
        row.top_p = 0.4;
        rows.add(row, rows.normal(0.3));
    }
    row.top_k = 3;
    std::vector<float> level(1303, -1.0f);
    std::fill(level.begin() + 100, level.begin() + 200, 1.5f);
    for (uint64_t seed = 0; seed < 5; seed++) {
        row.seed = seed;
        rows.add(row, level);
    }
    row.top_p = 1.0;
    rows.add(row, std::vector<float>(1303, 1.5f));
    std::vector<float> whole = rows.normal(1.0);
    for (float& value : whole)
        value = std::round(value);
    row.top_k = 40;
    rows.add(row, whole);
    row.top_k = 700;
    rows.add(row, whole);
    row.top_p = 0.7;
    rows.add(row, rows.normal(1.0));
    return rows.are_right();
}

// Penalties, bias and forbidden tokens, greedy and sampled.
inline bool changes() {
    constexpr int kSize = 600;
    Rows rows{kSize};
    Buffer<int32_t> tokens(9);
    const int32_t known[9] = {3, 3, 12, 599, 3, 40, 11, 40, 40};
    std::copy(known, known + 9, tokens.get());
    Buffer<int64_t> forbidden(200), early(2), bias_ids(3), heads(4), last(2);
    Buffer<double> bias(3);
    for (int i = 0; i < 200; i++)
        forbidden[static_cast<size_t>(i)] = 3 * i + 1;
    early[0] = 8, early[1] = 9, bias_ids[0] = 12, bias_ids[1] = 20, bias_ids[2] = 601;
    bias[0] = 4.8, bias[1] = 3.0, bias[2] = 50.0;
    heads[0] = -1, heads[1] = 40, heads[2] = 11, heads[3] = 39, last[0] = 21, last[1] = 23;
    constexpr size_t kRoom = 9 + 3;
    std::vector<Buffer<double>> rooms;
    for (int at = 0; at < 6; at++) {
        PagedSampleRow row = plain_row(at < 3 ? 0.0 : 1.2, static_cast<uint64_t>(at));
        row.repetition_penalty = 1.3;
        row.presence_penalty = 0.4;
        row.frequency_penalty = 0.7;
        row.tokens = tokens.get();
        row.num_prompt = 3;
        row.min_tokens = 8;
        row.forbidden = forbidden.get(), row.num_forbidden = 200;
        row.early = early.get(), row.num_early = 2;
        row.bias_ids = bias_ids.get(), row.bias = bias.get(), row.num_bias = 3;
        row.bad_heads = heads.get(), row.bad_last = last.get(), row.num_bad = 2, row.bad_length = 2;
        rooms.emplace_back(kRoom * static_cast<size_t>(paged_cuda_sample_room()) / sizeof(double));
        row.room = rooms.back().get();
        std::vector<float> logits = rows.normal(1.0);
        for (int token : {1, 3, 8, 12, 20, 21, 23, 40, 599})
            logits[static_cast<size_t>(token)] = token % 2 ? 4.0f : 5.5f;
        logits[at % 3 == 0 ? 1 : at % 3 == 1 ? 8 : 21] = 20.0f;  // forbidden, each for another reason
        rows.add(row, logits);
        std::vector<double>& changed = rows.changed.back();
        for (int token : {3, 12, 599, 40, 11}) {
            double& logit = changed[static_cast<size_t>(token)];
            logit = logit > 0.0 ? logit / 1.3 : logit * 1.3;
            const auto times = std::count(known + 3, known + 9, token);
            logit -= static_cast<double>(times) * 0.7;
            logit -= times ? 0.4 : 0.0;
        }
        changed[12] += 4.8;
        changed[20] += 3.0;
        for (int i = 0; i < 200; i++)
            changed[static_cast<size_t>(3 * i + 1)] = -INFINITY;
        changed[8] = changed[9] = changed[21] = -INFINITY;
    }
    return rows.are_right();
}

inline bool faults() {
    Rows rows{530};
    for (float bad : {NAN, INFINITY}) {
        std::vector<float> logits(530, 0.0f);
        logits[529] = bad;
        rows.add(plain_row(1.0, 1), logits);
        rows.changed.back().assign(530, -INFINITY);
    }
    rows.add(plain_row(0.0, 1), std::vector<float>(530, -INFINITY));
    return rows.are_right(1);
}

// Log-probabilities, ranks and alternatives, with few ties and with more than a list holds.
inline bool logprobs() {
    constexpr int kSize = 1303, kRows = 3, kTop = 5;
    Rows rows{kSize};
    Buffer<float> logits(kRows * kSize);
    for (size_t row = 0; row < kRows; row++) {
        const std::vector<float> values = row == 2 ? std::vector<float>(kSize, 0.25f) : rows.normal(2.0);
        for (size_t i = 0; i < kSize; i++)
            logits[row * kSize + i] = row == 1 ? std::round(values[i]) : values[i];
    }
    Buffer<int64_t> logit_rows(kRows), tokens(kRows), num_top(kRows), ranks(kRows), ids(kRows * kTop);
    Buffer<double> chosen(kRows), top(kRows * kTop);
    for (int row = 0; row < kRows; row++) {
        const auto at = static_cast<size_t>(row);
        logit_rows[at] = row, tokens[at] = 400 + 300 * row, num_top[at] = kTop - row;
    }
    const PagedLogprobs a{logits.get(), logit_rows.get(), tokens.get(), num_top.get(), chosen.get(), ranks.get(),
                          ids.get(),    top.get(),        kSize,        kRows,         kSize,        kTop};
    if (paged_cuda_logprobs(&a, nullptr))
        return false;
    for (size_t row = 0; row < kRows; row++) {
        const float* values = logits.get() + row * kSize;
        std::vector<int> order(kSize);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return values[x] > values[y]; });
        double sum = 0.0;
        for (size_t i = 0; i < kSize; i++)
            sum += std::exp(static_cast<double>(values[i]));
        auto is_near = [&](double got, int token) {
            return std::fabs(got - (static_cast<double>(values[token]) - std::log(sum))) < 1e-6;
        };
        const auto place = std::find(order.begin(), order.end(), static_cast<int>(tokens[row])) - order.begin();
        if (ranks[row] != place + 1 || !is_near(chosen[row], static_cast<int>(tokens[row])))
            return false;
        for (size_t i = 0; i < static_cast<size_t>(num_top[row]); i++) {
            if (ids[row * kTop + i] != order[i] || !is_near(top[row * kTop + i], order[i]))
                return false;
        }
    }
    return true;
}

}  // namespace sampling_check
