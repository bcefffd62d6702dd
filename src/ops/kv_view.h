/* SPDX-License-Identifier: Apache-2.0 */
/* Where a key or value lies in the paged KV cache. Known to the kernels; kv decides which block
 * holds what.
 *
 *   block   [num_layers] x { K [num_kv_heads, block_size, head_dim], V the same }, of one dtype
 *           (fp32 on a host), contiguous, so that moving a block is one copy; block_bytes is
 *           rounded up to 4 KiB
 *   slot    block_idx * block_size + offset in the block: the place of one token */
#ifndef IMBREX_OPS_KV_VIEW_H
#define IMBREX_OPS_KV_VIEW_H

#include <stddef.h>
#include <stdint.h>

#include "ops/dtype.h"

struct kv_view {
    unsigned char *blocks; /* [num_blocks] x block_bytes */
    size_t block_bytes;
    enum dtype dtype; /* plain */
    int32_t num_layers, num_kv_heads, block_size, head_dim;
};

/* Of K, or of V, of one layer in one block. */
static inline size_t kv_view_plane_bytes(const struct kv_view *kv)
{
    return (size_t)kv->num_kv_heads * (size_t)kv->block_size * (size_t)kv->head_dim *
           dtype_block_bytes(kv->dtype);
}

/* Where a layer's K begins in a block; its V is the plane behind. */
static inline size_t kv_view_layer_offset(const struct kv_view *kv, int32_t layer_idx)
{
    return 2 * (size_t)layer_idx * kv_view_plane_bytes(kv);
}

/* K of one head in one block: [block_size, head_dim]. A cache in fp32. */
static inline float *kv_view_keys(const struct kv_view *kv, int32_t block_idx, int32_t layer_idx,
                                  int32_t kv_head_idx)
{
    size_t head_elements = (size_t)kv->block_size * (size_t)kv->head_dim;
    size_t plane_elements = (size_t)kv->num_kv_heads * head_elements;
    return (float *)(void *)(kv->blocks + (size_t)block_idx * kv->block_bytes) +
           2 * (size_t)layer_idx * plane_elements + (size_t)kv_head_idx * head_elements;
}

/* V of the same head: the plane after K's. */
static inline float *kv_view_values(const struct kv_view *kv, int32_t block_idx, int32_t layer_idx,
                                    int32_t kv_head_idx)
{
    size_t plane_elements =
        (size_t)kv->num_kv_heads * (size_t)kv->block_size * (size_t)kv->head_dim;
    return kv_view_keys(kv, block_idx, layer_idx, kv_head_idx) + plane_elements;
}

#endif
