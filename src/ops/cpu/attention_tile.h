/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of a tile of query rows over chunks of 64 keys: one algorithm for every vector width.
 * The rows of a tile are the query heads of a kv head, for consecutive tokens of one sequence;
 * decode is a tile of one token.
 *
 *   keys     [head_dim][64], turned once per chunk for all rows, so that lanes lie along the keys
 *   scores   6 rows x some vectors of keys in registers, head_dim in ascending order
 *   weights  exp(score - largest); `largest` rises with the chunks, and what was added so far is
 *            scaled down (online softmax, arXiv 1805.02867; its use in tiles:
 *            FlashAttention, arXiv 2205.14135)
 *   sums     6 rows x some vectors of the output in registers, keys in ascending order
 *
 * Chunks begin at multiples of 64 positions. Every attention_split_keys() positions the sums of a
 * row are folded into those of the splits before, in ascending order; another thread may have
 * computed them (attention_split.h). A row meets the same operations in the same order whatever
 * tile it is in, so results do not depend on the batch. What a row may not see is not multiplied by
 * zero but left out: it may be infinite.
 *
 * Keys and values of a cache that is not fp32 are widened chunk by chunk, once for all rows: what
 * follows is as if the cache held these numbers.
 *
 * The file that includes this defines `vec`, VEC_LANES, STRIP_VECS and the vec_ functions below,
 * vec_load_kv() among them, and turn_rows(). */
#ifndef IMBREX_OPS_CPU_ATTENTION_TILE_H
#define IMBREX_OPS_CPU_ATTENTION_TILE_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "ops/cpu/attention_strip.h"
#include "ops/cpu/cpu_kernels.h"
#include "ops/ref/ref_kernels.h"

#define MAX_TILE_ROWS 256

/* Where the keys and values of a chunk lie. */
static void chunk_find(const struct attention_tile *tile, int64_t first, struct key_chunk *chunk)
{
    const struct kv_view *kv = &tile->params->kv;
    int64_t begin = first > tile->keys_begin ? first : tile->keys_begin;
    int64_t end = first + CHUNK_KEYS < tile->keys_end ? first + CHUNK_KEYS : tile->keys_end;
    chunk->first = first;
    chunk->begin = (int32_t)(begin - first);
    chunk->end = begin < end ? (int32_t)(end - first) : chunk->begin;
    int32_t num_groups = kv_dtype_row_groups(kv->dtype, kv->head_dim);
    size_t row_bytes = (size_t)kv->head_dim * kv_dtype_element_bytes(kv->dtype);
    for (int64_t position = begin; position < end;) {
        int32_t block_idx = tile->block_table[position / kv->block_size];
        int32_t offset = (int32_t)(position % kv->block_size);
        int64_t block_end = position - offset + kv->block_size;
        struct kv_row key = kv_view_row(
            kv, kv_view_keys(kv, block_idx, tile->params->layer_idx, tile->kv_head), offset);
        struct kv_row value = kv_view_row(
            kv, kv_view_values(kv, block_idx, tile->params->layer_idx, tile->kv_head), offset);
        for (; position < end && position < block_end; position++) {
            chunk->keys[position - first] = key.elements;
            chunk->values[position - first] = value.elements;
            key.elements += row_bytes;
            value.elements += row_bytes;
            if (num_groups > 0) {
                chunk->key_scales[position - first] = key.scales;
                chunk->value_scales[position - first] = value.scales;
                key.scales += num_groups;
                value.scales += num_groups;
            }
        }
    }
}

/* Elements of one group from `dim` of their row on; `dtype` is a constant where this is inlined. */
VEC_INLINE vec widen_lanes(enum kv_dtype dtype, const unsigned char *elements,
                           const uint16_t *scales, int32_t dim)
{
    vec lanes = vec_load_kv(dtype, elements);
    if (!kv_dtype_has_scales(dtype)) {
        return lanes;
    }
    return vec_mul(lanes, vec_set(bf16_to_float(scales[dim / KV_GROUP_ELEMENTS])));
}

VEC_INLINE void widen_row(enum kv_dtype dtype, const unsigned char *elements,
                          const uint16_t *scales, int32_t head_dim, float *d)
{
    size_t element_bytes = kv_dtype_element_bytes(dtype);
    int32_t dim = 0;
    for (; dim + VEC_LANES <= head_dim; dim += VEC_LANES) {
        vec_store(d + dim, widen_lanes(dtype, elements + (size_t)dim * element_bytes, scales, dim));
    }
    if (dim < head_dim) {
        unsigned char rest[VEC_LANES * sizeof(uint16_t)] = {0};
        memcpy(rest, elements + (size_t)dim * element_bytes,
               (size_t)(head_dim - dim) * element_bytes);
        vec_store_low(d + dim, head_dim - dim, widen_lanes(dtype, rest, scales, dim));
    }
}

