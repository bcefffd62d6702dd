/* SPDX-License-Identifier: Apache-2.0 */
/* Register tiles of rows x cols accumulators, lanes along k. Twelve accumulators hide the latency
 * of two FMA units (2 x 4 cycles) and leave registers for the operands; with up to three rows of
 * activations there are four rows of weights, so that four streams come from memory at the same
 * time. */
#include "ops/cpu/dot_tile_avx2.h"

#if defined(__x86_64__)

#include <stddef.h>
#include <string.h>

#include "ops/cpu/vec_avx2.h"

#define LINE_BYTES 64

/* X(num_rows, num_cols): the tiles there are. */
#define DOT_TILE_SHAPES(X) X(1, 4) X(2, 4) X(3, 4) X(4, 2) X(6, 2)

/* At the elements of the next step. Rows of activations are three to a pointer, so that all fit the
 * registers there are. */
struct operands {
    const unsigned char *a[DOT_TILE_MAX_ROWS / 3];
    int64_t a_stride_bytes;
    const unsigned char *weights[DOT_TILE_MAX_COLS];
};

VEC_INLINE const float *a_at(const struct operands *from, int row, int64_t k)
{
    const unsigned char *at = from->a[row / 3] + row % 3 * from->a_stride_bytes;
    return (const float *)(const void *)at + k;
}

VEC_INLINE void advance(struct operands *from, enum dtype dtype, int num_rows, int num_cols,
                        int64_t num_elements)
{
    VEC_UNROLL
    for (int row = 0; row < num_rows; row += 3) {
        from->a[row / 3] += num_elements * (int64_t)sizeof(float);
        /* gcc 12 otherwise derives further pointers from this one, and spills. */
        __asm__("" : "+r"(from->a[row / 3]));
    }
    VEC_UNROLL
    for (int col = 0; col < num_cols; col++) {
        from->weights[col] += num_elements * (dtype == DTYPE_F32 ? 4 : 2);
    }
}

/* Fewer than eight weights, the others 0; nothing outside of them is read. */
VEC_INLINE __m256 load_weights_rest(enum dtype dtype, const unsigned char *weights, int64_t count)
{
    unsigned char rest[VEC_LANES * sizeof(float)] = {0};
    memcpy(rest, weights, (size_t)count * (dtype == DTYPE_F32 ? 4 : 2));
    return vec_load_weights(dtype, rest);
}

/* Rows of activations that are loaded by each multiply-add that takes them. An instruction less for
 * one load more: of the loads and of the multiply-adds, two start in a cycle. */
VEC_INLINE bool is_read_twice(int row, int num_rows)
{
    return row == 0 || (row == 3 && num_rows == 6);
}

/* Eight elements from k on of all rows, or the first num_left of them where `is_rest`. */
VEC_INLINE void tile_step(const struct operands *from, enum dtype dtype, int num_rows, int num_cols,
                          int64_t k, bool is_rest, int64_t num_left, __m256 *sums)
{
    int64_t offset = k * (dtype == DTYPE_F32 ? 4 : 2);
    __m256i mask = vec_mask_low((int32_t)num_left);
    __m256 held[DOT_TILE_MAX_COLS];
    /* The side with fewer vectors stays in registers, the other passes through. */
    if (num_rows < num_cols) {
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            const float *a = a_at(from, row, k);
            held[row] = is_rest ? _mm256_maskload_ps(a, mask) : _mm256_loadu_ps(a);
        }
        VEC_UNROLL
        for (int col = 0; col < num_cols; col++) {
            const unsigned char *at = from->weights[col] + offset;
            __m256 weight =
                is_rest ? load_weights_rest(dtype, at, num_left) : vec_load_weights(dtype, at);
            VEC_UNROLL
            for (int row = 0; row < num_rows; row++) {
                __m256 *sum = &sums[row * num_cols + col];
                *sum = _mm256_fmadd_ps(held[row], weight, *sum);
            }
        }
    } else {
        VEC_UNROLL
        for (int col = 0; col < num_cols; col++) {
            const unsigned char *at = from->weights[col] + offset;
            held[col] = vec_keep(is_rest ? load_weights_rest(dtype, at, num_left)
                                         : vec_load_weights(dtype, at));
        }
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            const float *at = a_at(from, row, k);
            __m256 *row_sums = &sums[row * num_cols];
            if (!is_rest && is_read_twice(row, num_rows)) {
                VEC_UNROLL
                for (int col = 0; col < num_cols; col++) {
                    row_sums[col] = vec_add_product_at(row_sums[col], at, held[col]);
                }
                continue;
            }
            __m256 a = is_rest ? _mm256_maskload_ps(at, mask) : vec_load_here(at);
            VEC_UNROLL
            for (int col = 0; col < num_cols; col++) {
                row_sums[col] = vec_add_product(row_sums[col], a, held[col]);
            }
        }
    }
}

