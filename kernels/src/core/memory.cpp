#include "memory.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <mutex>

#include "error.hpp"

namespace paged {

namespace {

constexpr size_t HUGE_PAGE = size_t{2} << 20;
constexpr size_t PAGE = 4096;
constexpr size_t CHUNK = size_t{16} << 20;
constexpr size_t ALIGNMENT = 64;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

class Mapping {
public:
    Mapping(size_t bytes, bool huge) : size_(round_up(bytes, PAGE) + (huge ? HUGE_PAGE : 0)) {
        base_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base_ == MAP_FAILED) {
            throw Error("the system refuses " + std::to_string(bytes) + " bytes of memory");
        }
        start_ = static_cast<char*>(base_);
        if (huge) {
            start_ += round_up(reinterpret_cast<uintptr_t>(base_), HUGE_PAGE) - reinterpret_cast<uintptr_t>(base_);
            // Only advice: without huge pages all works, with more misses of the address cache.
            (void)madvise(start_, round_up(bytes, PAGE), MADV_HUGEPAGE);
        }
    }
    ~Mapping() { munmap(base_, size_); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    char* start() const { return start_; }

private:
    void* base_;
    size_t size_;
    char* start_;
};

namespace {

// The chunk that small pieces are cut from. What is given back is not cut again, so that pieces are always zero; the
// chunk goes when its last piece goes.
struct Chunk {
    std::mutex mutex;
    std::weak_ptr<Mapping> mapping;
    size_t used = CHUNK;
};

Chunk& chunk() {
    static Chunk only;
    return only;
}

}  // namespace

Memory::Memory(size_t bytes, bool huge) : size_(bytes) {
    const size_t room = round_up(bytes + 1, ALIGNMENT);  // an empty buffer has an address too
    if (!huge || room > CHUNK / 2) {
        mapping_ = std::make_shared<Mapping>(room, huge);
        data_ = mapping_->start();
        return;
    }
    Chunk& from = chunk();
    const std::lock_guard<std::mutex> lock(from.mutex);
    mapping_ = from.mapping.lock();
    if (mapping_ == nullptr || from.used + room > CHUNK) {
        mapping_ = std::make_shared<Mapping>(CHUNK, true);
        from.mapping = mapping_;
        from.used = 0;
    }
    data_ = mapping_->start() + from.used;
    from.used += room;
}

}  // namespace paged
