/* SPDX-License-Identifier: Apache-2.0 */
/* Each tile takes gate rows and up rows of the same columns, so the activations are read once for
 * both; eight columns of one token at a time then go through SiLU and the product in registers.
 * Panels as in linear_avx2.c. */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/dot_tile_avx2.h"
#include "ops/cpu/vec_avx2.h"
#include "ops/ref/ref_kernels.h"

#define PANEL_BYTES (128 * 1024) /* of gate and as much of up */

/* Products of up to eight columns: the sums of gate and up of each token of the tile. */
struct group {
    float gate[DOT_TILE_MAX_ROWS][VEC_LANES];
    float up[DOT_TILE_MAX_ROWS][VEC_LANES];
};

static void compute_group(const struct gemm_swiglu_params *params, struct dot_tile *tile,
                          int64_t col, int32_t num_group_cols, struct group *group)
{
    int64_t row_bytes = params->hidden_size * (int64_t)dtype_block_bytes(tile->dtype);
    int32_t widest_pairs = dot_tile_cols(tile->num_rows) / 2;
    int64_t bytes_ahead = dot_tile_cols_ahead(widest_pairs, row_bytes) * row_bytes;
    const unsigned char *gate = (const unsigned char *)params->gate.elements + col * row_bytes;
    const unsigned char *up = (const unsigned char *)params->up.elements + col * row_bytes;
    float sums[DOT_TILE_MAX_SUMS];
    int32_t num_pairs;
    for (int32_t first = 0; first < num_group_cols; first += num_pairs) {
        num_pairs = num_group_cols - first >= widest_pairs ? widest_pairs : 1;
        tile->num_cols = 2 * num_pairs;
        for (int32_t pair = 0; pair < num_pairs; pair++) {
            tile->weight_rows[pair] = gate + (first + pair) * row_bytes;
            tile->weight_rows[num_pairs + pair] = up + (first + pair) * row_bytes;
        }
        tile->prefetch_regions[0] = (uintptr_t)tile->weight_rows[0] + (uintptr_t)bytes_ahead;
        tile->prefetch_regions[1] =
            (uintptr_t)tile->weight_rows[num_pairs] + (uintptr_t)bytes_ahead;
        dot_tile_compute(tile, sums);
        for (int32_t row = 0; row < tile->num_rows; row++) {
            const float *row_sums = sums + row * tile->num_cols;
            for (int32_t pair = 0; pair < num_pairs; pair++) {
                group->gate[row][first + pair] = row_sums[pair];
                group->up[row][first + pair] = row_sums[num_pairs + pair];
            }
        }
    }
}

static __m256 load_bias(const float *bias, int64_t col, __m256i mask)
{
    return bias == NULL ? _mm256_setzero_ps() : _mm256_maskload_ps(bias + col, mask);
}

void avx2_gemm_swiglu(const struct gemm_swiglu_params *params, const struct quant_rows *quant_rows,
                      int64_t begin, int64_t end)
{
    /* A tile has one dtype; no checkpoint known mixes plain ones. */
    if (params->gate.dtype != params->up.dtype || dtype_is_quantized(params->gate.dtype)) {
        ref_gemm_swiglu(params, quant_rows, begin, end);
        return;
    }
    struct dot_tile tile = {.a_stride = params->hidden_size,
                            .dtype = params->gate.dtype,
                            .num_elements = params->hidden_size};
    int64_t panel_cols = dot_tile_panel_cols(
        PANEL_BYTES, params->hidden_size * (int64_t)dtype_block_bytes(params->gate.dtype));
    struct group group = {0};
    for (int64_t panel = begin; panel < end; panel += panel_cols) {
        int64_t panel_end = end - panel < panel_cols ? end : panel + panel_cols;
        for (int64_t token = 0; token < params->num_tokens; token += tile.num_rows) {
            tile.num_rows = dot_tile_rows((int32_t)(params->num_tokens - token));
            tile.a = params->a + token * params->hidden_size;
            for (int64_t col = panel; col < panel_end; col += VEC_LANES) {
                int64_t num_left = panel_end - col;
                int32_t num_cols = num_left < VEC_LANES ? (int32_t)num_left : VEC_LANES;
                compute_group(params, &tile, col, num_cols, &group);
                __m256i mask = vec_mask_low(num_cols);
                __m256 gate_bias = load_bias(params->gate_bias, col, mask);
                __m256 up_bias = load_bias(params->up_bias, col, mask);
                for (int32_t row = 0; row < tile.num_rows; row++) {
                    __m256 gate = _mm256_add_ps(_mm256_loadu_ps(group.gate[row]), gate_bias);
                    __m256 up = _mm256_add_ps(_mm256_loadu_ps(group.up[row]), up_bias);
                    float *d = params->d + (token + row) * params->intermediate_size + col;
                    _mm256_maskstore_ps(d, mask, _mm256_mul_ps(vec_silu(gate), up));
                }
            }
        }
    }
}

#endif
