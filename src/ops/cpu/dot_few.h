/* SPDX-License-Identifier: Apache-2.0 */
/* Few rows: as many columns as there are lanes, a unit, pass by once, turned in registers, and meet
 * all rows of activations; of gemm_swiglu columns of gate, then those of up.
 *
 * Memory decides, and what it gives depends on how it is asked. For vectors of any width: included
 * behind vec_generic_avx2.h or vec_generic_avx512.h by a file that defines
 *   FEW_MAX_ROWS       rows of activations there may be, at most 2 * FEW_TILE_ROWS
 *   FEW_TILE_ROWS      those whose sums fit the registers
 *   FEW_SHAPES(X)      X(num_rows) for the tiles there are
 *   FEW_AHEAD_BYTES    how far ahead weights are prefetched along each row, into L1; 0: into L2, in
 *                      the order of their addresses */
#ifndef IMBREX_OPS_CPU_DOT_FEW_H
#define IMBREX_OPS_CPU_DOT_FEW_H

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/dot_turn.h"

#define UNIT_COLS VEC_LANES
/* Of each matrix in turn, so that memory is read in long runs. */
#define SEGMENT_COLS 128
/* Of rows that are longer, so much of each is ahead of its use. */
#define MAX_RUN_BYTES 2560
#define AHEAD_LINES 4 /* asked for at once: of one row, or of so many rows in runs */
#define NUM_CHAINS 2  /* of even and of odd elements */
/* ---- what comes next ------------------------------------------------------------------------- */

/* Weights on their way into L2 while others are at work, in the order of their addresses: all rows
 * of a unit, one after the other; of long rows a run, four rows at a time, a line of each in
 * turn. */
struct ahead {
    const struct dot_job *job;
    int64_t row_bytes, run_bytes;
    int64_t end; /* of the columns */
    /* The segment, the unit in it, the place in its rows, and the first of four long ones. */
    int32_t matrix;
    int64_t segment_col, segment_end, col, run_at, row;
    /* What is left of it. */
    uintptr_t at;
    int64_t line_stride, advance, num_left;
};

static struct ahead ahead_of(const struct dot_job *job, int64_t end)
{
    int64_t row_bytes = job->num_elements * element_bytes_of(job);
    int64_t run_bytes = divide_up(row_bytes, divide_up(row_bytes, MAX_RUN_BYTES));
    return (struct ahead){.job = job,
                          .row_bytes = row_bytes,
                          .run_bytes =
                              run_bytes < row_bytes ? round_up(run_bytes, LINE_BYTES) : row_bytes,
                          .end = end};
}

static bool is_long(const struct ahead *ahead)
{
    return ahead->run_bytes < ahead->row_bytes;
}

static int64_t rows_of_unit(const struct ahead *ahead)
{
    return min_of(UNIT_COLS, ahead->segment_end - ahead->col);
}

static void begin_run(struct ahead *ahead)
{
    int64_t num_rows = rows_of_unit(ahead);
    int64_t offset = (ahead->col + ahead->row) * ahead->row_bytes + ahead->run_at;
    ahead->at = (uintptr_t)ahead->job->weights[ahead->matrix] + (uintptr_t)offset;
    if (is_long(ahead)) {
        int64_t num_bytes = min_of(ahead->run_bytes, ahead->row_bytes - ahead->run_at);
        /* At the end fewer than four rows: one. */
        ahead->line_stride = ahead->row + AHEAD_LINES <= num_rows ? ahead->row_bytes : 0;
        ahead->advance = LINE_BYTES;
        ahead->num_left = divide_up(num_bytes, LINE_BYTES);
    } else {
        ahead->line_stride = LINE_BYTES;
        ahead->advance = AHEAD_LINES * LINE_BYTES;
        ahead->num_left = divide_up(num_rows * ahead->row_bytes, ahead->advance);
    }
}

/* Columns of the next matrix, or those that follow of the first one; false: there are none. */
static bool next_segment(struct ahead *ahead)
{
    if (++ahead->matrix == ahead->job->num_matrices) {
        ahead->matrix = 0;
        ahead->segment_col = ahead->segment_end;
        ahead->segment_end = min_of(ahead->segment_col + SEGMENT_COLS, ahead->end);
    }
    ahead->col = ahead->segment_col;
    return ahead->segment_col < ahead->end;
}

/* The run behind one of all rows of a unit. */
static void next_runs(struct ahead *ahead)
{
    ahead->row = 0;
    ahead->run_at += ahead->run_bytes;
    if (ahead->run_at >= ahead->row_bytes) {
        ahead->run_at = 0;
        ahead->col += UNIT_COLS;
        if (ahead->col >= ahead->segment_end && !next_segment(ahead)) {
            /* What is there already. */
            ahead->at = (uintptr_t)ahead->job->weights[0];
            ahead->line_stride = ahead->advance = 0;
            ahead->num_left = INT64_MAX;
            return;
        }
    }
    begin_run(ahead);
}

