/* SPDX-License-Identifier: Apache-2.0 */
/* linear and gemm_swiglu of plain weights. Lanes are columns: the weights of 16 rows of the
 * checkpoint, a group, are turned on the way into vectors of one element of each, widened, which
 * meet broadcast activations.
 *
 * Few rows: a group passes by once, turned in registers; of gemm_swiglu columns of gate, then those
 * of up.
 *
 * Many rows: a group of gemm_swiglu is 8 rows of gate and 8 of up. A panel of groups is turned once
 * for each block of k and stays in L2.
 *
 *   for each panel
 *     for each chunk of rows         as many as have their sums in scratch, where k is cut
 *       for each block of k          sums wait in scratch between blocks
 *         for each tile of 6 rows    activations in L1; the next ones on their way to L2
 *           for each group           12 accumulators; meanwhile the next panel's weights come in
 *
 * An output is, for each block of k, one accumulator that takes elements in ascending order; the
 * sums of blocks are added up in ascending order. Blocks depend on the length of a row alone. */
#include "ops/cpu/dot_columns_avx2.h"

#if defined(__x86_64__)

#include <assert.h>
#include <stddef.h>
#include <string.h>

#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/dot_sizes.h"
#include "ops/cpu/vec_avx2.h"

#define LINE_BYTES 64
#define STEP_ELEMENTS 32
#define GROUP_COLS 16
#define HALVES 2 /* of a group: what one vector holds */
#define WORDS 4  /* of 32 bits, of a row in half of a vector */
#define FEW_MAX_ROWS 8
/* Of each matrix in turn, so that memory is read in long runs. */
#define FEW_COLS 128
#define TILE_MAX_ROWS 6
/* Prefetched lines in a step, of as many places. */
#define TILE_AHEADS 8
/* What memory delivers while a line is on its way, for each of the rows of a group. */
#define AHEAD_ROW_BYTES 1024
/* Of few rows of activations: streams of weights, and the most that is ahead of a row's use. */
#define AHEAD_ROWS 4
#define MAX_RUN_BYTES 2560
/* Six rows of activations take a third of L1. */
#define MAX_BLOCK_K 448
#define PANEL_BYTES (256 * 1024)
#define PARTIAL_BYTES (256 * 1024)
/* With few row tiles memory decides: a small panel is soon complete. */
#define FEW_ROW_TILES 4
#define FEW_PANEL_GROUPS 2

_Static_assert(PANEL_BYTES + PARTIAL_BYTES <= CPU_SCRATCH_BYTES, "a panel and its sums");
_Static_assert(MAX_BLOCK_K % STEP_ELEMENTS == 0, "whole steps");
_Static_assert(FEW_PANEL_GROUPS *MAX_BLOCK_K *GROUP_COLS * sizeof(float) <= PANEL_BYTES,
               "the narrowest panel");

/* X(num_rows): the tiles of few rows, and those of many. */
#define FEW_SHAPES(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define TILE_SHAPES(X) X(3) X(4) X(5) X(6)

static int64_t element_bytes_of(const struct dot_job *job)
{
    return (int64_t)dtype_block_bytes(job->dtype);
}

static int64_t block_k_of(const struct dot_job *job)
{
    int64_t num_blocks = divide_up(job->num_elements, MAX_BLOCK_K);
    return round_up(divide_up(job->num_elements, num_blocks), STEP_ELEMENTS);
}

/* ---- turning --------------------------------------------------------------------------------- */

/* Rows of weights; where there are fewer columns, the last one of a matrix again. */
struct group {
    const unsigned char *rows[GROUP_COLS];
};

/* Columns of each matrix in a group. */
static int64_t group_cols(const struct dot_job *job)
{
    return GROUP_COLS / job->num_matrices;
}

/* Rows of the columns from `col` on, of which those before `end` exist, from element k on. */
static void rows_at(const struct dot_job *job, int32_t matrix, int64_t col, int64_t end, int64_t k,
                    int64_t num_rows, const unsigned char **rows)
{
    int64_t row_bytes = job->num_elements * element_bytes_of(job);
    const unsigned char *at = job->weights[matrix] + col * row_bytes + k * element_bytes_of(job);
    for (int64_t idx = 0; idx < num_rows; idx++) {
        rows[idx] = at;
        at += col + idx + 1 < end ? row_bytes : 0;
    }
}

