/* SPDX-License-Identifier: Apache-2.0 */
/* linear and gemm_swiglu over quantised weights: strips for few rows, panels for many. */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <stddef.h>
#include <stdint.h>

#include "ops/cpu/quant_tile_avx2.h"
#include "ops/cpu/vec_avx2.h"

#define LINE_BYTES 64

/* Scratch memory: a panel, then sums; twice as many for gate and up. */
#define SUMS_ELEMENTS (QUANT_PANEL_ROWS * QUANT_PANEL_COLS)
_Static_assert(QUANT_PANEL_BYTES + 2 * SUMS_ELEMENTS * sizeof(float) <= CPU_SCRATCH_BYTES, "");

VEC_INLINE float *sums_of(const struct cpu_work *work)
{
    return (float *)(void *)(work->scratch + QUANT_PANEL_BYTES);
}

VEC_INLINE int32_t smaller_of(int64_t left, int32_t right)
{
    return left < right ? (int32_t)left : right;
}

/* Columns of a matrix that are read before it is the other one's turn, in strips whose eight
 * columns lie as far apart as there are strips: then each lane reads on where it was when the next
 * strip begins, and memory sees eight long streams. Of many strips an odd number, though the
 * last lane then ends early: streams a multiple of 4 KiB apart would have the same place in L1. */
#define RUN_STRIPS 127
#define MANY_STRIPS 32
#define RUN_COLS (RUN_STRIPS * QUANT_STRIP_COLS)
#define RUN_MAX_TOKENS 8
_Static_assert(RUN_COLS *RUN_MAX_TOKENS <= SUMS_ELEMENTS, "sums of a run");

static int64_t num_strips_of(int64_t num_cols)
{
    int64_t num_strips = (num_cols + QUANT_STRIP_COLS - 1) / QUANT_STRIP_COLS;
    return num_strips < MANY_STRIPS ? num_strips : num_strips | 1;
}

/* Past the end of the weights it names memory that may not be there, which a prefetch does not
 * mind. */
static uintptr_t address_of(const struct quant_product *product, int64_t col)
{
    return (uintptr_t)product->weights + (uintptr_t)(col * product->weight_row_bytes);
}

/* At the beginning of columns [begin, end): asks for the first weights, which nobody has asked
 * for. */
static void prefetch_first(const struct quant_product *product, int64_t begin, int64_t end)
{
    int64_t num_strips = num_strips_of(smaller_of(end - begin, RUN_COLS));
    for (int64_t i = 0; i < QUANT_STRIP_COLS; i++) {
        uintptr_t first = address_of(product, begin + i * num_strips);
        for (int64_t at = 0; at < QUANT_STRIP_AHEAD; at += LINE_BYTES) {
            _mm_prefetch((const char *)(first + (uintptr_t)at), _MM_HINT_T0);
        }
    }
}

/* Columns [col, col + num_cols), at most RUN_COLS, of all rows of activations. The weights that are
 * read after them begin at `next`. sums [num_tokens, RUN_COLS], of which the columns up to a whole
 * strip are written. */
static void compute_run(const struct quant_product *product, int32_t num_tokens, int64_t col,
                        int32_t num_cols, uintptr_t next, float *sums)
{
    const int64_t num_strips = num_strips_of(num_cols);
    for (int64_t strip = 0; strip < num_strips; strip++) {
        struct quant_strip_cols cols = {
            .col = col + strip, .step = num_strips, .end = col + num_cols};
        if (strip + 1 == num_strips) {
            cols.gap_bytes = (int64_t)(next - address_of(product, col + strip + 1));
        }
        for (int32_t token = 0; token < num_tokens; token++) {
            float found[QUANT_STRIP_COLS];
            quant_strip(product, token, &cols, token == 0, found);
            for (int64_t i = 0; i < QUANT_STRIP_COLS; i++) {
                sums[token * RUN_COLS + i * num_strips + strip] = found[i];
            }
        }
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
        float *sums = sums_of(work);
        prefetch_first(&product, begin, end);
        for (int64_t col = begin; col < end; col += RUN_COLS) {
            int32_t num_cols = smaller_of(end - col, RUN_COLS);
            compute_run(&product, params->num_tokens, col, num_cols,
                        address_of(&product, col + num_cols), sums);
            for (int32_t token = 0; token < params->num_tokens; token++) {
                for (int32_t at = 0; at < num_cols; at += VEC_LANES) {
                    store_linear(params, token, col + at, smaller_of(num_cols - at, VEC_LANES),
                                 _mm256_load_ps(sums + token * RUN_COLS + at));
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
        float *gate_sums = sums_of(work), *up_sums = gate_sums + SUMS_ELEMENTS;
        prefetch_first(&gate, begin, end);
        for (int64_t col = begin; col < end; col += RUN_COLS) {
            int32_t num_cols = smaller_of(end - col, RUN_COLS);
            compute_run(&gate, params->num_tokens, col, num_cols, address_of(&up, col), gate_sums);
            compute_run(&up, params->num_tokens, col, num_cols, address_of(&gate, col + num_cols),
                        up_sums);
            for (int32_t token = 0; token < params->num_tokens; token++) {
                for (int32_t at = 0; at < num_cols; at += VEC_LANES) {
                    int32_t idx = token * RUN_COLS + at;
                    store_swiglu(params, token, col + at, smaller_of(num_cols - at, VEC_LANES),
                                 _mm256_load_ps(gate_sums + idx), _mm256_load_ps(up_sums + idx));
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
