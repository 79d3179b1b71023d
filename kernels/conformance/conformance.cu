// What the wrappers of device.cuh do with fixed inputs, as JSON: on a GPU golden data, on the emulator what is held
// against it (tools/conformance.py). Results of 32-bit words, lane after lane, in hexadecimal. "exact" ones must be
// equal; "near" ones are float32 that may differ by rounding: hardware sums products in an order of its own.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "numeric.cuh"

namespace {

using namespace paged;

constexpr int kSets = 4;

// ---- inputs: the same everywhere

struct Generator {
    uint32_t state;

    PAGED_DEVICE uint32_t next() {
        state = state * 1664525u + 1013904223u;
        return state >> 8;
    }
    // -8 to 7: sums of 16 products are exact in every format.
    PAGED_DEVICE float small() { return static_cast<float>(static_cast<int>(next() & 15) - 8); }
    // Of magnitudes from 2^-6 to 2^5.
    PAGED_DEVICE float wide() {
        const int exponent = static_cast<int>(next() % 12) - 6;
        const float fraction = 1.0f + static_cast<float>(next() & 0xffff) / 65536.0f;
        return (next() & 1 ? -fraction : fraction) * exp2f(static_cast<float>(exponent));
    }
};

// ---- kernels: one warp each

template <class T>
__global__ void mma_kernel(uint32_t* out, bool is_wide) {
    for (int set = 0; set < kSets; set++) {
        Generator numbers{1000u * static_cast<uint32_t>(set) + threadIdx.x * 7u + 1u};
        auto number = [&] { return is_wide ? numbers.wide() : numbers.small(); };
        uint32_t a[4], b[2];
        float d[4];
        for (int i = 0; i < 4; i++) {
            const float low = number(), high = number();
            a[i] = Number<T>::pack(low, high);
        }
        for (int i = 0; i < 2; i++) {
            const float low = number(), high = number();
            b[i] = Number<T>::pack(low, high);
        }
        for (int i = 0; i < 4; i++) d[i] = number();
        mma<T>(d, a, b);
        for (int i = 0; i < 4; i++) {
            out[(set * 32 + static_cast<int>(threadIdx.x)) * 4 + i] = static_cast<uint32_t>(__float_as_int(d[i]));
        }
    }
}

// Rows in order, and in an order of their own with a stride.
template <bool kIsTransposed>
__global__ void matrices_kernel(uint32_t* out) {
    PAGED_SHARED(uint4, rows, 64);
    const int lane = static_cast<int>(threadIdx.x);
    for (int row = lane; row < 64; row += 32) {
        uint32_t words[4];
        for (int word = 0; word < 4; word++) {
            const uint32_t first = static_cast<uint32_t>(row * 8 + word * 2);
            words[word] = first | (first + 1) << 16;
        }
        rows[row] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    __syncwarp();
    for (int set = 0; set < 2; set++) {
        uint32_t result[4];
        const uint4* mine = rows + (set == 0 ? lane : lane * 13 % 32 * 2);
        if constexpr (kIsTransposed) {
            load_matrices_transposed(result, mine);
        } else {
            load_matrices(result, mine);
        }
        for (int i = 0; i < 4; i++) out[(set * 32 + lane) * 4 + i] = result[i];
    }
}

// Two groups of copies: the first is waited for alone, then all; every third lane copies zeros.
__global__ void copies_kernel(uint32_t* out, const uint32_t* in) {
    PAGED_SHARED(uint4, ring, 64);
    const int lane = static_cast<int>(threadIdx.x);
    auto* words = reinterpret_cast<uint32_t*>(ring);
    copy_async(ring + lane, in + lane * 4, lane % 3 != 0);
    commit_copies();
    copy_async(ring + 32 + lane, in + (31 - lane) * 4, lane % 3 != 1);
    commit_copies();
    wait_copies<1>();
    __syncwarp();
    for (int i = 0; i < 4; i++) out[lane * 4 + i] = words[(lane ^ 5) * 4 + i];
    wait_copies<0>();
    __syncwarp();
    for (int i = 0; i < 4; i++) out[128 + lane * 4 + i] = words[128 + (lane ^ 9) * 4 + i];
}

// Every way of shuffling, whole warps and parts of them, and votes.
__global__ void shuffles_kernel(uint32_t* out) {
    constexpr unsigned kAll = 0xffffffffu;
    const int lane = static_cast<int>(threadIdx.x);
    const int value = 100 + lane * lane;
    int at = 0;
    auto write = [&](int result) { out[32 * at++ + lane] = static_cast<uint32_t>(result); };
    for (int bits = 1; bits < 32; bits *= 2) write(__shfl_xor_sync(kAll, value, bits));
    write(__shfl_xor_sync(kAll, value, 9, 8));
    for (unsigned delta = 1; delta < 32; delta *= 4) {
        write(__shfl_down_sync(kAll, value, delta));
        write(__shfl_up_sync(kAll, value, delta));
        write(__shfl_down_sync(kAll, value, delta, 8));
        write(__shfl_up_sync(kAll, value, delta, 8));
    }
    write(__shfl_sync(kAll, value, 7));
    write(__shfl_sync(kAll, value, 37));
    write(__shfl_sync(kAll, value, lane * 5));
    write(__shfl_sync(kAll, value, 3, 4));
    write(static_cast<int>(__ballot_sync(kAll, value % 3 == 0)));
    write(__any_sync(kAll, value == 100 + 31 * 31));
    write(__all_sync(kAll, value >= 100));
    if (lane < 16) {
        write(__shfl_xor_sync(0xffffu, value, 15));
        write(static_cast<int>(__ballot_sync(0xffffu, lane & 1)));
    } else {
        write(-1);
        write(-2);
    }
}
constexpr int kShuffles = 5 + 1 + 3 * 4 + 4 + 3 + 2;

// Pairs packed and unpacked: ties, the smallest numbers, the largest, what is beyond.
template <class T>
__global__ void numbers_kernel(uint32_t* out, const float* in, int count) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += 32) {
        const uint32_t word = Number<T>::pack(in[i], -in[i]);
        const float2 pair = Number<T>::unpack(word);
        out[3 * i] = word;
        out[3 * i + 1] = static_cast<uint32_t>(__float_as_int(pair.x));
        out[3 * i + 2] = static_cast<uint32_t>(__float_as_int(Number<T>::to_float(Number<T>::from_float(in[i]))));
    }
}