/* Keys, or values, of a chunk into tile->widened; widened: where each of them is then. */
static void widen_rows(const struct attention_tile *tile, const struct key_chunk *chunk,
                       const unsigned char *const *rows, const uint16_t *const *scales,
                       const unsigned char **widened)
{
    int32_t head_dim = tile->head_dim;
    for (int32_t key = chunk->begin; key < chunk->end; key++) {
        float *d = tile->widened + (int64_t)key * head_dim;
        widened[key] = (const unsigned char *)d;
        switch (tile->params->kv.dtype) {
        case KV_DTYPE_F16:
            widen_row(KV_DTYPE_F16, rows[key], NULL, head_dim, d);
            break;
        case KV_DTYPE_BF16:
            widen_row(KV_DTYPE_BF16, rows[key], NULL, head_dim, d);
            break;
        case KV_DTYPE_INT8:
            widen_row(KV_DTYPE_INT8, rows[key], scales[key], head_dim, d);
            break;
        default:
            widen_row(KV_DTYPE_FP8, rows[key], scales[key], head_dim, d);
            break;
        }
    }
}

/* All rows of the tile meet the keys of a chunk; those of the next one are fetched meanwhile. */
static void add_chunk(struct attention_tile *tile, const struct key_chunk *chunk,
                      const struct key_chunk *next)
{
    int32_t last_token = tile->num_tokens - 1;
    int32_t first_vec = chunk->begin / VEC_LANES;
    int32_t end_vec = (chunk->end + VEC_LANES - 1) / VEC_LANES;
    bool is_whole = attention_first_key(tile->params, tile->token + last_token) <= chunk->first &&
                    tile->params->positions[tile->token] + 1 >= chunk->first + CHUNK_KEYS;
    struct key_range whole = {0, CHUNK_KEYS};
    const unsigned char *widened[CHUNK_KEYS];
    const unsigned char *const *keys = chunk->keys, *const *values = chunk->values;
    if (tile->widened != NULL) {
        widen_rows(tile, chunk, chunk->keys, chunk->key_scales, widened);
        keys = widened;
    }
    for (int32_t idx = first_vec; idx < end_vec; idx++) {
        const float *rows[VEC_LANES];
        for (int32_t lane = 0; lane < VEC_LANES; lane++) {
            int32_t key = idx * VEC_LANES + lane;
            key = key < chunk->begin ? chunk->begin : key < chunk->end ? key : chunk->end - 1;
            rows[lane] = (const float *)(const void *)keys[key];
        }
        turn_rows(rows, tile->head_dim, tile->keys + idx * VEC_LANES, CHUNK_KEYS);
    }
    int64_t num_strips = (tile->num_rows + STRIP_ROWS - 1) / STRIP_ROWS;
    struct fetch fetch =
        fetch_rows(next->keys, next, &tile->params->kv,
                   num_strips * (tile->head_dim / FETCH_STEPS) * CHUNK_VECS / STRIP_VECS);
    /* Raising is a few steps that wait for one another: the next strip is scored meanwhile. */
    struct strip before = {.num_rows = 0, .is_whole = true}, strip;
    for (int32_t row = 0; row < tile->num_rows; row += strip.num_rows) {
        strip_set(&strip, tile, chunk, row, is_whole);
        score_rows(tile, &strip, first_vec, end_vec, &fetch);
        weigh_strip(tile, &before);
        raise_strip(tile, &strip);
        before = strip;
    }
    weigh_strip(tile, &before);
    if (tile->widened != NULL) {
        widen_rows(tile, chunk, chunk->values, chunk->value_scales, widened);
        values = widened;
    }
    int64_t num_dim_steps =
        (tile->head_dim + STRIP_VECS * VEC_LANES - 1) / (STRIP_VECS * VEC_LANES);
    fetch = fetch_rows(next->values, next, &tile->params->kv,
                       num_strips * (CHUNK_KEYS / FETCH_STEPS) * num_dim_steps);
    for (int32_t row = 0; row < tile->num_rows; row += strip.num_rows) {
        strip_set(&strip, tile, chunk, row, is_whole);
        if (is_whole) {
            add_rows(tile, values, row, strip.num_rows, whole, &fetch);
        } else {
            add_ragged_rows(tile, values, &strip, &fetch);
        }
    }
}

