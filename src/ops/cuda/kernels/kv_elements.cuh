/* SPDX-License-Identifier: Apache-2.0 */
/* Elements of a KV cache with scales, as src/ops/kv_dtype.h defines them. E4M3 is taken apart here:
 * the conversions of PTX begin with compute capability 8.9. */
#ifndef IMBREX_OPS_CUDA_KERNELS_KV_ELEMENTS_CUH
#define IMBREX_OPS_CUDA_KERNELS_KV_ELEMENTS_CUH

#include <cuda_fp16.h>
#include <stdint.h>

/* Of code bits in the low byte. In the bits of an fp16 an E4M3 is 2^-8 times itself: its exponent
 * has another bias. */
static __device__ __forceinline__ float fp8_widen(uint32_t code)
{
    uint16_t bits = (uint16_t)((code & 0x80u) << 8 | (code & 0x7fu) << 7);
    return __half2float(__ushort_as_half(bits)) * 256.0f;
}

/* To nearest even, at most 448; x is a number. */
static __device__ __forceinline__ uint32_t fp8_round(float x)
{
    uint32_t wide = __float_as_uint(fabsf(x)), code;
    if (wide < 0x3c800000u) { /* 2^-6: a multiple of 2^-9; 8 of them are the smallest normal */
        code = (uint32_t)__float2int_rn(fabsf(x) * 512.0f);
    } else {
        code = ((wide + 0x7ffffu + (wide >> 20 & 1u)) >> 20) - ((127 - 7) << 3);
    }
    return min(code, 0x7eu) | (__float_as_uint(x) >> 24 & 0x80u);
}

static __device__ __forceinline__ uint32_t int8_round(float x)
{
    return (uint32_t)max(-127, min(127, __float2int_rn(x))) & 0xffu;
}

/* ---- two at a time, as bf16 ------------------------------------------------------------------ */

/* "fma.rn.bf16x2": both halves for themselves; subnormal numbers count. */
static __device__ __forceinline__ uint32_t bf16x2_fma(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

static __device__ __forceinline__ uint32_t bf16x2_multiply(uint32_t a, uint32_t b)
{
    return bf16x2_fma(a, b, 0x80008000u); /* -0, so that zeros keep their sign */
}

/* A power of 2 in both halves. */
#define BF16X2_POWER(exponent) \
    ((uint32_t)(127 + (exponent)) << 7 | (uint32_t)(127 + (exponent)) << 23)

/* The codes in bytes 0 and 2, and in 1 and 3, as pairs of bf16, exactly, but in other units: of
 * E4M3 2^-120 times themselves, since bf16 has another bias; of INT8 2^-133 times what they are
 * more than -128, a number of bf16 that is subnormal or next to it. */
template <bool IS_FP8>
static __device__ __forceinline__ void split_codes(uint32_t codes, uint32_t &even, uint32_t &odd)
{
    if constexpr (IS_FP8) {
        even = (codes << 4 & 0x07f007f0u) | (codes << 8 & 0x80008000u);
        odd = (codes >> 4 & 0x07f007f0u) | (codes & 0x80008000u);
    } else {
        codes ^= 0x80808080u;
        even = codes & 0x00ff00ffu;
        odd = __byte_perm(codes, 0, 0x4341);
    }
}

/* What split_codes made of INT8, as 2^-6 times the codes. */
static __device__ __forceinline__ uint32_t int8_centre(uint32_t pair)
{
    const uint32_t minus_two = 0xc000c000u;
    return bf16x2_fma(pair, BF16X2_POWER(127), minus_two);
}

#endif
