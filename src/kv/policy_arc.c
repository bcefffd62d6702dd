/* SPDX-License-Identifier: Apache-2.0 */
/* `arc`: blocks used once and blocks used again, each by recency, with keys of what left either;
 * what comes back moves the border between the two.
 * Source: ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003, figure 4.
 *
 * A block in use is in no list and counts for its side; recency is that of becoming idle, so tails
 * go before heads. */
#include <stdlib.h>

#include "kv/block_list.h"
#include "kv/ghost_list.h"
#include "kv/kv_policy.h"

struct arc_policy {
    struct kv_policy base;
    struct block_links links;
    struct block_list idle[2]; /* used once, again; longest idle first */
    int32_t num_members[2];    /* in use or idle */
    struct ghost_list ghosts[2];
    bool *is_again, *is_idle; /* [num_blocks] */
    int32_t num_blocks;
    double target; /* blocks that those used once may have */
};

static struct arc_policy *self(struct kv_policy *policy)
{
    return (struct arc_policy *)policy;
}

static void arc_destroy(struct kv_policy *policy)
{
    struct arc_policy *arc = self(policy);
    ghost_list_deinit(&arc->ghosts[0]);
    ghost_list_deinit(&arc->ghosts[1]);
    free(arc->links.previous);
    free(arc->links.next);
    free(arc->is_again);
    free(arc->is_idle);
    free(arc);
}

static double ratio(int32_t others, int32_t own)
{
    return own == 0 || others <= own ? 1.0 : (double)others / own;
}

static void arc_insert(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                       int64_t now_ns)
{
    struct arc_policy *arc = self(policy);
    uint64_t key = kv_cache_key_hash(policy->cache, block_idx);
    int32_t num_once = ghost_list_count(&arc->ghosts[0]);
    int32_t num_again = ghost_list_count(&arc->ghosts[1]);
    bool is_again = true;
    (void)request_idx;
    (void)now_ns;

    if (ghost_list_take(&arc->ghosts[0], key)) {
        arc->target += ratio(num_again, num_once);
        arc->target = arc->target < arc->num_blocks ? arc->target : arc->num_blocks;
    } else if (ghost_list_take(&arc->ghosts[1], key)) {
        arc->target -= ratio(num_once, num_again);
        arc->target = arc->target > 0.0 ? arc->target : 0.0;
    } else {
        is_again = false;
    }
    arc->is_again[block_idx] = is_again;
    arc->is_idle[block_idx] = false;
    arc->num_members[is_again]++;
    /* Those used once and their ghosts are at most as many as blocks; all, twice as many. */
    int32_t room = arc->num_blocks - arc->num_members[0];
    ghost_list_shrink(&arc->ghosts[0], room > 0 ? room : 0);
    room = 2 * arc->num_blocks - arc->num_members[0] - arc->num_members[1] -
           ghost_list_count(&arc->ghosts[0]);
    ghost_list_shrink(&arc->ghosts[1], room > 0 ? room : 0);
}

static void arc_hit(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                    int64_t now_ns)
{
    struct arc_policy *arc = self(policy);
    (void)request_idx;
    (void)now_ns;
    if (arc->is_again[block_idx]) {
        return;
    }
    if (arc->is_idle[block_idx]) {
        block_list_remove(&arc->idle[0], arc->links, block_idx);
        block_list_append(&arc->idle[1], arc->links, block_idx);
    }
    arc->num_members[0]--;
    arc->num_members[1]++;
    arc->is_again[block_idx] = true;
}

static void arc_idle(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    struct arc_policy *arc = self(policy);
    (void)now_ns;
    block_list_append(&arc->idle[arc->is_again[block_idx]], arc->links, block_idx);
    arc->is_idle[block_idx] = true;
}

static void arc_busy(struct kv_policy *policy, int32_t block_idx)
{
    struct arc_policy *arc = self(policy);
    if (arc->is_idle[block_idx]) {
        block_list_remove(&arc->idle[arc->is_again[block_idx]], arc->links, block_idx);
        arc->is_idle[block_idx] = false;
    }
}

static void arc_evict(struct kv_policy *policy, int32_t block_idx)
{
    struct arc_policy *arc = self(policy);
    bool is_again = arc->is_again[block_idx];
    arc_busy(policy, block_idx);
    arc->num_members[is_again]--;
    ghost_list_add(&arc->ghosts[is_again], kv_cache_key_hash(policy->cache, block_idx));
}

static int32_t arc_victim(struct kv_policy *policy, int64_t now_ns)
{
    struct arc_policy *arc = self(policy);
    bool is_again = (double)arc->num_members[0] <= arc->target;
    (void)now_ns;
    return arc->idle[is_again].first >= 0 ? arc->idle[is_again].first : arc->idle[!is_again].first;
}

static size_t arc_state_bytes(const struct kv_policy *policy)
{
    const struct arc_policy *arc = (const struct arc_policy *)policy;
    return sizeof(*arc) + ghost_list_bytes(&arc->ghosts[0]) + ghost_list_bytes(&arc->ghosts[1]) +
           (size_t)arc->num_blocks * 2 * (sizeof(int32_t) + sizeof(bool));
}

static const struct kv_policy_functions functions = {
    .name = "arc",
    .destroy = arc_destroy,
    .insert = arc_insert,
    .hit = arc_hit,
    .idle = arc_idle,
    .busy = arc_busy,
    .evict = arc_evict,
    .victim = arc_victim,
    .state_bytes = arc_state_bytes,
};

enum imbrex_status kv_policy_arc_create(const struct kv_policy_options *options,
                                        struct kv_policy **policy, struct imbrex_error *err)
{
    enum imbrex_status status;
    size_t num = (size_t)options->num_blocks;
    struct arc_policy *arc = calloc(1, sizeof(*arc));
    if (arc == NULL) {
        return error_out_of_memory(err, "the policy arc", sizeof(*arc));
    }
    arc->base.functions = &functions;
    arc->num_blocks = options->num_blocks;
    arc->idle[0] = BLOCK_LIST_EMPTY;
    arc->idle[1] = BLOCK_LIST_EMPTY;
    TRY_OR_FAIL(ghost_list_init(options->num_blocks, &arc->ghosts[0], err));
    TRY_OR_FAIL(ghost_list_init(2 * options->num_blocks, &arc->ghosts[1], err));
    arc->links.previous = calloc(num, sizeof(*arc->links.previous));
    arc->links.next = calloc(num, sizeof(*arc->links.next));
    arc->is_again = calloc(num, sizeof(*arc->is_again));
    arc->is_idle = calloc(num, sizeof(*arc->is_idle));
    if (arc->links.previous == NULL || arc->links.next == NULL || arc->is_again == NULL ||
        arc->is_idle == NULL) {
        status = error_out_of_memory(err, "the policy arc", num * sizeof(int32_t));
        goto fail;
    }
    *policy = &arc->base;
    return IMBREX_STATUS_OK;

fail:
    arc_destroy(&arc->base);
    return status;
}
