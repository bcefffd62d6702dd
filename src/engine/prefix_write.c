/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/prefix_write.h"

#include <assert.h>
#include <stdlib.h>

#include "kv/block_list.h"

/* Copies are given for about as long as a step takes: there is no other moment to give more. */
#define HORIZON_NS INT64_C(10000000)
/* An engine with nothing to do looks so often, what is below being busy; and up to so seldom while
 * a server is not there. */
#define MIN_DUE_NS INT64_C(1000000)
#define MAX_DUE_NS INT64_C(1000000000)

struct prefix_write {
    struct prefix_cache *cache;
    struct kv_tiers *tiers;
    struct block_links links; /* [num_blocks] */
    struct block_list line;   /* blocks, the oldest first */
    bool *is_in_line;         /* [num_blocks] */
    int32_t num_blocks;
    int64_t share_ns;      /* of the clock, that a block takes if it takes its share of the link */
    int64_t busy_until_ns; /* the end of the last copy's share */
    int64_t due_ns, wait_ns;
};

enum imbrex_status prefix_write_create(struct prefix_cache *cache, struct kv_tiers *tiers,
                                       int32_t num_blocks, int64_t block_ns,
                                       struct prefix_write **write, struct imbrex_error *err)
{
    size_t count = (size_t)num_blocks;
    struct prefix_write *created = calloc(1, sizeof(*created));
    assert(num_blocks >= 1 && block_ns > 0);
    if (created == NULL) {
        return error_out_of_memory(err, "the write-through", sizeof(*created));
    }
    *created = (struct prefix_write){
        .cache = cache,
        .tiers = tiers,
        .links.previous = calloc(count, sizeof(*created->links.previous)),
        .links.next = calloc(count, sizeof(*created->links.next)),
        .line = BLOCK_LIST_EMPTY,
        .is_in_line = calloc(count, sizeof(*created->is_in_line)),
        .num_blocks = num_blocks,
        .share_ns = block_ns * 100 / PREFIX_WRITE_PERCENT,
        .due_ns = INT64_MAX,
        .wait_ns = MIN_DUE_NS,
    };
    if (created->links.previous == NULL || created->links.next == NULL ||
        created->is_in_line == NULL) {
        prefix_write_destroy(created);
        return error_out_of_memory(err, "the write-through", count * sizeof(int32_t));
    }
    *write = created;
    return IMBREX_STATUS_OK;
}

void prefix_write_destroy(struct prefix_write *write)
{
    if (write != NULL) {
        free(write->links.previous);
        free(write->links.next);
        free(write->is_in_line);
        free(write);
    }
}

void prefix_write_add(struct prefix_write *write, int32_t block_idx)
{
    if (write != NULL && !write->is_in_line[block_idx]) {
        block_list_append(&write->line, write->links, block_idx);
        write->is_in_line[block_idx] = true;
    }
}

void prefix_write_forget(struct prefix_write *write, int32_t block_idx)
{
    if (write != NULL && write->is_in_line[block_idx]) {
        block_list_remove(&write->line, write->links, block_idx);
        write->is_in_line[block_idx] = false;
    }
}

/* Gives what may be given now. Returns how many blocks left the line. */
static int32_t give(struct prefix_write *write, int64_t now_ns)
{
    const struct kv_cache *cache = write->cache->cache;
    int32_t num_given = 0;
    while (write->line.first != -1 && write->busy_until_ns - now_ns <= HORIZON_NS) {
        int32_t block_idx = write->line.first;
        if (!kv_tiers_write_through(write->tiers, kv_cache_key(cache, block_idx),
                                    kv_cache_token_ids(cache, block_idx), block_idx)) {
            break;
        }
        prefix_write_forget(write, block_idx);
        write->busy_until_ns =
            (write->busy_until_ns > now_ns ? write->busy_until_ns : now_ns) + write->share_ns;
        num_given++;
    }
    return num_given;
}

void prefix_write_look(struct prefix_write *write)
{
    if (write == NULL) {
        return;
    }
    int64_t now_ns = write->cache->now_ns, block_ns = kv_tiers_block_ns(write->tiers);
    if (block_ns > 0) {
        write->share_ns = block_ns * 100 / PREFIX_WRITE_PERCENT;
    }
    int32_t num_given = give(write, now_ns);
    /* What fails here fails again before the next step, which says so. */
    if (num_given > 0 && kv_tiers_start(write->tiers) != IMBREX_STATUS_OK) {
        write->due_ns = INT64_MAX;
        return;
    }
    if (write->line.first == -1 && !kv_tiers_is_writing(write->tiers)) {
        write->due_ns = INT64_MAX;
        return;
    }
    if (num_given > 0 || kv_tiers_is_writing(write->tiers)) {
        write->wait_ns = MIN_DUE_NS;
    } else {
        write->wait_ns = write->wait_ns < MAX_DUE_NS / 2 ? 2 * write->wait_ns : MAX_DUE_NS;
    }
    write->due_ns = now_ns + write->wait_ns;
}

int64_t prefix_write_due_ns(const struct prefix_write *write)
{
    return write != NULL ? write->due_ns : INT64_MAX;
}

bool prefix_write_check(const struct prefix_write *write)
{
    int32_t num_members = 0;
    if (write == NULL) {
        return true;
    }
    for (int32_t i = 0; i < write->num_blocks; i++) {
        const struct kv_key *key = kv_cache_key(write->cache->cache, i);
        if (write->is_in_line[i] && !kv_cache_has(write->cache->cache, key)) {
            return false;
        }
        num_members += write->is_in_line[i];
    }
    return num_members == write->line.num_members;
}
