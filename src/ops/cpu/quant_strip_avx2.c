/* SPDX-License-Identifier: Apache-2.0 */
/* Few rows of activations: memory is the limit, so the weights are read once, eight rows of them as
 * eight streams, while what the streams come to next is brought into the cache.
 * The lanes of a vector hold elements of one column; a tree of shuffles and additions turns eight
 * such vectors into one whose lanes are columns, before the scales are applied. */
#include "ops/cpu/quant_tile_avx2.h"

#if defined(__x86_64__)

#include <assert.h>
#include <stddef.h>

#include "ops/cpu/quant_open_avx2.h"
#include "ops/quant.h"

#define LINE_BYTES 64

struct strip {
    const unsigned char *weight_rows[QUANT_STRIP_COLS];
    const unsigned char *activations;
    int64_t num_blocks;
    bool does_prefetch;
    int64_t gap_offset, gap_bytes; /* from an offset on, what comes is that much further */
};

/* The line of a stream, QUANT_STRIP_AHEAD bytes ahead of an offset. */
VEC_INLINE void prefetch_line(const struct strip *strip, int col, int64_t offset)
{
    int64_t at = offset + QUANT_STRIP_AHEAD;
    at += offset >= strip->gap_offset ? strip->gap_bytes : 0;
    _mm_prefetch((const char *)((uintptr_t)strip->weight_rows[col] + (uintptr_t)at), _MM_HINT_T0);
}

/* Lane i is the sum of the eight lanes of vector i. */
VEC_INLINE __m256i sums_of_8(const __m256i vecs[8])
{
    __m256i pairs[4], fours[2];
    VEC_UNROLL
    for (int i = 0; i < 4; i++) {
        pairs[i] = _mm256_add_epi32(_mm256_unpacklo_epi32(vecs[2 * i], vecs[2 * i + 1]),
                                    _mm256_unpackhi_epi32(vecs[2 * i], vecs[2 * i + 1]));
    }
    VEC_UNROLL
    for (int i = 0; i < 2; i++) {
        fours[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                                    _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
    }
    return _mm256_add_epi32(_mm256_permute2x128_si256(fours[0], fours[1], 0x21),
                            _mm256_blend_epi32(fours[0], fours[1], 0xf0));
}

/* Lane i is the sum of the four lanes of vector i. */
VEC_INLINE __m256i sums_of_4(const __m128i vecs[8])
{
    __m256i both[4], pairs[2];
    VEC_UNROLL
    for (int i = 0; i < 4; i++) {
        both[i] = _mm256_setr_m128i(vecs[i], vecs[i + 4]);
    }
    VEC_UNROLL
    for (int i = 0; i < 2; i++) {
        pairs[i] = _mm256_add_epi32(_mm256_unpacklo_epi32(both[2 * i], both[2 * i + 1]),
                                    _mm256_unpackhi_epi32(both[2 * i], both[2 * i + 1]));
    }
    return _mm256_add_epi32(_mm256_unpacklo_epi64(pairs[0], pairs[1]),
                            _mm256_unpackhi_epi64(pairs[0], pairs[1]));
}

/* Q8_0. |w| <= 128 times 127, twice, fits 16 bits; and the sign of w goes to the activation, which
 * is never -128. */
VEC_INLINE __m256i dots_of_bytes(const unsigned char *const rows[QUANT_STRIP_COLS], int64_t at,
                                 const int8_t *activations)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i a = load_32(activations), parts[QUANT_STRIP_COLS];
    VEC_UNROLL
    for (int col = 0; col < QUANT_STRIP_COLS; col++) {
        __m256i weights = open_32(DTYPE_Q8_0, rows[col] + at, 0);
        __m256i pairs =
            _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(a, weights));
        parts[col] = _mm256_madd_epi16(pairs, ones);
    }
    return sums_of_8(parts);
}

VEC_INLINE int64_t nibbles_offset(enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_Q4_0:
        return offsetof(struct q4_0_block, nibbles);
    case DTYPE_Q4_1:
        return offsetof(struct q4_1_block, nibbles);
    case DTYPE_Q5_0:
        return offsetof(struct q5_0_block, nibbles);
    default:
        return offsetof(struct q5_1_block, nibbles);
    }
}

/* The 32-element formats of 4 and 5 bits: a column in each half of a vector, i and i + 4, whose low
 * and high nibbles are multiplied one after the other. */
