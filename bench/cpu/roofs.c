/* SPDX-License-Identifier: Apache-2.0 */
/* Each kernel keeps one unit of the CPU busy and nothing else: enough independent sums to hide the
 * latency of an instruction, operands that never leave registers; or one pass over memory. Threads
 * take pieces until none is left, as those of the ops do, so that one which the system interrupts
 * does not keep the others waiting; the rate is all work by the whole span. */
#include "cli/roofs.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cli/command.h"
#include "cli/output.h"

#define MIN_READ_BYTES ((size_t)256 << 20)
#define MAX_READ_BYTES ((size_t)2048 << 20)
/* Bytes ahead of the loads, found best on an EPYC of the Zen 4 kind; 1 to 8 KiB differ little. */
#define PREFETCH_BYTES 4096
/* Of each of several streams. */
#define STREAM_PREFETCH_BYTES 512
#define NUM_SUMS \
    12 /* chains: more than latency times units of any x86 so far, fewer than registers */
#define NUM_ROUNDS 40000 /* of all chains in a piece: some 0.3 ms */
#define NUM_PIECES 64    /* of arithmetic, for one thread */
#define MAX_STREAMS 16
/* Streams of a piece are no multiple of 4 KiB apart, which would have the same place in L1. */
#define READ_PIECE_BYTES (MAX_STREAMS * (size_t)(65536 + 256))
#define LINE_BYTES 64
/* Of each way to read, when roofs are created. */
#define NUM_TRIALS 3

struct roofs {
    unsigned char *memory; /* [memory_bytes], a multiple of READ_PIECE_BYTES */
    size_t memory_bytes;
    int32_t num_threads;
    int32_t read_idx;   /* of the ways to read, the fastest here */
    pthread_t *threads; /* [num_threads - 1] */
    struct roof_thread *states;
};

/* A kernel returns what it did, in bytes or operations; `sink` takes a result, so that the work
 * cannot be left out. */
typedef double roof_kernel(const unsigned char *memory, size_t num_bytes, volatile uint64_t *sink);

/* What the threads of a measurement share. */
struct roof_pass {
    const struct roofs *roofs;
    roof_kernel *kernel;
    atomic_int num_waiting; /* threads that have not come yet */
    atomic_size_t next_piece;
    size_t num_pieces;
    cpu_set_t allowed; /* CPUs of this process; none: not known */
};

struct roof_thread {
    struct roof_pass *pass;
    int32_t idx;
    double work;
    int64_t begin_ns, end_ns;
    uint64_t sink;
};

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* Keeps compilers from computing loops of constants at once. */
#define OPAQUE(value) __asm__ __volatile__("" : "+x"(value))

#if defined(__x86_64__)
/* How memory is read: as so many streams beside each other, and how far ahead of each. */
struct read_walk {
    size_t num_streams, stride, end, step, ahead;
};

static inline struct read_walk read_walk_of(size_t num_bytes, size_t num_streams)
{
    if (num_streams == 1) { /* four lines at a time */
        return (struct read_walk){4, LINE_BYTES, num_bytes, 4 * LINE_BYTES, PREFETCH_BYTES};
    }
    size_t stride = num_bytes / num_streams;
    return (struct read_walk){num_streams, stride, stride, LINE_BYTES, STREAM_PREFETCH_BYTES};
}

/* num_streams is a constant. */
__attribute__((target("avx512f,avx512bw"), always_inline)) static inline double read_avx512(
    const unsigned char *memory, size_t num_bytes, volatile uint64_t *sink, size_t num_streams)
{
    const struct read_walk walk = read_walk_of(num_bytes, num_streams);
    __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                       _mm512_setzero_si512()};
    for (size_t offset = 0; offset < walk.end; offset += walk.step) {
        _Pragma("GCC unroll 16") for (size_t i = 0; i < walk.num_streams; i++)
        {
            const unsigned char *at = memory + offset + i * walk.stride;
            _mm_prefetch((const char *)at + walk.ahead, _MM_HINT_T0);
            sums[i % 4] = _mm512_add_epi64(sums[i % 4], _mm512_loadu_si512(at));
        }
    }
    sums[0] =
        _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3]));
    *sink = (uint64_t)_mm_cvtsi128_si64(_mm512_castsi512_si128(sums[0]));
    return (double)num_bytes;
}

