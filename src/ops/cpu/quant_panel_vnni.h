/* SPDX-License-Identifier: Apache-2.0 */
/* Sixteen rows of quantised weights (sixteen columns of the product) in the order in which
 * vpdpbusd takes them: for every four k, one vector whose dword c holds the four of column c as
 * unsigned bytes, and one vector of fp32 scales for every group of k that shares one.
 *
 * A block of the panel, in vectors of 64 bytes:
 *   OFFSET    q[8], scale               q - offset is the weight
 *   MIN       q[8], scale, min
 *   K_MIN     8 x (q[8], scale), mins[4], min_scale     dword c of mins[p]: groups 2p, 2p+1
 *   K_OFFSET  16 x (q[4], scale)
 * The scale of a K block's group is scale * scales[g], which fp32 holds exactly.
 *
 * Included by *_vnni.c and *_amx.c only. */
#ifndef IMBREX_OPS_CPU_QUANT_PANEL_VNNI_H
#define IMBREX_OPS_CPU_QUANT_PANEL_VNNI_H

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "ops/cpu/vec_avx2.h"
#include "ops/dtype.h"

#define PANEL_COLS 16

enum panel_kind { PANEL_OFFSET, PANEL_MIN, PANEL_K_MIN, PANEL_K_OFFSET, PANEL_KIND_COUNT };

#define PANEL_MAX_VECTORS 80 /* of a block */

VEC_INLINE enum panel_kind panel_kind(enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_Q4_1:
    case DTYPE_Q5_1:
        return PANEL_MIN;
    case DTYPE_Q4_K:
    case DTYPE_Q5_K:
        return PANEL_K_MIN;
    case DTYPE_Q6_K:
        return PANEL_K_OFFSET;
    default:
        return PANEL_OFFSET;
    }
}

VEC_INLINE int32_t panel_vectors(enum panel_kind kind)
{
    return kind == PANEL_OFFSET ? 9 : kind == PANEL_MIN ? 10 : kind == PANEL_K_MIN ? 77 : 80;
}

#define PANEL_MAX_BLOCK_BYTES 210

/* As dtype_block_bytes, which is not inlined. */
VEC_INLINE int64_t panel_block_bytes(enum dtype dtype)
{
    static const int64_t block_bytes[DTYPE_COUNT] = {
#define PANEL_BLOCK_BYTES(name, block_elements, bytes) [DTYPE_##name] = (bytes),
        DTYPE_LIST(PANEL_BLOCK_BYTES)
#undef PANEL_BLOCK_BYTES
    };
    return block_bytes[dtype];
}

/* The offset of OFFSET and K_OFFSET is 2^this. */
VEC_INLINE int panel_offset_log2(enum dtype dtype)
{
    return dtype == DTYPE_Q8_0 ? 7 : dtype == DTYPE_Q4_0 ? 3 : dtype == DTYPE_Q5_0 ? 4 : 5;
}

/* ---- sixteen rows at once ---- */

/* Where the first of sixteen rows begins, and how far it is to the next. */
struct panel_rows {
    const unsigned char *first;
    int64_t stride;
};

/* Every row is 0, 1, 2, 4 or 8 strides, which an address can hold, after one of these five: a table
 * of sixteen pointers, or a compiler that folds the sums, would load an address for every load. */
struct panel_bases {
    const unsigned char *row_0, *row_3, *row_6, *row_7, *row_12;
    int64_t stride;
};

VEC_INLINE struct panel_bases panel_bases_of(struct panel_rows rows)
{
    struct panel_bases bases = {rows.first,
                                rows.first + 3 * rows.stride,
                                rows.first + 6 * rows.stride,
                                rows.first + 7 * rows.stride,
                                rows.first + 12 * rows.stride,
                                rows.stride};
    __asm__("" : "+r"(bases.row_3), "+r"(bases.row_6), "+r"(bases.row_7), "+r"(bases.row_12));
    return bases;
}