/* Columns [col, col + group_cols) of all matrices. */
static struct group group_at(const struct dot_job *job, int64_t col, int64_t end, int64_t k)
{
    int64_t width = group_cols(job);
    struct group group;
    for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
        rows_at(job, matrix, col, end, k, width, group.rows + matrix * width);
    }
    return group;
}

VEC_INLINE __m256i load_two(const unsigned char *low, const unsigned char *high)
{
    __m128i first = _mm_loadu_si128((const __m128i *)(const void *)low);
    __m128i second = _mm_loadu_si128((const __m128i *)(const void *)high);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}

VEC_INLINE __m256i widen_two_f16(const unsigned char *low, const unsigned char *high)
{
    __m128i first = _mm_loadl_epi64((const __m128i *)(const void *)low);
    __m128i second = _mm_loadl_epi64((const __m128i *)(const void *)high);
    return _mm256_castps_si256(_mm256_cvtph_ps(_mm_unpacklo_epi64(first, second)));
}

/* Four words of each of eight rows, row r and r + 4 in the halves of vector r, become four vectors
 * of a word of each. */
VEC_INLINE void turn_words(__m256i *vecs)
{
    __m256i low_01 = _mm256_unpacklo_epi32(vecs[0], vecs[1]);
    __m256i high_01 = _mm256_unpackhi_epi32(vecs[0], vecs[1]);
    __m256i low_23 = _mm256_unpacklo_epi32(vecs[2], vecs[3]);
    __m256i high_23 = _mm256_unpackhi_epi32(vecs[2], vecs[3]);
    vecs[0] = _mm256_unpacklo_epi64(low_01, low_23);
    vecs[1] = _mm256_unpackhi_epi64(low_01, low_23);
    vecs[2] = _mm256_unpacklo_epi64(high_01, high_23);
    vecs[3] = _mm256_unpackhi_epi64(high_01, high_23);
}

/* How eight elements of each of eight rows are turned: in parts of four vectors, and a vector, a
 * word of each row, holds two elements of bf16 or one of the other types, widened. */
VEC_INLINE int elements_of_word(enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? 2 : 1;
}

/* Part `part` of the elements from an offset on. */
VEC_INLINE void turn_part(enum dtype dtype, const unsigned char *const *rows, int64_t offset,
                          int part, __m256i *words)
{
    int64_t at = offset + part * (dtype == DTYPE_F16 ? 8 : 16);
    VEC_UNROLL
    for (int row = 0; row < WORDS; row++) {
        words[row] = dtype == DTYPE_F16 ? widen_two_f16(rows[row] + at, rows[row + WORDS] + at)
                                        : load_two(rows[row] + at, rows[row + WORDS] + at);
    }
    turn_words(words);
}

/* Element `idx` of those in a word. The conversions are exact. */
VEC_INLINE __m256 element_of_word(enum dtype dtype, __m256i word, int idx)
{
    if (dtype == DTYPE_BF16) {
        word = idx == 0 ? _mm256_slli_epi32(word, 16)
                        : _mm256_and_si256(word, _mm256_set1_epi32((int32_t)0xffff0000u));
    }
    return _mm256_castsi256_ps(word);
}

/* The last elements of a row, fewer than eight, with eight or more zeros behind them: nothing
 * outside of the rows is read. */
struct rest {
    unsigned char rows[GROUP_COLS][2 * VEC_LANES * sizeof(float)];
};

static struct group copy_rest(const unsigned char *const *rows, int num_rows, int64_t offset,
                              int64_t num_bytes, struct rest *rest)
{
    struct group copied;
    memset(rest, 0, sizeof(*rest));
    for (int row = 0; row < num_rows; row++) {
        memcpy(rest->rows[row], rows[row] + offset, (size_t)num_bytes);
        copied.rows[row] = rest->rows[row];
    }
    return copied;
}

VEC_INLINE void prefetch_rows(const struct group *group, int64_t offset)
{
    VEC_UNROLL
    for (int row = 0; row < GROUP_COLS; row++) {
        uintptr_t at = (uintptr_t)group->rows[row] + (uintptr_t)offset;
        _mm_prefetch((const char *)at, _MM_HINT_T1);
    }
}

/* ---- few rows -------------------------------------------------------------------------------- */

/* Weights that come into L2 while others are at work: the rows of a group four at a time, a line of
 * each in turn; long ones cut into runs. Memory gives these four streams faster than a line of all
 * rows in turn, and one after the other, since a burst would fill the queue of misses. */
