/* SPDX-License-Identifier: Apache-2.0 */
/* linear and gemm_swiglu of bf16 weights with activations rounded to bf16, by AVX-512's dot product
 * of pairs. Lanes are columns: the weights of 16 rows of the checkpoint, a group, are turned on the
 * way into vectors of one pair of elements of each, which meet broadcast pairs of activations.
 *
 * Few rows: a group passes by once, turned in registers, 32 elements at a time.
 *
 * Many rows: dot_columns.c, with tiles of 12 rows by two groups, in gemm_swiglu one of gate and one
 * of up; panels keep pairs.
 *
 * An output is one accumulator that takes pairs in ascending order, in whatever tile or block it
 * stands. Numbers below 2^-126 become zero. */
#include "ops/cpu/kernels_bf16.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/dot_columns.h"
#include "ops/cpu/kernels_avx512.h"
#include "ops/cpu/kernels_vnni.h"
#include "ops/cpu/vec_avx512.h"

#define STEP_PAIRS 16 /* of a row, a cache line of them */
#define GROUP_COLS 16
#define GROUP_STEP_BYTES (GROUP_COLS * LINE_BYTES)
#define TILE_GROUPS DOT_GROUP_HALVES
#define TILE_MAX_ROWS 12
#define TILE_AHEADS 4
#define FEW_MAX_ROWS 8
#define BF16_BLOCK_K 1024
/* What memory delivers while a line is on its way, for each of the rows of a group. */
#define AHEAD_ROW_BYTES 1024

/* X(num_rows): the tiles of few rows, and those of many. */
#define FEW_SHAPES(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define TILE_SHAPES(X) X(6) X(7) X(8) X(9) X(10) X(11) X(12)

/* One pair of each of 16 columns. In the register of the sum, for the reason told at
 * vec_add_product. */
VEC_INLINE __m512 add_pairs(__m512 sum, __m512i weights, __m512i a)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(a));
    return sum;
}

VEC_INLINE __m512 add_broadcast_pairs(__m512 sum, __m512i weights, const unsigned char *a)
{
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0"
            : "+v"(sum)
            : "v"(weights), "m"(*(const int32_t *)(const void *)a));
    return sum;
}

/* By assembly, so that it stays one load for all its uses. */
VEC_INLINE __m512i broadcast_pair(const unsigned char *a)
{
    __m512i pair;
    __asm__("vpbroadcastd %1, %0" : "=v"(pair) : "m"(*(const int32_t *)(const void *)a));
    return pair;
}

/* Rows of weights. */
struct group {
    const unsigned char *rows[GROUP_COLS];
};

/* pairs[j] = elements 2j and 2j + 1 of each row of a group, from an offset on: those elements of 32
 * that `mask` names, the others 0. */
VEC_INLINE void load_pairs(const unsigned char *const *from, int64_t offset, bool is_masked,
                           __mmask32 mask, __m512i *pairs)
{
    __m512i rows[GROUP_COLS], quads[GROUP_COLS];
    VEC_UNROLL
    for (int row = 0; row < GROUP_COLS; row++) {
        const unsigned char *at = from[row] + offset;
        rows[row] = is_masked ? _mm512_maskz_loadu_epi16(mask, at) : _mm512_loadu_si512(at);
    }
    /* quads[4i + q], in its part l of 128 bits: pair 4l + q of rows 4i to 4i + 3. */
    VEC_UNROLL
    for (int idx = 0; idx < GROUP_COLS; idx += 4) {
        __m512i low_01 = _mm512_unpacklo_epi32(rows[idx], rows[idx + 1]);
        __m512i high_01 = _mm512_unpackhi_epi32(rows[idx], rows[idx + 1]);
        __m512i low_23 = _mm512_unpacklo_epi32(rows[idx + 2], rows[idx + 3]);
        __m512i high_23 = _mm512_unpackhi_epi32(rows[idx + 2], rows[idx + 3]);
        quads[idx] = _mm512_unpacklo_epi64(low_01, low_23);
        quads[idx + 1] = _mm512_unpackhi_epi64(low_01, low_23);
        quads[idx + 2] = _mm512_unpacklo_epi64(high_01, high_23);
        quads[idx + 3] = _mm512_unpackhi_epi64(high_01, high_23);
    }
    VEC_UNROLL
    for (int q = 0; q < 4; q++) {
        __m512i even_0 = _mm512_shuffle_i32x4(quads[q], quads[4 + q], 0x88);
        __m512i odd_0 = _mm512_shuffle_i32x4(quads[q], quads[4 + q], 0xdd);
        __m512i even_1 = _mm512_shuffle_i32x4(quads[8 + q], quads[12 + q], 0x88);
        __m512i odd_1 = _mm512_shuffle_i32x4(quads[8 + q], quads[12 + q], 0xdd);
        pairs[q] = _mm512_shuffle_i32x4(even_0, even_1, 0x88);
        pairs[4 + q] = _mm512_shuffle_i32x4(odd_0, odd_1, 0x88);
        pairs[8 + q] = _mm512_shuffle_i32x4(even_0, even_1, 0xdd);
        pairs[12 + q] = _mm512_shuffle_i32x4(odd_0, odd_1, 0xdd);
    }
}

