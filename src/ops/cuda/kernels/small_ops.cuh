/* SPDX-License-Identifier: Apache-2.0 */
/* What the products of few tokens share: which rows of the matrix a tile has, what becomes of its
 * sums, and the norm of rows. */
#ifndef IMBREX_OPS_CUDA_KERNELS_SMALL_OPS_CUH
#define IMBREX_OPS_CUDA_KERNELS_SMALL_OPS_CUH

#include <cuda_bf16.h>

#include "ops/cuda/kernels/ptx_warp.cuh"
#include "ops/cuda/kernels/small_params.h"

enum small_op { SMALL_QKV, SMALL_PROJECT, SMALL_MLP, SMALL_LOGITS };

/* The pair of rows that lanes 4 g to 4 g + 3 load for a product, and whose sums they get. */
struct tile_rows {
    int low, high;
    bool has_low, has_high; /* otherwise a row that is there stands in */
};

/* qkv: the head that the tile is in. */
static __device__ __forceinline__ int tile_head(const struct small_kernel_params &params, int tile)
{
    return (int)((unsigned)tile / (unsigned)params.tiles_per_head);
}

template <int OP>
static __device__ __forceinline__ struct tile_rows tile_rows_of(
    const struct small_kernel_params &params, int tile, int g)
{
    struct tile_rows rows = {.low = 0, .high = 0, .has_low = true, .has_high = true};
    if constexpr (OP == SMALL_QKV) {
        int head = tile_head(params, tile), half = params.head_dim / 2;
        int pair = (tile - head * params.tiles_per_head) * 8 + g;
        rows.has_low = rows.has_high = pair < half;
        pair = min(pair, half - 1);
        rows.low = head * params.head_dim + (params.is_interleaved ? 2 * pair : pair);
        rows.high = rows.low + (params.is_interleaved ? 1 : half);
    } else if constexpr (OP == SMALL_MLP) {
        rows.low = tile * 8 + g;
        rows.high = params.out_features / 2 + rows.low;
    } else if (OP == SMALL_PROJECT && params.num_parts == 2) {
        rows.low = rows.high = min(tile * 8 + g, params.out_features - 1);
        rows.has_low = tile * 8 + g < params.out_features;
        rows.has_high = false;
    } else {
        rows.low = tile * 16 + g;
        rows.high = rows.low + 8;
        rows.has_low = rows.low < params.out_features;
        rows.has_high = rows.high < params.out_features;
        rows.low = min(rows.low, params.out_features - 1);
        rows.high = min(rows.high, params.out_features - 1);
    }
    return rows;
}

/* Where dimension 0 of a token's k (plane 0) or v (plane 1) of a head goes. */
static __device__ __forceinline__ __nv_bfloat16 *kv_place(unsigned char *kv_layer,
                                                          int64_t kv_block_bytes, int block_size,
                                                          int num_kv_heads, int head_dim, int slot,
                                                          int plane, int kv_head)
{
    int block = (int)((unsigned)slot / (unsigned)block_size);
    int row = (plane * num_kv_heads + kv_head) * block_size + slot - block * block_size;
    return (__nv_bfloat16 *)(kv_layer + block * kv_block_bytes) + (int64_t)row * head_dim;
}

/* A lane has the sums of COUNT tokens from 2 c on, c = lane % 4. Of these, for qkv: */
struct token_places {
    int positions[2], slots[2];
};

template <int OP, int COUNT>
static __device__ __forceinline__ struct token_places token_places_of(
    const struct small_kernel_params &params, int token_begin, int lane)
{
    struct token_places places = {};
    if constexpr (OP == SMALL_QKV) {
        int token = token_begin + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (token + i < params.num_tokens) {
                places.positions[i] = __ldcg(params.positions + token + i);
                places.slots[i] = __ldcg(params.slot_mapping + token + i);
            }
        }
    }
    return places;
}

/* What a lane needs beside the sums of a tile: asked for before the product, so that it is there
 * after it. */
struct tile_operands {
    struct tile_rows rows;
    float bias_low, bias_high;
    /* By token. qkv: cosine and sine, of what is not rotated 1 and 0; project: d of the low and the
     * high row. */
    float first[2], second[2];
    void *d[2]; /* row 0 of the tokens; NULL: nothing is stored */
};

