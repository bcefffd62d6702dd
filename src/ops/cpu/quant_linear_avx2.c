/* SPDX-License-Identifier: Apache-2.0 */
/* linear and gemm_swiglu over quantised weights: strips for few rows, panels for many. */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <stddef.h>
#include <stdint.h>

#include "ops/cpu/quant_tile_avx2.h"
#include "ops/cpu/vec_avx2.h"

/* Weights are prefetched in the order of their addresses while eight rows are read side by side:
 * whole strips ahead, because what is nearer is mostly rows that are being read already, and at
 * least this much. A row times 4,096 x 4,864 Q4_0 came at 18.6 GB/s with 8 KiB ahead and at 22.7
 * with its 21 KiB of a strip (two threads of an EPYC 7003); 896 columns at 19.6 with 4 KB and at
 * 20.5 with 8. */
#define MIN_BYTES_AHEAD 7168
#define LINE_BYTES 64

/* Scratch memory: a panel, then sums; twice as many for gate and up. */
#define SUMS_ELEMENTS (QUANT_PANEL_ROWS * QUANT_PANEL_COLS)
_Static_assert(QUANT_PANEL_BYTES + 2 * SUMS_ELEMENTS * sizeof(float) <= CPU_SCRATCH_BYTES, "");

VEC_INLINE float *sums_of(const struct cpu_work *work)
{
    return (float *)(void *)(work->scratch + QUANT_PANEL_BYTES);
}

static int64_t bytes_ahead(const struct quant_product *product)
{
    int64_t strip_bytes = QUANT_STRIP_COLS * product->weight_row_bytes;
    return (MIN_BYTES_AHEAD + strip_bytes - 1) / strip_bytes * strip_bytes;
}

/* Past the end of the weights it names memory that may not be there, which a prefetch does not
 * mind. */
static uintptr_t address_of(const struct quant_product *product, int64_t col)
{
    return (uintptr_t)product->weights + (uintptr_t)(col * product->weight_row_bytes);
}

/* At the beginning of columns [begin, end): asks for the weights that no strip before it has asked
 * for. */
static void prefetch_first(const struct quant_product *product, int64_t begin, int64_t end)
{
    int64_t num_bytes = (end - begin) * product->weight_row_bytes, ahead = bytes_ahead(product);
    uintptr_t first = address_of(product, begin);
    for (int64_t at = 0; at < num_bytes && at < ahead; at += LINE_BYTES) {
        _mm_prefetch((const char *)(first + (uintptr_t)at), _MM_HINT_T1);
    }
}

VEC_INLINE int32_t smaller_of(int64_t left, int32_t right)
{
    return left < right ? (int32_t)left : right;
}

/* With one row of activations, columns of a matrix that are read before it is the other one's turn:
 * strip by strip, 64 and 128 columns, the fused MLP of Q4_0 ran at 0.97, 0.95 and 0.96 of two
 * products, with 512 at 0.99 (two threads). More rows read a strip again, from L1. */
#define RUN_COLS 512

static int32_t strip_run_cols(int32_t num_tokens)
{
    return num_tokens == 1 ? RUN_COLS : QUANT_STRIP_COLS;
}

/* Columns [col, col + num_cols) of a row of activations. sums [num_cols up to a whole strip] */
static void compute_strips(const struct quant_product *product, int64_t token, int64_t col,
                           int32_t num_cols, float *sums)
{
    uintptr_t ahead = address_of(product, col) + (uintptr_t)bytes_ahead(product);
    uintptr_t strip_bytes = (uintptr_t)(QUANT_STRIP_COLS * product->weight_row_bytes);
    for (int32_t at = 0; at < num_cols; at += QUANT_STRIP_COLS, ahead += strip_bytes) {
        quant_strip(product, token, col + at, smaller_of(num_cols - at, QUANT_STRIP_COLS), ahead,
                    sums + at);
    }
}

/* ---- linear -----------------------------------------------------------------------------------*/

