/* SPDX-License-Identifier: Apache-2.0 */
/* Few rows: eight columns, a unit, pass by at once, turned in registers, and meet all rows of
 * activations; of gemm_swiglu columns of gate, then those of up.
 *
 * Memory decides, and what it gives depends on how it is asked. The columns of a unit lie as far
 * apart as a segment has units, so that each lane reads on where it was when the next unit begins:
 *
 *     segment:  unit 0   lane 0: col 0   lane 1: col 31   ...   lane 7: col 217
 *               unit 1           col 1           col 32                 col 218
 *                 ...            eight streams, each as long as 31 rows of weights
 *
 * which processors follow by themselves where rows beside each other, shorter than a page, are
 * several streams in one page. What comes is prefetched along each stream, into L1. */
#include "ops/cpu/dot_few.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/vec_generic_avx2.h"

#include "ops/cpu/dot_few_tile.h"

#define UNIT_COLS VEC_LANES
/* Of each matrix in turn. An odd number of units: with 16, rows whose length is a multiple of 256
 * bytes put all streams on the same lines of a page, which have the same place in L1. */
#define SEGMENT_COLS (31 * UNIT_COLS)
#define SUMS_STRIDE 256 /* of a segment, whole vectors of any instruction set */
#define ALONG_BYTES 512 /* of each stream */
/* Of a tile: the sums of more do not fit the registers. */
#define STREAM_TILE_ROWS 4

/* X(num_rows): the tiles there are. */
#define STREAM_SHAPES(X) X(1) X(2) X(3) X(4)

/* A unit and a block of k against a tile of rows. */
struct stream_tile {
    const unsigned char *a; /* [num_rows], a_stride_bytes apart */
    int64_t a_stride_bytes;
    const unsigned char *rows[UNIT_COLS]; /* of weights */
    int64_t num_elements;
    float *sums; /* [num_rows], SUMS_STRIDE apart */
    bool is_resumed;
    /* What is prefetched is that much further from an offset in the block on. */
    int64_t wrap_offset, wrap_bytes;
};

VEC_INLINE void prefetch_beside(const struct stream_tile *tile, int64_t offset)
{
    if (offset % LINE_BYTES == 0) {
        int64_t at = offset + ALONG_BYTES;
        at += offset >= tile->wrap_offset ? tile->wrap_bytes : 0;
        VEC_UNROLL
        for (int row = 0; row < UNIT_COLS; row++) {
            uintptr_t line = (uintptr_t)tile->rows[row] + (uintptr_t)at;
            _mm_prefetch((const char *)line, _MM_HINT_T0);
        }
    }
}

VEC_INLINE void stream_compute(enum dtype dtype, const struct stream_tile *tile, int num_rows)
{
    const int step_bytes = TURN_ELEMENTS * (dtype == DTYPE_F32 ? 4 : 2);
    struct few_walk walk = few_walk_of(tile->a, tile->a_stride_bytes);
    int64_t num_left = tile->num_elements, offset = 0;
    vec sums[STREAM_TILE_ROWS * NUM_CHAINS];
    VEC_UNROLL
    for (int idx = 0; idx < num_rows * NUM_CHAINS; idx++) {
        sums[idx] = vec_zero();
    }
    for (; num_left >= TURN_ELEMENTS; num_left -= TURN_ELEMENTS, offset += step_bytes) {
        prefetch_beside(tile, offset);
        few_step(dtype, &walk, tile->rows, num_rows, offset, false, 0, sums);
        few_advance(&walk);
    }
    if (num_left > 0) {
        struct rest rest;
        struct group copied = copy_rest(tile->rows, UNIT_COLS, offset,
                                        num_left * (dtype == DTYPE_F32 ? 4 : 2), &rest);
        few_step(dtype, &walk, copied.rows, num_rows, 0, true, num_left, sums);
    }
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        float *at = tile->sums + row * SUMS_STRIDE;
        vec even = sums[row * NUM_CHAINS], odd = sums[row * NUM_CHAINS + 1];
        even = tile->is_resumed ? vec_add(vec_load(at), even) : even;
        vec_store(at, vec_add(even, odd));
    }
}

#define DEFINE_STREAM(num_rows)                                        \
    static void stream_BF16_##num_rows(const struct stream_tile *tile) \
    {                                                                  \
        stream_compute(DTYPE_BF16, tile, num_rows);                    \
    }                                                                  \
    static void stream_F16_##num_rows(const struct stream_tile *tile)  \
    {                                                                  \
        stream_compute(DTYPE_F16, tile, num_rows);                     \
    }                                                                  \
    static void stream_F32_##num_rows(const struct stream_tile *tile)  \
    {                                                                  \
        stream_compute(DTYPE_F32, tile, num_rows);                     \
    }
STREAM_SHAPES(DEFINE_STREAM)

typedef void stream_fn(const struct stream_tile *tile);
#define STREAM_ENTRIES(num_rows)                     \
    [DTYPE_BF16][num_rows] = stream_BF16_##num_rows, \
    [DTYPE_F16][num_rows] = stream_F16_##num_rows, [DTYPE_F32][num_rows] = stream_F32_##num_rows,
static stream_fn *const stream_fns[DTYPE_NUM_PLAIN][STREAM_TILE_ROWS + 1] = {
    STREAM_SHAPES(STREAM_ENTRIES)};

/* Columns of one matrix, beside each other, and what follows them. */
struct segment {
    int32_t matrix;
    int64_t begin, end;
    uintptr_t next; /* the first row of the segment behind it; 0: there is none */
};