struct ahead_runs {
    const unsigned char *weights; /* of a matrix */
    int64_t row_bytes, run_bytes;
    int64_t col, end; /* the group, and the end of the matrix's columns */
    int64_t run_at;   /* in the rows of the group */
    int32_t row;      /* the first of four */
    /* Lines of the run in these rows, from `at` on. */
    int32_t num_left;
    uintptr_t at;
    int64_t stride_bytes;
};

static void begin_rows(struct ahead_runs *ahead)
{
    int64_t col = ahead->col + ahead->row;
    int64_t num_bytes = min_of(ahead->run_bytes, ahead->row_bytes - ahead->run_at);
    /* At the end what is there already. */
    int64_t offset = min_of(col, ahead->end - 1) * ahead->row_bytes + ahead->run_at;
    ahead->stride_bytes = col + AHEAD_ROWS <= ahead->end ? ahead->row_bytes : 0;
    ahead->at = (uintptr_t)ahead->weights + (uintptr_t)offset;
    ahead->num_left = (int32_t)divide_up(num_bytes, LINE_BYTES);
}

/* The first run behind one of the group that begins with a column. */
static void begin_runs(struct ahead_runs *ahead, int64_t col, int64_t run_at)
{
    bool is_last = run_at + ahead->run_bytes >= ahead->row_bytes;
    ahead->col = is_last ? col + GROUP_COLS : col;
    ahead->run_at = is_last ? 0 : run_at + ahead->run_bytes;
    ahead->row = 0;
    begin_rows(ahead);
}

VEC_INLINE void prefetch_lines(struct ahead_runs *ahead)
{
    VEC_UNROLL
    for (int row = 0; row < AHEAD_ROWS; row++) {
        _mm_prefetch((const char *)(ahead->at + (uintptr_t)(row * ahead->stride_bytes)),
                     _MM_HINT_T1);
    }
    ahead->at += LINE_BYTES;
    if (--ahead->num_left == 0) {
        ahead->row += AHEAD_ROWS;
        if (ahead->row < GROUP_COLS) {
            begin_rows(ahead);
        } else {
            begin_runs(ahead, ahead->col, ahead->run_at);
        }
    }
}

/* A group, or half of it, and a block of k against few rows. */
struct few_rows {
    const unsigned char *a; /* [num_rows], a_stride_bytes apart */
    int64_t a_stride_bytes;
    const unsigned char *const *rows; /* of weights, eight for each half */
    int64_t num_elements;
    struct ahead_runs *ahead;
    float *sums; /* [num_rows], FEW_COLS apart */
    bool is_resumed;
};

/* Halves of a group that are taken together: sums and what is turned have to fit the registers. */
VEC_INLINE int few_halves(int num_rows)
{
    return num_rows <= 4 ? HALVES : 1;
}

/* Eight elements, or the first num_left of them where `is_rest`. */
VEC_INLINE void few_step(enum dtype dtype, const unsigned char *a, int64_t a_stride_bytes,
                         const unsigned char *const *rows, int num_rows, int64_t offset,
                         bool is_rest, int64_t num_left, __m256 *sums)
{
    const int num_elements = elements_of_word(dtype), num_halves = few_halves(num_rows);
    const int width = num_rows == 1 ? HALVES : 1; /* halves in turns: chains that overlap */
    VEC_UNROLL
    for (int half = 0; half < num_halves; half += width) {
        VEC_UNROLL
        for (int part = 0; part < VEC_LANES / WORDS / num_elements; part++) {
            __m256i words[HALVES][WORDS];
            VEC_UNROLL
            for (int idx = 0; idx < width; idx++) {
                turn_part(dtype, rows + (half + idx) * VEC_LANES, offset, part, words[idx]);
            }
            VEC_UNROLL
            for (int element = 0; element < WORDS * num_elements; element++) {
                int k = part * WORDS + element;
                if (is_rest && k >= num_left) {
                    break;
                }
                VEC_UNROLL
                for (int row = 0; row < num_rows; row++) {
                    const unsigned char *from = a + row * a_stride_bytes;
                    __m256 value = vec_broadcast_here((const float *)(const void *)from + k);
                    VEC_UNROLL
                    for (int idx = 0; idx < width; idx++) {
                        __m256 *sum = &sums[row * num_halves + half + idx];
                        *sum = vec_add_product(*sum, value,
                                               element_of_word(dtype,
                                                               words[idx][element / num_elements],
                                                               element % num_elements));
                    }
                }
            }
        }
    }
}

