/* SPDX-License-Identifier: Apache-2.0 */
/* What attention_tile.h does with strips of six rows of a tile: scores, weights and sums of a chunk
 * of keys. Part of that file, for vectors of any width. Turned keys and values together are too
 * much for the first-level cache: all strips come to their weights before the first meets values.
 */
#ifndef IMBREX_OPS_CPU_ATTENTION_STRIP_H
#define IMBREX_OPS_CPU_ATTENTION_STRIP_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ops/cpu/attention_split.h"

#define CHUNK_KEYS 64
#define CHUNK_VECS (CHUNK_KEYS / VEC_LANES)
#define STRIP_ROWS 6 /* with STRIP_VECS: sums that are registers */
#define STRIP_MAXIMA 8
#define FETCH_STEPS 4 /* of the loops of a strip, between prefetches */
/* Inlined into one function, the loops of a strip have too few registers for their addresses. */
#define LOOP_OF_ITS_OWN static __attribute__((noinline))
#define LINE_FLOATS 16
#define LINE_BYTES 64

/* The keys of a chunk that some row of the tile may see: [begin, end) of its 64. */
struct key_chunk {
    int64_t first; /* position */
    int32_t begin, end;
    /* Elements, and scales where there are some, of [begin, end). */
    const unsigned char *keys[CHUNK_KEYS], *values[CHUNK_KEYS];
    const uint16_t *key_scales[CHUNK_KEYS], *value_scales[CHUNK_KEYS];
};

struct attention_tile {
    const struct attention_params *params;
    const int32_t *block_table;
    int64_t token; /* the first of num_tokens */
    int32_t num_tokens, num_heads, num_rows;
    int32_t kv_head, head; /* of num_heads query heads the first */
    int32_t head_dim;
    int32_t stride; /* of sums: head_dim rounded up to whole lines */
    int32_t max_rows;
    int64_t keys_begin, keys_end; /* positions that some row sees */
    /* In scratch memory. Rows are [token][head]. */
    float *widened; /* [CHUNK_KEYS][head_dim]; NULL: the cache is fp32 */
    float *keys;    /* [head_dim][CHUNK_KEYS] */
    float *q;       /* times scale; strip by strip [head_dim][rows of the strip] */
    float *weights; /* [num_rows][CHUNK_KEYS]; scores at first */
    float *sums;    /* [num_rows][stride] of weight * value, since the last fold */
    float *totals;  /* [num_rows][VEC_LANES] of weights, since the last fold */
    /* [num_rows], and a vector behind them. */
    float *largest; /* score since the last fold */
    float *factors; /* of the sums of earlier chunks, due before values of this one are added */
    struct attention_row *folded; /* [num_rows] */
    float *folded_sums;           /* [num_rows][stride] */
};

/* Lines of the next chunk's keys or values that are still to be asked for. A few are at each step
 * of the loops over this chunk: all at once would fill the queue of misses, and loads behind it
 * wait. */
struct fetch {
    const unsigned char *at, *row_end;
    const unsigned char *const *next_row, *const *end;
    int32_t row_bytes, step_lines; /* 0: all have been asked for */
};

static struct fetch fetch_rows(const unsigned char *const *rows, const struct key_chunk *chunk,
                               const struct kv_view *kv, int64_t num_steps)
{
    if (chunk->begin >= chunk->end) {
        return (struct fetch){.step_lines = 0};
    }
    int32_t row_bytes = kv->head_dim * (int32_t)kv_dtype_element_bytes(kv->dtype);
    int64_t row_lines = (row_bytes + LINE_BYTES - 1) / LINE_BYTES;
    int64_t num_lines = (chunk->end - chunk->begin) * row_lines;
    return (struct fetch){.at = rows[chunk->begin],
                          .row_end = rows[chunk->begin] + row_bytes,
                          .next_row = rows + chunk->begin + 1,
                          .end = rows + chunk->end,
                          .row_bytes = row_bytes,
                          .step_lines = (int32_t)((num_lines + num_steps) / (num_steps + 1))};
}

