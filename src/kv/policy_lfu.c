/* SPDX-License-Identifier: Apache-2.0 */
/* `lfu`: the block goes that was used least often since it came; of equals, the one that has been
 * idle for longest. No aging: the textbook form. */
#include <stdlib.h>

#include "kv/block_list.h"
#include "kv/kv_policy.h"

/* Uses are counted up to here: one list of idle blocks each. */
enum { MAX_USES = 255 };

struct lfu_policy {
    struct kv_policy base;
    struct block_links links;
    unsigned char *num_uses; /* [num_blocks] */
    bool *is_idle;           /* [num_blocks] */
    int32_t num_blocks;
    struct block_list idle[MAX_USES + 1]; /* by uses, longest idle first */
};

static struct lfu_policy *self(struct kv_policy *policy)
{
    return (struct lfu_policy *)policy;
}

static void lfu_destroy(struct kv_policy *policy)
{
    struct lfu_policy *lfu = self(policy);
    free(lfu->links.previous);
    free(lfu->links.next);
    free(lfu->num_uses);
    free(lfu->is_idle);
    free(lfu);
}

static void lfu_remove(struct kv_policy *policy, int32_t block_idx)
{
    struct lfu_policy *lfu = self(policy);
    if (lfu->is_idle[block_idx]) {
        block_list_remove(&lfu->idle[lfu->num_uses[block_idx]], lfu->links, block_idx);
        lfu->is_idle[block_idx] = false;
    }
}

static void lfu_insert(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                       int64_t now_ns)
{
    (void)request_idx;
    (void)now_ns;
    self(policy)->num_uses[block_idx] = 1;
}

/* An idle block that is hit stays in its list until it is busy, so its place follows its uses. */
static void lfu_hit(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                    int64_t now_ns)
{
    struct lfu_policy *lfu = self(policy);
    (void)request_idx;
    (void)now_ns;
    if (lfu->num_uses[block_idx] == MAX_USES) {
        return;
    }
    bool was_idle = lfu->is_idle[block_idx];
    lfu_remove(policy, block_idx);
    lfu->num_uses[block_idx]++;
    if (was_idle) {
        block_list_append(&lfu->idle[lfu->num_uses[block_idx]], lfu->links, block_idx);
        lfu->is_idle[block_idx] = true;
    }
}

static void lfu_idle(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    struct lfu_policy *lfu = self(policy);
    (void)now_ns;
    block_list_append(&lfu->idle[lfu->num_uses[block_idx]], lfu->links, block_idx);
    lfu->is_idle[block_idx] = true;
}

static int32_t lfu_victim(struct kv_policy *policy, int64_t now_ns)
{
    struct lfu_policy *lfu = self(policy);
    (void)now_ns;
    for (int32_t num_uses = 0; num_uses <= MAX_USES; num_uses++) {
        if (lfu->idle[num_uses].first >= 0) {
            return lfu->idle[num_uses].first;
        }
    }
    return -1;
}

static size_t lfu_state_bytes(const struct kv_policy *policy)
{
    const struct lfu_policy *lfu = (const struct lfu_policy *)policy;
    return sizeof(*lfu) +
           (size_t)lfu->num_blocks * (2 * sizeof(int32_t) + sizeof(*lfu->num_uses) + sizeof(bool));
}

static const struct kv_policy_functions functions = {
    .name = "lfu",
    .destroy = lfu_destroy,
    .insert = lfu_insert,
    .hit = lfu_hit,
    .idle = lfu_idle,
    .busy = lfu_remove,
    .evict = lfu_remove,
    .victim = lfu_victim,
    .state_bytes = lfu_state_bytes,
};

enum imbrex_status kv_policy_lfu_create(const struct kv_policy_options *options,
                                        struct kv_policy **policy, struct imbrex_error *err)
{
    size_t num = (size_t)options->num_blocks;
    struct lfu_policy *lfu = calloc(1, sizeof(*lfu));
    if (lfu == NULL) {
        return error_out_of_memory(err, "the policy lfu", sizeof(*lfu));
    }
    lfu->base.functions = &functions;
    lfu->num_blocks = options->num_blocks;
    lfu->links.previous = calloc(num, sizeof(*lfu->links.previous));
    lfu->links.next = calloc(num, sizeof(*lfu->links.next));
    lfu->num_uses = calloc(num, sizeof(*lfu->num_uses));
    lfu->is_idle = calloc(num, sizeof(*lfu->is_idle));
    if (lfu->links.previous == NULL || lfu->links.next == NULL || lfu->num_uses == NULL ||
        lfu->is_idle == NULL) {
        lfu_destroy(&lfu->base);
        return error_out_of_memory(err, "the policy lfu", num * sizeof(int32_t));
    }
    for (int32_t i = 0; i <= MAX_USES; i++) {
        lfu->idle[i] = BLOCK_LIST_EMPTY;
    }
    *policy = &lfu->base;
    return IMBREX_STATUS_OK;
}
