/* SPDX-License-Identifier: Apache-2.0 */
/* linear and gemm_swiglu of bf16 weights with activations rounded to bf16.
 *
 * Weights are the left operand, straight out of the mapping: a tile is 32 elements of 16 rows, a
 * row's distance apart. (A block of them is copied first if it lies badly and many tokens meet it.)
 * Activations are the right operand, rounded and packed once for all columns in groups of up to 16
 * tokens: [features / 2][tokens of the group][2], features padded with zeros to whole tiles. A tile
 * of sums is [16 columns][16 tokens], and two weight tiles, a unit, meet two groups of tokens, so
 * that each tile that is loaded is used twice.
 *
 *   for each block of tokens, panel of columns:   their sums stay in scratch memory (L2)
 *     for each block of features, unit:           its weights stay in L1, the next unit's come in
 *       for each pair of groups:                  their activations stream from L2
 *
 * An output's sum runs over its features in ascending order, whatever the number of tokens: a tile
 * product adds 32 of them in an order of its own. Products and sums below 2^-126 become zero. */
#include "ops/cpu/kernels_amx.h"

#if defined(__x86_64__)

#include <stddef.h>
#include <string.h>

#include "ops/cpu/kernels_vnni.h"
#include "ops/cpu/tiles_amx.h"
#include "ops/cpu/vec_avx512.h"

#define STEP_FEATURES 32 /* of one tile product */
#define GROUP_TOKENS BF16_GROUP_TOKENS
#define PANEL_UNITS 8
#define BLOCK_GROUPS 32 /* of tokens */
#define BLOCK_STEPS 8   /* of features, with more than one pair of groups */
#define PREFETCH_STEPS 8

/* Of a unit and a group, columns by tokens, a token a lane; lanes of tokens that are not there hold
 * anything. */
struct sums {
    float tiles[2][TILE_ROWS][TILE_LANES];
};

#define MAX_SUMS_BYTES (PANEL_UNITS * BLOCK_GROUPS * sizeof(struct sums))
/* Tiles [weight tile][step of a block]. */
#define PACKED_UNIT_BYTES (2 * BLOCK_STEPS * TILE_BYTES)

_Static_assert(MAX_SUMS_BYTES + PACKED_UNIT_BYTES <= CPU_SCRATCH_BYTES,
               "the sums of a panel and a packed unit");

/* A unit's two weight tiles; num_rows[1] is 0 if there is one. */
struct unit {
    const unsigned char *rows[2];
    int32_t num_rows[2];
};

/* One call of the inner product: steps [first_step, end_step) of a unit and one or two groups. */
struct product {
    struct unit unit;
    int64_t row_bytes, unit_bytes; /* from a row to the next, from a unit to the next */
    int32_t num_features;
    const unsigned char *groups[2]; /* packed */
    int32_t group_tokens[2];        /* 0: there is none */
    int32_t first_step, end_step;
    const unsigned char *packed_unit; /* NULL: weights come from their rows */
    struct sums *sums[2];             /* of the groups; read if first_step > 0 */
    bool prefetch;
};

/* Rows or features that are not there become zeros. packed [TILE_BYTES], 64-byte aligned. */
static void pack_weights(const struct product *product, int tile, int32_t step,
                         unsigned char *packed)
{
    int32_t num_left = product->num_features - step * STEP_FEATURES;
    __mmask32 mask =
        num_left < STEP_FEATURES ? ((__mmask32)1 << num_left) - 1 : (__mmask32)0xffffffff;
    const unsigned char *row = product->unit.rows[tile] + (int64_t)step * TILE_ROW_BYTES;
    for (int32_t i = 0; i < TILE_ROWS; i++) {
        __m512i elements = _mm512_setzero_si512();
        if (i < product->unit.num_rows[tile]) {
            elements = _mm512_maskz_loadu_epi16(mask, row + i * product->row_bytes);
        }
        _mm512_store_si512(packed + i * TILE_ROW_BYTES, elements);
    }
}

