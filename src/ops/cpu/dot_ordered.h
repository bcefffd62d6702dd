/* SPDX-License-Identifier: Apache-2.0 */
/* Few rows of activations, weights in the order of their addresses: the columns of a unit lie
 * beside each other, and while one unit is computed, the next one comes into L1, or L2 where rows
 * are long, line by line: one stream for each thread.
 *
 *     unit 0: columns 0 .. 7, all of k  ->  sums      prefetched meanwhile: columns 8 .. 15
 *
 * One or two rows of activations meet two blocks of k at once: a core that reads more than some 8
 * bytes a cycle would otherwise wait for its multiply-adds, of which each needs the one before it.
 *
 * For vectors of any width: included behind vec_generic_avx2.h or vec_generic_avx512.h by a file
 * that defines ORDERED_SHAPES(X), X(num_rows, num_blocks) for the tiles there are and the blocks
 * that they take at once, and ORDERED_TILE_ROWS, the most rows of one. */
#ifndef IMBREX_OPS_CPU_DOT_ORDERED_H
#define IMBREX_OPS_CPU_DOT_ORDERED_H

#if defined(__x86_64__)

#include "ops/cpu/dot_ahead.h"
#include "ops/cpu/dot_few_tile.h"

#define UNIT_COLS VEC_LANES
#define UNIT_BASES ((UNIT_COLS + 2) / 3)
#define MAX_BLOCKS 2 /* of k, at once */
/* Of each row, before the first unit, for which nobody has asked. */
#define ORDERED_FIRST_BYTES 256

/* Units beside each other against a tile of rows of activations. */
struct ordered_tile {
    const unsigned char *a; /* [num_rows], a_stride_bytes apart */
    int64_t a_stride_bytes;
    const unsigned char *weights; /* [num_units * UNIT_COLS], row_bytes apart */
    int64_t row_bytes;
    int64_t num_elements, block_k, num_units;
    float *sums; /* [num_rows], SEGMENT_STRIDE apart; of each unit its columns */
    struct segment_ahead ahead;
};

/* Addresses as they move along a block of k: of every third row of weights, so that those between
 * need no register. */
struct unit_walk {
    const unsigned char *bases[UNIT_BASES];
    struct few_walk a;
};

VEC_INLINE struct unit_walk unit_walk_of(const struct ordered_tile *tile,
                                         const unsigned char *weights, int64_t k, int element_bytes)
{
    struct unit_walk walk = {
        .a = few_walk_of(tile->a + k * (int64_t)sizeof(float), tile->a_stride_bytes)};
    VEC_UNROLL
    for (int idx = 0; idx < UNIT_BASES; idx++) {
        walk.bases[idx] = weights + 3 * idx * tile->row_bytes + k * element_bytes;
    }
    return walk;
}

VEC_INLINE void unit_advance(struct unit_walk *walk, int64_t num_bytes)
{
    VEC_UNROLL
    for (int idx = 0; idx < UNIT_BASES; idx++) {
        walk->bases[idx] += num_bytes;
        /* gcc 12 otherwise derives an address for each row, and spills. */
        __asm__("" : "+r"(walk->bases[idx]));
    }
    few_advance(&walk->a);
}

/* Eight elements of each of num_blocks blocks, num_steps times; sums [num_blocks, num_rows], of
 * each its chains. */
VEC_INLINE void ordered_steps(enum dtype dtype, int64_t row_bytes, struct unit_walk *walks,
                              struct unit_ahead *ahead, int num_rows, int num_blocks,
                              int64_t num_steps, vec *sums)
{
    const int step_bytes = TURN_ELEMENTS * (dtype == DTYPE_F32 ? 4 : 2);
    const int unit_lines = UNIT_COLS * step_bytes / LINE_BYTES;
    for (; num_steps > 0; num_steps--) {
        prefetch_lines(ahead, num_blocks * unit_lines);
        VEC_UNROLL
        for (int block = 0; block < num_blocks; block++) {
            const unsigned char *rows[UNIT_COLS];
            VEC_UNROLL
            for (int row = 0; row < UNIT_COLS; row++) {
                rows[row] = walks[block].bases[row / 3] + row % 3 * row_bytes;
            }
            few_step(dtype, &walks[block].a, rows, num_rows, 0, false, 0,
                     sums + block * num_rows * NUM_CHAINS);
            unit_advance(&walks[block], step_bytes);
        }
    }
}

