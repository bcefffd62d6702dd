/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of single tokens: all that matters is to read keys and values once, and with enough
 * loads under way at all times. Where there are more items than clusters, a warp takes 16-key
 * blocks of the cache straight into registers, those of the next item while the last one's results
 * are merged; else see attend_once.
 *
 *   keys      K0 |    K1 ->        |    next item's ->        |
 *   values    V0 |            V1 ->|            next item's -> |
 *   warp         | S, softmax, P·V | S, softmax, P·V | merge   | S, softmax, ...
 *
 * The kernel ahead writes the queries, and one key and value of each sequence. Lengths and tables
 * were there before the step began, all other keys and values before it too: what a warp begins
 * with is loaded while that kernel still runs, unless it holds the newest key.
 *
 * What is loaded and how it is multiplied, of bf16 and of 8-bit elements with scales, is in
 * decode_step.cuh.
 *
 * Warps, CTAs of a cluster and parts of a sequence are merged in the order of their numbers: warps
 * in shared memory; CTAs by sending each head to the one that it belongs to, which finishes an item
 * when the next has been sent; parts by a kernel of its own. */
#include "ops/cuda/kernels/decode_step.cuh"

#define WARPS (DECODE_THREADS / 32)

typedef struct decode_attention_kernel_params decode_params;

/* A part of a KV head of a sequence: blocks [begin, end) of the table, of which the keys [low,
 * high) count. */
#define DECODE_ITEM_WORDS 9
struct decode_item {
    int32_t seq, column, part, num_parts, token, begin, end, low, high;
};

/* What a warp reads of it, in the same words. */
struct decode_run {
    int32_t begin, end, low, high;
};

static __device__ __forceinline__ int32_t first_key_of(const decode_params &params,
                                                       int32_t num_keys)
{
    return params.window > 0 ? max(0, num_keys - params.window) : 0;
}

/* 0 where the sequence has not just one token. */
static __device__ __forceinline__ int32_t num_parts_of(const decode_params &params,
                                                       int32_t num_queries, int32_t num_keys)
{
    int32_t first_block = first_key_of(params, num_keys) / ATTENTION_BLOCK_SIZE;
    int32_t end_block = (num_keys + ATTENTION_BLOCK_SIZE - 1) / ATTENTION_BLOCK_SIZE;
    return num_queries == 1 ? DECODE_PARTS(end_block - first_block, params.most_parts) : 0;
}

/* A cluster's next items, found 32 at a time: each lane looks at one. Every warp does the same, and
 * has its queue and what it found in shared memory. */
struct decode_queue {
    int32_t next;     /* number that lane 0 looks at next */
    uint32_t waiting; /* lanes whose item exists and was not taken */
    struct decode_item found[32];
};

/* Whether an item has this number; item: of all its keys. */
static __device__ __forceinline__ bool describe_item(const decode_params &params, int32_t number,
                                                     struct decode_item *item)
{
    if (number >= params.num_items) {
        return false;
    }
    item->part = number / params.num_rows;
    int32_t row = number - item->part * params.num_rows;
    item->seq = row / params.num_columns;
    item->column = row - item->seq * params.num_columns;
    item->token = params.query_begin[item->seq];
    item->high = params.seq_lens[item->seq];
    item->low = first_key_of(params, item->high);
    item->num_parts =
        num_parts_of(params, params.query_begin[item->seq + 1] - item->token, item->high);
    if (item->part >= item->num_parts) {
        return false;
    }
    int32_t first_block = item->low / ATTENTION_BLOCK_SIZE;
    int32_t num_blocks =
        (item->high + ATTENTION_BLOCK_SIZE - 1) / ATTENTION_BLOCK_SIZE - first_block;
    item->begin = first_block + item->part * num_blocks / item->num_parts;
    item->end = first_block + (item->part + 1) * num_blocks / item->num_parts;
    return true;
}

/* This warp's part of an item. */
template <int HEAD_DIM>
static __device__ __forceinline__ struct decode_run run_of(const struct decode_item &item)
{
    constexpr int BLOCKS = 128 / HEAD_DIM, SLOTS = DECODE_CLUSTER(HEAD_DIM) * WARPS;
    int32_t slot = (int32_t)cluster_cta_rank() * WARPS + (int32_t)threadIdx.x / 32;
    int32_t length = (item.end - item.begin + SLOTS * BLOCKS - 1) / (SLOTS * BLOCKS) * BLOCKS;
    int32_t begin = min(item.end, item.begin + slot * length);
    int32_t end = min(item.end, begin + length);
    return {begin, end, item.low,
            begin < end ? min(item.high, end * ATTENTION_BLOCK_SIZE) : item.low};
}

