/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of any number of tokens on mma.sync, for the head_dims that no other kernel takes.
 *
 * A CTA has a tile of rows, (token, query head) pairs of one KV head, so that heads of a group
 * share its keys and values; a warp has 16 or 32 of them. It walks over the keys with a running
 * maximum and sum per row (online softmax, FlashAttention-2, arXiv 2307.08691):
 *
 *   copies   Q, step 0 | step 1          | step 2          |           cp.async, two stages
 *   warps              | S, softmax, P·V | S, softmax, P·V | ...
 *
 * Steps begin at multiples of KEYS, wherever a tile or window begins: a row adds up its keys in an
 * order that depends on nothing else. Keys outside of the tile's are zeros in shared memory, as 0 *
 * NaN of a value that was never written would reach the result.
 *
 * Of a cache with scales, threads load elements and scales themselves, widen them to bf16 and store
 * these where copies would have put them; they wait for what they load. */
#include <math.h>

#include "ops/cuda/kernels/decode_attention_params.h"
#include "ops/cuda/kernels/kv_elements.cuh"
#include "ops/cuda/kernels/ptx.cuh"
#include "ops/cuda/kernels/ptx_warp.cuh"

#define WARPS (TENSOR_ATTENTION_THREADS / 32)
#define FULL_MASK 0xffffffffu

typedef struct tensor_attention_kernel_params tensor_params;

/* What a CTA has to do. In shared memory: registers are scarce. */
struct tensor_tile {
    int32_t seq, kv_head;
    int32_t token_begin; /* of the sequence */
    int32_t num_rows;    /* of the sequence */
    int32_t first_row;   /* of the tile, in the sequence's rows; negative: nothing to do */
    int32_t first_position, key_begin, key_end;
};

/* All threads look, each at some of the sequences: one latency instead of a search's. */
template <int ROWS>
static __device__ __forceinline__ void find_tile(const tensor_params &params,
                                                 struct tensor_tile *tile)
{
    int32_t group = params.group_heads;
    int32_t number = params.num_tiles - 1 - (int32_t)blockIdx.x / params.num_kv_heads;
    if (threadIdx.x == 0) {
        tile->first_row = -1;
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < params.num_seqs; i += TENSOR_ATTENTION_THREADS) {
        int32_t begin = params.query_begin[i],
                num_rows = (params.query_begin[i + 1] - begin) * group;
        int32_t first_row = (number - begin * group / ROWS - i) * ROWS;
        if (first_row >= 0 && first_row < num_rows) {
            int32_t last_row = min(first_row + ROWS, num_rows) - 1;
            int32_t first_position = params.positions[begin + first_row / group];
            *tile = {
                .seq = i,
                .kv_head = (int32_t)blockIdx.x % params.num_kv_heads,
                .token_begin = begin,
                .num_rows = num_rows,
                .first_row = first_row,
                .first_position = first_position,
                .key_begin = params.window > 0 ? max(0, first_position + 1 - params.window) : 0,
                .key_end = params.positions[begin + last_row / group] + 1,
            };
        }
    }
    __syncthreads();
}

/* The element of qkv or d where a row's head begins. */
static __device__ __forceinline__ int64_t row_offset(const tensor_params &params,
                                                     const struct tensor_tile &tile, int32_t row,
                                                     int32_t heads_of_token)
{
    int32_t token = tile.token_begin + row / params.group_heads;
    int32_t head = tile.kv_head * params.group_heads + row % params.group_heads;
    return ((int64_t)token * heads_of_token + head) * params.head_dim;
}

