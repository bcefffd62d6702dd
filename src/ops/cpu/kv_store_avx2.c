/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of the KV cache, rounded and stored with eight lanes in the reference's operations. What is
 * left of a row beside whole vectors goes through buffers, never beyond its end. */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <math.h>
#include <string.h>

#include "ops/cpu/vec_avx2.h"

_Static_assert(KV_FP8_SUMS == VEC_LANES, "a lane is a sum");

#define LARGEST_FINITE 0x7f7fffff /* bits of FLT_MAX */

/* Lanes from num_lanes on are zero and not read. */
VEC_INLINE __m256 load_low(const float *x, int32_t num_lanes)
{
    return num_lanes >= VEC_LANES ? _mm256_loadu_ps(x)
                                  : _mm256_maskload_ps(x, vec_mask_low(num_lanes));
}

/* The first num_bytes of 16. */
VEC_INLINE void store_low_bytes(unsigned char *at, __m128i bytes, int32_t num_bytes)
{
    unsigned char buffer[16];
    if (num_bytes >= 16) {
        _mm_storeu_si128((__m128i *)(void *)at, bytes);
        return;
    }
    _mm_storeu_si128((__m128i *)(void *)buffer, bytes);
    memcpy(at, buffer, (size_t)num_bytes);
}

/* The low 16 bits of each lane side by side. */
VEC_INLINE __m128i narrow_to_16(__m256i lanes)
{
    __m256i packed = _mm256_packus_epi32(lanes, lanes);
    return _mm_unpacklo_epi64(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
}

VEC_INLINE __m128i round_to_bf16(__m256 x)
{
    __m256i wide = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(wide, _mm256_set1_epi32(0x7fff)), odd), 16);
    __m256i nan = _mm256_or_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(0x40));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return narrow_to_16(_mm256_blendv_epi8(rounded, nan, is_nan));
}

static void store_halves(enum kv_dtype dtype, const float *x, int32_t head_dim,
                         unsigned char *elements)
{
    for (int32_t i = 0; i < head_dim; i += VEC_LANES) {
        __m256 lanes = load_low(x + i, head_dim - i);
        __m128i halves = dtype == KV_DTYPE_F16
                             ? _mm256_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
                             : round_to_bf16(lanes);
        store_low_bytes(elements + 2 * (int64_t)i, halves, 2 * (head_dim - i));
    }
}

/* Quotients within +-448.9, in the low byte of each lane. */
VEC_INLINE __m256i round_to_fp8(__m256 quotients)
{
    const __m256 sign_bit = _mm256_set1_ps(-0.0f);
    __m256 magnitudes = _mm256_andnot_ps(sign_bit, quotients);
    __m256i wide = _mm256_castps_si256(magnitudes);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 20), _mm256_set1_epi32(1));
    __m256i normal = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(wide, _mm256_set1_epi32(0x7ffff)), odd), 20);
    normal = _mm256_sub_epi32(normal, _mm256_set1_epi32((127 - 7) << 3));
    __m256i subnormal = _mm256_cvtps_epi32(_mm256_mul_ps(magnitudes, _mm256_set1_ps(0x1p9f)));
    __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), wide); /* 2^-6 */
    __m256i codes = _mm256_blendv_epi8(normal, subnormal, is_subnormal);
    codes = _mm256_min_epi32(codes, _mm256_set1_epi32(0x7e));
    __m256i signs = _mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(sign_bit, quotients)), 24);
    return _mm256_or_si256(codes, signs);
}

/* The nearest number of E4M3, as a float. */
VEC_INLINE __m256 nearest_fp8(__m256 quotients)
{
    const __m256 sign_bit = _mm256_set1_ps(-0.0f);
    __m256 magnitudes = _mm256_andnot_ps(sign_bit, quotients);
    __m256i wide = _mm256_castps_si256(magnitudes);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 20), _mm256_set1_epi32(1));
    __m256i normal = _mm256_add_epi32(_mm256_add_epi32(wide, _mm256_set1_epi32(0x7ffff)), odd);
    normal = _mm256_and_si256(normal, _mm256_set1_epi32(~0xfffff));
    __m256 subnormal =
        _mm256_mul_ps(_mm256_round_ps(_mm256_mul_ps(magnitudes, _mm256_set1_ps(0x1p9f)),
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                      _mm256_set1_ps(0x1p-9f));
    __m256 is_subnormal = _mm256_cmp_ps(magnitudes, _mm256_set1_ps(0x1p-6f), _CMP_LT_OQ);
    __m256 nearest = _mm256_blendv_ps(_mm256_castsi256_ps(normal), subnormal, is_subnormal);
    nearest = _mm256_min_ps(nearest, _mm256_set1_ps(KV_FP8_LARGEST));
    return _mm256_or_ps(nearest, _mm256_and_ps(sign_bit, quotients));
}

