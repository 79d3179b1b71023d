// One row of logits as the sampler sees it: floats as the model gave them, and beside them, in double, those tokens that
// penalties and biases changed; forbidden tokens are in neither. A pass goes over both.
//
// Ranks are by the scaled logit (logit - greatest) / temperature in double, ties to the lowest id. Double precision is
// slow on most GPUs, so passes compute in float, in units of log 2, to 3 parts in 10^7, and look closer where that does
// not decide.
#pragma once
#include "block.cuh"

namespace paged {

// A token whose logit is not the model's.
struct Changed {
    double value;
    int32_t id;
    int32_t seen;       // times it occurs where penalties look
    int32_t in_output;  // of them in the output
    int32_t unused;
};

constexpr float kLog2e = 1.4426950408889634f;

struct LogitRow {
    const float* logits;
    int size;
    bool is_aligned;             // to 16 bytes
    const uint32_t* skip;        // a bit for each token that is changed or forbidden; null: none is
    const Changed* changed;
    int num_changed;
    double best;
    double temperature;
    float best_high, best_low;  // `best` in two parts
    float factor;               // log2(e) / temperature

    static PAGED_DEVICE LogitRow of(const float* logits, int size) {
        const bool is_aligned = (reinterpret_cast<uintptr_t>(logits) & 15) == 0;
        return {logits, size, is_aligned, nullptr, nullptr, 0, 0.0, 1.0, 0.0f, 0.0f, kLog2e};
    }

    PAGED_DEVICE void scale_by(double greatest, double by) {
        best = greatest;
        temperature = by;
        best_high = static_cast<float>(best);
        best_low = static_cast<float>(best - static_cast<double>(best_high));
        factor = fminf(static_cast<float>(1.4426950408889634 / by), 3e38f);
    }

    PAGED_DEVICE double scaled(double logit) const { return (logit - best) / temperature; }
    // The same in units of log 2, roughly.
    PAGED_DEVICE float powers(float logit) const { return ((logit - best_high) - best_low) * factor; }
    PAGED_DEVICE float powers(double logit) const { return static_cast<float>(logit - best) * factor; }

    // Tokens 4 quad to 4 quad + 3; minus infinity behind the end.
    PAGED_DEVICE void load(int quad, float (&x)[4]) const {
        if (is_aligned && 4 * quad + 4 <= size) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(logits) + quad);
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[i] = 4 * quad + i < size ? __ldg(logits + 4 * quad + i) : -INFINITY;
            }
        }
    }
    // A bit for each of them that is there and as the model gave it.
    PAGED_DEVICE unsigned plain(int quad) const {
        const unsigned there = 4 * quad + 4 <= size ? 15u : (1u << (size - 4 * quad)) - 1;
        return skip ? there & ~(skip[quad >> 3] >> ((quad & 7) * 4)) : there;
    }

    // Both kinds of tokens, this thread's share: quad(first id, logits, bits of the plain ones), one(id, logit). The next
    // quad is on its way while one is worked on.
    template <class Q, class C>
    PAGED_DEVICE void each_quad(Q quad, C one) const {
        const int quads = (size + 3) / 4;
        int at = threadIdx.x;
        float x[4], next[4];
        if (at < quads) {
            load(at, x);
        }
#pragma unroll 1
        while (at < quads) {
            const int after = at + kRowThreads;
            if (after < quads) {
                load(after, next);
            }
            quad(4 * at, x, plain(at));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[i] = next[i];
            }
            at = after;
        }
#pragma unroll 1
        for (int other = threadIdx.x; other < num_changed; other += kRowThreads) {
            one(changed[other].id, changed[other].value);
        }
    }
    // token(id, logit), float or double.
    template <class F>
    PAGED_DEVICE void each(F token) const {
        each_quad(
            [&](int first, const float(&x)[4], unsigned plain) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (plain >> i & 1) {
                        token(first + i, x[i]);
                    }
                }
            },
            token
        );
    }
};

