/* SPDX-License-Identifier: Apache-2.0 */
/* What keys and values are kept in. One head of one token is a row of head_dim elements. Plain
 * types hold each as it is, rounded to nearest even; the others hold it in groups of 32 elements,
 * the last of which may be shorter:
 *
 *   INT8   element = scale * q, q in [-127, 127];   scale = largest magnitude of the group / 127
 *   FP8    element = scale * q, q of E4M3 (no infinities, largest 448);   scale = largest / 448, or
 *          up to nearly twice as much
 *
 * Where the steps of E4M3 fall depends on the scale, by up to an octave: of 8 scales the one is
 * taken whose errors have the smallest sum of squares.
 *
 * A scale is bf16: it has the range of fp32, so that no group is too large or too small for it, and
 * elements are divided by what it was rounded to. The product has at most 15 bits and is exact. A
 * row has scales of its own, so a token joins a block that is partly filled without touching those
 * that are there, and what it is stored as depends on nothing but itself. A group with an element
 * that is not finite has NaN as its scale: it reads as NaN. */
#ifndef IMBREX_OPS_KV_DTYPE_H
#define IMBREX_OPS_KV_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ops/dtype.h"

/* X(name, text): plain types first, in the order of enum dtype. */
#define KV_DTYPE_LIST(X) \
    X(F32, "fp32")       \
    X(F16, "fp16")       \
    X(BF16, "bf16")      \
    X(INT8, "int8")      \
    X(FP8, "fp8")

enum kv_dtype {
#define KV_DTYPE_ENUM(name, text) KV_DTYPE_##name,
    KV_DTYPE_LIST(KV_DTYPE_ENUM)
#undef KV_DTYPE_ENUM
        KV_DTYPE_COUNT
};

#define KV_GROUP_ELEMENTS 32
#define KV_INT8_LARGEST 127.0f
#define KV_FP8_LARGEST 448.0f
/* Scales of a group that are tried, and the steps between them: of 128 to an octave in bf16. */
#define KV_FP8_SCALES 8
#define KV_FP8_SCALE_STEP 16
/* Squares of errors are added up in so many sums, element i to sum i modulo 8. */
#define KV_FP8_SUMS 8

/* "fp32", as options and reports call it. Static storage. */
const char *kv_dtype_name(enum kv_dtype dtype);
/* Of a plain type. */
enum kv_dtype kv_dtype_of(enum dtype dtype);

static inline size_t kv_dtype_element_bytes(enum kv_dtype dtype)
{
    return dtype == KV_DTYPE_F32 ? 4 : dtype == KV_DTYPE_F16 || dtype == KV_DTYPE_BF16 ? 2 : 1;
}

/* Whether rows have scales beside their elements. */
static inline bool kv_dtype_has_scales(enum kv_dtype dtype)
{
    return dtype >= KV_DTYPE_INT8;
}

/* Scales of a row. */
static inline int32_t kv_dtype_row_groups(enum kv_dtype dtype, int32_t head_dim)
{
    return kv_dtype_has_scales(dtype) ? (head_dim - 1) / KV_GROUP_ELEMENTS + 1 : 0;
}

/* Of a row, scales included. */
static inline size_t kv_dtype_row_bytes(enum kv_dtype dtype, int32_t head_dim)
{
    return (size_t)head_dim * kv_dtype_element_bytes(dtype) +
           (size_t)kv_dtype_row_groups(dtype, head_dim) * sizeof(uint16_t);
}

/* E4M3: sign, 4 bits of exponent with a bias of 7, 3 of mantissa; subnormals are multiples of 2^-9;
 * all ones are NaN. From: rounded to nearest even, beyond +-448 to those; NaN stays NaN. */
uint8_t fp8_from_float(float value);
float fp8_to_float(uint8_t bits);

/* Where a row lies. */
struct kv_row {
    unsigned char *elements; /* [head_dim] */
    uint16_t *scales;        /* [kv_dtype_row_groups] bf16 */
};

#endif
