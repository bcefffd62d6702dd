/* SPDX-License-Identifier: Apache-2.0 */
/* The token history and sampling; what they compute is defined by ref/ref_sample.c.
 *
 * A row is one cluster. Its logits are read once: each CTA finds the best of its chunk, and keeps
 * the chunk in shared memory if more than that is asked for, where biases and penalties change it.
 *
 * Nothing is sorted that need not be. Ids have keys (logit, then lower id) of which no two are
 * equal; to find the key at which a count or a probability mass is reached from the top, the
 * cluster makes histograms of the keys, each of one bin of the one before, until that bin's ids fit
 * in a list, which the first CTA sorts.
 *
 * Masses are integers, in units of 2^-mass_bits of the best id's probability: their sums do not
 * depend on any order. A sum over n ids is off by n * 2^-(mass_bits + 1) at most, where the fp64
 * sums of the reference are off by about n * 2^-53: a draw or a cut at top_p can only come out
 * otherwise where it lies that close to a boundary (2^-29.8 for a vocabulary of 151,936, if all
 * errors had one sign). */
#include <math_constants.h>

#include "ops/cuda/kernels/ptx.cuh"
#include "ops/cuda/kernels/sample_params.h"

extern "C" __global__ void history(const __grid_constant__ struct history_kernel_params params)
{
    int32_t token = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    grid_wait_for_previous();
    grid_release_next();
    if (token >= params.num_tokens) {
        return;
    }
    int32_t token_id = 0, slot = params.slots[token];
    if (slot >= 0) {
        int32_t *kept =
            &params.history.token_ids[slot * params.history.stride + params.positions[token]];
        token_id = params.token_ids[token];
        if (token_id >= 0) {
            *kept = token_id;
        } else {
            token_id = *kept;
        }
    }
    params.d[token] = token_id;
}

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

/* ---- biases and penalties ------------------------------------------------------------------- */

/* Each id by the thread of the first entry that names it, in the order of the entries. */
static __device__ bool apply_bias(const struct chunk *chunk, const struct sample_bias *bias,
                                  int32_t num_bias)
{
    bool is_bad = false;
    for (int32_t i = (int32_t)threadIdx.x; i < num_bias; i += SAMPLE_THREADS) {
        int32_t id = bias[i].token_id, idx = id - chunk->begin, first = 0;
        if (idx < 0 || idx >= chunk->length) {
            continue;
        }
        while (bias[first].token_id != id) {
            first++;
        }
        if (first < i) {
            continue;
        }
        float logit = chunk->logits[idx];
        for (int32_t j = i; j < num_bias; j++) {
            if (bias[j].token_id != id) {
                continue;
            }
            if (bias[j].bias == -CUDART_INF_F) {
                logit = -CUDART_INF_F;
            } else if (logit != -CUDART_INF_F) {
                logit = __fadd_rn(logit, bias[j].bias);
                if (!isfinite(logit)) {
                    is_bad = true;
                    break;
                }
            }
        }
        chunk->logits[idx] = logit;
    }
    return is_bad;
}

#define SEEN_BEFORE 0x80000000u /* beside the count of the output */
#define SEEN_OUTPUT 0x80000000u /* beside an index */

/* Of an id that occurs, num_seen times in the output. */
static __device__ float penalized_logit(const struct sample_row *row, float logit,
                                        uint32_t num_seen)
{
    if (row->repetition_penalty != 1.0f) {
        logit = logit > 0.0f ? __fdiv_rn(logit, row->repetition_penalty)
                             : __fmul_rn(logit, row->repetition_penalty);
    }
    if (num_seen > 0) {
        logit = __fsub_rn(logit, __fmul_rn(row->frequency_penalty, (float)num_seen));
        logit = __fsub_rn(logit, row->presence_penalty);
    }
    return logit;
}

/* Most tokens of a chunk that are compared with each other instead. */
#define SEEN_LIST 256

/* From a list of them, indices of the chunk. */
static __device__ bool penalize_list(const struct chunk *chunk, const struct sample_row *row,
                                     uint32_t count)
{
    const uint32_t *seen = chunk->memory->seen;
    bool is_bad = false;
    uint32_t part = threadIdx.x % 4; /* four threads for each */
    for (uint32_t begin = 0; begin < count; begin += SAMPLE_THREADS / 4) {
        uint32_t entry = begin + threadIdx.x / 4;
        uint32_t own = entry < count ? seen[entry] & ~SEEN_OUTPUT : 0;
        uint32_t num_seen = 0, first = entry;
#pragma unroll 4
        for (uint32_t i = part; i < count; i += 4) {
            bool is_same = (seen[i] & ~SEEN_OUTPUT) == own;
            num_seen += is_same ? seen[i] / SEEN_OUTPUT : 0;
            first = is_same ? min(first, i) : first;
        }
        for (int distance = 1; distance < 4; distance *= 2) {
            num_seen += __shfl_xor_sync(~0u, num_seen, distance);
            first = min(first, __shfl_xor_sync(~0u, first, distance));
        }
        if (part == 0 && first == entry && entry < count) {
            float logit = chunk->logits[own];
            if (logit != -CUDART_INF_F) {
                logit = penalized_logit(row, logit, num_seen);
                is_bad |= !isfinite(logit);
                chunk->logits[own] = logit;
            }
        }
    }
    return is_bad;
}

