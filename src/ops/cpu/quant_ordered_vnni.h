/* SPDX-License-Identifier: Apache-2.0 */
/* One row of activations, weights in the order of their addresses: four rows of Q8_0 or Q4_0
 * weights beside each other at a time, four blocks of each in a step, and what is asked for
 * meanwhile goes on line by line, a little further than the end of the last of the four rows.
 *
 * A step gives terms, lane b of 128 bits: block b, and dword i of it row i. The blocks of a row are
 * then added up one after the other, as the other ways do. Blocks are opened where they lie
 * (quant_row_vnni.h); activations are brought into the order of the steps once for many rows.
 *
 * Included by quant_product_vnni.c only. */
#ifndef IMBREX_OPS_CPU_QUANT_ORDERED_VNNI_H
#define IMBREX_OPS_CPU_QUANT_ORDERED_VNNI_H

#if defined(__x86_64__)

#include "ops/cpu/quant_product_vnni.h"
#include "ops/cpu/quant_row_vnni.h"

#define ORDERED_ROWS 4
#define ORDERED_BLOCKS 4

/* Of the last of four rows, which is needed last beside those before it. */
#define ORDERED_AHEAD 8192

/* Four blocks of activations. */
struct ordered_step {
    __m512i q[2];  /* what meets the vectors of a row */
    __m512i heads; /* Q8_0: what meets the dwords with scales: the first two of blocks 0 and 2 */
    __m512i start; /* what sums begin with: the offset of the weights taken off */
    float scales[ORDERED_BLOCKS];
} __attribute__((aligned(64)));

/* Whether a product goes this way: of whole steps alone, which all models' rows are, and as many
 * as there is room for. */
VEC_INLINE bool ordered_takes(const struct vnni_product *product, int64_t num_rows)
{
    int64_t num_steps = product->num_blocks / ORDERED_BLOCKS;
    return product->in_order && num_rows == 1 &&
           (product->dtype == DTYPE_Q8_0 || product->dtype == DTYPE_Q4_0) &&
           product->num_blocks % ORDERED_BLOCKS == 0 &&
           num_steps * (int64_t)sizeof(struct ordered_step) <= VNNI_PANEL_BYTES;
}

/* dtype is a constant. */
VEC_INLINE void ordered_prepare(enum dtype dtype, const struct q8_activations a[ORDERED_BLOCKS],
                                struct ordered_step *step)
{
    if (dtype == DTYPE_Q8_0) {
        int32_t heads[16] = {0}, starts[16];
        for (int lane = 0; lane < 16; lane++) {
            const struct q8_activations *block = &a[lane / 4];
            uint16_t first_two;
            memcpy(&first_two, block->q, sizeof(first_two));
            heads[lane] = lane / 4 % 2 == 0 ? (int32_t)((uint32_t)first_two << 16) : 0;
            starts[lane] = -(block->sum * 128);
        }
        step->q[0] = row_pair_activations(a);
        step->q[1] = row_pair_activations(a + 2);
        step->heads = _mm512_loadu_si512(heads);
        step->start = _mm512_loadu_si512(starts);
    } else {
        step->q[0] = row_load_activations(a, 0);
        step->q[1] = row_load_activations(a, 16);
        step->start = row_start_q4_0(step->q[0], step->q[1]);
    }
    for (int block = 0; block < ORDERED_BLOCKS; block++) {
        step->scales[block] = a[block].scale;
    }
}

VEC_INLINE __m512 ordered_terms_q8_0(const unsigned char *const rows[ORDERED_ROWS],
                                     const struct ordered_step *a)
{
    const __m512i flip = _mm512_set1_epi8(-128);
    const __m512i head_dwords = _mm512_set_epi32(8, 8, 8, 8, 0, 0, 0, 0, 8, 8, 8, 8, 0, 0, 0, 0);
    const __m512i scale_words =
        _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 31, 29, 27, 25, 22, 20, 18,
                         16, 15, 13, 11, 9, 6, 4, 2, 0);
    __m512i heads = _mm512_setzero_si512(), sums[2][ORDERED_ROWS], fours[2];
    VEC_UNROLL
    for (int row = 0; row < ORDERED_ROWS; row++) {
        VEC_UNROLL
        for (int half = 0; half < 2; half++) {
            const unsigned char *at = rows[row] + 68 * half;
            __mmask16 mask = (__mmask16)((half == 0 ? 0x0011u : 0x1100u) << row);
            heads = _mm512_mask_permutexvar_epi32(heads, mask, head_dwords, _mm512_loadu_si512(at));
            __m512i q = _mm512_xor_si512(_mm512_loadu_si512(at + 4), flip);
            sums[half][row] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q, a->q[half]);
        }
    }
    VEC_UNROLL
    for (int half = 0; half < 2; half++) {
        fours[half] = row_add_up_four(sums[half]);
    }
    __m512i sum = _mm512_add_epi32(_mm512_shuffle_i32x4(fours[0], fours[1], 0x88),
                                   _mm512_shuffle_i32x4(fours[0], fours[1], 0xdd));
    sum = _mm512_add_epi32(sum,
                           _mm512_dpbusd_epi32(a->start, _mm512_xor_si512(heads, flip), a->heads));
    __m512i scales = _mm512_permutexvar_epi16(scale_words, heads);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_cvtph_ps(_mm512_castsi512_si256(scales)));
}

