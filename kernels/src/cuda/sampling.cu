// The sampler: a block of threads for each row of logits, by the rules and random numbers of the CPU's sampler; and
// log-probabilities of given tokens.
//
// Nothing sorts the vocabulary. Gumbel-max is a race: token i arrives at E_i / exp(scaled_i) with E_i = -log1p(-v_i),
// and the first to arrive is the one of the greatest scaled_i - log(E_i). A pass in float finds who may be first, and
// double decides among those. With few candidates (top_k) they are listed and sorted. With top_p or min_p alone, the
// winner of the whole race is taken if the filters keep it: they keep a front of the ranking, so that one sum over what
// is ranked before it tells; if not, all ranked behind it are out too, and the race is run again among the rest.
#include "sampling.h"

#include "logit_row.cuh"
#include "penalties.cuh"
#include "random.cuh"

namespace paged {

constexpr int kMaxVocabulary = 300'000;
static_assert(Penalties::shared_bytes(kMaxVocabulary) + kMostStaticShared <= kMostShared);
constexpr int64_t kNotFinite = 1, kNothingLeft = 2;

// Times within this factor of the first are compared in double.
constexpr float kEdge = 1.002f;
// The latest winner has a scaled logit over -26.02: E is from 2^-33 to 22.9. In units of log 2.
constexpr float kHopeless = -37.7f;
// Sums of weights in float are this exact, and more.
constexpr float kSumError = 1e-5f;

struct Choice {
    const PagedSampleRow& wanted;
    const LogitRow& row;
    NoiseKey key;

    PAGED_DEVICE Choice(const PagedSampleRow& sample, const LogitRow& of)
        : wanted(sample),
          row(of),
          key{
              static_cast<uint32_t>(sample.seed), static_cast<uint32_t>(sample.seed >> 32),
              static_cast<uint32_t>(sample.position), static_cast<uint32_t>(sample.sample_index)
          } {}

    // ---- the race

    PAGED_DEVICE Scored score_of(int id, double logit, uint32_t bits) const {
        return {row.scaled(logit) + noise_of(bits), logit, id};
    }
    PAGED_DEVICE uint32_t bits_of(int id) const { return word_of(philox(key, static_cast<uint32_t>(id) >> 2), id); }

    // This thread's first and second to arrive; and, once the edge is known, the best of those within it.
    struct Arrivals {
        float first, second;
        int id;
        double logit;
        Scored best;

        PAGED_DEVICE void add(float time, int of, double of_logit) {
            if (time < first) {
                second = first;
                first = time;
                id = of, logit = of_logit;
            } else {
                second = fminf(second, time);
            }
        }
    };

    // All that may win and that the front holds; edge < 0: it is not known yet.
    PAGED_DEVICE void run(const Front& front, float edge, Arrivals& arrivals) const {
        row.each_quad(
            [&](int first, const float(&x)[4], unsigned plain) {
                float slowness[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float powers = row.powers(x[i]);
                    plain &= ~(static_cast<unsigned>(!(powers >= kHopeless)) << i);
                    slowness[i] = exp2f(-powers);
                }
                plain = front.held(row, first, x, plain);
                if (!plain) {
                    return;
                }
                const uint4 words = philox(key, static_cast<uint32_t>(first) >> 2);
                const float late = edge < 0.0f ? arrivals.second : edge;
                unsigned within = 0;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const bool is_late = uniform_below(word_of(words, i)) * slowness[i] > late;
                    within |= static_cast<unsigned>(!is_late) << i;
                }
                each_bit(first, x, within & plain, [&](int id, float logit) {
                    const uint32_t bits = word_of(words, id);
                    arrive(id, static_cast<double>(logit), bits, exp2f(-row.powers(logit)), edge, arrivals);
                });
            },
            [&](int id, double logit) {
                const float powers = row.powers(logit);
                if (powers >= kHopeless && front.holds(row, id, logit)) {
                    arrive(id, logit, bits_of(id), exp2f(-powers), edge, arrivals);
                }
            }
        );
    }
    PAGED_DEVICE void arrive(
        int id, double logit, uint32_t bits, float slowness, float edge, Arrivals& arrivals
    ) const {
        const float time = exponential(bits) * slowness;
        if (edge < 0.0f) {
            arrivals.add(time, id, logit);
        } else if (time <= edge) {
            arrivals.best.offer(score_of(id, logit, bits));
        }
    }

