/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a layer for any size, in fp32 or bf16, without tensor cores: what the fast kernels
 * do not take, and what they are compared with. Each output element is summed up in an order that
 * depends on the widths and on its token's position alone, so that its bits do not depend on the
 * tokens beside it. */
#include <cuda_bf16.h>
#include <math.h>

#include "ops/cuda/kernels/plain_params.h"
#include "ops/cuda/kernels/ptx.cuh"

#define LANES 32
#define NUM_WARPS (PLAIN_THREADS / LANES)

static __device__ __forceinline__ float widen(float value)
{
    return value;
}

static __device__ __forceinline__ float widen(__nv_bfloat16 value)
{
    return __bfloat162float(value);
}

static __device__ __forceinline__ void narrow(float value, float *d)
{
    *d = value;
}

static __device__ __forceinline__ void narrow(float value, __nv_bfloat16 *d)
{
    *d = __float2bfloat16_rn(value);
}

static __device__ __forceinline__ float warp_sum(float value)
{
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffff, value, distance);
    }
    return value;
}

static __device__ __forceinline__ float warp_max(float value)
{
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, distance));
    }
    return value;
}

/* ---- norm ------------------------------------------------------------------------------------ */

template <typename T> static __device__ void normalize(const struct plain_norm_params &params)
{
    __shared__ float warp_sums[NUM_WARPS];
    grid_wait_for_previous();
    grid_release_next();
    int64_t row = params.rows == NULL ? (int64_t)blockIdx.x : params.rows[blockIdx.x];
    const float *a = params.a + row * params.width;
    T *d = (T *)params.d + (int64_t)blockIdx.x * params.width;

    float sum = 0.0f;
    for (int32_t i = threadIdx.x; i < params.width; i += PLAIN_THREADS) {
        sum += a[i] * a[i];
    }
    sum = warp_sum(sum);
    if (threadIdx.x % LANES == 0) {
        warp_sums[threadIdx.x / LANES] = sum;
    }
    __syncthreads();
    sum = warp_sum(threadIdx.x % LANES < NUM_WARPS ? warp_sums[threadIdx.x % LANES] : 0.0f);
    float scale = 1.0f / sqrtf(sum / (float)params.width + params.eps);
    for (int32_t i = threadIdx.x; i < params.width; i += PLAIN_THREADS) {
        narrow(a[i] * scale * params.weight[i], d + i);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

enum product_end { PRODUCT_STORE, PRODUCT_LOGITS, PRODUCT_ADD, PRODUCT_SWIGLU };

/* Columns of k in a tile: as many as a warp has lanes, each of which loads one. */
#define TILE_K LANES
#define THREAD_ROWS 4
#define THREAD_COLUMNS 4
#define THREADS_ACROSS (PLAIN_TILE_COLUMNS / THREAD_COLUMNS)
#define LOADS (PLAIN_TILE_ROWS / NUM_WARPS)

static_assert(PLAIN_TILE_ROWS == PLAIN_TILE_COLUMNS &&
                  PLAIN_TILE_ROWS / THREAD_ROWS * THREADS_ACROSS == PLAIN_THREADS,
              "every thread has its part of a tile, and loads as much of a as of the weights");

/* k-major, and an odd number of floats from k to k: neither storing nor loading has bank
 * conflicts. */
struct product_tile {
    float at[TILE_K][PLAIN_TILE_ROWS + 1];
};

/* A tile's part of this thread: rows warp, warp + NUM_WARPS, ... at column k. What lies outside of
 * the matrix is 0. */
template <typename T>
static __device__ __forceinline__ void fetch(float (&values)[LOADS], const T *matrix,
                                             int32_t row_begin, int32_t num_rows, int32_t k,
                                             int32_t width)
{
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int32_t row = row_begin + (int32_t)threadIdx.x / LANES + i * NUM_WARPS;
        values[i] = row < num_rows && k < width ? widen(matrix[(int64_t)row * width + k]) : 0.0f;
    }
}

static __device__ __forceinline__ void stage(struct product_tile *tile,
                                             const float (&values)[LOADS])
{
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        tile->at[threadIdx.x % LANES][threadIdx.x / LANES + i * NUM_WARPS] = values[i];
    }
}