/* Rows of the tile behind the sequence's last are zeros. */
template <int HEAD_DIM, int ROWS>
static __device__ __forceinline__ void load_queries(const tensor_params &params,
                                                    const struct tensor_tile &tile, uint32_t shared)
{
    constexpr int CHUNKS = HEAD_DIM / 8, STRIDE = HEAD_DIM * 2 + 16;
    int32_t heads_of_token = params.num_heads + 2 * params.num_kv_heads;
    for (int32_t i = threadIdx.x; i < ROWS * CHUNKS; i += TENSOR_ATTENTION_THREADS) {
        int32_t row = tile.first_row + i / CHUNKS, chunk = i % CHUNKS;
        bool is_there = row < tile.num_rows && chunk * 8 < params.head_dim;
        const uint16_t *q = (const uint16_t *)params.qkv;
        if (is_there) {
            q += row_offset(params, tile, row, heads_of_token) + chunk * 8;
        }
        copy_async_16(shared + i / CHUNKS * STRIDE + chunk * 16, q, is_there ? 16 : 0);
    }
}

/* Each warp copies its part of a block: 16 rows, or 8 where a step is only 2 blocks long. */
template <int HEAD_DIM, int KEYS> struct step_part {
    static constexpr int ROWS = KEYS / WARPS;
    static constexpr int WARPS_OF_BLOCK = ATTENTION_BLOCK_SIZE / ROWS;
};

/* The block of the cache that this warp copies of a step; any block for keys that are left out. */
template <int HEAD_DIM, int KEYS>
static __device__ __forceinline__ int32_t step_block(const tensor_params &params,
                                                     const struct tensor_tile &tile, int32_t step,
                                                     int warp)
{
    int32_t entry =
        step * (KEYS / ATTENTION_BLOCK_SIZE) + warp / step_part<HEAD_DIM, KEYS>::WARPS_OF_BLOCK;
    int32_t first = entry * ATTENTION_BLOCK_SIZE;
    bool is_there = first < tile.key_end && first + ATTENTION_BLOCK_SIZE > tile.key_begin;
    return is_there ? params.block_tables[(int64_t)tile.seq * params.max_blocks + entry] : 0;
}

/* Keys and values [step * KEYS, + KEYS) into a stage, values behind keys. */
template <int HEAD_DIM, int KEYS>
static __device__ __forceinline__ void load_step(const tensor_params &params,
                                                 const struct tensor_tile &tile, int32_t step,
                                                 int32_t block, uint32_t stage)
{
    constexpr int CHUNKS = HEAD_DIM / 8, STRIDE = HEAD_DIM * 2 + 16;
    constexpr int ROWS = step_part<HEAD_DIM, KEYS>::ROWS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned char *keys = params.keys + block * params.block_bytes +
                                (int64_t)tile.kv_head * ATTENTION_BLOCK_SIZE * params.head_dim * 2;
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / 32; i++) {
        int idx = i * 32 + lane;
        int row = warp * ROWS + idx / CHUNKS, chunk = idx % CHUNKS;
        int32_t key = step * KEYS + row;
        bool is_there = key >= tile.key_begin && key < tile.key_end && chunk * 8 < params.head_dim;
        int64_t offset =
            is_there ? row % ATTENTION_BLOCK_SIZE * params.head_dim * 2 + chunk * 16 : 0;
        uint32_t to = stage + row * STRIDE + chunk * 16;
        copy_async_16(to, keys + offset, is_there ? 16 : 0);
        copy_async_16(to + KEYS * STRIDE, keys + params.value_bytes + offset, is_there ? 16 : 0);
    }
}

/* Eight elements of a row with their scale, as bf16. */
static __device__ __forceinline__ void widen_chunk(uint32_t shared, const unsigned char *elements,
                                                   const uint16_t *scale_at, bool is_fp8,
                                                   bool is_there)
{
    uint32_t pairs[4] = {0, 0, 0, 0};
    if (is_there) {
        uint2 bytes = *(const uint2 *)elements;
        float scale = __uint_as_float((uint32_t)*scale_at << 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t codes = (i < 2 ? bytes.x : bytes.y) >> i % 2 * 16;
            float low = is_fp8 ? fp8_widen(codes) : (float)(int8_t)(codes & 0xffu);
            float high = is_fp8 ? fp8_widen(codes >> 8) : (float)(int8_t)(codes >> 8 & 0xffu);
            pairs[i] = bf16x2_round(low * scale, high * scale);
        }
    }
    shared_store_16(shared, pairs);
}