VEC_INLINE void fetch_some(struct fetch *fetch)
{
    for (int32_t line = 0; line < fetch->step_lines; line++) {
        /* Into the second level: there the queue is longer. */
        __builtin_prefetch(fetch->at, 0, 2);
        fetch->at += LINE_BYTES;
        if (fetch->at >= fetch->row_end) {
            if (fetch->next_row == fetch->end) {
                fetch->step_lines = 0;
                return;
            }
            fetch->at = *fetch->next_row++;
            fetch->row_end = fetch->at + fetch->row_bytes;
        }
    }
}

/* The part of a chunk's keys that a row sees. */
struct key_range {
    int32_t begin, end;
};

/* Rows [row, row + num_rows) of a tile in a chunk: what they see of it, where not all see it whole.
 * Neither begins nor ends descend. */
struct strip {
    int32_t row, num_rows;
    bool is_whole;
    struct key_range ranges[STRIP_ROWS];
};

/* Six rows, or fewer and then about as many as in the strip behind it. */
static int32_t strip_rows(int32_t num_left)
{
    return num_left <= STRIP_ROWS      ? num_left
           : num_left < 2 * STRIP_ROWS ? (num_left + 1) / 2
                                       : STRIP_ROWS;
}

static void strip_set(struct strip *strip, const struct attention_tile *tile,
                      const struct key_chunk *chunk, int32_t row, bool is_whole)
{
    strip->row = row;
    strip->num_rows = strip_rows(tile->num_rows - row);
    strip->is_whole = is_whole;
    for (int32_t idx = 0; idx < strip->num_rows && !is_whole; idx++) {
        int64_t token = tile->token + (row + idx) / tile->num_heads;
        int64_t begin = attention_first_key(tile->params, token) - chunk->first;
        int64_t end = (int64_t)tile->params->positions[token] + 1 - chunk->first;
        begin = begin < 0 ? 0 : begin < CHUNK_KEYS ? begin : CHUNK_KEYS;
        end = end < 0 ? 0 : end < CHUNK_KEYS ? end : CHUNK_KEYS;
        strip->ranges[idx] = (struct key_range){(int32_t)begin, (int32_t)end};
    }
}

/* exp(x) for x <= 0, with a relative error of at most 0.75 * 2^-23 from -8 on and 2.6 * 2^-23 from
 * -87 on (measured over every third float); 0 below, so that no result is subnormal: Intel's
 * processors take a hundred cycles for those. NaN for NaN.
 *
 * x = n ln 2 + r as in vec_exp() of vec_avx2.h, whose polynomial this is. */
VEC_INLINE vec exp_negative(vec x)
{
    /* The sum has n in its lowest bits. */
    const vec shift = vec_set(0x1.8p23f), one = vec_set(1.0f);
    vec shifted = vec_muladd(x, vec_set(0x1.715476p+0f), shift);
    vec n = vec_sub(shifted, shift);
    vec r = vec_muladd(n, vec_set(-0x1.62e43p-1f), x);
    vec p = vec_muladd(vec_set(0x1.4f2a52p-10f), r, vec_set(0x1.120b62p-7f));
    p = vec_muladd(p, r, vec_set(0x1.557904p-5f));
    p = vec_muladd(p, r, vec_set(0x1.5554dep-3f));
    p = vec_muladd(p, r, vec_set(0x1.ffffdep-2f));
    p = vec_muladd(p, r, one);
    return vec_scale(vec_muladd(p, r, one), n, shifted, vec_at_least(x, -87.0f));
}

/* What num_dims dimensions add to the scores of a strip. */
VEC_INLINE void score_dims(const float *q, const float *keys, int num_dims, int num_rows,
                           int num_vecs, vec (*sums)[STRIP_VECS])
{
    VEC_UNROLL
    for (int dim = 0; dim < num_dims; dim++) {
        vec key[STRIP_VECS];
        VEC_UNROLL
        for (int idx = 0; idx < num_vecs; idx++) {
            key[idx] = vec_load_here(keys + dim * CHUNK_KEYS + idx * VEC_LANES);
        }
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            vec query = vec_broadcast_here(q + dim * num_rows + row);
            VEC_UNROLL
            for (int idx = 0; idx < num_vecs; idx++) {
                sums[row][idx] = vec_add_product(sums[row][idx], query, key[idx]);
            }
        }
    }
}

