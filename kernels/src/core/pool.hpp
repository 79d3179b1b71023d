// Threads that run a list of kernel calls, one after the other, each call's items shared among them.
//
// A call is over when its items are done, not when every thread has come by: items lie in one range per thread, a
// thread takes from its own range first and then from the others'. So a thread that the system keeps from running
// holds up at most the item it is in. Waiting spins for a bounded time, then sleeps: an idle pool costs nothing.
//
//   call 0:  thread 0 | 0 1 2 3 |   thread 1 | 4 5 6 7 |      each range: one word (epoch, next, end)
//            items left: 8, counted down                       one word (epoch, left)
//
// A call that one thread does at once (a norm of one row) is done by whoever finishes the call before it: nobody is
// told of that one's end, everybody of both.
//
// Every word carries the number of the run, the epoch: a thread that comes late, even after the run has ended and the
// next has begun, finds another epoch and touches nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "memory.hpp"
#include "paged/kernels.h"

namespace paged {

// Memory that the next large call will read from its start on, each thread a share of every stream. Threads that wait
// for others fetch the beginning of their share meanwhile.
struct Ahead {
    const char* streams[2] = {nullptr, nullptr};
    int64_t bytes = 0;  // of a stream
};

struct Call {
    const PagedKernel* kernel;
    const void* params;
    Ahead ahead = {};
};

class Pool {
public:
    // `cpus`: logical CPUs to pin to, one per thread; empty: the system places them. Who leaves some CPUs to others
    // must not choose: two such pools would meet on the first ones.
    Pool(int threads, std::vector<int> cpus);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Runs the calls in order and returns when the last is done. One caller at a time.
    void run(const Call* calls, int64_t count);

    // Pins the calling thread to the first CPU.
    void bind_caller() const;

private:
    struct alignas(64) Range {
        std::atomic<uint64_t> word;
    };
    struct alignas(64) Progress {
        std::atomic<uint64_t> word;
        std::atomic<int64_t> grain;
        std::atomic<int64_t> tail;  // items of a call that belongs to the call before it, else 0
        std::atomic<const char*> streams[2];
        std::atomic<int64_t> bytes;
    };
    // How far a thread has fetched its share of the streams.
    struct Fetched {
        const char* stream = nullptr;
        int64_t bytes = 0;
    };

    void run_some(const Call* calls, int64_t count);
    void lay_out(const Call* calls, int64_t count, uint64_t epoch);
    void serve(int thread);
    void work(int thread, uint64_t epoch);
    bool take_items(int thread, const Call* calls, int64_t index, uint64_t epoch);
    bool wait_done(int thread, int64_t index, uint64_t epoch, Fetched& fetched);
    void fetch_some(int thread, int64_t index, Fetched& fetched);
    void finish_items(int thread, const Call* calls, int64_t index, uint64_t count);
    template <class Done, class Meanwhile>
    void wait(Done done, Meanwhile meanwhile, std::chrono::microseconds spin);
    void wake();

    Range& range(int64_t call, int thread) { return ranges_[call * threads_ + thread]; }

    int threads_;
    std::vector<int> cpus_;
    Memory words_;
    Range* ranges_;
    Progress* progress_;
    std::vector<Memory> scratch_;
    std::vector<std::thread> workers_;

    alignas(64) std::atomic<uint64_t> epoch_{0};
    std::atomic<const Call*> calls_{nullptr};
    std::atomic<int64_t> count_{0};
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<uint32_t> event_{0};
    std::atomic<uint32_t> sleepers_{0};
};

}  // namespace paged