/* Steps [first_step, end_step), at most BLOCK_STEPS, of a unit, aligned and in the order of use. */
static void pack_unit(const struct product *product, unsigned char *packed)
{
    for (int tile = 0; tile < (product->unit.num_rows[1] > 0 ? 2 : 1); tile++) {
        for (int32_t step = product->first_step; step < product->end_step; step++) {
            pack_weights(product, tile, step,
                         packed + (tile * BLOCK_STEPS + step - product->first_step) * TILE_BYTES);
        }
    }
    tile_fence();
}

/* Tile loads of rows that cross cache lines take twice the time, and rows that are a multiple of
 * 2048 bytes apart push each other out of L1 (48 KiB of 12 ways). */
static bool unit_packs(const struct product *product)
{
    uintptr_t first = (uintptr_t)product->unit.rows[0], second = (uintptr_t)product->unit.rows[1];
    uintptr_t row_bytes = (uintptr_t)product->row_bytes;
    return (first | second | row_bytes) % TILE_ROW_BYTES != 0 || row_bytes % 2048 == 0;
}

/* The same rows a few steps further, or where the next unit begins. */
TILE_INLINE void prefetch_rows(const struct product *product, int num_weight_tiles, int32_t step)
{
    int64_t ahead = (int64_t)(step + PREFETCH_STEPS) * TILE_ROW_BYTES;
    if (step + PREFETCH_STEPS >= product->end_step) {
        int32_t step_of_next = step + PREFETCH_STEPS - product->end_step + product->first_step;
        ahead = product->unit_bytes + (int64_t)step_of_next * TILE_ROW_BYTES;
    }
    for (int tile = 0; tile < num_weight_tiles; tile++) {
        uintptr_t at = (uintptr_t)product->unit.rows[tile] + (uintptr_t)ahead;
        for (int i = 0; i < TILE_ROWS; i++, at += (uintptr_t)product->row_bytes) {
            _mm_prefetch((const void *)at, _MM_HINT_T0);
        }
    }
}

#define SUM_00 0 /* of weight tile 0 and group 0 */
#define SUM_01 1
#define SUM_10 2
#define SUM_11 3
#define WEIGHTS_0 4
#define WEIGHTS_1 5
#define GROUP_0 6
#define GROUP_1 7