VEC_INLINE void few_compute(enum dtype dtype, const struct few_rows *few, int num_rows)
{
    const int element_bytes = dtype == DTYPE_F32 ? 4 : 2, step_bytes = VEC_LANES * element_bytes;
    const int num_halves = few_halves(num_rows), num_sums = num_rows * num_halves;
    const int step_lines = num_halves * VEC_LANES * step_bytes / LINE_BYTES;
    const unsigned char *a = few->a;
    int64_t num_left = few->num_elements, offset = 0;
    __m256 sums[FEW_MAX_ROWS];
    VEC_UNROLL
    for (int idx = 0; idx < num_sums; idx++) {
        sums[idx] = _mm256_setzero_ps();
    }
    for (; num_left >= VEC_LANES; num_left -= VEC_LANES, offset += step_bytes) {
        /* As many lines as a step reads, or as two steps do. */
        if (step_lines >= AHEAD_ROWS || offset / step_bytes % 2 == 0) {
            prefetch_lines(few->ahead);
        }
        if (step_lines > AHEAD_ROWS) {
            prefetch_lines(few->ahead);
        }
        few_step(dtype, a, few->a_stride_bytes, few->rows, num_rows, offset, false, 0, sums);
        a += VEC_LANES * sizeof(float);
    }
    if (num_left > 0) {
        struct rest rest;
        struct group copied =
            copy_rest(few->rows, num_halves * VEC_LANES, offset, num_left * element_bytes, &rest);
        few_step(dtype, a, few->a_stride_bytes, copied.rows, num_rows, 0, true, num_left, sums);
    }
    VEC_UNROLL
    for (int idx = 0; idx < num_sums; idx++) {
        float *at = few->sums + idx / num_halves * FEW_COLS + idx % num_halves * VEC_LANES;
        _mm256_store_ps(at,
                        few->is_resumed ? _mm256_add_ps(_mm256_load_ps(at), sums[idx]) : sums[idx]);
    }
}

#define DEFINE_FEW(num_rows)                                    \
    static void few_BF16_##num_rows(const struct few_rows *few) \
    {                                                           \
        few_compute(DTYPE_BF16, few, num_rows);                 \
    }                                                           \
    static void few_F16_##num_rows(const struct few_rows *few)  \
    {                                                           \
        few_compute(DTYPE_F16, few, num_rows);                  \
    }                                                           \
    static void few_F32_##num_rows(const struct few_rows *few)  \
    {                                                           \
        few_compute(DTYPE_F32, few, num_rows);                  \
    }
FEW_SHAPES(DEFINE_FEW)

typedef void few_fn(const struct few_rows *few);
#define FEW_ENTRIES(num_rows)                                                                 \
    [DTYPE_BF16][num_rows] = few_BF16_##num_rows, [DTYPE_F16][num_rows] = few_F16_##num_rows, \
    [DTYPE_F32][num_rows] = few_F32_##num_rows,
static few_fn *const few_fns[DTYPE_NUM_PLAIN][FEW_MAX_ROWS + 1] = {FEW_SHAPES(FEW_ENTRIES)};

/* Columns [begin, end) of a matrix. Those that follow them come into L2 at the end, if they lie
 * before piece_end. */
static void compute_few_cols(const struct dot_job *job, int32_t matrix, int64_t begin, int64_t end,
                             int64_t piece_end, struct ahead_runs *ahead, float *sums)
{
    const int64_t block_k = block_k_of(job);
    const int num_halves = few_halves(job->num_tokens);
    struct few_rows few = {.a_stride_bytes = job->a_stride_bytes, .ahead = ahead};
    struct group group;
    ahead->weights = job->weights[matrix];
    ahead->end = piece_end;
    for (int64_t col = begin; col < end; col += GROUP_COLS) {
        begin_runs(ahead, col, 0);
        for (int64_t k = 0; k < job->num_elements; k += block_k) {
            rows_at(job, matrix, col, end, k, GROUP_COLS, group.rows);
            few.a = (const unsigned char *)job->a + k * (int64_t)sizeof(float);
            few.num_elements = min_of(block_k, job->num_elements - k);
            few.is_resumed = k > 0;
            for (int half = 0; half < HALVES; half += num_halves) {
                few.rows = group.rows + half * VEC_LANES;
                few.sums = sums + (col - begin) + half * VEC_LANES;
                few_fns[job->dtype][job->num_tokens](&few);
            }
        }
    }
}

