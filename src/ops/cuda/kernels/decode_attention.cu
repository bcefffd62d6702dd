/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of single tokens: all that matters is to read keys and values once, and with enough
 * loads under way at all times. A warp takes 16-key blocks of the cache straight into registers,
 * those of the next item while the last one's results are merged:
 *
 *   keys      K0 |    K1 ->        |    next item's ->        |
 *   values    V0 |            V1 ->|            next item's -> |
 *   warp         | S, softmax, P·V | S, softmax, P·V | merge   | S, softmax, ...
 *
 * The kernel ahead writes the queries, and one key and value of each sequence. Lengths and tables
 * were there before the step began, all other keys and values before it too: what a warp begins
 * with is loaded while that kernel still runs, unless it holds the newest key.
 *
 * Everything is computed transposed, so that the query heads of a group are the 8 columns of a
 * tile and not 16 rows: Sᵀ = K · Qᵀ, Oᵀ = Vᵀ · Pᵀ. Which element of a head stands at which k of the
 * first product does not matter as long as both sides agree, nor which column of V is which row of
 * the second: so each thread loads 16 bytes of a row of K, and of rows of V, and these are its
 * fragments. Only V's need two rows shuffled together, and Pᵀ a transposition of 8x8 tiles.
 *
 * Warps, CTAs of a cluster and parts of a sequence are merged in the order of their numbers: warps
 * in shared memory; CTAs by sending each head to the one that it belongs to, which finishes an item
 * when the next has been sent; parts by a kernel of its own. */
#include <math.h>

#include "ops/cuda/kernels/decode_attention_params.h"
#include "ops/cuda/kernels/ptx.cuh"
#include "ops/cuda/kernels/ptx_warp.cuh"

#define WARPS (DECODE_THREADS / 32)
#define FULL_MASK 0xffffffffu

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

/* A cluster's next items, found 32 at a time: each lane looks at one. Every warp does the same. */
struct decode_queue {
    int32_t next;     /* number that lane 0 looks at next */
    uint32_t waiting; /* lanes whose item exists and was not taken */
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

/* The next item into *item, in shared memory like what was found, of this warp alone. */
static __device__ __forceinline__ bool queue_pop(const decode_params &params,
                                                 struct decode_queue &queue,
                                                 struct decode_item (&found)[32],
                                                 struct decode_item *item)
{
    int lane = threadIdx.x % 32;
    while (queue.waiting == 0) {
        if (queue.next >= params.num_items) {
            return false;
        }
        struct decode_item candidate;
        bool exists = describe_item(params, queue.next + lane * params.num_clusters, &candidate);
        if (exists) {
            found[lane] = candidate;
        }
        queue.waiting = __ballot_sync(FULL_MASK, exists);
        __syncwarp();
        queue.next += 32 * params.num_clusters;
    }
    const int32_t *words = &found[__ffs(queue.waiting) - 1].seq;
    queue.waiting &= queue.waiting - 1;
    if (lane < DECODE_ITEM_WORDS) {
        (&item->seq)[lane] = words[lane];
    }
    __syncwarp();
    return true;
}

/* A step of a warp: as many blocks as make 128 registers of 32 threads. */
template <int HEAD_DIM> struct decode_step {
    static constexpr int BLOCKS = 128 / HEAD_DIM;
    /* Of rows r and r + 8: elements 8 q and on, every 32, with r = lane / 4, q = lane % 4. */
    uint32_t keys[BLOCKS][2][HEAD_DIM / 32][4];
    /* Of rows 2 q, 2 q + 1 and both + 8: elements 8 r and on, every 64. */
    uint32_t values[BLOCKS][4][HEAD_DIM / 64][4];
};

template <int N_TILES, int HEAD_DIM> struct decode_state {
    /* Rows of Oᵀ: elements 64 c + 8 r + 2 t and the next; columns: heads 2 q and the next. */
    float accum[HEAD_DIM / 64][4][N_TILES][4];
    float largest[N_TILES][2], sum[N_TILES][2]; /* sum: of this thread's keys alone */
};

static __device__ __forceinline__ bool key_counts(int32_t low, int32_t high, int32_t key)
{
    return (uint32_t)(key - low) < (uint32_t)(high - low);
}

/* base: of a block, this head's keys or values. All of its rows are read, of which some may hold no
 * key: mask takes care of them. */
template <int HEAD_DIM>
static __device__ __forceinline__ void load_keys(const unsigned char *base,
                                                 uint32_t (&keys)[2][HEAD_DIM / 32][4])
{
    int lane = threadIdx.x % 32;
    const unsigned char *from = base + lane / 4 * HEAD_DIM * 2 + lane % 4 * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) {
            load_once_16(keys[half][i], from + half * 8 * HEAD_DIM * 2 + i * 64);
        }
    }
}