/* Inlined with constant numbers. Tile registers are named by constants, hence no loops. */
TILE_INLINE void multiply_tiles(const struct product *product, int num_weight_tiles, int num_groups)
{
    struct sums *sums_0 = product->sums[0], *sums_1 = product->sums[1];
    int64_t group_stride_0 = product->group_tokens[0] * (int64_t)sizeof(float);
    int64_t group_stride_1 = product->group_tokens[1] * (int64_t)sizeof(float);
    _Alignas(64) unsigned char edges[2][TILE_BYTES];
    int32_t num_whole_steps = product->num_features / STEP_FEATURES;
    bool is_edge = product->unit.num_rows[num_weight_tiles - 1] < TILE_ROWS;
    if (product->first_step == 0) {
        _tile_zero(SUM_00);
        _tile_zero(SUM_01);
        _tile_zero(SUM_10);
        _tile_zero(SUM_11);
    } else {
        tile_fence();
        _tile_loadd(SUM_00, sums_0->tiles[0], TILE_ROW_BYTES);
        if (num_groups == 2) {
            _tile_loadd(SUM_01, sums_1->tiles[0], TILE_ROW_BYTES);
        }
        if (num_weight_tiles == 2) {
            _tile_loadd(SUM_10, sums_0->tiles[1], TILE_ROW_BYTES);
        }
        if (num_weight_tiles == 2 && num_groups == 2) {
            _tile_loadd(SUM_11, sums_1->tiles[1], TILE_ROW_BYTES);
        }
    }
    for (int32_t step = product->first_step; step < product->end_step; step++) {
        const unsigned char *weights_0 = product->unit.rows[0] + (int64_t)step * TILE_ROW_BYTES;
        const unsigned char *weights_1 = product->unit.rows[1] + (int64_t)step * TILE_ROW_BYTES;
        int64_t stride = product->row_bytes;
        if (product->packed_unit != NULL) {
            weights_0 = product->packed_unit + (step - product->first_step) * TILE_BYTES;
            weights_1 = weights_0 + BLOCK_STEPS * TILE_BYTES;
            stride = TILE_ROW_BYTES;
        } else if (is_edge || step >= num_whole_steps) {
            pack_weights(product, 0, step, edges[0]);
            if (num_weight_tiles == 2) {
                pack_weights(product, 1, step, edges[1]);
            }
            tile_fence();
            weights_0 = edges[0];
            weights_1 = edges[1];
            stride = TILE_ROW_BYTES;
        }
        _tile_loadd(WEIGHTS_0, weights_0, stride);
        _tile_loadd(GROUP_0, product->groups[0] + step * TILE_ROWS * group_stride_0,
                    group_stride_0);
        _tile_dpbf16ps(SUM_00, WEIGHTS_0, GROUP_0);
        if (num_groups == 2) {
            _tile_loadd(GROUP_1, product->groups[1] + step * TILE_ROWS * group_stride_1,
                        group_stride_1);
            _tile_dpbf16ps(SUM_01, WEIGHTS_0, GROUP_1);
        }
        if (num_weight_tiles == 2) {
            _tile_loadd(WEIGHTS_1, weights_1, stride);
            _tile_dpbf16ps(SUM_10, WEIGHTS_1, GROUP_0);
        }
        if (num_weight_tiles == 2 && num_groups == 2) {
            _tile_dpbf16ps(SUM_11, WEIGHTS_1, GROUP_1);
        }
        if (product->prefetch) {
            prefetch_rows(product, num_weight_tiles, step);
        }
    }
    _tile_stored(SUM_00, sums_0->tiles[0], TILE_ROW_BYTES);
    if (num_groups == 2) {
        _tile_stored(SUM_01, sums_1->tiles[0], TILE_ROW_BYTES);
    }
    if (num_weight_tiles == 2) {
        _tile_stored(SUM_10, sums_0->tiles[1], TILE_ROW_BYTES);
    }
    if (num_weight_tiles == 2 && num_groups == 2) {
        _tile_stored(SUM_11, sums_1->tiles[1], TILE_ROW_BYTES);
    }
}

static void multiply(const struct product *product)
{
    bool has_two_tiles = product->unit.num_rows[1] > 0;
    if (product->group_tokens[1] > 0) {
        if (has_two_tiles) {
            multiply_tiles(product, 2, 2);
        } else {
            multiply_tiles(product, 1, 2);
        }
    } else if (has_two_tiles) {
        multiply_tiles(product, 2, 1);
    } else {
        multiply_tiles(product, 1, 1);
    }
}

/* Tiles of sums and groups get the width of the groups. */
static void load_shapes(const int32_t group_tokens[2])
{
    struct tile_shapes shapes = {.palette = 1};
    for (int group = 0; group < 2; group++) {
        int32_t row_bytes = group_tokens[group] * (int32_t)sizeof(float);
        if (row_bytes > 0) {
            tile_shape_set(&shapes, SUM_00 + group, TILE_ROWS, row_bytes);
            tile_shape_set(&shapes, SUM_10 + group, TILE_ROWS, row_bytes);
            tile_shape_set(&shapes, GROUP_0 + group, TILE_ROWS, row_bytes);
        } else {
            /* zeroed all the same */
            tile_shape_set(&shapes, SUM_00 + group, TILE_ROWS, TILE_ROW_BYTES);
            tile_shape_set(&shapes, SUM_10 + group, TILE_ROWS, TILE_ROW_BYTES);
        }
        tile_shape_set(&shapes, WEIGHTS_0 + group, TILE_ROWS, TILE_ROW_BYTES);
    }
    tile_fence();
    _tile_loadconfig(&shapes);
}

