/* SPDX-License-Identifier: Apache-2.0 */
/* Few rows: eight columns, a unit, pass by once, turned in registers, and meet all rows of
 * activations; of gemm_swiglu columns of gate, then those of up.
 *
 * Memory decides, and what it gives depends on how it is asked: units are small so that few rows
 * are read at a time. What comes next is prefetched either in the order of addresses, a unit ahead,
 * into L2, or along each row of the unit at hand, a little ahead, into L1. */
#include "ops/cpu/dot_columns_avx2.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/vec_generic_avx2.h"

#include "ops/cpu/dot_turn.h"

#define UNIT_COLS VEC_LANES
/* Of each matrix in turn, so that memory is read in long runs. */
#define SEGMENT_COLS 128
/* Rows that are longer are prefetched along themselves on all processors. */
#define MAX_SHORT_ROW_BYTES 2560
#define ALONG_BYTES 512
#define AHEAD_LINES 4 /* asked for at once, in the order of addresses */
#define NUM_CHAINS 2  /* of even and of odd elements */
/* Of a tile: the sums of more do not fit the registers. */
#define FEW_TILE_ROWS 4

/* X(num_rows): the tiles there are. */
#define FEW_SHAPES(X) X(1) X(2) X(3) X(4)

/* A unit and a block of k against a tile of rows. */
struct few_tile {
    const unsigned char *a; /* [num_rows], a_stride_bytes apart */
    int64_t a_stride_bytes;
    const unsigned char *rows[UNIT_COLS]; /* of weights */
    int64_t num_elements;
    float *sums; /* [num_rows], SEGMENT_COLS apart */
    bool is_resumed;
    /* Along rows: from an offset in the block on, what comes is that much further. */
    bool is_along_rows;
    int64_t wrap_offset, wrap_bytes;
    /* Or in the order of addresses: from here on, where these bits of an offset are 0. */
    uintptr_t ahead;
    int64_t ahead_mask;
};