static __device__ bool apply_penalties(const struct chunk *chunk, const struct sample_row *row,
                                       const int32_t *token_ids)
{
    uint32_t *seen = chunk->memory->seen;
    int32_t first = row->repetition_penalty != 1.0f ? 0 : row->num_prompt_tokens;
    bool is_bad = false;
    set_shared(&chunk->memory->list_count, 0u);
#pragma unroll 4
    for (int32_t position = first + (int32_t)threadIdx.x; position < row->num_tokens;
         position += SAMPLE_THREADS) {
        uint32_t idx = (uint32_t)(token_ids[position] - chunk->begin);
        if (idx < (uint32_t)chunk->length) {
            uint32_t place = atomicAdd(&chunk->memory->list_count, 1u);
            if (place < SEEN_LIST) {
                seen[place] = idx | (position >= row->num_prompt_tokens ? SEEN_OUTPUT : 0);
            }
        }
    }
    __syncthreads();
    if (chunk->memory->list_count <= SEEN_LIST) {
        return penalize_list(chunk, row, chunk->memory->list_count);
    }
    /* Counters of SEEN_IDS ids at a time. */
    __syncthreads();
    for (int32_t begin = 0; begin < chunk->length; begin += SEEN_IDS) {
        int32_t count = min(SEEN_IDS, chunk->length - begin);
        for (int32_t i = (int32_t)threadIdx.x; i < count; i += SAMPLE_THREADS) {
            seen[i] = 0;
        }
        __syncthreads();
#pragma unroll 4
        for (int32_t position = first + (int32_t)threadIdx.x; position < row->num_tokens;
             position += SAMPLE_THREADS) {
            uint32_t i = (uint32_t)(token_ids[position] - chunk->begin - begin);
            if (i < (uint32_t)count) {
                if (position >= row->num_prompt_tokens) {
                    atomicAdd(&seen[i], 1u);
                } else {
                    atomicOr(&seen[i], SEEN_BEFORE);
                }
            }
        }
        __syncthreads();
        for (int32_t i = (int32_t)threadIdx.x; i < count; i += SAMPLE_THREADS) {
            float logit = chunk->logits[begin + i];
            if (seen[i] != 0 && logit != -CUDART_INF_F) {
                logit = penalized_logit(row, logit, seen[i] & ~SEEN_BEFORE);
                is_bad |= !isfinite(logit);
                chunk->logits[begin + i] = logit;
            }
        }
        __syncthreads();
    }
    return is_bad;
}

/* ---- probability masses --------------------------------------------------------------------- */

/* What is left of the row, and how likely. */
struct weights {
    double best_logit;
    double scale; /* log2(e) / temperature */
    double unit;  /* 2^(52 - mass_bits): fractions added to it are in units in the lower bits */
    uint64_t floor_key, min_mass;
};

/* 2^x, -60 <= x <= 0, within a few 2^-53 of it: 2^fraction by its Taylor series. */
static __device__ __forceinline__ double exp2_exact(double x)
{
    const double to_integer = 0x1.8p52; /* added, it leaves the nearest integer in the lower bits */
    double shifted = x + to_integer;
    double f = x - (shifted - to_integer);
    double p = 0x1.e8cac7351bb25p-32;
    p = fma(p, f, 0x1.e4cf5158b8ecap-28);
    p = fma(p, f, 0x1.b5253d395e7c4p-24);
    p = fma(p, f, 0x1.62c0223a5c824p-20);
    p = fma(p, f, 0x1.ffcbfc588b0c7p-17);
    p = fma(p, f, 0x1.430912f86c787p-13);
    p = fma(p, f, 0x1.5d87fe78a6731p-10);
    p = fma(p, f, 0x1.3b2ab6fba4e77p-7);
    p = fma(p, f, 0x1.c6b08d704a0c0p-5);
    p = fma(p, f, 0x1.ebfbdff82c58fp-3);
    p = fma(p, f, 0x1.62e42fefa39efp-1);
    p = fma(p, f, 1.0);
    return __hiloint2double(__double2hiint(p) + (__double2loint(shifted) << 20), __double2loint(p));
}

/* min_mass is 0 as long as the sum that top_p takes its share of is wanted. */
static __device__ __forceinline__ uint64_t mass_of(const struct weights *weights, float logit)
{
    double x = ((double)logit - weights->best_logit) * weights->scale;
    if (!(x >= -60.0)) { /* less than half a unit */
        return 0;
    }
    uint64_t mass =
        (uint64_t)__double_as_longlong(weights->unit + exp2_exact(x)) & ((1ull << 52) - 1);
    return mass < weights->min_mass ? 0 : mass;
}

/* Of a probability before normalisation. */
static __device__ uint64_t min_mass_of(const struct chunk *chunk, float min_p)
{
    return (uint64_t)__double2ull_rn((double)min_p * (double)(1ull << chunk->mass_bits));
}

/* Of the cluster, told by each CTA. */
static __device__ uint64_t sum_told(const uint64_t *told)
{
    uint64_t sum = 0;
    for (int rank = 0; rank < SAMPLE_CLUSTER; rank++) {
        sum += told[rank];
    }
    return sum;
}

/* Of the row from the floor on. Not inlined, like send_near: the row's function would spill. */
static __device__ __noinline__ uint64_t row_mass(const struct chunk *chunk,
                                                 const struct weights *weights, int turn)
{
    const struct weights own = *weights;
    const float *logits = chunk->logits;
    int32_t length = chunk->length, begin_id = chunk->begin, id_bits = chunk->id_bits;
    uint64_t mass = 0, total;
    for (int32_t begin = FIRST_QUAD; begin < length; begin += QUAD_STEP) {
        struct quad quad = load_quad(logits + begin);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (key_of(quad.at[i], begin_id + begin + i, id_bits) >= own.floor_key) {
                mass += mass_of(&own, quad.at[i]);
            }
        }
    }
    (void)block_scan(chunk->memory, mass, &total);
    tell_all(&chunk->memory->told_mass[turn][chunk->rank], total);
    cluster_sync();
    return sum_told(chunk->memory->told_mass[turn]);
}

/* ---- histograms ----------------------------------------------------------------------------- */

static __device__ void clear_histogram(struct sample_memory *memory)
{
    struct histogram *histogram = &memory->histogram;
    for (int bin = (int)threadIdx.x; bin < BINS; bin += SAMPLE_THREADS) {
        histogram->masses[bin] = 0;
        histogram->counts[bin] = 0;
    }
    if (threadIdx.x == 0) {
        memory->list_count = 0;
    }
    __syncthreads();
}