/* What both ops are to the loops: matrices cut into units of columns. */
struct matrix {
    const unsigned char *weights[2]; /* of column 0: gate and up, or the same twice */
    bool is_pair;                    /* gate and up: a unit is 16 columns of both; else 32 */
    int64_t row_bytes;
    int32_t num_features, num_tokens;
    const unsigned char *packed;
};

static int32_t unit_cols(const struct matrix *matrix)
{
    return matrix->is_pair ? TILE_ROWS : 2 * TILE_ROWS;
}

static int32_t at_most(int64_t count, int32_t limit)
{
    return count < limit ? (int32_t)count : limit;
}

static struct unit unit_at(const struct matrix *matrix, int64_t col, int64_t end)
{
    struct unit unit;
    int64_t num_left = end - col;
    unit.rows[0] = matrix->weights[0] + col * matrix->row_bytes;
    unit.num_rows[0] = at_most(num_left, TILE_ROWS);
    if (matrix->is_pair) {
        unit.rows[1] = matrix->weights[1] + col * matrix->row_bytes;
        unit.num_rows[1] = unit.num_rows[0];
    } else {
        unit.num_rows[1] = num_left > TILE_ROWS ? at_most(num_left - TILE_ROWS, TILE_ROWS) : 0;
        unit.rows[1] = unit.rows[0] + (num_left > TILE_ROWS ? TILE_ROWS * matrix->row_bytes : 0);
    }
    return unit;
}

static int32_t tokens_of_group(const struct matrix *matrix, int32_t group)
{
    return at_most((int64_t)matrix->num_tokens - (int64_t)group * GROUP_TOKENS, GROUP_TOKENS);
}

/* The sums of columns [begin, end), at most a panel, and groups [first_group, end_group), at most a
 * block: sums[unit][group - first_group]. packed_unit [PACKED_UNIT_BYTES] */
static void multiply_panel(const struct matrix *matrix, int64_t begin, int64_t end,
                           int32_t first_group, int32_t end_group, struct sums *sums,
                           unsigned char *packed_unit)
{
    int32_t num_groups = end_group - first_group;
    int32_t num_steps = (matrix->num_features + STEP_FEATURES - 1) / STEP_FEATURES;
    int32_t block_steps = num_groups > 2 ? BLOCK_STEPS : num_steps;
    int64_t group_bytes = (int64_t)num_steps * GROUP_TOKENS * STEP_FEATURES * 2;
    struct product product = {.row_bytes = matrix->row_bytes,
                              .unit_bytes = unit_cols(matrix) * matrix->row_bytes,
                              .num_features = matrix->num_features};
    for (int32_t step = 0; step < num_steps; step += block_steps) {
        product.first_step = step;
        product.end_step = step + at_most(num_steps - step, block_steps);
        struct sums *unit_sums = sums;
        for (int64_t col = begin; col < end; col += unit_cols(matrix), unit_sums += num_groups) {
            product.unit = unit_at(matrix, col, end);
            product.packed_unit = NULL;
            if (num_groups > 2 && unit_packs(&product)) {
                pack_unit(&product, packed_unit);
                product.packed_unit = packed_unit;
            }
            for (int32_t group = first_group; group < end_group; group += 2) {
                bool has_second = group + 1 < end_group;
                int32_t group_tokens[2] = {tokens_of_group(matrix, group),
                                           has_second ? tokens_of_group(matrix, group + 1) : 0};
                if (memcmp(group_tokens, product.group_tokens, sizeof(group_tokens)) != 0) {
                    memcpy(product.group_tokens, group_tokens, sizeof(group_tokens));
                    load_shapes(group_tokens);
                }
                product.groups[0] = matrix->packed + group * group_bytes;
                product.groups[1] = product.groups[0] + (has_second ? group_bytes : 0);
                product.sums[0] = unit_sums + (group - first_group);
                product.sums[1] = product.sums[0] + has_second;
                product.prefetch = group == first_group;
                multiply(&product);
            }
        }
    }
}