/* The next item into *item, in shared memory too. */
static __device__ __forceinline__ bool queue_pop(const decode_params &params,
                                                 struct decode_queue *queue,
                                                 struct decode_item *item)
{
    int lane = threadIdx.x % 32;
    int32_t next = queue->next;
    uint32_t waiting = queue->waiting;
    while (waiting == 0) {
        if (next >= params.num_items) {
            return false;
        }
        struct decode_item candidate;
        bool exists = describe_item(params, next + lane * params.num_clusters, &candidate);
        if (exists) {
            queue->found[lane] = candidate;
        }
        waiting = __ballot_sync(FULL_MASK, exists);
        next += 32 * params.num_clusters;
    }
    __syncwarp();
    const int32_t *words = &queue->found[__ffs(waiting) - 1].seq;
    if (lane < DECODE_ITEM_WORDS) {
        (&item->seq)[lane] = words[lane];
    }
    queue->next = next;
    queue->waiting = waiting & (waiting - 1);
    __syncwarp();
    return true;
}

/* What a warp has at hand: the item that it computes, or of which it loads the first step. */
template <int KIND, int N_TILES, int HEAD_DIM> struct decode_work {
    int32_t begin, end;  /* blocks of its run */
    int32_t entry;       /* lane l: of the table, the l-th of the 32 blocks around here */
    int32_t keys_offset; /* of the KV head in a block */
    struct decode_queries<KIND, N_TILES, HEAD_DIM> queries;
    struct decode_step<KIND, HEAD_DIM> step;
};

/* What the warps of a CTA found: accumulators of a head, longer by 4 so that a warp's heads lie in
 * different banks. */
template <int N_TILES, int HEAD_DIM> struct decode_found {
    float accum[N_TILES * 8][HEAD_DIM + 4];
};

/* What warps and CTAs tell each other, of BUFFERS items in turn. Head h of a cluster's 8 or 16
 * belongs to CTA h % DECODE_CLUSTER, is row h / DECODE_CLUSTER there. */
template <int N_TILES, int HEAD_DIM, int BUFFERS> struct decode_exchange {
    static constexpr int CLUSTER = DECODE_CLUSTER(HEAD_DIM), ROWS = N_TILES * 8 / CLUSTER;
    float received[BUFFERS][CLUSTER][ROWS][HEAD_DIM];
    float received_extremes[BUFFERS][CLUSTER][ROWS][2]; /* largest score, sum of weights */
    float largest[WARPS][N_TILES * 8], sum[WARPS][N_TILES * 8];
    uint64_t full[BUFFERS], empty[BUFFERS]; /* barriers of received */
};

template <int N_TILES, int HEAD_DIM> struct decode_shared {
    struct decode_found<N_TILES, HEAD_DIM> found[WARPS];
    struct decode_exchange<N_TILES, HEAD_DIM, 2> exchange;
    /* Each warp's own, so that none waits for another: items in turn, those of the queue, runs
     * of this one and the next, the next one's blocks. */
    struct decode_item items[WARPS][4];
    struct decode_queue queues[WARPS];
    struct decode_run runs[WARPS][2];
    int32_t entries[WARPS][32];
};

/* Takes the next item from the queue: the place count % 4 of items, this warp's run of it, empty if
 * there is no item, and the first entries of its table. */
template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ bool find_item(const decode_params &params, int32_t count,
                                                 struct decode_shared<N_TILES, HEAD_DIM> *shared)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    struct decode_item *item = &shared->items[warp][count % 4];
    struct decode_run run = {0, 0, 0, 0};
    bool exists = queue_pop(params, &shared->queues[warp], item);
    if (exists) {
        run = run_of<HEAD_DIM>(*item);
        if (run.begin < run.end) {
            shared->entries[warp][lane] =
                params.block_tables[(int64_t)item->seq * params.max_blocks +
                                    min(run.begin + lane, run.end - 1)];
        }
    }
    if (lane == 0) {
        shared->runs[warp][count % 2] = run;
    }
    __syncwarp();
    return exists;
}