/* Digits of the bits [shift, cut.shift) of the cut's keys, or the first histogram. */
template <bool BY_MASS>
static __device__ void fill_histogram(const struct chunk *chunk, const struct weights *weights,
                                      const struct cut &cut, int32_t shift)
{
    struct histogram *histogram = &chunk->memory->histogram;
    for (int32_t idx = (int32_t)threadIdx.x; idx < chunk->length; idx += SAMPLE_THREADS) {
        float logit = chunk->logits[idx];
        uint64_t key = key_of(logit, chunk->begin + idx, chunk->id_bits);
        int32_t bin = bin_of(logit, chunk->best_logit);
        if (logit == -CUDART_INF_F || key < weights->floor_key) {
            continue;
        }
        if (cut.bin >= 0) {
            if (bin != cut.bin || key >> cut.shift != cut.prefix) {
                continue;
            }
            uint32_t last = (1u << (cut.shift - shift)) - 1;
            bin = (int32_t)(last - ((uint32_t)(key >> shift) & last));
        }
        atomicAdd(&histogram->counts[bin], 1u);
        if (BY_MASS) {
            atomicAdd((unsigned long long *)&histogram->masses[bin],
                      (unsigned long long)mass_of(weights, logit));
        }
    }
}

/* Sums of 32 bins each; then all CTAs have theirs. */
template <bool BY_MASS> static __device__ void finish_histogram(struct sample_memory *memory)
{
    struct histogram *histogram = &memory->histogram;
    int lane = threadIdx.x % 32;
    __syncthreads();
    for (int group = (int)threadIdx.x / 32; group < GROUPS; group += WARPS) {
        uint64_t mass = BY_MASS ? histogram->masses[group * 32 + lane] : 0;
        uint32_t count = __reduce_add_sync(~0u, histogram->counts[group * 32 + lane]);
        for (int distance = 16; BY_MASS && distance > 0; distance /= 2) {
            mass += __shfl_xor_sync(~0u, mass, distance);
        }
        if (lane == 0) {
            histogram->group_masses[group] = mass;
            histogram->group_counts[group] = count;
        }
    }
    cluster_sync();
}

/* 32 bins, summed over the cluster: the first at which `goal` is reached, or the last that has
 * anything. All warps find the same. */
struct bin_found {
    int32_t bin;
    uint32_t count_before, count;
    uint64_t remaining; /* goal without what lies before */
};

template <bool BY_MASS>
static __device__ struct bin_found find_bin(struct sample_memory *memory, const uint64_t *masses,
                                            const uint32_t *counts, uint64_t goal)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    if (warp < SAMPLE_CLUSTER) {
        memory->cta_counts[warp][lane] = of_cta(counts, warp)[lane];
        if (BY_MASS) {
            memory->cta_masses[warp][lane] = of_cta(masses, warp)[lane];
        }
    }
    __syncthreads();
    uint32_t count = 0;
    uint64_t weight = 0;
#pragma unroll 2 /* all at once would spill registers */
    for (int rank = 0; rank < SAMPLE_CLUSTER; rank++) {
        count += memory->cta_counts[rank][lane];
        weight += BY_MASS ? memory->cta_masses[rank][lane] : 0;
    }
    weight = BY_MASS ? weight : count;
    uint32_t count_sum = count;
    uint64_t weight_sum = weight;
    for (int distance = 1; distance < 32; distance *= 2) {
        uint32_t counts_before = __shfl_up_sync(~0u, count_sum, distance);
        uint64_t weights_before = __shfl_up_sync(~0u, weight_sum, distance);
        count_sum += lane >= distance ? counts_before : 0;
        weight_sum += lane >= distance ? weights_before : 0;
    }
    uint64_t total = __shfl_sync(~0u, weight_sum, 31);
    goal = goal < total ? goal : total;
    int found = __ffs((int)__ballot_sync(~0u, weight_sum >= goal)) - 1;
    struct bin_found result = {found, __shfl_sync(~0u, count_sum - count, found),
                               __shfl_sync(~0u, count, found),
                               goal - __shfl_sync(~0u, weight_sum - weight, found)};
    return result;
}

/* After a histogram of the bits [shift, cut.shift) that the whole cluster has made. */
template <bool BY_MASS>
static __device__ void find_cut(struct sample_memory *memory, uint64_t goal, int32_t shift)
{
    const struct histogram *histogram = &memory->histogram;
    struct cut *cut = &memory->cut;
    struct bin_found group =
        find_bin<BY_MASS>(memory, histogram->group_masses, histogram->group_counts, goal);
    struct bin_found bin = find_bin<BY_MASS>(memory, histogram->masses + group.bin * 32,
                                             histogram->counts + group.bin * 32, group.remaining);
    int32_t digit = group.bin * 32 + bin.bin;
    if (threadIdx.x == 0) {
        if (cut->bin < 0) {
            cut->bin = digit;
        } else {
            uint32_t last = (1u << (cut->shift - shift)) - 1;
            cut->prefix = cut->prefix << (cut->shift - shift) | (last - (uint32_t)digit);
            cut->shift = shift;
        }
        cut->remaining = bin.remaining;
        cut->before_count += group.count_before + bin.count_before;
        cut->members = bin.count;
    }
    __syncthreads();
}

/* Narrows a cut in which `goal` (at least 1) is reached, counting keys or masses from the best key
 * on, until its members fit in a list, or, if HAS_ABOVE, with all that is above them. */