static void compute_few_rows(const struct dot_job *job, float *sums, int64_t begin, int64_t end)
{
    const int64_t row_bytes = job->num_elements * element_bytes_of(job);
    struct ahead_runs ahead = {
        .row_bytes = row_bytes,
        .run_bytes =
            round_up(divide_up(row_bytes, divide_up(row_bytes, MAX_RUN_BYTES)), LINE_BYTES)};
    struct group first;
    /* Nobody has asked for the first weights. */
    for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
        rows_at(job, matrix, begin, end, 0, GROUP_COLS, first.rows);
        for (int64_t at = 0; at < min_of(row_bytes, ahead.run_bytes); at += LINE_BYTES) {
            prefetch_rows(&first, at);
        }
    }
    for (int64_t col = begin; col < end; col += FEW_COLS) {
        int64_t cols_end = min_of(col + FEW_COLS, end);
        struct dot_sums stored = {.at = {sums, sums + FEW_MAX_ROWS * FEW_COLS},
                                  .stride = FEW_COLS,
                                  .first_col = col,
                                  .num_rows = job->num_tokens,
                                  .num_cols = (int32_t)(cols_end - col)};
        for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
            compute_few_cols(job, matrix, col, cols_end, end, &ahead,
                             sums + matrix * FEW_MAX_ROWS * FEW_COLS);
        }
        job->store(job->params, &stored);
    }
}

/* ---- many rows ------------------------------------------------------------------------------- */

/* Rows of activations times a turned group. */
struct tile {
    const unsigned char *a; /* a_stride_bytes apart */
    int64_t a_stride_bytes;
    const float *group; /* [num_elements][GROUP_COLS] */
    int64_t num_elements;
    /* A cache line from each is prefetched in every step. */
    uintptr_t ahead[TILE_AHEADS];
    float *sums; /* [num_rows][GROUP_COLS] */
    bool is_resumed;
};

#define BASE_ROWS 3
#define NUM_BASES (TILE_MAX_ROWS / BASE_ROWS)

/* Addresses of a tile as they move along k. */
struct tile_walk {
    const unsigned char *a[NUM_BASES]; /* of every third row */
    int64_t a_stride_bytes;
    const float *group;
};

VEC_INLINE void tile_elements(struct tile_walk *at, int num_rows, int num_elements, __m256 *sums)
{
    VEC_UNROLL
    for (int k = 0; k < num_elements; k++) {
        __m256 weights[HALVES];
        VEC_UNROLL
        for (int half = 0; half < HALVES; half++) {
            weights[half] = vec_load_here(at->group + k * GROUP_COLS + half * VEC_LANES);
        }
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            const unsigned char *base = at->a[row / BASE_ROWS];
            const unsigned char *from = base + row % BASE_ROWS * at->a_stride_bytes;
            __m256 value = vec_broadcast_here((const float *)(const void *)from + k);
            VEC_UNROLL
            for (int half = 0; half < HALVES; half++) {
                __m256 *sum = &sums[row * HALVES + half];
                *sum = vec_add_product(*sum, value, weights[half]);
            }
        }
    }
    VEC_UNROLL
    for (int idx = 0; idx < NUM_BASES; idx++) {
        at->a[idx] += num_elements * (int64_t)sizeof(float);
    }
    at->group += num_elements * GROUP_COLS;
    /* gcc 12 otherwise derives further pointers from these, and spills. */
    __asm__("" : "+r"(at->a[0]), "+r"(at->a[1]), "+r"(at->group));
}

VEC_INLINE void tile_compute(const struct tile *tile, int num_rows)
{
    struct tile_walk at = {.a = {tile->a, tile->a + BASE_ROWS * tile->a_stride_bytes},
                           .a_stride_bytes = tile->a_stride_bytes,
                           .group = tile->group};
    __m256 sums[TILE_MAX_ROWS * HALVES];
    VEC_UNROLL
    for (int idx = 0; idx < num_rows * HALVES; idx++) {
        sums[idx] = _mm256_setzero_ps();
    }
    int64_t num_left = tile->num_elements, line = 0;
    for (; num_left >= STEP_ELEMENTS; num_left -= STEP_ELEMENTS, line += LINE_BYTES) {
        for (int idx = 0; idx < TILE_AHEADS; idx++) {
            _mm_prefetch((const char *)(tile->ahead[idx] + (uintptr_t)line), _MM_HINT_T1);
            tile_elements(&at, num_rows, STEP_ELEMENTS / TILE_AHEADS, sums);
        }
    }
    for (; num_left > 0; num_left--) {
        tile_elements(&at, num_rows, 1, sums);
    }
    VEC_UNROLL
    for (int idx = 0; idx < num_rows * HALVES; idx++) {
        float *to = tile->sums + idx * VEC_LANES;
        _mm256_store_ps(to, tile->is_resumed ? _mm256_add_ps(_mm256_load_ps(to), sums[idx])
                                             : sums[idx]);
    }
}