/* Turns to the item that was found, if it exists: what it reads, and where. */
template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void take_run(
    const decode_params &params, const struct decode_shared<N_TILES, HEAD_DIM> *shared,
    int32_t count, bool exists, struct decode_work<KIND, N_TILES, HEAD_DIM> &work)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    work.begin = shared->runs[warp][count % 2].begin;
    work.end = shared->runs[warp][count % 2].end;
    if (exists) {
        const struct decode_item *item = &shared->items[warp][count % 4];
        work.entry = shared->entries[warp][lane];
        work.keys_offset =
            item->column % params.num_kv_heads * decode_step<KIND, HEAD_DIM>::HEAD_BYTES;
    }
    __syncwarp(); /* the place of the blocks may be written again */
}

template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void load_queries(
    const decode_params &params, const struct decode_item *item,
    struct decode_queries<KIND, N_TILES, HEAD_DIM> &queries)
{
    int lane = threadIdx.x % 32;
    int32_t kv_head = item->column % params.num_kv_heads;
    int32_t first_head = item->column / params.num_kv_heads * N_TILES * 8; /* of the group */
    const uint16_t *q = (const uint16_t *)params.qkv +
                        ((int64_t)item->token * (params.num_heads + 2 * params.num_kv_heads) +
                         kv_head * params.group_heads) *
                            HEAD_DIM;
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        int32_t head = first_head + n * 8 + lane / 4;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) {
            bool is_there = head < params.group_heads;
            load_query(queries, n, i, is_there ? q + head * HEAD_DIM + lane % 4 * 8 + i * 32 : q,
                       is_there);
        }
    }
    if constexpr (KIND != DECODE_BF16) {
        copy_async_commit();
    }
}

/* Where this head's keys are, of the blocks of a step. */
template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void find_step(
    const decode_params &params, int32_t block,
    const struct decode_work<KIND, N_TILES, HEAD_DIM> &work,
    const unsigned char *(&keys)[decode_step<KIND, HEAD_DIM>::BLOCKS])
{
#pragma unroll
    for (int i = 0; i < decode_step<KIND, HEAD_DIM>::BLOCKS; i++) {
        int32_t place = __shfl_sync(FULL_MASK, work.entry, (block - work.begin) % 32 + i);
        keys[i] = params.keys + work.keys_offset + place * params.block_bytes;
    }
}

/* The keys of a step of item count, or of the first step of any. */
template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void load_step_keys(
    const decode_params &params, const struct decode_shared<N_TILES, HEAD_DIM> *shared,
    int32_t count, int32_t block, struct decode_work<KIND, N_TILES, HEAD_DIM> &work)
{
    constexpr int BLOCKS = decode_step<KIND, HEAD_DIM>::BLOCKS;
    const unsigned char *keys[BLOCKS];
    int32_t in_run = block - work.begin, lane = threadIdx.x % 32;
    if (in_run > 0 && in_run % 32 == 0) {
        int32_t seq = shared->items[threadIdx.x / 32][count % 4].seq;
        const int32_t *table = params.block_tables + (int64_t)seq * params.max_blocks;
        work.entry = table[min(block + lane, work.end - 1)];
    }
    find_step(params, block, work, keys);
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        load_keys(keys[i], i, work.step);
    }
    if constexpr (KIND != DECODE_BF16) {
        load_scales<KIND, HEAD_DIM>(keys, work.step.key_scales);
    }
}

/* Its values, behind its keys. */
template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void load_step_values(
    const decode_params &params, int32_t block, struct decode_work<KIND, N_TILES, HEAD_DIM> &work)
{
    constexpr int BLOCKS = decode_step<KIND, HEAD_DIM>::BLOCKS;
    const unsigned char *values[BLOCKS];
    find_step(params, block, work, values);
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        values[i] += params.value_bytes;
        load_values(values[i], i, work.step);
    }
    if constexpr (KIND != DECODE_BF16) {
        load_scales<KIND, HEAD_DIM>(values, work.step.value_scales);
    }
}

/* Asks for the second step of a run, of blocks before end, so that it is in L2 when it is loaded:
 * there are registers for the first one only. */
template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void prefetch_step(
    const decode_params &params, int32_t end,
    const struct decode_work<KIND, N_TILES, HEAD_DIM> &work)
{
    constexpr int BLOCKS = decode_step<KIND, HEAD_DIM>::BLOCKS;
    int lane = threadIdx.x % 32;
    if (lane >= BLOCKS && lane < 2 * BLOCKS && work.begin + lane < end) {
        const unsigned char *keys =
            params.keys + work.keys_offset + work.entry * params.block_bytes;
        prefetch_to_l2(keys, decode_step<KIND, HEAD_DIM>::HEAD_BYTES);
        prefetch_to_l2(keys + params.value_bytes, decode_step<KIND, HEAD_DIM>::HEAD_BYTES);
    }
}

