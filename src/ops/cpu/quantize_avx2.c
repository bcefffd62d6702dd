/* SPDX-License-Identifier: Apache-2.0 */
/* Activations into blocks, bit for bit as quant_quantize_activations gives them: the same
 * operations in the same order, eight lanes at a time. Blocks without an ordinary scale (zeros,
 * tiny, infinite or NaN values) are left to that function itself. */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <assert.h>
#include <math.h>
#include <string.h>

#include "ops/cpu/vec_avx2.h"
#include "ops/quant_blocks.h"

#define NUM_VECS (QUANT_BLOCK / VEC_LANES)
#define NUM_K_VECS (QUANT_K_BLOCK / VEC_LANES)

VEC_INLINE __m256i magnitude_bits(const float *a)
{
    __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)a);
    return _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
}

VEC_INLINE uint32_t max_of_lanes(__m256i vec)
{
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(vec), _mm256_extracti128_si256(vec, 1));
    __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1)));
}

/* The largest magnitude, as bits: their order is that of the numbers, with NaN above infinity. */
VEC_INLINE uint32_t largest_bits(const float *a, int num_vecs)
{
    __m256i largest = magnitude_bits(a);
    for (int vec = 1; vec < num_vecs; vec++) {
        largest = _mm256_max_epu32(largest, magnitude_bits(a + vec * VEC_LANES));
    }
    return max_of_lanes(largest);
}

VEC_INLINE int32_t sum_of_lanes(__m256i vec)
{
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(vec), _mm256_extracti128_si256(vec, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

/* Four vectors of integers that int8 holds, in order. */
VEC_INLINE __m256i pack_bytes(const __m256i wholes[4])
{
    __m256i low = _mm256_packs_epi32(wholes[0], wholes[1]);
    __m256i high = _mm256_packs_epi32(wholes[2], wholes[3]);
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high),
                                       _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* False: not an ordinary block, nothing was written. */
static bool quantize_q8(const float *a, struct q8_activations *block)
{
    uint32_t bits = largest_bits(a, NUM_VECS);
    float largest;
    memcpy(&largest, &bits, sizeof(largest));
    float scale = largest / 127.0f;
    float inverse = 1.0f / scale;
    if (!isfinite(largest) || !isfinite(inverse)) {
        return false;
    }
    __m256i wholes[NUM_VECS], sum = _mm256_setzero_si256();
    VEC_UNROLL
    for (int vec = 0; vec < NUM_VECS; vec++) {
        __m256 value = _mm256_mul_ps(_mm256_loadu_ps(a + vec * VEC_LANES), _mm256_set1_ps(inverse));
        __m256i whole = _mm256_cvttps_epi32(value);
        __m256 rest = _mm256_sub_ps(value, _mm256_cvtepi32_ps(whole));
        __m256 up = _mm256_cmp_ps(rest, _mm256_set1_ps(0.5f), _CMP_GE_OQ);
        __m256 down = _mm256_cmp_ps(rest, _mm256_set1_ps(-0.5f), _CMP_LE_OQ);
        whole = _mm256_sub_epi32(whole, _mm256_castps_si256(up));
        wholes[vec] = _mm256_add_epi32(whole, _mm256_castps_si256(down));
        sum = _mm256_add_epi32(sum, wholes[vec]);
    }
    _mm256_storeu_si256((__m256i *)(void *)block->q, pack_bytes(wholes));
    block->sum = sum_of_lanes(sum);
    block->scale = _cvtsh_ss(_cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT));
    return true;
}

/* The first value of this magnitude, which is there. */
VEC_INLINE float first_of_magnitude(const float *a, uint32_t bits)
{
    __m256i wanted = _mm256_set1_epi32((int32_t)bits);
    int first = 0;
    unsigned found = 0;
    for (; found == 0; first += VEC_LANES) {
        __m256i equal = _mm256_cmpeq_epi32(magnitude_bits(a + first), wanted);
        found = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(equal));
    }
    return a[first - VEC_LANES + __builtin_ctz(found)];
}

static bool quantize_q8_k(const float *a, struct q8_k_activations *block)
{
    uint32_t bits = largest_bits(a, NUM_K_VECS);
    if (bits >= 0x7f800000) {
        return false;
    }
    float inverse = -127.0f / first_of_magnitude(a, bits);
    if (!isfinite(inverse)) {
        return false;
    }
    block->scale = 1.0f / inverse;
    const __m256 magic = _mm256_set1_ps(0x1.8p23f);
    for (int first = 0; first < QUANT_K_BLOCK; first += QUANT_BLOCK) {
        __m256i wholes[NUM_VECS];
        VEC_UNROLL
        for (int vec = 0; vec < NUM_VECS; vec++) {
            __m256 a_vec = _mm256_loadu_ps(a + first + vec * VEC_LANES);
            __m256 value = _mm256_add_ps(_mm256_mul_ps(a_vec, _mm256_set1_ps(inverse)), magic);
            __m256i whole =
                _mm256_sub_epi32(_mm256_cvttps_epi32(value), _mm256_set1_epi32(3 << 22));
            wholes[vec] = _mm256_min_epi32(whole, _mm256_set1_epi32(127));
        }
        _mm256_storeu_si256((__m256i *)(void *)(block->q + first), pack_bytes(wholes));
        block->sums[first / 16] = (int16_t)sum_of_lanes(_mm256_add_epi32(wholes[0], wholes[1]));
        block->sums[first / 16 + 1] = (int16_t)sum_of_lanes(_mm256_add_epi32(wholes[2], wholes[3]));
    }
    return true;
}

void avx2_quantize(enum activation_form form, const float *a, void *blocks, int64_t count)
{
    assert(form != ACTIVATION_FORM_PLAIN);
    if (form == ACTIVATION_FORM_Q8) {
        struct q8_activations *block = blocks;
        for (int64_t first = 0; first < count; first += QUANT_BLOCK, block++) {
            if (!quantize_q8(a + first, block)) {
                quant_quantize_activations(form, a + first, block, QUANT_BLOCK);
            }
        }
    } else {
        struct q8_k_activations *block = blocks;
        for (int64_t first = 0; first < count; first += QUANT_K_BLOCK, block++) {
            if (!quantize_q8_k(a + first, block)) {
                quant_quantize_activations(form, a + first, block, QUANT_K_BLOCK);
            }
        }
    }
}

#endif