#define DEFINE_TILE(num_rows)                            \
    static void tile_##num_rows(const struct tile *tile) \
    {                                                    \
        tile_compute(tile, num_rows);                    \
    }
TILE_SHAPES(DEFINE_TILE)

typedef void tile_fn(const struct tile *tile);
#define TILE_ENTRY(num_rows) [num_rows] = tile_##num_rows,
static tile_fn *const tile_fns[TILE_MAX_ROWS + 1] = {TILE_SHAPES(TILE_ENTRY)};

/* Of the tile that begins with num_left rows left of more than FEW_MAX_ROWS. */
static int32_t tile_rows(int64_t num_left)
{
    return num_left >= 2 * TILE_MAX_ROWS ? TILE_MAX_ROWS
           : num_left > TILE_MAX_ROWS    ? (int32_t)(num_left + 1) / 2
                                         : (int32_t)num_left;
}

/* Memory that will be needed, rows in parts of what a tile prefetches from one address. */
struct ahead {
    uintptr_t row_at;
    int64_t stride_bytes, part_bytes, row_parts;
    int64_t part, num_left; /* the next one, in the row at row_at; and how many there are with it */
};

static struct ahead ahead_of(const void *base, int64_t offset, int64_t stride_bytes,
                             int64_t num_rows, int64_t row_bytes, int64_t part_bytes)
{
    int64_t row_parts = divide_up(row_bytes, part_bytes);
    return (struct ahead){.row_at = (uintptr_t)base + (uintptr_t)offset,
                          .stride_bytes = stride_bytes,
                          .part_bytes = part_bytes,
                          .row_parts = row_parts,
                          .num_left = num_rows * row_parts};
}

static uintptr_t take_ahead(struct ahead *ahead)
{
    uintptr_t at = ahead->row_at + (uintptr_t)(ahead->part * ahead->part_bytes);
    ahead->num_left--;
    if (++ahead->part == ahead->row_parts) {
        ahead->part = 0;
        ahead->row_at += (uintptr_t)ahead->stride_bytes;
    }
    return at;
}

struct walk {
    const struct dot_job *job;
    float *panel;    /* [num_groups][num_k][GROUP_COLS] */
    float *partials; /* [rows of a chunk][num_groups][GROUP_COLS], by tiles */
    int64_t end;     /* of columns */
    int64_t panel_groups, block_k;
    bool is_cut;  /* along k */
    bool is_cold; /* nobody has prefetched the weights of the panel */
    /* Of the panel and block at hand: */
    int64_t first_col, num_groups, k, num_k, chunk_end;
    /* On their way to L2: the next tile of activations, the next block of each matrix. */
    struct ahead next_a, next_weights[2];
};

/* Eight elements of a group, or the first num_left of them where `is_rest`. */
VEC_INLINE void fill_step(enum dtype dtype, const struct group *group, int64_t offset, bool is_rest,
                          int64_t num_left, float *to)
{
    const int num_elements = elements_of_word(dtype);
    VEC_UNROLL
    for (int half = 0; half < HALVES; half++) {
        VEC_UNROLL
        for (int part = 0; part < VEC_LANES / WORDS / num_elements; part++) {
            __m256i words[WORDS];
            turn_part(dtype, group->rows + half * VEC_LANES, offset, part, words);
            VEC_UNROLL
            for (int element = 0; element < WORDS * num_elements; element++) {
                int k = part * WORDS + element;
                if (is_rest && k >= num_left) {
                    break;
                }
                _mm256_store_ps(
                    to + k * GROUP_COLS + half * VEC_LANES,
                    element_of_word(dtype, words[element / num_elements], element % num_elements));
            }
        }
    }
}