    PAGED_DEVICE Scored winner_of(const Front& front) const {
        Arrivals arrivals{INFINITY, INFINITY, INT_MAX, 0.0, Scored::none()};
        float edge = -1.0f;
#pragma unroll 1
        for (;;) {
            run(front, edge, arrivals);
            if (edge >= 0.0f) {
                break;
            }
            edge = block_least(arrivals.first) * kEdge;
            if (!__syncthreads_or(arrivals.second <= edge)) {
                if (arrivals.first <= edge) {
                    arrivals.best = score_of(arrivals.id, arrivals.logit, bits_of(arrivals.id));
                }
                break;
            }
        }
        return block_best(arrivals.best);
    }

    // ---- filters

    // Whether what is ranked before a token weighs less than top_p of the candidates: in float, then where that does
    // not tell in double.
    PAGED_DEVICE bool is_within_top_p(const Front& candidates, const Front& before) const {
        Sum all, ahead;
        double all_exactly = 0.0, ahead_exactly = 0.0;
        auto add = [&](float weight, bool is_candidate, bool is_ahead) {
            all.add(is_candidate ? weight : 0.0f);
            ahead.add(is_ahead ? weight : 0.0f);
        };
        auto add_exactly = [&](double logit, bool is_candidate, bool is_ahead) {
            const double weight = exp(row.scaled(logit));
            all_exactly += is_candidate ? weight : 0.0;
            ahead_exactly += is_ahead ? weight : 0.0;
        };
        bool is_exact = false;
#pragma unroll 1
        for (;;) {
            row.each_quad(
                [&](int first, const float(&x)[4], unsigned plain) {
                    const unsigned of_all = candidates.held(row, first, x, plain);
                    const unsigned of_ahead = before.held(row, first, x, plain);
                    if (is_exact) {
                        each_bit(first, x, of_all | of_ahead, [&](int id, float logit) {
                            add_exactly(logit, of_all >> (id & 3) & 1, of_ahead >> (id & 3) & 1);
                        });
                        return;
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        add(exp2f(row.powers(x[i])), of_all >> i & 1, of_ahead >> i & 1);
                    }
                },
                [&](int id, double logit) {
                    const bool is_candidate = candidates.holds(row, id, logit), is_ahead = before.holds(row, id, logit);
                    if (is_exact) {
                        add_exactly(logit, is_candidate, is_ahead);
                    } else {
                        add(exp2f(row.powers(logit)), is_candidate, is_ahead);
                    }
                }
            );
            if (is_exact) {
                return block_sum(ahead_exactly) < __dmul_rn(wanted.top_p, block_sum(all_exactly));
            }
            const float least = block_sum(all.sum) * static_cast<float>(wanted.top_p), weight = block_sum(ahead.sum);
            if (weight == 0.0f) {
                return true;  // the first of the ranking
            }
            if (fabsf(weight - least) > kSumError * (weight + least)) {
                return weight < least;
            }
            is_exact = true;
        }
    }

    PAGED_DEVICE int from_race(const Front& candidates) const {
        Front front = candidates;
#pragma unroll 1
        for (;;) {
            const Scored winner = winner_of(front);
            front = Front::before(row, winner.value, winner.id);
            const bool is_kept =
                !(exp(front.scaled) < wanted.min_p) && (wanted.top_p == 1.0 || is_within_top_p(candidates, front));
            if (is_kept) {
                return winner.id;
            }
        }
    }

