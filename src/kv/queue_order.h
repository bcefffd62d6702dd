/* SPDX-License-Identifier: Apache-2.0 */
/* Idle blocks in the order in which to forget them: first what no waiting request wants, least
 * recently used first; then what is wanted, by the place of its nearest waiter, farthest first. No
 * window and no cap: whatever has not arrived yet is used after everything that waits. */
#ifndef IMBREX_KV_QUEUE_ORDER_H
#define IMBREX_KV_QUEUE_ORDER_H

#include "kv/block_heap.h"
#include "kv/kv_policy.h"

struct queue_order {
    struct block_heap heap;
    uint64_t *stamp; /* [num_blocks] when the block became idle, counted in such events */
    uint64_t num_stamps;
    bool ignores_queue; /* plain lru */
    bool must_look;     /* what was wanted may be wanted no more */
    int32_t num_until_look;
};

enum imbrex_status queue_order_init(int32_t num_blocks, struct queue_order *order,
                                    struct imbrex_error *err);
void queue_order_deinit(struct queue_order *order);
size_t queue_order_bytes(const struct queue_order *order);

/* The block is idle, and no other has become so later. */
void queue_order_idle(struct queue_order *order, const struct kv_cache *cache, int32_t block_idx);
/* Remembers when it became idle, without adding it; and adds it then. */
void queue_order_stamp(struct queue_order *order, int32_t block_idx);
void queue_order_restore(struct queue_order *order, const struct kv_cache *cache,
                         int32_t block_idx);
void queue_order_remove(struct queue_order *order, int32_t block_idx);
/* Others want or no longer want the request's blocks. */
void queue_order_arrive(struct queue_order *order, const struct kv_cache *cache,
                        const struct kv_policy_request *request);
void queue_order_leave(struct queue_order *order);
/* -1: no block is idle. */
int32_t queue_order_victim(struct queue_order *order, const struct kv_cache *cache);

#endif