__attribute__((target("avx2"), always_inline)) static inline double read_avx2(
    const unsigned char *memory, size_t num_bytes, volatile uint64_t *sink, size_t num_streams)
{
    const struct read_walk walk = read_walk_of(num_bytes, num_streams);
    __m256i sums[8] = {_mm256_setzero_si256()};
    for (size_t offset = 0; offset < walk.end; offset += walk.step) {
        _Pragma("GCC unroll 16") for (size_t i = 0; i < walk.num_streams; i++)
        {
            const __m256i *at = (const __m256i *)(const void *)(memory + offset + i * walk.stride);
            __m256i *sum = &sums[i % 4 * 2];
            _mm_prefetch((const char *)at + walk.ahead, _MM_HINT_T0);
            sum[0] = _mm256_add_epi64(sum[0], _mm256_loadu_si256(at));
            sum[1] = _mm256_add_epi64(sum[1], _mm256_loadu_si256(at + 1));
        }
    }
    for (size_t part = 1; part < 8; part++) {
        sums[0] = _mm256_add_epi64(sums[0], sums[part]);
    }
    *sink = (uint64_t)_mm256_extract_epi64(sums[0], 0);
    return (double)num_bytes;
}

#define DEFINE_READS(num_streams)                                                        \
    __attribute__((target("avx512f,avx512bw"))) static double read_avx512_##num_streams( \
        const unsigned char *memory, size_t num_bytes, volatile uint64_t *sink)          \
    {                                                                                    \
        return read_avx512(memory, num_bytes, sink, num_streams);                        \
    }                                                                                    \
    __attribute__((target("avx2"))) static double read_avx2_##num_streams(               \
        const unsigned char *memory, size_t num_bytes, volatile uint64_t *sink)          \
    {                                                                                    \
        return read_avx2(memory, num_bytes, sink, num_streams);                          \
    }
DEFINE_READS(1)
DEFINE_READS(8)
DEFINE_READS(16)

/* X(name, target, vector, set, add, result, operations an instruction): NUM_SUMS chains of
 * sum = add(sum, a, b). */
#define ARITHMETIC_LIST(X)                                                                      \
    X(fp32_avx512, "avx512f", __m512, _mm512_set1_ps(1e-9f), FP32_AVX512, 32.0)                 \
    X(fp32_avx2, "avx2,fma", __m256, _mm256_set1_ps(1e-9f), FP32_AVX2, 16.0)                    \
    X(bf16_avx512, "avx512f,avx512bw,avx512vl,avx512bf16", __m512, _mm512_setzero_ps(),         \
      BF16_AVX512, 64.0)                                                                        \
    X(int8_vnni, "avx512f,avx512bw,avx512vnni", __m512i, _mm512_set1_epi8(1), INT8_VNNI, 128.0) \
    X(int8_avx2, "avx2", __m256i, _mm256_set1_epi8(1), INT8_AVX2, 64.0)
#define FP32_AVX512(sum, a, b) _mm512_fmadd_ps(a, b, sum)
#define FP32_AVX2(sum, a, b) _mm256_fmadd_ps(a, b, sum)
#define BF16_AVX512(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
#define INT8_VNNI(sum, a, b) _mm512_dpbusd_epi32(sum, a, b)
#define INT8_AVX2(sum, a, b) \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones))

#define DEFINE_ARITHMETIC(name, isa, vector, initial, add, num_operations)                         \
    __attribute__((target(isa))) static double name(const unsigned char *memory, size_t num_bytes, \
                                                    volatile uint64_t *sink)                       \
    {                                                                                              \
        vector a = initial, b = initial, sums[NUM_SUMS];                                           \
        __attribute__((unused)) const __m256i ones = _mm256_set1_epi16(1);                         \
        (void)memory;                                                                              \
        (void)num_bytes;                                                                           \
        for (int i = 0; i < NUM_SUMS; i++) {                                                       \
            sums[i] = initial;                                                                     \
        }                                                                                          \
        for (int round = 0; round < NUM_ROUNDS; round++) {                                         \
            OPAQUE(a);                                                                             \
            OPAQUE(b);                                                                             \
            _Pragma("GCC unroll 12") for (int i = 0; i < NUM_SUMS; i++)                            \
            {                                                                                      \
                sums[i] = add(sums[i], a, b);                                                      \
            }                                                                                      \
        }                                                                                          \
        for (int i = 0; i < NUM_SUMS; i++) {                                                       \
            uint64_t bits;                                                                         \
            memcpy(&bits, &sums[i], sizeof(bits));                                                 \
            *sink = bits;                                                                          \
        }                                                                                          \
        return (double)NUM_ROUNDS * NUM_SUMS * (num_operations);                                   \
    }
ARITHMETIC_LIST(DEFINE_ARITHMETIC)
#endif

static double read_plain(const unsigned char *memory, size_t num_bytes, volatile uint64_t *sink)
{
    uint64_t sum = 0, word;
    for (size_t at = 0; at < num_bytes; at += sizeof(word)) {
        memcpy(&word, memory + at, sizeof(word));
        sum += word;
    }
    *sink = sum;
    return (double)num_bytes;
}

