/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors of a backend's matrices: rows without gaps, in memory that is known to be the
 * device's. */
#ifndef IMBREX_OPS_CUDA_MATRIX_MAP_H
#define IMBREX_OPS_CUDA_MATRIX_MAP_H

#include "ops/cuda/backend_cuda.h"

struct matrix_map {
    const void *base; /* 16-byte aligned */
    int64_t num_rows;
    int32_t num_columns; /* whole pieces of 16 bytes */
    int32_t box_columns, box_rows;
    CUtensorMapSwizzle swizzle;
    bool is_f32;   /* else bf16 */
    bool is_input; /* fetched into L2 by 256 bytes */
};

/* Found, or encoded and kept. */
enum imbrex_status matrix_map_find(struct backend_cuda *cuda, const struct matrix_map *matrix,
                                   CUtensorMap *map);

#endif