template <int HEAD_DIM>
static __device__ __forceinline__ void load_values(const unsigned char *base,
                                                   uint32_t (&values)[4][HEAD_DIM / 64][4])
{
    int lane = threadIdx.x % 32;
    const unsigned char *from = base + lane % 4 * 2 * HEAD_DIM * 2 + lane / 4 * 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int c = 0; c < HEAD_DIM / 64; c++) {
            load_once_16(values[i][c], from + (i % 2 + i / 2 * 8) * HEAD_DIM * 2 + c * 128);
        }
    }
}

/* scores: rows r and r + 8 of a block, heads 2 q and the next. */
template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void multiply_keys(
    float (&scores)[N_TILES][4], const uint32_t (&keys)[2][HEAD_DIM / 32][4],
    const uint32_t (&queries)[N_TILES][HEAD_DIM / 32][4])
{
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scores[n][i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) {
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
                const uint32_t a[4] = {keys[0][i][half], keys[1][i][half], keys[0][i][half + 1],
                                       keys[1][i][half + 1]};
                matrix_multiply_add(scores[n], a, queries[n][i][half], queries[n][i][half + 1]);
            }
        }
    }
}

/* Keys that do not count score -infinity, and their values become zeros: weight 0 times what was
 * never written might be no number. */
template <int N_TILES, int HEAD_DIM, int BLOCKS>
static __device__ __forceinline__ void mask(const struct decode_run &run, int32_t block,
                                            float (&scores)[BLOCKS][N_TILES][4],
                                            uint32_t (&values)[BLOCKS][4][HEAD_DIM / 64][4])
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        int32_t first = (block + i) * ATTENTION_BLOCK_SIZE;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            bool counts = key_counts(run.low, run.high, first + lane / 4 + j / 2 * 8);
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                scores[i][n][j] = counts ? scores[i][n][j] : -INFINITY;
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (!key_counts(run.low, run.high, first + lane % 4 * 2 + j % 2 + j / 2 * 8)) {
#pragma unroll
                for (int c = 0; c < HEAD_DIM / 64; c++) {
#pragma unroll
                    for (int word = 0; word < 4; word++) {
                        values[i][j][c][word] = 0;
                    }
                }
            }
        }
    }
}

/* The largest over a step's keys, which the threads of equal lane % 4 share. */
template <int N_TILES, int BLOCKS>
static __device__ __forceinline__ float step_largest(const float (&scores)[BLOCKS][N_TILES][4],
                                                     int n, int head, float largest)
{
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        largest = fmaxf(largest, fmaxf(scores[i][n][head], scores[i][n][head + 2]));
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, distance));
    }
    return largest;
}