static void next_run(struct ahead *ahead)
{
    ahead->row += AHEAD_LINES;
    if (is_long(ahead) && ahead->row < rows_of_unit(ahead)) {
        begin_run(ahead);
    } else {
        next_runs(ahead);
    }
}

VEC_INLINE void prefetch_ahead(struct ahead *ahead)
{
    VEC_UNROLL
    for (int line = 0; line < AHEAD_LINES; line++) {
        _mm_prefetch((const char *)(ahead->at + (uintptr_t)(line * ahead->line_stride)),
                     _MM_HINT_T1);
    }
    ahead->at += (uintptr_t)ahead->advance;
    if (--ahead->num_left == 0) {
        next_run(ahead);
    }
}

/* ---- a unit ---------------------------------------------------------------------------------- */

/* A unit and a block of k against a tile of rows. */
struct few_tile {
    const unsigned char *a; /* [num_rows], a_stride_bytes apart */
    int64_t a_stride_bytes;
    const unsigned char *rows[UNIT_COLS]; /* of weights */
    int64_t num_elements;
    struct ahead *ahead;
    int64_t ahead_mask; /* something is asked for where these bits of an offset in a row are 0 */
    /* Where the block begins in its rows, and their size. */
    int64_t block_bytes, row_bytes;
    float *sums; /* [num_rows], SEGMENT_COLS apart */
    bool is_resumed;
};

/* What comes next, where a step takes the elements at an offset of its block. */
VEC_INLINE void ask_ahead(const struct few_tile *tile, int64_t offset)
{
    if (FEW_AHEAD_BYTES == 0) {
        if ((offset & tile->ahead_mask) == 0) {
            prefetch_ahead(tile->ahead);
        }
    } else if (offset % LINE_BYTES == 0) {
        int64_t ahead = offset + FEW_AHEAD_BYTES;
        if (tile->block_bytes + ahead >= tile->row_bytes) {
            ahead += (UNIT_COLS - 1) * tile->row_bytes; /* in the rows of the next unit */
        }
        VEC_UNROLL
        for (int row = 0; row < UNIT_COLS; row++) {
            uintptr_t at = (uintptr_t)tile->rows[row] + (uintptr_t)ahead;
            _mm_prefetch((const char *)at, _MM_HINT_T0);
        }
    }
}

/* Eight elements, or the first num_left of them where `is_rest`. */
VEC_INLINE void few_step(enum dtype dtype, const unsigned char *a, int64_t a_stride_bytes,
                         const unsigned char *const *rows, int num_rows, int64_t offset,
                         bool is_rest, int64_t num_left, vec *sums)
{
    const int num_elements = elements_of_word(dtype);
    VEC_UNROLL
    for (int part = 0; part < TURN_ELEMENTS / WORDS / num_elements; part++) {
        vec_words words[WORDS];
        turn_part(dtype, rows, offset, part, words);
        VEC_UNROLL
        for (int element = 0; element < WORDS * num_elements; element++) {
            int k = part * WORDS + element;
            if (is_rest && k >= num_left) {
                break;
            }
            vec weight =
                element_of_word(dtype, words[element / num_elements], element % num_elements);
            VEC_UNROLL
            for (int row = 0; row < num_rows; row++) {
                const unsigned char *from = a + row * a_stride_bytes;
                vec *sum = &sums[row * NUM_CHAINS + k % NUM_CHAINS];
                *sum = vec_add_product(
                    *sum, vec_broadcast_here((const float *)(const void *)from + k), weight);
            }
        }
    }
}

VEC_INLINE void few_compute(enum dtype dtype, const struct few_tile *tile, int num_rows)
{
    const int element_bytes = dtype == DTYPE_F32 ? 4 : 2;
    const int step_bytes = TURN_ELEMENTS * element_bytes;
    const unsigned char *a = tile->a;
    int64_t num_left = tile->num_elements, offset = 0;
    vec sums[FEW_TILE_ROWS * NUM_CHAINS];
    VEC_UNROLL
    for (int idx = 0; idx < num_rows * NUM_CHAINS; idx++) {
        sums[idx] = vec_zero();
    }
    for (; num_left >= TURN_ELEMENTS; num_left -= TURN_ELEMENTS, offset += step_bytes) {
        ask_ahead(tile, offset);
        few_step(dtype, a, tile->a_stride_bytes, tile->rows, num_rows, offset, false, 0, sums);
        a += TURN_ELEMENTS * sizeof(float);
    }
    if (num_left > 0) {
        struct rest rest;
        struct group copied =
            copy_rest(tile->rows, UNIT_COLS, offset, num_left * element_bytes, &rest);
        few_step(dtype, a, tile->a_stride_bytes, copied.rows, num_rows, 0, true, num_left, sums);
    }
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        float *at = tile->sums + row * SEGMENT_COLS;
        vec even = sums[row * NUM_CHAINS], odd = sums[row * NUM_CHAINS + 1];
        even = tile->is_resumed ? vec_add(vec_load(at), even) : even;
        vec_store(at, vec_add(even, odd));
    }
}

