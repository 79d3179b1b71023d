// What an emulated CUDA thread may ask of the emulator: who it is, shared memory, barriers, exchanges between lanes,
// asynchronous copies. Includes only the toolkit's type headers. The implementation (runtime.cpp, rendezvous.cpp) must
// not be compiled with sanitizers: it tells them of its fibers itself.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

#include <vector_types.h>

namespace emulation {

constexpr int kLanes = 32;
// Words that a lane may put into an exchange.
constexpr int kWords = 16;

// What a CUDA thread can read about itself.
struct ThreadContext {
    uint3 thread;
    uint3 block;
    dim3 block_size;
    dim3 grid_size;
    unsigned lane;
    unsigned warp;
    unsigned linear;
};

// A place in the source, for messages and to notice threads that meet at different ones.
struct Site {
    int line;
    const char* file;
};

extern thread_local ThreadContext* current;

// Kinds of collectives; lanes that meet in one must all mean the same.
enum Collective : int {
    kSync,
    kShuffle,
    kShuffleXor,
    kShuffleDown,
    kShuffleUp,
    kBallot,
    kReduce,
    kMmaHalf,
    kMmaBfloat16,
    kLoadMatrix,
    kLoadMatrixTransposed,
};

// Runs `body` once for each thread of the grid, block after block. `asks`: more shared memory was asked for than every
// block may have.
void launch(dim3 grid, dim3 block, size_t shared_bytes, bool asks, const std::function<void()>& body, const char* name);

// The block's dynamic shared memory: a heap block of exactly the size that was asked for, filled with NaN.
void* dynamic_shared();
// Shared memory of one declaration, the same for all threads of a block.
void* static_shared(const void* key, size_t bytes);

void sync_block(Site site);
enum class Vote { kCount, kAll, kAny };
int vote_block(bool predicate, Vote vote, Site site);

// Every lane of `mask` deposits `words` words; all get the table of 32 x kWords. Where `finish` is given the last lane
// to arrive runs it on the table first, and it may write behind the words deposited.
const uint32_t* exchange(
    unsigned mask, const uint32_t* in, int words, Collective kind, Site site, void (*finish)(uint32_t*) = nullptr
);
void sync_warp(unsigned mask, Site site);

// cp.async: the bytes arrive only when they are waited for, as late as the programming model allows.
void copy_async(void* destination, const void* source, int bytes, int valid);
void commit_copies();
void wait_copies(int pending);

// Counts the bank conflicts of the 8-row matrices whose row addresses the lanes gave.
void count_load_matrix(const uint32_t* table, int matrices);
void count_mma();

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Counters {
    uint64_t launches, blocks, threads, switches, collectives, barriers, mma, matrices, bank_conflicts, bytes_copied;
};
Counters& counters();

}  // namespace emulation
