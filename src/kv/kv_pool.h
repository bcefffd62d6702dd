/* SPDX-License-Identifier: Apache-2.0 */
/* Which blocks of the KV cache are free, and how often the others are in use. It knows numbers, not
 * memory: where a block lies says kv_view.h. Blocks are counted: whoever acquires or retains one
 * releases it once. A pin keeps a block from being given out although nobody uses it any more:
 * something still reads it.
 *
 *     free + used + cached = total
 *
 *   free    has nothing that anybody wants
 *   used    has a user or a pin
 *   cached  has neither, but is kept: the cache knows what is in it and may find it a user again
 *
 * When its last user or pin goes, a block that is kept becomes cached, another one free. Without a
 * keeper nothing is ever kept. */
#ifndef IMBREX_KV_KV_POOL_H
#define IMBREX_KV_KV_POOL_H

#include <stdbool.h>

#include "base/status.h"
#include "ops/kv_dtype.h"

/* Tokens of a block: small enough that a sequence wastes little of its last block, large enough
 * that a block of one head is several cache lines for the attention kernel. */
#define KV_BLOCK_SIZE 16

/* Blocks are rounded up to this: whole pages, and what direct I/O moves. */
#define KV_BLOCK_ALIGNMENT 4096

/* The cache, as the pool sees it. */
struct kv_pool_keeper {
    void *user;
    /* A kept block has become cached, or is used again. */
    void (*idle)(void *user, int32_t block_idx);
    void (*busy)(void *user, int32_t block_idx);
    /* No block is free, but some are cached: makes at least one free (kv_pool_forget). */
    void (*make_room)(void *user);
};

struct kv_pool {
    int32_t *free_blocks; /* [num_free] stack of block indices; the top is given out next */
    int32_t *free_idx;    /* [num_blocks] place in free_blocks, or -1 while used or cached */
    int32_t *num_users;   /* [num_blocks] 0 while free or cached */
    int32_t *num_pins;    /* [num_blocks] 0 while free or cached */
    bool *is_kept;        /* [num_blocks] false while free, true while cached */
    int32_t num_blocks, num_free, num_cached;
    int32_t num_pinned;           /* blocks without a user that only pins keep */
    struct kv_pool_keeper keeper; /* zeroed: none */
};

/* Bytes of one token, K and V in all layers with their scales, or false if size_t has no room. */
bool kv_token_bytes(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, enum kv_dtype dtype,
                    size_t *token_bytes);
/* Of one block. */
bool kv_block_bytes(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, enum kv_dtype dtype,
                    size_t *block_bytes);

/* num_blocks >= 1, all free. */
enum imbrex_status kv_pool_create(int32_t num_blocks, struct kv_pool *pool,
                                  struct imbrex_error *err);
/* Safe on a zeroed struct. */
void kv_pool_destroy(struct kv_pool *pool);

/* Blocks that kv_pool_acquire can give out one after the other: free and cached ones. */
static inline int32_t kv_pool_num_available(const struct kv_pool *pool)
{
    return pool->num_free + pool->num_cached;
}

/* Takes a free block, for one user; its contents are whatever was there. If none is free, the
 * keeper makes one so. CAPACITY if all are in use. */
enum imbrex_status kv_pool_acquire(struct kv_pool *pool, int32_t *block_idx);
/* One user more for a block that is used or cached. */
void kv_pool_retain(struct kv_pool *pool, int32_t block_idx);
/* One user less. */
void kv_pool_release(struct kv_pool *pool, int32_t block_idx);
/* Whether somebody else uses it as well. Pins do not count: what they protect is in order with the
 * writes of users. */
bool kv_pool_is_shared(const struct kv_pool *pool, int32_t block_idx);
/* Whether its user may write to it: nobody else uses it, nor is it kept for others to find. */
bool kv_pool_is_writable(const struct kv_pool *pool, int32_t block_idx);

/* Keeps a block in use from being free or cached until it is unpinned as often as it was pinned. */
void kv_pool_pin(struct kv_pool *pool, int32_t block_idx);
void kv_pool_unpin(struct kv_pool *pool, int32_t block_idx);

/* For the keeper: a block in use is kept from now on, until it is forgotten. */
void kv_pool_keep(struct kv_pool *pool, int32_t block_idx);
/* The block is kept no longer: free if it was cached. */
void kv_pool_forget(struct kv_pool *pool, int32_t block_idx);
bool kv_pool_is_cached(const struct kv_pool *pool, int32_t block_idx);

/* True if every block is either used, cached or free, exactly once. For tests and idle moments. */
bool kv_pool_check(const struct kv_pool *pool);

#endif