#define DEFINE_FEW(num_rows)                                     \
    static void few_BF16_##num_rows(const struct few_tile *tile) \
    {                                                            \
        few_compute(DTYPE_BF16, tile, num_rows);                 \
    }                                                            \
    static void few_F16_##num_rows(const struct few_tile *tile)  \
    {                                                            \
        few_compute(DTYPE_F16, tile, num_rows);                  \
    }                                                            \
    static void few_F32_##num_rows(const struct few_tile *tile)  \
    {                                                            \
        few_compute(DTYPE_F32, tile, num_rows);                  \
    }
FEW_SHAPES(DEFINE_FEW)

typedef void few_fn(const struct few_tile *tile);
#define FEW_ENTRIES(num_rows)                                                                 \
    [DTYPE_BF16][num_rows] = few_BF16_##num_rows, [DTYPE_F16][num_rows] = few_F16_##num_rows, \
    [DTYPE_F32][num_rows] = few_F32_##num_rows,
static few_fn *const few_fns[DTYPE_NUM_PLAIN][FEW_TILE_ROWS + 1] = {FEW_SHAPES(FEW_ENTRIES)};

/* ---- all of them ----------------------------------------------------------------------------- */

/* A block of k of a unit against all rows, in one tile or in two alike. */
static void compute_block(const struct dot_job *job, struct few_tile *tile, int64_t k)
{
    int32_t num_tiles = job->num_tokens > FEW_TILE_ROWS ? 2 : 1;
    int32_t tile_rows = (job->num_tokens + num_tiles - 1) / num_tiles;
    float *sums = tile->sums;
    /* All tiles together ask for as much as they read. */
    tile->ahead_mask = num_tiles * AHEAD_LINES * LINE_BYTES / UNIT_COLS - 1;
    for (int32_t token = 0; token < job->num_tokens; token += tile_rows) {
        int32_t num_rows = (int32_t)min_of(tile_rows, job->num_tokens - token);
        tile->a = (const unsigned char *)job->a + token * job->a_stride_bytes +
                  k * (int64_t)sizeof(float);
        tile->sums = sums + (int64_t)token * SEGMENT_COLS;
        few_fns[job->dtype][num_rows](tile);
    }
    tile->sums = sums;
}

/* Columns [begin, end) of a matrix, a segment. */
static void compute_segment(const struct dot_job *job, int32_t matrix, int64_t begin, int64_t end,
                            struct ahead *ahead, float *sums)
{
    const int64_t block_k = block_k_of(job);
    struct few_tile tile = {
        .a_stride_bytes = job->a_stride_bytes, .ahead = ahead, .row_bytes = ahead->row_bytes};
    for (int64_t col = begin; col < end; col += UNIT_COLS) {
        ahead->matrix = matrix;
        ahead->segment_col = begin;
        ahead->segment_end = end;
        ahead->col = col;
        ahead->run_at = 0;
        if (FEW_AHEAD_BYTES == 0) {
            next_runs(ahead);
        }
        tile.sums = sums + (col - begin);
        for (int64_t k = 0; k < job->num_elements; k += block_k) {
            rows_at(job, matrix, col, end, k, UNIT_COLS, tile.rows);
            tile.num_elements = min_of(block_k, job->num_elements - k);
            tile.is_resumed = k > 0;
            tile.block_bytes = k * element_bytes_of(job);
            compute_block(job, &tile, k);
        }
    }
}

static void few_walk(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    float *sums = (float *)(void *)scratch;
    struct ahead ahead = ahead_of(job, end);
    /* Nobody has asked for the first weights. */
    const unsigned char *first[UNIT_COLS];
    rows_at(job, 0, begin, end, 0, UNIT_COLS, first);
    for (int row = 0; row < UNIT_COLS; row++) {
        for (int64_t at = 0; at < ahead.run_bytes; at += LINE_BYTES) {
            _mm_prefetch((const char *)first[row] + at, _MM_HINT_T1);
        }
    }
    for (int64_t col = begin; col < end; col += SEGMENT_COLS) {
        int64_t segment_end = min_of(col + SEGMENT_COLS, end);
        struct dot_sums stored = {.at = {sums, sums + FEW_MAX_ROWS * SEGMENT_COLS},
                                  .stride = SEGMENT_COLS,
                                  .first_col = col,
                                  .num_rows = job->num_tokens,
                                  .num_cols = (int32_t)(segment_end - col)};
        for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
            compute_segment(job, matrix, col, segment_end, &ahead,
                            sums + matrix * FEW_MAX_ROWS * SEGMENT_COLS);
        }
        job->store(job->params, &stored);
    }
}

#endif
#endif