static void clear_row(const struct attention_tile *tile, int32_t row)
{
    float *sums = tile->sums + (int64_t)row * tile->stride;
    for (int32_t idx = 0; idx < tile->stride; idx += VEC_LANES) {
        vec_store(sums + idx, vec_zero());
    }
    vec_store(tile->totals + (int64_t)row * VEC_LANES, vec_zero());
    tile->largest[row] = -INFINITY;
}

/* Positions [begin, end) of one split, from a clear state. */
static void add_keys(struct attention_tile *tile, int64_t begin, int64_t end)
{
    struct key_chunk chunks[2];
    int64_t first = begin / CHUNK_KEYS * CHUNK_KEYS;
    int32_t current = 0;
    for (int32_t row = 0; row < tile->num_rows; row++) {
        clear_row(tile, row);
    }
    chunk_find(tile, first, &chunks[current]);
    for (; first < end; first += CHUNK_KEYS, current = 1 - current) {
        chunk_find(tile, first + CHUNK_KEYS, &chunks[1 - current]);
        add_chunk(tile, &chunks[current], &chunks[1 - current]);
    }
}

/* Adds a split to those before it. */
static void fold_row(struct attention_row *folded, float *folded_sums, struct attention_row row,
                     const float *sums, int32_t head_dim)
{
    float largest = folded->largest > row.largest ? folded->largest : row.largest;
    vec base = weight_base(vec_set(largest));
    vec factor = exp_negative(vec_sub(vec_set(folded->largest), base));
    vec row_factor = exp_negative(vec_sub(vec_set(row.largest), base));
    float totals[VEC_LANES];
    vec_store(totals,
              vec_muladd(vec_set(row.total), row_factor, vec_mul(vec_set(folded->total), factor)));
    folded->total = totals[0];
    folded->largest = largest;
    for (int32_t idx = 0; idx < head_dim; idx += VEC_LANES) {
        vec sum = vec_mul(vec_load(folded_sums + idx), factor);
        vec_store(folded_sums + idx, vec_muladd(vec_load(sums + idx), row_factor, sum));
    }
}

static void clear_folded(struct attention_row *folded, float *folded_sums, int32_t stride)
{
    *folded = (struct attention_row){.largest = -INFINITY, .total = 0.0f};
    for (int32_t idx = 0; idx < stride; idx += VEC_LANES) {
        vec_store(folded_sums + idx, vec_zero());
    }
}

/* Sums over their total; a sum of -0, which a single split may end with and folding makes 0, is 0
 * here too. */
static void write_row(float total, const float *sums, float *d, int32_t head_dim)
{
    vec part = vec_div(vec_set(1.0f), vec_set(total));
    int32_t idx = 0;
    for (; idx + VEC_LANES <= head_dim; idx += VEC_LANES) {
        vec_store(d + idx, vec_muladd(vec_load(sums + idx), part, vec_zero()));
    }
    if (idx < head_dim) {
        vec_store_low(d + idx, head_dim - idx, vec_muladd(vec_load(sums + idx), part, vec_zero()));
    }
}

static struct attention_row row_of(const struct attention_tile *tile, int32_t row)
{
    vec totals = vec_load(tile->totals + (int64_t)row * VEC_LANES);
    return (struct attention_row){.largest = tile->largest[row], .total = vec_sum(totals)};
}

static float *scratch_take(unsigned char **scratch, size_t count)
{
    float *taken = (float *)(void *)*scratch;
    *scratch += (count * sizeof(float) + 63) / 64 * 64;
    return taken;
}

/* A tile without tokens, its memory laid out. */
static void tile_init(struct attention_tile *tile, const struct attention_params *params,
                      const struct cpu_work *work)
{
    unsigned char *scratch = work->scratch;
    size_t head_dim = (size_t)params->kv.head_dim;
    size_t stride = (head_dim + LINE_FLOATS - 1) / LINE_FLOATS * LINE_FLOATS;
    /* Each of the arrays may take a line more than its rows. */
    size_t row_bytes = (head_dim + CHUNK_KEYS + 2 * stride + VEC_LANES + 2) * sizeof(float) +
                       sizeof(struct attention_row);
    size_t chunk_bytes = head_dim * CHUNK_KEYS * sizeof(float);
    bool is_widened = params->kv.dtype != KV_DTYPE_F32;
    size_t max_rows =
        (ATTENTION_TILE_BYTES - (is_widened ? 2 : 1) * chunk_bytes - 12 * 64) / row_bytes;
    max_rows = max_rows < MAX_TILE_ROWS ? max_rows : MAX_TILE_ROWS;
    *tile = (struct attention_tile){.params = params,
                                    .head_dim = (int32_t)head_dim,
                                    .stride = (int32_t)stride,
                                    .max_rows = (int32_t)max_rows};
    tile->widened = is_widened ? scratch_take(&scratch, head_dim * CHUNK_KEYS) : NULL;
    tile->keys = scratch_take(&scratch, head_dim * CHUNK_KEYS);
    tile->q = scratch_take(&scratch, max_rows * head_dim + VEC_LANES);
    tile->weights = scratch_take(&scratch, max_rows * CHUNK_KEYS);
    tile->sums = scratch_take(&scratch, max_rows * stride);
    tile->totals = scratch_take(&scratch, max_rows * VEC_LANES);
    tile->largest = scratch_take(&scratch, max_rows + VEC_LANES);
    tile->factors = scratch_take(&scratch, max_rows + VEC_LANES);
    tile->folded_sums = scratch_take(&scratch, max_rows * stride);
    tile->folded = (struct attention_row *)(void *)scratch;
}

