/* SPDX-License-Identifier: Apache-2.0 */
/* A row of logits as the CTAs of a cluster have it while they sample: what each keeps in shared
 * memory, keys of ids, sums over a CTA, words to the others, and the one time that the logits are
 * read. Part of sample.cu. */
#ifndef IMBREX_OPS_CUDA_KERNELS_SAMPLE_ROW_CUH
#define IMBREX_OPS_CUDA_KERNELS_SAMPLE_ROW_CUH

#include <math_constants.h>

#include "ops/cuda/kernels/ptx.cuh"
#include "ops/cuda/kernels/sample_params.h"

enum {
    WARPS = SAMPLE_THREADS / 32,
    BINS = 1024,
    BIN_BITS = 10,
    GROUPS = BINS / 32,
    LIST = 1024, /* a power of two */
    LIST_PER_THREAD = LIST / SAMPLE_THREADS,
    INBOX = LIST / SAMPLE_CLUSTER, /* keys that a CTA can send at once */
    NEAR = SAMPLE_THREADS / 4      /* best logits that a CTA tells, each of four threads */
};
/* Bins of the first histogram to 1 of a logit; what lies further from the best than all of them is
 * in the last one. */
#define BINS_OF_ONE 32.0f
#define LOG2_E 1.44269504088896340736f

/* Where a histogram found what it looked for. Keys of the cut are those in this bin of the first
 * histogram whose upper bits are `prefix`. */
struct cut {
    uint64_t prefix;
    uint64_t remaining;    /* what the keys of the cut have to give */
    uint32_t before_count; /* keys above the cut */
    uint32_t members;
    int32_t bin, shift;
};

struct histogram {
    union {
        uint64_t masses[BINS];
        uint64_t inbox[SAMPLE_CLUSTER][INBOX]; /* of rank 0: keys, while there is no histogram */
        uint64_t list_masses[LIST];            /* likewise */
    };
    uint64_t group_masses[GROUPS];
    uint32_t counts[BINS];
    uint32_t group_counts[GROUPS];
    uint64_t list[LIST]; /* keys */
};

/* Ids of which occurrences are counted at a time. */
#define SEEN_IDS ((int32_t)(sizeof(struct histogram) / sizeof(uint32_t)))

/* Of a CTA. What is told_* is written by other CTAs of the cluster, once in a row's life. */
struct sample_memory {
    union {
        struct histogram histogram;
        uint32_t seen[SEEN_IDS];
    };
    struct sample_row row;
    uint64_t warp_values[WARPS];
    uint64_t cta_masses[SAMPLE_CLUSTER][32]; /* 32 bins of all */
    uint32_t cta_counts[SAMPLE_CLUSTER][32];
    uint64_t warp_best[WARPS];
    uint64_t told_best[2][SAMPLE_CLUSTER];
    uint64_t told_mass[2][SAMPLE_CLUSTER];
    float told_near[SAMPLE_CLUSTER * NEAR];
    double told_sum[SAMPLE_CLUSTER];
    double uniform;
    uint64_t told_key[3];                /* of top-k, of top-p, the drawn one */
    uint32_t told_count[SAMPLE_CLUSTER]; /* keys in the lists */
    int32_t told_token_id;
    struct cut cut;
    uint32_t list_count; /* may exceed LIST */
    uint32_t list_idx, near_bin;
    int32_t segment_begin; /* of the ids among which the draw falls */
    uint64_t segment_goal;
};

/* The chunk of a CTA and the row that it is of. */
struct chunk {
    float *logits; /* [length] if they are kept */
    struct sample_memory *memory;
    int32_t begin, length; /* ids [begin, begin + length) */
    int32_t rank, id_bits, mass_bits;
    float best_logit; /* of the row, once it is known */
};

/* ---- keys ----------------------------------------------------------------------------------- */