static void store_linear(const struct linear_params *params, float tile[TILE_ROWS][TILE_LANES],
                         int64_t token, int32_t num_tokens, int64_t col, int32_t num_cols)
{
    __mmask16 mask = vec_mask_low(num_cols);
    __m512 bias = params->bias == NULL ? _mm512_setzero_ps()
                                       : _mm512_maskz_loadu_ps(mask, params->bias + col);
    __m512 rows[4];
    for (int32_t i = 0; i < num_tokens; i++) {
        int64_t d_idx = (token + i) * params->d_stride + col;
        if (i % 4 == 0) {
            tile_transpose_quad(tile[0], i / 4, rows);
        }
        __m512 sum = params->bias == NULL ? rows[i % 4] : _mm512_add_ps(rows[i % 4], bias);
        if (params->residual != NULL) {
            sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, params->residual + d_idx));
        }
        _mm512_mask_storeu_ps(params->d + d_idx, mask, sum);
    }
}

void amx_bf16_linear(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                     int64_t end)
{
    if (params->weight.dtype != DTYPE_BF16) {
        vnni_linear(params, work, begin, end);
        return;
    }
    struct matrix matrix = {.weights = {params->weight.elements, params->weight.elements},
                            .row_bytes = params->in_features * (int64_t)sizeof(uint16_t),
                            .num_features = params->in_features,
                            .num_tokens = params->num_tokens,
                            .packed = work->quant_rows->bf16_groups};
    struct sums *sums = (struct sums *)(void *)work->scratch;
    int64_t panel_cols = (int64_t)PANEL_UNITS * unit_cols(&matrix);
    int32_t num_groups = (params->num_tokens + GROUP_TOKENS - 1) / GROUP_TOKENS;
    for (int32_t first = 0; first < num_groups; first += BLOCK_GROUPS) {
        int32_t num_block_groups = at_most(num_groups - first, BLOCK_GROUPS);
        for (int64_t panel = begin; panel < end; panel += panel_cols) {
            int64_t panel_end = end - panel < panel_cols ? end : panel + panel_cols;
            multiply_panel(&matrix, panel, panel_end, first, first + num_block_groups, sums,
                           work->scratch + MAX_SUMS_BYTES);
            struct sums *unit_sums = sums;
            for (int64_t col = panel; col < panel_end; col += TILE_ROWS) {
                for (int32_t group = 0; group < num_block_groups; group++) {
                    store_linear(params, unit_sums[group].tiles[(col - panel) / TILE_ROWS % 2],
                                 (int64_t)(first + group) * GROUP_TOKENS,
                                 tokens_of_group(&matrix, first + group), col,
                                 at_most(panel_end - col, TILE_ROWS));
                }
                unit_sums += (col - panel) / TILE_ROWS % 2 == 1 ? num_block_groups : 0;
            }
        }
    }
    _tile_release();
}

/* Gate becomes silu(gate) * up, a column at a time, then rows of tokens. */
static void store_swiglu(const struct gemm_swiglu_params *params, struct sums *sums, int64_t token,
                         int32_t num_tokens, int64_t col, int32_t num_cols)
{
    __mmask16 mask = vec_mask_low(num_cols);
    __m512 rows[4];
    for (int32_t i = 0; i < num_cols; i++) {
        float gate_bias = params->gate_bias == NULL ? 0.0f : params->gate_bias[col + i];
        float up_bias = params->up_bias == NULL ? 0.0f : params->up_bias[col + i];
        __m512 gate = _mm512_add_ps(_mm512_load_ps(sums->tiles[0][i]), _mm512_set1_ps(gate_bias));
        __m512 up = _mm512_add_ps(_mm512_load_ps(sums->tiles[1][i]), _mm512_set1_ps(up_bias));
        _mm512_store_ps(sums->tiles[0][i], _mm512_mul_ps(vec_silu(gate), up));
    }
    for (int32_t i = 0; i < num_tokens; i++) {
        if (i % 4 == 0) {
            tile_transpose_quad(sums->tiles[0][0], i / 4, rows);
        }
        _mm512_mask_storeu_ps(params->d + (token + i) * params->intermediate_size + col, mask,
                              rows[i % 4]);
    }
}

