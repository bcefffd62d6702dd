/* SPDX-License-Identifier: Apache-2.0 */
/* linear and gemm_swiglu of bf16 weights with activations rounded to bf16, by AVX-512's dot product
 * of pairs: the walk and the tiles of dot_tile_avx512.c, but that an accumulator takes two elements
 * at a time, one product after the other. Numbers below 2^-126 become zero. */
#include "ops/cpu/kernels_bf16.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/dot_panel.h"
#include "ops/cpu/kernels_avx512.h"
#include "ops/cpu/kernels_vnni.h"
#include "ops/cpu/vec_avx512.h"

#define LINE_BYTES 64
#define STEP_ELEMENTS 32

/* X(num_rows): the tiles there are, of four columns each. */
#define DOT_TILE_SHAPES(X) X(1) X(2) X(3) X(4) X(5) X(6)

struct operands {
    const unsigned char *a[DOT_TILE_MAX_ROWS];
    const unsigned char *weights[DOT_TILE_MAX_COLS];
};

/* In the register of the sum, for the reason told at vec_add_product. */
VEC_INLINE __m512 add_pairs(__m512 sum, __m512i a, __m512i b)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

/* 32 elements of all rows from an offset on; of weights those that `mask` names, the others 0. Rows
 * of activations are padded with zeros. */
VEC_INLINE void tile_step(const struct operands *from, int num_rows, int64_t offset, bool is_masked,
                          __mmask32 mask, __m512 *sums)
{
    __m512i weights[DOT_TILE_MAX_COLS];
    VEC_UNROLL
    for (int col = 0; col < DOT_TILE_MAX_COLS; col++) {
        const unsigned char *at = from->weights[col] + offset;
        weights[col] = is_masked ? _mm512_maskz_loadu_epi16(mask, at) : _mm512_loadu_si512(at);
    }
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        __m512i a = _mm512_loadu_si512(from->a[row] + offset);
        VEC_UNROLL
        for (int col = 0; col < DOT_TILE_MAX_COLS; col++) {
            __m512 *sum = &sums[row * DOT_TILE_MAX_COLS + col];
            *sum = add_pairs(*sum, a, weights[col]);
        }
    }
}

VEC_INLINE void tile_compute(const struct dot_tile *tile, int num_rows, float *results)
{
    const int num_sums = num_rows * DOT_TILE_MAX_COLS;
    int64_t num_elements = tile->num_elements;
    struct operands from;
    uintptr_t ahead[DOT_TILE_MAX_COLS];
    __m512 sums[DOT_TILE_MAX_SUMS];
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        from.a[row] = tile->a + row * tile->a_stride_bytes;
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
    int64_t k = 0, offset = 0;
    for (; k + STEP_ELEMENTS <= num_elements; k += STEP_ELEMENTS, offset += LINE_BYTES) {
        VEC_UNROLL
        for (int col = 0; col < DOT_TILE_MAX_COLS; col++) {
            _mm_prefetch((const char *)(ahead[col] + (uintptr_t)offset), _MM_HINT_T1);
        }
        tile_step(&from, num_rows, offset, false, 0, sums);
    }
    if (k < num_elements) {
        __mmask32 mask = (__mmask32)((1u << (num_elements - k)) - 1);
        tile_step(&from, num_rows, offset, true, mask, sums);
    }
    if (tile->is_continued) {
        VEC_UNROLL
        for (int idx = 0; idx < num_sums; idx++) {
            _mm512_store_ps(tile->partial + idx * VEC_LANES, sums[idx]);
        }
        return;
    }
    VEC_UNROLL
    for (int idx = 0; idx < num_sums; idx += 4) {
        _mm_storeu_ps(results + idx,
                      vec_sums_of_4(sums[idx], sums[idx + 1], sums[idx + 2], sums[idx + 3]));
    }
}

#define DEFINE_TILE(num_rows)                                                \
    static void tile_##num_rows(const struct dot_tile *tile, float *results) \
    {                                                                        \
        tile_compute(tile, num_rows, results);                               \
    }
DOT_TILE_SHAPES(DEFINE_TILE)

#define TILE_COLS(num_rows) [num_rows] = DOT_TILE_MAX_COLS,
#define TILE_ENTRY(num_rows) [DTYPE_BF16][num_rows] = tile_##num_rows,
static const struct dot_tiles bf16_dot_tiles = {.vector_bytes = 64,
                                                .a_element_bytes = 2,
                                                .most_rows = 6,
                                                .panel_bytes = 384 * 1024,
                                                .max_block_k = 5120,
                                                .num_cols = {DOT_TILE_SHAPES(TILE_COLS)},
                                                .fns = {DOT_TILE_SHAPES(TILE_ENTRY)}};

/* Of a row of bf16_groups, which here are rows one after the other. */
static int64_t packed_row_bytes(int32_t num_features)
{
    return ((int64_t)num_features + BF16_TILE_FEATURES - 1) / BF16_TILE_FEATURES *
           BF16_TILE_FEATURES * (int64_t)sizeof(uint16_t);
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
    avx512_linear_by(&bf16_dot_tiles, work->quant_rows->bf16_groups,
                     packed_row_bytes(params->in_features), params, work, begin, end);
}

void avx512_bf16_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                             int64_t begin, int64_t end)
{
    if (params->gate.dtype != DTYPE_BF16 || params->up.dtype != DTYPE_BF16) {
        vnni_gemm_swiglu(params, work, begin, end);
        return;
    }
    avx512_gemm_swiglu_by(&bf16_dot_tiles, work->quant_rows->bf16_groups,
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
