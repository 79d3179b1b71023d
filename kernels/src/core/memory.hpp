// Zeroed, aligned memory from the system that takes room only where it is written.
#pragma once

#include <cstddef>
#include <utility>

namespace paged {

class Memory {
public:
    Memory() = default;
    // `huge`: ask for huge pages; for what is written whole (weights), not for what fills up slowly (KV).
    Memory(size_t bytes, bool huge);
    Memory(Memory&& other) noexcept { swap(other); }
    Memory& operator=(Memory&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Memory();

    char* data() const { return data_; }
    size_t size() const { return size_; }

private:
    void swap(Memory& other) {
        std::swap(base_, other.base_);
        std::swap(mapped_, other.mapped_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }

    void* base_ = nullptr;
    size_t mapped_ = 0;
    char* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace paged