/* scores become exp(score - largest); sums and accumulators follow a largest that has grown. */
template <int N_TILES, int HEAD_DIM, int BLOCKS>
static __device__ __forceinline__ void soften(float exp2_scale, float (&scores)[BLOCKS][N_TILES][4],
                                              struct decode_state<N_TILES, HEAD_DIM> &state)
{
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        float shrink[2];
        bool has_grown = false;
#pragma unroll
        for (int head = 0; head < 2; head++) {
            float before = state.largest[n][head];
            float largest = step_largest<N_TILES, BLOCKS>(scores, n, head, before);
            /* Nothing but -infinity so far: minus itself it is no number. */
            float base = largest == -INFINITY ? 0.0f : largest * exp2_scale;
            /* Exactly 1 where nothing has changed: heads of other threads may have. */
            shrink[head] = largest > before ? exp2_approx((before - largest) * exp2_scale) : 1.0f;
            has_grown = has_grown || largest > before;
            state.largest[n][head] = largest;
            state.sum[n][head] *= shrink[head];
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
#pragma unroll
                for (int j = head; j < 4; j += 2) {
                    scores[i][n][j] = exp2_approx(scores[i][n][j] * exp2_scale - base);
                    state.sum[n][head] += scores[i][n][j];
                }
            }
        }
        if (__any_sync(FULL_MASK, has_grown)) {
#pragma unroll
            for (int c = 0; c < HEAD_DIM / 64; c++) {
#pragma unroll
                for (int t = 0; t < 4; t++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        state.accum[c][t][n][i] *= shrink[i % 2];
                    }
                }
            }
        }
    }
}

/* accum += Vᵀ · Pᵀ of one block */
template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void multiply_values(
    const float (&weights)[N_TILES][4], const uint32_t (&values)[4][HEAD_DIM / 64][4],
    struct decode_state<N_TILES, HEAD_DIM> &state)
{
    uint32_t b[N_TILES][2];
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        b[n][0] = matrix_transpose(bf16x2_round(weights[n][0], weights[n][1]));
        b[n][1] = matrix_transpose(bf16x2_round(weights[n][2], weights[n][3]));
    }
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 64; c++) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const uint32_t a[4] = {halves_low(values[0][c][t], values[1][c][t]),
                                   halves_high(values[0][c][t], values[1][c][t]),
                                   halves_low(values[2][c][t], values[3][c][t]),
                                   halves_high(values[2][c][t], values[3][c][t])};
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                matrix_multiply_add(state.accum[c][t][n], a, b[n][0], b[n][1]);
            }
        }
    }
}

/* What a warp has at hand: the item that it computes, or of which it loads the first step. */
template <int N_TILES, int HEAD_DIM> struct decode_work {
    struct decode_run run;
    int32_t entry;            /* lane l: of the table, the l-th of the 32 blocks around here */
    int32_t seq, keys_offset; /* of the KV head in a block */
    uint32_t queries[N_TILES][HEAD_DIM / 32][4];
    struct decode_step<HEAD_DIM> step;
};

/* Head h of a cluster's 8 or 16 belongs to CTA h % DECODE_CLUSTER, is row h / DECODE_CLUSTER there.
 * Rows of accum are longer by 4 so that a warp's heads lie in different banks. */
template <int N_TILES, int HEAD_DIM> struct decode_shared {
    static constexpr int CLUSTER = DECODE_CLUSTER(HEAD_DIM), ROWS = N_TILES * 8 / CLUSTER;
    float accum[WARPS][N_TILES * 8][HEAD_DIM + 4]; /* what the warps found */
    /* What the CTAs of the cluster found of this one's heads, of two items in turn. */
    float received[2][CLUSTER][ROWS][HEAD_DIM];
    float received_extremes[2][CLUSTER][ROWS][2]; /* largest score, sum of weights */
    float largest[WARPS][N_TILES * 8], sum[WARPS][N_TILES * 8];
    uint64_t full[2], empty[2]; /* barriers of received */
    /* Each warp's own, so that none waits for another: items in turn, those of the queue, the next
     * one's run and its blocks. */
    struct decode_item items[WARPS][4], found[WARPS][32];
    struct decode_run runs[WARPS];
    int32_t entries[WARPS][32];
};

/* Takes the next item from the queue: the place count % 4 of items, this warp's run of it, empty if
 * there is no item, and the first entries of its table. */
