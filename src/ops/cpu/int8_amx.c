/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised weights in blocks of 32 that meet 16 rows of activations or more; fewer rows, and other
 * formats, go where VNNI sends them. The integer sums of a block are exact and everything after
 * them is computed as in quant_product_vnni.c, so results are its, bit for bit: a row decoded alone
 * there equals the same row of a prefill here.
 *
 * Activations are the left operand, straight out of their blocks: a tile is 32 elements of 16 rows.
 * Weights are the right operand, in the panels of quant_panel_vnni.h. A tile of sums, [16
 * rows][16 columns], passes through a buffer in L1 to the vector registers. The tiles of two steps
 * are under way while those of a third are converted and scaled. */
#include "ops/cpu/kernels_amx.h"

#if defined(__x86_64__)

#include <stddef.h>
#include <string.h>

#include "ops/cpu/kernels_vnni.h"
#include "ops/cpu/quant_panel_vnni.h"
#include "ops/cpu/quant_product_vnni.h"
#include "ops/cpu/tiles_amx.h"
#include "ops/ref/ref_kernels.h"

#define BLOCK_ELEMENTS 32
#define NUM_SLOTS 4 /* tiles of sums, and their buffers */
#define LAG 2       /* steps from the product of a tile to its use; below NUM_SLOTS */

#define ROWS_EVEN 4 /* of activations */
#define ROWS_ODD 5
#define WEIGHTS_EVEN 6
#define WEIGHTS_ODD 7

/* A block of a panel and the rows that meet it. The last rows of a run are the last 16, of which
 * those before first_new have been there before. */
struct step {
    int32_t row, first_new;
    int32_t panel;
    int64_t idx; /* of the block in the panel */
};

static void next_step(const struct vnni_tile_run *run, struct step *step)
{
    if (++step->idx < run->num_blocks) {
        return;
    }
    step->idx = 0;
    if (++step->panel < run->num_panels) {
        return;
    }
    step->panel = 0;
    int32_t row = step->row + TILE_ROWS;
    step->row = row + TILE_ROWS <= run->num_rows ? row : run->num_rows - TILE_ROWS;
    step->first_new = row - step->row;
}

/* has_min is a constant. */
TILE_INLINE unsigned char *weights_of(bool has_min, const struct vnni_tile_run *run,
                                      const struct step *step)
{
    return run->panels[step->panel] +
           step->idx * panel_vectors(has_min ? PANEL_MIN : PANEL_OFFSET) * TILE_ROW_BYTES;
}

TILE_INLINE const struct q8_activations *activations_of(const struct vnni_tile_run *run,
                                                        const struct step *step)
{
    const unsigned char *row = run->activations + step->row * run->activation_row_bytes;
    return (const struct q8_activations *)(const void *)row + run->block + step->idx;
}

#define MULTIPLY(slot, rows, weights_tile)                                          \
    do {                                                                            \
        _tile_loadd(rows, activations_of(run, step)->q, run->activation_row_bytes); \
        _tile_loadd(weights_tile, weights, TILE_ROW_BYTES);                         \
        _tile_zero(slot);                                                           \
        _tile_dpbssd(slot, rows, weights_tile);                                     \
        _tile_stored(slot, products, TILE_ROW_BYTES);                               \
    } while (false)

/* slot and has_min are constants. */
TILE_INLINE void multiply(int slot, bool has_min, const struct vnni_tile_run *run,
                          const struct step *step, int32_t products[TILE_ROWS][TILE_LANES])
{
    const unsigned char *weights = weights_of(has_min, run, step);
    switch (slot) {
    case 0:
        MULTIPLY(0, ROWS_EVEN, WEIGHTS_EVEN);
        break;
    case 1:
        MULTIPLY(1, ROWS_ODD, WEIGHTS_ODD);
        break;
    case 2:
        MULTIPLY(2, ROWS_EVEN, WEIGHTS_EVEN);
        break;
    default:
        MULTIPLY(3, ROWS_ODD, WEIGHTS_ODD);
        break;
    }
}

/* A block's integer sums enter acc, which is in memory before the first and after the last block of
 * a panel. has_min is a constant. */
TILE_INLINE void add_products(bool has_min, const struct vnni_tile_run *run,
                              const struct step *step, int32_t products[TILE_ROWS][TILE_LANES],
                              __m512 acc[TILE_ROWS])
{
    const __m512i *weights = (const __m512i *)(const void *)weights_of(has_min, run, step);
    const unsigned char *a = (const unsigned char *)activations_of(run, step);
    float *sums = run->sums + step->row * VNNI_PRODUCT_COLS + step->panel * TILE_LANES;
    __m512 scale = _mm512_castsi512_ps(_mm512_load_si512(weights + 8));
    __m512 min = has_min ? _mm512_castsi512_ps(_mm512_load_si512(weights + 9)) : scale;
    if (step->idx == 0) {
        VEC_UNROLL
        for (int r = 0; r < TILE_ROWS; r++) {
            acc[r] = run->block == 0 ? _mm512_setzero_ps()
                                     : _mm512_load_ps(sums + r * VNNI_PRODUCT_COLS);
        }
    }
    VEC_UNROLL
    for (int r = 0; r < TILE_ROWS; r++) {
        const struct q8_activations *block =
            (const struct q8_activations *)(const void *)(a + r * run->activation_row_bytes);
        __m512 term = _mm512_cvtepi32_ps(_mm512_load_si512(products[r]));
        term = _mm512_mul_ps(term, scale);
        if (has_min) {
            __m512 a_sum = _mm512_cvtepi32_ps(_mm512_set1_epi32(block->sum));
            term = _mm512_fmadd_ps(min, a_sum, term);
        }
        acc[r] = _mm512_fmadd_ps(term, _mm512_set1_ps(block->scale), acc[r]);
    }
    if (step->idx == run->num_blocks - 1) {
        VEC_UNROLL
        for (int r = 0; r < TILE_ROWS; r++) {
            if (r >= step->first_new) {
                _mm512_store_ps(sums + r * VNNI_PRODUCT_COLS, acc[r]);
            }
        }
    }
}

