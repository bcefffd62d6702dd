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

#endif