static int64_t num_units_of(int64_t begin, int64_t end)
{
    return divide_up(end - begin, UNIT_COLS);
}

/* A block of k of a unit against all rows, in one tile or in two alike. */
static void compute_block(const struct dot_job *job, struct stream_tile *tile, int64_t k)
{
    int32_t num_tiles = job->num_tokens > STREAM_TILE_ROWS ? 2 : 1;
    int32_t tile_rows = (job->num_tokens + num_tiles - 1) / num_tiles;
    float *sums = tile->sums;
    for (int32_t token = 0; token < job->num_tokens; token += tile_rows) {
        int32_t num_rows = (int32_t)min_of(tile_rows, job->num_tokens - token);
        tile->a = (const unsigned char *)job->a + token * job->a_stride_bytes +
                  k * (int64_t)sizeof(float);
        tile->sums = sums + (int64_t)token * SUMS_STRIDE;
        stream_fns[job->dtype][num_rows](tile);
    }
    tile->sums = sums;
}

/* Lane i of unit u is column begin + i * number of units + u; lanes beyond the last column repeat
 * it. sums [num_tokens, SUMS_STRIDE], unit by unit. */
static void compute_segment(const struct dot_job *job, const struct segment *segment, float *sums)
{
    const int64_t block_k = block_k_of(job), element_bytes = element_bytes_of(job);
    const int64_t row_bytes = job->num_elements * element_bytes;
    const int64_t num_units = num_units_of(segment->begin, segment->end);
    struct stream_tile tile = {.a_stride_bytes = job->a_stride_bytes};
    for (int64_t unit = 0; unit < num_units; unit++) {
        int64_t col = segment->begin + unit, last = segment->end - 1 - col;
        const unsigned char *first = job->weights[segment->matrix] + col * row_bytes;
        uintptr_t next = (uintptr_t)first + (uintptr_t)row_bytes;
        if (unit + 1 == num_units) {
            next =
                segment->next != 0 ? segment->next : (uintptr_t)first; /* what is there already */
        }
        tile.sums = sums + unit * UNIT_COLS;
        for (int64_t k = 0; k < job->num_elements; k += block_k) {
            for (int64_t lane = 0; lane < UNIT_COLS; lane++) {
                tile.rows[lane] =
                    first + min_of(lane * num_units, last) * row_bytes + k * element_bytes;
            }
            tile.num_elements = min_of(block_k, job->num_elements - k);
            tile.is_resumed = k > 0;
            tile.wrap_offset = row_bytes - k * element_bytes - ALONG_BYTES;
            tile.wrap_bytes = (int64_t)(next - (uintptr_t)first) - row_bytes;
            compute_block(job, &tile, k);
        }
    }
}

/* Sums unit by unit become sums column by column. */
static void order_columns(int32_t num_tokens, int64_t num_units, const float *units, float *columns)
{
    for (int64_t row = 0; row < num_tokens; row++) {
        for (int64_t lane = 0; lane < UNIT_COLS; lane++) {
            for (int64_t unit = 0; unit < num_units; unit++) {
                columns[row * SUMS_STRIDE + lane * num_units + unit] =
                    units[row * SUMS_STRIDE + unit * UNIT_COLS + lane];
            }
        }
    }
}

/* Nobody has asked for the first weights. */
static void prefetch_first(const struct dot_job *job, int64_t begin, int64_t end)
{
    const int64_t row_bytes = job->num_elements * element_bytes_of(job);
    const int64_t num_units = num_units_of(begin, min_of(begin + SEGMENT_COLS, end));
    for (int64_t lane = 0; lane < UNIT_COLS; lane++) {
        uintptr_t row = (uintptr_t)job->weights[0] +
                        (uintptr_t)(min_of(begin + lane * num_units, end - 1) * row_bytes);
        for (int64_t at = 0; at < min_of(ALONG_BYTES, row_bytes); at += LINE_BYTES) {
            _mm_prefetch((const char *)(row + (uintptr_t)at), _MM_HINT_T0);
        }
    }
}

void avx2_dot_streams(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    const int64_t row_bytes = job->num_elements * element_bytes_of(job);
    float *sums[2] = {(float *)(void *)scratch,
                      (float *)(void *)scratch + FEW_MAX_ROWS * SUMS_STRIDE};
    float *units = sums[1] + FEW_MAX_ROWS * SUMS_STRIDE;
    prefetch_first(job, begin, end);
    for (int64_t col = begin; col < end; col += SEGMENT_COLS) {
        int64_t segment_end = min_of(col + SEGMENT_COLS, end);
        struct dot_sums stored = {.at = {sums[0], sums[1]},
                                  .stride = SUMS_STRIDE,
                                  .first_col = col,
                                  .num_rows = job->num_tokens,
                                  .num_cols = (int32_t)(segment_end - col)};
        for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
            bool is_last = matrix == job->num_matrices - 1;
            const unsigned char *next =
                job->weights[is_last ? 0 : matrix + 1] + (is_last ? segment_end : col) * row_bytes;
            struct segment segment = {
                .matrix = matrix,
                .begin = col,
                .end = segment_end,
                .next = is_last && segment_end == job->num_cols ? 0 : (uintptr_t)next};
            compute_segment(job, &segment, units);
            order_columns(job->num_tokens, num_units_of(col, segment_end), units, sums[matrix]);
        }
        job->store(job->params, &stored);
    }
}

#endif