// token(id, logit) of the quad's tokens whose bits are set: one copy of what is long and seldom done.
template <class F>
PAGED_DEVICE void each_bit(int first, const float (&x)[4], unsigned bits, F token) {
#pragma unroll 1
    for (; bits; bits &= bits - 1) {
        const int i = __ffs(static_cast<int>(bits)) - 1;
        token(first + i, i < 2 ? (i == 0 ? x[0] : x[1]) : (i == 2 ? x[2] : x[3]));
    }
}

// What a pass for the greatest logit finds.
struct Greatest {
    Scored top;       // of the row
    double mine;      // greatest of this thread's
    bool is_finite;   // no logit of the model is NaN or infinity, and not all are minus infinity
};

PAGED_DEVICE Greatest greatest_of(const LogitRow& row) {
    float best = -INFINITY, any = -INFINITY;
    int id = INT_MAX, wrong = 0;
    Scored mine = Scored::none();
    row.each_quad(
        [&](int first, const float(&x)[4], unsigned plain) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                wrong |= !(x[i] < INFINITY);
                any = fmaxf(any, x[i]);
                if ((plain >> i & 1) && x[i] > best) {
                    best = x[i];
                    id = first + i;
                }
            }
        },
        [&](int other, double logit) { mine.offer({logit, logit, other}); }
    );
    mine.offer({static_cast<double>(best), static_cast<double>(best), id});
    const bool is_wrong = __syncthreads_or(wrong);
    const bool has_any = __syncthreads_or(any > -INFINITY);
    return {block_best(mine), mine.score, !is_wrong && has_any};
}

// ---- order

// Floats as whole numbers in the same order; the zeros are one.
PAGED_DEVICE uint32_t ordered(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
PAGED_DEVICE float float_of(uint32_t ordered) {
    return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}
PAGED_DEVICE uint64_t ordered(double value) {
    const auto bits = static_cast<uint64_t>(__double_as_longlong(value + 0.0));
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}
PAGED_DEVICE double double_of(uint64_t ordered) {
    return __longlong_as_double(static_cast<long long>(ordered >> 63 ? ordered & ~(1ull << 63) : ~ordered));
}

// A front of the ranking: the tokens before a place in it.
struct Front {
    bool is_all;
    double scaled;
    float powers;
    int id;

    static PAGED_DEVICE Front all() { return {true, 0.0, 0.0f, 0}; }
    // The tokens before that one.
    static PAGED_DEVICE Front before(const LogitRow& row, double logit, int id) {
        return {false, row.scaled(logit), row.powers(logit), id};
    }

    // Those of a quad's tokens that it holds.
    PAGED_DEVICE unsigned held(const LogitRow& row, int first, const float (&x)[4], unsigned bits) const {
        if (is_all) {
            return bits;
        }
        unsigned inside = 0, unsure = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float gap = row.powers(x[i]) - powers;
            const bool is_sure = fabsf(gap) > 2e-6f * fabsf(powers);
            inside |= (is_sure && gap > 0.0f) << i;
            unsure |= !is_sure << i;
        }
        inside &= bits;
        each_bit(first, x, bits & unsure, [&](int id, float logit) {
            inside |= static_cast<unsigned>(holds(row, id, static_cast<double>(logit))) << (id & 3);
        });
        return inside;
    }
    PAGED_DEVICE bool holds(const LogitRow& row, int other, double logit) const {
        const double exact = row.scaled(logit);
        return is_all || exact > scaled || (exact == scaled && other < id);
    }
};