/* As load_step, of a cache with scales. */
template <int HEAD_DIM, int KEYS>
static __device__ __forceinline__ void widen_step(const tensor_params &params,
                                                  const struct tensor_tile &tile, int32_t step,
                                                  int32_t block, uint32_t stage)
{
    constexpr int CHUNKS = HEAD_DIM / 8, STRIDE = HEAD_DIM * 2 + 16;
    constexpr int ROWS = step_part<HEAD_DIM, KEYS>::ROWS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t row_groups = (params.head_dim + 31) / 32;
    int32_t element_bytes = ATTENTION_BLOCK_SIZE * params.head_dim; /* of a head */
    const unsigned char *keys =
        params.keys + block * params.block_bytes +
        (int64_t)tile.kv_head * (element_bytes + ATTENTION_BLOCK_SIZE * row_groups * 2);
#pragma unroll 1
    for (int i = 0; i < ROWS * CHUNKS / 32; i++) {
        int idx = i * 32 + lane;
        int row = warp * ROWS + idx / CHUNKS, chunk = idx % CHUNKS;
        int32_t key = step * KEYS + row, place = row % ATTENTION_BLOCK_SIZE;
        bool is_there = key >= tile.key_begin && key < tile.key_end && chunk * 8 < params.head_dim;
        int32_t element = place * params.head_dim + chunk * 8;
        int32_t scale = element_bytes + (place * row_groups + chunk / 4) * 2;
        uint32_t to = stage + row * STRIDE + chunk * 16;
        const unsigned char *values = keys + params.value_bytes;
        widen_chunk(to, keys + element, (const uint16_t *)(keys + scale), params.is_fp8 != 0,
                    is_there);
        widen_chunk(to + KEYS * STRIDE, values + element, (const uint16_t *)(values + scale),
                    params.is_fp8 != 0, is_there);
    }
}

/* A warp's rows: accumulators in the layout of matrix_multiply_add, sums of this thread's columns
 * alone until the end. */
template <int HEAD_DIM, int M_TILES> struct rows_state {
    float accum[M_TILES][HEAD_DIM / 8][4];
    float largest[M_TILES][2], sum[M_TILES][2];
};

/* scores = Q · Kᵀ */
template <int HEAD_DIM, int M_TILES, int KEYS>
static __device__ __forceinline__ void multiply_keys(float (&scores)[M_TILES][KEYS / 8][4],
                                                     uint32_t queries, uint32_t keys)
{
    constexpr int STRIDE = HEAD_DIM * 2 + 16;
    int lane = threadIdx.x % 32;
    /* Of A: rows 0-7, 8-15, then the next 8 columns; of B: the next 8 columns, then rows 8-15. */
    uint32_t a_at = queries + lane % 16 * STRIDE + lane / 16 * 16;
    uint32_t b_at = keys + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 16;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[m][n][i] = 0.0f;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        uint32_t a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            matrix_load_x4(a[m], a_at + m * 16 * STRIDE + k * 32);
        }
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            uint32_t b[4];
            matrix_load_x4(b, b_at + n * 16 * STRIDE + k * 32);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                matrix_multiply_add(scores[m][2 * n], a[m], b[0], b[1]);
                matrix_multiply_add(scores[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* Keys that a row does not see score -infinity. A row's last key is looked up again each time: few
 * steps are masked, and registers are scarce. */
template <int M_TILES, int KEYS>
static __device__ __forceinline__ void mask(const tensor_params &params,
                                            const struct tensor_tile &tile,
                                            float (&scores)[M_TILES][KEYS / 8][4],
                                            int32_t first_row, int32_t step)
{
    int32_t first_key = step * KEYS + threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int32_t row = min(first_row + m * 16 + h * 8, tile.num_rows - 1);
            int32_t last = params.positions[tile.token_begin + row / params.group_heads];
            int32_t first = params.window > 0 ? last - params.window + 1 : 0;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int32_t key = first_key + n * 8 + i;
                    float *score = &scores[m][n][2 * h + i];
                    *score = key >= first && key <= last ? *score : -INFINITY;
                }
            }
        }
    }
}

