/* SPDX-License-Identifier: Apache-2.0 */
/* `s3fifo`: a small queue of a tenth of the blocks for what is new, a main queue for what was used
 * again, and the keys of what left the small one, so that what comes back goes to the main one.
 * Source: FIFO queues are all you need for cache eviction, SOSP 2023, sections 4.1 and 4.2.
 *
 * A block in use cannot go. One that is met in use at the front of a queue is taken out of it, and
 * joins the back of the main queue when it is idle: it has been used while it moved forward. */
#include <stdlib.h>

#include "kv/block_list.h"
#include "kv/ghost_list.h"
#include "kv/kv_policy.h"

enum s3fifo_place { NOWHERE, SMALL, MAIN, SET_ASIDE };

/* Uses are counted up to MAX_USES; a block of the small queue with more than one moves on. */
enum { MAX_USES = 3, SMALL_SHARE = 10 };

struct s3fifo_policy {
    struct kv_policy base;
    struct block_links links;
    struct block_list small, main; /* oldest first */
    struct ghost_list ghosts;
    unsigned char *num_uses; /* [num_blocks] */
    unsigned char *place;    /* [num_blocks] enum s3fifo_place */
    bool *is_idle;           /* [num_blocks] */
    int32_t num_blocks;
};

static struct s3fifo_policy *self(struct kv_policy *policy)
{
    return (struct s3fifo_policy *)policy;
}

static void s3fifo_destroy(struct kv_policy *policy)
{
    struct s3fifo_policy *s3fifo = self(policy);
    ghost_list_deinit(&s3fifo->ghosts);
    free(s3fifo->links.previous);
    free(s3fifo->links.next);
    free(s3fifo->num_uses);
    free(s3fifo->place);
    free(s3fifo->is_idle);
    free(s3fifo);
}

static void take_out(struct s3fifo_policy *s3fifo, int32_t block_idx)
{
    if (s3fifo->place[block_idx] == SMALL) {
        block_list_remove(&s3fifo->small, s3fifo->links, block_idx);
    } else if (s3fifo->place[block_idx] == MAIN) {
        block_list_remove(&s3fifo->main, s3fifo->links, block_idx);
    }
    s3fifo->place[block_idx] = NOWHERE;
}

static void append(struct s3fifo_policy *s3fifo, enum s3fifo_place place, int32_t block_idx)
{
    block_list_append(place == SMALL ? &s3fifo->small : &s3fifo->main, s3fifo->links, block_idx);
    s3fifo->place[block_idx] = (unsigned char)place;
}

static void s3fifo_insert(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                          int64_t now_ns)
{
    struct s3fifo_policy *s3fifo = self(policy);
    bool was_here = ghost_list_take(&s3fifo->ghosts, kv_cache_key_hash(policy->cache, block_idx));
    (void)request_idx;
    (void)now_ns;
    s3fifo->num_uses[block_idx] = 0;
    s3fifo->is_idle[block_idx] = false;
    append(s3fifo, was_here ? MAIN : SMALL, block_idx);
}

static void s3fifo_hit(struct kv_policy *policy, int32_t block_idx, int32_t request_idx,
                       int64_t now_ns)
{
    struct s3fifo_policy *s3fifo = self(policy);
    (void)request_idx;
    (void)now_ns;
    if (s3fifo->num_uses[block_idx] < MAX_USES) {
        s3fifo->num_uses[block_idx]++;
    }
}

static void s3fifo_idle(struct kv_policy *policy, int32_t block_idx, int64_t now_ns)
{
    struct s3fifo_policy *s3fifo = self(policy);
    (void)now_ns;
    s3fifo->is_idle[block_idx] = true;
    if (s3fifo->place[block_idx] == SET_ASIDE) {
        append(s3fifo, MAIN, block_idx);
    }
}

static void s3fifo_busy(struct kv_policy *policy, int32_t block_idx)
{
    self(policy)->is_idle[block_idx] = false;
}

static void s3fifo_evict(struct kv_policy *policy, int32_t block_idx)
{
    struct s3fifo_policy *s3fifo = self(policy);
    if (s3fifo->place[block_idx] == SMALL) {
        ghost_list_add(&s3fifo->ghosts, kv_cache_key_hash(policy->cache, block_idx));
    }
    take_out(s3fifo, block_idx);
    s3fifo->is_idle[block_idx] = false;
}

