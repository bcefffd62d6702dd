/* SPDX-License-Identifier: Apache-2.0 */
/* Register tiles of rows x cols accumulators. With many rows of activations, twelve accumulators
 * hide the latency of two FMA units (2 x 4 cycles) and leave registers for the operands, and loads
 * and widening are shared; with one row there are eight weight rows, so that eight streams come
 * from memory at the same time. */
#include "ops/cpu/dot_tile_avx2.h"

#if defined(__x86_64__)

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "ops/cpu/vec_avx2.h"

#define LINE_BYTES 64

/* X(num_rows, num_cols): the tiles there are. Each row count that dot_tile_rows gives has its
 * widest, 2 and 1. */
#define DOT_TILE_SHAPES(X) \
    X(1, 8)                \
    X(1, 2)                \
    X(1, 1)                \
    X(2, 4)                \
    X(2, 2)                \
    X(2, 1)                \
    X(3, 4)                \
    X(3, 2)                \
    X(3, 1)                \
    X(4, 2)                \
    X(4, 1)                \
    X(6, 2)                \
    X(6, 1)

/* Eight elements from k on of all rows; `mask` clears lanes of both operands where `masked`. */
VEC_INLINE void tile_step(const struct dot_tile *tile, enum dtype dtype, int num_rows, int num_cols,
                          int64_t k, bool masked, __m256 mask, __m256 *sums)
{
    int64_t weight_bytes = dtype == DTYPE_F32 ? 4 : 2;
    __m256 wide[DOT_TILE_MAX_ROWS > DOT_TILE_MAX_COLS ? DOT_TILE_MAX_ROWS : DOT_TILE_MAX_COLS];
    /* The side with fewer vectors stays in registers, the other passes through. */
    if (num_rows < num_cols) {
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            __m256 a = _mm256_loadu_ps(tile->a + row * tile->a_stride + k);
            wide[row] = masked ? _mm256_and_ps(a, mask) : a;
        }
        VEC_UNROLL
        for (int col = 0; col < num_cols; col++) {
            __m256 weight = vec_load_weights(dtype, tile->weight_rows[col] + k * weight_bytes);
            weight = masked ? _mm256_and_ps(weight, mask) : weight;
            VEC_UNROLL
            for (int row = 0; row < num_rows; row++) {
                __m256 *sum = &sums[row * num_cols + col];
                *sum = _mm256_fmadd_ps(wide[row], weight, *sum);
            }
        }
    } else {
        VEC_UNROLL
        for (int col = 0; col < num_cols; col++) {
            __m256 weight = vec_load_weights(dtype, tile->weight_rows[col] + k * weight_bytes);
            wide[col] = masked ? _mm256_and_ps(weight, mask) : weight;
        }
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            __m256 a = _mm256_loadu_ps(tile->a + row * tile->a_stride + k);
            a = vec_keep(masked ? _mm256_and_ps(a, mask) : a);
            VEC_UNROLL
            for (int col = 0; col < num_cols; col++) {
                __m256 *sum = &sums[row * num_cols + col];
                *sum = _mm256_fmadd_ps(a, wide[col], *sum);
            }
        }
    }
}

/* num_elements >= 8. The tail is the row's last eight elements with those already added cleared, so
 * that nothing outside of the row is read. */
VEC_INLINE void tile_compute(const struct dot_tile *tile, enum dtype dtype, int num_rows,
                             int num_cols, float *results)
{
    int64_t weight_bytes = dtype == DTYPE_F32 ? 4 : 2;
    int64_t num_elements = tile->num_elements;
    int64_t line_elements = LINE_BYTES / weight_bytes;
    __m256 sums[DOT_TILE_MAX_SUMS];
    __m256 all = _mm256_setzero_ps();
    VEC_UNROLL
    for (int idx = 0; idx < num_rows * num_cols; idx++) {
        sums[idx] = _mm256_setzero_ps();
    }
    int64_t k = 0;
    if (num_cols >= 2) {
        /* While these rows are read, the cache lines of the next tile's rows are brought into L2 in
         * the order of their addresses, which suits both DRAM and the hardware prefetcher; L1 would
         * not hold them. Without it one row of 896 bf16 ran at 10 instead of 23 GB/s. */
        for (; k + line_elements <= num_elements; k += line_elements) {
            int64_t region_offset = k * weight_bytes * (num_cols / 2);
            VEC_UNROLL
            for (int col = 0; col < num_cols; col++) {
                uintptr_t ahead = tile->prefetch_regions[2 * col / num_cols] +
                                  (uintptr_t)(region_offset + col % (num_cols / 2) * LINE_BYTES);
                _mm_prefetch((const char *)ahead, _MM_HINT_T1);
            }
            for (int64_t step = 0; step < line_elements; step += VEC_LANES) {
                tile_step(tile, dtype, num_rows, num_cols, k + step, false, all, sums);
            }
        }
    }
    for (; k + VEC_LANES <= num_elements; k += VEC_LANES) {
        tile_step(tile, dtype, num_rows, num_cols, k, false, all, sums);
    }
    if (k < num_elements) {
        int32_t num_added = VEC_LANES - (int32_t)(num_elements - k);
        __m256i added = vec_mask_low(num_added);
        __m256 rest = _mm256_castsi256_ps(_mm256_xor_si256(added, _mm256_set1_epi32(-1)));
        tile_step(tile, dtype, num_rows, num_cols, num_elements - VEC_LANES, true, rest, sums);
    }
    int idx = 0;
    VEC_UNROLL
    for (; idx + 4 <= num_rows * num_cols; idx += 4) {
        _mm_storeu_ps(results + idx,
                      vec_sums_of_4(sums[idx], sums[idx + 1], sums[idx + 2], sums[idx + 3]));
    }
    VEC_UNROLL
    for (; idx < num_rows * num_cols; idx++) {
        results[idx] = vec_sum(sums[idx]);
    }
}

