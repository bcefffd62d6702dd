/* SPDX-License-Identifier: Apache-2.0 */
/* `gdsf`: greedy dual-size with frequency. A block's priority is the cache's age when it was last
 * used plus uses x cost; the age is the priority of the last one that went. All blocks are of one
 * size; the cost is what it takes to compute the block again, which grows with its position.
 * Source: Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy,
 * HP Laboratories 1998. */
#include <stdlib.h>

#include "kv/block_heap.h"
#include "kv/kv_policy.h"

/* Attention over so many tokens is taken to cost as much as the rest of a token's work. */
enum { DOUBLING_TOKENS = 32768 };
/* Priorities are fixed point: 1 is the cost of the first token. */
enum { PRIORITY_SHIFT = 16 };

struct gdsf_policy {
    struct kv_policy base;
    struct block_heap idle;
    uint32_t *num_uses; /* [num_blocks] */
    uint64_t *priority; /* [num_blocks] */
    uint64_t age;
    int32_t num_blocks, block_size;
};

static struct gdsf_policy *self(struct kv_policy *policy)
{
    return (struct gdsf_policy *)policy;
}

static void gdsf_destroy(struct kv_policy *policy)
{
    struct gdsf_policy *gdsf = self(policy);
    block_heap_deinit(&gdsf->idle);
    free(gdsf->num_uses);
    free(gdsf->priority);
    free(gdsf);
}

static void use(struct gdsf_policy *gdsf, int32_t block_idx)
{
    uint64_t position =
        (uint64_t)kv_cache_depth(gdsf->base.cache, block_idx) * (uint64_t)gdsf->block_size;
    uint64_t cost =
        (UINT64_C(1) << PRIORITY_SHIFT) + (position << PRIORITY_SHIFT) / DOUBLING_TOKENS;
    if (gdsf->num_uses[block_idx] < UINT16_MAX) {
        gdsf->num_uses[block_idx]++;
    }
    gdsf->priority[block_idx] = gdsf->age + gdsf->num_uses[block_idx] * cost;
    if (gdsf->idle.place[block_idx] >= 0) {
        block_heap_put(&gdsf->idle, block_idx, gdsf->priority[block_idx]);
    }
}

static void gdsf_insert(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                        int64_t now_ns)
{
    (void)request_idx;
    (void)now_ns;
    self(policy)->num_uses[block_idx] = 0;
    use(self(policy), block_idx);
}

static void gdsf_hit(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                     int64_t now_ns)
{
    (void)request_idx;
    (void)now_ns;
    use(self(policy), block_idx);
}

static void gdsf_idle(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    struct gdsf_policy *gdsf = self(policy);
    (void)now_ns;
    block_heap_put(&gdsf->idle, block_idx, gdsf->priority[block_idx]);
}

static void gdsf_busy(struct kv_policy *policy, int32_t block_idx)
{
    block_heap_remove(&self(policy)->idle, block_idx);
}

static void gdsf_evict(struct kv_policy *policy, int32_t block_idx)
{
    struct gdsf_policy *gdsf = self(policy);
    /* The cache may have chosen a descendant that is worth more: the age does not run ahead of what
     * is least. */
    int32_t first = block_heap_first(&gdsf->idle);
    if (first >= 0 && gdsf->idle.key[first] > gdsf->age) {
        gdsf->age = gdsf->idle.key[first];
    }
    block_heap_remove(&gdsf->idle, block_idx);
}

static int32_t gdsf_victim(struct kv_policy *policy, int64_t now_ns)
{
    (void)now_ns;
    return block_heap_first(&self(policy)->idle);
}

static size_t gdsf_state_bytes(const struct kv_policy *policy)
{
    const struct gdsf_policy *gdsf = (const struct gdsf_policy *)policy;
    return sizeof(*gdsf) + block_heap_bytes(&gdsf->idle) +
           (size_t)gdsf->num_blocks * (sizeof(*gdsf->num_uses) + sizeof(*gdsf->priority));
}

static const struct kv_policy_functions functions = {
    .name = "gdsf",
    .destroy = gdsf_destroy,
    .insert = gdsf_insert,
    .hit = gdsf_hit,
    .idle = gdsf_idle,
    .busy = gdsf_busy,
    .evict = gdsf_evict,
    .victim = gdsf_victim,
    .state_bytes = gdsf_state_bytes,
};

enum imbrex_status kv_policy_gdsf_create(const struct kv_policy_options *options,
                                         struct kv_policy **policy, struct imbrex_error *err)
{
    enum imbrex_status status;
    size_t num = (size_t)options->num_blocks;
    struct gdsf_policy *gdsf = calloc(1, sizeof(*gdsf));
    if (gdsf == NULL) {
        return error_out_of_memory(err, "the policy gdsf", sizeof(*gdsf));
    }
    gdsf->base.functions = &functions;
    gdsf->num_blocks = options->num_blocks;
    gdsf->block_size = options->block_size;
    TRY_OR_FAIL(block_heap_init(options->num_blocks, &gdsf->idle, err));
    gdsf->num_uses = calloc(num, sizeof(*gdsf->num_uses));
    gdsf->priority = calloc(num, sizeof(*gdsf->priority));
    if (gdsf->num_uses == NULL || gdsf->priority == NULL) {
        status = error_out_of_memory(err, "the policy gdsf", num * sizeof(*gdsf->priority));
        goto fail;
    }
    *policy = &gdsf->base;
    return IMBREX_STATUS_OK;

fail:
    gdsf_destroy(&gdsf->base);
    return status;
}
