/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/queue_order.h"

#include <stdlib.h>

enum imbrex_status queue_order_init(int32_t num_blocks, struct queue_order *order,
                                    struct imbrex_error *err)
{
    struct queue_order created = {0};

    TRY(block_heap_init(num_blocks, &created.heap, err));
    created.stamp = calloc((size_t)num_blocks, sizeof(*created.stamp));
    if (created.stamp == NULL) {
        block_heap_deinit(&created.heap);
        return error_out_of_memory(err, "the order of idle KV blocks",
                                   (size_t)num_blocks * sizeof(*created.stamp));
    }
    *order = created;
    return IMBREX_STATUS_OK;
}

void queue_order_deinit(struct queue_order *order)
{
    block_heap_deinit(&order->heap);
    free(order->stamp);
    *order = (struct queue_order){0};
}

size_t queue_order_bytes(const struct queue_order *order)
{
    return block_heap_bytes(&order->heap) + (size_t)order->heap.num_blocks * sizeof(*order->stamp);
}

static uint64_t key_of(const struct queue_order *order, const struct kv_cache *cache,
                       int32_t block_idx)
{
    int64_t wanted = order->ignores_queue ? INT64_MAX : kv_cache_wanted(cache, block_idx);
    if (wanted == INT64_MAX) {
        return order->stamp[block_idx];
    }
    return (UINT64_C(1) << 63) + (uint64_t)(INT64_MAX - (wanted > 0 ? wanted : 0));
}

void queue_order_stamp(struct queue_order *order, int32_t block_idx)
{
    order->stamp[block_idx] = ++order->num_stamps;
}

void queue_order_restore(struct queue_order *order, const struct kv_cache *cache, int32_t block_idx)
{
    block_heap_put(&order->heap, block_idx, key_of(order, cache, block_idx));
}

/* An admitted request may leave blocks that it wanted unused, so all are looked at again now and
 * then: as seldom as their number is large. */
void queue_order_idle(struct queue_order *order, const struct kv_cache *cache, int32_t block_idx)
{
    queue_order_stamp(order, block_idx);
    queue_order_restore(order, cache, block_idx);
    if (--order->num_until_look < 0) {
        order->num_until_look = order->heap.num_blocks;
        order->must_look = true;
    }
}

void queue_order_remove(struct queue_order *order, int32_t block_idx)
{
    block_heap_remove(&order->heap, block_idx);
}

void queue_order_arrive(struct queue_order *order, const struct kv_cache *cache,
                        const struct kv_policy_request *request)
{
    for (int32_t i = 0; i < request->num_blocks; i++) {
        int32_t block_idx = request->blocks[i];
        if (order->heap.place[block_idx] >= 0) {
            block_heap_put(&order->heap, block_idx, key_of(order, cache, block_idx));
        }
    }
}

void queue_order_leave(struct queue_order *order)
{
    order->must_look = true;
}

int32_t queue_order_victim(struct queue_order *order, const struct kv_cache *cache)
{
    struct block_heap *heap = &order->heap;
    if (order->must_look) {
        order->must_look = false;
        /* In the order of block indices: the heap's own changes under the walk. */
        for (int32_t block_idx = 0; block_idx < heap->num_blocks; block_idx++) {
            if (heap->place[block_idx] >= 0) {
                block_heap_put(heap, block_idx, key_of(order, cache, block_idx));
            }
        }
    }
    /* A block may have become wanted, or wanted sooner, since it was put there: its key only grows
     * by that, so it is enough to look at the first again. */
    for (;;) {
        int32_t block_idx = block_heap_first(heap);
        if (block_idx < 0) {
            return -1;
        }
        uint64_t key = key_of(order, cache, block_idx);
        if (key <= heap->key[block_idx]) {
            return block_idx;
        }
        block_heap_put(heap, block_idx, key);
    }
}