typedef void tile_fn(const struct dot_tile *tile, float *results);

#define DEFINE_TILE(dtype, num_rows, num_cols)                                      \
    static void tile_##dtype##_##num_rows##x##num_cols(const struct dot_tile *tile, \
                                                       float *results)              \
    {                                                                               \
        tile_compute(tile, DTYPE_##dtype, num_rows, num_cols, results);             \
    }
#define DEFINE_TILES(num_rows, num_cols)  \
    DEFINE_TILE(BF16, num_rows, num_cols) \
    DEFINE_TILE(F16, num_rows, num_cols)  \
    DEFINE_TILE(F32, num_rows, num_cols)
DOT_TILE_SHAPES(DEFINE_TILES)

#define TILE_ENTRIES(num_rows, num_cols)                                  \
    [DTYPE_BF16][num_rows][num_cols] = tile_BF16_##num_rows##x##num_cols, \
    [DTYPE_F16][num_rows][num_cols] = tile_F16_##num_rows##x##num_cols,   \
    [DTYPE_F32][num_rows][num_cols] = tile_F32_##num_rows##x##num_cols,
static tile_fn *const tiles[DTYPE_COUNT][DOT_TILE_MAX_ROWS + 1][DOT_TILE_MAX_COLS + 1] = {
    DOT_TILE_SHAPES(TILE_ENTRIES)};

int32_t dot_tile_rows(int32_t num_rows)
{
    switch (num_rows) {
    case 1:
    case 2:
    case 3:
    case 4:
        return num_rows;
    case 5: /* 3 + 2 */
        return 3;
    default:
        return DOT_TILE_MAX_ROWS;
    }
}

int32_t dot_tile_cols(int32_t num_rows)
{
    return num_rows == 1 ? 8 : num_rows <= 3 ? 4 : 2;
}

int64_t dot_tile_cols_ahead(int32_t num_cols, int64_t row_bytes)
{
    /* Two tiles if both fit L2 with room to spare: measured 23 GB/s with two and 21 with one, 8
     * rows of 896 bf16, on an EPYC 9004 core that reads 28. */
    return num_cols * row_bytes <= 64 * 1024 ? 2 * num_cols : num_cols;
}

int64_t dot_tile_panel_cols(int64_t panel_bytes, int64_t row_bytes)
{
    int64_t num_cols = panel_bytes / row_bytes / 8 * 8;
    return num_cols < 8 ? 8 : num_cols;
}

/* Rows shorter than one vector: computed on copies padded with zeros. */
static void compute_short(const struct dot_tile *tile, tile_fn *fn, float *sums)
{
    float a[DOT_TILE_MAX_ROWS][VEC_LANES] = {{0.0f}};
    unsigned char weights[DOT_TILE_MAX_COLS][VEC_LANES * sizeof(float)] = {{0}};
    struct dot_tile padded = *tile;
    for (int32_t row = 0; row < tile->num_rows; row++) {
        memcpy(a[row], tile->a + row * tile->a_stride, (size_t)tile->num_elements * sizeof(float));
    }
    for (int32_t col = 0; col < tile->num_cols; col++) {
        memcpy(weights[col], tile->weight_rows[col],
               (size_t)tile->num_elements * dtype_block_bytes(tile->dtype));
        padded.weight_rows[col] = weights[col];
    }
    padded.a = a[0];
    padded.a_stride = VEC_LANES;
    padded.num_elements = VEC_LANES;
    fn(&padded, sums);
}

void dot_tile_compute(const struct dot_tile *tile, float *sums)
{
    tile_fn *fn = tiles[tile->dtype][tile->num_rows][tile->num_cols];
    assert(fn != NULL);
    if (tile->num_elements < VEC_LANES) {
        compute_short(tile, fn, sums);
    } else {
        fn(tile, sums);
    }
}

#endif
