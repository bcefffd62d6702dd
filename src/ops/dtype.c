/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/dtype.h"

#include <assert.h>

struct dtype_row {
    const char *name;
    size_t num_bytes;
};

static const struct dtype_row dtypes[DTYPE_COUNT] = {
#define DTYPE_ROW(name, num_bytes) {#name, num_bytes},
    DTYPE_LIST(DTYPE_ROW)
#undef DTYPE_ROW
};

const char *dtype_name(enum dtype dtype)
{
    assert((unsigned)dtype < DTYPE_COUNT);
    return dtypes[dtype].name;
}

size_t dtype_bytes(enum dtype dtype)
{
    assert((unsigned)dtype < DTYPE_COUNT);
    return dtypes[dtype].num_bytes;
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
