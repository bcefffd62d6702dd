/* SPDX-License-Identifier: Apache-2.0 */
/* The blocks of the KV cache: where they lie (kv_view.h) and which are free. Whoever acquires a
 * block owns it until it is released. */
#ifndef IMBREX_KV_KV_POOL_H
#define IMBREX_KV_KV_POOL_H

#include <stdbool.h>

#include "base/memory.h"
#include "ops/kv_view.h"

/* Tokens of a block: small enough that a sequence wastes little of its last block, large enough
 * that a block of one head is several cache lines for the attention kernel. */
#define KV_BLOCK_SIZE 16

/* Blocks are rounded up to this: whole pages, and what direct I/O moves. */
#define KV_BLOCK_ALIGNMENT 4096

struct kv_pool {
    struct kv_view view;
    struct memory_region region; /* num_blocks x view.block_bytes */
    int32_t *free_blocks;        /* [num_free] stack of block indices; the top is given out next */
    int32_t *free_idx;           /* [num_blocks] place in free_blocks, or -1 while acquired */
    int32_t num_blocks, num_free;
};

/* Bytes of one block, or false if they do not fit size_t. */
bool kv_block_bytes(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                    size_t *block_bytes);

/* Reserves num_blocks (>= 1) blocks of address space, committed when first touched.
 * OUT_OF_MEMORY if they are not to be had; the pool is untouched then. */
enum imbrex_status kv_pool_create(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                                  int32_t num_blocks, struct kv_pool *pool,
                                  struct imbrex_error *err);
/* Safe on a zeroed struct. All blocks become invalid. */
void kv_pool_destroy(struct kv_pool *pool);

/* Takes a free block; its contents are whatever was there. CAPACITY if none is free. */
enum imbrex_status kv_pool_acquire(struct kv_pool *pool, int32_t *block_idx);
/* Gives back a block that was acquired. */
void kv_pool_release(struct kv_pool *pool, int32_t block_idx);

/* True if every block is either used or free, exactly once. For tests and idle moments. */
bool kv_pool_check(const struct kv_pool *pool);

#endif
