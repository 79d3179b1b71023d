/*
 * What this machine can do at most, as one JSON object: reading memory, and multiplying and adding out of registers.
 *
 *     cc -O3 -march=native -pthread machine.c -o machine && ./machine THREADS [MEGABYTES [PASSES]]
 *
 * Each figure is the best of several tries, since other load can only lower it. Rates of instruction sets that the
 * compiler was not told of are 0; f32_flops_per_s is that of 256 bits with AVX2, else of 128 (NEON). Reading: every
 * thread goes through four streams of its own part with prefetches, which is what a good matrix-vector kernel can
 * reach. With PASSES it only reads, so often, and prints the rate of each pass.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AMX_BF16__) || defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifndef ROUNDS
#define ROUNDS 20000000L /* of each loop of instructions */
#endif

enum { TRIES = 5, STREAMS = 4, ACCUMULATORS = 12 };

static int num_threads;
static char* memory;
static size_t memory_bytes;
static pthread_barrier_t barrier;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Work of one thread; returns the units of work it did (bytes or operations). */
typedef double (*Work)(int thread);

struct Job {
    Work work;
    int thread;
    double done, start, end;
};

static void* run_job(void* argument) {
    struct Job* job = argument;
    pthread_barrier_wait(&barrier);
    job->start = now();
    job->done = job->work(job->thread);
    job->end = now();
    return NULL;
}

/* Units per second with all threads at once. */
static double rate_once(Work work) {
    pthread_t threads[256];
    struct Job jobs[256];
    pthread_barrier_init(&barrier, NULL, (unsigned)num_threads);
    for (int i = 0; i < num_threads; i++) {
        jobs[i] = (struct Job){work, i, 0, 0, 0};
        pthread_create(&threads[i], NULL, run_job, &jobs[i]);
    }
    double done = 0, start = 1e300, end = 0;
    for (int i = 0; i < num_threads; i++) {
        pthread_join(threads[i], NULL);
        done += jobs[i].done;
        start = jobs[i].start < start ? jobs[i].start : start;
        end = jobs[i].end > end ? jobs[i].end : end;
    }
    pthread_barrier_destroy(&barrier);
    return done / (end - start);
}

/* The best of TRIES. */
static double rate(Work work) {
    double best = 0;
    for (int attempt = 0; attempt < TRIES; attempt++) {
        const double found = rate_once(work);
        best = found > best ? found : best;
    }
    return best;
}

static double read_memory(int thread) {
    const size_t part = memory_bytes / (size_t)num_threads / STREAMS / 256 * 256;
    const char* streams = memory + (size_t)thread * part * STREAMS;
    uint64_t sums[8] = {0};
    for (size_t at = 0; at < part; at += 64) {
        for (int s = 0; s < STREAMS; s++) {
            const char* line = streams + (size_t)s * part + at;
            __builtin_prefetch(line + 2048);
            uint64_t words[8];
            memcpy(words, line, sizeof(words));
            for (int w = 0; w < 8; w++) {
                sums[w] ^= words[w];
            }
        }
    }
    for (int w = 0; w < 8; w++) {
        __asm__ volatile("" : : "r"(sums[w]));
    }
    return (double)(part * STREAMS);
}

#if defined(__AVX512F__)
static double fma_f32_wide(int thread) {
    (void)thread;
    __m512 sums[ACCUMULATORS], a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(1e-9f);
    for (int i = 0; i < ACCUMULATORS; i++) {
        sums[i] = _mm512_setzero_ps();
    }
    const long rounds = ROUNDS;
    for (long r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
        for (int i = 0; i < ACCUMULATORS; i++) {
            sums[i] = _mm512_fmadd_ps(a, b, sums[i]);
        }
    }
    for (int i = 0; i < ACCUMULATORS; i++) {
        __asm__ volatile("" : : "v"(sums[i]));
    }
    return 2.0 * 16 * ACCUMULATORS * (double)rounds;
}
#else
static double fma_f32_wide(int thread) {
    (void)thread;
    return 0;
}
#endif

#if defined(__AVX2__) && defined(__FMA__)
static double fma_f32(int thread) {
    (void)thread;
    __m256 sums[ACCUMULATORS], a = _mm256_set1_ps(1.0f), b = _mm256_set1_ps(1e-9f);
    for (int i = 0; i < ACCUMULATORS; i++) {
        sums[i] = _mm256_setzero_ps();
    }
    const long rounds = ROUNDS;
    for (long r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
        for (int i = 0; i < ACCUMULATORS; i++) {
            sums[i] = _mm256_fmadd_ps(a, b, sums[i]);
        }
    }
    for (int i = 0; i < ACCUMULATORS; i++) {
        __asm__ volatile("" : : "x"(sums[i]));
    }
    return 2.0 * 8 * ACCUMULATORS * (double)rounds;
}
#elif defined(__aarch64__) || defined(__x86_64__)
/* 128 bits: NEON's fused multiply-add, or whatever else the compiler makes of it. */
#if defined(__aarch64__)
#define VECTOR "w"
#else
#define VECTOR "x"
#endif
typedef float Vector __attribute__((vector_size(16)));

static double fma_f32(int thread) {
    (void)thread;
    Vector sums[ACCUMULATORS] = {{0}}, a = {1, 1, 1, 1}, b = {1e-9f, 1e-9f, 1e-9f, 1e-9f};
    const long rounds = ROUNDS;
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < ACCUMULATORS; i++) {
            __asm__ volatile("" : "+" VECTOR(a), "+" VECTOR(sums[i])); /* else one product and one sum serve for all */
            sums[i] += a * b;
        }
    }
    for (int i = 0; i < ACCUMULATORS; i++) {
        __asm__ volatile("" : : VECTOR(sums[i]));
    }
    return 2.0 * 4 * ACCUMULATORS * (double)rounds;
}
#else
static double fma_f32(int thread) {
    (void)thread;
    return 0;
}
#endif