static __mmask32 mask_of_rest(int64_t num_elements)
{
    return (__mmask32)((1u << num_elements) - 1);
}

VEC_INLINE void prefetch_rows(const unsigned char *const *rows, int64_t offset)
{
    VEC_UNROLL
    for (int row = 0; row < GROUP_COLS; row++) {
        uintptr_t at = (uintptr_t)rows[row] + (uintptr_t)offset;
        _mm_prefetch((const char *)at, _MM_HINT_T1);
    }
}

/* Where to prefetch beside `offset`: further on in the same rows, then the beginning of the rows of
 * the next group. */
static int64_t ahead_of(int64_t offset, int64_t row_bytes)
{
    int64_t ahead = offset + AHEAD_ROW_BYTES;
    return ahead < row_bytes ? ahead : ahead + (GROUP_COLS - 1) * row_bytes;
}

/* A group and all of its k against few rows. */
struct few_rows {
    const unsigned char *a; /* [num_rows], a_stride_bytes apart, padded with zeros */
    int64_t a_stride_bytes, num_elements;
    struct group group;
};

VEC_INLINE void few_step(const struct few_rows *few, int num_rows, int64_t offset, bool is_masked,
                         __mmask32 mask, __m512 *sums)
{
    __m512i pairs[STEP_PAIRS];
    load_pairs(few->group.rows, offset, is_masked, mask, pairs);
    VEC_UNROLL
    for (int pair = 0; pair < STEP_PAIRS; pair++) {
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            const unsigned char *at = few->a + row * few->a_stride_bytes + offset;
            sums[row] = add_broadcast_pairs(sums[row], pairs[pair], at + pair * 4);
        }
    }
}

/* Row r's sums to d + r * SUMS_STRIDE. */
#define SUMS_STRIDE (TILE_GROUPS * GROUP_COLS)
VEC_INLINE void few_compute(const struct few_rows *few, int num_rows, float *d)
{
    int64_t num_elements = few->num_elements;
    int64_t row_bytes = num_elements * (int64_t)sizeof(uint16_t);
    __m512 sums[FEW_MAX_ROWS];
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        sums[row] = _mm512_setzero_ps();
    }
    int64_t k = 0, offset = 0;
    for (; k + STEP_ELEMENTS <= num_elements; k += STEP_ELEMENTS, offset += LINE_BYTES) {
        prefetch_rows(few->group.rows, ahead_of(offset, row_bytes));
        few_step(few, num_rows, offset, false, 0, sums);
    }
    if (k < num_elements) {
        few_step(few, num_rows, offset, true, mask_of_rest(num_elements - k), sums);
    }
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        _mm512_store_ps(d + row * SUMS_STRIDE, sums[row]);
    }
}

#define DEFINE_FEW(num_rows)                                         \
    static void few_##num_rows(const struct few_rows *few, float *d) \
    {                                                                \
        few_compute(few, num_rows, d);                               \
    }
FEW_SHAPES(DEFINE_FEW)

typedef void few_fn(const struct few_rows *few, float *d);
#define FEW_ENTRY(num_rows) [num_rows] = few_##num_rows,
static few_fn *const few_fns[FEW_MAX_ROWS + 1] = {FEW_SHAPES(FEW_ENTRY)};

static void compute_few_rows(const struct dot_job *job, float *sums, int64_t begin, int64_t end)
{
    struct few_rows few = {
        .a = job->a, .a_stride_bytes = job->a_stride_bytes, .num_elements = job->num_elements};
    for (int64_t col = begin; col < end; col += GROUP_COLS) {
        for (int32_t matrix = 0; matrix < job->num_matrices; matrix++) {
            rows_at(job, matrix, col, end, 0, GROUP_COLS, few.group.rows);
            few_fns[job->num_tokens](&few, sums + matrix * GROUP_COLS);
        }
        struct dot_sums stored = {.at = {sums, sums + GROUP_COLS},
                                  .stride = SUMS_STRIDE,
                                  .first_col = col,
                                  .num_rows = job->num_tokens,
                                  .num_cols = (int32_t)min_of(GROUP_COLS, end - col)};
        job->store(job->params, &stored);
    }
}