VEC_INLINE void tile_compute(const struct dot_tile *tile, enum dtype dtype, int num_rows,
                             int num_cols, float *results, int64_t stride)
{
    const int64_t line_elements = LINE_BYTES / (dtype == DTYPE_F32 ? 4 : 2);
    const int num_sums = num_rows * num_cols;
    int64_t num_left = tile->num_elements;
    struct operands from;
    uintptr_t ahead[DOT_TILE_MAX_COLS];
    __m256 sums[DOT_TILE_MAX_SUMS];
    from.a_stride_bytes = tile->a_stride_bytes;
    VEC_UNROLL
    for (int row = 0; row < num_rows; row += 3) {
        from.a[row / 3] = tile->a + row * tile->a_stride_bytes;
    }
    VEC_UNROLL
    for (int col = 0; col < num_cols; col++) {
        from.weights[col] = tile->weight_rows[col];
        ahead[col] = tile->ahead[col];
    }
    if (tile->is_resumed) {
        VEC_UNROLL
        for (int idx = 0; idx < num_sums; idx++) {
            sums[idx] = _mm256_load_ps(tile->partial + idx * VEC_LANES);
        }
    } else {
        VEC_UNROLL
        for (int idx = 0; idx < num_sums; idx++) {
            sums[idx] = _mm256_setzero_ps();
        }
    }
    for (; num_left >= line_elements; num_left -= line_elements) {
        VEC_UNROLL
        for (int col = 0; col < num_cols; col++) {
            _mm_prefetch((const char *)ahead[col], _MM_HINT_T1);
            ahead[col] += LINE_BYTES;
        }
        VEC_UNROLL
        for (int64_t step = 0; step < line_elements; step += VEC_LANES) {
            tile_step(&from, dtype, num_rows, num_cols, step, false, 0, sums);
        }
        advance(&from, dtype, num_rows, num_cols, line_elements);
    }
    for (; num_left >= VEC_LANES; num_left -= VEC_LANES) {
        tile_step(&from, dtype, num_rows, num_cols, 0, false, 0, sums);
        advance(&from, dtype, num_rows, num_cols, VEC_LANES);
    }
    if (num_left > 0) {
        tile_step(&from, dtype, num_rows, num_cols, 0, true, num_left, sums);
    }
    if (tile->is_continued) {
        VEC_UNROLL
        for (int idx = 0; idx < num_sums; idx++) {
            _mm256_store_ps(tile->partial + idx * VEC_LANES, sums[idx]);
        }
        return;
    }
    VEC_UNROLL
    for (int idx = 0; idx < num_sums; idx += 4) {
        __m128 four = vec_sums_of_4(sums[idx], sums[idx + 1], sums[idx + 2], sums[idx + 3]);
        float *at = results + idx / num_cols * stride;
        if (num_cols == 4) {
            _mm_storeu_ps(at, four);
        } else {
            _mm_storel_pi((__m64 *)(void *)at, four);
            _mm_storeh_pi((__m64 *)(void *)(at + stride), four);
        }
    }
}

#define DEFINE_TILE(dtype, num_rows, num_cols)                                         \
    static void tile_##dtype##_##num_rows##x##num_cols(const struct dot_tile *tile,    \
                                                       float *results, int64_t stride) \
    {                                                                                  \
        tile_compute(tile, DTYPE_##dtype, num_rows, num_cols, results, stride);        \
    }
#define DEFINE_TILES(num_rows, num_cols)  \
    DEFINE_TILE(BF16, num_rows, num_cols) \
    DEFINE_TILE(F16, num_rows, num_cols)  \
    DEFINE_TILE(F32, num_rows, num_cols)
DOT_TILE_SHAPES(DEFINE_TILES)

#define TILE_COLS(num_rows, num_cols) [num_rows] = num_cols,
#define TILE_ENTRIES(num_rows, num_cols)                        \
    [DTYPE_BF16][num_rows] = tile_BF16_##num_rows##x##num_cols, \
    [DTYPE_F16][num_rows] = tile_F16_##num_rows##x##num_cols,   \
    [DTYPE_F32][num_rows] = tile_F32_##num_rows##x##num_cols,
/* Six rows of activations of 1,024 elements take 24 of 32 KiB of L1. Longer rows come from L3, for
 * each panel anew: wide panels, cut along k, are worth the accumulators that wait in scratch. */
const struct dot_tiles avx2_dot_tiles = {.vector_bytes = 32,
                                         .a_element_bytes = 4,
                                         .most_rows = 6,
                                         .panel_bytes = 192 * 1024,
                                         .max_panel_bytes = 192 * 1024,
                                         .block_panel_cols = 112,
                                         .max_whole_k = 1024,
                                         .max_block_k = 768,
                                         .num_cols = {DOT_TILE_SHAPES(TILE_COLS)},
                                         .fns = {DOT_TILE_SHAPES(TILE_ENTRIES)}};

#endif
