/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of quantised weights into vectors, and sums over their lanes: what quant_strip_avx2.c and
 * quant_panel_avx2.c share. Every dtype is a constant where these are called. */
#ifndef IMBREX_OPS_CPU_QUANT_OPEN_AVX2_H
#define IMBREX_OPS_CPU_QUANT_OPEN_AVX2_H

#if defined(__x86_64__)

#include <stdbool.h>
#include <string.h>

#include "ops/cpu/vec_avx2.h"
#include "ops/quant_blocks.h"

VEC_INLINE bool is_k_dtype(enum dtype dtype)
{
    return dtype == DTYPE_Q4_K || dtype == DTYPE_Q5_K || dtype == DTYPE_Q6_K;
}

/* How the integers of a format are multiplied. Q8_0 has signed ones; those of the others are taken
 * as [0, 2^bits), without their offset, so that vpmaddubsw takes them as its unsigned operand: its
 * sums of two products by activations in [-127, 127] leave room in 16 bits for more. */
VEC_INLINE int quant_bits(enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_Q4_0:
    case DTYPE_Q4_1:
    case DTYPE_Q4_K:
        return 4;
    case DTYPE_Q5_0:
    case DTYPE_Q5_1:
    case DTYPE_Q5_K:
        return 5;
    case DTYPE_Q6_K:
        return 6;
    default:
        return 8;
    }
}

/* dtype_block_bytes as a constant. */
VEC_INLINE int64_t block_bytes_of(enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_Q4_0:
        return sizeof(struct q4_0_block);
    case DTYPE_Q4_1:
        return sizeof(struct q4_1_block);
    case DTYPE_Q5_0:
        return sizeof(struct q5_0_block);
    case DTYPE_Q5_1:
        return sizeof(struct q5_1_block);
    case DTYPE_Q4_K:
        return sizeof(struct q4_k_block);
    case DTYPE_Q5_K:
        return sizeof(struct q5_k_block);
    case DTYPE_Q6_K:
        return sizeof(struct q6_k_block);
    default:
        return sizeof(struct q8_0_block);
    }
}

/* How many sums of two products one of 16 bits holds: 8 * 2 * 15 * 127 < 2^15, and so on. */
VEC_INLINE int quant_max_pairs(enum dtype dtype)
{
    int bits = quant_bits(dtype);
    return bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
}

/* What is to be subtracted from the integers of a 32-element block. */
VEC_INLINE int quant_offset(enum dtype dtype)
{
    return dtype == DTYPE_Q4_0 ? 8 : dtype == DTYPE_Q5_0 ? 16 : 0;
}

VEC_INLINE __m256i load_32(const void *bytes)
{
    return _mm256_loadu_si256((const __m256i *)bytes);
}

VEC_INLINE __m256i broadcast_16(const void *bytes)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)bytes));
}

VEC_INLINE __m256i broadcast_4(const void *bytes)
{
    int32_t word;
    memcpy(&word, bytes, sizeof(word));
    return _mm256_set1_epi32(word);
}

/* 16 bytes of nibbles: the low ones, then the high ones. */
VEC_INLINE __m256i open_nibbles(const uint8_t *nibbles)
{
    const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    return _mm256_and_si256(_mm256_srlv_epi32(broadcast_16(nibbles), shifts), _mm256_set1_epi8(15));
}

/* Byte i of the vector becomes 16 where bit i % 8 of byte i is set, else 0. */
VEC_INLINE __m256i pick_high_bits(__m256i spread)
{
    const __m256i own_bit = _mm256_set1_epi64x((int64_t)0x8040201008040201u);
    spread = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own_bit), own_bit);
    return _mm256_and_si256(spread, _mm256_set1_epi8(16));
}

/* Bit i of the four bytes becomes bit 4 of byte i. */
VEC_INLINE __m256i open_high_bits(const uint8_t *high_bits)
{
    const __m256i spread =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    return pick_high_bits(_mm256_shuffle_epi8(broadcast_4(high_bits), spread));
}

/* Bits [from, ..) of each byte to bits [to, ..); bits of neighbours come along. */
VEC_INLINE __m256i move_bits(__m256i bytes, int from, int to)
{
    return from > to ? _mm256_srli_epi16(bytes, from - to) : _mm256_slli_epi16(bytes, to - from);
}