/* Goes on by num_bytes in every row. */
VEC_INLINE void panel_bases_advance(struct panel_bases *bases, int64_t num_bytes)
{
    bases->row_0 += num_bytes;
    bases->row_3 += num_bytes;
    bases->row_6 += num_bytes;
    bases->row_7 += num_bytes;
    bases->row_12 += num_bytes;
}

/* idx is a constant. */
VEC_INLINE const unsigned char *panel_row(const struct panel_bases *bases, int idx)
{
    switch (idx) {
    case 3:
        return bases->row_3;
    case 5:
        return bases->row_3 + 2 * bases->stride;
    case 6:
        return bases->row_6;
    case 7:
        return bases->row_7;
    case 9:
        return bases->row_7 + 2 * bases->stride;
    case 10:
        return bases->row_6 + 4 * bases->stride;
    case 11:
        return bases->row_3 + 8 * bases->stride;
    case 12:
        return bases->row_12;
    case 13:
        return bases->row_12 + bases->stride;
    case 14:
        return bases->row_6 + 8 * bases->stride;
    case 15:
        return bases->row_7 + 8 * bases->stride;
    default: /* 0, 1, 2, 4, 8 */
        return bases->row_0 + idx * bases->stride;
    }
}

VEC_INLINE __m128i panel_load_16(const unsigned char *at)
{
    return _mm_loadu_si128((const __m128i *)(const void *)at);
}

/* Bytes [at, at + 16) of each row: dword c of tile[i] is bytes 4i to 4i + 3 of row c. */
VEC_INLINE void panel_load_tile(const struct panel_bases *bases, int64_t at, __m512i tile[4])
{
    __m512i lanes[4]; /* lane l of lanes[v]: row 4l + v */
    VEC_UNROLL
    for (int v = 0; v < 4; v++) {
        __m256i low =
            _mm256_inserti128_si256(_mm256_castsi128_si256(panel_load_16(panel_row(bases, v) + at)),
                                    panel_load_16(panel_row(bases, 4 + v) + at), 1);
        __m256i high = _mm256_inserti128_si256(
            _mm256_castsi128_si256(panel_load_16(panel_row(bases, 8 + v) + at)),
            panel_load_16(panel_row(bases, 12 + v) + at), 1);
        lanes[v] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    __m512i low_01 = _mm512_unpacklo_epi32(lanes[0], lanes[1]);
    __m512i low_23 = _mm512_unpacklo_epi32(lanes[2], lanes[3]);
    __m512i high_01 = _mm512_unpackhi_epi32(lanes[0], lanes[1]);
    __m512i high_23 = _mm512_unpackhi_epi32(lanes[2], lanes[3]);
    tile[0] = _mm512_unpacklo_epi64(low_01, low_23);
    tile[1] = _mm512_unpackhi_epi64(low_01, low_23);
    tile[2] = _mm512_unpacklo_epi64(high_01, high_23);
    tile[3] = _mm512_unpackhi_epi64(high_01, high_23);
}

/* Dword c: bytes [at, at + 4) of row c. */
VEC_INLINE __m512i panel_load_dwords(const struct panel_bases *bases, int64_t at)
{
    __m128i lanes[4];
    VEC_UNROLL
    for (int lane = 0; lane < 4; lane++) {
        int32_t dwords[4];
        VEC_UNROLL
        for (int i = 0; i < 4; i++) {
            memcpy(&dwords[i], panel_row(bases, 4 * lane + i) + at, sizeof(dwords[i]));
        }
        lanes[lane] = _mm_cvtsi32_si128(dwords[0]);
        lanes[lane] = _mm_insert_epi32(lanes[lane], dwords[1], 1);
        lanes[lane] = _mm_insert_epi32(lanes[lane], dwords[2], 2);
        lanes[lane] = _mm_insert_epi32(lanes[lane], dwords[3], 3);
    }
    __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(lanes[0]), lanes[1], 1);
    __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(lanes[2]), lanes[3], 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

VEC_INLINE int panel_load_word(const unsigned char *at)
{
    uint16_t word;
    memcpy(&word, at, sizeof(word));
    return word;
}

VEC_INLINE __m128i panel_load_8_words(const struct panel_bases *bases, int first, int64_t at)
{
    __m128i words = _mm_cvtsi32_si128(panel_load_word(panel_row(bases, first) + at));
    words = _mm_insert_epi16(words, panel_load_word(panel_row(bases, first + 1) + at), 1);
    words = _mm_insert_epi16(words, panel_load_word(panel_row(bases, first + 2) + at), 2);
    words = _mm_insert_epi16(words, panel_load_word(panel_row(bases, first + 3) + at), 3);
    words = _mm_insert_epi16(words, panel_load_word(panel_row(bases, first + 4) + at), 4);
    words = _mm_insert_epi16(words, panel_load_word(panel_row(bases, first + 5) + at), 5);
    words = _mm_insert_epi16(words, panel_load_word(panel_row(bases, first + 6) + at), 6);
    words = _mm_insert_epi16(words, panel_load_word(panel_row(bases, first + 7) + at), 7);
    return words;
}

/* The F16 at byte `at` of each row, widened. */
VEC_INLINE __m512 panel_load_f16(const struct panel_bases *bases, int64_t at)
{
    __m128i low = panel_load_8_words(bases, 0, at), high = panel_load_8_words(bases, 8, at);
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}

/* The F16 in the low and in the high half of each dword. */
VEC_INLINE __m512 panel_f16_low(__m512i dwords)
{
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(dwords));
}