template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ bool find_item(const decode_params &params,
                                                 struct decode_queue &queue, int32_t count,
                                                 struct decode_shared<N_TILES, HEAD_DIM> *shared)
{
    constexpr int BLOCKS = decode_step<HEAD_DIM>::BLOCKS;
    constexpr int SLOTS = DECODE_CLUSTER(HEAD_DIM) * WARPS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    struct decode_item *item = &shared->items[warp][count % 4];
    struct decode_run run = {0, 0, 0, 0};
    bool exists = queue_pop(params, queue, shared->found[warp], item);
    if (exists) {
        int32_t begin = item->begin, end = item->end;
        int32_t length = (end - begin + SLOTS * BLOCKS - 1) / (SLOTS * BLOCKS) * BLOCKS;
        run.begin = min(end, begin + ((int32_t)cluster_cta_rank() * WARPS + warp) * length);
        run.end = min(end, run.begin + length);
        run.low = item->low;
        run.high = run.begin < run.end ? min(item->high, run.end * ATTENTION_BLOCK_SIZE) : run.low;
        if (run.begin < run.end) {
            shared->entries[warp][lane] =
                params.block_tables[(int64_t)item->seq * params.max_blocks +
                                    min(run.begin + lane, run.end - 1)];
        }
    }
    if (lane == 0) {
        shared->runs[warp] = run;
    }
    __syncwarp();
    return exists;
}

/* Turns to the item that was found, if it exists: what it reads, and where. */
template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void take_run(
    const decode_params &params, const struct decode_shared<N_TILES, HEAD_DIM> *shared,
    int32_t count, bool exists, struct decode_work<N_TILES, HEAD_DIM> &work)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    work.run = shared->runs[warp];
    if (exists) {
        const struct decode_item *item = &shared->items[warp][count % 4];
        work.entry = shared->entries[warp][lane];
        work.seq = item->seq;
        work.keys_offset = item->column % params.num_kv_heads * ATTENTION_BLOCK_SIZE * HEAD_DIM * 2;
    }
    __syncwarp(); /* the place of the run may be written again */
}

template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void load_queries(
    const decode_params &params, const struct decode_shared<N_TILES, HEAD_DIM> *shared,
    int32_t count, struct decode_work<N_TILES, HEAD_DIM> &work)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const struct decode_item *item = &shared->items[warp][count % 4];
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
            load_once_16_if(work.queries[n][i], q + head * HEAD_DIM + lane % 4 * 8 + i * 32,
                            head < params.group_heads);
        }
    }
}

/* Whether all keys of the step that begins at a block count. */
template <int HEAD_DIM>
static __device__ __forceinline__ bool step_is_whole(const struct decode_run &run, int32_t block)
{
    int32_t first = block * ATTENTION_BLOCK_SIZE;
    return first >= run.low &&
           first + decode_step<HEAD_DIM>::BLOCKS * ATTENTION_BLOCK_SIZE <= run.high;
}

/* The keys of a step, and where its blocks lie. */
template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void load_step_keys(
    const decode_params &params, int32_t block, struct decode_work<N_TILES, HEAD_DIM> &work,
    const unsigned char *(&base)[decode_step<HEAD_DIM>::BLOCKS])
{
    int32_t in_run = block - work.run.begin, lane = threadIdx.x % 32;
    if (in_run > 0 && in_run % 32 == 0) {
        const int32_t *table = params.block_tables + (int64_t)work.seq * params.max_blocks;
        work.entry = table[min(block + lane, work.run.end - 1)];
    }
#pragma unroll
    for (int i = 0; i < decode_step<HEAD_DIM>::BLOCKS; i++) {
        base[i] = params.keys + work.keys_offset +
                  __shfl_sync(FULL_MASK, work.entry, in_run % 32 + i) * params.block_bytes;
        load_keys<HEAD_DIM>(base[i], work.step.keys[i]);
    }
}