template <bool BY_MASS, bool HAS_ABOVE>
static __device__ struct cut narrow_cut(const struct chunk *chunk, const struct weights *weights,
                                        uint64_t goal)
{
    struct sample_memory *memory = chunk->memory;
    struct cut cut = {0, goal, 0, 0, -1, 32 + chunk->id_bits};
    __syncthreads();
    if (threadIdx.x == 0) {
        memory->cut = cut;
    }
    for (;;) {
        int32_t shift = cut.shift > BIN_BITS ? cut.shift - BIN_BITS : 0;
        clear_histogram(memory);
        fill_histogram<BY_MASS>(chunk, weights, cut, shift);
        finish_histogram<BY_MASS>(memory);
        find_cut<BY_MASS>(memory, cut.remaining, shift);
        cut = memory->cut;
        /* Without any bit left the cut has one member, and less than the goal is above it. */
        if (cut.members + (HAS_ABOVE ? cut.before_count : 0) <= LIST) {
            return cut;
        }
        cluster_sync(); /* the others have seen this histogram */
    }
}

/* ---- lists ---------------------------------------------------------------------------------- */

static __device__ __forceinline__ void append(struct sample_memory *memory, uint64_t key)
{
    uint32_t place = atomicAdd(&memory->list_count, 1u);
    if (place < LIST) {
        memory->histogram.list[place] = key;
    }
}

/* The cut's keys, or, if HAS_ABOVE, those above it too. */
template <bool HAS_ABOVE>
static __device__ void append_cut(const struct chunk *chunk, const struct weights *weights,
                                  const struct cut &cut)
{
    for (int32_t idx = (int32_t)threadIdx.x; idx < chunk->length; idx += SAMPLE_THREADS) {
        float logit = chunk->logits[idx];
        int32_t bin = bin_of(logit, chunk->best_logit);
        if (bin > cut.bin || logit == -CUDART_INF_F) {
            continue;
        }
        uint64_t key = key_of(logit, chunk->begin + idx, chunk->id_bits);
        uint64_t prefix = key >> cut.shift;
        bool is_member = bin == cut.bin && prefix == cut.prefix;
        bool is_above = bin < cut.bin || prefix > cut.prefix;
        if (key >= weights->floor_key && (is_member || (HAS_ABOVE && is_above))) {
            append(chunk->memory, key);
        }
    }
}

/* Of a key that is near: into the list and to rank 0. */
static __device__ void send(const struct chunk *chunk, uint64_t key)
{
    struct sample_memory *memory = chunk->memory;
    uint32_t place = atomicAdd(&memory->list_count, 1u);
    if (place < LIST) {
        memory->histogram.list[place] = key;
    }
    if (place < INBOX) {
        *of_cta(&memory->histogram.inbox[chunk->rank][place], 0) = key;
    }
}

/* Keys of logits less than `distance` below the best. */
static __device__ __noinline__ void send_near(const struct chunk *chunk, float distance)
{
    const float *logits = chunk->logits;
    int32_t length = chunk->length;
    float best_logit = chunk->best_logit;
    for (int32_t begin = FIRST_QUAD; begin < length; begin += QUAD_STEP) {
        struct quad quad = load_quad(logits + begin);
        float most = fmaxf(fmaxf(quad.at[0], quad.at[1]), fmaxf(quad.at[2], quad.at[3]));
        if (__fsub_rn(best_logit, most) < distance) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (__fsub_rn(best_logit, quad.at[i]) < distance) {
                    send(chunk, key_of(quad.at[i], chunk->begin + begin + i, chunk->id_bits));
                }
            }
        }
    }
}

/* Of the keys in all lists. */
static __device__ uint32_t sum_counts(const struct sample_memory *memory)
{
    uint32_t sum = 0;
    for (int rank = 0; rank < SAMPLE_CLUSTER; rank++) {
        sum += memory->told_count[rank];
    }
    return sum;
}

/* Brings the CTAs' lists together in that of rank 0, unless they have more than LIST keys. All get
 * their number. */
static __device__ uint32_t gather_lists(const struct chunk *chunk)
{
    struct sample_memory *memory = chunk->memory;
    uint64_t *list = memory->histogram.list;
    __syncthreads();
    tell_all(&memory->told_count[chunk->rank], memory->list_count);
    cluster_sync();
    uint32_t total = sum_counts(memory);
    if (total > LIST) {
        return total;
    }
    if (chunk->rank == 0) {
        for (uint32_t i = memory->told_count[0] + threadIdx.x; i < total; i += SAMPLE_THREADS) {
            uint32_t place = i;
            int32_t rank = 0;
            while (place >= memory->told_count[rank]) {
                place -= memory->told_count[rank++];
            }
            list[i] = of_cta(list, rank)[place];
        }
    }
    cluster_sync();
    return total;
}

/* The same after send_near, by what rank 0 was sent if that is all. */
static __device__ uint32_t gather_sent(const struct chunk *chunk)
{
    struct sample_memory *memory = chunk->memory;
    __syncthreads();
    tell_all(&memory->told_count[chunk->rank], memory->list_count);
    cluster_sync();
    uint32_t most = 0;
    for (int rank = 0; rank < SAMPLE_CLUSTER; rank++) {
        most = max(most, memory->told_count[rank]);
    }
    if (most > INBOX) {
        cluster_sync(); /* all have seen the counts */
        return gather_lists(chunk);
    }
    if (chunk->rank == 0) {
        for (uint32_t i = INBOX + threadIdx.x; i < LIST; i += SAMPLE_THREADS) {
            uint32_t rank = i / INBOX, place = i % INBOX, begin = 0;
            for (uint32_t before = 0; before < rank; before++) {
                begin += memory->told_count[before];
            }
            if (place < memory->told_count[rank]) {
                memory->histogram.list[begin + place] = memory->histogram.inbox[rank][place];
            }
        }
    }
    return sum_counts(memory);
}

/* A distance from the best within which there are at least `goal` ids, and not many more: where as
 * many groups of four threads have their best. (Less than the goal if fewer have any.) */