VEC_INLINE __m512 panel_f16_high(__m512i dwords)
{
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(dwords, 16)));
}

/* ---- blocks of 32 ---- */

VEC_INLINE __m512i panel_low_nibbles(__m512i bytes)
{
    return _mm512_and_si512(bytes, _mm512_set1_epi8(15));
}

VEC_INLINE __m512i panel_high_nibbles(__m512i bytes)
{
    return panel_low_nibbles(_mm512_srli_epi16(bytes, 4));
}

/* Bit i of dword c of high_bits becomes bit 4 of element i of column c. */
VEC_INLINE void panel_add_high_bits(__m512i high_bits, __m512i q[8])
{
    VEC_UNROLL
    for (int step = 0; step < 8; step++) {
        /* The byte that holds the bits of this step, four times; each copy keeps one bit. */
        __m512i copies = _mm512_shuffle_epi8(
            high_bits, _mm512_add_epi8(_mm512_set1_epi8((char)(step / 2)),
                                       _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0)));
        __m512i bits = _mm512_set1_epi32((int)(step % 2 == 0 ? 0x08040201u : 0x80402010u));
        __mmask64 is_set = _mm512_test_epi8_mask(copies, bits);
        q[step] = _mm512_mask_add_epi8(q[step], is_set, q[step], _mm512_set1_epi8(16));
    }
}

/* A block of 32 elements; dtype is a constant. */
VEC_INLINE void panel_open_32(enum dtype dtype, const struct panel_bases *bases, __m512i panel[10])
{
    if (dtype == DTYPE_Q8_0) {
        __m512i flip = _mm512_set1_epi8(-128);
        panel_load_tile(bases, 2, panel);
        panel_load_tile(bases, 18, panel + 4);
        VEC_UNROLL
        for (int step = 0; step < 8; step++) {
            panel[step] = _mm512_xor_si512(panel[step], flip);
        }
        panel[8] = _mm512_castps_si512(panel_load_f16(bases, 0));
        return;
    }
    bool has_min = dtype == DTYPE_Q4_1 || dtype == DTYPE_Q5_1;
    bool has_high_bits = dtype == DTYPE_Q5_0 || dtype == DTYPE_Q5_1;
    int64_t bits_at = (has_min ? 4 : 2);
    __m512i nibbles[4];
    panel_load_tile(bases, bits_at + (has_high_bits ? 4 : 0), nibbles);
    VEC_UNROLL
    for (int i = 0; i < 4; i++) {
        panel[i] = panel_low_nibbles(nibbles[i]);
        panel[4 + i] = panel_high_nibbles(nibbles[i]);
    }
    if (has_high_bits) {
        panel_add_high_bits(panel_load_dwords(bases, bits_at), panel);
    }
    if (has_min) {
        __m512i scale_and_min = panel_load_dwords(bases, 0);
        panel[8] = _mm512_castps_si512(panel_f16_low(scale_and_min));
        panel[9] = _mm512_castps_si512(panel_f16_high(scale_and_min));
    } else {
        panel[8] = _mm512_castps_si512(panel_load_f16(bases, 0));
    }
}