/* Computes the item at hand, of which the first step is loaded or has no keys, and loads the first
 * step of the next. */
template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void walk(const decode_params &params,
                                            const struct decode_shared<N_TILES, HEAD_DIM> *shared,
                                            int32_t count, bool has_next,
                                            struct decode_work<KIND, N_TILES, HEAD_DIM> &work,
                                            struct decode_state<N_TILES, HEAD_DIM> &state)
{
    constexpr int BLOCKS = decode_step<KIND, HEAD_DIM>::BLOCKS;
    int32_t block = work.begin;
    bool is_last;
    arrange_queries(work.queries);
    do {
        float scores[BLOCKS][N_TILES][4];
        multiply_keys(scores, work.step, work.queries);
        if (block + BLOCKS >= work.end || params.window > 0) {
            const struct decode_run &run = shared->runs[threadIdx.x / 32][count % 2];
            int32_t low = run.low, high = run.high, first_key = block * ATTENTION_BLOCK_SIZE;
            if (first_key < low || first_key + BLOCKS * ATTENTION_BLOCK_SIZE > high) {
                mask_scores(low, high, first_key, scores);
                clear_values(low, high, first_key, work.step);
            }
        }
        block += BLOCKS;
        is_last = block >= work.end;
        if (is_last) {
            take_run<KIND, N_TILES, HEAD_DIM>(params, shared, count + 1, has_next, work);
            if (has_next) {
                load_queries(params, &shared->items[threadIdx.x / 32][(count + 1) % 4],
                             work.queries);
            }
            block = work.begin;
        }
        bool is_more = block < work.end;
        if (is_more) {
            load_step_keys(params, shared, count, block, work);
        }
        soften<KIND, N_TILES, HEAD_DIM, BLOCKS>(params.exp2_scale, scores, state);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            multiply_values(scores[i], work.step, i, state);
        }
        if (is_more) {
            load_step_values(params, block, work);
        }
    } while (!is_last);
}

/* found: of this warp. */
template <int KIND, int N_TILES, int HEAD_DIM, int BUFFERS>
static __device__ __forceinline__ void share_state(
    const struct decode_state<N_TILES, HEAD_DIM> &state,
    struct decode_found<N_TILES, HEAD_DIM> *found,
    struct decode_exchange<N_TILES, HEAD_DIM, BUFFERS> *exchange)
{
    int warp = threadIdx.x / 32, lane = lane_read();
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int head = n * 8 + lane % 4 * 2 + i;
            float sum = state.sum[n][i];
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) {
                sum += __shfl_xor_sync(FULL_MASK, sum, distance);
            }
            if (lane < 4) {
                exchange->largest[warp][head] = state.largest[n][i];
                exchange->sum[warp][head] = KIND == DECODE_BF16 ? sum : DECODE_SUM_UNIT * sum;
            }
#pragma unroll
            for (int c = 0; c < HEAD_DIM / 64; c++) {
                int column = accum_column<KIND, HEAD_DIM>(c);
                float4 *to = (float4 *)&found->accum[head][column];
                to[0] = make_float4(state.accum[c][0][n][i], state.accum[c][0][n][i + 2],
                                    state.accum[c][1][n][i], state.accum[c][1][n][i + 2]);
                to[1] = make_float4(state.accum[c][2][n][i], state.accum[c][2][n][i + 2],
                                    state.accum[c][3][n][i], state.accum[c][3][n][i + 2]);
            }
        }
    }
}

/* What a share of the result whose largest score is `largest` counts where all is told from
 * `overall` on. Nothing, if it has no keys. */
static __device__ __forceinline__ float share_weight(float largest, float overall, float exp2_scale)
{
    return largest == -INFINITY ? 0.0f : exp2_approx((largest - overall) * exp2_scale);
}

/* To the CTAs that they belong to; warp w merges and sends heads w, w + WARPS, ... What the first
 * warp found is at `found`, the next one's found_bytes further. */
