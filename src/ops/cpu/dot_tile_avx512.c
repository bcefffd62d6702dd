/* SPDX-License-Identifier: Apache-2.0 */
/* Register tiles of up to 6 rows x 4 columns of accumulators, lanes along k. Rows of activations
 * and of weights are read as they lie; weights are widened on the way, once for all rows of
 * activations. 24 accumulators leave registers for four widened rows of weights, one of activations
 * and the pattern of the widening. */
#include "ops/cpu/dot_tile_avx512.h"

#if defined(__x86_64__)

#include "ops/cpu/vec_avx512.h"

#define LINE_BYTES 64

/* X(num_rows, num_cols): the tiles there are. */
#define DOT_TILE_SHAPES(X) X(1, 4) X(2, 4) X(3, 4) X(4, 4) X(5, 4) X(6, 4)

/* Nothing is read before what stands above: gcc 12 otherwise loads the operands of the next step
 * early, for which there are no registers left, and spills accumulators. */
VEC_INLINE void keep_order(void)
{
    __asm__ __volatile__("" : : : "memory");
}

struct operands {
    const float *a[DOT_TILE_MAX_ROWS];
    const unsigned char *weights[DOT_TILE_MAX_COLS];
};

/* Sixteen elements from k on of all rows, or those of them that `mask` names. */
VEC_INLINE void tile_step(const struct operands *from, enum dtype dtype, int num_rows, int64_t k,
                          bool is_masked, __mmask16 mask, __m512 *sums)
{
    int64_t offset = k * (dtype == DTYPE_F32 ? 4 : 2);
    __m512 weights[DOT_TILE_MAX_COLS];
    keep_order();
    VEC_UNROLL
    for (int col = 0; col < DOT_TILE_MAX_COLS; col++) {
        const unsigned char *at = from->weights[col] + offset;
        weights[col] = vec_keep(is_masked ? vec_load_weights_masked(dtype, mask, at)
                                          : vec_load_weights(dtype, at));
    }
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        const float *at = from->a[row] + k;
        __m512 a = vec_keep(is_masked ? _mm512_maskz_loadu_ps(mask, at) : _mm512_loadu_ps(at));
        VEC_UNROLL
        for (int col = 0; col < DOT_TILE_MAX_COLS; col++) {
            __m512 *sum = &sums[row * DOT_TILE_MAX_COLS + col];
            *sum = vec_add_product(*sum, a, weights[col]);
        }
    }
}

VEC_INLINE void tile_compute(const struct dot_tile *tile, enum dtype dtype, int num_rows,
                             float *results, int64_t stride)
{
    const int64_t line_elements = LINE_BYTES / (dtype == DTYPE_F32 ? 4 : 2);
    const int num_sums = num_rows * DOT_TILE_MAX_COLS;
    int64_t num_elements = tile->num_elements;
    struct operands from;
    uintptr_t ahead[DOT_TILE_MAX_COLS];
    __m512 sums[DOT_TILE_MAX_SUMS];
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        from.a[row] = (const float *)(const void *)(tile->a + row * tile->a_stride_bytes);
    }
    VEC_UNROLL
    for (int col = 0; col < DOT_TILE_MAX_COLS; col++) {
        from.weights[col] = tile->weight_rows[col];
        ahead[col] = tile->ahead[col];
    }
    if (tile->is_resumed) {
        VEC_UNROLL
        for (int idx = 0; idx < num_sums; idx++) {
            sums[idx] = _mm512_load_ps(tile->partial + idx * VEC_LANES);
        }
    } else {
        VEC_UNROLL
        for (int idx = 0; idx < num_sums; idx++) {
            sums[idx] = _mm512_setzero_ps();
        }
    }
    int64_t k = 0;
    for (; k + line_elements <= num_elements; k += line_elements) {
        VEC_UNROLL
        for (int col = 0; col < DOT_TILE_MAX_COLS; col++) {
            uintptr_t at = ahead[col] + (uintptr_t)(k * (LINE_BYTES / line_elements));
            _mm_prefetch((const char *)at, _MM_HINT_T1);
        }
        tile_step(&from, dtype, num_rows, k, false, 0, sums);
        if (line_elements > VEC_LANES) {
            tile_step(&from, dtype, num_rows, k + VEC_LANES, false, 0, sums);
        }
    }
    for (; k < num_elements; k += VEC_LANES) {
        tile_step(&from, dtype, num_rows, k, true, vec_mask_low(num_elements - k), sums);
    }
    if (tile->is_continued) {
        VEC_UNROLL
        for (int idx = 0; idx < num_sums; idx++) {
            _mm512_store_ps(tile->partial + idx * VEC_LANES, sums[idx]);
        }
        return;
    }
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        const __m512 *of_row = sums + row * DOT_TILE_MAX_COLS;
        _mm_storeu_ps(results + row * stride,
                      vec_sums_of_4(of_row[0], of_row[1], of_row[2], of_row[3]));
    }
}

#define DEFINE_TILE(dtype, num_rows, num_cols)                                         \
    static void tile_##dtype##_##num_rows##x##num_cols(const struct dot_tile *tile,    \
                                                       float *results, int64_t stride) \
    {                                                                                  \
        tile_compute(tile, DTYPE_##dtype, num_rows, results, stride);                  \
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
/* Six rows of activations of 4,864 elements come from L2 fast enough. Storing and loading
 * accumulators cost more: 94 GFLOP/s with five blocks, 105 with one, on an EPYC 9004 core. */
static const struct dot_tiles avx512_dot_tiles = {.vector_bytes = 64,
                                                  .a_element_bytes = 4,
                                                  .most_rows = 6,
                                                  .panel_bytes = 384 * 1024,
                                                  .max_panel_bytes = 576 * 1024,
                                                  .block_panel_cols = 32,
                                                  .max_whole_k = 5120,
                                                  .max_block_k = 5120,
                                                  .num_cols = {DOT_TILE_SHAPES(TILE_COLS)},
                                                  .fns = {DOT_TILE_SHAPES(TILE_ENTRIES)}};

void avx512_dot_panels(const struct dot_job *job, unsigned char *scratch, int64_t begin,
                       int64_t end)
{
    struct dot_job tiled = *job;
    tiled.tiles = &avx512_dot_tiles;
    dot_panels(&tiled, scratch, begin, end);
}

#endif