template <int OP>
static __device__ __forceinline__ void qkv_operands_of(const struct small_kernel_params &params,
                                                       int tile, int g, int position, int slot,
                                                       int i, struct tile_operands &operands)
{
    int head = tile_head(params, tile);
    int kv_head = head - params.num_heads, half = params.head_dim / 2;
    bool is_value = kv_head >= params.num_kv_heads;
    operands.first[i] = 1.0f;
    operands.second[i] = 0.0f;
    if (params.keeps_heads) {
        return;
    }
    if (!is_value) {
        int pair = min((tile - head * params.tiles_per_head) * 8 + g, half - 1);
        const float *cos_sin = params.cos_sin + (int64_t)position * params.head_dim + pair;
        operands.first[i] = __ldcg(cos_sin);
        operands.second[i] = __ldcg(cos_sin + half);
    }
    if (kv_head >= 0 && !params.keeps_kv) {
        __nv_bfloat16 *place = kv_place(params.kv_layer, params.kv_block_bytes, params.block_size,
                                        params.num_kv_heads, params.head_dim, slot, is_value,
                                        is_value ? kv_head - params.num_kv_heads : kv_head);
        operands.d[i] = slot < 0 ? NULL : place - head * params.head_dim;
    }
}

template <int OP, int COUNT>
static __device__ __forceinline__ struct tile_operands tile_operands_of(
    const struct small_kernel_params &params, const struct token_places &places, int tile,
    int token_begin, int lane)
{
    struct tile_operands operands = {};
    int g = lane / 4, token = token_begin + lane % 4 * 2;
    operands.rows = tile_rows_of<OP>(params, tile, g);
    if (params.bias != NULL) {
        operands.bias_low = __ldg(params.bias + operands.rows.low);
        operands.bias_high = __ldg(params.bias + operands.rows.high);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (token + i >= params.num_tokens) {
            continue;
        }
        int64_t columns = OP == SMALL_MLP ? params.out_features / 2 : params.out_features;
        int64_t first_element = (token + i) * columns;
        if constexpr (OP == SMALL_QKV || OP == SMALL_MLP) {
            operands.d[i] = (__nv_bfloat16 *)params.d + first_element;
        } else {
            operands.d[i] = (float *)params.d + first_element;
        }
        if constexpr (OP == SMALL_QKV) {
            qkv_operands_of<OP>(params, tile, g, places.positions[i], places.slots[i], i, operands);
        } else if constexpr (OP == SMALL_PROJECT) {
            const float *d = (const float *)operands.d[i];
            operands.first[i] = __ldcg(d + operands.rows.low);
            operands.second[i] = __ldcg(d + operands.rows.high);
        }
    }
    return operands;
}

static __device__ __forceinline__ float silu(float x)
{
    return x * reciprocal_approx(1.0f + exp2_approx(-1.44269504f * x));
}

/* sums: as mma_bf16 has them, rows are those of the tile, columns tokens. */
template <int OP, int COUNT>
static __device__ __forceinline__ void tile_finish(const struct tile_operands &operands,
                                                   float4 sums)
{
    const float lows[2] = {sums.x + operands.bias_low, sums.y + operands.bias_low};
    const float highs[2] = {sums.z + operands.bias_high, sums.w + operands.bias_high};
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (operands.d[i] == NULL) {
            continue;
        }
        float low = lows[i], high = highs[i], first = operands.first[i];
        float second = operands.second[i];
        if constexpr (OP == SMALL_QKV) {
            __nv_bfloat16 *d = (__nv_bfloat16 *)operands.d[i];
            if (operands.rows.has_low) {
                d[operands.rows.low] = __float2bfloat16_rn(low * first - high * second);
                d[operands.rows.high] = __float2bfloat16_rn(high * first + low * second);
            }
        } else if constexpr (OP == SMALL_MLP) {
            ((__nv_bfloat16 *)operands.d[i])[operands.rows.low] =
                __float2bfloat16_rn(silu(low) * high);
        } else {
            float *d = (float *)operands.d[i];
            if (operands.rows.has_low) {
                d[operands.rows.low] = OP == SMALL_PROJECT ? first + low : low;
            }
            if (operands.rows.has_high) {
                d[operands.rows.high] = OP == SMALL_PROJECT ? second + high : high;
            }
        }
    }
}

