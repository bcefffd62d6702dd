/* SPDX-License-Identifier: Apache-2.0 */
/* Few rows: a group of columns passes by once, turned in registers, and meets all rows of
 * activations; of gemm_swiglu columns of gate, then those of up. */
#include "ops/cpu/dot_columns_avx2.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/vec_generic_avx2.h"

#include "ops/cpu/dot_turn.h"

/* Of each matrix in turn, so that memory is read in long runs. */
#define FEW_COLS 128
/* Of few rows of activations: streams of weights, and the most that is ahead of a row's use. */
#define AHEAD_ROWS 4
#define MAX_RUN_BYTES 2560

/* X(num_rows): the tiles there are. */
#define FEW_SHAPES(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)

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

void avx2_dot_few(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    float *sums = (float *)(void *)scratch;
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
            prefetch_rows(first.rows, GROUP_COLS, at);
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

#endif