/* A tile's sum is made apart and then added, so that rounding errors grow with TILE_K + k / TILE_K
 * rather than with k. */
template <int NUM_WEIGHTS>
static __device__ __forceinline__ void multiply(
    float (&sums)[NUM_WEIGHTS][THREAD_ROWS][THREAD_COLUMNS], const struct product_tile *a,
    const struct product_tile *weights)
{
    int first_row = (int)threadIdx.x / THREADS_ACROSS * THREAD_ROWS;
    int first_column = (int)threadIdx.x % THREADS_ACROSS;
    float tile_sums[NUM_WEIGHTS][THREAD_ROWS][THREAD_COLUMNS] = {};
#pragma unroll 8
    for (int k = 0; k < TILE_K; k++) {
#pragma unroll
        for (int w = 0; w < NUM_WEIGHTS; w++) {
#pragma unroll
            for (int j = 0; j < THREAD_COLUMNS; j++) {
                float weight = weights[w].at[k][first_column + j * THREADS_ACROSS];
#pragma unroll
                for (int i = 0; i < THREAD_ROWS; i++) {
                    tile_sums[w][i][j] = fmaf(a->at[k][first_row + i], weight, tile_sums[w][i][j]);
                }
            }
        }
    }
#pragma unroll
    for (int w = 0; w < NUM_WEIGHTS; w++) {
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; i++) {
#pragma unroll
            for (int j = 0; j < THREAD_COLUMNS; j++) {
                sums[w][i][j] += tile_sums[w][i][j];
            }
        }
    }
}

static __device__ __forceinline__ float biased(float sum, const float *bias, int32_t column)
{
    return bias == NULL ? sum : sum + bias[column];
}

template <typename T, enum product_end END, int NUM_WEIGHTS>
static __device__ __forceinline__ void finish(
    const struct plain_product_params &params,
    const float (&sums)[NUM_WEIGHTS][THREAD_ROWS][THREAD_COLUMNS])
{
    int32_t first_row =
        (int32_t)(blockIdx.y * PLAIN_TILE_ROWS + threadIdx.x / THREADS_ACROSS * THREAD_ROWS);
    int32_t first_column =
        (int32_t)(blockIdx.x * PLAIN_TILE_COLUMNS + threadIdx.x % THREADS_ACROSS);
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; i++) {
#pragma unroll
        for (int j = 0; j < THREAD_COLUMNS; j++) {
            int32_t row = first_row + i, column = first_column + j * THREADS_ACROSS;
            if (row >= params.num_rows || column >= params.out_features) {
                continue;
            }
            int64_t at = (int64_t)row * params.out_features + column;
            float value = biased(sums[0][i][j], params.bias, column);
            if (END == PRODUCT_STORE) {
                narrow(value, (T *)params.d + at);
            } else if (END == PRODUCT_LOGITS) {
                ((float *)params.d)[at] = value;
            } else if (END == PRODUCT_ADD) {
                ((float *)params.d)[at] += value;
            } else {
                float up = biased(sums[NUM_WEIGHTS - 1][i][j], params.up_bias, column);
                narrow(value / (1.0f + expf(-value)) * up, (T *)params.d + at);
            }
        }
    }
}