/* Scores of a strip against num_vecs vectors of turned keys. */
VEC_INLINE void score_strip(const float *q, const float *keys, float *scores, int32_t head_dim,
                            struct fetch *fetch, int num_rows, int num_vecs)
{
    vec sums[STRIP_ROWS][STRIP_VECS];
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        VEC_UNROLL
        for (int idx = 0; idx < num_vecs; idx++) {
            sums[row][idx] = vec_zero();
        }
    }
    int32_t num_left = head_dim;
    for (; num_left >= FETCH_STEPS; num_left -= FETCH_STEPS) {
        fetch_some(fetch);
        score_dims(q, keys, FETCH_STEPS, num_rows, num_vecs, sums);
        keys += FETCH_STEPS * CHUNK_KEYS;
        q += FETCH_STEPS * num_rows;
    }
    for (; num_left > 0; num_left--) {
        score_dims(q, keys, 1, num_rows, num_vecs, sums);
        keys += CHUNK_KEYS;
        q += num_rows;
    }
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        VEC_UNROLL
        for (int idx = 0; idx < num_vecs; idx++) {
            vec_store(scores + row * CHUNK_KEYS + idx * VEC_LANES, sums[row][idx]);
        }
    }
}

/* The vectors of keys [first_vec, end_vec). */
VEC_INLINE void score_strip_vecs(const float *q, const float *keys, float *scores, int32_t head_dim,
                                 struct fetch *fetch, int num_rows, int32_t first_vec,
                                 int32_t end_vec)
{
    int32_t idx = first_vec;
    for (; idx + STRIP_VECS <= end_vec; idx += STRIP_VECS) {
        score_strip(q, keys + idx * VEC_LANES, scores + idx * VEC_LANES, head_dim, fetch, num_rows,
                    STRIP_VECS);
    }
    for (; idx < end_vec; idx++) {
        score_strip(q, keys + idx * VEC_LANES, scores + idx * VEC_LANES, head_dim, fetch, num_rows,
                    1);
    }
}

LOOP_OF_ITS_OWN void score_rows(const struct attention_tile *tile, const struct strip *strip,
                                int32_t first_vec, int32_t end_vec, struct fetch *fetch)
{
    const float *q = tile->q + (int64_t)strip->row * tile->head_dim, *keys = tile->keys;
    float *scores = tile->weights + (int64_t)strip->row * CHUNK_KEYS;
    int32_t head_dim = tile->head_dim;
    switch (strip->num_rows) {
    case 1:
        score_strip_vecs(q, keys, scores, head_dim, fetch, 1, first_vec, end_vec);
        break;
    case 2:
        score_strip_vecs(q, keys, scores, head_dim, fetch, 2, first_vec, end_vec);
        break;
    case 3:
        score_strip_vecs(q, keys, scores, head_dim, fetch, 3, first_vec, end_vec);
        break;
    case 4:
        score_strip_vecs(q, keys, scores, head_dim, fetch, 4, first_vec, end_vec);
        break;
    case 5:
        score_strip_vecs(q, keys, scores, head_dim, fetch, 5, first_vec, end_vec);
        break;
    default:
        score_strip_vecs(q, keys, scores, head_dim, fetch, STRIP_ROWS, first_vec, end_vec);
        break;
    }
}

/* The keys of the vectors in which a row sees some. */
VEC_INLINE struct key_range vecs_of_range(struct key_range range)
{
    return (struct key_range){range.begin / VEC_LANES * VEC_LANES, range.end};
}

/* The largest of a row's scores, lane by lane; scores of keys that it does not see become -inf. */
VEC_INLINE vec row_maxima(float *scores, struct key_range range, bool is_whole)
{
    vec largest = vec_set(-INFINITY);
    if (is_whole) {
        VEC_UNROLL
        for (int idx = 0; idx < CHUNK_VECS; idx++) {
            largest = vec_larger(vec_load(scores + idx * VEC_LANES), largest);
        }
        return largest;
    }
    struct key_range vecs = vecs_of_range(range);
    for (int32_t key = vecs.begin; key < vecs.end; key += VEC_LANES) {
        vec some = vec_load(scores + key);
        some = vec_keep_lanes(some, range.begin - key, range.end - key);
        vec_store(scores + key, some);
        largest = vec_larger(some, largest);
    }
    return largest;
}

/* What weights are relative to. While every score is -inf, they are zero, and their total of zero
 * makes the result NaN if it stays so. */
VEC_INLINE vec weight_base(vec largest)
{
    return vec_larger(vec_set(-FLT_MAX), largest);
}

