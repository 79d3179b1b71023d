// Zeroed, aligned memory from the system that takes room only where it is written.
#pragma once

#include <cstddef>
#include <memory>

namespace paged {

// One mapping of the system; given back when the last piece of it is.
class Mapping;

class Memory {
public:
    Memory() = default;
    // At a multiple of 64 bytes. `huge`: in huge pages, for what is written whole (weights, buffers of a program) and
    // not for what fills up slowly (KV). Many small pieces share huge pages: a weight alone would waste half of one.
    Memory(size_t bytes, bool huge);

    char* data() const { return data_; }
    size_t size() const { return size_; }

private:
    std::shared_ptr<Mapping> mapping_;
    char* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace paged
