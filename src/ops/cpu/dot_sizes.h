/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic of sizes and counts, none of them negative, for the walks over tiles and panels. */
#ifndef IMBREX_OPS_CPU_DOT_SIZES_H
#define IMBREX_OPS_CPU_DOT_SIZES_H

#include <stdint.h>

static inline int64_t min_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static inline int64_t round_up(int64_t a, int64_t unit)
{
    return divide_up(a, unit) * unit;
}

#endif