VEC_INLINE __m256i dots_of_nibbles(enum dtype dtype,
                                   const unsigned char *const rows[QUANT_STRIP_COLS], int64_t at,
                                   const int8_t *activations)
{
    const __m256i ones = _mm256_set1_epi16(1), low_bits = _mm256_set1_epi8(15);
    __m256i parts[4], pairs[2];
    VEC_UNROLL
    for (int col = 0; col < 4; col++) {
        const unsigned char *first = rows[col] + at, *second = rows[col + 4] + at;
        __m256i nibbles = _mm256_inserti128_si256(
            broadcast_16(first + nibbles_offset(dtype)),
            _mm_loadu_si128((const __m128i *)(const void *)(second + nibbles_offset(dtype))), 1);
        __m256i low = _mm256_and_si256(nibbles, low_bits);
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), low_bits);
        if (quant_bits(dtype) == 5) {
            const __m256i low_bytes =
                _mm256_set_epi64x(0x0101010101010101, 0, 0x0101010101010101, 0);
            const __m256i high_bytes = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202,
                                                         0x0303030303030303, 0x0202020202020202);
            int64_t offset = dtype == DTYPE_Q5_0 ? (int64_t)offsetof(struct q5_0_block, high_bits)
                                                 : (int64_t)offsetof(struct q5_1_block, high_bits);
            __m256i bits =
                _mm256_blend_epi32(broadcast_4(first + offset), broadcast_4(second + offset), 0xf0);
            low = _mm256_or_si256(low, pick_high_bits(_mm256_shuffle_epi8(bits, low_bytes)));
            high = _mm256_or_si256(high, pick_high_bits(_mm256_shuffle_epi8(bits, high_bytes)));
        }
        parts[col] = _mm256_add_epi16(_mm256_maddubs_epi16(low, broadcast_16(activations)),
                                      _mm256_maddubs_epi16(high, broadcast_16(activations + 16)));
    }
    VEC_UNROLL
    for (int i = 0; i < 2; i++) {
        pairs[i] = _mm256_add_epi16(_mm256_unpacklo_epi32(parts[2 * i], parts[2 * i + 1]),
                                    _mm256_unpackhi_epi32(parts[2 * i], parts[2 * i + 1]));
    }
    /* So far 16 bits held 4 products of two. */
    if (quant_max_pairs(dtype) >= 8) {
        return _mm256_madd_epi16(_mm256_add_epi16(_mm256_unpacklo_epi64(pairs[0], pairs[1]),
                                                  _mm256_unpackhi_epi64(pairs[0], pairs[1])),
                                 ones);
    }
    pairs[0] = _mm256_madd_epi16(pairs[0], ones);
    pairs[1] = _mm256_madd_epi16(pairs[1], ones);
    return _mm256_add_epi32(_mm256_unpacklo_epi64(pairs[0], pairs[1]),
                            _mm256_unpackhi_epi64(pairs[0], pairs[1]));
}

VEC_INLINE void strip_blocks(enum dtype dtype, const struct strip *strip, float *results)
{
    const struct q8_activations *block =
        (const struct q8_activations *)(const void *)strip->activations;
    const unsigned char *rows[QUANT_STRIP_COLS];
    int64_t block_bytes = block_bytes_of(dtype);
    __m256 sums = _mm256_setzero_ps(), mins = _mm256_setzero_ps(), min_dots = mins;
    VEC_UNROLL
    for (int col = 0; col < QUANT_STRIP_COLS; col++) {
        rows[col] = strip->weight_rows[col];
    }
    int64_t next_line = strip->does_prefetch ? 0 : INT64_MAX;
    for (int64_t at = 0; at < strip->num_blocks * block_bytes; at += block_bytes, block++) {
        if (at >= next_line) {
            VEC_UNROLL
            for (int col = 0; col < QUANT_STRIP_COLS; col++) {
                prefetch_line(strip, col, next_line);
            }
            next_line += LINE_BYTES;
        }
        __m256i dots = dtype == DTYPE_Q8_0 ? dots_of_bytes(rows, at, block->q)
                                           : dots_of_nibbles(dtype, rows, at, block->q);
        if (quant_offset(dtype) != 0) {
            dots = _mm256_sub_epi32(dots, _mm256_set1_epi32(quant_offset(dtype) * block->sum));
        }
        if (quant_has_min(dtype)) {
            mins = load_scales(rows, at + MIN_OFFSET);
            min_dots = _mm256_set1_ps((float)block->sum);
        }
        sums = add_block(dtype, sums, dots, load_scales(rows, at + scale_offset(dtype)), min_dots,
                         mins, _mm256_set1_ps(block->scale));
    }
    _mm256_storeu_ps(results, sums);
}