/* Eight columns or fewer of a token. */
VEC_INLINE void store_linear(const struct linear_params *params, int64_t token, int64_t col,
                             int32_t num_cols, __m256 sums)
{
    __m256i mask = vec_mask_low(num_cols);
    int64_t d_idx = token * params->d_stride + col;
    if (params->bias != NULL) {
        sums = _mm256_add_ps(sums, _mm256_maskload_ps(params->bias + col, mask));
    }
    if (params->residual != NULL) {
        sums = _mm256_add_ps(sums, _mm256_maskload_ps(params->residual + d_idx, mask));
    }
    _mm256_maskstore_ps(params->d + d_idx, mask, sums);
}

void avx2_quant_linear(const struct linear_params *params, const struct cpu_work *work,
                       int64_t begin, int64_t end)
{
    struct quant_product product =
        quant_product_of(params->weight, params->in_features, work->quant_rows);
    if (params->num_tokens < quant_panel_min_rows(&product)) {
        prefetch_first(&product, begin, end);
        int32_t run_cols = strip_run_cols(params->num_tokens);
        for (int64_t col = begin; col < end; col += run_cols) {
            int32_t num_cols = smaller_of(end - col, run_cols);
            for (int64_t token = 0; token < params->num_tokens; token++) {
                float sums[RUN_COLS];
                compute_strips(&product, token, col, num_cols, sums);
                for (int32_t at = 0; at < num_cols; at += VEC_LANES) {
                    store_linear(params, token, col + at, smaller_of(num_cols - at, VEC_LANES),
                                 _mm256_loadu_ps(sums + at));
                }
            }
        }
        return;
    }
    float *sums = sums_of(work);
    for (int64_t first = 0; first < params->num_tokens; first += QUANT_PANEL_ROWS) {
        int32_t num_rows = smaller_of(params->num_tokens - first, QUANT_PANEL_ROWS);
        for (int64_t panel = begin; panel < end; panel += QUANT_PANEL_COLS) {
            int32_t panel_cols = smaller_of(end - panel, QUANT_PANEL_COLS);
            quant_panel(&product, first, num_rows, panel, panel_cols, work->scratch, sums);
            for (int32_t row = 0; row < num_rows; row++) {
                for (int32_t col = 0; col < panel_cols; col += VEC_LANES) {
                    store_linear(params, first + row, panel + col,
                                 smaller_of(panel_cols - col, VEC_LANES),
                                 _mm256_load_ps(sums + row * QUANT_PANEL_COLS + col));
                }
            }
        }
    }
}

/* ---- gemm_swiglu ------------------------------------------------------------------------------*/

VEC_INLINE void store_swiglu(const struct gemm_swiglu_params *params, int64_t token, int64_t col,
                             int32_t num_cols, __m256 gate, __m256 up)
{
    __m256i mask = vec_mask_low(num_cols);
    if (params->gate_bias != NULL) {
        gate = _mm256_add_ps(gate, _mm256_maskload_ps(params->gate_bias + col, mask));
    }
    if (params->up_bias != NULL) {
        up = _mm256_add_ps(up, _mm256_maskload_ps(params->up_bias + col, mask));
    }
    _mm256_maskstore_ps(params->d + token * params->intermediate_size + col, mask,
                        _mm256_mul_ps(vec_silu(gate), up));
}

/* One of gate and up is quantised, the other plain: two linears of a few tokens and columns, whose
 * results stay on the stack. */