static __device__ float find_near(const struct chunk *chunk, uint32_t goal)
{
    struct sample_memory *memory = chunk->memory;
    uint32_t *counts = memory->histogram.counts;
    __syncthreads();
    for (int bin = (int)threadIdx.x; bin < BINS; bin += SAMPLE_THREADS) {
        counts[bin] = 0;
    }
    if (threadIdx.x == 0) {
        memory->list_count = 0;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < SAMPLE_CLUSTER * NEAR; i += SAMPLE_THREADS) {
        if (memory->told_near[i] != -CUDART_INF_F) {
            atomicAdd(&counts[bin_of(memory->told_near[i], chunk->best_logit)], 1u);
        }
    }
    __syncthreads();
    int bin = (int)threadIdx.x * 2; /* and the next */
    uint64_t total, own = counts[bin] + counts[bin + 1];
    uint64_t upto = block_scan(memory, own, &total);
    uint64_t reached = min((uint64_t)goal, total);
    if (upto - own < reached && reached <= upto) {
        memory->near_bin = (uint32_t)bin + (upto - own + counts[bin] < reached);
    }
    __syncthreads();
    uint32_t last = memory->near_bin;
    return last < BINS - 1 ? (float)(last + 1) / BINS_OF_ONE : CUDART_MAX_NORMAL_F;
}

/* Brings at least `goal` (at most LIST) of the best keys into the list of rank 0, or all there are,
 * and returns their number. */
static __device__ uint32_t collect_best(const struct chunk *chunk, const struct weights *weights,
                                        uint32_t goal)
{
    send_near(chunk, find_near(chunk, goal));
    uint32_t count = gather_sent(chunk);
    if (count < goal || count > LIST) {
        struct cut cut = narrow_cut<false, true>(chunk, weights, (uint64_t)goal);
        append_cut<true>(chunk, weights, cut);
        count = gather_lists(chunk);
    }
    return count;
}

/* Most keys that are sorted by counting, for each, those above it. */
#define FEW (SAMPLE_THREADS / 4)

/* The best first. */
static __device__ void sort_list(struct sample_memory *memory, uint32_t count)
{
    uint64_t *list = memory->histogram.list;
    __syncthreads();
    if (count <= FEW) {
        uint32_t own = threadIdx.x / 4, rank = 0; /* four threads for each */
        uint64_t key = own < count ? list[own] : 0;
#pragma unroll 4
        for (uint32_t i = threadIdx.x % 4; i < count; i += 4) {
            rank += list[i] > key;
        }
        rank += __shfl_xor_sync(~0u, rank, 1);
        rank += __shfl_xor_sync(~0u, rank, 2);
        __syncthreads();
        if (own < count && threadIdx.x % 4 == 0) {
            list[rank] = key;
        }
        __syncthreads();
        return;
    }
    /* Bitonic; a thread has one pair in each step. */
    uint32_t size = 2 * FEW;
    while (size < count) {
        size *= 2;
    }
    for (uint32_t i = count + threadIdx.x; i < size; i += SAMPLE_THREADS) {
        list[i] = 0; /* below all keys */
    }
    for (uint32_t run = 2; run <= size; run *= 2) {
        for (uint32_t distance = run / 2; distance > 0; distance /= 2) {
            if (distance >= 32 || distance == run / 2) {
                __syncthreads();
            } else {
                __syncwarp(); /* a warp's pairs lie in 64 keys of its own */
            }
            uint32_t low = 2 * threadIdx.x - (threadIdx.x & (distance - 1));
            if (threadIdx.x < size / 2) {
                uint64_t a = list[low], b = list[low + distance];
                bool is_descending = (low & run) == 0;
                if (is_descending ? a < b : a > b) {
                    list[low] = b;
                    list[low + distance] = a;
                }
            }
        }
    }
    __syncthreads();
}

/* Of the sorted list; 1 each if not BY_MASS. */
template <bool BY_MASS>
static __device__ void weigh_list(const struct chunk *chunk, const struct weights *weights,
                                  uint32_t count)
{
    struct histogram *histogram = &chunk->memory->histogram;
    for (uint32_t i = threadIdx.x; i < count; i += SAMPLE_THREADS) {
        histogram->list_masses[i] =
            BY_MASS ? mass_of(weights, key_logit(histogram->list[i], chunk->id_bits)) : 1;
    }
    __syncthreads();
}

/* Of the first `count` of the sorted list, each thread has some: their weights summed up to and
 * with each, and the sum of all. Those below min_mass count as 0. */
struct list_sums {
    uint64_t begin, upto[LIST_PER_THREAD], total;
};

static __device__ void sum_list(const struct chunk *chunk, uint64_t min_mass, uint32_t count,
                                struct list_sums *sums)
{
    const uint64_t *masses = chunk->memory->histogram.list_masses;
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < LIST_PER_THREAD; i++) {
        uint32_t idx = threadIdx.x * LIST_PER_THREAD + (uint32_t)i;
        uint64_t mass = idx < count ? masses[idx] : 0;
        sum += mass < min_mass ? 0 : mass;
        sums->upto[i] = sum;
    }
    sums->begin = block_scan(chunk->memory, sum, &sums->total) - sum;
#pragma unroll
    for (int i = 0; i < LIST_PER_THREAD; i++) {
        sums->upto[i] += sums->begin;
    }
}

/* The first at which the sum reaches the goal, which is at least 1; the total does. */
static __device__ uint32_t find_in_list(struct sample_memory *memory, const struct list_sums *sums,
                                        uint64_t goal)
{
    __syncthreads();
#pragma unroll
    for (int i = 0; i < LIST_PER_THREAD; i++) {
        uint64_t before = i == 0 ? sums->begin : sums->upto[i - 1];
        if (before < goal && sums->upto[i] >= goal) {
            memory->list_idx = threadIdx.x * LIST_PER_THREAD + (uint32_t)i;
        }
    }
    __syncthreads();
    return memory->list_idx;
}

