/* SPDX-License-Identifier: Apache-2.0 */
/* Where a key or value lies in the paged KV cache. Known to the kernels; kv decides which block
 * holds what.
 *
 *   block   [num_layers] x { K [num_kv_heads] heads, V the same }, of one type (kv_dtype.h),
 *           contiguous, so that moving a block is one copy, scales included; block_bytes is rounded
 *           up to 4 KiB
 *   head    elements [block_size, head_dim], behind them scales [block_size, groups of a row] where
 *           the type has some
 *   slot    block_idx * block_size + offset in the block: the place of one token */
#ifndef IMBREX_OPS_KV_VIEW_H
#define IMBREX_OPS_KV_VIEW_H

#include <stddef.h>
#include <stdint.h>

#include "ops/kv_dtype.h"

struct kv_view {
    unsigned char *blocks; /* [num_blocks] x block_bytes, 4-byte aligned */
    size_t block_bytes;
    enum kv_dtype dtype;
    int32_t num_layers, num_kv_heads, block_size, head_dim; /* head_dim is even */
};

/* K, or V, of one head of one layer in one block. */
static inline size_t kv_view_head_bytes(const struct kv_view *kv)
{
    return (size_t)kv->block_size * kv_dtype_row_bytes(kv->dtype, kv->head_dim);
}

/* Of K, or of V, of one layer in one block. */
static inline size_t kv_view_plane_bytes(const struct kv_view *kv)
{
    return (size_t)kv->num_kv_heads * kv_view_head_bytes(kv);
}

/* Where a layer's K begins in a block; its V is the plane behind. */
static inline size_t kv_view_layer_offset(const struct kv_view *kv, int32_t layer_idx)
{
    return 2 * (size_t)layer_idx * kv_view_plane_bytes(kv);
}

/* K of one head in one block: a head as above. */
static inline unsigned char *kv_view_keys(const struct kv_view *kv, int32_t block_idx,
                                          int32_t layer_idx, int32_t kv_head_idx)
{
    return kv->blocks + (size_t)block_idx * kv->block_bytes + kv_view_layer_offset(kv, layer_idx) +
           (size_t)kv_head_idx * kv_view_head_bytes(kv);
}

/* V of the same head: the plane after K's. */
static inline unsigned char *kv_view_values(const struct kv_view *kv, int32_t block_idx,
                                            int32_t layer_idx, int32_t kv_head_idx)
{
    return kv_view_keys(kv, block_idx, layer_idx, kv_head_idx) + kv_view_plane_bytes(kv);
}

/* The token at `offset` of the block, in a head. */
static inline struct kv_row kv_view_row(const struct kv_view *kv, unsigned char *head,
                                        int32_t offset)
{
    size_t element_bytes = (size_t)kv->head_dim * kv_dtype_element_bytes(kv->dtype);
    unsigned char *scales = head + (size_t)kv->block_size * element_bytes;
    return (struct kv_row){
        .elements = head + (size_t)offset * element_bytes,
        .scales = (uint16_t *)(void *)scales +
                  (int64_t)offset * kv_dtype_row_groups(kv->dtype, kv->head_dim),
    };
}

#endif