/* Names the rows and brings their queries into strips. */
static void tile_set(struct attention_tile *tile, int64_t token, int32_t num_tokens,
                     int32_t kv_head, int32_t head, int32_t num_heads)
{
    const struct attention_params *params = tile->params;
    int32_t head_dim = tile->head_dim;
    vec scale = vec_set(params->scale);
    tile->block_table = params->block_tables + (int64_t)params->seq_idx[token] * params->max_blocks;
    tile->token = token;
    tile->num_tokens = num_tokens;
    tile->num_heads = num_heads;
    tile->num_rows = num_tokens * num_heads;
    tile->kv_head = kv_head;
    tile->head = head;
    tile->keys_begin = attention_first_key(params, token);
    tile->keys_end = (int64_t)params->positions[token + num_tokens - 1] + 1;
    for (int32_t first = 0; first < tile->num_rows;) {
        int32_t num_rows = strip_rows(tile->num_rows - first);
        float *packed = tile->q + (int64_t)first * head_dim;
        const float *rows[VEC_LANES];
        for (int32_t lane = 0; lane < VEC_LANES; lane++) {
            int32_t row = first + (lane < num_rows ? lane : num_rows - 1);
            rows[lane] = params->q + (token + row / num_heads) * params->q_stride +
                         (int64_t)(head + row % num_heads) * head_dim;
        }
        /* Each vector overwrites what the one before it has too many of. */
        turn_rows(rows, head_dim, packed, num_rows);
        for (int32_t idx = 0; idx < num_rows * head_dim; idx += VEC_LANES) {
            vec_store(packed + idx, vec_mul(vec_load(packed + idx), scale));
        }
        first += num_rows;
    }
}

static void write_tile_row(const struct attention_tile *tile, int32_t row, float total,
                           const float *sums)
{
    const struct attention_params *params = tile->params;
    int64_t token = tile->token + row / tile->num_heads;
    int64_t head = tile->head + row % tile->num_heads;
    write_row(total, sums + (int64_t)row * tile->stride,
              params->d + (token * params->num_heads + head) * tile->head_dim, tile->head_dim);
}

/* All keys of all rows, and the results. */
static void tile_attend(struct attention_tile *tile)
{
    const struct attention_params *params = tile->params;
    int64_t split_keys = attention_split_keys(params, tile->token);
    int64_t first_split = tile->keys_begin / split_keys * split_keys;
    if (tile->keys_end <= first_split + split_keys) {
        add_keys(tile, tile->keys_begin, tile->keys_end);
        for (int32_t row = 0; row < tile->num_rows; row++) {
            write_tile_row(tile, row, row_of(tile, row).total, tile->sums);
        }
        return;
    }
    for (int32_t row = 0; row < tile->num_rows; row++) {
        clear_folded(&tile->folded[row], tile->folded_sums + (int64_t)row * tile->stride,
                     tile->stride);
    }
    for (int64_t first = first_split; first < tile->keys_end; first += split_keys) {
        int64_t begin = first > tile->keys_begin ? first : tile->keys_begin;
        int64_t end = first + split_keys < tile->keys_end ? first + split_keys : tile->keys_end;
        add_keys(tile, begin, end);
        for (int32_t row = 0; row < tile->num_rows; row++) {
            int64_t token = tile->token + row / tile->num_heads;
            if (attention_first_key(params, token) < end && params->positions[token] >= first) {
                fold_row(&tile->folded[row], tile->folded_sums + (int64_t)row * tile->stride,
                         row_of(tile, row), tile->sums + (int64_t)row * tile->stride,
                         tile->head_dim);
            }
        }
    }
    for (int32_t row = 0; row < tile->num_rows; row++) {
        write_tile_row(tile, row, tile->folded[row].total, tile->folded_sums);
    }
}

