// Log-probabilities of given tokens under the model's own distribution, their ranks, and the most probable alternatives:
// a block of threads for each row of logits, without a sort of the vocabulary.
#include "logit_row.cuh"
#include "sampling.h"

namespace paged {

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
    const int ahead =
        row.count([&](int id, auto logit) { return logit > chosen || (logit == chosen && id < token); });
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

PAGED_EXPORT int paged_cuda_logprobs(const PagedLogprobs* a, void* stream) {
    if (a->vocab_size < 1 || a->max_top > paged::kMaxTop) {
        return -1;
    }
    if (a->num_rows == 0) {
        return 0;
    }
    return paged::launch(paged::logprobs_kernel, dim3(a->num_rows), dim3(paged::kRowThreads), 0, stream, *a);
}