static double fp32_plain(const unsigned char *memory, size_t num_bytes, volatile uint64_t *sink)
{
    float sums[16], factor = 1.0f;
    (void)num_bytes;
    for (int i = 0; i < 16; i++) {
        sums[i] = memory[i];
    }
    for (int round = 0; round < NUM_ROUNDS; round++) {
        __asm__ __volatile__("" : "+m"(factor));
        for (int i = 0; i < 16; i++) {
            sums[i] = sums[i] * factor + factor;
        }
    }
    for (int i = 0; i < 16; i++) {
        *sink = (uint64_t)(sums[i] > 0.0f);
    }
    return NUM_ROUNDS * 32.0;
}

#define NUM_READS 3 /* ways to read memory */

struct roof_choice {
    roof_kernel *kernel;
    const char *instructions;
};

#if defined(__x86_64__)
/* __builtin_cpu_supports also asks the system whether it saves the registers. */
static struct roof_choice choose(enum roof_kind kind, int32_t read_idx)
{
    static const struct roof_choice reads[2][NUM_READS] = {
        {{read_avx2_1, "AVX2 loads, prefetch"},
         {read_avx2_8, "AVX2 loads, prefetch, 8 streams"},
         {read_avx2_16, "AVX2 loads, prefetch, 16 streams"}},
        {{read_avx512_1, "AVX-512 loads, prefetch"},
         {read_avx512_8, "AVX-512 loads, prefetch, 8 streams"},
         {read_avx512_16, "AVX-512 loads, prefetch, 16 streams"}}};
    bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    switch (kind) {
    case ROOF_KIND_READ:
        return has_avx512 || has_avx2 ? reads[has_avx512][read_idx]
                                      : (struct roof_choice){read_plain, "plain loads"};
    case ROOF_KIND_FP32:
        return has_avx512 ? (struct roof_choice){fp32_avx512, "AVX-512 FMA"}
               : has_avx2 ? (struct roof_choice){fp32_avx2, "AVX2 FMA"}
                          : (struct roof_choice){fp32_plain, "plain C"};
    case ROOF_KIND_BF16:
        return has_avx512 && __builtin_cpu_supports("avx512bf16")
                   ? (struct roof_choice){bf16_avx512, "AVX-512 BF16"}
                   : (struct roof_choice){NULL, NULL};
    case ROOF_KIND_INT8:
        return has_avx512 && __builtin_cpu_supports("avx512vnni")
                   ? (struct roof_choice){int8_vnni, "AVX-512 VNNI"}
               : has_avx2 ? (struct roof_choice){int8_avx2, "AVX2 vpmaddubsw"}
                          : (struct roof_choice){NULL, NULL};
    default:
        return (struct roof_choice){NULL, NULL};
    }
}
#else
static struct roof_choice choose(enum roof_kind kind, int32_t read_idx)
{
    (void)read_idx;
    return kind == ROOF_KIND_READ   ? (struct roof_choice){read_plain, "plain loads"}
           : kind == ROOF_KIND_FP32 ? (struct roof_choice){fp32_plain, "plain C"}
                                    : (struct roof_choice){NULL, NULL};
}
#endif

/* ---- threads --------------------------------------------------------------------------------- */

/* One of the CPUs that this process may run on: two threads that the system has put on one CPU
 * would show half of the rate. */
static void pin_thread(const cpu_set_t *allowed, int32_t thread_idx)
{
    int32_t wanted = thread_idx % (CPU_COUNT(allowed) > 0 ? CPU_COUNT(allowed) : 1);
    cpu_set_t one;

    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, allowed) && wanted-- == 0) {
            CPU_SET(cpu, &one);
            (void)sched_setaffinity(0, sizeof(one), &one);
            return;
        }
    }
}

static void *run_thread(void *arg)
{
    struct roof_thread *thread = arg;
    struct roof_pass *pass = thread->pass;
    size_t num_places = pass->roofs->memory_bytes / READ_PIECE_BYTES;
    size_t piece;

    pin_thread(&pass->allowed, thread->idx);
    atomic_fetch_sub(&pass->num_waiting, 1);
    while (atomic_load(&pass->num_waiting) > 0) {
        /* All begin together; the wait is that of starting a thread. */
    }
    thread->begin_ns = now_ns();
    while ((piece = atomic_fetch_add(&pass->next_piece, 1)) < pass->num_pieces) {
        thread->work += pass->kernel(pass->roofs->memory + piece % num_places * READ_PIECE_BYTES,
                                     READ_PIECE_BYTES, &thread->sink);
    }
    thread->end_ns = now_ns();
    return NULL;
}

/* Which way to read is the fastest depends on the processor: its prefetchers follow one stream or
 * several. */