template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void load_step_values(
    const decode_params &params, struct decode_work<N_TILES, HEAD_DIM> &work,
    const unsigned char *const (&base)[decode_step<HEAD_DIM>::BLOCKS])
{
#pragma unroll
    for (int i = 0; i < decode_step<HEAD_DIM>::BLOCKS; i++) {
        load_values<HEAD_DIM>(base[i] + params.value_bytes, work.step.values[i]);
    }
}

/* Asks for the second step of a run, of blocks before end, so that it is in L2 when it is loaded:
 * there are registers for the first one only. */
template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void prefetch_step(
    const decode_params &params, int32_t end, const struct decode_work<N_TILES, HEAD_DIM> &work)
{
    constexpr int BLOCKS = decode_step<HEAD_DIM>::BLOCKS;
    int lane = threadIdx.x % 32;
    if (lane >= BLOCKS && lane < 2 * BLOCKS && work.run.begin + lane < end) {
        const unsigned char *keys =
            params.keys + work.keys_offset + work.entry * params.block_bytes;
        prefetch_to_l2(keys, ATTENTION_BLOCK_SIZE * HEAD_DIM * 2);
        prefetch_to_l2(keys + params.value_bytes, ATTENTION_BLOCK_SIZE * HEAD_DIM * 2);
    }
}

/* Computes the item at hand, of which the first step is loaded or has no keys, and loads the first
 * step of the next. */
template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void walk(const decode_params &params,
                                            const struct decode_shared<N_TILES, HEAD_DIM> *shared,
                                            int32_t count, bool has_next,
                                            struct decode_work<N_TILES, HEAD_DIM> &work,
                                            struct decode_state<N_TILES, HEAD_DIM> &state)
{
    constexpr int BLOCKS = decode_step<HEAD_DIM>::BLOCKS;
    int32_t block = work.run.begin;
    bool is_last;
    do {
        float scores[BLOCKS][N_TILES][4];
        const unsigned char *base[BLOCKS];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            multiply_keys<N_TILES, HEAD_DIM>(scores[i], work.step.keys[i], work.queries);
        }
        if (!step_is_whole<HEAD_DIM>(work.run, block)) {
            mask<N_TILES, HEAD_DIM, BLOCKS>(work.run, block, scores, work.step.values);
        }
        block += BLOCKS;
        is_last = block >= work.run.end;
        if (is_last) {
            take_run<N_TILES, HEAD_DIM>(params, shared, count + 1, has_next, work);
            if (has_next) {
                load_queries<N_TILES, HEAD_DIM>(params, shared, count + 1, work);
            }
            block = work.run.begin;
        }
        bool is_more = block < work.run.end;
        if (is_more) {
            load_step_keys<N_TILES, HEAD_DIM>(params, block, work, base);
        }
        soften<N_TILES, HEAD_DIM, BLOCKS>(params.exp2_scale, scores, state);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            multiply_values<N_TILES, HEAD_DIM>(scores[i], work.step.values[i], state);
        }
        if (is_more) {
            load_step_values<N_TILES, HEAD_DIM>(params, work, base);
        }
    } while (!is_last);
}

template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void clear_state(struct decode_state<N_TILES, HEAD_DIM> &state)
{
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            state.largest[n][i] = -INFINITY;
            state.sum[n][i] = 0.0f;
        }
#pragma unroll
        for (int c = 0; c < HEAD_DIM / 64; c++) {
#pragma unroll
            for (int t = 0; t < 4; t++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    state.accum[c][t][n][i] = 0.0f;
                }
            }
        }
    }
}

template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void share_state(
    const struct decode_state<N_TILES, HEAD_DIM> &state,
    struct decode_shared<N_TILES, HEAD_DIM> *shared)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
                shared->largest[warp][head] = state.largest[n][i];
                shared->sum[warp][head] = sum;
            }