#define MIXED_TOKENS 32
#define MIXED_COLS 16
static void mixed_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                              int64_t begin, int64_t end)
{
    float products[2][MIXED_TOKENS * MIXED_COLS];
    const struct weight_view views[2] = {params->gate, params->up};
    for (int64_t col = begin; col < end; col += MIXED_COLS) {
        int32_t num_cols = smaller_of(end - col, MIXED_COLS);
        for (int64_t first = 0; first < params->num_tokens; first += MIXED_TOKENS) {
            int32_t num_tokens = smaller_of(params->num_tokens - first, MIXED_TOKENS);
            struct quant_rows quant_rows = *work->quant_rows;
            for (int form = 0; form < ACTIVATION_FORM_COUNT; form++) {
                if (quant_rows.rows[form] != NULL) {
                    quant_rows.rows[form] += first * (int64_t)quant_rows.row_bytes[form];
                }
            }
            struct cpu_work part = {.quant_rows = &quant_rows, .scratch = work->scratch};
            for (int which = 0; which < 2; which++) {
                int64_t row_bytes =
                    (int64_t)dtype_row_bytes(views[which].dtype, params->hidden_size);
                struct linear_params linear = {
                    .a = params->a + first * params->hidden_size,
                    .weight = {(const unsigned char *)views[which].elements + col * row_bytes,
                               views[which].dtype},
                    .d = products[which],
                    .a_stride = params->hidden_size,
                    .d_stride = MIXED_COLS,
                    .num_tokens = num_tokens,
                    .in_features = params->hidden_size,
                    .out_features = num_cols};
                avx2_linear(&linear, &part, 0, num_cols);
            }
            for (int32_t row = 0; row < num_tokens; row++) {
                for (int32_t at = 0; at < num_cols; at += VEC_LANES) {
                    store_swiglu(params, first + row, col + at,
                                 smaller_of(num_cols - at, VEC_LANES),
                                 _mm256_loadu_ps(products[0] + row * MIXED_COLS + at),
                                 _mm256_loadu_ps(products[1] + row * MIXED_COLS + at));
                }
            }
        }
    }
}

void avx2_quant_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                            int64_t begin, int64_t end)
{
    if (!dtype_is_quantized(params->gate.dtype) || !dtype_is_quantized(params->up.dtype)) {
        mixed_gemm_swiglu(params, work, begin, end);
        return;
    }
    struct quant_product gate =
        quant_product_of(params->gate, params->hidden_size, work->quant_rows);
    struct quant_product up = quant_product_of(params->up, params->hidden_size, work->quant_rows);
    if (params->num_tokens < quant_panel_min_rows(&gate)) {
        prefetch_first(&gate, begin, end);
        prefetch_first(&up, begin, end);
        int32_t run_cols = strip_run_cols(params->num_tokens);
        for (int64_t col = begin; col < end; col += run_cols) {
            int32_t num_cols = smaller_of(end - col, run_cols);
            for (int64_t token = 0; token < params->num_tokens; token++) {
                float gate_sums[RUN_COLS], up_sums[RUN_COLS];
                compute_strips(&gate, token, col, num_cols, gate_sums);
                compute_strips(&up, token, col, num_cols, up_sums);
                for (int32_t at = 0; at < num_cols; at += VEC_LANES) {
                    store_swiglu(params, token, col + at, smaller_of(num_cols - at, VEC_LANES),
                                 _mm256_loadu_ps(gate_sums + at), _mm256_loadu_ps(up_sums + at));
                }
            }
        }
        return;
    }
    float *gate_sums = sums_of(work), *up_sums = gate_sums + SUMS_ELEMENTS;
    for (int64_t first = 0; first < params->num_tokens; first += QUANT_PANEL_ROWS) {
        int32_t num_rows = smaller_of(params->num_tokens - first, QUANT_PANEL_ROWS);
        for (int64_t panel = begin; panel < end; panel += QUANT_PANEL_COLS) {
            int32_t panel_cols = smaller_of(end - panel, QUANT_PANEL_COLS);
            quant_panel(&gate, first, num_rows, panel, panel_cols, work->scratch, gate_sums);
            quant_panel(&up, first, num_rows, panel, panel_cols, work->scratch, up_sums);
            for (int32_t row = 0; row < num_rows; row++) {
                for (int32_t col = 0; col < panel_cols; col += VEC_LANES) {
                    int32_t idx = row * QUANT_PANEL_COLS + col;
                    store_swiglu(params, first + row, panel + col,
                                 smaller_of(panel_cols - col, VEC_LANES),
                                 _mm256_load_ps(gate_sums + idx), _mm256_load_ps(up_sums + idx));
                }
            }
        }
    }
}

#endif