/* The key at which the goal is reached, from the best on. */
template <bool BY_MASS>
static __device__ uint64_t select_key(const struct chunk *chunk, const struct weights *weights,
                                      uint64_t goal, int turn)
{
    struct sample_memory *memory = chunk->memory;
    struct cut cut = narrow_cut<BY_MASS, false>(chunk, weights, goal);
    append_cut<false>(chunk, weights, cut);
    uint32_t count = gather_lists(chunk);
    if (chunk->rank == 0) {
        struct list_sums sums;
        sort_list(memory, count);
        weigh_list<BY_MASS>(chunk, weights, count);
        sum_list(chunk, 0, count, &sums);
        uint32_t idx = find_in_list(memory, &sums, cut.remaining);
        tell_all(&memory->told_key[turn], memory->histogram.list[idx]);
    }
    cluster_sync();
    return memory->told_key[turn];
}

/* ---- the draw ------------------------------------------------------------------------------- */

/* As philox4x32 of sample.h; a uniform number in [0, 1) with 53 bits. */
static __device__ double draw_uniform(const struct sample_row *row)
{
    uint32_t c0 = (uint32_t)row->num_tokens, c1 = 0, c2 = (uint32_t)row->choice_idx, c3 = 0;
    uint32_t k0 = row->seed_low, k1 = row->seed_high;
    for (int round = 0; round < 10; round++) {
        uint64_t product_0 = (uint64_t)0xD2511F53u * c0;
        uint64_t product_2 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(product_2 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)product_2;
        c2 = (uint32_t)(product_0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)product_0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    uint64_t bits = ((uint64_t)c0 << 32 | c1) >> 11;
    return (double)bits * 0x1p-53;
}

/* The least mass that is at least top_p of all. */
static __device__ uint64_t top_p_goal(float top_p, uint64_t mass)
{
    uint64_t goal = (uint64_t)ceil((double)top_p * (double)mass);
    return goal < 1 ? 1 : goal;
}

/* The reference's line begins with the least likely id, sums here with the most likely: the id at
 * which the masses so far exceed u * mass is the one at which they, from the other end, reach what
 * is left. */
static __device__ uint64_t draw_goal(double uniform, uint64_t mass)
{
    uint64_t below = (uint64_t)(uniform * (double)mass);
    return below < mass ? mass - below : 1;
}

/* From the list, of which the first `count` after sorting may be drawn. The goal of top_p, or 0: it
 * follows from these. By rank 0. */
static __device__ int32_t draw_from_list(const struct chunk *chunk, const struct sample_row *row,
                                         const struct weights *weights, uint32_t count,
                                         uint64_t goal)
{
    struct sample_memory *memory = chunk->memory;
    struct list_sums sums;
    if (threadIdx.x == SAMPLE_THREADS - 1) { /* of a warp that has less to sort */
        memory->uniform = draw_uniform(row);
    }
    sort_list(memory, sum_counts(memory));
    weigh_list<true>(chunk, weights, count);
    sum_list(chunk, 0, count, &sums);
    if (row->top_p < 1.0f) {
        goal = goal == 0 ? top_p_goal(row->top_p, sums.total) : goal;
        count = find_in_list(memory, &sums, goal) + 1;
    }
    if (row->top_p < 1.0f || row->min_p > 0.0f) {
        sum_list(chunk, min_mass_of(chunk, row->min_p), count, &sums);
    }
    uint32_t idx = find_in_list(memory, &sums, draw_goal(memory->uniform, sums.total));
    return key_id(memory->histogram.list[idx], chunk->id_bits);
}

/* The ids that are left stand in the line by their number: each thread sums up some that follow
 * each other. */
static __device__ int32_t draw_by_id(const struct chunk *chunk, const struct sample_row *row,
                                     const struct weights *weights)
{
    struct sample_memory *memory = chunk->memory;
    const struct weights own = *weights;
    const float *logits = chunk->logits;
    int32_t length = chunk->length;
    /* Odd, so that threads are in different banks. */
    int32_t segment = (length + SAMPLE_THREADS - 1) / SAMPLE_THREADS | 1;
    int32_t begin = min((int32_t)threadIdx.x * segment, length);
    int32_t end = min(begin + segment, length);
    uint64_t mass = 0, total, before = 0;
#pragma unroll 2
    for (int32_t idx = begin; idx < end; idx++) {
        mass += mass_of(&own, logits[idx]);
    }
    uint64_t upto = block_scan(memory, mass, &total);
    tell_all(&memory->told_mass[0][chunk->rank], total);
    cluster_sync();
    for (int rank = 0; rank < chunk->rank; rank++) {
        before += memory->told_mass[0][rank];
    }
    uint64_t all = sum_told(memory->told_mass[0]);
    /* Looked for is the first id at which the sum exceeds u * all. */
    uint64_t goal = all + 1 - draw_goal(draw_uniform(row), all);
    if (before < goal && goal <= before + total) {
        if (before + upto - mass < goal && goal <= before + upto) {
            memory->segment_begin = begin;
            memory->segment_goal = goal - (before + upto - mass);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            begin = memory->segment_begin;
            end = min(begin + segment, length);
            goal = memory->segment_goal;
            for (;; begin += 32) { /* the goal lies before the end */
                int32_t idx = begin + (int32_t)threadIdx.x;
                uint64_t sum = idx < end ? mass_of(&own, logits[idx]) : 0;
                for (int distance = 1; distance < 32; distance *= 2) {
                    uint64_t sum_before = __shfl_up_sync(~0u, sum, distance);
                    sum += (int)threadIdx.x >= distance ? sum_before : 0;
                }
                uint32_t reached = __ballot_sync(~0u, sum >= goal);
                if (reached != 0) {
                    if (threadIdx.x == 0) {
                        *of_cta(&memory->told_token_id, 0) =
                            chunk->begin + begin + __ffs((int)reached) - 1;
                    }
                    break;
                }
                goal -= __shfl_sync(~0u, sum, 31);
            }
        }
    }
    cluster_sync();
    return memory->told_token_id; /* of rank 0 */
}

/* Brings the best ids into the list of rank 0, as many as may be drawn under top_p or min_p, if
 * these are few: then true, with their number and the goal of top_p. */
static __device__ bool collect_near(const struct chunk *chunk, const struct sample_row *row,
                                    const struct weights *weights, uint32_t *count, uint64_t *goal)
{
    struct sample_memory *memory = chunk->memory;
    if (row->top_p >= 1.0f) {
        /* A little further than min_p, which is looked at again. */
        float distance = -logf(row->min_p) * row->temperature * 1.0001f;
        distance = fmaxf(distance, CUDART_MIN_DENORM_F); /* the best is less than that away */
        *goal = 0;
        set_shared(&memory->list_count, 0u);
        send_near(chunk, distance);
        *count = gather_sent(chunk);
        return *count <= LIST;
    }
    float distance = find_near(chunk, LIST / 2), best_logit = chunk->best_logit;
    const float *logits = chunk->logits;
    int32_t length = chunk->length;
    uint64_t all = 0, near = 0;
    for (int32_t begin = FIRST_QUAD; begin < length; begin += QUAD_STEP) {
        struct quad quad = load_quad(logits + begin);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint64_t mass = mass_of(weights, quad.at[i]);
            all += mass;
            if (__fsub_rn(best_logit, quad.at[i]) < distance) {
                near += mass;
                send(chunk, key_of(quad.at[i], chunk->begin + begin + i, chunk->id_bits));
            }
        }
    }
    (void)block_scan(memory, all, &all);
    (void)block_scan(memory, near, &near);
    tell_all(&memory->told_mass[0][chunk->rank], all);
    tell_all(&memory->told_mass[1][chunk->rank], near);
    *count = gather_sent(chunk);
    *goal = top_p_goal(row->top_p, sum_told(memory->told_mass[0]));
    return *count <= LIST && sum_told(memory->told_mass[1]) >= *goal;
}