template <typename T, enum product_end END>
static __device__ void multiply_matrices(const struct plain_product_params &params)
{
    constexpr int NUM_WEIGHTS = END == PRODUCT_SWIGLU ? 2 : 1;
    __shared__ struct product_tile a_tile, weight_tiles[NUM_WEIGHTS];
    int32_t width = params.in_features;
    int32_t row_begin = (int32_t)(blockIdx.y * PLAIN_TILE_ROWS);
    int32_t column_begin = (int32_t)(blockIdx.x * PLAIN_TILE_COLUMNS);
    /* Of a whole warp, which is all that leaving rows out can save. */
    bool has_rows =
        row_begin + (int32_t)(threadIdx.x / LANES * (LANES / THREADS_ACROSS)) * THREAD_ROWS <
        params.num_rows;
    float sums[NUM_WEIGHTS][THREAD_ROWS][THREAD_COLUMNS] = {};
    float a_values[LOADS], weight_values[NUM_WEIGHTS][LOADS];

    grid_wait_for_previous();
    grid_release_next();
    for (int32_t k_begin = -TILE_K; k_begin < width; k_begin += TILE_K) {
        int32_t k_next = k_begin + TILE_K + (int32_t)threadIdx.x % LANES;
        fetch(a_values, (const T *)params.a, row_begin, params.num_rows, k_next, width);
        fetch(weight_values[0], (const T *)params.weight, column_begin, params.out_features, k_next,
              width);
        if (NUM_WEIGHTS == 2) {
            fetch(weight_values[NUM_WEIGHTS - 1], (const T *)params.up_weight, column_begin,
                  params.out_features, k_next, width);
        }
        /* The next tile is on its way meanwhile. */
        if (k_begin >= 0 && has_rows) {
            multiply<NUM_WEIGHTS>(sums, &a_tile, weight_tiles);
        }
        __syncthreads();
        stage(&a_tile, a_values);
#pragma unroll
        for (int w = 0; w < NUM_WEIGHTS; w++) {
            stage(&weight_tiles[w], weight_values[w]);
        }
        __syncthreads();
    }
    finish<T, END, NUM_WEIGHTS>(params, sums);
}

/* ---- heads ----------------------------------------------------------------------------------- */

/* K of this token's slot; V lies `plane` elements behind it. */
template <typename T>
static __device__ __forceinline__ T *key_at(const struct plain_kv &kv, int32_t block_idx,
                                            int32_t offset, int32_t kv_head)
{
    return (T *)(kv.blocks + block_idx * kv.block_bytes) +
           ((int64_t)kv_head * kv.block_size + offset) * kv.head_dim;
}

static __device__ __forceinline__ int64_t kv_plane(const struct plain_kv &kv)
{
    return (int64_t)kv.num_kv_heads * kv.block_size * kv.head_dim;
}

/* Normalises the head, if asked to, rotates it, and writes it to d, which may be the head: a pair
 * is one lane's. */
template <typename T>
static __device__ void turn_head(const struct plain_rope_params &params, const T *head,
                                 const float *norm, int32_t position, T *d)
{
    int32_t head_dim = params.kv.head_dim, half = head_dim / 2;
    const float *cosines = params.cos_sin + (int64_t)position * head_dim, *sines = cosines + half;
    int32_t step = params.is_interleaved != 0 ? 2 : 1;
    int32_t distance = params.is_interleaved != 0 ? 1 : half;
    float scale = 1.0f;
    if (norm != NULL) {
        float sum = 0.0f;
        for (int32_t i = (int32_t)threadIdx.x % LANES; i < head_dim; i += LANES) {
            float x = widen(head[i]);
            sum += x * x;
        }
        scale = 1.0f / sqrtf(warp_sum(sum) / (float)head_dim + params.norm_eps);
    }
    for (int32_t i = (int32_t)threadIdx.x % LANES; i < half; i += LANES) {
        int32_t low = i * step, high = low + distance;
        float x = widen(head[low]), y = widen(head[high]);
        if (norm != NULL) {
            x = x * scale * norm[low];
            y = y * scale * norm[high];
        }
        narrow(x * cosines[i] - y * sines[i], d + low);
        narrow(y * cosines[i] + x * sines[i], d + high);
    }
}

