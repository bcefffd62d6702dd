/* SPDX-License-Identifier: Apache-2.0 */
/* One row of activations and sixteen rows of Q4_0 weights, four blocks of each at a time. A block
 * is opened where it lies in its row, so that nothing is gathered from sixteen places:
 *
 *   72 bytes of a row = 4 blocks, as 36 words:
 *     words 0, 9, 18, 27          the scales: one masked permutation puts them beside those of the
 *                                 other rows, and one conversion widens sixteen rows' of a block
 *     the other 32 words          lane b of 128 bits: the nibbles of block b
 *   two vpdpbusd with the low and the high halves of four blocks of activations: lane b holds four
 *     dwords that make up the sum of block b
 *   packs to words and vpmaddwd with ones add them up for four rows: dword i of lane b is row i's
 *   four of those, lanes transposed: one vector of sixteen rows for each block
 *
 * A dword of four products of both halves, less its offset, is at most 8 * 127 * 8 in magnitude and
 * two of them 16,256, so that they fit the words between; everything is exact.
 *
 * Included by quant_product_vnni.c only. */
#ifndef IMBREX_OPS_CPU_QUANT_ROW_VNNI_H
#define IMBREX_OPS_CPU_QUANT_ROW_VNNI_H

#if defined(__x86_64__)

#include "ops/cpu/quant_panel_vnni.h"
#include "ops/quant.h"

#define ROW_BLOCKS 4 /* of a step */
#define ROW_STEP_BYTES 72

/* Lane b: bytes [at, at + 16) of block b of a. */
VEC_INLINE __m512i row_load_activations(const struct q8_activations a[ROW_BLOCKS], int at)
{
    __m256i low = _mm256_inserti128_si256(
        _mm256_castsi128_si256(panel_load_16((const unsigned char *)a[0].q + at)),
        panel_load_16((const unsigned char *)a[1].q + at), 1);
    __m256i high = _mm256_inserti128_si256(
        _mm256_castsi128_si256(panel_load_16((const unsigned char *)a[2].q + at)),
        panel_load_16((const unsigned char *)a[3].q + at), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* Four blocks of a meet those with which the rows begin: acc, lane c for row c, takes one fused
 * multiply-add for each, ascending. */
VEC_INLINE void row_add_q4_0(const struct panel_bases *bases,
                             const struct q8_activations a[ROW_BLOCKS], __m512 *acc)
{
    const __m512i nibble_words =
        _mm512_set_epi16(35, 34, 33, 32, 31, 30, 29, 28, 26, 25, 24, 23, 22, 21, 20, 19, 17, 16, 15,
                         14, 13, 12, 11, 10, 8, 7, 6, 5, 4, 3, 2, 1);
    const __m512i scale_words =
        _mm512_set_epi64(0x001b001b001b001b, 0x001b001b001b001b, 0x0012001200120012,
                         0x0012001200120012, 0x0009000900090009, 0x0009000900090009, 0, 0);
    const __m512i ones = _mm512_set1_epi16(1);
    const __m512i a_low = row_load_activations(a, 0), a_high = row_load_activations(a, 16);
    const __m512i eights = _mm512_set1_epi8(8);
    __m512i start = _mm512_dpbusd_epi32(_mm512_setzero_si512(), eights, a_low);
    start = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_dpbusd_epi32(start, eights, a_high));

    __m512i scales[2], fours[4];
    VEC_UNROLL
    for (int four = 0; four < 4; four++) {
        __m512i sums[4];
        VEC_UNROLL
        for (int i = 0; i < 4; i++) {
            int row = 4 * four + i;
            const unsigned char *at = panel_row(bases, row);
            __m512i words = _mm512_loadu_si512(at);
            /* Each of the permutations would load them, from two cache lines. */
            __asm__("" : "+v"(words));
            __m512i last_words = _mm512_castsi128_si512(
                _mm_loadl_epi64((const __m128i *)(const void *)(at + sizeof(words))));
            __m512i *rows_scales = &scales[row / 8];
            *rows_scales =
                row % 8 == 0 ? _mm512_permutexvar_epi16(scale_words, words)
                             : _mm512_mask_permutexvar_epi16(*rows_scales, 0x01010101u << (row % 8),
                                                             scale_words, words);
            __m512i nibbles = _mm512_permutex2var_epi16(words, nibble_words, last_words);
            sums[i] = _mm512_dpbusd_epi32(start, panel_low_nibbles(nibbles), a_low);
            sums[i] = _mm512_dpbusd_epi32(sums[i], panel_high_nibbles(nibbles), a_high);
        }
        __m512i pairs[2] = {_mm512_madd_epi16(_mm512_packs_epi32(sums[0], sums[1]), ones),
                            _mm512_madd_epi16(_mm512_packs_epi32(sums[2], sums[3]), ones)};
        fours[four] = _mm512_madd_epi16(_mm512_packs_epi32(pairs[0], pairs[1]), ones);
    }

    /* Lanes: [0, 1] of both, [2, 3] of both; then even and odd ones. */
    __m512i low_01 = _mm512_shuffle_i32x4(fours[0], fours[1], 0x44);
    __m512i low_23 = _mm512_shuffle_i32x4(fours[2], fours[3], 0x44);
    __m512i high_01 = _mm512_shuffle_i32x4(fours[0], fours[1], 0xee);
    __m512i high_23 = _mm512_shuffle_i32x4(fours[2], fours[3], 0xee);
    const __m512i sums[ROW_BLOCKS] = {
        _mm512_shuffle_i32x4(low_01, low_23, 0x88), _mm512_shuffle_i32x4(low_01, low_23, 0xdd),
        _mm512_shuffle_i32x4(high_01, high_23, 0x88), _mm512_shuffle_i32x4(high_01, high_23, 0xdd)};
    const __m512i blocks_01 =
        _mm512_permutex2var_epi64(scales[0], _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), scales[1]);
    const __m512i blocks_23 = _mm512_permutex2var_epi64(
        scales[0], _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), scales[1]);
    const __m512 block_scales[ROW_BLOCKS] = {
        _mm512_cvtph_ps(_mm512_castsi512_si256(blocks_01)),
        _mm512_cvtph_ps(_mm512_extracti64x4_epi64(blocks_01, 1)),
        _mm512_cvtph_ps(_mm512_castsi512_si256(blocks_23)),
        _mm512_cvtph_ps(_mm512_extracti64x4_epi64(blocks_23, 1))};
    VEC_UNROLL
    for (int block = 0; block < ROW_BLOCKS; block++) {
        __m512 term = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[block]), block_scales[block]);
        *acc = _mm512_fmadd_ps(term, _mm512_set1_ps(a[block].scale), *acc);
    }
}

#endif
#endif