/* An id of the row, whose largest logit is finite; rank 0 gets it. */
static __device__ int32_t draw(const struct chunk *chunk, const struct sample_row *row,
                               int32_t num_ids)
{
    __shared__ struct weights weights;
    if (threadIdx.x == 0) {
        weights.best_logit = (double)chunk->best_logit;
        weights.min_mass = 0;
        weights.scale = 0x1.71547652b82fep+0 / (double)row->temperature;
        weights.unit = __longlong_as_double((long long)(1023 + 52 - chunk->mass_bits) << 52);
        weights.floor_key = 0;
    }
    __syncthreads();
    bool has_top_k = row->top_k > 0 && row->top_k < num_ids;
    bool has_top_p = row->top_p < 1.0f;
    if (!has_top_k && !has_top_p && !(row->min_p > 0.0f)) {
        return draw_by_id(chunk, row, &weights);
    }
    uint64_t goal = 0;
    uint32_t count;
    bool is_listed;
    if (has_top_k && row->top_k <= LIST) {
        uint32_t top_k = (uint32_t)row->top_k;
        count = min(collect_best(chunk, &weights, top_k), top_k);
        is_listed = true;
    } else {
        is_listed = !has_top_k && collect_near(chunk, row, &weights, &count, &goal);
    }
    if (is_listed) {
        if (chunk->rank > 0) {
            return 0;
        }
        return draw_from_list(chunk, row, &weights, count, goal);
    }
    if (has_top_k) {
        uint64_t key = select_key<false>(chunk, &weights, (uint64_t)row->top_k, 0);
        set_shared(&weights.floor_key, key);
    }
    if (has_top_p) {
        goal = goal == 0 ? top_p_goal(row->top_p, row_mass(chunk, &weights, 0)) : goal;
        uint64_t key = select_key<true>(chunk, &weights, goal, 1);
        set_shared(&weights.floor_key, key);
    }
    set_shared(&weights.min_mass, min_mass_of(chunk, row->min_p));
    uint64_t mass = row_mass(chunk, &weights, 1);
    uint64_t key = select_key<true>(chunk, &weights, draw_goal(draw_uniform(row), mass), 2);
    return key_id(key, chunk->id_bits);
}

/* ---- logprobs ------------------------------------------------------------------------------- */

/* log of the sum of exp of the row's logits, for rank 0; fp32 terms, each within 2^-20. */
static __device__ double log_sum_exp(const struct chunk *chunk)
{
    struct sample_memory *memory = chunk->memory;
    const float *logits = chunk->logits;
    int32_t length = chunk->length;
    float best_logit = chunk->best_logit, sum = 0.0f;
    for (int32_t begin = FIRST_QUAD; begin < length; begin += QUAD_STEP) {
        struct quad quad = load_quad(logits + begin);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum += exp2_approx((quad.at[i] - best_logit) * LOG2_E);
        }
    }
    tell_all(&memory->told_sum[chunk->rank], block_sum(memory, (double)sum));
    cluster_sync();
    double row_sum = 0.0;
    for (int rank = 0; rank < SAMPLE_CLUSTER; rank++) {
        row_sum += memory->told_sum[rank];
    }
    return (double)chunk->best_logit + log(row_sum);
}

/* Returns how many there are, to rank 0. */
static __device__ int32_t store_top(const struct chunk *chunk, int32_t num_wanted, double log_sum,
                                    struct sample_logprob *top)
{
    __shared__ struct weights weights;
    set_shared(&weights.floor_key, (uint64_t)0);
    int32_t count = (int32_t)collect_best(chunk, &weights, (uint32_t)num_wanted);
    cluster_sync(); /* rank 0 may be sent keys again */
    if (chunk->rank > 0) {
        return 0;
    }
    const uint64_t *list = chunk->memory->histogram.list;
    sort_list(chunk->memory, (uint32_t)count);
    count = min(count, num_wanted);
    for (int32_t i = (int32_t)threadIdx.x; i < count; i += SAMPLE_THREADS) {
        top[i].token_id = key_id(list[i], chunk->id_bits);
        top[i].logprob = (float)((double)key_logit(list[i], chunk->id_bits) - log_sum);
    }
    return count;
}

