// A thread's scratch memory, handed out piece by piece within one run of a kernel.
#pragma once

#include <cstdint>

namespace paged::PAGED_VARIANT {

class Scratch {
public:
    explicit Scratch(void* memory) : next_(static_cast<char*>(memory)) {}

    // Room for `count` elements, aligned to 64 bytes.
    template <class T>
    T* take(int64_t count) {
        T* taken = reinterpret_cast<T*>(next_);
        next_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return taken;
    }

private:
    char* next_;
};

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace paged::PAGED_VARIANT