template <typename T> static __device__ void rotate(const struct plain_rope_params &params)
{
    const struct plain_kv &kv = params.kv;
    int32_t num_all_heads = params.num_heads + 2 * kv.num_kv_heads;
    int64_t item = (int64_t)blockIdx.x * NUM_WARPS + threadIdx.x / LANES;
    int64_t token = item / num_all_heads;
    int32_t head_idx = (int32_t)(item % num_all_heads);
    grid_wait_for_previous();
    grid_release_next();
    if (token >= params.num_tokens || params.slot_mapping[token] < 0) {
        return;
    }
    T *head = (T *)params.qkv + item * kv.head_dim;
    int32_t position = params.positions[token], slot = params.slot_mapping[token];
    if (head_idx < params.num_heads) {
        turn_head(params, head, params.q_norm, position, head);
        return;
    }
    int32_t kv_head = (head_idx - params.num_heads) % kv.num_kv_heads;
    T *key = key_at<T>(kv, slot / kv.block_size, slot % kv.block_size, kv_head);
    if (head_idx < params.num_heads + kv.num_kv_heads) {
        turn_head(params, head, params.k_norm, position, key);
        return;
    }
    for (int32_t i = (int32_t)threadIdx.x % LANES; i < kv.head_dim; i += LANES) {
        key[kv_plane(kv) + i] = head[i];
    }
}

/* ---- attention ------------------------------------------------------------------------------- */

#define LANE_DIMS (PLAIN_MAX_HEAD_DIM / LANES)

/* Of the keys seen so far. */
struct softmax_state {
    float largest, total;
    float sums[LANE_DIMS]; /* of dimension lane + i * LANES */
};

/* Scores of LANES keys, one a lane. */
template <typename T>
static __device__ __forceinline__ float score_of(const float *q, const T *key, int32_t head_dim)
{
    float sums[4] = {};
    int32_t i = 0;
    for (; i + 4 <= head_dim; i += 4) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sums[j] = fmaf(q[i + j], widen(key[i + j]), sums[j]);
        }
    }
    for (; i < head_dim; i++) {
        sums[0] = fmaf(q[i], widen(key[i]), sums[0]);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* The keys [begin, begin + LANES) as far as they lie in [first, num_keys). */
template <typename T>
static __device__ __forceinline__ void take_keys(const struct plain_attend_params &params,
                                                 const int32_t *block_table, int32_t kv_head,
                                                 const float *q, int32_t begin, int32_t first,
                                                 int32_t num_keys, struct softmax_state *state)
{
    const struct plain_kv &kv = params.kv;
    int32_t lane = (int32_t)threadIdx.x % LANES, position = begin + lane;
    const T *key = NULL;
    float score = -INFINITY;
    if (position >= first && position < num_keys) {
        key =
            key_at<T>(kv, block_table[position / kv.block_size], position % kv.block_size, kv_head);
        score = params.scale * score_of(q, key, kv.head_dim);
    }
    float largest = fmaxf(state->largest, warp_max(score));
    float weight = expf(score - largest), shrink = expf(state->largest - largest);
    state->largest = largest;
    state->total = state->total * shrink + warp_sum(weight);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        state->sums[i] *= shrink;
    }
    int32_t begin_lane = first > begin ? first - begin : 0;
    int32_t end_lane = num_keys - begin < LANES ? num_keys - begin : LANES;
    for (int32_t from = begin_lane; from < end_lane; from++) {
        const T *value =
            (const T *)__shfl_sync(0xffffffff, (unsigned long long)key, (int)from) + kv_plane(kv);
        float value_weight = __shfl_sync(0xffffffff, weight, (int)from);
#pragma unroll
        for (int i = 0; i < LANE_DIMS; i++) {
            if (i * LANES + lane < kv.head_dim) {
                state->sums[i] = fmaf(value_weight, widen(value[i * LANES + lane]), state->sums[i]);
            }
        }
    }
}

