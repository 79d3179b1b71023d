#include "pool.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "error.hpp"

namespace paged {

namespace {

constexpr int64_t MAX_CALLS = 4096;  // of one epoch; longer lists run in pieces
// What a thread fetches ahead at most, and at a time between two looks at what it waits for.
constexpr int64_t AHEAD_BYTES = 256 << 10, FETCH_BYTES = 256, LINE = 64;
// Within a run, for the others; and between two, for what the caller does from one step to the next: to be woken by the
// system takes longer than most of that.
constexpr auto SPIN_TIME = std::chrono::microseconds(100), SPIN_TIME_BETWEEN = std::chrono::microseconds(400);

constexpr int FIELD_BITS = 22;
constexpr uint64_t FIELD = (uint64_t{1} << FIELD_BITS) - 1;
constexpr uint64_t EPOCHS = uint64_t{1} << (64 - 2 * FIELD_BITS);

uint64_t range_word(uint64_t epoch, uint64_t next, uint64_t end) {
    return epoch << (2 * FIELD_BITS) | next << FIELD_BITS | end;
}
uint64_t range_epoch(uint64_t word) { return word >> (2 * FIELD_BITS); }
uint64_t range_next(uint64_t word) { return word >> FIELD_BITS & FIELD; }
uint64_t range_end(uint64_t word) { return word & FIELD; }

uint64_t progress_word(uint64_t epoch, uint64_t left) { return epoch << 32 | left; }
uint64_t progress_epoch(uint64_t word) { return word >> 32; }
uint64_t progress_left(uint64_t word) { return word & 0xffffffffu; }

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// Pinning is an optimization: a system that refuses it gets unpinned threads.
void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    (void)pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

}  // namespace

Pool::Pool(int threads, std::vector<int> cpus) : threads_(threads), cpus_(std::move(cpus)) {
    require(threads >= 1 && threads <= 1024, "threads is " + std::to_string(threads) + ": from 1 to 1024");
    const size_t ranges = sizeof(Range) * static_cast<size_t>(MAX_CALLS * threads_);
    words_ = Memory(ranges + sizeof(Progress) * MAX_CALLS, false);
    // Zeroed memory is a valid state of all words: epoch 0, nothing to take, nothing left.
    ranges_ = reinterpret_cast<Range*>(words_.data());
    progress_ = reinterpret_cast<Progress*>(words_.data() + ranges);
    for (int thread = 0; thread < threads_; thread++) {
        scratch_.emplace_back(PAGED_SCRATCH_BYTES, false);
    }
    for (int thread = 1; thread < threads_; thread++) {
        workers_.emplace_back([this, thread] { serve(thread); });
    }
}

Pool::~Pool() {
    stop_.store(true);
    epoch_.fetch_add(1);
    wake();
    for (std::thread& worker : workers_) {
        worker.join();
    }
}

void Pool::bind_caller() const {
    if (!cpus_.empty()) {
        pin(cpus_.front());
    }
}

void Pool::run(const Call* calls, int64_t count) {
    for (int64_t done = 0; done < count; done += MAX_CALLS) {
        run_some(calls + done, std::min(MAX_CALLS, count - done));
    }
}

void Pool::run_some(const Call* calls, int64_t count) {
    const uint64_t epoch = (epoch_.load(std::memory_order_relaxed) + 1) % EPOCHS;
    lay_out(calls, count, epoch);
    count_.store(count, std::memory_order_relaxed);
    calls_.store(calls, std::memory_order_release);
    epoch_.store(epoch);
    wake();
    work(0, epoch);
}

void Pool::lay_out(const Call* calls, int64_t count, uint64_t epoch) {
    int64_t items_before = 0;
    for (int64_t index = 0; index < count; index++) {
        const Call& call = calls[index];
        const int64_t items = call.kernel->items(call.params);
        require(items >= 0 && static_cast<uint64_t>(items) < FIELD, "a call has " + std::to_string(items) + " items");
        const int64_t grain = call.kernel->grain(call.params);
        // Nobody finishes a call without items.
        const bool tail = items_before > 0 && items > 0 && items <= grain;
        items_before = items;
        progress_[index].tail.store(tail ? items : 0, std::memory_order_relaxed);
        progress_[index].streams[0].store(call.ahead.streams[0], std::memory_order_relaxed);
        progress_[index].streams[1].store(call.ahead.streams[1], std::memory_order_relaxed);
        progress_[index].bytes.store(call.ahead.bytes, std::memory_order_relaxed);
        const int64_t shared = tail ? 0 : items;
        for (int thread = 0; thread < threads_; thread++) {
            const int64_t first = shared * thread / threads_, last = shared * (thread + 1) / threads_;
            range(index, thread)
                .word.store(
                    range_word(epoch, static_cast<uint64_t>(first), static_cast<uint64_t>(last)),
                    std::memory_order_relaxed
                );
        }
        progress_[index].grain.store(grain, std::memory_order_relaxed);
        progress_[index].word.store(progress_word(epoch, static_cast<uint64_t>(items)), std::memory_order_release);
    }
}

void Pool::serve(int thread) {
    if (!cpus_.empty()) {
        pin(cpus_[static_cast<size_t>(thread) % cpus_.size()]);
    }
    uint64_t seen = 0;
    for (;;) {
        Fetched fetched;
        // The next run most likely begins as the last one did.
        wait([&] { return epoch_.load() != seen; }, [&] { fetch_some(thread, 0, fetched); }, SPIN_TIME_BETWEEN);
        if (stop_.load()) {
            return;
        }
        seen = epoch_.load();
        work(thread, seen);
    }
}

void Pool::work(int thread, uint64_t epoch) {
    const Call* calls = calls_.load(std::memory_order_acquire);
    const int64_t count = count_.load(std::memory_order_relaxed);
    Fetched fetched;
    for (int64_t index = 0; index < count; index++) {
        if (!take_items(thread, calls, index, epoch) || !wait_done(thread, index, epoch, fetched)) {
            return;
        }
    }
}

// False if the run is over. `calls` are only looked into once an item was taken: until it is done the run cannot end.
bool Pool::take_items(int thread, const Call* calls, int64_t index, uint64_t epoch) {
    const uint64_t grain = static_cast<uint64_t>(progress_[index].grain.load(std::memory_order_relaxed));
    uint64_t taken = 0;
    for (int offset = 0; offset < threads_; offset++) {
        std::atomic<uint64_t>& word = range(index, (thread + offset) % threads_).word;
        uint64_t seen = word.load(std::memory_order_acquire);
        for (;;) {
            if (range_epoch(seen) != epoch) {
                return false;  // nothing was taken: a run with items out does not end
            }
            const uint64_t next = range_next(seen), end = range_end(seen);
            if (next >= end) {
                break;
            }
            const uint64_t last = std::min(next + grain, end);
            if (word.compare_exchange_weak(seen, range_word(epoch, last, end), std::memory_order_acq_rel)) {
                calls[index].kernel->run(
                    calls[index].params, static_cast<int64_t>(next), static_cast<int64_t>(last),
                    scratch_[static_cast<size_t>(thread)].data()
                );
                taken += last - next;
                seen = word.load(std::memory_order_acquire);
            }
        }
    }
    if (taken > 0) {
        finish_items(thread, calls, index, taken);
    }
    return true;
}

void Pool::finish_items(int thread, const Call* calls, int64_t index, uint64_t count) {
    // The number of calls is looked up before: once the last of them is done the run may end.
    const int64_t next = index + 1 < count_.load(std::memory_order_relaxed) ? index + 1 : 0;
    const int64_t tail = next > 0 ? progress_[next].tail.load(std::memory_order_relaxed) : 0;
    if (progress_left(progress_[index].word.fetch_sub(count)) != count) {
        return;
    }
    if (tail > 0) {
        calls[next].kernel->run(calls[next].params, 0, tail, scratch_[static_cast<size_t>(thread)].data());
        finish_items(thread, calls, next, static_cast<uint64_t>(tail));
    } else {
        wake();
    }
}

bool Pool::wait_done(int thread, int64_t index, uint64_t epoch, Fetched& fetched) {
    uint64_t word = 0;
    wait(
        [&] {
            word = progress_[index].word.load();
            return progress_epoch(word) != epoch || progress_left(word) == 0;
        },
        [&] { fetch_some(thread, index, fetched); }, SPIN_TIME
    );
    return progress_epoch(word) == epoch;
}

// A run that has ended meanwhile may leave any addresses here: to fetch from them does nothing worse than waste.
void Pool::fetch_some(int thread, int64_t index, Fetched& fetched) {
    const Progress& progress = progress_[index];
    const char* stream = progress.streams[0].load(std::memory_order_relaxed);
    const char* second = progress.streams[1].load(std::memory_order_relaxed);
    const int64_t bytes = progress.bytes.load(std::memory_order_relaxed);
    if (stream != fetched.stream) {
        fetched = {stream, 0};
    }
    const int64_t most = std::min(bytes / threads_, second == nullptr ? AHEAD_BYTES : AHEAD_BYTES / 2);
    // Addresses of one run may be met with the number of bytes of another.
    if (stream == nullptr || fetched.bytes >= most) {
        return;
    }
    const int64_t from = bytes * thread / threads_ + fetched.bytes;
    for (int64_t line = 0; line < FETCH_BYTES; line += LINE) {
        __builtin_prefetch(stream + from + line, 0, 2);
        if (second != nullptr) {
            __builtin_prefetch(second + from + line, 0, 2);
        }
    }
    fetched.bytes += FETCH_BYTES;
}

template <class Done, class Meanwhile>
void Pool::wait(Done done, Meanwhile meanwhile, std::chrono::microseconds spin) {
    if (done()) {
        return;
    }
    const auto limit = std::chrono::steady_clock::now() + spin;
    for (int spins = 1;; spins++) {
        meanwhile();
        pause();
        if (done()) {
            return;
        }
        if (spins % 64 == 0 && std::chrono::steady_clock::now() > limit) {
            break;
        }
    }
    // Who changes the state looks at `sleepers_` afterwards, who sleeps looks at the state after entering there.
    sleepers_.fetch_add(1);
    for (;;) {
        const uint32_t event = event_.load();
        if (done()) {
            break;
        }
        syscall(SYS_futex, &event_, FUTEX_WAIT_PRIVATE, event, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1);
}

void Pool::wake() {
    if (sleepers_.load() > 0) {
        event_.fetch_add(1);
        syscall(SYS_futex, &event_, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
    }
}

}  // namespace paged
