/* SPDX-License-Identifier: Apache-2.0 */
/* One row of activations and sixteen rows of Q8_0 or Q4_0 weights, a few blocks of each at a time.
 * Blocks are opened where they lie in their row, so that nothing is gathered from sixteen places.
 *
 * Q8_0: 68 bytes of a row = 2 blocks, as 17 dwords:
 *     dwords 1 to 16              one vector: the bytes of block 0 from the third on, the scale of
 *                                 block 1, which meets zeros, and all bytes of block 1
 *     dwords 0 and 8              the scales; dword 0 also has the first two bytes of block 0. One
 *                                 masked permutation puts both beside those of the other rows
 *   one vpdpbusd: each half holds eight dwords that make up the sum of a block
 *   these are transposed and added up until both blocks have one vector of sixteen rows
 *
 * Q4_0: 72 bytes of a row = 4 blocks, as 36 words:
 *     words 0, 9, 18, 27          the scales: one masked permutation puts them beside those of the
 *                                 other rows, and one conversion widens sixteen rows' of a block
 *     the other 32 words          lane b of 128 bits: the nibbles of block b
 *   two vpdpbusd with the low and the high halves of four blocks of activations: lane b holds four
 *     dwords that make up the sum of block b
 *   packs to words and vpmaddwd with ones add them up for four rows: dword i of lane b is row i's
 *   four of those, lanes transposed: one vector of sixteen rows for each block
 * A dword of four products of both halves, less its offset, is at most 8 * 127 * 8 in magnitude and
 * two of them 16,256, so that they fit the words between; everything is exact.
 *
 * Included by quant_product_vnni.c only. */
#ifndef IMBREX_OPS_CPU_QUANT_ROW_VNNI_H
#define IMBREX_OPS_CPU_QUANT_ROW_VNNI_H

#if defined(__x86_64__)

#include "ops/cpu/quant_panel_vnni.h"
#include "ops/quant.h"

#define ROW_Q8_0_BLOCKS 2 /* of a step */
#define ROW_Q4_0_BLOCKS 4

/* Bytes [4, 68) of two blocks of weights meet these. */
VEC_INLINE __m512i row_pair_activations(const struct q8_activations a[2])
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi16(0x7fff, a[0].q + 2)),
                              _mm256_loadu_si256((const __m256i *)(const void *)a[1].q), 1);
}

/* Dword i of lane l: what lane l of vector i adds up to. */
VEC_INLINE __m512i row_add_up_four(const __m512i sums[4])
{
    __m512i pairs[2] = {_mm512_add_epi32(_mm512_unpacklo_epi32(sums[0], sums[1]),
                                         _mm512_unpackhi_epi32(sums[0], sums[1])),
                        _mm512_add_epi32(_mm512_unpacklo_epi32(sums[2], sums[3]),
                                         _mm512_unpackhi_epi32(sums[2], sums[3]))};
    return _mm512_add_epi32(_mm512_unpacklo_epi64(pairs[0], pairs[1]),
                            _mm512_unpackhi_epi64(pairs[0], pairs[1]));
}

/* Two blocks of a meet those with which the rows begin: acc, lane c for row c, takes one fused
 * multiply-add for each, ascending. */
