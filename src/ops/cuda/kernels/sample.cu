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
#include "ops/cuda/kernels/sample_change.cuh"
#include "ops/cuda/kernels/sample_select.cuh"

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
