/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/dtype.h"

#include <assert.h>

struct dtype_row {
    const char *name;
    int32_t block_elements;
    size_t block_bytes;
};

static const struct dtype_row dtypes[DTYPE_COUNT] = {
#define DTYPE_ROW(name, block_elements, block_bytes) {#name, block_elements, block_bytes},
    DTYPE_LIST(DTYPE_ROW)
#undef DTYPE_ROW
};

const char *dtype_name(enum dtype dtype)
{
    assert((unsigned)dtype < DTYPE_COUNT);
    return dtypes[dtype].name;
}

int32_t dtype_block_elements(enum dtype dtype)
{
    assert((unsigned)dtype < DTYPE_COUNT);
    return dtypes[dtype].block_elements;
}

size_t dtype_block_bytes(enum dtype dtype)
{
    assert((unsigned)dtype < DTYPE_COUNT);
    return dtypes[dtype].block_bytes;
}

size_t dtype_row_bytes(enum dtype dtype, int64_t num_elements)
{
    assert(num_elements >= 0 && num_elements % dtype_block_elements(dtype) == 0);
    return (size_t)(num_elements / dtype_block_elements(dtype)) * dtype_block_bytes(dtype);
}

float f16_to_float(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = (bits >> 10) & 0x1fu;
    uint32_t mantissa = bits & 0x3ffu;
    uint32_t wide;
    float value;
    if (exponent == 0) {
        /* Zero and subnormals: the mantissa counts units of 2^-24, exact in fp32. */
        float magnitude = (float)mantissa * 0x1p-24f;
        memcpy(&wide, &magnitude, sizeof(wide));
    } else if (exponent == 31) {
        wide = 0x7f800000u | mantissa << 13;
    } else {
        wide = (exponent + 127 - 15) << 23 | mantissa << 13;
    }
    wide |= sign;
    memcpy(&value, &wide, sizeof(value));
    return value;
}

uint16_t f16_from_float(float value)
{
    uint32_t wide;
    memcpy(&wide, &value, sizeof(wide));
    uint16_t sign = (uint16_t)(wide >> 16 & 0x8000u);
    wide &= 0x7fffffffu;
    if (wide > 0x7f800000u) {
        return sign | 0x7e00;
    }
    if (wide >= 0x477ff000u) { /* 65520, halfway between the largest f16 and 2^16 */
        return sign | 0x7c00;
    }
    if (wide < 0x38800000u) { /* 2^-14: subnormal, or rounds up to the smallest normal */
        /* At 0.5 the last place of fp32 is 2^-24, the unit of subnormals: the addition rounds. */
        float magnitude, half = 0.5f;
        uint32_t half_bits;
        memcpy(&magnitude, &wide, sizeof(magnitude));
        magnitude += half;
        memcpy(&wide, &magnitude, sizeof(wide));
        memcpy(&half_bits, &half, sizeof(half_bits));
        return (uint16_t)(sign | (wide - half_bits));
    }
    /* A carry out of the mantissa raises the exponent, as it should. */
    uint32_t odd = wide >> 13 & 1;
    return (uint16_t)(sign | (((wide + 0xfff + odd) >> 13) - ((127 - 15) << 10)));
}

uint16_t bf16_from_float(float value)
{
    uint32_t wide;
    memcpy(&wide, &value, sizeof(wide));
    if ((wide & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)(wide >> 16 | 0x40);
    }
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}