/* The largest scores of a strip rise to those of a chunk. What was added so far becomes due for a
 * factor, also where that is 1: whether a largest score rises is nothing that a processor could
 * foresee. */
LOOP_OF_ITS_OWN void raise_strip(const struct attention_tile *tile, const struct strip *strip)
{
    float *scores = tile->weights + (int64_t)strip->row * CHUNK_KEYS;
    vec maxima[STRIP_MAXIMA];
    for (int32_t row = 0; row < STRIP_MAXIMA; row++) {
        maxima[row] = row >= strip->num_rows ? vec_set(-INFINITY)
                      : strip->is_whole
                          ? row_maxima(scores + row * CHUNK_KEYS, strip->ranges[row], true)
                          : row_maxima(scores + row * CHUNK_KEYS, strip->ranges[row], false);
    }
    /* Lanes that are no rows of the strip stay what they are. */
    vec before = vec_load(tile->largest + strip->row);
    vec largest = vec_larger(vec_maxima(maxima), before);
    vec_store(tile->largest + strip->row, largest);
    vec_store(tile->factors + strip->row, exp_negative(vec_sub(before, weight_base(largest))));
}

/* Scores of a strip become weights, NaN where a score is. */
VEC_INLINE void weigh_rows(const struct attention_tile *tile, const struct strip *strip,
                           bool is_whole)
{
    float *weights = tile->weights + (int64_t)strip->row * CHUNK_KEYS;
    for (int32_t idx = 0; idx < strip->num_rows; idx++) {
        int32_t row = strip->row + idx;
        float *totals = tile->totals + (int64_t)row * VEC_LANES;
        vec base = weight_base(vec_set(tile->largest[row]));
        vec total = vec_mul(vec_load(totals), vec_set(tile->factors[row]));
        struct key_range vecs = {0, CHUNK_KEYS};
        if (!is_whole) {
            vecs = vecs_of_range(strip->ranges[idx]);
        }
        for (int32_t key = vecs.begin; key < vecs.end; key += VEC_LANES) {
            vec weight = exp_negative(vec_sub(vec_load(weights + key), base));
            vec_store(weights + key, weight);
            total = vec_add(total, weight);
        }
        vec_store(totals, total);
        weights += CHUNK_KEYS;
    }
}

LOOP_OF_ITS_OWN void weigh_strip(const struct attention_tile *tile, const struct strip *strip)
{
    if (strip->is_whole) {
        weigh_rows(tile, strip, true);
    } else {
        weigh_rows(tile, strip, false);
    }
}

/* Adds weight * value of num_keys keys to num_vecs vectors of sums in registers, of which num_lanes
 * lanes exist in the last. */
VEC_INLINE void add_values(const float *weights, const unsigned char *const *values, int32_t dim,
                           int num_keys, int num_rows, int num_vecs, int32_t num_lanes,
                           vec (*parts)[STRIP_VECS])
{
    VEC_UNROLL
    for (int key = 0; key < num_keys; key++) {
        const float *value = (const float *)(const void *)values[key] + dim;
        vec part[STRIP_VECS];
        VEC_UNROLL
        for (int idx = 0; idx < num_vecs; idx++) {
            part[idx] = num_lanes == VEC_LANES ? vec_load_here(value + idx * VEC_LANES)
                                               : vec_keep(vec_load_low(value, num_lanes));
        }
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            vec weight = vec_broadcast_here(weights + row * CHUNK_KEYS + key);
            VEC_UNROLL
            for (int idx = 0; idx < num_vecs; idx++) {
                parts[row][idx] = vec_add_product(parts[row][idx], weight, part[idx]);
            }
        }
    }
}

/* Scales num_vecs vectors of the sums of a strip, of which num_lanes lanes exist in the last, and
 * adds weight * value of keys [begin, end). */