void amx_bf16_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                          int64_t begin, int64_t end)
{
    if (params->gate.dtype != DTYPE_BF16 || params->up.dtype != DTYPE_BF16) {
        vnni_gemm_swiglu(params, work, begin, end);
        return;
    }
    struct matrix matrix = {.weights = {params->gate.elements, params->up.elements},
                            .is_pair = true,
                            .row_bytes = params->hidden_size * (int64_t)sizeof(uint16_t),
                            .num_features = params->hidden_size,
                            .num_tokens = params->num_tokens,
                            .packed = work->quant_rows->bf16_groups};
    struct sums *sums = (struct sums *)(void *)work->scratch;
    int64_t panel_cols = (int64_t)PANEL_UNITS * unit_cols(&matrix);
    int32_t num_groups = (params->num_tokens + GROUP_TOKENS - 1) / GROUP_TOKENS;
    for (int32_t first = 0; first < num_groups; first += BLOCK_GROUPS) {
        int32_t num_block_groups = at_most(num_groups - first, BLOCK_GROUPS);
        for (int64_t panel = begin; panel < end; panel += panel_cols) {
            int64_t panel_end = end - panel < panel_cols ? end : panel + panel_cols;
            multiply_panel(&matrix, panel, panel_end, first, first + num_block_groups, sums,
                           work->scratch + MAX_SUMS_BYTES);
            struct sums *unit_sums = sums;
            for (int64_t col = panel; col < panel_end; col += TILE_ROWS) {
                for (int32_t group = 0; group < num_block_groups; group++) {
                    store_swiglu(params, &unit_sums[group], (int64_t)(first + group) * GROUP_TOKENS,
                                 tokens_of_group(&matrix, first + group), col,
                                 at_most(panel_end - col, TILE_ROWS));
                }
                unit_sums += num_block_groups;
            }
        }
    }
    _tile_release();
}

/* ---- activations ------------------------------------------------------------------------------*/

/* 32 activations in the order of their row. */
static __m512i round_step(const float *a, int32_t num_left)
{
    __m512 low = _mm512_maskz_loadu_ps(vec_mask_low(num_left), a);
    __m512 high = _mm512_setzero_ps();
    if (num_left > TILE_LANES) {
        high = _mm512_maskz_loadu_ps(vec_mask_low(num_left - TILE_LANES), a + TILE_LANES);
    }
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

void amx_bf16_pack(const float *a, int64_t a_stride, int32_t num_tokens, int32_t num_features,
                   unsigned char *packed)
{
    float rounded[TILE_ROWS][TILE_LANES]; /* [token][pair of features], in the bits of a float */
    __mmask16 mask = vec_mask_low(num_tokens);
    int64_t pair_bytes = num_tokens * (int64_t)sizeof(float);
    memset(rounded, 0, sizeof(rounded));
    for (int32_t feature = 0; feature < num_features; feature += STEP_FEATURES) {
        int32_t num_left = num_features - feature;
        if (num_tokens == 1) {
            _mm512_storeu_si512(packed, round_step(a + feature, num_left));
            packed += TILE_ROW_BYTES;
            continue;
        }
        for (int32_t token = 0; token < num_tokens; token++) {
            _mm512_storeu_si512(rounded[token],
                                round_step(a + token * a_stride + feature, num_left));
        }
        for (int quad = 0; quad < 4; quad++) {
            __m512 pairs[4];
            tile_transpose_quad(rounded[0], quad, pairs);
            for (int i = 0; i < 4; i++, packed += pair_bytes) {
                _mm512_mask_storeu_ps(packed, mask, pairs[i]);
            }
        }
    }
}

#endif
