// Buffers for the cases of check.cpp: each a heap block of exactly its size, so that sanitizers see every step outside.
#pragma once
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#ifdef PAGED_ON_GPU
#include <cuda_runtime.h>

// Memory that both share; a launch ends before the host reads (CUDA_LAUNCH_BLOCKING).
inline void* take_memory(size_t bytes) {
    void* memory = nullptr;
    if (cudaMallocManaged(&memory, bytes) != cudaSuccess) {
        std::fprintf(stderr, "no memory for %zu bytes\n", bytes);
        std::abort();
    }
    return memory;
}
inline void give_back(void* memory) { cudaFree(memory); }
#else
inline void* take_memory(size_t bytes) { return ::operator new(bytes); }
inline void give_back(void* memory) { ::operator delete(memory); }
#endif

struct GiveBack {
    void operator()(void* memory) const { give_back(memory); }
};

template <class T>
struct Buffer {
    size_t size;
    std::unique_ptr<T[], GiveBack> data;

    explicit Buffer(size_t count) : size(count), data(static_cast<T*>(take_memory(count * sizeof(T)))) {
        std::memset(static_cast<void*>(data.get()), 0xff, count * sizeof(T));  // NaN
    }
    T& operator[](size_t i) { return data[i]; }
    const T& operator[](size_t i) const { return data[i]; }
    T* get() { return data.get(); }
};
