/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/matrix_map.h"

#include <string.h>

enum imbrex_status matrix_map_find(struct backend_cuda *cuda, const struct matrix_map *matrix,
                                   CUtensorMap *map)
{
    struct tensor_map_cache *maps = &cuda->device->maps;
    size_t element_bytes = dtype_block_bytes(matrix->is_f32 ? DTYPE_F32 : DTYPE_BF16);
    struct tensor_map_key key;
    memset(&key, 0, sizeof(key));
    key.base = (uint64_t)(uintptr_t)matrix->base;
    key.rank = 2;
    key.dims[0] = (uint64_t)matrix->num_columns;
    key.dims[1] = (uint64_t)matrix->num_rows;
    key.strides[0] = (uint64_t)matrix->num_columns * element_bytes;
    key.box[0] = (uint32_t)matrix->box_columns;
    key.box[1] = (uint32_t)matrix->box_rows;
    key.swizzle = matrix->swizzle;
    key.l2_promotion =
        matrix->is_input ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE;
    key.is_f32 = matrix->is_f32 ? 1 : 0;
    const CUtensorMap *found = tensor_map_find(maps, &key);
    if (found == NULL) {
        TRY(tensor_map_add(maps, &cuda->device->driver, &key, &found, &cuda->error));
    }
    *map = *found;
    return IMBREX_STATUS_OK;
}