__global__ void words_kernel(uint32_t* out, const uint4* in) {
    const int lane = static_cast<int>(threadIdx.x);
    const uint4 words = load_once(in + lane);
    const float2 fresh = load_fresh(reinterpret_cast<const float2*>(in + lane));
    out[lane * 4] = and_or(words.x, 0x000f000fu, 0x64006400u);
    out[lane * 4 + 1] = words.y ^ words.z ^ words.w;
    out[lane * 4 + 2] = static_cast<uint32_t>(__float_as_int(fresh.x));
    out[lane * 4 + 3] = __umulhi(words.x, words.y);
}

__global__ void functions_kernel(uint32_t* out, const float* in, int count) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += 32) {
        out[3 * i] = static_cast<uint32_t>(__float_as_int(exp2f(in[i])));
        out[3 * i + 1] = static_cast<uint32_t>(__float_as_int(__expf(in[i])));
        out[3 * i + 2] = static_cast<uint32_t>(__float_as_int(rsqrtf(fabsf(in[i]) + 0.01f)));
    }
}

// ---- host

void* allocate(size_t bytes) {
#ifdef PAGED_EMULATE
    void* memory = std::aligned_alloc(128, (bytes + 127) / 128 * 128);
#else
    void* memory = nullptr;
    if (cudaMallocManaged(&memory, bytes) != cudaSuccess) memory = nullptr;
#endif
    if (!memory) {
        std::fprintf(stderr, "conformance: no memory that the GPU and the host share\n");
        std::exit(1);
    }
    return memory;
}

void finish(const char* name, int error) {
#ifndef PAGED_EMULATE
    if (!error) error = static_cast<int>(cudaDeviceSynchronize());
#endif
    if (error) {
        std::fprintf(stderr, "conformance: %s: CUDA error %d\n", name, error);
        std::exit(1);
    }
}

bool is_first = true;

template <class... P, class... A>
void dump(const char* name, const char* kind, int count, void (*kernel)(uint32_t*, P...), A... arguments) {
    auto* out = static_cast<uint32_t*>(allocate(sizeof(uint32_t) * static_cast<size_t>(count)));
    std::memset(out, 0xa5, sizeof(uint32_t) * static_cast<size_t>(count));
    finish(name, launch(kernel, dim3(1), dim3(32), 0, nullptr, out, arguments...));
    std::printf("%s\"%s\": {\"kind\": \"%s\", \"words\": \"", is_first ? "" : ",\n", name, kind);
    for (int i = 0; i < count; i++) std::printf("%s%08x", i ? " " : "", out[i]);
    std::printf("\"}");
    is_first = false;
}

}  // namespace

int main() {
    const float edges[] = {0.0f,     -0.0f,    1.0f,        1.00390625f, 1.01171875f, 1.00048828125f, 1.00146484375f,
                           65504.0f, 65519.0f, 65520.0f,    5.9604645e-8f, 2.9802322e-8f, 2.9802326e-8f, 6.1035156e-5f,
                           1e-40f,   3.4e38f,  1.17549e-38f, 0.333333343f, -2.71828175f, 1e5f,        -1e-5f};
    constexpr int kEdges = sizeof edges / sizeof edges[0], kPoints = 64;
    auto* numbers = static_cast<float*>(allocate(sizeof edges));
    std::memcpy(numbers, edges, sizeof edges);
    auto* points = static_cast<float*>(allocate(sizeof(float) * kPoints));
    for (int i = 0; i < kPoints; i++) points[i] = static_cast<float>(i - 48) * 0.4375f;
    auto* words = static_cast<uint32_t*>(allocate(sizeof(uint32_t) * 128));
    for (uint32_t i = 0; i < 128; i++) words[i] = i * 2654435761u ^ 0x9e3779b9u;

    std::printf("{\n");
    dump("mma float16 exact", "exact", kSets * 128, mma_kernel<__half>, false);
    dump("mma bfloat16 exact", "exact", kSets * 128, mma_kernel<__nv_bfloat16>, false);
    dump("mma float16 wide", "near", kSets * 128, mma_kernel<__half>, true);
    dump("mma bfloat16 wide", "near", kSets * 128, mma_kernel<__nv_bfloat16>, true);
    dump("ldmatrix", "exact", 256, matrices_kernel<false>);
    dump("ldmatrix transposed", "exact", 256, matrices_kernel<true>);
    dump("cp.async", "exact", 256, copies_kernel, words);
    dump("shuffles", "exact", kShuffles * 32, shuffles_kernel);
    dump("numbers float16", "exact", 3 * kEdges, numbers_kernel<__half>, numbers, kEdges);
    dump("numbers bfloat16", "exact", 3 * kEdges, numbers_kernel<__nv_bfloat16>, numbers, kEdges);
    dump("words", "exact", 128, words_kernel, reinterpret_cast<const uint4*>(words));
    dump("functions", "near", 3 * kPoints, functions_kernel, points, kPoints);
    std::printf("\n}\n");
    return 0;
}