VEC_INLINE void row_add_q8_0(const struct panel_bases *bases,
                             const struct q8_activations a[ROW_Q8_0_BLOCKS], __m512 *acc)
{
    const __m512i flip = _mm512_set1_epi8(-128);
    const __m512i head_dwords = _mm512_set_epi32(8, 8, 8, 8, 8, 8, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i a_row = row_pair_activations(a);

    __m512i heads[2], fours[4]; /* heads: half b, lane c of row 8 i + c */
    VEC_UNROLL
    for (int four = 0; four < 4; four++) {
        __m512i sums[4];
        VEC_UNROLL
        for (int i = 0; i < 4; i++) {
            int row = 4 * four + i;
            const unsigned char *at = panel_row(bases, row);
            __m512i *rows_heads = &heads[row / 8];
            __mmask16 mask = (__mmask16)(0x0101u << (row % 8));
            *rows_heads = row % 8 == 0
                              ? _mm512_permutexvar_epi32(head_dwords, _mm512_loadu_si512(at))
                              : _mm512_mask_permutexvar_epi32(*rows_heads, mask, head_dwords,
                                                              _mm512_loadu_si512(at));
            __m512i q = _mm512_xor_si512(_mm512_loadu_si512(at + 4), flip);
            sums[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q, a_row);
        }
        fours[four] = row_add_up_four(sums);
    }

    /* Even and odd lanes, which are halves of a block. */
    __m512i low = _mm512_add_epi32(_mm512_shuffle_i32x4(fours[0], fours[1], 0x88),
                                   _mm512_shuffle_i32x4(fours[0], fours[1], 0xdd));
    __m512i high = _mm512_add_epi32(_mm512_shuffle_i32x4(fours[2], fours[3], 0x88),
                                    _mm512_shuffle_i32x4(fours[2], fours[3], 0xdd));
    const __m512i heads_0 = _mm512_shuffle_i64x2(heads[0], heads[1], 0x44);
    const __m512i heads_1 = _mm512_shuffle_i64x2(heads[0], heads[1], 0xee);
    const __m512 scales[ROW_Q8_0_BLOCKS] = {panel_f16_low(heads_0), panel_f16_high(heads_1)};
    __m512i sums[ROW_Q8_0_BLOCKS] = {_mm512_shuffle_i32x4(low, high, 0x88),
                                     _mm512_shuffle_i32x4(low, high, 0xdd)};
    uint16_t first_two;
    memcpy(&first_two, a[0].q, sizeof(first_two));
    sums[0] = _mm512_dpbusd_epi32(sums[0], _mm512_xor_si512(heads_0, flip),
                                  _mm512_set1_epi32((int32_t)((uint32_t)first_two << 16)));
    VEC_UNROLL
    for (int block = 0; block < ROW_Q8_0_BLOCKS; block++) {
        /* The offset of the weights, 2^7. */
        __m512i offsets = _mm512_slli_epi32(_mm512_set1_epi32(a[block].sum), 7);
        __m512i sum = _mm512_sub_epi32(sums[block], offsets);
        __m512 term = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales[block]);
        *acc = _mm512_fmadd_ps(term, _mm512_set1_ps(a[block].scale), *acc);
    }
}

