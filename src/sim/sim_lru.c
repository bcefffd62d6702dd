/* SPDX-License-Identifier: Apache-2.0 */
/* Idle blocks in one list, oldest first; a request that ends appends its blocks, tails first. A
 * block never becomes idle before those behind it, so the oldest one is always a leaf. */
#include <stdlib.h>

#include "sim/sim_store.h"

#define ABSENT (-1)

struct sim_lru {
    struct sim_store base;    /* users: ABSENT, 0 while idle */
    int32_t *previous, *next; /* [num_nodes + 1] while idle; the last one is the list's ends */
    int32_t num_resident;
};

static void unlink_block(struct sim_lru *lru, int32_t node)
{
    lru->next[lru->previous[node]] = lru->next[node];
    lru->previous[lru->next[node]] = lru->previous[node];
}

static enum imbrex_status lru_admit(struct sim_store *store, int32_t request_idx, int64_t now_ns,
                                    struct sim_found *found, struct imbrex_error *err)
{
    struct sim_lru *lru = (struct sim_lru *)store;
    const int32_t *path = sim_trace_path(store->trace, request_idx);
    int32_t num_blocks = sim_store_num_blocks(store, request_idx), ends = store->trace->num_nodes;
    int32_t i = 0;

    (void)now_ns;
    (void)err;
    for (; i < num_blocks && store->users[path[i]] != ABSENT; i++) {
        if (store->users[path[i]]++ == 0) {
            unlink_block(lru, path[i]);
            store->num_used++;
        }
    }
    *found = (struct sim_found){.num_hits = i};
    for (; i < num_blocks; i++) {
        if (lru->num_resident == store->capacity) {
            int32_t victim = lru->next[ends];
            unlink_block(lru, victim);
            store->users[victim] = ABSENT;
            store->num_evicted++;
            lru->num_resident--;
        }
        store->users[path[i]] = 1;
        store->num_used++;
        lru->num_resident++;
    }
    return IMBREX_STATUS_OK;
}

static void lru_finish(struct sim_store *store, int32_t request_idx, int64_t now_ns)
{
    struct sim_lru *lru = (struct sim_lru *)store;
    const int32_t *path = sim_trace_path(store->trace, request_idx);
    int32_t ends = store->trace->num_nodes;

    (void)now_ns;
    for (int32_t i = sim_store_num_blocks(store, request_idx) - 1; i >= 0; i--) {
        int32_t node = path[i];
        if (--store->users[node] == 0) {
            lru->previous[node] = lru->previous[ends];
            lru->next[node] = ends;
            lru->next[lru->previous[ends]] = node;
            lru->previous[ends] = node;
            store->num_used--;
        }
    }
}

static void lru_destroy(struct sim_store *store)
{
    struct sim_lru *lru = (struct sim_lru *)store;

    free(store->users);
    free(lru->previous);
    free(lru->next);
    free(lru);
}

static const struct sim_store_functions lru_functions = {
    .destroy = lru_destroy,
    .admit = lru_admit,
    .finish = lru_finish,
};

enum imbrex_status sim_lru_create(const struct sim_trace *trace, int32_t capacity,
                                  struct sim_store **store, struct imbrex_error *err)
{
    struct sim_lru *lru = calloc(1, sizeof(*lru));
    size_t num_nodes = (size_t)trace->num_nodes + 1;

    if (lru == NULL) {
        return error_out_of_memory(err, "lru", sizeof(*lru));
    }
    lru->base =
        (struct sim_store){.functions = &lru_functions, .trace = trace, .capacity = capacity};
    lru->base.users = malloc(num_nodes * sizeof(int32_t));
    lru->previous = malloc(num_nodes * sizeof(int32_t));
    lru->next = malloc(num_nodes * sizeof(int32_t));
    if (lru->base.users == NULL || lru->previous == NULL || lru->next == NULL) {
        lru_destroy(&lru->base);
        return error_out_of_memory(err, "lru", 3 * num_nodes * sizeof(int32_t));
    }
    for (int32_t i = 0; i < trace->num_nodes; i++) {
        lru->base.users[i] = ABSENT;
    }
    lru->previous[trace->num_nodes] = trace->num_nodes;
    lru->next[trace->num_nodes] = trace->num_nodes;
    *store = &lru->base;
    return IMBREX_STATUS_OK;
}