template <int N_TILES, int HEAD_DIM, int BUFFERS>
static __device__ __forceinline__ void send_heads(
    float exp2_scale, int buffer, const unsigned char *found, int found_bytes,
    struct decode_exchange<N_TILES, HEAD_DIM, BUFFERS> *exchange)
{
    constexpr int CLUSTER = DECODE_CLUSTER(HEAD_DIM);
    int lane = threadIdx.x % 32;
    uint32_t from = cluster_cta_rank();
    for (int head = threadIdx.x / 32; head < N_TILES * 8; head += WARPS) {
        float weights[WARPS], largest = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            largest = fmaxf(largest, exchange->largest[i][head]);
        }
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            weights[i] = share_weight(exchange->largest[i][head], largest, exp2_scale);
            sum += weights[i] * exchange->sum[i][head];
        }
        uint32_t to = head % CLUSTER;
        uint32_t barrier = cluster_address(shared_address(&exchange->full[buffer]), to);
        if (lane * 4 < HEAD_DIM) {
            float accum[4] = {};
#pragma unroll
            for (int i = 0; i < WARPS; i++) {
                const float *of_warp =
                    &((const decode_found<N_TILES, HEAD_DIM> *)(found + i * found_bytes))
                         ->accum[head][lane * 4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    accum[j] += weights[i] * of_warp[j];
                }
            }
            float *place = &exchange->received[buffer][from][head / CLUSTER][lane * 4];
            cluster_store_16(cluster_address(shared_address(place), to), accum, barrier);
        }
        if (lane == 0) {
            float *place = exchange->received_extremes[buffer][from][head / CLUSTER];
            cluster_store_8(cluster_address(shared_address(place), to), largest, sum, barrier);
        }
    }
}

static __device__ __forceinline__ void store_result(const decode_params &params, int head_dim,
                                                    int32_t token, int32_t head, int column,
                                                    float value)
{
    uint16_t *d = (uint16_t *)params.d;
    d[((int64_t)token * params.num_heads + head) * head_dim + column] =
        (uint16_t)bf16x2_round(value, 0.0f);
}

/* A column of a row of this CTA. */
template <int N_TILES, int HEAD_DIM, int BUFFERS>
static __device__ __forceinline__ void merge_column(
    const decode_params &params, const struct decode_exchange<N_TILES, HEAD_DIM, BUFFERS> *exchange,
    int buffer, int row, int column, const struct decode_item *item, int32_t head)
{
    constexpr int CLUSTER = DECODE_CLUSTER(HEAD_DIM);
    float largest = -INFINITY, sum = 0.0f, accum = 0.0f;
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) {
        largest = fmaxf(largest, exchange->received_extremes[buffer][i][row][0]);
    }
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) {
        const float *extremes = exchange->received_extremes[buffer][i][row];
        float weight = share_weight(extremes[0], largest, params.exp2_scale);
        sum += weight * extremes[1];
        accum += weight * exchange->received[buffer][i][row][column];
    }
    if (item->num_parts == 1) {
        store_result(params, HEAD_DIM, item->token, head, column, accum / sum);
        return;
    }
    int64_t place = ((int64_t)item->seq * params.num_heads + head) * params.max_parts + item->part;
    params.accums[place * HEAD_DIM + column] = accum;
    if (column == 0) {
        params.extremes[place * 2] = largest;
        params.extremes[place * 2 + 1] = sum;
    }
}

template <int N_TILES, int HEAD_DIM, int BUFFERS>
static __device__ __forceinline__ void arm(
    struct decode_exchange<N_TILES, HEAD_DIM, BUFFERS> *exchange, int buffer)
{
    mbarrier_expect_bytes(shared_address(&exchange->full[buffer]),
                          sizeof(exchange->received[0]) + sizeof(exchange->received_extremes[0]));
}

/* This CTA's heads of an item that has been sent: into the result, or what the parts found. */
template <int N_TILES, int HEAD_DIM, int BUFFERS>
static __device__ __forceinline__ void merge_heads(
    const decode_params &params, const struct decode_exchange<N_TILES, HEAD_DIM, BUFFERS> *exchange,
    int buffer, const struct decode_item *item)
{
    constexpr int CLUSTER = DECODE_CLUSTER(HEAD_DIM), ROWS = N_TILES * 8 / CLUSTER;
    int32_t chunk = item->column / params.num_kv_heads;
    int32_t kv_head = item->column - chunk * params.num_kv_heads;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += DECODE_THREADS) {
        int row = i / HEAD_DIM, column = i % HEAD_DIM;
        int32_t in_group = chunk * N_TILES * 8 + row * CLUSTER + (int32_t)cluster_cta_rank();
        if (in_group < params.group_heads) {
            merge_column(params, exchange, buffer, row, column, item,
                         kv_head * params.group_heads + in_group);
        }
    }
}