/* In the order of the logits; both zeros are one. */
static __device__ __forceinline__ uint32_t ordered_bits(float logit)
{
    uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ uint64_t key_of(float logit, int32_t id, int32_t id_bits)
{
    uint32_t last = (1u << id_bits) - 1;
    return (uint64_t)ordered_bits(logit) << id_bits | (last - (uint32_t)id);
}

static __device__ __forceinline__ int32_t key_id(uint64_t key, int32_t id_bits)
{
    uint32_t last = (1u << id_bits) - 1;
    return (int32_t)(last - ((uint32_t)key & last));
}

static __device__ __forceinline__ float key_logit(uint64_t key, int32_t id_bits)
{
    uint32_t bits = (uint32_t)(key >> id_bits);
    return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

/* 0 is the best's. Each step rounds, and none of them changes an order. */
static __device__ __forceinline__ int32_t bin_of(float logit, float best_logit)
{
    float distance = __fmul_rn(__fsub_rn(best_logit, logit), BINS_OF_ONE);
    return distance < (float)(BINS - 1) ? (int32_t)distance : BINS - 1;
}

/* ---- a block, a cluster --------------------------------------------------------------------- */

/* In an order that is always the same. */
static __device__ double block_sum(struct sample_memory *memory, double value)
{
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(~0u, value, distance);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        memory->warp_values[threadIdx.x / 32] = (uint64_t)__double_as_longlong(value);
    }
    __syncthreads();
    double sum = 0.0;
    for (int warp = 0; warp < WARPS; warp++) {
        sum += __longlong_as_double((long long)memory->warp_values[warp]);
    }
    return sum;
}

/* The sum up to and with this thread, and that of all. */
static __device__ uint64_t block_scan(struct sample_memory *memory, uint64_t value, uint64_t *total)
{
    int lane = threadIdx.x % 32, own_warp = threadIdx.x / 32;
    for (int distance = 1; distance < 32; distance *= 2) {
        uint64_t before = __shfl_up_sync(~0u, value, distance);
        value += lane >= distance ? before : 0;
    }
    __syncthreads();
    if (lane == 31) {
        memory->warp_values[own_warp] = value;
    }
    __syncthreads();
    uint64_t sum = 0;
    for (int warp = 0; warp < WARPS; warp++) {
        value += warp < own_warp ? memory->warp_values[warp] : 0;
        sum += memory->warp_values[warp];
    }
    *total = sum;
    return value;
}

/* The same variable of another CTA of the cluster. */
template <typename VALUE> static __device__ VALUE *of_cta(VALUE *variable, int32_t rank)
{
#if HAS_CLUSTERS
    return (VALUE *)__cluster_map_shared_rank(variable, (unsigned)rank);
#else
    (void)rank;
    return variable;
#endif
}

/* The two halves of a wait for all CTAs of the cluster to have begun. */
static __device__ void tell_begun(void)
{
#if HAS_CLUSTERS
    __cluster_barrier_arrive_relaxed();
#endif
}

static __device__ void wait_begun(void)
{
#if HAS_CLUSTERS
    __cluster_barrier_wait();
#else
    __syncthreads();
#endif
}

/* Writes a value that all threads have to a variable of every CTA; seen after cluster_sync. */
template <typename VALUE> static __device__ void tell_all(VALUE *variable, VALUE value)
{
    if (threadIdx.x < SAMPLE_CLUSTER) {
        *of_cta(variable, (int32_t)threadIdx.x) = value;
    }
}

/* By all threads of the block: none reads the old value after, or the new one before. */
template <typename VALUE> static __device__ void set_shared(VALUE *variable, VALUE value)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        *variable = value;
    }
    __syncthreads();
}

/* 4 logits; those behind a chunk's last are -INFINITY. */
struct quad {
    float at[4];
};

static __device__ __forceinline__ struct quad load_quad(const float *logits)
{
    float4 loaded = *(const float4 *)logits;
    return {{loaded.x, loaded.y, loaded.z, loaded.w}};
}

/* Of the first of four that a thread has of a chunk, and from there to its next four. */
#define FIRST_QUAD ((int32_t)threadIdx.x * 4)
#define QUAD_STEP (4 * SAMPLE_THREADS)

/* ---- reading the row ------------------------------------------------------------------------ */

struct scan {
    float best_logit;
    int32_t best_idx; /* in the chunk */
    bool is_bad;
};

#define BAD_KEY UINT64_MAX /* above all keys */

static __device__ __forceinline__ void scan_logit(struct scan *scan, float logit, int32_t idx)
{
    scan->is_bad |= !(fabsf(logit) < CUDART_INF_F);
    if (logit > scan->best_logit) { /* a thread's come in the order of their ids */
        scan->best_logit = logit;
        scan->best_idx = idx;
    }
}