#define BASE_ROWS 3
#define NUM_BASES (TILE_MAX_ROWS / BASE_ROWS)

/* Addresses of a tile as they move along k. */
struct tile_walk {
    const unsigned char *a[NUM_BASES]; /* of every third row */
    int64_t a_stride_bytes;
    const unsigned char *groups[TILE_GROUPS];
};

/* Nothing is loaded before its turn, for which there are no registers, and addresses are not
 * computed ahead of it: gcc 12 otherwise keeps more sums of stride and offset than there are
 * registers. */
VEC_INLINE void keep_order(struct tile_walk *at)
{
    __asm__ __volatile__(""
                         : "+r"(at->a[0]), "+r"(at->a[1]), "+r"(at->a[2]), "+r"(at->a[3]),
                           "+r"(at->a_stride_bytes)
                         :
                         : "memory");
}

/* A quarter of a step: four pairs. */
VEC_INLINE void tile_quarter(struct tile_walk *at, int num_rows, int num_groups, __m512 *sums)
{
    VEC_UNROLL
    for (int pair = 0; pair < STEP_PAIRS / 4; pair++) {
        __m512i weights[TILE_GROUPS];
        keep_order(at);
        VEC_UNROLL
        for (int group = 0; group < num_groups; group++) {
            weights[group] = _mm512_load_si512(at->groups[group] + pair * LINE_BYTES);
        }
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            const unsigned char *base = at->a[row / BASE_ROWS] + pair * 4;
            __m512i values = broadcast_pair(base + row % BASE_ROWS * at->a_stride_bytes);
            VEC_UNROLL
            for (int group = 0; group < num_groups; group++) {
                __m512 *sum = &sums[row * TILE_GROUPS + group];
                *sum = add_pairs(*sum, weights[group], values);
            }
        }
    }
    VEC_UNROLL
    for (int idx = 0; idx < NUM_BASES; idx++) {
        at->a[idx] += LINE_BYTES / 4;
    }
    VEC_UNROLL
    for (int group = 0; group < num_groups; group++) {
        at->groups[group] += GROUP_STEP_BYTES / 4;
    }
}

VEC_INLINE void tile_compute(const struct dot_column_tile *tile, int num_rows, int num_groups)
{
    const int64_t num_steps = divide_up(tile->num_elements, STEP_ELEMENTS);
    struct tile_walk at = {.a_stride_bytes = tile->a_stride_bytes};
    __m512 sums[TILE_MAX_ROWS * TILE_GROUPS];
    VEC_UNROLL
    for (int idx = 0; idx < NUM_BASES; idx++) {
        at.a[idx] = tile->a + BASE_ROWS * idx * tile->a_stride_bytes;
    }
    VEC_UNROLL
    for (int group = 0; group < num_groups; group++) {
        at.groups[group] = tile->group + group * num_steps * GROUP_STEP_BYTES;
    }
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        VEC_UNROLL
        for (int group = 0; group < num_groups; group++) {
            int idx = row * TILE_GROUPS + group;
            sums[idx] = tile->is_resumed ? _mm512_load_ps(tile->sums + idx * GROUP_COLS)
                                         : _mm512_setzero_ps();
        }
    }
    for (int64_t step = 0; step < num_steps; step++) {
        for (int quarter = 0; quarter < 4; quarter++) {
            uintptr_t ahead = tile->ahead[quarter] + (uintptr_t)(step * LINE_BYTES);
            _mm_prefetch((const char *)ahead, _MM_HINT_T1);
            tile_quarter(&at, num_rows, num_groups, sums);
        }
    }
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        VEC_UNROLL
        for (int group = 0; group < num_groups; group++) {
            int idx = row * TILE_GROUPS + group;
            _mm512_store_ps(tile->sums + idx * GROUP_COLS, sums[idx]);
        }
    }
}

#define DEFINE_TILES(num_rows)                                          \
    static void tile_##num_rows##x1(const struct dot_column_tile *tile) \
    {                                                                   \
        tile_compute(tile, num_rows, 1);                                \
    }                                                                   \
    static void tile_##num_rows##x2(const struct dot_column_tile *tile) \
    {                                                                   \
        tile_compute(tile, num_rows, 2);                                \
    }