VEC_INLINE __m512 ordered_terms_q4_0(const unsigned char *const rows[ORDERED_ROWS],
                                     const struct ordered_step *a)
{
    const __m512i scale_words =
        _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 27, 27, 27, 27, 18, 18, 18,
                         18, 9, 9, 9, 9, 0, 0, 0, 0);
    __m512i scales = _mm512_setzero_si512(), sums[ORDERED_ROWS];
    VEC_UNROLL
    for (int row = 0; row < ORDERED_ROWS; row++) {
        __m512i words;
        sums[row] = row_sums_q4_0(rows[row], a->start, a->q[0], a->q[1], &words);
        scales =
            _mm512_mask_permutexvar_epi16(scales, (__mmask32)(0x1111u << row), scale_words, words);
    }
    return _mm512_mul_ps(_mm512_cvtepi32_ps(row_pack_four(sums)),
                         _mm512_cvtph_ps(_mm512_castsi512_si256(scales)));
}

VEC_INLINE __m128 ordered_add(enum dtype dtype, const unsigned char *const rows[ORDERED_ROWS],
                              const struct ordered_step *a, __m128 acc)
{
    __m512 terms = dtype == DTYPE_Q8_0 ? ordered_terms_q8_0(rows, a) : ordered_terms_q4_0(rows, a);
    const __m128 blocks[ORDERED_BLOCKS] = {
        _mm512_castps512_ps128(terms), _mm512_extractf32x4_ps(terms, 1),
        _mm512_extractf32x4_ps(terms, 2), _mm512_extractf32x4_ps(terms, 3)};
    VEC_UNROLL
    for (int block = 0; block < ORDERED_BLOCKS; block++) {
        acc = _mm_fmadd_ps(blocks[block], _mm_set1_ps(a->scales[block]), acc);
    }
    return acc;
}

/* The lines that are asked for next, up to `end`, behind which it goes on elsewhere. */
struct ordered_ahead {
    uintptr_t at, end, next;
};

VEC_INLINE void ordered_prefetch(struct ordered_ahead *ahead, int64_t num_bytes)
{
    VEC_UNROLL
    for (int64_t offset = 0; offset < num_bytes; offset += 64) {
        _mm_prefetch((const char *)(ahead->at + (uintptr_t)offset), _MM_HINT_T0);
    }
    ahead->at += (uintptr_t)num_bytes;
    if (ahead->at >= ahead->end) {
        ahead->at += ahead->next - ahead->end;
        ahead->end = UINTPTR_MAX;
    }
}

VEC_INLINE int64_t ordered_ahead_bytes(const struct vnni_product *product)
{
    return (ORDERED_ROWS - 1) * product->weight_row_bytes + ORDERED_AHEAD;
}

/* What a piece begins with, for which nobody has asked. */
VEC_INLINE void ordered_prefetch_first(const struct vnni_product *product, int64_t col)
{
    const uintptr_t first = vnni_address_of(product, col);
    const uintptr_t end = first + (uintptr_t)ordered_ahead_bytes(product);
    for (uintptr_t at = first; at < end; at += 64) {
        _mm_prefetch((const char *)at, _MM_HINT_T0);
    }
}

/* All columns of a run; dtype is a constant. */
VEC_INLINE void ordered_compute(enum dtype dtype, const struct vnni_run *run,
                                const struct vnni_product *product, float *sums)
{
    struct ordered_step *steps = (struct ordered_step *)(void *)run->panel;
    const int64_t row_step_bytes = ORDERED_BLOCKS * panel_block_bytes(dtype);
    const int64_t num_steps = product->num_blocks / ORDERED_BLOCKS;
    const struct q8_activations *a =
        (const void *)(product->activations + run->row * product->activation_row_bytes);
    for (int64_t idx = 0; idx < num_steps; idx++) {
        ordered_prepare(dtype, a + idx * ORDERED_BLOCKS, &steps[idx]);
    }
    const uintptr_t first = vnni_address_of(product, run->col);
    struct ordered_ahead ahead = {.at = first + (uintptr_t)ordered_ahead_bytes(product),
                                  .end = vnni_address_of(product, run->col + run->num_cols),
                                  .next = run->next};
    for (int32_t col = 0; col < run->num_cols; col += ORDERED_ROWS) {
        const unsigned char *rows[ORDERED_ROWS];
        VEC_UNROLL
        for (int row = 0; row < ORDERED_ROWS; row++) {
            /* Rows beyond the last are the last once more. */
            int32_t idx = col + row < run->num_cols ? col + row : run->num_cols - 1;
            rows[row] = product->weights + (run->col + idx) * product->weight_row_bytes;
        }
        __m128 acc = _mm_setzero_ps();
        for (int64_t idx = 0; idx < num_steps; idx++) {
            ordered_prefetch(&ahead, ORDERED_ROWS * row_step_bytes);
            acc = ordered_add(dtype, rows, &steps[idx], acc);
            VEC_UNROLL
            for (int row = 0; row < ORDERED_ROWS; row++) {
                rows[row] += row_step_bytes;
            }
        }
        _mm_store_ps(sums + col, acc);
    }
}

#endif
#endif