/* 16 bytes at a time, several loads under way. */
template <bool KEEP>
static __device__ void scan_wide(const float *source, float *kept, int32_t length,
                                 struct scan *scan)
{
    enum { LOADS = 5 };
    for (int32_t begin = FIRST_QUAD; begin < length; begin += LOADS * QUAD_STEP) {
        struct quad quads[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int32_t idx = begin + i * QUAD_STEP;
            if (idx < length) {
                quads[i] = load_quad(source + idx);
            }
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int32_t idx = begin + i * QUAD_STEP;
            if (idx + 4 <= length) {
                if (KEEP) {
                    *(float4 *)(kept + idx) =
                        make_float4(quads[i].at[0], quads[i].at[1], quads[i].at[2], quads[i].at[3]);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    scan_logit(scan, quads[i].at[j], idx + j);
                }
            } else if (idx < length) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (KEEP) {
                        kept[idx + j] = idx + j < length ? quads[i].at[j] : -CUDART_INF_F;
                    }
                    if (idx + j < length) {
                        scan_logit(scan, quads[i].at[j], idx + j);
                    }
                }
            }
        }
    }
}

static __device__ struct scan scan_row(const struct chunk *chunk, const float *row, bool is_wide,
                                       bool is_kept)
{
    struct scan scan = {-CUDART_INF_F, -1, false};
    const float *source = row + chunk->begin;
    float *kept = chunk->logits;
    int32_t length = chunk->length;
    if (is_wide && is_kept) {
        scan_wide<true>(source, kept, length, &scan);
    } else if (is_wide) {
        scan_wide<false>(source, kept, length, &scan);
    } else {
        for (int32_t idx = (int32_t)threadIdx.x; idx < (length + 3) / 4 * 4;
             idx += SAMPLE_THREADS) {
            float logit = idx < length ? source[idx] : -CUDART_INF_F;
            if (idx < length) {
                scan_logit(&scan, logit, idx);
            }
            if (is_kept) {
                kept[idx] = logit;
            }
        }
    }
    return scan;
}

/* The same of what is kept. Forbidden ids are not bad here. */
static __device__ struct scan scan_kept(const struct chunk *chunk)
{
    struct scan scan = {-CUDART_INF_F, -1, false};
    const float *kept = chunk->logits;
    int32_t length = chunk->length;
    for (int32_t begin = FIRST_QUAD; begin < length; begin += QUAD_STEP) {
        struct quad quad = load_quad(kept + begin);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scan_logit(&scan, quad.at[i], begin + i);
        }
    }
    scan.is_bad = false;
    return scan;
}

/* The best key of the row, from what its threads found: BAD_KEY if anything is bad, 0 if no logit
 * is above -INFINITY. If has_near, it is followed by find_near. */
static __device__ uint64_t share_best(const struct chunk *chunk, int turn, const struct scan *scan,
                                      bool has_near)
{
    struct sample_memory *memory = chunk->memory;
    int lane = threadIdx.x % 32;
    uint32_t bits = scan->best_idx < 0 ? 0 : ordered_bits(scan->best_logit);
    uint32_t highest = __reduce_max_sync(~0u, bits);
    uint32_t idx = __reduce_min_sync(~0u, bits == highest ? (uint32_t)scan->best_idx : ~0u);
    bool is_bad = __any_sync(~0u, scan->is_bad);
    if (lane == 0) {
        uint32_t last = (1u << chunk->id_bits) - 1;
        uint64_t key =
            (uint64_t)highest << chunk->id_bits | (last - (uint32_t)(chunk->begin + (int32_t)idx));
        key = highest == 0 ? 0 : key;
        memory->warp_best[threadIdx.x / 32] = is_bad ? BAD_KEY : key;
    }
    float near = scan->best_logit;
    near = fmaxf(near, __shfl_xor_sync(~0u, near, 1));
    near = fmaxf(near, __shfl_xor_sync(~0u, near, 2));
    for (int rank = lane % 4; has_near && rank < SAMPLE_CLUSTER; rank += 4) {
        *of_cta(&memory->told_near[chunk->rank * NEAR + (int)threadIdx.x / 4], rank) = near;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        uint64_t best = memory->warp_best[lane % WARPS];
        for (int distance = WARPS / 2; distance > 0; distance /= 2) {
            uint64_t other = __shfl_xor_sync(~0u, best, distance);
            best = other > best ? other : best;
        }
        tell_all(&memory->told_best[turn][chunk->rank], best);
    }
    cluster_sync();
    uint64_t best = 0;
    for (int rank = 0; rank < SAMPLE_CLUSTER; rank++) {
        uint64_t told = memory->told_best[turn][rank];
        best = told > best ? told : best;
    }
    return best;
}

#endif
