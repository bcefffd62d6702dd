/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/predictive_guard.h"

#include <stdlib.h>

#define MAX_REST (INT64_C(1) << 30)
/* It falls when lru leads by this share of the blocks asked for and this share of its own hits. */
static const double lead_of_asked = 0.002, lead_of_hits = 0.01;

enum imbrex_status predictive_guard_init(const struct kv_predictive_knobs *knobs,
                                         int32_t num_blocks, struct predictive_guard *guard,
                                         struct imbrex_error *err)
{
    struct predictive_guard created = {
        .idle = BLOCK_LIST_EMPTY,
        .unused = BLOCK_LIST_EMPTY,
        .num_blocks = num_blocks,
        .horizon = (int64_t)knobs->guard_horizon,
        .growth = (int64_t)knobs->guard_growth,
        .lead = knobs->guard_lead,
        .next_rest = (int64_t)knobs->guard_horizon,
    };
    size_t num = (size_t)num_blocks;

    TRY(key_table_init(num_blocks, &created.table, err));
    created.links.previous = calloc(num, sizeof(*created.links.previous));
    created.links.next = calloc(num, sizeof(*created.links.next));
    created.keys = calloc(num, sizeof(*created.keys));
    created.num_users = calloc(num, sizeof(*created.num_users));
    if (created.links.previous == NULL || created.links.next == NULL || created.keys == NULL ||
        created.num_users == NULL) {
        predictive_guard_deinit(&created);
        return error_out_of_memory(err, "the keys of the shadow cache",
                                   num * sizeof(*created.keys));
    }
    for (int32_t i = 0; i < num_blocks; i++) {
        block_list_append(&created.unused, created.links, i);
    }
    *guard = created;
    return IMBREX_STATUS_OK;
}

void predictive_guard_deinit(struct predictive_guard *guard)
{
    key_table_deinit(&guard->table);
    free(guard->links.previous);
    free(guard->links.next);
    free(guard->keys);
    free(guard->num_users);
    *guard = (struct predictive_guard){.idle = BLOCK_LIST_EMPTY, .unused = BLOCK_LIST_EMPTY};
}

size_t predictive_guard_bytes(const struct predictive_guard *guard)
{
    return key_table_bytes(&guard->table) +
           (size_t)guard->num_blocks * (3 * sizeof(int32_t) + sizeof(*guard->keys));
}

/* -1: everything is in use. */
static int32_t make_entry(struct predictive_guard *guard, uint64_t key)
{
    int32_t entry = guard->unused.first;
    if (entry >= 0) {
        block_list_remove(&guard->unused, guard->links, entry);
    } else if (guard->idle.first >= 0) {
        entry = guard->idle.first;
        block_list_remove(&guard->idle, guard->links, entry);
        key_table_remove(&guard->table, guard->keys[entry]);
    } else {
        return -1;
    }
    guard->keys[entry] = key;
    guard->num_users[entry] = 0;
    (void)key_table_put(&guard->table, key, entry);
    return entry;
}

void predictive_guard_use(struct predictive_guard *guard, uint64_t key, bool was_found)
{
    int32_t entry = key_table_find(&guard->table, key);

    guard->num_asked += 1.0;
    guard->num_own += was_found;
    guard->num_lru += entry >= 0;
    if (entry < 0) {
        entry = make_entry(guard, key);
        if (entry < 0) {
            return;
        }
    } else if (guard->num_users[entry] == 0) {
        block_list_remove(&guard->idle, guard->links, entry);
    }
    guard->num_users[entry]++;
}

void predictive_guard_release(struct predictive_guard *guard, uint64_t key)
{
    int32_t entry = key_table_find(&guard->table, key);
    if (entry < 0 || guard->num_users[entry] == 0) {
        return;
    }
    guard->num_users[entry]--;
    if (guard->num_users[entry] == 0) {
        block_list_append(&guard->idle, guard->links, entry);
    }
}

bool predictive_guard_judge(struct predictive_guard *guard)
{
    double forgetting = 1.0 - 1.0 / (double)guard->horizon;
    guard->num_own *= forgetting;
    guard->num_lru *= forgetting;
    guard->num_asked *= forgetting;
    if (guard->follows_lru) {
        if (--guard->num_rest > 0) {
            return false;
        }
        guard->follows_lru = false;
        guard->num_trusted = 0;
        guard->num_own = guard->num_lru = guard->num_asked = 0.0;
        return true;
    }
    guard->num_trusted++;
    /* Two horizons without a fall: what went wrong before is over. */
    if (guard->num_trusted == 2 * guard->next_rest && guard->next_rest > guard->horizon) {
        guard->next_rest /= guard->growth;
        guard->num_trusted = 0;
    }
    double lead = guard->num_lru - guard->num_own;
    double floor = 16.0 + (double)guard->num_blocks / 64.0;
    double allowed = lead_of_asked * guard->num_asked + lead_of_hits * guard->num_own;
    if (lead <= guard->lead * floor || lead <= guard->lead * allowed) {
        return false;
    }
    guard->follows_lru = true;
    guard->num_rest = guard->next_rest;
    if (guard->next_rest < MAX_REST / guard->growth) {
        guard->next_rest *= guard->growth;
    }
    return true;
}