static __device__ __forceinline__ float warp_sum(float value)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffff, value, distance);
    }
    return value;
}

static __device__ __forceinline__ float sum_of_squares(float4 v)
{
    return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}

static __device__ __forceinline__ uint2 normed_bf16(float4 v, float scale, float4 weight)
{
    return make_uint2(bf16x2_round(v.x * scale * weight.x, v.y * scale * weight.y),
                      bf16x2_round(v.z * scale * weight.z, v.w * scale * weight.w));
}

/* A row that some warps of a CTA take together: lane t of their num_lanes takes vectors of 16 bytes
 * t, t + num_lanes, ..., KEPT of them at once, so that their loads are under way together. */
template <int KEPT> struct norm_row {
    const float4 *source, *weight;
    int num_vectors, lane, num_lanes;
    float4 kept[KEPT], kept_weight[KEPT]; /* the first of this lane */
};

template <int KEPT>
static __device__ __forceinline__ void vectors_load(const float4 *source, int num_vectors, int at,
                                                    int step, float4 (&vectors)[KEPT])
{
#pragma unroll
    for (int i = 0; i < KEPT; i++, at += step) {
        vectors[i] = at < num_vectors ? __ldcg(source + at) : make_float4(0, 0, 0, 0);
    }
}

/* Asks for the weights that go with what is kept; nobody writes them. */
template <int KEPT>
static __device__ __forceinline__ void norm_row_prepare(struct norm_row<KEPT> &row)
{
    vectors_load(row.weight, row.num_vectors, row.lane, row.num_lanes, row.kept_weight);
}

/* The sum of squares of this lane's elements. A row of 0 vectors is none. */
template <int KEPT>
static __device__ __forceinline__ float norm_row_load(struct norm_row<KEPT> &row)
{
    float sum = 0.0f;
    int batch = KEPT * row.num_lanes;
    vectors_load(row.source, row.num_vectors, row.lane, row.num_lanes, row.kept);
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        sum += sum_of_squares(row.kept[i]);
    }
#pragma unroll 1
    for (int at = batch; at < row.num_vectors; at += batch) {
        float4 vectors[KEPT];
        vectors_load(row.source, row.num_vectors, at + row.lane, row.num_lanes, vectors);
#pragma unroll
        for (int i = 0; i < KEPT; i++) {
            sum += sum_of_squares(vectors[i]);
        }
    }
    return sum;
}

template <int KEPT>
static __device__ __forceinline__ void vectors_store(const float4 (&vectors)[KEPT],
                                                     const float4 (&weights)[KEPT], int num_vectors,
                                                     int at, int step, float scale, uint2 *normed)
{
#pragma unroll
    for (int i = 0; i < KEPT; i++, at += step) {
        if (at < num_vectors) {
            normed[at] = normed_bf16(vectors[i], scale, weights[i]);
        }
    }
}

template <int KEPT>
static __device__ __forceinline__ void norm_row_store(const struct norm_row<KEPT> &row, float scale,
                                                      uint2 *normed)
{
    int batch = KEPT * row.num_lanes;
    vectors_store(row.kept, row.kept_weight, row.num_vectors, row.lane, row.num_lanes, scale,
                  normed);
#pragma unroll 1
    for (int at = batch; at < row.num_vectors; at += batch) {
        float4 vectors[KEPT], weights[KEPT];
        vectors_load(row.source, row.num_vectors, at + row.lane, row.num_lanes, vectors);
        vectors_load(row.weight, row.num_vectors, at + row.lane, row.num_lanes, weights);
        vectors_store(vectors, weights, row.num_vectors, at + row.lane, row.num_lanes, scale,
                      normed);
    }
}

static __device__ __forceinline__ float norm_scale(float sum_of_squares, int hidden_size, float eps)
{
    return rsqrtf(__fdividef(sum_of_squares, (float)hidden_size) + eps);
}

#endif