/* The last elements of the rows, fewer than a step. */
VEC_INLINE void ordered_rest(enum dtype dtype, int64_t row_bytes, const struct unit_walk *walk,
                             int num_rows, int64_t num_left, vec *sums)
{
    struct rest rest;
    const unsigned char *rows[UNIT_COLS];
    for (int row = 0; row < UNIT_COLS; row++) {
        rows[row] = walk->bases[0] + row * row_bytes;
    }
    struct group copied =
        copy_rest(rows, UNIT_COLS, 0, num_left * (dtype == DTYPE_F32 ? 4 : 2), &rest);
    few_step(dtype, &walk->a, copied.rows, num_rows, 0, true, num_left, sums);
}

/* Adds the sums of a block to what those before it gave. */
VEC_INLINE void add_block(const vec *sums, int num_rows, bool is_first, vec *totals)
{
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        vec even = sums[row * NUM_CHAINS];
        even = is_first ? even : vec_add(totals[row], even);
        totals[row] = vec_add(even, sums[row * NUM_CHAINS + 1]);
    }
}

VEC_INLINE void compute_unit(enum dtype dtype, const struct ordered_tile *tile,
                             const unsigned char *weights, float *to, int num_rows, int num_blocks)
{
    const int element_bytes = dtype == DTYPE_F32 ? 4 : 2;
    const int64_t row_bytes = tile->row_bytes;
    struct unit_ahead ahead = unit_ahead_of(&tile->ahead, weights);
    vec totals[ORDERED_TILE_ROWS];
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        totals[row] = vec_zero();
    }
    for (int64_t k = 0; k < tile->num_elements; k += num_blocks * tile->block_k) {
        struct unit_walk walks[MAX_BLOCKS];
        vec sums[MAX_BLOCKS * ORDERED_TILE_ROWS * NUM_CHAINS];
        int64_t num_left[MAX_BLOCKS], num_steps = INT64_MAX; /* of all blocks */
        VEC_UNROLL
        for (int block = 0; block < num_blocks; block++) {
            int64_t begin = min_of(k + block * tile->block_k, tile->num_elements);
            walks[block] = unit_walk_of(tile, weights, begin, element_bytes);
            num_left[block] = min_of(tile->block_k, tile->num_elements - begin);
            num_steps = min_of(num_steps, num_left[block] / TURN_ELEMENTS);
        }
        VEC_UNROLL
        for (int idx = 0; idx < num_blocks * num_rows * NUM_CHAINS; idx++) {
            sums[idx] = vec_zero();
        }
        ordered_steps(dtype, row_bytes, walks, &ahead, num_rows, num_blocks, num_steps, sums);
        VEC_UNROLL
        for (int block = 0; block < num_blocks; block++) {
            vec *block_sums = sums + block * num_rows * NUM_CHAINS;
            int64_t count = num_left[block] - num_steps * TURN_ELEMENTS;
            if (num_left[block] == 0) {
                break;
            }
            if (num_blocks > 1) {
                ordered_steps(dtype, row_bytes, &walks[block], &ahead, num_rows, 1,
                              count / TURN_ELEMENTS, block_sums);
            }
            if (count % TURN_ELEMENTS > 0) {
                ordered_rest(dtype, row_bytes, &walks[block], num_rows, count % TURN_ELEMENTS,
                             block_sums);
            }
            add_block(block_sums, num_rows, k + block == 0, totals);
        }
    }
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        vec_store(to + row * SEGMENT_STRIDE, totals[row]);
    }
}

/* All in one call: what a call costs would be a tenth of the time of a block. */
VEC_INLINE void ordered_compute(enum dtype dtype, const struct ordered_tile *tile, int num_rows,
                                int num_blocks)
{
    const unsigned char *weights = tile->weights;
    for (int64_t unit = 0; unit < tile->num_units; unit++) {
        compute_unit(dtype, tile, weights, tile->sums + unit * UNIT_COLS, num_rows, num_blocks);
        weights += UNIT_COLS * tile->row_bytes;
    }
}