/* The 32 integers of a block, or of 32 elements `group` of a K block, in order. */
VEC_INLINE __m256i open_32(enum dtype dtype, const unsigned char *at, int group)
{
    const __m256i low_bits = _mm256_set1_epi8(15);
    switch (dtype) {
    case DTYPE_Q4_0:
        return open_nibbles(at + offsetof(struct q4_0_block, nibbles));
    case DTYPE_Q4_1:
        return open_nibbles(at + offsetof(struct q4_1_block, nibbles));
    case DTYPE_Q5_0:
        return _mm256_or_si256(open_nibbles(at + offsetof(struct q5_0_block, nibbles)),
                               open_high_bits(at + offsetof(struct q5_0_block, high_bits)));
    case DTYPE_Q5_1:
        return _mm256_or_si256(open_nibbles(at + offsetof(struct q5_1_block, nibbles)),
                               open_high_bits(at + offsetof(struct q5_1_block, high_bits)));
    case DTYPE_Q4_K: {
        __m256i nibbles = load_32(at + offsetof(struct q4_k_block, nibbles) + 32 * (group / 2));
        return _mm256_and_si256(move_bits(nibbles, 4 * (group % 2), 0), low_bits);
    }
    case DTYPE_Q5_K: {
        __m256i nibbles = load_32(at + offsetof(struct q5_k_block, nibbles) + 32 * (group / 2));
        __m256i high = load_32(at + offsetof(struct q5_k_block, high_bits));
        return _mm256_or_si256(_mm256_and_si256(move_bits(nibbles, 4 * (group % 2), 0), low_bits),
                               _mm256_and_si256(move_bits(high, group, 4), _mm256_set1_epi8(16)));
    }
    case DTYPE_Q6_K: {
        int half = group / 4, p = group % 4;
        __m256i nibbles =
            load_32(at + offsetof(struct q6_k_block, nibbles) + 64 * half + 32 * (p % 2));
        __m256i pairs = load_32(at + offsetof(struct q6_k_block, high_pairs) + 32 * half);
        return _mm256_or_si256(
            _mm256_and_si256(move_bits(nibbles, 4 * (p / 2), 0), low_bits),
            _mm256_and_si256(move_bits(pairs, 2 * p, 4), _mm256_set1_epi8(0x30)));
    }
    default:
        return load_32(at + offsetof(struct q8_0_block, q));
    }
}

/* Eight F16 numbers `offset` bytes into a block of each row. */
VEC_INLINE __m256 load_scales(const unsigned char *const rows[8], int64_t offset)
{
    uint16_t bits[8];
    VEC_UNROLL
    for (int row = 0; row < 8; row++) {
        memcpy(&bits[row], rows[row] + offset, sizeof(bits[row]));
    }
    uint64_t low = (uint64_t)((uint32_t)bits[0] | (uint32_t)bits[1] << 16) |
                   (uint64_t)((uint32_t)bits[2] | (uint32_t)bits[3] << 16) << 32;
    uint64_t high = (uint64_t)((uint32_t)bits[4] | (uint32_t)bits[5] << 16) |
                    (uint64_t)((uint32_t)bits[6] | (uint32_t)bits[7] << 16) << 32;
    return _mm256_cvtph_ps(_mm_set_epi64x((int64_t)high, (int64_t)low));
}

VEC_INLINE int64_t scale_offset(enum dtype dtype)
{
    return dtype == DTYPE_Q6_K ? (int64_t)offsetof(struct q6_k_block, scale) : 0;
}

/* Where quant_has_min; the same place in all of these. */
#define MIN_OFFSET 2
_Static_assert(offsetof(struct q4_1_block, min) == MIN_OFFSET, "");
_Static_assert(offsetof(struct q5_1_block, min) == MIN_OFFSET, "");
_Static_assert(offsetof(struct q4_k_block, min_scale) == MIN_OFFSET, "");
_Static_assert(offsetof(struct q5_k_block, min_scale) == MIN_OFFSET, "");

/* k_scales_unpack for Q4_K and Q5_K: a byte for each group. */
VEC_INLINE void open_k_scales(const unsigned char *at, uint64_t *scales, uint64_t *mins)
{
    uint32_t words[3];
    memcpy(words, at + offsetof(struct q4_k_block, packed_scales), sizeof(words));
    uint32_t high_scales = (words[2] & 0x0f0f0f0f) | (words[0] >> 2 & 0x30303030);
    uint32_t high_mins = (words[2] >> 4 & 0x0f0f0f0f) | (words[1] >> 2 & 0x30303030);
    *scales = (words[0] & 0x3f3f3f3f) | (uint64_t)high_scales << 32;
    *mins = (words[1] & 0x3f3f3f3f) | (uint64_t)high_mins << 32;
}
_Static_assert(offsetof(struct q4_k_block, packed_scales) ==
                   offsetof(struct q5_k_block, packed_scales),
               "");

/* The eight sums of a block joined to what stands before it. min_dots where quant_has_min. */
VEC_INLINE __m256 add_block(enum dtype dtype, __m256 sums, __m256i dots, __m256 scales,
                            __m256 min_dots, __m256 mins, __m256 activation_scale)
{
    __m256 terms = _mm256_mul_ps(scales, _mm256_cvtepi32_ps(dots));
    if (quant_has_min(dtype)) {
        terms = is_k_dtype(dtype) ? _mm256_fnmadd_ps(mins, min_dots, terms)
                                  : _mm256_fmadd_ps(mins, min_dots, terms);
    }
    return _mm256_fmadd_ps(terms, activation_scale, sums);
}

/* The sums of 32 activations each of a Q8_K block, as 16 bits. */
VEC_INLINE __m128i k_sums_of_32(const int16_t sums[16])
{
    return _mm_hadd_epi16(_mm_loadu_si128((const __m128i *)(const void *)sums),
                          _mm_loadu_si128((const __m128i *)(const void *)(sums + 8)));
}

#endif
#endif
