/* SPDX-License-Identifier: Apache-2.0 */
/* Weights are read from memory once: a panel of columns that fits L2 meets all tokens before the
 * next panel comes. Inside a panel, the few rows of activations of a tile stay in L1 while the
 * panel's weights pass by. */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/dot_tile_avx2.h"
#include "ops/ref/ref_kernels.h"

#define PANEL_BYTES (256 * 1024) /* half of the smallest L2 in use, 512 KiB */

static void store_tile(const struct linear_params *params, const struct dot_tile *tile,
                       const float *sums, int64_t token, int64_t col)
{
    for (int32_t row_idx = 0; row_idx < tile->num_rows; row_idx++) {
        for (int32_t col_idx = 0; col_idx < tile->num_cols; col_idx++) {
            float sum = sums[row_idx * tile->num_cols + col_idx];
            int64_t d_idx = (token + row_idx) * params->d_stride + col + col_idx;
            if (params->bias != NULL) {
                sum += params->bias[col + col_idx];
            }
            if (params->residual != NULL) {
                sum += params->residual[d_idx];
            }
            params->d[d_idx] = sum;
        }
    }
}

/* Columns [begin, end) of the tokens of one tile. */
static void compute_columns(const struct linear_params *params, struct dot_tile *tile,
                            int64_t token, int64_t begin, int64_t end)
{
    int64_t row_bytes = params->in_features * (int64_t)dtype_block_bytes(params->weight.dtype);
    int32_t widest = dot_tile_cols(tile->num_rows);
    int64_t cols_ahead = dot_tile_cols_ahead(widest, row_bytes);
    float sums[DOT_TILE_MAX_SUMS];
    for (int64_t col = begin; col < end; col += tile->num_cols) {
        int64_t num_left = end - col;
        tile->num_cols = num_left >= widest ? widest : num_left >= 2 ? 2 : 1;
        const unsigned char *row = (const unsigned char *)params->weight.elements + col * row_bytes;
        for (int32_t col_idx = 0; col_idx < tile->num_cols; col_idx++) {
            tile->weight_rows[col_idx] = row + col_idx * row_bytes;
        }
        tile->prefetch_regions[0] = (uintptr_t)row + (uintptr_t)(cols_ahead * row_bytes);
        tile->prefetch_regions[1] = tile->prefetch_regions[0] + (uintptr_t)(widest / 2 * row_bytes);
        dot_tile_compute(tile, sums);
        store_tile(params, tile, sums, token, col);
    }
}

void avx2_linear(const struct linear_params *params, const struct quant_rows *quant_rows,
                 int64_t begin, int64_t end)
{
    if (dtype_is_quantized(params->weight.dtype)) {
        ref_linear(params, quant_rows, begin, end);
        return;
    }
    struct dot_tile tile = {.a_stride = params->a_stride,
                            .dtype = params->weight.dtype,
                            .num_elements = params->in_features};
    int64_t panel_cols = dot_tile_panel_cols(
        PANEL_BYTES, params->in_features * (int64_t)dtype_block_bytes(params->weight.dtype));
    for (int64_t panel = begin; panel < end; panel += panel_cols) {
        int64_t panel_end = end - panel < panel_cols ? end : panel + panel_cols;
        for (int32_t token = 0; token < params->num_tokens; token += tile.num_rows) {
            tile.num_rows = dot_tile_rows(params->num_tokens - token);
            tile.a = params->a + token * params->a_stride;
            compute_columns(params, &tile, token, panel, panel_end);
        }
    }
}

#endif