    // ---- few candidates, at most a thread for each

    // Whether the weights before this thread's sum to less than top_p of all; sums by doubling shifts as in the reference.
    PAGED_DEVICE bool is_under_top_p(double weight, int count) const {
        PAGED_SHARED(double, sums, kRowThreads);
        const int at = threadIdx.x;
        sums[at] = weight;
        for (int shift = 1; shift < count; shift *= 2) {
            __syncthreads();
            const double sum = at >= shift ? sums[at] + sums[at - shift] : sums[at];
            __syncthreads();
            sums[at] = sum;
        }
        __syncthreads();
        const double before = at > 0 ? sums[at - 1] : 0.0;
        return before < __dmul_rn(wanted.top_p, sums[count - 1]);
    }

    PAGED_DEVICE int from_list(const List& list, int count) const {
        list.sort();
        const int at = threadIdx.x;
        const bool is_candidate = at < count && list.values[at] > -INFINITY;
        const double weight = is_candidate ? exp(list.values[at]) : 0.0;
        bool is_kept = is_candidate && weight >= wanted.min_p;
        if (wanted.top_p != 1.0) {
            is_kept &= is_under_top_p(weight, count);
        }
        Scored best = Scored::none();
        if (is_kept) {
            const int id = list.ids[at];
            best = {list.values[at] + noise_of(bits_of(id)), 0.0, id};
        }
        return block_best(best).id;
    }

    // `mine`: the greatest logit of this thread's tokens.
    PAGED_DEVICE int token(const List& list, double mine) const {
        Front candidates = Front::all();
        if (wanted.top_k > 0 && wanted.top_k < row.size) {
            const int count = static_cast<int>(wanted.top_k);
            if (count <= kRowThreads) {
                // Logits so near each other that their scaled logits are equal are ranked by id: take in the neighbours.
                const float reached = reached_by(count, mine);
                const float least = reached - (static_cast<float>(row.best) - reached) * 0x1p-21f;
                if (list.gather(row, least, [&](double logit) { return row.scaled(logit); })) {
                    return from_list(list, count);
                }
            }
            candidates = front_of(row, count);
        }
        return from_race(candidates);
    }
};

__global__ void __launch_bounds__(kRowThreads) sample_kernel(PagedSample a) {
    PAGED_DYNAMIC_SHARED(uint32_t, shared);
    PAGED_SHARED(double, values, kListed);
    PAGED_SHARED(int, ids, kListed);
    PAGED_SHARED(int, count, 1);
    const PagedSampleRow& wanted = a.rows[blockIdx.x];
    LogitRow row = LogitRow::of(a.logits + wanted.logit_row * a.stride, a.vocab_size);
    if (changes_logits(wanted)) {
        const Penalties penalties(wanted, row.logits, row.size, shared);
        row.num_changed = penalties.apply();
        row.skip = penalties.bits;
        row.changed = penalties.room;
    }
    const Greatest greatest = greatest_of(row);
    int64_t fault = 0;
    int token = greatest.top.id;
    if (!greatest.is_finite || greatest.top.value == -INFINITY) {
        fault = greatest.is_finite ? kNothingLeft : kNotFinite;
        token = 0;
    } else if (wanted.temperature > 0.0) {
        row.scale_by(greatest.top.value, wanted.temperature);
        token = Choice(wanted, row).token({values, ids, count}, greatest.mine);
    }
    if (threadIdx.x == 0) {
        a.tokens[blockIdx.x] = token;
        a.faults[blockIdx.x] = fault;
    }
}

// ---- log-probabilities, under the model's own distribution

constexpr int kMaxTop = 32;

// Logarithm of the sum of exp of the row; weights in float, each to a few parts in 10^7.
PAGED_DEVICE double normalizer(const LogitRow& row) {
    Sum sum;
    row.each([&](int, auto logit) { sum.add(exp2f(row.powers(logit))); });
    return row.best + log(static_cast<double>(block_sum(sum.sum)));
}