// The first k of the ranking, by halving: of values, then of ids, where k cuts a tie. For any k, slowly.
PAGED_DEVICE Front front_of(const LogitRow& row, int k) {
    uint64_t low = ordered(-1.7976931348623157e308), high = ordered(row.best) + 1;
#pragma unroll 1
    for (uint64_t middle = low;; middle = low + (high - low) / 2) {
        const double least = double_of(middle);
        const float least_float = __double2float_ru(least);
        int found = 0;
        row.each_quad(
            [&](int, const float(&x)[4], unsigned plain) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    found += (plain >> i & 1) && x[i] >= least_float;
                }
            },
            [&](int, double logit) { found += logit >= least; }
        );
        found = block_sum(found);
        if (found < k && middle == low) {
            return Front::all();
        }
        (found >= k ? low : high) = middle;
        if (found == k || high - low <= 1) {
            break;
        }
    }
    double last = INFINITY;
    row.each([&](int, auto logit) {
        const double value = logit;
        last = value >= double_of(low) && value < last ? value : last;
    });
    Front front = Front::before(row, block_least(last), row.size);
    int too_few = 0, enough = row.size;
#pragma unroll 1
    for (;; front.id = (too_few + enough) / 2) {
        int found = 0;
        row.each_quad(
            [&](int first, const float(&x)[4], unsigned plain) { found += __popc(front.held(row, first, x, plain)); },
            [&](int id, double logit) { found += front.holds(row, id, logit); }
        );
        found = block_sum(found);
        (found >= k ? enough : too_few) = front.id;
        if (found == k || enough - too_few <= 1) {
            break;
        }
    }
    front.id = enough;
    return front;
}

// ---- the few greatest

constexpr int kListed = 1024;

// A logit that at least k tokens reach: the k-th of the threads' greatest.
PAGED_DEVICE float reached_by(int k, double mine) {
    const uint32_t key = ordered(__double2float_rd(mine));
    uint32_t found = 0;
#pragma unroll 1
    for (int bit = 31; bit >= 0; bit--) {
        const uint32_t candidate = found | 1u << bit;
        if (__syncthreads_count(key >= candidate) >= k) {
            found = candidate;
        }
    }
    return found > ordered(-INFINITY) ? float_of(found) : -INFINITY;
}

// Tokens in shared memory.
struct List {
    double* values;  // [kListed]
    int* ids;
    int* count;

    // Whether all that reach `least` are few enough; their values are score(logit).
    template <class F>
    PAGED_DEVICE bool gather(const LogitRow& row, float least, F score) const {
        if (threadIdx.x == 0) {
            *count = 0;
        }
        __syncthreads();
        auto put = [&](int id, double logit) {
            const int at = atomicAdd(count, 1);
            if (at < kListed) {
                values[at] = score(logit);
                ids[at] = id;
            }
        };
        row.each_quad(
            [&](int first, const float(&x)[4], unsigned plain) {
                unsigned bits = 0;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    bits |= (x[i] >= least) << i;
                }
                each_bit(first, x, bits & plain, put);
            },
            [&](int id, double logit) {
                if (logit >= least) {
                    put(id, logit);
                }
            }
        );
        __syncthreads();
        const bool fits = *count <= kListed;
        __syncthreads();
        return fits;
    }

    // By value, ties to the lowest id (bitonic); the order in which they were gathered does not matter then.
    PAGED_DEVICE void sort() const {
        const int found = *count;
        int size = 2;
        while (size < found) {
            size *= 2;
        }
        for (int at = found + threadIdx.x; at < size; at += kRowThreads) {
            values[at] = -INFINITY;
            ids[at] = INT_MAX;
        }
        __syncthreads();
        for (int run = 2; run <= size; run *= 2) {
            for (int distance = run / 2; distance > 0; distance /= 2) {
                const int pair = threadIdx.x, low = 2 * pair - (pair & (distance - 1)), high = low + distance;
                if (pair < size / 2) {
                    const double low_value = values[low], high_value = values[high];
                    const int low_id = ids[low], high_id = ids[high];
                    const bool is_wrong =
                        high_value > low_value || (high_value == low_value && high_id < low_id);
                    if (is_wrong == ((low & run) == 0)) {
                        values[low] = high_value, values[high] = low_value;
                        ids[low] = high_id, ids[high] = low_id;
                    }
                }
                __syncthreads();
            }
        }
    }
};

}  // namespace paged
