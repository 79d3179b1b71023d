// What the kernels need beyond CUDA C++: shared memory, launches, asynchronous copies, matrix loads, tensor cores. The
// only file with inline PTX, and the only one that knows whether nvcc compiles for a GPU or g++ for the emulator
// (PAGED_EMULATE, kernels/emulation). Kernels use neither <<<>>> nor `extern __shared__` nor asm themselves.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef PAGED_EMULATE
#include "fragments.h"
#define PAGED_DEVICE inline
#define PAGED_ANYWHERE inline
#define PAGED_SHARED(T, name, count) \
    static char name##_key;          \
    T* name = static_cast<T*>(emulation::static_shared(&name##_key, sizeof(T) * (count)))
#define PAGED_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(emulation::dynamic_shared())
#define PAGED_SITE , int line = __builtin_LINE(), const char *file = __builtin_FILE()
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define PAGED_DEVICE __device__ __forceinline__
#define PAGED_ANYWHERE __host__ __device__ __forceinline__
#define PAGED_SHARED(T, name, count) __shared__ T name[count]
#define PAGED_DYNAMIC_SHARED(T, name)                                          \
    extern __shared__ __align__(128) unsigned char paged_dynamic_shared_bytes[]; \
    T* name = reinterpret_cast<T*>(paged_dynamic_shared_bytes)
#define PAGED_SITE
#endif

namespace paged {

// Shared memory of a block, in bytes: static and dynamic together up to kUnaskedShared without a word, up to kMostShared
// on every GPU (compute capability 8.6 and 8.9 have the least) if it is asked for.
constexpr size_t kUnaskedShared = 48 * 1024, kMostShared = 99 * 1024;
// Of static shared memory no kernel takes more (tools/machine_code.py sees to it).
constexpr size_t kMostStaticShared = 18 * 1024;

// Starts a kernel with so much dynamic shared memory; the CUDA error code.
template <class... P, class... A>
int launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, A... arguments) {
    const bool asks = shared_bytes > kUnaskedShared - kMostStaticShared;
#ifdef PAGED_EMULATE
    (void)stream;
    auto body = [=] { kernel(static_cast<P>(arguments)...); };
    emulation::launch(grid, block, shared_bytes, asks, body, __builtin_FUNCTION());
    return 0;
#else
    if (asks) {
        const cudaError_t error = cudaFuncSetAttribute(
            reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
            static_cast<int>(shared_bytes)
        );
        if (error != cudaSuccess) {
            return static_cast<int>(error);
        }
    }
    kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(static_cast<P>(arguments)...);
    return static_cast<int>(cudaGetLastError());
#endif
}

// ---- asynchronous copies into shared memory

// 16 bytes; zeros if not `is_valid`.
PAGED_DEVICE void copy_async(void* shared, const void* global, bool is_valid) {
#ifdef PAGED_EMULATE
    emulation::copy_async(shared, global, 16, is_valid ? 16 : 0);
#else
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const int bytes = is_valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(global), "r"(bytes) : "memory");
#endif
}

PAGED_DEVICE void commit_copies() {
#ifdef PAGED_EMULATE
    emulation::commit_copies();
#else
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

// Waits until at most `kPending` of this thread's groups are on their way.
template <int kPending>
PAGED_DEVICE void wait_copies() {
#ifdef PAGED_EMULATE
    emulation::wait_copies(kPending);
#else
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
#endif
}

// ---- tensor cores: fragments as in the PTX ISA, mma.m16n8k16

// Four 8x8 matrices of 16-bit elements; lane i names row i % 8 of matrix i / 8.
PAGED_DEVICE void load_matrices(uint32_t (&result)[4], const void* row PAGED_SITE) {
#ifdef PAGED_EMULATE
    emulation::load_matrix<4, false>(result, row, {line, file});
#else
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                 : "r"(address)
                 : "memory");
#endif
}

// The same, each matrix transposed.
PAGED_DEVICE void load_matrices_transposed(uint32_t (&result)[4], const void* row PAGED_SITE) {
#ifdef PAGED_EMULATE
    emulation::load_matrix<4, true>(result, row, {line, file});
#else
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
                 : "r"(address)
                 : "memory");
#endif
}

// d[16, 8] += a[16, 16] @ b[16, 8], accumulated in float32.
template <class T>
PAGED_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2] PAGED_SITE) {
    static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
#ifdef PAGED_EMULATE
    emulation::mma<std::is_same_v<T, __nv_bfloat16>>(d, a, b, {line, file});
#else
    if constexpr (std::is_same_v<T, __half>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#endif
}

// ---- words

// (x & mask) | bits in one instruction.
PAGED_DEVICE uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
#ifdef PAGED_EMULATE
    return (x & mask) | bits;
#else
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
    return result;
#endif
}

// 16 bytes that are read once and should leave the first cache to others.
PAGED_DEVICE uint4 load_once(const uint4* address) {
#ifdef PAGED_EMULATE
    if (reinterpret_cast<uintptr_t>(address) & 15) emulation::fail("a load of 16 bytes is misaligned");
    return *address;
#else
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
#endif
}

// 8 bytes that another block wrote: past the first cache.
PAGED_DEVICE float2 load_fresh(const float2* address) {
#ifdef PAGED_EMULATE
    return *address;
#else
    return __ldcg(address);
#endif
}

}  // namespace paged
