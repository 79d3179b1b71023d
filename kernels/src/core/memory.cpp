#include "memory.hpp"

#include <sys/mman.h>

#include <cstdint>

#include "error.hpp"

namespace paged {

namespace {

constexpr size_t HUGE_PAGE = size_t{2} << 20;
constexpr size_t PAGE = 4096;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

Memory::Memory(size_t bytes, bool huge) : size_(bytes) {
    huge = huge && bytes >= 2 * HUGE_PAGE;
    // One byte at least, so that an empty buffer has an address; room to align to a huge page.
    mapped_ = round_up(bytes + 1, PAGE) + (huge ? HUGE_PAGE : 0);
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base_ == MAP_FAILED) {
        base_ = nullptr;
        throw Error("the system refuses " + std::to_string(bytes) + " bytes of memory");
    }
    uintptr_t start = reinterpret_cast<uintptr_t>(base_);
    if (huge) {
        start = round_up(start, HUGE_PAGE);
        // Only advice: without huge pages all works, with more misses of the address cache.
        (void)madvise(reinterpret_cast<void*>(start), round_up(bytes, PAGE), MADV_HUGEPAGE);
    }
    data_ = reinterpret_cast<char*>(start);
}

Memory::~Memory() {
    if (base_ != nullptr) {
        munmap(base_, mapped_);
    }
}

}  // namespace paged