/* Warps take LANES keys in turn; what they found is put together in the order of the warps. */
template <typename T> static __device__ void attend(const struct plain_attend_params &params)
{
    __shared__ float q[PLAIN_MAX_HEAD_DIM];
    __shared__ float largest[NUM_WARPS], totals[NUM_WARPS];
    __shared__ float sums[NUM_WARPS][PLAIN_MAX_HEAD_DIM];
    const struct plain_kv &kv = params.kv;
    int32_t warp = (int32_t)threadIdx.x / LANES, lane = (int32_t)threadIdx.x % LANES;
    int32_t head_idx = (int32_t)blockIdx.y, head_dim = kv.head_dim;
    int32_t kv_head = head_idx / (params.num_heads / kv.num_kv_heads);
    int64_t token = blockIdx.x;

    grid_wait_for_previous();
    grid_release_next();
    const T *q_row = (const T *)params.qkv +
                     (token * (params.num_heads + 2 * kv.num_kv_heads) + head_idx) * head_dim;
    for (int32_t i = (int32_t)threadIdx.x; i < head_dim; i += PLAIN_THREADS) {
        q[i] = widen(q_row[i]);
    }
    __syncthreads();

    int32_t seq = params.seq_idx[token], num_keys = params.positions[token] + 1;
    int32_t first = params.window > 0 && num_keys > params.window ? num_keys - params.window : 0;
    const int32_t *block_table = params.block_tables + (int64_t)seq * params.max_blocks;
    struct softmax_state state = {.largest = -INFINITY, .total = 0.0f, .sums = {}};
    for (int32_t begin = (first / LANES + warp) * LANES; begin < num_keys;
         begin += NUM_WARPS * LANES) {
        take_keys<T>(params, block_table, kv_head, q, begin, first, num_keys, &state);
    }

    if (lane == 0) {
        largest[warp] = state.largest;
        totals[warp] = state.total;
    }
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        if (i * LANES + lane < head_dim) {
            sums[warp][i * LANES + lane] = state.sums[i];
        }
    }
    __syncthreads();
    /* A warp without keys has the largest score -INFINITY and so the weight 0. */
    float most = largest[0], total = 0.0f, weights[NUM_WARPS];
    for (int w = 1; w < NUM_WARPS; w++) {
        most = fmaxf(most, largest[w]);
    }
    for (int w = 0; w < NUM_WARPS; w++) {
        weights[w] = expf(largest[w] - most);
        total += weights[w] * totals[w];
    }
    T *d = (T *)params.d + (token * params.num_heads + head_idx) * head_dim;
    for (int32_t i = (int32_t)threadIdx.x; i < head_dim; i += PLAIN_THREADS) {
        float sum = 0.0f;
        for (int w = 0; w < NUM_WARPS; w++) {
            sum += weights[w] * sums[w][i];
        }
        narrow(sum / total, d + i);
    }
}

/* ---- kernels --------------------------------------------------------------------------------- */

#define KERNEL(name, params_type, type, ...)                                     \
    extern "C" __global__ void __launch_bounds__(PLAIN_THREADS, 2)               \
        plain_##name##_##type(const __grid_constant__ struct params_type params) \
    {                                                                            \
        __VA_ARGS__(params);                                                     \
    }
#define KERNELS_OF(type, T)                                                          \
    KERNEL(norm, plain_norm_params, type, normalize<T>)                              \
    KERNEL(store, plain_product_params, type, multiply_matrices<T, PRODUCT_STORE>)   \
    KERNEL(logits, plain_product_params, type, multiply_matrices<T, PRODUCT_LOGITS>) \
    KERNEL(add, plain_product_params, type, multiply_matrices<T, PRODUCT_ADD>)       \
    KERNEL(swiglu, plain_product_params, type, multiply_matrices<T, PRODUCT_SWIGLU>) \
    KERNEL(rope, plain_rope_params, type, rotate<T>)                                 \
    KERNEL(attend, plain_attend_params, type, attend<T>)

KERNELS_OF(f32, float)
KERNELS_OF(bf16, __nv_bfloat16)