/* Elements [0, num_k) of a group to [num_k][GROUP_COLS]. */
VEC_INLINE void fill_group(enum dtype dtype, const struct group *group, int64_t num_k,
                           int64_t ahead_bytes, float *to)
{
    const int64_t element_bytes = dtype == DTYPE_F32 ? 4 : 2;
    int64_t k = 0;
    for (; k + VEC_LANES <= num_k; k += VEC_LANES, to += VEC_LANES * GROUP_COLS) {
        int64_t offset = k * element_bytes;
        if (offset % LINE_BYTES == 0 && offset < ahead_bytes) {
            prefetch_rows(group, offset + AHEAD_ROW_BYTES);
        }
        fill_step(dtype, group, offset, false, 0, to);
    }
    if (k < num_k) {
        struct rest rest;
        struct group copied = copy_rest(group->rows, GROUP_COLS, k * element_bytes,
                                        (num_k - k) * element_bytes, &rest);
        fill_step(dtype, &copied, 0, true, num_k - k, to);
    }
}

static void fill_panel(const struct walk *walk)
{
    const struct dot_job *job = walk->job;
    const int64_t row_bytes = walk->num_k * element_bytes_of(job);
    int64_t ahead_bytes = walk->is_cold ? row_bytes - AHEAD_ROW_BYTES : 0;
    float *to = walk->panel;
    for (int64_t idx = 0; idx < walk->num_groups; idx++, to += walk->num_k * GROUP_COLS) {
        struct group group =
            group_at(job, walk->first_col + idx * group_cols(job), walk->end, walk->k);
        if (job->dtype == DTYPE_BF16) {
            fill_group(DTYPE_BF16, &group, walk->num_k, ahead_bytes, to);
        } else if (job->dtype == DTYPE_F16) {
            fill_group(DTYPE_F16, &group, walk->num_k, ahead_bytes, to);
        } else {
            fill_group(DTYPE_F32, &group, walk->num_k, ahead_bytes, to);
        }
    }
}

/* Bytes that a tile prefetches from one address. */
static int64_t part_bytes(const struct walk *walk)
{
    return walk->num_k < STEP_ELEMENTS ? LINE_BYTES : walk->num_k / STEP_ELEMENTS * LINE_BYTES;
}

/* The weights that come after the panel and block at hand. */
static void plan_weights(struct walk *walk)
{
    const struct dot_job *job = walk->job;
    int64_t element_bytes = element_bytes_of(job);
    int64_t panel_cols = walk->panel_groups * group_cols(job);
    int64_t col = walk->first_col, k = walk->k + walk->block_k;
    if (k >= job->num_elements) {
        k = 0;
        col += walk->chunk_end < job->num_tokens ? 0 : panel_cols;
    }
    int64_t num_cols = min_of(panel_cols, walk->end - col);
    int64_t row_bytes = min_of(walk->block_k, job->num_elements - k) * element_bytes;
    for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
        walk->next_weights[matrix] =
            ahead_of(job->weights[matrix], (col * job->num_elements + k) * element_bytes,
                     job->num_elements * element_bytes, num_cols < 0 ? 0 : num_cols, row_bytes,
                     part_bytes(walk));
    }
}

static void plan_activations(struct walk *walk, int64_t next_token)
{
    const struct dot_job *job = walk->job;
    int64_t num_rows = min_of(TILE_MAX_ROWS, walk->chunk_end - next_token);
    walk->next_a = ahead_of(
        job->a, next_token * job->a_stride_bytes + walk->k * (int64_t)sizeof(float),
        job->a_stride_bytes, num_rows, walk->num_k * (int64_t)sizeof(float), part_bytes(walk));
}

/* What a tile prefetches: of the activations what is due, spread over num_groups_left tiles; then
 * rows of weights, as late as num_calls_left tiles allow, for much passes through L2 meanwhile;
 * then what is there already. */
static void choose_ahead(struct walk *walk, int64_t num_groups_left, int64_t num_calls_left,
                         struct tile *tile)
{
    int64_t num_due = min_of(divide_up(walk->next_a.num_left, num_groups_left), TILE_AHEADS - 1);
    int64_t num_later = (num_calls_left - 1) * (TILE_AHEADS - num_due);
    struct ahead *next = walk->next_weights;
    int slot = 0;
    for (; slot < num_due; slot++) {
        tile->ahead[slot] = take_ahead(&walk->next_a);
    }
    for (; slot < TILE_AHEADS; slot++) {
        struct ahead *from = next[1].num_left > next[0].num_left ? &next[1] : &next[0];
        tile->ahead[slot] = next[0].num_left + next[1].num_left > num_later
                                ? take_ahead(from)
                                : (uintptr_t)tile->group;
    }
}