/* Item count. is_reused: its buffer will be sent to again. */
template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void finish_item(const decode_params &params, int32_t count,
                                                   bool is_reused,
                                                   struct decode_shared<N_TILES, HEAD_DIM> *shared)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, buffer = count % 2;
    struct decode_exchange<N_TILES, HEAD_DIM, 2> *exchange = &shared->exchange;
    mbarrier_wait(shared_address(&exchange->full[buffer]), count / 2 % 2);
    merge_heads(params, exchange, buffer, &shared->items[warp][count % 4]);
    if (is_reused) {
        if (threadIdx.x == 0) {
            arm(exchange, buffer);
        }
        __syncwarp();
        if (lane < DECODE_CLUSTER(HEAD_DIM)) {
            mbarrier_arrive_cluster(
                cluster_address(shared_address(&exchange->empty[buffer]), lane));
        }
    }
}

template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void attend(const decode_params &params)
{
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    static_assert(sizeof(struct decode_shared<N_TILES, HEAD_DIM>) <=
                          DECODE_SHARED(HEAD_DIM, N_TILES * 8) &&
                      sizeof(struct decode_shared<N_TILES, HEAD_DIM>) % 16 == 0,
                  "the launch gives too little");
    struct decode_shared<N_TILES, HEAD_DIM> *shared =
        (struct decode_shared<N_TILES, HEAD_DIM> *)dynamic_shared;
    struct decode_exchange<N_TILES, HEAD_DIM, 2> *exchange = &shared->exchange;
    constexpr int CLUSTER = DECODE_CLUSTER(HEAD_DIM);
    struct decode_work<KIND, N_TILES, HEAD_DIM> work;
    if constexpr (KIND != DECODE_BF16) {
        work.queries.pieces = shared_address(shared + 1) +
                              threadIdx.x / 32 * DECODE_QUERY_BYTES(HEAD_DIM, N_TILES * 8) +
                              threadIdx.x % 32 * 16;
    }

    if (threadIdx.x == 0) {
        for (int buffer = 0; buffer < 2; buffer++) {
            mbarrier_init(shared_address(&exchange->full[buffer]), 1);
            mbarrier_init(shared_address(&exchange->empty[buffer]), CLUSTER * WARPS);
        }
        mbarrier_init_fence();
        arm(exchange, 0);
        arm(exchange, 1);
    }
    if (threadIdx.x % 32 == 0) {
        shared->queues[threadIdx.x / 32].next = (int32_t)blockIdx.x / CLUSTER;
        shared->queues[threadIdx.x / 32].waiting = 0;
    }
    __syncthreads();
    cluster_arrive();
    grid_release_next();
    if (!find_item<KIND, N_TILES, HEAD_DIM>(params, 0, shared)) {
        grid_wait_for_previous(); /* the next kernel counts on it */
        return;                   /* as the whole cluster does */
    }
    take_run<KIND, N_TILES, HEAD_DIM>(params, shared, 0, true, work);
    bool has_keys = work.begin < work.end;
    int32_t newest = (shared->items[threadIdx.x / 32][0].high - 1) / ATTENTION_BLOCK_SIZE;
    bool is_early = work.begin + decode_step<KIND, HEAD_DIM>::BLOCKS <= newest;
    if (has_keys && is_early) {
        load_step_keys(params, shared, 0, work.begin, work);
        load_step_values(params, work.begin, work);
        prefetch_step<KIND, N_TILES, HEAD_DIM>(params, min(work.end, newest), work);
    }
    grid_wait_for_previous();
    load_queries(params, &shared->items[threadIdx.x / 32][0], work.queries);
    if (has_keys && !is_early) {
        load_step_keys(params, shared, 0, work.begin, work);
        load_step_values(params, work.begin, work);
    }
    for (int32_t count = 0;; count++) {
        struct decode_state<N_TILES, HEAD_DIM> state;
        bool has_next = find_item<KIND, N_TILES, HEAD_DIM>(params, count + 1, shared);
        clear_state(state);
        walk<KIND, N_TILES, HEAD_DIM>(params, shared, count, has_next, work, state);
        __syncthreads(); /* the heads before have been sent */
        share_state<KIND>(state, &shared->found[threadIdx.x / 32], exchange);
        __syncthreads();
        if (count == 0) {
            cluster_wait(); /* all barriers exist */
        }
        if (count >= 2) {
            mbarrier_wait(shared_address(&exchange->empty[count % 2]), count / 2 % 2 ^ 1);
        }
        send_heads(params.exp2_scale, count % 2, (const unsigned char *)shared->found,
                   sizeof(shared->found[0]), exchange);
        if (count >= 1) {
            finish_item<N_TILES, HEAD_DIM>(params, count - 1, has_next, shared);
        }
        if (!has_next) {
            finish_item<N_TILES, HEAD_DIM>(params, count, false, shared);
            return;
        }
    }
}

