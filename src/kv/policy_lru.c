/* SPDX-License-Identifier: Apache-2.0 */
/* lru: the block goes that has been idle for longest. Tails become idle before heads and are never
 * used without them, so what goes is always a tail. */
#include <stdlib.h>

#include "kv/kv_policy.h"

/* A place in the ring of idle blocks. */
struct link {
    int32_t previous, next;
};

struct policy_lru {
    struct kv_policy policy;
    /* [num_blocks + 1]; the last one is the ring's start: behind it comes the longest idle. A block
     * that is busy or unknown points to itself. */
    struct link *links;
    int32_t num_blocks;
};

static struct policy_lru *lru_of(struct kv_policy *policy)
{
    return (struct policy_lru *)policy;
}

static void lru_destroy(struct kv_policy *policy)
{
    free(lru_of(policy)->links);
    free(policy);
}

static void lru_idle(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    struct link *links = lru_of(policy)->links;
    int32_t start = lru_of(policy)->num_blocks;
    (void)now_ns;
    links[block_idx] = (struct link){.previous = links[start].previous, .next = start};
    links[links[start].previous].next = block_idx;
    links[start].previous = block_idx;
}

static void lru_remove(struct kv_policy *policy, int32_t block_idx)
{
    struct link *links = lru_of(policy)->links;
    struct link *link = &links[block_idx];
    links[link->previous].next = link->next;
    links[link->next].previous = link->previous;
    *link = (struct link){.previous = block_idx, .next = block_idx};
}

static int32_t lru_victim(struct kv_policy *policy, int64_t now_ns)
{
    (void)now_ns;
    return lru_of(policy)->links[lru_of(policy)->num_blocks].next;
}

static size_t lru_state_bytes(const struct kv_policy *policy)
{
    const struct policy_lru *lru = (const struct policy_lru *)policy;
    return sizeof(*lru) + ((size_t)lru->num_blocks + 1) * sizeof(*lru->links);
}

static const struct kv_policy_functions lru_functions = {
    .name = "lru",
    .destroy = lru_destroy,
    .idle = lru_idle,
    .busy = lru_remove,
    .evict = lru_remove,
    .victim = lru_victim,
    .state_bytes = lru_state_bytes,
};

enum imbrex_status kv_policy_lru_create(const struct kv_policy_options *options,
                                        struct kv_policy **policy, struct imbrex_error *err)
{
    size_t num_links = (size_t)options->num_blocks + 1;
    struct policy_lru *created = calloc(1, sizeof(*created));
    struct link *links = malloc(num_links * sizeof(*links));
    if (created == NULL || links == NULL) {
        free(created);
        free(links);
        return error_out_of_memory(err, "policy lru", num_links * sizeof(*links));
    }
    for (int32_t i = 0; i <= options->num_blocks; i++) {
        links[i] = (struct link){.previous = i, .next = i};
    }
    *created = (struct policy_lru){
        .policy = {.functions = &lru_functions},
        .links = links,
        .num_blocks = options->num_blocks,
    };
    *policy = &created->policy;
    return IMBREX_STATUS_OK;
}