static void choose_read(struct roofs *roofs)
{
    double best = 0.0;
    int32_t best_idx = 0;
    for (int32_t trial = 0; trial < NUM_TRIALS * NUM_READS; trial++) {
        roofs->read_idx = trial % NUM_READS;
        double rate = roofs_measure(roofs, ROOF_KIND_READ);
        if (rate > best) {
            best = rate;
            best_idx = roofs->read_idx;
        }
    }
    roofs->read_idx = best_idx;
}

int roofs_create(int32_t num_threads, struct roofs **roofs)
{
    long cache_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    struct roofs *created = calloc(1, sizeof(*created));
    size_t num_bytes = cache_bytes > 0 ? 4 * (size_t)cache_bytes : MIN_READ_BYTES;

    num_bytes = num_bytes < MIN_READ_BYTES ? MIN_READ_BYTES : num_bytes;
    num_bytes = num_bytes > MAX_READ_BYTES ? MAX_READ_BYTES : num_bytes;
    if (created != NULL) {
        num_bytes = num_bytes / READ_PIECE_BYTES * READ_PIECE_BYTES;
        created->num_threads = num_threads;
        created->memory_bytes = num_bytes;
        created->threads = calloc((size_t)num_threads, sizeof(*created->threads));
        created->states = calloc((size_t)num_threads, sizeof(*created->states));
        created->memory =
            mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        created->memory = created->memory == MAP_FAILED ? NULL : created->memory;
    }
    if (created == NULL || created->threads == NULL || created->states == NULL ||
        created->memory == NULL) {
        output_error("no memory to measure the rate of reading it with, %zu MiB; --no-roofs does "
                     "without",
                     num_bytes >> 20);
        roofs_destroy(created);
        return EXIT_CODE_FAILURE;
    }
    /* As files of weights are mapped. */
    (void)madvise(created->memory, num_bytes, MADV_HUGEPAGE);
    /* Pages of their own: those never written would all be one page of zeros. */
    memset(created->memory, 1, num_bytes);
    choose_read(created);
    *roofs = created;
    return EXIT_CODE_OK;
}

void roofs_destroy(struct roofs *roofs)
{
    if (roofs == NULL) {
        return;
    }
    if (roofs->memory != NULL) {
        munmap(roofs->memory, roofs->memory_bytes);
    }
    free(roofs->threads);
    free(roofs->states);
    free(roofs);
}

double roofs_measure(struct roofs *roofs, enum roof_kind kind)
{
    struct roof_choice choice = choose(kind, roofs->read_idx);
    struct roof_pass pass = {.roofs = roofs, .kernel = choice.kernel};
    int32_t num_started = 1;
    double work = 0.0;

    if (choice.kernel == NULL) {
        return 0.0;
    }
    pass.num_pieces = kind == ROOF_KIND_READ ? roofs->memory_bytes / READ_PIECE_BYTES
                                             : NUM_PIECES * (size_t)roofs->num_threads;
    atomic_init(&pass.num_waiting, roofs->num_threads);
    atomic_init(&pass.next_piece, 0);
    if (sched_getaffinity(0, sizeof(pass.allowed), &pass.allowed) != 0) {
        CPU_ZERO(&pass.allowed);
    }
    for (int32_t i = 0; i < roofs->num_threads; i++) {
        roofs->states[i] = (struct roof_thread){.pass = &pass, .idx = i};
    }
    while (num_started < roofs->num_threads &&
           pthread_create(&roofs->threads[num_started - 1], NULL, run_thread,
                          &roofs->states[num_started]) == 0) {
        num_started++;
    }
    /* Those that could not be started are not waited for: fewer threads, a lower roof. */
    atomic_fetch_sub(&pass.num_waiting, roofs->num_threads - num_started);
    run_thread(&roofs->states[0]);
    if (CPU_COUNT(&pass.allowed) > 0) {
        (void)sched_setaffinity(0, sizeof(pass.allowed), &pass.allowed);
    }
    int64_t begin_ns = roofs->states[0].begin_ns, end_ns = roofs->states[0].end_ns;
    for (int32_t i = 0; i < num_started; i++) {
        const struct roof_thread *state = &roofs->states[i];
        if (i > 0) {
            pthread_join(roofs->threads[i - 1], NULL);
        }
        begin_ns = state->begin_ns < begin_ns ? state->begin_ns : begin_ns;
        end_ns = state->end_ns > end_ns ? state->end_ns : end_ns;
        work += state->work;
    }
    return end_ns > begin_ns ? work * 1e9 / (double)(end_ns - begin_ns) : 0.0;
}

const char *roof_kind_name(enum roof_kind kind)
{
    static const char *const names[ROOF_KIND_COUNT] = {"read", "fp32", "bf16", "int8"};
    return names[kind];
}

const char *roof_instructions(const struct roofs *roofs, enum roof_kind kind)
{
    return choose(kind, roofs != NULL ? roofs->read_idx : 0).instructions;
}