/* ---- one item a cluster ---------------------------------------------------------------------- */

/* Of the item whose number is the cluster's: with nothing to load behind it, a warp has two stages
 * of its own in shared memory instead of a step in registers, so that twice as much is under way,
 * and writes what it found over them. */
template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void attend_once(const decode_params &params)
{
    constexpr int BLOCKS = decode_step<KIND, HEAD_DIM>::BLOCKS, STAGES = DECODE_STAGES;
    constexpr int OWN_BYTES = STAGES * DECODE_STAGE_BYTES(KIND);
    constexpr int QUERY_BYTES = KIND == DECODE_BF16 ? 0 : DECODE_QUERY_BYTES(HEAD_DIM, N_TILES * 8);
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    static_assert(sizeof(struct decode_found<N_TILES, HEAD_DIM>) <= OWN_BYTES &&
                      WARPS * (OWN_BYTES + QUERY_BYTES) +
                              sizeof(struct decode_exchange<N_TILES, HEAD_DIM, 1>) <=
                          DECODE_ONCE_SHARED(KIND, HEAD_DIM, N_TILES * 8),
                  "the launch gives too little");
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char *own = dynamic_shared + warp * OWN_BYTES;
    unsigned char *all_queries = dynamic_shared + WARPS * OWN_BYTES;
    struct decode_exchange<N_TILES, HEAD_DIM, 1> *exchange =
        (struct decode_exchange<N_TILES, HEAD_DIM, 1> *)(all_queries + WARPS * QUERY_BYTES);
    struct decode_queries<KIND, N_TILES, HEAD_DIM> queries;
    if constexpr (KIND != DECODE_BF16) {
        queries.pieces = shared_address(all_queries) + warp * QUERY_BYTES + lane * 16;
    }
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&exchange->full[0]), 1);
        mbarrier_init_fence();
        arm(exchange, 0);
    }
    __syncthreads();
    cluster_arrive();
    grid_release_next();
    struct decode_item item;
    if (!describe_item(params, (int32_t)blockIdx.x / DECODE_CLUSTER(HEAD_DIM), &item)) {
        grid_wait_for_previous(); /* the next kernel counts on it */
        return;                   /* as the whole cluster does */
    }
    const struct decode_run run = run_of<HEAD_DIM>(item);
    const int32_t *table = params.block_tables + (int64_t)item.seq * params.max_blocks;
    int32_t keys_offset =
        item.column % params.num_kv_heads * decode_step<KIND, HEAD_DIM>::HEAD_BYTES;
    int32_t newest = (item.high - 1) / ATTENTION_BLOCK_SIZE;
    int32_t next = run.begin, entry = 0; /* what is loaded next; lane l: the table's l-th around */
    bool is_waiting = true;              /* for the kernel ahead */
    struct decode_state<N_TILES, HEAD_DIM> state;
    clear_state(state);
    /* A turn computes the step of STAGES turns ago and loads one, or nothing behind the last. */
    for (int32_t turn = 0, block = run.begin; block < run.end || is_waiting; turn++) {
        uint32_t stage = shared_address(own) + turn % STAGES * DECODE_STAGE_BYTES(KIND);
        if (is_waiting && (turn == STAGES || next >= run.end || next + BLOCKS > newest)) {
            grid_wait_for_previous();
            load_queries(params, &item, queries);
            is_waiting = false;
        }
        if (turn >= STAGES) {
            struct decode_step<KIND, HEAD_DIM> step;
            float scores[BLOCKS][N_TILES][4];
            if (turn == STAGES) {
                arrange_queries(queries);
            }
            copy_async_wait<STAGES - 1>();
            __syncwarp(); /* of all lanes */
            read_keys(stage, step);
            read_values(stage, step);
            multiply_keys(scores, step, queries);
            int32_t first_key = block * ATTENTION_BLOCK_SIZE;
            if (first_key < run.low || first_key + BLOCKS * ATTENTION_BLOCK_SIZE > run.high) {
                mask_scores(run.low, run.high, first_key, scores);
                clear_values(run.low, run.high, first_key, step);
            }
            soften<KIND, N_TILES, HEAD_DIM, BLOCKS>(params.exp2_scale, scores, state);
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
                multiply_values(scores[i], step, i, state);
            }
            __syncwarp(); /* nobody reads the stage any more */
            block += BLOCKS;
        }
        if (next < run.end) {
            const unsigned char *keys[BLOCKS];
            int32_t in_run = next - run.begin;
            if (in_run % 32 == 0) {
                entry = table[min(next + lane, run.end - 1)];
            }
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
                int32_t place = __shfl_sync(FULL_MASK, entry, in_run % 32 + i);
                keys[i] = params.keys + keys_offset + place * params.block_bytes;
            }
            copy_step<KIND, HEAD_DIM>(stage, keys, params.value_bytes);
            next += BLOCKS;
        }
        copy_async_commit();
    }
    copy_async_wait<0>(); /* for queries, where there were no keys */
    share_state<KIND>(state, (struct decode_found<N_TILES, HEAD_DIM> *)own, exchange);
    __syncthreads();
    cluster_wait(); /* all barriers exist */
    send_heads(params.exp2_scale, 0, dynamic_shared, OWN_BYTES, exchange);
    mbarrier_wait(shared_address(&exchange->full[0]), 0);
    merge_heads(params, exchange, 0, &item);
}