/* Lane b: bytes [at, at + 16) of block b of a. */
VEC_INLINE __m512i row_load_activations(const struct q8_activations a[ROW_Q4_0_BLOCKS], int at)
{
    __m256i low = _mm256_inserti128_si256(
        _mm256_castsi128_si256(panel_load_16((const unsigned char *)a[0].q + at)),
        panel_load_16((const unsigned char *)a[1].q + at), 1);
    __m256i high = _mm256_inserti128_si256(
        _mm256_castsi128_si256(panel_load_16((const unsigned char *)a[2].q + at)),
        panel_load_16((const unsigned char *)a[3].q + at), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* What a dword of the sums begins with, as all weights have an offset of 8. */
VEC_INLINE __m512i row_start_q4_0(__m512i a_low, __m512i a_high)
{
    const __m512i eights = _mm512_set1_epi8(8);
    __m512i offsets = _mm512_dpbusd_epi32(_mm512_setzero_si512(), eights, a_low);
    return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_dpbusd_epi32(offsets, eights, a_high));
}

/* Lane b: four dwords that make up the sum of block b. words: the first 64 bytes, with all scales.
 */
VEC_INLINE __m512i row_sums_q4_0(const unsigned char *at, __m512i start, __m512i a_low,
                                 __m512i a_high, __m512i *words)
{
    const __m512i nibble_words =
        _mm512_set_epi16(35, 34, 33, 32, 31, 30, 29, 28, 26, 25, 24, 23, 22, 21, 20, 19, 17, 16, 15,
                         14, 13, 12, 11, 10, 8, 7, 6, 5, 4, 3, 2, 1);
    *words = _mm512_loadu_si512(at);
    /* Each of the permutations would load them, from two cache lines. */
    __asm__("" : "+v"(*words));
    __m512i last_words = _mm512_castsi128_si512(
        _mm_loadl_epi64((const __m128i *)(const void *)(at + sizeof(*words))));
    __m512i nibbles = _mm512_permutex2var_epi16(*words, nibble_words, last_words);
    __m512i sums = _mm512_dpbusd_epi32(start, panel_low_nibbles(nibbles), a_low);
    return _mm512_dpbusd_epi32(sums, panel_high_nibbles(nibbles), a_high);
}

/* Dword i of lane b: the sum of block b of row i. */
VEC_INLINE __m512i row_pack_four(const __m512i sums[4])
{
    const __m512i ones = _mm512_set1_epi16(1);
    __m512i pairs[2] = {_mm512_madd_epi16(_mm512_packs_epi32(sums[0], sums[1]), ones),
                        _mm512_madd_epi16(_mm512_packs_epi32(sums[2], sums[3]), ones)};
    return _mm512_madd_epi16(_mm512_packs_epi32(pairs[0], pairs[1]), ones);
}

/* Four blocks of a meet those with which the rows begin: acc, lane c for row c, takes one fused
 * multiply-add for each, ascending. */
VEC_INLINE void row_add_q4_0(const struct panel_bases *bases,
                             const struct q8_activations a[ROW_Q4_0_BLOCKS], __m512 *acc)
{
    const __m512i scale_words =
        _mm512_set_epi64(0x001b001b001b001b, 0x001b001b001b001b, 0x0012001200120012,
                         0x0012001200120012, 0x0009000900090009, 0x0009000900090009, 0, 0);
    const __m512i a_low = row_load_activations(a, 0), a_high = row_load_activations(a, 16);
    const __m512i start = row_start_q4_0(a_low, a_high);

    __m512i scales[2], fours[4];
    VEC_UNROLL
    for (int four = 0; four < 4; four++) {
        __m512i sums[4];
        VEC_UNROLL
        for (int i = 0; i < 4; i++) {
            int row = 4 * four + i;
            __m512i words;
            sums[i] = row_sums_q4_0(panel_row(bases, row), start, a_low, a_high, &words);
            __m512i *rows_scales = &scales[row / 8];
            *rows_scales =
                row % 8 == 0 ? _mm512_permutexvar_epi16(scale_words, words)
                             : _mm512_mask_permutexvar_epi16(*rows_scales, 0x01010101u << (row % 8),
                                                             scale_words, words);
        }
        fours[four] = row_pack_four(sums);
    }

    /* Lanes: [0, 1] of both, [2, 3] of both; then even and odd ones. */
    __m512i low_01 = _mm512_shuffle_i32x4(fours[0], fours[1], 0x44);
    __m512i low_23 = _mm512_shuffle_i32x4(fours[2], fours[3], 0x44);
    __m512i high_01 = _mm512_shuffle_i32x4(fours[0], fours[1], 0xee);
    __m512i high_23 = _mm512_shuffle_i32x4(fours[2], fours[3], 0xee);
    const __m512i sums[ROW_Q4_0_BLOCKS] = {
        _mm512_shuffle_i32x4(low_01, low_23, 0x88), _mm512_shuffle_i32x4(low_01, low_23, 0xdd),
        _mm512_shuffle_i32x4(high_01, high_23, 0x88), _mm512_shuffle_i32x4(high_01, high_23, 0xdd)};
    const __m512i blocks_01 =
        _mm512_permutex2var_epi64(scales[0], _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), scales[1]);
    const __m512i blocks_23 = _mm512_permutex2var_epi64(
        scales[0], _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), scales[1]);
    const __m512 block_scales[ROW_Q4_0_BLOCKS] = {
        _mm512_cvtph_ps(_mm512_castsi512_si256(blocks_01)),
        _mm512_cvtph_ps(_mm512_extracti64x4_epi64(blocks_01, 1)),
        _mm512_cvtph_ps(_mm512_castsi512_si256(blocks_23)),
        _mm512_cvtph_ps(_mm512_extracti64x4_epi64(blocks_23, 1))};
    VEC_UNROLL
    for (int block = 0; block < ROW_Q4_0_BLOCKS; block++) {
        __m512 term = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[block]), block_scales[block]);
        *acc = _mm512_fmadd_ps(term, _mm512_set1_ps(a[block].scale), *acc);
    }
}

/* How many blocks row_add takes; 0: it does not take this dtype. */
VEC_INLINE int32_t row_step_blocks(enum dtype dtype)
{
    return dtype == DTYPE_Q8_0 ? ROW_Q8_0_BLOCKS : dtype == DTYPE_Q4_0 ? ROW_Q4_0_BLOCKS : 0;
}

/* dtype is a constant. */
VEC_INLINE void row_add(enum dtype dtype, const struct panel_bases *bases,
                        const struct q8_activations *a, __m512 *acc)
{
    if (dtype == DTYPE_Q8_0) {
        row_add_q8_0(bases, a, acc);
    } else {
        row_add_q4_0(bases, a, acc);
    }
}

#endif
#endif