/* weights = exp(score - largest) in the layout of A, which is that of two 8-key tiles of
 * accumulators; sums and accumulators follow a largest that has grown. */
template <int HEAD_DIM, int M_TILES, int KEYS>
static __device__ __forceinline__ void soften(float exp2_scale,
                                              const float (&scores)[M_TILES][KEYS / 8][4],
                                              uint32_t (&weights)[M_TILES][KEYS / 16][4],
                                              struct rows_state<HEAD_DIM, M_TILES> &state)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = state.largest[m][h];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                largest = fmaxf(largest, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 2));
            /* No key seen so far: -infinity minus itself is no number. */
            float base = largest == -INFINITY ? 0.0f : largest * exp2_scale;
            /* Exactly 1 where nothing has changed: bits must not depend on masked steps, nor on
             * rows of the warp that have changed. */
            float before = state.largest[m][h];
            float shrink = largest > before ? exp2_approx((before - largest) * exp2_scale) : 1.0f;
            bool has_grown = __any_sync(FULL_MASK, largest > before);
            float sum = state.sum[m][h] * shrink;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                float low = exp2_approx(scores[m][n][2 * h] * exp2_scale - base);
                float high = exp2_approx(scores[m][n][2 * h + 1] * exp2_scale - base);
                weights[m][n / 2][n % 2 * 2 + h] = bf16x2_round(low, high);
                sum += low + high;
            }
            /* Seldom after the first steps, and by 1 otherwise. */
            if (has_grown) {
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; n++) {
                    state.accum[m][n][2 * h] *= shrink;
                    state.accum[m][n][2 * h + 1] *= shrink;
                }
            }
            state.largest[m][h] = largest;
            state.sum[m][h] = sum;
        }
    }
}

/* accum += P · V */
template <int HEAD_DIM, int M_TILES, int KEYS>
static __device__ __forceinline__ void multiply_values(
    const uint32_t (&weights)[M_TILES][KEYS / 16][4], struct rows_state<HEAD_DIM, M_TILES> &state,
    uint32_t values)
{
    constexpr int STRIDE = HEAD_DIM * 2 + 16;
    int lane = threadIdx.x % 32;
    uint32_t b_at = values + lane % 16 * STRIDE + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; n++) {
            uint32_t b[4];
            matrix_load_x4_transposed(b, b_at + k * 16 * STRIDE + n * 32);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                matrix_multiply_add(state.accum[m][2 * n], weights[m][k], b[0], b[1]);
                matrix_multiply_add(state.accum[m][2 * n + 1], weights[m][k], b[2], b[3]);
            }
        }
    }
}

template <int HEAD_DIM, int M_TILES>
static __device__ __forceinline__ void store_rows(const tensor_params &params,
                                                  const struct tensor_tile &tile,
                                                  const struct rows_state<HEAD_DIM, M_TILES> &state,
                                                  int32_t first_row)
{
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int32_t row = first_row + m * 16 + h * 8;
            float sum = state.sum[m][h];
            sum += __shfl_xor_sync(FULL_MASK, sum, 1);
            sum += __shfl_xor_sync(FULL_MASK, sum, 2);
            if (row >= tile.num_rows) {
                continue;
            }
            float factor = 1.0f / sum;
            uint32_t *d = (uint32_t *)((uint16_t *)params.d +
                                       row_offset(params, tile, row, params.num_heads)) +
                          threadIdx.x % 4;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                if (n * 8 < params.head_dim) {
                    d[n * 4] = bf16x2_round(state.accum[m][n][2 * h] * factor,
                                            state.accum[m][n][2 * h + 1] * factor);
                }
            }
        }
    }
}

