/* SPDX-License-Identifier: Apache-2.0 */
/* Masses of ids, and the key at which a count or a mass is reached from the top: histograms, then a
 * sorted list. Part of sample.cu. */
#ifndef IMBREX_OPS_CUDA_KERNELS_SAMPLE_SELECT_CUH
#define IMBREX_OPS_CUDA_KERNELS_SAMPLE_SELECT_CUH

#include "ops/cuda/kernels/sample_row.cuh"

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

#endif
