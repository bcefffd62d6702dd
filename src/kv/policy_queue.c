/* SPDX-License-Identifier: Apache-2.0 */
/* `queue`: lru for what nobody waits for; what waiting requests want is above all else, the nearest
 * last to go (queue_order.h). */
#include <stdlib.h>

#include "kv/kv_policy.h"
#include "kv/queue_order.h"

struct queue_policy {
    struct kv_policy base;
    struct queue_order order;
};

static struct queue_policy *self(struct kv_policy *policy)
{
    return (struct queue_policy *)policy;
}

static void queue_destroy(struct kv_policy *policy)
{
    queue_order_deinit(&self(policy)->order);
    free(policy);
}

static void queue_arrive(struct kv_policy *policy, const struct kv_policy_request *request,
                         int64_t now_ns)
{
    (void)now_ns;
    queue_order_arrive(&self(policy)->order, policy->cache, request);
}

static void queue_leave(struct kv_policy *policy, const struct kv_policy_request *request,
                        int64_t now_ns)
{
    (void)request;
    (void)now_ns;
    queue_order_leave(&self(policy)->order);
}

static void queue_idle(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    (void)now_ns;
    queue_order_idle(&self(policy)->order, policy->cache, block_idx);
}

static void queue_remove(struct kv_policy *policy, int32_t block_idx)
{
    queue_order_remove(&self(policy)->order, block_idx);
}

static int32_t queue_victim(struct kv_policy *policy, int64_t now_ns)
{
    (void)now_ns;
    return queue_order_victim(&self(policy)->order, policy->cache);
}

static size_t queue_state_bytes(const struct kv_policy *policy)
{
    const struct queue_policy *queue = (const struct queue_policy *)policy;
    return sizeof(*queue) + queue_order_bytes(&queue->order);
}

static const struct kv_policy_functions functions = {
    .name = "queue",
    .destroy = queue_destroy,
    .arrive = queue_arrive,
    .leave = queue_leave,
    .idle = queue_idle,
    .busy = queue_remove,
    .evict = queue_remove,
    .victim = queue_victim,
    .state_bytes = queue_state_bytes,
};

enum imbrex_status kv_policy_queue_create(const struct kv_policy_options *options,
                                          struct kv_policy **policy, struct imbrex_error *err)
{
    struct queue_policy *queue = calloc(1, sizeof(*queue));
    if (queue == NULL) {
        return error_out_of_memory(err, "the policy queue", sizeof(*queue));
    }
    enum imbrex_status status = queue_order_init(options->num_blocks, &queue->order, err);
    if (status != IMBREX_STATUS_OK) {
        free(queue);
        return status;
    }
    queue->base.functions = &functions;
    *policy = &queue->base;
    return IMBREX_STATUS_OK;
}