/* All rows pass by the panels. */
TILE_INLINE void run_tiles(bool has_min, const struct vnni_tile_run *run)
{
    _Alignas(64) int32_t products[NUM_SLOTS][TILE_ROWS][TILE_LANES];
    int32_t num_groups = (run->num_rows + TILE_ROWS - 1) / TILE_ROWS, group = 0;
    int64_t num_steps = (int64_t)num_groups * run->num_panels * run->num_blocks;
    struct step ahead = {.row = 0}, step = {.row = 0};
    __m512 acc[TILE_ROWS];
    tile_fence();
    VEC_UNROLL
    for (int r = 0; r < TILE_ROWS; r++) {
        acc[r] = _mm512_setzero_ps();
    }
    for (int64_t idx = 0; idx < num_steps + LAG; idx += NUM_SLOTS) {
        VEC_UNROLL
        for (int slot = 0; slot < NUM_SLOTS; slot++) {
            if (idx + slot < num_steps) {
                multiply(slot, has_min, run, &ahead, products[slot]);
                next_step(run, &ahead);
                if (ahead.panel == 0 && ahead.idx == 0) {
                    vnni_prefetch_part(run, group++, num_groups);
                }
            }
            if (idx + slot >= LAG && idx + slot < num_steps + LAG) {
                add_products(has_min, run, &step, products[(slot + NUM_SLOTS - LAG) % NUM_SLOTS],
                             acc);
                next_step(run, &step);
            }
        }
    }
}

/* The weights of the panels get their sign. */
static void subtract_offset(const struct vnni_tile_run *run)
{
    const __m512i offset = _mm512_set1_epi8((char)(1 << panel_offset_log2(run->dtype)));
    for (struct step step = {.row = 0}; step.panel < run->num_panels; step.panel++) {
        for (step.idx = 0; step.idx < run->num_blocks; step.idx++) {
            __m512i *weights = (__m512i *)(void *)weights_of(false, run, &step);
            for (int i = 0; i < BLOCK_ELEMENTS / 4; i++) {
                weights[i] = _mm512_sub_epi8(weights[i], offset);
            }
        }
    }
}

static void load_shapes(void)
{
    struct tile_shapes shapes = {.palette = 1};
    for (int slot = 0; slot < NUM_SLOTS; slot++) {
        tile_shape_set(&shapes, slot, TILE_ROWS, TILE_ROW_BYTES);
    }
    tile_shape_set(&shapes, ROWS_EVEN, TILE_ROWS, BLOCK_ELEMENTS);
    tile_shape_set(&shapes, ROWS_ODD, TILE_ROWS, BLOCK_ELEMENTS);
    tile_shape_set(&shapes, WEIGHTS_EVEN, BLOCK_ELEMENTS / 4, TILE_ROW_BYTES);
    tile_shape_set(&shapes, WEIGHTS_ODD, BLOCK_ELEMENTS / 4, TILE_ROW_BYTES);
    tile_fence();
    _tile_loadconfig(&shapes);
}

static void tiles_offset(const struct vnni_tile_run *run)
{
    subtract_offset(run);
    run_tiles(false, run);
}

static void tiles_min(const struct vnni_tile_run *run)
{
    run_tiles(true, run);
}

/* A vnni_compute_fn. */
static void compute(const struct vnni_product *product, int64_t row, int32_t num_rows, int64_t col,
                    int32_t num_cols, float *sums, unsigned char *panel)
{
    if (num_rows < TILE_ROWS || dtype_block_elements(product->dtype) != BLOCK_ELEMENTS) {
        vnni_product_compute(product, row, num_rows, col, num_cols, sums, panel);
        return;
    }
    vnni_tiles_fn *tiles = panel_kind(product->dtype) == PANEL_MIN ? tiles_min : tiles_offset;
    load_shapes();
    vnni_product_compute_panels(product, row, num_rows, col, num_cols, sums, panel, tiles);
    _tile_release();
}

void amx_int8_linear(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                     int64_t end)
{
    if (dtype_is_quantized(params->weight.dtype)) {
        vnni_product_linear(compute, params, work, begin, end);
    } else {
        vnni_linear(params, work, begin, end);
    }
}

void amx_int8_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                          int64_t begin, int64_t end)
{
    if (dtype_is_quantized(params->gate.dtype) && dtype_is_quantized(params->up.dtype)) {
        vnni_product_gemm_swiglu(compute, params, work, begin, end);
    } else {
        vnni_gemm_swiglu(params, work, begin, end);
    }
}

#endif