#pragma unroll
            for (int c = 0; c < HEAD_DIM / 64; c++) {
                float4 *to = (float4 *)&shared->accum[warp][head][c * 64 + lane / 4 * 8];
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

/* To the CTAs that they belong to; warp w merges and sends heads w, w + WARPS, ... */
template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void send_heads(float exp2_scale, int buffer,
                                                  struct decode_shared<N_TILES, HEAD_DIM> *shared)
{
    constexpr int CLUSTER = DECODE_CLUSTER(HEAD_DIM);
    int lane = threadIdx.x % 32;
    uint32_t from = cluster_cta_rank();
    for (int head = threadIdx.x / 32; head < N_TILES * 8; head += WARPS) {
        float weights[WARPS], largest = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            largest = fmaxf(largest, shared->largest[i][head]);
        }
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            weights[i] = share_weight(shared->largest[i][head], largest, exp2_scale);
            sum += weights[i] * shared->sum[i][head];
        }
        uint32_t to = head % CLUSTER;
        uint32_t barrier = cluster_address(shared_address(&shared->full[buffer]), to);
        if (lane * 4 < HEAD_DIM) {
            float accum[4] = {};
#pragma unroll
            for (int i = 0; i < WARPS; i++) {
                const float *found = &shared->accum[i][head][lane * 4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    accum[j] += weights[i] * found[j];
                }
            }
            float *place = &shared->received[buffer][from][head / CLUSTER][lane * 4];
            cluster_store_16(cluster_address(shared_address(place), to), accum, barrier);
        }
        if (lane == 0) {
            float *place = shared->received_extremes[buffer][from][head / CLUSTER];
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
template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void merge_column(
    const decode_params &params, const struct decode_shared<N_TILES, HEAD_DIM> *shared, int buffer,
    int row, int column, const struct decode_item *item, int32_t head)
{
    constexpr int CLUSTER = DECODE_CLUSTER(HEAD_DIM);
    float largest = -INFINITY, sum = 0.0f, accum = 0.0f;
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) {
        largest = fmaxf(largest, shared->received_extremes[buffer][i][row][0]);
    }
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) {
        const float *extremes = shared->received_extremes[buffer][i][row];
        float weight = share_weight(extremes[0], largest, params.exp2_scale);
        sum += weight * extremes[1];
        accum += weight * shared->received[buffer][i][row][column];
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

template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void arm(struct decode_shared<N_TILES, HEAD_DIM> *shared,
                                           int buffer)
{
    mbarrier_expect_bytes(shared_address(&shared->full[buffer]),
                          sizeof(shared->received[0]) + sizeof(shared->received_extremes[0]));
}

/* This CTA's heads of item count. is_reused: its buffer will be sent to again. */
template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void finish_item(const decode_params &params, int32_t count,
                                                   bool is_reused,
                                                   struct decode_shared<N_TILES, HEAD_DIM> *shared)
{
    constexpr int CLUSTER = DECODE_CLUSTER(HEAD_DIM), ROWS = N_TILES * 8 / CLUSTER;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, buffer = count % 2;
    const struct decode_item *item = &shared->items[warp][count % 4];
    int32_t chunk = item->column / params.num_kv_heads;
    int32_t kv_head = item->column - chunk * params.num_kv_heads;
    mbarrier_wait(shared_address(&shared->full[buffer]), count / 2 % 2);
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += DECODE_THREADS) {
        int row = i / HEAD_DIM, column = i % HEAD_DIM;
        int32_t in_group = chunk * N_TILES * 8 + row * CLUSTER + (int32_t)cluster_cta_rank();
        if (in_group < params.group_heads) {
            merge_column<N_TILES, HEAD_DIM>(params, shared, buffer, row, column, item,
                                            kv_head * params.group_heads + in_group);
        }
    }
    if (is_reused) {
        if (threadIdx.x == 0) {
            arm(shared, buffer);
        }
        __syncwarp();
        if (lane < CLUSTER) {
            mbarrier_arrive_cluster(cluster_address(shared_address(&shared->empty[buffer]), lane));
        }
    }
}

template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void attend(const decode_params &params)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    static_assert(sizeof(struct decode_shared<N_TILES, HEAD_DIM>) <=
                      DECODE_SHARED(HEAD_DIM, N_TILES * 8),
                  "the launch gives too little");
    struct decode_shared<N_TILES, HEAD_DIM> *shared =
        (struct decode_shared<N_TILES, HEAD_DIM> *)dynamic_shared;
    constexpr int CLUSTER = DECODE_CLUSTER(HEAD_DIM);
    struct decode_queue queue = {.next = (int32_t)blockIdx.x / CLUSTER, .waiting = 0};
    struct decode_work<N_TILES, HEAD_DIM> work;
    const unsigned char *base[decode_step<HEAD_DIM>::BLOCKS];

    if (threadIdx.x == 0) {
        for (int buffer = 0; buffer < 2; buffer++) {
            mbarrier_init(shared_address(&shared->full[buffer]), 1);
            mbarrier_init(shared_address(&shared->empty[buffer]), CLUSTER * WARPS);
        }
        mbarrier_init_fence();
        arm(shared, 0);
        arm(shared, 1);
    }
    __syncthreads();
    cluster_arrive();
    grid_release_next();
    if (!find_item<N_TILES, HEAD_DIM>(params, queue, 0, shared)) {
        grid_wait_for_previous(); /* the next kernel counts on it */
        return;                   /* as the whole cluster does */
    }
    take_run<N_TILES, HEAD_DIM>(params, shared, 0, true, work);
    bool has_keys = work.run.begin < work.run.end;
    int32_t newest = (shared->items[threadIdx.x / 32][0].high - 1) / ATTENTION_BLOCK_SIZE;
    bool is_early = work.run.begin + decode_step<HEAD_DIM>::BLOCKS <= newest;
    if (has_keys && is_early) {
        load_step_keys<N_TILES, HEAD_DIM>(params, work.run.begin, work, base);
        load_step_values<N_TILES, HEAD_DIM>(params, work, base);
        prefetch_step<N_TILES, HEAD_DIM>(params, min(work.run.end, newest), work);
    }
    grid_wait_for_previous();
    load_queries<N_TILES, HEAD_DIM>(params, shared, 0, work);
    if (has_keys && !is_early) {
        load_step_keys<N_TILES, HEAD_DIM>(params, work.run.begin, work, base);
        load_step_values<N_TILES, HEAD_DIM>(params, work, base);
    }
    for (int32_t count = 0;; count++) {
        struct decode_state<N_TILES, HEAD_DIM> state;
        bool has_next = find_item<N_TILES, HEAD_DIM>(params, queue, count + 1, shared);
        clear_state<N_TILES, HEAD_DIM>(state);
        walk<N_TILES, HEAD_DIM>(params, shared, count, has_next, work, state);
        __syncthreads(); /* the heads before have been sent */
        share_state<N_TILES, HEAD_DIM>(state, shared);
        __syncthreads();
        if (count == 0) {
            cluster_wait(); /* all barriers exist */
        }
        if (count >= 2) {
            mbarrier_wait(shared_address(&shared->empty[count % 2]), count / 2 % 2 ^ 1);
        }
        send_heads<N_TILES, HEAD_DIM>(params.exp2_scale, count % 2, shared);
        if (count >= 1) {
            finish_item<N_TILES, HEAD_DIM>(params, count - 1, has_next, shared);
        }
        if (!has_next) {
            finish_item<N_TILES, HEAD_DIM>(params, count, false, shared);
            return;
        }
    }
}

#define DECODE_ATTENTION(head_dim, heads)                                                   \
    extern "C" __global__ void __launch_bounds__(DECODE_THREADS, (heads) == 8 ? 3 : 2)      \
        decode_attention_##head_dim##_##heads(const __grid_constant__ decode_params params) \
    {                                                                                       \
        attend<(heads) / 8, head_dim>(params);                                              \
    }
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