TILE_SHAPES(DEFINE_TILES)

static void fill_group(const unsigned char *const *rows, int num_groups, int64_t num_k,
                       unsigned char *to)
{
    const int64_t ahead_bytes = num_k * (int64_t)sizeof(uint16_t) - AHEAD_ROW_BYTES;
    for (int group = 0; group < num_groups; group++, rows += GROUP_COLS) {
        int64_t k = 0;
        for (; k < num_k; k += STEP_ELEMENTS, to += GROUP_STEP_BYTES) {
            int64_t offset = k * (int64_t)sizeof(uint16_t);
            __m512i pairs[STEP_PAIRS];
            if (k + STEP_ELEMENTS <= num_k) {
                if (offset < ahead_bytes) {
                    prefetch_rows(rows, offset + AHEAD_ROW_BYTES);
                }
                load_pairs(rows, offset, false, 0, pairs);
            } else {
                load_pairs(rows, offset, true, mask_of_rest(num_k - k), pairs);
            }
            VEC_UNROLL
            for (int pair = 0; pair < STEP_PAIRS; pair++) {
                _mm512_store_si512(to + pair * LINE_BYTES, pairs[pair]);
            }
        }
    }
}

#define TILE_ENTRY(num_rows) [num_rows] = {tile_##num_rows##x1, tile_##num_rows##x2},
static const struct dot_columns bf16_columns = {.a_element_bytes = sizeof(uint16_t),
                                                .panel_element_bytes = sizeof(uint16_t),
                                                .max_block_k = BF16_BLOCK_K,
                                                .group_cols = TILE_GROUPS * GROUP_COLS,
                                                .most_rows = TILE_MAX_ROWS,
                                                .num_aheads = TILE_AHEADS,
                                                .panel_bytes = 384 * 1024,
                                                .partial_bytes = 512 * 1024,
                                                .fill = {[DTYPE_BF16] = fill_group},
                                                .tiles = {TILE_SHAPES(TILE_ENTRY)}};

static void bf16_walk(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    if (job->num_tokens <= FEW_MAX_ROWS) {
        compute_few_rows(job, (float *)(void *)scratch, begin, end);
        return;
    }
    dot_columns(&bf16_columns, job, scratch, begin, end);
}

/* Of a row of bf16_groups, which here are rows one after the other. */
static int64_t packed_row_bytes(int32_t num_features)
{
    return round_up(num_features, BF16_TILE_FEATURES) * (int64_t)sizeof(uint16_t);
}

void avx512_bf16_pack(const float *a, int64_t a_stride, int32_t num_tokens, int32_t num_features,
                      unsigned char *packed)
{
    for (int32_t token = 0; token < num_tokens; token++) {
        const float *row = a + token * a_stride;
        for (int32_t k = 0; k < num_features; k += STEP_ELEMENTS, packed += LINE_BYTES) {
            __m512 low = _mm512_maskz_loadu_ps(vec_mask_low(num_features - k), row + k);
            __mmask16 high_mask = vec_mask_low(num_features - k - VEC_LANES);
            __m512 high = _mm512_maskz_loadu_ps(high_mask, row + k + VEC_LANES);
            __m512bh pairs = _mm512_cvtne2ps_pbh(high, low);
            _mm512_storeu_si512(packed, (__m512i)pairs);
        }
    }
}

void avx512_bf16_linear(const struct linear_params *params, const struct cpu_work *work,
                        int64_t begin, int64_t end)
{
    if (params->weight.dtype != DTYPE_BF16) {
        vnni_linear(params, work, begin, end);
        return;
    }
    avx512_linear_by(bf16_walk, work->quant_rows->bf16_groups,
                     packed_row_bytes(params->in_features), params, work, begin, end);
}

void avx512_bf16_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                             int64_t begin, int64_t end)
{
    if (params->gate.dtype != DTYPE_BF16 || params->up.dtype != DTYPE_BF16) {
        vnni_gemm_swiglu(params, work, begin, end);
        return;
    }
    avx512_gemm_swiglu_by(bf16_walk, work->quant_rows->bf16_groups,
                          packed_row_bytes(params->hidden_size), params, work, begin, end);
}

void avx512_bf16_kernels_fill(struct cpu_kernels *kernels)
{
    kernels->name = "avx512-bf16";
    kernels->linear = avx512_bf16_linear;
    kernels->gemm_swiglu = avx512_bf16_gemm_swiglu;
    kernels->pack_bf16 = avx512_bf16_pack;
}

#endif