/* ---- blocks of 256 ---- */

/* Byte `byte` of each dword, as an unsigned or signed number. */
VEC_INLINE __m512 panel_unsigned_byte(__m512i dwords, int byte)
{
    __m512i value =
        _mm512_and_si512(_mm512_srli_epi32(dwords, (unsigned)(8 * byte)), _mm512_set1_epi32(255));
    return _mm512_cvtepi32_ps(value);
}

VEC_INLINE __m512 panel_signed_byte(__m512i dwords, int byte)
{
    __m512i value = _mm512_slli_epi32(dwords, (unsigned)(24 - 8 * byte));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(value, 24));
}

/* Bytes 2 half and 2 half + 1 of each dword as two words. */
VEC_INLINE __m512i panel_words_of_bytes(__m512i dwords, int half)
{
    __m512i value = _mm512_srli_epi32(dwords, (unsigned)(16 * half));
    return _mm512_or_si512(
        _mm512_and_si512(value, _mm512_set1_epi32(0xff)),
        _mm512_and_si512(_mm512_slli_epi32(value, 8), _mm512_set1_epi32(0xff0000)));
}

/* As k_scales_unpack, all columns at once: byte g % 4 of dword c is group g's of column c. */
struct panel_k_scales {
    __m512i scales[2], mins[2];
};

VEC_INLINE struct panel_k_scales panel_unpack_k_scales(const __m512i packed[3])
{
    const __m512i six = _mm512_set1_epi8(63), high_two = _mm512_set1_epi8(0x30);
    struct panel_k_scales unpacked;
    unpacked.scales[0] = _mm512_and_si512(packed[0], six);
    unpacked.mins[0] = _mm512_and_si512(packed[1], six);
    unpacked.scales[1] = _mm512_or_si512(
        panel_low_nibbles(packed[2]), _mm512_and_si512(_mm512_srli_epi32(packed[0], 2), high_two));
    unpacked.mins[1] = _mm512_or_si512(panel_high_nibbles(packed[2]),
                                       _mm512_and_si512(_mm512_srli_epi32(packed[1], 2), high_two));
    return unpacked;
}

