/* SPDX-License-Identifier: Apache-2.0 */
/* The tile of attention_tile.h with sixteen lanes: 6 x 4 sums, 4 vectors of keys or values and one
 * broadcast are 29 of 32 registers. */
#include "ops/cpu/kernels_avx512.h"

#if defined(__x86_64__)

#include <math.h>
#include <stdint.h>

#include "ops/cpu/vec_generic_avx512.h"

#define STRIP_VECS 4

VEC_INLINE vec vec_set(float value)
{
    return _mm512_set1_ps(value);
}

/* Lanes from num_lanes on are 0 and not read. */
VEC_INLINE vec vec_load_low(const float *at, int32_t num_lanes)
{
    return _mm512_maskz_loadu_ps(vec_mask_low(num_lanes), at);
}

VEC_INLINE void vec_store_low(float *at, int32_t num_lanes, vec value)
{
    _mm512_mask_storeu_ps(at, vec_mask_low(num_lanes), value);
}

VEC_INLINE vec vec_sub(vec a, vec b)
{
    return _mm512_sub_ps(a, b);
}

VEC_INLINE vec vec_mul(vec a, vec b)
{
    return _mm512_mul_ps(a, b);
}

VEC_INLINE vec vec_div(vec a, vec b)
{
    return _mm512_div_ps(a, b);
}

/* a * b + c, rounded once. */
VEC_INLINE vec vec_muladd(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}

VEC_INLINE vec vec_larger(vec a, vec b)
{
    return _mm512_max_ps(a, b);
}

typedef __mmask16 vec_lanes;

/* Lanes that are not below a limit: NaN are kept. */
VEC_INLINE vec_lanes vec_at_least(vec a, float limit)
{
    return _mm512_cmp_ps_mask(a, vec_set(limit), _CMP_NLT_UQ);
}

/* a * 2^n, n also being in the lowest bits of `shifted`; 0 in lanes that are not kept. */
VEC_INLINE vec vec_scale(vec a, vec n, vec shifted, vec_lanes kept)
{
    (void)shifted;
    return _mm512_maskz_scalef_ps(kept, a, n);
}

/* Lane i is the largest lane of vector i of eight; lanes behind them are -inf. */
VEC_INLINE vec vec_maxima(const vec *vecs)
{
    vec pairs[4], fours[2];
    VEC_UNROLL
    for (int i = 0; i < 4; i++) {
        vec a = vecs[2 * i], b = vecs[2 * i + 1];
        pairs[i] = vec_larger(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    VEC_UNROLL
    for (int i = 0; i < 2; i++) {
        vec a = pairs[2 * i], b = pairs[2 * i + 1];
        fours[i] = vec_larger(_mm512_shuffle_ps(a, b, _MM_SHUFFLE(1, 0, 1, 0)),
                              _mm512_shuffle_ps(a, b, _MM_SHUFFLE(3, 2, 3, 2)));
    }
    vec halves = vec_larger(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88),
                            _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
    vec maxima = vec_larger(_mm512_shuffle_f32x4(halves, halves, 0x88),
                            _mm512_shuffle_f32x4(halves, halves, 0xdd));
    return _mm512_mask_mov_ps(vec_set(-INFINITY), 0xff, maxima);
}

/* Lanes outside of [begin, end), whose ends may lie anywhere, become -inf. */
VEC_INLINE vec vec_keep_lanes(vec a, int32_t begin, int32_t end)
{
    __mmask16 kept = vec_mask_low(end) & (__mmask16)~vec_mask_low(begin);
    return _mm512_mask_mov_ps(vec_set(-INFINITY), kept, a);
}

/* Sixteen elements of the cache, widened. */
VEC_INLINE vec vec_load_kv(enum kv_dtype dtype, const unsigned char *at)
{
    if (dtype == KV_DTYPE_F16 || dtype == KV_DTYPE_BF16) {
        return vec_load_weights(dtype == KV_DTYPE_F16 ? DTYPE_F16 : DTYPE_BF16, at);
    }
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)at);
    if (dtype == KV_DTYPE_INT8) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    }
    __m256i words = _mm256_cvtepi8_epi16(bytes); /* signs in the upper halves */
    __m256i magnitudes = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x7f)), 7);
    __m256i signs = _mm256_and_si256(words, _mm256_set1_epi16((short)0x8000));
    /* An E4M3 in the bits of an fp16 is 2^-8 times itself: its exponent has another bias. */
    return _mm512_mul_ps(_mm512_set1_ps(0x1p8f),
                         _mm512_cvtph_ps(_mm256_or_si256(magnitudes, signs)));
}