/* A step into its stage; copies are committed by the caller. */
template <int HEAD_DIM, int KEYS, bool IS_SCALED>
static __device__ __forceinline__ void fill_stage(const tensor_params &params,
                                                  const struct tensor_tile &tile, int32_t step,
                                                  int32_t block, uint32_t stage)
{
    if constexpr (IS_SCALED) {
        widen_step<HEAD_DIM, KEYS>(params, tile, step, block, stage);
    } else {
        load_step<HEAD_DIM, KEYS>(params, tile, step, block, stage);
    }
}

template <int HEAD_DIM, int M_TILES, int KEYS, bool IS_SCALED>
static __device__ __forceinline__ void attend(const tensor_params &params)
{
    constexpr int ROWS = WARPS * 16 * M_TILES, STRIDE = HEAD_DIM * 2 + 16;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ struct tensor_tile tile;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    grid_wait_for_previous();
    grid_release_next();
    find_tile<ROWS>(params, &tile);
    if (tile.first_row < 0) {
        return;
    }
    uint32_t queries = shared_address(shared), stages = queries + ROWS * STRIDE;
    int32_t step = tile.key_begin / KEYS;
    load_queries<HEAD_DIM, ROWS>(params, tile, queries);
    fill_stage<HEAD_DIM, KEYS, IS_SCALED>(params, tile, step,
                                          step_block<HEAD_DIM, KEYS>(params, tile, step, warp),
                                          stages + (step & 1) * 2 * KEYS * STRIDE);
    copy_async_commit();
    int32_t next_block = step_block<HEAD_DIM, KEYS>(params, tile, step + 1, warp);

    struct rows_state<HEAD_DIM, M_TILES> state;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            state.largest[m][h] = -INFINITY;
            state.sum[m][h] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                state.accum[m][n][i] = 0.0f;
            }
        }
    }
    for (; step * KEYS < tile.key_end; step++) {
        uint32_t keys = stages + (step & 1) * 2 * KEYS * STRIDE;
        copy_async_wait<0>();
        /* Everybody's copies are there, and nobody reads the other stage any more. */
        __syncthreads();
        if ((step + 1) * KEYS < tile.key_end) {
            fill_stage<HEAD_DIM, KEYS, IS_SCALED>(params, tile, step + 1, next_block,
                                                  stages + (~step & 1) * 2 * KEYS * STRIDE);
            copy_async_commit();
            next_block = step_block<HEAD_DIM, KEYS>(params, tile, step + 2, warp);
        }
        if (tile.first_row + warp * 16 * M_TILES >= tile.num_rows) {
            continue;
        }
        float scores[M_TILES][KEYS / 8][4];
        multiply_keys<HEAD_DIM, M_TILES, KEYS>(scores, queries + warp * 16 * M_TILES * STRIDE,
                                               keys);
        if ((step + 1) * KEYS > tile.first_position + 1 || params.window > 0) {
            mask<M_TILES, KEYS>(params, tile, scores,
                                tile.first_row + warp * 16 * M_TILES + lane / 4, step);
        }
        uint32_t weights[M_TILES][KEYS / 16][4];
        soften<HEAD_DIM, M_TILES, KEYS>(params.exp2_scale, scores, weights, state);
        multiply_values<HEAD_DIM, M_TILES, KEYS>(weights, state, keys + KEYS * STRIDE);
    }
    store_rows<HEAD_DIM, M_TILES>(params, tile, state,
                                  tile.first_row + warp * 16 * M_TILES + lane / 4);
}

#define TENSOR_ATTENTION(rest, head_dim, m_tiles, keys)                                  \
    extern "C" __global__ void __launch_bounds__(TENSOR_ATTENTION_THREADS)               \
        tensor_attention_##head_dim(const __grid_constant__ tensor_params params)        \
    {                                                                                    \
        attend<head_dim, m_tiles, keys, false>(params);                                  \
    }                                                                                    \
    extern "C" __global__ void __launch_bounds__(TENSOR_ATTENTION_THREADS)               \
        tensor_attention_scaled_##head_dim(const __grid_constant__ tensor_params params) \
    {                                                                                    \
        attend<head_dim, m_tiles, keys, true>(params);                                   \
    }
TENSOR_ATTENTION_LIST(TENSOR_ATTENTION, )
