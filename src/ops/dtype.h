/* SPDX-License-Identifier: Apache-2.0 */
/* Element types of weights in a checkpoint, and their widening to fp32. */
#ifndef IMBREX_OPS_DTYPE_H
#define IMBREX_OPS_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* X(name, block_elements, block_bytes). Plain types have blocks of one element. The quantised ones
 * are ggml's: a row of weights is a whole number of blocks, each with its own scales. */
#define DTYPE_LIST(X) \
    X(F32, 1, 4)      \
    X(F16, 1, 2)      \
    X(BF16, 1, 2)     \
    X(Q8_0, 32, 34)   \
    X(Q4_0, 32, 18)   \
    X(Q4_1, 32, 20)   \
    X(Q5_0, 32, 22)   \
    X(Q5_1, 32, 24)   \
    X(Q4_K, 256, 144) \
    X(Q5_K, 256, 176) \
    X(Q6_K, 256, 210)

enum dtype {
#define DTYPE_ENUM(name, block_elements, block_bytes) DTYPE_##name,
    DTYPE_LIST(DTYPE_ENUM)
#undef DTYPE_ENUM
        DTYPE_COUNT
};

/* "BF16". Static storage. */
const char *dtype_name(enum dtype dtype);
int32_t dtype_block_elements(enum dtype dtype);
size_t dtype_block_bytes(enum dtype dtype);
/* The plain types come first: loops over them end here. */
#define DTYPE_NUM_PLAIN (DTYPE_BF16 + 1)

/* Whether elements come in blocks with scales, so that single ones have no address. */
static inline bool dtype_is_quantized(enum dtype dtype)
{
    return dtype >= DTYPE_NUM_PLAIN;
}
/* Bytes of a row of num_elements, a multiple of dtype_block_elements. */
size_t dtype_row_bytes(enum dtype dtype, int64_t num_elements);

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

/* Rounded to nearest even; from 65520 on (f16), infinity. NaN stays NaN. */
uint16_t f16_from_float(float value);
uint16_t bf16_from_float(float value);

/* Element `idx` of a view of a plain type, widened. */
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