/* Element `dim` of sixteen rows side by side, for every dim: columns + dim * stride. */
VEC_INLINE void turn_rows(const float *const *rows, int32_t head_dim, float *columns,
                          int64_t stride)
{
    for (int32_t dim = 0; dim < head_dim; dim += VEC_LANES) {
        __m512 row[16], pair[16], four[16];
        int32_t num_dims = head_dim - dim;
        if (num_dims >= VEC_LANES) {
            num_dims = VEC_LANES;
            VEC_UNROLL
            for (int i = 0; i < 16; i++) {
                row[i] = _mm512_loadu_ps(rows[i] + dim);
            }
        } else {
            VEC_UNROLL
            for (int i = 0; i < 16; i++) {
                row[i] = vec_load_low(rows[i] + dim, num_dims);
            }
        }
        VEC_UNROLL
        for (int i = 0; i < 16; i += 2) {
            pair[i] = _mm512_unpacklo_ps(row[i], row[i + 1]);
            pair[i + 1] = _mm512_unpackhi_ps(row[i], row[i + 1]);
        }
        /* four[4 * i + j]: in its quarter q, element 4 * q + j of rows 4 * i to 4 * i + 3. */
        VEC_UNROLL
        for (int i = 0; i < 16; i += 4) {
            __m512d low_0 = _mm512_castps_pd(pair[i]), low_2 = _mm512_castps_pd(pair[i + 2]);
            __m512d high_0 = _mm512_castps_pd(pair[i + 1]), high_2 = _mm512_castps_pd(pair[i + 3]);
            four[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low_0, low_2));
            four[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low_0, low_2));
            four[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high_0, high_2));
            four[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high_0, high_2));
        }
        VEC_UNROLL
        for (int j = 0; j < 4; j++) {
            __m512 even_low = _mm512_shuffle_f32x4(four[j], four[4 + j], 0x88);
            __m512 odd_low = _mm512_shuffle_f32x4(four[j], four[4 + j], 0xdd);
            __m512 even_high = _mm512_shuffle_f32x4(four[8 + j], four[12 + j], 0x88);
            __m512 odd_high = _mm512_shuffle_f32x4(four[8 + j], four[12 + j], 0xdd);
            row[j] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
            row[4 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
            row[8 + j] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
            row[12 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
        }
        VEC_UNROLL
        for (int i = 0; i < 16; i++) {
            if (i < num_dims) {
                vec_store(columns + (dim + i) * stride, row[i]);
            }
        }
    }
}

#include "ops/cpu/attention_tile.h"

void avx512_attention(const struct attention_params *params, const struct cpu_work *work,
                      int64_t begin, int64_t end)
{
    attention_run(params, work, begin, end);
}

void avx512_attention_split(const struct attention_params *params,
                            const struct attention_parts *parts, const struct cpu_work *work,
                            int64_t begin, int64_t end)
{
    attention_split_run(params, parts, work, begin, end);
}

void avx512_attention_merge(const struct attention_params *params,
                            const struct attention_parts *parts, const struct cpu_work *work,
                            int64_t begin, int64_t end)
{
    attention_merge_run(params, parts, work, begin, end);
}

#endif