/* ---- a row ---------------------------------------------------------------------------------- */

static __device__ bool has_penalty(const struct sample_row *row)
{
    return row->repetition_penalty != 1.0f || row->frequency_penalty != 0.0f ||
           row->presence_penalty != 0.0f;
}

/* From the row's finite logits, of which `best` is the best; rank 0 gets the id, or what sample.h
 * says of a row that has none. */
static __device__ int32_t choose_token(const struct sample_kernel_params &params,
                                       const struct sample_row *row, struct chunk *chunk,
                                       uint64_t best)
{
    if (row->num_bias > 0 || has_penalty(row)) {
        bool is_bad = apply_bias(chunk, params.bias + row->bias_begin, row->num_bias);
        __syncthreads();
        if (has_penalty(row)) {
            is_bad |= apply_penalties(chunk, row,
                                      params.history.token_ids + row->slot * params.history.stride);
        }
        __syncthreads();
        struct scan scan = scan_kept(chunk);
        scan.is_bad = is_bad;
        best = share_best(chunk, 1, &scan, true);
        if (best == BAD_KEY) {
            return SAMPLE_BAD_LOGITS;
        }
        if (best == 0) { /* no id had more than -INFINITY */
            return SAMPLE_ALL_FORBIDDEN;
        }
        set_shared(&chunk->best_logit, key_logit(best, chunk->id_bits));
    }
    return row->temperature == 0.0f ? key_id(best, chunk->id_bits)
                                    : draw(chunk, row, params.num_ids);
}

/* By rank 0. */
static __device__ void store_result(const struct sample_kernel_params &params,
                                    const struct sample_row *row, int64_t row_idx,
                                    struct sample_result result)
{
    if (threadIdx.x != 0) {
        return;
    }
    if (row->is_stored != 0 && row->target_id < 0 && row->num_tokens < params.history.stride) {
        params.history.token_ids[row->slot * params.history.stride + row->num_tokens] =
            max(result.token_id, 0);
    }
    params.results[row_idx] = result;
}

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 2)
    sample_rows(const __grid_constant__ struct sample_kernel_params params)
{
    extern __shared__ float4 dynamic_memory[];
    __shared__ struct sample_memory memory;
    int32_t rank = (int32_t)cluster_cta_rank();
    int64_t row_idx = params.row_begin + blockIdx.x / SAMPLE_CLUSTER;
    __shared__ struct chunk chunk;
    if (threadIdx.x == 0) {
        chunk.logits = params.work == nullptr ? (float *)dynamic_memory
                                              : params.work + (int64_t)blockIdx.x * params.chunk;
        chunk.memory = &memory;
        chunk.begin = rank * params.chunk;
        chunk.length = max(0, min(params.chunk, params.num_ids - chunk.begin));
        chunk.rank = rank;
        chunk.id_bits = params.id_bits;
        chunk.mass_bits = params.mass_bits;
    }

    /* Waited for before a CTA is told anything: by then it has begun. */
    tell_begun();
    grid_wait_for_previous();
    grid_release_next();
    if (threadIdx.x < sizeof(struct sample_row) / 4) {
        ((int32_t *)&memory.row)[threadIdx.x] =
            ((const int32_t *)&params.rows[row_idx])[threadIdx.x];
    }
    __syncthreads();
    const struct sample_row &row = memory.row;
    if (row.logits_row < 0) {
        wait_begun();
        return;
    }
    const float *logits =
        params.logits + ((int64_t)row.logits_row - params.logits_row_begin) * params.vocab_size;
    bool is_changed = row.target_id < 0 && (row.num_bias > 0 || has_penalty(&row));
    bool is_drawn = row.target_id < 0 && row.temperature > 0.0f;
    bool is_kept = is_changed || is_drawn || row.num_logprobs >= 0;
    bool is_wide = params.vocab_size % 4 == 0 && (uintptr_t)params.logits % 16 == 0;
    struct scan scan = scan_row(&chunk, logits, is_wide, is_kept);
    wait_begun();
    uint64_t best = share_best(&chunk, 0, &scan, is_kept);
    bool is_bad = best == BAD_KEY;
    struct sample_result result = {SAMPLE_BAD_LOGITS, 0.0f, 0};
    if (!is_kept) {
        if (rank == 0 && !is_bad) {
            result.token_id = row.target_id >= 0 ? row.target_id : key_id(best, chunk.id_bits);
        }
        if (rank == 0) {
            store_result(params, &row, row_idx, result);
        }
        return;
    }
    set_shared(&chunk.best_logit, key_logit(best, chunk.id_bits));

    double log_sum = 0.0;
    int32_t num_top = 0;
    if (!is_bad && row.num_logprobs >= 0) {
        log_sum = log_sum_exp(&chunk);
        if (row.num_logprobs > 0) {
            num_top = store_top(&chunk, row.num_logprobs, log_sum,
                                params.top_logprobs + row_idx * params.max_logprobs);
        }
    }
    if (!is_bad) {
        result.token_id =
            row.target_id >= 0 ? row.target_id : choose_token(params, &row, &chunk, best);
    }
    if (rank > 0) {
        return;
    }
    if (result.token_id >= 0 && row.num_logprobs >= 0) {
        result.num_top = num_top;
        result.logprob = result.token_id < params.num_ids
                             ? (float)((double)logits[result.token_id] - log_sum)
                             : -CUDART_INF_F;
    }
    store_result(params, &row, row_idx, result);
}