/* In Q6_K, the lower half of a vector of 32 elements has another scale than the upper one. Picks
 * 16-bit scales 2i and 2i + 1 of eight. */
static const uint8_t half_scale_picks[4][32] = {
#define PICKS(i) i, i + 1, i, i + 1, i, i + 1, i, i + 1, i, i + 1, i, i + 1, i, i + 1, i, i + 1
    {PICKS(0), PICKS(2)}, {PICKS(4), PICKS(6)}, {PICKS(8), PICKS(10)}, {PICKS(12), PICKS(14)}};

/* One block of one column: what is to be added up over the lanes. */
VEC_INLINE __m256i q6_k_part(const unsigned char *at, const struct q8_k_activations *block)
{
    __m256i all = _mm256_cvtepi8_epi16(
        _mm_loadu_si128((const __m128i *)(const void *)(at + offsetof(struct q6_k_block, scales))));
    const __m256i scales[2] = {_mm256_permute2x128_si256(all, all, 0x00),
                               _mm256_permute2x128_si256(all, all, 0x11)};
    /* The integers are 32 too large. */
    __m256i part = _mm256_sub_epi32(
        _mm256_setzero_si256(), _mm256_madd_epi16(_mm256_slli_epi16(all, 5), load_32(block->sums)));
    VEC_UNROLL
    for (int group = 0; group < 8; group++) {
        __m256i pairs =
            _mm256_maddubs_epi16(open_32(DTYPE_Q6_K, at, group), load_32(block->q + 32 * group));
        __m256i scale =
            _mm256_shuffle_epi8(scales[group / 4], load_32(half_scale_picks[group % 4]));
        part = _mm256_add_epi32(part, _mm256_madd_epi16(pairs, scale));
    }
    return part;
}

/* Q4_K and Q5_K: in both halves of a vector, the eight scales and then the eight mins, as
 * k_scales_unpack finds them. */
VEC_INLINE __m256i k_scale_bytes(const unsigned char *at)
{
    __m256i packed = broadcast_16(at + offsetof(struct q4_k_block, packed_scales));
    __m256i early = _mm256_and_si256(packed, _mm256_set1_epi8(63));
    __m256i late =
        _mm256_srlv_epi32(_mm256_shuffle_epi32(packed, 0xaa), _mm256_set1_epi64x((int64_t)4 << 32));
    late = _mm256_and_si256(late, _mm256_set1_epi8(15));
    late = _mm256_or_si256(late,
                           _mm256_and_si256(_mm256_srli_epi32(packed, 2), _mm256_set1_epi8(0x30)));
    return _mm256_unpacklo_epi32(early, late);
}

/* Bytes of a vector that k_scale_bytes gave: each scale twice as 16 bits; each min as 16 bits. */
static const uint8_t scale_picks[32] = {
#define TWICE(i) i, 0x80, i, 0x80
    TWICE(0), TWICE(1), TWICE(2), TWICE(3), TWICE(4), TWICE(5), TWICE(6), TWICE(7)};
static const uint8_t min_picks[16] = {8,  0x80, 9,  0x80, 10, 0x80, 11, 0x80,
                                      12, 0x80, 13, 0x80, 14, 0x80, 15, 0x80};

VEC_INLINE __m256i k_part(enum dtype dtype, const unsigned char *at,
                          const struct q8_k_activations *block, __m128i sums_of_32,
                          __m128i *min_part)
{
    __m256i bytes = k_scale_bytes(at), part = _mm256_setzero_si256();
    int32_t scales[8]; /* read one by one: a broadcast from memory takes no arithmetic unit */
    _mm256_storeu_si256((__m256i *)(void *)scales,
                        _mm256_shuffle_epi8(bytes, load_32(scale_picks)));
    __m128i mins = _mm_shuffle_epi8(_mm256_castsi256_si128(bytes),
                                    _mm_loadu_si128((const __m128i *)(const void *)min_picks));
    *min_part = _mm_madd_epi16(mins, sums_of_32);
    VEC_UNROLL
    for (int group = 0; group < 8; group++) {
        __m256i pairs =
            _mm256_maddubs_epi16(open_32(dtype, at, group), load_32(block->q + 32 * group));
        part = _mm256_add_epi32(part, _mm256_madd_epi16(pairs, broadcast_4(&scales[group])));
    }
    return part;
}

