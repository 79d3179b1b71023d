// Buffers for the cases of check.cpp: each a heap block of exactly its size, so that sanitizers see every step outside.
#pragma once
#include <cstddef>
#include <cstring>
#include <memory>

template <class T>
struct Buffer {
    size_t size;
    std::unique_ptr<T[]> data;

    explicit Buffer(size_t count) : size(count), data(new T[count]) {
        std::memset(static_cast<void*>(data.get()), 0xff, count * sizeof(T));  // NaN
    }
    T& operator[](size_t i) { return data[i]; }
    const T& operator[](size_t i) const { return data[i]; }
    T* get() { return data.get(); }
};