VEC_INLINE void prefetch_beside(struct few_tile *tile, int64_t offset)
{
    if (tile->is_along_rows) {
        if (offset % LINE_BYTES == 0) {
            int64_t at = offset + ALONG_BYTES;
            at += offset >= tile->wrap_offset ? tile->wrap_bytes : 0;
            VEC_UNROLL
            for (int row = 0; row < UNIT_COLS; row++) {
                uintptr_t line = (uintptr_t)tile->rows[row] + (uintptr_t)at;
                _mm_prefetch((const char *)line, _MM_HINT_T0);
            }
        }
    } else if ((offset & tile->ahead_mask) == 0) {
        VEC_UNROLL
        for (int line = 0; line < AHEAD_LINES; line++) {
            _mm_prefetch((const char *)(tile->ahead + (uintptr_t)(line * LINE_BYTES)), _MM_HINT_T1);
        }
        tile->ahead += AHEAD_LINES * LINE_BYTES;
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

VEC_INLINE void few_compute(enum dtype dtype, struct few_tile *tile, int num_rows)
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
        prefetch_beside(tile, offset);
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

#define DEFINE_FEW(num_rows)                               \
    static void few_BF16_##num_rows(struct few_tile *tile) \
    {                                                      \
        few_compute(DTYPE_BF16, tile, num_rows);           \
    }                                                      \
    static void few_F16_##num_rows(struct few_tile *tile)  \
    {                                                      \
        few_compute(DTYPE_F16, tile, num_rows);            \
    }                                                      \
    static void few_F32_##num_rows(struct few_tile *tile)  \
    {                                                      \
        few_compute(DTYPE_F32, tile, num_rows);            \
    }
FEW_SHAPES(DEFINE_FEW)

typedef void few_fn(struct few_tile *tile);
#define FEW_ENTRIES(num_rows)                                                                 \
    [DTYPE_BF16][num_rows] = few_BF16_##num_rows, [DTYPE_F16][num_rows] = few_F16_##num_rows, \
    [DTYPE_F32][num_rows] = few_F32_##num_rows,
static few_fn *const few_fns[DTYPE_NUM_PLAIN][FEW_TILE_ROWS + 1] = {FEW_SHAPES(FEW_ENTRIES)};

/* Columns of one matrix, beside each other, and what follows them. */
struct segment {
    int32_t matrix;
    int64_t begin, end;
    uintptr_t next; /* the first row of the segment behind it; 0: there is none */
};

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

static void compute_segment(const struct dot_job *job, const struct segment *segment,
                            bool is_along_rows, float *sums)
{
    const int64_t block_k = block_k_of(job), element_bytes = element_bytes_of(job);
    const int64_t row_bytes = job->num_elements * element_bytes;
    struct few_tile tile = {.a_stride_bytes = job->a_stride_bytes, .is_along_rows = is_along_rows};
    for (int64_t col = segment->begin; col < segment->end; col += UNIT_COLS) {
        uintptr_t at = (uintptr_t)job->weights[segment->matrix] + (uintptr_t)(col * row_bytes);
        uintptr_t next = col + UNIT_COLS < segment->end ? at + (uintptr_t)(UNIT_COLS * row_bytes)
                                                        : segment->next;
        tile.ahead = next == 0 ? at : next; /* at last what is there already */
        tile.sums = sums + (col - segment->begin);
        for (int64_t k = 0; k < job->num_elements; k += block_k) {
            rows_at(job, segment->matrix, col, segment->end, k, UNIT_COLS, tile.rows);
            tile.num_elements = min_of(block_k, job->num_elements - k);
            tile.is_resumed = k > 0;
            tile.wrap_offset = row_bytes - k * element_bytes - ALONG_BYTES;
            tile.wrap_bytes = (int64_t)((next == 0 ? at : next) - at) - row_bytes;
            compute_block(job, &tile, k);
        }
    }
}

/* Nobody has asked for the first weights. */
static void prefetch_first(const struct dot_job *job, int64_t begin, int64_t end, int64_t num_bytes)
{
    const unsigned char *rows[UNIT_COLS];
    rows_at(job, 0, begin, end, 0, UNIT_COLS, rows);
    for (int row = 0; row < UNIT_COLS; row++) {
        for (int64_t at = 0; at < num_bytes; at += LINE_BYTES) {
            _mm_prefetch((const char *)rows[row] + at, _MM_HINT_T1);
        }
    }
}

static void dot_few(const struct dot_job *job, bool are_short_along_rows, unsigned char *scratch,
                    int64_t begin, int64_t end)
{
    const int64_t row_bytes = job->num_elements * element_bytes_of(job);
    const bool is_along_rows = are_short_along_rows || row_bytes > MAX_SHORT_ROW_BYTES;
    float *sums = (float *)(void *)scratch;
    prefetch_first(job, begin, end, is_along_rows ? min_of(ALONG_BYTES, row_bytes) : row_bytes);
    for (int64_t col = begin; col < end; col += SEGMENT_COLS) {
        int64_t segment_end = min_of(col + SEGMENT_COLS, end);
        struct dot_sums stored = {.at = {sums, sums + FEW_MAX_ROWS * SEGMENT_COLS},
                                  .stride = SEGMENT_COLS,
                                  .first_col = col,
                                  .num_rows = job->num_tokens,
                                  .num_cols = (int32_t)(segment_end - col)};
        for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
            bool is_last = matrix == job->num_matrices - 1;
            const unsigned char *next =
                job->weights[is_last ? 0 : matrix + 1] + (is_last ? segment_end : col) * row_bytes;
            struct segment segment = {.matrix = matrix,
                                      .begin = col,
                                      .end = segment_end,
                                      .next = is_last && segment_end == end ? 0 : (uintptr_t)next};
            compute_segment(job, &segment, is_along_rows,
                            sums + matrix * FEW_MAX_ROWS * SEGMENT_COLS);
        }
        job->store(job->params, &stored);
    }
}

void avx2_dot_few(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    dot_few(job, false, scratch, begin, end);
}

void avx2_dot_few_along(const struct dot_job *job, unsigned char *scratch, int64_t begin,
                        int64_t end)
{
    dot_few(job, true, scratch, begin, end);
}

#endif