/* Sums of some rows and one group of columns. */
static void store_group(const struct dot_job *job, const float *sums, int64_t first_row,
                        int32_t num_rows, int64_t first_col, int64_t end)
{
    struct dot_sums stored = {.at = {sums, sums + VEC_LANES},
                              .stride = GROUP_COLS,
                              .first_row = first_row,
                              .first_col = first_col,
                              .num_rows = num_rows,
                              .num_cols = (int32_t)min_of(group_cols(job), end - first_col)};
    job->store(job->params, &stored);
}

/* Rows [token, token + num_rows) against the panel. */
static void compute_tiles(struct walk *walk, int64_t token, int32_t num_rows, float *partials)
{
    const struct dot_job *job = walk->job;
    int64_t num_calls_left = divide_up(walk->chunk_end - token, TILE_MAX_ROWS) * walk->num_groups;
    bool is_last = walk->k + walk->num_k >= job->num_elements;
    struct tile tile = {.a = (const unsigned char *)job->a + token * job->a_stride_bytes +
                             walk->k * (int64_t)sizeof(float),
                        .a_stride_bytes = job->a_stride_bytes,
                        .num_elements = walk->num_k,
                        .is_resumed = walk->k > 0};
    plan_activations(walk, token + num_rows);
    for (int64_t idx = 0; idx < walk->num_groups; idx++) {
        tile.group = walk->panel + idx * walk->num_k * GROUP_COLS;
        tile.sums = partials + (walk->is_cut ? idx * num_rows * GROUP_COLS : 0);
        choose_ahead(walk, walk->num_groups - idx, num_calls_left - idx, &tile);
        tile_fns[num_rows](&tile);
        if (is_last) {
            store_group(job, tile.sums, token, num_rows, walk->first_col + idx * group_cols(job),
                        walk->end);
        }
    }
}

/* From a row on, as many tiles as have room for their sums against all blocks of the panel; returns
 * the row behind them. */
static int64_t compute_chunk(struct walk *walk, int64_t first_token)
{
    const struct dot_job *job = walk->job;
    int64_t num_sums = walk->num_groups * GROUP_COLS; /* of a row */
    int64_t max_rows = PARTIAL_BYTES / (int64_t)sizeof(float) / num_sums;
    int64_t token = first_token;
    walk->chunk_end =
        walk->is_cut ? min_of(job->num_tokens, first_token + max_rows) : job->num_tokens;
    for (walk->k = 0; walk->k < job->num_elements; walk->k += walk->block_k) {
        walk->num_k = min_of(walk->block_k, job->num_elements - walk->k);
        plan_weights(walk);
        fill_panel(walk);
        walk->is_cold = false;
        token = first_token;
        while (token < job->num_tokens) {
            int32_t num_rows = tile_rows(job->num_tokens - token);
            int64_t num_before = walk->is_cut ? token - first_token : 0;
            if (token + num_rows > walk->chunk_end) {
                break;
            }
            compute_tiles(walk, token, num_rows, walk->partials + num_before * num_sums);
            token += num_rows;
        }
    }
    return token;
}

void avx2_dot_columns(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    if (job->num_tokens <= FEW_MAX_ROWS) {
        compute_few_rows(job, (float *)(void *)scratch, begin, end);
        return;
    }
    struct walk walk = {.job = job,
                        .panel = (float *)(void *)scratch,
                        .partials = (float *)(void *)(scratch + PANEL_BYTES),
                        .end = end,
                        .block_k = block_k_of(job),
                        .is_cold = true};
    int64_t all_groups = divide_up(end - begin, group_cols(job));
    int64_t group_bytes = walk.block_k * GROUP_COLS * (int64_t)sizeof(float);
    int64_t max_groups = job->num_tokens <= FEW_ROW_TILES * TILE_MAX_ROWS
                             ? FEW_PANEL_GROUPS
                             : PANEL_BYTES / group_bytes;
    walk.is_cut = walk.block_k < job->num_elements;
    walk.panel_groups = divide_up(all_groups, divide_up(all_groups, max_groups)); /* alike */
    int64_t panel_cols = walk.panel_groups * group_cols(job);
    for (walk.first_col = begin; walk.first_col < end; walk.first_col += panel_cols) {
        walk.num_groups = divide_up(min_of(panel_cols, end - walk.first_col), group_cols(job));
        for (int64_t token = 0; token < job->num_tokens;) {
            token = compute_chunk(&walk, token);
        }
    }
}

#endif