typedef void ordered_fn(const struct ordered_tile *tile);
#define DEFINE_ORDERED_OF(dtype, num_rows, num_blocks)                        \
    static void ordered_##dtype##_##num_rows(const struct ordered_tile *tile) \
    {                                                                         \
        ordered_compute(DTYPE_##dtype, tile, num_rows, num_blocks);           \
    }
#define DEFINE_ORDERED(num_rows, num_blocks)      \
    DEFINE_ORDERED_OF(BF16, num_rows, num_blocks) \
    DEFINE_ORDERED_OF(F16, num_rows, num_blocks)  \
    DEFINE_ORDERED_OF(F32, num_rows, num_blocks)
ORDERED_SHAPES(DEFINE_ORDERED)

#define ORDERED_ENTRIES(num_rows, num_blocks)         \
    [DTYPE_BF16][num_rows] = ordered_BF16_##num_rows, \
    [DTYPE_F16][num_rows] = ordered_F16_##num_rows,   \
    [DTYPE_F32][num_rows] = ordered_F32_##num_rows,
static ordered_fn *const ordered_fns[DTYPE_NUM_PLAIN][ORDERED_TILE_ROWS + 1] = {
    ORDERED_SHAPES(ORDERED_ENTRIES)};

/* Units against all rows: all of them in one tile, or each in two. */
static void ordered_units(const struct dot_job *job, struct ordered_tile *tile, float *sums)
{
    const int64_t num_units = tile->num_units;
    if (job->num_tokens <= ORDERED_TILE_ROWS) {
        tile->a = job->a;
        tile->sums = sums;
        ordered_fns[job->dtype][job->num_tokens](tile);
        return;
    }
    const int32_t tile_rows = (job->num_tokens + 1) / 2;
    tile->num_units = 1;
    for (int64_t unit = 0; unit < num_units; unit++) {
        for (int32_t token = 0; token < job->num_tokens; token += tile_rows) {
            tile->a = (const unsigned char *)job->a + token * job->a_stride_bytes;
            tile->sums = sums + (int64_t)token * SEGMENT_STRIDE + unit * UNIT_COLS;
            ordered_fns[job->dtype][min_of(tile_rows, job->num_tokens - token)](tile);
        }
        tile->weights += UNIT_COLS * tile->row_bytes;
    }
}

/* sums [num_tokens, SEGMENT_STRIDE] */
static void ordered_segment(const struct dot_job *job, const struct segment *segment, float *sums)
{
    const int64_t row_bytes = job->num_elements * element_bytes_of(job);
    const int64_t num_cols = segment->end - segment->begin;
    struct ordered_tile tile = {.a_stride_bytes = job->a_stride_bytes,
                                .weights =
                                    job->weights[segment->matrix] + segment->begin * row_bytes,
                                .row_bytes = row_bytes,
                                .num_elements = job->num_elements,
                                .block_k = block_k_of(job),
                                .num_units = num_cols / UNIT_COLS,
                                .ahead = segment_ahead_of(job, segment, UNIT_COLS)};
    ordered_units(job, &tile, sums);
    if (num_cols % UNIT_COLS != 0) {
        /* The last unit begins within the one before it. */
        tile.weights = job->weights[segment->matrix] + (segment->end - UNIT_COLS) * row_bytes;
        tile.num_units = 1;
        ordered_units(job, &tile, sums + (num_cols - UNIT_COLS));
    }
}

static void ordered_prefetch_first(const struct dot_job *job, int64_t begin, int64_t end)
{
    const unsigned char *rows[UNIT_COLS];
    const int64_t row_bytes = job->num_elements * element_bytes_of(job);
    rows_at(job, 0, begin, end, 0, UNIT_COLS, rows);
    for (int64_t at = 0; at < min_of(ORDERED_FIRST_BYTES, row_bytes); at += LINE_BYTES) {
        prefetch_rows(rows, UNIT_COLS, at);
    }
}

VEC_INLINE void ordered_walk(const struct dot_job *job, unsigned char *scratch, int64_t begin,
                             int64_t end)
{
    float *sums[2] = {(float *)(void *)scratch,
                      (float *)(void *)scratch + FEW_MAX_ROWS * SEGMENT_STRIDE};
    ordered_prefetch_first(job, begin, end);
    for (int64_t col = begin, segment_end; col < end; col = segment_end) {
        segment_end = segment_end_of(col, end, UNIT_COLS);
        struct dot_sums stored = {.at = {sums[0], sums[1]},
                                  .stride = SEGMENT_STRIDE,
                                  .first_col = col,
                                  .num_rows = job->num_tokens,
                                  .num_cols = (int32_t)(segment_end - col)};
        for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
            struct segment segment = segment_of(job, matrix, col, segment_end);
            ordered_segment(job, &segment, sums[matrix]);
        }
        job->store(job->params, &stored);
    }
}

#endif
#endif