VEC_INLINE void strip_k_blocks(enum dtype dtype, const struct strip *strip, float *results)
{
    const struct q8_k_activations *block =
        (const struct q8_k_activations *)(const void *)strip->activations;
    int64_t block_bytes = block_bytes_of(dtype);
    __m256 sums = _mm256_setzero_ps(), mins = _mm256_setzero_ps(), min_dots = mins;
    for (int64_t at = 0; at < strip->num_blocks * block_bytes; at += block_bytes, block++) {
        __m256i parts[QUANT_STRIP_COLS];
        __m128i min_parts[QUANT_STRIP_COLS], sums_of_32 = k_sums_of_32(block->sums);
        for (int col = 0; col < QUANT_STRIP_COLS; col++) {
            for (int64_t line = 0; strip->does_prefetch && line < block_bytes; line += LINE_BYTES) {
                prefetch_line(strip, col, at + line);
            }
            const unsigned char *weights = strip->weight_rows[col] + at;
            parts[col] = dtype == DTYPE_Q6_K
                             ? q6_k_part(weights, block)
                             : k_part(dtype, weights, block, sums_of_32, &min_parts[col]);
        }
        if (quant_has_min(dtype)) {
            mins = load_scales(strip->weight_rows, at + MIN_OFFSET);
            min_dots = _mm256_cvtepi32_ps(sums_of_4(min_parts));
        }
        sums = add_block(dtype, sums, sums_of_8(parts),
                         load_scales(strip->weight_rows, at + scale_offset(dtype)), min_dots, mins,
                         _mm256_set1_ps(block->scale));
    }
    _mm256_storeu_ps(results, sums);
}

typedef void strip_fn(const struct strip *strip, float *results);

#define DEFINE_STRIP(dtype)                                              \
    static void strip_##dtype(const struct strip *strip, float *results) \
    {                                                                    \
        strip_blocks(DTYPE_##dtype, strip, results);                     \
    }
#define DEFINE_K_STRIP(dtype)                                            \
    static void strip_##dtype(const struct strip *strip, float *results) \
    {                                                                    \
        strip_k_blocks(DTYPE_##dtype, strip, results);                   \
    }
DEFINE_STRIP(Q8_0)
DEFINE_STRIP(Q4_0)
DEFINE_STRIP(Q4_1)
DEFINE_STRIP(Q5_0)
DEFINE_STRIP(Q5_1)
DEFINE_K_STRIP(Q4_K)
DEFINE_K_STRIP(Q5_K)
DEFINE_K_STRIP(Q6_K)

static strip_fn *const strips[DTYPE_COUNT] = {
    [DTYPE_Q8_0] = strip_Q8_0, [DTYPE_Q4_0] = strip_Q4_0, [DTYPE_Q4_1] = strip_Q4_1,
    [DTYPE_Q5_0] = strip_Q5_0, [DTYPE_Q5_1] = strip_Q5_1, [DTYPE_Q4_K] = strip_Q4_K,
    [DTYPE_Q5_K] = strip_Q5_K, [DTYPE_Q6_K] = strip_Q6_K,
};

void quant_strip(const struct quant_product *product, int64_t row,
                 const struct quant_strip_cols *cols, bool does_prefetch,
                 float sums[QUANT_STRIP_COLS])
{
    struct strip strip = {.activations = product->rows + row * product->row_bytes,
                          .num_blocks = product->num_blocks,
                          .does_prefetch = does_prefetch,
                          .gap_offset = product->weight_row_bytes - QUANT_STRIP_AHEAD,
                          .gap_bytes = cols->gap_bytes};
    assert(cols->col < cols->end && strips[product->dtype] != NULL);
    for (int32_t i = 0; i < QUANT_STRIP_COLS; i++) {
        int64_t col = cols->col + i * cols->step;
        col = col < cols->end ? col : cols->end - 1;
        strip.weight_rows[i] = product->weights + col * product->weight_row_bytes;
    }
    strips[product->dtype](&strip, sums);
}

#endif
