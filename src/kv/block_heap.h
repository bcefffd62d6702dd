/* SPDX-License-Identifier: Apache-2.0 */
/* A binary heap of block indices, least key first; each block is in it once or not at all. Keys of
 * equal value leave in an order that depends on the calls alone. */
#ifndef IMBREX_KV_BLOCK_HEAP_H
#define IMBREX_KV_BLOCK_HEAP_H

#include "base/status.h"

struct block_heap {
    int32_t *blocks; /* [num_members] as a heap */
    int32_t *place;  /* [num_blocks] in blocks; -1: not in the heap */
    uint64_t *key;   /* [num_blocks] */
    int32_t num_blocks, num_members;
};

enum imbrex_status block_heap_init(int32_t num_blocks, struct block_heap *heap,
                                   struct imbrex_error *err);
void block_heap_deinit(struct block_heap *heap);
size_t block_heap_bytes(const struct block_heap *heap);

/* Adds the block or moves it to its new key. */
void block_heap_put(struct block_heap *heap, int32_t block_idx, uint64_t key);
/* Does nothing if it is not there. */
void block_heap_remove(struct block_heap *heap, int32_t block_idx);
void block_heap_clear(struct block_heap *heap);

/* The block with the least key; -1: none. */
static inline int32_t block_heap_first(const struct block_heap *heap)
{
    return heap->num_members > 0 ? heap->blocks[0] : -1;
}

#endif
