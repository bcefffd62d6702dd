/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/kv_dtype.h"

#include <assert.h>
#include <math.h>
#include <string.h>

const char *kv_dtype_name(enum kv_dtype dtype)
{
    static const char *const names[KV_DTYPE_COUNT] = {
#define KV_DTYPE_TEXT(name, text) text,
        KV_DTYPE_LIST(KV_DTYPE_TEXT)
#undef KV_DTYPE_TEXT
    };
    assert((unsigned)dtype < KV_DTYPE_COUNT);
    return names[dtype];
}

enum kv_dtype kv_dtype_of(enum dtype dtype)
{
    assert(!dtype_is_quantized(dtype));
    return dtype == DTYPE_F32 ? KV_DTYPE_F32 : dtype == DTYPE_F16 ? KV_DTYPE_F16 : KV_DTYPE_BF16;
}

uint8_t fp8_from_float(float value)
{
    uint32_t wide;
    memcpy(&wide, &value, sizeof(wide));
    uint8_t sign = (uint8_t)(wide >> 24 & 0x80u);
    wide &= 0x7fffffffu;
    if (wide > 0x7f800000u) {
        return sign | 0x7f;
    }
    if (wide >= 0x43e00000u) { /* 448 */
        return sign | 0x7e;
    }
    if (wide < 0x3c800000u) { /* 2^-6: a multiple of 2^-9; 8 of them are the smallest normal */
        return (uint8_t)(sign | (uint8_t)rintf(fabsf(value) * 0x1p9f));
    }
    /* A carry out of the mantissa raises the exponent, as it should. */
    uint32_t odd = wide >> 20 & 1;
    return (uint8_t)(sign | (uint8_t)(((wide + 0x7ffff + odd) >> 20) - ((127 - 7) << 3)));
}

float fp8_to_float(uint8_t bits)
{
    uint32_t wide = bits & 0x7fu;
    float magnitude = (float)wide * 0x1p-9f; /* of a subnormal */
    if (wide == 0x7f) {
        magnitude = NAN;
    } else if (wide >= 8) {
        wide = (wide << 20) + ((uint32_t)(127 - 7) << 23);
        memcpy(&magnitude, &wide, sizeof(magnitude));
    }
    return (bits & 0x80u) != 0 ? -magnitude : magnitude;
}