VEC_INLINE void add_strip(float *sums, const float *factors, const float *weights,
                          const unsigned char *const *values, int32_t dim, int64_t stride,
                          struct key_range range, struct fetch *fetch, int num_rows, int num_vecs,
                          int32_t num_lanes)
{
    vec parts[STRIP_ROWS][STRIP_VECS];
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        vec factor = vec_set(factors[row]);
        VEC_UNROLL
        for (int idx = 0; idx < num_vecs; idx++) {
            parts[row][idx] =
                vec_mul(vec_load(sums + row * stride + dim + idx * VEC_LANES), factor);
        }
    }
    int32_t key = range.begin;
    for (; key + FETCH_STEPS <= range.end; key += FETCH_STEPS) {
        fetch_some(fetch);
        add_values(weights + key, values + key, dim, FETCH_STEPS, num_rows, num_vecs, num_lanes,
                   parts);
    }
    for (; key < range.end; key++) {
        add_values(weights + key, values + key, dim, 1, num_rows, num_vecs, num_lanes, parts);
    }
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        VEC_UNROLL
        for (int idx = 0; idx < num_vecs; idx++) {
            vec_store(sums + row * stride + dim + idx * VEC_LANES, parts[row][idx]);
        }
    }
}

VEC_INLINE void add_strip_dims(const struct attention_tile *tile,
                               const unsigned char *const *values, int32_t row,
                               struct key_range range, struct fetch *fetch, int num_rows)
{
    int32_t stride = tile->stride, head_dim = tile->head_dim, dim = 0;
    float *sums = tile->sums + (int64_t)row * stride;
    const float *factors = tile->factors + row;
    const float *weights = tile->weights + (int64_t)row * CHUNK_KEYS;
    for (; dim + STRIP_VECS * VEC_LANES <= head_dim; dim += STRIP_VECS * VEC_LANES) {
        add_strip(sums, factors, weights, values, dim, stride, range, fetch, num_rows, STRIP_VECS,
                  VEC_LANES);
    }
    for (; dim + VEC_LANES <= head_dim; dim += VEC_LANES) {
        add_strip(sums, factors, weights, values, dim, stride, range, fetch, num_rows, 1,
                  VEC_LANES);
    }
    if (dim < head_dim) {
        add_strip(sums, factors, weights, values, dim, stride, range, fetch, num_rows, 1,
                  head_dim - dim);
    }
}

LOOP_OF_ITS_OWN void add_rows(const struct attention_tile *tile, const unsigned char *const *values,
                              int32_t row, int32_t num_rows, struct key_range range,
                              struct fetch *fetch)
{
    switch (num_rows) {
    case 1:
        add_strip_dims(tile, values, row, range, fetch, 1);
        break;
    case 2:
        add_strip_dims(tile, values, row, range, fetch, 2);
        break;
    case 3:
        add_strip_dims(tile, values, row, range, fetch, 3);
        break;
    case 4:
        add_strip_dims(tile, values, row, range, fetch, 4);
        break;
    case 5:
        add_strip_dims(tile, values, row, range, fetch, 5);
        break;
    default:
        add_strip_dims(tile, values, row, range, fetch, STRIP_ROWS);
        break;
    }
}

/* Scales the sums of rows, which are then no longer due for it. */
static void scale_rows(const struct attention_tile *tile, int32_t first_row, int32_t num_rows)
{
    for (int32_t row = first_row; row < first_row + num_rows; row++) {
        float *sums = tile->sums + (int64_t)row * tile->stride;
        vec factor = vec_set(tile->factors[row]);
        for (int32_t idx = 0; idx < tile->head_dim; idx += VEC_LANES) {
            vec_store(sums + idx, vec_mul(vec_load(sums + idx), factor));
        }
        tile->factors[row] = 1.0f;
    }
}

/* The same for rows that see different keys. Begins and ends of what they see ascend with the rows:
 * from one edge to the next, keys are added to the rows that see them, which lie together. */
static void add_ragged_rows(const struct attention_tile *tile, const unsigned char *const *values,
                            const struct strip *strip, struct fetch *fetch)
{
    const struct key_range *ranges = strip->ranges;
    int32_t num_rows = strip->num_rows, key = ranges[0].begin, first = 0, end = 0;
    scale_rows(tile, strip->row, num_rows);
    while (first < num_rows) {
        while (end < num_rows && ranges[end].begin <= key) {
            end++;
        }
        while (first < end && ranges[first].end <= key) {
            first++;
        }
        int32_t edge = end < num_rows ? ranges[end].begin : CHUNK_KEYS;
        if (first < end) {
            edge = ranges[first].end < edge ? ranges[first].end : edge;
            add_rows(tile, values, strip->row + first, end - first, (struct key_range){key, edge},
                     fetch);
        }
        key = edge;
    }
}

#endif