/* Looks at the front of a queue: the block there may go, or moves. */
static bool may_go(struct s3fifo_policy *s3fifo, enum s3fifo_place place, int32_t block_idx)
{
    if (!s3fifo->is_idle[block_idx]) {
        take_out(s3fifo, block_idx);
        s3fifo->place[block_idx] = SET_ASIDE;
        return false;
    }
    if (place == SMALL && s3fifo->num_uses[block_idx] > 1) {
        take_out(s3fifo, block_idx);
        append(s3fifo, MAIN, block_idx);
        s3fifo->num_uses[block_idx] = 0;
        return false;
    }
    if (place == MAIN && s3fifo->num_uses[block_idx] > 0) {
        take_out(s3fifo, block_idx);
        append(s3fifo, MAIN, block_idx);
        s3fifo->num_uses[block_idx]--;
        return false;
    }
    return true;
}

/* Ends: each step takes a block out of the small queue, sets one aside, or lowers its uses. */
static int32_t s3fifo_victim(struct kv_policy *policy, int64_t now_ns)
{
    struct s3fifo_policy *s3fifo = self(policy);
    int32_t max_small = s3fifo->num_blocks / SMALL_SHARE;
    (void)now_ns;
    while (s3fifo->small.first >= 0 || s3fifo->main.first >= 0) {
        enum s3fifo_place place = s3fifo->main.first < 0 || (s3fifo->small.first >= 0 &&
                                                             s3fifo->small.num_members > max_small)
                                      ? SMALL
                                      : MAIN;
        int32_t block_idx = place == SMALL ? s3fifo->small.first : s3fifo->main.first;
        if (may_go(s3fifo, place, block_idx)) {
            return block_idx;
        }
    }
    return -1;
}

static size_t s3fifo_state_bytes(const struct kv_policy *policy)
{
    const struct s3fifo_policy *s3fifo = (const struct s3fifo_policy *)policy;
    return sizeof(*s3fifo) + ghost_list_bytes(&s3fifo->ghosts) +
           (size_t)s3fifo->num_blocks * (2 * sizeof(int32_t) + 2 + sizeof(bool));
}

static const struct kv_policy_functions functions = {
    .name = "s3fifo",
    .destroy = s3fifo_destroy,
    .insert = s3fifo_insert,
    .hit = s3fifo_hit,
    .idle = s3fifo_idle,
    .busy = s3fifo_busy,
    .evict = s3fifo_evict,
    .victim = s3fifo_victim,
    .state_bytes = s3fifo_state_bytes,
};

enum imbrex_status kv_policy_s3fifo_create(const struct kv_policy_options *options,
                                           struct kv_policy **policy, struct imbrex_error *err)
{
    enum imbrex_status status;
    size_t num = (size_t)options->num_blocks;
    struct s3fifo_policy *s3fifo = calloc(1, sizeof(*s3fifo));
    if (s3fifo == NULL) {
        return error_out_of_memory(err, "the policy s3fifo", sizeof(*s3fifo));
    }
    s3fifo->base.functions = &functions;
    s3fifo->num_blocks = options->num_blocks;
    s3fifo->small = BLOCK_LIST_EMPTY;
    s3fifo->main = BLOCK_LIST_EMPTY;
    TRY_OR_FAIL(ghost_list_init(options->num_blocks, &s3fifo->ghosts, err));
    s3fifo->links.previous = calloc(num, sizeof(*s3fifo->links.previous));
    s3fifo->links.next = calloc(num, sizeof(*s3fifo->links.next));
    s3fifo->num_uses = calloc(num, sizeof(*s3fifo->num_uses));
    s3fifo->place = calloc(num, sizeof(*s3fifo->place));
    s3fifo->is_idle = calloc(num, sizeof(*s3fifo->is_idle));
    if (s3fifo->links.previous == NULL || s3fifo->links.next == NULL || s3fifo->num_uses == NULL ||
        s3fifo->place == NULL || s3fifo->is_idle == NULL) {
        status = error_out_of_memory(err, "the policy s3fifo", num * sizeof(int32_t));
        goto fail;
    }
    *policy = &s3fifo->base;
    return IMBREX_STATUS_OK;

fail:
    s3fifo_destroy(&s3fifo->base);
    return status;
}