/* Q4_K or Q5_K. */
VEC_INLINE void panel_open_k_min(enum dtype dtype, const struct panel_bases *bases,
                                 __m512i panel[77])
{
    __m512i head[4], high_bits[8];
    panel_load_tile(bases, 0, head);
    struct panel_k_scales unpacked = panel_unpack_k_scales(head + 1);
    __m512 scale = panel_f16_low(head[0]);
    panel[76] = _mm512_castps_si512(panel_f16_high(head[0]));
    VEC_UNROLL
    for (int pair = 0; pair < 4; pair++) {
        panel[72 + pair] = panel_words_of_bytes(unpacked.mins[pair / 2], pair % 2);
    }
    if (dtype == DTYPE_Q5_K) {
        panel_load_tile(bases, 16, high_bits);
        panel_load_tile(bases, 32, high_bits + 4);
    }
    int64_t nibbles_at = (dtype == DTYPE_Q5_K ? 48 : 16);
    VEC_UNROLL
    for (int pair = 0; pair < 4; pair++) {
        __m512i *even = panel + 9 * (2 * pair), *odd = even + 9, nibbles[8];
        panel_load_tile(bases, nibbles_at + 32 * pair, nibbles);
        panel_load_tile(bases, nibbles_at + 32 * pair + 16, nibbles + 4);
        VEC_UNROLL
        for (int i = 0; i < 8; i++) {
            even[i] = panel_low_nibbles(nibbles[i]);
            odd[i] = panel_high_nibbles(nibbles[i]);
            if (dtype == DTYPE_Q5_K) {
                /* Bits 2 pair and 2 pair + 1 become bit 4. */
                const __m512i bit_4 = _mm512_set1_epi8(16);
                __m512i even_bit = pair < 2
                                       ? _mm512_slli_epi16(high_bits[i], (unsigned)(4 - 2 * pair))
                                       : _mm512_srli_epi16(high_bits[i], (unsigned)(2 * pair - 4));
                __m512i odd_bit = pair < 2
                                      ? _mm512_slli_epi16(high_bits[i], (unsigned)(3 - 2 * pair))
                                      : _mm512_srli_epi16(high_bits[i], (unsigned)(2 * pair - 3));
                even[i] = _mm512_or_si512(even[i], _mm512_and_si512(even_bit, bit_4));
                odd[i] = _mm512_or_si512(odd[i], _mm512_and_si512(odd_bit, bit_4));
            }
        }
        __m512i scales = unpacked.scales[pair / 2];
        even[8] =
            _mm512_castps_si512(_mm512_mul_ps(scale, panel_unsigned_byte(scales, 2 * (pair % 2))));
        odd[8] = _mm512_castps_si512(
            _mm512_mul_ps(scale, panel_unsigned_byte(scales, 2 * (pair % 2) + 1)));
    }
}

/* Q6_K. Group 2 quarter + part of a half's eight: part 0 or 1 is which 16
 * of the quarter's 32 elements. */
VEC_INLINE void panel_open_k_offset(const struct panel_bases *bases, __m512i panel[80])
{
    const __m512i bits_45 = _mm512_set1_epi8(0x30);
    __m512i scales[4];
    panel_load_tile(bases, 192, scales);
    __m512 scale = panel_load_f16(bases, 208);
    VEC_UNROLL
    for (int group = 0; group < 16; group++) {
        panel[5 * group + 4] = _mm512_castps_si512(
            _mm512_mul_ps(scale, panel_signed_byte(scales[group / 4], group % 4)));
    }
    for (int half_and_part = 0; half_and_part < 4; half_and_part++) {
        int half = half_and_part / 2, part = half_and_part % 2;
        __m512i pairs[4], nibbles[2][4], *groups = panel + 5 * (8 * half + part);
        panel_load_tile(bases, 128 + 32 * half + 16 * part, pairs);
        panel_load_tile(bases, 64 * half + 16 * part, nibbles[0]);
        panel_load_tile(bases, 64 * half + 32 + 16 * part, nibbles[1]);
        VEC_UNROLL
        for (int i = 0; i < 4; i++) {
            __m512i high[4] = {_mm512_slli_epi16(pairs[i], 4), _mm512_slli_epi16(pairs[i], 2),
                               pairs[i], _mm512_srli_epi16(pairs[i], 2)};
            VEC_UNROLL
            for (int quarter = 0; quarter < 4; quarter++) {
                __m512i low = quarter < 2 ? panel_low_nibbles(nibbles[quarter][i])
                                          : panel_high_nibbles(nibbles[quarter - 2][i]);
                groups[10 * quarter + i] =
                    _mm512_or_si512(low, _mm512_and_si512(high[quarter], bits_45));
            }
        }
    }
}

/* The block with which each row begins; dtype is a constant. panel [panel_vectors(kind)] */
VEC_INLINE void panel_open(enum dtype dtype, struct panel_rows rows, __m512i *panel)
{
    struct panel_bases bases = panel_bases_of(rows);
    switch (panel_kind(dtype)) {
    case PANEL_K_MIN:
        panel_open_k_min(dtype, &bases, panel);
        break;
    case PANEL_K_OFFSET:
        panel_open_k_offset(&bases, panel);
        break;
    default:
        panel_open_32(dtype, &bases, panel);
        break;
    }
}

#endif
#endif