#if defined(__AVX512BF16__)
static double dot_bf16(int thread) {
    (void)thread;
    __m512 sums[ACCUMULATORS];
    __m512i a = _mm512_set1_epi16(0x3f80), b = _mm512_set1_epi16(0x2f80);
    for (int i = 0; i < ACCUMULATORS; i++) {
        sums[i] = _mm512_setzero_ps();
    }
    const long rounds = ROUNDS;
    for (long r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
        for (int i = 0; i < ACCUMULATORS; i++) {
            sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)a, (__m512bh)b);
        }
    }
    for (int i = 0; i < ACCUMULATORS; i++) {
        __asm__ volatile("" : : "v"(sums[i]));
    }
    return 4.0 * 16 * ACCUMULATORS * (double)rounds;
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
static double dot_bf16(int thread) {
    (void)thread;
    float32x4_t sums[ACCUMULATORS];
    uint16_t one = 0x3f80, little = 0x2f80;
    __asm__("" : "+r"(one), "+r"(little)); /* some compilers write such constants with instructions of half floats */
    bfloat16x8_t a = vreinterpretq_bf16_u16(vdupq_n_u16(one)), b = vreinterpretq_bf16_u16(vdupq_n_u16(little));
    for (int i = 0; i < ACCUMULATORS; i++) {
        sums[i] = vdupq_n_f32(0);
    }
    const long rounds = ROUNDS;
    for (long r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+w"(a), "+w"(b));
#pragma GCC unroll 12
        for (int i = 0; i < ACCUMULATORS; i++) {
            sums[i] = vbfdotq_f32(sums[i], a, b);
        }
    }
    for (int i = 0; i < ACCUMULATORS; i++) {
        __asm__ volatile("" : : "w"(sums[i]));
    }
    return 4.0 * 4 * ACCUMULATORS * (double)rounds;
}
#else
static double dot_bf16(int thread) {
    (void)thread;
    return 0;
}
#endif

#if defined(__AVX512VNNI__)
static double dot_int8(int thread) {
    (void)thread;
    __m512i sums[ACCUMULATORS], a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(1);
    for (int i = 0; i < ACCUMULATORS; i++) {
        sums[i] = _mm512_setzero_si512();
    }
    const long rounds = ROUNDS;
    for (long r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
        for (int i = 0; i < ACCUMULATORS; i++) {
            sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
        }
    }
    for (int i = 0; i < ACCUMULATORS; i++) {
        __asm__ volatile("" : : "v"(sums[i]));
    }
    return 2.0 * 64 * ACCUMULATORS * (double)rounds;
}
#else
static double dot_int8(int thread) {
    (void)thread;
    return 0;
}
#endif

#if defined(__AMX_BF16__) || defined(__AMX_INT8__)
/* Gives the thread eight zeroed tiles of 16 rows of 64 bytes; 0: the system does not let it. */
static int take_tiles(void) {
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) { /* ask for the tiles' state */
        return 0;
    }
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = 16;
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* some compilers drop stores that only the next line reads */
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    return 1;
}
#endif

/* Four accumulating tiles over two and two operands: what a blocked product does, without its loads. */
#if defined(__AMX_BF16__)
static double tiles_bf16(int thread) {
    (void)thread;
    if (!take_tiles()) {
        return 0;
    }
    const long rounds = ROUNDS / 5;
    for (long r = 0; r < rounds; r++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 4.0 * 2 * 16 * 16 * 32 * (double)rounds;
}
#else
static double tiles_bf16(int thread) {
    (void)thread;
    return 0;
}
#endif

#if defined(__AMX_INT8__)
static double tiles_int8(int thread) {
    (void)thread;
    if (!take_tiles()) {
        return 0;
    }
    const long rounds = ROUNDS / 5;
    for (long r = 0; r < rounds; r++) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
    return 4.0 * 2 * 16 * 16 * 64 * (double)rounds;
}
#else
static double tiles_int8(int thread) {
    (void)thread;
    return 0;
}
#endif

int main(int argc, char** argv) {
    num_threads = argc > 1 ? atoi(argv[1]) : 1;
    memory_bytes = (size_t)(argc > 2 ? atoi(argv[2]) : 1024) << 20;
    if (num_threads < 1 || num_threads > 256 || posix_memalign((void**)&memory, 1 << 21, memory_bytes)) {
        fprintf(stderr, "usage: machine THREADS [MEGABYTES [PASSES]]\n");
        return 2;
    }
    madvise(memory, memory_bytes, MADV_HUGEPAGE);
    memset(memory, 1, memory_bytes);
    if (argc > 3) {
        const int passes = atoi(argv[3]);
        for (int pass = 0; pass < passes; pass++) {
            printf("%s%.4g%s", pass == 0 ? "[" : ", ", rate_once(read_memory), pass + 1 < passes ? "" : "]\n");
        }
        return 0;
    }
    printf("{\"threads\": %d, \"read_bytes_per_s\": %.4g, ", num_threads, rate(read_memory));
    printf("\"f32_flops_per_s\": %.4g, \"f32_wide_flops_per_s\": %.4g, ", rate(fma_f32), rate(fma_f32_wide));
    printf("\"bf16_dot_flops_per_s\": %.4g, ", rate(dot_bf16));
    printf("\"bf16_tile_flops_per_s\": %.4g, ", rate(tiles_bf16));
    printf("\"int8_dot_ops_per_s\": %.4g, \"int8_tile_ops_per_s\": %.4g}\n", rate(dot_int8), rate(tiles_int8));
    return 0;
}
