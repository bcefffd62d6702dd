/* SPDX-License-Identifier: Apache-2.0 */
/* Element types of weights in a checkpoint, and their widening to fp32. */
#ifndef IMBREX_OPS_DTYPE_H
#define IMBREX_OPS_DTYPE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* X(name, bytes). Names are safetensors'. */
#define DTYPE_LIST(X) \
    X(F32, 4)         \
    X(F16, 2)         \
    X(BF16, 2)

enum dtype {
#define DTYPE_ENUM(name, num_bytes) DTYPE_##name,
    DTYPE_LIST(DTYPE_ENUM)
#undef DTYPE_ENUM
        DTYPE_COUNT
};

/* "BF16". Static storage. */
const char *dtype_name(enum dtype dtype);
size_t dtype_bytes(enum dtype dtype);

/* A matrix or vector of weights as it lies in the mapped checkpoint: row-major, any byte alignment
 * (a safetensors header may have any length). Its extents stand in the params struct of the op that
 * reads it. */
struct weight_view {
    const void *elements;
    enum dtype dtype;
};

static inline float bf16_to_float(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof(value));
    return value;
}

/* IEEE 754 binary16, subnormals, infinities and NaN included. */
float f16_to_float(uint16_t bits);

/* Element `idx` of a view, widened. */
static inline float weight_load(struct weight_view view, int64_t idx)
{
    uint16_t bits;
    float value;
    switch (view.dtype) {
    case DTYPE_BF16:
        memcpy(&bits, (const unsigned char *)view.elements + 2 * idx, sizeof(bits));
        return bf16_to_float(bits);
    case DTYPE_F16:
        memcpy(&bits, (const unsigned char *)view.elements + 2 * idx, sizeof(bits));
        return f16_to_float(bits);
    default:
        memcpy(&value, (const unsigned char *)view.elements + 4 * idx, sizeof(value));
        return value;
    }
}

#endif