// The `num_top` greatest one after the other, for a row with too many ties for a list.
PAGED_DEVICE void search_top(const LogitRow& row, int num_top, double norm, int64_t* ids, double* top) {
    Scored last{INFINITY, INFINITY, -1};
#pragma unroll 1
    for (int place = 0; place < num_top; place++) {
        Scored next = Scored::none();
        row.each([&](int id, auto logit) {
            const Scored other{static_cast<double>(logit), static_cast<double>(logit), id};
            if (last.is_before(other)) {
                next.offer(other);
            }
        });
        last = block_best(next);
        if (threadIdx.x == 0) {
            ids[place] = last.id;
            top[place] = last.value - norm;
        }
    }
}

__global__ void __launch_bounds__(kRowThreads) logprobs_kernel(PagedLogprobs a) {
    PAGED_SHARED(double, values, kListed);
    PAGED_SHARED(int, ids, kListed);
    PAGED_SHARED(int, count, 1);
    const int64_t at = blockIdx.x;
    LogitRow row = LogitRow::of(a.logits + a.logit_rows[at] * a.stride, a.vocab_size);
    const Greatest greatest = greatest_of(row);
    row.scale_by(greatest.top.value, 1.0);
    const double norm = greatest.is_finite ? normalizer(row) : static_cast<double>(NAN);
    const int token = static_cast<int>(a.tokens[at]);
    const float chosen = row.logits[token];
    int ahead = 0;
    row.each([&](int id, auto logit) { ahead += logit > chosen || (logit == chosen && id < token); });
    ahead = block_sum(ahead);
    if (threadIdx.x == 0) {
        a.logprobs[at] = static_cast<double>(chosen) - norm;
        a.ranks[at] = ahead + 1;
    }
    const int num_top = min(static_cast<int>(a.num_top[at]), row.size);
    if (num_top <= 0) {
        return;
    }
    int64_t* top_ids = a.top_ids + at * a.max_top;
    double* top = a.top + at * a.max_top;
    const List list{values, ids, count};
    if (greatest.is_finite &&
        !list.gather(row, reached_by(num_top, greatest.mine), [](double logit) { return logit; })) {
        search_top(row, num_top, norm, top_ids, top);
        return;
    }
    if (greatest.is_finite) {
        list.sort();
    }
    if (static_cast<int>(threadIdx.x) < num_top) {
        top_ids[threadIdx.x] = greatest.is_finite ? ids[threadIdx.x] : 0;
        top[threadIdx.x] = (greatest.is_finite ? values[threadIdx.x] : 0.0) - norm;
    }
}

}  // namespace paged

#define PAGED_EXPORT extern "C" __attribute__((visibility("default")))

PAGED_EXPORT int paged_cuda_sample_room(void) { return sizeof(paged::Changed); }
PAGED_EXPORT int paged_cuda_sample_max_vocabulary(void) { return paged::kMaxVocabulary; }

PAGED_EXPORT int paged_cuda_sample(const PagedSample* a, void* stream) {
    if (a->vocab_size < 1 || a->vocab_size > paged::kMaxVocabulary) {
        return -1;
    }
    if (a->num_rows == 0) {
        return 0;
    }
    return paged::launch(
        paged::sample_kernel, dim3(a->num_rows), dim3(paged::kRowThreads),
        paged::Penalties::shared_bytes(a->vocab_size), stream, *a
    );
}

PAGED_EXPORT int paged_cuda_logprobs(const PagedLogprobs* a, void* stream) {
    if (a->vocab_size < 1 || a->max_top > paged::kMaxTop) {
        return -1;
    }
    if (a->num_rows == 0) {
        return 0;
    }
    return paged::launch(paged::logprobs_kernel, dim3(a->num_rows), dim3(paged::kRowThreads), 0, stream, *a);
}