#define GROUP_VECS (KV_GROUP_ELEMENTS / VEC_LANES)

/* As the reference's; the lanes are its sums. */
static uint16_t choose_fp8_scale(const __m256 lanes[GROUP_VECS], uint16_t least)
{
    uint16_t best = least;
    float smallest = INFINITY;
    for (int i = 0; i < KV_FP8_SCALES && bf16_to_float(least) > 0.0f; i++) {
        uint16_t scale = (uint16_t)(least + i * KV_FP8_SCALE_STEP);
        __m256 scales = _mm256_set1_ps(bf16_to_float(scale)), sums = _mm256_setzero_ps();
        VEC_UNROLL
        for (int j = 0; j < GROUP_VECS; j++) {
            __m256 stored = _mm256_mul_ps(nearest_fp8(_mm256_div_ps(lanes[j], scales)), scales);
            __m256 errors = _mm256_sub_ps(stored, lanes[j]);
            sums = _mm256_add_ps(sums, _mm256_mul_ps(errors, errors));
        }
        float error = vec_sum(sums);
        if (error < smallest) {
            smallest = error;
            best = scale;
        }
    }
    return best;
}

/* Quotients within +-127.3. */
VEC_INLINE __m256i round_to_int8(__m256 quotients)
{
    __m256i q = _mm256_cvtps_epi32(quotients);
    q = _mm256_min_epi32(q, _mm256_set1_epi32(127));
    q = _mm256_max_epi32(q, _mm256_set1_epi32(-127));
    return _mm256_and_si256(q, _mm256_set1_epi32(0xff));
}

/* Magnitudes as integers: these order floats, infinity and then NaN behind the finite ones. */
VEC_INLINE int32_t largest_bits(__m256i bits)
{
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    __m128i one = _mm_max_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1)));
    return _mm_cvtsi128_si32(one);
}

/* Up to KV_GROUP_ELEMENTS elements with one scale. */
static void store_group(enum kv_dtype dtype, const float *x, int32_t count, unsigned char *elements,
                        uint16_t *scale)
{
    const __m256i magnitude_bits = _mm256_set1_epi32(0x7fffffff);
    __m256 lanes[GROUP_VECS];
    __m256i most = _mm256_setzero_si256();
    VEC_UNROLL
    for (int i = 0; i < GROUP_VECS; i++) {
        lanes[i] = load_low(x + i * VEC_LANES, count - i * VEC_LANES);
        most =
            _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(lanes[i]), magnitude_bits));
    }
    int32_t bits = largest_bits(most);
    float largest;
    memcpy(&largest, &bits, sizeof(largest));
    float range = dtype == KV_DTYPE_INT8 ? KV_INT8_LARGEST : KV_FP8_LARGEST;
    /* 0x7fc0: NaN. */
    *scale = bits > LARGEST_FINITE ? 0x7fc0 : bf16_from_float(largest / range);
    if (dtype == KV_DTYPE_FP8 && bits <= LARGEST_FINITE) {
        *scale = choose_fp8_scale(lanes, *scale);
    }
    float divisor = bf16_to_float(*scale);
    __m256 divisors = _mm256_set1_ps(divisor);
    VEC_UNROLL
    for (int i = 0; i < GROUP_VECS; i++) {
        __m256 quotients = divisor > 0.0f ? _mm256_div_ps(lanes[i], divisors) : _mm256_setzero_ps();
        __m256i bytes = dtype == KV_DTYPE_INT8 ? round_to_int8(quotients) : round_to_fp8(quotients);
        __m128i words = narrow_to_16(bytes), packed = _mm_packus_epi16(words, words);
        if (count - i * VEC_LANES >= VEC_LANES) {
            _mm_storel_epi64((__m128i *)(void *)(elements + i * VEC_LANES), packed);
        } else if (count > i * VEC_LANES) {
            store_low_bytes(elements + i * VEC_LANES, packed, count - i * VEC_LANES);
        }
    }
}

void avx2_kv_store(enum kv_dtype dtype, const float *x, int32_t head_dim, struct kv_row row)
{
    if (dtype == KV_DTYPE_F32) {
        memcpy(row.elements, x, (size_t)head_dim * sizeof(float));
        return;
    }
    if (!kv_dtype_has_scales(dtype)) {
        store_halves(dtype, x, head_dim, row.elements);
        return;
    }
    for (int32_t i = 0; i < head_dim; i += KV_GROUP_ELEMENTS) {
        int32_t num_left = head_dim - i;
        store_group(dtype, x + i, num_left < KV_GROUP_ELEMENTS ? num_left : KV_GROUP_ELEMENTS,
                    row.elements + i, &row.scales[i / KV_GROUP_ELEMENTS]);
    }
}

#endif
