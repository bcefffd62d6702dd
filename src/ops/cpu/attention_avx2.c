/* SPDX-License-Identifier: Apache-2.0 */
/* The tile of attention_tile.h with eight lanes: 6 x 2 sums, 2 vectors of keys or values and one
 * broadcast are 15 of 16 registers. */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <math.h>
#include <stdint.h>

#include "ops/cpu/vec_generic_avx2.h"

#define STRIP_VECS 2

VEC_INLINE vec vec_set(float value)
{
    return _mm256_set1_ps(value);
}

/* Lanes from num_lanes on are 0 and not read. */
VEC_INLINE vec vec_load_low(const float *at, int32_t num_lanes)
{
    return _mm256_maskload_ps(at, vec_mask_low(num_lanes));
}

VEC_INLINE void vec_store_low(float *at, int32_t num_lanes, vec value)
{
    _mm256_maskstore_ps(at, vec_mask_low(num_lanes), value);
}

VEC_INLINE vec vec_sub(vec a, vec b)
{
    return _mm256_sub_ps(a, b);
}

VEC_INLINE vec vec_mul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}

VEC_INLINE vec vec_div(vec a, vec b)
{
    return _mm256_div_ps(a, b);
}

/* a * b + c, rounded once. */
VEC_INLINE vec vec_muladd(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}

VEC_INLINE vec vec_larger(vec a, vec b)
{
    return _mm256_max_ps(a, b);
}

typedef __m256 vec_lanes; /* all bits of a lane, or none */

/* Lanes that are not below a limit: NaN are kept. */
VEC_INLINE vec_lanes vec_at_least(vec a, float limit)
{
    return _mm256_cmp_ps(a, vec_set(limit), _CMP_NLT_UQ);
}

/* a * 2^n, n also being in the lowest bits of `shifted`; 0 in lanes that are not kept. */
VEC_INLINE vec vec_scale(vec a, vec n, vec shifted, vec_lanes kept)
{
    (void)n;
    __m256i exponents = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    __m256i scale = _mm256_add_epi32(exponents, _mm256_castps_si256(vec_set(1.0f)));
    return _mm256_and_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(scale)), kept);
}

/* Lane i is the largest lane of vector i of eight. */
VEC_INLINE vec vec_maxima(const vec *vecs)
{
    vec pairs[4], fours[2];
    VEC_UNROLL
    for (int i = 0; i < 4; i++) {
        vec a = vecs[2 * i], b = vecs[2 * i + 1];
        pairs[i] = vec_larger(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    }
    VEC_UNROLL
    for (int i = 0; i < 2; i++) {
        vec a = pairs[2 * i], b = pairs[2 * i + 1];
        fours[i] = vec_larger(_mm256_shuffle_ps(a, b, _MM_SHUFFLE(1, 0, 1, 0)),
                              _mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 2, 3, 2)));
    }
    return vec_larger(_mm256_permute2f128_ps(fours[0], fours[1], 0x20),
                      _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
}

/* Lanes outside of [begin, end), whose ends may lie anywhere, become -inf. */
VEC_INLINE vec vec_keep_lanes(vec a, int32_t begin, int32_t end)
{
    __m256i kept = _mm256_andnot_si256(vec_mask_low(begin), vec_mask_low(end));
    return _mm256_blendv_ps(vec_set(-INFINITY), a, _mm256_castsi256_ps(kept));
}

/* Eight elements of the cache, widened. */
VEC_INLINE vec vec_load_kv(enum kv_dtype dtype, const unsigned char *at)
{
    if (dtype == KV_DTYPE_F16 || dtype == KV_DTYPE_BF16) {
        return vec_load_weights(dtype == KV_DTYPE_F16 ? DTYPE_F16 : DTYPE_BF16, at);
    }
    __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)at);
    if (dtype == KV_DTYPE_INT8) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    }
    __m128i words = _mm_cvtepi8_epi16(bytes); /* signs in the upper halves */
    __m128i magnitudes = _mm_slli_epi16(_mm_and_si128(words, _mm_set1_epi16(0x7f)), 7);
    __m128i signs = _mm_and_si128(words, _mm_set1_epi16((short)0x8000));
    /* An E4M3 in the bits of an fp16 is 2^-8 times itself: its exponent has another bias. */
    return _mm256_mul_ps(_mm256_set1_ps(0x1p8f), _mm256_cvtph_ps(_mm_or_si128(magnitudes, signs)));
}

/* Element `dim` of eight rows side by side, for every dim: columns + dim * stride. */
VEC_INLINE void turn_rows(const float *const *rows, int32_t head_dim, float *columns,
                          int64_t stride)
{
    for (int32_t dim = 0; dim < head_dim; dim += VEC_LANES) {
        __m256 row[8], pair[8], four[8];
        int32_t num_dims = head_dim - dim;
        if (num_dims >= VEC_LANES) {
            num_dims = VEC_LANES;
            VEC_UNROLL
            for (int i = 0; i < 8; i++) {
                row[i] = _mm256_loadu_ps(rows[i] + dim);
            }
        } else {
            VEC_UNROLL
            for (int i = 0; i < 8; i++) {
                row[i] = vec_load_low(rows[i] + dim, num_dims);
            }
        }
        VEC_UNROLL
        for (int i = 0; i < 8; i += 2) {
            pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
            pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
        }
        /* four[4 * i + j]: in its half h, element 4 * h + j of rows 4 * i to 4 * i + 3. */
        VEC_UNROLL
        for (int i = 0; i < 8; i += 4) {
            four[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], _MM_SHUFFLE(1, 0, 1, 0));
            four[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], _MM_SHUFFLE(3, 2, 3, 2));
            four[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], _MM_SHUFFLE(1, 0, 1, 0));
            four[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], _MM_SHUFFLE(3, 2, 3, 2));
        }
        VEC_UNROLL
        for (int j = 0; j < 4; j++) {
            row[j] = _mm256_permute2f128_ps(four[j], four[4 + j], 0x20);
            row[4 + j] = _mm256_permute2f128_ps(four[j], four[4 + j], 0x31);
        }
        VEC_UNROLL
        for (int i = 0; i < 8; i++) {
            if (i < num_dims) {
                vec_store(columns + (dim + i) * stride, row[i]);
            }
        }
    }
}

#include "ops/cpu/attention_tile.h"

void avx2_attention(const struct attention_params *params, const struct cpu_work *work,
                    int64_t begin, int64_t end)
{
    attention_run(params, work, begin, end);
}

void avx2_attention_split(const struct attention_params *params,
                          const struct attention_parts *parts, const struct cpu_work *work,
                          int64_t begin, int64_t end)
{
    attention_split_run(params, parts, work, begin, end);
}

void avx2_attention_merge(const struct attention_params *params,
                          const struct attention_parts *parts, const struct cpu_work *work,
                          int64_t begin, int64_t end)
{
    attention_merge_run(params, parts, work, begin, end);
}

#endif