/* How many of the next max_tokens tokens are consecutive ones of a sequence with splits of the same
 * length. */
static int32_t count_tile_tokens(const struct attention_params *params, int64_t token,
                                 int64_t max_tokens)
{
    int64_t split_keys = attention_split_keys(params, token);
    int32_t count = 1;
    while (count < max_tokens && params->seq_idx[token + count] == params->seq_idx[token] &&
           params->positions[token + count] == params->positions[token] + count &&
           attention_split_keys(params, token + count) == split_keys) {
        count++;
    }
    return count;
}

static void attention_run(const struct attention_params *params, const struct cpu_work *work,
                          int64_t begin, int64_t end)
{
    if (!attention_has_tiles(&params->kv)) {
        ref_attention(params, work, begin, end);
        return;
    }
    int32_t group_heads = params->num_heads / params->kv.num_kv_heads;
    struct attention_tile tile;
    tile_init(&tile, params, work);
    int32_t max_heads = group_heads < tile.max_rows ? group_heads : tile.max_rows;
    int64_t max_tokens = tile.max_rows / max_heads;
    max_tokens = max_tokens < ATTENTION_TILE_TOKENS ? max_tokens : ATTENTION_TILE_TOKENS;
    for (int64_t item = begin; item < end;) {
        int32_t kv_head = (int32_t)(item / params->num_tokens);
        int64_t token = item % params->num_tokens;
        int64_t num_left = params->num_tokens - token;
        num_left = end - item < num_left ? end - item : num_left;
        int32_t num_tokens =
            count_tile_tokens(params, token, num_left < max_tokens ? num_left : max_tokens);
        for (int32_t head = 0; head < group_heads; head += max_heads) {
            int32_t num_heads = group_heads - head < max_heads ? group_heads - head : max_heads;
            tile_set(&tile, token, num_tokens, kv_head, kv_head * group_heads + head, num_heads);
            tile_attend(&tile);
        }
        item += num_tokens;
    }
}

static void attention_split_run(const struct attention_params *params,
                                const struct attention_parts *parts, const struct cpu_work *work,
                                int64_t begin, int64_t end)
{
    int32_t group_heads = params->num_heads / params->kv.num_kv_heads;
    struct attention_tile tile;
    tile_init(&tile, params, work);
    for (int64_t part = begin; part < end; part++) {
        struct attention_span span = attention_parts_span(parts, params, part);
        struct attention_row *rows = attention_parts_rows(parts, part);
        float *sums = attention_parts_sums(parts, part);
        for (int32_t head = 0; head < group_heads && span.begin < span.end; head += tile.max_rows) {
            int32_t num_left = group_heads - head;
            int32_t num_heads = num_left < tile.max_rows ? num_left : tile.max_rows;
            tile_set(&tile, span.token, 1, span.kv_head, span.kv_head * group_heads + head,
                     num_heads);
            add_keys(&tile, span.begin, span.end);
            for (int32_t row = 0; row < num_heads; row++) {
                rows[head + row] = row_of(&tile, row);
                for (int32_t idx = 0; idx < tile.stride; idx += VEC_LANES) {
                    vec_store(sums + (int64_t)(head + row) * tile.stride + idx,
                              vec_load(tile.sums + (int64_t)row * tile.stride + idx));
                }
            }
        }
    }
}

static void attention_merge_run(const struct attention_params *params,
                                const struct attention_parts *parts, const struct cpu_work *work,
                                int64_t begin, int64_t end)
{
    int32_t head_dim = params->kv.head_dim;
    int32_t stride = (head_dim + LINE_FLOATS - 1) / LINE_FLOATS * LINE_FLOATS;
    int32_t group_heads = params->num_heads / params->kv.num_kv_heads;
    float *folded_sums = (float *)(void *)work->scratch;
    for (int64_t item = begin; item < end; item++) {
        int64_t token = item / params->num_heads, head = item % params->num_heads;
        int64_t kv_head = head / group_heads, row = head % group_heads;
        struct attention_row folded;
        clear_folded(&folded, folded_sums, stride);
        for (int32_t split = 0; split < parts->max_splits; split++) {
            int64_t part = (token * params->kv.num_kv_heads + kv_head) * parts->max_splits + split;
            struct attention_span span = attention_parts_span(parts, params, part);
            if (span.begin < span.end) {
                fold_row(&folded, folded_sums, attention_parts_rows(parts, part)[row],
                         attention_parts_sums(parts, part) + row * stride, head_dim);
            }
        }
        write_row(folded.total, folded_sums, params->d + item * head_dim, head_dim);
    }
}

#endif