#define DECODE_ATTENTION_OF(kind, number, head_dim, heads)                                      \
    extern "C" __global__ void __launch_bounds__(DECODE_THREADS, DECODE_SM_CTAS(number, heads)) \
        decode_attention_##kind##_##head_dim##_##heads(                                         \
            const __grid_constant__ decode_params params)                                       \
    {                                                                                           \
        attend<number, (heads) / 8, head_dim>(params);                                          \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(DECODE_THREADS, DECODE_SM_CTAS(number, heads)) \
        decode_attention_once_##kind##_##head_dim##_##heads(                                    \
            const __grid_constant__ decode_params params)                                       \
    {                                                                                           \
        attend_once<number, (heads) / 8, head_dim>(params);                                     \
    }
#define DECODE_ATTENTION(head_dim, heads)                   \
    DECODE_ATTENTION_OF(bf16, DECODE_BF16, head_dim, heads) \
    DECODE_ATTENTION_OF(int8, DECODE_INT8, head_dim, heads) \
    DECODE_ATTENTION_OF(fp8, DECODE_FP8, head_dim, heads)
DECODE_ATTENTION(64, 8)
DECODE_ATTENTION(64, 16)
DECODE_ATTENTION(128, 8)
DECODE_ATTENTION(128, 16)

extern "C" __global__ void __launch_bounds__(128)
    decode_attention_merge(const __grid_constant__ decode_params params)
{
    int32_t head = blockIdx.x, seq = blockIdx.y;
    int column = threadIdx.x, head_dim = blockDim.x;
    grid_release_next();
    grid_wait_for_previous();
    int64_t place = ((int64_t)seq * params.num_heads + head) * params.max_parts;
    const float *extremes = params.extremes + place * 2;
    const float *accums = params.accums + place * head_dim + column;
    float largests[DECODE_PARTS_LIMIT], sums[DECODE_PARTS_LIMIT], found[DECODE_PARTS_LIMIT];
    /* All at once with the lengths; what lies behind a sequence's parts is not looked at. */
#pragma unroll
    for (int i = 0; i < DECODE_PARTS_LIMIT; i++) {
        if (i < params.max_parts) {
            largests[i] = extremes[i * 2];
            sums[i] = extremes[i * 2 + 1];
            found[i] = accums[i * head_dim];
        }
    }
    int32_t token = params.query_begin[seq];
    int32_t num_parts =
        num_parts_of(params, params.query_begin[seq + 1] - token, params.seq_lens[seq]);
    float largest = -INFINITY, sum = 0.0f, accum = 0.0f;
    if (num_parts <= 1) {
        return;
    }
#pragma unroll
    for (int i = 0; i < DECODE_PARTS_LIMIT; i++) {
        if (i < num_parts) {
            largest = fmaxf(largest, largests[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < DECODE_PARTS_LIMIT; i++) {
        if (i < num_parts) {
            float weight = share_weight(largests[i], largest, params.exp2_scale);
            sum += weight * sums[i];
            accum += weight * found[i];
        }
    }
    store_result(params, head_dim, token, head, column, accum / sum);
}
